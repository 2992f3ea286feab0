from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, processors

from edgekit.errors import CorruptArtifactError, UnsupportedError, UsageError
from edgekit.runtime.tokenizer import Tokenizer

Load: TypeAlias = Callable[[Backend], Tokenizer]


def _prepends(*tokens: str, backend: Backend, after: str = "") -> processors.TemplateProcessing:
    special = [(token, backend.token_to_id(token)) for token in {*tokens, *after.split()}]
    return processors.TemplateProcessing(single=f"{' '.join(tokens)} $A {after}".strip(), special_tokens=special)


def test_text_comes_back_from_its_ids(byte_level: Backend, load: Load) -> None:
    tokenizer = load(byte_level)
    text = "Hello, wörld! 你好\n<|im_end|>"
    ids = tokenizer.encode(text, add_special_tokens=True)
    assert ids == byte_level.encode(text).ids
    assert tokenizer.decode(ids) == "Hello, wörld! 你好\n"
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_special_tokens_are_added_only_when_asked_for(byte_fallback: Backend, load: Load) -> None:
    tokenizer = load(byte_fallback)
    bare = tokenizer.encode("the dog", add_special_tokens=False)
    assert tokenizer.encode("the dog", add_special_tokens=True) == [1, *bare]
    assert 1 not in bare


def test_added_and_special_ids_are_told_apart(byte_level: Backend, load: Load) -> None:
    tokenizer = load(byte_level)
    tool, end = tokenizer.token_to_id("<tool>"), tokenizer.token_to_id("</s>")
    assert tokenizer.added_ids - tokenizer.special_ids == {tool}
    assert end in tokenizer.special_ids
    assert end is not None
    assert tokenizer.id_to_token(end) == "</s>"
    assert tokenizer.token_to_id("no such token") is None
    assert tokenizer.id_to_token(tokenizer.vocab_size) is None


def test_the_vocabulary_size_counts_holes(word_piece: Backend, load: Load) -> None:
    content = json.loads(word_piece.to_str())
    content["model"]["vocab"]["far"] = 5000
    tokenizer = load(Backend.from_str(json.dumps(content)))
    assert tokenizer.token_to_id("far") == 5000
    assert tokenizer.vocab_size == 5001


def test_truncation_and_padding_of_the_file_are_ignored(byte_level: Backend, load: Load) -> None:
    byte_level.enable_truncation(4)
    byte_level.enable_padding(length=64)
    tokenizer = load(byte_level)
    text = "the quick brown fox " * 4
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=True)) == text


def test_a_lone_surrogate_is_refused_with_its_place(byte_level: Backend, load: Load) -> None:
    tokenizer = load(byte_level)
    with pytest.raises(UsageError, match=r"lone surrogate, '\\ud83d' at character 2"):
        tokenizer.encode("ab\ud83d", add_special_tokens=False)


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"[]", b"null", b"\xff\xfe", b'{"version": "9.0", "model": 1}'])
def test_a_file_that_is_no_tokenizer_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(CorruptArtifactError, match=r"tokenizer\.json' is not a readable tokenizer: ."):
        Tokenizer(path)


def test_a_truncated_tokenizer_is_refused(byte_level: Backend, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(byte_level.to_str()[:-100], encoding="utf-8")
    with pytest.raises(CorruptArtifactError, match="not a readable tokenizer"):
        Tokenizer(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorruptArtifactError, match="No such file"):
        Tokenizer(tmp_path / "tokenizer.json")


def test_a_decoder_that_cannot_be_streamed_is_refused_by_name(byte_level: Backend, load: Load) -> None:
    byte_level.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    with pytest.raises(UnsupportedError, match=r"decodes by ByteLevel \+ Strip, which cannot be streamed; known: "):
        load(byte_level)


def test_a_byte_level_decoder_in_a_sequence_is_one_all_the_same(byte_level: Backend, load: Load) -> None:
    byte_level.decoder = decoders.Sequence([decoders.Sequence([decoders.ByteLevel()]), decoders.Fuse()])
    tokenizer = load(byte_level)
    (token_id,) = byte_level.encode("é").ids[:1]
    assert tokenizer.token_bytes(token_id) == b"\xc3"


def test_the_bytes_of_byte_level_tokens_make_up_the_text(byte_level: Backend, load: Load) -> None:
    tokenizer = load(byte_level)
    text = "Every byte: " + "".join(map(chr, range(0x250))) + "你😀<tool>"
    data = [tokenizer.token_bytes(token_id) for token_id in tokenizer.encode(text, add_special_tokens=False)]
    assert b"".join(each for each in data if each is not None) == text.encode()
    assert tokenizer.token_bytes(tokenizer.vocab_size) is None


def test_only_byte_tokens_have_bytes_where_bytes_are_the_fallback(byte_fallback: Backend, load: Load) -> None:
    tokenizer = load(byte_fallback)
    by_id = {i: tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)}
    assert {i: data for i, data in by_id.items() if data is not None} == {3 + i: bytes([i]) for i in range(256)}


def test_a_token_spelled_like_a_byte_is_text_without_byte_fallback(word_piece: Backend, load: Load) -> None:
    word_piece.add_tokens(["<0x41>"])
    tokenizer = load(word_piece)
    assert tokenizer.token_bytes(tokenizer.token_to_id("<0x41>") or 0) is None


@pytest.mark.parametrize("text", ["the dog", "<s>the dog", "", "<s>"])
def test_a_prompt_gets_the_beginning_of_text_once(text: str, byte_level: Backend, load: Load) -> None:
    bos = byte_level.token_to_id("<s>")
    bare = byte_level.encode(text.removeprefix("<s>")).ids
    byte_level.post_processor = _prepends("<s>", backend=byte_level)
    tokenizer = load(byte_level)
    assert tokenizer.encode_prompt(text) == [bos, *bare]
    assert tokenizer.encode_prompt(text, bos_token_id=bos) == [bos, *bare]


def test_a_prompt_gets_no_beginning_of_text_that_the_tokenizer_does_not_add(byte_level: Backend, load: Load) -> None:
    tokenizer, bare = load(byte_level), byte_level.encode("the dog").ids
    bos = byte_level.token_to_id("<s>")
    assert tokenizer.encode_prompt("the dog") == bare
    assert tokenizer.encode_prompt("<s>the dog") == [bos, *bare]


@pytest.mark.parametrize("text", ["the dog", "<s>the dog"])
def test_a_beginning_of_text_that_only_the_model_asks_for_is_added_once(
    text: str, byte_level: Backend, load: Load
) -> None:
    bos, bare = byte_level.token_to_id("<s>"), byte_level.encode("the dog").ids
    assert load(byte_level).encode_prompt(text, bos_token_id=bos) == [bos, *bare]


def test_what_the_post_processor_adds_outweighs_what_the_model_asks_for(byte_level: Backend, load: Load) -> None:
    tool, bare = byte_level.token_to_id("<tool>"), byte_level.encode("the dog").ids
    byte_level.post_processor = _prepends("<tool>", "<s>", backend=byte_level)
    bos = byte_level.token_to_id("<s>")
    assert load(byte_level).encode_prompt("the dog", bos_token_id=bos) == [tool, bos, *bare]


def test_an_end_of_text_of_the_post_processor_does_not_end_a_prompt(byte_level: Backend, load: Load) -> None:
    bos, bare = byte_level.token_to_id("<s>"), byte_level.encode("the dog").ids
    byte_level.post_processor = _prepends("<s>", backend=byte_level, after="</s>")
    tokenizer = load(byte_level)
    assert tokenizer.encode("the dog", add_special_tokens=True)[-1] == byte_level.token_to_id("</s>")
    assert tokenizer.encode_prompt("the dog") == [bos, *bare]
