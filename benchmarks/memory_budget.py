"""Whether a process keeps its memory budget: the plan beside the peak that was measured.

    python benchmarks/memory_budget.py BUNDLE --text FILE [--budgets 256MiB,384MiB] [--prompt 6000] [--tokens 200]

Each budget has a process of its own, which reads a prompt and generates. Where the prompt does not fit, its policy is
"window". Peak is the largest resident set (VmHWM). Prints Markdown.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import click

from edgekit.bundle import open_bundle
from edgekit.runtime.loading import KVCacheOptions, LoadOptions, plan_load
from edgekit.runtime.peak_memory import peak_memory_bytes
from edgekit.runtime.sampling import SamplingParams


def run(bundle: Path, text: Path, options: LoadOptions, prompt_tokens: int, tokens: int) -> dict[str, Any]:
    """Reads and generates in this process; returns what was planned and what was held."""
    from edgekit.runtime.llm import LLM

    llm = LLM.load(bundle, options)
    # Not the whole text, whose tokens would be what takes most memory.
    beginning = text.read_text(encoding="utf-8")[: 8 * prompt_tokens]
    ids = llm.tokenizer.encode(beginning, add_special_tokens=False)[:prompt_tokens]
    generated = llm.generate(ids, SamplingParams(max_tokens=tokens, ignore_eos=True))
    memory = llm.plan.memory
    return {
        "dtype": memory.layout.dtype,
        "slots": memory.capacity_tokens,
        "chunk": memory.chunk_tokens,
        "planned": memory.total_bytes,
        "peak": peak_memory_bytes(),
        "generated": generated.usage.completion_tokens,
    }


def policy_for(bundle: Path, budget: str, needed: int) -> str:
    """Returns "stop" where the whole text fits, "window" otherwise; decided in the parent, which holds no model."""
    plan = plan_load(open_bundle(bundle), LoadOptions(memory_budget=budget), is_loading=False)
    return "stop" if plan.memory.capacity_tokens >= needed else "window"


def load_options(budget: str, policy: str, threads: int, needed: int) -> LoadOptions:
    """Returns the options of a run: with room for the whole text, or for as much as fits."""
    cache = KVCacheOptions(policy=policy)
    return LoadOptions(
        threads=threads, memory_budget=budget, kv_cache=cache, ctx_size=needed if policy == "stop" else None
    )


@click.command(help=__doc__)
@click.argument("bundle", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--text", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=True)
@click.option("--budgets", default="256MiB,384MiB,768MiB", show_default=True)
@click.option("--prompt", type=click.IntRange(min=1), default=6000, show_default=True)
@click.option("--tokens", type=click.IntRange(min=1), default=200, show_default=True)
@click.option("--threads", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--policy", hidden=True, help="Of one run, whose result is printed as JSON.")
def main(*, bundle: Path, text: Path, budgets: str, prompt: int, tokens: int, threads: int, policy: str | None) -> None:
    """Measures and prints."""
    if policy is not None:
        options = load_options(budgets, policy, threads, prompt + tokens)
        click.echo(json.dumps(run(bundle, text, options, prompt, tokens)))
        return
    click.echo("| budget, MB | policy | KV cache | slots | chunk | planned, MB | peak, MB | planned / peak |")
    click.echo("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for budget in budgets.split(","):
        chosen = policy_for(bundle, budget, prompt + tokens)
        command = [sys.executable, __file__, str(bundle), "--text", str(text), "--budgets", budget, "--policy", chosen]
        command += ["--prompt", str(prompt), "--tokens", str(tokens), "--threads", str(threads)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(done.stdout)
        planned, peak = found["planned"] / 1e6, found["peak"] / 1e6
        row = (budget, chosen, found["dtype"], found["slots"], found["chunk"])
        click.echo(f"| {' | '.join(map(str, row))} | {planned:.0f} | {peak:.0f} | {planned / peak:.2f} |")


if __name__ == "__main__":
    main()
