"""What a KV cache holds, in numbers: from them, the slot maps of a cache that was stored are made again.

No map is stored, for which tokens are held follows from how many they are:

    a group that gives slots away      the last tokens
    chosen_from > 0                    what KV heads have chosen from the first tokens, then all others
    sinks > 0                          the first tokens, then the last ones
    otherwise                          all tokens
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
import numpy as np

from edgekit.errors import DoesNotFitError, UnsupportedError
from edgekit.runtime.cache import KVCache, map_with_room
from edgekit.runtime.cache_arrays import CacheArrays, SlotArray, StackArrays

Tokens: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


class CacheSnapshot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which tokens a cache holds.

    Attributes:
        length: Tokens of the conversation, evicted ones included.
        shift: As of `KVCache`.
        chosen_from: As of `KVCache`.
        sinks: First tokens that were kept while others after them were evicted.
        live: Slots in use, by group.
        windowed: Which groups give slots away that no later token sees.
    """

    length: Tokens
    shift: Tokens
    chosen_from: Tokens
    sinks: Tokens
    live: tuple[Tokens, ...]
    windowed: tuple[bool, ...]


def take_snapshot(cache: KVCache) -> CacheSnapshot:
    """Returns what a cache holds, all of it within its length."""
    sinks, groups = 0, range(len(cache.maps))
    if cache.slid_tokens:
        slots = next(cache.maps[index] for index in groups if not cache.is_windowed(index))
        owners = slots.owners[slots.order()]
        sinks = int(np.argmax(owners != np.arange(len(owners))))
    snapshot = CacheSnapshot(
        length=cache.length,
        shift=cache.shift,
        chosen_from=cache.chosen_from,
        sinks=sinks,
        live=tuple(slots.live for slots in cache.maps),
        windowed=tuple(cache.is_windowed(index) for index in groups),
    )
    for index, slots in enumerate(cache.maps):
        owners, positions = _held(snapshot, index)
        order = slots.order()
        assert (slots.owners[order] == owners).all(), "the snapshot says all that there is"
        assert (slots.positions[order] == positions).all(), "the snapshot says all that there is"
    return snapshot


def _held(snapshot: CacheSnapshot, group: int) -> tuple[SlotArray, SlotArray]:
    """Returns index and position of every token that a group holds, from the oldest, shape (live,), int64."""
    length, live = snapshot.length, snapshot.live[group]
    owners = np.arange(length - live, length)
    if snapshot.windowed[group]:
        return owners, owners - snapshot.shift
    if snapshot.chosen_from:
        owners[: live - (length - snapshot.chosen_from)] = snapshot.chosen_from - 1
        return owners, owners - snapshot.shift
    positions = owners - snapshot.shift
    first, evicted = np.arange(snapshot.sinks), length - live
    owners[: snapshot.sinks], positions[: snapshot.sinks] = first, first + evicted - snapshot.shift
    return owners, positions


def contradiction(snapshot: CacheSnapshot, cache: KVCache) -> str:
    """Says why no cache of this layout holds what a snapshot says; nothing when one may."""
    length, groups = snapshot.length, cache.layout.groups
    if not len(snapshot.live) == len(snapshot.windowed) == len(groups):
        return f"it has {len(snapshot.live)} cache groups, the model has {len(groups)}"
    if snapshot.chosen_from > length or snapshot.shift > length - max(snapshot.live) or max(snapshot.live) > length:
        return "it holds more tokens than it has"
    whole = {live for live, windowed in zip(snapshot.live, snapshot.windowed, strict=True) if not windowed}
    for group, live, windowed in zip(groups, snapshot.live, snapshot.windowed, strict=True):
        if windowed and (group.sliding_window is None or live < min(length, group.sliding_window - 1)):
            return "it lacks tokens of a sliding window"
    if snapshot.chosen_from:
        older = [live - (length - snapshot.chosen_from) for live in whole]
        return (
            "" if min(older, default=1) > 0 and not snapshot.sinks and not snapshot.shift else "its slots do not add up"
        )
    evicted = length - min(whole, default=length)
    is_right = len(whole) <= 1 and (evicted > 0) == (snapshot.sinks > 0) and snapshot.sinks <= length - evicted
    return "" if is_right and (not whole or snapshot.shift <= evicted) else "its slots do not add up"


def check_fits(snapshot: CacheSnapshot, cache: KVCache) -> None:
    """Refuses what is more than a cache may hold.

    Raises:
        DoesNotFitError: There are too few slots, or too few positions.
        UnsupportedError: A layer's sliding window was wider than the context then, and is not now, or the reverse.
    """
    for index, live in enumerate(snapshot.live):
        windowed = cache.is_windowed(index)
        if windowed != snapshot.windowed[index] and live < snapshot.length:
            raise UnsupportedError(
                "the conversation was saved with another context size, by which its layers with a sliding window keep "
                "other tokens; load the model with the context size of then"
            )
        if not windowed and live > cache.limits[index]:
            raise DoesNotFitError(
                f"the conversation holds {live} tokens, the KV cache has room for {cache.limits[index]}; use a larger "
                "context size or memory budget"
            )
    if cache.max_positions is not None and snapshot.length - snapshot.shift > cache.max_positions:
        raise DoesNotFitError(
            f"the conversation has {snapshot.length - snapshot.shift} tokens, the context {cache.max_positions}; use a "
            "larger context size"
        )


def empty_cache(snapshot: CacheSnapshot, like: KVCache) -> KVCache:
    """Returns a cache whose first slots, from the oldest token to the newest, wait for their keys and values.

    Args:
        snapshot: What it is to hold; without a `contradiction`, and such that it fits.
        like: Whose limits it has.
    """
    maps = []
    for index, live in enumerate(snapshot.live):
        slots = map_with_room(like.layout, live, like.limits[index])
        slots.take(live, 0, 0)
        slots.owners[:live], slots.positions[:live] = _held(snapshot, index)
        maps.append(slots)
    layout = like.layout
    stacks = tuple(StackArrays.empty(stack, layout.dtype, maps[stack.group].capacity) for stack in layout.stacks)
    cache = KVCache(layout, like.max_tokens, like.max_positions)
    cache.take_over(
        CacheArrays(maps=tuple(maps), stacks=stacks),
        length=snapshot.length,
        shift=snapshot.shift,
        chosen_from=snapshot.chosen_from,
    )
    return cache
