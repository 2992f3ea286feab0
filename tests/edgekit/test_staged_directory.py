"""Writing a directory in one step: whole or not at all, and never over something else."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from edgekit.bundle import staged_directory
from edgekit.errors import EdgeKitError, StorageError, UsageError


def _write_bundle(directory: Path, contents: str = "old") -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "manifest.json").write_text('{"producer": "edgekit 0.1.0"}')
    (directory / "contents").write_text(contents)
    return directory


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A directory that passes for a bundle."""
    return _write_bundle(tmp_path / "model.edge")


def test_a_staged_directory_appears_whole(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with staged_directory(target, force=False) as staging:
        assert staging.parent == target.parent
        (staging / "file").write_text("new")
        assert not target.exists()
    assert [file.name for file in target.iterdir()] == ["file"]
    assert list(tmp_path.iterdir()) == [target]


def test_a_staged_directory_has_the_permissions_of_any_other(tmp_path: Path) -> None:
    with staged_directory(tmp_path / "out", force=False):
        pass
    (tmp_path / "other").mkdir()
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "other").stat().st_mode


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt, UsageError])
def test_a_failure_leaves_nothing_and_stays_what_it_is(failure: type[BaseException], tmp_path: Path) -> None:
    def fail() -> None:
        with staged_directory(tmp_path / "out", force=False) as staging:
            (staging / "file").touch()
            raise failure

    with pytest.raises(failure):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_a_refusal_of_the_disk_is_a_storage_error(tmp_path: Path) -> None:
    with (
        pytest.raises(StorageError, match=r"^cannot write '.*/out': .*No space left on device"),
        staged_directory(tmp_path / "out", force=False),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert list(tmp_path.iterdir()) == []


def test_an_existing_bundle_is_replaced_by_force_only(path: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="exists; pass --force to replace it"), staged_directory(path, force=False):
        pytest.fail("must not be entered")
    with staged_directory(path, force=True) as staging:
        assert (path / "contents").read_text() == "old"
        (staging / "new").touch()
    assert [file.name for file in path.iterdir()] == ["new"]
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_replacement_leaves_the_old_bundle(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def refuse_staging(self: Path, target: Path) -> Path:
        if target == path and not self.name.endswith("-old"):
            with suppress(RuntimeError), staged_directory(path, force=False):
                raise RuntimeError  # another thread that begins at this moment must not take the old one for rubbish
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse_staging)
    with pytest.raises(StorageError, match="Input/output error"), staged_directory(path, force=True) as staging:
        (staging / "new").touch()
    assert (path / "contents").read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "manifest", [None, "", "{}", '{"producer": 1}', '{"producer": "webpack 5"}', '{"name": "app"}']
)
def test_what_is_not_a_bundle_is_never_replaced(manifest: str | None, tmp_path: Path) -> None:
    target = tmp_path / "project"
    target.mkdir()
    (target / "thesis.tex").write_text("ten years of work")
    if manifest is not None:
        (target / "manifest.json").write_text(manifest)
    with pytest.raises(UsageError, match="is not a bundle; --force replaces bundles only"):
        _enter(target)
    assert (target / "thesis.tex").read_text() == "ten years of work"
    with pytest.raises(UsageError, match="is not a bundle"):
        _enter(target / "thesis.tex")
    assert (target / "thesis.tex").read_text() == "ten years of work"


def _enter(target: Path) -> None:
    with staged_directory(target, force=True):
        pytest.fail("must not be entered")


def test_an_empty_directory_and_a_bundle_without_its_files_are_replaced_by_force(path: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (path / "contents").unlink()
    for target in (tmp_path / "empty", path):
        with staged_directory(target, force=True) as staging:
            (staging / "new").touch()
        assert [file.name for file in target.iterdir()] == ["new"]


def test_a_parent_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^no such directory: '.*/a'; create it first$"):
        _enter(tmp_path / "a" / "out")


def test_a_relative_target_stays_where_it_was_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    with staged_directory(Path("out"), force=False):
        monkeypatch.chdir(tmp_path / "b")
    assert (tmp_path / "a" / "out").is_dir()


WAITING = """
import sys, time
from pathlib import Path
from edgekit.bundle import staged_directory

with staged_directory(Path(sys.argv[1]), force=False) as staging:
    (staging / "file").touch()
    print(staging, flush=True)
    sys.stdin.read()
"""


def test_what_a_killed_process_left_is_cleared_away_and_what_a_running_one_writes_is_not(tmp_path: Path) -> None:
    target = tmp_path / "[odd] *name"
    command = [sys.executable, "-c", WAITING, str(target)]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as killed,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running,
    ):
        assert killed.stdout is not None
        assert running.stdout is not None
        left, written = (Path(process.stdout.readline().strip()) for process in (killed, running) if process.stdout)
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert (left / "file").exists()
        with staged_directory(target.with_name("other"), force=False):
            assert left.exists()
        with staged_directory(target, force=False):
            assert not left.exists()
            assert (written / "file").exists()
        running.communicate("")
    assert sorted(path.name for path in tmp_path.iterdir()) == [target.name, "other"]


def test_a_leftover_with_the_number_of_this_process_is_cleared_away(tmp_path: Path) -> None:
    # In a container every export may be process 1.
    for name in (f".out.partial-{os.getpid()}", f".out.partial-{os.getpid()}-0123abcd", ".out.partial-x"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.onnx").touch()
    (tmp_path / ".output.partial-x").mkdir()
    with staged_directory(tmp_path / "out", force=False):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == [".output.partial-x", "out"]


@pytest.mark.parametrize("is_bundle", [False, True])
def test_what_appears_in_the_meantime_is_not_replaced(is_bundle: bool, tmp_path: Path) -> None:
    target = tmp_path / "out"

    def lose_the_race() -> None:
        with staged_directory(target, force=False) as staging:
            (staging / "file").touch()
            target.mkdir()
            (target / "precious").touch()
            if is_bundle:
                _write_bundle(target)

    with pytest.raises(UsageError, match="exists; pass --force"):
        lose_the_race()
    assert (target / "precious").exists()
    assert list(tmp_path.iterdir()) == [target]


def test_a_bundle_that_a_killed_process_had_moved_aside_comes_back(path: Path, tmp_path: Path) -> None:
    aside = path.rename(tmp_path / f".{path.name}.partial-x-old")
    with pytest.raises(UsageError, match="exists; pass --force"), staged_directory(path, force=False):
        pass
    assert (path / "contents").read_text() == "old"
    # Where the new one did appear, the old one is rubbish.
    _write_bundle(aside, "older")
    with staged_directory(path, force=True) as staging:
        _write_bundle(staging, "new")
    assert (path / "contents").read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_is_followed(path: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "elsewhere" / "link.edge"
    link.symlink_to(path)
    with staged_directory(link, force=True) as staging:
        _write_bundle(staging, "new")
    assert link.is_symlink()
    assert (path / "contents").read_text() == "new"
    assert list((tmp_path / "elsewhere").iterdir()) == [link]


def test_threads_that_write_the_same_target_do_not_disturb_each_other(path: Path) -> None:
    written, entered = threading.Event(), threading.Event()
    failures: list[EdgeKitError] = []

    def write() -> None:
        try:
            with staged_directory(path, force=True) as staging:
                _write_bundle(staging, "thread")
                written.set()
                assert entered.wait(timeout=60)
        except EdgeKitError as error:
            failures.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    assert written.wait(timeout=60)
    with staged_directory(path, force=True) as staging:
        _write_bundle(staging, "main")
        entered.set()
        thread.join()
        assert (path / "contents").read_text() == "thread"
    assert failures == []
    assert (path / "contents").read_text() == "main"
