"""`LLM`: a bundle, loaded and ready to generate. The embedded API."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

from edgekit.bundle import CHAT_TEMPLATE, TOKENIZER, open_bundle
from edgekit.errors import UnsupportedError, UsageError
from edgekit.runtime.available_memory import return_free_memory
from edgekit.runtime.backends.onnxruntime_cpu import OnnxRuntimeCpu
from edgekit.runtime.cache import KVCache
from edgekit.runtime.chat import ChatTemplate, Message, end_of_turn_ids
from edgekit.runtime.detokenizer import StreamingDetokenizer
from edgekit.runtime.loading import KVCacheOptions, LoadOptions, check_budget, check_policy, plan_load
from edgekit.runtime.lowered import lowered_graph, verify_once
from edgekit.runtime.output import CompletionChunk, CompletionOutput, FinishReason, Timings, Usage
from edgekit.runtime.policies import PolicyOptions
from edgekit.runtime.sampling import SampledToken, SamplingParams
from edgekit.runtime.session import Session, SessionLimits
from edgekit.runtime.stopping import StopChecker
from edgekit.runtime.strategies.autoregressive import Autoregressive
from edgekit.runtime.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

MAX_THREADS = 16
"""Threads that may be asked for on machines with fewer cores; more than there are cores gain nothing."""


def default_threads() -> int:
    """Returns the physical cores that this process may use: a second thread per core slows matrix products."""
    import psutil

    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed))


class LLM:
    """A language model from a bundle.

    One object serves one caller at a time; a lock makes others wait.

        llm = LLM("model.edge")
        print(llm.generate("The capital of France is", SamplingParams(max_tokens=8)).text)
        for chunk in llm.stream_chat([{"role": "user", "content": "Hello"}]):
            print(chunk.text, end="", flush=True)

    Attributes:
        bundle: The bundle.
        plan: What it takes of memory, and how.
        tokenizer: Its tokenizer.
        threads: Threads that compute.
        end_token_ids: Tokens that end a generation: those of the model's configs and the chat template's.
        vocab_size: Token ids that may be drawn: those that both the model and the tokenizer know.
    """

    def __init__(
        self,
        bundle: str | os.PathLike[str],
        *,
        threads: int | None = None,
        memory_budget: str | None = None,
        ctx_size: int | None = None,
        kv_cache: KVCacheOptions = KVCacheOptions(),
        allow_long: bool = False,
    ) -> None:
        """Opens, checks and loads a bundle.

        Args:
            bundle: The bundle's directory.
            threads: Threads that compute; None for the physical cores that this process may use.
            memory_budget: Most memory of the whole process, such as "512MiB"; None for what the machine has left.
            ctx_size: Tokens that the KV cache must have room for; None for as many as fit, up to the model's context.
            kv_cache: How conversations keep their past.
            allow_long: Whether the context may be longer than what the model was trained on.

        Raises:
            UsageError: There is no such bundle, or an option is out of range.
            UnsupportedError: Another EdgeKit wrote it, or the KV policy needs what it lacks.
            DoesNotFitError: The budget is too small; nothing was loaded.
            CorruptArtifactError: A file is missing or not as the manifest recorded it.
        """
        _check_arguments(bundle, threads)
        self.bundle = open_bundle(Path(bundle))
        options = LoadOptions(
            threads=threads, memory_budget=memory_budget, ctx_size=ctx_size, kv_cache=kv_cache, allow_long=allow_long
        )
        self.plan = plan_load(self.bundle, options)
        verify_once(self.bundle)
        self.threads = threads or default_threads()
        spec, layout = self.bundle.manifest.spec, self.plan.memory.layout
        # The weights first: while they are packed, their file is in memory too.
        self.backend = OnnxRuntimeCpu(lowered_graph(self.bundle, layout), spec, self.threads, layout)
        self.tokenizer = Tokenizer(self.bundle.file(TOKENIZER))
        return_free_memory()
        self.end_token_ids = frozenset(spec.eos_token_ids) | self._template_end_ids()
        self.vocab_size = min(spec.vocab_size, self.tokenizer.vocab_size)
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._session = self.new_session()

    @classmethod
    def load(cls, bundle: str | os.PathLike[str], options: LoadOptions) -> LLM:
        """Loads a bundle with options that were put together elsewhere; see the constructor."""
        if not isinstance(options, LoadOptions):
            raise UsageError(f"options is {options!r}; it must be LoadOptions")
        return cls(
            bundle,
            threads=options.threads,
            memory_budget=options.memory_budget,
            ctx_size=options.ctx_size,
            kv_cache=options.kv_cache,
            allow_long=options.allow_long,
        )

    @property
    def limits(self) -> SessionLimits:
        """What a conversation may take."""
        memory = self.plan.memory
        return SessionLimits(
            max_tokens=memory.capacity_tokens, max_positions=memory.context_tokens, chunk_tokens=memory.chunk_tokens
        )

    def new_session(self, policy: PolicyOptions | None = None) -> Session:
        """Starts a conversation with a cache of its own, to pass to `stream` and `stream_chat`.

        Args:
            policy: What it does when its KV cache is full; None for what the model was loaded with.

        Raises:
            UsageError: There is no such policy, or its budget is out of range.
            UnsupportedError: The policy cannot work with the model or its bundle.
            DoesNotFitError: The policy keeps more than there is room for.
        """
        if policy is not None:
            if not isinstance(policy, PolicyOptions):
                raise UsageError(
                    f"policy is {policy!r}; it must be PolicyOptions, such as PolicyOptions(name='window')"
                )
            check_policy(policy, self.bundle)
            check_budget(policy, self.plan.memory)
        spec, chosen = self.bundle.manifest.spec, policy or self.plan.policy
        return Session(spec, self.backend, Autoregressive(), self.limits, chosen, self.bundle.digest)

    def new_cache(self) -> KVCache:
        """Returns an empty KV cache, for `backend.runner`: steps without a session."""
        return KVCache(self.backend.layout, self.plan.memory.capacity_tokens, self.plan.memory.context_tokens)

    def generate(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, *, session: Session | None = None
    ) -> CompletionOutput:
        """Continues a prompt; see `stream`."""
        return _last(self.stream(prompt, params, session=session))

    def chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, *, session: Session | None = None
    ) -> CompletionOutput:
        """Answers a conversation; see `stream_chat`."""
        return _last(self.stream_chat(messages, params, session=session))

    def stream(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, *, session: Session | None = None
    ) -> Iterator[CompletionChunk]:
        """Continues a prompt, piece by piece.

        Args:
            prompt: Text, or token ids as they are.
            params: How to choose tokens and when to stop; greedy when None.
            session: A conversation to go on with; what it shares with the prompt is not computed again. None
                for the object's own.

        Yields:
            Pieces of text as soon as their characters are complete; the last one carries the whole output.

        Raises:
            UsageError: The prompt is empty or has an id that the model does not have, the session is another
                model's, or, once pieces are asked for, this thread has not finished its last generation.
            DoesNotFitError: The prompt is longer than the context.
        """
        started = time.perf_counter()
        session = session or self._session
        if session.backend is not self.backend:
            raise UsageError("the session belongs to another LLM object; make one with new_session")
        if params is not None and not isinstance(params, SamplingParams):
            raise UsageError(
                f"params is {params!r}; it must be SamplingParams (SamplingParams.from_mapping reads a dict)"
            )
        if isinstance(prompt, str):
            # Empty text stays an empty prompt, whatever token the tokenizer puts first.
            token_ids = self.tokenizer.encode_prompt(prompt) if prompt else []
        else:
            token_ids = _as_list(prompt)
        session.check_prompt(token_ids)
        return self._run(token_ids, params or SamplingParams(), session, started)

    def stream_chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, *, session: Session | None = None
    ) -> Iterator[CompletionChunk]:
        """Answers a conversation, piece by piece.

        Args:
            messages: The conversation, oldest first, each with ``role`` and ``content``.
            params: As for `stream`.
            session: As for `stream`.

        Raises:
            UnsupportedError: The bundle has no chat template.
            UsageError, DoesNotFitError: As for `stream`.
        """
        return self.stream(self.render_chat(messages), params, session=session)

    def render_chat(self, messages: Sequence[Message]) -> str:
        """Returns the prompt that the chat template makes of a conversation.

        Raises:
            UnsupportedError: The bundle has no chat template.
        """
        return self._template.render(messages)

    @cached_property
    def _template(self) -> ChatTemplate:
        source = self.bundle.read_text(CHAT_TEMPLATE)
        if source is None:
            raise UnsupportedError(
                f"bundle {str(self.bundle.path)!r} has no chat template, so it cannot chat; use generate (edgekit run)"
            )
        return ChatTemplate(source, self.bundle.generation().special_tokens)

    def _template_end_ids(self) -> frozenset[int]:
        if CHAT_TEMPLATE not in self.bundle.manifest.files:
            return frozenset()
        try:
            return end_of_turn_ids(self.tokenizer, self._template)
        except (UnsupportedError, UsageError) as error:
            # The model can still continue prompts; whoever wants to chat is told again.
            logger.warning("the chat template cannot be used: %s", error)
            return frozenset()

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Makes other threads wait; a thread that waited for itself would wait forever."""
        if self._owner == threading.get_ident():
            raise UsageError("this thread has a generation that is not finished; exhaust or close it first")
        with self._lock:
            self._owner = threading.get_ident()
            try:
                yield
            finally:
                self._owner = None

    def _run(
        self, prompt: list[int], params: SamplingParams, session: Session, started: float
    ) -> Iterator[CompletionChunk]:
        with self._exclusive():
            cached = session.shared_prefix(prompt)
            completion = _Completion(self.tokenizer, params, frozenset() if params.ignore_eos else self.end_token_ids)
            finish: FinishReason = "length"
            for token in session.generate(prompt, params, self.vocab_size):
                text, stopped = completion.add(token)
                if stopped:
                    finish = "stop"
                if text:
                    yield CompletionChunk(text=text)
                if stopped or len(completion.tokens) >= params.max_tokens:
                    break
            else:
                finish = "cancelled" if session.cancelled else "length"
        # The lock is free by now: who has the whole output may ask for the next before this iterator is exhausted.
        rest = completion.finish()
        usage = Usage(prompt_tokens=len(prompt), cached_tokens=cached, completion_tokens=len(completion.tokens))
        yield CompletionChunk(text=rest, output=completion.output(finish, started, usage))


class _Completion:
    """Text and bookkeeping of one generation."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, end_token_ids: frozenset[int]) -> None:
        self.tokens: list[SampledToken] = []
        self._params = params
        self._end_token_ids = end_token_ids
        self._detokenizer = StreamingDetokenizer(tokenizer)
        self._stop = StopChecker(params.stop)
        self._pieces: list[str] = []
        self._first = self._last = 0.0

    def add(self, token: SampledToken) -> tuple[str, bool]:
        """Takes a token; returns the text that may be shown, and whether the generation is over."""
        self._last = time.perf_counter()
        self._first = self._first or self._last
        self.tokens.append(token)
        if token.token_id in self._end_token_ids:
            return "", True
        text, stopped = self._stop.feed(self._detokenizer.push(token.token_id))
        self._pieces.append(text)
        return text, stopped

    def finish(self) -> str:
        """Returns the text that was held back, nothing after a stop string."""
        text, _ = self._stop.feed(self._detokenizer.flush())
        text += self._stop.flush()
        self._pieces.append(text)
        return text

    def output(self, finish: FinishReason, started: float, usage: Usage) -> CompletionOutput:
        decode_s = self._last - self._first
        count = len(self.tokens)
        return CompletionOutput(
            text="".join(self._pieces),
            token_ids=tuple(token.token_id for token in self.tokens),
            finish_reason=finish,
            usage=usage,
            timings=Timings(
                first_token_s=max(0.0, self._first - started),
                decode_s=decode_s,
                decode_tokens_per_s=(count - 1) / decode_s if decode_s > 0 else 0.0,
            ),
            logprobs=None if self._params.logprobs is None else tuple(self.tokens),
        )


def _check_arguments(bundle: object, threads: object) -> None:
    """Refuses what no type checker has seen."""
    most = max(MAX_THREADS, os.cpu_count() or 1)
    if threads is not None and (not isinstance(threads, int) or isinstance(threads, bool) or not 1 <= threads <= most):
        raise UsageError(f"threads is {threads!r}; it must be an integer from 1 to {most}")
    if not isinstance(bundle, (str, os.PathLike)) or not os.fspath(bundle):
        raise UsageError(f"bundle is {bundle!r}; it must be a path")


def _as_list(prompt: object) -> list[int]:
    # Bytes would pass for token ids, and an array without dimensions for a sequence.
    if isinstance(prompt, (bytes, bytearray)) or not isinstance(prompt, Iterable) or getattr(prompt, "ndim", 1) != 1:
        raise UsageError(f"the prompt is {prompt!r}; it must be text or token ids")
    return list(prompt)


def _last(chunks: Iterator[CompletionChunk]) -> CompletionOutput:
    output = None
    for chunk in chunks:
        output = chunk.output
    assert output is not None
    return output
