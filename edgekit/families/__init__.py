"""The model families that EdgeKit knows. A new one is a file here and an entry in `FAMILIES`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgekit.errors import UnsupportedError, one_of
from edgekit.families import gpt_neox, llama, qwen3
from edgekit.families.base import Family, WeightSource

__all__ = ["FAMILIES", "Family", "WeightSource", "family_for", "gguf_family_for"]

FAMILIES: tuple[Family, ...] = (llama.FAMILY, qwen3.FAMILY, gpt_neox.FAMILY)


def family_for(config: Mapping[str, Any]) -> Family:
    """Returns the family of a Hugging Face config.

    Raises:
        UnsupportedError: Its `model_type` is missing or belongs to no known family.
    """
    by_type = {model_type: family for family in FAMILIES for model_type in family.model_types}
    if config.get("model_type") is None:
        raise UnsupportedError(f"config.json names no model_type; known: {', '.join(sorted(by_type))}")
    model_type = str(config["model_type"])
    if model_type not in by_type:
        raise UnsupportedError(f"model_type {one_of(model_type, by_type)}")
    return by_type[model_type]


def gguf_family_for(architecture: str) -> Family:
    """Returns the family of a GGUF file's `general.architecture`.

    Raises:
        UnsupportedError: It belongs to no known family.
    """
    by_name = {name: family for family in FAMILIES for name in family.gguf_architectures}
    if architecture not in by_name:
        raise UnsupportedError(f"GGUF architecture {one_of(architecture, by_name)}")
    return by_name[architecture]
