from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any, TypeAlias

from edgekit.families import FAMILIES

Invoke: TypeAlias = Callable[..., Any]


def test_every_family_is_listed_with_what_it_covers(invoke: Invoke) -> None:
    known = invoke("families", "--json").json
    assert [family["name"] for family in known] == [family.name for family in FAMILIES]
    (llama,) = [family for family in known if family["name"] == "llama"]
    assert llama["model_types"] == ["llama"]
    assert llama["gguf_architectures"] == ["llama"]
    assert "SmolLM2" in llama["covers"]
    assert all(family["covers"] for family in known)


def test_the_list_for_people_has_the_same(invoke: Invoke) -> None:
    outcome = invoke("families")
    assert (outcome.status, outcome.stderr) == (0, "")
    assert outcome.stdout.count("model_type in config.json: ") == len(FAMILIES)
    assert "    general.architecture in GGUF: gptneox\n" in outcome.stdout


def test_the_list_needs_nothing_of_the_workbench() -> None:
    block = "import sys; sys.modules.update(dict.fromkeys(('torch', 'transformers', 'onnx', 'onnxruntime', 'gguf')))"
    command = [sys.executable, "-c", f"{block}; from edgekit.cli import main; main()", "families"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.startswith("llama: ")
