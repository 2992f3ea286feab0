"""Whether a conversation that goes on and on keeps its memory and its speed: the KV policy "window", turn after turn.

    python benchmarks/long_conversation.py BUNDLE --text FILE [--turns 300] [--turn-tokens 60] [--answer-tokens 40]
        [--memory-budget 256MiB] [--threads 2]

Every turn adds the next tokens of the text to one conversation, which has --answer-tokens more generated. Each is given
to the session as a whole: what it still holds of it is not to be read again. Resident memory is that after a turn
(VmRSS), peak is the largest of all (VmHWM). If the first token is evicted early enough, the last third of the turns
takes what the middle third takes. Prints Markdown.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path

import click

from edgekit.runtime.available_memory import resident_bytes
from edgekit.runtime.llm import LLM
from edgekit.runtime.loading import KVCacheOptions
from edgekit.runtime.peak_memory import peak_memory_bytes
from edgekit.runtime.sampling import SamplingParams
from edgekit.runtime.session import Session


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """What was found after a turn.

    Attributes:
        length_tokens: The whole conversation, evicted tokens included.
        read_tokens: Tokens of this turn's prompt that were computed: all but those that the session held.
        evicted_tokens: Of the conversation so far.
        resident_bytes: Resident set of the process.
        decode_tokens_per_s: Rate of the answer's tokens after the first.
    """

    length_tokens: int
    read_tokens: int
    evicted_tokens: int
    resident_bytes: int
    decode_tokens_per_s: float


def first_tokens(llm: LLM, text: Path, count: int) -> list[int]:
    """Returns the first tokens of a text.

    Raises:
        click.ClickException: It has fewer.
    """
    # Not the whole text, whose tokens would be what takes most memory.
    beginning = text.read_text(encoding="utf-8")[: 8 * count]
    ids = llm.tokenizer.encode(beginning, add_special_tokens=False)
    if len(ids) < count:
        raise click.ClickException(
            f"the first {len(beginning)} characters of {text} are {len(ids)} tokens, {count} are needed; give a longer "
            "text or fewer turns"
        )
    return ids[:count]


def converse(llm: LLM, session: Session, said: Sequence[Sequence[int]], answer_tokens: int) -> Iterator[Turn]:
    """Goes on with a conversation, and yields what each turn took.

    Args:
        llm: The model.
        session: Has the conversation.
        said: Token ids that each turn begins with.
        answer_tokens: Tokens that each turn generates.
    """
    conversation: list[int] = []
    params = SamplingParams(max_tokens=answer_tokens, ignore_eos=True)
    for ids in said:
        conversation += ids
        output = llm.generate(conversation, params, session=session)
        conversation += output.token_ids
        yield Turn(
            length_tokens=len(conversation),
            read_tokens=output.usage.prompt_tokens - output.usage.cached_tokens,
            evicted_tokens=session.evicted_tokens,
            resident_bytes=resident_bytes(),
            decode_tokens_per_s=output.timings.decode_tokens_per_s,
        )


def report(turns: Sequence[Turn], peak_bytes: int) -> str:
    """Returns the table of the thirds, and what is to be said of the whole."""
    bounds = [index * len(turns) // 3 for index in range(4)]
    thirds = [turns[start:end] for start, end in itertools.pairwise(bounds)]
    resident = [max(turn.resident_bytes for turn in third) / 1e6 for third in thirds]
    rates = [statistics.median(turn.decode_tokens_per_s for turn in third) for third in thirds]
    rows = zip(itertools.pairwise(bounds), resident, rates, strict=True)
    evicting = [number for number, turn in enumerate(turns, start=1) if turn.evicted_tokens]
    since = f", the first in turn {evicting[0]}" if evicting else ""
    lines = ["| turns | resident, MB, most | decode, tokens/s, median |", "| --- | --- | --- |"]
    lines += [f"| {start + 1}-{end} | {held:.1f} | {rate:.1f} |" for (start, end), held, rate in rows]
    lines.append(
        f"\nLast third / middle third: resident {resident[2] / resident[1]:.3f}, decode {rates[2] / rates[1]:.3f}. "
        f"Peak {peak_bytes / 1e6:.1f} MB."
    )
    lines.append(
        f"{turns[-1].length_tokens} tokens, of which {turns[-1].evicted_tokens} were evicted{since}. For a turn, "
        f"{max(turn.read_tokens for turn in turns)} tokens were read at most."
    )
    return "\n".join(lines)


@click.command(help=__doc__)
@click.argument("bundle", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--text", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=True)
@click.option("--turns", type=click.IntRange(min=3), default=300, show_default=True)
@click.option("--turn-tokens", type=click.IntRange(min=3), default=60, show_default=True)
@click.option("--answer-tokens", type=click.IntRange(min=2), default=40, show_default=True, help="Of --turn-tokens.")
@click.option("--memory-budget", default="256MiB", show_default=True)
@click.option("--threads", type=click.IntRange(min=1), default=2, show_default=True)
def main(
    *, bundle: Path, text: Path, turns: int, turn_tokens: int, answer_tokens: int, memory_budget: str, threads: int
) -> None:
    """Measures and prints."""
    said_tokens = turn_tokens - answer_tokens
    if said_tokens < 1:
        raise click.UsageError(f"an answer of {answer_tokens} tokens leaves nothing of a turn of {turn_tokens}")
    llm = LLM(bundle, threads=threads, memory_budget=memory_budget, kv_cache=KVCacheOptions(policy="window"))
    ids = first_tokens(llm, text, turns * said_tokens)
    said = [ids[start : start + said_tokens] for start in range(0, len(ids), said_tokens)]
    memory = llm.plan.memory
    click.echo(
        f"{bundle.name}, {date.today()}, {threads} threads, budget {memory.budget_bytes / 1e6:.1f} MB, planned "
        f"{memory.total_bytes / 1e6:.1f} MB: {memory.layout.dtype} KV cache of {memory.capacity_tokens} slots, prompts "
        f"in steps of {memory.chunk_tokens}; {turns} turns of {said_tokens} + {answer_tokens} tokens\n"
    )
    done: list[Turn] = []
    for turn in converse(llm, llm.new_session(), said, answer_tokens):
        done.append(turn)
        if len(done) % 10 == 0:
            held = f"{turn.resident_bytes / 1e6:.1f} MB, {turn.decode_tokens_per_s:.1f} tokens/s"
            click.echo(f"turn {len(done)}/{turns}: {held}, {turn.evicted_tokens} evicted", err=True)
    click.echo(report(done, peak_memory_bytes()))


if __name__ == "__main__":
    main()
