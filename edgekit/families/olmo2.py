"""OLMo 2: Llama with norms after attention and MLP, and over all heads of the queries and of the keys at once.

Source: `Olmo2ForCausalLM` of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from edgekit.families import llama
from edgekit.families.base import Family
from edgekit.families.config import Positive, read_config, require, uniform_decoder
from edgekit.spec import DecoderSpec

replace = msgspec.structs.replace


class Olmo2Config(llama.LlamaConfig, frozen=True, kw_only=True):
    """The keys of an OLMo 2 config."""

    rms_norm_eps: Positive = 1e-5


def spec(config: Mapping[str, Any]) -> DecoderSpec:
    """Reads an OLMo 2 config."""
    read = read_config(config, Olmo2Config, "olmo2")
    require(read, "olmo2", {"mlp_bias": False})
    layer = llama.layer_spec(read, "olmo2")
    attention = replace(layer.attention, qk_norm=layer.norm, qk_norm_scope="all_heads")
    layer = replace(layer, attention=attention, norm_placement="post")
    return uniform_decoder(read, "olmo2", layer)


FAMILY = Family(
    name="olmo2",
    covers="OLMo 2",
    model_types=("olmo2",),
    gguf_architectures=("olmo2",),
    spec=spec,
    modules={
        **llama.MODULES,
        "layers.{i}.self_attn.q_norm": "model.layers.{i}.self_attn.q_norm",
        "layers.{i}.self_attn.k_norm": "model.layers.{i}.self_attn.k_norm",
        "layers.{i}.attn_output_norm": "model.layers.{i}.post_attention_layernorm",
        "layers.{i}.mlp_output_norm": "model.layers.{i}.post_feedforward_layernorm",
    },
)
