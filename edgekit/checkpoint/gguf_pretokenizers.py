r"""How byte-level vocabularies of GGUF files split text before they merge: a row for each `tokenizer.ggml.pre`.

Sources: the pre-tokenizers of llama.cpp (`llm_tokenizer_bpe` and `llama_vocab::impl::load` in src/llama-vocab.cpp), in
the spelling of the tokenizer.json files that they stand for. Where llama.cpp approximates, as it does for classes like
`\p{Lu}`, the tokenizer.json is followed; so it is where it normalizes, which llama.cpp does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT4 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}"
_QWEN2 = _GPT4.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_PUNCTUATION_WITH_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN = rf"{_CASED % ('', '')}|\p{{N}}|{_PUNCTUATION_WITH_SLASHES}|{_REST}"
_GPT4O = rf"{_CASED % (f'{_CONTRACTIONS}?', f'{_CONTRACTIONS}?')}|\p{{N}}{{1,3}}|{_PUNCTUATION_WITH_SLASHES}|{_REST}"


@dataclass(frozen=True, kw_only=True)
class PreTokenizerKind:
    """What the name of a pre-tokenizer stands for.

    Attributes:
        build: Makes it.
        normalizes: Whether text is brought to Unicode's composed form first.
        whole_words_first: Whether a word that is a token is taken whole, for vocabularies with tokens that no
            sequence of merges reaches.
        adds_first_token: Whether texts start with the first token unless a file says otherwise.
    """

    build: Callable[[], PreTokenizer]
    normalizes: bool = False
    whole_words_first: bool = False
    adds_first_token: bool = False


def _gpt2() -> PreTokenizer:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> PreTokenizer:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _by(pattern: str) -> Callable[[], PreTokenizer]:
    def build() -> PreTokenizer:
        from tokenizers import Regex, pre_tokenizers

        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    return build


_GPT2 = PreTokenizerKind(build=_gpt2)
_NEOX = replace(_GPT2, normalizes=True)
_STARCODER = PreTokenizerKind(build=_single_digits)
_CL100K = PreTokenizerKind(build=_by(_GPT4))
_LLAMA3 = replace(_CL100K, whole_words_first=True, adds_first_token=True)
_QWEN = PreTokenizerKind(build=_by(_QWEN2), normalizes=True)

PRE_TOKENIZERS: Mapping[str, PreTokenizerKind] = {
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "olmo": _NEOX,
    "mpt": _NEOX,
    "refact": _STARCODER,  # Granite's
    "smollm": _STARCODER,
    "starcoder": _STARCODER,
    "dbrx": _CL100K,  # OLMo 2's
    "smaug-bpe": _CL100K,  # SmolLM3's
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN,
    "deepseek-r1-qwen": _QWEN,
    "stablelm2": _QWEN,
    "gpt-4o": PreTokenizerKind(build=_by(_GPT4O)),  # Phi-4-mini's
    "tekken": PreTokenizerKind(build=_by(_TEKKEN), whole_words_first=True, adds_first_token=True),  # Mistral Nemo's
}
