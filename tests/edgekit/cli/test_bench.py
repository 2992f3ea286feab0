from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest

Invoke: TypeAlias = Callable[..., Any]


def test_the_table_has_a_row_per_prompt_generation_and_depth(invoke: Invoke, bundle: Path) -> None:
    options = ("--pp", 48, "--tg", 8, "--depth", 0, "--depth", 100, "--repetitions", 3, "--threads", 1)
    outcome = invoke("bench", bundle, *options)
    assert (outcome.status, outcome.stderr) == (0, "")
    title, header, *rows = outcome.stdout.splitlines()
    assert re.fullmatch(r"threads 1, loaded in \d+\.\d\d s, 3 runs per row", title)
    assert header.split("  ")[0] == "row"
    found = [re.fullmatch(r"(\S+) +(\S+) +(\S+)-(\S+) +(\S+) MB", row) for row in rows]
    assert [row[1] for row in found if row] == ["pp48", "tg8", "tg32@0", "tg32@100"]
    for row in filter(None, found):
        assert 0 < float(row[3]) <= float(row[2]) <= float(row[4])


def test_json_has_every_repetition(invoke: Invoke, bundle: Path) -> None:
    outcome = invoke("bench", bundle, "--pp", 16, "--tg", 0, "--repetitions", 4, "--json")
    assert outcome.json.keys() == {"threads", "load_s", "rows"}
    (row,) = outcome.json["rows"]
    assert (row["name"], row["tokens"], len(row["seconds"])) == ("pp16", 16, 4)
    assert row["min_tokens_per_s"] == pytest.approx(16 / max(row["seconds"]))
    assert row["max_tokens_per_s"] == pytest.approx(16 / min(row["seconds"]))
    assert row["peak_memory_bytes"] > 10_000_000


def test_the_default_rows_are_those_of_llama_cpp_and_need_their_context(invoke: Invoke, bundle: Path) -> None:
    outcome = invoke("bench", bundle)
    assert (outcome.status, outcome.stdout) == (4, "")
    assert outcome.stderr == "error: pp512 needs 512 tokens, the model's context is 256; measure fewer\n"
