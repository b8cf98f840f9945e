"""What one sample of a GPU costs: NVML, asked in process, against a launch of nvidia-smi.

Where there is a GPU, both are the real ones. Elsewhere both are stand-ins that cost what was reported: 0.1 ms for an
NVML reading, 14 ms for a launch, the least of the reports (aristocratos/bpytop#26, netdata/netdata#14522). Then only
our own code's share is measured, and the ratio mostly repeats those two figures.
"""

from __future__ import annotations

import os
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench.report import Section, Table, median, ratio, times
from course_utils import nvidia_smi
from course_utils.monitor_backends import Backend, NvmlBackend, SmiBackend
from course_utils.monitor_types import NoGpuError

NVML_S = 0.0001
SMI_S = 0.014
_PER_SECOND = 5  # the monitor's own rate: utilisation changes no faster


@dataclass(frozen=True)
class Cost:
    """One way of sampling: seconds a sample, and CPU seconds a sample, children included."""

    name: str
    samples: int
    median_s: float
    slowest_s: float
    cpu_s: float


def measure(quick: bool = False, *, progress: bool = True) -> Section:
    """Sample both ways and compare; takes a few seconds."""
    del progress
    notes = []
    with ExitStack() as stack:
        try:
            nvml: Backend = NvmlBackend()
        except NoGpuError as reason:
            notes.append(f"{reason} NVML is a stand-in here: each reading waits {NVML_S * 1000:.1f} ms.")
            nvml = NvmlBackend(StandInNvml(), {})
        stack.callback(nvml.close)
        try:
            smi: Backend | None = SmiBackend(timeout_s=10.0)
        except NoGpuError as reason:
            notes.append(
                f"{reason} nvidia-smi is a stand-in here: a script whose bare launch takes {SMI_S * 1000:.0f} ms."
            )
            smi = None
            if os.name == "posix":
                stack.enter_context(stand_in_smi())
                smi = SmiBackend(timeout_s=10.0)
            else:
                notes.append("The stand-in is a shell script, which this system does not run: it was left out.")
        costs = [_cost("NVML", nvml.read, 50 if quick else 1000)]
        if smi is not None:
            costs.append(_cost("nvidia-smi", smi.read, 3 if quick else 50))
    if any("stand-in" in note for note in notes):
        notes.append("With a stand-in the ratio mostly repeats the two costs that were put in; see docs/benchmarks.md.")
    return Section("monitoring", "One sample of a GPU", (_table(costs),), tuple(map(asdict, costs)), tuple(notes))


def _cost(name: str, read: Callable[[], object], samples: int) -> Cost:
    read()  # the first one loads the program into the file cache
    seconds = []
    cpu_started = _cpu_s()
    for _ in range(samples):
        started = time.perf_counter()
        read()
        seconds.append(time.perf_counter() - started)
    return Cost(name, samples, median(seconds) or 0.0, max(seconds), (_cpu_s() - cpu_started) / samples)


def _cpu_s() -> float:
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def _table(costs: list[Cost]) -> Table:
    headers = (
        "way", "time against NVML", "CPU time against NVML", "median", "slowest", "CPU time a sample",
        f"of one CPU at {_PER_SECOND} a second", "samples",
    )  # fmt: skip
    first = costs[0]
    return Table(
        "Reading all metrics of every GPU once",
        headers,
        tuple(
            (
                cost.name,
                times(ratio(cost.median_s, first.median_s), 1),
                times(ratio(cost.cpu_s, first.cpu_s), 1),
                f"{cost.median_s * 1000:.2f} ms",
                f"{cost.slowest_s * 1000:.2f} ms",
                f"{cost.cpu_s * 1000:.2f} ms",
                f"{cost.cpu_s * _PER_SECOND * 100:.2f} %",
                f"{cost.samples:,}",
            )
            for cost in costs
        ),
    )


class StandInNvml:
    """What `NvmlBackend` uses of pynvml, with one GPU that always says the same; one wait a sample."""

    NVMLError = RuntimeError
    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM = 0, 1

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Any other function of NVML: answers at once with a fixed value."""
        answers = {
            "nvmlDeviceGetCount": 1,
            "nvmlDeviceGetHandleByIndex": object(),
            "nvmlDeviceGetName": "stand-in GPU",
            "nvmlDeviceGetUUID": "GPU-00000000-0000-0000-0000-000000000000",
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=2**34, used=2**30),
        }
        if not name.startswith("nvml") or name == "nvmlMemory_v2":
            raise AttributeError(name)
        value = answers.get(name, 50)
        return lambda *_: value

    def nvmlDeviceGetUtilizationRates(self, *_: object) -> SimpleNamespace:  # noqa: N802 -- NVML's name
        """Busy after a wait as long as a real reading."""
        until = time.perf_counter() + NVML_S
        while time.perf_counter() < until:  # sleeping cannot be this short
            pass
        return SimpleNamespace(gpu=50, memory=20)


@contextmanager
def stand_in_smi() -> Iterator[Path]:
    """A program named nvidia-smi first on PATH, a launch of which takes SMI_S in all; it prints `EXAMPLE_QUERY_CSV`."""
    path = os.environ.get("PATH", "")
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "nvidia-smi"
        _write_script(program, 0.0)
        launches = []
        for _ in range(5):
            started = time.perf_counter()
            subprocess.run([program], check=True, capture_output=True)
            launches.append(time.perf_counter() - started)
        _write_script(program, max(0.0, SMI_S - min(launches)))
        os.environ["PATH"] = f"{folder}{os.pathsep}{path}"
        try:
            yield program
        finally:
            os.environ["PATH"] = path


def _write_script(program: Path, wait_s: float) -> None:
    table = nvidia_smi.EXAMPLE_QUERY_CSV.rstrip()
    program.write_text(f"#!/bin/sh\nsleep {wait_s:.4f}\ncat <<'END'\n{table}\nEND\n", encoding="utf-8")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
