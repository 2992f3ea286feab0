"""A decoder of two layers small enough for sums by hand, and bundles of it that exist as a manifest only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edgekit.bundle import Bundle, Divergence, Manifest, MinimumVersions, ParityRecord
from edgekit.cache_layout import KVCacheDtype
from edgekit.rope import RopeSpec
from edgekit.source import SourceRecord
from edgekit.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, NormSpec

NORM = NormSpec(kind="rms", epsilon=1e-5)
DIVERGENCE = Divergence(max_abs_error=0.0, kl_divergence=0.0, top1_agreement=1.0, max_kl_divergence=0.01)
CONTEXT = 4096


def tiny_spec(windows: Sequence[int | None] = (None, None), *, tied: bool = False) -> DecoderSpec:
    """Returns a decoder of 320 tokens, 64 channels, 4 query heads, 2 KV heads of 16 channels and an MLP of 96.

    Args:
        windows: Sliding window of each layer.
        tied: Whether the head is the embedding.
    """
    layers = tuple(
        LayerSpec(
            attention=AttentionSpec(
                num_heads=4,
                num_kv_heads=2,
                key_dim=16,
                value_dim=16,
                scale=0.25,
                qkv_bias=False,
                o_bias=False,
                rope=RopeSpec(theta=1e4, rotary_dim=16),
                sliding_window=window,
            ),
            mlp=MlpSpec(width=96, activation="silu", gated=True, bias=False),
            norm=NORM,
        )
        for window in windows
    )
    return DecoderSpec(
        family="llama",
        hidden_size=64,
        vocab_size=320,
        max_positions=CONTEXT,
        layers=layers,
        norm=NORM,
        tie_word_embeddings=tied,
    )


def storage_of(spec: DecoderSpec, projections: str, tables: str) -> dict[str, str]:
    """Returns how the matrices of a spec are stored: the projections one way, embedding and head another."""
    is_table = {"embed_tokens.weight", "lm_head.weight"}
    return {
        name: tables if name in is_table else projections
        for name, shape in spec.tensor_shapes().items()
        if len(shape) == 2
    }


def unwritten_bundle(
    spec: DecoderSpec | None = None, *, kv_cache_dtype: KVCacheDtype = "fp32", attention_scores: bool = False
) -> Bundle:
    """Returns a bundle with a manifest and no files: whoever reads more than the manifest fails."""
    spec = spec or tiny_spec()
    manifest = Manifest(
        schema_version=2,
        producer="edgekit test",
        source=SourceRecord(kind="directory", id="tiny", revision=None, digests={}),
        spec=spec,
        cache_groups=spec.cache_groups(),
        kv_cache_dtype=kv_cache_dtype,
        attention_scores=attention_scores,
        storage=storage_of(spec, "int4 affine block 32", "int8 symmetric block 32"),
        compression=(),
        parity=ParityRecord(tokens=48, source=DIVERGENCE, stored=DIVERGENCE),
        minimum_versions=MinimumVersions(onnx_opset=18, onnxruntime="1.20", tensorrt="10"),
        files={},
    )
    return Bundle(path=Path("no.edge"), manifest=manifest, digest="0" * 64)
