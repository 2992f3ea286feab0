"""The tokenizer of a GGUF file, rebuilt from its vocabulary.

Sources: `llm_tokenizer_bpe` and `llm_tokenizer_spm` of llama.cpp (src/llama-vocab.cpp) for how text is split, and the
tokenizer.json files of the models that the pre-tokenizer names stand for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgekit.checkpoint.base import TokenizerFiles
from edgekit.errors import CorruptArtifactError, UnsupportedError, one_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
# Of `llama_token_type`: unknown and control, and user-defined.
_SPECIAL_KINDS, _USER_DEFINED = (2, 3), 4
_SENTENCEPIECE_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_SAMPLING_KEYS: Mapping[str, str] = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}


def _gpt2() -> PreTokenizer:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> PreTokenizer:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split(pattern: str) -> PreTokenizer:
    from tokenizers import Regex, pre_tokenizers

    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_PRE_TOKENIZERS: Mapping[str, Callable[[], PreTokenizer]] = {
    "gpt-2": _gpt2,
    "olmo": _gpt2,  # GPT-NeoX's
    "smollm": _smollm,
    "llama-bpe": lambda: _split(_LLAMA3),
    "qwen2": lambda: _split(_QWEN2),
}
_NORMALIZED = ("olmo", "qwen2")
# Vocabularies with whole words that no sequence of merges reaches.
_WHOLE_WORDS_FIRST = ("llama-bpe",)
# Kinds of vocabulary whose texts start with the first token unless a file says otherwise.
_FIRST_TOKEN_BY_DEFAULT = ("llama", "llama-bpe")
# The names that chat templates use, and the metadata with the ids.
_SPECIAL_TOKENS: Mapping[str, str] = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}


class GgufTokenizer:
    """The tokenizer in a GGUF file's metadata."""

    def __init__(self, path: Path, metadata: Mapping[str, Any]) -> None:
        """Notes where it is; nothing is built yet.

        Args:
            path: The file.
            metadata: Its metadata.
        """
        self.files = (path,)
        self._metadata = metadata

    def save(self, directory: Path) -> TokenizerFiles:
        """Builds the tokenizer and writes tokenizer.json.

        Raises:
            UnsupportedError: The vocabulary is of a kind that is not implemented.
            CorruptArtifactError: The vocabulary is incomplete.
        """
        metadata = self._metadata
        build_tokenizer(metadata, self.files[0]).save(str(directory / "tokenizer.json"))
        generation = {
            name: metadata[f"general.sampling.{key}"]
            for key, name in _SAMPLING_KEYS.items()
            if f"general.sampling.{key}" in metadata
        }
        tokens = metadata["tokenizer.ggml.tokens"]
        special_tokens = {name: tokens[metadata[key]] for name, key in _SPECIAL_TOKENS.items() if key in metadata}
        return TokenizerFiles(
            chat_template=metadata.get("tokenizer.chat_template"), special_tokens=special_tokens, generation=generation
        )


def build_tokenizer(metadata: Mapping[str, Any], path: Path) -> Tokenizer:
    """Builds the tokenizer that a GGUF file describes.

    Args:
        metadata: The file's metadata.
        path: The file, for messages.

    Raises:
        UnsupportedError: The vocabulary is of a kind that is not implemented.
        CorruptArtifactError: The vocabulary is incomplete.
    """
    from tokenizers import AddedToken

    values = {key[15:]: value for key, value in metadata.items() if key.startswith("tokenizer.ggml.")}
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    model = str(values.get("model"))
    if model not in builders:
        raise UnsupportedError(f"{path} has a tokenizer of kind {one_of(model, builders)}")
    try:
        _check_ids(values)
        tokenizer = builders[model](values, path)
        kinds = list(zip(values["tokens"], values.get("token_type", ()), strict=False))
        special = [token for token, kind in kinds if kind in _SPECIAL_KINDS]
        whole = [token for token, kind in kinds if kind == _USER_DEFINED]
        tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
        tokenizer.add_tokens([AddedToken(token, normalized=False) for token in whole])
        _frame(tokenizer, values, default_bos=not {model, values.get("pre")}.isdisjoint(_FIRST_TOKEN_BY_DEFAULT))
    except (KeyError, IndexError, ValueError) as error:
        raise CorruptArtifactError(f"{path} has an incomplete vocabulary: {error!r}") from error
    return tokenizer


def _check_ids(values: Mapping[str, Any]) -> None:
    for key in values:
        if key.endswith("_token_id") and values[key] not in range(len(values["tokens"])):
            raise ValueError(f"{key} is {values[key]!r}")


def _byte_level(values: Mapping[str, Any], path: Path) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    pre = str(values.get("pre"))
    if pre not in _PRE_TOKENIZERS:
        raise UnsupportedError(f"{path} has a pre-tokenizer {one_of(pre, _PRE_TOKENIZERS)}")
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in values["merges"])]
    vocabulary = _vocabulary(values)
    if any(not {left, right, left + right} <= vocabulary.keys() for left, right in merges):
        raise ValueError("merges of unknown tokens")
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre in _WHOLE_WORDS_FIRST))
    if pre in _NORMALIZED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _vocabulary(values: Mapping[str, Any]) -> dict[str, int]:
    vocabulary = {token: index for index, token in enumerate(values["tokens"])}
    if len(vocabulary) != len(values["tokens"]):
        raise ValueError("tokens appear twice")
    return vocabulary


def _sentencepiece(values: Mapping[str, Any], _path: Path) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens, space, unknown = values["tokens"], _SENTENCEPIECE_SPACE, values.get("unknown_token_id")
    model = models.BPE(
        _vocabulary(values),
        _merges(tokens, values["scores"]),
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    replace = normalizers.Replace(" ", space)
    prefixed = values.get("add_space_prefix", True)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(space), replace]) if prefixed else replace
    strip = [decoders.Strip(" ", 1, 0)] if prefixed else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to join two tokens into a third, best score first, in the order of transformers' converter."""
    ids = {token: index for index, token in enumerate(tokens)}
    found: list[tuple[float, str, str]] = []
    for token, score in zip(tokens, scores, strict=True):
        halves = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [(left, right) for left, right in halves if left in ids and right in ids]
        found += [(score, left, right) for left, right in sorted(known, key=lambda pair: (ids[pair[0]], ids[pair[1]]))]
    found.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    return [(left, right) for _, left, right in found]


def _frame(tokenizer: Tokenizer, values: Mapping[str, Any], *, default_bos: bool) -> None:
    """Adds the first and last token where the file asks for them."""
    from tokenizers import processors

    first = [values["bos_token_id"]] if values.get("add_bos_token", default_bos) else []
    last = [values["eos_token_id"]] if values.get("add_eos_token", False) else []
    if not first and not last:
        return
    tokens = values["tokens"]
    opening = [f"{tokens[index]}:0" for index in first]
    closing = [f"{tokens[index]}:0" for index in last]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*opening, "$A:0", *closing],
        pair=[*opening, "$A:0", *closing, *opening, "$B:1", *closing],
        special_tokens=[(tokens[index], index) for index in {*first, *last}],
    )
