"""What a load is asked for, and how that becomes a plan: shared by `LLM` and `edgekit plan`."""

from __future__ import annotations

import os
from dataclasses import dataclass

from edgekit.bundle import Bundle
from edgekit.cache_layout import cache_layout
from edgekit.errors import DoesNotFitError, UnsupportedError, UsageError, one_of
from edgekit.runtime.available_memory import available_memory, resident_bytes
from edgekit.runtime.cache import slot_limit
from edgekit.runtime.cache_profile import read_profile
from edgekit.runtime.memory_plan import DtypeChoice, MemoryPlan, MemoryRequest, plan_memory
from edgekit.runtime.policies import POLICIES, PolicyOptions
from edgekit.runtime.policies.laq import Laq
from edgekit.sizes import format_size, parse_size

# Without a budget, so much of the machine is left to others.
RESERVE_SHARE = 0.05
RESERVE_BYTES = 128 << 20


@dataclass(frozen=True, kw_only=True)
class KVCacheOptions:
    """How conversations keep their past.

    Attributes:
        dtype: "fp32", "fp16" or "int8"; "auto" for what the bundle was exported with, or int8 where that does not fit.
        policy: What happens when the cache is full: a key of `edgekit.runtime.policies.POLICIES`.
        budget_tokens: Tokens that the policy keeps, for all but stop; None for all that there is room for, with window.
        profile: File with budgets of each layer, for snapkv and laq; with `budget_tokens`, moved to that mean.
        per_layer: Whether every layer has slots of its own, for sessions to have any budgets of layers.
    """

    dtype: DtypeChoice = "auto"
    policy: str = "stop"
    budget_tokens: int | None = None
    profile: str | os.PathLike[str] | None = None
    per_layer: bool = False


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
        budgets, layout = _budgets(self.policy), self.memory.layout
        if budgets is None:
            return None
        kept = 0
        for index, group in enumerate(layout.groups):
            slots = slot_limit(group.sliding_window, self.memory.capacity_tokens)
            if group.sliding_window is None:
                slots = min(slots, budgets[0] if len(budgets) == 1 else budgets[group.layers[0]])
            kept += layout.slot_bytes(index) * slots
        return kept


def plan_load(bundle: Bundle, options: LoadOptions, *, is_loading: bool = True) -> LoadPlan:
    """Decides everything about a load before anything is loaded.

    Args:
        bundle: The bundle; only its manifest is read.
        options: What is asked for.
        is_loading: Whether it is this process that will hold the model.

    Raises:
        UsageError: An option is out of range, or the profile is for another number of layers.
        UnsupportedError: The policy needs what the bundle lacks, or a newer EdgeKit wrote the profile.
        DoesNotFitError: The budget is too small.
        CorruptArtifactError: The profile is malformed.
    """
    _check_types(options)
    policy = _policy(bundle, options.kv_cache)
    budgets = policy.layer_budgets_tokens
    if options.kv_cache.per_layer:
        budgets = tuple(range(1, len(bundle.manifest.spec.layers) + 1))  # a layout goes by which of them differ
    held, wanted = resident_bytes() if is_loading else 0, options.memory_budget
    context, context_option = options.ctx_size, "--ctx-size"
    if context is None and POLICIES[policy.name].makes_room and policy.budget_tokens is not None:
        # The conversation never holds more, so there is no need for more room.
        context, context_option = policy.budget_tokens, "--kv-budget-tokens"
        _check_trained(bundle, policy.budget_tokens, allow_long=options.allow_long)
    request = MemoryRequest(
        budget_bytes=_default_budget(held) if wanted is None else parse_size(wanted, "memory budget"),
        context_tokens=context,
        dtype=options.kv_cache.dtype,
        layer_budgets_tokens=budgets,
        allow_long=options.allow_long,
        base_bytes=held,
        copied_tokens=_copied_tokens(policy, len(bundle.manifest.spec.layers)),
        context_option=context_option,
    )
    memory = plan_memory(bundle, request)
    check_budget(policy, memory)
    return LoadPlan(memory=memory, policy=policy)


def check_policy(policy: PolicyOptions, bundle: Bundle) -> None:
    """Refuses a policy that cannot work with a bundle, before anything of it is loaded.

    Raises:
        UsageError: There is no such policy, or its budget is missing, needless or out of range.
        UnsupportedError: The model or its bundle lacks what the policy needs.
    """
    name, spec = policy.name, bundle.manifest.spec
    if name not in tuple(POLICIES):  # a type that cannot be hashed is no key either
        raise UsageError(f"KV policy {one_of(str(name), POLICIES)}")
    if POLICIES[name].needs_attention_mass:
        if not bundle.manifest.attention_scores:
            raise UnsupportedError(
                f"KV policy {name!r} goes by the attention that tokens get, which bundle {str(bundle.path)!r} does not "
                "say; export it with --attention-scores, or use the policy 'stop' or 'window'"
            )
        if _budgets(policy) is None:
            raise UsageError(
                f"KV policy {name!r} needs to know how many tokens of a prompt to keep; give --kv-budget-tokens, or "
                "--kv-profile for a number per layer"
            )
    POLICIES[name](policy, spec, cache_layout(spec, "fp32", policy.layer_budgets_tokens))


def check_budget(policy: PolicyOptions, memory: MemoryPlan) -> None:
    """Refuses a budget that is larger than the room for tokens, which would be no budget at all.

    Raises:
        UsageError: It is larger than the context.
        DoesNotFitError: It is larger than what fits into memory.
    """
    budgets = _budgets(policy)
    if budgets is None or min(budgets) <= min(memory.capacity_tokens, memory.context_tokens):
        return
    if memory.capacity_tokens >= memory.context_tokens:
        raise UsageError(
            f"KV budget is {min(budgets)} tokens, which are more than the context of {memory.context_tokens}; give "
            "fewer, or a larger context size"
        )
    raise DoesNotFitError(
        f"KV budget is {min(budgets)} tokens, but the memory budget {format_size(memory.budget_bytes)} has room for "
        f"{memory.capacity_tokens} tokens of {memory.layout.dtype} KV cache; give --kv-budget-tokens "
        f"{memory.capacity_tokens} or fewer, or more memory"
    )


def _budgets(policy: PolicyOptions) -> tuple[int, ...] | None:
    """Returns the budgets of a policy's layers, or one for all."""
    if policy.layer_budgets_tokens is not None:
        return policy.layer_budgets_tokens
    return None if policy.budget_tokens is None else (policy.budget_tokens,)


def _copied_tokens(policy: PolicyOptions, num_layers: int) -> tuple[int, ...] | None:
    budgets = _budgets(policy)
    if budgets is None or not issubclass(POLICIES[policy.name], Laq):
        return None
    return budgets * num_layers if len(budgets) == 1 else budgets


def _check_types(options: LoadOptions) -> None:
    """Refuses what no type checker has seen; the plan looks at dtype and context."""
    cache = options.kv_cache
    if not isinstance(cache, KVCacheOptions):
        raise UsageError(f"kv_cache is {cache!r}; it must be KVCacheOptions, such as KVCacheOptions(dtype='int8')")
    if not isinstance(options.allow_long, bool):
        raise UsageError(f"allow_long is {options.allow_long!r}; it must be True or False")
    budget, profile = cache.budget_tokens, cache.profile
    if budget is not None and (type(budget) is not int or budget < 1):
        raise UsageError(f"KV budget is {budget!r} tokens; it must be an integer of at least 1")
    if profile is not None and not isinstance(profile, (str, os.PathLike)):
        raise UsageError(f"the cache profile is {profile!r}; it must be a path")


def _policy(bundle: Bundle, options: KVCacheOptions) -> PolicyOptions:
    name, profile = options.policy, options.profile
    if profile is None or name not in tuple(POLICIES):
        policy = PolicyOptions(name=name, budget_tokens=options.budget_tokens)
        check_policy(policy, bundle)
        return policy
    by_scores = [known for known, kind in POLICIES.items() if kind.needs_attention_mass]
    if name not in by_scores:
        raise UsageError(f"KV policy {name!r} takes no cache profile; --kv-profile is for {', '.join(by_scores)}")
    read = read_profile(profile, len(bundle.manifest.spec.layers))
    budgets = read.budgets_tokens if options.budget_tokens is None else read.for_mean(options.budget_tokens)
    policy = PolicyOptions(name=name, budget_tokens=options.budget_tokens, layer_budgets_tokens=budgets)
    check_policy(policy, bundle)
    return policy


def _check_trained(bundle: Bundle, budget_tokens: int, *, allow_long: bool) -> None:
    trained = bundle.manifest.spec.max_positions
    if budget_tokens > trained and not allow_long:
        raise UsageError(
            f"KV budget is {budget_tokens} tokens, the model was trained on {trained} positions; keep no more, or say "
            "--allow-long, and expect nonsense beyond them"
        )


def _default_budget(held_bytes: int) -> int:
    memory = available_memory()
    reserve = max(RESERVE_BYTES, int(memory.total_bytes * RESERVE_SHARE))
    return max(1, memory.available_bytes + held_bytes - reserve)
