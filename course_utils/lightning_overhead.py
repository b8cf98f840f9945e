"""What Trainer itself costs in a step: the same tiny job by a raw loop and by Trainer, in turn.

    overhead = overhead_per_step()
    overhead                                   # a table: seconds a step, and how much more than the raw loop
    overhead.extra_s("Trainer") / step_s       # as a share of a step of yours

The model is so small that its own work hardly counts. What is left is Python: hooks, counters, the logger. It does not
grow with the model. It is the CPU's work, so that a GPU does not wait for it as long as the CPU keeps ahead of it.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import lightning as L  # noqa: N812 -- as in Lightning's own documentation
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn import functional
from tqdm import tqdm

from course_utils import views
from course_utils.arguments import whole
from course_utils.lightning_monitor import MonitorCallback
from course_utils.lightning_quiet import quieted
from course_utils.preserve import rng_preserved
from course_utils.timing import Timing, synchronize

if TYPE_CHECKING:
    from course_utils.plots import CourseFigure

RAW, BARE = "raw loop", "Trainer"
LOGGING, WRITING, MONITORED = "+ self.log", "+ written every step", "+ MonitorCallback"
_WARMUP_STEPS = 10
_LEAST_ROUNDS = 3


@dataclass(frozen=True, repr=False)
class Overhead:
    """Seconds a step, by variant; each `Timing` has one value a round, and the rounds were taken in turn."""

    variants: Mapping[str, Timing]
    steps: int
    versions: str

    def extra_s(self, variant: str = BARE) -> float:
        """How many seconds a step takes longer than in the raw loop: the median of the rounds' differences."""
        return statistics.median(self._differences(variant))

    def noise_s(self, variant: str = BARE) -> float:
        """How far the rounds' differences lie apart (interquartile range): an `extra_s` below it says nothing."""
        return Timing(tuple(self._differences(variant)), "", "").spread_s

    def share(self, step_s: float, variant: str = BARE) -> float:
        """The extra time as a share of a step that takes `step_s` seconds in the raw loop."""
        if not step_s > 0:
            raise ValueError(f"step_s must be the seconds of a step, above 0, not {step_s!r}.")
        return self.extra_s(variant) / step_s

    def draw(self) -> CourseFigure:
        """Microseconds a step, with the spread of the rounds."""
        from course_utils import plots

        fig, ax = plots.figure("The time of one step of a tiny job, by the raw loop and by Trainer.")
        timings = self.variants.values()
        plots.bars(
            ax,
            list(self.variants),
            [1e6 * timing.median_s for timing in timings],
            "µs a step",
            [1e6 * timing.spread_s / 2 for timing in timings],
            emphasis=[RAW],
        )
        return fig

    def _differences(self, variant: str) -> list[float]:
        if variant not in self.variants:
            raise KeyError(f"There is no variant {variant!r:.80}: take one of {', '.join(map(repr, self.variants))}.")
        return [
            ours - raw for ours, raw in zip(self.variants[variant].seconds, self.variants[RAW].seconds, strict=True)
        ]

    def _rows(self) -> list[list[str]]:
        return [
            [
                name,
                f"{1e6 * timing.median_s:,.0f} µs",
                "" if name == RAW else f"{1e6 * self.extra_s(name):+,.0f} µs",
                "" if name == RAW else f"{1e6 * self.noise_s(name):,.0f} µs",
            ]
            for name, timing in self.variants.items()
        ]

    @property
    def _caption(self) -> str:
        raw = self.variants[RAW]
        return f"{raw.repeats} rounds of {self.steps} steps in turn, on {raw.device}, {self.versions}"

    def __repr__(self) -> str:
        return f"{views.text_table(_HEADERS, self._rows())}\n{self._caption}"

    def _repr_html_(self) -> str:
        return views.html_table(_HEADERS, self._rows(), self._caption)


_HEADERS = ("variant", "a step", "more than the raw loop", "noise")


def overhead_per_step(
    *,
    device: torch.device | str = "cpu",
    steps: int = 60,
    rounds: int = 7,
    budget_s: float = 10.0,
    progress: bool = True,
) -> Overhead:
    """Measure a step of the same tiny job by a raw loop and by Trainer, on `device`.

    The variants: a raw loop; Trainer with nothing but the module; then, each added to the ones before, `self.log` of
    the loss in every step (a CSVLogger writes every 50th), every step written, and MonitorCallback. They take turns, so
    that what else the machine does meets all of them. Of each round the first 10 steps do not count. Fewer `rounds` are
    made once `budget_s` seconds are over, but at least 3. Random states are put back; nothing is left on the disk.
    """
    steps, rounds = whole("steps", steps), whole("rounds", rounds)
    device = torch.device(device)
    variants = _variants()
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    deadline = time.perf_counter() + budget_s
    bar = tqdm(range(rounds), desc="rounds", file=sys.stdout, leave=False, disable=not progress)
    with rng_preserved(), quieted(), tempfile.TemporaryDirectory() as folder, bar:
        for done in bar:
            if done >= min(_LEAST_ROUNDS, rounds) and time.perf_counter() >= deadline:
                break
            for name, train in variants.items():
                batches = _Batches(steps + _WARMUP_STEPS, device)
                train(_tiny_model().to(device), batches, device, folder)
                seconds[name].append(batches.seconds / steps)
    timings = {name: Timing(tuple(values), str(device), "perf_counter") for name, values in seconds.items()}
    return Overhead(timings, steps, f"torch {torch.__version__}, Lightning {L.__version__}")


class _Batches:
    """The same small batch again and again; it notes the time from batch `_WARMUP_STEPS` to the end."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._count, self._device = count, device
        self._batch = (torch.rand(8, 16, device=device), torch.zeros(8, dtype=torch.int64, device=device))
        self.seconds = 0.0

    def __len__(self) -> int:
        # One more than is trained on: when it is asked for, the step before it is over.
        return self._count + 1

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        start = 0.0
        for number in range(len(self)):
            if number in (_WARMUP_STEPS, self._count):
                synchronize(self._device)
                now = time.perf_counter()
                start, self.seconds = now, now - start
            yield self._batch


def _tiny_model() -> nn.Module:
    return nn.Linear(16, 4)


class _Module(L.LightningModule):
    def __init__(self, model: nn.Module, logs: bool) -> None:
        super().__init__()
        self.model, self.logs = model, logs

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        inputs, targets = batch
        loss = functional.cross_entropy(self.model(inputs), targets)
        if self.logs:
            self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def _raw(model: nn.Module, batches: _Batches, device: torch.device, folder: str) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for inputs, targets in batches:
        inputs, targets = inputs.to(device), targets.to(device)
        loss = functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


Train = Callable[[nn.Module, _Batches, torch.device, str], None]


def _trainer(logs: bool = False, every: int = 50, monitored: bool = False) -> Train:
    def train(model: nn.Module, batches: _Batches, device: torch.device, folder: str) -> None:
        callbacks: Sequence[L.Callback] = [MonitorCallback(device)] if monitored else []
        trainer = L.Trainer(
            accelerator="gpu" if device.type == "cuda" else "cpu",
            devices=[device.index or 0] if device.type == "cuda" else 1,
            max_epochs=1,
            logger=CSVLogger(folder) if logs else False,
            log_every_n_steps=min(every, len(batches)),
            callbacks=list(callbacks),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(_Module(model, logs), batches)

    return train


def _variants() -> dict[str, Train]:
    return {
        RAW: _raw,
        BARE: _trainer(),
        LOGGING: _trainer(logs=True),
        WRITING: _trainer(logs=True, every=1),
        MONITORED: _trainer(logs=True, every=1, monitored=True),
    }
