"""The search behind `who_holds`: from the roots forward over all references, then from the object back to the roots.

The roots are few and lead to few objects: a notebook has thousands, a process with torch half a million. What is held
from elsewhere, such as by a module's global variable, `holder_back` finds.
"""

from __future__ import annotations

import functools
import gc
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from types import FrameType, ModuleType
from typing import Any, ParamSpec, TypeVar

import torch

from course_utils.holder_roots import Notebook, Root, find_roots, is_machinery, module_namespaces, shell_parts
from course_utils.live_tensors import (
    array_memory,
    graph_children,
    is_graph_node,
    is_saved,
    memory_key,
    packed,
    tensor_children,
)

BUDGET_S = 5.0
_MOST_OBJECTS = 400_000
_CLOCK_EVERY = 500

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def leaving_nothing(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Make `function` keep nothing alive, even where it is interrupted and its error becomes the last traceback.

    A tensor subclass runs none of its own code meanwhile: only what torch itself knows of a tensor is asked for.
    """

    @functools.wraps(function)
    def called(*arguments: _Arguments.args, **keywords: _Arguments.kwargs) -> _Result:
        try:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*arguments, **keywords)
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)
            del arguments, keywords
            if isinstance(error, Exception):
                raise
            # An interrupt comes anywhere, also where a closure holds a tensor, which clear_frames leaves.
            raise error.with_traceback(None) from None

    return called


class Search:
    """The objects between the roots and what is looked for. It keeps them alive until `close()`."""

    def __init__(self, book: Notebook, budget_s: float) -> None:
        self.complete = True
        self.nodes: dict[int, Any] = {}
        self.modules = module_namespaces()
        self.modules.pop(id(book.names), None)
        self.stops = {id(book.names), *self.modules, *map(id, shell_parts(book))}
        self.until = time.perf_counter() + budget_s
        self._parents: dict[int, list[int]] = {}
        self.roots = [root for root in find_roots(book) if self._counts(root.value)]
        self._spread()

    def close(self) -> None:
        """Let go of everything."""
        self.nodes.clear()
        self._parents.clear()
        self.roots.clear()
        self.modules.clear()

    def sharing(self, keys: set[int]) -> Iterator[Any]:
        """The tensors among the objects found that use one of these pieces of memory."""
        for node in self.nodes.values():
            if issubclass(type(node), torch.Tensor) and memory_key(node) in keys:
                yield node

    def paths(self, targets: Iterable[int]) -> list[tuple[Root, list[Any]]]:
        """For each root that leads to a target: the objects on the shortest way, from the root's own to the target."""
        towards = self.back(targets)
        found = []
        for root in self.roots:
            if id(root.value) in towards:
                found.append((root, self.way(id(root.value), towards)))
        return found

    def _spread(self) -> None:
        """Follow all references from the roots, breadth first."""
        waiting = []
        for root in self.roots:
            if id(root.value) not in self.nodes:
                self.nodes[id(root.value)] = root.value
                waiting.append(root.value)
        nodes, parents = self.nodes, self._parents
        for count, node in enumerate(waiting):
            if count % _CLOCK_EVERY == 0 and (len(nodes) > _MOST_OBJECTS or time.perf_counter() > self.until):
                self.complete = False
                break
            me = id(node)
            for child in _children(node):
                key = id(child)
                if key in nodes:
                    parents.setdefault(key, []).append(me)
                elif self._counts(child):
                    nodes[key] = child
                    parents[key] = [me]
                    waiting.append(child)

    def _counts(self, value: Any) -> bool:
        """Whether an object can lead to a tensor, and is no part of the machinery that everything leads to."""
        if not gc.is_tracked(value):
            return array_memory(value) is not None or is_saved(value)
        if id(value) in self.stops:
            return False
        kind = type(value)
        if issubclass(kind, type):  # a class of the notebook may keep a tensor; others lead everywhere
            return bool(vars(value).get("__module__") == "__main__")
        if issubclass(kind, FrameType):
            return not is_machinery(value)
        return not issubclass(kind, ModuleType)

    def back(self, targets: Iterable[int]) -> dict[int, int | None]:
        """From the targets back: for each object on the way, the next one towards a target, nearest first."""
        towards: dict[int, int | None] = dict.fromkeys(key for key in targets if key in self.nodes)
        waiting = list(towards)
        for key in waiting:
            for parent in self._parents.get(key, ()):
                if parent not in towards:
                    towards[parent] = key
                    waiting.append(parent)
        return towards

    def way(self, start: int, towards: dict[int, int | None]) -> list[Any]:
        """The objects from one on the way to the target at its end."""
        found = [self.nodes[start]]
        while (key := towards[id(found[-1])]) is not None:
            found.append(self.nodes[key])
        return found


def _children(node: Any) -> Iterator[Any]:
    """What an object refers to, in Python and in torch's C++."""
    yield from gc.get_referents(node)
    if issubclass(type(node), torch.Tensor):
        yield from tensor_children(node)
    elif is_graph_node(node):
        yield from graph_children(node)
    elif is_saved(node):
        yield from packed(node)
    elif (memory := array_memory(node)) is not None:
        yield memory
