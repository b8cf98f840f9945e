"""The peers' batch finders, each as its documentation says, on a `Job`. They are needed by the benchmark alone.

Lightning's Tuner (https://lightning.ai/docs/pytorch/stable/advanced/training_tricks.html#batch-size-finder) gets a
LightningModule with a `batch_size` and a `train_dataloader`; accelerate's `find_executable_batch_size`
(https://huggingface.co/docs/accelerate/usage_guides/memory) a function that makes all it needs anew for each size.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch.nn import functional

from bench.finder_job import Finder, Job
from bench.report import installed

_LOGGERS = ("lightning.pytorch", "lightning.fabric", "lightning")


def peers() -> tuple[dict[str, Finder], tuple[str, ...]]:
    """The finders of the peers that are installed, by name, and one sentence for each that is not."""
    found: dict[str, Finder] = {}
    missing: list[str] = []
    if installed("lightning"):
        import_module("lightning.pytorch.tuner")  # now, so that no measurement holds the import
        found["Lightning, power"] = partial(lightning, mode="power")
        found["Lightning, binsearch"] = partial(lightning, mode="binsearch")
    else:
        missing.append("lightning is not installed here (pip install lightning): its Tuner was left out.")
    if installed("accelerate"):
        import_module("accelerate.utils")
        found["accelerate"] = accelerate
        found["accelerate, from 8192"] = partial(accelerate, default_start=8192)
    else:
        missing.append("accelerate is not installed here (pip install accelerate): its finder was left out.")
    return found, tuple(missing)


def lightning(job: Job, start: int | None, *, mode: str) -> int:
    """`Tuner.scale_batch_size` with its own defaults (start at 2, 3 steps a trial, at most 8192, 5 % margin)."""
    with _quiet(), tempfile.TemporaryDirectory() as folder:
        pl = import_module("lightning.pytorch")
        tuner = import_module("lightning.pytorch.tuner").Tuner

        class Module(pl.LightningModule):  # type: ignore[misc,name-defined,unused-ignore]
            def __init__(self) -> None:
                super().__init__()
                self.model, self.batch_size = job.model, 2

            def train_dataloader(self) -> Any:
                return job.loader(self.batch_size)

            def on_train_start(self) -> None:
                job.begin_trial()

            def training_step(self, batch: Any, _: int) -> torch.Tensor:
                images, labels = batch
                job.ran(len(labels))
                return functional.cross_entropy(self.model(images), labels)

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return job.optimizer

        trainer = pl.Trainer(
            accelerator="cpu",
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        given = {} if start is None else {"init_val": start}
        job.memory.track(job.model)
        with job.memory:
            return int(tuner(trainer).scale_batch_size(Module(), mode=mode, **given))


def accelerate(job: Job, start: int | None, *, default_start: int = 128) -> int:
    """`find_executable_batch_size`: the function trains two steps on a model of its own, and returns its size."""
    decorate = import_module("accelerate.utils").find_executable_batch_size

    def train(batch_size: int) -> int:
        job.begin_trial(batch_size)
        model, optimizer = job.fresh()
        for _ in range(2):
            job.train_step(batch_size, model, optimizer)
        return batch_size

    with _quiet(), job.memory:
        return int(decorate(train, starting_batch_size=start or default_start)())


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the peers' advice on workers, loggers and GPUs, which is not about what is measured."""
    levels = {name: logging.getLogger(name).level for name in _LOGGERS}
    try:
        for name in _LOGGERS:
            logging.getLogger(name).setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
