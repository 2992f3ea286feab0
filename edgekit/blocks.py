"""Block-quantized matrices: small integer codes with one scale, and perhaps one offset, per block of a row.

    w[n, k] = scale[n, k // block_size] · codes[n, k]  (+ offset[n, k // block_size])

Codes are signed: −8…7 for 4 bits, −128…127 for 8 bits. `symmetric` blocks have no offset; `affine` blocks
have a real one, so that the blocks of a GGUF fit whose zero is no code: Q4_1, Q4_K, … Scales and offsets are float16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Scheme: TypeAlias = Literal["symmetric", "affine"]


@dataclass(frozen=True, kw_only=True)
class QuantizedBlocks:
    """A matrix of shape (rows, columns) as integer codes in blocks along the columns.

    Attributes:
        bits: 4 or 8.
        block_size: Columns that share a scale; the last block of a row may be shorter.
        codes: shape (rows, columns), int8.
        scale: shape (rows, ceil(columns / block_size)), float16.
        offset: Same shape and dtype as `scale`, or None for the symmetric scheme.
    """

    bits: Literal[4, 8]
    block_size: int
    codes: npt.NDArray[np.int8]
    scale: npt.NDArray[np.float16]
    offset: npt.NDArray[np.float16] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns) of the matrix."""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def scheme(self) -> Scheme:
        """`affine` when the blocks carry offsets."""
        return "symmetric" if self.offset is None else "affine"

    def take_rows(self, rows: npt.NDArray[np.int64]) -> QuantizedBlocks:
        """Returns the matrix with its rows selected or permuted; `rows` has shape (n,)."""
        offset = None if self.offset is None else self.offset[rows]
        return QuantizedBlocks(
            bits=self.bits,
            block_size=self.block_size,
            codes=self.codes[rows],
            scale=self.scale[rows],
            offset=offset,
        )

    def dequantize(self) -> npt.NDArray[np.float32]:
        """Returns the matrix in float32, shape (rows, columns)."""
        rows, columns = self.shape
        values = np.empty((rows, self.scale.shape[1], self.block_size), np.float32)
        # Whole blocks, the last one filled with zeros: scales spread over a matrix would take twice its memory.
        flat = values.reshape(rows, self.scale.shape[1] * self.block_size)
        flat[:, :columns], flat[:, columns:] = self.codes, 0
        values *= self.scale.astype(np.float32)[..., None]
        if self.offset is not None:
            values += self.offset.astype(np.float32)[..., None]
        return np.ascontiguousarray(flat[:, :columns])
