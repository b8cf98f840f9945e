"""What a training step really asks the allocator for: recorded on the CPU, replayed in a `SimulatedAllocator`.

    trace = record_allocations(step, steps=4)
    kept, emptied = (SimulatedAllocator(2**30) for _ in range(2))
    trace.replay(kept)
    trace.replay(emptied, empty_cache_every=1)
    emptied.driver_allocations / kept.driver_allocations

The requests are real: the sizes of the tensors that PyTorch makes, in their order, and when each is freed. What kernels
take besides, for the moment that they run, is not seen, and a GPU's kernels take other amounts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from course_utils.arguments import whole
from course_utils.simulated_allocator import SimulatedAllocator
from course_utils.simulated_memory import SimulatedMemory
from course_utils.views import mebibytes, number

Event = tuple[int, int]  # which memory, and its bytes: more than 0 when it is made, less when it is freed


@dataclass(frozen=True)
class AllocationTrace:
    """The requests of some steps, in their order."""

    steps: tuple[tuple[Event, ...], ...]

    @property
    def requests(self) -> int:
        """How often memory was asked for."""
        return sum(change > 0 for step in self.steps for _, change in step)

    @property
    def peak_bytes(self) -> int:
        """The most that was held at once of what was asked for here."""
        now = peak = 0
        for change in (change for step in self.steps for _, change in step):
            now += change
            peak = max(peak, now)
        return peak

    def replay(self, allocator: SimulatedAllocator, *, empty_cache_every: int | None = None) -> None:
        """Ask `allocator` for the same, step by step; after every so many steps its cache is emptied."""
        if empty_cache_every is not None:
            whole("empty_cache_every", empty_cache_every)
        held: dict[int, list[int]] = {}
        for count, step in enumerate(self.steps, 1):
            for memory, change in step:
                if change > 0:
                    held.setdefault(memory, []).append(allocator.allocate(change))
                else:
                    for address in held.pop(memory):
                        allocator.free(address)
            if empty_cache_every and count % empty_cache_every == 0:
                allocator.empty_cache()

    def __repr__(self) -> str:
        return (
            f"AllocationTrace: {len(self.steps)} steps, {number(self.requests)} requests, "
            f"{mebibytes(self.peak_bytes)} at the peak"
        )


def record_allocations(step: Callable[[], object], *, steps: int = 4, warmup: int = 1) -> AllocationTrace:
    """Call `step()` a few times on the CPU and note every tensor's memory. Warm-up calls (Adam's state) come first.

    What was made before is not in the trace. A step on a GPU gives an empty one. What `step` raises passes through.
    """
    whole("steps", steps)
    for _ in range(whole("warmup", warmup, 0)):
        step()
    recorded = []
    with _Recorder() as recorder:
        for _ in range(steps):
            step()
            recorded.append(tuple(recorder.events))
            recorder.events.clear()
    return AllocationTrace(tuple(recorded))


class _Recorder(SimulatedMemory):
    """Notes what `SimulatedMemory` counts."""

    def __init__(self) -> None:
        super().__init__(None)
        self.events: list[Event] = []

    def _count(self, tensor: torch.Tensor, operation: str) -> None:
        before = self._used
        super()._count(tensor, operation)
        if self._used > before:
            self.events.append((_identity_of(tensor), self._used - before))

    def _forget(self, identity: int) -> None:
        before = self._used
        super()._forget(identity)
        if self._used < before:
            self.events.append((identity, self._used - before))


def _identity_of(tensor: torch.Tensor) -> int:
    storage: Any = tensor.untyped_storage()
    return int(storage._cdata)
