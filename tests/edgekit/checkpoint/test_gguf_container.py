from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter

from edgekit.checkpoint import open_checkpoint
from edgekit.checkpoint.gguf_container import read_container
from edgekit.errors import CorruptArtifactError, UnsupportedError

TinyGguf: TypeAlias = Callable[[str, str], Path]


@pytest.fixture
def damaged(tiny_gguf: TinyGguf, tmp_path: Path) -> Callable[[Callable[[bytearray], Any]], Path]:
    """Copies a file and changes its bytes in place."""

    def damage(change: Callable[[bytearray], Any]) -> Path:
        contents = bytearray(tiny_gguf("llama", "Q4_0").read_bytes())
        change(contents)
        path = tmp_path / "damaged.gguf"
        path.write_bytes(contents)
        return path

    return damage


@pytest.fixture
def written(tmp_path: Path) -> Callable[[Callable[[GGUFWriter], Any]], Path]:
    """Writes a file with what a function adds to it."""

    def write(add: Callable[[GGUFWriter], Any]) -> Path:
        path = tmp_path / "written.gguf"
        writer = GGUFWriter(path, "llama")
        add(writer)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0"])
def test_header_and_table_are_those_that_ggufs_own_reader_finds(kind: str, tiny_gguf: TinyGguf) -> None:
    path = tiny_gguf("llama_llama3_rope", kind)
    container, oracle = read_container(path), GGUFReader(path)
    fields = {key: field.contents() for key, field in oracle.fields.items() if not key.startswith("GGUF.")}
    assert container.metadata == fields
    assert list(container.tensors) == [tensor.name for tensor in oracle.tensors]
    for tensor in oracle.tensors:
        info = container.tensors[tensor.name]
        assert info.shape == tuple(reversed(tensor.shape.tolist()))
        assert info.type.name == tensor.tensor_type.name
        assert (info.offset, info.size) == (tensor.data_offset, tensor.n_bytes)


def test_values_of_every_type_are_read(written: Callable[[Callable[[GGUFWriter], Any]], Path]) -> None:
    def add(writer: GGUFWriter) -> None:
        writer.add_uint8("a.u8", 255)
        writer.add_int8("a.i8", -128)
        writer.add_uint16("a.u16", 65535)
        writer.add_int16("a.i16", -32768)
        writer.add_uint32("a.u32", 2**32 - 1)
        writer.add_int32("a.i32", -(2**31))
        writer.add_uint64("a.u64", 2**64 - 1)
        writer.add_int64("a.i64", -(2**63))
        writer.add_float32("a.f32", 0.5)
        writer.add_float64("a.f64", 0.1)
        writer.add_bool("a.bool", True)
        writer.add_string("a.string", "Ünïcödé")
        writer.add_array("a.numbers", [1, -2, 3])
        writer.add_array("a.strings", ["x", "", "yz"])

    metadata = read_container(written(add)).metadata
    assert {key[2:]: value for key, value in metadata.items() if key.startswith("a.")} == {
        "u8": 255,
        "i8": -128,
        "u16": 65535,
        "i16": -32768,
        "u32": 2**32 - 1,
        "i32": -(2**31),
        "u64": 2**64 - 1,
        "i64": -(2**63),
        "f32": 0.5,
        "f64": 0.1,
        "bool": True,
        "string": "Ünïcödé",
        "numbers": [1, -2, 3],
        "strings": ["x", "", "yz"],
    }


def test_another_alignment_is_followed(written: Callable[[Callable[[GGUFWriter], Any]], Path]) -> None:
    def add(writer: GGUFWriter) -> None:
        writer.add_custom_alignment(256)
        writer.add_tensor("a", np.arange(3, dtype=np.float32))
        writer.add_tensor("b", np.arange(5, dtype=np.float32))

    path = written(add)
    tensors = read_container(path).tensors
    assert {name: tensors[name].offset % 256 for name in "ab"} == {"a": 0, "b": 0}
    assert [tensors[name].offset for name in "ab"] == [tensor.data_offset for tensor in GGUFReader(path).tensors]


# Cuts within the magic, the counts, a key, the vocabulary, the tensor table and the data.
@pytest.mark.parametrize("size", [1, 3, 5, 23, 40, 500, 3000, 20000, -1, -100_000])
def test_a_truncated_file_is_named(damaged: Callable[[Callable[[bytearray], Any]], Path], size: int) -> None:
    path = damaged(lambda contents: contents.__delitem__(slice(size, None)))
    with pytest.raises(CorruptArtifactError, match=r"damaged\.gguf"):
        open_checkpoint(path)


def test_an_empty_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(CorruptArtifactError, match=r"empty\.gguf is empty; download or copy it again"):
        open_checkpoint(tmp_path / "empty.gguf")


def test_a_file_of_another_format_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    with pytest.raises(CorruptArtifactError, match=r"model\.gguf is not a GGUF file: it starts with b'vers'"):
        open_checkpoint(tmp_path / "model.gguf")


@pytest.mark.parametrize(("version", "message"), [(1, "version 1; supported: 2, 3"), (9, "version 9; supported")])
def test_an_unknown_version_is_refused(
    damaged: Callable[[Callable[[bytearray], Any]], Path], version: int, message: str
) -> None:
    path = damaged(lambda contents: struct.pack_into("<I", contents, 4, version))
    with pytest.raises(UnsupportedError, match=message):
        read_container(path)


def test_the_other_byte_order_is_refused(damaged: Callable[[Callable[[bytearray], Any]], Path]) -> None:
    path = damaged(lambda contents: struct.pack_into(">I", contents, 4, 3))
    with pytest.raises(UnsupportedError, match=r"big-endian"):
        read_container(path)


def test_version_2_is_read_like_version_3(
    damaged: Callable[[Callable[[bytearray], Any]], Path], tiny_gguf: TinyGguf
) -> None:
    path = damaged(lambda contents: struct.pack_into("<I", contents, 4, 2))
    assert read_container(path).tensors == read_container(tiny_gguf("llama", "Q4_0")).tensors


@pytest.mark.parametrize("count", [2**63, 2**40])
def test_an_impossible_length_is_refused_without_reading_on(
    damaged: Callable[[Callable[[bytearray], Any]], Path], count: int
) -> None:
    def lengthen(contents: bytearray) -> None:
        key = b"tokenizer.ggml.tokens"
        struct.pack_into("<Q", contents, contents.index(key) + len(key) + 8, count)

    with pytest.raises(CorruptArtifactError, match=r"ends within its header.*; download or copy it again"):
        read_container(damaged(lengthen))


def test_an_unknown_value_type_is_named(damaged: Callable[[Callable[[bytearray], Any]], Path]) -> None:
    def change(contents: bytearray) -> None:
        key = b"general.architecture"
        struct.pack_into("<I", contents, contents.index(key) + len(key), 99)

    with pytest.raises(CorruptArtifactError, match="a value of unknown type 99 at byte"):
        read_container(damaged(change))


def test_a_string_that_is_not_utf8_is_named(damaged: Callable[[Callable[[bytearray], Any]], Path]) -> None:
    def change(contents: bytearray) -> None:
        contents[contents.index(b"general.architecture")] = 0xFF

    with pytest.raises(CorruptArtifactError, match="a string that is not UTF-8 at byte"):
        read_container(damaged(change))


def _table_entry(contents: bytearray, name: str) -> int:
    """Where the number of dimensions of a tensor stands."""
    return contents.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (24, r"has 'blk\.0\.ffn_up\.weight' as I8; supported: BF16, F16, .*, Q4_0, Q4_1, Q4_K, Q5_0, .*, TQ2_0$"),
        (27, "as I64; supported"),
        (9, "as Q8_1; supported"),  # made of activations, never stored
        (15, "as Q8_K; supported"),
        (999, "as unknown type 999; supported"),
    ],
)
def test_an_unsupported_type_is_named_with_the_supported_ones(
    damaged: Callable[[Callable[[bytearray], Any]], Path], kind: int, message: str
) -> None:
    def change(contents: bytearray) -> None:
        struct.pack_into("<I", contents, _table_entry(contents, "blk.0.ffn_up.weight") + 4 + 16, kind)

    with pytest.raises(UnsupportedError, match=message):
        read_container(damaged(change))


@pytest.mark.parametrize("dimensions", [0, 5])
def test_an_impossible_number_of_dimensions_is_named(
    damaged: Callable[[Callable[[bytearray], Any]], Path], dimensions: int
) -> None:
    def change(contents: bytearray) -> None:
        struct.pack_into("<I", contents, _table_entry(contents, "blk.0.ffn_up.weight"), dimensions)

    with pytest.raises(CorruptArtifactError, match=rf"with {dimensions} dimensions; GGUF allows 1 to 4"):
        read_container(damaged(change))


def test_a_row_that_is_no_whole_number_of_blocks_is_named(
    damaged: Callable[[Callable[[bytearray], Any]], Path],
) -> None:
    def change(contents: bytearray) -> None:
        struct.pack_into("<Q", contents, _table_entry(contents, "blk.0.ffn_up.weight") + 4, 65)

    with pytest.raises(CorruptArtifactError, match=r"as Q4_0 with shape \(96, 65\)"):
        read_container(damaged(change))


@pytest.mark.parametrize(("kind", "name"), [(14, "Q6_K"), (12, "Q4_K"), (10, "Q2_K"), (22, "IQ2_S")])
def test_a_row_shorter_than_a_block_is_named(
    damaged: Callable[[Callable[[bytearray], Any]], Path], kind: int, name: str
) -> None:
    def change(contents: bytearray) -> None:
        struct.pack_into("<I", contents, _table_entry(contents, "blk.0.ffn_up.weight") + 4 + 16, kind)

    with pytest.raises(CorruptArtifactError, match=rf"'blk\.0\.ffn_up\.weight' as {name} with shape \(96, 64\)"):
        read_container(damaged(change))


def test_a_split_file_is_refused(written: Callable[[Callable[[GGUFWriter], Any]], Path]) -> None:
    path = written(lambda writer: writer.add_uint16("split.count", 3))
    with pytest.raises(UnsupportedError, match=r"is one of 3 splits; merge them with llama-gguf-split"):
        read_container(path)


def test_an_impossible_alignment_is_named(written: Callable[[Callable[[GGUFWriter], Any]], Path]) -> None:
    path = written(lambda writer: writer.add_uint32("general.alignment", 12))
    with pytest.raises(CorruptArtifactError, match=r"general\.alignment = 12; it must be a multiple of 8"):
        read_container(path)
