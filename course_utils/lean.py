"""What each technique buys, and what it costs: one ablation on a fixed job.

    job = image_job(device)
    result = ablate({"amp": amp, "channels_last": channels_last, "smaller": smaller}, job)
    result                       # one table: samples/s, peak memory, loss difference, seconds lost to compiling
    result.draw()

A *switch* is a plain function that changes a `Training` before it starts, with the real PyTorch line in it. Write your
own, or take one of `SWITCHES`. The baseline has none of them: float32, AdamW as it is by default, `.item()` after every
step.

Steps:

1. Build every run: the same initial weights, the same batches in the same order.
2. Two steps each that are not measured: the first compiles, the second one's peak memory is read.
3. Measure in rounds, A B C A B C, so that a machine that slows down for a while slows down all of them. A run that
   compiles gets rounds of its own with the baseline, because compiling cold means to drop all compiled code.
4. Combine what gained more than noise, and measure that like the others.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from tqdm import tqdm

from course_utils.arguments import whole
from course_utils.lean_jobs import (
    Job,
    SmallTransformer,
    Training,
    TransformerBlock,
    image_job,
    next_token_loss,
    transformer_job,
)
from course_utils.lean_run import Run, compiling_cold, settings_kept, warm_up
from course_utils.lean_switches import (
    SWITCHES,
    Switch,
    amp,
    channels_last,
    checkpointed,
    compiled,
    compiled_blocks,
    fewer_syncs,
    for_loop,
    foreach,
    fused,
    keep_zeros,
    smaller,
)
from course_utils.lean_table import BASELINE, ENOUGH_ROUNDS, Ablation, Row, break_even_steps
from course_utils.preserve import rng_preserved

__all__ = [
    "SWITCHES",
    "Ablation",
    "Job",
    "Row",
    "SmallTransformer",
    "Switch",
    "Training",
    "TransformerBlock",
    "ablate",
    "amp",
    "break_even_steps",
    "channels_last",
    "checkpointed",
    "compiled",
    "compiled_blocks",
    "fewer_syncs",
    "for_loop",
    "foreach",
    "fused",
    "image_job",
    "keep_zeros",
    "next_token_loss",
    "smaller",
    "transformer_job",
]

_BUDGET_S = {"cpu": 20.0, "cuda": 30.0}
_ROUNDS = 9
_LEAST_ROUNDS = 2  # of a run that is much slower than the baseline
_MUCH_SLOWER = 3.0


def ablate(
    switches: Mapping[str, Callable[[Training], object]],
    job: Job,
    *,
    together: str | Iterable[Collection[str]] | None = None,
    skip: Mapping[str, str] | None = None,
    steps: int | None = None,
    budget_s: float | None = None,
    progress: bool = True,
) -> Ablation:
    """Measure the baseline, each switch alone, and combinations.

    `together`: names of switches to combine, such as [("amp", "channels_last")], each combination a row. None: all that
    gained more than noise, in one row. "all": all that ran. Of several that set the same thing (two optimizers), these
    two take the fastest. (): no combination. `skip`: names of switches to leave out, each with the reason, which the
    table shows.

    `budget_s` bounds the whole (20 s on a CPU, 30 s on a GPU), except compiling: what the first two steps of a run take
    that compiles comes on top. A slow run gets fewer steps, two at least, and its row says so. The budget is passed
    where even these do not fit, or five rounds of one step each of the others. `steps` sets how many steps are measured
    of each run at most, spread over up to nine rounds.

    A switch that raises is a row with its error, out of memory as any other. The baseline's own errors pass through,
    as does an interrupt. The random state, the precision of float32 products, cuDNN's choices and the number of threads
    are put back. Compiling is cold: in an empty cache folder that is removed afterwards, and `torch._dynamo.reset()` is
    called before and after, so code that you compiled is compiled again at its next call.

    All runs' weights and optimizer states are alive at the same time; each peak leaves those of the others out.
    """
    skip = skip or {}
    combinations = _checked(switches, skip, together)
    steps = None if steps is None else whole("steps", steps, _LEAST_ROUNDS)
    budget_s = _BUDGET_S[job.device.type] if budget_s is None else budget_s
    if not 0 < budget_s < math.inf:
        raise ValueError(f"budget_s={budget_s!r} must be a number of seconds above 0.")
    begun = time.perf_counter()
    bar = tqdm(desc="ablation", unit=" turns", file=sys.stdout, leave=False, mininterval=0.3, disable=not progress)
    with rng_preserved(), settings_kept(), bar:
        warm_up(job)
        baseline = Run(BASELINE, {}, job)
        singles = [Run(name, {name: switch}, job) for name, switch in switches.items()]
        several = [Run(" + ".join(names), {name: switches[name] for name in names}, job) for names in combinations]
        for run in singles:
            run.skipped = skip.get(run.name)
        _build([baseline, *singles])
        for names in combinations:
            _refuse_conflicts([run for run in singles if run.name in names])
        _build(several)
        stage = _Stage(baseline, steps, budget_s, bar)
        automatic = together is None or together == "all"
        rows = stage.measure([*singles, *several], later=2 if automatic else 0)
        if automatic:
            candidates = [row for row in rows if row.speedup is not None and (row.gained or together == "all")]
            rows += stage.measure(_combined(candidates, {run.name: run for run in singles}, job))
    return Ablation(
        job=job.name,
        device=torch.cuda.get_device_name(job.device) if job.device.type == "cuda" else "CPU",
        rows=(stage.baseline_row, *rows),
        seconds=time.perf_counter() - begun,
        torch_version=str(torch.__version__),
    )


def _paced(row: Row, pace: float) -> Row:
    """The row with its rate and its spread times `pace`; what compares it with the baseline stays."""
    if row.samples_per_s is None or row.spread is None:
        return row
    return replace(row, samples_per_s=row.samples_per_s * pace, spread=row.spread * pace)


class _Stage:
    """Where groups of runs are measured one after the other, each with the baseline, out of one budget."""

    def __init__(self, baseline: Run, steps: int | None, budget_s: float, bar: tqdm[Any]) -> None:
        self.baseline, self.steps, self.left_s, self.bar = baseline, steps, budget_s, bar
        self.baseline_row = Row(BASELINE)
        begun = time.perf_counter()
        baseline.first_steps()
        self.left_s -= time.perf_counter() - begun

    def measure(self, runs: Sequence[Run], later: int = 0) -> list[Row]:
        """The rows of `runs`; `later` more runs shall find their share of the budget afterwards."""
        eager = [run for run in runs if run.runs and not run.compiles]
        groups = [eager, *([run] for run in runs if run.runs and run.compiles)]
        if not eager and (len(groups) > 1 or self.baseline_row.steps):
            del groups[0]
        shares = [1 + len(group) for group in groups]
        rows = {run.name: run.row(self.baseline) for run in runs if not run.runs}
        for index, group in enumerate(groups):
            self._measure_group(group, self.left_s * shares[index] / (sum(shares[index:]) + later))
            base = self.baseline.row(self.baseline)
            if not self.baseline_row.steps:
                self.baseline_row = base
            # The machine may have become faster or slower since the first group: rates are shown as at its speed.
            pace = (self.baseline_row.samples_per_s or 0.0) / (base.samples_per_s or math.inf)
            rows |= {run.name: _paced(run.row(self.baseline), pace) for run in group}
            for run in group:
                run.end()
        return [rows[run.name] for run in runs]

    def _measure_group(self, group: list[Run], share_s: float) -> None:
        self.baseline.forget_visits()
        with compiling_cold() if any(run.compiles for run in group) else nullcontext():
            begun = time.perf_counter()
            for run in group:
                self._show(run)
                run.first_steps()
                if run.compiles:
                    begun = time.perf_counter()  # compiling is not in the budget
            self._take_turns([self.baseline, *group], begun + share_s)
            self.left_s -= time.perf_counter() - begun

    def _take_turns(self, runs: list[Run], until_s: float) -> None:
        rounds = _ROUNDS if self.steps is None else min(_ROUNDS, self.steps)
        for turn in range(rounds):
            if turn >= ENOUGH_ROUNDS and time.perf_counter() >= until_s:
                break
            for run in runs:
                if not run.runs:
                    continue
                share_s = (until_s - time.perf_counter()) / ((rounds - turn) * len(runs))
                if self._too_slow(run, turn, share_s):
                    run.cut_short = True
                    continue
                if self.steps is None:
                    steps = max(1, int(share_s / run.step_s)) if run.step_s else 1
                else:
                    steps = (turn + 1) * self.steps // rounds - turn * self.steps // rounds
                self._show(run)
                run.visit(turn, steps)

    def _too_slow(self, run: Run, turn: int, share_s: float) -> bool:
        """Whether to leave a run out of a round: one step of it takes more than its share, and it has had two.

        Until there are enough rounds to tell, only what is much slower than the baseline is left out.
        """
        if run is self.baseline or turn < _LEAST_ROUNDS or run.step_s <= share_s:
            return False
        return turn >= ENOUGH_ROUNDS or run.step_s > _MUCH_SLOWER * self.baseline.step_s

    def _show(self, run: Run) -> None:
        self.bar.set_postfix_str(run.name, refresh=False)
        self.bar.update()


def _build(runs: Iterable[Run]) -> None:
    for run in runs:
        if run.runs:
            run.build()


def _combined(rows: Sequence[Row], runs: Mapping[str, Run], job: Job) -> list[Run]:
    """All of `rows` together in one run, built; of those that set the same, the fastest. None for fewer than two."""
    chosen: list[Run] = []
    for row in sorted(rows, key=lambda row: row.speedup or 0, reverse=True):
        run = runs.get(row.name)
        if run is not None and not any(run.changes & other.changes for other in chosen):
            chosen.append(run)
    if len(chosen) < 2:
        return []
    switches = {name: run.switches[name] for name, run in runs.items() if run in chosen}  # in the caller's order
    combined = Run(" + ".join(switches), switches, job)
    _build([combined])
    return [combined]


def _refuse_conflicts(runs: Sequence[Run]) -> None:
    """ValueError if two of these switches set the same thing: the second would undo the first, silently."""
    for one, other in itertools.combinations(runs, 2):
        if both := one.changes & other.changes:
            raise ValueError(f"{one.name} and {other.name} both set {min(both)}: combine one of them with the others.")


def _checked(
    switches: Mapping[str, Callable[[Training], object]],
    skip: Mapping[str, str],
    together: str | Iterable[Collection[str]] | None,
) -> list[tuple[str, ...]]:
    """The combinations asked for, each as names; ValueError or TypeError for what will not do."""
    if not isinstance(switches, Mapping) or not switches:
        raise TypeError('switches must be a dictionary of at least one, such as {"amp": lean.amp}.')
    for name, switch in switches.items():
        if not callable(switch):
            raise TypeError(f"switches[{name!r}] must be a function that changes a Training, not {switch!r:.80}.")
        if name == BASELINE or " + " in str(name):
            raise ValueError(f"switches[{name!r}]: {BASELINE!r} is the run without any, and ' + ' joins several names.")
    if isinstance(together, str) and together != "all":
        raise ValueError(f'together={together!r} is neither "all" nor a list of combinations, [("amp", "fused")].')
    combinations = [] if together is None or together == "all" else [tuple(names) for names in together]
    for name in itertools.chain(skip, *combinations):
        if name not in switches:
            raise ValueError(f"{name!r} is none of the switches: they are {', '.join(map(str, switches))}.")
    return combinations
