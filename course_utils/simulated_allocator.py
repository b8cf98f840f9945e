"""A small model of PyTorch's caching allocator, so that its cache and its fragments can be seen without a GPU.

    memory = SimulatedAllocator(total_bytes=512 * 2**20)
    batch = memory.allocate(48 * 2**20)
    memory.free(batch)                     # cached: reserved stays
    memory.empty_cache()                   # to the driver
    memory.blocks().draw()

The rules are those of c10/cuda/CUDACachingAllocator.cpp, with the sizes of c10/core/AllocatorConfig.h (read in torch
2.11 and 2.14): requests are rounded up to 512 bytes; up to 1 MiB they come from segments of 2 MiB, under 10 MiB from
segments of 20 MiB, above from one of their own size in whole 2 MiB; the smallest free block that fits is taken and
split; neighbours merge when they are free; where the driver has no more, free segments go back to it, and it is asked
again. What is left out: streams, the settings other than expandable_segments, and time. No tensor is made.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from course_utils.arguments import whole
from course_utils.memory_blocks import SMALL_BYTES, Block, Blocks, Pool, Segment
from course_utils.views import mebibytes

_ROUND, _SMALL_SEGMENT, _LARGE_SEGMENT = 512, 2 * 2**20, 20 * 2**20
_LARGE_REQUEST, _ROUND_LARGE = 10 * 2**20, 2 * 2**20
_GAP = 256 * _LARGE_SEGMENT  # between the made-up addresses of two segments: whole pages


@dataclass
class _Piece:
    size: int
    live: bool = False


@dataclass
class _Segment:
    address: int
    pool: Pool
    pieces: list[_Piece] = field(default_factory=list)

    @property
    def size(self) -> int:
        return sum(piece.size for piece in self.pieces)


class SimulatedAllocator:
    """Hands out addresses from `total_bytes` of imagined device memory, as PyTorch's allocator would from real memory.

    `expandable=True` imitates `expandable_segments:True`: one segment for each of the two pools, which grows by pages
    at its end. (The real one can also fill holes; here a page that was given back inside stays a hole.)

    `driver_allocations` and `driver_frees` count the calls of the driver that the cache is there to save: `cudaMalloc`
    and `cudaFree` (which waits for the device), or for one page its mapping and unmapping.
    """

    def __init__(self, total_bytes: int, *, expandable: bool = False) -> None:
        self.total_bytes = whole("total_bytes", total_bytes)
        self.expandable = expandable
        self.driver_allocations = self.driver_frees = 0
        self._segments: list[_Segment] = []
        self._next_address = _GAP

    @property
    def allocated_bytes(self) -> int:
        """What `allocate` has handed out, rounded up as the allocator does."""
        return sum(piece.size for segment in self._segments for piece in segment.pieces if piece.live)

    @property
    def reserved_bytes(self) -> int:
        """What the driver has given."""
        return sum(segment.size for segment in self._segments)

    @property
    def driver_free_bytes(self) -> int:
        """What the driver has left."""
        return self.total_bytes - self.reserved_bytes

    def allocate(self, size_bytes: int) -> int:
        """Take memory for a tensor; returns its address. `torch.OutOfMemoryError`, in PyTorch's words, if none fits."""
        size = -(-whole("size_bytes", size_bytes) // _ROUND) * _ROUND
        pool: Pool = "small" if size <= SMALL_BYTES else "large"
        place = self._find(size, pool)
        if place is None and not self._grow(size, pool):
            self.empty_cache()
            if not self._grow(size, pool):
                raise torch.OutOfMemoryError(self._complaint(size))
        segment, index = place or self._find(size, pool) or (None, 0)
        assert segment is not None, "a segment that has just grown holds the request"
        piece = segment.pieces[index]
        remaining = piece.size - size
        if remaining >= _ROUND if pool == "small" or self.expandable else remaining > SMALL_BYTES:
            segment.pieces.insert(index + 1, _Piece(remaining))
            piece.size = size
        piece.live = True
        return segment.address + sum(before.size for before in segment.pieces[:index])

    def free(self, address: int) -> None:
        """Give the tensor's memory back to the allocator, which keeps it. ValueError if nothing lives at `address`."""
        for segment in self._segments:
            position = segment.address
            for index, piece in enumerate(segment.pieces):
                if position == address and piece.live:
                    piece.live = False
                    _merge(segment, index)
                    return
                position += piece.size
        raise ValueError(f"Nothing lives at address {address}.")

    def empty_cache(self) -> None:
        """Give the driver what it can get: segments in which nothing lives, or free whole pages if expandable."""
        for segment in list(self._segments):
            if self.expandable:
                self._unmap(segment)
            elif not any(piece.live for piece in segment.pieces):
                self._segments.remove(segment)
                self.driver_frees += 1

    def blocks(self) -> Blocks:
        """The segments as they are now."""
        segments = tuple(
            Segment(
                segment.address,
                segment.pool,
                tuple(Block(piece.size, "live" if piece.live else "free") for piece in segment.pieces),
            )
            for segment in self._segments
        )
        return Blocks(segments, "simulated")

    def _find(self, size: int, pool: Pool) -> tuple[_Segment, int] | None:
        """The smallest free piece that fits; among equals, the one with the lowest address."""
        best: tuple[int, _Segment, int] | None = None
        for segment in self._segments:
            if segment.pool != pool:
                continue
            for index, piece in enumerate(segment.pieces):
                if not piece.live and piece.size >= size and (best is None or piece.size < best[0]):
                    best = piece.size, segment, index
        return None if best is None else best[1:]

    def _grow(self, size: int, pool: Pool) -> bool:
        """Ask the driver for a new segment, or for as many pages as are missing at the end of the expandable one."""
        own = [segment for segment in self._segments if segment.pool == pool] if self.expandable else []
        if self.expandable:
            page = _page(pool)
            last = own[-1].pieces[-1] if own and own[-1].pieces else None
            missing = size - (last.size if last and not last.live else 0)
            calls = -(-missing // page)
            needed = calls * page
        else:
            calls, needed = 1, _segment_size(size)
        if needed > self.driver_free_bytes:
            return False
        if not own:
            own = [_Segment(self._next_address, pool)]
            self._next_address += _GAP * (1 + self.total_bytes // _GAP)
            self._segments.append(own[0])
        own[-1].pieces.append(_Piece(needed))
        _merge(own[-1], len(own[-1].pieces) - 1)
        self.driver_allocations += calls
        return True

    def _unmap(self, segment: _Segment) -> None:
        """Cut the whole pages out of an expandable segment's free pieces; what is left of it becomes several."""
        page, position = _page(segment.pool), segment.address
        parts = [_Segment(position, segment.pool)]
        for piece in segment.pieces:
            end = position + piece.size
            first, last = -(-position // page) * page, end // page * page
            if piece.live or last <= first:
                parts[-1].pieces.append(piece)
            else:
                if first > position:
                    parts[-1].pieces.append(_Piece(first - position))
                parts.append(_Segment(last, segment.pool, [_Piece(end - last)] if end > last else []))
                self.driver_frees += (last - first) // page
            position = end
        where = self._segments.index(segment)
        self._segments[where : where + 1] = [part for part in parts if part.pieces]

    def _complaint(self, size: int) -> str:
        allocated, reserved = self.allocated_bytes, self.reserved_bytes
        return (
            f"simulated: CUDA out of memory. Tried to allocate {_words(_segment_size(size))}. GPU 0 has a total "
            f"capacity of {_words(self.total_bytes)} of which {_words(self.driver_free_bytes)} is free. Of the "
            f"allocated memory {_words(allocated)} is allocated by PyTorch, and {_words(reserved - allocated)} is "
            "reserved by PyTorch but unallocated."
        )

    def __repr__(self) -> str:
        return (
            f"SimulatedAllocator: allocated {mebibytes(self.allocated_bytes)}, reserved "
            f"{mebibytes(self.reserved_bytes)} of {mebibytes(self.total_bytes)}; the driver was called "
            f"{self.driver_allocations} times for memory and {self.driver_frees} times to take it back"
        )


def _segment_size(size: int) -> int:
    if size <= SMALL_BYTES:
        return _SMALL_SEGMENT
    return _LARGE_SEGMENT if size < _LARGE_REQUEST else -(-size // _ROUND_LARGE) * _ROUND_LARGE


def _page(pool: Pool) -> int:
    return _SMALL_SEGMENT if pool == "small" else _LARGE_SEGMENT


def _merge(segment: _Segment, index: int) -> None:
    """Join the free piece at `index` with its free neighbours."""
    pieces = segment.pieces
    if index + 1 < len(pieces) and not pieces[index + 1].live:
        pieces[index].size += pieces.pop(index + 1).size
    if index > 0 and not pieces[index - 1].live:
        pieces[index - 1].size += pieces.pop(index).size


def _words(size: int) -> str:
    """A size as PyTorch's messages write it: "24.85 MiB"."""
    for name, unit in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size > unit:
            return f"{size / unit:.2f} {name}"
    return f"{size} bytes"
