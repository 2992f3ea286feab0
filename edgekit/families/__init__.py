"""The model families that EdgeKit knows. A new one is a file here and an entry in `FAMILIES`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgekit.errors import UnsupportedError, one_of
from edgekit.families import (
    gemma2,
    gemma3,
    gpt_neox,
    granite,
    llama,
    mistral,
    olmo2,
    phi,
    phi3,
    qwen2,
    qwen3,
    smollm3,
    stablelm,
)
from edgekit.families.base import Family, WeightSource

__all__ = ["FAMILIES", "Family", "WeightSource", "family_for"]

FAMILIES: tuple[Family, ...] = (
    llama.FAMILY,
    mistral.FAMILY,
    qwen2.FAMILY,
    qwen3.FAMILY,
    gemma2.FAMILY,
    gemma3.FAMILY,
    olmo2.FAMILY,
    phi.FAMILY,
    phi3.FAMILY,
    granite.FAMILY,
    smollm3.FAMILY,
    stablelm.FAMILY,
    gpt_neox.FAMILY,
)

_EXPERTS = "is a mixture of experts; supported: dense models"
_SENSES = "has parts for images or sound; supported: text-only decoders"
_STATES = "has recurrent or state-space layers; supported: attention in every layer"
_REFUSED: Mapping[str, str] = {
    "gemma3": "has a vision tower; supported: text-only checkpoints, model_type 'gemma3_text'",
    "phi3small": "has block-sparse attention; supported: Phi-3-mini and Phi-3-medium, model_type 'phi3'",
    **dict.fromkeys(
        (
            "deepseek_v2",
            "deepseek_v3",
            "gpt_oss",
            "granitemoe",
            "granitemoeshared",
            "llama4_text",
            "mixtral",
            "olmoe",
            "phimoe",
            "qwen2_moe",
            "qwen3_moe",
        ),
        _EXPERTS,
    ),
    **dict.fromkeys(
        (
            "gemma3n",
            "gemma4",
            "idefics3",
            "internvl",
            "llama4",
            "llava",
            "llava_next",
            "llava_onevision",
            "mistral3",
            "mllama",
            "paligemma",
            "phi3_v",
            "phi4_multimodal",
            "phi4mm",
            "qwen2_5_omni",
            "qwen2_5_vl",
            "qwen2_audio",
            "qwen2_vl",
            "qwen3_vl",
            "smolvlm",
        ),
        _SENSES,
    ),
    **dict.fromkeys(
        (
            "bamba",
            "falcon_h1",
            "falcon_mamba",
            "granitemoehybrid",
            "jamba",
            "lfm2",
            "mamba",
            "mamba2",
            "nemotron_h",
            "qwen3_5",
            "qwen3_next",
            "recurrent_gemma",
            "rwkv",
            "zamba2",
        ),
        _STATES,
    ),
}
"""Values of `model_type` of models that are not what their nearest family's are, and how they differ."""


def family_for(config: Mapping[str, Any]) -> Family:
    """Returns the family of a Hugging Face config.

    Raises:
        UnsupportedError: Its `model_type` is missing, or belongs to no known family.
    """
    by_type = {model_type: family for family in FAMILIES for model_type in family.model_types}
    if config.get("model_type") is None:
        raise UnsupportedError(f"config.json names no model_type; known: {', '.join(sorted(by_type))}")
    model_type = str(config["model_type"])
    if model_type in _REFUSED:
        raise UnsupportedError(f"a model of model_type {model_type!r} {_REFUSED[model_type]}")
    if model_type not in by_type:
        raise UnsupportedError(f"model_type {one_of(model_type, by_type)}")
    return by_type[model_type]
