"""Chat templates: messages to the text that a model was trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import shorten
from typing import TypeAlias

from edgekit.errors import UnsupportedError, UsageError, one_of
from edgekit.runtime.tokenizer import Tokenizer

Message: TypeAlias = Mapping[str, str]
"""``{"role": ..., "content": ...}``."""

ROLES = ("system", "user", "assistant", "tool")
_FIELDS = ("role", "content")
# What every rendering gets, so that no caller can pass another value for it.
_RESERVED = ("messages", "add_generation_prompt", "tools", "documents")


class ChatTemplate:
    """A Jinja template as Hugging Face tokenizers carry it.

    Templates come with a model and are not trusted: they run in Jinja's sandbox, within bounds on their work
    and output.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compiles a template.

        Args:
            source: Jinja source.
            special_tokens: Texts of the special tokens by the names that templates use: ``bos_token``,
                ``eos_token``, ...

        Raises:
            UnsupportedError: The source is not valid Jinja, or needs an extension that no Hugging Face tokenizer has.
        """
        from edgekit.runtime.jinja_sandbox import CompiledTemplate

        try:
            self._compiled = CompiledTemplate(source)
        except Exception as error:
            raise UnsupportedError(f"the chat template cannot be compiled: {_reason(error)}") from error
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        options: Mapping[str, bool | int | float | str] | None = None,
    ) -> str:
        """Renders a conversation.

        Args:
            messages: The conversation so far, oldest first.
            add_generation_prompt: Whether to end with what introduces the assistant's turn.
            options: Variables of this template, such as ``enable_thinking`` of Qwen3.

        Returns:
            Text to encode with `Tokenizer.encode_prompt`.

        Raises:
            UsageError: A message is malformed, the template does not take these messages or has no such option.
            UnsupportedError: The template does something that it may not, or fails.
        """
        from edgekit.runtime.jinja_sandbox import RefusedByTemplateError

        variables = {
            **self._checked_options(options or {}),
            **self._special_tokens,
            "messages": _checked_messages(messages),
            "add_generation_prompt": add_generation_prompt,
            "tools": None,
            "documents": None,
        }
        try:
            return self._compiled.render(variables)
        except RefusedByTemplateError as error:
            raise UsageError(f"the chat template does not take these messages: {_one_line(error)}") from error
        except UnsupportedError:
            raise
        except Exception as error:
            raise UnsupportedError(f"the chat template fails: {_reason(error)}") from error

    def _checked_options(self, options: Mapping[str, object]) -> dict[str, object]:
        known = self._compiled.variables.difference(self._special_tokens, _RESERVED)
        for name, value in options.items():
            if name not in known:
                raise UsageError(f"the chat template has no option {one_of(name, known) if known else repr(name)}")
            if not isinstance(value, (bool, int, float, str)):
                raise UsageError(f"chat template option {name} is {value!r}; it must be a truth value, number or text")
        return dict(options)


def _reason(error: Exception) -> str:
    """Says what a template provoked, which may be any exception there is."""
    line = getattr(error, "lineno", None)  # of a jinja2.TemplateSyntaxError
    where = "" if line is None else f" in line {line}"
    return f"{type(error).__name__}{where}: {_one_line(getattr(error, 'message', None) or error)}"


def _one_line(message: object) -> str:
    return shorten(str(message), 300, placeholder=" ...")


def _checked_messages(messages: Sequence[object]) -> list[dict[str, str]]:
    """Returns copies of the messages made of nothing but plain strings, which is all that a template gets."""
    if not messages:
        raise UsageError("the conversation has no message; it must have at least one")
    return [_checked_message(number, message) for number, message in enumerate(messages)]


def _checked_message(number: int, message: object) -> dict[str, str]:
    if not isinstance(message, Mapping):
        raise UsageError(f"message {number} is {message!r}; it must be a mapping with a role and a content")
    for name in message:
        if name not in _FIELDS:
            raise UsageError(f"message {number} has an unknown field {one_of(str(name), _FIELDS)}")
    plain = {}
    for name in _FIELDS:
        value = message.get(name)
        if not isinstance(value, str):
            raise UsageError(f"message {number} has the {name} {value!r}; it must be a text")
        plain[name] = str.__str__(value)  # an enum of texts has a str of its own
    if plain["role"] not in ROLES:
        raise UsageError(f"message {number} has the role {one_of(plain['role'], ROLES)}")
    return plain


def end_of_turn_ids(tokenizer: Tokenizer, template: ChatTemplate) -> frozenset[int]:
    """Finds the tokens that end an assistant's turn, for the union with a model's end-of-text ids.

    Renders a finished conversation and reads what follows the answer: ``<|im_end|>``, ``<|eot_id|>``, ...
    Many a model's config names only its end of text, and its chats would never stop.

    Args:
        tokenizer: Of the model.
        template: Of the same model.

    Returns:
        One id, or none if no added token follows the answer.

    Raises:
        UsageError: The template does not take a question and an answer.
        UnsupportedError: The template does something that it may not, or fails.
    """
    answer = "EndOfThisTurn"
    conversation = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": answer}]
    _, found, rest = template.render(conversation, add_generation_prompt=False).rpartition(answer)
    if not found:
        return frozenset()
    for token_id in tokenizer.encode(rest, add_special_tokens=False):
        # Pythia's added tokens include runs of spaces.
        if tokenizer.decode([token_id], skip_special_tokens=False).strip():
            return frozenset({token_id} & tokenizer.added_ids)
    return frozenset()
