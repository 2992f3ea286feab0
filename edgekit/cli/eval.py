"""`edgekit eval`: how well a bundle predicts a text, and how well it finds a fact again in a long one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgekit.cli.loading import load_llm
from edgekit.cli.needle_plot import check_plot, check_writable, draw_needle
from edgekit.cli.options import (
    Decorator,
    bundle_argument,
    collected,
    json_option,
    memory_options,
    threads_option,
    verbose_option,
)
from edgekit.cli.output import print_json, print_table, progress_bar
from edgekit.cli.text_input import read_file
from edgekit.errors import UsageError

if TYPE_CHECKING:
    from edgekit.runtime import LLM
    from edgekit.runtime.needle import NeedleOptions, NeedleReport
    from edgekit.runtime.perplexity import PerplexityReport

# None stands for what was not given, for an option without its evaluation to be refused. Defaults are those of
# `perplexity` and of NeedleOptions, which are too heavy to import for a help text.
_TEXT: Mapping[str, Decorator] = {
    "text": click.option("--text", type=click.Path(path_type=Path), help="Measure the perplexity of this file, UTF-8."),
    "windows": click.option(
        "--windows", type=int, metavar="N", help="Read the first N windows of --text; all of them unless given."
    ),
    "window_tokens": click.option(
        "--window-tokens", type=int, metavar="N", help="Tokens per window of --text; 512 unless given."
    ),
}
_NEEDLE: Mapping[str, Decorator] = {
    "needle": click.option("--needle", is_flag=True, help="Ask for facts hidden in long texts."),
    "lengths": click.option(
        "--lengths", metavar="N,...", help="Tokens of the --needle texts; 512,1024,2048 unless given."
    ),
    "depths": click.option(
        "--depths",
        metavar="D,...",
        help="Where the needle is, from 0.0 to 1.0, or how many depths to spread over that; 5 unless given.",
    ),
    "samples": click.option(
        "--samples", type=int, metavar="N", help="--needle texts of each length and depth; 5 unless given."
    ),
    "distractors": click.option(
        "--distractors", type=int, metavar="N", help="Other needles in each --needle text; 3 unless given."
    ),
    "seed": click.option("--seed", type=int, metavar="N", help="Makes other --needle texts; 0 unless given."),
    "plot": click.option(
        "--plot", type=click.Path(path_type=Path), help="Draw the --needle results: a .png, .svg or .pdf."
    ),
    "save_tasks": click.option(
        "--save-tasks", type=click.Path(path_type=Path), help="Write the --needle texts, for tune-cache."
    ),
}


@click.command("eval")
@bundle_argument
@collected("text_options", _TEXT)
@collected("needle_options", _NEEDLE)
@memory_options
@threads_option
@json_option
@verbose_option
def evaluate(
    *,
    bundle: Path,
    text_options: Mapping[str, Any],
    needle_options: Mapping[str, Any],
    memory: Mapping[str, Any],
    threads: int | None,
    json: bool,
) -> None:
    """Measures the perplexity of a text, or how well facts are found again in long ones, with the model in BUNDLE.

    --text is cut into windows that do not overlap. All tokens of a window but the first are scored, without
    special tokens; the perplexity is the exponential of their mean negative log-likelihood.

    --needle makes texts of words from the model's vocabulary, hides a number at each depth and asks for it at the
    end. Run it with other --kv-cache-dtype and --kv-policy to see what they cost.
    """
    _check_options(text_options, needle_options, str(memory["kv_policy"]))
    content = None if text_options["text"] is None else read_file(text_options["text"])
    asked = _asked(needle_options) if needle_options["needle"] else None

    llm = load_llm(bundle, threads=threads, memory=memory)
    predicted = None if content is None else _perplexity(llm, content, text_options)
    found = None if asked is None else _needle(llm, asked, needle_options)
    if json:
        document = {} if predicted is None else dataclasses.asdict(predicted)
        print_json(document if asked is None or found is None else {**document, "needle": _json(llm, asked, found)})
        return
    if predicted is not None:
        click.echo(
            f"perplexity {predicted.perplexity:.2f} ({predicted.windows} windows of {predicted.window_tokens} tokens, "
            f"{predicted.scored_tokens} tokens scored; the text has {predicted.text_tokens})"
        )
    if found is not None:
        _print_needle(found, _conditions(llm))


def _check_options(text: Mapping[str, Any], needle: Mapping[str, Any], policy: str) -> None:
    """Refuses what no evaluation would go by, before anything is loaded."""
    if text["text"] is None and not needle["needle"]:
        raise UsageError("nothing to evaluate: give --text FILE for perplexity, --needle for retrieval, or both")
    for main, is_on, options in (("text", text["text"] is not None, text), ("needle", needle["needle"], needle)):
        given = [name for name, value in options.items() if name != main and value is not None]
        if given and not is_on:
            raise UsageError(f"--{given[0].replace('_', '-')} is an option of --{main}; add that, or leave it out")
    if text["text"] is not None and policy != "stop":
        raise UsageError(
            f"perplexity is measured over all tokens of a window, so --kv-policy {policy} does not apply to --text; "
            "leave it out, or evaluate with --needle alone"
        )
    if needle["plot"] is not None:
        check_plot(needle["plot"])
    if needle["save_tasks"] is not None:
        check_writable("the tasks", needle["save_tasks"])


def _asked(options: Mapping[str, Any]) -> NeedleOptions:
    from edgekit.runtime.needle import NeedleOptions

    given = {name: options[name] for name in ("samples", "distractors", "seed") if options[name] is not None}
    if options["lengths"] is not None:
        given["lengths"] = _numbers("--lengths", options["lengths"], int)
    if options["depths"] is not None:
        given["depths"] = _depths(options["depths"])
    return NeedleOptions(**given)


def _depths(value: str) -> tuple[float, ...]:
    """Returns a list of depths, which a number without a point or comma is the length of."""
    if "," in value or not value.strip().lstrip("+-").isdecimal():
        return _numbers("--depths", value, float)
    (count,) = _numbers("--depths", value, int)
    if count < 2:
        raise UsageError(f"--depths {value} is a count, and at least 2 are spread; for one depth, write it like 0.5")
    return tuple(index / (count - 1) for index in range(int(count)))


def _numbers(option: str, value: str, kind: type[int] | type[float]) -> tuple[Any, ...]:
    try:
        return tuple(kind(part) for part in value.split(","))
    except ValueError as error:
        what = "whole numbers" if kind is int else "numbers"
        raise UsageError(f"{option} is {value!r}; it must be {what} with commas between them") from error


def _perplexity(llm: LLM, content: str, options: Mapping[str, Any]) -> PerplexityReport:
    from edgekit.runtime.perplexity import perplexity

    given = {name: options[name] for name in ("windows", "window_tokens") if options[name] is not None}
    with progress_bar() as progress:
        return perplexity(llm, content, progress=progress, **given)


def _needle(llm: LLM, asked: NeedleOptions, options: Mapping[str, Any]) -> NeedleReport:
    from edgekit.runtime.needle import needle_tasks, run_needle
    from edgekit.runtime.tasks import write_tasks

    tasks = needle_tasks(llm.tokenizer, llm.vocab_size, asked)
    if options["save_tasks"] is not None:
        write_tasks(options["save_tasks"], [task.task for task in tasks])
    with progress_bar() as progress:
        report = run_needle(llm, tasks, progress=progress)
    if options["plot"] is not None:
        draw_needle(report, options["plot"], f"{report.accuracy:.1%} answered, {_conditions(llm)}")
    return report


def _conditions(llm: LLM) -> str:
    policy = llm.plan.policy
    budget = f" of {policy.budget_tokens} tokens" if policy.budget_tokens is not None else ""
    profile = " by a profile of layers" if policy.layer_budgets_tokens is not None else ""
    return f"{llm.plan.memory.layout.dtype} KV cache, policy {policy.name}{budget}{profile}"


def _json(llm: LLM, asked: NeedleOptions, report: NeedleReport) -> dict[str, Any]:
    policy = llm.plan.policy
    return {
        "accuracy": report.accuracy,
        "correct": report.correct,
        "samples": report.samples,
        "cells": [{**dataclasses.asdict(cell), "accuracy": cell.accuracy} for cell in report.cells],
        "options": dataclasses.asdict(asked),
        "kv_cache_dtype": llm.plan.memory.layout.dtype,
        "kv_policy": dataclasses.asdict(policy),
    }


def _print_needle(report: NeedleReport, conditions: str) -> None:
    rows = [
        (str(length), *(f"{cell.accuracy:.0%}" for cell in report.row(length)), f"{_share(report, length):.0%}")
        for length in report.lengths
    ]
    print_table(("tokens", *(f"at {depth:.0%}" for depth in report.depths), "all"), rows)
    click.echo(f"{report.accuracy:.1%} of {report.samples} needles found, {conditions}")


def _share(report: NeedleReport, length: int) -> float:
    cells = report.row(length)
    return sum(cell.correct for cell in cells) / sum(cell.samples for cell in cells)
