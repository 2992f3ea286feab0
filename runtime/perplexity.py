"""Perplexity of a text, by the steps that generation takes.

The text is cut into windows that do not overlap. Each is read on its own, in chunks over the KV cache, so what is
measured is the decoder as it runs: lowered graph, cache and all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgekit.errors import DoesNotFitError, EdgeKitError, UsageError
from edgekit.progress import Progress
from edgekit.runtime.cache import KVCache
from edgekit.runtime.llm import LLM
from edgekit.runtime.step import StepRunner, causal_step

# Logits of a whole window would be the largest array of the process: 100 MB at 50 000 tokens of vocabulary.
CHUNK_TOKENS = 128


@dataclass(frozen=True, kw_only=True)
class PerplexityReport:
    """What was measured, and on how much.

    Attributes:
        perplexity: exp of `loss`.
        loss: Mean negative log-likelihood of the scored tokens, nats.
        windows: Windows that were read.
        window_tokens: Tokens per window.
        scored_tokens: Tokens whose likelihood counts: all of a window but its first.
        text_tokens: Tokens of the whole text, read or not.
    """

    perplexity: float
    loss: float
    windows: int
    window_tokens: int
    scored_tokens: int
    text_tokens: int


def perplexity(
    llm: LLM, text: str, *, windows: int | None = None, window_tokens: int = 512, progress: Progress | None = None
) -> PerplexityReport:
    """Measures how well a model predicts a text.

    No special tokens are added. Every token of a window but the first is scored; the tokens that fill no window are
    left out.

    Args:
        llm: The model.
        text: The text.
        windows: How many windows to read, from the start of the text; None for all.
        window_tokens: Tokens per window, >= 2.
        progress: Told of every window.

    Raises:
        UsageError: The text has fewer windows than asked for, or none, or an argument is out of range.
        DoesNotFitError: A window is longer than the context, or than the KV cache has room for.
        EdgeKitError: The model's logits are not finite.
    """
    memory = llm.plan.memory
    if window_tokens < 2:
        raise UsageError(f"window tokens is {window_tokens}; it must be at least 2, for one to be predicted")
    if windows is not None and windows < 1:
        raise UsageError(f"windows is {windows}; it must be at least 1")
    if window_tokens > memory.context_tokens:
        raise DoesNotFitError(
            f"windows of {window_tokens} tokens are longer than the context of {memory.context_tokens}; ask for "
            "shorter ones, or a larger context size"
        )
    if window_tokens > memory.capacity_tokens:
        raise DoesNotFitError(
            f"windows of {window_tokens} tokens are more than the {memory.capacity_tokens} that the KV cache has room "
            "for; ask for shorter ones, a smaller --kv-cache-dtype, or a larger memory budget"
        )
    token_ids = np.array(llm.tokenizer.encode(text, add_special_tokens=False), np.int64)
    count = _count_windows(len(token_ids), windows, window_tokens)
    cache = KVCache(llm.backend.layout, window_tokens)
    runner = llm.backend.runner(cache)
    total = 0.0
    for index, window in enumerate(token_ids[: count * window_tokens].reshape(count, window_tokens)):
        if progress is not None:
            progress("window", index, count)
        cache.truncate(0)
        total += _window_loss(runner, cache, window)
    loss = total / (count * (window_tokens - 1))
    if not math.isfinite(loss):
        raise EdgeKitError(
            f"the model's logits are not finite, so the text has a loss of {loss}; export it at a higher precision"
        )
    return PerplexityReport(
        perplexity=math.exp(loss),
        loss=loss,
        windows=count,
        window_tokens=window_tokens,
        scored_tokens=count * (window_tokens - 1),
        text_tokens=len(token_ids),
    )


def _count_windows(tokens: int, wanted: int | None, window_tokens: int) -> int:
    available = tokens // window_tokens
    if available == 0:
        raise UsageError(f"the text has {tokens} tokens, fewer than one window of {window_tokens}; give a longer text")
    if wanted is not None and wanted > available:
        raise UsageError(
            f"the text has {tokens} tokens, which fill {available} windows of {window_tokens}, fewer than the {wanted} "
            "asked for; give a longer text or ask for fewer windows"
        )
    return wanted or available


def _window_loss(runner: StepRunner, cache: KVCache, window: npt.NDArray[np.int64]) -> float:
    """Returns the summed negative log-likelihood, nats, of the tokens after the first; fills an empty cache."""
    total = 0.0
    for start in range(0, len(window), CHUNK_TOKENS):
        chunk, following = window[start : start + CHUNK_TOKENS], window[start + 1 : start + CHUNK_TOKENS + 1]
        outputs = runner.step(causal_step(chunk, start, np.arange(len(chunk)), len(window)))
        cache.append(outputs.stacks, range(len(chunk)))
        total += _loss(outputs.logits[: len(following)], following)
    return total


def _loss(logits: npt.NDArray[np.float32], targets: npt.NDArray[np.int64]) -> float:
    """Returns the summed negative log-likelihood in nats.

    Args:
        logits: shape (n, vocab), float32; overwritten.
        targets: Tokens that follow, shape (n,), int64.
    """
    with np.errstate(invalid="ignore"):  # infinite logits make a loss that is no number, which is found out
        logits -= logits.max(axis=1, keepdims=True)
    chosen = logits[np.arange(len(targets)), targets].astype(np.float64)
    totals = np.exp(logits, out=logits).sum(axis=1, dtype=np.float64)
    return float((np.log(totals) - chosen).sum())
