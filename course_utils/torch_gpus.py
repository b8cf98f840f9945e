"""The GPUs that torch will see, and what each can do with the installed PyTorch: worked out, not asked of CUDA."""

from __future__ import annotations

import re
from dataclasses import dataclass

from course_utils.driver import DriverGpu, MigSlice
from course_utils.machine import Machine
from course_utils.views import MISSING, gibibytes
from course_utils.visible_devices import VisibleDevices

Capability = tuple[int, int]

# Turing chips of compute capability 7.5 that have no tensor cores (TU116, TU117; ggml-org/llama.cpp PR 4682).
_NO_TENSOR_CORES = r"\bGTX 16|\bMX ?[45]50\b|\bT(400|500|550|600|1000|1200)\b|\bQuadro T(1000|2000)\b"

_UNKNOWN_MIG = DriverGpu(-1, "MIG instance of an unknown GPU", None, None)


@dataclass(frozen=True)
class Gpu:
    """One GPU that torch will see. `index` is torch's (`cuda:index`), `nvml_index` that of nvidia-smi and NVML.

    `has_kernels` says whether the installed PyTorch contains code for it. None is what could not be told.
    """

    index: int
    name: str
    capability: Capability | None = None
    memory_bytes: int | None = None
    driver_version: str | None = None
    has_kernels: bool | None = None
    nvml_index: int | None = None
    uuid: str | None = None

    @property
    def bf16_native(self) -> bool | None:
        """Whether bfloat16 needs no emulation: compute capability 8.0 or newer (torch's `is_bf16_supported`)."""
        return None if self.capability is None else self.capability >= (8, 0)

    @property
    def tf32(self) -> bool | None:
        """Whether TF32 exists: compute capability 8.0 or newer (PyTorch's CUDA notes: "on Ampere and newer")."""
        return self.bf16_native

    @property
    def fp16_tensor_cores(self) -> bool | None:
        """Whether tensor cores multiply float16: compute capability 7.0 or newer, but not the GTX 16 family."""
        if self.capability is None:
            return None
        without = self.capability == (7, 5) and re.search(_NO_TENSOR_CORES, self.name) is not None
        return self.capability >= (7, 0) and not without

    @property
    def architecture(self) -> str:
        """Such as "sm_75", or "sm unknown"."""
        return f"sm_{self.capability[0]}{self.capability[1]}" if self.capability else "sm unknown"

    @property
    def dtypes(self) -> str:
        """What the number formats do here, in one line."""
        if self.capability is None:
            return "number formats unknown"
        fp16 = "float16 on tensor cores" if self.fp16_tensor_cores else "float16 without tensor cores"
        return f"{fp16}, bfloat16 and TF32" if self.bf16_native else f"{fp16}, bfloat16 only emulated, no TF32"

    def __repr__(self) -> str:
        kernels = {
            True: "this PyTorch runs on it",
            False: "this PyTorch has no kernels for it",
            None: "kernels unknown",
        }
        facts = [self.architecture, gibibytes(self.memory_bytes), f"driver {self.driver_version or MISSING}"]
        return f"{self.name} ({', '.join(facts)}); {kernels[self.has_kernels]}; {self.dtypes}"


def has_kernels(capability: Capability | None, architectures: tuple[str, ...]) -> bool | None:
    """Whether code built for `architectures` runs on a GPU of this capability; None where it cannot be told.

    "sm_XY" machine code runs on the same major version from minor Y on, "compute_XY" PTX on everything newer;
    with suffix "a" only on XY itself, with "f" on the same major from Y on. Source: docs.nvidia.com/cuda/cuda-c-
    programming-guide, "Binary Compatibility", "PTX Compatibility" and "Family-Specific Features".
    """
    codes = [code for text in architectures if (code := re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", text))]
    if capability is None or not codes:
        return None
    return any(_runs(code, capability) for code in codes)


def _runs(code: re.Match[str], capability: Capability) -> bool:
    built = (int(code[2]), int(code[3]))
    if code[4] == "a":
        return capability == built
    if code[1] == "compute" and not code[4]:
        return capability >= built
    return capability[0] == built[0] and capability >= built


def gpus_of_torch(machine: Machine, visible: VisibleDevices) -> tuple[Gpu, ...]:
    """The GPUs that torch will list, in its order, from what the driver lists and CUDA_VISIBLE_DEVICES leaves.

    Of MIG instances, one process sees a single one (docs.nvidia.com/datacenter/tesla/mig-user-guide, "CUDA Device
    Enumeration"): the one that CUDA_VISIBLE_DEVICES names, else the first.
    """
    by_index = {gpu.index: gpu for gpu in machine.driver.gpus}
    gpus: list[Gpu] = []
    mig_seen = False
    for nvml_index in visible.indices:
        device = _UNKNOWN_MIG if nvml_index is None else by_index[nvml_index]
        if device.mig is not None:
            if mig_seen or not device.mig:
                continue
            mig_seen = True
        piece = _slice(device, visible.setting) or device
        gpus.append(
            Gpu(
                index=len(gpus),
                name=piece.name,
                capability=device.capability,
                memory_bytes=piece.memory_bytes,
                driver_version=machine.driver.version,
                has_kernels=has_kernels(device.capability, machine.torch.architectures),
                nvml_index=nvml_index,
                uuid=piece.uuid,
            )
        )
    return tuple(gpus)


def order_is_known(machine: Machine) -> bool:
    """Whether NVML's order is CUDA's: not where GPU models differ and CUDA may put the fastest first."""
    environment = machine.environment
    by_uuid = environment.get("CUDA_VISIBLE_DEVICES", "").startswith(("GPU-", "MIG-"))
    alike = len({gpu.name for gpu in machine.driver.gpus}) < 2
    return alike or by_uuid or environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"


def _slice(device: DriverGpu, setting: str | None) -> MigSlice | None:
    wanted = (setting or "").split(",")[0]
    named = [piece for piece in device.mig or () if wanted.startswith("MIG-") and (piece.uuid or "").startswith(wanted)]
    return next(iter(named or device.mig or ()), None)
