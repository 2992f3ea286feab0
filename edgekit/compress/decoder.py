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
from edgekit.rope import RopeSpec
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
        new: From new tokens to new tokens, shape (B or 1, 1, S, S). A layer's sliding window comes on top of it.
        past: From new tokens to past ones, shape (B or 1, 1, S or 1, P).
        past_positions: shape (B or 1, P), int64, of the past tokens; 0 … P − 1 when None.
    """

    new: Tensor
    past: Tensor
    past_positions: Tensor | None = None


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


def softcap(values: Tensor, cap: float | None) -> Tensor:
    """Bounds values smoothly to ±cap (Gemma Team 2024, section 2); None leaves them as they are."""
    return values if cap is None else cap * torch.tanh(values / cap)


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
        norm, whole = attention.qk_norm, attention.qk_norm_scope == "all_heads"
        query_width, key_width = (queries, kv_heads * attention.key_dim) if whole else (attention.key_dim,) * 2
        self.q_norm = None if norm is None else Norm(query_width, norm)
        self.k_norm = None if norm is None else Norm(key_width, norm)

    def forward(
        self, hidden: Tensor, position_ids: Tensor, mask: StepMask, past: KeyValue | None, sequence_length: int
    ) -> tuple[Tensor, KeyValue]:
        """Attends.

        Args:
            hidden: shape (B, S, hidden).
            position_ids: shape (B, S), int64.
            mask: Scores to add.
            past: Keys and values of the past tokens, or None.
            sequence_length: Tokens of the whole text, which some rotary embeddings depend on.

        Returns:
            The output, shape (B, S, hidden), and the new keys and values.
        """
        spec = self.spec
        batch, new = position_ids.shape
        query = self._heads(self.q_proj(hidden), self.q_norm, spec.num_heads)
        key = self._heads(self.k_proj(hidden), self.k_norm, spec.num_kv_heads)
        value = self.v_proj(hidden).view(batch, new, spec.num_kv_heads, spec.value_dim).transpose(1, 2)
        if spec.rope is not None:
            cos, sin = _rotation(spec.rope, position_ids, sequence_length)
            query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
        query, key = query.transpose(1, 2), key.transpose(1, 2)
        keys = key if past is None else torch.cat([past[0], key], dim=2)
        values = value if past is None else torch.cat([past[1], value], dim=2)
        grouped = query.reshape(batch, spec.num_kv_heads, spec.group_size, new, spec.key_dim)
        scores = (grouped @ keys.unsqueeze(2).transpose(-1, -2)).float() * spec.scale
        scores = softcap(scores, spec.softcap) + _bias(mask, position_ids, spec.sliding_window).unsqueeze(2)
        mixed = scores.softmax(-1).to(values.dtype) @ values.unsqueeze(2)
        mixed = mixed.reshape(batch, spec.num_heads, new, spec.value_dim).transpose(1, 2)
        return self.o_proj(mixed.reshape(batch, new, -1)), (key, value)

    def _heads(self, projected: Tensor, norm: Norm | None, heads: int) -> Tensor:
        """Splits (B, S, heads · dk) into (B, S, heads, dk), normalized before or after."""
        split = (*projected.shape[:2], heads, self.spec.key_dim)
        if norm is not None and self.spec.qk_norm_scope == "all_heads":
            projected = norm(projected)
        rows = projected.view(split)
        return norm(rows) if norm is not None and self.spec.qk_norm_scope == "head" else rows


def _bias(mask: StepMask, position_ids: Tensor, window: int | None) -> Tensor:
    """Scores to add, shape (B or 1, 1, S, P + S), float32."""
    new, past = position_ids.shape[1], mask.past.shape[-1]
    batch = max(mask.new.shape[0], mask.past.shape[0])
    bias = torch.cat([mask.past.expand(batch, 1, new, past), mask.new.expand(batch, 1, new, new)], dim=-1).float()
    if window is None:
        return bias
    past_positions = mask.past_positions
    if past_positions is None:
        past_positions = torch.arange(past, device=position_ids.device)[None]
    positions = torch.cat([past_positions.expand(len(position_ids), past), position_ids], dim=1)
    outside = position_ids.unsqueeze(2) - positions.unsqueeze(1) >= window
    return bias + MASKED * outside.unsqueeze(1)


def _rotation(rope: RopeSpec, position_ids: Tensor, sequence_length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position and channel pair, shape (B, S, 1, rotary_dim / 2), float32."""
    frequencies = torch.from_numpy(rope.inverse_frequencies(sequence_length)).float().to(position_ids.device)
    angles = (position_ids.float().unsqueeze(-1) * frequencies).unsqueeze(2)
    return angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor


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
        self.self_attn = Attention(spec, self.spec.attention)
        self.mlp = Mlp(spec, self.spec.mlp)
        for name in self.spec.norm_names():
            self.add_module(name, Norm(spec.hidden_size, self.spec.norm))

    def forward(
        self,
        hidden: Tensor,
        position_ids: Tensor,
        mask: StepMask,
        past: KeyValue | None = None,
        sequence_length: int | None = None,
    ) -> tuple[Tensor, KeyValue]:
        """Applies the layer.

        Args:
            hidden: shape (B, S, hidden).
            position_ids: shape (B, S), int64.
            mask: Scores to add.
            past: Keys and values of the past tokens, or None.
            sequence_length: Tokens of the whole text, which some rotary embeddings depend on; up to the largest of
                `position_ids` when None.

        Returns:
            The residual stream, shape (B, S, hidden), and the new keys and values.
        """
        if sequence_length is None:
            sequence_length = int(position_ids.max()) + 1
        spec, normed = self.spec, self._norm("input_norm", hidden)
        attended, key_value = self.self_attn(normed, position_ids, mask, past, sequence_length)
        after_attention = hidden + spec.residual_scale * self._norm("attn_output_norm", attended)
        if not spec.shared_norm:
            normed = self._norm("mlp_norm", hidden if spec.parallel_residual else after_attention)
        mixed = self._norm("mlp_output_norm", self.mlp(normed))
        return after_attention + spec.residual_scale * mixed, key_value

    def _norm(self, name: str, hidden: Tensor) -> Tensor:
        """Applies a norm, if the layer has it."""
        if name not in self.spec.norm_names():
            return hidden
        normed: Tensor = self.get_submodule(name)(hidden)
        return normed


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
        self.lm_head = None if tied else nn.Linear(spec.hidden_size, spec.vocab_size, bias=spec.head_bias)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        past: Sequence[KeyValue] | None = None,
        mask: StepMask | None = None,
        sequence_length: int | None = None,
    ) -> DecoderOutput:
        """Computes one step.

        Args:
            input_ids: shape (B, S), int64.
            position_ids: shape (B, S), int64; the ones that follow the past when None.
            past: Keys and values of the past tokens, per layer.
            mask: Scores to add; causal when None.
            sequence_length: Tokens of the whole text, which some rotary embeddings depend on; up to the largest of
                `position_ids` when None.
        """
        new, past_length = input_ids.shape[1], 0 if past is None else past[0][0].shape[2]
        if position_ids is None:
            position_ids = torch.arange(past_length, past_length + new, device=input_ids.device).expand_as(input_ids)
        if mask is None:
            causal = causal_mask(new, past_length)
            mask = StepMask(new=causal.new.to(input_ids.device), past=causal.past.to(input_ids.device))
        hidden = self.embed_tokens(input_ids) * self.spec.embedding_scale
        key_values = []
        for index, layer in enumerate(self.layers):
            layer_past = None if past is None else past[index]
            hidden, key_value = layer(hidden, position_ids, mask, layer_past, sequence_length)
            key_values.append(key_value)
        hidden = self.norm(hidden)
        logits = functional.linear(hidden, self.embed_tokens.weight) if self.lm_head is None else self.lm_head(hidden)
        logits = softcap(logits.float() * self.spec.logit_scale, self.spec.logit_softcap)
        return DecoderOutput(logits, tuple(key_values))


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
    hidden = _dense(_take(embedding, token_ids.reshape(-1))).reshape(batch, length, -1) * spec.embedding_scale
    positions, mask = torch.arange(length).expand(batch, length), causal_mask(length, 0)
    for index in range(len(spec.layers)):
        hidden, _ = load_layer(checkpoint, index)(hidden, positions, mask)
    norm = Norm(spec.hidden_size, spec.norm)
    norm.load_state_dict({name: _dense(checkpoint.tensor(f"norm.{name}")) for name in norm.state_dict()})
    head = embedding if spec.tie_word_embeddings else checkpoint.tensor("lm_head.weight")
    logits = _project(norm(hidden), head)
    if spec.head_bias:
        logits += _dense(checkpoint.tensor("lm_head.bias"))
    return softcap(logits * spec.logit_scale, spec.logit_softcap).numpy()


def _project(hidden: Tensor, head: Weight) -> Tensor:
    """Multiplies with the head, dequantizing some rows at a time: a large vocabulary is gigabytes in float32."""
    pieces = np.split(np.arange(head.shape[0]), range(_HEAD_ROWS, head.shape[0], _HEAD_ROWS))
    return torch.cat([functional.linear(hidden, _dense(_take(head, rows))) for rows in pieces], dim=-1)


def _take(weight: Weight, rows: npt.NDArray[np.int64]) -> Weight:
    return weight.take_rows(rows) if isinstance(weight, QuantizedBlocks) else weight[rows]


def _dense(weight: Weight) -> Tensor:
    return torch.from_numpy(weight.dequantize() if isinstance(weight, QuantizedBlocks) else weight)
