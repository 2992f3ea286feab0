"""How a KV cache is laid out: which layers share a slot map, which share an array, and the bytes of a slot.

A *group* is the layers with one slot map, one capacity and one bias over the past: those with one sliding window, or,
under per-layer budgets, those with one budget as well. A *stack* is the layers of a group whose heads have one shape:
their keys lie in one array, and so do their values, so that a step's new rows are written with one assignment each.

Torch-free and free of any runtime: the lowering names the outputs of a graph by it, the runtime allocates by it, and
the planner counts by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec

from edgekit.spec import CacheGroup, DecoderSpec

KVCacheDtype: TypeAlias = Literal["fp32", "fp16", "int8"]
KV_CACHE_DTYPES: tuple[KVCacheDtype, ...] = ("fp32", "fp16", "int8")

ELEMENT_BYTES = {"fp32": 4, "fp16": 2, "int8": 1}
# An int8 cache has one float32 scale per token and KV head, for the key and for the value.
SCALE_BYTES = 4
KEY_BLOCK_TOKENS = 64
"""Slots of a block that the keys of an int8 cache are cut into."""
# The CPU lowering also cuts the probabilities over an int8 cache into eight parts, which blocks of keys allow.
CAPACITY_MULTIPLES = {"fp32": 1, "fp16": 1, "int8": KEY_BLOCK_TOKENS}


class HeadShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shape of a layer's share of the cache: KV heads, channels of a key and of a value."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    def slot_bytes(self, dtype: KVCacheDtype) -> int:
        """Returns the bytes that one token takes in one layer, scales included."""
        per_head = (self.key_dim + self.value_dim) * ELEMENT_BYTES[dtype]
        return self.num_kv_heads * (per_head + (2 * SCALE_BYTES if dtype == "int8" else 0))


class Stack(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Layers that share arrays.

    Attributes:
        group: Index of their cache group.
        shape: Their head shape.
        layers: Their indices in the model.
    """

    group: int
    shape: HeadShape
    layers: tuple[int, ...]


class CacheLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Layout of a cache.

    Attributes:
        dtype: How keys and values are stored.
        groups: A partition of the layers.
        stacks: A refinement of it, in the order of the groups.
    """

    dtype: KVCacheDtype
    groups: tuple[CacheGroup, ...]
    stacks: tuple[Stack, ...]

    def slot_bytes(self, group: int) -> int:
        """Returns the bytes of one slot of a group, over all of its layers, the bias over the past included."""
        stacks = (stack for stack in self.stacks if stack.group == group)
        return sum(len(stack.layers) * stack.shape.slot_bytes(self.dtype) for stack in stacks) + 4

    def rounded(self, slots: int) -> int:
        """Returns the least capacity with so many slots."""
        multiple = CAPACITY_MULTIPLES[self.dtype]
        return -(-slots // multiple) * multiple

    def group_of(self, layer: int) -> int:
        """Returns the index of a layer's group."""
        return next(index for index, group in enumerate(self.groups) if layer in group.layers)


def cache_layout(
    spec: DecoderSpec, dtype: KVCacheDtype = "fp32", budgets_tokens: Sequence[int] | None = None
) -> CacheLayout:
    """Lays out the cache of a model.

    Args:
        spec: The decoder.
        dtype: How keys and values are stored.
        budgets_tokens: Slots of every layer; None when the layers of one sliding window share theirs.
    """
    groups = spec.cache_groups()
    if budgets_tokens is not None:
        groups = tuple(part for group in groups for part in _by_budget(group, budgets_tokens))
    stacks = tuple(stack for index, group in enumerate(groups) for stack in _by_shape(spec, index, group))
    return CacheLayout(dtype=dtype, groups=groups, stacks=stacks)


def _by_budget(group: CacheGroup, budgets_tokens: Sequence[int]) -> list[CacheGroup]:
    parts: dict[int, list[int]] = {}
    for layer in group.layers:
        parts.setdefault(budgets_tokens[layer], []).append(layer)
    return [CacheGroup(layers=tuple(layers), sliding_window=group.sliding_window) for layers in parts.values()]


def _by_shape(spec: DecoderSpec, index: int, group: CacheGroup) -> list[Stack]:
    shapes: dict[HeadShape, list[int]] = {}
    for layer in group.layers:
        attention = spec.layers[layer].attention
        shape = HeadShape(num_kv_heads=attention.num_kv_heads, key_dim=attention.key_dim, value_dim=attention.value_dim)
        shapes.setdefault(shape, []).append(layer)
    return [Stack(group=index, shape=shape, layers=tuple(layers)) for shape, layers in shapes.items()]
