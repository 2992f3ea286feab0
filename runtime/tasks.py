"""Tasks: prompts with the answers that a model is to give, by which KV caches and policies are judged.

A task file is JSON Lines, one task a line, in text or in token ids:

{"prompt": "The capital of France is", "answer": "Paris"}
{"prompt": [504, 3575, 282, 4649, 314], "answer": [7042]}
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec

from edgekit.errors import CorruptArtifactError, DoesNotFitError, StorageError, UsageError
from edgekit.progress import Progress
from edgekit.runtime.detokenizer import StreamingDetokenizer
from edgekit.runtime.llm import LLM
from edgekit.runtime.policies import PolicyOptions
from edgekit.runtime.sampling import SamplingParams
from edgekit.runtime.session import Session

# An answer in text has at most one token per byte; a model may put a few line ends and spaces before it.
LEADING_TOKENS = 16

TokensOrText: TypeAlias = str | tuple[int, ...]


class Task(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A prompt and what is to follow it.

    Attributes:
        prompt: Text, encoded as `LLM.stream` does, or token ids as they are.
        answer: Text that the answer has to begin with, white space around it aside, or its token ids.
    """

    prompt: TokensOrText
    answer: TokensOrText


def read_tasks(path: str | os.PathLike[str]) -> list[Task]:
    """Reads a task file.

    Raises:
        UsageError: There is no such file, or there are no tasks in it.
        CorruptArtifactError: A line is malformed, or has an empty prompt or answer.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read the task file {str(path)!r}: {error.strerror or error}") from error
    lines = enumerate(content.split(b"\n"), start=1)
    tasks = [_task(line, f"line {number} of task file {str(path)!r}") for number, line in lines if line.strip()]
    if not tasks:
        raise UsageError(f"task file {str(path)!r} has no tasks; it has one a line")
    return tasks


def _task(line: bytes, where: str) -> Task:
    try:
        task = msgspec.json.decode(line, type=Task)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptArtifactError(
            f'{where} is not a task: {error}; a task is {{"prompt": ..., "answer": ...}}, each text or token ids'
        ) from error
    for name, value in (("prompt", task.prompt), ("answer", task.answer)):
        if not value or (isinstance(value, str) and name == "answer" and not value.strip()):
            raise CorruptArtifactError(f"{where} is not a task: its {name} is empty")
    return task


def write_tasks(path: str | os.PathLike[str], tasks: Sequence[Task]) -> None:
    """Writes a task file, whole or not at all.

    Raises:
        StorageError: The disk refused the write.
    """
    target = Path(path)
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    try:
        partial.write_bytes(b"".join(msgspec.json.encode(task) + b"\n" for task in tasks))
        partial.replace(target)
    except OSError as error:
        raise StorageError(f"cannot write {str(path)!r}: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)


def run_tasks(
    llm: LLM, tasks: Sequence[Task], *, policy: PolicyOptions | None = None, progress: Progress | None = None
) -> list[bool]:
    """Gives tasks to a model, each in a conversation of its own.

    Args:
        llm: The model.
        tasks: What it is asked.
        policy: What happens when the KV cache is full; None for what the model was loaded with.
        progress: Told of every task.

    Returns:
        For each task whether the model answers it.

    Raises:
        UsageError, UnsupportedError: The policy is refused, or a prompt has ids that the model does not have.
        DoesNotFitError: The KV cache has no room for a prompt and its answer.
    """
    session = llm.new_session(policy)
    correct = []
    for index, task in enumerate(tasks):
        if progress is not None:
            progress("task", index, len(tasks))
        correct.append(answers(llm, task, session))
    return correct


def answers(llm: LLM, task: Task, session: Session) -> bool:
    """Whether a model answers a task, drawing its likeliest tokens; asked no further than the first wrong one.

    Args:
        llm: The model.
        task: What it is asked.
        session: A conversation of the model's, which forgets what it was about.

    Raises:
        UsageError: The prompt has ids that the model does not have.
        DoesNotFitError: The KV cache has no room for the prompt and its answer.
    """
    session.reset()
    prompt = llm.tokenizer.encode_prompt(task.prompt) if isinstance(task.prompt, str) else task.prompt
    drawn = (token.token_id for token in session.generate(prompt, SamplingParams(), llm.vocab_size))
    return judge(llm, task, drawn)


def judge(llm: LLM, task: Task, drawn: Iterable[int]) -> bool:
    """Whether tokens answer a task; takes no more of them than it needs to know.

    Args:
        llm: The model that draws them.
        task: What it was asked.
        drawn: Token ids, as they are drawn.

    Raises:
        DoesNotFitError: They end before it is known.
    """
    judged = _Text(llm, task.answer) if isinstance(task.answer, str) else _Tokens(task.answer)
    for token_id in drawn:
        verdict = judged.verdict(token_id)
        if verdict is not None:
            return verdict
    raise DoesNotFitError(
        "the KV cache has no room for a prompt and its answer; use shorter tasks, or a larger context size or memory "
        "budget"
    )


class _Tokens:
    """Judges an answer in token ids."""

    def __init__(self, answer: tuple[int, ...]) -> None:
        self._answer = answer
        self._done = 0

    def verdict(self, token_id: int) -> bool | None:
        """Takes a token; returns whether the answer is right, None while that is open."""
        if token_id != self._answer[self._done]:
            return False
        self._done += 1
        return True if self._done == len(self._answer) else None


class _Text:
    """Judges an answer in text."""

    def __init__(self, llm: LLM, answer: str) -> None:
        self._answer = answer.strip()
        self._detokenizer = StreamingDetokenizer(llm.tokenizer)
        self._end_token_ids = llm.end_token_ids
        self._tokens_left = len(self._answer.encode()) + LEADING_TOKENS
        self._text = ""

    def verdict(self, token_id: int) -> bool | None:
        """Takes a token; returns whether the answer is right, None while that is open."""
        if token_id in self._end_token_ids:
            return False
        self._text = (self._text + self._detokenizer.push(token_id)).lstrip()
        self._tokens_left -= 1
        if self._text.startswith(self._answer):
            return True
        is_open = self._answer.startswith(self._text) and self._tokens_left > 0
        return None if is_open else False
