"""Arrays of a stack against what numpy does to one head at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from edgekit.cache_layout import HeadShape, KVCacheDtype, Stack
from edgekit.runtime import cache_arrays
from edgekit.runtime.cache_arrays import Part, StackArrays, as_slice, release_pages

STACK = Stack(group=0, shape=HeadShape(num_kv_heads=2, key_dim=6, value_dim=4), layers=(1, 3, 4))
DTYPES: tuple[KVCacheDtype, ...] = ("fp32", "fp16", "int8")


SLOTS = 192
"""Three blocks of an int8 cache's keys."""


def _filled(tokens: int, dtype: KVCacheDtype, seed: int = 0, *, is_cache: bool = True) -> StackArrays:
    random, arrays = np.random.default_rng(seed), StackArrays.empty(STACK, dtype, tokens, is_cache=is_cache)
    for part in arrays.parts():
        part.array[:] = random.integers(-120, 120, part.array.shape)
    return arrays


def _flat(part: Part) -> npt.NDArray[Any]:
    """What is held, shape (layers, KV, width, slots) or (layers, KV, slots, width), one block after the other."""
    if part.array.ndim == 4:
        return part.array.copy()
    return np.concatenate([part.array[:, :, block] for block in range(part.array.shape[2])], axis=3)


def _held(arrays: StackArrays) -> list[tuple[npt.NDArray[Any], int]]:
    return [(_flat(part), part.axis) for part in arrays.parts()]


def _token(array: npt.NDArray[Any], axis: int, layer: int, head: int, slot: Any) -> Any:
    return array[layer, head, :, slot] if axis == 3 else array[layer, head, slot]


@pytest.mark.parametrize(("dtype", "element", "parts"), [("fp32", 4, 2), ("fp16", 2, 2), ("int8", 1, 4)])
def test_empty_arrays_are_zero_and_of_the_size_of_the_slots(dtype: KVCacheDtype, element: int, parts: int) -> None:
    for tokens, is_cache in ((128, True), (5, False)):
        arrays = StackArrays.empty(STACK, dtype, tokens, is_cache=is_cache)
        held = _held(arrays)
        assert len(held) == parts
        assert all(not array.any() and array.shape[axis] == tokens for array, axis in held)
        assert arrays.size_bytes == 3 * tokens * STACK.shape.slot_bytes(dtype)
        assert arrays.keys.nbytes == 3 * 2 * 6 * tokens * element
        assert [part.shape(7) for part in arrays.parts()][:2] == [(3, 2, 6, 7), (3, 2, 7, 4)]


def test_blocks_of_keys_are_what_the_graph_reads() -> None:
    arrays = StackArrays.empty(STACK, "int8", 128)
    assert arrays.keys.shape == (3, 2, 2, 6, 64)
    rows = np.arange(6, dtype=np.int8)[:, None] + np.zeros((3, 2, 6, 3), np.int8)
    next(arrays.parts()).write(slice(63, 66), rows)
    np.testing.assert_array_equal(np.argwhere(arrays.keys[2, 1, :, 5]), [[0, 63], [1, 0], [1, 1]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", [[60, 61, 62], [62, 63, 64], [5, 190, 64], [4], [128], list(range(50, 180))])
def test_rows_are_written_to_their_slots_and_nowhere_else(target: list[int], dtype: KVCacheDtype) -> None:
    arrays, new = _filled(SLOTS, dtype), _filled(140, dtype, seed=1, is_cache=False)
    before = _held(arrays)
    source = [3, 1, 0][: len(target)] if len(target) <= 3 else list(range(7, 137))
    arrays.write(as_slice(np.array(target)), new, as_slice(np.array(source)))
    for (array, axis), (old, _), (fresh, _) in zip(_held(arrays), before, _held(new), strict=True):
        expected = old.copy()
        for layer, head in np.ndindex(3, 2):
            for slot, place in zip(target, source, strict=True):
                _token(expected, axis, layer, head, slot)[:] = _token(fresh, axis, layer, head, place)
        np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize("slots", [slice(None), slice(60, 70), np.array([190, 0, 64])], ids=["all", "some", "others"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_read_from_their_slots(slots: Any, dtype: KVCacheDtype) -> None:
    arrays = _filled(SLOTS, dtype)
    for part, (array, axis) in zip(arrays.parts(), _held(arrays), strict=True):
        expected = np.take(array, np.arange(SLOTS)[slots], axis)
        np.testing.assert_array_equal(part.read(slots), expected)
        np.testing.assert_array_equal(part.layer(1).read(slots), expected[1:2])


@pytest.mark.parametrize("give_back", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [64, 70])
def test_slots_are_moved_to_arrays_of_another_capacity(count: int, dtype: KVCacheDtype, give_back: bool) -> None:
    arrays, larger = _filled(128, dtype), StackArrays.empty(STACK, dtype, SLOTS)
    before = _held(arrays)
    arrays.move(larger, count, give_back=give_back)
    for (array, axis), (old, _) in zip(_held(larger), before, strict=True):
        np.testing.assert_array_equal(np.take(array, range(count), axis), np.take(old, range(count), axis))
        assert not np.take(array, range(128, SLOTS), axis).any()


@pytest.mark.parametrize("give_back", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_head_keeps_its_own_slots(dtype: KVCacheDtype, give_back: bool) -> None:
    arrays = _filled(SLOTS, dtype)
    before = _held(arrays)
    slots = np.random.default_rng(2).permuted(np.tile(np.arange(SLOTS), (3, 2, 1)), axis=2)[..., :70]
    kept = arrays.select(slots, 128, give_back=give_back)
    assert kept.stack == STACK
    for (array, axis), (old, _) in zip(_held(kept), before, strict=True):
        assert array.dtype == old.dtype
        for layer, head, place in np.ndindex(3, 2, 128):
            found = _token(array, axis, layer, head, place)
            if place < 70:
                np.testing.assert_array_equal(found, _token(old, axis, layer, head, slots[layer, head, place]))
            else:
                assert not found.any()


def test_all_slots_are_kept_by_a_copy_or_by_the_arrays_themselves() -> None:
    arrays = _filled(64, "int8")
    assert arrays.select(None, 64, give_back=True) is arrays
    copied = arrays.select(None, 64, give_back=False)
    arrays.keys[:] = 0
    np.testing.assert_array_equal(copied.keys, _filled(64, "int8").keys)


@pytest.mark.parametrize("dtype", DTYPES)
def test_views_of_layers_are_views(dtype: KVCacheDtype) -> None:
    arrays = _filled(64, dtype)
    views = list(arrays.layers())
    assert [view.stack.layers for view in views] == [(1,), (3,), (4,)]
    for place, view in enumerate(views):
        for one, part in zip(view.parts(), arrays.parts(), strict=True):
            assert np.shares_memory(one.array, part.array)
            np.testing.assert_array_equal(one.array[0], part.array[place])


@pytest.mark.parametrize("slots", [slice(None), slice(60, 70), np.array([70, 1])], ids=["all", "some", "others"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_are_read_and_stored_as_float(dtype: KVCacheDtype, slots: Any) -> None:
    arrays = _filled(128, dtype)
    if arrays.key_scales is not None:
        arrays.key_scales[:] = np.random.default_rng(1).random(arrays.key_scales.shape) + 0.01
    before = _flat(next(arrays.parts())).astype(np.float32) * (1 if arrays.key_scales is None else arrays.key_scales)
    np.testing.assert_array_equal(arrays.float_keys(slots), before[..., slots])
    new = np.random.default_rng(3).standard_normal(before[..., slots].shape).astype(np.float32)
    new[0, 0, :, 0] = 0
    arrays.set_float_keys(slots, new)
    largest = np.abs(new).max(axis=2, keepdims=True)
    error = {"fp32": 0 * largest, "fp16": largest / 2**11, "int8": largest / 254 * 1.001}[dtype]
    assert (np.abs(arrays.float_keys(slots) - new) <= error).all()
    others = np.ones(128, np.bool_)
    others[slots] = False
    np.testing.assert_array_equal(arrays.float_keys(slice(None))[..., others], before[..., others])


def test_codes_are_those_of_the_graph() -> None:
    arrays = StackArrays.empty(STACK, "int8", 64)
    keys = np.zeros((3, 2, 6, 64), np.float32)
    keys[0, 0, :, 0] = [1.27, -1.27, 0.01, 0.016, -0.5, 0]
    arrays.set_float_keys(slice(None), keys)
    assert arrays.keys[0, 0, 0, :, 0].tolist() == [127, -127, 1, 2, -50, 0]
    assert arrays.key_scales is not None
    assert arrays.key_scales[0, 0, 0, 0] == np.float32(0.01)


@pytest.mark.parametrize(
    ("indices", "expected"),
    [
        ([3], slice(3, 4)),
        ([3, 4, 5], slice(3, 6)),
        ([0, 1], slice(0, 2)),
        ([5, 4, 3], None),
        ([3, 5], None),
        ([0, 2, 1, 3], None),
        ([], None),
    ],
)
def test_consecutive_indices_are_a_slice(indices: list[int], expected: slice | None) -> None:
    found = as_slice(np.array(indices, np.int64))
    if expected is None:
        assert isinstance(found, np.ndarray)
        assert found.tolist() == indices
    else:
        assert found == expected


def test_pages_are_given_back_only_within_the_array() -> None:
    whole = np.ones(1 << 20, np.uint8)
    inner = whole[5000:-5000]
    release_pages(inner)
    assert whole[:5000].all()
    assert whole[-5000:].all()
    assert inner.sum() < 3 * 4096 * 16, "most of it is gone"
    small = np.ones(10, np.uint8)
    release_pages(small)
    assert small.all(), "less than a page"
    assert cache_arrays.LARGEST_CODE == 127
