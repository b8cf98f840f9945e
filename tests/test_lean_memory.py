"""What each technique of lesson 05 saves: predicted from shapes alone, and measured on the CPU (FACTS 19).

Two measures. For the transformer and the MLP it is `measure_cpu_memory`: what PyTorch's allocator gave, kernels' own
buffers included. Convolutions on a CPU take much memory inside their kernels: oneDNN for float32, and for bfloat16, on
a CPU without instructions for it, a fallback that takes a quarter more than all tensors together. No prediction sees
that. So the ResNet is judged by `SimulatedMemory`, which counts tensors, as `lean.ablate` does on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from course_utils.checkpointing import checkpoint_blocks, correct_batchnorm
from course_utils.cpu_memory import measure_cpu_memory
from course_utils.mem_tracker import FakeTraining
from course_utils.memory_model import predict_memory
from course_utils.memory_step import Step, checked_step
from course_utils.oom import SimulatedMemory
from course_utils.resnet import small_resnet

CE = nn.CrossEntropyLoss()
AdamW = torch.optim.AdamW


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Transformer(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.blocks = nn.Sequential(
            *(nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True) for _ in range(3))
        )
        self.head = nn.Linear(width, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(tokens)).mean(1))  # type: ignore[no-any-return]


def mlp() -> nn.Module:
    """Many weights and few activations: here the optimizer's step is the peak."""
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


LABELS = torch.arange(8)
IMAGES, TOKENS, ROWS = torch.rand(8, 3, 80, 80), torch.randint(0, 64, (8, 32)), torch.rand(8, 64)
JOBS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
    "resnet": (lambda: small_resnet(10, 16), IMAGES),
    "transformer": (Transformer, TOKENS),
    "mlp": (mlp, ROWS),
}


def channels_last(thing: Any) -> Any:
    return thing.to(memory_format=torch.channels_last)


def with_optimizer(**options: Any) -> dict[str, Any]:
    return {"optimizer": lambda parameters: AdamW(parameters, **options)}


# A technique: its job, what of the job it changes, and what it must save: some, none, or less than none.
TECHNIQUES: dict[str, tuple[str, dict[str, Any], int]] = {
    "autocast, ResNet": ("resnet", {"autocast": torch.bfloat16}, 1),
    "autocast, transformer": ("transformer", {"autocast": torch.bfloat16}, 1),
    "checkpointing, ResNet": (
        "resnet",
        {"model": lambda: correct_batchnorm(checkpoint_blocks(small_resnet(10, 16)))},
        1,
    ),
    "checkpointing, transformer": (
        "transformer",
        {"model": lambda: checkpoint_blocks(Transformer(), nn.TransformerEncoderLayer)},
        1,
    ),
    "half the width, ResNet": ("resnet", {"model": lambda: small_resnet(10, 8)}, 1),
    "half the width, transformer": ("transformer", {"model": lambda: Transformer(16)}, 1),
    "gradients kept as zeros, transformer": ("transformer", {"set_to_none": False}, -1),
    "gradients kept as zeros, MLP": ("mlp", {"set_to_none": False}, 0),
    "forloop optimizer, MLP": ("mlp", with_optimizer(foreach=False, fused=False), 0),
    "foreach optimizer, MLP": ("mlp", with_optimizer(foreach=True), 1),
    "fused optimizer, MLP": ("mlp", with_optimizer(fused=True), 1),
    "fused optimizer, transformer": ("transformer", with_optimizer(fused=True), 0),
    "fused optimizer and zeros, MLP": ("mlp", {**with_optimizer(fused=True), "set_to_none": False}, 1),
    "inference_mode, ResNet": ("resnet", {"loss": None, "optimizer": None}, 1),
    "inference_mode, transformer": ("transformer", {"loss": None, "optimizer": None}, 1),
    "channels_last, ResNet": (
        "resnet",
        {"model": lambda: channels_last(small_resnet(10, 16)), "inputs": channels_last(IMAGES)},
        0,
    ),
}


def predicted_and_measured(job: str, **changes: Any) -> tuple[int, int]:
    make, inputs = JOBS[job]
    torch.manual_seed(0)
    model, batch = changes.pop("model", make)(), (changes.pop("inputs", inputs), LABELS)
    loss, optimizer = changes.pop("loss", CE), changes.pop("optimizer", AdamW)
    autocast, set_to_none = changes.pop("autocast", None), changes.pop("set_to_none", True)
    assert not changes
    step = checked_step(model, batch, loss, optimizer, autocast, set_to_none)
    predicted = FakeTraining(step).peak(len(LABELS))["Total"]  # one size only, where predict_memory takes three
    if job == "resnet":
        return predicted, tensors_of(step)
    return predicted, measure_cpu_memory(model, batch, loss, optimizer, autocast, set_to_none=set_to_none)


def tensors_of(step: Step) -> int:
    """The peak of all tensors in two real steps."""
    step = step.copied().with_optimizer().in_its_mode()
    with SimulatedMemory(None) as memory:
        memory.track(step.whole, *step.batch_tensors())
        for _ in range(2):
            step.run()
    return memory.peak_bytes


PLAIN: dict[str, tuple[int, int]] = {}


@pytest.mark.parametrize("technique", TECHNIQUES)
def test_what_a_technique_saves_is_predicted(technique: str) -> None:
    job, changes, sign = TECHNIQUES[technique]
    if job not in PLAIN:
        PLAIN[job] = predicted_and_measured(job)
    found = predicted_and_measured(job, **changes)
    saved = [before - after for before, after in zip(PLAIN[job], found, strict=True)]
    assert found[0] == pytest.approx(found[1], rel=0.03)
    assert saved[0] == pytest.approx(saved[1], abs=0.03 * PLAIN[job][1])
    for each in saved:
        # A technique that saves nothing moves no more than a few small tensors.
        assert each * sign > 0.02 * PLAIN[job][1] if sign else abs(each) < 0.005 * PLAIN[job][1]


def test_reading_the_loss_costs_no_memory() -> None:
    """A prediction cannot read a loss, so `item_every` has none; a real step shows that there is nothing to predict."""

    def peak(item_every: int) -> int:
        torch.manual_seed(0)
        model = mlp()
        optimizer = AdamW(model.parameters())
        with SimulatedMemory(None) as memory:
            memory.track(model, ROWS, LABELS)
            for number in range(1, 5):
                loss = CE(model(ROWS), LABELS)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if item_every and number % item_every == 0:
                    loss.item()
        return memory.peak_bytes

    assert peak(0) == peak(1) == peak(4) > 0


# The arguments


def test_inference_takes_no_loss_and_no_optimizer_and_leaves_the_mode() -> None:
    model = small_resnet(10, 8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    training = predict_memory(model, (IMAGES, LABELS), CE, AdamW, [4, 8])
    parts = predict_memory(model.eval(), (IMAGES, LABELS), None, None, [4, 8]).at(8)
    assert (parts.gradients_bytes, parts.optimizer_bytes) == (0, 0)
    assert parts.parameters_bytes == training.at(8).parameters_bytes and not model.training
    assert parts.peak_bytes < 0.6 * training.at(8).peak_bytes
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    measure_cpu_memory(model, (IMAGES, LABELS), None, None)
    assert not any(value.is_inference() for value in model.state_dict().values())
    assert predict_memory(model, (IMAGES, LABELS), None, None).largest_batch(64 * 2**20) > 8


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.LayerNorm(512), nn.Softmax(1), nn.Identity()], ids=repr)
def test_inference_counts_what_operations_make_inside_and_the_models_own_mode(layer: nn.Module) -> None:
    """In train mode dropout makes a mask. Inference mode shows such operations whole, so predictions go without it."""

    def peaks(training: bool) -> tuple[int, int]:
        model = nn.Sequential(nn.Linear(64, 512), layer).train(training)
        predicted = predict_memory(model, (ROWS, LABELS), None, None, [4, 8]).at(8).peak_bytes
        return predicted, measure_cpu_memory(model, (ROWS, LABELS), None, None)

    predicted, measured = zip(peaks(True), peaks(False), strict=True)
    assert predicted == pytest.approx(measured, rel=0.001)
    assert (predicted[0] > predicted[1]) is isinstance(layer, nn.Dropout)


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"loss": None}, ValueError, "optimizer without the other: training needs loss and optimizer"),
        ({"optimizer": None}, ValueError, "loss without the other: training needs loss and optimizer"),
        ({"set_to_none": None}, TypeError, "set_to_none must be True or False"),
        ({"set_to_none": 1}, TypeError, "set_to_none must be True or False"),
    ],
    ids=["no loss", "no optimizer", "None", "1"],
)
def test_arguments_that_do_not_fit_together(changes: dict[str, Any], error: type[Exception], said: str) -> None:
    given = {"loss": CE, "optimizer": AdamW, **changes}
    for function in (predict_memory, measure_cpu_memory):
        with pytest.raises(error, match=said):
            function(mlp(), (ROWS, LABELS), **given)  # type: ignore[operator]


def test_an_optimizer_that_is_given_made_keeps_its_way() -> None:
    def made(**options: Any) -> tuple[int, int]:
        torch.manual_seed(0)
        model = mlp()
        optimizer = AdamW(model.parameters(), **options)
        step = checked_step(model, (ROWS, LABELS), CE, optimizer, None)
        return FakeTraining(step).peak(8)["Total"], measure_cpu_memory(model, (ROWS, LABELS), CE, optimizer)

    peaks = {name: made(**{name: True}) for name in ("fused", "foreach")} | {"forloop": made(foreach=False)}
    assert all(predicted == pytest.approx(real, rel=0.01) for predicted, real in peaks.values())
    assert peaks["fused"][0] < 0.9 * peaks["foreach"][0] < 0.9 * peaks["forloop"][0]
