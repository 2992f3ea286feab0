from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from tokenizers import Tokenizer, processors

from edgekit.checkpoint import open_checkpoint
from edgekit.checkpoint.base import TokenizerFiles
from edgekit.errors import CorruptArtifactError, UnsupportedError

EditCheckpoint: TypeAlias = Callable[..., Path]


@pytest.fixture
def directory(edit_checkpoint: EditCheckpoint) -> Path:
    return edit_checkpoint("llama")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "saved"
    path.mkdir()
    return path


def _save(directory: Path, saved: Path) -> TokenizerFiles:
    with open_checkpoint(directory) as checkpoint:
        return checkpoint.save_tokenizer(saved)


def _change(path: Path, **changes: Any) -> None:
    values = {**json.loads(path.read_text(encoding="utf-8")), **changes}
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not ...}), encoding="utf-8")


def test_tokenizer_json_is_copied_as_it_is(directory: Path, saved: Path) -> None:
    _save(directory, saved)
    assert (saved / "tokenizer.json").read_bytes() == (directory / "tokenizer.json").read_bytes()
    assert [path.name for path in saved.iterdir()] == ["tokenizer.json"]


def test_the_chat_template_is_the_one_that_transformers_finds(directory: Path, saved: Path) -> None:
    from transformers import AutoTokenizer

    template = _save(directory, saved).chat_template
    assert template is not None
    assert template == AutoTokenizer.from_pretrained(directory).chat_template


def test_a_template_in_the_config_is_found_where_there_is_no_file(directory: Path, saved: Path) -> None:
    (directory / "chat_template.jinja").unlink()
    config = directory / "tokenizer_config.json"
    _change(config, chat_template="{{ messages }}")
    assert _save(directory, saved).chat_template == "{{ messages }}"
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    _change(config, chat_template=named)
    assert _save(directory, saved).chat_template == "d"
    _change(config, chat_template=named[:1])
    with pytest.raises(UnsupportedError, match=r"has chat templates \['tool_use'\] and none named 'default'"):
        _save(directory, saved)
    _change(config, chat_template=...)
    assert _save(directory, saved).chat_template is None
    config.unlink()
    assert _save(directory, saved).chat_template is None


def test_generation_defaults_are_those_of_the_generation_config(directory: Path, saved: Path) -> None:
    path = directory / "generation_config.json"
    wanted = json.loads(path.read_text())
    _change(path, transformers_version="5.0.0", _from_model_config=True)
    assert _save(directory, saved).generation == wanted
    path.unlink()
    assert _save(directory, saved).generation == {}


@pytest.mark.parametrize("adds", [True, False])
def test_a_tokenizer_that_contradicts_its_config_about_the_first_token_is_refused(
    directory: Path, saved: Path, adds: bool
) -> None:
    path = directory / "tokenizer.json"
    if adds:
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
        )
        tokenizer.save(str(path))
    _change(directory / "tokenizer_config.json", add_bos_token=adds)
    assert _save(directory, saved).generation
    _change(directory / "tokenizer_config.json", add_bos_token=not adds)
    does = "does" if adds else "does not"
    message = rf"{does} put '<\|endoftext\|>' first, but tokenizer_config\.json has add_bos_token = {not adds}"
    with pytest.raises(UnsupportedError, match=message):
        _save(directory, saved)
    _change(directory / "tokenizer_config.json", bos_token={"content": "<|endoftext|>", "special": True})
    with pytest.raises(UnsupportedError, match=message):
        _save(directory, saved)


def test_a_checkpoint_without_tokenizer_json_is_refused_with_the_remedy(directory: Path, saved: Path) -> None:
    (directory / "tokenizer.json").unlink()
    with pytest.raises(UnsupportedError, match=r"has no tokenizer\.json; write one with AutoTokenizer"):
        _save(directory, saved)
    assert list(saved.iterdir()) == []


@pytest.mark.parametrize("text", ["", "{}", '{"model": 1}', "[1, 2"])
def test_an_unreadable_tokenizer_is_named(directory: Path, saved: Path, text: str) -> None:
    (directory / "tokenizer.json").write_text(text)
    with pytest.raises(CorruptArtifactError, match=r"tokenizer\.json cannot be read"):
        _save(directory, saved)


def test_an_unreadable_tokenizer_config_is_named(directory: Path, saved: Path) -> None:
    (directory / "tokenizer_config.json").write_text("{")
    with pytest.raises(CorruptArtifactError, match=r"tokenizer_config\.json cannot be read"):
        _save(directory, saved)


def test_special_tokens_are_those_of_transformers(directory: Path, saved: Path) -> None:
    from transformers import AutoTokenizer

    config = directory / "tokenizer_config.json"
    _change(config, pad_token={"__type": "AddedToken", "content": "<|im_start|>", "special": True}, unk_token=None)
    oracle = AutoTokenizer.from_pretrained(directory)
    wanted = {"bos_token": oracle.bos_token, "eos_token": oracle.eos_token, "pad_token": oracle.pad_token}
    assert _save(directory, saved).special_tokens == wanted
    assert None not in wanted.values()
    config.unlink()
    assert _save(directory, saved).special_tokens == {}
