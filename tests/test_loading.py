"""The wait for data on a CPU and on a GPU (fake clocks), the ceiling, epochs; keywords and needs of loaders."""

import multiprocessing
import os
import signal
import time
import warnings
from collections import namedtuple
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fake_loaders import Clock, FakeGpu, FakeLoader
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from course_utils import loader_feed, loader_needs, loader_run, loading
from course_utils.loader_feed import Feed, batch_samples
from course_utils.loading import (
    DataWait,
    LoaderFailed,
    StepTime,
    data_wait,
    loader_keywords,
    worker_counts,
)
from course_utils.loading import loader_needs as needs_of

MIB = 2**20


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def measured(step, loader, **keywords):
    keywords = {"device": "cpu", "budget_s": 2.0, **keywords}
    return data_wait(step, loader, progress=False, **keywords)


# --- the wait, on a CPU ---------------------------------------------------------------------------------------------


def test_on_a_cpu_the_wait_is_the_time_in_next(clock):
    wait = measured(lambda batch: clock.sleep(0.03), FakeLoader(clock, lambda _: 0.01))
    assert wait.wait_percent == pytest.approx(25)
    assert wait.samples_per_s == pytest.approx(8 / 0.04)
    assert wait.ceiling_samples_per_s == pytest.approx(8 / 0.03)
    assert wait.wait_s == pytest.approx(0.01 * wait.steps) and wait.busy_s == pytest.approx(0.03 * wait.steps)
    assert wait.samples == 8 * wait.steps > 100
    assert wait.first_batch_s == pytest.approx(0.01)
    assert wait.loader_is_bottleneck
    assert "waits for data 25 % of the time" in wait.verdict and "1.3 times as fast" in wait.verdict


def test_within_5_percent_of_the_ceiling_the_loader_is_not_the_bottleneck(clock):
    near = measured(lambda batch: clock.sleep(0.096), FakeLoader(clock, lambda _: 0.004))
    assert near.ceiling_percent == pytest.approx(96) and not near.loader_is_bottleneck
    assert "within 5 % of the ceiling, the loader is not the bottleneck." in near.verdict
    below = measured(lambda batch: clock.sleep(0.094), FakeLoader(clock, lambda _: 0.006))
    assert below.ceiling_percent == pytest.approx(94) and below.loader_is_bottleneck


def test_a_step_that_is_slower_beside_the_loader_is_told_from_one_that_waits(clock):
    loader = FakeLoader(clock, lambda _: 0.01, num_workers=2)
    running = []

    def step(batch):
        running.append(loader.epochs)
        clock.sleep(0.03 if len(running) < 40 else 0.02)  # the workers, gone after 40 steps, took the CPU

    wait = measured(step, loader, steps=34)
    assert wait.wait_percent < 5 and wait.loader_is_bottleneck
    assert "hardly waits" in wait.verdict


def test_the_budget_is_shared_and_the_steps_are_bounded(clock):
    begun = clock.now_s
    measured(lambda batch: clock.sleep(0.03), FakeLoader(clock, lambda _: 0.01), budget_s=4)
    assert clock.now_s - begun == pytest.approx(4, abs=0.15)
    assert measured(lambda batch: clock.sleep(0.03), FakeLoader(clock, lambda _: 0.01), steps=5).steps == 5


# --- the wait, on a GPU ---------------------------------------------------------------------------------------------


def test_on_a_gpu_the_wait_begins_when_the_queued_work_is_done(clock, monkeypatch):
    """Without the wait for the device before next(), the step would seem to take no time: 100 % waiting."""
    gpu = FakeGpu(clock, monkeypatch)
    wait = measured(lambda batch: gpu.queue(0.03), FakeLoader(clock, lambda _: 0.01), device="cuda")
    assert wait.wait_percent == pytest.approx(25)
    assert wait.device == "cuda"


def test_on_a_gpu_the_rate_lets_work_and_loading_overlap(clock, monkeypatch):
    gpu = FakeGpu(clock, monkeypatch)
    wait = measured(lambda batch: gpu.queue(0.03), FakeLoader(clock, lambda _: 0.01), device="cuda")
    assert wait.samples_per_s == pytest.approx(8 / 0.03, rel=0.03)  # not 8 / 0.04
    assert wait.ceiling_samples_per_s == pytest.approx(8 / 0.03, rel=0.01)  # not infinite: the queue is waited for
    assert not wait.loader_is_bottleneck and "hidden behind the GPU's" in wait.verdict
    starved = measured(lambda batch: gpu.queue(0.01), FakeLoader(clock, lambda _: 0.03), device="cuda")
    assert starved.samples_per_s == pytest.approx(8 / 0.03, rel=0.03) and starved.loader_is_bottleneck


def test_a_gpu_that_is_far_behind_cannot_break_the_budget(clock, monkeypatch):
    gpu = FakeGpu(clock, monkeypatch)
    begun = clock.now_s
    measured(lambda batch: gpu.queue(0.03), FakeLoader(clock, lambda _: 0.0001), device="cuda", budget_s=3)
    assert clock.now_s - begun < 3.6 and gpu.deepest < 0.2


def test_the_device_is_found_after_the_first_step(clock, monkeypatch):
    gpu = FakeGpu(clock, monkeypatch)
    started = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: bool(started))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(loading, "rng_preserved", nullcontext)

    def step(batch):
        started.append(True)
        gpu.queue(0.03)

    wait = measured(step, FakeLoader(clock, lambda _: 0.01), device=None)
    assert wait.device == "cuda:0" and wait.wait_percent == pytest.approx(25)
    assert measured(lambda batch: None, [torch.zeros(2, 1)] * 5, steps=2).device == "cpu"


def test_a_gpu_that_is_not_there_is_a_sentence():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ValueError, match="no usable GPU"):
        measured(lambda batch: None, [torch.zeros(1)] * 3, device="cuda")


# --- epochs ---------------------------------------------------------------------------------------------------------


def test_the_start_of_an_epoch_is_counted_apart(clock):
    """Case DL-07: 20 batches an epoch, and 0.5 s to start it."""

    class Slow(FakeLoader):
        def __iter__(self):
            self.clock.sleep(0.5)
            return super().__iter__()

    wait = measured(lambda batch: clock.sleep(0.03), Slow(clock, lambda _: 0.01, batches=20), budget_s=10)
    assert wait.first_batch_s == pytest.approx(0.51)
    assert len(wait.epoch_starts_s) >= 3
    assert wait.epoch_starts_s == pytest.approx([0.51] * len(wait.epoch_starts_s))
    assert wait.wait_percent == pytest.approx(25)


@pytest.mark.parametrize("batches", [8, 12, 32])
@pytest.mark.parametrize("workers", [2, 4])
def test_short_epochs_do_not_look_faster_than_long_ones(clock, batches, workers):
    """Workers begin an epoch together: their first batches arrive together too, and are left out. (Whole rounds.)"""

    def rate(count):
        loader = FakeLoader(clock, lambda _: 0.08, batches=count, num_workers=workers, persistent_workers=True)
        return measured(lambda batch: clock.sleep(0.001), loader, budget_s=8).samples_per_s

    assert rate(batches) == pytest.approx(workers * 8 / 0.08, rel=0.05)
    assert rate(3000) == pytest.approx(workers * 8 / 0.08, rel=0.05)


def test_a_slow_first_step_does_not_fill_the_queue_at_the_loaders_profit(clock):
    """While a first step compiles, workers fill their queue; those batches say nothing about the loader."""
    loader = FakeLoader(clock, lambda _: 0.1, num_workers=2, prefetch_factor=4)
    seen = []

    def step(batch):
        seen.append(batch)
        clock.sleep(5.0 if len(seen) == 1 else 0.01)

    wait = measured(step, loader, budget_s=60, steps=40)
    assert wait.samples_per_s == pytest.approx(16 / 0.1, rel=0.05)


def test_epochs_of_one_batch_are_measured_with_their_starts(clock):
    wait = measured(lambda batch: clock.sleep(0.03), FakeLoader(clock, lambda _: 0.01, batches=1), budget_s=3)
    assert wait.steps > 10 and wait.wait_percent == pytest.approx(25)


def test_a_run_that_is_too_short_for_one_round_of_workers_is_not_lucky(clock):
    """The first batches of four workers arrive together: the second would seem to have cost nothing."""
    loader = FakeLoader(clock, lambda _: 1.0, num_workers=4, start_s=0.0)
    with Feed(loader, patience_s=1) as feed:
        times = loader_run.run_steps(feed, lambda _: clock.sleep(0.11), torch.device("cpu"), seconds=0.1)
    assert not any(one.counted for one in times[3:]) and len(times) == 2
    assert loader_run.rate_of(times, 4).samples_per_s == pytest.approx(16 / 1.22)  # in truth 32


def test_a_generator_that_can_be_read_once_is_measured_as_far_as_it_goes(clock):
    batches = (torch.zeros(4, 1) for _ in range(6))
    wait = measured(lambda batch: clock.sleep(0.1), batches, budget_s=60)
    assert wait.steps == 5 and wait.samples == 20


@pytest.mark.parametrize(
    ("loader", "says"),
    [
        (DataLoader(TensorDataset(torch.zeros(0, 3)), batch_size=4), "0 samples"),
        (DataLoader(TensorDataset(torch.zeros(3, 3)), batch_size=4, drop_last=True), "drop_last=True drops"),
        ([], "no batch"),
        (iter([torch.zeros(1, 1)]), "at least two"),
    ],
)
def test_loaders_that_give_too_little_say_why(loader, says):
    with pytest.raises(ValueError, match=says):
        measured(lambda batch: None, loader)


# --- real loaders ---------------------------------------------------------------------------------------------------


class Broken(Dataset):
    """Fails in its third batch, in a worker only where `where` says so."""

    def __init__(self, how):
        self.how, self.parent = how, os.getpid()

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index >= 8:
            if self.how == "raise":
                raise KeyError("sample 8 has no label")
            if os.getpid() == self.parent:
                return torch.zeros(2)
            if self.how == "exit":
                os._exit(3)
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
        return torch.zeros(2)


@pytest.mark.parametrize(
    ("how", "says"),
    [("exit", "died without a Python error"), ("kill", "RAM was used up"), ("hang", "No worker gave a batch in time")],
)
def test_workers_that_die_or_hang_are_explained_in_bounded_time(how, says, monkeypatch):
    monkeypatch.setattr(loading, "_PATIENCE_S", 0.5)
    loader = DataLoader(Broken(how), batch_size=4, num_workers=2, prefetch_factor=1)
    begun = time.perf_counter()
    with pytest.raises(LoaderFailed, match=says) as caught:
        measured(lambda batch: None, loader)
    assert time.perf_counter() - begun < 10  # not the 60 s of the worker, nor torch's 5 s for each of several
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert multiprocessing.active_children() == []
    assert loader.timeout == 0


def test_the_data_sets_own_error_and_the_steps_pass_through():
    with pytest.raises(KeyError, match="no label"):
        measured(lambda batch: None, DataLoader(Broken("raise"), batch_size=4, num_workers=1))
    with pytest.raises(ZeroDivisionError):
        measured(lambda batch: 1 / 0, DataLoader(Broken("raise"), batch_size=4, num_workers=1))
    assert multiprocessing.active_children() == []


def test_an_interrupt_ends_the_workers_and_passes_through():
    def step(batch):
        raise KeyboardInterrupt

    loader = DataLoader(TensorDataset(torch.zeros(64, 2)), batch_size=4, num_workers=2, persistent_workers=True)
    with pytest.raises(KeyboardInterrupt):
        measured(step, loader)
    assert multiprocessing.active_children() == []
    assert len(list(loader)) == 16  # it can be used again


def test_a_persistent_loader_starts_new_workers_and_can_go_on():
    loader = DataLoader(TensorDataset(torch.zeros(64, 2)), batch_size=4, num_workers=1, persistent_workers=True)
    list(loader)
    before = multiprocessing.active_children()[0].pid
    working = set()
    wait = measured(
        lambda batch: working.update(one.pid for one in multiprocessing.active_children()), loader, budget_s=0.2
    )
    assert wait.num_workers == 1 and wait.steps > 0
    assert len(working) == 1 and before not in working  # so that first_batch_s holds a worker's start
    assert multiprocessing.active_children() == []
    assert len(list(loader)) == 16
    assert multiprocessing.active_children()[0].pid != before
    loader_feed.end_workers(loader, loader._iterator)


def test_more_workers_than_cpus_start_without_torchs_warning_and_the_random_state_stays(monkeypatch):
    with loading.no_worker_advice():
        loader = DataLoader(
            TensorDataset(torch.zeros(64, 2)), batch_size=4, num_workers=os.cpu_count() + 2, shuffle=True
        )
    state = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wait = measured(lambda batch: torch.rand(1), loader, steps=2, device=None)
    assert wait.num_workers == os.cpu_count() + 2
    assert torch.equal(torch.get_rng_state(), state)


def test_a_model_that_is_given_is_put_back():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weight = model.weight.detach().clone()

    def step(batch):
        optimizer.zero_grad()
        model(batch[0]).sum().backward()
        optimizer.step()

    loader = DataLoader(TensorDataset(torch.ones(16, 2)), batch_size=4)
    measured(step, loader, steps=2, model=model, optimizer=optimizer)
    assert torch.equal(model.weight, weight)
    measured(step, loader, steps=2)
    assert not torch.equal(model.weight, weight)  # it really trains


def test_a_timeout_without_workers_is_a_sentence_not_an_empty_assertion():
    """torch accepts it when the loader is made, and fails an assertion when it is used."""
    loader = DataLoader(TensorDataset(torch.zeros(8, 2)), timeout=5)
    with pytest.raises(AssertionError):
        next(iter(loader))
    with pytest.raises(ValueError, match="timeout=5 needs workers"):
        measured(lambda batch: None, loader)


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"step": 3}, TypeError, "cannot be called"),
        ({"loader": 3}, TypeError, "gives no batches"),
        ({"budget_s": 0}, ValueError, "budget_s"),
        ({"budget_s": float("nan")}, ValueError, "budget_s"),
        ({"steps": 0}, ValueError, "steps"),
        ({"loader": [{"text": {"a": "b"}}] * 3}, TypeError, "how many samples"),
    ],
)
def test_bad_arguments_are_named(arguments, error, says):
    whole = {"step": lambda batch: None, "loader": [torch.zeros(2)] * 3, "steps": 2, **arguments}
    with pytest.raises(error, match=says):
        data_wait(whole.pop("step"), whole.pop("loader"), progress=False, **whole)


Pair = namedtuple("Pair", "image label")


@pytest.mark.parametrize(
    ("batch", "samples", "size"),
    [
        (torch.zeros(5, 2), 5, 40),
        ((torch.zeros(5, 2, dtype=torch.uint8), torch.zeros(5)), 5, 30),
        ({"ids": torch.zeros(3, 7), "n": 1}, 3, 84),
        (Pair(torch.zeros(4, 1), torch.zeros(4)), 4, 32),
        ([torch.tensor(1.0), torch.zeros(6)], 6, 28),
        ((np.zeros((2, 3), dtype=np.float32),), 2, 24),
        ((["a", "b"], torch.zeros(2)), 2, 8),
        (["a", "b", "c"], 3, 0),
    ],
)
def test_samples_and_bytes_of_a_batch(batch, samples, size):
    assert batch_samples(batch) == samples
    assert loading.batch_bytes(batch) == size


# --- the record -----------------------------------------------------------------------------------------------------


def record(**changes):
    steps = (StepTime(0.0, 0.01, 0.03, 8), StepTime(0.04, 0.03, 0.03, 8))
    values = {"device": "cpu", "num_workers": 2, "steps_timed": steps, "samples_per_s": 160.0, "spread": None}
    return DataWait(**{**values, "ceiling_samples_per_s": 267.0, "first_batch_s": 0.2, **changes})


def test_the_record_reads_as_text_and_as_html():
    text = repr(record())
    assert text.startswith("The device waits for data 40 % of the time.")
    assert "2 steps, 16 samples, 2 workers, cpu" in text and "spread n/a" in text
    page = record(device="<b>")._repr_html_()
    assert "&lt;b&gt;" in page and "<b>" not in page


def test_the_timeline_has_a_lane_for_waiting_and_one_for_working():
    fig = record().draw()
    lanes = fig.axes[0].collections
    assert [label.get_text() for label in fig.axes[0].get_yticklabels()] == ["waiting", "working"]
    boxes = [[(path.vertices[:, 0].min(), path.vertices[:, 0].max()) for path in lane.get_paths()] for lane in lanes]
    assert np.allclose(boxes, [[(0, 10), (40, 70)], [(10, 40), (70, 100)]])
    assert "40 % of the time" in fig.alt and "2 workers" in fig.alt


# --- keywords (DL-02, DL-05, DL-06) ---------------------------------------------------------------------------------


def test_keywords_are_valid_with_and_without_workers():
    everything = {"prefetch_factor": 4, "timeout": 5, "multiprocessing_context": "fork", "device": "cpu"}
    assert loader_keywords(0, **everything) == {"num_workers": 0, "pin_memory": False}
    assert loader_keywords(2, device="cpu") == {"num_workers": 2, "pin_memory": False, "persistent_workers": True}
    assert loader_keywords(2, **everything)["prefetch_factor"] == 4
    dataset = TensorDataset(torch.zeros(8, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # DL-06: torch warns at the first batch
        for count in (0, 1):
            assert len(list(DataLoader(dataset, batch_size=4, **loader_keywords(count, **everything)))) == 2


@pytest.mark.parametrize("refused", [{"prefetch_factor": 2}, {"persistent_workers": True}])
def test_torch_still_refuses_what_loader_keywords_leaves_out(refused):
    with pytest.raises(ValueError, match=r"num_workers|multiprocessing"):
        DataLoader(TensorDataset(torch.zeros(8, 2)), num_workers=0, **refused)


def test_pinning_follows_the_device(monkeypatch):
    assert loader_keywords(1, device="cuda")["pin_memory"] and loader_keywords(0, device="cuda")["pin_memory"]
    assert not loader_keywords(1, device="cuda", pin_memory=False)["pin_memory"]
    assert not loader_keywords(1, device="cpu", pin_memory=True)["pin_memory"]  # torch would only warn
    assert not loader_keywords(1, device="mps", pin_memory=True)["pin_memory"]
    for there in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert loader_keywords(1)["pin_memory"] is there


@pytest.mark.parametrize(
    "bad", [{"num_workers": -1}, {"num_workers": 1.5}, {"num_workers": True}, {"prefetch_factor": 0}]
)
def test_impossible_keywords_are_named(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        loader_keywords(**{"num_workers": 1, **bad})


def test_the_numbers_of_workers_end_at_the_usable_cpus(monkeypatch):
    monkeypatch.setattr(loader_needs, "usable_cpus", lambda: 2)
    assert worker_counts() == (0, 1, 2)
    assert worker_counts(0) == (0,)
    assert worker_counts(5) == (0, 1, 2, 3, 4, 5)
    assert worker_counts(40)[-3:] == (24, 32, 40)


# --- needs (DL-01, BSF-11) ------------------------------------------------------------------------------------------

IMAGES = 64 * 3 * 224 * 224 * 4


def test_dl_01_the_shared_memory_is_too_small_for_four_batches():
    assert IMAGES == 38_535_168
    needs = needs_of(IMAGES, 2, shm_free=64 * MIB, ram_available=12 * 2**30)
    assert needs.in_flight_bytes == 4 * IMAGES == 147 * MIB
    assert not needs.fits and not needs.fits_shm and needs.fits_ram
    assert "147 MiB in shared memory, but /dev/shm has 64 MiB free" in needs.sentence
    words = ["fewer workers", "uint8", "file_system", "larger /dev/shm"]
    assert [word in remedy for word, remedy in zip(words, needs.remedies, strict=True)] == [True] * 4
    assert "remedy 4" in repr(needs) and "remedy 4" in needs._repr_html_()
    assert needs_of(IMAGES, 1, 1, shm_free=64 * MIB, ram_available=None).fits


def test_bsf_11_batches_in_flight_fill_the_ram():
    needs = needs_of(4096 * MIB, 8, 2, shm_free=None, ram_available=12 * 2**30)
    assert needs.in_flight_bytes == 64 * 2**30
    assert needs.fits_shm and not needs.fits_ram and "12.0 GiB of RAM" in needs.sentence
    assert needs.remedies and "smaller batch" in needs.remedies[-1]


def test_workers_memory_counts_and_unknown_limits_do_not():
    assert not needs_of(MIB, 2, workers_bytes=2**31, shm_free=None, ram_available=2**31).fits
    assert needs_of(MIB, 2, workers_bytes=2**30, shm_free=None, ram_available=2**31).fits
    unknown = needs_of(2**40, 2, shm_free=None, ram_available=None)
    assert unknown.fits and unknown.remedies == () and "n/a" in repr(unknown)
    none = needs_of(2**40, 0, shm_free=0, ram_available=2**20)
    assert none.in_flight_bytes == 0 and none.fits and "Without workers" in none.sentence


def test_this_machines_limits_are_read(monkeypatch, tmp_path):
    assert loader_needs.shm_free_bytes(tmp_path / "nothing") is None  # Windows, macOS
    monkeypatch.setattr(loader_needs.shutil, "disk_usage", lambda folder: SimpleNamespace(free=64 * MIB))
    assert loader_needs.shm_free_bytes() == 64 * MIB
    assert needs_of(IMAGES, 2).shm_free_bytes == 64 * MIB
    assert 0 < needs_of(IMAGES, 2).ram_available_bytes < 2**50
    assert loader_needs.ram_available_bytes(limit_bytes=2**20) == 0  # a container's limit that is used up
    own = 300 * MIB + loader_needs.psutil.Process().memory_info().rss
    assert loader_needs.ram_available_bytes(limit_bytes=own) <= 310 * MIB


# --- rates ----------------------------------------------------------------------------------------------------------


def test_the_rhythm_of_workers_is_not_noise():
    """Two workers: their batches come in pairs, one after a wait and one without."""
    times = [StepTime(0.0, 0.1 if number % 2 == 0 else 0.0, 0.01, 4) for number in range(32)]
    assert loader_run.rate_of(times, workers=2).error == pytest.approx(0, abs=1e-9)
    assert loader_run.rate_of(times, workers=2).spread == pytest.approx(0, abs=1e-9)
    assert loader_run.rate_of(times[:4], workers=2) == loader_run.Rate(pytest.approx(16 / 0.24), None, None)


def test_steps_that_do_not_count_are_in_no_rate():
    times = [StepTime(0.0, 9.0, 0.1, 4, counted=False), StepTime(0.0, 0.1, 0.1, 4)]
    assert loader_run.rate_of(times).samples_per_s == pytest.approx(20)
    with pytest.raises(ValueError, match="too few"):
        loader_run.rate_of(times[:1])


class Stream(IterableDataset):
    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return iter(torch.zeros(self.samples, 2))

    def __len__(self):
        return 1  # wrong: torch would warn if it were believed


def test_a_stream_is_read_epoch_after_epoch_and_its_length_is_not_believed():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Feed(DataLoader(Stream(10), batch_size=4), patience_s=1) as feed:
            sizes = [batch_samples(feed.next()) for _ in range(7)]
    assert sizes == [4, 4, 2, 4, 4, 2, 4]
    assert feed.epoch_samples == 10 and len(feed.starts_s) == 3 and feed.position == 1
