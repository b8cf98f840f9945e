"""The float16 training step in full, and a check that runs a learner's own one and names the fault that it finds.

verdict = check_amp_loop(step)   # step(model, optimizer, scaler, scheduler, micro_batches, max_norm)
verdict.ok, verdict.fault, verdict.sentence

`reference_step` is a right one. The check runs on the CPU, in well under a second, also where there is a GPU.
"""

from __future__ import annotations

import inspect
import math
import textwrap
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from course_utils import amp_trial
from course_utils.amp_faults import FAULTS, TOLERANCE, name_fault
from course_utils.amp_trial import Call
from course_utils.views import html_table, text_table

__all__ = ["FAULTS", "AmpVerdict", "check_amp_loop", "reference_step"]


def reference_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    micro_batches: list[tuple[torch.Tensor, torch.Tensor]],
    max_norm: float,
) -> None:
    """Make one optimizer step over all micro-batches, with float16 autocast, loss scaling and clipped gradients."""
    optimizer.zero_grad()
    for inputs, targets in micro_batches:
        with torch.autocast(inputs.device.type, dtype=torch.float16):
            loss = functional.cross_entropy(model(inputs), targets)
        scaler.scale(loss / len(micro_batches)).backward()  # outside autocast
    scaler.unscale_(optimizer)  # once, after the last backward and before the clipping
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    scale = scaler.get_scale()
    scaler.step(optimizer)  # skips optimizer.step() if a gradient is inf or nan
    scaler.update()  # and then lowers the scale
    if scaler.get_scale() >= scale:  # the step was taken
        scheduler.step()


@dataclass(frozen=True, repr=False)
class AmpVerdict:
    """What `check_amp_loop` found: `fault` is a key of FAULTS, or None if ok; `evidence` holds (what, seen) pairs."""

    ok: bool
    fault: str | None
    sentence: str
    evidence: tuple[tuple[str, str], ...]

    def __repr__(self) -> str:
        return f"{self._title}: {self.sentence}\n{text_table(['what', 'seen'], self.evidence)}"

    def _repr_html_(self) -> str:
        return html_table(["what", "seen"], self.evidence, f"{self._title}: {self.sentence}")

    @property
    def _title(self) -> str:
        return "Right" if self.fault is None else f"Fault: {self.fault}"


def check_amp_loop(step: Callable[..., Any]) -> AmpVerdict:
    """Run `step` on a tiny model in four scenarios, and name the first fault that its numbers show.

    `step(model, optimizer, scaler, scheduler, micro_batches, max_norm)` makes one optimizer step over a list of
    (inputs, targets) pairs of equal size: cross entropy under float16 autocast, scaled, averaged over the pairs,
    clipped to the total norm `max_norm`, and the scheduler moved if the step was taken. What it returns is not used.

    It is called two to four times for each of: one micro-batch, clipping, accumulation over three, and an overflow
    that has to be skipped. Weights are compared with a float64 step (to 5 %), and the scheduler's position and the
    scale with what they should be; only that decides. So any way of writing the step passes that gives these numbers.
    Not judged: a scaler with enabled=False, other optimizers than SGD, speed.

    An error of the step is a fault too ("raises", unless it is a known one). TypeError if `step` cannot be called.
    """
    if not callable(step):
        raise TypeError(f"Give the function itself, not {type(step).__name__}: check_amp_loop(step).")
    try:
        inspect.signature(step).bind(*range(6))
    except TypeError as error:
        return AmpVerdict(False, "wrong arguments", FAULTS["wrong arguments"], (("message", str(error)),))
    done: list[Call] = []
    with closing(amp_trial.calls(step)) as calls:
        for call in calls:
            fault = name_fault(call)
            if fault is not None:
                return AmpVerdict(False, fault, FAULTS[fault], tuple(_against(call)))
            done.append(call)
    return AmpVerdict(True, None, "Every step has the weights that a float64 step has.", tuple(_in_favour(done)))


def _against(call: Call) -> Iterator[tuple[str, str]]:
    """What one call did beside what it should have done."""
    scenario = call.scenario
    pieces = f"{scenario.micro_batches} micro-batch" + ("es" if scenario.micro_batches > 1 else "")
    yield "where", f"{scenario.name}: call {call.number}, {pieces}, max_norm {scenario.max_norm:g}"
    if call.error is not None:
        yield "error", f"{type(call.error).__name__}: {call.error}"
        yield "line", _line_of(call.error)
    else:
        clipped = call.expected.norm() < call.gradient.norm()
        how = "overflows, skip the step" if call.overflow else "to be clipped" if clipped else "no need to clip"
        yield "gradient", f"length {call.gradient.norm():.3g}; {how}"
        yield "step expected", f"length {call.expected.norm():.3g} x the learning rate"
        yield "step taken", f"length {call.taken.norm():.3g} x the learning rate{_share(call)}"
        yield "scheduler steps", f"{call.scheduler_steps}, expected {0 if call.overflow else 1}"
    yield "scale", f"{call.scale_before:g} before, {call.scale_after:g} after"
    yield "layers ran in", ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in call.dtypes)) or "none ran"
    yield "order of calls", ", ".join(call.events) or "nothing was called"
    yield from _warnings([call])


def _share(call: Call) -> str:
    """How long the step was in terms of the expected one, such as 1/4096, where that says something."""
    expected, taken = call.expected.norm().item(), call.taken.norm().item()
    if not (0 < expected < math.inf and 0 < taken < math.inf) or call.relative_error <= TOLERANCE:
        return ""
    return f" (1/{expected / taken:.4g} of it)" if taken < expected else f" ({taken / expected:.4g} times that)"


def _in_favour(calls: list[Call]) -> Iterator[tuple[str, str]]:
    for scenario in amp_trial.SCENARIOS:
        own = [call for call in calls if call.scenario is scenario]
        off = max(call.relative_error for call in own)
        skipped = sum(call.overflow for call in own)
        more = f"; {skipped} skipped, as it had to be" if skipped else ""
        yield scenario.name, f"{len(own) - skipped} steps within {off:.2%} of float64{more}"
    if any(backward.under_autocast for call in calls for backward in call.backwards):
        yield "note", "backward() ran under autocast. PyTorch advises against it: end the `with` block before it."
    yield from _warnings(calls)


def _warnings(calls: list[Call]) -> Iterator[tuple[str, str]]:
    texts = dict.fromkeys(text for call in calls for text in call.warnings)
    return (("warning", textwrap.shorten(text, 160, placeholder=" …")) for text in texts)


def _line_of(error: Exception) -> str:
    """The last line outside torch and this course that the error came through: the learner's own."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not any(part in frame.filename.replace("\\", "/") for part in ("/torch/", "/course_utils/amp_")):
            return f"{frame.lineno}: {frame.line}" if frame.line else str(frame.lineno)
    return "not known"
