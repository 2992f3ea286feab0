"""The config in a GGUF file's metadata, as the Hugging Face config that says the same.

A key under the architecture's prefix that is not listed here or in its row is refused: it may change what the model
computes. Source: the GGUF specification, docs/gguf.md of ggml, and `gguf.constants.Keys` of llama.cpp's gguf package.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgekit.checkpoint.gguf_architectures import LAYER_EPSILON, RMS_EPSILON, Architecture, architecture_row
from edgekit.checkpoint.gguf_container import GgufContainer
from edgekit.checkpoint.gguf_metadata import ModelMetadata
from edgekit.checkpoint.gguf_rope import ROPE_KEYS, rope_parameters
from edgekit.checkpoint.gguf_tokenizer import end_token_ids, special_token_ids
from edgekit.errors import CorruptArtifactError

_CONFIG_KEYS: Mapping[str, str] = {
    "attention.head_count": "num_attention_heads",
    LAYER_EPSILON: "layer_norm_eps",
    RMS_EPSILON: "rms_norm_eps",
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "expert_count": "num_experts",
    "feed_forward_length": "intermediate_size",
}
_HEAD_KEYS = ("attention.head_count_kv", "attention.key_length")
# Widths of a head that a layer may have of its own; here they are those of every key.
_SAME_AS_KEY_LENGTH = ("attention.value_length", "attention.key_length_swa", "attention.value_length_swa")
_READ_APART = frozenset({*_HEAD_KEYS, *_SAME_AS_KEY_LENGTH, *ROPE_KEYS, "vocab_size"})
_WITHOUT_EFFECT = frozenset({"expert_used_count", "tensor_data_layout"})
# Keys that change the computation, and the values that do not.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.sliding_window": (0,),
    "attention.temperature_scale": (0,),
}
# A damaged number cannot ask for all of memory.
_MOST_LAYERS = 1 << 12


def gguf_config(container: GgufContainer, architecture: str, path: Path) -> dict[str, Any]:
    """Returns the Hugging Face config that a file's metadata and tensor table amount to.

    Args:
        container: The file's contents.
        architecture: Its `general.architecture`.
        path: The file, for messages.

    Raises:
        UnsupportedError: The architecture, or a key of the metadata, is not implemented.
        CorruptArtifactError: The metadata contradicts the tensors, or lacks what they need.
    """
    row = architecture_row(architecture, path)
    metadata = ModelMetadata.of(container, architecture, path)
    _check_keys(metadata, row)
    named = {**_CONFIG_KEYS, **row.keys}
    config = {named[key]: value for key, value in metadata.values.items() if key in named}
    config |= _from_tensors(metadata)
    config["model_type"] = row.model_type
    config["bos_token_id"] = special_token_ids(container.metadata).get("bos_token_id")
    config["eos_token_id"] = list(end_token_ids(container.metadata))
    try:
        config |= _heads(metadata, config)
        config["rope_parameters"] = rope_parameters(metadata, config["head_dim"])
        config["original_max_position_embeddings"] = metadata.get(
            "rope.scaling.original_context_length", config["max_position_embeddings"]
        )
        config |= row.complete(metadata, config)
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise CorruptArtifactError(f"{path} has no usable embedding length and head count: {error!r}") from error
    return config


def _check_keys(metadata: ModelMetadata, row: Architecture) -> None:
    known = {*_CONFIG_KEYS, *_READ_APART, *_WITHOUT_EFFECT, *row.keys, *row.read_apart}
    for key in sorted(metadata.values.keys() - known):
        if metadata.values[key] not in _NEUTRAL.get(key, ()):
            raise metadata.unsupported(key)
    if row.epsilon not in metadata.values:
        raise metadata.missing(row.epsilon)
    layers = metadata.get("block_count", 1)
    if isinstance(layers, int) and layers > _MOST_LAYERS:
        raise CorruptArtifactError(
            f"{metadata.path} has {metadata.architecture}.block_count = {layers}; expected at most {_MOST_LAYERS}"
        )


def _from_tensors(metadata: ModelMetadata) -> dict[str, Any]:
    if not metadata.has_tensor("token_embd.weight"):
        raise CorruptArtifactError(f"{metadata.path} has no tensor 'token_embd.weight'")
    rows = metadata.container.tensors["token_embd.weight"].shape[0]
    if metadata.get("vocab_size", rows) != rows:
        raise CorruptArtifactError(
            f"{metadata.path} has {rows} embeddings; {metadata.architecture}.vocab_size says "
            f"{metadata.get('vocab_size')}"
        )
    return {
        "vocab_size": rows,
        "tie_word_embeddings": not metadata.has_tensor("output.weight"),
        "attention_bias": metadata.has_tensor("blk.0.attn_q.bias") or metadata.has_tensor("blk.0.attn_qkv.bias"),
        "mlp_bias": metadata.has_tensor("blk.0.ffn_up.bias"),
    }


def _heads(metadata: ModelMetadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """What a file leaves out about heads follows from their number, whatever the family's config defaults to."""
    heads = config["num_attention_heads"]
    head_dim = metadata.get("attention.key_length") or config["hidden_size"] // heads
    for key in _SAME_AS_KEY_LENGTH:
        if metadata.get(key, head_dim) != head_dim:
            raise metadata.unsupported(key, f"as many channels as attention.key_length, {head_dim}")
    return {"head_dim": head_dim, "num_key_value_heads": metadata.get("attention.head_count_kv", heads)}
