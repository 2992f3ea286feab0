"""Loading a bundle with the options that commands share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgekit.runtime import LLM
    from edgekit.runtime.loading import LoadOptions


def load_llm(bundle: Path, *, threads: int | None, memory: Mapping[str, Any]) -> LLM:
    """Loads a bundle.

    Args:
        bundle: Its directory.
        threads: Threads that compute; None for the physical cores.
        memory: Values of `edgekit.cli.options.memory_options`.
    """
    from edgekit.runtime import LLM

    return LLM.load(bundle, load_options(threads, memory))


def load_options(threads: int | None, memory: Mapping[str, Any]) -> LoadOptions:
    """Returns what the options of a command say about a load."""
    from edgekit.runtime.loading import KVCacheOptions, LoadOptions

    return LoadOptions(
        threads=threads,
        memory_budget=memory["memory_budget"],
        ctx_size=memory["ctx_size"],
        kv_cache=KVCacheOptions(
            dtype=memory["kv_cache_dtype"],
            policy=memory["kv_policy"],
            budget_tokens=memory["kv_budget_tokens"],
            profile=memory["kv_profile"],
        ),
        allow_long=memory["allow_long"],
    )
