"""A memory limit for tensors on the CPU, so that "out of memory" can be met and studied without a GPU.

    with SimulatedMemory(limit_bytes=200 * 2**20) as memory:
        memory.track(model)
        train_one_step(batch_size=512)        # raises torch.OutOfMemoryError, if that needs more
    memory.peak_bytes

Import it from `course_utils.oom`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class SimulatedMemory(TorchDispatchMode):
    """Counts the bytes of the CPU tensors that are made inside it and still alive, and raises above `limit_bytes`.

    Every operation is seen, those of backward and of the optimizer too. A tensor's memory counts once, however many
    views it has, and no longer than some tensor or the autograd graph holds it. What was made before counts if it is
    given to `track`. An allocation that would pass the limit raises `torch.OutOfMemoryError` and does not count.
    `limit_bytes=None` only measures.

    A tensor is made before it is counted, so the host needs room for the one that is too many.

    It differs from a GPU: there is no allocator that rounds sizes, caches and fragments, and what an operation needs
    only while it runs is not seen. Not counted either: tensors on other devices, and data that torch takes over from
    lists or NumPy arrays, which is in the host's memory. It holds for the thread that entered it.
    """

    def __init__(self, limit_bytes: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        if limit_bytes is not None and (
            isinstance(limit_bytes, bool) or not isinstance(limit_bytes, int) or limit_bytes <= 0
        ):
            raise ValueError(f"limit_bytes must be a positive whole number of bytes, or None, not {limit_bytes!r}.")
        self._limit = limit_bytes
        self._used = self._peak = 0
        self._counted: dict[int, int] = {}  # bytes by storage, of the living ones

    @property
    def limit_bytes(self) -> int | None:
        """The limit, or None where it only measures."""
        return self._limit

    @property
    def used_bytes(self) -> int:
        """The bytes of the counted tensors that are alive now."""
        return self._used

    @property
    def peak_bytes(self) -> int:
        """The most that `used_bytes` was since the start or the last `reset_peak()`."""
        return self._peak

    def reset_peak(self) -> None:
        """Begin a new peak at what is used now."""
        self._peak = self._used

    def track(self, *things: Any) -> None:
        """Count what is there already: modules (weights, buffers, gradients), optimizers (state), tensors."""
        for tensor in _tensors(things):
            self._count(tensor, "tracking a tensor")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, then count the memory that it made."""
        kwargs = kwargs or {}
        given = {_identity(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        result = func(*args, **kwargs)
        for leaf in tree_leaves(result):
            # A view, or the result of an operation in place, is in memory that was there before. So is what torch
            # takes over from a list or a NumPy array: it arrives as the argument of `aten.lift_fresh`.
            if isinstance(leaf, torch.Tensor) and ((known := _identity(leaf)) in self._counted or known not in given):
                self._count(leaf, str(func))
        return result

    def _count(self, tensor: torch.Tensor, operation: str) -> None:
        identity = _identity(tensor)
        if identity is None:
            return
        storage = tensor.untyped_storage()
        size, before = storage.nbytes(), self._counted.get(identity, 0)
        if self._limit is not None and size > before and self._used + size - before > self._limit:
            raise torch.OutOfMemoryError(
                f"simulated: out of memory. {operation} tried to allocate {size - before:,} bytes; "
                f"{self._used:,} of {self._limit:,} bytes are in use."
            )
        if identity not in self._counted:
            weakref.finalize(storage, self._forget, identity).atexit = False
        self._counted[identity] = size
        self._used += size - before
        self._peak = max(self._peak, self._used)

    def _forget(self, identity: int) -> None:
        self._used -= self._counted.pop(identity, 0)

    def __repr__(self) -> str:
        limit = "no limit" if self._limit is None else f"limit {self._limit:,}"
        return f"SimulatedMemory: {self._used:,} bytes in use, peak {self._peak:,}, {limit}"


def _identity(tensor: torch.Tensor) -> int | None:
    """What tells the tensor's memory from other memory; None where it is none of the CPU's (or a fake tensor's)."""
    if tensor.layout != torch.strided:
        return None
    storage = tensor.untyped_storage()
    return storage._cdata if storage.device.type == "cpu" else None


def _tensors(things: Iterable[Any]) -> Iterable[torch.Tensor]:
    for thing in things:
        if isinstance(thing, nn.Module):
            for tensor in (*thing.parameters(), *thing.buffers()):
                yield tensor
                if tensor.is_leaf and tensor.grad is not None:
                    yield tensor.grad
        elif isinstance(thing, torch.optim.Optimizer):
            yield from _tensors(thing.state.values())
        elif isinstance(thing, torch.Tensor):
            yield thing
        elif isinstance(thing, Mapping):
            yield from _tensors(thing.values())
        elif isinstance(thing, list | tuple):
            yield from _tensors(thing)
        elif not isinstance(thing, int | float | str | bool | None):
            raise TypeError(
                f"track takes modules, optimizers, tensors and containers of them, not {type(thing).__name__}."
            )
