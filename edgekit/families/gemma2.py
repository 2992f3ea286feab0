"""Gemma 2: norms before and after attention and MLP, soft caps, and a sliding window in every second layer.

Source: `Gemma2ForCausalLM` of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from edgekit.families import llama
from edgekit.families.base import Family
from edgekit.families.config import Count, Positive, Size, decoder, layer_windows, read_config, require, windowed
from edgekit.spec import DecoderSpec, LayerSpec

replace = msgspec.structs.replace

MODULES: Mapping[str, str] = {
    **llama.MODULES,
    "layers.{i}.attn_output_norm": "model.layers.{i}.post_attention_layernorm",
    "layers.{i}.mlp_norm": "model.layers.{i}.pre_feedforward_layernorm",
    "layers.{i}.mlp_output_norm": "model.layers.{i}.post_feedforward_layernorm",
}


class GemmaConfig(llama.LlamaConfig, frozen=True, kw_only=True):
    """The keys that Gemma 2 and 3 share."""

    # Some configs have a hidden_act as well, which nothing reads.
    hidden_act: str = msgspec.field(default="gelu_pytorch_tanh", name="hidden_activation")
    num_key_value_heads: Count | None = 4
    head_dim: Count | None = 256
    query_pre_attn_scalar: Positive = 256
    sliding_window: Size | None = 4096
    final_logit_softcapping: Positive | None = None
    tie_word_embeddings: bool = True


class Gemma2Config(GemmaConfig, frozen=True, kw_only=True):
    """The keys of a Gemma 2 config."""

    attn_logit_softcapping: Positive | None = 50.0
    final_logit_softcapping: Positive | None = 30.0


def spec(config: Mapping[str, Any]) -> DecoderSpec:
    """Reads a Gemma 2 config."""
    read = read_config(config, Gemma2Config, "gemma2")
    layer = layer_spec(read, "gemma2")
    layer = replace(layer, attention=replace(layer.attention, softcap=read.attn_logit_softcapping))
    return decoder_spec(read, "gemma2", windowed(layer, windows(read, 2, "gemma2")))


def layer_spec(config: GemmaConfig, family: str) -> LayerSpec:
    """Builds a layer as Gemma 2 and 3 have it, without a window."""
    require(config, family, {"mlp_bias": False})
    layer = llama.layer_spec(config, family)
    attention = replace(layer.attention, scale=config.query_pre_attn_scalar**-0.5)
    return replace(layer, attention=attention, norm_placement="sandwich")


def windows(config: GemmaConfig, period: int, family: str) -> tuple[int | None, ...]:
    """Returns the sliding window of every layer; each `period`-th has none unless the config says otherwise."""
    if config.layer_types is None:
        sliding = [(index + 1) % period != 0 for index in range(config.num_hidden_layers)]
        config = replace(config, layer_types=["sliding_attention" if each else "full_attention" for each in sliding])
    return layer_windows(config, config.sliding_window, family)


def decoder_spec(config: GemmaConfig, family: str, layers: Sequence[LayerSpec]) -> DecoderSpec:
    """Builds the spec of a Gemma of these layers."""
    return replace(
        decoder(config, family, layers),
        embedding_scale=config.hidden_size**0.5,
        logit_softcap=config.final_logit_softcapping,
    )


FAMILY = Family(
    name="gemma2",
    covers="Gemma 2",
    model_types=("gemma2",),
    gguf_architectures=("gemma2",),
    spec=spec,
    modules=MODULES,
    norm_addend=1.0,
)
