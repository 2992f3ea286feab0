"""The check that every export ends with: the graph's logits against the reference decoder's, twice.

On the weights as they are stored, the two must agree closely whatever the precision: a wrong graph shows. On the
source weights, the distance is what their storage costs, and each precision has its tolerance.

The reference runs in float32, one layer at a time. The graph runs as written, with every fusion of ONNX Runtime
off, in two chunks so that the second one reads a cache; what is measured is the graph and its weights, not a
runtime's shortcuts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgekit import contract
from edgekit.bundle import Divergence
from edgekit.cache_layout import KVCacheDtype
from edgekit.errors import ParityError
from edgekit.export.weights import Precision
from edgekit.ort import ort
from edgekit.spec import DecoderSpec

FloatArray = npt.NDArray[np.float32]
Cache = dict[str, npt.NDArray[Any]]

# Mean KL(reference on the stored weights ‖ graph) in nats; float32 rounding leaves about 1e-11.
MAX_GRAPH_KL_DIVERGENCE = 1e-6

# Mean KL(source ‖ graph) in nats. int4 is generous on purpose: the smallest models lose 0.3 nats to it and
# still are what the user asked for; a wrong graph is off by several nats.
MAX_KL_DIVERGENCE: dict[Precision, float] = {"fp32": 1e-6, "fp16": 1e-3, "int8": 0.05, "int4": 1.0}
# The same for what a narrow KV cache costs; tiny random models lose 2e-3 nats to int8.
MAX_CACHE_KL_DIVERGENCE: dict[KVCacheDtype, float] = {"fp32": 1e-6, "fp16": 1e-3, "int8": 0.05}

TEXT = (
    "The river had risen during the night, and by morning the lower road was gone. Anna counted 12 boats tied to "
    'the mill; her brother, who was 7, asked whether they would sail to school. "Not today," she said.'
)


def compare(expected: FloatArray, got: FloatArray, tolerance: float, what: str) -> Divergence:
    """Measures the distance between two sets of logits.

    Args:
        expected: Logits of the reference, shape (tokens, vocab), float32.
        got: Logits of the graph, same shape.
        tolerance: Largest accepted mean KL divergence, nats.
        what: What the reference is, for the message of an error.

    Raises:
        ParityError: The divergence is larger, or a logit is not finite.
    """
    p, q = _log_softmax(expected), _log_softmax(got)
    record = Divergence(
        max_abs_error=float(np.abs(expected - got).max()),
        kl_divergence=float(max(0.0, (np.exp(p) * (p - q)).sum(-1).mean())),
        top1_agreement=float((expected.argmax(-1) == got.argmax(-1)).mean()),
        max_kl_divergence=tolerance,
    )
    if not np.isfinite(got).all() or not np.isfinite(expected).all() or record.kl_divergence > tolerance:
        raise ParityError(
            f"the exported graph is not {what}: KL divergence {record.kl_divergence:.3g} nats per token, allowed "
            f"{tolerance:g} (largest logit error {record.max_abs_error:.3g}, top-1 agreement "
            f"{record.top1_agreement:.1%}); nothing was written"
        )
    return record


def graph_logits(
    graph: Path, spec: DecoderSpec, token_ids: npt.NDArray[np.int64], dtype: KVCacheDtype = "fp32"
) -> FloatArray:
    """Runs a portable graph over a token sequence, the last third with the rest in the cache.

    Args:
        graph: model.onnx with its data file beside it.
        spec: The decoder.
        token_ids: shape (tokens,), int64.
        dtype: How the graph stores its cache.

    Returns:
        shape (tokens, vocab), float32.
    """
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    # A large model is run in little memory: matrices are widened when their turn comes, not all those that depend on
    # nothing first, and their memory is given back at once.
    options.execution_order = ort.ExecutionOrder.PRIORITY_BASED
    options.enable_cpu_mem_arena = False
    session = ort.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
    cut = max(1, 2 * len(token_ids) // 3)
    empty = _empty_cache(spec, dtype)
    total = len(token_ids)
    first, cache = _step(session, spec, token_ids[:cut], 0, empty, total)
    if cut == total:
        return first
    second, _ = _step(session, spec, token_ids[cut:], cut, cache, total)
    return np.concatenate([first, second])


def _empty_cache(spec: DecoderSpec, dtype: KVCacheDtype) -> Cache:
    """Returns a cache of one slot, by the names of the graph's inputs."""
    number = {"fp32": np.float32, "fp16": np.float16, "int8": np.int8}[dtype]
    cache: Cache = {}
    for index, layer in enumerate(spec.layers):
        heads = (1, layer.attention.num_kv_heads)
        cache[contract.past_key(index)] = np.zeros((*heads, layer.attention.key_dim, 1), number)
        cache[contract.past_value(index)] = np.zeros((*heads, 1, layer.attention.value_dim), number)
        if dtype == "int8":
            cache[contract.past_key_scale(index)] = np.zeros((*heads, 1, 1), np.float32)
            cache[contract.past_value_scale(index)] = np.zeros((*heads, 1, 1), np.float32)
    return cache


def _step(
    session: ort.InferenceSession,
    spec: DecoderSpec,
    token_ids: npt.NDArray[np.int64],
    start: int,
    cache: Cache,
    sequence_length: int,
) -> tuple[FloatArray, Cache]:
    count = len(token_ids)
    # The one slot of the first step's cache is empty.
    slot_positions = np.arange(start) if start else np.full(1, -1)
    feeds: dict[str, npt.NDArray[np.generic]] = {
        contract.INPUT_IDS: token_ids[None],
        contract.POSITION_IDS: np.arange(start, start + count)[None],
        contract.NEW_BIAS: np.triu(np.full((count, count), contract.MASKED, np.float32), 1)[None, None],
        contract.LOGIT_ROWS: np.arange(count),
    }
    if spec.depends_on_length:
        feeds[contract.SEQUENCE_LENGTH] = np.array([sequence_length])
    for group, members in enumerate(spec.cache_groups()):
        window = members.sliding_window or sequence_length
        bias = contract.window_bias(np.arange(start, start + count), slot_positions, window)
        feeds[contract.past_bias(group)] = bias[None, None]
    # What a step returns of a layer has the names of what it reads, but for the beginning.
    names = [name.replace("past_", "new_", 1) for name in cache]
    logits, *new = session.run([contract.LOGITS, *names], {**feeds, **cache})
    return logits[0], dict(zip(cache, new, strict=True))


def _log_softmax(logits: FloatArray) -> npt.NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    normalized: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return normalized
