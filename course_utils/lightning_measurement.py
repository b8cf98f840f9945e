"""What MonitorCallback measured: a whole training run, its stretches between two log entries, and their picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from course_utils import views
from course_utils.monitor_trace import Trace
from course_utils.scoreboard import Row

if TYPE_CHECKING:
    from course_utils.plots import CourseFigure


@dataclass(frozen=True)
class Window:
    """The stretch of training from one log entry to the next; None where it could not be told.

    `from_s` and `to_s` are seconds since sampling began, `step` is the optimizer step at its end. `samples_per_s`
    leaves validation out. `busy_percent` is None where no utilisation sample fell into it. The peak memory is that of
    the run so far.
    """

    from_s: float
    to_s: float
    step: int
    samples_per_s: float
    data_wait_percent: float | None
    busy_percent: float | None
    peak_memory_bytes: int | None

    def as_metrics(self) -> dict[str, float]:
        """What a logger gets; a value that is missing is left out, because loggers take numbers."""
        values = {
            "samples_per_s": self.samples_per_s,
            "data_wait_percent": self.data_wait_percent,
            "busy_percent": self.busy_percent,
            "peak_memory_bytes": self.peak_memory_bytes,
        }
        return {f"monitor/{name}": float(value) for name, value in values.items() if value is not None}


@dataclass(frozen=True, repr=False)
class FitMeasurement:
    """One `Trainer.fit`, warm-up left out; None where this machine cannot tell.

    `batches` are the loader's, `optimizer_steps` are fewer with accumulation. `seconds` leave validation out, and what
    Trainer does after the last batch. `data_wait_s` is the time between asking for a batch and having it.
    """

    device: str
    samples: int
    batches: int
    optimizer_steps: int
    warmup_batches: int
    seconds: float
    data_wait_s: float | None
    busy_percent: float | None
    busy_source: str
    peak_memory_bytes: int | None
    memory_source: str
    versions: str
    notes: tuple[str, ...] = ()

    @property
    def samples_per_s(self) -> float:
        """Throughput: short batches count as what they hold."""
        return self.samples / self.seconds

    @property
    def data_wait_percent(self) -> float | None:
        """The share of the measured time in which the device waited for the next batch, 0 to 100."""
        return None if self.data_wait_s is None else min(100.0, 100 * self.data_wait_s / self.seconds)

    def as_row(self, lesson: int, title: str) -> Row:
        """The scoreboard's row for this run."""
        return Row(
            lesson=lesson,
            title=title,
            samples_per_s=self.samples_per_s,
            busy_percent=self.busy_percent,
            data_wait_percent=self.data_wait_percent,
            peak_memory_bytes=self.peak_memory_bytes,
            device=self.device,
        )

    def _rows(self) -> list[tuple[str, str]]:
        return [
            ("throughput", views.number(self.samples_per_s, "samples/s", 1)),
            ("busy", f"{views.number(self.busy_percent, '%')} ({self.busy_source})"),
            ("waiting for data", views.number(self.data_wait_percent, "%")),
            ("peak memory", f"{views.mebibytes(self.peak_memory_bytes)} ({self.memory_source})"),
            (
                "measured",
                f"{self.samples:,} samples in {self.batches:,} batches and {self.optimizer_steps:,} optimizer steps, "
                f"{self.seconds:.1f} s, after {self.warmup_batches} batches of warm-up",
            ),
            ("device", f"{self.device}, {self.versions}"),
            *(("note", note) for note in self.notes),
        ]

    def __repr__(self) -> str:
        return "\n".join(f"{name:<17} {value}" for name, value in self._rows())

    def _repr_html_(self) -> str:
        return views.html_table(["measurement", "this fit"], self._rows())


def draw(trace: Trace, windows: Sequence[Window], device: int = 0) -> CourseFigure:
    """Busy % over time; below it, where two windows or more were logged, samples/s and waiting for data."""
    from course_utils import plots

    if len(windows) < 2:
        return trace.draw(device)
    mean = views.number(trace.summary(device).busy_percent.mean, "%")
    first, last = windows[0], windows[-1]
    alt = (
        f"A training run of {views.number(trace.seconds, 's', 1)}: busy {mean} in the mean ({trace.label}); throughput "
        f"from {views.number(first.samples_per_s)} at the start to {views.number(last.samples_per_s)} samples/s at the "
        f"end; waiting for data {views.number(first.data_wait_percent, '%')} and "
        f"{views.number(last.data_wait_percent, '%')}."
    )
    waits = [window.data_wait_percent for window in windows]
    known = any(wait is not None for wait in waits)
    fig, (top, middle, *bottom) = plots.figure(alt, 3 if known else 2, share_x=True, height_in=6.0 if known else 4.6)
    plots.trace(top, trace.times_s, trace.values(device=device), title=f"{trace.label}: busy {mean} in the mean")
    edges = [first.from_s, *(window.to_s for window in windows)]
    with plots.style():
        top.set_xlabel("")
        _steps(middle, edges, [window.samples_per_s for window in windows], "samples/s", plots.BLUE)
        if known:
            middle.set_xlabel("")
            _steps(bottom[0], edges, waits, "waiting for\ndata (%)", plots.VERMILLION)
    return fig


def _steps(ax: object, edges: Sequence[float], values: Sequence[float | None], label: str, colour: str) -> None:
    shown = [float("nan") if value is None else value for value in values]
    ax.stairs(shown, edges, color=colour, linewidth=2, baseline=None)  # type: ignore[attr-defined]
    ax.set_ylim(0, 1.15 * max((value for value in shown if value == value), default=0) or 1)  # type: ignore[attr-defined]
    ax.set_ylabel(label)  # type: ignore[attr-defined]
    ax.set_xlabel("time (s)")  # type: ignore[attr-defined]
