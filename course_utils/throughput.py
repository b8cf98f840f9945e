"""Throughput by batch size, and its knee: the smallest batch that is about as fast as any.

    curve = throughput_curve(trial, largest=found.batch_size, memory=memory)
    curve.knee().batch_size
    curve.draw()

Small batches leave a device idle between kernels; past the knee it is full, and a larger batch only costs memory, and
may need more epochs (McCandlish et al. 2018, arXiv:1812.06162).
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from course_utils.arguments import whole
from course_utils.batch_trial import CudaMemory, MemoryReadings, release_memory
from course_utils.oom import classify_oom
from course_utils.preserve import rng_preserved, training_preserved
from course_utils.timing import time_call
from course_utils.views import html_table, mebibytes, number, text_table

_DEFAULT_LARGEST = 256
_REPEATS = 7
_HEADERS = ("batch size", "throughput", "spread", "peak memory", "fits")


@dataclass(frozen=True)
class ThroughputPoint:
    """One batch size: samples per second and their interquartile range, peak bytes or None, and whether it ran."""

    batch_size: int
    samples_per_s: float | None
    spread: float | None
    peak_bytes: int | None
    fits: bool


@dataclass(frozen=True)
class KneePoint:
    """The recommended batch size; `int(knee)` is its number. `best` is the fastest point it was compared with."""

    batch_size: int
    samples_per_s: float
    best: ThroughputPoint
    text: str

    def __int__(self) -> int:
        return self.batch_size

    def __index__(self) -> int:
        return self.batch_size

    def __repr__(self) -> str:
        return self.text


@dataclass(frozen=True, repr=False)
class ThroughputCurve:
    """Throughput at several batch sizes, in rising order. `limit_bytes` is None where no limit could be read.

    `skipped` are the sizes that the time budget left out.
    """

    points: tuple[ThroughputPoint, ...]
    limit_bytes: int | None = None
    skipped: tuple[int, ...] = ()

    def knee(self, within: float = 0.05, headroom: float = 0.10) -> KneePoint:
        """The smallest batch whose throughput is within 5 % of the best of those that leave 10 % of the memory free.

        Where no peak was read, a size leaves enough free if it is at most 90 % of the largest that ran before one ran
        out of memory; if none ran out, all do. ValueError if no size leaves that much free.
        """
        for name, share in (("within", within), ("headroom", headroom)):
            if not 0 <= share < 1:
                raise ValueError(f"{name}={share!r} must be a share, from 0 to less than 1.")
        allowed = [point for point in self.points if point.fits and self._leaves_free(point, headroom)]
        if not allowed:
            raise ValueError(
                f"None of the measured sizes leaves {headroom:.0%} of the memory free: measure smaller ones."
            )
        best = max(allowed, key=_speed)
        knee = next(point for point in allowed if _speed(point) >= (1 - within) * _speed(best))
        text = (
            f"Knee: batch size {knee.batch_size:,}, {number(knee.samples_per_s, 'samples/s')}, within {within:.0%} of "
            f"the best ({number(best.samples_per_s, 'samples/s')} at {best.batch_size:,})."
        )
        return KneePoint(knee.batch_size, _speed(knee), best, text)

    def draw(self, ax: Any = None, *, within: float = 0.05, headroom: float = 0.10) -> Any:
        """Draw throughput over batch size with its spread and the knee; returns the figure, which shows itself."""
        from course_utils.plots import GREY, INK, VERMILLION, figure, style

        ran = [point for point in self.points if point.fits]
        knee = self.knee(within, headroom)
        if ax is None:
            fig, ax = figure(f"Throughput by batch size. {knee.text}")
        else:
            fig = ax.figure
        with style():
            spreads = [(point.spread or 0) / 2 for point in ran]
            sizes, speeds = [point.batch_size for point in ran], [_speed(point) for point in ran]
            ax.errorbar(sizes, speeds, yerr=spreads, marker="o", capsize=4, label="_measured")
            ax.axhline((1 - within) * _speed(knee.best), color=GREY, linestyle="--", linewidth=1.2)
            ax.plot([knee.batch_size], [knee.samples_per_s], "D", color=VERMILLION, markersize=11, zorder=3)
            ax.annotate(
                f"knee: {knee.batch_size}",
                (knee.batch_size, knee.samples_per_s),
                (8, -18),
                textcoords="offset points",
                color=INK,
            )
            failed = [point.batch_size for point in self.points if not point.fits]
            if failed:
                ax.axvline(failed[0], color=GREY, linestyle=":")
                ax.annotate(f"{failed[0]}: out of memory", (failed[0], 0), (-4, 6), "data", "offset points", ha="right")
            ax.set_ylim(bottom=0)
            ax.set_xlabel("batch size (samples)")
            ax.set_ylabel("samples/s")
        return fig

    def _leaves_free(self, point: ThroughputPoint, headroom: float) -> bool:
        if point.peak_bytes is not None and self.limit_bytes is not None:
            return point.peak_bytes <= (1 - headroom) * self.limit_bytes
        if all(one.fits for one in self.points):
            return True
        return point.batch_size <= (1 - headroom) * max(one.batch_size for one in self.points if one.fits)

    def __repr__(self) -> str:
        return text_table(_HEADERS, self._rows())

    def _repr_html_(self) -> str:
        return html_table(_HEADERS, self._rows(), "Throughput by batch size")

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (
                number(point.batch_size),
                number(point.samples_per_s, "samples/s"),
                number(point.spread, "samples/s"),
                mebibytes(point.peak_bytes),
                "yes" if point.fits else "out of memory",
            )
            for point in self.points
        ]


def throughput_curve(
    trial: Callable[[int], Any],
    batch_sizes: Sequence[int] | None = None,
    *,
    device: torch.device | str | None = None,
    memory: MemoryReadings | None = None,
    budget_s: float = 20,
    largest: int | None = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: Any = None,
    progress: bool = True,
) -> ThroughputCurve:
    """Measure samples per second of `trial(batch_size)`, one optimizer step, at several batch sizes.

    Sizes by default: multiples of 8 up to `largest` (256), powers of two and what lies half-way. Each gets one call to
    warm up and then up to 7, at least 3, within its share of `budget_s` seconds; sizes for which no time is left are
    listed as `skipped`. It stops at the first size that runs out of memory; other errors pass through. `device` is
    where the work runs, None for the CPU; `memory` is the GPU's own by default.

    The steps train: give `model` (and `optimizer`, `scaler`) to have their state put back. Random numbers always are.
    """
    if not budget_s > 0:
        raise ValueError(f"budget_s={budget_s!r} must be above 0.")
    sizes = _sizes(batch_sizes, largest)
    device = torch.device("cpu" if device is None else device)
    if memory is None and device.type == "cuda":
        memory = CudaMemory(device)
    begun = time.perf_counter()
    points: list[ThroughputPoint] = []
    state = nullcontext() if model is None else training_preserved(model, optimizer, scaler)
    bar = tqdm(sizes, desc="throughput", unit=" sizes", file=sys.stdout, leave=False, disable=not progress)
    with rng_preserved(), state, bar:
        limit = None if memory is None else memory.limit_bytes
        for index, size in enumerate(sizes):
            left = begun + budget_s - time.perf_counter()
            if points and left <= 0:
                break
            bar.set_postfix_str(f"{size:,}")
            share = max(left, 0.001) / (len(sizes) - index)
            points.append(_measure(trial, size, device, memory, share, smallest=not points))
            bar.update()
            if not points[-1].fits:
                break
    skipped = () if points and not points[-1].fits else tuple(sizes[len(points) :])
    return ThroughputCurve(tuple(points), limit, skipped)


def _measure(
    trial: Callable[[int], Any],
    size: int,
    device: torch.device,
    memory: MemoryReadings | None,
    budget_s: float,
    smallest: bool,
) -> ThroughputPoint:
    release_memory(memory)
    if memory is not None:
        memory.reset_peak()
    try:
        timing = time_call(lambda: trial(size), device=device, warmup=1, repeats=_REPEATS, budget_s=budget_s)
    except Exception as error:
        kind = classify_oom(error).kind
        if kind != "out of memory" and (kind != "maybe" or smallest):
            raise
    else:
        peak = None if memory is None else memory.peak_bytes
        return ThroughputPoint(size, timing.throughput(size), _spread(size, timing.seconds), peak, True)
    release_memory(memory, after_failure=True)  # outside the except block, where the failed step is no longer held
    return ThroughputPoint(size, None, None, None, False)


def _spread(size: int, seconds: Sequence[float]) -> float | None:
    """The interquartile range of the samples per second; None if the clock saw no time pass."""
    if min(seconds) <= 0:
        return None
    first, _, third = statistics.quantiles([size / one for one in seconds], n=4, method="inclusive")
    return third - first


def _sizes(batch_sizes: Sequence[int] | None, largest: int | None) -> list[int]:
    if batch_sizes is not None and largest is not None:
        raise ValueError("Give batch_sizes or largest, not both.")
    if batch_sizes is not None:
        sizes = sorted(set(batch_sizes))
        if not sizes:
            raise ValueError("batch_sizes is empty: give at least one size.")
    else:
        largest = _DEFAULT_LARGEST if largest is None else largest
        whole("largest", largest)
        if largest < 8:
            sizes = list(range(1, largest + 1))
        else:
            steps = sorted(2**power * base for power in range(3, largest.bit_length() + 1) for base in (2, 3))
            last = largest // 8 * 8
            sizes = [8, *(size for size in steps if size < 0.9 * last), *([last] if last > 8 else [])]
    for size in sizes:
        whole("batch size", size)
    return sizes


def _speed(point: ThroughputPoint) -> float:
    return point.samples_per_s or 0.0
