"""Rounding a float matrix to blocks of int4 or int8 codes with the smallest squared error.

Taking the scale from the largest weight of a block spends the codes on outliers. Here several scales are
tried per block; each is refined by least squares for the codes it gives (for the affine scheme scale and
offset together), and the best is kept. For fixed codes q the least-squares solution is

    symmetric   s = Σ w·q / Σ q²
    affine      s = cov(q, w) / var(q),   m = mean(w) − s·mean(q)

the alternation of k-means restricted to equally spaced centres (llama.cpp's k-quants search likewise).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from edgekit.blocks import QuantizedBlocks, Scheme

# Starting scales relative to the one that just holds the largest weight: below 1 outliers are clipped. The last one
# leaves the lowest code out, as most quantizers do: what one of them has rounded comes back unchanged.
INT4_STARTS = (0.7, 0.8, 0.88, 0.95, 1.0, 8 / 7)
INT8_STARTS = (0.97, 1.0, 128 / 127)
REFINEMENTS = 2
SMALLEST_SCALE = np.float32(2.0**-24)
# Rows are worked on in parts that fit the cache, each by one thread: several threads on one part would wait for each
# other after every operation.
PART_ELEMENTS = 1 << 16

FloatArray: TypeAlias = npt.NDArray[np.float32]


def quantize(weight: FloatArray, bits: Literal[4, 8], block_size: int, scheme: Scheme) -> QuantizedBlocks:
    """Rounds a matrix to blocks along its columns.

    Args:
        weight: shape (rows, columns), float32; finite and within float16's ±65504.
        bits: 4 or 8.
        block_size: Columns that share a scale; the last block may be shorter.
        scheme: `symmetric` (w ≈ s·q) or `affine` (w ≈ s·q + m).

    Returns:
        Codes, and scales and offsets already rounded to float16: the codes are chosen for the rounded ones.
    """
    rows, columns = weight.shape
    blocks = -(-columns // block_size)
    codes = np.empty((rows, columns), np.int8)
    scale = np.empty((rows, blocks), np.float16)
    offset = np.empty((rows, blocks), np.float16) if scheme == "affine" else None
    whole, rest = divmod(columns, block_size)
    spans = [(slice(0, columns - rest), slice(0, whole), block_size)]
    if rest:
        spans.append((slice(columns - rest, columns), slice(whole, blocks), rest))

    def quantize_rows(part: slice) -> None:
        for inputs, span, size in spans:
            w = weight[part, inputs]
            # A candidate beyond float16 becomes infinite and loses.
            with np.errstate(over="ignore", invalid="ignore"):
                q, s, m = _fit(w.reshape(len(w), span.stop - span.start, size), bits, scheme)
            codes[part, inputs], scale[part, span] = q.reshape(w.shape), s
            if offset is not None:
                offset[part, span] = m

    step = max(1, PART_ELEMENTS // columns)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(quantize_rows, [slice(start, start + step) for start in range(0, rows, step)]))
    return QuantizedBlocks(bits=bits, block_size=block_size, codes=codes, scale=scale, offset=offset)


def _fit(w: FloatArray, bits: Literal[4, 8], scheme: Scheme) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Returns codes (rows, blocks, block_size), scale and offset (rows, blocks) of the best of all that was tried."""
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    starts: Sequence[float] = INT4_STARTS if bits == 4 else INT8_STARTS
    best_error = np.full(w.shape[:2], np.inf, np.float32)
    best_scale, best_offset = np.zeros_like(best_error), np.zeros_like(best_error)
    for start in starts:
        scale, offset = _start(w, start, low, high, scheme)
        for refinement in range(REFINEMENTS + 1):
            scale, offset = _float16_scale(scale), offset.astype(np.float16).astype(np.float32)
            codes = _codes(w, scale, offset, low, high)
            error = codes * scale[..., None]
            error += offset[..., None]
            error -= w
            squared = _dot(error, error)
            better = squared < best_error
            best_error = np.where(better, squared, best_error)
            best_scale = np.where(better, scale, best_scale)
            best_offset = np.where(better, offset, best_offset)
            if refinement < REFINEMENTS:
                scale, offset = _least_squares(w, codes, scheme)
    return _codes(w, best_scale, best_offset, low, high), best_scale, best_offset


def _start(w: FloatArray, start: float, low: int, high: int, scheme: Scheme) -> tuple[FloatArray, FloatArray]:
    factor = np.float32(start)
    if scheme == "affine":
        smallest, largest = w.min(-1), w.max(-1)
        scale = factor * (largest - smallest) / np.float32(high - low)
        return scale, (smallest + largest) / 2 - scale * np.float32((low + high) / 2)
    # The negative range has one code more, so the largest weight of a block goes there, whatever its sign.
    extreme = np.take_along_axis(w, np.abs(w).argmax(-1)[..., None], -1)[..., 0]
    return factor * extreme / np.float32(low), np.zeros_like(extreme)


def _float16_scale(scale: FloatArray) -> FloatArray:
    """Rounds to float16, but never to zero, which would lose the block."""
    rounded = scale.astype(np.float16).astype(np.float32)
    return np.where((rounded == 0) & (scale != 0), np.copysign(SMALLEST_SCALE, scale), rounded)


def _codes(w: FloatArray, scale: FloatArray, offset: FloatArray, low: int, high: int) -> FloatArray:
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)
    codes = w - offset[..., None]
    codes *= inverse[..., None]
    np.rint(codes, out=codes)
    return np.clip(codes, low, high, out=codes)


def _least_squares(w: FloatArray, codes: FloatArray, scheme: Scheme) -> tuple[FloatArray, FloatArray]:
    if scheme == "symmetric":
        return _ratio(_dot(w, codes), _dot(codes, codes)), np.zeros(w.shape[:2], np.float32)
    count = np.float32(w.shape[-1])
    mean_w, mean_q = w.sum(-1) / count, codes.sum(-1) / count
    covariance = _dot(w, codes) / count - mean_w * mean_q
    variance = _dot(codes, codes) / count - mean_q * mean_q
    scale = _ratio(covariance, variance)
    return scale, mean_w - scale * mean_q


def _dot(left: FloatArray, right: FloatArray) -> FloatArray:
    product: FloatArray = np.einsum("rbk,rbk->rb", left, right)
    return product


def _ratio(numerator: FloatArray, denominator: FloatArray) -> FloatArray:
    return np.divide(numerator, denominator, out=np.zeros_like(numerator), where=denominator > 1e-12)
