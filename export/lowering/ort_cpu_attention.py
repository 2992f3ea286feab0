"""Attention and the KV cache, lowered for ONNX Runtime's CPU provider.

The graph declares its share of the cache by the runtime's layout, whatever the portable graph stores it as:

    cache   past_key_values.{l}.key   .value               products over the past
    fp32    [B, KV, 1, dk, C]         [B, KV, 1, C, dv]    one per query head: the axis of size 1 is broadcast
    fp16    [B, KV, 1, dk, C]         [B, KV, 1, C, dv]    the same, after a Cast
    int8    [B, KV, C/b, dk, b]       [B, KV, C, dv]       of integers, over blocks of b = 64 slots

fp32: a product of S rows with all of a head's past is S times the cache read from front to back. Folded into one
product of G·S rows, as the portable graph has it, ONNX Runtime first copies the cache into another layout, which takes
longer than reading it G times: a head's past stays in the core's own cache. Integer products always copy; there it is
folded.

int8: queries are quantized per step, probabilities per row and per `PARTS`-th of the slots:

    q [B, KV, G·S, dk] ─▶ DynamicQuantizeLinear ─▶ [B, KV, 1, G·S, dk] uint8
    MatMulIntegerToFloat(·, past_key [B, KV, C/b, dk, b]) ─▶ [B, KV, C/b, G·S, b]
      ─▶ Transpose, Reshape [B, KV, G·S, C] ─▶ × key_scale ─▶ scores ─▶ … ─▶ Softmax ─▶ Split ─▶ p

    p × value_scale ─▶ [B, KV, G·S, 8, C/8] ─┬─▶ ReduceMax ───▶ m [B, KV, G·S, 8, 1]
                                             └─▶ Div(m) ─▶ QuantizeLinear(1/255) ─▶ Transpose [B, KV, 8, G·S, C/8] uint8
    MatMulIntegerToFloat(·, past_value [B, KV, 8, C/8, dv]) ─▶ × m ─▶ ReduceSum ─▶ [B, KV, G·S, dv]

Keys lie in blocks because ONNX Runtime copies the right operand of an integer product, four rows at a time: from blocks
that takes half as long as from [dk, C], whose rows are C bytes apart, and cores share the work evenly whatever KV is.

One scale for a whole row would be set by a single slot: an attention sink takes most of the probability, and what is
below a 500th of it would be rounded to nothing. With parts, that happens in the sink's part only.

What the new tokens add to the cache leaves the graph stacked over layers, and is quantized there, all layers at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from edgekit import contract
from edgekit.cache_layout import KEY_BLOCK_TOKENS, Stack
from edgekit.export.graph.attention import softcap
from edgekit.export.graph.kv_cache import TYPES, as_float, quantized
from edgekit.export.lowering.blocks import Block, Lowering

FLOAT = ir.DataType.FLOAT
MS = "com.microsoft::"
PARTS = 8
"""Parts of the past whose probabilities have a scale of their own; the capacity of an int8 cache is a multiple."""
assert KEY_BLOCK_TOKENS % PARTS == 0
_LARGEST_UINT8 = 255
_TINY = 1e-30  # of a part in which nothing is seen, the probabilities 0 are divided by this and not by 0


@dataclass(frozen=True, kw_only=True)
class _Past:
    """A layer's share of the cache, as in the module's table; the scales [B, KV, 1, C] of an int8 cache."""

    key: ir.Value
    value: ir.Value
    scales: tuple[ir.Value, ir.Value] | None


def is_folded(state: Lowering) -> bool:
    """Whether the query heads of a KV head are folded into the rows of one product."""
    return state.layout.dtype == "int8"


def attention_bias(state: Lowering, block: Block) -> None:
    """Keeps what new tokens add among themselves; what they add over the past follows the layout's groups."""
    _, new_bias = state.operands(block)
    state[block.outputs[0]] = state[new_bias]


def attention(state: Lowering, block: Block) -> None:
    """As the portable block; see the module's docstring."""
    g, layer = state.g, int(block.attributes["layer"])
    query, key, value, _, _, new_bias, _ = block.inputs
    assert query is not None and key is not None and value is not None and new_bias is not None
    rows, new_key, new_value = state[query], state[key], state[value]
    if not is_folded(state):
        new_key, new_value = (g.op("Unsqueeze", part, g.ints(2)) for part in (new_key, new_value))
    past, group = _past(state, layer), state.layout.group_of(layer)
    over_past = _past_scores(state, rows, past)
    scores = g.op("Concat", over_past, g.op("MatMul", rows, new_key), attributes={"axis": -1})
    biased = g.op("Add", softcap(g, scores, block.attributes["softcap"]), _bias(state, group, new_bias, block))
    probabilities = g.op("Softmax", biased, attributes={"axis": -1})
    seen, new = g.ops("Split", [probabilities, _lengths(state, group, new_bias)], 2, {"axis": -1})
    state[block.outputs[0]] = g.op("Add", _past_context(state, seen, past), g.op("MatMul", new, new_value))
    if len(block.outputs) > 1:
        axes = g.ints(2) if is_folded(state) else g.ints(2, 3)
        state.masses[layer] = g.op("ReduceSum", probabilities, axes, attributes={"keepdims": 0})


def _past(state: Lowering, layer: int) -> _Past:
    """Declares the inputs of a layer's share of the cache."""
    g, layout = state.g, state.layout
    stack = next(stack for stack in layout.stacks if layer in stack.layers)
    kv, dk, dv = stack.shape.num_kv_heads, stack.shape.key_dim, stack.shape.value_dim
    kind, capacity = TYPES[layout.dtype], f"capacity.{stack.group}"
    heads: list[int | str] = ["batch", kv] if is_folded(state) else ["batch", kv, 1]
    is_blocked = layout.dtype == "int8"
    slots: list[int | str] = [f"blocks.{stack.group}", dk, KEY_BLOCK_TOKENS] if is_blocked else [dk, capacity]
    key = g.input(contract.past_key(layer), kind, [*heads, *slots])
    value = g.input(contract.past_value(layer), kind, [*heads, capacity, dv])
    if not is_blocked:
        return _Past(key=as_float(g, key, layout.dtype), value=as_float(g, value, layout.dtype), scales=None)
    key_scale = g.input(contract.past_key_scale(layer), FLOAT, [*heads, 1, capacity])
    return _Past(
        key=key,
        value=value,
        scales=(key_scale, g.input(contract.past_value_scale(layer), FLOAT, [*heads, 1, capacity])),
    )


def _past_scores(state: Lowering, query: ir.Value, past: _Past) -> ir.Value:
    g = state.g
    if past.scales is None:
        return g.op("MatMul", query, past.key)
    codes, scale, zero_point = g.ops("DynamicQuantizeLinear", [query], 3)
    rows = g.op("Unsqueeze", codes, g.ints(2))
    blocks = g.op(f"{MS}MatMulIntegerToFloat", rows, past.key, scale, _scalar(state, 1.0), zero_point)
    joined = g.op("Transpose", blocks, attributes={"perm": [0, 1, 3, 2, 4]})
    return g.op("Mul", g.op("Reshape", joined, g.ints(0, 0, 0, -1)), past.scales[0])


def _past_context(state: Lowering, seen: ir.Value, past: _Past) -> ir.Value:
    """Sums the past's values with the probabilities `seen`."""
    g = state.g
    if past.scales is None:
        return g.op("MatMul", seen, past.value)
    blocks = g.op("Reshape", g.op("Mul", seen, past.scales[1]), g.ints(0, 0, 0, PARTS, -1))
    largest = g.op("ReduceMax", blocks, g.ints(-1), attributes={"keepdims": 1})
    largest = g.op("Max", largest, _scalar(state, _TINY))
    step = _scalar(state, 1 / _LARGEST_UINT8)
    codes = g.op("QuantizeLinear", g.op("Div", blocks, largest), step, g.constant(np.array(0, np.uint8)))
    codes, largest = (g.op("Transpose", x, attributes={"perm": [0, 1, 3, 2, 4]}) for x in (codes, largest))
    values = g.op("Reshape", past.value, g.ints(0, 0, PARTS, -1, _width(past.value)))
    sums = g.op(f"{MS}MatMulIntegerToFloat", codes, values, step, _scalar(state, 1.0))
    return g.op("ReduceSum", g.op("Mul", sums, largest), g.ints(2), attributes={"keepdims": 0})


def _width(value: ir.Value) -> int:
    assert value.shape is not None
    width = value.shape[-1]
    assert isinstance(width, int)
    return width


def _scalar(state: Lowering, number: float) -> ir.Value:
    return state.g.constant(np.array(number, np.float32))


def _past_bias(state: Lowering, group: int) -> ir.Value:
    def declare() -> ir.Value:
        shape: list[int | str] = ["batch", 1, f"bias_rows.{group}", f"capacity.{group}"]
        return state.g.input(contract.past_bias(group), FLOAT, shape)

    return state.once(("past bias", group), declare)


def _bias(state: Lowering, group: int, new_bias: ir.Value, block: Block) -> ir.Value:
    """What is added to scores: [B, 1, 1, S, C + S] for all heads, or [B, 1, G·S, C + S] where they are folded."""
    g, past_bias = state.g, _past_bias(state, group)

    def joined() -> ir.Value:
        rows = g.op("Shape", state[new_bias], attributes={"start": 0, "end": 3})
        past = g.op("Expand", past_bias, g.op("Concat", rows, g.ints(1), attributes={"axis": 0}))
        return g.op("Concat", past, state[new_bias], attributes={"axis": 3})

    def shaped() -> ir.Value:
        bias = state.once(("joined bias", group, new_bias), joined)
        size = int(block.attributes["group_size"])
        return g.op("Tile", bias, g.ints(1, 1, size, 1)) if is_folded(state) else g.op("Unsqueeze", bias, g.ints(2))

    size = block.attributes["group_size"] if is_folded(state) else 0
    return state.once(("attention bias", group, new_bias, size), shaped)


def _lengths(state: Lowering, group: int, new_bias: ir.Value) -> ir.Value:
    """The vector (C, S)."""
    g = state.g

    def build() -> ir.Value:
        axis = {"start": 3, "end": 4}
        sizes = (g.op("Shape", part, attributes=axis) for part in (_past_bias(state, group), state[new_bias]))
        return g.op("Concat", *sizes, attributes={"axis": 0})

    return state.once(("attention lengths", group, new_bias), build)


def cache_rows(state: Lowering, block: Block) -> None:
    """Keeps a layer's new keys and values for `stacked_outputs`."""
    key, value = state.operands(block)
    state.rows[int(block.attributes["layer"])] = state[key], state[value]


def stacked_outputs(state: Lowering) -> None:
    """Emits what the layers of every stack add to the cache, as it stores it, and the attention that they give."""
    for index, stack in enumerate(state.layout.stacks):
        with state.g.scope(f"stack{index}"):
            _stack_rows(state, index, stack)
            if state.masses:
                mass = state.g.op("Concat", *(state.masses[layer] for layer in stack.layers), attributes={"axis": 0})
                shape: list[int | str] = ["layers", stack.shape.num_kv_heads, f"attended.{index}"]
                state.g.output(mass, contract.stacked(contract.attention_mass(0), index), FLOAT, shape)


def _stack_rows(state: Lowering, index: int, stack: Stack) -> None:
    g, dtype = state.g, state.layout.dtype
    kv, kind = stack.shape.num_kv_heads, TYPES[dtype]
    shapes: list[list[int | str]]
    shapes = [["layers", kv, stack.shape.key_dim, "sequence"], ["layers", kv, "sequence", stack.shape.value_dim]]
    for part, name in enumerate((contract.new_key(0), contract.new_value(0))):
        rows = g.op("Concat", *(state.rows[layer][part] for layer in stack.layers), attributes={"axis": 0})
        if dtype == "int8":
            rows, scale = quantized(g, rows, 2 + part)
            if part:
                scale = g.op("Transpose", scale, attributes={"perm": [0, 1, 3, 2]})
            scale_name = (contract.new_key_scale(0), contract.new_value_scale(0))[part]
            g.output(scale, contract.stacked(scale_name, index), FLOAT, ["layers", kv, 1, "sequence"])
        elif dtype == "fp16":
            rows = g.op("Cast", rows, attributes={"to": kind.value})
        g.output(rows, contract.stacked(name, index), kind, shapes[part])
