from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import pytest

from edgekit.errors import UnsupportedError
from edgekit.families import family_for
from edgekit.rope import RopeSpec
from edgekit.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, NormSpec

ReadSpec: TypeAlias = Callable[..., DecoderSpec]

PHI2 = "phi-2"


def test_phi_2(read_spec: ReadSpec) -> None:
    norm = NormSpec(kind="layer", epsilon=1e-5)
    layer = LayerSpec(
        attention=AttentionSpec(
            num_heads=32,
            num_kv_heads=32,
            key_dim=80,
            value_dim=80,
            scale=80**-0.5,
            qkv_bias=True,
            o_bias=True,
            rope=RopeSpec(theta=10000.0, rotary_dim=32),
        ),
        mlp=MlpSpec(width=10240, activation="gelu_tanh", gated=False, bias=True),
        norm=norm,
        parallel_residual=True,
        shared_norm=True,
    )
    assert read_spec(PHI2) == DecoderSpec(
        family="phi",
        hidden_size=2560,
        vocab_size=51200,
        max_positions=2048,
        layers=(layer,) * 32,
        norm=norm,
        tie_word_embeddings=False,
        head_bias=True,
        bos_token_id=50256,
        eos_token_ids=(50256,),
    )


def test_half_of_each_head_rotates_when_the_config_does_not_say(read_spec: ReadSpec) -> None:
    rope = read_spec(PHI2, partial_rotary_factor=...).layers[0].attention.rope
    assert rope is not None
    assert rope.rotary_dim == 40


def test_heads_may_share_keys_and_values(read_spec: ReadSpec) -> None:
    attention = read_spec(PHI2, num_key_value_heads=8).layers[0].attention
    assert (attention.num_kv_heads, attention.group_size) == (8, 4)


def test_there_is_one_norm_per_layer_and_a_bias_of_the_head(read_spec: ReadSpec) -> None:
    spec = read_spec(PHI2, num_hidden_layers=1)
    names = {source.name for source in family_for({"model_type": "phi"}).sources(spec).values()}
    assert {name for name in names if "norm" in name} == {
        f"model.{module}.{parameter}"
        for module in ("layers.0.input_layernorm", "final_layernorm")
        for parameter in ("weight", "bias")
    }
    assert {"lm_head.bias", "model.layers.0.self_attn.dense.bias", "model.layers.0.mlp.fc2.bias"} <= names


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qk_layernorm": True}, r"phi with qk_layernorm = True is not supported; supported: False"),
        ({"tie_word_embeddings": True}, r"phi with tie_word_embeddings = True is not supported; supported: False"),
        ({"sliding_window": 2048}, r"phi with sliding_window = 2048"),
        ({"num_local_experts": 4}, r"phi with num_local_experts = 4"),
        ({"partial_rotary_factor": 0.3125}, r"phi with rotary width = 25 .* supported: even"),
        ({"num_key_value_heads": 7}, r"phi with num_key_value_heads = 7 .* divisors of 32"),
        ({"model_type": "phi-msft"}, r"model_type 'phi-msft'; known: .*phi, phi3"),
    ],
)
def test_what_phi_does_not_implement_is_refused_by_name(
    changes: dict[str, Any], message: str, read_spec: ReadSpec
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        read_spec(PHI2, **changes)
