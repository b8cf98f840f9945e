"""What a training step really allocates on the CPU: the measurement that `memory_model`'s predictions are judged by."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from course_utils.memory_step import MakeOptimizer, Step, checked_step
from course_utils.preserve import rng_preserved


def measure_cpu_memory(
    model: nn.Module,
    batch: Any,
    loss: Callable[..., Any] | None,
    optimizer: torch.optim.Optimizer | MakeOptimizer | None,
    autocast: torch.dtype | None = None,
    *,
    set_to_none: bool = True,
) -> int:
    """Peak bytes of two real training steps on the CPU: parameters, buffers and the batch, and all that is allocated.

    Arguments as in `predict_memory`. The steps run on a copy: model, optimizer and random state stay as they are. The
    allocations are the profiler's "[memory]" events, so kernels' own buffers count too, as far as they come from
    PyTorch's allocator.
    """
    step = checked_step(model, batch, loss, optimizer, autocast, set_to_none)
    if any(tensor.device.type != "cpu" for tensor in step.tensors()):
        raise ValueError("measure_cpu_memory measures on the CPU: move the model and the batch there first.")
    step = step.copied().with_optimizer().in_its_mode()
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in step.tensors()}
    with rng_preserved():
        return sum(storages.values()) + _peak_allocated(step)


def _peak_allocated(step: Step) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        for _ in range(2):
            step.run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    changes = sorted((e["ts"], index, e["args"]["Bytes"]) for index, e in enumerate(events) if e["name"] == "[memory]")
    now = peak = 0
    for _, _, change in changes:
        now += change
        peak = max(peak, now)
    return peak
