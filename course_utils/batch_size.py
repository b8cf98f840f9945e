"""Find the largest batch that fits: predict, try it for real, and return only what ran.

    def trial(batch_size):                       # one whole optimizer step on the longest samples
        inputs, targets = worst_batch(dataset, batch_size)
        optimizer.zero_grad()
        loss_function(model(inputs.to(device)), targets.to(device)).backward()
        optimizer.step()

    found = find_batch_size(trial, model=model, optimizer=optimizer, dataset_size=len(dataset))
    found.batch_size

The strategy is in `batch_search`, one size's run in `batch_trial`, the records in `batch_result`.
"""

from __future__ import annotations

import math
import operator
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import nn
from tqdm import tqdm

from course_utils.arguments import whole
from course_utils.batch_result import FoundBatch, LimitedBy, NothingFits, Trial
from course_utils.batch_search import Search, Tried
from course_utils.batch_trial import (
    CudaMemory,
    MemoryReadings,
    TrialFunction,
    TrialRunner,
    device_of,
    release_memory,
)
from course_utils.oom import classify_oom
from course_utils.preserve import TrainingState
from course_utils.worst_batch import worst_batch

_LOOKS, _FAR = 4, 10**6
__all__ = ["CudaMemory", "FoundBatch", "NothingFits", "Trial", "find_batch_size", "worst_batch"]


def find_batch_size(
    trial: TrialFunction,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: Any = None,
    others: Sequence[Any] = (),
    prediction: Any = None,
    memory: MemoryReadings | None = None,
    start: int | None = None,
    dataset_size: int | None = None,
    max_batch: int | None = None,
    multiple_of: int = 1,
    headroom: float = 0.0,
    tolerance: float = 0.02,
    steps: int = 2,
    max_trials: int = 12,
    max_seconds: float = 120,
    progress: bool = True,
) -> FoundBatch:
    """Find the largest batch size that trains, within `tolerance` of the limit, and leave no trace.

    `trial(n)` makes one whole optimizer step on n samples, the longest that training will meet (`worst_batch`), and
    returns nothing or how many samples it used. It is called until `steps` real steps were made at each size: the
    optimizer's state first exists after one. Steps that a GradScaler leaves out do not count.

    `prediction` (of `predict_memory`) and `memory` make it fast: two or three sizes and no failure, if the prediction
    holds. `memory` is the GPU's own where the model is on one; on a CPU it is None, or a `SimulatedMemory`. `headroom`
    is the share of memory to leave free; where the peak cannot be read, it is taken off the size instead. The answer is
    a multiple of `multiple_of`, at most `dataset_size` and `max_batch`. `max_seconds` is looked at between steps.

    Every size starts from the same state; afterwards weights, optimizer, scaler, `others` (as in `training_preserved`),
    gradients, modes and random numbers are as they were, also after an error. NothingFits if the smallest size fails.
    An error that is not about memory passes through at once. One that may be about memory counts as such only if a
    batch of one or two runs without it.
    """
    cap, capped_by = _cap(multiple_of, dataset_size, max_batch)
    _check(optimizer, prediction, start, headroom, tolerance, steps, max_trials, max_seconds)
    begun = time.perf_counter()
    device = device_of(model)
    if memory is None and device.type == "cuda":
        memory = CudaMemory(device)
    state = TrainingState(model, optimizer, scaler, *others)
    error: Exception | None = None
    runner = TrialRunner(trial, state, optimizer, scaler, memory, device, steps)
    try:
        with runner:
            at_rest = runner.rest_bytes()
            limit = None if memory is None else memory.limit_bytes
            budget = None if limit is None else limit * (1 - headroom)
            predicted = None
            if prediction is not None and budget is not None:
                predicted = _near_the_limit(prediction, budget, cap, _foreign_bytes(at_rest, model, optimizer))
            search = Search(multiple_of, cap, tolerance, budget, predicted, start)
            finder = _Finder(runner, search, headroom, max_trials, begun + max_seconds, progress)
            size, limited_by = finder.find(capped_by)
    except Exception as caught:
        error = caught
        raise
    finally:
        _put_back(state, memory, error, after_failure=error is not None or bool(runner.errors))
    return FoundBatch(size, limited_by, tuple(finder.trials), time.perf_counter() - begun, limit, headroom)


class _Finder:
    """Runs what the search proposes, within the bounds, and keeps the table."""

    def __init__(
        self,
        runner: TrialRunner,
        search: Search,
        headroom: float,
        max_trials: int,
        deadline_s: float,
        progress: bool,
    ) -> None:
        self._runner, self._search, self._headroom = runner, search, headroom
        self._max_trials, self._deadline_s, self._progress = max_trials, deadline_s, progress
        self.trials: list[Trial] = []

    def find(self, capped_by: LimitedBy) -> tuple[int, LimitedBy]:
        """The size to return, and why it is not larger."""
        with tqdm(desc="batch sizes", unit=" tried", file=sys.stdout, leave=False, disable=not self._progress) as bar:
            ended_by = self._search_on(bar)
            largest = max((one.batch_size for one in self.trials if one.fits), default=None)
            if largest is None:
                raise self._nothing_fits(ended_by) from next(iter(self._runner.errors), None)
            size = largest
            if self._headroom and all(one.peak_bytes is None for one in self.trials if one.fits):
                size = self._with_margin(largest, bar)
        if ended_by != "answer":
            return size, ended_by
        return size, capped_by if largest == self._search.cap else "memory"

    def _search_on(self, bar: Any) -> Literal["answer", "trials", "time"]:
        while (size := self._search.next_size(self._tried())) is not None:
            if len(self.trials) >= self._max_trials:
                return "trials"
            if self.trials and time.perf_counter() >= self._deadline_s:
                return "time"
            tried = self._try(size, bar)
            if tried.outcome == "stopped by time":
                return "time"
            if tried.outcome == "maybe out of memory" and not any(one.fits for one in self.trials):
                self._prove_that_size_matters(bar)
        return "answer"

    def _try(self, size: int, bar: Any) -> Trial:
        bar.set_postfix_str(f"{size:,}")
        tried = self._runner.run(size, self._search.budget_bytes if self._headroom else None, self._deadline_s)
        self.trials.append(tried)
        bar.update()
        return tried

    def _tried(self) -> list[Tried]:
        return [Tried(one.batch_size, one.fits, one.peak_bytes) for one in self.trials]

    def _prove_that_size_matters(self, bar: Any) -> None:
        """An error that only may be about memory: if a very small size fails alike, raise it, it is another matter."""
        doubtful, failed = self._runner.errors[-1], self.trials[-1].batch_size
        # Two samples rather than one, which is too little for BatchNorm.
        small = min(failed, 2 * self._search.multiple)
        if small < failed and self._try(small, bar).outcome != "maybe out of memory":
            return
        doubtful.add_note(f"A batch of {small} fails alike, so the batch size is probably not why.")
        raise doubtful

    def _with_margin(self, largest: int, bar: Any) -> int:
        """Where no peak can be read, the margin is taken off the size; the smaller size is run like any other."""
        multiple = self._search.multiple
        size = math.floor(largest * (1 - self._headroom) / multiple) * multiple
        if size < multiple:
            raise NothingFits(
                f"Batch size {largest} runs, but a margin of {self._headroom:.0%} below it is less than {multiple}. "
                "Use less headroom."
            )
        ran = [one.batch_size for one in self.trials if one.fits]
        if size not in ran:
            self._deadline_s = math.inf  # a smaller size than one that ran: it is run to its end
            self._try(size, bar)
        return size

    def _nothing_fits(self, ended_by: str) -> NothingFits:
        smallest = self._search.multiple
        tried = f"Tried: {', '.join(str(one.batch_size) for one in self.trials)}."
        if ended_by != "answer":
            bound = "max_trials" if ended_by == "trials" else "max_seconds"
            return NothingFits(f"No size that fits was found within {bound}. {tried} Give a smaller start.")
        if self.trials[-1].outcome == "too little left":
            return NothingFits(
                f"Batch size {smallest} runs, but leaves less than {self._headroom:.0%} of the memory free. {tried} "
                "Use less headroom."
            )
        return NothingFits(
            f"Not even batch size {smallest} fits. {tried} What helps then: a smaller model or input, mixed precision, "
            "checkpointing, or an optimizer with less state."
        )


def _near_the_limit(prediction: Any, budget: float, cap: int | None, foreign: int) -> Callable[[int], float]:
    """The predicted peak by batch size, plus `foreign` bytes: by the line that holds near the limit.

    A prediction's own line was fitted elsewhere, perhaps where the optimizer's step needs the most and the batch hardly
    counts. Exact predictions (`at`) near the limit give the line that counts, in a few looks.
    """
    line = prediction.peak_bytes
    if hasattr(prediction, "at"):
        size = _where(line, budget - foreign, cap, 4)
        for _ in range(_LOOKS):
            # The least is 2: one sample is too little for BatchNorm.
            half, close = size // 2, size - max(1, size // 8)
            peaks = [prediction.at(one).peak_bytes for one in (half, close, size)]
            line = _line(size, peaks[2], (peaks[2] - peaks[1]) / (size - close))
            size, before = _where(line, budget - foreign, cap, 4), size
            if abs(size - before) <= 0.05 * before:
                break
        # Between half the limit and the limit, which is where the search begins, it may bend once.
        return lambda batch_size: max(peaks[0], line(batch_size)) + foreign
    return lambda batch_size: float(line(batch_size)) + foreign


def _line(size: int, peak: float, slope: float) -> Callable[[int], float]:
    return lambda batch_size: peak + slope * (batch_size - size)


def _where(line: Callable[[int], float], budget: float, cap: int | None, least: int) -> int:
    """The batch size at which the line meets the budget, from `least` to the cap or, where it is flat, far out."""
    slope = line(2) - line(1)
    size = int((budget - line(1)) / slope) + 1 if slope > 0 else _FAR
    return max(least, min(size, cap or _FAR, _FAR))


def _foreign_bytes(at_rest: int | None, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """What is in memory before any step and is not the model's or its optimizer's."""
    own = [*model.parameters(), *model.buffers()]
    own += [tensor.grad for tensor in model.parameters() if tensor.grad is not None]
    own += [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    return max(0, (at_rest or 0) - sum(tensor.nbytes for tensor in own))


def _put_back(
    state: TrainingState, memory: MemoryReadings | None, error: Exception | None, after_failure: bool
) -> None:
    try:
        state.restore()
        release_memory(memory, after_failure=after_failure)
    except RuntimeError:
        # After a fatal error nothing works on that GPU any more: that error says more than this one.
        if error is None or classify_oom(error).kind != "fatal":
            raise
        error.add_note("What was on the GPU could not be put back.")


def _cap(multiple_of: int, dataset_size: int | None, max_batch: int | None) -> tuple[int | None, LimitedBy]:
    """The largest size that may be tried, and what sets it."""
    whole("multiple_of", multiple_of)
    bounds: list[tuple[int, LimitedBy]] = []
    for name, bound, by in (("dataset_size", dataset_size, "dataset"), ("max_batch", max_batch, "cap")):
        if bound is not None:
            whole(name, bound)
            if bound < multiple_of:
                raise ValueError(
                    f"{name}={bound} is less than multiple_of={multiple_of}: no batch size is left to try."
                )
            bounds.append((bound // multiple_of * multiple_of, by))  # type: ignore[arg-type]
    return min(bounds, key=operator.itemgetter(0), default=(None, "memory"))


def _check(
    optimizer: Any,
    prediction: Any,
    start: int | None,
    headroom: float,
    tolerance: float,
    steps: int,
    max_trials: int,
    max_seconds: float,
) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"The optimizer must be one of torch.optim, not {type(optimizer).__name__}: its steps are counted."
        )
    if prediction is not None and not callable(getattr(prediction, "peak_bytes", None)):
        raise TypeError(f"The prediction must be what predict_memory returns, not {type(prediction).__name__}.")
    if start is not None:
        whole("start", start)
    whole("max_trials", max_trials)
    if not isinstance(steps, int) or steps < 2:
        raise ValueError(f"steps={steps!r}: at least 2 are needed, the optimizer's state first exists after one.")
    for name, share in (("headroom", headroom), ("tolerance", tolerance)):
        if not 0 <= share < 1:
            raise ValueError(f"{name}={share!r} must be a share, from 0 to less than 1.")
    if not max_seconds > 0:
        raise ValueError(f"max_seconds={max_seconds!r} must be above 0.")
