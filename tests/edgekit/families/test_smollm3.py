from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec
import pytest

from edgekit.errors import CorruptArtifactError, UnsupportedError
from edgekit.rope import RopeSpec, YarnScaling
from edgekit.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, NormSpec

ReadSpec: TypeAlias = Callable[..., DecoderSpec]

SMOLLM3 = "SmolLM3-3B"
ROPE = RopeSpec(theta=5e6, rotary_dim=128)


def _rotates(spec: DecoderSpec) -> list[bool]:
    return [layer.attention.rope is not None for layer in spec.layers]


def _windows(spec: DecoderSpec) -> list[int | None]:
    return [layer.attention.sliding_window for layer in spec.layers]


def test_smollm3(read_spec: ReadSpec) -> None:
    norm = NormSpec(kind="rms", epsilon=1e-6)
    layer = LayerSpec(
        attention=AttentionSpec(
            num_heads=16,
            num_kv_heads=4,
            key_dim=128,
            value_dim=128,
            scale=128**-0.5,
            qkv_bias=False,
            o_bias=False,
            rope=ROPE,
        ),
        mlp=MlpSpec(width=11008, activation="silu", gated=True, bias=False),
        norm=norm,
    )
    still = msgspec.structs.replace(layer, attention=msgspec.structs.replace(layer.attention, rope=None))
    assert read_spec(SMOLLM3) == DecoderSpec(
        family="smollm3",
        hidden_size=2048,
        vocab_size=128256,
        max_positions=65536,
        layers=(layer, layer, layer, still) * 9,
        norm=norm,
        tie_word_embeddings=True,
        eos_token_ids=(128012,),
    )


_ABSENT = {"no_rope_layers": ..., "no_rope_layer_interval": ..., "layer_types": ...}
_SLIDING, _FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"no_rope_layer_interval": 3},
        {"no_rope_layer_interval": 1},
        {"no_rope_layer_interval": 99},
        {"no_rope_layers": None, "no_rope_layer_interval": 2},
        {"no_rope_layers": [0, 1, 1, 0, 1, 0, 1, 1, 1], "no_rope_layer_interval": 2},
        {"no_rope_layers": [1] * 20},
        {"use_sliding_window": True, "sliding_window": 64},
        {"use_sliding_window": True, "sliding_window": None},
        {"use_sliding_window": False, "sliding_window": 64},
        {"use_sliding_window": True, "sliding_window": 64, "no_rope_layers": [0, 1, 1] * 3},
        {"use_sliding_window": True, "sliding_window": 64, "layer_types": [_SLIDING, _FULL, _FULL] * 3},
        {"use_sliding_window": True, "sliding_window": 64, "layer_types": [_FULL] * 9},
    ],
)
def test_rope_and_windows_are_in_the_layers_that_transformers_derives(
    changes: dict[str, Any], read_spec: ReadSpec
) -> None:
    from transformers import SmolLM3Config
    from transformers.models.smollm3.modeling_smollm3 import SmolLM3Attention

    values = {**_ABSENT, "num_hidden_layers": 9, **changes}
    oracle = SmolLM3Config(**{key: value for key, value in values.items() if value is not ...}, hidden_size=16)
    wanted = [SmolLM3Attention(oracle, index) for index in range(9)]
    spec = read_spec(SMOLLM3, **values)
    assert _rotates(spec) == [bool(attention.use_rope) for attention in wanted]
    assert _windows(spec) == [attention.sliding_window for attention in wanted]


def test_layers_with_and_without_a_window_have_caches_of_their_own(read_spec: ReadSpec) -> None:
    spec = read_spec(SMOLLM3, use_sliding_window=True, sliding_window=64, layer_types=..., num_hidden_layers=8)
    groups = {group.sliding_window: group.layers for group in spec.cache_groups()}
    assert groups == {None: (0, 1, 2, 4, 5, 6), 64: (3, 7)}


def test_a_scaled_rope_is_that_of_the_layers_with_one(read_spec: ReadSpec) -> None:
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 65536}
    ropes = {layer.attention.rope for layer in read_spec(SMOLLM3, rope_scaling=scaling).layers}
    (rope,) = ropes - {None}
    assert len(ropes) == 2
    assert rope is not None
    assert rope.scaling == YarnScaling(factor=2.0, original_max_positions=65536)


def test_a_context_that_grows_is_found_whatever_layer_rotates(read_spec: ReadSpec) -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    spec = read_spec(SMOLLM3, rope_scaling=scaling, no_rope_layers=[0, 1], num_hidden_layers=2, layer_types=...)
    assert spec.depends_on_length
    assert spec.max_positions == 2 * 65536
    spec = read_spec(SMOLLM3, rope_scaling=scaling, no_rope_layers=[0, 0], num_hidden_layers=2, layer_types=...)
    assert not spec.depends_on_length
    assert spec.max_positions == 65536


def test_the_base_is_two_million_when_the_config_does_not_say(read_spec: ReadSpec) -> None:
    rope = read_spec(SMOLLM3, rope_theta=...).layers[0].attention.rope
    assert rope is not None
    assert rope.theta == 2e6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": [_SLIDING] * 36}, r"smollm3 with layer_types = 'sliding_attention' .* supported: full_att"),
        (
            {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["chunked_attention"] * 36},
            r"smollm3 with layer_types = 'chunked_attention' .* supported: full_attention, sliding_attention",
        ),
        ({"partial_rotary_factor": 0.5}, r"smollm3 with partial_rotary_factor = 0.5"),
        ({"num_experts": 8}, r"smollm3 with num_experts = 8"),
        ({"model_type": "smolvlm"}, r"model_type 'smolvlm' has parts for images or sound; supported: text-only dec"),
    ],
)
def test_what_smollm3_does_not_implement_is_refused_by_name(
    changes: dict[str, Any], message: str, read_spec: ReadSpec
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        read_spec(SMOLLM3, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"no_rope_layers": [1, 0]}, r"a smollm3 config has 2 no_rope_layers and 36 layers; get the file again"),
        ({"no_rope_layers": []}, r"a smollm3 config has 0 no_rope_layers and 36 layers"),
        ({"no_rope_layers": ["yes"] * 36}, r"Expected `int`, got `str` - at `\$\.no_rope_layers"),
        ({"no_rope_layer_interval": 0}, r"Expected `int` >= 1 - at `\$\.no_rope_layer_interval` \(it is 0\)"),
        ({"layer_types": [_FULL]}, r"a smollm3 config has 1 layer_types and 36 layers"),
    ],
)
def test_what_cannot_be_read_is_named(changes: dict[str, Any], message: str, read_spec: ReadSpec) -> None:
    with pytest.raises(CorruptArtifactError, match=message):
        read_spec(SMOLLM3, **changes)


def test_layers_without_rope_in_a_family_that_rotates_all_are_refused(read_spec: ReadSpec) -> None:
    with pytest.raises(UnsupportedError, match=r"llama with no_rope_layers = \[1, 0\] is not supported"):
        read_spec("SmolLM2-135M", no_rope_layers=[1, 0])
