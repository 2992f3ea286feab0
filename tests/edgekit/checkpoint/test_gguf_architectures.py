"""Files as llama.cpp's converter writes them, against the Hugging Face checkpoints that they were made from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize, quantize

from edgekit.blocks import QuantizedBlocks
from edgekit.checkpoint import open_checkpoint
from edgekit.compress.decoder import stream_logits
from edgekit.families import family_for
from tests.gguf_files import rewrite_gguf, write_gguf
from tests.gguf_models import MODELS, as_metadata_has_it

FloatArray: TypeAlias = npt.NDArray[np.float32]
Pair: TypeAlias = Callable[[str, str], tuple[Path, Path]]


@pytest.fixture(scope="module")
def pair(make_checkpoint: Any, hugging_face: Any, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Makes the checkpoint of one of `MODELS` and, of a type of matrices, the GGUF file of it, once each."""
    checkpoints: dict[str, Path] = {}
    files: dict[tuple[str, str], Path] = {}

    def make(name: str, kind: str) -> tuple[Path, Path]:
        if name not in checkpoints:
            checkpoints[name] = make_checkpoint(MODELS[name])
        directory = checkpoints[name]
        if (name, kind) not in files:
            files[name, kind] = tmp_path_factory.mktemp("gguf") / "model.gguf"
            write_gguf(hugging_face(directory), directory, files[name, kind], {"*": kind})
        return directory, files[name, kind]

    return make


def _values(weight: FloatArray | QuantizedBlocks) -> FloatArray:
    return weight.dequantize() if isinstance(weight, QuantizedBlocks) else weight


@pytest.mark.parametrize("name", MODELS)
def test_the_spec_is_that_of_the_checkpoint(name: str, pair: Pair) -> None:
    directory, path = pair(name, "F32")
    with open_checkpoint(directory) as original, open_checkpoint(path) as gguf:
        assert as_metadata_has_it(gguf.spec) == as_metadata_has_it(original.spec)


@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_is_that_of_the_checkpoint(name: str, pair: Pair) -> None:
    directory, path = pair(name, "F32")
    with open_checkpoint(directory) as original, open_checkpoint(path) as gguf:
        for tensor in original.spec.tensor_shapes():
            np.testing.assert_array_equal(_values(gguf.tensor(tensor)), _values(original.tensor(tensor)), tensor)


@pytest.mark.parametrize("name", MODELS)
def test_blocks_have_the_values_of_the_quantized_checkpoint(name: str, pair: Pair) -> None:
    directory, path = pair(name, "Q8_0")
    with open_checkpoint(directory) as original, open_checkpoint(path) as gguf:
        for tensor, shape in original.spec.tensor_shapes().items():
            wanted = _values(original.tensor(tensor))
            if len(shape) == 2:
                wanted = dequantize(quantize(wanted, GGMLQuantizationType.Q8_0), GGMLQuantizationType.Q8_0)
            np.testing.assert_allclose(_values(gguf.tensor(tensor)), wanted, rtol=1e-6, atol=0, err_msg=tensor)


@pytest.mark.parametrize("name", MODELS)
def test_the_logits_are_those_of_the_checkpoint(
    name: str, pair: Pair, hugging_face: Any, token_ids: npt.NDArray[np.int64]
) -> None:
    directory, path = pair(name, "F32")
    with open_checkpoint(path) as checkpoint:
        logits = stream_logits(checkpoint, token_ids)
    with torch.no_grad():
        wanted = hugging_face(directory)(torch.from_numpy(token_ids)).logits.numpy()
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=2e-4)


@pytest.mark.parametrize("name", ["phi", "qwen2", "llama yarn", "smollm3", "stablelm"])
def test_queries_keys_and_values_may_be_one_tensor(name: str, pair: Pair, tmp_path: Path) -> None:
    # As in the first files of Phi-2; llama.cpp accepts it of every architecture.
    directory, path = pair(name, "F32")
    stored = {tensor.name: np.array(tensor.data) for tensor in GGUFReader(path).tensors}
    fused: dict[str, Any] = {}
    for weight in stored:
        if ".attn_q." in weight:
            parts = [weight.replace("attn_q", f"attn_{part}") for part in "qkv"]
            fused[weight.replace("attn_q", "attn_qkv")] = np.concatenate([stored[part] for part in parts])
            fused |= dict.fromkeys(parts)
    rewritten = rewrite_gguf(path, tmp_path / "fused.gguf", {}, fused)
    with open_checkpoint(directory) as original, open_checkpoint(rewritten) as gguf:
        assert gguf.spec.tensor_shapes() == original.spec.tensor_shapes()
        for tensor in original.spec.tensor_shapes():
            np.testing.assert_array_equal(_values(gguf.tensor(tensor)), _values(original.tensor(tensor)), tensor)


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_a_gemma_may_have_a_head_of_its_own(name: str, pair: Pair, tmp_path: Path) -> None:
    # Gemma 2 has no GGUF name for it, since its own is always tied.
    head = np.random.default_rng(0).standard_normal((320, 64)).astype(np.float32)
    path = rewrite_gguf(pair(name, "F32")[1], tmp_path / "untied.gguf", {}, {"output.weight": head})
    with open_checkpoint(path) as checkpoint:
        np.testing.assert_array_equal(_values(checkpoint.tensor("lm_head.weight")), head)


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("name", ["qwen2", "qwen2 tied", "gemma2", "gemma3", "phi3", "stablelm parallel"])
def test_the_logits_are_those_that_transformers_computes_from_the_file(
    name: str, kind: str, pair: Pair, token_ids: npt.NDArray[np.int64]
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    directory, path = pair(name, kind)
    with open_checkpoint(path) as checkpoint:
        logits = stream_logits(checkpoint, token_ids)
    # The config apart: transformers does not see scales, windows, caps and head widths in most GGUF files.
    config = AutoConfig.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, config=config, dtype=torch.float32)
    with torch.no_grad():
        wanted = model(torch.from_numpy(token_ids)).logits.numpy()
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=2e-4)


@pytest.mark.parametrize("name", ["qwen2", "phi3"])
def test_the_spec_is_that_of_the_config_that_transformers_reads_in_the_file(name: str, pair: Pair) -> None:
    from transformers import AutoConfig

    _, path = pair(name, "F32")
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name).to_dict()
    if name == "phi3":
        config["sliding_window"] = 7  # which transformers leaves out
    with open_checkpoint(path) as checkpoint:
        assert as_metadata_has_it(checkpoint.spec) == as_metadata_has_it(family_for(config).spec(config))
