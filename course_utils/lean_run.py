"""One run of an ablation: built from its switches, started, measured in turns with the others, and made a `Row`."""

from __future__ import annotations

import gc
import logging
import math
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from course_utils.lean_jobs import Job, Training
from course_utils.lean_switches import Switch
from course_utils.lean_table import BASELINE, Row, break_even_steps
from course_utils.oom import SimulatedMemory, classify_oom
from course_utils.timing import synchronize

_FIELDS = ("loss", "make_optimizer", "autocast_dtype", "scaler", "memory_format", "set_to_none", "item_every")


class Run:
    """The baseline (no switches), one switch, or several together.

    What a switch raises, while it is applied or in a step, ends this run alone: it becomes the row's failure. Only what
    the baseline raises passes through, and an error after which the device will not work again.
    """

    def __init__(self, name: str, switches: Mapping[str, Switch], job: Job) -> None:
        self.name, self.switches, self.job = name, dict(switches), job
        self.failure: str | None = None
        self.skipped: str | None = None
        self.changes: frozenset[str] = frozenset()  # what its switches set, to find two that set the same
        self.compiles = False
        self.cut_short = False
        self.measured_steps = 0
        self.step_s = 0.0  # the shortest step so far
        self._training: Training | None = None
        self._settings = _settings()
        self._first_s = 0.0
        self._visits: dict[int, float] = {}  # round: seconds a step
        self._peak_bytes: int | None = None

    @property
    def runs(self) -> bool:
        """Whether there is something to measure."""
        return self.failure is None and self.skipped is None

    def build(self) -> None:
        """Make the training and apply the switches."""
        with self._failing():
            self._training, self.changes = _applied(self.job, list(self.switches.values()))
            self._training.start()
            self.compiles = _compiles(self._training)
        self._settings = _settings()

    def first_steps(self) -> None:
        """Two steps that are not measured: the first makes the optimizer's state and compiles, the second is watched.

        The second one's peak memory is read: on a GPU from PyTorch's allocator, on a CPU by `SimulatedMemory`, through
        which a compiled step cannot run.
        """
        with self._failing():
            training, device = self._ready()
            others = _allocated(device) - sum(_storages(training.model))
            self._first_s = self._timed(1)
            batch = self.job.batches[training.steps % len(self.job.batches)]
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
                second_s = self._timed(1)
                own = torch.cuda.max_memory_allocated(device) - others
                self._peak_bytes = own + sum(tensor.nbytes for tensor in batch)
            elif self.compiles:
                second_s = self._timed(1)
            else:
                with SimulatedMemory(None) as memory:
                    memory.track(training.model, training.optimizer, batch)
                    second_s = self._timed(1)
                self._peak_bytes = memory.peak_bytes
            self.step_s = min(self._first_s, second_s)
            self._first_s += second_s

    def visit(self, turn: int, steps: int) -> None:
        """Measure `steps` steps in a row."""
        with self._failing():
            self._ready()
            seconds = self._timed(steps) / steps
            self._visits[turn] = seconds
            self.step_s = min(self.step_s, seconds)
            self.measured_steps += steps

    def forget_visits(self) -> None:
        """Begin anew, for the next group of runs: the baseline takes part in each."""
        self._visits, self.measured_steps = {}, 0

    @property
    def losses(self) -> tuple[float, ...]:
        """Of the first steps, as long as the training is there."""
        kept = [] if self._training is None else self._training.losses
        return tuple(torch.stack(kept).float().tolist()) if kept else ()

    def end(self) -> None:
        """Let the training go."""
        self._training = None

    def row(self, baseline: Run) -> Row:
        """The row, from the visits that both made in the same rounds."""
        if not self.runs:
            return Row(self.name, tuple(self.switches), failure=self.failure, skipped=self.skipped)
        turns = [turn for turn in self._visits if turn in baseline._visits]
        ratios = [baseline._visits[turn] / self._visits[turn] for turn in turns]
        rates = [self.job.batch_size / self._visits[turn] for turn in turns]
        low, high = _range(rates if self is baseline else ratios)
        middle = statistics.median(rates if self is baseline else ratios)
        speedup = statistics.median(ratios)
        eager_s, own_s = (statistics.median(run._visits[turn] for turn in turns) for run in (baseline, self))
        losses, reference = self.losses, baseline.losses
        both = min(len(losses), len(reference))
        row = Row(
            self.name,
            tuple(self.switches),
            samples_per_s=statistics.median(rates),
            spread=_spread(rates),
            speedup=speedup,
            speedup_low=1.0 if self is baseline else low,
            speedup_high=1.0 if self is baseline else high,
            noise=(high - low) / 2 / middle,
            rounds=len(turns),
            steps=self.measured_steps,
            peak_bytes=self._peak_bytes,
            losses=losses,
            loss_difference=_difference(losses[:both], reference[:both]),
            loss_steps=both,
            note=f"{self.measured_steps} steps only" if self.cut_short else "",
        )
        if not self.compiles:
            return row
        compile_s = max(0.0, self._first_s - 2 * own_s)
        pays = break_even_steps(compile_s, eager_s, own_s) if row.gained else None
        return replace(row, compile_s=compile_s, break_even_steps=pays)

    def _ready(self) -> tuple[Training, torch.device]:
        assert self._training is not None
        _apply(self._settings)
        return self._training, self.job.device

    def _timed(self, steps: int) -> float:
        assert self._training is not None
        synchronize(self.job.device)
        begun = time.perf_counter()
        self._training.run(self.job.batches, steps)
        synchronize(self.job.device)
        return time.perf_counter() - begun

    @contextmanager
    def _failing(self) -> Iterator[None]:
        failure = None
        try:
            yield
        except Exception as error:
            if self.name == BASELINE or classify_oom(error).kind == "fatal":
                raise
            failure = _one_line(error)
        if failure is not None:  # outside the except block the failed step's tensors can be freed
            self.failure, self._training = failure, None
            gc.collect()
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()


def warm_up(job: Job) -> None:
    """One step that nobody counts: what libraries load and set aside at their first use is no run's cost."""
    training = job.training()
    training.start()
    training.run(job.batches, 1)


@contextmanager
def settings_kept() -> Iterator[None]:
    """Put PyTorch's precision of float32 products, cuDNN's choices and the number of threads back afterwards."""
    before = _settings()
    try:
        yield
    finally:
        _apply(before)


@contextmanager
def compiling_cold() -> Iterator[None]:
    """Nothing compiled before counts: an empty cache folder of its own, removed afterwards, and dynamo forgets all."""
    # Private, but PyTorch's own tests and benchmarks use it: it sets TORCHINDUCTOR_CACHE_DIR and empties what Inductor
    # keeps in memory. Read in torch 2.11 and 2.14. It leaves its folder behind after an error, so it gets ours.
    from torch._inductor.utils import fresh_cache

    # Where there is a CUDA toolkit but no GPU, as on Colab's CPU runtime, the import that Inductor makes logs this.
    log = logging.getLogger("torch.utils.cpp_extension")
    log.addFilter(_not_about_cuda_home)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, fresh_cache(dir=folder):
        torch._dynamo.reset()
        try:
            yield
        finally:
            torch._dynamo.reset()
            log.removeFilter(_not_about_cuda_home)


def _not_about_cuda_home(record: logging.LogRecord) -> bool:
    return "No CUDA runtime is found" not in record.getMessage()


def _applied(job: Job, switches: list[Switch], replaced: bool = False) -> tuple[Training, frozenset[str]]:
    """A training with all switches applied, and the names of what they set."""
    training, changes = job.training(), set()
    for index, switch in enumerate(switches):
        before, model = {name: getattr(training, name) for name in _FIELDS}, training.model
        switch(training)
        changes |= {name for name in _FIELDS if getattr(training, name) is not before[name]}
        if all(module is not model for module in training.model.modules()):
            changes.add("model")
            if index and not replaced:
                # The new model lacks what the switches before did to the old one: begin again, with this one first.
                return _applied(job, [switch, *switches[:index], *switches[index + 1 :]], replaced=True)
    if _compiles(training):
        changes.add("compile")
    return training, frozenset(changes)


def _compiles(training: Training) -> bool:
    """Whether torch.compile is at work: on a module, in place or around it, on the loss, or on the step."""
    modules = training.model.modules()
    return any(
        getattr(thing, "_compiled_call_impl", None) is not None or hasattr(thing, "_torchdynamo_orig_callable")
        for thing in (*modules, training.loss, training.step)
    ) or any(type(module).__name__ == "OptimizedModule" for module in training.model.modules())


def _settings() -> dict[str, Any]:
    return {
        "matmul": torch.get_float32_matmul_precision(),
        "parts": [part.fp32_precision for part in _precisions()],
        "cudnn": (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        "threads": torch.get_num_threads(),
    }


def _apply(wanted: Mapping[str, Any]) -> None:
    if wanted == _settings():
        return
    # From the general to the particular: setting one of the first also sets some that come later.
    general, *particular = zip(_precisions(), wanted["parts"], strict=True)
    general[0].fp32_precision = general[1]
    torch.set_float32_matmul_precision(wanted["matmul"])
    for part, precision in particular:
        part.fp32_precision = precision
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = wanted["cudnn"]
    torch.set_num_threads(wanted["threads"])


def _precisions() -> list[Any]:
    """What has an `fp32_precision`, the general one first. PyTorch's type stubs do not know them all."""
    backends: Any = torch.backends
    cuda, cudnn, mkldnn = backends.cuda, backends.cudnn, backends.mkldnn
    return [backends, cuda.matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul, mkldnn.conv, mkldnn.rnn]


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _storages(model: nn.Module) -> Iterable[int]:
    """The bytes of each piece of memory that holds weights or buffers."""
    tensors = [*model.parameters(), *model.buffers()]
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values()


def _range(values: Sequence[float]) -> tuple[float, float]:
    """The lowest and the highest, from eight values on without one at each end."""
    ordered = sorted(values)
    return (ordered[1], ordered[-2]) if len(ordered) >= 8 else (ordered[0], ordered[-1])


def _spread(values: list[float]) -> float:
    """The interquartile range; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return third - first


def _difference(losses: Sequence[float], reference: Sequence[float]) -> float | None:
    """The largest difference of two loss curves, as a share of the reference's largest loss."""
    largest = max(map(abs, reference), default=0.0)
    if not largest:
        return None
    differences = [abs(one - other) for one, other in zip(losses, reference, strict=True)]
    return max(differences) / largest if all(map(math.isfinite, differences)) else math.inf


def _one_line(error: BaseException) -> str:
    """The type of an error and the first lines of its message that say something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    return f"{type(error).__name__}: {text}"[:200] if text else type(error).__name__
