"""`edgekit eval`: how well a bundle predicts a text."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from edgekit.cli.options import bundle_argument, json_option, threads_option, verbose_option
from edgekit.cli.output import print_json, progress_bar
from edgekit.cli.text_input import read_file


@click.command("eval")
@bundle_argument
@click.option("--text", type=click.Path(path_type=Path), required=True, help="File with the text, UTF-8.")
@click.option("--windows", type=int, metavar="N", help="Read the first N windows; all of them unless given.")
@click.option("--window-tokens", type=int, default=512, show_default=True, metavar="N", help="Tokens per window.")
@threads_option
@json_option
@verbose_option
def evaluate(
    *, bundle: Path, text: Path, windows: int | None, window_tokens: int, threads: int | None, json: bool
) -> None:
    """Measures the perplexity of a text under the model in BUNDLE.

    The text is cut into windows that do not overlap. All tokens of a window but the first are scored, without
    special tokens; the perplexity is the exponential of their mean negative log-likelihood.
    """
    content = read_file(text)

    from edgekit.runtime import LLM
    from edgekit.runtime.perplexity import perplexity

    llm = LLM(bundle, threads=threads)
    with progress_bar() as progress:
        report = perplexity(llm, content, windows=windows, window_tokens=window_tokens, progress=progress)
    if json:
        print_json(dataclasses.asdict(report))
        return
    click.echo(
        f"perplexity {report.perplexity:.2f} ({report.windows} windows of {report.window_tokens} tokens, "
        f"{report.scored_tokens} tokens scored; the text has {report.text_tokens})"
    )
