"""`edgekit tune-cache`: how many tokens of a prompt each layer should keep."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgekit.cli.options import (
    Decorator,
    bundle_argument,
    collected,
    json_option,
    room_options,
    threads_option,
    verbose_option,
)
from edgekit.cli.output import print_json, print_table, progress_bar
from edgekit.errors import UsageError

if TYPE_CHECKING:
    from edgekit.runtime.tuning import Comparison

_FILES: Mapping[str, Decorator] = {
    "task": click.option(
        "--task", type=click.Path(path_type=Path), required=True, help="File with the tasks to tune by, JSON Lines."
    ),
    "holdout": click.option(
        "--holdout", type=click.Path(path_type=Path), help="File with tasks that the result is compared on besides."
    ),
    "out": click.option(
        "-o", "--out", type=click.Path(path_type=Path), required=True, help="File to write the profile to."
    ),
}
# Names and defaults are those of TuneOptions, which is too heavy to import for a help text.
_TUNING: Mapping[str, Decorator] = {
    "budget_tokens": click.option(
        "--budget-tokens", type=int, required=True, metavar="N", help="Mean budget of the layers, in tokens."
    ),
    "policy": click.option(
        "--kv-policy",
        "policy",
        metavar="NAME",
        default="snapkv",
        show_default=True,
        help="What chooses tokens within a layer: snapkv, laq or laq++.",
    ),
    "iterations": click.option(
        "--iterations",
        type=int,
        default=10,
        show_default=True,
        metavar="N",
        help="Generations of the search, for each group of 8 layers.",
    ),
    "seed": click.option(
        "--seed", type=int, default=0, show_default=True, metavar="N", help="Makes the search reproducible."
    ),
}


@click.command("tune-cache")
@bundle_argument
@collected("files", _FILES)
@collected("tuning", _TUNING)
@room_options
@threads_option
@json_option
@verbose_option
def tune_cache(
    *,
    bundle: Path,
    files: Mapping[str, Path | None],
    tuning: Mapping[str, Any],
    memory: Mapping[str, Any],
    threads: int | None,
    json: bool,
) -> None:
    """Searches how many tokens of a prompt each layer of BUNDLE should keep.

    Budgets are judged by the share of tasks that the model answers with them, and searched by evolution (EvolKV) for
    a mean of --budget-tokens. The profile is for --kv-profile of other commands. A task file has one object a line:
    {"prompt": ..., "answer": ...}. BUNDLE must have been exported with --attention-scores.
    """
    task_file, out, holdout_file = files["task"], files["out"], files["holdout"]
    assert task_file is not None
    assert out is not None
    _check_writable(out)

    from edgekit.bundle import sha256_file
    from edgekit.runtime import LLM
    from edgekit.runtime.cache_profile import write_profile
    from edgekit.runtime.evolkv import load_cma
    from edgekit.runtime.loading import KVCacheOptions
    from edgekit.runtime.tasks import read_tasks
    from edgekit.runtime.tuning import TuneOptions, tune_budgets, tuned_profile

    load_cma()  # whether it is installed, before a search is prepared
    options = TuneOptions(**tuning)
    tasks, digest = read_tasks(task_file), sha256_file(task_file)
    holdout = () if holdout_file is None else read_tasks(holdout_file)
    kv_cache = KVCacheOptions(
        dtype=memory["kv_cache_dtype"], policy=options.policy, budget_tokens=options.budget_tokens, per_layer=True
    )
    llm = LLM(
        bundle,
        threads=threads,
        memory_budget=memory["memory_budget"],
        ctx_size=memory["ctx_size"],
        kv_cache=kv_cache,
        allow_long=memory["allow_long"],
    )
    with progress_bar() as progress:
        report = tune_budgets(llm, tasks, options, holdout=holdout, progress=progress)
    write_profile(out, tuned_profile(llm, report, options, digest))
    if json:
        print_json({"profile": str(out), **dataclasses.asdict(report)})
        return
    _print_budgets(report.budgets_tokens, options.budget_tokens)
    _print_comparison("tasks tuned by", report.calibration)
    if report.holdout is not None:
        _print_comparison("held-out tasks", report.holdout)
    click.echo(f"{out}: found among {report.candidates} candidates; use it with --kv-profile")


def _check_writable(out: Path) -> None:
    """Refuses a file that could not be written after a long search."""
    folder = out.parent
    if out.is_dir():
        raise UsageError(f"cannot write the profile to {str(out)!r}: it is a directory")
    if not folder.is_dir():
        raise UsageError(f"cannot write the profile to {str(out)!r}: there is no directory {str(folder)!r}")
    if not os.access(folder, os.W_OK):
        raise UsageError(f"cannot write the profile to {str(out)!r}: the directory {str(folder)!r} cannot be written")


def _print_budgets(budgets_tokens: Sequence[int], mean_tokens: int) -> None:
    rows = [(str(layer), str(tokens), f"{tokens / mean_tokens:.2f}") for layer, tokens in enumerate(budgets_tokens)]
    print_table(("layer", "tokens", "of the mean"), rows)


def _print_comparison(what: str, compared: Comparison) -> None:
    click.echo(
        f"{compared.tasks} {what}: {compared.tuned:.1%} answered with these budgets, {compared.uniform:.1%} with the "
        "same for all layers"
    )
