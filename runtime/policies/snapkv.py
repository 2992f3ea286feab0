"""SnapKV (Li et al. 2024, arXiv 2404.14469): of a prompt, keep what its end attends to.

The last `OBSERVED_TOKENS` tokens of a prompt are the observation window, read in a step of their own. What they attend
to, summed over them and over the query heads of a KV head, scores the tokens before them (section 4.1, equation 1; the
sum over the heads that share a KV head is ours, so that a slot is kept or dropped as a whole). Scores are max-pooled
over `POOLING_TOKENS` neighbours, for runs of tokens to stay together (section 4.2). Each KV head of each layer keeps
the tokens with the highest scores, and all of the window; they may differ from head to head, and are gathered once.

A later turn of the conversation is scored by its own last tokens, over what was kept so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from edgekit.cache_layout import CacheLayout
from edgekit.errors import UnsupportedError, UsageError
from edgekit.runtime.cache import KVCache
from edgekit.runtime.cache_arrays import FloatArray, SlotArray
from edgekit.runtime.policies.base import CachePolicy, PolicyOptions, ReadPrompt
from edgekit.spec import DecoderSpec

OBSERVED_TOKENS = 32
POOLING_TOKENS = 7


class SnapKV(CachePolicy):
    """Compresses every prompt to a budget once it is read."""

    needs_attention_mass: ClassVar[bool] = True

    def __init__(self, options: PolicyOptions, spec: DecoderSpec, layout: CacheLayout) -> None:
        """Refuses a budget that has no room for the observation window, and budgets that layers cannot have."""
        super().__init__(options, spec, layout)
        self.observed_tokens = OBSERVED_TOKENS
        if all(group.sliding_window is not None for group in layout.groups):
            raise UnsupportedError(
                f"KV policy {options.name!r} compresses layers that see the whole text, and all layers of this model "
                "have a sliding window; use 'stop' or 'window'"
            )
        self._check_layers(options)
        smallest = min(options.layer_budgets_tokens or (options.budget_tokens or 0,))
        if smallest <= OBSERVED_TOKENS:
            raise UsageError(
                f"KV policy {options.name!r} needs a budget of more than {OBSERVED_TOKENS} tokens per layer, which are "
                f"the end of the prompt; got {smallest}"
            )

    def _check_layers(self, options: PolicyOptions) -> None:
        budgets, count = options.layer_budgets_tokens, len(self.spec.layers)
        if budgets is None:
            return
        if len(budgets) != count:
            raise UsageError(f"KV policy {options.name!r} got budgets of {len(budgets)} layers, the model has {count}")
        if any(len({budgets[layer] for layer in group.layers}) > 1 for group in self.layout.groups):
            raise UsageError(
                f"KV policy {options.name!r} got layer budgets that the model was not loaded with; pass the cache "
                "profile when it is loaded"
            )

    def after_prompt(self, prompt: ReadPrompt) -> None:
        """Compresses the cache, if a layer holds more than its budget."""
        if self.exceeds_budget(prompt.cache):
            chosen = self.choose(prompt.cache, prompt.attention_mass, prompt.observed_tokens)
            prompt.cache.become(prompt.cache.selected(chosen, give_back=True))

    def budget(self, group: int) -> int:
        """Returns the tokens that the layers of a group keep."""
        if self.options.layer_budgets_tokens is not None:
            return self.options.layer_budgets_tokens[self.layout.groups[group].layers[0]]
        assert self.options.budget_tokens is not None
        return self.options.budget_tokens

    def exceeds_budget(self, cache: KVCache) -> bool:
        """Whether a layer without a sliding window holds more than its budget."""
        groups = enumerate(zip(self.layout.groups, cache.maps, strict=True))
        return any(group.sliding_window is None and slots.live > self.budget(i) for i, (group, slots) in groups)

    def choose(self, cache: KVCache, attention_mass: Sequence[FloatArray], newest: int) -> list[SlotArray | None]:
        """Returns what each stack keeps, as `KVCache.selected` takes it.

        Args:
            cache: Holds all tokens.
            attention_mass: What slots got, by stack, shape (layers, KV, slots or more), float32.
            newest: Last tokens that are kept in any case.
        """
        chosen: list[SlotArray | None] = []
        for stack, mass in zip(self.layout.stacks, attention_mass, strict=True):
            slots, budget = cache.maps[stack.group].order(), self.budget(stack.group)
            if self.layout.groups[stack.group].sliding_window is not None:
                chosen.append(None)
            elif len(slots) <= budget:
                chosen.append(np.broadcast_to(slots, (*mass.shape[:2], len(slots))))
            else:
                older, last = np.split(slots, [len(slots) - newest])
                best = highest(pooled(mass[..., older]), budget - newest)
                tail = np.broadcast_to(last, (*mass.shape[:2], newest))
                chosen.append(np.concatenate([older[best], tail], axis=2))
        return chosen


def pooled(scores: FloatArray) -> FloatArray:
    """Replaces each score by the largest of `POOLING_TOKENS` neighbours, itself in the middle, along the last axis."""
    side = POOLING_TOKENS // 2
    padded = np.pad(scores, [(0, 0)] * (scores.ndim - 1) + [(side, side)], constant_values=-np.inf)
    result: FloatArray = np.lib.stride_tricks.sliding_window_view(padded, POOLING_TOKENS, axis=-1).max(axis=-1)
    return result


def highest(scores: FloatArray, count: int) -> SlotArray:
    """Returns the indices of the highest scores along the last axis, ascending; of equals, the later ones."""
    ranked = np.argsort(scores, axis=-1, kind="stable")
    result: SlotArray = np.sort(ranked[..., scores.shape[-1] - count :], axis=-1)
    return result
