"""Quantized graphs against the reference decoder run on the blocks that they store, read back with the onnx package.

So the portable graph must compute exactly with what is stored. The lowered graph differs from it by the rounding of
activations to int8; with that off, the rest of the lowering (packing, offsets, merged matrices) must be exact as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from onnx import numpy_helper

from edgekit.bundle import Bundle
from edgekit.checkpoint import open_checkpoint
from edgekit.compress.decoder import Decoder
from edgekit.export.exporter import write_graph
from edgekit.export.lowering import ort_cpu
from edgekit.export.storage_plan import QuantizationOptions, plan_storage
from edgekit.export.weights import Storage
from edgekit.spec import DecoderSpec

TOLERANCE = 1e-4
# Root mean square, relative to that of the logits. Rounding activations to int8 costs 0.7 % to 1.7 % here, the more
# the larger the blocks; a wrong scale or a transposed block costs 30 % and more.
INT8_ACTIVATION_TOLERANCE = 0.025

FloatArray = npt.NDArray[np.float32]

FORMATS = [
    {"precision": precision, "scheme": scheme, "block_size": block_size}
    for precision, scheme, block_size in product(("int4", "int8"), ("symmetric", "affine"), (16, 32, 64, 128))
]
# Inputs are 64 and 96 wide (128 with the heads of qwen3), so that blocks of 64 and 128 end in padding.
CASES: list[tuple[str, dict[str, Any]]] = [
    *product(("llama", "qwen3", "gpt_neox"), FORMATS),
    *product(
        ("llama_tied", "llama_bias", "llama_wide_heads", "qwen3_bias", "gpt_neox_tied"),
        ({"precision": "int4", "block_size": 64}, {"precision": "int8", "scheme": "affine", "block_size": 128}),
    ),
    ("llama", {"precision": "fp16"}),
    ("gpt_neox_sequential", {"precision": "fp16"}),
    # Projections of one activation that are stored differently: merging them would be wrong.
    ("llama", {"keep": ("*.k_proj",)}),
    ("llama", {"keep": ("*.v_proj", "*.gate_proj")}),
    ("llama_bias", {"keep": ("*.q_proj", "*.up_proj", "*.o_proj"), "scheme": "symmetric"}),
    ("qwen3_bias", {"keep": ("layers.0.*",), "precision": "int8"}),
    ("qwen3", {"keep": ("embed_tokens",)}),
    ("llama", {"keep": ("lm_head", "*.down_proj"), "block_size": 128}),
    ("llama_tied", {"keep": ("embed_tokens", "layers.1.*")}),
    ("gpt_neox", {"keep": ("*.q_proj", "*.k_proj", "*.v_proj")}),
]


@dataclass(frozen=True)
class QuantizedGraph:
    path: Path
    spec: DecoderSpec
    storage: Mapping[str, Storage]


def _case(case: tuple[str, dict[str, Any]]) -> str:
    variant, options = case
    return " ".join([variant, *(str(value) for value in options.values())])


@pytest.fixture(params=CASES, ids=_case)
def quantized(request: pytest.FixtureRequest, tiny_checkpoint: Any, tmp_path: Path) -> QuantizedGraph:
    variant, options = request.param
    with open_checkpoint(tiny_checkpoint(variant)) as checkpoint:
        storage = plan_storage(checkpoint, QuantizationOptions(**options))
        write_graph(checkpoint, storage, tmp_path, lambda *_: None)
    return QuantizedGraph(tmp_path / "model.onnx", checkpoint.spec, storage)


def _initializers(graph: Path) -> dict[str, npt.NDArray[Any]]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(graph).graph.initializer}


def _stored_values(graph: Path, spec: DecoderSpec) -> dict[str, FloatArray]:
    """What a bundle stores, as plain matrices by canonical name."""
    parts = _initializers(graph)
    values = {}
    for name, shape in spec.tensor_shapes().items():
        if name in parts:
            values[name] = parts[name].astype(np.float32).T
            continue
        codes, scale = (parts[f"{name}.{part}"].astype(np.float32) for part in ("codes", "scale"))
        block_size = len(codes) // len(scale)
        offset = parts.get(f"{name}.offset", np.zeros(1, np.float16)).astype(np.float32)
        matrix = codes.reshape(-1, block_size, codes.shape[1]) * scale[:, None] + offset.reshape(
            -1, 1, offset.shape[-1]
        )
        values[name] = matrix.reshape(codes.shape)[: shape[1]].T
    return values


def _reference(graph: Path, spec: DecoderSpec, token_ids: npt.NDArray[np.int64]) -> FloatArray:
    decoder = Decoder(spec)
    values = _stored_values(graph, spec)
    decoder.load_state_dict({name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in values.items()})
    with torch.no_grad():
        logits: FloatArray = decoder(torch.from_numpy(token_ids)).logits.numpy()
    return logits


def test_the_graphs_compute_with_what_is_stored(
    quantized: QuantizedGraph, load_graph_of: Any, token_ids: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = _reference(quantized.path, quantized.spec, token_ids)

    def run(form: str) -> FloatArray:
        graph = load_graph_of(quantized.path, quantized.spec, form)
        logits: FloatArray = np.concatenate([graph.step(token_ids[:, :15]), graph.step(token_ids[:, 15:])], axis=1)
        return logits

    np.testing.assert_allclose(run("portable"), expected, atol=TOLERANCE, rtol=0)
    error = np.sqrt(np.mean(np.square(run("lowered") - expected)) / np.mean(np.square(expected)))
    assert error < INT8_ACTIVATION_TOLERANCE
    monkeypatch.setattr(ort_cpu, "INT8_ACTIVATIONS", 0)
    np.testing.assert_allclose(run("lowered"), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("precision", ["int4", "int8"])
@pytest.mark.parametrize("scheme", ["symmetric", "affine"])
def test_stored_values_are_near_the_weights(precision: str, scheme: str, tiny_llama: Path, export_tiny: Any) -> None:
    bundle: Bundle = export_tiny(tiny_llama, precision=precision, scheme=scheme)
    bound = {"int4": 0.1, "int8": 0.006}
    stored = _stored_values(bundle.file("model.onnx"), bundle.manifest.spec)
    with open_checkpoint(tiny_llama) as checkpoint:
        for name, value in stored.items():
            weight = checkpoint.tensor(name)
            assert isinstance(weight, np.ndarray)
            kept = bundle.manifest.storage.get(name, "fp32").split()[0]
            error = np.linalg.norm(value - weight) / np.linalg.norm(weight)
            assert error <= bound.get(kept, 0.0), name


@pytest.mark.parametrize("variant", ["llama", "llama_tied"])
def test_a_tied_embedding_is_stored_once(variant: str, tiny_checkpoint: Any, export_tiny: Any) -> None:
    bundle: Bundle = export_tiny(tiny_checkpoint(variant), precision="int4")
    parts = _initializers(bundle.file("model.onnx"))
    tables = [name for name in parts if name.startswith(("embed_tokens", "lm_head"))]
    expected = [f"{table}.weight.{part}" for table in ("embed_tokens", "lm_head") for part in ("codes", "scale")]
    assert sorted(tables) == sorted(expected[:2] if variant == "llama_tied" else expected)
    size = bundle.manifest.files["model.onnx.data"].size
    external = onnx.load(bundle.file("model.onnx"), load_external_data=False).graph.initializer
    lengths = [int(entry.value) for tensor in external for entry in tensor.external_data if entry.key == "length"]
    # Nothing but the listed tensors and their alignment; the table alone is 22 KB.
    assert sum(lengths) <= size <= sum(lengths) + 4096 * len(lengths)
    table = 320 * 64 + 320 * 2 * 2
    matrices = 2 * (64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 64 * 96)
    blocks = matrices // 32
    norms = 5 * 64 * 4
    assert sum(lengths) == (1 if variant == "llama_tied" else 2) * table + matrices // 2 + blocks * 4 + norms


def test_projections_of_one_activation_become_one_product(
    tiny_checkpoint: Any, export_tiny: Any, load_graph_of: Any
) -> None:
    for variant, options, count in (("llama", {}, 9), ("gpt_neox", {}, 9), ("llama", {"keep": ("*.k_proj",)}, 9)):
        bundle: Bundle = export_tiny(tiny_checkpoint(variant), precision="int4", **options)
        lowered = load_graph_of(bundle.file("model.onnx"), bundle.manifest.spec, "lowered").path
        nodes = onnx.load(lowered, load_external_data=False).graph.node
        assert sum(node.op_type == "MatMulNBits" for node in nodes) == count


GGUF_KINDS = ("Q4_0", "Q4_1", "Q8_0")
GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _unpermuted(values: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Undoes `LlamaModel.permute` of llama.cpp's converter."""
    return values.reshape(heads, len(values) // heads // 2, 2, -1).swapaxes(1, 2).reshape(values.shape)


def _gguf_codes(path: Path, name: str, kind: str) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Values (rows, columns), scales and minima (rows, blocks) of a tensor, by the gguf package's dequantize."""
    tensor = next(tensor for tensor in GGUFReader(path).tensors if tensor.name == name)
    values = dequantize(tensor.data, tensor.tensor_type)
    raw = np.ascontiguousarray(tensor.data).reshape(len(values), values.shape[1] // 32, -1)
    halves = np.ascontiguousarray(raw[..., :4]).view(np.float16).astype(np.float32)
    minimum = halves[..., 1] if kind == "Q4_1" else np.zeros_like(halves[..., 0])
    return values, halves[..., 0], minimum


@pytest.mark.parametrize("kind", GGUF_KINDS)
@pytest.mark.parametrize("variant", ["llama", "qwen3"])
@pytest.mark.parametrize("precision", ["int4", "int8"])
def test_the_codes_of_a_gguf_are_those_of_the_bundle(
    variant: str, kind: str, precision: str, tiny_gguf: Any, export_tiny: Any
) -> None:
    path = tiny_gguf(variant, kind)
    bundle: Bundle = export_tiny(path, precision=precision)
    parts = _initializers(bundle.file("model.onnx"))
    names = {f"layers.1.{ours}": f"blk.1.{theirs}" for ours, theirs in GGUF_NAMES.items()}
    for ours, theirs in {**names, "embed_tokens": "token_embd"}.items():
        values, scale, minimum = _gguf_codes(path, f"{theirs}.weight", kind)
        wide = [np.repeat(part, 32, axis=1) for part in (scale, minimum)]
        codes = np.round((values - wide[1]) / wide[0]).astype(np.int8) - (8 if kind == "Q4_1" else 0)
        expected: list[npt.NDArray[Any]] = [codes, scale]
        if kind == "Q4_1":
            expected.append((minimum + 8 * scale).astype(np.float16))
        if variant == "llama" and ours.endswith(("q_proj", "k_proj")):
            expected = [_unpermuted(part, 4 if ours.endswith("q_proj") else 2) for part in expected]
        stored = [parts[f"{ours}.weight.{part}"] for part in ("codes", "scale", "offset")[: len(expected)]]
        for part, wanted in zip(stored, expected, strict=True):
            np.testing.assert_array_equal(part.T.astype(np.float32), wanted.astype(np.float32))
        assert bundle.manifest.storage[f"{ours}.weight"].startswith(
            "int4" if precision == "int4" and kind != "Q8_0" and ours != "embed_tokens" else "int8"
        )


@pytest.mark.parametrize("kind", GGUF_KINDS)
@pytest.mark.parametrize("variant", ["llama", "llama_bias", "qwen3"])
def test_a_gguf_bundle_has_the_logits_that_transformers_computes_from_the_file(
    variant: str, kind: str, tiny_gguf: Any, tiny_checkpoint: Any, export_tiny: Any, load_graph: Any, token_ids: Any
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    path = tiny_gguf(variant, kind)
    bundle: Bundle = export_tiny(path, precision="int4")
    # The config apart: transformers does not see biases and head widths in a GGUF file.
    config = AutoConfig.from_pretrained(tiny_checkpoint(variant))
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, config=config, dtype=torch.float32)
    with torch.no_grad():
        expected = model(torch.from_numpy(token_ids)).logits.numpy()
    got = load_graph(bundle, "portable").step(token_ids)
    # The offsets of Q4_1 blocks are rounded to float16.
    np.testing.assert_allclose(got, expected, atol=1e-2 if kind == "Q4_1" else 2e-4, rtol=0)
    assert bundle.manifest.parity.source.max_kl_divergence == 1e-3


@pytest.mark.parametrize(("kind", "options"), [("Q8_0", {"scheme": "symmetric"}), ("Q4_0", {}), ("Q4_1", {})])
def test_requantizing_a_gguf_rounds_its_values(
    kind: str, options: dict[str, Any], tiny_gguf: Any, export_tiny: Any
) -> None:
    path = tiny_gguf("llama", kind)
    bundle: Bundle = export_tiny(path, precision="int4", block_size=64, requantize=True, **options)
    stored = _stored_values(bundle.file("model.onnx"), bundle.manifest.spec)["layers.0.mlp.up_proj.weight"]
    values, _, _ = _gguf_codes(path, "blk.0.ffn_up.weight", kind)
    error = np.linalg.norm(stored - values) / np.linalg.norm(values)
    assert 0.01 < error < 0.12
    assert bundle.manifest.parity.source.max_kl_divergence == 1.0
