from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers import (
    Tokenizer as Backend,
)

from edgekit.runtime.tokenizer import Tokenizer

Load: TypeAlias = Callable[[Backend], Tokenizer]

CORPUS = (
    "The quick brown fox jumps over the lazy dog. It's 12:30, and the dog doesn't care!",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich, sagte sie.",
    "Le cœur déçu mais l'âme plutôt naïve, Louÿs rêva de crapaüter en canoë.",
    "你好，世界！今天天气很好。東京の天気は晴れです。 Hello world, hello there, hello again.",
    "def add(left, right):\n    return left + right\n\n\nprint(add(1, 2))  # 3",
)
CHAT_TOKENS = ("<|im_start|>", "<|im_end|>", "<|eot_id|>", "<end_of_turn>")


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """A function that stores a tokenizer and loads it as the runtime does."""

    def load_backend(backend: Backend) -> Tokenizer:
        backend.save(str(tmp_path / "tokenizer.json"))
        return Tokenizer(tmp_path / "tokenizer.json")

    return load_backend


@pytest.fixture
def byte_level() -> Backend:
    """GPT-2, Llama 3, Qwen: bytes written as printable characters."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    )
    backend.add_special_tokens(["<s>", "</s>", *CHAT_TOKENS])
    backend.add_tokens([AddedToken("<tool>", normalized=False)])
    return backend


@pytest.fixture
def byte_fallback() -> Backend:
    """Llama 2, Mistral, Phi-3, Gemma: sentencepiece BPE, whose unknown characters fall back to byte tokens."""
    backend = Backend(models.BPE())
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    backend.train_from_iterator(CORPUS[:1], trainers.BpeTrainer(vocab_size=100, show_progress=False))

    def with_bytes(model: dict[str, Any]) -> None:
        tokens = ["<unk>", "<s>", "</s>", *BYTE_TOKENS, *sorted(model["vocab"], key=model["vocab"].__getitem__)]
        model.update(vocab={token: i for i, token in enumerate(tokens)}, byte_fallback=True, unk_token="<unk>")

    backend = _edited(backend, with_bytes)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


@pytest.fixture
def unigram() -> Backend:
    """sentencepiece Unigram with byte fallback, decoded by Metaspace."""
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=120, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    backend.train_from_iterator(CORPUS[:1], trainer)

    def with_bytes(model: dict[str, Any]) -> None:
        model.update(vocab=[*model["vocab"], *([token, -20.0] for token in BYTE_TOKENS)], byte_fallback=True)

    backend = _edited(backend, with_bytes)
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return backend


@pytest.fixture
def word_piece() -> Backend:
    """BERT: continuations are marked, and spaces before punctuation are cleaned up."""
    backend = Backend(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return backend


@pytest.fixture
def word_suffix() -> Backend:
    """GPT-1: the end of a word is marked, so a space appears only with the token after it."""
    backend = Backend(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(
        vocab_size=200, special_tokens=["<unk>"], end_of_word_suffix="</w>", show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


BACKENDS = ("byte_level", "byte_fallback", "unigram", "word_piece", "word_suffix")
BYTE_TOKENS = tuple(f"<0x{value:02X}>" for value in range(256))


@pytest.fixture(params=BACKENDS)
def any_tokenizer(request: pytest.FixtureRequest, load: Load) -> Tokenizer:
    """One tokenizer of each kind."""
    backend: Backend = request.getfixturevalue(request.param)
    return load(backend)


def _edited(backend: Backend, edit: Callable[[dict[str, Any]], None]) -> Backend:
    content = json.loads(backend.to_str())
    edit(content["model"])
    return Backend.from_str(json.dumps(content))
