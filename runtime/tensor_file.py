"""Files of named arrays, in the safetensors format, which needs no library to be read or written.

    8 bytes          length n of the header, little-endian
    n bytes          JSON: {"__metadata__": {str: str}, name: {"dtype", "shape", "data_offsets": [begin, end]}, ...},
                     padded with spaces to a multiple of 8
    the rest         the arrays, C-contiguous, little-endian, one after the other without gaps

Source: https://github.com/huggingface/safetensors, "Format". The data's sha256 is in the metadata, as `DIGEST`: what
the format cannot tell, such as a flipped bit, is found by it.
"""

from __future__ import annotations

import hashlib
import math
import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from edgekit.errors import CorruptArtifactError, StorageError, UsageError

Array: TypeAlias = npt.NDArray[Any]

DIGEST = "sha256"
METADATA = "__metadata__"
DTYPES: Mapping[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "I8": np.dtype("<i1"),
    "I64": np.dtype("<i8"),
}
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_BLOCK_BYTES = 1 << 20


class _Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the header says of an array."""

    dtype: str
    shape: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    data_offsets: tuple[Annotated[int, msgspec.Meta(ge=0)], Annotated[int, msgspec.Meta(ge=0)]]


@dataclass(frozen=True, kw_only=True)
class Source:
    """An array that is written piece by piece, for little memory.

    Attributes:
        dtype: A key of `DTYPES`.
        shape: Its shape.
        pieces: Makes its parts, in C order.
    """

    dtype: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[Array]]

    @property
    def size_bytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def write_tensors(path: Path, sources: Mapping[str, Source], metadata: Mapping[str, str]) -> None:
    """Writes a file, whole or not at all.

    Args:
        path: Where to; an existing file is replaced.
        sources: The arrays by name.
        metadata: What else the header says.

    Raises:
        StorageError: The disk refused the write.
    """
    target = Path(os.path.realpath(path))  # a link is followed, as any program that writes to it would
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with partial.open("wb") as file:
            file.write(_header(sources, {**metadata, DIGEST: "0" * 64}))
            digest = hashlib.sha256()
            for source in sources.values():
                _write_pieces(file, source, digest.update)
            # As long as the one that stands for it.
            file.seek(0)
            file.write(_header(sources, {**metadata, DIGEST: digest.hexdigest()}))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    except OSError as error:
        raise StorageError(f"cannot write {str(path)!r}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):  # the one that matters was told above
            partial.unlink(missing_ok=True)


def _header(sources: Mapping[str, Source], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {METADATA: dict(metadata)}
    begin = 0
    for name, source in sources.items():
        end = begin + source.size_bytes
        header[name] = _Entry(dtype=source.dtype, shape=source.shape, data_offsets=(begin, end))
        begin = end
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_pieces(file: BinaryIO, source: Source, update: Callable[[memoryview], None]) -> None:
    written = 0
    for piece in source.pieces():
        view = np.ascontiguousarray(piece, DTYPES[source.dtype]).reshape(-1).view(np.uint8).data
        file.write(view)
        update(view)
        written += len(view)
    assert written == source.size_bytes, "the pieces are the whole array"


class TensorFile:
    """An open file of arrays, whose header is valid: what it says lies within the file, without gaps.

    Attributes:
        metadata: What else the header says.
    """

    def __init__(self, path: Path, file: BinaryIO) -> None:
        """Reads the header.

        Args:
            path: Name of the file.
            file: The file, as `open_tensors` opens it.

        Raises:
            CorruptArtifactError: The file is truncated or malformed.
        """
        self._path, self._file = path, file
        size = os.fstat(file.fileno()).st_size
        header_bytes = int.from_bytes(self._read(8), "little")
        if header_bytes > min(MAX_HEADER_BYTES, size - 8):
            raise self.corrupt(f"its header would be {header_bytes} bytes of {size}")
        self._data, self._size = 8 + header_bytes, size
        try:
            header = msgspec.json.decode(self._read(header_bytes), type=dict[str, msgspec.Raw])
            self.metadata = msgspec.json.decode(header.pop(METADATA, b"{}"), type=dict[str, str])
            self._entries = {name: msgspec.json.decode(raw, type=_Entry) for name, raw in header.items()}
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self.corrupt(str(error)) from error
        self._check_entries()

    def _check_entries(self) -> None:
        end = 0
        for name, entry in sorted(self._entries.items(), key=lambda item: item[1].data_offsets):
            if entry.dtype not in DTYPES:
                raise self.corrupt(f"{name!r} has the type {entry.dtype!r}")
            first, last = entry.data_offsets
            if first != end or last - first != math.prod(entry.shape) * DTYPES[entry.dtype].itemsize:
                raise self.corrupt(f"{name!r} is not where its shape says")
            end = last
        if self._data + end != self._size:
            raise self.corrupt(f"it has {self._size} bytes, its header says {self._data + end}")

    def verify(self) -> None:
        """Hashes the data.

        Raises:
            CorruptArtifactError: They are not what was written.
        """
        digest, found = hashlib.sha256(), self.metadata.get(DIGEST, "")
        self._file.seek(self._data)
        while block := self._file.read(_BLOCK_BYTES):
            digest.update(block)
        if digest.hexdigest() != found:
            raise self.corrupt(f"its data have sha256 {digest.hexdigest()[:12]}…, its header says {found[:12]}…")

    @property
    def names(self) -> frozenset[str]:
        """Names of the arrays."""
        return frozenset(self._entries)

    def check(self, name: str, dtype: str, shape: tuple[int, ...]) -> None:
        """Refuses an array that is not as expected.

        Raises:
            CorruptArtifactError: It is missing, or of another type or shape.
        """
        entry = self._entries.get(name)
        if entry is None:
            raise self.corrupt(f"it has no {name!r}")
        if (entry.dtype, entry.shape) != (dtype, shape):
            raise self.corrupt(f"{name!r} is {entry.dtype} {list(entry.shape)} and not {dtype} {list(shape)}")

    def read(self, name: str) -> Array:
        """Reads an array that is there, as its type."""
        entry = self._entries[name]
        self._file.seek(self._data + entry.data_offsets[0])
        return self._array(entry.dtype, entry.shape)

    def read_rows(self, name: str) -> Iterable[Array]:
        """Reads an array that is there along its first axis, one at a time."""
        entry = self._entries[name]
        size = math.prod(entry.shape[1:]) * DTYPES[entry.dtype].itemsize
        for row in range(entry.shape[0]):
            self._file.seek(self._data + entry.data_offsets[0] + row * size)
            yield self._array(entry.dtype, entry.shape[1:])

    def _array(self, dtype: str, shape: tuple[int, ...]) -> Array:
        content = self._read(math.prod(shape) * DTYPES[dtype].itemsize)
        return np.frombuffer(content, DTYPES[dtype]).reshape(shape)

    def _read(self, count: int) -> bytes:
        content = self._file.read(count)
        if len(content) != count:
            raise self.corrupt("it ends early")
        return content

    def corrupt(self, reason: str) -> CorruptArtifactError:
        """Returns the error for a file that is not valid."""
        return CorruptArtifactError(f"{str(self._path)!r} is not valid: {reason}")


def open_tensors(path: Path) -> BinaryIO:
    """Opens a file for `TensorFile`.

    Raises:
        UsageError: There is no such file, or it cannot be read.
    """
    try:
        return path.open("rb")
    except OSError as error:
        raise UsageError(f"cannot read {str(path)!r}: {error.strerror or error}") from error
