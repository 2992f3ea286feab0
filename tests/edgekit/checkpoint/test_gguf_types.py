"""Blocks against two oracles: the structs read with loops as ggml's C code does, and the gguf package's values."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize, quantize

from edgekit.blocks import QuantizedBlocks
from edgekit.checkpoint import gguf_types, open_checkpoint
from edgekit.checkpoint.base import BlockFormat
from edgekit.checkpoint.gguf_container import read_container
from edgekit.checkpoint.gguf_tensors import read_tensor
from edgekit.checkpoint.gguf_types import TYPES, TensorType, readable_types
from edgekit.errors import CorruptArtifactError, UnsupportedError
from tests.gguf_files import WIDE_LLAMA, random_blocks, write_gguf

TinyGguf: TypeAlias = Callable[[str, str], Path]
Planted: TypeAlias = Callable[[npt.NDArray[Any], str], Path]
Bytes: TypeAlias = npt.NDArray[np.uint8]

FORMATS = {
    "Q5_0": BlockFormat(8, 32, "symmetric"),
    "Q5_1": BlockFormat(8, 32, "affine"),
    "Q4_K": BlockFormat(4, 32, "affine"),
    "Q5_K": BlockFormat(8, 32, "affine"),
    "Q6_K": BlockFormat(8, 16, "symmetric"),
}
# Unsigned codes run from 0 to twice these, less one.
CENTRES = {"Q5_0": 16, "Q5_1": 16, "Q4_K": 8, "Q5_K": 16, "Q6_K": 32}
DEQUANTIZED = sorted(set(readable_types()) - {type_.name for type_ in TYPES.values()})


class Block(NamedTuple):
    """What a block says: unsigned codes, and scales and minima as products of what is stored, exact in float64."""

    codes: list[int]
    scales: list[float]
    minima: list[float]


def _half(block: bytes, start: int) -> float:
    return float(np.frombuffer(block[start : start + 2], "<f2")[0])


def _q5_0(block: bytes, start: int = 2) -> Block:
    high, codes = int.from_bytes(block[start : start + 4], "little"), [0] * 32
    for j in range(16):
        byte = block[start + 4 + j]
        codes[j] = (byte & 0x0F) | ((high >> j) << 4 & 0x10)
        codes[j + 16] = (byte >> 4) | ((high >> (j + 12)) & 0x10)
    return Block(codes, [_half(block, 0)], [-16 * _half(block, 0)])


def _q5_1(block: bytes) -> Block:
    return _q5_0(block, 4)._replace(minima=[_half(block, 2)])


def _scale_and_minimum(packed: bytes, part: int) -> tuple[int, int]:
    """The function `get_scale_min_k4` of ggml-quants.c."""
    if part < 4:
        return packed[part] & 63, packed[part + 4] & 63
    scale = (packed[part + 4] & 0xF) | ((packed[part - 4] >> 6) << 4)
    return scale, (packed[part + 4] >> 4) | ((packed[part] >> 6) << 4)


def _q4_k(block: bytes, low: int = 16) -> Block:
    result = Block([], [], [])
    for part in range(8):
        scale, minimum = _scale_and_minimum(block[4:16], part)
        result.scales.append(_half(block, 0) * scale)
        result.minima.append(-_half(block, 2) * minimum)
        for column in range(32):
            byte = block[low + 32 * (part // 2) + column]
            result.codes.append(byte >> 4 if part % 2 else byte & 0xF)
    return result


def _q5_k(block: bytes) -> Block:
    result = _q4_k(block, 48)
    for part in range(8):
        for column in range(32):
            if block[16 + column] & (1 << part):
                result.codes[32 * part + column] += 16
    return result


def _q6_k(block: bytes) -> Block:
    codes = [0] * 256
    for half in range(2):
        for column in range(32):
            first, second = block[64 * half + column], block[64 * half + column + 32]
            high = block[128 + 32 * half + column]
            base = 128 * half + column
            codes[base] = (first & 0xF) | (((high >> 0) & 3) << 4)
            codes[base + 32] = (second & 0xF) | (((high >> 2) & 3) << 4)
            codes[base + 64] = (first >> 4) | (((high >> 4) & 3) << 4)
            codes[base + 96] = (second >> 4) | (((high >> 6) & 3) << 4)
    signed = [byte - 256 if byte > 127 else byte for byte in block[192:208]]
    scales = [_half(block, 208) * scale for scale in signed]
    return Block(codes, scales, [-32 * scale for scale in scales])


BY_LOOPS: Mapping[str, Callable[[bytes], Block]] = {
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}


@pytest.fixture(scope="module")
def wide_gguf(make_checkpoint: Any, hugging_face: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of Q4_K with a head in Q6_K."""
    directory, path = make_checkpoint(WIDE_LLAMA), tmp_path_factory.mktemp("gguf") / "wide.gguf"
    write_gguf(hugging_face(directory), directory, path, {"output.*": "Q6_K", "*": "Q4_K"})
    return path


def _raw(kind: str, rows: int = 6, columns: int = 512) -> Bytes:
    if kind.endswith("_K"):
        return random_blocks(kind, (rows, columns), 0.05, seed=3)
    values = np.random.default_rng(3).standard_normal((rows, columns)).astype(np.float32) * 0.05
    raw: Bytes = quantize(values, GGMLQuantizationType[kind])
    return raw


def _read(path: Path) -> QuantizedBlocks:
    weight = read_tensor(read_container(path), "w")
    assert isinstance(weight, QuantizedBlocks)
    return weight


@pytest.mark.parametrize("kind", FORMATS)
def test_codes_scales_and_offsets_are_those_of_the_struct(kind: str, planted: Planted) -> None:
    raw = _raw(kind)
    weight = _read(planted(raw, kind))
    assert BlockFormat(weight.bits, weight.block_size, weight.scheme) == FORMATS[kind]
    size, centre = GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1], CENTRES[kind]
    expected = [
        [BY_LOOPS[kind](row[start : start + size].tobytes()) for start in range(0, len(row), size)] for row in raw
    ]
    codes = np.array([[code for block in row for code in block.codes] for row in expected])
    np.testing.assert_array_equal(weight.codes, codes - centre)
    assert (weight.codes.min(), weight.codes.max()) == (-centre, centre - 1)
    scales = np.array([[scale for block in row for scale in block.scales] for row in expected])
    np.testing.assert_array_equal(weight.scale, scales.astype(np.float16))
    minima = np.array([[minimum for block in row for minimum in block.minima] for row in expected])
    if weight.offset is None:
        np.testing.assert_array_equal(minima, -centre * scales)
        return
    _assert_rounded_to_float16(weight.offset, minima + centre * scales)


def _assert_rounded_to_float16(got: npt.NDArray[np.float16], exact: npt.NDArray[np.float64]) -> None:
    # A hundredth more than half a unit in the last place, for the float32 of the way.
    assert (np.abs(got - exact) <= 1.01 * _half_a_unit(got)).all()


def _half_a_unit(rounded: npt.NDArray[np.float16]) -> npt.NDArray[np.float64]:
    """How far a number can be from the float16 that it was rounded to."""
    return 0.5 * np.spacing(np.abs(rounded)).astype(np.float64)


@pytest.mark.parametrize("kind", FORMATS)
def test_values_are_ggufs_within_the_rounding_of_scale_and_offset(kind: str, planted: Planted) -> None:
    raw = _raw(kind, rows=40)
    weight = _read(planted(raw, kind))
    oracle = dequantize(raw, GGMLQuantizationType[kind])
    # Half a unit in the last place of each, the scale's once for every step of the code.
    bound = np.repeat(_half_a_unit(weight.scale), weight.block_size, axis=1) * np.abs(weight.codes)
    if weight.offset is not None:
        bound += np.repeat(_half_a_unit(weight.offset), weight.block_size, axis=1)
    float32 = 1e-6 * np.abs(oracle).max()
    assert (np.abs(weight.dequantize() - oracle) <= bound + float32).all()
    # Which is little: a code of the largest scale is a step of at least 5e-3.
    assert np.sqrt(np.square(weight.dequantize() - oracle).mean()) < 3e-4 * np.sqrt(np.square(oracle).mean())


def test_products_too_small_for_normal_float16_are_not_rounded_at_all(planted: Planted) -> None:
    raw = _raw("Q6_K", rows=1)
    raw[0, 208:210] = np.array([2.0**-23], np.float16).view(np.uint8)
    raw[0, 418:420] = np.array([3 * 2.0**-24], np.float16).view(np.uint8)
    oracle = dequantize(raw, GGMLQuantizationType.Q6_K)
    assert 0 < np.abs(oracle).max() < 1e-3
    np.testing.assert_array_equal(_read(planted(raw, "Q6_K")).dequantize(), oracle)


@pytest.mark.parametrize("kind", FORMATS)
def test_rows_are_taken_without_the_others(kind: str, planted: Planted) -> None:
    container = read_container(planted(_raw(kind), kind))
    weight, taken = (read_tensor(container, "w", rows) for rows in (None, np.array([4, 0, 4])))
    assert isinstance(weight, QuantizedBlocks)
    assert isinstance(taken, QuantizedBlocks)
    np.testing.assert_array_equal(taken.dequantize(), weight.take_rows(np.array([4, 0, 4])).dequantize())


def test_the_table_agrees_with_ggufs_own() -> None:
    for number, row in TYPES.items():
        member = GGMLQuantizationType(number)
        assert (row.name, (row.elements, row.size)) == (member.name, GGML_QUANT_SIZES[member])


def test_one_row_adds_a_type(planted: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.array([[1, -2], [127, -128], [0, 5]], np.int8)
    path = planted(values, "I8")
    with pytest.raises(UnsupportedError, match="as I8; supported"):
        read_container(path)
    row = TensorType("I8", 1, 1, lambda blocks: blocks.view(np.int8).astype(np.float32))
    monkeypatch.setattr(gguf_types, "TYPES", {**TYPES, 24: row})
    np.testing.assert_array_equal(read_tensor(read_container(path), "w"), values)


def test_doubles_are_read_as_floats(planted: Planted) -> None:
    values = np.random.default_rng(0).standard_normal((3, 5))
    weight = read_tensor(read_container(planted(values, "F64")), "w")
    assert isinstance(weight, np.ndarray)
    assert weight.dtype == np.float32
    np.testing.assert_array_equal(weight, values.astype(np.float32))


def test_every_type_that_gguf_dequantizes_is_among_the_readable() -> None:
    # Named, so that a type that falls out of the list is noticed.
    known = {"Q2_K", "Q3_K", "IQ1_M", "IQ1_S", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ3_S", "IQ3_XXS", "IQ4_NL", "IQ4_XS"}
    assert known | {"TQ1_0", "TQ2_0", "MXFP4"} <= set(DEQUANTIZED)


@pytest.mark.parametrize("kind", DEQUANTIZED)
def test_other_types_have_the_values_that_gguf_computes(kind: str, planted: Planted) -> None:
    elements, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    raw = np.random.default_rng(0).integers(0, 256, (5, 512 // elements * size), np.uint8)
    with np.errstate(all="ignore"):  # random bytes are now and then no numbers
        expected = dequantize(raw, GGMLQuantizationType[kind])
    assert np.isfinite(expected).mean() > 0.5
    weight = read_tensor(read_container(planted(raw, kind)), "w")
    assert isinstance(weight, np.ndarray)
    assert weight.dtype == np.float32
    np.testing.assert_array_equal(weight, expected)


@pytest.mark.parametrize(("kind", "dequantized"), [("MXFP4", True), ("Q5_1", False), ("Q4_0", False), ("F16", False)])
def test_a_file_whose_blocks_are_not_kept_says_so_once(
    kind: str, dequantized: bool, tiny_gguf: TinyGguf, caplog: pytest.LogCaptureFixture
) -> None:
    path = tiny_gguf("llama", kind)
    with open_checkpoint(path) as checkpoint:
        for name in checkpoint.spec.tensor_shapes():
            checkpoint.tensor(name)
    message = (
        f"{path.name} has tensors in {kind}, whose blocks cannot be kept: their values are dequantized and rounded "
        "anew to the chosen precision"
    )
    assert caplog.messages == ([message] if dequantized else [])
    assert all(record.levelno == logging.WARNING for record in caplog.records)


def test_all_types_whose_blocks_are_not_kept_are_named(
    make_checkpoint: Any, hugging_face: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = make_checkpoint({**WIDE_LLAMA, "num_hidden_layers": 1})
    types = {"*.attn_v.*": "Q5_K", "*.attn_*": "IQ4_XS", "*.ffn_*": "Q3_K", "output.*": "Q6_K", "*": "TQ1_0"}
    write_gguf(hugging_face(directory), directory, tmp_path / "mixed.gguf", types)
    with open_checkpoint(tmp_path / "mixed.gguf") as checkpoint:
        formats = {
            name: checkpoint.block_format(name) for name in checkpoint.spec.tensor_shapes() if "norm" not in name
        }
    assert [message.split(",")[:3] for message in caplog.messages] == [
        ["mixed.gguf has tensors in IQ4_XS", " Q3_K", " TQ1_0"]
    ]
    kept = {name: stored for name, stored in formats.items() if stored is not None}
    assert kept == {"layers.0.self_attn.v_proj.weight": FORMATS["Q5_K"], "lm_head.weight": FORMATS["Q6_K"]}


@pytest.mark.parametrize(
    ("stored", "name", "start", "number"),
    [
        ("output.weight", "lm_head.weight", 208, 6000.0),  # a scale beyond float16 once it is multiplied by 127
        ("output.weight", "lm_head.weight", 208, np.nan),
        ("blk.1.ffn_up.weight", "layers.1.mlp.up_proj.weight", 0, np.inf),
        ("blk.1.ffn_up.weight", "layers.1.mlp.up_proj.weight", 2, 60000.0),
    ],
)
def test_scales_and_offsets_beyond_float16_are_refused(
    stored: str, name: str, start: int, number: float, wide_gguf: Path, tmp_path: Path
) -> None:
    contents, path = bytearray(wide_gguf.read_bytes()), tmp_path / "infinite.gguf"
    first = read_container(wide_gguf).tensors[stored].offset
    contents[first + start : first + start + 2] = np.array([number], np.float16).tobytes()
    path.write_bytes(contents)
    with (
        open_checkpoint(path) as checkpoint,
        pytest.raises(CorruptArtifactError, match=rf"infinite or not numbers in tensor '{stored}'"),
    ):
        checkpoint.tensor(name)
