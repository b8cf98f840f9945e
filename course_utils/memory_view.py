"""The picture of a memory prediction: one stacked bar for each batch size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from course_utils.views import gibibytes, mebibytes, number

if TYPE_CHECKING:
    from course_utils.memory_model import MemoryParts

NAMES = ("parameters", "gradients", "optimizer", "activations", "other")


def draw_parts(parts: Sequence[MemoryParts], ax: Any = None, budget_bytes: int | None = None) -> Any:
    """Draw `parts`, largest batch at the bottom, the budget as a dashed line; returns the figure, with its alt text."""
    from course_utils import plots

    alt = _alt(parts, budget_bytes)
    if ax is None:
        fig, ax = plots.figure(alt, height_in=2.1 + 0.55 * len(parts))
    else:
        fig = ax.figure
        if isinstance(fig, plots.CourseFigure):
            fig.alt = f"{fig.alt} {alt}".strip()
    largest = max([each.peak_bytes for each in parts] + [budget_bytes or 0])
    unit, size = ("GiB", 2**30) if largest >= 2 * 2**30 else ("MiB", 2**20)
    looks = zip(
        (plots.BLUE, plots.ORANGE, plots.GREEN, plots.VERMILLION, plots.GREY), ("", "\\\\", "..", "//", ""), strict=True
    )
    with plots.style():
        left = [0.0] * len(parts)
        for index, (colour, hatch) in enumerate(looks):
            widths = [each.sizes()[index] / size for each in parts]
            ax.barh(
                range(len(parts)), widths, 0.62, left, color=colour, hatch=hatch, edgecolor="white", label=NAMES[index]
            )
            left = [start + width for start, width in zip(left, widths, strict=True)]
        for row, total in enumerate(left):
            ax.annotate(
                number(total, unit, 1 if unit == "GiB" else 0),
                (total, row),
                (7, 0),
                textcoords="offset points",
                va="center",
                color=plots.INK,
                backgroundcolor="white",
            )
        if budget_bytes is not None:
            ax.axvline(budget_bytes / size, color=plots.BLACK, linestyle="--", label="budget")
        ax.set_yticks(range(len(parts)), [f"batch {each.batch_size:,}" for each in parts])
        ax.set_ylim(len(parts) - 0.45, -0.55)
        ax.tick_params(axis="y", length=0)
        ax.grid(visible=False)
        ax.set_xlim(0, largest / size * 1.18)
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
        ax.set_xlabel(f"predicted peak memory ({unit})")
        place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0.0, 1.0), "borderaxespad": 0.2}
        ax.legend(frameon=False, ncols=3, **place)  # in one row it would be wider than the figure
    return fig


def _alt(parts: Sequence[MemoryParts], budget_bytes: int | None) -> str:
    bars = "; ".join(
        f"batch {each.batch_size}: {mebibytes(each.peak_bytes)}, of it "
        + ", ".join(f"{name} {mebibytes(size)}" for name, size in zip(NAMES, each.sizes(), strict=True))
        for each in parts
    )
    line = "" if budget_bytes is None else f" A line marks the budget of {gibibytes(budget_bytes)}."
    return f"Predicted peak memory as stacked bars: {bars}.{line}"
