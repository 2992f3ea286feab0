"""The memory budget and the KV cache's dtype where transformers loads a bundle, and what a batch takes of both."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

from edgekit import LLM, EdgeModelForCausalLM, QuantizationOptions
from edgekit.errors import DoesNotFitError, EdgeKitError, UnsupportedError, UsageError
from edgekit.runtime.cache import KVCache
from edgekit.runtime.loading import KVCacheOptions
from edgekit.runtime.memory_plan import cache_bytes

TinyBundle: TypeAlias = Callable[[str], Path]
TinyModel: TypeAlias = Callable[[str], EdgeModelForCausalLM]

# More than this process, torch included, ever takes.
PLENTY = "64GiB"


def _load(path: Path, **options: Any) -> EdgeModelForCausalLM:
    return EdgeModelForCausalLM.from_pretrained(path, threads=1, **options)


def _ids(rows: int, columns: int) -> torch.Tensor:
    return torch.randint(3, 320, (rows, columns), generator=torch.Generator().manual_seed(4))


@pytest.fixture
def model(tiny_bundle: TinyBundle) -> EdgeModelForCausalLM:
    """One whose plan may be replaced."""
    return _load(tiny_bundle("llama"), memory_budget=PLENTY)


def test_the_options_of_memory_reach_the_plan(tiny_bundle: TinyBundle, tiny_model: TinyModel) -> None:
    model = _load(tiny_bundle("llama"), memory_budget=PLENTY, ctx_size=200, kv_cache_dtype="int8")
    memory = model.llm.plan.memory
    assert memory.budget_bytes == 64 << 30
    assert (memory.context_tokens, memory.layout.dtype, model.llm.backend.layout) == (200, "int8", memory.layout)
    ids = _ids(2, 190)  # more than a step reads at once
    got, exact = model(input_ids=ids).logits, tiny_model("llama")(input_ids=ids).logits
    # Codes of 8 bits are near the numbers, and not the numbers.
    assert 1e-5 < float((got - exact).abs().max()) < 0.3
    with pytest.raises(DoesNotFitError, match="201 tokens are more than the context of 200; shorten the prompt or"):
        model(input_ids=_ids(1, 201))


def test_without_options_the_bundle_has_its_own_dtype_and_context(tiny_model: TinyModel) -> None:
    memory = tiny_model("llama").llm.plan.memory
    assert (memory.layout.dtype, memory.capacity_tokens, memory.context_tokens) == ("fp32", 256, 256)


def test_a_budget_that_is_too_small_is_refused_and_leaves_nothing_of_an_export(
    tiny_bundle: TinyBundle, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DoesNotFitError, match=r"this model does not fit into the memory budget 50 MiB, which is "):
        _load(tiny_bundle("llama"), memory_budget="50MiB")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(DoesNotFitError, match="50 MiB"):
        _load(tiny_llama, memory_budget="50MiB", export=True, quantization=QuantizationOptions(precision="fp32"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"memory_budget": 512}, UsageError, "memory budget is 512; it must be a text with a unit"),
        ({"memory_budget": "512"}, UsageError, "which may mean bytes or megabytes"),
        ({"ctx_size": 0}, UsageError, "context size is 0; it must be an integer of at least 1"),
        ({"ctx_size": 257}, UsageError, "the model was trained on 256 positions"),
        ({"kv_cache_dtype": "int4"}, UsageError, "KV cache dtype 'int4'; known: auto, fp16, fp32, int8"),
        ({"kv_policy": "window"}, UnsupportedError, "KV policy 'window' drops tokens, and transformers counts on all"),
        ({"kv_policy": "snapkv"}, UnsupportedError, "KV policy 'snapkv' drops tokens"),
        ({"kv_policy": None}, UnsupportedError, "KV policy None drops tokens"),
        ({"kv_budget_tokens": 100}, UnsupportedError, "has no option 'kv_budget_tokens'; known: "),
        ({"kv_profile": "x.json"}, UnsupportedError, "has no option 'kv_profile'; known: "),
    ],
)
def test_what_means_nothing_is_refused_by_name(
    options: dict[str, Any], kind: type[EdgeKitError], message: str, tiny_bundle: TinyBundle
) -> None:
    with pytest.raises(kind, match=message):
        _load(tiny_bundle("llama"), **options)


def test_the_policy_that_keeps_everything_is_the_one_that_there_is(tiny_bundle: TinyBundle) -> None:
    assert _load(tiny_bundle("llama"), kv_policy="stop").llm.plan.policy.name == "stop"
    windowed = LLM(tiny_bundle("llama"), threads=1, kv_cache=KVCacheOptions(policy="window"))
    with pytest.raises(UnsupportedError, match="KV policy 'window' drops tokens"):
        EdgeModelForCausalLM(windowed)


def _leave(model: EdgeModelForCausalLM, monkeypatch: pytest.MonkeyPatch, size_bytes: int) -> None:
    """Changes the plan's budget so that this much is left for the caches of all rows."""
    plan = model.llm.plan
    budget = plan.memory.total_bytes - plan.memory.cache_bytes + size_bytes
    memory = dataclasses.replace(plan.memory, budget_bytes=budget)
    monkeypatch.setattr(model.llm, "plan", dataclasses.replace(plan, memory=memory))


def test_rows_share_the_memory_budget(model: EdgeModelForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = cache_bytes(model.llm.backend.layout, 256)
    _leave(model, monkeypatch, 2 * whole + whole // 2)
    assert model(input_ids=_ids(2, 250)).logits.shape == (2, 250, 320)
    with pytest.raises(DoesNotFitError, match=r"the KV caches of 3 rows take up to .* are left for them; use smaller"):
        model(input_ids=_ids(3, 250))
    assert model(input_ids=_ids(3, 20)).logits.shape == (3, 20, 320)


def test_one_row_has_what_was_planned(model: EdgeModelForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    _leave(model, monkeypatch, cache_bytes(model.llm.backend.layout, 256))
    assert model(input_ids=_ids(1, 256)).logits.shape == (1, 256, 320)


def test_rows_that_grow_too_long_are_refused_as_they_were(
    model: EdgeModelForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = cache_bytes(model.llm.backend.layout, 256)
    _leave(model, monkeypatch, 2 * whole + whole // 2)
    ids = _ids(3, 240)
    cache = model(input_ids=ids[:, :40]).past_key_values
    with pytest.raises(DoesNotFitError, match="use smaller batches or fewer beams, or give more memory"):
        model(input_ids=ids[:, 40:], past_key_values=cache)
    with pytest.raises(DoesNotFitError, match="6 rows"):
        cache.batch_repeat_interleave(2)
    assert (cache.get_seq_length(), cache.batch_size) == (40, 3)
    got = model(input_ids=ids[:, 40:44], past_key_values=cache).logits
    torch.testing.assert_close(got, model(input_ids=ids[:, :44]).logits[:, 40:], atol=1e-5, rtol=0)


def test_a_new_cache_takes_a_smaller_batch_after_a_refusal(
    model: EdgeModelForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    from edgekit.integrations.conversations import ConversationCache

    whole = cache_bytes(model.llm.backend.layout, 256)
    _leave(model, monkeypatch, whole + whole // 2)
    cache = ConversationCache(model.llm)
    with pytest.raises(DoesNotFitError):
        model(input_ids=_ids(2, 250), past_key_values=cache)
    assert (cache.batch_size, cache.get_seq_length()) == (-1, 0)
    assert model(input_ids=_ids(1, 250), past_key_values=cache).logits.shape == (1, 250, 320)


def test_beams_are_rows(model: EdgeModelForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    _leave(model, monkeypatch, 2 * cache_bytes(model.llm.backend.layout, 256))
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert model.generate(input_ids=_ids(1, 230), num_beams=2, **options).shape == (1, 234)
    with pytest.raises(DoesNotFitError, match="KV caches of 4 rows"):
        model.generate(input_ids=_ids(1, 230), num_beams=4, **options)


@pytest.mark.parametrize("lengths", [(1,), (100, 30, 100), (127, 2), (250,), (1,) * 200])
def test_a_row_never_takes_more_than_what_was_counted(model: EdgeModelForCausalLM, lengths: tuple[int, ...]) -> None:
    from edgekit.integrations.conversations import Conversation

    llm = model.llm
    row = Conversation(llm.backend, llm.bundle.manifest.spec, llm.limits)
    caches: list[KVCache] = [value for value in vars(row).values() if isinstance(value, KVCache)]
    ids = _ids(1, sum(lengths))[0].numpy()
    for length in lengths:
        counted = row.largest_bytes(length)
        kept = torch.zeros((1, 320)).numpy()
        row.read(ids[row.length : row.length + length], ids[:1] * 0 + length - 1, kept)
        assert caches[0].size_bytes <= counted
