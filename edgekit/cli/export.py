"""`edgekit export`: a checkpoint becomes a bundle."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgekit.cli.options import collected, json_option, verbose_option
from edgekit.cli.output import megabytes, parity_line, print_json, progress_bar, storage_counts, storage_line
from edgekit.errors import MissingExtraError

if TYPE_CHECKING:
    from edgekit.bundle import Bundle

# What the export imports and the base installation lacks.
_EXTRA_PACKAGES = ("torch", "safetensors", "gguf", "huggingface_hub")

_QUANTIZATION = {
    "precision": click.option(
        "--precision",
        type=click.Choice(["fp32", "fp16", "int8", "int4"]),
        default="int4",
        show_default=True,
        help="How the projections are stored. The embedding and the head take int8 instead of int4.",
    ),
    "scheme": click.option(
        "--scheme",
        type=click.Choice(["symmetric", "affine"]),
        help="Blocks without or with an offset; affine unless given.",
    ),
    "block_size": click.option(
        "--block-size",
        type=click.Choice([16, 32, 64, 128]),
        help="Inputs that share a scale; 32 unless given.",
    ),
    "keep": click.option(
        "--keep",
        multiple=True,
        metavar="PATTERN",
        help="Keep these modules in fp16, such as 'layers.0.*'; may be repeated.",
    ),
    "requantize": click.option(
        "--requantize", is_flag=True, help="Round the blocks of a GGUF once more where the options differ from them."
    ),
}

_GRAPH = {
    "kv_cache_dtype": click.option(
        "--kv-cache-dtype",
        type=click.Choice(["fp32", "fp16", "int8"]),
        default="fp32",
        show_default=True,
        help="How the graph stores keys and values; commands that load the bundle may choose another.",
    ),
    "attention_scores": click.option(
        "--attention-scores",
        is_flag=True,
        help="Let the graph say which tokens are attended to; the KV policies snapkv and laq go by it.",
    ),
}

_SOURCE = {
    "revision": click.option("--revision", metavar="R", help="Branch, tag or commit of a Hugging Face repository."),
    "trust_remote_code": click.option(
        "--trust-remote-code", is_flag=True, help="Accept a config that names its own model code, which is never run."
    ),
}


@click.command
@click.argument("model")
@click.argument("out", type=click.Path(path_type=Path))
@collected("quantization", _QUANTIZATION)
@collected("graph", _GRAPH)
@collected("source", _SOURCE)
@click.option("--force", is_flag=True, help="Replace an existing bundle.")
@json_option
@verbose_option
def export(
    *,
    model: str,
    out: Path,
    quantization: Mapping[str, Any],
    graph: Mapping[str, Any],
    source: Mapping[str, Any],
    force: bool,
    json: bool,
) -> None:
    """Exports MODEL to the bundle OUT.

    MODEL is a directory with safetensors, a .gguf file or the id of a Hugging Face repository.
    """
    for package in _EXTRA_PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(package, "export")
    started = time.perf_counter()
    with progress_bar() as progress:
        from edgekit.export.exporter import ExportOptions, export_bundle
        from edgekit.export.graph.kv_cache import GraphOptions
        from edgekit.export.storage_plan import QuantizationOptions

        options = ExportOptions(
            quantization=QuantizationOptions(**quantization),
            graph=GraphOptions(**graph),
            force=force,
            **source,
        )
        bundle = export_bundle(model, out, options, progress)
    seconds = time.perf_counter() - started
    if json:
        print_json(_result(bundle, seconds))
        return
    click.echo(f"{bundle.path}: {megabytes(bundle.size_bytes)} in {seconds:.1f} s")
    click.echo(f"storage: {storage_line(bundle.manifest.storage)}")
    click.echo(f"parity: {parity_line(bundle.manifest.parity)}")


def _result(bundle: Bundle, seconds: float) -> dict[str, Any]:
    import msgspec

    return {
        "path": str(bundle.path),
        "digest": bundle.digest,
        "size_bytes": bundle.size_bytes,
        "storage": storage_counts(bundle.manifest.storage),
        "parity": msgspec.to_builtins(bundle.manifest.parity),
        "seconds": seconds,
    }
