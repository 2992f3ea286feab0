"""The rotary parameters of configs, by value against transformers."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from edgekit.errors import CorruptArtifactError, UnsupportedError
from edgekit.families import family_for
from edgekit.rope import DynamicScaling, LongRopeScaling, RopeSpec, YarnScaling

BASE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 8192,
    "head_dim": 64,
}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 1024}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + index / 8 for index in range(32)],
    "long_factor": [1.25**index for index in range(32)],
    "original_max_position_embeddings": 1024,
}


def _rope(parameters: dict[str, Any], **changes: Any) -> RopeSpec:
    config = {"model_type": "llama", **BASE, "rope_parameters": {"rope_theta": 5e5, **parameters}, **changes}
    rope = family_for(config).spec(config).layers[0].attention.rope
    assert rope is not None
    return rope


def _transformers(parameters: dict[str, Any], length: int | None = None, **changes: Any) -> tuple[Any, float]:
    values = copy.deepcopy({"rope_theta": 5e5, **parameters})
    config = LlamaConfig(**{**BASE, "rope_parameters": values, **changes})
    frequencies, attention_factor = ROPE_INIT_FUNCTIONS[values["rope_type"]](config, "cpu", seq_len=length)
    return frequencies.double().numpy(), attention_factor


@pytest.mark.parametrize(
    "parameters",
    [
        YARN,
        {**YARN, "factor": None},
        {**YARN, "factor": 1.0},
        {**YARN, "factor": 0.5},
        {**YARN, "attention_factor": 0.75},
        {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8},
        {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        {**YARN, "mscale": 2.0},
        {**YARN, "mscale": 2.0, "mscale_all_dim": 0.0},
        {**YARN, "beta_fast": None, "beta_slow": None, "attention_factor": None},
        {**YARN, "beta_fast": 16, "beta_slow": 2, "truncate": False},
        {"rope_type": "yarn", "factor": 4.0},
    ],
)
def test_yarn_is_that_of_transformers(parameters: dict[str, Any]) -> None:
    frequencies, attention_factor = _transformers(parameters)
    rope = _rope(parameters)
    assert isinstance(rope.scaling, YarnScaling)
    np.testing.assert_allclose(rope.inverse_frequencies(), frequencies, rtol=2e-6)
    assert rope.attention_factor == pytest.approx(attention_factor, rel=1e-12)


def test_what_yarn_stretches_by_follows_from_the_contexts_when_a_config_does_not_say() -> None:
    assert _rope({**YARN, "factor": None}) == _rope(YARN)
    wider = _rope({**YARN, "factor": None}, max_position_embeddings=4096).scaling
    assert isinstance(wider, YarnScaling)
    assert wider.factor == 4.0


@pytest.mark.parametrize("length", [1, 8192, 8193, 30000])
def test_dynamic_scaling_is_that_of_transformers(length: int) -> None:
    frequencies, attention_factor = _transformers(DYNAMIC, length)
    rope = _rope(DYNAMIC)
    np.testing.assert_allclose(rope.inverse_frequencies(length), frequencies, rtol=2e-6)
    assert rope.attention_factor == attention_factor == 1.0


def test_dynamic_scaling_begins_at_the_context_of_the_model() -> None:
    rope = _rope({**DYNAMIC, "original_max_position_embeddings": 512})
    assert rope.scaling == DynamicScaling(factor=4.0, original_max_positions=8192)


def test_the_context_is_what_dynamic_scaling_stretches_it_to() -> None:
    config = {"model_type": "llama", **BASE, "rope_scaling": DYNAMIC}
    assert family_for(config).spec(config).max_positions == 4 * 8192
    config = {"model_type": "llama", **BASE, "rope_scaling": YARN}
    assert family_for(config).spec(config).max_positions == 8192


@pytest.mark.parametrize("length", [1, 1024, 1025, 8192])
@pytest.mark.parametrize(
    "parameters",
    [
        LONGROPE,
        {**LONGROPE, "factor": 4.0},
        {**LONGROPE, "factor": 0.5},
        {**LONGROPE, "factor": 4.0, "attention_factor": 1.5},
        {key: value for key, value in LONGROPE.items() if key != "original_max_position_embeddings"},
    ],
)
def test_longrope_is_that_of_transformers(parameters: dict[str, Any], length: int) -> None:
    frequencies, attention_factor = _transformers(parameters, length)
    rope = _rope(parameters)
    np.testing.assert_allclose(rope.inverse_frequencies(length), frequencies, rtol=2e-6)
    assert rope.attention_factor == pytest.approx(attention_factor, rel=1e-12)


def test_an_older_name_of_longrope_means_the_same() -> None:
    assert _rope({**LONGROPE, "rope_type": "su"}) == _rope(LONGROPE)
    older = {key: value for key, value in LONGROPE.items() if key != "rope_type"} | {"type": "su"}
    assert _rope({}, rope_parameters=None, rope_scaling=older, rope_theta=5e5) == _rope(LONGROPE)


@pytest.mark.parametrize("parameters", [YARN, LONGROPE])
def test_a_context_given_outside_the_parameters_comes_first(parameters: dict[str, Any]) -> None:
    frequencies, attention_factor = _transformers(parameters, 3000, original_max_position_embeddings=2048)
    rope = _rope(parameters, original_max_position_embeddings=2048)
    assert isinstance(rope.scaling, YarnScaling | LongRopeScaling)
    assert rope.scaling.original_max_positions == 2048
    np.testing.assert_allclose(rope.inverse_frequencies(3000), frequencies, rtol=2e-6)
    assert rope.attention_factor == pytest.approx(attention_factor, rel=1e-12)


@pytest.mark.parametrize("parameters", [{"rope_type": "default"}, YARN, DYNAMIC])
def test_a_fraction_of_the_channels_rotates_where_a_family_lets_it(parameters: dict[str, Any]) -> None:
    from transformers import StableLmConfig

    values = {**parameters, "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    config = {"model_type": "stablelm", **BASE, "num_key_value_heads": 4, "rope_parameters": values}
    rope = family_for(config).spec(config).layers[0].attention.rope
    assert rope is not None
    assert rope.rotary_dim == 32
    if parameters["rope_type"] != "default":
        oracle: Any = StableLmConfig(**{**BASE, "rope_parameters": copy.deepcopy(values)})
        frequencies, _ = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](oracle, "cpu")
        np.testing.assert_allclose(rope.inverse_frequencies(), frequencies.double().numpy(), rtol=2e-6)


def test_the_older_spelling_wins_where_a_config_has_both() -> None:
    rope = _rope({"rope_type": "linear", "factor": 2.0}, rope_scaling=DYNAMIC, rope_theta=3e4)
    make: Any = LlamaConfig  # whose signature leaves the older keys out
    oracle = make(
        **{**BASE, "rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}},
        rope_scaling=dict(DYNAMIC),
        rope_theta=3e4,
    )
    assert isinstance(rope.scaling, DynamicScaling)
    parameters: Any = oracle.rope_parameters
    assert (rope.theta, "dynamic") == (parameters["rope_theta"], parameters["rope_type"])


@pytest.mark.parametrize(
    ("parameters", "changes", "message"),
    [
        (
            {**LONGROPE, "short_factor": [1.0] * 31},
            {},
            r"a llama config has 31 numbers in short_factor; expected 32, one per frequency; get the file again",
        ),
        ({**LONGROPE, "long_factor": [1.0] * 64}, {}, r"64 numbers in long_factor; expected 32"),
        ({**LONGROPE, "long_factor": [1.0, 0.0] * 16}, {}, r"Expected `float` > 0.0 - at `\$\.long_factor\[1\]`"),
        ({**LONGROPE, "short_factor": None}, {}, r"kind 'longrope' cannot be read: .*`\$\.short_factor`"),
        ({**LONGROPE, "original_max_position_embeddings": 1}, {}, r"Expected `int` >= 2"),
        ({**YARN, "original_max_position_embeddings": 0}, {}, r"Expected `int` >= 1"),
        ({**YARN, "factor": -2.0}, {}, r"llama rope_parameters of kind 'yarn' cannot be read: .*`\$\.factor`"),
        ({**YARN, "truncate": None}, {}, r"`\$\.truncate` \(it is None\)"),
        ({"rope_type": "dynamic"}, {}, r"kind 'dynamic' cannot be read: .*missing required field `factor`"),
    ],
)
def test_impossible_parameters_are_named(parameters: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CorruptArtifactError, match=message):
        _rope(parameters, **changes)


@pytest.mark.parametrize(
    ("parameters", "changes", "message"),
    [
        ({**LONGROPE, "short_mscale": 1.1}, {}, r"parameter 'short_mscale' for rope_type 'longrope' .*known for it"),
        ({**YARN, "llama_4_scaling_beta": 0.1}, {}, r"parameter 'llama_4_scaling_beta' for rope_type 'yarn'"),
        ({**DYNAMIC, "alpha": 1000.0}, {}, r"parameter 'alpha' for rope_type 'dynamic'"),
        ({"rope_type": "default", "mrope_section": [16, 24, 24]}, {}, r"parameter 'mrope_section'"),
        (YARN, {"head_dim": 2}, r"llama with rotary width = 2 .* supported: 4 and more with rope_type yarn"),
        (DYNAMIC, {"head_dim": 2}, r"llama with rotary width = 2 .* supported: 4 and more with rope_type dynamic"),
        ({**YARN, "rope_theta": 1.0}, {}, r"llama with rope_theta = 1.0 .* supported: numbers above 1"),
        ({"rope_type": "proportional"}, {}, r"llama with rope_type 'proportional'; known: default, dynamic, linear"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(
    parameters: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        _rope(parameters, **changes)
