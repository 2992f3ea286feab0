"""The pages of a mapped file are found and given back, and come again when they are read."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import numpy as np
import pytest

from edgekit.runtime.mapped_table import KEPT_LOOKUPS, MappedTable, mapped_ranges

SIZE_BYTES = 64 * mmap.PAGESIZE


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file of bytes that differ from page to page; its name has a space, as directories may."""
    path = tmp_path / "the data"
    path.write_bytes((np.arange(SIZE_BYTES) // mmap.PAGESIZE % 251).astype(np.uint8).tobytes())
    return path


def _map(path: Path) -> mmap.mmap:
    with path.open("rb") as opened:
        return mmap.mmap(opened.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)


def _resident_bytes(path: Path) -> int:
    """Resident pages of the file in this process, as the kernel says."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total


def test_mappings_are_found_by_the_file(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "another"
    other.write_bytes(file.read_bytes())
    with _map(file) as mapped, _map(other):
        address = np.frombuffer(mapped, np.uint8).ctypes.data
        assert mapped_ranges(file) == [(address, SIZE_BYTES)]
        assert len(mapped_ranges(other)) == 1
    assert mapped_ranges(tmp_path / "not mapped") == []


def test_a_link_is_the_file_it_leads_to(file: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(file)
    with _map(file):
        assert mapped_ranges(link) == mapped_ranges(file) != []


def test_pages_are_given_back_after_many_lookups_and_read_again_unchanged(file: Path) -> None:
    with _map(file) as mapped:
        table = MappedTable(file)
        before = bytes(mapped)
        assert _resident_bytes(file) == SIZE_BYTES
        table.note(KEPT_LOOKUPS - 1)
        assert _resident_bytes(file) == SIZE_BYTES
        table.note(1)
        assert _resident_bytes(file) == 0
        assert bytes(mapped) == before == file.read_bytes()
        table.note(KEPT_LOOKUPS - 1)
        assert _resident_bytes(file) == SIZE_BYTES


def test_what_was_read_before_is_given_back_at_once(file: Path) -> None:
    with _map(file) as mapped:
        bytes(mapped)
        MappedTable(file)
        assert _resident_bytes(file) == 0


def test_without_proc_nothing_is_found_and_nothing_fails(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise FileNotFoundError

    with _map(file):
        monkeypatch.setattr(Path, "read_text", refuse)
        table = MappedTable(file)
        assert table.ranges == []
        table.note(10 * KEPT_LOOKUPS)
