"""Checkpointed blocks: the same training in less memory, BatchNorm counted once, and nothing else changed."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from course_utils.checkpointing import (
    checkpoint_blocks,
    checkpointed_blocks,
    correct_batchnorm,
    corrected_momentum,
    is_checkpointed,
    uncheckpoint,
)
from course_utils.memory_model import predict_memory
from course_utils.oom import SimulatedMemory
from course_utils.resnet import ResidualBlock, small_resnet

CE = nn.CrossEntropyLoss()
STEPS = 4


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Transformer(nn.Module):
    """Layers in a list, with dropout and a keyword."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(32, 4, 64, dropout, batch_first=True) for _ in range(3))
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, mask = self.embed(x), nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        logits: torch.Tensor = self.head(x.mean(1))
        return logits


def resnet() -> nn.Module:
    torch.manual_seed(0)
    return small_resnet(10, 8)


def transformer() -> nn.Module:
    torch.manual_seed(0)
    return Transformer()


def image_batch(count: int = 8, size: int = 48) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(count, 3, size, size, generator=generator), torch.arange(count) % 10


def token_batch(count: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 50, (count, 24), generator=generator), torch.arange(count) % 10


def trained(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor], steps: int = STEPS) -> list[float]:
    """The losses of a few steps, from the same random state each time."""
    torch.manual_seed(2)
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def statistics(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def counters(model: nn.Module, inside: bool) -> set[int]:
    """How often BatchNorm counted a batch, in the checkpointed blocks or outside them."""
    blocks = {module for block in checkpointed_blocks(model) for module in block.modules()}
    return {
        int(m.num_batches_tracked) for m in model.modules() if isinstance(m, nn.BatchNorm2d) and (m in blocks) is inside
    }


JOBS: dict[str, tuple[Callable[[], nn.Module], Any, Any]] = {
    "resnet": (resnet, image_batch, None),
    "transformer": (transformer, token_batch, nn.TransformerEncoderLayer),
}


# The same training


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("corrected", [False, True])
def test_losses_gradients_and_weights_are_those_of_the_plain_model(job: str, corrected: bool) -> None:
    make, batch, kinds = JOBS[job]
    plain, model = make(), checkpoint_blocks(make(), kinds)
    model = correct_batchnorm(model) if corrected else model
    assert trained(model, batch()) == trained(plain, batch())  # dropout's masks too
    for (name, one), (_, other) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(one, other), name
        assert one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad), name


def test_without_gradients_and_in_eval_mode_it_is_the_plain_model() -> None:
    plain, model = resnet().eval(), checkpoint_blocks(resnet()).eval()
    images = image_batch()[0]
    calls: list[bool] = []
    model[4].main[0].register_forward_hook(lambda module, *_: calls.append(module.training))
    assert torch.equal(plain(images), model(images))
    model(images).sum().backward()
    assert calls == [False, False]  # nothing was recomputed
    model.train()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        model(images)
    assert counters(model, inside=True) == {1}


def test_it_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(correct_batchnorm(checkpoint_blocks(resnet())), image_batch(), 1)


# AMP-07: why use_reentrant=False


def test_the_reentrant_way_loses_the_gradient_of_a_first_block() -> None:
    block, x = nn.Linear(4, 4), torch.rand(2, 4)
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad"):
        lost = checkpoint(block, x, use_reentrant=True).sum()
    with pytest.raises(RuntimeError, match="does not require grad"):
        lost.backward()
    model = checkpoint_blocks(nn.Sequential(block), nn.Linear)
    model(x).sum().backward()
    assert block.weight.grad is not None and torch.equal(block.weight.grad, x.sum(0).expand(4, 4))


# AMP-08: BatchNorm and dropout in two passes


def test_batchnorm_updates_twice_in_a_step_and_its_running_mean_moves_1_9_times_as_far() -> None:
    plain, model = resnet(), checkpoint_blocks(resnet())
    trained(plain, image_batch(), 1), trained(model, image_batch(), 1)
    assert (counters(model, inside=True), counters(model, inside=False)) == ({2}, {1})
    for block, other in zip(plain[4:8], model[4:8], strict=True):
        assert torch.allclose(other.main[1].running_mean, 1.9 * block.main[1].running_mean, rtol=1e-4)
    assert torch.equal(model[1].running_mean, plain[1].running_mean)  # not in a block


def test_corrected_batchnorm_has_the_plain_statistics_bit_for_bit() -> None:
    plain, model = resnet(), correct_batchnorm(checkpoint_blocks(resnet()))
    trained(plain, image_batch()), trained(model, image_batch())
    assert counters(model, inside=True) == counters(model, inside=False) == {STEPS}
    expected, found = statistics(plain), statistics(model)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    # The same tensors as before, not the copies: whoever holds one (DDP, an average of weights) still holds the right.
    buffer = model[4].main[1].running_mean
    trained(model, image_batch(), 1)
    assert model[4].main[1].running_mean is buffer and not torch.equal(buffer, found["4.main.1.running_mean"])


def test_the_corrected_momentum_gives_the_plain_statistics_but_counts_twice() -> None:
    assert corrected_momentum(0.1) == pytest.approx(0.0513, abs=5e-5)
    assert (corrected_momentum(0), corrected_momentum(1)) == (0, 1)
    plain, model = resnet(), checkpoint_blocks(resnet())
    for block in checkpointed_blocks(model):
        for norm in block.modules():
            if isinstance(norm, nn.BatchNorm2d):
                norm.momentum = corrected_momentum(norm.momentum or 0.0)
    trained(plain, image_batch()), trained(model, image_batch())
    assert counters(model, inside=True) == {2 * STEPS}
    expected, found = statistics(plain), statistics(model)
    for name in expected:
        assert name.endswith("tracked") or torch.allclose(expected[name], found[name], rtol=1e-5, atol=1e-7), name


@pytest.mark.parametrize("wrong", [-0.1, 1.1, True, None, "0.1", float("nan")])
def test_a_momentum_that_will_not_do(wrong: Any) -> None:
    with pytest.raises(ValueError, match="BatchNorm takes a number from 0 to 1"):
        corrected_momentum(wrong)


@pytest.mark.parametrize("norm", ["cumulative", "no statistics", "instance"])
def test_every_norm_with_statistics_is_spared(norm: str) -> None:
    made = {
        "cumulative": lambda: nn.BatchNorm2d(4, momentum=None),
        "no statistics": lambda: nn.BatchNorm2d(4, track_running_stats=False),
        "instance": lambda: nn.InstanceNorm2d(4, track_running_stats=True),
    }[norm]

    def make() -> nn.Module:
        torch.manual_seed(0)
        block = nn.Sequential(nn.Conv2d(3, 4, 3), made(), nn.ReLU())
        return nn.Sequential(block, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10))

    plain, model = make(), correct_batchnorm(checkpoint_blocks(make(), "0"))
    assert trained(plain, image_batch()) == trained(model, image_batch())
    expected, found = statistics(plain), statistics(model)
    assert list(expected) == list(found) and all(torch.equal(expected[name], found[name]) for name in expected)


def test_an_error_in_the_recomputing_pass_and_a_second_backward_leave_the_statistics_right() -> None:
    plain, model = resnet(), correct_batchnorm(checkpoint_blocks(resnet()))
    images, labels = image_batch()
    for each in (plain, model):
        loss = functional.cross_entropy(each(images), labels)
        loss.backward(retain_graph=True)
        loss.backward()
    expected, found = statistics(plain), statistics(model)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    loss = functional.cross_entropy(model(images), labels)
    buffers, after_forward = dict(model.named_buffers()), statistics(model)

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    model[5].main[3].register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
    assert all(model.get_buffer(name) is buffer for name, buffer in buffers.items())
    assert all(torch.equal(model.get_buffer(name), value) for name, value in after_forward.items())


def test_dropout_needs_its_random_state_back() -> None:
    """What `checkpoint` does by default, and what goes wrong without."""

    def gradient(**keywords: Any) -> torch.Tensor:
        torch.manual_seed(0)
        layer, x = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 1)), torch.rand(16, 64)
        output = checkpoint(layer, x, use_reentrant=False, **keywords) if keywords else layer(x)
        output.sum().backward()
        assert layer[0].weight.grad is not None
        return layer[0].weight.grad

    assert torch.equal(gradient(preserve_rng_state=True), gradient())
    assert not torch.allclose(gradient(preserve_rng_state=False), gradient(), rtol=0.1)


# Compiled


@pytest.mark.parametrize("regional", [False, True])
def test_a_compiled_model_counts_once_and_trains_the_same(regional: bool) -> None:
    """With inductor too (seen by hand, torch 2.11 and 2.14); this backend spares the test the C++ compiler."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(ResidualBlock(3, 4, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10))

    torch._dynamo.reset()
    plain, batch = make(), image_batch(8, 16)
    losses, expected = trained(plain, batch), statistics(plain)
    for corrected in (False, True):
        model = checkpoint_blocks(make())
        model = correct_batchnorm(model) if corrected else model
        if regional:
            model[0].compile(backend="aot_eager")
        found = trained(model if regional else torch.compile(model, backend="aot_eager"), batch)
        assert found == pytest.approx(losses, rel=1e-4) and counters(model, inside=True) == {STEPS}
        assert all(torch.allclose(expected[name], model.get_buffer(name), rtol=1e-3) for name in expected)
    torch._dynamo.reset()


# In place, and back


def test_nothing_but_the_class_changes_and_uncheckpoint_takes_it_back() -> None:
    model, before = resnet(), resnet()
    names, tensors = list(model.state_dict()), [id(tensor) for tensor in model.state_dict(keep_vars=True).values()]
    attributes = {name: list(vars(module)) for name, module in model.named_modules()}
    assert correct_batchnorm(checkpoint_blocks(model)) is model
    assert list(model.state_dict()) == names
    assert [id(tensor) for tensor in model.state_dict(keep_vars=True).values()] == tensors
    assert all(isinstance(block, ResidualBlock) and is_checkpointed(block) for block in model[4:8])
    assert repr(model).count("CheckpointedResidualBlock") == 4 and not is_checkpointed(model)
    before.load_state_dict(model.state_dict())
    assert checkpoint_blocks(model) is model and len(checkpointed_blocks(model)) == 4  # once is enough
    assert type(model[4]).__mro__[1] is ResidualBlock
    assert uncheckpoint(model) is model and {type(block) for block in model[4:8]} == {ResidualBlock}
    assert {name: list(vars(module)) for name, module in model.named_modules()} == attributes
    trained(checkpoint_blocks(model), image_batch(), 1)  # uncorrected again
    assert counters(model, inside=True) == {2}


def test_copies_and_pickles_are_checkpointed_and_share_nothing() -> None:
    model = correct_batchnorm(checkpoint_blocks(resnet()))
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(stored, weights_only=False)):
        assert len(checkpointed_blocks(twin)) == 4 and type(twin[4]) is type(model[4])
        assert trained(twin, image_batch()) == trained(resnet(), image_batch())
        assert counters(twin, inside=True) == {STEPS} and counters(model, inside=True) == {0}


def test_a_model_that_is_deleted_is_gone_without_the_garbage_collector() -> None:
    model = correct_batchnorm(checkpoint_blocks(resnet()))
    trained(model, image_batch(), 1)
    alive = weakref.ref(model[4].main[0].weight)
    gc.disable()
    try:
        del model
        assert alive() is None
    finally:
        gc.enable()


# Which blocks


def test_blocks_are_named_by_type_by_name_or_both() -> None:
    def chosen(model: nn.Module, kinds: Any = None) -> list[str]:
        checkpoint_blocks(model, kinds)
        return [name for name, module in model.named_modules() if is_checkpointed(module)]

    assert chosen(resnet()) == chosen(resnet(), ResidualBlock) == ["4", "5", "6", "7"]
    assert chosen(resnet(), "5") == ["5"] and chosen(resnet(), ["7", "4"]) == ["4", "7"]
    assert chosen(resnet(), {nn.MaxPool2d, "6"}) == ["3", "6"]
    # The model is a Sequential too, but no block of itself; what is in a block is in it already.
    assert chosen(resnet(), nn.Sequential)[:3] == ["4.main", "5.main", "5.shortcut"]
    assert chosen(resnet(), (nn.Sequential, ResidualBlock)) == ["4", "5", "6", "7"]
    assert chosen(resnet(), ["5.main", "5"]) == ["5"]
    assert chosen(transformer(), "layers.1") == ["layers.1"]
    assert chosen(transformer(), nn.TransformerEncoderLayer) == ["layers.0", "layers.1", "layers.2"]


@pytest.mark.parametrize(
    ("kinds", "error", "said"),
    [
        (None, ValueError, r"no ResidualBlock inside the model.*perhaps TransformerEncoderLayer, with kinds="),
        (nn.Conv2d, ValueError, "no Conv2d inside"),
        ([], ValueError, "There is no block inside"),
        ("layers.7", ValueError, r"no module 'layers\.7': model\.named_modules\(\)"),
        ("", ValueError, "no module ''"),
        (int, TypeError, "types of modules and names of modules, not <class 'int'>"),
        (nn.Linear(1, 1), TypeError, "types of modules and names of modules"),
        ([3], TypeError, "not 3"),
        (3, TypeError, "not 3"),
    ],
    ids=["default", "type", "none", "name", "root", "no module type", "a module", "number in a list", "number"],
)
def test_what_names_no_block_gets_one_sentence(kinds: Any, error: type[Exception], said: str) -> None:
    model = transformer()
    with pytest.raises(error, match=said) as caught:
        checkpoint_blocks(model, kinds)
    assert "\n" not in str(caught.value) and checkpointed_blocks(model) == []


def test_what_is_no_model_gets_a_sentence() -> None:
    with pytest.raises(TypeError, match=r"model must be an nn\.Module, not list"):
        checkpoint_blocks([nn.Linear(1, 1)])  # type: ignore[arg-type]


# Memory


def test_the_saving_is_predicted_and_seen_and_the_model_stays() -> None:
    """In a row of equal blocks. tests/test_lean_memory.py compares the figures."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        blocks = [ResidualBlock(8, 8, stride=1) for _ in range(4)]
        return nn.Sequential(nn.Conv2d(3, 8, 1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))

    def seen(model: nn.Module) -> int:
        with SimulatedMemory(None) as memory:
            memory.track(model, *batch)
            trained(model, batch, 2)
        return memory.peak_bytes

    batch, plain, model = image_batch(8, 32), make(), correct_batchnorm(checkpoint_blocks(make()))
    before = statistics(model)
    predicted = [predict_memory(one, batch, CE, torch.optim.SGD, [8, 16]).at(8).peak_bytes for one in (plain, model)]
    assert all(torch.equal(value, model.get_buffer(name)) for name, value in before.items())
    assert predicted[1] < 0.7 * predicted[0] and seen(model) < 0.7 * seen(plain)
