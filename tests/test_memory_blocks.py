"""The allocator's segments and blocks, read, judged and drawn; and the simulated allocator that stands in for a GPU."""

import json
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from course_utils import memory_blocks, memory_blocks_view
from course_utils.allocation_trace import AllocationTrace, record_allocations
from course_utils.memory_blocks import Block, Blocks, Segment
from course_utils.simulated_allocator import SimulatedAllocator

MIB = 2**20
# As torch.cuda.memory_snapshot() writes it (keys from its docstring), with keys that are not read.
RECORDED = [
    {
        "device": 0,
        "address": 0x7F0002000000,
        "total_size": 20 * MIB,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "blocks": [
            {"address": 0x7F0002000000, "size": 4 * MIB, "requested_size": 4_000_000, "state": "active_allocated"},
            {"address": 0x7F0002400000, "size": 6 * MIB, "requested_size": 0, "state": "inactive", "frames": []},
            {"address": 0x7F0002A00000, "size": 10 * MIB, "requested_size": 0, "state": "active_awaiting_free"},
        ],
    },
    {
        "device": 0,
        "address": 0x7F0000000000,
        "total_size": 2 * MIB,
        "segment_type": "small",
        "blocks": [{"address": 0x7F0000000000, "size": 2 * MIB, "state": "inactive"}],
    },
    {
        "device": 1,
        "address": 0x7F1000000000,
        "total_size": 64 * MIB,
        "segment_type": "large",
        "blocks": [{"address": 0x7F1000000000, "size": 64 * MIB, "state": "inactive"}],
    },
]


def of(*segments: tuple[str, str]) -> Blocks:
    """Blocks from texts: ("large", "L8 F4") is a segment with 8 MiB that live and 4 MiB that are free."""
    states = {"L": "live", "F": "free", "W": "waiting"}
    made = [
        Segment(index, pool, tuple(Block(round(float(part[1:]) * MIB), states[part[0]]) for part in text.split()))
        for index, (pool, text) in enumerate(segments)
    ]
    return Blocks(tuple(made), "a test")


# --- reading ----------------------------------------------------------------------------------------------------


def test_a_snapshot_is_read_in_the_order_of_addresses() -> None:
    blocks = memory_blocks.from_torch(RECORDED[:2], "cuda:0, recorded")
    assert [segment.pool for segment in blocks.segments] == ["small", "large"]
    assert [block.state for block in blocks.segments[1].blocks] == ["live", "free", "waiting"]
    assert (blocks.reserved_bytes, blocks.free_bytes) == (22 * MIB, 8 * MIB)
    assert (blocks.releasable_bytes, blocks.stuck_bytes) == (2 * MIB, 6 * MIB)


def test_only_the_asked_gpu_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: RECORDED)
    assert memory_blocks.read_blocks("cuda:0").reserved_bytes == 22 * MIB
    assert memory_blocks.read_blocks().reserved_bytes == 64 * MIB
    assert memory_blocks.read_blocks("cuda").source == "cuda:1, recorded"


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA may be running here")
def test_without_cuda_there_are_no_blocks_and_a_reason() -> None:
    blocks = memory_blocks.read_blocks()
    assert blocks.segments == ()
    assert "CUDA has not been started" in repr(blocks)
    assert blocks.unusable_share(MIB) is None
    assert not torch.cuda.is_initialized()


def test_json_goes_there_and_back(tmp_path) -> None:
    blocks = memory_blocks.from_torch(RECORDED, "x")
    assert memory_blocks.from_json(blocks.to_json()).segments == blocks.segments
    path = tmp_path / "snapshot.json"
    path.write_text(json.dumps({"segments": RECORDED, "device_traces": []}))
    assert memory_blocks.load_blocks(path).segments == blocks.segments
    assert memory_blocks.load_blocks(path).source == "read from snapshot.json"


def test_a_pickle_is_not_opened(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps({"segments": RECORDED}))
    monkeypatch.setattr(pickle, "loads", lambda *_: pytest.fail("it was opened"))
    with pytest.raises(ValueError, match="a pickle, and opening one runs whatever is in it"):
        memory_blocks.load_blocks(path)


@pytest.mark.parametrize(
    "text",
    [
        "no json",
        "[" * 100_000,
        "7",
        '"text"',
        "[7]",
        '[{"address": 0}]',
        '[{"address": 0, "segment_type": "large", "blocks": [{"size": -1, "state": "inactive"}]}]',
        '[{"address": 0, "segment_type": "large", "blocks": [{"size": true, "state": "inactive"}]}]',
        '[{"address": 0, "segment_type": "large", "blocks": [{"size": 1e300, "state": "inactive"}]}]',
        '[{"address": 0, "segment_type": "large", "blocks": [{"size": 1, "state": "melted"}]}]',
        '[{"address": 0, "segment_type": "large", "blocks": {"size": 1}}]',
    ],
    ids=["text", "deep", "number", "string", "no segment", "keys", "negative", "bool", "float", "state", "a dict"],
)
def test_what_is_no_snapshot_is_told_in_one_sentence(text: str) -> None:
    with pytest.raises(ValueError, match=r"This is no JSON|is a list of segments|is not as PyTorch writes it") as told:
        memory_blocks.from_json(text)
    assert len(str(told.value)) < 300


def test_reading_is_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(memory_blocks, "_MOST_BLOCKS", 3)
    with pytest.raises(ValueError, match="more than 3 blocks"):
        memory_blocks.from_torch(RECORDED, "x")
    monkeypatch.setattr(memory_blocks, "_LONGEST_JSON", 10)
    path = tmp_path / "long.json"
    path.write_text(" " * 11 + "[]")
    with pytest.raises(ValueError, match="more than this reads"):
        memory_blocks.load_blocks(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="it is not text"):
        memory_blocks.load_blocks(path)


# --- judging ----------------------------------------------------------------------------------------------------


def test_unusable_is_what_lies_in_too_small_pieces_or_in_the_other_pool() -> None:
    blocks = of(("large", "L8 F4 L2 F12"), ("small", "L0.5 F1.5"))
    assert blocks.unusable_bytes(12 * MIB) == 5.5 * MIB
    assert blocks.unusable_bytes(13 * MIB) == blocks.free_bytes == 17.5 * MIB
    assert blocks.unusable_share(13 * MIB) == 1.0
    assert blocks.unusable_bytes(MIB) == 16 * MIB  # 1 MiB comes from the pool for small requests
    assert blocks.unusable_bytes(MIB + 1) == 1.5 * MIB
    with pytest.raises(ValueError, match="request_bytes=0"):
        blocks.unusable_bytes(0)


@pytest.mark.parametrize(
    ("text", "request_mib", "driver_mib", "expected"),
    [
        ("L8 F12", 12, 0, "Fits: 12 MiB go into a free block"),
        ("L8 F12", 13, 13, "Fits: no free block holds 13 MiB, but the driver can"),
        ("L8 F12", 13, 12, "Fragmented: 24 MiB are free in all, but the largest piece holds 12 MiB"),
        ("L8 F12", 13, 0, "Too little memory: 13 MiB are asked for, 12 MiB are free in all"),
        ("L8 F6 L2 F6", 12, 0, "Fragmented: 12 MiB are free in all, but the largest piece holds 6 MiB"),
        ("F12", 20, 8, "Fits: no free block holds 20 MiB, but the driver can"),  # after the free segment went back
    ],
)
def test_the_verdict_tells_fragments_from_too_little(text, request_mib, driver_mib, expected) -> None:
    assert of(("large", text)).verdict(request_mib * MIB, driver_mib * MIB).startswith(expected)


def test_tables_are_escaped_and_say_the_figures() -> None:
    blocks = Blocks(of(("large", "L8 F12"), ("large", "F4")).segments, "<b>me</b>")
    assert "largest free piece            12 MiB" in repr(blocks)
    assert "empty_cache() gives back      4 MiB" in repr(blocks)
    assert "<b>me" not in blocks._repr_html_()


# --- drawing ----------------------------------------------------------------------------------------------------


def test_the_drawing_has_a_bar_a_segment_and_says_it_in_words() -> None:
    blocks = of(("large", "L8 F4 W2 F12"), ("small", "L0.5 F1.5"))
    fig = blocks.draw(16 * MIB)
    (ax,) = fig.axes
    assert [label.get_text() for label in ax.get_yticklabels()] == ["segment 1", "segment 2", "request"]
    assert sum(bar.get_width() for bar in ax.patches) == pytest.approx(26 + 2 + 16)
    hatches = {bar.get_facecolor(): bar.get_hatch() for bar in ax.patches}
    assert len(set(hatches.values())) == len(hatches) == 4  # colour and pattern both tell the states apart
    assert "of it 17.5" not in fig.alt
    assert "2 segments (a test), 28 MiB reserved, of it 18 MiB free" in fig.alt
    assert "Asked for: 16 MiB." in fig.alt
    assert [text.get_text() for text in ax.get_legend().get_texts()] == list(memory_blocks_view._NAMES.values())


def test_the_drawing_is_bounded_and_empty_ones_say_so() -> None:
    many = of(*[("large", f"L{size}") for size in range(2, 42)]).draw()
    assert len(many.axes[0].get_yticklabels()) == memory_blocks_view._MOST_BARS
    assert "26 smaller segments not drawn" in many.axes[0].get_title(loc="left")
    empty = Blocks((), "no blocks: none").draw()
    assert [text.get_text() for text in empty.axes[0].texts] == ["no segments"]


# --- the simulated allocator --------------------------------------------------------------------------------------


def reserved_after(requests: list[tuple[int, float]], **settings: bool) -> list[int]:
    """MiB reserved after each round of (count, MiB) requests, which are freed before the next."""
    allocator, reserved = SimulatedAllocator(2**31, **settings), []
    for count, size in requests:
        addresses = [allocator.allocate(int(size * MIB)) for _ in range(count)]
        reserved.append(allocator.reserved_bytes // MIB)
        for address in addresses:
            allocator.free(address)
    return reserved


@pytest.mark.parametrize(
    ("requests", "expandable", "expected"),
    [
        ([(8, 16), (4, 32)], False, [128, 256]),
        ([(4, 32), (8, 16)], False, [128, 128]),
        ([(8, 16), (4, 32)], True, [140, 140]),
        ([(1, 2), (1, 0.5)], True, [20, 22]),
        ([(1, 2), (1, 2)], True, [20, 20]),
    ],
    ids=["small, then large", "large, then small", "expandable", "two pools", "one pool"],
)
def test_it_reserves_what_pytorchs_own_article_says(requests, expandable, expected) -> None:
    """The figures of github.com/pytorch/devlogs, content/eager/2026-06-01-cuda-caching-allocator.md."""
    assert reserved_after(requests, expandable=expandable) == expected


@pytest.mark.parametrize(
    ("size", "reserved", "allocated"),
    [
        (1, 2 * MIB, 512),
        (513, 2 * MIB, 1024),
        (MIB, 2 * MIB, MIB),
        (MIB + 1, 20 * MIB, MIB + 512),
        (10 * MIB - 512, 20 * MIB, 10 * MIB - 512),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),  # what is left over is no more than 1 MiB: it is not split off
        (19 * MIB - 1, 20 * MIB, 20 * MIB),
    ],
)
def test_sizes_are_rounded_as_in_the_source(size, reserved, allocated) -> None:
    allocator = SimulatedAllocator(2**30)
    allocator.allocate(size)
    assert (allocator.reserved_bytes, allocator.allocated_bytes) == (reserved, allocated)


def test_the_smallest_block_that_fits_is_taken_and_neighbours_merge() -> None:
    allocator = SimulatedAllocator(2**30)
    first = [allocator.allocate(size * MIB) for size in (40, 30)]
    for address in first:
        allocator.free(address)
    assert allocator.allocate(28 * MIB) == first[1]
    pieces = [allocator.allocate(10 * MIB) for _ in range(4)]
    assert pieces == [first[0] + index * 10 * MIB for index in range(4)]
    for address in (pieces[0], pieces[2]):
        allocator.free(address)
    assert allocator.blocks().largest_free_bytes == 10 * MIB
    allocator.free(pieces[1])
    assert allocator.blocks().largest_free_bytes == 30 * MIB


def test_the_cache_is_kept_until_it_is_emptied_and_a_living_tensor_pins_its_segment() -> None:
    allocator = SimulatedAllocator(2**30)
    gone, pinned, pin = allocator.allocate(30 * MIB), allocator.allocate(3 * MIB), allocator.allocate(3 * MIB)
    allocator.free(gone)
    allocator.free(pinned)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (3 * MIB, 50 * MIB)
    assert allocator.blocks().releasable_bytes == 30 * MIB
    allocator.empty_cache()
    assert (allocator.reserved_bytes, allocator.driver_frees) == (20 * MIB, 1)
    assert allocator.blocks().stuck_bytes == 17 * MIB
    allocator.free(pin)
    allocator.empty_cache()
    assert (allocator.reserved_bytes, allocator.driver_allocations, allocator.driver_frees) == (0, 2, 2)


def test_before_it_gives_up_it_empties_its_own_cache() -> None:
    allocator = SimulatedAllocator(64 * MIB)
    for address in [allocator.allocate(size * MIB) for size in (40, 20)]:
        allocator.free(address)
    allocator.allocate(60 * MIB)
    assert (allocator.reserved_bytes, allocator.driver_frees) == (60 * MIB, 2)


def test_running_out_raises_pytorchs_error_in_its_words_and_counts_nothing() -> None:
    allocator = SimulatedAllocator(64 * MIB)
    allocator.allocate(40 * MIB)
    with pytest.raises(torch.OutOfMemoryError) as told:
        allocator.allocate(25 * MIB)
    assert str(told.value) == (
        "simulated: CUDA out of memory. Tried to allocate 26.00 MiB. GPU 0 has a total capacity of 64.00 MiB of which "
        "24.00 MiB is free. Of the allocated memory 40.00 MiB is allocated by PyTorch, and 0 bytes is reserved by "
        "PyTorch but unallocated."
    )
    assert allocator.allocated_bytes == 40 * MIB


def test_expandable_pages_go_back_from_the_middle_and_living_ones_stay() -> None:
    allocator = SimulatedAllocator(2**30, expandable=True)
    kept, gone, last = (allocator.allocate(size * MIB) for size in (10, 50, 20))
    assert (allocator.reserved_bytes, allocator.driver_allocations) == (80 * MIB, 4)
    allocator.free(gone)
    allocator.empty_cache()
    assert (allocator.reserved_bytes, allocator.driver_frees) == (40 * MIB, 2)  # two of the pages have no tensor
    assert allocator.blocks().free_bytes == 10 * MIB
    for address in (kept, last):
        allocator.free(address)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0


def test_expandable_segments_cure_fragments_between_segments_and_not_those_around_living_tensors() -> None:
    def largest_after(expandable: bool, keep: int) -> bool:
        allocator = SimulatedAllocator(128 * MIB, expandable=expandable)
        addresses = [allocator.allocate(20 * MIB) for _ in range(6)]
        for index, address in enumerate(addresses):
            if (index >= keep and index % 2 == 0) or keep == 0:
                allocator.free(address)
        try:
            allocator.allocate(60 * MIB)
        except torch.OutOfMemoryError:
            return False
        return True

    assert largest_after(expandable=True, keep=0)
    assert not largest_after(expandable=True, keep=4)


def test_freeing_what_does_not_live_is_told() -> None:
    allocator = SimulatedAllocator(2**30)
    address = allocator.allocate(5)
    allocator.free(address)
    with pytest.raises(ValueError, match="Nothing lives at address"):
        allocator.free(address)
    with pytest.raises(ValueError, match="size_bytes=0"):
        allocator.allocate(0)
    assert repr(allocator).startswith("SimulatedAllocator: allocated 0 MiB, reserved 2 MiB of 1,024 MiB")


# --- traces of real steps -----------------------------------------------------------------------------------------


@pytest.fixture
def job() -> SimpleNamespace:
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    inputs, targets = torch.randn(512, 256), torch.zeros(512, dtype=torch.int64)

    def step() -> None:
        loss = functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return SimpleNamespace(model=model, step=step)


def test_a_step_asks_for_the_same_each_time_and_frees_what_it_does_not_keep(job) -> None:
    trace = record_allocations(job.step, steps=3)
    asked = [sorted(change for _, change in step if change > 0) for step in trace.steps]
    assert asked[1] == asked[2]
    gradients = sum(parameter.numel() * 4 for parameter in job.model.parameters())
    assert sum(change for step in trace.steps for _, change in step) == gradients  # kept until the next zero_grad
    assert trace.peak_bytes > gradients
    assert trace.requests == sum(map(len, asked))


def test_emptying_the_cache_after_each_step_costs_calls_of_the_driver(job) -> None:
    trace = record_allocations(job.step, steps=5)
    kept, emptied, seldom = (SimulatedAllocator(2**30) for _ in range(3))
    trace.replay(kept)
    trace.replay(emptied, empty_cache_every=1)
    trace.replay(seldom, empty_cache_every=5)
    assert kept.allocated_bytes == emptied.allocated_bytes
    assert kept.driver_allocations < emptied.driver_allocations
    assert kept.driver_frees == 0 < seldom.driver_frees < emptied.driver_frees
    with pytest.raises(ValueError, match="empty_cache_every=0"):
        trace.replay(kept, empty_cache_every=0)


def test_a_grown_storage_is_freed_whole() -> None:
    trace = AllocationTrace((((1, 3 * MIB), (1, 2 * MIB), (1, -5 * MIB)),))
    allocator = SimulatedAllocator(2**30)
    trace.replay(allocator)
    assert allocator.allocated_bytes == 0
    assert trace.peak_bytes == 5 * MIB


def test_a_step_that_fails_passes_its_error_on(job) -> None:
    def failing() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        record_allocations(failing, warmup=0)
