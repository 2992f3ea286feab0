from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper

from edgekit.blocks import QuantizedBlocks
from edgekit.errors import UnsupportedError
from edgekit.export.data_file import DataFile
from edgekit.export.weights import (
    BITS,
    PRECISIONS,
    Precision,
    Storage,
    check_range,
    pack_int4,
    store,
    unpack_int4,
)

if TYPE_CHECKING:
    from edgekit.blocks import Scheme

SHAPES = ((1, 1), (1, 7), (3, 5), (5, 3), (16, 32), (33, 96), (2, 3, 5))


def _codes(shape: tuple[int, ...], bits: int = 4) -> npt.NDArray[np.int8]:
    high = 1 << (bits - 1)
    return np.random.default_rng(0).integers(-high, high, shape).astype(np.int8)


@pytest.mark.parametrize("shape", SHAPES)
def test_int4_is_packed_as_onnx_packs_it(shape: tuple[int, ...]) -> None:
    codes = _codes(shape)
    made = helper.make_tensor("w", onnx.TensorProto.INT4, shape, codes.astype(ml_dtypes.int4).reshape(-1))
    raw = numpy_helper.from_array(codes.astype(ml_dtypes.int4), "w").raw_data
    packed = pack_int4(codes)
    assert packed.tobytes() == raw
    assert packed.tobytes() == bytes(made.int32_data)
    assert packed.tobytes() == ir.tensor(codes.astype(ml_dtypes.int4)).tobytes()
    np.testing.assert_array_equal(unpack_int4(np.frombuffer(raw, np.uint8), shape), codes)


def test_every_pair_of_codes_survives_packing() -> None:
    pairs = np.stack(np.meshgrid(np.arange(-8, 8), np.arange(-8, 8), indexing="ij"), -1).astype(np.int8)
    assert len(set(pack_int4(pairs).tolist())) == 256
    np.testing.assert_array_equal(unpack_int4(pack_int4(pairs), pairs.shape), pairs)


def test_codes_of_another_memory_order_are_packed_by_value() -> None:
    codes = _codes((6, 10))
    np.testing.assert_array_equal(pack_int4(codes.T), pack_int4(np.ascontiguousarray(codes.T)))
    np.testing.assert_array_equal(pack_int4(codes[::2, 1::3]), pack_int4(codes[::2, 1::3].copy()))


def _stored(directory: Path, weight: Any, storage: Storage) -> tuple[list[npt.NDArray[Any]], Any]:
    """Stores one tensor; returns its parts as the onnx package reads them, and the record."""
    data = DataFile("model.onnx.data")
    record = store(data, "w", tuple(weight.shape), storage, lambda: weight)
    data.write(directory, lambda *_: None)
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="g")
    for part in record.parts:
        graph.register_initializer(ir.val(part.name, part.dtype, part.shape, const_value=part))
    ir.save(ir.Model(graph, ir_version=10), directory / "model.onnx")
    read = {
        tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(directory / "model.onnx").graph.initializer
    }
    return [read[str(part.name)] for part in record.parts], record


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", np.float32), ("fp16", np.float16)])
def test_a_float_matrix_is_stored_as_inputs_by_outputs(precision: Precision, dtype: Any, tmp_path: Path) -> None:
    weight = np.random.default_rng(0).standard_normal((5, 7)).astype(np.float32)
    (read,), record = _stored(tmp_path, weight, Storage(precision=precision))
    assert read.dtype == dtype
    np.testing.assert_array_equal(read, weight.T.astype(dtype))
    assert [part.name for part in record.parts] == ["w"]
    assert record.padded_columns == 7


def test_a_vector_is_stored_as_it_is(tmp_path: Path) -> None:
    weight = np.random.default_rng(0).standard_normal(9).astype(np.float32)
    (read,), _ = _stored(tmp_path, weight, Storage(precision="fp32"))
    np.testing.assert_array_equal(read, weight)


@pytest.mark.parametrize("precision", ["int4", "int8"])
@pytest.mark.parametrize("scheme", ["symmetric", "affine"])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("columns", [1, 64, 96, 127])
def test_blocks_are_stored_by_value_with_zero_codes_behind(
    precision: Precision, scheme: Scheme, block_size: int, columns: int, tmp_path: Path
) -> None:
    rng = np.random.default_rng(1)
    count = -(-columns // block_size)
    scales = rng.standard_normal((2, 6, count)).astype(np.float16)
    blocks = QuantizedBlocks(
        bits=BITS[precision],
        block_size=block_size,
        codes=_codes((6, columns), BITS[precision]),
        scale=scales[0],
        offset=scales[1] if scheme == "affine" else None,
    )
    storage = Storage(precision=precision, block_size=block_size, scheme=scheme)
    (codes, *per_block), record = _stored(tmp_path, blocks, storage)
    assert record.padded_columns == count * block_size
    assert codes.dtype == (ml_dtypes.int4 if precision == "int4" else np.int8)
    assert codes.shape == (count * block_size, 6)
    np.testing.assert_array_equal(codes.astype(np.int8)[:columns], blocks.codes.T)
    assert not codes.astype(np.int8)[columns:].any()
    names = ["w.codes", "w.scale", "w.offset"][: 2 + (scheme == "affine")]
    assert [part.name for part in record.parts] == names
    for part, expected in zip(per_block, scales, strict=False):
        assert part.dtype == np.float16
        np.testing.assert_array_equal(part, expected.T)


def test_four_bit_codes_may_be_held_in_eight(tmp_path: Path) -> None:
    scale = np.ones((3, 2), np.float16)
    blocks = QuantizedBlocks(bits=4, block_size=32, codes=_codes((3, 64)), scale=scale)
    (codes, _), _ = _stored(tmp_path, blocks, Storage(precision="int8"))
    assert codes.dtype == np.int8
    np.testing.assert_array_equal(codes, blocks.codes.T)


@pytest.mark.parametrize("value", [65536.0, -65536.0, 3e38, -3e38])
def test_a_weight_beyond_float16_is_refused_by_name_unless_stored_in_float32(value: float) -> None:
    weight = np.array([[1.0, value, -2.0]], np.float32)
    check_range("w", weight, Storage(precision="fp32"))
    for precision in ("fp16", "int8", "int4"):
        with pytest.raises(UnsupportedError, match=rf"^w holds {value:g}, .* use precision fp32$".replace("+", r"\+")):
            check_range("w", weight, Storage(precision=precision))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_largest_float16_is_accepted(precision: Precision) -> None:
    check_range("w", np.array([65504.0, -65504.0, 0.0], np.float32), Storage(precision=precision))


def test_a_storage_says_what_it_is() -> None:
    assert str(Storage(precision="fp16")) == "fp16"
    assert str(Storage(precision="int4", block_size=64, scheme="affine")) == "int4 affine block 64"
    assert get_args(Precision) == PRECISIONS
    assert [precision for precision in PRECISIONS if Storage(precision=precision).quantized] == ["int8", "int4"]
