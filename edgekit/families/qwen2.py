"""Qwen2 (dense): Llama with biases of queries, keys and values, and a sliding window in its later layers.

Source: `Qwen2ForCausalLM` of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from edgekit.families import llama
from edgekit.families.base import Family
from edgekit.families.config import Count, Size, decoder, layer_windows, read_config, require, windowed
from edgekit.spec import DecoderSpec, LayerSpec

replace = msgspec.structs.replace


class Qwen2Config(llama.LlamaConfig, frozen=True, kw_only=True):
    """The keys of a Qwen2 config."""

    num_key_value_heads: Count | None = 32
    use_sliding_window: bool = False
    sliding_window: Size | None = 4096
    max_window_layers: Annotated[int, msgspec.Meta(ge=0)] = 28


def spec(config: Mapping[str, Any]) -> DecoderSpec:
    """Reads a Qwen2 config."""
    read = read_config(config, Qwen2Config, "qwen2")
    require(read, "qwen2", {"mlp_bias": False})
    layer = llama.layer_spec(read, "qwen2")
    # Whatever attention_bias, a key of other families, says.
    layer = replace(layer, attention=replace(layer.attention, qkv_bias=True, o_bias=False))
    return decoder_spec(read, "qwen2", layer)


def decoder_spec(config: Qwen2Config, family: str, layer: LayerSpec) -> DecoderSpec:
    """Builds the spec of a decoder of such layers, the later ones with a window if the config uses it."""
    window = config.sliding_window if config.use_sliding_window else None
    if config.layer_types is None and window is not None:
        full = min(config.max_window_layers, config.num_hidden_layers)
        sliding = config.num_hidden_layers - full
        config = replace(config, layer_types=["full_attention"] * full + ["sliding_attention"] * sliding)
    return decoder(config, family, windowed(layer, layer_windows(config, window, family)))


FAMILY = Family(
    name="qwen2",
    covers="Qwen2, Qwen2.5 (dense), DeepSeek-R1-Distill-Qwen",
    model_types=("qwen2",),
    gguf_architectures=("qwen2",),
    spec=spec,
    modules=llama.MODULES,
)
