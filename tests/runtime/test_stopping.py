from __future__ import annotations

import random

from edgekit.runtime.stopping import StopChecker


def _pieces(draw: random.Random, text: str) -> list[str]:
    cuts = sorted(draw.choices(range(len(text) + 1), k=draw.randrange(6)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def _streamed(pieces: list[str], stop: tuple[str, ...]) -> tuple[str, bool]:
    checker = StopChecker(stop)
    emitted, received = "", ""
    for piece in pieces:
        safe, stopped = checker.feed(piece)
        emitted, received = emitted + safe, received + piece
        if stopped:
            return emitted + checker.flush(), True
        # Nothing is held back but the longest suffix that can still become a stop string.
        suffixes = (received[start:] for start in range(len(received) + 1))
        assert received == emitted + next(each for each in suffixes if not each or _begins_a_stop_string(each, stop))
    return emitted + checker.flush(), False


def _expected(text: str, stop: tuple[str, ...]) -> tuple[str, bool]:
    """Cuts the whole text at the stop string that is complete first, the longest of several."""
    found = [(text.find(each) + len(each), text.find(each)) for each in stop if each in text]
    return (text[: min(found)[1]], True) if found else (text, False)


def _begins_a_stop_string(text: str, stop: tuple[str, ...]) -> bool:
    return any(each.startswith(text) and each != text for each in stop)


def test_streamed_text_is_cut_where_the_whole_text_would_be() -> None:
    draw = random.Random(0)
    for _ in range(5000):
        text = "".join(draw.choices("ab⏎", k=draw.randrange(25)))
        stop = tuple("".join(draw.choices("ab⏎", k=draw.randint(1, 5))) for _ in range(draw.randrange(4)))
        assert _streamed(_pieces(draw, text), stop) == _expected(text, stop)


def test_text_after_a_stop_string_is_swallowed() -> None:
    checker = StopChecker(("</s>",))
    assert checker.feed("one</") == ("one", False)
    assert checker.feed("s>two") == ("", True)
    assert checker.feed("three") == ("", True)
    assert checker.flush() == ""


def test_text_that_only_looked_like_a_stop_string_is_emitted_late() -> None:
    checker = StopChecker(("\n\nUser:",))
    assert checker.feed("Hi\n\nUs") == ("Hi", False)
    assert checker.feed("ually") == ("\n\nUsually", False)


def test_an_unfinished_stop_string_is_emitted_at_the_end_once() -> None:
    checker = StopChecker(("END",))
    assert checker.feed("the EN") == ("the ", False)
    assert checker.flush() == "EN"
    assert checker.flush() == ""


def test_without_stop_strings_everything_passes_at_once() -> None:
    checker = StopChecker(())
    assert checker.feed("text") == ("text", False)
    assert checker.flush() == ""


def test_of_two_stop_strings_complete_at_once_the_longer_is_cut() -> None:
    assert StopChecker(("END", "THE END")).feed("this is THE END") == ("this is ", True)
