"""What a wrong model, file or template gets: one line and the exit status of its kind, never a traceback."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from edgekit.errors import EdgeKitError
from edgekit.runtime import LLM

Invoke: TypeAlias = Callable[..., Any]
Edit: TypeAlias = Callable[..., Path]
MakeBundle: TypeAlias = Callable[..., Path]
TinyGguf: TypeAlias = Callable[[str, str], Path]

USAGE, UNSUPPORTED, CORRUPT = 2, 3, 5


@pytest.fixture
def edit(tmp_path: Path, tiny_llama: Path) -> Edit:
    """Copies a Llama with other values in its config and other files."""

    def make(config: Mapping[str, Any] | None = None, files: Mapping[str, str] | None = None) -> Path:
        directory = Path(shutil.copytree(tiny_llama, tmp_path / "checkpoint"))
        values = json.loads((directory / "config.json").read_text()) | dict(config or {})
        (directory / "config.json").write_text(json.dumps(values))
        for name, text in (files or {}).items():
            (directory / name).write_text(text)
        return directory

    return make


def _message(outcome: Any, status: int) -> str:
    """The one line that a refusal consists of."""
    assert (outcome.status, outcome.stdout) == (status, "")
    (line,) = outcome.stderr.splitlines()
    assert line.startswith("error: ")
    assert "unexpected" not in line
    return str(line)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"num_local_experts": 8}, "llama with num_local_experts = 8 is not supported; supported: None, 0"),
        ({"model_type": "mixtral"}, "'mixtral'"),
        ({"model_type": "qwen3_moe"}, "'qwen3_moe'"),
        ({"model_type": "gemma3", "vision_config": {}, "text_config": {}}, "text-only"),
        ({"model_type": "llava"}, "'llava'"),
        ({"model_type": "bert"}, "model_type 'bert'; known: "),
        ({"model_type": ["llama"]}, "known: "),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config = {'quant_method': 'awq'}"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder = True"),
        ({"auto_map": {"AutoModel": "code.Model"}}, "pass --trust-remote-code"),
    ],
)
def test_a_model_that_is_not_known_is_unsupported_by_name(
    config: dict[str, Any], reason: str, invoke: Invoke, edit: Edit, tmp_path: Path
) -> None:
    assert reason in _message(invoke("export", edit(config), tmp_path / "out.edge"), UNSUPPORTED)
    assert not (tmp_path / "out.edge").exists()


def test_a_shard_that_is_not_there_is_corrupt_by_name(invoke: Invoke, edit: Edit, tmp_path: Path) -> None:
    index = json.dumps({"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}})
    checkpoint = edit(files={"model.safetensors.index.json": index})
    line = _message(invoke("export", checkpoint, tmp_path / "out.edge"), CORRUPT)
    assert "model-00002-of-00002.safetensors is missing; download or copy it again" in line


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (None, struct.pack("<I", 12345), "blk.0.attn_q.weight"),
        (b"llama", b"mamba", "'mamba'; known: "),
        (b"general.architecture", b"general.architecturE", "architecture"),
    ],
    ids=["tensor type", "architecture", "no architecture"],
)
def test_a_gguf_of_an_unknown_kind_is_refused_by_name(
    old: bytes | None, new: bytes, reason: str, invoke: Invoke, tiny_gguf: TinyGguf, tmp_path: Path
) -> None:
    contents = tiny_gguf("llama", "Q4_0").read_bytes()
    if old is None:
        # A name is followed by the number of dimensions, two of them, and the type.
        place = contents.index(b"blk.0.attn_q.weight") + len(b"blk.0.attn_q.weight") + 4 + 2 * 8
        changed = contents[:place] + new + contents[place + 4 :]
    else:
        changed = contents.replace(old, new)
    (tmp_path / "changed.gguf").write_bytes(changed)
    outcome = invoke("export", tmp_path / "changed.gguf", tmp_path / "out.edge")
    assert outcome.status in (UNSUPPORTED, CORRUPT)
    assert reason in _message(outcome, outcome.status)


def test_a_bundle_is_no_checkpoint(invoke: Invoke, bundle: Path, tmp_path: Path) -> None:
    line = _message(invoke("export", bundle, tmp_path / "out.edge"), USAGE)
    assert line.endswith(
        "is a bundle already, and a bundle is made from a checkpoint; run it with: edgekit run BUNDLE PROMPT"
    )


@pytest.mark.parametrize(
    "command", [("run", "Hello"), ("chat",), ("bench",), ("inspect",), ("eval", "--text", __file__)], ids=lambda c: c[0]
)
def test_a_checkpoint_is_no_bundle(
    command: tuple[str, ...], invoke: Invoke, tiny_llama: Path, tiny_gguf: TinyGguf, bundle: Path
) -> None:
    name, *arguments = command
    for wrong, reason in (
        (tiny_llama, "is a checkpoint and not a bundle; make a bundle of it with: edgekit export MODEL OUT"),
        (tiny_gguf("llama", "Q4_0"), "is a checkpoint and not a bundle; make a bundle of it with"),
        ("owner/name", "no such bundle: 'owner/name'; make one with: edgekit export MODEL OUT"),
        (bundle / "model.onnx", f"is a file of a bundle; give the bundle's directory: {str(bundle)!r}"),
    ):
        assert reason in _message(invoke(name, wrong, *arguments), USAGE)
        with pytest.raises(EdgeKitError) as caught:
            LLM(wrong)
        assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("template", "status", "reason"),
    [
        ("{{ raise_exception('only tools') }}", USAGE, "the chat template does not take these messages: only tools"),
        ("{% for i in range(10**9) %}{% endfor %}", UNSUPPORTED, "the chat template computes a power"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", UNSUPPORTED, "the chat template fails: RecursionError"),
        ("{{ 'x' * 10000000000 }}", UNSUPPORTED, "the chat template makes a text of more than 8388608 characters"),
        ("{% if %}", UNSUPPORTED, "the chat template cannot be compiled: TemplateSyntaxError in line 1"),
    ],
)
def test_a_template_that_cannot_be_used_ends_a_chat_and_leaves_the_rest(
    template: str, status: int, reason: str, invoke: Invoke, edit: Edit, make_bundle: MakeBundle
) -> None:
    bundle = make_bundle(edit(files={"chat_template.jinja": template}), "fp32")
    outcome = invoke("chat", bundle, "--prompt", "Hello")
    assert (outcome.status, outcome.stdout) == (status, "")
    assert outcome.stderr.splitlines()[-1].startswith(f"error: {reason}")
    assert "Traceback" not in outcome.stderr
    assert invoke("run", bundle, "Hello", "--max-tokens", 2).status == 0
