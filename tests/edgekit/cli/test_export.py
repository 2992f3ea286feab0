from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from edgekit.bundle import open_bundle

Invoke: TypeAlias = Callable[..., Any]
TinyGguf: TypeAlias = Callable[[str, str], Path]


def test_the_summary_says_what_was_made(invoke: Invoke, tiny_llama: Path, tmp_path: Path) -> None:
    output = tmp_path / "llama.edge"
    outcome = invoke("export", tiny_llama, output, "--precision", "int8")
    assert (outcome.status, outcome.stderr) == (0, "")
    made, storage, parity = outcome.stdout.splitlines()
    assert re.fullmatch(rf"{output}: {open_bundle(output).size_bytes / 1e6:.1f} MB in \d+\.\d s", made)
    # Two layers of seven projections, an embedding and a head.
    assert storage == "storage: 14 × int8 affine block 32, 2 × int8 symmetric block 32"
    record = open_bundle(output).manifest.parity.source
    assert parity.startswith(f"parity: KL divergence {record.kl_divergence:.2g} nats (allowed 0.05), top-1 agreement ")
    assert parity.endswith(" nats")
    assert f", largest logit error {record.max_abs_error:.2g} over 48 tokens; graph on its own weights " in parity


def test_json_has_the_same_as_numbers(invoke: Invoke, tiny_llama: Path, tmp_path: Path) -> None:
    output = tmp_path / "llama.edge"
    outcome = invoke("export", tiny_llama, output, "--precision", "fp16", "--json")
    bundle = open_bundle(output)
    assert outcome.stderr == ""
    assert outcome.json.keys() == {"path", "digest", "size_bytes", "storage", "parity", "seconds"}
    assert outcome.json["path"] == str(output)
    assert outcome.json["digest"] == bundle.digest
    assert outcome.json["size_bytes"] == bundle.size_bytes
    assert outcome.json["storage"] == {"fp16": 16}
    assert outcome.json["parity"]["source"]["max_abs_error"] == bundle.manifest.parity.source.max_abs_error
    assert 0 < outcome.json["seconds"] < 60


def test_every_quantization_option_arrives(invoke: Invoke, tiny_llama: Path, tmp_path: Path) -> None:
    options = ("--precision", "int8", "--scheme", "affine", "--block-size", "16", "--keep", "layers.0.*", "--keep")
    invoke("export", tiny_llama, tmp_path / "llama.edge", *options, "layers.1.mlp.*")
    storage = open_bundle(tmp_path / "llama.edge").manifest.storage
    assert storage["layers.0.self_attn.q_proj.weight"] == "fp16"
    assert storage["layers.1.mlp.up_proj.weight"] == "fp16"
    assert storage["layers.1.self_attn.q_proj.weight"] == "int8 affine block 16"


def test_blocks_of_a_gguf_are_rounded_again_only_on_request(
    invoke: Invoke, tiny_gguf: TinyGguf, tmp_path: Path
) -> None:
    command = ("export", tiny_gguf("llama", "Q4_1"), tmp_path / "llama.edge", "--precision", "int8")
    refused = invoke(*command, "--scheme", "symmetric")
    assert (refused.status, refused.stdout) == (3, "")
    assert refused.stderr.endswith("or pass --requantize to accept the loss\n")
    assert invoke(*command, "--scheme", "symmetric", "--requantize").status == 0
    assert set(open_bundle(tmp_path / "llama.edge").manifest.storage.values()) == {"int8 symmetric block 32"}


def test_blocks_of_a_gguf_that_cannot_be_kept_are_announced_on_stderr(
    invoke: Invoke, tiny_gguf: TinyGguf, tmp_path: Path
) -> None:
    outcome = invoke("export", tiny_gguf("llama", "MXFP4"), tmp_path / "llama.edge", "--precision", "int8", "--json")
    assert outcome.stderr == (
        "WARNING edgekit.checkpoint.gguf_tensors: llama.MXFP4.gguf has tensors in MXFP4, whose blocks cannot be kept: "
        "their values are dequantized and rounded anew to the chosen precision\n"
    )
    assert outcome.json["storage"] == {"int8 affine block 32": 14, "int8 symmetric block 32": 2}


@pytest.mark.parametrize("option", [("--block-size", "64"), ("--requantize",)])
def test_an_option_of_blocks_is_refused_where_there_are_none(invoke: Invoke, option: tuple[str, ...]) -> None:
    outcome = invoke("export", "model", "out", "--precision", "fp16", *option)
    assert outcome.status == 2
    name = option[0].removeprefix("--").replace("-", " ")
    assert outcome.stderr == f"error: {name} has no effect with precision fp16; use int4 or int8\n"


def test_a_bundle_is_replaced_only_by_force(invoke: Invoke, tiny_llama: Path, tmp_path: Path) -> None:
    command = ("export", tiny_llama, tmp_path / "llama.edge", "--precision")
    assert invoke(*command, "fp32").status == 0
    refused = invoke(*command, "fp16")
    assert refused.status == 2
    assert refused.stderr.endswith("exists; pass --force to replace it\n")
    assert invoke(*command, "fp16", "--force").status == 0
    assert set(open_bundle(tmp_path / "llama.edge").manifest.storage.values()) == {"fp16"}


@pytest.mark.parametrize("package", ["torch", "safetensors", "gguf", "huggingface_hub"])
def test_without_the_extra_its_name_is_given(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    outcome = invoke("export", "model", tmp_path / "out", "--json")
    assert outcome.status == 3
    message = f"{package} is not installed; run: pip install 'edgekit[export]'"
    assert outcome.json == {"error": {"code": "missing_extra", "message": message}}


def test_a_revision_and_remote_code_are_passed_on(invoke: Invoke, tiny_llama: Path, tmp_path: Path) -> None:
    outcome = invoke("export", tiny_llama, tmp_path / "out", "--revision", "v2")
    assert outcome.stderr.startswith("error: revision 'v2' was given, but ")
    config = (tiny_llama / "config.json").read_text().replace("{", '{"auto_map": {"AutoModel": "x.Y"},', 1)
    (tmp_path / "custom").mkdir()
    for file in tiny_llama.iterdir():
        (tmp_path / "custom" / file.name).symlink_to(file)
    (tmp_path / "custom" / "config.json").unlink()
    (tmp_path / "custom" / "config.json").write_text(config)
    command = ("export", tmp_path / "custom", tmp_path / "out", "--precision", "fp32")
    assert invoke(*command).status == 3
    assert invoke(*command, "--trust-remote-code").status == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_the_middle_of_an_export_leaves_nothing(
    tiny_llama: Path, tmp_path: Path, number: signal.Signals
) -> None:
    code = f"""
import os
from edgekit.cli import main
from edgekit.export.data_file import DataFile

write = DataFile.write
def interrupted(data, directory, progress):
    write(data, directory, progress)
    print(len(os.listdir(directory.parent)), (directory / data.location).stat().st_size > 0, flush=True)
    os.kill(os.getpid(), {int(number)})
    return write(data, directory, progress)

DataFile.write = interrupted
main()
"""
    folder = tmp_path / "outputs"
    folder.mkdir()
    command = [sys.executable, "-c", code, "export", str(tiny_llama), str(folder / "llama.edge")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 128 + number
    assert result.stdout == "1 True\n"
    assert result.stderr.strip() == ""
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("no_color", [True, False])
def test_on_a_terminal_the_weights_pass_by_in_color_unless_no_color_is_set(
    start_on_terminal: Callable[..., Any],
    tiny_llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    no_color: bool,
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setenv("NO_COLOR", "1") if no_color else monkeypatch.delenv("NO_COLOR", raising=False)
    running = start_on_terminal("export", tiny_llama, tmp_path / "llama.edge", "--precision", "fp32")
    seen = running.rest()
    assert running.process.returncode == 0
    assert "━" in seen
    assert "storage: 16 × fp32" in seen
    assert bool(re.search(r"\x1b\[[0-9;]*3[0-9;]*m", seen)) is not no_color
