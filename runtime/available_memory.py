"""How much memory this process may take: what the machine has left, and what a container allows."""

from __future__ import annotations

import ctypes
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

logger = logging.getLogger(__name__)

# A cgroup v1 without a limit says the largest multiple of a page below 2⁶³.
_NO_LIMIT = 1 << 60


@dataclass(frozen=True, kw_only=True)
class AvailableMemory:
    """Memory that can be had without another process losing any.

    Attributes:
        total_bytes: What the machine or the container has in all.
        available_bytes: What is left of it.
        limited_by: Which of the two leaves less.
    """

    total_bytes: int
    available_bytes: int
    limited_by: Literal["machine", "cgroup"]


def available_memory(root: Path = Path("/")) -> AvailableMemory:
    """Reads the memory of the machine and the limits of this process's control groups (versions 1 and 2).

    Args:
        root: Where /proc and /sys are.
    """
    import psutil

    machine = psutil.virtual_memory()
    found = AvailableMemory(total_bytes=machine.total, available_bytes=machine.available, limited_by="machine")
    for limit, used in _cgroup_limits(root):
        left = max(0, limit - used)
        if left < found.available_bytes:
            found = AvailableMemory(total_bytes=limit, available_bytes=left, limited_by="cgroup")
    return found


def resident_bytes() -> int:
    """Returns the resident set of this process."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def return_free_memory() -> None:
    """Has glibc give freed memory, of which a load leaves much, back to the system; others have no such call."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _cgroup_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yields limit and use, bytes, of every control group that this process is in and that has a limit."""
    text = _read(root / "proc/self/cgroup") or ""
    for line in text.splitlines():
        names: tuple[str, ...]
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            base, names, unused = root / "sys/fs/cgroup", ("memory.max", "memory.high"), "inactive_file"
            use = "memory.current"
        elif "memory" in controllers.split(","):
            base, names, unused = root / "sys/fs/cgroup/memory", ("memory.limit_in_bytes",), "total_inactive_file"
            use = "memory.usage_in_bytes"
        else:
            continue
        for group in _with_ancestors(base, path):
            limits = [limit for name in names if (limit := _number(group / name)) is not None and limit < _NO_LIMIT]
            used = _number(group / use)
            if limits and used is not None:
                yield min(limits), max(0, used - _statistic(group / "memory.stat", unused))


def _with_ancestors(base: Path, path: str) -> Iterator[Path]:
    """Yields a group's directory and those above it; inside a container only the mount itself may be there."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for count in range(len(parts), -1, -1):
        yield base.joinpath(*parts[:count])


def _statistic(path: Path, name: str) -> int:
    """Returns a line of memory.stat: page cache that goes when memory is asked for counts as use, and is none."""
    found = re.search(rf"^{name} (\d+)$", _read(path) or "", re.MULTILINE)
    return int(found[1]) if found else 0


def _number(path: Path) -> int | None:
    text = (_read(path) or "").strip()
    return int(text) if text.isdecimal() else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError as error:
        logger.debug("cannot read %s: %s", path, error)
        return None
