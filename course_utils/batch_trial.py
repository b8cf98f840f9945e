"""Running one batch size for real, for `find_batch_size` and `throughput_curve`: steps, peak memory, clean recovery."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from course_utils.batch_result import Outcome, Trial
from course_utils.oom import classify_oom
from course_utils.preserve import TrainingState
from course_utils.timing import synchronize

TrialFunction = Callable[[int], Any]

# A float16 scaler starts at a scale of 65,536 and halves it at each step that overflows, so a few skips are normal.
_MOST_SKIPS = 16


class MemoryReadings(Protocol):
    """What a finder reads memory from: `SimulatedMemory`, `CudaMemory`, or your own. `release()` is optional."""

    @property
    def limit_bytes(self) -> int | None:
        """What may be in use at most; None where there is no limit."""

    @property
    def peak_bytes(self) -> int | None:
        """The most that was in use since `reset_peak()`; None where it cannot be read."""

    def reset_peak(self) -> None:
        """Begin a new peak at what is in use now."""


class CudaMemory:
    """The memory that PyTorch's allocator on one GPU has taken and may still take.

    It reads reserved memory, not allocated: what the allocator holds but cannot hand out, because it lies in pieces, is
    missing to the batch all the same. `limit_bytes` is what is free now plus what is reserved, and no more than
    `torch.cuda.set_per_process_memory_fraction` allows.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def limit_bytes(self) -> int:
        """Free plus reserved bytes, or the process's allowed share of the GPU where that is less."""
        free, total = torch.cuda.mem_get_info(self._device)
        allowed = torch.cuda.get_per_process_memory_fraction(self._device) * total
        return int(min(free + torch.cuda.memory_reserved(self._device), allowed))

    @property
    def peak_bytes(self) -> int:
        """The most that was reserved since `reset_peak()`."""
        return int(torch.cuda.max_memory_reserved(self._device))

    def reset_peak(self) -> None:
        """Begin a new peak at what is reserved now."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def release(self) -> None:
        """Give cached blocks back to the driver, so that one size's blocks do not count for the next."""
        torch.cuda.empty_cache()


def device_of(model: nn.Module) -> torch.device:
    """The device of the model's first parameter or buffer; the CPU for a model without any."""
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        return tensor.device
    return torch.device("cpu")


def release_memory(memory: MemoryReadings | None, *, after_failure: bool = False) -> None:
    """Free what nothing refers to any more. Call it outside the `except` block, which keeps the failed step alive.

    A failed step may leave old cycles of references; looking through all objects for them takes a good part of a
    second, so after a success only the young objects are looked at.
    """
    gc.collect(2 if after_failure else 1)
    if memory is not None and hasattr(memory, "release"):
        memory.release()


class TrialRunner:
    """Runs sizes, each from the same training state; keep it open with `with`, so that its hook is removed.

    `errors` collects the out-of-memory errors, without their tracebacks and so without their tensors.
    """

    def __init__(
        self,
        trial: TrialFunction,
        state: TrainingState,
        optimizer: torch.optim.Optimizer,
        scaler: Any,
        memory: MemoryReadings | None,
        device: torch.device,
        steps: int,
    ) -> None:
        self._trial, self._state, self._scaler, self._memory = trial, state, scaler, memory
        self._device, self._steps, self._optimizer_steps = device, steps, 0
        self._failed = False
        self.errors: list[Exception] = []
        self._hook = optimizer.register_step_post_hook(self._count)

    def __enter__(self) -> TrialRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    def _count(self, *_: object) -> None:
        self._optimizer_steps += 1

    def rest_bytes(self) -> int | None:
        """Bytes in use before any step."""
        self._begin()
        return None if self._memory is None else self._memory.peak_bytes

    def run(self, batch_size: int, budget_bytes: float | None, deadline_s: float) -> Trial:
        """Run the steps at one size. Only errors that mean memory become an outcome, all others pass through."""
        self._begin()
        done: list[float] = []  # seconds of each step
        outcome: Outcome = "fits"
        failure: Exception | None = None
        try:
            self._make_steps(batch_size, done, deadline_s)
        except Exception as error:
            verdict = classify_oom(error)
            if not verdict.smaller_may_help:
                if verdict.kind in ("fatal", "loader"):
                    error.add_note(verdict.advice)
                elif self.errors:
                    error.add_note(f"Larger batches ran out of memory before: {_first_line(self.errors[0])}")
                raise
            outcome = "out of memory" if verdict.kind == "out of memory" else "maybe out of memory"
            failure = error
        # Outside the except block, and without the tracebacks, the failed step's tensors can be freed.
        peak = None
        if failure is not None:
            _forget_frames(failure)
            self.errors.append(failure)
            self._failed = True
        else:
            peak = None if self._memory is None else self._memory.peak_bytes
            if len(done) < self._steps:
                outcome = "stopped by time"
            elif budget_bytes is not None and peak is not None and peak > budget_bytes:
                outcome = "too little left"
        last = done[-1] if done else None
        speed = batch_size / last if last else None
        return Trial(batch_size, outcome, len(done), peak, last, speed, _first_line(failure))

    def _begin(self) -> None:
        """The state of the beginning, and no memory that an earlier size left behind."""
        self._state.restore()
        release_memory(self._memory, after_failure=self._failed)
        self._failed = False
        if self._memory is not None:
            self._memory.reset_peak()

    def _make_steps(self, batch_size: int, done: list[float], deadline_s: float) -> None:
        skipped = 0
        while len(done) < self._steps:
            before, scale = self._optimizer_steps, self._scale()
            begun = time.perf_counter()
            used = self._trial(batch_size)
            synchronize(self._device)
            seconds = time.perf_counter() - begun
            _check_samples(batch_size, used)
            if self._optimizer_steps > before:
                done.append(seconds)
            elif scale is not None and skipped < _MOST_SKIPS and (self._scale() or 0) < scale:
                skipped += 1  # gradients overflowed: the scaler left this step out and lowered its scale
            else:
                raise RuntimeError(_no_step(batch_size, skipped))
            if time.perf_counter() >= deadline_s:
                return

    def _scale(self) -> float | None:
        return float(self._scaler.get_scale()) if self._scaler is not None and self._scaler.is_enabled() else None


def _check_samples(batch_size: int, used: Any) -> None:
    if used is None:
        return
    if isinstance(used, bool) or not isinstance(used, int):
        raise TypeError(
            f"trial({batch_size}) returned {type(used).__name__}: it must return nothing, "
            "or the number of samples that it used."
        )
    if used != batch_size:
        raise ValueError(
            f"trial({batch_size}) used {used} samples: it must make its batch of the size that it is given. "
            "Is its DataLoader still built for another size, or the data set too small (then give dataset_size)?"
        )


def _no_step(batch_size: int, skipped: int) -> str:
    if skipped:
        return (
            f"trial({batch_size}): the GradScaler left out {skipped + 1} steps in a row. "
            "Are the gradients finite without it?"
        )
    return (
        f"trial({batch_size}) made no step of the optimizer that was given, so its result would mean nothing. "
        "A trial makes one whole step: forward, backward, optimizer.step()."
    )


def _forget_frames(error: BaseException) -> None:
    """Drop the tracebacks of an error and of what led to it: they hold the frames, and the frames hold the tensors."""
    waiting, seen = [error], set()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        one.with_traceback(None)
        waiting += [before for before in (one.__cause__, one.__context__) if before is not None]
        waiting += one.exceptions if isinstance(one, BaseExceptionGroup) else []


def _first_line(error: BaseException | None) -> str:
    return "" if error is None else (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
