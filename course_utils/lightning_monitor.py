"""A Lightning callback that measures what the scoreboard shows: busy %, samples/s, data-wait % and peak memory.

    monitor = MonitorCallback()
    trainer = L.Trainer(callbacks=[monitor], logger=CSVLogger(folder), log_every_n_steps=10, ...)
    trainer.fit(module, loader)
    monitor.measurement                                # a table; .as_row(6, "lightning") is its scoreboard row
    monitor.draw()

While the run goes on it writes `monitor/...` values into every logger of the Trainer, whenever that logs. A thread
samples utilisation, and does nothing else. Drawing happens afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import lightning as L  # noqa: N812 -- as in Lightning's own documentation
import torch

from course_utils.arguments import whole
from course_utils.lightning_measurement import FitMeasurement, draw
from course_utils.lightning_run import Run
from course_utils.monitor import Trace

if TYPE_CHECKING:
    from course_utils.plots import CourseFigure

_WARMUP_BATCHES = {"cpu": 2, "cuda": 10}


def count_samples(batch: Any) -> int:
    """How many samples a batch holds, short last batches included; TypeError where that cannot be told.

    A tensor's first dimension. Of a mapping, a tuple or a list of fields (what the DataLoader makes) the first field;
    if that is itself a list, such as one of images of different sizes, its length. Anything else by its `len()`.
    """
    if isinstance(batch, Mapping):
        batch = tuple(batch.values())
    if isinstance(batch, list | tuple) and batch and not isinstance(batch[0], str | bytes):
        field = batch[0]
        return count_samples(field) if isinstance(field, Mapping | torch.Tensor) else _length(field)
    return _length(batch)


def _length(field: Any) -> int:
    if isinstance(field, torch.Tensor) and field.dim() == 0:
        return 1
    if isinstance(field, str | bytes) or not hasattr(field, "__len__"):
        raise TypeError(
            f"MonitorCallback cannot count the samples in a {type(field).__name__}: "
            "give MonitorCallback(count=...) a function that takes a batch and returns their number."
        )
    return len(field)


class MonitorCallback(L.Callback):
    """Measures a `Trainer.fit`; one callback may watch several, one after the other, and keeps the last.

    `device` is where the training runs; None asks the Trainer. The first `warmup_batches` batches train and are not
    measured (None: 2 on a CPU, 10 on a GPU). `every_n_steps` is how often it logs, in optimizer steps (None: as often
    as the Trainer). `count` replaces `count_samples` for batches of your own kind.

    Waiting for data is the time between the request for a batch and its arrival, as Trainer's loop tells its profiler;
    on a GPU it is measured by CUDA events, as the time in which the GPU had nothing else to do (see `watch.Watch`).
    Validation is left out of the throughput, but not of the trace. Peak memory: on a GPU the tensors' (torch's peak
    statistics are reset when measuring starts); on a CPU the process's, looked at before each backward. With several
    processes, each counts its own samples.
    """

    def __init__(
        self,
        device: torch.device | str | None = None,
        *,
        every_n_steps: int | None = None,
        warmup_batches: int | None = None,
        count: Callable[[Any], int] = count_samples,
    ) -> None:
        self._device = None if device is None else torch.device(device)
        self._every = None if every_n_steps is None else whole("every_n_steps", every_n_steps)
        self._warmup = None if warmup_batches is None else whole("warmup_batches", warmup_batches, 0)
        self._count = count
        self._run: Run | None = None

    @property
    def trace(self) -> Trace:
        """Busy % and more over time, for as long as the last `fit` trained; `Trace.save` keeps it in a file."""
        return self._last().monitor.trace

    @property
    def measurement(self) -> FitMeasurement:
        """What the last `fit` measured; RuntimeError if there was none, or none beyond the warm-up."""
        return self._last().measurement()

    def draw(self) -> CourseFigure:
        """A figure of the last `fit`: busy % over time, and below it samples/s and waiting for data, as logged."""
        run = self._last()
        return draw(run.monitor.trace, run.windows, run.watched)

    def _last(self) -> Run:
        if self._run is None:
            raise RuntimeError("This callback has watched no training yet: L.Trainer(callbacks=[monitor]).fit(...).")
        return self._run

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start to sample."""
        self._end()
        device = self._device or trainer.strategy.root_device
        warmup = _WARMUP_BATCHES.get(device.type, 2) if self._warmup is None else self._warmup
        self._run = Run(device, warmup, trainer.global_step)
        self._run.listen(trainer.profiler)  # type: ignore[attr-defined,unused-ignore]

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Start the clock, if no request for a batch was heard that could have."""
        self._last().begin_if_due()

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: torch.Tensor) -> None:
        """Look at the process's memory, when all activations are alive."""
        self._last().look_at_memory()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count, and log if it is time."""
        run = self._last()
        run.batch_done(self._count(batch), trainer.global_step)
        every = self._every or trainer.log_every_n_steps  # type: ignore[attr-defined,unused-ignore]
        if every and run.logged_step != trainer.global_step and trainer.global_step % every == 0:
            run.logged_step = trainer.global_step
            window = run.window()
            if window is not None and trainer.is_global_zero:
                for logger in trainer.loggers:
                    # The step that Trainer's own values of this batch get: it counts from 0.
                    logger.log_metrics(window.as_metrics(), step=trainer.global_step - 1)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop the clock."""
        if self._run is not None:
            self._run.pause()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Let the clock go on."""
        if self._run is not None:
            self._run.resume()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop sampling."""
        self._end()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Stop sampling; what was measured so far stays. Trainer calls this for an interrupt too."""
        self._end(type(exception).__name__)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Stop sampling, if nothing else did."""
        self._end()

    def _end(self, by: str = "") -> None:
        if self._run is not None:
            self._run.end(by)
