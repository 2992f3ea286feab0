from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize, quantize

from edgekit.blocks import QuantizedBlocks
from edgekit.checkpoint import open_checkpoint
from edgekit.checkpoint.base import BlockFormat
from edgekit.checkpoint.gguf_container import read_container
from edgekit.checkpoint.gguf_tensors import read_tensor
from edgekit.compress.decoder import stream_logits
from edgekit.errors import CorruptArtifactError
from edgekit.families import FAMILIES

TinyCheckpoint: TypeAlias = Callable[[str], Path]
TinyGguf: TypeAlias = Callable[[str, str], Path]
HuggingFaceModel: TypeAlias = Callable[[Path], Any]
Tokens: TypeAlias = npt.NDArray[np.int64]

# GGUF has no key for the activation: a file's is always that of its architecture.
VARIANTS = (
    "llama",
    "llama_tied",
    "llama_bias",
    "llama_wide_heads",
    "llama_llama3_rope",
    "llama_linear_rope",
    "qwen3",
    "qwen3_bias",
    "gpt_neox",
    "gpt_neox_sequential",
    "gpt_neox_tied",
)
# Types of blocks of 256 are in test_gguf_types.py.
DENSE, BLOCKS = ("F32", "F16", "BF16", "MXFP4"), ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")


def _stored(path: Path, name: str) -> npt.NDArray[np.float32]:
    tensor = next(tensor for tensor in GGUFReader(path).tensors if tensor.name == name)
    values: npt.NDArray[np.float32] = dequantize(tensor.data, tensor.tensor_type)
    return values


def _values(weight: npt.NDArray[np.float32] | QuantizedBlocks) -> npt.NDArray[np.float32]:
    return weight.dequantize() if isinstance(weight, QuantizedBlocks) else weight


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_float_file_gives_the_logits_of_the_model_it_was_made_from(
    variant: str,
    tiny_gguf: TinyGguf,
    tiny_checkpoint: TinyCheckpoint,
    hugging_face: HuggingFaceModel,
    token_ids: Tokens,
) -> None:
    with open_checkpoint(tiny_gguf(variant, "F32")) as checkpoint:
        logits = stream_logits(checkpoint, token_ids)
    with torch.no_grad():
        wanted = hugging_face(tiny_checkpoint(variant))(torch.from_numpy(token_ids)).logits.numpy()
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=2e-4)


@pytest.mark.parametrize("kind", [*DENSE, *BLOCKS])
@pytest.mark.parametrize("variant", ["llama", "llama_tied", "llama_bias", "qwen3"])
def test_a_file_gives_the_logits_that_transformers_computes_from_it(
    variant: str, kind: str, tiny_gguf: TinyGguf, tiny_checkpoint: TinyCheckpoint, token_ids: Tokens
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    path = tiny_gguf(variant, kind)
    with open_checkpoint(path) as checkpoint:
        logits = stream_logits(checkpoint, token_ids)
    # The config apart: transformers does not see biases and head widths in a GGUF file.
    config = AutoConfig.from_pretrained(tiny_checkpoint(variant))
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, config=config, dtype=torch.float32)
    with torch.no_grad():
        wanted = model(torch.from_numpy(token_ids)).logits.numpy()
    # The offsets of affine blocks are rounded to float16.
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=2e-3 if kind in ("Q4_1", "Q5_1") else 2e-4)


@pytest.mark.parametrize("kind", [*DENSE, *BLOCKS])
@pytest.mark.parametrize("variant", ["llama", "qwen3", "gpt_neox"])
def test_every_matrix_has_the_values_of_the_file(variant: str, kind: str, tiny_gguf: TinyGguf) -> None:
    path = tiny_gguf(variant, kind)
    gguf_name = {
        "layers.1.self_attn.q_proj": "blk.1.attn_q",
        "layers.1.self_attn.k_proj": "blk.1.attn_k",
        "layers.1.self_attn.v_proj": "blk.1.attn_v",
        "layers.1.self_attn.o_proj": "blk.1.attn_output",
        "layers.1.mlp.down_proj": "blk.1.ffn_down",
        "embed_tokens": "token_embd",
        "lm_head": "output",
    }
    if variant == "gpt_neox":
        gguf_name |= {f"layers.1.self_attn.{name}_proj": "blk.1.attn_qkv" for name in "qkv"}
    with open_checkpoint(path) as checkpoint:
        sources = checkpoint.family.sources(checkpoint.spec, "gguf")
        for name, stored_name in gguf_name.items():
            if f"{name}.weight" not in checkpoint.spec.tensor_shapes():
                continue
            weight, rows = checkpoint.tensor(f"{name}.weight"), sources[f"{name}.weight"].rows
            assert isinstance(weight, QuantizedBlocks) == (kind in BLOCKS)
            wanted = _stored(path, f"{stored_name}.weight")
            # Rounding an offset to float16 moves a value by at most half a unit in the offset's last place.
            tolerance = 2.0**-11 * np.abs(weight.offset).max() if _has_offset(weight) else 0  # type: ignore[union-attr, arg-type]
            wanted = wanted if rows is None else wanted[rows]
            np.testing.assert_allclose(_values(weight), wanted, rtol=1e-6, atol=tolerance + 1e-7)


def _has_offset(weight: npt.NDArray[np.float32] | QuantizedBlocks) -> bool:
    return isinstance(weight, QuantizedBlocks) and weight.offset is not None


def test_rows_of_a_llama_are_put_back_as_transformers_had_them(tiny_gguf: TinyGguf, tiny_llama: Path) -> None:
    with open_checkpoint(tiny_gguf("llama", "F32")) as gguf, open_checkpoint(tiny_llama) as original:
        for projection in ("q_proj", "k_proj", "v_proj"):
            name = f"layers.0.self_attn.{projection}.weight"
            np.testing.assert_array_equal(_values(gguf.tensor(name)), _values(original.tensor(name)))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_quantizing_the_values_again_gives_the_bytes_of_the_file(kind: str, tiny_gguf: TinyGguf) -> None:
    path = tiny_gguf("llama", kind)
    tensor = next(tensor for tensor in GGUFReader(path).tensors if tensor.name == "blk.0.ffn_up.weight")
    weight = read_tensor(read_container(path), "blk.0.ffn_up.weight")
    assert isinstance(weight, QuantizedBlocks)
    assert weight.codes.dtype == np.int8
    assert (weight.bits, weight.block_size) == (8 if kind == "Q8_0" else 4, 32)
    assert weight.scheme == ("affine" if kind == "Q4_1" else "symmetric")
    raw = tensor.data.reshape(tensor.data.shape[0], -1, {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}[kind])
    np.testing.assert_array_equal(weight.scale, raw[..., :2].copy().view(np.float16)[..., 0])
    codes = weight.codes.reshape(*weight.scale.shape, 32)
    if kind == "Q8_0":
        np.testing.assert_array_equal(codes.view(np.uint8), raw[..., 2:])
    else:
        packed = (codes + 8).astype(np.uint8)
        np.testing.assert_array_equal(packed[..., :16] | packed[..., 16:] << 4, raw[..., -16:])


def test_planted_blocks_are_read_by_value(planted: Callable[[npt.NDArray[Any], str], Path]) -> None:
    nibbles = np.arange(16, dtype=np.uint8) | (15 - np.arange(16, dtype=np.uint8)) << 4
    header = np.array([0.5, -3.0], np.float16).view(np.uint8)
    weight = read_tensor(read_container(planted(np.concatenate([header, nibbles])[None], "Q4_1")), "w")
    assert isinstance(weight, QuantizedBlocks)
    assert weight.offset is not None
    np.testing.assert_array_equal(weight.codes, [[*range(-8, 8), *range(7, -9, -1)]])
    np.testing.assert_array_equal(weight.offset, [[1.0]])
    np.testing.assert_array_equal(weight.dequantize(), 0.5 * np.array([[*range(16), *range(15, -1, -1)]]) - 3)


@pytest.mark.parametrize(
    ("kind", "header"),
    [("Q4_1", (8000.0, 60000.0)), ("Q4_1", (np.inf, 0)), ("Q4_0", (np.nan,)), ("Q8_0", (np.inf,)), ("F16", (np.nan,))],
)
def test_values_that_are_not_finite_are_refused(
    kind: str, header: tuple[float, ...], tiny_gguf: TinyGguf, tmp_path: Path
) -> None:
    source = tiny_gguf("llama", kind)
    contents, path = bytearray(source.read_bytes()), tmp_path / "infinite.gguf"
    offset = read_container(source).tensors["blk.1.ffn_up.weight"].offset
    contents[offset : offset + 2 * len(header)] = np.array(header, np.float16).tobytes()
    path.write_bytes(contents)
    with open_checkpoint(path) as checkpoint:
        assert np.isfinite(_values(checkpoint.tensor("layers.0.mlp.up_proj.weight"))).all()
        with pytest.raises(CorruptArtifactError, match=r"infinite or not numbers in tensor 'blk\.1\.ffn_up\.weight'"):
            checkpoint.tensor("layers.1.mlp.up_proj.weight")


@pytest.mark.parametrize("kind", [*DENSE, *BLOCKS])
def test_rows_are_taken_without_the_others(planted: Callable[[npt.NDArray[Any], str], Path], kind: str) -> None:
    values = np.random.default_rng(0).standard_normal((6, 64)).astype(np.float32)
    container = read_container(planted(quantize(values, GGMLQuantizationType[kind]), kind))
    rows = np.array([4, 0, 4])
    np.testing.assert_array_equal(
        _values(read_tensor(container, "w", rows)), _values(read_tensor(container, "w"))[rows]
    )


@pytest.mark.parametrize(
    ("kind", "matrix"),
    [
        ("F16", None),
        ("Q8_0", BlockFormat(bits=8, block_size=32, scheme="symmetric")),
        ("Q4_0", BlockFormat(bits=4, block_size=32, scheme="symmetric")),
        ("Q4_1", BlockFormat(bits=4, block_size=32, scheme="affine")),
    ],
)
def test_the_format_of_blocks_is_known_without_reading_them(
    kind: str, matrix: BlockFormat | None, tiny_gguf: TinyGguf
) -> None:
    with open_checkpoint(tiny_gguf("llama", kind)) as checkpoint:
        assert checkpoint.block_format("layers.1.self_attn.k_proj.weight") == matrix
        assert checkpoint.block_format("embed_tokens.weight") == matrix
        assert checkpoint.block_format("norm.weight") is None


def test_a_closed_file_is_not_read(tiny_gguf: TinyGguf) -> None:
    checkpoint = open_checkpoint(tiny_gguf("llama", "Q4_0"))
    weight = checkpoint.tensor("layers.0.mlp.up_proj.weight")
    checkpoint.close()
    assert np.isfinite(_values(weight)).all()
    with pytest.raises(ValueError, match="is closed"):
        checkpoint.tensor("layers.0.mlp.up_proj.weight")


def test_every_architecture_of_a_family_is_one_of_ggufs() -> None:
    from gguf import MODEL_ARCH_NAMES

    names = {name for family in FAMILIES for name in family.gguf_architectures}
    assert names <= set(MODEL_ARCH_NAMES.values())
