"""Phi-1 and 2: a parallel residual whose attention and MLP share one norm, and biases everywhere, the head included.

Source: `PhiForCausalLM` of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from edgekit.families.base import Family
from edgekit.families.config import (
    Count,
    FamilyConfig,
    Positive,
    activation,
    head_groups,
    read_config,
    require,
    uniform_decoder,
)
from edgekit.families.rope_config import rope_spec
from edgekit.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, NormSpec


class PhiConfig(FamilyConfig, frozen=True, kw_only=True):
    """The keys of a Phi config."""

    hidden_act: str = "gelu_new"
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    layer_norm_eps: Positive = 1e-5
    qk_layernorm: bool = False


def spec(config: Mapping[str, Any]) -> DecoderSpec:
    """Reads a Phi config."""
    read = read_config(config, PhiConfig, "phi")
    # A spec has no tied head with a bias.
    require(read, "phi", {"qk_layernorm": False, "tie_word_embeddings": False})
    head_dim = read.head_dim or read.hidden_size // read.num_attention_heads
    layer = LayerSpec(
        attention=AttentionSpec(
            num_heads=read.num_attention_heads,
            num_kv_heads=head_groups(read, read.num_key_value_heads, "phi"),
            key_dim=head_dim,
            value_dim=head_dim,
            scale=head_dim**-0.5,
            qkv_bias=True,
            o_bias=True,
            rope=rope_spec(read, head_dim, "phi", default_fraction=0.5),
        ),
        mlp=MlpSpec(
            width=read.intermediate_size, activation=activation(read.hidden_act, "phi"), gated=False, bias=True
        ),
        norm=NormSpec(kind="layer", epsilon=read.layer_norm_eps),
        parallel_residual=True,
        shared_norm=True,
    )
    return msgspec.structs.replace(uniform_decoder(read, "phi", layer), head_bias=True)


FAMILY = Family(
    name="phi",
    covers="Phi-1, Phi-1.5, Phi-2",
    model_types=("phi",),
    gguf_architectures=("phi2",),
    spec=spec,
    modules={
        "embed_tokens": "model.embed_tokens",
        "layers.{i}.input_norm": "model.layers.{i}.input_layernorm",
        "layers.{i}.self_attn.q_proj": "model.layers.{i}.self_attn.q_proj",
        "layers.{i}.self_attn.k_proj": "model.layers.{i}.self_attn.k_proj",
        "layers.{i}.self_attn.v_proj": "model.layers.{i}.self_attn.v_proj",
        "layers.{i}.self_attn.o_proj": "model.layers.{i}.self_attn.dense",
        "layers.{i}.mlp.up_proj": "model.layers.{i}.mlp.fc1",
        "layers.{i}.mlp.down_proj": "model.layers.{i}.mlp.fc2",
        "norm": "model.final_layernorm",
        "lm_head": "lm_head",
    },
)
