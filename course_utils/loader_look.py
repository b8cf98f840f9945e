"""One look of the tuner: run a setting for a while, judge its samples and its memory, make it a row of the table."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import BatchSampler

from course_utils.loader_checks import Finding
from course_utils.loader_feed import Feed, batch_samples, is_iterable_style, quiet_workers
from course_utils.loader_needs import batch_bytes, ram_available_bytes
from course_utils.loader_run import Step, StepTime, TimeBar, rate_of, run_steps
from course_utils.loader_table import LoaderTrial
from course_utils.loader_workers import explain_worker_error, worker_bytes
from course_utils.machine import ram_bytes
from course_utils.preserve import rng_preserved

_KNOWN_WELL = 0.015  # standard error of a rate, as a share of it
_LEAST_SHARE = 0.4  # of a look's time
_HOPELESS = 0.03
_RAM_CHECK_S, _RAM_RESERVE = 0.5, 0.05


class TimeUp(Exception):
    """The budget does not allow for another look."""


class Looks:
    """Takes looks at settings until `deadline`. The first is at 0 workers, and the others are judged by what it saw."""

    def __init__(
        self,
        make_loader: Callable[..., Any],
        step: Step,
        device: torch.device | None,
        budget_s: float,
        bar: TimeBar,
    ) -> None:
        self.begun = time.perf_counter()
        self.deadline = self.begun + budget_s
        self.make_loader, self.step, self.device, self.bar = make_loader, step, device, bar
        self.batch_load_s: float | None = None  # what one batch takes with 0 workers
        self.epoch_samples: int | None = None  # what an epoch gives with 0 workers
        self.findings: tuple[Finding, ...] = ()
        self.multiplied = ""  # why more than one worker would multiply the samples

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        return self.deadline - time.perf_counter()

    def look(
        self, keywords: dict[str, Any], seconds: float, best_rate: float | None = None, *, to_the_end: bool = False
    ) -> tuple[LoaderTrial, Feed, tuple[StepTime, ...]]:
        """Run a setting for `seconds`, or less when its rate is known or below `best_rate`, unless `to_the_end`.

        A loader with workers that fails is a row; with 0 workers its exception passes through, as that of a step does.
        """
        batch_s, left = self.batch_load_s or 0.0, self.left_s
        if self.batch_load_s is not None and left < 0.02 * (self.deadline - self.begun) + 3 * batch_s:
            raise TimeUp
        self.bar.tick(f"tuning the loader: {LoaderTrial(keywords).label}")
        with rng_preserved():  # so that each setting draws the same samples in the same order
            # A worker that hangs may cost half of the time that is left, so that others still get a look.
            feed = Feed(self._make(keywords), patience_s=max(0.3, min(5 + 20 * batch_s, left / 2)))
            memory = samples = None
            try:
                with feed:
                    ends = self._ends(feed, seconds, best_rate, to_the_end)
                    times = run_steps(feed, self.step, self.device, seconds=min(seconds, left), on_step=ends)
                    memory = worker_bytes(feed.iterator)
                    samples = self._count(feed, seconds)
            except Exception as error:
                if feed.failed is not error or not keywords["num_workers"]:
                    raise
                reason = explain_worker_error(error) or f"{type(error).__name__}: {str(error).strip()[-200:]}"
                return LoaderTrial(keywords, "failed", reason), feed, ()
        if self.batch_load_s is not None and not any(one.counted for one in times):
            raise TimeUp  # the deadline came during the first step
        rate = rate_of(times, feed.workers)
        row = LoaderTrial(
            keywords,
            samples_per_s=rate.samples_per_s,
            spread=rate.spread,
            error=rate.error,
            first_batch_s=feed.starts_s[0],
            epoch_samples=samples,
            workers_bytes=memory,
            in_flight_bytes=feed.ahead * batch_bytes(feed.first_batch),
        )
        if feed.workers and _out_of_ram():
            row = replace(row, outcome="stopped", reason="less than 5 % of the RAM was left", samples_per_s=None)
        elif wrong := self._wrong_samples(feed, samples):
            row = replace(row, outcome="refused", reason=wrong, samples_per_s=None)
        return row, feed, times

    def _make(self, keywords: dict[str, Any]) -> Any:
        with quiet_workers():
            loader = self.make_loader(**keywords)
        if getattr(loader, "num_workers", None) != keywords["num_workers"]:
            raise ValueError(
                f"make_loader did not pass on num_workers={keywords['num_workers']}: hand all keywords to DataLoader, "
                "as in lambda **keywords: DataLoader(dataset, batch_size=64, **keywords)."
            )
        return loader

    def _ends(
        self, feed: Feed, seconds: float, best_rate: float | None, to_the_end: bool
    ) -> Callable[[Sequence[StepTime]], bool | None]:
        """A function that ends a look: time is up, RAM is short, the samples are too many, the rate is known."""
        block, looked = max(1, feed.workers), time.perf_counter()

        def ends(times: Sequence[StepTime]) -> bool:
            nonlocal looked
            self.bar.tick()
            now = time.perf_counter()
            if now >= self.deadline or self._too_many(feed):
                return True
            if now - looked > _RAM_CHECK_S:
                looked = now
                if feed.workers and _out_of_ram():
                    return True
            counted = sum(one.counted for one in times)
            if to_the_end or counted < max(8, 4 * block) or counted % (2 * block):
                return False
            rate = rate_of(times, feed.workers)
            if rate.error is None:
                return False
            most = rate.samples_per_s * (1 + 3 * rate.error + _HOPELESS)
            hopeless = best_rate is not None and most < best_rate
            # Batches that are slow now and then do not show in a few steps.
            seen_enough = counted >= 8 * block and now - times[0].asked_s >= _LEAST_SHARE * seconds
            return hopeless or (seen_enough and rate.error <= _KNOWN_WELL)

        return ends

    def _count(self, feed: Feed, seconds: float) -> int | None:
        """How many samples an epoch gives; None if twice `seconds` do not tell. A stream goes without the step."""
        if feed.epoch_samples is not None:
            return feed.epoch_samples
        if not is_iterable_style(feed.loader):
            return _map_style_samples(feed.loader)
        until = min(self.deadline, time.perf_counter() + 2 * seconds)
        while feed.epoch_samples is None and time.perf_counter() < until and not self._too_many(feed):
            self.bar.tick()
            if feed.next() is None:
                return feed.samples
        return feed.samples if self._too_many(feed) else feed.epoch_samples

    def _too_many(self, feed: Feed) -> bool:
        """Whether a stream has already given more samples than an epoch has with 0 workers."""
        return is_iterable_style(feed.loader) and self.epoch_samples is not None and feed.samples > self.epoch_samples

    def _wrong_samples(self, feed: Feed, samples: int | None) -> str:
        """Why the samples are not those of 0 workers, or ""."""
        stream = is_iterable_style(feed.loader)
        if self.batch_load_s is None:
            return ""
        if self.epoch_samples is None or samples is None:
            doubts = [one for one in self.findings if one.kind == "stream multiplied"]
            if stream and feed.workers > 1 and doubts:
                self.multiplied = (
                    f"the samples of an epoch are too many to count, and {doubts[0].problem} {doubts[0].cure}"
                )
                return self.multiplied
            return ""
        lost = self.epoch_samples - samples
        if stream and lost < 0:
            self.multiplied = (
                f"an epoch gives more than the {self.epoch_samples:,} samples of the data set, because each worker "
                "yields the whole stream. In __iter__ ask torch.utils.data.get_worker_info() for this worker's share"
            )
            return self.multiplied
        # Each worker of a stream may drop a short last batch of its own.
        if lost and not (stream and lost <= feed.workers * batch_samples(feed.first_batch)):
            return f"an epoch gives {samples:,} samples instead of {self.epoch_samples:,}"
        return ""


def _out_of_ram() -> bool:
    total = ram_bytes()
    return total is not None and ram_available_bytes() < _RAM_RESERVE * total


def _map_style_samples(loader: Any) -> int | None:
    """What an epoch holds, as the loader's sampler says."""
    sampler, batches = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
    if sampler is None or (batches is not None and type(batches) is not BatchSampler):
        return None
    try:
        samples = len(sampler)
    except (TypeError, NotImplementedError):
        return None
    size = getattr(loader, "batch_size", None)
    return samples // size * size if size and getattr(loader, "drop_last", False) else samples
