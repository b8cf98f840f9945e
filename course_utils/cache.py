"""Who holds the memory, and what does empty_cache really do? Lesson 07's front door.

    memory_report()                      # where a device's memory is, in one table that adds up
    with Effects().of("del batch"): …    # what an act changes
    who_holds(model); free("model")      # who keeps it alive, and how it goes
    read_blocks().draw()                 # the allocator's segments and their pieces
    explain_oom(error)                   # batch too large, memory in pieces, or another process

Everything is re-exported from the module that does it; importing this starts no CUDA.
"""

from __future__ import annotations

from course_utils.allocation_trace import AllocationTrace, record_allocations
from course_utils.allocator_settings import AllocatorSettings, allocator_settings, set_allocator
from course_utils.holders import largest_tensors, who_holds
from course_utils.memory_blocks import Blocks, from_json, from_torch, load_blocks, read_blocks
from course_utils.memory_effects import Effect, Effects, measure
from course_utils.memory_report import MemoryReport, memory_report
from course_utils.oom_reading import OomReading, explain_oom
from course_utils.release import free
from course_utils.simulated_allocator import SimulatedAllocator

__all__ = [
    "AllocationTrace",
    "AllocatorSettings",
    "Blocks",
    "Effect",
    "Effects",
    "MemoryReport",
    "OomReading",
    "SimulatedAllocator",
    "allocator_settings",
    "explain_oom",
    "free",
    "from_json",
    "from_torch",
    "largest_tensors",
    "load_blocks",
    "measure",
    "memory_report",
    "read_blocks",
    "record_allocations",
    "set_allocator",
    "who_holds",
]
