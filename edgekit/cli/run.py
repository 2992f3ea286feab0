"""`edgekit run`: continues a text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from edgekit.cli.interrupt import INTERRUPTED, interrupt_cancels
from edgekit.cli.loading import load_llm
from edgekit.cli.options import (
    bundle_argument,
    json_option,
    memory_options,
    sampling_options,
    threads_option,
    verbose_option,
)
from edgekit.cli.output import completion_json, print_json, print_statistics, stream_text
from edgekit.cli.text_input import read_file, read_stdin, without_line_end
from edgekit.errors import UsageError


@click.command
@bundle_argument
@click.argument("prompt", required=False)
@click.option("--prompt-file", type=click.Path(path_type=Path), help="Read the prompt from this file.")
@sampling_options
@memory_options
@threads_option
@json_option
@verbose_option
def run(
    *,
    bundle: Path,
    prompt: str | None,
    prompt_file: Path | None,
    sampling: Mapping[str, Any],
    memory: Mapping[str, Any],
    threads: int | None,
    json: bool,
) -> None:
    """Continues PROMPT, as it is, with the model in BUNDLE.

    A PROMPT of - is read from stdin. The last line end of stdin or of a file does not count. Ctrl-C ends the text;
    what there is of it is reported, and the exit status is 130.
    """
    if sampling["logprobs"] is not None and not json:
        raise UsageError("logprobs are reported in JSON only; add --json")
    text = _prompt(prompt, prompt_file)

    from edgekit.runtime import SamplingParams

    params = SamplingParams(**sampling)
    llm = load_llm(bundle, threads=threads, memory=memory)
    session = llm.new_session()
    with interrupt_cancels(session):
        if json:
            output = llm.generate(text, params, session=session)
        else:
            output = stream_text(llm.stream(text, params, session=session))
    if json:
        print_json(completion_json(output))
    else:
        print_statistics(output)
    if output.finish_reason == "cancelled":
        click.get_current_context().exit(INTERRUPTED)


def _prompt(prompt: str | None, file: Path | None) -> str:
    if (prompt is None) == (file is None):
        raise UsageError("give a prompt, - for stdin or --prompt-file; exactly one of them")
    if file is not None:
        return without_line_end(read_file(file))
    assert prompt is not None
    return without_line_end(read_stdin()) if prompt == "-" else prompt
