"""Exercises of lesson 01: code for any device, the right dtype, a timing that can be trusted."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from course_utils.exercises.engine import Answer, Exercise, NotYet
from course_utils.runtime import pick_device

# --- device: code that runs on whatever device the model lives on ----------------------------------------------


def predict(model: torch.nn.Module, images: torch.Tensor) -> torch.Tensor:
    """Return the model's output for `images`, on the device where the model's weights live."""
    device = next(model.parameters()).device
    result: torch.Tensor = model(images.to(device))
    return result


def _check_device(answer: Answer) -> str:
    # The meta device stands in for a GPU: it refuses tensors of other devices as CUDA does, and every machine has it.
    here = pick_device()
    devices = ["cpu", "meta"] + (["cuda"] if here.type == "cuda" else [])
    for device in devices:
        model = torch.nn.Linear(4, 2, device=here if device == "cuda" else device)
        images = torch.ones(3, 4)
        output = answer(model, images)
        if model.weight.device.type != device:
            raise NotYet(f"The model was on `{device}` and your code moved it: move the images, they are smaller.")
        if not isinstance(output, torch.Tensor) or output.shape != (3, 2):
            raise NotYet("Return what the model returns for these images: a tensor of shape (3, 2).")
        if output.device.type != device:
            raise NotYet(
                f"The model is on `{device}`, the output on `{output.device}`: leave it where it was computed."
            )
    return f"It ran on {', '.join(devices)} without naming one of them."


device = Exercise(
    name="device",
    hints=(
        "Every parameter of a model knows where it lives: `next(model.parameters()).device`.",
        "`images.to(that_device)` copies if it must, and costs nothing if the images are there already.",
    ),
    reference=predict,
    check_answer=_check_device,
)

# --- dtype: which 16-bit type is native -------------------------------------------------------------------------

_GPUS = (
    ("Tesla T4", (7, 5), torch.float16),
    ("Tesla V100", (7, 0), torch.float16),
    ("A100", (8, 0), torch.bfloat16),
    ("L4", (8, 9), torch.bfloat16),
    ("H100", (9, 0), torch.bfloat16),
    ("RTX 5090", (12, 0), torch.bfloat16),
)


def best_dtype(capability: tuple[int, int]) -> torch.dtype:
    """Return the 16-bit dtype to train in on a GPU of this compute capability, from (7, 0) on."""
    return torch.bfloat16 if capability >= (8, 0) else torch.float16


def _check_dtype(answer: Answer) -> str:
    for name, capability, expected in _GPUS:
        given = answer(capability)
        if not isinstance(given, torch.dtype):
            raise NotYet(f"Return a dtype such as torch.float16. For {capability} it returned {given!r}.")
        if given == torch.float32:
            raise NotYet(f"A {name} {capability} has tensor cores for a 16-bit type. float32 leaves them idle.")
        if given != expected and expected == torch.float16:
            raise NotYet(
                f"A {name} {capability} has no bfloat16 hardware. PyTorch emulates it there, "
                "which is why `torch.cuda.is_bf16_supported()` says True."
            )
        if given != expected:
            raise NotYet(f"A {name} {capability} has native bfloat16, which needs no gradient scaler.")
    return f"Right for all {len(_GPUS)} GPUs, from the T4 to the RTX 5090."


dtype = Exercise(
    name="dtype",
    hints=(
        "bfloat16 came to NVIDIA's hardware with capability (8, 0).",
        "Python compares tuples from left to right: `(7, 5) >= (8, 0)` is False, and `(12, 0) >= (8, 0)` is True.",
    ),
    reference=best_dtype,
    check_answer=_check_dtype,
)

# --- timing: measured, and re-measured before it says no ---------------------------------------------------------


class PretendGPU:
    """A device that runs behind Python's back, as a GPU does: `work()` returns at once, `synchronize()` waits.

    The first call takes `first_s` (a GPU loads its kernels then), every other `work_s`. It only sleeps: it shows the
    *order* of things on a machine without a GPU, and its speed means nothing.
    """

    def __init__(self, work_s: float = 0.004, first_s: float = 0.03) -> None:
        self.work_s = work_s
        self.calls = 0
        self._first_s = first_s
        self._free_at = time.perf_counter()

    def work(self) -> None:
        """Queue one piece of work and return before it is done."""
        duration_s = self.work_s if self.calls else self._first_s
        self._free_at = max(self._free_at, time.perf_counter()) + duration_s
        self.calls += 1

    def synchronize(self) -> None:
        """Wait until all queued work is done."""
        time.sleep(max(0.0, self._free_at - time.perf_counter()))


def seconds_per_call(work: Callable[[], object], synchronize: Callable[[], object], repeats: int = 10) -> float:
    """Return the seconds that one `work()` takes on its device, once it is warm."""
    work()
    synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    synchronize()
    return (time.perf_counter() - start) / repeats


_ATTEMPTS = 3
_TOLERANCE = 0.3


def _check_timing(answer: Answer) -> str:
    for attempt in range(1, _ATTEMPTS + 1):  # a busy machine can spoil one measurement, so a "no" is measured again
        gpu = PretendGPU()
        baseline_s = seconds_per_call(gpu.work, gpu.synchronize)
        gpu = PretendGPU()
        gpu.work()  # work that is still under way when the learner's clock starts
        gpu.calls = 0
        measured = answer(gpu.work, gpu.synchronize)
        if not isinstance(measured, float):
            raise NotYet(f"Return the seconds of one call as a number with decimals. It returned {measured!r}.")
        if gpu.calls == 0:
            raise NotYet("Your code never called `work()`.")
        if abs(measured / baseline_s - 1) <= _TOLERANCE:
            return f"You measured {measured * 1e3:.2f} ms a call; the reference measured {baseline_s * 1e3:.2f} ms."
        if attempt == _ATTEMPTS:
            raise NotYet(_what_went_wrong(measured, baseline_s))
    raise AssertionError("the last attempt returns or raises")


def _what_went_wrong(measured_s: float, baseline_s: float) -> str:
    figures = f"You measured {measured_s * 1e3:.2f} ms a call, the reference {baseline_s * 1e3:.2f} ms. "
    if measured_s < 0.2 * baseline_s:
        return figures + "That is the time to *ask* for the work: call `synchronize()` before you stop the clock."
    if measured_s > 8 * baseline_s:
        return figures + "Is it the time of all calls together? Divide by `repeats`."
    if measured_s > baseline_s:
        return figures + (
            "Something else is inside: the first, slow call, or work that was still under way when the clock started. "
            "Warm up, then call `synchronize()` before you start the clock."
        )
    return figures + "Count the calls that lie between start and stop: do you divide by just that number?"


timing = Exercise(
    name="timing",
    hints=(
        "Call `work()` once before the clock starts: the first call is never typical.",
        "`synchronize()` belongs in two places: just before the clock starts, and just before it stops.",
    ),
    reference=seconds_per_call,
    check_answer=_check_timing,
)
