"""Draws a trace: a figure of the whole, and the small live view that is redrawn while the work runs.

The live view is HTML with a few dozen bars, not a matplotlib figure: it costs about a millisecond to make, so that
watching does not change what is watched. It is drawn on the main thread only, through one display handle.
"""

from __future__ import annotations

import html
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from course_utils import views
from course_utils.monitor_trace import IDLE_BELOW_PERCENT, Trace, weighted_mean
from course_utils.monitor_types import Reading

if TYPE_CHECKING:
    from course_utils.plots import CourseFigure

_BUSY, _IDLE = "#0072B2", "#D55E00"  # plots.BLUE and plots.VERMILLION; importing plots would import matplotlib
_BARS = 60
_BAR_WIDTH, _HEIGHT = 8, 60
_MOST_DEVICES = 8


def draw(trace: Trace, device: int = 0) -> CourseFigure:
    """Busy % over time with its idle stretches; below it memory and power, where they were read."""
    from course_utils import plots

    summary = trace.summary(device)
    curves = [
        (trace.values(metric, device), scale, name)
        for metric, scale, name in (("used_bytes", 2**30, "memory (GiB)"), ("power_w", 1, "power (W)"))
    ]
    below = [curve for curve in curves if any(value is not None for value in curve[0])]
    alt = (
        f"Busy percent of {summary.device.name} ({summary.label}) over {views.number(trace.seconds, 's', 1)}: mean "
        f"{views.number(summary.busy_percent.mean, '%')}, median {views.number(summary.busy_percent.median, '%')}, "
        f"below {IDLE_BELOW_PERCENT:.0f} % for {_share(summary.idle_share)} of the time."
    )
    rows = 1 + len(below)
    fig, axes = plots.figure(alt, rows, share_x=True, height_in=3.2 + 1.3 * len(below))
    first, *others = axes if rows > 1 else (axes,)
    mean = views.number(summary.busy_percent.mean, "%")
    title = f"{summary.label}: {summary.device.name}, mean {mean}"
    plots.trace(first, trace.times_s, trace.values(device=device), title=title)
    with plots.style():
        for ax, (values, scale, name) in zip(others, below, strict=True):
            shown = [float("nan") if value is None else value / scale for value in values]
            ax.plot(trace.times_s, shown, drawstyle="steps-mid", marker="o" if len(values) == 1 else "")
            ax.set_ylim(0, 1.15 * max((value for value in shown if value == value), default=0) or 1)  # leaves NaN out
            ax.set_ylabel(name)
        if others:
            first.set_xlabel("")
            others[-1].set_xlabel("time (s)")
    return fig


class LiveView:
    """The last samples of a trace as a strip of bars, with the numbers beside it; text where there is no HTML."""

    def __init__(self, trace: Trace):
        self._trace = trace

    def __repr__(self) -> str:
        return "\n".join(self._line(device) for device in self._shown())

    def _repr_html_(self) -> str:
        strips = [
            f'<div style="font-family:sans-serif">{html.escape(self._line(device))}</div>{self._strip(device)}'
            for device in self._shown()
        ]
        return "<div>" + "".join(strips) + "</div>"

    def _shown(self) -> range:
        return range(min(len(self._trace.devices), _MOST_DEVICES))

    def _line(self, device: int) -> str:
        trace = self._trace
        watched = trace.devices[device]
        last = trace.samples[-1].readings[device] if trace.samples else Reading()
        mean = weighted_mean(trace.values(device=device), trace.weights())
        parts = [f"{trace.label}: busy {views.number(last.busy_percent, '%')}", f"mean {views.number(mean, '%')}"]
        if last.used_bytes is not None:
            parts.append(f"memory {views.mebibytes(last.used_bytes)} of {views.mebibytes(watched.total_bytes)}")
        if last.power_w is not None:
            parts.append(views.number(last.power_w, "W"))
        parts += [f"{trace.seconds:.1f} s", watched.name]
        if trace.timed_out:
            parts.append(f"{trace.timed_out} timed out")
        return " · ".join(parts)

    def _strip(self, device: int) -> str:
        samples = self._trace.samples[-_BARS:]
        values = [sample.readings[device].busy_percent for sample in samples]
        known = [value for value in values if value is not None]
        mean = views.number(sum(known) / len(known) if known else None, "%")
        label = f"Busy percent of {self._trace.devices[device].name}, last {len(values)} samples: mean {mean}."
        width = _BARS * _BAR_WIDTH
        return (
            f'<svg role="img" aria-label="{html.escape(label)}" width="{width}" height="{_HEIGHT}" '
            f'viewBox="0 0 {width} {_HEIGHT}"><rect width="{width}" height="{_HEIGHT}" fill="none" '
            f'stroke="currentColor" stroke-opacity="0.4"/>{_bars(values)}</svg>'
        )


class Screen:
    """One place on the screen that is redrawn: an output of a notebook, or the last line of a terminal."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._in_notebook = in_notebook()

    def show(self, view: LiveView) -> None:
        """Draw `view` in place of the one before. Call it on the main thread only."""
        if not self._in_notebook:
            if sys.stdout.isatty():
                print("\r\x1b[K" + repr(view).splitlines()[0][:79], end="", flush=True)
        elif self._handle is None:
            from IPython.display import display

            self._handle = display(view, display_id=True)  # type: ignore[no-untyped-call,unused-ignore]
        else:
            self._handle.update(view)

    def end(self) -> None:
        """Leave the last view standing."""
        if not self._in_notebook and sys.stdout.isatty():
            print()


def in_notebook() -> bool:
    """Whether this code runs in a Jupyter kernel (Colab, JupyterLab, VS Code), so that HTML is shown."""
    # If IPython was never imported, this is no notebook: then do not import it now.
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return getattr(shell, "kernel", None) is not None


def _bars(values: Sequence[float | None]) -> str:
    bars = []
    for number, value in enumerate(values):
        if value is None:
            continue  # a gap: nothing was read
        height = max(2.0, value / 100 * (_HEIGHT - 2))  # an idle bar stays visible
        colour = _IDLE if value < IDLE_BELOW_PERCENT else _BUSY
        bars.append(
            f'<rect x="{number * _BAR_WIDTH + 1}" y="{_HEIGHT - 1 - height:.1f}" width="{_BAR_WIDTH - 1}" '
            f'height="{height:.1f}" fill="{colour}"/>'
        )
    return "".join(bars)


def _share(share: float | None) -> str:
    return views.number(None if share is None else 100 * share, "%")
