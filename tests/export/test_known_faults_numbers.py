"""Wrong numbers that other tools are known to have produced: one test each, named after the fault.

docs/known_faults.md has the whole list. The oracle is Hugging Face's own implementation, which reads the weights from
the checkpoint and knows nothing of the graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import numpy_helper

from edgekit import contract
from edgekit.bundle import Bundle
from edgekit.errors import UnsupportedError, UsageError
from edgekit.export.storage_plan import QuantizationOptions
from tests.tiny_configs import LLAMA3_ROPE, SIZES

TOLERANCE = 1e-4
LLAMA = {"model_type": "llama", **SIZES, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}

FloatArray = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Made:
    """What the tests make and compare."""

    checkpoint: Any
    export: Any
    graph: Any
    hugging_face: Any


@pytest.fixture
def made(tiny_checkpoint: Any, export_tiny: Any, load_graph: Any, hugging_face: Any) -> Made:
    return Made(tiny_checkpoint, export_tiny, load_graph, hugging_face)


both_forms = pytest.mark.parametrize("form", ["portable", "lowered"])


def _logits(model: Any, ids: Tokens, **inputs: Any) -> FloatArray:
    with torch.no_grad():
        logits: FloatArray = model(torch.from_numpy(ids), **inputs).logits.numpy()
    return logits


def _ids(count: int, rows: int = 1, seed: int = 5) -> Tokens:
    return np.random.default_rng(seed).integers(3, 320, (rows, count))


def _assert_close(got: FloatArray, expected: FloatArray) -> None:
    np.testing.assert_allclose(got, expected, atol=TOLERANCE, rtol=0)


def _weights(bundle: Bundle) -> dict[str, npt.NDArray[Any]]:
    initializers = onnx.load(bundle.file("model.onnx")).graph.initializer
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in initializers}


# huggingface/optimum#877, huggingface/transformers#47651, unslothai/unsloth#3699
@both_forms
def test_left_padding_changes_no_logits(form: str, tiny_llama: Path, made: Made) -> None:
    text, padding = _ids(20), 7
    padded = np.concatenate([np.zeros((1, padding), np.int64), text[:, :-padding]], 1)
    bias = np.triu(np.full((2, 1, 20, 20), contract.MASKED, np.float32), 1)
    bias[1, ..., :padding] = contract.MASKED
    positions = np.stack([np.arange(20), np.maximum(np.arange(20) - padding, 0)])
    graph = made.graph(made.export(tiny_llama), form)
    got = graph.step(np.concatenate([text, padded]), positions=positions, new_bias=bias)
    expected = _logits(made.hugging_face(tiny_llama), text)
    _assert_close(got[0], expected[0])
    _assert_close(got[1, padding:], expected[0, :-padding])


# apple/coremltools PR#2669, microsoft/onnxruntime#28904: softmax over nothing is not a number.
@both_forms
@pytest.mark.parametrize("precision", ["fp32", "fp16", "int4"])
def test_a_token_that_may_see_nothing_stays_a_number_and_disturbs_no_other(
    form: str, precision: str, tiny_llama: Path, made: Made
) -> None:
    ids, bundle = _ids(12), made.export(tiny_llama, precision=precision)
    bias = np.triu(np.full((12, 12), contract.MASKED, np.float32), 1)
    bias[:3] = contract.MASKED
    bias[3:, :3] = contract.MASKED
    graph = made.graph(bundle, form)
    got = graph.step(ids, new_bias=bias)
    assert np.isfinite(got).all()
    assert all(np.isfinite(part).all() for part in graph.cache)
    alone = made.graph(bundle, form).step(ids[:, 3:], positions=np.arange(3, 12)[None])
    _assert_close(got[:, 3:], alone)


# microsoft/onnxruntime#26732 (Gemma 3), #31626 (LayerNorm), huggingface/transformers#36822
@both_forms
@pytest.mark.parametrize(
    ("variant", "matrix", "factor"),
    [("gemma3", "embed_tokens", 1e4), ("gpt_neox", "dense_4h_to_h", 1e5), ("llama", "down_proj", 1e5)],
)
def test_activations_beyond_float16_do_not_overflow_where_weights_are_float16(
    form: str, variant: str, matrix: str, factor: float, made: Made, edit_weights: Any
) -> None:
    from transformers import AutoModelForCausalLM

    # Every weight is a float16, so only the arithmetic could differ from float32.
    directory = edit_weights(
        made.checkpoint(variant),
        lambda name, weight: (weight * (factor if matrix in name and weight.ndim == 2 else 1)).half().float(),
    )
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        output = model(torch.from_numpy(_ids(16)), output_hidden_states=True)
    assert max(hidden.abs().max() for hidden in output.hidden_states) > 65504 * 2
    graph = made.graph(made.export(directory, precision="fp16"), form)
    got = np.concatenate([graph.step(_ids(16)[:, :9]), graph.step(_ids(16)[:, 9:])], 1)
    np.testing.assert_allclose(got, output.logits.numpy(), atol=1e-4 * float(output.logits.abs().max()), rtol=0)


# microsoft/onnxruntime#29020, PR#28958: a causal mask aligned to the start of the past, not to its end.
@both_forms
@pytest.mark.parametrize("new", [1, 2, 9])
def test_a_causal_step_after_a_past_is_aligned_to_its_end(form: str, new: int, tiny_llama: Path, made: Made) -> None:
    ids, graph = _ids(24), made.graph(made.export(tiny_llama), form)
    graph.step(ids[:, :-new])
    expected = _logits(made.hugging_face(tiny_llama), ids)[:, -new:]
    _assert_close(graph.step(ids[:, -new:]), expected)
    # Aligned to the start, new token i would see the first i + 1 tokens only.
    bias = torch.full((24, 24), contract.MASKED).triu(1)
    bias[-new:] = torch.full((new, 24), contract.MASKED).triu(1)
    wrong = _logits(made.hugging_face(tiny_llama), ids, attention_mask=bias[None, None])[:, -new:]
    assert np.abs(wrong - expected).max() > 100 * TOLERANCE


# microsoft/onnxruntime#29686: a kernel went by the size of the buffer and not by what is in it.
@both_forms
def test_empty_slots_of_the_cache_do_not_count(form: str, tiny_llama: Path, made: Made) -> None:
    ids, graph = _ids(24), made.graph(made.export(tiny_llama), form)
    pieces = [graph.step(ids[:, start : start + 8], empty_slots=1 + 500 * start) for start in (0, 8, 16)]
    _assert_close(np.concatenate(pieces, 1), _logits(made.hugging_face(tiny_llama), ids))


# pytorch/pytorch#143751: an exported graph that was right only after it had been optimized.
@pytest.mark.parametrize("variant", ["phi", "llama_bias", "gemma3"])
@pytest.mark.parametrize("level", ["ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_ALL"])
def test_the_portable_graph_is_right_whether_a_runtime_optimizes_it_or_not(
    variant: str, level: str, made: Made
) -> None:
    ids, graph = _ids(24), made.graph(made.export(made.checkpoint(variant)), "portable")
    options = ort.SessionOptions()
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    options.log_severity_level = 3
    graph.session = ort.InferenceSession(str(graph.path), options, providers=["CPUExecutionProvider"])
    got = np.concatenate([graph.step(ids[:, :15]), graph.step(ids[:, 15:])], 1)
    _assert_close(got, _logits(made.hugging_face(made.checkpoint(variant)), ids))


# NVIDIA/TensorRT-Edge-LLM#105: garbage from the documented export of checkpoints that were quantized before.
@pytest.mark.parametrize("method", ["awq", "gptq", "modelopt", "compressed-tensors"])
def test_a_checkpoint_that_another_tool_has_quantized_is_refused_and_not_misread(
    method: str, make_checkpoint: Any, made: Made, edit_config: Any
) -> None:
    directory = edit_config(make_checkpoint(LLAMA), {"quantization_config": {"quant_method": method, "bits": 4}})
    with pytest.raises(UnsupportedError, match=rf"llama with quantization_config = .*{method}.* is not supported"):
        made.export(directory)


# NVIDIA/TensorRT#4590: a precision that silently became another one.
@pytest.mark.parametrize("precision", ["fp8", "nvfp4", "mxfp8", "bf16"])
def test_a_precision_that_does_not_exist_is_refused_and_never_replaced(precision: Any) -> None:
    with pytest.raises(UsageError, match=f"precision '{precision}'; known: fp16, fp32, int4, int8"):
        QuantizationOptions(precision=precision)


# NVIDIA/TensorRT-LLM#2492: Llama-3.2-1B, which is tied and has scaled rotations, answered nonsense.
@both_forms
def test_a_tied_llama_gives_the_logits_of_hugging_face(form: str, make_checkpoint: Any, made: Made) -> None:
    directory = make_checkpoint({**LLAMA, "tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE})
    bundle = made.export(directory)
    assert not any(name.startswith("lm_head") for name in _weights(bundle))
    _assert_close(made.graph(bundle, form).step(_ids(100)), _logits(made.hugging_face(directory), _ids(100)))


# microsoft/onnxruntime-genai#2306: a head of its own was taken for the embedding.
@both_forms
def test_a_head_of_its_own_is_never_taken_for_the_embedding(
    form: str, tiny_llama: Path, made: Made, edit_config: Any
) -> None:
    expected = _logits(made.hugging_face(tiny_llama), _ids(12))
    for says_tied in (False, True):
        directory = edit_config(tiny_llama, {"tie_word_embeddings": says_tied})
        bundle = made.export(directory)
        assert not bundle.manifest.spec.tie_word_embeddings
        _assert_close(made.graph(bundle, form).step(_ids(12)), expected)


# alibaba/MNN PR#4683
@both_forms
def test_the_norms_of_queries_and_keys_are_exported(form: str, made: Made) -> None:
    model, bundle = made.hugging_face(made.checkpoint("qwen3")), made.export(made.checkpoint("qwen3"))
    weights = _weights(bundle)
    for index, layer in enumerate(model.model.layers):
        for name in ("q_norm", "k_norm"):
            expected = getattr(layer.self_attn, name).weight.detach().numpy()
            np.testing.assert_array_equal(weights[f"layers.{index}.self_attn.{name}.weight"], expected)
    _assert_close(made.graph(bundle, form).step(_ids(24)), _logits(model, _ids(24)))


# onnxruntime/mobius PR#396: weights that matched one by one, and biases that nobody added.
@both_forms
def test_the_biases_of_queries_keys_and_values_are_exported_and_added(form: str, made: Made) -> None:
    model, bundle = made.hugging_face(made.checkpoint("qwen2")), made.export(made.checkpoint("qwen2"))
    weights = _weights(bundle)
    for index, layer in enumerate(model.model.layers):
        for name in ("q_proj", "k_proj", "v_proj"):
            expected = getattr(layer.self_attn, name).bias.detach().numpy()
            assert np.abs(expected).max() > 0.1
            np.testing.assert_array_equal(weights[f"layers.{index}.self_attn.{name}.bias"], expected)
    _assert_close(made.graph(bundle, form).step(_ids(24)), _logits(model, _ids(24)))


# NVIDIA/TensorRT-LLM PR#6344: the converter of Qwen2 asked for biases that Qwen3 does not have.
@both_forms
def test_qwen3_needs_no_biases(form: str, made: Made) -> None:
    bundle = made.export(made.checkpoint("qwen3"))
    assert not any(name.endswith("bias") for name in bundle.manifest.spec.tensor_shapes())
    expected = _logits(made.hugging_face(made.checkpoint("qwen3")), _ids(24))
    _assert_close(made.graph(bundle, form).step(_ids(24)), expected)
