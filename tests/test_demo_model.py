"""The demo model, SmolLM2-135M-Instruct: the claims that only a real model can prove."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import numpy_helper

from edgekit.bundle import GRAPH, GRAPH_DATA, Bundle
from edgekit.checkpoint import open_checkpoint
from edgekit.export.exporter import ExportOptions, export_bundle
from edgekit.export.storage_plan import QuantizationOptions
from edgekit.runtime import LLM, SamplingParams
from edgekit.runtime.perplexity import perplexity

pytestmark = pytest.mark.demo

GGUF = Path(__file__).resolve().parent.parent / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
EVAL_TEXT = os.environ.get("EDGEKIT_TEST_TEXT")
WINDOWS = 4
PROMPTS = (
    "Name the capital of France.",
    "Write a haiku about rain.",
    "Explain photosynthesis to a child.",
    "What is 12 times 7?",
    "Translate 'good morning' to Spanish.",
    "List three uses of copper.",
    "Who wrote Hamlet?",
    "Summarize: The cat sat on the mat and slept all day.",
    "How do I boil an egg?",
    "Give me a recipe with lentils.",
    "What causes tides?",
    "Write a Python function that reverses a list.",
    "Describe the colour blue to someone who cannot see.",
    "What is the largest planet?",
    "Tell me a story about a dragon and a baker.",
    "Why is the sky blue?",
    "Compare trains and buses.",
    "What does HTTP stand for?",
    "Give two arguments for and against homework.",
    "Continue: Once upon a time, in a small village,",
)

Export: Any = Callable[[str], Bundle]


@pytest.fixture(scope="module")
def gguf() -> Path:
    """The demo model's file."""
    if not GGUF.is_file():
        pytest.skip(f"the demo model is missing: {GGUF}; get it with: make model")
    return GGUF


@pytest.fixture(scope="module")
def export(gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Export:
    """Exports the demo model in a precision, once."""
    made: dict[str, Bundle] = {}

    def make(precision: Any) -> Bundle:
        if precision not in made:
            options = ExportOptions(quantization=QuantizationOptions(precision=precision))
            made[precision] = export_bundle(gguf, tmp_path_factory.mktemp("demo") / "m.edge", options, lambda *_: None)
        return made[precision]

    return make


def test_the_fp32_bundle_answers_as_transformers_does(gguf: Path, export: Export) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    llm = LLM(export("fp32").path)
    for prompt in PROMPTS:
        ids = llm.tokenizer.encode_prompt(llm.render_chat([{"role": "user", "content": prompt}]))
        with torch.inference_mode():
            generated = model.generate(torch.tensor([ids]), max_new_tokens=64, do_sample=False)
        expected = generated[0, len(ids) :].tolist()
        assert list(llm.generate(ids, SamplingParams(max_tokens=64)).token_ids) == expected, prompt


def test_the_int4_bundle_holds_the_codes_of_the_file(gguf: Path, export: Export) -> None:
    from gguf import GGUFReader
    from gguf.quants import dequantize

    bundle = export("int4")
    stored = {tensor.name: tensor for tensor in onnx.load(bundle.file(GRAPH)).graph.initializer}
    reader = {tensor.name: tensor for tensor in GGUFReader(gguf).tensors}
    names = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
    names |= {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}
    checked = 0
    for name, shape in bundle.manifest.spec.tensor_shapes().items():
        if len(shape) == 1:
            continue
        parts = name.split(".")
        source = reader["token_embd.weight" if len(parts) == 2 else f"blk.{parts[1]}.{names[parts[3]]}.weight"]
        expected = dequantize(source.data, source.tensor_type)
        codes, scale, offset = (
            numpy_helper.to_array(stored[f"{name}.{part}"]).astype(np.float32).T if f"{name}.{part}" in stored else None
            for part in ("codes", "scale", "offset")
        )
        assert codes is not None
        assert scale is not None
        rows = _rows(bundle, name)
        if source.tensor_type.name == "Q4_1":
            np.testing.assert_array_equal(codes, _q4_1_codes(source.data)[rows] - 8.0)
        values: npt.NDArray[Any] = codes * np.repeat(scale, 32, axis=1)
        tolerance = np.zeros_like(values)
        if offset is not None:
            values += np.repeat(offset, 32, axis=1)
            # Half a unit in the last place of the fp16 offset.
            tolerance = np.repeat(np.abs(offset), 32, axis=1) * 2.0**-11
        assert (np.abs(values - expected[rows]) <= tolerance + 1e-7).all(), name
        checked += 1
    assert checked == 211


def _rows(bundle: Bundle, name: str) -> npt.NDArray[np.int64]:
    """The file has the rows of q and k in the order of ggml's interleaved rope, where partners are adjacent."""
    shape = bundle.manifest.spec.tensor_shapes()[name]
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return np.arange(shape[0])
    return np.arange(shape[0]).reshape(-1, 32, 2).swapaxes(1, 2).reshape(-1)


def _q4_1_codes(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Unpacks codes 0…15 of Q4_1 blocks: 2 bytes scale, 2 bytes minimum, 16 bytes with low nibbles first."""
    packed = data.reshape(len(data), -1, 20)[..., 4:]
    return np.concatenate([packed & 15, packed >> 4], axis=-1).reshape(len(data), -1).astype(np.float32)


def test_the_int4_bundle_is_small_and_its_embedding_is_stored_once(export: Export) -> None:
    bundle = export("int4")
    assert bundle.size_bytes <= 105e6
    names = [tensor.name for tensor in onnx.load(bundle.file(GRAPH), load_external_data=False).graph.initializer]
    assert [name for name in names if name.startswith(("embed_tokens", "lm_head"))] == [
        "embed_tokens.weight.codes",
        "embed_tokens.weight.scale",
    ]
    assert bundle.manifest.files[GRAPH_DATA].size < 98e6


def test_the_int4_bundle_knows_paris(export: Export) -> None:
    answer = LLM(export("int4").path).chat([{"role": "user", "content": "Name the capital of France."}])
    assert "Paris" in answer.text
    assert answer.finish_reason == "stop"


@pytest.mark.skipif(EVAL_TEXT is None, reason="no text to evaluate on: set EDGEKIT_TEST_TEXT to a file")
@pytest.mark.parametrize(("precision", "allowed"), [("fp32", 0.001), ("int8", 0.005), ("int4", 0.02)])
def test_perplexity_is_that_of_the_source_model(gguf: Path, export: Export, precision: str, allowed: float) -> None:
    from edgekit.compress.decoder import stream_logits

    assert EVAL_TEXT is not None
    llm = LLM(export(precision).path)
    text = Path(EVAL_TEXT).read_text(encoding="utf-8")[:40_000]
    ids = np.array(llm.tokenizer.encode(text, add_special_tokens=False)[: WINDOWS * 512]).reshape(WINDOWS, 512)
    with open_checkpoint(gguf) as checkpoint:
        losses = [_losses(logits, window) for logits, window in zip(stream_logits(checkpoint, ids), ids, strict=True)]
    expected = np.exp(np.mean(losses))
    got = perplexity(llm, text, windows=WINDOWS).perplexity
    assert abs(got / expected - 1) <= allowed


def _losses(logits: npt.NDArray[np.float32], window: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Returns the negative log-likelihood of every token of a window but the first."""
    shifted = logits[:-1] - logits[:-1].max(-1, keepdims=True)
    losses: npt.NDArray[np.float32] = np.log(np.exp(shifted).sum(-1)) - shifted[np.arange(len(window) - 1), window[1:]]
    return losses


def test_the_checkpoint_is_the_model_that_its_card_describes(gguf: Path) -> None:
    with open_checkpoint(gguf) as checkpoint:
        spec = checkpoint.spec
    assert (spec.family, len(spec.layers), spec.hidden_size, spec.vocab_size) == ("llama", 30, 576, 49152)
    assert (spec.max_positions, spec.tie_word_embeddings, spec.eos_token_ids) == (8192, True, (0, 2))
