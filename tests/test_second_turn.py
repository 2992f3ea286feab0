"""The benchmark of a second question, with a tiny model."""

from __future__ import annotations

import importlib.util
import itertools
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import pytest
from click.testing import CliRunner, Result

from edgekit import LLM, ExportOptions, QuantizationOptions, SamplingParams, export_bundle
from tests.tiny_configs import SIZES

MakeCheckpoint: TypeAlias = Callable[[Mapping[str, Any]], Path]

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "second_turn.py"
# Says first how many messages there are, so that no later turn begins as an earlier one does.
COUNTING_TEMPLATE = (
    "{{ messages | length }}{% for message in messages %}\n{{ message['role'] }}: {{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}\nassistant:{% endif %}"
)


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    found = importlib.util.spec_from_file_location("second_turn", SCRIPT)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules["second_turn"] = module  # where dataclasses look their module up
    found.loader.exec_module(module)
    return module


def _export(checkpoint: Path, output: Path) -> Path:
    options = ExportOptions(quantization=QuantizationOptions(precision="fp32"))
    return export_bundle(checkpoint, output, options, lambda *_: None).path


@pytest.fixture(scope="module")
def checkpoint(make_checkpoint: MakeCheckpoint) -> Path:
    """A Llama with room for both turns in tokens of a letter or two."""
    return make_checkpoint({"model_type": "llama", **SIZES, "bos_token_id": 0, "max_position_embeddings": 512})


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Path:
    return _export(checkpoint, tmp_path_factory.mktemp("second") / "tiny.edge")


@pytest.fixture(scope="module")
def llm(bundle: Path) -> LLM:
    return LLM(bundle, threads=1)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("The quick brown fox jumps over 13 lazy dogs; it's still jumping. " * 8, encoding="utf-8")
    return path


def test_a_document_is_the_beginning_of_a_text(benchmark: ModuleType, llm: LLM, text: Path) -> None:
    document = benchmark.document_of(llm, text, 50)
    assert text.read_text().startswith(document)
    assert len(llm.tokenizer.encode(document, add_special_tokens=False)) == 50


def test_the_second_turn_reads_what_the_first_has_not(benchmark: ModuleType, llm: LLM, text: Path) -> None:
    document = benchmark.document_of(llm, text, 60)
    params = SamplingParams(max_tokens=8)
    first, second = benchmark.chat(llm, document, params)

    messages = [{"role": "user", "content": f"{document}\n\n{benchmark.QUESTIONS[0]}"}]
    prompt = llm.tokenizer.encode_prompt(llm.render_chat(messages))
    answer = llm.generate(prompt, params, session=llm.new_session())
    assert (first.prompt_tokens, first.cached_tokens, first.answer) == (len(prompt), 0, answer.text)

    messages += [
        {"role": "assistant", "content": answer.text},
        {"role": "user", "content": benchmark.QUESTIONS[1]},
    ]
    longer = llm.tokenizer.encode_prompt(llm.render_chat(messages))
    held = [*prompt, *answer.token_ids[:-1]]  # the last token is not read
    pairs = zip(held, longer, strict=False)
    shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    assert (second.prompt_tokens, second.cached_tokens) == (len(longer), shared)
    assert second.answer == llm.generate(longer, params, session=llm.new_session()).text
    assert shared >= len(prompt)
    assert min(first.first_text_s, second.first_text_s) > 0


def _turn(benchmark: ModuleType, prompt: int, cached: int, milliseconds: float) -> Any:
    return benchmark.Turn(prompt_tokens=prompt, cached_tokens=cached, first_text_s=milliseconds / 1000, answer="Yes.")


def test_the_report_has_medians_and_the_ratios_of_rounds(benchmark: ModuleType) -> None:
    times = [(2000, 100), (1000, 80), (1250, 50)]
    rounds = [(_turn(benchmark, 2030, 0, a), _turn(benchmark, 2080, 2062, b)) for a, b in times]
    assert benchmark.report(rounds) == (
        "| turn | prompt, tokens | in the cache | read | first text, ms, median | fastest | slowest |\n"
        "| --- | --- | --- | --- | --- | --- | --- |\n"
        "| 1 | 2030 | 0 | 2030 | 1250.0 | 1000.0 | 2000.0 |\n"
        "| 2 | 2080 | 2062 | 18 | 80.0 | 50.0 | 100.0 |\n"
        "\n"
        "Turn 2 / turn 1: 0.064 of the medians, 0.040 to 0.080 by round.\n"
        "Turn 2 found 2030 of the 2030 tokens of turn 1's prompt in the cache."
    )


def test_rounds_that_differ_are_reported_by_the_worst(benchmark: ModuleType) -> None:
    cached = [(2080, 2062), (2090, 1500)]
    rounds = [(_turn(benchmark, 2030, 0, 1000), _turn(benchmark, a, b, 100)) for a, b in cached]
    lines = benchmark.report(rounds).splitlines()
    assert lines[3].startswith("| 2 | 2080-2090 | 1500-2062 | 18-590 | ")
    assert lines[-1] == "Turn 2 found 1500 of the 2030 tokens of turn 1's prompt in the cache."


def _invoke(benchmark: ModuleType, bundle: Path, text: Path, *options: object) -> Result:
    arguments = [bundle, "--text", text, "--threads", 1, *options]
    return CliRunner().invoke(benchmark.main, [str(argument) for argument in arguments])


def test_both_turns_are_measured_in_every_round(benchmark: ModuleType, bundle: Path, llm: LLM, text: Path) -> None:
    outcome = _invoke(benchmark, bundle, text, "--document-tokens", 60, "--answer-tokens", 8, "--rounds", 2)
    assert outcome.exit_code == 0, outcome.output
    first, second = benchmark.chat(llm, benchmark.document_of(llm, text, 60), SamplingParams(max_tokens=8))
    lines = outcome.stdout.splitlines()
    assert lines[0].startswith("tiny.edge, ")
    assert lines[0].endswith(", 1 threads, fp32 KV cache, 60 tokens of text.txt, answers of at most 8, 2 rounds")
    assert lines[4].startswith(f"| 1 | {first.prompt_tokens} | 0 | {first.prompt_tokens} | ")
    read = second.prompt_tokens - second.cached_tokens
    assert lines[5].startswith(f"| 2 | {second.prompt_tokens} | {second.cached_tokens} | {read} | ")
    of = f"{first.prompt_tokens} of the {first.prompt_tokens}"
    assert lines[-1] == f"Turn 2 found {of} tokens of turn 1's prompt in the cache."
    assert [line.split(":")[0] for line in outcome.stderr.splitlines()] == ["round 1/2", "round 2/2"]


def test_a_template_that_begins_anew_every_turn_is_seen(
    benchmark: ModuleType, checkpoint: Path, text: Path, tmp_path: Path
) -> None:
    changed = Path(shutil.copytree(checkpoint, tmp_path / "changed"))
    (changed / "chat_template.jinja").write_text(COUNTING_TEMPLATE, encoding="utf-8")
    bundle = _export(changed, tmp_path / "counting.edge")
    outcome = _invoke(benchmark, bundle, text, "--document-tokens", 60, "--answer-tokens", 8, "--rounds", 1)
    assert outcome.exit_code == 0, outcome.output
    _, prompt, cached, read, *_ = outcome.stdout.splitlines()[5].strip("| ").split(" | ")
    assert (cached, read) == ("0", prompt)
    assert "Turn 2 found 0 of the " in outcome.stdout


def test_a_text_that_is_too_short_is_refused(benchmark: ModuleType, bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("four", encoding="utf-8")
    outcome = _invoke(benchmark, bundle, tmp_path / "short.txt", "--document-tokens", 60)
    assert outcome.exit_code == 1
    assert outcome.stderr.startswith(f"Error: the first 4 characters of {tmp_path / 'short.txt'} are ")
    assert outcome.stderr.endswith(" tokens, 60 are needed; give a longer text\n")
