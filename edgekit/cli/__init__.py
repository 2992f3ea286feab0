"""The command line: one module per command, each of which imports what it needs when it runs.

Results go to stdout, everything else to stderr. `edgekit.cli.failures` has the exit codes.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

import click

from edgekit.cli.bench import bench
from edgekit.cli.chat import chat
from edgekit.cli.eval import evaluate
from edgekit.cli.export import export
from edgekit.cli.failures import explain
from edgekit.cli.families import families
from edgekit.cli.inspect import inspect
from edgekit.cli.options import Invocation, verbose_option
from edgekit.cli.output import print_json
from edgekit.cli.plan import plan
from edgekit.cli.run import run
from edgekit.cli.tune_cache import tune_cache
from edgekit.version import __version__

__all__ = ["cli", "main"]


class _InOrder(click.Group):
    """Lists its commands in the order of use rather than of the alphabet."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's interface
        return list(self.commands)


@click.group(
    cls=_InOrder,
    context_settings={"auto_envvar_prefix": "EDGEKIT", "help_option_names": ["-h", "--help"]},
    epilog="Every option can be set by an environment variable: --max-tokens of run by EDGEKIT_RUN_MAX_TOKENS.",
)
@click.version_option(__version__, message="edgekit %(version)s")
@verbose_option
def cli() -> None:
    """Exports language models to portable bundles and runs them on small devices."""


for _command in (export, plan, tune_cache, run, chat, evaluate, bench, inspect, families):
    cli.add_command(_command)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line and exits.

    Args:
        arguments: What follows the program's name; None for the process's own.

    Raises:
        SystemExit: Always, with the exit status.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    # Known before anything is parsed, for mistakes in the arguments themselves.
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    invocation = Invocation(json="--json" in options)
    with _logging_to_stderr(), _terminated_by_exception():
        try:
            status = cli.main(arguments, prog_name="edgekit", standalone_mode=False, obj=invocation)
            sys.stdout.flush()
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - nobody is above this
            status = _report(error, invocation)
    sys.exit(status or 0)


def _report(error: BaseException, invocation: Invocation) -> int:
    """Says what went wrong; returns the exit status."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()
        return error.exit_code
    failure = explain(error)
    if invocation.verbose:
        traceback.print_exception(error)
    if failure.message:
        click.echo(f"error: {failure.message}", err=True)
        if invocation.json:
            with suppress(OSError):
                print_json({"error": {"code": failure.code, "message": failure.message}})
    _drop_unwritable_output()
    return failure.exit_code


def _drop_unwritable_output() -> None:
    """Points stdout nowhere if it takes no more, or the interpreter would complain about it at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


class _StderrHandler(logging.Handler):
    """Writes to what stderr is at that moment: while a progress bar is shown, a stream that writes above it."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes one record."""
        sys.stderr.write(f"{self.format(record)}\n")


@contextmanager
def _logging_to_stderr() -> Iterator[None]:
    """Shows warnings of EdgeKit, and with --verbose what it reports; leaves logging as it was."""
    logger, handler = logging.getLogger("edgekit"), _StderrHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)


@contextmanager
def _terminated_by_exception() -> Iterator[None]:
    """Lets SIGTERM end the process by SystemExit, so that what is half done is cleaned up."""
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminate(number: int, _: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)  # the cleaning up is not to be interrupted
    sys.exit(128 + number)
