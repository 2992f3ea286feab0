"""What an export leaves behind: a whole bundle that says what it is, or nothing."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto

from edgekit import contract
from edgekit.bundle import Bundle, open_bundle, sha256_file
from edgekit.checkpoint import open_checkpoint
from edgekit.errors import CorruptArtifactError, EdgeKitError, ParityError, StorageError, UnsupportedError, UsageError
from edgekit.export.exporter import ExportOptions, export_bundle
from edgekit.export.graph.attention import rope_frequencies
from edgekit.export.graph.mlp import gated_activation
from edgekit.export.parity import MAX_KL_DIVERGENCE, TEXT, compare, graph_logits
from edgekit.export.storage_plan import QuantizationOptions
from edgekit.rope import RopeSpec
from edgekit.version import __version__

Export: TypeAlias = Callable[..., Bundle]


@pytest.fixture
def export(tmp_path: Path, tiny_llama: Path) -> Export:
    """Exports tiny_llama, or another checkpoint, to out.edge in an otherwise empty directory."""
    (tmp_path / "work").mkdir()

    def run(source: Path = tiny_llama, *, force: bool = False, **quantization: Any) -> Bundle:
        options = ExportOptions(quantization=QuantizationOptions(**quantization), force=force)
        return export_bundle(source, tmp_path / "work" / "out.edge", options, lambda *_: None)

    return run


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "work" / "out.edge"


def _names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_bundle_holds_the_files_that_its_manifest_vouches_for(export: Export, tiny_llama: Path, output: Path) -> None:
    bundle = export()
    assert bundle.path == output
    assert _names(output.parent) == ["out.edge"]
    listed = ["chat_template.jinja", "generation.json", "model.onnx", "model.onnx.data", "tokenizer.json"]
    listed.append("tokenizer_config.json")
    assert _names(output) == sorted([*listed, "manifest.json"])
    assert sorted(bundle.manifest.files) == listed
    for name, record in bundle.manifest.files.items():
        assert (record.size, record.sha256) == (bundle.file(name).stat().st_size, sha256_file(bundle.file(name)))
    bundle.verify()
    assert bundle.digest == sha256_file(output / "manifest.json")
    assert bundle.file("tokenizer.json").read_bytes() == (tiny_llama / "tokenizer.json").read_bytes()
    assert bundle.read_text("chat_template.jinja") == (tiny_llama / "chat_template.jinja").read_text()


def test_the_manifest_says_what_was_exported_and_how(export: Export, tiny_llama: Path) -> None:
    manifest = export(keep=("layers.1.*",)).manifest
    with open_checkpoint(tiny_llama) as checkpoint:
        assert manifest.spec == checkpoint.spec
        assert manifest.source == checkpoint.source
    assert manifest.producer == f"edgekit {__version__}"
    assert [group.layers for group in manifest.cache_groups] == [(0, 1)]
    assert manifest.compression == ()
    assert manifest.minimum_versions.onnx_opset == 21
    matrices = {name for name, shape in manifest.spec.tensor_shapes().items() if len(shape) == 2}
    assert manifest.storage.keys() == matrices
    for name, storage in manifest.storage.items():
        expected = "int8 symmetric block 32" if "layers" not in name else "int4 affine block 32"
        assert storage == ("fp16" if name.startswith("layers.1.") else expected)
    # The user's folders are nobody's business.
    assert str(tiny_llama.parent) not in json.dumps(msgspec.to_builtins(manifest))


@pytest.mark.parametrize("variant", ["llama", "qwen3", "gpt_neox_tied"])
def test_the_same_checkpoint_gives_the_same_bytes(
    variant: str, export: Export, tiny_checkpoint: Any, output: Path
) -> None:
    first = export(tiny_checkpoint(variant))
    contents = {name: (output / name).read_bytes() for name in _names(output)}
    second = export(tiny_checkpoint(variant), force=True)
    assert {name: (output / name).read_bytes() for name in _names(output)} == contents
    assert second.digest == first.digest


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8", "int4"])
def test_the_portable_graph_is_standard_onnx(precision: str, every_tiny_checkpoint: Path, export_tiny: Any) -> None:
    bundle: Bundle = export_tiny(every_tiny_checkpoint, precision=precision)
    path = bundle.file("model.onnx")
    onnx.checker.check_model(str(path), full_check=True)
    model = onnx.load(path, load_external_data=False)
    assert [(opset.domain, opset.version) for opset in model.opset_import] == [("", 21)]
    assert {node.domain for node in model.graph.node} == {""}
    assert model.ir_version == 10
    assert (model.producer_name, model.producer_version) == ("edgekit", __version__)
    spec = bundle.manifest.spec
    layers, groups = range(len(spec.layers)), range(len(spec.cache_groups()))
    assert [value.name for value in model.graph.input] == [
        contract.INPUT_IDS,
        contract.POSITION_IDS,
        contract.NEW_BIAS,
        *(contract.past_bias(group) for group in groups),
        *([contract.SEQUENCE_LENGTH] if spec.depends_on_length else []),
        contract.LOGIT_ROWS,
        *(name(layer) for layer in layers for name in (contract.past_key, contract.past_value)),
    ]
    assert {value.name for value in model.graph.output} == {
        contract.LOGITS,
        *(name(layer) for layer in layers for name in (contract.new_key, contract.new_value)),
    }
    for tensor in model.graph.initializer:
        external = tensor.data_location == TensorProto.EXTERNAL
        assert external == (not tensor.name.startswith("constant")), tensor.name
        assert {entry.value for entry in tensor.external_data if entry.key == "location"} <= {"model.onnx.data"}


def test_the_record_of_parity_is_what_hugging_face_measures(
    export: Export, tiny_llama: Path, hugging_face: Any, load_graph: Any
) -> None:
    from transformers import AutoTokenizer

    bundle = export(precision="int8")
    ids = np.array([AutoTokenizer.from_pretrained(tiny_llama)(TEXT, add_special_tokens=False).input_ids[:48]])
    with torch.no_grad():
        expected = hugging_face(tiny_llama)(torch.from_numpy(ids)).logits[0]
    got = torch.from_numpy(load_graph(bundle, "portable").step(ids))[0]
    divergence = torch.nn.functional.kl_div(
        got.double().log_softmax(-1), expected.double().log_softmax(-1), reduction="batchmean", log_target=True
    )
    record = bundle.manifest.parity.source
    assert bundle.manifest.parity.tokens == ids.shape[1] == 48
    assert record.kl_divergence == pytest.approx(divergence.item(), rel=0.01)
    assert 0 < record.kl_divergence < record.max_kl_divergence == 0.05
    assert record.max_abs_error == pytest.approx((got - expected).abs().max().item(), rel=1e-3)
    assert record.top1_agreement == pytest.approx((got.argmax(-1) == expected.argmax(-1)).double().mean().item())


def test_float32_is_exact(every_tiny_checkpoint: Path, export_tiny: Any) -> None:
    parity = export_tiny(every_tiny_checkpoint).manifest.parity
    for record in (parity.source, parity.stored):
        assert record.kl_divergence < 1e-9
        assert record.top1_agreement == 1.0


def test_identical_logits_have_no_distance() -> None:
    logits = np.random.default_rng(0).standard_normal((5, 11)).astype(np.float32)
    record = compare(logits, logits, 0.0, "it")
    assert (record.max_abs_error, record.kl_divergence, record.top1_agreement) == (0.0, 0.0, 1.0)
    # A constant that is added to all logits of a token changes no probability.
    assert compare(logits, logits + np.arange(5, dtype=np.float32)[:, None], 1e-9, "it").top1_agreement == 1.0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_logits_that_are_not_finite_never_pass(value: float, side: int) -> None:
    logits = [np.zeros((3, 4), np.float32), np.zeros((3, 4), np.float32)]
    logits[side][1, 2] = value
    with pytest.raises(ParityError):
        compare(logits[0], logits[1], 1e9, "it")


@pytest.mark.parametrize("tokens", [1, 2, 3, 9])
def test_the_check_runs_sequences_of_any_length(
    tokens: int, tiny_llama: Path, export_tiny: Any, hugging_face: Any, token_ids: Any
) -> None:
    bundle: Bundle = export_tiny(tiny_llama)
    ids = token_ids[0, :tokens]
    with torch.no_grad():
        expected = hugging_face(tiny_llama)(torch.from_numpy(ids[None])).logits[0].numpy()
    np.testing.assert_allclose(graph_logits(bundle.file("model.onnx"), bundle.manifest.spec, ids), expected, atol=1e-4)


def test_weights_that_lose_too_much_are_never_written(
    export: Export, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for precision in ("int4", "int8"):
        monkeypatch.setitem(MAX_KL_DIVERGENCE, precision, 1e-6)
    with pytest.raises(ParityError, match=r"^the exported graph is not the model: KL divergence [\d.]+ nats") as caught:
        export(precision="int4")
    assert caught.value.exit_code == 6
    assert _names(output.parent) == []


def _wrong_frequencies(g: Any, rope: RopeSpec, sequence_length: Any) -> Any:
    return rope_frequencies(g, msgspec.structs.replace(rope, theta=rope.theta / 2), sequence_length)


def _wrong_activation(g: Any, gate: Any, up: Any, activation: str) -> Any:
    return gated_activation(g, up, gate, "relu" if activation == "silu" else "silu")


@pytest.mark.parametrize(
    ("precision", "name", "wrong"),
    [
        ("fp32", "rope_frequencies", _wrong_frequencies),
        ("fp16", "rope_frequencies", _wrong_frequencies),
        ("int8", "gated_activation", _wrong_activation),
        # Lost among what int4 costs this model, but not against its own weights.
        ("int4", "gated_activation", _wrong_activation),
    ],
)
def test_a_graph_that_is_not_the_model_is_never_written(
    precision: str, name: str, wrong: Any, export: Export, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"edgekit.export.graph.decoder.{name}", wrong)
    with pytest.raises(
        ParityError, match=r"^the exported graph is not what its weights say: KL [\w. -]+ nats"
    ) as caught:
        export(precision=precision)
    assert caught.value.exit_code == 6
    assert "\n" not in str(caught.value)
    assert _names(output.parent) == []


def test_an_existing_bundle_is_replaced_only_by_force(export: Export, output: Path) -> None:
    first = export()
    with pytest.raises(UsageError, match=r"^output '.*/out.edge' exists; pass --force to replace it$"):
        export(precision="int8")
    assert open_bundle(output).digest == first.digest
    second = export(precision="int8", force=True)
    assert open_bundle(output).digest == second.digest != first.digest
    assert _names(output.parent) == ["out.edge"]


def test_a_failed_export_leaves_the_old_bundle(export: Export, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = export()

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("edgekit.export.exporter.write_manifest", refuse)
    with pytest.raises(StorageError):
        export(force=True)
    open_bundle(output).verify()
    assert open_bundle(output).digest == first.digest
    assert _names(output.parent) == ["out.edge"]


def test_a_checkpoint_that_cannot_be_read_leaves_nothing(export: Export, output: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such checkpoint"):
        export(tmp_path / "nowhere")
    assert _names(output.parent) == []


def _with_weight(checkpoint: Path, directory: Path, name: str, value: float) -> Path:
    from safetensors.torch import load_file, save_file

    for file in checkpoint.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    tensors = load_file(directory / "model.safetensors")
    tensors[name].view(-1)[3] = value
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("precision", ["fp32", "int4"])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.down_proj.weight", "model.norm.weight"])
def test_a_weight_that_is_not_a_number_is_refused_by_name(
    name: str, precision: str, value: float, export: Export, output: Path, tiny_llama: Path, tmp_path: Path
) -> None:
    (tmp_path / "damaged").mkdir()
    damaged = _with_weight(tiny_llama, tmp_path / "damaged", name, value)
    with pytest.raises(CorruptArtifactError, match=re.escape(repr(name))):
        export(damaged, precision=precision)
    assert _names(output.parent) == []


def test_a_weight_beyond_float16_is_refused_by_name(export: Export, tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "large").mkdir()
    large = _with_weight(tiny_llama, tmp_path / "large", "model.layers.0.self_attn.o_proj.weight", -1e5)
    for precision in ("int4", "int8", "fp16"):
        with pytest.raises(
            UnsupportedError, match=r"^layers.0.self_attn.o_proj.weight holds -100000, .* precision fp32$"
        ):
            export(large, precision=precision)
    assert export(large, precision="fp32").manifest.parity.source.top1_agreement == 1.0


@contextmanager
def _file_size_limit(size_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_a_write_that_the_system_refuses_leaves_nothing(
    precision: str, tiny_llama: Path, export_tiny: Any, export: Export, output: Path
) -> None:
    size_bytes = export_tiny(tiny_llama, precision=precision).manifest.files["model.onnx.data"].size
    for limit in (1000, size_bytes - 1):
        with _file_size_limit(limit), pytest.raises(StorageError, match=r"model\.onnx\.data': File too large$"):
            export(precision=precision)
    assert _names(output.parent) == []


@pytest.mark.parametrize("call", ["export.exporter.ir.save", "export.exporter.write_manifest", "bundle.Path.rename"])
def test_a_full_disk_leaves_nothing_wherever_it_is_met(
    call: str, export: Export, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(f"edgekit.{call}", refuse)
        with pytest.raises(StorageError, match=r"^cannot write '.*out.edge': .*No space left on device$"):
            export()
    assert _names(output.parent) == []


def test_an_interrupted_export_leaves_nothing(export: Export, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("edgekit.export.exporter.write_manifest", interrupt)
    with pytest.raises(KeyboardInterrupt):
        export()
    assert _names(output.parent) == []


KILLED = """
import sys, time
from edgekit.export.exporter import ExportOptions, export_bundle

def progress(what, done, total):
    if done == total // 2 and what != "parity":
        print(what, flush=True)
        time.sleep(600)

export_bundle(sys.argv[1], sys.argv[2], ExportOptions(), progress)
"""


def test_a_killed_export_leaves_nothing_that_loads_and_the_next_one_clears_it_away(
    export: Export, output: Path, tiny_llama: Path
) -> None:
    command = [sys.executable, "-c", KILLED, str(tiny_llama), str(output)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "layers." in process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        process.wait()
    (leftover,) = output.parent.iterdir()
    assert (leftover / "model.onnx.data").exists()
    for path in (output, leftover):
        with pytest.raises(UsageError):
            open_bundle(path)
    export()
    assert _names(output.parent) == ["out.edge"]


def test_every_refusal_is_one_line(export: Export, tmp_path: Path) -> None:
    export()
    for source, options in (
        (tmp_path / "nowhere", {"force": True}),
        (tmp_path, {"force": True}),
        (tmp_path, {}),
    ):
        with pytest.raises(EdgeKitError) as caught:
            export(source, **options)
        assert str(caught.value)
        assert "\n" not in str(caught.value)
