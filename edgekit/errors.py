"""The errors that EdgeKit raises on purpose.

    EdgeKitError
    ├── UsageError             exit 2   a wrong option, value, path or prompt
    ├── UnsupportedError       exit 3   a model, feature, platform or format that EdgeKit does not know
    ├── DoesNotFitError        exit 4   more memory or context than there is
    ├── CorruptArtifactError   exit 5   a file that is truncated, changed or missing
    ├── ParityError            exit 6   an export whose logits are not the model's
    ├── MissingExtraError      exit 3   an optional dependency that is not installed
    └── StorageError           exit 1   the disk refused a write

A message is one line: what is wrong, the value, what is allowed, what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar


class EdgeKitError(Exception):
    """Base of every error that EdgeKit raises on purpose.

    Attributes:
        code: Stable identifier for programs (`--json` prints it).
        exit_code: The process exit status of the CLI.
    """

    code: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1


class UsageError(EdgeKitError, ValueError):
    """An option, value, path or prompt that cannot be used."""

    code = "usage"
    exit_code = 2


class UnsupportedError(EdgeKitError):
    """A model, feature or platform that EdgeKit does not know."""

    code = "unsupported"
    exit_code = 3


class MissingExtraError(UnsupportedError):
    """An optional dependency that is not installed."""

    code = "missing_extra"

    def __init__(self, package: str, extra: str) -> None:
        """Names the package and the extra that brings it.

        Args:
            package: The importable package that is missing.
            extra: The EdgeKit extra that installs it.
        """
        super().__init__(f"{package} is not installed; run: pip install 'edgekit[{extra}]'")


class DoesNotFitError(EdgeKitError):
    """More memory or context is asked for than there is."""

    code = "does_not_fit"
    exit_code = 4


class CorruptArtifactError(EdgeKitError):
    """A file that is truncated, changed or missing."""

    code = "corrupt"
    exit_code = 5


class ParityError(EdgeKitError):
    """An exported graph whose logits are not those of the source model."""

    code = "parity"
    exit_code = 6


class StorageError(EdgeKitError):
    """The disk refused a write (full, read-only, no permission)."""

    code = "storage"
    exit_code = 1


def one_of(value: str, allowed: Iterable[str]) -> str:
    """Says what was got and what is allowed, with the closest match first.

    Args:
        value: What the user wrote.
        allowed: Every accepted spelling.

    Returns:
        A clause for an error message: ``'lama'; known: llama, qwen3 (did you mean 'llama'?)``.
    """
    known = sorted(allowed)
    close = difflib.get_close_matches(value, known, n=1)
    guess = f" (did you mean {close[0]!r}?)" if close else ""
    return f"{value!r}; known: {', '.join(known)}{guess}"
