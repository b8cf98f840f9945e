"""How much memory a training step will need, before it runs: predicted from shapes alone, on any machine.

    prediction = predict_memory(model, (images, labels), nn.CrossEntropyLoss(), torch.optim.AdamW)
    prediction                                          # a table: parameters, gradients, optimizer, activations, other
    prediction.largest_batch("T4", headroom=0.1)

Two training steps run on fake tensors (`mem_tracker`), so nothing is allocated and nothing of the learner's changes.
What a prediction does not see comes on top on a GPU: the CUDA context, workspaces of cuDNN and cuBLAS, fragmentation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from course_utils.arguments import whole
from course_utils.gpu_specs import spec_for
from course_utils.mem_tracker import FakeTraining
from course_utils.memory_step import MakeOptimizer, MemoryModelError, checked_step
from course_utils.views import html_table, mebibytes, text_table

__all__ = ["MemoryModelError", "MemoryParts", "MemoryPrediction", "predict_memory"]

# A T4's datasheet says 16 GB. What CUDA offers PyTorch on one is less, as its out-of-memory messages show: "GPU 0 has a
# total capacity of 14.56 GiB" (Zheng-Chong/CatVTON#133, AlphaGPU/leetgpu-challenges#52).
_OFFERED_BYTES = {"Tesla T4": int(14.56 * 2**30)}
_MOST_SAMPLES = 10**9
_HEADERS = ("batch size", "parameters", "gradients", "optimizer", "activations", "other", "peak")


@dataclass(frozen=True)
class MemoryParts:
    """What memory holds at the moment of the step's peak, in bytes, at one batch size.

    `parameters_bytes`, `gradients_bytes` (of parameters) and `optimizer_bytes` (its state, and what its step needs for
    the moment). `activations_bytes`: what the forward pass made and keeps for the backward pass, low-precision copies
    of the weights included. `other_bytes`: the batch itself (inputs and targets), buffers, plain tensor attributes,
    and what the backward pass makes for the moment: gradients of activations, and a gradient not handed over yet.
    """

    batch_size: int
    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    other_bytes: int

    @property
    def peak_bytes(self) -> int:
        """The sum of the parts: the most that is allocated at one moment."""
        return sum(self.sizes())

    def sizes(self) -> tuple[int, int, int, int, int]:
        """Bytes of parameters, gradients, optimizer, activations and other, in this order."""
        fixed = self.parameters_bytes, self.gradients_bytes, self.optimizer_bytes
        return *fixed, self.activations_bytes, self.other_bytes


@dataclass(frozen=True, repr=False)
class MemoryPrediction:
    """Predicted peaks at some batch sizes, and the line a + b · batch size through them.

    `fixed_bytes` is a, `per_sample_bytes` is b, `worst_fit` the largest distance of a predicted peak from the line, as
    a share of the peak. Small batches bend the line: there the peak is the optimizer's step, not the backward pass.
    """

    parts: tuple[MemoryParts, ...]
    fixed_bytes: int
    per_sample_bytes: float
    worst_fit: float
    _predict: Callable[[int], MemoryParts] = field(compare=False)

    def peak_bytes(self, batch_size: int) -> int:
        """The peak in bytes that the line gives; `at` predicts it exactly."""
        return round(self.fixed_bytes + self.per_sample_bytes * whole("batch_size", batch_size))

    def at(self, batch_size: int) -> MemoryParts:
        """The parts at exactly this batch size, predicted anew (once: it remembers)."""
        return self._predict(whole("batch_size", batch_size))

    def largest_batch(self, budget: float | str | torch.device, headroom: float = 0.0, multiple_of: int = 1) -> int:
        """The largest batch size, a multiple of `multiple_of`, whose predicted peak fits, and the next one's does not.

        `budget`: bytes; or a GPU's name that `gpu_specs` knows; or a `torch.device`. "T4" means the 14.56 GiB that
        CUDA offers PyTorch on one, not the nominal 16; any other name means the datasheet's nominal memory, of which a
        driver keeps a part. A CUDA device means what is free there plus what this process's PyTorch already holds
        there, which is taken to be this training's own. `headroom` is the share of the budget that stays free, for
        what no prediction sees (see the module).

        The line guesses, `at` checks and corrects. ValueError where not even one (multiple) fits.
        """
        step = whole("multiple_of", multiple_of)
        if isinstance(headroom, bool) or not 0 <= headroom < 1:
            raise ValueError(f"headroom is the share of the budget to keep free, from 0 to below 1, not {headroom!r}.")
        usable = int(budget_bytes(budget) * (1 - headroom))
        # Not from batch 1 upwards: it need not be predicted, and some models with BatchNorm refuse it.
        fits, too_many = 0, _MOST_SAMPLES // step + 1
        peak = {fits: min(self.fixed_bytes, usable)}
        guess = self._guess(usable) // step
        while too_many - fits > 1:
            count = min(max(guess, fits + 1), too_many - 1)
            peak[count] = self.at(count * step).peak_bytes
            if peak[count] <= usable:
                fits = count
            else:
                too_many = count
            guess = _between(peak, fits, too_many, usable)
        if fits == 0:
            raise ValueError(
                f"Not even a batch of {step} fits: it needs {mebibytes(peak[1])}, and {mebibytes(usable)} may be used."
            )
        if too_many > _MOST_SAMPLES // step:
            raise ValueError("The predicted peak does not grow with the batch: no batch size is the largest.")
        return fits * step

    def draw(self, ax: Any = None, budget: float | str | torch.device | None = None) -> Any:
        """A stacked bar for each batch size, and the budget as a line; returns the figure (a new one without `ax`)."""
        from course_utils.memory_view import draw_parts

        return draw_parts(self.parts, ax, None if budget is None else budget_bytes(budget))

    def _guess(self, usable: int) -> int:
        if self.per_sample_bytes <= 0:
            return 1
        return int((usable - self.fixed_bytes) / self.per_sample_bytes)

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (f"{parts.batch_size:,}", *map(mebibytes, parts.sizes()), mebibytes(parts.peak_bytes))
            for parts in self.parts
        ]

    def _line(self) -> str:
        return (
            f"peak ≈ {mebibytes(self.fixed_bytes)} + {self.per_sample_bytes / 2**20:,.2f} MiB × batch size "
            f"(within {self.worst_fit:.1%} of the predicted peaks)"
        )

    def __repr__(self) -> str:
        return f"{text_table(_HEADERS, self._rows())}\n{self._line()}"

    def _repr_html_(self) -> str:
        return html_table(_HEADERS, self._rows(), f"Predicted training memory: {self._line()}")


def predict_memory(
    model: nn.Module,
    batch: Any,
    loss: Callable[..., Any] | None,
    optimizer: torch.optim.Optimizer | MakeOptimizer | None,
    batch_sizes: Sequence[int] | None = None,
    *,
    autocast: torch.dtype | None = None,
    set_to_none: bool = True,
) -> MemoryPrediction:
    """Predict the peak memory of training `model`, without running it and without allocating anything.

    `batch` is (inputs, targets), every tensor with N samples in its first dimension; inputs may be a tensor, a tuple
    (passed by position) or a dict (by keyword), nested as you like. Only its shapes count. `loss(output, targets)`
    returns one number. `optimizer` is one made for this model, or what makes one: `torch.optim.AdamW`. `batch_sizes`:
    None for three sizes around N. `autocast`: None, torch.bfloat16 or torch.float16. With None for both loss and
    optimizer it predicts a forward pass under `torch.inference_mode()`, the model as its modules are set.

    The step: gradients to None (or to zero: `set_to_none`), forward, loss, backward, optimizer step; a model in eval
    mode is predicted in train mode, any other as its modules are set. Activation checkpointing (use_reentrant=False)
    is honoured. Model, loss, optimizer, random state: all stay as they are, bit for bit.

    The step is the CPU's, also for a model on a GPU. So autocast follows the CPU's list of operations, an optimizer
    left at its default updates one tensor after the other (on a GPU several at once, as `foreach=True` does), and
    attention with dropout keeps its whole matrix. What a kernel allocates inside itself is not seen.

    MemoryModelError for a step that depends on values (.item(), a boolean mask) or cannot be copied, and names it.
    ValueError or TypeError for arguments that do not fit together.
    """
    step = checked_step(model, batch, loss, optimizer, autocast, set_to_none)
    count = step.batch_size
    # Half of a small batch could be a single sample, which BatchNorm refuses.
    sizes = [count // 2, count, count * 2] if count >= 4 else [count, count * 2, count * 4]
    if batch_sizes is not None:
        sizes = sorted({whole("batch_sizes", size) for size in batch_sizes})
        if len(sizes) < 2:
            raise ValueError("batch_sizes needs two different sizes at least: a line goes through them.")
    predict = _remembering(FakeTraining(step))
    parts = tuple(map(predict, sizes))
    peaks = [float(each.peak_bytes) for each in parts]
    per_sample, fixed = (float(value) for value in np.polyfit(np.array(sizes, float), np.array(peaks), 1))
    distances = [abs(fixed + per_sample * size - peak) / peak for size, peak in zip(sizes, peaks, strict=True)]
    return MemoryPrediction(parts, round(fixed), per_sample, max(distances), predict)


def budget_bytes(budget: float | str | torch.device) -> int:
    """The bytes that `budget` means, as `MemoryPrediction.largest_batch` explains; ValueError if it means none."""
    if isinstance(budget, str):
        spec = spec_for(budget)
        if spec is None:
            raise ValueError(f"{budget!r} is no GPU in gpu_specs.SPECS: give one of its names, or a number of bytes.")
        return _OFFERED_BYTES.get(spec.name, spec.memory_bytes)
    if isinstance(budget, torch.device):
        if budget.type != "cuda" or not torch.cuda.is_available():
            raise ValueError(f"No GPU memory to fill on {str(budget)!r} here: give a GPU's name, or a number of bytes.")
        return int(torch.cuda.mem_get_info(budget)[0] + torch.cuda.memory_reserved(budget))
    return whole("budget", int(budget) if isinstance(budget, float) and budget.is_integer() else budget)


def _remembering(training: FakeTraining) -> Callable[[int], MemoryParts]:
    known: dict[int, MemoryParts] = {}

    def predict(batch_size: int) -> MemoryParts:
        if batch_size not in known:
            kinds = training.peak(batch_size)
            weights, gradients, state, made = (
                kinds[name] for name in ("Parameter", "Gradient", "Optstate", "Activation")
            )
            other = kinds["Total"] - weights - gradients - state - made
            known[batch_size] = MemoryParts(batch_size, weights, gradients, state, made, other)
        return known[batch_size]

    return predict


def _between(peak: dict[int, int], fits: int, too_many: int, usable: int) -> int:
    """The next count to try: where the line through the two nearest known counts reaches the limit."""
    if too_many in peak:
        share = (usable - peak[fits]) / (peak[too_many] - peak[fits])
        return fits + int(share * (too_many - fits))
    below = max(count for count in peak if count < fits)
    if peak[fits] <= peak[below]:
        return fits * 2
    return fits + math.ceil((usable - peak[fits]) * (fits - below) / (peak[fits] - peak[below])) + 1
