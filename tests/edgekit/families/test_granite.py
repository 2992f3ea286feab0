from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import pytest

from edgekit.errors import CorruptArtifactError, UnsupportedError
from edgekit.rope import RopeSpec, YarnScaling
from edgekit.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, NormSpec

ReadSpec: TypeAlias = Callable[..., DecoderSpec]

GRANITE = "granite-3.1-2b-instruct"


def test_granite_3_1(read_spec: ReadSpec) -> None:
    norm = NormSpec(kind="rms", epsilon=1e-5)
    layer = LayerSpec(
        attention=AttentionSpec(
            num_heads=32,
            num_kv_heads=8,
            key_dim=64,
            value_dim=64,
            scale=0.015625,
            qkv_bias=False,
            o_bias=False,
            rope=RopeSpec(theta=5e6, rotary_dim=64),
        ),
        mlp=MlpSpec(width=8192, activation="silu", gated=True, bias=False),
        norm=norm,
        residual_scale=0.22,
    )
    assert read_spec(GRANITE) == DecoderSpec(
        family="granite",
        hidden_size=2048,
        vocab_size=49155,
        max_positions=131072,
        layers=(layer,) * 40,
        norm=norm,
        tie_word_embeddings=True,
        embedding_scale=12.0,
        logit_scale=0.125,
        bos_token_id=0,
        eos_token_ids=(0,),
    )


def test_multipliers_that_a_config_leaves_out_are_one_even_that_of_the_scores(read_spec: ReadSpec) -> None:
    names = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
    spec = read_spec(GRANITE, **dict.fromkeys(names, ...))
    assert (spec.embedding_scale, spec.logit_scale) == (1.0, 1.0)
    assert (spec.layers[0].attention.scale, spec.layers[0].residual_scale) == (1.0, 1.0)


def test_biases_are_those_of_the_config(read_spec: ReadSpec) -> None:
    layer = read_spec(GRANITE, attention_bias=True, mlp_bias=True).layers[0]
    assert (layer.attention.qkv_bias, layer.attention.o_bias, layer.mlp.bias) == (True, True, True)


def test_a_scaled_rope_is_read(read_spec: ReadSpec) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    rope = read_spec(GRANITE, rope_scaling=scaling).layers[0].attention.rope
    assert rope is not None
    assert rope.scaling == YarnScaling(factor=4.0, original_max_positions=32768)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"partial_rotary_factor": 0.5}, r"granite with partial_rotary_factor = 0.5"),
        ({"sliding_window": 4096}, r"granite with sliding_window = 4096"),
        ({"num_local_experts": 32}, r"granite with num_local_experts = 32"),
        ({"model_type": "granitemoe"}, r"model_type 'granitemoe' is a mixture of experts; supported: dense models"),
        ({"model_type": "granitemoehybrid"}, r"'granitemoehybrid' has recurrent or state-space layers; supported: att"),
    ],
)
def test_what_granite_does_not_implement_is_refused_by_name(
    changes: dict[str, Any], message: str, read_spec: ReadSpec
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        read_spec(GRANITE, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits_scaling": 0.0}, r"config of a granite model cannot be read: .*`\$\.logits_scaling` \(it is 0\.0\)"),
        ({"attention_multiplier": None}, r"`\$\.attention_multiplier` \(it is None\)"),
        ({"embedding_multiplier": "big"}, r"`\$\.embedding_multiplier` \(it is 'big'\)"),
        ({"residual_multiplier": -0.22}, r"`\$\.residual_multiplier` \(it is -0\.22\)"),
    ],
)
def test_impossible_multipliers_are_named(changes: dict[str, Any], message: str, read_spec: ReadSpec) -> None:
    with pytest.raises(CorruptArtifactError, match=message):
        read_spec(GRANITE, **changes)


@pytest.mark.parametrize("key", ["embedding_multiplier", "residual_multiplier", "logits_scaling"])
def test_a_multiplier_in_a_family_without_it_is_refused(key: str, read_spec: ReadSpec) -> None:
    with pytest.raises(UnsupportedError, match=rf"llama with {key} = 2\.0 is not supported; supported: None, 1\.0"):
        read_spec("SmolLM2-135M", **{key: 2.0})
