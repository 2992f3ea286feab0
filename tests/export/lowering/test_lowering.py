from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import onnx
import onnx_ir as ir
import pytest

from edgekit import contract
from edgekit.bundle import Bundle
from edgekit.cache_layout import KV_CACHE_DTYPES, KVCacheDtype, cache_layout
from edgekit.errors import StorageError, UnsupportedError
from edgekit.export.data_file import PAGE_BYTES
from edgekit.export.graph.builder import BLOCK_RECORD
from edgekit.export.lowering import TARGETS, lower_graph
from edgekit.export.lowering.__main__ import main
from edgekit.export.lowering.blocks import lower, read_blocks


@pytest.fixture
def bundle(tiny_llama: Path, export_tiny: Any) -> Bundle:
    made: Bundle = export_tiny(tiny_llama, precision="int4")
    return made


def test_an_unknown_target_is_refused_by_name(bundle: Bundle, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"^lowering target 'ort-gpu'; known: ort-cpu \(did you mean 'ort-cpu'"):
        lower_graph(bundle.file("model.onnx"), "ort-gpu", tmp_path, cache_layout(bundle.manifest.spec))
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_block_is_refused_by_name(bundle: Bundle) -> None:
    model = ir.load(bundle.file("model.onnx"))
    node = next(node for node in model.graph if '"rms_norm"' in node.metadata_props.get(BLOCK_RECORD, ""))
    record = json.loads(node.metadata_props[BLOCK_RECORD])
    node.metadata_props[BLOCK_RECORD] = json.dumps({**record, "kind": "rms_norms"})
    with pytest.raises(
        UnsupportedError, match=r"block 'rms_norms'; known: activation, .*\(did you mean 'rms_norm'\?\)"
    ):
        lower(model, TARGETS["ort-cpu"], "model.onnx.data", cache_layout(bundle.manifest.spec))


def test_every_kind_of_block_has_a_lowering(every_tiny_checkpoint: Path, export_tiny: Any) -> None:
    graph = ir.load(export_tiny(every_tiny_checkpoint).file("model.onnx")).graph
    kinds = {block.kind for block in read_blocks(graph).values()}
    assert kinds <= TARGETS["ort-cpu"].table.keys()
    assert {"embedding", "linear", "heads", "attention", "logits"} <= kinds


def _signature(values: Any) -> dict[str, tuple[int, list[int | str]]]:
    types = {value.name: value.type.tensor_type for value in values}
    return {
        name: (kind.elem_type, [dim.dim_value or dim.dim_param for dim in kind.shape.dim])
        for name, kind in types.items()
    }


@pytest.mark.parametrize("dtype", KV_CACHE_DTYPES)
def test_the_cache_of_the_lowered_graph_follows_the_layout_and_the_rest_is_the_portable_graphs(
    dtype: KVCacheDtype, every_tiny_checkpoint: Path, export_tiny: Any, tmp_path: Path
) -> None:
    bundle = export_tiny(every_tiny_checkpoint)
    spec, layout = bundle.manifest.spec, cache_layout(bundle.manifest.spec, dtype)
    lower_graph(bundle.file("model.onnx"), "ort-cpu", tmp_path, layout)
    files = (bundle.file("model.onnx"), tmp_path / "model.onnx")
    before, after = (onnx.load(path, load_external_data=False).graph for path in files)
    inputs, outputs = _signature(after.input), _signature(after.output)
    kind = {"fp32": onnx.TensorProto.FLOAT, "fp16": onnx.TensorProto.FLOAT16, "int8": onnx.TensorProto.INT8}[dtype]
    heads: list[int | str] = [] if dtype == "int8" else [1]
    for index, stack in enumerate(layout.stacks):
        kv, dk, dv, slots = *msgspec.structs.astuple(stack.shape), f"capacity.{stack.group}"
        for layer in stack.layers:
            keys = [f"blocks.{stack.group}", dk, 64] if dtype == "int8" else [1, dk, slots]
            assert inputs.pop(contract.past_key(layer)) == (kind, ["batch", kv, *keys])
            assert inputs.pop(contract.past_value(layer)) == (kind, ["batch", kv, *heads, slots, dv])
            if dtype == "int8":
                scales = (onnx.TensorProto.FLOAT, ["batch", kv, 1, slots])
                assert inputs.pop(contract.past_key_scale(layer)) == scales
                assert inputs.pop(contract.past_value_scale(layer)) == scales
        assert outputs.pop(f"new_key_values.stack{index}.key") == (kind, ["layers", kv, dk, "sequence"])
        assert outputs.pop(f"new_key_values.stack{index}.value") == (kind, ["layers", kv, "sequence", dv])
        if dtype == "int8":
            scales = (onnx.TensorProto.FLOAT, ["layers", kv, 1, "sequence"])
            assert outputs.pop(f"new_key_values.stack{index}.key_scale") == scales
            assert outputs.pop(f"new_key_values.stack{index}.value_scale") == scales
    assert len(layout.groups) == len(spec.cache_groups())
    assert inputs == {k: v for k, v in _signature(before.input).items() if not k.startswith("past_key_values.")}
    assert outputs == {k: v for k, v in _signature(before.output).items() if k == "logits"}


def test_nothing_is_stored_that_the_lowered_graph_does_not_read(bundle: Bundle, tmp_path: Path) -> None:
    lower_graph(bundle.file("model.onnx"), "ort-cpu", tmp_path, cache_layout(bundle.manifest.spec))
    graph = onnx.load(tmp_path / "model.onnx", load_external_data=False).graph
    read = {name for node in graph.node for name in node.input}
    made = {name for node in graph.node for name in node.output}
    assert {tensor.name for tensor in graph.initializer} <= read
    assert read - {""} <= made | {tensor.name for tensor in graph.initializer} | {value.name for value in graph.input}
    used = read | {value.name for value in graph.output}
    assert all(any(name in used for name in node.output) for node in graph.node)
    external = [{entry.key: entry.value for entry in tensor.external_data} for tensor in graph.initializer]
    places = sorted({(int(entry["offset"]), int(entry["length"])) for entry in external if entry})
    ends = [0, *(offset + length for offset, length in places)]
    assert ends[-1] == (tmp_path / "model.onnx.data").stat().st_size
    assert all(0 <= offset - end < PAGE_BYTES for (offset, _), end in zip(places, ends, strict=False))


def test_lowering_twice_gives_the_same_bytes(bundle: Bundle, tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        lower_graph(bundle.file("model.onnx"), "ort-cpu", tmp_path / name, cache_layout(bundle.manifest.spec))
    for file in ("model.onnx", "model.onnx.data"):
        assert (tmp_path / "first" / file).read_bytes() == (tmp_path / "second" / file).read_bytes()


def test_lowering_leaves_the_bundle_alone(bundle: Bundle, tmp_path: Path) -> None:
    lower_graph(bundle.file("model.onnx"), "ort-cpu", tmp_path, cache_layout(bundle.manifest.spec))
    bundle.verify()


def test_a_full_disk_is_a_storage_error(bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("edgekit.export.lowering.ir.save", refuse)
    with pytest.raises(StorageError, match=r"^cannot write '.*/model.onnx': No space left on device$"):
        lower_graph(bundle.file("model.onnx"), "ort-cpu", tmp_path, cache_layout(bundle.manifest.spec))


def test_the_program_lowers_and_returns_the_status_of_a_failure(
    bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph = str(bundle.file("model.onnx"))
    layout = msgspec.json.encode(cache_layout(bundle.manifest.spec)).decode()
    assert main(["ort-cpu", graph, str(tmp_path), layout]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]
    assert main(["ort-gpu", graph, str(tmp_path), layout]) == UnsupportedError.exit_code
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "unsupported\tlowering target 'ort-gpu'; known: ort-cpu (did you mean 'ort-cpu'?)\n"
