"""Tiny models of every family, with random weights in which everything matters, for the tests of all folders.

A model is asked for by the name of its variant, a key of `VARIANTS`: ``tiny_checkpoint("llama_bias")``.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest

if TYPE_CHECKING:
    from gguf import GGUFWriter
    from transformers import PreTrainedModel

# Before anything imports them: no test may reach a hub, and progress bars drown what a failed test says.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
# Threads that share tiny products only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

TinyCheckpoint: TypeAlias = Callable[[str], Path]
TinyGguf: TypeAlias = Callable[[str, str], Path]
HuggingFaceModel: TypeAlias = Callable[[Path], "PreTrainedModel"]

VOCABULARY = 320
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
_LLAMA = {"model_type": "llama", **_SIZES, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
_QWEN3 = {"model_type": "qwen3", **_SIZES, "num_key_value_heads": 2, "head_dim": 32}
_NEOX = {"model_type": "gpt_neox", **_SIZES}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}

# Every feature that a family can have is present in one variant and absent from another.
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "llama": _LLAMA,
    "llama_tied": {**_LLAMA, "tie_word_embeddings": True},
    "llama_bias": {**_LLAMA, "attention_bias": True, "mlp_bias": True},
    "llama_wide_heads": {**_LLAMA, "head_dim": 24, "num_key_value_heads": 4},
    "llama_llama3_rope": {**_LLAMA, "rope_parameters": _LLAMA3_ROPE},
    "llama_linear_rope": {**_LLAMA, "rope_parameters": _LINEAR_ROPE},
    "llama_gelu_tanh": {**_LLAMA, "hidden_act": "gelu_pytorch_tanh"},
    "qwen3": {**_QWEN3, "tie_word_embeddings": True},
    "qwen3_bias": {**_QWEN3, "attention_bias": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
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
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> TinyCheckpoint:
    """Makes the checkpoint of a variant, once: a directory as `save_pretrained` writes it. Do not change it."""
    made: dict[str, Path] = {}

    def make(variant: str) -> Path:
        if variant not in made:
            made[variant] = tmp_path_factory.mktemp(variant)
            _write_checkpoint(VARIANTS[variant], made[variant], tiny_tokenizer)
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

        if directory not in loaded:
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
    made: dict[tuple[str, str], Path] = {}

    def make(variant: str, kind: str) -> Path:
        if (variant, kind) not in made:
            directory = tiny_checkpoint(variant)
            path = tmp_path_factory.mktemp("gguf") / f"{variant}.{kind}.gguf"
            _write_gguf(hugging_face(directory), directory, path, kind)
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


_GGUF_ARCHITECTURES = {"llama": "llama", "qwen3": "qwen3", "gpt_neox": "gptneox"}


def _write_gguf(model: PreTrainedModel, directory: Path, path: Path, kind: str) -> None:
    from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map
    from gguf.quants import quantize

    config = model.config
    name = _GGUF_ARCHITECTURES[config.model_type]
    architecture = next(key for key, value in MODEL_ARCH_NAMES.items() if value == name)
    names = get_tensor_name_map(architecture, config.num_hidden_layers)
    writer = GGUFWriter(path, name)
    _add_gguf_config(writer, config)
    _add_gguf_tokenizer(writer, directory)
    for hf_name, parameter in model.named_parameters():
        stored = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        assert stored is not None
        data = _gguf_rows(hf_name, parameter.detach().numpy(), config)
        dtype = GGMLQuantizationType.F32 if data.ndim == 1 else GGMLQuantizationType[kind]
        writer.add_tensor(stored, quantize(data, dtype), raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_rows(name: str, data: npt.NDArray[np.float32], config: Any) -> npt.NDArray[np.float32]:
    """The row orders of llama.cpp's `LlamaModel.permute` and `GPTNeoXModel.modify_tensors`."""
    if "query_key_value" in name:
        heads = config.num_attention_heads
        split = data.reshape(heads, 3, config.hidden_size // heads, *data.shape[1:])
        return np.concatenate([split[:, part].reshape(-1, *data.shape[1:]) for part in range(3)])
    if config.model_type != "llama" or not any(part in name for part in ("q_proj", "k_proj")):
        return data
    heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
    return data.reshape(heads, 2, len(data) // heads // 2, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)


def _add_gguf_config(writer: GGUFWriter, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    if config.model_type == "gpt_neox":
        head_dim = config.hidden_size // config.num_attention_heads
        writer.add_rope_dimension_count(int(head_dim * rope["partial_rotary_factor"]))
        writer.add_parallel_residual(config.use_parallel_residual)
        writer.add_layer_norm_eps(config.layer_norm_eps)
        return
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if rope["rope_type"] == "linear":
        from gguf import RopeScalingType

        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", np.array(_llama3_factors(rope, config.head_dim), np.float32))


def _llama3_factors(rope: Mapping[str, Any], width: int) -> list[float]:
    """What llama.cpp's converter makes of Llama 3's rope (`LlamaModel.generate_extra_tensors`)."""
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


def _add_gguf_tokenizer(writer: GGUFWriter, directory: Path) -> None:
    from gguf import TokenType

    tokenizer = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if token in SPECIAL_TOKENS else TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
