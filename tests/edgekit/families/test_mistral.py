from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import pytest

from edgekit.errors import CorruptArtifactError, UnsupportedError
from edgekit.rope import RopeSpec
from edgekit.spec import AttentionSpec, CacheGroup, DecoderSpec, LayerSpec, MlpSpec, NormSpec

ReadSpec: TypeAlias = Callable[..., DecoderSpec]

MISTRAL = "Mistral-7B-v0.3"


def test_mistral_7b(read_spec: ReadSpec) -> None:
    norm = NormSpec(kind="rms", epsilon=1e-5)
    layer = LayerSpec(
        attention=AttentionSpec(
            num_heads=32,
            num_kv_heads=8,
            key_dim=128,
            value_dim=128,
            scale=128**-0.5,
            qkv_bias=False,
            o_bias=False,
            rope=RopeSpec(theta=1e6, rotary_dim=128),
        ),
        mlp=MlpSpec(width=14336, activation="silu", gated=True, bias=False),
        norm=norm,
    )
    assert read_spec(MISTRAL) == DecoderSpec(
        family="mistral",
        hidden_size=4096,
        vocab_size=32768,
        max_positions=32768,
        layers=(layer,) * 32,
        norm=norm,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_ids=(2,),
    )


@pytest.mark.parametrize(("changes", "window"), [({"sliding_window": 4096}, 4096), ({"sliding_window": ...}, 4096)])
def test_every_layer_has_the_window(changes: dict[str, Any], window: int, read_spec: ReadSpec) -> None:
    groups = read_spec(MISTRAL, **changes).cache_groups()
    assert groups == (CacheGroup(layers=tuple(range(32)), sliding_window=window),)


def test_heads_may_be_narrower_than_the_hidden_size_divided_by_them(read_spec: ReadSpec) -> None:
    attention = read_spec(MISTRAL, hidden_size=5120, head_dim=128).layers[0].attention  # Mistral Nemo
    assert attention.key_dim == 128
    assert attention.scale == 128**-0.5


def test_layer_types_that_say_what_the_window_says_change_nothing(read_spec: ReadSpec) -> None:
    assert read_spec(MISTRAL, layer_types=["full_attention"] * 32) == read_spec(MISTRAL)
    sliding = read_spec(MISTRAL, sliding_window=8, layer_types=["sliding_attention"] * 32)
    assert sliding == read_spec(MISTRAL, sliding_window=8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, r"mistral with attention_bias = True is not supported; supported: False"),
        ({"mlp_bias": True}, r"mistral with mlp_bias = True is not supported; supported: False"),
        ({"layer_types": ["full_attention", "sliding_attention"] * 16}, r"mistral with layer_types = .*: full_attent"),
        (
            {"sliding_window": 8, "layer_types": ["full_attention"] * 32},
            r"mistral with layer_types = .*supported: sliding_attention",
        ),
        ({"num_local_experts": 8}, r"mistral with num_local_experts = 8"),
        ({"use_bidirectional_attention": True}, r"mistral with use_bidirectional_attention = True"),
        ({"hidden_act": "gelu_python"}, r"mistral with hidden_act 'gelu_python'"),
    ],
)
def test_what_mistral_does_not_implement_is_refused_by_name(
    changes: dict[str, Any], message: str, read_spec: ReadSpec
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        read_spec(MISTRAL, **changes)


def test_a_window_of_no_positions_is_an_error(read_spec: ReadSpec) -> None:
    with pytest.raises(CorruptArtifactError, match=r"Expected `int` >= 1 - at `\$\.sliding_window` \(it is 0\)"):
        read_spec(MISTRAL, sliding_window=0)
