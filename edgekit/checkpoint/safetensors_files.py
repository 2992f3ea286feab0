"""Hugging Face directories: config.json and safetensors files, one or several with an index."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  registers bfloat16 with numpy, which safetensors looks up by name
import numpy as np
from safetensors import SafetensorError, safe_open

from edgekit.checkpoint.base import Weight
from edgekit.errors import CorruptArtifactError, UnsupportedError
from edgekit.families.base import RowIndices

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = ("F32", "F16", "BF16")


class SafetensorsFiles:
    """The tensors of a directory's safetensors files.

    A file is mapped only while a tensor of it is read: pages of a mapped file count as the process's memory once they
    were touched, and a large model's files are larger than that may become.
    """

    def __init__(self, directory: Path) -> None:
        """Opens the files and reads their headers.

        Args:
            directory: Holds model.safetensors, or the files that model.safetensors.index.json names.

        Raises:
            CorruptArtifactError: A file is missing, truncated or is not what the index says.
            UnsupportedError: There are no safetensors, or a tensor is neither float32, float16 nor bfloat16.
        """
        # Files are opened again for every tensor, from whatever directory the process is in by then.
        directory = directory.absolute()
        shards, shard_of = _shards(directory)
        described = tuple(path for path in (directory / "config.json", directory / _INDEX) if path.is_file())
        self.files = (*described, *shards)
        self._shards: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for shard in shards:
            with _open(shard) as handle:
                for name in handle.offset_keys():
                    if name in self.shapes:
                        raise CorruptArtifactError(
                            f"tensor {name!r} is in both {self._shards[name].name} and {shard.name}"
                        )
                    view = handle.get_slice(name)
                    if view.get_dtype() not in _DTYPES:
                        raise UnsupportedError(
                            f"{shard.name} has {name!r} as {view.get_dtype()}; supported: {', '.join(_DTYPES)}"
                        )
                    self._shards[name] = shard
                    self.shapes[name] = tuple(view.get_shape())
        for name, file in shard_of.items():
            if name not in self._shards or self._shards[name].name != file:
                raise CorruptArtifactError(
                    f"{directory / _INDEX} says that {name!r} is in {file}, which does not hold it; download or copy "
                    "the checkpoint again"
                )

    def read(self, name: str, rows: RowIndices | None) -> Weight:
        """Reads one tensor as float32, or the given rows of it, which are read together with those between them.

        Raises:
            CorruptArtifactError: The file is no longer the one that was opened.
        """
        shard = self._shards[name]
        with _open(shard) as handle:
            if name not in handle.offset_keys() or tuple(handle.get_slice(name).get_shape()) != self.shapes[name]:
                raise CorruptArtifactError(f"{shard} was changed while it was read: {name!r} is not what it was")
            if rows is None:
                return np.asarray(handle.get_tensor(name), dtype=np.float32)
            first = int(rows.min())
            return np.asarray(handle.get_slice(name)[first : int(rows.max()) + 1][rows - first], dtype=np.float32)

    def close(self) -> None:
        """Does nothing: no file stays open between two reads."""


def _shards(directory: Path) -> tuple[list[Path], dict[str, str]]:
    """Returns the files, and the name of the file that an index gives for each tensor."""
    if (directory / _INDEX).is_file():
        weight_map = read_json(directory / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise CorruptArtifactError(f"{directory / _INDEX} has no usable 'weight_map'")
        names = sorted(set(weight_map.values()))
        outside = [name for name in names if Path(name).name != name]
        if outside:
            raise CorruptArtifactError(f"{directory / _INDEX} names {outside[0]!r}, which is not a plain file name")
        return [directory / name for name in names], weight_map
    if (directory / _WEIGHTS).is_file():
        return [directory / _WEIGHTS], {}
    if any(directory.glob("pytorch_model*.bin")):
        raise UnsupportedError(
            f"{directory} has pickled weights only, which can run code and are not read; convert them to {_WEIGHTS} "
            "with save_pretrained"
        )
    raise CorruptArtifactError(f"{directory} has neither {_WEIGHTS} nor {_INDEX}; download or copy it again")


def _open(path: Path) -> Any:
    if not path.is_file():
        raise CorruptArtifactError(f"{path} is missing; download or copy it again")
    try:
        return safe_open(path, framework="np")
    except (SafetensorError, OSError) as error:
        raise CorruptArtifactError(f"{path} cannot be read: {error}; download or copy it again") from error


def read_json(path: Path) -> Mapping[str, Any]:
    """Reads a JSON object.

    Raises:
        CorruptArtifactError: The file is missing, is not JSON or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CorruptArtifactError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CorruptArtifactError(f"{path} holds a {type(value).__name__}, not an object")
    return value
