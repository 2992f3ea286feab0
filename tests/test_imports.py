from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {
    "edgekit": "edgekit",
    "edgekit.devices": "devices",
    "edgekit.export": "export",
    "edgekit.runtime": "runtime",
}
WORKBENCH = ("torch", "transformers", "onnx", "onnx_ir")
LAZY = ("rich", "jinja2")
# The development environment does without the harness, which brings forty packages.
NEEDS_MORE = {"edgekit.integrations.lm_eval_model": "lm_eval"}


def _modules(*packages: str) -> list[str]:
    """The names of all modules of the packages, from the files."""
    names = []
    for package in packages:
        folder = ROOT / FOLDERS[package]
        for file in sorted(folder.rglob("*.py")):
            parts = [part for part in file.relative_to(folder).with_suffix("").parts if part != "__init__"]
            name = ".".join([package, *parts])
            if "__main__" not in parts and importlib.util.find_spec(NEEDS_MORE.get(name, "edgekit")) is not None:
                names.append(name)
    return names


def _loaded_after(code: str, cwd: Path) -> set[str]:
    """Runs `code` in a new interpreter and returns the modules that it ends with."""
    report = "import json, sys; print(json.dumps([name for name, module in sys.modules.items() if module]))"
    result = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return set(json.loads(result.stdout))


def test_importing_the_runtime_loads_nothing_of_the_workbench(tmp_path: Path) -> None:
    loaded = _loaded_after("import edgekit.runtime", tmp_path)
    assert "edgekit.runtime" in loaded
    assert loaded.isdisjoint(WORKBENCH + LAZY)


def test_every_module_of_the_runtime_works_where_the_workbench_is_not_installed(tmp_path: Path) -> None:
    modules = _modules("edgekit.runtime", "edgekit.devices")
    block = f"import sys; sys.modules.update(dict.fromkeys({WORKBENCH}))"
    loaded = _loaded_after(f"{block}\nimport {', '.join(modules)}", tmp_path)
    assert loaded.issuperset(modules)


def test_no_module_is_imported_twice() -> None:
    # In the root of the checkout, `import export` would work and make a second copy of edgekit.export.
    modules = _modules(*FOLDERS)
    loaded = _loaded_after(f"import {', '.join(modules)}", ROOT)
    assert loaded.issuperset(modules)
    assert loaded.isdisjoint({"devices", "export", "runtime"})


@pytest.mark.parametrize("name", _modules(*FOLDERS))
def test_every_name_that_a_module_declares_public_is_there(name: str) -> None:
    module = importlib.import_module(name)
    declared: list[str] = getattr(module, "__all__", [])
    assert [attribute for attribute in declared if not hasattr(module, attribute)] == []


@pytest.mark.parametrize("name", ["edgekit", "edgekit.runtime"])
def test_a_public_package_declares_its_names_once(name: str) -> None:
    declared = importlib.import_module(name).__all__
    assert declared
    assert len(declared) == len(set(declared))
