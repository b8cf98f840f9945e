"""The photographs: the same files every time, whole or not there at all, and never at the cost of somebody's data."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image

from course_utils import photo_crops, photos
from course_utils.photos import PHOTOGRAPHS, PhotosError, PhotoSet, default_folder, prepare_photos

ROOT = Path(__file__).resolve().parents[1]


def tiny(folder: Path, **changes: int) -> PhotoSet:
    return prepare_photos(
        folder, **{"train_per_class": 2, "val_per_class": 1, "size_px": 32, **changes}, progress=False
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "photos"


def test_a_set_is_what_image_folder_reads(folder: Path) -> None:
    from torchvision.datasets import ImageFolder

    made = tiny(folder)
    train, val = ImageFolder(made.train), ImageFolder(made.val)
    assert tuple(train.classes) == tuple(val.classes) == made.classes == tuple(sorted(PHOTOGRAPHS))
    assert (len(train), len(val)) == (made.train_files, made.val_files) == (20, 10)
    assert made.used_bytes == sum(path.stat().st_size for path in folder.rglob("*.jpg"))
    for path in folder.rglob("*.jpg"):
        with Image.open(path) as image:
            assert (image.format, image.size, image.mode) == ("JPEG", (32, 32), "RGB")
    assert made.built and not tiny(folder).built
    assert "20" in repr(made) and "found them in the cache" in tiny(folder)._repr_html_()


def test_the_same_arguments_give_the_same_files(tmp_path: Path) -> None:
    tiny(tmp_path / "a"), tiny(tmp_path / "b")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    tiny(tmp_path / "c", train_per_class=3)
    first, larger = contents(tmp_path / "a"), contents(tmp_path / "c")
    assert all(larger[name] == data for name, data in first.items() if name.endswith(".jpg"))
    assert len(set(first.values())) == len(first)  # no two crops are equal


def test_no_held_out_crop_touches_a_training_crop() -> None:
    for label in PHOTOGRAPHS:
        width, height = photo_crops.photograph(label).size
        along = 0 if width >= height else 1
        edges = {
            split: [photo_crops.crop_box(width, height, split, f"{label}/{split}/{i}") for i in range(200)]
            for split in ("train", "val")
        }
        for box in [*edges["train"], *edges["val"]]:
            assert 0 <= box[0] < box[2] <= width and 0 <= box[1] < box[3] <= height
            assert box[2] - box[0] == box[3] - box[1] >= 60
        assert max(box[along + 2] for box in edges["train"]) <= min(box[along] for box in edges["val"])


def test_a_crop_depends_on_no_pixel_outside_its_region() -> None:
    picture = photo_crops.photograph("coffee")
    left, upper, right, lower = photo_crops.region(*picture.size, "val")
    painted = Image.new("RGB", picture.size, "magenta")
    painted.paste(picture.crop((left, upper, right, lower)), (left, upper))
    for index in range(40):
        key = f"coffee/val/{index}"
        assert photo_crops.cut(painted, "val", key, 48) == photo_crops.cut(picture, "val", key, 48)


def test_nothing_is_fetched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    def refuse(*_: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    assert tiny(folder).built


def test_default_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("COURSE_PHOTOS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_folder() == tmp_path / "xdg" / "gpu-utilisation-course" / "photos"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_folder() == tmp_path / ".cache" / "gpu-utilisation-course" / "photos"
    monkeypatch.setenv("COURSE_PHOTOS", "~/mine")
    assert default_folder() == tmp_path / "mine"
    made = prepare_photos(train_per_class=1, val_per_class=1, size_px=16, progress=False)
    assert made.folder == (tmp_path / "mine").resolve() and made.built


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def _flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [Path.unlink, _truncate, _flip_a_byte, lambda path: shutil.rmtree(path.parent)])
def test_damage_is_noticed_and_mended(folder: Path, damage: object) -> None:
    tiny(folder)
    whole = contents(folder)
    damage(folder / "train/cat/00001.jpg")  # type: ignore[operator]
    assert contents(folder) != whole
    assert tiny(folder).built
    assert contents(folder) == whole
    assert [path.name for path in folder.parent.iterdir()] == ["photos"]


def test_other_numbers_or_an_older_version_are_cut_again(folder: Path) -> None:
    tiny(folder)
    assert tiny(folder, val_per_class=2).val_files == 20
    assert tiny(folder).built and not (folder / "val/cat/00001.jpg").exists()
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "version": 0}))
    assert tiny(folder).built


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "course_utils photos"}', "[" * 100_000, "\0\0"])
def test_a_spoilt_manifest_never_costs_files(folder: Path, text: str) -> None:
    tiny(folder)
    (folder / "manifest.json").write_text(text)
    before = contents(folder)
    with pytest.raises(PhotosError, match="left alone"):
        tiny(folder)
    assert contents(folder) == before


def test_somebody_elses_data_is_left_alone(folder: Path) -> None:
    (folder / "train/cat").mkdir(parents=True)
    (folder / "train/cat/00000.jpg").write_text("mine")
    with pytest.raises(
        PhotosError, match=r"cannot tell to be its own \(train/cat/00000\.jpg\).*COURSE_PHOTOS"
    ) as caught:
        tiny(folder)
    assert str(caught.value).startswith(str(folder)) and "\n" not in str(caught.value)
    assert contents(folder) == {"train/cat/00000.jpg": b"mine"}


def test_a_file_added_to_a_damaged_set_is_not_lost(folder: Path) -> None:
    tiny(folder)
    (folder / "notes.txt").write_text("mine")
    assert not tiny(folder).built  # a whole set with a stranger's file in it still serves
    (folder / "val/cat/00000.jpg").unlink()
    with pytest.raises(PhotosError, match=r"notes\.txt"):
        tiny(folder)
    assert (folder / "notes.txt").read_text() == "mine"


def test_an_empty_folder_and_a_link_to_one_will_do(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert tiny(tmp_path / "empty").built
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    assert tiny(tmp_path / "link").folder == (tmp_path / "elsewhere").resolve()
    assert not tiny(tmp_path / "link").built


def test_wrong_folders_get_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    for wrong in (tmp_path / "file", tmp_path / "file/below", tmp_path / "circle", tmp_path / ("x" * 300)):
        with pytest.raises(PhotosError) as caught:
            tiny(wrong)
        assert (
            "COURSE_PHOTOS" in str(caught.value) and "\n" not in str(caught.value) and "Errno" not in str(caught.value)
        )
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that not even root can write to")
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(PhotosError, match=r"cannot be kept in /proc/course/photos .*COURSE_PHOTOS"):
        tiny(Path("/proc/course/photos"))


def test_too_little_space_is_said_before_anything_is_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9 - 9000, 9000))
    with pytest.raises(PhotosError, match=r"too full .*take up to \d+ MiB, 0 MiB are free.*free some space") as caught:
        prepare_photos(folder, progress=False)
    assert caught.value.errno == errno.ENOSPC
    assert list(folder.parent.iterdir()) == []


def test_the_space_that_is_asked_for_is_enough(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(photos, "_full", lambda parent, detail: asked.append(detail) or "full")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(0, 0, 0))
    with pytest.raises(PhotosError):
        tiny(folder, size_px=256)
    monkeypatch.undo()
    needed = int(asked[0].split("up to ")[1].split(" MiB")[0]) * 2**20
    on_disk = sum(-(-len(data) // 4096) * 4096 for data in contents(tiny(folder, size_px=256).folder).values())
    assert on_disk < needed < 5 * on_disk


def test_a_disk_that_fills_up_on_the_way(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny(folder)
    (folder / "train/cat/00000.jpg").unlink()
    before = contents(folder)
    written = []
    write = Path.write_bytes

    def full_after_five(path: Path, data: bytes) -> int:
        written.append(path)
        if len(written) > 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", full_after_five)
    with pytest.raises(PhotosError, match=r"too full .*No space left on device") as caught:
        tiny(folder)
    assert caught.value.errno == errno.ENOSPC and "\n" not in str(caught.value)
    assert contents(folder) == before and len(written) == 6
    assert [path.name for path in folder.parent.iterdir()] == ["photos"]


def test_a_really_full_disk(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("this machine allows no mount")
    try:
        # The check before the build passes for 30 small files; a tmpfs then runs out of pages while they are written.
        real = shutil.disk_usage
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shutil, "disk_usage", lambda path: real(tmp_path))
            with pytest.raises(PhotosError, match="too full"):
                tiny(disk / "photos")
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", disk], check=True)


def test_an_interrupt_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut, calls = photos.cut, []

    def interrupted(*arguments: object) -> bytes:
        calls.append(arguments)
        if len(calls) == 7:
            raise KeyboardInterrupt
        return cut(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(photos, "cut", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tiny(folder)
    assert list(folder.parent.iterdir()) == []
    assert tiny(folder).built


BUILD = """
import sys
from course_utils.photos import prepare_photos
prepare_photos(sys.argv[1], train_per_class=int(sys.argv[2]), val_per_class=1, size_px=32, progress=False)
"""


def build_elsewhere(folder: Path, train_per_class: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", BUILD, str(folder), str(train_per_class)], cwd=ROOT)


def test_a_killed_build_starts_again_and_is_cleared_away(folder: Path) -> None:
    process = build_elsewhere(folder, 5000)
    deadline = time.monotonic() + 60
    while not list(folder.parent.glob(".photos.*/set/train/*/00003.jpg")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not folder.exists()
    stranger = folder.parent / ".photos.other-machine-1-x.part"
    stranger.mkdir()
    assert tiny(folder).built and not tiny(folder).built
    assert sorted(path.name for path in folder.parent.iterdir()) == [stranger.name, "photos"]


def test_processes_that_build_at_once(folder: Path) -> None:
    reference = contents(tiny(folder.parent / "reference", train_per_class=20).folder)
    processes = [build_elsewhere(folder, 20) for _ in range(3)]
    assert [process.wait(timeout=120) for process in processes] == [0, 0, 0]
    assert contents(folder) == reference
    assert sorted(path.name for path in folder.parent.iterdir()) == ["photos", "reference"]


def test_another_process_finishes_between_the_two_steps(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = Path.rename

    def overtaken(path: Path, target: Path) -> Path:
        if path.name == "set":
            shutil.copytree(path, target)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", overtaken)
    assert tiny(folder).built
    monkeypatch.undo()
    assert not tiny(folder).built
    assert [path.name for path in folder.parent.iterdir()] == ["photos"]


@pytest.mark.parametrize("wrong", [0, -1, True, 1.5, "16", None, 10**9])
@pytest.mark.parametrize("name", ["train_per_class", "val_per_class", "size_px"])
def test_numbers_that_make_no_set(folder: Path, name: str, wrong: object) -> None:
    with pytest.raises(ValueError, match=f"{name}=.*whole number from"):
        tiny(folder, **{name: wrong})  # type: ignore[arg-type]
    assert not folder.exists()


def test_a_missing_package_or_photograph(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(photo_crops, "find_spec", lambda _: None)
    with pytest.raises(PhotosError, match="not installed: pip install scikit-image"):
        tiny(folder)
    monkeypatch.undo()
    monkeypatch.setitem(PHOTOGRAPHS, "temple", ("sklearn", "datasets/images/gone.jpg"))
    with pytest.raises(PhotosError, match=r"without its photograph gone\.jpg: reinstall scikit-learn"):
        tiny(folder)
    assert list(folder.parent.iterdir()) == []


def test_the_progress_bar_is_text_on_stdout_and_can_be_off(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare_photos(folder, train_per_class=1, val_per_class=1, size_px=16)
    shown = capsys.readouterr()
    assert "cutting photographs" in shown.out and shown.err == ""
    prepare_photos(folder.parent / "quiet", train_per_class=1, val_per_class=1, size_px=16, progress=False)
    assert capsys.readouterr() == ("", "")
