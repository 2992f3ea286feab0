from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from edgekit.checkpoint import open_checkpoint
from edgekit.checkpoint.gguf_container import read_container
from edgekit.errors import EdgeKitError

TinyGguf: TypeAlias = Callable[[str, str], Path]
ROUNDS = 150


def _damage(contents: bytes, rng: random.Random, end: int) -> bytes:
    damaged = bytearray(contents)
    for _ in range(rng.choice((1, 1, 2, 4))):
        position = rng.randrange(end)
        damaged[position] = rng.choice((0, 1, 255, rng.randrange(256), damaged[position] ^ 1 << rng.randrange(8)))
    return bytes(damaged)


def _read_everything(path: Path, scratch: Path) -> bool:
    """Whether a checkpoint can be read; every failure but an EdgeKitError passes through."""
    try:
        with open_checkpoint(path) as checkpoint:
            for name in checkpoint.spec.tensor_shapes():
                checkpoint.tensor(name)
            checkpoint.save_tokenizer(scratch)
    except EdgeKitError:
        return False
    return True


@pytest.mark.parametrize("part", ["metadata", "tensors"])
def test_a_damaged_gguf_is_read_or_refused(part: str, tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    source, path, rng = tiny_gguf("llama_llama3_rope", "Q4_1"), tmp_path / "damaged.gguf", random.Random(0)
    contents = source.read_bytes()
    data = min(info.offset for info in read_container(source).tensors.values())
    # Within the vocabulary, which fills the middle, damage changes only letters.
    start, end = (0, 700) if part == "metadata" else (data - 2000, data)
    refused = 0
    for _ in range(ROUNDS):
        path.write_bytes(contents[:start] + _damage(contents[start:end], rng, end - start) + contents[end:])
        refused += not _read_everything(path, tmp_path)
    assert refused > ROUNDS / 2


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"]
)
def test_a_damaged_directory_is_read_or_refused(name: str, tiny_llama: Path, tmp_path: Path) -> None:
    directory, rng = tmp_path / "damaged", random.Random(0)
    shutil.copytree(tiny_llama, directory)
    contents = (directory / name).read_bytes()
    refused = 0
    for _ in range(ROUNDS):
        (directory / name).write_bytes(_damage(contents, rng, min(len(contents), 2500)))
        refused += not _read_everything(directory, tmp_path)
    assert refused > ROUNDS / 10
