"""Out of memory: which errors mean it, and (SimulatedMemory) a limit that makes a CPU run out on purpose.

`classify_oom(error)` says whether a smaller batch can help. Libraries match parts of messages, and each backend words
its own: cuBLAS and cuDNN report a failed allocation without the word memory, a DataLoader reports "out of shared
memory" when no GPU is short of anything, and after a device-side assert nothing on the GPU works any more.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from course_utils.simulated_memory import SimulatedMemory

__all__ = ["OomVerdict", "SimulatedMemory", "classify_oom"]

Kind = Literal["out of memory", "maybe", "fatal", "loader", "not ours"]


@dataclass(frozen=True)
class OomVerdict:
    """What an error means for the batch size: `kind`, the words in it that say so, and what to do.

    `kind` is "out of memory" (try a smaller batch), "maybe" (a smaller batch may help: try one once), "fatal" (the
    device will not work again in this process, or never will with this build), "loader" (a DataLoader's host memory or
    shared memory: the batch on the device is not to blame) or "not ours" (an ordinary error: raise it).
    """

    kind: Kind
    reason: str
    advice: str

    @property
    def smaller_may_help(self) -> bool:
        """Whether it makes sense to try a smaller batch."""
        return self.kind in ("out of memory", "maybe")


_SMALLER = "Use a smaller batch; leave the except block before you try again, because the error keeps tensors alive."
_HOST = "The computer's own memory (RAM) is short, not the GPU's: use a smaller batch, or keep less data in RAM."
_MAYBE = (
    "This may be a lack of memory or a limit on sizes: try a smaller batch once; if it fails alike, size is not why."
)
_RESTART = "The GPU cannot be used again in this process: restart the runtime, and find the cause before you retry."
_BUILD = (
    "This PyTorch has no code for this GPU: no batch size will help. Install a build that has, or take another GPU."
)
_LOADER = "The DataLoader ran out, not the model: use fewer workers, a smaller prefetch_factor, or a larger /dev/shm."
_NONE = "A smaller batch will not help."

# In this order, the first match decides; case does not matter.
_RULES: tuple[tuple[Kind, str, str], ...] = (
    ("fatal", _BUILD, r"no kernel image is available|device kernel image is invalid"),
    # Most of these are CUDA's sticky errors: "To continue using CUDA, the process must be terminated and relaunched"
    # (cudaErrorIllegalAddress and others in the CUDA Runtime API's list of errors).
    (
        "fatal",
        _RESTART,
        r"device-side assert|illegal memory access|illegal instruction|illegal address|misaligned address"
        r"|unspecified launch failure|hardware stack error|invalid program counter|invalid address space"
        r"|uncorrectable ECC error|launch timed out and was terminated|fallen off the bus",
    ),
    # Worker processes hand batches over through /dev/shm.
    (
        "loader",
        _LOADER,
        r"out of shared memory|DataLoader worker .*(?:is killed by signal|exited unexpectedly)"
        r"|shared memory (?:object|file mapping)|unable to (?:mmap|write to file).*torch_"
        r"|(?:MemoryError|can't allocate memory|DefaultCPUAllocator).*in DataLoader worker process"
        r"|in DataLoader worker process.*(?:MemoryError|DefaultCPUAllocator)",
    ),
    # Triton: a kernel's tile does not fit the on-chip memory of a multiprocessor, whatever the batch.
    ("not ours", _NONE, r"out of resources?: (?:shared memory|threads|registers)"),
    (
        "out of memory",
        _SMALLER,
        r"(?:CUDA|HIP|XPU|MPS backend|NPU|TPU|HPU)\b.{0,40}\bout of memory|out of memory\W+tried to allocate"
        r"|CUDA_ERROR_OUT_OF_MEMORY|(?:cuda|hip)ErrorMemoryAllocation|(?:cuda|hip)ErrorOutOfMemory"
        r"|(?:CUBLAS|CUDNN|CUSOLVER|CUSPARSE|HIPBLAS|MIOPEN|HIPFFT|CUFFT)_(?:STATUS_)?ALLOC_FAILED"
        r"|CUDNN_STATUS_\w*ALLOCATION_FAILED|ROCBLAS_STATUS_MEMORY_ERROR|failed to CUDA calloc|RESOURCE_EXHAUSTED",
    ),
    ("out of memory", _HOST, r"DefaultCPUAllocator: (?:can't allocate|not enough) memory|Unable to allocate .*array"),
    # mlcommons/algorithmic-efficiency#185: a CUBLAS_STATUS_NOT_INITIALIZED that was not memory; pytorch/pytorch#81620:
    # a CUDNN_STATUS_INTERNAL_ERROR that was.
    (
        "maybe",
        _MAYBE,
        r"CUDNN_STATUS_(?:NOT_SUPPORTED|INTERNAL_ERROR|EXECUTION_FAILED|MAPPING_ERROR|NOT_INITIALIZED)"
        r"|CUBLAS_STATUS_(?:NOT_INITIALIZED|INTERNAL_ERROR|EXECUTION_FAILED)|CUSOLVER_STATUS_INTERNAL_ERROR"
        r"|unable to find a valid cuDNN algorithm|unable to find an engine|canUse32BitIndexMath|32-bit index"
        r"|INT_MAX|invalid configuration argument|Errno 12\b",
    ),
)
_PATTERNS = [(kind, advice, re.compile(pattern, re.IGNORECASE | re.DOTALL)) for kind, advice, pattern in _RULES]
_GENERIC = re.compile(r"\bout of memory\b", re.IGNORECASE)


def classify_oom(error: BaseException) -> OomVerdict:
    """Say whether `error` means that memory ran out, and what to do.

    It reads the error's type and all its arguments, then the errors that led to it: causes, contexts that were not
    suppressed, and members of an exception group. A fatal error anywhere among them decides; otherwise the first that
    means something, from the outside in. An error that DataParallel or a worker wrapped carries the text of the
    original, and is found by it.
    """
    if not isinstance(error, BaseException):
        raise TypeError(f"classify_oom takes an exception, not {type(error).__name__}: give it the `error` you caught.")
    if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
        return OomVerdict("not ours", type(error).__name__, _NONE)
    verdicts = [_judge(one) for one in _with_causes(error)]
    for wanted in (("fatal",), ("loader",), ("out of memory", "maybe")):
        for verdict in verdicts:
            if verdict.kind in wanted:
                return verdict
    return verdicts[0]


def _judge(error: BaseException) -> OomVerdict:
    """The verdict on one error, its causes left aside."""
    text = " ".join([*(str(argument) for argument in error.args), str(error)])
    for kind, advice, pattern in _PATTERNS:
        if found := pattern.search(text):
            return OomVerdict(kind, _first_line(found.group()), advice)
    name = type(error).__name__
    if isinstance(error, MemoryError):
        return OomVerdict("out of memory", name, _HOST)
    if name in ("OutOfMemoryError", "OutOfMemory"):
        return OomVerdict("out of memory", name, _SMALLER)
    if isinstance(error, RuntimeError) and (found := _GENERIC.search(text)):
        return OomVerdict("out of memory", found.group(), _SMALLER)
    return OomVerdict("not ours", name, _NONE)


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    """The error, then what led to it, each once: chains may be long, and may be circular."""
    waiting, seen = [error], set()
    while waiting:
        one = waiting.pop(0)
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        if isinstance(one, BaseExceptionGroup):
            waiting.extend(one.exceptions)
        before = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
        if before is not None:
            waiting.append(before)


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0][:120]
