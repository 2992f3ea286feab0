"""One conversation: its tokens, its KV cache, and the loop that extends both."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgekit.errors import DoesNotFitError, UsageError
from edgekit.runtime.cache import KVCache
from edgekit.runtime.chat import Message
from edgekit.runtime.policies import PolicyOptions, make_policy
from edgekit.runtime.policies.base import ReadPrompt
from edgekit.runtime.prefill import Chunk, ReadOptions, read_chunks
from edgekit.runtime.sampling import SampledToken, Sampler, SamplingParams
from edgekit.runtime.session_state import SessionState, read_state, write_state
from edgekit.runtime.step import Backend
from edgekit.runtime.strategies.base import Strategy, accept
from edgekit.spec import DecoderSpec

# Matrix products gain nothing from larger chunks, and the attention scores of a chunk take memory.
PREFILL_CHUNK_TOKENS = 128
# Room that a prompt leaves in the cache, for the first tokens of an answer not to move all that was read.
ANSWER_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class SessionLimits:
    """What a conversation may take.

    Attributes:
        max_tokens: Slots of the KV cache.
        max_positions: Positions of its tokens: those that the model was trained on, unless the user wants more.
        chunk_tokens: Tokens of a step that reads a prompt.
    """

    max_tokens: int
    max_positions: int
    chunk_tokens: int = PREFILL_CHUNK_TOKENS


def default_limits(spec: DecoderSpec) -> SessionLimits:
    """Returns the limits of a conversation that nothing but the model's context limits."""
    return SessionLimits(
        max_tokens=spec.max_positions, max_positions=spec.max_positions, chunk_tokens=PREFILL_CHUNK_TOKENS
    )


class Session:
    """State of one conversation.

    A generation that was interrupted anywhere, by an exception or a signal, leaves a usable conversation: the
    next one keeps of the cache what it can vouch for.

    Attributes:
        spec: The decoder.
        backend: Runs its steps.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        backend: Backend,
        strategy: Strategy,
        limits: SessionLimits | None = None,
        policy: PolicyOptions | None = None,
        bundle_digest: str | None = None,
    ) -> None:
        """Starts an empty conversation.

        Args:
            spec: The decoder.
            backend: Runs its steps.
            strategy: Proposes what a step computes.
            limits: What the conversation may take; the model's context when None.
            policy: What it does when its cache is full; "stop" when None.
            bundle_digest: Identity of the model's bundle, for `save` and `load`; None for neither.

        Raises:
            UsageError: There is no such policy, or its budget is out of range.
            UnsupportedError: The policy cannot work with the model or its bundle.
            DoesNotFitError: The policy needs more slots than the limits allow.
        """
        self.spec = spec
        self.backend = backend
        self.limits = limits or default_limits(spec)
        self.policy = make_policy(policy or PolicyOptions(), spec, backend)
        slots = self.policy.slots(self.limits.max_tokens)
        # A conversation that goes on forever has positions within its cache.
        positions = None if self.policy.makes_room else self.limits.max_positions
        self._cache = KVCache(backend.layout, slots, positions)
        self._chunk_tokens = min(self.limits.chunk_tokens, max(1, slots // 2))
        self._runner = backend.runner(self._cache)
        self._strategy = strategy
        self._token_ids: list[int] = []
        self._rope_range = 0
        self._has_rope_ranges = spec.rope_range(spec.max_positions) > 0
        self._cancelled = False
        self._bundle_digest = bundle_digest

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens that were read, those included that the KV policy has evicted since."""
        return tuple(self._token_ids[: self._cache.length])

    @property
    def evicted_tokens(self) -> int:
        """How many of the conversation's tokens the KV policy "window" has evicted."""
        return self._cache.slid_tokens

    def reset(self) -> None:
        """Forgets the conversation."""
        self._forget(0)

    def save(self, path: str | os.PathLike[str], messages: Sequence[Message] = ()) -> None:
        """Writes the conversation to a file, for `load` to go on with: now or in another process.

        The file is as large as the tokens that are held, and appears whole or not at all. It has their ids and is as
        confidential as the text.

        Args:
            path: Where to; an existing file is replaced.
            messages: The chat that the tokens are of, to be kept with them.

        Raises:
            UsageError: The session does not know its bundle.
            StorageError: The disk refused the write.
        """
        digest = self._digest()
        length = len(self.token_ids)
        self._forget(length if self._cache.reusable(length) else 0)  # what an interruption has left half-way
        self.policy.make_room(self._cache, 0)
        state = SessionState(
            token_ids=self._token_ids,
            rope_range=self._rope_range,
            cache=self._cache,
            remembered=self.policy.state() if self._cache.slid_tokens else {},
            messages=messages,
        )
        write_state(Path(path), digest, self.policy.options.name, state)

    def load(self, path: str | os.PathLike[str]) -> tuple[Message, ...]:
        """Goes on with a conversation that was saved, in place of the one that is there.

        Until the file is read and checked, the session stays as it was.

        Args:
            path: What `save` has written.

        Returns:
            The messages that were saved with it.

        Raises:
            UsageError: There is no such file, it was saved with another bundle, or the session does not know its own.
            UnsupportedError: A newer EdgeKit wrote it, or it was saved with another KV cache dtype or KV policy.
            DoesNotFitError: It holds more tokens than there is room for.
            CorruptArtifactError: It is truncated, changed or malformed.
        """
        state = read_state(Path(path), self._digest(), self.policy, self._cache)
        self._token_ids = []  # an interruption from here on forgets the conversation
        self._cache.become(state.cache)
        self.policy.restore(state.remembered)
        self._rope_range = state.rope_range
        self._token_ids = list(state.token_ids)
        return tuple(state.messages)

    def _digest(self) -> str:
        if self._bundle_digest is None:
            raise UsageError("a conversation is saved and loaded by its bundle; make the session with LLM.new_session")
        return self._bundle_digest

    def cancel(self) -> None:
        """Ends the running generation after the current step, if one runs.

        May be called from any thread or a signal handler.
        """
        # A plain flag: a signal handler that sets an Event deadlocks when it interrupts the very thread that clears it.
        self._cancelled = True

    @property
    def cancelled(self) -> bool:
        """Whether the last generation was ended by `cancel`."""
        return self._cancelled

    def generate(self, prompt: Sequence[int], params: SamplingParams, vocab_size: int) -> Iterator[SampledToken]:
        """Reads a prompt and yields the tokens that follow, until the context is full or `cancel` is called.

        What the cache already holds of the prompt's beginning is not computed again.

        Args:
            prompt: The whole conversation so far, as token ids.
            params: How tokens are drawn; when to stop is the caller's business.
            vocab_size: Token ids that may be drawn.

        Raises:
            UsageError: The prompt is empty or has an id that the model does not have.
            DoesNotFitError: The prompt is longer than the context.
        """
        self.check_prompt(prompt)
        self._cancelled = False
        sampler = Sampler(params, vocab_size=vocab_size)
        token_ids = list(prompt)
        logits = self._prefill(token_ids, len(token_ids))
        if logits is None:
            return
        first = sampler.sample(logits, token_ids)
        token_ids.append(first.token_id)
        yield first
        while not self._cancelled and (self.policy.makes_room or self._cache.room > 0):
            draft = self._strategy.propose(token_ids)
            self.policy.make_room(self._cache, len(draft.token_ids))
            self._cache.reserve(1)
            inputs = draft.step_inputs(self._cache.next_position)
            if self._has_rope_ranges and self.spec.rope_range(inputs.sequence_length) != self._rope_range:
                self._prefill(token_ids[:-1], inputs.sequence_length)
                continue
            outputs = self._runner.step(inputs)
            accepted = accept(draft, outputs.logits, sampler, token_ids)
            # A tree knows nothing of the end of the context, where its path is cut.
            room = self._cache.room
            nodes = accepted.nodes[:room]
            self._cache.append(outputs.stacks, nodes)
            self._token_ids += [int(draft.token_ids[node]) for node in nodes]
            for token in accepted.tokens[:room]:
                token_ids.append(token.token_id)
                yield token

    def check_prompt(self, prompt: Sequence[object]) -> None:
        """Refuses what `generate` cannot continue.

        Raises:
            UsageError: The prompt is empty or has an id that the model does not have.
            DoesNotFitError: The prompt is longer than the context.
        """
        if len(prompt) == 0:
            raise UsageError("the prompt is empty; give some text or at least one token id")
        for token in prompt:
            if not isinstance(token, (int, np.integer)) or not 0 <= token < self.spec.vocab_size:
                raise UsageError(f"token id {token!r} is not in the model's vocabulary of {self.spec.vocab_size}")
        if self.policy.makes_room:
            return
        if len(prompt) > self.limits.max_positions:
            raise DoesNotFitError(
                f"the prompt has {len(prompt)} tokens, the model's context {self.limits.max_positions}; shorten it, or "
                "use the KV policy 'window'"
            )
        shared = self._reusable(prompt, len(prompt))
        needed = self._cache.held(shared) + len(prompt) - shared
        if needed > self._cache.max_tokens:
            raise DoesNotFitError(
                f"the prompt needs {needed} tokens, the KV cache has room for {self._cache.max_tokens}; shorten it, "
                "use the KV policy 'window', a smaller --kv-cache-dtype, or a larger context size or memory budget"
            )

    def shared_prefix(self, prompt: Sequence[int]) -> int:
        """Returns how many tokens of a prompt need not be computed again; its last token always is."""
        return self._reusable(prompt, len(prompt))

    def _reusable(self, prompt: Sequence[object], sequence_length: int) -> int:
        if self.spec.rope_range(sequence_length) != self._rope_range:
            return 0  # the keys in the cache carry rotations that a text of this length does not have
        known = zip(self._token_ids[: self._cache.length], prompt[:-1], strict=False)
        shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], known))
        return shared if self._cache.reusable(shared) else 0

    def _prefill(self, prompt: list[int], sequence_length: int) -> npt.NDArray[np.float32] | None:
        """Brings the cache to the end of the prompt; returns the last token's logits, None when cancelled."""
        shared = self._reusable(prompt, sequence_length)
        self._forget(shared)
        self._rope_range = self.spec.rope_range(sequence_length)
        pending = np.array(prompt[shared:], np.int64)
        if not self.policy.makes_room:
            self._cache.check_room(len(pending))
        options = ReadOptions(
            sequence_length=sequence_length,
            chunk_tokens=self._chunk_tokens,
            following=ANSWER_TOKENS,
            observed_tokens=self.policy.observed_tokens,
            make_room=lambda tokens: self.policy.make_room(self._cache, tokens),
        )
        chunks = read_chunks(self._runner, self._cache, pending, np.array([len(pending) - 1]), options)
        while not self._cancelled:
            chunk = next(chunks)
            self._token_ids += chunk.token_ids.tolist()
            if len(chunk.logits):
                logits: npt.NDArray[np.float32] = chunk.logits[0].copy()
                self.policy.after_prompt(self._read_prompt(prompt, sequence_length, chunk, logits))
                return logits
        return None

    def _read_prompt(
        self, prompt: list[int], sequence_length: int, chunk: Chunk, logits: npt.NDArray[np.float32]
    ) -> ReadPrompt:
        return ReadPrompt(
            cache=self._cache,
            token_ids=prompt,
            observed_tokens=len(chunk.token_ids),
            sequence_length=sequence_length,
            logits=logits,
            attention_mass=chunk.attention_mass,
            runner=self._runner,
            start=self.backend.runner,
        )

    def _forget(self, length: int) -> None:
        self._cache.truncate(length)
        if length == 0:
            self.policy.reset()
        del self._token_ids[length:]
