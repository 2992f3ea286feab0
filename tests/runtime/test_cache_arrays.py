"""Arrays of a stack against what numpy does to one head at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from edgekit.cache_layout import HeadShape, KVCacheDtype, Stack
from edgekit.runtime import cache_arrays
from edgekit.runtime.cache_arrays import StackArrays, as_slice, release_pages

STACK = Stack(group=0, shape=HeadShape(num_kv_heads=2, key_dim=6, value_dim=4), layers=(1, 3, 4))
DTYPES: tuple[KVCacheDtype, ...] = ("fp32", "fp16", "int8")


def _filled(tokens: int, dtype: KVCacheDtype, seed: int = 0) -> StackArrays:
    random, arrays = np.random.default_rng(seed), StackArrays.empty(STACK, dtype, tokens)
    for array, _ in arrays.parts():
        array[:] = random.integers(-120, 120, array.shape)
    return arrays


def _token(array: npt.NDArray[Any], axis: int, layer: int, head: int, slot: Any) -> Any:
    return array[layer, head, :, slot] if axis == 3 else array[layer, head, slot]


@pytest.mark.parametrize(("dtype", "element", "parts"), [("fp32", 4, 2), ("fp16", 2, 2), ("int8", 1, 4)])
def test_empty_arrays_are_zero_and_of_the_size_of_the_slots(dtype: KVCacheDtype, element: int, parts: int) -> None:
    arrays = StackArrays.empty(STACK, dtype, 8)
    assert len(list(arrays.parts())) == parts
    assert all(not array.any() and array.shape[axis] == 8 for array, axis in arrays.parts())
    assert arrays.size_bytes == 3 * 8 * STACK.shape.slot_bytes(dtype)
    assert arrays.keys.nbytes == 3 * 2 * 6 * 8 * element


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", [[0, 1, 2], [5, 2, 7], [4]])
def test_rows_are_written_to_their_slots_and_nowhere_else(target: list[int], dtype: KVCacheDtype) -> None:
    arrays, before, new = _filled(8, dtype), _filled(8, dtype), _filled(4, dtype, seed=1)
    source = [3, 1, 0][: len(target)]
    arrays.write(as_slice(np.array(target)), new, as_slice(np.array(source)))
    for (array, axis), (old, _), (fresh, _) in zip(arrays.parts(), before.parts(), new.parts(), strict=True):
        for layer, head, slot in np.ndindex(3, 2, 8):
            origin, place = (fresh, source[target.index(slot)]) if slot in target else (old, slot)
            expected = _token(origin, axis, layer, head, place)
            np.testing.assert_array_equal(_token(array, axis, layer, head, slot), expected)


@pytest.mark.parametrize("give_back", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_slots_are_moved_to_arrays_of_another_capacity(dtype: KVCacheDtype, give_back: bool) -> None:
    arrays, before, larger = _filled(8, dtype), _filled(8, dtype), StackArrays.empty(STACK, dtype, 12)
    arrays.move(larger, 5, give_back=give_back)
    for (array, axis), (old, _) in zip(larger.parts(), before.parts(), strict=True):
        np.testing.assert_array_equal(np.take(array, range(5), axis), np.take(old, range(5), axis))
        assert not np.take(array, range(5, 12), axis).any()


@pytest.mark.parametrize("give_back", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_head_keeps_its_own_slots(dtype: KVCacheDtype, give_back: bool) -> None:
    arrays, before = _filled(16, dtype), _filled(16, dtype)
    slots = np.random.default_rng(2).permuted(np.tile(np.arange(16), (3, 2, 1)), axis=2)[..., :5]
    kept = arrays.select(slots, 8, give_back=give_back)
    assert kept.stack == STACK
    for (array, axis), (old, _) in zip(kept.parts(), before.parts(), strict=True):
        assert array.dtype == old.dtype
        for layer, head, place in np.ndindex(3, 2, 8):
            found = _token(array, axis, layer, head, place)
            if place < 5:
                np.testing.assert_array_equal(found, _token(old, axis, layer, head, slots[layer, head, place]))
            else:
                assert not found.any()


def test_all_slots_are_kept_by_a_copy_or_by_the_arrays_themselves() -> None:
    arrays = _filled(8, "int8")
    assert arrays.select(None, 8, give_back=True) is arrays
    copied = arrays.select(None, 8, give_back=False)
    arrays.keys[:] = 0
    np.testing.assert_array_equal(copied.keys, _filled(8, "int8").keys)


@pytest.mark.parametrize("dtype", DTYPES)
def test_views_of_layers_are_views(dtype: KVCacheDtype) -> None:
    arrays = _filled(8, dtype)
    views = list(arrays.layers())
    assert [view.stack.layers for view in views] == [(1,), (3,), (4,)]
    for place, view in enumerate(views):
        for (one, _), (array, _) in zip(view.parts(), arrays.parts(), strict=True):
            assert np.shares_memory(one, array)
            np.testing.assert_array_equal(one[0], array[place])


@pytest.mark.parametrize("slots", [slice(None), slice(2, 5), np.array([6, 1])], ids=["all", "some", "others"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_are_read_and_stored_as_float(dtype: KVCacheDtype, slots: Any) -> None:
    arrays = _filled(8, dtype)
    if arrays.key_scales is not None:
        arrays.key_scales[:] = np.random.default_rng(1).random(arrays.key_scales.shape) + 0.01
    before = arrays.keys.astype(np.float32) * (1 if arrays.key_scales is None else arrays.key_scales)
    np.testing.assert_array_equal(arrays.float_keys(slots), before[..., slots])
    new = np.random.default_rng(3).standard_normal(before[..., slots].shape).astype(np.float32)
    new[0, 0, :, 0] = 0
    arrays.set_float_keys(slots, new)
    largest = np.abs(new).max(axis=2, keepdims=True)
    error = {"fp32": 0 * largest, "fp16": largest / 2**11, "int8": largest / 254 * 1.001}[dtype]
    assert (np.abs(arrays.float_keys(slots) - new) <= error).all()
    others = np.ones(8, np.bool_)
    others[slots] = False
    np.testing.assert_array_equal(arrays.float_keys(slice(None))[..., others], before[..., others])


def test_codes_are_those_of_the_graph() -> None:
    arrays = StackArrays.empty(STACK, "int8", 1)
    keys = np.zeros((3, 2, 6, 1), np.float32)
    keys[0, 0, :, 0] = [1.27, -1.27, 0.01, 0.016, -0.5, 0]
    arrays.set_float_keys(slice(None), keys)
    assert arrays.keys[0, 0, :, 0].tolist() == [127, -127, 1, 2, -50, 0]
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
