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

from typing import ClassVar

from edgekit.cache_layout import CacheLayout
from edgekit.errors import UnsupportedError, UsageError
from edgekit.runtime.cache import KVCache
from edgekit.runtime.cache_arrays import FloatArray, StackArrays
from edgekit.runtime.policies.base import CachePolicy, PolicyOptions
from edgekit.runtime.rotation import turned
from edgekit.spec import DecoderSpec

SINK_TOKENS = 4
MAX_POSITION = 1 << 15


class Window(CachePolicy):
    """Keeps sinks and recent tokens."""

    makes_room: ClassVar[bool] = True

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
        self._sinks: list[FloatArray] = []
        self._turned = 0

    def slots(self, max_tokens: int) -> int:
        """Returns the budget, where there is one."""
        return min(max_tokens, self.options.budget_tokens or max_tokens)

    def make_room(self, cache: KVCache, tokens: int) -> None:
        """Evicts what a step leaves no room for."""
        missing = tokens - cache.room
        if missing <= 0:
            return
        evicted = max(missing, self.eviction_tokens(cache.max_tokens))
        if not self._sinks:
            self._sinks = [stack.float_keys(slice(SINK_TOKENS)) for stack in cache.stacks]
        cache.slide(evicted, sinks=SINK_TOKENS)
        self._turned += evicted
        self._turn_sinks(cache)
        if cache.next_position > MAX_POSITION:
            self._turn_back(cache)

    @staticmethod
    def eviction_tokens(max_tokens: int) -> int:
        """Returns how many tokens are evicted at a time: turning the sinks costs the same for one as for many."""
        return max(1, min(32, max_tokens // 16))

    def _turn_sinks(self, cache: KVCache) -> None:
        for arrays, sinks in zip(cache.stacks, self._sinks, strict=True):
            if self.layout.groups[arrays.stack.group].sliding_window is None:
                arrays.set_float_keys(slice(SINK_TOKENS), turned(sinks, self.spec, arrays.stack, self._turned))

    def _turn_back(self, cache: KVCache) -> None:
        """Lowers all positions, to as many as there are tokens."""
        excess = cache.next_position - cache.live

        def turn(arrays: StackArrays) -> None:
            for layer in arrays.layers():  # one at a time, for little memory
                layer.set_float_keys(
                    slice(None), turned(layer.float_keys(slice(None)), self.spec, layer.stack, -excess)
                )

        cache.lower_positions(excess, turn)
        self._turned -= excess
        self._turn_sinks(cache)
