"""Counting and timing a training run without getting in its way; `workload.train` uses it."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal

import psutil
import torch
from tqdm import tqdm

from course_utils.monitor import Monitor
from course_utils.recipe import Measurement, Recipe
from course_utils.timing import mark, seconds_between, synchronize

_LOSS_STEPS = 5


class Watch:
    """Hands out batches until a limit is reached, and times all but the first `warmup_steps`.

    How long the device waits for data is measured without making it wait for anything else. A CPU is the device itself,
    so the clock is read around `next()`. On a GPU a CUDA event is recorded in its stream before and after `next()`: the
    GPU reaches the first when the step's last kernel ends, and the second not before the next batch is there. The time
    between them is how long it had nothing to do. Synchronising at every step instead would forbid the overlap that the
    lessons are about.
    """

    def __init__(
        self,
        device: torch.device,
        warmup_steps: int,
        steps: int | None,
        samples: int | None,
        seconds: float | None,
        monitor: Monitor | Literal[False] | None,
        progress: bool,
    ) -> None:
        self.device, self.warmup_steps = device, warmup_steps
        self.limit_steps, self.limit_samples, self.limit_s = steps, samples, seconds
        self.all_steps = self.steps = self.samples = 0
        self.ended_by = ""
        self._losses: list[torch.Tensor] = []
        self._waits: list[Any] = []
        self._monitor, self._own_monitor = (monitor or None), monitor is None
        self._monitored_from_s = 0.0
        self._monitoring, self._whole = ExitStack(), ExitStack()
        self._bar = tqdm(
            total=samples,
            unit=" samples",
            desc="training",
            file=sys.stdout,
            leave=False,
            mininterval=0.3,
            disable=not progress,
        )
        self._process, self._peak_rss = psutil.Process(), 0
        self._started = self._seconds = self._first_batch = self._warmup_s = 0.0

    def __enter__(self) -> Watch:
        self._whole.callback(self._bar.close)
        self._whole.enter_context(self._monitoring)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._whole.__exit__(kind, error, trace)

    def watch_memory(self, model: torch.nn.Module) -> None:
        """On a CPU, look at the process's memory after each forward, when all activations are alive."""
        if self.device.type == "cpu":
            hook = model.register_forward_hook(lambda *_: self._note_memory())
            self._whole.callback(hook.remove)

    def _note_memory(self) -> None:
        if self._started:
            self._peak_rss = max(self._peak_rss, self._process.memory_info().rss)

    def batches(self, loader: Any) -> Iterator[Any]:
        """The loader's batches, epoch after epoch, until a limit is reached. Its workers end with the `with` block."""
        batches = self._batches(loader)
        self._whole.callback(batches.close)
        return batches

    def _batches(self, loader: Any) -> Generator[Any, None, None]:
        iterator = None
        try:
            while not self.ended_by:
                if self.all_steps == self.warmup_steps:
                    self._start()
                asked = mark(self.device)
                batch = next(iterator, None) if iterator is not None else None
                if batch is None:  # the epoch is over, or none has begun
                    with no_worker_advice():
                        iterator = iter(loader)
                    batch = next(iterator)
                if self._started:
                    self._waits.append((asked, mark(self.device)))
                elif not self.all_steps:
                    self._first_batch = time.perf_counter()
                yield batch
            self._stop()
        finally:
            # A traceback may still hold the iterator, and with it the workers; torch has no public way to end them.
            shut_down = getattr(iterator, "_shutdown_workers", None)
            if shut_down is not None:
                shut_down()

    def count(self, loss: torch.Tensor, samples: int) -> None:
        """Note a finished step: its loss (kept on the device, not read) and how many samples it held."""
        self.all_steps += 1
        self._losses.append(loss.detach())
        if not self._started:
            return
        self.steps += 1
        self.samples += samples
        self._bar.update(samples)
        if self._monitor is not None:
            self._monitor.refresh()  # its live view, if it has one and is due
        if self.limit_steps is not None and self.steps >= self.limit_steps:
            self.ended_by = "steps"
        elif self.limit_samples is not None and self.samples >= self.limit_samples:
            self.ended_by = "samples"
        elif self.limit_s is not None and time.perf_counter() - self._started >= self.limit_s:
            self.ended_by = "time"

    def show(self, loss: float) -> None:
        """Put the loss beside the progress bar."""
        self._bar.set_postfix_str(f"loss {loss:.2f}", refresh=False)

    def extra_warmup_s(self) -> float:
        """How much longer the warm-up took, once its first batch was there, than as many measured steps."""
        return max(0.0, self._warmup_s - self.warmup_steps * self._seconds / self.steps)

    def measurement(self, recipe: Recipe, notes: tuple[str, ...]) -> Measurement:
        """What was measured; call it once, after the loop."""
        on_gpu = self.device.type == "cuda"
        losses = torch.stack(self._losses).float().cpu()
        window = max(1, min(_LOSS_STEPS, len(losses) // 3))
        busy, busy_source = self._busy()
        return Measurement(
            recipe=recipe,
            device=torch.cuda.get_device_name(self.device) if on_gpu else "CPU",
            samples=self.samples,
            steps=self.steps,
            warmup_steps=self.warmup_steps,
            seconds=self._seconds,
            data_wait_s=sum(seconds_between(*wait) for wait in self._waits),
            busy_percent=busy,
            busy_source=busy_source,
            peak_memory_bytes=torch.cuda.max_memory_allocated(self.device) if on_gpu else self._peak_rss,
            memory_source="tensors on the GPU" if on_gpu else "this process in RAM, looked at after each forward",
            loss_start=float(losses[:window].mean()),
            loss_end=float(losses[-window:].mean()),
            ended_by=self.ended_by,
            torch_version=str(torch.__version__),
            notes=notes,
        )

    def _busy(self) -> tuple[float | None, str]:
        """The mean busy % of the measured steps, and of what."""
        if self._monitor is None:
            return None, "not monitored"
        trace = self._monitor.trace
        trace = replace(trace, samples=tuple(it for it in trace.samples if it.time_s > self._monitored_from_s))
        number = min(self.device.index or 0, len(trace.devices) - 1)
        return (trace.summary(number).busy_percent.mean if trace.samples else None), trace.label

    def _start(self) -> None:
        if self._own_monitor:
            # A run on the CPU of a machine with a GPU is judged by the CPU.
            self._monitor = self._monitoring.enter_context(Monitor(device=self.device))
        elif self._monitor is not None:
            recorded = self._monitor.trace.samples
            self._monitored_from_s = recorded[-1].time_s if recorded else 0.0
        synchronize(self.device)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self._started = time.perf_counter()
        self._warmup_s = self._started - self._first_batch

    def _stop(self) -> None:
        synchronize(self.device)
        self._seconds = time.perf_counter() - self._started
        self._monitoring.close()


@contextmanager
def no_worker_advice() -> Iterator[None]:
    """Without torch's warning of more workers than CPUs: the measurement's note says it, and what to do."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*suggested max number of worker", UserWarning)
        yield
