"""The course's pictures: JPEG crops of the real photographs that ship inside scikit-image and scikit-learn.

Nothing is downloaded. One class per photograph, in class folders that `torchvision.datasets.ImageFolder` reads:

    photos = prepare_photos()                      # cut once, then found in the cache
    ImageFolder(photos.train), ImageFolder(photos.val)

The held-out crops come from a part of each photograph that no training crop touches. A set is built beside its place
and moved there when it is whole, so an interrupted build leaves nothing half done. A damaged set is noticed and cut
again.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from course_utils import views
from course_utils.photo_crops import PHOTOGRAPHS, VERSION, PhotosError, cut, photograph

__all__ = ["FOLDER_VARIABLE", "PHOTOGRAPHS", "PhotoSet", "PhotosError", "default_folder", "prepare_photos"]

FOLDER_VARIABLE = "COURSE_PHOTOS"  # an environment variable that names another folder for the set
_FORMAT = "course_utils photos"
_MANIFEST = "manifest.json"
_BYTES_PER_PIXEL = 0.4  # twice what a set takes in the mean
_OTHER_FOLDER = f"choose another folder, or set the environment variable {FOLDER_VARIABLE} to one"
Files = dict[str, tuple[int, int]]  # relative path: (bytes, CRC-32)


@dataclass(frozen=True, repr=False)
class PhotoSet:
    """A whole set on disk: `train` and `val` are class folders; `built` says whether this call had to cut it."""

    folder: Path
    classes: tuple[str, ...]
    train_files: int
    val_files: int
    used_bytes: int
    built: bool
    seconds: float

    @property
    def train(self) -> Path:
        """The folder of the training crops, one subfolder per class."""
        return self.folder / "train"

    @property
    def val(self) -> Path:
        """The folder of the held-out crops, one subfolder per class."""
        return self.folder / "val"

    def _rows(self) -> list[tuple[str, str]]:
        return [
            ("classes", ", ".join(self.classes)),
            ("training crops", views.number(self.train_files)),
            ("held-out crops", views.number(self.val_files)),
            ("on disk", views.mebibytes(self.used_bytes)),
            ("folder", str(self.folder)),
            ("this call", f"cut them in {self.seconds:.1f} s" if self.built else "found them in the cache"),
        ]

    def __repr__(self) -> str:
        return views.text_table(["photographs", "this set"], self._rows())

    def _repr_html_(self) -> str:
        return views.html_table(["photographs", "this set"], self._rows())


def default_folder() -> Path:
    """Where the set is kept: $COURSE_PHOTOS, else the user's cache folder ($XDG_CACHE_HOME or ~/.cache)."""
    chosen = os.environ.get(FOLDER_VARIABLE)
    if chosen:
        return Path(chosen).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "gpu-utilisation-course" / "photos"


def prepare_photos(
    folder: str | Path | None = None,
    *,
    train_per_class: int = 64,
    val_per_class: int = 16,
    size_px: int = 256,
    progress: bool = True,
) -> PhotoSet:
    """The set in `folder` (None: `default_folder()`), cut first if it is missing, damaged or made with other numbers.

    Each file is a `size_px` × `size_px` RGB JPEG. The same arguments give the same files with the same Pillow. Only a
    folder that is missing, empty or an earlier set of ours is written to. Raises `PhotosError`, an OSError, with one
    sentence when the folder or the disk will not do; ValueError for numbers that make no set.
    """
    for name, value, lowest, highest in (
        ("train_per_class", train_per_class, 1, 10_000),
        ("val_per_class", val_per_class, 1, 10_000),
        ("size_px", size_px, 16, 2048),
    ):
        if type(value) is not int or not lowest <= value <= highest:
            raise ValueError(f"{name}={value!r} will not do: give a whole number from {lowest} to {highest:,}")
    plan = {"format": _FORMAT, "version": VERSION, "train": train_per_class, "val": val_per_class, "size_px": size_px}
    place = default_folder() if folder is None else Path(folder).expanduser()
    started = time.perf_counter()
    try:
        place = place.resolve()
        found = files = _checked(place, plan)
        if files is None:
            _build(place, plan, progress)
            files = _checked(place, plan)
    except PhotosError:
        raise
    except (OSError, RuntimeError) as error:  # RuntimeError: links that lead in a circle, in Python 3.12 and older
        raise PhotosError(getattr(error, "errno", None) or errno.ELOOP, _explain(error, place)) from error
    if files is None:
        raise PhotosError(errno.EIO, f"{place} was damaged while the photographs were written to it: try again")
    return PhotoSet(
        folder=place,
        classes=tuple(sorted(PHOTOGRAPHS)),
        train_files=train_per_class * len(PHOTOGRAPHS),
        val_files=val_per_class * len(PHOTOGRAPHS),
        used_bytes=sum(size for size, _ in files.values()),
        built=found is None,
        seconds=time.perf_counter() - started,
    )


def _build(place: Path, plan: dict[str, Any], progress: bool) -> None:
    """Cut the set in a temporary folder beside `place`, then move it there in one step."""
    _refuse_foreign(place)
    place.parent.mkdir(parents=True, exist_ok=True)
    _clear_abandoned(place)
    _require_space(place.parent, plan)
    mark = f".{place.name}.{socket.gethostname()}-{os.getpid()}-"
    work = Path(tempfile.mkdtemp(prefix=mark, suffix=".part", dir=place.parent))
    try:
        files = _cut_all(work / "set", plan, progress)
        (work / "set" / _MANIFEST).write_text(json.dumps({**plan, "files": files}), encoding="utf-8")
        if _checked(place, plan) is None:  # another process may have finished meanwhile: then its set stays
            _move_in(work / "set", place, work / "old", plan)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _cut_all(into: Path, plan: dict[str, Any], progress: bool) -> Files:
    from tqdm import tqdm

    files: Files = {}
    names = list(_names(plan))
    with tqdm(
        total=len(names), desc="cutting photographs", unit=" files", file=sys.stdout, leave=False, disable=not progress
    ) as bar:
        for label in sorted(PHOTOGRAPHS):
            picture = photograph(label)
            for split in ("train", "val"):
                (into / split / label).mkdir(parents=True)
            for split, index in (name[::2] for name in names if name[1] == label):
                data = cut(picture, split, f"{label}/{split}/{index}", plan["size_px"])
                relative = _relative(split, label, index)
                (into / relative).write_bytes(data)
                files[relative] = _fingerprint(data)
                bar.update()
    return files


def _move_in(whole: Path, place: Path, aside: Path, plan: dict[str, Any]) -> None:
    _refuse_foreign(place)
    try:
        if place.exists():
            place.rename(aside)
        whole.rename(place)
    except OSError:
        if _checked(place, plan) is not None:
            return  # another process moved the same set in between the two steps
        if aside.exists() and not place.exists():
            aside.rename(place)
        raise


def _names(plan: dict[str, Any]) -> Iterator[tuple[str, str, int]]:
    """(split, class, index) of every file of a set."""
    for label in sorted(PHOTOGRAPHS):
        for split in ("train", "val"):
            for index in range(plan[split]):
                yield split, label, index


def _relative(split: str, label: str, index: int) -> str:
    return f"{split}/{label}/{index:05d}.jpg"


def _fingerprint(data: bytes) -> tuple[int, int]:
    return len(data), zlib.crc32(data)


def _read_manifest(place: Path) -> dict[str, Any] | None:
    """The manifest of a set of ours in `place`, of any version, or None."""
    try:
        with (place / _MANIFEST).open(encoding="utf-8") as file:
            manifest = json.loads(file.read(50_000_000))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError, RecursionError):
        return None
    return manifest if isinstance(manifest, dict) and manifest.get("format") == _FORMAT else None


def _checked(place: Path, plan: dict[str, Any]) -> Files | None:
    """The files when the set in `place` is whole and as planned, else None. Reads every file once."""
    manifest = _read_manifest(place)
    if manifest is None or any(manifest.get(key) != value for key, value in plan.items()):
        return None
    recorded = manifest.get("files")
    files: Files = {}
    for name in _names(plan):
        relative = _relative(*name)
        try:
            files[relative] = _fingerprint((place / relative).read_bytes())
        except OSError:
            return None  # missing or unreadable: the set is cut again
        if not isinstance(recorded, dict) or recorded.get(relative) != list(files[relative]):
            return None
    return files


def _refuse_foreign(place: Path) -> None:
    """Raise unless `place` is missing, empty, or holds nothing but an earlier set of ours."""
    if not place.exists():
        return
    if not place.is_dir():
        raise PhotosError(errno.ENOTDIR, f"{place} is a file, so the photographs cannot go there: {_OTHER_FOLDER}")
    recorded = (_read_manifest(place) or {}).get("files")
    ours = {_MANIFEST, *recorded} if isinstance(recorded, dict) else set()
    for path in place.rglob("*"):
        name = path.relative_to(place).as_posix()
        if not path.is_dir() and name not in ours:
            raise PhotosError(
                errno.ENOTEMPTY,
                f"{place} holds files that this course cannot tell to be its own ({name[:80]}) and was left alone: "
                f"{_OTHER_FOLDER}, or delete it if you do not need it",
            )


def _clear_abandoned(place: Path) -> None:
    """Delete what a killed build left beside `place`: only folders named for a process of this machine that is gone."""
    import psutil

    start = f".{place.name}.{socket.gethostname()}-"
    for path in place.parent.iterdir():
        if path.name.startswith(start) and path.suffix == ".part":
            pid = path.name.removeprefix(start).split("-")[0]
            if pid.isdecimal() and len(pid) < 10 and not psutil.pid_exists(int(pid)):
                shutil.rmtree(path, ignore_errors=True)


def _require_space(parent: Path, plan: dict[str, Any]) -> None:
    each = plan["size_px"] ** 2 * _BYTES_PER_PIXEL + 4096  # a file system's block comes on top
    needed = int(len(PHOTOGRAPHS) * (plan["train"] + plan["val"]) * each)
    free = shutil.disk_usage(parent).free
    if free < needed:
        detail = f"they take up to {views.mebibytes(needed)}, {views.mebibytes(free)} are free"
        raise PhotosError(errno.ENOSPC, _full(parent, detail))


def _full(parent: Path, detail: str) -> str:
    return (
        f"the disk of {parent} is too full for the photographs ({detail}): "
        f"free some space, or set the environment variable {FOLDER_VARIABLE} to a folder elsewhere"
    )


def _explain(error: Exception, place: Path) -> str:
    reason = getattr(error, "strerror", None) or str(error)
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
        return _full(place.parent, reason)
    return f"the photographs cannot be kept in {place} ({reason}): {_OTHER_FOLDER}"
