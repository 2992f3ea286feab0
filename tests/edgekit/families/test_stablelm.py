from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec
import pytest

from edgekit.errors import UnsupportedError
from edgekit.rope import RopeSpec
from edgekit.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, NormSpec

ReadSpec: TypeAlias = Callable[..., DecoderSpec]

STABLELM = "stablelm-2-1_6b"


def test_stablelm_2(read_spec: ReadSpec) -> None:
    norm = NormSpec(kind="layer", epsilon=1e-5)
    layer = LayerSpec(
        attention=AttentionSpec(
            num_heads=32,
            num_kv_heads=32,
            key_dim=64,
            value_dim=64,
            scale=0.125,
            qkv_bias=True,
            o_bias=False,
            rope=RopeSpec(theta=10000.0, rotary_dim=16),
        ),
        mlp=MlpSpec(width=5632, activation="silu", gated=True, bias=False),
        norm=norm,
    )
    assert read_spec(STABLELM) == DecoderSpec(
        family="stablelm",
        hidden_size=2048,
        vocab_size=100352,
        max_positions=4096,
        layers=(layer,) * 24,
        norm=norm,
        tie_word_embeddings=False,
        bos_token_id=100257,
        eos_token_ids=(100257,),
    )


def test_stablelm_zephyr_3b_has_no_biases_and_wider_heads(read_spec: ReadSpec) -> None:
    attention = read_spec(STABLELM, hidden_size=2560, use_qkv_bias=False, num_hidden_layers=32).layers[31].attention
    assert (attention.key_dim, attention.qkv_bias) == (80, False)
    assert attention.rope == RopeSpec(theta=10000.0, rotary_dim=20)


def test_a_quarter_of_each_head_rotates_when_the_config_does_not_say(read_spec: ReadSpec) -> None:
    assert read_spec(STABLELM, partial_rotary_factor=...) == read_spec(STABLELM)
    rope = read_spec(STABLELM, partial_rotary_factor=0.5).layers[0].attention.rope
    assert rope is not None
    assert rope.rotary_dim == 32


def test_attention_and_mlp_of_a_parallel_residual_share_a_norm(read_spec: ReadSpec) -> None:
    sequential, parallel = (read_spec(STABLELM, use_parallel_residual=value) for value in (False, True))
    gone = sequential.tensor_shapes().keys() - parallel.tensor_shapes().keys()
    assert gone == {f"layers.{index}.mlp_norm.{name}" for index in range(24) for name in ("weight", "bias")}
    layer = msgspec.structs.replace(sequential.layers[0], parallel_residual=True, shared_norm=True)
    assert parallel == msgspec.structs.replace(sequential, layers=(layer,) * 24)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qk_layernorm": True}, r"stablelm with qk_layernorm = True is not supported; supported: False"),
        ({"head_dim": 32}, r"stablelm with head_dim = 32 .* supported: 64"),
        ({"hidden_size": 2050}, r"stablelm with hidden_size = 2050 .* supported: multiples of the 32 heads"),
        ({"num_key_value_heads": 5}, r"stablelm with num_key_value_heads = 5 .* divisors of 32"),
        ({"sliding_window": 1024}, r"stablelm with sliding_window = 1024"),
        ({"model_type": "stablelm_epoch"}, r"model_type 'stablelm_epoch'; known: .* \(did you mean 'stablelm'"),
    ],
)
def test_what_stablelm_does_not_implement_is_refused_by_name(
    changes: dict[str, Any], message: str, read_spec: ReadSpec
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        read_spec(STABLELM, **changes)
