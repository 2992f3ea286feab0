"""Qwen3 (dense): Llama with an RMSNorm over each head's queries and keys, and the windows of Qwen2.

Source: `Qwen3ForCausalLM` of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from edgekit.families import llama, qwen2
from edgekit.families.base import Family
from edgekit.families.config import Count, read_config, require
from edgekit.spec import DecoderSpec

replace = msgspec.structs.replace


class Qwen3Config(qwen2.Qwen2Config, frozen=True, kw_only=True):
    """The keys of a Qwen3 config."""

    head_dim: Count | None = 128


def spec(config: Mapping[str, Any]) -> DecoderSpec:
    """Reads a Qwen3 config."""
    read = read_config(config, Qwen3Config, "qwen3")
    require(read, "qwen3", {"mlp_bias": False})
    layer = llama.layer_spec(read, "qwen3")
    layer = replace(layer, attention=replace(layer.attention, qk_norm=layer.norm))
    return qwen2.decoder_spec(read, "qwen3", layer)


FAMILY = Family(
    name="qwen3",
    covers="Qwen3 (dense)",
    model_types=("qwen3",),
    gguf_architectures=("qwen3",),
    spec=spec,
    modules={
        **llama.MODULES,
        "layers.{i}.self_attn.q_norm": "model.layers.{i}.self_attn.q_norm",
        "layers.{i}.self_attn.k_norm": "model.layers.{i}.self_attn.k_norm",
    },
)
