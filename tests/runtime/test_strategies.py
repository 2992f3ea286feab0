"""Decoding by trees of guesses: any guesses, right or wrong, leave the output what it is without them."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from edgekit.contract import MASKED
from edgekit.runtime.sampling import Sampler, SamplingParams
from edgekit.runtime.session import Session
from edgekit.runtime.step import causal_step
from edgekit.runtime.strategies.autoregressive import Autoregressive
from edgekit.runtime.strategies.base import Draft, Strategy, accept

VOCABULARY = 320
TREE_NODES = 7


class Planted:
    """Proposes random trees in which some guesses are right; `truth` is what the model will say."""

    def __init__(self, truth: Sequence[int], *, vocab_size: int, right: float, seed: int = 0) -> None:
        self._truth = list(truth)
        self._vocab_size = vocab_size
        self._right = right
        self._random = np.random.default_rng(seed)

    def propose(self, token_ids: Sequence[int]) -> Draft:
        tokens, parents, agrees = [token_ids[-1]], [-1], [True]
        depths = [0]
        for _ in range(int(self._random.integers(TREE_NODES))):
            parent = int(self._random.integers(len(tokens)))
            place = len(token_ids) + depths[parent]
            right = agrees[parent] and place < len(self._truth) and self._random.random() < self._right
            tokens.append(self._truth[place] if right else int(self._random.integers(self._vocab_size)))
            parents.append(parent)
            depths.append(depths[parent] + 1)
            agrees.append(agrees[parent] and place < len(self._truth) and tokens[-1] == self._truth[place])
        return Draft(token_ids=np.array(tokens, np.int64), parents=parents)


def _generated(backend: Any, strategy: Strategy, prompt: list[int], params: SamplingParams, **limits: int) -> list[int]:
    spec = getattr(backend, "backend", backend).spec
    session = Session(msgspec.structs.replace(spec, **limits), backend, strategy)
    tokens = [token.token_id for token in itertools.islice(session.generate(prompt, params, VOCABULARY), 60)]
    assert list(session.token_ids) == (prompt + tokens)[: len(session.token_ids)]
    return tokens


def _prompt(seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, VOCABULARY, 12)]


@pytest.mark.parametrize("right", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_a_model_says_the_same_with_any_guesses(
    seed: int, temperature: float, right: float, watched: Any, tiny_backend: Any
) -> None:
    # With one draw per token, a seed gives the very tokens that it gives without guesses.
    prompt, params = _prompt(seed), SamplingParams(temperature=temperature, seed=seed)
    expected = _generated(tiny_backend("llama"), Autoregressive(), prompt, params)
    strategy = Planted(prompt + expected, vocab_size=VOCABULARY, right=right, seed=seed)
    assert _generated(watched, strategy, prompt, params) == expected
    assert len(watched.steps) <= 60
    if right == 1:
        assert len(watched.steps) < 40, "right guesses save steps"


def test_greedy_tokens_with_guesses_are_those_of_hugging_face(watched: Any, greedy: Any) -> None:
    prompt = _prompt(9)
    truth = greedy("llama", prompt, 60)
    strategy = Planted(prompt + truth, vocab_size=VOCABULARY, right=0.7)
    assert _generated(watched, strategy, prompt, SamplingParams()) == truth


@pytest.mark.parametrize("context", range(13, 24))
def test_a_path_ends_where_the_context_does(context: int, tiny_backend: Any) -> None:
    backend, prompt, params = tiny_backend("llama"), _prompt(1), SamplingParams()
    expected = _generated(backend, Autoregressive(), prompt, params, max_positions=context)
    assert len(expected) == context - len(prompt) + 1
    for seed in range(5):
        strategy = _Chain(prompt + expected + [5] * 9, length=3 + seed)
        assert _generated(backend, strategy, prompt, params, max_positions=context) == expected


class _Chain:
    """Guesses the next `length` tokens, all of them right."""

    def __init__(self, truth: Sequence[int], length: int) -> None:
        self._truth = list(truth)
        self._length = length

    def propose(self, token_ids: Sequence[int]) -> Draft:
        tokens = [token_ids[-1], *self._truth[len(token_ids) :][: self._length]]
        return Draft(token_ids=np.array(tokens, np.int64), parents=range(-1, len(tokens) - 1))


def test_a_path_that_a_consumer_leaves_half_way_is_known_next_time(watched: Any, greedy: Any) -> None:
    prompt = _prompt(2)
    truth = greedy("llama", prompt, 30)
    session = Session(watched.backend.spec, watched, _Chain(prompt + truth, length=5))
    got = list(itertools.islice(session.generate(prompt, SamplingParams(), VOCABULARY), 3))
    assert [token.token_id for token in got] == truth[:3]
    assert list(session.token_ids) == prompt + truth[:6]
    watched.steps.clear()
    again = itertools.islice(session.generate(prompt + truth[:3], SamplingParams(), VOCABULARY), 20)
    assert [token.token_id for token in again] == truth[3:23]
    assert watched.steps[0].token_ids.tolist() == truth[2:3]


# A model that is a table: the logits of the next token, given the last one.
TABLE = np.random.default_rng(3).normal(size=(5, 5)).astype(np.float32) * 1.5


def _table_tokens(strategy: Strategy, sampler: Sampler, count: int, start: int = 0) -> tuple[list[int], int]:
    """Decodes with the table as the model; returns the tokens and the number of steps."""
    token_ids, steps = [start], 0
    while len(token_ids) <= count:
        draft = strategy.propose(token_ids)
        accepted = accept(draft, TABLE[draft.token_ids], sampler, token_ids)
        assert [int(draft.token_ids[node]) for node in accepted.nodes[1:]] == [
            token.token_id for token in accepted.tokens[:-1]
        ]
        assert [draft.parents[node] for node in accepted.nodes] == [-1, *accepted.nodes[:-1]]
        token_ids += [token.token_id for token in accepted.tokens]
        steps += 1
    return token_ids[1 : count + 1], steps


@pytest.mark.parametrize("right", [0.0, 0.6])
def test_sampling_with_guesses_has_the_distribution_of_the_model(right: float) -> None:
    count, runs = 3, 12000
    params = SamplingParams(temperature=0.8, top_p=0.95)
    drawn, steps = Counter[tuple[int, ...]](), 0
    sampler = Sampler(SamplingParams(temperature=0.8, top_p=0.95, seed=11))
    likely = [int(row.argmax()) for row in TABLE]
    guess = [0, likely[0], likely[likely[0]], likely[likely[likely[0]]]]
    strategy = Planted(guess, vocab_size=5, right=right, seed=1)
    for _ in range(runs):
        tokens, taken = _table_tokens(strategy, sampler, count)
        drawn[tuple(tokens)] += 1
        steps += taken
    assert steps < runs * count, "some guesses must be taken for this to test anything"
    rows = [Sampler(params).probabilities(row) for row in TABLE]
    expected = {
        path: runs * math.prod(rows[last][token] for last, token in zip((0, *path), path, strict=False))
        for path in itertools.product(range(5), repeat=count)
    }
    impossible = [path for path, mean in expected.items() if mean == 0]
    assert not any(drawn[path] for path in impossible)
    assert _chi_square_deviation(drawn, expected) < 4


def _chi_square_deviation(drawn: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """Pearson's statistic in standard deviations from its mean (n − 1 and 2(n − 1) for n cells), small cells as one."""
    large = [path for path, mean in expected.items() if mean >= 10]
    cells = [(drawn[path], expected[path]) for path in large]
    rest = sum(drawn.values()) - sum(found for found, _ in cells), sum(expected.values()) - sum(m for _, m in cells)
    cells += [rest] if rest[1] > 0 else []
    freedom = len(cells) - 1
    return (sum((found - mean) ** 2 / mean for found, mean in cells) - freedom) / math.sqrt(2 * freedom)


def test_the_penalty_counts_the_tokens_of_the_path() -> None:
    draft = Draft(token_ids=np.array([0, 1, 3]), parents=[-1, 0, 1])
    logits = np.array([[0.0, 3.0, 0.0, 0.0], [0.0, 2.0, 0.0, 1.5], [9.0, 2.0, 1.9, 3.0]], np.float32)
    # 0 came with the prompt, 1 and 3 on the path: each counts an eighth from then on.
    accepted = accept(draft, logits, Sampler(SamplingParams(repetition_penalty=8.0)), [0])
    assert [token.token_id for token in accepted.tokens] == [1, 3, 2]
    assert accepted.nodes == [0, 1, 2]


def test_of_equal_guesses_the_first_one_is_taken() -> None:
    best = int(TABLE[0].argmax())
    draft = Draft(token_ids=np.array([0, best, best]), parents=[-1, 0, 0])
    assert accept(draft, TABLE[draft.token_ids], Sampler(SamplingParams()), [0]).nodes == [0, 1]


def test_the_logits_of_a_wrong_guess_are_not_looked_at() -> None:
    best = int(TABLE[0].argmax())
    draft = Draft(token_ids=np.array([0, (best + 1) % 5, best]), parents=[-1, 0, 0])
    logits = TABLE[draft.token_ids]
    logits[1] = np.nan
    assert accept(draft, logits, Sampler(SamplingParams()), [0]).tokens[0].token_id == best


def test_a_tree_is_laid_out_as_one_step() -> None:
    draft = Draft(token_ids=np.array([7, 1, 2, 3, 4, 5]), parents=[-1, 0, 0, 1, 3, 2])
    inputs = draft.step_inputs(10)
    sees = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 3, 4], [0, 2, 5]]
    bias = np.full((6, 6), MASKED, np.float32)
    for node, ancestors in enumerate(sees):
        bias[node, ancestors] = 0
    np.testing.assert_array_equal(inputs.new_bias, bias)
    assert inputs.new_bias.dtype == np.float32
    assert inputs.token_ids.tolist() == [7, 1, 2, 3, 4, 5]
    assert inputs.position_ids.tolist() == [10, 11, 11, 12, 13, 12]
    assert inputs.position_ids.dtype == inputs.logit_rows.dtype == np.int64
    assert inputs.logit_rows.tolist() == list(range(6))


def test_a_tree_without_branches_is_a_causal_step() -> None:
    ids = np.array([7, 8, 9], np.int64)
    chain = Draft(token_ids=ids, parents=[-1, 0, 1]).step_inputs(4)
    causal = causal_step(ids, 4, np.arange(3))
    np.testing.assert_array_equal(chain.new_bias, causal.new_bias)
    np.testing.assert_array_equal(chain.position_ids, causal.position_ids)


def test_autoregressive_decoding_guesses_nothing() -> None:
    draft = Autoregressive().propose([3, 1, 4])
    assert draft.token_ids.tolist() == [4]
    assert list(draft.parents) == [-1]
    inputs: npt.NDArray[np.float32] = draft.step_inputs(2).new_bias
    assert inputs.tolist() == [[0]]
