"""Keys that are turned against keys that the models compute at the other position."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from edgekit.cache_layout import Stack, cache_layout
from edgekit.checkpoint import open_checkpoint
from edgekit.compress.decoder import load_decoder
from edgekit.rope import FactorScaling, LinearScaling, Llama3Scaling, RopeSpec, YarnScaling
from edgekit.runtime.rotation import turned
from edgekit.spec import DecoderSpec

VARIANTS = (
    "llama",
    "llama_llama3_rope",
    "llama_linear_rope",
    "llama_yarn_rope",  # with an attention factor
    "gemma3",  # two ropes in one model
    "gpt_neox",  # a quarter of the channels
    "phi",
    "smollm3",  # none in some layers
)


def _keys(model: Any, token_ids: Any, first: int) -> list[Any]:
    """Keys of every layer when a text begins at a position, shape (KV, dk, n)."""
    positions = torch.arange(first, first + token_ids.shape[1])[None]
    with torch.no_grad():
        output = model(token_ids, position_ids=positions)
    return [keys[0].transpose(1, 2).numpy() for keys, _ in output.key_values]


# A text that begins elsewhere has the same keys, rotated otherwise: only distances matter to attention.
@pytest.mark.parametrize("distance", [1, -7, 100])
@pytest.mark.parametrize("variant", VARIANTS)
def test_turned_keys_are_those_of_a_text_that_begins_elsewhere(
    variant: str, distance: int, tiny_checkpoint: Any, token_ids: Any
) -> None:
    with open_checkpoint(tiny_checkpoint(variant)) as checkpoint:
        spec, model = checkpoint.spec, load_decoder(checkpoint)
    ids = torch.from_numpy(token_ids[:1])
    before, after = _keys(model, ids, 20), _keys(model, ids, 20 + distance)
    for stack in cache_layout(spec).stacks:
        keys = np.stack([before[layer] for layer in stack.layers])
        expected = np.stack([after[layer] for layer in stack.layers])
        copy = keys.copy()
        np.testing.assert_allclose(turned(keys, spec, stack, distance), expected, atol=2e-5)
        np.testing.assert_array_equal(keys, copy)
    rotates = any(layer.attention.rope is not None for layer in spec.layers)
    assert rotates
    assert max(np.abs(one - two).max() for one, two in zip(before, after, strict=True)) > 0.1


def test_turned_keys_are_those_of_hugging_face(tiny_checkpoint: Any, hugging_face: Any, token_ids: Any) -> None:
    directory: Path = tiny_checkpoint("llama_llama3_rope")
    model, ids = hugging_face(directory), torch.from_numpy(token_ids[:1])
    keys = []
    for first in (0, 33):
        with torch.no_grad():
            positions = torch.arange(first, first + 24)[None]
            past = model(ids, position_ids=positions, use_cache=True).past_key_values
        keys.append(np.stack([layer.keys[0].transpose(1, 2).numpy() for layer in past.layers]))
    with open_checkpoint(directory) as checkpoint:
        spec = checkpoint.spec
    np.testing.assert_allclose(turned(keys[0], spec, cache_layout(spec).stacks[0], 33), keys[1], atol=2e-5)


def _with_ropes(spec: DecoderSpec, ropes: list[RopeSpec | None]) -> DecoderSpec:
    layers = tuple(
        msgspec.structs.replace(layer, attention=msgspec.structs.replace(layer.attention, rope=rope))
        for layer, rope in zip(spec.layers, ropes, strict=True)
    )
    return msgspec.structs.replace(spec, layers=layers)


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        LinearScaling(factor=4.0),
        FactorScaling(factors=(1.0, 2.0, 3.0, 4.0)),
        YarnScaling(factor=8.0, original_max_positions=32),
        Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=32),
    ],
    ids=lambda scaling: type(scaling).__name__,
)
def test_pairs_of_channels_are_turned_like_complex_numbers(scaling: Any, tiny_checkpoint: Any) -> None:
    with open_checkpoint(tiny_checkpoint("llama")) as checkpoint:
        spec = checkpoint.spec
    rope = RopeSpec(theta=1e4, rotary_dim=8, scaling=scaling, attention_factor=1.3)
    spec = _with_ropes(spec, [rope, None])
    stack: Stack = cache_layout(spec).stacks[0]
    keys = np.random.default_rng(0).standard_normal((2, 2, 16, 5)).astype(np.float32)
    result = turned(keys, spec, stack, 1000)
    turns = np.exp(1j * 1000 * rope.inverse_frequencies())[:, None]
    expected = (keys[0, :, :4] + 1j * keys[0, :, 4:8]) * turns
    np.testing.assert_allclose(result[0, :, :4], expected.real, atol=1e-5)
    np.testing.assert_allclose(result[0, :, 4:8], expected.imag, atol=1e-5)
    np.testing.assert_array_equal(result[0, :, 8:], keys[0, :, 8:])
    np.testing.assert_array_equal(result[1], keys[1])
    np.testing.assert_allclose(turned(result, spec, stack, -1000), keys, atol=1e-5)
    np.testing.assert_array_equal(turned(keys, spec, stack, 0), keys)
