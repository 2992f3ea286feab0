"""One step of a decoder: new tokens in, logits and new keys and values out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from edgekit.cache_layout import CacheLayout
from edgekit.contract import MASKED
from edgekit.runtime.cache import KVCache
from edgekit.runtime.cache_arrays import FloatArray, StackArrays


@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """New tokens of one step.

    Attributes:
        token_ids: shape (S,), int64.
        position_ids: shape (S,), int64.
        new_bias: shape (S, S), float32: row s is 0 where token s sees a new token and `MASKED` elsewhere.
        logit_rows: shape (R,), int64: new tokens whose logits are wanted.
        sequence_length: Tokens of the whole text: past, new, and those of the prompt that are still to come.
    """

    token_ids: npt.NDArray[np.int64]
    position_ids: npt.NDArray[np.int64]
    new_bias: npt.NDArray[np.float32]
    logit_rows: npt.NDArray[np.int64]
    sequence_length: int


@dataclass(frozen=True, kw_only=True)
class StepOutputs:
    """Results of one step; the arrays are overwritten by the next step of the same kind.

    Attributes:
        logits: shape (R, V), float32.
        stacks: New keys and values, one per stack of the cache.
        attention_mass: Of a graph that says it: probability that slots and new tokens got, summed over the query heads
            of a KV head and over the new tokens, one array per stack, shape (layers, KV, capacity + S), float32.
    """

    logits: npt.NDArray[np.float32]
    stacks: Sequence[StackArrays]
    attention_mass: Sequence[FloatArray] = ()


class StepRunner(Protocol):
    """Runs steps of one conversation."""

    def step(self, inputs: StepInputs) -> StepOutputs:
        """Runs the decoder on new tokens over the conversation's cache, which stays as it is."""


class Backend(Protocol):
    """A decoder, loaded and ready to run."""

    @property
    def layout(self) -> CacheLayout:
        """How it wants the cache."""

    @property
    def has_attention_mass(self) -> bool:
        """Whether its steps can say which tokens are attended to."""

    def runner(self, cache: KVCache) -> StepRunner:
        """Starts a conversation that keeps its past in `cache`."""


def causal_step(
    token_ids: npt.NDArray[np.int64],
    start: int,
    logit_rows: npt.NDArray[np.int64],
    sequence_length: int | None = None,
) -> StepInputs:
    """A chain of tokens, each of which sees those before it.

    Args:
        token_ids: shape (S,), int64.
        start: Position of the first.
        logit_rows: shape (R,), int64.
        sequence_length: Tokens of the whole text; None when it ends with these.
    """
    count = len(token_ids)
    return StepInputs(
        token_ids=token_ids,
        position_ids=np.arange(start, start + count, dtype=np.int64),
        new_bias=np.triu(np.full((count, count), MASKED, np.float32), 1),
        logit_rows=logit_rows,
        sequence_length=start + count if sequence_length is None else sequence_length,
    )
