"""Faults of other tools in quantizing and in writing files: one test each, named after the fault.

docs/known_faults.md has the whole list. The weights here are multiples of a power of two, few enough that rounding
changes none of them: Hugging Face's own logits are what a quantized graph must give.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
import pytest
import torch
from safetensors.numpy import load_file, save_file

from edgekit.bundle import Bundle
from edgekit.export.lowering import ort_cpu
from tests.tiny_configs import SIZES

TOLERANCE = 1e-4
ODD = {
    "model_type": "llama",
    **SIZES,
    "hidden_size": 72,
    "intermediate_size": 101,
    "num_key_value_heads": 2,
    "head_dim": 22,
}
FORMATS = [
    {"precision": precision, "block_size": block_size, "scheme": scheme}
    for precision, block_size, scheme in (
        ("int4", 16, "affine"),
        ("int4", 32, "symmetric"),
        ("int4", 128, "affine"),
        ("int8", 64, "symmetric"),
        ("int8", 128, "affine"),
    )
]

FloatArray = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.int64]


def _on_a_grid(bits: int) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """Puts both ends of the codes into every 8 inputs, so that every block has them, a short last one too."""
    low, high = -(1 << bits - 1), (1 << bits - 1) - 1

    def place(name: str, weight: torch.Tensor) -> torch.Tensor:
        if weight.ndim == 1:
            return weight
        codes = torch.from_numpy(np.random.default_rng(len(name)).integers(low, high + 1, tuple(weight.shape)))
        codes[:, ::8], codes[:, 3::8] = low, high
        return codes.float() * 2.0 ** -(bits - 1 if "embed" in name else bits + 2)

    return place


def _logits(directory: Path, ids: Tokens) -> FloatArray:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        logits: FloatArray = model(torch.from_numpy(ids)).logits.numpy()
    return logits


def _ids() -> Tokens:
    return np.random.default_rng(5).integers(3, 320, (1, 24))


def _check(bundle: Bundle, expected: FloatArray, load_graph: Any) -> None:
    for form in ("portable", "lowered"):
        graph = load_graph(bundle, form)
        got = np.concatenate([graph.step(_ids()[:, :15]), graph.step(_ids()[:, 15:])], 1)
        np.testing.assert_allclose(got, expected, atol=TOLERANCE * np.abs(expected).max(), rtol=0)


def _nodes(path: Path, kind: str) -> list[Any]:
    return [node for node in onnx.load(path, load_external_data=False).graph.node if node.op_type == kind]


# NVIDIA/Model-Optimizer#23, PR#2320, NVIDIA/TensorRT-LLM#2445
@pytest.mark.parametrize("options", FORMATS, ids=lambda options: " ".join(map(str, options.values())))
def test_a_width_that_the_block_size_does_not_divide_is_padded_and_not_refused(
    options: Mapping[str, Any],
    make_checkpoint: Any,
    edit_weights: Any,
    export_tiny: Any,
    load_graph: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert all(width % options["block_size"] for width in (72, 101, 88))
    monkeypatch.setattr(ort_cpu, "INT8_ACTIVATIONS", 0)  # whose rounding would hide a fault
    directory = edit_weights(make_checkpoint(ODD), _on_a_grid(4 if options["precision"] == "int4" else 8))
    _check(export_tiny(directory, **options), _logits(directory, _ids()), load_graph)


# huggingface/optimum-executorch#180
def test_gemma_3_is_exported_to_int4(
    tiny_checkpoint: Any, edit_weights: Any, export_tiny: Any, load_graph: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ort_cpu, "INT8_ACTIVATIONS", 0)
    directory = edit_weights(tiny_checkpoint("gemma3"), _on_a_grid(4))
    bundle: Bundle = export_tiny(directory, precision="int4")
    assert "int4 affine block 32" in bundle.manifest.storage.values()
    _check(bundle, _logits(directory, _ids()), load_graph)


# NVIDIA/Model-Optimizer#156: "Unrecognized attribute: block_size", for the opset had stayed below 21.
def test_a_graph_with_blocked_weights_declares_the_opset_that_knows_block_size(
    tiny_llama: Path, export_tiny: Any, load_graph: Any
) -> None:
    bundle: Bundle = export_tiny(tiny_llama, precision="int4")
    for form in ("portable", "lowered"):
        path = load_graph(bundle, form).path
        (opset,) = [
            entry.version for entry in onnx.load(path, load_external_data=False).opset_import if not entry.domain
        ]
        assert opset >= onnx.defs.get_schema("DequantizeLinear", 21).since_version
    blocked = _nodes(bundle.file("model.onnx"), "DequantizeLinear")
    assert len(blocked) == 2 * 7 + 1
    assert all("block_size" in {attribute.name for attribute in node.attribute} for node in blocked)
    onnx.checker.check_model(str(bundle.file("model.onnx")), full_check=True)


# microsoft/winml-cli PR#836: the outputs of attention were quantized along with the weights.
@pytest.mark.parametrize("precision", ["int4", "int8"])
def test_nothing_but_weights_is_quantized(precision: str, tiny_llama: Path, export_tiny: Any, load_graph: Any) -> None:
    bundle: Bundle = export_tiny(tiny_llama, precision=precision)
    portable = onnx.load(bundle.file("model.onnx"), load_external_data=False).graph
    stored = {tensor.name for tensor in portable.initializer}
    kinds = {node.op_type for node in portable.node}
    assert kinds.isdisjoint({"QuantizeLinear", "DynamicQuantizeLinear", "MatMulInteger", "QLinearMatMul"})
    dequantized = [node.input[0] for node in portable.node if node.op_type == "DequantizeLinear"]
    assert dequantized
    assert stored.issuperset(dequantized)
    # Lowered, products with stored codes are all that computes in integers; scores and contexts are float32.
    lowered = onnx.load(load_graph(bundle, "lowered").path, load_external_data=False).graph
    stored = {tensor.name for tensor in lowered.initializer}
    products = [node for node in lowered.node if node.op_type == "MatMulNBits"]
    assert len(products) == 2 * 4 + 1
    assert all(stored.issuperset(node.input[1:3]) for node in products)
    others = {node.op_type for node in lowered.node if "Quant" in node.op_type or "Integer" in node.op_type}
    assert others == set()


# microsoft/onnxruntime-genai PR#1690: phi-4-mini took 5.15 GB for 2.69.
@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_a_tied_embedding_is_stored_once_in_the_bundle_and_in_the_lowered_graph(
    precision: str, tiny_checkpoint: Any, export_tiny: Any, load_graph: Any
) -> None:
    table = 320 * 64 * (4 if precision == "fp32" else 1)
    for form in ("portable", "lowered"):
        sizes = {}
        for variant in ("llama", "llama_tied"):
            graph = load_graph(export_tiny(tiny_checkpoint(variant), precision=precision), form).path
            external = [tensor.external_data for tensor in onnx.load(graph, load_external_data=False).graph.initializer]
            # What two readings of the graph share lies at one place in the file.
            places = {
                (fields["offset"], int(fields["length"]))
                for fields in ({entry.key: entry.value for entry in part} for part in external)
                if fields
            }
            sizes[variant] = sum(length for _, length in places)
        assert table <= sizes["llama"] - sizes["llama_tied"] < 1.2 * table


# huggingface/optimum#922: one graph for the prompt and another for what follows, with the weights twice.
def test_one_graph_reads_prompts_and_single_tokens(tiny_llama: Path, export_tiny: Any, load_graph: Any) -> None:
    bundle: Bundle = export_tiny(tiny_llama)
    assert {path.name for path in bundle.path.rglob("*.onnx*")} == {"model.onnx", "model.onnx.data"}
    graph, expected = load_graph(bundle, "portable"), _logits(tiny_llama, _ids())
    for start, count in ((0, 22), (22, 1), (23, 1)):
        got = graph.step(_ids()[:, start : start + count])
        np.testing.assert_allclose(got, expected[:, start : start + count], atol=TOLERANCE, rtol=0)


# NVIDIA/TensorRT#4738, #4739, #4705, NVIDIA/TensorRT-RTX#26: Attention nodes that parsers and kernels refuse.
def test_the_graph_has_neither_fused_attention_nor_control_flow(every_tiny_checkpoint: Path, export_tiny: Any) -> None:
    graph = onnx.load(export_tiny(every_tiny_checkpoint).file("model.onnx"), load_external_data=False).graph
    refused = {"Attention", "RotaryEmbedding", "RMSNormalization", "TensorScatter", "If", "Loop", "Scan"}
    assert refused.isdisjoint(node.op_type for node in graph.node)


TWO_EXPORTS = """
import sys
from edgekit.export.exporter import ExportOptions, export_bundle
from edgekit.export.storage_plan import QuantizationOptions

options = ExportOptions(quantization=QuantizationOptions(precision="fp16"))
for checkpoint in sys.argv[1:]:
    export_bundle(checkpoint, checkpoint + ".edge", options, lambda *_: None)
    print(flush=True)
"""


def _anonymous_bytes(process: subprocess.Popen[str]) -> int:
    """What a process has allocated; pages of mapped files, which the system takes back at will, are not in it."""
    found = re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text())
    return int(found[1]) * 1024 if found else 0


# NVIDIA/TensorRT-Edge-LLM#30: three to four times the model's size.
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc on this system")
def test_an_export_takes_a_fraction_of_the_models_size(make_checkpoint: Any) -> None:
    small = make_checkpoint({**ODD, "hidden_size": 512, "intermediate_size": 1536, "head_dim": 128})
    large, layers = Path(f"{small}-large"), 16
    shutil.copytree(small, large)
    config = json.loads((small / "config.json").read_text())
    (large / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers, "layer_types": None}))
    stored = load_file(small / "model.safetensors")
    repeated = {
        re.sub(r"layers\.0", f"layers.{index}", name): value.astype(ml_dtypes.bfloat16)
        for name, value in stored.items()
        if "layers.1" not in name
        for index in (range(layers) if "layers.0" in name else range(1))
    }
    save_file(repeated, large / "model.safetensors", metadata={"format": "pt"})
    size_bytes = (large / "model.safetensors").stat().st_size
    assert size_bytes > 90 << 20
    command = [sys.executable, "-c", TWO_EXPORTS, str(small), str(large)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        before = peak = _anonymous_bytes(process)  # with all that any export imports and allocates
        while process.poll() is None:
            peak = max(peak, _anonymous_bytes(process))
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.002)
        assert process.returncode == 0
    assert peak - before < size_bytes / 2
