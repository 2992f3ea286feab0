"""What a failed command says, and its exit status.

| status | code           | meaning                                                                |
|--------|----------------|------------------------------------------------------------------------|
| 0      |                | success                                                                |
| 1      | error, storage | anything else; the disk refused a write                                |
| 2      | usage          | a wrong option, value, path or prompt                                  |
| 3      | unsupported, missing_extra | a model, feature or platform that EdgeKit does not know    |
| 4      | does_not_fit   | more memory or context than there is                                   |
| 5      | corrupt        | a file that is truncated, changed or missing                           |
| 6      | parity         | an export whose logits are not the model's                             |
| 130    |                | interrupted by Ctrl-C                                                  |
| 143    |                | ended by SIGTERM                                                       |
"""

from __future__ import annotations

import errno
from dataclasses import dataclass

import click

from edgekit.errors import DoesNotFitError, EdgeKitError, StorageError, UsageError

_REFUSED_WRITES = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What is said about an error.

    Attributes:
        code: Stable identifier for programs.
        message: One line; empty when nothing is to be said.
        exit_code: Exit status of the process.
    """

    code: str
    message: str
    exit_code: int


def explain(error: BaseException) -> Failure:
    """Puts an error into one line for people and a code for programs."""
    match error:
        case EdgeKitError():
            return _failure(type(error), str(error))
        case KeyboardInterrupt() | click.Abort():
            return Failure(code="interrupted", message="", exit_code=130)
        case BrokenPipeError():  # the reader has seen enough
            return Failure(code="broken_pipe", message="", exit_code=1)
        case click.ClickException():
            return _failure(UsageError, f"{_click_message(error)}{_where_help_is(error)}")
        case MemoryError():
            detail = f": {error}" if str(error) else ""
            return _failure(DoesNotFitError, f"out of memory{detail}; use a smaller model, context or precision")
        case OSError():
            kind = StorageError if error.errno in _REFUSED_WRITES else EdgeKitError
            place = "" if error.filename is None else f" of {error.filename!r}"
            return _failure(kind, f"input or output{place} failed: {error.strerror or error}")
    return _failure(
        EdgeKitError,
        f"unexpected {type(error).__name__}: {str(error).strip()}; run again with --verbose for the traceback",
    )


def _failure(kind: type[EdgeKitError], message: str) -> Failure:
    return Failure(code=kind.code, message=" ".join(message.split()), exit_code=kind.exit_code)


def _click_message(error: click.ClickException) -> str:
    # Click sorts its guesses by the alphabet, after it has taken the closest ones.
    close = getattr(error, "possibilities", None)
    return f"{error.message} Did you mean {close[0]!r}?" if close else error.format_message()


def _where_help_is(error: click.ClickException) -> str:
    context = error.ctx if isinstance(error, click.UsageError) else None
    return "" if context is None else f" (see {context.command_path} --help)"
