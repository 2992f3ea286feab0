from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest

from edgekit.checkpoint import open_checkpoint
from edgekit.families import FAMILIES, Family
from edgekit.families.base import Layout
from edgekit.spec import DecoderSpec

TinyCheckpoint: TypeAlias = Callable[[str], Path]
HuggingFaceModel: TypeAlias = Callable[[Path], Any]


@pytest.fixture(params=FAMILIES, ids=lambda family: family.name)
def family(request: pytest.FixtureRequest) -> Family:
    assert isinstance(request.param, Family)
    return request.param


@pytest.fixture
def spec(family: Family, tiny_checkpoint: TinyCheckpoint) -> Iterator[DecoderSpec]:
    with open_checkpoint(tiny_checkpoint(family.name)) as checkpoint:
        yield checkpoint.spec


def test_every_parameter_of_the_transformers_model_is_a_source(
    family: Family, spec: DecoderSpec, tiny_checkpoint: TinyCheckpoint, hugging_face: HuggingFaceModel
) -> None:
    parameters = dict(hugging_face(tiny_checkpoint(family.name)).named_parameters())
    names = {source.name for source in family.sources(spec).values()}
    other = {value: key for key, value in family.respelled.items()}
    assert {other.get(name.removesuffix(".weight"), name.removesuffix(".weight")) for name in parameters} == {
        name.removesuffix(".weight") for name in names
    }


@pytest.mark.parametrize("layout", ["huggingface", "gguf"])
def test_every_row_of_a_stored_tensor_is_taken_once(family: Family, spec: DecoderSpec, layout: Layout) -> None:
    shapes, taken = spec.tensor_shapes(), dict[str, list[npt.NDArray[np.int64]]]()
    for name, source in family.sources(spec, layout).items():
        rows = np.arange(shapes[name][0]) if source.rows is None else source.rows
        assert rows.dtype == np.int64
        assert rows.shape == shapes[name][:1]
        taken.setdefault(source.name, []).append(rows)
    for rows_of_parts in taken.values():
        rows = np.sort(np.concatenate(rows_of_parts))
        assert np.array_equal(rows, np.arange(len(rows)))


def test_the_rows_of_neox_are_those_that_transformers_views() -> None:
    # GPTNeoXAttention.forward: query_key_value(x).view(..., heads, 3 · head size).chunk(3, dim=-1)
    family = next(family for family in FAMILIES if family.name == "gpt_neox")
    spec = family.spec(
        {
            "hidden_size": 6,
            "intermediate_size": 1,
            "num_hidden_layers": 1,
            "num_attention_heads": 3,
            "vocab_size": 1,
            "max_position_embeddings": 1,
            "rotary_pct": 1.0,
        }
    )
    sources = family.sources(spec)
    assert sources["layers.0.self_attn.q_proj.weight"].rows is not None
    got = [sources[f"layers.0.self_attn.{name}_proj.bias"].rows for name in "qkv"]
    viewed = np.arange(18).reshape(3, 3 * 2)
    for rows, part in zip(got, np.split(viewed, 3, axis=-1), strict=True):
        assert rows is not None
        np.testing.assert_array_equal(rows, part.reshape(-1))
