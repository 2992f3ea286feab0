"""Limits of control groups, from trees as Linux lays them out below /proc and /sys."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TypeAlias

import psutil
import pytest

from edgekit.runtime.available_memory import AvailableMemory, available_memory, resident_bytes, return_free_memory

MakeTree: TypeAlias = Callable[[Mapping[str, str]], Path]

GIB = 1 << 30
MACHINE = AvailableMemory(total_bytes=16 * GIB, available_bytes=10 * GIB, limited_by="machine")
# What version 1 says where there is no limit: the largest multiple of a page.
NO_LIMIT_V1 = str((1 << 63) - 4096)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(total=MACHINE.total_bytes, available=MACHINE.available_bytes)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)


@pytest.fixture
def tree(tmp_path: Path) -> MakeTree:
    def make(files: Mapping[str, str]) -> Path:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return tmp_path

    return make


def _v2(group: str, limit: object, used: object, **others: object) -> dict[str, str]:
    """The files of a group of version 2."""
    folder = f"sys/fs/cgroup{group}"
    named = {f"{folder}/memory.{name}": f"{value}\n" for name, value in others.items()}
    return {f"{folder}/memory.max": f"{limit}\n", f"{folder}/memory.current": f"{used}\n", **named}


def _limited(total: int, available: int) -> AvailableMemory:
    return AvailableMemory(total_bytes=total, available_bytes=available, limited_by="cgroup")


def test_without_control_groups_the_machine_is_what_there_is(tree: MakeTree) -> None:
    assert available_memory(tree({})) == MACHINE


def test_a_group_of_version_2_limits(tree: MakeTree) -> None:
    files = {"proc/self/cgroup": "0::/app.slice/job\n", **_v2("/app.slice/job", 4 * GIB, GIB)}
    assert available_memory(tree(files)) == _limited(4 * GIB, 3 * GIB)


def test_of_nested_groups_the_one_that_leaves_least_limits(tree: MakeTree) -> None:
    files = {"proc/self/cgroup": "0::/a/b/c\n", **_v2("/a/b/c", 4 * GIB, GIB)}
    files |= _v2("/a/b", "max", 5 * GIB) | _v2("/a", 6 * GIB, 5 * GIB) | _v2("", 100 * GIB, 5 * GIB)
    assert available_memory(tree(files)) == _limited(6 * GIB, GIB)


def test_a_group_with_more_room_than_the_machine_does_not_limit(tree: MakeTree) -> None:
    assert available_memory(tree({"proc/self/cgroup": "0::/a\n", **_v2("/a", 12 * GIB, GIB)})) == MACHINE


def test_a_group_that_is_used_up_leaves_nothing(tree: MakeTree) -> None:
    files = {"proc/self/cgroup": "0::/a\n", **_v2("/a", GIB, GIB + 4096)}
    assert available_memory(tree(files)) == _limited(GIB, 0)


def test_without_a_limit_a_group_does_not_count(tree: MakeTree) -> None:
    assert available_memory(tree({"proc/self/cgroup": "0::/a\n", **_v2("/a", "max", 15 * GIB)})) == MACHINE


def test_where_a_group_is_throttled_counts_as_its_limit(tree: MakeTree) -> None:
    files = {"proc/self/cgroup": "0::/a\n", **_v2("/a", 8 * GIB, GIB, high=2 * GIB)}
    assert available_memory(tree(files)) == _limited(2 * GIB, GIB)
    assert available_memory(tree(_v2("/a", "max", GIB, high=3 * GIB))) == _limited(3 * GIB, 2 * GIB)


def test_page_cache_that_goes_when_asked_is_no_use(tree: MakeTree) -> None:
    stat = f"anon {GIB}\nactive_file 4096\ninactive_file {GIB}\nslab 0"
    files = {"proc/self/cgroup": "0::/a\n", **_v2("/a", 4 * GIB, 3 * GIB, stat=stat)}
    assert available_memory(tree(files)) == _limited(4 * GIB, 2 * GIB)


def test_inside_a_container_only_the_mount_may_be_there(tree: MakeTree) -> None:
    # The path is that of the host, the files are those of the container's own group.
    files = {"proc/self/cgroup": "0::/docker/0123abcd\n", **_v2("", 2 * GIB, GIB)}
    assert available_memory(tree(files)) == _limited(2 * GIB, GIB)


def test_a_path_above_the_namespace_stays_below_the_mount(tree: MakeTree) -> None:
    files = {"proc/self/cgroup": "0::/../../other\n", **_v2("", 2 * GIB, GIB)}
    assert available_memory(tree(files)) == _limited(2 * GIB, GIB)


def _v1(group: str, limit: object, used: int, **others: str) -> dict[str, str]:
    folder = f"sys/fs/cgroup/memory{group}"
    files = {f"{folder}/memory.limit_in_bytes": f"{limit}\n", f"{folder}/memory.usage_in_bytes": f"{used}\n"}
    return {**files, **{f"{folder}/memory.{name}": text for name, text in others.items()}}


def test_a_group_of_version_1_limits(tree: MakeTree) -> None:
    groups = "12:cpu,cpuacct:/other\n4:memory:/docker/job:1\n1:name=systemd:/init\n"
    stat = f"inactive_file 5\ntotal_inactive_file {GIB // 2}\n"
    files = {"proc/self/cgroup": groups, **_v1("/docker/job:1", 3 * GIB, 2 * GIB, stat=stat)}
    files |= _v1("/other", GIB, 0)  # the group of another controller
    assert available_memory(tree(files)) == _limited(3 * GIB, GIB + GIB // 2)


def test_version_1_without_a_limit_does_not_count(tree: MakeTree) -> None:
    files = {"proc/self/cgroup": "4:memory:/a\n", **_v1("/a", NO_LIMIT_V1, 15 * GIB), **_v1("", NO_LIMIT_V1, 15 * GIB)}
    assert available_memory(tree(files)) == MACHINE


def test_both_versions_at_once_both_count(tree: MakeTree) -> None:
    files = {"proc/self/cgroup": "4:cpu,memory:/a\n0::/b\n", **_v1("/a", 4 * GIB, GIB), **_v2("/b", 5 * GIB, 3 * GIB)}
    assert available_memory(tree(files)) == _limited(5 * GIB, 2 * GIB)


@pytest.mark.parametrize("limit", ["", "many", "-1", "\N{SUPERSCRIPT TWO}"])
def test_a_limit_that_is_no_number_does_not_count(limit: str, tree: MakeTree) -> None:
    assert available_memory(tree({"proc/self/cgroup": "0::/a\n", **_v2("/a", limit, GIB)})) == MACHINE


@pytest.mark.parametrize("name", ["memory.max", "memory.current"])
def test_a_file_that_cannot_be_read_leaves_the_machine_and_is_logged(
    name: str, tree: MakeTree, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "edgekit")
    root = tree({"proc/self/cgroup": "0::/a\n", **_v2("/a", 2 * GIB, GIB)})
    (root / "sys/fs/cgroup/a" / name).unlink()
    (root / "sys/fs/cgroup/a" / name).mkdir()  # what even root cannot read
    assert available_memory(root) == MACHINE
    assert f"a/{name}: Is a directory" in caplog.text.replace("[Errno 21] ", "")


def test_lines_that_mean_nothing_are_passed_over(tree: MakeTree) -> None:
    files = {"proc/self/cgroup": "nonsense\n\n7\n0::/a\n", **_v2("/a", 2 * GIB, GIB)}
    assert available_memory(tree(files)) == _limited(2 * GIB, GIB)


def test_the_resident_set_grows_with_what_is_held() -> None:
    before = resident_bytes()
    assert before > 10_000_000
    held = bytearray(b"\1") * (64 << 20)
    assert resident_bytes() - before > (32 << 20)
    assert held[-1] == 1


def test_freed_memory_goes_back_to_the_system() -> None:
    held = [bytearray(50_000) for _ in range(2000)]  # below glibc's threshold for mappings of their own
    last = bytearray(50_000)
    full = resident_bytes()
    held.clear()
    return_free_memory()
    assert full - resident_bytes() > 80_000_000
    assert len(last) == 50_000
