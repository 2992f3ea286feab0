"""Keeping the embedding table out of memory: the rows that were looked up are given back to the page cache.

ONNX Runtime maps the table from the file of the lowered graph. A lookup makes the pages around a row resident, and with
time the whole table, although a step needs a row per token: the same weights are in memory already, packed, where the
head is tied to the embeddings. The pages are clean, so letting them go costs no write, and having one again costs a
microsecond while the page cache has it.
"""

from __future__ import annotations

import ctypes
import mmap
import re
from pathlib import Path

# A lookup makes up to 16 pages resident (Linux' fault-around), so this many are 8 MiB.
KEPT_LOOKUPS = 128
LOOKUP_BYTES = 64 << 10

_LIBC = ctypes.CDLL(None)


class MappedTable:
    """The pages of a file that this process has mapped.

    Attributes:
        ranges: Address and size, bytes, of every mapping.
    """

    def __init__(self, file: Path) -> None:
        """Finds the mappings of a file, and gives back what was read of them; without a /proc there are none."""
        self.ranges = mapped_ranges(file)
        self._lookups = 0
        # Where the page cache holds the file in huge pages, a lookup would make 2 MiB resident.
        self._advise("MADV_NOHUGEPAGE")
        self.note(KEPT_LOOKUPS)

    def note(self, lookups: int) -> None:
        """Counts rows that were looked up, and gives the pages back once they are many."""
        self._lookups += lookups
        if self._lookups >= KEPT_LOOKUPS:
            self._lookups = 0
            self._advise("MADV_DONTNEED")

    def _advise(self, name: str) -> None:
        """Says something of all ranges, on systems that know it; what comes of it is right either way."""
        advice = getattr(mmap, name, None)
        for address, size in self.ranges if advice is not None else ():
            _LIBC.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), advice)


def mapped_ranges(file: Path) -> list[tuple[int, int]]:
    """Returns address and size, bytes, of this process's mappings of a file that hold data."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        parsed = re.fullmatch(r"([0-9a-f]+)-([0-9a-f]+) r[w-]-[ps] \S+ \S+ \d+ +(.+)", line)
        if parsed is not None and parsed[3] == str(file.resolve()):
            first, end = int(parsed[1], 16), int(parsed[2], 16)
            found.append((first, end - first))
    return found
