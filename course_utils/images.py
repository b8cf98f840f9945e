"""Images to train on: the course's photographs, your own folder, or any dataset of (image, class index)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from course_utils.photos import PhotoSet, prepare_photos

# ImageNet's channel means and deviations, which torchvision's own models expect.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
Data = PhotoSet | str | Path | Dataset[Any] | None


def train_transform(image_size: int) -> Any:
    """What the CPU does with each decoded image: a random crop resized to (3, image_size, image_size), float32."""
    from torchvision.transforms import v2

    return v2.Compose(
        [
            v2.RGB(),
            v2.RandomResizedCrop(image_size, scale=(0.3, 1.0)),
            v2.RandomHorizontalFlip(),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(MEAN, STD),
        ]
    )


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
