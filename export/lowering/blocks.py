"""Lowering: the portable graph rewritten for one target, block by block.

`lower` walks the portable graph in order and builds a new one. Where a block begins, the target's table says
which function emits its replacement; nodes outside blocks are copied. So a lowering is a table from the
names of blocks to functions, and no pattern of arithmetic is ever searched for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from edgekit.cache_layout import CacheLayout
from edgekit.errors import UnsupportedError, one_of
from edgekit.export.data_file import Arrays, DataFile, Part
from edgekit.export.graph.builder import BLOCK_ID, BLOCK_RECORD, GraphBuilder


@dataclass(frozen=True, kw_only=True)
class Block:
    """One block of the portable graph.

    Attributes:
        name: Scoped name, unique in the graph.
        kind: What it computes.
        inputs: Operands, in the order that the graph builder documents; None for one that is absent.
        outputs: Results.
        attributes: Constants.
    """

    name: str
    kind: str
    inputs: tuple[ir.Value | None, ...]
    outputs: tuple[ir.Value, ...]
    attributes: Mapping[str, Any]


def read_blocks(graph: ir.Graph) -> dict[str, Block]:
    """Returns the blocks of a portable graph by name, in graph order."""
    values: dict[str | None, ir.Value] = {value.name: value for value in graph.inputs}
    values |= {value.name: value for value in graph.initializers.values()}
    values |= {value.name: value for node in graph for value in node.outputs}
    blocks = {}
    for node in graph:
        if BLOCK_RECORD in node.metadata_props:
            record = json.loads(node.metadata_props[BLOCK_RECORD])
            name = node.metadata_props[BLOCK_ID]
            blocks[name] = Block(
                name=name,
                kind=record["kind"],
                inputs=tuple(None if key is None else values[key] for key in record["inputs"]),
                outputs=tuple(values[key] for key in record["outputs"]),
                attributes=record["attributes"],
            )
    return blocks


@dataclass
class Lowering:
    """State of one lowering.

    Attributes:
        source: The portable graph.
        blocks: Its blocks by name.
        g: The graph being built.
        data: The data file being planned.
        layout: How the runtime keeps the cache.
        merged: Results of concatenated projections, by the portable results that they hold.
        output_scale: Factors that results of projections are to be multiplied by, by the portable result.
        rows: New keys [B, KV, dk, S] and values [B, KV, S, dv] by layer.
        masses: Attention that slots and new tokens get [B, KV, C + S] by layer, in a graph that says it.
    """

    source: ir.Graph
    blocks: dict[str, Block]
    g: GraphBuilder
    data: DataFile
    layout: CacheLayout
    merged: dict[tuple[ir.Value | None, ...], ir.Value] = field(default_factory=dict)
    output_scale: dict[ir.Value | None, float] = field(default_factory=dict)
    rows: dict[int, tuple[ir.Value, ir.Value]] = field(default_factory=dict)
    masses: dict[int, ir.Value] = field(default_factory=dict)
    _once: dict[Hashable, ir.Value] = field(default_factory=dict)
    _weights: dict[str, tuple[ir.Value, ...]] = field(default_factory=dict)
    _values: dict[ir.Value, ir.Value] = field(default_factory=dict)
    _pending_adds: dict[ir.Value, tuple[ir.Value, ir.Value]] = field(default_factory=dict)

    def __getitem__(self, value: ir.Value) -> ir.Value:
        """Returns the new graph's counterpart of a value of the portable graph."""
        if value in self._pending_adds:
            left, right = self._pending_adds.pop(value)
            self._values[value] = self.g.op("Add", self[left], self[right])
        elif value not in self._values and value.const_value is not None:
            self._values[value] = self.g.constant(value.const_value.numpy())
        return self._values[value]

    def __setitem__(self, value: ir.Value, replacement: ir.Value) -> None:
        """Sets the counterpart; a graph output stays one under its name."""
        self._values[value] = replacement
        if value.is_graph_output():
            self.g.output(replacement, *_signature(value))

    def operands(self, block: Block) -> tuple[ir.Value, ...]:
        """Returns the inputs of a block that has all of them."""
        return tuple(value for value in block.inputs if value is not None)

    def source_input(self, name: str) -> ir.Value:
        """Returns an input of the portable graph by name."""
        return next(value for value in self.source.inputs if value.name == name)

    def once(self, key: Hashable, build: Callable[[], ir.Value]) -> ir.Value:
        """Returns the value made for this key, building it the first time."""
        if key not in self._once:
            self._once[key] = build()
        return self._once[key]

    def weights(self, name: str, parts: Sequence[Part], load: Callable[[], Arrays]) -> tuple[ir.Value, ...]:
        """Returns initializers in the new data file, reserving them the first time."""
        if name not in self._weights:
            tensors = self.data.reserve(name, parts, load)
            self._weights[name] = tuple(self.g.weight(tensor) for tensor in tensors)
        return self._weights[name]

    def defer_add(self, node: ir.Node) -> None:
        """Holds back the sum of two activations, so that a norm that reads it may take it over."""
        left, right = node.inputs
        assert left is not None and right is not None
        self._pending_adds[node.outputs[0]] = (left, right)

    def take_add(self, value: ir.Value) -> tuple[ir.Value, ir.Value] | None:
        """Returns the two terms of a sum that nothing has asked for yet; the caller then defines the sum."""
        return self._pending_adds.pop(value, None)


LowerBlock: TypeAlias = Callable[[Lowering, Block], None]
Signature: TypeAlias = tuple[str, ir.DataType, list[int | str]]
"""Name, type and shape of an input or output of a graph."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a graph is lowered for.

    Attributes:
        table: For each kind of block the function that emits its replacement.
        is_own: Whether the target declares an input of the portable graph itself, in a form of its own.
        finish: Emits what is made of all layers together.
    """

    table: Mapping[str, LowerBlock]
    is_own: Callable[[str], bool]
    finish: Callable[[Lowering], None]


def lower(model: ir.Model, target: Target, location: str, layout: CacheLayout) -> tuple[ir.Model, DataFile]:
    """Rewrites a portable model for a target.

    Args:
        model: The portable model.
        target: What to rewrite it for.
        location: Name of the new data file.
        layout: How the runtime keeps the cache.

    Returns:
        The new model and its data file, still to be written.

    Raises:
        UnsupportedError: The table lacks a kind of block.
    """
    source = model.graph
    g = GraphBuilder(source.name or "decoder")
    state = Lowering(source=source, blocks=read_blocks(source), g=g, data=DataFile(location), layout=layout)
    for value in source.inputs:
        if not target.is_own(value.name or ""):
            state[value] = g.input(*_signature(value))
    done: set[str] = set()
    for node in source:
        name = node.metadata_props.get(BLOCK_ID)
        if name is None:
            _copy(state, node)
        elif name not in done:
            done.add(name)
            block = state.blocks[name]
            if block.kind not in target.table:
                raise UnsupportedError(
                    f"block {one_of(block.kind, target.table)}; the bundle is newer: pip install -U edgekit"
                )
            with g.scope(name):
                target.table[block.kind](state, block)
    target.finish(state)
    lowered = ir.Model(g.graph, ir_version=model.ir_version, producer_name=model.producer_name)
    RemoveUnusedNodesPass()(lowered)
    return lowered, state.data


def _signature(value: ir.Value) -> Signature:
    assert value.name is not None and value.dtype is not None and value.shape is not None
    return value.name, value.dtype, [size if isinstance(size, int) else str(size.value) for size in value.shape]


def _copy(state: Lowering, node: ir.Node) -> None:
    if node.op_type == "Add" and all(value is not None and value.const_value is None for value in node.inputs):
        state.defer_add(node)
        return
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    inputs = [None if value is None else state[value] for value in node.inputs]
    for old, new in zip(node.outputs, state.g.ops(node.op_type, inputs, len(node.outputs), attributes), strict=True):
        state[old] = new
