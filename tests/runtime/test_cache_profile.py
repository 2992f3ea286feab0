from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import pytest

from edgekit.errors import CorruptArtifactError, EdgeKitError, StorageError, UnsupportedError, UsageError
from edgekit.runtime.cache_profile import SCHEMA_VERSION, CacheProfile, completed, read_profile, write_profile

Edited: TypeAlias = Callable[..., Path]

PROFILE = CacheProfile(
    schema_version=SCHEMA_VERSION,
    producer="edgekit 0.1.0",
    bundle="ab" * 32,
    budgets_tokens=(96, 128, 64),
    method="snapkv",
    score=0.75,
    settings={"mean_tokens": 96, "task": "needles", "noise": 0.3},
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_profile(tmp_path / "profile.json", PROFILE)
    return tmp_path / "profile.json"


@pytest.fixture
def edited(path: Path) -> Edited:
    """Changes fields of the file; None removes one."""

    def edit(**changes: Any) -> Path:
        content = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))
        return path

    return edit


def _refusal(kind: type[EdgeKitError], path: Path, num_layers: int = 3) -> str:
    with pytest.raises(EdgeKitError) as caught:
        read_profile(path, num_layers)
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_profile_survives_writing_and_reading(path: Path) -> None:
    assert read_profile(path, 3) == PROFILE
    assert read_profile(str(path), 3) == PROFILE
    assert path.read_text().endswith("}\n")
    assert json.loads(path.read_text())["budgets_tokens"] == [96, 128, 64]


def test_writing_replaces_a_profile_and_leaves_nothing_else(path: Path) -> None:
    changed = msgspec.structs.replace(PROFILE, budgets_tokens=(1, 2, 3))
    write_profile(path, changed)
    assert read_profile(path, 3) == changed
    assert list(path.parent.iterdir()) == [path]


def test_a_write_that_fails_leaves_the_profile_that_was_there(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, data: bytes) -> int:
        with self.open("wb") as file:
            file.write(data[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", refuse)
    with pytest.raises(StorageError, match=r"cannot write '.*profile\.json': No space left on device"):
        write_profile(path, PROFILE)
    monkeypatch.undo()
    assert read_profile(path, 3) == PROFILE
    assert list(path.parent.iterdir()) == [path]


def test_a_profile_that_is_not_there_is_a_mistake(tmp_path: Path) -> None:
    assert "cannot read the cache profile" in _refusal(UsageError, tmp_path / "no.json")
    assert "No such file or directory" in _refusal(UsageError, tmp_path / "no.json")
    assert "Is a directory" in _refusal(UsageError, tmp_path)


@pytest.mark.parametrize("num_layers", [2, 4])
def test_a_profile_of_another_number_of_layers_is_refused(path: Path, num_layers: int) -> None:
    message = _refusal(UsageError, path, num_layers)
    assert f"has budgets of 3 layers, the model has {num_layers}; make one for this model with" in message


@pytest.mark.parametrize(
    "text", [b"", b"{", b"null", b"[1]", b"\xff\xfe{}", b'{"schema_version": 1, "producer": "\xff"}']
)
def test_what_is_no_profile_is_corrupt(text: bytes, path: Path) -> None:
    path.write_bytes(text)
    message = _refusal(CorruptArtifactError, path)
    assert "is not valid" in message
    assert message.endswith("make one with: edgekit tune-cache")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"budgets_tokens": [96, 0, 64]}, "budgets_tokens"),
        ({"budgets_tokens": [96, -1, 64]}, "budgets_tokens"),
        ({"budgets_tokens": [96, 1.5, 64]}, "budgets_tokens"),
        ({"budgets_tokens": "96"}, "budgets_tokens"),
        ({"budgets_tokens": None}, "budgets_tokens"),
        ({"schema_version": 0}, "schema_version"),
        ({"schema_version": "1"}, "schema_version"),
        ({"schema_version": None}, "schema_version"),
        ({"score": "good"}, "score"),
        ({"bundle": 5}, "bundle"),
        ({"settings": []}, "settings"),
        ({"color": "red"}, "color"),
    ],
)
def test_a_field_that_is_wrong_is_corrupt_by_name(change: dict[str, Any], field: str, edited: Edited) -> None:
    assert field in _refusal(CorruptArtifactError, edited(**change))


def test_a_profile_of_a_newer_version_is_refused_whatever_else_it_holds(edited: Edited) -> None:
    path = edited(schema_version=SCHEMA_VERSION + 1, budgets_tokens={"layers": 3}, color="red")
    message = _refusal(UnsupportedError, path)
    assert f"has schema_version {SCHEMA_VERSION + 1}, this EdgeKit reads up to {SCHEMA_VERSION}; upgrade" in message


@pytest.mark.parametrize("length", [0, 1, 20, 100])
def test_a_truncated_profile_is_corrupt(path: Path, length: int) -> None:
    path.write_bytes(path.read_bytes()[:length])
    _refusal(CorruptArtifactError, path)


@pytest.mark.parametrize(
    ("budgets", "mean", "expected"),
    [
        ((96, 128, 64), 96, (96, 128, 64)),  # the sum is what it should be
        ((96, 128, 64), 48, (48, 64, 32)),
        ((96, 128, 64), 192, (192, 256, 128)),
        # 10 + 10 / 30 · (33 − 30) = 11, 20 + 20 / 30 · 3 = 22
        ((10, 20), 16.5, (11, 22)),
        # 1 + 1 / 3 · (4 − 3) = 1.33 and 2 + 2 / 3 = 2.67, each rounded up.
        ((1, 2), 2, (2, 3)),
        ((1000, 1), 1, (2, 1)),
        ((7,), 50, (50,)),
    ],
)
def test_budgets_move_to_another_mean_in_proportion(
    budgets: tuple[int, ...], mean: Any, expected: tuple[int, ...]
) -> None:
    assert completed(budgets, mean) == expected


def test_moved_budgets_keep_their_ratios_and_miss_the_mean_by_less_than_one() -> None:
    budgets = (33, 400, 129, 77, 1024, 50)
    for mean in range(33, 2000, 37):
        moved = completed(budgets, mean)
        assert 0 <= sum(moved) - mean * len(budgets) < len(budgets)
        for before, after in zip(budgets, moved, strict=True):
            assert after == math.ceil(round(before * mean * len(budgets) / sum(budgets), 6))


def test_a_profile_for_another_mean_is_that_of_its_budgets() -> None:
    assert PROFILE.for_mean(48) == completed(PROFILE.budgets_tokens, 48) == (48, 64, 32)
