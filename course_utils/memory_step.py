"""One training step as a thing of its own: checked, copied away from its owner, resized and run.

`memory_model` runs a copy on fake tensors, `cpu_memory` a copy on real ones; both run this same step, in this order:
gradients cleared, forward and loss (under autocast, where asked for), backward, optimizer step. Without loss and
optimizer it is a forward pass under `torch.inference_mode()`.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import CellType, CodeType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map_only  # what torch itself walks nested batches with

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)


class MemoryModelError(RuntimeError):
    """The step cannot be predicted; the message names the operation or the object in the way, and the cure."""


class NotAStep(ValueError):
    """The loss or the optimizer does not give what a training step needs."""


class Whole(nn.Module):
    """Model and loss as one module, so that whoever watches modules sees a step as one call."""

    def __init__(self, model: nn.Module, loss: Callable[..., Any] | None, autocast: torch.dtype | None) -> None:
        super().__init__()
        self.model, self.loss, self.autocast = model, loss, autocast

    def forward(self, inputs: Any, targets: Any) -> Any:
        """The loss of one batch, or the output where there is no loss: a tuple goes by position, a dict by keyword."""
        with torch.autocast("cpu", dtype=self.autocast or torch.bfloat16, enabled=self.autocast is not None):
            if isinstance(inputs, dict):
                output = self.model(**inputs)
            else:
                output = self.model(*inputs) if isinstance(inputs, tuple) else self.model(inputs)
            return output if self.loss is None else self.loss(output, targets)


@dataclass(frozen=True)
class Step:
    """A model with its loss, a batch and an optimizer, or what makes one from the parameters (None: inference)."""

    whole: Whole
    inputs: Any
    targets: Any
    optimizer: torch.optim.Optimizer | MakeOptimizer | None
    set_to_none: bool = True

    def in_its_mode(self) -> Step:
        """This step with its modules set to train mode if all of the model is in eval mode; inference as it is."""
        if self.optimizer is not None and not self.whole.model.training:
            self.whole.train()
        return self

    @property
    def batch_size(self) -> int:
        """The first dimension of every tensor in the batch."""
        return len(self.batch_tensors()[0])

    def batch_tensors(self) -> list[torch.Tensor]:
        """The tensors of inputs and targets, however deeply nested."""
        return [leaf for leaf in tree_flatten((self.inputs, self.targets))[0] if isinstance(leaf, torch.Tensor)]

    def tensors(self) -> list[torch.Tensor]:
        """All of them: the batch's, plain tensor attributes, parameters and buffers."""
        held = [value for module in self.whole.modules() for value in vars(module).values()]
        plain = [value for value in held if isinstance(value, torch.Tensor)]
        return [*self.batch_tensors(), *plain, *self.whole.parameters(), *self.whole.buffers()]

    def resized(self, batch_size: int) -> Step:
        """The same step with new, uninitialised batch tensors of `batch_size` samples on the CPU."""

        def fresh(old: torch.Tensor) -> torch.Tensor:
            format_ = torch.contiguous_format
            if old.dim() == 4 and old.is_contiguous(memory_format=torch.channels_last) and not old.is_contiguous():
                format_ = torch.channels_last
            new = torch.empty((batch_size, *old.shape[1:]), dtype=old.dtype, device="cpu", memory_format=format_)
            return new.requires_grad_(old.requires_grad)

        inputs, targets = tree_map_only(torch.Tensor, fresh, (self.inputs, self.targets))
        return replace(self, inputs=inputs, targets=targets)

    def with_optimizer(self) -> Step:
        """The same step with its optimizer made, where it was given as a callable."""
        if self.optimizer is None or isinstance(self.optimizer, torch.optim.Optimizer):
            return self
        made = self.optimizer(self.whole.model.parameters())
        if not isinstance(made, torch.optim.Optimizer):
            raise NotAStep(f"optimizer(parameters) must return a torch.optim.Optimizer, not {type(made).__name__}.")
        return replace(self, optimizer=made)

    def run(self, without_gradients: Callable[[], Any] = torch.inference_mode) -> None:
        """One optimizer step, or one forward pass. NotAStep where the loss is not one number to differentiate."""
        if self.optimizer is None:
            with without_gradients():
                self.whole(self.inputs, self.targets)
            return
        assert isinstance(self.optimizer, torch.optim.Optimizer)
        self.optimizer.zero_grad(set_to_none=self.set_to_none)
        value = self.whole(self.inputs, self.targets)
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            found = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise NotAStep(f"loss must return one number, such as the mean over the batch, not {found}.")
        if not value.requires_grad:
            raise NotAStep("The loss depends on no parameter that requires a gradient: there is nothing to train.")
        value.backward()
        self.optimizer.step()

    def copied(self, to_new: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Step:
        """A copy that shares nothing with this step: module, loss, hooks, optimizer settings; no gradients, no state.

        `to_new` makes the copy of a tensor (None: a real copy of its values). MemoryModelError where it cannot copy.
        """
        memo: dict[int, Any] = {}
        fill = _stand_ins(self, memo)
        with _tensors_copied_by(to_new):
            try:
                whole = copy.deepcopy(self.whole, memo)
                fill()
                return replace(self, whole=whole, optimizer=_copied_optimizer(self.optimizer, memo))
            except Exception as error:
                raise MemoryModelError(_uncopiable(self, error)) from error


def checked_step(
    model: nn.Module,
    batch: Any,
    loss: Callable[..., Any] | None,
    optimizer: Any,
    autocast: torch.dtype | None,
    set_to_none: bool = True,
) -> Step:
    """The step that these arguments of `predict_memory` describe; ValueError or TypeError says what will not do."""
    _check_model(model)
    if (loss is None) != (optimizer is None):
        given = "optimizer" if loss is None else "loss"
        raise ValueError(
            f"{given} without the other: training needs loss and optimizer, inference takes None for both."
        )
    if not isinstance(set_to_none, bool):
        raise TypeError(f"set_to_none must be True or False, as for optimizer.zero_grad, not {set_to_none!r:.80}.")
    if loss is not None and not callable(loss):
        raise TypeError(f"loss must be a function of (output, targets), such as nn.CrossEntropyLoss(), not {loss!r}.")
    if autocast not in (None, torch.bfloat16, torch.float16):
        raise ValueError(f"autocast must be None, torch.bfloat16 or torch.float16, not {autocast!r}.")
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise ValueError("batch must be (inputs, targets), as a DataLoader gives it: next(iter(loader)).")
    step = Step(Whole(model, loss, autocast), batch[0], batch[1], optimizer, set_to_none)
    tensors = step.batch_tensors()
    if not tensors or any(tensor.dim() == 0 or len(tensor) == 0 for tensor in tensors):
        raise ValueError("Every tensor of the batch must have a first dimension N of at least 1, one entry a sample.")
    if len({len(tensor) for tensor in tensors}) > 1:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise ValueError(f"Every tensor of the batch must have the same first dimension N; these have {shapes}.")
    modules = [model, loss] if isinstance(loss, nn.Module) else [model]
    known = {id(parameter) for module in modules for parameter in module.parameters()}
    if isinstance(optimizer, torch.optim.Optimizer):
        if any(id(parameter) not in known for group in optimizer.param_groups for parameter in group["params"]):
            raise ValueError("optimizer holds parameters that are not this model's: make it from model.parameters().")
    elif optimizer is not None and not callable(optimizer):
        raise TypeError(f"optimizer must be an optimizer or what makes one (torch.optim.AdamW), not {optimizer!r:.80}.")
    return step


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, not {type(model).__name__}.")
    name = type(model).__name__
    if isinstance(model, _WRAPPERS):
        raise MemoryModelError(f"{name} spreads the step over devices: predict for one of them, with model.module.")
    if name == "OptimizedModule":
        raise MemoryModelError("A model from torch.compile plans its own memory: pass the model as it was before.")
    if isinstance(model, torch.jit.ScriptModule):
        raise MemoryModelError("A TorchScript model cannot run on fake tensors: pass the nn.Module it was made from.")
    if any(is_lazy(tensor) for tensor in [*model.parameters(), *model.buffers()]):
        raise MemoryModelError("The model has lazy layers without a shape yet: run one batch through it first.")


class _CopyTensors(TorchFunctionMode):
    """While it is active, deepcopy makes each tensor's copy with `to_new`; Parameter's own deepcopy calls clone()."""

    def __init__(self, to_new: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.to_new = to_new

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.clone:
            return self.to_new(args[0])
        if func is torch.Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = self.to_new(tensor).requires_grad_(tensor.requires_grad)
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))


@contextmanager
def _tensors_copied_by(to_new: Callable[[torch.Tensor], torch.Tensor] | None) -> Iterator[None]:
    if to_new is None:
        yield
    else:
        with _CopyTensors(to_new):
            yield


def _copied_optimizer(optimizer: Any, memo: dict[int, Any]) -> Any:
    if not isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    memo[id(optimizer.state)] = defaultdict(dict)  # the first step makes the state anew
    copied = copy.deepcopy(optimizer, memo)
    # Optimizer.__getstate__ names three attributes only; a scheduler's patched step() must stay with its owner.
    for name, value in vars(optimizer).items():
        if name not in vars(copied) and not callable(value) and not name.startswith("_optimizer_"):
            setattr(copied, name, copy.deepcopy(value, memo))
    for group, original in zip(copied.param_groups, optimizer.param_groups, strict=True):
        if group.get("capturable"):
            group["capturable"] = False
        if isinstance(original.get("lr"), torch.Tensor):
            group["lr"] = float(original["lr"])  # steps read its value, which a fake tensor does not have
    return copied


def _stand_ins(step: Step, memo: dict[int, Any]) -> Callable[[], None]:
    """Give each function that the step holds (hooks, loss) a twin with closure and globals of its own, in `memo`.

    deepcopy shares functions, so a hook's twin would otherwise append fake tensors to the learner's own list. Devices
    become the CPU. Returns what fills the twins, to be called when the modules are copied.
    """
    pending: list[tuple[FunctionType, FunctionType]] = []

    def twin(function: FunctionType) -> None:
        if id(function) in memo:
            return
        cells = tuple(CellType() for _ in function.__closure__ or ())
        made = FunctionType(function.__code__, dict(function.__globals__), function.__name__, None, cells)
        memo[id(function)] = made
        pending.append((function, made))
        for name in _names(function.__code__):
            value = function.__globals__.get(name)
            if isinstance(value, FunctionType) and value.__module__ == function.__module__:
                twin(value)
        for cell in function.__closure__ or ():
            if isinstance(_content(cell), FunctionType):
                twin(_content(cell))

    for module in step.whole.modules():
        for value in vars(module).values():
            for held in value.values() if isinstance(value, dict) else [value]:
                if isinstance(held, FunctionType):
                    twin(held)
                elif isinstance(held, torch.device):
                    memo[id(held)] = torch.device("cpu")

    def fill() -> None:
        for original, made in pending:
            made.__defaults__ = copy.deepcopy(original.__defaults__, memo)
            made.__kwdefaults__ = copy.deepcopy(original.__kwdefaults__, memo)
            for cell, new in zip(original.__closure__ or (), made.__closure__ or (), strict=True):
                new.cell_contents = copy.deepcopy(_content(cell), memo)
            for name in _names(original.__code__):
                value = original.__globals__.get(name)
                own = type(value).__module__ == original.__module__
                if own or isinstance(value, list | dict | set | torch.Tensor | nn.Module) or id(value) in memo:
                    made.__globals__[name] = copy.deepcopy(value, memo)

    return fill


def _names(code: CodeType) -> set[str]:
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that is not assigned yet
        return None


def _uncopiable(step: Step, error: Exception) -> str:
    """Which attribute would not be copied: the sentence names it."""
    for path, module in step.whole.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, nn.Module) or name == "_modules":
                continue
            try:
                copy.deepcopy(value)
            except Exception:  # noqa: BLE001 - copying may raise anything; only where it does is asked
                where = ".".join(part for part in (path, name) if part)
                return f"{where} ({type(value).__name__}) cannot be copied ({error}): take it out of the model first."
    return f"The model or its optimizer cannot be copied ({type(error).__name__}: {error})."
