"""Tuning tiny models on tasks whose answers are what known budgets lead to."""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace
from typing import Any

import pytest

from edgekit.errors import UnsupportedError, UsageError
from edgekit.runtime import tuning
from edgekit.runtime.cache_profile import read_profile, write_profile
from edgekit.runtime.evolkv import population
from edgekit.runtime.llm import LLM
from edgekit.runtime.loading import KVCacheOptions, LoadOptions, plan_load
from edgekit.runtime.policies import PolicyOptions
from edgekit.runtime.sampling import SamplingParams
from edgekit.runtime.task_score import TaskScore
from edgekit.runtime.tasks import Task
from edgekit.runtime.tuning import TuneOptions, tune_budgets, tuned_profile
from tests.runtime.policies.reference import prompt_of


@pytest.fixture(scope="module")
def llm(scoring_bundle: Any) -> LLM:
    options = KVCacheOptions(policy="snapkv", budget_tokens=60, per_layer=True)
    return LLM(scoring_bundle().path, threads=1, kv_cache=options)


def _tasks(llm: LLM, budgets: tuple[int, ...], count: int, *, first: int = 0, length: int = 150) -> list[Task]:
    """Tasks that a conversation with these budgets answers."""
    tasks = []
    for seed in range(first, first + count):
        prompt = prompt_of(length, seed)
        session = llm.new_session(PolicyOptions(name="snapkv", layer_budgets_tokens=budgets))
        drawn = itertools.islice(session.generate(prompt, SamplingParams(), llm.vocab_size), 4)
        tasks.append(Task(prompt=tuple(prompt), answer=tuple(token.token_id for token in drawn)))
    return tasks


def test_budgets_that_answer_more_are_found(llm: LLM) -> None:
    # What is right is what the model says with little in its first layer and much in its second.
    tasks = _tasks(llm, (34, 86), 8)
    report = tune_budgets(llm, tasks, TuneOptions(budget_tokens=60, iterations=40))
    assert report.calibration.tasks == 8
    assert report.calibration.tuned >= report.calibration.uniform + 0.5
    assert report.budgets_tokens[0] < 45
    assert 120 <= sum(report.budgets_tokens) <= 121
    assert 1 < report.candidates <= 1 + 40 * population(2)
    assert report.held_prompts == 8
    assert report.holdout is None


def test_what_is_reported_is_what_conversations_answer(llm: LLM, scoring_bundle: Any, tmp_path: Any) -> None:
    tasks, others = _tasks(llm, (34, 86), 10), _tasks(llm, (34, 86), 6, first=50)
    options = TuneOptions(budget_tokens=60, iterations=6)
    report = tune_budgets(llm, tasks, options, holdout=others)
    assert report.holdout is not None
    for compared, asked in ((report.calibration, tasks), (report.holdout, others)):
        score = TaskScore(llm, asked, "snapkv", hold=False)
        assert compared.tasks == len(asked)
        assert compared.uniform == score((60, 60))
        assert compared.tuned == score(report.budgets_tokens)

    write_profile(tmp_path / "profile.json", tuned_profile(llm, report, options, "0" * 64))
    # The way of whoever uses the profile: a layout of as many groups as there are budgets.
    kv_cache = KVCacheOptions(policy="snapkv", profile=tmp_path / "profile.json")
    user = LLM(scoring_bundle().path, threads=1, kv_cache=kv_cache)
    answered = [
        user.generate(task.prompt, SamplingParams(max_tokens=4, ignore_eos=True), session=user.new_session()).token_ids
        == task.answer
        for task in tasks
    ]
    assert sum(answered) / len(tasks) == report.calibration.tuned


def test_the_profile_says_how_it_was_found(llm: LLM, tmp_path: Any) -> None:
    import cma

    options = TuneOptions(budget_tokens=70, iterations=2, seed=5)
    report = tune_budgets(llm, _tasks(llm, (40, 100), 4), options)
    write_profile(tmp_path / "profile.json", tuned_profile(llm, report, options, "ab" * 32))
    profile = read_profile(tmp_path / "profile.json", 2)
    assert profile.bundle == llm.bundle.digest
    assert profile.budgets_tokens == report.budgets_tokens
    assert (profile.method, profile.score) == ("snapkv", report.calibration.tuned)
    assert profile.settings == {
        "search": "evolkv",
        "cma": cma.__version__,
        "budget_tokens": 70,
        "iterations": 2,
        "seed": 5,
        "candidates": report.candidates,
        "group_layers": 8,
        "initial_sigma": 0.3,
        "cache_score_weight": 0.3,
        "unused_discount": 0.2,
        "kv_cache_dtype": "fp32",
        "threads": 1,
        "tasks": 4,
        "tasks_sha256": "ab" * 32,
        "uniform_score": report.calibration.uniform,
    }


def test_a_seed_gives_the_same_budgets(llm: LLM) -> None:
    tasks = _tasks(llm, (34, 86), 8)
    options = TuneOptions(budget_tokens=60, iterations=3, seed=2)
    assert tune_budgets(llm, tasks, options) == tune_budgets(llm, tasks, options)


def test_layers_with_a_sliding_window_keep_the_mean_and_are_not_searched(
    scoring_bundle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv_cache = KVCacheOptions(policy="snapkv", budget_tokens=60, per_layer=True)
    llm = LLM(scoring_bundle("gemma3").path, threads=1, kv_cache=kv_cache)
    assert [group.sliding_window for group in llm.backend.layout.groups] == [None, 7]
    asked: list[tuple[int, ...]] = []
    original = TaskScore.__call__

    def never_perfect(score: TaskScore, budgets: tuple[int, ...]) -> float:
        asked.append(budgets)
        return min(original(score, budgets), 0.5)

    monkeypatch.setattr(TaskScore, "__call__", never_perfect)
    report = tune_budgets(llm, _tasks(llm, (90, 60), 3), TuneOptions(budget_tokens=60, iterations=3))
    assert {windowed for _, windowed in asked} == {60}
    assert len({searched for searched, _ in asked}) > 3
    assert report.budgets_tokens == (60, 60)  # the only layer that is searched has the mean for itself


def test_a_model_whose_layers_all_have_windows_is_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = llm.backend.layout
    windowed = tuple(type(group)(layers=group.layers, sliding_window=8) for group in layout.groups)
    changed = type(layout)(dtype=layout.dtype, groups=windowed, stacks=layout.stacks)
    monkeypatch.setattr(llm.backend, "layout", changed)
    with pytest.raises(UnsupportedError, match="all layers of this model have a sliding window"):
        tune_budgets(llm, _some(150), TuneOptions(budget_tokens=60))


def _some(*lengths: int) -> list[Task]:
    return [Task(prompt=tuple(prompt_of(length)), answer=(7,)) for length in lengths]


def test_a_model_that_was_loaded_with_shared_slots_is_refused(scoring_bundle: Any) -> None:
    llm = LLM(scoring_bundle().path, threads=1, kv_cache=KVCacheOptions(policy="snapkv", budget_tokens=60))
    with pytest.raises(UsageError, match=r"loaded with KVCacheOptions\(per_layer=True\)"):
        tune_budgets(llm, _some(150), TuneOptions(budget_tokens=60))


def test_tasks_of_which_nothing_is_evicted_are_refused(llm: LLM) -> None:
    with pytest.raises(UsageError, match="there are no tasks to tune by"):
        tune_budgets(llm, [], TuneOptions(budget_tokens=60))
    message = "no prompt is longer than the budget of 60 tokens, the longest has 60: nothing is evicted"
    with pytest.raises(UsageError, match=message):
        tune_budgets(llm, _some(40, 60, 50), TuneOptions(budget_tokens=60))


def test_a_few_short_prompts_are_warned_of(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "edgekit"):
        tune_budgets(llm, _some(61, 60, 50), TuneOptions(budget_tokens=60, iterations=1))
    (record,) = caplog.records
    assert record.getMessage().startswith("2 of 3 prompts are not longer than the budget of 60 tokens: ")
    caplog.clear()
    with caplog.at_level(logging.WARNING, "edgekit"):
        tune_budgets(llm, _some(61, 62), TuneOptions(budget_tokens=60, iterations=1))
    assert caplog.records == []


def test_no_layer_is_given_more_than_the_longest_prompt(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []

    def the_more_the_better(_: TaskScore, budgets: tuple[int, ...]) -> float:
        asked.append(budgets)
        return sum(budgets) / 1000

    monkeypatch.setattr(TaskScore, "__call__", the_more_the_better)
    tune_budgets(llm, _some(70, 64), TuneOptions(budget_tokens=60, iterations=8))
    assert max(map(max, asked[:-1])) == 70


def test_prompts_of_the_search_are_let_go_before_others_are_read(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[TaskScore] = []

    class Noted(TaskScore):
        def __init__(self, *arguments: Any) -> None:
            assert [score.held_prompts for score in made] == [0] * len(made)
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(tuning, "TaskScore", Noted)
    report = tune_budgets(llm, _some(70, 80), TuneOptions(budget_tokens=60, iterations=1), holdout=_some(90))
    assert len(made) == 2
    assert report.held_prompts == 2


def test_progress_tells_prompts_and_candidates(llm: LLM) -> None:
    told: list[tuple[str, int, int]] = []
    options = TuneOptions(budget_tokens=60, iterations=1)
    tune_budgets(llm, _some(70, 80), options, progress=lambda *what: told.append(what))
    assert told[:3] == [("reading prompts", 0, 2), ("reading prompts", 1, 2), ("uniform budgets", 0, 7)]
    assert [done for _, done, _ in told[2:]] == list(range(7))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"policy": "stop"}, r"KV policy to tune budgets for: 'stop'; known: laq, laq\+\+, snapkv"),
        ({"policy": "window"}, "'window'; known: laq, laq"),
        ({"policy": "snapkw"}, r"did you mean 'snapkv'\?"),
        ({"budget_tokens": 32}, "the budget is 32 tokens; snapkv needs an integer of at least 33"),
        ({"budget_tokens": 60.0}, "the budget is 60.0 tokens"),
        ({"iterations": -1}, "iterations is -1; it must be an integer of at least 1"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_options_out_of_range_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        replace(TuneOptions(budget_tokens=60), **changed)


def test_a_bundle_that_does_not_say_what_is_attended_to_is_refused(tiny_bundle: Any) -> None:
    kv_cache = KVCacheOptions(policy="snapkv", budget_tokens=60, per_layer=True)
    with pytest.raises(UnsupportedError, match="export it with --attention-scores"):
        LLM(tiny_bundle().path, threads=1, kv_cache=kv_cache)


def test_per_layer_gives_every_layer_slots_of_its_own_and_changes_no_policy(scoring_bundle: Any) -> None:
    kv_cache = KVCacheOptions(policy="snapkv", budget_tokens=60)
    shared = plan_load(scoring_bundle(), LoadOptions(kv_cache=kv_cache))
    apart = plan_load(scoring_bundle(), LoadOptions(kv_cache=replace(kv_cache, per_layer=True)))
    assert [group.layers for group in shared.memory.layout.groups] == [(0, 1)]
    assert [group.layers for group in apart.memory.layout.groups] == [(0,), (1,)]
    assert shared.policy == apart.policy
