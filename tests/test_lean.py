"""Lesson 05's ablation: on a fake clock where speed is judged, on tiny real jobs where losses and memory are."""

import logging
import os
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from course_utils import lean, lean_jobs, lean_run, memory_model
from course_utils.checkpointing import checkpointed_blocks
from course_utils.lean_jobs import Job
from course_utils.lean_run import Run
from course_utils.lean_table import Ablation, Row
from course_utils.plots import render


class Clock:
    """A clock that only the models below move."""

    def __init__(self):
        self.now, self.order = 100.0, []

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(lean, "time", clock)
    monkeypatch.setattr(lean_run, "time", clock)
    return clock


class Layer(nn.Linear):
    """A linear layer with a forward of its own: torch 2.11 does not compile what `nn.Linear().compile()` asks for."""

    def forward(self, x):
        return super().forward(x)


class Timed(nn.Module):
    """A linear layer whose forward pass takes `cost` seconds of the clock, times what `wobble` says."""

    def __init__(self, clock, cost=0.1):
        super().__init__()
        self.layer, self.clock, self.cost, self.name = Layer(4, 3), clock, cost, "baseline"
        self.wobble = lambda: 1.0

    def forward(self, x):
        self.clock.now += self.cost * self.wobble()
        self.clock.order.append(self.name)
        return self.layer(x)


def timed_job(clock):
    generator = torch.Generator().manual_seed(3)
    batches = tuple((torch.randn(10, 4, generator=generator), torch.arange(10) % 3) for _ in range(3))
    return Job("timed", lambda _: Timed(clock), 4, nn.Linear, nn.functional.cross_entropy, batches, torch.device("cpu"))


def taking(cost, name="switch", wobble=None):
    """A switch after which a step takes `cost` seconds."""

    def switch(training):
        training.model.cost, training.model.name = cost, name
        if wobble is not None:
            training.model.wobble = wobble

    return switch


def ablate(switches, job, **options):
    return lean.ablate(switches, job, progress=False, **options)


# Speed


def test_each_switch_is_compared_with_the_baseline(clock):
    result = ablate(
        {"fast": taking(0.05), "same": taking(0.1), "slow": taking(0.2)}, timed_job(clock), steps=18, budget_s=100
    )
    assert [row.name for row in result.rows] == ["baseline", "fast", "same", "slow"]
    assert result.row("fast").speedup == pytest.approx(2.0)
    assert result.row("fast").samples_per_s == pytest.approx(200)
    assert result.row("slow").speedup == pytest.approx(0.5)
    assert [row.gained for row in result.rows] == [False, True, False, False]
    assert [row.lost for row in result.rows] == [False, False, False, True]
    assert result.best is result.row("fast")
    assert result.baseline.noise == pytest.approx(0, abs=1e-9)
    assert "2.00 ×, faster" in result.row("fast").verdict
    assert "no gain (within noise" in result.row("same").verdict
    assert "0.50 ×, slower" in result.row("slow").verdict
    assert all(row.rounds == 9 for row in result.rows)


def test_runs_take_turns(clock):
    ablate({"a": taking(0.1, "a"), "b": taking(0.1, "b")}, timed_job(clock), steps=4, together=(), budget_s=1000)
    # A step to warm up and the baseline's two; two for each switch; then four rounds.
    assert clock.order == ["baseline"] * 3 + ["a", "a", "b", "b"] + ["baseline", "a", "b"] * 4


def test_a_machine_that_slows_down_is_no_ones_loss(clock):
    """The machine is twice as slow after a while: rounds compare like with like."""
    start = clock.now
    slowing = lambda: 1.0 if clock.now < start + 8 else 2.0  # noqa: E731
    job = timed_job(clock)
    whole = Job(**{**vars(job), "make_model": lambda _: make(clock, slowing)})
    result = ablate({"fast": taking(0.08)}, whole, steps=90, budget_s=1000)
    assert result.row("fast").speedup == pytest.approx(1.25, rel=0.05)
    assert result.row("fast").gained
    assert result.baseline.noise > 0.2


def make(clock, wobble):
    model = Timed(clock)
    model.wobble = wobble
    return model


def test_noise_is_no_gain(clock):
    draw = random.Random(5)
    wobble = lambda: draw.uniform(0.7, 1.3)  # noqa: E731
    job = Job(**{**vars(timed_job(clock)), "make_model": lambda _: make(clock, wobble)})
    result = ablate({f"n{i}": taking(0.1) for i in range(8)}, job, steps=9, budget_s=1000)
    assert not any(row.gained for row in result.rows), result
    assert result.baseline.noise > 0.05
    assert result.row("n0").speedup_low < 1 < result.row("n0").speedup_high
    assert result.best is result.baseline


def test_a_slow_switch_gets_few_steps_and_says_so(clock):
    begun = clock.now
    result = ablate({"slow": taking(4.0), "fast": taking(0.05)}, timed_job(clock), budget_s=20)
    slow = result.row("slow")
    assert slow.steps == 2
    assert slow.verdict.startswith("0.025 ×, slower")
    assert slow.verdict.endswith("2 steps only")
    assert result.row("fast").gained
    assert result.row("fast").rounds >= 5
    assert clock.now - begun < 25
    assert slow.loss_steps == 4  # with the two that are not measured


@pytest.mark.parametrize("budget_s", [10, 40])
def test_the_budget_holds(clock, budget_s):
    begun = clock.now
    ablate({f"s{i}": taking(0.05) for i in range(4)}, timed_job(clock), budget_s=budget_s)
    assert 0.6 * budget_s < clock.now - begun < budget_s + 1


def test_steps_are_the_most_that_are_measured(clock):
    result = ablate({"a": taking(0.1)}, timed_job(clock), steps=20, together=(), budget_s=1000)
    assert [row.steps for row in result.rows] == [20, 20]
    few = ablate({"a": taking(0.09)}, timed_job(clock), steps=2, together=(), budget_s=1000).row("a")
    assert (few.steps, few.rounds, few.gained) == (2, 2, False)
    assert "too few rounds to tell" in few.verdict


# Combinations


def faster_by(factor, name):
    def switch(training):
        training.model.cost *= factor
        training.model.name += "+" + name

    return switch


def test_what_gained_is_combined(clock):
    switches = {"a": faster_by(0.5, "a"), "nothing": faster_by(1, "nothing"), "b": faster_by(0.8, "b")}
    result = ablate(switches, timed_job(clock))
    assert result.rows[-1].name == "a + b"
    assert result.rows[-1].switches == ("a", "b")
    assert result.rows[-1].speedup == pytest.approx(2.5)
    assert result.best is result.rows[-1]
    assert "baseline+a+b" in clock.order


@pytest.mark.parametrize(
    ("together", "names"),
    [
        (None, []),
        ((), []),
        ("all", ["a + slow + nothing"]),
        ([("slow", "a"), ["a", "nothing"]], ["slow + a", "a + nothing"]),
    ],
)
def test_combinations_as_asked_for(clock, together, names):
    switches = {"a": faster_by(0.5, "a"), "slow": faster_by(2, "slow"), "nothing": faster_by(1, "nothing")}
    result = ablate(switches, timed_job(clock), together=together)
    assert [row.name for row in result.rows[4:]] == names


def test_of_two_that_set_the_same_the_fastest_is_combined(clock):
    def with_optimizer(factor, name):
        def switch(training):
            faster_by(factor, name)(training)
            training.make_optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.1)

        return switch

    switches = {"sgd": with_optimizer(0.9, "sgd"), "sgd2": with_optimizer(0.5, "sgd2"), "b": faster_by(0.8, "b")}
    assert ablate(switches, timed_job(clock)).rows[-1].name == "sgd2 + b"
    with pytest.raises(ValueError, match="sgd and sgd2 both set make_optimizer"):
        ablate(switches, timed_job(clock), together=[("sgd", "sgd2")])


def test_a_new_model_comes_first_whatever_the_order(clock):
    def mark(training):
        training.model.marked = True

    def replace(training):
        training.model = Timed(clock, 0.05)

    job = timed_job(clock)
    training, changes = lean_run._applied(job, [mark, replace])
    assert training.model.marked
    assert training.model.cost == 0.05
    assert changes == {"model"}

    def wrap(training):
        training.model = nn.Sequential(training.model)

    training, changes = lean_run._applied(job, [mark, wrap])
    assert training.model[0].marked
    assert changes == frozenset()


# Failures, and what is left out


def test_a_switch_that_raises_is_a_row(clock):
    def wrong(training):
        raise ValueError("this device has no such thing\nand more")

    def breaks_later(training):
        training.loss = lambda output, targets: output.sum().reshape(1, 1) @ torch.ones(2, 2)

    def too_large(training):
        def loss(output, targets):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

        training.loss = loss

    switches = {"wrong": wrong, "later": breaks_later, "large": too_large, "fast": taking(0.05)}
    result = ablate(switches, timed_job(clock))
    assert result.row("wrong").verdict == "failed: ValueError: this device has no such thing"
    assert result.row("later").verdict.startswith("failed: RuntimeError: ")
    assert result.row("large").verdict.startswith("failed: OutOfMemoryError: CUDA out of memory")
    assert result.row("large").samples_per_s is None
    assert result.row("fast").gained
    assert "n/a" in repr(result)


def test_the_baselines_own_error_passes_through(clock):
    def loss(output, targets):
        raise ZeroDivisionError("the job itself")

    job = Job(**{**vars(timed_job(clock)), "loss": loss})
    with pytest.raises(ZeroDivisionError, match="the job itself"):
        ablate({"a": taking(0.1)}, job)


def test_after_a_fatal_error_nothing_goes_on(clock):
    def assert_on_device(training):
        raise RuntimeError("CUDA error: device-side assert triggered")

    with pytest.raises(RuntimeError, match="device-side"):
        ablate({"bad": assert_on_device, "a": taking(0.1)}, timed_job(clock))


def test_skipped_switches_are_shown_with_their_reason(clock):
    called = []
    result = ablate({"a": taking(0.1), "long": called.append}, timed_job(clock), skip={"long": "a minute here"})
    assert result.row("long").verdict == "skipped: a minute here"
    assert called == []


def test_only_failures_leave_the_baseline(clock):
    result = ablate({"bad": lambda training: 1 / 0}, timed_job(clock))
    assert result.baseline.samples_per_s == pytest.approx(100)
    assert result.row("bad").failure == "ZeroDivisionError: division by zero"


@pytest.mark.parametrize(
    ("switches", "options", "message"),
    [
        ({}, {}, "at least one"),
        ([lean.amp], {}, "dictionary"),
        ({"amp": "amp"}, {}, "must be a function"),
        ({"baseline": lean.amp}, {}, "run without any"),
        ({"a + b": lean.amp}, {}, "joins several"),
        ({"amp": lean.amp}, {"together": "amp"}, "neither"),
        ({"amp": lean.amp}, {"together": [("amp", "x")]}, "'x' is none of the switches"),
        ({"amp": lean.amp}, {"skip": {"x": "y"}}, "'x' is none of the switches"),
        ({"amp": lean.amp}, {"steps": 1}, "steps=1"),
        ({"amp": lean.amp}, {"budget_s": 0}, "budget_s=0"),
    ],
    ids=range(10),
)
def test_bad_input_is_named(clock, switches, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        ablate(switches, timed_job(clock), **options)


# State


def precision():
    return torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark, torch.get_num_threads()


def test_a_setting_of_the_process_holds_for_its_switch_alone(clock):
    before, parts = precision(), [part.fp32_precision for part in lean_run._precisions()]
    seen = {"baseline": set(), "high": set()}

    def high(training):
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = True
        training.model.name = "high"

    job = timed_job(clock)

    def loss(output, targets):
        seen[clock.order[-1]].add(precision()[:2])
        return nn.functional.cross_entropy(output, targets)

    ablate({"high": high}, Job(**{**vars(job), "loss": loss}), steps=4)
    assert seen == {"baseline": {before[:2]}, "high": {("high", True)}}
    assert precision() == before
    assert [part.fp32_precision for part in lean_run._precisions()] == parts


def test_random_state_and_settings_survive_an_interrupt(clock):
    def stop(training):
        torch.set_float32_matmul_precision("medium")
        torch.rand(3), random.random(), np.random.rand()
        raise KeyboardInterrupt

    before = precision()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = random.random(), np.random.rand(), torch.rand(1).item()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    with pytest.raises(KeyboardInterrupt):
        ablate({"stop": stop}, timed_job(clock))
    assert precision() == before
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == expected


# Compiling


def compiled(training):
    training.model.layer.compile(backend="aot_eager")


def test_compiling_is_cold_apart_and_leaves_nothing(clock, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folders = []

    def backend(graph, inputs):
        folders.append(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        clock.now += 7.0  # compiling takes so long
        return graph

    def compile_slowly(training):
        training.model.layer.compile(backend=backend)
        training.model.cost = 0.05

    job, before = timed_job(clock), os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    curve(job, compile_slowly, steps=1)  # what was compiled before must not help
    folders.clear()
    result = ablate({"a": taking(0.1), "compiled": compile_slowly}, job, together=[("a", "compiled")], budget_s=20)
    row = result.row("compiled")
    # Compiled in both runs: the second does not find what the first has made.
    assert len(folders) == 2
    assert len(set(folders)) == 2
    assert all(folder.startswith(str(tmp_path)) for folder in folders)
    assert not any(Path(folder).exists() for folder in folders)
    assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == before
    assert row.compile_s == pytest.approx(7.0)
    assert row.speedup == pytest.approx(2.0)
    assert row.break_even_steps == pytest.approx(7.0 / 0.05)
    assert row.compiling == "7.0 s, pays after 140 steps"
    assert row.rounds == 9  # compiling has not eaten the budget
    assert result.row("a").compile_s is None
    assert result.row("a").compiling == "none"
    # "a" sets the cost back to the baseline's only if it comes last: here it comes first.
    assert result.row("a + compiled").compile_s == pytest.approx(7.0)


def test_a_compiled_run_that_gains_nothing_never_pays(clock):
    result = ablate({"compiled": compiled}, timed_job(clock), steps=5)
    row = result.row("compiled")
    assert row.compile_s is not None
    assert row.compiling.endswith("never pays")
    assert row.peak_bytes is None  # a compiled step cannot be watched on a CPU
    assert result.baseline.peak_bytes is not None


@pytest.mark.parametrize(
    "way",
    [
        lambda training: training.model.compile(),
        compiled,
        lambda training: setattr(training, "model", torch.compile(training.model)),
        lambda training: setattr(training, "loss", torch.compile(training.loss)),
        lambda training: setattr(training, "step", torch.compile(training.step)),
    ],
    ids=["in place", "a block", "around", "loss", "step"],
)
def test_every_way_to_compile_is_noticed(clock, way):
    training = timed_job(clock).training()
    assert not lean_run._compiles(training)
    way(training)
    assert lean_run._compiles(training)


def test_a_compiler_that_is_missing_is_a_row(clock):
    def missing(graph, inputs):
        raise RuntimeError("No working C++ compiler found in torch._inductor.config.cpp.cxx")

    result = ablate({"compiled": lambda training: training.model.layer.compile(backend=missing)}, timed_job(clock))
    assert "No working C++ compiler" in result.row("compiled").failure
    assert result.row("compiled").compiling == "n/a"


def test_only_the_known_line_of_torchs_log_is_held_back():
    record = logging.LogRecord("torch", logging.WARNING, "f", 1, "No CUDA runtime is found, using %s", ("x",), None)
    assert not lean_run._not_about_cuda_home(record)
    record.msg, record.args = "another", ()
    assert lean_run._not_about_cuda_home(record)


@pytest.mark.parametrize(
    ("times", "steps"), [((60, 0.2, 0.1), 600), ((0, 0.2, 0.1), 0), ((60, 0.1, 0.1), None), ((60, 0.1, 0.2), None)]
)
def test_break_even(times, steps):
    assert lean.break_even_steps(*times) == (steps if steps is None else pytest.approx(steps))


@pytest.mark.parametrize("bad", [-1, float("nan"), float("inf"), "1", None, True])
def test_break_even_wants_seconds(bad):
    with pytest.raises(ValueError, match="eager_s="):
        lean.break_even_steps(1, bad, 1)


# The real jobs, tiny


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    generator = torch.Generator().manual_seed(0)
    images = [(torch.randn(3, 48, 48, generator=generator), index % 4) for index in range(64)]
    data = SimpleNamespace(classes=list("abcd"))

    class Images(torch.utils.data.Dataset):
        classes = data.classes

        def __len__(self):
            return len(images)

        def __getitem__(self, index):
            return images[index]

    return {
        "images": lean.image_job("cpu", data=Images(), width=8, image_size=48, batch_size=8, progress=False),
        "transformer": lean.transformer_job("cpu", width=32, length=16, batch_size=8),
    }


def curve(job, switch=None, steps=6):
    training = job.training()
    if switch is not None:
        switch(training)
    training.start()
    training.run(job.batches, steps)
    return torch.stack(training.losses), training


def without_inductor(monkeypatch, backend="aot_eager"):
    """Capture and differentiate the same graphs, but do not generate code: that would take minutes."""
    in_place, around = nn.Module.compile, torch.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self: in_place(self, backend=backend))
    # In place compiling calls it with the backend above.
    monkeypatch.setattr(torch, "compile", lambda model, **options: around(model, **({"backend": backend} | options)))


# The largest difference from the plain run, as a share of its loss. The others compute the same numbers in the same
# order; these sum up in another order, or round to 16 bits.
TOLERANCES = {"amp": 0.02, "channels_last": 1e-4, "fused": 1e-4, "foreach": 1e-5, "compiled": 1e-4}


@pytest.mark.parametrize(
    ("which", "name"),
    [
        (which, name)
        for which in ("images", "transformer")
        for name in lean.SWITCHES
        if name != "smaller" and (which, name) != ("images", "compiled_blocks")  # "compiled" has the same graphs in it
    ],
)
def test_the_loss_curve_is_the_same_with_each_switch(jobs, which, name, monkeypatch):
    # Lesson 05 runs Inductor, and its table shows the losses.
    without_inductor(monkeypatch)
    job, switch = jobs[which], lean.SWITCHES[name]
    torch._dynamo.reset()
    plain, _ = curve(job)
    if (which, name) == ("transformer", "channels_last"):
        with pytest.raises(RuntimeError, match="rank 4"):
            curve(job, switch)
        return
    changed, _ = curve(job, switch)
    tolerance = TOLERANCES.get(name.removesuffix("_blocks"), 1e-7)
    assert ((changed - plain).abs() / plain).max() <= tolerance
    if name in ("amp", "channels_last") and which == "images":
        assert not torch.equal(changed, plain)


def test_every_switch_does_what_it_says(jobs):
    job = jobs["images"]
    made = {name: switch for name, switch in lean.SWITCHES.items() if "compiled" not in name}
    trainings = {name: curve(job, switch, steps=1)[1] for name, switch in made.items()}
    plain = curve(job, steps=1)[1]
    assert trainings["amp"].autocast_dtype is torch.bfloat16  # a CPU's
    assert not trainings["amp"].scaler.is_enabled()  # bfloat16 needs no scaling
    weight = trainings["channels_last"].model[4].main[0].weight
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert len(checkpointed_blocks(trainings["checkpointed"].model)) == 4
    assert trainings["fused"].optimizer.defaults["fused"] is True
    assert trainings["foreach"].optimizer.defaults["foreach"] is True
    assert trainings["for_loop"].optimizer.defaults["foreach"] is False
    assert trainings["fewer_syncs"].item_every == 50
    count = lambda training: sum(parameter.numel() for parameter in training.model.parameters())  # noqa: E731
    assert count(trainings["smaller"]) < count(plain) / 3
    trainings["keep_zeros"].optimizer.zero_grad(set_to_none=trainings["keep_zeros"].set_to_none)
    assert all(parameter.grad is not None for parameter in trainings["keep_zeros"].model.parameters())
    assert plain.set_to_none


@pytest.mark.parametrize(
    ("which", "name", "graphs"),
    [("images", "compiled", 1), ("images", "compiled_blocks", 4), ("transformer", "compiled", 1)],
)
def test_the_compiled_switches_compile_what_they_say(jobs, which, name, graphs, monkeypatch):
    made = []
    without_inductor(monkeypatch, lambda graph, inputs: made.append(graph) or graph)
    torch._dynamo.reset()
    curve(jobs[which], lean.SWITCHES[name], steps=2)
    assert len(made) == graphs


def test_equal_blocks_are_compiled_once(jobs):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    training = jobs["transformer"].training()
    for block in training.model.blocks:
        block.compile(backend=backend)
    training.start()
    training.run(jobs["transformer"].batches, 2)
    assert len(graphs) == 1


def test_the_loss_is_read_as_often_as_the_switch_says(jobs, monkeypatch):
    read = []
    item = torch.Tensor.item
    monkeypatch.setattr(torch.Tensor, "item", lambda self: read.append(self.shape) or item(self))
    job = jobs["transformer"]

    def every(steps):
        def switch(training):
            training.item_every = steps
            training.make_optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # AdamW reads its steps

        return switch

    for steps, expected in ((1, 7), (3, 2), (0, 0)):
        read.clear()
        curve(job, every(steps), steps=7)
        assert len(read) == expected


def test_two_runs_of_a_job_are_equal_and_it_learns(jobs):
    for job in jobs.values():
        first, _ = curve(job)
        second, _ = curve(job)
        assert torch.equal(first, second)
    _, training = curve(jobs["transformer"], steps=80)
    last = training.loss(training.model(jobs["transformer"].batches[0][0]), jobs["transformer"].batches[0][1])
    assert last < 0.9 * training.losses[0]
    assert len(training.losses) == lean_jobs.LOSSES_KEPT


def test_the_table_of_real_jobs(jobs):
    switches = {name: lean.SWITCHES[name] for name in ("keep_zeros", "smaller", "checkpointed")}
    result = ablate(switches, jobs["images"], steps=4, together=())
    base = result.baseline
    assert base.loss_difference == 0
    assert result.row("keep_zeros").loss_difference == 0
    assert result.row("smaller").loss_difference > 0.001
    assert result.row("smaller").last_loss != base.last_loss
    assert result.row("smaller").peak_bytes < 0.6 * base.peak_bytes
    assert result.row("checkpointed").peak_bytes <= base.peak_bytes
    assert base.loss_steps == 6
    assert result.device == "CPU"
    assert result.torch_version == torch.__version__


def test_gradients_that_are_kept_take_memory(jobs):
    job = jobs["transformer"]
    result = ablate({"keep_zeros": lean.keep_zeros}, job, steps=2, together=())
    weights = sum(parameter.nbytes for parameter in job.training().model.parameters())
    assert 0.5 * weights < result.row("keep_zeros").peak_bytes - result.baseline.peak_bytes <= weights


def test_the_peak_is_what_is_predicted(jobs):
    job = jobs["transformer"]
    row = ablate({"item": lean.fewer_syncs}, job, steps=2, together=()).baseline
    training = job.training()
    predicted = memory_model.predict_memory(
        training.model, job.batches[0], job.loss, training.make_optimizer, batch_sizes=(4, 8)
    )
    assert row.peak_bytes == pytest.approx(predicted.at(job.batch_size).peak_bytes, rel=0.03)


def test_on_a_gpu_the_allocator_is_read_and_other_runs_are_left_out(jobs, monkeypatch):
    job = jobs["transformer"]
    run = Run("x", {}, SimpleNamespace(device=torch.device("cuda"), batches=job.batches, batch_size=8))
    run._training = job.training()
    run._training.start()
    weights = sum(lean_run._storages(run._training.model))
    calls = []
    monkeypatch.setattr(lean_run, "synchronize", calls.append)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 10_000_000 + weights)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: calls.append("reset"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 12_000_000 + weights)
    run.first_steps()
    assert run.runs, run.failure
    assert run._peak_bytes == 2_000_000 + weights + sum(tensor.nbytes for tensor in job.batches[0])
    assert calls == [torch.device("cuda")] * 2 + ["reset"] + [torch.device("cuda")] * 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda data: lean.image_job("cpu", data=data, batch_size=17, progress=False), "needs 68 images"),
        (lambda data: lean.image_job("cpu", data=data, width=0, progress=False), "width=0"),
        (lambda data: lean.image_job("nowhere", data=data), "nowhere"),
        (lambda data: lean.transformer_job("cpu", blocks=1.5), "blocks=1.5"),
        (lambda data: lean.transformer_job("cpu", width=100).training(), "multiple"),
    ],
    ids=range(5),
)
def test_a_job_that_cannot_be_is_refused(make, message):
    data = torch.utils.data.TensorDataset(torch.rand(64, 3, 48, 48), torch.arange(64) % 3)
    data.classes = list("abc")
    with pytest.raises(ValueError, match=message):
        make(data)


def test_batches_hold_every_class():
    data = torch.utils.data.TensorDataset(torch.rand(80, 3, 8, 8), torch.arange(80) // 20)  # sorted, as a folder's are
    data.classes = list("abcd")
    job = lean.image_job("cpu", data=data, width=4, batch_size=8, progress=False)
    assert [sorted(targets.tolist()) for _, targets in job.batches] == [[0, 0, 1, 1, 2, 2, 3, 3]] * 4
    assert repr(job) == "Job images: width 4, 4 batches of 8 × 3 × 8 × 8 on cpu"


# Tables and drawings


def sample(**changes):
    rows = (
        Row("baseline", (), 100.0, 3.0, 1.0, 1.0, 1.0, 0.04, 9, 90, 30 << 20, (2.0, 1.5), 0.0, 2),
        Row("amp", ("amp",), 150.0, 3.0, 1.5, 1.4, 1.6, 0.07, 9, 90, 20 << 20, (2.0, 1.4), 0.05, 2),
        Row("channels_last + fused + fewer_syncs", ("a", "b"), 99.0, 1.0, 0.99, 0.9, 1.1, 0.1, 9, 90, None, (2.0,)),
        Row("<b>bad</b>", ("bad",), failure="RuntimeError: <i>no</i>"),
    )
    return Ablation(**{"job": "images", "device": "CPU", "rows": rows, "seconds": 20.0, "torch_version": "2"} | changes)


def test_the_table_says_it_in_words():
    text = repr(sample())
    assert "1.50 ×, faster (1.40 to 1.60)" in text
    assert "0.99 ×, no gain (within noise: 0.90 to 1.10)" in text
    assert "1.00 ×, noise ± 4 %" in text
    assert "5 % in 2 steps" in text
    assert "loss 2.000 to 1.500 in 2 steps" in text
    assert "&lt;i&gt;no&lt;/i&gt;" in sample()._repr_html_()
    assert "<b>bad" not in sample()._repr_html_()
    assert repr(sample().row("amp")) == "amp: 150.0 samples/s, 1.50 ×, faster (1.40 to 1.60)"
    with pytest.raises(ValueError, match="no row 'x': there are baseline, amp"):
        sample().row("x")


def test_a_loss_that_is_not_finite_is_said():
    assert lean_run._difference([1.0, float("nan")], [1.0, 2.0]) == float("inf")
    assert lean_run._difference([1.0, 2.5], [1.0, 2.0]) == 0.25
    assert lean_run._difference([], []) is None


def test_the_drawing_says_what_it_shows():
    figure = sample().draw()
    assert "The fastest is amp: 1.50 ×, faster" in figure.alt
    assert "throughput, with noise: baseline 100 samples/s, amp 150 samples/s" in figure.alt
    assert "peak memory: baseline 30.0 MiB, amp 20.0 MiB" in figure.alt
    speed, memory = figure.axes
    assert len(speed.get_yticks()) == 4
    assert len(memory.get_yticks()) == 0
    assert render(figure).png.startswith(b"\x89PNG")
    assert "No switch gained more than the noise." in sample(rows=sample().rows[:1]).draw().alt


def test_a_later_group_is_shown_at_the_pace_of_the_first():
    row = lean._paced(lean.Row("late", ("late",), samples_per_s=100.0, spread=4.0, speedup=2.0), 0.5)
    assert (row.samples_per_s, row.spread, row.speedup) == (50.0, 2.0, 2.0)
    assert lean._paced(lean.Row("failed", failure="no compiler"), 0.5).samples_per_s is None
