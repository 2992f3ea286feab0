"""The benchmark of a large model, at the size of a tiny one."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import numpy as np
import pytest

from edgekit.bundle import open_bundle
from edgekit.checkpoint import open_checkpoint
from edgekit.compress.decoder import stream_logits

ROOT = Path(__file__).resolve().parent.parent
SIZES = {"layers": 2, "hidden": 64, "intermediate": 96, "heads": 4, "vocabulary": 1024}


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    found = importlib.util.spec_from_file_location("large_model", ROOT / "benchmarks" / "large_model.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules["large_model"] = module  # where dataclasses look their module up
    found.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def written(benchmark: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("large")
    checkpoint: Path = benchmark.prepare(benchmark.Shape(**SIZES), directory, 150_000)
    assert len(list(checkpoint.glob("model-*.safetensors"))) > 2
    return directory


def test_what_is_written_is_a_llama_to_transformers(written: Path, hugging_face: Callable[[Path], Any]) -> None:
    import torch

    ids = np.arange(3, 40)[None]
    with torch.no_grad():
        expected = hugging_face(written / "checkpoint")(torch.from_numpy(ids)).logits.numpy()
    with open_checkpoint(written / "checkpoint") as checkpoint:
        np.testing.assert_allclose(stream_logits(checkpoint, ids), expected, atol=1e-5)


def test_every_tensor_has_values_of_its_own(written: Path) -> None:
    with open_checkpoint(written / "checkpoint") as checkpoint:
        tensors = [np.asarray(checkpoint.tensor(name)) for name in checkpoint.spec.tensor_shapes()]
    for tensor in tensors:
        assert tensor.std() == pytest.approx(0.02, rel=0.5 if tensor.ndim == 1 else 0.05)
        assert tensor.mean() == pytest.approx(float(tensor.ndim == 1), abs=0.01)
    for left, right in itertools.combinations(tensors, 2):
        size = min(left.size, right.size)
        assert (left.reshape(-1)[:size] != right.reshape(-1)[:size]).mean() > 0.5


def test_a_checkpoint_is_written_once_and_never_taken_for_another(benchmark: ModuleType, written: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in (written / "checkpoint").iterdir()}
    benchmark.prepare(benchmark.Shape(**SIZES), written, 150_000)
    assert {path.name: path.stat().st_mtime_ns for path in (written / "checkpoint").iterdir()} == before
    with pytest.raises(click.UsageError, match="is of another shape"):
        benchmark.prepare(benchmark.Shape(**{**SIZES, "layers": 3}), written, 150_000)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc on this system")
def test_the_measured_export_has_its_stages_and_the_size_of_the_arithmetic(
    benchmark: ModuleType, written: Path, tmp_path: Path
) -> None:
    arguments = ("export", str(written / "checkpoint"), str(tmp_path / "out.edge"), "--precision", "int4")
    measured = benchmark.measure(*arguments, log=tmp_path / "log", cache=tmp_path / "cache")
    assert list(measured.stages) == ["weights", "parity, graph", "parity, stored", "parity, source", "hash"]
    assert 0 <= sum(stage.seconds for stage in measured.stages.values()) < measured.seconds
    assert 0 < measured.memory.anonymous < measured.memory.resident
    assert "weights took" in (tmp_path / "log").read_text()
    shape, size = benchmark.Shape(**SIZES), open_bundle(tmp_path / "out.edge").manifest.files["model.onnx.data"].size
    arithmetic = sum(shape.data_bytes().values())
    padding = 4096 * 3 * len(shape.tensors())
    assert arithmetic <= size < arithmetic + padding
    table = benchmark.report(shape, size, {"edgekit export": measured})
    assert f"| model.onnx.data | {size:,} |" in table
    with pytest.raises(click.ClickException, match="failed; see "):
        benchmark.measure(*arguments, log=tmp_path / "log", cache=tmp_path / "cache")
