from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from edgekit.rope import (
    DynamicScaling,
    FactorScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeScaling,
    RopeSpec,
    YarnScaling,
)

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


def _transformers(kind: str, parameters: dict[str, Any], length: int | None = None, **config: Any) -> Any:
    """Frequencies of a head of 64 channels, for a text of this length."""
    values = {"rope_type": kind, "rope_theta": 1e4, **parameters}
    made = LlamaConfig(head_dim=64, rope_parameters=values, **{"max_position_embeddings": 131072, **config})
    frequencies, _ = ROPE_INIT_FUNCTIONS[kind](made, "cpu", seq_len=length)
    return frequencies.double().numpy()


@pytest.mark.parametrize(
    ("parameters", "scaling"),
    [
        ({"factor": 4.0}, YarnScaling(factor=4.0, original_max_positions=4096)),
        ({"factor": 32.0, "truncate": False}, YarnScaling(factor=32.0, original_max_positions=4096, truncate=False)),
        (
            {"factor": 8.0, "beta_fast": 16.0, "beta_slow": 2.0},
            YarnScaling(factor=8.0, original_max_positions=4096, beta_fast=16.0, beta_slow=2.0),
        ),
        # Both ends of the ramp beyond the channels, and both at the same one.
        ({"factor": 2.0, "beta_slow": 1e-6}, YarnScaling(factor=2.0, original_max_positions=4096, beta_slow=1e-6)),
        (
            {"factor": 2.0, "beta_fast": 1.0, "truncate": False},
            YarnScaling(factor=2.0, original_max_positions=4096, beta_fast=1.0, truncate=False),
        ),
        ({"factor": 2.0, "beta_fast": 1e6}, YarnScaling(factor=2.0, original_max_positions=4096, beta_fast=1e6)),
    ],
)
def test_yarn_frequencies_are_those_of_transformers(parameters: dict[str, Any], scaling: YarnScaling) -> None:
    expected = _transformers("yarn", {**parameters, "original_max_position_embeddings": 4096})
    got = RopeSpec(theta=1e4, rotary_dim=64, scaling=scaling).inverse_frequencies()
    np.testing.assert_allclose(got, expected, rtol=2e-6)


def test_yarn_keeps_fast_channels_divides_slow_ones_and_blends_between() -> None:
    base = RopeSpec(theta=1e4, rotary_dim=64).inverse_frequencies()
    scaling = YarnScaling(factor=4.0, original_max_positions=4096)
    ratio = base / RopeSpec(theta=1e4, rotary_dim=64, scaling=scaling).inverse_frequencies()
    assert ratio[0] == 1.0
    assert ratio[-1] == 4.0
    assert (np.diff(ratio) >= 0).all()
    assert ((ratio > 1) & (ratio < 4)).sum() > 3


@pytest.mark.parametrize("length", [1, 2048, 2049, 5000, 131072])
@pytest.mark.parametrize("factor", [2.0, 4.5])
def test_dynamic_frequencies_are_those_of_transformers(factor: float, length: int) -> None:
    expected = _transformers("dynamic", {"factor": factor}, length, max_position_embeddings=2048)
    scaling = DynamicScaling(factor=factor, original_max_positions=2048)
    rope = RopeSpec(theta=1e4, rotary_dim=64, scaling=scaling)
    np.testing.assert_allclose(rope.inverse_frequencies(length), expected, rtol=2e-6)


LONG = LongRopeScaling(
    short_factors=tuple(1 + index / 32 for index in range(32)),
    long_factors=tuple(1.2**index for index in range(32)),
    original_max_positions=4096,
)


@pytest.mark.parametrize("length", [1, 4096, 4097, 131072])
def test_longrope_frequencies_are_those_of_transformers(length: int) -> None:
    parameters = {
        "short_factor": list(LONG.short_factors),
        "long_factor": list(LONG.long_factors),
        "original_max_position_embeddings": 4096,
    }
    expected = _transformers("longrope", parameters, length)
    rope = RopeSpec(theta=1e4, rotary_dim=64, scaling=LONG)
    np.testing.assert_allclose(rope.inverse_frequencies(length), expected, rtol=2e-6)


@pytest.mark.parametrize(
    ("scaling", "last_same", "first_other"),
    [(LONG, 4096, 4097), (DynamicScaling(factor=2.0, original_max_positions=2048), 2048, 2049)],
)
def test_a_text_of_unknown_length_is_a_short_one(scaling: RopeScaling, last_same: int, first_other: int) -> None:
    rope = RopeSpec(theta=1e4, rotary_dim=64, scaling=scaling)
    assert rope.depends_on_length
    np.testing.assert_array_equal(rope.inverse_frequencies(), rope.inverse_frequencies(last_same))
    assert (rope.inverse_frequencies() != rope.inverse_frequencies(first_other)).any()


@pytest.mark.parametrize(
    "scaling", [None, LinearScaling(factor=2.0), YarnScaling(factor=4.0, original_max_positions=64), _llama3(SHORT)]
)
def test_other_kinds_do_not_depend_on_the_length(scaling: RopeScaling | None) -> None:
    rope = RopeSpec(theta=1e4, rotary_dim=64, scaling=scaling)
    assert not rope.depends_on_length
    np.testing.assert_array_equal(rope.inverse_frequencies(), rope.inverse_frequencies(100000))


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
    "scaling",
    [
        None,
        LinearScaling(factor=3.0),
        _llama3(SHORT),
        FactorScaling(factors=(1.0, 1 / 3)),
        YarnScaling(factor=4.0, original_max_positions=64, truncate=False),
        DynamicScaling(factor=4.0, original_max_positions=64),
        LongRopeScaling(short_factors=(1.0, 1.5), long_factors=(2.0, 1 / 3), original_max_positions=64),
    ],
)
def test_a_rope_survives_json(scaling: RopeScaling | None) -> None:
    rope = RopeSpec(theta=1e4, rotary_dim=4, scaling=scaling, attention_factor=1.25)
    decoded = msgspec.json.decode(msgspec.json.encode(rope), type=RopeSpec)
    assert decoded == rope
    assert hash(decoded) == hash(rope)
    np.testing.assert_array_equal(decoded.inverse_frequencies(), rope.inverse_frequencies())


@pytest.mark.parametrize(
    "text",
    [
        b'{"theta": 1e4, "rotary_dim": 4, "scaling": {"type": "ntk", "factor": 2.0}}',
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
