"""GGUF files of every architecture, from file to bundle."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
import torch

from edgekit.export.lowering import ort_cpu
from tests.gguf_files import write_gguf
from tests.gguf_models import MODELS

FloatArray: TypeAlias = npt.NDArray[np.float32]
MakeGguf: TypeAlias = Callable[[Mapping[str, Any], Mapping[str, str]], tuple[Path, Path]]

# Rows of whole blocks of 256, two windows and two ropes.
WIDE_GEMMA3: Mapping[str, Any] = {
    **MODELS["gemma3"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "query_pre_attn_scalar": 64,
}
MIXES: Mapping[str, Mapping[str, str]] = {
    "Q4_K_M": {"token_embd.*": "Q6_K", "blk.[01].attn_v.*": "Q6_K", "blk.[01].ffn_down.*": "Q6_K", "*": "Q4_K"},
    "Q6_K": {"*": "Q6_K"},
}
# Root mean squares, relative to that of the logits; test_quantized_graphs.py says what int8 activations cost.
FLOAT16_TOLERANCE = 1e-3
INT8_ACTIVATION_TOLERANCE = 0.025


def _transformers_logits(path: Path, config: Path, token_ids: npt.NDArray[np.int64]) -> FloatArray:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, config=AutoConfig.from_pretrained(config), dtype=torch.float32
    )
    with torch.no_grad():
        logits: FloatArray = model(torch.from_numpy(token_ids)).logits.numpy()
    return logits


def _relative_error(got: FloatArray, expected: FloatArray) -> float:
    return float(np.sqrt(np.mean(np.square(got - expected)) / np.mean(np.square(expected))))


@pytest.fixture
def make_gguf(make_checkpoint: Any, hugging_face: Any, tmp_path: Path) -> MakeGguf:
    """Makes a checkpoint of a config, and the GGUF file of it in these types."""

    def make(config: Mapping[str, Any], types: Mapping[str, str]) -> tuple[Path, Path]:
        directory, path = make_checkpoint(config), tmp_path / "model.gguf"
        write_gguf(hugging_face(directory), directory, path, types)
        return directory, path

    return make


@pytest.mark.parametrize("name", MODELS)
def test_a_bundle_of_a_float_file_has_the_logits_of_the_model(
    name: str,
    make_gguf: MakeGguf,
    hugging_face: Any,
    export_tiny: Any,
    load_graph: Any,
    token_ids: npt.NDArray[np.int64],
) -> None:
    directory, path = make_gguf(MODELS[name], {"*": "F32"})
    with torch.no_grad():
        expected = hugging_face(directory)(torch.from_numpy(token_ids)).logits.numpy()
    bundle = export_tiny(path, precision="fp32")
    for form in ("portable", "lowered"):
        graph = load_graph(bundle, form)
        # In two steps, so that windows slide over what is cached.
        steps = [graph.step(token_ids[:, :17]), graph.step(token_ids[:, 17:])]
        np.testing.assert_allclose(np.concatenate(steps, axis=1), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("mix", MIXES)
def test_a_gemma_3_in_blocks_has_the_logits_that_transformers_computes_from_the_file(
    mix: str,
    make_gguf: MakeGguf,
    export_tiny: Any,
    load_graph: Any,
    token_ids: npt.NDArray[np.int64],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory, path = make_gguf(WIDE_GEMMA3, MIXES[mix])
    expected = _transformers_logits(path, directory, token_ids)
    bundle = export_tiny(path, precision="int4")
    portable = load_graph(bundle, "portable").step(token_ids)
    assert _relative_error(portable, expected) < FLOAT16_TOLERANCE
    lowered = load_graph(bundle, "lowered")
    steps = [lowered.step(token_ids[:, :17]), lowered.step(token_ids[:, 17:])]
    assert _relative_error(np.concatenate(steps, axis=1), expected) < INT8_ACTIVATION_TOLERANCE
    monkeypatch.setattr(ort_cpu, "INT8_ACTIVATIONS", 0)
    np.testing.assert_allclose(load_graph(bundle, "lowered").step(token_ids), portable, atol=1e-4, rtol=1e-5)
