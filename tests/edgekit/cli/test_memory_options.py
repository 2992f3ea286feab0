"""The options of memory and KV cache where a bundle is loaded: what they do, and the one line that wrong ones get."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from edgekit.ort import ort
from edgekit.runtime.cache_profile import CacheProfile, write_profile

Invoke: TypeAlias = Callable[..., Any]
MakeProfile: TypeAlias = Callable[..., Path]

USAGE, UNSUPPORTED, DOES_NOT_FIT, CORRUPT = 2, 3, 4, 5
TEXT = "The quick brown fox jumps over the lazy dog. " * 4
OPTIONS = ("--threads", 1, "--ignore-eos")
COMMANDS = {
    "plan": (),
    "run": ("Hello", "--max-tokens", 2),
    "chat": ("--prompt", "Hello", "--max-tokens", 2),
    "bench": ("--pp", 4, "--tg", 2, "--repetitions", 1),
}


@pytest.fixture(scope="session")
def scored_bundle(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    """A Llama whose graph says which tokens are attended to, in fp32."""
    from edgekit.export.exporter import ExportOptions, export_bundle
    from edgekit.export.graph.kv_cache import GraphOptions
    from edgekit.export.storage_plan import QuantizationOptions

    options = ExportOptions(
        quantization=QuantizationOptions(precision="fp32"), graph=GraphOptions(attention_scores=True)
    )
    output = tmp_path_factory.mktemp("scored") / "llama.edge"
    return export_bundle(tiny_llama, output, options, lambda *_: None).path


@pytest.fixture
def profile(tmp_path: Path) -> MakeProfile:
    def make(*budgets: int, **changes: Any) -> Path:
        path = tmp_path / "profile.json"
        content = CacheProfile(
            schema_version=1, producer="", bundle="", budgets_tokens=budgets, method="snapkv", score=0.0, settings={}
        )
        write_profile(path, content)
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        return path

    return make


@pytest.fixture
def nothing_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes sessions of ONNX Runtime and the hashing of files fail."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("more than the manifest was read")

    monkeypatch.setattr(ort, "InferenceSession", refuse)
    monkeypatch.setattr("edgekit.runtime.llm.verify_once", refuse)
    monkeypatch.setattr("edgekit.runtime.benchmark.verify_once", refuse)


def _message(outcome: Any, status: int) -> str:
    """The one line that a refusal consists of."""
    assert (outcome.status, outcome.stdout) == (status, "")
    (line,) = outcome.stderr.splitlines()
    assert line.startswith("error: ")
    assert "unexpected" not in line
    return str(line)


@pytest.mark.usefixtures("nothing_loads")
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (
            ("--memory-budget", "20MiB"),
            DOES_NOT_FIT,
            "this model does not fit into the memory budget 20 MiB, which is ",
        ),
        (("--memory-budget", "20MiB"), DOES_NOT_FIT, "; what would fit: --memory-budget "),
        (("--memory-budget", "512"), USAGE, "memory budget is '512', which may mean bytes or megabytes; give a unit"),
        (("--memory-budget", "1e3MB"), USAGE, "memory budget is '1e3MB'; it must be a number and a unit"),
        (("--memory-budget", "NaN MiB"), USAGE, "memory budget is 'NaN MiB'; it must be a number and a unit"),
        (("--memory-budget=-5MiB",), USAGE, "memory budget is '-5MiB'; it must be at least 1 byte"),
        (("--memory-budget", "0MiB"), USAGE, "memory budget is '0MiB'; it must be at least 1 byte"),
        (("--memory-budget", ""), USAGE, "memory budget is ''; it must be a number and a unit"),
        (("--memory-budget", "512mb"), USAGE, "(did you mean 'MB'?)"),
        (("--ctx-size", 0), USAGE, "context size is 0; it must be an integer of at least 1 token"),
        (("--ctx-size=-1",), USAGE, "context size is -1; it must be an integer of at least 1 token"),
        (
            ("--ctx-size", 257),
            USAGE,
            "context size is 257, the model was trained on 256 positions; ask for no more, or",
        ),
        (
            ("--kv-policy", "windw"),
            USAGE,
            "KV policy 'windw'; known: laq, laq++, snapkv, stop, window (did you mean 'w",
        ),
        (("--kv-policy", ""), USAGE, "KV policy ''; known: "),
        (("--kv-policy", "snapkv", "--kv-budget-tokens", 64), UNSUPPORTED, "export it with --attention-scores, or use"),
        (("--kv-budget-tokens", 64), USAGE, "KV policy 'stop' keeps all tokens and takes no budget of tokens; use win"),
        (("--kv-policy", "window", "--kv-budget-tokens", 0), USAGE, "KV budget is 0 tokens; it must be an integer of"),
        (("--kv-policy", "window", "--kv-budget-tokens=-3"), USAGE, "KV budget is -3 tokens; it must be an integer of"),
        (("--kv-policy", "window", "--kv-budget-tokens", 7), USAGE, "needs a budget of at least 8 tokens"),
        (("--kv-policy", "window", "--kv-budget-tokens", 257), USAGE, "KV budget is 257 tokens, the model was trained"),
        (
            ("--kv-policy", "window", "--kv-budget-tokens", 101, "--ctx-size", 100),
            USAGE,
            "KV budget is 101 tokens, which are more than the context of 100",
        ),
        (
            ("--kv-profile", "x.json"),
            USAGE,
            "KV policy 'stop' takes no cache profile; --kv-profile is for snapkv, laq, ",
        ),
        (
            ("--kv-policy", "window", "--kv-profile", "x.json"),
            USAGE,
            "KV policy 'window' takes no cache profile; --kv-",
        ),
    ],
)
def test_wrong_options_get_one_line_before_anything_is_loaded(
    command: str, options: tuple[object, ...], status: int, message: str, invoke: Invoke, bundle: Path
) -> None:
    assert message in _message(invoke(command, bundle, *COMMANDS[command], *options), status)


@pytest.mark.usefixtures("nothing_loads")
@pytest.mark.parametrize(("name", "budget"), [("snapkv", 32), ("laq", 1), ("laq++", 31)])
def test_policies_that_go_by_scores_need_a_budget_beyond_the_end_of_the_prompt(
    name: str, budget: int, invoke: Invoke, scored_bundle: Path, profile: MakeProfile
) -> None:
    command = ("run", scored_bundle, "Hello", "--kv-policy", name)
    assert f"KV policy '{name}' needs to know how many tokens of a prompt to keep; give --kv-budget-tokens, or" in (
        _message(invoke(*command), USAGE)
    )
    for option in (("--kv-budget-tokens", budget), ("--kv-profile", profile(64, budget))):
        line = _message(invoke(*command, *option), USAGE)
        assert f"needs a budget of more than 32 tokens per layer, which are the end of the prompt; got {budget}" in line
    line = _message(invoke(*command, "--kv-budget-tokens", 257), USAGE)
    assert "KV budget is 257 tokens, which are more than the context of 256; give fewer" in line


@pytest.mark.usefixtures("nothing_loads")
@pytest.mark.parametrize(
    ("changes", "status", "message"),
    [
        ({"budgets_tokens": [64, 64, 64]}, USAGE, "has budgets of 3 layers, the model has 2; make one for this model"),
        ({"schema_version": 9}, UNSUPPORTED, "has schema_version 9, this EdgeKit reads up to 1; upgrade with: pip "),
        (
            {"budgets_tokens": [64, 0]},
            CORRUPT,
            "is not valid: Expected `int` >= 1 - at `$.budgets_tokens[1]`; make one",
        ),
        ({"budget": 1}, CORRUPT, "unknown field `budget`"),
    ],
)
def test_a_wrong_profile_is_refused_by_name(
    changes: dict[str, Any], status: int, message: str, invoke: Invoke, scored_bundle: Path, profile: MakeProfile
) -> None:
    path = profile(64, 64, **changes)
    line = _message(invoke("run", scored_bundle, "Hello", "--kv-policy", "laq", "--kv-profile", path), status)
    assert message in line
    assert str(path) in line


@pytest.mark.usefixtures("nothing_loads")
def test_a_profile_that_is_missing_or_truncated_is_refused(
    invoke: Invoke, scored_bundle: Path, profile: MakeProfile, tmp_path: Path
) -> None:
    command = ("run", scored_bundle, "Hello", "--kv-policy", "snapkv", "--kv-profile")
    line = _message(invoke(*command, tmp_path / "no.json"), USAGE)
    assert line.endswith("no.json': No such file or directory")
    path = profile(64, 64)
    path.write_text(path.read_text()[:30])
    assert "is not valid" in _message(invoke(*command, path), CORRUPT)


@pytest.mark.parametrize("option", ["--ctx-size", "--kv-budget-tokens"])
def test_numbers_that_are_none_are_refused_by_the_command_line(option: str, invoke: Invoke, bundle: Path) -> None:
    for value in ("many", "1.5", "1e3", ""):
        assert option in _message(invoke("run", bundle, "Hello", option, value), USAGE)
    assert "'--kv-cache-dtype'" in _message(invoke("run", bundle, "Hello", "--kv-cache-dtype", "int4"), USAGE)


def test_megabytes_and_mebibytes_are_two_sizes(invoke: Invoke, bundle: Path) -> None:
    budgets = {
        unit: invoke("plan", bundle, "--memory-budget", f"512{unit}", "--json").json["budget_bytes"]
        for unit in ("MB", "MiB")
    }
    assert budgets == {"MB": 512_000_000, "MiB": 536_870_912}


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "int8"])
def test_a_run_has_the_context_and_the_dtype_that_are_asked_for(dtype: str, invoke: Invoke, bundle: Path) -> None:
    options = ("--ctx-size", 30, "--kv-cache-dtype", dtype, "--memory-budget", "8GiB", *OPTIONS)
    got = invoke("run", bundle, "Hello", *options, "--json").json
    assert got["finish_reason"] == "length"
    # Tokens are drawn until the last position is taken, and one more from there.
    assert got["usage"]["prompt_tokens"] + got["usage"]["completion_tokens"] == 31
    line = _message(invoke("run", bundle, TEXT, *options), DOES_NOT_FIT)
    assert "30" in line


def test_a_window_goes_on_beyond_its_budget_and_changes_nothing_before_it(invoke: Invoke, bundle: Path) -> None:
    command = ("run", bundle, "Hello", "--max-tokens", 120, *OPTIONS, "--json")
    whole = invoke(*command).json["token_ids"]
    window = invoke(*command, "--kv-policy", "window", "--kv-budget-tokens", 64).json["token_ids"]
    assert len(window) == 120
    assert window[:50] == whole[:50]
    assert window != whole
    long = invoke(*command, "--max-tokens", 400, "--kv-policy", "window", "--kv-budget-tokens", 64).json
    assert long["usage"]["completion_tokens"] == 400  # more than the context


def test_a_longer_context_than_was_trained_works_when_allowed(invoke: Invoke, bundle: Path) -> None:
    options = ("--ctx-size", 300, "--allow-long", "--max-tokens", 290, *OPTIONS)
    assert invoke("run", bundle, "Hello", *options, "--json").json["usage"]["completion_tokens"] == 290


@pytest.mark.parametrize("name", ["snapkv", "laq", "laq++"])
def test_a_prompt_is_compressed_by_budget_or_profile(
    name: str, invoke: Invoke, scored_bundle: Path, profile: MakeProfile
) -> None:
    command = ("run", scored_bundle, TEXT, "--max-tokens", 8, *OPTIONS, "--json", "--kv-policy", name)
    prompt = invoke(*command, "--kv-budget-tokens", 200).json["usage"]["prompt_tokens"]
    assert 60 < prompt < 200
    whole = invoke("run", scored_bundle, TEXT, "--max-tokens", 8, *OPTIONS, "--json").json["token_ids"]
    assert invoke(*command, "--kv-budget-tokens", 200).json["token_ids"] == whole  # nothing to compress
    compressed = invoke(*command, "--kv-budget-tokens", 34).json["token_ids"]
    assert compressed != whole
    assert invoke(*command, "--kv-profile", profile(34, 34)).json["token_ids"] == compressed
    moved = invoke(*command, "--kv-profile", profile(60, 60), "--kv-budget-tokens", 34).json["token_ids"]
    assert moved == compressed


def test_a_chat_goes_by_the_options_too(invoke: Invoke, bundle: Path) -> None:
    command = ("chat", bundle, "--prompt", "Hello", *OPTIONS, "--json")
    got = invoke(*command, "--ctx-size", 60).json["usage"]
    assert got["prompt_tokens"] + got["completion_tokens"] == 61
    window = ("--kv-policy", "window", "--kv-budget-tokens", 64, "--max-tokens", 300)
    assert invoke(*command, *window).json["usage"]["completion_tokens"] == 300


def test_a_measurement_goes_by_the_options_too(invoke: Invoke, bundle: Path) -> None:
    command = ("bench", bundle, "--pp", 40, "--tg", 20, "--repetitions", 1, "--threads", 1)
    assert invoke(*command, "--ctx-size", 40, "--kv-cache-dtype", "int8").status == 0
    line = _message(invoke(*command, "--ctx-size", 39), DOES_NOT_FIT)
    assert line == "error: pp40 needs 40 tokens, the context is 39; measure fewer"
    line = _message(invoke(*command, "--ctx-size", 60, "--depth", 30), DOES_NOT_FIT)
    assert line == "error: tg32@30 needs 62 tokens, the context is 60; measure fewer"
    window = ("--kv-policy", "window", "--kv-budget-tokens", 32, "--depth", 300)
    assert invoke(*command, *window).status == 0


def test_a_measurement_beyond_the_memory_is_refused(invoke: Invoke, endless_bundle: Path) -> None:
    command = ("bench", endless_bundle, "--tg", 0, "--kv-cache-dtype", "fp32", "--pp", 999_999, "--memory-budget")
    least = _message(invoke(*command, "1MB"), DOES_NOT_FIT).partition("what would fit: --memory-budget ")[2]
    # Enough for some of a million tokens.
    line = _message(invoke(*command, f"{int(least.removesuffix('MiB')) + 200}MiB"), DOES_NOT_FIT)
    assert "pp999999 needs 999999 tokens, the KV cache has room for " in line
    assert line.endswith("measure fewer, or give more memory")
