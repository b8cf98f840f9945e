"""The thread that collects: it asks the backend at an interval, and does nothing else. It never draws."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

from course_utils.monitor_trace import Sample, Trace
from course_utils.monitor_types import Backend, Device, Reading, finite, percent, whole

MAX_SAMPLES = 20_000
_MAX_NOTES = 20
_GRACE_S = 0.5
_NOTHING = Device("nothing")


class Collector:
    """Samples a backend in a daemon thread, from `start` to `stop`; `trace` may be asked at any time.

    Opening the backend happens in the thread too, so that a driver that hangs then cannot hold up the caller. The
    first sample is taken one interval after the start, because utilisation looks back; the last one at the stop.
    """

    def __init__(self, open_backend: Callable[[], Backend], interval_s: float, timeout_s: float, *, close: bool):
        self._open_backend, self._close = open_backend, close
        self._interval_s, self._timeout_s = interval_s, timeout_s
        self._thread = threading.Thread(target=self._run, name="course_utils monitor", daemon=True)
        self._lock = threading.Lock()
        self._opened, self._go, self._stop = threading.Event(), threading.Event(), threading.Event()
        self._backend: Backend | None = None
        self._started_at = time.perf_counter()
        self._waiting_since: float | None = None  # when the call into the backend began that has not returned
        self._abandoned = False
        self._samples: list[Sample] = []
        self._failed = self._timed_out = 0
        self._notes: dict[str, None] = {}  # an ordered set
        self.cpu_s: float | None = None

    def start(self) -> None:
        """Start the thread and wait until the backend is open, at most the timeout."""
        self._thread.start()
        self._opened.wait(self._timeout_s)
        self._started_at = time.perf_counter()
        self._go.set()

    def ask_to_stop(self) -> None:
        """Let the thread end at its next chance, without waiting."""
        self._stop.set()

    def stop(self) -> None:
        """End the thread. A backend that hangs is given up when its call is a little older than the timeout."""
        self._stop.set()
        since = self._waiting_since
        patience = self._patience_s() - (time.perf_counter() - since if since is not None else 0.0)
        self._thread.join(max(0.0, patience))
        with self._lock:
            if self._thread.is_alive() and not self._abandoned:
                self._abandoned = True
                self._timed_out += 1
                self._note(f"The backend did not answer within {self._timeout_s:.3g} s and was given up.")

    def trace(self) -> Trace:
        """What there is so far. A call that hangs counts as timed out once it is older than the timeout."""
        with self._lock:
            backend, since = self._backend, self._waiting_since
            hangs = since is not None and not self._abandoned and time.perf_counter() - since > self._patience_s()
            return Trace(
                source=backend.source if backend else "none",
                label=backend.label if backend else "not measured",
                devices=tuple(backend.devices) if backend else (_NOTHING,),
                samples=tuple(self._samples),
                interval_s=self._interval_s,
                failed=self._failed,
                timed_out=self._timed_out + hangs,
                notes=(*self._notes, *(backend.notes if backend else ())),
            )

    def _patience_s(self) -> float:
        # A little longer than the timeout: a backend that keeps to it itself shall have the first word.
        return self._timeout_s + min(self._interval_s, _GRACE_S)

    def _run(self) -> None:
        self._waiting_since = time.perf_counter()
        try:
            backend = self._open_backend()
            self._interval_s = max(self._interval_s, backend.min_interval_s)
        except Exception as error:  # noqa: BLE001 - whatever it is, the learner's code goes on and the trace says why
            self._note(f"Nothing could be measured: {_said(error)}")
            return
        finally:
            self._waiting_since = None
            self._opened.set()
        self._backend = backend
        try:
            self._go.wait()
            self._sample_until_stopped(backend)
        finally:
            if self._close:
                backend.close()
            self.cpu_s = time.thread_time()

    def _sample_until_stopped(self, backend: Backend) -> None:
        due = self._started_at + self._interval_s
        stopping = False
        while not stopping and not self._abandoned:
            stopping = self._stop.wait(max(0.0, due - time.perf_counter()))
            self._take_sample(backend)
            now = time.perf_counter()
            # Late samples are not caught up in a burst, and a slow backend is not asked again at once.
            due = due + self._interval_s if due + self._interval_s > now else now + self._interval_s

    def _take_sample(self, backend: Backend) -> None:
        self._waiting_since = time.perf_counter()
        failed = timed_out = 0
        readings: tuple[Reading, ...] = ()
        try:
            readings = tuple(_clean(reading) for reading in backend.read())
            if len(readings) != len(backend.devices):
                raise ValueError(f"{len(readings)} readings for {len(backend.devices)} devices.")
        except TimeoutError:
            timed_out = 1
        except Exception as error:  # noqa: BLE001 - a backend's failure is counted and reported, never the learner's
            failed = 1
            with self._lock:
                self._note(f"A sample failed: {_said(error)}")
        if failed or timed_out:
            readings = (Reading(),) * len(backend.devices)  # so that its time counts as unknown
        with self._lock:
            self._waiting_since = None
            if self._abandoned:
                return
            self._failed += failed
            self._timed_out += timed_out
            self._samples.append(Sample(time.perf_counter() - self._started_at, readings))
            if len(self._samples) > MAX_SAMPLES:
                # Bounded memory: keep every second sample, each of which then stands for twice the time.
                del self._samples[::2]
                self._interval_s *= 2

    def _note(self, sentence: str) -> None:
        if len(self._notes) < _MAX_NOTES:
            self._notes.setdefault(sentence)


def _clean(reading: Reading) -> Reading:
    """The reading without values that no sensor can show (NaN, 120 %): None in their place."""
    return replace(
        reading,
        busy_percent=percent(reading.busy_percent),
        memory_busy_percent=percent(reading.memory_busy_percent),
        used_bytes=finite(reading.used_bytes),
        power_w=finite(reading.power_w),
        temperature_c=finite(reading.temperature_c),
        sm_clock_mhz=finite(reading.sm_clock_mhz),
        throttle_bits=whole(reading.throttle_bits),
    )


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:200]
