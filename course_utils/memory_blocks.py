"""Memory in pieces: the segments that PyTorch's allocator got from the driver, and the blocks it cut them into.

    blocks = read_blocks()               # of the GPU; on a CPU: SimulatedAllocator(...).blocks()
    blocks.unusable_share(64 * 2**20)    # of what is free, the share in pieces too small for 64 MiB
    blocks.draw(64 * 2**20)

A segment is one allocation of the driver's (cudaMalloc). A tensor gets a block of it. Free blocks that lie side by side
merge; between two segments, or around a living block, they do not.
Source of the format: the docstring of torch.cuda.memory._snapshot (torch 2.11 and 2.14).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from course_utils.arguments import whole
from course_utils.views import html_table, mebibytes, number, text_table

SMALL_BYTES = 2**20  # the largest request that goes to the pool for small ones (c10/core/AllocatorConfig.h, kSmallSize)
State = Literal["live", "waiting", "free"]
Pool = Literal["small", "large"]

# "waiting" is freed by Python, and another stream has still to finish with it. Older versions say pending.
_STATES: dict[str, State] = {
    "active_allocated": "live",
    "active_awaiting_free": "waiting",
    "active_pending_free": "waiting",
    "inactive": "free",
}
_NAMES: dict[State, str] = {"live": "active_allocated", "waiting": "active_awaiting_free", "free": "inactive"}
_LONGEST_JSON = 64 * 2**20
_MOST_BLOCKS = 1_000_000


@dataclass(frozen=True)
class Block:
    """A piece of a segment."""

    size_bytes: int
    state: State


@dataclass(frozen=True)
class Segment:
    """One allocation of the driver's, in its blocks, in the order of their addresses."""

    address: int
    pool: Pool
    blocks: tuple[Block, ...]

    @property
    def size_bytes(self) -> int:
        """What the driver gave."""
        return sum(block.size_bytes for block in self.blocks)

    @property
    def is_free(self) -> bool:
        """Whether no tensor lives in it: only then can `empty_cache()` give it back."""
        return all(block.state == "free" for block in self.blocks)


@dataclass(frozen=True)
class Blocks:
    """All segments of one allocator at one moment; `source` says whose they are, or why there are none."""

    segments: tuple[Segment, ...]
    source: str

    @property
    def reserved_bytes(self) -> int:
        """All that the driver gave."""
        return sum(segment.size_bytes for segment in self.segments)

    @property
    def free_bytes(self) -> int:
        """What no tensor uses: reserved, and not allocated."""
        return sum(block.size_bytes for block in self._free())

    @property
    def largest_free_bytes(self) -> int:
        """The largest free piece."""
        return max((block.size_bytes for block in self._free()), default=0)

    @property
    def releasable_bytes(self) -> int:
        """What `empty_cache()` gives back: the segments in which nothing lives."""
        return sum(segment.size_bytes for segment in self.segments if segment.is_free)

    @property
    def stuck_bytes(self) -> int:
        """Free bytes that stay reserved after `empty_cache()`, because a tensor lives in their segment."""
        return self.free_bytes - self.releasable_bytes

    def unusable_bytes(self, request_bytes: int) -> int:
        """Free bytes in pieces that cannot hold a tensor of `request_bytes`: too small, or of the other pool."""
        whole("request_bytes", request_bytes)
        pool: Pool = "small" if request_bytes <= SMALL_BYTES else "large"
        usable = [block.size_bytes for block in self._free(pool) if block.size_bytes >= request_bytes]
        return self.free_bytes - sum(usable)

    def unusable_share(self, request_bytes: int) -> float | None:
        """The same as a share of what is free (0 to 1); None where nothing is free."""
        return self.unusable_bytes(request_bytes) / self.free_bytes if self.free_bytes else None

    def verdict(self, request_bytes: int, driver_free_bytes: int = 0) -> str:
        """Can a tensor of `request_bytes` be made, if the driver has `driver_free_bytes` more? One sentence."""
        asked = mebibytes(whole("request_bytes", request_bytes))
        left = whole("driver_free_bytes", driver_free_bytes, 0) + self.releasable_bytes
        if self.unusable_bytes(request_bytes) < self.free_bytes:
            return f"Fits: {asked} go into a free block, and the driver is not asked."
        if request_bytes <= left:
            return f"Fits: no free block holds {asked}, but the driver can give a new segment of that size."
        if request_bytes > self.stuck_bytes + left:
            return f"Too little memory: {asked} are asked for, {mebibytes(self.stuck_bytes + left)} are free in all."
        return (
            f"Fragmented: {mebibytes(self.stuck_bytes + left)} are free in all, but the largest piece holds "
            f"{mebibytes(max(self.largest_free_bytes, left))}, and {asked} are asked for."
        )

    def draw(self, request_bytes: int | None = None, ax: Any = None) -> Any:
        """Draw the segments as bars cut into blocks, beside a request of that size if one is given."""
        from course_utils.memory_blocks_view import draw_blocks

        return draw_blocks(self, request_bytes, ax)

    def to_json(self) -> str:
        """As JSON, in the form of `torch.cuda.memory_snapshot()`; `from_json` reads it."""
        return json.dumps([_as_torch(segment) for segment in self.segments])

    def _free(self, pool: Pool | None = None) -> list[Block]:
        chosen = [segment for segment in self.segments if pool in (None, segment.pool)]
        return [block for segment in chosen for block in segment.blocks if block.state == "free"]

    def _rows(self) -> list[tuple[str, str]]:
        return [
            ("segments", number(len(self.segments))),
            ("reserved", mebibytes(self.reserved_bytes)),
            ("free in them", mebibytes(self.free_bytes)),
            ("largest free piece", mebibytes(self.largest_free_bytes)),
            ("empty_cache() gives back", mebibytes(self.releasable_bytes)),
            ("stays reserved although free", mebibytes(self.stuck_bytes)),
        ]

    def __repr__(self) -> str:
        return text_table(("Allocator's blocks", self.source), self._rows())

    def _repr_html_(self) -> str:
        return html_table(("Allocator's blocks", self.source), self._rows())


def read_blocks(device: torch.device | str | None = None) -> Blocks:
    """The blocks of this process on a GPU (None: the current one). Without CUDA running: none, and the reason."""
    if not torch.cuda.is_initialized():
        return Blocks((), "no blocks: CUDA has not been started in this process")
    index = None if device is None else torch.device(device).index
    index = torch.cuda.current_device() if index is None else index
    segments = [one for one in torch.cuda.memory_snapshot() if one.get("device", index) == index]  # type: ignore[no-untyped-call,unused-ignore]
    return from_torch(segments, f"cuda:{index}, recorded")


def from_torch(segments: Sequence[Mapping[str, Any]], source: str) -> Blocks:
    """`Blocks` from what `torch.cuda.memory_snapshot()` returns. ValueError for what is not in that form."""
    if not isinstance(segments, Sequence) or isinstance(segments, str | bytes):
        raise ValueError(f"A memory snapshot is a list of segments, not {type(segments).__name__}.")
    made: list[Segment] = []
    count = 0
    for number_, segment in enumerate(segments):
        try:
            blocks = tuple(Block(_size(block["size"]), _STATES[block["state"]]) for block in segment["blocks"])
            pool: Pool = "small" if segment["segment_type"] == "small" else "large"
            made.append(Segment(_size(segment["address"]), pool, blocks))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"Segment {number_} of the snapshot is not as PyTorch writes it: {error!r:.120}."
            ) from None
        count += len(blocks)
        if count > _MOST_BLOCKS:
            raise ValueError(f"The snapshot has more than {_MOST_BLOCKS:,} blocks: that is more than this reads.")
    return Blocks(tuple(sorted(made, key=lambda segment: segment.address)), source)


def from_json(text: str, source: str = "read from JSON") -> Blocks:
    """`Blocks` from JSON: a list of segments, or a snapshot that has one under "segments". ValueError if it is not."""
    if len(text) > _LONGEST_JSON:
        raise ValueError(f"This JSON is longer than {mebibytes(_LONGEST_JSON)}: that is more than this reads.")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"This is no JSON: {str(error)[:120]}.") from None
    return from_torch(found["segments"] if isinstance(found, dict) and "segments" in found else found, source)


def load_blocks(path: str | Path) -> Blocks:
    """`Blocks` from a JSON file. A pickle, as `torch.cuda.memory._dump_snapshot` writes, is not opened: ValueError."""
    path = Path(path)
    with path.open("rb") as file:
        data = file.read(_LONGEST_JSON + 1)
    if data[:1] == b"\x80":
        raise ValueError(
            f"{path.name} is a pickle, and opening one runs whatever is in it. Write JSON where the snapshot is made: "
            "json.dump(torch.cuda.memory_snapshot(), file)."
        )
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path.name} is no JSON: it is not text.") from None
    return from_json(text, f"read from {path.name}")


def _size(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r:.40} is no size in bytes")
    return value


def _as_torch(segment: Segment) -> dict[str, Any]:
    address, blocks = segment.address, []
    for block in segment.blocks:
        blocks.append({"address": address, "size": block.size_bytes, "state": _NAMES[block.state]})
        address += block.size_bytes
    return {
        "address": segment.address,
        "total_size": segment.size_bytes,
        "segment_type": segment.pool,
        "blocks": blocks,
    }
