"""From a recipe to what the training loop eats: the dataset, how its samples become a batch, and the device's share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Subset

from course_utils.fast_images import DeviceAugment, collate_encoded, collate_images, gpu_decoded, normalize
from course_utils.image_cache import AsPil, CachedImages, as_is
from course_utils.images import (
    Data,
    ReducedJpeg,
    Transformed,
    Uint8,
    open_data,
    read_encoded,
    train_transform,
    with_loader,
)
from course_utils.recipe import Recipe
from course_utils.views import mebibytes


@dataclass(frozen=True)
class Feed:
    """`dataset` and `collate` are for the DataLoader (None: its own); `to_float` makes float32 images of a batch.

    `source` is the data as it was given, which knows the classes. `notes` say what a measurement should tell.
    """

    source: Transformed
    dataset: Any
    collate: Callable[[Any], Any] | None
    to_float: Callable[[Any], torch.Tensor]
    notes: tuple[str, ...] = ()


def open_feed(data: Data, recipe: Recipe, device: torch.device, progress: bool = True) -> Feed:
    """What `recipe` makes of `data` on `device`; fills the cache, if it asks for one.

    ValueError, in one sentence, for data that its knobs cannot handle; MemoryError for a cache that does not fit.
    """
    size = recipe.image_size or 0
    source = open_data(data, "train", train_transform(size, recipe.transfer), progress)
    files, notes = _opened(source.dataset, recipe, device)
    if recipe.decode == "gpu":
        return Feed(source, files, collate_encoded, gpu_decoded(DeviceAugment(size), device), notes)

    images, cached = Uint8(files, None), None
    if recipe.cache != "none":
        cached = CachedImages(images, device if recipe.cache == "device" else torch.device("cpu"), progress)
        notes += _cache_notes(cached, recipe, _own_transform(files))
    if recipe.augment == "batch":
        if cached is not None:
            return Feed(source, cached, as_is, DeviceAugment(size), notes)
        images[0]  # what will not do is refused here, in one sentence, and not in a worker
        return Feed(source, images, collate_images, DeviceAugment(size), notes)

    samples = files if cached is None else AsPil(cached)
    if recipe.transfer == "uint8":
        small = Uint8(samples, source.transform)
        small[0]  # as above
        return Feed(source, small, None, normalize, notes)
    return Feed(source, Transformed(samples, source.transform), None, as_is, notes)


def _opened(dataset: Any, recipe: Recipe, device: torch.device) -> tuple[Any, tuple[str, ...]]:
    """The dataset as `recipe.decode` opens it, and what there is to note."""
    if recipe.decode == "full":
        return dataset, ()
    if recipe.decode == "gpu":
        if device.type != "cuda":
            raise ValueError("decode='gpu' needs an NVIDIA GPU, and this run is on the CPU: set decode='reduced' here")
        if _own_transform(dataset):
            raise ValueError(
                "decode='gpu' leaves nothing that the dataset's own transform could work on: take the transform away"
            )
        return with_loader(dataset, read_encoded, "decode='gpu'"), ()
    reduced = ReducedJpeg(recipe.image_size or 0)
    files = with_loader(dataset, reduced, "decode='reduced'")
    if _own_transform(dataset) or files[0][0].size != (whole := dataset[0][0].size):
        return files, ()
    return files, (
        f"decode='reduced' read the first image in full ({whole[0]} × {whole[1]} pixels): image_size="
        f"{recipe.image_size} needs {reduced.needed_px}, and only JPEG files can be halved",
    )


def _own_transform(dataset: Any) -> bool:
    """Whether the dataset transforms its images itself, as torchvision's datasets can."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return getattr(dataset, "transform", None) is not None or getattr(dataset, "transforms", None) is not None


def _cache_notes(cached: CachedImages, recipe: Recipe, own_transform: bool) -> tuple[str, ...]:
    place = "RAM" if cached.device.type == "cpu" else "the GPU's memory"
    note = (
        f"cache={recipe.cache!r} holds {len(cached):,} decoded images in {mebibytes(cached.used_bytes)} of {place}; "
        f"decoding them once took {cached.seconds:.1f} s before the measuring, which the throughput leaves out"
    )
    if not own_transform:
        return (note,)
    return (
        note,
        "the dataset's own transform ran once, before the cache: what it drew at random is the same in every epoch",
    )
