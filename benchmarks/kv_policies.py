"""What is still found in a long prompt once a KV policy has dropped most of it: all policies, on the same needles.

    python benchmarks/kv_policies.py BUNDLE [--prompt-tokens 2048] [--budget-tokens 512] [--depths 5] [--samples 10]
        [--distractors 3] [--seed 0] [--kv-cache-dtype auto] [--profile FILE] [--threads 2]

BUNDLE was exported with --attention-scores. "stop" keeps everything and is what the others are to be held against;
they keep --budget-tokens, "window" of all that was read, the others of the prompt. With --profile, the budgets of its
layers are moved to that mean and given to snapkv; ask for another --seed than the tasks had that it was tuned by. The
tasks are those of `edgekit eval --needle`. The standard error is that of a share of independent tasks, sqrt(p (1 − p) /
n), which says nothing where all or none were found. Prints Markdown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path

import click

from edgekit.cli.output import progress_bar
from edgekit.progress import Progress
from edgekit.runtime.llm import LLM
from edgekit.runtime.loading import KVCacheOptions
from edgekit.runtime.memory_plan import DTYPE_CHOICES, DtypeChoice
from edgekit.runtime.needle import DIGITS, NeedleOptions, NeedleReport, NeedleTask, needle_tasks, run_needle
from edgekit.runtime.policies import POLICIES, PolicyOptions

# Room for an answer, of a token per digit and a few around them.
ANSWER_TOKENS = DIGITS + 11


def load(bundle: Path, options: NeedleOptions, kv_cache: KVCacheOptions, threads: int) -> LLM:
    """Loads a bundle with room for all of a prompt, whatever is kept of it then.

    Raises:
        click.UsageError: No prompt is longer than the budget.
    """
    assert kv_cache.budget_tokens is not None
    if max(options.lengths) <= kv_cache.budget_tokens:
        raise click.UsageError(
            f"prompts of {max(options.lengths)} tokens are not longer than the budget of {kv_cache.budget_tokens}, so "
            "that nothing is evicted"
        )
    # With a policy that goes by scores, for a bundle without them to be refused before it is loaded.
    return LLM(bundle, threads=threads, ctx_size=max(options.lengths) + ANSWER_TOKENS, kv_cache=kv_cache)


def compared_policies(llm: LLM) -> dict[str, PolicyOptions]:
    """Returns the policies by their names in the table: of the budget, and of the profile, that the model was given."""
    given = llm.plan.policy
    policies = {
        name: PolicyOptions(name=name, budget_tokens=None if name == "stop" else given.budget_tokens)
        for name in POLICIES
    }
    if given.layer_budgets_tokens is not None:
        policies[f"{given.name}, profile"] = given
    return policies


def measure(
    llm: LLM, tasks: Sequence[NeedleTask], policies: Mapping[str, PolicyOptions], progress: Progress
) -> dict[str, NeedleReport]:
    """Gives the same tasks to every policy, each task in a conversation of its own."""
    for policy in policies.values():
        llm.new_session(policy)  # one that does not suit the model is refused before any is asked
    reports = {}
    for name, policy in policies.items():

        def told(what: str, done: int, total: int, name: str = name) -> None:
            progress(f"{name}, {what}", done, total)

        reports[name] = run_needle(llm, tasks, policy=policy, progress=told)
        click.echo(f"{name}: {reports[name].correct} of {reports[name].samples}", err=True)
    return reports


def standard_error(share: float, count: int) -> float:
    """Returns the standard error of a share of independent trials, from the binomial distribution."""
    return math.sqrt(share * (1 - share) / count)


def table(reports: Mapping[str, NeedleReport]) -> str:
    """Returns a row per policy."""
    depths = next(iter(reports.values())).depths
    header = ["policy", "found", "accuracy", "standard error", *(f"at {depth:.0%}" for depth in depths)]
    lines = [f"| {' | '.join(header)} |", "| --- " * len(header) + "|"]
    for name, found in reports.items():
        error = standard_error(found.accuracy, found.samples)
        cells = [f"{cell.accuracy:.0%}" for cell in found.cells]
        row = [name, f"{found.correct} of {found.samples}", f"{found.accuracy:.1%}", f"{error:.1%}", *cells]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


@click.command(help=__doc__)
@click.argument("bundle", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--prompt-tokens", type=click.IntRange(min=1), default=2048, show_default=True)
@click.option("--budget-tokens", type=click.IntRange(min=1), default=512, show_default=True)
@click.option("--depths", type=click.IntRange(min=2), default=5, show_default=True, help="Spread from 0 to 1.")
@click.option("--samples", type=click.IntRange(min=1), default=10, show_default=True, help="Tasks of each depth.")
@click.option("--distractors", type=click.IntRange(min=0), default=3, show_default=True, help="Needles of other words.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--kv-cache-dtype", type=click.Choice(DTYPE_CHOICES), default="auto", show_default=True)
@click.option("--profile", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Of tune-cache.")
@click.option("--threads", type=click.IntRange(min=1), default=2, show_default=True)
def main(
    *,
    bundle: Path,
    prompt_tokens: int,
    budget_tokens: int,
    depths: int,
    samples: int,
    distractors: int,
    seed: int,
    kv_cache_dtype: DtypeChoice,
    profile: Path | None,
    threads: int,
) -> None:
    """Measures and prints."""
    options = NeedleOptions(
        lengths=(prompt_tokens,),
        depths=tuple(index / (depths - 1) for index in range(depths)),
        samples=samples,
        seed=seed,
        distractors=distractors,
    )
    kv_cache = KVCacheOptions(dtype=kv_cache_dtype, policy="snapkv", budget_tokens=budget_tokens, profile=profile)
    llm = load(bundle, options, kv_cache, threads)
    tasks = needle_tasks(llm.tokenizer, llm.vocab_size, options)
    with progress_bar() as progress:
        reports = measure(llm, tasks, compared_policies(llm), progress)
    by = "" if profile is None else f", profile {profile.name}"
    click.echo(
        f"{bundle.name}, {date.today()}, {threads} threads, {llm.plan.memory.layout.dtype} KV cache, budget "
        f"{budget_tokens} of {prompt_tokens} tokens, {distractors} distractors, seed {seed}{by}\n"
    )
    click.echo(table(reports))


if __name__ == "__main__":
    main()
