"""Exercises of lesson 06: a loop as a LightningModule, a finder's answer that is tested, and a leaner Trainer."""

from __future__ import annotations

import csv
import gc
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812 -- as in Lightning's own documentation
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner.tuning import Tuner
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from course_utils.exercises.engine import Answer, Exercise, NotYet
from course_utils.image_cache import as_is
from course_utils.lightning_finder import FEATURES, FinderMemory, Rows
from course_utils.lightning_tools import LossComparison, LossRecorder, compare_losses, quieted
from course_utils.preserve import rng_preserved

Batches = list[tuple[torch.Tensor, torch.Tensor]]


@contextmanager
def _workplace() -> Iterator[str]:
    """Quiet, with a folder that goes away and random states that come back."""
    with rng_preserved(), quieted(), tempfile.TemporaryDirectory() as folder:
        yield folder


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _plain_trainer(folder: str, **options: Any) -> L.Trainer:
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
    }
    return L.Trainer(**{**settings, **options})


# --- module: the raw loop's parts in the right hooks ----------------------------------------------------------------


def as_module(model: nn.Module, lr: float) -> L.LightningModule:
    """Return a LightningModule that trains `model` as the loop above does, and logs "train_loss" in every step."""

    class Classifier(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            inputs, labels = batch
            loss = functional.cross_entropy(self.model(inputs), labels)
            self.log("train_loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=lr)

    return Classifier()


_STEPS = 12
_RTOL = 1e-5


def _check_module(answer: Answer) -> str:
    for lr in (0.05, 0.002):
        with _workplace() as folder:
            raw = _raw_losses(lr)
            model, batches = _job()
            module = answer(model, lr)
            if not isinstance(module, L.LightningModule):
                raise NotYet(f"Return a LightningModule, made: `return Classifier()`. It returned {module!r:.80}.")
            if {id(one) for one in module.parameters()} != {id(one) for one in model.parameters()}:
                raise NotYet("The module must hold `model` and nothing else to train: `self.model = model`.")
            recorder = LossRecorder()
            trainer = _plain_trainer(folder, callbacks=[recorder])
            _as_learners(partial(trainer.fit, module, _loader(batches)))
            _judge_losses(raw, recorder.losses, lr)
            if "train_loss" not in trainer.callback_metrics:
                raise NotYet('The losses are right, and none is logged: `self.log("train_loss", loss)`.')
    return (
        f"Equal losses in all {_STEPS} steps, with two learning rates. What is left to you is what the lesson is about."
    )


def _as_learners(run: Callable[[], object]) -> None:
    """Run what calls the learner's methods: what they raise is theirs."""

    def raising() -> bool:
        run()
        return True

    Answer(raising)()


def _judge_losses(raw: list[float], losses: list[float], lr: float) -> None:
    if not losses:
        raise NotYet("No loss came back: `training_step` returns it, and Trainer does the rest.")
    compared: LossComparison = compare_losses(raw, losses, rtol=_RTOL)
    if compared.within:
        return
    first = compared.differences[0]
    if first > _RTOL:
        raise NotYet(
            f"The very first loss is {losses[0]:.4f}, and the raw loop's is {raw[0]:.4f}: take the mean "
            "`cross_entropy` of the model's outputs as they are, with the model in training mode."
        )
    raise NotYet(
        f"The first loss is right; from step {_first_above(compared)} on they differ (with lr={lr}). The optimizer "
        "makes the difference: AdamW, with this `lr` and nothing else changed; backward and step are Trainer's."
    )


def _first_above(compared: LossComparison) -> int:
    return next(step for step, difference in enumerate(compared.differences) if difference > compared.rtol)


def _job() -> tuple[nn.Module, Batches]:
    """A small model with dropout and BatchNorm, and its batches; torch's generator is where training begins."""
    torch.default_generator.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
    return model, [(torch.randn(8, 6), torch.randint(3, (8,))) for _ in range(_STEPS)]


def _loader(batches: Batches) -> DataLoader[Any]:
    """The batches as they are; its generator leaves torch's own alone."""
    return DataLoader(batches, batch_size=None, generator=torch.Generator())  # type: ignore[arg-type,unused-ignore]


def _raw_losses(lr: float) -> list[float]:
    model, batches = _job()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses = []
    for inputs, labels in batches:
        loss = functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


module = Exercise(
    name="module",
    hints=(
        "`training_step(self, batch, batch_idx)` returns the loss. Which of the loop's lines does Trainer do itself?",
        "`self.model = model` registers the weights; `configure_optimizers` returns "
        "`torch.optim.AdamW(self.parameters(), lr=lr)`.",
    ),
    reference=as_module,
    check_answer=_check_module,
)

# --- finder: an answer is no test -----------------------------------------------------------------------------------


def tested_batch_size(find: Callable[[], int], fits: Callable[[int], bool], samples: int) -> int:
    """Return a batch size that has run: start at what `find()` says; 0 if nothing fits.

    `fits(n)` trains two steps on n samples and says whether they went through; the data set has `samples`.
    """
    size = min(find(), samples)
    while size and not fits(size):
        size //= 2
    return size


_MOST_TRIALS = 40
_LIMIT_BYTES = 4_500_000  # between what 4,096 rows and what 8,192 rows need


def _check_finder(answer: Answer) -> str:
    with _workplace() as folder:
        planted = _planted_answer(folder)
        memory = _Memory()
        cases: tuple[tuple[str, int, Callable[[int], bool], int], ...] = (
            ("an answer above the data set", 4096, lambda size: True, 3000),
            ("Lightning's answer in a small memory", planted, memory.fits, 20_000),
            ("an answer that fits", 96, lambda size: size <= 100, 3000),
            ("an answer of 1 where nothing fits", 1, lambda size: False, 3000),
        )
        for case, found, fits, samples in cases:
            _check_answer(answer, case, found, fits, samples)
    return (
        f"Right. Lightning said {planted:,} and had run half of it; you return what has run. The other answers were "
        "no better: larger than the data set, and 1 where nothing fits."
    )


def _check_answer(answer: Answer, case: str, found: int, fits: Callable[[int], bool], samples: int) -> None:
    ran: dict[int, bool] = {}

    calls = itertools.count(1)

    def trial(size: int) -> bool:
        if next(calls) > _MOST_TRIALS:  # an error, since a loop that goes on for ever must end
            raise RuntimeError(f"With {case} you called fits() {_MOST_TRIALS} times: halve, and be done after a few.")
        ran[size] = 0 < size <= samples and fits(size)
        return ran[size]

    given = answer(lambda: found, trial, samples)
    said = f"With {case} (it said {found:,}, {samples:,} samples)"
    if isinstance(given, bool) or not isinstance(given, int) or given < 0:
        raise NotYet(f"{said} you returned {given!r:.80}: a batch size is a whole number, and 0 if nothing fits.")
    if given > samples:
        raise NotYet(f"{said} you returned {given:,}: a batch cannot hold more than there is.")
    if given and not ran.get(given, False):
        tried = f"`fits({given})` was False" if given in ran else f"you never called `fits({given})`"
        raise NotYet(f"{said} you returned {given:,}, and {tried}: return a size that has run.")
    most = min(samples, found)
    twice = max(1, 2 * given)
    if given < most and (fits(most) or (twice <= most and fits(twice))):
        start = "the answer" if found <= samples else "what the data set has"
        raise NotYet(f"{said} you returned {given:,}, and more fits: start at {start} and give up no more than needed.")


class _Memory:
    """Two real training steps on `size` rows, in a memory of `_LIMIT_BYTES`."""

    def __init__(self) -> None:
        self._rows = Rows(20_000)

    def fits(self, size: int) -> bool:
        model = _tunable_model()
        optimizer = torch.optim.Adam(model.parameters())
        memory = FinderMemory(_LIMIT_BYTES)
        memory.track(model)
        try:
            with memory:
                for _ in range(2):
                    rows, labels = self._rows.rows[:size], self._rows.labels[:size]
                    # What a loader hands over is new memory, and a slice is not.
                    loss = functional.cross_entropy(model(rows.clone()), labels.clone())
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
        except torch.OutOfMemoryError:
            return False
        return True


def _tunable_model() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.ReLU(), nn.Linear(FEATURES, 10))


class _Tunable(L.LightningModule):
    """What the finder needs: `batch_size`, and a loader that asks it."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 1024
        self.model, self.data = _tunable_model(), Rows(20_000)

    def train_dataloader(self) -> Any:
        return DataLoader(self.data, self.batch_size, collate_fn=as_is)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        rows, labels = batch
        return functional.cross_entropy(self.model(rows), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


def _planted_answer(folder: str) -> int:
    """What Lightning's finder says in the small memory."""
    tunable, memory = _Tunable(), FinderMemory(_LIMIT_BYTES)
    # The finder collects garbage before each size; what was there already need not be looked at again.
    gc.freeze()
    try:
        with memory:
            memory.track(tunable.model)
            found = Tuner(_plain_trainer(folder)).scale_batch_size(tunable, mode="power", init_val=1024)
    finally:
        gc.unfreeze()
    assert found is not None
    return int(found)


finder = Exercise(
    name="finder",
    hints=(
        "Where can the answer be wrong? It may be larger than the data set, and it may never have run.",
        "`size = min(find(), samples)`; as long as `size` is above 0 and `fits(size)` is not true, halve it with `//`.",
    ),
    reference=tested_batch_size,
    check_answer=_check_finder,
)

# --- trainer: measured against the one that does too much -----------------------------------------------------------

_FASTER = 1.5
_ROUNDS = 3
_ATTEMPTS = 2
_TRAINED = 40
_WANTED_ROWS = _TRAINED // 10
# Options that would make it another job, or that the check sets itself.
_SAME_JOB = {
    "max_epochs", "max_steps", "min_epochs", "min_steps", "max_time", "limit_train_batches", "overfit_batches",
    "fast_dev_run", "accumulate_grad_batches", "gradient_clip_val", "precision", "accelerator", "devices", "strategy",
    "default_root_dir", "plugins",
}  # fmt: skip


def heavy_options(folder: str | Path) -> dict[str, Any]:
    """The options of a Trainer that does too much in every step: exercise `trainer` starts from it."""
    return {
        "logger": CSVLogger(folder, flush_logs_every_n_steps=1),
        "log_every_n_steps": 1,
        "callbacks": [ModelCheckpoint(Path(folder) / "checkpoints", every_n_train_steps=1, save_top_k=-1)],
        "detect_anomaly": True,
        "profiler": "simple",
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }


def lean_options(folder: str | Path) -> dict[str, Any]:
    """Return the options of a Trainer for the same run that is 1.5 times as fast a step.

    It still logs at least every 10th step, and at the end there is a checkpoint of the last step, both in `folder`.
    """
    return {
        "logger": CSVLogger(folder),
        "log_every_n_steps": 10,
        "callbacks": [ModelCheckpoint(Path(folder) / "checkpoints")],
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }


def _check_trainer(answer: Answer) -> str:
    # One thread: the model is too small for two, which would wait for each other where the machine is busy.
    with _workplace() as folder, _one_thread():
        for attempt in range(1, _ATTEMPTS + 1):
            heavy, lean = _in_turn(answer, Path(folder) / str(attempt))
            told = f"A step takes {1e3 * heavy:.1f} ms with the heavy options, {1e3 * lean:.1f} ms with yours"
            if heavy >= _FASTER * lean:
                return f"{told}: {heavy / lean:.1f} times as fast, with a log and a checkpoint to resume from."
            if attempt == _ATTEMPTS:
                raise NotYet(
                    f"{told}: {heavy / lean:.2f} times as fast, and {_FASTER} are asked for. Which of them works in "
                    "every step, and which needs to?"
                )
    raise AssertionError("the last attempt returns or raises")


def _in_turn(answer: Answer, folder: Path) -> tuple[float, float]:
    """Seconds a step of the heavy options and of the learner's, the median of rounds that take turns."""
    seconds: dict[str, list[float]] = {"heavy": [], "lean": []}
    for number in range(_ROUNDS):
        heavy_folder, lean_folder = folder / f"heavy{number}", folder / f"lean{number}"
        options, run = answer(lean_folder), _Fit()
        _check_options(options)
        _as_learners(partial(_timed_fit, options, lean_folder, run))
        _check_kept(run, lean_folder)
        seconds["lean"].append(run.seconds)
        seconds["heavy"].append(_timed_fit(heavy_options(heavy_folder), heavy_folder).seconds)
    return statistics.median(seconds["heavy"]), statistics.median(seconds["lean"])


def _check_options(options: Any) -> None:
    if not isinstance(options, dict) or not all(isinstance(name, str) for name in options):
        raise NotYet(f"Return a dict of Trainer's options, such as {{'log_every_n_steps': 10}}, not {options!r:.80}.")
    if changed := sorted(_SAME_JOB & options.keys()):
        raise NotYet(f"{' and '.join(changed)} would change the job or is set already: leave it out.")


def _check_kept(run: _Fit, folder: Path) -> None:
    if run.steps != _TRAINED:
        raise NotYet(f"It trained {run.steps} steps, and the job has {_TRAINED}: what stopped it?")
    logged = [row for path in folder.rglob("metrics.csv") for row in _read(path) if row.get("train_loss")]
    if len(logged) < _WANTED_ROWS:
        raise NotYet(
            f"{len(logged)} losses are in the CSV log under `folder`, and {_WANTED_ROWS} of {_TRAINED} steps are asked "
            "for: keep the logger, and let it write every 10th step."
        )
    steps = [torch.load(path, weights_only=True)["global_step"] for path in folder.rglob("*.ckpt")]
    if _TRAINED not in steps:
        raise NotYet(
            f"No checkpoint of step {_TRAINED} lies under `folder` (found: {sorted(steps) or 'none'}): without one "
            "nothing can be resumed. One at the end is enough."
        )


def _read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


class _Fit(L.Callback):
    """Counts the optimizer steps of a fit and times them, from the end of the first to the end of the training."""

    def __init__(self) -> None:
        self.steps, self.seconds, self._start = 0, 0.0, 0.0

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.steps = trainer.global_step
        if self.steps == 1:
            self._start = time.perf_counter()

    def on_train_end(self, *_: Any) -> None:
        self.seconds = (time.perf_counter() - self._start) / (_TRAINED - 1)


class _Logging(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = _tunable_model()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        rows, labels = batch
        loss = functional.cross_entropy(self.model(rows), labels)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def _timed_fit(options: dict[str, Any], folder: Path, run: _Fit | None = None) -> _Fit:
    run = run or _Fit()
    callbacks = options.get("callbacks") or []
    callbacks = [*callbacks] if isinstance(callbacks, list | tuple) else [callbacks]
    trainer = _plain_trainer(
        str(folder),
        **{"enable_checkpointing": True, "logger": True, **options, "callbacks": [*callbacks, run]},
    )
    trainer.fit(_Logging(), DataLoader(Rows(_TRAINED * 4), 4, collate_fn=as_is))
    return run


trainer = Exercise(
    name="trainer",
    hints=(
        "A checkpoint and a line of a file in every step: how many of them does anybody read? And what is "
        "`detect_anomaly` for?",
        "Keep `CSVLogger(folder)` with `log_every_n_steps=10`, and `ModelCheckpoint(folder)`, which saves once an "
        "epoch; leave out `detect_anomaly` and `profiler`.",
    ),
    reference=lean_options,
    check_answer=_check_trainer,
)
