"""How a model and its KV cache fit into memory: the arithmetic of `edgekit plan` and of every load.

Everything is counted for the whole process, as the system counts it (resident set), at the moment when most is held:

    base        the interpreter, NumPy, ONNX Runtime, the tokenizer
    weights     as ONNX Runtime's CPU provider holds them once they are repacked; of a mapped table, what
                was looked up lately
    cache       slots × bytes of a slot, from the spec
    workspace   activations and scores of the largest step, and its logits

A plan chooses the KV cache's dtype, its slots and the tokens of a prefill step. Bytes of weights and cache follow from
the spec; the constants below were measured (ONNX Runtime 1.32, x86-64; docs/memory.md has how, and how far off it is).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from edgekit.bundle import Bundle
from edgekit.cache_layout import CacheLayout, KVCacheDtype, cache_layout
from edgekit.errors import DoesNotFitError, UsageError, one_of
from edgekit.runtime.cache import BUCKET_TOKENS, ROLLBACK_TOKENS, slot_limit
from edgekit.runtime.mapped_table import KEPT_LOOKUPS, LOOKUP_BYTES
from edgekit.runtime.policies.laq import PROMPT_TOKENS, PSEUDO_TOKENS
from edgekit.sizes import format_size
from edgekit.spec import DecoderSpec

DtypeChoice: TypeAlias = Literal["auto", "fp32", "fp16", "int8"]
DTYPE_CHOICES: tuple[DtypeChoice, ...] = ("auto", "fp32", "fp16", "int8")
CHUNK_TOKENS = (128, 64, 32, 16, 8)
MIN_CAPACITY_TOKENS = BUCKET_TOKENS

# Interpreter, NumPy and ONNX Runtime before a bundle is loaded, unless the process holds more by then; what a session
# takes besides; each layer's nodes and kernels; each entry of the vocabulary in the tokenizer.
PROCESS_BYTES = 60_000_000
SESSION_BYTES = 20_000_000
LAYER_BYTES = 230_000
TOKEN_BYTES = 640
# Rows of scores that attention holds at once, of each query head and new token, per cache dtype.
SCORE_COPIES: dict[KVCacheDtype, float] = {"fp32": 3.6, "fp16": 3.6, "int8": 4.2}
# A layer's float16 cache is widened while it is read, keys and values.
WIDENED_BYTES = 4
# Activations that are held at once: so many times the widest of a layer.
ACTIVATION_COPIES = 4.0


@dataclass(frozen=True, kw_only=True)
class MemoryRequest:
    """What is asked for.

    Attributes:
        budget_bytes: Most memory of the whole process.
        context_tokens: Tokens that the KV cache must have room for; None for as many as fit, up to the model's context.
        dtype: How keys and values are stored; "auto" for the bundle's own, or int8 where that does not fit.
        layer_budgets_tokens: Slots of every layer, of a cache profile; None when all layers have the same.
        allow_long: Whether the context may be longer than what the model was trained on.
        base_bytes: What the process holds before anything is loaded, if that is known to be more than usual.
        copied_tokens: Tokens of every layer in a copy of the cache that the policy laq looks ahead with; None without.
        context_option: The option that `context_tokens` comes from, for what a refusal proposes.
    """

    budget_bytes: int
    context_tokens: int | None = None
    dtype: DtypeChoice = "auto"
    layer_budgets_tokens: tuple[int, ...] | None = None
    allow_long: bool = False
    base_bytes: int = 0
    copied_tokens: tuple[int, ...] | None = None
    context_option: str = "--ctx-size"


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """What is going to be held, and what it was chosen for.

    Attributes:
        budget_bytes: Most memory of the whole process.
        base_bytes: Interpreter, libraries, tokenizer.
        weights_bytes: Weights, as the backend holds them.
        cache_bytes: KV cache, all slots.
        workspace_bytes: Activations and logits of the largest step.
        layout: Layout of the cache, its dtype included.
        capacity_tokens: Slots of a group without a sliding window.
        chunk_tokens: Most tokens of a prefill step.
        context_tokens: Positions that a conversation may have.
    """

    budget_bytes: int
    base_bytes: int
    weights_bytes: int
    cache_bytes: int
    workspace_bytes: int
    layout: CacheLayout
    capacity_tokens: int
    chunk_tokens: int
    context_tokens: int

    @property
    def total_bytes(self) -> int:
        """Everything at once."""
        return self.base_bytes + self.weights_bytes + self.cache_bytes + self.workspace_bytes


def plan_memory(bundle: Bundle, request: MemoryRequest) -> MemoryPlan:
    """Chooses how to run a bundle within a budget.

    Of the dtypes that are allowed, the widest with room for the context wins, then the one with most slots; of the
    chunks, the largest that leaves room for the context, then the smallest.

    Args:
        bundle: The bundle; only its manifest is read.
        request: What is asked for.

    Raises:
        UsageError: A number is out of range, or the context is longer than what the model was trained on.
        DoesNotFitError: The budget is too small; the message says by how much, and what would fit.
    """
    context = _context(bundle.manifest.spec, request)
    best = _best(bundle, request, context)
    if best is None or (request.context_tokens is not None and best.capacity_tokens < context):
        raise DoesNotFitError(_refusal(bundle, request, best, context))
    return best


def _best(bundle: Bundle, request: MemoryRequest, context: int) -> MemoryPlan | None:
    """Returns the first plan with room for the context, or that with most slots; None if nothing fits."""
    best: MemoryPlan | None = None
    for dtype in _dtypes(bundle, request):
        layout = cache_layout(bundle.manifest.spec, dtype, request.layer_budgets_tokens)
        for chunk_tokens in CHUNK_TOKENS:
            plan = _largest(bundle, request, layout, chunk_tokens, context)
            if plan is not None and plan.capacity_tokens >= context:
                return plan
            if plan is not None and (best is None or plan.capacity_tokens > best.capacity_tokens):
                best = plan
    return best


def _context(spec: DecoderSpec, request: MemoryRequest) -> int:
    wanted = request.context_tokens
    if wanted is not None and (type(wanted) is not int or wanted < 1):
        raise UsageError(f"context size is {wanted!r}; it must be an integer of at least 1 token")
    if wanted is not None and wanted > spec.max_positions and not request.allow_long:
        raise UsageError(
            f"context size is {wanted}, the model was trained on {spec.max_positions} positions; ask for no more, or "
            "say --allow-long, and expect nonsense beyond them"
        )
    return wanted or spec.max_positions


def _dtypes(bundle: Bundle, request: MemoryRequest) -> Sequence[KVCacheDtype]:
    """Returns what may be chosen from; float16 only by name, for ONNX Runtime's CPU provider computes on it slowest."""
    if request.dtype not in DTYPE_CHOICES:
        raise UsageError(f"KV cache dtype {one_of(str(request.dtype), DTYPE_CHOICES)}")
    own = bundle.manifest.kv_cache_dtype
    if request.dtype != "auto":
        return (request.dtype,)
    return (own,) if own == "int8" else (own, "int8")


def _largest(
    bundle: Bundle, request: MemoryRequest, layout: CacheLayout, chunk_tokens: int, context: int
) -> MemoryPlan | None:
    """Returns the plan with most slots, up to the context; None if not even the fewest fit."""
    low, high = MIN_CAPACITY_TOKENS, max(context, MIN_CAPACITY_TOKENS)
    capacities = range(low, high + 1, BUCKET_TOKENS)
    first, count = 0, len(capacities)
    fits: MemoryPlan | None = None
    whole = _plan(bundle, request, layout, chunk_tokens, high, context)
    if whole.total_bytes <= request.budget_bytes:
        return whole
    while first < count:
        middle = (first + count) // 2
        plan = _plan(bundle, request, layout, chunk_tokens, capacities[middle], context)
        if plan.total_bytes <= request.budget_bytes:
            fits, first = plan, middle + 1
        else:
            count = middle
    return fits


def _plan(
    bundle: Bundle, request: MemoryRequest, layout: CacheLayout, chunk_tokens: int, capacity: int, context: int
) -> MemoryPlan:
    spec = bundle.manifest.spec
    workspace = workspace_bytes(spec, layout, chunk_tokens, capacity)
    if request.copied_tokens is not None:
        looking_ahead = workspace_bytes(spec, layout, PROMPT_TOKENS + PSEUDO_TOKENS, capacity)
        workspace = max(workspace, looking_ahead + _copy_bytes(layout, request.copied_tokens, capacity))
    cache = cache_bytes(layout, capacity)
    return MemoryPlan(
        budget_bytes=request.budget_bytes,
        base_bytes=_base_bytes(spec, request.base_bytes),
        weights_bytes=weights_bytes(spec, bundle.manifest.storage),
        cache_bytes=cache,
        workspace_bytes=max(workspace, _loading_bytes(spec, bundle.manifest.storage) - cache),
        layout=layout,
        capacity_tokens=capacity,
        chunk_tokens=chunk_tokens,
        context_tokens=context,
    )


def _loading_bytes(spec: DecoderSpec, storage: dict[str, str]) -> int:
    """Returns what packing the weights holds for a moment: the mapped table, before there are tokenizer and cache."""
    if not spec.tie_word_embeddings:
        return 0
    mapped = _mapped_bytes(storage["embed_tokens.weight"], *spec.tensor_shapes()["embed_tokens.weight"])
    return max(0, mapped - KEPT_LOOKUPS * LOOKUP_BYTES - spec.vocab_size * TOKEN_BYTES)


def _base_bytes(spec: DecoderSpec, held_bytes: int) -> int:
    loaded = SESSION_BYTES + len(spec.layers) * LAYER_BYTES + spec.vocab_size * TOKEN_BYTES
    return max(held_bytes, PROCESS_BYTES) + loaded


def cache_bytes(layout: CacheLayout, capacity: int) -> int:
    """Returns the bytes of a KV cache with so many slots in its groups without a sliding window."""
    return sum(
        layout.slot_bytes(index) * layout.rounded(slot_limit(group.sliding_window, capacity))
        for index, group in enumerate(layout.groups)
    )


def _copy_bytes(layout: CacheLayout, kept_tokens: Sequence[int], capacity: int) -> int:
    """Returns the bytes of a compressed copy of a full cache; layers with a sliding window are copied whole."""
    size = 0
    for index, group in enumerate(layout.groups):
        slots = slot_limit(group.sliding_window, capacity)
        if group.sliding_window is None:
            kept = kept_tokens[group.layers[0]] + ROLLBACK_TOKENS
            slots = min(slots, -(-kept // BUCKET_TOKENS) * BUCKET_TOKENS)
        size += layout.slot_bytes(index) * layout.rounded(slots)
    return size


def weights_bytes(spec: DecoderSpec, storage: dict[str, str]) -> int:
    """Returns the bytes of the weights, as ONNX Runtime's CPU provider holds them.

    A block of b weights takes b · bits / 8 bytes of codes, a float32 scale and the float32 sum that integer products
    need; an affine one also a float32 offset. Other matrices are held in float32.

    Args:
        spec: The decoder.
        storage: How each matrix is stored, by canonical name, as the manifest has it.
    """
    shapes = spec.tensor_shapes()
    held = sum(_matrix_bytes(storage[name], *shapes[name]) for name in storage)
    if spec.tie_word_embeddings:
        mapped = _mapped_bytes(storage["embed_tokens.weight"], *shapes["embed_tokens.weight"])
        held += min(mapped, KEPT_LOOKUPS * LOOKUP_BYTES)
    return held + sum(4 * shape[0] for shape in shapes.values() if len(shape) == 1)


def _matrix_bytes(stored: str, rows: int, columns: int) -> int:
    precision, *rest = stored.split()
    if not rest:
        return rows * columns * 4
    scheme, block = rest[0], int(rest[2])
    blocks = rows * -(-columns // block)
    return blocks * (block * int(precision.removeprefix("int")) // 8 + (12 if scheme == "affine" else 8))


def _mapped_bytes(stored: str, rows: int, columns: int) -> int:
    """Returns the bytes of a table in the file of the lowered graph."""
    rest = stored.split()[1:]
    if not rest:
        return rows * columns * 4
    scheme, block = rest[0], int(rest[2])
    return rows * -(-columns // block) * (block + (8 if scheme == "affine" else 4))


def workspace_bytes(spec: DecoderSpec, layout: CacheLayout, chunk_tokens: int, capacity: int) -> int:
    """Returns the bytes that the largest step holds besides weights and cache.

    Args:
        spec: The decoder.
        layout: Layout of the cache.
        chunk_tokens: New tokens of the step.
        capacity: Slots of the cache.
    """
    scores = max(layer.attention.num_heads for layer in spec.layers) * chunk_tokens * (capacity + chunk_tokens) * 4
    widest = max(_layer_width(spec))
    activations = chunk_tokens * widest * 4
    widened = 0
    if layout.dtype == "fp16":
        shapes = [stack.shape for stack in layout.stacks]
        widened = max(shape.slot_bytes("fp32") for shape in shapes) * capacity
    rows = sum(len(stack.layers) * stack.shape.slot_bytes("fp32") for stack in layout.stacks) * 2 * chunk_tokens
    logits = 2 * spec.vocab_size * 4
    return int(SCORE_COPIES[layout.dtype] * scores + ACTIVATION_COPIES * activations + widened + rows + logits)


def _layer_width(spec: DecoderSpec) -> Iterator[int]:
    """Yields the channels of a token that a layer holds at once."""
    for layer in spec.layers:
        attention = layer.attention
        heads = attention.num_heads * attention.key_dim
        heads += attention.num_kv_heads * (attention.key_dim + attention.value_dim)
        yield 2 * spec.hidden_size + max(heads, (2 if layer.mlp.gated else 1) * layer.mlp.width)


def _refusal(bundle: Bundle, request: MemoryRequest, best: MemoryPlan | None, context: int) -> str:
    """Says by how much a budget is too small, and which settings would fit."""
    capacity = MIN_CAPACITY_TOKENS if request.context_tokens is None else max(context, MIN_CAPACITY_TOKENS)
    wanted = _least(bundle, request, capacity, context)
    least = _least(bundle, request, MIN_CAPACITY_TOKENS, context) if best is None else wanted
    what = f"{context} tokens do" if best is not None else "this model does"
    settings = _smaller_settings(bundle, request, best, context)
    if least.capacity_tokens < capacity:
        settings.append(f"{request.context_option} {least.capacity_tokens} {_budget_setting(least)}")
    settings.append(_budget_setting(wanted))
    return (
        f"{what} not fit into the memory budget {format_size(request.budget_bytes)}, which is "
        f"{format_size(least.total_bytes - request.budget_bytes)} too small: the least is "
        f"{format_size(least.total_bytes)} (base {format_size(least.base_bytes)}, weights "
        f"{format_size(least.weights_bytes)}, {least.layout.dtype} cache of {least.capacity_tokens} tokens "
        f"{format_size(least.cache_bytes)}, workspace {format_size(least.workspace_bytes)}); what would fit: "
        f"{', or '.join(settings)}"
    )


def _least(bundle: Bundle, request: MemoryRequest, capacity: int, context: int) -> MemoryPlan:
    """Returns the plan that takes least with so many slots, whether it fits or not."""
    spec, budgets = bundle.manifest.spec, request.layer_budgets_tokens
    layouts = (cache_layout(spec, dtype, budgets) for dtype in _dtypes(bundle, request))
    plans = (_plan(bundle, request, layout, CHUNK_TOKENS[-1], capacity, context) for layout in layouts)
    return min(plans, key=lambda plan: plan.total_bytes)


def _smaller_settings(bundle: Bundle, request: MemoryRequest, best: MemoryPlan | None, context: int) -> list[str]:
    """Returns what fits into the budget as it is: fewer tokens, an int8 cache, or both."""
    settings = [] if best is None else [f"{request.context_option} {best.capacity_tokens}"]
    smaller = _best(bundle, dataclasses.replace(request, dtype="int8"), context)
    if smaller is None or "int8" in _dtypes(bundle, request):
        return settings
    if smaller.capacity_tokens >= context or request.context_tokens is None:
        settings.append("--kv-cache-dtype int8")
    elif best is None or smaller.capacity_tokens > best.capacity_tokens:
        settings.append(f"--kv-cache-dtype int8 {request.context_option} {smaller.capacity_tokens}")
    return settings


def _budget_setting(plan: MemoryPlan) -> str:
    return f"--memory-budget {-(-plan.total_bytes >> 20)}MiB"
