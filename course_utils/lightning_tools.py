"""Lesson 06: what to measure of Lightning's Trainer, and what it takes to resume exactly.

    quiet()                                                   # without hints that a notebook does not need
    monitor = MonitorCallback()                               # busy %, samples/s, data-wait %, peak memory
    L.Trainer(callbacks=[monitor], ...).fit(module, loader)
    monitor.draw()

    compare_losses(raw_losses, recorder.losses)               # the raw loop against Trainer
    overhead_per_step()                                       # what Trainer itself costs, in seconds a step

Lightning is not on Colab: the setup cell installs it. Importing this module imports it, which takes a few seconds.
"""

from __future__ import annotations

try:
    import lightning  # noqa: F401 -- the modules below need it
except ModuleNotFoundError as error:
    if error.name != "lightning":
        raise
    raise ModuleNotFoundError(
        "Lesson 06 needs Lightning: run the setup cell on Colab, or `pip install 'lightning>=2.6,<3'` elsewhere.",
        name="lightning",
    ) from None

from course_utils.lightning_compare import LossComparison, LossRecorder, compare_losses
from course_utils.lightning_finder import FinderMemory, Rows
from course_utils.lightning_measurement import FitMeasurement
from course_utils.lightning_monitor import MonitorCallback
from course_utils.lightning_overhead import Overhead, overhead_per_step
from course_utils.lightning_quiet import quiet, quieted
from course_utils.lightning_resume import RandomState, ResumableLoader

__all__ = [
    "FinderMemory",
    "FitMeasurement",
    "LossComparison",
    "LossRecorder",
    "MonitorCallback",
    "Overhead",
    "RandomState",
    "ResumableLoader",
    "Rows",
    "compare_losses",
    "overhead_per_step",
    "quiet",
    "quieted",
]
