"""Linear layers over wide or block-quantized weights.

    fp32/fp16    x [..., K] ─▶ MatMul(weight [K, N]) ─▶ + bias ─▶ [..., N]

    blocks       x [..., K] ─▶ Pad ─┬─▶ MatMul(DequantizeLinear(codes [Kp, N], scale [Kp/b, N])) ─▶ + bias ─▶ [..., N]
                                    │                                                      ▲
    affine only                     └─▶ block sums [..., Kp/b] ─▶ MatMul(offset [Kp/b, N]) ┘

An offset per block adds m·Σx over the block to every output, so the affine scheme is exact without zero
points, which TensorRT refuses. Padding and block sums are made once per input and shared by its layers.
"""

from __future__ import annotations

import onnx_ir as ir

from edgekit.export.graph.builder import GraphBuilder
from edgekit.export.weights import StoredWeight


class LinearInputs:
    """One activation that several linear layers read, with its padded form and block sums made at most once."""

    def __init__(self, g: GraphBuilder, x: ir.Value) -> None:
        """Wraps x, shape (..., K) float32 of rank 3."""
        self.x = x
        self._g = g
        self._padded: dict[int, ir.Value] = {}
        self._sums: dict[tuple[int, int], ir.Value] = {}

    def padded(self, columns: int, padded_columns: int) -> ir.Value:
        """Returns x with zeros appended to its last axis."""
        if columns == padded_columns:
            return self.x
        if padded_columns not in self._padded:
            pads = self._g.ints(0, 0, 0, 0, 0, padded_columns - columns)
            self._padded[padded_columns] = self._g.op("Pad", self.x, pads)
        return self._padded[padded_columns]

    def block_sums(self, weight: StoredWeight) -> ir.Value:
        """Returns the sum over each block of inputs, shape (..., Kp / b) float32."""
        size, columns = weight.storage.block_size, weight.padded_columns
        if (size, columns) not in self._sums:
            x = self.padded(weight.shape[1], columns)
            blocks = self._g.op("Reshape", x, self._g.ints(0, 0, columns // size, size))
            self._sums[size, columns] = self._g.op("ReduceSum", blocks, self._g.ints(-1), attributes={"keepdims": 0})
        return self._sums[size, columns]


def linear(g: GraphBuilder, inputs: LinearInputs, weight: StoredWeight, bias: ir.Value | None) -> ir.Value:
    """Applies one linear layer; returns shape (..., N) float32.

    Args:
        g: The graph.
        inputs: The activation, last axis K.
        weight: A stored (N, K) matrix.
        bias: shape (N,) float32, or None.
    """
    storage = weight.storage
    parts = [g.weight(part) for part in weight.parts]
    rows, columns = weight.shape
    attributes = {
        "rows": rows,
        "columns": columns,
        "precision": storage.precision,
        "block_size": storage.block_size,
        "scheme": storage.scheme,
    }
    sums = inputs.block_sums(weight) if storage.quantized and storage.scheme == "affine" else None
    x = inputs.padded(columns, weight.padded_columns)
    with g.block("linear", [inputs.x, bias, *parts], attributes) as outputs:
        y = g.op("MatMul", x, wide(g, parts, weight))
        if sums is not None:
            y = g.op("Add", y, g.op("MatMul", sums, g.op("Cast", parts[2], attributes={"to": ir.DataType.FLOAT.value})))
        if bias is not None:
            y = g.op("Add", y, bias)
        outputs.append(y)
    return y


def wide(g: GraphBuilder, parts: list[ir.Value], weight: StoredWeight) -> ir.Value:
    """Returns the stored matrix as float32 [Kp, N], without the offsets of the affine scheme.

    Scales are widened before the product, not after, so that no product is rounded to fp16 and ONNX
    Runtime recognises DequantizeLinear → MatMul and runs it on the codes.
    """
    to_float = {"to": ir.DataType.FLOAT.value}
    if not weight.storage.quantized:
        return parts[0] if weight.storage.precision == "fp32" else g.op("Cast", parts[0], attributes=to_float)
    scale = g.op("Cast", parts[1], attributes=to_float)
    return g.op("DequantizeLinear", parts[0], scale, attributes={"axis": 0, "block_size": weight.storage.block_size})


def embedding(g: GraphBuilder, input_ids: ir.Value, weight: StoredWeight) -> ir.Value:
    """Looks up rows of a stored (V, H) matrix, which a tied head may read as well.

        ids [B·S] ─▶ Gather(codes [Hp, V], axis 1) [Hp, B·S] ─▶ Cast ─▶ [H/b, b, B·S] ─▶ × scale ─▶ + offset
                  ─▶ [Hp, B·S] ─▶ Slice [H, B·S] ─▶ Transpose ─▶ [B, S, H]

    Args:
        g: The graph.
        input_ids: shape (B, S), int64.
        weight: The stored matrix; int4 is not offered, since ONNX has no Gather for it.

    Returns:
        shape (B, S, H), float32.
    """
    storage, (_, hidden) = weight.storage, weight.shape
    parts = [g.weight(part) for part in weight.parts]
    to_float = {"to": ir.DataType.FLOAT.value}
    attributes = {"hidden": hidden, "precision": storage.precision, "block_size": storage.block_size}
    with g.block("embedding", [input_ids, *parts], attributes) as outputs:
        ids = g.op("Reshape", input_ids, g.ints(-1))
        gathered = [g.op("Gather", part, ids, attributes={"axis": 1}) for part in parts]
        rows = gathered[0] if storage.precision == "fp32" else g.op("Cast", gathered[0], attributes=to_float)
        if storage.quantized:
            count = weight.padded_columns // storage.block_size
            blocks = g.op("Reshape", rows, g.ints(count, storage.block_size, -1))
            for op_type, part in zip(("Mul", "Add"), gathered[1:], strict=False):
                factor = g.op("Unsqueeze", g.op("Cast", part, attributes=to_float), g.ints(1))
                blocks = g.op(op_type, blocks, factor)
            rows = g.op("Reshape", blocks, g.ints(weight.padded_columns, -1))
            if weight.padded_columns != hidden:
                rows = g.op("Slice", rows, g.ints(0), g.ints(hidden), g.ints(0))
        tokens = g.op("Transpose", rows, attributes={"perm": [1, 0]})
        shape = g.op("Concat", g.op("Shape", input_ids), g.ints(hidden), attributes={"axis": 0})
        y = g.op("Reshape", tokens, shape)
        outputs.append(y)
    return y
