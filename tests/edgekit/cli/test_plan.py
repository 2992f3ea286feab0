from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from edgekit.runtime.cache_profile import CacheProfile, write_profile

Invoke: TypeAlias = Callable[..., Any]
MakeBundle: TypeAlias = Callable[..., Path]
TinyCheckpoint: TypeAlias = Callable[[str], Path]

ROW = re.compile(r"(?P<what>\S.*?\S) +(?P<size>[\d.]+ [KMGT]?i?B) +(?P<bytes>\d+)")


def _table(text: str) -> tuple[dict[str, int], dict[str, str]]:
    """The rows with their bytes, and the settings below them."""
    rows, _, settings = text.partition("\n\n")
    found = [ROW.fullmatch(line) for line in rows.splitlines()[1:]]
    assert all(found)
    sizes = {row["what"]: int(row["bytes"]) for row in found if row}
    return sizes, {line[:10].strip(): line[10:] for line in settings.splitlines()}


def test_the_table_has_a_row_for_each_thing_and_they_add_up(invoke: Invoke, bundle: Path) -> None:
    outcome = invoke("plan", bundle, "--memory-budget", "1GiB")
    assert (outcome.status, outcome.stderr) == (0, "")
    sizes, settings = _table(outcome.stdout)
    assert list(sizes) == [
        "base: interpreter, libraries, tokenizer",
        "weights, as the backend holds them",
        "KV cache of 2 layers",
        "workspace of the largest step",
        "total",
        "memory budget",
        "left of the budget",
    ]
    values = list(sizes.values())
    assert sum(values[:4]) == values[4]
    assert (values[5], values[5] - values[4]) == (1 << 30, values[6])
    assert sizes["KV cache of 2 layers"] == 256 * (2 * 256 + 4)
    assert settings == {
        "KV cache": "fp32, 256 slots",
        "policy": "stop",
        "context": "256 tokens",
        "prefill": "in steps of at most 128 tokens",
    }


def test_the_columns_are_aligned(invoke: Invoke, bundle: Path) -> None:
    header, *rows = invoke("plan", bundle, "--memory-budget", "1GiB").stdout.partition("\n\n")[0].splitlines()
    assert header.split() == ["what", "size", "bytes"]
    assert {len(row) for row in rows} == {len(header)}
    for word in ("size", "bytes"):
        end = header.index(word) + len(word)
        assert all(row[end - 1] != " " and row[end : end + 2].strip() == "" for row in rows)
    assert "1.0 GiB" in rows[-2]


def test_json_has_what_the_table_has_in_bytes(invoke: Invoke, bundle: Path) -> None:
    options = ("--memory-budget", "1GiB", "--kv-cache-dtype", "int8", "--ctx-size", 200)
    got = invoke("plan", bundle, *options, "--json").json
    sizes, _ = _table(invoke("plan", bundle, *options).stdout)
    assert got == {
        "budget_bytes": 1 << 30,
        "base_bytes": sizes["base: interpreter, libraries, tokenizer"],
        "weights_bytes": sizes["weights, as the backend holds them"],
        "cache_bytes": 256 * (2 * 80 + 4),
        "workspace_bytes": sizes["workspace of the largest step"],
        "total_bytes": sizes["total"],
        "kept_bytes": None,
        "kv_cache_dtype": "int8",
        "capacity_tokens": 200,
        "context_tokens": 200,
        "chunk_tokens": 128,
        "slot_bytes": [164],
        "policy": "stop",
    }


def test_layers_with_a_sliding_window_have_a_row_of_their_own(
    invoke: Invoke, make_bundle: MakeBundle, tiny_checkpoint: TinyCheckpoint
) -> None:
    sizes, _ = _table(invoke("plan", make_bundle(tiny_checkpoint("gemma2"), "fp32"), "--memory-budget", "1GiB").stdout)
    cached = {name: size for name, size in sizes.items() if name.startswith("KV cache")}
    # A window of 7 tokens and what may be rolled back fit into one bucket.
    assert cached == {"KV cache of 1 layers that see 7 tokens": 128 * 260, "KV cache of 1 layers": 256 * 260}


def test_what_a_compressed_prompt_keeps_has_a_row_too(invoke: Invoke, bundle: Path, tmp_path: Path) -> None:
    # A plan reads the manifest only, so that it is enough that this says so.
    path = Path(shutil.copytree(bundle, tmp_path / "scores.edge"))
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "attention_scores": True}))
    profile = CacheProfile(
        schema_version=1, producer="", bundle="", budgets_tokens=(60, 40), method="snapkv", score=0.0, settings={}
    )
    write_profile(tmp_path / "profile.json", profile)
    options = ("--memory-budget", "1GiB", "--kv-policy", "laq")
    sizes, settings = _table(invoke("plan", path, *options, "--kv-budget-tokens", 64).stdout)
    assert sizes["KV cache, of a prompt that is compressed"] == 64 * 516
    assert settings["policy"] == "laq, 64 tokens per layer"
    sizes, settings = _table(invoke("plan", path, *options, "--kv-profile", tmp_path / "profile.json").stdout)
    assert sizes["KV cache, of a prompt that is compressed"] == (60 + 40) * 260
    assert sizes["KV cache of 2 layers"] == 256 * 2 * 260
    assert settings["policy"] == "laq, 50 tokens per layer"
    assert invoke("plan", path, *options, "--kv-budget-tokens", 64, "--json").json["kept_bytes"] == 64 * 516


def test_a_window_has_the_slots_of_its_budget(invoke: Invoke, bundle: Path) -> None:
    sizes, settings = _table(invoke("plan", bundle, "--kv-policy", "window", "--kv-budget-tokens", 130).stdout)
    assert sizes["KV cache of 2 layers"] == 130 * 516
    assert (settings["KV cache"], settings["policy"]) == ("fp32, 130 slots", "window, 130 tokens per layer")


def test_a_refusal_names_settings_and_these_are_not_refused(invoke: Invoke, endless_bundle: Path) -> None:
    asked = ("--kv-cache-dtype", "fp32", "--ctx-size", 500_000)
    outcome = invoke("plan", endless_bundle, "--memory-budget", "200MiB", *asked)
    assert (outcome.status, outcome.stdout) == (4, "")
    (line,) = outcome.stderr.splitlines()
    assert line.startswith("error: 500000 tokens do not fit into the memory budget 200 MiB, which is ")
    proposed = line.partition("what would fit: ")[2].split(", or ")
    assert [setting.split()[0] for setting in proposed] == ["--ctx-size", "--kv-cache-dtype", "--memory-budget"]
    for setting in proposed:
        # Of an option that is given twice, the last counts.
        again = invoke("plan", endless_bundle, "--memory-budget", "200MiB", *asked, *setting.split(), "--json")
        assert again.status == 0
        assert again.json["total_bytes"] <= again.json["budget_bytes"]


def test_a_refusal_in_json_has_its_code(invoke: Invoke, bundle: Path) -> None:
    outcome = invoke("plan", bundle, "--memory-budget", "1MB", "--json")
    assert outcome.status == 4
    assert outcome.json["error"]["code"] == "does_not_fit"
    assert "what would fit: --memory-budget " in outcome.json["error"]["message"]


def test_a_plan_loads_nothing_heavy(bundle: Path) -> None:
    code = (
        "import sys, json\nfrom edgekit.cli import main\ntry:\n    main(sys.argv[1:])\nexcept SystemExit as ended:\n"
        "    print(json.dumps([ended.code, *sys.modules]))"
    )
    for options, status in (((), 0), (("--memory-budget", "1MB"), 4)):
        command = [sys.executable, "-c", code, "plan", str(bundle), *options]
        result = subprocess.run(command, capture_output=True, check=True)
        ended, *modules = json.loads(result.stdout.splitlines()[-1])
        assert ended == status
        assert set(modules).isdisjoint({"onnx_ir", "tokenizers", "torch"})
