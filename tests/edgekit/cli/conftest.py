from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias

import pytest
from click.testing import CliRunner

from edgekit.cli import main

if TYPE_CHECKING:
    from edgekit.export.weights import Precision

TinyCheckpoint: TypeAlias = Callable[[str], Path]
MakeBundle: TypeAlias = Callable[[Path, "Precision"], Path]

PROGRAM = (sys.executable, "-c", "from edgekit.cli import main; main()")
PATIENCE_S = 120


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a command left behind."""

    status: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        return json.loads(self.stdout)


@pytest.fixture(scope="session")
def make_bundle(tmp_path_factory: pytest.TempPathFactory) -> MakeBundle:
    """Exports a checkpoint at a precision, once. Do not change the bundle."""
    from edgekit.export.exporter import ExportOptions, export_bundle
    from edgekit.export.storage_plan import QuantizationOptions

    made: dict[tuple[Path, str], Path] = {}

    def make(checkpoint: Path, precision: Precision) -> Path:
        if (checkpoint, precision) not in made:
            output = tmp_path_factory.mktemp("bundles") / f"{checkpoint.name}.edge"
            options = ExportOptions(quantization=QuantizationOptions(precision=precision))
            made[checkpoint, precision] = export_bundle(checkpoint, output, options, lambda *_: None).path
        return made[checkpoint, precision]

    return make


@pytest.fixture(scope="session")
def bundle(make_bundle: MakeBundle, tiny_llama: Path) -> Path:
    """A Llama with a context of 256 tokens, in fp32."""
    return make_bundle(tiny_llama, "fp32")


@pytest.fixture(scope="session")
def endless_bundle(tmp_path_factory: pytest.TempPathFactory, make_bundle: MakeBundle, tiny_llama: Path) -> Path:
    """The same with so long a context that no answer ends before it is interrupted."""
    checkpoint = Path(shutil.copytree(tiny_llama, tmp_path_factory.mktemp("endless") / "llama"))
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1_000_000}))
    return make_bundle(checkpoint, "fp32")


@pytest.fixture
def invoke() -> Callable[..., Outcome]:
    """Runs the command line in this process: ``invoke("run", bundle, "-", stdin="Hello")``."""

    def run(*arguments: object, stdin: str | bytes = "") -> Outcome:
        with CliRunner().isolation(input=stdin) as (stdout, stderr, _):
            with pytest.raises(SystemExit) as exited:
                main([str(argument) for argument in arguments])
            sys.stderr.flush()
            found = stdout.getvalue().decode(), stderr.getvalue().decode()
        assert isinstance(exited.value.code, int)
        return Outcome(status=exited.value.code, stdout=found[0], stderr=found[1])

    return run


class Running:
    """A command in a process of its own, read as it runs."""

    def __init__(self, process: subprocess.Popen[bytes], output: int, keyboard: int | IO[bytes]) -> None:
        self.process = process
        self._output = output
        self._keyboard = keyboard if isinstance(keyboard, int) else keyboard.fileno()
        self.seen = ""
        self._unread = ""

    def write(self, text: str) -> None:
        os.write(self._keyboard, text.encode())

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def wait_for(self, text: str) -> None:
        """Reads on until `text` has come."""
        while text not in self._unread:
            piece = self._read()
            assert piece, f"the process ended without {text!r} after {self.seen!r}"
            self._unread += piece
        self._unread = self._unread.partition(text)[2]

    def wait_for_characters(self, count: int) -> None:
        """Reads on until so many characters have come."""
        while len(self._unread) < count:
            piece = self._read()
            assert piece, f"the process ended after {self.seen!r}"
            self._unread += piece
        self._unread = self._unread[count:]

    def rest(self) -> str:
        """Returns what comes until the process ends."""
        while piece := self._read():
            self._unread += piece
        self.process.wait(PATIENCE_S)
        return self._unread

    def _read(self) -> str:
        ready, _, _ = select.select([self._output], [], [], PATIENCE_S)
        assert ready, f"nothing came for {PATIENCE_S} s after {self.seen!r}"
        try:
            piece = os.read(self._output, 1 << 16).decode(errors="replace")
        except OSError:  # a terminal that nobody writes to any more
            return ""
        self.seen += piece
        return piece


@pytest.fixture
def start() -> Iterator[Callable[..., Running]]:
    """Starts the command line with pipes; stdout and stderr come together."""
    started: list[subprocess.Popen[bytes]] = []

    def run(*arguments: object) -> Running:
        command = [*PROGRAM, *map(str, arguments)]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0
        )
        started.append(process)
        assert process.stdin is not None
        assert process.stdout is not None
        return Running(process, process.stdout.fileno(), process.stdin)

    yield run
    for process in started:
        with process:
            process.kill()


@pytest.fixture
def start_on_terminal() -> Iterator[Callable[..., Running]]:
    """Starts the command line on a pseudo-terminal, which makes signals of Ctrl-C."""
    started: list[tuple[subprocess.Popen[bytes], int]] = []
    take_terminal = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)"

    def run(*arguments: object) -> Running:
        ours, theirs = os.openpty()
        command = [PROGRAM[0], PROGRAM[1], f"{take_terminal}; {PROGRAM[2]}", *map(str, arguments)]
        process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
        os.close(theirs)
        started.append((process, ours))
        return Running(process, ours, ours)

    yield run
    for process, terminal in started:
        process.kill()
        process.wait()
        os.close(terminal)
