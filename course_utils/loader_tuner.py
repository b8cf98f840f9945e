"""The search behind `tune_loader`: few settings, short looks, and no win that could be noise.

1. Look at 0 workers, and at the ceiling: the same step on one cached batch. Within 5 % of it the search is over.
2. These two times say how many workers it takes to feed the step. Look at that number; climb while more workers win,
   else look below. A number that could not win even if its workers never disturbed each other is skipped.
3. At the best number, try prefetching, pinning (GPU) and, where epochs are short, new workers in each epoch.

A look ends when its rate is known well enough, when it cannot win any more, or when its share of the time is up.
Before it, what the setting needs of RAM and shared memory is compared with what there is. Afterwards its samples are
counted: a stream that every worker yields whole is fast, and wrong.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Literal

import torch

from course_utils.arguments import whole
from course_utils.loader_checks import check_dataset
from course_utils.loader_feed import Cached, batch_samples
from course_utils.loader_look import Looks, TimeUp
from course_utils.loader_needs import batch_bytes, loader_keywords, loader_needs, worker_counts
from course_utils.loader_run import Step, StepTime, TimeBar, checked, device_of_steps, rate_of, run_steps
from course_utils.loader_table import ENOUGH, LoaderTrial, TunedLoader
from course_utils.machine import usable_cpus
from course_utils.preserve import rng_preserved, training_preserved

_LOOKS = 12  # into so many the budget is divided
_LONGEST_LOOK_S = 2.5
_LEAST_WIN = 0.03
_UNKNOWN_ERROR = 0.02
_UNEVEN = 0.05  # a standard error above this comes from uneven batches
_SLACK = 1.2  # a worker may load faster than the training process did: files may be in the page cache by then
_WAITING_BELOW = 0.5  # share of the load time that the CPU works; below it, loading waits for a disk or a network


def tune_loader(
    make_loader: Callable[..., Any],
    step: Step,
    *,
    device: torch.device | str | None = None,
    workers: Iterable[int] | None = None,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    budget_s: float = 30.0,
    progress: bool = True,
) -> TunedLoader:
    """Find the DataLoader settings that feed `step` best, with as few workers as will do.

    `make_loader(**keywords)` returns a new DataLoader and passes the keywords on, such as
    `lambda **keywords: DataLoader(dataset, batch_size=64, shuffle=True, **keywords)`. `step(batch)` is your own: copy,
    forward, backward, optimizer. `device` is where it works; None finds out. `workers` are the numbers of workers to
    choose from (0 is always among them); None takes them from the usable CPUs, and goes beyond where loading waits
    rather than computes.

    It really trains. Give `model` and `optimizer` to have both put back; the random state always is. It takes
    `budget_s` seconds at most, hanging workers included, except that a step, a batch with 0 workers, and the start of
    workers are never cut short. All workers have ended when it returns, also when it is interrupted.

    A setting whose workers die or hang is a row of the table, not an error. What `step` raises passes through, and so
    does what the data set raises with 0 workers. ValueError if `make_loader` does not pass its keywords on.
    """
    device = checked(step, device, budget_s)
    if not callable(make_loader):
        raise TypeError("make_loader must be a function: lambda **keywords: DataLoader(dataset, **keywords).")
    chosen = None if workers is None else sorted({0, *(whole("workers", count, 0) for count in workers)})
    with ExitStack() as stack:
        stack.enter_context(rng_preserved() if model is None else training_preserved(model, optimizer))
        bar = TimeBar("tuning the loader", budget_s, progress)
        stack.callback(bar.close)
        return _Search(Looks(make_loader, step, device, budget_s, bar), chosen, budget_s).run()


class _Search:
    def __init__(self, looks: Looks, chosen: list[int] | None, budget_s: float) -> None:
        self.looks, self.chosen = looks, chosen
        self.look_s = min(_LONGEST_LOOK_S, budget_s / _LOOKS)
        self.rows: list[LoaderTrial] = []
        self.best: LoaderTrial
        self.batch_bytes = 0
        self.loads_per_s = self.ceiling = self.cpu_share = 0.0
        self.short_epochs = False

    def run(self) -> TunedLoader:
        self._look_at_none()
        ended_by: Literal["search", "budget"] = "search"
        if not self._fed(self.best):
            try:
                self._search_workers()
                self._search_rest()
            except TimeUp:
                ended_by = "budget"
        return self._result(ended_by)

    def _look_at_none(self) -> None:
        """0 workers, and the ceiling: what all others are judged by."""
        looks = self.looks
        row, feed, times = looks.look(loader_keywords(0, pin_memory=False), 1.5 * self.look_s)
        self.rows.append(row)
        self.best = row
        batch = feed.first_batch
        self.batch_bytes = batch_bytes(batch)
        counted = [one for one in times if one.counted]
        self.loads_per_s = sum(one.samples for one in counted) / max(1e-9, sum(one.wait_s for one in counted))
        self.cpu_share = feed.cpu_s / max(1e-9, feed.waited_s)
        epochs = feed.batches_per_epoch
        self.short_epochs = epochs is not None and epochs * batch_samples(batch) < self.look_s * _rate(row)
        looks.device = looks.device or device_of_steps()
        looks.batch_load_s = batch_samples(batch) / self.loads_per_s
        looks.findings = check_dataset(feed.loader, num_workers=2)
        looks.epoch_samples = row.epoch_samples
        seconds = min(self.look_s / 2, max(0.0, looks.left_s))
        looks.bar.tick("tuning the loader: the ceiling")
        with rng_preserved():
            ceiling = run_steps(Cached(batch), looks.step, looks.device, seconds=seconds)
        self.ceiling = rate_of(ceiling).samples_per_s

    def _search_workers(self) -> None:
        """Look at the number of workers that the two times call for, then at its neighbours."""
        counts = self._counts()
        if len(counts) < 2:
            return
        enough = [count for count in counts[1:] if count * self.loads_per_s >= ENOUGH * self.ceiling]
        called_for = enough[0] if enough else counts[-1]
        if self._computes():  # each of these workers needs a CPU: begin with as many as there are
            called_for = min(called_for, max(count for count in counts if count <= max(usable_cpus(), counts[1])))
        start = counts.index(called_for)
        row = self._try(self._keywords(counts[start]))
        if row.outcome == "measured" and not self._beats(self.rows[0], row):
            for count in counts[start + 1 :]:
                if self._fed(self.best):
                    return
                before = self.best
                if not self._beats(self._try(self._keywords(count)), before):
                    break
        if self._fed(self.best):
            return
        for count in reversed(counts[1:start]):
            most = min(self.ceiling, _SLACK * count * self.loads_per_s)
            if most < _rate(self.best) * (1 - _LEAST_WIN):
                reason = f"it could load {most:,.0f} samples/s at most"
                self.rows.append(LoaderTrial(self._keywords(count), "skipped", reason))
                return
            row = self._try(self._keywords(count))
            failures = sum(one.outcome == "failed" for one in self.rows)
            passed = self.best.num_workers > count and row.outcome == "measured" and self._beats(self.best, row)
            if failures > 1 or passed:
                return

    def _search_rest(self) -> None:
        """Prefetching, pinning and persistence, at the best number of workers."""
        before = self._fastest(self.rows[1:]) or self.best
        if before.num_workers and _rate(before) >= 0.9 * _rate(self.best):
            # Where batches are uneven, a longer queue may help by far more than a single step tells.
            for factor in (8,) if (before.error or 0) > _UNEVEN else (4, 8):
                if self._fed(self.best):
                    break
                row = self._try({**before.keywords, "prefetch_factor": factor})
                if not self._beats(row, before):
                    break
                before = row
        device = self.looks.device
        if device is not None and device.type == "cuda" and not self._fed(self.best):
            self._try({**self.best.keywords, "pin_memory": not self.best.keywords["pin_memory"]})
        if self.best.num_workers and self.short_epochs:
            self._try_new_workers()

    def _try_new_workers(self) -> None:
        """Workers that live on take memory for good: in short epochs, see whether that is a win."""
        kept, fresh = (
            self.looks.look({**self.best.keywords, "persistent_workers": stay}, self.look_s, to_the_end=True)
            for stay in (True, False)
        )
        with_kept, with_fresh = _with_restarts(kept[2]), _with_restarts(fresh[2])
        if fresh[0].outcome != "measured" or with_kept is None or with_fresh is None:
            return
        text = f"with the starts of epochs {with_fresh:,.0f} samples/s, and {with_kept:,.0f} if workers are kept"
        self.rows.append(replace(fresh[0], reason=text))
        if with_kept <= with_fresh * (1 + _LEAST_WIN):
            self.best = self.rows[-1]

    def _counts(self) -> list[int]:
        """The numbers of workers to choose from, 0 first."""
        if self.chosen is not None:
            return self.chosen
        cpus = usable_cpus()
        return list(worker_counts(cpus if self._computes() else min(4 * cpus, max(16, cpus))))

    def _computes(self) -> bool:
        """Whether loading keeps a CPU busy, rather than to wait for a disk or a network."""
        return self.cpu_share >= _WAITING_BELOW

    def _keywords(self, count: int) -> dict[str, Any]:
        return loader_keywords(count, device=self.looks.device)

    def _try(self, keywords: dict[str, Any]) -> LoaderTrial:
        """Refuse or measure a setting, note it, and see which is best now."""
        reason = self._refusal(keywords)
        row = (
            LoaderTrial(keywords, "refused", reason)
            if reason
            else self.looks.look(keywords, self.look_s, _rate(self.best))[0]
        )
        self.rows.append(row)
        fastest = self._fastest(self.rows)
        if fastest is not None:
            alike = [one for one in self.rows if one.outcome == "measured" and not self._beats(fastest, one)]
            self.best = min(alike, key=lambda one: one.num_workers)  # the first tried among as many workers
        return row

    def _fastest(self, rows: Sequence[LoaderTrial]) -> LoaderTrial | None:
        return max((row for row in rows if row.outcome == "measured"), key=_rate, default=None)

    def _refusal(self, keywords: dict[str, Any]) -> str:
        """Why a setting is not even tried, or ""."""
        count = keywords["num_workers"]
        for finding in self.looks.findings:
            if finding.blocks_workers:
                return f"{finding.problem} {finding.cure}"
        if count > 1 and self.looks.multiplied:
            return self.looks.multiplied
        each = max((row.workers_bytes / row.num_workers for row in self.rows if row.workers_bytes), default=0.0)
        needs = loader_needs(
            self.batch_bytes, count, keywords.get("prefetch_factor"), workers_bytes=round(each * count)
        )
        return "" if needs.fits else f"{needs.sentence} First try {needs.remedies[0]}."

    def _fed(self, row: LoaderTrial) -> bool:
        return row.outcome == "measured" and _rate(row) >= ENOUGH * self.ceiling

    def _beats(self, row: LoaderTrial, other: LoaderTrial) -> bool:
        """Whether `row` is faster than `other` by more than noise could make it: two standard errors, and 3 %."""
        errors = [_UNKNOWN_ERROR if one.error is None else one.error for one in (row, other)]
        noise = max(_LEAST_WIN, 2 * sum(error**2 for error in errors) ** 0.5)
        return row.outcome == "measured" and _rate(row) > _rate(other) * (1 + noise)

    def _result(self, ended_by: Literal["search", "budget"]) -> TunedLoader:
        notes = [repr(finding) for finding in self.looks.findings]
        cpus, device = usable_cpus(), self.looks.device
        if any(row.num_workers > cpus and row.samples_per_s for row in self.rows):
            notes.append(f"PyTorch warns of more workers than the {cpus} usable CPUs: an upper bound, not advice.")
        if device is not None and device.type == "cpu" and self._computes() and not self._fed(self.best):
            notes.append("On a CPU the ceiling is out of reach: workers and the step share the cores.")
        return TunedLoader(
            rows=tuple(self.rows),
            best=self.best,
            keywords=dict(self.best.keywords),
            ceiling_samples_per_s=self.ceiling,
            loader_is_bottleneck=not self._fed(self.rows[0]),
            seconds=time.perf_counter() - self.looks.begun,
            ended_by="ceiling" if self._fed(self.best) else ended_by,
            notes=tuple(notes),
        )


def _rate(row: LoaderTrial) -> float:
    return row.samples_per_s or 0.0


def _with_restarts(times: Sequence[StepTime]) -> float | None:
    """Samples per second with the starts of epochs, from the first counted step on."""
    first = next((number for number, one in enumerate(times) if one.counted), None)
    if first is None:
        return None
    return sum(one.samples for one in times[first:]) / max(1e-9, sum(one.wait_s + one.busy_s for one in times[first:]))
