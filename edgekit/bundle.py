"""The bundle: a directory with one portable ONNX graph, its tokenizer, and a manifest that vouches for both.

    model.edge/
      manifest.json        who made it from what, the spec, how weights are stored, parity, sha256 of every file
      model.onnx           the graph; weights in model.onnx.data
      tokenizer.json  tokenizer_config.json  chat_template.jinja  generation.json

A bundle appears in one rename or not at all. Reading one checks that every file named in the manifest lies
inside the directory and has the recorded size and sha256. docs/bundle.md specifies the format.
"""

from __future__ import annotations

import glob
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import msgspec

from edgekit.cache_layout import KVCacheDtype
from edgekit.errors import CorruptArtifactError, StorageError, UnsupportedError, UsageError
from edgekit.source import SourceRecord
from edgekit.spec import CacheGroup, DecoderSpec

SCHEMA_VERSION = 2
MANIFEST = "manifest.json"
GRAPH = "model.onnx"
GRAPH_DATA = "model.onnx.data"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
GENERATION = "generation.json"
REQUIRED_FILES = (GRAPH, GRAPH_DATA, TOKENIZER, GENERATION)


class FileRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Size in bytes and sha256 (hex) of a file."""

    size: int
    sha256: str


class Divergence(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far the exported graph's logits are from others, on one token sequence.

    Attributes:
        max_abs_error: Largest difference of a logit.
        kl_divergence: Mean over positions of KL(other ‖ graph), in nats.
        top1_agreement: Fraction of positions with the same most likely token.
        max_kl_divergence: The tolerance.
    """

    max_abs_error: float
    kl_divergence: float
    top1_agreement: float
    max_kl_divergence: float


class ParityRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The check that every export ends with.

    Attributes:
        tokens: Length of the token sequence.
        source: Against the source model: what the storage of the weights costs.
        stored: Against the reference decoder on the weights as they are stored: whether the graph is right.
    """

    tokens: int
    source: Divergence
    stored: Divergence


class MinimumVersions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The oldest software that reads the graph."""

    onnx_opset: int
    onnxruntime: str
    tensorrt: str


class GenerationRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Contents of generation.json.

    Attributes:
        special_tokens: Texts of the special tokens by the names that chat templates use, such as ``eos_token``.
        defaults: Sampling defaults and token ids as the model's authors published them, for information: EdgeKit
            decodes greedily unless told otherwise.
    """

    special_tokens: dict[str, str]
    defaults: dict[str, Any]


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Contents of manifest.json.

    Attributes:
        schema_version: Version of this format.
        producer: Name and version of the program that wrote it.
        source: Where the weights came from.
        spec: The decoder.
        cache_groups: Partition of the layers: those of the spec.
        kv_cache_dtype: How the portable graph stores keys and values.
        attention_scores: Whether the graph says how much attention slots and new tokens get.
        storage: How each matrix is stored, such as ``int4 affine block 32``, by canonical name.
        compression: Steps that changed the model before export, with their parameters.
        parity: The check that every export ends with.
        minimum_versions: What a reader needs.
        files: Every other file of the bundle by its name.
    """

    schema_version: int
    producer: str
    source: SourceRecord
    spec: DecoderSpec
    cache_groups: tuple[CacheGroup, ...]
    kv_cache_dtype: KVCacheDtype
    attention_scores: bool
    storage: dict[str, str]
    compression: tuple[dict[str, Any], ...]
    parity: ParityRecord
    minimum_versions: MinimumVersions
    files: dict[str, FileRecord]


class _SchemaVersion(msgspec.Struct):
    schema_version: Annotated[int, msgspec.Meta(ge=1)]


class _Producer(msgspec.Struct):
    producer: str


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """An opened bundle.

    Attributes:
        path: Its directory.
        manifest: Its description.
        digest: sha256 of the manifest, which covers every other file: the bundle's identity.
    """

    path: Path
    manifest: Manifest
    digest: str

    def file(self, name: str) -> Path:
        """Returns the path of a file that the manifest lists."""
        return self.path / name

    def read_text(self, name: str) -> str | None:
        """Returns a listed text file, or None when the bundle has no such file."""
        return self.file(name).read_text(encoding="utf-8") if name in self.manifest.files else None

    def generation(self) -> GenerationRecord:
        """Returns generation.json.

        Raises:
            CorruptArtifactError: It is malformed.
        """
        try:
            return msgspec.json.decode(self.file(GENERATION).read_bytes(), type=GenerationRecord)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CorruptArtifactError(f"{GENERATION} of bundle {str(self.path)!r} is not valid: {error}") from error

    @property
    def size_bytes(self) -> int:
        """Bytes of all files, manifest excluded."""
        return sum(record.size for record in self.manifest.files.values())

    def verify(self) -> None:
        """Hashes every file.

        Raises:
            CorruptArtifactError: A file's contents are not what the manifest recorded.
        """
        for name, record in self.manifest.files.items():
            found = sha256_file(self.file(name))
            if found != record.sha256:
                raise CorruptArtifactError(
                    f"{name!r} in bundle {str(self.path)!r} has sha256 {found[:12]}…, the manifest says "
                    f"{record.sha256[:12]}…; export or copy the bundle again"
                )


def open_bundle(path: str | os.PathLike[str]) -> Bundle:
    """Reads the manifest and checks that its files are there, inside the bundle, with the recorded sizes.

    Args:
        path: The bundle's directory.

    Raises:
        UsageError: There is no such directory, or it is not a bundle.
        UnsupportedError: A newer or a much older version of EdgeKit wrote it.
        CorruptArtifactError: The manifest is malformed, or a file is missing, outside or of another size.
    """
    directory = Path(path)
    if not directory.exists():
        raise UsageError(f"no such bundle: {str(directory)!r}; make one with: edgekit export MODEL OUT")
    if not (directory / MANIFEST).is_file():
        raise UsageError(_what_it_is_instead(directory))
    text = (directory / MANIFEST).read_bytes()
    manifest = _decode_manifest(directory, text)
    for name in REQUIRED_FILES:
        if name not in manifest.files:
            raise CorruptArtifactError(f"{MANIFEST} of bundle {str(directory)!r} lists no {name}; export it again")
    for name, record in manifest.files.items():
        _check_file(directory, name, record)
    return Bundle(path=directory, manifest=manifest, digest=hashlib.sha256(text).hexdigest())


def _what_it_is_instead(path: Path) -> str:
    """Says what a path is that is no bundle, and what to do."""
    if path.is_file() and (path.parent / MANIFEST).is_file():
        return f"{str(path)!r} is a file of a bundle; give the bundle's directory: {str(path.parent)!r}"
    if path.suffix == ".gguf" or (path / "config.json").is_file():
        return f"{str(path)!r} is a checkpoint and not a bundle; make a bundle of it with: edgekit export MODEL OUT"
    return f"{str(path)!r} is not a bundle (no {MANIFEST}); make a bundle with: edgekit export MODEL OUT"


def _decode_manifest(directory: Path, text: bytes) -> Manifest:
    try:
        version = msgspec.json.decode(text, type=_SchemaVersion).schema_version
        if version > SCHEMA_VERSION:
            raise UnsupportedError(
                f"bundle {str(directory)!r} has schema_version {version}, this EdgeKit reads up to {SCHEMA_VERSION}; "
                "upgrade with: pip install -U edgekit"
            )
        if version < SCHEMA_VERSION:
            raise UnsupportedError(
                f"bundle {str(directory)!r} has schema_version {version}, this EdgeKit reads {SCHEMA_VERSION}; export "
                "it again"
            )
        manifest = msgspec.json.decode(text, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptArtifactError(f"{MANIFEST} of bundle {str(directory)!r} is not valid: {error}") from error
    if manifest.cache_groups != manifest.spec.cache_groups():
        raise CorruptArtifactError(
            f"{MANIFEST} of bundle {str(directory)!r} is not valid: its cache groups are not those of its spec, the "
            "layers with one sliding window each; export or copy the bundle again"
        )
    return manifest


def _check_file(directory: Path, name: str, record: FileRecord) -> None:
    pure = PurePosixPath(name)
    outside = pure.is_absolute() or ".." in pure.parts or not pure.parts or any(char in name for char in "\\\0")
    if outside or not (directory / name).resolve().is_relative_to(directory.resolve()):
        raise CorruptArtifactError(f"bundle {str(directory)!r} names a file outside itself: {name!r}; do not use it")
    file = directory / name
    if not file.is_file():
        raise CorruptArtifactError(f"bundle {str(directory)!r} lacks {name!r}; export or copy it again")
    size = file.stat().st_size
    if size != record.size:
        raise CorruptArtifactError(
            f"{name!r} in bundle {str(directory)!r} has {size} bytes, the manifest says {record.size}; "
            "export or copy the bundle again"
        )


_OLD = "-old"
_in_use: set[Path] = set()
"""Staging directories of this process, whose threads may write several at once."""


@contextmanager
def staged_directory(target: Path, *, force: bool) -> Iterator[Path]:
    """Gives a directory beside `target` that replaces it when the block ends well, and vanishes otherwise.

    Args:
        target: Where the result is wanted.
        force: Whether an existing result may be replaced.

    Raises:
        UsageError: The target exists and force is False or it is not a bundle, or its parent does not exist.
        StorageError: The disk refused a write.
    """
    target = Path(os.path.realpath(target))  # a link is followed, as any program that writes to it would
    if not target.parent.is_dir():
        raise UsageError(f"no such directory: {str(target.parent)!r}; create it first")
    _clear_abandoned(target)
    _check_free(target, force=force)
    staging = target.with_name(f".{target.name}.partial-{os.getpid()}-{secrets.token_hex(4)}")
    _in_use.add(staging)
    try:
        staging.mkdir()
        yield staging
        _flush(staging)
        _check_free(target, force=force)  # what has appeared in the meantime is not ours to replace either
        _replace(staging, target)
    except OSError as error:
        # Its own words name the file, which may be one that was read.
        raise StorageError(f"cannot write {str(target)!r}: {error}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        _in_use.discard(staging)


def _check_free(target: Path, *, force: bool) -> None:
    if target.exists() and not force:
        raise UsageError(f"output {str(target)!r} exists; pass --force to replace it")
    if target.exists() and not _is_bundle(target) and not (target.is_dir() and not any(target.iterdir())):
        raise UsageError(f"output {str(target)!r} exists and is not a bundle; --force replaces bundles only")


def _flush(directory: Path) -> None:
    """Brings the files to the disk before the rename that makes them count."""
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _is_bundle(directory: Path) -> bool:
    """Whether EdgeKit wrote the manifest.json inside: many programs have a file of that name."""
    try:
        producer = msgspec.json.decode((directory / MANIFEST).read_bytes(), type=_Producer).producer
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return False
    return producer.startswith("edgekit ")


def _replace(staging: Path, target: Path) -> None:
    # Two renames: a directory cannot be replaced in one, and the old bundle must not mix with the new. Who is killed
    # between them leaves the old one under another name, from which the next export restores it.
    old = staging.with_name(f"{staging.name}{_OLD}")
    replaced = target.exists()
    if replaced:
        target.rename(old)
    try:
        staging.rename(target)
    except OSError:
        if replaced:
            old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _clear_abandoned(target: Path) -> None:
    """Removes what killed processes left, and restores a bundle that one was about to replace.

    Those still running keep theirs. In containers a process often has the number of the one that was killed before it,
    so for its own number a process goes by what it remembers.
    """
    for leftover in target.parent.glob(f"{glob.escape(f'.{target.name}.partial-')}*"):
        process = leftover.name.removeprefix(f".{target.name}.partial-").split("-")[0]
        own = process == str(os.getpid())
        staging = leftover.with_name(leftover.name.removesuffix(_OLD))
        alive = staging in _in_use if own else process.isdigit() and _is_running(int(process))
        if alive:
            continue
        if leftover.name.endswith(_OLD) and not target.exists():
            leftover.rename(target)
        shutil.rmtree(leftover, ignore_errors=True)


def _is_running(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Writes manifest.json, the last file of a bundle."""
    encoded = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    (directory / MANIFEST).write_bytes(encoded)


def sha256_file(path: Path) -> str:
    """Returns the sha256 of a file in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
