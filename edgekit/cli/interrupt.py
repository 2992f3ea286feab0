"""Ctrl-C while a model generates."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgekit.runtime import Session

INTERRUPTED = 130
"""Exit status of a program that Ctrl-C has ended, as shells report it."""


@contextmanager
def interrupt_cancels(session: Session) -> Iterator[None]:
    """Makes Ctrl-C end the running answer; a second one, while that takes its time, ends the program."""

    def cancel(_number: int, _frame: FrameType | None) -> None:
        session.cancel()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, cancel)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
