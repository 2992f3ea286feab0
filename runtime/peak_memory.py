"""The most memory that this process has held."""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")


def peak_memory_bytes() -> int:
    """Returns the largest resident set of this process so far, in bytes.

    Linux's VmHWM is preferred: getrusage also counts what a parent held when it started this process. Where /proc
    has no such line (other systems, some sandboxes), it is getrusage's.
    """
    if _STATUS.is_file() and (found := re.search(r"^VmHWM:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)):
        return int(found[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
