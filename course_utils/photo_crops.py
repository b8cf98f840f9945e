"""Which photographs the course uses, and how a crop of one is cut: the same file for the same key, every time."""

from __future__ import annotations

import errno
import random
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL import Image

# class: the module whose wheel holds the photograph, and the file in it. All ten are colour photographs.
PHOTOGRAPHS = {
    "astronaut": ("skimage", "data/astronaut.png"),
    "cat": ("skimage", "data/chelsea.png"),
    "coffee": ("skimage", "data/coffee.png"),
    "flower": ("sklearn", "datasets/images/flower.jpg"),
    "galaxies": ("skimage", "data/hubble_deep_field.jpg"),
    "motorcycle": ("skimage", "data/motorcycle_left.png"),
    "retina": ("skimage", "data/retina.jpg"),
    "rocket": ("skimage", "data/rocket.jpg"),
    "temple": ("sklearn", "datasets/images/china.jpg"),
    "tissue": ("skimage", "data/ihc.png"),
}
VERSION = 1  # of the way the crops are cut: a set of another version is cut again
_HELD_OUT = 0.3  # the share of each photograph, at one end of its longer side, that only validation crops see
_QUALITY = 90


class PhotosError(OSError):
    """The photographs cannot be read, or not be written where they should go; the text says why and what to do."""

    def __str__(self) -> str:
        return str(self.strerror)


def photograph(label: str) -> Image.Image:
    """The photograph of a class in RGB, read from the installed package without importing it, never downloaded."""
    from PIL import Image

    module, relative = PHOTOGRAPHS[label]
    package = {"skimage": "scikit-image", "sklearn": "scikit-learn"}[module]
    spec = find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise PhotosError(
            errno.ENOENT, f"the photographs ship inside {package}, which is not installed: pip install {package}"
        )
    path = Path(spec.submodule_search_locations[0]) / relative
    if not path.is_file():
        raise PhotosError(
            errno.ENOENT, f"{package} is installed without its photograph {path.name}: reinstall {package}"
        )
    with Image.open(path) as image:
        return image.convert("RGB")


def region(width: int, height: int, split: str) -> tuple[int, int, int, int]:
    """(left, upper, right, lower) in pixels of the part of a photograph that crops of "train" or "val" are cut from."""
    if width >= height:
        border = round(width * (1 - _HELD_OUT))
        return (0, 0, border, height) if split == "train" else (border, 0, width, height)
    border = round(height * (1 - _HELD_OUT))
    return (0, 0, width, border) if split == "train" else (0, border, width, height)


def crop_box(width: int, height: int, split: str, key: str) -> tuple[int, int, int, int]:
    """The square in pixels for the crop named `key`, inside its region: 50 to 100 % of the held-out part's width."""
    # Seeded by text and drawn with random() only: Python promises the same numbers for both in every version.
    draw = random.Random(f"{VERSION}/{key}")
    held_out = region(width, height, "val")
    side = int(min(held_out[2] - held_out[0], held_out[3] - held_out[1]) * (0.5 + 0.5 * draw.random()))
    left, upper, right, lower = region(width, height, split)
    x, y = left + int((right - left - side) * draw.random()), upper + int((lower - upper - side) * draw.random())
    return x, y, x + side, y + side


def cut(picture: Image.Image, split: str, key: str, size_px: int) -> bytes:
    """One crop as a JPEG of `size_px` × `size_px`."""
    from PIL import Image

    # Cropped first, resized then: resize(box=…) would also look at the pixels around the box, across the split.
    crop = picture.crop(crop_box(*picture.size, split, key))
    buffer = BytesIO()
    crop.resize((size_px, size_px), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=_QUALITY)
    return buffer.getvalue()
