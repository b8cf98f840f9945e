"""What `lean.ablate` speeds up: the course's image job without its loading, and a small transformer.

job = image_job()                 # the model, a few batches that lie on the device, the loss
training = job.training()         # a fresh run: always the same weights
training.autocast_dtype = torch.bfloat16
training.start()
training.step(job.batches[0])     # ordinary PyTorch, made to be read
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from course_utils.arguments import whole
from course_utils.images import IMAGE_SIZE, MODEL_WIDTH, Data, class_count, eval_transform, open_data
from course_utils.resnet import ResidualBlock, small_resnet
from course_utils.timing import synchronize

Batch = tuple[torch.Tensor, torch.Tensor]
Loss = Callable[[Any, torch.Tensor], torch.Tensor]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

LOSSES_KEPT = 20  # so many steps of each run are compared
_SEED = 0
_BATCHES = 4
_BATCH_SIZE = {"cpu": 16, "cuda": 128}
# width, blocks, tokens a sequence, sequences a batch
_TRANSFORMER = {"cpu": (64, 2, 64, 16), "cuda": (512, 6, 256, 64)}
_VOCABULARY = 64
_HEAD = 32  # channels of one attention head


@dataclass
class Training:
    """One training run. A switch changes its fields before it starts; the optimizer is made after all of them.

    As it comes it is the naive run: float32, PyTorch's default memory layout, AdamW as it is by default, and the loss
    read with `.item()` after every step, which makes the CPU wait for a GPU.
    """

    model: nn.Module
    loss: Loss
    device: torch.device
    width: int
    make_model: Callable[[int], nn.Module]  # a new model of the same kind, of the given width
    block: type[nn.Module]  # what the model repeats: what checkpointing and regional compilation take
    make_optimizer: MakeOptimizer = lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)
    autocast_dtype: torch.dtype | None = None
    scaler: torch.amp.GradScaler = field(default_factory=lambda: torch.amp.GradScaler("cpu", enabled=False))
    memory_format: torch.memory_format = torch.preserve_format  # as it is
    set_to_none: bool = True
    item_every: int = 1  # read the loss every so many steps; 0: never
    optimizer: torch.optim.Optimizer = field(init=False, repr=False)
    steps: int = field(default=0, init=False)
    losses: list[torch.Tensor] = field(default_factory=list, init=False, repr=False)  # of the first LOSSES_KEPT steps

    def start(self) -> None:
        """Make the optimizer. Call it once, when nothing is to be changed any more."""
        self.model.to(self.device).train()
        self.optimizer = self.make_optimizer(self.model.parameters())

    def step(self, batch: Batch) -> torch.Tensor:
        """One optimizer step on one batch; the loss, still on the device."""
        inputs, targets = batch
        inputs = inputs.to(memory_format=self.memory_format)
        self.optimizer.zero_grad(set_to_none=self.set_to_none)
        with torch.autocast(self.device.type, dtype=self.autocast_dtype, enabled=self.autocast_dtype is not None):
            loss = self.loss(self.model(inputs), targets)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    def run(self, batches: tuple[Batch, ...], steps: int) -> None:
        """`steps` more steps, over and over the same batches in the same order."""
        for _ in range(steps):
            loss = self.step(batches[self.steps % len(batches)])
            self.steps += 1
            if len(self.losses) < LOSSES_KEPT:
                self.losses.append(loss)
            if self.item_every and self.steps % self.item_every == 0:
                loss.item()


@dataclass(frozen=True, repr=False)
class Job:
    """A fixed training job: what is trained on which batches. Make your own with the same fields.

    `make_model(width)` gives a new model on any device, `block` is the type of the module that it repeats, `batches`
    are (inputs, targets) on `device`, sample by sample along the first dimension. `loss(model(inputs), targets)` is a
    mean. A model with dropout will do, but then losses differ by chance too.
    """

    name: str
    make_model: Callable[[int], nn.Module]
    width: int
    block: type[nn.Module]
    loss: Loss
    batches: tuple[Batch, ...]
    device: torch.device

    @property
    def batch_size(self) -> int:
        """Samples a batch."""
        return len(self.batches[0][0])

    def training(self) -> Training:
        """A fresh run that has not started: the same initial weights each time. It seeds torch's random numbers."""
        torch.manual_seed(_SEED)
        model = self.make_model(self.width).to(self.device)
        return Training(model, self.loss, self.device, self.width, self.make_model, self.block)

    def __repr__(self) -> str:
        shape = " × ".join(map(str, self.batches[0][0].shape))
        return f"Job {self.name}: width {self.width}, {len(self.batches)} batches of {shape} on {self.device}"


def image_job(
    device: torch.device | str | None = None,
    *,
    data: Data = None,
    width: int | None = None,
    image_size: int | None = None,
    batch_size: int | None = None,
    progress: bool = True,
) -> Job:
    """The course's job without its loading: `small_resnet` on four batches of photographs, float32, on the device.

    `data` as in `workload.train`; None for the course's photographs. The rest: None for what the device takes, as in
    the other lessons, and a batch of 16 on a CPU, 128 on a GPU. Images are resized, not cropped at random: every run
    sees the same. ValueError for data that has too few images.
    """
    place = _device(device)
    width = whole("width", MODEL_WIDTH[place.type] if width is None else width)
    image_size = whole("image_size", IMAGE_SIZE[place.type] if image_size is None else image_size, 48)
    batch_size = whole("batch_size", _BATCH_SIZE[place.type] if batch_size is None else batch_size)
    dataset = open_data(data, "train", eval_transform(image_size), progress=progress)
    wanted = _BATCHES * batch_size
    if len(dataset) < wanted:
        raise ValueError(
            f"image_job needs {wanted} images for {_BATCHES} batches of {batch_size}, and data has {len(dataset)}: "
            "give a smaller batch_size, or more images"
        )
    # A folder's images are sorted by class: every n-th takes all classes, and a batch takes every fourth of these.
    samples = [dataset[index * len(dataset) // wanted] for index in range(wanted)]
    batches = tuple(
        (
            torch.stack([image for image, _ in samples[start::_BATCHES]]).to(place),
            torch.tensor([int(label) for _, label in samples[start::_BATCHES]]).to(place),
        )
        for start in range(_BATCHES)
    )
    if not batches[0][0].is_floating_point():
        raise ValueError("image_job needs images that its transform makes float32: give PIL images or float tensors.")
    classes = class_count(dataset)
    return Job(
        name="images",
        make_model=lambda channels: small_resnet(classes, channels),
        width=width,
        block=ResidualBlock,
        loss=functional.cross_entropy,
        batches=batches,
        device=place,
    )


class TransformerBlock(nn.Module):
    """Causal self-attention and a two-layer network, each behind a LayerNorm and beside a shortcut. (N, T, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend to what came before, then work on each token."""
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        result: torch.Tensor = x + self.mlp(self.norm2(x))
        return result


class SmallTransformer(nn.Module):
    """Tokens (N, T) → logits for the next token (N, T, vocabulary): equal blocks on embeddings of token and place."""

    def __init__(self, width: int, blocks: int, length: int, vocabulary: int = _VOCABULARY) -> None:
        super().__init__()
        heads = max(1, width // _HEAD)
        if width % heads:
            raise ValueError(f"width={width} must be a multiple of its {heads} attention heads: take a multiple of 32.")
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits (N, T, vocabulary)."""
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        logits: torch.Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def next_token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy over all tokens: logits (N, T, vocabulary), targets (N, T)."""
    loss: torch.Tensor = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    return loss


def transformer_job(
    device: torch.device | str | None = None,
    *,
    width: int | None = None,
    blocks: int | None = None,
    length: int | None = None,
    batch_size: int | None = None,
) -> Job:
    """A small causal transformer that learns to count: each sequence goes on in steps of its own, modulo 64.

    The two tokens before say what the next one is, so attention is needed, and the first target is a guess. None for
    what suits the device: width 64, 2 blocks, 16 sequences of 64 tokens on a CPU; 512, 6, 64 of 256 on a GPU.
    """
    place = _device(device)
    defaults = zip(
        ("width", "blocks", "length", "batch_size"),
        (width, blocks, length, batch_size),
        _TRANSFORMER[place.type],
        strict=True,
    )
    width, blocks, length, batch_size = (
        whole(name, usual if given is None else given) for name, given, usual in defaults
    )
    generator = torch.Generator().manual_seed(_SEED)
    starts, strides = torch.randint(_VOCABULARY, (2, _BATCHES * batch_size, 1), generator=generator)
    tokens = ((starts + strides * torch.arange(length + 1)) % _VOCABULARY).to(place)
    layers, tokens_seen = blocks, length
    return Job(
        name="transformer",
        make_model=lambda channels: SmallTransformer(channels, layers, tokens_seen),
        width=width,
        block=TransformerBlock,
        loss=next_token_loss,
        batches=tuple((piece[:, :-1].contiguous(), piece[:, 1:].contiguous()) for piece in tokens.split(batch_size)),
        device=place,
    )


def _device(device: torch.device | str | None) -> torch.device:
    """The device, None for the GPU if there is one; ValueError for one that cannot be used."""
    chosen = ("cuda" if torch.cuda.is_available() else "cpu") if device is None else device
    synchronize(chosen)  # it says what is wrong with a device
    return torch.device(chosen)
