"""The course's model: ResNet-10, a ResNet-18 with one block a stage, in any width.

logits = small_resnet(classes=10)(torch.rand(8, 3, 64, 64))   # (8, 10)
"""

from __future__ import annotations

import torch
from torch import nn


class ResidualBlock(nn.Module):
    """Two 3 × 3 convolutions and a shortcut (He et al. 2015, arXiv 1512.03385).

    (N, in_channels, H, W) → (N, channels, H / stride, W / stride), rounded up.
    """

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the shortcut to the two convolutions."""
        return torch.relu(self.main(x) + self.shortcut(x))


def small_resnet(classes: int = 10, width: int = 32) -> nn.Sequential:
    """A new ResNet-10: (N, 3, H, W) with H and W of 48 or more → (N, classes) logits.

    `width` is the channels of the first stage; the others have 2, 4 and 8 times as many. With 64 it is as wide as
    ResNet-18 and has 4.9 million parameters; with 32 it has 1.2 million.
    """
    return nn.Sequential(
        nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, padding=1),
        ResidualBlock(width, width, stride=1),
        ResidualBlock(width, 2 * width, stride=2),
        ResidualBlock(2 * width, 4 * width, stride=2),
        ResidualBlock(4 * width, 8 * width, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8 * width, classes),
    )
