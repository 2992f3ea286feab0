from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from edgekit.runtime import LLM, SamplingParams
from edgekit.runtime.sampling import Sampler

Invoke: TypeAlias = Callable[..., Any]

TEXT = "The quick brown fox"
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
OPTIONS = ("--max-tokens", 24, "--ignore-eos")


@pytest.fixture
def expected(bundle: Path) -> str:
    return LLM(bundle).generate(TEXT, PARAMS).text


def test_the_completion_goes_to_stdout_and_the_statistics_to_stderr(
    invoke: Invoke, bundle: Path, expected: str
) -> None:
    outcome = invoke("run", bundle, TEXT, *OPTIONS)
    assert outcome.status == 0
    assert outcome.stdout == f"{expected}\n"
    prompt_tokens = len(LLM(bundle).tokenizer.encode(TEXT, add_special_tokens=False))
    assert outcome.stderr.startswith(f"[{prompt_tokens} prompt tokens, first token ")
    assert ", 24 tokens at " in outcome.stderr
    assert outcome.stderr.endswith(" MB, finished by length]\n")


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_a_dash_reads_stdin_without_its_last_line_end(invoke: Invoke, bundle: Path, expected: str, end: str) -> None:
    assert invoke("run", bundle, "-", *OPTIONS, stdin=f"{TEXT}{end}").stdout == f"{expected}\n"


def test_a_prompt_can_come_from_a_file(invoke: Invoke, bundle: Path, expected: str, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text(f"{TEXT}\n", encoding="utf-8")
    outcome = invoke("run", bundle, "--prompt-file", tmp_path / "prompt.txt", *OPTIONS)
    assert outcome.stdout == f"{expected}\n"


def test_json_has_all_of_the_completion(invoke: Invoke, bundle: Path) -> None:
    outcome = invoke("run", bundle, TEXT, *OPTIONS, "--logprobs", 2, "--json", "--threads", 1)
    llm = LLM(bundle, threads=1)
    output = dataclasses.asdict(llm.generate(TEXT, dataclasses.replace(PARAMS, logprobs=2)))
    got = outcome.json
    assert outcome.stderr == ""
    assert got["peak_memory_bytes"] > 10_000_000
    assert {name: got[name] for name in ("text", "finish_reason", "usage")} == {
        name: output[name] for name in ("text", "finish_reason", "usage")
    }
    assert got["token_ids"] == list(output["token_ids"])
    assert got["timings"].keys() == output["timings"].keys()
    for token, wanted in zip(got["logprobs"], output["logprobs"], strict=True):
        assert token["token_id"] == wanted["token_id"]
        assert token["logprob"] == pytest.approx(wanted["logprob"])
        assert [pair[0] for pair in token["top_logprobs"]] == [pair[0] for pair in wanted["top_logprobs"]]


def test_logprobs_without_json_are_refused(invoke: Invoke, bundle: Path) -> None:
    outcome = invoke("run", bundle, TEXT, "--logprobs", 2)
    assert (outcome.status, outcome.stdout) == (2, "")
    assert outcome.stderr == "error: logprobs are reported in JSON only; add --json\n"


@pytest.mark.parametrize("arguments", [(), (TEXT, "--prompt-file", "prompt.txt")])
def test_one_prompt_must_be_given(invoke: Invoke, bundle: Path, arguments: tuple[str, ...]) -> None:
    outcome = invoke("run", bundle, *arguments)
    assert outcome.status == 2
    assert outcome.stderr == "error: give a prompt, - for stdin or --prompt-file; exactly one of them\n"


def test_an_empty_prompt_is_refused(invoke: Invoke, bundle: Path) -> None:
    outcome = invoke("run", bundle, "-", stdin="\n")
    assert (outcome.status, outcome.stdout) == (2, "")
    assert outcome.stderr.startswith("error: the prompt is empty; ")


def test_a_prompt_longer_than_the_context_is_refused_with_the_numbers(invoke: Invoke, bundle: Path) -> None:
    outcome = invoke("run", bundle, "x " * 300, "--json")
    assert outcome.status == 4
    assert outcome.json["error"]["code"] == "does_not_fit"
    assert "tokens, the model's context 256; " in outcome.json["error"]["message"]


def test_text_appears_while_it_is_generated_and_an_interrupt_ends_it_with_statistics(
    start: Callable[..., Any], endless_bundle: Path
) -> None:
    running = start("run", endless_bundle, TEXT, "--max-tokens", 1_000_000, "--ignore-eos")
    running.wait_for_characters(1)
    assert running.process.poll() is None
    running.interrupt()
    running.wait_for("finished by cancelled]")
    running.rest()
    assert running.process.returncode == 130
    assert "Traceback" not in running.seen
    assert "error" not in running.seen


def test_an_interrupt_leaves_the_json_of_what_was_generated(
    invoke: Invoke, endless_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = Sampler.sample

    def interrupted(self: Sampler, logits: Any, history: Any) -> Any:
        if len(history) > 20:
            os.kill(os.getpid(), signal.SIGINT)
        return sample(self, logits, history)

    monkeypatch.setattr(Sampler, "sample", interrupted)
    outcome = invoke("run", endless_bundle, TEXT, "--max-tokens", 1_000, "--ignore-eos", "--json")
    assert outcome.status == 130
    assert outcome.json["finish_reason"] == "cancelled"
    assert 0 < outcome.json["usage"]["completion_tokens"] < 1_000
