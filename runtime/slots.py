"""The slot map of a cache group: which slot holds which token, and which are free.

    slot              0      1      2      3      4
    owner             0      1      7      5      −        index of the token in the conversation
    position          0      1      7      5      −        the position that its key is rotated to
    past_bias         0      0      0      0   MASKED      what attention adds to the slot's score
    order          0, 1, 3, 2                              slots from the oldest token to the newest
    free list         4

Attention does not care where an entry of the past lies, since keys carry their rotation. So appending, dropping a
rejected draft, evicting and sliding are changes of this map; no key and no value moves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice

import numpy as np
import numpy.typing as npt

from edgekit.contract import MASKED

SlotArray = npt.NDArray[np.int64]
FREE = -1


class SlotMap:
    """Slots of one group.

    Attributes:
        owners: Index in the conversation of the token that a slot holds, shape (capacity,), int64; `FREE` for none.
            Where the KV heads of a slot hold different tokens, it is the last one that was chosen from.
        positions: Position of its key, shape (capacity,), int64; `FREE` for none.
        past_bias: shape (1, 1, 1, capacity), float32: 0 for live slots, `MASKED` for free ones.
    """

    def __init__(self, capacity: int) -> None:
        """Starts with all slots free."""
        self.owners = np.full(capacity, FREE, np.int64)
        self.positions = np.full(capacity, FREE, np.int64)
        self.past_bias = np.full((1, 1, 1, capacity), MASKED, np.float32)
        self._order: deque[int] = deque()
        self._free = list(range(capacity))[::-1]

    @property
    def capacity(self) -> int:
        """Slots, live and free."""
        return len(self.owners)

    @property
    def live(self) -> int:
        """Slots that hold a token."""
        return len(self._order)

    def order(self) -> SlotArray:
        """Returns the live slots from the oldest token to the newest, shape (live,), int64."""
        return np.fromiter(self._order, np.int64, len(self._order))

    def oldest(self, count: int, *, after: int = 0) -> list[int]:
        """Returns the slots of the `count` oldest tokens but the first `after`."""
        return list(islice(self._order, after, after + count))

    def take(self, count: int, owner: int, position: int) -> SlotArray:
        """Gives free slots to consecutive tokens.

        Args:
            count: Tokens, no more than there are free slots.
            owner: Index of the first in the conversation.
            position: Position of the first.

        Returns:
            Their slots, shape (count,), int64.
        """
        assert 0 <= count <= len(self._free), "the capacity is grown first"
        taken = self._free[len(self._free) - count :][::-1]
        slots = np.array(taken, np.int64)
        self.owners[slots] = np.arange(owner, owner + count)
        self.positions[slots] = np.arange(position, position + count)
        self.past_bias[..., slots] = 0.0
        self._order.extend(taken)
        del self._free[len(self._free) - count :]
        return slots

    def evict(self, slots: Iterable[int]) -> None:
        """Frees slots."""
        gone = set(slots)
        self._keep([slot for slot in self._order if slot not in gone])

    def drop_from(self, owner: int) -> None:
        """Frees the slots of a token and of all after it."""
        kept = [slot for slot in self._order if FREE < self.owners[slot] < owner]
        # Their order may be one that an interruption left half-way; of equal owners, it is theirs.
        self._keep(sorted(kept, key=self.owners.__getitem__))

    def evict_oldest(self, count: int, *, after: int = 0) -> None:
        """Frees the slots of the `count` oldest tokens but the first `after`; costs nothing that grows with the map."""
        gone = self.oldest(count, after=after)
        # The owners say who is there: from here on these are gone, whatever interrupts the rest.
        self.owners[gone] = FREE
        self.positions[gone] = FREE
        self.past_bias[..., gone] = MASKED
        self._order.rotate(-after)
        for _ in gone:
            self._order.popleft()
        self._order.rotate(after)
        self._free.extend(reversed(gone))

    def count_below(self, end: int, *, first: int = 0) -> int:
        """Returns how many slots hold tokens from index `first` up to `end`."""
        return int(np.count_nonzero((self.owners >= first) & (self.owners < end)))

    def holds(self, first: int, end: int) -> bool:
        """Whether every token from index `first` up to `end` has a slot."""
        return end <= first or self.count_below(end, first=first) == end - first

    def resized(self, capacity: int) -> SlotMap:
        """Returns a map of the same tokens in the same slots, all of which are below `capacity`."""
        other = SlotMap(capacity)
        count = min(self.capacity, capacity)
        other.owners[:count], other.positions[:count] = self.owners[:count], self.positions[:count]
        other._keep(list(self._order))
        return other

    def _keep(self, kept: list[int]) -> None:
        """Derives everything anew from the live slots, so that what was interrupted half-way leaves no trace."""
        live = np.zeros(self.capacity, np.bool_)
        live[kept] = True
        self.owners[~live] = self.positions[~live] = FREE
        self.past_bias[0, 0, 0] = np.where(live, np.float32(0), np.float32(MASKED))
        self._order = deque(kept)
        self._free = np.flatnonzero(~live)[::-1].tolist()
