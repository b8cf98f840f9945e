"""What the NVIDIA driver says of its GPUs, read without starting CUDA.

NVML is asked, which is not CUDA: `torch.cuda.is_available()` calls `cuInit`, after which a forked child can no longer
use CUDA (PyTorch's notes on multiprocessing, "Poison fork"); NVML leaves the process as it was. Nothing here raises
because a GPU, the driver or one of its answers is missing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

_LIBRARY_NOT_FOUND, _DRIVER_NOT_LOADED, _VERSION_MISMATCH = 12, 9, 18  # nvmlReturn_t in nvml.h
# The first driver for each CUDA version: docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
_FIRST_DRIVER_OF_CUDA = {13: 580, 12: 525, 11: 450}
NVML_IS_MISSING = "an NVIDIA GPU is attached, but NVML, the driver's management library, is missing"
_SMI_FIELDS = ("index", "name", "uuid", "driver_version", "memory.total", "compute_cap")


class MigSlice(NamedTuple):
    """One MIG instance: a slice of a GPU that CUDA sees as a whole device."""

    name: str
    uuid: str | None
    memory_bytes: int | None


@dataclass(frozen=True)
class DriverGpu:
    """A GPU as the driver lists it. `mig` is None without MIG, else the instances (none: nothing can run)."""

    index: int
    name: str
    capability: tuple[int, int] | None
    memory_bytes: int | None
    uuid: str | None = None
    mig: tuple[MigSlice, ...] | None = None

    @property
    def mig_uuids(self) -> tuple[str, ...]:
        """What `visible_devices` needs to find a MIG instance's GPU."""
        return tuple(piece.uuid for piece in self.mig or () if piece.uuid)


class Driver(NamedTuple):
    """All GPUs of the machine in NVML's order, the driver's version, and why there is none.

    `cuda` is the newest CUDA version that the driver runs, as (major, minor). `state`: "listed" (there are GPUs),
    "absent" (there is none), "unreachable" (neither NVML nor nvidia-smi was found), "broken" (they failed).
    """

    gpus: tuple[DriverGpu, ...] = ()
    version: str | None = None
    cuda: tuple[int, int] | None = None
    reason: str | None = None
    state: Literal["listed", "absent", "unreachable", "broken"] = "listed"


def read_driver(nvml: Any = None, root: Path = Path("/")) -> Driver:
    """Ask NVML (`nvml` is nvidia-ml-py's module or a stand-in) for the GPUs; where it is missing, ask nvidia-smi."""
    nvml = nvml or _import_nvml()
    if nvml is None:
        return _ask_nvidia_smi("there is no NVIDIA driver, as far as can be told without the package nvidia-ml-py")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        code = getattr(error, "value", None)
        if code == _LIBRARY_NOT_FOUND:
            attached = (root / "dev/nvidiactl").exists()
            return _ask_nvidia_smi(NVML_IS_MISSING if attached else "there is no NVIDIA driver")
        if code == _DRIVER_NOT_LOADED:
            return Driver(reason="the NVIDIA driver is not loaded", state="absent")
        if code == _VERSION_MISMATCH:
            return Driver(reason="the NVIDIA driver and its library have different versions", state="broken")
        return Driver(reason=f"NVML could not start ({error})", state="broken")
    try:
        return _list_gpus(nvml)
    finally:
        _ask(nvml, "nvmlShutdown")


def _import_nvml() -> Any:
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


def _list_gpus(nvml: Any) -> Driver:
    version = _text(_ask(nvml, "nvmlSystemGetDriverVersion"))
    number = _ask(nvml, "nvmlSystemGetCudaDriverVersion_v2")
    cuda = (number // 1000, number % 1000 // 10) if number else cuda_of_driver(version)
    handles = [_ask(nvml, "nvmlDeviceGetHandleByIndex", i) for i in range(_ask(nvml, "nvmlDeviceGetCount") or 0)]
    gpus = tuple(_gpu(nvml, index, handle) for index, handle in enumerate(handles) if handle is not None)
    if gpus:
        return Driver(gpus, version, cuda)
    if handles:
        return Driver((), version, cuda, f"the NVIDIA driver lists {len(handles)} GPU(s), but none answers", "broken")
    return Driver((), version, cuda, "the NVIDIA driver sees no GPU", "absent")


def _gpu(nvml: Any, index: int, handle: Any) -> DriverGpu:
    capability = _ask(nvml, "nvmlDeviceGetCudaComputeCapability", handle)
    return DriverGpu(
        index=index,
        name=_text(_ask(nvml, "nvmlDeviceGetName", handle)) or "unknown GPU",
        capability=(int(capability[0]), int(capability[1])) if capability else None,
        memory_bytes=getattr(_ask(nvml, "nvmlDeviceGetMemoryInfo", handle), "total", None),
        uuid=_text(_ask(nvml, "nvmlDeviceGetUUID", handle)),
        mig=_mig_slices(nvml, handle),
    )


def _mig_slices(nvml: Any, handle: Any) -> tuple[MigSlice, ...] | None:
    mode = _ask(nvml, "nvmlDeviceGetMigMode", handle)  # (now, after the next reset)
    if not mode or not mode[0]:
        return None
    slices = []
    for position in range(_ask(nvml, "nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
        piece = _ask(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", handle, position)
        if piece is not None:
            name = _text(_ask(nvml, "nvmlDeviceGetName", piece)) or "unknown MIG instance"
            uuid = _text(_ask(nvml, "nvmlDeviceGetUUID", piece))
            memory = getattr(_ask(nvml, "nvmlDeviceGetMemoryInfo", piece), "total", None)
            slices.append(MigSlice(name, uuid, memory))
    return tuple(slices)


def _ask(nvml: Any, function: str, *arguments: Any) -> Any:
    """One NVML value, or None: a card or an old binding may lack it, and WSL gives another error than elsewhere."""
    try:
        return getattr(nvml, function)(*arguments)
    except AttributeError:
        return None
    except UnicodeDecodeError as error:  # nvidia-ml-py decodes names itself; WSL once gave bytes that are no text
        return error.object
    except nvml.NVMLError:
        return None


def _text(value: str | bytes | None) -> str | None:
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    return None if text is None else "".join(mark if mark.isprintable() else "�" for mark in text)


def _ask_nvidia_smi(reason: str) -> Driver:
    from course_utils import nvidia_smi

    report = nvidia_smi.query(_SMI_FIELDS)
    gpus = tuple(
        DriverGpu(
            index=position if gpu.index is None else gpu.index,
            name=gpu.name or "unknown GPU",
            capability=_capability(gpu.cells.get("compute_cap"), gpu.name),
            memory_bytes=gpu.total_bytes,
            uuid=gpu.uuid,
        )
        for position, gpu in enumerate(report.gpus)
    )
    version = next((gpu.driver_version for gpu in report.gpus if gpu.driver_version), None)
    if gpus:
        return Driver(gpus, version, cuda_of_driver(version))
    return Driver(reason=reason, state="unreachable")


def _capability(cell: str | None, name: str | None) -> tuple[int, int] | None:
    """From nvidia-smi's compute_cap, such as "7.5"; old drivers do not know it, then from the datasheet."""
    if found := re.fullmatch(r"(\d{1,2})\.(\d)", cell or ""):
        return int(found[1]), int(found[2])
    from course_utils.gpu_specs import spec_for

    spec = spec_for(name)
    return spec.capability if spec else None


def cuda_of_driver(version: str | None) -> tuple[int, int] | None:
    """The CUDA major version that a driver such as "535.104.05" runs, as (major, 0); None where it cannot be told."""
    found = re.match(r"\d{1,6}", version or "")
    known = [cuda for cuda, first in _FIRST_DRIVER_OF_CUDA.items() if found and int(found[0]) >= first]
    return (max(known), 0) if known else None
