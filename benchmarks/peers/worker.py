"""The caller's side of `peers.protocol`: an engine in a process of its own."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

from peers.protocol import AbsentError

BENCHMARKS = Path(__file__).resolve().parent.parent


class Worker:
    """A running engine; ends with its `with` block.

    Attributes:
        version: What the engine says that it is.
    """

    def __init__(self, engine: str, python: str) -> None:
        """Starts the process.

        Args:
            engine: A module of `peers`.
            python: The interpreter that has the engine installed.

        Raises:
            AbsentError: It has not.
        """
        self._name = f"{python} -m peers.{engine}"
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 -- open as long as the process
        self._process = subprocess.Popen(
            [python, "-m", f"peers.{engine}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=BENCHMARKS,
        )
        self.version: str = self._answer()["version"]

    def __enter__(self) -> Worker:
        """Returns itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Ends the process."""
        self.close()

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()
        self._errors.close()

    def call(self, name: str, *arguments: object) -> Any:
        """Calls a method of the engine, or ``peak_memory``, and waits for its result.

        Raises:
            RuntimeError: The process failed; the message has the last line that it wrote.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"call": name, "arguments": arguments}) + "\n")
        self._process.stdin.flush()
        return self._answer()["result"]

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            answer: dict[str, Any] = json.loads(line)
            return answer
        status = self._process.wait()
        self._errors.seek(0)
        last = (self._errors.read().strip().splitlines() or [f"exit status {status}"])[-1]
        self.close()
        kind = AbsentError if last.startswith(("ModuleNotFoundError", "ImportError")) else RuntimeError
        raise kind(f"{self._name}: {last}")
