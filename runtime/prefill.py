"""Reading known tokens into a KV cache, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgekit.runtime.cache import KVCache
from edgekit.runtime.cache_arrays import FloatArray
from edgekit.runtime.step import StepRunner, causal_step

TokenArray = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How tokens are read.

    Attributes:
        sequence_length: Tokens of the whole text.
        chunk_tokens: Tokens of a step.
        following: Tokens to make room for after all of these.
        observed_tokens: How many of the last ones make a step of their own, for the attention that these alone give.
        make_room: Called before every step with the number of its tokens.
    """

    sequence_length: int
    chunk_tokens: int
    following: int = 0
    observed_tokens: int = 0
    make_room: Callable[[int], None] = lambda _: None


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Tokens that are in the cache now.

    Attributes:
        token_ids: shape (n,), int64.
        logits: Of the wanted tokens among them, shape (w, V), float32; overwritten by the next chunk.
        attention_mass: As of `StepOutputs`; overwritten by the next chunk.
    """

    token_ids: TokenArray
    logits: FloatArray
    attention_mass: Sequence[FloatArray]


def read_chunks(
    runner: StepRunner, cache: KVCache, token_ids: TokenArray, wanted: TokenArray, options: ReadOptions
) -> Iterator[Chunk]:
    """Appends tokens to a conversation; who stops asking leaves the rest unread.

    Args:
        runner: Runs the steps, over `cache`.
        cache: The conversation so far.
        token_ids: The next tokens, shape (n,), int64.
        wanted: Those of them whose logits are wanted, ascending indices, shape (w,), int64.
        options: See `ReadOptions`.

    Raises:
        DoesNotFitError: The conversation becomes longer than there is room for.
    """
    for start, end in _bounds(len(token_ids), options):
        chunk = token_ids[start:end]
        here = wanted[(wanted >= start) & (wanted < end)] - start
        # The graph wants to be asked for one row at least.
        rows = here if len(here) else np.array([len(chunk) - 1])
        options.make_room(len(chunk))
        inputs = causal_step(chunk, cache.next_position, rows, options.sequence_length)
        outputs = runner.step(inputs)
        cache.reserve(len(chunk), following=len(token_ids) - end + options.following)
        cache.append(outputs.stacks, range(len(chunk)))
        yield Chunk(token_ids=chunk, logits=outputs.logits[: len(here)], attention_mass=outputs.attention_mass)


def _bounds(count: int, options: ReadOptions) -> Iterator[tuple[int, int]]:
    """Yields the first token of every chunk and the one after its last."""
    observed = max(0, count - options.observed_tokens)
    for start in range(0, observed, options.chunk_tokens):
        yield start, min(start + options.chunk_tokens, observed)
    if observed < count:
        yield observed, count
