"""Qwen2, and what Qwen3 shares with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import pytest

from edgekit.errors import CorruptArtifactError, UnsupportedError
from edgekit.rope import RopeSpec, YarnScaling
from edgekit.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, NormSpec

ReadSpec: TypeAlias = Callable[..., DecoderSpec]

QWEN2 = "Qwen2.5-0.5B"


def _windows(spec: DecoderSpec) -> list[int | None]:
    return [layer.attention.sliding_window for layer in spec.layers]


def test_qwen2_5(read_spec: ReadSpec) -> None:
    norm = NormSpec(kind="rms", epsilon=1e-6)
    layer = LayerSpec(
        attention=AttentionSpec(
            num_heads=14,
            num_kv_heads=2,
            key_dim=64,
            value_dim=64,
            scale=0.125,
            qkv_bias=True,
            o_bias=False,
            rope=RopeSpec(theta=1e6, rotary_dim=64),
        ),
        mlp=MlpSpec(width=4864, activation="silu", gated=True, bias=False),
        norm=norm,
    )
    assert read_spec(QWEN2) == DecoderSpec(
        family="qwen2",
        hidden_size=896,
        vocab_size=151936,
        max_positions=32768,
        layers=(layer,) * 24,
        norm=norm,
        tie_word_embeddings=True,
        bos_token_id=151643,
        eos_token_ids=(151643,),
    )


@pytest.mark.parametrize("name", [QWEN2, "Qwen3-0.6B"])
@pytest.mark.parametrize(
    "changes",
    [
        {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 20},
        {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 99},
        {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": ...},
        {"use_sliding_window": True, "sliding_window": ..., "max_window_layers": 3},
        {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 3},
        {"use_sliding_window": False, "sliding_window": 512, "max_window_layers": 3},
        {
            "use_sliding_window": True,
            "sliding_window": 512,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ],
)
def test_the_windows_are_those_that_transformers_derives(
    name: str, changes: dict[str, Any], read_spec: ReadSpec
) -> None:
    from transformers import AutoConfig

    values = {"num_hidden_layers": 30, **changes}
    given = {key: value for key, value in values.items() if value is not ...}
    oracle: Any = AutoConfig.for_model("qwen2" if name == QWEN2 else "qwen3", **given)
    wanted = [oracle.sliding_window if kind == "sliding_attention" else None for kind in oracle.layer_types]
    assert _windows(read_spec(name, **values)) == wanted


def test_yarn_of_long_contexts_is_read(read_spec: ReadSpec) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    rope = read_spec(QWEN2, rope_scaling=scaling).layers[0].attention.rope
    assert rope is not None
    assert rope.scaling == YarnScaling(factor=4.0, original_max_positions=32768)
    assert rope.attention_factor == pytest.approx(1.1386294361119891)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mlp_bias": True}, r"qwen2 with mlp_bias = True is not supported; supported: False"),
        ({"use_mrope": True}, r"qwen2 with use_mrope = True"),
        ({"num_experts": 60}, r"qwen2 with num_experts = 60"),
        ({"moe_intermediate_size": 1408}, r"qwen2 with moe_intermediate_size = 1408"),
        (
            {"layer_types": ["sliding_attention"] * 24},
            r"layer_types = 'sliding_attention' .* supported: full_attention",
        ),
        (
            {"use_sliding_window": True, "layer_types": ["chunked_attention"] * 24},
            r"layer_types = 'chunked_attention' .* supported: full_attention, sliding_attention",
        ),
    ],
)
def test_what_qwen2_does_not_implement_is_refused_by_name(
    changes: dict[str, Any], message: str, read_spec: ReadSpec
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        read_spec(QWEN2, **changes)


def test_types_of_fewer_layers_than_there_are_is_an_error(read_spec: ReadSpec) -> None:
    with pytest.raises(CorruptArtifactError, match=r"a qwen2 config has 2 layer_types and 24 layers"):
        read_spec(QWEN2, layer_types=["full_attention"] * 2)
