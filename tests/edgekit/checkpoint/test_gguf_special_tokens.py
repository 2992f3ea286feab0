"""Vocabularies and special tokens of GGUF files: SentencePiece's, and what files leave out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from edgekit.checkpoint.gguf_tokenizer import GgufTokenizer, build_tokenizer, end_token_ids, special_token_ids
from edgekit.errors import CorruptArtifactError

Metadata: TypeAlias = dict[str, Any]

PATH = Path("planted.gguf")
# Vocabularies that SentencePiece 0.2 was trained to, and how it encodes these texts with them: one that starts texts
# with a space, like Llama's, and one with pieces for runs of spaces and newlines, like Gemma's.
TRUTH: dict[str, Any] = json.loads((Path(__file__).parent / "sentencepiece.json").read_text(encoding="utf-8"))
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5


def _named(values: Metadata, **more: Any) -> Metadata:
    return {**{f"tokenizer.ggml.{key}": value for key, value in values.items()}, **more}


def _vocabulary(name: str, **more: Any) -> Metadata:
    """The metadata that llama.cpp's converter makes of a SentencePiece model."""
    vocabulary = {**TRUTH[name], "model": "llama", "pre": "default", **more}
    del vocabulary["ids"]
    if name == "gemma":
        # The converter spells spaces of user-defined pieces as spaces.
        kinds = zip(vocabulary["tokens"], vocabulary["token_type"], strict=True)
        vocabulary["tokens"] = [token.replace("▁", " ") if kind == USER_DEFINED else token for token, kind in kinds]
        vocabulary["add_space_prefix"] = False
    return vocabulary


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_text_is_encoded_as_sentencepiece_encodes_it(name: str) -> None:
    tokenizer = build_tokenizer(_named(_vocabulary(name)), PATH)
    for text, ids in zip(TRUTH["texts"], TRUTH[name]["ids"], strict=True):
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids
        assert tokenizer.encode(text).ids == [1, *ids]
        assert tokenizer.decode(ids) == text


def test_tokens_that_only_pad_the_embedding_are_no_tokens() -> None:
    values = _vocabulary("llama")
    padded = {
        **values,
        "tokens": [*values["tokens"], "[PAD400]", "[PAD401]"],
        "scores": [*values["scores"], -10000.0, -10000.0],
        "token_type": [*values["token_type"], UNUSED, UNUSED],
    }
    plain, filled = (build_tokenizer(_named(each), PATH) for each in (values, padded))
    assert filled.get_vocab() == plain.get_vocab()
    assert filled.encode("[PAD400]").ids == plain.encode("[PAD400]").ids


def test_sentencepiece_has_ids_of_its_own_where_a_file_has_none() -> None:
    metadata = _named(_vocabulary("llama"))
    assert special_token_ids(metadata) == {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    assert end_token_ids(metadata) == (2,)
    assert build_tokenizer(metadata, PATH).encode("").tokens == ["<s>"]
    moved = {**metadata, "tokenizer.ggml.eos_token_id": 5}
    assert special_token_ids(moved)["eos_token_id"] == 5


@pytest.fixture
def byte_level() -> Metadata:
    tokens = ["a", "b", "ab", "<|endoftext|>", "<end_of_turn>", "<|end|>", "<|im_end|>", "</s>"]
    kinds = [NORMAL, NORMAL, NORMAL, CONTROL, USER_DEFINED, NORMAL, UNUSED, CONTROL]
    return {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": kinds, "merges": ["a b"]}


def test_a_byte_level_vocabulary_may_do_without_special_tokens(byte_level: Metadata, tmp_path: Path) -> None:
    assert special_token_ids(_named(byte_level)) == {}
    files = GgufTokenizer(PATH, _named(byte_level)).save(tmp_path)
    assert (files.chat_template, files.special_tokens) == (None, {})
    assert build_tokenizer(_named(byte_level), PATH).encode("ab").tokens == ["ab"]
    with pytest.raises(CorruptArtifactError, match=r"incomplete vocabulary: KeyError\('bos_token_id'\)"):
        build_tokenizer(_named({**byte_level, "pre": "llama-bpe"}), PATH)


def test_tokens_that_end_a_turn_end_a_generation(byte_level: Metadata) -> None:
    # Whole tokens with the well-known texts; the plain one and the padding are neither.
    assert end_token_ids(_named(byte_level)) == (3, 4)
    ids = {"eos_token_id": 7, "eot_token_id": 1, "eom_token_id": 0}
    assert end_token_ids(_named({**byte_level, **ids})) == (0, 1, 3, 4, 7)
    assert end_token_ids({}) == ()


@pytest.mark.parametrize("ids", [{"eos_token_id": "2"}, {"tokens": 3}, {"token_type": "x"}])
def test_damaged_metadata_is_left_for_the_vocabulary_to_name(byte_level: Metadata, ids: Metadata) -> None:
    metadata = _named({**byte_level, **ids})
    assert isinstance(end_token_ids(metadata), tuple)
    if "token_type" not in ids:
        with pytest.raises(CorruptArtifactError, match="incomplete vocabulary"):
            build_tokenizer(metadata, PATH)


@pytest.mark.parametrize(("pre", "opens"), [("tekken", True), ("llama3", True), ("gpt-4o", False), ("dbrx", False)])
def test_kinds_of_vocabulary_have_a_first_token_and_whole_words_of_their_own(
    pre: str, opens: bool, byte_level: Metadata
) -> None:
    values = {**byte_level, "merges": [], "pre": pre, "bos_token_id": 3}
    tokenizer = build_tokenizer(_named(values), PATH)
    # ab is no merge, but a word that is a token.
    assert tokenizer.encode("ab").tokens == (["<|endoftext|>", "ab"] if opens else ["a", "b"])


def test_special_tokens_of_phi_3_take_the_whitespace_after_them() -> None:
    values = _vocabulary("llama")
    special = ["<|end|>", "<|user|>", "<|endoftext|>"]
    values["tokens"] = [*values["tokens"], *special]
    values["scores"] = [*values["scores"], *[-1000.0] * 3]
    values["token_type"] = [*values["token_type"], CONTROL, USER_DEFINED, CONTROL]
    phi3 = build_tokenizer(_named(values, **{"general.architecture": "phi3"}), PATH)
    llama = build_tokenizer(_named(values, **{"general.architecture": "llama"}), PATH)
    assert phi3.encode("<|user|>\n Hi<|end|>\n").ids == llama.encode("<|user|>Hi<|end|>").ids
    kept = "<|endoftext|>\nHi"
    assert phi3.encode(kept).ids == llama.encode(kept).ids != llama.encode("<|endoftext|>Hi").ids
