"""Try something with a model and leave no trace: weights, optimizer, gradients and random numbers are put back.

    with training_preserved(model, optimizer):
        train_a_few_steps(model, optimizer)
    # bit for bit what it was before, also if an exception ended the block

A trial step changes more than weights: BatchNorm counts batches, the first Adam step creates its state, dropout draws
random numbers, and a float16 scaler remembers which gradients it has unscaled.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

_Restore = Callable[[], Any]


@contextmanager
def rng_preserved() -> Iterator[None]:
    """Put the random state of Python, NumPy, torch and every CUDA device back when the block ends.

    It never starts CUDA: the generators of the GPUs are kept if CUDA runs when the block begins. Where the block itself
    starts CUDA and that must not show, call `torch.cuda.init()` first. A `torch.Generator` or `numpy.random.Generator`
    of your own is not touched; `training_preserved` takes a `torch.Generator` among its `others`.
    """
    restore = _keep_rng()
    try:
        yield
    finally:
        restore()


@contextmanager
def training_preserved(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, scaler: Any = None, *others: Any
) -> Iterator[TrainingState]:
    """Put all training state back when the block ends, whatever ends it. What is kept, and how: see `TrainingState`.

    The block gets the `TrainingState`, whose `restore()` starts the next of several trials from the same state.
    """
    state = TrainingState(model, optimizer, scaler, *others)
    try:
        yield state
    finally:
        state.restore()


class TrainingState:
    """A copy, in host memory, of all that training changes; `restore()` puts it back, as often as it is called.

    Kept of `model`: parameters, buffers, `requires_grad`, `.grad` (None stays None) and the train or eval flag of every
    submodule; of `optimizer`: its state (also an empty one) and its param_groups; of `scaler` (a GradScaler): all its
    attributes, so that an interrupted step leaves no gradients marked as unscaled; and all random states, as in
    `rng_preserved`. `others` are more modules, optimizers or scalers, a `torch.Generator`, or anything with
    `state_dict` and `load_state_dict`, such as a learning-rate scheduler.

    Values return bit for bit into the same tensor objects and the same memory. Only a gradient that was dropped in
    between comes back as a new tensor: keeping the old one alive would take device memory from the trial.

    Not kept: what a module stores as a plain attribute, submodules that were added or removed, and registered hooks.
    Tensors must be dense; ValueError for a lazy module that has not seen its first batch.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, scaler: Any = None, *others: Any
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"The model must be a torch.nn.Module, not {type(model).__name__}.")
        self._tensors: dict[int, _KeptTensor] = {}
        self._restores: list[_Restore] = []
        for part in (model, optimizer, scaler, *others):
            if part is not None:
                self._restores.append(self._keep_part(part))
        self._restore_rng = _keep_rng()

    def restore(self) -> None:
        """Put everything back. Gradients come last: they may need new memory, all else does not."""
        for restore in self._restores:
            restore()
        for kept in self._tensors.values():
            kept.restore_value()
        for kept in self._tensors.values():
            kept.restore_gradient()
        self._restore_rng()

    def _keep_part(self, part: Any) -> _Restore:
        if isinstance(part, nn.Module):
            return self._keep_module(part)
        if isinstance(part, torch.optim.Optimizer):
            return _all_of([self._keep(part.state), self._keep(part.param_groups)])
        if isinstance(part, torch.amp.GradScaler):
            return self._keep(vars(part))
        if isinstance(part, torch.Generator):
            generator_state = part.get_state().numpy().copy()
            return lambda: part.set_state(torch.from_numpy(generator_state))
        if hasattr(part, "state_dict") and hasattr(part, "load_state_dict"):
            state = copy.deepcopy(part.state_dict())
            return lambda: part.load_state_dict(copy.deepcopy(state))
        raise TypeError(
            f"{type(part).__name__} cannot be preserved: it has no state_dict() and load_state_dict(). "
            "Give modules, optimizers, schedulers, a GradScaler or a torch.Generator."
        )

    def _keep_module(self, model: nn.Module) -> _Restore:
        restores = []
        for module in model.modules():
            restores += [self._keep(module._parameters), self._keep(module._buffers), _keep_flag(module)]
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                restores.append(_keep_extra_state(module))
        return _all_of(restores)

    def _keep(self, value: Any) -> _Restore:
        """A function that puts `value` back as it is now and returns it; containers and tensors stay the same."""
        if isinstance(value, torch.Tensor):
            if id(value) not in self._tensors:
                self._tensors[id(value)] = _KeptTensor(value)
            return lambda: value
        if isinstance(value, dict):
            entries = [(key, self._keep(item)) for key, item in value.items()]
            return lambda: _refill(value, entries)
        if isinstance(value, list | tuple):
            items = [self._keep(item) for item in value]
            return lambda: _refill_sequence(value, items)
        if callable(value) or isinstance(value, int | float | str | bytes | None):
            return lambda: value
        kept = copy.deepcopy(value)
        return lambda: copy.deepcopy(kept)


class _KeptTensor:
    """One tensor's value, gradient and `requires_grad`."""

    def __init__(self, tensor: torch.Tensor) -> None:
        if is_lazy(tensor):
            raise ValueError("A lazy module has no weights yet: run one batch through the model first.")
        self._tensor, self._data, self._requires_grad = tensor, tensor.data, tensor.requires_grad
        self._value = _to_host(tensor.data)
        # A gradient that is not a leaf's is only ever None, and asking for it warns.
        gradient = tensor.grad if tensor.is_leaf else None
        self._gradient = None if gradient is None else _to_host(gradient.data)
        self._like = None if gradient is None else torch.empty_like(gradient, device="meta")

    def restore_value(self) -> None:
        tensor, data = self._tensor, self._data
        _from_host(self._value, data)
        if _layout(tensor) != _layout(data):  # moved, cast or resized in between
            tensor.data = data
        if tensor.requires_grad != self._requires_grad:
            tensor.requires_grad_(self._requires_grad)

    def restore_gradient(self) -> None:
        tensor = self._tensor
        if not tensor.is_leaf:
            return
        if self._gradient is None or self._like is None:
            tensor.grad = None
            return
        if tensor.grad is None or _layout(tensor.grad)[1:] != (tensor.device, *_layout(self._like)[2:]):
            tensor.grad = torch.empty_like(self._like, device=tensor.device)
        _from_host(self._gradient, tensor.grad.data)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout != torch.strided:
        raise TypeError(f"Only dense tensors can be preserved, and this one is {tensor.layout}.")
    # Into memory of NumPy's, not of torch's: a copy that is kept here is not what a trial needs, and SimulatedMemory
    # must not count it.
    dense = _by_stride(tensor)
    room = np.empty(max(1, tensor.numel()) * tensor.element_size(), np.uint8)  # torch takes no view of an empty array
    host = torch.from_numpy(room).view(tensor.dtype)[: tensor.numel()]
    return host.view(dense.shape).copy_(dense)


def _from_host(host: torch.Tensor, tensor: torch.Tensor) -> None:
    _by_stride(tensor).copy_(host)


def _by_stride(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its dimensions in the order of its memory: then no copy needs a buffer on the device."""
    return tensor.permute(sorted(range(tensor.dim()), key=lambda dimension: -tensor.stride()[dimension]))


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride()


def _refill(value: dict[Any, Any], entries: list[tuple[Any, _Restore]]) -> dict[Any, Any]:
    value.clear()
    value.update((key, restore()) for key, restore in entries)
    return value


def _refill_sequence(value: Any, items: list[_Restore]) -> Any:
    restored = [restore() for restore in items]
    if isinstance(value, list):
        value[:] = restored
    return value


def _keep_flag(module: nn.Module) -> _Restore:
    training = module.training
    return lambda: setattr(module, "training", training)


def _keep_extra_state(module: nn.Module) -> _Restore:
    state = copy.deepcopy(module.get_extra_state())
    return lambda: module.set_extra_state(copy.deepcopy(state))


def _keep_rng() -> _Restore:
    python, numpy = random.getstate(), np.random.get_state()
    cpu = torch.get_rng_state().numpy().copy()
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(torch.from_numpy(cpu))
        if gpus:
            torch.cuda.set_rng_state_all(gpus)

    return restore


def _all_of(restores: list[_Restore]) -> _Restore:
    def restore() -> None:
        for one in restores:
            one()

    return restore
