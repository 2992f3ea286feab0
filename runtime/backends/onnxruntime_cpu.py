"""ONNX Runtime on the CPU.

Inputs and outputs are numpy arrays that the session reads and writes in place, bound once per kind of step:
for a decode step nothing is allocated, converted or copied between two calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from edgekit import contract
from edgekit.bundle import GRAPH_DATA
from edgekit.cache_layout import KEY_BLOCK_TOKENS, CacheLayout, Stack
from edgekit.errors import CorruptArtifactError
from edgekit.ort import ort
from edgekit.runtime.cache import KVCache
from edgekit.runtime.cache_arrays import CacheArrays, FloatArray, StackArrays
from edgekit.runtime.mapped_table import MappedTable
from edgekit.runtime.step import StepInputs, StepOutputs
from edgekit.spec import DecoderSpec

# Arrays for this many kinds of step (tokens, rows) are kept per conversation, the most recently used ones. Those of a
# step over more tokens, a chunk of a prompt, go with the next step of another kind: they are large, and soon made.
MAX_BINDINGS = 4
MAX_KEPT_TOKENS = 64
_Kind: TypeAlias = tuple[int, int]
"""New tokens of a step and rows of logits."""


class OnnxRuntimeCpu:
    """A decoder in an ONNX Runtime session.

    Attributes:
        spec: The decoder.
        layout: How its caches are laid out.
        has_attention_mass: Whether steps can say which tokens are attended to.
    """

    def __init__(self, graph: Path, spec: DecoderSpec, threads: int, layout: CacheLayout) -> None:
        """Loads a graph.

        Args:
            graph: A lowered model.onnx, with its data file beside it.
            spec: The decoder.
            threads: Threads that compute one operator.
            layout: The one that the graph was lowered for.

        Raises:
            CorruptArtifactError: ONNX Runtime cannot load the graph.
        """
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        # A plan of the memory is kept per shape of the inputs, and these change with every prompt and every growth
        # of the cache.
        options.enable_mem_pattern = False
        options.execution_order = ort.ExecutionOrder.PRIORITY_BASED
        try:
            self._session = ort.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # the C API's errors share no narrower base
            reason = " ".join(str(error).split())
            raise CorruptArtifactError(f"ONNX Runtime cannot load {str(graph)!r}: {reason}") from error
        self.spec, self.layout = spec, layout
        _check_interface(self._session, spec, layout, graph)
        outputs = {value.name for value in self._session.get_outputs()}
        self._table = MappedTable(graph.with_name(GRAPH_DATA))
        self.has_attention_mass = contract.stacked(contract.attention_mass(0), 0) in outputs

    def runner(self, cache: KVCache) -> OnnxRuntimeRunner:
        """Starts a conversation that keeps its past in `cache`."""
        return OnnxRuntimeRunner(self._session, self.spec, cache, self._table)


def _check_interface(session: ort.InferenceSession, spec: DecoderSpec, layout: CacheLayout, graph: Path) -> None:
    """Compares the graph's inputs and outputs with the spec and the layout that the runtime sizes its arrays by."""
    expected: dict[str, Sequence[int | None]] = {contract.LOGITS: (None, None, spec.vocab_size)}
    for name in [contract.INPUT_IDS, contract.POSITION_IDS]:
        expected[name] = (None, None)
    expected[contract.NEW_BIAS], expected[contract.LOGIT_ROWS] = (None, 1, None, None), (None,)
    if spec.depends_on_length:
        expected[contract.SEQUENCE_LENGTH] = (1,)
    for index in range(len(layout.groups)):
        expected[contract.past_bias(index)] = (None, 1, None, None)
    heads = (1,) if layout.dtype != "int8" else ()  # the axis that query heads are broadcast along
    for index, stack in enumerate(layout.stacks):
        kv, key, value = stack.shape.num_kv_heads, stack.shape.key_dim, stack.shape.value_dim
        expected[contract.stacked(contract.new_key(0), index)] = (None, kv, key, None)
        expected[contract.stacked(contract.new_value(0), index)] = (None, kv, None, value)
        for layer in stack.layers:
            keys = (None, key, KEY_BLOCK_TOKENS) if layout.dtype == "int8" else (1, key, None)
            expected[contract.past_key(layer)] = (None, kv, *keys)
            expected[contract.past_value(layer)] = (None, kv, *heads, None, value)
            if layout.dtype == "int8":
                expected[contract.past_key_scale(layer)] = expected[contract.past_value_scale(layer)] = (
                    None,
                    kv,
                    1,
                    None,
                )
        if layout.dtype == "int8":
            for name in (contract.new_key_scale(0), contract.new_value_scale(0)):
                expected[contract.stacked(name, index)] = (None, kv, 1, None)
    found = {value.name: tuple(value.shape) for value in (*session.get_inputs(), *session.get_outputs())}
    masses = [contract.stacked(contract.attention_mass(0), index) for index in range(len(layout.stacks))]
    differing = set(found) ^ set(expected) ^ (set(masses) if masses[0] in found else set())
    for name, shape in expected.items():
        sizes = found.get(name, ())
        if len(sizes) != len(shape) or any(want not in (None, size) for want, size in zip(shape, sizes, strict=True)):
            differing.add(name)
    if differing:
        raise CorruptArtifactError(
            f"{str(graph)!r} is not the graph of the bundle's spec: they differ in {sorted(differing)[0]!r}; export or "
            "copy the bundle again"
        )


@dataclass(frozen=True, kw_only=True)
class _Binding:
    """Arrays of one kind of step and the session's pointers to them.

    Attributes:
        window_biases: Bias over the past, shape (1, 1, S, capacity), of the groups with a window, by group.
    """

    past: CacheArrays
    io: ort.IOBinding
    token_ids: npt.NDArray[np.int64]
    position_ids: npt.NDArray[np.int64]
    new_bias: npt.NDArray[np.float32]
    logit_rows: npt.NDArray[np.int64]
    sequence_length: npt.NDArray[np.int64]
    window_biases: dict[int, npt.NDArray[np.float32]]
    outputs: StepOutputs


class OnnxRuntimeRunner:
    """Steps of one conversation."""

    def __init__(
        self, session: ort.InferenceSession, spec: DecoderSpec, cache: KVCache, table: MappedTable | None = None
    ) -> None:
        """Attaches a session to a conversation's cache.

        Args:
            session: Runs a lowered graph.
            spec: The decoder.
            cache: The conversation's.
            table: Told of the rows that are looked up; None for a session whose memory does not matter.
        """
        self._session = session
        self._spec = spec
        self._cache = cache
        self._table = table
        self._bindings: dict[_Kind, _Binding] = {}

    def step(self, inputs: StepInputs) -> StepOutputs:
        """Runs one step; see `edgekit.runtime.step.StepRunner`."""
        binding = self._binding((len(inputs.token_ids), len(inputs.logit_rows)))
        binding.token_ids[0] = inputs.token_ids
        binding.position_ids[0] = inputs.position_ids
        binding.new_bias[0, 0] = inputs.new_bias
        binding.logit_rows[:] = inputs.logit_rows
        binding.sequence_length[0] = inputs.sequence_length
        for group, bias in binding.window_biases.items():
            bias[0, 0] = self._cache.window_bias(group, inputs.position_ids)
        self._session.run_with_iobinding(binding.io)
        if self._table is not None:
            self._table.note(len(inputs.token_ids))
        return binding.outputs

    def _binding(self, kind: _Kind) -> _Binding:
        """Returns the arrays for a kind of step; those of other kinds that are not kept are let go first."""
        past, binding = self._cache.arrays, self._bindings.pop(kind, None)
        self._bindings = dict(
            [
                (other, bound)
                for other, bound in self._bindings.items()
                if bound.past is past and other[0] <= MAX_KEPT_TOKENS
            ][1 - MAX_BINDINGS :]
        )
        if binding is None or binding.past is not past:
            binding = self._bind(*kind)
        self._bindings[kind] = binding
        return binding

    def _bind(self, tokens: int, rows: int) -> _Binding:
        io = self._session.io_binding()
        cache, layout = self._cache, self._cache.layout
        says_mass = any(value.name.startswith("attention_mass.") for value in self._session.get_outputs())
        masses = tuple(_empty_mass(cache, stack, tokens) for stack in layout.stacks if says_mass)
        windows = [index for index, group in enumerate(layout.groups) if group.sliding_window is not None]
        binding = _Binding(
            past=cache.arrays,
            io=io,
            token_ids=np.zeros((1, tokens), np.int64),
            position_ids=np.zeros((1, tokens), np.int64),
            new_bias=np.zeros((1, 1, tokens, tokens), np.float32),
            logit_rows=np.zeros(rows, np.int64),
            sequence_length=np.zeros(1, np.int64),
            window_biases={
                group: np.zeros((1, 1, tokens, cache.maps[group].capacity), np.float32) for group in windows
            },
            outputs=StepOutputs(
                logits=np.zeros((rows, self._spec.vocab_size), np.float32),
                stacks=tuple(StackArrays.empty(stack, layout.dtype, tokens, is_cache=False) for stack in layout.stacks),
                attention_mass=masses,
            ),
        )
        _bind_input(io, contract.INPUT_IDS, binding.token_ids)
        _bind_input(io, contract.POSITION_IDS, binding.position_ids)
        _bind_input(io, contract.NEW_BIAS, binding.new_bias)
        _bind_input(io, contract.LOGIT_ROWS, binding.logit_rows)
        if self._spec.depends_on_length:
            _bind_input(io, contract.SEQUENCE_LENGTH, binding.sequence_length)
        for index, slots in enumerate(cache.maps):
            _bind_input(io, contract.past_bias(index), binding.window_biases.get(index, slots.past_bias))
        _bind_output(io, contract.LOGITS, binding.outputs.logits[None])
        for index, (past, new) in enumerate(zip(cache.stacks, binding.outputs.stacks, strict=True)):
            _bind_past(io, past)
            _bind_new(io, index, new)
        for index, mass in enumerate(binding.outputs.attention_mass):
            _bind_output(io, contract.stacked(contract.attention_mass(0), index), mass)
        return binding


def _empty_mass(cache: KVCache, stack: Stack, tokens: int) -> FloatArray:
    attended = cache.maps[stack.group].capacity + tokens
    return np.zeros((len(stack.layers), stack.shape.num_kv_heads, attended), np.float32)


def _bind_past(io: ort.IOBinding, past: StackArrays) -> None:
    for index, layer in enumerate(past.stack.layers):
        one = slice(index, index + 1)
        keys, values = past.keys[one], past.values[one]
        if past.key_scales is None or past.value_scales is None:
            keys, values = keys[:, :, None], values[:, :, None]
        else:
            _bind_input(io, contract.past_key_scale(layer), past.key_scales[one])
            _bind_input(io, contract.past_value_scale(layer), past.value_scales[one])
        _bind_input(io, contract.past_key(layer), keys)
        _bind_input(io, contract.past_value(layer), values)


def _bind_new(io: ort.IOBinding, stack: int, new: StackArrays) -> None:
    named = (
        (contract.new_key(0), new.keys),
        (contract.new_value(0), new.values),
        (contract.new_key_scale(0), new.key_scales),
        (contract.new_value_scale(0), new.value_scales),
    )
    for name, array in named:
        if array is not None:
            _bind_output(io, contract.stacked(name, stack), array)


def _bind_input(io: ort.IOBinding, name: str, array: npt.NDArray[Any]) -> None:
    io.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)


def _bind_output(io: ort.IOBinding, name: str, array: npt.NDArray[Any]) -> None:
    io.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
