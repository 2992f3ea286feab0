"""The arrays of a KV cache: keys and values of the layers of a stack, as the graph reads them.

keys          [layers, KV, dk, C]      a layer's slice is past_key_values.{l}.key    [1, KV, dk, C]
values        [layers, KV, C, dv]                         past_key_values.{l}.value  [1, KV, C, dv]
key_scales    [layers, KV, 1, C]       float32, of an int8 cache: what the codes of a token are multiplied by
value_scales  [layers, KV, 1, C]
"""

from __future__ import annotations

import copy
import ctypes
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from edgekit.cache_layout import KVCacheDtype, Stack
from edgekit.runtime.slots import SlotMap

FloatArray: TypeAlias = npt.NDArray[np.float32]
SlotArray: TypeAlias = npt.NDArray[np.int64]
CacheArray: TypeAlias = npt.NDArray[Any]

NUMPY_TYPES: dict[KVCacheDtype, type[np.generic]] = {"fp32": np.float32, "fp16": np.float16, "int8": np.int8}
LARGEST_CODE = 127
_LIBC = ctypes.CDLL(None)


@dataclass(kw_only=True)
class StackArrays:
    """Keys and values of a stack, shaped as in the module's table.

    Attributes:
        stack: Which layers.
        keys: float32, float16 or int8.
        values: The same.
        key_scales: float32; None unless the keys are int8.
        value_scales: float32; None unless the values are int8.
    """

    stack: Stack
    keys: CacheArray
    values: CacheArray
    key_scales: FloatArray | None
    value_scales: FloatArray | None

    @classmethod
    def empty(cls, stack: Stack, dtype: KVCacheDtype, tokens: int) -> StackArrays:
        """Returns zeroed arrays for some tokens."""
        heads, shape, kind = (len(stack.layers), stack.shape.num_kv_heads), stack.shape, NUMPY_TYPES[dtype]
        scales = [np.zeros((*heads, 1, tokens), np.float32) for _ in range(2)] if dtype == "int8" else [None, None]
        return cls(
            stack=stack,
            keys=np.zeros((*heads, shape.key_dim, tokens), kind),
            values=np.zeros((*heads, tokens, shape.value_dim), kind),
            key_scales=scales[0],
            value_scales=scales[1],
        )

    def parts(self) -> Iterator[tuple[CacheArray, int]]:
        """Yields each array and the axis of its tokens."""
        yield self.keys, 3
        yield self.values, 2
        for scales in (self.key_scales, self.value_scales):
            if scales is not None:
                yield scales, 3

    @property
    def size_bytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array, _ in self.parts())

    def write(self, target: slice | SlotArray, new: StackArrays, source: slice | SlotArray) -> None:
        """Copies tokens from the arrays of a step."""
        for (array, axis), (fresh, _) in zip(self.parts(), new.parts(), strict=True):
            if axis == 3:
                array[..., target] = fresh[..., source]
            else:
                array[:, :, target] = fresh[:, :, source]

    def move(self, target: StackArrays, count: int, *, give_back: bool) -> None:
        """Copies the first `count` slots, layer by layer; with `give_back`, the memory of each goes with it."""
        for (array, axis), (fresh, _) in zip(self.parts(), target.parts(), strict=True):
            for layer, fresh_layer in zip(array, fresh, strict=True):
                kept = (slice(None), slice(None), slice(count)) if axis == 3 else (slice(None), slice(count))
                fresh_layer[kept] = layer[kept]
                if give_back:
                    release_pages(layer)

    def select(self, slots: SlotArray | None, capacity: int, *, give_back: bool) -> StackArrays:
        """Gathers slots of each KV head into arrays of another capacity.

        Args:
            slots: shape (layers, KV, n), int64; None for all as they are, whatever the capacity.
            capacity: Slots of the result, of which the first n are filled.
            give_back: Whether the memory of each layer goes once it is read.
        """
        if slots is None:
            return self if give_back else copy.deepcopy(self)
        dtype = next(name for name, kind in NUMPY_TYPES.items() if self.keys.dtype == kind)
        chosen = StackArrays.empty(self.stack, dtype, capacity)
        count = slots.shape[2]
        for (array, axis), (fresh, _) in zip(self.parts(), chosen.parts(), strict=True):
            for layer, fresh_layer, index in zip(array, fresh, slots, strict=True):
                if axis == 3:
                    fresh_layer[..., :count] = np.take_along_axis(layer, index[:, None, :], axis=2)
                else:
                    fresh_layer[:, :count] = np.take_along_axis(layer, index[:, :, None], axis=1)
                if give_back:
                    release_pages(layer)
        return chosen

    def layers(self) -> Iterator[StackArrays]:
        """Yields views of one layer each."""
        for index, layer in enumerate(self.stack.layers):
            one = slice(index, index + 1)
            yield StackArrays(
                stack=Stack(group=self.stack.group, shape=self.stack.shape, layers=(layer,)),
                keys=self.keys[one],
                values=self.values[one],
                key_scales=None if self.key_scales is None else self.key_scales[one],
                value_scales=None if self.value_scales is None else self.value_scales[one],
            )

    def float_keys(self, slots: SlotArray | slice) -> FloatArray:
        """Returns keys, shape (layers, KV, dk, n), float32."""
        keys: FloatArray = self.keys[..., slots].astype(np.float32)
        return keys if self.key_scales is None else keys * self.key_scales[..., slots]

    def set_float_keys(self, slots: SlotArray | slice, keys: FloatArray) -> None:
        """Stores keys, shape (layers, KV, dk, n), float32, as the cache has them."""
        if self.key_scales is None:
            self.keys[..., slots] = keys
            return
        scales = np.maximum(np.abs(keys).max(axis=2, keepdims=True) / LARGEST_CODE, np.float32(1e-30))
        self.key_scales[..., slots] = scales
        self.keys[..., slots] = np.round(keys / scales)


@dataclass(frozen=True, kw_only=True)
class CacheArrays:
    """All arrays of a cache; whoever holds pointers into them compares this object's identity.

    Attributes:
        maps: Slot map of every group.
        stacks: Keys and values of every stack.
    """

    maps: tuple[SlotMap, ...]
    stacks: tuple[StackArrays, ...]


def release_pages(array: CacheArray) -> None:
    """Lets the system have the pages of a contiguous array, whose contents are lost."""
    first = -(-array.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (array.ctypes.data + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if size > 0 and hasattr(mmap, "MADV_DONTNEED"):
        # What it returns does not matter: pages that stay are freed with the array.
        _LIBC.madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), mmap.MADV_DONTNEED)


def as_slice(indices: SlotArray) -> slice | SlotArray:
    """Returns a slice for consecutive indices, which numpy copies several times faster."""
    if len(indices) == 1:
        return slice(int(indices[0]), int(indices[0]) + 1)
    if len(indices) and indices[-1] - indices[0] == len(indices) - 1 and bool((np.diff(indices) == 1).all()):
        return slice(int(indices[0]), int(indices[-1]) + 1)
    return indices
