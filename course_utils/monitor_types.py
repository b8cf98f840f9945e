"""What the monitor's parts hand to each other: a device, a reading of it, and what a backend must offer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from course_utils.visible_devices import HasIdentity, visible_nvml_indices


@dataclass(frozen=True)
class Device:
    """What is watched. `index` is NVML's number, `torch_index` the N of torch's cuda:N; both None for the CPU."""

    name: str
    index: int | None = None
    torch_index: int | None = None
    uuid: str | None = None
    total_bytes: int | None = None
    power_limit_w: float | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """One device at one moment; None is what could not be read. `throttle_bits` as in nvmlClocksEventReasons."""

    busy_percent: float | None = None
    memory_busy_percent: float | None = None
    used_bytes: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    sm_clock_mhz: float | None = None
    throttle_bits: int | None = None


class Backend(Protocol):
    """What the monitor needs. `read` returns one Reading a device, in their order; it may raise, and it may hang.

    `source` is such as "NVML", `label` what is measured ("GPU", "CPU, not a GPU"), `notes` are sentences for the
    reader, `min_interval_s` is the shortest interval that makes sense.
    """

    source: str
    label: str
    min_interval_s: float
    devices: Sequence[Device]

    @property
    def notes(self) -> Sequence[str]:
        """Sentences for the reader, such as why there is no GPU."""
        ...

    def read(self) -> Sequence[Reading]:
        """One Reading a device."""
        ...

    def close(self) -> None:
        """Free what was opened."""
        ...


class NoGpuError(RuntimeError):
    """A backend found no GPU to watch; its text says why."""


def watched_gpus(
    environment: Mapping[str, str], gpus: Sequence[HasIdentity], notes: dict[str, None]
) -> list[tuple[int | None, int]]:
    """(torch's number, NVML's number) of each GPU that torch sees; raises NoGpuError if the environment hides them all.

    A sentence about the mapping goes into `notes`, which is used as an ordered set.
    """
    visible = visible_nvml_indices(environment, gpus)
    if visible.hidden:
        raise NoGpuError(f"CUDA_VISIBLE_DEVICES={(visible.setting or '')[:60]!r} hides every GPU from torch.")
    if visible.warning:
        notes.setdefault(visible.warning)
    known: list[tuple[int | None, int]] = [
        (number, index) for number, index in enumerate(visible.indices) if index is not None
    ]
    # A MIG instance of an unknown GPU: better to watch all than none.
    return known or [(None, gpu.index) for gpu in gpus if gpu.index is not None]


def finite(value: Any, divisor: float = 1) -> float | None:
    """`value` divided by `divisor`, or None if it is no number that a sensor can show."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e18:  # NaN is not less
        return None
    return value / divisor if divisor != 1 else value


def whole(value: Any) -> int | None:
    """`value` as an integer of at least 0, or None."""
    return int(value) if finite(value) is not None and value >= 0 else None


def percent(value: Any) -> float | None:
    """`value` if it is between 0 and 100, or None."""
    number = finite(value)
    return number if number is not None and 0 <= number <= 100 else None
