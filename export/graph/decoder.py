"""The portable graph of a decoder, built from its spec and its stored weights; nothing is traced.

    input_ids ─▶ embedding ─▶ layer 0 ─▶ … ─▶ layer L−1 ─▶ rows that need logits ─▶ norm ─▶ head ─▶ logits

A layer, whose norms are before, after or around attention and MLP; a parallel residual feeds the MLP from the left:

    hidden ─┬─▶ (norm) ─▶ attention ─▶ (norm) ─▶ (scale) ─▶ Add ─┬─▶ (norm) ─▶ MLP ─▶ (norm) ─▶ (scale) ─▶ Add ─▶
            └───────────────────────────────────────────────▶    └────────────────────────────────────────▶

`edgekit.contract` has the table of inputs and outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from edgekit import contract
from edgekit.export.graph.attention import (
    AttentionBias,
    AttentionOptions,
    Projections,
    RopeTable,
    attention,
    attention_bias,
    heads,
    join_heads,
    rope_frequencies,
    rope_table,
    scaled,
    softcap,
    windowed,
)
from edgekit.export.graph.builder import IR_VERSION, GraphBuilder
from edgekit.export.graph.kv_cache import GraphOptions, cache_rows, past_inputs
from edgekit.export.graph.linear import LinearInputs, embedding, linear
from edgekit.export.graph.mlp import gated_activation, plain_activation
from edgekit.export.graph.norm import norm
from edgekit.export.weights import StoredWeight
from edgekit.rope import RopeSpec
from edgekit.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, NormSpec

FLOAT, INT64 = ir.DataType.FLOAT, ir.DataType.INT64


def build_graph(
    spec: DecoderSpec, weights: dict[str, StoredWeight], producer_version: str, options: GraphOptions
) -> ir.Model:
    """Builds the portable graph.

    Args:
        spec: The decoder.
        weights: Every tensor of `spec.tensor_shapes()`, by canonical name.
        producer_version: EdgeKit's version, for the model's header.
        options: See `GraphOptions`.

    Returns:
        An opset 21 model of the standard domain whose weights lie in the data file.
    """
    return _DecoderGraph(spec, weights, options).build(producer_version)


@dataclass(frozen=True, kw_only=True)
class _Step:
    """Inputs that every layer shares."""

    position_ids: ir.Value
    new_bias: ir.Value
    past_biases: tuple[ir.Value, ...]
    sequence_length: ir.Value | None


class _DecoderGraph:
    def __init__(self, spec: DecoderSpec, weights: dict[str, StoredWeight], options: GraphOptions) -> None:
        self.options = options
        self.spec = spec
        self.weights = weights
        self.g = GraphBuilder(spec.family)
        self._group_of = {layer: index for index, group in enumerate(spec.cache_groups()) for layer in group.layers}
        self._tables: dict[RopeSpec, RopeTable] = {}
        self._biases: dict[tuple[int, int], AttentionBias] = {}

    def build(self, producer_version: str) -> ir.Model:
        g, spec = self.g, self.spec
        input_ids = g.input(contract.INPUT_IDS, INT64, ["batch", "sequence"])
        step = _Step(
            position_ids=g.input(contract.POSITION_IDS, INT64, ["batch", "sequence"]),
            new_bias=g.input(contract.NEW_BIAS, FLOAT, ["batch", 1, "sequence", "sequence"]),
            past_biases=tuple(
                g.input(contract.past_bias(group), FLOAT, ["batch", 1, f"bias_rows.{group}", f"capacity.{group}"])
                for group in range(len(spec.cache_groups()))
            ),
            sequence_length=g.input(contract.SEQUENCE_LENGTH, INT64, [1]) if spec.depends_on_length else None,
        )
        logit_rows = g.input(contract.LOGIT_ROWS, INT64, ["rows"])
        for index, layer in enumerate(spec.layers):  # first, so that what several share is not named after one of them
            self._table(layer.attention.rope, step)
            self._bias(index, step)
        with g.scope("embed_tokens"):
            hidden = embedding(g, input_ids, self.weights["embed_tokens.weight"])
            hidden = scaled(g, hidden, spec.embedding_scale)
        for index, layer in enumerate(spec.layers):
            with g.scope(f"layers.{index}"):
                hidden = self._layer(index, layer, hidden, step)
        with g.block("select_rows", [hidden, logit_rows], {"hidden": spec.hidden_size}) as outputs:
            hidden = g.op("Gather", hidden, logit_rows, attributes={"axis": 1})
            outputs.append(hidden)
        hidden = self._norm("norm", spec.norm, hidden)
        head = "embed_tokens" if spec.tie_word_embeddings else "lm_head"
        with g.scope("lm_head"):
            bias = self._vector("lm_head.bias") if spec.head_bias else None
            logits = linear(g, LinearInputs(g, hidden), self.weights[f"{head}.weight"], bias)
            logits = softcap(g, scaled(g, logits, spec.logit_scale), spec.logit_softcap)
            with g.block("logits", [logits, logit_rows], {}) as outputs:
                logits = g.op("Identity", logits)
                outputs.append(logits)
        g.output(logits, contract.LOGITS, FLOAT, ["batch", "rows", spec.vocab_size])
        return ir.Model(g.finish(), ir_version=IR_VERSION, producer_name="edgekit", producer_version=producer_version)

    def _layer(self, index: int, layer: LayerSpec, hidden: ir.Value, step: _Step) -> ir.Value:
        normed = self._layer_norm(index, "input_norm", hidden)
        attended = self._layer_norm(index, "attn_output_norm", self._attention(index, layer.attention, normed, step))
        after_attention = self.g.op("Add", hidden, scaled(self.g, attended, layer.residual_scale))
        if not layer.shared_norm:
            normed = self._layer_norm(index, "mlp_norm", hidden if layer.parallel_residual else after_attention)
        mixed = self._layer_norm(index, "mlp_output_norm", self._mlp(index, layer.mlp, normed))
        return self.g.op("Add", after_attention, scaled(self.g, mixed, layer.residual_scale))

    def _layer_norm(self, index: int, name: str, x: ir.Value) -> ir.Value:
        """Applies a norm of a layer, if the layer has it."""
        layer = self.spec.layers[index]
        return self._norm(f"layers.{index}.{name}", layer.norm, x) if name in layer.norm_names() else x

    def _attention(self, index: int, spec: AttentionSpec, normed: ir.Value, step: _Step) -> ir.Value:
        g, name = self.g, f"layers.{index}.self_attn"
        dtype = self.options.kv_cache_dtype
        past = past_inputs(g, index, spec, dtype, f"capacity.{self._group_of[index]}")
        inputs = LinearInputs(g, normed)
        query, key = self._linear(f"{name}.q_proj", inputs), self._linear(f"{name}.k_proj", inputs)
        value = self._linear(f"{name}.v_proj", inputs)
        head_norms: tuple[ir.Value | None, ir.Value | None] = (None, None)
        if spec.qk_norm is not None and spec.qk_norm_scope == "all_heads":
            query = self._norm(f"{name}.q_norm", spec.qk_norm, query)
            key = self._norm(f"{name}.k_norm", spec.qk_norm, key)
        elif spec.qk_norm is not None:
            head_norms = self._vector(f"{name}.q_norm.weight"), self._vector(f"{name}.k_norm.weight")
        projected = Projections(query=query, key=key, value=value, query_norm=head_norms[0], key_norm=head_norms[1])
        tensors = heads(g, projected, self._table(spec.rope, step), spec)
        cache_rows(g, index, (tensors.key, tensors.value), spec, dtype)
        options = AttentionOptions(
            layer=index,
            num_kv_heads=spec.num_kv_heads,
            group_size=spec.group_size,
            cap=spec.softcap,
            graph=self.options,
        )
        attended = attention(g, tensors, past, self._bias(index, step), options)
        context = join_heads(g, attended, spec)
        return self._linear(f"{name}.o_proj", LinearInputs(g, context))

    def _mlp(self, index: int, spec: MlpSpec, normed: ir.Value) -> ir.Value:
        name, inputs = f"layers.{index}.mlp", LinearInputs(self.g, normed)
        if spec.gated:
            gate = self._linear(f"{name}.gate_proj", inputs)
            active = gated_activation(self.g, gate, self._linear(f"{name}.up_proj", inputs), spec.activation)
        else:
            active = plain_activation(self.g, self._linear(f"{name}.up_proj", inputs), spec.activation)
        return self._linear(f"{name}.down_proj", LinearInputs(self.g, active))

    def _linear(self, name: str, inputs: LinearInputs) -> ir.Value:
        bias = self._vector(f"{name}.bias") if f"{name}.bias" in self.weights else None
        with self.g.scope(name.split(".", 2)[2]):
            return linear(self.g, inputs, self.weights[f"{name}.weight"], bias)

    def _norm(self, name: str, spec: NormSpec, x: ir.Value) -> ir.Value:
        bias = self._vector(f"{name}.bias") if spec.kind == "layer" else None
        with self.g.scope(name.rsplit(".", 1)[-1]):
            return norm(self.g, x, spec, self._vector(f"{name}.weight"), bias)

    def _vector(self, name: str) -> ir.Value:
        return self.g.weight(self.weights[name].parts[0])

    def _table(self, rope: RopeSpec | None, step: _Step) -> RopeTable | None:
        """Layers with the same rope share one table."""
        if rope is None:
            return None
        if rope not in self._tables:
            frequencies = rope_frequencies(self.g, rope, step.sequence_length)
            self._tables[rope] = rope_table(self.g, step.position_ids, rope, frequencies)
        return self._tables[rope]

    def _bias(self, index: int, step: _Step) -> AttentionBias:
        """Layers of the same cache group and number of query heads per KV head share one bias."""
        group, group_size = self._group_of[index], self.spec.layers[index].attention.group_size
        if (group, group_size) not in self._biases:
            window = self.spec.layers[index].attention.sliding_window
            new_bias = windowed(self.g, step.new_bias, step.position_ids, window)
            self._biases[group, group_size] = attention_bias(self.g, step.past_biases[group], new_bias, group_size)
        return self._biases[group, group_size]
