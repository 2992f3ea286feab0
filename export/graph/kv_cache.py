"""The KV cache in the graph: how its parts are read, and how the rows of new tokens are stored.

    dtype  past_key, past_value    read as                         rows
    fp32   float32                 they are                        as they are
    fp16   float16                 Cast to float32                 Cast to float16
    int8   int8 codes, and a       Cast to float32; K's scales     new_key [B, KV, dk, S] ─┬─▶ Abs ─▶ max over dk
           float32 scale per       multiply the scores, V's the                            │            ▼
           token and KV head       probabilities                                           │          / 127 ─▶ key_scale
                                                                                           ▼            ▼
                                                                                           Div ◀────────┘
                                                                                            └─▶ Round ─▶ int8 codes

Codes are symmetric, −127 … 127: x ≈ scale · code. A scale per token and KV head keeps an outlier of one token from
costing the others precision, and makes an appended token independent of all that is there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from edgekit import contract
from edgekit.cache_layout import KVCacheDtype
from edgekit.export.graph.builder import GraphBuilder
from edgekit.spec import AttentionSpec

TYPES: dict[KVCacheDtype, ir.DataType] = {
    "fp32": ir.DataType.FLOAT,
    "fp16": ir.DataType.FLOAT16,
    "int8": ir.DataType.INT8,
}
LARGEST_CODE = 127
# Of a token whose channels are all 0 the scale is this, and its codes are 0.
_SMALLEST_SCALE = 1e-30


@dataclass(frozen=True, kw_only=True)
class GraphOptions:
    """What a graph is built with, besides the model.

    Attributes:
        kv_cache_dtype: How the cache is stored.
        attention_scores: Whether the graph has the outputs `contract.attention_mass`.
    """

    kv_cache_dtype: KVCacheDtype = "fp32"
    attention_scores: bool = False


@dataclass(frozen=True, kw_only=True)
class PastTensors:
    """A layer's share of the cache.

    Attributes:
        key: shape (B, KV, dk, C).
        value: shape (B, KV, C, dv).
        key_scale: shape (B, KV, 1, C), float32; None unless int8.
        value_scale: shape (B, KV, 1, C), float32; None unless int8.
    """

    key: ir.Value
    value: ir.Value
    key_scale: ir.Value | None
    value_scale: ir.Value | None


def past_inputs(g: GraphBuilder, layer: int, spec: AttentionSpec, dtype: KVCacheDtype, capacity: str) -> PastTensors:
    """Declares the inputs of a layer's share of the cache; `capacity` names the axis of its slots."""
    kv, kind = spec.num_kv_heads, TYPES[dtype]
    key = g.input(contract.past_key(layer), kind, ["batch", kv, spec.key_dim, capacity])
    value = g.input(contract.past_value(layer), kind, ["batch", kv, capacity, spec.value_dim])
    if dtype != "int8":
        return PastTensors(key=key, value=value, key_scale=None, value_scale=None)
    scales = (
        g.input(name(layer), ir.DataType.FLOAT, ["batch", kv, 1, capacity])
        for name in (contract.past_key_scale, contract.past_value_scale)
    )
    key_scale, value_scale = scales
    return PastTensors(key=key, value=value, key_scale=key_scale, value_scale=value_scale)


def as_float(g: GraphBuilder, stored: ir.Value, dtype: KVCacheDtype) -> ir.Value:
    """Returns a part of the cache in float32; codes without their scales."""
    return stored if dtype == "fp32" else g.op("Cast", stored, attributes={"to": ir.DataType.FLOAT.value})


def quantized(g: GraphBuilder, rows: ir.Value, axis: int) -> tuple[ir.Value, ir.Value]:
    """Quantizes over an axis; returns the int8 codes and the scales, float32, of size 1 along it."""
    largest = g.op("ReduceMax", g.op("Abs", rows), g.ints(axis), attributes={"keepdims": 1})
    scale = g.op("Mul", largest, g.constant(np.array(1 / LARGEST_CODE, np.float32)))
    scale = g.op("Max", scale, g.constant(np.array(_SMALLEST_SCALE, np.float32)))
    codes = g.op("Round", g.op("Div", rows, scale))
    return g.op("Cast", codes, attributes={"to": ir.DataType.INT8.value}), scale


def cache_rows(
    g: GraphBuilder, layer: int, new: tuple[ir.Value, ir.Value], spec: AttentionSpec, dtype: KVCacheDtype
) -> None:
    """Makes the keys [B, KV, dk, S] and values [B, KV, S, dv] of the new tokens outputs, as the cache stores them."""
    kv, kind = spec.num_kv_heads, TYPES[dtype]
    with g.block("cache_rows", [*new], {"layer": layer}):
        scales: list[ir.Value] = []
        if dtype == "int8":
            (key, key_scale), (value, value_scale) = (
                quantized(g, x, axis) for x, axis in zip(new, (2, 3), strict=True)
            )
            scales = [key_scale, g.op("Transpose", value_scale, attributes={"perm": [0, 1, 3, 2]})]
        elif dtype == "fp16":
            key, value = (g.op("Cast", x, attributes={"to": kind.value}) for x in new)
        else:
            key, value = (g.op("Identity", x) for x in new)
        g.output(key, contract.new_key(layer), kind, ["batch", kv, spec.key_dim, "sequence"])
        g.output(value, contract.new_value(layer), kind, ["batch", kv, "sequence", spec.value_dim])
        for scale, name in zip(scales, (contract.new_key_scale, contract.new_value_scale), strict=False):
            g.output(scale, name(layer), ir.DataType.FLOAT, ["batch", kv, 1, "sequence"])
