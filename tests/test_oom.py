"""What an error means for the batch size (BSF-07, BSF-08), and the simulated limit."""

import gc
import threading
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from course_utils.oom import OomVerdict, SimulatedMemory, classify_oom

CUDA = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 14.74 GiB of which 1.05 GiB is free."
)
REPLICA = (
    "Caught OutOfMemoryError in replica 0 on device 0.\nOriginal Traceback (most recent call last):\n"
    '  File "parallel_apply.py", line 64, in _worker\ntorch.OutOfMemoryError: ' + CUDA
)
BUS = (
    "DataLoader worker (pid 1234) is killed by signal: Bus error. It is possible that dataloader's workers are out of "
    "shared memory. Please try to raise your shared memory limit."
)
TRITON = (
    "out of resource: shared memory, Required: 132096, Hardware limit: 65536. Reducing block sizes or `num_stages` "
    "may help."
)
HOST = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "4000000000000000 bytes. Error code 12 (Cannot allocate memory)"
)
WORKER = "Caught {0} in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n  ...\n{0}: {1}"

TABLE = [
    # The table of BSF-07, in its order.
    ("out of memory", torch.OutOfMemoryError(CUDA)),
    ("out of memory", RuntimeError(CUDA)),
    ("out of memory", torch.OutOfMemoryError(REPLICA)),
    ("out of memory", RuntimeError(REPLICA)),
    ("out of memory", RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported")),
    ("out of memory", RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")),
    ("out of memory", RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED")),
    ("maybe", RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-…")),
    ("maybe", RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR")),
    ("maybe", RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`")),
    ("maybe", RuntimeError("Unable to find a valid cuDNN algorithm to run convolution")),
    ("maybe", RuntimeError("GET was unable to find an engine to execute this computation")),
    ("out of memory", RuntimeError("MPS backend out of memory (MPS allocated: 8.00 GB, other allocations: 1.00 GB)")),
    ("out of memory", RuntimeError("XPU out of memory. Tried to allocate 20.00 MiB")),
    ("out of memory", RuntimeError("HIP out of memory. Tried to allocate 20.00 MiB")),
    ("out of memory", RuntimeError(HOST)),
    ("out of memory", MemoryError()),
    ("out of memory", RuntimeError(CUDA, "while training")),
    ("fatal", RuntimeError("CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously")),
    ("fatal", RuntimeError("CUDA error: an illegal memory access was encountered")),
    ("fatal", RuntimeError("CUDA error: no kernel image is available for execution on the device")),
    ("not ours", RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x3 and 5x2)")),
    ("loader", RuntimeError(BUS)),
    ("not ours", RuntimeError(TRITON)),
    # The same kinds, worded by others.
    ("out of memory", RuntimeError("while training", CUDA)),
    ("out of memory", ValueError("training failed: " + CUDA)),
    ("out of memory", RuntimeError("HIP error: out of memory")),
    ("out of memory", RuntimeError("CUDA driver error: out of memory")),
    ("out of memory", RuntimeError("NCCL error: unhandled cuda error\nLast error:\nCuda failure 'out of memory'")),
    ("out of memory", RuntimeError("CUDNN_BACKEND_OPERATION: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED")),
    ("out of memory", RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate`")),
    ("out of memory", RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED")),
    ("out of memory", RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 4294967296 bytes")),
    ("out of memory", RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 80000 bytes.")),
    ("out of memory", RuntimeError("[enforce fail] . DefaultCPUAllocator: can't allocate memory")),
    ("out of memory", MemoryError("Unable to allocate 8.00 TiB for an array with shape (1000,) and data type int8")),
    ("out of memory", RuntimeError("the accelerator of the future is out of memory")),
    ("out of memory", torch.OutOfMemoryError("simulated: out of memory.")),
    ("out of memory", torch.OutOfMemoryError("")),
    ("maybe", RuntimeError("Expected canUse32BitIndexMath(input) && canUse32BitIndexMath(output) to be true")),
    ("maybe", RuntimeError("CUDA error: invalid configuration argument")),
    ("maybe", RuntimeError("nonzero is not supported for tensors with more than INT_MAX elements")),
    ("maybe", OSError(12, "Cannot allocate memory")),
    ("fatal", RuntimeError("CUDA error: unspecified launch failure")),
    ("fatal", RuntimeError("CUDA error: misaligned address")),
    ("fatal", RuntimeError("CUDA error: uncorrectable ECC error encountered")),
    ("loader", RuntimeError("DataLoader worker (pid(s) 41, 42) exited unexpectedly")),
    ("loader", RuntimeError("DataLoader worker (pid 42) is killed by signal: Killed. ")),
    ("loader", RuntimeError("unable to open shared memory object </torch_29_1> in read-write mode: Too many open…")),
    ("loader", RuntimeError("unable to write to file </torch_18692_1954506624>: No space left on device (28)")),
    ("loader", RuntimeError("unable to mmap 1024 bytes from file </torch_1>: Cannot allocate memory (12)")),
    ("loader", MemoryError(WORKER.format("MemoryError", ""))),
    ("loader", RuntimeError(WORKER.format("RuntimeError", HOST))),
    ("not ours", KeyError(WORKER.format("KeyError", "'label'"))),
    ("not ours", RuntimeError("CUDA error: too many resources requested for launch")),
    ("not ours", ValueError("the budget is out of memory of the committee")),
    ("not ours", IndexError("Target 10 is out of bounds.")),
    ("not ours", OSError(2, "No such file or directory")),
    ("not ours", KeyboardInterrupt("CUDA out of memory")),
    ("not ours", SystemExit(1)),
    ("not ours", RuntimeError()),
]


@pytest.mark.parametrize(("kind", "error"), TABLE, ids=lambda value: repr(value)[:60])
def test_the_whole_table(kind, error):
    verdict = classify_oom(error)
    assert verdict.kind == kind
    assert verdict.smaller_may_help == (kind in ("out of memory", "maybe"))
    assert verdict.reason
    assert verdict.advice.endswith(".")


def test_a_real_allocation_that_no_machine_can_make():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**15)
    assert classify_oom(caught.value).kind == "out of memory"
    assert "RAM" in classify_oom(caught.value).advice


def test_the_advice_names_the_cure():
    assert "/dev/shm" in classify_oom(RuntimeError(BUS)).advice
    assert "restart the runtime" in classify_oom(RuntimeError("CUDA error: device-side assert triggered")).advice
    assert "build" in classify_oom(RuntimeError("CUDA error: no kernel image is available")).advice
    assert "try a smaller batch once" in classify_oom(RuntimeError("CUDNN_STATUS_INTERNAL_ERROR")).advice
    assert "except block" in classify_oom(RuntimeError(CUDA)).advice


def raised(outer, inner, how):
    try:
        try:
            raise inner
        except BaseException as error:
            if how == "from it":
                raise outer from error
            if how == "from None":
                raise outer from None
            raise outer  # noqa: B904 -- the implicit context is what is tested
    except BaseException as error:  # noqa: BLE001 -- it is what the test is about
        return error


@pytest.mark.parametrize(
    ("outer", "inner", "how", "kind"),
    [
        (ValueError("step 3 failed"), torch.OutOfMemoryError(CUDA), "from it", "out of memory"),
        (ValueError("step 3 failed"), torch.OutOfMemoryError(CUDA), "while handling it", "out of memory"),
        (ValueError("step 3 failed"), torch.OutOfMemoryError(CUDA), "from None", "not ours"),
        (ValueError("step 3 failed"), RuntimeError("CUDNN_STATUS_INTERNAL_ERROR"), "from it", "maybe"),
        (torch.OutOfMemoryError(CUDA), RuntimeError("CUDA error: device-side assert triggered"), "from it", "fatal"),
        (RuntimeError("CUDA error: misaligned address"), torch.OutOfMemoryError(CUDA), "from it", "fatal"),
        (RuntimeError("no more batches"), RuntimeError(BUS), "from it", "loader"),
        (torch.OutOfMemoryError(CUDA), KeyError("x"), "from it", "out of memory"),
        (KeyError("x"), ValueError("y"), "from it", "not ours"),
    ],
)
def test_the_chain_is_read(outer, inner, how, kind):
    assert classify_oom(raised(outer, inner, how)).kind == kind


def test_groups_and_circles_are_read():
    group = ExceptionGroup("two ranks failed", [ValueError("x"), ExceptionGroup("y", [RuntimeError(CUDA)])])
    assert classify_oom(group).kind == "out of memory"
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert classify_oom(first).kind == "not ours"


def test_a_verdict_of_something_else_is_refused():
    with pytest.raises(TypeError, match="str"):
        classify_oom("CUDA out of memory")


def test_the_verdict_quotes_the_words_that_decided():
    assert classify_oom(RuntimeError("x\ncuDNN error: CUDNN_STATUS_ALLOC_FAILED\ny")) == OomVerdict(
        "out of memory",
        "CUDNN_STATUS_ALLOC_FAILED",
        "Use a smaller batch; leave the except block before you try again, because the error keeps tensors alive.",
    )


def test_an_error_keeps_its_tensors_alive_until_its_traceback_goes():
    """BSF-08, the fact that the advice rests on."""

    def fails():
        activations = torch.ones(10)
        alive.append(weakref.ref(activations))
        raise RuntimeError(CUDA)

    alive, inside, saved = [], None, None
    try:
        fails()
    except RuntimeError as error:
        gc.collect()
        inside, saved = alive[0](), error
    assert inside is not None
    inside = None
    gc.collect()
    assert alive[0]() is not None  # the saved error holds it
    saved.with_traceback(None)
    gc.collect()
    assert alive[0]() is None


# The simulated limit


def test_living_tensors_are_counted_once_and_no_longer_than_they_live():
    with SimulatedMemory(None) as memory:
        a = torch.ones(1000)
        assert memory.used_bytes == 4000
        view, alias = a.view(10, 100), a.detach()
        a.add_(1)
        a.relu_()
        assert memory.used_bytes == 4000
        b = a + 1
        assert memory.used_bytes == 8000
        del a, view
        assert memory.used_bytes == 8000  # the alias still holds it
        del alias
        assert memory.used_bytes == 4000
        assert memory.peak_bytes == 8000
        memory.reset_peak()
        assert memory.peak_bytes == 4000
    del b
    assert memory.used_bytes == 0
    assert repr(memory) == "SimulatedMemory: 0 bytes in use, peak 4,000, no limit"


def test_what_does_not_fit_raises_and_does_not_count():
    with SimulatedMemory(4000) as memory:
        a = torch.ones(500)
        with pytest.raises(torch.OutOfMemoryError, match=r"simulated.*2,004 bytes; 2,000 of 4,000"):
            torch.ones(501)
        assert (memory.used_bytes, memory.peak_bytes) == (2000, 2000)
        b = torch.ones(500)  # exactly full
        assert memory.used_bytes == memory.limit_bytes == 4000
        a.mul_(2)  # in place: no new memory
        del a, b
        torch.ones(1000)
    assert "limit 4,000" in repr(memory)


def test_a_simulated_error_is_classified_as_out_of_memory():
    with pytest.raises(RuntimeError) as caught, SimulatedMemory(10):
        torch.ones(10)
    assert classify_oom(caught.value).kind == "out of memory"


def training_step(model, optimizer, inputs):
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("part", ["forward", "backward", "optimizer"])
def test_every_part_of_a_step_is_seen(part):
    model = nn.Linear(1000, 1000, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    with SimulatedMemory(None) as memory:
        memory.track(model)
        weights = model.weight.numel() * 4
        assert memory.used_bytes == weights
        out = model(torch.ones(5, 1000))
        assert memory.used_bytes == weights + 2 * 20_000  # the inputs and the outputs
        if part == "forward":
            return
        out.sum().backward()
        del out
        assert weights * 2 <= memory.used_bytes <= weights * 2 + 100
        if part == "backward":
            return
        optimizer.step()
        assert weights * 4 <= memory.used_bytes <= weights * 4 + 100  # two moments
        assert memory.peak_bytes >= memory.used_bytes
        optimizer.zero_grad()
        assert memory.used_bytes <= weights * 3 + 100


def test_a_step_runs_out_where_its_parts_do_not_fit():
    model = nn.Linear(100, 100, bias=False)
    # Weights, gradients, two moments; and while AdamW works, the root of the second and its quotient.
    for tensors, fits in ((5, False), (6, True)):
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        with SimulatedMemory(40_000 * tensors + 5000) as memory:
            memory.track(model, optimizer)
            if fits:
                training_step(model, optimizer, torch.ones(2, 100))
                assert memory.peak_bytes > 40_000 * 4
            else:
                with pytest.raises(torch.OutOfMemoryError):
                    training_step(model, optimizer, torch.ones(2, 100))


def test_activations_grow_with_the_batch_and_checkpointing_saves_them():
    model = nn.Sequential(*(layer for _ in range(16) for layer in (nn.Linear(50, 50), nn.Tanh())))

    def peak(batch_size, blocks):
        with SimulatedMemory(None) as memory:
            inputs = torch.ones(batch_size, 50, requires_grad=True)
            out = inputs
            for index in range(0, len(model), blocks):
                block = model[index : index + blocks]
                out = checkpoint(block, out, use_reentrant=False) if blocks > 1 else block(out)
            out.sum().backward()
            model.zero_grad()
        return memory.peak_bytes

    small, large = peak(500, 1), peak(1000, 1)
    assert 1.8 < large / small < 2
    assert peak(1000, 8) < 0.7 * large


def test_data_that_the_host_holds_already_does_not_count():
    with SimulatedMemory(None) as memory:
        numbers = torch.from_numpy(np.ones(1000))
        listed = torch.tensor([1.0] * 1000)
        assert memory.used_bytes == 0
        copied = numbers.clone()
        assert memory.used_bytes == copied.nbytes == 8000
        assert listed.add_(1)[0] == 2
        assert memory.used_bytes == 8000


def test_tracking_counts_each_thing_once_and_only_what_is_given():
    model, other = nn.BatchNorm1d(100), torch.ones(10)
    model(torch.ones(2, 100)).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    optimizer.step()
    memory = SimulatedMemory(None)
    memory.track(model)
    parts = 100 * 4 * 2 + 100 * 4 * 2 + 8 + 100 * 4 * 2  # weights, running statistics with their count, gradients
    assert memory.used_bytes == parts
    memory.track([other, {"again": other}], model, model.weight)
    assert memory.used_bytes == parts + 40
    memory.track(optimizer)
    assert memory.used_bytes == parts + 40 + 800
    del other
    assert memory.used_bytes == parts + 800


def test_tracking_more_than_the_limit_raises():
    with pytest.raises(torch.OutOfMemoryError, match="tracking a tensor"):
        SimulatedMemory(10).track(nn.Linear(10, 10))


def test_other_devices_and_other_threads_are_not_counted():
    kept = []
    with SimulatedMemory(None) as memory:
        torch.ones(1000, device="meta")
        thread = threading.Thread(target=lambda: kept.append(torch.ones(1000)))
        thread.start()
        thread.join()
    assert len(kept) == 1
    assert memory.peak_bytes == 0


def test_a_tensor_that_grows_in_place_is_counted_at_its_new_size():
    with SimulatedMemory(4000) as memory:
        out = torch.ones(100)
        out.resize_(1000)
        assert memory.used_bytes == 4000
        with pytest.raises(torch.OutOfMemoryError):
            out.resize_(1001)


@pytest.mark.parametrize("limit", [0, -1, 1.5, True, "1 GB"])
def test_a_limit_that_is_none_is_refused(limit):
    with pytest.raises(ValueError, match="limit_bytes"):
        SimulatedMemory(limit)


def test_tracking_what_has_no_memory_is_refused():
    with pytest.raises(TypeError, match="function"):
        SimulatedMemory(None).track(lambda: 0)
