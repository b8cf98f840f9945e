"""The largest tensors that are alive, and the name that leads to each: `largest_tensors()`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from course_utils.arguments import whole
from course_utils.holder_paths import KINDS, describe, dtype_text, holder, shape_text, size_text
from course_utils.holder_roots import Root, notebook
from course_utils.holder_search import BUDGET_S, Search, leaving_nothing
from course_utils.live_tensors import WeakMemory, live_tensors, memory_key
from course_utils.views import html_table, text_table

_HEADERS = ["memory", "shape", "dtype", "device", "requires grad", "held by"]


@dataclass(frozen=True)
class LiveTensor:
    """One piece of a device's memory that tensors use: its size, a tensor that uses it, and a name that leads to it.

    `shape` and `dtype` are those of one of the tensors; views of it share the memory and are not counted again.
    `held_by` is None if no name of the notebook leads to it: `who_holds(row)` searches further.
    """

    used_bytes: int
    shape: tuple[int, ...]
    dtype: str
    device: str
    requires_grad: bool
    held_by: str | None
    memory: WeakMemory = field(repr=False, compare=False)


@dataclass(frozen=True)
class LargestTensors:
    """The largest pieces of memory that tensors use, the largest first; `count` and `total_bytes` are of all."""

    rows: tuple[LiveTensor, ...]
    count: int
    total_bytes: int

    def __iter__(self) -> Iterator[LiveTensor]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> LiveTensor:
        return self.rows[number]

    def __repr__(self) -> str:
        return f"{self._title()}\n{text_table(_HEADERS, self._rows())}"

    def _repr_html_(self) -> str:
        return html_table(_HEADERS, self._rows(), self._title())

    def _rows(self) -> list[list[str]]:
        return [
            [
                *(size_text(row.used_bytes), shape_text(row.shape), row.dtype, row.device),
                *("yes" if row.requires_grad else "no", row.held_by or "no name of the notebook"),
            ]
            for row in self.rows
        ]

    def _title(self) -> str:
        return f"The {len(self.rows)} largest of {self.count:,} tensors alive, {size_text(self.total_bytes)} in all"


@leaving_nothing
def largest_tensors(
    n: int = 10, *, namespace: dict[str, Any] | None = None, budget_s: float = BUDGET_S
) -> LargestTensors:
    """List the `n` largest tensors that are alive, on every device, and the name that leads to each.

    Size is that of the memory behind a tensor, counted once for all its views, in bytes. Found are tensors that have a
    Python object, or that a graph saved for its backward; not those that C++ alone holds. Sparse tensors are left out.
    """
    n = whole("n", n)
    by_key: dict[int, torch.Tensor] = {}
    for tensor in live_tensors():
        if memory_key(tensor) not in by_key or not tensor._is_view():
            by_key[memory_key(tensor)] = tensor
    sizes = {key: tensor.untyped_storage().nbytes() for key, tensor in by_key.items()}
    largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:n]
    search = Search(notebook(namespace), budget_s)
    try:
        users: dict[int, list[int]] = {key: [] for key in largest}
        for user in search.sharing(set(largest)):
            users[memory_key(user)].append(id(user))
        rows = [_row(by_key[key], search.paths(users[key])) for key in largest]
        return LargestTensors(tuple(rows), len(sizes), sum(sizes.values()))
    finally:
        search.close()


def _row(tensor: torch.Tensor, ways: list[tuple[Root, list[Any]]]) -> LiveTensor:
    holders = [holder(root, way, tensor) for root, way in ways]
    held_by = min(holders, key=lambda one: (KINDS.index(one.kind), len(one.path)), default=None)
    return LiveTensor(
        used_bytes=tensor.untyped_storage().nbytes(),
        shape=tuple(tensor.shape),
        dtype=dtype_text(tensor.dtype),
        device=str(tensor.device),
        requires_grad=tensor.requires_grad,
        held_by=None if held_by is None else held_by.path,
        memory=WeakMemory(describe(tensor), [tensor]),
    )
