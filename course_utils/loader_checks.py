"""Traps of workers that raise nothing, or hang: found by looking at the data set, without starting a worker.

`check_dataset` looks at what a worker would get: the data set, what it holds, `collate_fn` and `worker_init_fn`. It
reads attributes only (no property, no `__getitem__`, no file) and stops after a bounded number of objects.
"""

from __future__ import annotations

import functools
import random
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from course_utils.arguments import whole
from course_utils.loader_needs import start_method_of

_MOST_OBJECTS, _DEEPEST, _FIRST_ITEMS = 2_000, 6, 20
_MANY_OBJECTS = 100_000
_DRIVES = ("/content/drive", "/content/gdrive")
_SPAWNING = ("spawn", "forkserver")


@dataclass(frozen=True)
class Finding:
    """One trap: its kind, the problem, and the cure. `blocks_workers`: with workers it would fail, or never end.

    Kinds: "cannot be sent to a worker", "same random numbers", "stream multiplied", "files on Drive", "many Python
    objects", "GPU tensors".
    """

    kind: str
    problem: str
    cure: str
    blocks_workers: bool = False

    def __repr__(self) -> str:
        return f"{self.kind}: {self.problem} {self.cure}"


def check_dataset(
    dataset_or_loader: Any, num_workers: int | None = None, start_method: str | None = None
) -> tuple[Finding, ...]:
    """Traps that wait for this data set, or loader, with `num_workers` workers (None: the loader's own, else 2).

    `start_method` "fork", "spawn" or "forkserver"; None is what this loader would use here. Python 3.14 makes
    "forkserver" the default on Linux; on Windows and macOS it is "spawn". Looks only: starts no worker, reads no
    sample.
    """
    loader = dataset_or_loader if isinstance(dataset_or_loader, DataLoader) else None
    dataset = dataset_or_loader if loader is None else loader.dataset
    if num_workers is None:
        num_workers = getattr(loader, "num_workers", 0) or 2
    whole("num_workers", num_workers, 0)
    if start_method not in (None, "fork", *_SPAWNING):
        raise ValueError(f"start_method={start_method!r} is none: give 'fork', 'spawn' or 'forkserver'.")
    start_method = start_method or start_method_of(loader)
    init = getattr(loader, "worker_init_fn", None)
    extra = [("collate_fn", loader.collate_fn), ("worker_init_fn", init)] if loader is not None else []
    parts = list(_walk([("the data set", dataset), *extra]))
    findings = list(_drive(parts))
    if num_workers >= 1:
        findings += _unsendable(parts) if start_method in _SPAWNING else []
        findings += _gpu_tensors(parts)
        findings += _many_objects(parts)
        findings += _generators(parts) if init is None else []
    if num_workers >= 2 and isinstance(dataset, IterableDataset) and init is None and not _asks_for_its_worker(dataset):
        findings.append(_multiplied(dataset, num_workers))
    return tuple(findings)


def _unsendable(parts: list[tuple[str, Any]]) -> Iterator[Finding]:
    """Classes and functions that a worker which starts afresh cannot import."""
    seen = set()
    for place, value in parts:
        thing = value if isinstance(value, types.FunctionType | type) else type(value)
        name, module = getattr(thing, "__qualname__", ""), getattr(thing, "__module__", "")
        if "<lambda>" in name or "<locals>" in name:
            why = "it is a lambda" if "<lambda>" in name else "it was made inside a function"
        elif module == "__main__" and _main_is_typed():
            why = "it was typed in a notebook cell"
        else:
            continue
        if name in seen:
            continue
        seen.add(name)
        yield Finding(
            "cannot be sent to a worker",
            f"{place} needs {name.split('.')[-1]!r}; {why}, and a worker that starts afresh cannot import that.",
            "Move it into a .py file and import it, or use num_workers=0.",
            blocks_workers=True,
        )


def _main_is_typed() -> bool:
    """Whether __main__ is a notebook or a prompt. A script is run again by a worker that starts afresh."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return file is None or not Path(file).is_file()  # code that came through a pipe has the file "<stdin>"


def _generators(parts: list[tuple[str, Any]]) -> Iterator[Finding]:
    kinds = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
    for place, value in parts:
        if isinstance(value, kinds):
            yield Finding(
                "same random numbers",
                f"{place} is a random generator: each worker gets a copy, so all draw the same numbers, and workers "
                "that are new in each epoch draw them again.",
                "Give DataLoader a worker_init_fn that makes a new one, seeded by torch.initial_seed().",
            )


def _multiplied(dataset: Any, num_workers: int) -> Finding:
    return Finding(
        "stream multiplied",
        f"{type(dataset).__name__} does not seem to ask which worker it runs in: each of {num_workers} workers would "
        f"yield all of it, so an epoch has its samples {num_workers} times.",
        "In __iter__ call torch.utils.data.get_worker_info() and yield this worker's share, or use 1 worker at most.",
    )


def _asks_for_its_worker(dataset: Any) -> bool:
    """Whether any method of the data set's class mentions get_worker_info, or what it returns."""
    codes = [
        function.__code__
        for base in type(dataset).__mro__
        if base not in (IterableDataset, object)
        for member in vars(base).values()
        if isinstance(function := getattr(member, "__func__", member), types.FunctionType)
    ]
    while codes:
        code = codes.pop()
        if any("worker_info" in name for name in (*code.co_names, *code.co_freevars, *code.co_varnames)):
            return True
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return False


def _drive(parts: list[tuple[str, Any]]) -> Iterator[Finding]:
    for place, value in parts:
        if isinstance(value, str | PurePath) and _on_drive(str(value)):
            yield Finding(
                "files on Drive",
                f"{place} points to {str(value)[:80]!r}: each read goes over the network, one file at a time.",
                "Copy the files to the runtime's own disk first (one archive, unpacked under /content).",
            )
            return


def _on_drive(path: str) -> bool:
    return any(path == drive or path.startswith(drive + "/") for drive in _DRIVES)


def _many_objects(parts: list[tuple[str, Any]]) -> Iterator[Finding]:
    for place, value in parts:
        if type(value) in (list, tuple, dict, set) and len(value) >= _MANY_OBJECTS:
            yield Finding(
                "many Python objects",
                f"{place} is a {type(value).__name__} of {len(value):,} objects: reading one writes its reference "
                "count, so each worker copies the pages, bit by bit (pytorch/pytorch#13246).",
                "Keep them in NumPy arrays or tensors (strings too: np.array(paths)).",
            )


def _gpu_tensors(parts: list[tuple[str, Any]]) -> Iterator[Finding]:
    for place, value in parts:
        if isinstance(value, torch.Tensor) and value.device.type not in ("cpu", "meta"):
            yield Finding(
                "GPU tensors",
                f"{place} is a tensor on {value.device}: a forked worker cannot use CUDA.",
                "Keep it on the CPU and copy each batch in the training loop, or use num_workers=0.",
                blocks_workers=True,
            )
            return


def _walk(roots: list[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """(place, object) for what the roots hold, breadth first, without running any of their code."""
    queue = [(place, value, 0) for place, value in roots if value is not None]
    seen: set[int] = set()
    for place, value, depth in queue:
        if id(value) in seen or len(seen) >= _MOST_OBJECTS:
            continue
        seen.add(id(value))
        yield place, value
        if depth < _DEEPEST:
            queue += [(name, part, depth + 1) for name, part in _parts_of(place, value)]


def _parts_of(place: str, value: Any) -> list[tuple[str, Any]]:
    # Only exact built-in containers: a subclass may run code of its own when it is read.
    if type(value) in (list, tuple):
        return [(f"{place}[{index}]", part) for index, part in enumerate(value[:_FIRST_ITEMS])]
    if type(value) is dict:
        return [(f"{place}[{str(key)[:40]!r}]", value[key]) for key, _ in zip(value, range(_FIRST_ITEMS), strict=False)]
    if isinstance(value, type | types.ModuleType | torch.Tensor | np.ndarray | np.random.Generator):
        return []
    if isinstance(value, types.MethodType):
        return [(place, value.__self__), (place, value.__func__)]
    if isinstance(value, functools.partial):
        return [(place, part) for part in (value.func, *value.args, *value.keywords.values())]
    if isinstance(value, types.FunctionType):
        cells: list[Callable[..., Any] | Any] = [
            cell.cell_contents for cell in value.__closure__ or () if _filled(cell)
        ]
        return [(f"{place} uses", part) for part in cells]
    attributes = getattr(value, "__dict__", None)
    if type(attributes) is not dict:
        return []
    prefix = "" if place == "the data set" else f"{place}"
    return [(f"{prefix}.{name}", part) for name, part in attributes.items() if part is not None]


def _filled(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True
