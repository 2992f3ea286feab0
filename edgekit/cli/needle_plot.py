"""A heat map of the needle test, for `edgekit eval --plot`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from edgekit.errors import MissingExtraError, StorageError, UsageError, one_of

if TYPE_CHECKING:
    from edgekit.runtime.needle import NeedleReport

SUFFIXES = (".png", ".svg", ".pdf")


def check_writable(what: str, path: Path) -> None:
    """Refuses a file that could not be written after a long evaluation.

    Raises:
        UsageError: It is a directory, or its directory is missing or cannot be written.
    """
    if path.is_dir():
        raise UsageError(f"cannot write {what} to {str(path)!r}: it is a directory")
    if not path.parent.is_dir():
        raise UsageError(f"cannot write {what} to {str(path)!r}: there is no directory {str(path.parent)!r}")
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"cannot write {what} to {str(path)!r}: {str(path.parent)!r} cannot be written")


def check_plot(path: Path) -> None:
    """Refuses, before anything is measured, a plot that could not be drawn afterwards.

    Raises:
        UsageError: The file's name has another suffix than a picture has, or it cannot be written.
        MissingExtraError: matplotlib is not installed.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"the suffix of the plot {str(path)!r} is {one_of(path.suffix.lower(), SUFFIXES)}")
    check_writable("the plot", path)
    try:
        import matplotlib.figure  # noqa: F401 - only whether it is there
    except ImportError as error:
        raise MissingExtraError("matplotlib", "plot") from error


def draw_needle(report: NeedleReport, path: Path, title: str) -> None:
    """Draws a cell for each length and depth, coloured and labelled by the share of prompts that were answered.

    Args:
        report: What was measured.
        path: File to write, whole or not at all; its suffix says the format.
        title: What stands above.

    Raises:
        StorageError: The disk refused the write.
    """
    from matplotlib.figure import Figure

    lengths, depths = report.lengths, report.depths
    shares = [[cell.accuracy for cell in column] for column in zip(*map(report.row, lengths), strict=True)]
    figure = Figure(figsize=(2.5 + 0.8 * len(lengths), 1.8 + 0.45 * len(depths)), layout="constrained")
    axis = figure.subplots()
    image = axis.imshow(shares, cmap="cividis", vmin=0.0, vmax=1.0, aspect="auto")
    axis.set_xticks(range(len(lengths)), [str(length) for length in lengths])
    axis.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
    axis.set_xlabel("prompt, tokens")
    axis.set_ylabel("depth of the needle")
    axis.set_title(title, fontsize="medium", wrap=True)
    for y, row in enumerate(shares):
        for x, share in enumerate(row):
            axis.text(x, y, f"{share:.0%}", ha="center", va="center", color="white" if share < 0.5 else "black")
    figure.colorbar(image, label="answered", format="{x:.0%}")
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        figure.savefig(partial, format=path.suffix[1:].lower(), dpi=150)
        partial.replace(path)
    except OSError as error:
        raise StorageError(f"cannot write {str(path)!r}: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)
