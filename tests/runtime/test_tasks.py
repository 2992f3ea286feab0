from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias, cast

import pytest
from tokenizers import Tokenizer as Backend

from edgekit.errors import CorruptArtifactError, DoesNotFitError, StorageError, UnsupportedError, UsageError
from edgekit.runtime import LLM, SampledToken, SamplingParams
from edgekit.runtime.policies import PolicyOptions
from edgekit.runtime.session import Session
from edgekit.runtime.tasks import LEADING_TOKENS, Task, answers, judge, read_tasks, run_tasks, write_tasks
from edgekit.runtime.tokenizer import Tokenizer

Load: TypeAlias = Callable[[Backend], Tokenizer]
Greedy: TypeAlias = Callable[[str, list[int], int], list[int]]

END = 9999


@dataclass
class Script:
    """A session that says what was written down for a prompt, and notes how much of it was asked for."""

    sayings: dict[tuple[int, ...], Sequence[int]]
    events: list[object] = field(default_factory=list)

    def reset(self) -> None:
        self.events.append("reset")

    def generate(self, prompt: Sequence[int], params: SamplingParams, vocab_size: int) -> Iterator[SampledToken]:
        assert (params, vocab_size) == (SamplingParams(), 7)
        for token_id in self.sayings[tuple(prompt)]:
            self.events.append(token_id)
            yield SampledToken(token_id=token_id)


@dataclass
class Reciter:
    """A model whose sessions follow a script."""

    script: Script
    tokenizer: Tokenizer | None = None
    policies: list[PolicyOptions | None] = field(default_factory=list)
    vocab_size: int = 7
    end_token_ids: frozenset[int] = frozenset({END})

    def new_session(self, policy: PolicyOptions | None = None) -> Script:
        self.policies.append(policy)
        return self.script


def _reciter(sayings: dict[tuple[int, ...], Sequence[int]], tokenizer: Tokenizer | None = None) -> tuple[LLM, Reciter]:
    reciter = Reciter(Script(sayings), tokenizer)
    return cast(LLM, reciter), reciter


@pytest.fixture
def tokenizer(byte_level: Backend, load: Load) -> Tokenizer:
    return load(byte_level)


def _judged(tokenizer: Tokenizer, answer: str, said: Iterable[int]) -> bool:
    return judge(_reciter({}, tokenizer)[0], Task(prompt="?", answer=answer), said)


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


# Files


def test_tasks_that_were_written_are_read_again(tmp_path: Path) -> None:
    tasks = [Task(prompt="Où ?\n", answer="là"), Task(prompt=(1, 2), answer=(3,)), Task(prompt="a", answer=(4, 5))]
    write_tasks(tmp_path / "tasks.jsonl", tasks)
    assert (tmp_path / "tasks.jsonl").read_text(encoding="utf-8") == (
        '{"prompt":"Où ?\\n","answer":"là"}\n{"prompt":[1,2],"answer":[3]}\n{"prompt":"a","answer":[4,5]}\n'
    )
    assert read_tasks(tmp_path / "tasks.jsonl") == tasks
    assert [path.name for path in tmp_path.iterdir()] == ["tasks.jsonl"]


def test_blank_lines_and_other_line_ends_are_read_over(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_bytes(b'\r\n{"prompt": "a", "answer": "b"}\r\n\n {"answer": [1], "prompt": [2]}')
    assert read_tasks(tmp_path / "tasks.jsonl") == [Task(prompt="a", answer="b"), Task(prompt=(2,), answer=(1,))]


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read the task file '.*no.jsonl': No such file"):
        read_tasks(tmp_path / "no.jsonl")


@pytest.mark.parametrize("content", [b"", b"\n  \n\r\n"])
def test_a_file_without_tasks_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tasks.jsonl").write_bytes(content)
    with pytest.raises(UsageError, match="has no tasks"):
        read_tasks(tmp_path / "tasks.jsonl")


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (b"nonsense", "JSON is malformed"),
        (b"\xff", "JSON is malformed"),
        (b'{"prompt": "\xff", "answer": "b"}', "Invalid UTF-8"),
        (b'{"prompt": "a"}', "missing required field `answer`"),
        (b'{"prompt": "a", "answer": "b", "weight": 2}', "unknown field `weight`"),
        (b'{"prompt": ["a"], "answer": "b"}', "Expected `int`"),
        (b'{"prompt": 3, "answer": "b"}', "got `int`"),
        (b'["a", "b"]', "Expected `object`"),
        (b'{"prompt": "", "answer": "b"}', "its prompt is empty"),
        (b'{"prompt": [], "answer": "b"}', "its prompt is empty"),
        (b'{"prompt": "a", "answer": []}', "its answer is empty"),
        (b'{"prompt": "a", "answer": " \\n"}', "its answer is empty"),
    ],
)
def test_a_malformed_line_is_named_by_its_number(tmp_path: Path, line: bytes, what: str) -> None:
    (tmp_path / "tasks.jsonl").write_bytes(b'{"prompt": "a", "answer": "b"}\n\n' + line + b"\n")
    with pytest.raises(CorruptArtifactError) as caught:
        read_tasks(tmp_path / "tasks.jsonl")
    assert str(caught.value).startswith("line 3 of task file ")
    assert what in str(caught.value)


def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").mkdir()
    with pytest.raises(StorageError, match=r"cannot write '.*tasks.jsonl'"):
        write_tasks(tmp_path / "tasks.jsonl", [Task(prompt="a", answer="b")])
    assert [path.name for path in tmp_path.iterdir()] == ["tasks.jsonl"]


# Answers in token ids


def test_an_answer_is_right_when_its_tokens_come_first_and_next_to_each_other() -> None:
    llm, reciter = _reciter({(1, 2): [3, 4, 5], (6,): [3, 5, 4], (0,): [4, 3]})
    tasks = [Task(prompt=prompt, answer=(3, 4)) for prompt in [(1, 2), (6,), (0,)]]
    assert run_tasks(llm, tasks) == [True, False, False]
    # No more is asked for than is needed, of a conversation that has forgotten the one before.
    assert reciter.script.events == ["reset", 3, 4, "reset", 3, 5, "reset", 4]
    assert reciter.policies == [None]


def test_the_policy_is_that_of_the_session_and_progress_is_told_of_every_task() -> None:
    llm, reciter = _reciter({(1,): [2]})
    told: list[tuple[str, int, int]] = []
    policy = PolicyOptions(name="window", budget_tokens=64)
    tasks = [Task(prompt=(1,), answer=(2,))] * 2
    assert run_tasks(llm, tasks, policy=policy, progress=lambda *event: told.append(event)) == [True, True]
    assert reciter.policies == [policy]
    assert told == [("task", 0, 2), ("task", 1, 2)]


@pytest.mark.parametrize("answer", [(3, 4, 5), "three four five"])
def test_a_conversation_that_ends_before_the_answer_is_known_is_no_wrong_answer(
    tokenizer: Tokenizer, answer: tuple[int, ...] | str
) -> None:
    said = [3, 4] if isinstance(answer, tuple) else _ids(tokenizer, "three four")
    llm, reciter = _reciter({(1,): said}, tokenizer)
    with pytest.raises(DoesNotFitError, match="no room for a prompt and its answer"):
        answers(llm, Task(prompt=(1,), answer=answer), cast(Session, reciter.script))


# Answers in text


def test_text_is_right_when_the_answer_begins_with_it_white_space_aside(tokenizer: Tokenizer) -> None:
    said = _ids(tokenizer, "\n  the dog. It's over")
    assert _judged(tokenizer, " the dog\n", said)
    assert _judged(tokenizer, "the do", said)
    assert not _judged(tokenizer, "dog", said)
    assert not _judged(tokenizer, "The dog", said)
    assert not _judged(tokenizer, "the  dog", said)


def test_text_is_asked_for_no_further_than_the_first_wrong_token(tokenizer: Tokenizer) -> None:
    right, wrong = _ids(tokenizer, " the lazy"), _ids(tokenizer, " fox jumps over")
    taken: list[int] = []

    def drawn() -> Iterator[int]:
        for token_id in [*right, *wrong]:
            taken.append(token_id)
            yield token_id

    assert not _judged(tokenizer, "the lazy dog", drawn())
    assert len(taken) <= len(right) + 2
    assert taken[: len(right)] == right


def test_characters_of_several_tokens_are_waited_for(tokenizer: Tokenizer) -> None:
    said = _ids(tokenizer, "𝄞 clef")
    assert len(said) > len("𝄞 clef")
    assert _judged(tokenizer, "𝄞 cl", said)
    assert not _judged(tokenizer, "𝄢 clef", said)


def test_an_end_of_the_answer_ends_it(tokenizer: Tokenizer) -> None:
    assert not _judged(tokenizer, "the dog", [*_ids(tokenizer, "the"), END, *_ids(tokenizer, " dog")])


def test_white_space_without_end_is_no_answer(tokenizer: Tokenizer) -> None:
    (line_end,) = _ids(tokenizer, "\n")
    taken = itertools.count()
    assert not _judged(tokenizer, "the", (line_end for _ in taken))
    assert next(taken) == LEADING_TOKENS + len("the")


def test_text_prompts_are_encoded_as_those_of_a_model(byte_fallback: Backend, load: Load) -> None:
    tokenizer = load(byte_fallback)
    prompt = tokenizer.encode_prompt("The quick brown fox")
    assert prompt[0] == tokenizer.token_to_id("<s>")
    llm, _ = _reciter({tuple(prompt): _ids(tokenizer, "jumps over")}, tokenizer)
    assert run_tasks(llm, [Task(prompt="The quick brown fox", answer="jumps")]) == [True]


# A model


def test_a_model_answers_what_it_would_say_greedily(tiny_llm: LLM, greedy: Greedy) -> None:
    prompt = [11, 45, 203, 9, 77]
    said = greedy("llama", prompt, 6)
    other = [*said[:5], (said[5] + 1) % 320]
    tasks = [Task(prompt=tuple(prompt), answer=tuple(answer)) for answer in (said, said[:1], other)]
    assert run_tasks(tiny_llm, tasks) == [True, True, False]


def test_what_was_said_as_text_is_answered_as_text(tiny_llm: LLM) -> None:
    said = tiny_llm.generate("The quick brown", SamplingParams(max_tokens=12, ignore_eos=True)).text
    assert len(said.strip()) > 3
    tasks = [Task(prompt="The quick brown", answer=said.strip()[:3]), Task(prompt="The quick brown", answer="§§")]
    assert run_tasks(tiny_llm, tasks) == [True, False]


def test_prompts_that_a_model_cannot_read_are_refused(tiny_llm: LLM) -> None:
    with pytest.raises(UsageError, match="token id 320"):
        run_tasks(tiny_llm, [Task(prompt=(320,), answer=(1,))])
    with pytest.raises(DoesNotFitError, match="the prompt has 257 tokens"):
        run_tasks(tiny_llm, [Task(prompt=(5,) * 257, answer=(1,))])


def test_an_answer_that_there_is_no_room_for_is_refused(tiny_llm: LLM) -> None:
    prompt = [5, 60] * 127
    said = tuple(token.token_id for token in tiny_llm.new_session().generate(prompt, SamplingParams(), 320))
    assert len(said) == 256 - len(prompt) + 1
    assert run_tasks(tiny_llm, [Task(prompt=tuple(prompt), answer=said)]) == [True]
    with pytest.raises(DoesNotFitError, match="no room"):
        run_tasks(tiny_llm, [Task(prompt=tuple(prompt), answer=(*said, 1))])


def test_a_policy_that_the_bundle_cannot_serve_is_refused(tiny_llm: LLM) -> None:
    with pytest.raises(UnsupportedError, match="attention-scores"):
        run_tasks(tiny_llm, [Task(prompt=(5,), answer=(1,))], policy=PolicyOptions(name="snapkv", budget_tokens=64))
