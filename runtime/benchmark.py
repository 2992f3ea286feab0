"""Speed of a bundle on this machine: reading a prompt, and generating behind pasts of several lengths.

The names of the rows are llama.cpp's: pp512 reads 512 tokens, tg128 generates 128, tg32@4096 generates 32 behind a
past of 4096.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from edgekit.bundle import open_bundle
from edgekit.errors import DoesNotFitError, UsageError
from edgekit.progress import Progress
from edgekit.runtime.llm import LLM
from edgekit.runtime.loading import LoadOptions, LoadPlan, plan_load
from edgekit.runtime.lowered import lowered_graph, verify_once
from edgekit.runtime.peak_memory import peak_memory_bytes
from edgekit.runtime.policies import POLICIES
from edgekit.runtime.sampling import SampledToken, SamplingParams

DEPTH_DECODE_TOKENS = 32
"""Tokens that are generated behind each depth: few, so that the past has about the length that the row says."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One thing to measure.

    Attributes:
        name: Such as ``tg32@4096``.
        past_tokens: Tokens in the cache at the start; with none, the row reads a prompt instead of generating.
        tokens: Tokens that are read or generated.
    """

    name: str
    past_tokens: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class BenchmarkOptions:
    """What to measure.

    Attributes:
        prompt_tokens: Tokens of the prompt that is read; 0 leaves the row out.
        decode_tokens: Tokens that are generated from an empty past; 0 leaves the row out.
        depths: Lengths of the past, in tokens, behind which `DEPTH_DECODE_TOKENS` are generated. The past has at
            least the one token that generation starts from.
        repetitions: How often each row is measured, after one run that is not counted.
    """

    prompt_tokens: int = 512
    decode_tokens: int = 128
    depths: tuple[int, ...] = ()
    repetitions: int = 5

    def __post_init__(self) -> None:
        """Refuses numbers that mean nothing.

        Raises:
            UsageError: A number is negative, there is no repetition or no row.
        """
        for name, value in (
            ("pp", self.prompt_tokens),
            ("tg", self.decode_tokens),
            *(("depth", d) for d in self.depths),
        ):
            if value < 0:
                raise UsageError(f"{name} is {value}; it must be at least 0")
        if self.repetitions < 1:
            raise UsageError(f"repetitions is {self.repetitions}; it must be at least 1")
        if not self.rows():
            raise UsageError("pp and tg are 0 and no depth is given; there is nothing to measure")

    def rows(self) -> list[Row]:
        """Returns the rows in the order in which they are measured."""
        rows = []
        if self.prompt_tokens:
            rows.append(Row(name=f"pp{self.prompt_tokens}", past_tokens=0, tokens=self.prompt_tokens))
        if self.decode_tokens:
            rows.append(Row(name=f"tg{self.decode_tokens}", past_tokens=1, tokens=self.decode_tokens))
        for depth in self.depths:
            name = f"tg{DEPTH_DECODE_TOKENS}@{depth}"
            rows.append(Row(name=name, past_tokens=max(1, depth), tokens=DEPTH_DECODE_TOKENS))
        return rows


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Times of one row.

    Attributes:
        name: The row's name.
        tokens: Tokens that were read or generated in each repetition.
        seconds: Wall-clock time of each repetition.
        peak_memory_bytes: Largest resident set of the process up to the end of this row.
    """

    name: str
    tokens: int
    seconds: tuple[float, ...]
    peak_memory_bytes: int

    @property
    def tokens_per_s(self) -> float:
        """Median over the repetitions."""
        return statistics.median(self.tokens / seconds for seconds in self.seconds)

    @property
    def min_tokens_per_s(self) -> float:
        """Rate of the slowest repetition."""
        return self.tokens / max(self.seconds)

    @property
    def max_tokens_per_s(self) -> float:
        """Rate of the fastest repetition."""
        return self.tokens / min(self.seconds)


@dataclass(frozen=True, kw_only=True)
class BenchmarkReport:
    """Everything that was measured.

    Attributes:
        threads: Threads that computed.
        load_s: Seconds to load the bundle, which had been verified and lowered before.
        measurements: One per row.
    """

    threads: int
    load_s: float
    measurements: tuple[Measurement, ...]


def benchmark(
    bundle: str | os.PathLike[str],
    options: BenchmarkOptions,
    *,
    load: LoadOptions = LoadOptions(),
    progress: Progress | None = None,
) -> BenchmarkReport:
    """Loads a bundle and measures it.

    Prompts are fixed random tokens. Generation is greedy and does not stop at end tokens.

    Args:
        bundle: The bundle's directory.
        options: What to measure.
        load: How the bundle is loaded.
        progress: Told of every repetition.

    Raises:
        DoesNotFitError: A row needs more tokens than the context, or than there is room for.
        UsageError, UnsupportedError, CorruptArtifactError: As for `LLM`.
    """
    opened = open_bundle(bundle)
    planned, rows = plan_load(opened, load), options.rows()
    for row in rows:
        _check_fits(row, planned, opened.manifest.spec.max_positions)
    # What is done once per machine does not count as loading.
    verify_once(opened)
    lowered_graph(opened, planned.memory.layout)
    started = time.perf_counter()
    llm = LLM.load(bundle, load)
    load_s = time.perf_counter() - started
    measurements = tuple(_measure(llm, row, options.repetitions, progress) for row in rows)
    return BenchmarkReport(threads=llm.threads, load_s=load_s, measurements=measurements)


def _check_fits(row: Row, planned: LoadPlan, trained: int) -> None:
    needed, memory = row.past_tokens + row.tokens, planned.memory
    if POLICIES[planned.policy.name].makes_room or needed <= min(memory.context_tokens, memory.capacity_tokens):
        return
    if needed > memory.context_tokens:
        whose = "model's context" if memory.context_tokens == trained else "context"
        raise DoesNotFitError(
            f"{row.name} needs {needed} tokens, the {whose} is {memory.context_tokens}; measure fewer"
        )
    raise DoesNotFitError(
        f"{row.name} needs {needed} tokens, the KV cache has room for {memory.capacity_tokens} within the memory "
        "budget; measure fewer, or give more memory"
    )


def _measure(llm: LLM, row: Row, repetitions: int, progress: Progress | None) -> Measurement:
    prompt = np.random.default_rng(0).integers(llm.vocab_size, size=row.past_tokens or row.tokens).tolist()
    session = llm.new_session()
    seconds = []
    for repetition in range(1 + repetitions):
        if progress is not None:
            progress(row.name, repetition, 1 + repetitions)
        if not row.past_tokens:
            session.reset()
        seconds.append(_seconds(session.generate(prompt, SamplingParams(), llm.vocab_size), row))
    return Measurement(
        name=row.name, tokens=row.tokens, seconds=tuple(seconds[1:]), peak_memory_bytes=peak_memory_bytes()
    )


def _seconds(generation: Iterator[SampledToken], row: Row) -> float:
    """Times what a row asks for: the first token follows the prompt, each other one a step over the past."""
    started = time.perf_counter()
    next(generation)
    if row.past_tokens:
        started = time.perf_counter()
        for _ in range(row.tokens):
            next(generation)
    return time.perf_counter() - started
