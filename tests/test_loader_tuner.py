"""The tuner's search on fake clocks, against the exhaustive grid; its refusals, bounds and counts on real loaders."""

import multiprocessing
import os
import random
import time
import warnings

import pytest
import torch
from fake_loaders import Clock, FakeGpu, FakeLoader, jitter
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset, get_worker_info

from course_utils import loader_checks, loader_look, loader_needs, loader_tuner
from course_utils.loader_table import LoaderTrial, TunedLoader
from course_utils.loading import loader_keywords, tune_loader

COUNTS = (0, 1, 2, 3, 4, 6, 8)
FACTORS = (2, 4, 8)


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(loader_checks, "start_method_of", lambda loader=None: "fork")
    monkeypatch.setattr(loader_tuner, "usable_cpus", lambda: 8)
    return Clock(monkeypatch)


def tuned(make_loader, step, **keywords):
    return tune_loader(make_loader, step, progress=False, **{"device": "cpu", **keywords})


def outcomes(result):
    return [(row.num_workers, row.outcome) for row in result.rows]


class Job:
    """A training job on a fake clock: what a batch takes to load, what a step takes, how workers get in the way."""

    def __init__(self, clock, load_s, step_s, **loader):
        self.clock, self.step_s = clock, step_s
        self.make = lambda **keywords: FakeLoader(clock, load_s, **loader, **keywords)

    def step(self, batch):
        self.clock.sleep(self.step_s)

    def true_rate(self, keywords):
        """The rate of a setting over a long time, in samples per second."""
        batches, seen = iter(self.make(**keywords)), 0
        for _ in range(50):
            next(batches)
            self.step(None)
        begun = self.clock.now_s
        for batch in batches:
            self.step(batch)
            seen += len(batch[1])
        return seen / (self.clock.now_s - begun)


# --- the search -----------------------------------------------------------------------------------------------------


def test_where_the_loader_is_not_the_bottleneck_nothing_else_is_tried(clock):
    job = Job(clock, lambda _: 0.004, 0.096)
    result = tuned(job.make, job.step)
    assert outcomes(result) == [(0, "measured")] and result.ended_by == "ceiling"
    assert result.keywords == {"num_workers": 0, "pin_memory": False}
    assert not result.loader_is_bottleneck and "Leave it as it is" in result.verdict
    assert result.ceiling_samples_per_s == pytest.approx(8 / 0.096)


def test_it_goes_straight_to_the_workers_that_the_two_times_call_for(clock):
    job = Job(clock, lambda _: 0.035, 0.01)  # 3.5 loads in a step's time
    result = tuned(job.make, job.step, workers=COUNTS)
    assert outcomes(result) == [(0, "measured"), (4, "measured")]
    assert result.keywords == loader_keywords(4, device="cpu")
    assert result.loader_is_bottleneck and "no setting can do more" in result.verdict
    assert result.samples_per_s == pytest.approx(800, rel=0.03)


def test_it_climbs_while_more_workers_win_and_stops_when_they_do_not(clock):
    slow = {0: 1.0, 1: 1.3, 2: 1.3, 3: 1.3, 4: 1.3, 6: 1.6, 8: 2.6}  # workers hold each other up
    job = Job(clock, lambda _: 0.035, 0.008, workers_slow=slow.get)
    result = tuned(job.make, job.step, workers=COUNTS)
    # Not fed with 6, so it looks at 8, which is worse, and at 4, which could have been as good.
    assert [row.num_workers for row in result.rows] == [0, 6, 8, 4, 6]
    assert result.best.num_workers == 6 and result.best is result.rows[1]


def test_a_number_that_should_do_and_does_not_is_followed_by_more(clock, monkeypatch):
    """On a CPU the step is slower beside a worker: one is called for and is not enough."""
    monkeypatch.setattr(loader_tuner, "usable_cpus", lambda: 4)
    loads = {0: 0.02, 1: 0.05, 2: 0.05, 3: 0.05, 4: 0.05}
    job = Job(clock, lambda _: 0.02, 0.03, computes=True, workers_slow=lambda workers: loads[workers] / 0.02)
    result = tuned(job.make, job.step, workers=range(5))
    assert [row.num_workers for row in result.rows][:3] == [0, 1, 2] and result.best.num_workers == 2


def test_a_number_of_workers_that_could_not_win_is_skipped(clock):
    job = Job(clock, lambda _: 0.035, 0.004)
    result = tuned(job.make, job.step, workers=(0, 2, 8))
    assert outcomes(result)[:3] == [(0, "measured"), (8, "measured"), (2, "skipped")]
    assert "it could load 549 samples/s at most" in result.rows[2].reason


def test_workers_that_compute_are_tried_from_the_number_of_cpus_on(clock, monkeypatch):
    monkeypatch.setattr(loader_tuner, "usable_cpus", lambda: 2)
    job = Job(clock, lambda _: 0.06, 0.01, computes=True, workers_slow=lambda workers: max(1, workers / 2))
    assert [row.num_workers for row in tuned(job.make, job.step, workers=COUNTS).rows][:3] == [0, 2, 3]


def test_a_win_inside_the_noise_is_no_win_and_fewer_workers_are_preferred(clock):
    """4 workers are 2 % faster than 2, and the batches vary by far more."""
    slow = {0: 1.0, 1: 1.0, 2: 1.0, 4: 1.96, 8: 3.9}
    job = Job(clock, jitter(0.05, 0.3), 0.004, workers_slow=slow.get)
    assert 1.0 < job.true_rate({"num_workers": 4}) / job.true_rate({"num_workers": 2}) < 1.05
    result = tuned(job.make, job.step, workers=(0, 2, 4, 8))
    assert result.best.num_workers == 2
    assert (4, "measured") in outcomes(result)  # it was looked at, and did not win by enough


def test_workers_that_make_it_slower_are_left_out(clock):
    job = Job(clock, lambda _: 0.001, 0.01, workers_slow=lambda workers: 30.0)
    result = tuned(job.make, job.step, workers=(1, 2))
    assert result.best.num_workers == 0 and result.keywords == {"num_workers": 0, "pin_memory": False}


@pytest.mark.parametrize(
    ("slow_s", "every", "fast_s", "step_s", "workers", "factor"),
    [
        (0.16, 8, 0.001, 0.02, 2, 4),
        (0.15, 8, 0.001, 0.02, 1, 8),
        (0.2, 16, 0.01, 0.0125, 2, 8),  # here two workers alone win nothing beyond the noise
    ],
)
def test_uneven_batches_call_for_prefetching(clock, slow_s, every, fast_s, step_s, workers, factor):
    job = Job(clock, lambda number: fast_s if number % every else slow_s, step_s)
    result = tuned(job.make, job.step, workers=(workers,))
    assert result.keywords["num_workers"] == workers and result.keywords["prefetch_factor"] == factor
    assert job.true_rate(result.keywords) > 1.25 * job.true_rate({"num_workers": workers})
    assert result.best.label.startswith(f"{workers} worker") and f"prefetch {factor}" in result.best.label


def test_batches_that_are_slow_now_and_then_do_not_escape_a_short_look(clock):
    job = Job(clock, lambda number: 0.001 if number % 12 else 0.06, 0.006)
    result = tuned(job.make, job.step, workers=(1,))
    assert result.rows[1].samples_per_s == pytest.approx(job.true_rate({"num_workers": 1}), rel=0.1)


def test_pinning_is_tried_on_a_gpu_only(clock, monkeypatch):
    gpu = FakeGpu(clock, monkeypatch)
    made = []

    def make_loader(**keywords):
        made.append(keywords)
        cost = 0.08 if keywords["pin_memory"] else 0.06  # here pinning takes more than it saves
        return FakeLoader(clock, lambda _: cost, **keywords)

    result = tuned(make_loader, lambda batch: gpu.queue(0.01), device="cuda", workers=(0, 2))
    assert [one["pin_memory"] for one in made if one["num_workers"] == 2] == [True, True, False]
    assert result.keywords["pin_memory"] is False and result.keywords["num_workers"] == 2
    made.clear()
    tuned(make_loader, lambda batch: clock.sleep(0.01), device="cpu", workers=(0, 2))
    assert not any(one["pin_memory"] for one in made)


@pytest.mark.parametrize(("start_s", "keeps"), [(0.5, True), (0.0, False)])
def test_workers_are_kept_in_short_epochs_where_that_is_a_win(clock, start_s, keeps):
    job = Job(clock, lambda _: 0.05, 0.02, batches=20, start_s=start_s)
    result = tuned(job.make, job.step, workers=(0, 2))
    assert result.keywords["persistent_workers"] is keeps
    (row,) = [row for row in result.rows if "new each epoch" in row.label]
    assert "with the starts of epochs" in row.reason


def test_long_epochs_are_not_waited_for_to_try_that(clock):
    job = Job(clock, lambda _: 0.05, 0.02, batches=100_000)
    result = tuned(job.make, job.step, workers=(0, 2))
    assert result.keywords["persistent_workers"] and not any("new each epoch" in row.label for row in result.rows)


@pytest.mark.parametrize("computes", [True, False])
def test_more_workers_than_cpus_only_where_loading_waits(clock, monkeypatch, computes):
    """A worker that computes needs a CPU; one that waits for the network does not."""
    monkeypatch.setattr(loader_tuner, "usable_cpus", lambda: 2)
    job = Job(clock, lambda _: 0.06, 0.01, computes=computes, workers_slow=lambda workers: max(1, workers / 2))
    if not computes:
        job = Job(clock, lambda _: 0.06, 0.01)
    result = tuned(job.make, job.step)
    most = max(row.num_workers for row in result.rows)
    assert most == 2 if computes else most == 6
    assert any("upper bound" in note for note in result.notes) is not computes


def scenario(seed):
    """A random job: load and step times, noise, CPUs, and what it costs when workers outnumber them."""
    draws = random.Random(seed)
    step_s, computes = draws.choice([0.005, 0.01, 0.03]), draws.random() < 0.6
    load_s = step_s * draws.choice([0.02, 0.3, 0.9, 1.6, 3.2, 6.5, 14.0])
    cpus = draws.choice([1, 2, 4, 8])
    thrash = draws.choice([1.0, 1.1, 1.3])
    noise = draws.choice([0.0, 0.1, 0.4])

    def slow(workers):
        return max(1.0, workers / cpus) * (thrash ** max(0, workers - cpus)) if computes else 1.0

    job = {"load_s": jitter(load_s, noise, seed), "step_s": step_s, "workers_slow": slow, "computes": computes}
    return cpus, {**job, "batches": 600}


@pytest.mark.parametrize("seed", range(32))
def test_95_percent_of_the_exhaustive_grid_in_a_third_of_its_time(clock, seed, monkeypatch):
    """The grid looks at each setting for as long as the tuner may; the best of its true rates counts."""
    cpus, keywords = scenario(seed)
    monkeypatch.setattr(loader_tuner, "usable_cpus", lambda: cpus)
    job = Job(clock, **keywords)
    begun = clock.now_s
    result = tuned(job.make, job.step, workers=COUNTS)
    took = clock.now_s - begun
    grid = [loader_keywords(0, device="cpu")]
    grid += [loader_keywords(n, prefetch_factor=p, device="cpu") for n in COUNTS[1:] for p in FACTORS]
    assert took <= len(grid) * loader_tuner._LONGEST_LOOK_S / 3 and took <= 30.0
    best = max(job.true_rate(keywords) for keywords in grid)
    assert job.true_rate(result.keywords) >= 0.95 * best


# --- the budget -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget_s", [1.0, 5.0, 30.0])
def test_the_budget_is_kept(clock, budget_s):
    job = Job(clock, jitter(0.05, 0.5), 0.002, workers_slow=lambda workers: 1 + workers / 8)
    begun = clock.now_s
    result = tuned(job.make, job.step, workers=COUNTS, budget_s=budget_s)
    assert clock.now_s - begun <= budget_s + 0.06  # one batch or step is not cut short
    assert result.seconds == pytest.approx(clock.now_s - begun)
    assert result.best.num_workers > 0


def test_a_look_that_runs_into_the_end_of_the_budget_is_cut_short(clock):
    """Starting the workers takes most of what is left, and a round of them would take longer still."""
    job = Job(clock, lambda _: 0.3, 0.3, start_s=0.9, workers_slow=lambda workers: 3.0)
    begun = clock.now_s
    result = tuned(job.make, job.step, workers=(4,), budget_s=8)
    assert result.ended_by == "budget" and result.best.num_workers == 0
    assert clock.now_s - begun <= 8 + 0.3  # a step is not cut short


def test_each_setting_draws_the_same_random_numbers(clock):
    drawn = []

    def make_loader(**keywords):
        drawn.append(torch.rand(1).item())
        return FakeLoader(clock, lambda _: 0.05, **keywords)

    tuned(make_loader, lambda batch: (torch.rand(3), clock.sleep(0.01)), workers=(2, 3))
    assert len(drawn) > 2 and len(set(drawn)) == 1


def test_a_budget_that_ends_early_is_said_and_what_ran_is_returned(clock):
    job = Job(clock, lambda _: 2.0, 0.1, start_s=1.0, workers_slow=lambda workers: 2.0)
    result = tuned(job.make, job.step, workers=COUNTS, budget_s=20)
    assert result.samples_per_s < 40  # 8 workers that take 4 s each: 16 samples/s, and no lucky start is believed
    assert result.ended_by == "budget" and "time was up" in result.verdict
    assert result.best.outcome == "measured"


class Hangs(Dataset):
    """Hangs in every worker, after as many batches as `after` says."""

    def __init__(self, how="hang"):
        self.how, self.parent = how, os.getpid()

    def __len__(self):
        return 400

    def __getitem__(self, index):
        if os.getpid() != self.parent:
            if self.how == "kill":
                os.kill(os.getpid(), 9)
            if self.how == "raise":
                raise OSError(f"worker {get_worker_info().id} cannot open the file")
            time.sleep(600)
        time.sleep(0.002)
        return torch.zeros(2)


@pytest.mark.parametrize(
    ("how", "says"), [("hang", "No worker gave a batch in time"), ("kill", "RAM"), ("raise", "cannot open the file")]
)
def test_workers_that_fail_are_rows_and_0_workers_the_answer(how, says):
    begun = time.perf_counter()
    result = tuned(
        lambda **k: DataLoader(Hangs(how), batch_size=4, **k), lambda batch: None, workers=(1, 2), budget_s=3
    )
    assert time.perf_counter() - begun < 6
    failed = [row for row in result.rows if row.outcome == "failed"]
    assert failed and all(says in row.reason for row in failed)
    assert result.keywords["num_workers"] == 0
    assert multiprocessing.active_children() == []


def test_an_interrupt_ends_the_workers_and_passes_through():
    calls = []

    def step(batch):
        calls.append(len(multiprocessing.active_children()))
        if calls[-1]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tuned(lambda **k: DataLoader(Slow(), batch_size=4, **k), step, workers=(2,), budget_s=3)
    assert calls[-1] == 2 and multiprocessing.active_children() == []


class Slow(Dataset):
    def __len__(self):
        return 4000

    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.zeros(2)


def test_errors_of_the_step_and_of_the_data_set_pass_through():
    with pytest.raises(ZeroDivisionError):
        tuned(lambda **k: DataLoader(Slow(), batch_size=4, **k), lambda batch: 1 / 0)
    with pytest.raises(IndexError):
        tuned(lambda **k: DataLoader([], batch_size=4, sampler=[3], **k), lambda batch: None)


# --- memory ---------------------------------------------------------------------------------------------------------


def test_a_setting_that_does_not_fit_is_refused_before_it_runs(clock, monkeypatch):
    """Case DL-01 in the tuner: only one worker's batches fit into the shared memory."""
    job = Job(clock, lambda _: 0.05, 0.01)  # a batch is 8 × 4 × 4 bytes
    monkeypatch.setattr(loader_needs, "shm_free_bytes", lambda: 300)
    result = tuned(job.make, job.step, workers=COUNTS)
    refused = [row for row in result.rows if row.outcome == "refused"]
    assert {row.num_workers for row in refused} >= {2, 6}
    assert all("/dev/shm" in row.reason and "fewer workers" in row.reason for row in refused)
    assert result.best.num_workers == 1 and "prefetch_factor" not in result.keywords


def test_what_workers_took_is_asked_of_the_ram_for_more_of_them(clock, monkeypatch):
    """100 MiB a worker and 650 MiB of RAM: 6 workers would do, 8 would not."""
    made = []
    monkeypatch.setattr(loader_look, "worker_bytes", lambda _: 100 * 2**20 * made[-1] or None)
    monkeypatch.setattr(loader_needs, "ram_available_bytes", lambda: 650 * 2**20)
    job = Job(clock, lambda _: 0.05, 0.01, workers_slow=lambda workers: 1.3)

    def make_loader(**keywords):
        made.append(keywords["num_workers"])
        return job.make(**keywords)

    result = tuned(make_loader, job.step, workers=(5, 6, 8))
    assert outcomes(result)[:3] == [(0, "measured"), (5, "measured"), (6, "measured")]
    (refused,) = [row for row in result.rows if row.outcome == "refused"]
    assert refused.num_workers == 8 and "800 MiB of the workers' own" in refused.reason and "RAM" in refused.reason
    assert result.rows[1].workers_bytes == 500 * 2**20 and result.best.num_workers == 6


def test_a_look_ends_when_the_ram_runs_out(clock, monkeypatch):
    """Case DL-10: the workers' copies grow while it runs."""
    monkeypatch.setattr(loader_look, "ram_bytes", lambda: 100)
    monkeypatch.setattr(loader_look, "ram_available_bytes", lambda: 4)
    job = Job(clock, lambda _: 0.05, 0.01)
    result = tuned(job.make, job.step, workers=(0, 5))
    assert outcomes(result)[1] == (5, "stopped") and "RAM" in result.rows[1].reason
    assert result.rows[1].samples_per_s is None and result.best.num_workers == 0


# --- samples --------------------------------------------------------------------------------------------------------


class Stream(IterableDataset):
    """60 samples, or another number; every worker yields them all."""

    def __init__(self, samples=60):
        self.samples = samples

    def __iter__(self):
        for number in self.mine():
            time.sleep(0.001)
            yield torch.tensor([number])

    def mine(self):
        return range(self.samples)


class Shared(Stream):
    def mine(self):
        info = get_worker_info()
        return range(info.id, self.samples, info.num_workers) if info else range(self.samples)


class Forgetful(Stream):
    """Yields all, and nobody can see it: it does ask for its worker."""

    def mine(self):
        _ = get_worker_info()
        return range(self.samples)


def tuned_stream(stream, budget_s, workers):
    return tuned(lambda **k: DataLoader(stream, batch_size=4, **k), lambda b: None, workers=workers, budget_s=budget_s)


@pytest.mark.parametrize("kind", [Stream, Forgetful])
def test_a_stream_that_every_worker_yields_whole_is_refused_by_its_count(kind):
    result = tuned_stream(kind(), 6, (2, 3))
    assert result.rows[0].epoch_samples == 60
    assert outcomes(result)[1:] == [(3, "refused"), (2, "refused")]
    assert all("more than the 60 samples" in row.reason for row in result.rows[1:])
    assert result.rows[1].samples_per_s is None and result.rows[1].first_batch_s is not None
    assert result.rows[2].first_batch_s is None  # not run again: it would be the same
    assert result.keywords["num_workers"] == 0
    assert any("stream multiplied" in note for note in result.notes) is (kind is Stream)


def test_a_stream_that_is_shared_is_measured_and_counted():
    result = tuned_stream(Shared(), 6, (2,))
    assert outcomes(result)[1] == (2, "measured") and result.rows[1].epoch_samples == 60


def test_a_long_stream_that_does_not_ask_is_refused_uncounted():
    result = tuned_stream(Stream(10**9), 2, (2, 3))
    refused = [row for row in result.rows if row.outcome == "refused"]
    assert len(refused) == 2 and all("too many to count" in row.reason for row in refused)
    assert result.rows[0].epoch_samples is None and result.keywords["num_workers"] == 0


def test_a_loader_whose_epochs_differ_with_the_workers_is_refused(clock):
    def make_loader(num_workers, **keywords):
        batches = 300 if num_workers else 600
        return FakeLoader(clock, lambda _: 0.05, batches=batches, num_workers=num_workers, **keywords)

    result = tuned(make_loader, lambda batch: clock.sleep(0.01), workers=(0, 2))
    assert outcomes(result)[1] == (2, "refused") and "2,400 samples instead of 4,800" in result.rows[1].reason
    assert result.keywords["num_workers"] == 0


class Endless(Sampler):
    def __iter__(self):
        return iter(range(10**6))


@pytest.mark.parametrize(
    ("keywords", "samples"),
    [
        ({"batch_size": 4}, 10),
        ({"batch_size": 4, "drop_last": True}, 8),
        ({"batch_size": None}, 10),
        ({"batch_sampler": [[0, 1], [2]]}, None),
        ({"sampler": Endless()}, None),
    ],
)
def test_the_samples_of_an_epoch_are_read_off_a_map_style_loader(keywords, samples):
    assert loader_look._map_style_samples(DataLoader(TensorDataset(torch.zeros(10, 1)), **keywords)) == samples


# --- manners --------------------------------------------------------------------------------------------------------


def test_no_warning_and_the_random_state_and_the_model_stay(monkeypatch):
    model = torch.nn.Linear(2, 1)
    weight, state = model.weight.detach().clone(), torch.get_rng_state()

    def step(batch):
        model.weight.data.add_(torch.rand(1))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = tuned(
            lambda **k: DataLoader(Slow(), batch_size=4, shuffle=True, **k),
            step,
            workers=(0, os.cpu_count() + 2),
            budget_s=2,
            model=model,
        )
    assert result.rows[1].num_workers == os.cpu_count() + 2 and result.rows[1].first_batch_s > 0
    assert torch.equal(model.weight, weight) and torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"make_loader": 3}, TypeError, "make_loader must be a function"),
        ({"make_loader": lambda **k: DataLoader(Slow())}, ValueError, "did not pass on num_workers=1"),
        ({"make_loader": lambda **k: [1]}, ValueError, "did not pass on num_workers=0"),
        ({"step": None}, TypeError, "cannot be called"),
        ({"workers": (1, -1)}, ValueError, "workers=-1 must be a whole number"),
        ({"budget_s": -1}, ValueError, "budget_s"),
    ],
)
def test_bad_arguments_are_named(arguments, error, says):
    whole = {
        "make_loader": lambda **k: DataLoader(Slow(), **k),
        "step": lambda batch: None,
        "workers": (1,),
        "budget_s": 5,  # on a busy machine the first look may use up a shorter one, and no workers are tried
        **arguments,
    }
    with pytest.raises(error, match=says):
        tuned(whole.pop("make_loader"), whole.pop("step"), **whole)


def table():
    rows = (
        LoaderTrial({"num_workers": 0, "pin_memory": False}, samples_per_s=100.0, epoch_samples=640),
        LoaderTrial({"num_workers": 2, "persistent_workers": True}, samples_per_s=180.0, spread=0.02, error=0.01),
        LoaderTrial({"num_workers": 1, "persistent_workers": False, "prefetch_factor": 4}, "skipped", "<too slow>"),
    )
    return TunedLoader(rows, rows[1], dict(rows[1].keywords), 200.0, True, 3.0, "search", ("a note",))


def test_the_table_reads_as_text_and_as_html():
    text, page = repr(table()), table()._repr_html_()
    assert text.startswith("Best: 2 workers, 180 samples/s, 1.8 times as fast as without workers. It is 90 %")
    assert "1 worker, prefetch 4, new each epoch" in text and "n/a" in text and "- a note" in text
    assert "&lt;too slow&gt;" in page and "a note" in page


def test_the_drawing_has_a_bar_for_each_measured_setting_and_the_ceiling():
    fig = table().draw()
    (ax,) = fig.axes
    assert [label.get_text() for label in ax.get_yticklabels()] == ["0 workers", "2 workers"]
    assert [bar.get_width() for bar in ax.patches] == [100.0, 180.0]
    assert any(list(line.get_xdata()) == [200.0, 200.0] for line in ax.lines)
    assert ax.get_xlim()[1] > 200 and "ceiling is 200 samples/s" in fig.alt


# --- real time ------------------------------------------------------------------------------------------------------


class Paced(Dataset):
    def __len__(self):
        return 4000

    def __getitem__(self, index):
        time.sleep(0.008)
        return torch.zeros(4)


@pytest.mark.alone
def test_real_workers_feed_a_real_step():
    """Sleeping, not computing: 32 ms to load a batch, 10 ms to use it. Four workers feed it, one cannot."""
    begun = time.perf_counter()
    result = tuned(lambda **k: DataLoader(Paced(), batch_size=4, **k), lambda b: time.sleep(0.01), budget_s=6)
    assert time.perf_counter() - begun < 7
    assert 3 <= result.best.num_workers <= 8
    assert result.samples_per_s > 2 * result.rows[0].samples_per_s
    assert multiprocessing.active_children() == []
