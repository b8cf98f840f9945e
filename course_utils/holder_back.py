"""What holds an object from outside the notebook: a module's global variable, IPython's inside, a circle of garbage.

It goes from the object back. Each step asks the garbage collector to look at every object there is, so that it is
taken only for objects that the search from the roots has not explained.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

from course_utils.holder_roots import Root
from course_utils.holder_search import Search

_MOST_OBJECTS = 2_000
_WIDEST_START = 100
# What these keep are roots of the search already: the last error, and the threads.
_KNOWN_MODULES = ("sys", "threading")


def find_elsewhere(search: Search, targets: Iterable[int], shell: Any) -> tuple[list[tuple[Root, list[Any]]], bool]:
    """The ways from outside the notebook to a target, and whether nothing but a circle of objects was found.

    A circle is objects that refer to each other and that nothing else refers to: Python frees them when it collects
    garbage. Where one of them has no holder that the garbage collector knows, C++ or a running call holds it.
    """
    back = search.back(targets)
    level = [search.nodes[key] for key in list(back)[:_WIDEST_START]]
    # For each object the next one towards a target. The nearest come first, so that the next one is always in it.
    towards = {id(one): search.nodes.get(back[id(one)] or 0) for one in level}
    found: list[tuple[Root, list[Any]]] = []
    own = {id(towards), id(search.nodes), id(search.roots), *map(id, search.roots)}
    followed, all_held = 0, True
    while level:
        holders: list[Any] = []
        own |= {id(level), id(holders)}
        level_ids, held = set(map(id, level)), set()
        for holder in gc.get_referrers(*level):
            key = id(holder)
            child = next((it for it in gc.get_referents(holder) if id(it) in level_ids), None)
            if key in own or child is None:
                continue
            held.update(level_ids.intersection(map(id, gc.get_referents(holder))))
            if key in search.modules:
                found += _globals(*search.modules[key], _way(child, towards))
            elif holder is shell:
                found.append((Root("IPython", "get_ipython()", holder), [holder, *_way(child, towards)]))
            elif not (key in search.stops or key in search.nodes or key in towards or type(holder) is ModuleType):
                towards[key] = child
                holders.append(holder)
        all_held = all_held and (followed == 0 or held >= level_ids)
        followed += len(holders)
        level = holders
        if followed > _MOST_OBJECTS or time.perf_counter() > search.until:
            search.complete = search.complete and not level
            break
    return found, bool(followed and all_held and search.complete)


def _globals(module: str, names: dict[str, Any], way: list[Any]) -> Iterator[tuple[Root, list[Any]]]:
    """The global variables of a module that are the first object on the way."""
    if module not in _KNOWN_MODULES:
        for name, value in list(names.items()):
            if value is way[0]:
                yield Root("module", f"{module}.{name}", value), way


def _way(start: Any, towards: dict[int, Any]) -> list[Any]:
    way = [start]
    while (following := towards[id(way[-1])]) is not None:
        way.append(following)
    return way
