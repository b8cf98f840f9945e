"""Activation checkpointing: a block drops what its forward pass made, and makes it again for its backward pass.

    checkpoint_blocks(model)                    # the residual blocks of small_resnet
    correct_batchnorm(model)                    # BatchNorm counts each batch once again
    uncheckpoint(model)

Each block then belongs to a subclass made for it, as PyTorch's own `fully_shard` and `register_parametrization` do it.
So weights, their names, `isinstance` and `copy.deepcopy` stay what they were.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase  # BatchNorm, SyncBatchNorm and InstanceNorm
from torch.utils.checkpoint import checkpoint

from course_utils.resnet import ResidualBlock

Kind = type[nn.Module] | str
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def checkpoint_blocks(model: nn.Module, kinds: Kind | Iterable[Kind] | None = None) -> nn.Module:
    """Checkpoint blocks of `model` in place and return it; what was checkpointed before stays so.

    `kinds`: types of modules, or names as in `model.named_modules()`, or both; None means the course's
    `ResidualBlock`. The model itself is no block, and a block inside a block is not checkpointed again.

    A block's activations live only while its own backward pass runs, so the saving is what the other blocks hold: much
    in a row of equal blocks, less where layers outside the blocks hold most, as the first layers of `small_resnet` do.

    In train mode each block runs through `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`. Losses and
    gradients stay the same, with dropout too. The running statistics of BatchNorm do not: each forward pass updates
    them, and now there are two (pytorch/pytorch#96136). `correct_batchnorm` is the cure.

    ValueError where the model has no such block, TypeError for what is neither a type of module nor a name.
    """
    for block in _chosen(model, kinds):
        if not is_checkpointed(block):
            block.__class__ = _checkpointed(type(block))
    return model


def uncheckpoint(model: nn.Module) -> nn.Module:
    """Take all checkpointing, and the correction of BatchNorm, out of `model` in place and return it."""
    for block in checkpointed_blocks(model):
        block.__class__ = type(block).__mro__[1]
        vars(block).pop("batchnorm_once", None)
    return model


def correct_batchnorm(model: nn.Module) -> nn.Module:
    """Let BatchNorm inside the checkpointed blocks count each batch once, and return the model.

    The recomputing pass gets copies of the running statistics, which are dropped after it. So the statistics, and
    `num_batches_tracked`, are those of the step without checkpointing, bit for bit. It holds until `uncheckpoint`.
    Under `torch.compile` there is nothing to correct: the compiled step updates them once anyway.
    """
    for block in checkpointed_blocks(model):
        vars(block)["batchnorm_once"] = True
    return model


def corrected_momentum(momentum: float) -> float:
    """The BatchNorm momentum that gives, in two updates by one batch, what `momentum` gives in one: 1 - √(1 - m).

    The usual correction where a checkpoint cannot be told to spare the statistics. It is right for steps that do
    recompute and wrong for all others: a forward pass without gradients, a compiled step. And `num_batches_tracked`
    still counts two, so it does not help a cumulative average (momentum None).
    """
    if isinstance(momentum, bool) or not isinstance(momentum, int | float) or not 0 <= momentum <= 1:
        raise ValueError(f"momentum={momentum!r:.80} will not do: BatchNorm takes a number from 0 to 1, such as 0.1.")
    return 1 - math.sqrt(1 - momentum)


def is_checkpointed(module: nn.Module) -> bool:
    """Whether this very module is a checkpointed block."""
    return "_is_checkpointed" in vars(type(module))


def checkpointed_blocks(model: nn.Module) -> list[nn.Module]:
    """The checkpointed blocks of `model`, in the order of its modules."""
    return [module for module in model.modules() if is_checkpointed(module)]


def _checkpointed(plain: type[nn.Module]) -> type[nn.Module]:
    """The subclass of `plain` that checkpoints; the same one each time, so that compiled code is shared too."""
    for known in plain.__subclasses__():
        if "_is_checkpointed" in vars(known):
            return known

    class Checkpointed(plain):  # type: ignore[misc,valid-type]
        _is_checkpointed = True
        batchnorm_once = False

        def forward(self, *inputs: Any, **named: Any) -> Any:
            if not self.training:
                return super().forward(*inputs, **named)
            if not self.batchnorm_once or torch.compiler.is_compiling():
                return checkpoint(super().forward, *inputs, use_reentrant=False, **named)
            contexts = partial(_contexts, self)
            return checkpoint(super().forward, *inputs, use_reentrant=False, context_fn=contexts, **named)

        def __reduce_ex__(self, _: Any) -> Any:
            # pickle looks classes up by their name, and this one has no place in any module.
            _, (_, *rest), *state = super().__reduce_ex__(2)
            return _unpickled, (plain, *rest), *state

    Checkpointed.__name__ = f"Checkpointed{plain.__name__}"
    return Checkpointed


def _unpickled(plain: type[nn.Module], *rest: Any) -> nn.Module:
    made = _checkpointed(plain)
    return made.__new__(made, *rest)


def _contexts(block: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """What `checkpoint` enters for the first forward pass, and for each recomputing one."""
    return nullcontext(), _StatisticsSpared(block)


class _StatisticsSpared(AbstractContextManager[None]):
    """The block's BatchNorm layers update copies of their statistics. One `backward(retain_graph=True)` enters twice.

    Not momentum 0 instead: SyncBatchNorm would still count, and it needs its counter.
    """

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        self.before: list[tuple[nn.Module, str, torch.Tensor]] = []

    def __enter__(self) -> None:
        for norm in self.block.modules():
            for name in _BUFFERS if isinstance(norm, _NormBase) else ():
                if (buffer := getattr(norm, name)) is not None:
                    self.before.append((norm, name, buffer))
                    setattr(norm, name, buffer.clone())

    def __exit__(self, *_: object) -> None:
        while self.before:
            setattr(*self.before.pop())


def _chosen(model: nn.Module, kinds: Kind | Iterable[Kind] | None) -> list[nn.Module]:
    """The blocks that `kinds` means, in the order of the model's modules, outer ones only."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, not {type(model).__name__}.")
    if kinds is None:
        kinds = ResidualBlock
    wanted = list(kinds) if isinstance(kinds, Iterable) and not isinstance(kinds, type | str) else [kinds]
    types = tuple(kind for kind in wanted if isinstance(kind, type) and issubclass(kind, nn.Module))
    names = {kind for kind in wanted if isinstance(kind, str)}
    if strange := [kind for kind in wanted if kind not in types and kind not in names]:
        raise TypeError(f"kinds takes types of modules and names of modules, not {strange[0]!r:.80}.")
    found = {
        name: module for name, module in model.named_modules() if name and (name in names or isinstance(module, types))
    }
    if missing := sorted(names - set(found)):
        raise ValueError(f"The model has no module {missing[0]!r:.80}: model.named_modules() lists their names.")
    if not found:
        meant = " or ".join(kind.__name__ for kind in types) or "block"
        raise ValueError(f"There is no {meant} inside the model to checkpoint: {_advice(model)}")
    return [module for name, module in found.items() if not any(outer in found for outer in _outer(name))]


def _outer(name: str) -> Iterator[str]:
    """The names of the modules around this one: a.b.c is in a.b and in a."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _advice(model: nn.Module) -> str:
    counted = Counter(
        type(module).__name__ for module in model.modules() if [*module.children()] and module is not model
    )
    repeated = [name for name, count in counted.most_common() if count > 1]
    return f"name its blocks, {f'perhaps {repeated[0]}' if repeated else 'by type or by name'}, with kinds=..."
