"""`DecoderSpec`: everything about a decoder that the code branches on, without its weights.

A family file produces a spec from a config; the reference decoder and the graph builder each read it.
Torch-free, immutable and serializable: the same struct is stored in checkpoints and in the manifest.

Canonical module names, used by every part that touches weights (a `.weight` or `.bias` follows)::

    embed_tokens
    layers.{i}.input_norm               before attention, unless norms come after
    layers.{i}.self_attn.q_proj         rows ordered by head, channels half-split for rope
    layers.{i}.self_attn.k_proj  .v_proj  .o_proj
    layers.{i}.self_attn.q_norm  .k_norm     when qk_norm
    layers.{i}.attn_output_norm         after attention, before the residual sum, when norms come after or around
    layers.{i}.mlp_norm                 before the MLP, unless norms come after or it reads input_norm
    layers.{i}.mlp.gate_proj            when gated
    layers.{i}.mlp.up_proj  .down_proj
    layers.{i}.mlp_output_norm          like attn_output_norm
    norm                                before the head
    lm_head                             absent when tie_word_embeddings
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, TypeAlias

import msgspec

from edgekit.rope import LongRopeScaling, RopeSpec

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]
"""At least one; checked when a spec is read from JSON."""

Activation: TypeAlias = Literal["silu", "gelu", "gelu_tanh", "relu"]
ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu", "gelu_tanh", "relu")

NormPlacement: TypeAlias = Literal["pre", "post", "sandwich"]
"""Norms before attention and MLP; after them, within the residual branch; or both."""


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
        rope: Rotary embedding of queries and keys; None for a layer without positions.
        qk_norm: RMSNorm of queries and keys before rope.
        qk_norm_scope: "head" normalizes each head's channels, with one weight of `key_dim` for all heads;
            "all_heads" normalizes the whole projection, with one weight per channel.
        softcap: Scores s become softcap · tanh(s / softcap) before masking; None for none.
        sliding_window: Positions that a token sees, its own and those right before it; None for all.
    """

    num_heads: Count
    num_kv_heads: Count
    key_dim: Count
    value_dim: Count
    scale: float
    qkv_bias: bool
    o_bias: bool
    rope: RopeSpec | None
    qk_norm: NormSpec | None = None
    qk_norm_scope: Literal["head", "all_heads"] = "head"
    softcap: float | None = None
    sliding_window: Count | None = None

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
    """One decoder layer.

    Attributes:
        norm: Kind of its norms.
        norm_placement: Where the norms are.
        parallel_residual: x + attn(norm1(x)) + mlp(norm2(x)), rather than one after the other; "pre" only.
        shared_norm: Whether norm2 of a parallel residual is norm1, and mlp_norm is absent.
        residual_scale: Multiplies what attention and MLP add to the residual stream.
    """

    attention: AttentionSpec
    mlp: MlpSpec
    norm: NormSpec
    norm_placement: NormPlacement = "pre"
    parallel_residual: bool = False
    shared_norm: bool = False
    residual_scale: float = 1.0

    def norm_names(self) -> tuple[str, ...]:
        """Returns the names of the norms over the residual stream, in the order of use."""
        before, after = self.norm_placement != "post", self.norm_placement != "pre"
        present = {
            "input_norm": before,
            "attn_output_norm": after,
            "mlp_norm": before and not self.shared_norm,
            "mlp_output_norm": after,
        }
        return tuple(name for name, is_there in present.items() if is_there)


class CacheGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Layers that share a slot map and a capacity.

    Attributes:
        layers: Their indices.
        sliding_window: Positions that a token of these layers sees; None for all.
    """

    layers: tuple[int, ...]
    sliding_window: Count | None = None


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
        head_bias: Whether the head, which is not tied then, has a bias.
        embedding_scale: Multiplies embeddings, but not a tied head.
        logit_scale: Multiplies logits.
        logit_softcap: Logits z become softcap · tanh(z / softcap), after scaling; None for none.
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
    head_bias: bool = False
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def depends_on_length(self) -> bool:
        """Whether a layer's rotary frequencies follow from the length of the text."""
        return any(layer.attention.rope is not None and layer.attention.rope.depends_on_length for layer in self.layers)

    def rope_range(self, sequence_length: int) -> int:
        """Numbers the ranges of lengths within which keys of one text can be used for another.

        LongRoPE rotates all positions of a long text otherwise than those of a short one. (Dynamic scaling changes
        with every token; there, as in every implementation, a key keeps the rotation that it was made with.)

        Args:
            sequence_length: Tokens of the whole text.
        """
        scalings = (layer.attention.rope.scaling for layer in self.layers if layer.attention.rope is not None)
        limits = {scaling.original_max_positions for scaling in scalings if isinstance(scaling, LongRopeScaling)}
        return sum(1 for limit in limits if sequence_length > limit)

    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """Partitions the layers by sliding window, in the order of their first layers."""
        groups: dict[int | None, list[int]] = {}
        for index, layer in enumerate(self.layers):
            groups.setdefault(layer.attention.sliding_window, []).append(index)
        return tuple(CacheGroup(layers=tuple(layers), sliding_window=window) for window, layers in groups.items())

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
            for name in layer.norm_names():
                yield f"{prefix}.{name}", self.hidden_size, layer.norm
            attn = layer.attention
            if attn.qk_norm is not None:
                whole = attn.qk_norm_scope == "all_heads"
                query_heads, key_heads = (attn.num_heads, attn.num_kv_heads) if whole else (1, 1)
                yield f"{prefix}.self_attn.q_norm", query_heads * attn.key_dim, attn.qk_norm
                yield f"{prefix}.self_attn.k_norm", key_heads * attn.key_dim, attn.qk_norm
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
        if self.head_bias:
            shapes["lm_head.bias"] = (self.vocab_size,)
        return shapes
