"""What `tune_loader` found: one row per setting, the best one's keywords, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from course_utils import views

if TYPE_CHECKING:
    from course_utils.plots import CourseFigure

ENOUGH = 0.95  # of the ceiling: nearer than that, no loader can help

Outcome = Literal["measured", "refused", "failed", "stopped", "skipped"]


class LoaderFailed(RuntimeError):
    """A loader's workers died or hung. The message says what is likely behind it; the cause is torch's own error."""


@dataclass(frozen=True, repr=False)
class LoaderTrial:
    """One setting. None is "not measured", or "this system does not say".

    `outcome`: "measured"; "refused" before anything ran, or because the samples were not the same; "failed" (workers
    died or hung); "stopped" (the RAM ran out); "skipped" (it could not win). `reason` says why.
    `samples_per_s` leaves the starts of epochs out. `epoch_samples` is how many samples an epoch gave.
    `workers_bytes` is the workers' own memory, `in_flight_bytes` what their batches take of shared memory.
    """

    keywords: Mapping[str, Any]
    outcome: Outcome = "measured"
    reason: str = ""
    samples_per_s: float | None = None
    spread: float | None = None
    error: float | None = None
    first_batch_s: float | None = None
    epoch_samples: int | None = None
    workers_bytes: int | None = None
    in_flight_bytes: int | None = None

    @property
    def num_workers(self) -> int:
        """How many workers."""
        return int(self.keywords["num_workers"])

    @property
    def label(self) -> str:
        """The setting in a few words."""
        words = ["1 worker" if self.num_workers == 1 else f"{self.num_workers} workers"]
        if "prefetch_factor" in self.keywords:
            words.append(f"prefetch {self.keywords['prefetch_factor']}")
        if self.keywords.get("pin_memory"):
            words.append("pinned")
        if self.num_workers and not self.keywords.get("persistent_workers"):
            words.append("new each epoch")
        return ", ".join(words)

    def cells(self) -> list[str]:
        """The row's cells, in the order of `HEADERS`."""
        first = None if self.first_batch_s is None else 1e3 * self.first_batch_s
        return [
            self.label,
            views.number(self.samples_per_s, "", 1),
            share(self.spread),
            views.number(first, "ms"),
            views.number(self.epoch_samples),
            views.mebibytes(self.workers_bytes),
            views.mebibytes(self.in_flight_bytes),
            self.outcome + (f": {self.reason}" if self.reason else ""),
        ]


HEADERS = (
    "setting",
    "samples/s",
    "spread",
    "first batch",
    "samples per epoch",
    "workers' memory",
    "batches in flight",
    "outcome",
)


@dataclass(frozen=True, repr=False)
class TunedLoader:
    """The settings tried, in order, and the best: `make_loader(**tuned.keywords)`.

    `loader_is_bottleneck` is the answer for 0 workers: False means that nothing else was tried. `ended_by`: "ceiling"
    (no setting can be more than 5 % faster), "search" (all that could win were measured), "budget".
    """

    rows: tuple[LoaderTrial, ...]
    best: LoaderTrial
    keywords: dict[str, Any]
    ceiling_samples_per_s: float
    loader_is_bottleneck: bool
    seconds: float
    ended_by: Literal["ceiling", "search", "budget"]
    notes: tuple[str, ...] = ()

    @property
    def samples_per_s(self) -> float:
        """The best setting's throughput."""
        return self.best.samples_per_s or 0.0

    @property
    def verdict(self) -> str:
        """What to do, and how good that is."""
        rate, ceiling = views.number(self.samples_per_s), views.number(self.ceiling_samples_per_s)
        of_ceiling = self.samples_per_s / self.ceiling_samples_per_s
        if not self.loader_is_bottleneck:
            return (
                f"The loader is not the bottleneck: without workers it gives {rate} of the {ceiling} samples/s that "
                "the step could take. Leave it as it is."
            )
        base = next(row.samples_per_s for row in self.rows if row.samples_per_s)
        gain = f", {self.samples_per_s / base:.2g} times as fast as without workers" if self.best.num_workers else ""
        found = f"Best: {self.best.label}, {rate} samples/s{gain}."
        if of_ceiling >= ENOUGH:
            return f"{found} That is within 5 % of the ceiling ({ceiling} samples/s): no setting can do more."
        rest = f"It is {100 * of_ceiling:.0f} % of the ceiling ({ceiling} samples/s)"
        if self.ended_by == "budget":
            return f"{found} {rest}. The time was up before all settings were tried."
        return f"{found} {rest}: to come closer, each sample must cost less."

    def __repr__(self) -> str:
        notes = "".join(f"\n- {note}" for note in self.notes)
        return f"{self.verdict}\n{views.text_table(HEADERS, [row.cells() for row in self.rows])}{notes}"

    def _repr_html_(self) -> str:
        rows = [row.cells() for row in self.rows]
        notes = views.html_table(["note"], [[note] for note in self.notes]) if self.notes else ""
        return views.html_table(HEADERS, rows, self.verdict) + notes

    def draw(self) -> CourseFigure:
        """One bar per setting that was measured, the best marked, and the ceiling as a line."""
        from course_utils import plots

        measured = [row for row in self.rows if row.samples_per_s is not None]
        fig, ax = plots.figure(
            f"Throughput of {len(measured)} loader settings; best: {self.best.label}; the ceiling is "
            f"{views.number(self.ceiling_samples_per_s)} samples/s.",
            height_in=1.6 + 0.45 * len(measured),
        )
        rates = [row.samples_per_s for row in measured]
        errors = [row.samples_per_s * (row.error or 0) for row in measured if row.samples_per_s is not None]
        plots.bars(
            ax,
            [row.label for row in measured],
            rates,
            "samples/s",
            errors,
            emphasis=[self.best.label],
            title="Loader settings",
        )
        with plots.style():
            ax.axvline(self.ceiling_samples_per_s, color=plots.BLACK, linestyle="--", linewidth=1.5)
            ax.annotate(
                "ceiling",
                (self.ceiling_samples_per_s, 1.0),
                (-4, 2),
                ("data", "axes fraction"),
                "offset points",
                ha="right",
            )
            ax.set_xlim(0, 1.3 * max([self.ceiling_samples_per_s, *(rate for rate in rates if rate)]))
        return fig


def share(part: float | None) -> str:
    """A share as percent, or "n/a"."""
    return views.number(None if part is None else 100 * part, "%", 1)
