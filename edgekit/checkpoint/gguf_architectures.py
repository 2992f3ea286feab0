"""The architectures of GGUF files: what each one's metadata means, and what llama.cpp knows without being told.

A new architecture is a row of `ARCHITECTURES`, and its name in the `gguf_architectures` of a family. What a file does
not say because llama.cpp has it in its code (`llama_model_*::load_arch_hparams`, src/models/*.cpp) is said here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from edgekit.checkpoint.gguf_metadata import ModelMetadata
from edgekit.errors import CorruptArtifactError, UnsupportedError, one_of

Config: TypeAlias = Mapping[str, Any]
RMS_EPSILON, LAYER_EPSILON = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
WINDOW, PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"


def _nothing(_metadata: ModelMetadata, _config: Config) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """How the files of an architecture are read.

    Attributes:
        model_type: The `model_type` of the Hugging Face config that says the same.
        epsilon: The key of the epsilon of its norms.
        keys: Metadata keys that only some architectures have, by the config keys that mean the same.
        read_apart: Metadata keys that `complete` reads, or knows to have no effect.
        complete: Returns further config keys, which replace those read so far.
    """

    model_type: str
    epsilon: str = RMS_EPSILON
    keys: Mapping[str, str] = field(default_factory=dict)
    read_apart: tuple[str, ...] = ()
    complete: Callable[[ModelMetadata, Config], dict[str, Any]] = _nothing


def _llama(metadata: ModelMetadata, _config: Config) -> dict[str, Any]:
    """Mistral's files are those of Llama; only a window tells them apart."""
    window = metadata.get(WINDOW)
    return {"model_type": "mistral", "sliding_window": window} if window else {}


def _window_everywhere(metadata: ModelMetadata, _config: Config) -> dict[str, Any]:
    return {"sliding_window": metadata.get(WINDOW) or None}


def _windows(metadata: ModelMetadata, config: Config, window: int | None, period: int) -> dict[str, Any]:
    """Says which layers have a window: all but every `period`-th, unless the file says otherwise."""
    layers, pattern = config["num_hidden_layers"], metadata.get(PATTERN, period)
    if isinstance(pattern, list):
        if len(pattern) != layers:
            raise CorruptArtifactError(
                f"{metadata.path} has {len(pattern)} values in {metadata.architecture}.{PATTERN} for {layers} layers"
            )
        has_window = [bool(value) for value in pattern]
    else:
        has_window = [pattern == 0 or index % pattern < pattern - 1 for index in range(layers)]
    kinds = ["sliding_attention" if has and window else "full_attention" for has in has_window]
    return {"sliding_window": window or None, "layer_types": kinds}


def _score_scale(config: Config, layers_of_largest: int) -> dict[str, Any]:
    """The largest Gemma of a generation, known by its layers, scales scores by another width than that of a head."""
    width = config["hidden_size"] // config["num_attention_heads"]
    largest = config["num_hidden_layers"] == layers_of_largest
    return {"query_pre_attn_scalar": width if largest else config["head_dim"]}


def _gemma2(metadata: ModelMetadata, config: Config) -> dict[str, Any]:
    windows = _windows(metadata, config, metadata.get(WINDOW, 4096), period=2)
    return {**windows, **_score_scale(config, layers_of_largest=46)}


def _gemma3(metadata: ModelMetadata, config: Config) -> dict[str, Any]:
    windows = _windows(metadata, config, metadata.get(WINDOW), period=6)
    everywhere = config["rope_parameters"]
    nearby = {"rope_type": "default", "rope_theta": metadata.get("rope.freq_base_swa", 10000.0)}
    return {
        **windows,
        **_score_scale(config, layers_of_largest=62),
        "final_logit_softcapping": metadata.get("final_logit_softcapping") or None,
        "rope_parameters": {
            "full_attention": everywhere,
            "sliding_attention": {**nearby, "partial_rotary_factor": everywhere["partial_rotary_factor"]},
        },
    }


def _granite(metadata: ModelMetadata, config: Config) -> dict[str, Any]:
    if not metadata.get("rope.scaling.finetuned", True):
        raise metadata.unsupported("rope.scaling.finetuned", "True, for a model that rotates")
    # A multiplier of 0 stands for none.
    return {
        "attention_multiplier": metadata.get("attention.scale") or config["head_dim"] ** -0.5,
        "embedding_multiplier": metadata.get("embedding_scale") or 1.0,
        "residual_multiplier": metadata.get("residual_scale") or 1.0,
        "logits_scaling": metadata.get("logit_scale") or 1.0,
    }


def _smollm3(_metadata: ModelMetadata, config: Config) -> dict[str, Any]:
    return {"no_rope_layers": [int((index + 1) % 4 != 0) for index in range(config["num_hidden_layers"])]}


def _stablelm(metadata: ModelMetadata, config: Config) -> dict[str, Any]:
    # Converters wrote use_parallel_residual for sequential models as well; the tensors tell.
    return {
        "use_qkv_bias": config["attention_bias"],
        "use_parallel_residual": not metadata.has_tensor("blk.0.ffn_norm.weight"),
        "qk_layernorm": metadata.has_tensor("blk.0.attn_q_norm.weight"),
    }


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(model_type="llama", read_apart=(WINDOW,), complete=_llama),
    "mistral3": Architecture(model_type="mistral", read_apart=(WINDOW,), complete=_window_everywhere),
    "qwen2": Architecture(model_type="qwen2"),
    "qwen3": Architecture(model_type="qwen3"),
    "gemma2": Architecture(
        model_type="gemma2",
        keys={
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        read_apart=(WINDOW, PATTERN),
        complete=_gemma2,
    ),
    "gemma3": Architecture(
        model_type="gemma3_text",
        read_apart=(WINDOW, PATTERN, "rope.freq_base_swa", "final_logit_softcapping"),
        complete=_gemma3,
    ),
    "olmo2": Architecture(model_type="olmo2"),
    "phi2": Architecture(model_type="phi", epsilon=LAYER_EPSILON),
    "phi3": Architecture(model_type="phi3", read_apart=(WINDOW,), complete=_window_everywhere),
    "granite": Architecture(
        model_type="granite",
        read_apart=("attention.scale", "embedding_scale", "residual_scale", "logit_scale"),
        complete=_granite,
    ),
    "smollm3": Architecture(model_type="smollm3", complete=_smollm3),
    "stablelm": Architecture(
        model_type="stablelm", epsilon=LAYER_EPSILON, read_apart=("use_parallel_residual",), complete=_stablelm
    ),
    "gptneox": Architecture(
        model_type="gpt_neox",
        epsilon=LAYER_EPSILON,
        keys={"use_parallel_residual": "use_parallel_residual"},
    ),
}

# What parts of other architectures' names stand for.
_OTHER_KINDS: Mapping[str, str] = {
    "moe": "mixtures of experts",
    "vl": "models of images",
    "clip": "models of images",
    "bert": "encoders",
    "t5": "encoders",
    "embedding": "encoders",
    "mamba": "state-space models",
    "rwkv": "recurrent models",
}


def architecture_row(name: str, path: Path) -> Architecture:
    """Returns the row of a file's `general.architecture`.

    Raises:
        UnsupportedError: There is none.
    """
    if name not in ARCHITECTURES:
        kind = next((kind for part, kind in _OTHER_KINDS.items() if part in name), None)
        reason = "" if kind is None else f"; {kind} are not supported"
        raise UnsupportedError(f"{path} has the architecture {one_of(name, ARCHITECTURES)}{reason}")
    return ARCHITECTURES[name]
