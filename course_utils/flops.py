"""How much arithmetic a training step is, and which share of the device's peak it reaches.

    flops = count_flops(model, (images, labels), nn.CrossEntropyLoss())
    flops                                               # a table: forward, backward, recompute, and the operations
    utilisation(flops, seconds=0.120, peak=matmul_peak(device))

FLOP: a floating-point operation, FLOPs: several of them. Per second they are written FLOP/s here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from course_utils.flops_bytes import BytesMoved, bytes_moved
from course_utils.flops_counter import FakeRun, OperationTally
from course_utils.flops_units import percent, positive, si
from course_utils.views import html_table, text_table

if TYPE_CHECKING:
    from course_utils.roofline import MeasuredPeak

__all__ = ["BytesMoved", "Flops", "Utilisation", "bytes_moved", "count_flops", "mfu", "utilisation"]

_MOST_ROWS = 6


@dataclass(frozen=True, repr=False)
class Flops:
    """FLOPs of one step with `samples` samples: `forward`, `backward`, and `recompute`, what is computed once more.

    `by_operator`: all of them, by the name of the operation that runs them, largest first.
    """

    samples: int
    forward: int
    backward: int
    recompute: int
    by_operator: Mapping[str, int]

    @property
    def model_flops(self) -> int:
        """What the model asks for, forward and backward: the numerator of MFU."""
        return self.forward + self.backward

    @property
    def hardware_flops(self) -> int:
        """What the device computes, activations that are computed again included: the numerator of HFU."""
        return self.model_flops + self.recompute

    @property
    def total(self) -> int:
        """All that is counted, which is `hardware_flops`; torch's FlopCounterMode calls it the total as well."""
        return self.hardware_flops

    @property
    def per_sample(self) -> float:
        """Model FLOPs for each sample."""
        return self.model_flops / self.samples

    def _rows(self) -> list[tuple[str, ...]]:
        parts = [("forward", self.forward), ("backward", self.backward), ("recompute", self.recompute)]
        largest = list(self.by_operator.items())
        parts += [("total", self.total), *((f"· {name}", count) for name, count in largest[:_MOST_ROWS])]
        if len(largest) > _MOST_ROWS:
            parts.append((f"· {len(largest) - _MOST_ROWS} others", sum(count for _, count in largest[_MOST_ROWS:])))
        return [
            (
                name,
                si(count, "FLOP"),
                si(count / self.samples, "FLOP"),
                percent(count / self.total if self.total else None),
            )
            for name, count in parts
        ]

    def __repr__(self) -> str:
        return text_table(_headers(self.samples), self._rows())

    def _repr_html_(self) -> str:
        return html_table(_headers(self.samples), self._rows(), "Floating-point operations of one step")


def count_flops(
    model: nn.Module, batch: Any, loss: Callable[..., Any] | None = None, *, autocast: torch.dtype | None = None
) -> Flops:
    """Count the FLOPs of a training step's forward and backward pass, without computing anything.

    `batch` is (inputs, targets), every tensor with N samples in its first dimension, and `loss(output, targets)` gives
    one number, as for `memory_model.predict_memory`. Without a loss, only the forward pass is counted, and a tensor or
    dict of inputs will do. A model that is trained is counted in train mode.

    torch's FlopCounterMode counts the formulas of matrix products, convolutions and attention, 2 FLOPs for a
    multiply-add; additions, activations, normalisation and the optimizer, a percent or so of a usual step, count 0.
    Attention counts in full, also where a causal mask leaves half. What checkpointing computes again, and the scores
    that fused attention computes again for its backward pass, are `recompute`. Shapes decide, not dtypes or devices:
    the count holds for a GPU, too. Where the first layer's input needs no gradient, none is counted.

    Nothing of the model changes. MemoryModelError for a step that depends on values, such as .item(), or cannot be
    copied; ValueError or TypeError for arguments that do not fit together.
    """
    run, tally = FakeRun(model, batch, loss, autocast), OperationTally()
    run.watched_by(tally.counter(), tally.now_backward)
    by_operator: Counter[str] = sum(tally.flops.values(), Counter())
    forward, backward, recompute = (sum(tally.flops[phase].values()) for phase in ("forward", "backward", "recompute"))
    return Flops(run.samples, forward, backward, recompute, dict(by_operator.most_common()))


def mfu(model_flops: float, seconds: float, peak_flops_per_s: float | None) -> float | None:
    """Model FLOPs utilisation: the share of the peak that a step of `model_flops` in `seconds` reaches.

    0.4 is 40 %. With `Flops.hardware_flops` in the numerator it is HFU, hardware FLOPs utilisation. None where the peak
    is not known. The terms are those of Chowdhery et al. 2022 (PaLM, arXiv 2204.02311, section 4.1 and appendix B).
    """
    positive("seconds", seconds)
    if not (isinstance(model_flops, int | float) and model_flops >= 0 and math.isfinite(model_flops)):
        raise ValueError(
            f"model_flops must be a number of FLOPs, such as count_flops(...).model_flops: {model_flops!r}."
        )
    if peak_flops_per_s is None:
        return None
    return model_flops / seconds / positive("peak_flops_per_s", peak_flops_per_s)


@dataclass(frozen=True, repr=False)
class Utilisation:
    """How much of a peak one step used: against the best product measured here, and against the datasheet.

    MFU counts what the model needs, HFU what the device computes: checkpointing raises HFU and speeds nothing up.
    Shares of 1; None where there is no datasheet, as on a CPU.
    """

    flops: Flops
    seconds: float
    measured_peak_flops_per_s: float
    datasheet_flops_per_s: float | None

    @property
    def model_flops_per_s(self) -> float:
        """Model FLOPs a second."""
        return self.flops.model_flops / self.seconds

    @property
    def hardware_flops_per_s(self) -> float:
        """Hardware FLOPs a second."""
        return self.flops.hardware_flops / self.seconds

    @property
    def mfu(self) -> float:
        """MFU against the measured peak: what is left to gain on this device, as it really is."""
        return self.model_flops_per_s / self.measured_peak_flops_per_s

    @property
    def hfu(self) -> float:
        """HFU against the measured peak."""
        return self.hardware_flops_per_s / self.measured_peak_flops_per_s

    @property
    def datasheet_mfu(self) -> float | None:
        """MFU against the datasheet, which is what papers report."""
        return mfu(self.flops.model_flops, self.seconds, self.datasheet_flops_per_s)

    @property
    def datasheet_hfu(self) -> float | None:
        """HFU against the datasheet."""
        return mfu(self.flops.hardware_flops, self.seconds, self.datasheet_flops_per_s)

    def _rows(self) -> list[tuple[str, ...]]:
        peaks = (
            ("measured matrix product", self.measured_peak_flops_per_s, self.mfu, self.hfu),
            ("datasheet", self.datasheet_flops_per_s, self.datasheet_mfu, self.datasheet_hfu),
        )
        return [(name, si(peak, "FLOP/s"), percent(model), percent(all_)) for name, peak, model, all_ in peaks]

    def _line(self) -> str:
        return f"{si(self.flops.model_flops, 'FLOP')} in {self.seconds:.3g} s: {si(self.model_flops_per_s, 'FLOP/s')}"

    def __repr__(self) -> str:
        return f"{self._line()}\n{text_table(_PEAKS, self._rows())}"

    def _repr_html_(self) -> str:
        return html_table(_PEAKS, self._rows(), self._line())


_PEAKS = ("against", "peak", "MFU", "HFU")


def utilisation(flops: Flops, seconds: float, peak: MeasuredPeak) -> Utilisation:
    """MFU and HFU of a step of `flops` that took `seconds`; `peak` is `roofline.matmul_peak` in the step's dtype."""
    if not isinstance(flops, Flops):
        raise TypeError(f"flops must be what count_flops returned, not {type(flops).__name__}.")
    return Utilisation(flops, positive("seconds", seconds), peak.flops_per_s, peak.datasheet_flops_per_s)


def _headers(samples: int) -> tuple[str, ...]:
    return "part", f"step of {samples:,}", "per sample", "share"
