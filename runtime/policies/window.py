"""window: attention sinks and the most recent tokens, StreamingLLM (Xiao et al. 2023, arXiv 2309.17453).

When the cache is full, the oldest tokens but the first `SINK_TOKENS` are evicted, `eviction_tokens` at a time. Their
slots are free for new ones: the cost of a step and the memory stay what they are, however long the conversation.

Positions are those within the cache, as the paper has them (section 3.2): the distance from a token to a sink is the
number of tokens that are held between them, not the number that there once were, so no distance is ever longer than the
cache. Only distances matter to rotary embedding; so recent tokens keep their positions, and the few sinks are turned
forward by as many positions as tokens were evicted. They are turned from a copy of what they were at first, which adds
no rounding to rounding.

Positions grow with the conversation, and angles in float32 with them lose digits. From `MAX_POSITION` on, everything is
turned back, which takes a fraction of a second once in many thousand tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import numpy as np

from edgekit.cache_layout import CacheLayout, Stack
from edgekit.errors import DoesNotFitError, UnsupportedError, UsageError
from edgekit.runtime.cache import KVCache
from edgekit.runtime.cache_arrays import FloatArray, SlotArray, StackArrays, as_slice
from edgekit.runtime.policies.base import CachePolicy, PolicyOptions
from edgekit.runtime.rotation import turned
from edgekit.spec import DecoderSpec

SINK_TOKENS = 4
MAX_POSITION = 1 << 15


class Window(CachePolicy):
    """Keeps sinks and recent tokens."""

    makes_room: ClassVar[bool] = True
    sink_tokens: ClassVar[int] = SINK_TOKENS

    def __init__(self, options: PolicyOptions, spec: DecoderSpec, layout: CacheLayout) -> None:
        """Refuses models whose rotations follow from the length of the text, and budgets without recent tokens."""
        super().__init__(options, spec, layout)
        if spec.depends_on_length:
            raise UnsupportedError(
                "KV policy 'window' keeps positions within the cache, and this model's rotary frequencies depend on "
                "the length of the whole text; use 'stop', 'snapkv' or 'laq'"
            )
        if options.layer_budgets_tokens is not None:
            raise UsageError(
                "KV policy 'window' keeps the same tokens in all layers; cache profiles are for snapkv and laq"
            )
        if options.budget_tokens is not None and options.budget_tokens < 2 * SINK_TOKENS:
            raise UsageError(
                f"KV policy 'window' needs a budget of at least {2 * SINK_TOKENS} tokens, {SINK_TOKENS} of which are "
                f"sinks; got {options.budget_tokens}"
            )
        self.reset()

    def reset(self) -> None:
        """Forgets the sinks."""
        self._sinks: dict[int, FloatArray] = {}
        self._are_turned = True

    def slots(self, max_tokens: int) -> int:
        """Returns the budget, where there is one."""
        slots = min(max_tokens, self.options.budget_tokens or max_tokens)
        if slots < 2 * SINK_TOKENS:
            raise DoesNotFitError(
                f"KV policy 'window' needs room for at least {2 * SINK_TOKENS} tokens, {SINK_TOKENS} of which are "
                f"sinks; there is room for {slots}"
            )
        return slots

    def make_room(self, cache: KVCache, tokens: int) -> None:
        """Evicts what a step leaves no room for."""
        missing = tokens - cache.room
        if missing > 0:
            if not cache.slid_tokens:
                self._sinks = {i: cache.stacks[i].float_keys(_first(cache, stack)) for i, stack in _sliding(cache)}
            self._are_turned = False  # until they are, whatever interrupts this
            cache.slide(max(missing, self.eviction_tokens(cache.max_tokens)), sinks=SINK_TOKENS)
        if not self._are_turned:
            self._turn_sinks(cache)
        if cache.next_position > MAX_POSITION:
            self._turn_back(cache)

    @staticmethod
    def eviction_tokens(max_tokens: int) -> int:
        """Returns how many tokens are evicted at a time: turning the sinks costs the same for one as for many."""
        return max(1, min(32, max_tokens // 16))

    def state(self) -> Mapping[int, FloatArray]:
        """Returns the sinks' keys as they were at first, by stack."""
        return self._sinks

    def restore(self, state: Mapping[int, FloatArray]) -> None:
        """Takes over the sinks."""
        self._sinks = dict(state)
        self._are_turned = True

    def _turn_sinks(self, cache: KVCache) -> None:
        """Turns the sinks to the positions right before those of the tokens that are left."""
        cache.place(SINK_TOKENS)
        if cache.slid_tokens:
            for index, stack in _sliding(cache):
                keys = turned(self._sinks[index], self.spec, stack, cache.slid_tokens - cache.shift)
                cache.stacks[index].set_float_keys(_first(cache, stack), keys)
        self._are_turned = True

    def _turn_back(self, cache: KVCache) -> None:
        """Lowers all positions, to as many as there are tokens."""
        excess = cache.next_position - cache.live

        def turn(arrays: StackArrays) -> None:
            for layer in arrays.layers():  # one at a time, for little memory
                layer.set_float_keys(
                    slice(None), turned(layer.float_keys(slice(None)), self.spec, layer.stack, -excess)
                )

        cache.lower_positions(excess, turn)
        self._turn_sinks(cache)


def _sliding(cache: KVCache) -> Iterator[tuple[int, Stack]]:
    """Yields index and stack of the layers whose tokens are evicted here."""
    return ((i, stack) for i, stack in enumerate(cache.layout.stacks) if not cache.is_windowed(stack.group))


def _first(cache: KVCache, stack: Stack) -> SlotArray | slice:
    """Returns the slots of the sinks."""
    return as_slice(np.array(cache.maps[stack.group].oldest(SINK_TOKENS), np.int64))
