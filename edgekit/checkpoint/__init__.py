"""Reading checkpoints: Hugging Face directories, GGUF files and repositories of the Hugging Face hub."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from edgekit.bundle import MANIFEST
from edgekit.checkpoint.base import Checkpoint, Origin, TokenizerFiles, Weight
from edgekit.errors import CorruptArtifactError, UnsupportedError, UsageError
from edgekit.families import Family, WeightSource, family_for
from edgekit.families.base import Layout
from edgekit.families.config import token_ids
from edgekit.source import SourceRecord
from edgekit.spec import DecoderSpec

__all__ = ["Checkpoint", "SourceRecord", "TokenizerFiles", "Weight", "open_checkpoint"]

_TokenIds: TypeAlias = int | list[int] | None

logger = logging.getLogger(__name__)


def open_checkpoint(
    path: str | os.PathLike[str], *, revision: str | None = None, trust_remote_code: bool = False
) -> Checkpoint:
    """Opens a checkpoint and checks that its tensors are those of its config.

    Args:
        path: A directory with config.json and safetensors, a .gguf file, or the id of a repository on the
            Hugging Face hub when nothing local has that name.
        revision: Branch, tag or commit of the repository.
        trust_remote_code: Accept a config that brings its own code. The code is never run; the model must be of a
            known family all the same.

    Raises:
        UsageError: There is no such path or repository, or it is not a checkpoint.
        UnsupportedError: The model is of an unknown family, or has a feature or format that is not implemented.
        CorruptArtifactError: A file is missing, truncated or contradicts another.
    """
    name, local = os.fspath(path), Path(path)
    if not local.exists() and not _looks_local(path):
        from edgekit.checkpoint.hub import download

        directory = download(name, revision)
        return _open_directory(directory, Origin("hub", name, directory.name), trust_remote_code=trust_remote_code)
    if not local.exists():
        raise UsageError(
            f"no such checkpoint: {name!r}; give a directory, a .gguf file or a Hugging Face repository id"
        )
    if revision is not None:
        raise UsageError(f"revision {revision!r} was given, but {name!r} is a local path; leave it out")
    if local.is_dir():
        origin = Origin("directory", local.resolve().name)
        return _open_directory(local, origin, trust_remote_code=trust_remote_code)
    if local.suffix != ".gguf":
        raise UsageError(f"{name!r} is neither a directory nor a .gguf file")
    return _open_gguf(local)


def _looks_local(path: str | os.PathLike[str]) -> bool:
    """Whether a path that does not exist was meant as one, rather than as ``owner/name`` of a repository."""
    name = os.fspath(path)
    parent = Path(name).parent
    return (
        isinstance(path, os.PathLike)
        or name.startswith((".", "~", os.sep))
        or name.endswith((os.sep, ".gguf"))
        or name.count("/") > 1
        or (parent != Path() and parent.is_dir())
    )


def _open_directory(directory: Path, origin: Origin, *, trust_remote_code: bool) -> Checkpoint:
    from edgekit.checkpoint.safetensors_files import SafetensorsFiles, read_json
    from edgekit.checkpoint.tokenizer_files import HuggingFaceTokenizer, generation_defaults

    if not (directory / "config.json").is_file():
        if (directory / MANIFEST).is_file():
            raise UsageError(
                f"{str(directory)!r} is a bundle already, and a bundle is made from a checkpoint; run it with: edgekit "
                "run BUNDLE PROMPT"
            )
        raise UsageError(f"{str(directory)!r} is not a checkpoint: it has no config.json")
    config = read_json(directory / "config.json")
    if config.get("auto_map") and not trust_remote_code:
        raise UnsupportedError(
            f"{origin.id!r} brings its own model code (auto_map), which is never run; pass --trust-remote-code "
            f"(trust_remote_code=True) if that code computes what model_type {config.get('model_type')!r} does"
        )
    family = family_for(config)
    spec = _with_end_tokens(family.spec(config), generation_defaults(directory))
    tensors = SafetensorsFiles(directory)
    return Checkpoint(
        family=family,
        spec=spec,
        tensors=tensors,
        sources=_respelled(_sources(family, spec, "huggingface"), family, tensors.shapes),
        tokenizer=HuggingFaceTokenizer(directory),
        origin=origin,
    )


def _open_gguf(path: Path) -> Checkpoint:
    from edgekit.checkpoint.gguf_config import gguf_config
    from edgekit.checkpoint.gguf_container import read_container
    from edgekit.checkpoint.gguf_names import gguf_sources
    from edgekit.checkpoint.gguf_rope import with_rope_factors
    from edgekit.checkpoint.gguf_tensors import GgufTensors
    from edgekit.checkpoint.gguf_tokenizer import GgufTokenizer

    container = read_container(path)
    architecture = str(container.metadata.get("general.architecture"))
    config = gguf_config(container, architecture, path)
    family = family_for(config)
    spec = with_rope_factors(family.spec(config), container, path)
    tensors = GgufTensors(path, container)
    return Checkpoint(
        family=family,
        spec=spec,
        tensors=tensors,
        sources=gguf_sources(_sources(family, spec, "gguf"), architecture, spec, tensors.shapes),
        tokenizer=GgufTokenizer(path, container.metadata),
        origin=Origin("gguf", path.name),
    )


def _sources(family: Family, spec: DecoderSpec, layout: Layout) -> dict[str, WeightSource]:
    """Sources of every tensor, the head included even when the config says that it is tied."""
    return family.sources(msgspec.structs.replace(spec, tie_word_embeddings=False), layout)


def _respelled(
    sources: Mapping[str, WeightSource], family: Family, stored: Mapping[str, Any]
) -> dict[str, WeightSource]:
    """Takes the spelling of another transformers version where that is the one stored."""
    respelled = {}
    for canonical, source in sources.items():
        module, _, parameter = source.name.rpartition(".")
        other = f"{family.respelled.get(module, module)}.{parameter}"
        name = other if source.name not in stored and other in stored else source.name
        respelled[canonical] = replace(source, name=name)
    return respelled


def _with_end_tokens(spec: DecoderSpec, generation: Mapping[str, Any]) -> DecoderSpec:
    """Adds the end tokens of the generation config to those of the config."""
    try:
        more = token_ids(msgspec.convert(generation.get("eos_token_id"), _TokenIds))
    except msgspec.ValidationError as error:
        raise CorruptArtifactError(f"generation_config.json has an unusable eos_token_id: {error}") from error
    ends = sorted({*spec.eos_token_ids, *more})
    # Some configs say −1 for none.
    unknown = [token for token in ends if not 0 <= token < spec.vocab_size]
    if unknown:
        logger.warning("eos_token_id %s is not in the vocabulary of %d and ends no text", unknown, spec.vocab_size)
    return msgspec.structs.replace(spec, eos_token_ids=tuple(token for token in ends if token not in unknown))
