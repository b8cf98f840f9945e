"""Timing reads the work, not the launch (case AMP-10), on a fake GPU with its own clock."""

import time
from types import SimpleNamespace

import pytest
import torch

from course_utils import timing
from course_utils.timing import Timing, synchronize, time_call

LAUNCH_S = 0.001


class FakeGpu:
    """A GPU with a queue: a launch costs the host 1 ms, and the work is done later, in order.

    Only synchronize() makes the host wait. Like torch, elapsed_time() raises while an event is not reached.
    """

    def __init__(self):
        self.host_s = 100.0
        self.free_s = 0.0
        self.waits = 0
        self.selected = []

    def launch(self, work_s):
        self.host_s += LAUNCH_S
        self.free_s = max(self.free_s, self.host_s) + work_s

    def synchronize(self, device=None):
        self.waits += 1
        self.host_s = max(self.host_s, self.free_s)

    def perf_counter(self):
        return self.host_s

    def device(self, device):
        gpu = self

        class Selected:
            def __enter__(self):
                gpu.selected.append(str(device))

            def __exit__(self, *_):
                gpu.selected.append("back")

        return Selected()

    def event(self, enable_timing=False):
        gpu = self

        class Event:
            reached_s = None

            def record(self):
                self.reached_s = max(gpu.host_s, gpu.free_s)

            def elapsed_time(self, end):
                if not enable_timing or max(self.reached_s, end.reached_s) > gpu.host_s:
                    raise RuntimeError("device not ready")
                return (end.reached_s - self.reached_s) * 1000

        return Event()


@pytest.fixture
def gpu(monkeypatch):
    fake = FakeGpu()
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=fake.perf_counter))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "synchronize", fake.synchronize)
    monkeypatch.setattr(torch.cuda, "Event", fake.event)
    monkeypatch.setattr(torch.cuda, "device", fake.device)
    return fake


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


# AMP-10


def test_the_fake_gpu_fools_a_clock_that_does_not_wait(gpu):
    start = gpu.perf_counter()
    gpu.launch(0.5)
    assert gpu.perf_counter() - start == pytest.approx(LAUNCH_S)


@pytest.mark.parametrize("work_s", [0.0, 0.02, 0.3])
def test_the_true_time_is_read(gpu, work_s):
    timed = time_call(lambda: gpu.launch(work_s), device="cuda", budget_s=60)
    # The launch comes first, then the work: both belong to the call, each time, whatever was queued before.
    assert timed.seconds == pytest.approx([LAUNCH_S + work_s] * 7)
    assert (timed.method, timed.device) == ("CUDA events", "cuda")


def test_work_queued_before_neither_counts_nor_hides_the_launch(gpu):
    gpu.launch(50.0)
    timed = time_call(lambda: gpu.launch(0.02), device="cuda", warmup=0, repeats=1)
    assert timed.seconds == pytest.approx([LAUNCH_S + 0.02])


def test_the_device_asked_for_is_the_one_timed(gpu):
    time_call(lambda: gpu.launch(0.1), device=torch.device("cuda:1"), repeats=1)
    assert gpu.selected == ["cuda:1", "back"]


def test_an_exception_passes_through_and_gives_the_device_back(gpu):
    def fails():
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        time_call(fails, device="cuda", warmup=0)
    assert gpu.selected == ["cuda", "back"]
    with pytest.raises(ZeroDivisionError, match="mine"):
        time_call(fails)


def test_synchronize_waits_on_a_gpu_and_does_nothing_on_a_cpu(gpu):
    gpu.launch(3.0)
    for cpu in ("cpu", torch.device("cpu"), None):
        synchronize(cpu)
    assert gpu.waits == 0
    synchronize("cuda:0")
    assert gpu.waits == 1
    assert gpu.host_s == gpu.free_s


def test_synchronize_is_harmless_without_a_gpu(no_gpu):
    synchronize("cpu")
    with pytest.raises(ValueError, match="no usable GPU"):
        synchronize("cuda")


# Warm-up, repeats, budget


class Job:
    """Takes `first_s` the first time and `then_s` afterwards, on a clock of its own."""

    def __init__(self, monkeypatch, then_s, first_s=None):
        self.now_s, self.calls = 0.0, 0
        self.first_s, self.then_s = then_s if first_s is None else first_s, then_s
        monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: self.now_s))

    def __call__(self):
        self.now_s += self.then_s if self.calls else self.first_s
        self.calls += 1


def test_warm_up_is_not_counted(monkeypatch):
    job = Job(monkeypatch, then_s=0.01, first_s=1.0)
    timed = time_call(job)
    assert timed.seconds == pytest.approx([0.01] * 7)
    assert job.calls == 8
    assert (timed.method, timed.device, timed.repeats) == ("perf_counter", "cpu", 7)
    assert time_call(Job(monkeypatch, then_s=0.01, first_s=1.0), warmup=0).seconds[0] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("call_s", "repeats", "measured"),
    [
        (10.0, 7, 3),  # over the budget from the first call: three all the same
        (10.0, 2, 2),  # no more than were asked for
        (0.5, 7, 3),  # 0.5 s of warm-up and three calls make 2 s
        (0.4, 7, 4),  # 0.4 s of warm-up and four calls make 2 s
        (0.01, 7, 7),
        (0.01, 100, 100),
        (0.1, 100, 19),
    ],
)
def test_it_stops_at_the_budget_but_measures_at_least_three(monkeypatch, call_s, repeats, measured):
    job = Job(monkeypatch, call_s)
    timed = time_call(job, repeats=repeats, budget_s=2.0 - 1e-6)
    assert timed.repeats == measured
    assert job.calls == measured + 1


def test_on_the_real_clock():
    timed = time_call(lambda: time.sleep(0.01), repeats=3)
    assert all(0.009 <= seconds < 5 for seconds in timed.seconds)


# The numbers


def test_median_spread_and_throughput_are_robust_to_one_slow_call():
    timed = Timing((0.1, 0.2, 0.3, 0.4, 50.0), "cpu", "perf_counter")
    assert timed.median_s == 0.3
    assert timed.min_s == 0.1
    assert timed.spread_s == pytest.approx(0.2)  # 0.4 - 0.2, the quartiles
    assert timed.throughput(60) == pytest.approx(200.0)


def test_one_call_has_no_spread_and_no_time_no_throughput():
    assert Timing((0.5,), "cpu", "perf_counter").spread_s == 0.0
    assert Timing((0.0, 0.0), "cpu", "perf_counter").throughput(8) is None


def test_it_reads_well():
    timed = Timing((0.01234, 0.01234), "cuda:0", "CUDA events")
    assert repr(timed) == "Timing: median 12.3 ms, spread 0 µs, fastest 12.3 ms (2 calls on cuda:0, CUDA events)"
    assert "(1 call on cpu" in repr(Timing((2.5,), "cpu", "perf_counter"))
    html = Timing((0.00000123,), "<b>", "perf_counter")._repr_html_()
    assert "1.23 µs" in html
    assert "<b>" not in html


def test_a_timing_cannot_be_changed():
    with pytest.raises(AttributeError):
        Timing((1.0,), "cpu", "perf_counter").device = "cuda"


# Bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"repeats": 0}, "repeats must be a whole number of at least 1, not 0"),
        ({"repeats": 2.5}, "repeats must be a whole number"),
        ({"warmup": -1}, "warmup must be a whole number of at least 0, not -1"),
        ({"budget_s": 0}, "budget_s must be a positive number of seconds, not 0"),
        ({"budget_s": float("nan")}, "budget_s must be a positive number"),
        ({"budget_s": float("inf")}, "budget_s must be a positive number"),
        ({"device": "cuda"}, "no usable GPU here to time cuda on: use runtime.pick_device"),
        ({"device": "gpu"}, "'gpu' is not a device: write 'cpu', 'cuda' or 'cuda:0'"),
        ({"device": "meta"}, "cpu and cuda, not meta"),
    ],
)
def test_bad_input_gets_one_sentence_and_calls_nothing(no_gpu, arguments, message):
    calls = []
    with pytest.raises(ValueError, match=message) as caught:
        time_call(lambda: calls.append(1), **arguments)
    assert "\n" not in str(caught.value)
    assert calls == []


def test_a_gpu_that_is_not_there_is_named(gpu):
    with pytest.raises(ValueError, match=r"no cuda:2 here: the last of this machine's GPUs is cuda:1"):
        time_call(lambda: None, device="cuda:2")


@pytest.mark.parametrize("result", [None, torch.ones(2), "f()"])
def test_a_result_instead_of_a_function_is_explained(result):
    with pytest.raises(TypeError, match="needs a function to call, such as"):
        time_call(result)


@pytest.mark.parametrize("samples", [0, -1, 1.5])
def test_throughput_needs_samples(samples):
    with pytest.raises(ValueError, match="samples must be a whole number of at least 1"):
        Timing((1.0,), "cpu", "perf_counter").throughput(samples)


def test_timing_on_the_cpu_starts_no_cuda_and_prints_nothing(capfd):  # importing: tests/test_imports.py
    time_call(lambda: 1)
    synchronize("cpu")
    assert not torch.cuda.is_initialized()
    assert capfd.readouterr() == ("", "")
