from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
import torch

from edgekit.checkpoint import open_checkpoint
from edgekit.compress.decoder import stream_logits
from edgekit.errors import CorruptArtifactError, UnsupportedError

Tensors: TypeAlias = dict[str, torch.Tensor]
EditCheckpoint: TypeAlias = Callable[..., Path]
HuggingFaceModel: TypeAlias = Callable[[Path], Any]
TinyCheckpoint: TypeAlias = Callable[[str], Path]
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def _cast(dtype: torch.dtype) -> Callable[[Tensors], None]:
    def cast(tensors: Tensors) -> None:
        tensors.update({name: tensor.to(dtype) for name, tensor in tensors.items()})

    return cast


@pytest.fixture
def sharded(tiny_llama: Path, hugging_face: HuggingFaceModel, tmp_path: Path) -> Path:
    model = hugging_face(tiny_llama)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    return tmp_path / "sharded"


def test_every_tensor_is_float32_of_the_specs_shape(every_tiny_checkpoint: Path) -> None:
    with open_checkpoint(every_tiny_checkpoint) as checkpoint:
        tensors = {name: checkpoint.tensor(name) for name in checkpoint.spec.tensor_shapes()}
        assert {name: tensor.shape for name, tensor in tensors.items()} == checkpoint.spec.tensor_shapes()
    # They stay valid after the files are closed.
    assert all(isinstance(tensor, np.ndarray) and np.isfinite(tensor).all() for tensor in tensors.values())
    assert {str(tensor.dtype) for tensor in tensors.values() if isinstance(tensor, np.ndarray)} == {"float32"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_half_precision_is_widened_exactly(edit_checkpoint: EditCheckpoint, dtype: torch.dtype) -> None:
    from safetensors.torch import load_file

    directory = edit_checkpoint("gpt_neox", tensors=_cast(dtype))
    stored = load_file(directory / "model.safetensors")
    with open_checkpoint(directory) as checkpoint:
        for name, source in checkpoint.family.sources(checkpoint.spec).items():
            wanted = stored[source.name].float().numpy()
            tensor = checkpoint.tensor(name)
            np.testing.assert_array_equal(tensor, wanted if source.rows is None else wanted[source.rows])


def test_shards_are_read_like_a_single_file(sharded: Path, tiny_llama: Path) -> None:
    with open_checkpoint(tiny_llama) as whole, open_checkpoint(sharded) as split:
        assert whole.spec == split.spec
        for name in whole.spec.tensor_shapes():
            np.testing.assert_array_equal(whole.tensor(name), split.tensor(name))
        weights = {name for name in split.source.digests if name.startswith("model")}
        assert weights == {path.name for path in sharded.glob("model*")}


def test_nothing_that_was_read_is_kept(tiny_llama: Path) -> None:
    with open_checkpoint(tiny_llama) as checkpoint:
        first = checkpoint.tensor("norm.weight")
        assert isinstance(first, np.ndarray)
        first[:] = 0
        assert np.any(np.asarray(checkpoint.tensor("norm.weight")) != 0)


@pytest.mark.parametrize("size", [0, 4, 100, -5])
def test_a_truncated_file_is_named(edit_checkpoint: EditCheckpoint, size: int) -> None:
    path = edit_checkpoint("llama") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CorruptArtifactError, match=r"model\.safetensors cannot be read.*; download or copy it again"):
        open_checkpoint(path.parent)


def test_a_file_that_is_something_else_is_named(edit_checkpoint: EditCheckpoint) -> None:
    path = edit_checkpoint("llama") / "model.safetensors"
    path.write_bytes(b"PK\x03\x04 a zip file, as torch.save writes it")
    with pytest.raises(CorruptArtifactError, match=r"model\.safetensors cannot be read"):
        open_checkpoint(path.parent)


def test_a_missing_shard_is_named(sharded: Path) -> None:
    shard = sorted(sharded.glob("model-*"))[1]
    shard.unlink()
    with pytest.raises(CorruptArtifactError, match=rf"{shard.name} is missing; download or copy it again"):
        open_checkpoint(sharded)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "index.json cannot be read"),
        ("[]", "index.json holds a list, not an object"),
        ("{}", "index.json has no usable 'weight_map'"),
        ('{"weight_map": {"a": 1}}', "index.json has no usable 'weight_map'"),
        ('{"weight_map": {"a": "../a.safetensors"}}', r"names '\.\./a\.safetensors', which is not a plain file name"),
    ],
)
def test_an_unusable_index_is_named(sharded: Path, index: str, message: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CorruptArtifactError, match=message):
        open_checkpoint(sharded)


def test_a_tensor_in_two_shards_is_named(sharded: Path) -> None:
    from safetensors.torch import load_file, save_file

    first, second, *_ = sorted(sharded.glob("model-*"))
    save_file({**load_file(first), **load_file(second)}, second)
    with pytest.raises(CorruptArtifactError, match=rf"is in both {first.name} and {second.name}"):
        open_checkpoint(sharded)


def test_a_missing_tensor_is_named_with_its_shape(edit_checkpoint: EditCheckpoint) -> None:
    directory = edit_checkpoint("llama", tensors=lambda tensors: tensors.pop(Q_PROJ))
    with pytest.raises(CorruptArtifactError, match=rf"has no tensor '{Q_PROJ}'; its config wants shape \(64, 64\)"):
        open_checkpoint(directory)


@pytest.mark.parametrize(
    ("variant", "name", "shape", "wanted"),
    [
        ("llama", Q_PROJ, (32, 64), (64, 64)),
        ("llama", "model.norm.weight", (64, 1), (64,)),
        ("gpt_neox", "gpt_neox.layers.1.attention.query_key_value.weight", (64, 64), (192, 64)),
        ("llama_bias", "model.layers.1.self_attn.k_proj.bias", (64,), (32,)),
    ],
)
def test_a_wrong_shape_is_named(
    edit_checkpoint: EditCheckpoint, variant: str, name: str, shape: tuple[int, ...], wanted: tuple[int, ...]
) -> None:
    directory = edit_checkpoint(variant, tensors=lambda tensors: tensors.update({name: torch.zeros(shape)}))
    with pytest.raises(CorruptArtifactError) as caught:
        open_checkpoint(directory)
    assert f"has tensor {name!r} of shape {shape}; expected {wanted}" in str(caught.value)


@pytest.mark.parametrize(
    "name", ["model.layers.2.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias", "score.weight"]
)
def test_a_tensor_that_the_model_does_not_use_is_refused(edit_checkpoint: EditCheckpoint, name: str) -> None:
    directory = edit_checkpoint("llama", tensors=lambda tensors: tensors.update({name: torch.zeros(64)}))
    with pytest.raises(UnsupportedError, match=rf"has 1 tensors that llama does not use, such as '{name}'"):
        open_checkpoint(directory)


def test_buffers_of_older_versions_are_ignored(
    edit_checkpoint: EditCheckpoint, tiny_checkpoint: TinyCheckpoint
) -> None:
    buffers = {
        "gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 256, 256),
        "gpt_neox.layers.0.attention.masked_bias": torch.tensor(-1e9),
        "gpt_neox.layers.0.attention.rotary_emb.inv_freq": torch.ones(2),
    }
    directory = edit_checkpoint("gpt_neox", tensors=lambda tensors: tensors.update(buffers))
    with open_checkpoint(directory) as edited, open_checkpoint(tiny_checkpoint("gpt_neox")) as plain:
        assert edited.spec == plain.spec


def test_a_repeated_tied_head_is_ignored(edit_checkpoint: EditCheckpoint) -> None:
    def repeat(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    with open_checkpoint(edit_checkpoint("llama_tied", tensors=repeat)) as checkpoint:
        assert checkpoint.spec.tie_word_embeddings
        assert "lm_head.weight" not in checkpoint.spec.tensor_shapes()


def test_a_tied_head_with_other_values_is_a_head_of_its_own(
    edit_checkpoint: EditCheckpoint, hugging_face: HuggingFaceModel, token_ids: npt.NDArray[np.int64]
) -> None:
    def change(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0).clone()

    directory = edit_checkpoint("llama_tied", tensors=change)
    with open_checkpoint(directory) as checkpoint:
        assert not checkpoint.spec.tie_word_embeddings
        logits = stream_logits(checkpoint, token_ids)
    with torch.no_grad():
        wanted = hugging_face(directory)(torch.from_numpy(token_ids)).logits.numpy()
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=1e-4)


def test_a_tied_head_of_another_shape_is_refused(edit_checkpoint: EditCheckpoint) -> None:
    head = {"lm_head.weight": torch.zeros(8, 64)}
    directory = edit_checkpoint("llama_tied", tensors=lambda tensors: tensors.update(head))
    with pytest.raises(CorruptArtifactError, match=r"'lm_head\.weight' of shape \(8, 64\); expected \(320, 64\)"):
        open_checkpoint(directory)


def test_both_spellings_of_the_head_of_neox_are_read(
    edit_checkpoint: EditCheckpoint, tiny_checkpoint: TinyCheckpoint
) -> None:
    def respell(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors.pop("embed_out.weight")

    directory = edit_checkpoint("gpt_neox", tensors=respell)
    with open_checkpoint(directory) as other, open_checkpoint(tiny_checkpoint("gpt_neox")) as usual:
        np.testing.assert_array_equal(other.tensor("lm_head.weight"), usual.tensor("lm_head.weight"))


def test_an_unknown_number_format_is_refused(edit_checkpoint: EditCheckpoint) -> None:
    directory = edit_checkpoint("llama", tensors=_cast(torch.float8_e4m3fn))
    with pytest.raises(UnsupportedError, match=r"as F8_E4M3; supported: F32, F16, BF16"):
        open_checkpoint(directory)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(edit_checkpoint: EditCheckpoint, value: float) -> None:
    directory = edit_checkpoint("llama", tensors=lambda tensors: tensors[Q_PROJ][5].fill_(value))
    with (
        open_checkpoint(directory) as checkpoint,
        pytest.raises(CorruptArtifactError, match=rf"infinite or not numbers in tensor '{Q_PROJ}'"),
    ):
        checkpoint.tensor("layers.0.self_attn.q_proj.weight")


def test_pickled_weights_are_not_read(edit_checkpoint: EditCheckpoint) -> None:
    directory = edit_checkpoint("llama")
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(
        UnsupportedError, match=r"pickled weights only, .* not read; convert them to model\.safetensors"
    ):
        open_checkpoint(directory)


def test_a_directory_without_weights_says_which_files_are_looked_for(edit_checkpoint: EditCheckpoint) -> None:
    directory = edit_checkpoint("llama")
    (directory / "model.safetensors").unlink()
    with pytest.raises(CorruptArtifactError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        open_checkpoint(directory)


def test_the_digests_are_those_of_the_files(tiny_llama: Path) -> None:
    import hashlib

    with open_checkpoint(tiny_llama) as checkpoint:
        source = checkpoint.source
    assert (source.kind, source.id, source.revision) == ("directory", tiny_llama.name, None)
    for name, digest in source.digests.items():
        assert hashlib.sha256((tiny_llama / name).read_bytes()).hexdigest() == digest
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= source.digests.keys()


def test_an_end_token_may_be_in_either_config(edit_checkpoint: EditCheckpoint) -> None:
    directory = edit_checkpoint("llama", config={"eos_token_id": 5})
    with open_checkpoint(directory) as checkpoint:
        assert checkpoint.spec.eos_token_ids == (1, 2, 5)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 3}))
    with open_checkpoint(directory) as checkpoint:
        assert checkpoint.spec.eos_token_ids == (3, 5)
    (directory / "generation_config.json").unlink()
    with open_checkpoint(directory) as checkpoint:
        assert checkpoint.spec.eos_token_ids == (5,)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": "</s>"}))
    with pytest.raises(CorruptArtifactError, match=r"generation_config\.json has an unusable eos_token_id"):
        open_checkpoint(directory)
