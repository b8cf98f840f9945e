"""Readings through NVML, the library that nvidia-smi itself asks; in process, at about 0.1 ms a sample."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from course_utils.monitor_types import Device, NoGpuError, Reading, finite, percent, watched_gpus, whole
from course_utils.nvidia_smi_text import clean_name
from course_utils.visible_devices import GpuIdentity


class NvmlBackend:
    """Reads NVML through nvidia-ml-py: one nvmlInit, then a few cheap calls a sample, each on its own feet.

    Only GPUs that torch sees are watched, in torch's order. A metric that fails is None (`NVMLError`, whichever: WSL
    raises Unknown where others raise NotSupported, dask/distributed#5342), and a lost GPU does not hide the others.
    """

    source = "NVML"
    label = "GPU"
    min_interval_s = 0.0

    def __init__(self, nvml: Any = None, environment: Mapping[str, str] = os.environ):
        self._nvml = nvml if nvml is not None else _import_pynvml()
        self._failures: dict[str, None] = {}  # an ordered set
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            raise NoGpuError(f"NVML: {_said(error)}.") from None
        try:
            self._open(environment)
        except BaseException:
            self.close()
            raise

    @property
    def notes(self) -> Sequence[str]:
        """What could not be read, each sentence once."""
        return tuple(self._failures)

    def read(self) -> Sequence[Reading]:
        """One Reading a GPU."""
        return [
            self._read(device, handle) if handle is not None else Reading()
            for device, handle in zip(self.devices, self._handles, strict=True)
        ]

    def close(self) -> None:
        """Release NVML (it counts its users, so other monitors go on)."""
        self._try(None, self._nvml.nvmlShutdown)

    def _open(self, environment: Mapping[str, str]) -> None:
        nvml = self._nvml
        count = self._try(None, nvml.nvmlDeviceGetCount) or 0
        if not count:
            raise NoGpuError("NVML lists no GPU.")
        handles = [self._try(f"GPU {index}", nvml.nvmlDeviceGetHandleByIndex, index) for index in range(count)]
        known = [
            GpuIdentity(index, self._text(nvml.nvmlDeviceGetUUID, handle), self._text(nvml.nvmlDeviceGetName, handle))
            for index, handle in enumerate(handles)
        ]
        self._handles: list[Any] = []
        devices: list[Device] = []
        for torch_index, index in watched_gpus(environment, known, self._failures):
            handle = handles[index]
            limit = self._try(None, nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
            devices.append(
                Device(
                    name=known[index].name or "unknown GPU",
                    index=index,
                    torch_index=torch_index,
                    uuid=known[index].uuid,
                    total_bytes=whole(getattr(self._memory(None, handle), "total", None)),
                    power_limit_w=finite(limit, 1000),
                )
            )
            self._handles.append(handle)
        self.devices: Sequence[Device] = tuple(devices)

    def _read(self, device: Device, handle: Any) -> Reading:
        nvml, gpu = self._nvml, f"GPU {device.index}"
        utilisation = self._try(f"{gpu}, utilisation", nvml.nvmlDeviceGetUtilizationRates, handle)
        memory = self._memory(f"{gpu}, memory", handle)
        power = self._try(f"{gpu}, power", nvml.nvmlDeviceGetPowerUsage, handle)
        heat = self._try(f"{gpu}, temperature", nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)
        clock = self._try(f"{gpu}, SM clock", nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM)
        return Reading(
            busy_percent=percent(getattr(utilisation, "gpu", None)),
            memory_busy_percent=percent(getattr(utilisation, "memory", None)),
            used_bytes=whole(getattr(memory, "used", None)),
            power_w=finite(power, 1000),  # NVML counts milliwatts
            temperature_c=finite(heat),
            sm_clock_mhz=finite(clock),
            throttle_bits=whole(self._throttle(f"{gpu}, clocks' event reasons", handle)),
        )

    def _memory(self, what: str | None, handle: Any) -> Any:
        # Version 2 leaves out what the driver reserves, as nvidia-smi does; old drivers know only version 1.
        version = getattr(self._nvml, "nvmlMemory_v2", None)
        second = self._try(None, self._nvml.nvmlDeviceGetMemoryInfo, handle, version) if version is not None else None
        return second if second is not None else self._try(what, self._nvml.nvmlDeviceGetMemoryInfo, handle)

    def _throttle(self, what: str, handle: Any) -> Any:
        # The same bits under their new name and the one that older drivers and bindings know.
        for name in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"):
            function = getattr(self._nvml, name, None)
            bits = self._try(None, function, handle) if function is not None else None
            if bits is not None:
                return bits
        return None

    def _text(self, function: Callable[..., Any], handle: Any) -> str | None:
        try:
            return clean_name(self._try(None, function, handle))
        except UnicodeDecodeError as error:  # nvidia-ml-py decodes strictly; WSL once gave the byte 0xf8
            return clean_name(error.object)

    def _try(self, what: str | None, function: Callable[..., Any], *arguments: Any) -> Any:
        if arguments and arguments[0] is None:
            return None  # no handle: the GPU did not answer when it was opened
        try:
            return function(*arguments)
        except self._nvml.NVMLError as error:
            if what is not None:
                self._failures.setdefault(f"{what}: {_said(error)}.")
            return None


def _import_pynvml() -> Any:
    try:
        import pynvml
    except ImportError:
        raise NoGpuError("NVML's binding is missing (pip install nvidia-ml-py).") from None
    return pynvml


def _said(error: Exception) -> str:
    return str(error)[:200].rstrip(".")
