"""What a load is asked for, and how that becomes a plan: shared by `LLM` and `edgekit plan`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from edgekit.bundle import Bundle
from edgekit.errors import UnsupportedError, UsageError, one_of
from edgekit.runtime.available_memory import available_memory, resident_bytes
from edgekit.runtime.cache_profile import read_profile
from edgekit.runtime.memory_plan import DtypeChoice, MemoryPlan, MemoryRequest, plan_memory
from edgekit.runtime.policies import POLICIES, PolicyOptions
from edgekit.sizes import parse_size

# Without a budget, so much of the machine is left to others.
RESERVE_SHARE = 0.05
RESERVE_BYTES = 128 << 20


@dataclass(frozen=True, kw_only=True)
class KVCacheOptions:
    """How conversations keep their past.

    Attributes:
        dtype: "fp32", "fp16" or "int8"; "auto" for what the bundle was exported with, or int8 where that does not fit.
        policy: What happens when the cache is full: a key of `edgekit.runtime.policies.POLICIES`.
        budget_tokens: Tokens that the policy keeps; None for all that there is room for.
        profile: File with budgets of each layer, for snapkv and laq; with `budget_tokens`, moved to that mean.
    """

    dtype: DtypeChoice = "auto"
    policy: str = "stop"
    budget_tokens: int | None = None
    profile: str | os.PathLike[str] | None = None


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How a bundle is to be loaded; see `edgekit.runtime.llm.LLM`.

    Attributes:
        threads: Threads that compute; None for the physical cores that this process may use.
        memory_budget: Most memory of the whole process, such as "512MiB"; None for what the machine has left.
        ctx_size: Tokens that the KV cache must have room for; None for as many as fit, up to the model's context.
        kv_cache: How conversations keep their past.
        allow_long: Whether the context may be longer than what the model was trained on.
    """

    threads: int | None = None
    memory_budget: str | None = None
    ctx_size: int | None = None
    kv_cache: KVCacheOptions = KVCacheOptions()
    allow_long: bool = False


@dataclass(frozen=True, kw_only=True)
class LoadPlan:
    """How a bundle is going to be loaded.

    Attributes:
        memory: What it takes.
        policy: What its conversations do when their cache is full, unless they are told otherwise.
    """

    memory: MemoryPlan
    policy: PolicyOptions

    @property
    def kept_bytes(self) -> int | None:
        """Bytes of the cache that the policy keeps of a prompt; None for all that there is room for."""
        policy, layout = self.policy, self.memory.layout
        budgets = policy.layer_budgets_tokens or (policy.budget_tokens,) * sum(len(g.layers) for g in layout.groups)
        if any(budget is None for budget in budgets):
            return None
        kept = [budgets[group.layers[0]] or 0 for group in layout.groups]
        return sum(layout.slot_bytes(index) * tokens for index, tokens in enumerate(kept))


def plan_load(bundle: Bundle, options: LoadOptions, *, is_loading: bool = True) -> LoadPlan:
    """Decides everything about a load before anything is loaded.

    Args:
        bundle: The bundle.
        options: What is asked for.
        is_loading: Whether it is this process that will hold the model.

    Raises:
        UsageError: An option is out of range, or the profile is for another number of layers.
        UnsupportedError: The policy needs what the bundle lacks.
        DoesNotFitError: The budget is too small.
        CorruptArtifactError: The profile is malformed.
    """
    policy = _policy(bundle, options.kv_cache)
    held, wanted = resident_bytes() if is_loading else 0, options.memory_budget
    request = MemoryRequest(
        budget_bytes=_default_budget(held) if wanted is None else parse_size(wanted, "memory budget"),
        context_tokens=options.ctx_size,
        dtype=options.kv_cache.dtype,
        layer_budgets_tokens=policy.layer_budgets_tokens,
        allow_long=options.allow_long,
        base_bytes=held,
    )
    return LoadPlan(memory=plan_memory(bundle, request), policy=policy)


def _policy(bundle: Bundle, options: KVCacheOptions) -> PolicyOptions:
    name = options.policy
    if name not in POLICIES:
        raise UsageError(f"KV policy {one_of(str(name), POLICIES)}")
    if POLICIES[name].needs_attention_mass and not bundle.manifest.attention_scores:
        raise UnsupportedError(
            f"KV policy {name!r} goes by the attention that tokens get, which bundle {str(bundle.path)!r} does not "
            "say; export it with --attention-scores, or use the policy 'stop' or 'window'"
        )
    if options.profile is None:
        return PolicyOptions(name=name, budget_tokens=options.budget_tokens)
    profile = read_profile(Path(options.profile), len(bundle.manifest.spec.layers))
    budgets = profile.budgets_tokens if options.budget_tokens is None else profile.for_mean(options.budget_tokens)
    return PolicyOptions(name=name, budget_tokens=options.budget_tokens, layer_budgets_tokens=budgets)


def _default_budget(held_bytes: int) -> int:
    memory = available_memory()
    reserve = max(RESERVE_BYTES, int(memory.total_bytes * RESERVE_SHARE))
    return max(1, memory.available_bytes + held_bytes - reserve)
