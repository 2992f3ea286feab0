"""`edgekit plan`: what a bundle will take of memory, before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
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
    print_table(("what", "bytes", ""), _rows(planned))
    chosen = planned.memory
    click.echo(
        f"KV cache {chosen.layout.dtype}, {chosen.capacity_tokens} slots, policy {planned.policy.name}, prefill in "
        f"steps of {chosen.chunk_tokens} tokens"
    )


def _rows(planned: LoadPlan) -> list[tuple[str, ...]]:
    from edgekit.sizes import format_size

    memory = planned.memory
    rows = [
        ("base (interpreter, libraries, tokenizer)", memory.base_bytes),
        ("weights, as the backend holds them", memory.weights_bytes),
        ("KV cache, all slots", memory.cache_bytes),
        ("workspace of the largest step", memory.workspace_bytes),
        ("total", memory.total_bytes),
        ("budget", memory.budget_bytes),
    ]
    if planned.kept_bytes is not None:
        rows.append(("of the KV cache, kept of a prompt", planned.kept_bytes))
    return [(name, str(size), format_size(size)) for name, size in rows]


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
