from __future__ import annotations

import errno

import click
import pytest

from edgekit.cli.failures import explain
from edgekit.errors import (
    CorruptArtifactError,
    DoesNotFitError,
    EdgeKitError,
    MissingExtraError,
    ParityError,
    StorageError,
    UnsupportedError,
    UsageError,
)


@pytest.mark.parametrize(
    ("error", "code", "exit_code"),
    [
        (EdgeKitError("x"), "error", 1),
        (StorageError("x"), "storage", 1),
        (UsageError("x"), "usage", 2),
        (UnsupportedError("x"), "unsupported", 3),
        (MissingExtraError("torch", "export"), "missing_extra", 3),
        (DoesNotFitError("x"), "does_not_fit", 4),
        (CorruptArtifactError("x"), "corrupt", 5),
        (ParityError("x"), "parity", 6),
    ],
)
def test_errors_on_purpose_keep_their_words_and_codes(error: EdgeKitError, code: str, exit_code: int) -> None:
    failure = explain(error)
    assert (failure.message, failure.code, failure.exit_code) == (str(error), code, exit_code)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), click.Abort()])
def test_an_interruption_is_quiet_and_has_the_status_of_shells(error: BaseException) -> None:
    failure = explain(error)
    assert (failure.message, failure.exit_code) == ("", 130)


def test_a_broken_pipe_is_quiet() -> None:
    assert explain(BrokenPipeError(errno.EPIPE, "Broken pipe")).message == ""


def test_a_full_disk_is_a_storage_error_that_names_the_file() -> None:
    failure = explain(OSError(errno.ENOSPC, "No space left on device", "out/model.onnx"))
    assert (failure.code, failure.exit_code) == ("storage", 1)
    assert failure.message == "input or output of 'out/model.onnx' failed: No space left on device"


def test_another_system_error_says_what_the_system_said() -> None:
    failure = explain(PermissionError(errno.EACCES, "Permission denied", "secret"))
    assert (failure.code, failure.exit_code) == ("error", 1)
    assert failure.message == "input or output of 'secret' failed: Permission denied"


@pytest.mark.parametrize(
    ("error", "start"),
    [
        (MemoryError(), "out of memory; "),
        (MemoryError("Unable to allocate 9.1 GiB"), "out of memory: Unable to allocate 9.1 GiB; "),
    ],
)
def test_too_little_memory_does_not_fit(error: MemoryError, start: str) -> None:
    failure = explain(error)
    assert (failure.code, failure.exit_code) == ("does_not_fit", 4)
    assert failure.message.startswith(start)


def test_a_message_of_several_lines_becomes_one() -> None:
    message = explain(RuntimeError("first\n  second\n")).message
    assert message == "unexpected RuntimeError: first second; run again with --verbose for the traceback"


def test_a_usage_error_of_click_points_to_the_help_of_its_command() -> None:
    context = click.Context(click.Command("bench"), info_name="bench")
    failure = explain(click.BadParameter("7 is not allowed", ctx=context, param_hint="--pp"))
    assert (failure.code, failure.exit_code) == ("usage", 2)
    assert failure.message == "Invalid value for --pp: 7 is not allowed (see bench --help)"
