from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from edgekit.runtime import LLM
from edgekit.runtime.loading import KVCacheOptions
from edgekit.runtime.needle import NeedleOptions, needle_tasks, run_needle
from edgekit.runtime.perplexity import perplexity
from edgekit.runtime.tasks import read_tasks
from tests.tiny_configs import SIZES
from tests.wordy_tokenizers import byte_level_words

Invoke: TypeAlias = Callable[..., Any]
MakeCheckpoint: TypeAlias = Callable[[Mapping[str, Any]], Path]

SMALL = ("--needle", "--lengths", "200,240", "--depths", "0,0.5", "--samples", 2, "--distractors", 1, "--threads", 1)
OPTIONS = NeedleOptions(lengths=(200, 240), depths=(0.0, 0.5), samples=2, distractors=1)


@pytest.fixture(scope="module")
def wordy(tmp_path_factory: pytest.TempPathFactory, make_checkpoint: MakeCheckpoint) -> Path:
    """A bundle with a context of 256 tokens whose vocabulary has words, and which says what is attended to."""
    from edgekit.export.exporter import ExportOptions, export_bundle
    from edgekit.export.graph.kv_cache import GraphOptions
    from edgekit.export.storage_plan import QuantizationOptions

    tokenizer = byte_level_words()
    config = {"model_type": "llama", **SIZES, "bos_token_id": 0, "vocab_size": tokenizer.get_vocab_size()}
    checkpoint = make_checkpoint(config)
    tokenizer.save(str(checkpoint / "tokenizer.json"))
    options = ExportOptions(
        quantization=QuantizationOptions(precision="fp32"), graph=GraphOptions(attention_scores=True)
    )
    return export_bundle(checkpoint, tmp_path_factory.mktemp("wordy") / "model.edge", options, lambda *_: None).path


@pytest.fixture
def obliging(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that finds needles in 200 tokens, and in the middle of longer texts: no tiny one finds any."""
    import edgekit.runtime.needle

    def answers(_llm: object, task: Any, _session: object) -> bool:
        first = task.prompt.index(task.answer[1])  # the digits; a space comes before them, and before others
        return len(task.prompt) == 200 or first > 60

    monkeypatch.setattr(edgekit.runtime.needle, "answers", answers)


def test_json_has_every_cell_and_what_it_was_measured_with(invoke: Invoke, wordy: Path) -> None:
    outcome = invoke("eval", wordy, *SMALL, "--json")
    llm = LLM(wordy, threads=1)
    report = run_needle(llm, needle_tasks(llm.tokenizer, llm.vocab_size, OPTIONS))
    assert (outcome.status, outcome.stderr) == (0, "")
    found = outcome.json["needle"]
    assert list(outcome.json) == ["needle"]
    assert (found["accuracy"], found["correct"], found["samples"]) == (report.accuracy, report.correct, 8)
    assert found["cells"] == [
        {"length_tokens": length, "depth": depth, "samples": 2, "correct": cell.correct, "accuracy": cell.correct / 2}
        for (length, depth), cell in zip([(200, 0.0), (200, 0.5), (240, 0.0), (240, 0.5)], report.cells, strict=True)
    ]
    assert found["options"] == {"lengths": [200, 240], "depths": [0.0, 0.5], "samples": 2, "seed": 0, "distractors": 1}
    assert found["kv_cache_dtype"] == "fp32"
    assert found["kv_policy"] == {"name": "stop", "budget_tokens": None, "layer_budgets_tokens": None}


@pytest.mark.usefixtures("obliging")
def test_the_table_has_a_row_for_each_length(invoke: Invoke, wordy: Path) -> None:
    outcome = invoke("eval", wordy, *SMALL)
    assert (outcome.status, outcome.stderr) == (0, "")
    assert outcome.stdout == (
        "tokens  at 0%  at 50%   all\n"
        "200      100%    100%  100%\n"
        "240        0%    100%   50%\n"
        "75.0% of 8 needles found, fp32 KV cache, policy stop\n"
    )


@pytest.mark.parametrize(
    ("options", "conditions"),
    [
        (("--kv-policy", "snapkv", "--kv-budget-tokens", 64), "fp32 KV cache, policy snapkv of 64 tokens"),
        (("--kv-policy", "laq++", "--kv-budget-tokens", 64), "fp32 KV cache, policy laq++ of 64 tokens"),
        (("--kv-policy", "window", "--kv-budget-tokens", 64), "fp32 KV cache, policy window of 64 tokens"),
        (("--kv-cache-dtype", "int8"), "int8 KV cache, policy stop"),
    ],
)
def test_memory_options_are_those_of_the_conversations(
    invoke: Invoke, wordy: Path, options: tuple[object, ...], conditions: str
) -> None:
    outcome = invoke("eval", wordy, *SMALL, *options)
    assert outcome.status == 0
    assert outcome.stdout.splitlines()[-1].partition("found, ")[2] == conditions


def test_a_policy_gets_to_read_the_prompts(invoke: Invoke, wordy: Path) -> None:
    # Longer than the context, which only a window slides over.
    options = ("--needle", "--lengths", 300, "--depths", "0.5", "--samples", 1, "--threads", 1)
    assert invoke("eval", wordy, *options, "--kv-policy", "window", "--kv-budget-tokens", 64).status == 0
    refused = invoke("eval", wordy, *options)
    assert refused.status == 4
    assert "the prompt has 300 tokens, the model's context 256" in refused.stderr


@pytest.mark.parametrize(("value", "depths"), [("3", (0.0, 0.5, 1.0)), ("0.25", (0.25,)), ("1.0,0", (1.0, 0.0))])
def test_depths_are_a_list_or_a_count(invoke: Invoke, wordy: Path, value: str, depths: tuple[float, ...]) -> None:
    outcome = invoke(
        "eval", wordy, "--needle", "--lengths", "250", "--depths", value, "--samples", 1, "--json", "--threads", 1
    )
    assert tuple(cell["depth"] for cell in outcome.json["needle"]["cells"]) == depths


def test_saved_tasks_are_those_that_were_asked(invoke: Invoke, wordy: Path, tmp_path: Path) -> None:
    assert invoke("eval", wordy, *SMALL, "--seed", 5, "--save-tasks", tmp_path / "tasks.jsonl").status == 0
    llm = LLM(wordy, threads=1)
    options = NeedleOptions(lengths=(200, 240), depths=(0.0, 0.5), samples=2, distractors=1, seed=5)
    expected = [task.task for task in needle_tasks(llm.tokenizer, llm.vocab_size, options)]
    assert read_tasks(tmp_path / "tasks.jsonl") == expected


@pytest.mark.usefixtures("obliging")
def test_a_plot_is_drawn(invoke: Invoke, wordy: Path, tmp_path: Path) -> None:
    outcome = invoke("eval", wordy, *SMALL, "--plot", tmp_path / "needle.svg")
    assert outcome.status == 0
    assert "<svg" in (tmp_path / "needle.svg").read_text(encoding="utf-8")
    assert [path.name for path in tmp_path.iterdir()] == ["needle.svg"]


def test_text_and_needle_may_be_evaluated_together(invoke: Invoke, wordy: Path, tmp_path: Path) -> None:
    text = "badan kefet logip miros nuvul podan " * 40
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    both = ("eval", wordy, *SMALL, "--text", tmp_path / "text.txt", "--window-tokens", 200, "--kv-cache-dtype", "int8")
    outcome = invoke(*both, "--json")
    llm = LLM(wordy, threads=1, kv_cache=KVCacheOptions(dtype="int8"))
    assert outcome.json["perplexity"] == pytest.approx(perplexity(llm, text, window_tokens=200).perplexity)
    assert outcome.json["perplexity"] != perplexity(LLM(wordy, threads=1), text, window_tokens=200).perplexity
    assert (outcome.json["needle"]["samples"], outcome.json["needle"]["kv_cache_dtype"]) == (8, "int8")
    lines = invoke(*both).stdout.splitlines()
    assert lines[0].startswith("perplexity ")
    assert lines[1].startswith("tokens ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "nothing to evaluate: give --text FILE for perplexity, --needle for retrieval, or both"),
        (("--needle", "--windows", 3), "--windows is an option of --text"),
        (("--needle", "--window-tokens", 64), "--window-tokens is an option of --text"),
        (("--text", "x", "--lengths", 64), "--lengths is an option of --needle"),
        (("--text", "x", "--depths", 4), "--depths is an option of --needle"),
        (("--text", "x", "--samples", 4), "--samples is an option of --needle"),
        (("--text", "x", "--distractors", 4), "--distractors is an option of --needle"),
        (("--text", "x", "--seed", 0), "--seed is an option of --needle"),
        (("--text", "x", "--plot", "a.png"), "--plot is an option of --needle"),
        (("--text", "x", "--save-tasks", "a"), "--save-tasks is an option of --needle"),
        (("--text", "x", "--kv-policy", "snapkv"), "--kv-policy snapkv does not apply to --text"),
        (("--text", "x", "--needle", "--kv-policy", "window"), "--kv-policy window does not apply to --text"),
        (("--needle", "--lengths", "512,x"), "--lengths is '512,x'; it must be whole numbers with commas"),
        (("--needle", "--lengths", "512,"), "--lengths is '512,'"),
        (("--needle", "--lengths", "0.5"), "--lengths is '0.5'; it must be whole numbers"),
        (("--needle", "--lengths", ""), "--lengths is ''"),
        (("--needle", "--lengths", "0"), "length is 0; it must be an integer of at least 1"),
        (("--needle", "--lengths=-512"), "length is -512"),
        (("--needle", "--lengths", "20"), "length is 20; it must be at least"),
        (("--needle", "--lengths", "200,200"), "none of them twice"),
        (("--needle", "--depths", "a"), "--depths is 'a'; it must be numbers with commas"),
        (("--needle", "--depths", "1"), "--depths 1 is a count, and at least 2 are spread"),
        (("--needle", "--depths", "0"), "--depths 0 is a count"),
        (("--needle", "--depths=-3"), "--depths -3 is a count"),
        (("--needle", "--depths", "0,1.5"), "depth is 1.5; it must be from 0"),
        (("--needle", "--depths", "nan,1"), "depth is nan"),
        (("--needle", "--depths", "0,0"), "none of them twice"),
        (("--needle", "--samples", 0), "samples is 0; it must be an integer of at least 1"),
        (("--needle", "--distractors", -1), "distractors is -1"),
        (("--needle", "--seed", -1), "seed is -1"),
        (("--needle", "--plot", "a.jpg"), "the suffix of the plot 'a.jpg' is '.jpg'; known: .pdf, .png, .svg"),
        (("--needle", "--plot", "no/a.png"), "cannot write the plot to 'no/a.png': there is no directory 'no'"),
        (("--needle", "--save-tasks", "no/a"), "cannot write the tasks to 'no/a': there is no directory 'no'"),
        (("--needle", "--save-tasks", "."), "cannot write the tasks to '.': it is a directory"),
    ],
)
def test_what_makes_no_sense_is_refused(invoke: Invoke, wordy: Path, options: tuple[object, ...], message: str) -> None:
    outcome = invoke("eval", wordy, *options)
    assert (outcome.status, outcome.stdout) == (2, "")
    assert outcome.stderr.startswith("error: ")
    assert message in outcome.stderr


def test_a_plot_without_matplotlib_is_refused_before_anything_is_loaded(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    outcome = invoke("eval", "no-bundle", "--needle", "--plot", tmp_path / "a.png", "--json")
    assert outcome.status == 3
    assert json.loads(outcome.stdout)["error"]["message"] == (
        "matplotlib is not installed; run: pip install 'edgekit[plot]'"
    )


def test_a_vocabulary_without_words_is_refused(invoke: Invoke, bundle: Path) -> None:
    outcome = invoke("eval", bundle, "--needle")
    assert outcome.status == 3
    assert "words that are one token" in outcome.stderr


def test_a_policy_that_the_bundle_cannot_serve_is_refused(invoke: Invoke, bundle: Path) -> None:
    outcome = invoke("eval", bundle, "--needle", "--kv-policy", "snapkv", "--kv-budget-tokens", 64)
    assert outcome.status == 3
    assert "--attention-scores" in outcome.stderr
