"""The picture of a roofline: both limits, the ridge, and what was measured under them, with labels that stay apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from course_utils.flops_units import percent, positive, si
from course_utils.roofline_labels import Box, along, overlap, place_labels
from course_utils.views import number

if TYPE_CHECKING:
    from course_utils.roofline import Roofline

_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p")
_MOST_POINTS = 12
_LONGEST_NAME = 32


def draw_roofline(roof: Roofline, points: Mapping[str, tuple[float, float, float]]) -> Any:
    """Draw `roof` with `points`, name → (FLOPs, bytes moved, seconds); returns the figure, with its alt text."""
    from course_utils import plots

    placed = _checked(points)
    fig, ax = plots.figure(_alt(roof, placed), height_in=4.6)
    ridge, peak = roof.ridge_flops_per_byte, roof.peak.flops_per_s
    intensities = [ridge, *(intensity for intensity, _ in placed.values())]
    left = min(intensities) / 8
    right = max(max(intensities) * 8, ridge * 30, (roof.datasheet_ridge_flops_per_byte or 0) * 3)
    lowest = min([roof.attainable(left), *(rate for _, rate in placed.values())])
    promised = roof.peak.datasheet_flops_per_s, roof.bandwidth.datasheet_bytes_per_s
    highest = max([peak, *(rate for _, rate in placed.values()), promised[0] or 0])
    with plots.style():
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.set_xlim(left, right)
        ax.set_ylim(lowest / 3, highest * 3)
        text = f"measured: {si(roof.bandwidth.bytes_per_s, 'B/s')}, {si(peak, 'FLOP/s')}"
        ax.plot([left, ridge, right], [roof.attainable(left), peak, peak], color=plots.BLACK, linestyle="-", label=text)
        if promised[0] is not None and promised[1] is not None:
            knee = max(promised[0] / promised[1], left)
            text = f"datasheet: {si(promised[1], 'B/s')}, {si(promised[0], 'FLOP/s')}"
            sheet = [min(left * promised[1], promised[0]), promised[0], promised[0]]
            ax.plot([left, knee, right], sheet, color=plots.GREY, linestyle="--", linewidth=2, label=text)
        ax.plot([ridge, ridge], [lowest / 3, peak], color=plots.GREY, linestyle=":", linewidth=1.5)
        for side, limit, shift in (("right", "memory", -6), ("left", "compute", 6)):
            words = f"limited by\n{limit}"
            ax.annotate(
                words,
                (ridge, lowest / 3),
                (shift, 5),
                textcoords="offset points",
                ha=side,
                va="bottom",
                color=plots.GREY,
            )
        colours = (plots.BLUE, plots.VERMILLION, plots.GREEN, plots.BLACK)
        for index, (intensity, rate) in enumerate(placed.values()):
            look = {"color": colours[index % 4], "marker": _MARKERS[index % len(_MARKERS)]}
            ax.plot([intensity], [rate], linestyle="", markersize=11, mec="white", mew=1.2, zorder=4, **look)
        ax.set_xlabel("arithmetic intensity (FLOP per byte moved)")
        ax.set_ylabel("FLOP/s")
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
        ax.yaxis.set_major_formatter(lambda value, _: si(value, "").replace(".00", "").replace(".0", ""))
        ax.minorticks_off()
        ax.set_title(f"Roofline of {roof.peak.device}, {roof.peak.dtype}".replace("torch.", ""))
        ax.legend(frameon=False, loc="upper left")  # above the roof nothing is reached
        _label(fig, ax, roof, placed)
    return fig


def _checked(points: Mapping[str, tuple[float, float, float]]) -> dict[str, tuple[float, float]]:
    """Name → (intensity, FLOP/s)."""
    if not isinstance(points, Mapping):
        raise TypeError(f"points must be a dict, name: (flops, moved_bytes, seconds), not {type(points).__name__}.")
    if len(points) > _MOST_POINTS:
        raise ValueError(
            f"A roofline shows {_MOST_POINTS} points at most, so that their labels fit, not {len(points)}."
        )
    found = {}
    for name, values in points.items():
        if not isinstance(values, Sequence) or len(values) != 3:
            raise ValueError(f"points[{name!r:.40}] must be (flops, moved_bytes, seconds), not {values!r:.80}.")
        flops, moved, seconds = (
            positive(f"points[{name!r:.40}], {part},", value)
            for part, value in zip(("flops", "moved_bytes", "seconds"), values, strict=True)
        )
        found[str(name)] = flops / moved, flops / seconds
    return found


def _alt(roof: Roofline, placed: Mapping[str, tuple[float, float]]) -> str:
    limits = (
        f"Roofline of {roof.peak.device}: {si(roof.bandwidth.bytes_per_s, 'B/s')} up to the ridge at "
        f"{number(roof.ridge_flops_per_byte, 'FLOP/byte', 1)}, {si(roof.peak.flops_per_s, 'FLOP/s')} from there on."
    )
    reached = " ".join(
        f"{name}: {si(rate, 'FLOP/s')} at {number(intensity, 'FLOP/byte', 1)}, "
        f"{percent(rate / roof.attainable(intensity))} of what {roof.limit(intensity)} allows."
        for name, (intensity, rate) in placed.items()
    )
    return f"{limits} {reached}".strip()


def _label(fig: Any, ax: Any, roof: Roofline, placed: Mapping[str, tuple[float, float]]) -> None:
    """Name each point beside it, what it reaches, and its share of what the roof allows."""
    from matplotlib.text import Text

    from course_utils import plots

    leader = {"arrowstyle": "-", "color": plots.GREY, "linewidth": 1, "shrinkA": 0, "shrinkB": 7}
    look: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 11, "color": plots.INK, "zorder": 5}
    names = []
    for name, (intensity, rate) in placed.items():
        words = f"{_short(name)}\n{si(rate, 'FLOP/s')}, {percent(rate / roof.attainable(intensity))}"
        names.append(
            ax.annotate(words, (intensity, rate), (0, 0), textcoords="offset points", arrowprops=leader, **look)
        )
    fig.draw_without_rendering()  # before it, nothing has its place
    scale = 72 / fig.dpi

    def box(thing: Any) -> Box:
        # An annotation's own extent would include its arrow.
        extent = Text.get_window_extent(thing) if isinstance(thing, Text) else thing.get_window_extent()
        return Box(extent.x0 * scale, extent.y0 * scale, extent.x1 * scale, extent.y1 * scale)

    def at(*place: float) -> tuple[float, float]:
        x, y = ax.transData.transform(place)
        return x * scale, y * scale

    frame = box(ax)
    words_taken = [box(each) for each in [*ax.texts[: -len(names) or None], ax.get_legend()]]
    lines: list[Box] = []
    for line in ax.lines[: len(ax.lines) - len(names)]:  # the points were drawn last
        lines += [bit for bit in along([at(*corner) for corner in line.get_xydata()]) if overlap(bit, frame)]
    sizes = [(each.right - each.left, each.top - each.bottom) for each in map(box, names)]
    places = place_labels([at(*place) for place in placed.values()], sizes, words_taken, lines, frame)
    for text, place in zip(names, places, strict=True):
        text.set_position((place.dx, place.dy))
        text.arrow_patch.set_visible(place.leader)


def _short(name: str) -> str:
    words = " ".join(name.split())
    words = words if len(words) <= _LONGEST_NAME else words[: _LONGEST_NAME - 1] + "…"
    return words.replace("$", r"\$")  # no mathematics
