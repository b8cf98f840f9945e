"""Give the fault of a float16 training step its name, from the record that `amp_trial` made of one call.

The numbers alone decide whether there is a fault: the weights against a float64 step, how far the scheduler moved, and
the scale after an overflow. What was called, and in which order, only helps to name it.
"""

from __future__ import annotations

import torch

from course_utils.amp_trial import Call, TooManyForwards

# float16 keeps 11 bits, an error of about 0.05 % a product; the faults below change a step by a factor of 2 or more.
TOLERANCE = 0.05

FAULTS: dict[str, str] = {
    "clip before unscale": (
        "The gradients were clipped while they still carried the scale: each step came out shorter by that factor. "
        "Call scaler.unscale_(optimizer) before the clipping."
    ),
    "double unscale": (
        "The gradients were divided by the scale more than once. Call scaler.unscale_(optimizer) once in a step, after "
        "the last backward; scaler.step() then does not do it again."
    ),
    "missing update": (
        "scaler.update() was not called after a step; a skipped step needs it too. Without it the scale never falls, "
        "and the scaler refuses the next step. Call it once, after scaler.step(optimizer), whatever that did."
    ),
    "update before step": (
        "scaler.update() ran before scaler.step(optimizer) and made the scaler forget what it knew of these gradients. "
        "The order is unscale_, clip, step, update, each once and after the last micro-batch."
    ),
    "unscaled backward": (
        "backward() ran on the loss without the scale, so small gradients become 0 in float16; dividing by the scale "
        "afterwards makes the step too short. Write scaler.scale(loss).backward()."
    ),
    "undivided accumulation": (
        "The micro-batches' gradients were summed, not averaged: the step is as many times too long as there are "
        "micro-batches. Divide each loss by len(micro_batches)."
    ),
    "divided twice": (
        "The gradients were divided by the number of micro-batches more than once. Divide the loss, and nothing else."
    ),
    "gradients cleared in the loop": (
        "The gradients were cleared between the micro-batches, so that only the last one counts. Call "
        "optimizer.zero_grad() once for each optimizer step."
    ),
    "gradients not cleared": (
        "Gradients of an earlier step were still there. After a skipped step they are inf or nan, and no step is ever "
        "taken again. Call optimizer.zero_grad() once for each optimizer step."
    ),
    "gradients cleared before the step": (
        "The gradients were gone when the step came. Call optimizer.zero_grad() before the first backward, or after "
        "the step."
    ),
    "a step for each micro-batch": (
        "The optimizer stepped more than once. Accumulate over all micro-batches, then step once, after the loop."
    ),
    "optimizer.step instead of scaler.step": (
        "optimizer.step() was called directly. It uses the gradients as they are: scaled, or inf and nan after an "
        "overflow. Call scaler.step(optimizer), which unscales if need be and skips the step on an overflow."
    ),
    "no backward": "No gradient arrived at the weights. Call scaler.scale(loss).backward() for each micro-batch.",
    "no optimizer step": "The weights did not move. Call scaler.step(optimizer) once, after the last micro-batch.",
    "unscale after step": (
        "scaler.unscale_(optimizer) came after the step. The order is unscale_, clip, step, update."
    ),
    "clipping missing": (
        "The optimizer got the gradients unclipped. Call clip_grad_norm_(model.parameters(), max_norm) between "
        "scaler.unscale_(optimizer) and scaler.step(optimizer)."
    ),
    "clipping changes the direction": (
        "The clipped gradient points elsewhere. Scale all gradients by one factor, so that their total norm is at most "
        "max_norm, as clip_grad_norm_ does; not value by value, nor each tensor for itself."
    ),
    "no autocast": (
        "The layers did not run in float16. Run model and loss under "
        "torch.autocast(inputs.device.type, dtype=torch.float16); autocast of another device type does nothing here."
    ),
    "autocast in bfloat16": (
        "The layers ran in bfloat16, which is what autocast takes on a CPU when no dtype is given. This step is to use "
        "float16: give dtype=torch.float16. (bfloat16 has the range of float32 and needs no scaler.)"
    ),
    "half-precision weights": (
        "The weights were converted to float16. Leave the model in float32: autocast casts what each layer needs."
    ),
    "scheduler steps on a skipped step": (
        "The scaler skipped the optimizer step because of an overflow, and the scheduler moved all the same. Step the "
        "scheduler only if the scale did not fall in scaler.update()."
    ),
    "scheduler misses a step when the scale grows": (
        "The scale had grown, which happens after steps that were taken, and the scheduler did not move. Only a scale "
        "that fell means a skipped step: compare with >=, not with ==."
    ),
    "missing scheduler step": "The optimizer stepped and the scheduler did not. Call scheduler.step() after the step.",
    "scheduler steps more than once": (
        "The scheduler moved more than once in one optimizer step. Call it once, at the end."
    ),
    "scheduler before the optimizer": (
        "The scheduler changed the learning rate before the optimizer used it. Call scheduler.step() last."
    ),
    "overflow reaches the weights": (
        "Gradients overflowed, and the weights became inf or nan. scaler.step(optimizer) skips such a step."
    ),
    "overflow not skipped": (
        "Gradients overflowed, and the weights moved. The whole step must be skipped, with all its micro-batches."
    ),
    "does not end": "One call ran the model far more often than there are micro-batches. Run each of them once.",
    "wrong step": "The step is not the one that clipped, averaged gradients give. The evidence has the two lengths.",
    "raises": "The step raised an error; the evidence has its message and its line.",
    "wrong arguments": "The step must take (model, optimizer, scaler, scheduler, micro_batches, max_norm).",
}


def name_fault(call: Call) -> str | None:
    """The fault that this call shows, a key of FAULTS, or None."""
    if call.error is not None:
        return _of_error(call)
    return _of_overflow(call) if call.overflow else _of_step(call)


def _of_step(call: Call) -> str | None:
    """A call whose step has to be taken."""
    if not call.relative_error <= TOLERANCE:  # nan counts as wrong
        return _of_weights(call)
    if call.scheduler_steps == 0:
        grew = call.scale_after > call.scale_before
        return "scheduler misses a step when the scale grows" if grew else "missing scheduler step"
    return "scheduler steps more than once" if call.scheduler_steps > 1 else None


def _of_overflow(call: Call) -> str | None:
    """A call whose step has to be skipped."""
    if not call.taken.isfinite().all():
        direct = any(step.direct for step in call.optimizer_steps)
        return "optimizer.step instead of scaler.step" if direct else "overflow reaches the weights"
    if call.relative_error > 0:
        if torch.float16 not in call.dtypes:
            return "autocast in bfloat16" if torch.bfloat16 in call.dtypes else "no autocast"
        return "unscaled backward" if _is_unscaled(call) else "overflow not skipped"
    if not call.scale_after < call.scale_before:  # first: a scheduler that asks the scale is misled by this
        return "missing update"
    return "scheduler steps on a skipped step" if call.scheduler_steps else None


def _of_weights(call: Call) -> str:
    """The weights moved, and not by what they should; or they did not move."""
    scale, pieces, max_norm = call.scale_before, call.scenario.micro_batches, call.scenario.max_norm
    length, wanted, seen = (vector.norm().item() for vector in (call.gradient, call.expected, call.taken))
    if not call.backwards:
        return "no backward"
    if not call.optimizer_steps:
        held = call.backwards[0].grad_before
        if held is not None and not held.isfinite().all():
            return "gradients not cleared"
        return "wrong step" if seen or "scaler.step" in call.events else "no optimizer step"
    if len(call.optimizer_steps) > 1:
        return "a step for each micro-batch"
    if call.optimizer_steps[0].lr != call.lr:
        return "scheduler before the optimizer"
    if _updates_before_step(call):
        return "update before step"
    if _is_unscaled(call):
        return "unscaled backward"
    if len(call.backwards) > 1 and all(_is_empty(backward.grad_before) for backward in call.backwards):
        return "gradients cleared in the loop"
    if seen == 0:
        return "gradients cleared before the step"
    if not torch.cosine_similarity(call.taken, call.expected, dim=0) > 0.99:
        return "clipping changes the direction" if wanted < length else "wrong step"
    if call.optimizer_steps[0].direct and "unscale_" not in call.events:
        return "optimizer.step instead of scaler.step"
    lengths = {
        "clip before unscale": max_norm / scale,
        "double unscale": length / scale,
        "clipping missing": length,
    }
    if pieces > 1:
        lengths |= {"undivided accumulation": wanted * pieces, "divided twice": wanted / pieces}
    return next((fault for fault, value in lengths.items() if _near(seen, value)), "wrong step")


def _of_error(call: Call) -> str:
    """Torch's own messages for a scaler used wrongly (torch/amp/grad_scaler.py, the same in 2.11 and 2.14)."""
    if isinstance(call.error, TooManyForwards):
        return "does not end"
    text = str(call.error)
    if "unscale_() has already been called" in text:
        # The first of this call: the other one was in an earlier call, and no update came between.
        return "missing update" if call.events.count("unscale_") == 1 else "double unscale"
    second_step = "step() has already been called" in text
    if second_step or "unscale_() is being called after step()" in text:
        if call.events.count("scaler.step") == second_step:  # likewise: the step was an earlier call's
            return "missing update"
        return "unscale after step" if call.scenario.micro_batches == 1 else "a step for each micro-batch"
    if "_scale is None" in text:
        return "unscaled backward"
    if "No inf checks were recorded prior to update" in text and call.optimizer_steps:
        return "optimizer.step instead of scaler.step"
    if "No inf checks were recorded" in text:
        if not call.backwards:
            return "no backward"
        return "update before step" if "update" in text else "gradients cleared before the step"
    return "half-precision weights" if "unscale FP16 gradients" in text else "raises"


def _is_unscaled(call: Call) -> bool:
    """Whether the gradients that backward made are the plain ones, summed or averaged, without the scale."""
    if call.scale_before == 1 or not call.backwards:
        return False
    plain = call.first_weight_gradient
    arrived = torch.stack([backward.gradient for backward in call.backwards]).sum(0)
    factor = (torch.dot(arrived, plain) / torch.dot(plain, plain)).item()
    return _near(factor, 1) or _near(factor, call.scenario.micro_batches)


def _updates_before_step(call: Call) -> bool:
    steps = [index for index, event in enumerate(call.events) if event == "scaler.step"]
    return bool(steps) and "update" in call.events[: steps[-1]]


def _is_empty(gradient: torch.Tensor | None) -> bool:
    return gradient is None or not gradient.any()


def _near(value: float, target: float) -> bool:
    return abs(value - target) <= 2 * TOLERANCE * abs(target)
