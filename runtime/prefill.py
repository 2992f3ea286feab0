"""Reading known tokens into a KV cache, chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from edgekit.runtime.cache import KVCache
from edgekit.runtime.step import StepRunner, causal_step

TokenArray = npt.NDArray[np.int64]


def read_chunks(
    runner: StepRunner,
    cache: KVCache,
    token_ids: TokenArray,
    wanted: TokenArray,
    *,
    sequence_length: int,
    chunk_tokens: int,
    following: int = 0,
) -> Iterator[tuple[TokenArray, npt.NDArray[np.float32]]]:
    """Appends tokens to a conversation; who stops asking leaves the rest unread.

    Args:
        runner: Runs the steps, over `cache`.
        cache: The conversation so far.
        token_ids: The next tokens, shape (n,), int64.
        wanted: Those of them whose logits are wanted, ascending indices, shape (w,), int64.
        sequence_length: Tokens of the whole text.
        chunk_tokens: Tokens of a step.
        following: Tokens to make room for after all of these.

    Yields:
        The tokens of a chunk that is in the cache, and the logits of the wanted ones among them, float32,
        overwritten by the next chunk.

    Raises:
        DoesNotFitError: The conversation becomes longer than the context.
    """
    for start in range(0, len(token_ids), chunk_tokens):
        chunk = token_ids[start : start + chunk_tokens]
        here = wanted[(wanted >= start) & (wanted < start + len(chunk))] - start
        # The graph wants to be asked for one row at least.
        rows = here if len(here) else np.array([len(chunk) - 1])
        outputs = runner.step(causal_step(chunk, cache.length, rows, sequence_length))
        cache.reserve(len(chunk), following=len(token_ids) - start - len(chunk) + following)
        cache.append(outputs.stacks, range(len(chunk)))
        yield chunk, outputs.logits[: len(here)]
