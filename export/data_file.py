"""The external data of a graph: every tensor gets its place first, and its bytes later.

A graph can so be built before a single weight is read, and writing holds one entry in memory, never the model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from edgekit.errors import StorageError
from edgekit.progress import Progress

# Tensors start on a cache line; those of a page or more start on a page, so that a reader may map them.
ALIGNMENT_BYTES = 64
PAGE_BYTES = 4096
# Bytes of a write. From larger ones Linux makes huge pages of its page cache, and whoever maps the file and touches a
# byte of the embedding table has 2 MiB of it in memory.
WRITE_BYTES = 64 << 10

Part: TypeAlias = tuple[str, ir.DataType, tuple[int, ...]]
Arrays: TypeAlias = Sequence[npt.NDArray[Any]]


class DataFile:
    """External tensors of one graph in one file."""

    def __init__(self, location: str) -> None:
        """Plans an empty file called `location`, beside the graph."""
        self.location = location
        self._size = 0
        self._entries: list[tuple[str, tuple[ir.ExternalTensor, ...], Callable[[], Arrays]]] = []

    def reserve(self, name: str, parts: Sequence[Part], load: Callable[[], Arrays]) -> tuple[ir.ExternalTensor, ...]:
        """Gives tensors that are read together their places.

        Args:
            name: What `write` reports while it works on them.
            parts: (name, dtype, shape) of each tensor.
            load: Returns their contents in the same order; called once, by `write`. Types narrower than a byte
                come packed, as ONNX stores them.
        """
        tensors = tuple(self._place(*part) for part in parts)
        self._entries.append((name, tensors, load))
        return tensors

    def write(self, directory: Path, progress: Progress) -> str:
        """Writes the file and returns its sha256 in hex.

        Args:
            directory: Where the file goes.
            progress: Called with (name, index, count) before each entry is read.

        Raises:
            StorageError: The disk refused the write.
        """
        path = directory / self.location
        digest = hashlib.sha256()
        try:
            with path.open("wb") as file:
                for index, (name, tensors, load) in enumerate(self._entries):
                    progress(name, index, len(self._entries))
                    for tensor, array in zip(tensors, load(), strict=True):
                        payload = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
                        assert payload.size == tensor.length, (tensor.name, payload.size, tensor.length)
                        for piece in (bytes((tensor.offset or 0) - file.tell()), payload.data):
                            digest.update(piece)
                            for start in range(0, len(piece), WRITE_BYTES):
                                file.write(piece[start : start + WRITE_BYTES])
        except OSError as error:
            raise StorageError(f"cannot write {str(path)!r}: {error.strerror or error}") from error
        return digest.hexdigest()

    def _place(self, name: str, dtype: ir.DataType, shape: tuple[int, ...]) -> ir.ExternalTensor:
        length = -(-int(np.prod(shape)) * dtype.bitwidth // 8)
        alignment = PAGE_BYTES if length >= PAGE_BYTES else ALIGNMENT_BYTES
        offset = -(-self._size // alignment) * alignment
        self._size = offset + length
        return ir.ExternalTensor(self.location, offset, length, dtype, shape=ir.Shape(shape), name=name)
