"""Where the time of one step goes: kernel time by operator, measured by ONNX Runtime's profiler.

    python benchmarks/profile_step.py BUNDLE [--depth 128] [--tokens 1] [--threads 2] [--steps 50] [--shapes]

A step reads --tokens tokens behind a past of --depth tokens, as the runtime does: 1 for decoding, 256 for a chunk of
a prompt. Of every node the fastest of the steps counts, which a busy machine distorts least; the sum is therefore less
than a step takes, which is printed too, and the rest is the time between kernels. Prints Markdown.
"""

from __future__ import annotations

import json
import re
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import click
import numpy as np

from edgekit.bundle import open_bundle
from edgekit.cache_layout import KV_CACHE_DTYPES, CacheLayout, KVCacheDtype, cache_layout
from edgekit.ort import ort
from edgekit.runtime.backends.onnxruntime_cpu import OnnxRuntimeRunner
from edgekit.runtime.cache import KVCache
from edgekit.runtime.lowered import lowered_graph, verify_once
from edgekit.runtime.prefill import ReadOptions, read_chunks
from edgekit.runtime.session import PREFILL_CHUNK_TOKENS
from edgekit.runtime.step import causal_step
from edgekit.spec import DecoderSpec

WARM_UP_STEPS = 3


def profiled_session(graph: Path, threads: int, prefix: Path) -> ort.InferenceSession:
    """Loads a graph with the options of `edgekit.runtime.backends.onnxruntime_cpu` and the profiler on."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.enable_mem_pattern = False
    options.enable_profiling = True
    options.profile_file_prefix = str(prefix)
    return ort.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])


def run_steps(
    session: ort.InferenceSession, spec: DecoderSpec, layout: CacheLayout, depth: int, tokens: int, steps: int
) -> list[float]:
    """Fills a cache and runs the same step over it several times; returns the seconds of each."""
    cache = KVCache(layout, depth + tokens)
    runner = OnnxRuntimeRunner(session, spec, cache)
    ids = np.random.default_rng(0).integers(spec.vocab_size, size=depth + tokens)
    total = depth + tokens
    past, none = ids[:depth], np.zeros(0, np.int64)
    for _ in read_chunks(
        runner, cache, past, none, ReadOptions(sequence_length=total, chunk_tokens=PREFILL_CHUNK_TOKENS)
    ):
        pass
    inputs = causal_step(ids[depth:], depth, np.array([tokens - 1]), total)
    seconds = []
    for _ in range(WARM_UP_STEPS + steps):
        started = time.perf_counter()
        runner.step(inputs)
        seconds.append(time.perf_counter() - started)
    return seconds[WARM_UP_STEPS:]


def node_times(events: Sequence[dict[str, Any]], steps: int) -> list[tuple[str, str, float]]:
    """Returns operator, shapes of the inputs and fastest time in ms of every node over the last steps."""
    times: dict[str, list[float]] = defaultdict(list)
    kinds: dict[str, tuple[str, str]] = {}
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            times[event["name"]].append(event["dur"] / 1000)
            kinds[event["name"]] = event["args"]["op_name"], _shapes(event["args"].get("input_type_shape", []))
    return [(*kinds[name], min(durations[-steps:])) for name, durations in times.items()]


def rows(nodes: Sequence[tuple[str, str, float]], layers: int, *, shapes: bool) -> list[tuple[str, ...]]:
    """Sums nodes by operator, or by operator and shapes; returns the lines of the table, the slowest first."""
    sums: Counter[tuple[str, ...]] = Counter()
    counts: Counter[tuple[str, ...]] = Counter()
    for op, shape, time_ms in nodes:
        key = (op, shape) if shapes else (op,)
        sums[key] += time_ms  # type: ignore[assignment] # a Counter of floats adds them as well
        counts[key] += 1
    total = sum(sums.values())
    return [
        (*key, str(counts[key]), f"{counts[key] / layers:.1f}", f"{spent:.3f}", f"{100 * spent / total:.1f}")
        for key, spent in sums.most_common()
    ]


def _shapes(types: Sequence[dict[str, list[int]]]) -> str:
    return " ".join("x".join(map(str, shape)) or "1" for kind in types for shape in kind.values())


@click.command(help=__doc__)
@click.argument("bundle", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--depth", type=click.IntRange(min=0), default=128, show_default=True)
@click.option("--tokens", type=click.IntRange(1, PREFILL_CHUNK_TOKENS), default=1, show_default=True)
@click.option("--threads", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--steps", type=click.IntRange(min=1), default=50, show_default=True)
@click.option("--kv-cache-dtype", type=click.Choice(KV_CACHE_DTYPES), default="fp32", show_default=True)
@click.option("--shapes", is_flag=True, help="Keep nodes with inputs of different shapes apart.")
def main(*, bundle: Path, depth: int, tokens: int, threads: int, steps: int, kv_cache_dtype: str, shapes: bool) -> None:
    """Measures and prints."""
    opened = open_bundle(bundle)
    spec = opened.manifest.spec
    if depth + tokens > spec.max_positions:
        raise click.UsageError(f"{depth} + {tokens} tokens are beyond the model's context of {spec.max_positions}")
    verify_once(opened)
    layout = cache_layout(spec, cast(KVCacheDtype, kv_cache_dtype))
    with tempfile.TemporaryDirectory() as folder:
        session = profiled_session(lowered_graph(opened, layout), threads, Path(folder, "profile"))
        seconds = run_steps(session, spec, layout, depth, tokens, steps)
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    nodes = node_times(events, steps)
    middle, fastest = (1000 * pick(seconds) for pick in (statistics.median, min))
    kernels = sum(time_ms for _, _, time_ms in nodes)
    name = re.sub(r"\.edge$", "", bundle.name)
    click.echo(
        f"{name}, {tokens} tokens at depth {depth}, {threads} threads: step {middle:.2f} ms (median), {fastest:.2f} ms "
        f"(fastest), kernels {kernels:.2f} ms in {len(nodes)} nodes\n"
    )
    header = ("operator", *(["inputs"] if shapes else []), "nodes", "per layer", "ms", "%")
    for line in (header, ["---"] * len(header), *rows(nodes, len(spec.layers), shapes=shapes)):
        click.echo(f"| {' | '.join(line)} |")


if __name__ == "__main__":
    main()
