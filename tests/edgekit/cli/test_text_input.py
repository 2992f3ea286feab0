from __future__ import annotations

from pathlib import Path

import pytest

from edgekit.cli.text_input import read_file, without_line_end
from edgekit.errors import UsageError


def test_a_file_is_read_as_utf8(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes("Zwölf Boxkämpfer\r\n".encode())
    assert read_file(tmp_path / "text") == "Zwölf Boxkämpfer\r\n"


def test_a_file_in_another_encoding_is_refused_with_the_place(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes("Zwölf".encode("latin-1"))
    with pytest.raises(UsageError, match=r"'.*text' is not UTF-8: it has the byte 0xf6 at offset 2$"):
        read_file(tmp_path / "text")


@pytest.mark.parametrize(("name", "reason"), [("missing", "No such file or directory"), ("", "Is a directory")])
def test_a_file_that_cannot_be_read_is_refused_with_the_reason(tmp_path: Path, name: str, reason: str) -> None:
    with pytest.raises(UsageError, match=rf"^cannot read '.*': {reason}$"):
        read_file(tmp_path / name)


@pytest.mark.parametrize(
    ("text", "left"), [("a\n", "a"), ("a\r\n", "a"), ("a\n\n", "a\n"), ("a ", "a "), ("\na", "\na"), ("", "")]
)
def test_only_the_last_line_end_is_dropped(text: str, left: str) -> None:
    assert without_line_end(text) == left
