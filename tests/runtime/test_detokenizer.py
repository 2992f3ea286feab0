from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from typing import TypeAlias

import pytest
from tokenizers import Tokenizer as Backend

from edgekit.runtime.detokenizer import StreamingDetokenizer
from edgekit.runtime.tokenizer import Tokenizer

Load: TypeAlias = Callable[[Backend], Tokenizer]

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
ALPHABETS = (
    "abcdefghijklmnopqrstuvwxyz",
    "THEQUICK 0123456789.,:;!?'\"-",
    " \n\t",
    "äöüßéçœñ",
    "你好世界東京天気",
    "안녕하세요",
    "مرحبا שלום",
    "e\u0301o\u0308n\u0303\u0323",  # combining marks
    "👍🏽👩🚀🇩🇪😀",
)
CLUSTERS = ("👩‍👩‍👧‍👦", "🏳️‍🌈", "नमस्ते", "ﷺ", "\N{ZERO WIDTH SPACE}", "𐍈", "𝔘𝔫𝔦")


def _random_text(draw: random.Random) -> str:
    parts = ["".join(draw.choices(draw.choice(ALPHABETS), k=draw.randint(1, 8))) for _ in range(draw.randint(1, 8))]
    parts += draw.sample(CLUSTERS, draw.randint(0, 2))
    draw.shuffle(parts)
    return draw.choice(("", " ")).join(parts)


def _ids(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    ids = [token_id for token in tokens if (token_id := tokenizer.token_to_id(token)) is not None]
    assert len(ids) == len(tokens)
    return ids


def _stream(tokenizer: Tokenizer, ids: Iterable[int]) -> list[str]:
    detokenizer = StreamingDetokenizer(tokenizer)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


def test_the_pieces_of_a_text_add_up_to_its_decoding_and_split_no_character(any_tokenizer: Tokenizer) -> None:
    draw = random.Random(0)
    for _ in range(400):
        ids = any_tokenizer.encode(_random_text(draw), add_special_tokens=True)
        pieces = _stream(any_tokenizer, ids)
        assert "".join(pieces) == any_tokenizer.decode(ids)
        assert not any(REPLACEMENT in piece for piece in pieces)
        assert pieces[-1] == ""


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "unigram"])
def test_a_text_of_any_characters_survives_the_stream(kind: str, request: pytest.FixtureRequest, load: Load) -> None:
    tokenizer = load(request.getfixturevalue(kind))
    # Unigram's pre-tokenizer replaces spaces, so a text with ▁ of its own could not come back.
    text = "".join(chr(code) for code in range(0x21, 0x3000, 7) if chr(code) != "▁") + "".join(CLUSTERS)
    assert "".join(_stream(tokenizer, tokenizer.encode(text, add_special_tokens=False))) == text


def test_each_character_is_emitted_with_the_token_that_completes_it(byte_level: Backend, load: Load) -> None:
    tokenizer = load(byte_level)
    ids = tokenizer.encode("a𐍈b", add_special_tokens=False)
    assert _stream(tokenizer, ids) == ["a", "", "", "", "𐍈", "b", ""]


def test_any_byte_level_tokens_add_up_to_their_decoding(byte_level: Backend, load: Load) -> None:
    tokenizer, draw = load(byte_level), random.Random(1)
    for _ in range(500):
        ids = draw.choices(range(tokenizer.vocab_size), k=30)
        assert "".join(_stream(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", ["byte_fallback", "unigram", "word_piece", "word_suffix"])
def test_any_tokens_that_are_valid_text_add_up_to_their_decoding(
    kind: str, request: pytest.FixtureRequest, load: Load
) -> None:
    tokenizer, draw = load(request.getfixturevalue(kind)), random.Random(2)
    units = [[i] for i in range(tokenizer.vocab_size) if (tokenizer.token_bytes(i) or b"").isascii()]
    if kind in ("byte_fallback", "unigram"):
        for character in "é你😀":
            units += 20 * [_ids(tokenizer, *(f"<0x{byte:02X}>" for byte in character.encode()))]
    for _ in range(500):
        ids = [token_id for unit in draw.choices(units, k=draw.randint(1, 30)) for token_id in unit]
        assert "".join(_stream(tokenizer, ids)) == tokenizer.decode(ids)


def test_tokens_of_a_tokenizer_without_a_decoder_are_joined_by_spaces(word_piece: Backend, load: Load) -> None:
    word_piece.decoder = None
    tokenizer = load(word_piece)
    ids = tokenizer.encode("the dog", add_special_tokens=True)
    assert "".join(_stream(tokenizer, ids)) == tokenizer.decode(ids) == "the dog"


@pytest.mark.parametrize("token", ["▁", "<0x20>"])
@pytest.mark.parametrize("count", [1, 2, 3, 10])
def test_only_the_first_of_many_leading_spaces_is_dropped(
    token: str, count: int, byte_fallback: Backend, load: Load
) -> None:
    tokenizer = load(byte_fallback)
    space, word = _ids(tokenizer, token, "▁the")
    assert "".join(_stream(tokenizer, [*[space] * count, word, space, word])) == " " * count + "the  the"


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "unigram"])
def test_endless_invalid_bytes_do_not_block_the_stream(kind: str, request: pytest.FixtureRequest, load: Load) -> None:
    tokenizer = load(request.getfixturevalue(kind))
    (continuation,) = _ids(tokenizer, "Ģ" if kind == "byte_level" else "<0x80>")
    assert tokenizer.token_bytes(continuation) == b"\x80"
    assert _stream(tokenizer, [continuation] * 50) == [REPLACEMENT] * 50 + [""]


def test_a_character_broken_off_by_text_is_replaced_before_it(byte_fallback: Backend, load: Load) -> None:
    tokenizer = load(byte_fallback)
    ids = _ids(tokenizer, "▁the", "<0xE4>", "<0xBD>", "▁the", "<0xF0>", "<0x9F>")
    assert _stream(tokenizer, ids) == ["the", "", "", f"{REPLACEMENT} the", "", "", REPLACEMENT]


def test_a_character_unfinished_at_the_end_is_replaced_once(byte_level: Backend, load: Load) -> None:
    tokenizer = load(byte_level)
    ids = tokenizer.encode("𐍈", add_special_tokens=False)[:-1]
    detokenizer = StreamingDetokenizer(tokenizer)
    assert [detokenizer.push(token_id) for token_id in ids] == ["", "", ""]
    assert detokenizer.flush() == REPLACEMENT
    assert detokenizer.flush() == ""


def test_special_tokens_have_no_text_and_break_no_character(byte_level: Backend, load: Load) -> None:
    tokenizer = load(byte_level)
    special, ordinary = _ids(tokenizer, "<|im_end|>", "<tool>")
    ids = tokenizer.encode("𐍈", add_special_tokens=False)
    mixed = [special, *ids[:2], special, *ids[2:], ordinary, special]
    assert "".join(_stream(tokenizer, mixed)) == tokenizer.decode(mixed) == "𐍈<tool>"


def test_an_unknown_id_has_no_text_and_starts_no_text_anew(any_tokenizer: Tokenizer) -> None:
    unknown = any_tokenizer.vocab_size + 1000
    assert _stream(any_tokenizer, [unknown, unknown]) == ["", "", ""]
    ids = any_tokenizer.encode("the dog and the fox, 你好", add_special_tokens=False)
    mixed = [each for token_id in ids for each in (unknown, token_id, unknown)]
    assert "".join(_stream(any_tokenizer, mixed)) == any_tokenizer.decode(mixed) == any_tokenizer.decode(ids)


def test_an_empty_token_starts_no_text_anew(byte_fallback: Backend, load: Load) -> None:
    content = json.loads(byte_fallback.to_str())
    content["model"]["vocab"][""] = len(content["model"]["vocab"])
    tokenizer = load(Backend.from_str(json.dumps(content)))
    ids = _ids(tokenizer, "", "▁the", "", "▁the", "", "", "▁the")
    assert _stream(tokenizer, ids) == ["", "the", "", " the", "", "", " the", ""]


def test_the_work_per_token_does_not_grow_with_the_text(
    any_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = []
    decode = any_tokenizer.decode

    def measured(ids: Iterable[int]) -> str:
        lengths.append(len(list(ids)))
        return decode(ids)

    space = any_tokenizer.token_to_id("▁") or 0
    ids = any_tokenizer.encode("The quick brown fox. 你好 " * 50, add_special_tokens=False)
    monkeypatch.setattr(any_tokenizer, "decode", measured)
    _stream(any_tokenizer, [space] * 100 + ids)
    assert max(lengths) <= 3
    assert len(lengths) <= 3 * (100 + len(ids))
