"""Which GPU of nvidia-smi and NVML is torch's cuda:0? They count differently.

nvidia-smi and NVML list every GPU in PCI order. CUDA, and so torch, lists only those that `CUDA_VISIBLE_DEVICES` names,
in its order; without it, the fastest first unless `CUDA_DEVICE_ORDER=PCI_BUS_ID`.
Source: docs.nvidia.com/cuda/cuda-programming-guide/05-appendices/environment-variables.html. Where that page is silent
(repeated entries, trailing letters), the rules are those of `torch.cuda._parse_visible_devices`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

_INTEGER = re.compile(r"\+?([0-9]{1,9})(?![0-9])")
_PARENT_OF_MIG = re.compile(r"MIG-(GPU-[0-9A-Fa-f-]+)/")


class HasIdentity(Protocol):
    """What the mapping needs to know of a GPU: `SmiGpu`, the monitor's `GpuInfo` and `GpuIdentity` all have it."""

    @property
    def index(self) -> int | None:
        """The GPU's number in nvidia-smi and NVML."""
        ...

    @property
    def uuid(self) -> str | None:
        """Such as "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"."""
        ...

    @property
    def name(self) -> str | None:
        """Such as "Tesla T4"."""
        ...


@dataclass(frozen=True)
class GpuIdentity:
    """One GPU as NVML knows it. `mig_uuids` are those of its MIG instances, where it is partitioned."""

    index: int | None
    uuid: str | None = None
    name: str | None = None
    mig_uuids: tuple[str, ...] = ()


@dataclass(frozen=True)
class VisibleDevices:
    """`indices[i]` is the NVML index of torch's `cuda:i`, or None where it cannot be told; one entry a visible device.

    `setting` is the value of CUDA_VISIBLE_DEVICES, None where it is not set. `warning` is a sentence, or None.
    """

    indices: tuple[int | None, ...]
    setting: str | None = None
    warning: str | None = None

    @property
    def hidden(self) -> bool:
        """Whether CUDA_VISIBLE_DEVICES leaves torch no GPU at all."""
        return self.setting is not None and not self.indices


def visible_nvml_indices(environment: Mapping[str, str], gpus: Sequence[HasIdentity]) -> VisibleDevices:
    """Map torch's GPU numbers to NVML's, from `environment` (such as `os.environ`) and all GPUs that NVML lists.

    Integers, whole UUIDs and unambiguous beginnings of UUIDs are understood, and MIG instances in both notations.
    As in CUDA, the first invalid entry ends the list ("0,-1,1" leaves only GPU 0), a repeated entry empties it, and of
    several MIG instances only the first counts. Never raises.
    """
    setting = environment.get("CUDA_VISIBLE_DEVICES")
    known = [gpu for gpu in gpus if gpu.index is not None]
    if setting is None:
        return VisibleDevices(tuple(gpu.index for gpu in known), None, _order_warning(environment, known))
    if setting.startswith("MIG-"):
        parent = _parent_of_mig(setting.split(",")[0], known)
        return VisibleDevices((parent,), setting, _mig_warning(parent))
    if setting.startswith("GPU-"):
        return VisibleDevices(_first_valid([_index_of_uuid(entry, known) for entry in setting.split(",")]), setting)
    indices = {gpu.index for gpu in known}
    numbers = [_leading_integer(entry) for entry in setting.split(",")]
    visible = _first_valid([number if number in indices else None for number in numbers])
    return VisibleDevices(visible, setting, _order_warning(environment, known) if visible else None)


def _first_valid(entries: Sequence[int | None]) -> tuple[int, ...]:
    valid: list[int] = []
    for entry in entries:
        if entry is None:
            break
        if entry in valid:
            return ()
        valid.append(entry)
    return tuple(valid)


def _leading_integer(entry: str) -> int | None:
    found = _INTEGER.match(entry.strip())
    return int(found[1]) if found else None


def _index_of_uuid(beginning: str, gpus: Sequence[HasIdentity]) -> int | None:
    if not beginning.startswith("GPU-"):
        return None
    matches = [gpu.index for gpu in gpus if (gpu.uuid or "").startswith(beginning)]
    return matches[0] if len(matches) == 1 else None


def _parent_of_mig(entry: str, gpus: Sequence[HasIdentity]) -> int | None:
    if old_notation := _PARENT_OF_MIG.match(entry):
        return _index_of_uuid(old_notation[1], gpus)
    owners = [gpu.index for gpu in gpus if any(uuid.startswith(entry) for uuid in getattr(gpu, "mig_uuids", ()))]
    if len(owners) == 1:
        return owners[0]
    return gpus[0].index if len(gpus) == 1 else None


def _mig_warning(parent: int | None) -> str:
    where = "a GPU that cannot be told from here" if parent is None else f"GPU {parent}"
    return f"torch sees one MIG instance, a slice of {where}; figures for the whole GPU include the other slices."


def _order_warning(environment: Mapping[str, str], gpus: Sequence[HasIdentity]) -> str | None:
    models = {gpu.name for gpu in gpus}
    if len(models) < 2 or environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        return None
    return (
        "This machine has different GPU models, and CUDA may number them in another order than nvidia-smi: "
        "set CUDA_DEVICE_ORDER=PCI_BUS_ID before Python starts, so that both count alike."
    )
