"""Blocks against the roundings that the field uses, and against matrices that are blocks already."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf import quants as gguf_quants

from edgekit.export.quantize import PART_ELEMENTS, SMALLEST_SCALE, quantize

if TYPE_CHECKING:
    from collections.abc import Callable

    from edgekit.blocks import QuantizedBlocks, Scheme

Bits: TypeAlias = Literal[4, 8]
FloatArray: TypeAlias = npt.NDArray[np.float32]

BLOCK_SIZES = (16, 32, 64, 128)
every_format = pytest.mark.parametrize(
    ("bits", "scheme"), [(4, "symmetric"), (4, "affine"), (8, "symmetric"), (8, "affine")]
)
every_block_size = pytest.mark.parametrize("block_size", BLOCK_SIZES)

DISTRIBUTIONS: dict[str, Callable[[np.random.Generator], npt.NDArray[np.float64]]] = {
    "normal": lambda rng: rng.standard_normal((64, 256)),
    "heavy tails": lambda rng: rng.standard_t(3, (64, 256)),
    "skewed": lambda rng: rng.exponential(0.02, (64, 256)),
    "uniform": lambda rng: rng.uniform(-0.1, 0.1, (64, 256)),
    "off centre": lambda rng: 0.3 + 0.02 * rng.standard_normal((64, 256)),
    "up to the end of float16": lambda rng: rng.uniform(-6e4, 6e4, (64, 256)),
}


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(3)


def _half(values: FloatArray) -> FloatArray:
    return values.astype(np.float16).astype(np.float32)


def _rounded_to_largest(blocks: FloatArray, bits: Bits, scheme: Scheme) -> FloatArray:
    """Round to nearest with the scale that just holds the extremes: what most quantizers do; blocks along axis −1."""
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    if scheme == "symmetric":
        scale = _half(np.abs(blocks).max(-1, keepdims=True) / high)
        offset = np.zeros_like(scale)
    else:
        smallest, largest = blocks.min(-1, keepdims=True), blocks.max(-1, keepdims=True)
        scale = _half((largest - smallest) / (high - low))
        offset = _half(smallest - low * scale)
    codes = np.divide(blocks - offset, scale, out=np.zeros_like(blocks), where=scale != 0)
    rounded: FloatArray = np.clip(np.round(codes), low, high) * scale + offset
    return rounded


def _errors(weight: FloatArray, rounded: FloatArray, block_size: int) -> npt.NDArray[np.float64]:
    """Squared error of each block."""
    difference = (weight.astype(np.float64) - rounded).reshape(len(weight), -1, block_size)
    squared: npt.NDArray[np.float64] = np.square(difference).sum(-1)
    return squared


def _check_layout(blocks: QuantizedBlocks, bits: Bits, scheme: Scheme, block_size: int) -> None:
    rows, columns = blocks.shape
    assert (blocks.bits, blocks.scheme, blocks.block_size) == (bits, scheme, block_size)
    assert blocks.codes.dtype == np.int8
    assert blocks.codes.min() >= -(1 << (bits - 1))
    assert blocks.codes.max() <= (1 << (bits - 1)) - 1
    for part in (blocks.scale, blocks.offset):
        if part is not None:
            assert part.dtype == np.float16
            assert part.shape == (rows, -(-columns // block_size))
            assert np.isfinite(part).all()
    assert (blocks.offset is None) == (scheme == "symmetric")


@every_format
@every_block_size
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_the_error_is_below_that_of_rounding_to_the_largest_weight(
    distribution: str, bits: Bits, scheme: Scheme, block_size: int, rng: np.random.Generator
) -> None:
    weight = DISTRIBUTIONS[distribution](rng).astype(np.float32)
    blocks = quantize(weight, bits, block_size, scheme)
    _check_layout(blocks, bits, scheme, block_size)
    baseline = _rounded_to_largest(weight.reshape(64, -1, block_size), bits, scheme).reshape(weight.shape)
    got, plain = _errors(weight, blocks.dequantize(), block_size), _errors(weight, baseline, block_size)
    assert got.sum() < plain.sum()
    if scheme == "symmetric":  # the plain scale is among those that are tried, so no block may lose
        assert (got <= plain * (1 + 1e-4)).all()


@pytest.mark.parametrize(("bits", "scheme", "gain"), [(4, "symmetric", 0.75), (4, "affine", 0.85)])
def test_outliers_cost_four_bits_clearly_less(
    bits: Bits, scheme: Scheme, gain: float, rng: np.random.Generator
) -> None:
    weight = DISTRIBUTIONS["heavy tails"](rng).astype(np.float32)
    baseline = _rounded_to_largest(weight.reshape(64, -1, 32), bits, scheme).reshape(weight.shape)
    got = _errors(weight, quantize(weight, bits, 32, scheme).dequantize(), 32).sum()
    assert got < gain * _errors(weight, baseline, 32).sum()


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize(
    ("kind", "bits", "scheme"), [("Q8_0", 8, "symmetric"), ("Q4_0", 4, "symmetric"), ("Q4_1", 4, "affine")]
)
def test_the_error_is_below_that_of_ggufs_quantizer(
    kind: str, bits: Bits, scheme: Scheme, distribution: str, rng: np.random.Generator
) -> None:
    weight = DISTRIBUTIONS[distribution](rng).astype(np.float32)
    dtype = GGMLQuantizationType[kind]
    theirs: FloatArray = gguf_quants.dequantize(gguf_quants.quantize(weight, dtype), dtype)
    ours = quantize(weight, bits, 32, scheme).dequantize()
    assert _errors(weight, ours, 32).sum() < _errors(weight, theirs, 32).sum()


def test_the_error_of_int8_is_below_that_of_torchs_quantizer(rng: np.random.Generator) -> None:
    weight = rng.standard_normal((64, 32)).astype(np.float32)
    scale = torch.from_numpy(np.abs(weight).max(1) / 127)
    zero_point = torch.zeros(64, dtype=torch.int32)
    theirs = torch.fake_quantize_per_channel_affine(torch.from_numpy(weight), scale, zero_point, 0, -128, 127)
    ours = quantize(weight, 8, 32, "symmetric").dequantize()
    assert np.square(ours - weight).sum() < np.square(theirs.numpy() - weight).sum()


@every_format
@every_block_size
@pytest.mark.parametrize("restricted", [False, True])
def test_a_matrix_that_is_blocks_already_comes_back_unchanged(
    bits: Bits, scheme: Scheme, block_size: int, restricted: bool, rng: np.random.Generator
) -> None:
    # The restricted codes are those of the quantizers that leave the lowest one out, and of negated matrices.
    high = (1 << (bits - 1)) - 1
    low = -high if restricted and scheme == "symmetric" else -high - 1
    codes = rng.integers(low, high, (16, 256), endpoint=True)
    codes[:, ::16] = low
    codes[:, 1::16] = high
    scale = (0.01 * rng.uniform(0.5, 2, (16, 256 // block_size))).astype(np.float16)
    offset = np.zeros_like(scale) if scheme == "symmetric" else rng.normal(0, 0.05, scale.shape).astype(np.float16)
    wide_scale, wide_offset = (np.repeat(part.astype(np.float32), block_size, axis=1) for part in (scale, offset))
    planted = codes.astype(np.float32) * wide_scale + wide_offset
    got = quantize(planted, bits, block_size, scheme).dequantize()
    if scheme == "symmetric":
        np.testing.assert_array_equal(got, planted)
    else:  # the offset of a block is estimated in float32 and may fall on the neighbouring float16
        np.testing.assert_allclose(got, planted, atol=2**-11 * np.abs(planted).max(), rtol=0)


@pytest.mark.parametrize(("kind", "bits"), [("Q8_0", 8), ("Q4_0", 4)])
def test_what_gguf_has_rounded_comes_back_unchanged(kind: str, bits: Bits, rng: np.random.Generator) -> None:
    dtype = GGMLQuantizationType[kind]
    raw = gguf_quants.quantize(rng.standard_normal((64, 256)).astype(np.float32), dtype)
    rounded: FloatArray = gguf_quants.dequantize(raw, dtype)
    np.testing.assert_array_equal(quantize(rounded, bits, 32, "symmetric").dequantize(), rounded)


@every_format
@every_block_size
@pytest.mark.parametrize("columns", [1, 15, 33, 96, 200])
def test_a_short_last_block_is_rounded_like_a_block_of_its_own(
    columns: int, bits: Bits, scheme: Scheme, block_size: int, rng: np.random.Generator
) -> None:
    # Far from zero, so that padding taken for weights would show.
    weight = (3 + rng.standard_normal((8, columns))).astype(np.float32)
    blocks = quantize(weight, bits, block_size, scheme)
    _check_layout(blocks, bits, scheme, block_size)
    assert blocks.shape == weight.shape
    last = columns // block_size * block_size
    if last < columns:
        alone = quantize(weight[:, last:], bits, columns - last, scheme)
        np.testing.assert_allclose(blocks.dequantize()[:, last:], alone.dequantize(), atol=1e-5)


@every_format
@pytest.mark.parametrize("value", [0.0, -0.0, 0.25, -0.25, 3e-8, 1.0, -65504.0, 65504.0])
def test_a_constant_block_is_exact(value: float, bits: Bits, scheme: Scheme) -> None:
    weight = np.full((2, 64), value, np.float32)
    blocks = quantize(weight, bits, 32, scheme)
    _check_layout(blocks, bits, scheme, 32)
    np.testing.assert_allclose(blocks.dequantize(), weight, rtol=2**-11, atol=float(SMALLEST_SCALE) / 2)


@every_format
def test_tiny_weights_do_not_vanish(bits: Bits, scheme: Scheme, rng: np.random.Generator) -> None:
    # The scale that the largest weight asks for is below half of float16's smallest number.
    weight = (1e-7 * rng.standard_normal((16, 64))).astype(np.float32)
    blocks = quantize(weight, bits, 32, scheme)
    _check_layout(blocks, bits, scheme, 32)
    assert np.abs(blocks.dequantize() - weight).max() <= SMALLEST_SCALE
    assert np.square(blocks.dequantize() - weight).sum() < 0.05 * np.square(weight).sum()


@every_format
def test_weights_below_float16_are_rounded_to_its_multiples(
    bits: Bits, scheme: Scheme, rng: np.random.Generator
) -> None:
    weight = (1e-6 * rng.standard_normal((16, 128))).astype(np.float32)
    error = quantize(weight, bits, 32, scheme).dequantize() - weight
    best = SMALLEST_SCALE / 2 if bits == 8 else np.abs(weight).max() / 8
    assert np.abs(error).max() <= best + SMALLEST_SCALE


@every_format
@every_block_size
def test_the_largest_weights_that_there_may_be_stay_finite(
    bits: Bits, scheme: Scheme, block_size: int, rng: np.random.Generator
) -> None:
    signs = rng.choice([-65504.0, 65504.0], (64, 256))
    weight = np.where(rng.random((64, 256)) < 0.2, signs, rng.uniform(-65504, 65504, (64, 256))).astype(np.float32)
    weight[:16] = np.abs(weight[:16])
    weight[16:32] = signs[16:32]
    blocks = quantize(weight, bits, block_size, scheme)
    _check_layout(blocks, bits, scheme, block_size)
    step = 65504 / (1 << (bits - 1)) + 32  # of the codes, and of float16 where it is coarsest
    assert np.abs(blocks.dequantize() - weight).max() <= (2 if bits == 4 else 1) * step


@pytest.mark.parametrize("value", [1e-20, 1e-30, 1e-40, 1e-45])
@every_format
def test_weights_beyond_reach_become_the_nearest_that_there_is(value: float, bits: Bits, scheme: Scheme) -> None:
    weight = np.zeros((1, 32), np.float32)
    weight[0, 3] = value
    assert np.abs(quantize(weight, bits, 32, scheme).dequantize() - weight).max() <= value


@every_format
@every_block_size
@pytest.mark.parametrize("outlier", [50.0, -50.0])
def test_a_single_outlier_does_not_ruin_its_block(
    outlier: float, bits: Bits, scheme: Scheme, block_size: int, rng: np.random.Generator
) -> None:
    weight = rng.standard_normal((4, 256)).astype(np.float32)
    clean = quantize(weight, bits, block_size, scheme).dequantize()
    weight[1, 7] = outlier
    got = quantize(weight, bits, block_size, scheme).dequantize()
    baseline = _rounded_to_largest(weight.reshape(4, -1, block_size), bits, scheme).reshape(weight.shape)
    assert np.square(got - weight).sum() <= np.square(baseline - weight).sum()
    untouched = np.ones_like(weight, dtype=bool)
    untouched[1, :block_size] = False
    np.testing.assert_array_equal(got[untouched], clean[untouched])


@every_format
def test_rows_are_rounded_alike_however_many_there_are(
    bits: Bits, scheme: Scheme, monkeypatch: Any, rng: np.random.Generator
) -> None:
    weight = rng.standard_normal((37, 96)).astype(np.float32)
    whole = quantize(weight, bits, 32, scheme)
    assert weight.size < PART_ELEMENTS
    monkeypatch.setattr("edgekit.export.quantize.PART_ELEMENTS", 500)
    pieces = quantize(weight, bits, 32, scheme)
    np.testing.assert_array_equal(pieces.codes, whole.codes)
    np.testing.assert_array_equal(pieces.scale, whole.scale)
    np.testing.assert_array_equal(pieces.dequantize(), whole.dequantize())


def test_a_view_is_rounded_like_a_copy_and_left_alone(rng: np.random.Generator) -> None:
    base = rng.standard_normal((64, 40)).astype(np.float32)
    before = base.copy()
    view = base.T[:, ::2]
    np.testing.assert_array_equal(
        quantize(view, 4, 16, "affine").dequantize(), quantize(view.copy(), 4, 16, "affine").dequantize()
    )
    np.testing.assert_array_equal(base, before)
