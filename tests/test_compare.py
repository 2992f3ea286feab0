from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import gguf
import numpy as np
import pytest

TinyGguf: TypeAlias = Callable[[str, str], Path]

# Our engines, with the scheme of their weights and the dtype of their KV cache.
OURS = {
    "edgekit-symmetric": ("symmetric", "float32"),
    "edgekit-symmetric-int8": ("symmetric", "int8"),
    "edgekit-affine-int8": ("affine", "int8"),
}
BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("peers.report")


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("peers.models")


def _engine(report: Any, name: str, prefill: Sequence[float], decode: Sequence[float], peak_mb: float) -> Any:
    return report.EngineResult(
        name=name,
        version=f"{name} 1.0",
        format="2 × Q4_0",
        size_bytes=91_740_000,
        kv_cache="float16",
        tokens_per_s={"pp512": prefill, "tg32@128": decode},
        peak_memory_bytes={128: int(peak_mb * 1e6)},
    )


def _comparison(report: Any, *engines: Any, absent: dict[str, str] | None = None) -> Any:
    return report.Comparison(
        model="m.gguf",
        day="2026-12-01",
        cpu="CPU (2 cores)",
        threads=2,
        prompt="random tokens",
        engines=engines,
        absent=absent or {},
    )


def test_a_ratio_compares_the_figures_of_the_same_round(report: Any) -> None:
    # The machine was ten times slower in the third round; the ratio of the medians would be 2.4.
    assert report.ratio_of_rounds([120.0, 126.0, 11.0], [100.0, 50.0, 10.0]) == pytest.approx(1.2)


def test_a_rate_is_the_median_with_the_slowest_and_the_fastest_round(report: Any) -> None:
    assert report.rate([99.94, 7.25, 1210.4]) == "99.9 (7.2-1210)"


def test_every_format_of_ours_is_compared_with_every_peer(report: Any) -> None:
    comparison = _comparison(
        report,
        _engine(report, "edgekit-affine-int8", [900, 1000, 1100], [90, 100, 110], 300),
        _engine(report, "genai-int4", [500, 500, 500], [50, 80, 50], 600),
        _engine(report, "llama.cpp-q4_1", [2000, 2000, 2000], [100, 100, 100], 150),
    )
    assert report.ratio_rows(comparison) == [
        ("edgekit-affine-int8 / genai-int4", "2.00", "1.80", "0.50"),
        ("edgekit-affine-int8 / llama.cpp-q4_1", "0.50", "1.00", "2.00"),
    ]


def test_the_report_says_what_ran_how_fast_and_who_is_absent(report: Any) -> None:
    absent = {"genai-int4": "python -m peers.genai: ModuleNotFoundError: No module named 'onnxruntime_genai'"}
    engines = [_engine(report, name, [1000.0], [100.0], 300) for name in ("edgekit-symmetric", "llama.cpp-q4_0")]
    assert report.markdown(_comparison(report, *engines, absent=absent)) == (
        "m.gguf, 2026-12-01, CPU (2 cores), 2 threads, 1 rounds, random tokens\n"
        "\n"
        "| engine | version | weights | MB | KV cache |\n"
        "| --- | --- | --- | --- | --- |\n"
        "| edgekit-symmetric | edgekit-symmetric 1.0 | 2 × Q4_0 | 91.7 | float16 |\n"
        "| llama.cpp-q4_0 | llama.cpp-q4_0 1.0 | 2 × Q4_0 | 91.7 | float16 |\n"
        "\n"
        "Tokens/s, median (slowest-fastest):\n"
        "\n"
        "| engine | pp512 | tg32@128 |\n"
        "| --- | --- | --- |\n"
        "| edgekit-symmetric | 1000 (1000-1000) | 100 (100-100) |\n"
        "| llama.cpp-q4_0 | 1000 (1000-1000) | 100 (100-100) |\n"
        "\n"
        "Peak memory, MB, of a fresh process that read so many tokens and generated:\n"
        "\n"
        "| engine | 128 |\n"
        "| --- | --- |\n"
        "| edgekit-symmetric | 300 |\n"
        "| llama.cpp-q4_0 | 300 |\n"
        "\n"
        "Ratios, ours to theirs (speed: median over the rounds; more is better. Memory: less is better):\n"
        "\n"
        "| ratio | pp512 | tg32@128 | MB@128 |\n"
        "| --- | --- | --- | --- |\n"
        "| edgekit-symmetric / llama.cpp-q4_0 | 1.00 | 1.00 | 1.00 |\n"
        "\n"
        "genai-int4 is absent: python -m peers.genai: ModuleNotFoundError: No module named 'onnxruntime_genai'\n"
    )


def test_a_report_of_absent_engines_only_has_no_tables(report: Any) -> None:
    assert report.markdown(_comparison(report, absent={"genai-int4": "why"})) == (
        "m.gguf, 2026-12-01, CPU (2 cores), 2 threads, 0 rounds, random tokens\n\ngenai-int4 is absent: why\n"
    )


def test_matrices_are_rounded_to_the_wanted_type_and_the_rest_is_copied(
    models: Any, tiny_gguf: TinyGguf, tmp_path: Path
) -> None:
    source = tiny_gguf("llama", "Q4_1")
    made = models.ModelStore(source, tmp_path / "cache", tmp_path).gguf("Q4_0")
    before, after = gguf.GGUFReader(source), gguf.GGUFReader(made.path)
    assert [tensor.name for tensor in before.tensors] == [tensor.name for tensor in after.tensors]
    for old, new in zip(before.tensors, after.tensors, strict=True):
        kept = old.name in ("token_embd.weight", "output.weight") or len(old.shape) == 1
        assert new.tensor_type == (old.tensor_type if kept else gguf.GGMLQuantizationType.Q4_0)
        values = [gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in (old, new)]
        # A 4-bit code is at most half a step, a sixteenth of the block's largest weight, from its weight.
        assert np.abs(values[0] - values[1]).max() <= (0 if kept else np.abs(values[0]).max() / 8)
    same = [name for name in before.fields if name not in ("general.file_type", "GGUF.kv_count")]
    assert [before.fields[name].contents() for name in same] == [after.fields[name].contents() for name in same]


def test_a_file_that_has_the_wanted_type_is_used_as_it_is(models: Any, tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    source = tiny_gguf("llama", "Q4_1")
    assert models.ModelStore(source, tmp_path / "cache", tmp_path).gguf("Q4_1").path == source
    assert list(tmp_path.iterdir()) == []


def _compare(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "compare.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_tiny_model_is_measured_and_peers_that_are_not_installed_are_absent(
    tiny_gguf: TinyGguf, tmp_path: Path
) -> None:
    import venv

    venv.create(tmp_path / "bare")
    bare = tmp_path / "bare" / "bin" / "python"
    run = _compare(
        *("--model", tiny_gguf("llama", "Q4_1"), "--engines", f"{','.join(OURS)},genai-int4,llama.cpp-q4_1"),
        *("--prefill", 24, "--depths", "8,40", "--rounds", 2, "--threads", 1),
        *("--genai-python", bare, "--llama-python", bare, "--cache", tmp_path / "cache", "--out", tmp_path / "out"),
    )
    assert run.returncode == 0, run.stderr
    assert f"genai-int4 is absent: {bare} -m peers.genai: ModuleNotFoundError: No module named 'onnx" in run.stdout
    assert f"llama.cpp-q4_1 is absent: {bare} -m peers.llama_cpp: ModuleNotFoundError: No module" in run.stdout
    assert (tmp_path / "out" / "compare.md").read_text(encoding="utf-8") + "\n" == run.stdout
    result = json.loads((tmp_path / "out" / "compare.json").read_text(encoding="utf-8"))
    assert sorted(result["absent"]) == ["genai-int4", "llama.cpp-q4_1"]
    assert [engine["name"] for engine in result["engines"]] == list(OURS)
    for engine in result["engines"]:
        scheme, kv_cache = OURS[engine["name"]]
        assert engine["format"] == f"14 × int4 {scheme} block 32, 2 × int8 symmetric block 32"
        assert engine["kv_cache"] == kv_cache
        rounds = {row: len(rates) for row, rates in engine["tokens_per_s"].items()}
        assert rounds == {"pp24": 2, "tg32@8": 2, "tg32@40": 2}
        assert all(1 < rate < 1e6 for rates in engine["tokens_per_s"].values() for rate in rates)
        # More than an interpreter with numpy and less than a model of any use.
        assert all(2e7 < peak < 1e9 for peak in engine["peak_memory_bytes"].values())
    assert ((tmp_path / "out" / "compare.png").is_file()) == (importlib.util.find_spec("matplotlib") is not None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--engines", "edgekit-symmetric,ollama"],
            "'ollama'; there are edgekit-symmetric, edgekit-symmetric-int8, edgekit-affine-int8, genai-int4, ",
        ),
        (["--depths", "128;1024"], "'128;1024'; it must be positive numbers with commas between them"),
        (["--depths", "200"], "Error: 512 tokens and 33 more are beyond the model's context of 256"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: list[str], message: str, tiny_gguf: TinyGguf) -> None:
    run = _compare("--model", tiny_gguf("llama", "Q4_1"), *arguments)
    assert run.returncode != 0
    assert message in run.stderr


def test_a_text_that_is_too_short_is_refused(tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("four", encoding="utf-8")
    run = _compare(
        *("--model", tiny_gguf("llama", "Q4_1"), "--prefill", 24, "--depths", 8, "--text", tmp_path / "short.txt")
    )
    assert run.returncode == 1
    assert run.stderr.startswith(f"Error: {tmp_path / 'short.txt'} has ")
    assert run.stderr.endswith("tokens, 24 are needed; give a longer text\n")
