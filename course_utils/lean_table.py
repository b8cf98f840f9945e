"""The table of an ablation: one row a run, what each switch bought and what it cost."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from course_utils.views import MISSING, html_table, mebibytes, number, text_table

BASELINE = "baseline"
_HEADERS = ("switch", "samples/s", "against the baseline", "peak memory", "loss difference", "compiling")
_LABEL_WIDTH = 24
ENOUGH_ROUNDS = 5  # to tell a gain from noise
_PLAIN = 1.5  # what shows in fewer
_LEAST = 0.02  # no difference below 2 % is called one


def break_even_steps(compile_s: float, eager_s: float, compiled_s: float) -> float | None:
    """After how many steps the seconds spent on compiling are won back; None for never.

    compile_s / (eager_s - compiled_s), where the last two are the seconds of one step. ValueError for what is no time.
    """
    for name, value in (("compile_s", compile_s), ("eager_s", eager_s), ("compiled_s", compiled_s)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ValueError(f"{name}={value!r:.80} must be a number of seconds, 0 or more.")
    return compile_s / (eager_s - compiled_s) if eager_s > compiled_s else None


@dataclass(frozen=True, repr=False)
class Row:
    """What one run measured; None where it was not, or could not be told.

    `speedup` is the median over `rounds` of (the baseline's seconds a step / this run's in the same round). It lies
    between `speedup_low` and `speedup_high`: the lowest and the highest round, from eight rounds on the second lowest
    and second highest. `noise` is half of that range as a share of `speedup`; the baseline's own is that of its samples
    per second. `spread` is the interquartile range of the samples per second. Where a run had rounds of its own (it
    compiles, or combines), both are scaled to the pace that the baseline had in the first rounds.
    `peak_bytes` counts weights, gradients, optimizer state, one batch and all that a step makes. `loss_difference` is
    the largest difference from the baseline's loss over the first `loss_steps` steps, as a share of its largest loss.
    `compile_s` is what the first two steps took longer than two others, in a run that compiles.
    """

    name: str
    switches: tuple[str, ...] = ()
    samples_per_s: float | None = None
    spread: float | None = None
    speedup: float | None = None
    speedup_low: float | None = None
    speedup_high: float | None = None
    noise: float | None = None
    rounds: int = 0
    steps: int = 0  # measured ones
    peak_bytes: int | None = None
    losses: tuple[float, ...] = ()
    loss_difference: float | None = None
    loss_steps: int = 0
    compile_s: float | None = None
    break_even_steps: float | None = None  # None: never, or nothing to compile
    failure: str | None = None  # what the run raised, in one line
    skipped: str | None = None  # why the caller left it out
    note: str = ""

    @property
    def gained(self) -> bool:
        """Whether it is faster than the baseline beyond noise: in every round (all but one, from eight on), by 2 %.

        With nothing gained each round is a coin's toss, so five in a row of one kind come once in 32 times, eight of
        nine once in 50. Fewer rounds than five say something only if all of them differ by half or more.
        """
        if self.speedup is None or self.speedup_low is None:
            return False
        return self.speedup_low > (1 if self.rounds >= ENOUGH_ROUNDS else _PLAIN) and self.speedup >= 1 + _LEAST

    @property
    def lost(self) -> bool:
        """Whether it is slower than the baseline beyond noise; by the same rule."""
        if self.speedup is None or self.speedup_high is None:
            return False
        return (
            1 / self.speedup_high > (1 if self.rounds >= ENOUGH_ROUNDS else _PLAIN) and 1 / self.speedup >= 1 + _LEAST
        )

    @property
    def last_loss(self) -> float | None:
        """The loss of the last step that was compared."""
        return self.losses[self.loss_steps - 1] if self.loss_steps else None

    @property
    def verdict(self) -> str:
        """The comparison with the baseline in words: a gain, a loss, or neither."""
        if self.failure is not None:
            return f"failed: {self.failure}"
        if self.skipped is not None:
            return f"skipped: {self.skipped}"
        if self.speedup is None or self.speedup_low is None or self.speedup_high is None:
            return MISSING
        if not self.switches:
            return f"1.00 ×, noise ± {number(self.noise and 100 * self.noise, '%')}"
        times, low, high = (_times(value) for value in (self.speedup, self.speedup_low, self.speedup_high))
        if self.gained or self.lost:
            text = f"{times} ×, {'faster' if self.gained else 'slower'} ({low} to {high})"
        elif self.rounds < ENOUGH_ROUNDS:
            text = f"{times} × ({low} to {high}), too few rounds to tell"
        else:
            text = f"{times} ×, no gain (within noise: {low} to {high})"
        return f"{text}; {self.note}" if self.note else text

    @property
    def compiling(self) -> str:
        """Seconds lost to compiling, and when they are won back."""
        if self.compile_s is None:
            return MISSING if self.failure or self.skipped else "none"
        steps = self.break_even_steps
        pays = "never pays" if steps is None else f"pays after {math.ceil(round(steps, 6)):,} steps"
        return f"{number(self.compile_s, 's', 1)}, {pays}"

    def __repr__(self) -> str:
        return f"{self.name}: {number(self.samples_per_s, 'samples/s', 1)}, {self.verdict}"


@dataclass(frozen=True, repr=False)
class Ablation:
    """One job with each switch alone and with combinations; the first row is the baseline."""

    job: str
    device: str
    rows: tuple[Row, ...]
    seconds: float  # what the whole took
    torch_version: str

    @property
    def baseline(self) -> Row:
        """The run without any switch."""
        return self.rows[0]

    @property
    def best(self) -> Row:
        """The fastest of the runs that gained more than noise; the baseline if none did."""
        gained = [row for row in self.rows if row.gained]
        return max(gained, key=lambda row: row.speedup or 0, default=self.baseline)

    def row(self, name: str) -> Row:
        """The row of this name; ValueError, with the names that there are, for another."""
        for row in self.rows:
            if row.name == name:
                return row
        raise ValueError(f"There is no row {name!r}: there are {', '.join(row.name for row in self.rows)}.")

    def draw(self) -> Any:
        """Bars of samples/s, with noise, beside bars of peak memory; hatched is what gained. Returns the figure."""
        from course_utils.plots import bars, figure

        best = self.best
        found = (
            f"The fastest is {best.name}: {best.verdict}." if best.gained else "No switch gained more than the noise."
        )
        fig, (speed, memory) = figure(
            f"What each switch does to the job {self.job} on {self.device}. {found}",
            columns=2,
            width_in=11,
            height_in=max(3.2, 0.9 + 0.48 * len(self.rows)),
        )
        labels = [_label(row) for row in self.rows]
        gained = [label for label, row in zip(labels, self.rows, strict=True) if row.gained]
        whiskers = [
            None if row.noise is None or row.samples_per_s is None else row.samples_per_s * row.noise
            for row in self.rows
        ]
        rates = [row.samples_per_s for row in self.rows]
        peaks = [None if row.peak_bytes is None else row.peak_bytes / 2**20 for row in self.rows]
        bars(speed, labels, rates, "samples/s", whiskers, emphasis=gained, title="throughput, with noise")
        bars(memory, labels, peaks, "MiB", emphasis=gained, title="peak memory")
        memory.set_yticks([])  # the same rows as on the left
        ends = [(rate or 0) + (half or 0) for rate, half in zip(rates, whiskers, strict=True)]
        for ax, longest in ((speed, max(ends)), (memory, max(peak or 0 for peak in peaks))):
            # Half a figure is narrow: the words at the ends of the bars need more of it than in a whole one.
            ax.set_xlim(0, (longest or 1.0) * 1.45)
        return fig

    def __repr__(self) -> str:
        return f"{self._title()}\n{text_table(_HEADERS, self._cells())}"

    def _repr_html_(self) -> str:
        return html_table(_HEADERS, self._cells(), self._title())

    def _title(self) -> str:
        return f"{self.job} on {self.device}, torch {self.torch_version}, {number(self.seconds, 's')} in all"

    def _cells(self) -> list[tuple[str, ...]]:
        return [
            (
                row.name,
                number(row.samples_per_s, "", 0 if (row.samples_per_s or 0) >= 100 else 1),
                row.verdict,
                mebibytes(row.peak_bytes),
                _loss(row),
                row.compiling,
            )
            for row in self.rows
        ]


def _times(value: float) -> str:
    return f"{value:.{2 if value >= 0.1 else 3}f}"


def _loss(row: Row) -> str:
    if row.loss_difference is None or not row.loss_steps:
        return MISSING
    steps = f"{row.loss_steps} step{'' if row.loss_steps == 1 else 's'}"
    if not math.isfinite(row.loss_difference):
        return f"not finite in {steps}"
    if not row.switches:
        return f"loss {row.losses[0]:.3f} to {row.last_loss:.3f} in {steps}"
    return f"{100 * row.loss_difference:.2g} % in {steps}"


def _label(row: Row) -> str:
    """The name in lines that fit beside a bar."""
    lines = [""]
    for part in row.name.split(" + "):
        longer = f"{lines[-1]} + {part}" if lines[-1] else part
        if len(longer) > _LABEL_WIDTH and lines[-1]:
            lines[-1] += " +"
            lines.append(part)
        else:
            lines[-1] = longer
    return "\n".join(lines)
