"""export: a checkpoint becomes a bundle. The whole step on one page."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    TOKENIZER_CONFIG,
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
from edgekit.compress.decoder import ModelWeights, stream_logits
from edgekit.export.data_file import DataFile
from edgekit.export.graph.builder import OPSET
from edgekit.export.graph.decoder import build_graph
from edgekit.export.graph.kv_cache import GraphOptions
from edgekit.export.parity import (
    MAX_CACHE_KL_DIVERGENCE,
    MAX_GRAPH_KL_DIVERGENCE,
    MAX_KL_DIVERGENCE,
    TEXT,
    compare,
    graph_logits,
)
from edgekit.export.quantize import quantize
from edgekit.export.storage_plan import QuantizationOptions, keeps_blocks, plan_storage
from edgekit.export.weights import BITS, Storage, StoredWeight, check_range, read_stored, store
from edgekit.progress import Progress
from edgekit.spec import DecoderSpec
from edgekit.version import __version__

PARITY_TOKENS = 48

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Options of `export_bundle`.

    Attributes:
        quantization: How matrices are stored.
        graph: How the KV cache is stored, and what the graph gives besides logits.
        force: Replace an existing bundle.
        revision: Branch, tag or commit when the source is a hub id.
        trust_remote_code: Accept a config that names custom code; the code itself never runs.
    """

    quantization: QuantizationOptions = QuantizationOptions()
    graph: GraphOptions = GraphOptions()
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
        with _timed("weights"):
            weights, data_sha256 = write_graph(checkpoint, storage, staging, progress, options.graph)
        _write_text_files(checkpoint, staging)
        stored = _StoredModel(checkpoint.spec, weights, staging)
        parity = _check_parity(checkpoint, stored, staging, options.graph, progress)
        progress("hash", 0, 1)
        with _timed("hash"):
            manifest = _manifest(checkpoint, storage, parity, staging, data_sha256, options.graph)
        write_manifest(staging, manifest)
    return open_bundle(output)


@contextmanager
def _timed(what: str) -> Iterator[None]:
    """Logs what a stage of the export took."""
    started = time.perf_counter()
    yield
    logger.info("%s took %.1f s", what, time.perf_counter() - started)


def write_graph(
    checkpoint: Checkpoint,
    storage: Mapping[str, Storage],
    directory: Path,
    progress: Progress,
    options: GraphOptions = GraphOptions(),
) -> tuple[dict[str, StoredWeight], str]:
    """Writes the portable graph and its weights; returns their places by name, and the data file's sha256 in hex.

    Args:
        checkpoint: The model.
        storage: How each tensor is stored, by canonical name.
        directory: Where model.onnx and its data file go.
        progress: Told which weight is being written.
        options: See `GraphOptions`.

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
    model = build_graph(checkpoint.spec, weights, __version__, options)
    sha256 = data.write(directory, lambda name, done, total: progress(f"weights: {name}", done, total))
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
    _write_json(directory / GENERATION, generation)
    # Not for EdgeKit: it makes the directory one that transformers' AutoTokenizer reads.
    transformers = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": checkpoint.spec.max_positions,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
    }
    _write_json(directory / TOKENIZER_CONFIG, {**transformers, **files.special_tokens})


def _write_json(path: Path, value: GenerationRecord | dict[str, Any]) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=1))


@dataclass(frozen=True)
class _StoredModel:
    """The weights of a bundle that is being written, as they were stored."""

    spec: DecoderSpec
    weights: Mapping[str, StoredWeight]
    directory: Path

    def tensor(self, name: str) -> npt.NDArray[np.float32] | QuantizedBlocks:
        """Reads one weight."""
        return read_stored(self.weights[name], self.directory)


class _Watched:
    """A model that reports the reading of each of its weights."""

    def __init__(self, model: ModelWeights, stage: str, progress: Progress) -> None:
        self.spec = model.spec
        self._model, self._stage, self._progress = model, stage, progress
        self._done, self._total = 0, len(model.spec.tensor_shapes())

    def tensor(self, name: str) -> npt.NDArray[np.float32] | QuantizedBlocks:
        """Reads one weight."""
        self._progress(f"{self._stage}: {name}", self._done, self._total)
        self._done += 1
        return self._model.tensor(name)


def _check_parity(
    checkpoint: Checkpoint, stored: _StoredModel, directory: Path, options: GraphOptions, progress: Progress
) -> ParityRecord:
    token_ids = _parity_tokens(checkpoint, directory)
    progress("parity, graph", 0, 1)
    with _timed("parity, graph"):
        got = graph_logits(directory / GRAPH, checkpoint.spec, token_ids, options.kv_cache_dtype)
        unrounded = got if options.kv_cache_dtype == "fp32" else _logits_of_fp32_cache(stored, token_ids)
    with _timed("parity, stored"):
        expected = stream_logits(_Watched(stored, "parity, stored", progress), token_ids[None])[0]
    graph = compare(expected, unrounded, MAX_GRAPH_KL_DIVERGENCE, "what its weights say")
    with _timed("parity, source"):
        expected = stream_logits(_Watched(checkpoint, "parity, source", progress), token_ids[None])[0]
    # Blocks that were kept lose nothing but the rounding of scales and offsets to fp16.
    precisions = {
        "fp16" if keeps_blocks(checkpoint.block_format(name), weight.storage) else weight.storage.precision
        for name, weight in stored.weights.items()
        if len(weight.shape) == 2
    }
    tolerances = [MAX_CACHE_KL_DIVERGENCE[options.kv_cache_dtype]]
    tolerances += [MAX_KL_DIVERGENCE[precision] for precision in precisions]
    source = compare(expected, got, max(tolerances), "the model")
    return ParityRecord(tokens=len(token_ids), source=source, stored=graph)


def _logits_of_fp32_cache(stored: _StoredModel, token_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Runs the graph with a float32 cache: what a narrower one rounds would hide whether the graph is right."""
    twin = stored.directory / f".fp32-cache.{GRAPH}"
    try:
        ir.save(build_graph(stored.spec, dict(stored.weights), __version__, GraphOptions()), twin)
        return graph_logits(twin, stored.spec, token_ids)
    finally:
        twin.unlink(missing_ok=True)


def _parity_tokens(checkpoint: Checkpoint, directory: Path) -> npt.NDArray[np.int64]:
    """The start of a fixed text as the model's own tokens."""
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(directory / TOKENIZER)).encode(TEXT, add_special_tokens=False).ids
    known = [token for token in ids if token < checkpoint.spec.vocab_size]
    return np.array(known[:PARITY_TOKENS], np.int64)


def _manifest(
    checkpoint: Checkpoint,
    storage: dict[str, Storage],
    parity: ParityRecord,
    directory: Path,
    data_sha256: str,
    options: GraphOptions,
) -> Manifest:
    shapes = checkpoint.spec.tensor_shapes()
    names = sorted(path.name for path in directory.iterdir() if path.name != MANIFEST)
    return Manifest(
        schema_version=SCHEMA_VERSION,
        producer=f"edgekit {__version__}",
        source=checkpoint.source,
        spec=checkpoint.spec,
        cache_groups=checkpoint.spec.cache_groups(),
        kv_cache_dtype=options.kv_cache_dtype,
        attention_scores=options.attention_scores,
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
