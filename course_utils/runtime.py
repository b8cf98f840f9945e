"""Where am I, which GPU do I have, what can it do, and if there is none, why and what to click?

`describe_runtime()` answers from facts that `course_utils.machine` reads without starting CUDA, so that a later
fork (a notebook's DDP launcher) still works. The price: a GPU that is listed but broken shows only when it is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from course_utils.machine import Machine, read_machine, usable_cpus
from course_utils.no_gpu import notes_on, why_no_gpu
from course_utils.torch_gpus import Capability, Gpu, gpus_of_torch, order_is_known
from course_utils.views import gibibytes, html_table, number, text_table
from course_utils.visible_devices import visible_nvml_indices

if TYPE_CHECKING:
    import torch

__all__ = ["Gpu", "Runtime", "amp_dtype", "describe_runtime", "pick_device", "usable_cpus"]


@dataclass(frozen=True)
class Runtime:
    """What `describe_runtime` found. `gpus` are those that torch will see, in torch's order.

    `reason` says why no GPU is usable and `advice` what to do about it; both are None where one is. `notes` are
    further sentences worth reading. `cpus` are those that this process may use, `ram_bytes` heeds a container's limit.
    """

    place: str
    python_version: str
    torch_version: str | None
    torch_cuda: str | None
    torch_architectures: tuple[str, ...]
    gpus: tuple[Gpu, ...]
    cpus: int
    ram_bytes: int | None
    shm_bytes: int | None
    reason: str | None = None
    advice: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def gpu(self) -> Gpu | None:
        """The first GPU that this PyTorch can use, or None."""
        return None if self.reason else next(gpu for gpu in self.gpus if gpu.has_kernels is not False)

    @property
    def headline(self) -> str:
        """One line to print first: place, GPU or why there is none, PyTorch, CPUs, memory."""
        rest = f"PyTorch {self.torch_version or 'missing'}, {self.cpus} CPU(s), {gibibytes(self.ram_bytes)} RAM."
        if self.gpu is None:
            return f"{self.place}: no usable GPU, because {self.reason}. {rest}"
        alike = [gpu for gpu in self.gpus if gpu.name == self.gpu.name and gpu.has_kernels is not False]
        count = f"{len(alike)} × " if len(alike) > 1 else ""
        others = f" and {len(self.gpus) - len(alike)} other GPU(s)" if len(self.gpus) > len(alike) else ""
        size = f"{self.gpu.architecture}, {gibibytes(self.gpu.memory_bytes)}"
        return f"{self.place}: {count}{self.gpu.name} ({size}){others}. {rest}"

    def __repr__(self) -> str:
        return "\n".join([self.headline, text_table(("Runtime", self.place), self._rows())])

    def _repr_html_(self) -> str:
        return html_table(("Runtime", self.place), self._rows(), caption=self.headline)

    def _rows(self) -> list[tuple[str, str]]:
        built = f"CUDA {self.torch_cuda}" if self.torch_cuda else "no CUDA"
        return [
            ("Python", self.python_version),
            ("PyTorch", f"{self.torch_version or 'missing'} ({built})"),
            *((f"cuda:{gpu.index}", repr(gpu)) for gpu in self.gpus),
            ("CPUs", number(self.cpus)),
            ("RAM", gibibytes(self.ram_bytes)),
            ("shared memory", gibibytes(self.shm_bytes)),
            *((label, text) for label, text in (("no GPU because", self.reason), ("do", self.advice)) if text),
            *(("note", note) for note in self.notes),
        ]


def describe_runtime(machine: Machine | None = None) -> Runtime:
    """Describe this runtime, or `machine` in a test. Never starts CUDA, never raises because something is missing."""
    machine = read_machine() if machine is None else machine
    visible = visible_nvml_indices(machine.environment, machine.driver.gpus)
    gpus = gpus_of_torch(machine, visible)
    reason, advice = why_no_gpu(machine, visible, gpus) or (None, None)
    return Runtime(
        place=machine.place,
        python_version=machine.python_version,
        torch_version=machine.torch.version,
        torch_cuda=machine.torch.cuda,
        torch_architectures=machine.torch.architectures,
        gpus=gpus,
        cpus=machine.cpus,
        ram_bytes=machine.ram_bytes,
        shm_bytes=machine.shm_bytes,
        reason=reason,
        advice=advice,
        notes=notes_on(machine, visible, gpus, reason),
    )


def pick_device() -> torch.device:
    """The first GPU that torch can use, such as cuda:0, else the CPU. Does not start CUDA.

    With one exception: where NVML and nvidia-smi are both missing and PyTorch is a CUDA build (some containers,
    Jetson), CUDA itself is asked by `torch.cuda.is_available()`, because nobody else can answer. Where GPU models
    differ and CUDA's order cannot be told, it is cuda:0, which CUDA makes the fastest.
    """
    import torch

    machine = read_machine()
    gpu = describe_runtime(machine).gpu
    if gpu is not None:
        return torch.device("cuda", gpu.index if order_is_known(machine) else 0)
    ask_cuda = machine.driver.state == "unreachable" and machine.torch.cuda is not None
    return torch.device("cuda:0" if ask_cuda and torch.cuda.is_available() else "cpu")


def amp_dtype(capability: Capability | Literal["this device"] | None = "this device") -> torch.dtype:
    """The dtype for `torch.autocast`: bfloat16 where it is native (compute capability 8.0, and CPUs), else float16.

    `capability` is (major, minor), such as (7, 5) for a T4, or None for the CPU. float16 training needs a GradScaler.
    Below 7.0 there are no tensor cores: float16 still halves activations, with "a modest speedup" at best
    (docs.pytorch.org/tutorials/recipes/recipes/amp_recipe.html). TypeError if `capability` is no pair of ints.
    """
    import torch

    if capability == "this device":
        gpu = describe_runtime().gpu
        capability = None if gpu is None else gpu.capability or (0, 0)
    if capability is None:
        return torch.bfloat16
    if not (isinstance(capability, tuple) and [type(part) for part in capability] == [int, int]):
        raise TypeError(f"capability is a pair (major, minor) such as (7, 5) for a T4, or None, not {capability!r}.")
    return torch.bfloat16 if capability >= (8, 0) else torch.float16
