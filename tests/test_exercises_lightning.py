"""Exercises of lesson 06: each typical mistake gets its sentence, and what is right passes however it is written."""

from __future__ import annotations

import gc
import itertools
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn import functional

from course_utils.exercises import lesson06

# --- module ---------------------------------------------------------------------------------------------------------


def module_with(**changes: Any) -> Any:
    """A learner's answer that is right but for `changes`, which replace methods of the module."""

    def as_module(model: nn.Module, lr: float) -> Any:
        class Right(L.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                inputs, labels = batch
                loss = functional.cross_entropy(self.model(inputs), labels)
                self.log("train_loss", loss)
                return loss

            def configure_optimizers(self) -> Any:
                return torch.optim.AdamW(self.parameters(), lr=lr)

        for name, change in changes.items():
            setattr(Right, name, change)
        return Right()

    return as_module


def without_log(self: Any, batch: Any, batch_idx: int) -> Any:
    return functional.cross_entropy(self.model(batch[0]), batch[1])


def returning_nothing(self: Any, batch: Any, batch_idx: int) -> Any:
    self.log("train_loss", functional.cross_entropy(self.model(batch[0]), batch[1]))


def summed(self: Any, batch: Any, batch_idx: int) -> Any:
    return functional.cross_entropy(self.model(batch[0]), batch[1], reduction="sum")


def softmax_first(self: Any, batch: Any, batch_idx: int) -> Any:
    return functional.cross_entropy(self.model(batch[0]).softmax(1), batch[1])


def evaluating(self: Any, batch: Any, batch_idx: int) -> Any:
    self.model.eval()
    return without_log(self, batch, batch_idx)


def by_sgd(self: Any) -> Any:
    return torch.optim.SGD(self.parameters(), lr=0.05)


def by_default_rate(self: Any) -> Any:
    return torch.optim.AdamW(self.parameters())


def fixed_rate(self: Any) -> Any:
    return torch.optim.AdamW(self.parameters(), lr=0.05)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"training_step": without_log}, "none is logged"),
        ({"training_step": returning_nothing}, "No loss came back"),
        ({"training_step": summed}, "The very first loss is"),
        ({"training_step": softmax_first}, "as they are"),
        ({"training_step": evaluating}, "with the model in training mode"),
        ({"configure_optimizers": by_sgd}, "from step 1 on they differ (with lr=0.05)"),
        ({"configure_optimizers": by_default_rate}, "AdamW, with this `lr`"),
        ({"configure_optimizers": fixed_rate}, "(with lr=0.002)"),
    ],
    ids=["no log", "no loss", "sum", "softmax", "eval", "SGD", "default rate", "one rate for all"],
)
def test_a_module_that_trains_another_way_is_told_where(changes: Any, message: str) -> None:
    feedback = lesson06.module.check(module_with(**changes))
    assert feedback.status == "not yet" and message in feedback.message, feedback


def test_what_is_no_module_of_this_model_is_told() -> None:
    assert "Return a LightningModule" in lesson06.module.check(lambda model, lr: model).message

    def hidden(model: nn.Module, lr: float) -> Any:
        made = module_with()(model, lr)
        del made.model
        object.__setattr__(made, "model", [model])
        return made

    feedback = lesson06.module.check(hidden)
    assert feedback.status == "not yet" and "`self.model = model`" in feedback.message


def test_an_error_in_the_learners_method_is_explained_with_its_line() -> None:
    def broken(self: Any, batch: Any, batch_idx: int) -> Any:
        return functional.cross_entropy(self.modell(batch[0]), batch[1])

    feedback = lesson06.module.check(module_with(training_step=broken))
    assert feedback.status == "error"
    assert "AttributeError" in feedback.message and "self.modell(batch[0])" in feedback.message


def test_a_module_that_logs_more_passes_and_nothing_is_left(tmp_path: Path, monkeypatch: Any, capfd: Any) -> None:
    def more(self: Any, batch: Any, batch_idx: int) -> Any:
        loss = without_log(self, batch, batch_idx)
        self.log_dict({"train_loss": loss, "twice": 2 * loss}, prog_bar=True)
        return {"loss": loss}

    monkeypatch.chdir(tmp_path)
    state = torch.get_rng_state()
    assert lesson06.module.check(module_with(training_step=more)).status == "passed"
    assert torch.equal(torch.get_rng_state(), state)
    assert list(tmp_path.iterdir()) == [] and capfd.readouterr() == ("", "")


# --- finder ---------------------------------------------------------------------------------------------------------


def test_lightnings_answer_was_never_run_and_does_not_fit(tmp_path: Path) -> None:
    """The planted case itself: what the lesson says of Lightning 2.6.6 still holds."""
    frozen = gc.get_freeze_count()
    with lesson06.quieted():
        assert lesson06._planted_answer(str(tmp_path)) == 8192
    memory = lesson06._Memory()
    assert memory.fits(4096) and not memory.fits(8192)
    assert gc.get_freeze_count() == frozen


@pytest.fixture
def known_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's answer without the seconds that its search takes, in a memory that holds 4,300."""
    monkeypatch.setattr(lesson06, "_planted_answer", lambda folder: 8192)
    monkeypatch.setattr(lesson06._Memory, "fits", lambda self, size: size <= 4300)


def halving(find: Any, fits: Any, samples: int) -> int:
    size = min(find(), samples)
    while size and not fits(size):
        size //= 2
    return size


@pytest.mark.usefixtures("known_answer")
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda find, fits, samples: find(), "cannot hold more than there is"),
        (lambda find, fits, samples: min(find(), samples), "you never called `fits(3000)`"),
        (lambda find, fits, samples: find() if fits(find()) else samples // 2, "you never called `fits(1500)`"),
        (lambda find, fits, samples: halving(find, fits, 10**6), "start at what the data set has"),
        (lambda find, fits, samples: max(1, halving(find, fits, samples)), "`fits(1)` was False"),
        (lambda find, fits, samples: halving(lambda: min(3000, find() // 8 * 6), fits, samples), "(it said 96"),
        (lambda find, fits, samples: halving(lambda: 3000, fits, samples), "start at the answer"),
        (lambda find, fits, samples: 0, "more fits"),
        (lambda find, fits, samples: find() / 2, "a whole number"),
        (lambda find, fits, samples: -1, "a whole number"),
        (lambda find, fits, samples: fits(find()), "a whole number"),
    ],
    ids=[
        "trusts",
        "caps",
        "halves once",
        "no cap",
        "at least 1",
        "timid",
        "ignores it",
        "gives up",
        "float",
        "negative",
        "bool",
    ],
)
def test_an_answer_that_was_not_tested_is_told(wrong: Any, message: str) -> None:
    feedback = lesson06.finder.check(wrong)
    assert feedback.status == "not yet" and message in feedback.message, feedback


@pytest.mark.usefixtures("known_answer")
@pytest.mark.parametrize("step", [0, 1], ids=["for ever", "one by one"])
def test_a_search_without_end_is_ended(step: int) -> None:
    def slow(find: Any, fits: Any, samples: int) -> int:
        size = find()
        while not fits(size):
            size -= step
        return size

    feedback = lesson06.finder.check(slow)
    assert feedback.status == "error" and "halve, and be done after a few" in feedback.message


@pytest.mark.usefixtures("known_answer")
def test_a_finer_search_passes_too() -> None:
    def finer(find: Any, fits: Any, samples: int) -> int:
        size = halving(find, fits, samples)
        larger = size * 21 // 20
        return larger if size and larger <= min(samples, find()) and fits(larger) else size

    assert lesson06.finder.check(halving).status == "passed"
    assert lesson06.finder.check(finer).status == "passed"


# --- trainer --------------------------------------------------------------------------------------------------------


def lean(folder: Any, **changes: Any) -> dict[str, Any]:
    return {**lesson06.lean_options(folder), **changes}


@pytest.fixture
def one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lesson06, "_ROUNDS", 1)
    monkeypatch.setattr(lesson06, "_ATTEMPTS", 1)


@pytest.mark.usefixtures("one_round")
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda folder: lean(folder, logger=False), "0 losses are in the CSV log"),
        (lambda folder: lean(folder, log_every_n_steps=50), "0 losses are in the CSV log"),
        (lambda folder: lean(folder, logger=CSVLogger(Path(folder).parent / "other")), "0 losses are in the CSV log"),
        (lambda folder: lean(folder, callbacks=[], enable_checkpointing=False), "No checkpoint of step 40"),
        (
            lambda folder: lean(folder, callbacks=[ModelCheckpoint(folder, every_n_train_steps=30)]),
            "(found: [30])",
        ),
        (lambda folder: lean(folder, max_steps=10), "max_steps would change the job"),
        (lambda folder: lean(folder, limit_train_batches=4, precision="16"), "limit_train_batches and precision would"),
        (lambda folder: L.Trainer(logger=False, enable_progress_bar=False), "Return a dict of Trainer's options"),
    ],
    ids=["no logger", "seldom", "elsewhere", "no checkpoint", "too early", "steps", "two", "a Trainer"],
)
def test_a_trainer_that_keeps_too_little_is_told(wrong: Any, message: str) -> None:
    feedback = lesson06.trainer.check(wrong)
    assert feedback.status == "not yet" and message in feedback.message, feedback


@pytest.mark.usefixtures("one_round")
def test_an_option_that_trainer_does_not_know_is_the_learners_error() -> None:
    feedback = lesson06.trainer.check(lambda folder: lean(folder, no_such_option=1))
    assert feedback.status == "error" and "no_such_option" in feedback.message


def timed(monkeypatch: pytest.MonkeyPatch, heavy_s: Any, lean_s: Any) -> None:
    """Replace the measured seconds, and keep the rest."""

    def fit(options: Any, folder: Path, run: Any = None) -> Any:
        run = run or lesson06._Fit()
        run.steps = 40
        run.seconds = next(heavy_s if "heavy" in folder.name else lean_s)
        return run

    monkeypatch.setattr(lesson06, "_timed_fit", fit)
    monkeypatch.setattr(lesson06, "_check_kept", lambda run, folder: None)


def test_the_median_of_the_rounds_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    timed(monkeypatch, iter([0.03, 0.3, 0.03]), iter([0.01, 0.01, 0.2]))
    feedback = lesson06.trainer.check(lean)
    assert feedback.status == "passed" and "3.0 times as fast" in feedback.message


def test_a_no_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    timed(monkeypatch, itertools.repeat(0.03), iter([0.03] * 3 + [0.01] * 3))
    assert lesson06.trainer.check(lean).status == "passed"
    timed(monkeypatch, itertools.repeat(0.03), itertools.repeat(0.025))
    feedback = lesson06.trainer.check(lean)
    assert feedback.status == "not yet" and "1.20 times as fast, and 1.5 are asked for" in feedback.message


@pytest.mark.alone
@pytest.mark.usefixtures("one_round")
def test_the_heavy_options_are_no_answer_and_the_threads_come_back() -> None:
    threads = torch.get_num_threads()
    feedback = lesson06.trainer.check(lambda folder: lesson06.heavy_options(folder))
    assert feedback.status == "not yet" and "Which of them works in every step" in feedback.message, feedback
    assert torch.get_num_threads() == threads
