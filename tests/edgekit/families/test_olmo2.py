from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import pytest

from edgekit.errors import UnsupportedError
from edgekit.rope import RopeSpec
from edgekit.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, NormSpec

ReadSpec: TypeAlias = Callable[..., DecoderSpec]

OLMO2 = "OLMo-2-0425-1B"


def test_olmo_2(read_spec: ReadSpec) -> None:
    norm = NormSpec(kind="rms", epsilon=1e-6)
    layer = LayerSpec(
        attention=AttentionSpec(
            num_heads=16,
            num_kv_heads=16,
            key_dim=128,
            value_dim=128,
            scale=128**-0.5,
            qkv_bias=False,
            o_bias=False,
            rope=RopeSpec(theta=500000.0, rotary_dim=128),
            qk_norm=norm,
            qk_norm_scope="all_heads",
        ),
        mlp=MlpSpec(width=8192, activation="silu", gated=True, bias=False),
        norm=norm,
        norm_placement="post",
    )
    spec = read_spec(OLMO2)
    assert spec == DecoderSpec(
        family="olmo2",
        hidden_size=2048,
        vocab_size=100352,
        max_positions=4096,
        layers=(layer,) * 16,
        norm=norm,
        tie_word_embeddings=False,
        eos_token_ids=(100257,),
    )
    assert spec.tensor_shapes()["layers.0.self_attn.q_norm.weight"] == (2048,)


def test_the_norm_of_grouped_keys_is_as_wide_as_they_are(read_spec: ReadSpec) -> None:
    shapes = read_spec(OLMO2, num_key_value_heads=4).tensor_shapes()
    assert shapes["layers.0.self_attn.q_norm.weight"] == (2048,)
    assert shapes["layers.0.self_attn.k_norm.weight"] == (512,)


def test_all_four_projections_have_biases_or_none(read_spec: ReadSpec) -> None:
    attention = read_spec(OLMO2, attention_bias=True).layers[0].attention
    assert (attention.qkv_bias, attention.o_bias) == (True, True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mlp_bias": True}, r"olmo2 with mlp_bias = True is not supported; supported: False"),
        ({"sliding_window": 4096}, r"olmo2 with sliding_window = 4096 is not supported; supported: None"),
        ({"layer_types": ["sliding_attention"] * 16}, r"olmo2 with layer_types = .* supported: full_attention"),
        ({"num_experts": 64}, r"olmo2 with num_experts = 64"),
        ({"model_type": "olmo3"}, r"model_type 'olmo3'; known: .*olmo2.* \(did you mean 'olmo2'"),
    ],
)
def test_what_olmo2_does_not_implement_is_refused_by_name(
    changes: dict[str, Any], message: str, read_spec: ReadSpec
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        read_spec(OLMO2, **changes)
