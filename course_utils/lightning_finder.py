"""A small memory and a data set on which Lightning's batch-size finder can be watched, on any machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from course_utils.arguments import whole
from course_utils.simulated_memory import SimulatedMemory

FEATURES = 64


class FinderMemory(SimulatedMemory):
    """`SimulatedMemory`, whose error Lightning takes for one: it looks for the words "CUDA" and "out of memory".

    (Read in Lightning 2.6.6, pytorch/utilities/memory.py.) It counts tensors on the CPU: train there.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and count its memory."""
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(f"CUDA out of memory. {error}") from None


class Rows(Dataset[Any]):
    """`samples` rows of 64 random numbers and their classes (0 to 9), handed out a whole batch at a time.

    Use it with `collate_fn=image_cache.as_is`: a batch is (N, 64) float32 and (N) int64 already.
    """

    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows = torch.rand(whole("samples", samples), FEATURES, generator=generator)
        self.labels = torch.randint(10, (samples,), generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.rows[index], self.labels[index]

    def __getitems__(self, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        return self.rows[indices], self.labels[indices]
