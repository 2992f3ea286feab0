"""Bundles of a few bytes: what the format promises does not depend on what is inside."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import pytest

from edgekit.bundle import (
    SCHEMA_VERSION,
    Bundle,
    Divergence,
    FileRecord,
    GenerationRecord,
    Manifest,
    MinimumVersions,
    ParityRecord,
    open_bundle,
    sha256_file,
    write_manifest,
)
from edgekit.errors import CorruptArtifactError, EdgeKitError, UnsupportedError, UsageError
from edgekit.rope import Llama3Scaling, RopeSpec
from edgekit.source import SourceRecord
from edgekit.spec import AttentionSpec, CacheGroup, DecoderSpec, LayerSpec, MlpSpec, NormSpec

Edit: TypeAlias = Callable[[dict[str, Any]], object]

CONTENTS = {
    "model.onnx": b"graph",
    "model.onnx.data": bytes(range(256)) * 300,
    "tokenizer.json": '{"ünïcode": 1}'.encode(),
    "generation.json": b'{"special_tokens": {"eos_token": "</s>"}, "defaults": {"temperature": 0.7}}',
}
NORM = NormSpec(kind="rms", epsilon=1e-5)
SCALING = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=64)
SPEC = DecoderSpec(
    family="llama",
    hidden_size=8,
    vocab_size=10,
    max_positions=512,
    layers=(
        LayerSpec(
            attention=AttentionSpec(
                num_heads=4,
                num_kv_heads=2,
                key_dim=2,
                value_dim=2,
                scale=0.5,
                qkv_bias=False,
                o_bias=False,
                rope=RopeSpec(theta=1e4, rotary_dim=2, scaling=SCALING),
                qk_norm=NORM,
            ),
            mlp=MlpSpec(width=12, activation="silu", gated=True, bias=False),
            norm=NORM,
        ),
    ),
    norm=NORM,
    tie_word_embeddings=True,
    eos_token_ids=(1, 2),
)


def _manifest() -> Manifest:
    return Manifest(
        schema_version=SCHEMA_VERSION,
        producer="edgekit 0.1.0",
        source=SourceRecord(kind="gguf", id="model.gguf", revision=None, digests={"model.gguf": "ab" * 32}),
        spec=SPEC,
        cache_groups=(CacheGroup(layers=(0,)),),
        kv_cache_dtype="fp32",
        attention_scores=False,
        storage={"embed_tokens.weight": "int8 symmetric block 32"},
        compression=({"step": "gqa", "groups": 2},),
        parity=ParityRecord(
            tokens=48,
            source=Divergence(max_abs_error=0.5, kl_divergence=0.01, top1_agreement=0.75, max_kl_divergence=1.0),
            stored=Divergence(max_abs_error=1e-5, kl_divergence=1e-11, top1_agreement=1.0, max_kl_divergence=1e-6),
        ),
        minimum_versions=MinimumVersions(onnx_opset=21, onnxruntime="1.20", tensorrt="10.3"),
        files={
            name: FileRecord(size=len(data), sha256=hashlib.sha256(data).hexdigest()) for name, data in CONTENTS.items()
        },
    )


def _write(directory: Path) -> Path:
    directory.mkdir(exist_ok=True)
    for name, data in CONTENTS.items():
        (directory / name).write_bytes(data)
    write_manifest(directory, _manifest())
    return directory


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return _write(tmp_path / "model.edge")


@pytest.fixture
def edit(path: Path) -> Callable[[Edit], None]:
    """Changes the manifest of the bundle."""

    def change(function: Edit) -> None:
        manifest = json.loads((path / "manifest.json").read_bytes())
        function(manifest)
        (path / "manifest.json").write_text(json.dumps(manifest))

    return change


def _refusal(kind: type[EdgeKitError], path: Path) -> str:
    with pytest.raises(EdgeKitError) as caught:
        open_bundle(path)
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_manifest_survives_writing_and_reading(path: Path) -> None:
    bundle = open_bundle(path)
    assert bundle.manifest == _manifest()
    assert bundle.path == path
    assert bundle.digest == sha256_file(path / "manifest.json")
    assert bundle.size_bytes == sum(len(data) for data in CONTENTS.values())
    bundle.verify()


def test_files_are_read_as_they_were_written(path: Path) -> None:
    bundle = open_bundle(path)
    assert bundle.read_text("tokenizer.json") == CONTENTS["tokenizer.json"].decode()
    assert bundle.read_text("chat_template.jinja") is None
    assert bundle.generation() == GenerationRecord(special_tokens={"eos_token": "</s>"}, defaults={"temperature": 0.7})


@pytest.mark.parametrize("text", [b"", b"[]", b'{"defaults": {}}', b'{"special_tokens": 1, "defaults": {}}', b'"\xff"'])
def test_a_malformed_generation_record_is_corrupt(text: bytes, path: Path) -> None:
    bundle = open_bundle(path)
    (path / "generation.json").write_bytes(text)
    with pytest.raises(CorruptArtifactError, match=r"^generation.json of bundle '.*' is not valid: "):
        bundle.generation()


def test_an_empty_file_has_the_well_known_sha256(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert sha256_file(tmp_path / "empty") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


@pytest.mark.parametrize("name", CONTENTS)
def test_a_changed_byte_is_found(name: str, path: Path) -> None:
    data = bytearray(CONTENTS[name])
    data[len(data) // 2] ^= 1
    (path / name).write_bytes(data)
    bundle = open_bundle(path)
    with pytest.raises(CorruptArtifactError, match=rf"^'{name}' in bundle .* has sha256 .* the manifest says"):
        bundle.verify()


@pytest.mark.parametrize("name", CONTENTS)
def test_a_missing_file_is_found(name: str, path: Path) -> None:
    (path / name).unlink()
    assert f"lacks {name!r}" in _refusal(CorruptArtifactError, path)


@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_of_another_size_is_found_without_hashing_it(change: int, path: Path) -> None:
    data = CONTENTS["model.onnx.data"]
    (path / "model.onnx.data").write_bytes((data + b"\0")[: len(data) + change])
    assert f"has {len(data) + change} bytes, the manifest says {len(data)}" in _refusal(CorruptArtifactError, path)


def test_a_directory_in_the_place_of_a_file_is_found(path: Path) -> None:
    (path / "model.onnx").unlink()
    (path / "model.onnx").mkdir()
    assert "lacks 'model.onnx'" in _refusal(CorruptArtifactError, path)


@pytest.mark.parametrize("name", CONTENTS)
def test_a_manifest_without_a_file_that_every_bundle_has_is_corrupt(
    name: str, path: Path, edit: Callable[[Edit], None]
) -> None:
    edit(lambda manifest: manifest["files"].pop(name))
    assert f"lists no {name}" in _refusal(CorruptArtifactError, path)


@pytest.mark.parametrize(
    "name",
    [
        "../secret",
        "sub/../../secret",
        "sub/../model.onnx",
        "..",
        ".",
        "",
        "..\\secret",
        "c:\\secret",
        "a\0b",
        "ABSOLUTE",
    ],
)
def test_a_name_that_leaves_the_bundle_is_refused(
    name: str, path: Path, tmp_path: Path, edit: Callable[[Edit], None]
) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"graph")
    name = str(secret) if name == "ABSOLUTE" else name
    edit(lambda manifest: manifest["files"].update({name: manifest["files"]["model.onnx"]}))
    assert f"names a file outside itself: {name!r}" in _refusal(CorruptArtifactError, path)


@pytest.mark.parametrize("link", ["model.onnx", "folder"])
def test_a_symbolic_link_out_of_the_bundle_is_refused(
    link: str, path: Path, tmp_path: Path, edit: Callable[[Edit], None]
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "model.onnx").write_bytes(CONTENTS["model.onnx"])
    if link == "folder":
        (path / "folder").symlink_to(tmp_path / "elsewhere")
        edit(lambda manifest: manifest["files"].update({"folder/model.onnx": manifest["files"]["model.onnx"]}))
    else:
        (path / "model.onnx").unlink()
        (path / "model.onnx").symlink_to(tmp_path / "elsewhere" / "model.onnx")
    assert "names a file outside itself" in _refusal(CorruptArtifactError, path)


def test_a_bundle_that_is_reached_through_a_link_opens(path: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(path)
    open_bundle(tmp_path / "link").verify()
    (path / "model.onnx").rename(path / "real")
    (path / "model.onnx").symlink_to("real")
    open_bundle(path).verify()


def test_an_older_bundle_is_refused_by_version(path: Path, edit: Callable[[Edit], None]) -> None:
    edit(lambda manifest: manifest.update(schema_version=1))
    assert "has schema_version 1, this EdgeKit reads 2; export it again" in _refusal(UnsupportedError, path)


@pytest.mark.parametrize("version", [3, 99])
def test_a_newer_bundle_is_refused_by_version_whatever_else_it_holds(
    version: int, path: Path, edit: Callable[[Edit], None]
) -> None:
    edit(lambda manifest: manifest.update(schema_version=version, new_key=[1, 2], spec="something else"))
    message = _refusal(UnsupportedError, path)
    assert f"has schema_version {version}, this EdgeKit reads up to 2; upgrade with: pip install -U edgekit" in message


@pytest.mark.parametrize(
    "change",
    [
        lambda manifest: manifest.update(new_key=1),
        lambda manifest: manifest.update(schema_version=0),
        lambda manifest: manifest.update(schema_version="1"),
        lambda manifest: manifest.pop("schema_version"),
        lambda manifest: manifest.pop("parity"),
        lambda manifest: manifest["spec"].update(hidden_size="8"),
        lambda manifest: manifest["spec"].update(hidden_size=-5),
        lambda manifest: manifest["spec"].update(max_positions=0),
        lambda manifest: manifest["spec"]["layers"][0]["attention"].update(num_kv_heads=0),
        lambda manifest: manifest.update(cache_groups=[]),
        lambda manifest: manifest.update(cache_groups=[{"layers": [0, 0]}]),
        lambda manifest: manifest.update(cache_groups=[{"layers": [0, 99]}]),
        lambda manifest: manifest["spec"]["layers"][0]["mlp"].update(activation="tanh"),
        lambda manifest: manifest["spec"]["layers"][0]["attention"]["rope"]["scaling"].update(type="yarn"),
        lambda manifest: manifest["files"].update({"model.onnx": {"size": 5}}),
        lambda manifest: manifest["files"].update({"model.onnx": None}),
        lambda manifest: manifest.update(files=[]),
    ],
)
def test_a_manifest_of_another_shape_is_corrupt(change: Edit, path: Path, edit: Callable[[Edit], None]) -> None:
    edit(change)
    assert "manifest.json of bundle" in _refusal(CorruptArtifactError, path)


@pytest.mark.parametrize(
    "text", [b"", b"{", b"null", b"[]", b"\xff\xfe{}", b'{"schema_version": 2, "producer": "\xff"}']
)
def test_a_manifest_that_is_not_json_is_corrupt(text: bytes, path: Path) -> None:
    (path / "manifest.json").write_bytes(text)
    assert "is not valid" in _refusal(CorruptArtifactError, path)


def test_a_truncated_manifest_is_corrupt_wherever_it_ends(path: Path) -> None:
    text = (path / "manifest.json").read_bytes()
    for length in range(0, len(text) - 1, 7):
        (path / "manifest.json").write_bytes(text[:length])
        _refusal(CorruptArtifactError, path)


def test_what_is_not_a_bundle_is_refused_with_what_it_is(path: Path, tmp_path: Path) -> None:
    assert "no such bundle" in _refusal(UsageError, tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "is not a bundle (no manifest.json); make a bundle with" in _refusal(UsageError, tmp_path / "empty")
    (tmp_path / "empty" / "config.json").touch()
    (tmp_path / "model.gguf").touch()
    for checkpoint in (tmp_path / "empty", tmp_path / "model.gguf"):
        assert "is a checkpoint and not a bundle; make a bundle of it with" in _refusal(UsageError, checkpoint)
    for name in ("model.onnx", "manifest.json"):
        message = _refusal(UsageError, path / name)
        assert message.endswith(f"is a file of a bundle; give the bundle's directory: {str(path)!r}")


def test_a_bundle_cannot_be_changed_in_memory(path: Path) -> None:
    bundle: Bundle = open_bundle(path)
    with pytest.raises(AttributeError):
        bundle.manifest.producer = "someone else"  # type: ignore[misc]
    assert msgspec.json.decode((path / "manifest.json").read_bytes(), type=Manifest) == bundle.manifest
