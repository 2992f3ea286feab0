"""`DecoderSpec`: everything about a decoder that the code branches on, without its weights.

A family file produces a spec from a config; the reference decoder and the graph builder each read it.
Torch-free, immutable and serializable: the same struct is stored in checkpoints and in the manifest.

Canonical module names, used by every part that touches weights (a `.weight` or `.bias` follows)::

    embed_tokens
    layers.{i}.input_norm               before attention
    layers.{i}.self_attn.q_proj         rows ordered by head, channels half-split for rope
    layers.{i}.self_attn.k_proj  .v_proj  .o_proj
    layers.{i}.self_attn.q_norm  .k_norm     when qk_norm
    layers.{i}.mlp_norm                 before the MLP
    layers.{i}.mlp.gate_proj            when gated
    layers.{i}.mlp.up_proj  .down_proj
    norm                                before the head
    lm_head                             absent when tie_word_embeddings
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, TypeAlias

import msgspec

from edgekit.rope import RopeSpec

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]
"""At least one; checked when a spec is read from JSON."""

Activation: TypeAlias = Literal["silu", "gelu", "gelu_tanh", "relu"]
ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu", "gelu_tanh", "relu")


class NormSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A normalization over the last axis: RMSNorm, or LayerNorm with a bias.

    Attributes:
        kind: "rms" has a weight; "layer" has a weight and a bias.
        epsilon: Added to the mean square (rms) or the variance (layer).
    """

    kind: Literal["rms", "layer"]
    epsilon: float


class AttentionSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Causal self-attention of one layer.

    Attributes:
        num_heads: Query heads, a multiple of `num_kv_heads`.
        num_kv_heads: Heads of the KV cache.
        key_dim: Channels per head of queries and keys.
        value_dim: Channels per head of values.
        scale: Multiplies the scores.
        qkv_bias: Whether q_proj, k_proj and v_proj have biases.
        o_bias: Whether o_proj has a bias.
        rope: Rotary embedding of queries and keys.
        qk_norm: RMSNorm over each head's channels before rope, with one weight of `key_dim` for all heads.
    """

    num_heads: Count
    num_kv_heads: Count
    key_dim: Count
    value_dim: Count
    scale: float
    qkv_bias: bool
    o_bias: bool
    rope: RopeSpec
    qk_norm: NormSpec | None = None

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads


class MlpSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Feed-forward network of one layer.

    Attributes:
        width: Intermediate channels.
        activation: Applied to the gate, or to up_proj's output when not gated.
        gated: down(act(gate(x)) * up(x)) rather than down(act(up(x))).
        bias: Whether its projections have biases.
    """

    width: Count
    activation: Activation
    gated: bool
    bias: bool


class LayerSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One decoder layer with pre-normalization.

    Attributes:
        norm: Kind of both norms.
        parallel_residual: x + attn(norm1(x)) + mlp(norm2(x)), rather than one after the other.
    """

    attention: AttentionSpec
    mlp: MlpSpec
    norm: NormSpec
    parallel_residual: bool = False


class DecoderSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decoder-only language model.

    Attributes:
        family: Name of the family file that made it.
        hidden_size: Width of the residual stream.
        vocab_size: Rows of the embedding.
        max_positions: Trained context length in tokens.
        layers: One entry per layer; they may differ.
        norm: Final normalization.
        tie_word_embeddings: Whether the head is the embedding.
        bos_token_id: First token of a text, if the model has one.
        eos_token_ids: Tokens that end a generation, sorted: the union over config and generation config.
    """

    family: str
    hidden_size: Count
    vocab_size: Count
    max_positions: Count
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    tie_word_embeddings: bool
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def linears(self) -> Iterator[tuple[str, int, int, bool]]:
        """Yields (name, out_features, in_features, has_bias) of every projection, lm_head excluded."""
        for index, layer in enumerate(self.layers):
            attn, mlp, hidden = layer.attention, layer.mlp, self.hidden_size
            prefix = f"layers.{index}"
            q_width, kv = attn.num_heads * attn.key_dim, attn.num_kv_heads
            yield f"{prefix}.self_attn.q_proj", q_width, hidden, attn.qkv_bias
            yield f"{prefix}.self_attn.k_proj", kv * attn.key_dim, hidden, attn.qkv_bias
            yield f"{prefix}.self_attn.v_proj", kv * attn.value_dim, hidden, attn.qkv_bias
            yield f"{prefix}.self_attn.o_proj", hidden, attn.num_heads * attn.value_dim, attn.o_bias
            if mlp.gated:
                yield f"{prefix}.mlp.gate_proj", mlp.width, hidden, mlp.bias
            yield f"{prefix}.mlp.up_proj", mlp.width, hidden, mlp.bias
            yield f"{prefix}.mlp.down_proj", hidden, mlp.width, mlp.bias

    def norms(self) -> Iterator[tuple[str, int, NormSpec]]:
        """Yields (name, width, norm) of every normalization."""
        for index, layer in enumerate(self.layers):
            prefix = f"layers.{index}"
            yield f"{prefix}.input_norm", self.hidden_size, layer.norm
            yield f"{prefix}.mlp_norm", self.hidden_size, layer.norm
            if layer.attention.qk_norm is not None:
                yield f"{prefix}.self_attn.q_norm", layer.attention.key_dim, layer.attention.qk_norm
                yield f"{prefix}.self_attn.k_norm", layer.attention.key_dim, layer.attention.qk_norm
        yield "norm", self.hidden_size, self.norm

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the canonical name and shape of every stored tensor."""
        shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (self.vocab_size, self.hidden_size)}
        for name, rows, columns, bias in self.linears():
            shapes[f"{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{name}.bias"] = (rows,)
        for name, width, norm in self.norms():
            shapes[f"{name}.weight"] = (width,)
            if norm.kind == "layer":
                shapes[f"{name}.bias"] = (width,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, self.hidden_size)
        return shapes
