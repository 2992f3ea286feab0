"""`edgekit inspect`: what a bundle holds."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgekit.cli.options import bundle_argument, json_option, verbose_option
from edgekit.cli.output import megabytes, parity_line, print_json, print_table, storage_counts, storage_line

if TYPE_CHECKING:
    from edgekit.bundle import Bundle
    from edgekit.spec import DecoderSpec

_PARTS = ("embedding", "attention", "mlp", "norms", "head")


@click.command
@bundle_argument
@click.option("--verify", is_flag=True, help="Hash every file and compare with the manifest.")
@json_option
@verbose_option
def inspect(*, bundle: Path, verify: bool, json: bool) -> None:
    """Describes BUNDLE: model, source, bytes, storage, parity and compression."""
    from edgekit.bundle import open_bundle

    opened = open_bundle(bundle)
    if verify:
        opened.verify()
    parts = _bytes_of_parts(opened)
    if json:
        print_json(_description(opened, parts, verified=verify))
        return
    for label, value in _summary(opened, verified=verify):
        click.echo(f"{label:<12}{value}")
    stored = sum(parts.values())
    click.echo()
    print_table(
        ("weights", "size", "share"),
        [(name, megabytes(size), f"{size / stored:.1%}") for name, size in parts.items()],
    )
    click.echo()
    print_table(
        ("file", "size", "sha256"),
        [(name, megabytes(file.size), file.sha256[:12]) for name, file in opened.manifest.files.items()],
    )


def _bytes_of_parts(bundle: Bundle) -> dict[str, int]:
    """Returns the stored bytes of the weights of each part, read from the graph.

    Raises:
        CorruptArtifactError: The graph cannot be read.
    """
    import onnx_ir as ir

    from edgekit.bundle import GRAPH
    from edgekit.errors import CorruptArtifactError

    try:
        weights = ir.load(bundle.file(GRAPH)).graph.initializers
    except Exception as error:  # protobuf's errors share no narrower base
        raise CorruptArtifactError(
            f"{GRAPH} of bundle {str(bundle.path)!r} cannot be read: {error}; check the bundle with --verify"
        ) from error
    parts = dict.fromkeys(_PARTS, 0)
    for name, value in weights.items():
        if isinstance(value.const_value, ir.ExternalTensor):
            parts[_part(name)] += value.const_value.nbytes
    return parts


def _part(weight: str) -> str:
    """Returns the part that a weight belongs to, by its canonical name."""
    if weight.startswith("embed_tokens."):
        return "embedding"
    if weight.startswith("lm_head."):
        return "head"
    if "norm." in weight:
        return "norms"
    return "attention" if ".self_attn." in weight else "mlp"


def _summary(bundle: Bundle, *, verified: bool) -> list[tuple[str, str]]:
    """Returns labels and what to say about them."""
    manifest, needs = bundle.manifest, bundle.manifest.minimum_versions
    source = manifest.source
    revision = "" if source.revision is None else f" at {source.revision}"
    return [
        ("bundle", f"{bundle.path}, {megabytes(bundle.size_bytes)}, {bundle.digest[:12]}"),
        ("verified", "every file has the recorded sha256" if verified else "not asked for (--verify)"),
        ("producer", f"{manifest.producer}, schema {manifest.schema_version}"),
        ("source", f"{source.id} ({source.kind}{revision})"),
        *_model(manifest.spec),
        ("storage", storage_line(manifest.storage)),
        ("parity", parity_line(manifest.parity)),
        ("compression", ", ".join(map(str, manifest.compression)) or "none"),
        ("needs", f"ONNX opset {needs.onnx_opset}, ONNX Runtime {needs.onnxruntime} or TensorRT {needs.tensorrt}"),
    ]


def _model(spec: DecoderSpec) -> list[tuple[str, str]]:
    attention, mlp = [layer.attention for layer in spec.layers], [layer.mlp for layer in spec.layers]
    heads, kv_heads = _span(a.num_heads for a in attention), _span(a.num_kv_heads for a in attention)
    key_dim, value_dim = _span(a.key_dim for a in attention), _span(a.value_dim for a in attention)
    activations = ", ".join(sorted({m.activation for m in mlp}))
    head = "tied to the embedding" if spec.tie_word_embeddings else "of its own"
    return [
        ("model", f"{spec.family}, {_parameters(spec):,} parameters, {len(spec.layers)} layers of {spec.hidden_size}"),
        ("attention", f"{heads} heads, {kv_heads} KV heads, {key_dim} channels per key, {value_dim} per value"),
        ("mlp", f"{_span(m.width for m in mlp)} channels, {activations}"),
        ("vocabulary", f"{spec.vocab_size} tokens, head {head}"),
        ("context", f"{spec.max_positions} tokens"),
    ]


def _description(bundle: Bundle, parts: dict[str, int], *, verified: bool) -> dict[str, Any]:
    import msgspec

    manifest: dict[str, Any] = msgspec.to_builtins(bundle.manifest)
    return {
        "path": str(bundle.path),
        "digest": bundle.digest,
        "verified": verified,
        "size_bytes": bundle.size_bytes,
        "parameters": _parameters(bundle.manifest.spec),
        "weight_bytes": parts,
        "storage_counts": storage_counts(bundle.manifest.storage),
        **manifest,
    }


def _parameters(spec: DecoderSpec) -> int:
    return sum(map(math.prod, spec.tensor_shapes().values()))


def _span(values: Iterable[int]) -> str:
    """Returns one number, or the smallest and the largest where layers differ."""
    found = sorted(set(values))
    return str(found[0]) if len(found) == 1 else f"{found[0]}-{found[-1]}"
