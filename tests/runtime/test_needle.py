from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, cast

import pytest
from tokenizers import Tokenizer as Backend

from edgekit.errors import DoesNotFitError, UnsupportedError, UsageError
from edgekit.runtime import LLM, SampledToken, SamplingParams
from edgekit.runtime.needle import NeedleOptions, NeedleTask, find_words, needle_tasks, run_needle
from edgekit.runtime.policies import PolicyOptions
from edgekit.runtime.session import SessionLimits
from edgekit.runtime.tasks import Task
from edgekit.runtime.tokenizer import Tokenizer
from tests.wordy_tokenizers import WORDS, byte_level_words, sentencepiece_words

Load: TypeAlias = Callable[[Backend], Tokenizer]

GGUF = Path(__file__).resolve().parent.parent.parent / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
DEPTHS = (0.0, 0.3, 0.5, 1.0)
RECORD, QUESTION = " Remember this: the password of", "\nWhat is the password? Remember this: the password of"


@pytest.fixture(scope="module", params=[byte_level_words, sentencepiece_words], ids=["byte level", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("words") / "tokenizer.json"
    request.param().save(str(path))
    return Tokenizer(path)


def _tasks(tokenizer: Tokenizer, **options: Any) -> list[NeedleTask]:
    chosen: dict[str, Any] = {"lengths": (300, 411), "depths": DEPTHS, "samples": 2, "distractors": 2, **options}
    return needle_tasks(tokenizer, tokenizer.vocab_size, NeedleOptions(**chosen))


def _text(tokenizer: Tokenizer, task: NeedleTask) -> str:
    assert not isinstance(task.task.prompt, str)
    text = tokenizer.decode(task.task.prompt)
    return text if text.startswith(" ") else f" {text}"  # sentencepiece takes the first space away


def _key(tokenizer: Tokenizer, task: NeedleTask) -> str:
    return _text(tokenizer, task).removesuffix(" is").split(" ")[-1]


def _answer(tokenizer: Tokenizer, task: NeedleTask) -> str:
    assert not isinstance(task.task.answer, str)
    return tokenizer.decode(task.task.answer).strip()


# Words


def test_words_are_the_tokens_that_stand_for_one(tokenizer: Tokenizer) -> None:
    found = find_words(tokenizer, tokenizer.vocab_size)
    assert sorted(tokenizer.decode([word]).strip() for word in found) == sorted(WORDS)
    for word in found:
        text = tokenizer.decode([word]).strip()
        assert tokenizer.encode(f"a {text}", add_special_tokens=False)[-1] == word


def test_words_that_a_model_does_not_have_are_left_out(tokenizer: Tokenizer) -> None:
    found = find_words(tokenizer, tokenizer.vocab_size)
    assert find_words(tokenizer, found[-1]) == found[:-1]


def test_a_vocabulary_without_words_is_refused(byte_level: Backend, load: Load) -> None:
    few = load(byte_level)
    with pytest.raises(UnsupportedError, match=r"the vocabulary has \d words that are one token.*needs 64"):
        needle_tasks(few, few.vocab_size, NeedleOptions())


def test_a_tokenizer_that_drops_line_ends_is_refused(load: Load) -> None:
    from tokenizers import normalizers

    backend = byte_level_words()
    backend.normalizer = normalizers.Replace("\n", "")
    with pytest.raises(UnsupportedError, match=r"does not encode '\\nWhat is"):
        needle_tasks(load(backend), 400, NeedleOptions())


# Prompts


def test_every_prompt_has_exactly_the_tokens_asked_for(tokenizer: Tokenizer) -> None:
    tasks = _tasks(tokenizer, lengths=(257, 300, 411), samples=3)
    assert [(task.length_tokens, task.depth) for task in tasks] == [
        (length, depth) for length in (257, 300, 411) for depth in DEPTHS for _ in range(3)
    ]
    assert [len(task.task.prompt) for task in tasks] == [task.length_tokens for task in tasks]


def test_prompts_begin_as_the_model_expects(tokenizer: Tokenizer) -> None:
    start = tokenizer.encode_prompt("")
    for task in _tasks(tokenizer):
        assert list(task.task.prompt[: len(start)]) == start
        assert not set(task.task.prompt[len(start) :]) & tokenizer.special_ids


def test_the_needle_is_there_once_and_says_the_answer(tokenizer: Tokenizer) -> None:
    for task in _tasks(tokenizer):
        text, key, answer = _text(tokenizer, task), _key(tokenizer, task), _answer(tokenizer, task)
        assert key in WORDS
        assert answer.isdecimal()
        assert len(answer) == 5
        assert text.endswith(f"{QUESTION} {key} is")
        assert text.count(f"{RECORD} {key} is {answer}.") == 1
        assert text.count(answer) == 1
        words = text.replace(".", " ").split()
        assert words.count(key) == 2


def test_answers_are_spelled_as_in_the_prompt(tokenizer: Tokenizer) -> None:
    for task in _tasks(tokenizer):
        prompt, answer = list(task.task.prompt), list(task.task.answer)
        places = [i for i in range(len(prompt)) if prompt[i : i + len(answer)] == answer]
        assert len(places) == 1


def test_the_needle_is_at_its_depth(tokenizer: Tokenizer) -> None:
    for task in _tasks(tokenizer, distractors=0):
        needle = f"{RECORD} {_key(tokenizer, task)} is {_answer(tokenizer, task)}."
        question = f"{QUESTION} {_key(tokenizer, task)} is"
        before, _, after = _text(tokenizer, task).partition(needle)
        if task.depth == 0:
            assert before == ""
        if task.depth == 1:
            assert after == question
        words = [len(part.replace(".", " .").split()) for part in (before, after.removesuffix(question))]
        assert words[0] == round(task.depth * sum(words))


@pytest.mark.parametrize("distractors", [0, 1, 3])
def test_distractors_are_needles_of_other_words_and_numbers(tokenizer: Tokenizer, distractors: int) -> None:
    for task in _tasks(tokenizer, distractors=distractors):
        pieces = _text(tokenizer, task).removesuffix(f"{QUESTION} {_key(tokenizer, task)} is").split(RECORD)[1:]
        said = [piece.split(".")[0].split(" is ") for piece in pieces]
        words, numbers = {word.strip() for word, _ in said}, {number for _, number in said}
        assert len(said) == len(words) == len(numbers) == distractors + 1
        assert words <= set(WORDS)


def test_distractors_are_on_both_sides(tokenizer: Tokenizer) -> None:
    def ahead(depth: float) -> int:
        (task,) = _tasks(tokenizer, lengths=(411,), depths=(depth,), samples=1, distractors=4)
        key = _key(tokenizer, task)
        return _text(tokenizer, task).split(f"{RECORD} {key} is")[0].count(RECORD)

    assert [ahead(depth) for depth in (0.0, 0.25, 0.5, 0.75, 1.0)] == [0, 1, 2, 3, 4]


def test_the_shortest_prompt_that_is_named_can_be_made(tokenizer: Tokenizer) -> None:
    with pytest.raises(UsageError, match="length is 20; it must be at least") as caught:
        _tasks(tokenizer, lengths=(20,))
    least = int(str(caught.value).split("at least ")[1].split(",")[0])
    for depth in (index / 20 for index in range(21)):
        tasks = _tasks(tokenizer, lengths=(least, least + 1), depths=(depth,))
        assert [len(task.task.prompt) for task in tasks] == [least, least, least + 1, least + 1]
        assert all(_text(tokenizer, task).count(RECORD) == 4 for task in tasks)
    with pytest.raises(UsageError, match=f"it must be at least {least},"):
        _tasks(tokenizer, lengths=(least - 1,))


def test_more_distractors_than_there_are_words_for_are_refused(tokenizer: Tokenizer) -> None:
    assert len(_tasks(tokenizer, lengths=(4000,), depths=(0.5,), distractors=44)) == 2
    with pytest.raises(UsageError, match="distractors is 45; the vocabulary has 90 words"):
        _tasks(tokenizer, lengths=(4000,), distractors=45)


def test_a_seed_makes_the_same_prompts_again_and_another_one_others(tokenizer: Tokenizer) -> None:
    tasks = _tasks(tokenizer, seed=3)
    assert _tasks(tokenizer, seed=3) == tasks
    others = {task.task.prompt for task in _tasks(tokenizer, seed=4)}
    assert len(others | {task.task.prompt for task in tasks}) == 2 * len(tasks)


def test_a_cell_does_not_depend_on_what_else_is_asked(tokenizer: Tokenizer) -> None:
    assert (
        _tasks(tokenizer, lengths=(411,), depths=(0.3,), samples=1)
        == [task for task in _tasks(tokenizer) if (task.length_tokens, task.depth) == (411, 0.3)][:1]
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": ()}, "lengths are \\[\\]; give at least one"),
        ({"lengths": (512, 512)}, "none of them twice"),
        ({"depths": (0.5, 0.5)}, "none of them twice"),
        ({"lengths": (0,)}, "length is 0; it must be an integer of at least 1"),
        ({"lengths": (-5,)}, "length is -5"),
        ({"lengths": (5.5,)}, "length is 5.5"),
        ({"depths": (-0.1,)}, "depth is -0.1; it must be from 0, the beginning, to 1, the end"),
        ({"depths": (1.01,)}, "depth is 1.01"),
        ({"depths": (math.nan,)}, "depth is nan"),
        ({"depths": ("a",)}, "depth is 'a'"),
        ({"samples": 0}, "samples is 0; it must be an integer of at least 1"),
        ({"seed": -1}, "seed is -1; it must be an integer of at least 0"),
        ({"distractors": -1}, "distractors is -1"),
        ({"samples": True}, "samples is True"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        NeedleOptions(**options)


# Scoring


@dataclass
class Policy:
    makes_room: bool = False


@dataclass
class Reader:
    """A session that looks the answer up in the last `sees` tokens of its prompt, and says 1 when it is not there."""

    known: dict[tuple[int, ...], tuple[int, ...]]
    sees: int
    limits: SessionLimits
    policy: Policy = field(default_factory=Policy)
    asked: int = 0

    def reset(self) -> None: ...

    def check_prompt(self, prompt: Sequence[int]) -> None:
        if not self.policy.makes_room and len(prompt) > self.limits.max_tokens:
            raise DoesNotFitError("the prompt is longer")

    def generate(self, prompt: Sequence[int], params: SamplingParams, vocab_size: int) -> Iterator[SampledToken]:
        assert (params.temperature, vocab_size) == (0.0, 400)
        self.asked += 1
        answer, seen = self.known[tuple(prompt)], list(prompt[-self.sees :])
        found = any(tuple(seen[i : i + len(answer)]) == answer for i in range(len(seen)))
        for token_id in answer if found else (1,):
            yield SampledToken(token_id=token_id)


@dataclass
class Library:
    """A model whose sessions are readers."""

    reader: Reader
    vocab_size: int = 400
    policies: list[PolicyOptions | None] = field(default_factory=list)

    def new_session(self, policy: PolicyOptions | None = None) -> Reader:
        self.policies.append(policy)
        return self.reader


def _library(tasks: Sequence[NeedleTask], sees: int, room: int = 1000) -> tuple[LLM, Library]:
    known = {cast("tuple[int, ...]", t.task.prompt): cast("tuple[int, ...]", t.task.answer) for t in tasks}
    library = Library(Reader(known, sees, SessionLimits(max_tokens=room, max_positions=room)))
    return cast(LLM, library), library


def test_whoever_sees_all_finds_all_and_who_sees_the_end_finds_the_deep_ones(tokenizer: Tokenizer) -> None:
    tasks = _tasks(tokenizer, lengths=(300, 600), depths=(0.0, 0.5, 0.8, 1.0), samples=3)
    everything = run_needle(_library(tasks, 600)[0], tasks)
    assert (everything.samples, everything.correct, everything.accuracy) == (24, 24, 1.0)
    end = run_needle(_library(tasks, 200)[0], tasks)
    assert [(cell.length_tokens, cell.depth, cell.samples, cell.correct) for cell in end.cells] == [
        (300, 0.0, 3, 0),
        (300, 0.5, 3, 3),
        (300, 0.8, 3, 3),
        (300, 1.0, 3, 3),
        (600, 0.0, 3, 0),
        (600, 0.5, 3, 0),
        (600, 0.8, 3, 3),
        (600, 1.0, 3, 3),
    ]
    assert (end.correct, end.accuracy) == (15, 15 / 24)
    assert (end.lengths, end.depths) == ((300, 600), (0.0, 0.5, 0.8, 1.0))
    assert [cell.accuracy for cell in end.row(600)] == [0.0, 0.0, 1.0, 1.0]


def test_a_share_of_a_cell_is_its_accuracy() -> None:
    tasks = [
        NeedleTask(length_tokens=4, depth=0.5, task=Task(prompt=prompt, answer=(7, 8)))
        for prompt in [(7, 8, 2, 3), (0, 1, 7, 8), (1, 7, 8, 0), (2, 7, 8, 0)]
    ]
    told: list[tuple[str, int, int]] = []
    policy = PolicyOptions(name="window", budget_tokens=16)
    llm, library = _library(tasks, 3)
    report = run_needle(llm, tasks, policy=policy, progress=lambda *event: told.append(event))
    (cell,) = report.cells
    assert (cell.samples, cell.correct, cell.accuracy, report.accuracy) == (4, 3, 0.75, 0.75)
    assert library.policies == [policy]
    assert told == [("needle at 50% of 4 tokens", index, 4) for index in range(4)]


def test_what_there_is_no_room_for_is_refused_before_anything_is_asked(tokenizer: Tokenizer) -> None:
    tasks = _tasks(tokenizer, lengths=(300, 400))
    answer = len(tasks[0].task.answer)
    llm, library = _library(tasks, 400, room=400 + answer - 2)
    with pytest.raises(
        DoesNotFitError,
        match=f"a prompt of 400 tokens and its answer of {answer} are more than the {400 + answer - 2} that",
    ):
        run_needle(llm, tasks)
    assert library.reader.asked == 0
    with pytest.raises(DoesNotFitError, match="the prompt is longer"):
        run_needle(_library(tasks, 400, room=399)[0], tasks)
    assert run_needle(_library(tasks, 400, room=400 + answer - 1)[0], tasks).accuracy == 1.0
    library.reader.policy = Policy(makes_room=True)
    assert run_needle(llm, tasks).accuracy == 1.0


def test_reports_are_plain_values(tokenizer: Tokenizer) -> None:
    tasks = _tasks(tokenizer, lengths=(300,), depths=(0.5,))
    assert dataclasses.asdict(run_needle(_library(tasks, 300)[0], tasks)) == {
        "cells": ({"length_tokens": 300, "depth": 0.5, "samples": 2, "correct": 2},),
        "samples": 2,
        "correct": 2,
        "accuracy": 1.0,
    }


@pytest.fixture(scope="module")
def demo_llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    from edgekit.export.exporter import ExportOptions, export_bundle
    from edgekit.export.storage_plan import QuantizationOptions

    if not GGUF.is_file():
        pytest.skip(f"the demo model is missing: {GGUF}; get it with: make model")
    options = ExportOptions(quantization=QuantizationOptions(precision="int4"))
    output = tmp_path_factory.mktemp("needle") / "demo.edge"
    return LLM(export_bundle(GGUF, output, options, lambda *_: None).path, threads=2)


@pytest.mark.demo
def test_the_demo_model_finds_needles_and_misses_what_a_window_evicts(demo_llm: LLM) -> None:
    options = NeedleOptions(lengths=(256,), depths=(0.0, 0.5), samples=2, distractors=1)
    tasks = needle_tasks(demo_llm.tokenizer, demo_llm.vocab_size, options)
    assert run_needle(demo_llm, tasks).correct >= 3
    assert run_needle(demo_llm, tasks, policy=PolicyOptions(name="window", budget_tokens=64)).correct == 0
