from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from edgekit.checkpoint import open_checkpoint
from edgekit.checkpoint.base import BlockFormat
from edgekit.errors import UnsupportedError, UsageError
from edgekit.export.storage_plan import BLOCK_SIZES, QuantizationOptions, keeps_blocks, plan_storage
from edgekit.export.weights import Storage

TABLES = ("embed_tokens.weight", "lm_head.weight")


def _plan(checkpoint: Path, **options: Any) -> Mapping[str, Storage]:
    with open_checkpoint(checkpoint) as opened:
        plan = plan_storage(opened, QuantizationOptions(**options))
        assert plan.keys() == opened.spec.tensor_shapes().keys()
        for name, shape in opened.spec.tensor_shapes().items():
            if len(shape) == 1:
                assert plan[name] == Storage(precision="fp32")
    return plan


def _kinds(plan: Mapping[str, Storage]) -> tuple[set[str], set[str]]:
    """How the projections are stored, and how the tables are."""
    matrices = {name: str(storage) for name, storage in plan.items() if name.endswith("_proj.weight")}
    assert len(matrices) == 14
    return set(matrices.values()), {str(plan[name]) for name in TABLES if name in plan}


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_float_precisions_hold_for_every_matrix(precision: Any, tiny_llama: Path) -> None:
    assert _kinds(_plan(tiny_llama, precision=precision)) == ({precision}, {precision})


def test_the_default_is_affine_int4_with_int8_tables(tiny_llama: Path) -> None:
    assert _kinds(_plan(tiny_llama)) == ({"int4 affine block 32"}, {"int8 symmetric block 32"})


def test_int8_is_affine_unless_told_otherwise(tiny_llama: Path) -> None:
    kinds = _kinds(_plan(tiny_llama, precision="int8"))
    assert kinds == ({"int8 affine block 32"}, {"int8 symmetric block 32"})
    kinds = _kinds(_plan(tiny_llama, precision="int8", scheme="symmetric"))
    assert kinds == ({"int8 symmetric block 32"}, {"int8 symmetric block 32"})


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_scheme_and_block_size_are_taken_from_the_options(block_size: int, tiny_llama: Path) -> None:
    kinds = _kinds(_plan(tiny_llama, scheme="symmetric", block_size=block_size))
    assert kinds == ({f"int4 symmetric block {block_size}"}, {f"int8 symmetric block {block_size}"})


def test_a_tied_model_has_one_table(tiny_checkpoint: Any) -> None:
    plan = _plan(tiny_checkpoint("llama_tied"))
    assert "lm_head.weight" not in plan
    assert str(plan["embed_tokens.weight"]) == "int8 symmetric block 32"


@pytest.mark.parametrize(
    ("patterns", "kept"),
    [
        (("layers.0.*",), {f"layers.0.{name}" for name in ("q", "k", "v", "o", "gate", "up", "down")}),
        (("*.down_proj",), {"layers.0.down", "layers.1.down"}),
        (("layers.1.self_attn.[qk]_proj", "lm_head"), {"layers.1.q", "layers.1.k", "lm_head"}),
        (("embed_tokens",), {"embed_tokens"}),
    ],
)
def test_modules_that_a_pattern_matches_stay_in_float16(
    patterns: tuple[str, ...], kept: set[str], tiny_llama: Path
) -> None:
    plan = _plan(tiny_llama, precision="int8", keep=patterns)
    wide = {name for name, storage in plan.items() if storage.precision == "fp16"}
    short = {
        name.removesuffix(".weight").removesuffix("_proj").replace("self_attn.", "").replace("mlp.", "")
        for name in wide
    }
    assert short == kept
    assert {storage.precision for name, storage in plan.items() if name not in wide} == {"int8", "fp32"}


@pytest.mark.parametrize("pattern", ["layers.7.*", "q_proj", "*.weight", "lm_heads", "LM_HEAD", ""])
def test_a_pattern_that_matches_nothing_is_refused(pattern: str, tiny_llama: Path) -> None:
    with pytest.raises(UsageError, match=r"matches no module; modules are named like 'layers\.0\.self_attn\.q_proj'"):
        _plan(tiny_llama, keep=("layers.0.*", pattern))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "int5"}, "precision 'int5'; known: fp16, fp32, int4, int8"),
        ({"precision": "INT4"}, "precision 'INT4'; known: fp16, fp32, int4, int8"),
        ({"scheme": "afine"}, r"scheme 'afine'; known: affine, symmetric \(did you mean 'affine'\?\)"),
        ({"block_size": 48}, "block size 48; allowed: 16, 32, 64, 128"),
        ({"block_size": 0}, "block size 0; allowed: 16, 32, 64, 128"),
        ({"precision": "fp16", "scheme": "affine"}, "scheme has no effect with precision fp16"),
        ({"precision": "fp16", "requantize": True}, "requantize has no effect with precision fp16"),
        ({"precision": "fp16", "block_size": 32}, "block size has no effect with precision fp16"),
        (
            {"precision": "fp32", "scheme": "affine", "keep": ("x",)},
            "scheme and keep have no effect with precision fp32",
        ),
        ({"precision": "fp32", "keep": ("layers.0.*",)}, "keep has no effect with precision fp32"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        QuantizationOptions(**options)


GGUF_KEPT = [
    ("Q4_0", "int4", "int4 symmetric block 32", "int8 symmetric block 32"),
    ("Q4_1", "int4", "int4 affine block 32", "int8 affine block 32"),
    ("Q8_0", "int4", "int8 symmetric block 32", "int8 symmetric block 32"),
    ("Q5_0", "int4", "int8 symmetric block 32", "int8 symmetric block 32"),
    ("Q5_1", "int4", "int8 affine block 32", "int8 affine block 32"),
    ("Q4_0", "int8", "int8 symmetric block 32", "int8 symmetric block 32"),
    ("Q4_1", "int8", "int8 affine block 32", "int8 affine block 32"),
    ("Q8_0", "int8", "int8 symmetric block 32", "int8 symmetric block 32"),
]


@pytest.mark.parametrize(("kind", "precision", "projections", "tables"), GGUF_KEPT)
def test_the_blocks_of_a_gguf_are_kept(
    kind: str, precision: Any, projections: str, tables: str, tiny_gguf: Any
) -> None:
    path = tiny_gguf("llama", kind)
    plan = _plan(path, precision=precision)
    assert _kinds(plan) == ({projections}, {tables})
    with open_checkpoint(path) as checkpoint:
        kept = [keeps_blocks(checkpoint.block_format(name), plan[name]) for name in plan if "norm" not in name]
    assert all(kept)


def test_naming_the_scheme_that_a_gguf_has_is_no_conflict(tiny_gguf: Any) -> None:
    assert _plan(tiny_gguf("llama", "Q4_1"), scheme="affine") == _plan(tiny_gguf("llama", "Q4_1"))


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("Q4_0", {"scheme": "affine"}, r"symmetric int4 blocks of 32, scheme 'affine' would round it a second time"),
        ("Q4_1", {"scheme": "symmetric"}, r"affine int4 blocks of 32, scheme 'symmetric' would round it"),
        ("Q8_0", {"precision": "int8", "scheme": "affine"}, r"symmetric int8 blocks of 32, scheme 'affine'"),
        ("Q8_0", {"block_size": 64}, r"symmetric int8 blocks of 32, block size 64 would round it a second time"),
    ],
)
def test_rounding_a_gguf_a_second_time_is_refused(
    kind: str, options: dict[str, Any], message: str, tiny_gguf: Any
) -> None:
    with pytest.raises(UnsupportedError, match=rf"^layers\.0\.self_attn\.q_proj is stored as {message}.*--requantize"):
        _plan(tiny_gguf("llama", kind), **options)


@pytest.mark.parametrize(
    ("kind", "options", "projections"),
    [
        ("Q4_0", {}, "int4 affine block 32"),
        ("Q8_0", {}, "int4 affine block 32"),
        ("Q8_0", {"scheme": "symmetric", "block_size": 64}, "int4 symmetric block 64"),
        ("Q4_1", {"precision": "int8", "block_size": 16}, "int8 affine block 16"),
    ],
)
def test_requantizing_takes_the_options_as_they_are(
    kind: str, options: dict[str, Any], projections: str, tiny_gguf: Any
) -> None:
    plan = _plan(tiny_gguf("llama", kind), requantize=True, **options)
    assert _kinds(plan) == ({projections}, {f"int8 symmetric block {options.get('block_size', 32)}"})


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_a_gguf_without_blocks_is_rounded_like_any_checkpoint(kind: str, tiny_gguf: Any, tiny_llama: Path) -> None:
    assert _plan(tiny_gguf("llama", kind), block_size=64) == _plan(tiny_llama, block_size=64)


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_a_gguf_may_be_widened_to_floats(precision: Any, tiny_gguf: Any) -> None:
    assert _kinds(_plan(tiny_gguf("llama", "Q4_1"), precision=precision)) == ({precision}, {precision})


def test_a_pattern_widens_modules_of_a_gguf(tiny_gguf: Any) -> None:
    plan = _plan(tiny_gguf("llama", "Q4_0"), keep=("layers.0.mlp.*",))
    wide = {name for name, storage in plan.items() if storage.precision == "fp16"}
    assert wide == {f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")}


@pytest.mark.parametrize(
    ("stored", "storage", "kept"),
    [
        (None, Storage(precision="int8"), False),
        (BlockFormat(4, 32, "symmetric"), Storage(precision="int4"), True),
        (BlockFormat(4, 32, "symmetric"), Storage(precision="int8"), True),
        (BlockFormat(8, 32, "symmetric"), Storage(precision="int8"), True),
        (BlockFormat(8, 32, "symmetric"), Storage(precision="int4"), False),
        (BlockFormat(4, 32, "symmetric"), Storage(precision="fp16"), False),
        (BlockFormat(4, 32, "symmetric"), Storage(precision="int4", scheme="affine"), False),
        (BlockFormat(4, 32, "affine"), Storage(precision="int4"), False),
        (BlockFormat(4, 32, "affine"), Storage(precision="int8", scheme="affine"), True),
        (BlockFormat(4, 32, "symmetric"), Storage(precision="int4", block_size=64), False),
        (BlockFormat(8, 16, "symmetric"), Storage(precision="int8", block_size=16), True),
        (BlockFormat(8, 16, "symmetric"), Storage(precision="int8"), False),
    ],
)
def test_blocks_are_kept_when_nothing_is_rounded(stored: BlockFormat | None, storage: Storage, kept: bool) -> None:
    assert keeps_blocks(stored, storage) is kept


def test_the_plan_is_logged_with_its_counts(tiny_llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="edgekit"):
        _plan(tiny_llama)
    assert caplog.messages == ["storage: 14 × int4 affine block 32, 2 × int8 symmetric block 32"]
