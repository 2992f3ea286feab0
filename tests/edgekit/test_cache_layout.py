from __future__ import annotations

import itertools

import msgspec
import pytest

from edgekit.cache_layout import KV_CACHE_DTYPES, CacheLayout, HeadShape, KVCacheDtype, Stack, cache_layout
from edgekit.spec import CacheGroup, DecoderSpec
from tests.tiny_specs import tiny_spec


@pytest.mark.parametrize(
    ("dtype", "size"),
    # Two heads of 16 + 24 channels; int8 with a scale for the key and one for the value of each head.
    [("fp32", 2 * 40 * 4), ("fp16", 2 * 40 * 2), ("int8", 2 * (40 + 8))],
)
def test_a_token_takes_its_channels_and_its_scales(dtype: KVCacheDtype, size: int) -> None:
    assert HeadShape(num_kv_heads=2, key_dim=16, value_dim=24).slot_bytes(dtype) == size


@pytest.mark.parametrize(("dtype", "size"), [("fp32", 516), ("fp16", 260), ("int8", 164)])
def test_a_slot_takes_all_layers_and_its_bias(dtype: KVCacheDtype, size: int) -> None:
    # Two layers with two heads of 16 + 16 channels: 256, 128 or 80 bytes each; and 4 bytes of bias.
    layout = cache_layout(tiny_spec(), dtype)
    assert layout.slot_bytes(0) == size
    assert layout.dtype == dtype


def test_layers_without_differences_are_one_group_and_one_stack() -> None:
    layout = cache_layout(tiny_spec((None,) * 5))
    shape = HeadShape(num_kv_heads=2, key_dim=16, value_dim=16)
    assert layout.groups == (CacheGroup(layers=(0, 1, 2, 3, 4)),)
    assert layout.stacks == (Stack(group=0, shape=shape, layers=(0, 1, 2, 3, 4)),)


def test_every_sliding_window_is_a_group_in_the_order_of_its_first_layer() -> None:
    layout = cache_layout(tiny_spec((7, None, 7, 9, None)))
    assert layout.groups == (
        CacheGroup(layers=(0, 2), sliding_window=7),
        CacheGroup(layers=(1, 4)),
        CacheGroup(layers=(3,), sliding_window=9),
    )
    assert [layout.slot_bytes(group) for group in range(3)] == [516, 516, 260]
    assert [layout.group_of(layer) for layer in range(5)] == [0, 1, 0, 2, 1]


def test_layers_of_a_group_with_other_heads_are_another_stack() -> None:
    layout = cache_layout(_with_heads(tiny_spec((None,) * 3), layer=1, key_dim=32), "fp16")
    assert layout.groups == (CacheGroup(layers=(0, 1, 2)),)
    assert [(stack.layers, stack.shape.key_dim) for stack in layout.stacks] == [((0, 2), 16), ((1,), 32)]
    assert layout.slot_bytes(0) == 2 * 128 + 2 * (32 + 16) * 2 + 4


def test_layers_with_other_budgets_are_other_groups() -> None:
    layout = cache_layout(tiny_spec((None, 7, None, None, 7)), "fp32", (40, 50, 60, 40, 50))
    assert layout.groups == (
        CacheGroup(layers=(0, 3)),
        CacheGroup(layers=(2,)),
        CacheGroup(layers=(1, 4), sliding_window=7),
    )
    assert [stack.group for stack in layout.stacks] == [0, 1, 2]
    assert [layout.slot_bytes(group) for group in range(3)] == [516, 260, 516]


def test_equal_budgets_split_nothing() -> None:
    spec = tiny_spec((None, 7, None))
    assert cache_layout(spec, "int8", (64, 64, 64)) == cache_layout(spec, "int8")


@pytest.mark.parametrize("dtype", KV_CACHE_DTYPES)
@pytest.mark.parametrize("budgets", [None, (8, 9, 8, 9, 10, 8)])
def test_groups_partition_the_layers_and_stacks_refine_them(
    dtype: KVCacheDtype, budgets: tuple[int, ...] | None
) -> None:
    spec = _with_heads(tiny_spec((None, 7, None, 9, 7, None)), layer=2, key_dim=8)
    layout = cache_layout(spec, dtype, budgets)
    assert sorted(itertools.chain(*(group.layers for group in layout.groups))) == [0, 1, 2, 3, 4, 5]
    for index, group in enumerate(layout.groups):
        stacked = [stack.layers for stack in layout.stacks if stack.group == index]
        assert sorted(itertools.chain(*stacked)) == list(group.layers)
        assert {spec.layers[layer].attention.sliding_window for layer in group.layers} == {group.sliding_window}
    # Splitting a cache costs nothing but a bias for every group.
    slots = [layout.slot_bytes(index) - 4 for index in range(len(layout.groups))]
    assert sum(slots) == sum(len(stack.layers) * stack.shape.slot_bytes(dtype) for stack in layout.stacks)


def test_a_layout_survives_json() -> None:
    layout = cache_layout(tiny_spec((None, 7)), "int8", (5, 6))
    assert msgspec.json.decode(msgspec.json.encode(layout), type=CacheLayout) == layout


def _with_heads(spec: DecoderSpec, layer: int, key_dim: int) -> DecoderSpec:
    changed = msgspec.structs.replace(spec.layers[layer].attention, key_dim=key_dim)
    layers = list(spec.layers)
    layers[layer] = msgspec.structs.replace(spec.layers[layer], attention=changed)
    return msgspec.structs.replace(spec, layers=tuple(layers))
