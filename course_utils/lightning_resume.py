"""Resume a Trainer's run where it stopped, so that the end is the same as without the interruption, bit for bit.

    loader = ResumableLoader(dataset, batch_size=64, seed=0)
    checkpoint = ModelCheckpoint(folder, every_n_train_steps=10, save_last=True)
    trainer = L.Trainer(callbacks=[RandomState(), checkpoint], ...)
    trainer.fit(module, loader)                      # interrupted
    trainer.fit(module, loader, ckpt_path="last")    # with a new module, loader and Trainer, in a new process

A Lightning checkpoint (read in 2.6.6) holds weights, optimizers, schedulers, the gradient scaler, the callbacks' states
and the number of the batch. It does not hold the states of the random generators, and a loader's place only if the
loader has `state_dict` and `load_state_dict`. A DataLoader has neither: Lightning warns, and trains the rest of the
epoch on the first batches of a new shuffle. These two classes add what is missing.

The checkpoints must be written at the end of a step, as `every_n_train_steps` does. What was trained after the last
one is trained again. One that is written at the exception itself (`save_on_exception`, OnExceptionCheckpoint) may lie
within a step: its batch is handed out already, and would be lost.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import lightning as L  # noqa: N812 -- as in Lightning's own documentation
import numpy as np
import torch
from torch.utils.data import DataLoader

from course_utils.arguments import whole

_OURS = {
    "sampler": "it draws the order itself",
    "batch_sampler": "it draws the order itself",
    "generator": "it draws the order itself, from seed",
    "persistent_workers": "its workers start anew in every epoch",
}


class EpochOrder:
    """The order of `samples` indices: drawn from the seed and the epoch's number, and from nothing else."""

    def __init__(self, samples: int, seed: int, shuffle: bool) -> None:
        self.samples, self.seed, self.shuffle, self.epoch = samples, seed, shuffle, 0

    def set_epoch(self, epoch: int) -> None:
        """Which epoch comes next; a Trainer says so before each."""
        self.epoch = epoch

    def generator(self) -> torch.Generator:
        """A generator for this epoch, at its start."""
        # SeedSequence mixes the two numbers: epoch 1 of seed 0 is not epoch 0 of seed 1.
        (word,) = np.random.SeedSequence([self.seed, self.epoch]).generate_state(1, np.uint64)
        return torch.Generator().manual_seed(int(word) >> 1)  # torch takes 63 bits

    def __len__(self) -> int:
        return self.samples

    def __iter__(self) -> Iterator[int]:
        if not self.shuffle:
            return iter(range(self.samples))
        return iter(torch.randperm(self.samples, generator=self.generator()).tolist())


class ResumableLoader:
    """A DataLoader that knows its place: saved within an epoch, it goes on with the next batch.

    `dataset` has a length; `options` are DataLoader's own, such as `num_workers`, `collate_fn` and `pin_memory`. The
    order depends on `seed` and on the epoch's number, so that a new process draws the same. Batches before the place
    are not loaded again. Iterated to its end, it begins the next epoch; left before, the same epoch again.

    A Trainer calls `state_dict` for its checkpoints, `load_state_dict` when it resumes and `sampler.set_epoch` before
    each epoch. In a loop of your own, call the first two yourself.

    Random augmentation is repeated exactly if it runs in the training process (with `RandomState`), but not in workers:
    one that starts within an epoch has drawn nothing yet.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        **options: Any,
    ) -> None:
        for name in _OURS.keys() & options.keys():
            raise ValueError(f"Leave {name} out: {_OURS[name]}.")
        try:
            samples = len(dataset)
        except TypeError:
            raise TypeError(
                f"{type(dataset).__name__} has no length: ResumableLoader needs a data set that can be indexed."
            ) from None
        self.dataset = dataset
        self.batch_size = whole("batch_size", batch_size)
        self.drop_last = drop_last
        self.sampler = EpochOrder(samples, whole("seed", seed, 0), shuffle)
        self._options = options
        self._handed_out = 0  # batches of this epoch
        self._resume: dict[str, int] | None = None

    def __len__(self) -> int:
        """Batches in a whole epoch."""
        full, rest = divmod(len(self.sampler), self.batch_size)
        return full + bool(rest and not self.drop_last)

    def __iter__(self) -> Iterator[Any]:
        # A generator, so that nothing runs before the first batch is wanted: a Trainer asks for the iterator first, and
        # says then which epoch this is.
        self._handed_out = self._place()
        indices = list(self.sampler)
        batches = [indices[start : start + self.batch_size] for start in range(0, len(indices), self.batch_size)]
        left = batches[self._handed_out : len(self)]
        # The generator is for the workers' seeds: without one the DataLoader would draw from torch's own.
        loader = DataLoader(self.dataset, batch_sampler=left, generator=self.sampler.generator(), **self._options)
        for batch in loader:
            self._handed_out += 1
            yield batch
        self._handed_out = 0
        self.sampler.epoch += 1

    def _place(self) -> int:
        """Where this iteration begins: at 0, unless a place in this very epoch was loaded."""
        resume, self._resume = self._resume, None
        if resume is None or resume["epoch"] != self.sampler.epoch:
            return 0
        if resume["batch"] < len(self):
            return resume["batch"]
        self.sampler.epoch += 1  # saved after the last batch
        return 0

    def state_dict(self) -> dict[str, int]:
        """The epoch, and how many of its batches were handed out."""
        return {"epoch": self.sampler.epoch, "batch": self._handed_out}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Begin the next iteration at a place that `state_dict()` returned; ValueError for anything else."""
        if not isinstance(state_dict, Mapping) or set(state_dict) != {"epoch", "batch"}:
            raise ValueError(f"This is no place of a ResumableLoader: {state_dict!r:.80}.")
        epoch, batch = whole("epoch", state_dict["epoch"], 0), whole("batch", state_dict["batch"], 0)
        if batch > len(self):
            raise ValueError(
                f"The checkpoint was written after batch {batch:,}, and an epoch has {len(self):,} here: "
                "resume with the same data set and batch size."
            )
        self.sampler.epoch, self._handed_out = epoch, batch
        self._resume = {"epoch": epoch, "batch": batch}


class RandomState(L.Callback):
    """Puts the random states of Python, NumPy, torch and the GPUs into each checkpoint, and back when one is resumed.

    They are put back when training starts, after all that Trainer prepares. A callback that draws random numbers in its
    own `on_train_start` must stand before this one.
    """

    def __init__(self) -> None:
        self._loaded: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """The states as tensors and plain values, all of which `torch.load(weights_only=True)` takes."""
        name, keys, *rest = np.random.get_state()
        return {
            "python": random.getstate(),
            "numpy": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the states until training starts."""
        self._loaded = state_dict

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Put the loaded states back: no later hook comes before the next batch is drawn."""
        state, self._loaded = self._loaded, None
        if state is None:
            return
        random.setstate(state["python"])
        name, keys, *rest = state["numpy"]
        np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
        torch.set_rng_state(state["torch"].cpu())  # Trainer may have loaded it to the GPU
        if len(state["cuda"]) == torch.cuda.device_count() and torch.cuda.is_initialized():
            torch.cuda.set_rng_state_all([one.cpu() for one in state["cuda"]])
