"""EvolKV (Yu and Chai 2025, arXiv 2509.08315): budgets of a model's layers, found by evolution.

Budgets k = (k₁ … k_L) are judged by a downstream score f of the model that runs with them (equation 1):

    f(k) · (1 + λ · CacheScore(k̄, c))           λ = 0.3

where k̄ is the mean budget and c the one that is wanted. `cache_score` falls on both sides of c, more slowly below it.
The search (algorithm 1):

    1  all layers start at c
    2  groups of 8 layers, from the bottom up: a fresh CMA-ES over the group's budgets, one variable per layer, all
       other layers frozen, those of earlier groups at their best; CacheScore takes the group's mean
    3  the best candidate of the whole run is kept, and completed to the mean c

The paper gives σ₀ = 0.3 and a population of 4 + ⌊3 ln n⌋, but neither the space nor the iterations. Here variables are
ratios kᵢ / c, in which σ₀ means the same for every budget. Each candidate is judged as it would run, in whole tokens.
The uniform budgets are the first candidate: what is returned is not worse, by the objective, before it is completed.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

from edgekit.errors import MissingExtraError, UsageError
from edgekit.progress import Progress
from edgekit.runtime.cache_profile import completed

Evaluate: TypeAlias = Callable[[tuple[int, ...]], float]
"""Returns the score, of 1, that the model has with these budgets."""

GROUP_LAYERS = 8
INITIAL_SIGMA = 0.3
CACHE_SCORE_WEIGHT = 0.3
UNUSED_DISCOUNT = 0.2
DEFAULT_ITERATIONS = 10


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """What is searched.

    Attributes:
        mean_tokens: Mean budget of the layers that is wanted.
        min_tokens: Least budget of a layer.
        max_tokens: Largest budget of a layer that is tried.
        iterations: Generations of every group.
        seed: Makes the search reproducible.
    """

    mean_tokens: int
    min_tokens: int
    max_tokens: int
    iterations: int = DEFAULT_ITERATIONS
    seed: int = 0

    def __post_init__(self) -> None:
        """Checks the ranges.

        Raises:
            UsageError: One is empty, or a number is out of range.
        """
        for name, value, least in (("iterations", self.iterations, 1), ("seed", self.seed, 0)):
            if type(value) is not int or value < least:
                raise UsageError(f"{name} is {value!r}; it must be an integer of at least {least}")
        if not 1 <= self.min_tokens <= self.mean_tokens <= self.max_tokens:
            raise UsageError(
                f"the mean budget is {self.mean_tokens} tokens; it must be from {self.min_tokens} to {self.max_tokens}"
            )


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """What was found.

    Attributes:
        budgets_tokens: Budgets of the layers, completed to the mean.
        found_tokens: The best candidate, as it was judged.
        objective: Of the best candidate.
        candidates: How many budgets were judged.
    """

    budgets_tokens: tuple[int, ...]
    found_tokens: tuple[int, ...]
    objective: float
    candidates: int


def cache_score(mean_tokens: float, wanted_tokens: int) -> float:
    """Returns how well a mean budget keeps to the one that is wanted, of 1 (equation 2, with γ = 0.2)."""
    ratio = mean_tokens / wanted_tokens
    return max(0.0, 2.0 - ratio) if ratio > 1 else 1.0 - UNUSED_DISCOUNT * (1.0 - ratio)


def objective(score: float, mean_tokens: float, wanted_tokens: int) -> float:
    """Returns what the search maximises (equation 1)."""
    return score * (1.0 + CACHE_SCORE_WEIGHT * cache_score(mean_tokens, wanted_tokens))


def population(variables: int) -> int:
    """Returns the candidates of a generation."""
    return 4 + math.floor(3 * math.log(variables))


def completed_within(budgets_tokens: Sequence[float], mean_tokens: int, min_tokens: int) -> tuple[int, ...]:
    """Completes budgets to a mean (`completed`), none below the least that the policy can take.

    Layers that would fall below it get it, and the others share the rest, so that the mean is kept.
    """
    free, result = list(range(len(budgets_tokens))), [min_tokens] * len(budgets_tokens)
    while free:
        rest = mean_tokens * len(result) - min_tokens * (len(result) - len(free))
        scaled = completed([budgets_tokens[layer] for layer in free], rest / len(free))
        if min(scaled) >= min_tokens:
            for layer, tokens in zip(free, scaled, strict=True):
                result[layer] = tokens
            break
        free = [layer for layer, tokens in zip(free, scaled, strict=True) if tokens >= min_tokens]
    return tuple(result)


def load_cma() -> ModuleType:
    """Imports the CMA-ES.

    Raises:
        MissingExtraError: It is not installed.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it could plot, if matplotlib were there
            import cma
    except ImportError as error:
        raise MissingExtraError("cma", "tune") from error
    module: ModuleType = cma
    return module


def search_budgets(
    evaluate: Evaluate, num_layers: int, options: SearchOptions, progress: Progress = lambda *_: None
) -> SearchResult:
    """Searches the budgets of layers.

    Args:
        evaluate: Judges budgets of all layers; is asked once for each.
        num_layers: How many there are.
        options: See `SearchOptions`.
        progress: Called before each candidate.

    Raises:
        MissingExtraError: The package cma is not installed.
    """
    load_cma()
    run = _Run(evaluate, num_layers, options, progress)
    for first in range(0, num_layers, GROUP_LAYERS):
        run.search(range(first, min(first + GROUP_LAYERS, num_layers)))
    return SearchResult(
        budgets_tokens=completed_within(run.best, options.mean_tokens, options.min_tokens),
        found_tokens=run.best,
        objective=run.best_objective,
        candidates=len(run.scores),
    )


class _Run:
    """State of a search.

    Attributes:
        scores: What was judged so far.
        best: The best candidate of the whole run.
        best_objective: Its objective.
    """

    def __init__(self, evaluate: Evaluate, num_layers: int, options: SearchOptions, progress: Progress) -> None:
        self._evaluate, self._options, self._progress = evaluate, options, progress
        groups, rest = divmod(num_layers, GROUP_LAYERS)
        generation = groups * population(GROUP_LAYERS) + (population(rest) if rest else 0)
        self._asked, self._total = 0, 1 + generation * options.iterations
        self.scores: dict[tuple[int, ...], float] = {}
        self.best = (options.mean_tokens,) * num_layers
        progress("uniform budgets", 0, self._total)
        self.best_objective = self._judge(self.best, range(num_layers))

    def search(self, group: range) -> None:
        """Runs a fresh CMA-ES over the budgets of a group of layers, all others as in the best candidate so far."""
        below, above = self.best[: group.start], self.best[group.stop :]
        strategy = _strategy(len(group), self._options, group.start)
        for _ in range(self._options.iterations):
            # Nothing beats a score of 1 with the wanted mean.
            if strategy.stop() or self.best_objective >= 1.0 + CACHE_SCORE_WEIGHT:
                return
            points, losses = strategy.ask(), []
            for ratios in points:
                what = f"layers {group.start} to {group.stop - 1}, best objective {self.best_objective:.3f}"
                self._progress(what, self._asked, self._total)
                candidate = (*below, *self._tokens(ratios[: len(group)]), *above)
                value = self._judge(candidate, group)
                losses.append(-value)
                if value > self.best_objective:
                    self.best, self.best_objective = candidate, value
            strategy.tell(points, losses)

    def _judge(self, candidate: tuple[int, ...], group: range) -> float:
        self._asked += 1
        if candidate not in self.scores:
            self.scores[candidate] = self._evaluate(candidate)
        mean = sum(candidate[layer] for layer in group) / len(group)
        return objective(self.scores[candidate], mean, self._options.mean_tokens)

    def _tokens(self, ratios: Sequence[float]) -> tuple[int, ...]:
        wanted, least, most = self._options.mean_tokens, self._options.min_tokens, self._options.max_tokens
        return tuple(min(max(round(float(ratio) * wanted), least), most) for ratio in ratios)


def _strategy(variables: int, options: SearchOptions, group: int) -> Any:
    """Returns a CMA-ES in the space of ratios, which draws from a generator of its own."""
    generator = np.random.default_rng([options.seed, group])
    # The library wants two variables at least: beside a single one, the second changes nothing.
    return load_cma().CMAEvolutionStrategy(
        [1.0] * max(2, variables),
        INITIAL_SIGMA,
        {
            "popsize": population(variables),
            "bounds": [options.min_tokens / options.mean_tokens, options.max_tokens / options.mean_tokens],
            "randn": lambda *shape: generator.standard_normal(shape),
            "seed": math.nan,  # NumPy's global generator is left alone
            "verbose": -9,
            "signals_filename": "",  # no file in the current directory changes a running search
        },
    )
