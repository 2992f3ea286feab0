"""The benchmark of KV policies, with a tiny model."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
import pytest
from click.testing import CliRunner, Result

from edgekit import LLM, SamplingParams
from edgekit.errors import UnsupportedError
from edgekit.export.exporter import ExportOptions, export_bundle
from edgekit.export.graph.kv_cache import GraphOptions
from edgekit.export.storage_plan import QuantizationOptions
from edgekit.runtime.cache_profile import SCHEMA_VERSION, CacheProfile, write_profile
from edgekit.runtime.loading import KVCacheOptions
from edgekit.runtime.needle import NeedleCell, NeedleOptions, NeedleReport, NeedleTask, run_needle
from edgekit.runtime.policies import PolicyOptions
from edgekit.runtime.tasks import Task
from tests.tiny_configs import SIZES
from tests.wordy_tokenizers import byte_level_words

MakeCheckpoint: TypeAlias = Callable[[Mapping[str, Any]], Path]

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "kv_policies.py"
BUDGETS = {"window": 60, "snapkv": 60, "laq": 60, "laq++": 60}
OPTIONS = NeedleOptions(lengths=(140,), depths=(0.0, 1.0), samples=6)


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    found = importlib.util.spec_from_file_location("kv_policies", SCRIPT)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules["kv_policies"] = module
    found.loader.exec_module(module)
    return module


def _export(checkpoint: Path, output: Path, *, scores: bool) -> Path:
    exact = QuantizationOptions(precision="fp32")
    options = ExportOptions(quantization=exact, graph=GraphOptions(attention_scores=scores))
    return export_bundle(checkpoint, output, options, lambda *_: None).path


@pytest.fixture(scope="module")
def wordy(make_checkpoint: MakeCheckpoint) -> Path:
    """A Llama with a context of 256 tokens whose vocabulary has words."""
    tokenizer = byte_level_words()
    config = {"model_type": "llama", **SIZES, "bos_token_id": 0, "vocab_size": tokenizer.get_vocab_size()}
    checkpoint = make_checkpoint(config)
    tokenizer.save(str(checkpoint / "tokenizer.json"))
    return checkpoint


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory, wordy: Path) -> Path:
    return _export(wordy, tmp_path_factory.mktemp("wordy") / "tiny.edge", scores=True)


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    found = CacheProfile(
        schema_version=SCHEMA_VERSION,
        producer="edgekit",
        bundle="",
        budgets_tokens=(80, 160),
        method="snapkv",
        score=1.0,
        settings={},
    )
    write_profile(path, found)
    return path


@pytest.fixture(scope="module")
def tasks(bundle: Path) -> list[NeedleTask]:
    """Prompts with what the model says that keeps everything: no tiny one finds needles."""
    llm = LLM(bundle, threads=1)
    made = []
    for index, depth in enumerate([0.0] * 6 + [1.0] * 6):
        prompt = tuple(np.random.default_rng(index).integers(3, llm.vocab_size, 140).tolist())
        drawn = itertools.islice(llm.new_session().generate(prompt, SamplingParams(), llm.vocab_size), 2)
        task = Task(prompt=prompt, answer=tuple(token.token_id for token in drawn))
        made.append(NeedleTask(length_tokens=140, depth=depth, task=task))
    return made


def test_every_policy_answers_the_same_tasks_as_a_model_that_was_loaded_with_it(
    benchmark: ModuleType, bundle: Path, profile: Path, tasks: list[NeedleTask]
) -> None:
    kv_cache = KVCacheOptions(policy="snapkv", budget_tokens=60, profile=profile)
    llm = benchmark.load(bundle, OPTIONS, kv_cache, 1)
    told: list[str] = []
    policies = benchmark.compared_policies(llm)
    reports = benchmark.measure(llm, tasks, policies, lambda what, *_: told.append(what))
    loaded = {
        "stop": KVCacheOptions(),
        **{name: KVCacheOptions(policy=name, budget_tokens=budget) for name, budget in BUDGETS.items()},
        "snapkv, profile": kv_cache,
    }
    assert list(reports) == list(policies) == list(loaded)
    for name, options in loaded.items():
        assert reports[name] == run_needle(LLM(bundle, threads=1, kv_cache=options), tasks), name
    correct = {name: report.correct for name, report in reports.items()}
    assert correct.pop("stop") == 12
    # What was dropped matters to a random model: who drops much does not answer all.
    assert max(correct.values()) < 12
    assert told[0] == "stop, needle at 0% of 140 tokens"
    assert told[-1] == "snapkv, profile, needle at 100% of 140 tokens"
    assert len(told) == 12 * len(loaded)


def test_budgets_of_a_profile_are_moved_to_the_mean(benchmark: ModuleType, bundle: Path, profile: Path) -> None:
    kv_cache = KVCacheOptions(policy="snapkv", budget_tokens=60, profile=profile)
    policies = benchmark.compared_policies(benchmark.load(bundle, OPTIONS, kv_cache, 1))
    assert policies["snapkv, profile"].layer_budgets_tokens == (40, 80)
    assert policies["snapkv"] == PolicyOptions(name="snapkv", budget_tokens=60)
    assert policies["window"] == PolicyOptions(name="window", budget_tokens=60)
    plain = benchmark.load(bundle, OPTIONS, dataclasses.replace(kv_cache, profile=None), 1)
    assert list(benchmark.compared_policies(plain)) == ["stop", *BUDGETS]


@pytest.mark.parametrize(("share", "count", "expected"), [(0.5, 100, 0.05), (0.9, 9, 0.1), (1.0, 50, 0.0)])
def test_the_standard_error_is_the_binomial_one(
    benchmark: ModuleType, share: float, count: int, expected: float
) -> None:
    assert benchmark.standard_error(share, count) == pytest.approx(expected)


def _report(*correct: int) -> NeedleReport:
    depths = (0.0, 0.5, 1.0)
    cells = [
        NeedleCell(length_tokens=2048, depth=depth, samples=12, correct=count)
        for depth, count in zip(depths, correct, strict=True)
    ]
    return NeedleReport(cells=tuple(cells), samples=36, correct=sum(correct), accuracy=sum(correct) / 36)


def test_the_table_has_a_row_per_policy_and_a_column_per_depth(benchmark: ModuleType) -> None:
    assert benchmark.table({"stop": _report(12, 12, 12), "window": _report(0, 6, 12)}) == (
        "| policy | found | accuracy | standard error | at 0% | at 50% | at 100% |\n"
        "| --- | --- | --- | --- | --- | --- | --- |\n"
        "| stop | 36 of 36 | 100.0% | 0.0% | 100% | 100% | 100% |\n"
        "| window | 18 of 36 | 50.0% | 8.3% | 0% | 50% | 100% |"
    )


def _invoke(benchmark: ModuleType, bundle: Path, *options: object) -> Result:
    small = ("--prompt-tokens", 200, "--depths", 2, "--samples", 1, "--distractors", 1, "--threads", 1)
    arguments = [bundle, *small, "--budget-tokens", 60, *options]
    return CliRunner().invoke(benchmark.main, [str(argument) for argument in arguments])


@pytest.fixture
def obliging(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that finds needles with stop, and with window all but those at the beginning."""
    import edgekit.runtime.needle

    def answers(_llm: object, task: Task, session: Any) -> bool:
        assert not isinstance(task.prompt, str)
        kept: PolicyOptions = session.policy.options
        count = len(task.answer)
        place = next(i for i in range(len(task.prompt)) if task.prompt[i : i + count] == task.answer)
        return kept.name == "stop" or (kept == PolicyOptions(name="window", budget_tokens=60) and place > 60)

    monkeypatch.setattr(edgekit.runtime.needle, "answers", answers)


@pytest.mark.usefixtures("obliging")
def test_needles_are_asked_for_with_every_policy(benchmark: ModuleType, bundle: Path, profile: Path) -> None:
    outcome = _invoke(benchmark, bundle, "--kv-cache-dtype", "int8", "--seed", 3, "--profile", profile)
    assert outcome.exit_code == 0, outcome.output
    lines = outcome.stdout.splitlines()
    assert lines[0].startswith("tiny.edge, ")
    assert lines[0].endswith(
        ", 1 threads, int8 KV cache, budget 60 of 200 tokens, 1 distractors, seed 3, profile profile.json"
    )
    assert lines[2:] == [
        "| policy | found | accuracy | standard error | at 0% | at 100% |",
        "| --- | --- | --- | --- | --- | --- |",
        "| stop | 2 of 2 | 100.0% | 0.0% | 100% | 100% |",
        "| window | 1 of 2 | 50.0% | 35.4% | 0% | 100% |",
        *(f"| {name} | 0 of 2 | 0.0% | 0.0% | 0% | 0% |" for name in ("snapkv", "laq", "laq++", "snapkv, profile")),
    ]
    assert outcome.stderr.splitlines() == [
        *("stop: 2 of 2", "window: 1 of 2", "snapkv: 0 of 2", "laq: 0 of 2", "laq++: 0 of 2"),
        "snapkv, profile: 0 of 2",
    ]


def test_prompts_that_fit_into_the_budget_are_refused(benchmark: ModuleType, bundle: Path) -> None:
    outcome = _invoke(benchmark, bundle, "--budget-tokens", 200)
    assert outcome.exit_code == 2
    assert "prompts of 200 tokens are not longer than the budget of 200, so that nothing is evicted" in outcome.stderr


def test_a_bundle_without_scores_is_refused(benchmark: ModuleType, wordy: Path, tmp_path: Path) -> None:
    outcome = _invoke(benchmark, _export(wordy, tmp_path / "plain.edge", scores=False))
    assert isinstance(outcome.exception, UnsupportedError)
    assert "export it with --attention-scores" in str(outcome.exception)
