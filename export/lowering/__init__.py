"""Lowering a bundle's portable graph to what one target runs best; see `edgekit.export.lowering.blocks`.

The runtime runs this as a program, ``python -m edgekit.export.lowering TARGET GRAPH OUT LAYOUT``, so that a process
that generates tokens never holds the tools that rewrite graphs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import onnx_ir as ir

from edgekit.bundle import GRAPH, GRAPH_DATA
from edgekit.cache_layout import CacheLayout
from edgekit.errors import StorageError, UnsupportedError, one_of
from edgekit.export.lowering import ort_cpu
from edgekit.export.lowering.blocks import Target, lower

TARGETS: Mapping[str, Target] = {"ort-cpu": ort_cpu.TARGET}


def lower_graph(graph: Path, target: str, output: Path, layout: CacheLayout) -> None:
    """Writes the lowered graph of a portable one into an existing directory.

    Args:
        graph: model.onnx with its data file beside it.
        target: A key of `TARGETS`.
        output: Where the new model.onnx and its data file go.
        layout: How the runtime keeps the cache, whatever the portable graph's is stored as.

    Raises:
        UnsupportedError: There is no such target, or it has no lowering for a part of the graph.
        StorageError: The disk refused a write.
    """
    if target not in TARGETS:
        raise UnsupportedError(f"lowering target {one_of(target, TARGETS)}")
    lowered, data = lower(ir.load(graph), TARGETS[target], GRAPH_DATA, layout)
    data.write(output, lambda *_: None)
    try:
        ir.save(lowered, output / GRAPH)
    except OSError as error:
        raise StorageError(f"cannot write {str(output / GRAPH)!r}: {error.strerror or error}") from error
