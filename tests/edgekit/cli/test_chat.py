from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from edgekit.runtime import LLM, SamplingParams

Invoke: TypeAlias = Callable[..., Any]
Start: TypeAlias = Callable[..., Any]

QUESTIONS = ("Who jumps?", "How far?")
PARAMS = SamplingParams(max_tokens=16, ignore_eos=True)
OPTIONS = ("--max-tokens", 16, "--ignore-eos")
FOREVER = ("--max-tokens", 1_000_000, "--ignore-eos")


def _answers(bundle: Path, questions: Sequence[str], system: str | None = None) -> list[str]:
    """What a conversation that remembers everything is answered, by sessions that remember nothing."""
    llm = LLM(bundle)
    messages = [{"role": "system", "content": system}] if system else []
    answers = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        answers.append(llm.chat(messages, PARAMS, session=llm.new_session()).text)
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers


def test_a_conversation_remembers_questions_and_answers(invoke: Invoke, bundle: Path) -> None:
    outcome = invoke("chat", bundle, *OPTIONS, stdin="\n".join(QUESTIONS))
    assert outcome.status == 0
    assert outcome.stdout == "".join(f"{answer}\n" for answer in _answers(bundle, QUESTIONS))
    assert _answers(bundle, QUESTIONS)[1] != _answers(bundle, QUESTIONS[1:])[0]


def test_statistics_follow_each_answer_on_stderr(invoke: Invoke, bundle: Path) -> None:
    first, second = invoke("chat", bundle, *OPTIONS, stdin="\n".join(QUESTIONS)).stderr.splitlines()
    line = (
        r"\[\d+ prompt tokens{}, first token \S+ s, 16 tokens at \S+ tokens/s, peak memory \S+ MB, finished by length\]"
    )
    assert re.fullmatch(line.format(""), first)
    # The first question, and the first answer but for its last token, need not be read again.
    assert re.fullmatch(line.format(r" \((?!0)\d+ cached\)"), second)


def test_reset_forgets_the_conversation_but_not_the_instructions(invoke: Invoke, bundle: Path) -> None:
    stdin = f"{QUESTIONS[0]}\n/reset\n{QUESTIONS[1]}\n"
    outcome = invoke("chat", bundle, *OPTIONS, "--system", "Answer in rhymes.", stdin=stdin)
    expected = [_answers(bundle, [question], "Answer in rhymes.")[0] for question in QUESTIONS]
    assert outcome.stdout == "".join(f"{answer}\n" for answer in expected)
    assert expected[1] != _answers(bundle, QUESTIONS[1:])[0]


def test_a_session_file_survives_the_process(invoke: Invoke, bundle: Path, tmp_path: Path) -> None:
    file, expected = tmp_path / "talk", _answers(bundle, QUESTIONS, "Answer in rhymes.")
    for question, answer, more in zip(QUESTIONS, expected, (("--system", "Answer in rhymes."), ()), strict=True):
        outcome = invoke("chat", bundle, *OPTIONS, *more, "--session", file, stdin=question)
        assert (outcome.status, outcome.stdout) == (0, f"{answer}\n")
    assert re.search(r"\((?!0)\d+ cached\)", outcome.stderr), "and what was read is not read again"
    outcome = invoke("chat", bundle, *OPTIONS, "--session", file, "--prompt", "Why?", "--json")
    assert outcome.json["usage"]["cached_tokens"] > 40
    assert outcome.json["text"] == _answers(bundle, [*QUESTIONS, "Why?"], "Answer in rhymes.")[2]


def test_reset_starts_the_session_file_anew(invoke: Invoke, bundle: Path, tmp_path: Path) -> None:
    file = tmp_path / "talk"
    invoke("chat", bundle, *OPTIONS, "--session", file, stdin=f"{QUESTIONS[0]}\n/reset\n/exit\n")
    outcome = invoke("chat", bundle, *OPTIONS, "--session", file, stdin=QUESTIONS[1])
    assert outcome.stdout == f"{_answers(bundle, QUESTIONS[1:])[0]}\n"


def test_a_session_file_that_cannot_be_gone_on_with_is_refused(invoke: Invoke, bundle: Path, tmp_path: Path) -> None:
    file = tmp_path / "talk"
    assert invoke("chat", bundle, *OPTIONS, "--session", file, "--system", "A", stdin=QUESTIONS[0]).status == 0
    outcome = invoke("chat", bundle, "--session", file, "--system", "B", "--prompt", "Hi")
    assert (outcome.status, outcome.stdout) == (2, "")
    assert "has other instructions; leave out --system" in outcome.stderr
    llm = LLM(bundle)
    session = llm.new_session()
    llm.generate([5, 6, 7], SamplingParams(max_tokens=2), session=session)
    session.save(file)
    outcome = invoke("chat", bundle, "--session", file, "--prompt", "Hi")
    assert outcome.status == 2
    assert "a conversation without messages, which no chat can go on with" in outcome.stderr
    file.write_bytes(b"{}")
    outcome = invoke("chat", bundle, "--session", file, "--prompt", "Hi")
    assert (outcome.status, outcome.stdout) == (5, "")
    assert "is not valid" in outcome.stderr


def test_exit_leaves_and_empty_lines_ask_nothing(invoke: Invoke, bundle: Path) -> None:
    outcome = invoke("chat", bundle, *OPTIONS, stdin=f"\n  \n/exit\n{QUESTIONS[0]}\n")
    assert (outcome.status, outcome.stdout, outcome.stderr) == (0, "", "")


def test_help_lists_the_commands(invoke: Invoke, bundle: Path) -> None:
    outcome = invoke("chat", bundle, stdin="/help\n")
    assert outcome.stdout == ""
    assert [line.split()[0] for line in outcome.stderr.splitlines()] == ["/reset", "/exit", "/help"]


def test_an_unknown_command_names_the_known_ones_and_the_chat_goes_on(invoke: Invoke, bundle: Path) -> None:
    outcome = invoke("chat", bundle, *OPTIONS, stdin=f"/rest\n{QUESTIONS[0]}\n")
    error = "error: no such command: '/rest'; known: /exit, /help, /reset (did you mean '/reset'?)"
    assert outcome.stderr.splitlines()[0] == error
    assert outcome.stdout == f"{_answers(bundle, QUESTIONS)[0]}\n"


def test_a_path_is_a_question_and_no_command(invoke: Invoke, bundle: Path) -> None:
    outcome = invoke("chat", bundle, *OPTIONS, stdin="/usr/bin is what?\n")
    assert outcome.stdout == f"{_answers(bundle, ['/usr/bin is what?'])[0]}\n"


@pytest.mark.parametrize(
    ("question", "error"),
    [
        (b"x " * 300, "tokens, the model's context 256; "),
        (b"Zw\xf6lf", "error: stdin is not UTF-8: it has the byte 0xf6 at offset 2"),
    ],
)
def test_a_question_that_cannot_be_answered_is_forgotten_and_the_chat_goes_on(
    invoke: Invoke, bundle: Path, question: bytes, error: str
) -> None:
    lines = [QUESTIONS[0].encode(), question, QUESTIONS[1].encode()]
    outcome = invoke("chat", bundle, *OPTIONS, stdin=b"\n".join(lines))
    assert outcome.status == 0
    assert outcome.stdout == "".join(f"{answer}\n" for answer in _answers(bundle, QUESTIONS))
    (line,) = [line for line in outcome.stderr.splitlines() if line.startswith("error: ")]
    assert error in line


def test_prompt_asks_one_question_and_exits(invoke: Invoke, bundle: Path) -> None:
    outcome = invoke("chat", bundle, *OPTIONS, "--prompt", QUESTIONS[0], stdin="never read")
    assert outcome.stdout == f"{_answers(bundle, QUESTIONS[:1])[0]}\n"
    assert " tokens/s, peak memory " in outcome.stderr


def test_prompt_with_json_prints_the_answer_as_a_document(invoke: Invoke, bundle: Path) -> None:
    outcome = invoke("chat", bundle, *OPTIONS, "--prompt", QUESTIONS[0], "--json")
    assert (outcome.json["text"], outcome.stderr) == (_answers(bundle, QUESTIONS[:1])[0], "")


def test_a_prompt_that_does_not_fit_ends_with_its_status(invoke: Invoke, bundle: Path) -> None:
    assert invoke("chat", bundle, "--prompt", "x " * 300).status == 4


@pytest.mark.parametrize("option", [("--json",), ("--logprobs", "1"), ("--logprobs", "1", "--prompt", "Hello")])
def test_json_needs_a_prompt_and_logprobs_need_json(invoke: Invoke, bundle: Path, option: tuple[str, ...]) -> None:
    outcome = invoke("chat", bundle, *option)
    assert outcome.status == 2
    assert "--prompt" in outcome.stderr


def test_a_bundle_without_a_chat_template_is_refused_before_the_first_question(
    invoke: Invoke, make_bundle: Callable[..., Path], tiny_llama: Path, tmp_path: Path
) -> None:
    plain = Path(shutil.copytree(tiny_llama, tmp_path / "plain"))
    (plain / "chat_template.jinja").unlink()
    outcome = invoke("chat", make_bundle(plain, "fp32"), stdin="Hello\n")
    assert (outcome.status, outcome.stdout) == (3, "")
    assert "has no chat template" in outcome.stderr


def test_a_model_without_an_end_of_answers_is_announced_and_answers_to_max_tokens(
    invoke: Invoke, make_bundle: Callable[..., Path], tiny_llama: Path, tmp_path: Path
) -> None:
    endless = Path(shutil.copytree(tiny_llama, tmp_path / "endless"))
    for name in ("config.json", "generation_config.json"):
        (endless / name).write_text(json.dumps({**json.loads((endless / name).read_text()), "eos_token_id": None}))
    (endless / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    bundle = make_bundle(endless, "fp32")
    outcome = invoke("chat", bundle, "--prompt", QUESTIONS[0], "--max-tokens", 3)
    assert outcome.status == 0
    warning, statistics = outcome.stderr.splitlines()
    assert warning.endswith("names no token that ends an answer, which goes on to --max-tokens; see --stop")
    assert statistics.endswith("finished by length]")
    assert "WARNING" not in invoke("chat", bundle, "--prompt", "Who?", "--max-tokens", 3, "--stop", "user:").stderr


def test_an_interrupt_ends_the_answer_and_the_chat_goes_on(start: Start, endless_bundle: Path) -> None:
    running = start("chat", endless_bundle, *FOREVER)
    for question in QUESTIONS:
        running.write(f"{question}\n")
        running.wait_for_characters(1)
        running.interrupt()
        running.wait_for("finished by cancelled]\n")
    # What was said before the interrupt is part of the conversation.
    assert re.search(r"prompt tokens \(\d{2,} cached\)", running.seen)
    running.write("/exit\n")
    assert running.rest() == ""
    assert running.process.returncode == 0


def test_an_interrupt_while_waiting_for_a_line_leaves(start: Start, bundle: Path) -> None:
    running = start("chat", bundle)
    running.write("/help\n")
    running.wait_for("show this list\n")
    running.interrupt()
    assert running.rest() == ""
    assert running.process.returncode == 0


# Python notices a Ctrl-C between the prompt and the first key only at that key, here Enter, which alone asks nothing.
@pytest.mark.parametrize("leave", ["\x03\n", "\x04", "/exit\n"])
def test_on_a_terminal_ctrl_c_ends_an_answer_and_each_way_out_leaves(
    start_on_terminal: Start, endless_bundle: Path, leave: str
) -> None:
    running = start_on_terminal("chat", endless_bundle, *FOREVER)
    running.wait_for("Ask something; /help lists the commands.")
    running.wait_for("> ")
    running.write(f"{QUESTIONS[0]}\n")
    running.wait_for_characters(200)  # more than the terminal's echo
    running.write("\x03")
    running.wait_for("finished by cancelled]")
    running.wait_for("> ")
    running.write(leave)
    assert "error" not in running.rest()
    assert running.process.returncode == 0


def test_an_empty_question_is_refused(invoke: Invoke, bundle: Path) -> None:
    outcome = invoke("chat", bundle, "--prompt", "")
    assert (outcome.status, outcome.stdout) == (2, "")
    assert outcome.stderr == "error: the prompt is empty; give some text\n"
