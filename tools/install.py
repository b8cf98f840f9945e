"""Builds the images of tools/images.py. Standard library only: this runs before anything is installed.

`prepare`, in order:

1. ask `images.plan` what each image needs, and say it;
2. say how large it will be, and check the disk (only when something is to be installed);
3. create the environment, let pip install (its output goes to .build/), and write the record last.
"""

from __future__ import annotations

import importlib.util
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tools.images import ROOT, UNFINISHED, Image, Plan, extra, finished_record, plan, read_record, write_record

# PyTorch's own index of builds without CUDA: https://pytorch.org/get-started/locally/ (Linux, pip, CPU).
CPU_INDEX = "https://download.pytorch.org/whl/cpu"

# What an image takes once installed: 5.7 and 6.8 GB were measured with CUDA (Linux, torch 2.11 and 2.14).
SIZE_BYTES = {"cuda": 6_500_000_000, "cpu": 2_000_000_000}
UPDATE_BYTES = 500_000_000

# What pip's output says about a failure, and the sentence for it; the first match counts.
_CAUSES = (
    (
        r"No space left on device|Disk quota exceeded|Errno 28\b",
        "The disk is full. Free some space (pip also needs room in the temporary folder, TMPDIR), then run this again.",
    ),
    (
        r"Temporary failure in name resolution|NewConnectionError|getaddrinfo failed|nodename nor servname"
        r"|Network is unreachable|Connection refused|ConnectTimeoutError|ReadTimeoutError|ProxyError"
        r"|Max retries exceeded",
        "The package index could not be reached. Check the network or the proxy, then run this again.",
    ),
    (
        r"No matching distribution found for (?P<what>[^\s(]+)",
        "There is no {what} for this Python where pip looks. Either this machine is offline, or its Python is too new: "
        "PYTHON=python3.13 picks another one.",
    ),
)


class SetupError(Exception):
    """Why an image cannot be prepared: a sentence to show as it is."""


def prepare(images: Sequence[Image], extras: Sequence[str] | None, torch: str, root: Path = ROOT) -> None:
    """Bring `images` to what the project's files ask for; several are built at the same time.

    `extras` are those of pyproject.toml to have (None: all that an image needs for its tests). `torch` is "cuda"
    (PyPI's own build), "cpu", or "" for what is there already. Raises SetupError.
    """
    if torch not in ("", "cpu", "cuda"):
        raise SetupError(f"TORCH={torch} is not a choice. It is cpu (smaller, for machines without a GPU) or cuda.")
    jobs = [(image, plan(image, image.extras if extras is None else extras, torch, root)) for image in images]
    for image, its_plan in jobs:
        say(image, f"{image.folder} ({image.holds}): {its_plan.reason}.")
    jobs = [(image, its_plan) for image, its_plan in jobs if its_plan.action != "none"]
    if not jobs:
        return
    _check_python()
    _check_disk(jobs, root)
    with ThreadPoolExecutor(len(jobs)) as pool:
        problems = [future.exception() for future in [pool.submit(_install, *job, root) for job in jobs]]
    for problem in problems:
        if problem is not None and not isinstance(problem, SetupError):
            raise problem
    if any(problems):
        raise SetupError("\n".join(str(problem) for problem in problems if problem is not None))


def say(image: Image, text: str) -> None:
    """One line about one image."""
    print(f"[{image.name}] {text}", flush=True)


def _check_python() -> None:
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        raise SetupError(
            "This Python cannot create environments: its venv or ensurepip module is missing. "
            "On Debian and Ubuntu, install it with: sudo apt install python3-venv"
        )


def _check_disk(jobs: Sequence[tuple[Image, Plan]], root: Path) -> None:
    builds = [(image, its_plan) for image, its_plan in jobs if its_plan.action == "build"]
    needed = sum(_size(its_plan.torch) for _, its_plan in builds) + UPDATE_BYTES * (len(jobs) - len(builds))
    free = shutil.disk_usage(root).free
    smaller = any(_size(its_plan.torch) > SIZE_BYTES["cpu"] for _, its_plan in builds)
    cure = " PyTorch's CPU wheels need a third of it: add TORCH=cpu (or --torch cpu)." if smaller else ""
    if builds:
        print(f"This takes about {_gb(needed)} of disk, once; {_gb(free)} are free.{cure}", flush=True)
    if free < needed and free + sum(_folder_bytes(root / image.folder) for image, _ in builds) < needed:
        raise SetupError(
            f"Not enough disk space: about {_gb(needed)} are needed in {root}, {_gb(free)} are free. "
            f"Free some, then run this again.{cure}"
        )


def _install(image: Image, its_plan: Plan, root: Path) -> None:
    folder = root / image.folder
    log = root / ".build" / f"install-{image.name}.log"
    log.parent.mkdir(exist_ok=True)
    log.write_text("", encoding="utf-8")
    before = read_record(folder)
    if its_plan.action == "build":
        say(image, f"Creating {image.folder} with Python {platform.python_version()}.")
        _empty(folder)
        write_record(folder, UNFINISHED)
        # The interpreter underneath: the running one may live in the environment that is built anew.
        creator = getattr(sys, "_base_executable", sys.executable)
        _run([creator, "-m", "venv", str(folder)], log, root, f"{image.folder} could not be created.")
    else:
        write_record(folder, UNFINISHED)
    for what, command in _pip_commands(image, its_plan, root):
        say(image, f"Installing {what} (pip's output: {log.relative_to(root)}).")
        try:
            _run(command, log, root, f"pip could not install into {image.folder}.")
        except SetupError:
            # When pip itself gives up it takes back what it did: what was usable before still is.
            if its_plan.action == "update":
                write_record(folder, before)
            raise
    write_record(folder, finished_record(its_plan))
    say(image, f"{image.folder} is ready.")


def _pip_commands(image: Image, its_plan: Plan, root: Path) -> list[tuple[str, list[str]]]:
    pip = [str(image.python(root)), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    # Compiling all of PyTorch's sources takes longer than compiling, at first import, those that are used.
    pip += ["--progress-bar", "off", "--no-compile"]
    limits = ["--constraint", image.constraints] if image.constraints else []
    wanted = [requirement for name in its_plan.extras for requirement in extra(name, root)]
    everything = [*pip, *limits, "--requirement", "requirements.txt", *wanted]
    commands = [(" + ".join(["requirements.txt", *its_plan.extras]), everything)]
    if its_plan.torch == "cpu":
        # First, and from PyTorch's index alone: as an extra index it would be passed over without a word whenever
        # it cannot be reached, and CUDA's build would come from PyPI.
        limits = limits or ["--constraint", "requirements.txt"]
        alone = [*pip, "--no-deps", "--index-url", CPU_INDEX, *limits, "torch", "torchvision"]
        commands.insert(0, ("PyTorch's CPU wheels", alone))
    return commands


def _run(command: list[str], log: Path, root: Path, problem: str) -> None:
    with log.open("a", encoding="utf-8") as output:
        done = subprocess.run(
            command, cwd=root, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, check=False
        )
    if done.returncode != 0:
        text = log.read_text(encoding="utf-8", errors="replace")
        closing = "\n".join("    " + line for line in text.splitlines()[-8:])
        raise SetupError(f"{problem} {_cause(text)}\n  The last lines of {log.relative_to(root)}:\n{closing}")


def _cause(text: str) -> str:
    for pattern, sentence in _CAUSES:
        if found := re.search(pattern, text):
            return sentence.format(**found.groupdict())
    return "Its log says why."


def _empty(folder: Path) -> None:
    try:
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir()
    except OSError as error:
        raise SetupError(
            f"{folder} could not be emptied ({error}). Close what uses it, then run this again."
        ) from error


def _size(torch: str) -> int:
    # PyPI's torch brings CUDA on Linux alone.
    return SIZE_BYTES["cuda" if torch == "cuda" and sys.platform == "linux" else "cpu"]


def _folder_bytes(folder: Path) -> int:
    # A folder that is built anew is emptied first, and what it held is free then.
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"
