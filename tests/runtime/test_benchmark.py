from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from edgekit.errors import DoesNotFitError, UsageError
from edgekit.runtime.backends.onnxruntime_cpu import OnnxRuntimeRunner
from edgekit.runtime.benchmark import BenchmarkOptions, Measurement, benchmark
from edgekit.runtime.loading import LoadOptions
from edgekit.runtime.sampling import History, Logits, SampledToken, Sampler
from edgekit.runtime.session import Session
from edgekit.runtime.step import StepInputs, StepOutputs


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    from edgekit.export.exporter import ExportOptions, export_bundle
    from edgekit.export.storage_plan import QuantizationOptions

    options = ExportOptions(quantization=QuantizationOptions(precision="fp32"))
    output = tmp_path_factory.mktemp("benchmark") / "llama.edge"
    return export_bundle(tiny_llama, output, options, lambda *_: None).path


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Every step that is run, as (position of the first new token, new tokens)."""
    seen: list[tuple[int, int]] = []
    step = OnnxRuntimeRunner.step

    def watched(runner: OnnxRuntimeRunner, inputs: StepInputs) -> StepOutputs:
        seen.append((int(inputs.position_ids[0]), len(inputs.token_ids)))
        return step(runner, inputs)

    monkeypatch.setattr(OnnxRuntimeRunner, "step", watched)
    return seen


def test_rates_are_median_slowest_and_fastest() -> None:
    measured = Measurement(name="tg12", tokens=12, seconds=(3.0, 1.0, 2.0), peak_memory_bytes=1)
    assert (measured.min_tokens_per_s, measured.tokens_per_s, measured.max_tokens_per_s) == (4.0, 6.0, 12.0)


def test_rows_come_in_order_with_one_time_per_repetition(bundle: Path) -> None:
    options = BenchmarkOptions(prompt_tokens=20, decode_tokens=6, depths=(50, 0), repetitions=3)
    report = benchmark(bundle, options, load=LoadOptions(threads=1))
    assert [row.name for row in report.measurements] == ["pp20", "tg6", "tg32@50", "tg32@0"]
    assert [row.tokens for row in report.measurements] == [20, 6, 32, 32]
    assert all(len(row.seconds) == 3 and min(row.seconds) > 0 for row in report.measurements)
    peaks = [row.peak_memory_bytes for row in report.measurements]
    assert peaks == sorted(peaks)
    assert peaks[0] > 10_000_000
    assert report.threads == 1
    assert 0 < report.load_s < 60


def test_a_prompt_is_read_anew_each_time(bundle: Path, steps: list[tuple[int, int]]) -> None:
    benchmark(bundle, BenchmarkOptions(prompt_tokens=20, decode_tokens=0, repetitions=2))
    # The first one is not counted.
    assert steps == [(0, 20)] * 3


def test_generation_starts_behind_the_past_that_the_row_names(bundle: Path, steps: list[tuple[int, int]]) -> None:
    benchmark(bundle, BenchmarkOptions(prompt_tokens=0, decode_tokens=4, depths=(60,), repetitions=1))
    empty = [(0, 1), *((past, 1) for past in range(1, 5))]
    deep = [(past, 1) for past in range(60, 92)]
    # The second run finds the past in the cache, all but its last token.
    assert steps == [*empty, *empty, (0, 60), *deep, (59, 1), *deep]


def test_only_what_a_row_asks_for_is_timed(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A clock that counts the tokens that were drawn: reading draws one, generating one per token.
    drawn: list[int] = []
    sample = Sampler.sample

    def counted(sampler: Sampler, logits: Logits, history: History = ()) -> SampledToken:
        drawn.append(1)
        return sample(sampler, logits, history)

    monkeypatch.setattr(Sampler, "sample", counted)
    monkeypatch.setattr("edgekit.runtime.benchmark.time.perf_counter", lambda: len(drawn))
    report = benchmark(bundle, BenchmarkOptions(prompt_tokens=30, decode_tokens=9, depths=(40,), repetitions=2))
    assert [row.seconds for row in report.measurements] == [(1, 1), (9, 9), (32, 32)]


def test_prompts_are_the_same_each_time_and_within_the_vocabulary(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts: list[list[int]] = []
    check = Session.check_prompt

    def kept(session: Session, prompt: Sequence[int]) -> None:
        prompts.append(list(prompt))
        check(session, prompt)

    monkeypatch.setattr(Session, "check_prompt", kept)
    for _ in range(2):
        benchmark(bundle, BenchmarkOptions(prompt_tokens=200, decode_tokens=0, repetitions=1))
    assert all(prompt == prompts[0] for prompt in prompts)
    assert 0 <= min(prompts[0]) < max(prompts[0]) < 320
    assert len(np.unique(prompts[0])) > 100


def test_progress_is_told_of_every_run(bundle: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    options = BenchmarkOptions(prompt_tokens=8, decode_tokens=2, repetitions=1)
    benchmark(bundle, options, progress=lambda *call: seen.append(call))
    assert seen == [("pp8", 0, 2), ("pp8", 1, 2), ("tg2", 0, 2), ("tg2", 1, 2)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (BenchmarkOptions(prompt_tokens=257), "pp257 needs 257 tokens, the model's context is 256; "),
        (BenchmarkOptions(prompt_tokens=1, decode_tokens=256), "tg256 needs 257 tokens, the model's context is 256; "),
        (
            BenchmarkOptions(prompt_tokens=1, decode_tokens=1, depths=(224, 225)),
            "tg32@225 needs 257 tokens, the model's context is 256; ",
        ),
    ],
)
def test_what_exceeds_the_context_is_refused_before_anything_runs(
    bundle: Path, steps: list[tuple[int, int]], options: BenchmarkOptions, message: str
) -> None:
    with pytest.raises(DoesNotFitError, match=message):
        benchmark(bundle, options)
    assert steps == []


def test_the_whole_context_can_be_measured(bundle: Path) -> None:
    options = BenchmarkOptions(prompt_tokens=256, decode_tokens=255, depths=(224,), repetitions=1)
    assert len(benchmark(bundle, options).measurements) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_tokens": -1}, "pp is -1; it must be at least 0"),
        ({"decode_tokens": -1}, "tg is -1; it must be at least 0"),
        ({"depths": (1, -2)}, "depth is -2; it must be at least 0"),
        ({"repetitions": 0}, "repetitions is 0; it must be at least 1"),
        ({"prompt_tokens": 0, "decode_tokens": 0}, "there is nothing to measure"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        BenchmarkOptions(**options)  # type: ignore[arg-type]
