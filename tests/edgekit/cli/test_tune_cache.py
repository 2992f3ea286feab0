from __future__ import annotations

import builtins
import hashlib
import itertools
import json
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest

from edgekit.errors import StorageError
from edgekit.runtime import LLM, SamplingParams
from edgekit.runtime.loading import KVCacheOptions
from edgekit.runtime.policies import PolicyOptions

Invoke: TypeAlias = Callable[..., Any]
OPTIONS = ("--budget-tokens", 60, "--threads", 1, "--iterations", 2)


@pytest.fixture(scope="module")
def scoring(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    """A bundle that says which tokens are attended to."""
    from edgekit.export.exporter import ExportOptions, export_bundle
    from edgekit.export.graph.kv_cache import GraphOptions
    from edgekit.export.storage_plan import QuantizationOptions

    output = tmp_path_factory.mktemp("scoring") / "model.edge"
    exact = QuantizationOptions(precision="fp32")
    options = ExportOptions(quantization=exact, graph=GraphOptions(attention_scores=True))
    return export_bundle(tiny_llama, output, options, lambda *_: None).path


@pytest.fixture(scope="module")
def right(scoring: Path) -> list[tuple[list[int], list[int]]]:
    """Prompts, and what the model says that keeps little in its first layer."""
    kv_cache = KVCacheOptions(policy="snapkv", budget_tokens=60, per_layer=True)
    llm = LLM(scoring, threads=1, kv_cache=kv_cache)
    pairs = []
    for seed in range(12):
        prompt = [int(token) for token in np.random.default_rng(seed).integers(3, 320, 140)]
        session = llm.new_session(PolicyOptions(name="snapkv", layer_budgets_tokens=(34, 86)))
        drawn = itertools.islice(session.generate(prompt, SamplingParams(), llm.vocab_size), 4)
        pairs.append((prompt, [token.token_id for token in drawn]))
    return pairs


def _write(path: Path, pairs: Sequence[tuple[object, object]]) -> Path:
    lines = [json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in pairs]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture
def tasks(tmp_path: Path, right: list[tuple[list[int], list[int]]]) -> Path:
    return _write(tmp_path / "tasks.jsonl", right[:8])


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "profile.json"


def _is_clean(out: Path) -> bool:
    """Whether neither a profile nor a part of one is there."""
    return [path.name for path in out.parent.iterdir() if "profile" in path.name] == []


def test_a_profile_is_written_and_every_layer_told(invoke: Invoke, scoring: Path, tasks: Path, out: Path) -> None:
    outcome = invoke("tune-cache", scoring, "--task", tasks, "-o", out, *OPTIONS)
    assert (outcome.status, outcome.stderr) == (0, "")
    profile = json.loads(out.read_text())
    first, second = profile["budgets_tokens"]
    lines = outcome.stdout.splitlines()
    assert lines[0].split() == ["layer", "tokens", "of", "the", "mean"]
    assert [line.split() for line in lines[1:3]] == [
        ["0", str(first), f"{first / 60:.2f}"],
        ["1", str(second), f"{second / 60:.2f}"],
    ]
    assert lines[3] == (
        f"8 tasks tuned by: {profile['score']:.1%} answered with these budgets, "
        f"{profile['settings']['uniform_score']:.1%} with the same for all layers"
    )
    assert lines[4] == (f"{out}: found among {profile['settings']['candidates']} candidates; use it with --kv-profile")
    assert len(lines) == 5
    assert (profile["method"], profile["settings"]["budget_tokens"]) == ("snapkv", 60)
    assert profile["settings"]["tasks_sha256"] == hashlib.sha256(tasks.read_bytes()).hexdigest()
    assert 120 <= first + second <= 121


def test_json_has_the_report_and_held_out_tasks(
    invoke: Invoke, scoring: Path, tasks: Path, out: Path, right: list[tuple[list[int], list[int]]]
) -> None:
    other = _write(out.with_name("other.jsonl"), right[8:])
    outcome = invoke("tune-cache", scoring, "--task", tasks, "--out", out, "--holdout", other, *OPTIONS, "--json")
    assert (outcome.status, outcome.stderr) == (0, "")
    profile = json.loads(out.read_text())
    assert outcome.json["profile"] == str(out)
    assert outcome.json["budgets_tokens"] == profile["budgets_tokens"]
    assert outcome.json["calibration"] == {
        "tasks": 8,
        "uniform": profile["settings"]["uniform_score"],
        "tuned": profile["score"],
    }
    assert outcome.json["holdout"]["tasks"] == 4
    assert 0 <= outcome.json["holdout"]["uniform"] <= 1
    assert (outcome.json["held_prompts"], outcome.json["candidates"]) == (8, profile["settings"]["candidates"])


def test_held_out_tasks_get_a_line_of_their_own(
    invoke: Invoke, scoring: Path, tasks: Path, out: Path, right: list[tuple[list[int], list[int]]]
) -> None:
    other = _write(out.with_name("other.jsonl"), right[8:])
    outcome = invoke("tune-cache", scoring, "--task", tasks, "--out", out, "--holdout", other, *OPTIONS)
    assert outcome.stdout.splitlines()[4].startswith("4 held-out tasks: ")


def test_the_profile_is_taken_by_the_other_commands(invoke: Invoke, scoring: Path, tasks: Path, out: Path) -> None:
    tuned = invoke("tune-cache", scoring, "--task", tasks, "-o", out, *OPTIONS, "--json").json
    use = ("--kv-policy", "snapkv", "--kv-profile", out)
    run = invoke("run", scoring, "The quick brown fox " * 12, *use, "--max-tokens", 3, "--json")
    assert (run.status, len(run.json["token_ids"])) == (0, 3)
    planned = invoke("plan", scoring, *use, "--json").json
    assert len(planned["slot_bytes"]) == len(set(tuned["budgets_tokens"]))
    kept = sum(map(int.__mul__, planned["slot_bytes"], tuned["budgets_tokens"]))
    assert planned["kept_bytes"] == kept
    moved = invoke("plan", scoring, *use, "--kv-budget-tokens", 120, "--json").json
    assert moved["kept_bytes"] == pytest.approx(2 * kept, rel=0.02)


def test_a_seed_gives_the_same_profile(invoke: Invoke, scoring: Path, tasks: Path, out: Path) -> None:
    command = ("tune-cache", scoring, "--task", tasks, "-o", out, *OPTIONS, "--seed", 3)
    assert invoke(*command).status == 0
    first = out.read_bytes()
    assert invoke(*command).status == 0
    assert out.read_bytes() == first


@pytest.mark.parametrize("policy", ["laq", "laq++"])
def test_other_policies_are_tuned_by_their_own_choice(
    invoke: Invoke, scoring: Path, tasks: Path, out: Path, policy: str
) -> None:
    outcome = invoke("tune-cache", scoring, "--task", tasks, "-o", out, *OPTIONS, "--kv-policy", policy, "--json")
    assert (outcome.status, outcome.stderr) == (0, "")
    assert json.loads(out.read_text())["method"] == policy


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (("--kv-policy", "stop"), 2, "KV policy to tune budgets for: 'stop'; known: laq, laq++, snapkv"),
        (("--kv-policy", "window"), 2, "KV policy to tune budgets for: 'window'; known: laq, laq++, snapkv"),
        (("--budget-tokens", 32), 2, "the budget is 32 tokens; snapkv needs an integer of at least 33"),
        (("--budget-tokens", -5), 2, "the budget is -5 tokens"),
        (("--iterations", -1), 2, "iterations is -1; it must be an integer of at least 1"),
        (("--iterations", 0), 2, "iterations is 0"),
        (("--seed", -1), 2, "seed is -1; it must be an integer of at least 0"),
        (("--budget-tokens", 200), 2, "no prompt is longer than the budget of 200 tokens, the longest has 140"),
        (("--task", "none.jsonl"), 2, "cannot read the task file 'none.jsonl'"),
        (("--holdout", "none.jsonl"), 2, "cannot read the task file 'none.jsonl'"),
        (("--memory-budget", "1MiB"), 4, "not fit into the memory budget"),
    ],
)
def test_what_cannot_be_tuned_is_refused_and_leaves_nothing(
    invoke: Invoke, scoring: Path, tasks: Path, out: Path, options: tuple[Any, ...], status: int, message: str
) -> None:
    outcome = invoke("tune-cache", scoring, "--task", tasks, "-o", out, *OPTIONS, *options)
    assert (outcome.status, outcome.stdout) == (status, "")
    assert outcome.stderr.startswith("error: ")
    assert message in outcome.stderr
    assert _is_clean(out)


def test_a_bundle_without_attention_scores_is_refused(invoke: Invoke, bundle: Path, tasks: Path, out: Path) -> None:
    outcome = invoke("tune-cache", bundle, "--task", tasks, "-o", out, *OPTIONS)
    assert outcome.status == 3
    assert "export it with --attention-scores" in outcome.stderr
    assert _is_clean(out)


def test_an_empty_task_file_is_refused(invoke: Invoke, scoring: Path, out: Path) -> None:
    empty = _write(out.with_name("empty.jsonl"), [])
    outcome = invoke("tune-cache", scoring, "--task", empty, "-o", out, *OPTIONS)
    assert outcome.status == 2
    assert "has no tasks" in outcome.stderr


def test_where_the_profile_cannot_be_written_is_known_before_anything_is_read(invoke: Invoke, tmp_path: Path) -> None:
    missing = tmp_path / "no" / "profile.json"
    # The bundle and the tasks are not there either: nobody has looked.
    outcome = invoke("tune-cache", "none.edge", "--task", "none.jsonl", "-o", missing, "--budget-tokens", 60)
    assert (outcome.status, outcome.stdout) == (2, "")
    error = f"error: cannot write the profile to {str(missing)!r}: there is no directory {str(missing.parent)!r}\n"
    assert outcome.stderr == error
    outcome = invoke("tune-cache", "none.edge", "--task", "none.jsonl", "-o", tmp_path, "--budget-tokens", 60)
    assert outcome.stderr == f"error: cannot write the profile to {str(tmp_path)!r}: it is a directory\n"


def test_a_missing_package_is_known_before_anything_is_read(
    invoke: Invoke, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = builtins.__import__

    def refuse(name: str, *rest: Any, **named: Any) -> Any:
        if name == "cma":
            raise ImportError(name)
        return original(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", refuse)
    outcome = invoke("tune-cache", "none.edge", "--task", "none.jsonl", "-o", out, "--budget-tokens", 60, "--json")
    assert outcome.status == 3
    assert outcome.json["error"] == {
        "code": "missing_extra",
        "message": "cma is not installed; run: pip install 'edgekit[tune]'",
    }


def test_short_prompts_are_warned_of(
    invoke: Invoke, scoring: Path, out: Path, right: list[tuple[list[int], list[int]]]
) -> None:
    mixed = _write(out.with_name("mixed.jsonl"), [*right[:2], ([5] * 40, [7])])
    outcome = invoke("tune-cache", scoring, "--task", mixed, "-o", out, *OPTIONS, "--iterations", 1)
    assert outcome.status == 0
    assert "1 of 3 prompts are not longer than the budget of 60 tokens" in outcome.stderr


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_search_that_is_interrupted_leaves_no_profile(
    start_on_terminal: Callable[..., Any],
    scoring: Path,
    out: Path,
    right: list[tuple[list[int], list[int]]],
    number: int,
    status: int,
) -> None:
    # Half of the tasks have no answer that any budgets lead to, so that the search does not end by itself so soon.
    wrong = [(prompt, [*answer[:-1], answer[-1] ^ 1]) for prompt, answer in right]
    file = _write(out.with_name("half.jsonl"), [*right, *wrong])
    running = start_on_terminal("tune-cache", scoring, "--task", file, "-o", out, *OPTIONS, "--iterations", 10**6)
    running.wait_for("layers 0 to 1")
    running.process.send_signal(number)
    running.rest()
    assert running.process.returncode == status
    assert _is_clean(out)


def test_a_profile_that_was_there_stays_when_the_disk_refuses(
    invoke: Invoke, scoring: Path, tasks: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from edgekit.runtime import cache_profile

    out.write_text("before")

    def refuse(*_: object) -> None:
        raise StorageError(f"cannot write {str(out)!r}: No space left on device")

    monkeypatch.setattr(cache_profile, "write_profile", refuse)
    outcome = invoke("tune-cache", scoring, "--task", tasks, "-o", out, *OPTIONS, "--iterations", 1)
    assert outcome.status == 1
    assert "No space left on device" in outcome.stderr
    assert out.read_text() == "before"


def test_help_names_the_method_and_the_files(invoke: Invoke) -> None:
    text = " ".join(invoke("tune-cache", "--help").stdout.split())
    for part in ("EvolKV", "--kv-profile", '{"prompt": ..., "answer": ...}', "--attention-scores", "--holdout"):
        assert part in text
    # A policy of its own, and no profile to start from.
    assert text.count("--kv-policy") == 1
    assert "--kv-budget-tokens" not in text
