"""The curve and its knee, on a fake clock; the real clock is only asked whether it runs."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from course_utils import throughput, timing
from course_utils.oom import SimulatedMemory
from course_utils.throughput import ThroughputCurve, ThroughputPoint, throughput_curve

CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB."


class Job:
    """A step costs 10 ms and 0.1 ms a sample; its peak is 100 bytes and one a sample."""

    def __init__(self, monkeypatch, limit=10**9):
        self.now, self.limit, self.calls, self.peak, self.limit_bytes = 100.0, limit, [], 0, None
        clock = SimpleNamespace(perf_counter=lambda: self.now)
        monkeypatch.setattr(timing, "time", clock)
        monkeypatch.setattr(throughput, "time", clock)

    def trial(self, batch_size):
        self.calls.append(batch_size)
        if batch_size > self.limit:
            raise torch.OutOfMemoryError(CUDA)
        # The first call of a size is slower, as in life, and must not count.
        self.now += (0.01 + 0.0001 * batch_size) * (1 if self.calls.count(batch_size) > 1 else 10)
        self.peak = max(self.peak, 100 + batch_size)

    @property
    def peak_bytes(self):
        return self.peak

    def reset_peak(self):
        self.peak = 0


@pytest.fixture
def job(monkeypatch):
    return Job(monkeypatch)


def speed(batch_size):
    return batch_size / (0.01 + 0.0001 * batch_size)


def test_the_speed_of_each_size_is_that_of_warm_steps(job):
    curve = throughput_curve(job.trial, [64, 8, 8], budget_s=1000, progress=False)
    assert [point.batch_size for point in curve.points] == [8, 64]
    for point in curve.points:
        assert point.samples_per_s == pytest.approx(speed(point.batch_size))
        assert point.spread == pytest.approx(0, abs=1e-6)
        assert point.peak_bytes is None
        assert point.fits
    assert job.calls == [8] * 8 + [64] * 8
    assert curve.skipped == ()


def test_the_spread_is_the_middle_half_of_the_steps(job):
    waits = iter([1, 1, 2, 2, 2, 2, 4, 4])

    def trial(batch_size):
        job.now += next(waits)

    (point,) = throughput_curve(trial, [8], budget_s=1000, progress=False).points
    assert point.samples_per_s == 4.0
    assert point.spread == pytest.approx(1.0)  # speeds 8, 4, 4, 4, 4, 2, 2: the quartiles are 3 and 4


@pytest.mark.parametrize(
    ("largest", "sizes"),
    [
        (None, [8, 16, 24, 32, 48, 64, 96, 128, 192, 256]),
        (100, [8, 16, 24, 32, 48, 64, 96]),
        (700, [8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 696]),
        (8, [8]),
        (5, [1, 2, 3, 4, 5]),
    ],
)
def test_sizes_are_multiples_of_8_up_to_the_largest(job, largest, sizes):
    curve = throughput_curve(job.trial, largest=largest, budget_s=1000, progress=False)
    assert [point.batch_size for point in curve.points] == sizes


def test_the_time_budget_is_kept(job):
    begun = job.now
    curve = throughput_curve(job.trial, [8, 64, 512, 1000, 2000], budget_s=1.0, progress=False)
    assert curve.skipped == (1000, 2000)
    assert [point.batch_size for point in curve.points] == [8, 64, 512]
    assert job.now - begun < 1.0 + 0.65 + 3 * 0.065  # it is looked at between calls
    assert job.calls.count(512) == 4  # one to warm up and the least


def test_it_stops_at_the_first_size_that_runs_out(monkeypatch):
    job = Job(monkeypatch, limit=100)
    curve = throughput_curve(job.trial, [64, 96, 128, 256], budget_s=1000, progress=False)
    assert [(point.batch_size, point.fits) for point in curve.points] == [(64, True), (96, True), (128, False)]
    assert curve.points[-1].samples_per_s is None
    assert curve.skipped == ()
    assert "out of memory" in repr(curve)
    assert 256 not in job.calls


def test_other_errors_pass_through():
    with pytest.raises(ZeroDivisionError):
        throughput_curve(lambda n: 1 / 0, [8], progress=False)
    with pytest.raises(RuntimeError, match="INTERNAL_ERROR"):  # it may be memory, but not at the smallest size

        def doubtful(batch_size):
            raise RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR")

        throughput_curve(doubtful, [8, 16], progress=False)


def curve_of(*points, limit=None):
    return ThroughputCurve(
        tuple(
            ThroughputPoint(size, speed, 1.0 if speed else None, peak, speed is not None)
            for size, speed, peak in points
        ),
        limit,
    )


@pytest.mark.parametrize(
    ("points", "limit", "knee", "best"),
    [
        ([(8, 100, None), (16, 190, None), (32, 194, None), (64, 200, None)], None, 16, 64),
        ([(8, 100, None), (16, 189, None), (32, 194, None), (64, 200, None)], None, 32, 64),
        # The largest is the fastest, but leaves too little: it neither counts nor sets the bar.
        ([(8, 100, 10), (16, 150, 20), (32, 300, 91)], 100, 16, 16),
        ([(8, 100, 10), (16, 150, 20), (32, 300, 90)], 100, 32, 32),
        # Without readings, the margin is taken off the largest that ran before a failure.
        ([(8, 100, None), (16, 150, None), (32, 300, None), (64, None, None)], None, 16, 16),
        ([(8, 100, None), (28, 150, None), (32, 151, None), (64, None, None)], None, 28, 28),
        # Past its best a larger batch may be slower (pytorch/pytorch#49207).
        ([(8, 100, None), (16, 200, None), (32, 150, None)], None, 16, 16),
        ([(8, 100, None)], None, 8, 8),
    ],
)
def test_the_knee_is_the_smallest_near_the_best_that_leaves_memory(points, limit, knee, best):
    found = curve_of(*points, limit=limit).knee()
    assert (found.batch_size, found.best.batch_size) == (knee, best)
    assert int(found) == knee
    assert range(100)[found] == knee
    assert repr(found).startswith(f"Knee: batch size {knee}, {next(v for s, v, _ in points if s == knee)} samples/s")


def test_within_and_headroom_can_be_chosen():
    curve = curve_of((8, 100, 10), (16, 150, 60), (32, 200, 95), limit=100)
    assert curve.knee(headroom=0.0).batch_size == 32
    assert curve.knee(headroom=0.0, within=0.3).batch_size == 16
    assert curve.knee(headroom=0.5).batch_size == 8
    with pytest.raises(ValueError, match="None of the measured sizes leaves 95% of the memory free"):
        curve.knee(headroom=0.95)
    with pytest.raises(ValueError, match="within=5"):
        curve.knee(within=5)


def test_the_knee_of_the_job(job):
    """Half of its limit speed of 10,000/s at 100 samples: 95 % of the best measured at 256 lies at 229."""
    curve = throughput_curve(job.trial, budget_s=1000, progress=False)
    assert curve.knee().batch_size == 256
    assert curve.knee(within=0.1).batch_size == 192


def test_peaks_are_read_for_each_size(job):
    job.limit_bytes = 400
    curve = throughput_curve(job.trial, [8, 64, 256], memory=job, budget_s=1000, progress=False)
    assert [point.peak_bytes for point in curve.points] == [108, 164, 356]
    assert curve.limit_bytes == 400
    assert curve.knee().batch_size == 256
    assert curve.knee(headroom=0.2).batch_size == 64


def test_a_simulated_limit_is_read():
    model = nn.Linear(100, 100)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def trial(batch_size):
        optimizer.zero_grad()
        model(torch.ones(batch_size, 100)).sum().backward()
        optimizer.step()

    before = model.weight.tolist()
    with SimulatedMemory(300_000) as memory:
        memory.track(model)
        curve = throughput_curve(
            trial, [8, 16, 1000], memory=memory, model=model, optimizer=optimizer, budget_s=0.2, progress=False
        )
    assert [point.fits for point in curve.points] == [True, True, False]
    assert curve.points[0].peak_bytes < curve.points[1].peak_bytes < 300_000
    assert curve.points[0].samples_per_s > 0
    assert model.weight.tolist() == before
    assert model.weight.grad is None


def test_random_numbers_go_on_where_they_were(job):
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    throughput_curve(lambda n: torch.rand(n), [8], budget_s=0.01, progress=False)
    assert torch.equal(torch.rand(1), expected)


def test_the_gpus_own_memory_and_clock_are_used(monkeypatch, job):
    asked = []
    monkeypatch.setattr(throughput, "CudaMemory", lambda device: asked.append(str(device)) or job)
    fake = lambda function, *, device, **_: asked.append(str(device)) or function() or timing.Timing((1.0,) * 3, "", "")  # noqa: E731
    monkeypatch.setattr(throughput, "time_call", fake)
    curve = throughput_curve(job.trial, [8], device="cuda:1", progress=False)
    assert asked == ["cuda:1", "cuda:1"]
    assert curve.points[0].peak_bytes == 108


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"batch_sizes": []}, "empty"),
        ({"batch_sizes": [8, 0]}, "batch size=0"),
        ({"batch_sizes": [8], "largest": 8}, "not both"),
        ({"largest": 0}, "largest=0"),
        ({"budget_s": 0}, "budget_s=0"),
    ],
)
def test_bad_input_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        throughput_curve(lambda n: None, progress=False, **arguments)


def test_the_curve_can_be_drawn_and_read():
    curve = curve_of((8, 100, 10), (16, 190, 20), (32, 200, 40), (64, None, None), limit=100)
    fig = curve.draw()
    assert "Knee: batch size 16, 190 samples/s, within 5% of the best (200 samples/s at 32)." in fig.alt
    words = [text.get_text() for text in fig.axes[0].texts]
    assert words == ["knee: 16", "64: out of memory"]
    assert fig.axes[0].get_ylim()[0] == 0
    assert curve.draw(fig.axes[0]) is fig
    assert "190 samples/s" in curve._repr_html_()
    from course_utils.figures import render

    assert render(fig).png.startswith(b"\x89PNG")


def test_progress_can_be_turned_off(job, capsys):
    throughput_curve(job.trial, [8], progress=True)
    assert "throughput" in capsys.readouterr().out
    throughput_curve(job.trial, [8], progress=False)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")
