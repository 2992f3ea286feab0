"""`edgekit bench`: how fast a bundle runs on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgekit.cli.loading import load_options
from edgekit.cli.options import bundle_argument, collected, json_option, memory_options, threads_option, verbose_option
from edgekit.cli.output import megabytes, print_json, print_table, progress_bar

if TYPE_CHECKING:
    from edgekit.runtime.benchmark import Measurement

# The names are those of environment variables too, such as EDGEKIT_BENCH_PP.
_ROWS = {
    "pp": click.option(
        "--pp", type=int, default=512, show_default=True, metavar="N", help="Tokens of a prompt; 0 for none."
    ),
    "tg": click.option(
        "--tg", type=int, default=128, show_default=True, metavar="N", help="Tokens to generate; 0 for none."
    ),
    "depth": click.option(
        "--depth",
        type=int,
        multiple=True,
        metavar="N",
        help="Also generate behind a past of N tokens; may be repeated.",
    ),
    "repetitions": click.option(
        "--repetitions", type=int, default=5, show_default=True, metavar="N", help="Runs per row."
    ),
}


@click.command
@bundle_argument
@collected("rows", _ROWS)
@memory_options
@threads_option
@json_option
@verbose_option
def bench(
    *,
    bundle: Path,
    rows: Mapping[str, Any],
    memory: Mapping[str, Any],
    threads: int | None,
    json: bool,
) -> None:
    """Measures the speed and memory of BUNDLE.

    Rows are named as llama.cpp's: pp reads a prompt, tg generates, tg32@N generates 32 tokens behind a past of N.
    The rate is the median over the runs, followed by the slowest and the fastest; memory is the peak of the whole
    process up to that row.
    """
    from edgekit.runtime.benchmark import BenchmarkOptions, benchmark

    options = BenchmarkOptions(
        prompt_tokens=rows["pp"], decode_tokens=rows["tg"], depths=rows["depth"], repetitions=rows["repetitions"]
    )
    with progress_bar() as progress:
        report = benchmark(bundle, options, load=load_options(threads, memory), progress=progress)
    if json:
        measured = [_row_json(measurement) for measurement in report.measurements]
        print_json({"threads": report.threads, "load_s": report.load_s, "rows": measured})
        return
    click.echo(f"threads {report.threads}, loaded in {report.load_s:.2f} s, {options.repetitions} runs per row")
    header = ("row", "tokens/s", "min-max", "peak memory")
    print_table(header, [_row(measurement) for measurement in report.measurements])


def _row(measured: Measurement) -> tuple[str, ...]:
    spread = f"{measured.min_tokens_per_s:.1f}-{measured.max_tokens_per_s:.1f}"
    return measured.name, f"{measured.tokens_per_s:.1f}", spread, megabytes(measured.peak_memory_bytes)


def _row_json(measured: Measurement) -> dict[str, Any]:
    return {
        "name": measured.name,
        "tokens": measured.tokens,
        "seconds": measured.seconds,
        "tokens_per_s": measured.tokens_per_s,
        "min_tokens_per_s": measured.min_tokens_per_s,
        "max_tokens_per_s": measured.max_tokens_per_s,
        "peak_memory_bytes": measured.peak_memory_bytes,
    }
