"""Keep the effective batch when memory holds less: exact gradient accumulation, and what else a new size changes.

optimizer.zero_grad()
for (inputs, targets), weight in micro_batches(batch, micro_size=11):
    (weight * loss_function(model(inputs), targets)).backward()
optimizer.step()
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from course_utils.arguments import whole


def micro_batches(batch: Any, micro_size: int) -> Iterator[tuple[Any, float]]:
    """Cut `batch` into pieces of at most `micro_size` samples, as even as can be, each with its share of all samples.

    `batch` is a tensor, a list of samples' own values, or a tuple, list or dict of these, nested as a DataLoader
    returns it; the first dimension of every tensor is the sample. With the shares as weights, the sum of weight x mean
    loss has the gradient of the whole batch's mean loss; equal weights would let a short piece count too much.

    That holds for losses that are means over samples. A loss that is a mean over tokens needs shares of tokens as
    weights. BatchNorm still sees one piece at a time.
    """
    whole("micro_size", micro_size)
    sizes = set(_lengths(batch))
    if len(sizes) != 1 or sizes == {0}:
        raise ValueError(
            f"Every tensor of the batch must have the same number of samples, at least 1: {sorted(sizes)}."
        )
    samples = sizes.pop()
    ends = list(itertools.accumulate(_even(samples, micro_size)))
    return (
        (_piece(batch, slice(start, end)), (end - start) / samples) for start, end in itertools.pairwise([0, *ends])
    )


def _even(samples: int, largest: int) -> tuple[int, ...]:
    """As few sizes of at most `largest` as add up to `samples`, and no two that differ by more than one."""
    pieces = math.ceil(samples / largest)
    return tuple(samples // pieces + (index < samples % pieces) for index in range(pieces))


def _lengths(batch: Any) -> Iterator[int]:
    if isinstance(batch, torch.Tensor):
        if batch.dim() == 0:
            raise ValueError("The batch holds a tensor without dimensions: its samples cannot be told apart.")
        yield len(batch)
    elif isinstance(batch, dict):
        for value in batch.values():
            yield from _lengths(value)
    elif _is_container(batch):
        for value in batch:
            yield from _lengths(value)
    elif isinstance(batch, list):
        yield len(batch)
    else:
        raise TypeError(f"A batch is made of tensors, tuples, lists and dicts, not {type(batch).__name__}.")


def _piece(batch: Any, part: slice) -> Any:
    if isinstance(batch, dict):
        return {key: _piece(value, part) for key, value in batch.items()}
    if _is_container(batch):
        values = [_piece(value, part) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return batch[part]


def _is_container(batch: Any) -> bool:
    """A tuple, or a list of tensors, holds fields of the batch; a list of other things, such as texts, samples."""
    return isinstance(batch, tuple) or (
        isinstance(batch, list) and any(isinstance(value, torch.Tensor | dict | tuple | list) for value in batch)
    )


@dataclass(frozen=True, repr=False)
class AccumulationPlan:
    """How to make one optimizer step on `effective` samples with at most `largest_micro` of them in memory."""

    effective: int
    largest_micro: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """The samples of each micro-batch; they add up to the effective batch exactly."""
        return _even(self.effective, self.largest_micro)

    @property
    def steps(self) -> int:
        """Micro-batches in one optimizer step: as few as memory allows."""
        return len(self.sizes)

    @property
    def micro_size(self) -> int:
        """Samples in the largest micro-batch: give it to `micro_batches`."""
        return self.sizes[0]

    def __repr__(self) -> str:
        pieces = " + ".join(map(str, self.sizes)) if self.steps <= 8 else f"{self.steps} of up to {self.micro_size}"
        return f"Effective batch {self.effective} = {pieces} (at most {self.largest_micro} fit). One optimizer step."


def plan_accumulation(effective: int, largest_micro: int) -> AccumulationPlan:
    """Split an effective batch into micro-batches that fit, as few and as even as can be, without changing their sum.

    Rounding the number of steps up and keeping the micro-batch full would change what is optimised: 32 with 12 fitting
    would become 3 x 12 = 36 (case BSF-10). Here it is 11 + 11 + 10.
    """
    whole("effective", effective)
    whole("largest_micro", largest_micro)
    return AccumulationPlan(effective, largest_micro)


@dataclass(frozen=True, repr=False)
class LearningRateAdvice:
    """A learning rate to start from after a change of batch size; None where no rule is known. Nothing was changed."""

    lr: float | None
    factor: float | None
    text: str

    def __repr__(self) -> str:
        return self.text


_LINEAR = "linear rule (Goyal et al. 2017, arXiv:1706.02677, which also warms up over the first epochs)"
_SQUARE_ROOT = "square-root rule (Malladi et al. 2022, arXiv:2205.10287, which also adapts the betas and epsilon)"
# Malladi et al. derive theirs for RMSprop and Adam; the rest of this set are Adam's close variants.
_ADAM_LIKE = {"Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "SparseAdam"}


def learning_rate_advice(
    lr: float, old_batch: int, new_batch: int, optimizer: torch.optim.Optimizer | type[torch.optim.Optimizer] | str
) -> LearningRateAdvice:
    """What to try as learning rate when the effective batch changes: a rule of thumb, and nothing is set.

    SGD: in proportion to the batch. Adam and its like: by the square root. Other optimizers: no rule. Both rules are
    about a fixed number of epochs and fail for batches that are very large. With accumulation that keeps the effective
    batch, the learning rate stays as it is.
    """
    whole("old_batch", old_batch)
    whole("new_batch", new_batch)
    if isinstance(lr, bool) or not isinstance(lr, int | float) or not (lr > 0 and math.isfinite(lr)):
        raise ValueError(f"lr={lr!r} must be a finite number above 0.")
    if isinstance(optimizer, torch.optim.Optimizer):
        names = [kind.__name__ for kind in type(optimizer).__mro__]
    else:
        names = [optimizer] if isinstance(optimizer, str) else [kind.__name__ for kind in optimizer.__mro__]
    change = f"batch {old_batch:,} -> {new_batch:,}"
    if old_batch == new_batch:
        return LearningRateAdvice(lr, 1.0, f"The effective batch stays {new_batch:,}: keep lr = {lr:g}.")
    if "SGD" in names:
        factor, rule = new_batch / old_batch, _LINEAR
    elif _ADAM_LIKE & set(names):
        factor, rule = math.sqrt(new_batch / old_batch), _SQUARE_ROOT
    else:
        text = f"{change}: no rule of thumb is known for {names[0]}. Keep lr = {lr:g} first, then try values around it."
        return LearningRateAdvice(None, None, text)
    return LearningRateAdvice(
        lr * factor,
        factor,
        f"{change}: try lr = {lr:g} x {factor:.3g} = {lr * factor:.3g}, by the {rule}. It is a rule of thumb: "
        "nothing was changed, and only a validation score can tell.",
    )


def epoch_warnings(
    dataset_size: int, batch_size: int, drop_last: bool, model: nn.Module | None = None
) -> tuple[str, ...]:
    """What goes wrong in an epoch of this size, a sentence each; empty if nothing does.

    The last batch may hold a single sample, too little for BatchNorm; `drop_last` may leave no batch at all; a
    batch may be larger than the data set. Without `model` nobody knows whether there is a BatchNorm: then it says so.
    """
    whole("dataset_size", dataset_size)
    whole("batch_size", batch_size)
    found = []
    if batch_size > dataset_size:
        found.append(
            f"drop_last leaves no batch: {dataset_size:,} samples do not fill one of {batch_size:,}. "
            "Nothing would be trained."
            if drop_last
            else f"The batch ({batch_size:,}) is larger than the data set: every batch holds {dataset_size:,} samples."
        )
    last = dataset_size % batch_size or batch_size
    alone = batch_size == 1 or (last == 1 and not drop_last)
    norms = _batch_norms(model)
    if alone and (model is None or norms):
        where = "Every batch" if batch_size == 1 else f"The last batch ({dataset_size:,} = … x {batch_size:,} + 1)"
        what = norms[0] if norms else "a BatchNorm, if the model has one,"
        cure = "Use a larger batch" if batch_size == 1 else "Use drop_last=True, or another batch size"
        found.append(
            f"{where} holds one sample, and {what} normalises it by itself alone, or raises an error where it has one "
            f"value per channel. {cure}."
        )
    return tuple(found)


def _batch_norms(model: nn.Module | None) -> list[str]:
    """The BatchNorm layers by name; torch raises "Expected more than 1 value per channel" for a single value."""
    if model is None:
        return []
    return [
        f"the {type(module).__name__} {name!r}"
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
    ]
