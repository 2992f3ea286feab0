"""Tuning a KV cache: budgets of a bundle's layers, searched by EvolKV with the runtime itself.

What a candidate scores is what it will do: tasks are answered by the steps, the cache and the policy of a conversation.
The score is the share of tasks that are answered, as the paper has it. It is coarse when tasks are few, and is left so:
among candidates that answer equally many, the objective already prefers those that keep to the wanted mean.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from edgekit.errors import UnsupportedError, UsageError, one_of
from edgekit.progress import Progress
from edgekit.runtime.cache_profile import SCHEMA_VERSION, CacheProfile
from edgekit.runtime.evolkv import (
    CACHE_SCORE_WEIGHT,
    DEFAULT_ITERATIONS,
    GROUP_LAYERS,
    INITIAL_SIGMA,
    UNUSED_DISCOUNT,
    SearchOptions,
    load_cma,
    search_budgets,
)
from edgekit.runtime.llm import LLM
from edgekit.runtime.policies.snapkv import OBSERVED_TOKENS
from edgekit.runtime.task_score import LAYER_BUDGET_POLICIES, MIN_BUDGET_TOKENS, TaskScore, prompt_ids
from edgekit.runtime.tasks import Task
from edgekit.version import __version__

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """What is tuned.

    Attributes:
        budget_tokens: Mean budget of the layers, more than the policy's observation window.
        policy: One of `LAYER_BUDGET_POLICIES`: what chooses tokens within a layer.
        iterations: Generations of the search, for each group of layers.
        seed: Makes the search reproducible.
    """

    budget_tokens: int
    policy: str = "snapkv"
    iterations: int = DEFAULT_ITERATIONS
    seed: int = 0

    def __post_init__(self) -> None:
        """Checks the ranges.

        Raises:
            UsageError: A number is out of range, or the policy has no budgets of layers.
        """
        if self.policy not in LAYER_BUDGET_POLICIES:
            raise UsageError(f"KV policy to tune budgets for: {one_of(str(self.policy), LAYER_BUDGET_POLICIES)}")
        if type(self.budget_tokens) is not int or self.budget_tokens < MIN_BUDGET_TOKENS:
            raise UsageError(
                f"the budget is {self.budget_tokens!r} tokens; {self.policy} needs an integer of at least "
                f"{MIN_BUDGET_TOKENS}, for the last {OBSERVED_TOKENS} of a prompt are always kept"
            )
        self.search(self.budget_tokens)

    def search(self, max_tokens: int) -> SearchOptions:
        """Returns the options of a search in which no layer gets more than `max_tokens`."""
        return SearchOptions(
            mean_tokens=self.budget_tokens,
            min_tokens=MIN_BUDGET_TOKENS,
            max_tokens=max_tokens,
            iterations=self.iterations,
            seed=self.seed,
        )


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Shares of tasks that are answered, of 1.

    Attributes:
        tasks: How many there are.
        uniform: With the same budget for all layers.
        tuned: With the budgets that were found.
    """

    tasks: int
    uniform: float
    tuned: float


@dataclass(frozen=True, kw_only=True)
class TuningReport:
    """What was found.

    Attributes:
        budgets_tokens: Budgets of the layers; those with a sliding window have the mean, which no policy looks at.
        calibration: On the tasks that were searched with.
        holdout: On others; None without.
        candidates: How many budgets were judged.
        held_prompts: Prompts that were read once; the others were read for every candidate.
    """

    budgets_tokens: tuple[int, ...]
    calibration: Comparison
    holdout: Comparison | None
    candidates: int
    held_prompts: int


def tune_budgets(
    llm: LLM,
    tasks: Sequence[Task],
    options: TuneOptions,
    *,
    holdout: Sequence[Task] = (),
    progress: Progress = lambda *_: None,
) -> TuningReport:
    """Searches the budgets of a model's layers.

    Args:
        llm: The model, loaded with `KVCacheOptions.per_layer`.
        tasks: What candidates are judged by, at least one.
        options: See `TuneOptions`.
        holdout: Tasks that uniform and tuned budgets are compared on besides.
        progress: Told of every prompt and candidate.

    Raises:
        UsageError: There are no tasks, none has a prompt longer than the budget, a prompt has ids that the model does
            not have, or the model was loaded otherwise.
        UnsupportedError: The bundle does not say which tokens are attended to, or no layer sees the whole text.
        MissingExtraError: The package cma is not installed.
        DoesNotFitError: The KV cache has no room for a prompt and its answer.
    """
    load_cma()
    layers, longest = _searched_layers(llm), _longest_prompt(llm, tasks, options.budget_tokens)
    uniform = (options.budget_tokens,) * len(llm.bundle.manifest.spec.layers)

    def in_all_layers(budgets: Sequence[int]) -> tuple[int, ...]:
        whole = list(uniform)
        for layer, tokens in zip(layers, budgets, strict=True):
            whole[layer] = tokens
        return tuple(whole)

    judged = TaskScore(llm, tasks, options.policy, progress)
    search = options.search(longest)
    found = search_budgets(lambda budgets: judged(in_all_layers(budgets)), len(layers), search, progress)
    tuned = in_all_layers(found.budgets_tokens)
    calibration = Comparison(tasks=len(tasks), uniform=judged(uniform), tuned=judged(tuned))
    held_prompts, other = judged.held_prompts, None
    if holdout:
        judged.release()
        unseen = TaskScore(llm, holdout, options.policy, progress)
        other = Comparison(tasks=len(holdout), uniform=unseen(uniform), tuned=unseen(tuned))
    return TuningReport(
        budgets_tokens=tuned,
        calibration=calibration,
        holdout=other,
        candidates=found.candidates,
        held_prompts=held_prompts,
    )


def tuned_profile(llm: LLM, report: TuningReport, options: TuneOptions, tasks_sha256: str) -> CacheProfile:
    """Returns what was found as a cache profile, with all that is needed to find it again.

    Args:
        llm: The model.
        report: What was found.
        options: How it was searched.
        tasks_sha256: SHA-256 of the task file.
    """
    return CacheProfile(
        schema_version=SCHEMA_VERSION,
        producer=f"edgekit {__version__}",
        bundle=llm.bundle.digest,
        budgets_tokens=report.budgets_tokens,
        method=options.policy,
        score=report.calibration.tuned,
        settings={
            "search": "evolkv",
            "cma": str(load_cma().__version__),
            "budget_tokens": options.budget_tokens,
            "iterations": options.iterations,
            "seed": options.seed,
            "candidates": report.candidates,
            "group_layers": GROUP_LAYERS,
            "initial_sigma": INITIAL_SIGMA,
            "cache_score_weight": CACHE_SCORE_WEIGHT,
            "unused_discount": UNUSED_DISCOUNT,
            "kv_cache_dtype": llm.plan.memory.layout.dtype,
            "threads": llm.threads,
            "tasks": report.calibration.tasks,
            "tasks_sha256": tasks_sha256,
            "uniform_score": report.calibration.uniform,
        },
    )


def _searched_layers(llm: LLM) -> list[int]:
    """Returns the layers that have budgets: those without a sliding window, each in a group of its own."""
    groups = llm.backend.layout.groups
    if any(len(group.layers) > 1 for group in groups):
        raise UsageError("budgets of layers are tuned with a model that is loaded with KVCacheOptions(per_layer=True)")
    layers = sorted(group.layers[0] for group in groups if group.sliding_window is None)
    if not layers:
        raise UnsupportedError("all layers of this model have a sliding window; none has a budget that could be tuned")
    return layers


def _longest_prompt(llm: LLM, tasks: Sequence[Task], budget_tokens: int) -> int:
    """Returns the tokens of the longest prompt, unless there is nothing to tune by."""
    if not tasks:
        raise UsageError("there are no tasks to tune by; give at least one")
    lengths = [len(prompt_ids(llm, task)) for task in tasks]
    short = sum(length <= budget_tokens for length in lengths)
    if short == len(tasks):
        raise UsageError(
            f"no prompt is longer than the budget of {budget_tokens} tokens, the longest has {max(lengths)}: nothing "
            "is evicted; use a smaller budget or longer prompts"
        )
    if short:
        logger.warning(
            "%d of %d prompts are not longer than the budget of %d tokens: nothing is evicted of them, and they tell "
            "candidates apart only where a layer gets less",
            short,
            len(tasks),
            budget_tokens,
        )
    return max(lengths)
