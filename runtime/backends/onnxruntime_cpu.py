"""ONNX Runtime on the CPU.

Inputs and outputs are numpy arrays that the session reads and writes in place, bound once per kind of step:
for a decode step nothing is allocated, converted or copied between two calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgekit import contract
from edgekit.errors import CorruptArtifactError
from edgekit.ort import ort
from edgekit.runtime.cache import CacheArrays, KVCache, LayerStack
from edgekit.runtime.step import StepInputs, StepOutputs
from edgekit.spec import DecoderSpec

# Arrays for this many kinds of step (tokens, rows) are kept per conversation, the most recently used ones. Those of a
# step over more tokens, a chunk of a prompt, go with the next step of another kind: they are large, and soon made.
MAX_BINDINGS = 4
MAX_KEPT_TOKENS = 64


class OnnxRuntimeCpu:
    """A decoder in an ONNX Runtime session.

    Attributes:
        spec: The decoder.
    """

    def __init__(self, graph: Path, spec: DecoderSpec, threads: int) -> None:
        """Loads a graph.

        Args:
            graph: model.onnx, portable or lowered, with its data file beside it.
            spec: The decoder.
            threads: Threads that compute one operator.

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
        try:
            self._session = ort.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # the C API's errors share no narrower base
            reason = " ".join(str(error).split())
            raise CorruptArtifactError(f"ONNX Runtime cannot load {str(graph)!r}: {reason}") from error
        self.spec = spec
        _check_interface(self._session, spec, graph)

    def runner(self, cache: KVCache) -> OnnxRuntimeRunner:
        """Starts a conversation that keeps its past in `cache`."""
        return OnnxRuntimeRunner(self._session, self.spec, cache)


def _check_interface(session: ort.InferenceSession, spec: DecoderSpec, graph: Path) -> None:
    """Compares the graph's inputs and outputs with the spec that the runtime sizes its arrays by."""
    expected: dict[str, tuple[int | None, ...]] = {contract.LOGITS: (None, None, spec.vocab_size)}
    for index, layer in enumerate(spec.layers):
        kv, key, value = layer.attention.num_kv_heads, layer.attention.key_dim, layer.attention.value_dim
        expected[contract.past_key(index)] = expected[contract.new_key(index)] = (None, kv, key, None)
        expected[contract.past_value(index)] = expected[contract.new_value(index)] = (None, kv, None, value)
    shared = [contract.INPUT_IDS, contract.POSITION_IDS, contract.NEW_BIAS, contract.LOGIT_ROWS]
    shared += [contract.past_bias(group) for group in range(len(spec.cache_groups()))]
    shared += [contract.SEQUENCE_LENGTH] if spec.depends_on_length else []
    found = {value.name: tuple(value.shape) for value in (*session.get_inputs(), *session.get_outputs())}
    found |= {name: (*shape[:2], *shape[3:]) for name, shape in found.items() if _has_head_axis(name, shape)}
    differing = set(found) ^ {*expected, *shared}
    for name, shape in expected.items():
        sizes = found.get(name, ())
        if len(sizes) != len(shape) or any(want not in (None, size) for want, size in zip(shape, sizes, strict=True)):
            differing.add(name)
    if differing:
        raise CorruptArtifactError(
            f"{str(graph)!r} is not the graph of the bundle's spec: they differ in {sorted(differing)[0]!r}; export or "
            "copy the bundle again"
        )


def _has_head_axis(name: str, shape: Sequence[object]) -> bool:
    """Whether a part of the cache has the axis of size 1 that the lowered graph broadcasts query heads along."""
    return contract.is_past(name) and len(shape) == 5 and shape[2] == 1


@dataclass(frozen=True, kw_only=True)
class _Binding:
    """Arrays of one kind of step and the session's pointers to them.

    Attributes:
        window_biases: Bias over the past, shape (1, 1, S, capacity), of the groups with a window, by the window.
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

    def __init__(self, session: ort.InferenceSession, spec: DecoderSpec, cache: KVCache) -> None:
        """Attaches a session to a conversation's cache."""
        self._session = session
        self._spec = spec
        self._groups = spec.cache_groups()
        self._head_axis = any(_has_head_axis(value.name, value.shape) for value in session.get_inputs())
        self._cache = cache
        self._bindings: dict[tuple[int, int], _Binding] = {}

    def step(self, inputs: StepInputs) -> StepOutputs:
        """Runs one step; see `edgekit.runtime.step.StepRunner`."""
        binding = self._binding((len(inputs.token_ids), len(inputs.logit_rows)))
        binding.token_ids[0] = inputs.token_ids
        binding.position_ids[0] = inputs.position_ids
        binding.new_bias[0, 0] = inputs.new_bias
        binding.logit_rows[:] = inputs.logit_rows
        binding.sequence_length[0] = inputs.sequence_length
        for window, bias in binding.window_biases.items():
            bias[0, 0] = self._cache.window_bias(inputs.position_ids, window)
        self._session.run_with_iobinding(binding.io)
        return binding.outputs

    def _binding(self, kind: tuple[int, int]) -> _Binding:
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
        cache = self._cache
        windows = [group.sliding_window for group in self._groups if group.sliding_window is not None]
        binding = _Binding(
            past=cache.arrays,
            io=io,
            token_ids=np.zeros((1, tokens), np.int64),
            position_ids=np.zeros((1, tokens), np.int64),
            new_bias=np.zeros((1, 1, tokens, tokens), np.float32),
            logit_rows=np.zeros(rows, np.int64),
            sequence_length=np.zeros(1, np.int64),
            window_biases={window: np.zeros((1, 1, tokens, cache.capacity), np.float32) for window in windows},
            outputs=StepOutputs(
                logits=np.zeros((rows, self._spec.vocab_size), np.float32),
                stacks=tuple(stack.empty(tokens) for stack in cache.stacks),
            ),
        )
        _bind_input(io, contract.INPUT_IDS, binding.token_ids)
        _bind_input(io, contract.POSITION_IDS, binding.position_ids)
        _bind_input(io, contract.NEW_BIAS, binding.new_bias)
        _bind_input(io, contract.LOGIT_ROWS, binding.logit_rows)
        if self._spec.depends_on_length:
            _bind_input(io, contract.SEQUENCE_LENGTH, binding.sequence_length)
        for index, group in enumerate(self._groups):
            bias = cache.past_bias if group.sliding_window is None else binding.window_biases[group.sliding_window]
            _bind_input(io, contract.past_bias(index), bias)
        _bind_output(io, contract.LOGITS, binding.outputs.logits[None])
        for past, new in zip(cache.stacks, binding.outputs.stacks, strict=True):
            _bind_layers(io, past, new, head_axis=self._head_axis)
        return binding


def _bind_layers(io: ort.IOBinding, past: LayerStack, new: LayerStack, *, head_axis: bool) -> None:
    for index, layer in enumerate(past.layers):
        one = slice(index, index + 1)
        keys, values = past.keys[one], past.values[one]
        _bind_input(io, contract.past_key(layer), keys[:, :, None] if head_axis else keys)
        _bind_input(io, contract.past_value(layer), values[:, :, None] if head_axis else values)
        _bind_output(io, contract.new_key(layer), new.keys[one])
        _bind_output(io, contract.new_value(layer), new.values[one])


def _bind_input(io: ort.IOBinding, name: str, array: npt.NDArray[Any]) -> None:
    io.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)


def _bind_output(io: ort.IOBinding, name: str, array: npt.NDArray[Any]) -> None:
    io.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
