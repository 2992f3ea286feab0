"""Bundles of tiny models, and a runtime of twenty lines to run their graphs with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
import pytest
import torch

from edgekit import contract
from edgekit.bundle import Bundle
from edgekit.cache_layout import cache_layout
from edgekit.export.exporter import ExportOptions, export_bundle
from edgekit.export.lowering import lower_graph
from edgekit.export.storage_plan import QuantizationOptions
from edgekit.spec import DecoderSpec

Form: TypeAlias = Literal["portable", "lowered"]
FloatArray: TypeAlias = npt.NDArray[np.float32]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from a second thread, and wait for it while the machine does other work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass
class GraphModel:
    """A graph with a cache of its own; the slots of the cache are given, so that their order can be tested."""

    path: Path
    spec: DecoderSpec
    cache: list[FloatArray] = field(default_factory=list)

    def __post_init__(self) -> None:
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = 1
        # As written: the fusions that ONNX Runtime makes of its own accord are not what is tested.
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        self.session = ort.InferenceSession(str(self.path), options, providers=["CPUExecutionProvider"])

    def step(
        self,
        ids: npt.NDArray[np.int64],
        *,
        positions: npt.NDArray[np.int64] | None = None,
        new_bias: FloatArray | None = None,
        rows: npt.NDArray[np.int64] | None = None,
        keep: npt.NDArray[np.int64] | None = None,
        empty_slots: int = 1,
        sequence_length: int | None = None,
    ) -> FloatArray:
        """Runs ids of shape (B, S) after what is cached, appends the rows `keep`, returns logits (B, R, V).

        Where rotations depend on the length of the text, it has to be said before the last piece of it.
        """
        batch, count = ids.shape
        if not self.cache:
            self.cache = [
                np.zeros((batch, layer.attention.num_kv_heads, *shape), np.float32)
                for layer in self.spec.layers
                for shape in ((layer.attention.key_dim, 0), (0, layer.attention.value_dim))
            ]
        past = self.cache[0].shape[-1]
        causal = np.triu(np.full((count, count), contract.MASKED, np.float32), 1)
        bias = np.broadcast_to(causal if new_bias is None else new_bias, (batch, 1, count, count))
        if positions is None:
            positions = np.broadcast_to(np.arange(past, past + count), ids.shape).astype(np.int64)
        feeds: dict[str, Any] = {
            contract.INPUT_IDS: ids,
            contract.POSITION_IDS: positions,
            contract.NEW_BIAS: np.ascontiguousarray(bias),
            contract.LOGIT_ROWS: np.arange(count) if rows is None else rows,
        }
        if self.spec.depends_on_length:
            feeds[contract.SEQUENCE_LENGTH] = np.array([sequence_length or past + count])
        for index, group in enumerate(self.spec.cache_groups()):
            feeds[contract.past_bias(index)] = self._past_bias(positions, past, empty_slots, group.sliding_window)
        names = [contract.LOGITS]
        for layer in range(len(self.spec.layers)):
            for axis, name, array in (
                (3, contract.past_key(layer), self.cache[2 * layer]),
                (2, contract.past_value(layer), self.cache[2 * layer + 1]),
            ):
                shape = (*array.shape[:axis], empty_slots, *array.shape[axis + 1 :])
                rubbish = np.full(shape, 7.0, np.float32)
                feeds[name] = self._as_declared(name, np.concatenate([rubbish, array], axis=axis))
            names += [contract.new_key(layer), contract.new_value(layer)]
        outputs = self._run(names, feeds, batch)
        logits, new = outputs[0], outputs[1:]
        kept = np.arange(count) if keep is None else keep
        self.cache = [
            np.concatenate([old, np.take(fresh, kept, axis=3 - index % 2)], axis=3 - index % 2)
            for index, (old, fresh) in enumerate(zip(self.cache, new, strict=True))
        ]
        return np.asarray(logits, np.float32)

    def _run(self, names: list[str], feeds: dict[str, Any], batch: int) -> list[FloatArray]:
        """Runs the graph; what a lowered one gives stacked over layers is taken apart."""
        declared = [value.name for value in self.session.get_outputs()]
        found = dict(zip(declared, self.session.run(declared, feeds), strict=True))
        for index, stack in enumerate(cache_layout(self.spec).stacks):
            for place, layer in enumerate(stack.layers):
                for name in (contract.new_key(layer), contract.new_value(layer)):
                    stacked = found.get(contract.stacked(name, index))
                    if stacked is not None:
                        found[name] = stacked[place * batch : (place + 1) * batch]
        return [found[name] for name in names]

    def _as_declared(self, name: str, array: FloatArray) -> FloatArray:
        """Gives a part of the cache the axis for query heads that the lowered graph wants."""
        rank = next(len(value.shape) for value in self.session.get_inputs() if value.name == name)
        return array[:, :, None] if rank == 5 else array

    def _past_bias(
        self, positions: npt.NDArray[np.int64], past: int, empty_slots: int, window: int | None
    ) -> FloatArray:
        """Rubbish in empty slots, in front: neither order nor contents of what is masked may matter."""
        batch, count = positions.shape
        bias = np.zeros((batch, 1, 1 if window is None else count, empty_slots + past), np.float32)
        bias[..., :empty_slots] = contract.MASKED
        for row, query, key in np.ndindex(batch, 0 if window is None else count, past):
            if key <= positions[row, query] - (window or 0):
                bias[row, 0, query, empty_slots + key] = contract.MASKED
        return bias


ExportTiny: TypeAlias = Callable[..., Bundle]
EditConfig: TypeAlias = Callable[[Path, Mapping[str, Any]], Path]
EditWeights: TypeAlias = Callable[[Path, Callable[[str, torch.Tensor], torch.Tensor]], Path]
LoadGraphOf: TypeAlias = Callable[[Path, DecoderSpec, Form], GraphModel]
LoadGraph: TypeAlias = Callable[[Bundle, Form], GraphModel]


@pytest.fixture(scope="session")
def export_tiny(tmp_path_factory: pytest.TempPathFactory) -> ExportTiny:
    """Exports a checkpoint, once per checkpoint and options: ``export_tiny(path, precision="int8")``."""
    made: dict[tuple[Path, str], Bundle] = {}

    def export(checkpoint: Path, **options: Any) -> Bundle:
        quantization = QuantizationOptions(**{"precision": "fp32", **options})
        key = (checkpoint, repr(quantization))
        if key not in made:
            output = tmp_path_factory.mktemp("bundle") / "model.edge"
            made[key] = export_bundle(checkpoint, output, ExportOptions(quantization=quantization), lambda *_: None)
        return made[key]

    return export


@pytest.fixture
def load_graph_of(tmp_path: Path) -> LoadGraphOf:
    """Loads a graph file, as it is or lowered for ONNX Runtime's CPU provider."""

    def load(graph: Path, spec: DecoderSpec, form: Form) -> GraphModel:
        if form == "lowered":
            directory = tmp_path / "lowered"
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir()
            lower_graph(graph, "ort-cpu", directory, cache_layout(spec))
            graph = directory / "model.onnx"
        return GraphModel(graph, spec)

    return load


@pytest.fixture
def load_graph(load_graph_of: LoadGraphOf) -> LoadGraph:
    """Loads a bundle's graph."""
    return lambda bundle, form: load_graph_of(bundle.file("model.onnx"), bundle.manifest.spec, form)


@pytest.fixture
def edit_config(tmp_path_factory: pytest.TempPathFactory) -> EditConfig:
    """Copies a checkpoint, with other values in its config."""

    def edit(checkpoint: Path, changes: Mapping[str, Any]) -> Path:
        directory = tmp_path_factory.mktemp("edited")
        shutil.copytree(checkpoint, directory, dirs_exist_ok=True)
        config = json.loads((directory / "config.json").read_text()) | changes
        (directory / "config.json").write_text(json.dumps(config))
        return directory

    return edit


@pytest.fixture
def edit_weights(tmp_path_factory: pytest.TempPathFactory) -> EditWeights:
    """Copies a checkpoint, with every weight changed by a function of its name and value."""
    from safetensors.torch import load_file, save_file

    def edit(checkpoint: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Path:
        directory = tmp_path_factory.mktemp("edited")
        shutil.copytree(checkpoint, directory, dirs_exist_ok=True)
        weights = load_file(directory / "model.safetensors")
        changed = {name: change(name, weight) for name, weight in weights.items()}
        save_file(changed, directory / "model.safetensors", metadata={"format": "pt"})
        return directory

    return edit
