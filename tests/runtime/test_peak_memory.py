from __future__ import annotations

import subprocess
import sys

import numpy as np
import psutil
import pytest

from edgekit.runtime import peak_memory
from edgekit.runtime.peak_memory import peak_memory_bytes

MEBIBYTE = 1 << 20


def test_memory_that_was_given_back_still_counts() -> None:
    before = peak_memory_bytes()
    resident = psutil.Process().memory_info().rss
    planted = np.ones(before - resident + 64 * MEBIBYTE, np.uint8)
    del planted
    assert before + 48 * MEBIBYTE < peak_memory_bytes() < before + 128 * MEBIBYTE


def test_what_the_parent_held_does_not_count() -> None:
    planted = np.ones(256 * MEBIBYTE, np.uint8)
    code = "from edgekit.runtime.peak_memory import peak_memory_bytes; print(peak_memory_bytes())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 5 * MEBIBYTE < int(result.stdout) < 192 * MEBIBYTE
    assert planted[-1] == 1


def test_a_system_without_the_line_of_linux_asks_getrusage(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = peak_memory_bytes()
    monkeypatch.setattr(peak_memory, "_STATUS", peak_memory._STATUS / "missing")
    assert exact * 0.9 < peak_memory_bytes() < exact * 1.1 + 512 * MEBIBYTE
