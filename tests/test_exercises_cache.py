"""Lesson 07's exercises: the stub is not attempted, each typical mistake gets its message, the solution passes."""

import gc

import pytest
import torch
from torch.nn import functional

from course_utils.exercises import lesson07


def no_stub(*arguments): ...


@pytest.mark.parametrize("exercise", [lesson07.held, lesson07.total_loss, lesson07.tidy], ids=lambda one: one.name)
def test_a_stub_is_not_attempted(exercise) -> None:
    assert exercise.check(no_stub).status == "not attempted"


# --- held -------------------------------------------------------------------------------------------------------


def let_go_of(*names, losses=lambda loss: loss.item()):
    """A learner's answer that deletes these entries and makes something of the losses."""

    def let_go(session):
        session["losses"] = [losses(loss) for loss in session["losses"]]
        for name in names:
            del session[name]
        return session

    return let_go


ALL = ("model", "optimizer", "scheduler", "scores", "error")
elsewhere = []


def hoard(session):
    elsewhere.append(session["model"])
    return lesson07.let_go(session)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (let_go_of("model"), "The model's weights are still in memory: session['"),
        (let_go_of("model", "scores", "error"), "session['optimizer']"),
        (let_go_of("model", "optimizer", "scores", "error"), "session['scheduler']"),
        (let_go_of(*ALL, losses=lambda loss: loss), "(its graph) leads to them: a tensor keeps the graph that made it"),
        (let_go_of(*ALL[:3], "error"), "session['scores']"),
        (let_go_of(*ALL[:4]), "session['error']"),
        (let_go_of(*ALL, "images"), "session['images'] is still needed"),
        (let_go_of(*ALL, losses=lambda loss: 0.0), "keep their values"),
        (let_go_of(*ALL, losses=str), "as numbers"),
        (lambda session: {}, "session['losses'] is still needed"),
        (lambda session: {**lesson07.let_go(session), "losses": []}, "should still have 3 losses"),
        (lambda session: {**lesson07.let_go(session), "images": torch.zeros(2)}, "should stay as it was"),
        (lambda session: [session], "Return the session, a dict"),
        (hoard, "something outside the session holds them"),
    ],
    ids="model three scheduler losses scores error images zeros text empty none other list hoard".split(),
)
def test_held_mistakes_are_named_by_who_holds(wrong, message) -> None:
    feedback = lesson07.held.check(wrong)
    elsewhere.clear()
    assert feedback.status == "not yet"
    assert message in feedback.message


@pytest.mark.parametrize(
    "keep",
    [lambda loss: float(loss.detach()), lambda loss: loss.detach(), lambda loss: loss.item()],
    ids="float detach item".split(),
)
def test_held_accepts_each_way_to_keep_the_losses(keep) -> None:
    assert lesson07.held.check(let_go_of(*ALL, losses=keep)).status == "passed"


def test_held_accepts_a_new_dict_of_what_stays() -> None:
    def let_go(session):
        return {"images": session["images"], "losses": [loss.item() for loss in session["losses"]]}

    assert lesson07.held.check(let_go).status == "passed"


def test_held_changes_no_random_state_and_leaves_nothing_behind() -> None:
    before = torch.get_rng_state()
    feedback = lesson07.held.check(lesson07.let_go)
    assert feedback.status == "passed"
    assert torch.equal(before, torch.get_rng_state())


# --- total_loss -------------------------------------------------------------------------------------------------


def summing(keep, finish=float, grad=True):
    """A learner's mean that keeps `keep(loss)` of each loss."""

    def mean_loss(model, batches):
        total = 0.0
        with torch.set_grad_enabled(grad):
            for inputs, labels in batches:
                total += keep(functional.cross_entropy(model(inputs), labels))
        return finish(total / len(batches))

    return mean_loss


def in_a_list(model, batches):
    losses = [functional.cross_entropy(model(inputs), labels) for inputs, labels in batches]
    return (sum(losses) / len(losses)).item()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (summing(lambda loss: loss, finish=lambda total: total.item()), "keeps its batch's graph and activations"),
        (in_a_list, "keeps its batch's graph and activations"),
        (summing(lambda loss: loss, finish=lambda total: total), "a tensor with the graph that made it"),
        (summing(lambda loss: loss.detach(), finish=lambda total: total), "without a graph, which is half way"),
        (summing(lambda loss: loss.item(), finish=lambda total: 2 * total), "The mean loss of 3 batches is"),
        (summing(lambda loss: loss.item(), finish=str), "Return a float"),
    ],
    ids="sum list graph detached twice text".split(),
)
def test_total_loss_mistakes(wrong, message) -> None:
    feedback = lesson07.total_loss.check(wrong)
    assert feedback.status == "not yet"
    assert message in feedback.message


@pytest.mark.parametrize(
    "right",
    [
        summing(lambda loss: loss.item()),
        summing(lambda loss: loss.detach(), finish=lambda total: total.item()),
        summing(lambda loss: loss, grad=False),
        lesson07.mean_loss,
    ],
    ids="item detach no_grad solution".split(),
)
def test_total_loss_accepts_whatever_keeps_no_graph(right) -> None:
    feedback = lesson07.total_loss.check(right)
    assert feedback.status == "passed", feedback
    assert "Nothing piles up" in feedback.message


# --- tidy -------------------------------------------------------------------------------------------------------


def still_collecting(model, optimizer, batches):
    losses = []
    for images, labels in batches:
        losses += lesson07.train_briskly(model, optimizer, [(images, labels)])
        gc.collect()
    return losses


@pytest.mark.alone
def test_tidy_is_measured_and_says_how_fast_it_could_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lesson07, "_ATTEMPTS", 1)
    feedback = lesson07.tidy.check(still_collecting)
    assert feedback.status == "not yet"
    assert "what in the loop is no training?" in feedback.message
    monkeypatch.undo()
    passed = lesson07.tidy.check(lesson07.train_briskly)
    assert passed.status == "passed", passed


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            lambda model, optimizer, batches: lesson07.train_briskly(model, optimizer, batches[:-1]),
            "train on each once",
        ),
        (lambda model, optimizer, batches: [0.0 for _ in batches], "no longer the same training"),
        (
            lambda model, optimizer, batches: [functional.cross_entropy(model(x), y) for x, y in batches],
            "as a list of floats",
        ),
        (lambda model, optimizer, batches: 2.3, "as a list of floats"),
    ],
    ids="fewer zeros tensors number".split(),
)
def test_tidy_mistakes(wrong, message, monkeypatch) -> None:
    monkeypatch.setattr(lesson07, "_STEPS", 2)
    feedback = lesson07.tidy.check(wrong)
    assert feedback.status == "not yet"
    assert message in feedback.message


@pytest.mark.parametrize(
    ("yours", "status"),
    [([1.0, 1.0], "not yet"), ([0.9, 0.3], "passed"), ([0.43], "passed"), ([0.45, 0.45], "not yet")],
)
def test_tidy_measures_a_no_again(yours, status, monkeypatch) -> None:
    """One second with tidying, 0.2 without: 0.44 would be enough."""
    planned = iter(yours)

    def timed(train, model, batches, device):
        if train is lesson07.train_tidily:
            return 1.0, [1.0]
        return (0.2, [1.0]) if train is lesson07.train_briskly else (next(planned), [1.0])

    monkeypatch.setattr(lesson07, "_timed", timed)
    assert lesson07.tidy.check(lambda model, optimizer, batches: [1.0]).status == status
