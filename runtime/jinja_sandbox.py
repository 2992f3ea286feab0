"""The Jinja dialect of Hugging Face chat templates, for templates that are not trusted.

A module of its own because it imports jinja2 at the top: import it where a template is compiled, not before.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
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
from jinja2.visitor import NodeTransformer

from edgekit.errors import UnsupportedError

MAX_CHARACTERS = 8 * 2**20
MAX_STEPS = 1_000_000
MAX_BITS = 1024
_SIZED = (str, list, tuple)
# They pad or cut by numbers that a template chooses, and no chat template has a use for them.
_UNBOUNDED_FILTERS = ("batch", "center", "slice", "urlize", "wordwrap")
_WIDTHS = re.compile(r"\d{1,18}")
_VARIABLE_WIDTH = re.compile(r"%[-+ #0]*(\([^)]*\))?[-+ #0\d.]*\*")
_steps: ContextVar[int] = ContextVar("steps of the rendering in progress")


class RefusedByTemplateError(Exception):
    """The template called `raise_exception`: it does not take these messages."""


class CompiledTemplate:
    """A template that renders within bounds.

    A rendering takes at most `MAX_STEPS` loop iterations, calls and concatenations; its output, like every text and
    list that an operator makes or that is carried from one iteration to the next, has at most `MAX_CHARACTERS`, and a
    product of integers at most `MAX_BITS`. No filter pads or cuts to a width.

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
        tree = _BoundedConcatenations().visit(environment.parse(source))
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


class _BoundedConcatenations(NodeTransformer):
    """Makes of each ``a ~ b`` a call that the environment bounds."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802 - the visitor looks for it
        self.generic_visit(node)
        join = nodes.EnvironmentAttribute("join_texts")
        return nodes.Call(join, node.nodes, [], None, None).set_lineno(node.lineno)


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
    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters.update(tojson=_to_json, format=_format, join=_join, replace=_replace)
        for name in _UNBOUNDED_FILTERS:
            del self.filters[name]
        del self.globals["lipsum"]
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
        text = getattr(__obj, "__self__", None)
        if isinstance(text, str):  # ljust, zfill, expandtabs, ..., format
            widths = [int(width) for width in _WIDTHS.findall(text)] if "format" in __obj.__name__ else []
            for width in (*widths, *args, *kwargs.values()):
                _check_length(width if isinstance(width, int) else 0)
            if __obj.__name__ == "join":
                return _join(args[0], text)
            if __obj.__name__ == "replace":
                return _replace(text, *args)
        return super().call(__context, __obj, *args, **kwargs)

    def join_texts(self, *parts: object) -> str:
        """Computes ``a ~ b``."""
        texts = [str(part) for part in parts]
        _check_length(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise UnsupportedError("the chat template computes a power, which is not supported")
        if operator == "*":
            _check_product(left, right)
        elif operator == "+" and isinstance(left, _SIZED) and isinstance(right, _SIZED):
            _check_length(len(left) + len(right))
        elif operator == "%" and isinstance(left, str):
            _check_format(left, right)
        return super().call_binop(context, operator, left, right)


def _check_product(left: object, right: object) -> None:
    for sized, factor in ((left, right), (right, left)):
        if isinstance(sized, _SIZED) and isinstance(factor, int):
            _check_length(len(sized) * factor)
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > MAX_BITS:
        raise UnsupportedError(f"the chat template computes an integer of more than {MAX_BITS} bits")


def _check_format(pattern: str, values: object) -> None:
    """Bounds what ``pattern % values`` makes by its fields, each as long as the longest value or the largest width."""
    if _VARIABLE_WIDTH.search(pattern):
        raise UnsupportedError("the chat template formats to a width that it computes, which is not supported")
    parts = values.values() if isinstance(values, Mapping) else values if isinstance(values, tuple) else (values,)
    lengths = [len(part) for part in parts if isinstance(part, _SIZED)]
    widths = [int(width) for width in _WIDTHS.findall(pattern)]
    _check_length(len(pattern) + pattern.count("%") * max([0, *lengths, *widths]))


def _join(parts: Iterable[object], separator: str = "", attribute: str | None = None) -> str:
    if attribute is not None:
        raise UnsupportedError("the chat template joins an attribute, which is not supported; use map first")
    texts, characters = [], 0
    for part in parts:
        texts.append(str(part))
        characters += len(texts[-1]) + len(separator)
        _check_length(characters - len(separator))
    return str(separator).join(texts)


def _replace(text: object, old: str, new: str, count: int | None = None) -> str:
    whole = str(text)
    found = whole.count(old) if count is None or count < 0 else min(count, whole.count(old))
    _check_length(len(whole) + found * max(0, len(new) - len(old)))
    return whole.replace(old, new, found)


def _format(pattern: str, *args: Any, **kwargs: Any) -> str:
    _check_format(str(pattern), kwargs or args)
    return str(pattern) % (kwargs or args)


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
