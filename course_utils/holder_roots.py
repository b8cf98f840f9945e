"""Where Python starts from when it keeps an object alive: the roots that `who_holds` searches from.

In a notebook those are the names of the notebook, IPython's output history, the last error, the calls that are running,
and the threads. Nothing here is kept: the roots live as long as the search.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType, ModuleType
from typing import Any

_OWN = frozenset(
    f"course_utils.{name}"
    for name in (
        *("holders", "holder_back", "holder_paths", "holder_roots", "holder_search"),
        *("largest", "live_tensors", "release"),
    )
)
# What runs cells and tests: its frames hold nothing of the learner's but through the roots below.
_MACHINERY = frozenset(
    (
        *("IPython", "ipykernel", "traitlets", "tornado", "zmq", "asyncio", "concurrent", "jupyter_client", "comm"),
        *("threading", "queue", "selectors", "runpy", "tqdm", "bdb", "pdb", "debugpy", "pydevd", "_pydevd_bundle"),
        *("pytest", "_pytest", "pluggy", "xdist", "execnet", "unittest"),
    )
)
_HISTORY_NAME = re.compile(r"_\d+|_{1,3}")
# What IPython puts into a notebook's namespace for itself.
SHELL_NAMES = frozenset(
    ("In", "Out", "_ih", "_oh", "_dh", "get_ipython", "exit", "quit", "open", "__builtin__", "__builtins__")
)
_LOCALS_ARE_COPIED = 0x1  # inspect.CO_OPTIMIZED: a function's frame, whose f_locals is no namespace
_ONLY_MINE = 3  # references to such a copy that nobody else keeps: the frame's, ours, and getrefcount's argument


@dataclass(frozen=True, slots=True)
class Root:
    """One object that Python keeps by itself, and as what: "name", "output history", "traceback", "frame", "thread"."""

    kind: str
    name: str
    value: Any


@dataclass(frozen=True, slots=True)
class Notebook:
    """The namespace that a notebook's cells run in, and IPython's shell if they run in IPython."""

    names: dict[str, Any]
    shell: Any = None


def notebook(namespace: dict[str, Any] | None = None) -> Notebook:
    """IPython's namespace, or that of `__main__` outside IPython; with `namespace`, that dict instead."""
    if namespace is not None and not isinstance(namespace, dict):
        raise TypeError(f"A namespace is a dict such as globals(), not {type(namespace).__name__}.")
    shell = running_shell()
    if shell is not None and (namespace is None or namespace is shell.user_ns):
        return Notebook(shell.user_ns, shell)
    return Notebook(vars(sys.modules["__main__"]) if namespace is None else namespace)


def running_shell() -> Any:
    """IPython's shell, or None outside IPython, which is not imported for it."""
    ipython = sys.modules.get("IPython")
    return None if ipython is None else ipython.get_ipython()


def find_roots(book: Notebook) -> list[Root]:
    """All roots: the names first, because they explain most."""
    roots = [Root("name", name, value) for name, value in list(book.names.items()) if not is_shells(book, name, value)]
    roots += output_history(book)
    roots += last_error(book)
    roots += _running_calls(book)
    roots += _other_threads()
    return roots


def output_history(book: Notebook) -> list[Root]:
    """What IPython keeps of the values that cells displayed: each under several names, some in its hidden namespace."""
    shell = book.shell
    if shell is None:
        return []
    found = [(f"Out[{number}]", value) for number, value in shell.history_manager.output_hist.items()]
    found += [(name, it) for name, it in book.names.items() if name not in SHELL_NAMES and is_shells(book, name, it)]
    found += [(name, getattr(shell.displayhook, name, None)) for name in ("_", "__", "___")]
    found += [(name, it) for name, it in shell.user_ns_hidden.items() if name not in SHELL_NAMES]
    for result in (shell.last_execution_result, shell.displayhook.exec_result):
        found.append(("_", getattr(result, "result", None)))
    return [Root("output history", name, value) for name, value in found]


def last_error(book: Notebook) -> list[Root]:
    """What keeps the last error that ended a cell, and through it the variables of its frames."""
    found = [("sys." + name, getattr(sys, name, None)) for name in ("last_value", "last_traceback", "last_exc")]
    if book.shell is not None:
        found.append(("InteractiveTB", getattr(book.shell.InteractiveTB, "tb", None)))
        for name in ("error_in_exec", "error_before_exec"):
            found.append((name, getattr(book.shell.last_execution_result, name, None)))
    return [Root("traceback", name, value) for name, value in found if value is not None]


def shell_parts(book: Notebook) -> list[Any]:
    """The parts of IPython whose contents are roots themselves, so that nothing is searched through them."""
    shell = book.shell
    if shell is None:
        return []
    history = shell.history_manager
    return [
        *(shell, shell.user_ns_hidden, history, history.output_hist, shell.displayhook, shell.displayhook.exec_result),
        *(shell.last_execution_result, shell.InteractiveTB),
    ]


def module_namespaces() -> dict[int, tuple[str, dict[str, Any]]]:
    """Every module's name and namespace, by the namespace's id."""
    found = {}
    for name, module in list(sys.modules.items()):
        if issubclass(type(module), ModuleType):
            # A lazy module imports itself when it is asked for an attribute the ordinary way.
            names = object.__getattribute__(module, "__dict__")
            found[id(names)] = (name, names)
    return found


def is_machinery(frame: FrameType) -> bool:
    """Whether a frame belongs to what runs cells (IPython, ipykernel, pytest, ...), or to this search."""
    module = str(frame.f_globals.get("__name__"))
    return module in _OWN or module.partition(".")[0] in _MACHINERY


def variables(frame: FrameType) -> dict[str, Any]:
    """A copy of a frame's local variables that leaves no copy behind in the frame."""
    found = frame.f_locals
    copied = dict(found)
    # Up to Python 3.12, asking leaves a dict in the frame that keeps all its variables. Not so if `locals()` made it.
    if (
        type(found) is dict
        and frame.f_code.co_flags & _LOCALS_ARE_COPIED
        and sys.version_info < (3, 13)
        and sys.getrefcount(found) <= _ONLY_MINE
    ):
        found.clear()
    return copied


def is_shells(book: Notebook, name: str, value: Any) -> bool:
    """Whether IPython, not the learner, gave the name to the value: `for _ in range(3)` makes `_` the learner's."""
    if book.shell is None:
        return False
    if name in SHELL_NAMES and name in book.shell.user_ns_hidden:
        return True
    if not _HISTORY_NAME.fullmatch(name):
        return False
    kept = book.shell.user_ns_hidden.get(name, book) if name[1:].isdigit() else getattr(book.shell.displayhook, name)
    return kept is value


def _running_calls(book: Notebook) -> Iterator[Root]:
    """The local variables of the calls that led here, up to the cell."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") in _OWN:
        frame = frame.f_back
    while frame is not None and not is_machinery(frame) and frame.f_code.co_flags & _LOCALS_ARE_COPIED:
        for name, value in variables(frame).items():
            yield Root("frame", f"{frame.f_code.co_name}(), variable {name}", value)
        frame = frame.f_back


def _other_threads() -> Iterator[Root]:
    """The local variables of the learner's own threads, and what was handed to them. A kernel has more threads."""
    frames = sys._current_frames()
    for thread in threading.enumerate():
        frame = None if thread is threading.current_thread() else frames.get(thread.ident or 0)
        own = False
        while frame is not None:
            if not is_machinery(frame) and frame.f_code.co_flags & _LOCALS_ARE_COPIED:
                own = True
                for name, value in variables(frame).items():
                    yield Root("thread", f"{thread.name}, variable {name} of {frame.f_code.co_name}()", value)
            frame = frame.f_back
        if own:
            yield Root("thread", thread.name, thread)
