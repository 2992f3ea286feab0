from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from edgekit.rope import FactorScaling, LinearScaling, Llama3Scaling, RopeScaling, RopeSpec

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
SHORT = {"factor": 32.0, "low_freq_factor": 1.5, "high_freq_factor": 9.0, "original_max_position_embeddings": 64}


def _llama3(parameters: dict[str, Any]) -> Llama3Scaling:
    return Llama3Scaling(
        factor=parameters["factor"],
        low_freq_factor=parameters["low_freq_factor"],
        high_freq_factor=parameters["high_freq_factor"],
        original_max_positions=parameters["original_max_position_embeddings"],
    )


@pytest.mark.parametrize("width", [2, 24, 64, 128])
@pytest.mark.parametrize("theta", [100.0, 1e4, 5e5, 1e6])
@pytest.mark.parametrize(
    ("kind", "parameters", "scaling"),
    [
        ("linear", {"factor": 1.0}, None),
        ("linear", {"factor": 4.0}, LinearScaling(factor=4.0)),
        ("linear", {"factor": 2.5}, LinearScaling(factor=2.5)),
        ("llama3", LLAMA3, _llama3(LLAMA3)),
        ("llama3", SHORT, _llama3(SHORT)),
    ],
)
def test_frequencies_are_those_of_transformers(
    kind: str, parameters: dict[str, Any], scaling: RopeScaling | None, theta: float, width: int
) -> None:
    config = LlamaConfig(
        head_dim=width,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": kind, "rope_theta": theta, **parameters},
    )
    expected, attention_factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    got = RopeSpec(theta=theta, rotary_dim=width, scaling=scaling).inverse_frequencies()
    assert attention_factor == 1.0
    assert got.dtype == np.float64
    assert got.shape == (width // 2,)
    np.testing.assert_allclose(got, expected.numpy(), rtol=1e-6)


@pytest.mark.parametrize("theta", [1e4, 5e5])
def test_default_frequencies_are_those_of_the_model_itself(theta: float) -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(head_dim=64, rope_parameters={"rope_type": "default", "rope_theta": theta})
    expected = LlamaRotaryEmbedding(config).inv_freq.numpy()
    np.testing.assert_allclose(RopeSpec(theta=theta, rotary_dim=64).inverse_frequencies(), expected, rtol=1e-6)


def test_partial_rotation_spreads_the_series_over_the_channels_that_rotate() -> None:
    from transformers import GPTNeoXConfig
    from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding

    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    config = GPTNeoXConfig(hidden_size=256, num_attention_heads=4, rope_parameters=rope)
    expected = GPTNeoXRotaryEmbedding(config).inv_freq.numpy()
    np.testing.assert_allclose(RopeSpec(theta=1e4, rotary_dim=16).inverse_frequencies(), expected, rtol=1e-6)


def test_llama3_keeps_short_waves_divides_long_ones_and_blends_between() -> None:
    base = RopeSpec(theta=5e5, rotary_dim=128).inverse_frequencies()
    scaled = RopeSpec(theta=5e5, rotary_dim=128, scaling=_llama3(LLAMA3)).inverse_frequencies()
    ratio = base / scaled
    assert ratio[0] == 1.0
    assert ratio[-1] == 8.0
    assert (np.diff(ratio) >= 0).all()
    assert ((ratio > 1) & (ratio < 8)).sum() > 3


def test_factors_divide_each_frequency_by_its_own() -> None:
    factors = (1.0, 2.0, 8.0, 32.0)
    base = RopeSpec(theta=1e4, rotary_dim=8).inverse_frequencies()
    scaled = RopeSpec(theta=1e4, rotary_dim=8, scaling=FactorScaling(factors=factors)).inverse_frequencies()
    np.testing.assert_allclose(base / scaled, factors, rtol=1e-15)


@pytest.mark.parametrize(
    "scaling", [None, LinearScaling(factor=3.0), _llama3(SHORT), FactorScaling(factors=(1.0, 1 / 3))]
)
def test_a_rope_survives_json(scaling: RopeScaling | None) -> None:
    rope = RopeSpec(theta=1e4, rotary_dim=4, scaling=scaling)
    decoded = msgspec.json.decode(msgspec.json.encode(rope), type=RopeSpec)
    assert decoded == rope
    assert hash(decoded) == hash(rope)
    np.testing.assert_array_equal(decoded.inverse_frequencies(), rope.inverse_frequencies())


@pytest.mark.parametrize(
    "text",
    [
        b'{"theta": 1e4, "rotary_dim": 4, "scaling": {"type": "yarn", "factor": 2.0}}',
        b'{"theta": 1e4, "rotary_dim": 4, "scaling": {"type": "linear", "factor": 2.0, "beta": 1}}',
        b'{"theta": 1e4, "rotary_dim": 4, "scaling": {"factor": 2.0}}',
        b'{"theta": "1e4", "rotary_dim": 4}',
        b'{"theta": 1e4, "rotary_dim": 4, "interleaved": true}',
    ],
)
def test_a_rope_with_anything_unknown_is_refused(text: bytes) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=RopeSpec)
