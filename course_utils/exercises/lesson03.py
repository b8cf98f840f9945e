"""Exercises of lesson 03: the bytes of a batch, one worker's share of a stream, and a device that is fed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from course_utils import workload
from course_utils.exercises.engine import Answer, Exercise, NotYet
from course_utils.exercises.measured import SAME_JOB, judge_recipe
from course_utils.workload import Measurement, Recipe

# --- traps that section 8 of the lesson shows; here, so that workers can import them on every system ----------------


class Numbers(IterableDataset[int]):
    """A stream of the numbers 0 to 7 that does not ask which worker it runs in."""

    def __iter__(self) -> Any:
        return iter(range(8))


class Lottery:
    """Eight random numbers, by a generator that the data set made once, before its workers were born."""

    def __init__(self) -> None:
        import numpy as np

        self.generator = np.random.default_rng(0)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return int(self.generator.integers(1, 1000))


def fresh_generator(_: int) -> None:
    """A `worker_init_fn`: gives each worker's copy of `Lottery` a generator of its own, seeded by torch."""
    import numpy as np

    info = get_worker_info()
    assert info is not None
    info.dataset.generator = np.random.default_rng(torch.initial_seed())  # type: ignore[attr-defined]


# --- bytes: what one batch moves ------------------------------------------------------------------------------------


def batch_bytes(n: int, channels: int, height: int, width: int, dtype: torch.dtype) -> int:
    """Return the bytes of one batch of images, shape (n, channels, height, width)."""
    return n * channels * height * width * dtype.itemsize


_BATCHES = (
    (16, 3, 64, 64, torch.float32, 786_432),
    (16, 3, 64, 64, torch.uint8, 196_608),
    (16, 1, 64, 64, torch.uint8, 65_536),
    (64, 3, 224, 224, torch.float32, 38_535_168),
    (64, 3, 224, 224, torch.float16, 19_267_584),
    (7, 3, 48, 96, torch.float64, 774_144),
)


def _check_bytes(answer: Answer) -> str:
    for n, channels, height, width, dtype, expected in _BATCHES:
        given = answer(n, channels, height, width, dtype)
        case = f"({n}, {channels}, {height}, {width}) of {dtype}"
        if isinstance(given, bool) or not isinstance(given, int | float):
            raise NotYet(f"Return a number. For {case} it returned {given!r:.80}.")
        if given == expected:
            continue
        elements = expected // dtype.itemsize
        if given == elements and dtype.itemsize > 1:
            raise NotYet(f"For {case}, {given:,} is the number of elements. How many bytes has each, in {dtype}?")
        if given == elements * 4:
            raise NotYet(f"For {case}: not every dtype has 4 bytes. `dtype.itemsize` knows.")
        if abs(given * 2**20 - expected) < 2**20 and expected > 2**20:
            raise NotYet(f"For {case}, that looks like MiB. Return bytes: the unit stands in the function's name.")
        raise NotYet(f"For {case} it should be {expected:,} bytes. It was {given:,}.")
    return f"Right for all {len(_BATCHES)} batches. uint8 moves a quarter of what float32 moves."


bytes_of_a_batch = Exercise(
    name="bytes",
    hints=(
        "How many numbers does a tensor of this shape hold? And how many bytes does one number take?",
        "`torch.float32.itemsize` is 4, `torch.uint8.itemsize` is 1.",
    ),
    reference=batch_bytes,
    check_answer=_check_bytes,
)

# --- share: an iterable data set in several workers -----------------------------------------------------------------


def my_share(samples: Sequence[Any], info: Any) -> list[Any]:
    """Return the samples that this worker yields; `info` is what `get_worker_info()` returned."""
    if info is None:  # no workers: the training process reads everything itself
        return list(samples)
    return list(samples[info.id :: info.num_workers])


def _check_share(answer: Answer) -> str:
    for count, workers in ((8, 2), (9, 2), (10, 4), (3, 4), (0, 2)):
        samples = [f"sample {number}" for number in range(count)]
        infos = [SimpleNamespace(id=number, num_workers=workers) for number in range(workers)]
        shares = [answer(list(samples), info) for info in infos]
        if not all(isinstance(share, list) for share in shares):
            raise NotYet(f"Return a list. It returned {shares[0]!r:.80}.")
        together = list(chain.from_iterable(shares))
        case = f"{count} samples and {workers} workers"
        if len(together) > len(set(together)):
            raise NotYet(f"With {case}, some samples come more than once: {len(together)} in all. Who takes which?")
        if missing := [sample for sample in samples if sample not in together]:
            raise NotYet(f"With {case}, nobody yields {missing[0]!r}. Take care of what does not divide evenly.")
        if sorted(together) != sorted(samples):
            raise NotYet(f"With {case}, there are samples that were never there: {together!r:.80}.")
        if max(map(len, shares)) > -(-count // workers):
            raise NotYet(f"With {case}, the shares are {[len(share) for share in shares]}: one worker does most of it.")
    if answer(["one", "two", "three"], None) != ["one", "two", "three"]:
        raise NotYet("Without workers `get_worker_info()` is None. Then everything is yours.")
    return "Right: each sample once, no worker with more than its share, and with 0 workers too."


share = Exercise(
    name="share",
    hints=(
        "`info.id` counts from 0 to `info.num_workers - 1`. Let worker 0 take samples 0, 2, 4, … of two.",
        "A slice with a step does it: `samples[info.id :: info.num_workers]`. And `info` may be None.",
    ),
    reference=my_share,
    check_answer=_check_share,
)

# --- fed: measured against the learner's own baseline ---------------------------------------------------------------

_FASTER = 1.1
_WAIT = 0.5  # of the naive wait
_WAIT_ENOUGH_PERCENT = 5.0


def fed_recipe() -> Recipe:
    """Return a workload.Recipe that waits half as long for data as the naive one, and is 10 % faster."""
    return workload.Recipe(cache="ram", augment="batch", item_every=10)


def _check_fed(answer: Answer) -> str:
    return judge_recipe(
        answer,
        _compare,
        question="Where did section 5 find most of the work?",
        praise="Fed, with the same batches of the same size.",
        fixed=(*SAME_JOB, "batch_size", "precision", "lr"),
    )


def _compare(naive: Measurement, yours: Measurement) -> str | None:
    """What is still missing, or None."""
    faster = yours.samples_per_s >= _FASTER * naive.samples_per_s
    fed = yours.data_wait_percent <= max(_WAIT * naive.data_wait_percent, _WAIT_ENOUGH_PERCENT)
    if faster and fed:
        return None
    if fed:
        return (
            "It waits less, and is not 10 % faster: the work moved, it did not shrink. "
            "Which work is done again in every epoch?"
        )
    return "It still waits: which stage of section 5 costs most, and who could do it less often, or elsewhere?"


fed = Exercise(
    name="fed",
    hints=(
        "Workers only help where CPUs are idle. Look at the stages of section 5: the largest can be done once.",
        '`cache="ram"` decodes once. `augment="batch"` leaves the cropping to the device, a whole batch at a time.',
    ),
    reference=fed_recipe,
    check_answer=_check_fed,
)
