"""The switches of lesson 05: each is the real PyTorch line, written into a run that has not started.

    def my_switch(training):                       # yours is such a function too
        training.model.to(memory_format=torch.channels_last)

The run is a `lean_jobs.Training`. A switch changes nothing else: what belongs to the process, such as
`torch.set_float32_matmul_precision`, it may set, and `ablate` sets it for this switch's steps alone.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

import torch

from course_utils.checkpointing import checkpoint_blocks
from course_utils.lean_jobs import Training
from course_utils.workload import low_precision

Switch = Callable[[Training], object]


def amp(training: Training) -> None:
    """Autocast to the 16-bit dtype that the device has by nature; float16 needs its loss scaled, bfloat16 does not."""
    dtype = low_precision(training.device)
    training.autocast_dtype = dtype
    training.scaler = torch.amp.GradScaler(training.device.type, enabled=dtype == torch.float16)


def channels_last(training: Training) -> None:
    """Images and convolution weights with the colours of a pixel side by side; for inputs (N, C, H, W) alone."""
    training.model.to(memory_format=torch.channels_last)
    training.memory_format = torch.channels_last


def checkpointed(training: Training) -> None:
    """Every block forgets its activations and computes them again in the backward pass (`use_reentrant=False`)."""
    checkpoint_blocks(training.model, training.block)


def compiled(training: Training) -> None:
    """torch.compile for the whole model.

    Not `model.compile()`: for a model of PyTorch's own classes, such as the `nn.Sequential` of `small_resnet`, torch
    2.11 then compiles the parts of other classes one by one and leaves the rest eager (2.14 compiles it whole).
    """
    training.model = torch.compile(training.model)  # type: ignore[assignment]


def compiled_blocks(training: Training) -> None:
    """Regional compilation: each block by itself. Blocks of equal shape share one compilation."""
    for module in training.model.modules():
        if isinstance(module, training.block):
            module.compile()


def fused(training: Training) -> None:
    """AdamW as one kernel that does the whole update."""
    training.make_optimizer = lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def foreach(training: Training) -> None:
    """AdamW with one kernel an operation for all weights: what PyTorch takes by itself on a GPU."""
    training.make_optimizer = lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, foreach=True)


def for_loop(training: Training) -> None:
    """AdamW weight by weight: what PyTorch takes by itself on a CPU."""
    training.make_optimizer = lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, foreach=False, fused=False)


def fewer_syncs(training: Training) -> None:
    """Read the loss with `.item()` every 50 steps, not after each."""
    training.item_every = 50


def keep_zeros(training: Training) -> None:
    """Gradients are set to zero between steps, not dropped: `zero_grad(set_to_none=False)`."""
    training.set_to_none = False


def smaller(training: Training) -> None:
    """The same kind of model, half as wide: another model, so its loss differs by nature."""
    training.model = training.make_model(training.width // 2)


SWITCHES: MappingProxyType[str, Switch] = MappingProxyType(
    {
        switch.__name__: switch
        for switch in (
            amp,
            channels_last,
            checkpointed,
            compiled,
            compiled_blocks,
            fused,
            foreach,
            for_loop,
            fewer_syncs,
            keep_zeros,
            smaller,
        )
    }
)
