"""A bundle's tokenizer: text to token ids and back."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgekit.errors import CorruptArtifactError, UnsupportedError, UsageError

if TYPE_CHECKING:
    import tokenizers

# Decoders whose text for a token depends on nothing but the token before it and the start of the text.
_LOCAL_DECODERS = ("BPEDecoder", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """Reads `tokenizer.json`, the format of Hugging Face's tokenizers library.

    Truncation and padding stored in the file are switched off: a prompt is encoded whole or refused.

    Attributes:
        added_ids: Tokens matched before the text is split: the special ones and, in some tokenizers, ordinary ones.
        special_ids: Control tokens such as beginning of text or end of turn; `decode` leaves them out by default.
    """

    added_ids: frozenset[int]
    special_ids: frozenset[int]

    def __init__(self, path: Path) -> None:
        """Loads a tokenizer.

        Args:
            path: A `tokenizer.json`.

        Raises:
            CorruptArtifactError: The file is missing or not a tokenizer.
            UnsupportedError: Its decoder cannot be streamed.
        """
        from tokenizers import Tokenizer as Backend

        try:
            self._backend: tokenizers.Tokenizer = Backend.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise CorruptArtifactError(f"{str(path)!r} is not a readable tokenizer: {error}") from error
        self._backend.no_truncation()
        self._backend.no_padding()
        steps = _decoder_steps(self._backend)
        self._is_byte_level = "ByteLevel" in steps
        self._has_byte_tokens = "ByteFallback" in steps
        allowed = ("ByteLevel", "Fuse") if self._is_byte_level else _LOCAL_DECODERS
        if not set(steps) <= set(allowed):
            raise UnsupportedError(
                f"{str(path)!r} decodes by {' + '.join(steps)}, which cannot be streamed; "
                f"known: ByteLevel alone, or any of {', '.join(_LOCAL_DECODERS)}"
            )
        added = self._backend.get_added_tokens_decoder()
        self.added_ids = frozenset(added)
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest token id; a model's embedding may be padded beyond it."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def token_to_id(self, token: str) -> int | None:
        """Returns the id of a token as spelled in the vocabulary, or None."""
        return self._backend.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        """Returns the spelling of a token in the vocabulary, or None."""
        return self._backend.id_to_token(token_id)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Encodes text; special tokens spelled out in it become their ids.

        Args:
            text: Any valid Unicode.
            add_special_tokens: Whether to add what the tokenizer's post-processor adds, such as a beginning of text.

        Returns:
            Token ids.

        Raises:
            UsageError: The text has a lone surrogate, which no encoding can express.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            where = f"{text[error.start]!r} at character {error.start}"
            raise UsageError(f"the text has a lone surrogate, {where}; it must be valid Unicode") from error
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_prompt(self, text: str, *, bos_token_id: int | None = None) -> list[int]:
        """Encodes the start of a sequence with the beginning of text that the model expects, exactly once.

        What the post-processor puts before a text is added unless the text, rendered by a chat template,
        already begins with it. What it puts after a text is left out, for the model is to go on.

        Args:
            text: A prompt, or a rendered chat.
            bos_token_id: Beginning of text for a tokenizer whose post-processor adds none. That a config
                declares one is no reason to pass it: Qwen2.5 does, and was trained without.

        Returns:
            Token ids.

        Raises:
            UsageError: The text has a lone surrogate.
        """
        ids = self.encode(text, add_special_tokens=False)
        prefix = self._prompt_prefix
        if not prefix and bos_token_id is not None:
            prefix = [bos_token_id]
        return ids if ids[: len(prefix)] == prefix else prefix + ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Decodes token ids.

        Args:
            ids: Token ids; those that the tokenizer does not know have no text.
            skip_special_tokens: Whether to leave special tokens out.

        Returns:
            Text; bytes that are not UTF-8 appear as U+FFFD.
        """
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes | None:
        """Returns the bytes of a token that stands for bytes rather than characters, else None.

        All tokens of a byte-level tokenizer do, and the tokens ``<0x00>`` to ``<0xFF>`` of one with byte fallback.
        """
        token = self._backend.id_to_token(token_id)
        if token is None:
            return None
        if self._is_byte_level:
            # A token added outside the byte alphabet stands for its own characters.
            values = [_BYTE_OF_CHARACTER.get(character) for character in token]
            known = [value for value in values if value is not None]
            return bytes(known) if len(known) == len(values) else token.encode("utf-8")
        match = _BYTE_TOKEN.fullmatch(token) if self._has_byte_tokens else None
        return bytes.fromhex(match[1]) if match else None

    @cached_property
    def _prompt_prefix(self) -> list[int]:
        encoding = self._backend.encode("a", add_special_tokens=True)
        marked = zip(encoding.ids, encoding.special_tokens_mask, strict=True)
        return [token_id for token_id, _ in takewhile(lambda pair: pair[1] == 1, marked)]


def _decoder_steps(backend: tokenizers.Tokenizer) -> list[str]:
    """Returns the type names of the decoder's steps, in order."""
    if backend.decoder is None:
        return []
    # Its pickling state is its JSON, which spares parsing the whole file a second time for one field.
    return list(_flatten(json.loads(backend.decoder.__getstate__())))


def _flatten(decoder: dict[str, Any]) -> Iterable[str]:
    if decoder["type"] != "Sequence":
        return [decoder["type"]]
    return [name for step in decoder["decoders"] for name in _flatten(step)]


def _byte_alphabet() -> dict[str, int]:
    """Maps each character of byte-level vocabularies to its byte (`bytes_to_unicode` of GPT-2's encoder.py)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [value for value in range(256) if value not in printable]
    return {chr(value): value for value in printable} | {chr(256 + i): value for i, value in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_alphabet()
