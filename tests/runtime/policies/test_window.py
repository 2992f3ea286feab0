"""The policy "window" against StreamingLLM spelled out: keys without rotation, positions within the cache."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from edgekit.cache_layout import cache_layout
from edgekit.compress.decoder import Decoder
from edgekit.errors import DoesNotFitError, UnsupportedError, UsageError
from edgekit.runtime import cache, cache_arrays, prefill, rotation, session, slots
from edgekit.runtime.policies import PolicyOptions, window
from edgekit.runtime.policies.window import SINK_TOKENS, Window
from edgekit.runtime.session import Session
from tests.runtime.conftest import Watched, load_backend
from tests.runtime.interruption import Interruption
from tests.runtime.policies.reference import Past, nothing, prompt_of, read, start, take, turned_to

RUNTIME = (cache, cache_arrays, prefill, rotation, session, slots, window)


def _options(budget: int | None) -> PolicyOptions:
    return PolicyOptions(name="window", budget_tokens=budget)


class _Streaming:
    """StreamingLLM over the reference decoder: every step gives all that is held the positions 0, 1, 2, …"""

    def __init__(self, decoder: Decoder, budget: int) -> None:
        self.decoder, self.budget, self.pasts = decoder, budget, nothing(decoder)

    def step(self, tokens: list[int]) -> Any:
        missing = len(tokens) - (self.budget - len(self.pasts[0].positions))
        if missing > 0:
            evicted = max(missing, self.budget // 16, 1)
            self.pasts = [self._without(index, past, evicted) for index, past in enumerate(self.pasts)]
        return read(self.decoder, tokens, len(self.pasts[0].positions), self.pasts)

    def _without(self, layer: int, past: Past, evicted: int) -> Past:
        kept = [*range(SINK_TOKENS), *range(SINK_TOKENS + evicted, len(past.positions))]
        after = torch.arange(len(kept))
        keys = turned_to(self.decoder, layer, past.keys[:, :, kept], past.positions[kept], after)
        return Past(keys, past.values[:, :, kept], after)


# One rope for all channels; two, one of them stretched, with a sliding window; none in some layers; for some channels.
@pytest.mark.parametrize(
    ("variant", "budget", "length"),
    [
        ("llama", 40, 75),
        ("llama", 64, 10),
        ("llama", 8, 21),
        ("gemma3", 40, 75),
        ("smollm3", 64, 10),
        ("smollm3", 40, 75),
        ("gpt_neox", 40, 75),
        ("gpt_neox", 8, 21),
    ],
)
def test_logits_are_those_of_streaming_llm(
    variant: str, budget: int, length: int, tiny_backend: Any, decoder: Callable[[str], Decoder]
) -> None:
    watched = Watched(tiny_backend(variant))
    conversation = start(watched, _options(budget))
    assert len(take(conversation, prompt_of(length), 150)) == 150
    streaming, compared = _Streaming(decoder(variant), budget), 0
    for inputs, logits in zip(watched.steps, watched.logits, strict=True):
        expected = streaming.step(inputs.token_ids.tolist())
        np.testing.assert_allclose(logits, expected[inputs.logit_rows], atol=1e-4, rtol=0)
        compared += len(logits)
    assert compared >= 150


def test_a_window_that_is_wider_than_the_budget_slides_with_the_rest(export_changed: Any) -> None:
    # What a layer with a sliding window of 50 tokens sees of 20 slots is what one without a window sees.
    changed = {"config.json": {"sliding_window": 50}}
    wide = load_backend(export_changed("mistral", files=changed))
    none = load_backend(export_changed("mistral", files={"config.json": {"sliding_window": None}}))
    tokens = []
    for backend in (wide, none):
        watched = Watched(backend)
        conversation = start(watched, _options(20), chunk_tokens=4)
        tokens.append(take(conversation, prompt_of(40), 60))
        following = prompt_of(40) + tokens[-1] + [5, 6, 7]
        assert conversation.shared_prefix(following) == 99, "and what is held can be gone on from"
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("variant", ["llama", "gemma3", "mistral"])
def test_turning_everything_back_changes_no_logits_and_no_memory(
    variant: str, tiny_backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, backend = [], tiny_backend(variant)
    for most in (1 << 15, 90):
        monkeypatch.setattr(window, "MAX_POSITION", most)
        watched = Watched(backend)
        conversation = start(watched, _options(64))
        tokens = take(conversation, prompt_of(70), 20)
        held = conversation._cache.capacity
        tokens += take(conversation, prompt_of(70) + tokens, 280)
        runs.append((tokens, np.concatenate(watched.logits), [int(step.position_ids.max()) for step in watched.steps]))
        assert conversation._cache.capacity == held
        assert conversation._cache.length == 70 + 300 - 1
    assert max(runs[0][2]) == 368
    assert max(runs[1][2]) <= 90
    assert sum(after < before for before, after in itertools.pairwise(runs[1][2])) > 2
    assert runs[0][0] == runs[1][0]
    np.testing.assert_allclose(runs[0][1], runs[1][1], atol=2e-4, rtol=0)


def test_a_model_whose_layers_all_have_a_window_needs_no_sinks(tiny_backend: Any, greedy: Any) -> None:
    prompt = prompt_of(60)
    conversation = start(tiny_backend("mistral"), _options(16), chunk_tokens=8)
    assert take(conversation, prompt, 190) == greedy("mistral", prompt, 190)


def test_int8_sinks_are_not_rounded_again_and_again(tiny_bundle: Any) -> None:
    backend = load_backend(tiny_bundle(), "int8")
    conversation = start(backend, _options(32), chunk_tokens=8)
    take(conversation, prompt_of(20), 12)
    arrays = conversation._cache.stacks[0]
    first = arrays.float_keys(slice(SINK_TOKENS))
    take(conversation, [*prompt_of(20), *prompt_of(500, 1)], 1)
    forward = conversation._cache.slid_tokens
    expected = rotation.turned(first, backend.spec, arrays.stack, forward)
    scale = np.abs(expected).max(axis=2, keepdims=True) / 127
    assert (np.abs(arrays.float_keys(slice(SINK_TOKENS)) - expected) <= 0.51 * scale).all(), "rounded once"


def _check(conversation: Session, decoder: Decoder, budget: int) -> None:
    """The first layer's keys depend on token and position alone, so they say whether the map tells the truth."""
    held, tokens = conversation._cache, conversation.token_ids
    slot_map, arrays = held.maps[0], held.stacks[0]
    order = slot_map.order()
    owners, positions = slot_map.owners[order], slot_map.positions[order]
    assert len(order) <= budget
    slid = held.length - len(order)
    expected = [*range(min(SINK_TOKENS, len(order))), *range(SINK_TOKENS + slid, held.length)]
    assert owners.tolist() == expected[: len(order)]
    assert positions.tolist() == list(range(held.next_position - len(order), held.next_position))
    ids = torch.tensor([[tokens[owner] for owner in owners]])
    with torch.no_grad():
        keys = decoder(ids, torch.from_numpy(positions)[None]).key_values[0][0]
    np.testing.assert_allclose(arrays.keys[0][..., order], keys[0].transpose(1, 2), atol=1e-4)


def test_an_interruption_before_any_line_leaves_keys_where_the_map_says(
    tiny_backend: Any, decoder: Callable[[str], Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window, "MAX_POSITION", 30)
    monkeypatch.setattr(cache, "BUCKET_TOKENS", 8)
    backend, model, prompt = tiny_backend("llama"), decoder("llama"), prompt_of(14)
    at, interrupted = 1, True
    while interrupted:
        conversation = start(backend, _options(16), chunk_tokens=4)
        answer = take(conversation, prompt, 10)
        following = [*prompt, *answer, *prompt_of(9, seed=1)]
        interrupted = Interruption(at, RUNTIME).run(lambda: take(conversation, following, 3))  # noqa: B023
        # What is read next is either what went before or all of it again, and every key is where it should be.
        take(conversation, following, 2)
        _check(conversation, model, 16)
        assert list(conversation.token_ids[: len(following)]) == following
        at += 5
    assert at > 300


def test_the_next_turn_reads_only_what_is_new(tiny_backend: Any) -> None:
    watched = Watched(tiny_backend("llama"))
    conversation = start(watched, _options(64))
    text = prompt_of(200)
    text += take(conversation, text, 30)
    watched.steps.clear()
    following = [*text, *prompt_of(12, seed=1)]
    assert conversation.shared_prefix(following) == 229
    take(conversation, following, 1)
    assert [step.token_ids.tolist() for step in watched.steps] == [following[229:]]
    # An answer that comes back otherwise than it was written: what went before it is held.
    other = [*following[:-5], 9, 8, 7]
    watched.steps.clear()
    take(conversation, other, 1)
    assert [token for step in watched.steps for token in step.token_ids.tolist()] == other[-3:]


def test_a_conversation_that_changes_before_what_is_held_is_read_again(tiny_backend: Any) -> None:
    watched = Watched(tiny_backend("llama"))
    conversation, text = start(watched, _options(64)), prompt_of(200)
    take(conversation, text, 1)
    watched.steps.clear()
    changed = [*text[:100], *prompt_of(80, seed=2)]
    fresh = take(start(tiny_backend("llama"), _options(64)), changed, 20)
    assert take(conversation, changed, 20) == fresh
    assert sum(len(step.token_ids) for step in watched.steps) == 180 + 19


@pytest.mark.parametrize("length", [1, 3, 4, 5])
def test_the_first_tokens_are_sinks_though_the_prompt_is_shorter(
    length: int, tiny_backend: Any, decoder: Callable[[str], Decoder]
) -> None:
    conversation = start(tiny_backend("llama"), _options(16))
    take(conversation, prompt_of(length), 60)
    _check(conversation, decoder("llama"), 16)


def test_a_new_conversation_has_sinks_of_its_own(tiny_backend: Any) -> None:
    conversation = start(tiny_backend("llama"), _options(16))
    take(conversation, prompt_of(30), 30)
    prompt = prompt_of(25, seed=3)
    assert take(conversation, prompt, 40) == take(start(tiny_backend("llama"), _options(16)), prompt, 40)


def test_cancelling_while_a_prompt_is_read_leaves_what_was_read(
    tiny_backend: Any, decoder: Callable[[str], Decoder]
) -> None:
    watched, prompt = Watched(tiny_backend("llama")), prompt_of(100)
    conversation = start(watched, _options(32), chunk_tokens=8)
    watched.after = lambda: conversation.cancel() if len(watched.steps) == 8 else None
    assert take(conversation, prompt, 5) == []
    assert list(conversation.token_ids) == prompt[:64]
    _check(conversation, decoder("llama"), 32)
    watched.after = lambda: None
    assert take(conversation, prompt, 20) == take(
        start(tiny_backend("llama"), _options(32), chunk_tokens=8), prompt, 20
    )


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (_options(7), UsageError, "needs a budget of at least 8 tokens, 4 of which are sinks; got 7"),
        (_options(0), UsageError, "KV budget is 0 tokens; it must be an integer of at least 1"),
        (PolicyOptions(name="window", layer_budgets_tokens=(9, 9)), UsageError, "same tokens in all layers"),
    ],
)
def test_budgets_that_mean_nothing_are_refused(
    options: PolicyOptions, error: type[Exception], message: str, tiny_backend: Any
) -> None:
    with pytest.raises(error, match=message):
        start(tiny_backend("llama"), options)


def test_fewer_slots_than_it_needs_are_refused(tiny_backend: Any) -> None:
    with pytest.raises(DoesNotFitError, match="room for at least 8 tokens, 4 of which are sinks; there is room for 7"):
        start(tiny_backend("llama"), _options(None), max_tokens=7)


@pytest.mark.parametrize("variant", ["llama_dynamic_rope", "phi3_longrope"])
def test_models_whose_rotation_depends_on_the_length_are_refused(variant: str, tiny_backend: Any) -> None:
    spec = tiny_backend(variant).spec
    with pytest.raises(UnsupportedError, match="rotary frequencies depend on the length of the whole text"):
        Window(_options(None), spec, cache_layout(spec))


def test_tokens_are_evicted_in_bunches_of_a_sixteenth_of_the_slots_and_at_most_32() -> None:
    assert [Window.eviction_tokens(slots) for slots in (8, 31, 32, 64, 512, 4096)] == [1, 1, 2, 4, 32, 32]
