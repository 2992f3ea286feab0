"""The cache of lowered graphs and of verifications: what is made again, what is not, and what is never used."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnxruntime
import platformdirs
import pytest

from edgekit import bundle as bundle_module
from edgekit.bundle import GRAPH, GRAPH_DATA, Bundle, open_bundle, sha256_file
from edgekit.cache_layout import cache_layout
from edgekit.errors import CorruptArtifactError, EdgeKitError, StorageError, UnsupportedError
from edgekit.runtime import lowered
from edgekit.runtime.llm import LLM
from edgekit.runtime.lowered import CACHE_VARIABLE, FILES, cache_directory, lowered_graph, verify_once
from edgekit.runtime.sampling import SamplingParams

SHORT = SamplingParams(max_tokens=5)


@pytest.fixture
def bundle(tiny_bundle: Any, tmp_path: Path) -> Bundle:
    """A copy to damage."""
    return open_bundle(shutil.copytree(tiny_bundle().path, tmp_path / "copy.edge"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory, not made yet."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def lowerings(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The graphs that were lowered, in processes of their own."""
    done, run = list[Path](), lowered._run_lowering

    def note_and_run(graph: Path, output: Path, layout: str) -> None:
        done.append(graph)
        run(graph, output, layout)

    monkeypatch.setattr(lowered, "_run_lowering", note_and_run)
    return done


def _lowered(bundle: Bundle) -> Path:
    return lowered_graph(bundle, cache_layout(bundle.manifest.spec))


@pytest.fixture(scope="module")
def whole(tiny_bundle: Any) -> Path:
    """The directory of a lowered graph. Do not change it."""
    return _lowered(tiny_bundle()).parent


@pytest.fixture
def copies(whole: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The graphs that were lowered, by copying the right result."""
    done: list[Path] = []

    def copy(graph: Path, output: Path, _: str) -> None:
        done.append(graph)
        for name in (GRAPH, GRAPH_DATA):
            shutil.copy(whole / name, output / name)

    monkeypatch.setattr(lowered, "_run_lowering", copy)
    return done


def _entry(cache: Path) -> Path:
    (entry,) = (path for path in (cache / "lowered").iterdir() if path.is_dir())
    return entry


def test_the_first_load_lowers_the_graph_and_the_second_does_not(
    bundle: Bundle, cache: Path, lowerings: list[Path], greedy: Any
) -> None:
    for _ in range(2):
        assert list(LLM(bundle.path, threads=1).generate([5, 6], SHORT).token_ids) == greedy("llama", [5, 6], 5)
        assert lowerings == [bundle.file(GRAPH)]
    files = {path.name for path in _entry(cache).iterdir()}
    assert files == {GRAPH, GRAPH_DATA, FILES}
    assert sha256_file(_entry(cache) / GRAPH) != sha256_file(bundle.file(GRAPH)), "it is another graph"


def test_a_copy_of_a_bundle_shares_its_lowered_graph(bundle: Bundle, whole: Path, lowerings: list[Path]) -> None:
    assert _lowered(bundle).parent == whole
    assert lowerings == []


def test_other_code_or_another_onnx_runtime_lowers_anew(
    bundle: Bundle, cache: Path, copies: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = _lowered(bundle)
    monkeypatch.setattr(onnxruntime, "__version__", "0.0.1")
    second = _lowered(bundle)
    assert first != second
    assert len(copies) == 2
    assert first.is_relative_to(cache)
    assert first.is_file(), "an environment with the other version may still use it"


def _write(name: str, content: bytes) -> Callable[[Path], None]:
    def write(entry: Path) -> None:
        (entry / name).write_bytes(content)

    return write


def _flip_a_byte(entry: Path) -> None:
    content = bytearray((entry / GRAPH_DATA).read_bytes())
    content[len(content) // 2] ^= 1
    (entry / GRAPH_DATA).write_bytes(content)


def _truncate(entry: Path) -> None:
    os.truncate(entry / GRAPH_DATA, 1000)


def _keep_only_a_leftover(entry: Path) -> None:
    entry.rename(entry.with_name(f"{entry.name}.partial"))


DAMAGES: dict[str, Callable[[Path], None]] = {
    "a byte of the data is another": _flip_a_byte,
    "the data is truncated": _truncate,
    "the data is missing": lambda entry: (entry / GRAPH_DATA).unlink(),
    "the graph is missing": lambda entry: (entry / GRAPH).unlink(),
    "the record is missing": lambda entry: (entry / FILES).unlink(),
    "the record is garbage": _write(FILES, b"\xff"),
    "the record is of another kind": _write(FILES, b"[1]"),
    "the record is empty": _write(FILES, b"{}"),
    "a killed process left its work": _keep_only_a_leftover,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_or_partial_graph_is_made_again(
    damage: str, bundle: Bundle, cache: Path, whole: Path, copies: list[Path]
) -> None:
    _lowered(bundle)
    DAMAGES[damage](_entry(cache))
    graph = _lowered(bundle)
    assert len(copies) == 2
    for name in (GRAPH, GRAPH_DATA):
        assert (graph.parent / name).read_bytes() == (whole / name).read_bytes()
    assert _lowered(bundle) == graph
    assert len(copies) == 2
    assert [path.name for path in graph.parent.parent.iterdir() if path.is_dir()] == [graph.parent.name]


@pytest.mark.parametrize("place", ["cache", "lowered"])
def test_a_cache_that_cannot_be_written_is_one_clear_error(
    place: str, bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A file where a directory should be stops everybody, root too.
    directory = tmp_path / "full"
    blocked = directory / "lowered" if place == "lowered" else directory
    blocked.parent.mkdir(exist_ok=True)
    blocked.write_text("")
    monkeypatch.setenv(CACHE_VARIABLE, str(directory))
    with pytest.raises(
        StorageError, match=rf"cannot write the cache .*; set \${CACHE_VARIABLE} to a directory"
    ) as caught:
        LLM(bundle.path, threads=1)
    assert "\n" not in str(caught.value)


def test_a_disk_that_fills_up_leaves_nothing_behind(
    bundle: Bundle, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(_: Path, output: Path, __: str) -> None:
        (output / GRAPH).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(lowered, "_run_lowering", fill)
    with pytest.raises(StorageError, match="No space left on device"):
        _lowered(bundle)
    assert [path for path in (cache / "lowered").iterdir() if path.is_dir()] == []


def test_a_failing_lowering_gives_its_reason_and_leaves_nothing_behind(bundle: Bundle, cache: Path) -> None:
    bundle.file(GRAPH).write_bytes(b"\xffnot a graph")
    with pytest.raises(EdgeKitError, match=r"^lowering '.*model\.onnx' failed: .*Error.*") as caught:
        _lowered(bundle)
    assert "\n" not in str(caught.value)
    assert "Traceback" not in str(caught.value)
    assert [path for path in (cache / "lowered").iterdir() if path.is_dir()] == []


def test_graphs_that_nobody_has_loaded_for_a_month_are_removed_when_another_is_made(
    bundle: Bundle, tiny_bundle: Any, cache: Path
) -> None:
    first = _lowered(bundle).parent
    (cache / "lowered" / "abandoned.lock").touch()
    month_ago = first.stat().st_mtime - 31 * 24 * 3600
    for path in (first, cache / "lowered" / "abandoned.lock"):
        os.utime(path, (month_ago, month_ago))
    _lowered(bundle)  # a use
    _lowered(tiny_bundle("gpt_neox"))
    assert first.is_dir()
    assert not (cache / "lowered" / "abandoned.lock").exists()
    os.utime(first, (month_ago, month_ago))
    _lowered(tiny_bundle("qwen3"))
    assert not first.exists()


@pytest.mark.usefixtures("cache")
def test_a_full_disk_in_the_other_process_is_a_storage_error(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    report = subprocess.CompletedProcess([], 1, "", "noise\nstorage\tcannot write 'x': No space left on device\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: report)
    with pytest.raises(StorageError, match=r"failed: cannot write 'x': No space left on device; free some space, or"):
        _lowered(bundle)


@pytest.mark.usefixtures("cache")
def test_the_kind_of_the_failure_survives_the_process(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowered, "TARGET", "nonsense")
    with pytest.raises(UnsupportedError, match="failed: lowering target 'nonsense'; known: ort-cpu"):
        _lowered(bundle)


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("kill -9 $$", "failed: killed by SIGKILL, perhaps for lack of memory"),
        ("exit 7", "failed: exit status 7"),
        ("echo one >&2; echo two >&2; exit 1", "failed: two"),
    ],
)
def test_a_process_that_dies_is_reported(
    script: str, reason: str, bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(EdgeKitError, match=reason):
        _lowered(bundle)


@pytest.mark.usefixtures("cache")
def test_a_process_that_cannot_start_is_reported(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(EdgeKitError, match=r"failed: cannot start '/nowhere/python'"):
        _lowered(bundle)


@pytest.mark.usefixtures("cache")
def test_lowering_imports_nothing_from_the_current_directory(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Somebody else's bundle may be the current directory, and must not bring code.
    marker = tmp_path / "marker"
    for name in ("onnx_ir", "json", "numpy", "edgekit"):
        (bundle.path / f"{name}.py").write_text(f"open({str(marker)!r}, 'w')\nraise SystemExit(1)\n")
    monkeypatch.chdir(bundle.path)
    assert _lowered(replace(bundle, path=Path())).is_file()
    assert not marker.exists()


def test_two_first_loads_at_once_lower_once_and_both_work(bundle: Bundle, cache: Path, greedy: Any) -> None:
    code = (
        "import logging, sys\n"
        "logging.basicConfig(level=logging.INFO)\n"
        "from edgekit.runtime import LLM, SamplingParams\n"
        "llm = LLM(sys.argv[1], threads=1)\n"
        "print(list(llm.generate([5, 6], SamplingParams(max_tokens=5)).token_ids))\n"
    )
    command = [sys.executable, "-c", code, str(bundle.path)]
    processes = [
        subprocess.Popen(command, cwd=cache.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    results = [process.communicate() for process in processes]
    assert [json.loads(output) for output, _ in results] == [greedy("llama", [5, 6], 5)] * 2, results
    assert "".join(log for _, log in results).count("lowering") == 1


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that a verification hashed."""
    names: list[str] = []

    def note_and_hash(path: Path) -> str:
        names.append(path.name)
        return sha256_file(path)

    monkeypatch.setattr(bundle_module, "sha256_file", note_and_hash)
    return names


def _change_a_byte(file: Path, *, restore_times: bool) -> None:
    before = file.stat()
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    # The clock of a file system is coarse: a test may see two changes at one time, a user does not.
    while file.stat().st_ctime_ns == before.st_ctime_ns or file.read_bytes() != content:
        file.write_bytes(content)
    if restore_times:
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert file.stat().st_mtime_ns == before.st_mtime_ns
    assert file.stat().st_size == before.st_size


@pytest.mark.usefixtures("cache")
def test_a_bundle_is_hashed_once(bundle: Bundle, hashed: list[str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        verify_once(bundle)
        assert sorted(hashed) == sorted(bundle.manifest.files)
        verify_once(open_bundle(bundle.path))
    assert len(hashed) == len(bundle.manifest.files)
    assert caplog.messages == []


@pytest.mark.usefixtures("cache", "copies")
@pytest.mark.parametrize("restore_times", [False, True])
@pytest.mark.parametrize("name", [GRAPH_DATA, "tokenizer.json"])
def test_a_changed_byte_is_noticed_and_the_bundle_is_refused(name: str, restore_times: bool, bundle: Bundle) -> None:
    LLM(bundle.path, threads=1)
    _change_a_byte(bundle.file(name), restore_times=restore_times)
    with pytest.raises(CorruptArtifactError, match=f"{name}' in bundle .* has sha256"):
        LLM(bundle.path, threads=1)
    with pytest.raises(CorruptArtifactError, match=name):
        LLM(bundle.path, threads=1)


@pytest.mark.usefixtures("cache")
def test_another_bundle_at_the_same_path_is_hashed(bundle: Bundle, tiny_bundle: Any, hashed: list[str]) -> None:
    verify_once(bundle)
    shutil.rmtree(bundle.path)
    shutil.copytree(tiny_bundle("qwen3").path, bundle.path)
    hashed.clear()
    verify_once(open_bundle(bundle.path))
    assert sorted(hashed) == sorted(bundle.manifest.files)


@pytest.mark.usefixtures("cache")
def test_the_same_files_are_hashed_for_another_manifest(bundle: Bundle) -> None:
    verify_once(bundle)
    manifest = bundle.path / "manifest.json"
    digest = bundle.manifest.files[GRAPH].sha256
    manifest.write_text(manifest.read_text().replace(digest, digest[::-1]))
    with pytest.raises(CorruptArtifactError, match=GRAPH):
        verify_once(open_bundle(bundle.path))


def test_a_cache_that_remembers_nothing_costs_a_hash_per_load(
    bundle: Bundle, hashed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file"))
    for _ in range(2):
        verify_once(bundle)
    assert len(hashed) == 2 * len(bundle.manifest.files)


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    assert cache_directory() == tmp_path
    monkeypatch.setenv(CACHE_VARIABLE, "")
    assert cache_directory() == Path(platformdirs.user_cache_dir("edgekit"))
    monkeypatch.delenv(CACHE_VARIABLE)
    assert cache_directory() == Path(platformdirs.user_cache_dir("edgekit"))
