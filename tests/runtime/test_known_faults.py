"""Faults of other runtimes: one test each, named after the fault. docs/known_faults.md has the whole list."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgekit.cache_layout import cache_layout
from edgekit.runtime.llm import LLM
from edgekit.runtime.lowered import lowered_graph
from edgekit.runtime.sampling import SamplingParams
from edgekit.runtime.session import PREFILL_CHUNK_TOKENS, Session
from edgekit.runtime.strategies.autoregressive import Autoregressive

CONTEXT = 131072


def _ids(length: int, seed: int = 3) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, 320, length)]


@pytest.fixture(scope="module")
def long_context(export_changed: Any) -> LLM:
    return LLM(export_changed("llama", files={"config.json": {"max_position_embeddings": CONTEXT}}).path, threads=1)


# microsoft/onnxruntime-genai#550, PR#2251: a model of 128k positions needed the memory of all of them at once.
def test_a_long_context_does_not_reserve_the_whole_cache(long_context: LLM) -> None:
    session = long_context.new_session()
    output = long_context.generate(_ids(20), SamplingParams(max_tokens=10, ignore_eos=True), session=session)
    assert output.usage.completion_tokens == 10
    per_token = 2 * 2 * (16 + 16) * 4  # layers, KV heads, channels of key and value, bytes
    assert session._cache.max_positions == CONTEXT
    assert 30 * per_token <= session._cache.size_bytes <= 128 * per_token


# microsoft/onnxruntime#25965: scores of the whole prompt against itself, which grow with its square.
def test_a_long_prompt_is_read_in_chunks_that_do_not_grow_with_it(long_context: LLM, watched: Any) -> None:
    session = Session(long_context.bundle.manifest.spec, watched, Autoregressive())
    next(session.generate(_ids(2000), SamplingParams(), 320))
    sizes = [len(step.token_ids) for step in watched.steps]
    assert sum(sizes) == 2000
    assert max(sizes) == PREFILL_CHUNK_TOKENS < 2000 / 4


# microsoft/onnxruntime-genai PR#1925: the last token that was allowed and the end of the text looked alike.
@pytest.mark.parametrize(("max_tokens", "reason"), [(3, "length"), (4, "stop"), (5, "stop")])
def test_the_end_of_a_text_and_the_end_of_what_was_allowed_are_told_apart(
    max_tokens: int, reason: str, tiny_llm: LLM, export_changed: Any
) -> None:
    prompt = _ids(12)
    free = tiny_llm.generate(prompt, SamplingParams(max_tokens=4, ignore_eos=True)).token_ids
    assert free[3] not in free[:3]
    files = {"config.json": {"eos_token_id": free[3]}, "generation_config.json": {"eos_token_id": free[3]}}
    llm = LLM(export_changed("llama", files=files).path, threads=1)
    output = llm.generate(prompt, SamplingParams(max_tokens=max_tokens))
    assert (output.token_ids, output.finish_reason) == (free[:max_tokens], reason)
    # microsoft/onnxruntime-genai PR#1849: the end token came again, and its text with it.
    assert output.text == llm.tokenizer.decode(free[: min(max_tokens, 3)])


# dusty-nv/NanoLLM#87: accepted, and never applied.
@pytest.mark.parametrize("penalty", [1.3, 3.0])
def test_the_repetition_penalty_is_applied_to_prompt_and_output_as_in_hugging_face(
    penalty: float, tiny_llm: LLM, hugging_face: Any, tiny_checkpoint: Any
) -> None:
    import torch
    from transformers import GenerationConfig

    prompt = _ids(12, seed=8)
    config: Any = GenerationConfig
    options = config(max_new_tokens=30, do_sample=False, repetition_penalty=penalty, eos_token_id=320, pad_token_id=0)
    with torch.no_grad():
        expected = hugging_face(tiny_checkpoint("llama")).generate(torch.tensor([prompt]), generation_config=options)
    params = {"max_tokens": 30, "ignore_eos": True}
    got = tiny_llm.generate(prompt, SamplingParams.from_mapping({**params, "repetition_penalty": penalty})).token_ids
    assert list(got) == expected[0, 12:].tolist()
    assert got != tiny_llm.generate(prompt, SamplingParams.from_mapping(params)).token_ids


# TensorRT-LLM#250, huggingface/transformers#26959: a model that names no end must still end.
def test_a_model_without_end_tokens_generates_until_max_tokens(export_changed: Any) -> None:
    files = {
        "config.json": {"eos_token_id": None, "bos_token_id": None},
        "generation_config.json": {"eos_token_id": None},
        "chat_template.jinja": None,
    }
    llm = LLM(export_changed("llama", files=files).path, threads=1)
    assert llm.end_token_ids == frozenset()
    output = llm.generate(_ids(12), SamplingParams(max_tokens=50))
    assert (len(output.token_ids), output.finish_reason) == (50, "length")


LOADED = """
import re, sys, threading
from pathlib import Path
from edgekit import LLM, SamplingParams

def allocated():  # without pages of mapped files, which the system takes back at will
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

def watch():
    while not over.wait(0.001):
        seen.append(allocated())

over, seen = threading.Event(), []
watcher = threading.Thread(target=watch)
watcher.start()
llm = LLM(sys.argv[1], threads=1)
over.set()
watcher.join()
llm.generate([5] * 20, SamplingParams(max_tokens=8, ignore_eos=True))
print(len(seen), max(seen), allocated())
"""


# ollama/ollama#18396: loading needed more than running, and more than there was.
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc on this system")
def test_loading_takes_no_more_memory_than_running(make_checkpoint: Any, tmp_path: Path) -> None:
    from edgekit.export.exporter import ExportOptions, export_bundle
    from edgekit.export.storage_plan import QuantizationOptions

    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 4, "num_key_value_heads": 4}
    checkpoint = make_checkpoint({"model_type": "llama", **sizes, "vocab_size": 320, "num_hidden_layers": 4})
    options = ExportOptions(quantization=QuantizationOptions())
    bundle = export_bundle(checkpoint, tmp_path / "model.edge", options, lambda *_: None)
    lowered_graph(bundle, cache_layout(bundle.manifest.spec))
    command = [sys.executable, "-c", LOADED, str(bundle.path)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    samples, loading, running = map(int, done.stdout.split())
    assert samples > 10
    assert bundle.size_bytes > 8 << 20
    assert (loading - running) * 1024 < bundle.size_bytes / 5
