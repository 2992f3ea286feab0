from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
import pytest

from edgekit.checkpoint import open_checkpoint
from edgekit.checkpoint.gguf_config import gguf_config
from edgekit.checkpoint.gguf_container import GgufContainer, read_container
from edgekit.checkpoint.gguf_rope import with_rope_factors
from edgekit.errors import CorruptArtifactError, UnsupportedError
from edgekit.families import family_for
from edgekit.rope import FactorScaling, LinearScaling, RopeSpec
from edgekit.spec import DecoderSpec
from tests.gguf_files import rewrite_gguf

TinyCheckpoint: TypeAlias = Callable[[str], Path]
TinyGguf: TypeAlias = Callable[[str, str], Path]
Rewrite: TypeAlias = Callable[..., Path]


@pytest.fixture
def rewrite(tmp_path: Path, tiny_gguf: TinyGguf) -> Rewrite:
    """Copies a variant as F32 with other metadata (None removes a key) and tensors (None removes one)."""

    def copy(variant: str, metadata: dict[str, Any], tensors: dict[str, Any] | None = None) -> Path:
        return rewrite_gguf(tiny_gguf(variant, "F32"), tmp_path / "rewritten.gguf", metadata, tensors or {})

    return copy


def _spec(path: Path) -> DecoderSpec:
    with open_checkpoint(path) as checkpoint:
        return checkpoint.spec


def _rope(path: Path) -> RopeSpec:
    rope = _spec(path).layers[0].attention.rope
    assert rope is not None
    return rope


@pytest.mark.parametrize("variant", ["llama", "llama_tied", "llama_bias", "llama_wide_heads", "llama_linear_rope"])
def test_a_llama_has_the_spec_of_the_checkpoint_it_was_made_from(
    variant: str, tiny_gguf: TinyGguf, tiny_checkpoint: TinyCheckpoint
) -> None:
    # The file names one end token, and has another by its text.
    wanted = msgspec.structs.replace(_spec(tiny_checkpoint(variant)), eos_token_ids=(0, 2))
    epsilon = {"epsilon": float(np.float32(1e-5))}
    norm = msgspec.structs.replace(wanted.norm, **epsilon)
    layers = tuple(msgspec.structs.replace(layer, norm=norm) for layer in wanted.layers)
    assert _spec(tiny_gguf(variant, "Q8_0")) == msgspec.structs.replace(wanted, norm=norm, layers=layers)


@pytest.mark.parametrize("variant", ["gpt_neox", "gpt_neox_sequential", "gpt_neox_tied", "qwen3", "qwen3_bias"])
def test_other_families_have_the_structure_of_the_checkpoint_they_were_made_from(
    variant: str, tiny_gguf: TinyGguf, tiny_checkpoint: TinyCheckpoint
) -> None:
    wanted, got = _spec(tiny_checkpoint(variant)), _spec(tiny_gguf(variant, "F16"))
    assert got.tensor_shapes() == wanted.tensor_shapes()
    assert got.layers[0].parallel_residual == wanted.layers[0].parallel_residual
    assert got.layers[0].attention.rope == wanted.layers[0].attention.rope
    assert got.layers[0].mlp == wanted.layers[0].mlp


def test_the_factors_of_llama3_give_its_frequencies(tiny_gguf: TinyGguf, tiny_checkpoint: TinyCheckpoint) -> None:
    rope = _rope(tiny_gguf("llama_llama3_rope", "Q4_0"))
    assert isinstance(rope.scaling, FactorScaling)
    wanted = _rope(tiny_checkpoint("llama_llama3_rope")).inverse_frequencies()
    np.testing.assert_allclose(rope.inverse_frequencies(), wanted, rtol=1e-6)
    assert not np.allclose(wanted, _rope(tiny_checkpoint("llama")).inverse_frequencies(), rtol=0.1)


def test_a_spec_with_factors_survives_serialization(tiny_gguf: TinyGguf) -> None:
    spec = _spec(tiny_gguf("llama_llama3_rope", "Q4_0"))
    assert msgspec.json.decode(msgspec.json.encode(spec), type=DecoderSpec) == spec


@pytest.mark.parametrize("factors", [np.ones(7, np.float32), np.zeros(8, np.float32), np.full(8, np.inf, np.float32)])
def test_unusable_factors_are_named(rewrite: Rewrite, factors: Any) -> None:
    path = rewrite("llama", {}, {"rope_freqs.weight": factors})
    with pytest.raises(CorruptArtifactError, match=r"unusable 'rope_freqs\.weight': expected 8 positive numbers"):
        open_checkpoint(path)


def test_factors_and_a_scaling_together_are_refused(rewrite: Rewrite) -> None:
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    path = rewrite("llama", scaling, {"rope_freqs.weight": np.ones(8, np.float32)})
    with pytest.raises(UnsupportedError, match=r"both 'rope_freqs\.weight' and a rope scaling"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("metadata", "scaling"),
    [
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, LinearScaling(factor=4.0)),
        ({"llama.rope.scaling.factor": 4.0}, LinearScaling(factor=4.0)),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 0.0}, None),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, None),
        ({}, None),
    ],
)
def test_scaling_is_read_as_llama_cpp_does(
    rewrite: Rewrite, metadata: dict[str, Any], scaling: LinearScaling | None
) -> None:
    assert _rope(rewrite("llama", dict(metadata))).scaling == scaling


def test_every_end_token_counts(rewrite: Rewrite) -> None:
    ends = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 5}
    assert _spec(rewrite("llama", ends)).eos_token_ids == (0, 2, 5, 7)


def test_what_older_files_leave_out_follows_from_the_rest(rewrite: Rewrite, tiny_gguf: TinyGguf) -> None:
    keys = ("vocab_size", "attention.key_length", "attention.value_length", "rope.dimension_count")
    assert _spec(rewrite("llama", {f"llama.{key}": None for key in keys})) == _spec(tiny_gguf("llama", "F32"))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.logit_scale": 2.0}, r"llama\.logit_scale = 2\.0, which is not supported$"),
        ({"llama.attention.clamp_kqv": 8.0}, r"llama\.attention\.clamp_kqv = 8\.0, which is not supported$"),
        ({"llama.attention.causal": False}, r"llama\.attention\.causal = False, which is not supported$"),
        ({"llama.pooling_type": 1}, r"llama\.pooling_type = 1, which is not supported$"),
        ({"llama.expert_count": 8}, r"num_experts = 8 is not supported"),
        ({"llama.rope.dimension_count": 8}, r"partial_rotary_factor = 0\.5 is not supported"),
        ({"llama.attention.value_length": 8}, r"value_length = 8, .*: as many channels as attention\.key_length, 16"),
        ({"llama.attention.head_count_kv": [2, 1]}, r"head_count_kv = \[2, 1\], .*: the same value for every layer"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(rewrite: Rewrite, metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        open_checkpoint(rewrite("llama", dict(metadata)))


@pytest.mark.parametrize(
    ("metadata", "tensors", "message"),
    [
        (
            {"llama.embedding_length": None, "llama.attention.key_length": None},
            {},
            "no usable embedding length and head",
        ),
        ({"llama.embedding_length": None}, {}, "missing required field `hidden_size`"),
        ({"llama.attention.head_count": 0, "llama.attention.key_length": None}, {}, "no usable embedding length"),
        ({"llama.feed_forward_length": None}, {}, "missing required field `intermediate_size`"),
        ({"llama.vocab_size": 321}, {}, r"has 320 embeddings; llama\.vocab_size says 321"),
        ({}, {"token_embd.weight": None}, r"has no tensor 'token_embd\.weight'"),
        ({}, {"blk.1.attn_k.weight": None}, r"no tensor 'blk\.1\.attn_k\.weight'; its config wants shape \(32, 64\)"),
        (
            {"llama.attention.head_count_kv": 1},
            {},
            r"'blk\.0\.attn_k\.weight' of shape \(32, 64\); expected \(16, 64\)",
        ),
    ],
)
def test_what_contradicts_itself_is_named(
    rewrite: Rewrite, metadata: dict[str, Any], tensors: dict[str, Any], message: str
) -> None:
    with pytest.raises(CorruptArtifactError, match=message):
        open_checkpoint(rewrite("llama", dict(metadata), dict(tensors)))


def test_a_tensor_that_the_model_does_not_use_is_refused(rewrite: Rewrite) -> None:
    path = rewrite("llama", {}, {"blk.0.attn_q_norm.weight": np.ones(16, np.float32)})
    with pytest.raises(
        UnsupportedError, match=r"1 tensors that llama does not use, such as 'blk\.0\.attn_q_norm\.weight'"
    ):
        open_checkpoint(path)


def test_a_config_without_factors_is_left_alone(tiny_gguf: TinyGguf) -> None:
    path = tiny_gguf("llama", "F32")
    container = read_container(path)
    assert isinstance(container, GgufContainer)
    config = gguf_config(container, "llama", path)
    spec = family_for(config).spec(config)
    assert with_rope_factors(spec, container, path) is spec
    unscaled = dataclasses.replace(container, tensors={})
    with pytest.raises(CorruptArtifactError, match=r"has no tensor 'token_embd\.weight'"):
        gguf_config(unscaled, "llama", path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gemma4", r"rewritten\.gguf has the architecture 'gemma4'; known: gemma2, gemma3, gptneox, granite, llama, "),
        ("qwen3moe", r"architecture 'qwen3moe'; known: .*mixtures of experts are not supported$"),
        ("qwen2vl", r"architecture 'qwen2vl'; known: .*models of images are not supported$"),
    ],
)
def test_an_unknown_architecture_is_refused_with_the_known_ones(rewrite: Rewrite, name: str, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        open_checkpoint(rewrite("llama", {"general.architecture": name}))


@pytest.mark.parametrize(
    "metadata",
    [
        {"llama.attention.head_count_kv": [2, 2], "llama.feed_forward_length": [96, 96]},
        {"llama.attention.clamp_kqv": 0.0, "llama.attention.causal": True, "llama.attention.sliding_window": 0},
        {"llama.attention.key_length_swa": 16, "llama.attention.value_length_swa": 16},
        {"llama.attention.head_count_kv": None, "llama.attention.head_count": 4},
    ],
)
def test_values_that_change_nothing_are_accepted(
    rewrite: Rewrite, tiny_gguf: TinyGguf, metadata: dict[str, Any]
) -> None:
    if metadata.get("llama.attention.head_count_kv", 1) is None:
        # As many as there are query heads, where a file does not say.
        with pytest.raises(CorruptArtifactError, match=r"attn_k\.weight' of shape \(32, 64\); expected \(64, 64\)"):
            open_checkpoint(rewrite("llama", dict(metadata)))
    else:
        assert _spec(rewrite("llama", dict(metadata))) == _spec(tiny_gguf("llama", "F32"))


def test_a_norm_without_epsilon_is_named(rewrite: Rewrite) -> None:
    path = rewrite("llama", {"llama.attention.layer_norm_rms_epsilon": None})
    with pytest.raises(CorruptArtifactError, match=r"has no llama\.attention\.layer_norm_rms_epsilon; convert"):
        open_checkpoint(path)


def test_a_llama_with_a_window_is_a_mistral(rewrite: Rewrite) -> None:
    spec = _spec(rewrite("llama", {"llama.attention.sliding_window": 128}))
    assert spec.family == "mistral"
    assert [layer.attention.sliding_window for layer in spec.layers] == [128, 128]
