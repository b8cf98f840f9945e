"""What an out-of-memory error says in numbers: is the batch too large, is memory in pieces, or is somebody else there?

    try:
        step()
    except torch.OutOfMemoryError as error:
        reading = explain_oom(error)       # keeps the numbers, not the error
    reading

PyTorch's message has the figures and one piece of advice for every case. Most errors are not fragmentation.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from course_utils.oom import classify_oom
from course_utils.views import MISSING, html_table, mebibytes, text_table

Cause = Literal["too large", "fragmentation", "another process", "this process", "not memory", "unknown"]

# More than this process's own CUDA context takes: some 200 to 700 MB were reported (pytorch/pytorch#28113, #60150).
_CONTEXT_BYTES = 2**30
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = r"([\d,]+(?:\.\d+)?) (bytes|[KMGT]iB)"
_PATTERNS = {
    "asked_bytes": (rf"[Tt]ried to allocate {_SIZE}",),
    "total_bytes": (rf"total capaci?ty of {_SIZE}", rf"{_SIZE} total capacity", rf"of {_SIZE} are in use"),
    "free_bytes": (rf"of which {_SIZE} is free", rf"{_SIZE} free"),
    "allocated_bytes": (rf"{_SIZE} is allocated by PyTorch", rf"{_SIZE} already allocated"),
    "unallocated_bytes": (rf"{_SIZE} is reserved by PyTorch but unallocated",),
    "reserved_bytes": (rf"{_SIZE} reserved in total by PyTorch",),  # torch 2.0 and older
    "allowed_bytes": (rf"{_SIZE} allowed;",),  # after torch.cuda.set_per_process_memory_fraction
}
_SIMULATED = re.compile(r"; ([\d,]+) of ([\d,]+) bytes are in use")
_ADVICE: dict[Cause, str] = {
    "too large": "The whole GPU would not hold it: use a smaller batch, a smaller model or a larger GPU.",
    "fragmentation": "Set expandable_segments:True in the first cell after a restart, as set_allocator() does, or "
    "allocate the largest batch first.",
    "another process": "Close what else uses this GPU: other notebooks' kernels, a job that hangs. Emptying this "
    "process's cache cannot help.",
    "this process": "Living tensors fill it: free what is not needed (who_holds finds out who holds it), or use a "
    "smaller batch. Neither empty_cache() nor another allocator setting can help.",
    "not memory": "It is no out-of-memory error: read its message.",
    "unknown": "The message does not tell: look at memory_report(), and try again.",
}


@dataclass(frozen=True)
class OomReading:
    """The figures of one out-of-memory message, in bytes (None: it does not say), and what they mean.

    `asked_bytes` is what PyTorch asked the driver for: a small tensor's message may say 20 MiB, the size of a segment.
    Where a limit is set for this process, `total_bytes` is the limit, and `free_bytes` what it leaves.
    """

    cause: Cause
    sentence: str
    asked_bytes: int | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    allocated_bytes: int | None = None
    unallocated_bytes: int | None = None

    @property
    def rest_bytes(self) -> int | None:
        """Used on the device and not by this PyTorch: CUDA contexts and other processes."""
        known = (self.total_bytes, self.free_bytes, self.allocated_bytes, self.unallocated_bytes)
        total, free, allocated, unallocated = (value if value is not None else -1 for value in known)
        return None if None in known else max(0, total - free - allocated - unallocated)

    @property
    def advice(self) -> str:
        """What to do."""
        return _ADVICE[self.cause]

    def _rows(self) -> list[tuple[str, str]]:
        figures = [
            ("asked for", self.asked_bytes),
            ("allocated: living tensors", self.allocated_bytes),
            ("reserved, not allocated", self.unallocated_bytes),
            ("context and other processes", self.rest_bytes),
            ("free", self.free_bytes),
            ("total", self.total_bytes),
        ]
        return [
            *((name, MISSING if value is None else mebibytes(value)) for name, value in figures),
            ("cause", f"{self.cause}. {self.sentence}"),
            ("do", self.advice),
        ]

    def __repr__(self) -> str:
        return text_table(("Out of memory", ""), self._rows())

    def _repr_html_(self) -> str:
        return html_table(("Out of memory", ""), self._rows())


def explain_oom(error: BaseException | str) -> OomReading:
    """Read the figures of an out-of-memory error, or of its message. The error itself is not kept.

    It knows the messages of PyTorch's CUDA allocator (old and new) and of the course's simulations. TypeError for
    anything but an exception or a text.
    """
    if isinstance(error, str):
        error = RuntimeError(error)
    if not isinstance(error, BaseException):
        raise TypeError(f"explain_oom takes an exception or its text, not {type(error).__name__}.")
    verdict = classify_oom(error)
    if verdict.kind != "out of memory":
        return OomReading("not memory", f"classify_oom calls it {verdict.kind!r}: {verdict.reason}.")
    text = str(error)
    found = {name: _first(patterns, text) for name, patterns in _PATTERNS.items()}
    reserved = found.pop("reserved_bytes")
    if reserved is not None and found["allocated_bytes"] is not None:
        found["unallocated_bytes"] = max(0, reserved - found["allocated_bytes"])
    allowed, allocated, unallocated = (
        found.get(name) for name in ("allowed_bytes", "allocated_bytes", "unallocated_bytes")
    )
    if allowed is not None and allocated is not None and unallocated is not None:
        found |= {"total_bytes": allowed, "free_bytes": max(0, allowed - allocated - unallocated)}
    del found["allowed_bytes"]
    if simulated := _SIMULATED.search(text):
        used, limit = (int(group.replace(",", "")) for group in simulated.groups())
        found |= {"allocated_bytes": used, "total_bytes": limit, "free_bytes": limit - used, "unallocated_bytes": 0}
    bare = OomReading("unknown", "", **found)
    cause, sentence = _judge(bare)
    return OomReading(cause, sentence, **found)


def _judge(reading: OomReading) -> tuple[Cause, str]:
    asked, total, free = reading.asked_bytes, reading.total_bytes, reading.free_bytes
    unallocated, rest = reading.unallocated_bytes, reading.rest_bytes
    if asked is None or total is None or free is None or unallocated is None or rest is None:
        return "unknown", "It does not say how much was asked for, free and reserved."
    if asked > total:
        return "too large", f"{mebibytes(asked)} at once are more than the GPU has."
    if asked <= free:
        return (
            "unknown",
            "The driver says that more is free than was asked for: another process may have freed it just then, or a "
            "limit is set (torch.cuda.set_per_process_memory_fraction).",
        )
    if asked <= free + unallocated:
        besides = f" Besides, {mebibytes(rest)} are used outside this PyTorch." if rest > _CONTEXT_BYTES else ""
        return (
            "fragmentation",
            f"PyTorch holds {mebibytes(unallocated)} that no tensor uses, enough with what is free, but in pieces."
            + besides,
        )
    if asked <= free + unallocated + rest - _CONTEXT_BYTES:
        return (
            "another process",
            f"{mebibytes(rest)} are used outside this PyTorch, more than a CUDA context takes: without the others it "
            "would fit.",
        )
    much = f"Only {mebibytes(unallocated)} are" if unallocated else "Nothing is"
    return "this process", f"{much} reserved and not allocated: memory in pieces is not the reason."


def _first(patterns: tuple[str, ...], text: str) -> int | None:
    for pattern in patterns:
        if match := re.search(pattern, text):
            return round(float(match[1].replace(",", "")) * _UNITS[match[2]])
    return None
