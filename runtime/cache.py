"""The KV cache: arrays that the graph only reads, and a map from slots to positions.

Attention does not care where an entry of the past lies, since keys carry their rotation. So appending,
dropping a rejected draft and forgetting a conversation change the map; data moves only when capacity grows.

Layers whose heads have the same shape share one pair of arrays, so that a step's new rows are written with two
assignments and not with two per layer:

    keys    [layers, KV, dk, C]  float32       a layer's slice is past_key_values.{l}.key   [1, KV, dk, C]
    values  [layers, KV, C, dv]  float32                          past_key_values.{l}.value [1, KV, C, dv]
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from edgekit.contract import MASKED, window_bias
from edgekit.errors import DoesNotFitError
from edgekit.spec import DecoderSpec

FloatArray: TypeAlias = npt.NDArray[np.float32]
SlotArray: TypeAlias = npt.NDArray[np.int64]

BUCKET_TOKENS = 128
# Arrays from this size on are not held twice while they are moved.
LARGE_BYTES = 32 << 20
_LIBC = ctypes.CDLL(None)


@dataclass(frozen=True, kw_only=True)
class HeadShape:
    """Shape of a layer's share of the cache: KV heads, channels of a key and of a value."""

    num_kv_heads: int
    key_dim: int
    value_dim: int


@dataclass(kw_only=True)
class LayerStack:
    """Keys and values of the layers with one head shape.

    Attributes:
        shape: Their head shape.
        layers: Their indices in the model.
        keys: shape (layers, KV, dk, tokens), float32.
        values: shape (layers, KV, tokens, dv), float32.
    """

    shape: HeadShape
    layers: tuple[int, ...]
    keys: FloatArray
    values: FloatArray

    def empty(self, tokens: int) -> LayerStack:
        """Returns zeroed arrays for the same layers and another number of tokens."""
        count, shape = len(self.layers), self.shape
        return LayerStack(
            shape=shape,
            layers=self.layers,
            keys=np.zeros((count, shape.num_kv_heads, shape.key_dim, tokens), np.float32),
            values=np.zeros((count, shape.num_kv_heads, tokens, shape.value_dim), np.float32),
        )


def layer_stacks(spec: DecoderSpec, tokens: int) -> tuple[LayerStack, ...]:
    """Allocates arrays for a model's layers, grouped by head shape."""
    groups: dict[HeadShape, list[int]] = {}
    for index, layer in enumerate(spec.layers):
        attention = layer.attention
        shape = HeadShape(num_kv_heads=attention.num_kv_heads, key_dim=attention.key_dim, value_dim=attention.value_dim)
        groups.setdefault(shape, []).append(index)
    nothing = np.zeros(0, np.float32)
    return tuple(
        LayerStack(shape=shape, layers=tuple(layers), keys=nothing, values=nothing).empty(tokens)
        for shape, layers in groups.items()
    )


@dataclass(frozen=True, kw_only=True)
class CacheArrays:
    """All arrays of a cache at one capacity; whoever holds pointers into them compares this object's identity.

    Attributes:
        stacks: Keys and values.
        past_bias: shape (1, 1, 1, capacity), float32: 0 for live slots, `MASKED` for empty ones. For the layers
            without a sliding window.
    """

    stacks: tuple[LayerStack, ...]
    past_bias: FloatArray


class KVCache:
    """Cache of one conversation.

    An operation that is interrupted, be it by a signal between two instructions, loses no token that was there, or,
    when it moves large arrays, all of them and never some: `truncate` to any length up to `length` brings everything
    back in line.

    Attributes:
        max_positions: The model's context, tokens.
        arrays: Replaced as a whole when the capacity changes.
    """

    def __init__(self, spec: DecoderSpec) -> None:
        """Starts empty, with one bucket of slots."""
        self.max_positions = spec.max_positions
        capacity = min(BUCKET_TOKENS, spec.max_positions)
        self.arrays = CacheArrays(stacks=layer_stacks(spec, capacity), past_bias=_all_masked(capacity))
        self._slots = np.zeros(0, np.int64)

    @property
    def stacks(self) -> tuple[LayerStack, ...]:
        """Keys and values, by head shape."""
        return self.arrays.stacks

    @property
    def past_bias(self) -> FloatArray:
        """Shape (1, 1, 1, capacity), float32: 0 for live slots, `MASKED` for empty ones."""
        return self.arrays.past_bias

    @property
    def capacity(self) -> int:
        """Slots that the arrays have."""
        return int(self.arrays.past_bias.shape[-1])

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return len(self._slots)

    @property
    def size_bytes(self) -> int:
        """Bytes of the arrays."""
        return sum(stack.keys.nbytes + stack.values.nbytes for stack in self.stacks)

    def window_bias(self, position_ids: SlotArray, window: int) -> FloatArray:
        """Computes what new tokens of layers with a sliding window add to their scores over the past.

        Args:
            position_ids: Positions of the new tokens, shape (S,), int64.
            window: Positions that a token sees, its own included.

        Returns:
            shape (S, capacity), float32.
        """
        positions = np.full(self.capacity, -1, np.int64)
        positions[self._slots] = np.arange(self.length)
        return window_bias(position_ids, positions, window)

    def check_room(self, tokens: int) -> None:
        """Refuses more tokens than the context has room for.

        Raises:
            DoesNotFitError: The model was not trained on that many positions.
        """
        wanted = self.length + tokens
        if wanted > self.max_positions:
            raise DoesNotFitError(
                f"{wanted} tokens are more than the model's context of {self.max_positions}; shorten the prompt or "
                "start a new conversation"
            )

    def reserve(self, tokens: int, *, following: int = 0) -> None:
        """Makes room for this many more tokens.

        The cost of a step follows the capacity, so a prompt does not get all of its slots at once. Growing by a share
        keeps the copying a constant share of the work; an empty cache has nothing to copy, and grows as soon as it may.

        Args:
            tokens: What is needed now.
            following: What will be needed after that, as far as it is known, such as the rest of a prompt.

        Raises:
            DoesNotFitError: The context has no room for `tokens`.
        """
        self.check_room(tokens)
        wanted, held = self.length + tokens, self.capacity
        total = min(wanted + following, self.max_positions)
        if total <= held or (wanted <= held and self.length > 0):
            return
        ahead = held + held // 8
        if following:
            ahead = total if total <= 2 * held else held + held // 2
        buckets = -(-max(wanted, ahead) // BUCKET_TOKENS)
        self._resize(min(buckets * BUCKET_TOKENS, self.max_positions))

    def append(self, new: Sequence[LayerStack], rows: Sequence[int]) -> None:
        """Keeps rows of a step's new keys and values, in this order.

        Args:
            new: The step's results, one per stack, with the new tokens on the token axis.
            rows: Indices of the new tokens to keep.

        Raises:
            DoesNotFitError: They are more than the model's context has room for.
        """
        self.reserve(len(rows))
        slots = np.flatnonzero(self.past_bias[0, 0, 0] == MASKED)[: len(rows)]
        target, source = _as_slice(slots), _as_slice(np.asarray(rows, np.int64))
        for stack, fresh in zip(self.stacks, new, strict=True):
            stack.keys[..., target] = fresh.keys[..., source]
            stack.values[:, :, target] = fresh.values[:, :, source]
        self.past_bias[..., target] = 0.0
        self._slots = np.concatenate([self._slots, slots])

    def truncate(self, length: int) -> None:
        """Forgets all tokens but the first `length`; of much room that is left, most is given back."""
        self._slots = self._slots[:length]
        # Derived anew from the map, so that an append that was interrupted half-way leaves no trace.
        self.past_bias[:] = MASKED
        self.past_bias[..., self._slots] = 0.0
        needed = int(self._slots.max(initial=-1)) + 1
        smaller = -(-max(needed, 1) // BUCKET_TOKENS) * BUCKET_TOKENS
        if self.capacity >= 8 * BUCKET_TOKENS and smaller <= self.capacity // 2:
            self._resize(smaller)

    def _resize(self, capacity: int) -> None:
        """Moves everything to arrays of another capacity, which holds all live slots."""
        slots, count, is_large = self._slots, min(self.capacity, capacity), self.size_bytes >= LARGE_BYTES
        if is_large:
            self._slots = slots[:0]  # until all is moved, for an interruption to leave nothing that is half there
        moved = []
        for stack in self.stacks:
            fresh = stack.empty(capacity)
            for keys, values, new_keys, new_values in zip(
                stack.keys, stack.values, fresh.keys, fresh.values, strict=True
            ):
                new_keys[..., :count] = keys[..., :count]
                new_values[:, :count] = values[:, :count]
                if is_large:
                    _give_back(keys)
                    _give_back(values)
            moved.append(fresh)
        past_bias = _all_masked(capacity)
        past_bias[..., slots] = 0.0
        # In one assignment, for no interruption to leave arrays of two capacities.
        self.arrays = CacheArrays(stacks=tuple(moved), past_bias=past_bias)
        self._slots = slots


def _give_back(array: FloatArray) -> None:
    """Lets the system have the pages of a contiguous array, whose contents are lost."""
    first = -(-array.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (array.ctypes.data + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if size > 0 and hasattr(mmap, "MADV_DONTNEED"):
        # What it returns does not matter: pages that stay are freed with the array.
        _LIBC.madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), mmap.MADV_DONTNEED)


def _all_masked(capacity: int) -> FloatArray:
    return np.full((1, 1, 1, capacity), MASKED, np.float32)


def _as_slice(indices: SlotArray) -> slice | SlotArray:
    """Returns a slice for consecutive indices, which numpy copies several times faster."""
    if len(indices) == 1:
        return slice(int(indices[0]), int(indices[0]) + 1)
    if len(indices) and indices[-1] - indices[0] == len(indices) - 1 and bool((np.diff(indices) == 1).all()):
        return slice(int(indices[0]), int(indices[-1]) + 1)
    return indices
