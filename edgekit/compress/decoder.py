"""The reference decoder: one torch module for every family, built from a `DecoderSpec`.

It is what compression trains and what an exported graph is compared with, so it is plain: every operation is
differentiable, nothing is fused or cached, norms and softmax run in float32, and inputs are never modified.

B is the batch, S the new tokens, P the past tokens, KV, dk and dv belong to a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from edgekit.blocks import QuantizedBlocks
from edgekit.checkpoint import Weight
from edgekit.contract import MASKED
from edgekit.spec import Activation, AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, NormSpec

KeyValue: TypeAlias = tuple[Tensor, Tensor]
"""Keys after rope, shape (B, KV, tokens, dk), and values, shape (B, KV, tokens, dv)."""

_HEAD_ROWS = 16384


class DecoderOutput(NamedTuple):
    """What one step computes.

    Attributes:
        logits: shape (B, S, vocabulary), float32.
        key_values: Keys and values of the new tokens, per layer.
    """

    logits: Tensor
    key_values: tuple[KeyValue, ...]


class StepMask(NamedTuple):
    """Who sees whom in a step, as scores to add.

    Attributes:
        new: From new tokens to new tokens, shape (B or 1, 1, S, S).
        past: From new tokens to past ones, shape (B or 1, 1, S or 1, P).
    """

    new: Tensor
    past: Tensor


def causal_mask(new: int, past: int) -> StepMask:
    """Returns the mask of `new` tokens that see the whole past and each other in order, float32."""
    future = torch.ones(new, new, dtype=torch.bool).triu(1)
    return StepMask(new=future * torch.tensor(MASKED).reshape(1, 1, 1, 1), past=torch.zeros(1, 1, 1, past))


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last axis, computed in float32."""

    def __init__(self, width: int, spec: NormSpec) -> None:
        """Makes an identity norm of the given width."""
        super().__init__()
        self.spec = spec
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if spec.kind == "layer" else None

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalizes, shape (..., width)."""
        wide = hidden.float()
        if self.spec.kind == "layer":
            wide = wide - wide.mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.spec.epsilon)
        scaled = self.weight * wide.to(hidden.dtype)
        return scaled if self.bias is None else scaled + self.bias


class Attention(nn.Module):
    """Causal self-attention of one layer over past and new tokens."""

    def __init__(self, spec: DecoderSpec, attention: AttentionSpec) -> None:
        """Makes a randomly initialized attention."""
        super().__init__()
        self.spec = attention
        queries, kv_heads = attention.num_heads * attention.key_dim, attention.num_kv_heads
        self.q_proj = nn.Linear(spec.hidden_size, queries, bias=attention.qkv_bias)
        self.k_proj = nn.Linear(spec.hidden_size, kv_heads * attention.key_dim, bias=attention.qkv_bias)
        self.v_proj = nn.Linear(spec.hidden_size, kv_heads * attention.value_dim, bias=attention.qkv_bias)
        self.o_proj = nn.Linear(attention.num_heads * attention.value_dim, spec.hidden_size, bias=attention.o_bias)
        norm = attention.qk_norm
        self.q_norm = None if norm is None else Norm(attention.key_dim, norm)
        self.k_norm = None if norm is None else Norm(attention.key_dim, norm)

    def forward(
        self, hidden: Tensor, position_ids: Tensor, mask: StepMask, past: KeyValue | None
    ) -> tuple[Tensor, KeyValue]:
        """Attends.

        Args:
            hidden: shape (B, S, hidden).
            position_ids: shape (B, S), int64.
            mask: Scores to add.
            past: Keys and values of the past tokens, or None.

        Returns:
            The output, shape (B, S, hidden), and the new keys and values.
        """
        spec = self.spec
        batch, new = position_ids.shape
        query = self.q_proj(hidden).view(batch, new, spec.num_heads, spec.key_dim)
        key = self.k_proj(hidden).view(batch, new, spec.num_kv_heads, spec.key_dim)
        value = self.v_proj(hidden).view(batch, new, spec.num_kv_heads, spec.value_dim).transpose(1, 2)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        cos, sin = _rotation(spec, position_ids)
        query, key = _rotate(query, cos, sin).transpose(1, 2), _rotate(key, cos, sin).transpose(1, 2)
        keys = key if past is None else torch.cat([past[0], key], dim=2)
        values = value if past is None else torch.cat([past[1], value], dim=2)
        grouped = query.reshape(batch, spec.num_kv_heads, spec.group_size, new, spec.key_dim)
        scores = (grouped @ keys.unsqueeze(2).transpose(-1, -2)).float() * spec.scale
        scores = scores + _bias(mask, new).unsqueeze(2)
        mixed = scores.softmax(-1).to(values.dtype) @ values.unsqueeze(2)
        mixed = mixed.reshape(batch, spec.num_heads, new, spec.value_dim).transpose(1, 2)
        return self.o_proj(mixed.reshape(batch, new, -1)), (key, value)


def _bias(mask: StepMask, new: int) -> Tensor:
    batch = max(mask.new.shape[0], mask.past.shape[0])
    past = mask.past.expand(batch, 1, new, mask.past.shape[-1])
    return torch.cat([past, mask.new.expand(batch, 1, new, new)], dim=-1).float()


def _rotation(spec: AttentionSpec, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position and channel pair, shape (B, S, 1, rotary_dim / 2), float32."""
    frequencies = torch.from_numpy(spec.rope.inverse_frequencies()).float().to(position_ids.device)
    angles = (position_ids.float().unsqueeze(-1) * frequencies).unsqueeze(2)
    return angles.cos(), angles.sin()


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the leading channels of heads, shape (B, S, heads, dk); pairs are half the rotary width apart."""
    half = cos.shape[-1]
    first, second, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
    cos, sin = cos.to(heads.dtype), sin.to(heads.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


class Mlp(nn.Module):
    """Feed-forward network of one layer."""

    def __init__(self, spec: DecoderSpec, mlp: MlpSpec) -> None:
        """Makes a randomly initialized network."""
        super().__init__()
        self.spec = mlp
        self.gate_proj = nn.Linear(spec.hidden_size, mlp.width, bias=mlp.bias) if mlp.gated else None
        self.up_proj = nn.Linear(spec.hidden_size, mlp.width, bias=mlp.bias)
        self.down_proj = nn.Linear(mlp.width, spec.hidden_size, bias=mlp.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Applies the network, shape (B, S, hidden)."""
        up: Tensor = self.up_proj(hidden)
        if self.gate_proj is None:
            inner = _activate(up, self.spec.activation)
        else:
            inner = _activate(self.gate_proj(hidden), self.spec.activation) * up
        down: Tensor = self.down_proj(inner)
        return down


def _activate(inner: Tensor, kind: Activation) -> Tensor:
    match kind:
        case "silu":
            return functional.silu(inner)
        case "gelu":
            return functional.gelu(inner)
        case "gelu_tanh":
            return functional.gelu(inner, approximate="tanh")
        case "relu":
            return functional.relu(inner)


class DecoderLayer(nn.Module):
    """One layer of a spec, usable on its own."""

    def __init__(self, spec: DecoderSpec, index: int) -> None:
        """Makes a randomly initialized layer.

        Args:
            spec: The model.
            index: Which of its layers.
        """
        super().__init__()
        self.spec: LayerSpec = spec.layers[index]
        self.input_norm = Norm(spec.hidden_size, self.spec.norm)
        self.self_attn = Attention(spec, self.spec.attention)
        self.mlp_norm = Norm(spec.hidden_size, self.spec.norm)
        self.mlp = Mlp(spec, self.spec.mlp)

    def forward(
        self, hidden: Tensor, position_ids: Tensor, mask: StepMask, past: KeyValue | None = None
    ) -> tuple[Tensor, KeyValue]:
        """Applies the layer.

        Args:
            hidden: shape (B, S, hidden).
            position_ids: shape (B, S), int64.
            mask: Scores to add.
            past: Keys and values of the past tokens, or None.

        Returns:
            The residual stream, shape (B, S, hidden), and the new keys and values.
        """
        attended, key_value = self.self_attn(self.input_norm(hidden), position_ids, mask, past)
        if self.spec.parallel_residual:
            return hidden + attended + self.mlp(self.mlp_norm(hidden)), key_value
        hidden = hidden + attended
        return hidden + self.mlp(self.mlp_norm(hidden)), key_value


class Decoder(nn.Module):
    """A whole model. Its state dict has exactly the names and shapes of ``spec.tensor_shapes()``."""

    def __init__(self, spec: DecoderSpec) -> None:
        """Makes a randomly initialized model.

        Args:
            spec: The model.
        """
        super().__init__()
        self.spec = spec
        self.embed_tokens = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(spec, index) for index in range(len(spec.layers)))
        self.norm = Norm(spec.hidden_size, spec.norm)
        tied = spec.tie_word_embeddings
        self.lm_head = None if tied else nn.Linear(spec.hidden_size, spec.vocab_size, bias=False)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        past: Sequence[KeyValue] | None = None,
        mask: StepMask | None = None,
    ) -> DecoderOutput:
        """Computes one step.

        Args:
            input_ids: shape (B, S), int64.
            position_ids: shape (B, S), int64; the ones that follow the past when None.
            past: Keys and values of the past tokens, per layer.
            mask: Scores to add; causal when None.
        """
        new, past_length = input_ids.shape[1], 0 if past is None else past[0][0].shape[2]
        if position_ids is None:
            position_ids = torch.arange(past_length, past_length + new, device=input_ids.device).expand_as(input_ids)
        if mask is None:
            mask = StepMask(*(bias.to(input_ids.device) for bias in causal_mask(new, past_length)))
        hidden = self.embed_tokens(input_ids)
        key_values = []
        for index, layer in enumerate(self.layers):
            hidden, key_value = layer(hidden, position_ids, mask, None if past is None else past[index])
            key_values.append(key_value)
        hidden = self.norm(hidden)
        head = self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        return DecoderOutput(functional.linear(hidden, head).float(), tuple(key_values))


class ModelWeights(Protocol):
    """Weights by canonical name: a checkpoint, or anything else that reads like one."""

    @property
    def spec(self) -> DecoderSpec:
        """The model that they belong to."""

    def tensor(self, name: str) -> Weight:
        """Reads one weight."""


def load_decoder(checkpoint: ModelWeights) -> Decoder:
    """Reads a whole checkpoint into a decoder, float32; quantized weights are dequantized."""
    with torch.device("meta"):
        decoder = Decoder(checkpoint.spec)
    weights = {name: _dense(checkpoint.tensor(name)) for name in checkpoint.spec.tensor_shapes()}
    decoder.load_state_dict(weights, assign=True)
    return decoder


def load_layer(checkpoint: ModelWeights, index: int) -> DecoderLayer:
    """Reads one layer of a checkpoint, float32; quantized weights are dequantized."""
    with torch.device("meta"):
        layer = DecoderLayer(checkpoint.spec, index)
    weights = {name: _dense(checkpoint.tensor(f"layers.{index}.{name}")) for name in layer.state_dict()}
    layer.load_state_dict(weights, assign=True)
    return layer


@torch.no_grad()
def stream_logits(checkpoint: ModelWeights, token_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Computes the logits of whole sequences with one layer in memory at a time.

    Args:
        checkpoint: The model.
        token_ids: shape (B, S), int64.

    Returns:
        shape (B, S, vocabulary), float32.
    """
    spec = checkpoint.spec
    batch, length = token_ids.shape
    embedding = checkpoint.tensor("embed_tokens.weight")
    hidden = _dense(_take(embedding, token_ids.reshape(-1))).reshape(batch, length, -1)
    positions, mask = torch.arange(length).expand(batch, length), causal_mask(length, 0)
    for index in range(len(spec.layers)):
        hidden, _ = load_layer(checkpoint, index)(hidden, positions, mask)
    norm = Norm(spec.hidden_size, spec.norm)
    norm.load_state_dict({name: _dense(checkpoint.tensor(f"norm.{name}")) for name in norm.state_dict()})
    head = embedding if spec.tie_word_embeddings else checkpoint.tensor("lm_head.weight")
    return _project(norm(hidden), head).numpy()


def _project(hidden: Tensor, head: Weight) -> Tensor:
    """Multiplies with the head, dequantizing some rows at a time: a large vocabulary is gigabytes in float32."""
    pieces = np.split(np.arange(head.shape[0]), range(_HEAD_ROWS, head.shape[0], _HEAD_ROWS))
    return torch.cat([functional.linear(hidden, _dense(_take(head, rows))) for rows in pieces], dim=-1)


def _take(weight: Weight, rows: npt.NDArray[np.int64]) -> Weight:
    return weight.take_rows(rows) if isinstance(weight, QuantizedBlocks) else weight[rows]


def _dense(weight: Weight) -> Tensor:
    return torch.from_numpy(weight.dequantize() if isinstance(weight, QuantizedBlocks) else weight)
