"""Rounding a float matrix to blocks of int4 or int8 codes with the smallest squared error.

Taking the scale from the largest weight of a block spends the codes on outliers. Here several scales are
tried per block; each is refined by least squares for the codes it gives (for the affine scheme scale and
offset together), and the best is kept. For fixed codes q the least-squares solution is

    symmetric   s = Σ w·q / Σ q²
    affine      s = cov(q, w) / var(q),   m = mean(w) − s·mean(q)

the alternation of k-means restricted to equally spaced centres (llama.cpp's k-quants search likewise).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from edgekit.blocks import QuantizedBlocks, Scheme

# Starting scales relative to the one that just holds the largest weight: below 1 outliers are clipped. The last one
# leaves the lowest code out, as most quantizers do: what one of them has rounded comes back unchanged.
INT4_STARTS = (0.7, 0.8, 0.88, 0.95, 1.0, 8 / 7)
INT8_STARTS = (0.97, 1.0, 128 / 127)
REFINEMENTS = 2
SMALLEST_SCALE = 2.0**-24
CHUNK_ELEMENTS = 1 << 20


def quantize(weight: npt.NDArray[np.float32], bits: Literal[4, 8], block_size: int, scheme: Scheme) -> QuantizedBlocks:
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
    step = max(1, CHUNK_ELEMENTS // (blocks * block_size))
    for start in range(0, rows, step):
        part = slice(start, start + step)
        chunk, valid = _in_blocks(weight[part], block_size, blocks)
        q, s, m = _fit(chunk, valid, bits, scheme)
        codes[part] = q.reshape(q.shape[0], -1)[:, :columns].to(torch.int8).numpy()
        scale[part] = s.to(torch.float16).numpy()
        if offset is not None:
            offset[part] = m.to(torch.float16).numpy()
    return QuantizedBlocks(bits=bits, block_size=block_size, codes=codes, scale=scale, offset=offset)


def _in_blocks(
    weight: npt.NDArray[np.float32], block_size: int, blocks: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the rows as (rows, blocks, block_size), and which columns are real when the last block is padded."""
    rows, columns = weight.shape
    padding = blocks * block_size - columns
    values = torch.from_numpy(np.ascontiguousarray(weight))
    if padding == 0:
        return values.reshape(rows, blocks, block_size), None
    valid = torch.ones(columns)
    padded = torch.nn.functional.pad(values, (0, padding))
    return padded.reshape(rows, blocks, block_size), torch.nn.functional.pad(valid, (0, padding)).reshape(
        blocks, block_size
    )


def _fit(
    w: torch.Tensor, valid: torch.Tensor | None, bits: int, scheme: Scheme
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns codes (rows, blocks, block_size), scale and offset (rows, blocks) of the best of all that was tried."""
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    starts: Sequence[float] = INT4_STARTS if bits == 4 else INT8_STARTS
    best_error = torch.full(w.shape[:2], torch.inf)
    best_scale, best_offset = torch.zeros(w.shape[:2]), torch.zeros(w.shape[:2])
    for start in starts:
        scale, offset = _start(w, valid, start, low, high, scheme)
        for refinement in range(REFINEMENTS + 1):
            scale, offset = _float16_scale(scale), offset.half().float()
            codes = _codes(w, scale, offset, low, high)
            error = w - (codes * scale[..., None] + offset[..., None])
            squared = (error.square() if valid is None else error.square() * valid).sum(-1)
            better = squared < best_error
            best_error = torch.where(better, squared, best_error)
            best_scale = torch.where(better, scale, best_scale)
            best_offset = torch.where(better, offset, best_offset)
            if refinement < REFINEMENTS:
                scale, offset = _least_squares(w, codes, valid, scheme)
    codes = _codes(w, best_scale, best_offset, low, high)
    return (codes if valid is None else codes * valid), best_scale, best_offset


def _start(
    w: torch.Tensor, valid: torch.Tensor | None, start: float, low: int, high: int, scheme: Scheme
) -> tuple[torch.Tensor, torch.Tensor]:
    if scheme == "affine":
        smallest = (w if valid is None else torch.where(valid > 0, w, torch.inf)).amin(-1)
        largest = (w if valid is None else torch.where(valid > 0, w, -torch.inf)).amax(-1)
        scale = start * (largest - smallest) / (high - low)
        return scale, (smallest + largest) / 2 - scale * (low + high) / 2
    # The negative range has one code more, so the largest weight of a block goes there, whatever its sign.
    extreme = torch.gather(w, -1, w.abs().argmax(-1, keepdim=True))[..., 0]
    return start * extreme / low, torch.zeros_like(extreme)


def _float16_scale(scale: torch.Tensor) -> torch.Tensor:
    """Rounds to float16, but never to zero, which would lose the block."""
    rounded = scale.half().float()
    smallest = torch.copysign(torch.tensor(SMALLEST_SCALE), scale)
    return torch.where((rounded == 0) & (scale != 0), smallest, rounded)


def _codes(w: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor, low: int, high: int) -> torch.Tensor:
    inverse = torch.where(scale == 0, 0.0, 1.0 / scale)
    return torch.round((w - offset[..., None]) * inverse[..., None]).clamp_(low, high)


def _least_squares(
    w: torch.Tensor, codes: torch.Tensor, valid: torch.Tensor | None, scheme: Scheme
) -> tuple[torch.Tensor, torch.Tensor]:
    codes = codes if valid is None else codes * valid
    if scheme == "symmetric":
        return _ratio((w * codes).sum(-1), codes.square().sum(-1)), torch.zeros(w.shape[:2])
    count = torch.tensor(float(w.shape[-1])) if valid is None else valid.sum(-1)
    mean_w, mean_q = w.sum(-1) / count, codes.sum(-1) / count
    covariance = (w * codes).sum(-1) / count - mean_w * mean_q
    variance = codes.square().sum(-1) / count - mean_q.square()
    scale = _ratio(covariance, variance)
    return scale, mean_w - scale * mean_q


def _ratio(numerator: torch.Tensor, denominator: torch.Tensor) -> torch.Tensor:
    return torch.where(denominator.abs() < 1e-12, 0.0, numerator / denominator.clamp_min(1e-12))
