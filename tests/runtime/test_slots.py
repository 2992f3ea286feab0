"""The slot map against a plain list of tokens, oldest first."""

from __future__ import annotations

import sys
from types import FrameType

import numpy as np
import pytest

from edgekit.contract import MASKED
from edgekit.runtime import slots as module
from edgekit.runtime.slots import FREE, SlotMap

Model = list[tuple[int, int, int]]
"""(slot, owner, position)"""


def _check(slots: SlotMap, model: Model) -> None:
    order = [slot for slot, _, _ in model]
    assert slots.order().tolist() == order
    assert slots.live == len(model)
    owners, positions = np.full(slots.capacity, FREE), np.full(slots.capacity, FREE)
    for slot, owner, position in model:
        owners[slot], positions[slot] = owner, position
    np.testing.assert_array_equal(slots.owners, owners)
    np.testing.assert_array_equal(slots.positions, positions)
    bias = np.where(owners == FREE, np.float32(MASKED), np.float32(0))
    np.testing.assert_array_equal(slots.past_bias, bias[None, None, None])
    assert sorted([*slots._free, *order]) == list(range(slots.capacity)), "each slot is free or in use"


def _take(slots: SlotMap, model: Model, count: int, owner: int, shift: int) -> None:
    taken = slots.take(count, owner, owner - shift)
    model += [(int(slot), owner + i, owner + i - shift) for i, slot in enumerate(taken)]


@pytest.mark.parametrize("seed", range(8))
def test_random_operations_do_what_they_do_to_a_list(seed: int) -> None:
    random = np.random.default_rng(seed)
    slots, model, length, shift = SlotMap(16), Model(), 0, 0
    for _ in range(300):
        match random.integers(6):
            case 0 | 1:
                count = int(random.integers(slots.capacity - len(model) + 1))
                _take(slots, model, count, length, shift)
                length += count
            case 2:
                length = int(random.integers(length + 1))
                slots.drop_from(length)
                model = [entry for entry in model if entry[1] < length]
            case 3:
                after = int(random.integers(len(model) + 1))
                count = int(random.integers(len(model) - after + 1))
                assert slots.oldest(count, after=after) == [slot for slot, _, _ in model[after : after + count]]
                slots.evict_oldest(count, after=after)
                del model[after : after + count]
            case 4:
                gone = {slot for slot, _, _ in model if random.random() < 0.2}
                slots.evict(gone)
                model = [entry for entry in model if entry[0] not in gone]
            case _:
                most = max((slot for slot, _, _ in model), default=0)
                slots = slots.resized(int(random.integers(max(8, most + 1), 40)))
        _check(slots, model)
        end = int(random.integers(length + 1))
        first = int(random.integers(end + 1))
        held = [owner for _, owner, _ in model if first <= owner < end]
        assert slots.count_below(end, first=first) == len(held)
        assert slots.holds(first, end) == (len(held) == end - first)


def test_slots_that_were_never_used_are_taken_from_the_first_on() -> None:
    slots = SlotMap(8)
    assert slots.take(3, 0, 0).tolist() == [0, 1, 2]
    assert slots.take(2, 3, 3).tolist() == [3, 4]
    assert slots.take(0, 5, 5).tolist() == []


def test_slots_that_were_evicted_are_the_next_to_be_taken_in_their_order() -> None:
    slots = SlotMap(8)
    slots.take(8, 0, 0)
    slots.evict_oldest(3, after=2)
    assert slots.take(3, 8, 8).tolist() == [2, 3, 4]
    assert slots.order().tolist() == [0, 1, 5, 6, 7, 2, 3, 4]


def test_a_map_of_equal_owners_keeps_its_order() -> None:
    # As after KV heads have chosen: every slot has the last token that was chosen from.
    slots = SlotMap(8)
    slots.take(8, 0, 0)
    slots.evict([1, 6])
    slots.owners[slots.order()] = 20
    slots.take(1, 21, 21)
    before = slots.order().tolist()
    slots.drop_from(21)
    assert slots.order().tolist() == before[:-1]


def test_a_copy_is_its_own() -> None:
    slots = SlotMap(8)
    slots.take(4, 0, 0)
    other = slots.resized(8)
    other.evict_oldest(2)
    assert slots.order().tolist() == [0, 1, 2, 3]
    assert slots.owners[:4].tolist() == [0, 1, 2, 3]


class _Interruption:
    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, frame: FrameType, event: str, _: object) -> _Interruption | None:
        if frame.f_code.co_filename != module.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


@pytest.mark.parametrize("operation", ["take", "evict", "evict_oldest", "drop_from"])
def test_an_interruption_before_any_instruction_leaves_a_map_that_can_be_put_in_order(operation: str) -> None:
    at, left = 1, 0
    while left <= 0:
        slots, model = SlotMap(12), Model()
        _take(slots, model, 8, 0, 0)
        slots.evict([2])  # so that the slots are not in the order of the tokens
        del model[2]
        _take(slots, model, 1, 8, 0)
        interruption, before = _Interruption(at), sys.gettrace()
        try:
            sys.settrace(interruption)
            match operation:
                case "take":
                    slots.take(2, 9, 9)
                case "evict":
                    slots.evict([slot for slot, _, _ in model[3:6]])
                case "evict_oldest":
                    slots.evict_oldest(3, after=3)
                case _:
                    slots.drop_from(3)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        left = interruption.left
        after = {"take": model, "drop_from": model[:2]}.get(operation, [*model[:3], *model[6:]])
        slots.drop_from(9)  # what a conversation does before it goes on
        # All or nothing happened, and the owners say which.
        is_done = len(slots.order()) == len(after)
        _check(slots, after if is_done else model)
        at += 1
    assert at > 30
