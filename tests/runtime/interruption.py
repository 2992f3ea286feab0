"""Ctrl-C at a place of our choice."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType, ModuleType


class Interruption:
    """Raises KeyboardInterrupt before the n-th line that the given modules run."""

    def __init__(self, at: int, modules: tuple[ModuleType, ...]) -> None:
        self.left = at
        self._files = {module.__file__ for module in modules}

    def __call__(self, frame: FrameType, event: str, _: object) -> Interruption | None:
        if frame.f_code.co_filename not in self._files:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self

    def run(self, action: Callable[[], object]) -> bool:
        """Says whether the action was interrupted."""
        before = sys.gettrace()
        try:
            sys.settrace(self)
            action()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False
