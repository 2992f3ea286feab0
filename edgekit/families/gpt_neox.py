"""GPT-NeoX: Pythia, GPT-NeoX-20B, RedPajama-INCITE, ...

Source: `GPTNeoXForCausalLM` of transformers; the GGUF row order is `GPTNeoXModel` of llama.cpp's converter.
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
    even_heads,
    read_config,
    refuse,
    uniform_decoder,
)
from edgekit.families.rope_config import rope_spec
from edgekit.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, NormSpec

_FUSED = ("q_proj", "k_proj", "v_proj")


class GptNeoxConfig(FamilyConfig, frozen=True, kw_only=True):
    """The keys of a GPT-NeoX config."""

    hidden_act: str = "gelu"
    rotary_pct: Positive = 0.25
    rotary_emb_base: Positive = 10000.0
    layer_norm_eps: Positive = 1e-5
    use_parallel_residual: bool = True
    attention_bias: bool = True
    head_dim: Count | None = None
    num_key_value_heads: Count | None = None


def spec(config: Mapping[str, Any]) -> DecoderSpec:
    """Reads a GPT-NeoX config."""
    # Configs from before transformers 5 spell the base of the frequencies rotary_emb_base.
    config = {"rope_theta": config.get("rotary_emb_base"), **config}
    read = read_config(config, GptNeoxConfig, "gpt_neox")
    heads, head_dim = read.num_attention_heads, even_heads(read, read.head_dim, "gpt_neox")
    if read.num_key_value_heads not in (None, heads):
        refuse("gpt_neox", "num_key_value_heads", read.num_key_value_heads, (heads,))
    norm = NormSpec(kind="layer", epsilon=read.layer_norm_eps)
    layer = LayerSpec(
        attention=AttentionSpec(
            num_heads=heads,
            num_kv_heads=heads,
            key_dim=head_dim,
            value_dim=head_dim,
            scale=head_dim**-0.5,
            qkv_bias=read.attention_bias,
            o_bias=read.attention_bias,
            rope=rope_spec(read, head_dim, "gpt_neox", default_fraction=read.rotary_pct),
        ),
        mlp=MlpSpec(
            width=read.intermediate_size,
            activation=activation(read.hidden_act, "gpt_neox"),
            gated=False,
            bias=True,
        ),
        norm=norm,
        parallel_residual=read.use_parallel_residual,
    )
    return uniform_decoder(read, "gpt_neox", layer)


@functools.cache
def rows(layer: LayerSpec, projection: str) -> RowIndices | None:
    """Rows of a projection in `query_key_value`, which is ordered [head][q, k, v][channel]."""
    if projection not in _FUSED:
        return None
    heads, width = layer.attention.num_heads, layer.attention.key_dim
    fused = np.arange(heads * 3 * width, dtype=np.int64).reshape(heads, 3, width)
    return fused[:, _FUSED.index(projection)].reshape(-1)


@functools.cache
def gguf_rows(layer: LayerSpec, projection: str) -> RowIndices | None:
    """Rows of a projection in `attn_qkv`, which is ordered [q, k, v][head][channel]."""
    if projection not in _FUSED:
        return None
    width = layer.attention.num_heads * layer.attention.key_dim
    return np.arange(width, dtype=np.int64) + _FUSED.index(projection) * width


FAMILY = Family(
    name="gpt_neox",
    covers="Pythia, GPT-NeoX",
    model_types=("gpt_neox",),
    gguf_architectures=("gptneox",),
    spec=spec,
    modules={
        "embed_tokens": "gpt_neox.embed_in",
        "layers.{i}.input_norm": "gpt_neox.layers.{i}.input_layernorm",
        "layers.{i}.self_attn.q_proj": "gpt_neox.layers.{i}.attention.query_key_value",
        "layers.{i}.self_attn.k_proj": "gpt_neox.layers.{i}.attention.query_key_value",
        "layers.{i}.self_attn.v_proj": "gpt_neox.layers.{i}.attention.query_key_value",
        "layers.{i}.self_attn.o_proj": "gpt_neox.layers.{i}.attention.dense",
        "layers.{i}.mlp_norm": "gpt_neox.layers.{i}.post_attention_layernorm",
        "layers.{i}.mlp.up_proj": "gpt_neox.layers.{i}.mlp.dense_h_to_4h",
        "layers.{i}.mlp.down_proj": "gpt_neox.layers.{i}.mlp.dense_4h_to_h",
        "norm": "gpt_neox.final_layer_norm",
        "lm_head": "embed_out",
    },
    rows=rows,
    gguf_rows=gguf_rows,
    respelled={"embed_out": "lm_head"},
)
