"""Conversations against Hugging Face's `generate`, and what is left of one that was interrupted."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import msgspec
import numpy as np
import pytest

from edgekit.errors import DoesNotFitError, UsageError
from edgekit.runtime import cache, sampling, session, step
from edgekit.runtime.backends import onnxruntime_cpu
from edgekit.runtime.sampling import SamplingParams
from edgekit.runtime.session import Session
from edgekit.runtime.strategies import autoregressive, base
from edgekit.runtime.strategies.autoregressive import Autoregressive
from tests.runtime.interruption import Interruption

VOCABULARY = 320
CONTEXT = 256
RUNTIME = (cache, sampling, session, step, onnxruntime_cpu, autoregressive, base)


def _session(backend: Any, **changes: Any) -> Session:
    spec = getattr(backend, "backend", backend).spec
    return Session(msgspec.structs.replace(spec, **changes), backend, Autoregressive())


def _prompt(length: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng((seed, length)).integers(3, VOCABULARY, length)]


def _take(session: Session, prompt: list[int], count: int, params: SamplingParams | None = None) -> list[int]:
    generation = session.generate(prompt, params or SamplingParams(), VOCABULARY)
    return [token.token_id for token in itertools.islice(generation, count)]


# A single token; within a bucket; across the growth from 128 slots to 256; up to the last position.
@pytest.mark.parametrize(("length", "count"), [(1, 40), (7, 60), (126, 8), (127, 8), (128, 8), (129, 8), (250, 7)])
@pytest.mark.parametrize("variant", ["llama", "qwen3", "gpt_neox"])
def test_greedy_tokens_are_those_of_hugging_face(
    variant: str, length: int, count: int, tiny_backend: Any, greedy: Any
) -> None:
    prompt = _prompt(length)
    assert _take(_session(tiny_backend(variant)), prompt, count) == greedy(variant, prompt, count)


@pytest.mark.parametrize("length", [15, 16, 17, 32, 33])
def test_chunks_of_a_prompt_add_up(
    length: int, tiny_backend: Any, greedy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "PREFILL_CHUNK_TOKENS", 16)
    monkeypatch.setattr(cache, "BUCKET_TOKENS", 16)
    prompt = _prompt(length)
    assert _take(_session(tiny_backend("llama")), prompt, 20) == greedy("llama", prompt, 20)


def test_a_prompt_of_several_chunks_and_buckets_is_read_right(watched: Any, greedy: Any) -> None:
    prompt = _prompt(600)
    conversation = _session(watched, max_positions=1024)
    assert _take(conversation, prompt, 5) == greedy("llama", prompt, 5)
    assert [len(each.token_ids) for each in watched.steps] == [128, 128, 128, 128, 88, 1, 1, 1, 1]


@pytest.mark.parametrize("length", [CONTEXT - 3, CONTEXT])
def test_generation_ends_where_the_context_does(length: int, tiny_backend: Any, greedy: Any) -> None:
    # The last token that is drawn needs no position of its own.
    prompt, count = _prompt(length), CONTEXT - length + 1
    conversation = _session(tiny_backend("llama"))
    assert _take(conversation, prompt, 1000) == greedy("llama", prompt, count)
    assert len(conversation.token_ids) == CONTEXT


@pytest.mark.parametrize("shared", [0, 1, 9, 19, 20])
def test_only_what_differs_from_the_last_conversation_is_computed(shared: int, watched: Any, greedy: Any) -> None:
    first = _prompt(20)
    second = first[:shared] + _prompt(30, seed=1)[shared:]
    conversation = _session(watched)
    _take(conversation, first, 1)
    watched.steps.clear()
    assert conversation.shared_prefix(second) == shared
    assert _take(conversation, second, 10) == greedy("llama", second, 10)
    assert watched.steps[0].token_ids.tolist() == second[shared:]
    assert [len(each.token_ids) for each in watched.steps[1:]] == [1] * 9


def test_an_answer_that_is_part_of_the_next_prompt_is_not_computed_again(watched: Any, greedy: Any) -> None:
    conversation, prompt = _session(watched), _prompt(20)
    answer = _take(conversation, prompt, 10)
    assert list(conversation.token_ids) == prompt + answer[:-1], "the last token has not been read yet"
    watched.steps.clear()
    following = prompt + answer + _prompt(5, seed=1)
    assert _take(conversation, following, 10) == greedy("llama", following, 10)
    assert watched.steps[0].token_ids.tolist() == following[29:]


@pytest.mark.parametrize("kept", [10, 20])
def test_the_last_token_of_a_known_prompt_is_computed_again(kept: int, watched: Any, greedy: Any) -> None:
    conversation, prompt = _session(watched), _prompt(20)
    _take(conversation, prompt, 5)
    watched.steps.clear()
    assert _take(conversation, prompt[:kept], 5) == greedy("llama", prompt[:kept], 5)
    assert watched.steps[0].token_ids.tolist() == prompt[kept - 1 : kept]


def test_a_reset_forgets_everything(watched: Any) -> None:
    conversation, prompt = _session(watched), _prompt(20)
    before = _take(conversation, prompt, 5)
    conversation.reset()
    assert conversation.token_ids == ()
    watched.steps.clear()
    assert _take(conversation, prompt, 5) == before
    assert len(watched.steps[0].token_ids) == 20


def test_conversations_do_not_disturb_each_other(tiny_backend: Any, greedy: Any) -> None:
    backend = tiny_backend("llama")
    prompts = [_prompt(20), _prompt(125, seed=1)]
    generations = [_session(backend).generate(prompt, SamplingParams(), VOCABULARY) for prompt in prompts]
    turns = list(zip(*generations, strict=False))[:8]
    for prompt, tokens in zip(prompts, zip(*turns, strict=True), strict=True):
        assert [token.token_id for token in tokens] == greedy("llama", prompt, 8)


def test_sampled_tokens_do_not_depend_on_what_was_cached(tiny_backend: Any) -> None:
    backend, prompt = tiny_backend("llama"), _prompt(20)
    params = SamplingParams(temperature=1.0, seed=5)
    conversation = _session(backend)
    _take(conversation, prompt[:10], 5)
    sampled = _take(conversation, prompt, 30, params)
    assert sampled == _take(_session(backend), prompt, 30, params)
    assert sampled != _take(_session(backend), prompt, 30)


def test_cancel_ends_a_generation_after_the_token(watched: Any, greedy: Any) -> None:
    conversation, prompt = _session(watched), _prompt(20)
    got = []
    for token in conversation.generate(prompt, SamplingParams(), VOCABULARY):
        got.append(token.token_id)
        if len(got) == 3:
            conversation.cancel()
    assert got == greedy("llama", prompt, 3)
    assert conversation.cancelled
    assert len(watched.steps) == 3
    assert _take(conversation, prompt, 6) == greedy("llama", prompt, 6)
    assert not conversation.cancelled


def test_another_thread_cancels_a_step_that_runs(watched: Any, greedy: Any) -> None:
    conversation, prompt = _session(watched), _prompt(20)

    def cancel_in_the_third_step() -> None:
        if len(watched.steps) == 2:
            canceller = threading.Thread(target=conversation.cancel)
            canceller.start()
            canceller.join()

    watched.before = cancel_in_the_third_step
    assert _take(conversation, prompt, 50) == greedy("llama", prompt, 3)
    assert conversation.cancelled


def test_cancel_ends_the_reading_of_a_prompt_after_the_chunk(
    watched: Any, greedy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "PREFILL_CHUNK_TOKENS", 8)
    conversation, prompt = _session(watched), _prompt(40)
    watched.after = lambda: conversation.cancel() if len(watched.steps) == 2 else None
    assert _take(conversation, prompt, 50) == []
    assert conversation.cancelled
    assert list(conversation.token_ids) == prompt[:16]
    watched.steps.clear()
    watched.after = lambda: None
    assert _take(conversation, prompt, 5) == greedy("llama", prompt, 5)
    assert watched.steps[0].token_ids.tolist() == prompt[16:24]


@pytest.mark.parametrize("taken", [1, 2, 5])
def test_a_consumer_may_leave_after_any_token(taken: int, watched: Any, greedy: Any) -> None:
    conversation, prompt = _session(watched), _prompt(20)
    generation = conversation.generate(prompt, SamplingParams(), VOCABULARY)
    got = [next(generation).token_id for _ in range(taken)]
    generation.close()  # type: ignore[attr-defined]
    following = [*prompt, *got, *_prompt(3, seed=1)]
    watched.steps.clear()
    assert _take(conversation, following, 10) == greedy("llama", following, 10)
    assert watched.steps[0].token_ids.tolist() == following[20 + taken - 1 :]


class _FaultError(Exception):
    pass


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_step_that_fails_leaves_a_conversation_that_goes_on(
    moment: str, number: int, watched: Any, greedy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "PREFILL_CHUNK_TOKENS", 8)
    conversation, prompt = _session(watched), _prompt(20)

    def fail() -> None:
        if len(watched.steps) == number + (moment == "after"):
            raise _FaultError

    setattr(watched, moment, fail)
    with pytest.raises(_FaultError):
        _take(conversation, prompt, 50)
    setattr(watched, moment, lambda: None)
    watched.steps.clear()
    assert _take(conversation, prompt, 10) == greedy("llama", prompt, 10)
    assert watched.steps[0].token_ids.tolist() == (prompt[8 * number :][:8] or prompt[19:]), "what was read is kept"


@pytest.mark.parametrize("number", range(6))
def test_rows_that_cannot_be_kept_leave_a_conversation_that_goes_on(
    number: int, watched: Any, greedy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "PREFILL_CHUNK_TOKENS", 8)
    conversation, prompt, append = _session(watched), _prompt(20), cache.KVCache.append

    def fail_half_way(self: cache.KVCache, new: Any, rows: Any) -> None:
        length = self.length
        append(self, new, rows)
        if len(watched.steps) == number + 1:
            assert self.length > length
            self._length = length  # the rows are in the arrays and the maps, and do not count
            raise _FaultError

    monkeypatch.setattr(cache.KVCache, "append", fail_half_way)
    with pytest.raises(_FaultError):
        _take(conversation, prompt, 50)
    monkeypatch.setattr(cache.KVCache, "append", append)
    assert _take(conversation, prompt, 10) == greedy("llama", prompt, 10)


def test_an_interruption_before_any_line_leaves_a_conversation_that_goes_on(
    tiny_backend: Any, greedy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Small enough for a generation of a few tokens to read chunks, grow the cache and change its arrays.
    monkeypatch.setattr(session, "PREFILL_CHUNK_TOKENS", 8)
    monkeypatch.setattr(cache, "BUCKET_TOKENS", 8)
    backend, first, second = tiny_backend("llama"), _prompt(7), _prompt(16, seed=1)
    second[:3] = first[:3]
    expected = {length: greedy("llama", prompt, 4) for length, prompt in ((7, first), (16, second))}
    at, interrupted = 1, True
    while interrupted:
        conversation = _session(backend)
        assert _take(conversation, first, 2) == expected[7][:2]
        interrupted = Interruption(at, RUNTIME).run(lambda: _take(conversation, second, 3))  # noqa: B023
        prompt = second if at % 2 else first
        assert _take(conversation, prompt, 4) == expected[len(prompt)], f"after an interruption before line {at}"
        at += 1
    assert at > 200


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ([], UsageError, "the prompt is empty"),
        ([5, -1], UsageError, "token id -1 is not in the model's vocabulary of 320"),
        ([320], UsageError, "token id 320 is not in the model's vocabulary of 320"),
        ([5, None], UsageError, "token id None is not"),
        ([1.0], UsageError, "token id 1.0 is not"),
        (["a"], UsageError, "token id 'a' is not"),
        ([5] * 257, DoesNotFitError, "the prompt has 257 tokens, the model's context 256"),
    ],
)
def test_a_prompt_that_cannot_be_continued_is_refused_and_changes_nothing(
    prompt: Any, error: type[Exception], message: str, watched: Any
) -> None:
    conversation = _session(watched)
    _take(conversation, [5, 6, 7], 1)
    with pytest.raises(error, match=message):
        _take(conversation, prompt, 1)
    assert conversation.token_ids == (5, 6, 7)
    assert len(watched.steps) == 1


def test_numpy_integers_are_token_ids(tiny_backend: Any) -> None:
    prompt = np.array(_prompt(20))
    assert _take(_session(tiny_backend("llama")), list(prompt), 5) == _take(
        _session(tiny_backend("llama")), prompt.tolist(), 5
    )
