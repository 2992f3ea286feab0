from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from edgekit.bundle import GRAPH, GRAPH_DATA, open_bundle

Invoke: TypeAlias = Callable[..., Any]
MakeBundle: TypeAlias = Callable[..., Path]
TinyCheckpoint: TypeAlias = Callable[[str], Path]


@pytest.fixture
def copy(bundle: Path, tmp_path: Path) -> Path:
    """A bundle that may be damaged."""
    return Path(shutil.copytree(bundle, tmp_path / "copy.edge"))


def test_the_summary_describes_model_source_storage_and_parity(invoke: Invoke, bundle: Path, tiny_llama: Path) -> None:
    outcome = invoke("inspect", bundle)
    assert (outcome.status, outcome.stderr) == (0, "")
    lines = {line[:12].strip(): line[12:] for line in outcome.stdout.partition("\n\n")[0].splitlines()}
    opened = open_bundle(bundle)
    assert lines["bundle"] == f"{bundle}, {opened.size_bytes / 1e6:.1f} MB, {opened.digest[:12]}"
    assert lines["verified"] == "not asked for (--verify)"
    assert lines["source"] == f"{tiny_llama.name} (directory)"
    # 2 × (64·64 q + 2·32·64 kv + 64·64 o + 3·64·96 mlp + 2·64 norms) + 2·320·64 + 64
    assert lines["model"] == "llama, 102,720 parameters, 2 layers of 64"
    assert lines["attention"] == "4 heads, 2 KV heads, 16 channels per key, 16 per value"
    assert lines["mlp"] == "96 channels, silu"
    assert lines["vocabulary"] == "320 tokens, head of its own"
    assert lines["context"] == "256 tokens"
    assert lines["storage"] == "16 × fp32"
    assert lines["parity"].startswith("KL divergence ")
    assert lines["compression"] == "none"
    files = outcome.stdout.partition("file")[2]
    assert all(f"{name} " in files and record.sha256[:12] in files for name, record in opened.manifest.files.items())


def test_the_bytes_of_float_weights_are_four_per_parameter(invoke: Invoke, bundle: Path) -> None:
    layers = 2
    assert invoke("inspect", bundle, "--json").json["weight_bytes"] == {
        "embedding": 4 * 320 * 64,
        "attention": 4 * layers * (64 * 64 + 2 * 32 * 64 + 64 * 64),
        "mlp": 4 * layers * 3 * 64 * 96,
        "norms": 4 * (2 * layers * 64 + 64),
        "head": 4 * 320 * 64,
    }


def test_the_bytes_of_blocks_are_codes_scales_and_offsets(
    invoke: Invoke, make_bundle: MakeBundle, tiny_checkpoint: TinyCheckpoint
) -> None:
    parts = invoke("inspect", make_bundle(tiny_checkpoint("qwen3"), "int4"), "--json").json["weight_bytes"]
    layers, per_block_of_32 = 2, 32 // 2 + 2 + 2
    assert parts["mlp"] == layers * 3 * 64 * 96 // 32 * per_block_of_32
    assert parts["attention"] == layers * (2 * 128 * 64 + 2 * 64 * 64) // 32 * per_block_of_32
    assert parts["embedding"] == 320 * 64 // 32 * (32 + 2)
    assert parts["head"] == 0
    # Two norms per layer, one per head width for queries and keys each, and the last one.
    assert parts["norms"] == 4 * (layers * (2 * 64 + 2 * 32) + 64)


@pytest.mark.parametrize("variant", ["llama_bias", "gpt_neox"])
def test_biases_count_with_their_part_and_nothing_is_left_out(
    invoke: Invoke, make_bundle: MakeBundle, tiny_checkpoint: TinyCheckpoint, variant: str
) -> None:
    bundle = make_bundle(tiny_checkpoint(variant), "fp32")
    shapes = open_bundle(bundle).manifest.spec.tensor_shapes()
    described = invoke("inspect", bundle, "--json").json
    assert described["parameters"] == sum(map(math.prod, shapes.values()))
    assert sum(described["weight_bytes"].values()) == 4 * described["parameters"]
    mlp = sum(math.prod(shape) for name, shape in shapes.items() if ".mlp." in name)
    assert described["weight_bytes"]["mlp"] == 4 * mlp


def test_json_has_the_whole_manifest(invoke: Invoke, bundle: Path) -> None:
    described = invoke("inspect", bundle, "--json").json
    manifest = json.loads((bundle / "manifest.json").read_text())
    assert {name: described[name] for name in manifest} == manifest
    assert described["digest"] == open_bundle(bundle).digest
    assert described["storage_counts"] == {"fp32": 16}
    assert described["verified"] is False


def test_layers_that_differ_are_given_as_a_range(invoke: Invoke, copy: Path) -> None:
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["spec"]["layers"][1]["mlp"].update(width=64, activation="gelu")
    manifest["compression"] = [{"pass": "width", "channels": 64}]
    (copy / "manifest.json").write_text(json.dumps(manifest))
    printed = invoke("inspect", copy).stdout
    assert "mlp         64-96 channels, gelu, silu\n" in printed
    assert "compression {'pass': 'width', 'channels': 64}\n" in printed


def test_verify_passes_a_whole_bundle(invoke: Invoke, bundle: Path) -> None:
    outcome = invoke("inspect", bundle, "--verify")
    assert outcome.status == 0
    assert "verified    every file has the recorded sha256\n" in outcome.stdout
    assert invoke("inspect", bundle, "--verify", "--json").json["verified"] is True


@pytest.mark.parametrize("name", [GRAPH, GRAPH_DATA, "tokenizer.json"])
def test_verify_finds_a_changed_byte(invoke: Invoke, copy: Path, name: str) -> None:
    content = bytearray((copy / name).read_bytes())
    content[len(content) // 2] ^= 1
    (copy / name).write_bytes(content)
    outcome = invoke("inspect", copy, "--verify", "--json")
    assert outcome.status == 5
    assert outcome.json["error"]["code"] == "corrupt"
    assert name in outcome.json["error"]["message"]


def test_a_graph_that_cannot_be_read_is_corrupt(invoke: Invoke, copy: Path) -> None:
    size = (copy / GRAPH).stat().st_size
    (copy / GRAPH).write_bytes(b"\xff" * size)
    outcome = invoke("inspect", copy)
    assert (outcome.status, outcome.stdout) == (5, "")
    assert outcome.stderr.startswith(f"error: {GRAPH} of bundle ")
    assert outcome.stderr.count("\n") == 1
