from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
import torch

from edgekit import EdgeModelForCausalLM
from edgekit.errors import UnsupportedError, UsageError
from edgekit.integrations.conversations import ConversationCache

TinyModel: TypeAlias = Callable[[str], EdgeModelForCausalLM]
Logits: TypeAlias = npt.NDArray[np.float32]

NEXT = np.array([[7], [8], [9]])


@pytest.fixture
def model(tiny_model: TinyModel) -> EdgeModelForCausalLM:
    return tiny_model("mistral")


@pytest.fixture
def cache(model: EdgeModelForCausalLM) -> ConversationCache:
    return ConversationCache(model.llm)


def _read(cache: ConversationCache, rows: list[list[int]]) -> Logits:
    """Reads columns, 0 being padding, and returns the last one's logits."""
    ids = np.array(rows)
    return cache.read(ids, ids != 0, np.array([ids.shape[1] - 1]))[:, 0]


def _alone(model: EdgeModelForCausalLM, tokens: list[int]) -> Logits:
    logits: Logits = model(input_ids=torch.tensor([tokens])).logits[0, -1].numpy()
    return logits


def _assert_close(got: Logits, expected: Logits) -> None:
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_padding_takes_no_place_in_a_row(cache: ConversationCache, model: EdgeModelForCausalLM) -> None:
    _read(cache, [[0, 0, 5, 6], [3, 4, 5, 6]])
    logits = _read(cache, [[0, 9], [8, 9]])
    _assert_close(logits[0], _alone(model, [5, 6, 9]))
    _assert_close(logits[1], _alone(model, [3, 4, 5, 6, 8, 9]))
    assert (cache.get_seq_length(), cache.batch_size) == (6, 2)
    assert cache.positions(np.array([[False, True], [True, True]])).tolist() == [[2, 3], [6, 7]]


def test_rows_that_go_on_in_two_ways_do_not_disturb_each_other(
    cache: ConversationCache, model: EdgeModelForCausalLM
) -> None:
    _read(cache, [[3, 4, 5], [0, 6, 7], [0, 0, 8]])
    cache.reorder_cache(torch.tensor([1, 1, 0]))
    logits = _read(cache, NEXT.tolist())
    _assert_close(logits[0], _alone(model, [6, 7, 7]))
    _assert_close(logits[1], _alone(model, [6, 7, 8]))
    _assert_close(logits[2], _alone(model, [3, 4, 5, 9]))


def test_equal_prompts_are_read_once_and_then_go_their_own_ways(
    cache: ConversationCache, model: EdgeModelForCausalLM
) -> None:
    same = _read(cache, [[3, 4, 5]] * 3)
    np.testing.assert_array_equal(same[0], same[2])
    logits = _read(cache, NEXT.tolist())
    for row, token in enumerate((7, 8, 9)):
        _assert_close(logits[row], _alone(model, [3, 4, 5, token]))


def test_dropped_columns_leave_no_trace(cache: ConversationCache, model: EdgeModelForCausalLM) -> None:
    _read(cache, [[0, 3, 4, 5], [6, 7, 0, 8]])
    cache.crop(-2)
    assert cache.get_seq_length() == 2
    logits = _read(cache, [[9], [9]])
    _assert_close(logits[0], _alone(model, [3, 9]))
    _assert_close(logits[1], _alone(model, [6, 7, 9]))
    cache.crop(0)
    assert cache.get_seq_length() == 3
    for count in (1, -4):
        with pytest.raises(UsageError, match="give how many to remove, negated"):
            cache.crop(count)


def test_rows_can_be_chosen_and_repeated(cache: ConversationCache, model: EdgeModelForCausalLM) -> None:
    _read(cache, [[3, 4], [5, 6], [7, 8]])
    cache.batch_select_indices(torch.tensor([False, True, True]))
    cache.batch_repeat_interleave(2)
    assert cache.batch_size == 4
    logits = _read(cache, [[9], [10], [11], [12]])
    _assert_close(logits[1], _alone(model, [5, 6, 10]))
    _assert_close(logits[2], _alone(model, [7, 8, 11]))


def test_a_forgotten_cache_takes_another_batch(cache: ConversationCache, model: EdgeModelForCausalLM) -> None:
    _read(cache, [[3, 4], [5, 6]])
    with pytest.raises(UsageError, match="3 rows, but the cache 2"):
        _read(cache, NEXT.tolist())
    with pytest.raises(UsageError, match="3 rows, but the cache 2"):
        model(input_ids=torch.from_numpy(NEXT), past_key_values=cache)
    cache.reset()
    assert (cache.batch_size, cache.is_initialized, cache.get_seq_length()) == (-1, False, 0)
    _assert_close(_read(cache, [[5, 6]])[0], _alone(model, [5, 6]))


def test_the_past_cannot_be_masked_afterwards(model: EdgeModelForCausalLM) -> None:
    cache = model(input_ids=torch.tensor([[3, 4, 5]])).past_key_values
    with pytest.raises(UsageError, match="cannot be masked any more"):
        model(input_ids=torch.tensor([[6]]), attention_mask=torch.tensor([[0, 1, 1, 1]]), past_key_values=cache)
    assert cache.get_seq_length() == 3


def test_a_cache_of_another_model_is_refused(model: EdgeModelForCausalLM, tiny_model: TinyModel) -> None:
    cache = tiny_model("llama")(input_ids=torch.tensor([[3]])).past_key_values
    with pytest.raises(UsageError, match="another EdgeModelForCausalLM"):
        model(input_ids=torch.tensor([[6]]), past_key_values=cache)
    with pytest.raises(UnsupportedError, match="give other models a DynamicCache"):
        cache.update(torch.zeros(1), torch.zeros(1), 0)
