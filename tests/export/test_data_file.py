from __future__ import annotations

import errno
import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from edgekit.errors import CorruptArtifactError, StorageError
from edgekit.export.data_file import ALIGNMENT_BYTES, PAGE_BYTES, DataFile
from edgekit.export.weights import pack_int4

FLOAT, FLOAT16, INT4, INT8 = ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.INT4, ir.DataType.INT8


def _silent(name: str, index: int, count: int) -> None:
    del name, index, count


def _save(directory: Path, tensors: list[ir.ExternalTensor]) -> onnx.ModelProto:
    """Writes a graph around the tensors and reads it back with the onnx package."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="g")
    for tensor in tensors:
        graph.register_initializer(ir.val(tensor.name, tensor.dtype, tensor.shape, const_value=tensor))
    ir.save(ir.Model(graph, ir_version=10), directory / "model.onnx")
    return onnx.load(directory / "model.onnx")


def test_every_tensor_reads_back_through_onnx_as_it_was_written(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    nibbles = rng.integers(-8, 8, (5, 7)).astype(np.int8)
    contents: dict[str, tuple[ir.DataType, Any, Any]] = {
        "float": (FLOAT, (array := rng.standard_normal((33, 65)).astype(np.float32)), array),
        "half": (FLOAT16, (array := rng.standard_normal(3).astype(np.float16)), array),
        "bytes": (INT8, (array := rng.integers(-128, 128, (129, 1)).astype(np.int8)), array),
        "an odd number of nibbles": (INT4, pack_int4(nibbles), nibbles),
        "one nibble": (INT4, pack_int4(nibbles[:1, :1]), nibbles[:1, :1]),
        "transposed": (FLOAT, rng.standard_normal((64, 48)).astype(np.float32).T, None),
    }
    data = DataFile("weights.bin")
    tensors = []
    for name, (dtype, stored, value) in contents.items():
        shape = (stored if value is None else value).shape
        (tensor,) = data.reserve(name, [(name, dtype, shape)], partial(list, [stored]))
        tensors.append(tensor)
    sha256 = data.write(tmp_path, _silent)
    assert sha256 == hashlib.sha256((tmp_path / "weights.bin").read_bytes()).hexdigest()
    read = {tensor.name: numpy_helper.to_array(tensor) for tensor in _save(tmp_path, tensors).graph.initializer}
    assert read.keys() == contents.keys()
    for name, (_, stored, value) in contents.items():
        expected = stored if value is None else value
        got = read[name].astype(np.int8) if name.endswith(("nibbles", "nibble")) else read[name]
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)


def test_tensors_start_on_their_boundaries_and_do_not_overlap(tmp_path: Path) -> None:
    data = DataFile("weights.bin")
    lengths = [1, 63, 64, 65, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1, 3, 2 * PAGE_BYTES, 7]
    tensors = [
        data.reserve(str(length), [(str(length), INT8, (length,))], partial(list, [np.full(length, 7, np.int8)]))[0]
        for length in lengths
    ]
    data.write(tmp_path, _silent)
    written = np.fromfile(tmp_path / "weights.bin", np.int8)
    end = 0
    for tensor, length in zip(tensors, lengths, strict=True):
        assert tensor.offset is not None
        assert tensor.length == length
        assert tensor.offset % (PAGE_BYTES if length >= PAGE_BYTES else ALIGNMENT_BYTES) == 0
        assert tensor.offset >= end
        assert not written[end : tensor.offset].any()
        assert (written[tensor.offset : tensor.offset + length] == 7).all()
        end = tensor.offset + length
    assert len(written) == end


def test_contents_are_read_only_when_written_and_each_entry_once(tmp_path: Path) -> None:
    loads: list[str] = []
    progress: list[tuple[str, int, int]] = []

    def load(name: str) -> Callable[[], list[Any]]:
        def read() -> list[Any]:
            loads.append(name)
            return [np.zeros(4, np.float32), np.ones(2, np.float16)]

        return read

    data = DataFile("weights.bin")
    for name in ("a", "b"):
        data.reserve(name, [(f"{name}.x", FLOAT, (4,)), (f"{name}.y", FLOAT16, (2,))], load(name))
    assert loads == []
    data.write(tmp_path, lambda *event: progress.append(event))
    assert loads == ["a", "b"]
    assert progress == [("a", 0, 2), ("b", 1, 2)]


def test_only_one_entry_is_in_memory_at_a_time(tmp_path: Path) -> None:
    import weakref

    alive: list[weakref.ref[Any]] = []

    def load() -> list[Any]:
        assert sum(reference() is not None for reference in alive) <= 1
        array = np.zeros(1 << 16, np.float32)
        alive.append(weakref.ref(array))
        return [array]

    data = DataFile("weights.bin")
    for index in range(4):
        data.reserve(str(index), [(str(index), FLOAT, (1 << 16,))], load)
    data.write(tmp_path, _silent)
    assert len(alive) == 4


def test_contents_of_another_size_than_was_reserved_are_never_written(tmp_path: Path) -> None:
    data = DataFile("weights.bin")
    data.reserve("a", [("a", FLOAT, (4,))], lambda: [np.zeros(5, np.float32)])
    with pytest.raises(AssertionError):
        data.write(tmp_path, _silent)
    data = DataFile("weights.bin")
    data.reserve("a", [("a", FLOAT, (4,))], lambda: [np.zeros(4, np.float32)] * 2)
    with pytest.raises(ValueError, match="longer"):
        data.write(tmp_path, _silent)


def test_a_refused_write_names_the_file_and_the_reason(tmp_path: Path) -> None:
    data = DataFile("weights.bin")
    data.reserve("a", [("a", FLOAT, (4,))], lambda: [np.zeros(4, np.float32)])
    with pytest.raises(StorageError, match=r"^cannot write '.*/nowhere/weights.bin': No such file or directory$"):
        data.write(tmp_path / "nowhere", _silent)


def test_a_full_disk_is_reported_by_the_write_that_meets_it(tmp_path: Path) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full on this system")
    (tmp_path / "weights.bin").symlink_to(full)
    data = DataFile("weights.bin")
    data.reserve("a", [("a", FLOAT, (1 << 16,))], lambda: [np.zeros(1 << 16, np.float32)])
    with pytest.raises(StorageError, match=str(OSError(errno.ENOSPC, "No space left on device").strerror)):
        data.write(tmp_path, _silent)


def test_an_error_of_the_model_stays_what_it_is(tmp_path: Path) -> None:
    def load() -> list[Any]:
        raise CorruptArtifactError("the weight is damaged")

    data = DataFile("weights.bin")
    data.reserve("a", [("a", FLOAT, (4,))], load)
    with pytest.raises(CorruptArtifactError, match="the weight is damaged"):
        data.write(tmp_path, _silent)
