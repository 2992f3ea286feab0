"""Feed-forward networks.

gated     x ─┬─▶ gate_proj ─▶ act ─┐
             └─▶ up_proj ─────────▶ Mul ─▶ down_proj

plain     x ───▶ up_proj ─▶ act ─────────▶ down_proj
"""

from __future__ import annotations

import onnx_ir as ir

from edgekit.export.graph.builder import GraphBuilder
from edgekit.spec import Activation


def gated_activation(g: GraphBuilder, gate: ir.Value, up: ir.Value, activation: Activation) -> ir.Value:
    """Returns act(gate) · up; both have shape (B, S, width) float32."""
    with g.block("gated_activation", [gate, up], {"activation": activation}) as outputs:
        y = g.op("Mul", activate(g, gate, activation), up)
        outputs.append(y)
    return y


def plain_activation(g: GraphBuilder, x: ir.Value, activation: Activation) -> ir.Value:
    """Returns act(x), shape (B, S, width) float32."""
    with g.block("activation", [x], {"activation": activation}) as outputs:
        y = activate(g, x, activation)
        outputs.append(y)
    return y


def activate(g: GraphBuilder, x: ir.Value, activation: Activation) -> ir.Value:
    """The arithmetic of an activation, without a block of its own."""
    if activation == "silu":
        return g.op("Mul", x, g.op("Sigmoid", x))
    if activation == "relu":
        return g.op("Relu", x)
    return g.op("Gelu", x, attributes={"approximate": "tanh" if activation == "gelu_tanh" else "none"})
