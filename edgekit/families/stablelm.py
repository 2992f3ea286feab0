"""StableLM: Llama with LayerNorm and a rotation of part of each head, and perhaps a parallel residual with one norm.

Source: `StableLmForCausalLM` of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgekit.families import llama
from edgekit.families.base import Family
from edgekit.families.config import (
    Count,
    FamilyConfig,
    Positive,
    activation,
    even_heads,
    head_groups,
    read_config,
    require,
    uniform_decoder,
)
from edgekit.families.rope_config import rope_spec
from edgekit.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, NormSpec


class StablelmConfig(FamilyConfig, frozen=True, kw_only=True):
    """The keys of a StableLM config."""

    hidden_act: str = "silu"
    num_key_value_heads: Count = 32
    head_dim: Count | None = None
    layer_norm_eps: Positive = 1e-5
    use_qkv_bias: bool = False
    qk_layernorm: bool = False
    use_parallel_residual: bool = False


def spec(config: Mapping[str, Any]) -> DecoderSpec:
    """Reads a StableLM config."""
    read = read_config(config, StablelmConfig, "stablelm")
    require(read, "stablelm", {"qk_layernorm": False})
    head_dim = even_heads(read, read.head_dim, "stablelm")
    layer = LayerSpec(
        attention=AttentionSpec(
            num_heads=read.num_attention_heads,
            num_kv_heads=head_groups(read, read.num_key_value_heads, "stablelm"),
            key_dim=head_dim,
            value_dim=head_dim,
            scale=head_dim**-0.5,
            qkv_bias=read.use_qkv_bias,
            o_bias=False,
            rope=rope_spec(read, head_dim, "stablelm", default_fraction=0.25),
        ),
        mlp=MlpSpec(
            width=read.intermediate_size,
            activation=activation(read.hidden_act, "stablelm"),
            gated=True,
            bias=False,
        ),
        norm=NormSpec(kind="layer", epsilon=read.layer_norm_eps),
        parallel_residual=read.use_parallel_residual,
        shared_norm=read.use_parallel_residual,
    )
    return uniform_decoder(read, "stablelm", layer)


FAMILY = Family(
    name="stablelm",
    covers="StableLM 3B, StableLM Zephyr, Stable Code 3B, StableLM 2 1.6B",
    model_types=("stablelm",),
    gguf_architectures=("stablelm",),
    spec=spec,
    modules=llama.MODULES,
)
