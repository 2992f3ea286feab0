from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from gguf import GGUFWriter, TokenType
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from edgekit.checkpoint import open_checkpoint
from edgekit.checkpoint.gguf_container import read_container
from edgekit.checkpoint.gguf_tokenizer import GgufTokenizer, build_tokenizer
from edgekit.errors import CorruptArtifactError, UnsupportedError

TinyGguf: TypeAlias = Callable[[str, str], Path]
Metadata: TypeAlias = dict[str, Any]

TEXTS = (
    "Hello world",
    "  two spaces,\ttabs\n\n\nand newlines \n ",
    "It's 12:30 and I'LL pay $1234567.89 for x2y",
    "Ünïcödé e\u0301 and 你好，世界 and emoji 👍🏽",
    "<|im_start|>user\nHi<|im_end|>\n",
    "def f(x):\n    return x**2  # comment\r\n",
    "",
)
PATH = Path("planted.gguf")


@pytest.fixture(scope="module")
def byte_level() -> Metadata:
    """A byte-level vocabulary with merges, as metadata without a pre-tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([*TEXTS, "12 123 1234 567 89 hello world I'LL it's user"] * 4, trainer)
    state = json.loads(tokenizer.to_str())["model"]
    tokens = [*sorted(state["vocab"], key=state["vocab"].get), "<|im_start|>", "<|im_end|>", "<tool>"]
    types = [TokenType.NORMAL] * (len(tokens) - 3) + [TokenType.CONTROL] * 2 + [TokenType.USER_DEFINED]
    return {
        "model": "gpt2",
        "tokens": tokens,
        "token_type": [int(kind) for kind in types],
        "merges": [" ".join(merge) for merge in state["merges"]],
        "bos_token_id": len(tokens) - 3,
        "eos_token_id": len(tokens) - 2,
    }


@pytest.fixture(scope="module")
def sentencepiece() -> Metadata:
    """A SentencePiece vocabulary with scores."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False)
    tokenizer.train_from_iterator([*TEXTS, "hello world it's user and the pay for newlines"] * 4, trainer)
    vocabulary = tokenizer.get_vocab()
    # Single characters come last and score least, as SentencePiece writes them.
    pieces = sorted(vocabulary, key=lambda piece: (len(piece) == 1, vocabulary[piece]))
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *fallback, *pieces, "<|im_start|>", "<|im_end|>"]
    types = [2, 3, 3, *[6] * 256, *[1] * len(pieces), 3, 4]
    return {
        "model": "llama",
        "tokens": tokens,
        "token_type": types,
        "scores": [0.0] * 259 + [float(-rank) for rank in range(len(pieces))] + [0.0, 0.0],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }


def _named(values: Metadata) -> Metadata:
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def _transformers(values: Metadata, path: Path) -> Any:
    """The tokenizer that transformers makes of a file with this metadata."""
    from transformers import AutoTokenizer

    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    for key, value in _named(values).items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_uint32(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2"])
def test_text_is_split_as_transformers_splits_it(pre: str, byte_level: Metadata, tmp_path: Path) -> None:
    values = {**byte_level, "pre": pre}
    ours, oracle = build_tokenizer(_named(values), PATH), _transformers(values, tmp_path / "vocabulary.gguf")
    for text in TEXTS:
        # Qwen2's own tokenizer.json normalizes; transformers forgets that for GGUF files.
        given = text.replace("e\u0301", "é") if pre == "qwen2" else text
        assert ours.encode(text, add_special_tokens=False).ids == oracle.encode(given, add_special_tokens=False)


def test_sentencepiece_is_merged_as_transformers_merges_it(sentencepiece: Metadata, tmp_path: Path) -> None:
    ours, oracle = build_tokenizer(_named(sentencepiece), PATH), _transformers(sentencepiece, tmp_path / "v.gguf")
    for text in TEXTS:
        # SentencePiece and llama.cpp prefix every piece of text with a space. transformers leaves it out before
        # another space and after a special token, which is right for some models; a GGUF does not say which.
        if not text.startswith((" ", "<|")):
            assert ours.encode(text).ids == oracle.encode(text)
    assert any(len(token) > 2 for token in ours.encode("hello world").tokens[1:])


def test_a_planted_sentencepiece_vocabulary_merges_the_best_score_first() -> None:
    tokens = ["<unk>", "<s>", "</s>", "<0xC3>", "<0xA9>", "▁", "a", "b", "c", "ab", "bc", "▁a", "abc"]
    scores = [0, 0, 0, 0, 0, -9, -8, -7, -6, -4, -3, -2, -1]
    values = {
        "model": "llama",
        "tokens": tokens,
        "scores": [float(score) for score in scores],
        "token_type": [2, 3, 3, 6, 6] + [1] * 8,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    tokenizer = build_tokenizer(_named(values), PATH)
    # abc would score best, but the pairs that make it only exist after ▁a (−2) has taken the a.
    assert tokenizer.encode("abc").tokens == ["<s>", "▁a", "bc"]
    assert tokenizer.encode("cabc").tokens == ["<s>", "▁", "c", "abc"]
    assert tokenizer.encode("é").tokens == ["<s>", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.encode("x").tokens == ["<s>", "▁", "<unk>"]
    assert tokenizer.encode("  a").tokens == ["<s>", "▁", "▁", "▁a"]
    assert tokenizer.decode(tokenizer.encode("abc é cab").ids) == "abc é cab"
    bare = build_tokenizer(_named({**values, "add_space_prefix": False}), PATH)
    assert bare.encode("abc").tokens == ["<s>", "abc"]
    assert bare.decode(bare.encode(" abc").ids) == " abc"


def test_smollm_keeps_digits_apart(byte_level: Metadata) -> None:
    tokenizer = build_tokenizer(_named({**byte_level, "pre": "smollm"}), PATH)
    words = [tokenizer.decode([token]) for token in tokenizer.encode("a 1234567 ½b2").ids]
    assert [word for word in words if any(character.isdigit() for character in word)] == [*"1234567", "2"]
    joined = build_tokenizer(_named({**byte_level, "pre": "gpt-2"}), PATH)
    assert len(joined.encode("1234567").ids) < 7
    reference = Tokenizer(models.BPE(tokenizer.get_vocab(), _merges(byte_level)))
    reference.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in TEXTS:
        if "<|" not in text:
            assert tokenizer.encode(text).ids == reference.encode(text).ids


def _merges(values: Metadata) -> list[tuple[str, str]]:
    pairs = [merge.split(" ") for merge in values["merges"]]
    return [(left, right) for left, right in pairs]


def test_neox_normalizes_and_splits_like_gpt_2(byte_level: Metadata) -> None:
    neox = build_tokenizer(_named({**byte_level, "pre": "olmo"}), PATH)
    gpt2 = build_tokenizer(_named({**byte_level, "pre": "gpt-2"}), PATH)
    assert neox.encode("e\u0301 it's 12").ids == gpt2.encode("é it's 12").ids != gpt2.encode("e\u0301 it's 12").ids


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "olmo", "llama-bpe", "qwen2"])
def test_text_survives_encoding_and_decoding(pre: str, byte_level: Metadata) -> None:
    tokenizer = build_tokenizer(_named({**byte_level, "pre": pre, "add_bos_token": False}), PATH)
    for text in TEXTS:
        composed = text.replace("e\u0301", "é") if pre in ("olmo", "qwen2") else text
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == composed


def test_llama_3_takes_a_whole_word_before_it_merges(byte_level: Metadata) -> None:
    values = {**byte_level, "tokens": [*byte_level["tokens"], "ĠHow"], "token_type": [*byte_level["token_type"], 1]}
    whole = build_tokenizer(_named({**values, "pre": "llama-bpe", "add_bos_token": False}), PATH)
    merged = build_tokenizer(_named({**values, "pre": "qwen2"}), PATH)
    assert whole.encode(" How").tokens == ["ĠHow"]
    assert len(merged.encode(" How").tokens) > 1


def test_control_tokens_are_special_and_user_defined_ones_are_only_whole(byte_level: Metadata) -> None:
    tokenizer = build_tokenizer(_named({**byte_level, "pre": "gpt-2"}), PATH)
    ids = tokenizer.encode("<|im_start|>x<tool>").ids
    assert ids == [byte_level["bos_token_id"], tokenizer.token_to_id("x"), len(byte_level["tokens"]) - 1]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "x<tool>"
    assert tokenizer.get_vocab_size() == len(byte_level["tokens"])


@pytest.mark.parametrize(
    ("pre", "flags", "first", "last"),
    [
        ("gpt-2", {}, False, False),
        ("gpt-2", {"add_bos_token": True}, True, False),
        ("gpt-2", {"add_eos_token": True}, False, True),
        ("llama-bpe", {}, True, False),
        ("llama-bpe", {"add_bos_token": False}, False, False),
        ("qwen2", {"add_bos_token": True, "add_eos_token": True}, True, True),
    ],
)
def test_first_and_last_tokens_are_added_where_the_file_asks(
    pre: str, flags: dict[str, bool], first: bool, last: bool, byte_level: Metadata
) -> None:
    tokenizer = build_tokenizer(_named({**byte_level, "pre": pre, **flags}), PATH)
    encoded = tokenizer.encode("x")
    opening, closing = ["<|im_start|>"] * first, ["<|im_end|>"] * last
    assert encoded.tokens == [*opening, "x", *closing]
    pair = tokenizer.encode("x", "x")
    assert pair.tokens == [*opening, "x", *closing, *opening, "x", *closing]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, r"planted\.gguf has a tokenizer of kind 'bert'; known: gpt2, llama"),
        ({"model": None}, r"has a tokenizer of kind 'None'; known: gpt2, llama"),
        ({"pre": "chatglm-bpe"}, r"pre-tokenizer 'chatglm-bpe'; known: .*, gpt-2, .*llama-bpe, .*qwen2, "),
        ({"pre": "default"}, r"pre-tokenizer 'default'; known"),
    ],
)
def test_an_unknown_kind_of_vocabulary_is_refused(changes: dict[str, Any], message: str, byte_level: Metadata) -> None:
    with pytest.raises(UnsupportedError, match=message):
        build_tokenizer(_named({**byte_level, "pre": "gpt-2", **changes}), PATH)


@pytest.mark.parametrize(
    ("remove", "changes", "reason"),
    [
        ("tokens", {}, "KeyError.'tokens'"),
        ("merges", {}, "KeyError.'merges'"),
        ("eos_token_id", {"add_eos_token": True}, "KeyError.'eos_token_id'"),
        ("", {"tokens": ["a"] * 500}, "ValueError.'tokens appear twice'"),
        ("", {"merges": ["zz yy"]}, "ValueError.'merges of unknown tokens'"),
        ("", {"bos_token_id": 10_000}, "ValueError.'bos_token_id is 10000'"),
        ("", {"padding_token_id": -1}, "ValueError.'padding_token_id is -1'"),
    ],
)
def test_an_incomplete_vocabulary_is_named(
    remove: str, changes: dict[str, Any], reason: str, byte_level: Metadata
) -> None:
    values = {key: value for key, value in {**byte_level, "pre": "gpt-2", **changes}.items() if key != remove}
    with pytest.raises(CorruptArtifactError, match=rf"planted\.gguf has an incomplete vocabulary: {reason}"):
        build_tokenizer(_named(values), PATH)


def test_a_vocabulary_without_a_score_for_every_token_is_named(sentencepiece: Metadata) -> None:
    values = {**sentencepiece, "scores": sentencepiece["scores"][:-1]}
    with pytest.raises(CorruptArtifactError, match="incomplete vocabulary: ValueError"):
        build_tokenizer(_named(values), PATH)


def test_a_saved_tokenizer_is_the_one_the_file_was_made_from(
    tiny_gguf: TinyGguf, tiny_llama: Path, tmp_path: Path
) -> None:
    with open_checkpoint(tiny_gguf("llama", "Q8_0")) as checkpoint:
        files = checkpoint.save_tokenizer(tmp_path)
        spec = checkpoint.spec
    assert files.chat_template == (tiny_llama / "chat_template.jinja").read_text()
    assert files.special_tokens == {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    assert files.generation == {}
    assert (spec.bos_token_id, spec.eos_token_ids) == (0, (0, 2))
    saved = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    original = Tokenizer.from_file(str(tiny_llama / "tokenizer.json"))
    for text in TEXTS:
        assert saved.encode(text).ids == original.encode(text).ids
        assert saved.decode(saved.encode(text).ids) == original.decode(original.encode(text).ids)
    assert isinstance(saved.decoder, decoders.ByteLevel)


def test_sampling_defaults_of_the_file_are_generation_defaults(tmp_path: Path, tiny_gguf: TinyGguf) -> None:
    metadata = read_container(tiny_gguf("llama", "Q8_0")).metadata
    sampling = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20, "general.sampling.top_p": 0.95}
    tokenizer = GgufTokenizer(tmp_path / "model.gguf", {**metadata, **sampling})
    assert tokenizer.save(tmp_path).generation == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
