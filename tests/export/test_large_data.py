"""What large models meet first: data files beyond 4 GiB, links, and paths seen from other directories."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from edgekit.blocks import QuantizedBlocks
from edgekit.bundle import GRAPH, GRAPH_DATA, Bundle, open_bundle
from edgekit.errors import CorruptArtifactError
from edgekit.export.data_file import DataFile
from edgekit.export.exporter import ExportOptions, export_bundle
from edgekit.export.lowering import packing
from edgekit.export.parity import graph_logits
from edgekit.export.quantize import quantize
from edgekit.export.weights import Storage, StoredWeight, _encode, read_stored, store
from edgekit.runtime.llm import LLM
from edgekit.runtime.lowered import CACHE_VARIABLE
from edgekit.runtime.sampling import SamplingParams

Event: TypeAlias = tuple[str, int, int]
Beyond: TypeAlias = tuple[Path, StoredWeight, QuantizedBlocks]
FIRST_SHAPE = ((1 << 32) // 64 + 3, 64)
SHORT = SamplingParams(max_tokens=5)


def _never() -> Any:
    raise AssertionError("the contents of the large tensor are never made")


@pytest.fixture
def beyond(tmp_path: Path) -> Beyond:
    """A data file whose first tensor is 4 GiB of int8 zeros, which take no room on the disk, and a graph that reads it.

    The last row of the first tensor is ones; a quantized matrix follows.
    """
    data = DataFile(GRAPH_DATA)
    (first,) = data.reserve("first", [("first", ir.DataType.INT8, FIRST_SHAPE)], _never)
    blocks = quantize(np.random.default_rng(0).standard_normal((6, 64), np.float32), 4, 32, "affine")
    storage = Storage(precision="int4", scheme="affine")
    weight = store(data, "weight", (6, 64), storage, _never)
    assert all((part.offset or 0) > 1 << 32 for part in weight.parts)
    with (tmp_path / GRAPH_DATA).open("wb") as file:
        file.seek((first.length or 0) - FIRST_SHAPE[1])
        file.write(np.ones(FIRST_SHAPE[1], np.int8).tobytes())
        for part, array in zip(weight.parts, _encode(weight, blocks), strict=True):
            file.seek(part.offset or 0)
            file.write(np.ascontiguousarray(array).tobytes())
    tensors = (first, *weight.parts)
    initializers = [ir.val(tensor.name, tensor.dtype, tensor.shape, const_value=tensor) for tensor in tensors]
    rows = ir.val("rows", ir.DataType.INT64, ["n"])
    nodes = [
        ir.node("Gather", [initializers[0], rows], outputs=[ir.val("taken", ir.DataType.INT8, ["n", 64])]),
        ir.node("Cast", [initializers[1]], {"to": ir.DataType.INT8.value}, outputs=[ir.val("codes")]),
        ir.node("Identity", [initializers[2]], outputs=[ir.val("scale", ir.DataType.FLOAT16, [2, 6])]),
    ]
    nodes[1].outputs[0].dtype, nodes[1].outputs[0].shape = ir.DataType.INT8, ir.Shape([64, 6])
    outputs = [node.outputs[0] for node in nodes]
    graph = ir.Graph([rows], outputs, nodes=nodes, initializers=initializers, opset_imports={"": 21}, name="g")
    ir.save(ir.Model(graph, ir_version=10), tmp_path / GRAPH)
    return tmp_path, weight, blocks


def test_onnx_runtime_reads_tensors_beyond_four_gigabytes(beyond: Beyond) -> None:
    directory, _, blocks = beyond
    assert (directory / GRAPH).stat().st_size < 2000
    assert (directory / GRAPH_DATA).stat().st_size > 1 << 32
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(str(directory / GRAPH), options, providers=["CPUExecutionProvider"])
    rows = np.array([0, FIRST_SHAPE[0] - 1, FIRST_SHAPE[0] - 2])
    taken, codes, scale = session.run(["taken", "codes", "scale"], {"rows": rows})
    np.testing.assert_array_equal(taken, np.repeat(np.array([[0], [1], [0]], np.int8), 64, axis=1))
    np.testing.assert_array_equal(codes, blocks.codes.T)
    np.testing.assert_array_equal(scale, blocks.scale.T)


def test_stored_weights_beyond_four_gigabytes_are_read_back(beyond: Beyond) -> None:
    directory, weight, blocks = beyond
    read = read_stored(weight, directory)
    assert isinstance(read, QuantizedBlocks)
    np.testing.assert_array_equal(read.dequantize(), blocks.dequantize())


def test_lowering_reads_tensors_beyond_four_gigabytes_and_keeps_none(beyond: Beyond) -> None:
    directory, _, blocks = beyond
    initializers = ir.load(directory / GRAPH).graph.initializers
    assert blocks.offset is not None
    for part, array in (("codes", blocks.codes), ("scale", blocks.scale), ("offset", blocks.offset)):
        value = initializers[f"weight.{part}"]
        np.testing.assert_array_equal(packing._read(value), array.T)
        assert isinstance(value.const_value, ir.ExternalTensor)
        assert value.const_value.raw is None  # it maps the whole file, and its pages would count as memory


@pytest.mark.parametrize("damage", ["another file", "cut short"])
def test_lowering_refuses_weights_that_are_not_in_the_data_file(damage: str, beyond: Beyond) -> None:
    directory, weight, _ = beyond
    if damage == "cut short":
        os.truncate(directory / GRAPH_DATA, (weight.parts[2].offset or 0) + 1)
        value = ir.load(directory / GRAPH).graph.initializers["weight.offset"]
        message = rf"^{GRAPH_DATA} ends before 'weight\.offset'"
    else:
        shape = ir.Shape([4])
        tensor = ir.ExternalTensor("../secret", 0, 4, ir.DataType.INT8, shape=shape, name="w", base_dir=directory)
        value = ir.val("w", const_value=tensor)
        message = r"^the graph keeps 'w' in '\.\./secret', not in model\.onnx\.data"
    with pytest.raises(CorruptArtifactError, match=message):
        packing._read(value)


@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_no_weight_is_inside_the_graph_however_small(
    precision: str, every_tiny_checkpoint: Path, export_tiny: Any
) -> None:
    bundle: Bundle = export_tiny(every_tiny_checkpoint, precision=precision)
    model = onnx.load(bundle.file(GRAPH), load_external_data=False)
    external = {tensor.name for tensor in model.graph.initializer if tensor.data_location == onnx.TensorProto.EXTERNAL}
    names = bundle.manifest.spec.tensor_shapes()
    assert {re.sub(r"\.(codes|scale|offset)$", "", name) for name in external} == names.keys()
    inside = sum(tensor.ByteSize() for tensor in model.graph.initializer if tensor.name not in external)
    nodes = sum(len(attribute.t.raw_data) for node in model.graph.node for attribute in node.attribute)
    assert (inside < 10_000, nodes) == (True, 0)


def test_an_export_reports_every_tensor_of_every_stage(every_tiny_checkpoint: Path, tmp_path: Path) -> None:
    events: list[Event] = []
    bundle = export_bundle(
        every_tiny_checkpoint, tmp_path / "out.edge", ExportOptions(), lambda *event: events.append(event)
    )
    names = bundle.manifest.spec.tensor_shapes().keys()
    stages = list(dict.fromkeys(what.split(":")[0] for what, _, _ in events))
    assert stages == ["weights", "parity, graph", "parity, stored", "parity, source", "hash"]
    for stage in ("weights", "parity, stored", "parity, source"):
        found = [event for event in events if event[0].startswith(f"{stage}: ")]
        assert [(done, total) for _, done, total in found] == [(index, len(names)) for index in range(len(names))]
        assert {what.removeprefix(f"{stage}: ") for what, _, _ in found} == names


def test_the_stages_of_an_export_log_their_time(
    tiny_llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "edgekit.export.exporter")
    export_bundle(tiny_llama, tmp_path / "out.edge", ExportOptions(), lambda *_: None)
    found = [match[1] for line in caplog.messages if (match := re.fullmatch(r"(.+) took \d+\.\d s", line))]
    assert found == ["weights", "parity, graph", "parity, stored", "parity, source", "hash"]


@pytest.fixture
def bundle(export_tiny: Any, tiny_llama: Path, tmp_path: Path) -> Bundle:
    """A copy to move and to link, in a directory of its own, with an empty cache."""
    original: Bundle = export_tiny(tiny_llama, precision="int4")
    return open_bundle(shutil.copytree(original.path, tmp_path / "real" / "model.edge"))


@pytest.fixture(scope="module")
def expected(export_tiny: Any, tiny_llama: Path) -> str:
    """What the bundle says when nothing is peculiar about its path."""
    return LLM(export_tiny(tiny_llama, precision="int4").path).generate("The fox", SHORT).text


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every first load lower the graph from where it is."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))


def test_a_bundle_of_linked_files_is_exported_as_real_files(tiny_llama: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for file in tiny_llama.iterdir():
        (snapshot / file.name).symlink_to(file)
    (tmp_path / "link").symlink_to(snapshot, target_is_directory=True)
    bundle = export_bundle(tmp_path / "link", tmp_path / "out.edge", ExportOptions(), lambda *_: None)
    assert all(path.is_file() and not path.is_symlink() for path in bundle.path.iterdir())
    bundle.verify()


def _through_a_linked_directory(bundle: Bundle) -> Path:
    link = bundle.path.parent.parent / "link.edge"
    link.symlink_to(bundle.path, target_is_directory=True)
    return link


def _through_a_linked_parent(bundle: Bundle) -> Path:
    link = bundle.path.parent.parent / "parent"
    link.symlink_to(bundle.path.parent, target_is_directory=True)
    return link / bundle.path.name


def _with_linked_files(bundle: Bundle) -> Path:
    for name in (GRAPH, GRAPH_DATA):
        bundle.file(name).rename(bundle.file(f"{name}.real"))
        bundle.file(name).symlink_to(f"{name}.real")
    return bundle.path


def _with_hard_links(bundle: Bundle) -> Path:
    for name in bundle.manifest.files:
        (bundle.path.parent / name).hardlink_to(bundle.file(name))
    return bundle.path


@pytest.mark.parametrize(
    "peculiar", [_through_a_linked_directory, _through_a_linked_parent, _with_linked_files, _with_hard_links]
)
def test_a_bundle_behind_links_is_lowered_and_runs(
    peculiar: Callable[[Bundle], Path], bundle: Bundle, expected: str
) -> None:
    assert LLM(peculiar(bundle)).generate("The fox", SHORT).text == expected


@pytest.mark.parametrize(
    ("directory", "path"),
    [("real", "model.edge"), ("real/model.edge", "."), ("real/model.edge", "../model.edge"), (".", "real/model.edge/")],
)
def test_a_bundle_is_found_from_any_directory(
    directory: str, path: str, bundle: Bundle, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del bundle  # there it is
    monkeypatch.chdir(tmp_path / directory)
    assert LLM(path).generate("The fox", SHORT).text == expected


@pytest.mark.parametrize(("directory", "path"), [("real/model.edge", GRAPH), ("real", f"model.edge/{GRAPH}")])
def test_the_data_file_is_found_beside_the_graph_not_in_the_current_directory(
    directory: str, path: str, bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, ids = bundle.manifest.spec, np.arange(3, 15)
    absolute = graph_logits(bundle.file(GRAPH), spec, ids)
    monkeypatch.chdir(tmp_path / directory)
    np.testing.assert_array_equal(graph_logits(Path(path), spec, ids), absolute)


def test_an_export_takes_relative_paths(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(tiny_llama, tmp_path / "models" / "tiny")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    bundle = export_bundle("../models/tiny", "out.edge", ExportOptions(), lambda *_: None)
    assert bundle.path == Path("out.edge")
    open_bundle(tmp_path / "work" / "out.edge").verify()


def test_no_matrix_is_widened_before_the_check_needs_it(
    export_tiny: Any, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle: Bundle = export_tiny(tiny_llama, precision="int4")
    sessions: list[Any] = []
    make = ort.InferenceSession

    def profiled(graph: str, options: Any, providers: list[str]) -> Any:
        options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / "profile")
        sessions.append(make(graph, options, providers=providers))
        return sessions[-1]

    monkeypatch.setattr("edgekit.export.parity.ort.InferenceSession", profiled)
    graph_logits(bundle.file(GRAPH), bundle.manifest.spec, np.arange(3, 15))
    (session,) = sessions
    events = json.loads(Path(session.end_profiling()).read_text())
    order = [event["name"] for event in events if event.get("cat") == "Node" and event["name"].endswith("_kernel_time")]
    step = order[: len(order) // 2]  # of two
    widened = [index for index, name in enumerate(step) if "/DequantizeLinear" in name]
    assert len(widened) == 2 * 7 + 1
    for index in widened:
        module = step[index].rpartition("/")[0]
        assert f"{module}/MatMul_kernel_time" in step[index + 1 : index + 3], step[index : index + 3]
