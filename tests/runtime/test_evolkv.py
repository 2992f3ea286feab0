"""The search for budgets on scores that are known, so that what it should find is known too."""

from __future__ import annotations

import builtins
import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from edgekit.errors import MissingExtraError, UsageError
from edgekit.runtime.cache_profile import completed
from edgekit.runtime.evolkv import (
    CACHE_SCORE_WEIGHT,
    DEFAULT_ITERATIONS,
    SearchOptions,
    SearchResult,
    cache_score,
    completed_within,
    objective,
    population,
    search_budgets,
)


def _options(
    mean: int = 100, *, least: int = 33, most: int = 400, iterations: int = 10, seed: int = 0
) -> SearchOptions:
    return SearchOptions(mean_tokens=mean, min_tokens=least, max_tokens=most, iterations=iterations, seed=seed)


class Planted:
    """A score that grows until every layer has what it needs; notes what it was asked."""

    def __init__(self, needs: list[float]) -> None:
        self.needs = np.array(needs)
        self.asked: list[tuple[int, ...]] = []

    def __call__(self, budgets: tuple[int, ...]) -> float:
        self.asked.append(budgets)
        return float(np.minimum(1.0, np.array(budgets) / self.needs).mean())


@pytest.mark.parametrize(
    ("mean", "wanted", "expected"),
    [
        (100, 100, 1.0),
        (150, 100, 0.5),
        (125, 100, 0.75),
        (200, 100, 0.0),
        (350, 100, 0.0),
        (50, 100, 0.9),
        (75, 100, 0.95),
        (0, 100, 0.8),
    ],
)
def test_the_cache_score_is_the_papers(mean: float, wanted: int, expected: float) -> None:
    assert cache_score(mean, wanted) == pytest.approx(expected)


def test_the_objective_weighs_the_cache_score_by_three_tenths() -> None:
    assert objective(0.5, 100, 100) == pytest.approx(0.65)
    assert objective(0.5, 150, 100) == pytest.approx(0.5 * 1.15)
    assert objective(0.8, 50, 100) == pytest.approx(0.8 * 1.27)
    assert objective(0.0, 100, 100) == 0.0


def test_a_population_is_4_and_3_logarithms_of_the_variables() -> None:
    assert [population(variables) for variables in (1, 2, 3, 6, 8)] == [4, 6, 7, 9, 10]


def test_completion_scales_to_the_mean_and_rounds_up() -> None:
    # A = 300, T = 600: every budget doubles; then A = 310, T = 300.
    assert completed_within((50, 100, 150), 200, 33) == (100, 200, 300)
    assert completed_within((60, 100, 150), 100, 33) == (59, 97, 146) == completed((60, 100, 150), 100)


def test_layers_that_completion_would_put_below_the_least_get_it_and_the_others_the_rest() -> None:
    # Scaling by 300 / 500 leaves 24 of the first 40; the others then share 300 - 33 in the ratio 160 : 300.
    assert completed((40, 160, 300), 100) == (24, 96, 180)
    assert completed_within((40, 160, 300), 100, 33) == (33, math.ceil(267 * 160 / 460), math.ceil(267 * 300 / 460))
    # The second layer falls below it only once the first has taken from the rest.
    budgets = completed_within((33, 67, 900), 66, 64)
    assert budgets == (64, 64, 70)


def test_budgets_at_the_least_stay_there_when_that_is_the_mean() -> None:
    assert completed_within((90, 50, 109), 33, 33) == (33, 33, 33)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_layers_that_need_more_get_more(seed: int) -> None:
    needy = {2, 5, 11}
    needs = [220.0 if layer in needy else (1200 - 3 * 220) / 9 for layer in range(12)]
    planted = Planted(needs)
    found = search_budgets(planted, 12, _options(iterations=30, seed=seed))
    assert {int(layer) for layer in np.argsort(found.budgets_tokens)[-3:]} == needy
    uniform, tuned = Planted(needs)((100,) * 12), Planted(needs)(found.budgets_tokens)
    assert tuned > uniform + 0.6 * (1 - uniform)
    assert 1200 <= sum(found.budgets_tokens) < 1200 + 12


def test_a_coarse_score_of_few_tasks_is_enough_to_find_more() -> None:
    draw = np.random.default_rng(1)
    needs = draw.choice([50.0, 200.0], 16)
    needs *= 100 * 16 / needs.sum()
    layers, thresholds = [draw.choice(16, 5, replace=False) for _ in range(20)], draw.uniform(0.5, 1, 20)

    def score(budgets: tuple[int, ...]) -> float:
        met = np.minimum(1, np.array(budgets) / needs)
        met_tasks = [met[some].mean() >= needed for some, needed in zip(layers, thresholds, strict=True)]
        return float(np.mean(met_tasks))

    found = search_budgets(score, 16, _options())
    assert score(found.budgets_tokens) >= score((100,) * 16) + 0.1


def test_one_group_is_searched_at_a_time_and_all_others_are_frozen() -> None:
    needs = [50.0, 150.0] * 9 + [100.0]
    planted, again = Planted(needs), Planted(needs)
    best: dict[tuple[int, ...], float] = {}
    found = search_budgets(planted, 19, _options(iterations=4))
    assert planted.asked[0] == (100,) * 19
    groups = [range(8), range(8, 16), range(16, 19)]
    following = planted.asked[1:]
    for group in groups:
        best_so_far = max(best, key=best.__getitem__) if best else (100,) * 19
        asked = [following.pop(0) for _ in range(4 * population(len(group)))]
        for budgets in asked:
            assert budgets[: group.start] == best_so_far[: group.start]
            assert budgets[group.stop :] == (100,) * (19 - group.stop)
            best[budgets] = objective(again(budgets), sum(budgets[layer] for layer in group) / len(group), 100)
        best.setdefault((100,) * 19, objective(again((100,) * 19), 100, 100))
    assert following == []
    assert found.found_tokens == max(best, key=best.__getitem__)
    assert found.objective == max(best.values())


def test_every_group_starts_afresh_from_the_mean() -> None:
    # The same score for both groups: a fresh search with another draw spreads around the mean by 0.3 of it again.
    planted = Planted([300.0] * 16)
    search_budgets(planted, 16, _options(iterations=1))
    first, second = np.array(planted.asked[1:11])[:, :8], np.array(planted.asked[11:21])[:, 8:]
    for asked in (first, second):
        assert 20 < asked.std() < 40
        assert abs(asked.mean() - 100) < 15
    assert not np.array_equal(first, second)


def test_the_best_of_the_whole_run_is_kept_when_later_groups_find_nothing() -> None:
    peak: dict[str, Any] = {"at": None}

    def score(budgets: tuple[int, ...]) -> float:
        # One candidate of the first group is good, once; all that differ from it in the second group are bad.
        if peak["at"] is None and budgets != (100,) * 10:
            peak["at"] = budgets
        return 0.9 if budgets == peak["at"] else 0.1

    found = search_budgets(score, 10, _options(iterations=5))
    assert found.found_tokens == peak["at"]
    assert found.found_tokens[8:] == (100, 100)


def test_uniform_budgets_are_a_candidate_and_stay_when_nothing_is_better() -> None:
    found = search_budgets(lambda budgets: 0.5 if budgets == (100,) * 4 else 0.2, 4, _options())
    assert found.budgets_tokens == found.found_tokens == (100,) * 4
    assert found.objective == pytest.approx(0.65)


def test_the_search_ends_when_nothing_could_be_better() -> None:
    planted = Planted([80.0] * 20)
    found = search_budgets(planted, 20, _options())
    assert planted.asked == [(100,) * 20]
    assert found == SearchResult(
        budgets_tokens=(100,) * 20, found_tokens=(100,) * 20, objective=1.0 + CACHE_SCORE_WEIGHT, candidates=1
    )


def test_a_flat_score_of_nothing_is_given_up_early() -> None:
    asked: list[tuple[int, ...]] = []

    def nothing(budgets: tuple[int, ...]) -> float:
        asked.append(budgets)
        return 0.0

    found = search_budgets(nothing, 8, _options(iterations=100))
    assert found.budgets_tokens == (100,) * 8
    assert len(asked) < 100


def test_budgets_are_whole_tokens_within_the_limits_and_asked_for_once() -> None:
    planted = Planted([1000.0, 10.0, 1000.0])
    search_budgets(planted, 3, _options(60, least=50, most=75, iterations=20))
    assert len(planted.asked) == len(set(planted.asked))
    assert {type(tokens) for budgets in planted.asked for tokens in budgets} == {int}
    assert min(map(min, planted.asked)) == 50
    assert max(map(max, planted.asked)) == 75


@pytest.mark.parametrize("layers", [1, 2, 9])
def test_groups_of_one_layer_are_searched_too(layers: int) -> None:
    planted = Planted([10.0] * (layers - 1) + [200.0])
    found = search_budgets(planted, layers, _options(iterations=8))
    assert len({budgets[-1] for budgets in planted.asked}) > 8
    assert 100 * layers <= sum(found.budgets_tokens) < 101 * layers


def test_a_seed_gives_the_same_search_and_another_seed_another() -> None:
    runs = []
    for seed in (3, 3, 4):
        planted = Planted([50.0, 150.0] * 5)
        search_budgets(planted, 10, _options(iterations=3, seed=seed))
        runs.append(planted.asked)
    assert runs[0] == runs[1] != runs[2]


def test_numpys_global_generator_is_left_alone() -> None:
    np.random.seed(7)  # noqa: NPY002 - it is what others may use
    before = np.random.get_state()[1].tolist()  # type: ignore[index] # noqa: NPY002
    search_budgets(Planted([50.0, 150.0]), 2, _options(iterations=2))
    assert np.random.get_state()[1].tolist() == before  # type: ignore[index] # noqa: NPY002


def test_a_file_in_the_current_directory_does_not_end_a_search(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cma_signals.in").write_text("{'maxiter': 0, 'timeout': 0}", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    planted = Planted([500.0, 10.0])
    search_budgets(planted, 2, _options(iterations=3))
    assert len(planted.asked) > 1 + 2 * population(2)
    assert [path.name for path in tmp_path.iterdir()] == ["cma_signals.in"]


def test_progress_counts_candidates_and_tells_the_layers_and_the_best() -> None:
    told: list[tuple[str, int, int]] = []
    search_budgets(Planted([500.0] * 10), 10, _options(iterations=2), lambda *what: told.append(what))
    total = 1 + 2 * (population(8) + population(2))
    assert [done for _, done, _ in told] == list(range(total))
    assert {of for _, _, of in told} == {total}
    assert told[0][0] == "uniform budgets"
    assert told[1][0] == "layers 0 to 7, best objective 0.260"
    assert told[-1][0].startswith("layers 8 to 9, best objective 0.")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"iterations": 0}, "iterations is 0; it must be an integer of at least 1"),
        ({"iterations": -3}, "iterations is -3"),
        ({"iterations": 2.5}, "iterations is 2.5"),
        ({"seed": -1}, "seed is -1; it must be an integer of at least 0"),
        ({"mean": 32}, "the mean budget is 32 tokens; it must be from 33 to 400"),
        ({"mean": 401}, "the mean budget is 401 tokens; it must be from 33 to 400"),
    ],
)
def test_options_out_of_range_are_refused(changed: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        _options(**changed)


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def refuse(name: str, *rest: Any, **named: Any) -> Any:
        if name == "cma":
            raise ImportError(name)
        return original(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", refuse)
    planted = Planted([100.0])
    with pytest.raises(MissingExtraError, match=r"cma is not installed; run: pip install 'edgekit\[tune\]'"):
        search_budgets(planted, 1, _options())
    assert planted.asked == []


def test_the_package_is_imported_only_for_a_search() -> None:
    code = "import sys, edgekit.runtime.evolkv; sys.exit('cma' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_default_iterations_are_those_of_the_command() -> None:
    from edgekit.cli.tune_cache import tune_cache

    (option,) = (parameter for parameter in tune_cache.params if parameter.name == "iterations")
    assert option.default == DEFAULT_ITERATIONS
