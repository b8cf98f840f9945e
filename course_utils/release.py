"""`free("model")` really deletes a name: in IPython too, where `del` leaves the copies that the output history keeps.

1. The name goes.
2. What IPython's output history keeps of the object goes (Out[n], _n, _, __, ___), also inside another displayed value.
   Other names for the object are yours: they stay, and the report lists them.
3. If the last error still leads to the object, that goes too.
4. Python collects garbage: objects that refer to each other in a circle.
5. PyTorch's cache on the GPU is emptied only if you ask for it. PyTorch uses freed memory again without that.
"""

from __future__ import annotations

import difflib
import gc
import html
import re
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from course_utils.holder_paths import size_text
from course_utils.holder_roots import SHELL_NAMES, Notebook, is_shells, last_error, notebook, output_history
from course_utils.holder_search import leaving_nothing
from course_utils.holders import Holders, roots_leading_to, who_holds
from course_utils.live_tensors import WeakMemory, live_bytes
from course_utils.views import html_table, text_table

__all__ = ["Freed", "free"]

_MOST_CONTENTS = 100_000
_OUTPUT = re.compile(r"Out\[(\d+)\]")
_HEADERS = ["name", "still held by", "how", "what frees it"]


@dataclass(frozen=True)
class Freed:
    """What `free` did.

    `freed_bytes` says for each device how much memory live tensors used before and no longer use; `dropped` is what
    went besides the names; `still_held` has an entry for each name whose object, or its memory, is still alive.
    `cache_emptied` is None if you did not ask for it, and False if CUDA does not run.
    """

    names: tuple[str, ...]
    freed_bytes: dict[str, int]
    dropped: tuple[str, ...] = ()
    still_held: dict[str, Holders] = field(default_factory=dict)
    cache_emptied: bool | None = None

    def __repr__(self) -> str:
        rows = self._rows()
        return f"{self._text()}\n{text_table(_HEADERS, rows)}" if rows else self._text()

    def _repr_html_(self) -> str:
        rows = self._rows()
        return html_table(_HEADERS, rows, self._text()) if rows else f"<p>{html.escape(self._text())}</p>"

    def _rows(self) -> list[list[str]]:
        return [[name, one.path, one.kind, one.remedy] for name, holders in self.still_held.items() for one in holders]

    def _text(self) -> str:
        sizes = [f"{size_text(count)} on {device}" for device, count in self.freed_bytes.items()]
        parts = [f"Freed {' and '.join(sizes)}." if sizes else "No tensor's memory was freed."]
        if self.names:
            parts.append(f"Deleted: {', '.join(self.names)}.")
        if self.dropped:
            parts.append(f"Also dropped: {', '.join(self.dropped)}.")
        if self.cache_emptied is not None:
            parts.append(
                "PyTorch's cache was emptied." if self.cache_emptied else "CUDA does not run: no cache to empty."
            )
        return " ".join(parts)


@leaving_nothing
def free(*names: str, namespace: dict[str, Any] | None = None, empty_cache: bool = False) -> Freed:
    """Delete names of the notebook, and all that IPython keeps of their objects; say what that freed and what not.

    A name is one word such as "model", or an entry of the output history such as "Out[5]". Without a name, what no name
    holds goes: all of the output history, the last error with the variables of its calls, and garbage. Outside IPython
    the names are those of `__main__`; `namespace` is another dict to delete from. `empty_cache=True` also gives
    PyTorch's unused GPU memory back to the driver, if CUDA runs; it never starts CUDA.

    NameError if there is no such name (then nothing is deleted), TypeError if it is not a string, ValueError for what
    is no name, or is IPython's own.
    """
    book = notebook(namespace)
    words = list(dict.fromkeys(_checked(name, book) for name in names))
    if words:
        gc.collect()  # what is garbage already does not come from these names
    before = live_bytes()
    watched = {name: _Watched(book.names[name]) for name in words}
    dropped: list[str] = []
    if not names:
        dropped += _drop_error(book)
        dropped += _drop_history(book, {id(root.value) for root in output_history(book) if root.value is not None})
    for name in words:
        dropped += _delete(book, name)
    gc.collect()
    for one in watched.values():
        if one.is_alive() and (ways := _drop_ways(book, one)):
            dropped += ways
            gc.collect()
    after = live_bytes()
    freed = {device: size - after.get(device, 0) for device, size in before.items()}
    alive = {name: one.rest() for name, one in watched.items() if one.is_alive()}
    return Freed(
        names=tuple(words),
        freed_bytes={device: count for device, count in freed.items() if count > 0},
        dropped=tuple(dict.fromkeys(it for it in dropped if it not in words)),
        still_held={name: who_holds(rest, namespace=namespace) for name, rest in alive.items()},
        cache_emptied=_empty_cache() if empty_cache else None,
    )


def _checked(name: str, book: Notebook) -> str:
    if not isinstance(name, str):
        raise TypeError('free takes names in quotes, such as free("model"): what you hand over, you still hold.')
    if (output := _OUTPUT.fullmatch(name)) is not None:
        name = f"_{output[1]}"
    if not name.isidentifier():
        raise ValueError(f"{name!r:.80} is not a name: delete an item with del, then call free() for what is left.")
    if name in SHELL_NAMES or (name.startswith("__") and name.strip("_")):
        raise ValueError(f"{name!r} belongs to Python or IPython, and is not deleted.")
    if name not in book.names:
        close = difflib.get_close_matches(name, book.names, 1)
        hint = f"Did you mean {close[0]!r}?" if close else "largest_tensors() shows which names there are."
        raise NameError(f"There is no name {name!r:.80} here. {hint}")
    return name


def _delete(book: Notebook, name: str) -> list[str]:
    """Delete a name, and what the output history keeps of its very object."""
    value = book.names.pop(name)
    if book.shell is not None and book.shell.user_ns_hidden.get(name) is value:
        del book.shell.user_ns_hidden[name]
    return _drop_history(book, {id(value)})


def _drop_ways(book: Notebook, watched: _Watched) -> list[str]:
    """Drop those values of the output history, and the last error, that still lead to what was deleted."""
    dropped = []
    roots = roots_leading_to(watched.rest(), book)
    if any(kind == "traceback" for kind, _ in roots):
        dropped += _drop_error(book)
    return dropped + _drop_history(book, {key for kind, key in roots if kind == "output history"})


def _drop_history(book: Notebook, keys: set[int]) -> list[str]:
    """Take the objects with these ids out of all places where IPython keeps displayed values."""
    shell = book.shell
    if shell is None or not keys:
        return []
    outputs, names, hidden, hook = (
        shell.history_manager.output_hist,
        book.names,
        shell.user_ns_hidden,
        shell.displayhook,
    )
    dropped = [number for number, value in outputs.items() if id(value) in keys]
    shortcuts = [name for name, value in names.items() if id(value) in keys and is_shells(book, name, value)]
    for number in dropped:
        del outputs[number]
    for name in shortcuts:
        if name.strip("_"):  # _5 and the like
            del names[name]
        else:  # IPython goes on filling these as long as both are the same
            names[name] = ""
    for name in ("_", "__", "___"):
        if id(getattr(hook, name)) in keys:
            setattr(hook, name, "")
    for name in [name for name, value in hidden.items() if id(value) in keys and name not in SHELL_NAMES]:
        del hidden[name]
    if id(getattr(shell.last_execution_result, "result", None)) in keys:
        shell.last_execution_result = None
    return [*(f"Out[{number}]" for number in dropped), *shortcuts]


def _drop_error(book: Notebook) -> list[str]:
    """Forget the last error: `%tb` and `%debug` then say that there is none."""
    if not last_error(book):
        return []
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            delattr(sys, name)
    if book.shell is not None:
        book.shell.InteractiveTB.tb = None
        if getattr(book.shell.last_execution_result, "success", True) is False:
            book.shell.last_execution_result = None
    return ["the last error"]


def _empty_cache() -> bool:
    if not torch.cuda.is_initialized():
        return False
    torch.cuda.empty_cache()
    return True


class _Watched:
    """Weak references to an object and to the memory of the tensors in it."""

    def __init__(self, thing: Any) -> None:
        self._thing = weakref.ref(thing) if type(thing).__weakrefoffset__ else None
        self._memory = WeakMemory(type(thing).__name__, _tensors_in(thing))

    def is_alive(self) -> bool:
        """Whether the object, or the memory of a tensor in it, is still there."""
        return self.rest() is not None

    def rest(self) -> Any:
        """What is left, as `who_holds` takes it; None if nothing is."""
        if self._thing is not None and self._thing() is not None:
            return self._thing
        return self._memory if self._memory.keys() else None


def _tensors_in(thing: Any) -> Iterator[torch.Tensor]:
    """The tensors in a tensor, a model, or lists, tuples, sets and dicts of them."""
    waiting: list[Any] = [thing]
    seen: set[int] = set()
    while waiting and len(seen) < _MOST_CONTENTS:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if issubclass(type(one), torch.Tensor):
            yield one
        elif isinstance(one, nn.Module):
            waiting += [*one.parameters(), *one.buffers()]
        elif isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, list | tuple | set):
            waiting += one
