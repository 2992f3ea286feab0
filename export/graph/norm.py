"""Normalization over the last axis.

RMSNorm is spelled out because TensorRT before 10.15 has no operator for it, and so that a lowering to fp16
can keep it in fp32; LayerNormalization is standard since opset 17 and accumulates in fp32 by itself.

    x [..., n] ─┬─▶ Mul(x, x) ─▶ ReduceMean ─▶ + ε ─▶ Sqrt ─┐
                └──────────────────────────────────────────▶ Div ─▶ Mul(weight [n]) ─▶ [..., n]
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgekit.export.graph.builder import GraphBuilder
from edgekit.spec import NormSpec


def norm(g: GraphBuilder, x: ir.Value, spec: NormSpec, weight: ir.Value, bias: ir.Value | None) -> ir.Value:
    """Normalizes x, shape (..., n) float32; weight and bias have shape (n,)."""
    with g.block(f"{spec.kind}_norm", [x, weight, bias], {"epsilon": spec.epsilon}) as outputs:
        if spec.kind == "layer":
            y = g.op("LayerNormalization", x, weight, bias, attributes={"axis": -1, "epsilon": spec.epsilon})
        else:
            y = rms(g, x, spec.epsilon, weight)
        outputs.append(y)
    return y


def rms(g: GraphBuilder, x: ir.Value, epsilon: float, weight: ir.Value) -> ir.Value:
    """The arithmetic of RMSNorm (Zhang & Sennrich 2019, eq. 4), without a block of its own."""
    mean_square = g.op("ReduceMean", g.op("Mul", x, x), g.ints(-1), attributes={"keepdims": 1})
    root = g.op("Sqrt", g.op("Add", mean_square, g.constant(np.array(epsilon, np.float32))))
    return g.op("Mul", g.op("Div", x, root), weight)
