"""Watch the GPU while your code runs: how busy it is, its memory, power, temperature and clocks.

    with Monitor() as monitor:
        train()
    monitor.summary()
    monitor.plot()

It asks NVML; without it nvidia-smi; without a GPU it measures CPU and RAM, and says so ("CPU, not a GPU"). A background
thread only collects; drawing happens on the main thread, because Colab does not redraw what a thread changes. For a
live view, tell it when to look:

    with Monitor(live=True) as monitor:
        for batch in monitor.watch(loader):      # or call monitor.refresh() in your loop
            step(batch)

Utilisation is NVML's average over its last 1/6 s to 1 s (docs.nvidia.com/deploy/nvml-api, nvmlUtilization_t), so asking
more often than every 200 ms adds little. To time code, use `course_utils.timing`.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from course_utils.monitor_backends import Backend, CpuBackend, Device, NvmlBackend, Reading, SmiBackend, open_backend
from course_utils.monitor_collector import Collector
from course_utils.monitor_trace import Sample, Statistic, Summary, Trace

__all__ = [
    "Backend",
    "CpuBackend",
    "Device",
    "Monitor",
    "NvmlBackend",
    "Reading",
    "Sample",
    "SmiBackend",
    "Statistic",
    "Summary",
    "Trace",
    "open_backend",
]

_LIVE_INTERVAL_S = 0.2  # at most five times a second
_LIVE_COST = 50  # and at most 1/50 of the time goes into drawing
Item = TypeVar("Item")


class Monitor:
    """Samples a device while a `with` block runs; afterwards, and meanwhile, `summary`, `plot`, `save` and `trace`.

    `device` is where the work runs, as torch names it: "cpu" watches the CPU even where a GPU is listed that torch
    cannot use, "cuda:1" makes that GPU the one to summarise. None: the first GPU, else the CPU.
    `interval_s` is 0.01 to 60 s. `backend` replaces the automatic choice, and then stays open. `timeout_s` is how long
    a sample may take: a backend that hangs is given up and counted. At most 20,000 samples are kept: past that every
    second one is dropped and the interval doubles. One monitor records once; several may run at the same time.
    """

    def __init__(
        self,
        interval_s: float = 0.2,
        backend: Backend | None = None,
        live: bool = False,
        *,
        device: object = None,
        timeout_s: float = 2.0,
    ):
        kind, _, number = str(device or "").partition(":")
        self._device = int(number or 0) if kind == "cuda" else 0
        self._collector = Collector(
            _opener(backend, kind, timeout_s),
            _seconds("interval_s", interval_s),
            _seconds("timeout_s", timeout_s),
            close=backend is None,
        )
        if backend is not None and not (callable(getattr(backend, "read", None)) and hasattr(backend, "devices")):
            raise TypeError(
                f"backend must have devices and read(), see course_utils.monitor.Backend; got {backend!r:.80}."
            )
        self._state = "new"
        self._live = live
        self._screen: Any = None
        self._next_draw = 0.0
        # A monitor that was started and then forgotten (a cell run again) ends its thread.
        weakref.finalize(self, self._collector.ask_to_stop).atexit = False

    def start(self) -> Monitor:
        """Begin to sample. `with Monitor() as monitor:` does this, and stops at the end of the block."""
        if self._state != "new":
            raise RuntimeError(
                "This monitor has recorded already, and keeps its samples: make a new one with Monitor()."
            )
        self._state = "running"
        self._collector.start()
        self.refresh()
        return self

    def stop(self) -> Monitor:
        """Stop sampling; the samples stay. Returns within `timeout_s` + `interval_s` even if the backend hangs."""
        if self._state == "running":
            self._state = "stopped"
            self._collector.stop()
        return self

    def __enter__(self) -> Monitor:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
        if kind is None:
            self.refresh(force=True)
        if self._screen is not None:
            self._screen.end()

    @property
    def trace(self) -> Trace:
        """Everything recorded so far, as a value that no longer changes."""
        return self._collector.trace()

    @property
    def source(self) -> str:
        """Where the readings come from: "NVML", "nvidia-smi" or "CPU (psutil)"."""
        return self.trace.source

    @property
    def label(self) -> str:
        """What is measured: "GPU" or "CPU, not a GPU"."""
        return self.trace.label

    @property
    def cpu_s(self) -> float | None:
        """CPU seconds that sampling itself has cost; None until it has stopped."""
        return self._collector.cpu_s

    def summary(self, device: int | None = None) -> Summary:
        """Mean, median, extremes and the share of idle time of the watched device, or of torch's cuda:`device`."""
        trace = self.trace
        return trace.summary(self._watched(trace) if device is None else device)

    def values(self, metric: str = "busy_percent") -> list[Any]:
        """One value a sample of the watched device, None where it could not be read; see `Trace.values`."""
        trace = self.trace
        return trace.values(metric, self._watched(trace))

    def plot(self, device: int | None = None) -> None:
        """Show busy %, memory and power over time. Call it on the main thread."""
        trace = self.trace
        trace.plot(self._watched(trace) if device is None else device)

    def _watched(self, trace: Trace) -> int:
        # Where the GPUs could not be read, the CPU stands in for all of them.
        return min(self._device, max(0, len(trace.devices) - 1))

    def save(self, path: str | Path) -> Path:
        """Save the trace as .json or .csv; `Trace.load(path)` reads it back."""
        return self.trace.save(path)

    def refresh(self, force: bool = False) -> None:
        """Redraw the live view, if it was asked for and is due: at most five times a second, on the main thread only.

        Cheap to call at every step: most calls only look at the clock.
        """
        now = time.perf_counter()
        if not self._live or (now < self._next_draw and not force):
            return
        if threading.current_thread() is not threading.main_thread():
            return  # a thread must not draw: Colab would not show it
        from course_utils.monitor_view import LiveView, Screen

        if self._screen is None:
            self._screen = Screen()
        self._screen.show(LiveView(self.trace))
        took = time.perf_counter() - now
        self._next_draw = now + max(_LIVE_INTERVAL_S, _LIVE_COST * took)

    def watch(self, items: Iterable[Item]) -> Iterator[Item]:
        """The same items, with the live view redrawn in between: `for batch in monitor.watch(loader):`."""
        for item in items:
            yield item
            self.refresh()

    def __repr__(self) -> str:
        if self._state == "new":
            return "Monitor, not started: use `with Monitor() as monitor:`."
        return f"Monitor, {self._state}\n{self.summary()!r}"

    def _repr_html_(self) -> str | None:
        return None if self._state == "new" else self.summary()._repr_html_()


def _opener(backend: Backend | None, kind: str, timeout_s: float) -> Callable[[], Backend]:
    """What opens the backend, later and in the thread: a driver that hangs must not hold up the `with`."""
    if kind not in ("", "cpu", "cuda"):
        raise ValueError(f"device {kind!r} cannot be watched: give 'cpu', 'cuda:0' or leave it out.")
    if backend is not None:
        return lambda: backend
    return CpuBackend if kind == "cpu" else lambda: open_backend(timeout_s=timeout_s)


def _seconds(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (0.01 <= value <= 60) or math.isnan(value):
        raise ValueError(f"{name} must be a number of seconds between 0.01 and 60, not {value!r}.")
    return float(value)
