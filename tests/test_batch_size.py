"""The finder: only sizes that ran, within 2 % of the limit, no trace left (BSF-01 to BSF-12, FACTS 23)."""

import gc
import random
import time
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from course_utils import batch_trial
from course_utils.batch_search import Search, Tried
from course_utils.batch_size import CudaMemory, NothingFits, find_batch_size, worst_batch
from course_utils.oom import SimulatedMemory
from course_utils.preserve import training_preserved

CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB."


class Job:
    """A training job whose step fits up to `limit` samples; its peak, if asked for, lies on a line."""

    def __init__(self, limit, *, fixed=0.1, error=lambda: torch.OutOfMemoryError(CUDA), scaler=None):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1)).eval()
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.limit, self.error, self.scaler = limit, error, scaler
        self.calls, self.peak, self.limit_bytes = [], 0, 10**9
        self.fixed = fixed * self.limit_bytes
        self.per_sample = (self.limit_bytes - self.fixed) / (limit + 0.5)

    def needed(self, batch_size):
        return self.fixed + self.per_sample * batch_size

    def trial(self, batch_size):
        self.calls.append(batch_size)
        self.model.train()
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(4, 4)).sum() * (random.random() + np.random.rand())
        loss.backward()
        if batch_size > self.limit:
            raise self.error()
        self.peak = max(self.peak, self.needed(batch_size))
        self.optimizer.step()

    # What find_batch_size reads as its memory.
    @property
    def peak_bytes(self):
        return round(self.peak)

    def reset_peak(self):
        self.peak = 0

    def prediction(self, factor=1.0, shift=0.0):
        return SimpleNamespace(peak_bytes=lambda n: factor * self.needed(n) + shift * self.limit_bytes)

    def find(self, **keywords):
        keywords = {"model": self.model, "optimizer": self.optimizer, "progress": False} | keywords
        return find_batch_size(self.trial, **keywords)


@pytest.fixture(autouse=True)
def no_slow_collections(request, monkeypatch):
    """A full garbage collection takes a good part of a second among all that pytest imports."""
    if "real_collections" not in request.fixturenames:
        monkeypatch.setattr(batch_trial, "gc", SimpleNamespace(collect=lambda generation: 0))


@pytest.fixture
def real_collections():
    """For a test of what is freed."""


def near(size, limit):
    """Within 2 % of the true limit, or exact where that is less than one sample."""
    return limit * 0.98 <= size <= limit


# FACTS 23 and issue 3: fast with a prediction and readings, right without either


@pytest.mark.parametrize("limit", [1, 3, 20, 80, 700, 5000])
def test_a_prediction_that_holds_takes_four_sizes_and_no_failure(limit):
    job = Job(limit)
    found = job.find(prediction=job.prediction(0.97), memory=job)
    assert near(found.batch_size, limit)
    assert found.batch_size in job.calls
    assert found.sizes_tried == len(set(job.calls)) <= 4
    assert found.ooms == 0
    assert found.limited_by == "memory"


@pytest.mark.parametrize("fixed", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("limit", [1, 3, 20, 80, 700, 5000])
def test_readings_alone_are_enough(limit, fixed):
    job = Job(limit, fixed=fixed)
    found = job.find(memory=job)
    assert near(found.batch_size, limit)
    assert found.ooms <= (2 if limit < 8 else 0)  # it begins at 8
    assert found.sizes_tried <= 7


@pytest.mark.parametrize(
    ("limit", "keywords"),
    [
        (5000, {}),
        (700, {}),
        (80, {"max_batch": 100}),
        (100, {"start": 256}),
        (20, {"start": 64}),
        (20, {}),
        (3, {}),
        (1, {}),
    ],
)
def test_bracketing_without_readings(limit, keywords):
    job = Job(limit)
    found = job.find(**keywords)
    assert near(found.batch_size, limit)
    assert found.batch_size in job.calls
    assert found.limited_by == "memory"
    assert found.ooms == sum(size > limit for size in set(job.calls))
    assert found.sizes_tried == len(set(job.calls)) <= 12


@pytest.mark.parametrize("with_readings", [True, False])
@pytest.mark.parametrize(("size", "limit"), [(3000, 10**6), (100, 10**7), (5, 10**6)])
def test_the_data_set_bounds_the_answer(size, limit, with_readings):
    """BSF-01."""
    job = Job(limit)
    found = job.find(dataset_size=size, max_batch=10**6, memory=job if with_readings else None)
    assert found.batch_size == size
    assert found.limited_by == "dataset"
    assert "limited by the data set, not by memory" in repr(found)
    assert max(job.calls) == size


def test_a_data_set_that_is_predicted_to_fit_takes_one_size():
    job = Job(10_000)
    found = job.find(dataset_size=3000, prediction=job.prediction(), memory=job)
    assert (found.batch_size, found.sizes_tried, found.limited_by) == (3000, 1, "dataset")


def test_a_cap_bounds_the_answer():
    """BSF-11."""
    found = Job(10**6).find(max_batch=100, dataset_size=3000)
    assert (found.batch_size, found.limited_by) == (100, "cap")


def test_a_small_limit_under_a_large_cap_is_memorys():
    job = Job(80)
    found = job.find(max_batch=100, memory=job, prediction=job.prediction())
    assert (found.batch_size, found.limited_by, found.ooms) == (80, "memory", 0)


@pytest.mark.parametrize(("multiple", "limit", "answer"), [(8, 100, 96), (8, 8, 8), (32, 1000, 992), (16, 47, 32)])
@pytest.mark.parametrize("mode", ["prediction", "readings", "neither"])
def test_multiples(multiple, limit, answer, mode):
    job = Job(limit)
    help_ = {
        "prediction": {"prediction": job.prediction(), "memory": job},
        "readings": {"memory": job},
        "neither": {},
    }
    found = job.find(multiple_of=multiple, **help_[mode])
    assert answer * 0.98 <= found.batch_size <= answer
    assert {size % multiple for size in job.calls} == {0}


def test_a_multiple_keeps_under_the_data_set():
    found = Job(10**6).find(multiple_of=8, dataset_size=100)
    assert (found.batch_size, found.limited_by) == (96, "dataset")


# What a trial is


def test_each_size_makes_two_steps_and_only_sizes_that_did_are_returned():
    """BSF-03: an optimizer's state appears in the first step, so the second needs more."""
    job = Job(10**6)

    def trial(batch_size):
        held = 100 if job.optimizer.state else 0
        if batch_size + held > 500:
            raise torch.OutOfMemoryError(CUDA)
        job.trial(batch_size)

    found = find_batch_size(trial, model=job.model, optimizer=job.optimizer, progress=False)
    assert near(found.batch_size, 400)
    assert {one.steps for one in found.trials if one.fits} == {2}
    assert found.steps >= 2 * sum(one.fits for one in found.trials)
    assert not job.optimizer.state


@pytest.mark.parametrize("size_of_step_one", [1, 5])
def test_more_steps_can_be_asked_for(size_of_step_one):
    job = Job(size_of_step_one)
    job.find(max_batch=size_of_step_one, steps=5)
    assert job.calls == [size_of_step_one] * 5


def test_a_trial_without_an_optimizer_step_is_an_error():
    """BSF-04."""
    job = Job(20)
    with pytest.raises(RuntimeError, match=r"trial\(32\) made no step of the optimizer"):
        find_batch_size(lambda n: n, model=job.model, optimizer=job.optimizer, progress=False)
    other = torch.optim.SGD(job.model.parameters(), 0.1)
    with pytest.raises(RuntimeError, match="no step of the optimizer that was given"):
        job.find(optimizer=other)


def test_a_search_in_the_middle_of_training_really_steps():
    """BSF-04: what was trained before does not count."""
    job = Job(20)
    for _ in range(5):
        job.trial(4)
    job.calls.clear()
    found = job.find(dataset_size=100)
    assert found.batch_size == 20
    assert job.calls.count(20) == 2


def test_a_trial_of_another_size_is_an_error():
    """BSF-02: a loader that is still built for another size."""
    job = Job(100)

    def trial(batch_size):
        job.trial(batch_size)
        return 2

    with pytest.raises(ValueError, match=r"trial\(32\) used 2 samples"):
        find_batch_size(trial, model=job.model, optimizer=job.optimizer, start=32, max_batch=32, progress=False)


def test_a_trial_that_returns_its_loss_is_told_so():
    job = Job(100)

    def trial(batch_size):
        job.trial(batch_size)
        return torch.ones(())

    with pytest.raises(TypeError, match="returned Tensor"):
        find_batch_size(trial, model=job.model, optimizer=job.optimizer, progress=False)


def test_a_returned_count_that_is_right_is_accepted():
    job = Job(20)
    trial = lambda n: job.trial(n) or n  # noqa: E731
    assert find_batch_size(trial, model=job.model, optimizer=job.optimizer, progress=False).batch_size == 20


def scaled(job, overflowing):
    """A trial with a GradScaler; its gradients overflow while the scale is above `overflowing`."""
    job.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def trial(batch_size):
        job.calls.append(batch_size)
        if batch_size > job.limit:
            raise torch.OutOfMemoryError(CUDA)
        job.optimizer.zero_grad()
        loss = job.model(torch.randn(4, 4)).sum()
        if job.scaler.get_scale() > overflowing:
            loss = loss * float("inf")
        job.scaler.scale(loss).backward()
        job.scaler.unscale_(job.optimizer)
        if batch_size >= job.limit - 1:
            raise torch.OutOfMemoryError(CUDA)  # between unscale_ and update
        job.scaler.step(job.optimizer)
        job.scaler.update()

    return trial


def test_steps_that_a_scaler_leaves_out_do_not_count():
    job = Job(6)
    found = find_batch_size(
        scaled(job, 2.0**7), model=job.model, optimizer=job.optimizer, scaler=job.scaler, max_batch=4, progress=False
    )
    assert (found.batch_size, found.steps) == (4, 2)
    assert job.calls == [4] * 5  # three at scales 1024, 512 and 256 were left out
    assert job.scaler.get_scale() == 2.0**10


def test_a_scaler_is_usable_after_a_failure_in_the_middle_of_a_step():
    job = Job(6)
    found = find_batch_size(
        scaled(job, 2.0**20), model=job.model, optimizer=job.optimizer, scaler=job.scaler, progress=False
    )
    assert found.batch_size == 4


def test_a_scaler_that_never_steps_is_an_error():
    job = Job(6)
    with pytest.raises(RuntimeError, match="left out 17 steps in a row"):
        find_batch_size(
            scaled(job, 0.0), model=job.model, optimizer=job.optimizer, scaler=job.scaler, max_batch=4, progress=False
        )


def test_a_disabled_scaler_is_no_scaler():
    job = Job(20)
    assert job.find(scaler=torch.amp.GradScaler("cpu", enabled=False)).batch_size == 20


# No trace (BSF-06)


def everything(job):
    return (
        {name: value.tolist() for name, value in job.model.state_dict().items()},
        [id(parameter) for parameter in job.model.parameters()],
        [module.training for module in job.model.modules()],
        [parameter.requires_grad for parameter in job.model.parameters()],
        [None if parameter.grad is None else parameter.grad.tolist() for parameter in job.model.parameters()],
        str(job.optimizer.state_dict()),
        random.getstate(),
        np.random.get_state()[1].tolist(),
        torch.get_rng_state().tolist(),
        len(job.optimizer._optimizer_step_post_hooks),
    )


def interrupt():
    return KeyboardInterrupt()


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize(
    "error",
    [lambda: torch.OutOfMemoryError(CUDA), lambda: ZeroDivisionError("mine"), interrupt],
    ids=["out of memory", "not ours", "interrupt"],
)
def test_all_state_is_as_it_was_whatever_happens(trained, error):
    job = Job(20, error=error)
    if trained:
        job.trial(1)
        job.trial(1)
        job.model.eval()
    before = everything(job)
    if error() is None or isinstance(error(), torch.OutOfMemoryError):
        assert job.find(memory=job, prediction=job.prediction(2.0)).batch_size == 20
    else:
        with pytest.raises(type(error())):
            job.find()
    assert everything(job) == before


def test_every_size_starts_from_the_same_state():
    job = Job(10**6)
    seen = {}

    def trial(batch_size):
        state = everything(job)
        seen.setdefault(batch_size, state)
        job.trial(batch_size)

    before = everything(job)
    find_batch_size(trial, model=job.model, optimizer=job.optimizer, max_batch=100, progress=False)
    assert len(seen) == 2
    assert [state[:-1] for state in seen.values()] == [before[:-1]] * 2


def test_others_are_put_back():
    job = Job(20)
    scheduler = torch.optim.lr_scheduler.StepLR(job.optimizer, 1, 0.5)

    def trial(batch_size):
        job.trial(batch_size)
        scheduler.step()

    find_batch_size(trial, model=job.model, optimizer=job.optimizer, others=[scheduler], max_batch=4, progress=False)
    assert scheduler.last_epoch == 0
    assert job.optimizer.param_groups[0]["lr"] == 1e-3


# Errors


def test_nothing_fits_names_the_smallest_size_and_the_first_cause():
    """BSF-02, BSF-12."""
    job = Job(0)
    with pytest.raises(NothingFits, match=r"Not even batch size 1 fits\. Tried: 32, 16, 4, 1\.") as caught:
        job.find()
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert str(caught.value.__cause__) == CUDA
    with pytest.raises(NothingFits, match=r"batch size 8 fits\. Tried: 32, 16, 8\."):
        Job(7).find(multiple_of=8)
    with pytest.raises(NothingFits, match="batch size 1 fits"):
        job.find(prediction=job.prediction(), memory=job)


def test_the_search_is_bounded_in_trials():
    """BSF-12: it says so, and the answer is the best that ran."""
    job = Job(5000)
    found = job.find(max_trials=3)
    assert (found.batch_size, found.limited_by, found.ended_by) == (512, "trials", "trials")
    assert "a larger one may fit" in repr(found)
    assert found.sizes_tried == 3
    with pytest.raises(NothingFits, match=r"within max_trials\. Tried: 4096, 2048\."):
        Job(5).find(max_trials=2, start=4096)


def test_the_search_is_bounded_in_time(monkeypatch):
    job, now = Job(5000), [0.0]
    clock = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr("course_utils.batch_size.time", clock)
    monkeypatch.setattr(batch_trial, "time", clock)

    def trial(batch_size):
        now[0] += 1.0
        job.trial(batch_size)

    search = {"model": job.model, "optimizer": job.optimizer, "progress": False}
    found = find_batch_size(trial, max_seconds=5, **search)
    # 32 and 128 take two steps each; the first step at 512 ends when the time is over, and one step proves nothing.
    assert job.calls == [32, 32, 128, 128, 512]
    assert (found.batch_size, found.limited_by, found.ended_by) == (128, "time", "time")
    assert found.trials[-1].outcome == "stopped by time"
    assert found.seconds == 5.0
    with pytest.raises(NothingFits, match="max_seconds"):
        find_batch_size(trial, max_seconds=0.5, **search)


@pytest.mark.parametrize("message", ["device-side assert triggered", "an illegal memory access was encountered"])
def test_a_fatal_error_is_raised_at_once_with_advice(message):
    job = Job(20, error=lambda: RuntimeError(f"CUDA error: {message}"))
    with pytest.raises(RuntimeError, match=message) as caught:
        job.find()
    assert job.calls == [32]
    assert "restart the runtime" in caught.value.__notes__[0]


def test_a_fatal_error_is_not_hidden_by_what_fails_after_it(monkeypatch):
    job = Job(20, error=lambda: RuntimeError("CUDA error: device-side assert triggered"))

    def release():
        if job.calls:
            raise RuntimeError("CUDA error: device-side assert triggered, again")

    job.release = release
    with pytest.raises(RuntimeError, match=r"triggered\n") as caught:
        job.find(memory=job, start=32)
    assert "could not be put back" in caught.value.__notes__[-1]


def test_a_loaders_error_gets_its_hint():
    job = Job(20, error=lambda: RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error."))
    with pytest.raises(RuntimeError, match="Bus error") as caught:
        job.find()
    assert "/dev/shm" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    "error", [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError("x"), KeyError("label")]
)
def test_a_real_error_passes_through_unchanged(error):
    """BSF-12."""
    job = Job(20, error=lambda: error)
    with pytest.raises(type(error)) as caught:
        job.find()
    assert caught.value is error
    assert not hasattr(error, "__notes__")
    assert job.calls == [32]
    assert caught.traceback[-1].name == "trial"


def test_a_batch_of_one_is_tried_only_where_nothing_larger_fits():
    """BatchNorm raises for a single value per channel: that is not the batch that was asked for."""
    for limit in (3, 5, 20):
        job = Job(limit)
        job.find(memory=job, prediction=job.prediction())
        assert 1 not in job.calls


def test_a_real_error_after_failures_says_what_came_before():
    job = Job(1)

    def trial(batch_size):
        if batch_size == 1:
            raise ValueError("Expected more than 1 value per channel when training")
        job.trial(batch_size)

    with pytest.raises(ValueError, match="Expected more than 1 value") as caught:
        find_batch_size(trial, model=job.model, optimizer=job.optimizer, progress=False)
    assert caught.value.__notes__ == [f"Larger batches ran out of memory before: {CUDA}"]


@pytest.mark.parametrize(
    "message", ["CUDA error: CUBLAS_STATUS_ALLOC_FAILED", "cuDNN error: CUDNN_STATUS_ALLOC_FAILED", "HIP out of memory"]
)
def test_other_words_for_it_are_recognised(message):
    """BSF-07."""
    assert Job(20, error=lambda: RuntimeError(message)).find().batch_size == 20


def test_a_doubtful_error_counts_if_a_very_small_size_runs_without_it():
    job = Job(20, error=lambda: RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"))
    found = job.find()
    assert found.batch_size == 20
    assert [one.batch_size for one in found.trials][:2] == [32, 2]
    assert found.trials[0].outcome == "maybe out of memory"
    assert "CUDNN_STATUS_NOT_SUPPORTED" in found.trials[0].detail
    assert found.ooms >= 1


def test_a_doubtful_error_at_every_size_is_raised():
    """mlcommons/algorithmic-efficiency#185: a CUBLAS_STATUS_NOT_INITIALIZED that was not memory."""
    job = Job(0, error=lambda: RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED"))
    with pytest.raises(RuntimeError, match="NOT_INITIALIZED") as caught:
        job.find()
    assert job.calls == [32, 2]
    assert "A batch of 2 fails alike" in caught.value.__notes__[0]
    with pytest.raises(RuntimeError, match="NOT_INITIALIZED"):
        job.find(start=1)


def test_a_failed_step_is_not_alive_when_the_next_size_is_tried(real_collections):
    """BSF-08."""
    job, alive, seen = Job(20), [], []

    def trial(batch_size):
        seen.extend(one() is not None for one in alive)
        activations = torch.ones(10)
        try:
            job.trial(batch_size)
        except torch.OutOfMemoryError as error:
            alive.append(weakref.ref(activations))
            raise ValueError("the step failed") from error

    find_batch_size(trial, model=job.model, optimizer=job.optimizer, progress=False)
    gc.collect()
    assert len(alive) > 2
    assert not any(seen)
    assert all(one() is None for one in alive)


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"dataset_size": 5, "multiple_of": 8}, "dataset_size=5 is less than multiple_of=8"),
        ({"dataset_size": 0}, "dataset_size=0"),
        ({"max_batch": 2.5}, "max_batch=2.5"),
        ({"multiple_of": True}, "multiple_of=True"),
        ({"start": 0}, "start=0"),
        ({"steps": 1}, "at least 2"),
        ({"max_trials": 0}, "max_trials=0"),
        ({"max_seconds": 0}, "max_seconds=0"),
        ({"headroom": 1}, "headroom=1"),
        ({"tolerance": -0.1}, "tolerance=-0.1"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(keywords, words):
    job = Job(20)
    with pytest.raises(ValueError, match=words):
        job.find(**keywords)
    assert job.calls == []


def test_the_wrong_optimizer_or_prediction_is_refused():
    with pytest.raises(TypeError, match=r"torch\.optim"):
        Job(20).find(optimizer="adam")
    with pytest.raises(TypeError, match="predict_memory"):
        Job(20).find(prediction=20)


# Memory


@pytest.mark.parametrize("limit", [10, 100, 700])
def test_headroom_is_kept_in_every_mode(limit):
    """BSF-03."""
    job = Job(limit, fixed=0.0)
    for keywords in ({"memory": job, "prediction": job.prediction()}, {"memory": job}, {}):
        found = job.find(headroom=0.1, **keywords)
        assert near(found.batch_size, int(0.9 * (limit + 0.5)) if keywords else 0.9 * limit)
        assert found.batch_size in job.calls


def test_a_size_that_leaves_too_little_is_not_returned():
    job = Job(100, fixed=0.0)
    found = job.find(memory=job, headroom=0.5, start=80)
    assert near(found.batch_size, 50)
    assert found.trials[0].outcome == "too little left"
    assert found.ooms == 0
    assert "50% of it was to stay free" in repr(found)
    with pytest.raises(NothingFits, match="Batch size 1 runs, but leaves less than 60%"):
        job = Job(100, fixed=0.5)
        job.find(headroom=0.6, memory=job)


def test_a_margin_that_leaves_no_batch_is_said():
    with pytest.raises(NothingFits, match="Batch size 1 runs, but a margin of 10%"):
        Job(1).find(headroom=0.1)


@pytest.mark.parametrize("reading", ["flat", "none", "steps"])
@pytest.mark.parametrize("limit", [20, 700])
def test_readings_that_lie_on_no_line_give_way_to_bracketing(limit, reading):
    job = Job(limit)
    needed = {"flat": lambda n: 9.9e8, "none": lambda n: 0, "steps": lambda n: 4e8 if n < limit / 2 else 9.9e8}
    line, job.needed = job.prediction(), needed[reading]
    predicted = Job(limit).prediction()
    for prediction in (None, predicted):
        found = job.find(memory=job, prediction=prediction)
        assert found.batch_size <= limit
        assert found.batch_size in job.calls
    del line


def test_flat_readings_still_find_the_limit():
    job = Job(700)
    job.needed = lambda n: 5e8
    assert near(job.find(memory=job, max_trials=20).batch_size, 700)


def test_a_peak_that_bends_upwards_is_followed_without_failure():
    """Small batches need most in the optimizer's step, large ones in the activations."""
    job = Job(5000)
    job.limit_bytes = 5100
    job.needed = lambda n: max(400 + 0.05 * n, 100 + n)
    found = job.find(memory=job)
    assert near(found.batch_size, 5000)
    assert found.ooms == 0


class Bent:
    """A prediction whose own line was fitted where the optimizer's step needs the most; its exact values bend."""

    def __init__(self, needed):
        self.needed, self.asked = needed, []

    def peak_bytes(self, batch_size):
        return 400 + 0.001 * batch_size

    def at(self, batch_size):
        self.asked.append(batch_size)
        return SimpleNamespace(peak_bytes=self.needed(batch_size))


@pytest.mark.parametrize(("limit", "cap"), [(5000, None), (5000, 3000), (700, None)])
def test_the_exact_prediction_near_the_limit_counts_not_the_line_from_afar(limit, cap):
    job = Job(limit)
    job.limit_bytes = limit + 100
    job.needed = lambda n: max(400, 100 + n)
    prediction = Bent(job.needed)
    found = job.find(memory=job, prediction=prediction, dataset_size=cap)
    assert len(set(prediction.asked)) <= 12
    assert 1 not in prediction.asked  # one sample is too little for BatchNorm
    assert near(found.batch_size, cap or limit)
    assert (found.ooms, found.sizes_tried <= 3) == (0, True)


def test_a_prediction_that_nothing_fits_is_tried_all_the_same():
    job = Job(0)
    job.limit_bytes = 50
    with pytest.raises(NothingFits):
        job.find(memory=job, prediction=Bent(lambda n: 100 + n))
    assert max(job.calls) <= 2


def test_a_first_peak_where_nothing_grows_does_not_end_the_search():
    """The optimizer's step alone fills the memory at every size up to 160, the activations beyond."""
    job = Job(160)
    job.limit_bytes = 1000
    job.needed = lambda n: max(999, 6.2 * n)
    found = job.find(memory=job, prediction=SimpleNamespace(peak_bytes=lambda n: 6.2 * n))
    assert near(found.batch_size, 160)


@pytest.mark.parametrize("factor", [0.3, 3.0])
def test_a_prediction_that_does_not_hold_costs_time_but_not_the_answer(factor):
    job = Job(700)
    found = job.find(memory=job, prediction=job.prediction(factor))
    assert near(found.batch_size, 700)
    assert found.ooms <= 1


def test_a_start_that_is_predicted_not_to_fit_is_not_tried():
    job = Job(100)
    found = job.find(start=256, memory=job, prediction=job.prediction())
    assert (found.ooms, max(job.calls)) == (0, found.batch_size)


def test_what_else_lies_in_memory_is_added_to_the_prediction():
    job = Job(100)
    prediction = Job(100).prediction()
    job.fixed += 0.6 * job.limit_bytes  # another model, which the prediction does not know
    job.limit = int((job.limit_bytes - job.fixed) / job.per_sample)
    job.reset_peak = lambda: setattr(job, "peak", 0.6 * job.limit_bytes)
    found = job.find(memory=job, prediction=prediction)
    assert near(found.batch_size, job.limit)
    assert found.ooms == 0


class Digits(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10))

    def forward(self, x):
        return self.layers(x)


ADAMW, SGD = torch.optim.AdamW, lambda parameters: torch.optim.SGD(parameters, 0.1)


@pytest.mark.parametrize(
    ("limit", "make", "predicted"),
    [
        (3, SGD, True),
        (20, SGD, True),
        (20, SGD, False),
        (333, ADAMW, True),
        (333, ADAMW, False),
        (3000, ADAMW, True),
        (3000, SGD, False),
    ],
)
def test_real_steps_under_a_simulated_limit(limit, make, predicted, real_collections):
    model = Digits()
    optimizer = make(model.parameters())
    targets = torch.zeros(5000, dtype=torch.int64)

    def trial(batch_size):
        optimizer.zero_grad()
        inputs = torch.zeros(batch_size, 64)
        nn.functional.cross_entropy(model(inputs), targets[:batch_size]).backward()
        optimizer.step()

    def peak(batch_size):
        with SimulatedMemory(None) as memory, training_preserved(model, optimizer):
            memory.track(model)
            trial(batch_size)
            trial(batch_size)
            return memory.peak_bytes

    budget = (peak(limit) + peak(limit + 1)) // 2
    near_it, further = peak(limit), peak(limit + 50)
    sizes = sorted({1, 2, 3, 4, 6, 8, 16, 32, *(max(1, int(limit * share / 8)) for share in range(2, 12))})
    peaks = [peak(size) for size in sizes]
    off = 1 if limit < 20 else 0.98  # 2 % of what is fixed is more than three samples
    prediction = SimpleNamespace(
        peak_bytes=lambda n: off * (near_it + (further - near_it) / 50 * (n - limit)),
        at=lambda n: SimpleNamespace(peak_bytes=off * np.interp(n, sizes, peaks)),
    )
    with SimulatedMemory(budget) as memory:
        memory.track(model)
        found = find_batch_size(
            trial,
            model=model,
            optimizer=optimizer,
            memory=memory,
            prediction=prediction if predicted else None,
            progress=False,
        )
    assert near(found.batch_size, limit)
    assert found.ooms == 0
    assert found.sizes_tried <= (4 if predicted else 9)
    assert found.best.peak_bytes == peak(found.batch_size)
    assert not optimizer.state


def test_the_gpus_own_memory_is_read_where_the_model_is_on_one(monkeypatch):
    calls = []
    reading = {"mem_get_info": (600, 1000), "memory_reserved": 300, "max_memory_reserved": 250}
    for name, value in reading.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: calls.append(str(device)))
    memory = CudaMemory(torch.device("cuda:1"))
    memory.reset_peak()
    memory.release()
    assert (memory.limit_bytes, memory.peak_bytes, calls) == (900, 250, ["cuda:1", "empty"])
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 0.5)
    assert memory.limit_bytes == 500


def test_a_model_on_the_gpu_is_searched_with_its_memory(monkeypatch):
    job, made, waited = Job(20), [], []
    monkeypatch.setattr("course_utils.batch_size.device_of", lambda model: torch.device("cuda:1"))
    monkeypatch.setattr("course_utils.batch_size.CudaMemory", lambda device: made.append(str(device)) or job)
    monkeypatch.setattr(batch_trial, "synchronize", lambda device: waited.append(str(device)))
    assert job.find(prediction=job.prediction()).batch_size == 20
    assert made == ["cuda:1"]
    assert waited == ["cuda:1"] * len(job.calls)  # each step's time is the device's, not the launch's


def test_the_device_of_a_model():
    assert batch_trial.device_of(nn.ReLU()) == torch.device("cpu")
    assert batch_trial.device_of(nn.Linear(1, 1, device="meta")) == torch.device("meta")
    buffered = nn.BatchNorm1d(1, affine=False, device="meta")
    assert batch_trial.device_of(buffered) == torch.device("meta")


def test_the_found_batch_can_be_read():
    job = Job(20)
    found = job.find(memory=job, prediction=job.prediction())
    text, page = repr(found), found._repr_html_()
    assert text.startswith("Batch size 20: limited by memory. Sizes tried: 2, out of memory: 0,")
    assert "Limit: 954 MiB" in text
    assert "<table>" in page
    assert found.best.batch_size == 20
    assert found.best.peak_bytes == round(job.needed(20))
    assert found.ended_by == "answer"
    assert all(one.samples_per_s > 0 for one in found.trials)
    failed = Job(2).find().trials[0]
    assert (failed.peak_bytes, failed.seconds, failed.samples_per_s, failed.detail) == (None, None, None, CUDA)


def test_progress_is_shown_and_can_be_turned_off(capsys):
    Job(20).find(progress=True)
    assert "batch sizes" in capsys.readouterr().out
    Job(20).find(progress=False)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


# The strategy alone


def search_through(search, limit, needed):
    """What the search tries where `limit` is the truth, until it ends: sizes that fit, sizes that fail."""
    tried = []
    for _ in range(60):
        size = search.next_size(tried)
        if size is None:
            return [one.size for one in tried if one.fits], [one.size for one in tried if not one.fits]
        assert size % search.multiple == 0
        assert search.multiple <= size <= (search.cap or size)
        assert size not in [one.size for one in tried]
        read = search.budget_bytes is not None and size <= limit
        tried.append(Tried(size, size <= limit, needed(size) if read else None))
    pytest.fail(f"no end: {tried[-5:]}")


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 20, 80, 100, 700, 5000, 100_000])
@pytest.mark.parametrize("fixed", [0.0, 0.1, 0.5, 0.9])
def test_a_prediction_off_by_3_percent_or_a_context_still_holds(limit, fixed):
    def needed(n):
        return fixed + (1 - fixed) * n / (limit + 0.5)

    for factor, shift in ((1, 0), (0.97, 0), (1.03, 0), (1, -0.05), (0.9, 0)):
        if factor == 0.9 and fixed > 0.5:
            continue  # 10 % of what is fixed is more than the room for the batch
        search = Search(budget_bytes=1.0, predicted=lambda n, f=factor, s=shift: f * needed(n) + s)
        fit, failed = search_through(search, limit, needed)
        assert near(max(fit), limit)
        assert (len(fit) <= 4, failed) == (True, [])


@given(
    limit=st.integers(1, 200_000),
    multiple=st.sampled_from([1, 1, 8]),
    cap=st.none() | st.integers(8, 300_000),
    fixed=st.floats(0, 0.95),
    start=st.none() | st.integers(1, 10_000),
    factor=st.none() | st.floats(0.5, 2),
    read=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_any_search_ends_with_a_size_that_ran(limit, multiple, cap, fixed, start, factor, read):
    def needed(n):
        return fixed + (1 - fixed) * n / (limit + 0.5)

    cap = None if cap is None else cap // multiple * multiple
    predicted = None if factor is None else (lambda n: factor * needed(n))
    fit, _ = search_through(Search(multiple, cap, 0.02, 1.0 if read else None, predicted, start), limit, needed)
    reachable = min(limit, cap or limit) // multiple * multiple
    assert reachable * 0.98 <= max(fit, default=0) <= reachable


# The batch to try


class Texts(Dataset):
    def __len__(self):
        return 5

    def __getitem__(self, index):
        return {"ids": torch.zeros([3, 9, 2, 9, 1][index], dtype=torch.int64), "label": index}


def test_the_worst_batch_is_the_longest_sample_repeated():
    """BSF-03."""
    batch = worst_batch(Texts(), 4)
    assert batch["ids"].shape == (4, 9)
    assert batch["label"].tolist() == [1] * 4
    images = [(torch.zeros(3, 2, 2), 0), (torch.zeros(3, 4, 2), 1), (np.zeros((3, 3, 2)), 2)]
    assert worst_batch(images, 2)[0].shape == (2, 3, 4, 2)
    assert worst_batch(["a", "abc", "ab"], 2, list) == ["abc", "abc"]


class Endless(IterableDataset):
    def __iter__(self):
        length = 0
        while True:
            length += 1
            yield torch.zeros(length)


def test_an_endless_stream_is_looked_at_for_so_long():
    assert worst_batch(Endless(), 2, at_most=50).shape == (2, 50)
    assert worst_batch(Texts(), 2, at_most=1)["ids"].shape == (2, 3)


def test_no_worst_batch_of_nothing():
    with pytest.raises(ValueError, match="empty"):
        worst_batch([], 2)
    with pytest.raises(ValueError, match="batch_size=0"):
        worst_batch(Texts(), 0)


def test_the_loader_of_a_trial_can_be_built_for_its_size():
    job = Job(20)

    def trial(batch_size):
        (batch,) = next(iter(DataLoader(list(zip(torch.randn(50, 4))), batch_size)))
        job.trial(batch_size)
        return len(batch)

    found = find_batch_size(trial, model=job.model, optimizer=job.optimizer, dataset_size=50, progress=False)
    assert found.batch_size == 20
    with pytest.raises(ValueError, match=r"used 50 samples.*data set too small"):
        job.limit = 10**6
        find_batch_size(trial, model=job.model, optimizer=job.optimizer, progress=False)


def test_time_is_taken_from_the_clock():
    before = time.perf_counter()
    found = Job(20).find()
    assert 0 < found.seconds <= time.perf_counter() - before
