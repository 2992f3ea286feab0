"""Lay out the installed shape of the package in build/links/edgekit, as links to files, for static tools.

Type checkers and import-linter read files and never run import hooks, so the package-dir mapping of an editable
install is invisible to them. In this tree they find every module under the name that it is imported by. Links to
folders would not do: some tools do not walk into them. Import-linter reads its contracts from the folder it runs in,
so pyproject.toml is linked too.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import tomli

ROOT = Path(__file__).resolve().parent.parent
LINKS = ROOT / "build" / "links"


def main() -> None:
    """Replaces build/links by a tree of links to the files that exist now."""
    config = tomli.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    shutil.rmtree(LINKS, ignore_errors=True)
    for package, folder in config["tool"]["setuptools"]["package-dir"].items():
        for source in (ROOT / folder).rglob("*"):
            if source.is_file() and source.suffix != ".pyc":
                link = LINKS.joinpath(*package.split("."), source.relative_to(ROOT / folder))
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(source)
    (LINKS / "pyproject.toml").symlink_to(ROOT / "pyproject.toml")


if __name__ == "__main__":
    main()
