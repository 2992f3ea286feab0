from __future__ import annotations

import re
from pathlib import Path

import pytest

from edgekit.cli.needle_plot import check_plot, check_writable, draw_needle
from edgekit.errors import StorageError, UsageError
from edgekit.runtime.needle import NeedleCell, NeedleReport

CELLS = tuple(
    NeedleCell(length_tokens=length, depth=depth, samples=4, correct=correct)
    for length, depth, correct in [
        (512, 0.0, 4),
        (512, 0.5, 1),
        (512, 1.0, 3),
        (4096, 0.0, 0),
        (4096, 0.5, 2),
        (4096, 1.0, 4),
    ]
)
REPORT = NeedleReport(cells=CELLS, samples=24, correct=14, accuracy=14 / 24)


def test_a_cell_for_each_length_and_depth_says_its_share(tmp_path: Path) -> None:
    draw_needle(REPORT, tmp_path / "plot.svg", "what it is")
    # matplotlib draws letters as paths, and says in comments which.
    said = re.findall(r"<!-- (.*?) -->", (tmp_path / "plot.svg").read_text(encoding="utf-8"))
    assert said[:6] == ["512", "4096", "prompt, tokens", "0%", "50%", "100%"]
    shares = [text for text in said[6:] if text.endswith("%")]
    assert shares[:6] == ["100%", "0%", "25%", "50%", "75%", "100%"]  # a row for each depth
    assert "what it is" in said
    assert [path.name for path in tmp_path.iterdir()] == ["plot.svg"]


@pytest.mark.parametrize(("name", "start"), [("a.png", b"\x89PNG"), ("a.PDF", b"%PDF"), ("a.svg", b"<?xml")])
def test_the_suffix_says_the_format(tmp_path: Path, name: str, start: bytes) -> None:
    check_plot(tmp_path / name)
    draw_needle(REPORT, tmp_path / name, "title")
    assert (tmp_path / name).read_bytes().startswith(start)


@pytest.mark.parametrize("name", ["a", "a.jpg", "a.png.txt"])
def test_other_suffixes_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"the suffix of the plot .* is .*; known: \.pdf, \.png, \.svg"):
        check_plot(tmp_path / name)


def test_a_plot_replaces_one_that_was_there(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_text("old")
    draw_needle(REPORT, tmp_path / "a.png", "title")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "a.png").mkdir()
    with pytest.raises(UsageError, match=r"cannot write the plot to '.*a.png': it is a directory"):
        check_plot(tmp_path / "a.png")
    with pytest.raises(StorageError, match=r"cannot write '.*a.png'"):
        draw_needle(REPORT, tmp_path / "a.png", "title")
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write anywhere
    with pytest.raises(UsageError, match=r"cannot write the tasks to .* cannot be written"):
        check_writable("the tasks", tmp_path / "a")
