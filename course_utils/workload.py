"""The one training job that every lesson speeds up: a small ResNet on JPEG photographs, and what it measured.

    before = train()                                     # the naive recipe
    after = train(Recipe(batch_size=64, num_workers=2))
    after.samples_per_s / before.samples_per_s

`train` reads the knobs of a `Recipe`, runs `training_loop` (ordinary PyTorch, made to be read) and returns a
`Measurement`. The first few steps warm up caches, workers and the allocator: they train, but they are not timed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from course_utils import runtime
from course_utils.checkpointing import checkpoint_blocks, checkpointed_blocks, correct_batchnorm, uncheckpoint
from course_utils.feed import open_feed
from course_utils.images import (
    IMAGE_SIZE,
    MODEL_WIDTH,
    Data,
    class_count,
    eval_transform,
    open_data,
    train_transform,
)
from course_utils.machine import usable_cpus
from course_utils.monitor import Monitor
from course_utils.preserve import rng_preserved
from course_utils.recipe import Measurement, Positive, Recipe
from course_utils.resnet import small_resnet
from course_utils.watch import Watch, no_worker_advice

__all__ = [
    "IMAGE_SIZE",
    "MODEL_WIDTH",
    "Measurement",
    "Recipe",
    "accuracy",
    "eval_transform",
    "small_resnet",
    "train",
    "train_transform",
    "training_loop",
]

_WARMUP_STEPS = {"cpu": 2, "cuda": 10}
# A GPU run lasts long enough for a few dozen utilisation samples; NVML's own window is up to 1 s (nvmlUtilization_t).
_SECONDS = {"cpu": 4.0, "cuda": 12.0}
_SAMPLES = {"cpu": 640, "cuda": None}
_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "default": {},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "forloop": {"foreach": False, "fused": False},
}
Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]


def training_loop(
    model: nn.Module,
    batches: Batches,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    recipe: Recipe,
    device: torch.device,
    watch: Watch,
    to_float: Callable[[Any], torch.Tensor],
) -> None:
    """Train on every batch: copy, forward, loss, backward, optimizer step. `watch` counts."""
    dtype = low_precision(device)
    layout = torch.channels_last if recipe.channels_last else torch.preserve_format
    for images, labels in batches:
        images = images.to(device, non_blocking=recipe.non_blocking)
        labels = labels.to(device, non_blocking=recipe.non_blocking)
        images = to_float(images).to(memory_format=layout)  # image work left to the device, if any
        with torch.autocast(device.type, dtype=dtype, enabled=recipe.precision == "amp"):
            loss = functional.cross_entropy(model(images), labels)
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        watch.count(loss, len(labels))
        if recipe.item_every and watch.all_steps % recipe.item_every == 0:
            watch.show(loss.item())  # .item() makes the CPU wait for the device


def train(
    recipe: Recipe | None = None,
    *,
    data: Data = None,
    model: nn.Module | None = None,
    device: torch.device | str | None = None,
    monitor: Monitor | Literal[False] | None = None,
    seconds: float | None = None,
    progress: bool = True,
) -> Measurement:
    """Run the training job with `recipe` (None: the naive `Recipe()`) and return what it measured.

    `data`: None for the course's photographs, or a folder of class folders, or a dataset of (image, class index) with
    `.classes` or `.targets`, such as your own `ImageFolder`. PIL images get the course's transform, tensors stay as
    they are; for `cache`, `augment="batch"` and `transfer="uint8"` they must be uint8, of any size. `model`: None for a
    new `small_resnet`; yours is trained in place, and keeps the memory format of `channels_last`, but is neither
    compiled nor checkpointed afterwards (what else this process compiled is compiled anew after `compile=True`).
    `monitor`: None to start one for the measured steps, a running
    `Monitor` to read that one (its live view is kept up to date), False for none.

    It stops at `recipe.steps`, at `recipe.samples` or after `seconds` of measured time, whichever comes first. With
    none of the three the device decides: a CPU takes 640 samples or 4 s, a GPU 12 s. On a CPU the same recipe gives the
    same losses step by step.

    A cache is filled before the measured time begins; a note says how long that took. MemoryError if it does not fit.

    The random state of Python, NumPy and torch is put back afterwards. An interrupt ends the workers and passes
    through. ValueError for data, a device or seconds that will not do.
    """
    recipe = Recipe() if recipe is None else recipe
    if not isinstance(recipe, Recipe):
        raise TypeError(f"recipe={recipe!r:.80} is no Recipe: write train(Recipe(batch_size=64)), for example")
    if seconds is not None:
        seconds = Positive("how long to measure").checked("seconds", seconds)
    device = _usable(device)
    recipe = recipe if recipe.image_size else recipe.but(image_size=IMAGE_SIZE[device.type])
    if model is None:
        recipe = recipe if recipe.width else recipe.but(width=MODEL_WIDTH[device.type])
    elif recipe.width:
        raise ValueError(f"width={recipe.width} is for the course's own model: leave it out where you give a model")
    samples = recipe.samples
    if recipe.steps is None and samples is None and seconds is None:
        samples, seconds = _SAMPLES[device.type], _SECONDS[device.type]
    with _own_random_state(recipe.seed, device):  # data that draws at random while it is cached has no say later
        feed = open_feed(data, recipe, device, progress)
    watch = Watch(device, _WARMUP_STEPS[device.type], recipe.steps, samples, seconds, monitor, progress)
    with _own_random_state(recipe.seed, device), ExitStack() as afterwards, watch:
        model = small_resnet(class_count(feed.source), recipe.width or 0) if model is None else model
        model.to(device).train()
        if recipe.channels_last:
            model.to(memory_format=torch.channels_last)
        if recipe.checkpoint and not checkpointed_blocks(model):
            afterwards.callback(uncheckpoint, _checkpointed(model))
        if recipe.compile:
            torch.compiler.reset()  # otherwise the ninth such run would not be compiled: torch's recompile_limit is 8
            model = cast(nn.Module, torch.compile(model, dynamic=False))  # one run, one batch size
        watch.watch_memory(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, **_OPTIMIZERS[recipe.optimizer])
        half = recipe.precision == "amp" and low_precision(device) is torch.float16
        scaler = torch.amp.GradScaler(device.type, enabled=half)  # only float16 needs its loss scaled
        loader = _loader(feed.dataset, recipe, device, feed.collate)
        training_loop(model, watch.batches(loader), optimizer, scaler, recipe, device, watch, feed.to_float)
        notes = (*_notes(recipe, device), *_compile_notes(recipe, loader, watch), *feed.notes)
        return watch.measurement(recipe, notes)


@torch.no_grad()
def accuracy(
    model: nn.Module,
    data: Data = None,
    *,
    image_size: int | None = None,
    batch_size: int = 64,
) -> float:
    """The share (0 to 1) of the held-out images that `model` names rightly; its mode and weights stay as they were.

    `data` as in `train`, whose "val" folder is read if it has one.
    """
    device = next(model.parameters()).device
    dataset = open_data(data, "val", eval_transform(image_size or IMAGE_SIZE.get(device.type, 64)), True)
    was_training, right, seen = model.training, 0, 0
    model.eval()
    try:
        for images, labels in DataLoader(dataset, batch_size):
            right += int((model(images.to(device)).argmax(1).cpu() == labels).sum())
            seen += len(labels)
    finally:
        model.train(was_training)
    return right / seen


def low_precision(device: torch.device) -> torch.dtype:
    """The dtype that autocast takes on this device: bfloat16, or float16 on a GPU without native bfloat16."""
    return runtime.amp_dtype(torch.cuda.get_device_capability(device) if device.type == "cuda" else None)


def _loader(
    dataset: Dataset[Any], recipe: Recipe, device: torch.device, collate: Callable[[Any], Any] | None = None
) -> DataLoader[Any]:
    with no_worker_advice():
        return DataLoader(
            dataset,
            collate_fn=collate,
            batch_size=recipe.batch_size,
            shuffle=True,
            num_workers=recipe.num_workers,
            prefetch_factor=recipe.prefetch_factor,
            persistent_workers=recipe.persistent_workers,
            pin_memory=recipe.pin_memory and device.type == "cuda" and recipe.cache != "device",
            generator=torch.Generator().manual_seed(recipe.seed),
            drop_last=recipe.compile and len(dataset) >= recipe.batch_size,  # type: ignore[arg-type]
        )


def _checkpointed(model: nn.Module) -> nn.Module:
    try:
        return correct_batchnorm(checkpoint_blocks(model))
    except ValueError:
        raise ValueError(
            "checkpoint=True knows the blocks of small_resnet alone: call checkpoint_blocks(model, kinds) on your "
            "model before you give it"
        ) from None


def _notes(recipe: Recipe, device: torch.device) -> tuple[str, ...]:
    notes, cpus = [], usable_cpus()
    if recipe.num_workers > cpus:
        notes.append(
            f"{recipe.num_workers} workers share {cpus} usable CPU{'s' * (cpus > 1)}: "
            "more workers than CPUs seldom help, and may slow loading down"
        )
    if recipe.pin_memory and device.type != "cuda":
        notes.append("pin_memory was left off: page-locked memory only speeds up copies to a GPU")
    elif recipe.pin_memory and recipe.cache == "device":
        notes.append("pin_memory was left off: the images are on the GPU already")
    if recipe.precision == "amp" and device.type == "cpu":
        # Measured: 20 times slower than float32 on an AMD EPYC with AVX2 only (torch 2.14.1, November 2026).
        notes.append(
            "bfloat16 is fast only on CPUs with AMX or AVX-512 BF16, and many times slower than float32 on others"
        )
    if recipe.channels_last and device.type == "cuda" and recipe.precision == "fp32":
        # pytorch/pytorch#50036: the gain is in half precision, on tensor cores.
        notes.append("channels_last is for tensor cores, so it pays with precision='amp' and little without")
    # torch.optim.AdamW: foreach is the default on CUDA. On a CPU the _foreach_ operations are loops themselves.
    if recipe.optimizer == ("forloop" if device.type == "cpu" else "foreach"):
        notes.append(f"optimizer={recipe.optimizer!r} is what torch chooses by itself on this device")
    elif recipe.optimizer == "foreach":
        notes.append("optimizer='foreach' cannot help on a CPU, which has no operation for several weights at once")
    return tuple(notes)


def _compile_notes(recipe: Recipe, loader: DataLoader[Any], watch: Watch) -> tuple[str, ...]:
    if not recipe.compile:
        return ()
    notes = [f"compiling took about {watch.extra_warmup_s():.1f} s of the warm-up, which the throughput leaves out"]
    left_out = len(loader.dataset) % recipe.batch_size  # type: ignore[arg-type]
    if loader.drop_last and left_out:
        notes.append(
            f"with compile=True each epoch ends {left_out} samples early: a smaller last batch would be compiled anew"
        )
    return tuple(notes)


def _usable(device: torch.device | str | None) -> torch.device:
    device = runtime.pick_device() if device is None else torch.device(device)
    if device.type not in IMAGE_SIZE:
        raise ValueError(f"device={str(device)!r} cannot be measured here: give 'cpu' or 'cuda', or leave it out")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device={str(device)!r}, but PyTorch has no GPU to use here: leave device out to train on the CPU"
        )
    return device


@contextmanager
def _own_random_state(seed: int, device: torch.device) -> Iterator[None]:
    """Seed Python, NumPy and torch for the block, then put back what they were."""
    if device.type == "cuda":
        torch.cuda.init()  # what has not begun cannot be preserved
    with rng_preserved():
        random.seed(seed)
        np.random.seed(seed)
        # Not torch.manual_seed: that would also reseed every GPU.
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield
