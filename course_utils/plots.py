"""The charts that lessons share, in the house style of course_utils.figures, whose calls can be imported from here too.

    fig, ax = figure("PyTorch on the CPU takes about as long as NumPy.")
    bars(ax, ["NumPy", "PyTorch, CPU"], [12.0, 11.2], "ms")
    show(fig)

Importing this module imports matplotlib; a module that must import fast imports it inside its drawing functions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from typing import Any

from matplotlib.axes import Axes

from course_utils.figures import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    HATCHES,
    INK,
    ORANGE,
    PALE,
    STYLESHEET,
    VERMILLION,
    CourseFigure,
    Picture,
    figure,
    render,
    save,
    show,
    style,
)
from course_utils.views import MISSING, number

__all__ = [
    "BLACK",
    "BLUE",
    "GREEN",
    "GREY",
    "HATCHES",
    "INK",
    "ORANGE",
    "PALE",
    "STYLESHEET",
    "VERMILLION",
    "CourseFigure",
    "Picture",
    "bars",
    "figure",
    "idle_stretches",
    "render",
    "save",
    "show",
    "style",
    "trace",
]

IDLE_BELOW_PERCENT = 10.0
IDLE_LABEL = "idle (below 10 %)"


def bars(
    ax: Axes,
    labels: Sequence[str],
    values: Sequence[float | None],
    unit: str,
    errors: Sequence[float | None] | None = None,
    *,
    log: bool = False,
    emphasis: Collection[str] = (),
    title: str = "",
) -> None:
    """Horizontal bars, the first on top, each with its value and unit at its end; None is a hollow mark and "n/a".

    The values also join the figure's alt text, for those who do not see the bars. `errors` are half-widths in the same
    unit. `log` draws a logarithmic axis. Labels in `emphasis` get a second colour and a hatch.
    """
    _same_length("labels", labels, "values", values)
    spread: Sequence[float | None] = [None] * len(values) if errors is None else errors
    _same_length("labels", labels, "errors", spread)
    known = [value for value in map(_finite, values) if value is not None]
    if any(value < 0 or (log and value == 0) for value in known):
        raise ValueError(f"Bars need values {'above' if log else 'of at least'} 0 here: {list(values)}.")
    texts = [number(value, unit, _digits(value or 0)) for value in map(_finite, values)]
    if isinstance(ax.figure, CourseFigure):
        ax.figure.alt += f" {title or 'Bars'}: {', '.join(map(' '.join, zip(labels, texts, strict=True)))}."
    with style():
        if log:
            ax.set_xscale("log")
            ax.xaxis.set_minor_formatter(lambda value, _: "")
        for row, (label, value, error) in enumerate(zip(labels, map(_finite, values), spread, strict=True)):
            if value is None:
                # At the axis, in its own coordinates: on a logarithmic axis there is no 0 to put it at.
                where = ax.get_yaxis_transform()
                ax.plot([0.022], [row], "o", transform=where, clip_on=False, mfc="white", mec=GREY, mew=1.8)
                ax.annotate(MISSING, (0.022, row), (10, 0), where, "offset points", va="center", color=INK)
                continue
            marked = label in emphasis
            colour, hatch = (VERMILLION, HATCHES[1]) if marked else (BLUE, HATCHES[0])
            ax.barh(row, value, height=0.62, color=colour, hatch=hatch, edgecolor="white" if marked else colour)
            half = _finite(error) or 0.0
            if half:
                low = min(half, value * 0.99) if log else min(half, value)
                ax.errorbar(value, row, xerr=[[low], [half]], fmt="none", ecolor=INK, elinewidth=2, capsize=5)
            ax.annotate(texts[row], (value + half, row), (7, 0), textcoords="offset points", va="center", color=INK)
        ax.set_yticks(range(len(labels)), labels)
        ax.set_ylim(len(labels) - 0.45, -0.55)
        ax.tick_params(axis="y", length=0)
        ax.grid(visible=False)  # each bar says its value: a grid would only cross the words
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
        ax.set_xlabel(unit)
        if known and not log:
            ax.set_xlim(0, (max(known) or 1.0) * 1.15)
        elif known:
            ax.set_xlim(10 ** math.floor(math.log10(min(known)) - 0.3), max(known) * 2)
        if title:
            ax.set_title(title)


def trace(
    ax: Axes,
    seconds: Sequence[float],
    percent_values: Sequence[float | None],
    *,
    label: str = "",
    title: str = "",
    legend: bool = True,
    mark_idle: bool = True,
) -> None:
    """Utilisation in percent over time in seconds: None leaves a gap, idle stretches (below 10 %) are hatched.

    Call it again on the same axes for a second line, with a `label` for each and `mark_idle=False`.
    """
    stretches = idle_stretches(seconds, percent_values)
    values = [_finite(value) for value in percent_values]
    with style():
        # Steps change half-way between two samples, as do the idle stretches. A single sample has no width: a marker.
        gapped = [math.nan if value is None else value for value in values]
        marker = "o" if len(values) == 1 else ""
        ax.plot(list(seconds), gapped, drawstyle="steps-mid", marker=marker, label=label or "_unnamed")
        if stretches and mark_idle:
            spans = [(start, end - start) for start, end in stretches]
            ax.broken_barh(
                spans,
                (-3, 108),
                facecolor=PALE,
                edgecolor=ORANGE,
                hatch="//",
                linewidth=0,
                zorder=0.5,
                label=IDLE_LABEL,
            )
        if all(value is None for value in values):
            ax.text(0.5, 0.5, "no reading", transform=ax.transAxes, ha="center", va="center", color=INK)
        ax.margins(x=0 if len(values) > 1 else 0.05)
        ax.set_ylim(-3, 105)
        ax.set_yticks([0, 25, 50, 75, 100])
        ax.set_ylabel("busy (%)")
        cell = ax.get_subplotspec()
        if cell is None or cell.is_last_row():
            ax.set_xlabel("time (s)")
        if title:
            ax.set_title(title)
        handles, names = ax.get_legend_handles_labels()
        if legend and handles:
            # On the title's line, at the right: over the curve it would hide it, beside it it would narrow it.
            place: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "borderaxespad": 0.2}
            ax.legend(handles, names, frameon=False, ncols=len(handles), **place)


def idle_stretches(
    seconds: Sequence[float], percent_values: Sequence[float | None], below: float = IDLE_BELOW_PERCENT
) -> list[tuple[float, float]]:
    """(start, end) in seconds of each stretch under `below` percent; a sample counts half-way to its neighbours."""
    _same_length("seconds", seconds, "percent_values", percent_values)
    if any(later < earlier for earlier, later in itertools.pairwise(seconds)):
        raise ValueError("seconds must not run backwards: sort the samples by time first.")
    middles = [(earlier + later) / 2 for earlier, later in itertools.pairwise(seconds)]
    edges = [*seconds[:1], *middles, *seconds[-1:]]
    stretches: list[tuple[float, float]] = []
    for index, value in enumerate(map(_finite, percent_values)):
        if value is None or value >= below:
            continue
        start, end = edges[index], edges[index + 1]
        if stretches and stretches[-1][1] == start:
            start = stretches.pop()[0]
        stretches.append((start, end))
    return stretches


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def _digits(value: float) -> int:
    """Decimals that leave three significant digits."""
    return 0 if value == 0 else max(0, 2 - math.floor(math.log10(value)))


def _same_length(first: str, left: Sequence[object], second: str, right: Sequence[object]) -> None:
    if len(left) != len(right):
        raise ValueError(f"{first} and {second} must be equally long, not {len(left)} and {len(right)}.")
