"""Checkpoints in several files, larger than memory, and behind the links of a hub cache."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import pytest

from edgekit.bundle import sha256_file
from edgekit.checkpoint import open_checkpoint
from edgekit.checkpoint.safetensors_files import SafetensorsFiles
from edgekit.errors import CorruptArtifactError

HuggingFaceModel: TypeAlias = Callable[[Path], Any]
INDEX = "model.safetensors.index.json"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
MIB = 1 << 20


@pytest.fixture
def sharded(tiny_llama: Path, hugging_face: HuggingFaceModel, tmp_path: Path) -> Path:
    """A whole checkpoint, as `save_pretrained` splits it."""
    directory = shutil.copytree(tiny_llama, tmp_path / "sharded", ignore=shutil.ignore_patterns("*.safetensors"))
    hugging_face(tiny_llama).save_pretrained(directory, max_shard_size="100KB")
    assert len(list(directory.glob("*.safetensors"))) > 2
    return directory


@pytest.fixture
def hub_snapshot(sharded: Path, tmp_path: Path) -> Path:
    """The same as the hub's client stores it: a folder of links to files that are named by their contents."""
    repository = tmp_path / "models--tiny--llama"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for file in sharded.iterdir():
        blob = repository / "blobs" / sha256_file(file)
        file.rename(blob)
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", blob.name))
    return snapshot


def _write_sparse(path: Path, tensors: Mapping[str, tuple[int, ...]], planted: Mapping[str, list[float]]) -> None:
    """Writes bfloat16 tensors of zeros that take no room on the disk; the last values of some are planted."""
    header: dict[str, dict[str, Any]] = {}
    end = 0
    for name, shape in tensors.items():
        start, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        data = file.tell()
        file.truncate(data + end)
        for name, values in planted.items():
            array = np.array(values, ml_dtypes.bfloat16)
            file.seek(data + header[name]["data_offsets"][1] - array.nbytes)
            file.write(array.tobytes())


def _edit_index(directory: Path, edit: Callable[[dict[str, str]], None]) -> None:
    index = json.loads((directory / INDEX).read_text())
    edit(index["weight_map"])
    (directory / INDEX).write_text(json.dumps(index))


def test_values_beyond_four_gigabytes_of_a_file_are_read(tmp_path: Path) -> None:
    rows = (1 << 31) // 64 + 5
    tensors = {"table": (rows, 64), "after": (3,)}
    _write_sparse(tmp_path / "model.safetensors", tensors, {"table": [1.5] * 64, "after": [1, -2, 4]})
    assert (tmp_path / "model.safetensors").stat().st_size > 1 << 32
    files = SafetensorsFiles(tmp_path)
    assert files.shapes == tensors
    np.testing.assert_array_equal(files.read("after", None), np.array([1, -2, 4], np.float32))
    last = files.read("table", np.array([rows - 1, rows - 2]))
    np.testing.assert_array_equal(last, np.repeat(np.array([[1.5], [0]], np.float32), 64, axis=1))


@pytest.mark.parametrize("rows", [[0], [3, 1, 1], [7, 0], list(range(8))[::-1]])
def test_rows_are_those_of_the_whole_tensor(rows: list[int], tmp_path: Path) -> None:
    _write_sparse(tmp_path / "model.safetensors", {"matrix": (8, 5)}, {"matrix": [float(value) for value in range(40)]})
    files = SafetensorsFiles(tmp_path)
    whole = files.read("matrix", None)
    np.testing.assert_array_equal(files.read("matrix", np.array(rows)), np.asarray(whole)[rows])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc on this system")
def test_reading_a_checkpoint_takes_the_memory_of_its_largest_tensor(tmp_path: Path) -> None:
    shards = [f"model-{index}.safetensors" for index in range(4)]
    weight_map = {}
    for index, shard in enumerate(shards):
        tensors = {f"{index}.{number}": (2048, 2048) for number in range(8)}
        _write_sparse(tmp_path / shard, tensors, {})
        weight_map.update(dict.fromkeys(tensors, shard))
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    program = """
import re, sys
from pathlib import Path
from edgekit.checkpoint.safetensors_files import SafetensorsFiles

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

files = SafetensorsFiles(Path(sys.argv[1]))
before = peak()
for name in files.shapes:
    files.read(name, None)
print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, check=True)
    total, largest_in_float32 = 32 * 8 * MIB, 16 * MIB
    assert int(done.stdout) < 4 * largest_in_float32 < total / 2


def test_a_file_that_changes_while_it_is_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    _write_sparse(path, {"a": (4, 2), "b": (2,)}, {})
    files = SafetensorsFiles(tmp_path)
    _write_sparse(path, {"a": (2, 4)}, {})
    for name in ("a", "b"):
        with pytest.raises(CorruptArtifactError, match=rf"model\.safetensors was changed while it was read: '{name}'"):
            files.read(name, None)
    path.unlink()
    with pytest.raises(CorruptArtifactError, match=r"model\.safetensors is missing"):
        files.read("a", None)


@pytest.mark.parametrize(
    "file", ["missing.safetensors", "/etc/hostname", "../sharded/model-00001-of-00003.safetensors", "..", "", "a/b"]
)
def test_an_index_that_names_another_file_than_one_beside_it_is_refused_by_name(file: str, sharded: Path) -> None:
    _edit_index(sharded, lambda weight_map: weight_map.update({"model.norm.weight": file}))
    with pytest.raises(CorruptArtifactError) as refusal:
        open_checkpoint(sharded)
    named = str(sharded / file) if file in ("missing.safetensors", "..", "") else repr(file)
    assert named in str(refusal.value)


def test_a_tensor_in_another_shard_than_the_index_says_is_named(sharded: Path) -> None:
    def swap(weight_map: dict[str, str]) -> None:
        first, last = "model.embed_tokens.weight", "model.norm.weight"
        assert weight_map[first] != weight_map[last]
        weight_map[first], weight_map[last] = weight_map[last], weight_map[first]

    _edit_index(sharded, swap)
    with pytest.raises(CorruptArtifactError, match=r"says that 'model\.\w+\.weight' is in model-\d+-of-\d+\.safetens"):
        open_checkpoint(sharded)


def test_a_tensor_that_only_the_index_knows_is_named(sharded: Path) -> None:
    _edit_index(sharded, lambda weight_map: weight_map.update({"phantom": weight_map["model.norm.weight"]}))
    with pytest.raises(CorruptArtifactError, match=r"says that 'phantom' is in .*, which does not hold it; download"):
        open_checkpoint(sharded)


def test_the_links_of_a_hub_cache_are_followed(hub_snapshot: Path, tiny_llama: Path) -> None:
    with open_checkpoint(hub_snapshot) as linked, open_checkpoint(tiny_llama) as plain:
        assert linked.spec == plain.spec
        for name in plain.spec.tensor_shapes():
            np.testing.assert_array_equal(linked.tensor(name), plain.tensor(name))
        digests = linked.source.digests
    assert linked.source.id == COMMIT
    assert {INDEX, "config.json", "tokenizer.json"} < digests.keys()
    # Of the contents, under the names of the links: the hub names its blobs so.
    assert all((hub_snapshot / name).readlink().name == digest for name, digest in digests.items())


def test_a_link_to_a_file_that_was_never_downloaded_is_named(hub_snapshot: Path) -> None:
    shard = sorted(hub_snapshot.glob("*.safetensors"))[1]
    shard.resolve().unlink()
    with pytest.raises(CorruptArtifactError, match=rf"{shard.name} is missing; download or copy it again"):
        open_checkpoint(hub_snapshot)


def test_a_directory_behind_a_link_is_read(sharded: Path, tmp_path: Path, tiny_llama: Path) -> None:
    (tmp_path / "link").symlink_to(sharded, target_is_directory=True)
    with open_checkpoint(tmp_path / "link") as linked, open_checkpoint(tiny_llama) as plain:
        np.testing.assert_array_equal(linked.tensor("norm.weight"), plain.tensor("norm.weight"))
        assert linked.source.id == "sharded"


def test_a_relative_path_is_that_of_the_directory_it_was_opened_in(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with open_checkpoint(sharded) as absolute, open_checkpoint("./sharded") as relative:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir("elsewhere")
        np.testing.assert_array_equal(relative.tensor("norm.weight"), absolute.tensor("norm.weight"))
        assert relative.block_format("embed_tokens.weight") is None
