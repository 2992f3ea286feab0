"""The tokenizer of a Hugging Face directory: tokenizer.json as it is, its chat template, its generation defaults."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgekit.checkpoint.base import TokenizerFiles
from edgekit.checkpoint.safetensors_files import read_json
from edgekit.errors import CorruptArtifactError, UnsupportedError

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
CHAT_TEMPLATE, GENERATION = "chat_template.jinja", "generation_config.json"
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
# Keys of generation_config.json that say how the file was made.
_BOOKKEEPING = ("_from_model_config", "transformers_version")


class HuggingFaceTokenizer:
    """The tokenizer files of a directory."""

    def __init__(self, directory: Path) -> None:
        """Notes which files there are.

        Args:
            directory: The checkpoint.
        """
        self._directory = directory
        names = (TOKENIZER, TOKENIZER_CONFIG, CHAT_TEMPLATE, GENERATION)
        self.files = tuple(directory / name for name in names if (directory / name).is_file())

    def save(self, directory: Path) -> TokenizerFiles:
        """Copies tokenizer.json.

        Raises:
            UnsupportedError: There is none, or it contradicts tokenizer_config.json about the first token.
            CorruptArtifactError: A file cannot be read.
        """
        from tokenizers import Tokenizer

        path = self._directory / TOKENIZER
        if not path.is_file():
            raise UnsupportedError(
                f"{self._directory} has no {TOKENIZER}; write one with "
                "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
            )
        contents = path.read_bytes()
        try:
            tokenizer = Tokenizer.from_buffer(contents)
        except Exception as error:  # tokenizers raises bare Exception
            raise CorruptArtifactError(f"{path} cannot be read: {error}") from error
        config = self._optional(TOKENIZER_CONFIG)
        _check_first_token(tokenizer.encode("").tokens, config, path)
        (directory / TOKENIZER).write_bytes(contents)
        return TokenizerFiles(
            chat_template=self._chat_template(config),
            special_tokens=_special_tokens(config),
            generation=generation_defaults(self._directory),
        )

    def _chat_template(self, config: Mapping[str, Any]) -> str | None:
        path = self._directory / CHAT_TEMPLATE
        if path.is_file():
            return path.read_text(encoding="utf-8")
        template = config.get("chat_template")
        if isinstance(template, list):
            named = {entry["name"]: entry["template"] for entry in template}
            if "default" not in named:
                raise UnsupportedError(f"{self._directory} has chat templates {sorted(named)} and none named 'default'")
            return str(named["default"])
        return template

    def _optional(self, name: str) -> Mapping[str, Any]:
        path = self._directory / name
        return read_json(path) if path.is_file() else {}


def generation_defaults(directory: Path) -> dict[str, Any]:
    """Returns generation_config.json without its bookkeeping; empty when there is none."""
    path = directory / GENERATION
    values = read_json(path) if path.is_file() else {}
    return {key: value for key, value in values.items() if key not in _BOOKKEEPING}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the texts of the tokens that tokenizer_config.json names; each is a text, or an object with one."""
    tokens = {}
    for name in SPECIAL_TOKENS:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[name] = text
    return tokens


def _check_first_token(first: list[str], config: Mapping[str, Any], path: Path) -> None:
    wanted, bos = config.get("add_bos_token"), _special_tokens(config).get("bos_token")
    if wanted is not None and bos is not None and wanted is not (bos in first):
        does = "does" if bos in first else "does not"
        raise UnsupportedError(
            f"{path} {does} put {bos!r} first, but {TOKENIZER_CONFIG} has add_bos_token = {wanted!r}; make them agree"
        )
