from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest


def _run_without(library: str, code: str, cwd: Path) -> str:
    """Runs code where a library is not installed; returns the last line of what it complains about."""
    code = f"import sys; sys.modules[{library!r}] = None\n{code}"
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    return done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("library", ["optimum.modeling_base", "torch", "transformers"])
def test_a_missing_library_is_named_with_the_extra_that_brings_it(library: str, tmp_path: Path) -> None:
    said = _run_without(library, "from edgekit import EdgeModelForCausalLM", tmp_path)
    assert said == (
        f"edgekit.errors.MissingExtraError: {library.split('.')[0]} is not installed; "
        "run: pip install 'edgekit[optimum]'"
    )


def test_the_missing_harness_is_named(tmp_path: Path) -> None:
    said = _run_without("lm_eval", "import edgekit.integrations.lm_eval_model", tmp_path)
    assert said == "edgekit.errors.UnsupportedError: lm_eval is not installed; run: pip install lm-eval"


def test_an_export_names_the_extra_that_it_needs(tiny_gguf: Callable[[str, str], Path], tmp_path: Path) -> None:
    path = str(tiny_gguf("llama", "Q8_0"))
    code = f"from edgekit import EdgeModelForCausalLM as M; M.from_pretrained({path!r}, export=True)"
    said = _run_without("gguf", code, tmp_path)
    assert said == "edgekit.errors.MissingExtraError: gguf is not installed; run: pip install 'edgekit[export]'"


def test_edgekit_itself_loads_none_of_them(tmp_path: Path) -> None:
    code = "import sys, edgekit.cli, edgekit.runtime\nprint({'optimum', 'torch', 'transformers'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "set()", done.stderr
