"""Images to train on: the course's photographs, your own folder, or any dataset of (image, class index)."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset, Subset

from course_utils.photos import PhotoSet, prepare_photos

# ImageNet's channel means and deviations, which torchvision's own models expect.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CROP_SCALE = (0.3, 1.0)  # the share of an image's area that a random crop keeps
# What a device takes if the recipe leaves it open: pixels a side, and channels of the course's model.
IMAGE_SIZE = {"cpu": 64, "cuda": 128}
MODEL_WIDTH = {"cpu": 32, "cuda": 64}
Data = PhotoSet | str | Path | Dataset[Any] | None


def train_transform(image_size: int, transfer: str = "float32") -> Any:
    """What the CPU does with each decoded image: a random crop resized to (3, image_size, image_size).

    The result is normalised float32. With `transfer="uint8"` it stays uint8 and `fast_images.normalize` does the rest.
    """
    from torchvision.transforms import v2

    crop = [v2.RGB(), v2.RandomResizedCrop(image_size, scale=CROP_SCALE), v2.RandomHorizontalFlip(), v2.ToImage()]
    if transfer == "uint8":
        return v2.Compose(crop)
    return v2.Compose([*crop, v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])


def eval_transform(image_size: int) -> Any:
    """The same without chance: resized to (3, image_size, image_size), float32."""
    from torchvision.transforms import v2

    return v2.Compose(
        [
            v2.RGB(),
            v2.Resize((image_size, image_size)),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(MEAN, STD),
        ]
    )


class Transformed(Dataset[Any]):
    """A dataset whose PIL images go through `transform`; what is a tensor already stays as it is."""

    def __init__(self, dataset: Any, transform: Any) -> None:
        self.dataset, self.transform = dataset, transform

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        image, label = self.dataset[index]
        return image if isinstance(image, torch.Tensor) else self.transform(image), label


class Uint8(Transformed):
    """The same, and every image comes out as `to_uint8` makes it; with `transform=None` nothing else is done."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, Any]:
        image, label = self.dataset[index]
        if self.transform is not None and not isinstance(image, torch.Tensor):
            image = self.transform(image)
        return to_uint8(image), label


def to_uint8(image: Any) -> torch.Tensor:
    """A PIL image or a uint8 tensor (H, W), (1, H, W) or (3, H, W) as a uint8 tensor (3, H, W); ValueError for others.

    A PIL image's pixels stay in the order that it has them, colour last, so that nothing is moved but once.
    """
    if isinstance(image, Image.Image):
        image = image if image.mode == "RGB" else image.convert("RGB")
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)
    is_tensor = isinstance(image, torch.Tensor)
    if not is_tensor or image.dtype != torch.uint8:
        what = f"{str(image.dtype).removeprefix('torch.')} tensors" if is_tensor else f"a {type(image).__name__}"
        raise ValueError(
            f"cache, augment='batch' and transfer='uint8' need PIL images or uint8 tensors, and this dataset gives "
            f"{what}: take its own transform away, or leave these knobs at their defaults"
        )
    pixels: torch.Tensor = image.as_subclass(torch.Tensor)  # torchvision's Image is a subclass
    pixels = pixels[None] if pixels.dim() == 2 else pixels
    if pixels.dim() != 3 or pixels.shape[0] not in (1, 3):
        raise ValueError(f"an image has the shape {tuple(pixels.shape)}: give (H, W), (1, H, W) or (3, H, W)")
    return pixels.expand(3, -1, -1)


def open_data(data: Any, split: str, transform: Any, progress: bool = True) -> Transformed:
    """The dataset that `data` (a `Data`) stands for; None is the course's photographs, cut if need be.

    A folder may hold class folders itself, or in a subfolder named `split` ("train" or "val"). ValueError if it cannot
    be read as images of classes.
    """
    from torchvision.datasets import ImageFolder

    if data is None:
        data = prepare_photos(progress=progress)
    if isinstance(data, PhotoSet):
        data = data.folder
    if isinstance(data, str | Path):
        folder = Path(data).expanduser()
        if not folder.is_dir():
            raise ValueError(f"data={str(data)!r} is no folder: give one that has a subfolder of images per class")
        try:
            data = ImageFolder(str(folder / split if (folder / split).is_dir() else folder))
        except FileNotFoundError as error:
            raise ValueError(f"data={str(folder)!r} has no subfolder of images per class ({error})") from error
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        raise ValueError(f"data is a {type(data).__name__}: give a folder of class folders, or a dataset with a length")
    if len(data) == 0:
        raise ValueError("data is empty: give a dataset with at least one sample")
    return Transformed(data, transform)


def class_count(dataset: Any) -> int:
    """How many classes a dataset says that it has, by `.classes` or `.targets`; ValueError if it does not."""
    while dataset is not None:
        if getattr(dataset, "classes", None) is not None:
            return len(dataset.classes)
        if getattr(dataset, "targets", None) is not None:
            return int(max(dataset.targets)) + 1
        dataset = getattr(dataset, "dataset", None)  # what a Subset or our own wrapper holds
    raise ValueError(
        "data does not say how many classes it has: give it a list `.classes`, or pass a model with enough outputs"
    )


class ReducedJpeg:
    """Opens an image file as RGB; a JPEG at 1/2, 1/4 or 1/8 of its size where the crops then still fill `image_size`.

    JPEG is stored in blocks of 8 × 8 frequencies, and leaving out the high ones is less work than decoding in full and
    resizing (Pillow's `Image.draft`). The smallest crop has `CROP_SCALE[0]` of the area; as a square it must not be
    enlarged. Files of other formats are read in full.
    """

    def __init__(self, image_size: int) -> None:
        self.needed_px = math.ceil(image_size / math.sqrt(CROP_SCALE[0]))

    def __call__(self, path: str) -> Image.Image:
        """The image; what `ImageFolder` calls its loader."""
        with Path(path).open("rb") as file, Image.open(file) as image:
            image.draft("RGB", (self.needed_px, self.needed_px))
            return image.convert("RGB")


def read_encoded(path: str) -> torch.Tensor:
    """A file's bytes as a uint8 tensor of one dimension, which is what `torchvision.io.decode_jpeg` takes."""
    return torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8)


def with_loader(dataset: Any, loader: Any, knob: str) -> Any:
    """A copy of an `ImageFolder` (or of a `Subset` of one) that opens its files with `loader`.

    ValueError, naming `knob`, for a dataset that does not open its files as `ImageFolder` does.
    """
    from torchvision.datasets.folder import default_loader

    if isinstance(dataset, Subset):
        return Subset(with_loader(dataset.dataset, loader, knob), dataset.indices)
    if not hasattr(dataset, "samples") or getattr(dataset, "loader", None) is not default_loader:
        raise ValueError(
            f"{knob} needs files that torchvision's ImageFolder opens, and data is a {type(dataset).__name__} that "
            "opens its own: leave decode at 'full'"
        )
    changed = copy.copy(dataset)
    changed.loader = loader
    return changed
