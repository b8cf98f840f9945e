"""Exercises of lesson 07: let go of a model, a mean that keeps no graph, and a loop freed of its tidying."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from course_utils import runtime
from course_utils.exercises.engine import Answer, Exercise, NotYet
from course_utils.holders import who_holds
from course_utils.images import IMAGE_SIZE
from course_utils.live_tensors import WeakMemory
from course_utils.oom import SimulatedMemory
from course_utils.preserve import rng_preserved
from course_utils.resnet import small_resnet
from course_utils.timing import synchronize
from course_utils.views import number

# --- held: everything that keeps a model alive ------------------------------------------------------------------------


def let_go(session: dict[str, Any]) -> dict[str, Any]:
    """Leave nothing in `session` that keeps the model; losses stay, as numbers. Return it."""
    session["losses"] = [loss.item() for loss in session["losses"]]
    for name in ("model", "optimizer", "scheduler", "scores", "error"):
        del session[name]
    gc.collect()
    return session


_KEPT = ("losses", "images")
_BECAUSE = {
    "optimizer": "an optimizer keeps the parameters that it steps",
    "scheduler": "a scheduler keeps its optimizer, and the optimizer the parameters",
    "graph": "a tensor keeps the graph that made it, and the graph the weights",
    "exception": "an error keeps its traceback, and with it the variables of the calls that failed",
}


def _check_held(answer: Answer) -> str:
    with rng_preserved():
        session, weights, losses = _made_session()
    given = answer(session)
    if not isinstance(given, dict):
        raise NotYet(f"Return the session, a dict. It returned {type(given).__name__}.")
    missing = [name for name in _KEPT if name not in given]
    if missing:
        raise NotYet(f"session[{missing[0]!r}] is still needed: leave it in.")
    if given["images"] is not session["images"]:
        raise NotYet("session['images'] should stay as it was: it does not hold the model.")
    values = _numbers(given["losses"])
    if values is None or len(values) != len(losses):
        raise NotYet(f"session['losses'] should still have {len(losses)} losses, as numbers.")
    if any(abs(value - expected) > 1e-5 for value, expected in zip(values, losses, strict=True)):
        raise NotYet("The losses should keep their values.")
    del session
    gc.collect()
    if weights.keys():
        raise NotYet(f"The model's weights are still in memory: {_holder(weights, given)}.")
    return "Nothing holds the model any more, and the losses are still there. The order did not matter: all had to go."


def _holder(weights: WeakMemory, session: dict[str, Any]) -> str:
    """Who still holds them, by who_holds: the first in the session."""
    found = [one for one in who_holds(weights, namespace={"session": session}) if one.name == "session"]
    if not found:
        return "something outside the session holds them. Does your function store them somewhere?"
    return f"{found[0].path[:80]} leads to them: {_BECAUSE.get(found[0].kind, 'so it must go too')}"


def _numbers(losses: Any) -> list[float] | None:
    try:
        return [loss.item() if isinstance(loss, torch.Tensor) else float(loss) for loss in losses]
    except (TypeError, ValueError):
        return None


def _made_session() -> tuple[dict[str, Any], WeakMemory, list[float]]:
    """A session after three steps and an error, weak references to its weights, and the losses' values."""
    torch.default_generator.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    images, labels = torch.randn(32, 64), torch.randint(10, (32,))
    session: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 10),
        "losses": [],
        "images": images,
    }
    for _ in range(3):
        loss = functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session["losses"].append(loss)
    session["scores"] = model(images)
    session["error"] = _caught(model, images)
    return session, WeakMemory("weights", model.parameters()), [loss.item() for loss in session["losses"]]


def _caught(model: nn.Module, images: torch.Tensor) -> BaseException:
    def step(batch: torch.Tensor) -> None:
        scores = model(batch)
        raise torch.OutOfMemoryError(f"simulated: out of memory at {scores.numel()} scores")

    try:
        step(images)
    except torch.OutOfMemoryError as error:
        return error
    raise AssertionError("step always raises")


held = Exercise(
    name="held",
    hints=(
        "Who leads to a weight? The model; the optimizer; the scheduler, through the optimizer; a loss and the scores, "
        "through their graph; the error, through its traceback.",
        "Make the losses numbers with `.item()`, then `del session[name]` for each of the five others.",
    ),
    reference=let_go,
    check_answer=_check_held,
)

# --- total_loss: a sum that keeps no graph ----------------------------------------------------------------------------


def mean_loss(model: nn.Module, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Return the mean of the batches' losses as a float; hold no more with more batches."""
    total = 0.0
    with torch.no_grad():
        for inputs, labels in batches:
            total += functional.cross_entropy(model(inputs), labels).item()
    return total / len(batches)


_FEW, _MANY = 3, 12
_MAY_GROW = 1.25  # twice and more is what a kept graph takes


def _check_total(answer: Answer) -> str:
    with rng_preserved():
        torch.default_generator.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
        batches = [(torch.randn(256, 64), torch.randint(10, (256,))) for _ in range(_MANY)]
    peaks = []
    for count in (_FEW, _MANY):
        memory = SimulatedMemory(None)
        with memory:
            given = answer(model, batches[:count])
        peaks.append(memory.peak_bytes)
        with torch.no_grad():
            losses = [functional.cross_entropy(model(inputs), labels).item() for inputs, labels in batches[:count]]
        expected = sum(losses) / count
        if isinstance(given, torch.Tensor):
            graph = "with the graph that made it" if given.grad_fn is not None else "without a graph, which is half way"
            raise NotYet(f"It returned a tensor {graph}. Return a float: `.item()` makes one.")
        if not isinstance(given, float):
            raise NotYet(f"Return a float. It returned {given!r:.60}.")
        if abs(given - expected) > 1e-4:
            raise NotYet(f"The mean loss of {count} batches is {expected:.4f}. It returned {given:.4f}.")
    few, many = peaks
    few_text, many_text = (number(peak / 1024, "KiB") for peak in peaks)
    told = f"At the fullest it held {few_text} with {_FEW} batches and {many_text} with {_MANY}."
    if many > _MAY_GROW * few:
        raise NotYet(f"{told} Each loss that you keep, or add to a sum, keeps its batch's graph and activations.")
    return f"{told} Nothing piles up."


total_loss = Exercise(
    name="total_loss",
    hints=(
        "`total += loss` makes a longer graph each time. What of the loss do you need?",
        "`loss.item()` is a number. And under `torch.no_grad()` there is no graph at all.",
    ),
    reference=mean_loss,
    check_answer=_check_total,
)

# --- tidy: measured on this device ------------------------------------------------------------------------------------

_ATTEMPTS = 2
_STEPS = 4
_OF_THE_GAIN = 0.7  # what of the time that tidying takes must be saved
Batches = list[tuple[torch.Tensor, torch.Tensor]]
Train = Callable[[nn.Module, torch.optim.Optimizer, Batches], list[float]]


def train_briskly(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches) -> list[float]:
    """Train one step on each batch; return the losses as floats. Do no more than that."""
    losses = []
    for images, labels in batches:
        loss = functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


def train_tidily(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches) -> list[float]:
    """The same training by somebody who is afraid of full memory: it is the baseline."""
    losses = []
    for images, labels in batches:
        loss = functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        del loss
        gc.collect()
        torch.cuda.empty_cache()
    return losses


def _check_tidy(answer: Answer) -> str:
    with rng_preserved():
        torch.default_generator.manual_seed(0)
        device = runtime.pick_device()
        size = IMAGE_SIZE[device.type]
        model = small_resnet(10, 8).to(device).train()
        batches = [
            (torch.rand(8, 3, size, size, device=device), torch.randint(10, (8,), device=device)) for _ in range(_STEPS)
        ]
        train_briskly(*_copied(model), batches)  # warm up: the first step loads kernels
        for attempt in range(1, _ATTEMPTS + 1):
            tidy_s, expected = _timed(train_tidily, model, batches, device)
            yours_s, losses = _timed(answer, model, batches, device)
            _check_losses(losses, expected)
            brisk_s, _ = _timed(train_briskly, model, batches, device)
            told = (
                f"{_STEPS} steps: {tidy_s * 1e3:,.0f} ms with tidying, yours {yours_s * 1e3:,.0f} ms "
                f"({tidy_s / yours_s:.1f} times as fast)."
            )
            # Another program may have been in the way of any of the three: a "no" is measured again.
            if tidy_s - yours_s >= _OF_THE_GAIN * (tidy_s - brisk_s) and yours_s < tidy_s:
                return f"{told} The losses are the same."
            if attempt == _ATTEMPTS:
                raise NotYet(f"{told} It can be {tidy_s / brisk_s:.1f} times: what in the loop is no training?")
    raise AssertionError("the last attempt returns or raises")


def _check_losses(losses: Any, expected: list[float]) -> None:
    if not isinstance(losses, list) or not all(isinstance(loss, float) for loss in losses):
        raise NotYet("Return the losses as a list of floats: `.item()` makes one of a loss.")
    if len(losses) != len(expected):
        raise NotYet(f"There are {len(expected)} batches, and it returned {len(losses)} losses: train on each once.")
    # On a GPU sums come in another order from run to run.
    if any(abs(loss - right) > 0.01 + 0.02 * abs(right) for loss, right in zip(losses, expected, strict=True)):
        raise NotYet("The losses are others than before: it is no longer the same training.")


def _copied(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    twin = copy.deepcopy(model)
    return twin, torch.optim.AdamW(twin.parameters())


def _timed(train: Train | Answer, model: nn.Module, batches: Batches, device: torch.device) -> tuple[float, Any]:
    """Seconds of one run on a fresh copy, and what it returned."""
    twin, optimizer = _copied(model)
    synchronize(device)
    begun = time.perf_counter()
    losses = train(twin, optimizer, batches)
    synchronize(device)
    return time.perf_counter() - begun, losses


tidy = Exercise(
    name="tidy",
    hints=(
        "A loss's graph is freed as soon as the name gets its next value. What does `gc.collect()` add to that?",
        "Leave out `del`, `gc.collect()` and `empty_cache()`. On a GPU, `.item()` once at the end saves waiting, too.",
    ),
    reference=train_briskly,
    check_answer=_check_tidy,
)
