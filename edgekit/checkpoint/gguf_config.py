"""The config in a GGUF file's metadata, as the Hugging Face config that says the same.

A key under the architecture's prefix that is not listed here is refused: it may change what the model computes.
Source: the GGUF specification, docs/gguf.md of ggml.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from edgekit.checkpoint.gguf_container import GgufContainer
from edgekit.checkpoint.gguf_tensors import ROPE_FACTORS, read_tensor
from edgekit.errors import CorruptArtifactError, UnsupportedError
from edgekit.rope import FactorScaling
from edgekit.spec import DecoderSpec

_CONFIG_KEYS: Mapping[str, str] = {
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "expert_count": "num_experts",
    "feed_forward_length": "intermediate_size",
    "rope.freq_base": "rope_theta",
    "use_parallel_residual": "use_parallel_residual",
}
_KEYS_READ_APART = frozenset(
    {"attention.value_length", "rope.dimension_count", "rope.scaling.factor", "rope.scaling.type", "vocab_size"}
)
_KEYS_WITHOUT_EFFECT = frozenset(
    {"expert_used_count", "rope.scaling.finetuned", "rope.scaling.original_context_length", "tensor_data_layout"}
)
# llama.cpp ends a generation at any of them.
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def gguf_config(container: GgufContainer, architecture: str, path: Path) -> dict[str, Any]:
    """Returns the Hugging Face config that a file's metadata and tensor table amount to.

    Args:
        container: The file's contents.
        architecture: Its `general.architecture`.
        path: The file, for messages.

    Raises:
        UnsupportedError: The metadata has a key that is not implemented.
        CorruptArtifactError: The metadata contradicts the tensors, or lacks what they need.
    """
    prefix = f"{architecture}."
    values = {key[len(prefix) :]: value for key, value in container.metadata.items() if key.startswith(prefix)}
    unknown = sorted(values.keys() - _CONFIG_KEYS.keys() - _KEYS_READ_APART - _KEYS_WITHOUT_EFFECT)
    if unknown:
        raise UnsupportedError(f"{path} has {prefix}{unknown[0]} = {values[unknown[0]]!r}, which is not supported")
    config = {_CONFIG_KEYS[key]: value for key, value in values.items() if key in _CONFIG_KEYS}
    tensors = container.tensors
    if "token_embd.weight" not in tensors:
        raise CorruptArtifactError(f"{path} has no tensor 'token_embd.weight'")
    rows = tensors["token_embd.weight"].shape[0]
    if values.get("vocab_size", rows) != rows:
        raise CorruptArtifactError(f"{path} has {rows} embeddings; {prefix}vocab_size says {values['vocab_size']}")
    config["vocab_size"] = rows
    config["tie_word_embeddings"] = "output.weight" not in tensors
    config["attention_bias"] = "blk.0.attn_q.bias" in tensors or "blk.0.attn_qkv.bias" in tensors
    config["mlp_bias"] = "blk.0.ffn_up.bias" in tensors
    config["bos_token_id"] = container.metadata.get("tokenizer.ggml.bos_token_id")
    ends = (container.metadata.get(f"tokenizer.ggml.{key}") for key in _END_KEYS)
    config["eos_token_id"] = [token for token in ends if token is not None]
    config["rope_parameters"] = _rope_parameters(config, values, path)
    return config


def _rope_parameters(config: Mapping[str, Any], values: Mapping[str, Any], path: Path) -> dict[str, Any]:
    try:
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        fraction = values.get("rope.dimension_count", head_dim) / head_dim
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise CorruptArtifactError(f"{path} has no usable embedding length and head count: {error!r}") from error
    value_dim = values.get("attention.value_length", head_dim)
    if value_dim != head_dim:
        raise UnsupportedError(f"{path} has {value_dim} channels per value; supported: as many as per key, {head_dim}")
    # A factor of 0, or none, means no scaling; a factor without a kind is linear.
    factor = values.get("rope.scaling.factor", 0)
    kind = values.get("rope.scaling.type", "linear" if factor else "none")
    if kind == "none" or (kind == "linear" and not factor):
        return {"rope_type": "default", "partial_rotary_factor": fraction}
    return {"rope_type": kind, "factor": factor, "partial_rotary_factor": fraction}


def with_rope_factors(spec: DecoderSpec, container: GgufContainer, path: Path) -> DecoderSpec:
    """Applies the frequency factors of `rope_freqs.weight`, where a file has them, to every layer.

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
    factors = read_tensor(container, ROPE_FACTORS)
    assert isinstance(factors, np.ndarray), "a vector is never stored in blocks"
    layers = []
    for layer in spec.layers:
        rope = layer.attention.rope
        count = rope.rotary_dim // 2
        if factors.shape != (count,) or not (np.isfinite(factors) & (factors > 0)).all():
            raise CorruptArtifactError(f"{path} has an unusable {ROPE_FACTORS!r}: expected {count} positive numbers")
        if rope.scaling is not None:
            raise UnsupportedError(f"{path} has both {ROPE_FACTORS!r} and a rope scaling; supported: one of them")
        rope = msgspec.structs.replace(rope, scaling=FactorScaling(factors=tuple(factors.tolist())))
        attention = msgspec.structs.replace(layer.attention, rope=rope)
        layers.append(msgspec.structs.replace(layer, attention=attention))
    return msgspec.structs.replace(spec, layers=tuple(layers))
