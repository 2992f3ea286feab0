"""Gemma 2 and 3."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest

from edgekit.checkpoint import open_checkpoint
from edgekit.errors import CorruptArtifactError, UnsupportedError
from edgekit.families import Family, family_for
from edgekit.rope import LinearScaling, RopeSpec
from edgekit.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, NormSpec

ReadSpec: TypeAlias = Callable[..., DecoderSpec]
TinyCheckpoint: TypeAlias = Callable[[str], Path]
HuggingFaceModel: TypeAlias = Callable[[Path], Any]

GEMMA2, GEMMA3 = "gemma-2-2b", "gemma-3-1b-it"
LOCAL, GLOBAL = "sliding_attention", "full_attention"
NORM = NormSpec(kind="rms", epsilon=1e-6)


def _layer(attention: AttentionSpec, width: int) -> LayerSpec:
    mlp = MlpSpec(width=width, activation="gelu_tanh", gated=True, bias=False)
    return LayerSpec(attention=attention, mlp=mlp, norm=NORM, norm_placement="sandwich")


def _windows(spec: DecoderSpec) -> list[int | None]:
    return [layer.attention.sliding_window for layer in spec.layers]


def _ropes(spec: DecoderSpec) -> dict[str, RopeSpec | None]:
    kinds = (GLOBAL if window is None else LOCAL for window in _windows(spec))
    return {kind: layer.attention.rope for kind, layer in zip(kinds, spec.layers, strict=True)}


def test_gemma_2(read_spec: ReadSpec) -> None:
    layers = [
        _layer(
            AttentionSpec(
                num_heads=8,
                num_kv_heads=4,
                key_dim=256,
                value_dim=256,
                scale=0.0625,
                qkv_bias=False,
                o_bias=False,
                rope=RopeSpec(theta=10000.0, rotary_dim=256),
                softcap=50.0,
                sliding_window=window,
            ),
            9216,
        )
        for window in (4096, None)
    ]
    assert read_spec(GEMMA2) == DecoderSpec(
        family="gemma2",
        hidden_size=2304,
        vocab_size=256000,
        max_positions=8192,
        layers=tuple(layers * 13),
        norm=NORM,
        tie_word_embeddings=True,
        embedding_scale=48.0,
        logit_softcap=30.0,
        bos_token_id=2,
        eos_token_ids=(1,),
    )


def test_gemma_3(read_spec: ReadSpec) -> None:
    local, everywhere = (
        _layer(
            AttentionSpec(
                num_heads=4,
                num_kv_heads=1,
                key_dim=256,
                value_dim=256,
                scale=0.0625,
                qkv_bias=False,
                o_bias=False,
                rope=RopeSpec(theta=theta, rotary_dim=256),
                qk_norm=NORM,
                sliding_window=window,
            ),
            6912,
        )
        for theta, window in ((1e4, 512), (1e6, None))
    )
    assert read_spec(GEMMA3) == DecoderSpec(
        family="gemma3",
        hidden_size=1152,
        vocab_size=262144,
        max_positions=32768,
        layers=(*([local] * 5 + [everywhere]) * 4, local, local),
        norm=NORM,
        tie_word_embeddings=True,
        embedding_scale=1152**0.5,
        bos_token_id=2,
        eos_token_ids=(1, 106),
    )


def test_the_scores_are_scaled_by_the_config_and_not_by_the_width_of_a_head(read_spec: ReadSpec) -> None:
    attention = read_spec(GEMMA2, query_pre_attn_scalar=144, head_dim=128).layers[0].attention  # Gemma 2 27B
    assert (attention.scale, attention.key_dim) == (1 / 12, 128)


def test_without_soft_caps_there_are_none(read_spec: ReadSpec) -> None:
    spec = read_spec(GEMMA2, attn_logit_softcapping=None, final_logit_softcapping=None)
    assert spec.logit_softcap is None
    assert all(layer.attention.softcap is None for layer in spec.layers)
    assert read_spec(GEMMA3, final_logit_softcapping=20).logit_softcap == 20.0


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        (GEMMA2, {}),
        (GEMMA2, {"num_hidden_layers": 3, "layer_types": [GLOBAL, LOCAL, LOCAL]}),
        (GEMMA2, {"sliding_window": ...}),
        (GEMMA3, {}),
        (GEMMA3, {"sliding_window_pattern": 2}),
        (GEMMA3, {"sliding_window_pattern": 1}),
        (GEMMA3, {"sliding_window_pattern": ..., "sliding_window": ...}),
        (GEMMA3, {"num_hidden_layers": 3, "layer_types": [GLOBAL, LOCAL, LOCAL], "sliding_window_pattern": 2}),
    ],
)
def test_the_windows_are_those_that_transformers_derives(
    name: str, changes: dict[str, Any], read_spec: ReadSpec
) -> None:
    from transformers import AutoConfig

    values = {"num_hidden_layers": 26, "sliding_window": 99, "sliding_window_pattern": 6, **changes}
    given = {key: value for key, value in values.items() if value is not ...}
    oracle: Any = AutoConfig.for_model("gemma2" if name == GEMMA2 else "gemma3_text", **given)
    wanted = [oracle.sliding_window if kind == LOCAL else None for kind in oracle.layer_types]
    assert _windows(read_spec(name, **values)) == wanted


_LINEAR = {"rope_type": "linear", "factor": 8.0}
_OLDER = {"rope_theta": 5e5, "rope_local_base_freq": 2e4}
_ABSENT = {"rope_theta": ..., "rope_local_base_freq": ..., "rope_scaling": ...}


@pytest.mark.parametrize(
    "changes",
    [
        _ABSENT,
        {**_OLDER, "rope_scaling": None},
        {**_OLDER, "rope_scaling": _LINEAR},
        {**_ABSENT, "rope_scaling": _LINEAR},
        {**_ABSENT, "rope_parameters": {GLOBAL: {**_LINEAR, "rope_theta": 5e5}, LOCAL: {"rope_type": "default"}}},
        {**_ABSENT, "rope_parameters": {LOCAL: {**_LINEAR, "rope_theta": 3e4}}},
        {**_OLDER, "rope_scaling": ..., "rope_parameters": {GLOBAL: {"rope_type": "default", "rope_theta": 7e5}}},
    ],
)
def test_the_rotations_of_both_types_of_layers_are_those_of_transformers(
    changes: dict[str, Any], read_spec: ReadSpec
) -> None:
    from transformers import AutoConfig
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding

    given = {key: copy.deepcopy(value) for key, value in changes.items() if value is not ...}
    config: Any = AutoConfig.for_model("gemma3_text", **given)
    oracle: Any = Gemma3RotaryEmbedding(config)
    for kind, rope in _ropes(read_spec(GEMMA3, **changes)).items():
        assert rope is not None
        wanted = getattr(oracle, f"{kind}_inv_freq").double().numpy()
        np.testing.assert_allclose(rope.inverse_frequencies(), wanted, rtol=1e-6)


def test_only_layers_without_a_window_are_scaled(read_spec: ReadSpec) -> None:
    ropes = _ropes(read_spec(GEMMA3, rope_scaling=_LINEAR))
    assert ropes == {
        GLOBAL: RopeSpec(theta=1e6, rotary_dim=256, scaling=LinearScaling(factor=8.0)),
        LOCAL: RopeSpec(theta=1e4, rotary_dim=256),
    }


@pytest.mark.parametrize("variant", ["gemma2", "gemma3"])
def test_the_ones_that_files_leave_out_of_norms_are_added_to_norms_only(
    variant: str, tiny_checkpoint: TinyCheckpoint, hugging_face: HuggingFaceModel
) -> None:
    parameters = {
        name: value.detach().numpy() for name, value in hugging_face(tiny_checkpoint(variant)).named_parameters()
    }
    with open_checkpoint(tiny_checkpoint(variant)) as checkpoint:
        sources = checkpoint.family.sources(checkpoint.spec)
        for name, source in sources.items():
            wanted = parameters[source.name] + (1 if "norm" in name else 0)
            np.testing.assert_array_equal(checkpoint.tensor(name), wanted)


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text"])
def test_gguf_files_leave_nothing_out(model_type: str, read_spec: ReadSpec) -> None:
    family: Family = family_for({"model_type": model_type})
    spec = read_spec(GEMMA2 if model_type == "gemma2" else GEMMA3)
    assert {source.addend for source in family.sources(spec, "gguf").values()} == {0.0}
    assert {source.addend for source in family.sources(spec).values()} == {0.0, 1.0}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (GEMMA2, {"use_bidirectional_attention": True}, r"gemma2 with use_bidirectional_attention = True"),
        (GEMMA3, {"use_bidirectional_attention": True}, r"gemma3 with use_bidirectional_attention = True"),
        (GEMMA2, {"mlp_bias": True}, r"gemma2 with mlp_bias = True"),
        (GEMMA2, {"sliding_window": None}, r"layer_types = 'sliding_attention' .* supported: full_attention"),
        (GEMMA2, {"hidden_activation": "quick_gelu"}, r"gemma2 with hidden_act 'quick_gelu'"),
        (GEMMA2, {"partial_rotary_factor": 0.5}, r"gemma2 with partial_rotary_factor = 0.5"),
        (GEMMA3, {"attn_logit_softcapping": 50.0}, r"gemma3 with attn_logit_softcapping = 50.0 .* supported: None"),
        (
            GEMMA3,
            {"model_type": "gemma3", "vision_config": {}},
            r"model_type 'gemma3' has a vision tower; supported: text-only checkpoints, model_type 'gemma3_text'",
        ),
        (GEMMA3, {"rope_scaling": {"rope_type": "axial"}}, r"gemma3 with rope_type 'axial'"),
    ],
)
def test_what_gemma_does_not_implement_is_refused_by_name(
    name: str, changes: dict[str, Any], message: str, read_spec: ReadSpec
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        read_spec(name, **changes)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (GEMMA2, {"hidden_activation": None}, r"config of a gemma2 model cannot be read: .*`\$\.hidden_activation`"),
        (GEMMA2, {"query_pre_attn_scalar": 0}, r"`\$\.query_pre_attn_scalar` \(it is 0\)"),
        (GEMMA2, {"attn_logit_softcapping": 0.0}, r"`\$\.attn_logit_softcapping` \(it is 0\.0\)"),
        (GEMMA3, {"sliding_window_pattern": 0}, r"`\$\.sliding_window_pattern` \(it is 0\)"),
        (
            GEMMA3,
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            r"gemma3 rope_parameters cannot be read: .*unknown field `rope_type`",
        ),
        (GEMMA3, {"rope_parameters": {GLOBAL: "default"}}, r"gemma3 rope_parameters cannot be read: Expected `object"),
    ],
)
def test_what_cannot_be_read_is_named(name: str, changes: dict[str, Any], message: str, read_spec: ReadSpec) -> None:
    with pytest.raises(CorruptArtifactError, match=message):
        read_spec(name, **changes)
