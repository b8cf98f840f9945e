"""From the objects on the way between a name and a tensor to words: `history['loss'][3]`, and what frees it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import CellType, FrameType, FunctionType, GeneratorType, MethodType, TracebackType
from typing import Any

import torch
from torch import nn

from course_utils.holder_roots import Root, variables
from course_utils.live_tensors import array_memory, gradient, is_graph_node, is_saved, memory_bytes
from course_utils.views import number

_LONGEST_PATH, _LONGEST_KEY = 160, 40
_MODULE_TABLES = re.compile(r"\._(?:parameters|buffers|modules)\['(\w+)'\]")
_DIGITS = re.compile(r"\.(\d+)(?!\w)")

REMEDIES = {
    "name": "del {name}, or free({name!r}).",
    "view": "It shares the memory: del {name}, or keep a copy with .clone() instead.",
    "inside": "Take it out of {name}, or free({name!r}) as a whole.",
    "output history": "IPython keeps what a cell displays. free() and %xdel drop it; del and %reset -f out do not. "
    "End the line with ; and nothing is kept.",
    "traceback": "The last error keeps the variables of its calls: free() drops it, and so does the next error.",
    "exception": "{name} keeps its traceback, and with it the variables of its calls: del {name}, or keep str({name}).",
    "optimizer": "An optimizer keeps its parameters and a state for each: free({name!r}) too.",
    "scheduler": "A scheduler keeps its optimizer, and so the parameters: free({name!r}) too.",
    "graph": "{name} keeps the graph that made it: keep .item() or .detach() instead, or free({name!r}).",
    "hook": "A hook keeps it: call .remove() on the handle that you got when you registered the hook.",
    "closure": "The function {name} keeps a variable of the call that made it: free({name!r}).",
    "generator": "A generator that has not ended keeps its variables: {name}.close().",
    "cache": "A cached function keeps its arguments and results: call its cache_clear().",
    "array": "The NumPy array uses the tensor's memory: del {name}, or keep {name}.copy() instead.",
    "frame": "A call that is still running keeps it in a variable: del it there, or let the call end.",
    "thread": "A thread that is still running keeps it: let the thread end, and join() it.",
    "module": "A global variable of a module keeps it: del {name}, or set it to None.",
    "IPython": "It is inside IPython, where nothing is to be deleted by hand: restart the kernel if it must go.",
    "circle": "Only objects that refer to each other keep it: gc.collect() frees it.",
    "unseen": "Nothing that Python can see holds it: it may be C++, a running call or a library.",
}


KINDS = tuple(REMEDIES)  # what explains most comes first


@dataclass(frozen=True)
class Holder:
    """One thing that keeps an object alive.

    `kind` is one of `KINDS`; `name` is where it begins, such as a name of the notebook; `path` leads from there
    to the object; `remedy` says what frees it.
    """

    kind: str
    name: str
    path: str

    @property
    def remedy(self) -> str:
        """One sentence on what frees it."""
        return REMEDIES[self.kind].format(name=self.name)


def holder(root: Root, way: list[Any], thing: Any) -> Holder:
    """The way from a root to `thing` (or to a tensor that shares its memory) in words."""
    steps = [_step(way, place) for place in range(len(way) - 1)]
    path = _DIGITS.sub(r"[\1]", _MODULE_TABLES.sub(r".\1", "".join(steps)))
    return Holder(_kind(root, way, steps, thing), root.name, (root.name + path)[:_LONGEST_PATH])


def _kind(root: Root, way: list[Any], steps: list[str], thing: Any) -> str:
    if root.kind not in ("name", "module"):
        return root.kind
    for place, one in enumerate(way):
        for kind, fits in _KINDS:
            if fits(one):
                return kind
        if place < len(steps) and "_hooks" in steps[place]:
            return "hook"
    if root.kind == "module":
        return "module"
    if len(way) > 1:
        return "inside"
    shares = issubclass(type(thing), torch.Tensor) and way[0] is not thing
    return "view" if shares else "name"


def _is(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: issubclass(type(value), kinds)


# The first that fits, from the name towards the object, says why the object is kept.
_KINDS: tuple[tuple[str, Callable[[Any], bool]], ...] = (
    ("scheduler", _is(torch.optim.lr_scheduler.LRScheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)),
    ("optimizer", _is(torch.optim.Optimizer)),
    ("exception", _is(BaseException, TracebackType)),
    ("generator", _is(GeneratorType)),
    ("closure", _is(CellType)),
    ("graph", is_graph_node),
    ("cache", lambda value: hasattr(type(value), "cache_clear")),
    ("array", lambda value: array_memory(value) is not None),
)


def _step(way: list[Any], place: int) -> str:
    """The words for one step: how the object at `place` refers to the next one."""
    parent, child = way[place], way[place + 1]
    before = way[place - 1] if place else None
    kind = type(parent)
    if issubclass(kind, dict):
        return _entry(parent, child, is_attributes=_is(type)(before) or _attributes(before) is parent)
    if issubclass(kind, list | tuple):
        if type(before) is FunctionType and before.__closure__ is parent:
            return f" (closure variable {before.__code__.co_freevars[_index(parent, child)]})"
        return f"[{_index(parent, child)}]"
    if issubclass(kind, torch.Tensor):
        return _tensor_step(parent, child)
    if kind is FrameType:
        return f" (variable {_named(variables(parent), child)} of {parent.f_code.co_name}())"
    if kind is GeneratorType:
        frame = parent.gi_frame
        return f" (variable {_named(variables(frame), child) if frame else '?'})"
    if array_memory(parent) is child and child is not None:
        return ".base"
    if is_graph_node(parent) or is_saved(parent) or kind in (CellType, FunctionType, TracebackType):
        return ""
    if issubclass(kind, type):
        return ""
    attributes = _attributes(parent)
    if attributes is child or (issubclass(kind, BaseException) and type(child) is TracebackType):
        return ""
    if kind is MethodType and parent.__self__ is child:
        return ".__self__"
    if kind is partial:
        return f" (in {kind.__name__})"
    name = _named(attributes, child) if attributes is not None else "?"
    return f" (in {kind.__name__})" if name == "?" else f".{name}"


def _tensor_step(parent: torch.Tensor, child: Any) -> str:
    if is_graph_node(child):
        return " (its graph)"
    if gradient(parent) is child:
        return ".grad"
    return "._backward_hooks" if issubclass(type(child), dict) else ""


def _entry(parent: dict[Any, Any], child: Any, *, is_attributes: bool) -> str:
    for key, value in list(parent.items()):
        if value is child:
            if is_attributes:
                return f".{key}"
            return (
                f"[{key!r:.{_LONGEST_KEY}}]" if isinstance(key, str | int | float | bool) else f"[{type(key).__name__}]"
            )
    return " (as a key)"


def _index(parent: Any, child: Any) -> int:
    return next((number for number, value in enumerate(list(parent)) if value is child), 0)


def _named(names: dict[str, Any], child: Any) -> str:
    return next((str(name) for name, value in names.items() if value is child), "?")


def _attributes(value: Any) -> dict[str, Any] | None:
    """An instance's own attributes, without running any code of its class."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return found if type(found) is dict else None


def describe(thing: Any) -> str:
    """A tensor or model in a few words: what it is, and how much memory."""
    if issubclass(type(thing), nn.Module):
        tensors = [*thing.parameters(), *thing.buffers()]
        return f"{type(thing).__name__}, {len(tensors)} tensors, {size_text(memory_bytes(tensors))}"
    if issubclass(type(thing), torch.Tensor):
        size = size_text(memory_bytes([thing]))
        return f"tensor {shape_text(thing.shape)}, {dtype_text(thing.dtype)}, {thing.device}, {size}"
    return type(thing).__name__


def size_text(used_bytes: int) -> str:
    """Bytes as MiB, KiB or bytes (1 KiB = 1,024 bytes): a small tensor is not shown as 0."""
    for unit, size in (("MiB", 2**20), ("KiB", 2**10)):
        if used_bytes >= size:
            return number(used_bytes / size, unit, 1)
    return number(used_bytes, "bytes")


def shape_text(shape: Sequence[int]) -> str:
    """A shape such as 32×3×64×64."""
    return "×".join(map(str, shape)) or "scalar"


def dtype_text(dtype: torch.dtype) -> str:
    """A dtype as PyTorch's users write it, without `torch.`."""
    return str(dtype).removeprefix("torch.")
