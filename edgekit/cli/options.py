"""Options that several commands have, each declared and explained once."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import click

Function: TypeAlias = Callable[..., None]
Decorator: TypeAlias = Callable[[Function], Function]


@dataclass
class Invocation:
    """What `main` wants to know of the options while it runs a command; it is the context's object.

    Attributes:
        json: Whether errors are to be printed as JSON too.
        verbose: Whether errors are to come with their traceback.
    """

    json: bool = False
    verbose: bool = False


def is_verbose() -> bool:
    """Whether the running command was given --verbose."""
    return click.get_current_context().ensure_object(Invocation).verbose


def _note_verbose(context: click.Context, _: click.Parameter, value: bool) -> None:  # noqa: FBT001 - click's interface
    if value:
        context.ensure_object(Invocation).verbose = True
        logging.getLogger("edgekit").setLevel(logging.INFO)


def _note_json(context: click.Context, _: click.Parameter, value: bool) -> bool:  # noqa: FBT001 - click's interface
    if value:
        context.ensure_object(Invocation).json = True
    return value


verbose_option = click.option(
    "-v",
    "--verbose",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_note_verbose,
    help="Log what is done, and show tracebacks.",
)
json_option = click.option(
    "--json", is_flag=True, is_eager=True, callback=_note_json, help="Print the result as one JSON document."
)
threads_option = click.option(
    "--threads", type=int, metavar="N", help="Threads that compute; the physical cores unless given."
)
bundle_argument = click.argument("bundle", type=click.Path(path_type=Path))


def collected(parameter: str, options: Mapping[str, Decorator]) -> Decorator:
    """Adds options to a command that get there as one argument.

    Args:
        parameter: The argument: a dictionary from the options' names to their values.
        options: Options by the names that their values have.
    """

    def decorate(command: Function) -> Function:
        @functools.wraps(command)
        def collect(**values: Any) -> None:
            chosen = {name: values.pop(name) for name in options}
            command(**{parameter: chosen}, **values)

        decorated: Function = collect
        for option in reversed(list(options.values())):
            decorated = option(decorated)
        return decorated

    return decorate


# Names and defaults are those of SamplingParams, which is too heavy to import for a help text.
_SAMPLING: Mapping[str, Decorator] = {
    "max_tokens": click.option(
        "--max-tokens", type=int, default=256, show_default=True, metavar="N", help="Most tokens to generate."
    ),
    "temperature": click.option(
        "--temperature",
        type=float,
        default=0.0,
        show_default=True,
        metavar="T",
        help="Divides the logits; 0 always takes the likeliest token.",
    ),
    "top_p": click.option(
        "--top-p",
        type=float,
        default=1.0,
        show_default=True,
        metavar="P",
        help="Draw from the fewest tokens whose probabilities sum to P; 1 is off.",
    ),
    "top_k": click.option(
        "--top-k",
        type=int,
        default=0,
        show_default=True,
        metavar="N",
        help="Draw from the N likeliest tokens; 0 is off.",
    ),
    "min_p": click.option(
        "--min-p",
        type=float,
        default=0.0,
        show_default=True,
        metavar="P",
        help="Draw from tokens at least P times as likely as the likeliest; 0 is off.",
    ),
    "repetition_penalty": click.option(
        "--repetition-penalty",
        type=float,
        default=1.0,
        show_default=True,
        metavar="X",
        help="Makes tokens that occurred less likely; 1 is off.",
    ),
    "stop": click.option("--stop", multiple=True, metavar="TEXT", help="End at this text; may be repeated."),
    "seed": click.option("--seed", type=int, metavar="N", help="Makes random draws reproducible."),
    "logprobs": click.option(
        "--logprobs",
        type=int,
        metavar="N",
        help="Report log-probabilities of each token and of the N likeliest; needs --json.",
    ),
    "ignore_eos": click.option("--ignore-eos", is_flag=True, help="Go on after an end token."),
}
sampling_options = collected("sampling", _SAMPLING)
"""Adds an option for every field of `SamplingParams`; they arrive as the argument `sampling`."""

_MEMORY: Mapping[str, Decorator] = {
    "memory_budget": click.option(
        "--memory-budget",
        metavar="SIZE",
        help="Most memory of the whole process, such as 512MiB; what is free if not given.",
    ),
    "ctx_size": click.option(
        "--ctx-size",
        type=int,
        metavar="N",
        help="Tokens that the KV cache must have room for; as many as fit if not given.",
    ),
    "kv_cache_dtype": click.option(
        "--kv-cache-dtype",
        type=click.Choice(["auto", "fp32", "fp16", "int8"]),
        default="auto",
        show_default=True,
        help="How keys and values are stored; auto is the bundle's own, or int8 where that does not fit.",
    ),
    "kv_policy": click.option(
        "--kv-policy",
        metavar="NAME",
        default="stop",
        show_default=True,
        help="When the KV cache is full: stop; window: sinks and recent tokens; snapkv, laq, laq++: compress prompts.",
    ),
    "kv_budget_tokens": click.option(
        "--kv-budget-tokens", type=int, metavar="N", help="Tokens that the KV policy keeps; all that fit if not given."
    ),
    "kv_profile": click.option(
        "--kv-profile",
        type=click.Path(path_type=Path),
        help="Budgets of each layer, made by tune-cache, for snapkv and laq.",
    ),
    "allow_long": click.option(
        "--allow-long", is_flag=True, help="Allow a context longer than the model was trained on."
    ),
}
memory_options = collected("memory", _MEMORY)
"""Adds the options of memory and KV cache; they arrive as the argument `memory`, for `edgekit.cli.loading`."""

room_options = collected(
    "memory", {name: _MEMORY[name] for name in ("memory_budget", "ctx_size", "kv_cache_dtype", "allow_long")}
)
"""The same without a KV policy, for commands whose own business that is."""
