"""The rotary embedding of a GGUF file, as the rope parameters of a Hugging Face config that mean the same.

Sources: `TextModel.set_gguf_parameters` and `Phi3MiniModel` of llama.cpp's converter for what is written, and
llama-model.cpp and llama-context.cpp for how it is read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from edgekit.checkpoint.gguf_container import GgufContainer
from edgekit.checkpoint.gguf_metadata import ModelMetadata
from edgekit.checkpoint.gguf_tensors import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS, read_tensor
from edgekit.errors import CorruptArtifactError, UnsupportedError
from edgekit.rope import FactorScaling
from edgekit.spec import DecoderSpec

ROPE_KEYS = frozenset(
    {
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scale_linear",
        "rope.scaling.attn_factor",
        "rope.scaling.factor",
        "rope.scaling.finetuned",
        "rope.scaling.original_context_length",
        "rope.scaling.type",
        "rope.scaling.yarn_attn_factor",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        "rope.scaling.yarn_ext_factor",
        "rope.scaling.yarn_log_multiplier",
    }
)
_KINDS = ("linear", "longrope", "none", "yarn")
_YARN_PARAMETERS: Mapping[str, str] = {
    # The converter writes the attention_factor of the config here, which is the whole of it.
    "rope.scaling.yarn_attn_factor": "attention_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
_DEFAULT_BASE = 10000.0


def rope_parameters(metadata: ModelMetadata, head_dim: int) -> dict[str, Any]:
    """Returns the `rope_parameters` of a config.

    Args:
        metadata: The file.
        head_dim: Channels per head.

    Raises:
        UnsupportedError: A scaling that is not implemented.
        CorruptArtifactError: The factors that a scaling needs are missing.
    """
    width = metadata.get("rope.dimension_count", head_dim)
    parameters = {
        "rope_theta": metadata.get("rope.freq_base", _DEFAULT_BASE),
        # The next number up, so that the product with head_dim does not round to less than the width.
        "partial_rotary_factor": math.nextafter(width / head_dim, math.inf),
    }
    # Phi-3's files have the factors and name no kind; a factor of 0, or none, means no scaling; one without a kind is
    # linear.
    has_factors = metadata.has_tensor(LONG_FACTORS) or metadata.has_tensor(SHORT_FACTORS)
    factor = metadata.get("rope.scaling.factor", 0) or metadata.get("rope.scale_linear", 0)
    kind = metadata.get("rope.scaling.type", "longrope" if has_factors else "linear")
    if kind not in _KINDS:
        raise metadata.unsupported("rope.scaling.type", ", ".join(_KINDS))
    if has_factors and kind != "longrope":
        raise metadata.unsupported("rope.scaling.type", f"longrope for a file with {LONG_FACTORS!r}")
    if kind != "longrope" and metadata.get("rope.scaling.attn_factor", 1.0) != 1.0:
        raise metadata.unsupported("rope.scaling.attn_factor", "1.0 unless the scaling is longrope")
    if kind != "yarn":
        for key in sorted(metadata.values):
            if key.startswith("rope.scaling.yarn_"):
                raise metadata.unsupported(key, "rope.scaling.type yarn")
    if kind == "longrope":
        return {**parameters, **_longrope(metadata)}
    if kind == "none" or not factor:
        return {**parameters, "rope_type": "default"}
    if kind == "yarn":
        parameters |= _yarn(metadata)
    return {**parameters, "rope_type": kind, "factor": factor}


def _yarn(metadata: ModelMetadata) -> dict[str, Any]:
    # How much of YaRN's ramp is applied: 1 is all of it, and −1 stands for what the kind implies, which is 1.
    if metadata.get("rope.scaling.yarn_ext_factor", -1.0) not in (-1.0, 1.0):
        raise metadata.unsupported("rope.scaling.yarn_ext_factor", "1.0")
    parameters = {name: metadata.get(key) for key, name in _YARN_PARAMETERS.items() if key in metadata.values}
    multiplier = metadata.get("rope.scaling.yarn_log_multiplier", 0.0)
    return {**parameters, "mscale": 1.0, "mscale_all_dim": multiplier} if multiplier else parameters


def _longrope(metadata: ModelMetadata) -> dict[str, Any]:
    for name in (SHORT_FACTORS, LONG_FACTORS):
        if not metadata.has_tensor(name):
            raise CorruptArtifactError(f"{metadata.path} scales its rope by longrope and has no tensor {name!r}")
    return {
        "rope_type": "longrope",
        "short_factor": _factors(metadata.container, SHORT_FACTORS, metadata.path),
        "long_factor": _factors(metadata.container, LONG_FACTORS, metadata.path),
        "attention_factor": metadata.get("rope.scaling.attn_factor", 1.0),
    }


def _factors(container: GgufContainer, name: str, path: Path) -> list[float]:
    shape = container.tensors[name].shape
    if len(shape) != 1:
        raise CorruptArtifactError(f"{path} has {name!r} of shape {shape}; expected one number per frequency")
    factors = read_tensor(container, name)
    assert isinstance(factors, np.ndarray), "a vector is never stored in blocks"
    return [float(factor) for factor in factors]


def with_rope_factors(spec: DecoderSpec, container: GgufContainer, path: Path) -> DecoderSpec:
    """Applies the frequency factors of `rope_freqs.weight`, where a file has them, to every layer that rotates.

    Args:
        spec: What the metadata says.
        container: The file's contents.
        path: The file, for messages.

    Raises:
        CorruptArtifactError: There is not one factor for each frequency.
        UnsupportedError: The metadata declares a scaling as well.
    """
    if ROPE_FACTORS not in container.tensors:
        return spec
    factors = _factors(container, ROPE_FACTORS, path)
    layers = []
    for layer in spec.layers:
        rope = layer.attention.rope
        if rope is not None:
            count = rope.rotary_dim // 2
            if len(factors) != count or not all(math.isfinite(factor) and factor > 0 for factor in factors):
                raise CorruptArtifactError(
                    f"{path} has an unusable {ROPE_FACTORS!r}: expected {count} positive numbers"
                )
            if rope.scaling is not None:
                raise UnsupportedError(f"{path} has both {ROPE_FACTORS!r} and a rope scaling; supported: one of them")
            rope = msgspec.structs.replace(rope, scaling=FactorScaling(factors=tuple(factors)))
        attention = msgspec.structs.replace(layer.attention, rope=rope)
        layers.append(msgspec.structs.replace(layer, attention=attention))
    return msgspec.structs.replace(spec, layers=tuple(layers))
