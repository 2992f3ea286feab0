"""ONNX Runtime on the CPU: what is kept between steps, and what cannot be loaded."""

from __future__ import annotations

import shutil
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest

from edgekit.bundle import GRAPH, GRAPH_DATA
from edgekit.cache_layout import KVCacheDtype, cache_layout
from edgekit.errors import CorruptArtifactError
from edgekit.runtime.backends import onnxruntime_cpu
from edgekit.runtime.backends.onnxruntime_cpu import OnnxRuntimeCpu
from edgekit.runtime.cache import KVCache
from edgekit.runtime.lowered import lowered_graph
from edgekit.runtime.step import StepInputs, StepOutputs, StepRunner, causal_step
from edgekit.spec import DecoderSpec

TOLERANCE = 1e-4
ROOT = Path(__file__).resolve().parents[2]


def _tokens(count: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(3, 320, count)


def _start(backend: OnnxRuntimeCpu) -> tuple[KVCache, StepRunner]:
    cache = KVCache(backend.layout, backend.spec.max_positions)
    return cache, backend.runner(cache)


def _inputs(cache: KVCache, ids: Any) -> StepInputs:
    return causal_step(ids, cache.length, np.arange(len(ids)))


def _read(cache: KVCache, runner: StepRunner, ids: Any) -> StepOutputs:
    """Runs tokens and keeps them."""
    outputs = runner.step(_inputs(cache, ids))
    cache.append(outputs.stacks, range(len(ids)))
    return outputs


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", TOLERANCE), ("fp16", 5e-3), ("int8", 0.15)])
@pytest.mark.parametrize("variant", ["llama", "gpt_neox", "gemma3"])
def test_logits_over_the_cache_are_those_of_one_step(
    variant: str, dtype: KVCacheDtype, tolerance: float, tiny_bundle: Any
) -> None:
    bundle, ids = tiny_bundle(variant), _tokens(150)
    spec = bundle.manifest.spec
    layout = cache_layout(spec, dtype)
    backend = OnnxRuntimeCpu(lowered_graph(bundle, layout), spec, 1, layout)
    cache, runner = _start(backend)
    expected = runner.step(_inputs(cache, ids)).logits.copy()
    # A chunk, single tokens across the growth of the cache, and another chunk.
    pieces = [ids[:120], *np.split(ids[120:132], 12), ids[132:]]
    found = np.concatenate([_read(cache, runner, piece).logits.copy() for piece in pieces])
    assert expected.std() > 0.1
    assert np.abs(found - expected).max() < tolerance * max(1.0, float(expected.std()))
    if dtype != "fp32":
        assert np.abs(found - expected).max() > 1e-6, "the cache is not rounded at all"


def test_only_the_wanted_rows_have_logits(tiny_backend: Any) -> None:
    cache, runner = _start(tiny_backend("llama"))
    ids = _tokens(9)
    every = runner.step(_inputs(cache, ids)).logits.copy()
    some = runner.step(causal_step(ids, 0, np.array([7, 2]))).logits
    assert some.shape == (2, 320)
    np.testing.assert_allclose(some, every[[7, 2]], atol=TOLERANCE, rtol=0)


def test_steps_of_one_kind_write_to_the_same_arrays(tiny_backend: Any) -> None:
    cache, runner = _start(tiny_backend("llama"))
    first = _read(cache, runner, _tokens(1))
    before = first.logits.copy()
    second = _read(cache, runner, _tokens(1, seed=1))
    assert second is first
    assert not np.array_equal(first.logits, before)
    assert runner.step(_inputs(cache, _tokens(2))) is not first
    assert runner.step(_inputs(cache, _tokens(1))) is first


def test_thousands_of_steps_take_no_more_memory_than_a_few(tiny_backend: Any) -> None:
    # The arrays of one step have 3 KB: were they kept, 15 MB would show.
    cache, runner = _start(tiny_backend("llama"))
    process, ids = psutil.Process(), _tokens(1)

    def steps(count: int) -> int:
        for _ in range(count):
            runner.step(_inputs(cache, ids))
        return int(process.memory_info().rss)

    assert -steps(50) + steps(5000) < 3 << 20


def test_growth_binds_the_new_arrays_and_lets_the_old_ones_go(tiny_backend: Any) -> None:
    cache, runner = _start(tiny_backend("llama"))
    ids = _tokens(140)
    for piece in np.split(ids[:127], [60, 120]):
        _read(cache, runner, piece)
    outputs = _read(cache, runner, ids[127:128])
    assert cache.capacity == 128
    held = (cache.arrays, cache.maps[0].past_bias, cache.stacks[0].keys, outputs.logits)
    old = [weakref.ref(array) for array in held]
    del held
    del outputs
    cache.reserve(1)
    grown = _read(cache, runner, ids[128:129]).logits.copy()
    assert [reference() for reference in old] == [None] * 4
    fresh, other = _start(tiny_backend("llama"))
    np.testing.assert_allclose(grown[0], _read(fresh, other, ids[:129]).logits[-1], atol=TOLERANCE, rtol=0)


def test_the_kinds_of_step_used_last_are_kept(tiny_backend: Any) -> None:
    cache, runner = _start(tiny_backend("llama"))

    def step(tokens: int) -> StepOutputs:
        return runner.step(_inputs(cache, _tokens(tokens)))

    kept = {tokens: step(tokens) for tokens in (1, 2, 3, 4)}
    assert onnxruntime_cpu.MAX_BINDINGS == 4
    assert step(1) is kept[1]
    step(5)
    assert step(1) is kept[1]
    assert step(4) is kept[4]
    assert step(2) is not kept[2]


def test_arrays_of_a_long_chunk_are_let_go_with_the_next_step(tiny_backend: Any) -> None:
    cache, runner = _start(tiny_backend("llama"))
    long = onnxruntime_cpu.MAX_KEPT_TOKENS + 1
    first = runner.step(_inputs(cache, _tokens(long)))
    assert runner.step(_inputs(cache, _tokens(long))) is first, "chunks of a prompt follow each other"
    reference = weakref.ref(first.logits)
    del first
    runner.step(_inputs(cache, _tokens(1)))
    assert reference() is None


def test_two_conversations_have_arrays_of_their_own(tiny_backend: Any) -> None:
    backend = tiny_backend("llama")
    (one, first), (two, second) = _start(backend), _start(backend)
    before = _read(one, first, _tokens(3))
    logits = before.logits.copy()
    _read(two, second, _tokens(3, seed=1))
    np.testing.assert_array_equal(before.logits, logits)


def _garbage(directory: Path) -> None:
    (directory / GRAPH).write_bytes(b"\xffnot a graph\n" * 50)


def _empty(directory: Path) -> None:
    (directory / GRAPH).write_bytes(b"")


def _truncated(directory: Path) -> None:
    (directory / GRAPH).write_bytes((directory / GRAPH).read_bytes()[:-1000])


def _missing(directory: Path) -> None:
    (directory / GRAPH).unlink()


def _without_data(directory: Path) -> None:
    (directory / GRAPH_DATA).unlink()


def _truncated_data(directory: Path) -> None:
    (directory / GRAPH_DATA).write_bytes((directory / GRAPH_DATA).read_bytes()[:1000])


@pytest.mark.parametrize("damage", [_garbage, _empty, _truncated, _missing, _without_data, _truncated_data])
def test_a_damaged_graph_is_refused_in_one_line(damage: Any, tiny_bundle: Any, tmp_path: Path) -> None:
    bundle = tiny_bundle()
    layout = cache_layout(bundle.manifest.spec)
    graph = lowered_graph(bundle, layout)
    directory = shutil.copytree(graph.parent, tmp_path / "copy")
    damage(directory)
    with pytest.raises(CorruptArtifactError, match=r"^ONNX Runtime cannot load '.*copy/model\.onnx': .+") as caught:
        OnnxRuntimeCpu(directory / GRAPH, bundle.manifest.spec, 1, layout)
    assert "\n" not in str(caught.value)


def _attention(spec: DecoderSpec, **changes: int) -> DecoderSpec:
    first = spec.layers[0]
    changed = msgspec.structs.replace(first, attention=msgspec.structs.replace(first.attention, **changes))
    return msgspec.structs.replace(spec, layers=(changed, *spec.layers[1:]))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda spec: msgspec.structs.replace(spec, layers=spec.layers[:-1]), "past_key_values.1.key"),
        (lambda spec: msgspec.structs.replace(spec, layers=(*spec.layers, spec.layers[0])), "past_key_values.2.key"),
        (lambda spec: msgspec.structs.replace(spec, vocab_size=spec.vocab_size - 1), "logits"),
        (lambda spec: _attention(spec, num_kv_heads=4), "new_key_values.stack0.key"),
        (lambda spec: _attention(spec, key_dim=8), "new_key_values.stack0.key"),
        (lambda spec: _attention(spec, value_dim=8), "new_key_values.stack0.value"),
    ],
)
def test_a_spec_that_is_not_the_graphs_is_refused_at_load(change: Any, name: str, tiny_bundle: Any) -> None:
    bundle = tiny_bundle()
    changed, graph = change(bundle.manifest.spec), lowered_graph(bundle, cache_layout(bundle.manifest.spec))
    with pytest.raises(CorruptArtifactError, match=f"is not the graph of the bundle's spec: they differ in '{name}'"):
        OnnxRuntimeCpu(graph, changed, 1, cache_layout(changed))


def test_the_telemetry_of_onnx_runtime_is_off_before_it_is_imported() -> None:
    code = (
        "import os, sys; os.environ.pop('ORT_DISABLE_TELEMETRY', None); import edgekit.ort;"
        "print(os.environ['ORT_DISABLE_TELEMETRY'], 'onnxruntime' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "True"]
    sources = [path for folder in ("edgekit", "export", "runtime", "devices") for path in (ROOT / folder).rglob("*.py")]
    importing = [path.name for path in sources if "import onnxruntime as ort" in path.read_text(encoding="utf-8")]
    assert importing == ["ort.py"]
