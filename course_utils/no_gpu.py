"""Why there is no usable GPU, and what to click or type."""

from __future__ import annotations

import re
from textwrap import shorten

from course_utils.driver import NVML_IS_MISSING
from course_utils.machine import Machine
from course_utils.torch_gpus import Gpu
from course_utils.views import number
from course_utils.visible_devices import VisibleDevices

_AFRESH = {
    "Colab": "Runtime → Disconnect and delete runtime, then run the notebook from the top.",
    "Kaggle": "Stop the session, start it again, then run the notebook from the top.",
}
_CLICKS = {
    "Colab": "Runtime → Change runtime type → T4 GPU → Save, then run the notebook from the top.",
    "Kaggle": "Settings → Accelerator → GPU T4 x2 (also in the side panel's Session options), "
    "then run the notebook from the top.",
}
_GO_ON = "The lessons also run on the CPU, with smaller sizes; for a free T4, open this notebook in Colab."
# PyTorch's RELEASE.md, "PyTorch CUDA Support Matrix"; pytorch/pytorch#190385 plans to end these wheels with 2.15.
_OLD_WHEELS = "Install PyTorch's CUDA 12.6 wheels (up to PyTorch 2.14), which still contain sm_50, sm_60 and sm_70."
_LITTLE_SHM_BYTES = 2**30


def why_no_gpu(machine: Machine, visible: VisibleDevices, gpus: tuple[Gpu, ...]) -> tuple[str, str] | None:
    """The first thing in the way, and the cure; None if a GPU is usable."""
    build, driver, place = machine.torch, machine.driver, machine.place
    if build.version is None:
        return "PyTorch is not installed", _AFRESH.get(place) or "Run: pip install -r requirements.txt"
    if build.hip:
        return f"this PyTorch is built for AMD GPUs (ROCm {build.hip}), which this course cannot read", _GO_ON
    if not driver.gpus:
        return _no_gpu_listed(machine)
    if visible.hidden:
        hidden = f"CUDA_VISIBLE_DEVICES={shorten(repr(visible.setting), 60)} hides {len(driver.gpus)} GPU(s)"
        return hidden, "Remove CUDA_VISIBLE_DEVICES from the environment and restart the kernel."
    if not gpus:
        return "MIG is on, but no MIG instance exists", "Ask the machine's administrator for a MIG instance."
    if build.cuda is None:
        cure = _AFRESH.get(place) or "Install a CUDA build of PyTorch, as pytorch.org/get-started/locally says."
        return f"PyTorch {build.version} is a CPU build, although there is a {gpus[0].name}", cure
    needed = int(build.cuda.split(".")[0])
    if driver.cuda is not None and driver.cuda[0] < needed:
        why = f"the driver ({driver.version or 'version unknown'}) runs CUDA up to {driver.cuda[0]}.{driver.cuda[1]}, "
        cure = f"Update the NVIDIA driver, or install PyTorch built for CUDA {driver.cuda[0]}."
        return why + f"but this PyTorch needs CUDA {needed}", _AFRESH.get(place) or cure
    if all(gpu.has_kernels is False for gpu in gpus):
        return _no_kernels(gpus[0], machine)
    return None


def _no_gpu_listed(machine: Machine) -> tuple[str, str]:
    driver, place = machine.driver, machine.place
    reason = driver.reason or "there is no NVIDIA GPU"
    if driver.state == "broken":
        restart = _AFRESH.get(place, "Restart the machine, so that the driver is loaded anew.")
        return reason, restart
    if place in _CLICKS:
        return f"this is a {place} runtime without a GPU", _CLICKS[place]
    if reason == NVML_IS_MISSING:
        return reason, "In a container, set NVIDIA_DRIVER_CAPABILITIES=compute,utility. Training may work even so."
    if machine.torch.cuda is None:
        reason += f", and PyTorch {machine.torch.version} is a CPU build"
    windows = "Install NVIDIA's driver in Windows, not inside WSL. " if machine.wsl else ""
    return reason, windows + _GO_ON


def _no_kernels(gpu: Gpu, machine: Machine) -> tuple[str, str]:
    codes = " ".join(machine.torch.architectures)
    built = [int(number) for number in re.findall(r"_(\d+)", codes)]
    capability = int(gpu.architecture.removeprefix("sm_"))
    age = "too old" if capability < min(built) else "too new" if capability > max(built) else "not made"
    reason = f"the {gpu.name} ({gpu.architecture}) is {age} for this PyTorch ({codes})"
    if machine.place in _CLICKS:
        return reason, "Choose another GPU: " + _CLICKS[machine.place]
    if age == "too old":
        return reason, _OLD_WHEELS
    return reason, "Install another PyTorch build, as pytorch.org/get-started/locally says."


def notes_on(machine: Machine, visible: VisibleDevices, gpus: tuple[Gpu, ...], reason: str | None) -> tuple[str, ...]:
    """What else is worth knowing: an uncertain order, GPUs that this PyTorch cannot use, MIG, little shared memory."""
    notes = [visible.warning] if visible.warning else []
    unusable = [f"cuda:{gpu.index} ({gpu.name})" for gpu in gpus if gpu.has_kernels is False]
    if unusable and not reason:
        notes.append(f"This PyTorch has no kernels for {', '.join(unusable)}.")
    slices = [device for device in machine.driver.gpus if device.mig]
    if slices and gpus and not visible.warning:
        notes.append(f"{slices[0].name} is cut into MIG instances; one process sees only one of them.")
    if machine.shm_bytes is not None and machine.shm_bytes < _LITTLE_SHM_BYTES:
        size = number(machine.shm_bytes / 2**20, "MiB")
        notes.append(f"Only {size} in /dev/shm: DataLoader workers pass batches through it (docker run --shm-size=2g).")
    return tuple(notes)
