"""GGUF files: config and weights. Quantized blocks keep exactly the codes of the file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgekit.blocks import QuantizedBlocks
from edgekit.checkpoint.base import Weight
from edgekit.checkpoint.gguf_container import GgufContainer, TensorInfo, read_container
from edgekit.errors import CorruptArtifactError, UnsupportedError, one_of
from edgekit.families import FAMILIES, Family, WeightSource
from edgekit.families.base import RowIndices
from edgekit.rope import FactorScaling
from edgekit.spec import DecoderSpec

ROPE_FACTORS = "rope_freqs.weight"
_BLOCK_SIZE = 32

# Metadata keys below the architecture's prefix, and the config keys that hold the same.
_CONFIG_KEYS: Mapping[str, str] = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "rope.freq_base": "rope_theta",
    "use_parallel_residual": "use_parallel_residual",
    "expert_count": "num_experts",
}
# Keys that are read apart from the table, or that say nothing about the computation.
_OTHER_KEYS = frozenset(
    {
        "attention.value_length",
        "expert_used_count",
        "rope.dimension_count",
        "rope.scaling.finetuned",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.type",
        "tensor_data_layout",
        "vocab_size",
    }
)


class GgufTensors:
    """The tensors of a GGUF file."""

    def __init__(self, path: Path, container: GgufContainer) -> None:
        """Wraps a parsed file.

        Args:
            path: The file.
            container: Its contents.
        """
        self.files = (path,)
        self.shapes = {name: info.shape for name, info in container.tensors.items() if name != ROPE_FACTORS}
        self._container: GgufContainer | None = container

    def read(self, name: str, rows: RowIndices | None) -> Weight:
        """Reads one tensor, or the given rows of it: float32, or blocks when it is stored in blocks."""
        if self._container is None:
            raise ValueError(f"{self.files[0]} is closed")
        return read_tensor(self._container, name, rows)

    def close(self) -> None:
        """Unmaps the file."""
        self._container = None


def read_tensor(container: GgufContainer, name: str, rows: RowIndices | None = None) -> Weight:
    """Reads one tensor of a container.

    Args:
        container: The file.
        name: Stored name.
        rows: Rows to take, or None for all.

    Raises:
        CorruptArtifactError: A block has an offset that float16 cannot hold.
    """
    info = container.tensors[name]
    raw = _raw_rows(container, info, rows)
    match info.format.name:
        case "F32":
            return raw.view(np.float32).astype(np.float32).reshape(-1, *info.shape[1:])
        case "F16":
            return raw.view(np.float16).astype(np.float32).reshape(-1, *info.shape[1:])
        case "BF16":
            widened = raw.view(np.uint16).astype(np.uint32) << 16
            return widened.view(np.float32).reshape(-1, *info.shape[1:])
        case "Q8_0":
            return _q8_0(raw)
        case "Q4_0":
            return _q4_0(raw)
        case "Q4_1":
            return _q4_1(raw, name)
    raise AssertionError(f"no reader for {info.format.name}")


def _raw_rows(container: GgufContainer, info: TensorInfo, rows: RowIndices | None) -> npt.NDArray[np.uint8]:
    stored = container.data[info.offset : info.offset + info.size].reshape(info.shape[0], -1)
    return np.ascontiguousarray(stored if rows is None else stored[rows])


def _blocks(raw: npt.NDArray[np.uint8], size: int) -> npt.NDArray[np.uint8]:
    return raw.reshape(raw.shape[0], -1, size)


def _float16(blocks: npt.NDArray[np.uint8], start: int) -> npt.NDArray[np.float16]:
    return np.ascontiguousarray(blocks[..., start : start + 2]).view(np.float16)[..., 0]


def _nibbles(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.int8]:
    """Codes −8…7 of 16 packed bytes per block: first all low nibbles, then all high ones."""
    codes = np.concatenate([packed & 0xF, packed >> 4], axis=-1).astype(np.int8) - np.int8(8)
    return codes.reshape(packed.shape[0], -1)


def _q8_0(raw: npt.NDArray[np.uint8]) -> QuantizedBlocks:
    blocks = _blocks(raw, 34)
    codes = np.ascontiguousarray(blocks[..., 2:]).view(np.int8).reshape(raw.shape[0], -1)
    return QuantizedBlocks(bits=8, block_size=_BLOCK_SIZE, codes=codes, scale=_float16(blocks, 0))


def _q4_0(raw: npt.NDArray[np.uint8]) -> QuantizedBlocks:
    blocks = _blocks(raw, 18)
    return QuantizedBlocks(
        bits=4, block_size=_BLOCK_SIZE, codes=_nibbles(blocks[..., 2:]), scale=_float16(blocks, 0)
    )


def _q4_1(raw: npt.NDArray[np.uint8], name: str) -> QuantizedBlocks:
    """w = d·q + m with q in 0…15 is d·(q − 8) + (m + 8d); the offset is rounded to float16."""
    blocks = _blocks(raw, 20)
    scale, minimum = _float16(blocks, 0), _float16(blocks, 2)
    with np.errstate(over="ignore"):
        offset = (minimum.astype(np.float32) + 8 * scale.astype(np.float32)).astype(np.float16)
    if not np.isfinite(offset).all():
        raise CorruptArtifactError(f"tensor {name!r} has a Q4_1 block whose values are beyond float16")
    return QuantizedBlocks(
        bits=4, block_size=_BLOCK_SIZE, codes=_nibbles(blocks[..., 4:]), scale=scale, offset=offset
    )


def gguf_family(container: GgufContainer, path: Path) -> tuple[Family, str]:
    """Returns the family and the architecture name of a file.

    Raises:
        UnsupportedError: The architecture belongs to no known family.
    """
    by_name = {name: family for family in FAMILIES for name in family.gguf_architectures}
    architecture = container.metadata.get("general.architecture")
    if architecture not in by_name:
        raise UnsupportedError(f"{path} has GGUF architecture {one_of(str(architecture), by_name)}")
    return by_name[architecture], architecture


def gguf_config(container: GgufContainer, architecture: str, path: Path) -> dict[str, Any]:
    """Returns the Hugging Face config that a file's metadata and tensor table amount to.

    Raises:
        UnsupportedError: The metadata has a key that is not implemented.
        CorruptArtifactError: The file has no embedding.
    """
    prefix = f"{architecture}."
    values = {key[len(prefix) :]: value for key, value in container.metadata.items() if key.startswith(prefix)}
    unknown = sorted(values.keys() - _CONFIG_KEYS.keys() - _OTHER_KEYS)
    if unknown:
        raise UnsupportedError(f"{path} has {prefix}{unknown[0]} = {values[unknown[0]]!r}, which is not supported")
    config = {_CONFIG_KEYS[key]: value for key, value in values.items() if key in _CONFIG_KEYS}
    if "token_embd.weight" not in container.tensors:
        raise CorruptArtifactError(f"{path} has no tensor 'token_embd.weight'")
    config["vocab_size"] = container.tensors["token_embd.weight"].shape[0]
    config["tie_word_embeddings"] = "output.weight" not in container.tensors
    config["attention_bias"] = not {"blk.0.attn_q.bias", "blk.0.attn_qkv.bias"}.isdisjoint(container.tensors)
    config["mlp_bias"] = "blk.0.ffn_up.bias" in container.tensors
    return config | _rope_config(config, values, path) | _special_tokens(container.metadata)


def _rope_config(config: Mapping[str, Any], values: Mapping[str, Any], path: Path) -> dict[str, Any]:
    try:
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        fraction = values.get("rope.dimension_count", head_dim) / head_dim
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise CorruptArtifactError(f"{path} has no usable embedding and head counts: {error!r}") from error
    if values.get("attention.value_length", head_dim) != head_dim:
        raise UnsupportedError(f"{path} has values of another width than keys, which no family has")
    kind = values.get("rope.scaling.type", "none")
    rope: dict[str, Any] = {"rope_type": "default" if kind == "none" else kind}
    if rope["rope_type"] != "default":
        rope["factor"] = values.get("rope.scaling.factor")
    return {"rope_parameters": rope | {"partial_rotary_factor": fraction}}


def _special_tokens(metadata: Mapping[str, Any]) -> dict[str, Any]:
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": sorted({token for token in ends if token is not None}),
    }


def scaled_rope(spec: DecoderSpec, container: GgufContainer, path: Path) -> DecoderSpec:
    """Applies the frequency factors of `rope_freqs.weight`, where a file has them, to every layer.

    Raises:
        CorruptArtifactError: There is not one factor for each frequency.
        UnsupportedError: The metadata declares another scaling as well.
    """
    import msgspec

    if ROPE_FACTORS not in container.tensors:
        return spec
    factors = read_tensor(container, ROPE_FACTORS)
    assert isinstance(factors, np.ndarray), "one-dimensional tensors are never quantized"
    layers = []
    for layer in spec.layers:
        rope = layer.attention.rope
        if factors.shape != (rope.rotary_dim // 2,):
            raise CorruptArtifactError(
                f"{path} has {ROPE_FACTORS!r} with shape {factors.shape}; expected {(rope.rotary_dim // 2,)}"
            )
        if rope.scaling is not None:
            raise UnsupportedError(f"{path} has both {ROPE_FACTORS!r} and a rope.scaling.type; supported: one of them")
        rope = msgspec.structs.replace(rope, scaling=FactorScaling(factors=tuple(factors.tolist())))
        attention = msgspec.structs.replace(layer.attention, rope=rope)
        layers.append(msgspec.structs.replace(layer, attention=attention))
    return msgspec.structs.replace(spec, layers=tuple(layers))


def gguf_sources(sources: Mapping[str, WeightSource], architecture: str, layers: int) -> dict[str, WeightSource]:
    """Renames sources from Hugging Face's names to GGUF's."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(arch, layers)
    renamed = {}
    for canonical, source in sources.items():
        name = names.get_name(source.name, try_suffixes=(".weight", ".bias"))
        assert name is not None, f"{architecture} has no GGUF name for {source.name}"
        renamed[canonical] = WeightSource(name=name, rows=source.rows)
    return renamed
