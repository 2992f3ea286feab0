"""What a GGUF file's metadata says about its model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgekit.checkpoint.gguf_container import GgufContainer
from edgekit.errors import CorruptArtifactError, UnsupportedError


@dataclass(frozen=True, kw_only=True)
class ModelMetadata:
    """The metadata under the architecture's prefix, with what messages about it need.

    Attributes:
        path: The file.
        architecture: Its `general.architecture`.
        values: Values by key, without the prefix.
        container: The file's contents.
    """

    path: Path
    architecture: str
    values: Mapping[str, Any]
    container: GgufContainer

    @staticmethod
    def of(container: GgufContainer, architecture: str, path: Path) -> ModelMetadata:
        """Selects the values of an architecture. A value per layer is one value where the layers agree.

        Raises:
            UnsupportedError: Layers differ in something other than their windows.
        """
        prefix = f"{architecture}."
        values = {key[len(prefix) :]: value for key, value in container.metadata.items() if key.startswith(prefix)}
        metadata = ModelMetadata(path=path, architecture=architecture, values=values, container=container)
        for key, value in values.items():
            if isinstance(value, list) and key != "attention.sliding_window_pattern":
                if any(item != value[0] for item in value):
                    raise metadata.unsupported(key, "the same value for every layer")
                values[key] = value[0] if value else None
        return metadata

    def get(self, key: str, default: Any = None) -> Any:
        """Returns a value, or the default when the file does not say."""
        return self.values.get(key, default)

    def has_tensor(self, name: str) -> bool:
        """Whether the file stores a tensor of this name."""
        return name in self.container.tensors

    def unsupported(self, key: str, supported: str | None = None) -> UnsupportedError:
        """Returns the error for a value that is not implemented."""
        clause = "" if supported is None else f"; supported: {supported}"
        name, value = f"{self.architecture}.{key}", self.values[key]
        return UnsupportedError(f"{self.path} has {name} = {value!r}, which is not supported{clause}")

    def missing(self, key: str) -> CorruptArtifactError:
        """Returns the error for a value that the model needs and the file lacks."""
        return CorruptArtifactError(f"{self.path} has no {self.architecture}.{key}; convert the model again")
