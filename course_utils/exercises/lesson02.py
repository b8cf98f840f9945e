"""Exercises of lesson 02: parse a query, tell utilisation traces apart, raise busy % and prove it."""

from __future__ import annotations

import random

import torch

from course_utils import workload
from course_utils.exercises.engine import Answer, Exercise, NotYet
from course_utils.exercises.measured import judge_recipe
from course_utils.workload import Measurement, Recipe

# --- parse: nvidia-smi's CSV, with everything that a real machine puts into it ------------------------------------


def utilisation(text: str) -> list[float | None]:
    """Return one float for each GPU in `text`, or None where the value is missing."""
    values: list[float | None] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 3:
            values.append(None if cells[1].startswith("[") else float(cells[1]))
    return values


_QUERIES: tuple[tuple[str, str, list[float | None]], ...] = (
    ("one GPU", "0, 87, 5310\n", [87.0]),
    ("two GPUs", "0, 87, 5310\n1, 0, 3\n", [87.0, 0.0]),
    ("a missing value, new drivers", "0, [N/A], 5310\n", [None]),
    ("a missing value, old drivers", "0, [Not Supported], 5310\n", [None]),
    ("a failed sensor beside a good GPU", "0, [Unknown Error], 5310\n1, 42, 814\n", [None, 42.0]),
    ("no GPU", "No devices were found\n", []),
    (
        "no driver",
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. "
        "Make sure that the latest NVIDIA driver is installed and running.\n",
        [],
    ),
)


def _check_parse(answer: Answer) -> str:
    for case, text, expected in _QUERIES:
        given = answer(text)
        if not isinstance(given, list):
            raise NotYet(f"Return a list. For {text!r} it returned {given!r}.")
        if given == expected and [type(value) for value in given] == [type(value) for value in expected]:
            continue
        if any(value is None for value in expected) and 0 in given:
            raise NotYet(
                f"With {case} ({text!r}), unknown is not 0: a mean over GPUs would be wrong. Return None there."
            )
        raise NotYet(f"With {case}, {text!r} should give {expected!r}. It gave {given!r}.")
    return f"Right for all {len(_QUERIES)} texts, as real drivers print them."


parse = Exercise(
    name="parse",
    hints=(
        "`text.splitlines()` gives the lines, `line.split(',')` the cells, and `cell.strip()` removes the blanks.",
        "A line that has not exactly three cells is a sentence, not a GPU. A cell that starts with `[` has no value.",
    ),
    reference=utilisation,
    check_answer=_check_parse,
)

# --- traces_told_apart: busy % alone does not tell healthy from tiny kernels --------------------------------------

TRACES_ALT = (
    "Six small charts, two for each GPU. A: busy 96 to 100 %, power 27 to 31 W. "
    "B: busy swings between 0 and 95 %, power between 25 and 60 W. C: busy 95 to 100 %, power 62 to 69 W."
)
_KINDS = ("starved", "healthy", "tiny kernels")


def traces() -> dict[str, tuple[list[float], list[float], list[float]]]:
    """For A, B and C: seconds, busy percent and power in watts. Made up by formula, measured on no machine."""
    dice = random.Random(7)
    seconds = [0.2 * step for step in range(60)]
    feast = [step % 10 < 4 for step in range(60)]  # a batch arrives, is used up, and the next is not there yet
    return {
        "A": (seconds, [dice.uniform(96, 100) for _ in seconds], [dice.uniform(27, 31) for _ in seconds]),
        "B": (
            seconds,
            [dice.uniform(85, 95) if fed else dice.uniform(0, 5) for fed in feast],
            [dice.uniform(52, 60) if fed else dice.uniform(25, 30) for fed in feast],
        ),
        "C": (seconds, [dice.uniform(95, 100) for _ in seconds], [dice.uniform(62, 69) for _ in seconds]),
    }


def verdicts() -> dict[str, str]:
    """Return a dict such as {"A": "healthy", "B": "starved", "C": "tiny kernels"}."""
    return {"A": "tiny kernels", "B": "starved", "C": "healthy"}


def _check_traces(answer: Answer) -> str:
    given, expected = answer(), verdicts()
    if not isinstance(given, dict) or set(given) != set(expected):
        raise NotYet('Return a dict with the keys "A", "B" and "C".')
    unknown = [value for value in given.values() if value not in _KINDS]
    if unknown:
        raise NotYet(f"{unknown[0]!r} is none of the three: {', '.join(map(repr, _KINDS))}.")
    if given["B"] != "starved":
        raise NotYet("One of the three has long stretches near 0 %: what is a GPU doing there?")
    if given != expected:
        raise NotYet("A and C are equally busy. Look at the power: which of them makes the card work?")
    return "Right. B waits for data. A is as busy as C, at less than half of its power: small work, all the time."


traces_told_apart = Exercise(
    name="traces",
    hints=(
        "Begin with the left column: which GPU is idle again and again?",
        "The other two look alike on the left. Their power does not: 29 W of 70 W, against 66 W.",
    ),
    reference=verdicts,
    check_answer=_check_traces,
)

# --- busier: measured against the learner's own baseline ----------------------------------------------------------

_FASTER = 1.05  # what noise alone does not bring
_BUSIER = 1.05  # relative: a fast, starved GPU is busy for a few per cent of the time
_BUSY_ENOUGH_PERCENT = 96.0


def busier_recipe() -> Recipe:
    """Return a workload.Recipe that keeps this device busier than the naive one, and is faster."""
    # Workers load while the device computes. On a CPU both share the cores, and fewer, larger steps help.
    batch_size = 16 if torch.cuda.is_available() else 128
    return workload.Recipe(
        batch_size=batch_size, num_workers=2, persistent_workers=True, pin_memory=True, item_every=10
    )


def _check_busier(answer: Answer) -> str:
    return judge_recipe(
        answer,
        _compare,
        question="Which knob would shorten the wait for data?",
        praise="Busier and faster, measured in the same run.",
    )


def _compare(naive: Measurement, yours: Measurement) -> str | None:
    """What is still missing, or None."""
    faster = yours.samples_per_s >= _FASTER * naive.samples_per_s
    # A device that cannot get busier, or cannot be asked, is judged by throughput alone.
    at_its_limit = naive.busy_percent is None or yours.busy_percent is None or naive.busy_percent > _BUSY_ENOUGH_PERCENT
    busier = at_its_limit or (yours.busy_percent or 0) >= _BUSIER * (naive.busy_percent or 0)
    if faster and busier:
        return None
    if busier:
        return "Busier, but not faster: busy with what? More workers than CPUs only take turns."
    if faster:
        return "Faster, but no busier: who loads the next batch while this one is computed?"
    return "Neither rose: look for the knob that loads the next batch while this one is computed."


busier = Exercise(
    name="busier",
    hints=(
        "Data-wait % says that the device waits for batches. `num_workers` makes other processes load them meanwhile.",
        "`num_workers=2`, `persistent_workers=True` and `pin_memory=True` go together. A larger `batch_size` saves "
        "steps; on a starved GPU it does not raise busy %, since each image then needs less GPU time.",
    ),
    reference=busier_recipe,
    check_answer=_check_busier,
)
