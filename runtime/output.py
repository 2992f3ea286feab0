"""What a generation returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from edgekit.runtime.sampling import SampledToken

FinishReason: TypeAlias = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Token counts.

    Attributes:
        prompt_tokens: Tokens of the prompt, whether computed or found in the cache.
        cached_tokens: Those found in the cache.
        completion_tokens: Tokens generated.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True, kw_only=True)
class Timings:
    """Wall-clock times, seconds.

    Attributes:
        first_token_s: From the call to the first token: tokenization, waiting for other threads, and prefill; 0
            when there is none.
        decode_s: From the first token to the last.
        decode_tokens_per_s: Rate of the tokens after the first; 0 when there is only one.
    """

    first_token_s: float
    decode_s: float
    decode_tokens_per_s: float


@dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """A finished generation.

    Attributes:
        text: The text, without stop strings and end tokens.
        token_ids: Every token generated, an end token included.
        finish_reason: `stop` for an end token or a stop string, `length` for max_tokens or a full context,
            `cancelled` when it was interrupted.
        usage: Token counts.
        timings: Wall-clock times.
        logprobs: One entry per token when they were asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    logprobs: tuple[SampledToken, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class CompletionChunk:
    """A piece of a running generation.

    Attributes:
        text: Text since the last piece, whole characters only; may be empty.
        output: The finished generation, on the last piece.
    """

    text: str
    output: CompletionOutput | None = None
