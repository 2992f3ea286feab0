"""The lowered graph of a bundle, made once per machine and kept in the user's cache directory.

The portable graph runs anywhere and is tuned for nothing. Rewriting it takes a second and a graph library, so
it is done in a process of its own; later loads find the result by the bundle's digest.

    lowered/<digest>-<target>-<version>-<cache dtype>-<layout>/
                                           model.onnx, model.onnx.data, and files.json with their sizes and sha256
    verified/<path>                        size, times and inode of every file that was hashed and found right
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import importlib.util
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import platformdirs

from edgekit.bundle import GRAPH, GRAPH_DATA, Bundle, FileRecord, sha256_file
from edgekit.cache_layout import CacheLayout
from edgekit.errors import CorruptArtifactError, DoesNotFitError, EdgeKitError, StorageError, UnsupportedError
from edgekit.ort import ort

TARGET = "ort-cpu"
CACHE_VARIABLE = "EDGEKIT_CACHE_DIR"
FILES = "files.json"
UNUSED_DAYS = 30

logger = logging.getLogger(__name__)


def cache_directory() -> Path:
    """Returns where EdgeKit keeps what it can make again; $EDGEKIT_CACHE_DIR overrides the platform's place."""
    override = os.environ.get(CACHE_VARIABLE)
    return Path(override) if override else Path(platformdirs.user_cache_dir("edgekit"))


def verify_once(bundle: Bundle) -> None:
    """Hashes a bundle's files unless they are those that were found right before, by size, times and inode.

    The times include the inode's change time, which no program can set: a file that was edited and given its old
    modification time is hashed again.

    Raises:
        CorruptArtifactError: A file's contents are not what the manifest recorded.
    """
    _verify_once(bundle.path, bundle.digest, bundle.manifest.files, bundle.verify)


def lowered_graph(bundle: Bundle, layout: CacheLayout) -> Path:
    """Returns the graph lowered for ONNX Runtime on this CPU, making it when there is none or it is damaged.

    Args:
        bundle: A verified bundle.
        layout: How the runtime keeps the KV cache.

    Raises:
        StorageError: The cache directory cannot be written.
        EdgeKitError: The lowering failed; the error says why.
    """
    encoded = msgspec.json.encode(layout)
    name = f"{bundle.digest[:32]}-{TARGET}-{_version()}-{layout.dtype}-{hashlib.sha256(encoded).hexdigest()[:8]}"
    directory = cache_directory() / "lowered" / name
    if _is_whole(directory):
        _note_use(directory)
    else:
        try:
            directory.parent.mkdir(parents=True, exist_ok=True)
            with _locked(directory.with_name(f"{directory.name}.lock")):
                if not _is_whole(directory):  # nobody has made it in the meantime
                    logger.info("lowering %s for ONNX Runtime on this CPU (once)", bundle.path)
                    _remove_unused(directory.parent)
                    _make(bundle.file(GRAPH), directory, encoded.decode())
        except OSError as error:
            raise StorageError(
                f"cannot write the cache {str(directory.parent)!r}: {error.strerror or error}; set ${CACHE_VARIABLE} "
                "to a directory that can be written"
            ) from error
    return directory / GRAPH


def _note_use(directory: Path) -> None:
    with suppress(OSError):  # of a cache that can only be read
        os.utime(directory)


def _remove_unused(parent: Path) -> None:
    """Removes what nobody has loaded for a month: graphs of bundles that are gone, or of another version's code."""
    oldest = time.time() - UNUSED_DAYS * 24 * 3600
    for entry in parent.iterdir():
        with suppress(OSError):  # another process may be at it too
            if entry.stat().st_mtime < oldest:
                logger.info("removing the unused %s", entry)
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def _make(graph: Path, directory: Path, layout: str) -> None:
    """Lowers a graph into a directory that appears in one rename; the caller holds the lock."""
    partial = directory.with_name(f"{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    partial.mkdir()
    try:
        _run_lowering(graph, partial, layout)
        files = {
            path.name: FileRecord(size=path.stat().st_size, sha256=sha256_file(path)) for path in partial.iterdir()
        }
        _share_data(partial, directory, files)
        (partial / FILES).write_bytes(msgspec.json.encode(files))
        shutil.rmtree(directory, ignore_errors=True)
        partial.rename(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _share_data(partial: Path, directory: Path, files: dict[str, FileRecord]) -> None:
    """Keeps the weights of a bundle once, whatever the layouts of the caches that it was lowered for."""
    prefix = directory.name.rsplit("-", 2)[0]
    for sibling in directory.parent.glob(f"{glob.escape(prefix)}-*"):
        with suppress(OSError, msgspec.DecodeError, KeyError):  # a neighbour that is damaged, or another file system
            known = msgspec.json.decode((sibling / FILES).read_bytes(), type=dict[str, FileRecord])
            if known[GRAPH_DATA] == files[GRAPH_DATA] and sha256_file(sibling / GRAPH_DATA) == known[GRAPH_DATA].sha256:
                os.link(sibling / GRAPH_DATA, partial / "shared")
                (partial / "shared").replace(partial / GRAPH_DATA)
                return


def _is_whole(directory: Path) -> bool:
    """Says whether a lowered graph is there and as it was written."""
    try:
        files = msgspec.json.decode((directory / FILES).read_bytes(), type=dict[str, FileRecord])
        _verify_once(directory, directory.name, files, lambda: _check(directory, files))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, msgspec.DecodeError, CorruptArtifactError) as error:
        logger.warning("the lowered graph in %s cannot be used: %s", directory, error)
        return False
    return True


def _check(directory: Path, files: dict[str, FileRecord]) -> None:
    if set(files) != {GRAPH, GRAPH_DATA}:
        raise CorruptArtifactError(f"{FILES} names {sorted(files)}")
    for name, record in files.items():
        if sha256_file(directory / name) != record.sha256:
            raise CorruptArtifactError(f"{name} is not what was written")


def _verify_once(directory: Path, identity: str, names: Iterable[str], verify: Callable[[], None]) -> None:
    """Calls `verify` unless it has passed before for the same files of the same directory."""
    stamp = cache_directory() / "verified" / hashlib.sha256(str(directory.resolve()).encode()).hexdigest()[:32]
    # Taken before the files are read, so that a change meanwhile shows the next time.
    state = {"identity": identity}
    for name in names:
        status = (directory / name).stat()
        state[name] = f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}"
    encoded = msgspec.json.encode(state)
    try:
        if stamp.read_bytes() == encoded:
            return
    except OSError:
        logger.debug("no verification is remembered for %s", directory)
    verify()
    try:
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.write_bytes(encoded)
    except OSError as error:  # a read-only home costs a hash per load, nothing else
        logger.info("cannot remember that %s was verified: %s", directory, error)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Makes other processes wait; the system releases the lock of a process that dies."""
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _run_lowering(graph: Path, output: Path, layout: str) -> None:
    command = [sys.executable, "-m", "edgekit.export.lowering", TARGET]
    command += [str(graph.absolute()), str(output.absolute()), layout]
    try:
        # Python imports from the current directory first, which may be anybody's: it is the empty output instead.
        done = subprocess.run(command, cwd=output, capture_output=True, text=True, check=False)
    except OSError as error:
        raise EdgeKitError(f"lowering {str(graph)!r} failed: cannot start {sys.executable!r}: {error}") from error
    if done.returncode != 0:
        raise _failure(graph, done)


def _failure(graph: Path, done: subprocess.CompletedProcess[str]) -> EdgeKitError:
    """Turns the end of the lowering into the error that it met; see `edgekit.export.lowering.__main__`."""
    what = f"lowering {str(graph)!r} failed"
    if done.returncode < 0:
        return EdgeKitError(f"{what}: killed by {signal.Signals(-done.returncode).name}, perhaps for lack of memory")
    last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    code, separator, message = last.partition("\t")
    kinds = {kind.code: kind for kind in (UnsupportedError, DoesNotFitError, CorruptArtifactError, StorageError)}
    if not separator or code not in kinds:
        return EdgeKitError(f"{what}: {last}")
    hint = f"; free some space, or set ${CACHE_VARIABLE} to another directory" if code == StorageError.code else ""
    return kinds[code](f"{what}: {message}{hint}")


def _version() -> str:
    """Identifies the code that lowers and the ONNX Runtime that it is for."""
    spec = importlib.util.find_spec("edgekit.export")
    assert spec is not None and spec.submodule_search_locations is not None
    digest = hashlib.sha256(ort.__version__.encode())
    for source in sorted(Path(spec.submodule_search_locations[0]).rglob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]
