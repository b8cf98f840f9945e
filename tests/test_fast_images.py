"""Less CPU work for each image: the device's augmentation, the cache, reduced decoding, and how a recipe joins them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset
from torchvision import io, tv_tensors
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from course_utils import fast_images, image_cache
from course_utils.fast_images import (
    DeviceAugment,
    EncodedImages,
    PackedImages,
    augment_batch,
    collate_encoded,
    collate_images,
    crop_and_resize,
    normalize,
    random_boxes,
    resize_by_matrices,
)
from course_utils.feed import open_feed
from course_utils.image_cache import AsPil, CachedImages, CacheNeed, as_is, cache_need
from course_utils.images import MEAN, STD, ReducedJpeg, Uint8, read_encoded, to_uint8, train_transform, with_loader
from course_utils.photos import PhotoSet, prepare_photos
from course_utils.recipe import Recipe

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> PhotoSet:
    folder = tmp_path_factory.mktemp("photos") / "set"
    return prepare_photos(folder, train_per_class=4, val_per_class=1, size_px=256, progress=False)


@pytest.fixture(scope="module")
def pictures(photos: PhotoSet) -> list[Image.Image]:
    """Twelve photographs of different sizes."""
    files = ImageFolder(photos.train)
    return [files[3 * i][0].crop((0, 0, 256 - 9 * i, 150 + 7 * i)) for i in range(12)]


class Pictures(Dataset[Any]):
    """A dataset of one's own, without files: whatever `images` holds, and labels 0 to 3."""

    def __init__(self, images: Any) -> None:
        self.images, self.classes, self.reads = images, list("abcd"), 0

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        self.reads += 1
        return self.images[index], index % 4


def noise(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(sum(shape)))


def uniform(dataset: Any) -> Uint8:
    return Uint8(dataset, None)


# Normalise


def test_normalize_gives_the_bits_of_the_cpu_transform_and_leaves_its_input_alone() -> None:
    images = noise(3, 3, 9, 7)
    kept, expected = (
        images.clone(),
        v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])(images),
    )
    for given in (images, images.float(), images.to(memory_format=torch.channels_last)):
        result = normalize(given)
        assert torch.equal(result, expected) and result.is_contiguous() and torch.equal(given, kept.to(given.dtype))


# Boxes


def kolmogorov_smirnov(first: Any, second: Any) -> float:
    """The largest distance of the two distribution functions."""
    first, second = np.sort(first), np.sort(second)
    both = np.concatenate([first, second])
    below = [np.searchsorted(sample, both, side="right") / len(sample) for sample in (first, second)]
    return float(np.abs(below[0] - below[1]).max())


@pytest.mark.parametrize(("height", "width"), [(256, 256), (120, 190), (64, 200)])
def test_boxes_are_distributed_as_random_resized_crops(height: int, width: int) -> None:
    count = 4000
    transform, image = v2.RandomResizedCrop(8, scale=(0.3, 1.0)), torch.empty(3, height, width)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        params = [transform.make_params([image]) for _ in range(count)]
        boxes = random_boxes(count, height, width).double().numpy()
    theirs = np.array([[p["left"], p["top"], p["left"] + p["width"], p["top"] + p["height"]] for p in params], float)

    def features(sample: Any) -> dict[str, Any]:
        left, top, right, bottom = sample.T
        return {
            "area": (right - left) * (bottom - top),
            "ratio": (right - left) / (bottom - top),
            "left": left,
            "top": top,
            "right": right,
            "bottom": bottom,
            "where in the room": left / np.maximum(width - (right - left), 1),
        }

    limit = 1.95 * (2 / count) ** 0.5  # one in a thousand would be further apart by chance
    for name, values in features(boxes).items():
        assert kolmogorov_smirnov(values, features(theirs)[name]) < limit, name
    assert kolmogorov_smirnov(features(boxes)["area"], 0.9 * features(boxes)["area"]) > limit  # the test can fail


def test_boxes_are_whole_pixels_inside_each_image() -> None:
    heights, widths = torch.randint(1, 300, (3000,)), torch.randint(1, 300, (3000,))
    left, top, right, bottom = random_boxes(3000, heights, widths).T
    assert ((left >= 0) & (top >= 0) & (right <= widths) & (bottom <= heights)).all()
    assert (
        ((right > left) & (bottom > top)).all()
        and torch.equal(left.round(), left)
        and torch.equal(right.round(), right)
    )


@pytest.mark.parametrize(("height", "width"), [(10, 1000), (1000, 10), (11, 1001)])
def test_where_no_box_fits_the_centre_is_taken_as_torchvision_does(height: int, width: int) -> None:
    p = v2.RandomResizedCrop(8, scale=(0.3, 1.0)).make_params([torch.empty(3, height, width)])
    expected = torch.tensor([p["left"], p["top"], p["left"] + p["width"], p["top"] + p["height"]]).float()
    assert torch.equal(random_boxes(5, height, width), expected.expand(5, 4))


def test_scale_and_ratio_are_kept() -> None:
    left, top, right, bottom = random_boxes(500, 1000, 1000, scale=(0.2, 0.25), ratio=(1.0, 1.2)).T
    area, ratio = (right - left) * (bottom - top) / 1e6, (right - left) / (bottom - top)
    assert area.min() > 0.199 and area.max() < 0.251 and ratio.min() > 0.99 and ratio.max() < 1.21


# Pixels


@pytest.mark.parametrize("resize", [crop_and_resize, resize_by_matrices])
@pytest.mark.parametrize("size", [48, 160])  # reduced and enlarged
def test_the_same_boxes_give_the_pixels_of_pil(pictures: list[Image.Image], resize: Any, size: int) -> None:
    images = [to_uint8(picture) for picture in pictures]
    boxes = random_boxes(12, *(torch.tensor([image.shape[axis] for image in images]) for axis in (1, 2)))
    expected = torch.stack(
        [
            v2.functional.pil_to_tensor(picture.crop(tuple(box)).resize((size, size), Image.Resampling.BILINEAR))
            for picture, box in zip(pictures, boxes.int().tolist(), strict=True)
        ]
    ).float()
    result = resize(images, boxes, size)
    assert result.dtype == torch.float32 and result.shape == (12, 3, size, size)
    assert (result - expected).abs().max() <= 1.01 and (result - expected).abs().mean() < 0.3
    stacked, inside = torch.stack([image[:, :150, :150] for image in images]), boxes.clamp(max=150)
    assert torch.equal(resize(stacked, inside, size), resize(list(stacked), inside, size))


def test_each_image_of_a_batch_has_its_own_crop_and_its_own_flip() -> None:
    ramp = torch.arange(64, dtype=torch.uint8).expand(40, 3, 64, 64)  # grows to the right
    images = augment_batch(ramp, 48)
    assert images.shape == (40, 3, 48, 48) and images.dtype == torch.float32 and images.is_contiguous()
    assert len({round(float(image.mean()), 4) for image in images}) > 10
    to_the_right = images[:, 0, 0, -1] > images[:, 0, 0, 0]
    assert 8 < to_the_right.sum() < 32
    for flip, expected in ((0.0, 40), (1.0, 0)):
        images = DeviceAugment(48, flip=flip)(ramp)
        assert (images[:, 0, 0, -1] > images[:, 0, 0, 0]).sum() == expected


def test_augmented_images_have_the_values_of_the_cpu_transform(pictures: list[Image.Image]) -> None:
    many = [picture for picture in pictures for _ in range(30)]
    theirs = torch.stack([train_transform(48)(picture) for picture in many])
    ours = augment_batch([to_uint8(picture) for picture in many], 48)
    assert torch.allclose(ours.mean((0, 2, 3)), theirs.mean((0, 2, 3)), atol=0.05)
    assert torch.allclose(ours.std((0, 2, 3)), theirs.std((0, 2, 3)), atol=0.05)


def test_off_the_cpu_it_goes_in_chunks_of_matrix_products_and_reads_nothing_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chunks: list[int] = []

    def noted(images: Any, boxes: torch.Tensor, size: int) -> torch.Tensor:
        chunks.append(len(images))
        return resize_by_matrices(images, boxes, size)

    monkeypatch.setattr(fast_images, "resize_by_matrices", noted)
    # Tensors of the meta device have no values: whatever made the CPU wait for one would raise here.
    images = augment_batch(torch.empty(130, 3, 20, 30, dtype=torch.uint8, device="meta"), 16)
    assert images.shape == (130, 3, 16, 16) and images.device.type == "meta" and chunks == [64, 64, 2]
    ragged = [torch.empty(3, side, 30, dtype=torch.uint8, device="meta") for side in (20, 25)]
    assert augment_batch(ragged, 16).shape == (2, 3, 16, 16)


# Batches


def test_images_of_one_size_are_stacked_and_others_packed(pictures: list[Image.Image]) -> None:
    images = [to_uint8(picture) for picture in pictures]
    packed, labels = collate_images([(image, 7) for image in images])
    assert isinstance(packed, PackedImages) and len(packed) == 12 and labels.tolist() == [7] * 12
    moved = packed.to("cpu", non_blocking=True)
    assert all(torch.equal(one, other) for one, other in zip(moved.unpack(), images, strict=True))
    assert packed.to("meta").unpack()[1].device.type == "meta" and packed.flat.numel() == sum(i.numel() for i in images)

    stacked, _ = collate_images([(image[:, :150, :150], 0) for image in images])
    assert isinstance(stacked, torch.Tensor) and torch.equal(stacked, torch.stack([i[:, :150, :150] for i in images]))
    assert augment_batch(packed, 16).shape == augment_batch(stacked, 16).shape == (12, 3, 16, 16)


def test_batches_come_out_of_workers_whole(pictures: list[Image.Image], photos: PhotoSet) -> None:
    for data, kind in ((Pictures(pictures), PackedImages), (Pictures([noise(3, 9, 8)] * 12), torch.Tensor)):
        loader = DataLoader(uniform(data), 6, num_workers=2, collate_fn=collate_images)
        for number, (images, labels) in enumerate(loader):
            assert isinstance(images, kind) and labels.tolist() == [i % 4 for i in range(6 * number, 6 * number + 6)]
            unpacked = images.unpack() if isinstance(images, PackedImages) else images
            assert all(torch.equal(unpacked[i], uniform(data)[6 * number + i][0]) for i in range(6))
    files = with_loader(ImageFolder(photos.train), read_encoded, "decode='gpu'")
    for files_of_batch, _ in DataLoader(Subset(files, range(6)), 3, num_workers=1, collate_fn=collate_encoded):
        assert isinstance(files_of_batch, EncodedImages) and len(files_of_batch) == 3


def test_pinning_pins_pixels_and_leaves_files_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self + 1)
    packed = PackedImages.pack([torch.zeros(3, 2, 2, dtype=torch.uint8)])
    assert packed.pin_memory().flat.tolist() == [1] * 12 and packed.pin_memory().shapes == packed.shapes
    encoded = EncodedImages(torch.zeros(4, dtype=torch.uint8), [4])
    assert encoded.pin_memory() is encoded and encoded.to("cuda", non_blocking=True) is encoded


# Decoding on the GPU, with a decoder that only looks like one


GPU_RECIPE = Recipe(decode="gpu", augment="batch", image_size=48, batch_size=6)


def test_gpu_decoding_gets_a_list_of_files_and_their_device(photos: PhotoSet, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    real = io.decode_jpeg

    def fake(files: Any, mode: Any, device: Any) -> Any:
        calls.append((files, mode, str(device)))
        return real(files, mode=mode)

    monkeypatch.setattr(io, "decode_jpeg", fake)
    feed = open_feed(photos, GPU_RECIPE, torch.device("cuda:0"), progress=False)
    files, labels = next(iter(DataLoader(feed.dataset, 6, collate_fn=feed.collate)))
    images = feed.to_float(files.to("cuda:0"))
    assert images.shape == (6, 3, 48, 48) and labels.tolist() == [0, 0, 0, 0, 1, 1] and feed.notes == ()
    [(given, mode, device)] = calls
    assert type(given) is list and mode is io.ImageReadMode.RGB and device == "cuda:0"
    paths = [path for path, _ in ImageFolder(photos.train).samples[:6]]
    assert [bytes(file.numpy()) for file in given] == [Path(path).read_bytes() for path in paths]


def test_gpu_decoding_of_what_will_not_do_gets_a_sentence(photos: PhotoSet, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="needs an NVIDIA GPU, and this run is on the CPU: set decode='reduced'"):
        open_feed(photos, GPU_RECIPE, CPU)
    gpu = torch.device("cuda")
    with pytest.raises(ValueError, match="take the transform away"):
        open_feed(ImageFolder(photos.train, transform=v2.RGB()), GPU_RECIPE, gpu)
    with pytest.raises(ValueError, match=r"decode='gpu' needs files that torchvision's ImageFolder opens"):
        open_feed(Pictures([noise(3, 8, 8)]), GPU_RECIPE, gpu)  # type: ignore[arg-type]

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("not a JPEG")

    monkeypatch.setattr(io, "decode_jpeg", broken)
    with pytest.raises(ValueError, match=r"it takes JPEG files alone, .*\(not a JPEG\)$") as caught:
        EncodedImages(torch.zeros(4, dtype=torch.uint8), [4]).decode(gpu)
    assert isinstance(caught.value.__cause__, RuntimeError)


# Images as uint8


def test_every_kind_of_image_becomes_uint8_of_three_colours() -> None:
    colour = noise(3, 5, 6)
    pil = v2.functional.to_pil_image(colour)
    assert torch.equal(to_uint8(pil), colour) and torch.equal(to_uint8(colour), colour)
    grey = Image.new("L", (6, 5), 9)
    for image in (grey, Image.new("P", (6, 5)), torch.full((5, 6), 9, dtype=torch.uint8), colour[:1]):
        assert to_uint8(image).shape == (3, 5, 6) and to_uint8(image).dtype == torch.uint8
    assert to_uint8(grey).unique().tolist() == [9] and type(to_uint8(tv_tensors.Image(colour))) is torch.Tensor


@pytest.mark.parametrize(
    ("image", "said"),
    [
        (torch.zeros(3, 5, 5), "this dataset gives float32 tensors: take its own transform away"),
        (np.zeros((5, 5, 3), np.uint8), "this dataset gives a ndarray"),
        (noise(4, 5, 6), r"shape \(4, 5, 6\): give"),
        (noise(2, 3, 5, 6), r"shape \(2, 3, 5, 6\): give"),
    ],
)
def test_what_is_no_uint8_image_gets_a_sentence(image: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        to_uint8(image)
    assert "\n" not in str(caught.value)


# Reduced decoding


@pytest.mark.parametrize(
    ("side", "image_size", "decoded"), [(256, 64, 128), (256, 48, 128), (256, 128, 256), (256, 71, 256), (512, 64, 128)]
)
def test_a_jpeg_is_reduced_only_while_its_smallest_crop_fills_the_image(
    tmp_path: Path, side: int, image_size: int, decoded: int
) -> None:
    path = str(tmp_path / "grey.jpg")
    Image.fromarray(np.add.outer(np.arange(side), np.arange(side)).astype(np.uint8) // 4 * 2).save(path, quality=95)
    image = ReducedJpeg(image_size)(path)
    assert image.size == (decoded, decoded) and image.mode == "RGB"
    assert decoded == side or decoded * 0.3**0.5 >= image_size
    assert decoded // 2 * 0.3**0.5 < image_size  # as small as allowed


def test_a_reduced_image_looks_like_the_full_one_made_smaller(photos: PhotoSet) -> None:
    path, _ = ImageFolder(photos.train).samples[0]
    full = Image.open(path).convert("RGB").resize((128, 128), Image.Resampling.BOX)
    difference = np.asarray(ReducedJpeg(64)(path), float) - np.asarray(full, float)
    assert np.abs(difference).mean() < 3


def test_other_files_are_read_in_full(tmp_path: Path) -> None:
    Image.new("RGBA", (400, 300)).save(tmp_path / "a.png")
    image = ReducedJpeg(48)(str(tmp_path / "a.png"))
    assert image.size == (400, 300) and image.mode == "RGB"


def test_the_loader_is_changed_in_a_copy(photos: PhotoSet) -> None:
    files = ImageFolder(photos.train, target_transform=lambda label: label + 100)
    changed = with_loader(Subset(Subset(files, [0, 4, 8]), [1, 2]), ReducedJpeg(64), "knob")
    assert [image.size for image, _ in (changed[0], changed[1])] == [(128, 128)] * 2
    assert [label for _, label in (changed[0], changed[1])] == [101, 102] and files[0][0].size == (256, 256)
    for other in (Pictures([]), ImageFolder(photos.train, loader=Image.open), TensorDataset(torch.zeros(2))):
        with pytest.raises(
            ValueError, match=rf"^knob needs files .* data is a {type(other).__name__} that opens its own"
        ):
            with_loader(other, ReducedJpeg(64), "knob")


# The cache


def test_the_cache_holds_every_pixel_once(photos: PhotoSet, pictures: list[Image.Image]) -> None:
    for data in (ImageFolder(photos.train), Pictures(pictures)):
        dataset = uniform(data)
        cached = CachedImages(dataset, CPU, progress=False)
        assert len(cached) == len(dataset) and cached.used_bytes == sum(image.numel() for image, _ in dataset)
        start, end = cached.flat.data_ptr(), cached.flat.data_ptr() + cached.used_bytes
        for index in range(len(dataset)):
            image, label = cached[index]
            assert torch.equal(image, dataset[index][0]) and label == dataset[index][1]
            assert start <= image.data_ptr() < end  # a view, not a copy
        images, labels = cached.__getitems__([5, 0, 3, 3])
        expected, expected_labels = collate_images([dataset[index] for index in (5, 0, 3, 3)])
        assert type(images) is type(expected) and torch.equal(labels, expected_labels)
        pairs = zip(*(it.unpack() if isinstance(it, PackedImages) else it for it in (images, expected)), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
        assert torch.equal(to_uint8(AsPil(cached)[2][0]), dataset[2][0])


def test_each_image_is_decoded_once_and_a_batch_is_one_call() -> None:
    data = Pictures([noise(3, 8, 8)] * 40)
    cached = CachedImages(uniform(data), CPU, progress=False)
    assert data.reads == 40 + 20  # and some before, to know what all will take
    for _ in range(3):
        assert sum(len(labels) for _, labels in DataLoader(cached, 16, collate_fn=as_is)) == 40
    assert data.reads == 60 and cached.seconds > 0


def test_what_a_cache_takes_is_said_before(photos: PhotoSet, monkeypatch: pytest.MonkeyPatch) -> None:
    need = cache_need(photos)
    assert (need.images, need.need_bytes, need.exact, need.fits) == (40, 40 * 256 * 256 * 3, True, True)
    assert repr(need).startswith("40 images as uint8 take 8 MiB of RAM, of which ") and repr(need).endswith(": it fits")
    ragged = cache_need(Pictures([noise(3, 10, 10 + i) for i in range(100)]))  # type: ignore[arg-type]
    assert not ragged.exact and ragged.need_bytes == pytest.approx(3 * 10 * 59.5 * 100, rel=0.05)
    assert " take about " in repr(ragged)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (123, 456))
    assert cache_need(photos, "cuda").free_bytes == 123 and not cache_need(photos, "cuda").fits
    assert "the GPU's memory" in repr(cache_need(photos, "cuda"))


def test_the_free_memory_is_what_the_container_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    used = psutil.Process().memory_info().rss
    monkeypatch.setattr(image_cache, "ram_bytes", lambda: used + 50 * 2**20)
    assert 0 <= cache_need(Pictures([noise(3, 8, 8)])).free_bytes <= 60 * 2**20  # type: ignore[arg-type]
    monkeypatch.setattr(image_cache, "ram_bytes", lambda: 1)
    assert cache_need(Pictures([noise(3, 8, 8)])).free_bytes == 0  # type: ignore[arg-type]
    monkeypatch.setattr(image_cache, "ram_bytes", lambda: 2**60)  # and no more than is free
    assert cache_need(Pictures([noise(3, 8, 8)])).free_bytes < psutil.virtual_memory().total  # type: ignore[arg-type]
    monkeypatch.setattr(image_cache, "ram_bytes", lambda: None)
    assert cache_need(Pictures([noise(3, 8, 8)])).free_bytes > 2**20  # type: ignore[arg-type]


def test_a_cache_that_does_not_fit_is_refused_before_it_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    data = Pictures([noise(3, 100, 100)] * 200)
    monkeypatch.setattr(image_cache, "_free", lambda device: ("RAM", 200 * 30_000 + 1))  # nothing left for training
    with pytest.raises(
        MemoryError, match=r"^200 images as uint8 take 6 MiB of RAM, .*: that is too much; give cache='none'"
    ):
        CachedImages(uniform(data), CPU, progress=False)
    assert data.reads <= 32
    monkeypatch.setattr(image_cache, "_free", lambda device: ("RAM", 200 * 30_000 * 5 // 4))
    assert CachedImages(uniform(data), CPU, progress=False).used_bytes == 200 * 30_000


def test_images_larger_than_the_estimate_still_fit_or_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    images = [noise(3, 8, 8 if index % 4 == 0 else 24) for index in range(128)]  # every fourth is looked at
    cached = CachedImages(uniform(Pictures(images)), CPU, progress=False)
    assert all(torch.equal(cached[index][0], image) for index, image in enumerate(images)) and not cached.one_size
    assert cached.used_bytes == sum(image.numel() for image in images) == len(cached.flat)
    monkeypatch.setattr(image_cache, "_free", lambda device: ("RAM", int(128 * 8 * 8 * 3 * 1.5)))
    with pytest.raises(MemoryError, match=r"^128 images as uint8 take about"):
        CachedImages(uniform(Pictures(images)), CPU, progress=False)


def test_filling_the_cache_shows_a_bar_that_says_how_much(capsys: pytest.CaptureFixture[str]) -> None:
    data = Pictures([noise(3, 592, 592)] * 4)
    CachedImages(uniform(data), CPU)
    shown = capsys.readouterr()
    assert "decoding into 4 MiB of RAM" in shown.out and shown.err == ""
    CachedImages(uniform(data), CPU, progress=False)
    assert capsys.readouterr() == ("", "")


def _uss_after_reading(cached: CachedImages, pipe: Any) -> None:
    process = psutil.Process()
    before = process.memory_full_info().uss
    total = sum(int(cached[index][0].sum()) for index in range(len(cached)))
    pipe.send((process.memory_full_info().uss - before, total))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_workers_share_the_cache() -> None:
    cached = CachedImages(uniform(Pictures(noise(256, 3, 296, 296))), CPU, progress=False)  # 64 MiB
    context = torch.multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_uss_after_reading, args=(cached, theirs))
    process.start()
    assert ours.poll(60)
    grown, total = ours.recv()
    process.join(60)
    assert total > 0 and grown < cached.used_bytes / 2


def test_a_need_reads_in_one_line() -> None:
    assert repr(CacheNeed(1200, 3 * 2**30, 2**30, "RAM", False)) == (
        "1,200 images as uint8 take about 3,072 MiB of RAM, of which 1.0 GiB are free: that is too much"
    )


# The feed


def first_batch(data: Any, recipe: Recipe) -> torch.Tensor:
    feed = open_feed(data, recipe, CPU, progress=False)
    images, _ = next(iter(DataLoader(feed.dataset, recipe.batch_size, collate_fn=feed.collate)))
    return feed.to_float(images.to(CPU))


FAST = [
    {"transfer": "uint8"},
    {"augment": "batch"},
    {"cache": "ram"},
    {"cache": "ram", "transfer": "uint8"},
    {"cache": "ram", "augment": "batch"},
    {"cache": "device", "augment": "batch"},
]


@pytest.mark.parametrize("knobs", FAST, ids=str)
def test_images_of_your_own_of_any_size_and_kind_keep_working(knobs: Any, pictures: list[Image.Image]) -> None:
    recipe = Recipe(image_size=48, batch_size=6, **knobs)
    grey = [picture.convert("L") for picture in pictures]
    square = [picture.resize((60, 60)) for picture in pictures]
    for images in (pictures, grey, square, [to_uint8(picture) for picture in pictures]):
        if isinstance(images[0], torch.Tensor) and knobs == {"transfer": "uint8"}:
            continue  # the CPU leaves tensors as they are, and these do not stack
        batch = first_batch(Pictures(images), recipe)
        assert batch.shape == (6, 3, 48, 48) and batch.dtype == torch.float32 and batch.abs().max() < 3


@pytest.mark.parametrize("knobs", FAST, ids=str)
def test_float_tensors_are_refused_in_one_sentence(knobs: Any, photos: PhotoSet) -> None:
    for data in (
        TensorDataset(torch.rand(8, 3, 48, 48), torch.zeros(8)),
        ImageFolder(photos.train, train_transform(48)),
    ):
        with pytest.raises(ValueError, match="this dataset gives float32 tensors: take its own transform away"):
            open_feed(data, Recipe(image_size=48, **knobs), CPU, progress=False)


@pytest.mark.parametrize("knobs", [{"decode": "reduced"}, {"decode": "reduced", "cache": "ram", "augment": "batch"}])
def test_reduced_decoding_reaches_the_training_and_says_when_it_does_nothing(knobs: Any, photos: PhotoSet) -> None:
    feed = open_feed(photos, Recipe(image_size=64, **knobs), CPU, progress=False)
    assert not [note for note in feed.notes if "in full" in note]
    source: Any = feed.dataset
    assert source[0][0].shape == ((3, 128, 128) if "cache" in knobs else (3, 64, 64))
    feed = open_feed(photos, Recipe(image_size=128, **knobs), CPU, progress=False)
    assert feed.notes[0].startswith(
        "decode='reduced' read the first image in full (256 × 256 pixels): image_size=128 needs 234"
    )
    assert first_batch(photos, Recipe(image_size=64, batch_size=4, **knobs)).shape == (4, 3, 64, 64)
    with pytest.raises(ValueError, match="decode='reduced' needs files that torchvision's ImageFolder opens"):
        open_feed(Pictures([noise(3, 8, 8)]), Recipe(image_size=64, **knobs), CPU)  # type: ignore[arg-type]


def test_a_transform_of_your_own_that_the_cache_freezes_is_noted(photos: PhotoSet) -> None:
    recipe = Recipe(image_size=48, cache="ram")
    plain = open_feed(ImageFolder(photos.train), recipe, CPU, progress=False).notes
    assert len(plain) == 1 and plain[0].startswith("cache='ram' holds 40 decoded images in 8 MiB of RAM; decoding")
    for data in (ImageFolder(photos.train, v2.RandomHorizontalFlip()), Pictures([noise(3, 8, 8)] * 3)):
        given = Subset(data, [0, 1])
        notes = open_feed(given, recipe, CPU, progress=False).notes
        assert [("own transform ran once" in note) for note in notes[1:]] == [True] * isinstance(data, ImageFolder)
