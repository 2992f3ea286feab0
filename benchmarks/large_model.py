"""Time, memory and size of exporting and running a model of 7 billion parameters.

    python benchmarks/large_model.py --directory DIR [--layers 32] [--keep]

Writes a checkpoint of Llama-2-7B's shape with random weights once (13.5 GB; a smaller rehearsal with fewer layers),
exports it with the command line, loads the bundle once (which lowers it) and a second time, each in a process of its
own whose memory is sampled. Prints Markdown and writes large_model.json; DIR keeps the checkpoint and the bundle with
--keep. Linux only: the memory is read from /proc.

Memory is the resident set. Of it, the anonymous part is what the process allocated; the rest are pages of mapped
files, which the system takes back whenever anybody needs the room.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import ml_dtypes
import numpy as np
import numpy.typing as npt
import psutil

STANDARD_DEVIATION = 0.02
CHUNK_ELEMENTS = 1 << 24
BLOCK = 32
SAMPLE_SECONDS = 0.05
GB = 10**9
PROMPT = "The river had risen during the night, and by morning"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a Llama; the defaults are Llama-2-7B's."""

    layers: int = 32
    hidden: int = 4096
    intermediate: int = 11008
    heads: int = 32
    vocabulary: int = 32000

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of every tensor by its name in a Hugging Face checkpoint, in the order of the layers."""
        square, wide = (self.hidden, self.hidden), (self.intermediate, self.hidden)
        table = (self.vocabulary, self.hidden)
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": table}
        for index in range(self.layers):
            layer = f"model.layers.{index}"
            shapes |= {f"{layer}.self_attn.{name}_proj.weight": square for name in ("q", "k", "v", "o")}
            shapes |= {f"{layer}.mlp.{name}_proj.weight": wide for name in ("gate", "up")}
            shapes[f"{layer}.mlp.down_proj.weight"] = wide[::-1]
            shapes |= {f"{layer}.{name}_layernorm.weight": (self.hidden,) for name in ("input", "post_attention")}
        return {**shapes, "model.norm.weight": (self.hidden,), "lm_head.weight": table}

    def config(self) -> dict[str, Any]:
        """Returns the contents of config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "bos_token_id": 1,
            "eos_token_id": 2,
        }

    def data_bytes(self) -> dict[str, int]:
        """Returns what docs/quantization.md says that an int4 bundle takes, by kind of tensor, without padding."""
        codes, scales, tables, vectors = 0, 0, 0, 0
        for shape in self.tensors().values():
            size = int(np.prod(shape))
            if len(shape) == 1:
                vectors += 4 * size
            elif shape[0] == self.vocabulary:
                tables += size + 2 * size // BLOCK
            else:
                codes += size // 2
                scales += 2 * 2 * size // BLOCK
        return {"int4 codes": codes, "scales and offsets": scales, "int8 tables": tables, "fp32 vectors": vectors}


def write_checkpoint(shape: Shape, directory: Path, shard_bytes: int) -> None:
    """Writes config.json, tokenizer.json and bfloat16 safetensors with their index, some megabytes at a time."""
    directory.mkdir(parents=True)
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    for name, dimensions in shape.tensors().items():
        if shards[-1] and sum(map(_bfloat16_bytes, (*shards[-1].values(), dimensions))) > shard_bytes:
            shards.append({})
        shards[-1][name] = dimensions
    names = [f"model-{index + 1:05}-of-{len(shards):05}.safetensors" for index in range(len(shards))]
    for seed, (name, tensors) in enumerate(zip(names, shards, strict=True)):
        _write_shard(directory / name, tensors, np.random.default_rng(seed))
    index = {
        "metadata": {"total_size": sum(map(_bfloat16_bytes, shape.tensors().values()))},
        "weight_map": {tensor: name for name, tensors in zip(names, shards, strict=True) for tensor in tensors},
    }
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    _write_tokenizer(directory / "tokenizer.json")
    (directory / "config.json").write_text(json.dumps(shape.config()))  # last: its presence means a whole checkpoint


def _bfloat16_bytes(dimensions: tuple[int, ...]) -> int:
    return 2 * int(np.prod(dimensions))


def _write_shard(path: Path, tensors: dict[str, tuple[int, ...]], rng: np.random.Generator) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dimensions in tensors.items():
        start, end = end, end + _bfloat16_bytes(dimensions)
        header[name] = {"dtype": "BF16", "shape": dimensions, "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for dimensions in tensors.values():
            for values in _values(dimensions, rng):
                file.write(values.astype(ml_dtypes.bfloat16).tobytes())


def _values(dimensions: tuple[int, ...], rng: np.random.Generator) -> Iterator[npt.NDArray[np.float32]]:
    """Gives a tensor's values in pieces: norms around 1, matrices around 0."""
    size = int(np.prod(dimensions))
    for start in range(0, size, CHUNK_ELEMENTS):
        values = rng.standard_normal(min(CHUNK_ELEMENTS, size - start), np.float32) * np.float32(STANDARD_DEVIATION)
        yield values + np.float32(1) if len(dimensions) == 1 else values


def _write_tokenizer(path: Path) -> None:
    """Trains a byte-level BPE on this file; it uses some hundred of the ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([Path(__file__).read_text(encoding="utf-8"), PROMPT], trainer)
    tokenizer.save(str(path))


@dataclass
class Memory:
    """Most resident memory in bytes: of all of it, of the anonymous part, and of the pages of mapped files."""

    resident: int = 0
    anonymous: int = 0
    file: int = 0

    def include(self, process_id: int) -> None:
        """Raises the figures to what a process holds now."""
        try:
            status = Path(f"/proc/{process_id}/status").read_text(encoding="ascii")
        except OSError:  # it has just ended
            return
        lines = re.findall(r"^(VmRSS|RssAnon|RssFile):\s+(\d+) kB$", status, re.MULTILINE)
        now = {name: 1024 * int(kilobytes) for name, kilobytes in lines}
        self.resident = max(self.resident, now.get("VmRSS", 0))
        self.anonymous = max(self.anonymous, now.get("RssAnon", 0))
        self.file = max(self.file, now.get("RssFile", 0))


@dataclass
class Stage:
    """Wall time, processor time and memory of a part of a command."""

    seconds: float
    cpu_seconds: float
    memory: Memory


@dataclass
class Measured:
    """What a command took.

    Attributes:
        seconds: Wall time.
        cpu_seconds: Processor time of its process, all threads together: on a shared machine it drifts less.
        memory: Of its process.
        children: Of the largest of the processes that it started.
        stages: The parts that it logged the end of, in order.
        result: The JSON document on stdout.
    """

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    memory: Memory = field(default_factory=Memory)
    children: Memory = field(default_factory=Memory)
    stages: dict[str, Stage] = field(default_factory=dict)
    result: dict[str, Any] = field(default_factory=dict)


def measure(*arguments: str, log: Path, cache: Path) -> Measured:
    """Runs a command of the command line and samples its memory.

    Args:
        arguments: Of `edgekit`; --json and --verbose are added.
        log: Takes the lines on stderr as they come, each after the second at which it came.
        cache: Where EdgeKit keeps lowered graphs.
    """
    command = [sys.executable, "-m", "edgekit", *arguments, "--json", "--verbose"]
    environment = {**os.environ, "EDGEKIT_CACHE_DIR": str(cache)}
    measured, started, done = Measured(), time.perf_counter(), threading.Event()
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as process, log.open("a", encoding="utf-8") as file:
        assert process.stdout is not None
        assert process.stderr is not None
        stage, before = [Memory()], 0.0
        watcher = threading.Thread(target=_watch, args=(process.pid, measured, stage, done))
        watcher.start()
        file.write(f"{' '.join(command)}\n")
        for line in process.stderr:
            file.write(f"{time.perf_counter() - started:8.1f} {line}")
            file.flush()
            if found := re.search(r": (.+) took ([\d.]+) s$", line.rstrip()):
                measured.stages[found[1]] = Stage(float(found[2]), measured.cpu_seconds - before, stage[0])
                stage[0], before = Memory(), measured.cpu_seconds
        output = process.stdout.read()
        done.set()
        watcher.join()
    measured.seconds = time.perf_counter() - started
    if process.returncode != 0:
        raise click.ClickException(f"{' '.join(command)} failed; see {log}")
    measured.result = json.loads(output)
    return measured


def _watch(process_id: int, measured: Measured, stage: list[Memory], done: threading.Event) -> None:
    process = psutil.Process(process_id)
    while not done.wait(SAMPLE_SECONDS):
        for memory in (measured.memory, stage[0]):
            memory.include(process_id)
        with suppress(psutil.NoSuchProcess):
            measured.cpu_seconds = sum(process.cpu_times()[:2])
            for child in process.children(recursive=True):
                measured.children.include(child.pid)


def report(shape: Shape, data_bytes: int, commands: Mapping[str, Measured]) -> str:
    """Returns the figures as Markdown."""
    parts = shape.data_bytes()
    weights = sum(int(np.prod(dimensions)) for dimensions in shape.tensors().values())
    versions = ", ".join(f"{name} {version(name)}" for name in ("onnxruntime", "torch", "numpy"))
    memory = psutil.virtual_memory().total / GB
    lines = [
        f"{date.today()}, {platform.machine()}, {os.cpu_count()} cores, {memory:.0f} GB of memory, {versions}.",
        f"A Llama of {shape.layers} layers, {weights / 1e9:.2f} billion weights: {2 * weights / GB:.2f} GB in bfloat16",
        "",
        "| | seconds | CPU seconds | peak resident, GB | peak anonymous, GB | peak mapped files, GB |",
        "|---|---|---|---|---|---|",
    ]
    for name, measured in commands.items():
        lines += [_row(f"**{name}**", (measured.seconds, measured.cpu_seconds), measured.memory)]
        lines += [_row(stage, (part.seconds, part.cpu_seconds), part.memory) for stage, part in measured.stages.items()]
        if measured.children.resident:
            lines += [_row("its process that lowers", (), measured.children)]
    lines += ["", "| stored as | bytes by arithmetic |", "|---|---|"]
    lines += [f"| {name} | {size:,} |" for name, size in parts.items()]
    lines += [f"| sum | {sum(parts.values()):,} |", f"| model.onnx.data | {data_bytes:,} |"]
    return "\n".join(lines)


def _row(name: str, seconds: tuple[float, ...], memory: Memory) -> str:
    times = [f"{value:.0f}" for value in seconds] or ["", ""]
    gigabytes = [f"{size / GB:.2f}" for size in (memory.resident, memory.anonymous, memory.file)]
    return f"| {' | '.join([name, *times, *gigabytes])} |"


def prepare(shape: Shape, directory: Path, shard_bytes: int) -> Path:
    """Writes the checkpoint unless it is there; returns its directory.

    Raises:
        UsageError: Another checkpoint is there.
    """
    checkpoint = directory / "checkpoint"
    config = checkpoint / "config.json"
    if config.is_file():
        if json.loads(config.read_text(encoding="utf-8")) != shape.config():
            raise click.UsageError(f"{str(checkpoint)!r} is of another shape; remove it or take another --directory")
        return checkpoint
    shutil.rmtree(checkpoint, ignore_errors=True)  # of a run that was interrupted
    write_checkpoint(shape, checkpoint, shard_bytes)
    return checkpoint


@click.command(help=__doc__)
@click.option("--directory", type=click.Path(file_okay=False, path_type=Path), required=True)
@click.option("--layers", type=int, default=32, show_default=True, help="Fewer for a rehearsal.")
@click.option("--shard-gb", type=float, default=4.0, show_default=True, help="Largest file of the checkpoint.")
@click.option("--keep", is_flag=True, help="Keep the checkpoint, the bundle and the lowered graph.")
def main(directory: Path, layers: int, shard_gb: float, keep: bool) -> None:  # noqa: FBT001 - click's interface
    """Measures and prints."""
    shape = Shape(layers=layers)
    directory.mkdir(parents=True, exist_ok=True)
    bundle, cache, log = directory / "model.edge", directory / "cache", directory / "stderr.log"
    started = time.perf_counter()
    checkpoint = prepare(shape, directory, int(shard_gb * GB))
    click.echo(f"checkpoint written in {time.perf_counter() - started:.0f} s", err=True)
    shutil.rmtree(cache, ignore_errors=True)
    log.unlink(missing_ok=True)
    run = ("run", str(bundle), PROMPT, "--max-tokens", "4")
    commands = {
        "edgekit export": measure(
            "export", str(checkpoint), str(bundle), "--precision", "int4", "--force", log=log, cache=cache
        ),
        "edgekit run, first": measure(*run, log=log, cache=cache),
        "edgekit run, later": measure(*run, log=log, cache=cache),
    }
    data_bytes = (bundle / "model.onnx.data").stat().st_size
    click.echo(report(shape, data_bytes, commands))
    figures = {"shape": asdict(shape), "arithmetic": shape.data_bytes(), "data_bytes": data_bytes}
    figures |= {name: asdict(measured) for name, measured in commands.items()}
    (directory / "large_model.json").write_text(json.dumps(figures, indent=1))
    if not keep:
        for path in (checkpoint, bundle, cache):
            shutil.rmtree(path)


if __name__ == "__main__":
    main()
