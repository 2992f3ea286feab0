r"""Words of the pre-tokenizers, against the patterns that llama.cpp or a tokenizer.json has, in another regex engine.

The patterns are those of `llm_tokenizer_bpe` in llama.cpp's src/llama-vocab.cpp. For `tekken` and `gpt-4o`, where that
approximates Unicode classes, they are the ones it quotes from tokenizer.json; `(?i:…)` is as there.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import regex  # type: ignore[import-untyped]
from tokenizers import Tokenizer, models

from edgekit.checkpoint.gguf_pretokenizers import PRE_TOKENIZERS

GPT2 = (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",)
DIGITS = (r"\p{N}", *GPT2)
ENDING = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
LLAMA3 = (CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + ENDING,)
QWEN2 = (CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + ENDING,)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?"
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + ENDING,
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + ENDING,
)
PATTERNS = {
    "gpt-2": GPT2,
    "phi-2": GPT2,
    "olmo": GPT2,
    "mpt": GPT2,
    "refact": DIGITS,
    "smollm": DIGITS,
    "starcoder": DIGITS,
    "dbrx": LLAMA3,
    "smaug-bpe": LLAMA3,
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2,
    "stablelm2": QWEN2,
    "gpt-4o": GPT4O,
    "tekken": TEKKEN,
}
TEXTS = (
    "Hello world",
    "  two spaces,\ttabs\n\n\nand newlines \n ",
    "It's 12:30 and I'LL pay $1234567.89 for x2y; you'Re n't b'S",
    "Ünïcödé and 你好，世界 and emoji 👍🏽 e\u0301 x\u0303",
    "def f(x):\n    return x**2  # comment\r\n\r\n\tif a/b//c/\n",
    "HELLOWorld camelCase XMLHttpRequest ÉCOLE école Straße ЖЖжж ǅ ʰ",
    "½ ² ٣٤٥ Ⅷ １２３４５ 日本語1234テスト",
    "a\u00a0b\u3000c\u2028d   \n   e ...!!!???;;\n\n;x",
)


def _isolated(pattern: str, text: str) -> Iterator[str]:
    end = 0
    for match in regex.finditer(pattern, text):
        yield from (part for part in (text[end : match.start()], match[0]) if part)
        end = match.end()
    if text[end:]:
        yield text[end:]


def test_every_pre_tokenizer_is_tested() -> None:
    assert PATTERNS.keys() == PRE_TOKENIZERS.keys()


@pytest.mark.parametrize("name", PATTERNS)
def test_words_are_those_of_the_patterns(name: str) -> None:
    kind = PRE_TOKENIZERS[name]
    for text in TEXTS:
        words = [text]
        for pattern in PATTERNS[name]:
            words = [part for word in words for part in _isolated(pattern, word)]
        pieces = kind.build().pre_tokenize_str(text)
        assert [text[start:end] for _, (start, end) in pieces] == words


def test_the_patterns_tell_the_kinds_apart() -> None:
    # So that a pattern under the wrong name fails above.
    kinds = (GPT2, DIGITS, LLAMA3, QWEN2, TEKKEN, GPT4O)
    splits = {tuple(part for text in TEXTS for part in _isolated(patterns[-1], text)) for patterns in kinds}
    assert len(splits) == len(kinds) - 1  # those of GPT-2 and of single digits differ in their first pattern


def test_a_pre_tokenizer_spells_bytes() -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = PRE_TOKENIZERS["tekken"].build()
    assert [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(" é\n")] == ["ĠÃ©", "Ċ"]
