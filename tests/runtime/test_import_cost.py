"""What a small device pays for importing the runtime; tests/test_imports.py has more modules that it must not load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

MAX_BYTES = 60 << 20


def test_importing_the_runtime_takes_little_memory_beyond_numpy(tmp_path: Path) -> None:
    code = (
        "import numpy, psutil\n"
        "process = psutil.Process()\n"
        "before = process.memory_info().rss\n"
        "import edgekit.runtime\n"
        "print(process.memory_info().rss - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    taken = int(done.stdout)
    assert 1 << 20 < taken < MAX_BYTES


def test_importing_the_runtime_loads_no_tokenizer(tmp_path: Path) -> None:
    code = "import sys, edgekit.runtime; assert 'tokenizers' not in sys.modules and 'psutil' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
