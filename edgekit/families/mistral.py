"""Mistral: Llama without biases, with a sliding window over all layers or none.

Source: `MistralForCausalLM` of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgekit.families import llama
from edgekit.families.base import Family
from edgekit.families.config import Count, Size, decoder, read_config, refuse, require, windowed
from edgekit.spec import DecoderSpec, LayerSpec


class MistralConfig(llama.LlamaConfig, frozen=True, kw_only=True):
    """The keys of a Mistral config."""

    num_key_value_heads: Count | None = 8
    sliding_window: Size | None = 4096


def spec(config: Mapping[str, Any]) -> DecoderSpec:
    """Reads a Mistral config."""
    read = read_config(config, MistralConfig, "mistral")
    return decoder_spec(read, "mistral", llama.layer_spec(read, "mistral"))


def decoder_spec(config: MistralConfig, family: str, layer: LayerSpec) -> DecoderSpec:
    """Builds the spec of a decoder of such layers, all of them with the window of the config."""
    require(config, family, {"attention_bias": False, "mlp_bias": False})
    # transformers gives every layer the window, whatever layer_types say.
    kind = "full_attention" if config.sliding_window is None else "sliding_attention"
    if set(config.layer_types or ()) - {kind}:
        refuse(family, "layer_types", config.layer_types, (kind,))
    windows = (config.sliding_window,) * config.num_hidden_layers
    return decoder(config, family, windowed(layer, windows))


FAMILY = Family(
    name="mistral",
    covers="Mistral 7B, Mistral Nemo, Zephyr",
    model_types=("mistral",),
    gguf_architectures=("mistral3",),  # most of its GGUF files are those of Llama
    spec=spec,
    modules=llama.MODULES,
    gguf_rows=llama.gguf_rows,
)
