"""What llama.cpp's converter writes of a model: metadata, and its tensors by GGUF name.

Sources: `set_gguf_parameters`, `modify_tensors` and `generate_extra_tensors` of the classes in conversion/*.py of
llama.cpp, which each function names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from gguf import MODEL_ARCH_NAMES, GGUFWriter, RopeScalingType, get_tensor_name_map

from edgekit.spec import DecoderSpec
from tests.tiny_configs import SIZES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FloatArray: TypeAlias = npt.NDArray[np.float32]

ARCHITECTURES: Mapping[str, str] = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "olmo2": "olmo2",
    "phi": "phi2",
    "phi3": "phi3",
    "granite": "granite",
    "smollm3": "smollm3",
    "stablelm": "stablelm",
    "gpt_neox": "gptneox",
}
_SIZES = {**SIZES, "num_key_value_heads": 2, "bos_token_id": 0}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 8.0,
    "beta_slow": 1.5,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.125 * index for index in range(8)],
    "long_factor": [2.0 + 0.5 * index for index in range(8)],
    "original_max_position_embeddings": 64,
}
# The scale of the scores and, but for array-valued patterns, the layers with windows follow from sizes.
_GEMMA = {**_SIZES, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 7}
_GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
}
_STABLELM = {"model_type": "stablelm", **_SIZES, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}

# Configs of every architecture that a GGUF file can say all of, as transformers spells them.
MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama yarn": {"model_type": "llama", **_SIZES, "rope_parameters": _YARN},
    "mistral": {"model_type": "mistral", **_SIZES, "head_dim": 24, "sliding_window": None},
    "qwen2": {"model_type": "qwen2", **_SIZES},
    "qwen2 tied": {"model_type": "qwen2", **_SIZES, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", **_SIZES, "head_dim": 32},
    "gemma2": {
        "model_type": "gemma2",
        **_GEMMA,
        "num_hidden_layers": 3,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 10.0,
    },
    "gemma3": {"model_type": "gemma3_text", **_GEMMA, "num_hidden_layers": 7, "rope_parameters": _GEMMA3_ROPE},
    "gemma3 capped": {"model_type": "gemma3_text", **_GEMMA, "final_logit_softcapping": 5.0},
    "olmo2": {"model_type": "olmo2", **_SIZES},
    "phi": {"model_type": "phi", **_SIZES, "num_key_value_heads": 4, "intermediate_size": 256},
    "phi3": {"model_type": "phi3", **_SIZES, "pad_token_id": 0, "sliding_window": 7},
    "phi3 longrope": {
        "model_type": "phi3",
        **_SIZES,
        "pad_token_id": 0,
        "original_max_position_embeddings": 64,
        "rope_parameters": _LONGROPE,
    },
    "granite": {
        "model_type": "granite",
        **_SIZES,
        "attention_multiplier": 0.125,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 4.0,
    },
    "smollm3": {"model_type": "smollm3", **_SIZES, "num_hidden_layers": 5, "pad_token_id": 0},
    "stablelm": {**_STABLELM, "use_qkv_bias": True},
    "stablelm parallel": {**_STABLELM, "use_parallel_residual": True, "partial_rotary_factor": 0.5},
    "gpt_neox": {"model_type": "gpt_neox", **_SIZES, "num_key_value_heads": 4, "rotary_pct": 0.5},
}
# Subclasses of LlamaModel, which pairs the channels that rotate together.
_PERMUTED = ("llama", "mistral", "granite", "smollm3")
_ADDED_TO_NORMS = {"gemma2": 1.0, "gemma3_text": 1.0}


def add_model_metadata(writer: GGUFWriter, config: Any) -> None:
    """Writes what the converter's class for the model writes."""
    _CLASSES.get(config.model_type, _text_model)(writer, config)


def model_tensors(model: PreTrainedModel) -> Iterator[tuple[str, FloatArray]]:
    """Yields every tensor that the converter writes, by GGUF name."""
    config = model.config
    name = ARCHITECTURES[config.model_type]
    architecture = next(key for key, value in MODEL_ARCH_NAMES.items() if value == name)
    names = get_tensor_name_map(architecture, config.num_hidden_layers)
    for hf_name, parameter in model.named_parameters():
        stored = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, hf_name
        data = _rows(hf_name, parameter.detach().numpy(), config)
        addend = _ADDED_TO_NORMS.get(config.model_type, 0.0) if hf_name.endswith("norm.weight") else 0.0
        yield stored, data + np.float32(addend)
    yield from rope_tensors(config)


def as_metadata_has_it(spec: DecoderSpec) -> Any:
    """What a file can say of a spec: numbers in float32, one end token, and no difference of Mistral from Llama."""
    family = "llama" if spec.family == "mistral" else spec.family
    return _float32(msgspec.to_builtins(msgspec.structs.replace(spec, eos_token_ids=(), family=family)))


def _float32(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _float32(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_float32(item) for item in value]
    return float(np.float32(value)) if isinstance(value, float) else value


def _rows(name: str, data: FloatArray, config: Any) -> FloatArray:
    """The row orders of `LlamaModel.permute` and `GPTNeoXModel.modify_tensors`."""
    if "query_key_value" in name:
        heads = config.num_attention_heads
        split = data.reshape(heads, 3, config.hidden_size // heads, *data.shape[1:])
        return np.concatenate([split[:, part].reshape(-1, *data.shape[1:]) for part in range(3)])
    if config.model_type not in _PERMUTED or not any(part in name for part in ("q_proj", "k_proj")):
        return data
    heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
    return data.reshape(heads, 2, len(data) // heads // 2, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)


def rope_tensors(config: Any) -> Iterator[tuple[str, FloatArray]]:
    """Yields the factors of frequencies that `LlamaModel` and `Phi3MiniModel` write (`generate_extra_tensors`)."""
    rope = config.rope_parameters
    if rope.get("rope_type") == "llama3":
        yield "rope_freqs.weight", np.array(_llama3_factors(rope, config.head_dim), np.float32)
    if rope.get("rope_type") == "longrope":
        for length in ("long", "short"):
            yield f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], np.float32)


def _llama3_factors(rope: Mapping[str, Any], width: int) -> list[float]:
    context, low, high = rope["original_max_position_embeddings"], rope["low_freq_factor"], rope["high_freq_factor"]
    factors = []
    for channel in range(0, width, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (channel / width)
        if wavelength < context / high:
            factors.append(1.0)
        elif wavelength > context / low:
            factors.append(rope["factor"])
        else:
            smooth = (context / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return factors


def _sizes(writer: GGUFWriter, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _rotary_dim(config: Any) -> int:
    return int(_head_dim(config) * config.rope_parameters.get("partial_rotary_factor", 1.0))


def _text_model(writer: GGUFWriter, config: Any) -> None:
    """`TextModel.set_gguf_parameters`."""
    _sizes(writer, config)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if getattr(config, "head_dim", None) is not None:
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    if "sliding_attention" in config.rope_parameters:
        writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writers: Mapping[str, Callable[[float], None]] = {
            "attention_factor": writer.add_rope_scaling_yarn_attn_factor,
            "beta_fast": writer.add_rope_scaling_yarn_beta_fast,
            "beta_slow": writer.add_rope_scaling_yarn_beta_slow,
        }
        for key, write in writers.items():
            if rope.get(key) is not None:
                write(rope[key])
    if rope["rope_type"] == "longrope":
        writer.add_rope_scaling_type(RopeScalingType.LONGROPE)


def _llama_model(writer: GGUFWriter, config: Any) -> None:
    """`LlamaModel.set_gguf_parameters`."""
    _text_model(writer, config)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_dimension_count(_head_dim(config))


def _granite_model(writer: GGUFWriter, config: Any) -> None:
    """`GraniteModel.set_gguf_parameters`."""
    _llama_model(writer, config)
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)


def _gemma2_model(writer: GGUFWriter, config: Any) -> None:
    """`Gemma2Model.set_gguf_parameters`."""
    _sizes(writer, config)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_sliding_window(config.sliding_window)


def _gemma3_model(writer: GGUFWriter, config: Any) -> None:
    """`Gemma3Model.set_gguf_parameters`."""
    _text_model(writer, config)
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_sliding_window(config.sliding_window)


def _phi2_model(writer: GGUFWriter, config: Any) -> None:
    """`Phi2Model.set_gguf_parameters`."""
    _sizes(writer, config)
    writer.add_head_count_kv(config.num_attention_heads)
    writer.add_layer_norm_eps(config.layer_norm_eps)
    writer.add_rope_dimension_count(_rotary_dim(config))


def _phi3_model(writer: GGUFWriter, config: Any) -> None:
    """`Phi3MiniModel.set_gguf_parameters` and the factor of its `generate_extra_tensors`."""
    _sizes(writer, config)
    rope = config.rope_parameters
    original = rope.get("original_max_position_embeddings", config.original_max_position_embeddings)
    writer.add_rope_scaling_orig_ctx_len(original)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(_rotary_dim(config))
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_sliding_window(config.sliding_window or 0)
    if rope["rope_type"] == "longrope":
        scale = config.max_position_embeddings / original
        factor = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
        writer.add_rope_scaling_attn_factors(factor)


def _stablelm_model(writer: GGUFWriter, config: Any) -> None:
    """`StableLMModel.set_gguf_parameters`."""
    _sizes(writer, config)
    writer.add_rope_dimension_count(_rotary_dim(config))
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_parallel_residual(config.use_parallel_residual)
    writer.add_layer_norm_eps(config.layer_norm_eps)


def _gpt_neox_model(writer: GGUFWriter, config: Any) -> None:
    """`GPTNeoXModel.set_gguf_parameters`, and the base, which it leaves at the default."""
    _sizes(writer, config)
    writer.add_rope_dimension_count(_rotary_dim(config))
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_parallel_residual(config.use_parallel_residual)
    writer.add_layer_norm_eps(config.layer_norm_eps)


_CLASSES: Mapping[str, Callable[[GGUFWriter, Any], None]] = {
    "llama": _llama_model,
    "mistral": _llama_model,
    "granite": _granite_model,
    "smollm3": _llama_model,
    "gemma2": _gemma2_model,
    "gemma3_text": _gemma3_model,
    "phi": _phi2_model,
    "phi3": _phi3_model,
    "stablelm": _stablelm_model,
    "gpt_neox": _gpt_neox_model,
}
