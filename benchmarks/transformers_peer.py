"""Speed of transformers in float32, with the rows and the JSON of `edgekit bench`: the peer of formats.py.

python benchmarks/transformers_speed.py MODEL [--threads 2]
"""

from __future__ import annotations

import json
import math
import resource
import statistics
import time
from pathlib import Path
from typing import Any

import click
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

REPETITIONS = 3
PROMPT_TOKENS, DECODE_TOKENS = 512, 128
WINDOW_TOKENS = 512


def prefill_tokens_per_s(model: Any, ids: torch.Tensor) -> float:
    """Times one prompt."""
    started = time.perf_counter()
    model(ids, logits_to_keep=1)
    return PROMPT_TOKENS / (time.perf_counter() - started)


def decode_tokens_per_s(model: Any, ids: torch.Tensor) -> float:
    """Times greedy steps behind a past of one token."""
    out = model(ids[:, :1], use_cache=True)
    started = time.perf_counter()
    for _ in range(DECODE_TOKENS):
        token = out.logits[:, -1:].argmax(-1)
        out = model(token, past_key_values=out.past_key_values, use_cache=True)
    return DECODE_TOKENS / (time.perf_counter() - started)


def perplexity(model: Any, token_ids: list[int], windows: int) -> float:
    """Reads windows of 512 tokens that do not overlap; all tokens of a window but the first are scored."""
    ids = torch.tensor(token_ids[: windows * WINDOW_TOKENS]).reshape(windows, WINDOW_TOKENS)
    losses = [model(window[None], labels=window[None]).loss.item() for window in ids]
    return math.exp(statistics.fmean(losses))


@click.command(help=__doc__)
@click.argument("model")
@click.option("--threads", type=int, default=2, show_default=True)
@click.option("--text", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--windows", type=int, default=16, show_default=True)
def main(model: str, threads: int, text: Path | None, windows: int) -> None:
    """Measures and prints."""
    torch.set_num_threads(threads)
    path = Path(model)
    is_gguf = path.suffix == ".gguf"
    source: dict[str, Any] = {
        "pretrained_model_name_or_path": path.parent if is_gguf else model,
        "gguf_file": path.name if is_gguf else None,
    }
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, loaded.config.vocab_size, (1, PROMPT_TOKENS), generator=generator)
    measures = {f"pp{PROMPT_TOKENS}": prefill_tokens_per_s, f"tg{DECODE_TOKENS}": decode_tokens_per_s}
    with torch.inference_mode():
        rates = {name: [measure(loaded, ids) for _ in range(1 + REPETITIONS)][1:] for name, measure in measures.items()}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    rows = [
        {"name": name, "tokens_per_s": statistics.median(values), "peak_memory_bytes": peak}
        for name, values in rates.items()
    ]
    result: dict[str, Any] = {"rows": rows}
    if text is not None:
        tokenizer = AutoTokenizer.from_pretrained(**source)
        token_ids = tokenizer(text.read_text(encoding="utf-8"), add_special_tokens=False).input_ids
        with torch.inference_mode():
            result["perplexity"] = perplexity(loaded, token_ids, windows)
    click.echo(json.dumps(result))


if __name__ == "__main__":
    main()
