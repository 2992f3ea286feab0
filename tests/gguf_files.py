"""Writes models as GGUF files, as llama.cpp's converter and its quantizer do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, TokenType
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize, quantize

from tests.gguf_models import ARCHITECTURES, add_model_metadata, model_tensors
from tests.tiny_configs import SIZES

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# Rows of whole blocks of 256, which the tiny models of conftest.py are too narrow for.
WIDE_LLAMA: Mapping[str, Any] = {
    "model_type": "llama",
    **SIZES,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_key_value_heads": 2,
    "bos_token_id": 0,
}

# Where the float16 numbers of a block stand that the gguf package cannot quantize to, and how large they are relative
# to each other: so that values lie about zero when the other bytes are random.
_SCALES: Mapping[str, Mapping[int, float]] = {
    "Q2_K": {80: 1.0, 82: 1.5},
    "Q3_K": {108: 1.0},
    "Q4_K": {0: 1.0, 2: 7.5},
    "Q5_K": {0: 1.0, 2: 15.5},
    "Q6_K": {208: 1.0},
    "IQ4_NL": {0: 1.0},
    "IQ4_XS": {0: 1.0},
}


def random_blocks(kind: str, shape: tuple[int, int], deviation: float, seed: int) -> npt.NDArray[np.uint8]:
    """Makes the bytes of a matrix with random codes and scales.

    Args:
        kind: A type of `_SCALES`.
        shape: (rows, columns) of the matrix; columns are whole blocks.
        deviation: Standard deviation of its values.
        seed: Of the random numbers.

    Returns:
        shape (rows, bytes of a row), uint8.
    """
    elements, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (shape[0], shape[1] // elements, size), np.uint8)
    scales = {start: rng.uniform(0.5, 1.5, blocks.shape[:2]) * factor for start, factor in _SCALES[kind].items()}

    def set_scales(factor: float) -> npt.NDArray[np.uint8]:
        for start, scale in scales.items():
            blocks[..., start : start + 2] = (scale * factor).astype(np.float16)[..., None].view(np.uint8)
        return blocks.reshape(shape[0], -1)

    unscaled = dequantize(set_scales(1.0), GGMLQuantizationType[kind])
    return set_scales(deviation / float(unscaled.std()))


def write_gguf(model: PreTrainedModel, directory: Path, path: Path, types: Mapping[str, str]) -> None:
    """Writes a model as a GGUF file.

    A matrix in a type that the gguf package cannot quantize to gets random blocks that are spread like its values.

    Args:
        model: The model.
        directory: Its checkpoint, for the tokenizer.
        path: The file to write.
        types: Types of matrices, such as `Q4_K`, by glob pattern of GGUF tensor names, such as ``blk.*.ffn_down.*``;
            the first that matches. Vectors are F32.
    """
    config: Any = model.config
    writer = GGUFWriter(path, ARCHITECTURES[config.model_type])
    add_model_metadata(writer, config)
    _add_gguf_tokenizer(writer, directory)
    for seed, (stored, data) in enumerate(model_tensors(model)):
        kind = "F32" if data.ndim == 1 else next(kind for glob, kind in types.items() if fnmatchcase(stored, glob))
        writer.add_tensor(stored, _encoded(data, kind, seed), raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def rewrite_gguf(source: Path, path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> Path:
    """Copies a file of floats with other metadata (None removes a key) and tensors (None removes one)."""
    reader, values = GGUFReader(source), dict(metadata)
    architecture = values.pop("general.architecture", reader.fields["general.architecture"].contents())
    writer = GGUFWriter(path, architecture)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture" and key not in values:
            writer.add_key_value(key, field.contents(), field.types[0], *field.types[1:2])
    for key, value in values.items():
        if value is not None:
            kind = GGUFValueType.get_type(value)
            writer.add_key_value(key, value, GGUFValueType.UINT32 if kind is GGUFValueType.INT32 else kind)
    stored = {tensor.name: np.array(tensor.data) for tensor in reader.tensors} | dict(tensors)
    for name, data in stored.items():
        if data is not None:
            writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _encoded(data: npt.NDArray[np.float32], kind: str, seed: int) -> npt.NDArray[Any]:
    if kind in _SCALES:
        return random_blocks(kind, (data.shape[0], data.shape[1]), float(data.std()), seed)
    encoded: npt.NDArray[Any] = quantize(data, GGMLQuantizationType[kind])
    return encoded


def _add_gguf_tokenizer(writer: GGUFWriter, directory: Path) -> None:
    tokenizer = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    special = {token["content"] for token in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if token in special else TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template((directory / "chat_template.jinja").read_text(encoding="utf-8"))
