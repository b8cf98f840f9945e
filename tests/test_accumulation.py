"""A smaller micro-batch changes nothing else: exact gradient, exact effective batch (BSF-10)."""

from collections import namedtuple

import pytest
import torch
from torch import nn
from torch.nn import functional

from course_utils.accumulation import epoch_warnings, learning_rate_advice, micro_batches, plan_accumulation


def gradient(model, batch, pieces):
    model.zero_grad()
    for (inputs, targets), weight in pieces:
        (weight * functional.cross_entropy(model(inputs), targets)).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("micro_size", [1, 3, 7, 8, 12, 31, 32, 100])
def test_the_gradient_is_that_of_the_whole_batch(micro_size):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    batch = torch.randn(32, 5, dtype=torch.double), torch.randint(0, 3, (32,))
    whole = gradient(model, batch, [(batch, 1.0)])
    pieces = list(micro_batches(batch, micro_size))
    assert torch.allclose(gradient(model, batch, pieces), whole, rtol=1e-12, atol=1e-14)
    assert sum(weight for _, weight in pieces) == pytest.approx(1, abs=1e-12)
    assert max(len(targets) for (_, targets), _ in pieces) <= micro_size
    assert torch.equal(torch.cat([inputs for (inputs, _), _ in pieces]), batch[0])


def test_equal_weights_would_be_wrong_for_a_short_tail():
    model, batch = nn.Linear(2, 2), (torch.randn(10, 2), torch.randint(0, 2, (10,)))
    pieces = [(piece, 1 / 3) for piece, _ in micro_batches(batch, 4)]
    assert [weight for _, weight in micro_batches(batch, 4)] == [0.4, 0.3, 0.3]
    assert not torch.allclose(gradient(model, batch, pieces), gradient(model, batch, [(batch, 1.0)]), rtol=1e-3)


Sample = namedtuple("Sample", "image label")


def test_a_batch_may_be_nested_like_a_loaders():
    batch = {
        "ids": torch.arange(5),
        "pair": Sample(torch.zeros(5, 2), [torch.ones(5), torch.ones(5, 1)]),
        "text": ["a", "b", "c", "d", "e"],
    }
    (first, share), (last, rest) = micro_batches(batch, 3)
    assert (share, rest) == (0.6, 0.4)
    assert isinstance(first["pair"], Sample)
    assert first["pair"].label[1].shape == (3, 1)
    assert (last["ids"].tolist(), last["text"]) == ([3, 4], ["d", "e"])
    assert [len(piece) for piece, _ in micro_batches(torch.zeros(3, 2), 2)] == [2, 1]


@pytest.mark.parametrize(
    ("batch", "size", "error", "words"),
    [
        ((torch.zeros(3), torch.zeros(4)), 2, ValueError, r"same number of samples.*\[3, 4\]"),
        (torch.zeros(0, 3), 2, ValueError, "at least 1"),
        ((), 2, ValueError, "same number"),
        ((torch.zeros(3), torch.tensor(1.0)), 2, ValueError, "without dimensions"),
        (3, 2, TypeError, "not int"),
        (torch.zeros(3), 0, ValueError, "micro_size=0"),
        (torch.zeros(3), 1.5, ValueError, "micro_size=1.5"),
    ],
)
def test_what_cannot_be_cut_is_said_at_once(batch, size, error, words):
    with pytest.raises(error, match=words):
        micro_batches(batch, size)


@pytest.mark.parametrize(
    ("effective", "largest", "sizes"),
    [(32, 12, (11, 11, 10)), (32, 8, (8,) * 4), (32, 16, (16, 16)), (32, 100, (32,)), (7, 3, (3, 2, 2)), (1, 1, (1,))],
)
def test_the_effective_batch_stays_exact(effective, largest, sizes):
    """BSF-10: 32 with 12 fitting is not 36."""
    plan = plan_accumulation(effective, largest)
    assert plan.sizes == sizes
    assert plan.steps == len(sizes)
    assert plan.micro_size == sizes[0]
    pieces = micro_batches(torch.zeros(effective), plan.micro_size)
    assert tuple(len(piece) for piece, _ in pieces) == sizes


def test_every_plan_adds_up_and_fits():
    for effective in range(1, 80):
        for largest in range(1, 90):
            sizes = plan_accumulation(effective, largest).sizes
            assert sum(sizes) == effective
            assert max(sizes) <= largest
            assert len(sizes) == -(-effective // largest)
            assert max(sizes) - min(sizes) <= 1


def test_a_plan_can_be_read():
    assert repr(plan_accumulation(32, 12)) == "Effective batch 32 = 11 + 11 + 10 (at most 12 fit). One optimizer step."
    assert "25 of up to 40" in repr(plan_accumulation(1000, 40))
    with pytest.raises(ValueError, match="largest_micro=0"):
        plan_accumulation(32, 0)


PARAMETERS = [nn.Parameter(torch.zeros(1))]


class MyAdam(torch.optim.Adam):
    pass


@pytest.mark.parametrize(
    ("optimizer", "factor", "rule"),
    [
        (torch.optim.SGD(PARAMETERS, 0.1), 4, "linear rule"),
        (torch.optim.SGD, 4, "Goyal"),
        ("SGD", 4, "arXiv:1706.02677"),
        (torch.optim.AdamW(PARAMETERS), 2, "square-root rule"),
        (torch.optim.RMSprop, 2, "Malladi"),
        (MyAdam(PARAMETERS), 2, "arXiv:2205.10287"),
    ],
)
def test_advice_on_the_learning_rate_is_a_rule_of_thumb(optimizer, factor, rule):
    advice = learning_rate_advice(0.1, 32, 128, optimizer)
    assert advice.factor == pytest.approx(factor)
    assert advice.lr == pytest.approx(0.1 * factor)
    assert rule in advice.text
    assert "rule of thumb" in repr(advice)
    assert "nothing was changed" in advice.text
    assert learning_rate_advice(0.1, 128, 32, optimizer).factor == pytest.approx(1 / factor)


def test_advice_changes_no_optimizer_and_knows_its_limits():
    optimizer = torch.optim.SGD(PARAMETERS, 0.1)
    learning_rate_advice(0.1, 32, 64, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.1
    unknown = learning_rate_advice(0.1, 32, 64, torch.optim.LBFGS)
    assert (unknown.lr, unknown.factor) == (None, None)
    assert "no rule of thumb is known for LBFGS" in unknown.text
    assert learning_rate_advice(0.1, 32, 32, "LBFGS").lr == 0.1
    for bad in (0, -1, float("nan"), "0.1"):
        with pytest.raises(ValueError, match="lr="):
            learning_rate_advice(bad, 32, 64, "SGD")


NORMED = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((100, 32, False, NORMED), []),
        (
            (97, 32, False, NORMED),
            ["last batch (97 = … x 32 + 1) holds one sample, and the BatchNorm1d '1' normalises"],
        ),
        ((97, 32, True, NORMED), []),
        ((97, 32, False, nn.Linear(2, 2)), []),
        ((97, 32, False), ["a BatchNorm, if the model has one, normalises"]),
        ((97, 1, True, NORMED), ["Every batch holds one sample"]),
        ((1, 4, False, NORMED), ["is larger than the data set: every batch holds 1", "holds one sample"]),
        ((20, 32, True, NORMED), ["drop_last leaves no batch: 20 samples do not fill one of 32"]),
        ((20, 32, False, NORMED), ["The batch (32) is larger than the data set"]),
        ((32, 32, True, NORMED), []),
    ],
)
def test_an_epoch_that_goes_wrong_is_told(arguments, expected):
    """BSF-01: drop_last with a batch above the data set leaves 0 batches."""
    found = epoch_warnings(*arguments)
    assert len(found) == len(expected)
    for sentence, words in zip(found, expected, strict=True):
        assert words in sentence
        assert sentence.endswith(".")


def test_the_warning_is_true_of_torch():
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        NORMED.train()(torch.zeros(1, 2))
