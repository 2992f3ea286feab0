"""Gemma 3, text only: Gemma 2 with normalized queries and keys, and rotations of two bases.

Layers with a sliding window rotate at one base; those without, which are fewer, at another and perhaps scaled.

Source: `Gemma3ForCausalLM` of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from edgekit.families import gemma2
from edgekit.families.base import Family
from edgekit.families.config import Count, Positive, convert, read_config
from edgekit.spec import DecoderSpec, LayerSpec

replace = msgspec.structs.replace


class Gemma3Config(gemma2.GemmaConfig, frozen=True, kw_only=True):
    """The keys of a Gemma 3 config.

    transformers reads attn_logit_softcapping and does not apply it, so it is no key of this family's.
    """

    rope_theta: Positive = 1e6
    rope_local_base_freq: Positive = 1e4
    sliding_window_pattern: Count = 6


class _RopeByLayerType(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    full_attention: dict[str, Any] | None = None
    sliding_attention: dict[str, Any] | None = None


def spec(config: Mapping[str, Any]) -> DecoderSpec:
    """Reads a Gemma 3 config."""
    read = read_config(config, Gemma3Config, "gemma3")
    declared = convert(read.rope_parameters or {}, _RopeByLayerType, "gemma3 rope_parameters")
    everywhere = {"rope_theta": read.rope_theta, **(declared.full_attention or {}), **(read.rope_scaling or {})}
    nearby = {"rope_theta": read.rope_local_base_freq, **(declared.sliding_attention or {})}
    kinds = [_layer_spec(read, rope) for rope in (everywhere, nearby)]
    layers = []
    for window in gemma2.windows(read, read.sliding_window_pattern, "gemma3"):
        layer = kinds[window is not None]
        layers.append(replace(layer, attention=replace(layer.attention, sliding_window=window)))
    return gemma2.decoder_spec(read, "gemma3", layers)


def _layer_spec(config: Gemma3Config, rope_parameters: dict[str, Any]) -> LayerSpec:
    layer = gemma2.layer_spec(replace(config, rope_parameters=rope_parameters, rope_scaling=None), "gemma3")
    return replace(layer, attention=replace(layer.attention, qk_norm=layer.norm))


FAMILY = Family(
    name="gemma3",
    covers="Gemma 3 (text)",
    model_types=("gemma3_text",),
    gguf_architectures=("gemma3",),
    spec=spec,
    modules={
        **gemma2.MODULES,
        "layers.{i}.self_attn.q_norm": "model.layers.{i}.self_attn.q_norm",
        "layers.{i}.self_attn.k_norm": "model.layers.{i}.self_attn.k_norm",
    },
    norm_addend=1.0,
)
