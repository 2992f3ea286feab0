"""The graph against Hugging Face's own implementation, in every variant of every family, portable and lowered."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from edgekit import contract
from edgekit.checkpoint import open_checkpoint
from edgekit.export.exporter import write_graph
from edgekit.export.weights import Storage
from edgekit.rope import LongRopeScaling

if TYPE_CHECKING:
    from collections.abc import Callable

    from edgekit.spec import DecoderSpec

TOLERANCE = 1e-4
FORMS = ("portable", "lowered")

pytestmark = pytest.mark.parametrize("form", FORMS)


def _expected(model: Any, token_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    import torch

    with torch.no_grad():
        logits: npt.NDArray[np.float32] = model(torch.from_numpy(token_ids)).logits.numpy()
    return logits


def test_whole_sequences_give_the_logits_of_hugging_face(
    form: Any, every_tiny_checkpoint: Path, hugging_face: Any, export_tiny: Any, load_graph: Any, token_ids: Any
) -> None:
    graph = load_graph(export_tiny(every_tiny_checkpoint), form)
    expected = _expected(hugging_face(every_tiny_checkpoint), token_ids)
    np.testing.assert_allclose(graph.step(token_ids), expected, atol=TOLERANCE, rtol=0)


def test_chunked_prefill_and_single_steps_give_the_logits_of_hugging_face(
    form: Any, every_tiny_checkpoint: Path, hugging_face: Any, export_tiny: Any, load_graph: Any, token_ids: Any
) -> None:
    graph = load_graph(export_tiny(every_tiny_checkpoint), form)
    expected = _expected(hugging_face(every_tiny_checkpoint), token_ids)
    pieces = [slice(0, 9), slice(9, 16), *(slice(i, i + 1) for i in range(16, 20)), slice(20, 24)]
    got = [
        graph.step(token_ids[:, piece], empty_slots=1 + index % 3, sequence_length=24)
        for index, piece in enumerate(pieces)
    ]
    np.testing.assert_allclose(np.concatenate(got, axis=1), expected, atol=TOLERANCE, rtol=0)


def test_every_node_of_a_tree_sees_its_ancestors_only(
    form: Any, every_tiny_checkpoint: Path, hugging_face: Any, export_tiny: Any, load_graph: Any, token_ids: Any
) -> None:
    graph = load_graph(export_tiny(every_tiny_checkpoint), form)
    prompt, tree = token_ids[:1, :8], token_ids[:1, 8:14]
    parents = [-1, 0, 0, 1, 1, 3]
    paths = [[node] for node in range(len(parents))]
    for path in paths:
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
    bias = np.full((6, 6), contract.MASKED, np.float32)
    for path in paths:
        bias[path[-1], path] = 0.0
    graph.step(prompt)
    depths = np.array([[8 + len(path) - 1 for path in paths]])
    got = graph.step(tree, positions=depths, new_bias=bias, keep=np.array([0, 1, 3]))
    model = hugging_face(every_tiny_checkpoint)
    for path in paths:
        whole = np.concatenate([prompt, tree[:, path]], axis=1)
        np.testing.assert_allclose(got[0, path[-1]], _expected(model, whole)[0, -1], atol=TOLERANCE, rtol=0)
    # Keeping the path 0 → 1 → 3 and going on is the same as having read that path alone.
    after = graph.step(token_ids[:1, 20:22])
    whole = np.concatenate([prompt, tree[:, [0, 1, 3]], token_ids[:1, 20:22]], axis=1)
    np.testing.assert_allclose(after, _expected(model, whole)[:, -2:], atol=TOLERANCE, rtol=0)


def test_only_the_wanted_rows_get_logits(
    form: Any, every_tiny_checkpoint: Path, hugging_face: Any, export_tiny: Any, load_graph: Any, token_ids: Any
) -> None:
    graph = load_graph(export_tiny(every_tiny_checkpoint), form)
    expected = _expected(hugging_face(every_tiny_checkpoint), token_ids)
    got = graph.step(token_ids, rows=np.array([23, 4]))
    np.testing.assert_allclose(got, expected[:, [23, 4]], atol=TOLERANCE, rtol=0)


def _layers(spec: DecoderSpec, change: Callable[[Any], Any]) -> DecoderSpec:
    return msgspec.structs.replace(spec, layers=tuple(change(layer) for layer in spec.layers))


def _attention(spec: DecoderSpec, **changes: Any) -> DecoderSpec:
    return _layers(
        spec,
        lambda layer: msgspec.structs.replace(layer, attention=msgspec.structs.replace(layer.attention, **changes)),
    )


def _mlp(spec: DecoderSpec, **changes: Any) -> DecoderSpec:
    return _layers(
        spec, lambda layer: msgspec.structs.replace(layer, mlp=msgspec.structs.replace(layer.mlp, **changes))
    )


def _rope(spec: DecoderSpec, **changes: Any) -> DecoderSpec:
    rope = spec.layers[0].attention.rope
    assert rope is not None
    return _attention(spec, rope=msgspec.structs.replace(rope, **changes))


def _without_multiplier(name: str) -> Callable[[DecoderSpec], DecoderSpec]:
    return lambda spec: msgspec.structs.replace(spec, **{name: 1.0})


def _placed(spec: DecoderSpec, norms: str) -> DecoderSpec:
    return _layers(spec, lambda layer: msgspec.structs.replace(layer, norm_placement=norms))


def _always_short(spec: DecoderSpec) -> DecoderSpec:
    rope = spec.layers[0].attention.rope
    assert rope is not None
    assert isinstance(rope.scaling, LongRopeScaling)
    return _rope(spec, scaling=msgspec.structs.replace(rope.scaling, original_max_positions=1000))


# For each feature: the variant that has it, and the spec of a model that lacks it.
KNOCK_OUTS: dict[str, tuple[str, Callable[[DecoderSpec], DecoderSpec]]] = {
    "qk-norm": ("qwen3", lambda spec: _attention(spec, qk_norm=None)),
    "q, k and v biases": ("llama_bias", lambda spec: _attention(spec, qkv_bias=False)),
    "o bias": ("llama_bias", lambda spec: _attention(spec, o_bias=False)),
    "mlp biases": ("llama_bias", lambda spec: _mlp(spec, bias=False)),
    "llama3 rope scaling": ("llama_llama3_rope", lambda spec: _rope(spec, scaling=None)),
    "linear rope scaling": ("llama_linear_rope", lambda spec: _rope(spec, scaling=None)),
    "rope base": ("qwen3_bias", lambda spec: _rope(spec, theta=1e4)),
    "partial rotary": ("gpt_neox", lambda spec: _rope(spec, rotary_dim=16)),
    "parallel residual": (
        "gpt_neox",
        lambda spec: _layers(spec, lambda layer: msgspec.structs.replace(layer, parallel_residual=False)),
    ),
    "sequential residual": (
        "gpt_neox_sequential",
        lambda spec: _layers(spec, lambda layer: msgspec.structs.replace(layer, parallel_residual=True)),
    ),
    "activation": ("llama_gelu_tanh", lambda spec: _mlp(spec, activation="silu")),
    "exact gelu": ("gpt_neox", lambda spec: _mlp(spec, activation="relu")),
    "scale of the scores": ("llama", lambda spec: _attention(spec, scale=1.0)),
    "sliding window": ("mistral", lambda spec: _attention(spec, sliding_window=None)),
    "layers without a window": ("qwen2_windows", lambda spec: _attention(spec, sliding_window=5)),
    "q, k and v biases without o's": ("qwen2", lambda spec: _attention(spec, qkv_bias=False)),
    "soft cap of the scores": ("gemma2", lambda spec: _attention(spec, softcap=None)),
    "soft cap of the logits": ("gemma2", lambda spec: msgspec.structs.replace(spec, logit_softcap=None)),
    "scale from query_pre_attn_scalar": ("gemma2", lambda spec: _attention(spec, scale=16**-0.5)),
    "embedding scale": ("gemma2", lambda spec: msgspec.structs.replace(spec, embedding_scale=1.0)),
    "norms after attention and mlp": ("gemma2", lambda spec: _placed(spec, "pre")),
    "norms before attention and mlp": ("gemma2", lambda spec: _placed(spec, "post")),
    "a rope per type of layer": ("gemma3", lambda spec: _rope(spec)),
    "qk-norm before two ropes": ("gemma3", lambda spec: _attention(spec, qk_norm=None)),
    "qk-norm over all heads": ("olmo2", lambda spec: _attention(spec, qk_norm=None)),
    "yarn rope scaling": ("llama_yarn_rope", lambda spec: _rope(spec, scaling=None)),
    "yarn attention factor": ("llama_yarn_rope", lambda spec: _rope(spec, attention_factor=1.0)),
    "dynamic rope scaling": ("llama_dynamic_rope", lambda spec: _rope(spec, scaling=None)),
    "long factors of longrope": ("phi3_longrope", _always_short),
    "short factors of longrope": ("phi3_longrope_short", lambda spec: _rope(spec, scaling=None)),
    "longrope attention factor": ("phi3_longrope_short", lambda spec: _rope(spec, attention_factor=1.0)),
    "sliding window of fused projections": ("phi3", lambda spec: _attention(spec, sliding_window=None)),
    "head bias": ("phi", lambda spec: msgspec.structs.replace(spec, head_bias=False)),
    "a norm of its own for the mlp of a parallel residual": (
        "gpt_neox",
        lambda spec: _layers(spec, lambda layer: msgspec.structs.replace(layer, shared_norm=True)),
    ),
    "partial rotary of half of a head": ("phi", lambda spec: _rope(spec, rotary_dim=16)),
    "multiplier of embeddings": ("granite", _without_multiplier("embedding_scale")),
    "multiplier of logits": ("granite", _without_multiplier("logit_scale")),
    "multiplier of scores": ("granite", lambda spec: _attention(spec, scale=16**-0.5)),
    "multiplier of residual branches": (
        "granite",
        lambda spec: _layers(spec, lambda layer: msgspec.structs.replace(layer, residual_scale=1.0)),
    ),
    "layers without rope": ("smollm3", lambda spec: _attention(spec, rope=spec.layers[0].attention.rope)),
    "layers with rope": ("smollm3", lambda spec: _attention(spec, rope=None)),
    "sliding window of layers without rope": ("smollm3", lambda spec: _attention(spec, sliding_window=None)),
    "q, k and v biases before layer norms": ("stablelm", lambda spec: _attention(spec, qkv_bias=False)),
    "partial rotary of gated layers": ("stablelm", lambda spec: _rope(spec, rotary_dim=16)),
}


@pytest.mark.parametrize("feature", KNOCK_OUTS)
def test_a_graph_without_the_feature_is_noticed(
    form: Any,
    feature: str,
    tiny_checkpoint: Any,
    hugging_face: Any,
    load_graph_of: Any,
    token_ids: Any,
    tmp_path: Path,
) -> None:
    variant, knock_out = KNOCK_OUTS[feature]
    checkpoint = tiny_checkpoint(variant)
    with open_checkpoint(checkpoint) as opened:
        opened.spec = spec = knock_out(opened.spec)
        storage = {name: Storage(precision="fp32") for name in spec.tensor_shapes()}
        write_graph(opened, storage, tmp_path, lambda *_: None)
    graph = load_graph_of(tmp_path / "model.onnx", spec, form)
    error = np.abs(graph.step(token_ids) - _expected(hugging_face(checkpoint), token_ids)).max()
    assert error > 100 * TOLERANCE, f"without {feature} the largest error is only {error}"
