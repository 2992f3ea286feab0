from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn

from edgekit.checkpoint import open_checkpoint
from edgekit.compress.decoder import Decoder, Norm, load_decoder
from edgekit.rope import DynamicScaling, LongRopeScaling
from edgekit.spec import DecoderSpec, LayerSpec, NormSpec

TinyCheckpoint: TypeAlias = Callable[[str], Path]
Tokens: TypeAlias = npt.NDArray[np.int64]

replace = msgspec.structs.replace


def _in_layers(change: Callable[[LayerSpec], LayerSpec]) -> Callable[[DecoderSpec], DecoderSpec]:
    return lambda spec: replace(spec, layers=tuple(change(layer) for layer in spec.layers))


def _in_attention(**changes: Any) -> Callable[[DecoderSpec], DecoderSpec]:
    return _in_layers(lambda layer: replace(layer, attention=replace(layer.attention, **changes)))


def _in_rope(**changes: Any) -> Callable[[DecoderSpec], DecoderSpec]:
    def change(layer: LayerSpec) -> LayerSpec:
        rope = layer.attention.rope
        assert rope is not None
        return replace(layer, attention=replace(layer.attention, rope=replace(rope, **changes)))

    return _in_layers(change)


def _in_mlp(**changes: Any) -> Callable[[DecoderSpec], DecoderSpec]:
    return _in_layers(lambda layer: replace(layer, mlp=replace(layer.mlp, **changes)))


def _with_layer_norm_kind(kind: str) -> Callable[[DecoderSpec], DecoderSpec]:
    return _in_layers(lambda layer: replace(layer, norm=replace(layer.norm, kind=kind)))


def _with_long_rope_from(length: int) -> Callable[[DecoderSpec], DecoderSpec]:
    def change(layer: LayerSpec) -> LayerSpec:
        rope = layer.attention.rope
        assert rope is not None
        assert isinstance(rope.scaling, LongRopeScaling)
        scaling = replace(rope.scaling, original_max_positions=length)
        return replace(layer, attention=replace(layer.attention, rope=replace(rope, scaling=scaling)))

    return _in_layers(change)


def _with_the_rope_of_layer(index: int) -> Callable[[DecoderSpec], DecoderSpec]:
    return lambda spec: _in_attention(rope=spec.layers[index].attention.rope)(spec)


# A wrong spec computes something else: what reads the spec cannot ignore the feature and still agree with the oracle.
WRONG = {
    "no query and key norms": ("qwen3", _in_attention(qk_norm=None)),
    "no biases of q, k and v": ("llama_bias", _in_attention(qkv_bias=False)),
    "no bias of o": ("llama_bias", _in_attention(o_bias=False)),
    "no biases of the MLP": ("llama_bias", _in_mlp(bias=False)),
    "no biases of q, k and v in NeoX": ("gpt_neox", _in_attention(qkv_bias=False)),
    "no biases of the MLP in NeoX": ("gpt_neox", _in_mlp(bias=False)),
    "no Llama 3 scaling": ("llama_llama3_rope", _in_rope(scaling=None)),
    "no linear scaling": ("llama_linear_rope", _in_rope(scaling=None)),
    "other base frequencies": ("qwen3_bias", _in_rope(theta=10000.0)),
    "sequential instead of parallel": ("gpt_neox", _in_layers(lambda layer: replace(layer, parallel_residual=False))),
    "parallel instead of sequential": (
        "gpt_neox_sequential",
        _in_layers(lambda layer: replace(layer, parallel_residual=True)),
    ),
    "full instead of partial rotation": ("gpt_neox", _in_rope(rotary_dim=16)),
    "partial instead of full rotation": ("llama", _in_rope(rotary_dim=8)),
    "another scale of the scores": ("llama_wide_heads", _in_attention(scale=16**-0.5)),
    "tanh instead of exact GELU": ("gpt_neox", _in_mlp(activation="gelu_tanh")),
    "exact instead of tanh GELU": ("llama_gelu_tanh", _in_mlp(activation="gelu")),
    "SiLU instead of ReLU": ("gpt_neox_relu", _in_mlp(activation="silu")),
    "RMSNorm instead of LayerNorm": ("gpt_neox", _with_layer_norm_kind("rms")),
    "another epsilon": ("llama", _in_layers(lambda layer: replace(layer, norm=replace(layer.norm, epsilon=0.1)))),
    "no sliding window": ("mistral", _in_attention(sliding_window=None)),
    "a longer sliding window": ("mistral", _in_attention(sliding_window=8)),
    "a window in every layer": ("qwen2_windows", _in_attention(sliding_window=5)),
    "no biases of q, k and v in Qwen2": ("qwen2", _in_attention(qkv_bias=False)),
    "no soft cap of the scores": ("gemma2", _in_attention(softcap=None)),
    "no soft cap of the logits": ("gemma2", lambda spec: replace(spec, logit_softcap=None)),
    "the scale of the head width": ("gemma2", _in_attention(scale=16**-0.5)),
    "unscaled embeddings": ("gemma2", lambda spec: replace(spec, embedding_scale=1.0)),
    "no norms after attention and MLP": ("gemma2", _in_layers(lambda layer: replace(layer, norm_placement="pre"))),
    "no norms before attention and MLP": ("gemma2", _in_layers(lambda layer: replace(layer, norm_placement="post"))),
    "one rope for all layers": ("gemma3", _with_the_rope_of_layer(0)),
    "the other rope for all layers": ("gemma3", _with_the_rope_of_layer(1)),
    "no norms of queries and keys in Gemma": ("gemma3", _in_attention(qk_norm=None)),
    "no norms over all heads": ("olmo2", _in_attention(qk_norm=None)),
    "no YaRN scaling": ("llama_yarn_rope", _in_rope(scaling=None)),
    "no attention factor of YaRN": ("llama_yarn_rope", _in_rope(attention_factor=1.0)),
    "no dynamic scaling": ("llama_dynamic_rope", _in_rope(scaling=None)),
    "dynamic scaling of a longer context": (
        "llama_dynamic_rope",
        _in_rope(scaling=DynamicScaling(factor=4.0, original_max_positions=24)),
    ),
    "long factors in short texts": ("phi3_longrope_short", _with_long_rope_from(20)),
    "short factors in long texts": ("phi3_longrope", _with_long_rope_from(24)),
    "no attention factor of LongRoPE": ("phi3_longrope_short", _in_rope(attention_factor=1.0)),
    "no sliding window in Phi-3": ("phi3", _in_attention(sliding_window=None)),
    "no bias of the head": ("phi", lambda spec: replace(spec, head_bias=False)),
    "a norm shared with the MLP": ("gpt_neox", _in_layers(lambda layer: replace(layer, shared_norm=True))),
    "full instead of partial rotation in Phi": ("phi", _in_rope(rotary_dim=16)),
    "full instead of partial rotation in StableLM": ("stablelm", _in_rope(rotary_dim=16)),
    "no biases of q, k and v in StableLM": ("stablelm", _in_attention(qkv_bias=False)),
    "no multiplier of embeddings": ("granite", lambda spec: replace(spec, embedding_scale=1.0)),
    "no multiplier of scores": ("granite", _in_attention(scale=16**-0.5)),
    "no multiplier of residual branches": ("granite", _in_layers(lambda layer: replace(layer, residual_scale=1.0))),
    "no multiplier of logits": ("granite", lambda spec: replace(spec, logit_scale=1.0)),
    "rope in every layer": ("smollm3", _with_the_rope_of_layer(0)),
    "rope in no layer": ("smollm3", _with_the_rope_of_layer(1)),
    "no sliding window in SmolLM3": ("smollm3", _in_attention(sliding_window=None)),
    "a tied head": ("llama", lambda spec: replace(spec, tie_word_embeddings=True)),
}


@pytest.mark.parametrize("name", WRONG)
def test_every_feature_matters(name: str, tiny_checkpoint: TinyCheckpoint, token_ids: Tokens) -> None:
    variant, change = WRONG[name]
    with open_checkpoint(tiny_checkpoint(variant)) as checkpoint:
        right = load_decoder(checkpoint)
    wrong = Decoder(change(right.spec))
    assert wrong.spec != right.spec
    # The weights are the same, less those of the removed feature.
    wrong.load_state_dict({name: tensor for name, tensor in right.state_dict().items() if name in wrong.state_dict()})
    tokens = torch.from_numpy(token_ids)
    with torch.no_grad():
        difference = (wrong(tokens).logits - right(tokens).logits).abs().max()
    # The two forms of GELU differ by less than 5e-4, so their logits cannot differ by more than a few of those.
    assert difference > (1e-4 if "GELU" in name else 1e-3)


@pytest.mark.parametrize("variant", ["llama", "gpt_neox"])
def test_a_decoder_of_random_weights_trains(variant: str, tiny_checkpoint: TinyCheckpoint, token_ids: Tokens) -> None:
    with open_checkpoint(tiny_checkpoint(variant)) as checkpoint:
        spec = checkpoint.spec
    torch.manual_seed(0)
    decoder, tokens = Decoder(spec), torch.from_numpy(token_ids)
    optimizer = torch.optim.Adam(decoder.parameters(), lr=1e-2)

    def loss() -> Tensor:
        logits = decoder(tokens[:, :-1]).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    first = loss().item()
    for _ in range(20):
        optimizer.zero_grad()
        torch.autograd.backward(loss())
        assert all(parameter.grad is not None and parameter.grad.any() for parameter in decoder.parameters())
        optimizer.step()
    assert loss().item() < first / 4


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_norms_of_half_precision_inputs_are_computed_in_float32(kind: str) -> None:
    # Their squares are beyond float16.
    hidden = 1000 * torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    norm = Norm(64, msgspec.convert({"kind": kind, "epsilon": 1e-5}, NormSpec))
    oracle = nn.RMSNorm(64, eps=1e-5) if kind == "rms" else nn.LayerNorm(64, eps=1e-5)
    with torch.no_grad():
        got = norm.half()(hidden.half())
        torch.testing.assert_close(got, oracle(hidden.half().float()).half(), rtol=2e-3, atol=2e-3)
    assert got.dtype == torch.float16


def _zero(decoder: Decoder, name: str, index: Any) -> None:
    with torch.no_grad():
        decoder.get_parameter(name)[index] = 0


def _planted(decoder: Decoder) -> tuple[DecoderSpec, dict[str, Tensor]]:
    """Makes parts of a NeoX without effect, and returns the spec and weights of what is left without them."""
    channels = torch.tensor([head * 16 + channel for head in range(4) for channel in range(13)])
    heads, width = torch.arange(32), torch.arange(40)
    for projection in ("q_proj", "k_proj"):  # the last three channels of every key head of layer 0
        dead = [row for row in range(64) if row not in channels]
        _zero(decoder, f"layers.0.self_attn.{projection}.weight", dead)
        _zero(decoder, f"layers.0.self_attn.{projection}.bias", dead)
    _zero(decoder, "layers.1.self_attn.o_proj.weight", (slice(None), slice(32, None)))  # heads 2 and 3 of layer 1
    _zero(decoder, "layers.1.mlp.down_proj.weight", (slice(None), slice(40, None)))
    first, second = decoder.spec.layers
    spec = replace(
        decoder.spec,
        layers=(
            replace(first, attention=replace(first.attention, key_dim=13)),
            replace(
                second,
                attention=replace(second.attention, num_heads=2, num_kv_heads=2),
                mlp=replace(second.mlp, width=40),
            ),
        ),
    )
    weights = dict(decoder.state_dict())
    for part in ("weight", "bias"):
        for projection in ("q_proj", "k_proj"):
            weights[f"layers.0.self_attn.{projection}.{part}"] = weights[f"layers.0.self_attn.{projection}.{part}"][
                channels
            ]
        for projection in ("q_proj", "k_proj", "v_proj"):
            weights[f"layers.1.self_attn.{projection}.{part}"] = weights[f"layers.1.self_attn.{projection}.{part}"][
                heads
            ]
        weights[f"layers.1.mlp.up_proj.{part}"] = weights[f"layers.1.mlp.up_proj.{part}"][width]
    weights["layers.1.self_attn.o_proj.weight"] = weights["layers.1.self_attn.o_proj.weight"][:, heads]
    weights["layers.1.mlp.down_proj.weight"] = weights["layers.1.mlp.down_proj.weight"][:, width]
    return spec, weights


def test_layers_of_different_shapes_compute_what_the_unpruned_ones_do(
    tiny_checkpoint: TinyCheckpoint, token_ids: Tokens
) -> None:
    with open_checkpoint(tiny_checkpoint("gpt_neox")) as checkpoint:
        whole = load_decoder(checkpoint)
    tokens = torch.from_numpy(token_ids)
    spec, weights = _planted(whole)
    pruned = Decoder(spec)
    pruned.load_state_dict(weights)
    with torch.no_grad():
        wanted = whole(tokens).logits
        first = pruned(tokens[:, :20])
        second = pruned(tokens[:, 20:], past=first.key_values)
    assert [tuple(part.shape) for layer in first.key_values for part in layer] == [
        (2, 4, 20, 13),
        (2, 4, 20, 16),
        (2, 2, 20, 16),
        (2, 2, 20, 16),
    ]
    torch.testing.assert_close(torch.cat([first.logits, second.logits], 1), wanted, rtol=0, atol=1e-4)
