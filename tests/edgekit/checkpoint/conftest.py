from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy.typing as npt
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter

TinyCheckpoint: TypeAlias = Callable[[str], Path]
Tensors: TypeAlias = dict[str, torch.Tensor]


class EditCheckpoint(Protocol):
    """Copies a variant with changes: config keys (``...`` removes one), and a function on its tensors."""

    def __call__(
        self, variant: str, config: Mapping[str, Any] = ..., tensors: Callable[[Tensors], None] = ...
    ) -> Path: ...


@pytest.fixture
def edit_checkpoint(tmp_path: Path, tiny_checkpoint: TinyCheckpoint) -> EditCheckpoint:
    from safetensors.torch import load_file, save_file

    def edit(variant: str, config: Mapping[str, Any] = {}, tensors: Callable[[Tensors], None] = lambda _: None) -> Path:
        directory = tmp_path / f"edited-{variant}"
        shutil.copytree(tiny_checkpoint(variant), directory)
        path = directory / "config.json"
        values = {**json.loads(path.read_text()), **config}
        path.write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))
        stored = load_file(directory / "model.safetensors")
        tensors(stored)
        save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
        return directory

    return edit


@pytest.fixture
def planted(tmp_path: Path) -> Callable[[npt.NDArray[Any], str], Path]:
    """Writes a file with one tensor, named w, of the given raw bytes."""

    def write(raw: npt.NDArray[Any], kind: str) -> Path:
        path = tmp_path / "planted.gguf"
        writer = GGUFWriter(path, "llama")
        writer.add_tensor("w", raw, raw_dtype=GGMLQuantizationType[kind])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write
