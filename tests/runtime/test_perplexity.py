from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import pytest

from edgekit.errors import DoesNotFitError, EdgeKitError, UsageError
from edgekit.runtime import LLM
from edgekit.runtime.backends.onnxruntime_cpu import OnnxRuntimeRunner
from edgekit.runtime.loading import KVCacheOptions
from edgekit.runtime.perplexity import CHUNK_TOKENS, perplexity
from edgekit.runtime.step import StepInputs, StepOutputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HuggingFaceModel: TypeAlias = Callable[[Path], "PreTrainedModel"]

# Not periodic, or a window would look like the next one.
TEXT = " ".join(f"The quick brown fox {number * number % 97} jumps, isn't it?" for number in range(60))


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> LLM:
    from edgekit.export.exporter import ExportOptions, export_bundle
    from edgekit.export.storage_plan import QuantizationOptions

    folder = tmp_path_factory.mktemp("perplexity")
    options = ExportOptions(quantization=QuantizationOptions(precision="fp32"))
    export_bundle(tiny_llama, folder / "llama.edge", options, lambda *_: None)
    return LLM(folder / "llama.edge")


def _hugging_face_loss(model: PreTrainedModel, checkpoint: Path, window_tokens: int, windows: int) -> tuple[float, int]:
    """Mean loss by transformers' own tokenizer and model, and the tokens of the text."""
    import torch
    from transformers import AutoTokenizer

    token_ids = AutoTokenizer.from_pretrained(checkpoint)(TEXT, add_special_tokens=False)["input_ids"]
    rows = torch.tensor(token_ids[: windows * window_tokens]).reshape(windows, window_tokens)
    with torch.no_grad():
        # transformers shifts the labels and averages over all but the first of each row.
        return float(model(input_ids=rows, labels=rows).loss), len(token_ids)


@pytest.mark.parametrize("window_tokens", [2, 40, CHUNK_TOKENS, CHUNK_TOKENS + 1, 256])
def test_perplexity_is_that_of_hugging_face(
    llm: LLM, tiny_llama: Path, hugging_face: HuggingFaceModel, window_tokens: int
) -> None:
    loss, text_tokens = _hugging_face_loss(hugging_face(tiny_llama), tiny_llama, window_tokens, 3)
    report = perplexity(llm, TEXT, windows=3, window_tokens=window_tokens)
    assert report.loss == pytest.approx(loss, abs=1e-4)
    assert report.perplexity == pytest.approx(math.exp(loss), rel=1e-4)
    assert (report.windows, report.window_tokens) == (3, window_tokens)
    assert report.scored_tokens == 3 * (window_tokens - 1)
    assert report.text_tokens == text_tokens


def test_all_whole_windows_are_read_unless_told_otherwise(
    llm: LLM, tiny_llama: Path, hugging_face: HuggingFaceModel
) -> None:
    seen: list[tuple[str, int, int]] = []
    report = perplexity(llm, TEXT, window_tokens=200, progress=lambda *call: seen.append(call))
    assert report.windows == report.text_tokens // 200 > 3
    assert report.text_tokens % 200
    loss, _ = _hugging_face_loss(hugging_face(tiny_llama), tiny_llama, 200, report.windows)
    assert report.loss == pytest.approx(loss, abs=1e-4)
    assert seen == [("window", index, report.windows) for index in range(report.windows)]


def test_a_text_shorter_than_a_window_is_refused_with_the_numbers(llm: LLM) -> None:
    tokens = len(llm.tokenizer.encode("The quick brown fox", add_special_tokens=False))
    with pytest.raises(UsageError, match=f"the text has {tokens} tokens, fewer than one window of 200; "):
        perplexity(llm, "The quick brown fox", window_tokens=200)


def test_more_windows_than_there_are_are_refused_with_the_numbers(llm: LLM) -> None:
    available = perplexity(llm, TEXT, window_tokens=256).windows
    message = rf"tokens, which fill {available} windows of 256, fewer than the {available + 1} asked for; "
    with pytest.raises(UsageError, match=message):
        perplexity(llm, TEXT, windows=available + 1, window_tokens=256)


def test_a_window_longer_than_the_context_is_refused(llm: LLM) -> None:
    with pytest.raises(DoesNotFitError, match="windows of 257 tokens are longer than the context of 256"):
        perplexity(llm, TEXT, window_tokens=257)


def test_a_window_longer_than_the_context_asked_for_is_refused(llm: LLM) -> None:
    short = LLM(llm.bundle.path, threads=1, ctx_size=64)
    assert perplexity(short, TEXT, windows=1, window_tokens=64).scored_tokens == 63
    with pytest.raises(DoesNotFitError, match="windows of 65 tokens are longer than the context of 64"):
        perplexity(short, TEXT, window_tokens=65)


def test_a_window_that_does_not_fit_into_the_memory_budget_is_refused(llm: LLM) -> None:
    llm = LLM(llm.bundle.path, threads=1)
    plan = dataclasses.replace(llm.plan.memory, capacity_tokens=100)
    llm.plan = dataclasses.replace(llm.plan, memory=plan)
    with pytest.raises(DoesNotFitError, match="windows of 101 tokens are more than the 100 that the KV cache has room"):
        perplexity(llm, TEXT, window_tokens=101)


def test_a_cache_in_int8_costs_little(llm: LLM) -> None:
    exact = perplexity(llm, TEXT, window_tokens=256)
    rounded = perplexity(LLM(llm.bundle.path, kv_cache=KVCacheOptions(dtype="int8")), TEXT, window_tokens=256)
    assert rounded.loss == pytest.approx(exact.loss, abs=0.02)
    assert abs(rounded.loss - exact.loss) > 1e-6


def test_windows_that_score_nothing_are_refused(llm: LLM) -> None:
    with pytest.raises(UsageError, match="window tokens is 1; it must be at least 2"):
        perplexity(llm, TEXT, window_tokens=1)
    with pytest.raises(UsageError, match="windows is 0; it must be at least 1"):
        perplexity(llm, TEXT, windows=0, window_tokens=40)


def test_logits_are_never_held_for_more_than_a_chunk(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    step = OnnxRuntimeRunner.step

    def watched(runner: OnnxRuntimeRunner, inputs: StepInputs) -> StepOutputs:
        rows.append(len(inputs.logit_rows))
        return step(runner, inputs)

    monkeypatch.setattr(OnnxRuntimeRunner, "step", watched)
    perplexity(llm, TEXT, windows=1, window_tokens=256)
    assert rows == [CHUNK_TOKENS, CHUNK_TOKENS]


@pytest.mark.parametrize("planted", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_an_error(llm: LLM, monkeypatch: pytest.MonkeyPatch, planted: float) -> None:
    step = OnnxRuntimeRunner.step

    def overflowed(runner: OnnxRuntimeRunner, inputs: StepInputs) -> StepOutputs:
        outputs = step(runner, inputs)
        outputs.logits[3, 5] = planted
        return outputs

    monkeypatch.setattr(OnnxRuntimeRunner, "step", overflowed)
    with pytest.raises(EdgeKitError, match="the model's logits are not finite, so the text has a loss of nan; "):
        perplexity(llm, TEXT, window_tokens=40)
