"""What a second question costs, once the first one has brought a document: time to first token of both turns.

    python benchmarks/second_turn.py BUNDLE --text FILE [--document-tokens 2000] [--answer-tokens 32] [--rounds 5]
        [--threads 2]

A round is a chat in a session of its own, by the bundle's chat template: a user message with the beginning of the text
and a question, the model's answer, a second question. The second turn is to read only what the first has not: the end
of the answer and the question. Time is measured by the caller, from asking to the first piece of text. Prints Markdown.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import click

from edgekit.runtime.chat import Message
from edgekit.runtime.llm import LLM
from edgekit.runtime.sampling import SamplingParams
from edgekit.runtime.session import Session

QUESTIONS = ("What is this text about?", "Which name in it is mentioned first?")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """What an answer took.

    Attributes:
        prompt_tokens: The conversation up to it.
        cached_tokens: Those that the session held.
        first_text_s: From asking to the first piece of text, seconds.
        answer: The text.
    """

    prompt_tokens: int
    cached_tokens: int
    first_text_s: float
    answer: str


def document_of(llm: LLM, text: Path, count: int) -> str:
    """Returns the beginning of a text, of about so many tokens.

    Raises:
        click.ClickException: It has fewer.
    """
    beginning = text.read_text(encoding="utf-8")[: 8 * count]
    ids = llm.tokenizer.encode(beginning, add_special_tokens=False)
    if len(ids) < count:
        raise click.ClickException(
            f"the first {len(beginning)} characters of {text} are {len(ids)} tokens, {count} are needed; give a longer "
            "text"
        )
    return llm.tokenizer.decode(ids[:count])


def ask(llm: LLM, session: Session, messages: Sequence[Message], params: SamplingParams) -> Turn:
    """Has a conversation answered, and times it."""
    started = time.perf_counter()
    chunks = llm.stream_chat(messages, params, session=session)
    output = next(chunks).output
    first_text_s = time.perf_counter() - started
    for chunk in chunks:
        output = chunk.output
    assert output is not None
    return Turn(
        prompt_tokens=output.usage.prompt_tokens,
        cached_tokens=output.usage.cached_tokens,
        first_text_s=first_text_s,
        answer=output.text,
    )


def chat(llm: LLM, document: str, params: SamplingParams) -> tuple[Turn, Turn]:
    """Asks both questions in a session of their own."""
    session = llm.new_session()
    messages = [{"role": "user", "content": f"{document}\n\n{QUESTIONS[0]}"}]
    first = ask(llm, session, messages, params)
    messages += [{"role": "assistant", "content": first.answer}, {"role": "user", "content": QUESTIONS[1]}]
    return first, ask(llm, session, messages, params)


def report(rounds: Sequence[tuple[Turn, Turn]]) -> str:
    """Returns a row per turn, and what the second one costs of the first."""
    lines = [
        "| turn | prompt, tokens | in the cache | read | first text, ms, median | fastest | slowest |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    medians = []
    for number, turns in enumerate(zip(*rounds, strict=True), start=1):
        times = [1000 * turn.first_text_s for turn in turns]
        medians.append(statistics.median(times))
        row = [
            str(number),
            _span([turn.prompt_tokens for turn in turns]),
            _span([turn.cached_tokens for turn in turns]),
            _span([turn.prompt_tokens - turn.cached_tokens for turn in turns]),
            *(f"{value:.1f}" for value in (medians[-1], min(times), max(times))),
        ]
        lines.append(f"| {' | '.join(row)} |")
    ratios = [second.first_text_s / first.first_text_s for first, second in rounds]
    kept, of = min((min(first.prompt_tokens, second.cached_tokens), first.prompt_tokens) for first, second in rounds)
    lines.append(
        f"\nTurn 2 / turn 1: {medians[1] / medians[0]:.3f} of the medians, {min(ratios):.3f} to {max(ratios):.3f} by "
        "round."
    )
    lines.append(f"Turn 2 found {kept} of the {of} tokens of turn 1's prompt in the cache.")
    return "\n".join(lines)


def _span(counts: Sequence[int]) -> str:
    """Returns what all rounds have in common, or the least and the most."""
    least, most = min(counts), max(counts)
    return str(least) if least == most else f"{least}-{most}"


@click.command(help=__doc__)
@click.argument("bundle", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--text", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=True)
@click.option("--document-tokens", type=click.IntRange(min=1), default=2000, show_default=True)
@click.option("--answer-tokens", type=click.IntRange(min=1), default=32, show_default=True, help="At most.")
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--threads", type=click.IntRange(min=1), default=2, show_default=True)
def main(*, bundle: Path, text: Path, document_tokens: int, answer_tokens: int, rounds: int, threads: int) -> None:
    """Measures and prints."""
    llm = LLM(bundle, threads=threads)
    document = document_of(llm, text, document_tokens)
    params = SamplingParams(max_tokens=answer_tokens)
    # Not counted: the first run of everything is slow.
    llm.chat([{"role": "user", "content": QUESTIONS[0]}], SamplingParams(max_tokens=2))
    done = []
    for index in range(rounds):
        done.append(chat(llm, document, params))
        first, second = (1000 * turn.first_text_s for turn in done[-1])
        click.echo(f"round {index + 1}/{rounds}: {first:.1f} ms, {second:.1f} ms", err=True)
    click.echo(
        f"{bundle.name}, {date.today()}, {threads} threads, {llm.plan.memory.layout.dtype} KV cache, {document_tokens} "
        f"tokens of {text.name}, answers of at most {answer_tokens}, {rounds} rounds\n"
    )
    click.echo(report(done))


if __name__ == "__main__":
    main()
