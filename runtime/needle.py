"""Needle in a haystack: how well a model finds one fact again, by the length of a text and by where in it the fact is.

The test is Kamradt's (2023, "Needle in a haystack, pressure testing LLMs"), its needle and distractors the keys and
numbers of RULER's multi-key retrieval (Hsieh et al. 2024, arXiv 2404.06654, section 3). The text is made of the model's
own vocabulary, token by token, so that every prompt has exactly the length asked for:

    quiet harbor seldom bricks. Remember this: the password of copper is 40962. willow ... stand rapid.
    What is the password? Remember this: the password of copper is

Sentences are words drawn at random. A model cannot know the answer but from the needle, and needs no instruction
tuning to give it: the question begins as the needle does. Distractors are needles of other words. What the test shows
is whether attention to what is far away survives a KV cache's dtype or policy. It says little of how well a model
understands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from edgekit.errors import DoesNotFitError, UnsupportedError, UsageError
from edgekit.progress import Progress
from edgekit.runtime.llm import LLM
from edgekit.runtime.policies import PolicyOptions
from edgekit.runtime.session import Session
from edgekit.runtime.tasks import Task, answers
from edgekit.runtime.tokenizer import Tokenizer

TokenIds: TypeAlias = list[int]

MIN_WORDS = 64
"""Fewer words than this would repeat themselves in every sentence."""
SPACES = ("Ġ", "▁")
"""How byte-level and SentencePiece vocabularies spell the space before a word."""
MIN_LETTERS = 4
SENTENCE_WORDS = (6, 14)
DIGITS = 5
_RECORD = (" Remember this: the password of", " is", ".")
_QUESTION = ("\nWhat is the password? Remember this: the password of", " is")
# What a piece of text is encoded after, since tokenizers treat the start of a text differently.
_ANCHORS = ("a", "b", "x", "the")


@dataclass(frozen=True, kw_only=True)
class NeedleOptions:
    """What is asked.

    Attributes:
        lengths: Tokens of the prompts, question included.
        depths: Where the needle is: 0 for the beginning of a prompt, 1 for right before the question.
        samples: Prompts of each length and depth.
        seed: Makes the prompts reproducible.
        distractors: Needles of other words in every prompt.
    """

    lengths: tuple[int, ...] = (512, 1024, 2048)
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    samples: int = 5
    seed: int = 0
    distractors: int = 3

    def __post_init__(self) -> None:
        """Checks the ranges.

        Raises:
            UsageError: A list is empty or names something twice, or a number is out of range.
        """
        for name, values in (("lengths", self.lengths), ("depths", self.depths)):
            if len(values) == 0 or len(set(values)) != len(values):
                raise UsageError(f"{name} are {list(values)}; give at least one, and none of them twice")
        for length in self.lengths:
            _check_integer("length", length, 1)
        for depth in self.depths:
            if type(depth) not in (int, float) or not 0 <= depth <= 1:
                raise UsageError(f"depth is {depth!r}; it must be from 0, the beginning, to 1, the end")
        _check_integer("samples", self.samples, 1)
        _check_integer("seed", self.seed, 0)
        _check_integer("distractors", self.distractors, 0)


@dataclass(frozen=True, kw_only=True)
class NeedleTask:
    """One prompt.

    Attributes:
        length_tokens: Its tokens.
        depth: Where the needle is.
        task: The prompt and the number that the needle says, as token ids.
    """

    length_tokens: int
    depth: float
    task: Task


@dataclass(frozen=True, kw_only=True)
class NeedleCell:
    """What came of the prompts of one length and depth.

    Attributes:
        length_tokens: Tokens of the prompts.
        depth: Where the needle was.
        samples: Prompts.
        correct: Those that were answered.
    """

    length_tokens: int
    depth: float
    samples: int
    correct: int

    @property
    def accuracy(self) -> float:
        """The share that was answered."""
        return self.correct / self.samples


@dataclass(frozen=True, kw_only=True)
class NeedleReport:
    """What came of all prompts.

    Attributes:
        cells: One for each length and depth, lengths first, in the order asked for.
        samples: Prompts of all cells.
        correct: Those that were answered.
        accuracy: Their share.
    """

    cells: tuple[NeedleCell, ...]
    samples: int
    correct: int
    accuracy: float

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths, in tokens, in the order asked for."""
        return tuple(dict.fromkeys(cell.length_tokens for cell in self.cells))

    @property
    def depths(self) -> tuple[float, ...]:
        """The depths, in the order asked for."""
        return tuple(dict.fromkeys(cell.depth for cell in self.cells))

    def row(self, length_tokens: int) -> tuple[NeedleCell, ...]:
        """Returns the cells of one length, in the order of `depths`."""
        return tuple(cell for cell in self.cells if cell.length_tokens == length_tokens)


def needle_tasks(tokenizer: Tokenizer, vocab_size: int, options: NeedleOptions) -> list[NeedleTask]:
    """Makes prompts.

    Those of one length and depth depend on nothing else that is asked for but the seed and the number of distractors.

    Args:
        tokenizer: The model's.
        vocab_size: Token ids that the model may be given.
        options: What is asked.

    Returns:
        The prompts, lengths first, then depths, then samples.

    Raises:
        UsageError: A length is too short to hold the needle, the distractors and the question.
        UnsupportedError: The vocabulary has too few words.
    """
    haystack = _Haystack(tokenizer, vocab_size, options.distractors)
    return [
        NeedleTask(
            length_tokens=length,
            depth=depth,
            task=haystack.task(
                length, depth, np.random.default_rng([options.seed, length, round(depth * 1e6), options.distractors, i])
            ),
        )
        for length in options.lengths
        for depth in options.depths
        for i in range(options.samples)
    ]


def run_needle(
    llm: LLM, tasks: Sequence[NeedleTask], *, policy: PolicyOptions | None = None, progress: Progress | None = None
) -> NeedleReport:
    """Gives prompts to a model, each in a conversation of its own.

    Args:
        llm: The model.
        tasks: Prompts, as of `needle_tasks`.
        policy: What happens when the KV cache is full; None for what the model was loaded with.
        progress: Told of every prompt.

    Raises:
        UsageError, UnsupportedError: The policy is refused.
        DoesNotFitError: The context or the KV cache has no room for a prompt and its answer; nothing was asked then.
    """
    session = llm.new_session(policy)
    for task in tasks:
        _check_room(session, task)
    answered: dict[tuple[int, float], list[bool]] = {}
    for index, task in enumerate(tasks):
        if progress is not None:
            progress(f"needle at {task.depth:.0%} of {task.length_tokens} tokens", index, len(tasks))
        cell = answered.setdefault((task.length_tokens, task.depth), [])
        cell.append(answers(llm, task.task, session))
    correct = sum(map(sum, answered.values()))
    return NeedleReport(
        cells=tuple(
            NeedleCell(length_tokens=length, depth=depth, samples=len(results), correct=sum(results))
            for (length, depth), results in answered.items()
        ),
        samples=len(tasks),
        correct=correct,
        accuracy=correct / len(tasks),
    )


def find_words(tokenizer: Tokenizer, vocab_size: int) -> TokenIds:
    """Returns the tokens that are whole words: a space and small letters, which are encoded as themselves.

    Raises:
        UnsupportedError: There are fewer than `MIN_WORDS`.
    """
    words = []
    for token_id in range(vocab_size):
        spelled = tokenizer.id_to_token(token_id)
        if spelled is None or not spelled.startswith(SPACES) or token_id in tokenizer.added_ids:
            continue
        # A byte-level vocabulary spells letters beyond ASCII as something else, which may look like letters.
        letters = spelled[1:]
        if len(letters) < MIN_LETTERS or not (letters.isascii() and letters.isalpha() and letters.islower()):
            continue
        if tokenizer.encode(f"a {letters}", add_special_tokens=False)[-1:] == [token_id]:
            words.append(token_id)
    if len(words) < MIN_WORDS:
        raise UnsupportedError(
            f"the vocabulary has {len(words)} words that are one token, of at least {MIN_LETTERS} letters from a to z; "
            f"the needle test needs {MIN_WORDS} to make texts of"
        )
    return words


class _Haystack:
    """Makes texts of a vocabulary."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, distractors: int) -> None:
        self._tokenizer = tokenizer
        self._distractors = distractors
        self._start = tokenizer.encode_prompt("")
        self._record = [self._encoded(text) for text in _RECORD]
        self._question = [self._encoded(text) for text in _QUESTION]
        # The words of needle and question say something, and would say it elsewhere as well.
        meant = {token_id for piece in (*self._record, *self._question) for token_id in piece}
        self._words = [word for word in find_words(tokenizer, vocab_size) if word not in meant]
        self._full_stop = self._record[-1]
        if distractors + 1 > len(self._words) // 2:
            raise UsageError(
                f"distractors is {distractors}; the vocabulary has {len(self._words)} words, of which half may be keys"
            )

    def task(self, length: int, depth: float, generator: np.random.Generator) -> Task:
        """Makes one prompt of exactly `length` tokens, its needle as near to `depth` as whole tokens can be."""
        order = generator.permutation(self._words).tolist()
        keys, others = order[: self._distractors + 1], order[self._distractors + 1 :]
        numbers = generator.choice(np.arange(10 ** (DIGITS - 1), 10**DIGITS), len(keys), replace=False)
        values = [self._encoded(f" {number}") for number in numbers]
        needle, *distractors = [self._needle(key, value) for key, value in zip(keys, values, strict=True)]
        question = [*self._question[0], keys[0], *self._question[1]]
        room = length - len(self._start) - len(needle) - len(question)
        longest = max(map(len, distractors), default=0)
        # Room for one more: before and after the needle there may be some left that none fits into.
        least = longest * (len(distractors) + 1)
        if room < least:
            raise UsageError(
                f"length is {length}; it must be at least {length - room + least}, for the needle, {len(distractors)} "
                "distractors and the question"
            )
        before = round(depth * room)
        ahead = _split(len(distractors), longest, before, room - before)
        prompt = [
            *self._start,
            *self._text(before, distractors[:ahead], others, generator),
            *needle,
            *self._text(room - before, distractors[ahead:], others, generator),
            *question,
        ]
        assert len(prompt) == length
        return Task(prompt=tuple(prompt), answer=tuple(values[0]))

    def _needle(self, key: int, value: TokenIds) -> TokenIds:
        return [*self._record[0], key, *self._record[1], *value, *self._record[2]]

    def _text(
        self, tokens: int, records: Sequence[TokenIds], words: TokenIds, generator: np.random.Generator
    ) -> TokenIds:
        """Returns sentences of random words, in random order with records, exactly as many tokens; the last is cut."""
        pieces = list(records)
        missing = tokens - sum(map(len, pieces))
        while missing > 0:
            count = int(generator.integers(SENTENCE_WORDS[0], SENTENCE_WORDS[1] + 1))
            sentence = [*generator.choice(words, count).tolist(), *self._full_stop][:missing]
            missing -= len(sentence)
            pieces.append(sentence)
        last = pieces.pop() if len(pieces) > len(records) else []
        order = generator.permutation(len(pieces))
        return [token_id for index in order for token_id in pieces[index]] + last

    def _encoded(self, text: str) -> TokenIds:
        """Returns the tokens of a text that goes on from another."""
        for anchor in _ANCHORS:
            before = self._tokenizer.encode(anchor, add_special_tokens=False)
            whole = self._tokenizer.encode(anchor + text, add_special_tokens=False)
            rest = whole[len(before) :]
            if whole[: len(before)] == before and self._tokenizer.decode(whole) == anchor + text:
                return rest
        raise UnsupportedError(f"the tokenizer does not encode {text!r} by itself, which the needle test is made of")


def _split(records: int, longest: int, before: int, after: int) -> int:
    """Returns how many records go before the needle: a share like that of the text, as far as they fit."""
    if records == 0:
        return 0
    share = round(records * before / (before + after))
    return max(min(share, before // longest), records - after // longest)


def _check_room(session: Session, task: NeedleTask) -> None:
    session.check_prompt(task.task.prompt)
    if session.policy.makes_room:
        return
    # The answer's last token is not read.
    total = len(task.task.prompt) + len(task.task.answer) - 1
    limit = min(session.limits.max_positions, session.limits.max_tokens)
    if total > limit:
        raise DoesNotFitError(
            f"a prompt of {task.length_tokens} tokens and its answer of {len(task.task.answer)} are more than the "
            f"{limit} that there is room for; use shorter lengths, or a larger context size or memory budget"
        )


def _check_integer(name: str, value: object, least: int) -> None:
    if type(value) is not int or value < least:
        raise UsageError(f"{name} is {value!r}; it must be an integer of at least {least}")
