"""How long work tells what it is doing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called with (what, done, total) before each piece of work; totals differ between its phases."""
