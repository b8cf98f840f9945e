"""What a search for a batch size found: every size that was run, and the answer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from course_utils.views import html_table, mebibytes, number, text_table

Outcome = Literal["fits", "out of memory", "maybe out of memory", "too little left", "stopped by time"]
LimitedBy = Literal["memory", "dataset", "cap", "trials", "time"]
_WHY: dict[LimitedBy, str] = {
    "memory": "limited by memory",
    "dataset": "limited by the data set, not by memory",
    "cap": "limited by max_batch, not by memory",
    "trials": "the largest that ran before max_trials was reached; a larger one may fit",
    "time": "the largest that ran before max_seconds were over; a larger one may fit",
}


@dataclass(frozen=True)
class Trial:
    """One size that was run. `seconds` and `samples_per_s` are its last step's; what was not measured is None.

    `outcome` "too little left": it ran, but not with the headroom that was asked for. `detail` quotes the error.
    """

    batch_size: int
    outcome: Outcome
    steps: int
    peak_bytes: int | None
    seconds: float | None
    samples_per_s: float | None
    detail: str = ""

    @property
    def fits(self) -> bool:
        """Whether all its steps ran, with the headroom that was asked for."""
        return self.outcome == "fits"


class NothingFits(RuntimeError):
    """Not even the smallest batch fits; the first out-of-memory error is its cause."""


@dataclass(frozen=True, repr=False)
class FoundBatch:
    """The largest batch size that ran, why it is not larger, and all that was tried, in order.

    `headroom` is the share of memory that was to stay free. `limit_bytes` is None where no limit could be read.
    """

    batch_size: int
    limited_by: LimitedBy
    trials: tuple[Trial, ...]
    seconds: float
    limit_bytes: int | None = None
    headroom: float = 0.0

    @property
    def sizes_tried(self) -> int:
        """How many sizes were run."""
        return len(self.trials)

    @property
    def ooms(self) -> int:
        """How many sizes ran out of memory."""
        return sum("out of memory" in trial.outcome for trial in self.trials)

    @property
    def steps(self) -> int:
        """How many optimizer steps were made in all."""
        return sum(trial.steps for trial in self.trials)

    @property
    def best(self) -> Trial:
        """The trial of the returned size."""
        return next(trial for trial in self.trials if trial.batch_size == self.batch_size)

    @property
    def ended_by(self) -> str:
        """What ended the search: "answer", or the bound that cut it short ("trials" or "time")."""
        return self.limited_by if self.limited_by in ("trials", "time") else "answer"

    def __repr__(self) -> str:
        return f"{self._headline()}\n{text_table(_HEADERS, _rows(self.trials))}"

    def _repr_html_(self) -> str:
        return html_table(_HEADERS, _rows(self.trials), self._headline())

    def _headline(self) -> str:
        limit = "" if self.limit_bytes is None else f" Limit: {mebibytes(self.limit_bytes)}."
        spare = f" {self.headroom:.0%} of it was to stay free." if self.headroom and limit else ""
        return (
            f"Batch size {self.batch_size:,}: {_WHY[self.limited_by]}. Sizes tried: {self.sizes_tried}, "
            f"out of memory: {self.ooms}, {self.seconds:.1f} s.{limit}{spare}"
        )


_HEADERS = ("batch size", "outcome", "peak memory", "steps", "last step", "speed")


def _rows(trials: Iterable[Trial]) -> list[tuple[str, ...]]:
    return [
        (
            number(one.batch_size),
            one.outcome,
            mebibytes(one.peak_bytes),
            number(one.steps),
            number(None if one.seconds is None else one.seconds * 1000, "ms", 1),
            number(one.samples_per_s, "samples/s"),
        )
        for one in trials
    ]
