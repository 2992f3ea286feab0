"""The benchmark of a long conversation, with a tiny model."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner, Result

from edgekit import LLM, ExportOptions, QuantizationOptions, SamplingParams, export_bundle
from edgekit.runtime.loading import KVCacheOptions

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "long_conversation.py"
SLOTS = 256  # the tiny model's context


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    found = importlib.util.spec_from_file_location("long_conversation", SCRIPT)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules["long_conversation"] = module  # where dataclasses look their module up
    found.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    options = ExportOptions(quantization=QuantizationOptions(precision="fp32"))
    return export_bundle(tiny_llama, tmp_path_factory.mktemp("long") / "tiny.edge", options, lambda *_: None).path


@pytest.fixture(scope="module")
def llm(bundle: Path) -> LLM:
    return LLM(bundle, threads=1, kv_cache=KVCacheOptions(policy="window"))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("The quick brown fox jumps over 13 lazy dogs; it's still jumping. " * 20, encoding="utf-8")
    return path


def _evicted(turns: int, said: int, answer: int) -> list[int]:
    """Counts by hand what is evicted by the end of each turn: a sixteenth of the slots, or more if a step needs it."""
    live = evicted = 0
    counts = []
    for turn in range(turns):
        # Of the last answer one token is still to be read, and of this one the last is not.
        for step in [said + (turn > 0), *[1] * (answer - 1)]:
            if live + step > SLOTS:
                dropped = max(live + step - SLOTS, SLOTS // 16)
                live, evicted = live - dropped, evicted + dropped
            live += step
        counts.append(evicted)
    return counts


def test_a_turn_reads_only_what_is_new_and_evicts_what_has_no_room(benchmark: ModuleType, llm: LLM) -> None:
    session, said = llm.new_session(), [list(range(3 + 20 * i, 23 + 20 * i)) for i in range(12)]
    turns = list(benchmark.converse(llm, session, said, 30))
    assert [turn.length_tokens for turn in turns] == [50 * (i + 1) for i in range(12)]
    assert [turn.read_tokens for turn in turns] == [20, *[21] * 11]
    assert [turn.evicted_tokens for turn in turns] == _evicted(12, 20, 30)
    assert turns[-1].evicted_tokens > 300
    assert all(turn.decode_tokens_per_s > 0 for turn in turns)
    # More than an interpreter with numpy and less than a model of any use.
    assert all(2e7 < turn.resident_bytes < 4e9 for turn in turns)
    conversation = session.token_ids
    assert len(conversation) == 599
    assert [list(conversation[50 * i : 50 * i + 20]) for i in range(12)] == said


def test_answers_are_those_to_the_whole_conversation(benchmark: ModuleType, llm: LLM) -> None:
    session, said = llm.new_session(), [list(range(40 + i, 50 + i)) for i in range(6)]
    turns = list(benchmark.converse(llm, session, said, 20))
    assert turns[-1].evicted_tokens == 0
    conversation = session.token_ids
    for end in range(10, 180, 30):
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        afresh = llm.generate(conversation[:end], params, session=llm.new_session()).token_ids
        assert conversation[end : end + 20] == afresh[: len(conversation) - end]


def _turn(benchmark: ModuleType, number: int, resident_mb: float, rate: float, evicted: int) -> Any:
    return benchmark.Turn(
        length_tokens=60 * number,
        read_tokens=20 if number == 1 else 21,
        evicted_tokens=evicted,
        resident_bytes=int(resident_mb * 1e6),
        decode_tokens_per_s=rate,
    )


def test_the_report_has_the_most_memory_and_the_median_rate_of_each_third(benchmark: ModuleType) -> None:
    planted = [
        *((180, 90.0, 0), (190, 50.0, 0), (185, 80.0, 12)),
        *((200, 70.0, 72), (199, 9.0, 132), (198, 60.0, 192)),
        *((201, 66.0, 252), (150, 3.0, 312), (202, 900.0, 372)),
    ]
    turns = [_turn(benchmark, number, *values) for number, values in enumerate(planted, start=1)]
    assert benchmark.report(turns, 203_450_000) == (
        "| turns | resident, MB, most | decode, tokens/s, median |\n"
        "| --- | --- | --- |\n"
        "| 1-3 | 190.0 | 80.0 |\n"
        "| 4-6 | 200.0 | 60.0 |\n"
        "| 7-9 | 202.0 | 66.0 |\n"
        "\n"
        "Last third / middle third: resident 1.010, decode 1.100. Peak 203.4 MB.\n"
        "540 tokens, of which 372 were evicted, the first in turn 3. For a turn, 21 tokens were read at most."
    )


def test_turns_that_are_no_multiple_of_three_are_all_reported(benchmark: ModuleType) -> None:
    turns = [_turn(benchmark, number, 100 * number, 10.0 * number, 0) for number in range(1, 6)]
    lines = benchmark.report(turns, 500_000_000).splitlines()
    assert lines[2:5] == ["| 1-1 | 100.0 | 10.0 |", "| 2-3 | 300.0 | 25.0 |", "| 4-5 | 500.0 | 45.0 |"]
    assert lines[-1] == "300 tokens, of which 0 were evicted. For a turn, 21 tokens were read at most."


def _invoke(benchmark: ModuleType, bundle: Path, text: Path, *options: object) -> Result:
    # The process of the tests holds more than any budget that a tiny model would be worth.
    arguments = [bundle, "--text", text, "--threads", 1, "--memory-budget", "16GiB", *options]
    return CliRunner().invoke(benchmark.main, [str(argument) for argument in arguments])


def test_a_conversation_longer_than_the_cache_is_measured(benchmark: ModuleType, bundle: Path, text: Path) -> None:
    outcome = _invoke(benchmark, bundle, text, "--turns", 11, "--turn-tokens", 50, "--answer-tokens", 35)
    assert outcome.exit_code == 0, outcome.output
    evicted = _evicted(11, 15, 35)
    first = next(turn for turn, count in enumerate(evicted, start=1) if count)
    lines = outcome.stdout.splitlines()
    assert lines[0].startswith("tiny.edge, ")
    assert lines[0].endswith(f"fp32 KV cache of {SLOTS} slots, prompts in steps of 128; 11 turns of 15 + 35 tokens")
    assert "budget 17179.9 MB, planned " in lines[0]
    assert [line.split(" | ")[0] for line in lines[4:7]] == ["| 1-3", "| 4-7", "| 8-11"]
    assert lines[-1] == (
        f"550 tokens, of which {evicted[-1]} were evicted, the first in turn {first}. For a turn, 16 tokens were read "
        "at most."
    )
    most = max(float(line.split(" | ")[1]) for line in lines[4:7])
    peak = re.search(r"Peak ([\d.]+) MB\.$", lines[-2])
    assert peak is not None
    assert 20 < most <= float(peak[1])
    assert re.fullmatch(r"turn 10/11: [\d.]+ MB, [\d.]+ tokens/s, \d+ evicted\n", outcome.stderr)


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (("--turn-tokens", 40), 2, "an answer of 40 tokens leaves nothing of a turn of 40"),
        (("--turns", 2), 2, "2 is not in the range x>=3"),
        (("--turns", 3000), 1, "tokens, 60000 are needed; give a longer text or fewer turns"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    benchmark: ModuleType, bundle: Path, text: Path, options: tuple[object, ...], status: int, message: str
) -> None:
    outcome = _invoke(benchmark, bundle, text, *options)
    assert outcome.exit_code == status
    assert message in outcome.stderr
    assert outcome.stdout == ""
