"""Lesson 06's helpers: the monitor in a Trainer, equal losses, the overhead, and resuming to the last bit."""

from __future__ import annotations

import csv
import importlib
import logging
import math
import pickle
import random
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L  # noqa: N812
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.profilers import SimpleProfiler
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from course_utils import lightning_overhead, lightning_run, lightning_tools
from course_utils.lightning_measurement import Window
from course_utils.lightning_monitor import count_samples
from course_utils.lightning_overhead import BARE, RAW, Overhead
from course_utils.lightning_run import Run
from course_utils.lightning_tools import (
    FinderMemory,
    LossRecorder,
    MonitorCallback,
    RandomState,
    ResumableLoader,
    Rows,
    compare_losses,
    overhead_per_step,
    quiet,
    quieted,
)
from course_utils.monitor import Device, Reading
from course_utils.timing import Timing


@pytest.fixture(autouse=True)
def silence() -> Iterator[None]:
    with quieted():
        yield


def dataset(samples: int = 26) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, 6, generator=generator)
    return TensorDataset(inputs, torch.randint(3, (samples,), generator=generator), torch.arange(samples))


class Module(L.LightningModule):
    """A model with BatchNorm and dropout, random augmentation from three generators, and a schedule by step."""

    def __init__(self, *, logs: bool = False) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.3), nn.Linear(5, 3))
        self.logs, self.seen = logs, []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        inputs, targets, numbers = batch.values() if isinstance(batch, dict) else batch
        self.seen.append((self.current_epoch, batch_idx, numbers.tolist()))
        loss = functional.cross_entropy(self.model(augmented(inputs)), targets)
        if self.logs:
            self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def augmented(inputs: torch.Tensor) -> torch.Tensor:
    return inputs + 0.1 * torch.randn_like(inputs) + random.random() + np.random.rand()


def seeded(module: Any = Module, **options: Any) -> Any:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    return module(**options)


def trainer(folder: Path, *callbacks: L.Callback, **options: Any) -> L.Trainer:
    settings = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": any(isinstance(one, ModelCheckpoint) for one in callbacks),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
        "callbacks": list(callbacks),
        "max_epochs": 1,
    }
    return L.Trainer(**{**settings, **options})


# --- importing, and silence -----------------------------------------------------------------------------------------


def test_without_lightning_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightning", None)
    monkeypatch.delitem(sys.modules, "course_utils.lightning_tools")
    with pytest.raises(ModuleNotFoundError, match="Lesson 06 needs Lightning: run the setup cell") as caught:
        importlib.import_module("course_utils.lightning_tools")
    assert caught.value.name == "lightning" and "\n" not in str(caught.value)


def test_a_quiet_fit_says_nothing_and_quieted_puts_all_back(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    logger, before = logging.getLogger("lightning.pytorch"), list(warnings.filters)
    level = logger.level
    with quieted():
        with warnings.catch_warnings(record=True) as caught:
            quiet()
            trainer(tmp_path, MonitorCallback()).fit(Module(), DataLoader(dataset(), 8, shuffle=True))
        assert [str(one.message) for one in caught] == []
        logger.warning("a warning that means something")
    assert capfd.readouterr().out == ""
    assert [record.message for record in caplog.records] == ["a warning that means something"]
    assert logger.level == level and warnings.filters == before


# --- equal losses ---------------------------------------------------------------------------------------------------


def raw_losses(module: Module, loader: Any, epochs: int = 1, accumulate: int = 1, max_norm: float | None = None) -> Any:
    """What Trainer does, written out; a short last group is divided by the full number all the same."""
    (optimizer,), (schedule,) = module.configure_optimizers()
    losses = []
    for _ in range(epochs):
        for number, (inputs, targets, _) in enumerate(loader, 1):
            loss = functional.cross_entropy(module.model(augmented(inputs)), targets)
            losses.append(loss.item())
            (loss / accumulate).backward()
            if number % accumulate and number < len(loader):
                continue
            if max_norm:
                nn.utils.clip_grad_norm_(module.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
            schedule["scheduler"].step()
    return losses


@pytest.mark.parametrize(("accumulate", "max_norm"), [(1, None), (1, 0.1), (2, None), (3, 0.1)])
def test_the_raw_loop_and_trainer_give_the_same_losses_and_weights(
    tmp_path: Path, accumulate: int, max_norm: float | None
) -> None:
    def loader() -> Any:
        return DataLoader(dataset(), 8, shuffle=True, generator=torch.Generator().manual_seed(0))

    raw = seeded()
    losses = raw_losses(raw, loader(), 2, accumulate, max_norm)  # 4 batches an epoch, the last one short
    module, recorder = seeded(), LossRecorder()
    options = {"accumulate_grad_batches": accumulate, "gradient_clip_val": max_norm, "max_epochs": 2}
    trainer(tmp_path, recorder, **options).fit(module, loader())
    compared = compare_losses(losses, recorder.losses, rtol=1e-6)
    assert compared.within, compared
    assert all(torch.allclose(a, b, rtol=1e-5) for a, b in zip(raw.parameters(), module.parameters(), strict=True))
    if accumulate == 1:
        assert compared.equal


def test_a_comparison_finds_the_largest_difference_and_says_so() -> None:
    same = compare_losses([2.0, 1.0], torch.tensor([2.0, 1.0]))
    assert same.equal and same.within and "equal, to the last bit" in repr(same)
    near = compare_losses([2.0, 1.0, 4.0], [2.0, 1.001, 4.002], rtol=1e-2)
    assert near.within and not near.equal and near.largest_at == 1
    assert near.largest_difference == pytest.approx(1e-3)
    far = compare_losses([2.0, 1.0, 4.0], [2.0, 1.001, 4.002], rtol=1e-4)
    assert not far.within and "more than the tolerance of 1e-04" in far.verdict
    assert compare_losses([1.0] * 20, [1.0] * 20)._repr_html_().count("<tr>") == 8  # a header, 3, …, 3
    alt = far.draw().alt
    assert "at step 1" in alt


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_never_within(bad: float) -> None:
    assert compare_losses([1.0, bad], [1.0, 1.0]).largest_difference == math.inf
    assert not compare_losses([1.0, 1.0], [1.0, bad], rtol=1e30).within


def test_losses_that_cannot_be_compared_are_refused() -> None:
    with pytest.raises(ValueError, match="gave 2 losses and Trainer 1"):
        compare_losses([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="gave 0 losses"):
        compare_losses([], [])
    with pytest.raises(ValueError, match="rtol"):
        compare_losses([1.0], [1.0], rtol=math.nan)


def test_the_recorder_begins_anew_with_each_fit(tmp_path: Path) -> None:
    recorder = LossRecorder()
    assert recorder.losses == []
    for _ in range(2):
        trainer(tmp_path, recorder, accumulate_grad_batches=2).fit(Module(), DataLoader(dataset(), 8))
    assert len(recorder.losses) == 4


# --- what the lesson says of Trainer --------------------------------------------------------------------------------


class OneWeight(L.LightningModule):
    """A weight whose gradient is always 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return 1.0 * self.weight

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def test_a_short_last_group_is_divided_by_the_full_number(tmp_path: Path) -> None:
    module = OneWeight()
    trainer(tmp_path, accumulate_grad_batches=4).fit(module, DataLoader(range(10)))
    assert module.weight.item() == -2.5  # and not -3: groups of 4, 4 and 2


def test_a_skipped_float16_step_moves_the_schedule_all_the_same(tmp_path: Path) -> None:
    seen = []

    class Overflows(OneWeight):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            seen.append((self.weight.item(), self.optimizers().param_groups[0]["lr"]))
            return self.weight * (1e36 if batch_idx == 1 else 1.0)

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    half = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
    trainer(tmp_path, plugins=[half]).fit(Overflows(), DataLoader(range(4)))
    assert seen == [(0.0, 1.0), (-1.0, 0.5), (-1.0, 0.25), (-1.25, 0.125)]


def test_fit_refuses_a_checkpoint_that_would_run_code(tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "ran",)

    torch.save({"state_dict": Hostile()}, tmp_path / "hostile.ckpt")
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        trainer(tmp_path).fit(OneWeight(), DataLoader(range(2)), ckpt_path=tmp_path / "hostile.ckpt")
    assert not (tmp_path / "ran").exists()


# --- the monitor ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (torch.zeros(5, 3), 5),
        (torch.tensor(1.0), 1),
        ([torch.zeros(5, 3), torch.zeros(5)], 5),
        ((torch.zeros(7, 3), torch.zeros(7)), 7),
        ({"inputs": torch.zeros(4, 3), "labels": torch.zeros(4)}, 4),
        (([torch.zeros(3, 9, 9), torch.zeros(3, 8, 8)], [0, 1]), 2),
        (({"tokens": torch.zeros(6, 9)}, torch.zeros(6)), 6),
        (["one text", "two texts", "three"], 3),
        ([], 0),
    ],
    ids=["tensor", "number", "list", "tuple", "dict", "images of several sizes", "dict in a tuple", "texts", "empty"],
)
def test_samples_are_counted_truly(batch: Any, samples: int) -> None:
    assert count_samples(batch) == samples


def test_a_batch_that_cannot_be_counted_names_the_cure() -> None:
    with pytest.raises(TypeError, match=r"in a object: give MonitorCallback\(count=...\)"):
        count_samples(object())


@pytest.mark.parametrize("as_dict", [False, True], ids=["tuples", "dicts"])
def test_a_fit_is_counted_with_its_short_batches_and_its_accumulation(tmp_path: Path, as_dict: bool) -> None:
    def as_batch(samples: list[Any]) -> Any:
        batch = tuple(map(torch.stack, zip(*samples, strict=True)))
        return dict(zip(("inputs", "targets", "numbers"), batch, strict=True)) if as_dict else batch

    monitor = MonitorCallback(warmup_batches=1)
    loader = DataLoader(dataset(26), 8, collate_fn=as_batch)  # 8, 8, 8, 2
    trainer(tmp_path, monitor, max_epochs=2, accumulate_grad_batches=2).fit(Module(), loader)
    measured = monitor.measurement
    assert (measured.samples, measured.batches, measured.warmup_batches) == (2 * 26 - 8, 7, 1)
    assert measured.optimizer_steps == 4  # the first measured batch ends the step that the warm-up began
    assert measured.seconds > 0 and measured.data_wait_s is not None
    assert 0 < measured.data_wait_s < measured.seconds
    assert measured.peak_memory_bytes and measured.peak_memory_bytes > 2**20
    assert measured.device == "CPU" and measured.notes == ()
    row = measured.as_row(6, "lightning")
    assert row.samples_per_s == measured.samples_per_s and row.peak_memory_bytes == measured.peak_memory_bytes
    assert "44 samples in 7 batches" in repr(measured) and "44 samples" in measured._repr_html_()


def test_the_wait_for_data_is_told_from_the_work(tmp_path: Path) -> None:
    class Slow(TensorDataset):
        delay_s = 0.01

        def __getitems__(self, indices: list[int]) -> Any:
            time.sleep(self.delay_s)
            return [self[index] for index in indices]

    class SlowStep(Module):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            time.sleep(0.03)
            return super().training_step(batch, batch_idx)

    shares = {}
    for name, module, delay_s in (("data", Module(), 0.03), ("work", SlowStep(), 0.0)):
        slow, monitor = Slow(*dataset(48).tensors), MonitorCallback()
        slow.delay_s = delay_s
        trainer(tmp_path, monitor).fit(module, DataLoader(slow, 8))
        shares[name] = monitor.measurement.data_wait_percent
        if name == "data":  # each measured batch was asked for after the clock had started
            assert monitor.measurement.data_wait_s >= 4 * delay_s
    assert shares["data"] > 1.5 * shares["work"], shares


def test_validation_is_left_out_of_the_throughput(tmp_path: Path) -> None:
    class SlowValidation(Module):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            time.sleep(0.15)

    monitor = MonitorCallback(warmup_batches=0)
    started = time.perf_counter()
    options = {"val_check_interval": 2, "max_epochs": 2}
    trainer(tmp_path, monitor, **options).fit(SlowValidation(), DataLoader(dataset(), 8), DataLoader(dataset(4), 4))
    whole_s = time.perf_counter() - started
    # Four validations of 0.15 s; the last comes after the last batch, where no clock runs.
    assert monitor.measurement.batches == 8 and monitor.measurement.seconds < whole_s - 4 * 0.15


def rows_of(folder: Path) -> list[dict[str, str]]:
    (path,) = folder.rglob("metrics.csv")
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_values_reach_every_logger_at_the_trainers_pace(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monitor = MonitorCallback(warmup_batches=0)
    loggers = [CSVLogger(tmp_path / "csv"), TensorBoardLogger(tmp_path / "board")]
    options = {"logger": loggers, "log_every_n_steps": 2, "max_epochs": 2}
    trainer(tmp_path, monitor, **options).fit(Module(logs=True), DataLoader(dataset(), 8))
    ours = [row for row in rows_of(tmp_path / "csv") if row["monitor/samples_per_s"]]
    losses = [row["step"] for row in rows_of(tmp_path / "csv") if row["train_loss"]]
    assert [row["step"] for row in ours] == losses == ["1", "3", "5", "7"]
    assert all(float(row["monitor/samples_per_s"]) > 0 for row in ours)
    assert all(0 <= float(row["monitor/data_wait_percent"]) <= 100 for row in ours)
    assert all(float(row["monitor/peak_memory_bytes"]) > 2**20 for row in ours)
    board = EventAccumulator(loggers[1].log_dir)
    board.Reload()
    assert [event.step for event in board.Scalars("monitor/samples_per_s")] == [1, 3, 5, 7]
    assert len(monitor._last().windows) == 4


def test_its_own_pace_and_accumulation_log_once_a_step(tmp_path: Path) -> None:
    monitor = MonitorCallback(every_n_steps=1, warmup_batches=0)
    options = {"logger": CSVLogger(tmp_path), "log_every_n_steps": 4, "accumulate_grad_batches": 2, "max_epochs": 2}
    trainer(tmp_path, monitor, **options).fit(Module(), DataLoader(dataset(), 8))
    assert [row["step"] for row in rows_of(tmp_path)] == ["0", "1", "2", "3"]


def test_without_a_logger_it_still_measures_and_draws(tmp_path: Path) -> None:
    monitor = MonitorCallback(every_n_steps=1)
    trainer(tmp_path, monitor).fit(Module(), DataLoader(dataset(60), 8))
    figure = monitor.draw()
    assert len(figure.axes) == 3 and "A training run of" in figure.alt and "waiting for data" in figure.alt
    assert monitor.trace.samples and "samples/s" in figure.alt
    from course_utils import plots

    assert plots.render(figure).png.startswith(b"\x89PNG")


def test_a_run_that_is_all_warm_up_says_so(tmp_path: Path) -> None:
    monitor = MonitorCallback(warmup_batches=10)
    with pytest.raises(RuntimeError, match="has watched no training yet"):
        _ = monitor.measurement
    trainer(tmp_path, monitor).fit(Module(), DataLoader(dataset(), 8))
    with pytest.raises(RuntimeError, match="the run had 4 batches, and the first 10 are warm-up"):
        _ = monitor.measurement
    assert len(monitor.draw().axes) >= 1  # the trace is there


@pytest.mark.parametrize("bad", [{"every_n_steps": 0}, {"warmup_batches": -1}, {"every_n_steps": 1.5}])
def test_bad_settings_are_refused_at_once(bad: Any) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        MonitorCallback(**bad)


class Stop(L.Callback):
    """Ends a run at the n-th batch: an error of the learner's, or an interrupt."""

    def __init__(self, at: int, error: BaseException, hook: str = "on_train_batch_start") -> None:
        self.left, self.error = at, error
        setattr(self, hook, self._hook)

    def _hook(self, *_: Any, **__: Any) -> None:
        self.left -= 1
        if not self.left:
            raise self.error


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_an_interrupted_fit_leaves_no_thread_and_keeps_what_it_has(
    tmp_path: Path, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    import signal

    monkeypatch.setattr(signal, "signal", lambda *_: None)  # Lightning ignores SIGINT from an interrupt on
    monitor, profiler = MonitorCallback(warmup_batches=1), SimpleProfiler()
    threads = set(threading.enumerate())
    with pytest.raises((ValueError, SystemExit)):
        trainer(tmp_path, monitor, Stop(4, error), profiler=profiler).fit(Module(), DataLoader(dataset(), 8))
    assert set(threading.enumerate()) <= threads
    assert not {"start", "stop"} & vars(profiler).keys()  # nothing listens any more
    assert monitor.measurement.batches == 2
    assert monitor.measurement.notes == (f"ended by {type(error).__name__}",)
    assert "ended by" in repr(monitor.measurement)


def test_one_callback_watches_one_fit_after_the_other(tmp_path: Path) -> None:
    monitor = MonitorCallback(warmup_batches=0)
    for samples in (26, 8):
        trainer(tmp_path, monitor).fit(Module(), DataLoader(dataset(samples), 8))
    assert monitor.measurement.samples == 8


def test_the_profiler_of_the_learner_still_records(tmp_path: Path) -> None:
    profiler = SimpleProfiler()
    trainer(tmp_path, MonitorCallback(), profiler=profiler).fit(Module(), DataLoader(dataset(), 8))
    fetched = [key for key in profiler.recorded_durations if key.endswith("train_dataloader_next")]
    assert len(fetched) == 1 and len(profiler.recorded_durations[fetched[0]]) == 4
    assert not profiler.current_actions


def test_a_lightning_that_does_not_tell_of_fetches_gives_no_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lightning_run, "_FETCH", ".renamed")
    monitor = MonitorCallback(every_n_steps=1)
    trainer(tmp_path, monitor).fit(Module(), DataLoader(dataset(48), 8))
    measured = monitor.measurement
    assert measured.data_wait_s is None and measured.data_wait_percent is None and measured.batches == 4
    assert "the wait is not known" in measured.notes[0]
    assert "monitor/data_wait_percent" not in monitor._last().windows[0].as_metrics()
    assert len(monitor.draw().axes) == 2


def test_missing_values_are_left_out_of_the_log() -> None:
    window = Window(0.0, 1.0, 3, 100.0, None, None, None)
    assert window.as_metrics() == {"monitor/samples_per_s": 100.0}


class FakeGpu:
    """torch.cuda with a clock of its own, which lags behind: work is done when somebody waits for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = self.reached_s = 0.0
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                self.at_s = math.nan

            def record(self, stream: Any) -> None:
                self.at_s = gpu.now_s

            def query(self) -> bool:
                return self.at_s <= gpu.reached_s

            def elapsed_time(self, later: Any) -> float:
                assert later.query()
                return 1000 * (later.at_s - self.at_s)

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 123)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Fake T4")
        monkeypatch.setattr(lightning_run, "synchronize", self.catch_up)

        class Backend:
            source, label, min_interval_s, notes = "NVML", "GPU", 0.0, ()
            devices = (Device("Fake T4", 0, 0),)

            def read(self) -> list[Reading]:
                return [Reading(busy_percent=50.0)]

            def close(self) -> None:
                pass

        real = lightning_run.Monitor
        monkeypatch.setattr(lightning_run, "Monitor", lambda device: real(0.05, Backend(), device=device))

    def catch_up(self, device: Any) -> None:
        self.reached_s = self.now_s


def test_on_a_gpu_events_measure_and_no_batch_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch)
    run = Run(torch.device("cuda:0"), 1, 0)
    profiler = SimpleProfiler()
    run.listen(profiler)
    for step in range(1, 6):
        with profiler.profile("[loop].train_dataloader_next"):
            gpu.now_s += 0.25
        gpu.now_s += 0.75
        if step == 2:
            reached_s = gpu.reached_s
        run.batch_done(8, step)
    assert gpu.reached_s == reached_s == 1.0  # only the start of measuring waited for the GPU
    window = run.window()
    assert window is not None and window.data_wait_percent == 0  # the GPU has not come so far
    run.end()
    measured = run.measurement()
    assert (measured.samples, measured.batches, measured.optimizer_steps) == (32, 4, 4)
    assert measured.seconds == pytest.approx(4.0) and measured.data_wait_percent == pytest.approx(25.0)
    assert (measured.device, measured.peak_memory_bytes) == ("Fake T4", 123)
    assert measured.memory_source == "tensors on the GPU"


# --- the overhead ---------------------------------------------------------------------------------------------------


def test_extra_seconds_are_the_median_of_paired_rounds() -> None:
    def timing(*seconds: float) -> Timing:
        return Timing(seconds, "cpu", "perf_counter")

    # The machine was slow in the second round, for both.
    overhead = Overhead({RAW: timing(1.0, 5.0, 1.0), BARE: timing(1.5, 5.5, 1.5)}, 10, "versions")
    assert overhead.extra_s() == pytest.approx(0.5) and overhead.noise_s() == pytest.approx(0)
    assert overhead.share(2.0) == pytest.approx(0.25)
    assert "+500,000 µs" in repr(overhead) and "3 rounds of 10 steps" in overhead._repr_html_()
    assert "Trainer 1,500,000 µs a step" in overhead.draw().alt
    with pytest.raises(KeyError, match="'other'"):
        overhead.extra_s("other")
    with pytest.raises(ValueError, match="step_s"):
        overhead.share(0.0)


@pytest.mark.alone
def test_trainer_costs_more_than_the_raw_loop_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    state = torch.get_rng_state()
    overhead = overhead_per_step(steps=20, rounds=3, progress=False)
    assert torch.equal(torch.get_rng_state(), state)
    assert list(tmp_path.iterdir()) == [] and capfd.readouterr() == ("", "")
    assert [timing.repeats for timing in overhead.variants.values()] == [3] * 5
    assert "+ MonitorCallback" in repr(overhead)
    assert overhead.extra_s() > 0, overhead


def test_a_budget_ends_the_rounds_but_not_before_the_third(monkeypatch: pytest.MonkeyPatch) -> None:
    variants = lightning_overhead._variants()
    monkeypatch.setattr(lightning_overhead, "_variants", lambda: {RAW: variants[RAW]})
    overhead = overhead_per_step(steps=2, rounds=50, budget_s=1e-9, progress=False)
    assert overhead.variants[RAW].repeats == 3
    with pytest.raises(ValueError, match="rounds"):
        overhead_per_step(rounds=0)


# --- resuming -------------------------------------------------------------------------------------------------------

SAMPLES, BATCH, EPOCHS = 18, 4, 2  # 5 batches an epoch, the last one short


def fit(
    folder: Path, loader: Any, *callbacks: L.Callback, every: int = 2, resume: Any = None, **options: Any
) -> tuple[Module, L.Trainer]:
    """One process's part of a run: everything new, other random states unless it is the start."""
    module = seeded()
    if resume is not None:
        torch.manual_seed(99)
        random.seed(99)
        np.random.seed(99)
    checkpoint = ModelCheckpoint(folder, every_n_train_steps=every, save_last=True)
    one = trainer(folder, *callbacks, checkpoint, **{"max_epochs": EPOCHS, **options})
    try:
        one.fit(module, loader, ckpt_path=resume)
    except ValueError as error:
        assert str(error) == "stop"
    return module, one


def resumable(**options: Any) -> ResumableLoader:
    return ResumableLoader(dataset(SAMPLES), BATCH, seed=3, **options)


def same_state(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


@pytest.mark.parametrize(
    ("every", "stops", "options", "hook"),
    [
        (1, (2, 5, 6, 7, 10), {}, "on_train_batch_start"),  # batch 6 begins the second epoch
        (2, (5, 9), {}, "on_before_zero_grad"),
        (1, (6, 8), {"accumulate_grad_batches": 2}, "on_before_backward"),
        (2, (4, 8), {"max_epochs": -1, "max_steps": 9}, "on_before_optimizer_step"),
    ],
    ids=["every step", "every second step", "accumulated", "by steps"],
)
def test_a_resumed_run_ends_with_the_very_same_weights(
    tmp_path: Path, every: int, stops: tuple[int, ...], options: Any, hook: str
) -> None:
    whole, whole_trainer = fit(tmp_path / "whole", resumable(), RandomState(), every=every, **options)
    assert len(whole.seen) >= 9
    for stop in stops:
        folder = tmp_path / str(stop)
        fit(folder, resumable(), RandomState(), Stop(stop, ValueError("stop"), hook), every=every, **options)
        resumed, resumed_trainer = fit(folder, resumable(), RandomState(), every=every, resume="last", **options)
        assert same_state(whole, resumed), f"interrupted at batch {stop}"
        assert resumed_trainer.global_step == whole_trainer.global_step
        assert resumed.seen == whole.seen[-len(resumed.seen) :]
        assert len(resumed.seen) < len(whole.seen)  # it did not begin anew


def test_without_the_random_states_the_end_is_another(tmp_path: Path) -> None:
    whole, _ = fit(tmp_path / "whole", resumable())
    fit(tmp_path / "part", resumable(), Stop(6, ValueError("stop")))
    resumed, _ = fit(tmp_path / "part", resumable(), resume="last")
    assert resumed.seen == whole.seen[4:] and not same_state(whole, resumed)


def test_with_a_plain_loader_lightning_warns_and_repeats_samples(tmp_path: Path) -> None:
    def plain() -> Any:
        return DataLoader(dataset(SAMPLES), BATCH, shuffle=True, generator=torch.Generator().manual_seed(0))

    part, _ = fit(tmp_path, plain(), RandomState(), Stop(4, ValueError("stop")))
    with pytest.warns(UserWarning, match="dataloader is not resumable"):
        resumed, _ = fit(tmp_path, plain(), RandomState(), resume="last", max_epochs=1)
    epoch = [
        *chain.from_iterable(numbers for *_, numbers in part.seen[:2] + resumed.seen)
    ]  # two steps are in the checkpoint
    assert len(resumed.seen) == 3 and len(epoch) > len(set(epoch))


def test_a_checkpoint_holds_nothing_that_needs_pickle(tmp_path: Path) -> None:
    fit(tmp_path, resumable(), RandomState(), Stop(4, ValueError("stop")))
    loaded = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert loaded["loops"]["fit_loop"]["state_dict"]["combined_loader"] == [{"epoch": 0, "batch": 2}]
    assert set(loaded["callbacks"]["RandomState"]) == {"python", "numpy", "torch", "cuda"}


def numbers(loader: Any) -> list[list[int]]:
    return [batch[-1].tolist() for batch in loader]


def test_the_order_depends_on_the_seed_and_the_epoch_alone() -> None:
    loader, again = resumable(), resumable()
    first, second = numbers(loader), numbers(loader)
    assert first != second and sorted(chain(*first)) == sorted(chain(*second)) == list(range(SAMPLES))
    torch.manual_seed(5)
    state = torch.get_rng_state()
    assert [numbers(again), numbers(again)] == [first, second]
    assert torch.equal(torch.get_rng_state(), state)  # and it draws nothing from torch's own generator
    assert numbers(ResumableLoader(dataset(SAMPLES), BATCH, seed=4)) != first
    again.sampler.set_epoch(0)
    assert numbers(again) == first


def test_a_place_is_saved_and_gone_on_from_without_loading_what_lies_before() -> None:
    class Counted(TensorDataset):
        read = 0

        def __getitem__(self, index: int) -> Any:
            self.read += 1
            return super().__getitem__(index)

    loader = resumable()
    expected = [numbers(resumable()), *(lambda one: [numbers(one), numbers(one)])(resumable())][1:]
    batches = iter(loader)
    next(batches), next(batches)
    state = loader.state_dict()
    assert state == {"epoch": 0, "batch": 2}
    data = Counted(*dataset(SAMPLES).tensors)
    other = ResumableLoader(data, BATCH, seed=3)
    other.load_state_dict(state)
    assert other.state_dict() == state
    assert numbers(other) == expected[0][2:] and data.read == SAMPLES - 2 * BATCH
    assert other.state_dict() == {"epoch": 1, "batch": 0} and numbers(other) == expected[1]


def test_a_place_after_the_last_batch_is_the_next_epochs_start() -> None:
    loader = resumable()
    numbers(loader)
    second = numbers(loader)
    loader.load_state_dict({"epoch": 0, "batch": len(loader)})
    assert numbers(loader) == second


def test_an_epoch_left_early_begins_again_and_another_epoch_forgets_the_place() -> None:
    loader = resumable()
    first = numbers(resumable())
    for _ in loader:
        break
    assert numbers(loader) == first
    loader.load_state_dict({"epoch": 1, "batch": 3})
    loader.sampler.set_epoch(0)  # as Trainer does when the epoch of the checkpoint was over
    assert numbers(loader) == first


def test_lengths_workers_and_options_are_the_data_loaders() -> None:
    assert len(resumable()) == 5 and len(resumable(drop_last=True)) == 4 == len(numbers(resumable(drop_last=True)))
    assert numbers(resumable(shuffle=False))[0] == [0, 1, 2, 3]
    assert numbers(resumable(num_workers=1)) == numbers(resumable())


@pytest.mark.parametrize("name", ["sampler", "batch_sampler", "generator", "persistent_workers"])
def test_what_it_does_itself_cannot_be_given(name: str) -> None:
    with pytest.raises(ValueError, match=f"Leave {name} out"):
        resumable(**{name: None})


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"epoch": 0, "batch": 6}, "after batch 6, and an epoch has 5 here"),
        ({"epoch": 0}, "no place of a ResumableLoader"),
        ([1], "no place of a ResumableLoader"),
        ({"epoch": -1, "batch": 0}, "epoch=-1"),
        ({"epoch": 0, "batch": "1"}, "batch='1'"),
    ],
    ids=["too far", "incomplete", "no mapping", "negative", "text"],
)
def test_a_place_that_cannot_be_is_refused(state: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        resumable().load_state_dict(state)


def test_a_data_set_needs_a_length() -> None:
    with pytest.raises(TypeError, match="generator has no length"):
        ResumableLoader((number for number in range(3)), 2)
    with pytest.raises(ValueError, match="batch_size"):
        ResumableLoader(dataset(), 0)


def test_the_random_states_of_a_gpu_are_put_back_where_it_has_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    put: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: [torch.tensor([7])])
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", put.append)
    state = RandomState().state_dict()
    for gpus in (1, 2):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        callback = RandomState()
        callback.load_state_dict(state)
        callback.on_train_start(SimpleNamespace(), SimpleNamespace())
        callback.on_train_start(SimpleNamespace(), SimpleNamespace())  # a second fit keeps its own numbers
    assert put == [[torch.tensor([7])]]


# --- the finder's memory --------------------------------------------------------------------------------------------


def test_the_finders_memory_speaks_the_words_that_lightning_knows() -> None:
    from lightning.pytorch.utilities.memory import is_oom_error

    memory = FinderMemory(1000)
    with memory, pytest.raises(torch.OutOfMemoryError) as caught:
        torch.zeros(1000)
    assert is_oom_error(caught.value) and "CUDA out of memory" in str(caught.value)
    assert memory.used_bytes == 0


def test_rows_come_as_batches_and_one_by_one() -> None:
    rows = Rows(20)
    inputs, labels = rows.__getitems__([3, 5])
    assert inputs.shape == (2, 64) and torch.equal(inputs[0], rows[3][0]) and labels[1] == rows[5][1]
    assert len(rows) == 20 and torch.equal(Rows(20).rows, rows.rows)
    with pytest.raises(ValueError, match="samples=0"):
        Rows(0)


def test_everything_a_lesson_needs_is_in_one_module() -> None:
    assert all(hasattr(lightning_tools, name) for name in lightning_tools.__all__)
