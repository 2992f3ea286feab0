"""One object serves one caller at a time: others wait, and nobody waits for ever."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest

from edgekit.errors import UsageError
from edgekit.runtime.llm import LLM
from edgekit.runtime.output import CompletionOutput
from edgekit.runtime.sampling import SamplingParams
from edgekit.runtime.session import Session

PARAMS = SamplingParams(max_tokens=30, temperature=1.0, seed=3, ignore_eos=True)
PROMPT = [5, 6, 7]
# Far longer than a generation takes here, and waited for only where a test is to show that nothing happens.
PATIENCE_S = 0.3


class _Caller(threading.Thread):
    """A thread that generates."""

    def __init__(self, generate: Callable[[], CompletionOutput]) -> None:
        super().__init__(daemon=True)
        self._generate = generate
        self._result: CompletionOutput | None = None
        self.start()

    def run(self) -> None:
        self._result = self._generate()

    def tokens(self) -> tuple[int, ...]:
        """The tokens that it got, after it has ended."""
        self.join(60)
        assert self._result is not None, "it failed, or waits for ever"
        return self._result.token_ids


@pytest.fixture
def expected(tiny_llm: LLM) -> tuple[int, ...]:
    """What the prompt gives, undisturbed."""
    return tiny_llm.generate(PROMPT, PARAMS).token_ids


def test_a_second_generation_of_the_same_thread_is_refused(tiny_llm: LLM, expected: tuple[int, ...]) -> None:
    first = tiny_llm.stream(PROMPT, PARAMS)
    next(first)
    for session in (None, tiny_llm.new_session()):
        with pytest.raises(UsageError, match="this thread has a generation that is not finished; exhaust or close it"):
            tiny_llm.generate([8, 9], PARAMS, session=session)
    *_, last = first
    assert last.output is not None
    assert last.output.token_ids == expected, "the refusal has changed nothing"
    assert tiny_llm.generate(PROMPT, PARAMS).token_ids == expected


def test_another_thread_waits_until_the_first_has_finished(tiny_llm: LLM, expected: tuple[int, ...]) -> None:
    first = tiny_llm.stream(PROMPT, PARAMS)
    next(first)
    other = _Caller(lambda: tiny_llm.generate(PROMPT, PARAMS))
    other.join(PATIENCE_S)
    assert other.is_alive()
    *_, last = first
    assert last.output is not None
    assert last.output.token_ids == expected
    assert other.tokens() == expected


@pytest.mark.parametrize("shared", [True, False])
def test_many_threads_get_what_one_would(shared: bool, tiny_llm: LLM) -> None:
    prompts = [[5 + number, 9, 17] for number in range(8)]
    expected = [tiny_llm.generate(prompt, PARAMS).token_ids for prompt in prompts]

    def caller(prompt: list[int]) -> _Caller:
        session = None if shared else tiny_llm.new_session()
        return _Caller(lambda: tiny_llm.generate(prompt, PARAMS, session=session))

    assert [each.tokens() for each in [caller(prompt) for prompt in prompts]] == expected


@pytest.mark.parametrize("how", ["close", "forget", "break"])
def test_an_abandoned_generation_lets_others_in(how: str, tiny_llm: LLM, expected: tuple[int, ...]) -> None:
    if how == "break":
        for _ in tiny_llm.stream(PROMPT, PARAMS):
            break
    else:
        generation = tiny_llm.stream(PROMPT, PARAMS)
        next(generation)
        if how == "close":
            generation.close()  # type: ignore[attr-defined]
        else:
            del generation
            gc.collect()
    assert tiny_llm.generate(PROMPT, PARAMS).token_ids == expected
    assert _Caller(lambda: tiny_llm.generate(PROMPT, PARAMS)).tokens() == expected


def test_a_generation_that_has_not_begun_keeps_nobody_out(tiny_llm: LLM, expected: tuple[int, ...]) -> None:
    waiting = tiny_llm.stream(PROMPT, PARAMS)
    assert tiny_llm.generate(PROMPT, PARAMS).token_ids == expected
    *_, last = waiting
    assert last.output is not None
    assert last.output.token_ids == expected


def test_who_has_the_whole_output_may_ask_again(tiny_llm: LLM, expected: tuple[int, ...]) -> None:
    generation = tiny_llm.stream(PROMPT, PARAMS)
    while next(generation).output is None:
        pass
    assert tiny_llm.generate(PROMPT, PARAMS).token_ids == expected


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_generation_that_fails_lets_others_in(
    error: type[BaseException], tiny_llm: LLM, expected: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = Session.generate

    def fail(self: Session, *arguments: Any) -> Any:
        for number, token in enumerate(generate(self, *arguments)):
            if number == 3:
                raise error
            yield token

    monkeypatch.setattr(Session, "generate", fail)
    with pytest.raises(error):
        tiny_llm.generate(PROMPT, PARAMS)
    monkeypatch.setattr(Session, "generate", generate)
    assert tiny_llm.generate(PROMPT, PARAMS).token_ids == expected
    assert _Caller(lambda: tiny_llm.generate(PROMPT, PARAMS)).tokens() == expected


def test_a_generation_may_be_finished_by_another_thread(tiny_llm: LLM, expected: tuple[int, ...]) -> None:
    generation = tiny_llm.stream(PROMPT, PARAMS)
    next(generation)

    def finish() -> CompletionOutput:
        *_, last = generation
        assert last.output is not None
        return last.output

    assert _Caller(finish).tokens() == expected
    assert tiny_llm.generate(PROMPT, PARAMS).token_ids == expected


def test_a_thread_that_waits_may_be_preceded_by_a_cancel_of_the_other(tiny_llm: LLM, expected: tuple[int, ...]) -> None:
    session = tiny_llm.new_session()
    first = tiny_llm.stream(PROMPT, PARAMS, session=session)
    next(first)
    other = _Caller(lambda: tiny_llm.generate(PROMPT, PARAMS))
    canceller = threading.Thread(target=session.cancel)
    canceller.start()
    canceller.join()
    *_, last = first
    assert last.output is not None
    assert last.output.finish_reason == "cancelled"
    assert other.tokens() == expected
