"""The KV cache against a plain list of tokens."""

from __future__ import annotations

import itertools
import sys
from types import FrameType
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest

from edgekit.cache_layout import cache_layout
from edgekit.contract import MASKED
from edgekit.errors import DoesNotFitError
from edgekit.rope import RopeSpec
from edgekit.runtime import cache as module
from edgekit.runtime import cache_arrays, slots
from edgekit.runtime.cache import KVCache
from edgekit.runtime.cache_arrays import StackArrays
from edgekit.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, NormSpec

Shape = tuple[int, int, int]
"""KV heads, channels of a key, channels of a value."""

UNIFORM: tuple[Shape, ...] = ((2, 4, 4),) * 3
# Shapes that return after another one, and keys and values of different width.
MIXED: tuple[Shape, ...] = ((2, 4, 4), (1, 4, 4), (2, 4, 4), (1, 6, 2), (2, 2, 6), (1, 4, 4))


def _spec(shapes: tuple[Shape, ...], max_positions: int = 1000) -> DecoderSpec:
    norm = NormSpec(kind="rms", epsilon=1e-5)
    layers = tuple(
        LayerSpec(
            attention=AttentionSpec(
                num_heads=heads,
                num_kv_heads=heads,
                key_dim=key_dim,
                value_dim=value_dim,
                scale=1.0,
                qkv_bias=False,
                o_bias=False,
                rope=RopeSpec(theta=1e4, rotary_dim=2),
            ),
            mlp=MlpSpec(width=8, activation="silu", gated=True, bias=False),
            norm=norm,
        )
        for heads, key_dim, value_dim in shapes
    )
    return DecoderSpec(
        family="llama",
        hidden_size=8,
        vocab_size=10,
        max_positions=max_positions,
        layers=layers,
        norm=norm,
        tie_word_embeddings=True,
    )


def _cache(spec: DecoderSpec) -> KVCache:
    return KVCache(cache_layout(spec), spec.max_positions)


def _step(spec: DecoderSpec, tags: list[int]) -> tuple[StackArrays, ...]:
    """New rows of tokens that are told apart by a number; no two numbers of one token are the same."""
    stacks = tuple(StackArrays.empty(stack, "fp32", len(tags)) for stack in cache_layout(spec).stacks)
    for arrays in stacks:
        for place, layer in enumerate(arrays.stack.layers):
            rows = _rows(arrays, layer, tags)
            arrays.keys[place], arrays.values[place] = (np.stack(part, axis) for part, axis in rows)
    return stacks


def _rows(arrays: StackArrays, layer: int, tags: list[int]) -> list[tuple[list[Any], int]]:
    shape = arrays.stack.shape
    keys = [tag + _pattern(layer, 0, shape.num_kv_heads, shape.key_dim) for tag in tags]
    values = [tag + _pattern(layer, 1, shape.num_kv_heads, shape.value_dim) for tag in tags]
    return [(keys, -1), (values, -2)]


def _pattern(layer: int, kind: int, heads: int, width: int) -> Any:
    return (np.arange(heads * width).reshape(heads, width) / 64 + kind / 2 + 1000 * layer).astype(np.float32)


def _held(cache: KVCache, group: int = 0) -> list[int]:
    """The numbers of the tokens in live slots of a group, from the oldest, after checking every value of theirs."""
    slots, bias = cache.maps[group].order(), cache.maps[group].past_bias
    assert set(np.unique(bias)) <= {np.float32(0), np.float32(MASKED)}
    assert sorted(slots) == np.flatnonzero(bias[0, 0, 0] == 0).tolist()
    stacks = [arrays for arrays in cache.stacks if arrays.stack.group == group]
    tags = stacks[0].keys[0][0, 0, slots].astype(int) - 1000 * stacks[0].stack.layers[0]
    for arrays in stacks:
        for place, layer in enumerate(arrays.stack.layers):
            parts = zip(_rows(arrays, layer, tags.tolist()), (arrays.keys, arrays.values), strict=True)
            for (rows, axis), array in parts:
                found = np.take(array[place], slots, axis)
                np.testing.assert_array_equal(found, np.stack(rows, axis) if rows else found[:0].reshape(found.shape))
    held: list[int] = tags.tolist()
    return held


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("shapes", [UNIFORM, MIXED])
def test_random_operations_do_what_they_do_to_a_list(
    shapes: tuple[Shape, ...], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BUCKET_TOKENS", 8)
    spec, random = _spec(shapes, max_positions=150), np.random.default_rng(seed)
    cache, model, next_tag = _cache(spec), list[int](), 1
    for _ in range(70):
        match random.integers(4):
            case 0:
                length = int(random.integers(len(model) + 1))
                cache.truncate(length)
                del model[length:]
            case 1:
                cache.reserve(int(random.integers(min(20, 151 - len(model)))))
            case _:
                tags = list(range(next_tag, next_tag + int(random.integers(1, 12))))
                next_tag += len(tags)
                # As after a draft tree: some of the rows, in order.
                rows = [row for row in range(len(tags)) if random.random() < 0.7][: 150 - len(model)]
                cache.append(_step(spec, tags), rows)
                model += [tags[row] for row in rows]
        assert cache.length == len(model) <= cache.capacity <= 152
        assert cache.maps[0].past_bias.shape == (1, 1, 1, cache.capacity)
        assert _held(cache) == model
        assert cache.room == 150 - len(model)
    assert next_tag < 1000


@pytest.mark.parametrize(("rows", "first"), [([3, 0, 2], [4, 1]), ([0, 2, 1, 3], [1, 3])])
def test_rows_may_be_kept_in_any_order(rows: list[int], first: list[int]) -> None:
    spec = _spec(MIXED)
    cache = _cache(spec)
    cache.append(_step(spec, [1, 2, 3, 4]), rows)
    cache.truncate(2)
    assert _held(cache) == first


def test_slots_need_not_be_consecutive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUCKET_TOKENS", 8)
    spec = _spec(MIXED)
    cache = _cache(spec)
    cache.append(_step(spec, [1, 2, 3, 4, 5, 6]), range(6))
    cache.slide(2, sinks=1)
    assert _held(cache) == [1, 4, 5, 6]
    cache.append(_step(spec, [7, 8, 9, 10]), range(4))
    assert _held(cache) == [1, 4, 5, 6, 7, 8, 9, 10]
    assert cache.capacity == 8, "the slots of the evicted tokens are used again"
    cache.append(_step(spec, [11, 12]), range(2))
    assert cache.capacity == 16
    assert _held(cache) == [1, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    assert cache.length == cache.next_position == 12
    cache.truncate(8)
    assert _held(cache) == [1, 4, 5, 6, 7, 8]


def test_after_sliding_half_of_what_is_held_must_remain() -> None:
    spec = _spec(UNIFORM)
    cache = _cache(spec)
    cache.append(_step(spec, list(range(1, 21))), range(20))
    cache.slide(10, sinks=2)
    assert [length for length in range(1, 21) if cache.reusable(length)] == list(range(15, 21))
    assert cache.reusable(0)
    assert not cache.reusable(21)
    cache.truncate(0)
    assert (cache.length, cache.live, cache.next_position) == (0, 0, 0)


def test_kv_heads_keep_different_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUCKET_TOKENS", 8)
    spec = _spec(MIXED)
    cache, random = _cache(spec), np.random.default_rng(0)
    cache.append(_step(spec, list(range(1, 31))), range(30))
    chosen = [
        np.sort(random.permuted(np.tile(np.arange(30), (len(s.layers), s.shape.num_kv_heads, 1)), axis=2)[..., :6])
        for s in cache.layout.stacks
    ]
    kept = cache.selected(chosen)
    for arrays, before, kept_slots in zip(kept.stacks, cache.stacks, chosen, strict=True):
        for layer, head in np.ndindex(kept_slots.shape[:2]):
            index = kept_slots[layer, head]
            np.testing.assert_array_equal(arrays.keys[layer, head, :, :6], before.keys[layer, head][:, index])
            np.testing.assert_array_equal(arrays.values[layer, head, :6], before.values[layer, head][index])
    assert _held(cache) == list(range(1, 31)), "the cache that was chosen from is as it was"
    assert (kept.length, kept.live, kept.next_position) == (30, 6, 30)
    assert [length for length in range(31) if kept.reusable(length)] == [0, 30]
    cache.become(cache.selected(chosen, give_back=True))
    for one, other in zip(cache.stacks, kept.stacks, strict=True):
        np.testing.assert_array_equal(one.keys, other.keys)
    cache.append(_step(spec, [50]), [0])
    assert (cache.length, cache.live) == (31, 7)


def _windowed(window: int, max_positions: int) -> DecoderSpec:
    spec = _spec(UNIFORM, max_positions)
    attention = msgspec.structs.replace(spec.layers[1].attention, sliding_window=window)
    middle = msgspec.structs.replace(spec.layers[1], attention=attention)
    return msgspec.structs.replace(spec, layers=(spec.layers[0], middle, spec.layers[2]))


def test_a_group_with_a_window_holds_little_more_than_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUCKET_TOKENS", 8)
    monkeypatch.setattr(module, "ROLLBACK_TOKENS", 4)
    spec, random = _windowed(10, 400), np.random.default_rng(0)
    cache, tags = _cache(spec), list[int]()
    while len(tags) < 300:
        new = list(range(len(tags) + 1, len(tags) + 1 + int(random.integers(1, 40))))
        cache.append(_step(spec, new), range(len(new)))
        tags += new
        held = _held(cache, 1)
        assert _held(cache, 0) == tags
        assert held == tags[-len(held) :]
        assert min(9, len(tags)) <= len(held) <= cache.maps[1].capacity <= 16
        positions = cache.maps[1].positions[cache.maps[1].order()]
        assert positions.tolist() == list(range(len(tags) - len(held), len(tags)))
    end = len(tags)
    usable = [length for length in range(end + 1) if cache.reusable(length)]
    assert usable == [0, *range(end - (len(held) - 9), end + 1)], "nine tokens before each must be there"
    cache.truncate(usable[1])
    assert _held(cache, 1) == tags[: usable[1]][-9:]


def test_the_bias_is_derived_from_the_map() -> None:
    spec = _spec(UNIFORM)
    cache = _cache(spec)
    cache.append(_step(spec, [1, 2, 3]), range(3))
    cache.maps[0].past_bias[:] = 0  # whatever it was
    cache.truncate(2)
    assert _held(cache) == [1, 2]


def test_capacity_grows_in_buckets_by_an_eighth_at_least_and_no_further_than_the_context() -> None:
    spec = _spec(UNIFORM, max_positions=2100)
    cache = _cache(spec)
    seen = [cache.capacity]
    for tag in range(1, 2101):
        cache.append(_step(spec, [tag]), [0])
        if cache.capacity != seen[-1]:
            assert tag == seen[-1] + 1, "it grows no earlier than it must"
            seen.append(cache.capacity)
    assert seen[:3] == [128, 256, 384]
    assert seen[-1] == 2100
    assert all(after % 128 == 0 and before * 9 / 8 <= after for before, after in itertools.pairwise(seen[:-1]))
    assert cache.length == 2100


def test_an_int8_cache_has_whole_blocks_and_holds_no_more_tokens_for_it() -> None:
    cache = KVCache(cache_layout(_spec(UNIFORM), "int8"), 100)
    assert cache.capacity == 128
    stack = cache.layout.stacks[0]
    cache.append((StackArrays.empty(stack, "int8", 100, is_cache=False),), range(100))
    assert (cache.capacity, cache.room, cache.live) == (128, 0, 100)


def test_a_prompt_gets_its_slots_at_once() -> None:
    cache = _cache(_spec(UNIFORM, max_positions=2000))
    cache.reserve(700)
    assert cache.capacity == 768
    assert cache.length == 0
    assert _held(cache) == []


def test_a_prompt_of_known_length_gets_its_slots_in_ever_larger_steps_and_no_more_than_it_needs() -> None:
    spec = _spec(UNIFORM, max_positions=5000)
    cache, seen = _cache(spec), []
    for start in range(0, 4096, 128):
        cache.reserve(128, following=4160 - start - 128)
        cache.append(_step(spec, list(range(start, start + 128))), range(128))
        seen.append(cache.capacity)
    assert sorted(set(seen)) == [256, 384, 640, 1024, 1536, 2304, 4224]
    assert _held(cache) == list(range(4096))
    cache.reserve(1, following=1000)
    assert cache.capacity == 4224, "nothing is moved before it must be"
    with pytest.raises(DoesNotFitError, match="5001 tokens are more than the 5000 that the KV cache has room for"):
        cache.reserve(905)


def test_an_empty_cache_makes_room_for_an_answer_at_once() -> None:
    cache = _cache(_spec(UNIFORM, max_positions=5000))
    cache.reserve(128, following=64)
    assert cache.capacity == 256


@pytest.mark.parametrize("large_bytes", [0, 1 << 40])
def test_a_cache_that_is_almost_empty_again_gives_room_back(large_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGE_BYTES", large_bytes)
    spec = _spec(UNIFORM, max_positions=5000)
    cache = _cache(spec)
    cache.append(_step(spec, list(range(1500))), range(1500))
    capacity = cache.capacity
    cache.truncate(1000)
    assert cache.capacity == capacity, "half of it is in use"
    cache.truncate(300)
    assert cache.capacity == 384
    assert _held(cache) == list(range(300))
    cache.append(_step(spec, [700, 800]), [1])
    assert _held(cache) == [*range(300), 800]
    cache.truncate(0)
    assert cache.capacity == 384, "it is not worth the while"


def test_large_arrays_are_not_held_twice_while_they_are_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = _spec(((2, 64, 64),) * 8, max_positions=100_000)
    cache = _cache(spec)
    cache.reserve(9000)
    assert cache.size_bytes > 2 * module.LARGE_BYTES
    for array in (cache.stacks[0].keys, cache.stacks[0].values):
        array[:] = 1.0  # for its pages to be there
    process, give_back, seen = psutil.Process(), cache_arrays.release_pages, []

    def watched(array: Any) -> None:
        seen.append(process.memory_info().rss)
        give_back(array)

    monkeypatch.setattr(cache_arrays, "release_pages", watched)
    before, size = process.memory_info().rss, cache.size_bytes
    cache.reserve(9500)
    assert len(seen) == 2 * 8
    assert max(seen) - before < 0.3 * size, "a layer's keys and values, and what the new arrays have more"
    assert (cache.stacks[0].keys[..., :9000] == 1.0).all()


def test_a_context_smaller_than_a_bucket_gets_no_more_slots_than_it_has() -> None:
    cache = _cache(_spec(UNIFORM, max_positions=40))
    assert cache.capacity == 40
    assert cache.size_bytes == 3 * 2 * (4 + 4) * 40 * 4


@pytest.mark.parametrize("how", ["reserve", "append"])
def test_more_tokens_than_the_context_are_refused_and_change_nothing(how: str) -> None:
    spec = _spec(UNIFORM, max_positions=10)
    cache = _cache(spec)
    cache.append(_step(spec, list(range(1, 9))), range(8))
    with pytest.raises(DoesNotFitError, match="11 tokens are more than the 10 that the KV cache has room for"):
        cache.reserve(3) if how == "reserve" else cache.append(_step(spec, [20, 21, 22]), range(3))
    assert _held(cache) == list(range(1, 9))
    cache.append(_step(spec, [9, 10]), range(2))
    assert _held(cache) == list(range(1, 11))


class _Interruption:
    """Raises KeyboardInterrupt before the n-th instruction that the cache's module runs."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, frame: FrameType, event: str, _: object) -> _Interruption | None:
        if frame.f_code.co_filename not in (module.__file__, slots.__file__, cache_arrays.__file__):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


def _interrupted(cache: KVCache, spec: DecoderSpec, at: int) -> int:
    """Appends with growth, forgets a part and appends again; returns the instructions that were left to run."""
    interruption, before = _Interruption(at), sys.gettrace()
    steps = _step(spec, [5, 6, 7, 8, 9, 10, 11]), _step(spec, [12, 13])
    try:
        sys.settrace(interruption)
        cache.append(steps[0], range(7))
        cache.truncate(4)
        cache.append(steps[1], [1])
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return interruption.left


@pytest.mark.parametrize("large_bytes", [0, 1 << 40])
def test_an_interruption_before_any_instruction_loses_nothing_or_of_large_arrays_all(
    large_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BUCKET_TOKENS", 8)
    monkeypatch.setattr(module, "LARGE_BYTES", large_bytes)
    spec = _spec(MIXED[:2])
    at, done = 1, False
    while not done:
        cache = _cache(spec)
        cache.append(_step(spec, [1, 2, 3, 4]), range(4))
        done = _interrupted(cache, spec, at) > 0
        cache.truncate(min(cache.length, 4))
        left = _held(cache)
        assert left == [1, 2, 3, 4] or (left == [] and large_bytes == 0)
        # And it is as good as new.
        cache.append(_step(spec, list(range(20, 34))), range(14))
        assert _held(cache) == [*left, *range(20, 34)]
        assert all(arrays.keys.shape[-1] == arrays.values.shape[-2] == cache.capacity for arrays in cache.stacks)
        at += 1
    assert at > 500
