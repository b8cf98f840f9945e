"""Where a device's memory is: `memory_report()` says it in one table, and the table adds up.

    used on the device = reserved by PyTorch + CUDA context + other processes
    reserved           = allocated (tensors that live) + cached (kept for the next ones)

nvidia-smi shows the first line's left side. Nothing here starts CUDA or raises because there is none. On a CPU there is
no such cache; the report then says what the process holds and how much of it is tensors.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from course_utils.live_tensors import live_bytes
from course_utils.views import MISSING, html_table, mebibytes, number, text_table


@dataclass(frozen=True)
class MemoryReport:
    """One moment's memory, in bytes. None is what could not be read; `reason` says why there are no GPU figures.

    `allocated_bytes`, `reserved_bytes` and `peak_allocated_bytes` are the caching allocator's of this process;
    `used_bytes` and `total_bytes` are the whole device's, other processes included; `own_bytes` is what NVML counts for
    this process. `process_bytes` is this process's resident host memory (RSS), `private_bytes` the part that nobody
    shares (USS). `tensor_bytes` is the memory of the device's living tensors, each piece once whatever its views, and
    of those that only the graph of a loss keeps; what kernels take for a moment is not in it.
    """

    device: str
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    used_bytes: int | None = None
    total_bytes: int | None = None
    own_bytes: int | None = None
    process_bytes: int | None = None
    private_bytes: int | None = None
    tensor_bytes: int = 0
    reason: str | None = None

    @property
    def cached_bytes(self) -> int | None:
        """Reserved and not allocated: what `empty_cache()` may give back, as far as whole segments are free."""
        return _difference(self.reserved_bytes, self.allocated_bytes)

    @property
    def rest_bytes(self) -> int | None:
        """Used on the device, and not by PyTorch's allocator: CUDA contexts and other processes."""
        return _difference(self.used_bytes, self.reserved_bytes)

    @property
    def context_bytes(self) -> int | None:
        """This process's own share of the rest: CUDA's context, kernels, libraries. None where NVML cannot tell."""
        return _difference(self.own_bytes, self.reserved_bytes)

    @property
    def others_bytes(self) -> int | None:
        """What other processes use. None where NVML cannot tell, as in most containers."""
        return None if self.context_bytes is None else _difference(self.used_bytes, self.own_bytes)

    @property
    def free_bytes(self) -> int | None:
        """What the driver could still give to anybody."""
        return _difference(self.total_bytes, self.used_bytes)

    @property
    def identity(self) -> str:
        """The sum with its numbers, or why there is none."""
        if self.rest_bytes is None:
            return f"No GPU figures: {self.reason or 'the device did not say what is used'}."
        rest = f"context and other processes {mebibytes(self.rest_bytes)}"
        if self.others_bytes is not None:
            rest = f"context {mebibytes(self.context_bytes)} + other processes {mebibytes(self.others_bytes)}"
        return (
            f"used {mebibytes(self.used_bytes)} = allocated {mebibytes(self.allocated_bytes)} "
            f"+ cached {mebibytes(self.cached_bytes)} + {rest}"
        )

    def rows(self) -> list[tuple[str, str]]:
        """The report's lines: what, and how much of it."""
        tensors = (f"living tensors on {self.device}", mebibytes(self.tensor_bytes))
        process = [
            ("this process in RAM (RSS)", mebibytes(self.process_bytes)),
            ("of it, shared with nobody (USS)", mebibytes(self.private_bytes)),
        ]
        if self.reserved_bytes is None:
            return [tensors, *process, ("GPU", f"{MISSING}: {self.reason}")]
        rest = [("+ CUDA context and other processes", mebibytes(self.rest_bytes))]
        if self.others_bytes is not None:
            rest = [
                ("+ CUDA context of this process", mebibytes(self.context_bytes)),
                ("+ other processes", mebibytes(self.others_bytes)),
            ]
        return [
            ("allocated: tensors that live", mebibytes(self.allocated_bytes)),
            ("+ cached: kept for the next ones", mebibytes(self.cached_bytes)),
            ("= reserved by PyTorch", mebibytes(self.reserved_bytes)),
            *rest,
            ("= used on the device (nvidia-smi)", mebibytes(self.used_bytes)),
            ("free", mebibytes(self.free_bytes)),
            ("total", mebibytes(self.total_bytes)),
            ("peak allocated", mebibytes(self.peak_allocated_bytes)),
            tensors,
            *process,
            *([("note", self.reason)] if self.reason else []),
        ]

    def __repr__(self) -> str:
        return text_table((f"Memory of {self.device}", "now"), self.rows())

    def _repr_html_(self) -> str:
        return html_table((f"Memory of {self.device}", "now"), self.rows())


def memory_report(device: torch.device | str | int | None = None, *, nvml: Any = None) -> MemoryReport:
    """Read the memory of `device`; None is the current GPU if CUDA runs in this process, else the CPU.

    Never starts CUDA. A GPU that this process has not touched gives a report without GPU figures and the reason.
    `nvml` replaces nvidia-ml-py's module in tests. ValueError for what is no device, or neither cpu nor cuda.
    """
    started = torch.cuda.is_initialized()
    known = _checked(device, started)
    resident, private = _process_bytes()
    host: dict[str, Any] = {"process_bytes": resident, "private_bytes": private}
    if known.type == "cpu":
        why = "this report is of the CPU" if started else _why_not()
        return MemoryReport("cpu", **host, tensor_bytes=live_bytes().get("cpu", 0), reason=why)
    if not started:
        return MemoryReport(str(known), **host, reason=_why_not())
    index = torch.cuda.current_device() if known.index is None else known.index
    if index >= torch.cuda.device_count():
        raise ValueError(f"There is no cuda:{index} here: the last GPU is cuda:{torch.cuda.device_count() - 1}.")
    known = torch.device("cuda", index)
    used: int | None = None
    total: int | None = None
    own: int | None = None
    reason: str | None = None
    try:
        free, total = torch.cuda.mem_get_info(known)
    except RuntimeError as error:  # a GPU that a failed kernel has left unusable answers with its error
        reason = f"the device did not answer: {str(error).strip().splitlines()[0][:160]}"
    else:
        used, own = total - free, _own_bytes(known, nvml)
    return MemoryReport(
        str(known),
        torch.cuda.memory_allocated(known),
        torch.cuda.memory_reserved(known),
        torch.cuda.max_memory_allocated(known),
        used,
        total,
        own,
        **host,
        tensor_bytes=live_bytes().get(str(known), 0),
        reason=reason,
    )


def _checked(device: torch.device | str | int | None, started: bool) -> torch.device:
    if device is None:
        return torch.device("cuda" if started else "cpu")
    try:
        known = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device={device!r:.80} is not a device: write 'cpu', 'cuda' or 'cuda:0'.") from None
    if known.type not in ("cpu", "cuda"):
        raise ValueError(f"memory_report knows the devices cpu and cuda, not {known}.")
    return known


def _why_not() -> str:
    if torch.version.cuda is None and torch.version.hip is None:
        return "this PyTorch is built without CUDA"
    return "CUDA has not been started in this process"


def _process_bytes() -> tuple[int | None, int | None]:
    process = psutil.Process()
    try:
        resident = process.memory_info().rss
    except (psutil.Error, OSError):
        return None, None
    try:
        return resident, process.memory_full_info().uss
    except (psutil.Error, OSError, AttributeError):  # some containers do not show it, some systems have no USS
        return resident, None


def _own_bytes(device: torch.device, nvml: Any) -> int | None:
    """What NVML counts for this process on `device`; in a container its process ids are the host's: then None."""
    if nvml is None:
        try:
            import pynvml
        except ImportError:
            return None
        nvml = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
            if process.pid == os.getpid():
                return None if process.usedGpuMemory is None else int(process.usedGpuMemory)
    except (nvml.NVMLError, AttributeError):  # a MIG slice has no such handle; an old torch, no uuid
        return None
    finally:
        nvml.nvmlShutdown()
    return None


def _difference(more: int | None, less: int | None) -> int | None:
    """`more` - `less`; None where one is missing, or where the two were not read of the same thing."""
    return None if more is None or less is None or more < less else more - less


def signed_mebibytes(change_bytes: int | None) -> str:
    """A change of memory with its sign; "0 MiB" for less than half a MiB either way."""
    if change_bytes is None:
        return MISSING
    value = round(change_bytes / 2**20)
    return f"{'+' if value > 0 else ''}{number(value, 'MiB')}".replace("-", "\N{MINUS SIGN}")
