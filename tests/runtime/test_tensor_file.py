"""Files of arrays, against the safetensors package in both directions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from edgekit.errors import CorruptArtifactError, StorageError, UsageError
from edgekit.runtime.tensor_file import DTYPES, Source, TensorFile, open_tensors, write_tensors


def _arrays() -> dict[str, np.ndarray[Any, np.dtype[Any]]]:
    random = np.random.default_rng(0)
    shapes = {"F32": (2, 3, 5), "F16": (7,), "I8": (3, 1), "I64": (0, 4)}
    return {f"a {kind}": random.integers(-100, 100, shape).astype(DTYPES[kind]) for kind, shape in shapes.items()}


def _sources() -> dict[str, Source]:
    return {
        name: Source(dtype=name.split()[1], shape=array.shape, pieces=lambda array=array: iter(array))  # type: ignore[misc]
        for name, array in _arrays().items()
    }


def test_what_is_written_is_what_the_package_reads(tmp_path: Path) -> None:
    write_tensors(tmp_path / "file", _sources(), {"who": "Zoë"})
    with safe_open(tmp_path / "file", "numpy") as file:
        assert file.metadata()["who"] == "Zoë"
        assert set(file.keys()) == set(_arrays())
        for name, array in _arrays().items():
            found = file.get_tensor(name)
            assert found.dtype == array.dtype
            np.testing.assert_array_equal(found, array)
    assert (int.from_bytes((tmp_path / "file").read_bytes()[:8], "little")) % 8 == 0, "the data are aligned"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_the_package_writes_is_read(tmp_path: Path) -> None:
    save_file(_arrays(), tmp_path / "file", {"who": "Zoë"})
    with open_tensors(tmp_path / "file") as opened:
        file = TensorFile(tmp_path / "file", opened)
        assert file.metadata == {"who": "Zoë"}
        assert file.names == set(_arrays())
        for name, array in _arrays().items():
            file.check(name, name.split()[1], array.shape)
            np.testing.assert_array_equal(file.read(name), array)
            rows = list(file.read_rows(name))
            assert len(rows) == len(array)
            assert all((row == expected).all() for row, expected in zip(rows, array, strict=True))
        with pytest.raises(CorruptArtifactError, match="its data have sha256"):
            file.verify()


def test_what_was_written_verifies_and_a_change_does_not(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_tensors(path, _sources(), {})
    with open_tensors(path) as opened:
        TensorFile(path, opened).verify()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with open_tensors(path) as opened, pytest.raises(CorruptArtifactError, match="its data have sha256"):
        TensorFile(path, opened).verify()


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder" / "file")
    write_tensors(tmp_path / "link", _sources(), {})
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "folder" / "file").is_file()


@pytest.mark.parametrize(
    ("header", "data", "reason"),
    [
        ('{"a":{"dtype":"I8","shape":[4],"data_offsets":[0,4]}}', 3, "it has .* bytes, its header says"),
        ('{"a":{"dtype":"I8","shape":[4],"data_offsets":[0,4]}}', 5, "it has .* bytes, its header says"),
        ('{"a":{"dtype":"I8","shape":[4],"data_offsets":[1,5]}}', 5, "'a' is not where its shape says"),
        ('{"a":{"dtype":"I8","shape":[4],"data_offsets":[0,3]}}', 3, "'a' is not where its shape says"),
        ('{"a":{"dtype":"I8","shape":[4],"data_offsets":[4,0]}}', 4, "'a' is not where its shape says"),
        ('{"a":{"dtype":"I8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"I8","shape":[4],"data_offsets":[2,6]}}', 6,
         "'b' is not where"),
        ('{"a":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}}', 4, "'a' has the type 'BF16'"),
        ('{"a":{"dtype":"I8","shape":[-1],"data_offsets":[0,4]}}', 4, "Expected `int` >= 0"),
        ('{"a":{"dtype":"I8","shape":[4]}}', 4, "missing required field `data_offsets`"),
        ('{"__metadata__":{"a":1}}', 0, "Expected `str`, got `int`"),
        ("[]", 0, "Expected `object`, got `array`"),
        ("{", 0, "is not valid"),
        ('{"\\ud800":1}', 0, "is not valid"),
    ],
)  # fmt: skip
def test_a_header_that_does_not_describe_the_file_is_refused(
    header: str, data: int, reason: str, tmp_path: Path
) -> None:
    path, text = tmp_path / "file", header.encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(data))
    with open_tensors(path) as opened, pytest.raises(CorruptArtifactError, match=reason):
        TensorFile(path, opened)


@pytest.mark.parametrize(
    "content", [b"", b"\1\0\0", (1 << 62).to_bytes(8, "little"), (9).to_bytes(8, "little") + b"{}"]
)
def test_a_header_beyond_the_end_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with open_tensors(path) as opened, pytest.raises(CorruptArtifactError, match=r"it ends early|its header would be"):
        TensorFile(path, opened)


def test_an_array_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_tensors(path, _sources(), {})
    with open_tensors(path) as opened:
        file = TensorFile(path, opened)
        for name, dtype, shape, reason in (
            ("b", "I8", (3, 1), "it has no 'b'"),
            ("a I8", "F32", (3, 1), r"'a I8' is I8 \[3, 1\] and not F32 \[3, 1\]"),
            ("a I8", "I8", (3, 2), r"'a I8' is I8 \[3, 1\] and not I8 \[3, 2\]"),
        ):
            with pytest.raises(CorruptArtifactError, match=reason):
                file.check(name, dtype, shape)


def test_nothing_is_left_of_a_write_that_fails(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    with pytest.raises(StorageError, match=r"cannot write .*file'"):
        write_tensors(tmp_path / "file", _sources(), {})
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read .*none': No such file"):
        open_tensors(tmp_path / "none")
