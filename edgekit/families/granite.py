"""Granite 3 (dense): Llama with multipliers of embeddings, scores, residual branches and logits.

Source: `GraniteForCausalLM` of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from edgekit.families import llama
from edgekit.families.base import Family
from edgekit.families.config import Positive, read_config, uniform_decoder
from edgekit.spec import DecoderSpec

replace = msgspec.structs.replace


class GraniteConfig(llama.LlamaConfig, frozen=True, kw_only=True):
    """The keys of a Granite config."""

    embedding_multiplier: Positive = 1.0
    attention_multiplier: Positive = 1.0
    residual_multiplier: Positive = 1.0
    logits_scaling: Positive = 1.0


def spec(config: Mapping[str, Any]) -> DecoderSpec:
    """Reads a Granite config."""
    read = read_config(config, GraniteConfig, "granite")
    layer = llama.layer_spec(read, "granite")
    attention = replace(layer.attention, scale=read.attention_multiplier)
    layer = replace(layer, attention=attention, residual_scale=read.residual_multiplier)
    return replace(
        uniform_decoder(read, "granite", layer),
        embedding_scale=read.embedding_multiplier,
        logit_scale=1 / read.logits_scaling,
    )


FAMILY = Family(
    name="granite",
    covers="Granite 3.0 to 3.3 (dense)",
    model_types=("granite",),
    gguf_architectures=("granite",),
    spec=spec,
    modules=llama.MODULES,
    gguf_rows=llama.gguf_rows,
)
