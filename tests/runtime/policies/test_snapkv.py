"""SnapKV against the attention that Hugging Face computes, and against a past with nothing else in it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from edgekit.cache_layout import cache_layout
from edgekit.compress.decoder import Decoder
from edgekit.errors import DoesNotFitError, UnsupportedError, UsageError
from edgekit.runtime.backends.onnxruntime_cpu import OnnxRuntimeCpu
from edgekit.runtime.lowered import lowered_graph
from edgekit.runtime.policies import PolicyOptions
from edgekit.runtime.policies.snapkv import OBSERVED_TOKENS, SnapKV, highest, pooled
from tests.runtime.conftest import Watched
from tests.runtime.policies.reference import (
    Past,
    attention_of,
    chosen,
    generate,
    kept_tokens,
    nothing,
    prompt_of,
    read,
    start,
    take,
)


def _options(budget: int | None, name: str = "snapkv", layers: tuple[int, ...] | None = None) -> PolicyOptions:
    return PolicyOptions(name=name, budget_tokens=budget, layer_budgets_tokens=layers)


def _expected(
    mass: list[npt.NDArray[np.float32]], decoder: Decoder, budgets: list[int], observed: int, length: int
) -> list[npt.NDArray[np.int64]]:
    """What every layer keeps of a prompt, shape (KV, n); all of it in layers with a sliding window."""
    kept = []
    for layer, scores, budget in zip(decoder.spec.layers, mass, budgets, strict=True):
        if layer.attention.sliding_window is None and length > budget:
            kept.append(kept_tokens(scores[:, : length - observed], budget - observed, observed))
        else:
            kept.append(np.tile(np.arange(length), (layer.attention.num_kv_heads, 1)))
    return kept


def _check_held(conversation: Any, pasts: list[Past]) -> None:
    """Compares keys and values of all live slots with those of a past, of the last tokens in layers with a window."""
    held = conversation._cache
    for arrays in held.stacks:
        order = held.maps[arrays.stack.group].order()
        for place, layer in enumerate(arrays.stack.layers):
            past = pasts[layer]
            keys, values = past.keys[0, :, -len(order) :], past.values[0, :, -len(order) :]
            np.testing.assert_allclose(arrays.keys[place][..., order], keys.transpose(1, 2), atol=1e-4)
            np.testing.assert_allclose(arrays.values[place][:, order], values, atol=1e-4)


@pytest.mark.parametrize(
    ("variant", "length", "budget"), [("llama", 100, 48), ("llama", 100, 33), ("llama", 60, 59), ("gemma3", 90, 50)]
)
def test_a_prompt_keeps_what_its_end_attends_to(
    variant: str,
    length: int,
    budget: int,
    scoring_backend: Any,
    hugging_face: Any,
    tiny_checkpoint: Any,
    decoder: Callable[[str], Decoder],
) -> None:
    backend, model, prompt = scoring_backend(variant), decoder(variant), prompt_of(length)
    mass = attention_of(hugging_face(tiny_checkpoint(variant)), prompt, OBSERVED_TOKENS)
    kept = _expected(mass, model, [budget] * len(mass), OBSERVED_TOKENS, length)
    pasts = nothing(model)
    expected = read(model, prompt, 0, pasts)[-1]
    pasts = [chosen(past, tokens) for past, tokens in zip(pasts, kept, strict=True)]
    watched = Watched(backend)
    conversation = start(watched, _options(budget))
    generation = generate(conversation, prompt)
    tokens = [next(generation)]
    _check_held(conversation, pasts)
    np.testing.assert_allclose(watched.logits[-1][0], expected, atol=1e-4)
    # And the answer is one over a past in which there is nothing else.
    watched.logits.clear()
    for past in pasts:
        if past.keys.shape[2] == length:
            past.positions = torch.arange(length)
    tokens += itertools.islice(generation, 30)
    for position, (token, logits) in enumerate(zip(tokens, watched.logits, strict=False), start=length):
        np.testing.assert_allclose(logits[-1], read(model, [token], position, pasts)[0], atol=1e-4)
    assert len(watched.logits) == 30
    assert conversation._cache.length == length + 30


def test_each_layer_has_a_budget_of_its_own(
    scoring_bundle: Any, hugging_face: Any, tiny_checkpoint: Any, decoder: Callable[[str], Decoder]
) -> None:
    bundle, model, prompt, budgets = scoring_bundle("llama"), decoder("llama"), prompt_of(100), (40, 70)
    layout = cache_layout(bundle.manifest.spec, "fp32", budgets)
    backend = OnnxRuntimeCpu(lowered_graph(bundle, layout), bundle.manifest.spec, 1, layout)
    conversation = start(backend, _options(None, layers=budgets))
    take(conversation, prompt, 1)
    mass = attention_of(hugging_face(tiny_checkpoint("llama")), prompt, OBSERVED_TOKENS)
    kept, pasts = _expected(mass, model, list(budgets), OBSERVED_TOKENS, 100), nothing(model)
    read(model, prompt, 0, pasts)
    _check_held(conversation, [chosen(past, each) for past, each in zip(pasts, kept, strict=True)])
    assert [slots.live for slots in conversation._cache.maps] == [40, 70]


def test_a_later_turn_is_scored_by_its_own_end_over_what_is_left(
    scoring_backend: Any, decoder: Callable[[str], Decoder]
) -> None:
    # Twelve tokens: fewer than are observed of a prompt that is longer.
    backend, model, prompt = scoring_backend("llama"), decoder("llama"), prompt_of(90)
    watched = Watched(backend)
    conversation = start(watched, _options(48))
    first = take(conversation, prompt, 20)
    before = [
        Past(
            torch.from_numpy(
                arrays.keys[:, :, :, : (order := conversation._cache.maps[0].order()).max() + 1][..., order]
            ).transpose(2, 3)[place : place + 1],
            torch.from_numpy(arrays.values[:, :, order])[place : place + 1],
            torch.arange(len(order)),
        )
        for arrays in conversation._cache.stacks
        for place in range(len(arrays.stack.layers))
    ]
    following = [*prompt, *first, *prompt_of(11, seed=1)]
    watched.steps.clear()
    assert conversation.shared_prefix(following) == 109
    take(conversation, following, 1)
    assert [len(step.token_ids) for step in watched.steps] == [12], "only what is new is read"
    pasts = list(before)
    mass = _masses(model, following[109:], 109, pasts)
    kept = [kept_tokens(scores[:, :67], 48 - 12, 12) for scores in mass]
    _check_held(conversation, [chosen(past, each) for past, each in zip(pasts, kept, strict=True)])


def _masses(model: Decoder, tokens: list[int], first: int, pasts: list[Past]) -> list[npt.NDArray[np.float32]]:
    """Reads tokens; returns what the slots before them got in each layer, shape (KV, slots), from queries and keys."""
    masses, count, weights = [], len(tokens), []

    def note(module: Any, arguments: Any, _: Any) -> None:
        hidden, positions = arguments[0], arguments[1]
        weights.append((module, hidden, positions))

    handles = [layer.self_attn.register_forward_hook(note) for layer in model.layers]  # type: ignore[union-attr]
    read(model, tokens, first, pasts)
    for handle in handles:
        handle.remove()
    from edgekit.compress import decoder as reference

    for (module, hidden, positions), past in zip(weights, pasts, strict=True):
        spec = module.spec
        with torch.no_grad():
            query = module.q_proj(hidden).view(1, count, spec.num_heads, spec.key_dim)
            cos, sin = reference._rotation(spec.rope, positions, 0)
            query = reference._rotate(query, cos, sin).transpose(1, 2)
            keys = past.keys.repeat_interleave(spec.group_size, dim=1)
            scores = query @ keys.transpose(2, 3) * spec.scale
            future = torch.ones(count, keys.shape[2], dtype=torch.bool).triu(keys.shape[2] - count + 1)
            probabilities = scores.masked_fill(future, -torch.inf).softmax(-1)[0].sum(1)
            masses.append(probabilities.view(spec.num_kv_heads, spec.group_size, -1).sum(1).numpy())
    return masses


def test_a_prompt_within_the_budget_is_kept_whole_and_goes_on_from_anywhere(scoring_backend: Any, greedy: Any) -> None:
    watched, prompt = Watched(scoring_backend("llama")), prompt_of(60)
    conversation = start(watched, _options(60))
    assert take(conversation, prompt, 10) == greedy("llama", prompt, 10)
    assert conversation.shared_prefix([*prompt[:50], 5, 6, 7]) == 50


def test_after_compression_only_what_follows_can_be_dropped(scoring_backend: Any) -> None:
    watched, prompt = Watched(scoring_backend("llama")), prompt_of(100)
    conversation = start(watched, _options(40))
    answer = take(conversation, prompt, 10)
    assert conversation.shared_prefix([*prompt, *answer[:3], 5, 6]) == 103
    assert conversation.shared_prefix([*prompt[:99], 5, 6]) == 0
    watched.steps.clear()
    changed = [*prompt[:99], *prompt_of(20, seed=4)]
    assert take(conversation, changed, 10) == take(start(scoring_backend("llama"), _options(40)), changed, 10)


def test_a_conversation_may_be_longer_than_the_slots(scoring_backend: Any) -> None:
    conversation = start(scoring_backend("llama"), _options(40), max_tokens=100)
    text = prompt_of(90)
    for turn in range(3):
        text += take(conversation, text, 10)
        text += prompt_of(25, seed=turn)
        assert conversation._cache.live <= 51
    assert len(text) == 195
    assert len(take(conversation, text, 5)) == 5
    with pytest.raises(DoesNotFitError, match="the prompt needs 101 tokens, the KV cache has room for 100"):
        take(conversation, prompt_of(101, seed=9), 1)


def test_an_answer_ends_where_the_slots_do(scoring_backend: Any) -> None:
    conversation = start(scoring_backend("llama"), _options(40), max_tokens=64)
    assert len(take(conversation, prompt_of(60), 1000)) == 64 - 40 + 1


@pytest.mark.parametrize("dtype", ["fp16", "int8"])
def test_what_is_kept_does_not_depend_on_how_it_is_stored(dtype: str, scoring_backend: Any) -> None:
    prompt = prompt_of(100)
    conversations = [start(scoring_backend("llama", kind), _options(48)) for kind in ("fp32", dtype)]
    for conversation in conversations:
        take(conversation, prompt, 1)
    wide, narrow = (conversation._cache.stacks[0].float_keys(slice(48)) for conversation in conversations)
    # A token that one keeps and the other does not shows as keys that have nothing in common.
    distance = np.abs(wide - narrow).max(axis=2) / np.abs(wide).max(axis=2)
    assert (distance < 0.05).mean() > 0.9


@pytest.mark.parametrize("observed", [1, 5, 31])
def test_a_prompt_shorter_than_what_is_observed_is_kept(observed: int, scoring_backend: Any, greedy: Any) -> None:
    prompt = prompt_of(observed)
    assert take(start(scoring_backend("llama"), _options(33)), prompt, 20) == greedy("llama", prompt, 20)


def test_pooling_takes_the_largest_of_seven_neighbours() -> None:
    scores = np.random.default_rng(0).random((2, 3, 40)).astype(np.float32)
    expected = torch.nn.functional.max_pool1d(torch.from_numpy(scores), 7, stride=1, padding=3)
    np.testing.assert_array_equal(pooled(scores), expected.numpy())
    np.testing.assert_array_equal(pooled(scores[..., :2]), scores[..., :2].max(-1, keepdims=True).repeat(2, -1))


def test_the_highest_are_in_order_and_of_equals_the_later() -> None:
    scores = np.array([[3.0, 1.0, 3.0, 2.0, 3.0], [0.0, 9.0, 8.0, 9.0, 7.0]], np.float32)
    assert highest(scores, 2).tolist() == [[2, 4], [1, 3]]
    assert highest(scores, 0).shape == (2, 0)
    assert highest(scores, 5).tolist() == [[0, 1, 2, 3, 4]] * 2


@pytest.mark.parametrize("name", ["snapkv", "laq", "laq++"])
@pytest.mark.parametrize("budget", [None, 1, 32])
def test_budgets_without_room_for_the_end_of_the_prompt_are_refused(
    budget: int | None, name: str, scoring_backend: Any
) -> None:
    with pytest.raises(
        UsageError, match=f"KV policy '{name}' needs a budget of more than 32 tokens".replace("+", r"\+")
    ):
        start(scoring_backend("llama"), _options(budget, name))


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((40, 70), "layer budgets that the model was not loaded with"),
        ((40, 40, 40), "budgets of 3 layers, the model has 2"),
        ((20, 20), "needs a budget of more than 32 tokens per layer, which are the end of the prompt; got 20"),
    ],
)
def test_layer_budgets_that_the_cache_has_no_groups_for_are_refused(
    layers: tuple[int, ...], message: str, scoring_backend: Any
) -> None:
    with pytest.raises(UsageError, match=message):
        start(scoring_backend("llama"), _options(None, layers=layers))


def test_a_model_without_a_layer_to_compress_is_refused(tiny_backend: Any) -> None:
    spec = tiny_backend("mistral").spec
    with pytest.raises(UnsupportedError, match="all layers of this model have a sliding window"):
        SnapKV(_options(64), spec, cache_layout(spec))
