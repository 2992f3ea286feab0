"""The GGUF container: metadata and a table of tensors, parsed from a memory map.

Source: the GGUF specification, docs/gguf.md of ggml (versions 2 and 3).
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgekit.checkpoint.gguf_types import TensorType, readable_types, tensor_type, type_name
from edgekit.errors import CorruptArtifactError, UnsupportedError

_AGAIN = "; download or copy it again"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """One entry of the tensor table.

    Attributes:
        shape: Rows first.
        type: How values are stored.
        offset: First byte in the file.
    """

    shape: tuple[int, ...]
    type: TensorType
    offset: int

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) // self.type.elements * self.type.size


@dataclass(frozen=True, kw_only=True)
class GgufContainer:
    """A parsed file.

    Attributes:
        metadata: Values by key; arrays are lists.
        tensors: Tensor table by name.
        data: The whole file, shape (bytes,), uint8, memory-mapped.
    """

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    data: npt.NDArray[np.uint8]


class _Cursor:
    """Reads little-endian values one after the other."""

    def __init__(self, path: Path, data: npt.NDArray[np.uint8]) -> None:
        self._path = path
        self._view = data.data
        self.position = 0

    def numbers(self, formats: str) -> tuple[Any, ...]:
        packed = struct.Struct(f"<{formats}")
        start, self.position = self.position, self.position + packed.size
        self._check()
        return packed.unpack_from(self._view, start)

    def string(self) -> str:
        (length,) = self.numbers("Q")
        start, self.position = self.position, self.position + length
        self._check()
        try:
            return str(self._view[start : self.position], "utf-8")
        except UnicodeDecodeError as error:
            raise CorruptArtifactError(f"{self._path} holds a string that is not UTF-8 at byte {start}") from error

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.numbers(_SCALARS[kind])[0]
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise CorruptArtifactError(f"{self._path} holds a value of unknown type {kind} at byte {self.position}")
        element, count = self.numbers("IQ")
        self._check(count)
        if element in _SCALARS:
            return list(self.numbers(f"{count}{_SCALARS[element]}"))
        return [self.value(element) for _ in range(count)]

    def _check(self, following: int = 0) -> None:
        if self.position + following > len(self._view):
            raise CorruptArtifactError(f"{self._path} ends within its header, after {len(self._view)} bytes{_AGAIN}")


def read_container(path: Path) -> GgufContainer:
    """Parses the header of a GGUF file; no weight is read.

    Raises:
        CorruptArtifactError: The file is not GGUF, is truncated or contradicts itself.
        UnsupportedError: A version, byte order, split or tensor type that is not implemented.
    """
    if path.stat().st_size == 0:
        raise CorruptArtifactError(f"{path} is empty{_AGAIN}")
    data = np.memmap(path, mode="r", dtype=np.uint8)
    if bytes(data[:4]) != b"GGUF":
        raise CorruptArtifactError(f"{path} is not a GGUF file: it starts with {bytes(data[:4])!r}")
    cursor = _Cursor(path, data)
    _, version, tensor_count, value_count = cursor.numbers("4sIQQ")
    if version not in (2, 3):
        order = " in big-endian order" if version & 0xFFFF == 0 else ""
        raise UnsupportedError(f"{path} is GGUF version {version}{order}; supported: 2, 3, little-endian")
    metadata: dict[str, Any] = {}
    for _ in range(value_count):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.numbers("I")[0])
    if metadata.get("split.count", 1) > 1:
        raise UnsupportedError(f"{path} is one of {metadata['split.count']} splits; merge them with llama-gguf-split")
    tensors = {}
    for _ in range(tensor_count):
        name = cursor.string()
        tensors[name] = _tensor_info(path, name, cursor)
    alignment = int(metadata.get("general.alignment", _DEFAULT_ALIGNMENT))
    if alignment <= 0 or alignment % 8:
        raise CorruptArtifactError(f"{path} has general.alignment = {alignment}; it must be a multiple of 8")
    start = -(-cursor.position // alignment) * alignment
    placed = {name: _place(path, name, info, start, len(data)) for name, info in tensors.items()}
    return GgufContainer(metadata=metadata, tensors=placed, data=data)


def _tensor_info(path: Path, name: str, cursor: _Cursor) -> TensorInfo:
    (dimensions,) = cursor.numbers("I")
    if not 1 <= dimensions <= 4:
        raise CorruptArtifactError(f"{path} has {name!r} with {dimensions} dimensions; GGUF allows 1 to 4")
    shape = tuple(reversed(cursor.numbers(f"{dimensions}Q")))
    kind, offset = cursor.numbers("IQ")
    layout = tensor_type(kind)
    if layout is None:
        supported = ", ".join(readable_types())
        raise UnsupportedError(f"{path} has {name!r} as {type_name(kind)}; supported: {supported}")
    if shape[-1] % layout.elements or (layout.elements > 1 and dimensions == 1):
        raise CorruptArtifactError(f"{path} has {name!r} as {layout.name} with shape {shape}")
    return TensorInfo(shape=shape, type=layout, offset=offset)


def _place(path: Path, name: str, info: TensorInfo, start: int, file_size: int) -> TensorInfo:
    offset = start + info.offset
    if offset + info.size > file_size:
        raise CorruptArtifactError(
            f"{path} is truncated: {name!r} ends at byte {offset + info.size} of {file_size}{_AGAIN}"
        )
    return TensorInfo(shape=info.shape, type=info.type, offset=offset)
