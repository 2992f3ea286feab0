"""GGUF files of several block types, as llama.cpp's quantizer mixes them, from file to graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx
import pytest
import torch
from onnx import numpy_helper

from edgekit.blocks import QuantizedBlocks
from edgekit.checkpoint import open_checkpoint
from edgekit.errors import UnsupportedError
from edgekit.export.lowering import ort_cpu
from tests.gguf_files import WIDE_LLAMA, write_gguf

FloatArray: TypeAlias = npt.NDArray[np.float32]
MixedGguf: TypeAlias = Callable[[str], Path]

# Root mean squares, relative to that of the logits. Scales and offsets are rounded to float16, by 2e-4 of their size;
# what int8 activations cost is said in test_quantized_graphs.py.
FLOAT16_TOLERANCE = 1e-3
INT8_ACTIVATION_TOLERANCE = 0.025

_MORE_BITS = {"blk.0.attn_v.*": "Q6_K", "blk.0.ffn_down.*": "Q6_K"}
FILES: Mapping[str, Mapping[str, str]] = {
    "Q4_K_M": {"output.*": "Q6_K", **_MORE_BITS, "*": "Q4_K"},
    "Q4_K_M tied": {"token_embd.*": "Q6_K", **_MORE_BITS, "*": "Q4_K"},
    "Q5_K_M": {"output.*": "Q6_K", **_MORE_BITS, "*": "Q5_K"},
    "Q6_K": {"*": "Q6_K"},
    "Q4_0": {"output.*": "Q6_K", "*": "Q4_0"},
    "Q5_1": {"output.*": "Q8_0", "*.ffn_*": "Q5_0", "*": "Q5_1"},
    "Q3_K_M": {"output.*": "Q6_K", "*.attn_v.*": "Q5_K", "blk.0.ffn_down.*": "Q4_K", "*": "Q3_K"},
    "Q3_K": {"*": "Q3_K"},
}
KEPT = [name for name in FILES if "Q3_K" not in name]
Q4_K, Q5_K, Q6_K = "affine block 32", "int8 affine block 32", "int8 symmetric block 16"
MODULES = ("embed_tokens", "layers.0.self_attn.q_proj", "layers.0.self_attn.v_proj", "layers.1.mlp.up_proj", "lm_head")


@pytest.fixture(scope="module")
def mixed_gguf(make_checkpoint: Any, hugging_face: Any, tmp_path_factory: pytest.TempPathFactory) -> MixedGguf:
    """Writes one of `FILES`, once."""
    models: dict[bool, Path] = {}
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        tied = name.endswith("tied")
        if tied not in models:
            models[tied] = make_checkpoint({**WIDE_LLAMA, "tie_word_embeddings": tied})
        if name not in made:
            made[name] = tmp_path_factory.mktemp("gguf") / f"{name}.gguf"
            write_gguf(hugging_face(models[tied]), models[tied], made[name], FILES[name])
        return made[name]

    return make


def _transformers_logits(path: Path, token_ids: npt.NDArray[np.int64]) -> FloatArray:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    with torch.no_grad():
        logits: FloatArray = model(torch.from_numpy(token_ids)).logits.numpy()
    return logits


def _relative_error(got: FloatArray, expected: FloatArray) -> float:
    return float(np.sqrt(np.mean(np.square(got - expected)) / np.mean(np.square(expected))))


@pytest.mark.parametrize("precision", ["int4", "int8"])
@pytest.mark.parametrize("name", KEPT)
def test_a_bundle_has_the_logits_that_transformers_computes_from_the_file(
    name: str,
    precision: str,
    mixed_gguf: MixedGguf,
    export_tiny: Any,
    load_graph: Any,
    token_ids: npt.NDArray[np.int64],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = mixed_gguf(name)
    expected = _transformers_logits(path, token_ids)
    bundle = export_tiny(path, precision=precision)
    # The tolerance of blocks that are kept, also where 8 bits stand beside int4.
    assert bundle.manifest.parity.source.max_kl_divergence == 1e-3
    portable = load_graph(bundle, "portable").step(token_ids)
    assert _relative_error(portable, expected) < FLOAT16_TOLERANCE
    lowered = load_graph(bundle, "lowered")
    steps = [lowered.step(token_ids[:, :17]), lowered.step(token_ids[:, 17:])]
    assert _relative_error(np.concatenate(steps, axis=1), expected) < INT8_ACTIVATION_TOLERANCE
    monkeypatch.setattr(ort_cpu, "INT8_ACTIVATIONS", 0)
    np.testing.assert_allclose(load_graph(bundle, "lowered").step(token_ids), portable, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "precision", "storage"),
    [
        ("Q4_K_M", "int4", (f"int8 {Q4_K}", f"int4 {Q4_K}", Q6_K, f"int4 {Q4_K}", Q6_K)),
        ("Q4_K_M", "int8", (f"int8 {Q4_K}", f"int8 {Q4_K}", Q6_K, f"int8 {Q4_K}", Q6_K)),
        ("Q4_K_M tied", "int4", (Q6_K, f"int4 {Q4_K}", Q6_K, f"int4 {Q4_K}", None)),
        ("Q5_K_M", "int4", (Q5_K, Q5_K, Q6_K, Q5_K, Q6_K)),
        ("Q6_K", "int8", (Q6_K,) * 5),
        ("Q4_0", "int4", ("int8 symmetric block 32", *("int4 symmetric block 32",) * 3, Q6_K)),
        ("Q5_1", "int4", (*("int8 affine block 32",) * 3, *("int8 symmetric block 32",) * 2)),
        # What is not kept is rounded as a float would be.
        ("Q3_K_M", "int4", ("int8 symmetric block 32", "int4 affine block 32", Q5_K, "int4 affine block 32", Q6_K)),
    ],
)
def test_every_tensor_keeps_its_own_type(
    name: str, precision: str, storage: tuple[str | None, ...], mixed_gguf: MixedGguf, export_tiny: Any
) -> None:
    stored = export_tiny(mixed_gguf(name), precision=precision).manifest.storage
    assert tuple(stored.get(f"{module}.weight") for module in MODULES) == storage


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "Q6_K",
            {"block_size": 32},
            r"layers\.0\.self_attn\.q_proj is stored as symmetric int8 blocks of 16, block size 32",
        ),
        (
            "Q4_K_M",
            {"scheme": "affine"},
            r"layers\.0\.self_attn\.v_proj is stored as symmetric int8 blocks of 16, scheme",
        ),
        (
            "Q4_K_M",
            {"scheme": "symmetric"},
            r"layers\.0\.self_attn\.q_proj is stored as affine int4 blocks of 32, scheme",
        ),
    ],
)
def test_an_option_that_not_every_type_agrees_with_is_refused(
    name: str, options: dict[str, Any], message: str, mixed_gguf: MixedGguf, export_tiny: Any
) -> None:
    with pytest.raises(UnsupportedError, match=f"^{message}.*--requantize"):
        export_tiny(mixed_gguf(name), precision="int4", **options)


@pytest.mark.parametrize("precision", ["int4", "int8"])
@pytest.mark.parametrize("name", KEPT)
def test_codes_scales_and_offsets_go_into_the_bundle_unchanged(
    name: str, precision: str, mixed_gguf: MixedGguf, export_tiny: Any
) -> None:
    path = mixed_gguf(name)
    graph = export_tiny(path, precision=precision).file("model.onnx")
    parts = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(graph).graph.initializer}
    with open_checkpoint(path) as checkpoint:
        for weight_name, shape in checkpoint.spec.tensor_shapes().items():
            if len(shape) == 1:
                continue
            weight = checkpoint.tensor(weight_name)
            assert isinstance(weight, QuantizedBlocks)
            for part, wanted in (("codes", weight.codes), ("scale", weight.scale), ("offset", weight.offset)):
                if wanted is not None:
                    np.testing.assert_array_equal(parts[f"{weight_name}.{part}"].astype(wanted.dtype).T, wanted)
            assert (f"{weight_name}.offset" in parts) == (weight.offset is not None)


def test_projections_of_different_types_are_not_merged(
    mixed_gguf: MixedGguf, export_tiny: Any, load_graph: Any
) -> None:
    lowered = load_graph(export_tiny(mixed_gguf("Q4_K_M"), precision="int4"), "lowered").path
    products = [
        {attribute.name: attribute.i for attribute in node.attribute}
        for node in onnx.load(lowered, load_external_data=False).graph.node
        if node.op_type == "MatMulNBits"
    ]
    found = sorted((product["bits"], product["block_size"], product["N"]) for product in products)
    value_and_down, head = [(8, 16, 128), (8, 16, 256)], (8, 16, 320)
    first_layer = [(4, 32, 256 + 128), (4, 32, 256), (4, 32, 2 * 512)]  # q|k, o, gate|up
    second_layer = [(4, 32, 256 + 2 * 128), (4, 32, 256), (4, 32, 2 * 512), (4, 32, 256)]
    assert found == sorted([*value_and_down, head, *first_layer, *second_layer])


@pytest.mark.parametrize("tokens", [1, 256])
@pytest.mark.parametrize("name", ["Q6_K", "Q4_K_M"])
def test_blocks_of_16_are_multiplied_rightly_by_few_and_by_many_rows(
    name: str, tokens: int, mixed_gguf: MixedGguf, export_tiny: Any, load_graph: Any
) -> None:
    bundle = export_tiny(mixed_gguf(name), precision="int4")
    ids = np.random.default_rng(5).integers(3, 320, (1, tokens))
    expected, got = (load_graph(bundle, form).step(ids) for form in ("portable", "lowered"))
    assert 0 < _relative_error(got, expected) < INT8_ACTIVATION_TOLERANCE


def test_types_that_are_not_kept_lose_nothing_in_float32(
    mixed_gguf: MixedGguf, export_tiny: Any, load_graph: Any, token_ids: npt.NDArray[np.int64]
) -> None:
    path = mixed_gguf("Q3_K")
    got = load_graph(export_tiny(path, precision="fp32"), "portable").step(token_ids)
    np.testing.assert_allclose(got, _transformers_logits(path, token_ids), atol=2e-4, rtol=0)


def test_types_that_are_not_kept_are_rounded_to_the_precision(
    mixed_gguf: MixedGguf, export_tiny: Any, load_graph: Any, token_ids: npt.NDArray[np.int64]
) -> None:
    path = mixed_gguf("Q3_K_M")
    bundle = export_tiny(path, precision="int8")
    assert bundle.manifest.parity.source.max_kl_divergence == 0.05
    error = _relative_error(load_graph(bundle, "portable").step(token_ids), _transformers_logits(path, token_ids))
    assert 1e-4 < error < 0.02
