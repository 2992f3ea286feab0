"""The Jinja dialect of Hugging Face chat templates, for templates that are not trusted.

A module of its own because it imports jinja2 at the top: import it where a template is compiled, not before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from edgekit.errors import UnsupportedError

MAX_CHARACTERS = 8 * 2**20
MAX_STEPS = 1_000_000
_steps: ContextVar[int] = ContextVar("steps of the rendering in progress")


class RefusedByTemplateError(Exception):
    """The template called `raise_exception`: it does not take these messages."""


class CompiledTemplate:
    """A template that renders within bounds.

    A rendering takes at most `MAX_STEPS` loop iterations and calls, and its output, like every text that it
    multiplies or carries from one iteration to the next, has at most `MAX_CHARACTERS`. What a filter does
    within one call is not bounded.

    Attributes:
        variables: Names that the template reads and does not set.
    """

    variables: frozenset[str]

    def __init__(self, source: str) -> None:
        """Compiles a template.

        Args:
            source: Jinja source.

        Raises:
            jinja2.TemplateError: The source is not valid.
        """
        environment = _ChatEnvironment()
        tree = environment.parse(source)
        self.variables = frozenset(meta.find_undeclared_variables(tree))
        for loop in tree.find_all(nodes.For):
            step = nodes.Call(nodes.EnvironmentAttribute("count_step"), [], [], None, None)
            loop.body.insert(0, nodes.ExprStmt(step).set_lineno(loop.lineno))
        self._template = jinja2.Template.from_code(environment, environment.compile(tree), dict(environment.globals))

    def render(self, variables: Mapping[str, object]) -> str:
        """Renders the template.

        Args:
            variables: What the template may read, made of plain strings, numbers, lists and mappings.

        Returns:
            Text.

        Raises:
            RefusedByTemplateError: The template does not take the messages.
            UnsupportedError: A bound was reached.
            Exception: Whatever else the template provokes.
        """
        _steps.set(0)
        pieces: list[str] = []
        characters = 0
        for piece in self._template.generate(variables):
            characters += len(piece)
            _check_length(characters)
            pieces.append(piece)
        return "".join(pieces)


class _Generation(Extension):
    """Renders the body of ``{% generation %}``, which marks for training what the assistant said."""

    tags = {"generation"}  # noqa: RUF012 - as Extension declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _BoundedNamespace(Namespace):
    """Keeps what a template carries from one loop iteration to the next within the bound."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: object) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace cannot have an attribute {name!r}")
        if isinstance(value, (str, list, tuple, dict)):
            _check_length(len(value))
        super().__setitem__(name, value)


class _ChatEnvironment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters["tojson"] = _to_json
        self.globals.update(
            raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=_BoundedNamespace, dict=_new_dict
        )

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        # Jinja returns a value that fails only if it is used and prints as nothing if it is not.
        raise SecurityError(f"access to attribute {attribute!r} of a {type(obj).__name__} is unsafe")

    def count_step(self) -> None:
        """Called at the start of each loop iteration; `call` counts it."""

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        steps = _steps.get() + 1
        _steps.set(steps)
        if steps > MAX_STEPS:
            raise UnsupportedError(f"the chat template takes more than {MAX_STEPS} steps")
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise UnsupportedError("the chat template computes a power, which is not supported")
        for sized, factor in ((left, right), (right, left)):
            if isinstance(sized, (str, list, tuple)) and isinstance(factor, int):
                _check_length(len(sized) * factor)
        return super().call_binop(context, operator, left, right)


def _check_length(characters: int) -> None:
    if characters > MAX_CHARACTERS:
        raise UnsupportedError(f"the chat template makes a text of more than {MAX_CHARACTERS} characters")


def _raise_exception(message: str) -> None:
    raise RefusedByTemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _new_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - templates may pass it by position
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    # Jinja's own filter escapes for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
