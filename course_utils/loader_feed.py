"""A loader's batches, epoch after epoch, with clocks; its workers end when it ends, and what is empty says why."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch.utils import data as torch_data

from course_utils.loader_workers import end_workers
from course_utils.watch import no_worker_advice


class Feed:
    """A loader's batches, epoch after epoch. Use it in a `with` block: its end is the end of the loader's workers.

    `patience_s` bounds the wait for one batch of a worker. After each `next`, `position` is the batch's place in its
    epoch, from 1 on. `starts_s` are the times from asking for an epoch to its first batch. `epoch_samples` is what a
    finished epoch held. `failed` is the exception that the loader raised, which tells it from one that a step raises.
    """

    def __init__(self, loader: Any, *, patience_s: float) -> None:
        _check_loader(loader)
        self.loader, self.patience_s = loader, patience_s
        self.workers = int(getattr(loader, "num_workers", None) or 0)
        self.ahead = self.workers * int(getattr(loader, "prefetch_factor", None) or 0)
        self.batches_per_epoch = batches_per_epoch(loader)
        self.position = self.samples = 0
        self.starts_s: list[float] = []
        self.epoch_samples: int | None = None
        self.first_batch: Any = None
        self.failed: Exception | None = None
        self.cpu_s = self.waited_s = 0.0
        self.iterator: Any = None

    def __enter__(self) -> Feed:
        # Workers that wait since an earlier epoch would hide what a start costs, and were born without our patience.
        end_workers(self.loader, getattr(self.loader, "_iterator", None))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A worker that hangs does not end when it is asked to.
        end_workers(self.loader, self.iterator, grace_s=0.5 if self.failed is not None else 5.0)
        self.iterator = None

    def next(self) -> Any:
        """The next batch, or None if the loader can give no other epoch. ValueError if it never gave a batch."""
        asked, cpu = time.perf_counter(), time.process_time()
        try:
            batch = self._next(asked)
        except Exception as error:
            self.failed = error
            raise
        self.waited_s += time.perf_counter() - asked
        self.cpu_s += time.process_time() - cpu
        return batch

    def _next(self, asked: float) -> Any:
        nothing = object()
        batch = nothing if self.iterator is None else next(self.iterator, nothing)
        if batch is nothing:  # the epoch is over, or none has begun
            if self.iterator is not None and self.epoch_samples is None:
                self.epoch_samples = self.samples
            self.iterator = self._start()
            batch = next(self.iterator, nothing)
            if batch is nothing:
                if not self.starts_s:
                    raise ValueError(_why_empty(self.loader))
                return None
            self.starts_s.append(time.perf_counter() - asked)
            self.position = self.samples = 0
        if self.first_batch is None:
            self.first_batch = batch
        self.position += 1
        self.samples += batch_samples(batch)
        return batch

    def _start(self) -> Any:
        with quiet_workers():
            if not self.workers or getattr(self.loader, "timeout", None) != 0:
                return iter(self.loader)
            self.loader.timeout = self.patience_s  # a worker that hangs then raises instead of waiting for ever
            try:
                return iter(self.loader)
            finally:
                self.loader.timeout = 0


class Cached:
    """One batch again and again: what a loader that costs nothing would give."""

    workers = ahead = 0
    batches_per_epoch: int | None = None

    def __init__(self, batch: Any) -> None:
        self._batch, self.position = batch, 0

    def next(self) -> Any:
        """The batch."""
        self.position += 1
        return self._batch


def batch_samples(batch: Any) -> int:
    """How many samples a batch holds: the first dimension of the first tensor or array in it; TypeError if none is."""
    for array in arrays_in(batch):
        if array.ndim:
            return len(array)
    if isinstance(batch, list | tuple) and batch and not isinstance(batch[0], list | tuple | Mapping):
        return len(batch)
    raise TypeError(
        f"Cannot tell how many samples a batch of type {type(batch).__name__} holds: give tensors, or a list, tuple "
        "or dict of tensors whose first dimension counts the samples."
    )


def arrays_in(batch: Any) -> Iterator[Any]:
    """The tensors and NumPy arrays in a nested batch."""
    if isinstance(batch, torch.Tensor) or type(batch).__module__ == "numpy":
        yield batch
    elif isinstance(batch, Mapping):
        for part in batch.values():
            yield from arrays_in(part)
    elif isinstance(batch, list | tuple):
        for part in batch:
            yield from arrays_in(part)


def is_iterable_style(loader: Any) -> bool:
    """Whether the loader's data set is a stream, of which every worker gets a whole copy."""
    return isinstance(getattr(loader, "dataset", None), torch_data.IterableDataset)


def batches_per_epoch(loader: Any) -> int | None:
    """How many batches an epoch has, if the loader says so. A stream is not asked: torch would warn if it is wrong."""
    if is_iterable_style(loader):
        return None
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def _check_loader(loader: Any) -> None:
    if not hasattr(loader, "__iter__"):
        raise TypeError(f"loader={loader!r:.80} gives no batches: pass a DataLoader, or another iterable of batches.")
    timeout = getattr(loader, "timeout", None)
    if timeout and not getattr(loader, "num_workers", None):
        # torch 2.14 accepts this when the loader is made, and fails an assertion without a message when it is used.
        raise ValueError(f"timeout={timeout} needs workers: with num_workers=0 leave the timeout out.")


def _why_empty(loader: Any) -> str:
    size: int | None = getattr(loader, "batch_size", None)
    dataset: Any = getattr(loader, "dataset", None)
    if not hasattr(dataset, "__len__") or not size:
        return "The loader gave no batch: is its data set empty?"
    if len(dataset) and getattr(loader, "drop_last", False):
        return (
            f"The loader gave no batch: drop_last=True drops the only one, because {len(dataset)} samples do not fill "
            f"a batch of {size}. Take a smaller batch_size, or drop_last=False."
        )
    return f"The loader gave no batch: its data set has {len(dataset)} samples."


@contextmanager
def quiet_workers() -> Iterator[None]:
    """Without two warnings that learners cannot act on while we measure.

    One is torch's, of more workers than CPUs: the table says what those were worth. The other is Python's (3.12 and
    later), of a fork beside other threads: progress bars and torch itself have threads.
    """
    with no_worker_advice(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
        yield
