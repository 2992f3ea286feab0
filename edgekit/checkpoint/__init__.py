"""Reading checkpoints: Hugging Face directories, GGUF files and repositories of the Hugging Face hub."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from edgekit.checkpoint.base import Checkpoint, Origin, TokenizerFiles, Weight
from edgekit.errors import CorruptArtifactError, UnsupportedError, UsageError
from edgekit.families import Family, WeightSource, family_for
from edgekit.families.base import Layout
from edgekit.families.config import token_ids
from edgekit.source import SourceRecord
from edgekit.spec import DecoderSpec

__all__ = ["Checkpoint", "SourceRecord", "TokenizerFiles", "Weight", "open_checkpoint"]

_HUB_FILES = ("*.json", "*.safetensors", "*.jinja")


def open_checkpoint(
    path: str | os.PathLike[str], *, revision: str | None = None, trust_remote_code: bool = False
) -> Checkpoint:
    """Opens a checkpoint and checks that its tensors are those of its config; no weight is read.

    Args:
        path: A directory with config.json and safetensors, a .gguf file, or the id of a repository on the
            Hugging Face hub when nothing local has that name.
        revision: Branch, tag or commit of the repository.
        trust_remote_code: Accept a config that brings its own code. The code is never run; the model must be of a
            known family all the same.

    Raises:
        UsageError: There is no such path or repository.
        UnsupportedError: The model is of an unknown family, or has a feature or format that is not implemented.
        CorruptArtifactError: A file is missing, truncated or contradicts another.
    """
    local = Path(path)
    if local.exists() and revision is not None:
        raise UsageError(f"revision {revision!r} was given for {str(path)!r}, which is a local path; leave it out")
    if local.is_dir():
        name = local.resolve().name
        return _open_directory(local, Origin("directory", name), trust_remote_code=trust_remote_code)
    if local.is_file():
        if local.suffix != ".gguf":
            raise UsageError(f"{str(path)!r} is neither a directory nor a .gguf file")
        return _open_gguf(local)
    name = os.fspath(path)
    if isinstance(path, os.PathLike) or _looks_local(name):
        raise UsageError(f"{name!r} does not exist; give a directory, a .gguf file or a Hugging Face repository id")
    directory = _download(name, revision)
    return _open_directory(directory, Origin("hub", name, directory.name), trust_remote_code=trust_remote_code)


def _looks_local(name: str) -> bool:
    return name.startswith((".", "~", os.sep)) or name.endswith((os.sep, ".gguf")) or name.count("/") > 1


def _open_directory(directory: Path, origin: Origin, *, trust_remote_code: bool) -> Checkpoint:
    from edgekit.checkpoint.safetensors_files import SafetensorsFiles, read_json
    from edgekit.checkpoint.tokenizer_files import HuggingFaceTokenizer, generation_defaults

    config = read_json(directory / "config.json")
    if config.get("auto_map") and not trust_remote_code:
        raise UnsupportedError(
            f"{directory} brings its own model code (auto_map); pass trust_remote_code if it computes what "
            f"model_type {config.get('model_type')!r} does: the code itself is never run"
        )
    family = family_for(config)
    spec = _with_end_tokens(family.spec(config), generation_defaults(directory))
    tensors = SafetensorsFiles(directory)
    sources = _respell(_sources(family, spec, "huggingface"), family, tensors.shapes)
    return Checkpoint(
        family=family,
        spec=spec,
        tensors=tensors,
        sources=sources,
        tokenizer=HuggingFaceTokenizer(directory),
        origin=origin,
    )


def _open_gguf(path: Path) -> Checkpoint:
    from edgekit.checkpoint import gguf_file
    from edgekit.checkpoint.gguf_container import read_container
    from edgekit.checkpoint.gguf_tokenizer import GgufTokenizer

    container = read_container(path)
    family, architecture = gguf_file.gguf_family(container, path)
    spec = family.spec(gguf_file.gguf_config(container, architecture, path))
    spec = gguf_file.scaled_rope(spec, container, path)
    sources = gguf_file.gguf_sources(_sources(family, spec, "gguf"), architecture, len(spec.layers))
    return Checkpoint(
        family=family,
        spec=spec,
        tensors=gguf_file.GgufTensors(path, container),
        sources=sources,
        tokenizer=GgufTokenizer(path, container.metadata),
        origin=Origin("gguf", path.name),
    )


def _sources(family: Family, spec: DecoderSpec, layout: Layout) -> dict[str, WeightSource]:
    """Sources of every tensor, the head included even when it is tied."""
    return family.sources(msgspec.structs.replace(spec, tie_word_embeddings=False), layout)


def _respell(
    sources: Mapping[str, WeightSource], family: Family, stored: Mapping[str, Any]
) -> dict[str, WeightSource]:
    """Takes the spelling of another transformers version where that is the one stored."""
    respelled = {}
    for canonical, source in sources.items():
        module, _, parameter = source.name.rpartition(".")
        other = f"{family.respelled.get(module, module)}.{parameter}"
        name = source.name if source.name in stored else other
        respelled[canonical] = WeightSource(name=name if name in stored else source.name, rows=source.rows)
    return respelled


def _with_end_tokens(spec: DecoderSpec, generation: Mapping[str, Any]) -> DecoderSpec:
    try:
        more = token_ids(msgspec.convert(generation.get("eos_token_id"), int | list[int] | None))
    except msgspec.ValidationError as error:
        raise CorruptArtifactError(f"generation_config.json has an unusable eos_token_id: {error}") from error
    return msgspec.structs.replace(spec, eos_token_ids=tuple(sorted({*spec.eos_token_ids, *more})))


def _download(repository: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=list(_HUB_FILES)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(
            f"{repository!r} is neither a local path nor a Hugging Face repository that can be reached: {reason}"
        ) from error
