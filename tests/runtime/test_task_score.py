"""Shared prefill against conversations that know nothing of it: the same tokens, whatever the budgets."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edgekit.errors import DoesNotFitError, UsageError
from edgekit.runtime import task_score
from edgekit.runtime.llm import LLM
from edgekit.runtime.loading import KVCacheOptions
from edgekit.runtime.policies import PolicyOptions
from edgekit.runtime.sampling import SamplingParams
from edgekit.runtime.task_score import LAYER_BUDGET_POLICIES, TaskScore, prompt_ids
from edgekit.runtime.tasks import Task
from tests.runtime.policies.reference import prompt_of

CANDIDATES = ((40, 60), (60, 40), (33, 90), (200, 33), (50, 50))


@pytest.fixture(scope="module")
def load(scoring_bundle: Any) -> Any:
    made: dict[Any, LLM] = {}

    def make(variant: str = "llama", dtype: Any = "fp32", policy: str = "snapkv") -> LLM:
        if (variant, dtype, policy) not in made:
            options = KVCacheOptions(dtype=dtype, policy=policy, budget_tokens=50, per_layer=True)
            made[variant, dtype, policy] = LLM(scoring_bundle(variant).path, threads=1, kv_cache=options)
        return made[variant, dtype, policy]

    return make


def _session_tokens(llm: LLM, policy: str, budgets: tuple[int, ...], prompt: list[int], count: int) -> list[int]:
    session = llm.new_session(PolicyOptions(name=policy, layer_budgets_tokens=budgets))
    drawn = session.generate(prompt, SamplingParams(), llm.vocab_size)
    return [token.token_id for token in itertools.islice(drawn, count)]


class Watch:
    """Stands in for the judge of tasks: notes what is drawn, up to so many tokens."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.drawn: list[list[int]] = []

    def __call__(self, _llm: LLM, _task: Task, drawn: Iterator[int]) -> bool:
        self.drawn.append(list(itertools.islice(drawn, self.count)))
        return True


@pytest.mark.parametrize("policy", LAYER_BUDGET_POLICIES)
@pytest.mark.parametrize(("variant", "dtype"), [("llama", "fp32"), ("llama", "int8"), ("llama", "fp16")])
def test_held_prompts_are_continued_as_by_sessions_with_the_same_budgets(
    load: Any, policy: str, variant: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, prompts = load(variant, dtype, policy), [prompt_of(length) for length in (150, 97, 45, 20)]
    score = TaskScore(llm, [Task(prompt=tuple(prompt), answer=(0,)) for prompt in prompts], policy)
    assert score.held_prompts == 4
    watch = Watch(12)
    monkeypatch.setattr(task_score, "judge", watch)
    seen = set()
    for budgets in CANDIDATES:
        watch.drawn.clear()
        assert score(budgets) == 1.0
        assert watch.drawn == [_session_tokens(llm, policy, budgets, prompt, 12) for prompt in prompts]
        seen.add(tuple(map(tuple, watch.drawn)))
    # The budgets make a difference, so that the comparison can fail.
    assert len(seen) > 1


@pytest.mark.parametrize("policy", LAYER_BUDGET_POLICIES)
@pytest.mark.parametrize(("variant", "dtype"), [("llama", "fp32"), ("gemma3", "int8"), ("smollm3", "fp16")])
def test_what_is_kept_of_a_held_prompt_is_what_a_session_keeps(
    load: Any, policy: str, variant: str, dtype: str
) -> None:
    llm, prompt = load(variant, dtype, policy), prompt_of(120)
    (held,) = TaskScore(llm, [Task(prompt=tuple(prompt), answer=(0,))], policy)._prompts
    assert held is not None
    options = PolicyOptions(name=policy, layer_budgets_tokens=(70, 41))
    session = llm.new_session(options)
    next(session.generate(prompt, SamplingParams(), llm.vocab_size))
    kept = TaskScore(llm, [], policy)._compressed(held, options)
    windows = [group.sliding_window for group in llm.backend.layout.groups]
    expected = [budget for window, budget in zip(windows, (70, 41), strict=True) if window is None]
    assert [slots.live for slots, window in zip(kept.maps, windows, strict=True) if window is None] == expected
    assert (kept.length, kept.next_position, kept.room) == (120, 120, session._cache.room)
    for mine, theirs in zip(kept.maps, session._cache.maps, strict=True):
        np.testing.assert_array_equal(mine.owners, theirs.owners)
        np.testing.assert_array_equal(mine.positions, theirs.positions)
    for ours, others in zip(kept.stacks, session._cache.stacks, strict=True):
        for part, other in zip(ours.parts(), others.parts(), strict=True):
            np.testing.assert_array_equal(part.array, other.array)


@pytest.mark.parametrize("policy", LAYER_BUDGET_POLICIES)
def test_a_candidate_leaves_the_held_prompts_as_they_were(load: Any, policy: str) -> None:
    llm = load(policy=policy)
    score = TaskScore(llm, [Task(prompt=tuple(prompt_of(140)), answer=(0,))], policy)
    (prompt,) = score._prompts
    assert prompt is not None
    arrays = [part.array.copy() for stack in prompt.cache.stacks for part in stack.parts()]
    owners, length = [slots.owners.copy() for slots in prompt.cache.maps], prompt.cache.length
    for budgets in ((34, 70), (70, 34), (33, 33)):
        score(budgets)
    assert prompt.cache.length == length == 140
    parts = (part for stack in prompt.cache.stacks for part in stack.parts())
    for before, after in zip(arrays, parts, strict=True):
        np.testing.assert_array_equal(before, after.array)
    for owner, slots in zip(owners, prompt.cache.maps, strict=True):
        np.testing.assert_array_equal(owner, slots.owners)


def _tasks(llm: LLM, budgets: tuple[int, ...], right: int, wrong: int) -> list[Task]:
    """Tasks of which a conversation with these budgets answers `right`."""
    prompts = [prompt_of(100 + 7 * index) for index in range(right + wrong)]
    answers = [_session_tokens(llm, "snapkv", budgets, prompt, 5) for prompt in prompts]
    spoilt = [[*answer[:-1], answer[-1] ^ 1] for answer in answers[right:]]
    found = zip(prompts, answers[:right] + spoilt, strict=True)
    return [Task(prompt=tuple(prompt), answer=tuple(answer)) for prompt, answer in found]


@pytest.mark.parametrize("hold", [True, False])
def test_the_score_is_the_share_of_answered_tasks(load: Any, hold: bool) -> None:
    llm = load()
    score = TaskScore(llm, _tasks(llm, (40, 80), 3, 1), "snapkv", hold=hold)
    assert score.held_prompts == (4 if hold else 0)
    assert score((40, 80)) == 0.75


def test_prompts_that_are_read_again_score_the_same(load: Any) -> None:
    llm = load()
    tasks = _tasks(llm, (60, 45), 3, 3)
    held, read = TaskScore(llm, tasks, "snapkv"), TaskScore(llm, tasks, "snapkv", hold=False)
    scores = [held(budgets) for budgets in ((60, 45), *CANDIDATES)]
    assert scores == [read(budgets) for budgets in ((60, 45), *CANDIDATES)]
    assert scores[0] == 0.5
    assert len(set(scores)) > 1


def test_as_many_prompts_are_held_as_the_memory_budget_allows(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = load()
    tasks = _tasks(llm, (60, 45), 2, 2)
    size_bytes = task_score._held_bytes(llm, len(tasks[0].prompt))
    (read,) = (prompt for prompt in TaskScore(llm, tasks[:1], "snapkv")._prompts)
    assert read is not None
    held_bytes = read.cache.size_bytes + sum(mass.nbytes for mass in read.attention_mass) + read.logits.nbytes
    assert 0.5 * size_bytes < held_bytes <= size_bytes
    memory = llm.plan.memory
    budget = memory.total_bytes + size_bytes + task_score._held_bytes(llm, len(tasks[1].prompt))
    plan = replace(llm.plan, memory=replace(memory, budget_bytes=budget))
    monkeypatch.setattr(llm, "plan", plan)
    score = TaskScore(llm, tasks, "snapkv")
    assert [prompt is not None for prompt in score._prompts] == [True, True, False, False]
    assert score((60, 45)) == 0.5
    score.release()
    assert score.held_prompts == 0
    assert score((60, 45)) == 0.5


def test_prompts_that_a_long_answer_turns_otherwise_are_read_by_sessions(scoring_bundle: Any) -> None:
    options = KVCacheOptions(policy="snapkv", budget_tokens=50, per_layer=True)
    llm = LLM(scoring_bundle("phi3_longrope_short").path, threads=1, kv_cache=options)
    spec = llm.bundle.manifest.spec
    assert [spec.rope_range(length) for length in (40, 41)] == [0, 1]
    tasks = [Task(prompt=tuple(prompt_of(length)), answer=(0,) * 5) for length in (36, 100)]
    score = TaskScore(llm, tasks, "snapkv")
    assert [prompt is not None for prompt in score._prompts] == [False, True]
    tokens = [_session_tokens(llm, "snapkv", (34, 35), list(task.prompt), 8) for task in tasks]  # type: ignore[arg-type]
    tasks = [Task(prompt=task.prompt, answer=tuple(answer)) for task, answer in zip(tasks, tokens, strict=True)]
    assert TaskScore(llm, tasks, "snapkv")((34, 35)) == 1.0


def test_prompts_are_read_in_view_of_the_user(load: Any) -> None:
    llm, told = load(), list[tuple[str, int, int]]()
    TaskScore(llm, _tasks(llm, (60, 45), 2, 0), "snapkv", lambda *what: told.append(what))
    assert told == [("reading prompts", 0, 2), ("reading prompts", 1, 2)]


def test_prompts_in_text_begin_as_those_of_a_conversation(load: Any) -> None:
    llm = load()
    text = "The quick brown fox"
    assert prompt_ids(llm, Task(prompt=text, answer="x")) == llm.tokenizer.encode_prompt(text)
    assert prompt_ids(llm, Task(prompt=(5, 6), answer="x")) == [5, 6]


def test_no_prompt_is_read_when_one_cannot_be(load: Any) -> None:
    llm, told = load(), list[object]()
    good = Task(prompt=tuple(prompt_of(100)), answer=(0,))
    with pytest.raises(UsageError, match="token id 999 is not in the model's vocabulary of 320"):
        TaskScore(llm, [good, Task(prompt=(5, 999), answer=(0,))], "snapkv", lambda *what: told.append(what))
    with pytest.raises(DoesNotFitError, match="the prompt has 257 tokens, the model's context 256"):
        TaskScore(llm, [good, Task(prompt=tuple(prompt_of(257)), answer=(0,))], "snapkv", lambda *_: told.append(1))
    assert told == []


@pytest.mark.parametrize("hold", [True, False])
def test_an_answer_that_the_context_cuts_off_is_an_error_and_no_wrong_answer(load: Any, hold: bool) -> None:
    llm = load()
    prompt = prompt_of(250)
    answer = tuple(_session_tokens(llm, "snapkv", (50, 50), prompt, 7))
    assert TaskScore(llm, [Task(prompt=tuple(prompt), answer=answer)], "snapkv", hold=hold)((50, 50)) == 1.0
    score = TaskScore(llm, [Task(prompt=tuple(prompt), answer=(*answer, 7))], "snapkv", hold=hold)
    with pytest.raises(DoesNotFitError, match="no room for a prompt"):
        score((50, 50))


def test_the_policies_that_have_budgets_of_layers_are_known() -> None:
    assert LAYER_BUDGET_POLICIES == ("snapkv", "laq", "laq++")
