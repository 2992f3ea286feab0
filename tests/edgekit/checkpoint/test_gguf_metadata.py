"""Configs of metadata alone: published models, what llama.cpp knows of an architecture, and every scaling of rope."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
import pytest
from gguf import GGUFWriter

from edgekit.checkpoint.gguf_architectures import ARCHITECTURES
from edgekit.checkpoint.gguf_config import gguf_config
from edgekit.checkpoint.gguf_container import GgufContainer, TensorInfo
from edgekit.checkpoint.gguf_rope import with_rope_factors
from edgekit.checkpoint.gguf_types import tensor_type
from edgekit.errors import CorruptArtifactError, UnsupportedError
from edgekit.families import FAMILIES, family_for
from edgekit.rope import LinearScaling, Llama3Scaling, LongRopeScaling, RopeSpec, YarnScaling
from edgekit.spec import DecoderSpec
from tests.gguf_models import ARCHITECTURES as WRITTEN
from tests.gguf_models import add_model_metadata, as_metadata_has_it, rope_tensors

Values: TypeAlias = dict[str, Any]

PATH = Path("planted.gguf")
PUBLISHED = sorted((Path(__file__).parents[1] / "families" / "published").glob("*.json"))
SIZES: Values = {
    "block_count": 12,
    "context_length": 4096,
    "embedding_length": 96,
    "feed_forward_length": 128,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.layer_norm_epsilon": 1e-5,
}


def _container(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], vectors: Mapping[str, Any] = {}
) -> GgufContainer:
    """A file whose only numbers are vectors; other tensors are there by name and shape."""
    float32 = tensor_type(0)
    assert float32 is not None
    table = {name: TensorInfo(shape=shape, type=float32, offset=0) for name, shape in shapes.items()}
    numbers = np.concatenate([np.zeros(0), *vectors.values()]).astype("<f4")
    offset = 0
    for name, vector in vectors.items():
        table[name] = TensorInfo(shape=(len(vector),), type=float32, offset=4 * offset)
        offset += len(vector)
    return GgufContainer(metadata=dict(metadata), tensors=table, data=numbers.view(np.uint8))


def _spec(architecture: str, values: Mapping[str, Any] = {}, vectors: Mapping[str, Any] = {}) -> DecoderSpec:
    """The spec of a file with the metadata `SIZES` and these (None removes one)."""
    metadata = {f"{architecture}.{key}": value for key, value in {**SIZES, **values}.items() if value is not None}
    container = _container(metadata, {"token_embd.weight": (320, 96)}, vectors)
    config = gguf_config(container, architecture, PATH)
    return family_for(config).spec(config)


def _rope(spec: DecoderSpec) -> RopeSpec:
    rope = spec.layers[0].attention.rope
    assert rope is not None
    return rope


def _windows(spec: DecoderSpec) -> list[int | None]:
    return [layer.attention.sliding_window for layer in spec.layers]


def test_every_architecture_is_one_of_its_family_and_of_the_converter() -> None:
    families = {name: family for family in FAMILIES for name in family.gguf_architectures}
    assert families.keys() == ARCHITECTURES.keys() == {*WRITTEN.values(), "mistral3"}
    for name, row in ARCHITECTURES.items():
        assert row.model_type in families[name].model_types


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_a_published_model_keeps_its_spec(path: Path, tmp_path: Path) -> None:
    from transformers import AutoConfig

    published = json.loads(path.read_text(encoding="utf-8"))
    wanted = family_for(published).spec(published)
    config = AutoConfig.for_model(**published)
    architecture = WRITTEN[published["model_type"]]
    writer = GGUFWriter(tmp_path / "unwritten.gguf", architecture)
    add_model_metadata(writer, config)
    metadata = {key: value.value for key, value in writer.kv_data[0].items()}
    metadata |= {"tokenizer.ggml.bos_token_id": wanted.bos_token_id, "tokenizer.ggml.eos_token_id": 0}
    container = _container(metadata, _shapes(wanted), dict(rope_tensors(config)))
    read = gguf_config(container, architecture, PATH)
    got = with_rope_factors(family_for(read).spec(read), container, PATH)
    if isinstance(_rope(wanted).scaling, Llama3Scaling):
        left, right = (_rope(spec).inverse_frequencies() for spec in (got, wanted))
        np.testing.assert_allclose(left, right, rtol=1e-6)
        got, wanted = (_with_rope(spec, None) for spec in (got, wanted))
    assert as_metadata_has_it(got) == as_metadata_has_it(wanted)


def _shapes(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """The tensors whose presence says something."""
    layer = spec.layers[0]
    present = {
        "output.weight": not spec.tie_word_embeddings,
        "blk.0.attn_q.bias": layer.attention.qkv_bias,
        "blk.0.ffn_up.bias": layer.mlp.bias,
        "blk.0.ffn_norm.weight": "mlp_norm" in layer.norm_names(),
    }
    some = {name: (1, 1) for name, is_there in present.items() if is_there}
    return {"token_embd.weight": (spec.vocab_size, spec.hidden_size), **some}


def _with_rope(spec: DecoderSpec, rope: RopeSpec | None) -> DecoderSpec:
    replace = msgspec.structs.replace
    layers = (replace(layer, attention=replace(layer.attention, rope=rope)) for layer in spec.layers)
    return replace(spec, layers=tuple(layers))


@pytest.mark.parametrize(
    ("pattern", "windows"),
    [
        (None, [64, 64, 64, 64, 64, None] * 2),
        (3, [64, 64, None] * 4),
        (0, [64] * 12),
        ([False, True, True] * 4, [None, 64, 64] * 4),
    ],
)
def test_gemma_3_has_a_window_in_all_but_every_sixth_layer_unless_the_file_says_otherwise(
    pattern: Any, windows: list[int | None]
) -> None:
    spec = _spec("gemma3", {"attention.sliding_window": 64, "attention.sliding_window_pattern": pattern})
    assert _windows(spec) == windows


@pytest.mark.parametrize("window", [None, 0])
def test_a_gemma_3_without_a_window_has_one_rope(window: int | None) -> None:
    spec = _spec("gemma3", {"attention.sliding_window": window, "rope.freq_base": 1e6})
    assert _windows(spec) == [None] * 12
    assert {layer.attention.rope for layer in spec.layers} == {RopeSpec(theta=1e6, rotary_dim=24)}


@pytest.mark.parametrize(("base", "theta"), [(None, 10000.0), (5000.0, 5000.0)])
def test_layers_of_gemma_3_with_a_window_rotate_at_a_base_of_their_own(base: float | None, theta: float) -> None:
    scaling = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    values = {"attention.sliding_window": 64, "rope.freq_base": 1e6, "rope.freq_base_swa": base, **scaling}
    layers = _spec("gemma3", values).layers
    assert layers[0].attention.rope == RopeSpec(theta=theta, rotary_dim=24)
    assert layers[5].attention.rope == RopeSpec(theta=1e6, rotary_dim=24, scaling=LinearScaling(factor=8.0))


def test_gemma_2_alternates_and_caps() -> None:
    spec = _spec("gemma2", {"attention.key_length": 32, "attention.value_length": 32})
    assert _windows(spec) == [4096, None] * 6
    attention = spec.layers[0].attention
    assert (attention.scale, attention.softcap, spec.logit_softcap) == (32**-0.5, 50.0, 30.0)
    assert (spec.embedding_scale, spec.layers[0].norm_placement) == (96**0.5, "sandwich")
    capped = _spec("gemma2", {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0})
    assert (capped.layers[0].attention.softcap, capped.logit_softcap) == (20.0, 10.0)


@pytest.mark.parametrize(("architecture", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_gemma_scales_scores_by_the_width_of_its_stream(architecture: str, layers: int) -> None:
    values = {"attention.key_length": 32, "attention.value_length": 32, "attention.sliding_window": 64}
    for count, width in ((layers, 24), (layers - 1, 32)):
        assert _spec(architecture, {**values, "block_count": count}).layers[0].attention.scale == width**-0.5


def test_more_layers_than_any_model_has_are_not_counted() -> None:
    with pytest.raises(CorruptArtifactError, match=r"gemma3\.block_count = 4294967295; expected at most 4096"):
        _spec("gemma3", {"block_count": (1 << 32) - 1})


def test_a_pattern_of_another_length_is_named() -> None:
    with pytest.raises(CorruptArtifactError, match=r"has 2 values in gemma3\.attention\.sliding_window_pattern for 12"):
        _spec("gemma3", {"attention.sliding_window_pattern": [True, False]})


def test_granite_has_multipliers_and_rotates_unless_it_says_otherwise() -> None:
    scales = {"attention.scale": 0.5, "embedding_scale": 12.0, "residual_scale": 0.25, "logit_scale": 8.0}
    spec = _spec("granite", scales)
    layer = spec.layers[0]
    assert (layer.attention.scale, layer.residual_scale) == (0.5, 0.25)
    assert (spec.embedding_scale, spec.logit_scale) == (12.0, 0.125)
    plain = _spec("granite", {"attention.scale": 0.0, "rope.scaling.finetuned": True})
    assert (plain.layers[0].attention.scale, plain.layers[0].residual_scale) == (24**-0.5, 1.0)
    assert (plain.embedding_scale, plain.logit_scale) == (1.0, 1.0)
    with pytest.raises(UnsupportedError, match=r"granite\.rope\.scaling\.finetuned = False, .*: True, for a model"):
        _spec("granite", {"rope.scaling.finetuned": False})


def test_every_fourth_layer_of_smollm3_has_no_positions() -> None:
    spec = _spec("smollm3", {"rope.freq_base": 5e6})
    assert [layer.attention.rope is None for layer in spec.layers] == [False, False, False, True] * 3
    assert _rope(spec).theta == 5e6


@pytest.mark.parametrize("says", [True, False])
def test_the_norms_of_a_stablelm_tell_whether_it_is_parallel(says: bool) -> None:
    # Converters wrote use_parallel_residual for every model.
    values = {"use_parallel_residual": says}
    assert _spec("stablelm", values).layers[0].parallel_residual
    assert not _spec("stablelm", values, {"blk.0.ffn_norm.weight": np.ones(96)}).layers[0].parallel_residual


def test_a_window_of_phi_3_is_the_models_though_llama_cpp_leaves_it_out() -> None:
    assert _windows(_spec("phi3", {"attention.sliding_window": 2047})) == [2047] * 12
    assert _windows(_spec("phi3", {"attention.sliding_window": 0})) == [None] * 12


def test_a_mistral_3_is_a_mistral_unless_its_attention_has_a_temperature() -> None:
    spec = _spec("mistral3", {"attention.temperature_scale": 0.0})
    assert (spec.family, _windows(spec)) == ("mistral", [None] * 12)
    with pytest.raises(UnsupportedError, match=r"mistral3\.attention\.temperature_scale = 0\.1, which is not"):
        _spec("mistral3", {"attention.temperature_scale": 0.1})


YARN: Values = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 1024}


@pytest.mark.parametrize(
    ("values", "scaling", "attention_factor"),
    [
        ({}, {}, 0.1 * math.log(4.0) + 1.0),
        ({"yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0}, {"beta_fast": 16.0, "beta_slow": 2.0}, 0.1 * math.log(4) + 1),
        ({"yarn_attn_factor": 0.5, "yarn_ext_factor": 1.0}, {}, 0.5),
        ({"yarn_log_multiplier": 1.0}, {}, 1.0),
        ({"yarn_log_multiplier": 0.5}, {}, (0.1 * math.log(4.0) + 1.0) / (0.05 * math.log(4.0) + 1.0)),
    ],
)
def test_yarn(values: Values, scaling: Values, attention_factor: float) -> None:
    rope = _rope(_spec("llama", {**YARN, **{f"rope.scaling.{key}": value for key, value in values.items()}}))
    assert rope.scaling == YarnScaling(factor=4.0, original_max_positions=1024, **scaling)
    assert rope.attention_factor == pytest.approx(attention_factor, rel=1e-12)


SHORT, LONG = [1.0 + index for index in range(12)], [2.0 * index + 3 for index in range(12)]
FACTORS = {"rope_factors_short.weight": SHORT, "rope_factors_long.weight": LONG}


@pytest.mark.parametrize("kind", ["longrope", None])
@pytest.mark.parametrize("factor", [1.25, None])
def test_factors_for_short_and_for_long_texts(kind: str | None, factor: float | None) -> None:
    values = {
        "rope.scaling.type": kind,
        "rope.scaling.attn_factor": factor,
        "rope.scaling.original_context_length": 1024,
    }
    rope = _rope(_spec("phi3", values, FACTORS))
    assert rope.scaling == LongRopeScaling(
        short_factors=tuple(SHORT), long_factors=tuple(LONG), original_max_positions=1024
    )
    assert rope.attention_factor == (factor or 1.0)


@pytest.mark.parametrize(("width", "head"), [(6, 24), (30, 44), (46, 86), (64, 64)])
def test_the_width_of_the_rotation_is_exact(width: int, head: int) -> None:
    # 30 / 44 · 44 is less than 30 in floating point.
    values = {"embedding_length": 4 * head, "rope.dimension_count": width, "attention.head_count_kv": None}
    assert _rope(_spec("gptneox", values)).rotary_dim == width


@pytest.mark.parametrize(
    ("values", "vectors", "message"),
    [
        ({"rope.scaling.type": "su"}, {}, r"rope\.scaling\.type = 'su', .*: linear, longrope, none, yarn"),
        (
            {**YARN, "rope.scaling.yarn_ext_factor": 0.5},
            {},
            r"yarn_ext_factor = 0\.5, .*: 1\.0$",
        ),
        ({**YARN, "rope.scaling.attn_factor": 2.0}, {}, r"attn_factor = 2\.0, .*: 1\.0 unless the scaling is longrope"),
        ({"rope.scaling.type": "linear"}, FACTORS, r"type = 'linear', .*: longrope for a file with 'rope_factors_long"),
        ({"rope.scaling.yarn_beta_fast": 8.0}, {}, r"yarn_beta_fast = 8\.0, .*: rope\.scaling\.type yarn"),
        ({"rope.freq_base_swa": 1e4}, {}, r"llama\.rope\.freq_base_swa = 10000\.0, which is not supported"),
    ],
)
def test_a_scaling_that_is_not_implemented_is_refused(values: Values, vectors: Any, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        _spec("llama", values, vectors)


@pytest.mark.parametrize(
    ("vectors", "message"),
    [
        ({}, r"scales its rope by longrope and has no tensor 'rope_factors_short\.weight'"),
        ({"rope_factors_short.weight": SHORT}, r"has no tensor 'rope_factors_long\.weight'"),
        ({**FACTORS, "rope_factors_long.weight": LONG[:5]}, r"has 5 numbers in long_factor; expected 12"),
    ],
)
def test_missing_factors_are_named(vectors: Any, message: str) -> None:
    with pytest.raises(CorruptArtifactError, match=message):
        _spec("llama", {"rope.scaling.type": "longrope"}, vectors)


def test_factors_are_one_per_frequency() -> None:
    container = _container({}, {"rope_freqs.weight": (2, 2)})
    with pytest.raises(CorruptArtifactError, match=r"'rope_freqs\.weight' of shape \(2, 2\); expected one number per"):
        with_rope_factors(_spec("llama"), container, PATH)
