"""Run a learner's float16 training step on a tiny model, and record what it did beside what it should have done.

Nothing is judged or named here: `amp_faults` does that. All runs on the CPU, where GradScaler and float16 autocast
work as on a GPU (tried with torch 2.11 and 2.14). The expected step is plain float64 arithmetic without any scaler.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

from course_utils.preserve import rng_preserved

Step = Callable[..., Any]
Event = Literal["scale", "backward", "unscale_", "scaler.step", "optimizer.step", "update", "scheduler.step"]

# float16 ends at 65504. With this scale, the gradients here (below 1) stay far under it, and those of an input that is
# 4000 times as large go far over it; that input's activations and loss still fit.
_SCALE, _OVERFLOWING = 2.0**12, 4000.0
_LEARNING_RATE, _SAMPLES, _FEATURES, _CLASSES = 0.5, 4, 6, 3
_MOST_FORWARDS = 100


@dataclass(frozen=True)
class Scenario:
    """A few calls in a row on a new model; `overflows` says for each whether its gradient leaves float16's range."""

    name: str
    micro_batches: int
    max_norm: float
    overflows: tuple[bool, ...]


# A max_norm of 100,000 leaves even scaled gradients alone. The scale doubles after every second good step.
SCENARIOS = (
    Scenario("one micro-batch", 1, 1e5, (False, False)),
    Scenario("clipping", 1, 0.1, (False, False)),
    Scenario("accumulation", 3, 1e5, (False, False)),
    Scenario("overflow", 2, 0.1, (False, False, True, False)),
)


@dataclass(frozen=True)
class Backward:
    """What arrived at the first layer's weight in one backward pass, and what its .grad held before."""

    gradient: torch.Tensor
    grad_before: torch.Tensor | None
    under_autocast: bool


@dataclass(frozen=True)
class OptimizerStep:
    """A call of optimizer.step: from within scaler.step or not, and with which learning rate."""

    direct: bool
    lr: float


@dataclass
class Call:
    """One call of the learner's step. Gradients and `taken` are float64 vectors of all weights, in model order."""

    scenario: Scenario
    number: int  # from 1
    overflow: bool
    scale_before: float
    lr: float
    gradient: torch.Tensor  # of the mean of the micro-batches' losses, unclipped
    scale_after: float = 0.0
    taken: torch.Tensor = field(default_factory=lambda: torch.zeros(0))  # (weights before - after) / lr
    scheduler_steps: int = 0
    events: list[Event] = field(default_factory=list)
    backwards: list[Backward] = field(default_factory=list)
    optimizer_steps: list[OptimizerStep] = field(default_factory=list)
    dtypes: set[torch.dtype] = field(default_factory=set)  # of the first layer's output
    forwards: int = 0
    error: Exception | None = None
    warnings: tuple[str, ...] = ()

    @property
    def expected(self) -> torch.Tensor:
        """What `taken` should be: the gradient, clipped by its total norm; zero where the step has to be skipped."""
        if self.overflow:
            return torch.zeros_like(self.gradient)
        length = self.gradient.norm().item()
        return self.gradient if length <= self.scenario.max_norm else self.gradient / length * self.scenario.max_norm

    @property
    def relative_error(self) -> float:
        """The length of `taken` - `expected` over the length of `expected`; infinite where nothing was expected."""
        off = (self.taken - self.expected).norm().item()
        length = self.expected.norm().item()
        return off / length if length else (0.0 if off == 0 else float("inf"))

    @property
    def first_weight_gradient(self) -> torch.Tensor:
        """The part of `gradient` that belongs to the weight that `backwards` watches: it comes first."""
        return self.gradient[: self.backwards[0].gradient.numel()] if self.backwards else self.gradient[:0]


class TooManyForwards(Exception):
    """One call of the step ran the model so often that it may never end."""


def calls(step: Step) -> Generator[Call, None, None]:
    """Every call of every scenario, in order. A scenario ends early after an error or a weight that is not finite."""
    with rng_preserved():
        for scenario in SCENARIOS:
            yield from _Trial(scenario).calls(step)


class _Trial:
    """A model, its optimizer, scaler and scheduler, all of which note what happens in the current call."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self._random = torch.Generator().manual_seed(0)
        torch.default_generator.manual_seed(0)  # `calls` puts it back; torch.manual_seed would touch CUDA too
        self.model = _model(torch.float32)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=_LEARNING_RATE)
        self.scaler = _NotedScaler(self)
        self.scheduler = _NotedScheduler(self)
        self.in_scaler = False
        self.call = self._next_call(0, False, [])
        self._first.register_forward_hook(lambda *arguments: self._note_forward(arguments[-1]))
        self._first.weight.register_hook(self._note_backward)
        self.optimizer.register_step_pre_hook(lambda *_: self._note_optimizer_step())

    def calls(self, step: Step) -> Iterator[Call]:
        for number, overflow in enumerate(self.scenario.overflows, 1):
            batches = self._micro_batches(overflow)
            call = self.call = self._next_call(number, overflow, batches)
            before, moved = self._weights(), self.scheduler.last_epoch
            with warnings.catch_warnings(record=True) as heard:
                warnings.simplefilter("always")
                try:
                    step(self.model, self.optimizer, self.scaler, self.scheduler, batches, self.scenario.max_norm)
                except Exception as error:  # noqa: BLE001  whatever a learner's code raises is explained to them
                    call.error = error
            call.warnings = tuple(dict.fromkeys(str(warning.message) for warning in heard))
            call.taken = (before - self._weights()) / call.lr
            call.scheduler_steps = self.scheduler.last_epoch - moved
            call.scale_after = self.scaler.get_scale()
            yield call
            if call.error is not None or not call.taken.isfinite().all():
                return

    @property
    def _first(self) -> nn.Linear:
        layer = self.model[0]
        assert isinstance(layer, nn.Linear)
        return layer

    def note(self, event: Event) -> None:
        self.call.events.append(event)

    def _next_call(self, number: int, overflow: bool, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> Call:
        twin = self._twin()
        gradient = torch.zeros(0)
        if batches:
            with torch.enable_grad():  # also where the notebook has switched it off
                losses = [functional.cross_entropy(twin(inputs.double()), targets) for inputs, targets in batches]
                parts = torch.autograd.grad(torch.stack(losses).mean(), list(twin.parameters()))
            gradient = torch.cat([part.flatten() for part in parts])
        lr = float(self.optimizer.param_groups[0]["lr"])
        return Call(self.scenario, number, overflow, self.scaler.get_scale(), lr, gradient)

    def _micro_batches(self, overflow: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """New (inputs, targets) pairs: (4, 6) float32 and (4,) int64. An overflow comes from the first pair alone."""
        pairs = []
        for index in range(self.scenario.micro_batches):
            inputs = torch.randn(_SAMPLES, _FEATURES, generator=self._random, dtype=torch.float32)
            targets = torch.randint(_CLASSES, (_SAMPLES,), generator=self._random)
            if overflow and index == 0:
                inputs = inputs * _OVERFLOWING
                with torch.no_grad():
                    targets = self._twin()(inputs.double()).argmin(1)  # all wrong: the gradient is as large as can be
            pairs.append((inputs, targets))
        return pairs

    def _twin(self) -> nn.Sequential:
        """The model as it is now, in float64 and with nothing watching."""
        twin = _model(torch.float64)
        twin.load_state_dict(self.model.state_dict())
        return twin

    def _weights(self) -> torch.Tensor:
        return torch.cat([parameter.detach().double().flatten() for parameter in self.model.parameters()])

    def _note_forward(self, output: torch.Tensor) -> None:
        self.call.dtypes.add(output.dtype)
        self.call.forwards += 1
        if self.call.forwards > _MOST_FORWARDS:
            raise TooManyForwards(f"The model ran more than {_MOST_FORWARDS} times in one call.")

    def _note_backward(self, gradient: torch.Tensor) -> None:
        self.note("backward")
        held = self._first.weight.grad
        self.call.backwards.append(
            Backward(
                gradient.detach().double().flatten(),
                None if held is None else held.detach().clone().flatten(),
                torch.is_autocast_enabled("cpu"),
            )
        )

    def _note_optimizer_step(self) -> None:
        self.note("optimizer.step")
        lr = float(self.optimizer.param_groups[0]["lr"])
        self.call.optimizer_steps.append(OptimizerStep(not self.in_scaler, lr))


def _model(dtype: torch.dtype) -> nn.Sequential:
    # SiLU: not bounded, so that a large input gives a large gradient, and smooth, so that rounding cannot flip a unit.
    first = nn.Linear(_FEATURES, 8, device="cpu", dtype=dtype)
    return nn.Sequential(first, nn.SiLU(), nn.Linear(8, _CLASSES, device="cpu", dtype=dtype))


class _NotedScaler(torch.amp.GradScaler):
    """A GradScaler that notes the calls made to it; what it calls within its own `step` is not noted again."""

    def __init__(self, trial: _Trial) -> None:
        super().__init__("cpu", init_scale=_SCALE, growth_interval=2)
        self._trial = trial

    def scale(self, outputs: Any) -> Any:
        self._trial.note("scale")
        return super().scale(outputs)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._trial.in_scaler:
            self._trial.note("unscale_")
        super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        self._trial.note("scaler.step")
        self._trial.in_scaler = True
        try:
            return super().step(optimizer, *args, **kwargs)
        finally:
            self._trial.in_scaler = False

    def update(self, new_scale: Any = None) -> None:
        self._trial.note("update")
        super().update(new_scale)


class _NotedScheduler(torch.optim.lr_scheduler.ExponentialLR):
    """Halves the learning rate at each step, so that a step with the wrong one shows in the weights."""

    def __init__(self, trial: _Trial) -> None:
        self._trial: _Trial | None = None  # its own first step, made in here, is not the learner's
        super().__init__(trial.optimizer, gamma=0.5)
        self._trial = trial

    def step(self, epoch: int | None = None) -> None:
        if self._trial is not None:
            self._trial.note("scheduler.step")
        super().step(epoch)
