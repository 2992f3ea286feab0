"""The weights of a GGUF file. Quantized blocks keep exactly the codes of the file.

Source: the block structs `block_q4_0`, `block_q4_1` and `block_q8_0` of ggml (ggml-common.h).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from edgekit.blocks import QuantizedBlocks
from edgekit.checkpoint.base import Weight
from edgekit.checkpoint.gguf_container import GgufContainer
from edgekit.families import WeightSource
from edgekit.families.base import RowIndices

ROPE_FACTORS = "rope_freqs.weight"
"""Read with the config rather than as a weight."""

Bytes: TypeAlias = npt.NDArray[np.uint8]


class GgufTensors:
    """The tensors of a GGUF file."""

    def __init__(self, path: Path, container: GgufContainer) -> None:
        """Wraps a parsed file.

        Args:
            path: The file.
            container: Its contents.
        """
        self.files = (path,)
        self.shapes = {name: info.shape for name, info in container.tensors.items() if name != ROPE_FACTORS}
        self._container: GgufContainer | None = container

    def read(self, name: str, rows: RowIndices | None) -> Weight:
        """Reads one tensor, or the given rows of it: float32, or blocks when it is stored in blocks."""
        if self._container is None:
            raise ValueError(f"{self.files[0]} is closed")
        return read_tensor(self._container, name, rows)

    def close(self) -> None:
        """Lets go of the file; it is unmapped with the last array that refers to it."""
        self._container = None


def read_tensor(container: GgufContainer, name: str, rows: RowIndices | None = None) -> Weight:
    """Reads one tensor of a container.

    Args:
        container: The file.
        name: Stored name.
        rows: Rows to take, or None for all.
    """
    info = container.tensors[name]
    stored = container.data[info.offset : info.offset + info.size].reshape(info.shape[0], -1)
    raw = np.ascontiguousarray(stored if rows is None else stored[rows])
    shape = (raw.shape[0], *info.shape[1:])
    match info.format.name:
        case "F32":
            return raw.view("<f4").astype(np.float32).reshape(shape)
        case "F16":
            return raw.view("<f2").astype(np.float32).reshape(shape)
        case "BF16":
            return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)
        case "Q8_0":
            return _q8_0(raw)
        case "Q4_0":
            return _q4_0(raw)
        case "Q4_1":
            return _q4_1(raw)
    raise AssertionError(f"no reader for {info.format.name}")


def _q8_0(raw: Bytes) -> QuantizedBlocks:
    blocks = raw.reshape(len(raw), -1, 34)
    codes = np.ascontiguousarray(blocks[..., 2:]).view(np.int8).reshape(len(raw), -1)
    return QuantizedBlocks(bits=8, block_size=32, codes=codes, scale=_float16(blocks, 0))


def _q4_0(raw: Bytes) -> QuantizedBlocks:
    blocks = raw.reshape(len(raw), -1, 18)
    return QuantizedBlocks(bits=4, block_size=32, codes=_nibbles(blocks[..., 2:]), scale=_float16(blocks, 0))


def _q4_1(raw: Bytes) -> QuantizedBlocks:
    """d·q + m with q in 0…15 is d·(q − 8) + (m + 8d); only the new offset is rounded, to float16."""
    blocks = raw.reshape(len(raw), -1, 20)
    scale, minimum = _float16(blocks, 0), _float16(blocks, 2)
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused where tensors are handed out
        offset = (minimum.astype(np.float32) + 8 * scale.astype(np.float32)).astype(np.float16)
    return QuantizedBlocks(bits=4, block_size=32, codes=_nibbles(blocks[..., 4:]), scale=scale, offset=offset)


def _float16(blocks: Bytes, start: int) -> npt.NDArray[np.float16]:
    values = np.ascontiguousarray(blocks[..., start : start + 2]).view("<f2")[..., 0]
    return values.astype(np.float16)


def _nibbles(packed: Bytes) -> npt.NDArray[np.int8]:
    """Codes −8…7, shape (rows, columns), of 16 bytes per block: first all low nibbles, then all high ones."""
    nibbles = np.concatenate([packed & 0xF, packed >> 4], axis=-1)
    return nibbles.astype(np.int8).reshape(len(packed), -1) - np.int8(8)


def gguf_sources(sources: Mapping[str, WeightSource], architecture: str, layers: int) -> dict[str, WeightSource]:
    """Renames sources from Hugging Face's names to GGUF's.

    Args:
        sources: Sources by canonical name.
        architecture: GGUF's name of the architecture.
        layers: Number of layers.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(arch, layers)
    renamed = {}
    for canonical, source in sources.items():
        name = names.get_name(source.name, try_suffixes=(".weight", ".bias"))
        assert name is not None, f"{architecture} has no GGUF name for {source.name}"
        renamed[canonical] = replace(source, name=name)
    return renamed
