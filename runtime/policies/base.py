"""The interface of a KV cache policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from edgekit.cache_layout import CacheLayout
from edgekit.errors import UsageError
from edgekit.runtime.cache import KVCache
from edgekit.runtime.cache_arrays import FloatArray
from edgekit.runtime.step import StepRunner
from edgekit.spec import DecoderSpec


@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """What a conversation does when its KV cache is full.

    Attributes:
        name: A key of `edgekit.runtime.policies.POLICIES`.
        budget_tokens: Tokens to keep, per layer, of what was read: of a prompt for snapkv and laq, at any time for
            window. None for all that there is room for.
        layer_budgets_tokens: The same for each layer, of a cache profile; takes the place of `budget_tokens`.
    """

    name: str = "stop"
    budget_tokens: int | None = None
    layer_budgets_tokens: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class ReadPrompt:
    """A prompt right after it was read.

    Attributes:
        cache: Holds all of it.
        token_ids: The conversation so far.
        observed_tokens: How many of its last tokens were read in a step of their own.
        sequence_length: Tokens of the whole text that its keys were rotated for, as of `StepInputs`.
        logits: Of its last token, shape (V,), float32.
        attention_mass: What the observed tokens attended to, as of `StepOutputs`: the axis of slots is that of the
            cache before they were appended.
        runner: Runs steps over the cache.
        start: Starts a conversation over another cache.
    """

    cache: KVCache
    token_ids: Sequence[int]
    observed_tokens: int
    sequence_length: int
    logits: FloatArray
    attention_mass: Sequence[FloatArray]
    runner: StepRunner
    start: Callable[[KVCache], StepRunner]


class CachePolicy:
    """Decides what a conversation keeps; this base keeps everything.

    Attributes:
        needs_attention_mass: Whether it goes by the attention that tokens get.
        makes_room: Whether a conversation goes on forever.
        sink_tokens: First tokens that stay when others are evicted.
        observed_tokens: Last tokens of a prompt whose attention it wants to see.
    """

    needs_attention_mass: ClassVar[bool] = False
    makes_room: ClassVar[bool] = False
    sink_tokens: ClassVar[int] = 0
    observed_tokens: int = 0

    def __init__(self, options: PolicyOptions, spec: DecoderSpec, layout: CacheLayout) -> None:
        """Starts a conversation's policy.

        Raises:
            UsageError: A budget is out of range.
            UnsupportedError: The policy cannot work with the model.
        """
        for budget in (options.budget_tokens, *(options.layer_budgets_tokens or ())):
            if budget is not None and (type(budget) is not int or budget < 1):
                raise UsageError(f"KV budget is {budget!r} tokens; it must be an integer of at least 1")
        self.options, self.spec, self.layout = options, spec, layout

    def slots(self, max_tokens: int) -> int:
        """Returns how many slots the cache may have, at most `max_tokens`.

        Raises:
            DoesNotFitError: The policy needs more.
        """
        return max_tokens

    def make_room(self, cache: KVCache, tokens: int) -> None:
        """Called before a step over new tokens that are to be appended."""

    def after_prompt(self, prompt: ReadPrompt) -> None:
        """Called once a prompt was read, before the first token is drawn."""

    def reset(self) -> None:
        """Called when the conversation starts anew."""

    def state(self) -> Mapping[int, FloatArray]:
        """Returns what it remembers of the conversation besides the cache: keys of some tokens, by stack.

        Of each, shape (layers, KV, dk, n), float32.
        """
        return {}

    def restore(self, state: Mapping[int, FloatArray]) -> None:
        """Called when the conversation is another one, whose `state` this is."""
