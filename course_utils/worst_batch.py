"""The batch that training will meet at its worst. Import it from `course_utils.batch_size`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.data import default_collate


def worst_batch(
    data: Any,
    batch_size: int,
    collate: Callable[[list[Any]], Any] = default_collate,
    *,
    at_most: int = 10_000,
) -> Any:
    """A batch of the longest sample, `batch_size` times: what training will meet at its worst.

    `data` is a data set, or some of its samples; the longest is the one with the most elements in its tensors, arrays,
    strings and lists. It looks at the first `at_most` samples, because each must be loaded: for a larger data set, give
    it the samples that you know to be long.
    """
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"batch_size={batch_size!r} must be a whole number of at least 1.")
    samples: Iterable[Any] = data
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):  # a map-style data set need not end by IndexError
        samples = (data[index] for index in range(min(len(data), at_most)))
    longest = max(itertools.islice(samples, at_most), key=_elements, default=None)
    if longest is None:
        raise ValueError("worst_batch needs at least one sample: the data set is empty.")
    return collate([longest] * batch_size)


def _elements(sample: Any) -> int:
    if isinstance(sample, dict):
        return sum(map(_elements, sample.values()))
    if isinstance(sample, list | tuple):
        return sum(map(_elements, sample))
    if isinstance(sample, torch.Tensor):
        return sample.numel()
    if hasattr(sample, "size") and isinstance(sample.size, int):
        return sample.size  # a NumPy array
    return len(sample) if isinstance(sample, str | bytes) else 1
