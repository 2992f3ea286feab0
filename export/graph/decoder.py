"""The portable graph of a decoder, built from its spec and its stored weights; nothing is traced.

    input_ids ─▶ embedding ─▶ layer 0 ─▶ … ─▶ layer L−1 ─▶ rows that need logits ─▶ norm ─▶ head ─▶ logits

`edgekit.contract` has the table of inputs and outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from edgekit import contract
from edgekit.export.graph.attention import (
    AttentionBias,
    Projections,
    RopeTable,
    attention,
    attention_bias,
    heads,
    join_heads,
    rope_table,
)
from edgekit.export.graph.builder import IR_VERSION, GraphBuilder
from edgekit.export.graph.linear import LinearInputs, embedding, linear
from edgekit.export.graph.mlp import gated_activation, plain_activation
from edgekit.export.graph.norm import norm
from edgekit.export.weights import StoredWeight
from edgekit.rope import RopeSpec
from edgekit.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, NormSpec

FLOAT, INT64 = ir.DataType.FLOAT, ir.DataType.INT64


def build_graph(spec: DecoderSpec, weights: dict[str, StoredWeight], producer_version: str) -> ir.Model:
    """Builds the portable graph.

    Args:
        spec: The decoder.
        weights: Every tensor of `spec.tensor_shapes()`, by canonical name.
        producer_version: EdgeKit's version, for the model's header.

    Returns:
        An opset 21 model of the standard domain whose weights lie in the data file.
    """
    return _DecoderGraph(spec, weights).build(producer_version)


@dataclass(frozen=True, kw_only=True)
class _Step:
    """Inputs that every layer shares."""

    position_ids: ir.Value
    past_bias: ir.Value
    new_bias: ir.Value


class _DecoderGraph:
    def __init__(self, spec: DecoderSpec, weights: dict[str, StoredWeight]) -> None:
        self.spec = spec
        self.weights = weights
        self.g = GraphBuilder(spec.family)
        self._tables: dict[RopeSpec, RopeTable] = {}
        self._biases: dict[int, AttentionBias] = {}

    def build(self, producer_version: str) -> ir.Model:
        g, spec = self.g, self.spec
        input_ids = g.input(contract.INPUT_IDS, INT64, ["batch", "sequence"])
        step = _Step(
            position_ids=g.input(contract.POSITION_IDS, INT64, ["batch", "sequence"]),
            new_bias=g.input(contract.NEW_BIAS, FLOAT, ["batch", 1, "sequence", "sequence"]),
            past_bias=g.input(contract.past_bias(0), FLOAT, ["batch", 1, "bias_rows", "capacity.0"]),
        )
        logit_rows = g.input(contract.LOGIT_ROWS, INT64, ["rows"])
        for layer in spec.layers:  # before the layers, so that what several share is not named after the first
            self._table(layer.attention.rope, step)
            self._bias(layer.attention.group_size, step)
        with g.scope("embed_tokens"):
            hidden = embedding(g, input_ids, self.weights["embed_tokens.weight"])
        for index, layer in enumerate(spec.layers):
            with g.scope(f"layers.{index}"):
                hidden = self._layer(index, layer, hidden, step)
        with g.block("select_rows", [hidden, logit_rows], {"hidden": spec.hidden_size}) as outputs:
            hidden = g.op("Gather", hidden, logit_rows, attributes={"axis": 1})
            outputs.append(hidden)
        hidden = self._norm("norm", spec.norm, hidden)
        head = "embed_tokens" if spec.tie_word_embeddings else "lm_head"
        with g.scope("lm_head"):
            logits = linear(g, LinearInputs(g, hidden), self.weights[f"{head}.weight"], None)
            with g.block("logits", [logits, logit_rows], {}) as outputs:
                logits = g.op("Identity", logits)
                outputs.append(logits)
        g.output(logits, contract.LOGITS, FLOAT, ["batch", "rows", spec.vocab_size])
        return ir.Model(g.finish(), ir_version=IR_VERSION, producer_name="edgekit", producer_version=producer_version)

    def _layer(self, index: int, layer: LayerSpec, hidden: ir.Value, step: _Step) -> ir.Value:
        normed = self._norm(f"layers.{index}.input_norm", layer.norm, hidden)
        attended = self._attention(index, layer.attention, normed, step)
        after_attention = self.g.op("Add", hidden, attended)
        mlp_input = hidden if layer.parallel_residual else after_attention
        normed = self._norm(f"layers.{index}.mlp_norm", layer.norm, mlp_input)
        return self.g.op("Add", after_attention, self._mlp(index, layer.mlp, normed))

    def _attention(self, index: int, spec: AttentionSpec, normed: ir.Value, step: _Step) -> ir.Value:
        g, name = self.g, f"layers.{index}.self_attn"
        kv = spec.num_kv_heads
        past_key = g.input(contract.past_key(index), FLOAT, ["batch", kv, spec.key_dim, "capacity.0"])
        past_value = g.input(contract.past_value(index), FLOAT, ["batch", kv, "capacity.0", spec.value_dim])
        inputs = LinearInputs(g, normed)
        projected = Projections(
            query=self._linear(f"{name}.q_proj", inputs),
            key=self._linear(f"{name}.k_proj", inputs),
            value=self._linear(f"{name}.v_proj", inputs),
            query_norm=None if spec.qk_norm is None else self._vector(f"{name}.q_norm.weight"),
            key_norm=None if spec.qk_norm is None else self._vector(f"{name}.k_norm.weight"),
        )
        tensors = heads(g, index, projected, self._table(spec.rope, step), spec)
        bias = self._bias(spec.group_size, step)
        context = join_heads(g, attention(g, tensors, past_key, past_value, bias), spec)
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

    def _table(self, rope: RopeSpec, step: _Step) -> RopeTable:
        """Layers with the same rope share one table."""
        if rope not in self._tables:
            self._tables[rope] = rope_table(self.g, step.position_ids, rope)
        return self._tables[rope]

    def _bias(self, group_size: int, step: _Step) -> AttentionBias:
        """Layers with the same number of query heads per KV head share one bias."""
        if group_size not in self._biases:
            self._biases[group_size] = attention_bias(self.g, step.past_bias, step.new_bias, group_size)
        return self._biases[group_size]
