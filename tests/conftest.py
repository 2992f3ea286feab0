"""Tiny models of every family, with random weights in which everything matters, for the tests of all folders.

A model is asked for by the name of its variant, a key of `VARIANTS`: ``tiny_checkpoint("llama_bias")``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest

from tests.tiny_configs import LLAMA3_ROPE, SIZES, VOCABULARY

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Before anything imports them: no test may reach a hub, and progress bars drown what a failed test says.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
# Threads that share tiny products only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

MakeCheckpoint: TypeAlias = Callable[[Mapping[str, Any]], Path]
TinyCheckpoint: TypeAlias = Callable[[str], Path]
TinyGguf: TypeAlias = Callable[[str, str], Path]
HuggingFaceModel: TypeAlias = Callable[[Path], "PreTrainedModel"]

_SIZES = {**SIZES, "bos_token_id": 0}
_LLAMA = {"model_type": "llama", **_SIZES, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
_QWEN3 = {"model_type": "qwen3", **_SIZES, "num_key_value_heads": 2, "head_dim": 32}
_NEOX = {"model_type": "gpt_neox", **_SIZES}
_MISTRAL = {"model_type": "mistral", **_SIZES, "num_key_value_heads": 2, "head_dim": 24}
_QWEN2 = {"model_type": "qwen2", **_SIZES, "num_key_value_heads": 2}
_WINDOWS = {"num_hidden_layers": 3, "use_sliding_window": True, "max_window_layers": 1, "sliding_window": 5}
_GEMMA = {**_SIZES, "num_key_value_heads": 2, "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 7}
_GEMMA2 = {"model_type": "gemma2", **_GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0}
_UNCAPPED = {"attn_logit_softcapping": None, "final_logit_softcapping": None, "tie_word_embeddings": False}
_GEMMA3 = {"model_type": "gemma3_text", **_GEMMA, "layer_types": ["full_attention", "sliding_attention"]}
_TWO_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
_OLMO2 = {"model_type": "olmo2", **_SIZES, "num_key_value_heads": 2}
_LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
_YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32}
# Longer than the trees of the tests, shorter than their texts: both sides of the limit are computed.
_LIMIT = 20
_DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
_PHI3 = {"model_type": "phi3", **_SIZES, "num_key_value_heads": 2, "pad_token_id": 0}
_LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.25, 1.5, 2.0, 2.5, 3.0],
    "long_factor": [2.0, 3.0, 4.5, 7.0, 11.0, 16.0],
}
_PHI4_MINI = {**_PHI3, "tie_word_embeddings": True, "partial_rotary_factor": 0.75, "rope_parameters": _LONG_ROPE}
_PHI = {"model_type": "phi", **_SIZES, "num_key_value_heads": 2}
_GRANITE = {"model_type": "granite", **_SIZES, "num_key_value_heads": 2, "tie_word_embeddings": True}
_MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.125,
    "residual_multiplier": 0.5,
    "logits_scaling": 0.25,
}
_SMOLLM3 = {"model_type": "smollm3", **_SIZES, "num_key_value_heads": 2, "pad_token_id": 0}
_NO_ROPE = {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 6}
_STABLELM = {"model_type": "stablelm", **_SIZES, "num_key_value_heads": 2}

# Every feature that a family can have is present in one variant and absent from another.
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "llama": _LLAMA,
    "llama_tied": {**_LLAMA, "tie_word_embeddings": True},
    "llama_bias": {**_LLAMA, "attention_bias": True, "mlp_bias": True},
    "llama_wide_heads": {**_LLAMA, "head_dim": 24, "num_key_value_heads": 4},
    "llama_llama3_rope": {**_LLAMA, "rope_parameters": LLAMA3_ROPE},
    "llama_linear_rope": {**_LLAMA, "rope_parameters": _LINEAR_ROPE},
    "llama_yarn_rope": {**_LLAMA, "rope_parameters": _YARN_ROPE},
    "llama_dynamic_rope": {**_LLAMA, "rope_parameters": _DYNAMIC_ROPE, "max_position_embeddings": _LIMIT},
    "llama_gelu_tanh": {**_LLAMA, "hidden_act": "gelu_pytorch_tanh"},
    "qwen3": {**_QWEN3, "tie_word_embeddings": True},
    "qwen3_bias": {**_QWEN3, "attention_bias": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "mistral": {**_MISTRAL, "sliding_window": 7},
    "qwen2": _QWEN2,
    "qwen2_windows": {**_QWEN2, **_WINDOWS},
    "gemma2": _GEMMA2,
    "gemma2_uncapped": {**_GEMMA2, **_UNCAPPED, "attention_bias": True},
    "gemma3": {**_GEMMA3, "rope_parameters": _TWO_ROPES},
    "olmo2": {**_OLMO2, "attention_bias": True},
    "phi": _PHI,
    "phi3": {**_PHI3, "sliding_window": 7},
    "phi3_longrope": {**_PHI4_MINI, "original_max_position_embeddings": _LIMIT},
    "phi3_longrope_short": {**_PHI4_MINI, "original_max_position_embeddings": 2 * _LIMIT},
    "granite": {**_GRANITE, **_MULTIPLIERS},
    "smollm3": {**_SMOLLM3, **_NO_ROPE},
    "stablelm": {**_STABLELM, "use_qkv_bias": True},
    "stablelm_parallel": {**_STABLELM, "use_parallel_residual": True},
    "gpt_neox": {**_NEOX, "rotary_pct": 0.25},
    "gpt_neox_sequential": {**_NEOX, "rotary_pct": 1.0, "use_parallel_residual": False},
    "gpt_neox_relu": {**_NEOX, "hidden_act": "relu"},
    "gpt_neox_tied": {**_NEOX, "rotary_pct": 0.5, "attention_bias": False, "tie_word_embeddings": True},
}

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GENERATION = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "eos_token_id": [2, 1]}
_TEXT = "The quick brown fox jumps over 13 lazy dogs; in 2024 it's still jumping, isn't it? Ünïcödé works too."


@pytest.fixture(scope="session", autouse=True)
def _cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps lowered graphs and remembered verifications out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGEKIT_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def tiny_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a byte-level BPE tokenizer of `VOCABULARY` tokens and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT] * 3, trainer)
    assert tokenizer.get_vocab_size() == VOCABULARY
    wrap: Any = PreTrainedTokenizerFast
    wrapped = wrap(tokenizer_object=tokenizer, bos_token=SPECIAL_TOKENS[0], eos_token=SPECIAL_TOKENS[2])
    wrapped.chat_template = CHAT_TEMPLATE
    directory = tmp_path_factory.mktemp("tokenizer")
    wrapped.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> MakeCheckpoint:
    """Makes a checkpoint of a config: a directory as `save_pretrained` writes it."""

    def make(config: Mapping[str, Any]) -> Path:
        directory = tmp_path_factory.mktemp(config["model_type"])
        _write_checkpoint(config, directory, tiny_tokenizer)
        return directory

    return make


@pytest.fixture(scope="session")
def tiny_checkpoint(make_checkpoint: MakeCheckpoint) -> TinyCheckpoint:
    """Makes the checkpoint of a variant, once. Do not change it."""
    made: dict[str, Path] = {}

    def make(variant: str) -> Path:
        if variant not in made:
            made[variant] = make_checkpoint(VARIANTS[variant])
        return made[variant]

    return make


@pytest.fixture(scope="session")
def tiny_llama(tiny_checkpoint: TinyCheckpoint) -> Path:
    """A Llama with grouped heads and a head of its own."""
    return tiny_checkpoint("llama")


@pytest.fixture(scope="session", params=VARIANTS)
def every_tiny_checkpoint(request: pytest.FixtureRequest, tiny_checkpoint: TinyCheckpoint) -> Path:
    """Runs a test for every variant."""
    return tiny_checkpoint(request.param)


@pytest.fixture(scope="session")
def hugging_face() -> HuggingFaceModel:
    """Loads a checkpoint directory with transformers, in float32: the oracle."""
    loaded: dict[Path, PreTrainedModel] = {}

    def load(directory: Path) -> PreTrainedModel:
        import torch
        from transformers import AutoModelForCausalLM

        # A dynamic rope keeps the frequencies of the longest text that it has seen, so such a model is loaded afresh.
        if directory not in loaded or loaded[directory].config.rope_parameters.get("rope_type") == "dynamic":
            loaded[directory] = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        return loaded[directory]

    return load


@pytest.fixture
def token_ids() -> npt.NDArray[np.int64]:
    """Two sequences of 24 tokens, shape (2, 24), int64."""
    return np.random.default_rng(7).integers(len(SPECIAL_TOKENS), VOCABULARY, (2, 24))


@pytest.fixture(scope="session")
def tiny_gguf(
    tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: TinyCheckpoint, hugging_face: HuggingFaceModel
) -> TinyGguf:
    """Writes a variant as GGUF, once, as llama.cpp's converter does: ``tiny_gguf("llama", "Q4_1")``.

    Matrices get the named type, vectors F32. Do not change the file.
    """
    from tests.gguf_files import write_gguf

    made: dict[tuple[str, str], Path] = {}

    def make(variant: str, kind: str) -> Path:
        if (variant, kind) not in made:
            directory = tiny_checkpoint(variant)
            path = tmp_path_factory.mktemp("gguf") / f"{variant}.{kind}.gguf"
            write_gguf(hugging_face(directory), directory, path, {"*": kind})
            made[variant, kind] = path
        return made[variant, kind]

    return make


def _write_checkpoint(config: Mapping[str, Any], directory: Path, tokenizer: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values = dict(config)
    make: Any = AutoModelForCausalLM.from_config
    model = make(AutoConfig.for_model(values.pop("model_type"), **values))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.copy_(0.3 * noise + (0 if name.endswith("bias") else 1))
            else:
                parameter.copy_(noise * (1 if "embed" in name else parameter.shape[1] ** -0.5))
    model.save_pretrained(directory)
    (directory / "generation_config.json").write_text(json.dumps(GENERATION))
    for file in tokenizer.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
