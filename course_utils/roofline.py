"""What this device can do at most, measured: matrix products a second, bytes a second, and the roofline they make.

    roof = roofline(device)
    roof                                               # a table: both peaks, the ridge, the datasheet's where known
    roof.draw({"one training step": (flops.hardware_flops, moved.unfused_bytes, step_s)})

The roofline model: a program that does I FLOPs for each byte it moves reaches min(peak, I x bandwidth) at most
(Williams, Waterman and Patterson 2009, doi.org/10.1145/1498765.1498785). Left of the ridge memory is the limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from course_utils.flops_units import percent, positive, si
from course_utils.gpu_specs import GpuSpec, spec_for
from course_utils.machine import ram_bytes
from course_utils.timing import Timing, synchronize, time_call
from course_utils.views import MISSING, html_table, number, text_table

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_SIZES = (256, 512, 1024, 2048, 4096, 8192)
_LARGEST_ON_CPU = 4096
_MOST_CALLS = 30
_COPY_BYTES = {"cpu": 2**28, "cuda": 2**29}  # larger than any cache


@dataclass(frozen=True, repr=False)
class MeasuredPeak:
    """The most FLOP/s that a square matrix product reached, at `size`; the datasheet's figure, where there is one."""

    flops_per_s: float
    size: int
    dtype: torch.dtype
    device: str
    timing: Timing
    datasheet_flops_per_s: float | None = None

    def __repr__(self) -> str:
        share = None if self.datasheet_flops_per_s is None else self.flops_per_s / self.datasheet_flops_per_s
        promised = f"; datasheet {si(self.datasheet_flops_per_s, 'FLOP/s')}, of which {percent(share)}" if share else ""
        return (
            f"{si(self.flops_per_s, 'FLOP/s')} in a {self.size} x {self.size} product of {_name(self.dtype)} "
            f"on {self.device} ({_calls(self.timing)}){promised}"
        )


@dataclass(frozen=True, repr=False)
class MeasuredBandwidth:
    """Bytes a second in a copy inside the device's memory, read and written bytes both counted."""

    bytes_per_s: float
    copied_bytes: int
    device: str
    timing: Timing
    datasheet_bytes_per_s: float | None = None

    def __repr__(self) -> str:
        share = None if self.datasheet_bytes_per_s is None else self.bytes_per_s / self.datasheet_bytes_per_s
        promised = f"; datasheet {si(self.datasheet_bytes_per_s, 'B/s')}, of which {percent(share)}" if share else ""
        return (
            f"{si(self.bytes_per_s, 'B/s')}, read and written, in a copy of {si(self.copied_bytes, 'B')} "
            f"on {self.device} ({_calls(self.timing)}){promised}"
        )


@dataclass(frozen=True, repr=False)
class Roofline:
    """The two limits of one device for one dtype, as measured; `intensity` is FLOPs for each byte moved."""

    peak: MeasuredPeak
    bandwidth: MeasuredBandwidth

    @property
    def ridge_flops_per_byte(self) -> float:
        """The intensity from which on compute is the limit."""
        return self.peak.flops_per_s / self.bandwidth.bytes_per_s

    @property
    def datasheet_ridge_flops_per_byte(self) -> float | None:
        """The same of the datasheet's two figures; None where one is missing."""
        flops, moved = self.peak.datasheet_flops_per_s, self.bandwidth.datasheet_bytes_per_s
        return None if flops is None or moved is None else flops / moved

    def attainable(self, intensity: float) -> float:
        """The most FLOP/s at this intensity."""
        return min(self.peak.flops_per_s, positive("intensity", intensity) * self.bandwidth.bytes_per_s)

    def limit(self, intensity: float) -> Literal["memory", "compute"]:
        """What a program of this intensity runs against first."""
        return "memory" if positive("intensity", intensity) < self.ridge_flops_per_byte else "compute"

    def share(self, flops: float, moved_bytes: float, seconds: float) -> float:
        """Which share of the attainable FLOP/s a program reaches. Above 1, it moves less than `moved_bytes`."""
        rate = positive("flops", flops) / positive("seconds", seconds)
        return rate / self.attainable(flops / positive("moved_bytes", moved_bytes))

    def draw(self, points: Mapping[str, tuple[float, float, float]] | None = None) -> Any:
        """The roofline, log-log, with each of `points`, name → (FLOPs, bytes moved, seconds), on it; a new figure."""
        from course_utils.roofline_view import draw_roofline

        return draw_roofline(self, points or {})

    def _rows(self) -> list[tuple[str, ...]]:
        peak, memory, ridge = self.peak, self.bandwidth, self.ridge_flops_per_byte
        promised = self.datasheet_ridge_flops_per_byte
        return [
            ("compute", si(peak.flops_per_s, "FLOP/s"), si(peak.datasheet_flops_per_s, "FLOP/s")),
            ("memory", si(memory.bytes_per_s, "B/s"), si(memory.datasheet_bytes_per_s, "B/s")),
            ("ridge", number(ridge, "FLOP/byte", 1), MISSING if promised is None else number(promised, "FLOP/byte", 1)),
        ]

    def _line(self) -> str:
        return f"Roofline of {self.peak.device}, {_name(self.peak.dtype)}"

    def __repr__(self) -> str:
        return f"{self._line()}\n{text_table(_HEADERS, self._rows())}"

    def _repr_html_(self) -> str:
        return html_table(_HEADERS, self._rows(), self._line())


_HEADERS = ("limit", "measured", "datasheet")


def roofline(
    device: torch.device | str | None = None, dtype: torch.dtype = torch.float32, *, budget_s: float = 2.0
) -> Roofline:
    """Measure both limits of `device` (None: the GPU if PyTorch has one, else the CPU), in about `budget_s` seconds."""
    budget_s = positive("budget_s", budget_s)
    peak = matmul_peak(device, dtype, budget_s=budget_s * 0.7)
    return Roofline(peak, memory_bandwidth(device, budget_s=budget_s * 0.3))


def matmul_peak(
    device: torch.device | str | None = None, dtype: torch.dtype = torch.float32, *, budget_s: float = 1.0
) -> MeasuredPeak:
    """Measure the FLOP/s of square matrix products, 2 n³ FLOPs each, and return the best.

    Sizes from 256 up to 8192 (4096 on a CPU), as long as `budget_s` seconds last and three matrices fit into a quarter
    of the memory; the smallest is measured in any case. The fastest call counts: what else runs on the machine only
    slows calls down. PyTorch's settings hold, its number of threads and TF32 for float32 among them, while the
    datasheet's float32 figure is without TF32. No random state changes.

    ValueError for a dtype that is none of `DTYPES`, or a device that is not here.
    """
    device, left_s = _here(device), positive("budget_s", budget_s)
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(map(str, DTYPES))}, not {dtype!r:.80}.")
    room, best, calls = _memory_bytes(device) // 4, None, _MOST_CALLS
    for size in _SIZES:
        fits = 3 * size**2 * dtype.itemsize <= room and (device.type == "cuda" or size <= _LARGEST_ON_CPU)
        if best is not None and (calls < 1 or not fits):
            break
        timing = _product(size, dtype, device, calls, left_s / 2)
        left_s -= timing.seconds[0] + sum(timing.seconds)
        # Twice the size is eight times the work, or less where starting the threads takes most of the time.
        calls = int(left_s / (8 * timing.min_s))
        rate = 2 * size**3 / timing.min_s
        if best is None or rate > best.flops_per_s:
            best = MeasuredPeak(rate, size, dtype, str(device), timing, _datasheet_flops(_spec(device), dtype))
    assert best is not None
    return best


def memory_bandwidth(device: torch.device | str | None = None, *, budget_s: float = 0.6) -> MeasuredBandwidth:
    """Measure how many bytes a second `device` moves: `target.copy_(source)` with buffers larger than its caches.

    A copy of n bytes counts 2 n: n read, n written, as STREAM counts (cs.virginia.edu/stream/ref.html). A CPU whose
    cache fetches a line before it writes it moves up to 3 n. Buffers: 256 MiB each on a CPU, 512 MiB on a GPU, less
    where memory is short. The fastest call counts.
    """
    device, budget_s = _here(device), positive("budget_s", budget_s)
    count = min(_COPY_BYTES[device.type], _memory_bytes(device) // 8) // 4
    source = torch.ones(count, device=device)
    target = torch.empty_like(source)
    timing = time_call(lambda: target.copy_(source), device=device, repeats=_MOST_CALLS, budget_s=budget_s)
    spec = _spec(device)
    promised = None if spec is None else spec.bandwidth_bytes_per_s
    return MeasuredBandwidth(2 * 4 * count / timing.min_s, 4 * count, str(device), timing, promised)


def _product(size: int, dtype: torch.dtype, device: torch.device, calls: int, budget_s: float) -> Timing:
    own = torch.Generator(device).manual_seed(0)
    # Random numbers, because a GPU's power, and with it its clock, depends on the bits that it multiplies.
    left, right = (torch.randn(size, size, generator=own, dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(left)

    def multiply() -> None:
        torch.mm(left, right, out=out)

    warmup, repeats = (1, min(calls - 1, _MOST_CALLS)) if calls > 3 else (0, calls)
    return time_call(multiply, device=device, warmup=warmup, repeats=repeats, budget_s=budget_s)


def _here(device: torch.device | str | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    synchronize(device)  # says in a sentence what is wrong with a device
    return torch.device(device)


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return ram_bytes() or 2**32


def _spec(device: torch.device) -> GpuSpec | None:
    return spec_for(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def _datasheet_flops(spec: GpuSpec | None, dtype: torch.dtype) -> float | None:
    if spec is None:
        return None
    tflops = {
        torch.float32: spec.fp32_tflops,
        torch.float16: spec.fp16_tensor_tflops,
        torch.bfloat16: spec.bf16_tensor_tflops,
    }.get(dtype)
    return None if tflops is None else tflops * 1e12


def _calls(timing: Timing) -> str:
    return "one call" if timing.repeats == 1 else f"fastest of {timing.repeats} calls"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
