"""Exercises of lesson 04: what fits, an exact accumulated step, and the batch size that is worth it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from course_utils import runtime, throughput
from course_utils.exercises.engine import Answer, Exercise, NotYet
from course_utils.images import IMAGE_SIZE, MODEL_WIDTH
from course_utils.preserve import rng_preserved
from course_utils.resnet import small_resnet
from course_utils.timing import time_call

# --- fits: the line a + b·B turned round ----------------------------------------------------------------------------


def largest_batch(fixed_bytes: float, per_sample_bytes: float, memory_bytes: float, headroom: float) -> int:
    """Return the largest batch size that leaves the share `headroom` (0.1: a tenth) of the memory free; 0 if none."""
    room = memory_bytes * (1 - headroom) - fixed_bytes
    return max(0, int(room // per_sample_bytes))


_GIB = 2**30
_CASES: tuple[tuple[str, float, float, float, float, int], ...] = (
    ("no headroom", 100, 10, 1000, 0.0, 90),
    ("a tenth free", 100, 10, 1000, 0.1, 80),
    ("something left over", 100, 30, 1000, 0.0, 30),
    ("a 16 GiB GPU", 2 * _GIB, 0.125 * _GIB, 16 * _GIB, 0.25, 80),
    ("one sample that just fits", 900, 100, 1000, 0.0, 1),
    ("nothing fits", 950, 100, 1000, 0.0, 0),
    ("not even the model fits", 2000, 100, 1000, 0.1, 0),
)


def _check_fits(answer: Answer) -> str:
    for case, fixed, each, memory, headroom, expected in _CASES:
        given = answer(fixed, each, memory, headroom)
        call = f"largest_batch({fixed:,.0f}, {each:,.0f}, {memory:,.0f}, {headroom})"
        if isinstance(given, bool) or not isinstance(given, int):
            raise NotYet(f"A batch size is a whole number. {call} returned {given!r:.80}.")
        if given == expected:
            continue
        if given < 0:
            raise NotYet(f"With {case}, {call} returned {given}: there is no negative batch. Return 0.")
        needed = fixed + each * given
        if given > 0 and needed > memory * (1 - headroom):
            raise NotYet(
                f"With {case}, {call} returned {given}. That needs {needed:,.0f} bytes, "
                f"of {memory * (1 - headroom):,.0f} that you may use."
            )
        raise NotYet(f"With {case}, {call} should be {expected}. It was {given}: more would fit.")
    return f"Right for all {len(_CASES)} cases. You can now say what fits before you try."


fits = Exercise(
    name="fits",
    hints=(
        "How many bytes may you use? What is left of them when the fixed part is taken off?",
        "Divide what is left by the bytes of one sample and round down. Less than nothing is left: return 0.",
    ),
    reference=largest_batch,
    check_answer=_check_fits,
)

# --- accumulate: the full batch's gradient from pieces that fit -----------------------------------------------------


def accumulated_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, images: torch.Tensor, labels: torch.Tensor, micro_size: int
) -> float:
    """Do one optimizer step on the whole batch in pieces of `micro_size`; return the mean loss of the batch."""
    optimizer.zero_grad()
    total = 0.0
    for piece, targets in zip(images.split(micro_size), labels.split(micro_size), strict=True):
        loss = functional.cross_entropy(model(piece), targets, reduction="sum") / len(images)
        loss.backward()
        total += loss.item()
    optimizer.step()
    return total


def _check_accumulate(answer: Answer) -> str:
    for count, micro_size in ((12, 4), (10, 4), (3, 8)):
        model, optimizer, images, labels, pieces, steps = _watched(count)
        expected_loss, expected = _full_step(model, images, labels)
        given = answer(model, optimizer, images, labels, micro_size)
        case = f"{count} samples in pieces of {micro_size}"
        if not pieces or max(pieces) > micro_size:
            raise NotYet(f"With {case}, the model saw {pieces or 'nothing'}: each piece may hold {micro_size} at most.")
        if sum(pieces) != count:
            raise NotYet(f"With {case}, the model saw {sum(pieces)} samples: {pieces}.")
        if len(steps) != 1:
            raise NotYet(f"With {case}, optimizer.step() ran {len(steps)} times. Once, after the last piece.")
        got = nn.utils.parameters_to_vector(model.parameters()).detach()
        if not torch.allclose(got, expected, rtol=0, atol=1e-9):
            raise NotYet(f"With {case}, {_what_went_wrong(count, micro_size)}")
        if not isinstance(given, float) or abs(given - expected_loss) > 1e-6:
            raise NotYet(
                f"With {case}, the step is right. Return the batch's mean loss as a float, {expected_loss:.4f}."
            )
    return "Right: the same step as with the whole batch, also with a short last piece."


def _what_went_wrong(count: int, micro_size: int) -> str:
    if count % micro_size == 0:
        return (
            "the weights differ from one step on the whole batch. Are old gradients cleared first, and does each "
            "piece's loss count with its share of the batch?"
        )
    return (
        "the weights differ from one step on the whole batch, though equal pieces were right. The last piece is "
        "shorter: a mean of means gives its samples too much weight."
    )


def _watched(
    count: int,
) -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor, torch.Tensor, list[int], list[int]]:
    """A small model with old gradients on it, and lists that note its pieces and its optimizer's steps."""
    with rng_preserved():
        torch.default_generator.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        images, labels = torch.randn(count, 6, dtype=torch.float64), torch.randint(3, (count,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    pieces: list[int] = []
    steps: list[int] = []
    model.register_forward_hook(lambda _, inputs, output: pieces.append(len(inputs[0])))
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    return model, optimizer, images, labels, pieces, steps


def _full_step(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> tuple[float, torch.Tensor]:
    """The loss, and the weights after one plain step on the whole batch, taken by a copy of the model."""
    twin = copy.deepcopy(model)
    twin._forward_hooks.clear()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.5)
    optimizer.zero_grad()
    loss = functional.cross_entropy(twin(images), labels)
    loss.backward()
    optimizer.step()
    return loss.item(), nn.utils.parameters_to_vector(twin.parameters()).detach()


accumulate = Exercise(
    name="accumulate",
    hints=(
        "`images.split(micro_size)` gives the pieces. One `zero_grad()` before them, one `step()` behind them.",
        'Sum the losses of a piece (`reduction="sum"`) and divide by the samples of the *whole* batch.',
    ),
    reference=accumulated_step,
    check_answer=_check_accumulate,
)

# --- knee: measured on this device ----------------------------------------------------------------------------------

# On a busy machine two measurements of one size differ by 10 % and more: only what noise cannot explain is a "no".
_STILL_RISING = 1.25
_AS_FAST = 0.95
_ATTEMPTS = 3
_BUDGET_S = 1.0
_LARGEST = 4096


def best_batch_size(trial: Callable[[int], None]) -> int:
    """Return the smallest batch size within 5 % of this device's best throughput. `trial(n)` does one step of n."""
    device = runtime.pick_device()
    largest = 2048 if device.type == "cuda" else 256
    curve = throughput.throughput_curve(trial, device=device, largest=largest, budget_s=8, progress=False)
    return curve.knee().batch_size


def make_trial() -> Callable[[int], None]:
    """`trial(n)`: one training step of the course's model on n images that are on this device already."""
    device = runtime.pick_device()
    model = small_resnet(10, MODEL_WIDTH[device.type]).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters())
    size = IMAGE_SIZE[device.type]

    def trial(batch_size: int) -> None:
        images = torch.rand(batch_size, 3, size, size, device=device)
        labels = torch.zeros(batch_size, dtype=torch.int64, device=device)
        loss = functional.cross_entropy(model(images), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return trial


def _check_knee(answer: Answer) -> str:
    with rng_preserved():
        trial = make_trial()
        # A "no" is measured again, the answer too: another program may have been in the way of either.
        for attempt in range(1, _ATTEMPTS + 1):
            given = answer(trial)
            if isinstance(given, bool) or not isinstance(given, int) or not 1 <= given <= _LARGEST:
                raise NotYet(f"Return a batch size, a whole number from 1 to {_LARGEST}. It returned {given!r:.80}.")
            rates = _rates(trial, given)
            verdict = _verdict(given, rates)
            told = ", ".join(f"{size}: {rate:,.0f}" for size, rate in rates.items())
            if verdict is None:
                return f"Samples/s by batch size: {told}. Larger gains little, a quarter of it loses some."
            if attempt == _ATTEMPTS:
                raise NotYet(f"Samples/s by batch size: {told}. {verdict}")
    raise AssertionError("the last attempt returns or raises")


def _rates(trial: Callable[[int], None], given: int) -> dict[int, float]:
    """Samples per second at a quarter, one, two and four times the answer, as far as they fit."""
    device, rates = runtime.pick_device(), {}
    for size in sorted({max(1, given // 4), given, 2 * given, 4 * given}):
        try:
            timing = time_call(lambda size=size: trial(size), device=device, budget_s=_BUDGET_S)  # type: ignore[misc]
        except torch.OutOfMemoryError:
            break
        rates[size] = size / timing.median_s
    return rates


def _verdict(given: int, rates: dict[int, float]) -> str | None:
    """What speaks against the answer, or None."""
    if given not in rates:
        return f"{given} does not fit into this device's memory."
    best = max(rates, key=lambda size: rates[size])
    if rates[best] > _STILL_RISING * rates[given]:
        return f"{best} is {rates[best] / rates[given]:.2f} times as fast: the curve is still rising there."
    quarter = max(1, given // 4)
    if quarter < given and rates[quarter] >= _AS_FAST * rates[best]:
        return f"{quarter} is as fast: the smallest size within 5 % is asked for, since the rest buys no speed."
    return None


knee = Exercise(
    name="knee",
    hints=(
        "Time `trial(8)`, `trial(16)`, … with `timing.time_call`. Samples per second are n divided by the median.",
        "`throughput.throughput_curve(trial, device=device, largest=…).knee().batch_size` does it.",
    ),
    reference=best_batch_size,
    check_answer=_check_knee,
)
