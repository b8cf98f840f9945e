"""Predicted peak training memory against what real steps on this CPU allocate, for eight models.

`predict_memory` sees shapes alone; `measure_cpu_memory` runs two real steps under the profiler, which notes every
allocation. It is measured twice: as training runs, and without oneDNN, the library behind PyTorch's CPU convolutions.
Some of its kernels take a buffer of their own for the moment (18 MiB for the backward pass of one layer of 2.25 MiB,
where images are 2 × 2 pixels small), which no prediction from shapes sees. cuDNN's workspaces are the same on a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

from bench.report import Section, Table, times
from course_utils import views
from course_utils.cpu_memory import measure_cpu_memory
from course_utils.memory_model import predict_memory
from course_utils.resnet import small_resnet

_BATCH = 16


@dataclass(frozen=True)
class Subject:
    """A model to predict: how to make it, one sample's shape, the optimizer, and autocast's dtype or None."""

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW
    autocast: torch.dtype | None = None

    def batch(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(inputs, targets) of `size` samples."""
        return torch.rand(size, *self.shape), torch.randint(10, (size,))


@dataclass(frozen=True)
class Row:
    """Peak bytes, and the seconds that predicting (at this size and at half of it) and measuring took."""

    model: str
    batch_size: int
    predicted_bytes: int
    measured_bytes: int
    without_onednn_bytes: int
    predict_s: float
    measure_s: float

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted_bytes / self.measured_bytes

    @property
    def ratio_without_onednn(self) -> float:
        """Predicted over measured without oneDNN's own buffers."""
        return self.predicted_bytes / self.without_onednn_bytes


class Transformer(nn.Module):
    """(N, length, 64) → (N, 10): two encoder layers, recomputed in backward where `checkpointed`."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 256, 0.1, batch_first=True) for _ in range(2))
        self.head = nn.Linear(64, 10)
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Encode, then classify the mean."""
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        logits: torch.Tensor = self.head(x.mean(1))
        return logits


def subjects() -> tuple[Subject, ...]:
    """CNNs, a vision transformer, encoders with and without checkpointing; fp32 and bf16; SGD and AdamW."""
    from torchvision import models

    def momentum(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    def vision_transformer() -> Any:
        return models.VisionTransformer(64, 8, num_layers=2, num_heads=4, hidden_dim=128, mlp_dim=512, num_classes=10)

    return (
        Subject("encoder, AdamW", lambda: Transformer(False), (64, 64)),
        Subject("encoder with checkpointing, AdamW", lambda: Transformer(True), (64, 64)),
        Subject("vision transformer, AdamW", vision_transformer, (3, 64, 64)),
        Subject("small ResNet, AdamW", small_resnet, (3, 64, 64)),
        Subject("small ResNet, bf16 autocast, AdamW", small_resnet, (3, 64, 64), autocast=torch.bfloat16),
        Subject("ResNet-18, SGD with momentum", lambda: models.resnet18(num_classes=10), (3, 64, 64), momentum),
        Subject("SqueezeNet 1.1, AdamW", lambda: models.squeezenet1_1(num_classes=10), (3, 96, 96)),
        Subject("MobileNetV3-small, SGD", lambda: models.mobilenet_v3_small(num_classes=10), (3, 96, 96), plain_sgd),
    )


def measure(quick: bool = False, *, progress: bool = True) -> Section:
    """Eight models, or with `quick` the first one."""
    chosen = subjects()[: 1 if quick else None]
    rows = [_row(subject) for subject in tqdm(chosen, desc="memory", leave=False, disable=not progress)]
    notes = (
        f"Without oneDNN's own buffers: {_distances([row.ratio_without_onednn for row in rows])}; "
        f"with them: {_distances([row.ratio for row in rows])}.",
        "They grow with the weights and the threads, not with the batch: for a small model on small images they show.",
        "A GPU's CUDA context, library workspaces and fragmentation come on top too; a CPU cannot show them.",
    )
    records = tuple(
        {**asdict(row), "ratio": row.ratio, "ratio_without_onednn": row.ratio_without_onednn} for row in rows
    )
    return Section("memory", "Predicted and measured training memory", (_table(rows),), records, notes)


def _row(subject: Subject) -> Row:
    torch.manual_seed(0)
    model, batch = subject.make(), subject.batch(_BATCH)
    started = time.perf_counter()
    prediction = predict_memory(
        model, batch, functional.cross_entropy, subject.optimizer, (_BATCH // 2, _BATCH), autocast=subject.autocast
    )
    predict_s = time.perf_counter() - started
    started = time.perf_counter()
    arguments = model, batch, functional.cross_entropy, subject.optimizer, subject.autocast
    measured = measure_cpu_memory(*arguments)
    measure_s = time.perf_counter() - started
    with torch.backends.mkldnn.flags(enabled=False):  # oneDNN's name before 2020
        without = measure_cpu_memory(*arguments)
    return Row(subject.name, _BATCH, prediction.at(_BATCH).peak_bytes, measured, without, predict_s, measure_s)


def _table(rows: Sequence[Row]) -> Table:
    headers = (
        "model and optimizer", "predicted / measured", "without oneDNN", "predicted", "measured", "without oneDNN",
        "batch", "s to predict", "s to measure",
    )  # fmt: skip
    return Table(
        "Peak of two training steps",
        headers,
        tuple(
            (
                row.model,
                times(row.ratio, 3),
                times(row.ratio_without_onednn, 3),
                _mib(row.predicted_bytes),
                _mib(row.measured_bytes),
                _mib(row.without_onednn_bytes),
                str(row.batch_size),
                f"{row.predict_s:.1f}",
                f"{row.measure_s:.1f}",
            )
            for row in rows
        ),
    )


def _distances(ratios: Sequence[float]) -> str:
    errors = [abs(value - 1) for value in ratios]
    return f"at most {max(errors):.1%} away, {sum(errors) / len(errors):.1%} in the mean"


def _mib(used_bytes: int) -> str:
    return views.number(used_bytes / 2**20, "MiB", 1)
