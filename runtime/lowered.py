"""The lowered graph of a bundle, made once per machine and kept in the user's cache directory.

The portable graph runs anywhere and is tuned for nothing. Rewriting it takes a second and a graph library, so
it is done in a process of its own; later loads find the result by the bundle's digest.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import onnxruntime as ort
import platformdirs

from edgekit.bundle import GRAPH, Bundle, staged_directory
from edgekit.errors import CorruptArtifactError, DoesNotFitError, EdgeKitError, StorageError, UnsupportedError

TARGET = "ort-cpu"
CACHE_VARIABLE = "EDGEKIT_CACHE_DIR"

logger = logging.getLogger(__name__)


def cache_directory() -> Path:
    """Returns where EdgeKit keeps what it can make again; $EDGEKIT_CACHE_DIR overrides the platform's place."""
    override = os.environ.get(CACHE_VARIABLE)
    return Path(override) if override else Path(platformdirs.user_cache_dir("edgekit"))


def verify_once(bundle: Bundle) -> None:
    """Hashes a bundle's files unless the same files, by size and modification time, were found right before.

    Raises:
        CorruptArtifactError: A file's contents are not what the manifest recorded.
    """
    stamp = cache_directory() / "verified" / hashlib.sha256(str(bundle.path.resolve()).encode()).hexdigest()[:32]
    state = {"digest": bundle.digest}
    for name in bundle.manifest.files:
        status = bundle.file(name).stat()
        state[name] = f"{status.st_size} {status.st_mtime_ns} {status.st_ino}"
    encoded = msgspec.json.encode(state)
    if stamp.is_file() and stamp.read_bytes() == encoded:
        return
    bundle.verify()
    try:
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.write_bytes(encoded)
    except OSError as error:  # a read-only home costs a hash per load, nothing else
        logger.warning("cannot remember that the bundle was verified: %s", error)


def lowered_graph(bundle: Bundle) -> Path:
    """Returns the graph lowered for ONNX Runtime on this CPU, making it the first time.

    Args:
        bundle: A verified bundle.

    Raises:
        EdgeKitError: The lowering failed; the error says why.
    """
    directory = cache_directory() / "lowered" / f"{bundle.digest[:32]}-{TARGET}-{_version()}"
    if not (directory / GRAPH).is_file():
        logger.info("lowering %s for ONNX Runtime on this CPU (once)", bundle.path)
        try:
            directory.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"cannot write the cache {str(directory.parent)!r}: {error.strerror}; set ${CACHE_VARIABLE} to a "
                "directory that can be written"
            ) from error
        with staged_directory(directory, force=True) as staging:
            _run_lowering(bundle.file(GRAPH), staging)
    return directory / GRAPH


def _run_lowering(graph: Path, output: Path) -> None:
    command = [sys.executable, "-m", "edgekit.export.lowering", TARGET, str(graph.absolute()), str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        kinds = (UnsupportedError, DoesNotFitError, CorruptArtifactError)
        kind = next((kind for kind in kinds if kind.exit_code == done.returncode), EdgeKitError)
        reason = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit status {done.returncode}"
        raise kind(f"lowering {str(graph)!r} failed: {reason}")


def _version() -> str:
    """Identifies the lowering's code and the ONNX Runtime that it is for."""
    spec = importlib.util.find_spec("edgekit.export.lowering")
    assert spec is not None and spec.submodule_search_locations is not None
    digest = hashlib.sha256(ort.__version__.encode())
    for source in sorted(Path(spec.submodule_search_locations[0]).glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]
