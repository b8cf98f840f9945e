"""The training job: its knobs, what it counts, and that it leaves the machine as it found it."""

from __future__ import annotations

import functools
import html
import inspect
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import Dataset, Subset, TensorDataset
from torchvision.datasets import ImageFolder

from course_utils import watch as watch_module
from course_utils import workload
from course_utils.checkpointing import checkpoint_blocks, checkpointed_blocks
from course_utils.images import class_count, open_data, train_transform
from course_utils.monitor import Device, Monitor, Reading
from course_utils.photos import PhotoSet, prepare_photos
from course_utils.recipe import Recipe, knobs
from course_utils.watch import Watch
from course_utils.workload import accuracy, small_resnet, train, training_loop

ROOT = Path(__file__).resolve().parents[1]
TINY = Recipe(image_size=48, steps=3)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> PhotoSet:
    folder = tmp_path_factory.mktemp("photos") / "set"
    return prepare_photos(folder, train_per_class=4, val_per_class=2, size_px=64, progress=False)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny convolutions on several threads spend their time waiting for each other when tests run side by side."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(recipe: Recipe = TINY, **options: Any) -> Any:
    return train(recipe, **{"monitor": False, "progress": False, "device": "cpu", **options})


class Tensors(Dataset[Any]):
    """Ready-made samples; `delay_s` is what each takes to load."""

    def __init__(self, samples: int = 64, delay_s: float = 0.0, fail_at: int | None = None) -> None:
        self.samples, self.delay_s, self.fail_at = samples, delay_s, fail_at
        self.classes = ["a", "b"]

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(self.delay_s)
        if index == self.fail_at:
            raise RuntimeError("this sample is broken")
        return torch.full((3, 8, 8), float(index % 2)), index % 2


class Probe(nn.Module):
    """A model that notes the batches it sees, and can take its time or fail."""

    def __init__(self, delay_s: float = 0.0, fail_at: int | None = None, error: BaseException | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.delay_s, self.fail_at, self.error = delay_s, fail_at, error
        self.sizes: list[int] = []
        self.dtypes: list[torch.dtype] = []

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.sizes.append(len(images))
        if self.error is not None and len(self.sizes) == self.fail_at:
            raise self.error
        time.sleep(self.delay_s)
        logits: torch.Tensor = self.linear(images.mean((2, 3)))
        self.dtypes.append(logits.dtype)
        return logits


def workers() -> list[psutil.Process]:
    return [child for child in psutil.Process().children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]


# Recipe


def test_the_defaults_are_the_naive_way() -> None:
    naive = Recipe()
    assert (naive.batch_size, naive.num_workers, naive.precision, naive.item_every) == (16, 0, "fp32", 1)
    assert not (naive.channels_last or naive.compile or naive.checkpoint)
    assert (naive.optimizer, naive.width) == ("default", None)
    assert not (naive.pin_memory or naive.non_blocking or naive.persistent_workers) and naive.prefetch_factor is None
    assert naive.changes() == {} and repr(naive) == "Recipe()"
    with pytest.raises(FrozenInstanceError):
        naive.batch_size = 32  # type: ignore[misc]


def test_but_changes_a_copy_and_the_repr_can_be_typed_in() -> None:
    better = Recipe().but(batch_size=64, num_workers=2, persistent_workers=True)
    assert Recipe().changes() == {} and better.changes() == {
        "batch_size": 64,
        "num_workers": 2,
        "persistent_workers": True,
    }
    assert eval(repr(better)) == better
    assert better.but(batch_size=16).changes() == {"num_workers": 2, "persistent_workers": True}
    with pytest.raises(TypeError, match="batchsize"):
        Recipe().but(batchsize=64)


def test_every_knob_has_a_meaning_and_a_default_that_it_takes() -> None:
    assert list(knobs()) == [field.name for field in fields(Recipe)]
    for name, knob in knobs().items():
        assert len(knob.meaning) > 10 and html.escape(knob.meaning) in Recipe()._repr_html_()
        assert knob.checked(name, getattr(Recipe(), name)) == getattr(Recipe(), name)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *(
            (name, value)
            for name in ("batch_size", "steps", "samples")
            for value in (0, -1, True, 1.5, "16", [16], 10**12)
        ),
        ("batch_size", None),
        ("image_size", 16),
        ("image_size", 5000),
        ("image_size", 64.0),
        ("num_workers", -1),
        ("num_workers", None),
        ("num_workers", 10_000),
        ("prefetch_factor", 0),
        ("persistent_workers", 1),
        ("pin_memory", "yes"),
        ("pin_memory", None),
        ("non_blocking", 0),
        ("cache", "disk"),
        ("cache", None),
        ("cache", True),
        ("augment", "gpu"),
        ("transfer", torch.uint8),
        ("decode", False),
        ("precision", "fp16"),
        ("precision", True),
        ("precision", None),
        ("precision", ["amp"]),
        ("channels_last", "yes"),
        ("channels_last", None),
        ("compile", 1),
        ("compile", "max-autotune"),
        ("checkpoint", 0),
        ("checkpoint", nn.Linear),
        ("optimizer", "adam"),
        ("optimizer", None),
        ("optimizer", True),
        ("width", 4),
        ("width", 1024),
        ("width", 16.0),
        ("item_every", -1),
        ("item_every", False),
        ("lr", 0),
        ("lr", -1e-3),
        ("lr", float("nan")),
        ("lr", float("inf")),
        ("lr", "0.1"),
        ("lr", True),
        ("lr", None),
        ("lr", 10**400),
        ("lr", torch.ones(2)),
        ("seed", -1),
        ("seed", 2**40),
        ("seed", 1.0),
    ],
)
def test_a_nonsense_value_is_refused_by_name(name: str, wrong: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name}=.* will not do: give ") as caught:
        Recipe(**{name: wrong})
    assert knobs()[name].meaning in str(caught.value) and len(str(caught.value)) < 300


def test_numbers_of_numpy_become_plain_ones() -> None:
    recipe = Recipe(batch_size=np.int64(32), lr=np.float32(0.5))  # type: ignore[arg-type]
    assert type(recipe.batch_size) is int and type(recipe.lr) is float
    assert recipe == Recipe(batch_size=32, lr=0.5)


@pytest.mark.parametrize("knob", [{"prefetch_factor": 2}, {"persistent_workers": True}])
def test_workers_options_without_workers_say_the_cure(knob: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(knob))}=.* needs workers: set num_workers to 1 or more"):
        Recipe(**knob)
    assert Recipe(num_workers=1, **knob).num_workers == 1


@pytest.mark.parametrize(
    ("knobs_given", "said"),
    [
        ({"cache": "device"}, "^cache='device' puts the images where .*: add augment='batch'$"),
        ({"decode": "gpu"}, "^decode='gpu' puts the images where .*: add augment='batch'$"),
        (
            {"cache": "device", "augment": "batch", "num_workers": 2},
            "^cache='device' leaves nothing .*: set num_workers=0",
        ),
        (
            {"cache": "ram", "augment": "batch", "decode": "gpu"},
            "^decode='gpu' decodes every batch anew.*: leave one out$",
        ),
        ({"cache": "device", "augment": "batch", "decode": "gpu"}, "^decode='gpu' decodes every batch anew"),
    ],
)
def test_knobs_that_contradict_each_other_say_the_cure(knobs_given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        Recipe(**knobs_given)
    assert "\n" not in str(caught.value)


def test_a_batch_for_the_device_is_sent_as_uint8() -> None:
    recipe = Recipe(augment="batch")
    assert recipe.changes() == {"augment": "batch", "transfer": "uint8"} and eval(repr(recipe)) == recipe
    naive = Recipe()
    assert (naive.cache, naive.augment, naive.transfer, naive.decode) == ("none", "sample", "float32", "full")
    assert Recipe(cache="ram", num_workers=2, decode="reduced").transfer == "float32"


# What train counts


def test_warm_up_is_not_counted_and_short_batches_count_as_what_they_hold() -> None:
    model = Probe()
    result = run(Recipe(steps=4), data=Tensors(40), model=model)
    assert result.warmup_steps == 2 and model.sizes == [16, 16, 8, 16, 16, 8]  # two epochs of 40
    assert (result.steps, result.samples, result.ended_by) == (4, 48, "steps")
    assert result.samples_per_s == pytest.approx(48 / result.seconds)
    assert result.seconds_per_step == pytest.approx(result.seconds / 4)


def test_samples_and_seconds_are_limits_too() -> None:
    result = run(Recipe(samples=33), data=Tensors(), model=Probe())
    assert (result.samples, result.ended_by) == (48, "samples")
    result = run(Recipe(steps=10**6), data=Tensors(), model=Probe(delay_s=0.01), seconds=0.2)
    assert result.ended_by == "time" and 0.2 <= result.seconds < 5 and 1 < result.steps < 30


def test_the_device_decides_what_the_recipe_leaves_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "_SAMPLES", {"cpu": 100})
    result = train(data=Tensors(), model=Probe(), device="cpu", monitor=False, progress=False)
    assert (result.samples, result.ended_by, result.recipe.image_size) == (112, "samples", 64)
    assert result.recipe.changes() == {"image_size": 64}
    assert workload._SECONDS["cpu"] <= 5 and workload._SECONDS["cuda"] >= 10  # ten utilisation samples of 1 s


def test_waiting_for_data_is_told_from_computing() -> None:
    starved = run(Recipe(batch_size=4, steps=5), data=Tensors(delay_s=0.01), model=Probe())
    fed = run(Recipe(batch_size=4, steps=5), data=Tensors(), model=Probe(delay_s=0.1))
    assert starved.data_wait_percent > 60 > 40 > fed.data_wait_percent
    assert starved.data_wait_s <= starved.seconds and starved.data_wait_s >= 5 * 4 * 0.01


def test_the_start_of_an_epoch_is_part_of_the_wait() -> None:
    class SlowStart:
        def __iter__(self) -> Any:
            time.sleep(0.05)
            yield torch.zeros(4), torch.zeros(4)

    with Watch(torch.device("cpu"), 1, 4, None, None, False, False) as watch:
        for images, _ in watch.batches(SlowStart()):  # every step is an epoch
            watch.count(images.sum(), len(images))
        result = watch.measurement(Recipe(), ())
    assert result.steps == 4 and 4 * 0.05 <= result.data_wait_s <= result.seconds


@pytest.mark.parametrize(("item_every", "shown"), [(1, 7), (3, 2), (0, 0)])
def test_item_is_called_as_often_as_the_recipe_says(
    item_every: int, shown: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []
    monkeypatch.setattr(Watch, "show", lambda self, loss: seen.append(loss))
    run(Recipe(item_every=item_every, steps=5), data=Tensors(), model=Probe())  # and two of warm-up
    assert len(seen) == shown and all(isinstance(loss, float) for loss in seen)


def test_amp_runs_on_the_cpu_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        full, mixed = Probe(), Probe()
        run(Recipe(steps=2), data=Tensors(), model=full)
        result = run(Recipe(steps=2, precision="amp", pin_memory=True, non_blocking=True), data=Tensors(), model=mixed)
    assert set(full.dtypes) == {torch.float32} and set(mixed.dtypes) == {torch.bfloat16}
    assert ["pin_memory was left off" in note or "bfloat16 is fast only on" in note for note in result.notes] == [
        True
    ] * 2


def test_float16_gets_its_loss_scaled_and_nothing_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    scalers: list[Any] = []
    monkeypatch.setattr(workload, "training_loop", lambda *parts: scalers.append(parts[3]))
    monkeypatch.setattr(Watch, "measurement", lambda *_: None)
    for dtype, precision in [(torch.float16, "amp"), (torch.bfloat16, "amp"), (torch.float16, "fp32")]:
        monkeypatch.setattr(workload, "low_precision", lambda _, dtype=dtype: dtype)
        run(Recipe(precision=precision), data=Tensors(), model=Probe())
    assert [scaler.is_enabled() for scaler in scalers] == [True, False, False]


def test_losses_repeat_for_a_seed(photos: PhotoSet) -> None:
    first = run(data=photos)
    torch.rand(7), random.random(), np.random.rand()  # what was drawn before has no say
    again, other = run(data=photos), run(TINY.but(seed=1), data=photos)
    assert (first.loss_start, first.loss_end) == (again.loss_start, again.loss_end)
    assert first.loss_start != other.loss_start
    two = TINY.but(num_workers=2, prefetch_factor=1)
    assert run(two, data=photos).loss_end == run(two, data=photos).loss_end


def test_less_cpu_work_leaves_the_losses_as_they_are(photos: PhotoSet) -> None:
    def losses(**changes: Any) -> tuple[float, float]:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = small_resnet(10, width=8)
        result = run(TINY.but(batch_size=8, **changes), data=photos, model=model)
        return result.loss_start, result.loss_end

    naive = losses()
    assert losses(cache="ram") == losses(transfer="uint8") == losses(cache="ram", transfer="uint8") == naive
    on_the_device = losses(augment="batch")
    assert on_the_device == losses(cache="ram", augment="batch") == losses(cache="device", augment="batch") != naive
    # Workers draw nothing for it either, so they change nothing.
    assert (
        losses(cache="ram", augment="batch", num_workers=2) == losses(augment="batch", num_workers=1) == on_the_device
    )
    assert losses(augment="batch", seed=1) != on_the_device


class Slow(Dataset[Any]):
    """PIL images that draw at random while they are read; each takes `delay_s`."""

    classes = ("a", "b")

    def __init__(self, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        random.random(), np.random.rand(), torch.rand(1)
        time.sleep(self.delay_s)
        return Image.new("RGB", (70, 60), (9 * index, 100, 200)), index % 2


def test_what_is_decoded_once_is_not_timed_but_told() -> None:
    recipe = Recipe(batch_size=8, image_size=48, steps=4)
    anew, cached = (run(recipe.but(cache=cache), data=Slow(0.02), model=Probe()) for cache in ("none", "ram"))
    assert anew.data_wait_s > 4 * 8 * 0.02 > 2 * cached.data_wait_s
    [note] = cached.notes
    assert note.startswith("cache='ram' holds 24 decoded images in 0 MiB of RAM; decoding them once took ")
    seconds = float(note.split("took ")[1].split(" s ")[0])
    assert seconds >= 0.4 and "before the measuring, which the throughput leaves out" in note and anew.notes == ()
    assert note in repr(cached)


@pytest.mark.parametrize("cache", ["none", "ram", "device"])
def test_the_random_state_is_put_back_whoever_draws(cache: str) -> None:
    def states() -> list[Any]:
        return [random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()]

    recipe = Recipe(batch_size=8, image_size=48, steps=2, cache=cache, augment="batch")
    failing, before = Probe(fail_at=2, error=RuntimeError("full")), states()
    losses = {run(recipe, data=Slow()).loss_end for _ in range(2)}
    assert states() == before and len(losses) == 1
    with pytest.raises(RuntimeError, match="full"):
        run(recipe, data=Slow(), model=failing)
    assert states() == before


def test_an_interrupted_cache_passes_on_the_interrupt(photos: PhotoSet) -> None:
    class Interrupted(Slow):
        def __getitem__(self, index: int) -> tuple[Image.Image, int]:
            if index == 5:
                raise KeyboardInterrupt
            return super().__getitem__(index)

    before, threads = torch.get_rng_state(), threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        run(Recipe(cache="ram"), data=Interrupted(), progress=True)
    assert torch.equal(torch.get_rng_state(), before) and threading.active_count() <= threads + 1


def test_a_cache_on_the_device_is_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe(cache="device", augment="batch", pin_memory=True)
    gpu = torch.device("cuda")
    assert not workload._loader(Tensors(), recipe, gpu).pin_memory  # type: ignore[arg-type]
    assert workload._loader(Tensors(), recipe.but(cache="ram"), gpu).pin_memory  # type: ignore[arg-type]
    assert "pin_memory was left off: the images are on the GPU already" in workload._notes(recipe, gpu)
    assert workload._notes(recipe.but(cache="ram"), gpu) == ()


def test_the_knobs_for_less_cpu_warn_of_nothing_on_a_cpu(photos: PhotoSet) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for recipe in (
            TINY.but(transfer="uint8", num_workers=1),
            TINY.but(augment="batch", decode="reduced"),
            TINY.but(cache="device", augment="batch", pin_memory=True, non_blocking=True),
        ):
            assert run(recipe, data=photos).samples == 40
    with pytest.raises(ValueError, match="needs an NVIDIA GPU, and this run is on the CPU"):
        run(TINY.but(decode="gpu", augment="batch"), data=photos)


def test_the_random_state_is_put_back(photos: PhotoSet) -> None:
    def states() -> list[Any]:
        return [random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()]

    class Drawing(Tensors):
        def __getitem__(self, index: int) -> Any:
            random.random(), np.random.rand(), torch.rand(1)
            return super().__getitem__(index)

    model = Probe()
    before = states()
    run(Recipe(steps=2), data=Drawing(), model=model)
    assert states() == before
    with pytest.raises(RuntimeError, match="broken"):
        run(Recipe(steps=9), data=Drawing(fail_at=3), model=model)
    assert states() == before


@pytest.mark.alone
def test_it_learns(tmp_path: Path) -> None:
    photos = prepare_photos(tmp_path / "set", train_per_class=16, val_per_class=8, size_px=96, progress=False)
    model = small_resnet(10, width=16)
    chance = accuracy(model, photos, image_size=48)
    result = run(Recipe(image_size=48, steps=60), data=photos, model=model)
    assert result.loss_end < 0.6 * result.loss_start
    assert accuracy(model, photos, image_size=48) > max(0.25, chance)


# The knobs of a leaner model


@pytest.fixture
def quick_compile(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """torch.compile without its code generation, which takes a minute on a CPU; lists the batch sizes it was given."""
    graphs: list[int] = []

    def backend(graph: Any, examples: Any) -> Any:
        graphs.append(next(len(one) for one in examples if one.dim() == 4 and not one.requires_grad))
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    yield graphs
    torch.compiler.reset()


LEAN = TINY.but(batch_size=8, width=8)
# How far a loss may be from the naive one. Sums in another order differ in their last bits, and each step of AdamW
# makes more of it; the steps of `checkpoint` and `forloop` are the same operations on a CPU.
TOLERANCES: list[tuple[dict[str, Any], float]] = [
    ({"checkpoint": True}, 0),
    ({"optimizer": "forloop"}, 0),
    ({"optimizer": "foreach"}, 1e-5),
    ({"optimizer": "fused"}, 1e-5),
    ({"channels_last": True}, 1e-3),
    ({"compile": True}, 1e-3),
    ({"item_every": 2}, 0),
    ({"channels_last": True, "checkpoint": True, "optimizer": "fused"}, 1e-3),
]


@pytest.mark.parametrize(("knob", "tolerance"), TOLERANCES, ids=[repr(Recipe(**knob)) for knob, _ in TOLERANCES])
def test_each_knob_trains_the_same(
    knob: dict[str, Any], tolerance: float, photos: PhotoSet, quick_compile: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    curves: list[list[torch.Tensor]] = []
    measure = Watch.measurement

    def noting(watch: Watch, *parts: Any) -> Any:
        curves.append(watch._losses)
        return measure(watch, *parts)

    monkeypatch.setattr(Watch, "measurement", noting)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        naive, lean = run(LEAN, data=photos), run(LEAN.but(**knob), data=photos)
    expected, found = (torch.stack(curve) for curve in curves)
    assert len(found) == 5 and torch.allclose(found, expected, rtol=tolerance, atol=0), (expected, found)
    assert (naive.steps, naive.samples) == (lean.steps, lean.samples) and bool(quick_compile) is ("compile" in knob)


def test_the_knobs_reach_torch(photos: PhotoSet, monkeypatch: pytest.MonkeyPatch, quick_compile: list[int]) -> None:
    seen: list[Any] = []

    def loop(model: Any, batches: Any, optimizer: Any, *rest: Any) -> None:
        once = [block.batchnorm_once for block in checkpointed_blocks(model)]
        seen.append((model, optimizer, once))
        training_loop(model, batches, optimizer, *rest)

    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv2d(3, 2, 3)
            self.layouts: list[bool] = []

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            self.layouts.append(images.is_contiguous(memory_format=torch.channels_last))
            return self.convolution(images).mean((2, 3))

    monkeypatch.setattr(workload, "training_loop", loop)
    for knob in [{}, {"channels_last": True}]:
        looks = Looks()
        run(Recipe(steps=1, **knob), data=Tensors(), model=looks)  # type: ignore[arg-type]
        weight = looks.convolution.weight
        assert {*looks.layouts, weight.is_contiguous(memory_format=torch.channels_last)} == {bool(knob)}
    ways = {"default": (None, None), "foreach": (True, None), "fused": (None, True), "forloop": (False, False)}
    for name, expected in ways.items():
        run(Recipe(steps=1, optimizer=name), data=Tensors(), model=Probe())
        group = seen[-1][1].param_groups[0]
        assert (group["foreach"], group["fused"]) == expected
    run(LEAN.but(steps=1, checkpoint=True), data=photos)
    run(LEAN.but(steps=1, width=None), data=photos)
    assert [once for *_, once in seen[-2:]] == [[True] * 4, []]
    assert [model[0].out_channels for model, *_ in seen[-2:]] == [8, workload.MODEL_WIDTH["cpu"]]
    assert not quick_compile


def test_the_width_is_told_and_is_not_for_a_given_model(photos: PhotoSet) -> None:
    assert run(LEAN.but(steps=1), data=photos).recipe.width == 8
    assert run(LEAN.but(steps=1, width=None), data=photos).recipe.width == workload.MODEL_WIDTH["cpu"]
    assert run(Recipe(steps=1), data=Tensors(), model=Probe()).recipe.width is None
    with pytest.raises(ValueError, match="width=8 is for the course's own model: leave it out"):
        run(LEAN, data=Tensors(), model=Probe())


def test_a_given_model_is_as_it_was_afterwards(quick_compile: list[int]) -> None:
    class Blocks(Probe):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.block = nn.Sequential(nn.Linear(2, 2))

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.block(super().forward(images))  # type: ignore[no-any-return]

    recipe = Recipe(steps=2, checkpoint=True)
    with pytest.raises(
        ValueError, match=r"blocks of small_resnet alone: call checkpoint_blocks\(model, kinds\) on your"
    ):
        run(recipe, data=Tensors(), model=Blocks())
    own = checkpoint_blocks(Blocks(), "block")
    run(recipe, data=Tensors(), model=own)
    assert len(checkpointed_blocks(own)) == 1  # who checkpointed it keeps it
    course = small_resnet(2, width=8)
    data = TensorDataset(torch.rand(40, 3, 48, 48), torch.zeros(40).long())
    run(recipe, data=data, model=course)
    assert checkpointed_blocks(course) == []
    run(recipe.but(checkpoint=False, compile=True), data=data, model=course)
    assert len(quick_compile) == 1 and not course._forward_hooks
    course(torch.rand(2, 3, 48, 48))
    assert len(quick_compile) == 1
    failing = small_resnet(2, width=8)
    failing[7].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run(recipe, data=data, model=failing)
    assert checkpointed_blocks(failing) == []


def test_compiling_is_told_apart_and_each_run_compiles(quick_compile: list[int]) -> None:
    with torch._dynamo.config.patch(recompile_limit=1):
        for batch_size in (8, 16, 12):
            result = run(Recipe(batch_size=batch_size, steps=3, compile=True), data=Tensors(40), model=Line())
    # The short batches that end an epoch are left out, not compiled too.
    assert quick_compile == [8, 16, 12] and result.samples == 36
    compiling, short = result.notes
    assert compiling.startswith("compiling took about ") and "which the throughput leaves out" in compiling
    assert short.startswith("with compile=True each epoch ends 4 samples early")
    assert len(run(Recipe(batch_size=8, steps=3, compile=True), data=Tensors(40), model=Line()).notes) == 1
    few = run(Recipe(batch_size=64, steps=1, compile=True), data=Tensors(40), model=Line())
    assert few.samples == 40  # a data set smaller than a batch is still trained on


class Line(nn.Module):
    """The smallest model to compile."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.linear(images.mean((2, 3)))  # type: ignore[no-any-return]


def test_what_the_warm_up_cost_beyond_its_steps() -> None:
    with Watch(torch.device("cpu"), 2, 4, None, None, False, False) as watch:
        for images, _ in watch.batches([(torch.zeros(4), torch.zeros(4))] * 8):
            time.sleep(0.2 if watch.all_steps == 0 else 0.01)
            watch.count(images.sum(), len(images))
        assert 0.1 < watch.extra_warmup_s() < 0.2 + watch._warmup_s - 0.2
        watch._warmup_s = 0.0
        assert watch.extra_warmup_s() == 0


@pytest.mark.parametrize(
    ("recipe", "device", "said"),
    [
        (Recipe(channels_last=True), "cuda", "channels_last is for tensor cores"),
        (Recipe(channels_last=True, precision="amp"), "cuda", ""),
        (Recipe(channels_last=True), "cpu", ""),
        (Recipe(optimizer="foreach"), "cuda", "what torch chooses by itself"),
        (Recipe(optimizer="foreach"), "cpu", "cannot help on a CPU"),
        (Recipe(optimizer="forloop"), "cpu", "what torch chooses by itself"),
        (Recipe(optimizer="forloop"), "cuda", ""),
        (Recipe(optimizer="fused"), "cpu", ""),
        (Recipe(optimizer="fused"), "cuda", ""),
    ],
)
def test_a_knob_that_cannot_help_says_so(recipe: Recipe, device: str, said: str) -> None:
    notes = workload._notes(recipe, torch.device(device))
    assert (said in notes[0] and len(notes) == 1) if said else notes == ()


# Workers


def test_loader_options_reach_the_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "usable_cpus", lambda: 1)
    loader = workload._loader(Tensors(), Recipe(), torch.device("cpu"))  # type: ignore[arg-type]
    assert (loader.num_workers, loader.prefetch_factor, loader.persistent_workers) == (0, None, False)
    recipe = Recipe(batch_size=8, num_workers=2, prefetch_factor=3, persistent_workers=True, pin_memory=True)
    loader = workload._loader(Tensors(), recipe, torch.device("cpu"))  # type: ignore[arg-type]
    assert (loader.batch_size, loader.num_workers, loader.prefetch_factor) == (8, 2, 3)
    assert loader.persistent_workers and not loader.pin_memory
    assert workload._loader(Tensors(), recipe, torch.device("cuda")).pin_memory  # type: ignore[arg-type]


def test_more_workers_than_cpus_are_not_passed_over_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "usable_cpus", lambda: 1)
    too_many = (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1) + 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's own warning, which does not say what to do, is replaced by the note
        result = run(Recipe(steps=1, num_workers=too_many), data=Tensors(), model=Probe())
    assert [note for note in result.notes if f"{too_many} workers share 1 usable CPU:" in note] and "note" in repr(
        result
    )
    assert run(Recipe(steps=1, num_workers=1), data=Tensors(), model=Probe()).notes == ()


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_end_with_the_run_and_with_an_error(persistent: bool) -> None:
    before = set(workers())
    recipe = Recipe(batch_size=4, steps=6, num_workers=2, persistent_workers=persistent)
    run(recipe, data=Tensors(16), model=Probe())
    assert set(workers()) <= before
    with pytest.raises(KeyboardInterrupt) as interrupted:
        run(recipe, data=Tensors(16), model=Probe(fail_at=5, error=KeyboardInterrupt()))
    assert set(workers()) <= before and interrupted.tb is not None  # though the traceback still holds every frame
    with pytest.raises(RuntimeError, match="this sample is broken") as broken:
        run(recipe, data=Tensors(16, fail_at=9), model=Probe())
    assert set(workers()) <= before and broken.tb is not None


SCRIPT = """
import sys, time, torch
from tests.test_workload import Probe, Tensors
from course_utils.workload import Recipe, train
print("ready", flush=True)
try:
    train(Recipe(num_workers=2, persistent_workers=True, steps=10**6), data=Tensors(delay_s=0.01), model=Probe(),
          device="cpu", progress=False)
except KeyboardInterrupt:
    import psutil, threading
    left = [child.pid for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    print("interrupted", left, [t.name for t in threading.enumerate() if not t.daemon][1:], flush=True)
"""


@pytest.mark.skipif(os.name != "posix", reason="signals as in a terminal")
def test_a_real_interrupt_ends_everything() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    deadline = time.monotonic() + 60
    while len(psutil.Process(process.pid).children()) < 2:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.5)
    os.killpg(process.pid, signal.SIGINT)  # the whole group, as Ctrl-C does
    assert process.communicate(timeout=60)[0] == "interrupted [] []\n"


# Data


class Grey(Dataset[Any]):
    """Like MNIST: grey PIL images and targets."""

    def __init__(self) -> None:
        self.targets = torch.tensor([0, 1, 2] * 8)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return Image.new("L", (20, 30), 10 * index), int(self.targets[index])


def test_your_own_data_drops_in(photos: PhotoSet) -> None:
    own_transform = ImageFolder(photos.train, train_transform(48))
    for data in (photos, photos.folder, str(photos.train), ImageFolder(photos.train), own_transform, Grey()):
        assert run(TINY.but(steps=1, batch_size=8), data=data).samples == 8
    assert len(open_data(photos, "val", None)) == 20 and len(open_data(photos.folder, "train", None)) == 40
    assert class_count(Subset(ImageFolder(photos.train), [0])) == 10 and class_count(Grey()) == 3
    assert run(TINY.but(steps=1), data=TensorDataset(torch.rand(20, 3, 48, 48), torch.zeros(20).long()), model=Probe())


def test_images_get_the_shape_that_the_recipe_asks_for(photos: PhotoSet) -> None:
    image, label = open_data(photos, "train", train_transform(52))[0]
    assert image.shape == (3, 52, 52) and image.dtype == torch.float32 and label == 0
    grey, _ = open_data(Grey(), "train", train_transform(48))[5]
    assert grey.shape == (3, 48, 48)


def test_data_that_will_not_do(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    cases: list[tuple[Any, str]] = [
        (tmp_path / "missing", "is no folder"),
        (tmp_path / "empty", "no subfolder of images per class"),
        (TensorDataset(torch.rand(0, 3, 8, 8)), "data is empty"),
        (TensorDataset(torch.rand(4, 3, 8, 8), torch.zeros(4)), "how many classes"),
        (iter([1]), "give a folder of class folders"),
        (7, "data is a int"),
    ]
    for data, said in cases:
        with pytest.raises(ValueError, match=said) as caught:
            run(data=data)
        assert "\n" not in str(caught.value)


def test_without_data_the_photographs_are_cut(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []

    def small(**options: Any) -> PhotoSet:
        asked.append(options)
        return prepare_photos(tmp_path / "set", train_per_class=2, val_per_class=1, size_px=48, progress=False)

    monkeypatch.setattr("course_utils.images.prepare_photos", small)
    assert run(TINY.but(steps=1)).samples == 16 and asked == [{"progress": False}]
    assert 0 <= accuracy(small_resnet(10)) <= 1


# Monitor, device, memory


class Backend:
    """Says 40 % for ever."""

    source, label, min_interval_s, notes = "NVML", "GPU", 0.01, ()
    devices = (Device("fake", 0, 0),)

    def __init__(self) -> None:
        self.busy = 90.0

    def read(self) -> Sequence[Reading]:
        return [Reading(busy_percent=self.busy)]

    def close(self) -> None: ...


def test_a_given_monitor_counts_only_from_where_the_measuring_began() -> None:
    backend = Backend()
    with Monitor(interval_s=0.01, backend=backend) as monitor:
        while len(monitor.trace.samples) < 5:
            time.sleep(0.01)
        backend.busy = 40.0
        time.sleep(0.05)
        result = run(Recipe(steps=10), data=Tensors(), model=Probe(delay_s=0.02), monitor=monitor)
        assert monitor.summary().busy_percent.max == 90
    assert (result.busy_percent, result.busy_source) == (40.0, "GPU")


def test_a_live_view_is_kept_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    monkeypatch.setattr(Monitor, "refresh", lambda self, force=False: drawn.append(1))
    with Monitor(interval_s=0.05, backend=Backend()) as monitor:
        drawn.clear()
        run(Recipe(steps=4), data=Tensors(), model=Probe(), monitor=monitor)
        assert len(drawn) == 4


def test_its_own_monitor_watches_the_cpu_and_stops() -> None:
    before = threading.active_count()
    result = run(Recipe(steps=10**6), data=Tensors(), model=Probe(delay_s=0.01), monitor=None, seconds=1.0)
    assert result.busy_source == "CPU, not a GPU" and 0 <= result.busy_percent <= 100
    with pytest.raises(KeyboardInterrupt):
        run(data=Tensors(), model=Probe(fail_at=4, error=KeyboardInterrupt()), monitor=None)
    assert threading.active_count() <= before + 1  # tqdm may keep its own
    unmonitored = run(data=Tensors(), model=Probe())
    assert (unmonitored.busy_percent, unmonitored.busy_source) == (None, "not monitored") and "n/a" in repr(unmonitored)


def test_peak_memory_is_seen_while_activations_are_alive() -> None:
    class Hungry(Probe):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            self.held = torch.ones(2**27)  # 512 MiB of float32, dropped before the step ends
            return super().forward(images)

        def drop(self, *_: Any) -> None:
            self.held = torch.empty(0)

    model, lean = Hungry(), run(data=Tensors(), model=Probe())
    model.linear.weight.register_hook(model.drop)
    hungry = run(data=Tensors(), model=model)
    assert hungry.peak_memory_bytes > lean.peak_memory_bytes + 400 * 2**20
    assert "this process" in hungry.memory_source and not model._forward_hooks


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"device": "mps"}, "device='mps' cannot be measured here"),
        ({"seconds": 0}, "seconds=0 will not do"),
        ({"seconds": float("nan")}, "seconds=nan will not do"),
        ({"seconds": True}, "seconds=True will not do"),
        ({"seconds": "5"}, "seconds='5' will not do"),
    ],
)
def test_arguments_that_will_not_do(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        run(data=Tensors(), model=Probe(), **options)


def test_a_missing_gpu_and_a_wrong_recipe_get_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no GPU to use here: leave device out"):
        run(data=Tensors(), model=Probe(), device="cuda")
    with pytest.raises(TypeError, match=r"64 is no Recipe: write train\(Recipe"):
        train(64)  # type: ignore[arg-type]


class FakeGpu:
    """A GPU with its own clock: each mark says when the device reached it; nothing else may wait for the device."""

    def __init__(self) -> None:
        self.now_s, self.waits = 0.0, 0

    def synchronize(self, _: Any) -> None:
        self.waits += 1

    def event(self, enable_timing: bool) -> Any:
        assert enable_timing
        gpu = self

        class Event:
            def record(self, _: Any) -> None:
                self.at_s = gpu.now_s

            def elapsed_time(self, later: Any) -> float:
                return float(later.at_s - self.at_s) * 1000  # milliseconds, as CUDA's

        return Event()


def test_on_a_gpu_events_measure_the_wait_and_no_step_is_synchronised(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    monkeypatch.setattr(watch_module, "synchronize", gpu.synchronize)
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 123)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")

    def loader() -> Any:
        for _ in range(7):
            gpu.now_s += 0.25
            yield torch.zeros(4), torch.zeros(4)

    source = type("Loader", (), {"__iter__": lambda self: loader()})()
    with Watch(torch.device("cuda:0"), 2, 5, None, None, False, False) as watch:
        for images, _ in watch.batches(source):
            gpu.now_s += 1.0
            watch.count(images.sum(), len(images))
        result = watch.measurement(Recipe(), ())
    assert gpu.waits == 2 and result.steps == 5
    assert result.data_wait_s == pytest.approx(5 * 0.25)
    assert (result.peak_memory_bytes, result.device) == (123, "Tesla T4") and "GPU" in result.memory_source


# What a reader sees


def test_the_loop_can_be_shown_in_a_lesson() -> None:
    source = inspect.getsource(training_loop)
    assert "loss.item()" in source and "torch.autocast(device.type" in source and "backward()" in source
    body = source[source.index("dtype =") :]
    assert len(body.splitlines()) <= 15 and max(map(len, source.splitlines())) <= 100


def test_the_progress_bar_is_text_on_stdout_and_can_be_off(capsys: pytest.CaptureFixture[str]) -> None:
    run(data=Tensors(), model=Probe(), progress=True)
    shown = capsys.readouterr()
    assert "training" in shown.out and shown.err == ""
    run(data=Tensors(), model=Probe())
    assert capsys.readouterr() == ("", "")


def test_a_measurement_reads_well_and_makes_a_row() -> None:
    result = run(Recipe(batch_size=8, steps=2), data=Tensors(), model=Probe())
    for said in (
        "samples/s",
        "16 samples in 2 steps",
        "2 warm-up",
        "batch_size=8",
        f"torch {torch.__version__}",
        "CPU",
    ):
        assert said in repr(result) and said in result._repr_html_()
    row = result.as_row(2, "nvidia_smi")
    assert (row.lesson, row.title, row.device) == (2, "nvidia_smi", "CPU")
    assert (row.samples_per_s, row.data_wait_percent) == (result.samples_per_s, result.data_wait_percent)
    assert row.busy_percent is None and row.peak_memory_bytes == result.peak_memory_bytes


def test_the_model_takes_what_it_says() -> None:
    model = small_resnet(classes=7, width=8)
    assert model(torch.rand(1, 3, 48, 48)).shape == (1, 7)  # in training mode, one sample: BatchNorm still has 2 × 2
    assert model(torch.rand(2, 3, 65, 91)).shape == (2, 7)
    counted = {width: sum(p.numel() for p in small_resnet(10, width).parameters()) / 1e6 for width in (32, 64)}
    assert counted == {32: pytest.approx(1.2, abs=0.05), 64: pytest.approx(4.9, abs=0.05)}


def test_accuracy_leaves_the_model_as_it_was(photos: PhotoSet) -> None:
    model = small_resnet(10, width=8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert 0 <= accuracy(model, photos, image_size=48) <= 1
    assert model.training and all(torch.equal(before[name], value) for name, value in model.state_dict().items())
