"""Wrong positions and head widths that other tools are known to have exported: one test each, named after the fault.

docs/known_faults.md has the whole list.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import onnx
import pytest
import torch

from edgekit import contract
from edgekit.bundle import Bundle
from edgekit.checkpoint import open_checkpoint
from edgekit.export.exporter import write_graph
from edgekit.export.weights import Storage
from edgekit.rope import RopeSpec
from edgekit.spec import DecoderSpec, LayerSpec
from tests.tiny_configs import LLAMA3_ROPE, SIZES

TOLERANCE = 1e-4
LLAMA = {"model_type": "llama", **SIZES, "num_key_value_heads": 2}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32}
BASE = {"rope_type": "default", "rope_theta": 1e6}

FloatArray = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.int64]

both_forms = pytest.mark.parametrize("form", ["portable", "lowered"])


def _run(model: Any, ids: Tokens, **inputs: Any) -> Any:
    with torch.no_grad():
        return model(torch.from_numpy(ids), **inputs)


def _ids(count: int) -> Tokens:
    return np.random.default_rng(5).integers(3, 320, (1, count))


def _assert_close(got: FloatArray, expected: Any) -> None:
    np.testing.assert_allclose(got, np.asarray(expected), atol=TOLERANCE, rtol=0)


def _in_two_steps(graph: Any, ids: Tokens) -> FloatArray:
    cut = 2 * ids.shape[1] // 3
    return np.concatenate([graph.step(ids[:, :cut]), graph.step(ids[:, cut:])], 1)


def _rope(layer: LayerSpec) -> RopeSpec:
    assert layer.attention.rope is not None
    return layer.attention.rope


def _with_rope(spec: DecoderSpec, **changes: Any) -> DecoderSpec:
    replace = msgspec.structs.replace
    layers = (
        replace(layer, attention=replace(layer.attention, rope=replace(_rope(layer), **changes)))
        for layer in spec.layers
    )
    return replace(spec, layers=tuple(layers))


@dataclass(frozen=True)
class PlantedModel:
    """A decoder whose weights are given, for layers that no checkpoint has."""

    spec: DecoderSpec
    weights: Mapping[str, FloatArray]

    def tensor(self, name: str) -> FloatArray:
        return self.weights[name]


def _write(model: Any, directory: Path) -> Path:
    storage = {name: Storage(precision="fp32") for name in model.spec.tensor_shapes()}
    write_graph(model, storage, directory, lambda *_: None)
    return directory / "model.onnx"


# huggingface/optimum-onnx PR#97: the cache of Qwen3 was declared 64 wide where it is 128.
@both_forms
def test_head_dim_comes_from_the_config_and_not_from_hidden_size_over_heads(
    form: str, tiny_checkpoint: Any, hugging_face: Any, export_tiny: Any, load_graph: Any
) -> None:
    bundle: Bundle = export_tiny(tiny_checkpoint("qwen3"))
    inputs = onnx.load(bundle.file("model.onnx"), load_external_data=False).graph.input
    shapes = {value.name: [axis.dim_value for axis in value.type.tensor_type.shape.dim] for value in inputs}
    assert shapes[contract.past_key(1)][:3] == [0, 2, 32]
    assert shapes[contract.past_value(1)][1::2] == [2, 32]
    expected = _run(hugging_face(tiny_checkpoint("qwen3")), _ids(24)).logits
    _assert_close(_in_two_steps(load_graph(bundle, form), _ids(24)), expected)


# microsoft/onnxruntime-genai#237: other heads than the hidden size divides into broke a table of cosines.
@both_forms
@pytest.mark.parametrize("head_dim", [10, 24])
def test_a_head_width_that_is_not_a_share_of_the_hidden_size_has_its_own_rotations(
    form: str, head_dim: int, make_checkpoint: Any, hugging_face: Any, export_tiny: Any, load_graph: Any
) -> None:
    directory = make_checkpoint({**LLAMA, "head_dim": head_dim})
    expected = _run(hugging_face(directory), _ids(24)).logits
    _assert_close(_in_two_steps(load_graph(export_tiny(directory), form), _ids(24)), expected)


# microsoft/onnxruntime-genai#2062, #2149
@both_forms
def test_each_layer_may_have_its_own_heads_and_widths(
    form: str, tiny_llama: Path, load_graph_of: Any, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    channels = np.array([head * 16 + channel for head in range(4) for channel in range(12)])
    with torch.no_grad():  # the last four channels of every value of layer 0, and half the heads of layer 1
        outputs = [layer.self_attn.o_proj.weight for layer in model.model.layers]
        outputs[0][:, np.setdiff1d(np.arange(64), channels)] = 0
        outputs[1][:, 32:] = 0
    with open_checkpoint(tiny_llama) as checkpoint:
        weights = {name: np.asarray(checkpoint.tensor(name)) for name in checkpoint.spec.tensor_shapes()}
        spec = checkpoint.spec
    prefix = "layers.{}.self_attn.{}.weight"
    for name, rows in (("q_proj", 32), ("k_proj", 16), ("v_proj", 16)):
        weights[prefix.format(1, name)] = weights[prefix.format(1, name)][:rows]
    weights[prefix.format(0, "v_proj")] = weights[prefix.format(0, "v_proj")][channels[:24]]
    weights[prefix.format(0, "o_proj")] = weights[prefix.format(0, "o_proj")][:, channels]
    weights[prefix.format(1, "o_proj")] = weights[prefix.format(1, "o_proj")][:, :32]
    replace = msgspec.structs.replace
    first, second = spec.layers
    layers = (
        replace(first, attention=replace(first.attention, value_dim=12)),
        replace(second, attention=replace(second.attention, num_heads=2, num_kv_heads=1)),
    )
    pruned = PlantedModel(replace(spec, layers=layers), weights)
    graph = load_graph_of(_write(pruned, tmp_path), pruned.spec, form)
    _assert_close(_in_two_steps(graph, _ids(24)), _run(model, _ids(24)).logits)
    assert [part.shape[1:] for part in graph.cache] == [(2, 16, 24), (2, 24, 12), (1, 16, 24), (1, 24, 16)]


# For each fault: a config whose rotations have the feature, and the spec of an export that ignores it.
ROTATIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "base": ({**LLAMA, "rope_parameters": BASE}, {"theta": 10000.0}),
    "llama3 scaling": ({**LLAMA, "rope_parameters": LLAMA3_ROPE}, {"scaling": None}),
    "yarn factor": ({**LLAMA, "rope_parameters": YARN}, {"attention_factor": 1.0}),
}


def _check_rotation(name: str, form: str, tools: tuple[Any, Any, Any], tmp_path: Path) -> None:
    """Right at positions where it matters, and noticed when it is left out."""
    config, ignored = ROTATIONS[name]
    make_checkpoint, hugging_face, load_graph_of = tools
    directory = make_checkpoint(config)
    expected = _run(hugging_face(directory), _ids(160)).logits.numpy()
    for is_right in (True, False):
        target = tmp_path / str(is_right)
        target.mkdir()
        with open_checkpoint(directory) as checkpoint:
            if not is_right:
                checkpoint.spec = _with_rope(checkpoint.spec, **ignored)
            graph = load_graph_of(_write(checkpoint, target), checkpoint.spec, form)
        got = _in_two_steps(graph, _ids(160))
        if is_right:
            _assert_close(got, expected)
        else:
            assert np.abs(got - expected).max() > 100 * TOLERANCE


@pytest.fixture
def rotation_tools(make_checkpoint: Any, hugging_face: Any, load_graph_of: Any) -> tuple[Any, Any, Any]:
    return make_checkpoint, hugging_face, load_graph_of


# NVIDIA/TensorRT-LLM#785
@both_forms
def test_the_base_of_the_rotations_reaches_attention(form: str, rotation_tools: Any, tmp_path: Path) -> None:
    _check_rotation("base", form, rotation_tools, tmp_path)


# ANEForge PR#58, Torch-TRTLLM PR#14
@both_forms
def test_the_rope_scaling_of_llama_3_is_not_ignored(form: str, rotation_tools: Any, tmp_path: Path) -> None:
    _check_rotation("llama3 scaling", form, rotation_tools, tmp_path)


# guoqingbao/xinfer PR#329
@both_forms
def test_the_attention_factor_of_yarn_is_applied(form: str, rotation_tools: Any, tmp_path: Path) -> None:
    _check_rotation("yarn factor", form, rotation_tools, tmp_path)


# microsoft/onnxruntime-genai#383: past 4096 tokens, a table of cosines had run out.
@both_forms
def test_positions_far_beyond_any_table_have_their_rotations(
    form: str, make_checkpoint: Any, hugging_face: Any, export_tiny: Any, load_graph: Any
) -> None:
    directory = make_checkpoint({**LLAMA, "max_position_embeddings": 131072, "rope_parameters": BASE})
    model, bundle = hugging_face(directory), export_tiny(directory)
    bias = torch.full((24, 24), torch.finfo(torch.float32).min).triu(1)[None, None]
    # Jumps of many sizes, for differences of positions are all that a rotation shows.
    positions = np.cumsum(np.random.default_rng(1).integers(1, 9000, (1, 24)), axis=1)
    assert positions[0, -1] > 65536
    expected = _run(model, _ids(24), position_ids=torch.from_numpy(positions), attention_mask=bias).logits.numpy()
    # The last bit of a frequency is 0.006 radians at this distance.
    got = load_graph(bundle, form).step(_ids(24), positions=positions)
    np.testing.assert_allclose(got, expected, atol=5e-3, rtol=0)
    clamped = load_graph(bundle, form).step(_ids(24), positions=np.minimum(positions, 4095))
    assert np.abs(clamped - expected).max() > 0.5


# ml-explore/mlx-lm PR#1698 ignored the fraction; apple/coreai-models#66 and labscommunity/cascadia PR#69 paired the
# wrong channels, which a comparison of cosines and sines could not see.
@both_forms
@pytest.mark.parametrize("variant", ["gpt_neox", "phi", "stablelm"])
def test_a_partial_rotation_turns_the_channels_that_hugging_face_turns(
    form: str, variant: str, tiny_checkpoint: Any, hugging_face: Any, export_tiny: Any, load_graph: Any
) -> None:
    bundle: Bundle = export_tiny(tiny_checkpoint(variant))
    rotary_dim = _rope(bundle.manifest.spec.layers[0]).rotary_dim
    assert 0 < rotary_dim < 16
    graph = load_graph(bundle, form)
    graph.step(_ids(24))
    cache = _run(hugging_face(tiny_checkpoint(variant)), _ids(24), use_cache=True).past_key_values
    for index, layer in enumerate(cache.layers):
        _assert_close(graph.cache[2 * index].swapaxes(2, 3), layer.keys)
    unrotated = load_graph(bundle, form)
    unrotated.step(_ids(24), positions=np.zeros((1, 24), np.int64))
    moved = np.abs(graph.cache[0] - unrotated.cache[0]).max(axis=(0, 1, 3)) > TOLERANCE
    assert moved.tolist() == [channel < rotary_dim for channel in range(16)]


# microsoft/onnxruntime-genai PR#282, onnx/onnx#7914, onnxruntime/mobius#371, sonos/tract#2323
@both_forms
@pytest.mark.parametrize("variant", ["mistral", "qwen2_windows", "gemma3"])
def test_a_sliding_window_is_not_dropped(
    form: str, variant: str, tiny_checkpoint: Any, hugging_face: Any, export_tiny: Any, load_graph: Any
) -> None:
    model, ids = hugging_face(tiny_checkpoint(variant)), _ids(40)
    expected = _run(model, ids).logits.numpy()
    graph = load_graph(export_tiny(tiny_checkpoint(variant)), form)
    pieces = [graph.step(ids[:, start : start + count]) for start, count in ((0, 20), (20, 15), (35, 1), (36, 4))]
    _assert_close(np.concatenate(pieces, 1), expected)
    everything = torch.full((40, 40), contract.MASKED).triu(1)[None, None]
    kinds = ("full_attention", "sliding_attention")
    mask = everything if variant == "mistral" else dict.fromkeys(kinds, everything)
    assert np.abs(_run(model, ids, attention_mask=mask).logits.numpy() - expected).max() > 100 * TOLERANCE
