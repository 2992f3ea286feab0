from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeAlias

import click
import pytest
from click.testing import CliRunner

from edgekit.cli import cli
from edgekit.cli.options import collected
from edgekit.export.storage_plan import BLOCK_SIZES, DEFAULT_BLOCK_SIZE, QuantizationOptions
from edgekit.export.weights import PRECISIONS
from edgekit.runtime import SamplingParams

Invoke: TypeAlias = Callable[..., Any]


def _option(command: str, name: str) -> click.Option:
    (found,) = [option for option in cli.commands[command].params if option.name == name]
    assert isinstance(found, click.Option)
    return found


@pytest.mark.parametrize("command", ["run", "chat"])
@pytest.mark.parametrize("field", fields(SamplingParams), ids=lambda field: field.name)
def test_every_sampling_parameter_is_an_option_with_its_default(command: str, field: Any) -> None:
    option = _option(command, field.name)
    assert option.opts == [f"--{field.name.replace('_', '-')}"]
    assert cli.commands[command].make_context(command, ["bundle"]).params[field.name] == field.default


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--max-tokens", 0, "max_tokens is 0; it must be an integer >= 1"),
        ("--temperature", -1, "temperature is -1.0; it must be a finite number >= 0"),
        ("--top-p", 1.5, "top_p is 1.5; it must be a finite number in (0, 1]"),
        ("--top-k", -1, "top_k is -1; it must be an integer >= 0"),
        ("--min-p", 2, "min_p is 2.0; it must be a finite number in [0, 1]"),
        ("--repetition-penalty", 0, "repetition_penalty is 0.0; it must be a finite number in [0.01, 100]"),
        ("--stop", "", "stop is ('',); it must be a text or a list of texts, none of them empty"),
        ("--seed", -1, "seed is -1; it must be an integer in [0, 9223372036854775807]"),
    ],
)
def test_a_sampling_option_reaches_the_parameter_of_its_name(
    invoke: Invoke, option: str, value: object, message: str
) -> None:
    outcome = invoke("run", "no.edge", "hello", option, value)
    assert (outcome.status, outcome.stderr) == (2, f"error: {message}\n")


def test_two_stop_texts_both_count(invoke: Invoke, bundle: Path) -> None:
    whole = invoke("run", bundle, "The quick", "--max-tokens", 40, "--json").json["text"]
    first, second = whole[12], whole[6]
    stopped = invoke("run", bundle, "The quick", "--stop", first, "--stop", second, "--json").json
    assert stopped["text"] == whole[: min(whole.index(first), whole.index(second))]
    assert stopped["finish_reason"] == "stop"


def test_the_seed_decides_the_draws(invoke: Invoke, bundle: Path) -> None:
    command = ("run", bundle, "The", "--temperature", 1.5, "--max-tokens", 12, "--json", "--ignore-eos", "--seed")
    texts = [invoke(*command, seed).json["token_ids"] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_the_choices_of_the_export_are_those_of_its_options() -> None:
    precision, block_size = _option("export", "precision"), _option("export", "block_size")
    assert isinstance(precision.type, click.Choice)
    assert isinstance(block_size.type, click.Choice)
    assert tuple(precision.type.choices) == PRECISIONS
    assert tuple(block_size.type.choices) == BLOCK_SIZES
    assert precision.default == QuantizationOptions().precision
    assert f"{DEFAULT_BLOCK_SIZE} unless given" in (block_size.help or "")


def test_collected_options_arrive_as_one_argument_beside_the_others() -> None:
    arrived: dict[str, Any] = {}

    @click.command
    @click.argument("place")
    @collected("size", {"width": click.option("--width", type=int), "height": click.option("--height", default=4)})
    @click.option("--color")
    def paint(**values: Any) -> None:
        arrived.update(values)

    assert [parameter.name for parameter in paint.params] == ["place", "width", "height", "color"]
    assert CliRunner().invoke(paint, ["wall", "--width", "3", "--color", "red"]).exit_code == 0
    assert arrived == {"place": "wall", "size": {"width": 3, "height": 4}, "color": "red"}
