"""What a load is asked for and refuses, before anything but the manifest is read."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from edgekit.bundle import Bundle
from edgekit.errors import CorruptArtifactError, DoesNotFitError, EdgeKitError, UnsupportedError, UsageError
from edgekit.runtime import LLM, SamplingParams, llm, loading
from edgekit.runtime.available_memory import AvailableMemory
from edgekit.runtime.cache_profile import CacheProfile, write_profile
from edgekit.runtime.loading import RESERVE_BYTES, KVCacheOptions, LoadOptions, LoadPlan, plan_load
from edgekit.runtime.memory_plan import workspace_bytes
from edgekit.runtime.policies import POLICIES, PolicyOptions
from tests.tiny_specs import CONTEXT, tiny_spec, unwritten_bundle

TinyBundle: TypeAlias = Callable[..., Bundle]
MakeProfile: TypeAlias = Callable[..., Path]

BUNDLE = unwritten_bundle()
WITH_SCORES = unwritten_bundle(attention_scores=True)
# So many layers that their cache is what takes most.
DEEP = unwritten_bundle(tiny_spec((None,) * 40), attention_scores=True)
COMPRESSING = ("snapkv", "laq", "laq++")
GIB = 1 << 30


@pytest.fixture
def profile(tmp_path: Path) -> MakeProfile:
    def make(*budgets: int) -> Path:
        path = tmp_path / "profile.json"
        content = CacheProfile(
            schema_version=1,
            producer="edgekit test",
            bundle="",
            budgets_tokens=budgets,
            method="snapkv",
            score=0.0,
            settings={},
        )
        write_profile(path, content)
        return path

    return make


def _plan(bundle: Bundle = BUNDLE, *, ctx_size: Any = None, memory: Any = "4GiB", **cache: Any) -> LoadPlan:
    options = LoadOptions(memory_budget=memory, ctx_size=ctx_size, kv_cache=KVCacheOptions(**cache))
    return plan_load(bundle, options, is_loading=False)


def _refusal(kind: type[EdgeKitError], plan: Callable[[], object]) -> str:
    with pytest.raises(EdgeKitError) as caught:
        plan()
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_without_options_everything_is_kept_in_the_dtype_of_the_bundle() -> None:
    plan = _plan()
    assert plan.policy == PolicyOptions()
    assert (plan.memory.layout.dtype, plan.memory.capacity_tokens) == ("fp32", CONTEXT)
    assert (plan.memory.budget_bytes, plan.kept_bytes) == (4 * GIB, None)
    assert plan.memory.total_bytes < 4 * GIB


def test_options_reach_the_plan() -> None:
    plan = _plan(ctx_size=300, memory="1.5GB", dtype="fp16")
    assert (plan.memory.budget_bytes, plan.memory.layout.dtype) == (1_500_000_000, "fp16")
    assert (plan.memory.context_tokens, plan.memory.capacity_tokens) == (300, 300)


@pytest.mark.parametrize(
    ("total", "available", "budget"),
    [
        (100 * GIB, 40 * GIB, 35 * GIB),  # a twentieth of the machine is left to others
        (GIB, GIB // 2, GIB // 2 - RESERVE_BYTES),  # or a fixed number of bytes
    ],
)
def test_without_a_budget_it_is_what_the_machine_has_left(
    total: int, available: int, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = AvailableMemory(total_bytes=total, available_bytes=available, limited_by="machine")
    monkeypatch.setattr(loading, "available_memory", lambda: memory)
    monkeypatch.setattr(loading, "resident_bytes", lambda: 100 << 20)
    assert plan_load(BUNDLE, LoadOptions(), is_loading=False).memory.budget_bytes == budget
    # What this process holds already is counted as its own, and may stay.
    loaded = plan_load(BUNDLE, LoadOptions()).memory
    assert loaded.budget_bytes == budget + (100 << 20)
    assert loaded.base_bytes > 100 << 20


def test_a_machine_without_memory_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = AvailableMemory(total_bytes=GIB, available_bytes=RESERVE_BYTES // 2, limited_by="cgroup")
    monkeypatch.setattr(loading, "available_memory", lambda: memory)
    _refusal(DoesNotFitError, lambda: plan_load(BUNDLE, LoadOptions(), is_loading=False))


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_can_be_planned(name: str) -> None:
    plan = _plan(WITH_SCORES, policy=name, budget_tokens=None if name == "stop" else 100)
    assert plan.policy == PolicyOptions(name=name, budget_tokens=None if name == "stop" else 100)


def test_a_window_with_a_budget_has_no_more_slots_than_that() -> None:
    plan = _plan(policy="window", budget_tokens=512)
    assert (plan.memory.capacity_tokens, plan.memory.cache_bytes, plan.kept_bytes) == (512, 512 * 516, 512 * 516)
    # A context that is asked for is had all the same: other conversations may keep everything.
    assert _plan(ctx_size=1000, policy="window", budget_tokens=512).memory.capacity_tokens == 1000
    assert _plan(policy="window").memory.capacity_tokens == CONTEXT


def test_a_window_that_does_not_fit_is_refused_by_its_own_option() -> None:
    least = _plan(policy="window", budget_tokens=128, dtype="fp32").memory.total_bytes
    memory = f"{least + 100_000}B"
    message = _refusal(DoesNotFitError, lambda: _plan(policy="window", budget_tokens=4000, dtype="fp32", memory=memory))
    proposed = message.partition("what would fit: --kv-budget-tokens ")[2].partition(",")[0]
    plan = _plan(policy="window", budget_tokens=int(proposed), dtype="fp32", memory=memory)
    assert plan.memory.capacity_tokens == int(proposed) < 4000


@pytest.mark.parametrize("name", COMPRESSING)
def test_what_a_prompt_is_compressed_to_is_said_in_bytes(name: str, profile: MakeProfile) -> None:
    # 256 bytes of each layer's token and the bias of its group.
    assert _plan(WITH_SCORES, policy=name, budget_tokens=100).kept_bytes == 100 * 516
    plan = _plan(WITH_SCORES, policy=name, profile=profile(100, 60))
    assert plan.kept_bytes == (100 + 60) * 260
    assert plan.policy.layer_budgets_tokens == (100, 60)
    windowed = unwritten_bundle(tiny_spec((None, 100)), attention_scores=True)
    assert _plan(windowed, policy=name, budget_tokens=100).kept_bytes == (100 + 256) * 260


@pytest.mark.parametrize(("name", "copies"), [("snapkv", False), ("laq", True), ("laq++", True)])
def test_looking_ahead_is_planned_for(name: str, copies: bool) -> None:
    memory = _plan(DEEP, policy=name, budget_tokens=3000).memory
    step = workspace_bytes(DEEP.manifest.spec, memory.layout, memory.chunk_tokens, memory.capacity_tokens)
    assert (memory.workspace_bytes > step) == copies


def test_a_profile_is_moved_to_the_mean_that_is_asked_for(profile: MakeProfile) -> None:
    path = profile(100, 60)
    plan = _plan(WITH_SCORES, policy="snapkv", profile=path, budget_tokens=160)
    assert plan.policy == PolicyOptions(name="snapkv", budget_tokens=160, layer_budgets_tokens=(200, 120))
    assert _plan(WITH_SCORES, policy="snapkv", profile=str(path)).policy.layer_budgets_tokens == (100, 60)


@pytest.mark.parametrize("name", ["stop", "window"])
def test_a_profile_for_a_policy_that_takes_none_is_refused_by_name(name: str, profile: MakeProfile) -> None:
    message = _refusal(UsageError, lambda: _plan(WITH_SCORES, policy=name, profile=profile(100, 60)))
    assert message == f"KV policy {name!r} takes no cache profile; --kv-profile is for snapkv, laq, laq++"


@pytest.mark.parametrize("name", COMPRESSING)
def test_a_policy_that_goes_by_scores_needs_them_and_a_budget(name: str) -> None:
    message = _refusal(UnsupportedError, lambda: _plan(policy=name, budget_tokens=100))
    assert "bundle 'no.edge' does not say; export it with --attention-scores, or use the policy 'stop'" in message
    message = _refusal(UsageError, lambda: _plan(WITH_SCORES, policy=name))
    assert message.startswith(f"KV policy {name!r} needs to know how many tokens of a prompt to keep; ")
    assert message.endswith("give --kv-budget-tokens, or --kv-profile for a number per layer")


@pytest.mark.parametrize("name", COMPRESSING)
@pytest.mark.parametrize("budget", [1, 31, 32])
def test_a_budget_without_room_for_the_end_of_the_prompt_is_refused(
    name: str, budget: int, profile: MakeProfile
) -> None:
    for cache in ({"budget_tokens": budget}, {"profile": profile(100, budget)}):
        message = _refusal(UsageError, partial(_plan, WITH_SCORES, policy=name, **cache))
        assert (
            f"needs a budget of more than 32 tokens per layer, which are the end of the prompt; got {budget}" in message
        )


@pytest.mark.parametrize("name", ["window", *COMPRESSING])
def test_a_budget_beyond_the_room_for_tokens_is_refused_rather_than_never_reached(name: str) -> None:
    message = _refusal(UsageError, lambda: _plan(WITH_SCORES, ctx_size=500, policy=name, budget_tokens=501))
    assert message.startswith("KV budget is 501 tokens, which are more than the context of 500; give fewer")
    assert _plan(WITH_SCORES, ctx_size=500, policy=name, budget_tokens=500).policy.budget_tokens == 500
    assert str(CONTEXT) in _refusal(UsageError, lambda: _plan(WITH_SCORES, policy=name, budget_tokens=CONTEXT + 1))


def test_a_window_beyond_what_was_trained_can_be_allowed() -> None:
    message = _refusal(UsageError, lambda: _plan(policy="window", budget_tokens=CONTEXT + 1))
    assert message.startswith("KV budget is 4097 tokens, the model was trained on 4096 positions; keep no more, or say")
    options = LoadOptions(
        memory_budget="4GiB", kv_cache=KVCacheOptions(policy="window", budget_tokens=5000), allow_long=True
    )
    assert plan_load(BUNDLE, options).memory.capacity_tokens == 5000


@pytest.mark.parametrize("name", COMPRESSING)
def test_a_budget_beyond_what_fits_into_memory_does_not_fit(name: str, profile: MakeProfile) -> None:
    refused = _refusal(DoesNotFitError, lambda: _plan(DEEP, memory="1B", ctx_size=2048))
    memory = refused.rpartition("--memory-budget ")[2]
    room = _plan(DEEP, memory=memory, policy=name, budget_tokens=100).memory.capacity_tokens
    assert 128 <= room < 4000
    message = _refusal(DoesNotFitError, lambda: _plan(DEEP, memory=memory, policy=name, budget_tokens=4000))
    assert "KV budget is 4000 tokens, but the memory budget" in message
    proposed = int(message.partition("give --kv-budget-tokens ")[2].split()[0])
    assert _plan(DEEP, memory=memory, policy=name, budget_tokens=proposed).policy.budget_tokens == proposed
    # A layer that keeps everything is fine, as long as another does not.
    assert _plan(DEEP, memory=memory, policy=name, profile=profile(*[100] * 39, 4000)).kept_bytes is not None


def test_a_profile_must_be_of_as_many_layers(profile: MakeProfile) -> None:
    message = _refusal(UsageError, lambda: _plan(WITH_SCORES, policy="laq", profile=profile(100, 60, 80)))
    assert "has budgets of 3 layers, the model has 2" in message


def test_policies_refuse_models_that_they_do_not_work_with() -> None:
    everywhere = unwritten_bundle(tiny_spec((7, 9)), attention_scores=True)
    assert "sliding window" in _refusal(UnsupportedError, lambda: _plan(everywhere, policy="snapkv", budget_tokens=100))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory_budget": 512}, "memory budget is 512; it must be a text with a unit, such as '512MiB'"),
        ({"memory_budget": b"512MiB"}, "memory budget is b'512MiB'; it must be a text"),
        ({"memory_budget": "512"}, "memory budget is '512', which may mean bytes or megabytes"),
        ({"memory_budget": ""}, "memory budget is ''; it must be a number and a unit"),
        ({"ctx_size": "100"}, "context size is '100'; it must be an integer of at least 1 token"),
        ({"ctx_size": True}, "context size is True; it must be an integer of at least 1 token"),
        ({"ctx_size": 0}, "context size is 0; it must be an integer of at least 1 token"),
        ({"ctx_size": 257}, "context size is 257, the model was trained on 256 positions"),
        ({"kv_cache": "int8"}, "kv_cache is 'int8'; it must be KVCacheOptions, such as KVCacheOptions(dtype='int8')"),
        ({"kv_cache": None}, "kv_cache is None; it must be KVCacheOptions"),
        ({"kv_cache": {"dtype": "int8"}}, "kv_cache is {'dtype': 'int8'}; it must be KVCacheOptions"),
        ({"allow_long": "yes"}, "allow_long is 'yes'; it must be True or False"),
        ({"allow_long": 1}, "allow_long is 1; it must be True or False"),
        ({"threads": "2"}, "threads is '2'; it must be an integer"),
    ],
)
def test_what_no_type_checker_has_seen_is_refused_by_name(
    changes: dict[str, Any], message: str, tiny_bundle: TinyBundle
) -> None:
    assert message in _refusal(UsageError, lambda: LLM(tiny_bundle().path, **changes))
    assert message in _refusal(UsageError, lambda: LLM.load(tiny_bundle().path, LoadOptions(**changes)))


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        ({"dtype": "int4"}, "KV cache dtype 'int4'; known: auto, fp16, fp32, int8 (did you mean 'int8'?)"),
        ({"dtype": None}, "KV cache dtype 'None'; known: "),
        ({"dtype": 8}, "KV cache dtype '8'; known: "),
        ({"policy": "windw"}, "KV policy 'windw'; known: laq, laq++, snapkv, stop, window (did you mean 'window'?)"),
        ({"policy": None}, "KV policy 'None'; known: "),
        ({"policy": ["stop"]}, "KV policy \"['stop']\"; known: "),
        ({"policy": "windw", "profile": "x.json"}, "KV policy 'windw'; known: "),
        ({"policy": "window", "budget_tokens": -1}, "KV budget is -1 tokens; it must be an integer of at least 1"),
        ({"policy": "window", "budget_tokens": 0}, "KV budget is 0 tokens; it must be an integer of at least 1"),
        ({"policy": "window", "budget_tokens": "9"}, "KV budget is '9' tokens; it must be an integer of at least 1"),
        ({"policy": "window", "budget_tokens": True}, "KV budget is True tokens; it must be an integer of at least 1"),
        ({"policy": "window", "budget_tokens": 7}, "KV policy 'window' needs a budget of at least 8 tokens"),
        ({"budget_tokens": 100}, "KV policy 'stop' keeps all tokens and takes no budget of tokens; use window, snapkv"),
        ({"policy": "snapkv", "profile": 5}, "the cache profile is 5; it must be a path"),
    ],
)
def test_wrong_cache_options_are_refused_by_name(cache: dict[str, Any], message: str, tiny_bundle: TinyBundle) -> None:
    assert message in _refusal(UsageError, lambda: LLM(tiny_bundle().path, kv_cache=KVCacheOptions(**cache)))


def test_options_of_another_type_are_refused(tiny_bundle: TinyBundle) -> None:
    options: Any = {"ctx_size": 100}
    assert "options is {'ctx_size': 100}; it must be LoadOptions" in _refusal(
        UsageError, lambda: LLM.load(tiny_bundle().path, options)
    )


@pytest.fixture
def unreadable(tiny_bundle: TinyBundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A bundle whose files have the right sizes and nothing but zeros in them, and a backend that must not start."""
    path = Path(shutil.copytree(tiny_bundle().path, tmp_path / "zeros.edge"))
    for file in path.iterdir():
        if file.name != "manifest.json":
            file.write_bytes(bytes(file.stat().st_size))

    def refuse(*_: object) -> None:
        raise AssertionError("a session of ONNX Runtime was made")

    monkeypatch.setattr(llm, "OnnxRuntimeCpu", refuse)
    yield path
    with pytest.raises(CorruptArtifactError):  # whoever reads on finds out
        LLM(path)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        (LoadOptions(memory_budget="50MiB"), DoesNotFitError),
        (LoadOptions(memory_budget="1B", ctx_size=200), DoesNotFitError),
        (LoadOptions(ctx_size=257), UsageError),
        (LoadOptions(kv_cache=KVCacheOptions(policy="windw")), UsageError),
        (LoadOptions(kv_cache=KVCacheOptions(budget_tokens=100)), UsageError),
        (LoadOptions(kv_cache=KVCacheOptions(policy="window", budget_tokens=4)), UsageError),
        (LoadOptions(kv_cache=KVCacheOptions(policy="snapkv", budget_tokens=100)), UnsupportedError),
        (LoadOptions(kv_cache=KVCacheOptions(dtype="bf16")), UsageError),  # type: ignore[arg-type]
        (LoadOptions(kv_cache="int8"), UsageError),  # type: ignore[arg-type]
    ],
)
def test_refusals_come_before_any_file_but_the_manifest_is_read(
    options: LoadOptions, kind: type[EdgeKitError], unreadable: Path
) -> None:
    _refusal(kind, lambda: LLM.load(unreadable, options))


def test_a_loaded_model_is_what_was_planned(tiny_bundle: TinyBundle) -> None:
    cache = KVCacheOptions(dtype="int8", policy="window", budget_tokens=64)
    loaded = LLM(tiny_bundle().path, threads=1, kv_cache=cache)
    assert loaded.backend.layout == loaded.plan.memory.layout
    assert loaded.plan.memory.layout.dtype == "int8"
    assert loaded.limits.max_positions == 64
    output = loaded.generate([5, 6, 7], SamplingParams(max_tokens=200, ignore_eos=True))
    assert output.usage.completion_tokens == 200  # more than the 64 tokens that are kept


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "int8"])
def test_a_text_ends_where_the_context_that_was_asked_for_does(dtype: Any, tiny_bundle: TinyBundle) -> None:
    loaded = LLM(tiny_bundle().path, threads=1, ctx_size=40, kv_cache=KVCacheOptions(dtype=dtype))
    output = loaded.generate([5] * 30, SamplingParams(max_tokens=100, ignore_eos=True))
    assert (output.usage.completion_tokens, output.finish_reason) == (11, "length")
    _refusal(DoesNotFitError, lambda: loaded.generate([5] * 41))


def test_a_longer_context_than_was_trained_works_when_allowed(tiny_bundle: TinyBundle) -> None:
    loaded = LLM(tiny_bundle().path, threads=1, ctx_size=300, allow_long=True)
    output = loaded.generate([5] * 200, SamplingParams(max_tokens=100, ignore_eos=True))
    assert output.usage.completion_tokens == 100


def test_a_session_may_have_another_policy_within_the_plan(tiny_bundle: TinyBundle) -> None:
    loaded = LLM(tiny_bundle().path, threads=1, ctx_size=100)
    session = loaded.new_session(PolicyOptions(name="window", budget_tokens=50))
    output = loaded.generate([5, 6], SamplingParams(max_tokens=90, ignore_eos=True), session=session)
    assert output.usage.completion_tokens == 90
    for policy, message in (
        (
            PolicyOptions(name="window", budget_tokens=101),
            "KV budget is 101 tokens, which are more than the context of",
        ),
        (PolicyOptions(name="windw"), "KV policy 'windw'; known: "),
        (PolicyOptions(budget_tokens=50), "KV policy 'stop' keeps all tokens"),
        ("window", "policy is 'window'; it must be PolicyOptions, such as PolicyOptions(name='window')"),
    ):
        chosen: Any = policy
        assert message in _refusal(UsageError, partial(loaded.new_session, chosen))
    assert "--attention-scores" in _refusal(
        UnsupportedError, lambda: loaded.new_session(PolicyOptions(name="laq", budget_tokens=50))
    )
