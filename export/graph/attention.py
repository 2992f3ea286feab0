"""Causal self-attention in two parts: over the cache, which is only read, and over the new tokens.

    heads     q_proj [B, S, H·dk] ─▶ [B, S, H, dk] ─▶ (q_norm) ─▶ [B, H, S, dk] ─▶ rope ─▶ × scale ─▶ q [B, KV, G·S, dk]
              k_proj [B, S, KV·dk] ─▶ … ─▶ (k_norm) ─▶ [B, KV, S, dk] ─▶ rope ─▶ Transpose ─▶ new key [B, KV, dk, S]
              v_proj [B, S, KV·dv] ─▶ [B, S, KV, dv] ─▶ Transpose ─▶ new value [B, KV, S, dv]

    attention               q ─────┬──────────────┐
                                   ▼              ▼
              past_key [dk × C]─▶MatMul  new key▶MatMul
                                   └──▶ Concat ◀──┘          [B, KV, G·S, C + S]
                                     (soft cap)
                                          + bias             [B, 1, G·S, C + S]
                                        Softmax
                                   ┌──── Split ───┐
                                   ▼              ▼
            past_value [C × dv]─▶MatMul new value▶MatMul
                                   └────▶ Add ◀───┘          [B, KV, G·S, dv] ─▶ [B, S, H·dv]

The scales of an int8 cache multiply the past's scores (keys) and probabilities (values);
`edgekit.export.graph.kv_cache` has how the cache is stored.

H = KV·G query heads; the G heads that share a KV head are folded into the rows, so keys and values are never
repeated. Row g·S + s is new token s of query head g.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from edgekit import contract
from edgekit.export.graph.builder import GraphBuilder
from edgekit.export.graph.kv_cache import GraphOptions, PastTensors, as_float
from edgekit.export.graph.norm import rms
from edgekit.rope import DynamicScaling, LongRopeScaling, RopeSpec
from edgekit.spec import AttentionSpec


@dataclass(frozen=True, kw_only=True)
class HeadTensors:
    """Projections of the new tokens, in the layouts that attention and the cache want.

    Attributes:
        query: shape (B, KV, G·S, dk).
        key: shape (B, KV, dk, S).
        value: shape (B, KV, S, dv).
    """

    query: ir.Value
    key: ir.Value
    value: ir.Value


@dataclass(frozen=True, kw_only=True)
class RopeTable:
    """Cosines and sines of the new tokens' angles, shape (B, S, rotary_dim / 2) each."""

    cos: ir.Value
    sin: ir.Value


def rope_frequencies(g: GraphBuilder, rope: RopeSpec, sequence_length: ir.Value | None) -> ir.Value:
    """Returns radians per position, shape (rotary_dim / 2,) float32: a constant, unless they depend on the length.

    Args:
        g: The graph.
        rope: The rotary embedding.
        sequence_length: shape (1,), int64; None for a model that has no such input.
    """
    base = rope.inverse_frequencies().astype(np.float32)
    if sequence_length is None or not rope.depends_on_length:
        return g.constant(base)
    if isinstance(rope.scaling, LongRopeScaling):
        limit = rope.scaling.original_max_positions
        long = g.constant(rope.inverse_frequencies(limit + 1).astype(np.float32))
        return g.op("Where", g.op("Greater", sequence_length, g.ints(limit)), long, g.constant(base))
    # Dynamic NTK: growth = (factor·L/L₀ − factor + 1)^(d/(d−2)) multiplies the base θ of the series θ^(−2i/d).
    assert isinstance(rope.scaling, DynamicScaling)
    width, factor = rope.rotary_dim, rope.scaling.factor
    longer = g.op("Max", sequence_length, g.ints(rope.scaling.original_max_positions))
    length = g.op("Cast", longer, attributes={"to": ir.DataType.FLOAT.value})
    stretch = g.op("Mul", length, _scalar(g, factor / rope.scaling.original_max_positions))
    powers = -np.arange(0, width, 2) / (width - 2)
    growth = g.op("Pow", g.op("Sub", stretch, _scalar(g, factor - 1)), g.constant(powers.astype(np.float32)))
    return g.op("Mul", growth, g.constant(base))


def rope_table(g: GraphBuilder, position_ids: ir.Value, rope: RopeSpec, frequencies: ir.Value) -> RopeTable:
    """Computes the angles of the new tokens from position_ids, shape (B, S) int64."""
    attributes = {"attention_factor": rope.attention_factor}
    with g.block("rope_table", [position_ids, frequencies], attributes) as outputs:
        positions = g.op("Cast", position_ids, attributes={"to": ir.DataType.FLOAT.value})
        angles = g.op("Mul", g.op("Unsqueeze", positions, g.ints(-1)), frequencies)
        outputs += [scaled(g, g.op(op_type, angles), rope.attention_factor) for op_type in ("Cos", "Sin")]
    return RopeTable(cos=outputs[0], sin=outputs[1])


def scaled(g: GraphBuilder, x: ir.Value, factor: float) -> ir.Value:
    """Returns x · factor, and x itself for the factor 1."""
    return x if factor == 1.0 else g.op("Mul", x, _scalar(g, factor))


def softcap(g: GraphBuilder, x: ir.Value, cap: float | None) -> ir.Value:
    """Bounds x smoothly to ±cap (Gemma Team 2024, section 2); None leaves it as it is."""
    return x if cap is None else g.op("Mul", g.op("Tanh", g.op("Div", x, _scalar(g, cap))), _scalar(g, cap))


def _scalar(g: GraphBuilder, value: float) -> ir.Value:
    return g.constant(np.array(value, np.float32))


def windowed(g: GraphBuilder, new_bias: ir.Value, position_ids: ir.Value, window: int | None) -> ir.Value:
    """Masks new tokens that are outside each other's sliding window; shape (B, 1, S, S) float32."""
    if window is None:
        return new_bias
    distance = g.op("Sub", g.op("Unsqueeze", position_ids, g.ints(2)), g.op("Unsqueeze", position_ids, g.ints(1)))
    outside = g.op("Unsqueeze", g.op("GreaterOrEqual", distance, g.ints(window)), g.ints(1))
    return g.op("Where", outside, _scalar(g, contract.MASKED), new_bias)


@dataclass(frozen=True, kw_only=True)
class AttentionBias:
    """What layers of one cache group and one number of query heads per KV head add to their scores.

    Attributes:
        bias: shape (B, 1, G·S, C + S), float32.
        lengths: The two values C and S, int64.
    """

    bias: ir.Value
    lengths: ir.Value


def attention_bias(g: GraphBuilder, past_bias: ir.Value, new_bias: ir.Value, group_size: int) -> AttentionBias:
    """Joins the biases over past and new tokens and repeats them for the G heads of a group."""
    with g.block("attention_bias", [past_bias, new_bias], {"group_size": group_size}) as outputs:
        rows = g.op("Shape", new_bias, attributes={"start": 0, "end": 3})
        past = g.op("Expand", past_bias, g.op("Concat", rows, g.ints(1), attributes={"axis": 0}))
        bias = g.op("Concat", past, new_bias, attributes={"axis": 3})
        if group_size > 1:
            bias = g.op("Tile", bias, g.ints(1, 1, group_size, 1))
        capacity = g.op("Shape", past_bias, attributes={"start": 3, "end": 4})
        tokens = g.op("Shape", new_bias, attributes={"start": 3, "end": 4})
        lengths = g.op("Concat", capacity, tokens, attributes={"axis": 0})
        outputs += [bias, lengths]
    return AttentionBias(bias=bias, lengths=lengths)


@dataclass(frozen=True, kw_only=True)
class Projections:
    """Outputs of the q, k and v projections, shape (B, S, heads · width), and the weights of their heads' norms."""

    query: ir.Value
    key: ir.Value
    value: ir.Value
    query_norm: ir.Value | None
    key_norm: ir.Value | None


def heads(g: GraphBuilder, projected: Projections, table: RopeTable | None, spec: AttentionSpec) -> HeadTensors:
    """Splits the projections into heads, normalizes and rotates them."""
    inputs = [
        projected.query,
        projected.key,
        projected.value,
        None if table is None else table.cos,
        None if table is None else table.sin,
        projected.query_norm,
        projected.key_norm,
    ]
    attributes = {
        "num_heads": spec.num_heads,
        "num_kv_heads": spec.num_kv_heads,
        "key_dim": spec.key_dim,
        "value_dim": spec.value_dim,
        "rotary_dim": 0 if spec.rope is None else spec.rope.rotary_dim,
        "scale": spec.scale,
        "epsilon": 0.0 if spec.qk_norm is None else spec.qk_norm.epsilon,
    }
    with g.block("heads", inputs, attributes) as outputs:
        query = _rotate(g, _split(g, projected.query, spec.key_dim, spec, projected.query_norm), table, spec)
        query = scaled(g, query, spec.scale)
        query = g.op("Reshape", query, g.ints(0, spec.num_kv_heads, -1, spec.key_dim))
        key = _rotate(g, _split(g, projected.key, spec.key_dim, spec, projected.key_norm), table, spec)
        key = g.op("Transpose", key, attributes={"perm": [0, 1, 3, 2]})
        value = _split(g, projected.value, spec.value_dim, spec, None)
        outputs += [query, key, value]
    return HeadTensors(query=query, key=key, value=value)


def _split(g: GraphBuilder, x: ir.Value, width: int, spec: AttentionSpec, weight: ir.Value | None) -> ir.Value:
    """Turns (B, S, heads · width) into (B, heads, S, width), normalized when there is a weight."""
    rows = g.op("Reshape", x, g.ints(0, 0, -1, width))
    if weight is not None and spec.qk_norm is not None:
        rows = rms(g, rows, spec.qk_norm.epsilon, weight)
    return g.op("Transpose", rows, attributes={"perm": [0, 2, 1, 3]})


def _rotate(g: GraphBuilder, x: ir.Value, table: RopeTable | None, spec: AttentionSpec) -> ir.Value:
    """Rotates the leading channels of x, shape (B, heads, S, dk): (a, b) becomes (a·cos − b·sin, b·cos + a·sin)."""
    if table is None or spec.rope is None:
        return x
    half, rest = spec.rope.rotary_dim // 2, spec.key_dim - spec.rope.rotary_dim
    sizes = [half, half] + ([rest] if rest else [])
    a, b, *passed = g.ops("Split", [x, g.ints(*sizes)], len(sizes), {"axis": -1})
    cos, sin = (g.op("Unsqueeze", part, g.ints(1)) for part in (table.cos, table.sin))
    rotated = [
        g.op("Sub", g.op("Mul", a, cos), g.op("Mul", b, sin)),
        g.op("Add", g.op("Mul", b, cos), g.op("Mul", a, sin)),
    ]
    return g.op("Concat", *rotated, *passed, attributes={"axis": -1})


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """How a layer attends.

    Attributes:
        layer: Its index.
        num_kv_heads: Heads of its cache.
        group_size: Query heads of each of them.
        cap: Soft cap of the scores; None for none.
        graph: Options of the whole graph.
    """

    layer: int
    num_kv_heads: int
    group_size: int
    cap: float | None
    graph: GraphOptions


def attention(
    g: GraphBuilder, tensors: HeadTensors, past: PastTensors, bias: AttentionBias, options: AttentionOptions
) -> ir.Value:
    """Attends over the cache and the new tokens; returns (B, KV, G·S, dv).

    Args:
        g: The graph.
        tensors: Queries, keys and values of the new tokens.
        past: The layer's share of the cache.
        bias: What is added to the scores.
        options: See `AttentionOptions`.
    """
    dtype, layer = options.graph.kv_cache_dtype, options.layer
    inputs = [tensors.query, tensors.key, tensors.value, past.key, past.value, bias.bias, bias.lengths]
    attributes = {"softcap": options.cap, "layer": layer, "group_size": options.group_size}
    with g.block("attention", inputs, attributes) as outputs:
        past_scores = g.op("MatMul", tensors.query, as_float(g, past.key, dtype))
        if past.key_scale is not None:
            past_scores = g.op("Mul", past_scores, past.key_scale)
        new_scores = g.op("MatMul", tensors.query, tensors.key)
        scores = g.op("Concat", past_scores, new_scores, attributes={"axis": -1})
        biased = g.op("Add", softcap(g, scores, options.cap), bias.bias)
        probabilities = g.op("Softmax", biased, attributes={"axis": -1})
        over_past, over_new = g.ops("Split", [probabilities, bias.lengths], 2, {"axis": -1})
        if past.value_scale is not None:
            over_past = g.op("Mul", over_past, past.value_scale)
        past_context = g.op("MatMul", over_past, as_float(g, past.value, dtype))
        context = g.op("Add", past_context, g.op("MatMul", over_new, tensors.value))
        outputs.append(context)
        if options.graph.attention_scores:
            mass = g.op("ReduceSum", probabilities, g.ints(2), attributes={"keepdims": 0})
            shape: list[int | str] = ["batch", options.num_kv_heads, f"attended.{layer}"]
            g.output(mass, contract.attention_mass(layer), ir.DataType.FLOAT, shape)
            outputs.append(mass)
    return context


def join_heads(g: GraphBuilder, context: ir.Value, spec: AttentionSpec) -> ir.Value:
    """Turns (B, KV, G·S, dv) into (B, S, H·dv)."""
    attributes = {"num_heads": spec.num_heads, "value_dim": spec.value_dim}
    with g.block("join_heads", [context], attributes) as outputs:
        split = g.op("Reshape", context, g.ints(0, spec.num_heads, -1, spec.value_dim))
        tokens = g.op("Transpose", split, attributes={"perm": [0, 2, 1, 3]})
        joined = g.op("Reshape", tokens, g.ints(0, 0, -1))
        outputs.append(joined)
    return joined
