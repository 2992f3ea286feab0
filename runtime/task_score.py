"""What budgets of layers score: the share of tasks that a model answers with them.

Budgets decide which tokens of a prompt each layer keeps, and nothing before that. So every prompt is read once, and
what a KV policy goes by is held: the whole cache, the attention that the prompt's end paid, the logits. To judge
budgets then takes a selection and the tokens of the answer. Prompts that do not fit into the memory budget are read
again each time. The model is loaded with slots of its own for each layer (`KVCacheOptions.per_layer`), so that one
lowered graph runs with any budgets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from edgekit.progress import Progress
from edgekit.runtime.cache import BUCKET_TOKENS, KVCache
from edgekit.runtime.cache_arrays import FloatArray
from edgekit.runtime.llm import LLM
from edgekit.runtime.memory_plan import cache_bytes
from edgekit.runtime.policies import POLICIES, PolicyOptions, make_policy
from edgekit.runtime.policies.base import ReadPrompt
from edgekit.runtime.policies.snapkv import OBSERVED_TOKENS, SnapKV
from edgekit.runtime.prefill import ReadOptions, read_chunks
from edgekit.runtime.sampling import Sampler, SamplingParams
from edgekit.runtime.session import ANSWER_TOKENS
from edgekit.runtime.step import causal_step
from edgekit.runtime.tasks import Task, answers, judge

LAYER_BUDGET_POLICIES = tuple(name for name, policy in POLICIES.items() if issubclass(policy, SnapKV))
"""KV policies that can keep another number of tokens in every layer."""
MIN_BUDGET_TOKENS = OBSERVED_TOKENS + 1


def prompt_ids(llm: LLM, task: Task) -> list[int]:
    """Returns the tokens of a task's prompt."""
    return llm.tokenizer.encode_prompt(task.prompt) if isinstance(task.prompt, str) else list(task.prompt)


@dataclass(frozen=True, kw_only=True)
class _Prompt:
    """A prompt that was read.

    Attributes:
        token_ids: Its tokens.
        cache: Holds all of them, and is not changed.
        observed_tokens: How many of the last ones were read in a step of their own.
        logits: Of the last, shape (V,), float32.
        attention_mass: As of `ReadPrompt`.
    """

    token_ids: list[int]
    cache: KVCache
    observed_tokens: int
    logits: FloatArray
    attention_mass: tuple[FloatArray, ...]


class TaskScore:
    """The share of tasks that a model answers with some budgets of its layers."""

    def __init__(
        self, llm: LLM, tasks: Sequence[Task], policy: str, progress: Progress = lambda *_: None, *, hold: bool = True
    ) -> None:
        """Reads the prompts, as many as the memory budget lets it hold.

        Args:
            llm: The model, loaded with `KVCacheOptions.per_layer`.
            tasks: What it is asked.
            policy: One of `LAYER_BUDGET_POLICIES`.
            progress: Told of every prompt.
            hold: Whether to hold any prompt.

        Raises:
            UsageError, DoesNotFitError: A prompt cannot be read.
        """
        self._llm, self._tasks, self._policy = llm, tasks, policy
        prompts = [prompt_ids(llm, task) for task in tasks]
        session = llm.new_session(PolicyOptions(name=policy, budget_tokens=MIN_BUDGET_TOKENS))
        for token_ids in prompts:
            session.check_prompt(token_ids)
        self._prompts: list[_Prompt | None] = [None] * len(tasks)
        left_bytes = llm.plan.memory.budget_bytes - llm.plan.memory.total_bytes
        for index, token_ids in enumerate(prompts):
            size_bytes = _held_bytes(llm, len(token_ids))
            if hold and size_bytes <= left_bytes and self._has_one_rope(tasks[index], len(token_ids)):
                progress("reading prompts", index, len(tasks))
                self._prompts[index] = _read(llm, token_ids)
                left_bytes -= size_bytes

    @property
    def held_prompts(self) -> int:
        """Prompts that are not read again."""
        return sum(prompt is not None for prompt in self._prompts)

    def release(self) -> None:
        """Lets go of the prompts."""
        self._prompts = [None] * len(self._tasks)

    def __call__(self, budgets_tokens: tuple[int, ...]) -> float:
        """Returns the share of tasks that are answered with these budgets, one per layer."""
        options = PolicyOptions(name=self._policy, layer_budgets_tokens=budgets_tokens)
        session = self._llm.new_session(options)
        answered = 0
        for task, prompt in zip(self._tasks, self._prompts, strict=True):
            if prompt is None:
                answered += answers(self._llm, task, session)
            else:
                answered += judge(self._llm, task, self._drawn(prompt, options))
        session.reset()
        return answered / len(self._tasks)

    def _has_one_rope(self, task: Task, prompt_tokens: int) -> bool:
        """Whether no answer is so long that the prompt would have to be read with other rotations."""
        spec = self._llm.bundle.manifest.spec
        answer = len(task.answer.encode()) if isinstance(task.answer, str) else len(task.answer)
        return spec.rope_range(prompt_tokens) == spec.rope_range(prompt_tokens + answer + ANSWER_TOKENS)

    def _drawn(self, prompt: _Prompt, options: PolicyOptions) -> Iterator[int]:
        """Yields the tokens that a session with this policy would draw greedily."""
        llm = self._llm
        sampler = Sampler(SamplingParams(), vocab_size=llm.vocab_size)
        cache = self._compressed(prompt, options)
        runner, history, logits = llm.backend.runner(cache), list(prompt.token_ids), prompt.logits
        while True:
            history.append(sampler.sample(logits, history).token_id)
            yield history[-1]
            if cache.room == 0:
                return
            inputs = causal_step(np.array(history[-1:]), cache.next_position, np.zeros(1, np.int64))
            outputs = runner.step(inputs)
            cache.append(outputs.stacks, [0])
            logits = outputs.logits[0]

    def _compressed(self, prompt: _Prompt, options: PolicyOptions) -> KVCache:
        """Returns what the policy keeps of a prompt, which stays as it is."""
        backend = self._llm.backend
        policy = make_policy(options, self._llm.bundle.manifest.spec, backend)
        assert isinstance(policy, SnapKV)
        # SnapKV itself takes its choice from the whole cache; the others, which go on with that, get a copy.
        if type(policy) is SnapKV and policy.exceeds_budget(prompt.cache):
            return prompt.cache.selected(policy.choose(prompt.cache, prompt.attention_mass, prompt.observed_tokens))
        cache = prompt.cache.selected([None] * len(prompt.cache.stacks))
        policy.after_prompt(
            ReadPrompt(
                cache=cache,
                token_ids=prompt.token_ids,
                observed_tokens=prompt.observed_tokens,
                sequence_length=len(prompt.token_ids),
                logits=prompt.logits,
                attention_mass=prompt.attention_mass,
                runner=backend.runner(cache),
                start=backend.runner,
            )
        )
        return cache


def _held_bytes(llm: LLM, prompt_tokens: int) -> int:
    """Returns the bytes that a prompt takes at most once it was read."""
    slots = prompt_tokens + ANSWER_TOKENS + BUCKET_TOKENS
    layout = llm.backend.layout
    masses = sum(len(stack.layers) * stack.shape.num_kv_heads * 4 * slots for stack in layout.stacks)
    return cache_bytes(layout, slots) + masses + 4 * llm.bundle.manifest.spec.vocab_size


def _read(llm: LLM, token_ids: list[int]) -> _Prompt:
    """Reads a prompt as a session does."""
    cache, chunk_tokens = llm.new_cache(), llm.plan.memory.chunk_tokens
    options = ReadOptions(
        sequence_length=len(token_ids),
        chunk_tokens=min(chunk_tokens, max(1, cache.max_tokens // 2)),
        following=ANSWER_TOKENS,
        observed_tokens=OBSERVED_TOKENS,
    )
    last = np.array([len(token_ids) - 1])
    *_, chunk = read_chunks(llm.backend.runner(cache), cache, np.array(token_ids, np.int64), last, options)
    return _Prompt(
        token_ids=token_ids,
        cache=cache,
        observed_tokens=len(chunk.token_ids),
        logits=chunk.logits[0].copy(),
        attention_mass=tuple(mass.copy() for mass in chunk.attention_mass),
    )
