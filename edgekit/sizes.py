"""Sizes in bytes as people write them: ``512MiB``, ``1.5 GB``."""

from __future__ import annotations

import re

from edgekit.errors import UsageError, one_of

UNITS = {
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
}
MAX_BYTES = 1 << 60


def parse_size(text: object, what: str) -> int:
    """Reads a size.

    Args:
        text: A number and a unit of `UNITS`; what a caller's type checker has not seen is refused.
        what: What it is the size of, for the message of an error.

    Returns:
        Bytes, at least 1.

    Raises:
        UsageError: There is no number or no unit, or the size is less than a byte or more than `MAX_BYTES`.
    """
    if not isinstance(text, str):
        raise UsageError(f"{what} is {text!r}; it must be a text with a unit, such as '512MiB'")
    found = re.fullmatch(r"\s*([+-]?(?:\d+(?:\.\d*)?|\.\d+))\s*([A-Za-z]*)\s*", text)
    if found is None:
        raise UsageError(f"{what} is {text!r}; it must be a number and a unit, such as 512MiB or 1.5GB")
    number, unit = float(found[1]), found[2]
    if not unit:
        raise UsageError(
            f"{what} is {text!r}, which may mean bytes or megabytes; give a unit, such as {text.strip()}MiB (1 MiB is "
            "1048576 bytes) or MB (1000000)"
        )
    if unit not in UNITS:
        same = next((f" (did you mean {known!r}?)" for known in UNITS if known.lower() == unit.lower()), None)
        known = one_of(unit, UNITS) if same is None else f"{unit!r}; known: {', '.join(UNITS)}{same}"
        raise UsageError(f"{what} is {text!r}, whose unit is {known}")
    size = number * UNITS[unit]
    if size < 1:
        raise UsageError(f"{what} is {text!r}; it must be at least 1 byte")
    if size > MAX_BYTES:
        raise UsageError(f"{what} is {text!r}; it must be at most {format_size(MAX_BYTES)}")
    # What is meant is a whole number of bytes, which a product of fractions may miss by its last bit.
    return round(size)


def format_size(size_bytes: float) -> str:
    """Writes a size in the largest binary unit that leaves a number of at least 1: ``512 MiB``, ``1.4 GiB``."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if abs(size_bytes) >= UNITS[unit]:
            number = size_bytes / UNITS[unit]
            return f"{number:.0f} {unit}" if unit in ("MiB", "KiB") and abs(number) >= 10 else f"{number:.1f} {unit}"
    return f"{size_bytes:.0f} B"
