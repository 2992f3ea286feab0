"""`edgekit plan`: what a bundle will take of memory, before anything is loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgekit.cli.loading import load_options
from edgekit.cli.options import bundle_argument, json_option, memory_options, verbose_option
from edgekit.cli.output import print_json, print_table

if TYPE_CHECKING:
    from edgekit.runtime.loading import LoadPlan


@click.command
@bundle_argument
@memory_options
@json_option
@verbose_option
def plan(*, bundle: Path, memory: Mapping[str, Any], json: bool) -> None:
    """Says how BUNDLE fits into memory.

    Commands that load a bundle go by the same numbers: the KV cache's dtype, its slots and the tokens of a prefill step
    are chosen for the budget. What cannot fit is refused with exit status 4.
    """
    from edgekit.bundle import open_bundle
    from edgekit.runtime.loading import plan_load

    planned = plan_load(open_bundle(bundle), load_options(None, memory), is_loading=False)
    if json:
        print_json(_as_json(planned))
        return
    print_table(("what", "size", "bytes"), _rows(planned))
    click.echo()
    for name, value in _settings(planned):
        click.echo(f"{name:<10}{value}")


def _rows(planned: LoadPlan) -> list[tuple[str, ...]]:
    from edgekit.sizes import format_size

    memory = planned.memory
    rows = [
        ("base: interpreter, libraries, tokenizer", memory.base_bytes),
        ("weights, as the backend holds them", memory.weights_bytes),
        *_groups(planned),
        ("workspace of the largest step", memory.workspace_bytes),
        ("total", memory.total_bytes),
        ("memory budget", memory.budget_bytes),
        ("left of the budget", memory.budget_bytes - memory.total_bytes),
    ]
    if planned.kept_bytes is not None and planned.kept_bytes < memory.cache_bytes:
        rows.append(("KV cache, of a prompt that is compressed", planned.kept_bytes))
    return [(name, format_size(size), str(size)) for name, size in rows]


def _groups(planned: LoadPlan) -> Iterator[tuple[str, int]]:
    """Yields the layers of each sliding window with the bytes of their slots; a profile splits them further."""
    from edgekit.runtime.cache import slot_limit

    memory = planned.memory
    layers, sizes = Counter[int | None](), Counter[int | None]()
    for index, group in enumerate(memory.layout.groups):
        layers[group.sliding_window] += len(group.layers)
        slots = slot_limit(group.sliding_window, memory.capacity_tokens)
        sizes[group.sliding_window] += memory.layout.slot_bytes(index) * slots
    for window, count in layers.items():
        seen = "" if window is None else f" that see {window} tokens"
        yield f"KV cache of {count} layers{seen}", sizes[window]


def _settings(planned: LoadPlan) -> list[tuple[str, str]]:
    memory, policy = planned.memory, planned.policy
    budgets, kept = policy.layer_budgets_tokens, policy.budget_tokens
    if budgets is not None:
        kept = round(sum(budgets) / len(budgets))
    return [
        ("KV cache", f"{memory.layout.dtype}, {memory.capacity_tokens} slots"),
        ("policy", policy.name if kept is None else f"{policy.name}, {kept} tokens per layer"),
        ("context", f"{memory.context_tokens} tokens"),
        ("prefill", f"in steps of at most {memory.chunk_tokens} tokens"),
    ]


def _as_json(planned: LoadPlan) -> dict[str, Any]:
    memory = planned.memory
    return {
        "budget_bytes": memory.budget_bytes,
        "base_bytes": memory.base_bytes,
        "weights_bytes": memory.weights_bytes,
        "cache_bytes": memory.cache_bytes,
        "workspace_bytes": memory.workspace_bytes,
        "total_bytes": memory.total_bytes,
        "kept_bytes": planned.kept_bytes,
        "kv_cache_dtype": memory.layout.dtype,
        "capacity_tokens": memory.capacity_tokens,
        "context_tokens": memory.context_tokens,
        "chunk_tokens": memory.chunk_tokens,
        "slot_bytes": [memory.layout.slot_bytes(group) for group in range(len(memory.layout.groups))],
        "policy": planned.policy.name,
    }
