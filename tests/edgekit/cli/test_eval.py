from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from edgekit.runtime import LLM
from edgekit.runtime.perplexity import perplexity

Invoke: TypeAlias = Callable[..., Any]

TEXT = "The quick brown fox jumps over 13 lazy dogs; in 2024 it's still jumping. " * 8


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    return tmp_path / "text.txt"


def test_the_result_says_the_windows_and_tokens_that_were_used(invoke: Invoke, bundle: Path, file: Path) -> None:
    outcome = invoke("eval", bundle, "--text", file, "--windows", 2, "--window-tokens", 40)
    report = perplexity(LLM(bundle), TEXT, windows=2, window_tokens=40)
    assert outcome.stderr == ""
    assert outcome.stdout == (
        f"perplexity {report.perplexity:.2f} (2 windows of 40 tokens, 78 tokens scored; the text has "
        f"{report.text_tokens})\n"
    )


def test_json_has_the_report(invoke: Invoke, bundle: Path, file: Path) -> None:
    outcome = invoke("eval", bundle, "--text", file, "--window-tokens", 40, "--json", "--threads", 1)
    report = dataclasses.asdict(perplexity(LLM(bundle, threads=1), TEXT, window_tokens=40))
    assert outcome.json == pytest.approx(report)
    assert outcome.json["windows"] == outcome.json["text_tokens"] // 40


def test_more_windows_than_the_text_has_are_refused(invoke: Invoke, bundle: Path, file: Path) -> None:
    outcome = invoke("eval", bundle, "--text", file, "--window-tokens", 64, "--windows", 1000, "--json")
    assert outcome.status == 2
    assert "fewer than the 1000 asked for" in outcome.json["error"]["message"]


def test_a_text_has_to_exist(invoke: Invoke, bundle: Path) -> None:
    assert (
        invoke("eval", bundle, "--text", "no.txt").stderr == "error: cannot read 'no.txt': No such file or directory\n"
    )
