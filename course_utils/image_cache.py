"""Decode every image once and keep it as uint8, in RAM or on the device; and what that takes.

    cache_need(my_folder)                       # before: how much, and whether it fits
    CachedImages(dataset, torch.device("cpu"))  # a dataset of uint8 images (3, H, W) and labels

All pixels lie in one tensor. Workers that are forked share its pages, because nothing in it counts references; a list
of Python objects would be copied into each of them, page by page (pytorch/pytorch#13246).
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from PIL import Image
from torch.utils.data import Dataset, default_collate
from tqdm import tqdm

from course_utils.fast_images import PackedImages
from course_utils.images import Data, Uint8, open_data
from course_utils.machine import ram_bytes
from course_utils.views import gibibytes, mebibytes

_LOOKED_AT = 32  # images that are decoded to estimate the size of all
_SLACK = 1.1  # how much more than the estimate is set aside where sizes differ
_FILL = 0.8  # the share of the free memory that a cache may take: training needs some too


@dataclass(frozen=True, repr=False)
class CacheNeed:
    """What a cache of `images` images takes of the `free_bytes` in `place` ("RAM", "the GPU's memory").

    `exact` is False where sizes differ: `need_bytes` is then estimated from some of the images.
    """

    images: int
    need_bytes: int
    free_bytes: int
    place: str
    exact: bool

    @property
    def fits(self) -> bool:
        """Whether at least a fifth of the free memory would be left."""
        return self.need_bytes <= _FILL * self.free_bytes

    def __repr__(self) -> str:
        about, verdict = "" if self.exact else "about ", "it fits" if self.fits else "that is too much"
        return (
            f"{self.images:,} images as uint8 take {about}{mebibytes(self.need_bytes)} of {self.place}, of which "
            f"{gibibytes(self.free_bytes)} are free: {verdict}"
        )

    def check(self) -> None:
        """MemoryError, with the cure, if it does not fit."""
        if not self.fits:
            raise MemoryError(
                f"{self!r}; give cache='none', or make the images smaller first (decode='reduced', or resized files)"
            )


def cache_need(data: Data = None, device: torch.device | str = "cpu") -> CacheNeed:
    """What decoding all of `data` (as in `workload.train`) would take of `device`'s memory; keeps nothing.

    It decodes up to 32 images, spread over the data, and reckons with their mean size.
    """
    return _need(Uint8(open_data(data, "train", None).dataset, None), torch.device(device))


class CachedImages(Dataset[Any]):
    """Samples of `dataset` (uint8 images and labels), all read once and kept on `device`.

    An item is a view (3, H, W) of the cache and its label. `__getitems__`, which the DataLoader calls with a batch's
    indices, gives the whole batch: (N, 3, H, W) or, where the sizes differ, `PackedImages`; and the labels (N). So the
    DataLoader has nothing to collate (`collate_fn=as_is`). `seconds` is how long decoding took. MemoryError if it
    does not fit.
    """

    def __init__(self, dataset: Any, device: torch.device, progress: bool = True) -> None:
        need, started = _need(dataset, device), time.perf_counter()
        need.check()
        self.device, self.shapes, self._starts = device, [], [0]
        flat = torch.empty(int(need.need_bytes * (1 if need.exact else _SLACK)), dtype=torch.uint8, device=device)
        labels = []
        bar = tqdm(
            range(len(dataset)),
            desc=f"decoding into {mebibytes(need.need_bytes)} of {need.place}",
            unit=" images",
            file=sys.stdout,
            leave=False,
            disable=not progress,
        )
        with bar:
            for index in bar:
                image, label = dataset[index]
                start, end = self._starts[-1], self._starts[-1] + image.numel()
                if end > len(flat):
                    flat = _grown(flat, start, end, index + 1, len(dataset))
                flat[start:end] = image.permute(1, 2, 0).reshape(-1)
                self._starts.append(end)
                self.shapes.append((image.shape[1], image.shape[2]))
                labels.append(label)
        self.flat, self.labels = flat[: self._starts[-1]], default_collate(labels).to(device)
        self.one_size = len(set(self.shapes)) == 1
        self.seconds = time.perf_counter() - started

    @property
    def used_bytes(self) -> int:
        """What the pixels take."""
        return self.flat.numel()

    def __len__(self) -> int:
        return len(self.shapes)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        height, width = self.shapes[index]
        pixels = self.flat[self._starts[index] : self._starts[index + 1]]
        return pixels.view(height, width, 3).permute(2, 0, 1), self.labels[index]

    def __getitems__(self, indices: Sequence[int]) -> tuple[torch.Tensor | PackedImages, torch.Tensor]:
        # non_blocking: the CPU need not wait until so few bytes have arrived on the device
        at = torch.tensor(indices).to(self.device, non_blocking=True)
        if self.one_size:
            return self.flat.view(len(self), *self.shapes[0], 3)[at].permute(0, 3, 1, 2), self.labels[at]
        return PackedImages.pack([self[index][0] for index in indices]), self.labels[at]


class AsPil(Dataset[Any]):
    """Cached images as PIL images, for transforms that work on one sample."""

    def __init__(self, cached: CachedImages) -> None:
        self.cached = cached

    def __len__(self) -> int:
        return len(self.cached)

    def __getitem__(self, index: int) -> tuple[Image.Image, torch.Tensor]:
        image, label = self.cached[index]
        return Image.fromarray(image.permute(1, 2, 0).numpy()), label


def as_is(batch: Any) -> Any:
    """The batch, unchanged."""
    return batch


def _need(dataset: Any, device: torch.device) -> CacheNeed:
    looked_at = range(0, len(dataset), math.ceil(len(dataset) / _LOOKED_AT))
    sizes = [dataset[index][0].numel() for index in looked_at]
    mean = sum(sizes) / len(sizes)
    place, free = _free(device)
    return CacheNeed(len(dataset), round(mean * len(dataset)), free, place, exact=len(set(sizes)) == 1)


def _free(device: torch.device) -> tuple[str, int]:
    """The name of the device's memory, and how much of it is free."""
    if device.type == "cuda":
        return "the GPU's memory", torch.cuda.mem_get_info(device)[0]
    free, limit = psutil.virtual_memory().available, ram_bytes()
    return "RAM", free if limit is None else max(0, min(free, limit - psutil.Process().memory_info().rss))


def _grown(flat: torch.Tensor, used: int, wanted: int, images: int, all_images: int) -> torch.Tensor:
    """A larger tensor with the same first bytes, for when the images turn out larger than the estimate."""
    size = int(wanted / images * all_images * _SLACK)
    place, free = _free(flat.device)
    CacheNeed(all_images, size, free, place, exact=False).check()
    larger = flat.new_empty(size)
    larger[:used] = flat[:used]
    return larger
