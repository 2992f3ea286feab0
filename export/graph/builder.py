"""A thin layer over onnx-ir that names nodes after the module tree and marks the blocks they form.

A *block* is a group of nodes that computes one thing the field has a name for: a norm, a linear layer,
attention. The nodes carry the mark in their metadata, so a lowering can replace a block by one fused
operator without guessing it back from a pattern of arithmetic. A reader that ignores the marks sees a
plain ONNX graph.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

OPSET = 21
IR_VERSION = 10
BLOCK_ID = "edgekit.block"
BLOCK_RECORD = "edgekit.block.record"

Attributes = Mapping[str, int | float | str | Sequence[int]]


class GraphBuilder:
    """Collects nodes, initializers, inputs and outputs of one graph."""

    def __init__(self, name: str) -> None:
        self.graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name=name)
        self._scope: list[str] = []
        self._block: str | None = None
        self._names: dict[str, int] = {}
        self._records: list[tuple[ir.Node, str, Sequence[ir.Value | None], list[ir.Value], Mapping[str, Any]]] = []
        self._constants: dict[tuple[str, bytes, tuple[int, ...]], ir.Value] = {}

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Prefixes the names of the nodes made inside with `name`."""
        self._scope.append(name)
        try:
            yield
        finally:
            self._scope.pop()

    @contextmanager
    def block(
        self, kind: str, inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]
    ) -> Iterator[list[ir.Value]]:
        """Marks the nodes made inside as one block.

        Args:
            kind: What the block computes; a lowering looks it up by this name.
            inputs: Its operands in the order that a lowering expects; None for one that is absent.
            attributes: JSON-serializable constants of the block.

        Yields:
            A list to which the caller appends the block's results.
        """
        name = self._unique("/".join([*self._scope, kind]))
        outputs: list[ir.Value] = []
        first = len(self.graph)
        self._block = name
        try:
            yield outputs
        finally:
            self._block = None
        self._records.append((self.graph[first], kind, inputs, outputs, attributes))

    def finish(self) -> ir.Graph:
        """Writes the marks of the blocks, once every value has its final name, and returns the graph."""
        for node, kind, inputs, outputs, attributes in self._records:
            record = {
                "kind": kind,
                "inputs": [None if value is None else value.name for value in inputs],
                "outputs": [value.name for value in outputs],
                "attributes": dict(attributes),
            }
            node.metadata_props[BLOCK_RECORD] = json.dumps(record)
        return self.graph

    def op(self, op_type: str, *inputs: ir.Value | None, attributes: Attributes | None = None) -> ir.Value:
        """Appends a node with one result and returns it; an operator of another domain is ``domain::Name``."""
        return self.ops(op_type, inputs, 1, attributes)[0]

    def ops(
        self, op_type: str, inputs: Sequence[ir.Value | None], outputs: int, attributes: Attributes | None = None
    ) -> Sequence[ir.Value]:
        """Appends a node with several results and returns them."""
        domain, _, op_type = op_type.rpartition("::")
        name = self._unique("/".join([*self._scope, op_type]))
        results = [ir.val(name if outputs == 1 else f"{name}:{index}") for index in range(outputs)]
        node = ir.node(op_type, inputs, attributes, domain=domain, outputs=results, name=name)
        self.graph.opset_imports.setdefault(domain, 1)
        if self._block is not None:
            node.metadata_props[BLOCK_ID] = self._block
        self.graph.append(node)
        return results

    def constant(self, array: npt.NDArray[Any]) -> ir.Value:
        """Returns an initializer for a small array; equal arrays share one."""
        key = (array.dtype.str, array.tobytes(), array.shape)
        if key not in self._constants:
            name = self._unique("constant")
            self._constants[key] = self._register(ir.Tensor(array, name=name))
        return self._constants[key]

    def ints(self, *values: int) -> ir.Value:
        """Returns a constant int64 vector."""
        return self.constant(np.array(values, np.int64))

    def weight(self, tensor: ir.ExternalTensor) -> ir.Value:
        """Returns the initializer of a weight in the data file; the same tensor gives the same value."""
        if tensor.name in self.graph.initializers:
            return self.graph.initializers[tensor.name]
        return self._register(tensor)

    def input(self, name: str, dtype: ir.DataType, shape: Sequence[int | str]) -> ir.Value:
        """Declares a graph input."""
        value = ir.val(name, dtype, shape)
        self.graph.inputs.append(value)
        return value

    def output(self, value: ir.Value, name: str, dtype: ir.DataType, shape: Sequence[int | str]) -> None:
        """Declares a graph output; the value takes its public name."""
        value.name = name
        value.dtype = dtype
        value.shape = ir.Shape(shape)
        self.graph.outputs.append(value)

    def _register(self, tensor: ir.Tensor[Any] | ir.ExternalTensor) -> ir.Value:
        value = ir.val(tensor.name, tensor.dtype, tensor.shape, const_value=tensor)
        self.graph.register_initializer(value)
        return value

    def _unique(self, name: str) -> str:
        count = self._names.get(name, 0)
        self._names[name] = count + 1
        return name if count == 0 else f"{name}_{count}"
