"""Who keeps a tensor or a model alive? `who_holds(thing)` finds the names, and says what frees each.

    who_holds(model)        # every name, list, optimizer, graph, hook, error ... that leads to it
    largest_tensors()       # the largest tensors alive, and the name that holds each
    free("model")           # in release.py: really delete a name

Memory is freed when the last reference is gone. `del x` takes away one; these modules find the others. They see what
Python's garbage collector sees, and the graphs of autograd. They never start CUDA, and keep nothing alive themselves.
"""

from __future__ import annotations

import gc
import html
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.weak import TensorWeakRef

from course_utils.holder_back import find_elsewhere
from course_utils.holder_paths import KINDS, Holder, describe, holder
from course_utils.holder_roots import Notebook, Root, notebook
from course_utils.holder_search import BUDGET_S, Search, leaving_nothing
from course_utils.largest import LargestTensors, LiveTensor, largest_tensors
from course_utils.live_tensors import WeakMemory, live_tensors, memory_key
from course_utils.views import html_table, text_table

__all__ = ["Holder", "Holders", "LargestTensors", "LiveTensor", "largest_tensors", "who_holds"]

_HEADERS = ["held by", "how", "what frees it"]


@dataclass(frozen=True)
class Holders:
    """Who keeps `thing` alive: iterate over it, or look at it. `alive` is False if it was gone already.

    `complete` is False if the search ended early, by its time limit or for too many objects.
    """

    thing: str
    holders: tuple[Holder, ...]
    alive: bool = True
    complete: bool = True

    def __iter__(self) -> Iterator[Holder]:
        return iter(self.holders)

    def __len__(self) -> int:
        return len(self.holders)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each holder, as `Holder` lists them."""
        return tuple(one.kind for one in self.holders)

    def __repr__(self) -> str:
        return f"{self._title()}\n{text_table(_HEADERS, self._rows())}" if self.holders else self._title()

    def _repr_html_(self) -> str:
        return (
            html_table(_HEADERS, self._rows(), self._title())
            if self.holders
            else f"<p>{html.escape(self._title())}</p>"
        )

    def _rows(self) -> list[list[str]]:
        return [[one.path, one.kind, one.remedy] for one in self.holders]

    def _title(self) -> str:
        if not self.alive:
            return f"{self.thing}: nothing holds it, it has been freed."
        early = "" if self.complete else " The search ended early: there may be more."
        return f"{self.thing}: who holds it.{early}"


@leaving_nothing
def who_holds(thing: Any, *, namespace: dict[str, Any] | None = None, budget_s: float = BUDGET_S) -> Holders:
    """Find what keeps a tensor or a model alive, and what frees each.

    `thing` is a tensor, a model or another object, a weak reference to one (made before you deleted its name), or a
    row of `largest_tensors()`. For a tensor, whatever shares its memory counts; for a model, what holds one of its
    parameters or buffers. It searches from the names of the notebook (or of `__main__`, or of the dict `namespace`),
    IPython's output history, the last error, running calls and threads, and then from modules' global variables.

    It takes about as long as two or three garbage collections, and ends after about `budget_s` seconds; then the
    result says that it is not complete. What C++ alone holds is not seen, but for the graphs of autograd. TypeError
    for a string or number.
    """
    if not budget_s > 0:
        raise ValueError(f"budget_s must be a positive number of seconds, not {budget_s!r}.")
    return _find(thing, notebook(namespace), budget_s)


def _find(thing: Any, book: Notebook, budget_s: float) -> Holders:
    thing, memory = _resolved(thing)
    title = memory.text if thing is None else describe(thing)
    if thing is None and not memory.keys():
        return Holders(title, (), alive=False)
    search = Search(book, budget_s)
    try:
        targets = _targets(search, thing, memory.keys())
        # No comprehension here uses `thing`: it would hold it in a cell, and be found as one more holder.
        elsewhere, circle = find_elsewhere(search, targets, book.shell)
        found = _merged(_in_words(search.paths(targets) + elsewhere, thing))
        if not found:
            kind = "circle" if circle else "unseen"
            found = [Holder(kind, kind, "a circle of objects" if circle else "unknown")]
        return Holders(title, tuple(found), complete=search.complete)
    finally:
        search.close()


def _resolved(thing: Any) -> tuple[Any, WeakMemory]:
    """The object itself, if there is one, and else the memory that is asked for."""
    memory = WeakMemory("It", [])
    if isinstance(thing, LiveTensor | WeakMemory):
        return None, thing if isinstance(thing, WeakMemory) else thing.memory
    if isinstance(thing, weakref.ref | TensorWeakRef):
        thing = thing()
        if issubclass(type(thing), torch.Tensor):
            # A tensor may live on in C++ alone, without Python's reference; TensorWeakRef gives it one back.
            thing = TensorWeakRef(thing)()
        return thing, memory
    if not gc.is_tracked(thing) or isinstance(thing, type):
        quotes = ": write its name without quotes" if isinstance(thing, str) else ""
        raise TypeError(f"who_holds takes a tensor or a model, not {thing!r:.60}{quotes}.")
    return thing, memory


def roots_leading_to(rest: Any, book: Notebook, budget_s: float = BUDGET_S) -> list[tuple[str, int]]:
    """The kind of each root that leads to what a weak reference means, and the id of the root's object."""
    thing, memory = _resolved(rest)
    search = Search(book, budget_s)
    try:
        return [(root.kind, id(root.value)) for root, _ in search.paths(_targets(search, thing, memory.keys()))]
    finally:
        search.close()


def _targets(search: Search, thing: Any, keys: set[int]) -> list[int]:
    """The ids of the objects whose holders are asked for, the most telling first; the search keeps them."""
    wanted = [] if thing is None else [thing]
    if isinstance(thing, nn.Module):
        wanted += [*thing.parameters(), *thing.buffers()]
    keys |= {memory_key(one) for one in wanted if issubclass(type(one), torch.Tensor)} - {0}
    if keys:
        # Those that only a graph keeps are among them: the search has given them Python objects.
        wanted += [one for one in live_tensors() if memory_key(one) in keys]
    for one in wanted:
        search.nodes.setdefault(id(one), one)
    return list(dict.fromkeys(map(id, wanted)))


def _in_words(ways: list[tuple[Root, list[Any]]], thing: Any) -> list[Holder]:
    return [holder(root, way, thing) for root, way in ways]


def _merged(found: list[Holder]) -> list[Holder]:
    """One holder for each place: IPython keeps a displayed value, and the last error, under several names."""
    merged: dict[tuple[str, str], Holder] = {}
    for one in found:
        steps = one.path.removeprefix(one.name)
        if one.kind == "traceback":
            key, one = ("traceback", ""), Holder("traceback", "the last error", "the last error" + steps)
        elif one.kind == "output history":
            key = ("output history", steps)
            if (before := merged.get(key)) is not None:
                names = before.name if one.name in before.name.split(", ") else f"{before.name}, {one.name}"
                one = Holder(one.kind, names, names + steps)
        else:
            key = (one.kind, one.path)
        if key not in merged or key[0] == "output history":
            merged[key] = one
    return sorted(merged.values(), key=lambda one: KINDS.index(one.kind))
