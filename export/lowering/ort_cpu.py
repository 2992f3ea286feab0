"""Lowering for ONNX Runtime's CPU provider.

Activations are two-dimensional, [T, n] with T = B·S, so that an affine offset and a bias are the C operand of
a Gemm; heads get their four dimensions back from the shape of input_ids. Per layer:

    SkipSimplifiedLayerNormalization          residual sum and norm in one
    MatMulNBits q|k|v                         int8 activations (accuracy level 4)
    Reshape, Transpose, Split, RotaryEmbedding, Split, Reshape, Transpose
    attention: `edgekit.export.lowering.ort_cpu_attention`
    Transpose, Reshape
    MatMulNBits o
    SkipSimplifiedLayerNormalization
    MatMulNBits gate|up, Split, QuickGelu (α = 1 is SiLU), Mul
    MatMulNBits down

and for affine blocks, before each of the four matrices, MatMul (block sums) and after it Gemm (+ offsets).
Projections that read the same activation and are stored alike are concatenated into one matrix.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from edgekit import contract
from edgekit.export.graph.attention import scaled
from edgekit.export.graph.mlp import activate
from edgekit.export.lowering.blocks import Block, LowerBlock, Lowering, Target
from edgekit.export.lowering.ort_cpu_attention import attention, attention_bias, cache_rows, is_folded, stacked_outputs
from edgekit.export.lowering.packing import PackedMatrix, dimension, packed, second_reading, vectors, widened
from edgekit.spec import Activation

FLOAT = ir.DataType.FLOAT.value
MS = "com.microsoft::"
INT8_ACTIVATIONS = 4


def _embedding(state: Lowering, block: Block) -> None:
    """Gathers rows of the codes that a tied head multiplies with, and dequantizes only those.

    ids [T] ─▶ Gather(codes [V, H/b, b]) ─▶ Cast ─▶ − 128 ─▶ × scale [T, H/b, 1] ─▶ (+ offset) ─▶ [T, H]
    """
    g, (ids, *parts) = state.g, state.operands(block)
    hidden, precision = block.attributes["hidden"], block.attributes["precision"]
    tokens = g.op("Reshape", state[ids], g.ints(-1))
    if precision in ("fp32", "fp16"):
        rows = g.op("Gather", widened(state, [parts]), tokens, attributes={"axis": 1})
        state[block.outputs[0]] = g.op("Transpose", rows, attributes={"perm": [1, 0]})
        return
    matrix = packed(state, [parts], block.attributes["block_size"])
    codes, scale = (second_reading(state, value) for value in (matrix.codes, matrix.scale))
    rows = g.op("Cast", g.op("Gather", codes, tokens), attributes={"to": FLOAT})
    rows = g.op("Sub", rows, g.constant(np.array(128, np.float32)))
    rows = g.op("Mul", rows, g.op("Unsqueeze", g.op("Gather", scale, tokens), g.ints(2)))
    if matrix.offset is not None:
        stored = second_reading(state, matrix.offset)
        offset = g.op("Transpose", g.op("Gather", stored, tokens, attributes={"axis": 1}))
        rows = g.op("Add", rows, g.op("Unsqueeze", offset, g.ints(2)))
    padded = g.op("Reshape", rows, g.ints(0, -1))
    state[block.outputs[0]] = g.op("Slice", padded, g.ints(0), g.ints(hidden), g.ints(1))


def _norm(state: Lowering, block: Block) -> None:
    """A norm, taking over the residual sum that it alone has asked for so far."""
    g, (x, weight, bias) = state.g, block.inputs
    assert x is not None and weight is not None
    parameters = [vectors(state, [value]) for value in (weight, bias) if value is not None]
    kind = "SimplifiedLayerNormalization" if bias is None else "LayerNormalization"
    epsilon = {"epsilon": block.attributes["epsilon"]}
    terms = state.take_add(x)
    if terms is None:
        state[block.outputs[0]] = g.op(kind, state[x], *parameters, attributes={"axis": -1, **epsilon})
        return
    # Outputs 1 and 2 (mean, inverse deviation) are not wanted; output 3 is the sum.
    op_type = f"{MS}Skip{kind}"
    inputs = [state[terms[0]], state[terms[1]], *parameters]
    normed, *_, total = g.ops(op_type, inputs, 4, epsilon)
    state[x], state[block.outputs[0]] = total, normed


def _linear(state: Lowering, block: Block) -> None:
    """One matrix product for all projections of the same activation that are stored alike.

    x [T, K] ─┬─▶ MatMulNBits(codes) ─▶ y [T, ΣN] ──────────────────┐ C
              └─▶ MatMul(indicator [K, K/b]) ─▶ sums [T, K/b] ─▶ Gemm(offset [K/b, ΣN]) ─▶ Split
    """
    g, group = state.g, _siblings(state, block)
    matrices = [[part for part in member.inputs[2:] if part is not None] for member in group]
    factors = [_output_scale(state, member.outputs[0]) for member in group]
    biases = [member.inputs[1] for member in group if member.inputs[1] is not None]
    bias = vectors(state, biases, factors) if biases else None
    assert block.inputs[0] is not None
    x, rows = state[block.inputs[0]], [int(member.attributes["rows"]) for member in group]
    if block.attributes["precision"] in ("fp32", "fp16"):
        weight = widened(state, matrices, factors)
        y = g.op("MatMul", x, weight) if bias is None else g.op("Gemm", x, weight, bias)
    else:
        size = int(block.attributes["block_size"])
        y = _matmul_nbits(state, block, packed(state, matrices, size, factors), x, bias)
    state.merged[tuple(member.outputs[0] for member in group)] = y
    parts = [y] if len(group) == 1 else g.ops("Split", [y, g.ints(*rows)], len(rows), {"axis": -1})
    for member, part in zip(group, parts, strict=True):
        state[member.outputs[0]] = part


def _output_scale(state: Lowering, result: ir.Value) -> float:
    """What a projection's result is to be multiplied by: the scale of the scores for a query that is not normalized."""
    if not state.output_scale:
        blocks = state.blocks.values()
        results = {block.outputs[0] for block in blocks if block.kind == "linear"}
        heads = [block for block in blocks if block.kind == "heads" and block.inputs[5] is None]
        state.output_scale = {
            block.inputs[0]: block.attributes["scale"] for block in heads if block.inputs[0] in results
        }
    return state.output_scale.get(result, 1.0)


def _matmul_nbits(state: Lowering, block: Block, matrix: PackedMatrix, x: ir.Value, bias: ir.Value | None) -> ir.Value:
    g, columns, size = state.g, int(block.attributes["columns"]), int(block.attributes["block_size"])
    attributes = {
        "K": columns,
        "N": dimension(matrix.codes, 0),
        "bits": 4 if block.attributes["precision"] == "int4" else 8,
        "block_size": size,
        "accuracy_level": INT8_ACTIVATIONS,
    }
    y = g.op(f"{MS}MatMulNBits", x, matrix.codes, matrix.scale, None, None, bias, attributes=attributes)
    if matrix.offset is None:
        return y
    indicator = np.repeat(np.eye(-(-columns // size), dtype=np.float32), size, axis=0)[:columns]
    sums = state.once(("block sums", x, size), lambda: g.op("MatMul", x, g.constant(indicator)))
    return g.op("Gemm", sums, matrix.offset, y)


def _siblings(state: Lowering, block: Block) -> list[Block]:
    """Projections of the same activation with the same storage and all with or all without bias."""
    same = ("columns", "precision", "block_size", "scheme")
    return [
        other
        for other in state.blocks.values()
        if other.kind == "linear"
        and other.inputs[0] is block.inputs[0]
        and all(other.attributes[key] == block.attributes[key] for key in same)
        and (other.inputs[1] is None) == (block.inputs[1] is None)
    ]


def _rope_table(state: Lowering, block: Block) -> None:
    """The table has one row per new token, so a token's row index stands for its position."""
    g, (positions, frequencies) = state.g, state.operands(block)
    factor = block.attributes["attention_factor"]
    column = g.op("Cast", g.op("Reshape", state[positions], g.ints(-1, 1)), attributes={"to": FLOAT})
    angles = g.op("Mul", column, state[frequencies])
    for output, op_type in zip(block.outputs, ("Cos", "Sin"), strict=True):
        state[output] = scaled(g, g.op(op_type, angles), factor)


def _token_indices(state: Lowering) -> ir.Value:
    """0 … B·S − 1 as [B, S] int64."""
    g, shape = state.g, _token_shape(state)
    count = g.op("ReduceProd", shape, attributes={"keepdims": 0})
    indices = g.op("Range", g.constant(np.array(0)), count, g.constant(np.array(1)))
    return g.op("Reshape", indices, shape)


def _token_shape(state: Lowering) -> ir.Value:
    return state.once("token shape", lambda: state.g.op("Shape", state[state.source_input(contract.INPUT_IDS)]))


def _head_shape(state: Lowering, heads: int, width: int) -> ir.Value:
    """The vector (B, S, heads, width)."""

    def build() -> ir.Value:
        return state.g.op("Concat", _token_shape(state), state.g.ints(heads, width), attributes={"axis": 0})

    return state.once(("head shape", heads, width), build)


def _heads(state: Lowering, block: Block) -> None:
    """Heads of the merged projection, or of three separate ones when they are stored or sized differently.

    q|k|v [T, (H + 2·KV)·d] ─▶ [B, S, H + 2·KV, d] ─▶ Transpose ─▶ Split ─┬─▶ q|k ─▶ RotaryEmbedding ─▶ Split
                                                                          └─▶ new_value [B, KV, S, d]
    Queries and keys that are normalized first are split first, since each has a weight of its own. The scale of the
    scores is in the weights of what makes the queries: their projection, or their norm.
    """
    g, a = state.g, block.attributes
    query, key, value, _, _, query_norm, key_norm = block.inputs
    assert query is not None and key is not None and value is not None
    num_heads, kv, width = a["num_heads"], a["num_kv_heads"], a["key_dim"]
    merged = state.merged.get((query, key, value)) if width == a["value_dim"] else None
    rows = None if merged is None else _to_heads(state, merged, num_heads + 2 * kv, width)
    if rows is not None and query_norm is None:
        pair, new_value = g.ops("Split", [rows, g.ints(num_heads + kv, kv)], 2, {"axis": 1})
        q, k = g.ops("Split", [_rotate(state, block, pair), g.ints(num_heads, kv)], 2, {"axis": 1})
    else:
        if rows is not None:
            q, k, new_value = g.ops("Split", [rows, g.ints(num_heads, kv, kv)], 3, {"axis": 1})
        else:
            q, k = _to_heads(state, state[query], num_heads, width), _to_heads(state, state[key], kv, width)
            new_value = _to_heads(state, state[value], kv, a["value_dim"])
        q = _rotate(state, block, _head_norm(state, block, q, query_norm, a["scale"]))
        k = _rotate(state, block, _head_norm(state, block, k, key_norm, 1.0))
    if query_norm is None and query not in state.output_scale:
        q = scaled(g, q, a["scale"])
    split = (-1,) if is_folded(state) else (num_heads // kv, -1)
    state[block.outputs[0]] = g.op("Reshape", q, g.ints(0, kv, *split, width))
    state[block.outputs[1]] = g.op("Transpose", k, attributes={"perm": [0, 1, 3, 2]})
    state[block.outputs[2]] = new_value


def _to_heads(state: Lowering, x: ir.Value, heads: int, width: int) -> ir.Value:
    rows = state.g.op("Reshape", x, _head_shape(state, heads, width))
    return state.g.op("Transpose", rows, attributes={"perm": [0, 2, 1, 3]})


def _head_norm(state: Lowering, block: Block, rows: ir.Value, weight: ir.Value | None, factor: float) -> ir.Value:
    if weight is None:
        return rows
    attributes = {"axis": -1, "epsilon": block.attributes["epsilon"]}
    return state.g.op("SimplifiedLayerNormalization", rows, vectors(state, [weight], [factor]), attributes=attributes)


def _rotate(state: Lowering, block: Block, x: ir.Value) -> ir.Value:
    """Rotates x [B, heads, S, dk] by the table of the new tokens."""
    cos, sin = block.inputs[3:5]
    if cos is None or sin is None:
        return x
    indices = state.once("token indices", lambda: _token_indices(state))
    attributes: dict[str, int] = {"interleaved": 0}
    if block.attributes["rotary_dim"] != block.attributes["key_dim"]:
        attributes["rotary_embedding_dim"] = block.attributes["rotary_dim"]
        attributes["num_heads"] = block.attributes["num_heads"]  # which the operator wants to be told in this case
    return state.g.op(f"{MS}RotaryEmbedding", x, indices, state[cos], state[sin], attributes=attributes)


def _join_heads(state: Lowering, block: Block) -> None:
    g, (context,) = state.g, state.operands(block)
    heads, width = block.attributes["num_heads"], block.attributes["value_dim"]
    if is_folded(state):
        split = g.op("Reshape", state[context], g.ints(0, heads, -1, width))
        tokens = g.op("Transpose", split, attributes={"perm": [0, 2, 1, 3]})
    else:
        tokens = g.op("Transpose", state[context], attributes={"perm": [0, 3, 1, 2, 4]})
    state[block.outputs[0]] = g.op("Reshape", tokens, g.ints(-1, heads * width))


def _activate(state: Lowering, x: ir.Value, activation: Activation) -> ir.Value:
    if activation == "silu":
        return state.g.op(f"{MS}QuickGelu", x, attributes={"alpha": 1.0})
    return activate(state.g, x, activation)


def _gated_activation(state: Lowering, block: Block) -> None:
    gate, up = state.operands(block)
    active = _activate(state, state[gate], block.attributes["activation"])
    state[block.outputs[0]] = state.g.op("Mul", active, state[up])


def _activation(state: Lowering, block: Block) -> None:
    (x,) = state.operands(block)
    state[block.outputs[0]] = _activate(state, state[x], block.attributes["activation"])


def _select_rows(state: Lowering, block: Block) -> None:
    """[T, H] ─▶ [B, S, H] ─▶ Gather ─▶ [B·R, H]."""
    g, (hidden, rows) = state.g, state.operands(block)
    width = block.attributes["hidden"]
    shape = g.op("Concat", _token_shape(state), g.ints(width), attributes={"axis": 0})
    selected = g.op("Gather", g.op("Reshape", state[hidden], shape), state[rows], attributes={"axis": 1})
    state[block.outputs[0]] = g.op("Reshape", selected, g.ints(-1, width))


def _logits(state: Lowering, block: Block) -> None:
    """[B·R, V] ─▶ [B, R, V]."""
    g, (x, rows) = state.g, state.operands(block)
    batch = g.op("Slice", _token_shape(state), g.ints(0), g.ints(1))
    shape = g.op("Concat", batch, g.op("Shape", state[rows]), g.ints(-1), attributes={"axis": 0})
    state[block.outputs[0]] = g.op("Reshape", state[x], shape)


_TABLE: Mapping[str, LowerBlock] = {
    "embedding": _embedding,
    "rms_norm": _norm,
    "layer_norm": _norm,
    "linear": _linear,
    "rope_table": _rope_table,
    "heads": _heads,
    "attention_bias": attention_bias,
    "attention": attention,
    "cache_rows": cache_rows,
    "join_heads": _join_heads,
    "gated_activation": _gated_activation,
    "activation": _activation,
    "select_rows": _select_rows,
    "logits": _logits,
}

TARGET = Target(table=_TABLE, is_own=contract.is_cache, finish=stacked_outputs)
