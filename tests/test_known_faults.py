"""docs/known_faults.md promises a test for every fault that can occur; the tests are where they belong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROWS = re.findall(
    r"^\| (\d+) \| (.*) \| (.*) \| (.*) \|$", (ROOT / "docs" / "known_faults.md").read_text(), re.MULTILINE
)
TESTS = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def test_the_rows_are_numbered_and_each_names_a_report() -> None:
    assert [int(number) for number, *_ in ROWS] == [*range(1, 60)]
    assert all(re.search(r"#\d+", reported) for _, reported, *_ in ROWS)


@pytest.mark.parametrize(("number", "answer"), [(number, answer) for number, _, _, answer in ROWS])
def test_every_fault_has_an_answer_and_every_test_that_it_names_exists(number: str, answer: str) -> None:
    assert answer.startswith(("test: ", "cannot occur", "not applicable yet")), number
    named = TESTS.findall(answer)
    assert named or not answer.startswith("test: ")
    assert answer.count("::") == len(named)
    for file, name in named:
        assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE), f"{file}::{name}"
