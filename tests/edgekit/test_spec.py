from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from edgekit.checkpoint import open_checkpoint
from edgekit.compress.decoder import Decoder
from edgekit.rope import DynamicScaling, LinearScaling, LongRopeScaling, RopeScaling, RopeSpec, YarnScaling
from edgekit.spec import (
    ACTIVATIONS,
    Activation,
    AttentionSpec,
    CacheGroup,
    DecoderSpec,
    LayerSpec,
    MlpSpec,
    NormSpec,
)

replace = msgspec.structs.replace

RMS, LAYER_NORM = NormSpec(kind="rms", epsilon=1e-5), NormSpec(kind="layer", epsilon=1e-6)


def _layer(heads: int, kv_heads: int, key_dim: int, value_dim: int, width: int) -> LayerSpec:
    """A layer as pruning leaves it: nothing is like in its neighbours."""
    attention = AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        scale=0.125,
        qkv_bias=heads > 2,
        o_bias=heads <= 2,
        rope=RopeSpec(theta=1e4, rotary_dim=2, scaling=LinearScaling(factor=2.0)),
        qk_norm=RMS if heads > 2 else None,
    )
    mlp = MlpSpec(width=width, activation="gelu_tanh", gated=heads > 2, bias=heads > 2)
    return LayerSpec(attention=attention, mlp=mlp, norm=LAYER_NORM if heads > 2 else RMS, parallel_residual=heads > 2)


@pytest.fixture
def spec() -> DecoderSpec:
    return DecoderSpec(
        family="llama",
        hidden_size=6,
        vocab_size=11,
        max_positions=64,
        layers=(_layer(4, 2, 8, 10, 12), _layer(2, 1, 4, 6, 5)),
        norm=LAYER_NORM,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_ids=(2, 7),
    )


def test_tensor_shapes_follow_each_layer(spec: DecoderSpec) -> None:
    assert spec.tensor_shapes() == {
        "embed_tokens.weight": (11, 6),
        "layers.0.self_attn.q_proj.weight": (32, 6),
        "layers.0.self_attn.q_proj.bias": (32,),
        "layers.0.self_attn.k_proj.weight": (16, 6),
        "layers.0.self_attn.k_proj.bias": (16,),
        "layers.0.self_attn.v_proj.weight": (20, 6),
        "layers.0.self_attn.v_proj.bias": (20,),
        "layers.0.self_attn.o_proj.weight": (6, 40),
        "layers.0.mlp.gate_proj.weight": (12, 6),
        "layers.0.mlp.gate_proj.bias": (12,),
        "layers.0.mlp.up_proj.weight": (12, 6),
        "layers.0.mlp.up_proj.bias": (12,),
        "layers.0.mlp.down_proj.weight": (6, 12),
        "layers.0.mlp.down_proj.bias": (6,),
        "layers.0.input_norm.weight": (6,),
        "layers.0.input_norm.bias": (6,),
        "layers.0.mlp_norm.weight": (6,),
        "layers.0.mlp_norm.bias": (6,),
        "layers.0.self_attn.q_norm.weight": (8,),
        "layers.0.self_attn.k_norm.weight": (8,),
        "layers.1.self_attn.q_proj.weight": (8, 6),
        "layers.1.self_attn.k_proj.weight": (4, 6),
        "layers.1.self_attn.v_proj.weight": (6, 6),
        "layers.1.self_attn.o_proj.weight": (6, 12),
        "layers.1.self_attn.o_proj.bias": (6,),
        "layers.1.mlp.up_proj.weight": (5, 6),
        "layers.1.mlp.down_proj.weight": (6, 5),
        "layers.1.input_norm.weight": (6,),
        "layers.1.mlp_norm.weight": (6,),
        "norm.weight": (6,),
        "norm.bias": (6,),
        "lm_head.weight": (11, 6),
    }


def test_a_tied_model_has_no_head_of_its_own(spec: DecoderSpec) -> None:
    tied = replace(spec, tie_word_embeddings=True)
    assert spec.tensor_shapes().items() - tied.tensor_shapes().items() == {("lm_head.weight", (11, 6))}


def test_the_reference_decoder_has_exactly_these_tensors(spec: DecoderSpec) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in Decoder(spec).state_dict().items()}
    assert shapes == spec.tensor_shapes()


def test_the_tensors_are_as_many_numbers_as_hugging_face_counts(every_tiny_checkpoint: Path, hugging_face: Any) -> None:
    with open_checkpoint(every_tiny_checkpoint) as checkpoint:
        shapes = checkpoint.spec.tensor_shapes().values()
    count = sum(shape[0] * (shape[1] if len(shape) == 2 else 1) for shape in shapes)
    assert count == hugging_face(every_tiny_checkpoint).num_parameters()


def _with_layers(spec: DecoderSpec, **changes: Any) -> DecoderSpec:
    return replace(spec, layers=tuple(replace(layer, **changes) for layer in spec.layers))


def _with_attentions(spec: DecoderSpec, *changes: dict[str, Any]) -> DecoderSpec:
    """Gives one layer per dict of changes, each like the first one otherwise."""
    first = spec.layers[0]
    layers = (replace(first, attention=replace(first.attention, **change)) for change in changes)
    return replace(spec, layers=tuple(layers))


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({}, ("input_norm", "mlp_norm")),
        ({"norm_placement": "post"}, ("attn_output_norm", "mlp_output_norm")),
        ({"norm_placement": "sandwich"}, ("input_norm", "attn_output_norm", "mlp_norm", "mlp_output_norm")),
        ({"parallel_residual": True}, ("input_norm", "mlp_norm")),
        ({"parallel_residual": True, "shared_norm": True}, ("input_norm",)),
    ],
)
def test_a_layer_has_the_norms_of_its_placement_and_no_others(
    changes: dict[str, Any], names: tuple[str, ...], spec: DecoderSpec
) -> None:
    changed = _with_layers(spec, **{"parallel_residual": False, **changes})
    assert changed.layers[0].norm_names() == names
    kinds = {"layers.0": ("weight", "bias"), "layers.1": ("weight",)}  # a LayerNorm and an RMSNorm
    wanted = {f"{layer}.{name}.{part}": (6,) for layer, parts in kinds.items() for name in names for part in parts}
    shapes = changed.tensor_shapes()
    assert {name: shapes[name] for name in shapes if "_norm." in name and "self_attn" not in name} == wanted
    state = {name: tuple(tensor.shape) for name, tensor in Decoder(changed).state_dict().items()}
    assert state == shapes


def test_norms_over_all_heads_are_as_wide_as_the_projections(spec: DecoderSpec) -> None:
    shapes = _with_attentions(spec, {"qk_norm_scope": "all_heads"}).tensor_shapes()
    assert shapes["layers.0.self_attn.q_norm.weight"] == shapes["layers.0.self_attn.q_proj.bias"] == (32,)
    assert shapes["layers.0.self_attn.k_norm.weight"] == shapes["layers.0.self_attn.k_proj.bias"] == (16,)


def test_a_head_may_have_a_bias(spec: DecoderSpec) -> None:
    biased = replace(spec, head_bias=True)
    assert biased.tensor_shapes().items() - spec.tensor_shapes().items() == {("lm_head.bias", (11,))}
    assert tuple(Decoder(biased).state_dict()["lm_head.bias"].shape) == (11,)


def test_layers_of_one_window_share_a_cache_group(spec: DecoderSpec) -> None:
    windows = [8, None, 8, 16, None]
    groups = _with_attentions(spec, *({"sliding_window": window} for window in windows)).cache_groups()
    assert groups == (
        CacheGroup(layers=(0, 2), sliding_window=8),
        CacheGroup(layers=(1, 4)),
        CacheGroup(layers=(3,), sliding_window=16),
    )
    assert spec.cache_groups() == (CacheGroup(layers=(0, 1)),)


def _rope(scaling: RopeScaling | None) -> RopeSpec:
    return RopeSpec(theta=1e4, rotary_dim=4, scaling=scaling)


def _longrope(limit: int) -> RopeSpec:
    return _rope(LongRopeScaling(short_factors=(1.0, 1.0), long_factors=(2.0, 3.0), original_max_positions=limit))


DYNAMIC = _rope(DynamicScaling(factor=2.0, original_max_positions=64))


@pytest.mark.parametrize(
    ("ropes", "depends"),
    [
        ([None], False),
        ([_rope(None), None], False),
        ([_rope(YarnScaling(factor=2.0, original_max_positions=64))], False),
        ([DYNAMIC], True),
        ([None, _rope(None), _longrope(64)], True),
    ],
)
def test_a_model_depends_on_the_length_as_soon_as_one_layer_does(
    ropes: list[RopeSpec | None], depends: bool, spec: DecoderSpec
) -> None:
    assert _with_attentions(spec, *({"rope": rope} for rope in ropes)).depends_on_length is depends


def test_keys_of_a_short_text_are_of_no_use_for_a_long_one(spec: DecoderSpec) -> None:
    ropes = [None, _longrope(64), _longrope(64), _longrope(128), DYNAMIC]
    changed = _with_attentions(spec, *({"rope": rope} for rope in ropes))
    assert [changed.rope_range(length) for length in (1, 64, 65, 128, 129, 1000)] == [0, 0, 1, 1, 2, 2]
    assert spec.rope_range(1000) == 0


def test_a_spec_survives_json(spec: DecoderSpec) -> None:
    decoded = msgspec.json.decode(msgspec.json.encode(spec), type=DecoderSpec)
    assert decoded == spec
    assert hash(decoded) == hash(spec)


def test_the_spec_of_every_model_survives_json(every_tiny_checkpoint: Path) -> None:
    with open_checkpoint(every_tiny_checkpoint) as checkpoint:
        spec = checkpoint.spec
    assert msgspec.json.decode(msgspec.json.encode(spec), type=DecoderSpec) == spec


def test_group_size_is_the_number_of_query_heads_per_kv_head(spec: DecoderSpec) -> None:
    assert [layer.attention.group_size for layer in spec.layers] == [2, 2]
    assert replace(spec.layers[0].attention, num_kv_heads=1).group_size == 4


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("layers", 0, "mlp", "activation"), "swiglu", "'swiglu' - at `$.layers[0].mlp.activation`"),
        (("layers", 1, "norm", "kind"), "group", "'group' - at `$.layers[1].norm.kind`"),
        (("layers", 0, "attention", "num_heads"), 2.5, "got `float` - at `$.layers[0].attention.num_heads`"),
        (("layers", 0, "attention", "alibi"), True, "unknown field `alibi` - at `$.layers[0].attention`"),
        (("layers", 0, "norm_placement"), "middle", "'middle' - at `$.layers[0].norm_placement`"),
        (("layers", 0, "attention", "qk_norm_scope"), "group", "'group' - at `$.layers[0].attention.qk_norm_scope`"),
        (("layers", 1, "attention", "sliding_window"), 0, "`int` >= 1 - at `$.layers[1].attention.sliding_window`"),
        (("vocab_size",), None, "got `null` - at `$.vocab_size`"),
        (("logit_bias",), 2.0, "unknown field `logit_bias`"),
    ],
)
def test_a_spec_with_anything_unknown_is_refused_with_its_place(
    path: tuple[str | int, ...], value: object, message: str, spec: DecoderSpec
) -> None:
    document = json.loads(msgspec.json.encode(spec))
    place = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(msgspec.ValidationError, match=re.escape(message)):
        msgspec.json.decode(json.dumps(document), type=DecoderSpec)


def test_a_spec_cannot_be_changed(spec: DecoderSpec) -> None:
    with pytest.raises(AttributeError):
        spec.hidden_size = 7  # type: ignore[misc]


def test_the_list_of_activations_is_complete() -> None:
    assert Activation.__args__ == ACTIVATIONS  # type: ignore[attr-defined]
