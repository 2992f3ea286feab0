from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest

from edgekit.checkpoint import open_checkpoint
from edgekit.errors import CorruptArtifactError, UnsupportedError
from edgekit.families.phi3 import rows
from edgekit.rope import LongRopeScaling, RopeSpec
from edgekit.spec import AttentionSpec, CacheGroup, DecoderSpec, LayerSpec, MlpSpec, NormSpec

ReadSpec: TypeAlias = Callable[..., DecoderSpec]
TinyCheckpoint: TypeAlias = Callable[[str], Path]
HuggingFaceModel: TypeAlias = Callable[[Path], Any]

PHI3, PHI4 = "Phi-3-mini-4k-instruct", "Phi-4-mini-instruct"


def test_phi_3_mini(read_spec: ReadSpec) -> None:
    norm = NormSpec(kind="rms", epsilon=1e-5)
    layer = LayerSpec(
        attention=AttentionSpec(
            num_heads=32,
            num_kv_heads=32,
            key_dim=96,
            value_dim=96,
            scale=96**-0.5,
            qkv_bias=False,
            o_bias=False,
            rope=RopeSpec(theta=10000.0, rotary_dim=96),
            sliding_window=2047,
        ),
        mlp=MlpSpec(width=8192, activation="silu", gated=True, bias=False),
        norm=norm,
    )
    assert read_spec(PHI3) == DecoderSpec(
        family="phi3",
        hidden_size=3072,
        vocab_size=32064,
        max_positions=4096,
        layers=(layer,) * 32,
        norm=norm,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_ids=(32000,),
    )


def test_phi_4_mini(read_spec: ReadSpec) -> None:
    spec = read_spec(PHI4)
    attention = spec.layers[0].attention
    assert (attention.num_heads, attention.num_kv_heads, attention.key_dim) == (24, 8, 128)
    assert (spec.max_positions, spec.tie_word_embeddings, spec.depends_on_length) == (131072, True, True)
    rope = attention.rope
    assert rope is not None
    assert rope.rotary_dim == 96
    assert rope.attention_factor == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)))
    assert isinstance(rope.scaling, LongRopeScaling)
    assert rope.scaling.short_factors == (1.0,) * 48
    assert rope.scaling.long_factors[:2] == (1.0, 1.118320672)
    assert rope.scaling.long_factors[-1] == 47.77
    assert rope.scaling.original_max_positions == 4096


@pytest.mark.parametrize("length", [1, 4096, 4097, 131072])
def test_the_rotations_of_phi_4_mini_are_those_of_transformers(length: int, read_spec: ReadSpec) -> None:
    import json

    import torch
    from transformers import Phi3Config
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

    values = json.loads((Path(__file__).parent / "published" / f"{PHI4}.json").read_text(encoding="utf-8"))
    oracle: Any = Phi3RotaryEmbedding(Phi3Config(**values))
    oracle(torch.zeros(1), torch.tensor([[0, length - 1]]))
    rope = read_spec(PHI4).layers[0].attention.rope
    assert rope is not None
    np.testing.assert_allclose(rope.inverse_frequencies(length), oracle.inv_freq.double().numpy(), rtol=2e-6)
    assert rope.attention_factor == pytest.approx(oracle.attention_scaling)


def test_every_layer_has_the_window_or_none(read_spec: ReadSpec) -> None:
    layers = tuple(range(32))
    assert read_spec(PHI3).cache_groups() == (CacheGroup(layers=layers, sliding_window=2047),)
    assert read_spec(PHI3, sliding_window=None).cache_groups() == (CacheGroup(layers=layers),)
    assert read_spec(PHI3, sliding_window=...).cache_groups() == (CacheGroup(layers=layers),)


def test_the_original_context_is_4096_unless_the_config_itself_says_otherwise(read_spec: ReadSpec) -> None:
    scaling = {
        "type": "longrope",
        "short_factor": [1.0] * 48,
        "long_factor": [2.0] * 48,
        "original_max_position_embeddings": 999,
    }
    for changes, wanted in (({}, 4096), ({"original_max_position_embeddings": 2048}, 2048)):
        given = {"original_max_position_embeddings": ..., "rope_scaling": scaling, **changes}
        rope = read_spec(PHI3, **given).layers[0].attention.rope
        assert rope is not None
        assert isinstance(rope.scaling, LongRopeScaling)
        assert rope.scaling.original_max_positions == wanted


def test_fused_rows_are_those_that_transformers_slices() -> None:
    # Phi3Attention.forward: qkv[..., :queries], then keys, then values; Phi3MLP.forward: chunk(2) into gate and up.
    norm = NormSpec(kind="rms", epsilon=1e-5)
    layer = LayerSpec(
        attention=AttentionSpec(
            num_heads=4,
            num_kv_heads=2,
            key_dim=3,
            value_dim=3,
            scale=1.0,
            qkv_bias=False,
            o_bias=False,
            rope=None,
        ),
        mlp=MlpSpec(width=5, activation="silu", gated=True, bias=False),
        norm=norm,
    )
    wanted = {
        "q_proj": range(12),
        "k_proj": range(12, 18),
        "v_proj": range(18, 24),
        "gate_proj": range(5),
        "up_proj": range(5, 10),
    }
    for projection, stored in wanted.items():
        got = rows(layer, projection)
        assert got is not None
        np.testing.assert_array_equal(got, np.array(stored))
    assert rows(layer, "o_proj") is None
    assert rows(layer, "down_proj") is None


def test_weights_are_parts_of_the_fused_ones(tiny_checkpoint: TinyCheckpoint, hugging_face: HuggingFaceModel) -> None:
    path = tiny_checkpoint("phi3")
    layer = hugging_face(path).model.layers[1]
    qkv = layer.self_attn.qkv_proj.weight.detach().numpy()
    gate, up = (part.detach().numpy() for part in layer.mlp.gate_up_proj.weight.chunk(2))
    with open_checkpoint(path) as checkpoint:
        for name, wanted in (
            ("self_attn.q_proj", qkv[:64]),
            ("self_attn.k_proj", qkv[64:96]),
            ("self_attn.v_proj", qkv[96:]),
            ("mlp.gate_proj", gate),
            ("mlp.up_proj", up),
        ):
            np.testing.assert_array_equal(checkpoint.tensor(f"layers.1.{name}.weight"), wanted)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, r"phi3 with attention_bias = True is not supported; supported: False"),
        ({"mlp_bias": True}, r"phi3 with mlp_bias = True"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, r"phi3 with rope_type = 'linear' .* default, longrope"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, r"phi3 with rope_type = 'dynamic' .* default, longrope"),
        (
            {"rope_scaling": {"type": "yarn", "short_factor": [1.0] * 48}},
            r"parameter 'short_factor' for rope_type 'yarn",
        ),
        ({"partial_rotary_factor": 0.99}, r"phi3 with rotary width = 95 .* supported: even, up to the head's 96"),
        ({"layer_types": ["full_attention"] * 32}, r"phi3 with layer_types = .* supported: sliding_attention"),
        ({"num_local_experts": 16}, r"phi3 with num_local_experts = 16"),
        ({"model_type": "phimoe"}, r"model_type 'phimoe' is a mixture of experts; supported: dense models"),
        ({"model_type": "phi3small"}, r"model_type 'phi3small' has block-sparse attention; supported: .* 'phi3'"),
        ({"model_type": "phi3_v"}, r"model_type 'phi3_v' has parts for images or sound; supported: text-only"),
    ],
)
def test_what_phi_3_does_not_implement_is_refused_by_name(
    changes: dict[str, Any], message: str, read_spec: ReadSpec
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        read_spec(PHI3, **changes)


def test_factors_for_another_width_are_an_error(read_spec: ReadSpec) -> None:
    with pytest.raises(CorruptArtifactError, match=r"a phi3 config has 48 numbers in short_factor; expected 64"):
        read_spec(PHI4, partial_rotary_factor=1.0)
