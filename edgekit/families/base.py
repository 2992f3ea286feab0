"""What a model family is: data and two small functions, no forward pass.

A family maps a Hugging Face config onto a `DecoderSpec`, and the spec's canonical tensor names onto the names
and rows that checkpoints store. The reference decoder and the graph builder read only the spec.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from edgekit.spec import DecoderSpec, LayerSpec

RowIndices: TypeAlias = npt.NDArray[np.int64]
RowOrder: TypeAlias = Callable[[LayerSpec, str], "RowIndices | None"]
Layout: TypeAlias = Literal["huggingface", "gguf"]

_LAYER = re.compile(r"layers\.(\d+)\.")


@dataclass(frozen=True, kw_only=True)
class WeightSource:
    """Where a canonical tensor is found.

    Attributes:
        name: Hugging Face tensor name.
        rows: Rows to take, shape (n,), int64, when the stored tensor is fused or in another order; else None.
        addend: Added to every value.
    """

    name: str
    rows: RowIndices | None = None
    addend: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model family.

    Attributes:
        name: Name in specs and messages.
        covers: Well-known models of the family, for people.
        model_types: Values of `model_type` in config.json.
        gguf_architectures: Values of `general.architecture` in GGUF files.
        spec: Reads a Hugging Face config; raises UnsupportedError for what the family file does not know and
            CorruptArtifactError for missing or mistyped keys.
        modules: Canonical module name to Hugging Face module name, both with ``{i}`` for the layer.
        rows: Which rows of its stored tensor a projection of a layer is (by its last name, such as ``q_proj``), for
            Hugging Face checkpoints; None where it is a tensor of its own with the rows in the spec's order.
        gguf_rows: The same for GGUF files.
        norm_addend: What a Hugging Face checkpoint leaves out of the weights of its norms: 1 where it stores w − 1.
            GGUF files hold the sum.
        respelled: Hugging Face module names in `modules`, to what other versions of transformers wrote.
    """

    name: str
    covers: str
    model_types: tuple[str, ...]
    gguf_architectures: tuple[str, ...]
    spec: Callable[[Mapping[str, Any]], DecoderSpec]
    modules: Mapping[str, str]
    rows: RowOrder | None = None
    gguf_rows: RowOrder | None = None
    norm_addend: float = 0.0
    respelled: Mapping[str, str] = field(default_factory=dict)

    def sources(self, spec: DecoderSpec, layout: Layout = "huggingface") -> dict[str, WeightSource]:
        """Returns where each tensor of ``spec.tensor_shapes()`` is stored, by canonical name."""
        row_order, addend = (self.gguf_rows, 0.0) if layout == "gguf" else (self.rows, self.norm_addend)
        norms = {f"{name}.weight" for name, _, _ in spec.norms()}
        return {
            name: replace(self._source(spec, name, row_order), addend=addend if name in norms else 0.0)
            for name in spec.tensor_shapes()
        }

    def _source(self, spec: DecoderSpec, name: str, row_order: RowOrder | None) -> WeightSource:
        module, _, parameter = name.rpartition(".")
        layer = _LAYER.match(module)
        if layer is None:
            return WeightSource(name=f"{self.modules[module]}.{parameter}")
        index = int(layer[1])
        stored = self.modules[module.replace(layer[0], "layers.{i}.", 1)].format(i=index)
        projection = module.rpartition(".")[2]
        rows = None
        if row_order is not None and projection.endswith("_proj"):
            rows = row_order(spec.layers[index], projection)
        return WeightSource(name=f"{stored}.{parameter}", rows=rows)
