"""This runtime, onnxruntime-genai and llama.cpp on the same model, tokens, depths and threads, in one run.

    python benchmarks/compare.py --model MODEL.gguf [--genai-python PATH] [--llama-python PATH] [--out DIR]

Every engine works in a process of its own and only one at a time. In every round each figure is taken from one engine
after the other, since a shared machine drifts; medians over the rounds are reported, and ratios are those of figures
of the same round. Memory is the peak of one more process per engine and depth. Peers that are not installed are
reported as absent. Prints Markdown; with --out also writes compare.md, compare.json and compare.png.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import date
from pathlib import Path

import click
import numpy as np
from peers.models import ModelFile, ModelStore
from peers.protocol import AbsentError
from peers.report import Comparison, EngineResult, draw, markdown
from peers.worker import Worker

from edgekit.bundle import TOKENIZER
from edgekit.checkpoint import open_checkpoint
from edgekit.runtime.tokenizer import Tokenizer

# Names of the engines, and the module that runs each; of ours, the scheme of the weights and the KV cache's dtype.
ENGINES: Mapping[str, str] = {
    "edgekit-symmetric": "edgekit",
    "edgekit-symmetric-int8": "edgekit",
    "edgekit-affine-int8": "edgekit",
    "genai-int4": "genai",
    "llama.cpp-q4_0": "llama_cpp",
    "llama.cpp-q4_1": "llama_cpp",
}
DECODE_TOKENS = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure.

    Attributes:
        prefill: Tokens of the prompt that is read.
        depths: Tokens in the cache when decoding starts.
        rounds: How often every figure is taken.
        threads: Threads of every engine.
        pythons: The interpreter of each module in `ENGINES`.
        genai_builder: The interpreter that builds onnxruntime-genai's model.
    """

    prefill: int
    depths: tuple[int, ...]
    rounds: int
    threads: int
    pythons: Mapping[str, str]
    genai_builder: str

    @property
    def prompt_tokens(self) -> int:
        """Longest prompt."""
        return max(self.prefill, *self.depths)

    @property
    def max_tokens(self) -> int:
        """Longest text: one token is drawn from the prompt's logits, and each step draws another."""
        return self.prompt_tokens + 1 + DECODE_TOKENS


def prompt_tokens(model: Path, text: Path | None, count: int) -> tuple[list[int], str]:
    """Returns token ids, and where they came from: the text's beginning, or a fixed pseudo-random sequence.

    Raises:
        click.ClickException: The text, or the model's context, is too short.
    """
    with open_checkpoint(model) as checkpoint, tempfile.TemporaryDirectory() as folder:
        spec = checkpoint.spec
        if count + DECODE_TOKENS + 1 > spec.max_positions:
            raise click.ClickException(
                f"{count} tokens and {DECODE_TOKENS + 1} more are beyond the model's context of {spec.max_positions}"
            )
        if text is None:
            return np.random.default_rng(0).integers(spec.vocab_size, size=count).tolist(), "random tokens"
        checkpoint.save_tokenizer(Path(folder))
        tokenizer = Tokenizer(Path(folder, TOKENIZER))
        ids = tokenizer.encode(text.read_text(encoding="utf-8"), add_special_tokens=False)
    if len(ids) < count:
        raise click.ClickException(f"{text} has {len(ids)} tokens, {count} are needed; give a longer text")
    return ids[:count], text.name


def model_file(name: str, store: ModelStore, options: Options, version: str) -> ModelFile:
    """Makes, or finds, the model that an engine runs."""
    kind = name.split("-")[1]
    if name.startswith("edgekit"):
        return store.bundle(kind, "int8" if name.endswith("-int8") else "fp32")
    if name.startswith("genai"):
        return store.genai(options.genai_builder, version.split(",")[0])
    return store.gguf(kind.upper())


@contextmanager
def prepared(
    names: Sequence[str], store: ModelStore, options: Options
) -> Iterator[tuple[dict[str, tuple[Worker, ModelFile]], dict[str, str]]]:
    """Starts the engines and makes their models; those that are absent are left out, with the reason."""
    with ExitStack() as stack:
        running: dict[str, tuple[Worker, ModelFile]] = {}
        absent: dict[str, str] = {}
        for name in names:
            click.echo(f"preparing {name}", err=True)
            module = ENGINES[name]
            try:
                worker = stack.enter_context(Worker(module, options.pythons[module]))
                running[name] = worker, model_file(name, store, options, worker.version)
            except AbsentError as reason:
                absent[name] = str(reason)
        yield running, absent


def measure_speed(
    running: Mapping[str, tuple[Worker, ModelFile]], ids: list[int], options: Options
) -> dict[str, dict[str, list[float]]]:
    """Returns tokens/s by engine, row and round."""
    for worker, model in running.values():
        worker.call("load", str(model.path), options.threads, options.max_tokens)
        worker.call("prefill", ids[: options.prefill])  # not counted: the first run of everything is slow
    rows: dict[str, tuple[str, int, list[object]]] = {
        f"pp{options.prefill}": ("prefill", options.prefill, [ids[: options.prefill]])
    }
    for depth in options.depths:
        rows[f"tg{DECODE_TOKENS}@{depth}"] = ("decode", DECODE_TOKENS, [ids[:depth], DECODE_TOKENS])
    rates: dict[str, dict[str, list[float]]] = {name: {row: [] for row in rows} for name in running}
    for turn in range(options.rounds):
        for row, (call, tokens, arguments) in rows.items():
            for name, (worker, _) in running.items():
                rates[name][row].append(tokens / worker.call(call, *arguments))
            figures = ", ".join(f"{name} {rates[name][row][-1]:.1f}" for name in running)
            click.echo(f"round {turn + 1}/{options.rounds} {row}: {figures}", err=True)
    return rates


def measure_memory(name: str, model: ModelFile, ids: list[int], options: Options) -> dict[int, int]:
    """Returns by depth the peak of a process that reads so many tokens and generates, in bytes."""
    peaks = {}
    for depth in options.depths:
        with Worker(ENGINES[name], options.pythons[ENGINES[name]]) as worker:
            worker.call("load", str(model.path), options.threads, depth + 1 + DECODE_TOKENS)
            worker.call("decode", ids[:depth], DECODE_TOKENS)
            peaks[depth] = worker.call("peak_memory")
    return peaks


def compare(model: Path, names: Sequence[str], cache: Path, text: Path | None, options: Options) -> Comparison:
    """Measures everything."""
    ids, prompt = prompt_tokens(model, text, options.prompt_tokens)
    with tempfile.TemporaryDirectory() as scratch:
        store = ModelStore(model.resolve(), cache.resolve(), Path(scratch))
        with prepared(names, store, options) as (running, absent):
            rates = measure_speed(running, ids, options)
            versions = {name: worker.version for name, (worker, _) in running.items()}
            models = {name: file for name, (_, file) in running.items()}
        results = [
            EngineResult(
                name=name,
                version=versions[name],
                format=file.format,
                size_bytes=file.size_bytes,
                kv_cache=file.kv_cache,
                tokens_per_s=rates[name],
                peak_memory_bytes=measure_memory(name, file, ids, options),
            )
            for name, file in models.items()
        ]
    return Comparison(
        model=model.name,
        day=str(date.today()),
        cpu=cpu_name(),
        threads=options.threads,
        prompt=prompt,
        engines=tuple(results),
        absent=absent,
    )


def cpu_name() -> str:
    """Returns the CPU's name and how many of its cores this process may use."""
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    return f"{found[1] if found else platform.machine()} ({len(os.sched_getaffinity(0))} cores)"


def write(comparison: Comparison, directory: Path) -> None:
    """Writes the report in three forms; without matplotlib there is no chart, and that is said."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "compare.md").write_text(markdown(comparison), encoding="utf-8")
    (directory / "compare.json").write_text(json.dumps(dataclasses.asdict(comparison), indent=1), encoding="utf-8")
    try:
        draw(comparison, directory / "compare.png")
    except ModuleNotFoundError as missing:
        click.echo(f"no compare.png: {missing}; pip install matplotlib", err=True)


def _names(_: click.Context, __: click.Parameter, value: str) -> tuple[str, ...]:
    names = tuple(value.split(","))
    if unknown := sorted(set(names) - set(ENGINES)):
        raise click.BadParameter(f"{unknown[0]!r}; there are {', '.join(ENGINES)}")
    return tuple(dict.fromkeys(names))


def _depths(_: click.Context, __: click.Parameter, value: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", value):
        raise click.BadParameter(f"{value!r}; it must be positive numbers with commas between them")
    return tuple(dict.fromkeys(map(int, value.split(","))))


FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
PYTHON = click.Path(exists=True, dir_okay=False)


@click.command(help=__doc__)
@click.option("--model", type=FILE, required=True, help="A GGUF file.")
@click.option("--engines", default=",".join(ENGINES), show_default=True, callback=_names)
@click.option("--prefill", type=click.IntRange(min=1), default=512, show_default=True, help="Tokens of the prompt.")
@click.option("--depths", default="128,1024,4096,8000", show_default=True, callback=_depths)
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--threads", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--text", type=FILE, help="Tokens of the prompts; random ones unless given.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--cache",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("build/compare"),
    show_default=True,
    help="Keeps the peers' models between runs.",
)
@click.option("--genai-python", type=PYTHON, default=sys.executable, help="Interpreter with onnxruntime-genai.")
@click.option("--genai-builder-python", type=PYTHON, help="One that has torch and transformers too.")
@click.option("--llama-python", type=PYTHON, default=sys.executable, help="Interpreter with llama-cpp-python.")
def main(
    *,
    model: Path,
    engines: tuple[str, ...],
    prefill: int,
    depths: tuple[int, ...],
    rounds: int,
    threads: int,
    text: Path | None,
    out: Path | None,
    cache: Path,
    genai_python: str,
    genai_builder_python: str | None,
    llama_python: str,
) -> None:
    """Measures and prints."""
    options = Options(
        prefill=prefill,
        depths=depths,
        rounds=rounds,
        threads=threads,
        pythons={"edgekit": sys.executable, "genai": genai_python, "llama_cpp": llama_python},
        genai_builder=genai_builder_python or genai_python,
    )
    comparison = compare(model, engines, cache, text, options)
    click.echo(markdown(comparison))
    if out is not None:
        write(comparison, out)


if __name__ == "__main__":
    main()
