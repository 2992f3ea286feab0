"""Qwen3 (dense): Llama with an RMSNorm over each head's queries and keys.

Source: `Qwen3ForCausalLM` of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from edgekit.families import llama
from edgekit.families.base import Family
from edgekit.families.config import Count, read_config
from edgekit.spec import DecoderSpec


class Qwen3Config(llama.LlamaConfig, frozen=True, kw_only=True):
    """The keys of a Qwen3 config."""

    num_key_value_heads: Count | None = 32
    head_dim: Count | None = 128


def spec(config: Mapping[str, Any]) -> DecoderSpec:
    """Reads a Qwen3 config."""
    read = read_config(config, Qwen3Config, "qwen3")
    # The window counts only with use_sliding_window, which read_config refuses.
    return llama.decoder_spec(msgspec.structs.replace(read, sliding_window=None), "qwen3", qk_norm=True)


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
