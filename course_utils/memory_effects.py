"""What an act changes in memory: predict it, do it, read both sides.

effects = Effects()
with effects.of("del batch"):
    del batch
with effects.of("empty_cache()"):
    torch.cuda.empty_cache()
effects                      # one row an act, one column a figure
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from course_utils.memory_report import MemoryReport, memory_report, signed_mebibytes
from course_utils.views import html_table, text_table

_ON_GPU = {
    "allocated": "allocated_bytes",
    "reserved": "reserved_bytes",
    "used on the device": "used_bytes",
    "peak allocated": "peak_allocated_bytes",
}
_ON_CPU = {"tensors": "tensor_bytes", "process (RSS)": "process_bytes"}


@dataclass(frozen=True)
class Effect:
    """One act, and the memory before and after it."""

    act: str
    before: MemoryReport
    after: MemoryReport

    def change(self, field: str) -> int | None:
        """By how many bytes a figure of `MemoryReport` changed, such as "reserved_bytes"; None if it was not read."""
        before, after = getattr(self.before, field), getattr(self.after, field)
        return None if before is None or after is None else after - before

    def __repr__(self) -> str:
        return f"{self.act}: " + ", ".join(
            f"{name} {signed_mebibytes(self.change(field))}" for name, field in _columns(self.after).items()
        )


class Effects:
    """A table of acts that grows: each `with effects.of("what I do"):` block becomes a row.

    On a GPU the columns are the allocator's figures and the device's, on a CPU the living tensors and the process.
    Other threads and processes change memory too: a few MiB of the process's memory may be theirs.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self._device = device
        self.rows: list[Effect] = []

    @contextmanager
    def of(self, act: str) -> Iterator[None]:
        """Measure the block. If it raises, there is no row."""
        before = memory_report(self._device)
        yield
        self.rows.append(Effect(act, before, memory_report(self._device)))

    def __getitem__(self, act: str) -> Effect:
        for row in reversed(self.rows):
            if row.act == act:
                return row
        raise KeyError(f"{act!r} was not measured: there are {', '.join(row.act for row in self.rows) or 'no acts'}.")

    def __repr__(self) -> str:
        return text_table(*self._table()) if self.rows else "Effects: nothing measured yet"

    def _repr_html_(self) -> str:
        headers, rows = self._table()
        return html_table(headers, rows, "What each act changed")

    def _table(self) -> tuple[list[str], list[list[str]]]:
        columns = _columns(self.rows[0].after) if self.rows else _ON_CPU
        rows = [[row.act, *(signed_mebibytes(row.change(field)) for field in columns.values())] for row in self.rows]
        return ["act", *columns], rows


def measure(act: Callable[[], object], name: str = "", device: torch.device | str | None = None) -> Effect:
    """Call `act()` and say what it changed. What it returns is dropped first: a result that is kept keeps memory."""
    if not callable(act):
        raise TypeError(f"measure takes a function to call, such as gc.collect, not {act!r:.80}.")
    effects = Effects(device)
    with effects.of(name or getattr(act, "__name__", "act")):
        act()
    return effects.rows[0]


def _columns(report: MemoryReport) -> dict[str, str]:
    return _ON_CPU if report.reserved_bytes is None else _ON_GPU
