"""Lightning without the lines that a notebook does not need; warnings that mean something stay."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_LOGGERS = ("lightning.pytorch", "lightning.fabric")
_UNNEEDED = (
    # Lightning's own use of a class that torch is about to drop; nothing that a learner could change.
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    # "num_workers=N" for every machine of N CPUs: lesson 03 measures instead.
    r"The '\w+' does not have many workers which may be a bottleneck",
    # The course trains on the CPU where PyTorch cannot use the GPU that is there; lesson 01 says so.
    r"GPU available but not used",
    # A run that is resumed finds its own checkpoints there.
    r"Checkpoint directory .* exists and is not empty",
)


def quiet() -> None:
    """Hide Lightning's hints from now on: what it found, which products there are, that `fit` stopped.

    It raises two loggers to WARNING, as Lightning's documentation does it ("Console Logging"), and ignores four
    warnings by their text. All others stay, such as the one about a data loader that cannot be resumed.
    """
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)
    for text in _UNNEEDED:
        warnings.filterwarnings("ignore", text)


@contextmanager
def quieted() -> Iterator[None]:
    """The same for a block."""
    levels = {name: logging.getLogger(name).level for name in _LOGGERS}
    try:
        with warnings.catch_warnings():
            quiet()
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
