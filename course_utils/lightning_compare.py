"""The raw loop and Trainer, step by step: are the losses the same?

recorder = LossRecorder()
L.Trainer(callbacks=[recorder], ...).fit(module, loader)
compare_losses(raw_losses, recorder.losses)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import lightning as L  # noqa: N812 -- as in Lightning's own documentation
import torch

from course_utils import views

if TYPE_CHECKING:
    from course_utils.plots import CourseFigure

_SHOWN = 3  # steps in the table, at either end


class LossRecorder(L.Callback):
    """Keeps the loss of every batch of the last `fit`, as `training_step` returned it.

    With accumulation Trainer divides the loss before it hands it to callbacks (read in Lightning 2.6.6,
    pytorch/loops/optimization/automatic.py); here that is undone.
    """

    def __init__(self) -> None:
        self._losses: list[torch.Tensor] = []

    @property
    def losses(self) -> list[float]:
        """One value a batch. Reading them makes the CPU wait for the device, once."""
        return torch.stack(self._losses).tolist() if self._losses else []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin a new list."""
        self._losses = []

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep the loss where it is, without reading it."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, torch.Tensor):
            self._losses.append(loss.detach().float() * trainer.accumulate_grad_batches)


@dataclass(frozen=True, repr=False)
class LossComparison:
    """Two loss curves of the same steps; differences are relative to the raw loop's loss.

    `within` says whether none is larger than `rtol`. Where only one of the two losses is finite, or none, the
    difference is infinite.
    """

    raw: tuple[float, ...]
    lightning: tuple[float, ...]
    rtol: float

    @property
    def differences(self) -> tuple[float, ...]:
        """The relative difference of each step."""
        return tuple(map(_difference, self.raw, self.lightning))

    @property
    def largest_difference(self) -> float:
        """The largest of them."""
        return max(self.differences)

    @property
    def largest_at(self) -> int:
        """The first step that has it, counted from 0."""
        return self.differences.index(self.largest_difference)

    @property
    def equal(self) -> bool:
        """Whether every step has the very same number."""
        return self.raw == self.lightning

    @property
    def within(self) -> bool:
        """Whether no step differs by more than `rtol`."""
        return self.largest_difference <= self.rtol

    @property
    def verdict(self) -> str:
        """What was found, in a sentence."""
        if self.equal:
            return f"All {len(self.raw):,} losses are equal, to the last bit."
        found = f"The largest difference is {self.largest_difference:.1e} of the loss, at step {self.largest_at:,}"
        return f"{found}: {'within' if self.within else 'more than'} the tolerance of {self.rtol:.0e}."

    def draw(self) -> CourseFigure:
        """Both curves, one over the other."""
        from course_utils import plots

        fig, ax = plots.figure(f"The loss by step, of the raw loop and of Trainer. {self.verdict}")
        with plots.style():
            ax.plot(self.raw, color=plots.ORANGE, linewidth=6, label="raw loop")
            ax.plot(self.lightning, color=plots.INK, linewidth=1.8, linestyle="--", label="Trainer")
            ax.set_xlabel("step")
            ax.set_ylabel("loss")
            ax.set_title(self.verdict)
            ax.legend(frameon=False)
        return fig

    def _rows(self) -> list[list[str]]:
        steps = range(len(self.raw))
        shown = [*steps] if len(steps) <= 2 * _SHOWN + 1 else [*steps[:_SHOWN], None, *steps[-_SHOWN:]]
        return [
            ["…"] * 4
            if step is None
            else [
                str(step),
                f"{self.raw[step]:.6f}",
                f"{self.lightning[step]:.6f}",
                f"{self.differences[step]:.1e}" if self.differences[step] else "0",
            ]
            for step in shown
        ]

    def __repr__(self) -> str:
        return f"{views.text_table(_HEADERS, self._rows())}\n{self.verdict}"

    def _repr_html_(self) -> str:
        return views.html_table(_HEADERS, self._rows(), self.verdict)


_HEADERS = ("step", "raw loop", "Trainer", "relative difference")


def compare_losses(raw: Iterable[float], lightning: Iterable[float], rtol: float = 1e-5) -> LossComparison:
    """Compare the losses of the raw loop and of Trainer, step by step; numbers or tensors of one element.

    With the same seed, data and operations a CPU gives equal numbers. On a GPU some sums are added up in an order that
    changes, so `rtol` is what you allow. ValueError where there is nothing to compare.
    """
    ours, theirs = tuple(map(float, raw)), tuple(map(float, lightning))
    if len(ours) != len(theirs) or not ours:
        raise ValueError(
            f"The raw loop gave {len(ours):,} losses and Trainer {len(theirs):,}: both must train the same steps."
        )
    if not (rtol >= 0 and math.isfinite(rtol)):
        raise ValueError(f"rtol must be a finite number of at least 0, not {rtol!r}.")
    return LossComparison(ours, theirs, rtol)


def _difference(raw: float, other: float) -> float:
    if raw == other:
        return 0.0
    if not (math.isfinite(raw) and math.isfinite(other)) or raw == 0:
        return math.inf
    return abs(other - raw) / abs(raw)
