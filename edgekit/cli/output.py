"""What commands print: results to stdout, progress and statistics to stderr."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from edgekit.cli.options import is_verbose

if TYPE_CHECKING:
    from edgekit.bundle import ParityRecord
    from edgekit.progress import Progress
    from edgekit.runtime import CompletionChunk, CompletionOutput

LINE_SECONDS = 10.0


def print_json(value: Any) -> None:
    """Prints a JSON document in ASCII, which every terminal and locale can take."""
    click.echo(json.dumps(value, indent=2))


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints rows in columns: the first aligned left, the others right."""
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for first, *others in lines:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        click.echo("  ".join([first.ljust(widths[0]), *cells]).rstrip())


def megabytes(size_bytes: int) -> str:
    """Returns a size in units of 10^6 bytes."""
    return f"{size_bytes / 1e6:.1f} MB"


def storage_counts(storage: Mapping[str, str]) -> dict[str, int]:
    """Counts the matrices by how they are stored, the most frequent first."""
    return dict(Counter(storage.values()).most_common())


def storage_line(storage: Mapping[str, str]) -> str:
    """Says how many matrices are stored how."""
    return ", ".join(f"{count} × {kind}" for kind, count in storage_counts(storage).items())


def parity_line(parity: ParityRecord) -> str:
    """Says how far an export is from its source."""
    source, stored = parity.source, parity.stored
    return (
        f"KL divergence {source.kl_divergence:.2g} nats (allowed {source.max_kl_divergence:g}), top-1 agreement "
        f"{source.top1_agreement:.1%}, largest logit error {source.max_abs_error:.2g} over {parity.tokens} tokens; "
        f"graph on its own weights {stored.kl_divergence:.1g} nats"
    )


def stream_text(chunks: Iterable[CompletionChunk]) -> CompletionOutput:
    """Prints a completion as it comes, and a line end if it has none; returns it."""
    output, text = None, ""
    for chunk in chunks:
        # Not click.echo, which takes escape sequences out of what goes to a file.
        sys.stdout.write(chunk.text)
        sys.stdout.flush()
        text, output = chunk.text or text, chunk.output
    if not text.endswith("\n"):
        sys.stdout.write("\n")
        sys.stdout.flush()
    assert output is not None
    return output


def completion_json(output: CompletionOutput) -> dict[str, Any]:
    """Returns a completion and the process's peak memory as JSON values."""
    from edgekit.runtime.peak_memory import peak_memory_bytes

    return {**dataclasses.asdict(output), "peak_memory_bytes": peak_memory_bytes()}


def print_statistics(output: CompletionOutput) -> None:
    """Prints on stderr what a completion took."""
    from edgekit.runtime.peak_memory import peak_memory_bytes

    usage, timings = output.usage, output.timings
    cached = f" ({usage.cached_tokens} cached)" if usage.cached_tokens else ""
    parts = [f"{usage.prompt_tokens} prompt tokens{cached}"]
    if usage.completion_tokens:
        parts.append(f"first token {timings.first_token_s:.2f} s")
    if timings.decode_tokens_per_s:
        parts.append(f"{usage.completion_tokens} tokens at {timings.decode_tokens_per_s:.1f} tokens/s")
    parts.append(f"peak memory {megabytes(peak_memory_bytes())}")
    click.echo(f"[{', '.join(parts)}, finished by {output.finish_reason}]", err=True)


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Gives the function that shows progress on stderr: as a bar on a terminal, as lines now and then in a log."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar
    from rich.table import Column

    console = Console(stderr=True)
    if is_verbose() or not console.is_terminal:
        yield _progress_lines()
        return
    what = TextColumn("{task.description}", table_column=Column(width=50, no_wrap=True))
    with Bar(what, BarColumn(), TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield show


def _progress_lines() -> Progress:
    """Returns a function that prints what is being done every ten seconds, so that short work prints nothing."""
    started = shown = time.monotonic()

    def show(what: str, done: int, total: int) -> None:
        nonlocal shown
        now = time.monotonic()
        if now - shown >= LINE_SECONDS:
            shown = now
            click.echo(f"[{now - started:.0f} s] {what} ({done + 1} of {total})", err=True)

    return show
