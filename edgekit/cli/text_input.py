"""Text from files and from stdin: UTF-8, whatever the locale."""

from __future__ import annotations

import sys
from pathlib import Path

from edgekit.errors import UsageError


def read_file(path: Path) -> str:
    """Returns the text of a file.

    Raises:
        UsageError: The file cannot be read or is not UTF-8.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {str(path)!r}: {error.strerror}") from error
    return decode(content, repr(str(path)))


def read_stdin() -> str:
    """Returns all of stdin.

    Raises:
        UsageError: It is not UTF-8.
    """
    return decode(sys.stdin.buffer.read(), "stdin")


def decode(content: bytes, origin: str) -> str:
    """Decodes UTF-8.

    Args:
        content: Encoded text.
        origin: Where it is from, for the message.

    Raises:
        UsageError: It is not UTF-8.
    """
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        found = content[error.start]
        raise UsageError(f"{origin} is not UTF-8: it has the byte 0x{found:02x} at offset {error.start}") from error


def without_line_end(text: str) -> str:
    """Drops the line end that editors and `echo` put after a text."""
    return text.removesuffix("\n").removesuffix("\r")
