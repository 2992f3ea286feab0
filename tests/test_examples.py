"""The examples, run as their docstrings say, on the demo model, which the first of them exports for all."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TypeAlias

import numpy as np
import pytest

from edgekit import LLM, ExportOptions, QuantizationOptions, export_bundle
from edgekit.runtime.cache import KVCache
from edgekit.runtime.step import causal_step

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
GGUF = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
SECONDS = 60

Run: TypeAlias = Callable[..., "subprocess.CompletedProcess[str]"]

ABOUT = {
    "power": "battery low: 14% left|charger unplugged|voltage dropped to 3.2 V|running on solar|running on battery|"
    "solar panel delivers 40 W|power cut",
    "network": "wifi: connection lost|cannot reach server 10.0.0.7|new IP address from the router|"
    "bluetooth paired with phone|mobile network found|cable unplugged from port 2|packet loss 12%",
    "climate": "temperature 31 degrees, rising|humidity 80%|fan switched on, too hot|heater off, room is warm|"
    "frost warning, 0 degrees|living room is too warm|air quality good",
    "security": "front door opened|motion in the hallway|wrong code entered three times|alarm armed|"
    "intruder in the garden|door locked|camera sees a person",
}
TEXT = """The lighthouse on the northern cape was built in 1857, after three ships had been lost on the rocks in one
winter. For its first forty years it burned whale oil, later paraffin, and in 1931 it was connected to the mains.

In 1988 the light was automated, and the last keeper, Anna Lund, moved to the mainland. The houses stood empty for
almost twenty years. Today a local association rents them to visitors, and the income pays for the repair of the tower.
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs an example in a directory that has nothing to do with it."""
    directory = tmp_path_factory.mktemp("elsewhere")

    def example(name: str, *arguments: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
        return subprocess.run(
            command, cwd=directory, input=stdin, capture_output=True, text=True, timeout=SECONDS, check=False
        )

    return example


@pytest.fixture(scope="module")
def exported(run: Run, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The bundle that the first example makes, and what it says."""
    if not GGUF.is_file():
        pytest.skip(f"the demo model is missing: {GGUF}; get it with: make model")
    bundle = tmp_path_factory.mktemp("demo") / "smollm2.edge"
    done = run("01_export_and_generate.py", GGUF, bundle, "The capital of France is")
    assert done.returncode == 0, done.stderr
    return bundle, done.stdout


@pytest.fixture(scope="module")
def bundle(exported: tuple[Path, str]) -> Path:
    return exported[0]


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("example", EXAMPLES / name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.demo
def test_export_and_generate_names_paris(exported: tuple[Path, str]) -> None:
    bundle, said = exported
    size, text, speed = said.split("\n", 1)[0], said.split("\n", 1)[1].rsplit("\n", 2)[0], said.splitlines()[-1]
    assert size.startswith(f"{bundle}: 102.")
    assert text.startswith("The capital of France is Paris")
    assert speed.endswith("tokens/s, ended by length")


@pytest.mark.demo
def test_the_chat_streams_stops_and_remembers(run: Run, bundle: Path) -> None:
    questions = "Name the capital of France.\nAnd of Italy?\n"
    done = run("02_streaming_chat.py", bundle, "--stop", ".", "--max-tokens", 24, stdin=questions)
    assert done.returncode == 0, done.stderr
    first, read_first, second, read_second = done.stdout.splitlines()
    assert "Paris" in first
    assert "Rome" in second
    assert "." not in first + second
    assert read_first.startswith("[0 of ")
    cached, total = _counts(read_second)
    assert 0 < total - cached < 30 < cached


def _counts(line: str) -> tuple[int, int]:
    words = line.strip("[").split()
    return int(words[0]), int(words[2])


@pytest.mark.demo
def test_the_assistant_labels_lines_as_people_would(run: Run, bundle: Path) -> None:
    expected = {line: label for label, lines in ABOUT.items() for line in lines.split("|")}
    done = run("03_serial_assistant.py", bundle, "-", stdin="\n".join(expected) + "\n\n")
    assert done.returncode == 0, done.stderr
    found = [line.split("\t") for line in done.stdout.splitlines()]
    assert [line for _, line in found] == list(expected)
    assert {label for label, _ in found} == set(ABOUT)
    assert sum(expected[line] == label for label, line in found) >= 20


@pytest.mark.demo
def test_the_assistant_reads_a_file_and_needs_none(run: Run, bundle: Path, tmp_path: Path) -> None:
    done = run("03_serial_assistant.py", bundle)
    assert done.returncode == 0, done.stderr
    assert "network\tcannot reach server 10.0.0.7" in done.stdout.splitlines()
    (tmp_path / "log.txt").write_text("front door opened\n")
    assert run("03_serial_assistant.py", bundle, tmp_path / "log.txt").stdout == "security\tfront door opened\n"


def test_the_assistant_compares_the_probabilities_that_the_whole_text_gives(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = _load("03_serial_assistant.py")
    monkeypatch.setattr(example, "EXAMPLES", example.EXAMPLES[:3])  # a tiny model has a short context
    options = ExportOptions(quantization=QuantizationOptions(precision="fp32"))
    llm = LLM(export_bundle(tiny_llama, tmp_path / "tiny.edge", options, lambda *_: None).path, threads=1)

    lengths: list[int] = []
    reserve = KVCache.reserve

    def note(cache: KVCache, tokens: int) -> None:
        lengths.append(tokens)
        reserve(cache, tokens)

    monkeypatch.setattr(KVCache, "reserve", note)
    classifier = example.Classifier(llm)
    whole = max(lengths)
    lengths.clear()
    scores = classifier.scores("door open")
    # A line costs its own tokens and those of the labels, not those that all lines share.
    assert max(lengths) < whole / 5

    prefix = "Messages of a device and their labels.\n\n"
    prefix += "".join(f"{text} => {label}\n" for text, label in example.EXAMPLES)
    line, nothing = [prefix, "door open =>"], [prefix, "N/A =>"]
    endings = [f" {label}\n" for label in example.LABELS]
    expected = [_likelihood(llm, line, ending) - _likelihood(llm, nothing, ending) for ending in endings]
    np.testing.assert_allclose(scores, expected, atol=1e-3)


def _likelihood(llm: LLM, before: list[str], ending: str) -> float:
    """Returns the log-probability of an ending, in nats, from one step over the whole text."""
    pieces = [llm.tokenizer.encode(text, add_special_tokens=False) for text in (*before, ending)]
    ids, count = np.array([token for piece in pieces for token in piece]), len(pieces[-1])
    cache = llm.new_cache()
    rows = np.arange(len(ids) - count - 1, len(ids) - 1)
    logits = llm.backend.runner(cache).step(causal_step(ids, 0, rows)).logits.astype(np.float64)
    return float((logits[np.arange(count), ids[-count:]] - np.log(np.exp(logits).sum(axis=1))).sum())


@pytest.mark.demo
def test_a_file_is_summarised_whole_and_in_parts(run: Run, bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    whole = run("04_summarise.py", bundle, tmp_path / "text.txt")
    assert whole.returncode == 0, whole.stderr
    assert "lighthouse" in whole.stdout
    assert "[1/" not in whole.stdout
    parts = run("04_summarise.py", bundle, tmp_path / "text.txt", "--part-tokens", 80, "--max-tokens", 40)
    assert parts.returncode == 0, parts.stderr
    assert parts.stdout.startswith("[1/2] ")
    assert "\n[2/2] " in parts.stdout
    assert len(parts.stdout.split("\n\n")) == 3


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("01_export_and_generate.py", ("missing.gguf", "out.edge")),
        ("02_streaming_chat.py", ("missing.edge",)),
        ("03_serial_assistant.py", ("missing.edge",)),
        ("04_summarise.py", ("missing.edge", str(ROOT / "README.md"))),
        ("04_summarise.py", ("missing.edge", "missing.txt")),
    ],
)
def test_what_is_missing_is_said_in_one_line(run: Run, name: str, arguments: tuple[str, ...]) -> None:
    done = run(name, *arguments)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert "missing" in done.stderr


def test_every_example_is_tested_here() -> None:
    names = sorted(path.name for path in EXAMPLES.glob("*.py"))
    assert [name[:2] for name in names] == [f"{number:02}" for number in range(1, len(names) + 1)]
    source = Path(__file__).read_text(encoding="utf-8")
    assert [name for name in names if name not in source] == []
