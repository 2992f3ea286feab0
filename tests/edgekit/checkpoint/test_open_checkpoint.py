from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from edgekit.checkpoint import open_checkpoint
from edgekit.errors import CorruptArtifactError, UnsupportedError, UsageError

EditCheckpoint: TypeAlias = Callable[..., Path]
TinyGguf: TypeAlias = Callable[[str, str], Path]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty local cache of the hub, which the tests cannot reach: HF_HUB_OFFLINE is set."""
    from huggingface_hub import constants

    assert constants.HF_HUB_OFFLINE
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def _refuse_downloads(*_: Any, **__: Any) -> None:
    raise AssertionError("the hub was asked")


def test_a_path_may_be_a_string_or_a_path(tiny_llama: Path) -> None:
    with open_checkpoint(str(tiny_llama)) as from_string, open_checkpoint(tiny_llama) as from_path:
        assert from_string.spec == from_path.spec
        assert from_string.family.name == "llama"


@pytest.mark.usefixtures("hub_cache")
@pytest.mark.parametrize(
    "path",
    ["./missing", "../missing", "/missing/model", "~/model", "missing.gguf", "owner/model.gguf", "a/b/c", "model/"],
)
def test_a_missing_path_is_not_sent_to_the_hub(path: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", _refuse_downloads)
    with pytest.raises(UsageError, match=rf"no such checkpoint: '{path}'; give a directory, a \.gguf file or"):
        open_checkpoint(path)


@pytest.mark.usefixtures("hub_cache")
def test_a_missing_name_in_a_directory_that_exists_is_not_sent_to_the_hub(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", _refuse_downloads)
    (tmp_path / "models").mkdir()
    with pytest.raises(UsageError, match=r"no such checkpoint: 'models/llama'"):
        open_checkpoint("models/llama")
    with pytest.raises(UsageError, match=r"no such checkpoint: 'llama'"):
        open_checkpoint(Path("llama"))


@pytest.mark.usefixtures("hub_cache")
def test_a_repository_that_cannot_be_reached_is_a_usage_error() -> None:
    with pytest.raises(UsageError) as caught:
        open_checkpoint("nobody/nothing")
    assert str(caught.value).startswith(
        "'nobody/nothing' is neither a local path nor a Hugging Face repository that can be reached: "
    )
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("hub_cache")
def test_an_impossible_repository_id_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match=r"'no body/no thing' is neither a local path nor a Hugging Face repository"):
        open_checkpoint("no body/no thing")


def test_a_downloaded_repository_is_read_from_the_cache(hub_cache: Path, tiny_llama: Path) -> None:
    repository = hub_cache / "models--tiny--llama"
    shutil.copytree(tiny_llama, repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    (repository / "refs" / "v1").write_text(COMMIT)
    for revision in (None, "main", "v1", COMMIT):
        with open_checkpoint("tiny/llama", revision=revision) as checkpoint:
            source = checkpoint.source
        assert (source.kind, source.id, source.revision) == ("hub", "tiny/llama", COMMIT)
        assert "model.safetensors" in source.digests
    with pytest.raises(UsageError, match="'tiny/llama' is neither"):
        open_checkpoint("tiny/llama", revision="v2")


def test_only_the_files_that_are_read_are_downloaded(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.utils._paths import filter_repo_objects

    asked: dict[str, Any] = {}

    def record(repository: str, **options: Any) -> str:
        asked.update(options, repository=repository)
        return str(tiny_llama)

    monkeypatch.setattr("huggingface_hub.snapshot_download", record)
    open_checkpoint("tiny/llama", revision="v1").close()
    wanted = ["config.json", "model-00001-of-00002.safetensors", "tokenizer.json", "chat_template.jinja"]
    others = ["pytorch_model.bin", "README.md", "onnx/model.onnx", "onnx/config.json", "original/model.safetensors"]
    assert (asked.pop("repository"), asked.pop("revision")) == ("tiny/llama", "v1")
    assert list(filter_repo_objects([*wanted, *others], **asked)) == wanted


def test_a_revision_of_a_local_path_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(UsageError, match=r"revision 'main' was given, but .* is a local path; leave it out"):
        open_checkpoint(tiny_llama, revision="main")


def test_a_directory_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is not a checkpoint: it has no config\.json"):
        open_checkpoint(tmp_path)


def test_a_bundle_is_refused_as_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").touch()
    with pytest.raises(UsageError, match=r"is a bundle already, and a bundle is made from a checkpoint; run it with"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("given", "kept", "outside"),
    [(-1, (), [-1]), (320, (), [320]), ([5, 320, -1], (5,), [-1, 320]), (319, (319,), []), ([], (), [])],
)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_an_end_token_outside_the_vocabulary_is_left_out_with_a_warning(
    file: str,
    given: int | list[int],
    kept: tuple[int, ...],
    outside: list[int],
    edit_checkpoint: EditCheckpoint,
    caplog: pytest.LogCaptureFixture,
) -> None:
    ends = {name: given if name == file else None for name in ("config.json", "generation_config.json")}
    directory = edit_checkpoint("llama", config={"eos_token_id": ends["config.json"]})
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ends["generation_config.json"]}))
    with open_checkpoint(directory) as checkpoint:
        assert checkpoint.spec.eos_token_ids == kept
    warning = f"eos_token_id {outside} is not in the vocabulary of 320 and ends no text"
    assert caplog.messages == ([warning] if outside else [])


def test_a_file_of_another_kind_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(UsageError, match=r"model\.safetensors' is neither a directory nor a \.gguf file"):
        open_checkpoint(tiny_llama / "model.safetensors")


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "config.json cannot be read"), ("[]", "config.json holds a list"), ("\xff", "config.json cannot be read")],
)
def test_an_unreadable_config_is_named(edit_checkpoint: EditCheckpoint, text: str, message: str) -> None:
    directory = edit_checkpoint("llama")
    (directory / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CorruptArtifactError, match=message):
        open_checkpoint(directory)


def test_an_unknown_model_is_refused(edit_checkpoint: EditCheckpoint) -> None:
    with pytest.raises(UnsupportedError, match=r"model_type 'bert'; known: .*, llama, "):
        open_checkpoint(edit_checkpoint("llama", config={"model_type": "bert"}))


def test_code_of_a_checkpoint_is_refused_unless_trusted_and_never_run(edit_checkpoint: EditCheckpoint) -> None:
    directory = edit_checkpoint("llama", config={"auto_map": {"AutoConfig": "code.Config"}})
    (directory / "code.py").write_text("raise SystemExit('the code was run')")
    with pytest.raises(
        UnsupportedError, match=r"brings its own model code \(auto_map\), which is never run; pass --trust-remote-code"
    ):
        open_checkpoint(directory)
    with open_checkpoint(directory, trust_remote_code=True) as checkpoint:
        assert checkpoint.family.name == "llama"


def test_trusting_code_does_not_make_a_family_known(edit_checkpoint: EditCheckpoint) -> None:
    config = {"auto_map": {"AutoConfig": "code.Config"}, "model_type": "mystery"}
    with pytest.raises(UnsupportedError, match="model_type 'mystery'; known"):
        open_checkpoint(edit_checkpoint("llama", config=config), trust_remote_code=True)


@pytest.mark.parametrize("kind", ["directory", "gguf"])
def test_opening_needs_neither_torch_nor_transformers(kind: str, tiny_llama: Path, tiny_gguf: TinyGguf) -> None:
    # They take seconds to import.
    path = tiny_llama if kind == "directory" else tiny_gguf("llama", "Q4_0")
    code = (
        "import sys; sys.modules.update(torch=None, transformers=None)\n"
        "from edgekit.checkpoint import open_checkpoint\n"
        "open_checkpoint(sys.argv[1]).tensor('norm.weight')"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, path], capture_output=True, text=True, check=False, env=os.environ
    )
    assert run.returncode == 0, run.stderr
