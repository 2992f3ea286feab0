"""A conversation that was saved goes on as the one that was not."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from edgekit.cache_layout import KVCacheDtype, cache_layout
from edgekit.errors import CorruptArtifactError, DoesNotFitError, StorageError, UnsupportedError, UsageError
from edgekit.runtime import cache, cache_snapshot, session_state, tensor_file
from edgekit.runtime import session as session_module
from edgekit.runtime.backends.onnxruntime_cpu import OnnxRuntimeCpu
from edgekit.runtime.llm import LLM
from edgekit.runtime.lowered import lowered_graph
from edgekit.runtime.policies import PolicyOptions, window
from edgekit.runtime.session import Session
from tests.runtime.conftest import Watched
from tests.runtime.interruption import Interruption
from tests.runtime.policies.reference import generate, prompt_of, start, take

DIGEST = "0123456789abcdef" * 4
BUDGETS = {"stop": None, "window": 40, "snapkv": 40, "laq": 40, "laq++": 40}


def _start(backend: Any, policy: str = "stop", digest: str | None = DIGEST, **limits: int) -> Session:
    options = PolicyOptions(name=policy, budget_tokens=BUDGETS[policy])
    return start(backend, options, digest=digest, **limits)


def _check_goes_on(saved: Session, backend: Any, path: Path, text: list[int], policy: str) -> None:
    """Saves a conversation and compares how it goes on, here and where it is loaded."""
    saved.save(path)
    watched = Watched(backend)
    loaded = _start(watched, policy)
    assert loaded.load(path) == ()
    assert loaded.token_ids == saved.token_ids
    held, other = saved._cache, loaded._cache
    assert (held.length, held.next_position, held.live) == (other.length, other.next_position, other.live)
    for one, two in zip(held.stacks, other.stacks, strict=True):
        order = held.maps[one.stack.group].order()
        for part, copy in zip(one.parts(), two.parts(), strict=True):
            np.testing.assert_array_equal(part.read(order), copy.read(slice(len(order))))
    following = [*text, *prompt_of(9, seed=5)]
    shared = saved.shared_prefix(following)
    assert loaded.shared_prefix(following) == shared == len(saved.token_ids)
    assert take(loaded, following, 40) == take(saved, following, 40)
    read = [token for step in watched.steps for token in step.token_ids.tolist() if len(step.token_ids) > 1]
    assert read[: len(following) - shared] == following[shared:], "only what is new is read"


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("policy", BUDGETS)
def test_a_loaded_conversation_goes_on_token_for_token(
    policy: str, dtype: KVCacheDtype, scoring_backend: Any, tmp_path: Path
) -> None:
    backend, text = scoring_backend("llama", dtype), prompt_of(90)
    conversation = _start(backend, policy)
    text += take(conversation, text, 20)
    _check_goes_on(conversation, backend, tmp_path / "state", text, policy)


@pytest.mark.parametrize(
    ("variant", "policy"),
    [
        *itertools.product(["gemma3"], BUDGETS),  # layers with a sliding window beside others
        ("mistral", "stop"),  # and no others
        ("mistral", "window"),
        ("phi3_longrope_short", "stop"),  # rotations that depend on the length of the text
        ("phi3_longrope_short", "laq++"),
    ],
)
def test_it_does_with_every_kind_of_layer(variant: str, policy: str, scoring_backend: Any, tmp_path: Path) -> None:
    backend, text = scoring_backend(variant), prompt_of(70)
    conversation = _start(backend, policy)
    text += take(conversation, text, 20)
    _check_goes_on(conversation, backend, tmp_path / "state", text, policy)


def test_it_does_after_all_positions_were_turned_back(
    tiny_backend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window, "MAX_POSITION", 90)
    backend, text = tiny_backend("gemma3"), prompt_of(70)
    conversation = _start(backend, "window")
    text += take(conversation, text, 60)
    assert conversation._cache.shift > 0
    _check_goes_on(conversation, backend, tmp_path / "state", text, "window")


def test_it_does_with_budgets_of_layers(scoring_bundle: Any, tmp_path: Path) -> None:
    bundle, text = scoring_bundle("llama"), prompt_of(90)
    sessions, backends = [], []
    for budgets in ((40, 60), (60, 40), (40, 40)):
        layout = cache_layout(bundle.manifest.spec, "fp32", budgets)
        backend = OnnxRuntimeCpu(lowered_graph(bundle, layout), bundle.manifest.spec, 1, layout)
        sessions.append(start(backend, PolicyOptions(name="snapkv", layer_budgets_tokens=budgets), digest=DIGEST))
        backends.append(backend)
    text += take(sessions[0], text, 10)
    sessions[0].save(tmp_path / "state")
    sessions[1].load(tmp_path / "state")
    assert [slots.live for slots in sessions[1]._cache.maps] == [49, 69]
    with pytest.raises(UnsupportedError, match="was saved with other budgets of layers"):
        sessions[2].load(tmp_path / "state")
    other = start(backends[0], PolicyOptions(name="snapkv", layer_budgets_tokens=(40, 60)), digest=DIGEST)
    other.load(tmp_path / "state")
    assert take(other, text, 20) == take(sessions[0], text, 20)


def test_a_conversation_may_be_empty(tiny_backend: Any, tmp_path: Path) -> None:
    _start(tiny_backend("llama")).save(tmp_path / "state")
    conversation = _start(tiny_backend("llama"))
    before = take(conversation, prompt_of(20), 5)
    conversation.load(tmp_path / "state")
    assert conversation.token_ids == ()
    assert take(conversation, prompt_of(20), 5) == before


def test_what_was_there_before_is_forgotten(tiny_backend: Any, tmp_path: Path, greedy: Any) -> None:
    saved, loaded = _start(tiny_backend("llama")), _start(tiny_backend("llama"))
    take(saved, prompt_of(20), 5)
    saved.save(tmp_path / "state")
    take(loaded, prompt_of(200, seed=1), 10)
    loaded.load(tmp_path / "state")
    assert loaded.token_ids == saved.token_ids
    assert take(loaded, prompt_of(20), 10) == greedy("llama", prompt_of(20), 10)


def test_messages_are_kept_with_it(tiny_backend: Any, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": 'Grüße, "世界"\n\x00'}, {"role": "assistant", "content": ""}]
    saved = _start(tiny_backend("llama"))
    take(saved, prompt_of(20), 5)
    saved.save(tmp_path / "state", messages)
    assert list(_start(tiny_backend("llama")).load(tmp_path / "state")) == messages


def test_a_conversation_of_an_llm_goes_on_in_another_object(tiny_bundle: Any, tmp_path: Path) -> None:
    first, second = (LLM(tiny_bundle().path, threads=1) for _ in range(2))
    session = first.new_session()
    output = first.generate(prompt_of(30), session=session)
    session.save(tmp_path / "state")
    other = second.new_session()
    other.load(tmp_path / "state")
    text = [*prompt_of(30), *output.token_ids, 5, 6, 7]
    following = second.generate(text, session=other)
    assert following.usage.cached_tokens == len(text) - 4
    assert following.token_ids == first.generate(text, session=session).token_ids


def test_a_generation_that_was_left_half_way_is_saved_as_far_as_it_came(
    tiny_backend: Any, tmp_path: Path, greedy: Any
) -> None:
    conversation, prompt = _start(tiny_backend("llama")), prompt_of(20)
    generation = generate(conversation, prompt)
    got = [next(generation) for _ in range(4)]
    conversation.save(tmp_path / "state")
    assert [*got, *itertools.islice(generation, 4)] == greedy("llama", prompt, 8), "and goes on undisturbed"
    loaded = _start(tiny_backend("llama"))
    loaded.load(tmp_path / "state")
    assert list(loaded.token_ids) == prompt + got[:3]


def test_other_programs_can_read_the_file(tiny_backend: Any, tmp_path: Path) -> None:
    conversation, text = _start(tiny_backend("gemma3")), prompt_of(50)
    take(conversation, text, 1)
    conversation.save(tmp_path / "state")
    with safe_open(tmp_path / "state", "numpy") as file:
        record = json.loads(file.metadata()["edgekit_session"])
        assert sorted(file.keys()) == ["stack0.keys", "stack0.values", "stack1.keys", "stack1.values", "token_ids"]
        assert file.get_tensor("token_ids").tolist() == text
        arrays = conversation._cache.stacks[0]
        np.testing.assert_array_equal(file.get_tensor("stack0.keys"), arrays.keys[..., :50])
        np.testing.assert_array_equal(file.get_tensor("stack0.values"), arrays.values[:, :, :50])
    assert record["bundle"] == DIGEST
    assert record["layout"]["dtype"] == "fp32"


def test_only_slots_in_use_are_written(tiny_backend: Any, tmp_path: Path) -> None:
    conversation, sizes = _start(tiny_backend("llama")), []
    for length in (10, 110):
        take(conversation, prompt_of(length), 1)
        conversation.save(tmp_path / "state")
        sizes.append((tmp_path / "state").stat().st_size)
    slot_bytes = conversation._cache.layout.slot_bytes(0) - 4
    assert sizes[1] - sizes[0] == pytest.approx(100 * (slot_bytes + 8), abs=64)


@pytest.fixture
def saved(tiny_backend: Any, tmp_path: Path) -> tuple[Path, Callable[..., Session]]:
    """The file of a conversation, and a function that starts one like it in which another text was read."""
    conversation = _start(tiny_backend("llama"))
    take(conversation, prompt_of(60), 3)
    conversation.save(tmp_path / "state", [{"role": "user", "content": "Hi"}])

    def another(policy: str = "stop", digest: str | None = DIGEST, **limits: int) -> Session:
        session = _start(tiny_backend("llama"), policy, digest, **limits)
        take(session, prompt_of(9, seed=2), 1)
        return session

    return tmp_path / "state", another


def _refused(session: Session, path: Path, error: type[Exception], message: str) -> None:
    """Loading fails, in one line, and the conversation that is there is as it was."""
    before = session.token_ids
    with pytest.raises(error, match=message) as caught:
        session.load(path)
    assert "\n" not in str(caught.value)
    assert session.token_ids == before
    assert session.shared_prefix([*before, 5]) == len(before)


def test_another_bundle_is_refused(saved: Any) -> None:
    path, another = saved
    message = "was saved with bundle 0123456789ab…, this is bundle ffffffffffff…"
    _refused(another(digest="f" * 64), path, UsageError, message)


def test_a_session_without_a_bundle_can_neither_save_nor_load(saved: Any) -> None:
    path, another = saved
    session = another(digest=None)
    _refused(session, path, UsageError, "make the session with LLM.new_session")
    with pytest.raises(UsageError, match=r"make the session with LLM\.new_session"):
        session.save(path)


def test_another_policy_is_refused(saved: Any) -> None:
    path, another = saved
    _refused(another("window"), path, UnsupportedError, "with the KV policy 'stop', this conversation has 'window'")


def test_another_dtype_is_refused(saved: Any, scoring_backend: Any) -> None:
    path, _ = saved
    session = _start(scoring_backend("llama", "int8"))
    _refused(session, path, UnsupportedError, "with the KV cache dtype 'fp32', this conversation has 'int8'")


def test_more_tokens_than_there_is_room_for_are_refused(saved: Any) -> None:
    path, another = saved
    _refused(another(max_tokens=61), path, DoesNotFitError, "holds 62 tokens, the KV cache has room for 61")
    another(max_tokens=62).load(path)


def test_more_positions_than_the_context_are_refused(saved: Any) -> None:
    path, another = saved
    session = another()
    session._cache.max_positions = 61
    _refused(session, path, DoesNotFitError, "has 62 tokens, the context 61")


def test_no_file_is_refused(saved: Any) -> None:
    path, another = saved
    _refused(another(), path.with_name("none"), UsageError, "cannot read .*none'")
    _refused(another(), path.parent, UsageError, "cannot read")


def _changed(path: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> Path:
    """Writes a file whose header is another one, in a form that is right."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    record = json.loads(header["__metadata__"]["edgekit_session"])
    change(record, header)
    if "edgekit_session" in header["__metadata__"]:
        header["__metadata__"]["edgekit_session"] = json.dumps(record)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    return path


def test_a_newer_schema_is_refused(saved: Any) -> None:
    path, another = saved
    _changed(path, lambda record, _: record.update(schema_version=2, something="new"))
    _refused(another(), path, UnsupportedError, "has schema_version 2, this EdgeKit reads up to 1; upgrade with")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda record, _: record["cache"].update(length=61), "it holds more tokens than it has"),
        (lambda record, _: record["cache"].update(length=63), "slots do not add up"),
        (lambda record, _: record["cache"].update(length=-1), "Expected `int` >= 0"),
        (lambda record, _: record["cache"].update(live=[62, 62]), "it has 2 cache groups, the model has 1"),
        (lambda record, _: record["cache"].update(live=[61]), "slots do not add up"),
        (lambda record, _: record["cache"].update(windowed=[True]), "it lacks tokens of a sliding window"),
        (lambda record, _: record["cache"].update(chosen_from=20), "do not with the KV policy 'stop'"),
        (lambda record, _: record["cache"].update(chosen_from=63), "it holds more tokens than it has"),
        (lambda record, _: record["cache"].update(shift=1), "it holds more tokens than it has"),
        (lambda record, _: record["cache"].update(length=100, sinks=4), "not with the KV policy 'stop'"),
        (lambda record, _: record.update(rope_range=1), "the model has no range of lengths 1"),
        (lambda record, _: record.update(messages=[{"role": 5}]), "Expected `str`, got `int`"),
        (lambda record, _: record.pop("policy"), "missing required field `policy`"),
        (lambda record, _: record.update(more=1), "unknown field `more`"),
        (lambda _, header: header["__metadata__"].pop("edgekit_session"), "is not a saved conversation"),
        (lambda _, header: header["__metadata__"].update(sha256="0" * 64), "its data have sha256"),
        (lambda _, header: header["__metadata__"].pop("sha256"), "its data have sha256"),
        (lambda _, header: header["token_ids"].update(dtype="F32", shape=[124]), "'token_ids' is F32"),
        (lambda _, header: header["stack0.keys"].update(dtype="F8_E4M3"), "has the type 'F8_E4M3'"),
        (lambda _, header: header["stack0.keys"]["shape"].reverse(), "'stack0.keys' is F32"),
        (lambda _, header: header.update({"stack0.key": header.pop("stack0.keys")}), "it has no 'stack0.keys'"),
        (lambda _, header: header.update(more={"dtype": "I8", "shape": [0], "data_offsets": [0, 0]}), "it has 'more'"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(change: Any, message: str, saved: Any) -> None:
    path, another = saved
    _refused(another(), _changed(path, change), CorruptArtifactError, message)


def test_token_ids_outside_of_the_vocabulary_are_refused(saved: Any) -> None:
    path, another = saved
    content = bytearray(path.read_bytes())
    start_of_data = 8 + int.from_bytes(content[:8], "little")
    content[start_of_data : start_of_data + 8] = (320).to_bytes(8, "little")
    digest = hashlib.sha256(content[start_of_data:]).hexdigest()
    path.write_bytes(content)
    _changed(path, lambda _, header: header["__metadata__"].update(sha256=digest))
    _refused(another(), path, CorruptArtifactError, "token ids that are not in the model's vocabulary of 320")


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.02, 0.5, 0.9999])
def test_a_truncated_file_is_refused(share: float, saved: Any) -> None:
    path, another = saved
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    _refused(another(), path, CorruptArtifactError, "is not valid: ")


@pytest.mark.parametrize(
    "content", [b"{}", b"\0" * 64, b"\xff" * 64, b"PK\x03\x04" * 1000, (2).to_bytes(8, "little") + b"{}"]
)
def test_another_file_is_refused(content: bytes, saved: Any) -> None:
    path, another = saved
    path.write_bytes(content)
    _refused(another(), path, CorruptArtifactError, "is not")


def test_a_slid_conversation_needs_its_sinks(tiny_backend: Any, tmp_path: Path) -> None:
    conversation = _start(tiny_backend("llama"), "window")
    take(conversation, prompt_of(100), 1)
    path = tmp_path / "state"
    for change, message in (
        (lambda record, _: record["cache"].update(sinks=5), "evicted as they are not with the KV policy 'window'"),
        (lambda record, _: record["cache"].update(shift=70), "it holds more tokens than it has"),
        (lambda _, header: header.update({"sinks": header.pop("policy.stack0")}), "it has no 'policy.stack0'"),
    ):
        conversation.save(path)
        _refused(_start(tiny_backend("llama"), "window"), _changed(path, change), CorruptArtifactError, message)


def test_a_write_that_fails_leaves_the_old_file(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path, another = saved
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("edgekit.runtime.tensor_file.os.fsync", full)
    with pytest.raises(StorageError, match=r"cannot write .*state': No space left on device"):
        another().save(path)
    assert path.read_bytes() == before
    assert [each.name for each in path.parent.iterdir()] == ["state"]


# A file that was opened right before the interruption is closed when its object goes.
@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("policy", ["stop", "window"])
def test_an_interruption_of_a_load_leaves_one_conversation_or_the_other_or_none(
    policy: str, tiny_backend: Any, tmp_path: Path
) -> None:
    backend, path = tiny_backend("llama"), tmp_path / "state"
    first, second = prompt_of(60), prompt_of(50, seed=1)
    one = _start(backend, policy)
    take(one, first, 1)
    one.save(path)
    following = {True: [*first, 7, 8], False: [*second, 7, 8]}
    expected = {}
    for is_first, text in following.items():
        session = _start(backend, policy)
        take(session, text[:-2], 1)
        expected[is_first] = take(session, text, 8)
    modules = (session_module, session_state, tensor_file, cache_snapshot, cache, window)
    at, interrupted = 1, True
    while interrupted:
        session = _start(backend, policy)
        take(session, second, 1)
        interrupted = Interruption(at, modules).run(lambda: session.load(path))  # noqa: B023
        assert session.token_ids in ((), tuple(first), tuple(second))
        is_first = session.token_ids == tuple(first)
        assert take(session, following[is_first], 8) == expected[is_first]
        at += 3
    assert at > 200
