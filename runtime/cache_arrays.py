"""The arrays of a KV cache: keys and values of the layers of a stack, as the graph reads them.

keys          [layers, KV, dk, C]      a layer's slice is past_key_values.{l}.key    [1, KV, dk, C]
values        [layers, KV, C, dv]                         past_key_values.{l}.value  [1, KV, C, dv]
key_scales    [layers, KV, 1, C]       float32, of an int8 cache: what the codes of a token are multiplied by
value_scales  [layers, KV, 1, C]

The keys of an int8 cache are cut into blocks of b slots, [layers, KV, C/b, dk, b]: an integer product reads a block
from front to back, instead of dk rows that are C bytes apart. What a step adds is not cut.
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

from edgekit.cache_layout import KEY_BLOCK_TOKENS, KVCacheDtype, Stack
from edgekit.runtime.slots import SlotMap

FloatArray: TypeAlias = npt.NDArray[np.float32]
SlotArray: TypeAlias = npt.NDArray[np.int64]
CacheArray: TypeAlias = npt.NDArray[Any]

NUMPY_TYPES: dict[KVCacheDtype, type[np.generic]] = {"fp32": np.float32, "fp16": np.float16, "int8": np.int8}
LARGEST_CODE = 127
_LIBC = ctypes.CDLL(None)


@dataclass(frozen=True, kw_only=True)
class Part:
    """One array of a stack, by slots.

    Attributes:
        array: As in the module's table.
        axis: That of the tokens, in an array that is not cut into blocks.
    """

    array: CacheArray
    axis: int

    @property
    def is_blocked(self) -> bool:
        """Whether the slots are cut into blocks."""
        return self.array.ndim == 5

    def shape(self, tokens: int) -> tuple[int, ...]:
        """Returns the shape of the rows of so many tokens, with all layers."""
        heads = self.array.shape[:2]
        return (*heads, self.array.shape[-2], tokens) if self.axis == 3 else (*heads, tokens, self.array.shape[-1])

    def layer(self, index: int) -> Part:
        """Returns a view of one layer."""
        return Part(array=self.array[index : index + 1], axis=self.axis)

    def read(self, slots: slice | SlotArray) -> CacheArray:
        """Returns the rows of some slots, with their tokens along `axis`."""
        if not self.is_blocked:
            return self.array[(slice(None),) * self.axis + (slots,)]
        indices = np.arange(self.array.shape[2] * KEY_BLOCK_TOKENS)[slots]
        block, column = np.divmod(indices, KEY_BLOCK_TOKENS)
        return np.moveaxis(self.array[:, :, block, :, column], 0, 3)

    def read_by_head(self, slots: SlotArray) -> CacheArray:
        """Returns rows of which each KV head has its own, `slots` being of shape (layers, KV, n)."""
        if not self.is_blocked:
            wanted = slots[:, :, None, :] if self.axis == 3 else slots[:, :, :, None]
            return np.take_along_axis(self.array, wanted, axis=self.axis)
        layer, head = np.ogrid[: slots.shape[0], : slots.shape[1]]
        block, column = np.divmod(slots, KEY_BLOCK_TOKENS)
        return np.moveaxis(self.array[layer[..., None], head[..., None], block, :, column], 2, 3)

    def write(self, slots: slice | SlotArray, rows: CacheArray) -> None:
        """Stores rows, with their tokens along `axis`, in some slots."""
        if not self.is_blocked:
            self.array[(slice(None),) * self.axis + (slots,)] = rows
        elif isinstance(slots, slice):
            first, end, _ = slots.indices(self.array.shape[2] * KEY_BLOCK_TOKENS)
            for start in range(first - first % KEY_BLOCK_TOKENS, end, KEY_BLOCK_TOKENS):
                low, high = max(first, start), min(end, start + KEY_BLOCK_TOKENS)
                block = self.array[:, :, start // KEY_BLOCK_TOKENS]
                block[..., low - start : high - start] = rows[..., low - first : high - first]
        else:
            block, column = np.divmod(slots, KEY_BLOCK_TOKENS)
            self.array[:, :, block, :, column] = np.moveaxis(rows, 3, 0)

    def move(self, target: Part, count: int) -> None:
        """Copies the first `count` slots, and what else is in their last block, which nobody reads."""
        axis, end = (2, -(-count // KEY_BLOCK_TOKENS)) if self.is_blocked else (self.axis, count)
        kept = (slice(None),) * axis + (slice(end),)
        target.array[kept] = self.array[kept]


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
    def empty(cls, stack: Stack, dtype: KVCacheDtype, tokens: int, *, is_cache: bool = True) -> StackArrays:
        """Returns zeroed arrays for some tokens: of a cache, or for what a step adds to it."""
        heads, shape, kind = (len(stack.layers), stack.shape.num_kv_heads), stack.shape, NUMPY_TYPES[dtype]
        scales = [np.zeros((*heads, 1, tokens), np.float32) for _ in range(2)] if dtype == "int8" else [None, None]
        slots: tuple[int, ...] = (shape.key_dim, tokens)
        if dtype == "int8" and is_cache:
            assert tokens % KEY_BLOCK_TOKENS == 0, "a capacity is rounded: `CacheLayout.rounded`"
            slots = (tokens // KEY_BLOCK_TOKENS, shape.key_dim, KEY_BLOCK_TOKENS)
        return cls(
            stack=stack,
            keys=np.zeros((*heads, *slots), kind),
            values=np.zeros((*heads, tokens, shape.value_dim), kind),
            key_scales=scales[0],
            value_scales=scales[1],
        )

    def parts(self) -> Iterator[Part]:
        """Yields keys, values and, of an int8 cache, the scales of both."""
        yield Part(array=self.keys, axis=3)
        yield Part(array=self.values, axis=2)
        for scales in (self.key_scales, self.value_scales):
            if scales is not None:
                yield Part(array=scales, axis=3)

    @property
    def size_bytes(self) -> int:
        """Bytes of the arrays."""
        return sum(part.array.nbytes for part in self.parts())

    def write(self, target: slice | SlotArray, new: StackArrays, source: slice | SlotArray) -> None:
        """Copies tokens from the arrays of a step."""
        for part, fresh in zip(self.parts(), new.parts(), strict=True):
            part.write(target, fresh.read(source))

    def move(self, target: StackArrays, count: int, *, give_back: bool) -> None:
        """Copies the first `count` slots, layer by layer; with `give_back`, the memory of each goes with it."""
        for part, fresh in zip(self.parts(), target.parts(), strict=True):
            for index in range(len(self.stack.layers)):
                part.layer(index).move(fresh.layer(index), count)
                if give_back:
                    release_pages(part.layer(index).array)

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
        for part, fresh in zip(self.parts(), chosen.parts(), strict=True):
            for index in range(len(self.stack.layers)):
                rows = part.layer(index).read_by_head(slots[index : index + 1])
                fresh.layer(index).write(slice(slots.shape[2]), rows)
                if give_back:
                    release_pages(part.layer(index).array)
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
        keys: FloatArray = self._keys().read(slots).astype(np.float32)
        return keys if self.key_scales is None else keys * self.key_scales[..., slots]

    def set_float_keys(self, slots: SlotArray | slice, keys: FloatArray) -> None:
        """Stores keys, shape (layers, KV, dk, n), float32, as the cache has them."""
        if self.key_scales is None:
            self._keys().write(slots, keys)
            return
        scales = np.maximum(np.abs(keys).max(axis=2, keepdims=True) / LARGEST_CODE, np.float32(1e-30))
        self.key_scales[..., slots] = scales
        self._keys().write(slots, np.round(keys / scales))

    def _keys(self) -> Part:
        return next(self.parts())


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
