"""The device's share of the image work: crop, resize, flip and normalise a whole batch at once.

    images = augment_batch(batch, 128)    # uint8 (N, 3, H, W) on any device -> float32 (N, 3, 128, 128) there

torchvision's own transforms take a batch too, but they draw once for all of it: every image gets the same crop. Here
each image has its own box, drawn on the device by the rules of `torchvision.transforms.v2.RandomResizedCrop`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import default_collate

from course_utils.images import CROP_SCALE, MEAN, STD

MEAN_STD = (MEAN, STD)
_RATIO = (3 / 4, 4 / 3)  # RandomResizedCrop's default for width / height
_TRIES = 10  # as many boxes as RandomResizedCrop draws before it takes the centre
_CHUNK = 64  # images that are float32 in full size at one time


def normalize(images: torch.Tensor) -> torch.Tensor:
    """Images (N, 3, H, W) of 0 to 255, uint8 or float, as float32 with ImageNet's means and deviations taken out."""
    images = images.to(torch.float32, memory_format=torch.contiguous_format, copy=True).mul_(1 / 255)
    for channel, (mean, std) in enumerate(zip(MEAN, STD, strict=True)):
        # Plain numbers: a tensor of them would have to be copied to the device, and waited for, in every step.
        images[:, channel].sub_(mean).div_(std)
    return images


def random_boxes(
    count: int,
    heights: int | torch.Tensor,
    widths: int | torch.Tensor,
    *,
    device: torch.device | str | None = None,
    scale: tuple[float, float] = CROP_SCALE,
    ratio: tuple[float, float] = _RATIO,
) -> torch.Tensor:
    """One random box for each of `count` images, (count, 4): left, top, right, bottom in whole pixels, as float32.

    `heights` and `widths` are the images' sizes: one number for all, or a tensor (count). The distribution is
    RandomResizedCrop's: ten tries of a share of the area within `scale` and of a width / height within `ratio` (uniform
    in its logarithm); the first box that lies in the image counts, and if none does, the largest central one whose
    shape is allowed. Drawn from `device`'s default generator, without making the CPU wait for it.
    """
    draws = torch.rand(4, count, _TRIES, device=device)
    height, width = (
        size.to(draws)[:, None] if isinstance(size, torch.Tensor) else torch.full_like(draws[0, :, :1], size)
        for size in (heights, widths)
    )
    area = height * width * (scale[0] + (scale[1] - scale[0]) * draws[0])
    log_low, log_high = math.log(ratio[0]), math.log(ratio[1])
    shape = torch.exp(log_low + (log_high - log_low) * draws[1])
    box_width, box_height = (area * shape).sqrt().round(), (area / shape).sqrt().round()
    fits = (box_width > 0) & (box_width <= width) & (box_height > 0) & (box_height <= height)
    first = fits.int().argmax(1, keepdim=True)  # the first of the largest: the first that fits

    found = fits.any(1, keepdim=True)
    box_width = torch.where(found, box_width.gather(1, first), torch.minimum(width, (height * ratio[1]).round()))
    box_height = torch.where(found, box_height.gather(1, first), torch.minimum(height, (width / ratio[0]).round()))
    room = torch.cat([width - box_width, height - box_height], 1)
    at_random = torch.minimum((draws[2:, :, 0].T * (room + 1)).floor(), room)  # rounding may reach the end itself
    corner = torch.where(found, at_random, (room / 2).floor())
    return torch.cat([corner, corner + torch.cat([box_width, box_height], 1)], 1)


def crop_and_resize(images: torch.Tensor | Sequence[torch.Tensor], boxes: torch.Tensor, size: int) -> torch.Tensor:
    """What lies in each image's box, resized to `size` × `size` with antialiasing: float32 (N, 3, size, size).

    `images` are uint8, (N, 3, H, W) or a list of (3, H, W); `boxes` (N, 4) are left, top, right, bottom. The values
    stay 0 to 255 and lie within 1 of what PIL makes of the same boxes.

    A CPU does best with one image at a time. A GPU would spend its time on launches that way, so it gets them all in
    two matrix products (`resize_by_matrices`).
    """
    if boxes.device.type != "cpu":
        starts = range(0, len(images), _CHUNK)
        chunks = [resize_by_matrices(images[at : at + _CHUNK], boxes[at : at + _CHUNK], size) for at in starts]
        return torch.cat(chunks)
    from torchvision.transforms.v2 import functional

    resized = [
        functional.resized_crop(image, top, left, bottom - top, right - left, [size, size], antialias=True)
        for image, (left, top, right, bottom) in zip(images, boxes.int().tolist(), strict=True)
    ]
    return torch.stack(resized).float()


def resize_by_matrices(images: torch.Tensor | Sequence[torch.Tensor], boxes: torch.Tensor, size: int) -> torch.Tensor:
    """The same for the whole batch at once: rows (N, size, H) × images (N, 3, H, W) × columns (N, size, W).

    Every new pixel is a weighted sum of old ones, and the weights of the rows do not depend on the column. So a resize
    is two matrix products, which is what a GPU is best at.
    """
    images = images if isinstance(images, torch.Tensor) else _padded(images)
    left, top, right, bottom = boxes.float().T
    rows = _weights(top, bottom, images.shape[-2], size)
    columns = _weights(left, right, images.shape[-1], size)
    return torch.einsum("nyh,nchw,nxw->ncyx", rows, images.float(), columns)


def _weights(start: torch.Tensor, end: torch.Tensor, pixels: int, size: int) -> torch.Tensor:
    """How much of each old pixel is in each new one along one axis: (N, size, pixels), each row adds up to 1.

    The weights fall off in a triangle, as wide as the reduction is strong: PIL's bilinear filter, which antialiases.
    """
    start, end = start[:, None, None], end[:, None, None]
    step = (end - start) / size
    new = start + (torch.arange(size, device=start.device)[:, None] + 0.5) * step
    old = torch.arange(pixels, device=start.device) + 0.5
    weights = (1 - (old - new).abs() / step.clamp(min=1)).clamp(min=0)
    weights = weights * ((old > start) & (old < end))  # what lies outside the box has no say
    return weights / weights.sum(-1, keepdim=True)


def _padded(images: Sequence[torch.Tensor]) -> torch.Tensor:
    """Images of several sizes in one batch, zeros at the right and below: no box reaches there."""
    height, width = (max(image.shape[axis] for image in images) for axis in (1, 2))
    batch = images[0].new_zeros((len(images), 3, height, width))
    for place, image in zip(batch, images, strict=True):
        place[:, : image.shape[1], : image.shape[2]] = image
    return batch


def augment_batch(
    images: torch.Tensor | Sequence[torch.Tensor] | PackedImages,
    image_size: int,
    *,
    scale: tuple[float, float] = CROP_SCALE,
    flip: float = 0.5,
) -> torch.Tensor:
    """Random crop, resize, flip and normalisation of uint8 images, on the device where they are.

    Takes (N, 3, H, W), a list of (3, H, W) on one device, or `PackedImages`; gives float32
    (N, 3, image_size, image_size). Each image has its own crop and its own flip (with probability `flip`), distributed
    as by `images.train_transform`.
    """
    if isinstance(images, PackedImages):
        images = images.unpack()
    device = images[0].device
    if isinstance(images, torch.Tensor):
        boxes = random_boxes(len(images), images.shape[-2], images.shape[-1], device=device, scale=scale)
    else:
        # non_blocking: the CPU need not wait until so few bytes have arrived
        sizes = torch.tensor([image.shape[1:] for image in images]).to(device, non_blocking=True)
        boxes = random_boxes(len(images), sizes[:, 0], sizes[:, 1], device=device, scale=scale)
    crops = crop_and_resize(images, boxes, image_size)
    mirrored = torch.rand(len(crops), 1, 1, 1, device=device) < flip
    return normalize(torch.where(mirrored, crops.flip(-1), crops))


@dataclass(frozen=True)
class DeviceAugment:
    """`augment_batch` with its settings: `DeviceAugment(128)(images)`."""

    image_size: int
    scale: tuple[float, float] = CROP_SCALE
    flip: float = 0.5

    def __call__(self, images: torch.Tensor | Sequence[torch.Tensor] | PackedImages) -> torch.Tensor:
        """float32 images of uint8 ones."""
        return augment_batch(images, self.image_size, scale=self.scale, flip=self.flip)


class PackedImages:
    """uint8 images of several sizes, end to end in one tensor: one copy moves them all, and one handle passes them on.

    (A worker that hands over a list of tensors needs an open file for each of them.)
    """

    def __init__(self, flat: torch.Tensor, shapes: Sequence[tuple[int, int]]) -> None:
        self.flat, self.shapes = flat, tuple(shapes)

    @classmethod
    def pack(cls, images: Sequence[torch.Tensor]) -> PackedImages:
        """From a list of (3, H, W)."""
        flat = torch.cat([image.permute(1, 2, 0).reshape(-1) for image in images])
        return cls(flat, [(image.shape[1], image.shape[2]) for image in images])

    def unpack(self) -> list[torch.Tensor]:
        """Views of the images, each (3, H, W)."""
        pieces = self.flat.split([height * width * 3 for height, width in self.shapes])
        return [
            piece.view(height, width, 3).permute(2, 0, 1)
            for piece, (height, width) in zip(pieces, self.shapes, strict=True)
        ]

    def __len__(self) -> int:
        return len(self.shapes)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PackedImages:
        """The same images on `device`."""
        return PackedImages(self.flat.to(device, non_blocking=non_blocking), self.shapes)

    def pin_memory(self) -> PackedImages:
        """The same images in page-locked memory; the DataLoader calls it."""
        return PackedImages(self.flat.pin_memory(), self.shapes)


class EncodedImages:
    """A batch of JPEG files, not decoded yet, end to end in one tensor. They stay on the CPU, for decode_jpeg."""

    def __init__(self, flat: torch.Tensor, lengths: Sequence[int]) -> None:
        self.flat, self.lengths = flat, list(lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def to(self, *_: Any, **__: Any) -> EncodedImages:
        """Itself: the GPU reads the bytes while it decodes."""
        return self

    def pin_memory(self) -> EncodedImages:
        """Itself."""
        return self

    def decode(self, device: torch.device) -> list[torch.Tensor]:
        """uint8 images (3, H, W) on `device`, all decoded in one call; ValueError if a file is no JPEG."""
        from torchvision import io

        try:
            images: list[torch.Tensor] = io.decode_jpeg(
                list(self.flat.split(self.lengths)), mode=io.ImageReadMode.RGB, device=device
            )
        except RuntimeError as error:
            raise ValueError(
                "decode='gpu' could not decode a batch: it takes JPEG files alone, so set decode='full' for others "
                f"({error})"
            ) from error
        return images


def collate_images(samples: list[tuple[torch.Tensor, Any]]) -> tuple[torch.Tensor | PackedImages, torch.Tensor]:
    """A batch of uint8 images (3, H, W) and labels: (N, 3, H, W) where the sizes are equal, `PackedImages` if not."""
    images = [image for image, _ in samples]
    labels = default_collate([label for _, label in samples])
    if len({image.shape for image in images}) > 1:
        return PackedImages.pack(images), labels
    # Colour stays last in memory, as PIL has it: the transposition would cost more than the copy.
    return default_collate([image.permute(1, 2, 0) for image in images]).permute(0, 3, 1, 2), labels


def collate_encoded(samples: list[tuple[torch.Tensor, Any]]) -> tuple[EncodedImages, torch.Tensor]:
    """A batch of JPEG files and labels."""
    files = [file for file, _ in samples]
    return EncodedImages(torch.cat(files), [len(file) for file in files]), default_collate([it for _, it in samples])


def gpu_decoded(augment: DeviceAugment, device: torch.device) -> Callable[[EncodedImages], torch.Tensor]:
    """Decode on `device`, then augment there."""
    return lambda files: augment(files.decode(device))
