"""Phi-3 and the dense models after it: Mistral with fused projections, perhaps with LongRoPE over part of each head.

Source: `Phi3ForCausalLM` of transformers.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from edgekit.families import llama, mistral
from edgekit.families.base import Family, RowIndices
from edgekit.families.config import Count, Positive, Size, read_config, refuse
from edgekit.rope import LongRopeScaling
from edgekit.spec import DecoderSpec, LayerSpec


class Phi3Config(mistral.MistralConfig, frozen=True, kw_only=True):
    """The keys of a Phi-3 config."""

    num_key_value_heads: Count | None = None
    rms_norm_eps: Positive = 1e-5
    sliding_window: Size | None = None
    original_max_position_embeddings: Size | None = 4096


def spec(config: Mapping[str, Any]) -> DecoderSpec:
    """Reads a Phi-3 config."""
    read = read_config(config, Phi3Config, "phi3")
    layer = llama.layer_spec(read, "phi3", partial_rotary=True)
    scaling = layer.attention.rope and layer.attention.rope.scaling
    if scaling is not None and not isinstance(scaling, LongRopeScaling):
        refuse("phi3", "rope_type", scaling.__struct_config__.tag, ("default", "longrope"))
    return mistral.decoder_spec(read, "phi3", layer)


@functools.cache
def rows(layer: LayerSpec, projection: str) -> RowIndices | None:
    """Rows of a projection in `qkv_proj` or `gate_up_proj`, which hold one part after the other.

    So do the tensors of a GGUF file, `attn_qkv` and `ffn_up`.
    """
    attention, width = layer.attention, layer.mlp.width
    queries, keys = attention.num_heads * attention.key_dim, attention.num_kv_heads * attention.key_dim
    bounds = {
        "q_proj": (0, queries),
        "k_proj": (queries, queries + keys),
        "v_proj": (queries + keys, queries + 2 * keys),
        "gate_proj": (0, width),
        "up_proj": (width, 2 * width),
    }
    return np.arange(*bounds[projection], dtype=np.int64) if projection in bounds else None


FAMILY = Family(
    name="phi3",
    covers="Phi-3-mini, Phi-3-medium, Phi-3.5-mini, Phi-4, Phi-4-mini",
    model_types=("phi3",),
    gguf_architectures=("phi3",),
    spec=spec,
    modules={
        **llama.MODULES,
        "layers.{i}.self_attn.q_proj": "model.layers.{i}.self_attn.qkv_proj",
        "layers.{i}.self_attn.k_proj": "model.layers.{i}.self_attn.qkv_proj",
        "layers.{i}.self_attn.v_proj": "model.layers.{i}.self_attn.qkv_proj",
        "layers.{i}.mlp.gate_proj": "model.layers.{i}.mlp.gate_up_proj",
        "layers.{i}.mlp.up_proj": "model.layers.{i}.mlp.gate_up_proj",
    },
    rows=rows,
    gguf_rows=rows,
)
