"""Turning logits into a token: what the caller may ask for, and the sampler that does it.

The order of operations and the meaning of each option are those of Hugging Face's `generate`: repetition
penalty, temperature, top-k, top-p, min-p. Names are OpenAI's and vLLM's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from edgekit.errors import EdgeKitError, UsageError, one_of

Logits: TypeAlias = npt.NDArray[np.float32]
History: TypeAlias = Collection[int] | npt.NDArray[np.integer[Any]]

MAX_LOGPROBS = 20
_MAX_SEED = 2**63 - 1
# A nucleus nearly always fits in so few candidates, which saves sorting the whole vocabulary.
_NUCLEUS_HEAD = 1024


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop.

    Greedy by default: the models of small devices lose more to an unlucky draw than they gain in variety.
    With `temperature` 0 the filters and the seed cannot change the choice, so they need not be reset.

    Attributes:
        max_tokens: Most tokens to generate, >= 1.
        temperature: Divides the logits; 0 is greedy decoding.
        top_p: Keep the fewest tokens whose probabilities sum to at least this, in (0, 1]; 1 is off.
        top_k: Keep this many tokens (and ties with the last); 0 is off.
        min_p: Keep tokens at least this fraction as likely as the likeliest, in [0, 1]; 0 is off.
        repetition_penalty: Divides the positive and multiplies the negative logits of tokens in the prompt
            and the output, in [0.01, 100]; 1 is off (Keskar et al. 2019, section 4.1).
        stop: Texts that end the generation; they are not part of the output. A lone string becomes a tuple.
        seed: Makes the draws reproducible, in [0, 2**63); None draws differently every time.
        logprobs: Report the log-probability of each token and of this many likeliest ones, in [0, 20];
            None reports nothing. They are the model's own, before penalty and temperature, as in OpenAI's API.
        ignore_eos: Go on after an end token until `max_tokens`; for benchmarks.

    Raises:
        UsageError: A value has the wrong type or is out of range.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int | None = None
    logprobs: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        _require_int("max_tokens", self.max_tokens, 1)
        _require_real("temperature", self.temperature, ">= 0", lambda value: value >= 0)
        _require_real("top_p", self.top_p, "in (0, 1]", lambda value: 0 < value <= 1)
        _require_int("top_k", self.top_k, 0)
        _require_real("min_p", self.min_p, "in [0, 1]", lambda value: 0 <= value <= 1)
        _require_real(
            "repetition_penalty", self.repetition_penalty, "in [0.01, 100]", lambda value: 0.01 <= value <= 100
        )
        if self.seed is not None:
            _require_int("seed", self.seed, 0, _MAX_SEED)
        if self.logprobs is not None:
            _require_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _require_bool("ignore_eos", self.ignore_eos)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> SamplingParams:
        """Builds parameters from a JSON object or a configuration table.

        Args:
            mapping: Field names and values; missing fields take their defaults.

        Raises:
            UsageError: A field is unknown, has the wrong type or is out of range.
        """
        if not isinstance(mapping, Mapping):
            raise UsageError(f"sampling options are {mapping!r}; they must be a mapping from names to values")
        known = [field.name for field in fields(cls)]
        for name in mapping:
            if name not in known:
                raise UsageError(f"unknown sampling option {one_of(str(name), known)}")
        return cls(**mapping)


def _require_int(name: str, value: object, low: int, high: int | None = None) -> None:
    allowed = f">= {low}" if high is None else f"in [{low}, {high}]"
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        raise UsageError(f"{name} is {value!r}; it must be an integer {allowed}")


def _require_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise UsageError(f"{name} is {value!r}; it must be true or false")


def _require_real(name: str, value: object, allowed: str, accepts: Callable[[float], bool]) -> None:
    try:
        valid = isinstance(value, (int, float)) and not isinstance(value, bool)
        valid = valid and math.isfinite(value) and accepts(value)  # type: ignore[arg-type]
    except OverflowError:  # an int beyond the range of floats
        valid = False
    if not valid:
        raise UsageError(f"{name} is {value!r}; it must be a finite number {allowed}")


def _stop_strings(value: object) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, (tuple, list)) or not all(isinstance(text, str) and text for text in texts):
        raise UsageError(f"stop is {value!r}; it must be a text or a list of texts, none of them empty")
    return tuple(texts)


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledToken:
    """A chosen token.

    Attributes:
        token_id: Its id.
        logprob: Natural logarithm of its probability under the model; None unless `logprobs` was asked for.
        top_logprobs: The likeliest (token id, log-probability) pairs, likeliest first, as many as asked for.
    """

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


class Sampler:
    """Chooses one token after another for one generation."""

    def __init__(self, params: SamplingParams, *, vocab_size: int | None = None) -> None:
        """Starts a generation; with a seed, two samplers make the same draws.

        Args:
            params: What was asked for.
            vocab_size: Number of token ids that the tokenizer knows. Logits beyond it belong to the padding of
                the model's embedding: they are never chosen and have no share of any probability. None if
                every logit has a token.
        """
        self._params = params
        self._vocab_size = vocab_size
        self._random = np.random.default_rng(params.seed)

    def sample(self, logits: Logits, history: History = ()) -> SampledToken:
        """Chooses a token.

        Args:
            logits: The model's output for one position, shape (vocab,), float32; not modified.
            history: Token ids of the prompt and the output so far, in any order, repeated or not; read only
                if there is a repetition penalty.

        Returns:
            The token; of equally likely ones, greedy decoding takes the lowest id.

        Raises:
            EdgeKitError: The logits have a NaN or no finite value.
        """
        logits, likeliest = self._usable(logits)
        scores = self._penalized(logits, history)
        if self._params.temperature == 0:
            token_id = likeliest if scores is logits else int(np.argmax(scores))
        else:
            ids, weights = self._candidates(scores)
            token_id = int(ids[self._draw(weights)])
        if self._params.logprobs is None:
            return SampledToken(token_id=token_id)
        return _with_logprobs(token_id, logits, self._params.logprobs)

    def probabilities(self, logits: Logits, history: History = ()) -> npt.NDArray[np.float64]:
        """Returns the distribution that `sample` draws from, without drawing.

        Args:
            logits: As for `sample`.
            history: As for `sample`.

        Returns:
            Probabilities, shape (vocab,), float64; one-hot for greedy decoding.

        Raises:
            EdgeKitError: The logits have a NaN or no finite value.
        """
        distribution = np.zeros(logits.shape[0], dtype=np.float64)
        scores = self._penalized(self._usable(logits)[0], history)
        if self._params.temperature == 0:
            distribution[np.argmax(scores)] = 1.0
        else:
            ids, weights = self._candidates(scores)
            distribution[ids] = weights / weights.sum()
        return distribution

    def _usable(self, logits: Logits) -> tuple[Logits, int]:
        """Returns the logits of tokens, and the likeliest one."""
        logits = logits[: self._vocab_size]
        likeliest = int(np.argmax(logits))  # argmax stops at a NaN, so one pass finds every fault
        best = logits[likeliest]
        if not np.isfinite(best):
            raise EdgeKitError(
                f"the model returned logits whose largest value is {best}, so no token can be chosen; "
                "its activations overflowed: run it at a higher precision"
            )
        return logits, likeliest

    def _penalized(self, logits: Logits, history: History) -> Logits:
        penalty = self._params.repetition_penalty
        if penalty == 1.0:
            return logits
        ids = history if isinstance(history, np.ndarray) else np.fromiter(history, np.int64, len(history))
        ids = ids[ids < logits.shape[0]]
        seen = logits[ids]
        scores = logits.copy()
        scores[ids] = np.where(seen < 0, seen * penalty, seen / penalty)
        return scores

    def _candidates(self, scores: Logits) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Returns the ids that may be drawn and their unnormalized probabilities, both of shape (candidates,)."""
        params, size = self._params, scores.shape[0]
        ids = _at_least_top(scores, params.top_k) if 0 < params.top_k < size else np.arange(size)
        weights = scores[ids].astype(np.float64)
        weights -= weights.max()
        with np.errstate(over="ignore"):  # a tiny temperature sends the losers to -inf, which is right
            weights /= params.temperature
        np.exp(weights, out=weights)
        if params.top_p < 1:
            kept = _nucleus(weights, params.top_p)
            ids, weights = ids[kept], weights[kept]
        if params.min_p > 0:
            likely = weights >= params.min_p  # the largest weight is exp(0)
            ids, weights = ids[likely], weights[likely]
        return ids, weights

    def _draw(self, weights: npt.NDArray[np.float64]) -> int:
        """Inverts the cumulative distribution: one uniform number per token, whatever the filters."""
        cumulative = np.cumsum(weights)
        # At most 1 - 2**-53, the number times the sum rounds to less than the sum, so an index is always found.
        return int(np.searchsorted(cumulative, self._random.random() * cumulative[-1], side="right"))


def _at_least_top(scores: Logits, count: int) -> npt.NDArray[np.int64]:
    """Returns the ids, ascending, of the `count` largest scores and of every tie with the last."""
    position = scores.shape[0] - count
    return np.flatnonzero(scores >= np.partition(scores, position)[position])


def _nucleus(weights: npt.NDArray[np.float64], top_p: float) -> npt.NDArray[np.int64]:
    """Returns the indices of the fewest weights that make up `top_p` of the sum (Holtzman et al. 2020)."""
    size, wanted = weights.shape[0], top_p * weights.sum()
    count, head = _NUCLEUS_HEAD, np.arange(size)
    while count < size:
        largest = np.argpartition(weights, -count)[-count:]
        if weights[largest].sum() >= wanted:
            head = largest
            break
        count *= 8
    order = head[np.argsort(-weights[head], kind="stable")]
    below = np.searchsorted(np.cumsum(weights[order]), wanted, side="left")
    return order[: below + 1]


def _with_logprobs(token_id: int, logits: Logits, count: int) -> SampledToken:
    top = logits.max()
    log_total = float(top) + math.log(float(np.exp(logits - top).sum(dtype=np.float64)))
    count = min(count, logits.shape[0])
    likeliest = _at_least_top(logits, count) if count else np.empty(0, np.int64)
    order = np.argsort(-logits[likeliest], kind="stable")[:count]
    return SampledToken(
        token_id=token_id,
        logprob=float(logits[token_id]) - log_total,
        top_logprobs=tuple((int(i), float(logits[i]) - log_total) for i in likeliest[order] if np.isfinite(logits[i])),
    )
