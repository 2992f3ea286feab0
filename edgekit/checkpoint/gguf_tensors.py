"""The weights of a GGUF file."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np

from edgekit.blocks import QuantizedBlocks
from edgekit.checkpoint.base import Weight
from edgekit.checkpoint.gguf_container import GgufContainer
from edgekit.families.base import RowIndices

ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
# Read with the config rather than as weights.
_ROPE_TENSORS = frozenset({ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS})

logger = logging.getLogger(__name__)


class GgufTensors:
    """The tensors of a GGUF file."""

    def __init__(self, path: Path, container: GgufContainer) -> None:
        """Wraps a parsed file. Warns once if it has tensors whose blocks cannot be kept.

        Args:
            path: The file.
            container: Its contents.
        """
        self.files = (path,)
        self.shapes = {name: info.shape for name, info in container.tensors.items() if name not in _ROPE_TENSORS}
        self._container: GgufContainer | None = container
        inexact = sorted({info.type.name for info in container.tensors.values() if not info.type.exact})
        if inexact:
            logger.warning(
                "%s has tensors in %s, whose blocks cannot be kept: their values are dequantized and rounded anew to "
                "the chosen precision",
                path.name,
                ", ".join(inexact),
            )

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
    stored = container.data[info.offset : info.offset + info.size].reshape(info.shape[0], -1, info.type.size)
    blocks = np.ascontiguousarray(stored if rows is None else stored[rows])
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused where tensors are handed out
        weight = info.type.read(blocks)
    return weight if isinstance(weight, QuantizedBlocks) else weight.reshape(blocks.shape[0], *info.shape[1:])
