"""Exercises of lesson 05: a right AMP step, when compiling pays, and a training step freed of its waste."""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from course_utils import runtime
from course_utils.amp_check import check_amp_loop
from course_utils.exercises.engine import Answer, Exercise, NotYet
from course_utils.images import IMAGE_SIZE, MODEL_WIDTH
from course_utils.preserve import rng_preserved
from course_utils.resnet import small_resnet
from course_utils.timing import time_call

# --- amp: the mixed-precision step, in the right order ----------------------------------------------------------------


def amp_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    scheduler: Any,
    micro_batches: list[tuple[torch.Tensor, torch.Tensor]],
    max_norm: float,
) -> str:
    """Do one optimizer step on all `micro_batches`, in float16 autocast; return "stepped" or "skipped"."""
    optimizer.zero_grad()
    for inputs, targets in micro_batches:
        with torch.autocast(inputs.device.type, dtype=torch.float16):
            loss = functional.cross_entropy(model(inputs), targets) / len(micro_batches)
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    if scaler.get_scale() < scale:
        return "skipped"
    scheduler.step()
    return "stepped"


def _check_amp(answer: Answer) -> str:
    told: list[Any] = []

    def noted(*arguments: Any) -> None:
        told.append(answer.function(*arguments))

    answer.bind(*([None] * 6))
    verdict = check_amp_loop(noted)  # it explains what the learner's code raises, too
    if not verdict.ok:
        seen = [f"{what}: {value}." for what, value in verdict.evidence if what in ("error", "line", "where")]
        raise NotYet(" ".join([f"Fault: {verdict.fault}. {verdict.sentence}", *seen]))
    if not set(told) <= {"stepped", "skipped"} or "skipped" not in told:
        raise NotYet(
            'The steps are right. Return "skipped" when the scaler skipped the step, and "stepped" otherwise; '
            f"it returned {sorted(set(map(repr, told)))}."
        )
    return "Right in every case: clipped, accumulated, and with the schedule waiting when a step is skipped."


amp = Exercise(
    name="amp",
    hints=(
        "The order: zero_grad; for each piece autocast, loss divided by the number of pieces, scaled backward; "
        "then unscale_, clip, step, update.",
        "After `update()` the scale is smaller than before if the step was skipped. Move the scheduler only if not.",
    ),
    reference=amp_step,
    check_answer=_check_amp,
)

# --- pays: compile time against the steps that it shortens ------------------------------------------------------------


def compile_pays(compile_s: float, eager_s: float, compiled_s: float, steps: int) -> bool:
    """Return whether a run of `steps` steps ends earlier with compilation. All times in seconds."""
    return compile_s + steps * compiled_s < steps * eager_s


_RUNS: tuple[tuple[str, float, float, float, int, bool], ...] = (
    ("a long run", 60.0, 0.10, 0.08, 10_000, True),
    ("a short run", 60.0, 0.10, 0.08, 100, False),
    ("just over the break-even step", 60.0, 0.10, 0.08, 3_001, True),
    ("just under it", 60.0, 0.10, 0.08, 2_999, False),
    ("compiled steps that are slower", 60.0, 0.10, 0.12, 1_000_000, False),
    ("compiled steps that are no faster", 60.0, 0.10, 0.10, 1_000_000, False),
    ("no steps at all", 60.0, 0.10, 0.08, 0, False),
)


def _check_pays(answer: Answer) -> str:
    for case, compile_s, eager_s, compiled_s, steps, expected in _RUNS:
        given = answer(compile_s, eager_s, compiled_s, steps)
        call = f"compile_pays({compile_s:g}, {eager_s:g}, {compiled_s:g}, {steps})"
        if not isinstance(given, bool):
            raise NotYet(f"Return True or False. {call} returned {given!r:.80}.")
        if given != expected:
            eager, compiled = steps * eager_s, compile_s + steps * compiled_s
            raise NotYet(
                f"{case[0].upper()}{case[1:]}: {call} should be {expected}. Without compiling the run takes "
                f"{eager:,.0f} s, with it {compiled:,.0f} s."
            )
    return f"Right for all {len(_RUNS)} runs. Compiling is an investment: ask how long the run is."


pays = Exercise(
    name="pays",
    hints=(
        "How long does the whole run take without compiling? And with it, the compilation included?",
        "`steps * eager_s` against `compile_s + steps * compiled_s`.",
    ),
    reference=compile_pays,
    check_answer=_check_pays,
)

# --- leaner: the same step without the work that nobody needs ---------------------------------------------------------

_FASTER = 1.25
_ATTEMPTS = 3
_ROUNDS = 9
_BATCH = {"cpu": 24, "cuda": 128}


def slow_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, images: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One right and wasteful training step, as the lesson shows it; returns loss and accuracy."""
    optimizer.zero_grad(set_to_none=False)
    logits = checkpoint(model, images, use_reentrant=False)
    loss = functional.cross_entropy(logits, labels)
    accuracy = (model(images).argmax(1) == labels).float().mean()
    loss.backward()
    optimizer.step()
    return loss.detach(), accuracy


def lean_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, images: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what `slow_step` does, with less work; return loss and accuracy as detached tensors."""
    optimizer.zero_grad(set_to_none=True)
    logits = model(images)
    loss = functional.cross_entropy(logits, labels)
    accuracy = (logits.argmax(1) == labels).float().mean()
    loss.backward()
    optimizer.step()
    return loss.detach(), accuracy


def _check_leaner(answer: Answer) -> str:
    with rng_preserved():
        torch.default_generator.manual_seed(0)
        _same_step(answer)
        for attempt in range(1, _ATTEMPTS + 1):
            rounds = _rounds(answer)
            slow, yours = (statistics.median(seconds) for seconds in zip(*rounds, strict=True))
            faster = statistics.median(slow_s / yours_s for slow_s, yours_s in rounds)
            times = f"`slow_step` takes {1000 * slow:,.1f} ms, yours {1000 * yours:,.1f} ms"
            told = f"{times}: {faster:.2f} times as fast."
            if faster >= _FASTER:
                return f"{told} The weights are the same."
            if attempt == _ATTEMPTS:
                raise NotYet(
                    f"{told} {_FASTER} times is asked for. How often does the model see the images in one step, "
                    "the recompute of checkpointing counted?"
                )
    raise AssertionError("the last attempt returns or raises")


def _same_step(answer: Answer) -> None:
    """Two steps of the learner's on a small model in float64: the weights, losses and accuracies of `slow_step`."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 4)).double()
    images, labels = torch.randn(20, 3, 2, 2, dtype=torch.float64), torch.randint(4, (20,))
    twin = copy.deepcopy(model)
    ours, theirs = (torch.optim.AdamW(each.parameters(), lr=0.05) for each in (model, twin))
    for _ in range(2):
        expected = slow_step(model, ours, images, labels)
        given = answer(twin, theirs, images, labels)
        if not isinstance(given, tuple) or len(given) != 2:
            raise NotYet(f"Return two things, `loss, accuracy`. It returned {given!r:.80}.")
        for name, one, right in zip(("loss", "accuracy"), given, expected, strict=True):
            if not isinstance(one, torch.Tensor):
                raise NotYet(f"The {name} is a {type(one).__name__}: to read it makes the CPU wait. Return the tensor.")
            if one.requires_grad:
                raise NotYet(f"The {name} still holds the graph, and all activations with it: return it detached.")
            if one.numel() != 1 or not math.isclose(float(one), float(right), abs_tol=1e-6):
                raise NotYet(f"The {name} should be {float(right):.4f}. It was {one!r:.80}.")
        if not _weights(twin).allclose(_weights(model), rtol=0, atol=1e-9):
            raise NotYet("After the step the weights differ from those of `slow_step`: it must train just the same.")


def _weights(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def _rounds(answer: Callable[..., Any]) -> list[tuple[float, float]]:
    """Seconds of one step of `slow_step` and of the learner's, in turns: a slow moment of the machine hits both."""
    device = runtime.pick_device()
    slow, yours = (_one_step(step, device) for step in (slow_step, answer))
    for first in (slow, yours):
        first()  # it makes the optimizer's state
    return [(_seconds(slow, device), _seconds(yours, device)) for _ in range(_ROUNDS)]


def _one_step(step: Callable[..., Any], device: torch.device) -> Callable[[], Any]:
    """A step of the course's model on this device, ready to be called."""
    model = small_resnet(10, MODEL_WIDTH[device.type]).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters())
    size, count = IMAGE_SIZE[device.type], _BATCH[device.type]
    images = torch.rand(count, 3, size, size, device=device)
    labels = torch.zeros(count, dtype=torch.int64, device=device)
    return lambda: step(model, optimizer, images, labels)


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    return time_call(call, device=device, warmup=0, repeats=1).median_s


leaner = Exercise(
    name="leaner",
    hints=(
        "Count the passes through the model: one with checkpointing, its recompute in backward, one for the accuracy.",
        "One plain `logits = model(images)` serves loss and accuracy both.",
    ),
    reference=lean_step,
    check_answer=_check_leaner,
)
