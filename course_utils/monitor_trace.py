"""What a monitor has recorded: a trace of samples, and its summary.

Averages are weighted by time. A sample stands for the time since the one before it, because that is where
utilisation looks (nvmlUtilization_t: "over the past sample period"). What could not be read is None: it is skipped, and
its time does not count.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from course_utils import views
from course_utils.monitor_types import Device, Reading

if TYPE_CHECKING:
    from course_utils.plots import CourseFigure

IDLE_BELOW_PERCENT = 10.0

# Bits of nvmlClocksEventReasons (docs.nvidia.com/deploy/nvml-api): why the clocks are not at their highest.
THROTTLE_REASONS: Mapping[int, str] = {
    0x001: "GPU idle",
    0x002: "clocks set by an application",
    0x004: "power cap (software)",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "temperature (software)",
    0x040: "temperature (hardware)",
    0x080: "power brake (hardware)",
    0x100: "display clock",
}


@dataclass(frozen=True, slots=True)
class Sample:
    """`time_s` seconds after the start: one reading a device."""

    time_s: float
    readings: tuple[Reading, ...]


@dataclass(frozen=True)
class Statistic:
    """Mean and median over time, and the extremes, of `samples` values; all None where there is no value."""

    mean: float | None = None
    median: float | None = None
    min: float | None = None
    max: float | None = None
    samples: int = 0


@dataclass(frozen=True)
class Summary:
    """One device over the whole trace.

    `source` is "NVML", "nvidia-smi" or "CPU (psutil)", `label` what was measured ("GPU" or "CPU, not a GPU").
    `idle_share` is the share of time, 0 to 1, in which it was less than 10 % busy; `throttle_shares` the share of time
    for each reason why the clocks were held. `failed` and `timed_out` count samples that could not be taken.
    """

    source: str
    label: str
    device: Device
    seconds: float
    busy_percent: Statistic
    idle_share: float | None
    memory_busy_percent: Statistic
    used_bytes: Statistic
    power_w: Statistic
    temperature_c: Statistic
    sm_clock_mhz: Statistic
    throttle_shares: Mapping[str, float] = field(hash=False)
    failed: int = 0
    timed_out: int = 0
    notes: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """What was measured, how, and for how long, in one line."""
        return (
            f"{self.label}: {self.device.name}, through {self.source}, {views.number(self.seconds, 's', 1)}, "
            f"{self.busy_percent.samples} samples"
        )

    def __repr__(self) -> str:
        return "\n".join([self.title, views.text_table(_HEADERS, self._rows()), *self._sentences()])

    def _repr_html_(self) -> str:
        sentences = "".join(f"<p>{html.escape(sentence)}</p>" for sentence in self._sentences())
        return views.html_table(_HEADERS, self._rows(), self.title) + sentences

    def _rows(self) -> list[list[str]]:
        shown: list[tuple[str, Statistic, float, str, int]] = [
            ("busy", self.busy_percent, 1, "%", 0),
            ("memory read or written", self.memory_busy_percent, 1, "%", 0),
            ("memory used", self.used_bytes, 2**20, "MiB", 0),
            ("power", self.power_w, 1, "W", 0),
            ("temperature", self.temperature_c, 1, "°C", 0),
            ("SM clock", self.sm_clock_mhz, 1, "MHz", 0),
        ]
        return [
            [name, *(_cell(value, scale, unit, digits) for value in (it.mean, it.median, it.min, it.max))]
            for name, it, scale, unit, digits in shown
            if it.samples or name == "busy"
        ]

    def _sentences(self) -> list[str]:
        said = []
        if self.idle_share is not None:
            said.append(f"Less than {IDLE_BELOW_PERCENT:.0f} % busy for {100 * self.idle_share:.0f} % of the time.")
        held = {reason: share for reason, share in self.throttle_shares.items() if share and reason != "GPU idle"}
        if held:
            said.append(
                "Clocks held: " + ", ".join(f"{reason} {100 * share:.0f} %" for reason, share in held.items()) + "."
            )
        if self.timed_out or self.failed:
            said.append(f"Samples not taken: {self.timed_out} timed out, {self.failed} failed.")
        return [*said, *self.notes]


_HEADERS = ("metric", "mean", "median", "min", "max")


@dataclass(frozen=True)
class Trace:
    """Samples in the order of time, and where they come from. `interval_s` is the one that was aimed at."""

    source: str
    label: str
    devices: tuple[Device, ...]
    samples: tuple[Sample, ...] = field(repr=False)
    interval_s: float = 0.2
    failed: int = 0
    timed_out: int = 0
    notes: tuple[str, ...] = ()

    @classmethod
    def from_busy(
        cls, values: Sequence[float | None], interval_s: float = 0.2, source: str = "example", label: str = "GPU"
    ) -> Trace:
        """A trace of one device from utilisations in percent, `interval_s` apart: for examples and exercises."""
        samples = (Sample((number + 1) * interval_s, (Reading(value),)) for number, value in enumerate(values))
        return cls(source, label, (Device("example"),), tuple(samples), interval_s)

    @property
    def seconds(self) -> float:
        """Time from the start to the last sample."""
        return self.samples[-1].time_s if self.samples else 0.0

    @property
    def times_s(self) -> list[float]:
        """The time of each sample, in seconds after the start."""
        return [sample.time_s for sample in self.samples]

    def weights(self) -> list[float]:
        """The seconds that each sample stands for: those since the one before it."""
        times = self.times_s
        # To the nanosecond, so that samples at even distances weigh exactly the same.
        weights = [round(later - earlier, 9) for earlier, later in zip([0.0, *times], times, strict=False)]
        return weights if any(weights) else [1.0] * len(weights)

    def values(self, metric: str = "busy_percent", device: int = 0) -> list[Any]:
        """One value a sample, None where it could not be read; `metric` is an attribute of Reading."""
        self._check(device)
        if metric not in Reading.__slots__:
            raise ValueError(f"metric must be one of {', '.join(Reading.__slots__)}, not {metric!r}.")
        return [getattr(sample.readings[device], metric) for sample in self.samples]

    def summary(self, device: int = 0) -> Summary:
        """Summarise device number `device` of this trace (0 is torch's cuda:0, where there is a GPU)."""
        self._check(device)
        weights = self.weights()
        statistics = {metric: statistic(self.values(metric, device), weights) for metric in Reading.__slots__[:-1]}
        return Summary(
            source=self.source,
            label=self.label,
            device=self.devices[device],
            seconds=self.seconds,
            idle_share=share(
                [None if busy is None else busy < IDLE_BELOW_PERCENT for busy in self.values(device=device)], weights
            ),
            throttle_shares=self._throttle_shares(device, weights),
            failed=self.failed,
            timed_out=self.timed_out,
            notes=self.notes,
            **statistics,
        )

    def idle_gaps(self, device: int = 0, at_least_s: float = 0.0) -> list[tuple[float, float]]:
        """(start, end) in seconds of each stretch that was less than 10 % busy and lasted at least `at_least_s`."""
        gaps: list[tuple[float, float]] = []
        start = 0.0
        for time_s, busy in zip(self.times_s, self.values(device=device), strict=True):
            if busy is not None and busy < IDLE_BELOW_PERCENT:
                gaps = (
                    [*gaps[:-1], (gaps[-1][0], time_s)] if gaps and gaps[-1][1] == start else [*gaps, (start, time_s)]
                )
            start = time_s
        return [(first, last) for first, last in gaps if last - first >= at_least_s]

    def draw(self, device: int = 0) -> CourseFigure:
        """A figure of this trace, with alt text; `plot` shows it."""
        from course_utils.monitor_view import draw

        return draw(self, device)

    def plot(self, device: int = 0) -> None:
        """Show busy %, memory and power over time."""
        from course_utils import plots

        plots.show(self.draw(device))

    def save(self, path: str | Path) -> Path:
        """Write the trace to a .json or .csv file, whole or not at all; see `course_utils.monitor_files`."""
        from course_utils.monitor_files import save

        return save(self, path)

    @staticmethod
    def load(path: str | Path) -> Trace:
        """Read a trace that `save` wrote; ValueError, in one sentence, for anything else."""
        from course_utils.monitor_files import load

        return load(path)

    def _check(self, device: int) -> None:
        if not 0 <= device < len(self.devices):
            raise IndexError(
                f"There is no device {device!r} in this trace: it has {len(self.devices)}, numbered from 0."
            )

    def _throttle_shares(self, device: int, weights: Sequence[float]) -> dict[str, float]:
        bits = self.values("throttle_bits", device)
        shares = {
            reason: share([None if value is None else bool(value & mask) for value in bits], weights)
            for mask, reason in THROTTLE_REASONS.items()
        }
        return {reason: part for reason, part in shares.items() if part}


def statistic(values: Sequence[float | None], weights: Sequence[float]) -> Statistic:
    """Weighted mean and median, and the extremes; None is skipped with its weight. Of nothing but None: all None."""
    known = sorted((value, weight) for value, weight in zip(values, weights, strict=True) if value is not None)
    if not known:
        return Statistic()
    if not any(weight for _, weight in known):
        known = [(value, 1.0) for value, _ in known]
    mean = weighted_mean([value for value, _ in known], [weight for _, weight in known])
    half = math.fsum(weight for _, weight in known) / 2
    return Statistic(mean, _median(known, half), known[0][0], known[-1][0], len(known))


def weighted_mean(values: Sequence[float | None], weights: Sequence[float]) -> float | None:
    """The mean of what is not None, each value with its weight; None if there is none, or no weight."""
    known = [(value, weight) for value, weight in zip(values, weights, strict=True) if value is not None]
    total = math.fsum(weight for _, weight in known)
    if not total:
        return None
    mean = math.fsum(value * weight for value, weight in known) / total
    # Rounding must not carry a mean of equal values past them.
    return min(max(mean, min(value for value, _ in known)), max(value for value, _ in known))


def share(flags: Sequence[bool | None], weights: Sequence[float]) -> float | None:
    """The weight of the True ones over that of all known ones, 0 to 1; None where nothing is known."""
    return weighted_mean([None if flag is None else float(flag) for flag in flags], weights)


def _median(ascending: Sequence[tuple[float, float]], half: float) -> float:
    reached = 0.0
    for number, (value, weight) in enumerate(ascending):
        reached += weight
        if abs(reached - half) <= 1e-9 * half and number + 1 < len(ascending):
            return (value + ascending[number + 1][0]) / 2
        if reached >= half:
            return value
    return ascending[-1][0]


def _cell(value: float | None, scale: float, unit: str, digits: int) -> str:
    return views.number(None if value is None else value / scale, unit, digits)
