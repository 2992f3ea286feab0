"""Llama 1 to 3 and the models that share its architecture: SmolLM2, TinyLlama, Vicuna, ...

Source: `LlamaForCausalLM` of transformers; the GGUF row order is `LlamaModel.permute` of llama.cpp's converter.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from edgekit.families.base import Family, RowIndices
from edgekit.families.config import (
    Count,
    FamilyConfig,
    Positive,
    activation,
    head_groups,
    read_config,
    refuse,
    uniform_decoder,
)
from edgekit.families.rope_config import rope_spec
from edgekit.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, NormSpec

MODULES: Mapping[str, str] = {
    "embed_tokens": "model.embed_tokens",
    "layers.{i}.input_norm": "model.layers.{i}.input_layernorm",
    "layers.{i}.self_attn.q_proj": "model.layers.{i}.self_attn.q_proj",
    "layers.{i}.self_attn.k_proj": "model.layers.{i}.self_attn.k_proj",
    "layers.{i}.self_attn.v_proj": "model.layers.{i}.self_attn.v_proj",
    "layers.{i}.self_attn.o_proj": "model.layers.{i}.self_attn.o_proj",
    "layers.{i}.mlp_norm": "model.layers.{i}.post_attention_layernorm",
    "layers.{i}.mlp.gate_proj": "model.layers.{i}.mlp.gate_proj",
    "layers.{i}.mlp.up_proj": "model.layers.{i}.mlp.up_proj",
    "layers.{i}.mlp.down_proj": "model.layers.{i}.mlp.down_proj",
    "norm": "model.norm",
    "lm_head": "lm_head",
}


class LlamaConfig(FamilyConfig, frozen=True, kw_only=True):
    """The keys of a Llama config."""

    hidden_act: str = "silu"
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    rms_norm_eps: Positive = 1e-6
    attention_bias: bool = False
    mlp_bias: bool = False


def spec(config: Mapping[str, Any]) -> DecoderSpec:
    """Reads a Llama config."""
    read = read_config(config, LlamaConfig, "llama")
    return uniform_decoder(read, "llama", layer_spec(read, "llama"))


def layer_spec(config: LlamaConfig, family: str, *, partial_rotary: bool = False) -> LayerSpec:
    """Builds a layer of Llama, which other families vary.

    Args:
        config: The config.
        family: Name for messages.
        partial_rotary: Whether the family can rotate part of each head only.
    """
    head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
    rope = rope_spec(config, head_dim, family)
    if rope.rotary_dim != head_dim and not partial_rotary:
        refuse(family, "partial_rotary_factor", rope.rotary_dim / head_dim, (1.0,))
    return LayerSpec(
        attention=AttentionSpec(
            num_heads=config.num_attention_heads,
            num_kv_heads=head_groups(config, config.num_key_value_heads, family),
            key_dim=head_dim,
            value_dim=head_dim,
            scale=head_dim**-0.5,
            qkv_bias=config.attention_bias,
            o_bias=config.attention_bias,
            rope=rope,
        ),
        mlp=MlpSpec(
            width=config.intermediate_size,
            activation=activation(config.hidden_act, family),
            gated=True,
            bias=config.mlp_bias,
        ),
        norm=NormSpec(kind="rms", epsilon=config.rms_norm_eps),
    )


@functools.cache
def gguf_rows(layer: LayerSpec, projection: str) -> RowIndices | None:
    """Rows of the half-split order in a GGUF file, which pairs the two channels of each rotation.

    So does every architecture with LLAMA_ROPE_TYPE_NORM in `llama_model_rope_type` of llama.cpp: llama, mistral3,
    granite and smollm3, whose converters are subclasses of `LlamaModel`. The others are LLAMA_ROPE_TYPE_NEOX, the
    order of transformers, and their converters leave rows as they are.
    """
    if projection not in ("q_proj", "k_proj"):
        return None
    attention = layer.attention
    heads = attention.num_heads if projection == "q_proj" else attention.num_kv_heads
    stored = np.arange(heads * attention.key_dim, dtype=np.int64).reshape(heads, attention.key_dim // 2, 2)
    rows: RowIndices = stored.swapaxes(1, 2).reshape(-1)
    return rows


FAMILY = Family(
    name="llama",
    covers="Llama 1 to 3, SmolLM2, TinyLlama, Vicuna",
    model_types=("llama",),
    gguf_architectures=("llama",),
    spec=spec,
    modules=MODULES,
    gguf_rows=gguf_rows,
)
