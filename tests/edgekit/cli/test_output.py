from __future__ import annotations

import json
from types import SimpleNamespace

import click
import pytest

from edgekit.cli.output import (
    megabytes,
    print_json,
    print_statistics,
    print_table,
    progress_bar,
    storage_line,
    stream_text,
)
from edgekit.runtime import CompletionChunk, CompletionOutput, Timings, Usage


def _output(text: str, *, tokens: int, rate: float) -> CompletionOutput:
    return CompletionOutput(
        text=text,
        token_ids=tuple(range(tokens)),
        finish_reason="stop",
        usage=Usage(prompt_tokens=9, cached_tokens=4, completion_tokens=tokens),
        timings=Timings(first_token_s=0.125, decode_s=1.0, decode_tokens_per_s=rate),
    )


@pytest.mark.parametrize(("pieces", "printed"), [(["a", "b"], "ab\n"), (["a", "b\n"], "ab\n"), (["a\n", ""], "a\n")])
def test_streamed_text_ends_with_one_line_end(
    capsys: pytest.CaptureFixture[str], pieces: list[str], printed: str
) -> None:
    last = _output("".join(pieces), tokens=2, rate=1.0)
    chunks = [CompletionChunk(text=pieces[0]), CompletionChunk(text=pieces[1], output=last)]
    assert stream_text(chunks) is last
    assert capsys.readouterr().out == printed


def test_streamed_text_is_passed_on_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    text = "\x1b[31mred\x1b[0m Ünïcödé\n"
    stream_text([CompletionChunk(text=text, output=_output(text, tokens=2, rate=1.0))])
    assert capsys.readouterr().out == text


def test_statistics_leave_out_what_there_is_none_of(capsys: pytest.CaptureFixture[str]) -> None:
    lines = []
    for tokens, rate in ((20, 12.34), (1, 0.0), (0, 0.0)):
        print_statistics(_output("", tokens=tokens, rate=rate))
        lines.append(capsys.readouterr().err.partition(", peak memory ")[0])
    assert lines == [
        "[9 prompt tokens (4 cached), first token 0.12 s, 20 tokens at 12.3 tokens/s",
        "[9 prompt tokens (4 cached), first token 0.12 s",
        "[9 prompt tokens (4 cached)",
    ]


def test_json_is_ascii_whatever_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"text": "Ünïcödé 東京"})
    printed = capsys.readouterr().out
    assert printed.isascii()
    assert json.loads(printed) == {"text": "Ünïcödé 東京"}


def test_a_table_aligns_its_columns(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("row", "rate"), [("pp512", "9.5"), ("tg1", "123.4")])
    assert capsys.readouterr().out == "row     rate\npp512    9.5\ntg1    123.4\n"


def test_sizes_are_in_millions_of_bytes() -> None:
    assert megabytes(102_084_000) == "102.1 MB"


def test_storage_is_counted_from_the_most_frequent_kind() -> None:
    storage = {"a": "fp16", "b": "int4 affine block 32", "c": "int4 affine block 32"}
    assert storage_line(storage) == "2 × int4 affine block 32, 1 × fp16"


def test_long_work_prints_a_line_now_and_then_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr("edgekit.cli.output.time", SimpleNamespace(monotonic=lambda: clock.now))
    with click.Context(click.Command("export")), progress_bar() as show:
        for done, clock.now in enumerate((101.0, 109.9, 110.0, 119.0, 121.0, 122.0)):
            show(f"weights: {done}", done, 6)
    assert capsys.readouterr() == ("", "[10 s] weights: 2 (3 of 6)\n[21 s] weights: 4 (5 of 6)\n")
