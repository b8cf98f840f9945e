"""Where the monitor's readings come from: NVML, else nvidia-smi, else the CPU and RAM of this machine.

A backend is any object with the attributes and methods of `Backend`; tests pass their own. `open_backend` picks the
best that works here. Reading NVML costs about 0.1 ms; starting nvidia-smi costs from 14 ms to seconds
(aristocratos/bpytop#26, netdata/netdata#14522), hence this order and the longer interval of `SmiBackend`.

What `busy_percent` means on a GPU: the share of NVML's own window, 1/6 s to 1 s long, in which at least one kernel ran
(docs.nvidia.com/deploy/nvml-api, nvmlUtilization_t). One busy thread is enough for 100 % (NVIDIA/nvidia-docker#807).
`memory_busy_percent` is the share in which device memory was read or written; it does not say how full it is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from course_utils.monitor_nvml import NvmlBackend
from course_utils.monitor_types import Backend, Device, NoGpuError, Reading, percent, watched_gpus

if TYPE_CHECKING:  # nvidia_smi is imported only where NVML fails, so that importing the monitor stays fast
    from course_utils.nvidia_smi import SmiGpu, SmiReport

__all__ = ["Backend", "CpuBackend", "Device", "NoGpuError", "NvmlBackend", "Reading", "SmiBackend", "open_backend"]

_SHORTEST_CPU_S = 0.05  # CPU times come in ticks of 10 ms: over less than five of them a share says nothing


def open_backend(environment: Mapping[str, str] = os.environ, nvml: Any = None, timeout_s: float = 2.0) -> Backend:
    """The best backend that works here. `nvml` replaces the module pynvml in tests. Never raises for a missing GPU."""
    reasons: list[str] = []
    choices: list[Callable[[], Backend]] = [
        lambda: NvmlBackend(nvml, environment),
        lambda: SmiBackend(timeout_s=timeout_s, environment=environment),
    ]
    for choice in choices:
        try:
            return choice()
        except NoGpuError as error:
            reasons.append(str(error))
    return CpuBackend(notes=tuple(dict.fromkeys(reasons)))


class SmiBackend:
    """Starts nvidia-smi once a sample (never `-l`, which does not end), where NVML's binding is missing."""

    source = "nvidia-smi"
    label = "GPU"
    min_interval_s = 0.5

    def __init__(
        self,
        timeout_s: float = 2.0,
        environment: Mapping[str, str] = os.environ,
        query: Callable[..., SmiReport] | None = None,
    ):
        from course_utils import nvidia_smi

        self._query, self._timeout_s = query or nvidia_smi.query, timeout_s
        report = self._query(timeout_s=timeout_s)
        if not report.gpus:
            raise NoGpuError(report.reason or "nvidia-smi lists no GPU.")
        failures = dict.fromkeys(report.problems)
        known = {gpu.index: gpu for gpu in report.gpus if gpu.index is not None}
        watched = watched_gpus(environment, list(known.values()), failures)
        self.notes: Sequence[str] = tuple(failures)
        self.devices: Sequence[Device] = tuple(
            Device(gpu.name or "unknown GPU", index, number, gpu.uuid, gpu.total_bytes, gpu.power_limit_w)
            for number, index in watched
            for gpu in [known[index]]
        )

    def read(self) -> Sequence[Reading]:
        """One Reading a GPU; TimeoutError if nvidia-smi hangs, NoGpuError if it lists no GPU any more."""
        report = self._query(timeout_s=self._timeout_s)
        if report.timed_out:
            raise TimeoutError(report.reason)
        if not report.gpus:
            raise NoGpuError(report.reason)
        found = {gpu.index: gpu for gpu in report.gpus}
        return [_reading(found.get(device.index)) for device in self.devices]

    def close(self) -> None:
        """Nothing stays open between two samples."""


class CpuBackend:
    """How busy this machine's CPUs are (those that this process may use), and its RAM; clearly labelled as no GPU.

    It counts everything that runs here, like a GPU's figures do. A quota of a container (cgroup) is not taken into
    account: with one, 100 % may be out of reach.
    """

    source = "CPU (psutil)"
    label = "CPU, not a GPU"
    min_interval_s = 0.0

    def __init__(self, notes: Sequence[str] = ()):
        import psutil

        self._psutil = psutil
        self.notes: Sequence[str] = tuple(notes)
        # Not psutil.cpu_percent: its state is global, so two monitors would disturb each other.
        self._last = self._times()
        cpus = len(self._last)
        self.devices: Sequence[Device] = (
            Device(f"CPU ({cpus} core{'s' if cpus > 1 else ''})", total_bytes=psutil.virtual_memory().total),
        )

    def read(self) -> Sequence[Reading]:
        """One Reading: busy since the last one, averaged over the CPUs, and the RAM in use."""
        now, last = self._times(), self._last
        idle = sum(after[0] - before[0] for after, before in zip(now, last, strict=True))
        total = sum(after[1] - before[1] for after, before in zip(now, last, strict=True))
        memory = self._psutil.virtual_memory()
        enough = total > _SHORTEST_CPU_S * len(now)
        if enough:
            self._last = now
        return [
            Reading(
                busy_percent=min(100.0, max(0.0, 100 * (1 - idle / total))) if enough else None,
                used_bytes=memory.total - memory.available,
            )
        ]

    def close(self) -> None:
        """Nothing is open."""

    def _times(self) -> list[tuple[float, float]]:
        """(idle, total) seconds of each CPU that this process may use."""
        every = self._psutil.cpu_times(percpu=True)
        usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(every))
        chosen = [every[number] for number in usable if number < len(every)] or every
        return [
            (
                times.idle + getattr(times, "iowait", 0.0),
                # Linux counts guests a second time, inside user and nice.
                sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0),
            )
            for times in chosen
        ]


def _reading(gpu: SmiGpu | None) -> Reading:
    if gpu is None:
        return Reading()
    return Reading(
        busy_percent=percent(gpu.busy_percent),
        memory_busy_percent=percent(gpu.memory_busy_percent),
        used_bytes=gpu.used_bytes,
        power_w=gpu.power_w,
        temperature_c=gpu.temperature_c,
        sm_clock_mhz=gpu.sm_clock_mhz,
        throttle_bits=gpu.throttle_bits,
    )
