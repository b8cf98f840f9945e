"""What a DataLoader setting needs, and the keywords that are valid for it: arithmetic, before anything runs."""

from __future__ import annotations

import multiprocessing
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from course_utils.arguments import whole
from course_utils.loader_feed import arrays_in
from course_utils.loader_workers import SHM_REMEDIES
from course_utils.machine import ram_bytes, usable_cpus
from course_utils.views import gibibytes, html_table, mebibytes, text_table

_SHM = Path("/dev/shm")  # noqa: S108 -- its size is read, nothing is written
_COUNTS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


def loader_keywords(
    num_workers: int,
    *,
    prefetch_factor: int | None = None,
    persistent_workers: bool = True,
    pin_memory: bool | None = None,
    device: torch.device | str | None = None,
    multiprocessing_context: Any = None,
    timeout: float = 0,
) -> dict[str, Any]:
    """Keywords for `DataLoader(dataset, batch_size=…, **keywords)`, valid for 0 workers too.

    With 0 workers prefetch_factor, persistent_workers, multiprocessing_context and timeout are left out: torch 2.14
    raises for the first three when the loader is made, and for the last when it is used. `prefetch_factor` None is
    torch's own default, 2. `pin_memory` None pins where `device` is a GPU, or, with no `device`, where there is one;
    True without a GPU is left off, because torch would warn and pin nothing. ValueError for other values.
    """
    whole("num_workers", num_workers, 0)
    if prefetch_factor is not None:
        whole("prefetch_factor", prefetch_factor, 1)
    on_gpu = torch.cuda.is_available() if device is None else torch.device(device).type == "cuda"
    keywords: dict[str, Any] = {"num_workers": num_workers, "pin_memory": on_gpu and pin_memory in (None, True)}
    if num_workers == 0:
        return keywords
    if prefetch_factor is not None:
        keywords["prefetch_factor"] = prefetch_factor
    keywords["persistent_workers"] = persistent_workers
    if multiprocessing_context is not None:
        keywords["multiprocessing_context"] = multiprocessing_context
    if timeout:
        keywords["timeout"] = timeout
    return keywords


def worker_counts(most: int | None = None) -> tuple[int, ...]:
    """The numbers of workers worth measuring, from 0 up to `most` (None: the CPUs that this process may use)."""
    most = usable_cpus() if most is None else whole("most", most, 0)
    return (*(count for count in _COUNTS if count < most), most)


def batch_bytes(batch: Any) -> int:
    """The bytes of all tensors and arrays in a nested batch: what a worker hands over."""
    return sum(int(array.nbytes) for array in arrays_in(batch))


@dataclass(frozen=True, repr=False)
class LoaderNeeds:
    """What workers need, in bytes. None where this system does not say (Windows and macOS have no /dev/shm).

    `in_flight_bytes` are the batches that the workers prepare or hold ready: batch × workers × prefetch_factor. They
    lie in shared memory, which is RAM as well. `workers_bytes` is the workers' own memory, if it was given.
    """

    batch_bytes: int
    num_workers: int
    prefetch_factor: int
    in_flight_bytes: int
    workers_bytes: int
    shm_free_bytes: int | None
    ram_available_bytes: int | None

    @property
    def fits_shm(self) -> bool:
        """Whether the batches in flight fit into the free shared memory; True where there is no such limit."""
        return self.shm_free_bytes is None or self.in_flight_bytes <= self.shm_free_bytes

    @property
    def fits_ram(self) -> bool:
        """Whether batches in flight and workers fit into the available RAM; True where that is unknown."""
        needed = self.in_flight_bytes + self.workers_bytes
        return self.ram_available_bytes is None or needed <= self.ram_available_bytes

    @property
    def fits(self) -> bool:
        """Whether it fits into shared memory and RAM, as far as they are known."""
        return self.fits_shm and self.fits_ram

    @property
    def sentence(self) -> str:
        """What it needs, what there is, and whether that will do."""
        what = f"{self.num_workers} workers × {self.prefetch_factor} batches × {_size(self.batch_bytes)}"
        if not self.num_workers:
            return "Without workers no batch waits in shared memory."
        if not self.fits_shm:
            return (
                f"{what} = {_size(self.in_flight_bytes)} in shared memory, but /dev/shm has "
                f"{_size(self.shm_free_bytes)} free: workers would end with a bus error."
            )
        if not self.fits_ram:
            own = f" and {_size(self.workers_bytes)} of the workers' own" if self.workers_bytes else ""
            return (
                f"{what} = {_size(self.in_flight_bytes)}{own}, but only {_size(self.ram_available_bytes)} of RAM is "
                "available: the system would end a worker, or the session."
            )
        room = " and ".join(
            f"{_size(size)} of {name}"
            for name, size in ((str(_SHM), self.shm_free_bytes), ("RAM", self.ram_available_bytes))
            if size is not None
        )
        return f"{what} = {_size(self.in_flight_bytes)}: fits{f' into {room}' if room else ', as far as is known'}."

    @property
    def remedies(self) -> tuple[str, ...]:
        """What to do, in the order in which to try it; empty if it fits."""
        if not self.fits_shm:
            return SHM_REMEDIES
        return () if self.fits_ram else (*SHM_REMEDIES[:2], "a smaller batch")

    def _rows(self) -> list[tuple[str, str]]:
        return [
            ("one batch", _size(self.batch_bytes)),
            ("batches in flight", _size(self.in_flight_bytes)),
            ("free in /dev/shm", _size(self.shm_free_bytes)),
            ("RAM available", _size(self.ram_available_bytes)),
            *((f"remedy {number}", remedy) for number, remedy in enumerate(self.remedies, 1)),
        ]

    def __repr__(self) -> str:
        return f"{self.sentence}\n{text_table(['LoaderNeeds', ''], self._rows())}"

    def _repr_html_(self) -> str:
        return html_table(["LoaderNeeds", ""], self._rows(), self.sentence)


def loader_needs(
    batch_bytes: int,
    num_workers: int,
    prefetch_factor: int | None = None,
    *,
    workers_bytes: int = 0,
    shm_free: int | str | None = "this machine",
    ram_available: int | str | None = "this machine",
) -> LoaderNeeds:
    """What `num_workers` workers need for batches of `batch_bytes` bytes, and whether this machine has it.

    `prefetch_factor` None is torch's default of 2. `workers_bytes`: the workers' own memory, where it is known. The
    last two, in bytes, are for another machine than this one; None is "unknown, or no limit".
    """
    whole("batch_bytes", batch_bytes, 0)
    whole("num_workers", num_workers, 0)
    factor = 2 if prefetch_factor is None else whole("prefetch_factor", prefetch_factor, 1)
    return LoaderNeeds(
        batch_bytes=batch_bytes,
        num_workers=num_workers,
        prefetch_factor=factor,
        in_flight_bytes=batch_bytes * num_workers * factor,
        workers_bytes=workers_bytes,
        shm_free_bytes=shm_free_bytes() if isinstance(shm_free, str) else shm_free,
        ram_available_bytes=ram_available_bytes() if isinstance(ram_available, str) else ram_available,
    )


def shm_free_bytes(folder: Path = _SHM) -> int | None:
    """What is free of the shared memory in which workers hand over batches; None where there is none to fill."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def ram_available_bytes(limit_bytes: int | None = None) -> int:
    """The RAM that can still be taken; `limit_bytes` is the container's limit (None: this one's, if it has one)."""
    available = int(psutil.virtual_memory().available)
    limit = ram_bytes() if limit_bytes is None else limit_bytes
    if limit is None or limit >= psutil.virtual_memory().total:
        return available
    return max(0, min(available, limit - int(psutil.Process().memory_info().rss)))


def start_method_of(loader: Any = None) -> str:
    """How the loader's workers start: "fork", "spawn" or "forkserver"."""
    context = getattr(loader, "multiprocessing_context", None)
    if context is not None:
        return str(context.get_start_method())
    # With allow_none the question does not settle the default for good.
    chosen = multiprocessing.get_start_method(allow_none=True)
    return chosen or multiprocessing.get_all_start_methods()[0]  # the default comes first


def _size(size: int | None) -> str:
    return gibibytes(size) if size is not None and size >= 2**30 else mebibytes(size)
