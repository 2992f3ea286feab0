from __future__ import annotations

import pytest

from edgekit.errors import UsageError
from edgekit.sizes import MAX_BYTES, UNITS, format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512MiB", 536_870_912),
        ("512MB", 512_000_000),
        ("512 MB", 512_000_000),
        ("  1.5 GB\n", 1_500_000_000),
        ("1.5GiB", 1_610_612_736),
        ("3kB", 3000),
        ("3KB", 3000),
        ("3KiB", 3072),
        ("1TB", 10**12),
        ("0.5TiB", 1 << 39),
        ("+7B", 7),
        (".5KiB", 512),
        ("2.MB", 2_000_000),
        # Neither product is a whole number in float64.
        ("0.3GB", 300_000_000),
        ("4.35MB", 4_350_000),
        ("1.6B", 2),
    ],
)
def test_a_number_and_a_unit_make_bytes(text: str, size: int) -> None:
    assert parse_size(text, "memory budget") == size


@pytest.mark.parametrize("unit", UNITS)
def test_every_unit_is_read(unit: str) -> None:
    power = " kMGT".index(unit[0].replace("K", "k")) if unit != "B" else 0
    assert parse_size(f"2{unit}", "size") == 2 * (1024 if "i" in unit else 1000) ** power


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "512",
            "memory budget is '512', which may mean bytes or megabytes; give a unit, such as 512MiB (1 MiB is 1048",
        ),
        (" 1.5 ", "such as 1.5MiB (1 MiB"),
        ("1e3MB", "memory budget is '1e3MB'; it must be a number and a unit, such as 512MiB or 1.5GB"),
        ("NaN MiB", "'NaN MiB'; it must be a number and a unit"),
        ("inf MiB", "'inf MiB'; it must be a number and a unit"),
        ("1_000MB", "'1_000MB'; it must be a number and a unit"),
        ("1,5GB", "'1,5GB'; it must be a number and a unit"),
        ("MiB", "'MiB'; it must be a number and a unit"),
        ("", "''; it must be a number and a unit"),
        ("1 MiB 2", "'1 MiB 2'; it must be a number and a unit"),
        ("1..5MB", "'1..5MB'; it must be a number and a unit"),
        ("0MiB", "'0MiB'; it must be at least 1 byte"),
        ("-5MiB", "'-5MiB'; it must be at least 1 byte"),
        ("0.4B", "'0.4B'; it must be at least 1 byte"),
        ("9999999TiB", "'9999999TiB'; it must be at most 1048576.0 TiB"),
        (f"{'9' * 400}B", "it must be at most 1048576.0 TiB"),
        ("512mib", "memory budget is '512mib', whose unit is 'mib'; known: B, kB, "),
        ("512mib", "(did you mean 'MiB'?)"),
        ("512mb", "whose unit is 'mb'; known: B, kB, KB, MB, GB, TB, KiB, MiB, GiB, TiB (did you mean 'MB'?)"),
        ("512Mi", "whose unit is 'Mi'; known: "),
        ("512Mi", "(did you mean 'MiB'?)"),
        ("512 parsecs", "whose unit is 'parsecs'; known: "),
    ],
)
def test_what_is_no_size_is_refused_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_size(text, "memory budget")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [512, 512.0, None, b"512MiB", ["512MiB"]])
def test_what_is_no_text_is_refused(value: object) -> None:
    with pytest.raises(UsageError, match="it must be a text with a unit, such as '512MiB'"):
        parse_size(value, "memory budget")


def test_the_largest_size_is_read() -> None:
    assert parse_size("1048576TiB", "size") == MAX_BYTES


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (10_240, "10 KiB"),
        (5 << 20, "5.0 MiB"),
        (512 << 20, "512 MiB"),
        (1 << 30, "1.0 GiB"),
        (21_810_703_770, "20.3 GiB"),
        (3 << 40, "3.0 TiB"),
        (-(5 << 20), "-5.0 MiB"),
    ],
)
def test_a_size_is_written_in_its_largest_unit(size: int, text: str) -> None:
    assert format_size(size) == text
