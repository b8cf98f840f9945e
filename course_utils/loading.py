"""Is the device waiting for data? Measure the wait, find the loader's best settings, avoid the traps of workers.

    wait = data_wait(step, loader)              # step(batch): copy, forward, backward, optimizer
    wait.verdict                                # first of all: is the loader the bottleneck?
    tuned = tune_loader(make_loader, step)      # make_loader(**keywords) -> DataLoader
    loader = make_loader(**tuned.keywords)

Built from: `loader_feed` (batches, epoch after epoch), `loader_run` (clocks), `loader_tuner` and `loader_look` (the
search), `loader_needs` (memory, valid keywords), `loader_checks` (traps), `loader_workers` (processes, their errors).
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from course_utils import views
from course_utils.arguments import whole
from course_utils.loader_checks import Finding, check_dataset
from course_utils.loader_feed import Cached, Feed
from course_utils.loader_needs import LoaderNeeds, batch_bytes, loader_keywords, loader_needs, worker_counts
from course_utils.loader_run import (
    Rate,
    Step,
    StepTime,
    TimeBar,
    checked,
    device_of_steps,
    rate_of,
    run_steps,
)
from course_utils.loader_table import ENOUGH, LoaderFailed, LoaderTrial, TunedLoader, share
from course_utils.loader_tuner import tune_loader
from course_utils.loader_workers import explain_worker_error
from course_utils.preserve import rng_preserved, training_preserved
from course_utils.watch import no_worker_advice

if TYPE_CHECKING:
    from course_utils.plots import CourseFigure

__all__ = [
    "DataWait",
    "Finding",
    "LoaderFailed",
    "LoaderNeeds",
    "LoaderTrial",
    "StepTime",
    "TunedLoader",
    "batch_bytes",
    "check_dataset",
    "data_wait",
    "explain_worker_error",
    "loader_keywords",
    "loader_needs",
    "no_worker_advice",
    "tune_loader",
    "worker_counts",
]

_LOADER_SHARE = 0.7  # of the budget: the rest measures the ceiling
_PATIENCE_S = 30.0
_DRAWN_STEPS = 24


@dataclass(frozen=True, repr=False)
class DataWait:
    """What `data_wait` measured. Seconds, and samples per second.

    `steps_timed` are the counted steps, one by one: `wait_s` and `busy_s` are their sums. On a GPU each of them waited
    for the device before it asked for its batch. `samples_per_s` is the rate without that: there the GPU works while
    the next batch is fetched. `ceiling_samples_per_s` is the same step on one cached batch. `first_batch_s` is the time
    from asking for the first epoch to its first batch; `epoch_starts_s` those of later epochs, which are in no other
    figure. `spread` is the interquartile range of the rate, as a share of its median; None where there were too few
    steps.
    """

    device: str
    num_workers: int
    steps_timed: tuple[StepTime, ...]
    samples_per_s: float
    spread: float | None
    ceiling_samples_per_s: float
    first_batch_s: float
    epoch_starts_s: tuple[float, ...] = ()

    @property
    def steps(self) -> int:
        """How many steps were counted."""
        return len(self.steps_timed)

    @property
    def samples(self) -> int:
        """How many samples they held."""
        return sum(one.samples for one in self.steps_timed)

    @property
    def wait_s(self) -> float:
        """Seconds in `next()`, with nothing for the device to do."""
        return sum(one.wait_s for one in self.steps_timed)

    @property
    def busy_s(self) -> float:
        """Seconds in the steps themselves."""
        return sum(one.busy_s for one in self.steps_timed)

    @property
    def wait_percent(self) -> float:
        """The share of a step in which the device waits for the next batch, 0 to 100."""
        return 100 * self.wait_s / max(self.wait_s + self.busy_s, 1e-9)

    @property
    def ceiling_percent(self) -> float:
        """The rate as a share of the ceiling. Noise may carry it a little above 100."""
        return 100 * self.samples_per_s / self.ceiling_samples_per_s

    @property
    def loader_is_bottleneck(self) -> bool:
        """Whether the rate is more than 5 % below the ceiling."""
        return self.ceiling_percent < 100 * ENOUGH

    @property
    def verdict(self) -> str:
        """What follows, in two sentences at most."""
        ceiling = views.number(self.ceiling_samples_per_s)
        rates = f"{views.number(self.samples_per_s)} samples/s of {ceiling} (the ceiling: the step on one cached batch)"
        if not self.loader_is_bottleneck:
            hidden = self.wait_percent >= 5 and self.device != "cpu"
            why = " Its work is hidden behind the GPU's." if hidden else ""
            return f"{rates}: within 5 % of the ceiling, the loader is not the bottleneck.{why}"
        gain = f"a loader that costs nothing would make it {100 / self.ceiling_percent:.2g} times as fast"
        if self.wait_percent >= 5:
            return f"The device waits for data {self.wait_percent:.0f} % of the time. {rates}: {gain}."
        return f"The device hardly waits, but steps are slower while the loader works beside them. {rates}: {gain}."

    def _rows(self) -> list[tuple[str, str]]:
        return [
            ("waiting for data", f"{self.wait_percent:.0f} % of a step, {1e3 * self.wait_s / self.steps:.1f} ms"),
            ("working", f"{1e3 * self.busy_s / self.steps:.1f} ms a step"),
            ("throughput", f"{views.number(self.samples_per_s, 'samples/s', 1)}, spread {share(self.spread)}"),
            ("ceiling", views.number(self.ceiling_samples_per_s, "samples/s", 1)),
            ("first batch", f"after {views.number(1e3 * self.first_batch_s, 'ms')}"),
            ("measured", f"{self.steps} steps, {self.samples:,} samples, {self.num_workers} workers, {self.device}"),
        ]

    def __repr__(self) -> str:
        return f"{self.verdict}\n{views.text_table(['DataWait', ''], self._rows())}"

    def _repr_html_(self) -> str:
        return views.html_table(["DataWait", ""], self._rows(), self.verdict)

    def draw(self) -> CourseFigure:
        """The first steps on a time axis: one lane for waiting, one for working."""
        from course_utils import plots

        shown = self.steps_timed[:_DRAWN_STEPS]
        fig, ax = plots.figure(
            f"Timeline of {len(shown)} steps on {self.device} with {self.num_workers} workers: waiting for data "
            f"{self.wait_percent:.0f} % of the time, working {100 - self.wait_percent:.0f} %.",
            height_in=2.4,
        )
        now, waits, works = 0.0, [], []
        for one in shown:  # one after the other: what lies between two counted steps is not drawn
            waits.append((1e3 * now, 1e3 * one.wait_s))
            works.append((1e3 * (now + one.wait_s), 1e3 * one.busy_s))
            now += one.wait_s + one.busy_s
        with plots.style():
            ax.broken_barh(waits, (0.6, 0.8), facecolor=plots.PALE, edgecolor=plots.ORANGE, hatch="//", linewidth=1)
            ax.broken_barh(works, (-0.4, 0.8), facecolor=plots.BLUE, edgecolor="white", linewidth=0.5)
            ax.set_yticks([1, 0], ["waiting", "working"])
            ax.set_ylim(-0.6, 1.6)
            ax.set_xlim(0, 1e3 * now or 1)
            ax.grid(visible=False, axis="y")
            ax.set_xlabel("time (ms)")
            ax.set_title(f"{self.num_workers} workers: waiting {self.wait_percent:.0f} % of the time")
        return fig


def data_wait(
    step: Step,
    loader: Any,
    *,
    device: torch.device | str | None = None,
    steps: int | None = None,
    budget_s: float = 5.0,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    progress: bool = True,
) -> DataWait:
    """Measure how long a training step waits for its batch, and what the step could do if batches cost nothing.

    `step(batch)` is your own: copy to the device, forward, backward, optimizer. It must not change the batch in place.
    `loader` is a DataLoader or another iterable of batches; epochs follow each other as long as it takes. `device` is
    where the step works; None finds out, from whether CUDA is running after the first step.

    It really trains. Give `model` and `optimizer` to have both put back afterwards; the random state always is. About
    70 % of `budget_s` seconds go to the loader and the rest to the ceiling, the first batch on top; at most `steps`
    steps are counted in each part. A step is never cut short. The loader's workers end with the measurement, also when
    it is interrupted; a persistent loader starts new ones at its next epoch.

    ValueError for a loader without a batch. `LoaderFailed` (a RuntimeError) if workers die, or give nothing for 30 s:
    its text says what is likely behind it. What `step` and the data set raise passes through.
    """
    device = checked(step, device, budget_s)
    if steps is not None:
        whole("steps", steps, 1)
    with ExitStack() as stack:
        stack.enter_context(rng_preserved() if model is None else training_preserved(model, optimizer))
        bar = TimeBar("measuring the wait", budget_s, progress)
        stack.callback(bar.close)
        times, rate, feed = _with_loader(step, loader, device, steps, budget_s * _LOADER_SHARE, bar)
        # The workers have ended: nothing takes the CPU from the step now.
        cached = Cached(feed.first_batch)
        ceiling = run_steps(
            cached,
            step,
            device or device_of_steps(),
            seconds=budget_s * (1 - _LOADER_SHARE),
            steps=steps,
            on_step=lambda _: bar.tick("measuring the ceiling"),
        )
    return DataWait(
        device=str(device or device_of_steps()),
        num_workers=feed.workers,
        steps_timed=tuple(one for one in times if one.counted),
        samples_per_s=rate.samples_per_s,
        spread=rate.spread,
        ceiling_samples_per_s=rate_of(ceiling).samples_per_s,
        first_batch_s=feed.starts_s[0],
        epoch_starts_s=tuple(feed.starts_s[1:]),
    )


def _with_loader(
    step: Step, loader: Any, device: torch.device | None, steps: int | None, seconds: float, bar: TimeBar
) -> tuple[tuple[StepTime, ...], Rate, Feed]:
    """Steps that wait for the device, their rate without that, and the feed that they came from."""
    feed = Feed(loader, patience_s=_PATIENCE_S)
    try:
        with feed:
            # Only a GPU works on while the next batch is fetched; on a CPU one run gives both answers.
            part = 1.0 if (device or device_of_steps()).type == "cpu" else 0.5
            times = run_steps(
                feed,
                step,
                device,
                seconds=seconds * part,
                steps=steps,
                synced=True,
                on_step=lambda _: bar.tick("measuring the wait"),
            )
            free = times
            if (device or device_of_steps()).type != "cpu":
                free = run_steps(
                    feed,
                    step,
                    device or device_of_steps(),
                    seconds=seconds / 2,
                    steps=steps,
                    on_step=lambda _: bar.tick("measuring the throughput"),
                )
                free = free if any(one.counted for one in free) else times
            return times, rate_of(free, feed.workers), feed
    except Exception as error:
        explained = explain_worker_error(error) if feed.failed is error else None
        if explained is None:
            raise
        raise LoaderFailed(f"The loader's workers failed. {explained}") from error
