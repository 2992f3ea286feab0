"""`edgekit chat`: a conversation, or one question of it."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgekit.cli.interrupt import interrupt_cancels
from edgekit.cli.loading import load_llm
from edgekit.cli.options import (
    bundle_argument,
    collected,
    json_option,
    memory_options,
    sampling_options,
    threads_option,
    verbose_option,
)
from edgekit.cli.output import completion_json, print_json, print_statistics, stream_text
from edgekit.cli.text_input import decode
from edgekit.errors import EdgeKitError, UsageError, one_of

if TYPE_CHECKING:
    from edgekit.runtime import LLM, CompletionChunk, SamplingParams, Session

logger = logging.getLogger(__name__)

_PROMPT = "> "
_COMMANDS = {
    "/reset": "start a new conversation",
    "/exit": "leave",
    "/help": "show this list",
}


_beginning_options = collected(
    "beginning",
    {
        "system": click.option("--system", metavar="TEXT", help="Instructions that precede the conversation."),
        "session": click.option(
            "--session",
            type=click.Path(dir_okay=False, path_type=Path),
            metavar="FILE",
            help="Go on with the conversation in FILE, if there is one, and save it there after every answer.",
        ),
    },
)


@click.command
@bundle_argument
@_beginning_options
@click.option("--prompt", metavar="TEXT", help="Answer this question and exit.")
@sampling_options
@memory_options
@threads_option
@json_option
@verbose_option
def chat(
    *,
    bundle: Path,
    beginning: Mapping[str, Any],
    prompt: str | None,
    sampling: Mapping[str, Any],
    memory: Mapping[str, Any],
    threads: int | None,
    json: bool,
) -> None:
    """Chats with the model in BUNDLE.

    Reads a question per line. Ctrl-C ends an answer; at the prompt, Ctrl-C and Ctrl-D leave.
    """
    if json and prompt is None:
        raise UsageError("--json prints one answer; add --prompt")
    if prompt == "":
        raise UsageError("the prompt is empty; give some text")
    if sampling["logprobs"] is not None and not json:
        raise UsageError("logprobs are reported in JSON only; add --json and --prompt")

    from edgekit.runtime import SamplingParams

    params = SamplingParams(**sampling)
    conversation = _Conversation(load_llm(bundle, threads=threads, memory=memory), params, beginning["system"])
    if beginning["session"] is not None:
        conversation.keep_in(beginning["session"])
    if prompt is None:
        _converse(conversation)
        return
    answer = conversation.answer(prompt)
    if not json:
        print_statistics(stream_text(answer))
        return
    *_, last = answer
    assert last.output is not None
    print_json(completion_json(last.output))


class _Conversation:
    """Messages, and the session whose cache holds them."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        """Starts a conversation.

        Raises:
            UnsupportedError: The model cannot chat.
            UsageError: Its chat template takes no system message.
        """
        self._llm, self._params = llm, params
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self.session: Session = llm.new_session()
        self.messages = list(self._system)
        self._file: Path | None = None
        llm.render_chat([*self._system, {"role": "user", "content": "Hello"}])  # refuses before the first question
        if not llm.end_token_ids and not params.stop:
            logger.warning("the model names no token that ends an answer, which goes on to --max-tokens; see --stop")

    def keep_in(self, file: Path) -> None:
        """Goes on with the conversation in a file, if there is one, and saves it there from now on.

        Raises:
            UsageError: It is another bundle's, it is no chat, or it has instructions of its own.
            UnsupportedError, DoesNotFitError, CorruptArtifactError: As of `Session.load`.
        """
        self._file = file
        if not file.exists():
            return
        messages = [dict(message) for message in self.session.load(file)]
        if self.session.token_ids and not messages:
            raise UsageError(f"{str(file)!r} has a conversation without messages, which no chat can go on with")
        system = [message for message in messages[:1] if message["role"] == "system"]
        if self._system and messages and system != self._system:
            raise UsageError(f"the conversation in {str(file)!r} has other instructions; leave out --system")
        if messages:
            self._system, self.messages = system, messages

    def _save(self) -> None:
        if self._file is not None:
            self.session.save(self._file, self.messages)

    def answer(self, question: str) -> Iterator[CompletionChunk]:
        """Yields the answer; a question that could not be answered is forgotten."""
        messages = [*self.messages, {"role": "user", "content": question}]
        for chunk in self._llm.stream_chat(messages, self._params, session=self.session):
            if chunk.output is not None and (chunk.output.text or chunk.output.finish_reason != "cancelled"):
                self.messages = [*messages, {"role": "assistant", "content": chunk.output.text}]
                self._save()
            yield chunk

    def reset(self) -> None:
        """Starts anew, with the same instructions."""
        self.session.reset()
        self.messages = list(self._system)
        self._save()


def _converse(conversation: _Conversation) -> None:
    if sys.stdin.isatty():
        click.echo("Ask something; /help lists the commands.", err=True)
    with suppress(KeyboardInterrupt):
        while True:
            try:
                line = _read_line()
                if line is None or line == "/exit":
                    break
                if line:
                    _handle(conversation, line)
            except EdgeKitError as error:
                click.echo(f"error: {error}", err=True)
    if sys.stdin.isatty():
        click.echo(err=True)  # the shell's prompt goes on a line of its own


def _handle(conversation: _Conversation, line: str) -> None:
    """Answers a question or carries out a command."""
    if line == "/reset":
        conversation.reset()
    elif line == "/help":
        for command, meaning in _COMMANDS.items():
            click.echo(f"{command:<8}{meaning}", err=True)
    elif re.fullmatch(r"/\w+", line):
        raise UsageError(f"no such command: {one_of(line, _COMMANDS)}")
    else:
        with interrupt_cancels(conversation.session):
            output = stream_text(conversation.answer(line))
        print_statistics(output)


def _read_line() -> str | None:
    """Returns the next line, stripped, or None when there is none; on a terminal, asks for it."""
    try:
        if sys.stdin.isatty() and sys.stdout.isatty():
            with suppress(ImportError):
                import readline  # noqa: F401 - gives input() editing and history
            return input(_PROMPT).strip()
        if sys.stdin.isatty():
            click.echo(_PROMPT, err=True, nl=False)
        content = sys.stdin.buffer.readline()
        return decode(content, "stdin").strip() if content else None
    except EOFError:
        return None
