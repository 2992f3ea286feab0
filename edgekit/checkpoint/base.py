"""`Checkpoint`: a model's weights by canonical name, whatever format stores them."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from edgekit.blocks import QuantizedBlocks, Scheme
from edgekit.bundle import sha256_file
from edgekit.errors import CorruptArtifactError, UnsupportedError
from edgekit.families import Family, WeightSource
from edgekit.families.base import RowIndices
from edgekit.source import SourceRecord
from edgekit.spec import DecoderSpec

Weight: TypeAlias = "npt.NDArray[np.float32] | QuantizedBlocks"

# Buffers that older versions of transformers saved; they follow from the config.
_BUFFERS = re.compile(r".*\.(rotary_emb\.inv_freq|attention\.bias|attention\.masked_bias)")
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"


class TokenizerFiles(NamedTuple):
    """What accompanies a saved tokenizer.json.

    Attributes:
        chat_template: Jinja source, or None for a model without one.
        special_tokens: Texts of the special tokens by the names that templates use: ``bos_token``, ``eos_token``, ...
        generation: Sampling defaults and token ids, with the key names of generation_config.json.
    """

    chat_template: str | None
    special_tokens: dict[str, str]
    generation: dict[str, Any]


class TensorStore(Protocol):
    """The tensors of a checkpoint's files, by stored name."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every stored tensor."""

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that hold them."""

    def read(self, name: str, rows: RowIndices | None) -> Weight:
        """Reads one tensor, or the given rows of it."""

    def close(self) -> None:
        """Releases the files."""


class TokenizerStore(Protocol):
    """The tokenizer of a checkpoint."""

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that it is read from."""

    def save(self, directory: Path) -> TokenizerFiles:
        """Writes tokenizer.json into a directory."""


class BlockFormat(NamedTuple):
    """How a quantized matrix is stored: bits per code, columns that share a scale, and whether they have offsets."""

    bits: Literal[4, 8]
    block_size: int
    scheme: Scheme


class Origin(NamedTuple):
    """Kind, id and revision of a `SourceRecord`."""

    kind: Literal["directory", "gguf", "hub"]
    id: str
    revision: str | None = None


class Checkpoint:
    """An open checkpoint. Weights are memory-mapped, read one at a time and never kept.

    Attributes:
        family: The model's family.
        spec: The model.
    """

    def __init__(
        self,
        *,
        family: Family,
        spec: DecoderSpec,
        tensors: TensorStore,
        sources: Mapping[str, WeightSource],
        tokenizer: TokenizerStore,
        origin: Origin,
    ) -> None:
        """Checks that the stored tensors are exactly the spec's; see `open_checkpoint`.

        Args:
            family: The model's family.
            spec: What the config says.
            tensors: The stored tensors.
            sources: Stored name and rows for every canonical name of `spec` and for ``lm_head.weight``.
            tokenizer: The tokenizer.
            origin: Where all of it came from.

        Raises:
            CorruptArtifactError: A tensor is missing or has the wrong shape.
            UnsupportedError: A stored tensor belongs to no part of the spec.
        """
        self.family = family
        self._tensors = tensors
        self._tokenizer = tokenizer
        self._origin = origin
        untied = msgspec.structs.replace(spec, tie_word_embeddings=False)
        has_head = sources[_HEAD].name in tensors.shapes
        self._check(untied if has_head else spec, sources)
        # Some writers repeat a tied head. One that differs from the embedding is a head: transformers unties it, too.
        if spec.tie_word_embeddings and has_head and not _same(tensors, sources[_HEAD], sources[_EMBEDDING]):
            spec = untied
        self.spec = spec
        self._sources = {name: sources[name] for name in spec.tensor_shapes()}

    def __enter__(self) -> Checkpoint:
        """Returns itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the files."""
        self.close()

    def close(self) -> None:
        """Closes the files; weights that were read stay valid."""
        self._tensors.close()

    @cached_property
    def source(self) -> SourceRecord:
        """Where the checkpoint came from, with the digest of every file; hashed on first use."""
        files = sorted({*self._tensors.files, *self._tokenizer.files})
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            digests = pool.map(sha256_file, files)
        return SourceRecord(
            kind=self._origin.kind,
            id=self._origin.id,
            revision=self._origin.revision,
            digests={file.name: digest for file, digest in zip(files, digests, strict=True)},
        )

    def tensor(self, name: str) -> Weight:
        """Reads one weight.

        Args:
            name: A canonical name of ``spec.tensor_shapes()``.

        Returns:
            Float32 of the spec's shape, or the blocks of a matrix that is stored quantized.

        Raises:
            CorruptArtifactError: A value is not a number, or is infinite in the format that it is read into.
        """
        source = self._sources[name]
        weight = self._tensors.read(source.name, source.rows)
        if source.addend:
            assert not isinstance(weight, QuantizedBlocks), "norms are never stored in blocks"
            weight = weight + np.float32(source.addend)
        numbers = (weight.scale, weight.offset) if isinstance(weight, QuantizedBlocks) else (weight,)
        if not all(np.isfinite(array).all() for array in numbers if array is not None):
            raise CorruptArtifactError(
                f"checkpoint {self._origin.id!r} has values that are infinite or not numbers in tensor {source.name!r}"
            )
        return weight

    def block_format(self, name: str) -> BlockFormat | None:
        """Tells how a matrix is quantized in its file, or None for a float one; reads a single row.

        Args:
            name: A canonical name of ``spec.tensor_shapes()``.
        """
        source = self._sources[name]
        first = np.zeros(1, np.int64) if source.rows is None else source.rows[:1]
        row = self._tensors.read(source.name, first)
        if not isinstance(row, QuantizedBlocks):
            return None
        return BlockFormat(bits=row.bits, block_size=row.block_size, scheme=row.scheme)

    def save_tokenizer(self, directory: Path) -> TokenizerFiles:
        """Writes tokenizer.json into an existing directory.

        Args:
            directory: Where to write it.

        Returns:
            The chat template and the generation defaults.

        Raises:
            UnsupportedError: The tokenizer is missing or of a kind that is not implemented.
        """
        return self._tokenizer.save(directory)

    def _check(self, spec: DecoderSpec, sources: Mapping[str, WeightSource]) -> None:
        """Checks that the stored tensors are exactly those of a spec."""
        where, stored, expected = f"checkpoint {self._origin.id!r}", self._tensors.shapes, spec.tensor_shapes()
        rows = Counter[str]()  # of each stored tensor, over all the canonical ones that share it
        for name, shape in expected.items():
            rows[sources[name].name] += shape[0]
        for name, shape in expected.items():
            stored_name = sources[name].name
            wanted, got = (rows[stored_name], *shape[1:]), stored.get(stored_name)
            if got is None:
                raise CorruptArtifactError(f"{where} has no tensor {stored_name!r}; its config wants shape {wanted}")
            if got != wanted:
                raise CorruptArtifactError(f"{where} has tensor {stored_name!r} of shape {got}; expected {wanted}")
        unused = sorted(name for name in stored.keys() - rows.keys() if not _BUFFERS.fullmatch(name))
        if unused:
            raise UnsupportedError(
                f"{where} has {len(unused)} tensors that {self.family.name} does not use, such as {unused[0]!r}"
            )


def _same(tensors: TensorStore, left: WeightSource, right: WeightSource) -> bool:
    first, second = (tensors.read(source.name, source.rows) for source in (left, right))
    assert not isinstance(first, QuantizedBlocks), "a GGUF file is tied exactly when it has no head"
    assert not isinstance(second, QuantizedBlocks)
    return np.array_equal(first, second)
