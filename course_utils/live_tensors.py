"""The tensors that are alive in this process, each piece of memory counted once.

Python's garbage collector knows every tensor that has ever had a Python object. What only the graph of a loss keeps is
found by walking that graph, without unpacking anything: unpacking would run a checkpoint's forward once more.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

_MOST_NODES = 100_000
_WITHOUT_MEMORY = ("FakeTensor", "FunctionalTensor")
_SAVED: dict[type, tuple[str, ...]] = {}  # looking through a class's attributes for each node would be slow


class WeakMemory:
    """Weak references to the memory of tensors: it can be told whether they still use it, and does not keep it."""

    def __init__(self, text: str, tensors: Iterable[torch.Tensor]) -> None:
        self.text = text
        self._memory: dict[int, StorageWeakRef] = {}
        for tensor in tensors:
            if key := memory_key(tensor):
                self._memory[key] = StorageWeakRef(tensor.untyped_storage())

    def keys(self) -> set[int]:
        """The addresses (as of `memory_key`) that are still in use."""
        return {key for key, storage in self._memory.items() if not storage.expired()}

    def __deepcopy__(self, memo: object) -> WeakMemory:
        return self  # copying a StorageWeakRef would free it twice


def live_tensors() -> list[torch.Tensor]:
    """All tensors with memory of their own, views too. Drop the list soon: it keeps them alive."""
    kinds = _tensor_classes()
    tensors = [found for found in gc.get_objects() if type(found) in kinds and memory_key(found)]
    graphs: dict[int, Any] = {id(node): node for tensor in tensors if (node := tensor.grad_fn) is not None}
    waiting = list(graphs.values())
    while waiting and len(graphs) < _MOST_NODES:
        for child in graph_children(waiting.pop()):
            if issubclass(type(child), torch.Tensor):
                if memory_key(child):
                    tensors.append(child)
            elif is_graph_node(child) and id(child) not in graphs:
                graphs[id(child)] = child
                waiting.append(child)
    # A gradient that nobody has looked at has no Python object yet.
    tensors += [grad for tensor in tensors if (grad := gradient(tensor)) is not None and memory_key(grad)]
    return tensors


def _tensor_classes() -> set[type]:
    """torch.Tensor and all classes made from it: looking a type up here is faster than to ask issubclass of each."""
    classes: set[type] = set()
    waiting: list[type] = [torch.Tensor]
    while waiting:
        kind = waiting.pop()
        if kind not in classes:
            classes.add(kind)
            waiting += type.__subclasses__(kind)
    return classes


def live_bytes() -> dict[str, int]:
    """The bytes of all live tensors' memory, by device such as "cpu" or "cuda:0"."""
    sizes: dict[int, tuple[str, int]] = {}
    for tensor in live_tensors():
        sizes[memory_key(tensor)] = (str(tensor.device), tensor.untyped_storage().nbytes())
    found: dict[str, int] = {}
    for device, used_bytes in sizes.values():
        found[device] = found.get(device, 0) + used_bytes
    return found


def memory_key(tensor: Any) -> int:
    """The address of a tensor's memory, the same for all its views; 0 if it has none (fake, meta, sparse, empty)."""
    with torch._C.DisableTorchFunctionSubclass():  # a lazy module's parameter refuses, others may do anything
        if tensor.is_meta or tensor.layout is not torch.strided or type(tensor).__name__ in _WITHOUT_MEMORY:
            return 0
        try:
            storage = tensor.untyped_storage()
            return int(storage.data_ptr()) if storage.nbytes() else 0
        except (RuntimeError, NotImplementedError):  # torch's answer for a subclass that only wraps other tensors
            return 0


def memory_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of the memory behind tensors, counted once where they share it."""
    return sum({key: it.untyped_storage().nbytes() for it in tensors if (key := memory_key(it))}.values())


def gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    """`tensor.grad`, or None for a tensor that is no leaf: asking that one would warn."""
    return tensor.grad if tensor.is_leaf else None


def tensor_children(tensor: torch.Tensor) -> Iterator[Any]:
    """What a tensor keeps alive in C++: its graph, its gradient, its hooks."""
    yield tensor.grad_fn
    yield gradient(tensor)
    yield getattr(tensor, "_backward_hooks", None)
    yield getattr(tensor, "_post_accumulate_grad_hooks", None)


def is_graph_node(value: Any) -> bool:
    """Whether a value is a node of an autograd graph, such as `loss.grad_fn`."""
    return hasattr(type(value), "next_functions")


def graph_children(node: Any) -> Iterator[Any]:
    """What a node of the graph keeps alive: the nodes before it, a parameter, and the tensors saved for the backward.

    `_raw_saved_...` is what autograd packed. Where a hook packed it (checkpoint, save_on_cpu) it may be any object,
    and the function that would unpack it is kept too.
    """
    for before, _ in node.next_functions:
        yield before
    yield getattr(node, "variable", None)  # of AccumulateGrad: the parameter
    for name in _saved_names(type(node)):
        try:
            saved = getattr(node, name)
        except RuntimeError:  # torch's answer once a backward has freed them
            continue
        for one in saved if isinstance(saved, tuple | list) else (saved,):
            yield from packed(one)


def is_saved(value: Any) -> bool:
    """Whether a value is a tensor that autograd packed; a checkpoint of torch 2.14 keeps its inputs in such."""
    return type(value).__name__ == "SavedTensor"


def packed(saved: Any) -> Iterator[Any]:
    """What autograd packed, and the function that would unpack it."""
    try:
        yield getattr(saved, "data", None)
        yield getattr(saved, "unpack_hook", None)
    except RuntimeError:  # hooks that are written in C++ do not show what they packed
        return


def _saved_names(kind: type) -> tuple[str, ...]:
    if kind not in _SAVED:
        _SAVED[kind] = tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))
    return _SAVED[kind]


def array_memory(value: Any) -> Any:
    """The object whose memory a NumPy array uses, such as the tensor whose `.numpy()` it is; None for its own."""
    return value.base if type(value) is np.ndarray else None
