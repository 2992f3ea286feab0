"""A conversation on disk: one file in the safetensors format (`edgekit.runtime.tensor_file`).

    token_ids                [n]                     int64     the conversation, evicted tokens included
    stack{s}.keys            [layers, KV, dk, live]  cache     as in `edgekit.runtime.cache_arrays`, the slots in use
    stack{s}.values          [layers, KV, live, dv]  cache     only, from the oldest token to the newest
    stack{s}.key_scales      [layers, KV, 1, live]   float32   of an int8 cache
    stack{s}.value_scales    [layers, KV, 1, live]   float32
    policy.stack{s}          [layers, KV, dk, n]     float32   what the policy remembers: `CachePolicy.state`

`SessionRecord`, as JSON, is the metadata "edgekit_session". It has no slot maps: `edgekit.runtime.cache_snapshot`
makes them again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from edgekit.cache_layout import CacheLayout, KVCacheDtype
from edgekit.errors import CorruptArtifactError, UnsupportedError, UsageError
from edgekit.runtime.cache import KVCache
from edgekit.runtime.cache_arrays import CacheArray, FloatArray, Part, StackArrays
from edgekit.runtime.cache_snapshot import CacheSnapshot, check_fits, contradiction, empty_cache, take_snapshot
from edgekit.runtime.chat import Message
from edgekit.runtime.policies.base import CachePolicy
from edgekit.runtime.tensor_file import Source, TensorFile, open_tensors, write_tensors
from edgekit.version import __version__

SCHEMA_VERSION = 1
RECORD = "edgekit_session"
TOKEN_IDS = "token_ids"
_TYPES: Mapping[KVCacheDtype, str] = {"fp32": "F32", "fp16": "F16", "int8": "I8"}


class SessionRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a stored conversation is, besides its arrays.

    Attributes:
        schema_version: Version of this format.
        producer: Name and version of the program that wrote it.
        bundle: Digest of the bundle that made its keys and values.
        layout: Layout of the cache, its dtype included.
        policy: Name of its KV policy.
        rope_range: `DecoderSpec.rope_range` of the text that its keys were rotated for.
        cache: Which tokens are held.
        messages: The chat that the tokens are of, if there is one.
    """

    schema_version: Annotated[int, msgspec.Meta(ge=1)]
    producer: str
    bundle: str
    layout: CacheLayout
    policy: str
    rope_range: Annotated[int, msgspec.Meta(ge=0)]
    cache: CacheSnapshot
    messages: tuple[dict[str, str], ...]


class _SchemaVersion(msgspec.Struct):
    schema_version: Annotated[int, msgspec.Meta(ge=1)]


@dataclass(frozen=True, kw_only=True)
class SessionState:
    """A conversation, with arrays that are its own.

    Attributes:
        token_ids: The conversation, as many as the cache has, evicted ones included.
        rope_range: As of `SessionRecord`.
        cache: Its keys and values.
        remembered: As of `CachePolicy.state`.
        messages: As of `SessionRecord`.
    """

    token_ids: Sequence[int]
    rope_range: int
    cache: KVCache
    remembered: Mapping[int, FloatArray]
    messages: Sequence[Message]


def write_state(path: Path, bundle_digest: str, policy: str, state: SessionState) -> None:
    """Writes a conversation, whole or not at all.

    Args:
        path: Where to; an existing file is replaced.
        bundle_digest: Identity of the bundle.
        policy: Name of the KV policy.
        state: The conversation.

    Raises:
        StorageError: The disk refused the write.
    """
    cache = state.cache
    record = SessionRecord(
        schema_version=SCHEMA_VERSION,
        producer=f"edgekit {__version__}",
        bundle=bundle_digest,
        layout=cache.layout,
        policy=policy,
        rope_range=state.rope_range,
        cache=take_snapshot(cache),
        messages=tuple(dict(message) for message in state.messages),
    )
    token_ids = np.array(state.token_ids, np.int64)
    sources = {TOKEN_IDS: Source(dtype="I64", shape=token_ids.shape, pieces=lambda: [token_ids])}
    for index, arrays in enumerate(cache.stacks):
        live = cache.maps[arrays.stack.group].live
        for name, part in _parts(index, arrays):
            sources[name] = _live_slots(cache, arrays, part, live)
    for index, keys in state.remembered.items():
        sources[_remembered(index)] = Source(dtype="F32", shape=keys.shape, pieces=partial(iter, [keys]))
    write_tensors(path, sources, {RECORD: msgspec.json.encode(record).decode()})


def _parts(stack: int, arrays: StackArrays) -> Iterator[tuple[str, Part]]:
    """Yields each array of a stack with its name."""
    names = ("keys", "values", "key_scales", "value_scales")
    for name, part in zip(names, arrays.parts(), strict=False):
        yield f"stack{stack}.{name}", part


def _remembered(stack: int) -> str:
    return f"policy.stack{stack}"


def _live_slots(cache: KVCache, arrays: StackArrays, part: Part, live: int) -> Source:
    """An array of a stack without the slots that are free, from the oldest token to the newest."""

    def pieces() -> Iterable[CacheArray]:
        order = cache.maps[arrays.stack.group].order()
        return (part.layer(index).read(order) for index in range(len(arrays.stack.layers)))

    dtype = _TYPES[cache.layout.dtype] if part.array.dtype == arrays.keys.dtype else "F32"
    return Source(dtype=dtype, shape=part.shape(live), pieces=pieces)


def read_state(path: Path, bundle_digest: str, policy: CachePolicy, like: KVCache) -> SessionState:
    """Reads a conversation and checks everything about it.

    Args:
        path: The file.
        bundle_digest: Identity of the bundle that is to go on with it.
        policy: The KV policy that is.
        like: A cache with the layout and the limits of the one that is wanted.

    Raises:
        UsageError: There is no such file, or it was saved with another bundle.
        UnsupportedError: A newer EdgeKit wrote it, or it was saved with another KV cache dtype, other layer budgets or
            another KV policy.
        DoesNotFitError: It holds more tokens than there is room for.
        CorruptArtifactError: It is truncated, changed or malformed.
    """
    with open_tensors(path) as opened:
        file = TensorFile(path, opened)
        record = _read_record(path, file)
        if record.bundle != bundle_digest:
            raise UsageError(
                f"{str(path)!r} was saved with bundle {record.bundle[:12]}…, this is bundle {bundle_digest[:12]}…; a "
                "conversation goes on with the bundle that it was saved with"
            )
        _check_kind(path, record, policy, like)
        if problem := contradiction(record.cache, like) or _unlike_policy(record, policy):
            raise file.corrupt(problem)
        check_fits(record.cache, like)
        _check_arrays(file, record, policy, like)
        file.verify()
        return _read_arrays(file, record, policy, like)


def _read_record(path: Path, file: TensorFile) -> SessionRecord:
    if RECORD not in file.metadata:
        raise CorruptArtifactError(f"{str(path)!r} is not a saved conversation (no {RECORD!r} in its metadata)")
    try:
        version = msgspec.json.decode(file.metadata[RECORD], type=_SchemaVersion).schema_version
        if version > SCHEMA_VERSION:
            raise UnsupportedError(
                f"{str(path)!r} has schema_version {version}, this EdgeKit reads up to {SCHEMA_VERSION}; upgrade with: "
                "pip install -U edgekit"
            )
        return msgspec.json.decode(file.metadata[RECORD], type=SessionRecord)
    except msgspec.DecodeError as error:
        raise file.corrupt(str(error)) from error


def _check_kind(path: Path, record: SessionRecord, policy: CachePolicy, like: KVCache) -> None:
    """Refuses a conversation that was kept in another way."""
    for what, saved, wanted in (
        ("KV cache dtype", record.layout.dtype, like.layout.dtype),
        ("KV policy", record.policy, policy.options.name),
    ):
        if saved != wanted:
            raise UnsupportedError(
                f"{str(path)!r} was saved with the {what} {saved!r}, this conversation has {wanted!r}; load the model "
                f"with {saved!r}"
            )
    if record.layout != like.layout:
        raise UnsupportedError(
            f"{str(path)!r} was saved with other budgets of layers; load the model with the cache profile of then"
        )


def _unlike_policy(record: SessionRecord, policy: CachePolicy) -> str:
    """Says why a policy cannot have made what a record says; nothing when it can have."""
    cache = record.cache
    if cache.chosen_from and not policy.needs_attention_mass:
        return f"KV heads have chosen tokens, which they do not with the KV policy {record.policy!r}"
    if (cache.shift and not policy.makes_room) or cache.sinks not in (0, policy.sink_tokens):
        return f"tokens were evicted as they are not with the KV policy {record.policy!r}"
    return ""


def _check_arrays(file: TensorFile, record: SessionRecord, policy: CachePolicy, like: KVCache) -> None:
    """Refuses arrays of which one is missing, too many or not as the record says."""
    snapshot, expected = record.cache, {TOKEN_IDS}
    file.check(TOKEN_IDS, "I64", (snapshot.length,))
    if record.rope_range > policy.spec.rope_range(policy.spec.max_positions):
        raise file.corrupt(f"the model has no range of lengths {record.rope_range}")
    for index, arrays in enumerate(like.stacks):
        live = snapshot.live[arrays.stack.group]
        for name, part in _parts(index, arrays):
            source = _live_slots(like, arrays, part, live)
            file.check(name, source.dtype, source.shape)
            expected.add(name)
        if snapshot.sinks and not snapshot.windowed[arrays.stack.group]:
            file.check(_remembered(index), "F32", next(arrays.parts()).shape(snapshot.sinks))
            expected.add(_remembered(index))
    if file.names != expected:
        raise file.corrupt(f"it has {sorted(file.names - expected)[0]!r}, which no conversation has")


def _read_arrays(file: TensorFile, record: SessionRecord, policy: CachePolicy, like: KVCache) -> SessionState:
    token_ids = file.read(TOKEN_IDS)
    if len(token_ids) and not 0 <= token_ids.min() <= token_ids.max() < policy.spec.vocab_size:
        raise file.corrupt(f"it has token ids that are not in the model's vocabulary of {policy.spec.vocab_size}")
    cache = empty_cache(record.cache, like)
    for index, arrays in enumerate(cache.stacks):
        live = cache.maps[arrays.stack.group].live
        for name, part in _parts(index, arrays):
            for layer, stored in enumerate(file.read_rows(name)):
                part.layer(layer).write(slice(live), stored[None])
    remembered = {
        index: file.read(_remembered(index)) for index in range(len(like.stacks)) if _remembered(index) in file.names
    }
    return SessionState(
        token_ids=token_ids.tolist(),
        rope_range=record.rope_range,
        cache=cache,
        remembered=remembered,
        messages=record.messages,
    )
