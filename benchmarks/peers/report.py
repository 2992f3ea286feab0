"""What compare.py makes of its figures: medians, ratios, Markdown and a chart."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

OURS = "edgekit"


@dataclass(frozen=True, kw_only=True)
class EngineResult:
    """One engine on one model file.

    Attributes:
        name: Such as ``llama.cpp-q4_0``.
        version: Of the package and of what it computes with.
        format: How the weights are stored.
        size_bytes: All files that the engine loads.
        kv_cache: Type of the keys and values.
        tokens_per_s: Per row, ``pp512`` or ``tg32@4096``, the rate in every round.
        peak_memory_bytes: Per depth, the peak of a fresh process that decoded there.
    """

    name: str
    version: str
    format: str
    size_bytes: int
    kv_cache: str
    tokens_per_s: Mapping[str, Sequence[float]]
    peak_memory_bytes: Mapping[int, int]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A whole run.

    Attributes:
        model: File name of the GGUF.
        day: ISO date.
        cpu: Its name, and how many cores this process may use.
        threads: Threads of every engine.
        prompt: Where the tokens came from.
        engines: What was measured, in the order of the rounds.
        absent: Engines that could not be measured, and why.
    """

    model: str
    day: str
    cpu: str
    threads: int
    prompt: str
    engines: tuple[EngineResult, ...]
    absent: Mapping[str, str]


def ratio_of_rounds(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Returns the median over the rounds of the ratio within a round, which a drift of the machine leaves alone."""
    return statistics.median(mine / other for mine, other in zip(ours, theirs, strict=True))


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def rate(values: Sequence[float]) -> str:
    """Returns ``median (slowest-fastest)`` of the rounds, with three significant digits."""
    middle, low, high = (f"{value:.{1 if value < 99.95 else 0}f}" for value in _spread(values))
    return f"{middle} ({low}-{high})"


def markdown(comparison: Comparison) -> str:
    """Returns the report."""
    engines, rows, depths = comparison.engines, _rows(comparison), _depths(comparison)
    rounds = len(engines[0].tokens_per_s[rows[0]]) if engines else 0
    run = (comparison.model, comparison.day, comparison.cpu, f"{comparison.threads} threads", f"{rounds} rounds")
    parts = [f"{', '.join(run)}, {comparison.prompt}\n"]
    if engines:
        described = [(e.name, e.version, e.format, f"{e.size_bytes / 1e6:.1f}", e.kv_cache) for e in engines]
        parts.append(table(("engine", "version", "weights", "MB", "KV cache"), described))
        speeds = [(e.name, *(rate(e.tokens_per_s[row]) for row in rows)) for e in engines]
        parts.append("Tokens/s, median (slowest-fastest):\n")
        parts.append(table(("engine", *rows), speeds))
        peaks = [(e.name, *(f"{e.peak_memory_bytes[depth] / 1e6:.0f}" for depth in depths)) for e in engines]
        parts.append("Peak memory, MB, of a fresh process that read so many tokens and generated:\n")
        parts.append(table(("engine", *map(str, depths)), peaks))
    ratios = ratio_rows(comparison)
    if ratios:
        parts.append(
            "Ratios, ours to theirs (speed: median over the rounds; more is better. Memory: less is better):\n"
        )
        parts.append(table(("ratio", *rows, *(f"MB@{depth}" for depth in depths)), ratios))
    parts += [f"{name} is absent: {reason}\n" for name, reason in comparison.absent.items()]
    return "\n".join(parts)


def ratio_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """Returns a line per pair of one of our formats and a peer: speeds of all rows, then memory of all depths."""
    ours = [engine for engine in comparison.engines if engine.name.startswith(OURS)]
    peers = [engine for engine in comparison.engines if not engine.name.startswith(OURS)]
    return [
        (
            f"{mine.name} / {peer.name}",
            *(f"{ratio_of_rounds(mine.tokens_per_s[row], peer.tokens_per_s[row]):.2f}" for row in _rows(comparison)),
            *(f"{mine.peak_memory_bytes[depth] / peer.peak_memory_bytes[depth]:.2f}" for depth in _depths(comparison)),
        )
        for mine in ours
        for peer in peers
    ]


def draw(comparison: Comparison, path: Path) -> None:
    """Writes a chart: a panel per row of speeds and one for the memory at the largest depth, a bar per engine.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    engines, rows, deepest = comparison.engines, _rows(comparison), max(_depths(comparison))
    names = [engine.name for engine in engines]
    panels = [(f"{row}, tokens/s", [_spread(engine.tokens_per_s[row]) for engine in engines]) for row in rows]
    peaks = [engine.peak_memory_bytes[deepest] / 1e6 for engine in engines]
    panels.append((f"peak MB at {deepest}", [(peak, peak, peak) for peak in peaks]))
    figure = Figure(figsize=(3.2 * len(panels), 1.2 + 0.45 * len(names)), layout="constrained")
    colors = ["tab:blue" if name.startswith(OURS) else "tab:gray" for name in names]
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, (title, spreads) in zip(axes, panels, strict=True):
        middles = [middle for middle, _, _ in spreads]
        errors = [[middle - low for middle, low, _ in spreads], [high - middle for middle, _, high in spreads]]
        bars = axis.barh(names, middles, xerr=errors, color=colors, error_kw={"elinewidth": 1, "ecolor": "black"})
        axis.bar_label(bars, labels=[f"{middle:.0f}" for middle in middles], label_type="center", color="white")
        axis.set_title(title)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    figure.suptitle(f"{comparison.model}, {comparison.cpu}, {comparison.threads} threads, {comparison.day}")
    figure.savefig(path, dpi=120)


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    return statistics.median(values), min(values), max(values)


def _rows(comparison: Comparison) -> list[str]:
    return list(comparison.engines[0].tokens_per_s) if comparison.engines else []


def _depths(comparison: Comparison) -> list[int]:
    return list(comparison.engines[0].peak_memory_bytes) if comparison.engines else []
