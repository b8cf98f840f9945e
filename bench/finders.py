"""Batch finders side by side: ours, Lightning's Tuner and accelerate's, on the same model and the same memory.

1. `CASES` says which limits, data sets and start values; each limit is made exact by `finder_job.limit_for`.
2. `run_case` gives one finder a fresh job and a time limit, and notes what it did and what it left changed.
3. `measure` runs all of them and makes the tables.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch.nn import functional
from tqdm import tqdm

from bench.finder_job import LARGEST, Finder, Job, StoppedError, changes, limit_for, state_of
from bench.peers import peers
from bench.report import Section, Table, median, times, yes
from course_utils import views

OURS = "course_utils"
TOLERANCE = 0.02  # how far below the true limit a result may lie


@dataclass(frozen=True)
class Case:
    """What a finder is given. `limit`: the largest batch that the memory holds; 0: not even one sample fits."""

    name: str
    limit: int
    samples: int = LARGEST
    start: int | None = None

    @property
    def best(self) -> int:
        """The right answer: all that fits, and no more than there is."""
        return min(self.limit, self.samples)


@dataclass(frozen=True)
class Row:
    """What one finder did with one case. `changed` names the state that it did not put back."""

    case: str
    finder: str
    result: int | None
    error: str | None
    best: int
    tested: bool | None
    tried: tuple[int, ...]
    steps: int
    ooms: int
    seconds: float
    changed: tuple[str, ...]
    right: bool

    @property
    def ratio(self) -> float | None:
        """The result as a share of the right answer; None where there is none."""
        return self.result / self.best if self.result is not None and self.best else None


CASES = (
    *(Case(f"limit {limit:,}", limit) for limit in (20, 100, 700, 1000, 3000, 5000)),
    Case("limit 5,000, 3,000 samples", 5000, samples=3000),
    Case("limit 5,000, 100 samples", 5000, samples=100),
    Case("limit 100, start at 256", 100, start=256),
    Case("limit 20, start at 64", 20, start=64),
    Case("nothing fits", 0),
)
QUICK = (CASES[0], CASES[2], Case("limit 700, 300 samples", 700, samples=300), CASES[8], CASES[10])


def measure(quick: bool = False, *, with_peers: bool = True, progress: bool = True) -> Section:
    """Every case with every finder; `quick` runs five cases."""
    rivals, notes = peers() if with_peers else ({}, ())
    finders: dict[str, Finder] = {OURS: ours, f"{OURS}, no prediction": without_prediction, **rivals}
    cases = QUICK if quick else CASES
    pairs = [(case, name) for case in cases for name in finders]
    rows = [
        run_case(case, name, finders[name])
        for case, name in tqdm(pairs, desc="finders", leave=False, disable=not progress)
    ]
    tables = (_summary(rows, list(finders)), _details(rows))
    return Section(
        "finders", "Batch finders", tables, tuple({**asdict(row), "ratio": row.ratio} for row in rows), notes
    )


def run_case(case: Case, name: str, finder: Finder, limit_s: float = 30.0) -> Row:
    """One finder on a fresh job; an error is a result too. It is stopped after MOST_TRIALS or `limit_s` seconds."""
    job = Job(limit_for(case.limit), case.samples, limit_s)
    before = state_of(job.model, job.optimizer)
    result, error, nothing = None, None, False
    # Finders collect garbage at each size. What is there already is set aside, so that a finder's time does not depend
    # on which libraries are loaded.
    gc.freeze()
    started = time.perf_counter()
    try:
        result = finder(job, case.start)
    except StoppedError as stopped:
        error = str(stopped)
    except Exception as failure:  # noqa: BLE001 -- how a finder fails is what is measured
        error = f"{type(failure).__name__}: {failure}"
        # The right answer to a memory that holds nothing: an error of its own, after the smallest size was tried.
        nothing = isinstance(failure, RuntimeError) and not isinstance(failure, torch.OutOfMemoryError)
        nothing = nothing and 1 in job.tried
    finally:
        seconds = time.perf_counter() - started
        gc.unfreeze()
    tested = None if result is None else result in job.completed
    close = result is not None and (1 - TOLERANCE) * case.best <= result <= case.best
    right = bool(close and tested) if case.best else nothing
    changed = changes(before, state_of(job.model, job.optimizer))
    return Row(
        case.name, name, result, error, case.best, tested, tuple(job.tried), job.steps, job.memory.ooms, seconds,
        changed, right,
    )  # fmt: skip


def ours(job: Job, start: int | None) -> int:
    """`find_batch_size` as lesson 04 uses it: the prediction first, then trials on the device."""
    return _ours(job, start, predict=True)


def without_prediction(job: Job, start: int | None) -> int:
    """The same without `predict_memory`, as for a model that it cannot follow: only measured peaks."""
    return _ours(job, start, predict=False)


def _ours(job: Job, start: int | None, *, predict: bool) -> int:
    from course_utils.batch_size import find_batch_size
    from course_utils.memory_model import predict_memory

    model, optimizer, memory = job.model, job.optimizer, job.memory
    few = job.dataset.__getitems__(list(range(min(8, len(job.dataset)))))
    prediction = predict_memory(model, few, functional.cross_entropy, optimizer) if predict else None
    last: tuple[int, int] | None = None

    def trial(batch_size: int) -> int:
        nonlocal last
        if last != (batch_size, memory.ooms):  # another size, or the same one again after it did not fit
            job.begin_trial(batch_size)
            last = batch_size, memory.ooms
        return job.train_step(batch_size, model, optimizer)

    memory.track(model)
    with memory:
        found = find_batch_size(
            trial,
            model=model,
            optimizer=optimizer,
            prediction=prediction,
            memory=memory,
            dataset_size=len(job.dataset),
            start=start,
            progress=False,
        )
    return found.batch_size


def _summary(rows: Sequence[Row], finders: Sequence[str]) -> Table:
    headers = (
        "finder", "right", "of the limit: least, median, most", "tested", "too large", "sizes: median, most",
        "OOMs: median, most", "steps", "seconds", "state left changed",
    )  # fmt: skip
    cells = []
    for name in finders:
        own = [row for row in rows if row.finder == name]
        answered = [row for row in own if row.result is not None]
        changed = dict.fromkeys(what for row in own for what in row.changed)
        cells.append(
            (
                name,
                f"{sum(row.right for row in own)} of {len(own)}",
                _shares([row.ratio for row in own if row.ratio is not None]),
                f"{sum(bool(row.tested) for row in answered)} of {len(answered)}",
                f"{sum(row.result > row.best for row in answered if row.result)} of {len(answered)}",
                _spread([len(row.tried) for row in own if row.best]),
                _spread([row.ooms for row in own if row.best]),
                str(sum(row.steps for row in own)),
                f"{sum(row.seconds for row in own):.1f}",
                ", ".join(changed) or "nothing",
            )
        )
    return Table("All cases ('sizes' and 'OOMs' without the case in which nothing fits)", headers, tuple(cells))


def _details(rows: Sequence[Row]) -> Table:
    headers = (
        "case", "finder", "of the limit", "result", "limit", "tested", "right", "sizes", "OOMs", "steps", "seconds",
    )  # fmt: skip
    return Table(
        "Each case",
        headers,
        tuple(
            (
                row.case,
                row.finder,
                times(row.ratio),
                views.number(row.result) if row.error is None else row.error[:60],
                views.number(row.best),
                yes(row.tested),
                yes(row.right),
                str(len(row.tried)),
                str(row.ooms),
                str(row.steps),
                f"{row.seconds:.2f}",
            )
            for row in rows
        ),
    )


def _spread(counts: Sequence[int]) -> str:
    middle = median(counts)
    return views.MISSING if middle is None else f"{middle:g}, {max(counts)}"


def _shares(ratios: Sequence[float]) -> str:
    middle = median(ratios)
    return views.MISSING if middle is None else f"{min(ratios):.2f}, {middle:.2f}, {max(ratios):.2f} x"
