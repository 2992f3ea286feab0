"""Lookahead Q-Cache against its steps, each of them done with the reference decoder or Hugging Face."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from edgekit.compress.decoder import Decoder
from edgekit.runtime.policies import PolicyOptions, laq
from edgekit.runtime.policies.laq import PROMPT_TOKENS, PSEUDO_TOKENS
from edgekit.runtime.policies.snapkv import OBSERVED_TOKENS
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


def _options(name: str, budget: int = 48) -> PolicyOptions:
    return PolicyOptions(name=name, budget_tokens=budget)


def _windows(model: Decoder) -> list[bool]:
    return [layer.attention.sliding_window is not None for layer in model.spec.layers]


def _kept(model: Decoder, mass: list[Any], length: int, budget: int, observed: int) -> list[Any]:
    return [
        np.tile(np.arange(length), (len(scores), 1))
        if windowed
        else kept_tokens(scores[:, : length - observed], budget - observed, observed)
        for windowed, scores in zip(_windows(model), mass, strict=True)
    ]


def _select(pasts: list[Past], kept: list[Any]) -> list[Past]:
    return [chosen(past, tokens) for past, tokens in zip(pasts, kept, strict=True)]


@pytest.mark.parametrize(("name", "prompt_tokens"), [("laq", 0), ("laq++", PROMPT_TOKENS)])
@pytest.mark.parametrize("variant", ["llama", "gemma3"])
def test_a_prompt_keeps_what_its_answer_will_attend_to(
    variant: str,
    name: str,
    prompt_tokens: int,
    scoring_backend: Any,
    hugging_face: Any,
    tiny_checkpoint: Any,
    decoder: Callable[[str], Decoder],
) -> None:
    backend, model, prompt, budget = scoring_backend(variant), decoder(variant), prompt_of(100), 48
    oracle, pasts = hugging_face(tiny_checkpoint(variant)), nothing(model)
    logits = read(model, prompt, 0, pasts)[-1]
    # SnapKV first, over whose cache a few tokens are generated.
    mass = attention_of(oracle, prompt, OBSERVED_TOKENS)
    copied = _select(pasts, _kept(model, mass, 100, budget, OBSERVED_TOKENS))
    pseudo = [int(logits.argmax())]
    while len(pseudo) < PSEUDO_TOKENS and pseudo[-1] not in model.spec.eos_token_ids:
        pseudo.append(int(read(model, pseudo[-1:], 99 + len(pseudo), copied)[-1].argmax()))
    # What they attend to in the whole prompt is kept.
    mass = attention_of(oracle, prompt + pseudo, len(pseudo) + prompt_tokens)
    expected = _select(pasts, _kept(model, mass, 100, budget, prompt_tokens))
    watched = Watched(backend)
    conversation = start(watched, _options(name))
    generation = generate(conversation, prompt)
    tokens = [next(generation)]
    steps = [step.token_ids.tolist() for step in watched.steps]
    assert steps[-len(pseudo) :] == [*([token] for token in pseudo[:-1]), prompt[100 - prompt_tokens :] + pseudo]
    held = conversation._cache
    for arrays in held.stacks:
        order = held.maps[arrays.stack.group].order()
        for place, layer in enumerate(arrays.stack.layers):
            keys = expected[layer].keys[0, :, -len(order) :].transpose(1, 2)
            np.testing.assert_allclose(arrays.keys[place][..., order], keys, atol=1e-4)
    assert (held.length, held.next_position, conversation.token_ids) == (100, 100, tuple(prompt))
    # And the answer goes on over it.
    for past in expected:
        past.positions = torch.arange(past.keys.shape[2])
    tokens += itertools.islice(generation, 10)
    for index, logits in enumerate(watched.logits[-10:]):
        np.testing.assert_allclose(logits[-1], read(model, [tokens[index]], 100 + index, expected)[0], atol=1e-4)


@pytest.mark.parametrize("name", ["laq", "laq++"])
@pytest.mark.parametrize("new", [1, 5, 12, 40])
def test_a_later_turn_of_any_length_goes_on(new: int, name: str, scoring_backend: Any) -> None:
    watched = Watched(scoring_backend("llama"))
    conversation = start(watched, _options(name))
    text = prompt_of(100)
    text += take(conversation, text, 20)
    text += prompt_of(new, seed=2)
    watched.steps.clear()
    take(conversation, text, 1)
    # The answer's last token, which was not read yet, the new ones, and of laq++ the end once more.
    reads = [step for step in watched.steps if len(step.token_ids) > 1]
    counts = [len(step.token_ids) for step in reads]
    assert sum(counts[:-1]) == new + 1
    repeated = min(PROMPT_TOKENS, new + 1) if name == "laq++" else 0
    assert repeated < counts[-1] <= repeated + PSEUDO_TOKENS
    assert reads[-1].token_ids[:repeated].tolist() == text[len(text) - repeated :]
    held = conversation._cache
    assert (held.length, held.next_position, held.live) == (len(text), len(text), 48)
    assert conversation.token_ids == tuple(text)
    assert len(take(conversation, [*text, 7], 10)) == 10


def test_looking_ahead_ends_with_the_answer(scoring_backend: Any) -> None:
    prompt = prompt_of(100)
    free = Watched(scoring_backend("llama"))
    take(start(free, _options("laq")), prompt, 1)
    pseudo = free.steps[-1].token_ids.tolist()
    assert len(pseudo) == PSEUDO_TOKENS
    stop = pseudo[3]
    ended = Watched(scoring_backend("llama"))
    conversation = start(ended, _options("laq"))
    conversation.policy.spec = msgspec.structs.replace(conversation.spec, eos_token_ids=(stop,))
    take(conversation, prompt, 1)
    assert ended.steps[-1].token_ids.tolist() == pseudo[: pseudo.index(stop) + 1]


@pytest.mark.parametrize("name", ["laq", "laq++"])
def test_a_prompt_that_fills_the_context_looks_ahead_no_further_than_it(name: str, scoring_backend: Any) -> None:
    watched = Watched(scoring_backend("llama"))
    conversation = start(watched, _options(name), max_tokens=256)
    prompt = prompt_of(254)
    # Two more positions, and a last token that needs none.
    assert len(take(conversation, prompt, 1000)) == 3
    assert max(int(step.position_ids.max()) for step in watched.steps) <= 256


@pytest.mark.parametrize("name", ["laq", "laq++"])
def test_pseudo_tokens_do_not_make_a_short_text_a_long_one(name: str, scoring_backend: Any) -> None:
    # LongRoPE rotates texts of up to 40 tokens otherwise than longer ones: with its pseudo tokens the prompt is longer.
    watched = Watched(scoring_backend("phi3_longrope_short"))
    conversation = start(watched, _options(name, 33))
    prompt = prompt_of(38)
    take(conversation, prompt, 1)
    assert {step.sequence_length for step in watched.steps} == {38}
    assert len(watched.steps) > 3
    held, before = conversation._cache, start(watched, PolicyOptions())
    take(before, prompt, 1)
    whole = before._cache.stacks[0].keys[..., :38]
    for layer, head in np.ndindex(whole.shape[:2]):
        for slot in range(33):
            distance = np.abs(held.stacks[0].keys[layer, head, :, slot, None] - whole[layer, head]).max(axis=0)
            assert distance.min() < 1e-4, "every key is one of the prompt's"


@pytest.mark.parametrize("name", ["snapkv", "laq", "laq++"])
@pytest.mark.parametrize("number", range(3, 16, 2))
def test_an_interruption_while_a_prompt_is_compressed_leaves_a_conversation_that_goes_on(
    number: int, name: str, scoring_backend: Any
) -> None:
    watched, prompt = Watched(scoring_backend("llama")), prompt_of(100)
    conversation = start(watched, _options(name))

    def interrupt() -> None:
        if len(watched.steps) == number:
            raise KeyboardInterrupt

    watched.before = interrupt
    try:
        take(conversation, prompt, 5)
    except KeyboardInterrupt:
        assert conversation._cache.live >= 48
    watched.before = lambda: None
    following = [*prompt, *prompt_of(33, seed=3)]
    tokens = take(conversation, following, 8)
    assert conversation._cache.length == 133 + 7
    whole = take(start(scoring_backend("llama"), PolicyOptions()), following, 1)
    assert len(tokens) == 8
    assert len(whole) == 1


def test_the_paper_s_numbers() -> None:
    assert (laq.PSEUDO_TOKENS, laq.PROMPT_TOKENS) == (8, 8)
