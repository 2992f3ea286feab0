from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from edgekit.cli import cli, main
from edgekit.version import __version__

Invoke: TypeAlias = Callable[..., Any]

PROGRAM = [sys.executable, "-c", "from edgekit.cli import main; main()"]
HEAVY = ("edgekit.runtime", "jinja2", "msgspec", "numpy", "onnx_ir", "onnxruntime", "rich", "tokenizers", "torch")


def test_the_version_is_printed(invoke: Invoke) -> None:
    assert invoke("--version").stdout == f"edgekit {__version__}\n"


def test_the_help_lists_every_command_in_the_order_of_use(invoke: Invoke) -> None:
    listed = invoke("--help").stdout.partition("Commands:\n")[2].partition("\n\n")[0]
    names = [line.split()[0] for line in listed.splitlines()]
    assert names == ["export", "plan", "tune-cache", "run", "chat", "eval", "bench", "inspect", "families"]


@pytest.mark.parametrize("command", [*cli.commands])
def test_every_command_explains_itself_and_its_options(invoke: Invoke, command: str) -> None:
    outcome = invoke(command, "-h")
    assert outcome.status == 0
    assert outcome.stdout.startswith(f"Usage: edgekit {command} ")
    assert all(
        getattr(option, "help", "") for option in cli.commands[command].params if option.param_type_name == "option"
    )


def test_without_a_command_the_help_goes_to_stderr(invoke: Invoke) -> None:
    outcome = invoke()
    assert (outcome.status, outcome.stdout) == (2, "")
    assert "Commands:" in outcome.stderr


def test_importing_the_command_line_loads_nothing_heavy() -> None:
    code = "import sys, json, edgekit.cli; print(json.dumps([*sys.modules]))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert set(json.loads(result.stdout)).isdisjoint(HEAVY)


def test_the_installed_script_is_the_command_line() -> None:
    script = Path(sysconfig.get_path("scripts")) / "edgekit"
    result = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
    assert result.stdout == f"edgekit {__version__}\n"


def test_an_unknown_command_names_the_closest_one(invoke: Invoke) -> None:
    outcome = invoke("exprot")
    assert outcome.status == 2
    assert outcome.stderr == "error: No such command 'exprot'. Did you mean 'export'? (see edgekit --help)\n"


def test_an_unknown_option_names_the_closest_one(invoke: Invoke) -> None:
    outcome = invoke("export", "model", "out", "--precison", "int4")
    assert outcome.status == 2
    line = "error: No such option '--precison'. Did you mean '--precision'? (see edgekit export --help)\n"
    assert outcome.stderr == line


def test_an_error_is_one_line_on_stderr_and_its_exit_status(invoke: Invoke, tmp_path: Path) -> None:
    outcome = invoke("inspect", tmp_path / "missing")
    assert (outcome.status, outcome.stdout) == (2, "")
    assert outcome.stderr.startswith("error: no such bundle: ")
    assert outcome.stderr.count("\n") == 1


def test_with_json_an_error_is_also_one_document_on_stdout(invoke: Invoke, tmp_path: Path) -> None:
    outcome = invoke("inspect", tmp_path / "missing", "--json")
    assert outcome.status == 2
    assert outcome.json == {"error": {"code": "usage", "message": outcome.stderr.removeprefix("error: ").strip()}}


@pytest.mark.parametrize(
    "arguments", [("run", "--json"), ("run", "b", "p", "--max-token=1", "--json"), ("x", "--json")]
)
def test_with_json_a_mistake_in_the_arguments_is_a_document_too(invoke: Invoke, arguments: tuple[str, ...]) -> None:
    outcome = invoke(*arguments)
    assert outcome.status == 2
    assert outcome.json["error"]["code"] == "usage"


def test_what_follows_two_dashes_is_no_option(invoke: Invoke, tmp_path: Path) -> None:
    outcome = invoke("run", tmp_path / "missing", "--", "--json")
    assert (outcome.status, outcome.stdout) == (2, "")


@pytest.mark.parametrize("arguments", [("--verbose", "inspect"), ("inspect", "-v"), ("-v", "inspect", "--verbose")])
def test_verbose_shows_the_traceback_before_and_after_the_command(
    invoke: Invoke, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    outcome = invoke(*arguments, tmp_path / "missing")
    assert outcome.status == 2
    assert outcome.stderr.startswith("Traceback")
    assert outcome.stderr.splitlines()[-1].startswith("error: no such bundle: ")


def test_verbose_logs_what_is_done_and_only_then(
    invoke: Invoke, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = {}
    for option in ("--verbose", "--json"):
        monkeypatch.setenv("EDGEKIT_CACHE_DIR", str(tmp_path / option))
        logs[option] = invoke("run", bundle, "fox", "--max-tokens", 1, option).stderr
    assert f"INFO edgekit.runtime.lowered: lowering {bundle}" in logs["--verbose"]
    assert logs["--json"] == ""


def test_an_option_can_be_set_by_the_environment(invoke: Invoke, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEKIT_RUN_MAX_TOKENS", "3")
    monkeypatch.setenv("EDGEKIT_RUN_JSON", "1")
    monkeypatch.setenv("EDGEKIT_RUN_IGNORE_EOS", "true")
    assert invoke("run", bundle, "fox").json["usage"]["completion_tokens"] == 3


def test_the_environment_asks_for_json_errors_and_tracebacks(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGEKIT_INSPECT_JSON", "1")
    monkeypatch.setenv("EDGEKIT_VERBOSE", "1")
    outcome = invoke("inspect", tmp_path / "missing")
    assert outcome.json["error"]["code"] == "usage"
    assert outcome.stderr.startswith("Traceback")


def test_an_unexpected_error_is_one_line_that_says_how_to_see_more(
    invoke: Invoke, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgekit.bundle.open_bundle", lambda _: 1 / 0)
    outcome = invoke("inspect", bundle)
    assert (outcome.status, outcome.stdout) == (1, "")
    line = "error: unexpected ZeroDivisionError: division by zero; run again with --verbose for the traceback\n"
    assert outcome.stderr == line


def test_a_reader_that_leaves_early_is_no_error(bundle: Path) -> None:
    command = [*PROGRAM, "inspect", str(bundle), "--json"]
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (result.returncode, result.stderr) == (1, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_output_that_finds_no_space_is_one_line(bundle: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        command = [*PROGRAM, "inspect", str(bundle), "--json"]
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (result.returncode, result.stderr) == (1, "error: input or output failed: No space left on device\n")


def test_nothing_of_the_process_is_left_changed(invoke: Invoke) -> None:
    before = signal.getsignal(signal.SIGTERM)
    invoke("--verbose", "families")
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_arguments_of_the_process_are_the_default(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["edgekit", "--version"])
    with pytest.raises(SystemExit, match="0"):
        main()
    assert capsys.readouterr().out == f"edgekit {__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "fox", "--max-tokens", "1"),
        ("chat", "--prompt", "fox", "--max-tokens", "1"),
        ("bench", "--pp", "4", "--tg", "0", "--repetitions", "1"),
        ("eval", "--text", __file__, "--windows", "1", "--window-tokens", "8"),
        ("inspect", "--verify"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_on_a_device_no_command_needs_the_workbench(bundle: Path, arguments: tuple[str, ...]) -> None:
    workbench = ("accelerate", "gguf", "huggingface_hub", "safetensors", "torch", "transformers")
    block = f"import sys; sys.modules.update(dict.fromkeys({workbench}))"
    command = [sys.executable, "-c", f"{block}; from edgekit.cli import main; main()", arguments[0], str(bundle)]
    result = subprocess.run([*command, *arguments[1:]], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout
