"""The tokenizer of a GGUF file, rebuilt from its vocabulary.

Sources: `llama_vocab::impl::load`, `llm_tokenizer_bpe` and `llm_tokenizer_spm` of llama.cpp (src/llama-vocab.cpp), and
the tokenizer.json files of the models that the pre-tokenizer names stand for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgekit.checkpoint.base import TokenizerFiles
from edgekit.checkpoint.gguf_pretokenizers import PRE_TOKENIZERS
from edgekit.errors import CorruptArtifactError, UnsupportedError, one_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Of `llama_token_type`.
_SPECIAL_KINDS, _USER_DEFINED, _UNUSED = (2, 3), 4, 5
_SENTENCEPIECE_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_SAMPLING_KEYS: Mapping[str, str] = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
# The names that chat templates use, and the metadata with the ids.
_SPECIAL_TOKENS: Mapping[str, str] = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
# The ids of a SentencePiece vocabulary that a file need not repeat.
_DEFAULT_IDS: Mapping[str, Mapping[str, int]] = {
    "llama": {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
# llama.cpp ends a generation at any of them, and at tokens with these texts: files of chat models often name only the
# token that ends a document.
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_END_TEXTS = frozenset(
    {
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<end_of_turn>",
    }
)
# Special tokens of Phi-3 take the whitespace after them, but for these.
_PHI3_KEEPS_SPACE_AFTER = ("<unk>", "<s>", "<|endoftext|>")


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
        tokens, ids = metadata["tokenizer.ggml.tokens"], special_token_ids(metadata)
        special_tokens = {name: tokens[ids[key]] for name, key in _SPECIAL_TOKENS.items() if key in ids}
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

    values = _values(metadata)
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
        strips = _strips_space_after(metadata)
        tokenizer.add_special_tokens(
            [AddedToken(token, normalized=False, special=True, rstrip=strips(token)) for token in special]
        )
        tokenizer.add_tokens([AddedToken(token, normalized=False, rstrip=strips(token)) for token in whole])
        _frame(tokenizer, values)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise CorruptArtifactError(f"{path} has an incomplete vocabulary: {error!r}") from error
    return tokenizer


def special_token_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    """Returns the ids of special tokens by GGUF's names, such as ``bos_token_id``."""
    values = _values(metadata)
    return {key: value for key, value in values.items() if key.endswith("_token_id") and isinstance(value, int)}


def end_token_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the tokens that end a generation, sorted."""
    ids, values = special_token_ids(metadata), _values(metadata)
    named = {ids[key] for key in _END_KEYS if key in ids}
    # A plain token may be spelled like one of them, and Gemma's <end_of_turn> is not always a control token.
    whole = (*_SPECIAL_KINDS, _USER_DEFINED)
    kinds = zip(_list(values, "tokens"), _list(values, "token_type"), strict=False)
    known = {index for index, (token, kind) in enumerate(kinds) if token in _END_TEXTS and kind in whole}
    return tuple(sorted(named | known))


def _values(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of the tokenizer, with the ids that follow from its kind and without tokens that only pad."""
    values = {key[15:]: value for key, value in metadata.items() if key.startswith("tokenizer.ggml.")}
    tokens, kinds = _list(values, "tokens"), _list(values, "token_type")
    count = len(tokens)
    if len(kinds) == count:
        # Converters fill the vocabulary up to the rows of the embedding; no text has these tokens.
        count = max((index + 1 for index, kind in enumerate(kinds) if kind != _UNUSED), default=0)
        values |= {key: values[key][:count] for key in ("tokens", "token_type", "scores") if key in values}
    defaults = _DEFAULT_IDS.get(str(values.get("model")), {})
    return {**{key: index for key, index in defaults.items() if index < count}, **values}


def _list(values: Mapping[str, Any], key: str) -> list[Any]:
    value = values.get(key)
    return value if isinstance(value, list) else []


def _strips_space_after(metadata: Mapping[str, Any]) -> Callable[[str], bool]:
    """Returns whether a special token takes the whitespace after it, which files do not say."""
    is_phi3 = metadata.get("general.architecture") == "phi3" and metadata.get("tokenizer.ggml.model") == "llama"
    return lambda token: is_phi3 and token not in _PHI3_KEEPS_SPACE_AFTER


def _check_ids(values: Mapping[str, Any]) -> None:
    for key in values:
        if key.endswith("_token_id") and values[key] not in range(len(values["tokens"])):
            raise ValueError(f"{key} is {values[key]!r}")


def _byte_level(values: Mapping[str, Any], path: Path) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    pre = str(values.get("pre"))
    if pre not in PRE_TOKENIZERS:
        raise UnsupportedError(f"{path} has a pre-tokenizer {one_of(pre, PRE_TOKENIZERS)}")
    kind = PRE_TOKENIZERS[pre]
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in values["merges"])]
    vocabulary = _vocabulary(values)
    if any(not {left, right, left + right} <= vocabulary.keys() for left, right in merges):
        raise ValueError("merges of unknown tokens")
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=kind.whole_words_first))
    if kind.normalizes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = kind.build()
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


def _frame(tokenizer: Tokenizer, values: Mapping[str, Any]) -> None:
    """Adds the first and last token where the file asks for them, or its kind of vocabulary has them by default."""
    from tokenizers import processors

    kind = PRE_TOKENIZERS.get(str(values.get("pre")))
    default_bos = values["model"] == "llama" or (kind is not None and kind.adds_first_token)
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
