from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from itertools import chain
from pathlib import Path

import tomli
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from edgekit.version import __version__

ROOT = Path(__file__).resolve().parent.parent
CONFIG = tomli.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = CONFIG["project"]
PACKAGE_DIR: dict[str, str] = CONFIG["tool"]["setuptools"]["package-dir"]
# optimum-cli finds commands by the files in this namespace, and in no other way. It belongs to optimum and to everyone
# who adds a command, so it has no __init__.py, and nothing else may be installed outside edgekit/.
COMMANDS = "optimum.commands.register"
COMMAND = "optimum/commands/register/register_edgekit.py"


def test_every_package_is_listed() -> None:
    # One that is not listed works in an editable install and is missing from the wheel, without a warning.
    found = [
        ".".join([package, *init.parent.relative_to(ROOT / folder).parts])
        for package, folder in PACKAGE_DIR.items()
        for init in (ROOT / folder).rglob("__init__.py")
    ]
    assert CONFIG["tool"]["setuptools"]["packages"] == sorted([*found, COMMANDS])


def test_every_requirement_has_exact_versions_in_the_constraints() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    constraints = [Requirement(line) for line in lines if not line.startswith("#")]
    assert [str(pin) for pin in constraints if [part.operator for part in pin.specifier] != ["=="]] == []

    pinned = {canonicalize_name(pin.name): pin.specifier for pin in constraints if not _is_for_another_python(pin)}
    texts = chain(PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
    for requirement in map(Requirement, texts):
        if _is_for_another_python(requirement):
            continue
        (pin,) = pinned[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(pin.version), requirement.name


def test_the_wheel_made_from_the_sdist_has_every_file_and_one_package_and_command(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for folder in PACKAGE_DIR.values():
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (tree / COMMAND).parent.mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE", COMMAND):
        shutil.copy(ROOT / name, tree / name)

    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path / "dist"), str(tree)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr

    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
        scripts = archive.read(f"edgekit-{__version__}.dist-info/entry_points.txt").decode()
    assert files == {
        "/".join([*package.split("."), *file.relative_to(tree / folder).parts])
        for package, folder in PACKAGE_DIR.items()
        for file in (tree / folder).rglob("*")
        if file.is_file()
    } | {COMMAND}
    assert {name.split("/")[0] for name in files - {COMMAND}} == {"edgekit"}
    assert "edgekit = edgekit.cli:main" in scripts


def _is_for_another_python(requirement: Requirement) -> bool:
    return requirement.marker is not None and not requirement.marker.evaluate()
