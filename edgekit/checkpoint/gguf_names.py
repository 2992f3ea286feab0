"""Where a GGUF file stores the tensors of a spec."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import replace

import numpy as np

from edgekit.families import WeightSource
from edgekit.spec import DecoderSpec

_ATTENTION_INPUT = re.compile(r"layers\.(\d+)\.self_attn\.([qkv])_proj\.(weight|bias)")
_HEAD = "lm_head"


def gguf_sources(
    sources: Mapping[str, WeightSource], architecture: str, spec: DecoderSpec, stored: Container[str]
) -> dict[str, WeightSource]:
    """Renames sources from Hugging Face's names to GGUF's.

    Args:
        sources: Sources by canonical name.
        architecture: GGUF's name of the architecture.
        spec: The model.
        stored: Names of the stored tensors.
    """
    from gguf import MODEL_ARCH_NAMES, MODEL_TENSOR, TENSOR_NAMES, get_tensor_name_map

    arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(arch, len(spec.layers))
    renamed = {}
    for canonical, source in sources.items():
        name = names.get_name(source.name, try_suffixes=(".weight", ".bias"))
        if name is None and canonical.startswith(_HEAD):
            # Architectures whose head is always tied have no name for it; some files have one all the same.
            name = canonical.replace(_HEAD, TENSOR_NAMES[MODEL_TENSOR.OUTPUT])
        assert name is not None, f"{architecture} has no GGUF name for {source.name}"
        fused = None if name in stored else _fused(canonical, source, spec, stored)
        renamed[canonical] = fused or replace(source, name=name)
    return renamed


def _fused(canonical: str, source: WeightSource, spec: DecoderSpec, stored: Container[str]) -> WeightSource | None:
    """Finds queries, keys or values in `attn_qkv`, where some converters put the rows of all three, in this order."""
    match = _ATTENTION_INPUT.fullmatch(canonical)
    if match is None:
        return None
    layer, which, parameter = int(match[1]), "qkv".index(match[2]), match[3]
    name = f"blk.{layer}.attn_qkv.{parameter}"
    if name not in stored:
        return None
    attention = spec.layers[layer].attention
    counts = (
        attention.num_heads * attention.key_dim,
        attention.num_kv_heads * attention.key_dim,
        attention.num_kv_heads * attention.value_dim,
    )
    rows = np.arange(counts[which], dtype=np.int64) if source.rows is None else source.rows
    return replace(source, name=name, rows=rows + sum(counts[:which]))
