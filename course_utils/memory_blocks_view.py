"""The picture of an allocator's blocks: one bar a segment, cut into living, waiting and free pieces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from course_utils.views import mebibytes

if TYPE_CHECKING:
    from course_utils.memory_blocks import Blocks, Segment

_MOST_BARS = 14
_NAMES = {"live": "a tensor lives in it", "waiting": "freed, another stream still uses it", "free": "free"}


def draw_blocks(blocks: Blocks, request_bytes: int | None = None, ax: Any = None) -> Any:
    """Draw the largest segments, in the order of their addresses, and a request below them; returns the figure."""
    from course_utils import plots

    looks = {
        "live": (plots.BLUE, ""),
        "waiting": (plots.ORANGE, "\\\\"),
        "free": ("white", ".."),
    }
    shown = _chosen(blocks)
    bars = len(shown) + (request_bytes is not None)
    alt = _alt(blocks, request_bytes)
    if ax is None:
        fig, ax = plots.figure(alt, height_in=1.6 + 0.36 * max(bars, 1))
    else:
        fig = ax.figure
        if isinstance(fig, plots.CourseFigure):
            fig.alt = f"{fig.alt} {alt}".strip()
    with plots.style():
        for row, segment in enumerate(shown):
            left = 0.0
            for block in segment.blocks:
                colour, hatch = looks[block.state]
                width = block.size_bytes / 2**20
                ax.barh(row, width, 0.68, left, color=colour, hatch=hatch, edgecolor=plots.GREY, linewidth=0.8)
                left += width
        labels = [f"segment {row}" for row in range(1, len(shown) + 1)]
        if request_bytes is not None:
            ax.barh(len(shown), request_bytes / 2**20, 0.68, color=plots.PALE, hatch="//", edgecolor=plots.VERMILLION)
            ax.annotate(
                f"asked for: {mebibytes(request_bytes)}",
                (request_bytes / 2**20, len(shown)),
                (7, 0),
                textcoords="offset points",
                va="center",
                color=plots.INK,
            )
            labels.append("request")
        ax.set_yticks(range(len(labels)), labels)
        ax.set_ylim(len(labels) - 0.4, -0.6)
        ax.tick_params(axis="y", length=0)
        ax.grid(visible=False)
        widest = max([segment.size_bytes for segment in shown] + [request_bytes or 0, 2**20]) / 2**20
        ax.set_xlim(0, widest * (1.35 if request_bytes is not None else 1.02))
        ax.set_xlabel("MiB from the segment's start")
        left_out = len(blocks.segments) - len(shown)
        ax.set_title(blocks.source + (f"; {left_out} smaller segments not drawn" if left_out else ""))
        _legend(ax, blocks, looks)
        if not shown:
            ax.text(0.5, 0.5, "no segments", transform=ax.transAxes, ha="center", va="center", color=plots.INK)
    return fig


def _chosen(blocks: Blocks) -> list[Segment]:
    largest = sorted(blocks.segments, key=lambda segment: -segment.size_bytes)[:_MOST_BARS]
    return sorted(largest, key=lambda segment: segment.address)


def _legend(ax: Any, blocks: Blocks, looks: dict[str, tuple[str, str]]) -> None:
    from matplotlib.patches import Patch

    from course_utils.plots import GREY

    present = {block.state for segment in blocks.segments for block in segment.blocks}
    patches = [
        Patch(facecolor=looks[state][0], hatch=looks[state][1], edgecolor=GREY, label=name)
        for state, name in _NAMES.items()
        if state in present
    ]
    if patches:
        place: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "borderaxespad": 0.2}
        ax.legend(handles=patches, frameon=False, ncols=len(patches), **place)  # on the bars it would hide them


def _alt(blocks: Blocks, request_bytes: int | None) -> str:
    text = (
        f"{len(blocks.segments)} segments ({blocks.source}), {mebibytes(blocks.reserved_bytes)} reserved, of it "
        f"{mebibytes(blocks.free_bytes)} free; the largest free piece has {mebibytes(blocks.largest_free_bytes)}."
    )
    return text if request_bytes is None else f"{text} Asked for: {mebibytes(request_bytes)}."
