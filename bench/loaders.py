"""The loader tuner against the exhaustive grid and against the usual rules.

1. `tune_loader` searches, as a user would call it.
2. The grid measures every combination of workers, prefetching, persistence and (with a GPU) pinning.
3. The setting that each of them chose, and those of the rules, are measured again, in turns, by one clock. Only these
   figures are compared: the best of many noisy measurements is always too good.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from bench.report import Section, Table, median, ratio, times
from course_utils import views
from course_utils.loader_workers import end_workers
from course_utils.loading import loader_keywords, no_worker_advice, tune_loader
from course_utils.machine import usable_cpus

Keywords = dict[str, Any]
_PREFETCH = (2, 4)
TUNER_BUDGET_S = 10.0  # it looks at a setting for a tenth of it: as long as the grid does
_MOST_WORKERS = 16


@dataclass(frozen=True)
class Task:
    """A data set, the step that its batches feed, and the numbers of workers in the grid."""

    name: str
    dataset: Dataset[Any]
    batch_size: int
    step: Callable[[Any], object]
    workers: tuple[int, ...]

    def make_loader(self, **keywords: Any) -> DataLoader[Any]:
        """What `tune_loader` asks for."""
        with no_worker_advice():
            return DataLoader(self.dataset, self.batch_size, shuffle=True, **keywords)


@dataclass(frozen=True)
class Choice:
    """A setting, who chose it, the seconds that choosing took (None: nothing was measured) and its rates, in turns."""

    task: str
    chosen_by: str
    keywords: Keywords
    search_s: float | None
    settings_measured: int
    rates: tuple[float, ...]

    @property
    def samples_per_s(self) -> float | None:
        """The median of the turns."""
        return median(self.rates)


class Sleepy(Dataset[Any]):
    """Samples that take a while and no CPU, as from a slow disk or a network: here workers help beyond the CPUs."""

    def __init__(self, samples: int, sleep_s: float) -> None:
        self.samples, self.sleep_s = samples, sleep_s

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(self.sleep_s)
        return torch.full((3, 16, 16), float(index)), index % 10


def measure(quick: bool = False, *, progress: bool = True) -> Section:
    """Both tasks: search, grid, rules, then the turns. `quick` shortens everything; its ratios mean little."""
    choices = [choice for task in tasks(quick) for choice in compare(task, quick, progress)]
    notes = [
        "The grid measures each setting for one epoch or 1 s, whichever is longer, after its first batches. The tuner "
        f"has {TUNER_BUDGET_S:.0f} s, and looks at a setting for 1 s.",
        "The sleeping data set needs no CPU, like a slow disk or a network: more workers than CPUs help there.",
    ]
    if not torch.cuda.is_available():
        notes.append(
            "There is no GPU here: the step waits as long as a fast one would take, and leaves the CPUs to the loader. "
            "Pinning cannot be measured."
        )
    records = tuple({**asdict(choice), "samples_per_s": choice.samples_per_s} for choice in choices)
    return Section("loaders", "Loader settings", _tables(choices), records, tuple(notes))


def tasks(quick: bool) -> Iterator[Task]:
    """The course's photographs, and a data set that only waits."""
    from course_utils.images import open_data, train_transform

    cpus = usable_cpus()
    photos = open_data(None, "train", train_transform(64), progress=False)
    yield Task("photographs", photos, 32, _step(0.010), (0, 1) if quick else _counts(0, 1, cpus, 2 * cpus))
    sleepy = Sleepy(64 if quick else 240, 0.004)
    counts = (0, 2) if quick else _counts(0, cpus, 2 * cpus, 4 * cpus)
    yield Task("sleeping, 4 ms a sample", sleepy, 16, _step(0.005), counts)


def _counts(*counts: int) -> tuple[int, ...]:
    return tuple(sorted({min(count, _MOST_WORKERS) for count in counts}))


def _step(wait_s: float) -> Callable[[Any], object]:
    """A training step on the GPU, or a wait of `wait_s` where there is none."""
    if not torch.cuda.is_available():
        return lambda _: time.sleep(wait_s)
    from course_utils.resnet import small_resnet

    model = small_resnet().cuda()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch: Any) -> None:
        images, labels = (part.cuda(non_blocking=True) for part in batch)
        if images.shape[-1] < 48:
            images = functional.interpolate(images, size=64)
        loss = functional.cross_entropy(model(images), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        torch.cuda.synchronize()

    return step


def compare(task: Task, quick: bool, progress: bool) -> list[Choice]:
    """Everybody's choice for one task, each measured in turns."""
    tuned, tuned_s, measured = _tune(task, quick)
    best, grid_s, settings = _search_grid(task, 0.2 if quick else 1.0, progress)
    cpus, gpus = usable_cpus(), max(1, torch.cuda.device_count())
    chosen: list[tuple[str, Keywords, float | None, int]] = [
        ("tune_loader", tuned, tuned_s, measured),
        ("exhaustive grid", best, grid_s, settings),
        ("rule: 0 workers", {"num_workers": 0}, None, 0),
        (f"rule: cpu_count = {cpus}", {"num_workers": cpus}, None, 0),
        (f"rule: 4 per GPU = {4 * gpus}", {"num_workers": 4 * gpus}, None, 0),
    ]
    rates: dict[str, list[float]] = {name: [] for name, *_ in chosen}
    for turn in range(1 if quick else 3):
        order = chosen if turn % 2 == 0 else chosen[::-1]  # what drifts hits all alike
        for name, keywords, *_ in tqdm(order, desc=f"{task.name}, turn {turn + 1}", leave=False, disable=not progress):
            rates[name].append(samples_per_s(task, keywords, 0.3 if quick else 1.0))
    return [Choice(task.name, name, kept, spent, count, tuple(rates[name])) for name, kept, spent, count in chosen]


def _tune(task: Task, quick: bool) -> tuple[Keywords, float, int]:
    started = time.perf_counter()
    budget_s = 4.0 if quick else TUNER_BUDGET_S
    tuned = tune_loader(task.make_loader, task.step, budget_s=budget_s, progress=False)
    measured = sum(row.samples_per_s is not None for row in tuned.rows)
    return dict(tuned.keywords), time.perf_counter() - started, measured


def _search_grid(task: Task, least_s: float, progress: bool) -> tuple[Keywords, float, int]:
    started = time.perf_counter()
    settings = grid(task.workers)
    found = [
        (samples_per_s(task, keywords, least_s, whole_epoch=True), number)
        for number, keywords in enumerate(tqdm(settings, desc=f"{task.name}, grid", leave=False, disable=not progress))
    ]
    return settings[max(found)[1]], time.perf_counter() - started, len(settings)


def grid(workers: Sequence[int]) -> list[Keywords]:
    """Every valid setting: workers × prefetch × persistence, × pinning where there is a GPU."""
    pinning = (False, True) if torch.cuda.is_available() else (False,)
    return [
        loader_keywords(count, prefetch_factor=prefetch, persistent_workers=persistent, pin_memory=pin)
        for count in workers
        for prefetch, persistent, pin in product(_PREFETCH, (True, False), pinning)
        if count or (prefetch == _PREFETCH[0] and persistent)
    ]


def samples_per_s(task: Task, keywords: Mapping[str, Any], least_s: float, *, whole_epoch: bool = False) -> float:
    """Throughput of the step fed by this setting, the starts of later epochs included, that of the first one not.

    As many batches as the workers can have ready are left out first: they were made before the clock ran.
    """
    loader, batches_of_epoch = task.make_loader(**keywords), None
    epoch = len(loader)
    samples, batches, started = 0, -min(epoch, 1 + loader.num_workers * (loader.prefetch_factor or 0)), 0.0
    try:
        while True:
            with no_worker_advice():
                batches_of_epoch = iter(loader)
            for batch in batches_of_epoch:
                if batches == 0:
                    started = time.perf_counter()
                task.step(batch)
                batches += 1
                samples += len(batch[1]) if batches > 0 else 0
                seconds = time.perf_counter() - started
                if batches > 0 and seconds >= least_s and (not whole_epoch or batches >= epoch):
                    return samples / seconds
    finally:
        end_workers(loader, batches_of_epoch)


def _tables(choices: Sequence[Choice]) -> tuple[Table, ...]:
    headers = (
        "chosen by", "of the grid's best", "of the grid's time", "samples/s", "lowest", "highest", "setting",
        "settings measured", "seconds",
    )  # fmt: skip
    tables = []
    for name in dict.fromkeys(choice.task for choice in choices):
        own = [choice for choice in choices if choice.task == name]
        reference = next(choice for choice in own if choice.chosen_by == "exhaustive grid")
        rows = [
            (
                choice.chosen_by,
                times(ratio(choice.samples_per_s, reference.samples_per_s)),
                times(ratio(choice.search_s, reference.search_s)),
                views.number(choice.samples_per_s),
                views.number(min(choice.rates)),
                views.number(max(choice.rates)),
                _words(choice.keywords),
                str(choice.settings_measured),
                views.number(choice.search_s, "", 1),
            )
            for choice in own
        ]
        tables.append(Table(f"Data set: {name}", headers, tuple(rows)))
    return tuple(tables)


def _words(keywords: Mapping[str, Any]) -> str:
    words = [f"{keywords['num_workers']} workers"]
    words += [f"prefetch {keywords['prefetch_factor']}"] if keywords.get("prefetch_factor") else []
    words += ["persistent"] if keywords.get("persistent_workers") else []
    words += ["pinned"] if keywords.get("pin_memory") else []
    return ", ".join(words)
