"""The job that every batch finder is given: one small model, one data set, one memory, and a record of what was run.

The memory is `course_utils.oom.SimulatedMemory`: real CPU tensors, counted against a limit. What goes over it raises
`torch.OutOfMemoryError` with the words that CUDA's allocator uses, because the peers recognise the error by them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from course_utils.oom import SimulatedMemory

LARGEST = 20_000  # samples in the data set, unless a case has fewer
MOST_TRIALS = 100  # then a finder is stopped: of those here that end, the longest needs 70


class StoppedError(Exception):
    """A finder was stopped, since it would not end. No RuntimeError: no finder takes it for a full memory."""


class Photos(Dataset[Any]):
    """Random images (3, 8, 8) of ten classes, handed out a whole batch at a time, so that collating costs nothing."""

    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.images = torch.rand(samples, 3, 8, 8, generator=generator)
        self.labels = torch.randint(10, (samples,), generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images[index], self.labels[index]

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images[indices], self.labels[indices]


def small_net() -> nn.Sequential:
    """(N, 3, 8, 8) → (N, 10). Batch norm, dropout: buffers and randomness that a finder can leave changed."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 10),
    )


class Memory(SimulatedMemory):
    """The simulated memory, which also counts how often it was full, and says so in CUDA's words."""

    ooms = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except torch.OutOfMemoryError as error:
            self.ooms += 1
            raise torch.OutOfMemoryError(f"CUDA out of memory. {error}") from None


class Job:
    """A fresh model and optimizer, the data, the memory, and the record: what was tried, stepped, refused.

    A finder's adapter calls `begin_trial` once a size, and `ran` for each batch that it really trains on.
    """

    def __init__(self, limit_bytes: int | None, samples: int = LARGEST, limit_s: float = 30.0) -> None:
        torch.manual_seed(0)
        self.dataset = dataset(samples)
        self.model, self.optimizer = self.fresh()
        self.memory = Memory(limit_bytes)
        self.tried: list[int] = []  # the batch of each trial: the largest that ran, or what was asked for if none did
        self.completed: set[int] = set()  # batches that went through an optimizer step
        self.steps = 0
        self._size, self._batches = 0, 0
        self._limit_s, self._deadline = limit_s, time.perf_counter() + limit_s

    def fresh(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """A new model and its Adam, whose steps are counted."""
        model = small_net()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        optimizer.register_step_post_hook(lambda *_: self._stepped())
        return model, optimizer

    def loader(self, batch_size: int) -> DataLoader[Any]:
        """The data in batches, in order; the last one may be smaller."""
        return DataLoader(self.dataset, batch_size, collate_fn=_as_it_is)

    def begin_trial(self, asked: int = 0) -> None:
        """The finder starts with a size; StoppedError after MOST_TRIALS, or once its time is up."""
        if len(self.tried) >= MOST_TRIALS:
            raise StoppedError(f"does not end: stopped after {MOST_TRIALS} trials")
        if time.perf_counter() > self._deadline:
            raise StoppedError(f"does not end: stopped after {self._limit_s:.0f} s")
        self.tried.append(asked)
        self._batches = 0

    def ran(self, size: int) -> None:
        """The finder is about to train on a batch of `size`."""
        self._size = size
        self.tried[-1] = max(self.tried[-1], size) if self._batches else size
        self._batches += 1

    def train_step(self, batch_size: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """One optimizer step on the first `batch_size` samples; returns how many there were."""
        images, labels = next(iter(self.loader(batch_size)))
        self.ran(len(labels))
        loss = functional.cross_entropy(model(images), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return len(labels)

    def _stepped(self) -> None:
        self.steps += 1
        self.completed.add(self._size)


def _as_it_is(batch: Any) -> Any:
    return batch


@cache
def dataset(samples: int) -> Photos:
    """One data set of each size for all jobs."""
    return Photos(samples)


def fits(batch_size: int, limit_bytes: int | None) -> tuple[bool, int]:
    """Whether two optimizer steps of a fresh job stay below the limit, and the peak in bytes."""
    job = Job(limit_bytes)
    job.begin_trial()
    job.memory.track(job.model)
    try:
        with job.memory:
            for _ in range(2):  # Adam's state appears in the first step, so only the second one meets it
                job.train_step(batch_size, job.model, job.optimizer)
    except torch.OutOfMemoryError:
        return False, job.memory.peak_bytes
    return True, job.memory.peak_bytes


@cache
def limit_for(batch_size: int) -> int:
    """A limit in bytes that `batch_size` really fits and the next size does not; 0: one that not even 1 fits.

    It lies halfway between the two measured peaks, and both sizes are run against it before it is believed.
    """
    above = fits(batch_size + 1, None)[1]
    below = fits(batch_size, None)[1] if batch_size else 2 * above - fits(2, None)[1]
    limit_bytes = (below + above) // 2
    if (batch_size and not fits(batch_size, limit_bytes)[0]) or fits(batch_size + 1, limit_bytes)[0]:
        raise RuntimeError(
            f"The simulated limit of {limit_bytes} bytes does not lie between {batch_size} and the next."
        )
    return limit_bytes


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All that a finder must put back, copied."""
    return {
        "weights": deepcopy([tensor.detach() for tensor in model.parameters()]),
        "buffers": deepcopy(list(model.buffers())),
        "optimizer": deepcopy(optimizer.state_dict()),
        "gradients": deepcopy([tensor.grad for tensor in model.parameters()]),
        "train mode": [module.training for module in model.modules()],
        "Python's RNG": random.getstate(),
        "NumPy's RNG": np.random.get_state(),
        "torch's RNG": torch.get_rng_state(),
    }


def changes(before: dict[str, Any], after: dict[str, Any]) -> tuple[str, ...]:
    """The names of what is not bit-equal."""
    return tuple(name for name in before if not _equal(before[name], after[name]))


def _equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, Sequence) and not isinstance(one, str):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)


Finder = Callable[[Job, int | None], int]
