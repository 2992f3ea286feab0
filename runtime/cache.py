"""The KV cache of one conversation: arrays that the graph only reads, and the slot maps that say what is in them.

Every cache group has a slot map (`edgekit.runtime.slots`) and every stack of layers its arrays
(`edgekit.runtime.cache_arrays`). Appending, dropping a rejected draft, evicting and sliding change the maps. Data moves
when a capacity changes, and when KV heads keep different tokens.

A group with a sliding window holds little more than a window: what no later token sees gives its slot away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from edgekit.cache_layout import CacheLayout
from edgekit.contract import window_bias
from edgekit.errors import DoesNotFitError
from edgekit.runtime.cache_arrays import CacheArrays, SlotArray, StackArrays, as_slice
from edgekit.runtime.slots import SlotMap

BUCKET_TOKENS = 128
# What a group with a window keeps beyond it: a draft that is rejected, and the end of an answer that a chat template
# writes otherwise, can be dropped without reading the conversation again.
ROLLBACK_TOKENS = 64
# Arrays from this size on are not held twice while they are moved.
LARGE_BYTES = 4 << 20


class KVCache:
    """Cache of one conversation.

    An operation that is interrupted, be it by a signal between two instructions, loses no token that was there, or,
    when it moves large arrays, all of them and never some: `truncate` to a length that is `reusable` brings everything
    back in line.

    Attributes:
        layout: Groups, stacks and dtype.
        max_tokens: Slots that a group without a sliding window may have.
        max_positions: Positions that tokens may have; None for no limit.
        limits: Slots that each group may have.
        arrays: Replaced as a whole when a capacity changes.
        shift: By how much the positions of the newest tokens are less than their indices: see `lower_positions`.
        chosen_from: How many of the first tokens KV heads have chosen from: see `selected`.
    """

    def __init__(self, layout: CacheLayout, max_tokens: int, max_positions: int | None = None) -> None:
        """Starts empty, with one bucket of slots per group.

        Args:
            layout: Groups, stacks and dtype.
            max_tokens: Slots that a group without a sliding window may have: the context, or what fits.
            max_positions: Positions that tokens may have; None for no limit but that of the slots.
        """
        self.layout = layout
        self.max_tokens = max_tokens
        self.max_positions = max_positions
        self.limits = [slot_limit(group.sliding_window, max_tokens) for group in layout.groups]
        self._start()

    def _start(self) -> None:
        maps = tuple(SlotMap(self.layout.rounded(min(BUCKET_TOKENS, limit))) for limit in self.limits)
        self.arrays = CacheArrays(maps=maps, stacks=self._empty_stacks(maps))
        self._length = 0
        self.shift = 0
        self.chosen_from = 0

    def _empty_stacks(self, maps: Sequence[SlotMap]) -> tuple[StackArrays, ...]:
        return tuple(
            StackArrays.empty(stack, self.layout.dtype, maps[stack.group].capacity) for stack in self.layout.stacks
        )

    @property
    def maps(self) -> tuple[SlotMap, ...]:
        """Slot map of every group."""
        return self.arrays.maps

    @property
    def stacks(self) -> tuple[StackArrays, ...]:
        """Keys and values of every stack."""
        return self.arrays.stacks

    @property
    def capacity(self) -> int:
        """Slots of the largest group."""
        return max(slots.capacity for slots in self.maps)

    @property
    def length(self) -> int:
        """Tokens of the conversation so far, evicted ones included."""
        return self._length

    @property
    def next_position(self) -> int:
        """Position of the next token."""
        return self._length - self.shift

    @property
    def live(self) -> int:
        """Most tokens that a group holds."""
        return max(slots.live for slots in self.maps)

    @property
    def slid_tokens(self) -> int:
        """Tokens that `slide` has evicted."""
        if self.chosen_from:
            return 0
        # Counted, and not remembered: it is right however an eviction was interrupted.
        return self._length - min(
            (slots.count_below(self._length) for _, slots, _ in self._unwindowed()), default=self._length
        )

    @property
    def room(self) -> int:
        """Tokens that can be appended before something has to be evicted; all when nothing ever has to be."""
        rooms = [limit - slots.live for _, slots, limit in self._unwindowed()]
        if self.max_positions is not None:
            rooms.append(self.max_positions - self.next_position)
        return min(rooms, default=self.max_tokens)

    def held(self, length: int) -> int:
        """Returns the most slots that a group without a sliding window has in use for the first `length` tokens."""
        return max((slots.count_below(length) for _, slots, _ in self._unwindowed()), default=0)

    @property
    def size_bytes(self) -> int:
        """Bytes of the keys and values."""
        return sum(stack.size_bytes for stack in self.stacks)

    def is_windowed(self, group: int) -> bool:
        """Whether a group gives slots away that no later token sees.

        One whose sliding window is wider than all of its slots is kept as a group without a window is.
        """
        window = self.layout.groups[group].sliding_window
        return window is not None and window <= self.limits[group]

    def _unwindowed(self) -> Iterator[tuple[int, SlotMap, int]]:
        """Yields index, map and most slots of the groups that keep what no one else evicts."""
        for index, slots in enumerate(self.maps):
            if not self.is_windowed(index):
                yield index, slots, self.limits[index]

    def window_bias(self, group: int, position_ids: SlotArray) -> npt.NDArray[np.float32]:
        """Computes what new tokens of layers with a sliding window add to their scores over the past.

        Args:
            group: Index of their group.
            position_ids: Positions of the new tokens, shape (S,), int64.

        Returns:
            shape (S, capacity), float32.
        """
        window = self.layout.groups[group].sliding_window
        assert window is not None
        return window_bias(position_ids, self.maps[group].positions, window)

    def check_room(self, tokens: int) -> None:
        """Refuses more tokens than there is room for.

        Raises:
            DoesNotFitError: They are more than the context, or than the slots that fit into memory.
        """
        room, positions = self.room, self.max_positions
        if tokens <= room:
            return
        if positions is not None and positions - self.next_position == room:
            raise DoesNotFitError(
                f"{self.next_position + tokens} tokens are more than the context of {positions}; shorten the prompt or "
                "start a new conversation"
            )
        raise DoesNotFitError(
            f"{self.max_tokens - room + tokens} tokens are more than the {self.max_tokens} that the KV cache has room "
            "for; shorten the prompt, start a new conversation, or give it more memory or a smaller dtype"
        )

    def reserve(self, tokens: int, *, following: int = 0) -> None:
        """Makes room for this many more tokens.

        The cost of a step follows the capacity, so a prompt does not get all of its slots at once. Growing by a share
        keeps the copying a constant share of the work; an empty cache has nothing to copy, and grows as soon as it may.

        Args:
            tokens: What is needed now.
            following: What will be needed after that, as far as it is known, such as the rest of a prompt.

        Raises:
            DoesNotFitError: There is no room for `tokens`.
        """
        self.check_room(tokens)
        capacities = [
            self.layout.rounded(_grown(slots, limit, tokens, following))
            for slots, limit in zip(self.maps, self.limits, strict=True)
        ]
        if any(capacity > slots.capacity for capacity, slots in zip(capacities, self.maps, strict=True)):
            self._resize(capacities)

    def append(self, new: Sequence[StackArrays], rows: Sequence[int]) -> None:
        """Keeps rows of a step's new keys and values, in this order.

        Args:
            new: The step's results, one per stack, with the new tokens on the token axis.
            rows: Indices of the new tokens to keep.

        Raises:
            DoesNotFitError: There is no room for them.
        """
        self.reserve(len(rows))
        chosen, end = np.asarray(rows, np.int64), self._length + len(rows)
        for index, slots in enumerate(self.maps):
            kept = chosen[max(0, len(chosen) - self._make_room(index, len(rows))) :]
            first = end - len(kept)
            target = as_slice(slots.take(len(kept), first, first - self.shift))
            source = as_slice(kept)
            for arrays, fresh in zip(self.stacks, new, strict=True):
                if arrays.stack.group == index:
                    arrays.write(target, fresh, source)
        self._length = end

    def _make_room(self, group: int, tokens: int) -> int:
        """Evicts what no later token of a window sees; returns how many of the new tokens the group holds."""
        if not self.is_windowed(group):
            return tokens
        slots = self.maps[group]
        held = min(tokens, slots.capacity)
        slots.evict_oldest(max(0, slots.live + held - slots.capacity))
        return held

    def reusable(self, length: int) -> bool:
        """Whether a conversation can go on from its first `length` tokens, all others dropped.

        What was evicted in between may be missed: tokens within a layer's sliding window, or those that KV heads have
        chosen from. After sliding, half of what is held must remain.
        """
        if length == 0:
            return True
        if length > self._length or length < self.chosen_from:
            return False
        if not self.chosen_from and self.slid_tokens:
            maps = [slots for _, slots, _ in self._unwindowed()]
            if len({slots.count_below(self._length) for slots in maps}) > 1:
                return False  # sliding was interrupted between them
            if 2 * (self._length - length) > self.live or not maps[0].holds(length, self._length):
                return False
        # Of a window, the tokens that the token at index `length` sees of its past.
        return all(
            not self.is_windowed(index) or slots.holds(max(0, length - (group.sliding_window or 0) + 1), length)
            for index, (group, slots) in enumerate(zip(self.layout.groups, self.maps, strict=True))
        )

    def truncate(self, length: int) -> None:
        """Forgets all tokens but the first `length`; of much room that is left, most is given back.

        Args:
            length: One that is `reusable`.
        """
        if length == 0 and self._length == 0 and self.live == 0 and not self.shift:
            return
        if length == 0 and (self.shift or self.chosen_from or self.slid_tokens):
            self._start()
            return
        self._length = min(length, self._length)
        for slots in self.maps:
            slots.drop_from(self._length)
        capacities = [self.layout.rounded(_shrunk(slots)) for slots in self.maps]
        if any(capacity < slots.capacity for capacity, slots in zip(capacities, self.maps, strict=True)):
            self._resize(capacities)

    def slide(self, tokens: int, *, sinks: int) -> None:
        """Evicts the oldest tokens but the first `sinks` from all groups without a sliding window.

        The keys of the sinks are the caller's to turn: from now on they have the positions right before the rest.
        """
        for _, slots, _ in self._unwindowed():
            slots.evict_oldest(tokens, after=sinks)
        self.place(sinks)

    def place(self, sinks: int) -> None:
        """Gives the first tokens the positions right before those that sliding has left."""
        forward = self.slid_tokens - self.shift
        for _, slots, _ in self._unwindowed():
            first = slots.oldest(sinks)
            slots.positions[first] = slots.owners[first] + forward

    def lower_positions(self, by: int, turn: Callable[[StackArrays], None]) -> None:
        """Gives all tokens positions that are lower by as many; `turn` rotates the keys of a stack accordingly."""
        length, self._length = self._length, 0  # an interruption leaves nothing that is half turned
        for arrays in self.stacks:
            turn(arrays)
        for slots in self.maps:
            slots.positions[slots.order()] -= by
        self.shift += by
        self._length = length

    def selected(self, slots: Sequence[SlotArray | None], *, give_back: bool = False) -> KVCache:
        """Returns a cache with some tokens of each KV head, for the same conversation to go on with.

        Args:
            slots: For each stack the slots to keep, shape (layers, KV, n), int64, n being that of its group; None for
                all, as they are.
            give_back: Whether the memory of this cache goes meanwhile: it has no tokens then.
        """
        other = KVCache(self.layout, self.max_tokens, self.max_positions)
        length, position = self._length, self.next_position
        if give_back:
            self._length = 0  # an interruption leaves nothing that is half there
        maps = list(self.maps)
        for stack, chosen in zip(self.layout.stacks, slots, strict=True):
            if chosen is None:
                maps[stack.group] = self.maps[stack.group].resized(self.maps[stack.group].capacity)
                continue
            kept = map_with_room(self.layout, chosen.shape[2], self.limits[stack.group])
            taken = kept.take(chosen.shape[2], 0, 0)
            kept.owners[taken], kept.positions[taken] = length - 1, position - 1
            maps[stack.group] = kept
        stacks = tuple(
            arrays.select(chosen, maps[arrays.stack.group].capacity, give_back=give_back)
            for arrays, chosen in zip(self.stacks, slots, strict=True)
        )
        other.take_over(
            CacheArrays(maps=tuple(maps), stacks=stacks), length=length, shift=length - position, chosen_from=length
        )
        return other

    def become(self, other: KVCache) -> None:
        """Takes over what another cache of the same layout holds."""
        self.take_over(other.arrays, length=other._length, shift=other.shift, chosen_from=other.chosen_from)

    def take_over(self, arrays: CacheArrays, *, length: int, shift: int, chosen_from: int) -> None:
        """Goes on with another conversation's arrays; `chosen_from` and `shift` are as the properties."""
        self._length = 0  # an interruption leaves nothing that is half of each
        self.arrays, self.shift, self.chosen_from = arrays, shift, chosen_from
        self._length = length

    def _resize(self, capacities: Sequence[int]) -> None:
        """Moves everything to arrays of other capacities, which hold all live slots."""
        length, is_large = self._length, self.size_bytes >= LARGE_BYTES
        if is_large:
            self._length = 0  # until all is moved, for an interruption to leave nothing that is half there
        maps = tuple(
            slots if slots.capacity == capacity else slots.resized(capacity)
            for slots, capacity in zip(self.maps, capacities, strict=True)
        )
        moved = []
        for arrays in self.stacks:
            capacity, held = capacities[arrays.stack.group], self.maps[arrays.stack.group].capacity
            if capacity == held:
                moved.append(arrays)
                continue
            fresh = StackArrays.empty(arrays.stack, self.layout.dtype, capacity)
            arrays.move(fresh, min(capacity, held), give_back=is_large)
            moved.append(fresh)
        # In one assignment, for no interruption to leave arrays of two capacities.
        self.arrays = CacheArrays(maps=maps, stacks=tuple(moved))
        self._length = length


def slot_limit(sliding_window: int | None, max_tokens: int) -> int:
    """Returns the most slots that a group has, when `max_tokens` are those of a group without a sliding window."""
    return max_tokens if sliding_window is None else min(max_tokens, _buckets(sliding_window + ROLLBACK_TOKENS))


def _grown(slots: SlotMap, limit: int, tokens: int, following: int) -> int:
    """Returns the capacity of a group that is to hold more tokens."""
    wanted, held = min(slots.live + tokens, limit), slots.capacity
    total = min(wanted + following, limit)
    if total <= held or (wanted <= held and slots.live > 0):
        return held
    ahead = held + held // 8
    if following:
        ahead = total if total <= 2 * held else held + held // 2
    return min(_buckets(max(wanted, ahead)), limit)


def _shrunk(slots: SlotMap) -> int:
    """Returns the capacity of a group of which little may be in use."""
    smaller = _buckets(max(int(slots.order().max(initial=-1)) + 1, 1))
    return smaller if slots.capacity >= 8 * BUCKET_TOKENS and smaller <= slots.capacity // 2 else slots.capacity


def map_with_room(layout: CacheLayout, count: int, limit: int) -> SlotMap:
    """Returns an empty map with room for `count` slots and for what follows them."""
    return SlotMap(layout.rounded(min(_buckets(count + ROLLBACK_TOKENS), max(count, limit))))


def _buckets(tokens: int) -> int:
    return -(-tokens // BUCKET_TOKENS) * BUCKET_TOKENS
