"""A stand-in for the module pynvml: GPUs that answer what a test tells them, and fail where it tells them to.

nvml = FakeNvml([FakeGpu(name="Tesla T4", busy=[10, 90])])
backend = NvmlBackend(nvml, environment={})
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

T4_BYTES = 15360 * 2**20


class NVMLError(Exception):
    """As in pynvml: `value` is the error code; the subclasses of the real one are not needed."""

    TEXTS: ClassVar = {3: "Not Supported", 9: "Driver Not Loaded", 15: "GPU is lost", 999: "Unknown Error"}

    def __init__(self, value: int):
        super().__init__(value)
        self.value = value

    def __str__(self) -> str:
        return self.TEXTS.get(self.value, f"NVML Error with code {self.value}")


@dataclass
class FakeGpu:
    """`busy` is one value or a list that is read from the front and whose last value stays; `fails` maps names of
    metrics (utilisation, memory, power, temperature, clock, throttle, name, handle, or "all") to NVML error codes.
    """

    name: Any = "Tesla T4"
    uuid: str = "GPU-2dee1e25-0000-0000-0000-000000000000"
    busy: Any = 50
    memory_busy: int = 20
    used_bytes: int = 444 * 2**20
    total_bytes: int = T4_BYTES
    power_mw: int = 41_270
    power_limit_mw: int = 70_000
    temperature: int = 61
    clock: int = 1245
    throttle_bits: int = 0x4
    fails: dict[str, int] = field(default_factory=dict)


class FakeNvml:
    """What the monitor uses of pynvml. `calls` counts the calls by name; `delay_s` makes every reading slow."""

    NVMLError = NVMLError
    NVML_TEMPERATURE_GPU = 0
    NVML_CLOCK_SM = 1
    nvmlMemory_v2 = 0x2000028  # noqa: N815

    def __init__(self, gpus: Sequence[FakeGpu] = (), init_error: int | None = None, delay_s: float = 0.0):
        self.gpus = list(gpus)
        self.init_error, self.delay_s = init_error, delay_s
        self.calls: dict[str, int] = {}
        self.users = 0

    def nvmlInit(self) -> None:
        self._count("nvmlInit")
        if self.init_error is not None:
            raise NVMLError(self.init_error)
        self.users += 1

    def nvmlShutdown(self) -> None:
        self._count("nvmlShutdown")
        self.users -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        return self._answer(self.gpus[index], "handle", lambda: self.gpus[index])

    def nvmlDeviceGetName(self, gpu: FakeGpu) -> Any:
        def decoded() -> Any:
            # The real binding decodes strictly, so bytes that are no text raise UnicodeDecodeError.
            return gpu.name.decode() if isinstance(gpu.name, bytes) and gpu.name.startswith(b"\xf8") else gpu.name

        return self._answer(gpu, "name", decoded)

    def nvmlDeviceGetUUID(self, gpu: FakeGpu) -> str:
        return self._answer(gpu, "uuid", lambda: gpu.uuid)

    def nvmlDeviceGetEnforcedPowerLimit(self, gpu: FakeGpu) -> int:
        return self._answer(gpu, "power_limit", lambda: gpu.power_limit_mw)

    def nvmlDeviceGetUtilizationRates(self, gpu: FakeGpu) -> SimpleNamespace:
        def rates() -> SimpleNamespace:
            time.sleep(self.delay_s)
            busy = gpu.busy
            if isinstance(busy, list):
                busy = busy.pop(0) if len(busy) > 1 else busy[0]
            return SimpleNamespace(gpu=busy, memory=gpu.memory_busy)

        return self._answer(gpu, "utilisation", rates)

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu, version: int | None = None) -> SimpleNamespace:
        # Version 1 counts what the driver reserves as used.
        reserved = 0 if version == self.nvmlMemory_v2 else 2**28
        return self._answer(
            gpu,
            "memory" if version is None else "memory_v2",
            lambda: SimpleNamespace(total=gpu.total_bytes, used=gpu.used_bytes + reserved),
        )

    def nvmlDeviceGetPowerUsage(self, gpu: FakeGpu) -> int:
        return self._answer(gpu, "power", lambda: gpu.power_mw)

    def nvmlDeviceGetTemperature(self, gpu: FakeGpu, sensor: int) -> int:
        return self._answer(gpu, "temperature", lambda: gpu.temperature)

    def nvmlDeviceGetClockInfo(self, gpu: FakeGpu, kind: int) -> int:
        return self._answer(gpu, "clock", lambda: gpu.clock)

    def nvmlDeviceGetCurrentClocksEventReasons(self, gpu: FakeGpu) -> int:
        return self._answer(gpu, "throttle", lambda: gpu.throttle_bits)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu: FakeGpu) -> int:
        return self._answer(gpu, "throttle_old", lambda: gpu.throttle_bits)

    def _answer(self, gpu: FakeGpu, metric: str, value: Callable[[], Any]) -> Any:
        self._count(metric)
        code = gpu.fails.get(metric, gpu.fails.get("all"))
        if code is not None:
            raise NVMLError(code)
        return value()

    def _count(self, name: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1
