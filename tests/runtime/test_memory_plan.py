"""What a plan counts, against sums by hand on a tiny decoder; and that it keeps to its budget whatever that is."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from edgekit.bundle import Bundle
from edgekit.cache_layout import KV_CACHE_DTYPES, KVCacheDtype, cache_layout
from edgekit.errors import DoesNotFitError, UsageError
from edgekit.runtime.cache import KVCache
from edgekit.runtime.memory_plan import (
    CHUNK_TOKENS,
    DTYPE_CHOICES,
    MemoryPlan,
    MemoryRequest,
    cache_bytes,
    plan_memory,
    weights_bytes,
    workspace_bytes,
)
from edgekit.sizes import parse_size
from tests.tiny_specs import CONTEXT, storage_of, tiny_spec, unwritten_bundle

PLENTY = 1 << 40
BUNDLE = unwritten_bundle()
# Weights of a layer's seven projections: 64 × 64 twice, 32 × 64 twice, 96 × 64 twice, 64 × 96.
PROJECTIONS = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64)
TABLE = 320 * 64
# Two norms in each layer and the last one, in float32.
NORMS = (2 * 2 + 1) * 64 * 4


def _plan(bundle: Bundle = BUNDLE, *, budget: int = PLENTY, **changes: Any) -> MemoryPlan:
    return plan_memory(bundle, MemoryRequest(budget_bytes=budget, **changes))


def _refusal(bundle: Bundle = BUNDLE, *, budget: int, **changes: Any) -> str:
    with pytest.raises(DoesNotFitError) as caught:
        _plan(bundle, budget=budget, **changes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def _least(bundle: Bundle = BUNDLE, **changes: Any) -> int:
    """The smallest budget that is not refused, found by trying."""
    refused, fits = 1, _plan(bundle, **changes).total_bytes
    while fits - refused > 1:
        middle = (refused + fits) // 2
        try:
            _plan(bundle, budget=middle, **changes)
            fits = middle
        except DoesNotFitError:
            refused = middle
    return fits


@pytest.mark.parametrize(
    ("stored", "size"),
    [
        ("fp32", PROJECTIONS * 4),
        ("fp16", PROJECTIONS * 4),
        # Blocks of 32: 16 bytes of codes, scale and sum; an offset too where they are affine.
        ("int4 symmetric block 32", PROJECTIONS // 32 * (16 + 8)),
        ("int4 affine block 32", PROJECTIONS // 32 * (16 + 12)),
        ("int8 symmetric block 32", PROJECTIONS // 32 * (32 + 8)),
        ("int8 affine block 16", PROJECTIONS // 16 * (16 + 12)),
        # A row of 96 takes two blocks of 64.
        ("int8 affine block 64", (PROJECTIONS - 2 * 64 * 96 + 2 * 64 * 128) // 64 * (64 + 12)),
    ],
)
def test_projections_are_counted_as_they_are_repacked(stored: str, size: int) -> None:
    spec = tiny_spec()
    expected = size + 2 * TABLE * 4 + NORMS  # embedding and head in float32
    assert weights_bytes(spec, storage_of(spec, stored, "fp32")) == expected


@pytest.mark.parametrize(
    ("stored", "packed", "mapped"),
    [
        ("fp16", TABLE * 4, TABLE * 4),
        ("int8 symmetric block 32", TABLE // 32 * (32 + 8), TABLE // 32 * (32 + 4)),
        ("int8 affine block 32", TABLE // 32 * (32 + 12), TABLE // 32 * (32 + 8)),
    ],
)
def test_a_tied_embedding_is_packed_for_the_head_and_mapped_for_its_rows(stored: str, packed: int, mapped: int) -> None:
    untied, tied = tiny_spec(), tiny_spec(tied=True)
    projections = PROJECTIONS // 32 * (16 + 12)
    layers = "int4 affine block 32"
    assert weights_bytes(tied, storage_of(tied, layers, stored)) == projections + packed + mapped + NORMS
    assert weights_bytes(untied, storage_of(untied, layers, stored)) == projections + 2 * packed + NORMS


def test_biases_are_counted_in_float32() -> None:
    spec = tiny_spec()
    layer = spec.layers[0]
    attention = msgspec.structs.replace(layer.attention, qkv_bias=True, o_bias=True)
    with_biases = msgspec.structs.replace(
        spec, layers=(msgspec.structs.replace(layer, attention=attention), spec.layers[1])
    )
    storage = storage_of(spec, "fp16", "fp16")
    assert weights_bytes(with_biases, storage) - weights_bytes(spec, storage) == (64 + 32 + 32 + 64) * 4


@pytest.mark.parametrize(("dtype", "slot"), [("fp32", 256), ("fp16", 128), ("int8", 80)])
def test_a_cache_takes_its_slots_and_windows_take_no_more_than_they_see(dtype: KVCacheDtype, slot: int) -> None:
    whole, small = (1024, 256) if dtype == "int8" else (1000, 200)  # whole blocks
    assert cache_bytes(cache_layout(tiny_spec(), dtype), 1000) == whole * (2 * slot + 4)
    # A window of 100 keeps 64 tokens more for what is rolled back, in buckets of 128.
    windowed = cache_layout(tiny_spec((None, 100)), dtype)
    assert cache_bytes(windowed, 1000) == (whole + 256) * (slot + 4)
    assert cache_bytes(windowed, 200) == 2 * small * (slot + 4)
    budgets = cache_layout(tiny_spec(), dtype, (40, 80))
    assert cache_bytes(budgets, 1000) == 2 * whole * (slot + 4)


@pytest.mark.parametrize("dtype", KV_CACHE_DTYPES)
@pytest.mark.parametrize("windows", [(None, None), (None, 7), (200, 7)])
def test_a_full_cache_holds_what_was_counted(dtype: KVCacheDtype, windows: tuple[int | None, int | None]) -> None:
    layout = cache_layout(tiny_spec(windows), dtype)
    cache = KVCache(layout, 640)
    for _ in range(5):
        cache.reserve(128)
        cache.append([stack.empty(stack.stack, dtype, 128) for stack in cache.stacks], range(128))
    biases = sum(slots.past_bias.nbytes for slots in cache.maps)
    assert cache.size_bytes + biases == cache_bytes(layout, 640)


def test_more_of_anything_takes_more_workspace() -> None:
    spec, layout = tiny_spec(), cache_layout(tiny_spec())
    few = workspace_bytes(spec, layout, 8, 128)
    assert few < workspace_bytes(spec, layout, 16, 128) < workspace_bytes(spec, layout, 16, 256)
    # At least the scores of a step's tokens over all slots, and its logits.
    assert workspace_bytes(spec, layout, 16, 4096) > 4 * 16 * 4096 * 4 + 320 * 4


def test_with_plenty_of_memory_the_context_is_that_of_the_model() -> None:
    plan = _plan()
    assert (plan.capacity_tokens, plan.context_tokens, plan.chunk_tokens) == (CONTEXT, CONTEXT, CHUNK_TOKENS[0])
    assert plan.layout == cache_layout(tiny_spec())
    assert plan.cache_bytes == CONTEXT * 516
    assert plan.workspace_bytes == workspace_bytes(tiny_spec(), plan.layout, CHUNK_TOKENS[0], CONTEXT)
    assert plan.total_bytes == plan.base_bytes + plan.weights_bytes + plan.cache_bytes + plan.workspace_bytes


def test_what_the_process_holds_already_counts_when_it_is_more_than_usual() -> None:
    usual = _plan().base_bytes
    assert _plan(base_bytes=1).base_bytes == usual
    assert _plan(base_bytes=10 << 30).base_bytes - _plan(base_bytes=9 << 30).base_bytes == 1 << 30


@pytest.mark.parametrize(("wanted", "capacity"), [(1, 128), (100, 128), (128, 128), (129, 129), (1000, 1000)])
def test_a_context_that_is_asked_for_is_what_is_planned(wanted: int, capacity: int) -> None:
    plan = _plan(context_tokens=wanted)
    assert (plan.context_tokens, plan.capacity_tokens) == (wanted, capacity)


def _budgets(bundle: Bundle, **changes: Any) -> Iterator[int]:
    """Budgets from the least to plenty: where a slot more may fit, and everywhere between."""
    least, most = _least(bundle, **changes), _plan(bundle, **changes).total_bytes
    yield from (least, least + 1, most - 1, most, most + 1)
    yield from range(least, most, max(1, (most - least) // 150))


@pytest.mark.parametrize("dtype", DTYPE_CHOICES)
@pytest.mark.parametrize("windows", [(None, None), (None, 100)])
def test_no_plan_exceeds_its_budget_and_more_memory_never_gives_fewer_slots(
    dtype: KVCacheDtype, windows: tuple[int | None, int | None]
) -> None:
    bundle = unwritten_bundle(tiny_spec(windows))
    capacity = 0
    for budget in sorted(_budgets(bundle, dtype=dtype)):
        plan = _plan(bundle, budget=budget, dtype=dtype)
        assert plan.total_bytes <= budget == plan.budget_bytes
        assert plan.capacity_tokens >= capacity
        assert plan.capacity_tokens % 128 == 0
        capacity = plan.capacity_tokens
    assert capacity == CONTEXT


def test_no_slots_are_given_away() -> None:
    # One bucket more of the same cache, in the smallest steps, would be too much.
    for budget in range(_least(), _plan().total_bytes, 200_000):
        plan = _plan(budget=budget)
        if plan.capacity_tokens < CONTEXT:
            more = plan.capacity_tokens + 128
            step = workspace_bytes(tiny_spec(), plan.layout, CHUNK_TOKENS[-1], more)
            assert plan.base_bytes + plan.weights_bytes + cache_bytes(plan.layout, more) + step > budget


def test_auto_is_what_the_bundle_has_where_that_fits_and_else_int8() -> None:
    whole = _plan(context_tokens=CONTEXT)
    assert whole.layout.dtype == "fp32"
    # Smaller steps come before a smaller dtype.
    smaller = _plan(context_tokens=CONTEXT, budget=whole.total_bytes - 1)
    assert (smaller.layout.dtype, smaller.chunk_tokens) == ("fp32", CHUNK_TOKENS[1])
    least = _least(context_tokens=CONTEXT, dtype="fp32")
    assert _plan(context_tokens=CONTEXT, budget=least).layout.dtype == "fp32"
    narrow = _plan(context_tokens=CONTEXT, budget=least - 1)
    assert (narrow.layout.dtype, narrow.capacity_tokens) == ("int8", CONTEXT)


@pytest.mark.parametrize("own", KV_CACHE_DTYPES)
def test_auto_prefers_the_dtype_of_the_bundle(own: KVCacheDtype) -> None:
    bundle = unwritten_bundle(kv_cache_dtype=own)
    assert _plan(bundle).layout.dtype == own
    assert _plan(bundle, budget=_least(bundle)).layout.dtype == "int8"


@pytest.mark.parametrize("dtype", KV_CACHE_DTYPES)
def test_a_dtype_that_is_asked_for_is_never_replaced(dtype: KVCacheDtype) -> None:
    for budget in (PLENTY, _least(dtype=dtype)):
        assert _plan(budget=budget, dtype=dtype).layout.dtype == dtype


def test_budgets_of_layers_split_the_cache_and_not_the_room() -> None:
    plan = _plan(layer_budgets_tokens=(40, 80))
    assert [group.layers for group in plan.layout.groups] == [(0,), (1,)]
    assert plan.cache_bytes == CONTEXT * 2 * 260


def test_looking_ahead_takes_a_copy_of_what_is_kept() -> None:
    budgets = (1000, 40)
    plan = _plan(layer_budgets_tokens=budgets, copied_tokens=budgets, context_tokens=2048)
    # Kept tokens and room for 64 more, in buckets: 1152 and 128 slots, beside the scores of 16 tokens.
    copy = (1152 + 128) * 260
    assert plan.workspace_bytes >= copy + workspace_bytes(tiny_spec(), plan.layout, 16, 2048)
    tight = _least(layer_budgets_tokens=budgets, context_tokens=2048)
    assert _least(layer_budgets_tokens=budgets, copied_tokens=budgets, context_tokens=2048) > tight
    windowed = unwritten_bundle(tiny_spec((None, 100)))
    small = _plan(windowed, copied_tokens=(40, 40), context_tokens=2048, budget=PLENTY)
    step = workspace_bytes(windowed.manifest.spec, small.layout, 16, 2048)
    assert small.workspace_bytes >= step + (128 + 256) * 260


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context_tokens": 0}, "context size is 0; it must be an integer of at least 1 token"),
        ({"context_tokens": -5}, "context size is -5; it must be an integer of at least 1 token"),
        ({"context_tokens": "100"}, "context size is '100'; it must be an integer"),
        ({"context_tokens": True}, "context size is True; it must be an integer"),
        ({"context_tokens": 1.5}, "context size is 1.5; it must be an integer"),
        (
            {"context_tokens": 4097},
            "context size is 4097, the model was trained on 4096 positions; ask for no more, or",
        ),
        ({"dtype": "int4"}, "KV cache dtype 'int4'; known: auto, fp16, fp32, int8 (did you mean 'int8'?)"),
        ({"dtype": None}, "KV cache dtype 'None'; known: auto"),
        ({"dtype": ["int8"]}, "known: auto"),
    ],
)
def test_what_means_nothing_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        _plan(**changes)
    assert message in str(caught.value)


def test_a_context_beyond_the_training_is_planned_when_that_is_wanted() -> None:
    assert _plan(context_tokens=10_000, allow_long=True).capacity_tokens == 10_000
    assert _plan(allow_long=True).capacity_tokens == CONTEXT


def _applied(request: MemoryRequest, setting: str) -> MemoryRequest:
    """The request with a setting that a refusal has proposed."""
    words: list[Any] = setting.split()
    for option, value in zip(words[::2], words[1::2], strict=True):
        if option == "--memory-budget":
            request = dataclasses.replace(request, budget_bytes=parse_size(value, "budget"))
        elif option == "--kv-cache-dtype":
            request = dataclasses.replace(request, dtype=value)
        else:
            assert option == request.context_option
            request = dataclasses.replace(request, context_tokens=int(value))
    return request


@pytest.mark.parametrize("base", [0, 300 << 20])
@pytest.mark.parametrize("dtype", DTYPE_CHOICES)
@pytest.mark.parametrize("context", [None, 100, 1000, CONTEXT])
@pytest.mark.parametrize("option", ["--ctx-size", "--kv-budget-tokens"])
def test_what_a_refusal_proposes_fits(dtype: KVCacheDtype, context: int | None, base: int, option: str) -> None:
    changes: dict[str, Any] = {"dtype": dtype, "context_tokens": context, "base_bytes": base, "context_option": option}
    least, bare = _least(**changes), _least(base_bytes=base)
    budgets = {1, bare // 2, bare - 1, bare, (bare + least) // 2, least - 1}
    for budget in sorted(budget for budget in budgets if budget < least):
        request = MemoryRequest(budget_bytes=budget, **changes)
        message = _refusal(budget=budget, **changes)
        settings = message.partition("what would fit: ")[2].split(", or ")
        assert any("--memory-budget" in setting for setting in settings)
        for setting in settings:
            assert plan_memory(BUNDLE, _applied(request, setting)).capacity_tokens > 0


def test_the_largest_context_that_fits_is_proposed_and_one_bucket_more_does_not_fit() -> None:
    budget = (_least(dtype="fp32") + _least(context_tokens=CONTEXT, dtype="fp32")) // 2
    message = _refusal(budget=budget, context_tokens=CONTEXT, dtype="fp32")
    proposed = int(message.partition("--ctx-size ")[2].partition(",")[0])
    assert 128 <= proposed < CONTEXT
    assert _plan(budget=budget, context_tokens=proposed, dtype="fp32").capacity_tokens == proposed
    _refusal(budget=budget, context_tokens=proposed + 128, dtype="fp32")


def test_int8_is_proposed_where_it_makes_the_difference_and_only_there() -> None:
    fits = _least(context_tokens=CONTEXT, dtype="int8")
    message = _refusal(budget=fits, context_tokens=CONTEXT, dtype="fp32")
    assert "--kv-cache-dtype int8," in message
    less = _refusal(budget=fits - 200_000, context_tokens=CONTEXT, dtype="fp32")
    assert "--kv-cache-dtype int8 --ctx-size " in less
    assert "int8 --ctx-size" not in _refusal(budget=fits - 200_000, context_tokens=CONTEXT, dtype="auto")
    assert "--kv-cache-dtype" not in _refusal(budget=1000, dtype="fp32")


def test_a_refusal_says_by_how_much_and_of_what() -> None:
    least = _least()
    message = _refusal(budget=least - (3 << 20))
    assert message.startswith("this model does not fit into the memory budget ")
    assert ", which is 3.0 MiB too small: the least is " in message
    for part in ("base ", "weights ", "int8 cache of 128 tokens ", "workspace "):
        assert part in message
    asked = _least(context_tokens=CONTEXT, dtype="fp32")
    message = _refusal(budget=asked - 1000, context_tokens=CONTEXT, dtype="fp32")
    assert message.startswith(f"{CONTEXT} tokens do not fit into the memory budget ")
    assert "which is 1000 B too small" in message
    assert f"fp32 cache of {CONTEXT} tokens" in message
