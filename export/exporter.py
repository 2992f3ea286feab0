"""export: a checkpoint becomes a bundle. The whole step on one page."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from edgekit.blocks import QuantizedBlocks
from edgekit.bundle import (
    CHAT_TEMPLATE,
    GENERATION,
    GRAPH,
    GRAPH_DATA,
    MANIFEST,
    SCHEMA_VERSION,
    TOKENIZER,
    Bundle,
    FileRecord,
    GenerationRecord,
    Manifest,
    MinimumVersions,
    ParityRecord,
    open_bundle,
    sha256_file,
    staged_directory,
    write_manifest,
)
from edgekit.checkpoint import Checkpoint, open_checkpoint
from edgekit.compress.decoder import stream_logits
from edgekit.export.data_file import DataFile
from edgekit.export.graph.builder import OPSET
from edgekit.export.graph.decoder import build_graph
from edgekit.export.parity import MAX_GRAPH_KL_DIVERGENCE, MAX_KL_DIVERGENCE, TEXT, compare, graph_logits
from edgekit.export.quantize import quantize
from edgekit.export.storage_plan import QuantizationOptions, keeps_blocks, plan_storage
from edgekit.export.weights import BITS, Storage, StoredWeight, check_range, read_stored, store
from edgekit.progress import Progress
from edgekit.spec import DecoderSpec
from edgekit.version import __version__

PARITY_TOKENS = 48


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Options of `export_bundle`.

    Attributes:
        quantization: How matrices are stored.
        force: Replace an existing bundle.
        revision: Branch, tag or commit when the source is a hub id.
        trust_remote_code: Accept a config that names custom code; the code itself never runs.
    """

    quantization: QuantizationOptions = QuantizationOptions()
    force: bool = False
    revision: str | None = None
    trust_remote_code: bool = False


def export_bundle(
    source: str | os.PathLike[str], output: str | os.PathLike[str], options: ExportOptions, progress: Progress
) -> Bundle:
    """Exports a checkpoint.

    Args:
        source: A directory, a .gguf file or a Hugging Face hub id.
        output: The bundle's directory.
        options: See `ExportOptions`.
        progress: Told what is being done.

    Returns:
        The finished bundle.

    Raises:
        UsageError: A path is missing or taken, or an option is wrong.
        UnsupportedError: The model has something that EdgeKit does not know.
        CorruptArtifactError: A file of the checkpoint is damaged.
        ParityError: The graph's logits are not the model's; nothing is written.
        StorageError: The disk refused a write; nothing is left of it.
    """
    with (
        staged_directory(Path(output), force=options.force) as staging,
        open_checkpoint(source, revision=options.revision, trust_remote_code=options.trust_remote_code) as checkpoint,
    ):
        storage = plan_storage(checkpoint, options.quantization)
        weights, data_sha256 = write_graph(checkpoint, storage, staging, progress)
        _write_text_files(checkpoint, staging)
        parity = _check_parity(checkpoint, _StoredModel(checkpoint.spec, weights, staging), staging, progress)
        progress("hash", 0, 1)
        write_manifest(staging, _manifest(checkpoint, storage, parity, staging, data_sha256))
    return open_bundle(output)


def write_graph(
    checkpoint: Checkpoint, storage: Mapping[str, Storage], directory: Path, progress: Progress
) -> tuple[dict[str, StoredWeight], str]:
    """Writes the portable graph and its weights; returns their places by name, and the data file's sha256 in hex.

    Args:
        checkpoint: The model.
        storage: How each tensor is stored, by canonical name.
        directory: Where model.onnx and its data file go.
        progress: Told which weight is being written.

    Raises:
        CorruptArtifactError: A weight is not finite.
        UnsupportedError: A weight is too large for its storage.
        StorageError: The disk refused the write.
    """
    data = DataFile(GRAPH_DATA)
    weights = {
        name: _store(data, checkpoint, name, shape, storage[name])
        for name, shape in checkpoint.spec.tensor_shapes().items()
    }
    model = build_graph(checkpoint.spec, weights, __version__)
    sha256 = data.write(directory, progress)
    ir.save(model, directory / GRAPH)
    return weights, sha256


def _store(data: DataFile, checkpoint: Checkpoint, name: str, shape: tuple[int, ...], storage: Storage) -> StoredWeight:
    def load() -> npt.NDArray[np.float32] | QuantizedBlocks:
        weight = checkpoint.tensor(name)
        if isinstance(weight, QuantizedBlocks):
            if keeps_blocks(weight, storage):
                return weight
            weight = weight.dequantize()
        check_range(name, weight, storage)
        if not storage.quantized:
            return weight
        return quantize(weight, BITS[storage.precision], storage.block_size, storage.scheme)

    return store(data, name, shape, storage, load)


def _write_text_files(checkpoint: Checkpoint, directory: Path) -> None:
    files = checkpoint.save_tokenizer(directory)
    if files.chat_template is not None:
        (directory / CHAT_TEMPLATE).write_text(files.chat_template, encoding="utf-8")
    generation = GenerationRecord(special_tokens=files.special_tokens, defaults=files.generation)
    (directory / GENERATION).write_bytes(msgspec.json.format(msgspec.json.encode(generation), indent=1))


@dataclass(frozen=True)
class _StoredModel:
    """The weights of a bundle that is being written, as they were stored."""

    spec: DecoderSpec
    weights: Mapping[str, StoredWeight]
    directory: Path

    def tensor(self, name: str) -> npt.NDArray[np.float32] | QuantizedBlocks:
        """Reads one weight."""
        return read_stored(self.weights[name], self.directory)


def _check_parity(checkpoint: Checkpoint, stored: _StoredModel, directory: Path, progress: Progress) -> ParityRecord:
    token_ids = _parity_tokens(checkpoint, directory)
    progress("parity: graph", 0, 3)
    got = graph_logits(directory / GRAPH, checkpoint.spec, token_ids)
    progress("parity: stored weights", 1, 3)
    expected = stream_logits(stored, token_ids[None])[0]
    graph = compare(expected, got, MAX_GRAPH_KL_DIVERGENCE, "what its weights say")
    progress("parity: source weights", 2, 3)
    expected = stream_logits(checkpoint, token_ids[None])[0]
    # Blocks that were kept lose nothing but the rounding of their offsets to fp16.
    precisions = {
        "fp16" if keeps_blocks(checkpoint.block_format(name), weight.storage) else weight.storage.precision
        for name, weight in stored.weights.items()
        if len(weight.shape) == 2
    }
    source = compare(expected, got, max(MAX_KL_DIVERGENCE[precision] for precision in precisions), "the model")
    return ParityRecord(tokens=len(token_ids), source=source, stored=graph)


def _parity_tokens(checkpoint: Checkpoint, directory: Path) -> npt.NDArray[np.int64]:
    """The start of a fixed text as the model's own tokens."""
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(directory / TOKENIZER)).encode(TEXT, add_special_tokens=False).ids
    known = [token for token in ids if token < checkpoint.spec.vocab_size]
    return np.array(known[:PARITY_TOKENS], np.int64)


def _manifest(
    checkpoint: Checkpoint, storage: dict[str, Storage], parity: ParityRecord, directory: Path, data_sha256: str
) -> Manifest:
    shapes = checkpoint.spec.tensor_shapes()
    names = sorted(path.name for path in directory.iterdir() if path.name != MANIFEST)
    return Manifest(
        schema_version=SCHEMA_VERSION,
        producer=f"edgekit {__version__}",
        source=checkpoint.source,
        spec=checkpoint.spec,
        cache_groups=checkpoint.spec.cache_groups(),
        storage={name: str(storage[name]) for name, shape in shapes.items() if len(shape) == 2},
        compression=(),
        parity=parity,
        minimum_versions=MinimumVersions(onnx_opset=OPSET, onnxruntime="1.20", tensorrt="10.3"),
        files={
            name: FileRecord(
                size=(directory / name).stat().st_size,
                # Of the bytes that were meant: hashing what is read back would vouch for a faulty disk, too.
                sha256=data_sha256 if name == GRAPH_DATA else sha256_file(directory / name),
            )
            for name in names
        },
    )
