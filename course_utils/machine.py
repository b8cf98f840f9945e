"""What this machine has, read without starting CUDA: place, Python, PyTorch, driver and GPUs, CPUs, memory.

Only facts are read here; `course_utils.runtime` says what they mean. Nothing here raises because something is missing.
"""

from __future__ import annotations

import math
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from course_utils.driver import Driver, read_driver

_CUDA_VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
_UNLIMITED_BYTES = 2**60  # cgroup v1 writes "no limit" as a number close to 2**63


class TorchBuild(NamedTuple):
    """How the installed PyTorch was built. `version` None: not installed. `cuda` and `hip` None: a CPU build.

    `architectures` are the GPU codes inside, such as "sm_75" (machine code) or "compute_90" (PTX).
    """

    version: str | None = None
    cuda: str | None = None
    hip: str | None = None
    architectures: tuple[str, ...] = ()


class Machine(NamedTuple):
    """Everything that `describe_runtime` judges; a test builds its own. `environment` holds CUDA's two variables."""

    place: str
    torch: TorchBuild
    driver: Driver
    cpus: int
    ram_bytes: int | None
    shm_bytes: int | None
    python_version: str = ""
    environment: Mapping[str, str] = MappingProxyType({})
    wsl: bool = False


def read_machine() -> Machine:
    """Read this machine. Starts no CUDA and raises nothing because something is missing."""
    return Machine(
        place=find_place(os.environ, sys.modules, _command_of_parent),
        torch=read_torch(),
        driver=read_driver(),
        cpus=usable_cpus(),
        ram_bytes=ram_bytes(),
        shm_bytes=shm_bytes(),
        environment={name: os.environ[name] for name in _CUDA_VARIABLES if name in os.environ},
        python_version=platform.python_version(),
        wsl="microsoft" in platform.release().lower(),
    )


def find_place(environment: Mapping[str, str], modules: Mapping[str, Any], parent: Callable[[], str]) -> str:
    """One of "Colab", "Kaggle", "JupyterLab", "VS Code", "Jupyter", "terminal". `parent` gives the server's command.

    Kaggle comes first, because its image is made from Colab's. JupyterLab comes before VS Code, because a server
    started in VS Code's terminal passes VS Code's variables on.
    """
    if "KAGGLE_KERNEL_RUN_TYPE" in environment:
        return "Kaggle"
    if "COLAB_RELEASE_TAG" in environment or "google.colab" in modules:
        return "Colab"
    shell = getattr(modules.get("IPython"), "get_ipython", lambda: None)()
    if not hasattr(shell, "kernel"):
        return "terminal"
    if "__vsc_ipynb_file__" in getattr(shell, "user_ns", {}):
        return "VS Code"
    command = parent()
    if re.search(r"jupyter-?lab|jupyterhub-singleuser", command):
        return "JupyterLab"
    if "JPY_SESSION_NAME" not in environment and any(name.startswith("VSCODE_") for name in environment):
        return "VS Code"
    return "Jupyter"


def _command_of_parent() -> str:
    psutil = _import_psutil()
    if psutil is None:
        return ""
    try:
        return " ".join(psutil.Process(int(os.environ.get("JPY_PARENT_PID", os.getppid()))).cmdline())
    except (psutil.Error, OSError, ValueError):
        return ""


def _import_psutil() -> Any:
    try:
        import psutil
    except ImportError:
        return None
    return psutil


def read_torch() -> TorchBuild:
    """The installed PyTorch's build. `torch.cuda.get_arch_list()` is not used: up to torch 2.11 it starts CUDA."""
    try:
        import torch
    except (ImportError, OSError):
        return TorchBuild()
    flags = getattr(torch._C, "_cuda_getArchFlags", lambda: None)() if torch.version.cuda else None
    return TorchBuild(str(torch.__version__), torch.version.cuda, torch.version.hip, tuple((flags or "").split()))


def usable_cpus(root: Path = Path("/")) -> int:
    """How many CPUs this process may keep busy: the smaller of its affinity and its cgroup quota, rounded up."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for folder in _cgroup_folders(root, "cpu") if (quota := _cpu_quota(folder)) is not None]
    return max(1, min([allowed, *(math.ceil(quota) for quota in quotas)]))


def ram_bytes(root: Path = Path("/")) -> int | None:
    """Memory that this process may use: the machine's, or its cgroup's limit where that is smaller."""
    psutil = _import_psutil()
    limits = [
        limit
        for folder in _cgroup_folders(root, "memory")
        for file in ("memory.max", "memory.limit_in_bytes")
        if (limit := _number(folder / file)) is not None and limit < _UNLIMITED_BYTES
    ]
    return min([*limits, *([psutil.virtual_memory().total] if psutil else [])], default=None)


def shm_bytes(folder: Path = Path("/dev/shm")) -> int | None:  # noqa: S108 -- its size is read, nothing is written
    """Size of the shared memory through which DataLoader workers hand over batches; None where there is none."""
    try:
        return shutil.disk_usage(folder).total
    except OSError:
        return None


def _cgroup_folders(root: Path, controller: str) -> list[Path]:
    """This process's cgroup and all its ancestors, in versions 2 and 1: any of them may set the limit."""
    base = root / "sys/fs/cgroup"
    folders = []
    for line in _lines(root / "proc/self/cgroup") or ["0::/", f"1:{controller}:/"]:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        top = base / controller if controllers else base
        inside = top if ".." in path else top / path.strip("/")  # ".." leads out of this container
        folders += [folder for folder in (inside, *inside.parents) if folder == top or top in folder.parents]
    return folders


def _cpu_quota(folder: Path) -> float | None:
    quota, period = [*(_lines(folder / "cpu.max") or [""])[0].split(), "", ""][:2]
    if not quota:
        quota, period = (str(_number(folder / f"cpu.cfs_{part}_us") or "") for part in ("quota", "period"))
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() and int(period) > 0 else None


def _number(file: Path) -> int | None:
    text = (_lines(file) or [""])[0].strip()
    return int(text) if text.isdecimal() else None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
