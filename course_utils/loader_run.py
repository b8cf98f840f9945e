"""Runs a training step over a loader's batches and times every part: what `data_wait` and `tune_loader` share.

    feed = Feed(loader, patience_s=30)          # batches, epoch after epoch; ends the workers when its block ends
    times = run_steps(feed, step, device, seconds=2)
    rate_of(times, feed.workers).samples_per_s

What is counted: the first step of all warms up, and with workers so do as many batches as they may have prepared during
that slow step. At the start of each epoch workers begin together, so their first batches also arrive together; one
batch of each is left out there, or short epochs would look faster than they are.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tqdm import tqdm

from course_utils.loader_feed import Cached, Feed, batch_samples
from course_utils.timing import synchronize

_WARMUP_STEPS = {"cpu": 1, "cuda": 3}
_FEWEST_STEPS, _FEWEST_COUNTED = 2, 3
_MOST_BLOCKS = 8
_STEPS_AHEAD = 3  # how far the CPU may run ahead of the GPU: enough to overlap, and a budget of seconds can be kept

Step = Callable[[Any], object]


@dataclass(frozen=True)
class StepTime:
    """One step, in seconds: when its batch was asked for, the wait for it, and the work on it. `samples` it held.

    `counted` is False in the warm-up and at an epoch's start.
    """

    asked_s: float
    wait_s: float
    busy_s: float
    samples: int
    counted: bool = True


@dataclass(frozen=True)
class Rate:
    """Throughput over counted steps. `spread`: interquartile range of its blocks, as a share of their median.

    `error` is the standard error of the mean, as a share of it. Both are None for fewer than three blocks.
    """

    samples_per_s: float
    spread: float | None
    error: float | None


def run_steps(
    feed: Feed | Cached,
    step: Step,
    device: torch.device | None,
    *,
    seconds: float,
    steps: int | None = None,
    synced: bool = False,
    on_step: Callable[[Sequence[StepTime]], bool | None] = lambda times: False,
) -> tuple[StepTime, ...]:
    """Call `step(batch)` until `seconds` have gone after the first batch, or `steps` were counted; at least twice.

    It takes up to twice as long where `seconds` are too short for three steps, and a batch of each worker.

    `synced`: wait for the device after every step, so that each wait begins when the device has nothing to do.
    Otherwise the device is waited for where counting begins and ends, and a GPU overlaps work and loading as in a
    training run. `on_step(times)` is called after each step; True ends the run. `device` None: `device_of_steps`
    after the first step.
    """
    begun, runs_ahead, counting = time.perf_counter(), _RunsAhead(), False
    times: list[StepTime] = []
    epoch = feed.batches_per_epoch
    skip = _WARMUP_STEPS["cpu" if device is None else device.type] + feed.ahead
    skip = skip if epoch is None else max(1, min(skip, epoch // 2))
    counted = 0
    starts: list[int] = []  # where epochs begin
    while True:
        if skip == 0 and not counting:
            synchronize(device)
            counting = True
        asked = time.perf_counter()
        batch = feed.next()
        if batch is None:
            break
        fetched = time.perf_counter()
        if feed.position == 1:
            starts.append(len(times))
            skip = max(skip, feed.workers, 1)
            begun = begun if times else fetched  # how long a start takes is not a matter of this run
        elif times and fetched - begun > seconds / 3:
            skip = min(skip, feed.workers) if feed.position <= feed.workers else 0
        count, skip = skip == 0, max(0, skip - 1)
        counting = counting and count
        counted += count
        step(batch)
        device = device_of_steps() if device is None else device
        gone = time.perf_counter() - begun
        over = steps is not None and counted >= steps
        over = over or (gone >= seconds and counted >= max(_FEWEST_COUNTED, feed.workers))  # a round of workers
        over = over or (gone >= 2 * seconds and len(times) + 1 >= _FEWEST_STEPS)
        if synced or over or feed.position == epoch:
            synchronize(device)
        else:
            runs_ahead.note(device)
        done = time.perf_counter()
        times.append(StepTime(asked, fetched - asked, done - fetched, batch_samples(batch), count))
        if on_step(times) or over:
            break
    waited = time.perf_counter()
    synchronize(device)
    if times:
        late = time.perf_counter() - waited
        times[-1] = replace(times[-1], busy_s=times[-1].busy_s + late)
    if counted == 0 and len(times) >= _FEWEST_STEPS:
        # Epochs so short that nothing can be left out: then with their starts. And too slow for one round: all of it.
        first = starts[1] if len(starts) > 1 else 0
        times = [replace(one, counted=number >= first) for number, one in enumerate(times)]
    return tuple(times)


def checked(step: Step, device: torch.device | str | None, budget_s: float) -> torch.device | None:
    """The device, if this machine has it; TypeError or ValueError for arguments that will not do."""
    if not callable(step):
        raise TypeError(f"step={step!r:.80} cannot be called: pass a function step(batch).")
    if isinstance(budget_s, bool) or not (budget_s > 0 and math.isfinite(budget_s)):
        raise ValueError(f"budget_s must be a positive number of seconds, not {budget_s}.")
    if device is None:
        return None
    synchronize(device)
    return torch.device(device)


def device_of_steps() -> torch.device:
    """Where a step that has just run works: the current GPU if CUDA is running in this process, else the CPU."""
    if torch.cuda.is_initialized():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def rate_of(times: Sequence[StepTime], workers: int = 0) -> Rate:
    """The throughput of the counted steps. ValueError if there is none."""
    counted = [one for one in times if one.counted]
    if not counted:
        raise ValueError("The loader gave too few batches to measure: one warms up, so it must give at least two.")
    # Batches come in rounds of one per worker: a block holds whole rounds, or it would see the rhythm as noise.
    size = max(1, workers)
    size *= max(1, -(-len(counted) // (size * _MOST_BLOCKS)))
    blocks = [counted[first : first + size] for first in range(0, len(counted) - size + 1, size)]
    rates = [_per_second(block) for block in blocks]
    if len(rates) < 3:
        return Rate(_per_second(counted), None, None)
    first, middle, third = statistics.quantiles(rates, n=4, method="inclusive")
    error = statistics.stdev(rates) / statistics.mean(rates) / len(rates) ** 0.5
    return Rate(_per_second(counted), (third - first) / middle, error)


def _per_second(times: Sequence[StepTime]) -> float:
    return sum(one.samples for one in times) / max(sum(one.wait_s + one.busy_s for one in times), 1e-9)


class _RunsAhead:
    """Lets the CPU run a few steps ahead of a GPU, and no more."""

    def __init__(self) -> None:
        self._ends: deque[Any] = deque()

    def note(self, device: torch.device) -> None:
        if device.type != "cuda":
            return
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        self._ends.append(event)
        if len(self._ends) > _STEPS_AHEAD:
            self._ends.popleft().synchronize()


class TimeBar:
    """A progress bar over a budget of seconds; `progress=False` keeps it silent."""

    def __init__(self, what: str, budget_s: float, progress: bool) -> None:
        self._begun = time.perf_counter()
        self._bar = tqdm(
            total=budget_s,
            desc=what,
            bar_format="{desc}: {percentage:3.0f}% of the time |{bar}| {n:.0f}/{total:.0f} s",
            file=sys.stdout,
            leave=False,
            mininterval=0.3,
            disable=not progress,
        )

    def tick(self, what: str | None = None) -> None:
        """Show how much time has gone, and what is going on."""
        if what is not None:
            self._bar.set_description_str(what, refresh=False)
        gone = min(self._bar.total or 0.0, time.perf_counter() - self._begun)
        self._bar.update(max(0.0, gone - self._bar.n))

    def close(self) -> None:
        """Take the bar away."""
        self._bar.close()
