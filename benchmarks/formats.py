"""Size, quality and speed of every storage format of a model, against transformers in the same run.

    python benchmarks/formats.py MODEL --text FILE [--windows 16] [--threads 2] [--output DIR]

Each figure is measured by the command line in a process of its own, so that a peak of memory belongs to one
format. The speeds of all formats are measured in turn, several rounds over, since a shared machine drifts: the
median over the rounds is reported. Prints Markdown; with --output also writes formats.json.
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import click

PEER = Path(__file__).with_name("transformers_peer.py")
FORMATS: dict[str, list[str]] = {
    "fp32": ["--precision", "fp32"],
    "fp16": ["--precision", "fp16"],
    "int8": ["--precision", "int8"],
    "int4 affine": ["--precision", "int4"],
    "int8 symmetric, requantized": ["--precision", "int8", "--scheme", "symmetric", "--requantize"],
    "int4 symmetric, requantized": ["--precision", "int4", "--scheme", "symmetric", "--requantize"],
}


def edgekit(*arguments: str) -> dict[str, Any]:
    """Runs one command of the command line and returns its JSON."""
    command = [sys.executable, "-m", "edgekit", *arguments, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def transformers(model: str, threads: int, *options: str) -> dict[str, Any]:
    """Measures transformers in float32 on the same tokens."""
    command = [sys.executable, str(PEER), model, "--threads", str(threads), *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def rates(rounds: list[dict[str, Any]]) -> dict[str, float]:
    """Returns the median rate of each row over the rounds, and the largest peak of memory in MB."""
    names = [row["name"] for row in rounds[0]["rows"]]
    result = {
        name: statistics.median(row["tokens_per_s"] for one in rounds for row in one["rows"] if row["name"] == name)
        for name in names
    }
    result["peak_mb"] = max(row["peak_memory_bytes"] for one in rounds for row in one["rows"]) / 1e6
    return result


@click.command(help=__doc__)
@click.argument("model")
@click.option("--text", type=click.Path(exists=True, dir_okay=False), required=True)
@click.option("--windows", type=int, default=16, show_default=True)
@click.option("--threads", type=int, default=2, show_default=True)
@click.option("--rounds", type=int, default=3, show_default=True)
@click.option("--output", type=click.Path(path_type=Path))
def main(model: str, text: str, windows: int, threads: int, rounds: int, output: Path | None) -> None:
    """Measures and prints."""
    with tempfile.TemporaryDirectory() as folder:
        results: dict[str, dict[str, Any]] = {}
        for name, options in FORMATS.items():
            bundle = str(Path(folder) / f"{name.replace(' ', '-').replace(',', '')}.edge")
            exported = edgekit("export", model, bundle, *options)
            quality = edgekit("eval", bundle, "--text", text, "--windows", str(windows), "--threads", str(threads))
            results[name] = {"bundle": bundle, "export": exported, "quality": quality, "speed": []}
        peer: list[dict[str, Any]] = []
        for first in (True, *[False] * (rounds - 1)):
            peer.append(transformers(model, threads, *(["--text", text, "--windows", str(windows)] if first else [])))
            for result in results.values():
                bench = ("bench", result["bundle"], "--threads", str(threads), "--repetitions", "3")
                result["speed"].append(edgekit(*bench))
    report(results, peer, threads, windows)
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        (output / "formats.json").write_text(json.dumps({"formats": results, "transformers": peer}, indent=1))


def report(results: dict[str, dict[str, Any]], peers: list[dict[str, Any]], threads: int, windows: int) -> None:
    """Prints the table, with speeds as ratios to transformers in this run too."""
    click.echo(f"{date.today()}, {platform.processor() or platform.machine()}, {threads} threads, {windows} windows\n")
    columns = (
        "format",
        "MB",
        "perplexity",
        "KL at export",
        "tg128",
        "× transformers",
        "pp512",
        "× transformers",
        "peak MB",
    )
    click.echo(f"| {' | '.join(columns)} |")
    click.echo("|---" * len(columns) + "|")
    peer = rates(peers)
    rows: list[tuple[str, dict[str, Any] | None, dict[str, float]]] = [("transformers fp32", None, peer)]
    rows += [(name, result, rates(result["speed"])) for name, result in results.items()]
    for name, result, speed in rows:
        size = "" if result is None else f"{result['export']['size_bytes'] / 1e6:.1f}"
        quality = f"{(peers[0] if result is None else result['quality'])['perplexity']:.2f}"
        divergence = "" if result is None else f"{result['export']['parity']['source']['kl_divergence']:.1e}"
        decode, prefill = speed["tg128"], speed["pp512"]
        click.echo(
            f"| {name} | {size} | {quality} | {divergence} | {decode:.0f} | {decode / peer['tg128']:.2f} "
            f"| {prefill:.0f} | {prefill / peer['pp512']:.2f} | {speed['peak_mb']:.0f} |"
        )


if __name__ == "__main__":
    main()
