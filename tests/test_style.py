from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ("edgekit", "export", "runtime", "devices")
MADE = (".git", ".venv*", ".*_cache", "*.egg-info", "__pycache__", "build", "dist", "models")
FILE_LINES = 400
FUNCTION_LINES = 60
PARAMETERS = 7


def test_no_file_is_longer_than_the_budget() -> None:
    lengths = {str(path.relative_to(ROOT)): _count_lines(path) for path in _python_files(*SOURCE, "tests", "tools")}
    assert {name: lines for name, lines in lengths.items() if lines > FILE_LINES} == {}


def test_no_function_is_longer_than_the_budget() -> None:
    lengths = {name: (node.end_lineno or 0) - node.lineno + 1 for name, node in _functions()}
    assert {name: lines for name, lines in lengths.items() if lines > FUNCTION_LINES} == {}


def test_no_function_takes_more_parameters_than_the_budget() -> None:
    counts = {name: len(_parameters(node.args)) for name, node in _functions()}
    assert {name: count for name, count in counts.items() if count > PARAMETERS} == {}


def test_only_the_command_line_and_the_tools_print() -> None:
    prints = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in _python_files(*SOURCE, "tests")
        if not path.is_relative_to(ROOT / "edgekit" / "cli")
        for node in ast.walk(_parse(path))
        if isinstance(node, ast.Name) and node.id == "print"
    ]
    assert prints == []


def test_only_ci_names_a_folder_beside_the_checkout() -> None:
    # Joined here, so that this file does not name it either.
    needle = b"shared" + b"/"
    assert [str(path.relative_to(ROOT)) for path in _tree() if needle in path.read_bytes()] == [".ci/run"]


def test_there_are_at_least_as_many_lines_of_tests_as_of_source() -> None:
    assert sum(map(_count_lines, _python_files("tests"))) >= sum(map(_count_lines, _python_files(*SOURCE)))


def _tree() -> Iterator[Path]:
    """The files that belong to the project, as against those that tools made."""
    for folder, subfolders, names in os.walk(ROOT):
        subfolders[:] = [name for name in subfolders if not any(fnmatch(name, pattern) for pattern in MADE)]
        yield from (Path(folder, name) for name in names)


def _python_files(*folders: str) -> list[Path]:
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    assert files
    return files


def _functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path in _python_files(*SOURCE, "tests", "tools"):
        for node in ast.walk(_parse(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", node


def _parameters(arguments: ast.arguments) -> list[str]:
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    variadic = [argument for argument in (arguments.vararg, arguments.kwarg) if argument is not None]
    return [argument.arg for argument in (*named, *variadic) if argument.arg not in ("self", "cls")]


def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def _count_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())
