"""Device-aware timing: how long a call really takes, on a CPU or on a GPU.

A CUDA call returns when the work is queued, not when it is done, so a clock that does not wait reads the launch
(pytorch/pytorch#18012). `time_call` waits before it starts and before it stops.

torch.utils.benchmark is not underneath. It serves where a function takes microseconds (`blocked_autorange` repeats
it in blocks, so that the clock's own cost does not count) and where variants are compared in one table. Use it there:
`torch.utils.benchmark.Timer("f()", globals={"f": f}, num_threads=torch.get_num_threads()).blocked_autorange()`.
It does not serve here (read in torch 2.11 and 2.14, torch/utils/benchmark/utils/timer.py): it sets PyTorch to one CPU
thread unless told otherwise; it chooses the number of calls and bounds the time only loosely; its clock waits for the
current accelerator, not for the device asked for; and importing it takes about 0.3 s, and on a machine with a CUDA
toolkit but no GPU prints a warning about CUDA_HOME.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from course_utils.views import html_table, number

_FEWEST_REPEATS = 3


@dataclass(frozen=True)
class Timing:
    """Seconds for each measured call, warm-up left out, and how they were taken."""

    seconds: tuple[float, ...]
    device: str
    method: str  # "CUDA events" or "perf_counter"

    @property
    def repeats(self) -> int:
        """How many calls were measured; fewer than asked for where the time budget ran out."""
        return len(self.seconds)

    @property
    def median_s(self) -> float:
        """The median in seconds: one slow call does not move it."""
        return statistics.median(self.seconds)

    @property
    def min_s(self) -> float:
        """The fastest call in seconds."""
        return min(self.seconds)

    @property
    def spread_s(self) -> float:
        """The interquartile range in seconds: the middle half of the calls lies within it. 0 for a single call."""
        if len(self.seconds) < 2:
            return 0.0
        first, _, third = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return third - first

    def throughput(self, samples: int) -> float | None:
        """Samples per second, if each call works on `samples` of them; None if the clock saw no time pass."""
        _check_count("samples", samples, least=1)
        return samples / self.median_s if self.median_s > 0 else None

    def __repr__(self) -> str:
        calls = f"{self.repeats} call{'' if self.repeats == 1 else 's'}"
        return (
            f"Timing: median {_duration(self.median_s)}, spread {_duration(self.spread_s)}, "
            f"fastest {_duration(self.min_s)} ({calls} on {self.device}, {self.method})"
        )

    def _repr_html_(self) -> str:
        row = [_duration(self.median_s), _duration(self.spread_s), _duration(self.min_s)]
        headers = ["device", "median", "spread (interquartile)", "fastest", "calls", "clock"]
        return html_table(headers, [[self.device, *row, str(self.repeats), self.method]], "Time of one call")


def synchronize(device: torch.device | str | None = None) -> None:
    """Wait until `device` has done all its work. A CPU (and None) has nothing to wait for: there it does nothing.

    Without this, torch.cuda.synchronize() raises on a machine that has no GPU.
    """
    device = _usable(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_call(
    function: Callable[[], object],
    *,
    device: torch.device | str | None = None,
    warmup: int = 1,
    repeats: int = 7,
    budget_s: float = 2.0,
) -> Timing:
    """Measure `function()`, in seconds a call.

    `device` is where its work runs; None is the CPU. `warmup` calls go first and are not counted: the first call also
    loads kernels, allocates memory and fills caches. It makes `repeats` calls, or fewer once `budget_s` seconds have
    gone, warm-up included, but at least 3 (or `repeats`, if that is less). The budget is looked at between calls: a
    call is never cut short. What `function` raises passes through.

    On a GPU, work that `function` puts on another stream counts only if the current stream waits for it.
    """
    if not callable(function):
        raise TypeError(f"time_call needs a function to call, such as `lambda: model(batch)`, not {function!r:.80}.")
    _check_count("repeats", repeats, least=1)
    _check_count("warmup", warmup, least=0)
    if not (budget_s > 0 and math.isfinite(budget_s)):
        raise ValueError(f"budget_s must be a positive number of seconds, not {budget_s}.")
    device = _usable(device)
    begun = time.perf_counter()
    for _ in range(warmup):
        function()
    seconds: list[float] = []
    while len(seconds) < repeats:
        if len(seconds) >= _FEWEST_REPEATS and time.perf_counter() - begun >= budget_s:
            break
        seconds.append(_by_cuda_events(function, device) if device.type == "cuda" else _by_clock(function))
    return Timing(tuple(seconds), str(device), "CUDA events" if device.type == "cuda" else "perf_counter")


def mark(device: torch.device) -> Any:
    """Now, on the device's own clock: seconds on a CPU, on a GPU an event that its current stream has yet to reach."""
    if device.type != "cuda":
        return time.perf_counter()
    event = _event()
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(earlier: Any, later: Any) -> float:
    """Seconds between two marks of one device; a GPU must have reached both."""
    if isinstance(earlier, float):
        return float(later - earlier)
    return float(earlier.elapsed_time(later)) / 1000  # elapsed_time is in milliseconds


def _by_clock(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _by_cuda_events(function: Callable[[], object], device: torch.device) -> float:
    # Events are recorded on the current device's current stream, which need not be the device asked for.
    with torch.cuda.device(device):
        start, end = _event(), _event()
        # Work that was queued before is not this call's, and it would hide the time that this call's launches take.
        synchronize(device)
        start.record()
        function()
        end.record()
        synchronize(device)  # the call is not over when it has only been queued
        return float(start.elapsed_time(end)) / 1000  # elapsed_time is in milliseconds


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call,unused-ignore]


def _usable(device: torch.device | str | None) -> torch.device:
    """The device as torch.device, if this machine has it."""
    try:
        device = torch.device("cpu" if device is None else device)
    except RuntimeError:
        raise ValueError(f"{device!r} is not a device: write 'cpu', 'cuda' or 'cuda:0'.") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"Timing knows the devices cpu and cuda, not {device}.")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0:
            raise ValueError(f"There is no usable GPU here to time {device} on: use runtime.pick_device(), or 'cpu'.")
        if device.index is not None and device.index >= count:
            raise ValueError(f"There is no {device} here: the last of this machine's GPUs is cuda:{count - 1}.")
    return device


def _check_count(name: str, value: int, *, least: int) -> None:
    if not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, not {value!r}.")


def _duration(seconds: float) -> str:
    unit, size = ("s", 1.0) if seconds >= 1 else ("ms", 1e-3) if seconds >= 1e-3 else ("µs", 1e-6)
    value = seconds / size
    return number(value, unit, 0 if value >= 100 or value == 0 else 1 if value >= 10 else 2)
