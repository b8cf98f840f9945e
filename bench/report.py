"""What a benchmark hands back, the machine that it ran on, and how both become text or JSON."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from course_utils import machine, views
from course_utils.driver import read_driver

_PACKAGES = ("torch", "torchvision", "numpy", "lightning", "accelerate", "psutil", "nvidia-ml-py")


@dataclass(frozen=True)
class Table:
    """A title and the cells below it, all text; ratios stand before the figures that they come from."""

    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Section:
    """One benchmark's result: tables to read, the records behind them (plain values, for JSON), and what to know."""

    name: str
    title: str
    tables: tuple[Table, ...]
    records: tuple[Mapping[str, Any], ...]
    notes: tuple[str, ...] = ()
    seconds: float = 0.0


def header() -> dict[str, str]:
    """The machine, the versions and the date, by what they are. Starts no CUDA."""
    versions = ", ".join(f"{name} {version}" for name in _PACKAGES if (version := installed(name)))
    load = f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else views.MISSING
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": f"{platform.system()} {platform.machine()}",
        "CPU": f"{_cpu_name()}, {machine.usable_cpus()} usable, {torch.get_num_threads()} threads for PyTorch",
        "RAM": views.gibibytes(machine.ram_bytes()),
        "GPU": ", ".join(gpu.name for gpu in read_driver().gpus) or "none",
        "load before the run": f"{load} (below 0.5: nothing else ran)",
        "versions": f"Python {platform.python_version()}, {versions}",
    }


def as_text(section: Section) -> str:
    """The section as plain text for a terminal."""
    parts = [f"== {section.title} ({section.seconds:.0f} s)"]
    for table in section.tables:
        parts.append(f"{table.title}\n\n{views.text_table(table.headers, table.rows)}")
    parts += [f"Note: {note}" for note in section.notes]
    return "\n\n".join(parts)


def as_record(head: Mapping[str, str], sections: Iterable[Section]) -> dict[str, Any]:
    """Everything that the text says, and the records behind it, as what JSON can hold."""
    return {"format": "course bench 1", "header": dict(head), "sections": [asdict(section) for section in sections]}


def installed(name: str) -> str | None:
    """The version of a distribution, or None where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def ratio(value: float | None, reference: float | None) -> float | None:
    """`value` / `reference`, or None where one of the two is missing or the reference is 0."""
    return value / reference if value is not None and reference else None


def times(value: float | None, digits: int = 2) -> str:
    """A ratio as text: "0.97 x"."""
    return views.number(value, "x", digits)


def yes(value: bool | None) -> str:
    """True, False and None as "yes", "no" and "n/a"."""
    return views.MISSING if value is None else "yes" if value else "no"


def median(values: Sequence[float]) -> float | None:
    """The median, or None of nothing."""
    return statistics.median(values) if values else None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown CPU"
