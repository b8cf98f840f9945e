"""The knobs of the course's training job, and what a run of it measured.

    naive = Recipe()                                   # every default is the naive way
    better = naive.but(batch_size=64, num_workers=2)   # a new recipe; recipes never change

A new knob is one field below, with its limits and its meaning, and one line in `workload` that uses it.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Annotated, Any, get_type_hints

from course_utils import views
from course_utils.scoreboard import Row


@dataclass(frozen=True)
class Whole:
    """A knob that takes a whole number from `lowest` to `highest`; None too where it may be left open."""

    meaning: str
    lowest: int
    highest: int
    optional: bool = False

    def checked(self, name: str, value: Any) -> int | None:
        """The value as a plain int (NumPy's integers are accepted), or ValueError."""
        if value is None and self.optional:
            return None
        try:
            number = None if isinstance(value, bool) else operator.index(value)
        except TypeError:
            number = None
        if number is None or not self.lowest <= number <= self.highest:
            span = f"from {self.lowest:,} to {self.highest:,}{', or None' if self.optional else ''}"
            raise ValueError(f"{name}={value!r:.80} will not do: give a whole number {span} ({self.meaning})")
        return number


@dataclass(frozen=True)
class Positive:
    """A knob that takes a finite number above 0."""

    meaning: str

    def checked(self, name: str, value: Any) -> float:
        """The value as a float, or ValueError."""
        try:
            number = None if isinstance(value, bool | str) else float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            number = None
        if number is None or not math.isfinite(number) or number <= 0:
            raise ValueError(f"{name}={value!r:.80} will not do: give a finite number above 0 ({self.meaning})")
        return number


@dataclass(frozen=True)
class Choice:
    """A knob that takes one of `options`."""

    meaning: str
    options: tuple[str | bool, ...]

    def checked(self, name: str, value: Any) -> str | bool:
        """The value itself, or ValueError."""
        for option in self.options:
            if type(option) is type(value) and option == value:
                return option
        either = " or ".join(map(repr, self.options))
        raise ValueError(f"{name}={value!r:.80} will not do: give {either} ({self.meaning})")


_SWITCH = (False, True)


@dataclass(frozen=True, repr=False)
class Recipe:
    """How the training job does its steps. Each default is the naive way; None means that the device decides.

    A value that makes no sense raises ValueError, which names the knob and what it takes.
    """

    batch_size: Annotated[int, Whole("samples in one optimizer step", 1, 65_536)] = 16
    image_size: Annotated[int | None, Whole("height and width in pixels after the transforms", 48, 1024, True)] = None
    num_workers: Annotated[int, Whole("processes that load and transform; 0: the training process does", 0, 256)] = 0
    prefetch_factor: Annotated[int | None, Whole("batches that each worker keeps ready", 1, 256, True)] = None
    persistent_workers: Annotated[bool, Choice("keep the workers from one epoch to the next", _SWITCH)] = False
    pin_memory: Annotated[bool, Choice("put batches into page-locked memory; GPU only", _SWITCH)] = False
    non_blocking: Annotated[bool, Choice("do not wait for copies to the device", _SWITCH)] = False
    decode: Annotated[
        str,
        Choice(
            "read JPEG files in full, or smaller where enough pixels stay for image_size, or on the GPU",
            ("full", "reduced", "gpu"),
        ),
    ] = "full"
    cache: Annotated[
        str,
        Choice(
            "decode anew each time, or once and keep uint8 images in RAM or on the device", ("none", "ram", "device")
        ),
    ] = "none"
    augment: Annotated[
        str,
        Choice(
            "crop, resize, flip and normalise sample by sample on the CPU, or batch by batch on the device",
            ("sample", "batch"),
        ),
    ] = "sample"
    transfer: Annotated[
        str,
        Choice(
            "what is copied to the device: float32, or uint8 to be normalised there (as augment='batch' always does)",
            ("float32", "uint8"),
        ),
    ] = "float32"
    precision: Annotated[str, Choice("automatic mixed precision, or float32 throughout", ("fp32", "amp"))] = "fp32"
    channels_last: Annotated[bool, Choice("keep model and images with the channels innermost in memory", _SWITCH)] = (
        False
    )
    compile: Annotated[bool, Choice("run the model through torch.compile, during the warm-up", _SWITCH)] = False
    checkpoint: Annotated[
        bool, Choice("compute each residual block's forward pass again for its backward", _SWITCH)
    ] = False
    optimizer: Annotated[
        str,
        Choice(
            "how AdamW updates weights: as torch chooses, many at once, all in one kernel, or one by one",
            ("default", "foreach", "fused", "forloop"),
        ),
    ] = "default"
    # Not below 8: a strided 1 × 1 convolution of fewer channels in channels_last writes past its memory on a CPU with
    # AVX2 (seen in torch 2.11 and 2.14: "double free or corruption").
    width: Annotated[int | None, Whole("channels of the course's model in its first stage", 8, 512, True)] = None
    item_every: Annotated[int, Whole("read the loss with .item() every so many steps; 0: never", 0, 1_000_000)] = 1
    lr: Annotated[float, Positive("AdamW's learning rate")] = 1e-3
    seed: Annotated[int, Whole("for the weights, the order and the augmentation", 0, 2**31 - 1)] = 0
    steps: Annotated[int | None, Whole("stop after so many measured steps", 1, 10_000_000, True)] = None
    samples: Annotated[int | None, Whole("stop after so many measured samples", 1, 1_000_000_000, True)] = None

    def __post_init__(self) -> None:
        for name, knob in knobs().items():
            object.__setattr__(self, name, knob.checked(name, getattr(self, name)))
        for name in ("prefetch_factor", "persistent_workers"):
            # torch's DataLoader raises for both without workers.
            if getattr(self, name) and self.num_workers == 0:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} needs workers: set num_workers to 1 or more, or leave {name} out"
                )
        if self.augment == "batch":
            object.__setattr__(self, "transfer", "uint8")
        if conflict := self._conflict():
            raise ValueError(conflict)

    def _conflict(self) -> str:
        """Which knobs contradict each other, and the cure; empty if none do."""
        if self.decode == "gpu" and self.cache != "none":
            return (
                f"decode='gpu' decodes every batch anew, and cache={self.cache!r} keeps decoded images: leave one out"
            )
        for name, value in (("cache", "device"), ("decode", "gpu")):
            if getattr(self, name) == value and self.augment == "sample":
                return f"{name}={value!r} puts the images where the CPU's transforms cannot work: add augment='batch'"
        if self.cache == "device" and self.num_workers:
            return (
                f"cache='device' leaves nothing to load, so num_workers={self.num_workers} would have no work: "
                "set num_workers=0, and leave prefetch_factor and persistent_workers out"
            )
        return ""

    def but(self, **changes: Any) -> Recipe:
        """A copy with some knobs changed, checked like a new recipe."""
        return replace(self, **changes)

    def changes(self) -> dict[str, Any]:
        """The knobs that are not at their naive default, in the order of the fields."""
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if getattr(self, field.name) != field.default
        }

    def __repr__(self) -> str:
        return f"Recipe({', '.join(f'{name}={value!r}' for name, value in self.changes().items())})"

    def _repr_html_(self) -> str:
        rows = [(f.name, str(getattr(self, f.name)), str(f.default), knobs()[f.name].meaning) for f in fields(self)]
        return views.html_table(["knob", "this recipe", "naive", "what it sets"], rows, "Recipe")


@cache
def knobs() -> dict[str, Whole | Positive | Choice]:
    """What each field of `Recipe` takes and means, by name."""
    hints = get_type_hints(Recipe, include_extras=True)
    return {field.name: hints[field.name].__metadata__[0] for field in fields(Recipe)}


@dataclass(frozen=True, repr=False)
class Measurement:
    """What one run of `workload.train` measured; None where this machine cannot tell.

    `recipe` is the one that ran, with what the device decided filled in. `samples`, `steps`, `seconds` and what follows
    from them leave out the `warmup_steps`; the losses do not. `busy_percent` is the mean of the monitor's samples of
    `busy_source`. `data_wait_percent` is the share of the time in which the device had nothing to do but to wait for
    the next batch. `peak_memory_bytes` is what `memory_source` says. `loss_start` and `loss_end` are means over the
    first and the last steps (up to five).
    """

    recipe: Recipe
    device: str
    samples: int
    steps: int
    warmup_steps: int
    seconds: float
    data_wait_s: float
    busy_percent: float | None
    busy_source: str
    peak_memory_bytes: int | None
    memory_source: str
    loss_start: float | None
    loss_end: float | None
    ended_by: str
    torch_version: str
    notes: tuple[str, ...] = ()

    @property
    def samples_per_s(self) -> float:
        """Throughput: real training samples in a second, short batches counted as what they hold."""
        return self.samples / self.seconds

    @property
    def data_wait_percent(self) -> float:
        """The share of the measured time in which the device waited for the next batch, 0 to 100."""
        return min(100.0, 100 * self.data_wait_s / self.seconds)

    @property
    def seconds_per_step(self) -> float:
        """The mean time of one step."""
        return self.seconds / self.steps

    def as_row(self, lesson: int, title: str) -> Row:
        """The scoreboard's row for this run: `board.add(measurement.as_row(2, "nvidia_smi"))`."""
        return Row(
            lesson=lesson,
            title=title,
            samples_per_s=self.samples_per_s,
            busy_percent=self.busy_percent,
            data_wait_percent=self.data_wait_percent,
            peak_memory_bytes=self.peak_memory_bytes,
            device=self.device,
        )

    def _rows(self) -> list[tuple[str, str]]:
        return [
            ("throughput", views.number(self.samples_per_s, "samples/s", 1)),
            ("busy", f"{views.number(self.busy_percent, '%')} ({self.busy_source})"),
            ("waiting for data", views.number(self.data_wait_percent, "%")),
            ("peak memory", f"{views.mebibytes(self.peak_memory_bytes)} ({self.memory_source})"),
            ("loss", f"{views.number(self.loss_start, digits=2)} → {views.number(self.loss_end, digits=2)}"),
            (
                "measured",
                f"{self.samples:,} samples in {self.steps:,} steps, {self.seconds:.1f} s, until the limit of "
                f"{self.ended_by}, after {self.warmup_steps} warm-up steps that are not timed",
            ),
            ("device", f"{self.device}, torch {self.torch_version}"),
            ("recipe", repr(self.recipe)),
            *(("note", note) for note in self.notes),
        ]

    def __repr__(self) -> str:
        return "\n".join(f"{name:<17} {value}" for name, value in self._rows())

    def _repr_html_(self) -> str:
        return views.html_table(["measurement", "this run"], self._rows())
