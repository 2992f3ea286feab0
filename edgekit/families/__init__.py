"""The model families that EdgeKit knows. A new one is a file here and an entry in `FAMILIES`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgekit.errors import UnsupportedError, one_of
from edgekit.families import gemma2, gemma3, gpt_neox, llama, mistral, olmo2, qwen2, qwen3
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
    gpt_neox.FAMILY,
)

_REFUSED: Mapping[str, str] = {
    "gemma3": "has a vision tower; supported: text-only checkpoints, model_type 'gemma3_text'",
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
