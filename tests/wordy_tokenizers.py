"""Tokenizers with many words of one token, which those of the other tests are too small for."""

from __future__ import annotations

import itertools
import json

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

WORDS = tuple(
    map("".join, itertools.product(("ba", "ke", "lo", "mi", "nu", "po"), ("dan", "fet", "gip", "ros", "vul")))
)
WORDS += tuple(f"{word}s" for word in WORDS) + tuple(f"{word}er" for word in WORDS)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TEXT = " ".join(("the", *WORDS, *"0123456789().,:?NORWacdefghiklmnopqrstuvw"))


def byte_level_words() -> Tokenizer:
    """Byte-level BPE that knows all of `WORDS`, as GPT-2, Llama 3 and Qwen have it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1000, special_tokens=list(SPECIAL_TOKENS), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([_TEXT] * 3, trainer)
    return tokenizer


def sentencepiece_words() -> Tokenizer:
    """BPE with byte fallback and a beginning of text, as Llama 2 and Mistral have it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    tokenizer.train_from_iterator([_TEXT] * 3, trainers.BpeTrainer(vocab_size=1000, show_progress=False))
    content = json.loads(tokenizer.to_str())
    learned = sorted(content["model"]["vocab"], key=content["model"]["vocab"].__getitem__)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256)), *learned]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    content["model"].update(vocab=vocabulary, byte_fallback=True, unk_token="<unk>")
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer
