from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from edgekit.errors import EdgeKitError, UsageError
from edgekit.runtime.sampling import SampledToken, Sampler, SamplingParams


def _random_logits(seed: int, size: int, spread: float = 4.0) -> npt.NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal(size) * spread).astype(np.float32)


def _transformers_probabilities(
    params: SamplingParams, logits: npt.NDArray[np.float32], history: list[int]
) -> npt.NDArray[np.float64]:
    """The distribution that `generate` of transformers samples from, with its own order and conditions."""
    processors = LogitsProcessorList()
    if params.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.temperature != 1:
        processors.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k != 0:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        processors.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        processors.append(MinPLogitsWarper(params.min_p))
    scores = processors(torch.LongTensor([history]), torch.from_numpy(logits.astype(np.float64))[None])
    probabilities: npt.NDArray[np.float64] = torch.softmax(scores, dim=-1)[0].numpy()
    return probabilities


OPTIONS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 7},
    {"temperature": 1.0, "top_k": 10_000_000},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "top_p": 0.01},
    {"temperature": 3.0, "top_p": 0.999},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 1.0, "repetition_penalty": 1.3},
    {"temperature": 0.8, "repetition_penalty": 0.7},
    {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.1},
    {"temperature": 1.5, "top_k": 500, "top_p": 0.8, "min_p": 0.001, "repetition_penalty": 1.5},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("size", [50, 5000])
def test_the_distribution_is_that_of_transformers(options: dict[str, Any], size: int) -> None:
    params = SamplingParams(**options)
    for seed in range(20):
        logits = _random_logits(seed, size)
        history = np.random.default_rng(seed).integers(size, size=30).tolist()
        expected = _transformers_probabilities(params, logits, history)
        actual = Sampler(params).probabilities(logits, history)
        np.testing.assert_array_equal(actual > 0, expected > 0)
        np.testing.assert_allclose(actual, expected, rtol=2e-5)


@pytest.mark.parametrize(("spread", "fewest"), [(0.1, 18_000), (2.0, 2_000), (3.5, 100)])
def test_a_nucleus_of_any_width_is_that_of_transformers(spread: float, fewest: int) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.95)
    logits = _random_logits(0, 20_000, spread)
    expected = _transformers_probabilities(params, logits, [0])
    assert np.count_nonzero(expected) > fewest
    actual = Sampler(params).probabilities(logits)
    np.testing.assert_array_equal(actual > 0, expected > 0)
    np.testing.assert_allclose(actual, expected, rtol=2e-5)


def test_a_nucleus_that_has_exactly_the_wanted_probability_takes_no_more_as_in_transformers() -> None:
    params = SamplingParams(temperature=1.0, top_p=0.5)
    logits = np.zeros(4, dtype=np.float32)
    assert np.count_nonzero(_transformers_probabilities(params, logits, [0])) == 2
    assert np.count_nonzero(Sampler(params).probabilities(logits)) == 2


def test_ties_with_the_last_of_the_top_k_are_kept_as_in_transformers() -> None:
    params = SamplingParams(temperature=1.0, top_k=2)
    logits = np.array([1, 3, 2, 2, 0, 2], dtype=np.float32)
    actual = Sampler(params).probabilities(logits)
    np.testing.assert_allclose(actual, _transformers_probabilities(params, logits, [0]), rtol=1e-6)
    assert np.flatnonzero(actual).tolist() == [1, 2, 3, 5]


def test_draws_follow_the_distribution() -> None:
    params = SamplingParams(temperature=0.9, top_p=0.95, seed=7)
    logits, draws = _random_logits(3, 40, spread=1.5), 20_000
    sampler = Sampler(params)
    counts = np.zeros(40)
    for _ in range(draws):
        counts[sampler.sample(logits).token_id] += 1
    expected = sampler.probabilities(logits)
    assert counts[expected == 0].sum() == 0
    deviations = np.abs(counts - draws * expected) / np.sqrt(draws * expected * (1 - expected) + 1e-9)
    assert deviations[expected > 0].max() < 4


def test_the_same_seed_draws_the_same_tokens_and_another_seed_others() -> None:
    logits = _random_logits(0, 1000)

    def tokens(seed: int | None) -> list[int]:
        sampler = Sampler(SamplingParams(temperature=2.0, seed=seed))
        return [sampler.sample(logits).token_id for _ in range(20)]

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)
    assert tokens(None) != tokens(None)


@pytest.mark.parametrize("seed", range(20))
def test_greedy_decoding_takes_the_likeliest_token_after_the_penalty(seed: int) -> None:
    logits, history = _random_logits(seed, 200), list(range(0, 200, 2))
    params = SamplingParams(repetition_penalty=1.4)
    scores = RepetitionPenaltyLogitsProcessor(1.4)(torch.LongTensor([history]), torch.from_numpy(logits)[None])
    assert Sampler(params).sample(logits, history).token_id == int(scores.argmax())
    assert Sampler(SamplingParams()).sample(logits, history).token_id == int(logits.argmax())


def test_greedy_decoding_breaks_ties_by_the_lowest_id() -> None:
    logits = np.array([0, 2, 1, 2, 2], dtype=np.float32)
    sampler = Sampler(SamplingParams())
    assert sampler.sample(logits) == SampledToken(token_id=1)
    np.testing.assert_array_equal(sampler.probabilities(logits), [0, 1, 0, 0, 0])


@pytest.mark.parametrize("convert", [list, tuple, set, np.array])
def test_the_history_may_repeat_and_be_of_any_kind(convert: Callable[[list[int]], Any]) -> None:
    logits = np.array([2.0, 1.5, -1.0, -1.1], dtype=np.float32)
    before = logits.copy()
    sampler = Sampler(SamplingParams(temperature=1.0, repetition_penalty=2.0))
    # The last id is of a token that the model has no logit for.
    actual = sampler.probabilities(logits, convert([0, 0, 2, 0, 9]))
    expected = np.exp([1.0, 1.5, -2.0, -1.1])
    np.testing.assert_allclose(actual, expected / expected.sum(), rtol=1e-6)
    np.testing.assert_array_equal(logits, before)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padding_of_the_vocabulary_is_never_chosen_and_has_no_probability(temperature: float) -> None:
    logits = np.concatenate([_random_logits(0, 100), np.full(28, 50, dtype=np.float32)])
    params = SamplingParams(temperature=temperature, logprobs=20, repetition_penalty=1.1, seed=0)
    padded, exact = Sampler(params, vocab_size=100), Sampler(params)
    assert padded.sample(logits, [120, 3]) == exact.sample(logits[:100], [3])
    probabilities = padded.probabilities(logits, [120, 3])
    assert probabilities.shape == (128,)
    assert probabilities[100:].sum() == 0
    np.testing.assert_array_equal(probabilities[:100], exact.probabilities(logits[:100], [3]))


def test_a_tokenizer_may_know_more_tokens_than_the_model() -> None:
    assert Sampler(SamplingParams(), vocab_size=200).sample(_random_logits(0, 100)).token_id < 100


@pytest.mark.parametrize("options", [{}, {"temperature": 0.5, "top_k": 3, "repetition_penalty": 1.5, "seed": 3}])
def test_log_probabilities_are_those_of_the_model_itself(options: dict[str, Any]) -> None:
    logits = _random_logits(1, 300)
    expected = torch.log_softmax(torch.from_numpy(logits).double(), dim=0)
    token = Sampler(SamplingParams(logprobs=5, **options)).sample(logits, [int(logits.argmax())])
    assert token.logprob == pytest.approx(float(expected[token.token_id]), rel=1e-5)
    values, ids = expected.topk(5)
    assert [token_id for token_id, _ in token.top_logprobs] == ids.tolist()
    assert [logprob for _, logprob in token.top_logprobs] == pytest.approx(values.tolist(), rel=1e-5)


def test_no_alternatives_are_reported_when_only_the_token_is_asked_for() -> None:
    token = Sampler(SamplingParams(logprobs=0)).sample(np.array([0, 0], dtype=np.float32))
    assert token.logprob == pytest.approx(-math.log(2))
    assert token.top_logprobs == ()


def test_alternatives_are_as_many_as_there_are_and_ties_come_by_id() -> None:
    logits = np.array([1, 2, 1, -np.inf, 1], dtype=np.float32)
    token = Sampler(SamplingParams(logprobs=20)).sample(logits)
    assert [token_id for token_id, _ in token.top_logprobs] == [1, 0, 2, 4]
    token = Sampler(SamplingParams(logprobs=2)).sample(logits)
    assert [token_id for token_id, _ in token.top_logprobs] == [1, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("logits", "value"),
    [([0, np.nan, 1], "nan"), ([-np.inf, -np.inf], "-inf"), ([0, np.inf], "inf"), ([-np.inf, np.nan], "nan")],
)
def test_logits_without_a_largest_finite_value_are_refused(logits: list[float], value: str, temperature: float) -> None:
    sampler = Sampler(SamplingParams(temperature=temperature))
    with pytest.raises(EdgeKitError, match=f"largest value is {value}, so no token can be chosen"):
        sampler.sample(np.array(logits, dtype=np.float32))


def test_masked_tokens_are_never_drawn() -> None:
    logits = np.array([0, -np.inf, 0, -np.inf], dtype=np.float32)
    sampler = Sampler(SamplingParams(temperature=1.0, top_k=3, repetition_penalty=1.2, seed=0))
    assert {sampler.sample(logits, [1]).token_id for _ in range(200)} == {0, 2}


@pytest.mark.parametrize("temperature", [5e-324, 1e-30, 1e300])
def test_extreme_temperatures_are_their_limits(temperature: float) -> None:
    logits = np.array([1, 3, 2], dtype=np.float32)
    expected = [1 / 3] * 3 if temperature > 1 else [0, 1, 0]
    actual = Sampler(SamplingParams(temperature=temperature)).probabilities(logits)
    np.testing.assert_allclose(actual, expected)


def test_a_large_vocabulary_draws_the_token_that_the_uniform_number_points_at() -> None:
    logits = _random_logits(5, 150_000, spread=1.0)
    params = SamplingParams(temperature=1.0, seed=11)
    cumulative = np.cumsum(Sampler(params).probabilities(logits))
    uniform = np.random.default_rng(11).random(5)
    sampler = Sampler(params)
    actual = [sampler.sample(logits).token_id for _ in uniform]
    assert actual == np.searchsorted(cumulative, uniform, side="right").tolist()


WRONG: list[tuple[str, Any, str]] = [
    ("max_tokens", 0, "an integer >= 1"),
    ("max_tokens", 1.5, "an integer >= 1"),
    ("max_tokens", True, "an integer >= 1"),
    ("temperature", -0.1, "a finite number >= 0"),
    ("temperature", math.nan, "a finite number >= 0"),
    ("temperature", math.inf, "a finite number >= 0"),
    ("temperature", 10**400, "a finite number >= 0"),
    ("temperature", "hot", "a finite number >= 0"),
    ("temperature", None, "a finite number >= 0"),
    ("top_p", 0, "in (0, 1]"),
    ("top_p", 1.01, "in (0, 1]"),
    ("top_p", math.nan, "in (0, 1]"),
    ("top_p", False, "in (0, 1]"),
    ("top_k", -1, "an integer >= 0"),
    ("top_k", 2.0, "an integer >= 0"),
    ("min_p", -0.1, "in [0, 1]"),
    ("min_p", 1.1, "in [0, 1]"),
    ("repetition_penalty", 0, "in [0.01, 100]"),
    ("repetition_penalty", -1.0, "in [0.01, 100]"),
    ("repetition_penalty", 101.0, "in [0.01, 100]"),
    ("stop", "", "none of them empty"),
    ("stop", ("a", ""), "none of them empty"),
    ("stop", ("a", 3), "a text or a list of texts, none of them empty"),
    ("stop", None, "a text or a list of texts, none of them empty"),
    ("seed", -1, "an integer in [0, 9223372036854775807]"),
    ("seed", 2**63, "an integer in [0, 9223372036854775807]"),
    ("seed", 0.5, "an integer in [0, 9223372036854775807]"),
    ("logprobs", -1, "an integer in [0, 20]"),
    ("logprobs", 21, "an integer in [0, 20]"),
    ("logprobs", True, "an integer in [0, 20]"),
    ("ignore_eos", 1, "true or false"),
]


@pytest.mark.parametrize(("name", "value", "allowed"), WRONG)
def test_a_wrong_value_is_refused_with_what_is_allowed(name: str, value: object, allowed: str) -> None:
    with pytest.raises(UsageError) as error:
        SamplingParams.from_mapping({name: value})
    assert str(error.value).startswith(f"{name} is {value!r}; it must be ")
    assert str(error.value).endswith(allowed)


@pytest.mark.parametrize(
    ("name", "closest"),
    [("max_token", "max_tokens"), ("temprature", "temperature"), ("stops", "stop"), ("top-k", "top_k")],
)
def test_an_unknown_option_is_refused_with_the_closest_known(name: str, closest: str) -> None:
    with pytest.raises(UsageError, match=rf"unknown sampling option '{name}'; known: .*\(did you mean '{closest}'\?\)"):
        SamplingParams.from_mapping({"temperature": 1.0, name: 3})


def test_a_mapping_gives_the_same_parameters_as_keywords() -> None:
    mapping = {"max_tokens": 5, "temperature": 1, "stop": ["a", "b"], "seed": 0, "logprobs": 20, "ignore_eos": True}
    expected = SamplingParams(max_tokens=5, temperature=1, stop=("a", "b"), seed=0, logprobs=20, ignore_eos=True)
    assert SamplingParams.from_mapping(mapping) == expected
    assert SamplingParams.from_mapping({}) == SamplingParams()


def test_a_lone_stop_string_is_one_stop_string() -> None:
    assert SamplingParams.from_mapping({"stop": "END"}).stop == ("END",)


@pytest.mark.parametrize("options", [None, [], "max_tokens"])
def test_options_that_are_no_mapping_are_refused(options: Any) -> None:
    with pytest.raises(UsageError, match="must be a mapping from names to values"):
        SamplingParams.from_mapping(options)
