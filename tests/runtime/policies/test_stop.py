"""The policy "stop", and what `make_policy` refuses."""

from __future__ import annotations

from typing import Any

import pytest

from edgekit.errors import DoesNotFitError, UnsupportedError, UsageError
from edgekit.runtime.policies import POLICIES, PolicyOptions, make_policy
from tests.runtime.conftest import Watched
from tests.runtime.policies.reference import prompt_of, start, take


def test_an_answer_ends_where_the_slots_do(tiny_backend: Any, greedy: Any) -> None:
    prompt = prompt_of(50)
    conversation = start(tiny_backend("llama"), PolicyOptions(), max_tokens=64)
    # The last token that is drawn needs no slot of its own.
    assert take(conversation, prompt, 1000) == greedy("llama", prompt, 15)
    assert len(conversation.token_ids) == 64


def test_a_prompt_with_more_tokens_than_slots_is_refused(tiny_backend: Any) -> None:
    conversation = start(tiny_backend("llama"), PolicyOptions(), max_tokens=64)
    with pytest.raises(DoesNotFitError, match="the prompt needs 65 tokens, the KV cache has room for 64"):
        take(conversation, prompt_of(65), 1)
    assert conversation.token_ids == ()


def test_the_next_turn_over_a_long_document_reads_only_what_is_new(tiny_backend: Any, greedy: Any) -> None:
    watched, document = Watched(tiny_backend("llama")), prompt_of(180)
    conversation = start(watched, PolicyOptions())
    text = [*document, *prompt_of(6, seed=1)]
    answer = take(conversation, text, 12)
    assert sum(len(step.token_ids) for step in watched.steps) == 186 + 11
    watched.steps.clear()
    # A chat template writes the end of the answer otherwise than it was generated.
    following = [*text, *answer[:-3], 4, 5, *prompt_of(7, seed=2)]
    assert conversation.shared_prefix(following) == 195
    assert take(conversation, following, 5) == greedy("llama", following, 5)
    assert watched.steps[0].token_ids.tolist() == following[195:]
    assert sum(len(step.token_ids) for step in watched.steps) == len(following) - 195 + 4


@pytest.mark.parametrize("variant", ["gemma3", "mistral"])
def test_of_a_sliding_window_enough_is_left_to_drop_the_end_of_an_answer(
    variant: str, tiny_backend: Any, greedy: Any
) -> None:
    watched, document = Watched(tiny_backend(variant)), prompt_of(200)
    conversation = start(watched, PolicyOptions())
    answer = take(conversation, document, 20)
    watched.steps.clear()
    following = [*document, *answer[:5], *prompt_of(9, seed=1)]
    assert conversation.shared_prefix(following) == 205
    assert take(conversation, following, 10) == greedy(variant, following, 10)
    assert sum(len(step.token_ids) for step in watched.steps) == 9 + 9
    # Further back than the window's rest it is read again.
    early = [*document[:90], *prompt_of(9, seed=2)]
    assert conversation.shared_prefix(early) == 0
    assert take(conversation, early, 10) == greedy(variant, early, 10)


@pytest.mark.parametrize(
    "options", [PolicyOptions(budget_tokens=64), PolicyOptions(layer_budgets_tokens=(64, 64))], ids=["one", "layers"]
)
def test_a_budget_which_it_would_ignore_is_refused(options: PolicyOptions, tiny_backend: Any) -> None:
    with pytest.raises(UsageError, match="KV policy 'stop' keeps all tokens and takes no budget of tokens"):
        start(tiny_backend("llama"), options)


def test_an_unknown_policy_is_refused_with_a_guess(tiny_backend: Any) -> None:
    backend = tiny_backend("llama")
    with pytest.raises(UsageError, match=r"KV policy 'snapkw'; known: .*did you mean 'snapkv'\?"):
        make_policy(PolicyOptions(name="snapkw", budget_tokens=64), backend.spec, backend)


@pytest.mark.parametrize("name", ["snapkv", "laq", "laq++"])
def test_a_bundle_that_does_not_say_what_is_attended_to_is_refused(name: str, tiny_backend: Any) -> None:
    backend = tiny_backend("llama")
    with pytest.raises(
        UnsupportedError, match="export it with --attention-scores, or use the policy 'stop' or 'window'"
    ):
        make_policy(PolicyOptions(name=name, budget_tokens=64), backend.spec, backend)


@pytest.mark.parametrize("budget", [0, -1, 1.5, True, "64"])
@pytest.mark.parametrize("name", POLICIES)
def test_a_budget_that_is_no_number_of_tokens_is_refused(name: str, budget: Any, scoring_backend: Any) -> None:
    backend = scoring_backend("llama")
    with pytest.raises(UsageError, match="it must be an integer of at least 1"):
        make_policy(PolicyOptions(name=name, budget_tokens=budget), backend.spec, backend)


def test_each_name_is_a_policy_of_its_own_or_a_variant_of_one(scoring_backend: Any) -> None:
    backend = scoring_backend("llama")
    made = {
        name: make_policy(PolicyOptions(name=name, budget_tokens=None if name == "stop" else 64), backend.spec, backend)
        for name in POLICIES
    }
    assert {name for name, policy in made.items() if policy.makes_room} == {"window"}
    assert {name: policy.observed_tokens for name, policy in made.items()} == {
        "stop": 0,
        "window": 0,
        "snapkv": 32,
        "laq": 32,
        "laq++": 32,
    }
    assert [policy.slots(100) for policy in made.values()] == [100, 64, 100, 100, 100]
