from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest
from optimum.commands.optimum_cli import main

from edgekit.bundle import open_bundle
from edgekit.cli.export import export
from edgekit.export.exporter import ExportOptions, export_bundle
from edgekit.export.storage_plan import QuantizationOptions
from edgekit.version import __version__

OptimumCli: TypeAlias = Callable[..., int]


@pytest.fixture
def optimum_cli(monkeypatch: pytest.MonkeyPatch) -> OptimumCli:
    """Runs ``optimum-cli export edgekit`` in this process; returns its exit status."""

    def run(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["optimum-cli", "export", "edgekit", *map(str, arguments)])
        with pytest.raises(SystemExit) as exited:
            main()
        assert isinstance(exited.value.code, int)
        return exited.value.code

    return run


def test_the_bundle_is_that_of_edgekit_export(
    optimum_cli: OptimumCli, tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.edge"
    options = [
        "--precision=int8",
        "--scheme",
        "symmetric",
        "--block-size",
        16,
        "--keep",
        "layers.0.*",
        "--keep=lm_head",
    ]
    assert optimum_cli("--model", tiny_llama, out, *options, "--json") == 0
    quantization = QuantizationOptions(
        precision="int8", scheme="symmetric", block_size=16, keep=("layers.0.*", "lm_head")
    )
    expected = export_bundle(tiny_llama, tmp_path / "b.edge", ExportOptions(quantization=quantization), lambda *_: None)
    assert open_bundle(out).digest == expected.digest
    assert json.loads(capsys.readouterr().out)["digest"] == expected.digest


def test_defaults_are_those_of_edgekit_export(optimum_cli: OptimumCli, tiny_llama: Path, tmp_path: Path) -> None:
    assert optimum_cli("-m", tiny_llama, tmp_path / "a.edge") == 0
    expected = export_bundle(tiny_llama, tmp_path / "b.edge", ExportOptions(), lambda *_: None)
    assert open_bundle(tmp_path / "a.edge").digest == expected.digest
    assert optimum_cli("-m", tiny_llama, tmp_path / "a.edge", "--force") == 0


def test_errors_and_exit_statuses_are_those_of_edgekit_export(
    optimum_cli: OptimumCli, tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    assert optimum_cli("-m", tiny_llama, tmp_path / "taken") == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: output")
    assert optimum_cli("-m", tiny_llama, tmp_path / "x.edge", "--precision", "int3") == 2
    assert "'int3' is not one of" in capsys.readouterr().err
    assert optimum_cli("-m", tmp_path / "nothing", tmp_path / "x.edge") == 2
    assert "nothing" in capsys.readouterr().err
    assert optimum_cli(tmp_path / "x.edge") == 2
    assert "-m/--model" in capsys.readouterr().err


def test_a_path_that_looks_like_an_option_is_a_path(
    optimum_cli: OptimumCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert optimum_cli("--model=--force", "out.edge") != 0
    assert "--force" in capsys.readouterr().err
    assert not (tmp_path / "out.edge").exists()


def test_help_explains_every_option(optimum_cli: OptimumCli, capsys: pytest.CaptureFixture[str]) -> None:
    assert optimum_cli("--help") == 0
    shown = capsys.readouterr().out
    for parameter in export.params:
        if parameter.param_type_name == "option":
            assert parameter.opts[-1] in shown
    assert "{fp32,fp16,int8,int4}" in shown
    assert "[default: int4]" in shown


def test_the_program_finds_the_command_and_starts_without_the_workbench(tiny_llama: Path, tmp_path: Path) -> None:
    run = "import sys; from optimum.commands.optimum_cli import main; sys.argv[0] = 'optimum-cli'; main()"
    command = [sys.executable, "-c", run, "export", "edgekit", "--model", str(tiny_llama), "out.edge"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "parity: KL divergence" in done.stdout
    assert open_bundle(tmp_path / "out.edge").manifest.producer == f"edgekit {__version__}"

    light = (
        "import sys, edgekit.integrations.optimum_command; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", light], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr
