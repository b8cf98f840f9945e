"""The clocks and counters behind MonitorCallback: one training run, from its first batch to its last."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import psutil
import torch

from course_utils.lightning_measurement import FitMeasurement, Window
from course_utils.monitor import Monitor
from course_utils.timing import mark, seconds_between, synchronize

# What Trainer's loop calls the fetching of a batch when it tells its profiler so (read in Lightning 2.6.6,
# pytorch/loops/training_epoch_loop.py).
_FETCH = ".train_dataloader_next"
_MOST_PAIRS = 1000  # marks of waits that are kept before they are added up


class Run:
    """Counts and times the training batches after `warmup_batches`, on the device's own clock.

    On a GPU a mark is a CUDA event: no batch makes the CPU wait. Only measuring's start and validation wait for the
    GPU. What the log gets meanwhile is timed by the CPU's clock, which the GPU may be some steps behind.
    """

    def __init__(self, device: torch.device, warmup_batches: int, optimizer_step: int) -> None:
        self.device, self.warmup_batches = device, warmup_batches
        self.windows: list[Window] = []
        self.logged_step = optimizer_step
        self._warmed, self._batches, self._samples = 0, 0, 0
        self._step = self._first_step = optimizer_step
        self._start: Any = None  # marks
        self._last: Any = None
        self._asked: Any = None
        self._waits: list[tuple[Any, Any]] = []
        self._wait_s, self._heard_fetch = 0.0, False
        self._paused_at: float | None = None
        self._pause_s = self._paused_s = 0.0  # of the last pause; of all that a batch has followed
        self._process, self._peak_rss = psutil.Process(), 0
        self._stop_listening: Callable[[], None] = lambda: None
        self.ended_by = ""
        self.monitor = Monitor(device=device).start()
        self._sampling_since = time.perf_counter()
        self._measured_from_s = 0.0
        self._window = (0.0, 0, 0.0, 0.0)  # where the current one began: time, samples, waited, paused

    def listen(self, profiler: Any) -> None:
        """Hear from the Trainer's profiler when a batch is asked for and when it is there.

        The profiler's two methods are covered on this one object, whatever its class, until `end`. A hook before the
        fetch does not exist, and the time between two hooks holds Trainer's own work too.
        """
        start, stop = profiler.start, profiler.stop

        def started(action: str) -> None:
            if action.endswith(_FETCH):
                self._ask()
            start(action)

        def stopped(action: str) -> None:
            stop(action)
            if action.endswith(_FETCH):
                self._have()

        profiler.start, profiler.stop = started, stopped

        def stop_listening() -> None:
            for name, ours in (("start", started), ("stop", stopped)):
                if vars(profiler).get(name) is ours:
                    delattr(profiler, name)

        self._stop_listening = stop_listening

    def _ask(self) -> None:
        self.begin_if_due()
        if self._start is not None:
            self._asked = mark(self.device)

    def _have(self) -> None:
        self._heard_fetch = True
        if self._asked is not None:
            self._waits.append((self._asked, mark(self.device)))
            self._asked = None

    def begin_if_due(self) -> None:
        """Start measuring once the warm-up is over."""
        if self._start is not None or self._warmed < self.warmup_batches:
            return
        if self.device.type == "cuda":
            synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        self._first_step = self._step
        self._measured_from_s = self._now_s()
        self._window = (self._measured_from_s, 0, 0.0, 0.0)
        self._start = mark(self.device)

    def look_at_memory(self) -> None:
        """On a CPU, note what the process takes now."""
        if self._start is not None and self.device.type != "cuda":
            self._peak_rss = max(self._peak_rss, self._process.memory_info().rss)

    def batch_done(self, samples: int, optimizer_step: int) -> None:
        """A batch was trained on."""
        self._step = optimizer_step
        if self._start is None:
            self._warmed += 1
            return
        self._batches += 1
        self._samples += samples
        self._paused_s += self._pause_s
        self._pause_s = 0.0
        self._last = mark(self.device)
        if len(self._waits) > _MOST_PAIRS:
            self._add_up_waits()

    def pause(self) -> None:
        """Validation begins."""
        self._wait_for_device()
        self._paused_at = time.perf_counter()

    def resume(self) -> None:
        """Validation is over. Its time is taken off once another batch follows: after the last one no clock runs."""
        self._wait_for_device()
        if self._paused_at is not None and self._start is not None:
            self._pause_s += time.perf_counter() - self._paused_at
        self._paused_at = None

    def window(self) -> Window | None:
        """What was measured since the last window; None while there is nothing."""
        if self._last is None:
            return None
        self._add_up_waits()
        now_s, (from_s, samples, waited_s, paused_s) = self._now_s(), self._window
        seconds = now_s - from_s - (self._paused_s - paused_s)
        if self._samples == samples or seconds <= 0:
            return None
        waited = min(100.0, 100 * (self._wait_s - waited_s) / seconds) if self._heard_fetch else None
        window = Window(
            from_s, now_s, self._step, (self._samples - samples) / seconds, waited, self._busy(from_s)[0], self._peak()
        )
        self._window = (now_s, self._samples, self._wait_s, self._paused_s)
        self.windows.append(window)
        return window

    def end(self, by: str = "") -> None:
        """Stop sampling and listening; a second call does nothing."""
        self._stop_listening()
        self._stop_listening = lambda: None
        self.ended_by = self.ended_by or by
        self.monitor.stop()

    def measurement(self) -> FitMeasurement:
        """All of it; RuntimeError if no batch came after the warm-up."""
        if self._start is None or self._last is None:
            raise RuntimeError(
                f"Nothing was measured: the run had {self._warmed} batches, and the first {self.warmup_batches} are "
                "warm-up. Train longer, or give MonitorCallback(warmup_batches=0)."
            )
        self._wait_for_device()
        self._add_up_waits()
        on_gpu = self.device.type == "cuda"
        busy, source = self._busy(self._measured_from_s)
        notes = [f"ended by {self.ended_by}"] if self.ended_by else []
        if not self._heard_fetch:
            notes.append("this version of Lightning does not tell when it asks for a batch: the wait is not known")
        return FitMeasurement(
            device=torch.cuda.get_device_name(self.device) if on_gpu else self.device.type.upper(),
            samples=self._samples,
            batches=self._batches,
            optimizer_steps=self._step - self._first_step,
            warmup_batches=self.warmup_batches,
            seconds=seconds_between(self._start, self._last) - self._paused_s,
            data_wait_s=self._wait_s if self._heard_fetch else None,
            busy_percent=busy,
            busy_source=source,
            peak_memory_bytes=self._peak(),
            memory_source="tensors on the GPU" if on_gpu else "this process in RAM, looked at before each backward",
            versions=_versions(),
            notes=tuple(notes),
        )

    @property
    def watched(self) -> int:
        """Which of the trace's devices the training runs on."""
        return min(self.device.index or 0, len(self.monitor.trace.devices) - 1)

    def _busy(self, since_s: float) -> tuple[float | None, str]:
        """Mean busy % of the samples after `since_s`, and of what; None if there are none."""
        trace = self.monitor.trace
        trace = replace(trace, samples=tuple(sample for sample in trace.samples if sample.time_s > since_s))
        return (trace.summary(self.watched).busy_percent.mean if trace.samples else None), trace.label

    def _peak(self) -> int | None:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return self._peak_rss or None

    def _now_s(self) -> float:
        """Seconds since sampling began, the time axis of the trace."""
        return time.perf_counter() - self._sampling_since

    def _add_up_waits(self) -> None:
        """Add the waits that are over; what a GPU has not reached yet stays for later."""
        over = [self.device.type != "cuda" or later.query() for _, later in self._waits]
        self._wait_s += sum(seconds_between(*pair) for pair, done in zip(self._waits, over, strict=True) if done)
        self._waits = [pair for pair, done in zip(self._waits, over, strict=True) if not done]

    def _wait_for_device(self) -> None:
        if self.device.type == "cuda":
            synchronize(self.device)


def _versions() -> str:
    import lightning

    return f"torch {torch.__version__}, Lightning {lightning.__version__}"
