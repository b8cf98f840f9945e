"""The set-up behind `make`: every way it can fail has its sentence, and what is installed is not installed again.

Nothing is downloaded: the environment's Python is a small script that notes how it was called.
"""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tools import bootstrap, images, install, setup_cell

ROOT = Path(__file__).resolve().parent.parent
LOCAL, COLAB = images.IMAGES["local"], images.IMAGES["colab"]
POSIX = pytest.mark.skipif(os.name == "nt", reason="runs shell scripts")

# Stands in for an image's Python: writes its arguments to a file, and can be told to fail. One printf, so one write:
# two of them run at a time, and their lines must not mix.
FAKE_PYTHON = """#!/bin/sh
printf '%s\\n' "$@" --- >> "{calls}"
if [ -f "{calls}.fails" ]; then cat "{calls}.fails"; exit 1; fi
"""


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A copy of what set-up reads, in an empty folder."""
    for name in ("requirements.txt", "pyproject.toml", "Makefile", "tools", "tests/colab"):
        source, target = ROOT / name, tmp_path / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    for name in ("IMAGE", "TORCH", "PORT", "ARGS", "MAKEFLAGS", "MAKELEVEL"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def calls(root, monkeypatch):
    """Makes `python -m venv` create a fake Python; returns what reads how the fakes were called."""
    file = root / "calls.txt"
    real_run = subprocess.run

    def run(command, **settings):
        if list(command[1:3]) != ["-m", "venv"]:
            return real_run(command, **settings)
        fake(Path(command[3]), file)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(install, "subprocess", SimpleNamespace(run=run, DEVNULL=subprocess.DEVNULL, STDOUT=-2))
    monkeypatch.setattr(install.shutil, "disk_usage", lambda _: SimpleNamespace(free=10**12))
    return lambda: [call.splitlines() for call in file.read_text().split("---\n")[:-1]] if file.exists() else []


def fake(folder: Path, file: Path) -> None:
    python = folder / "bin/python"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text(FAKE_PYTHON.format(calls=file))
    python.chmod(0o755)


def fail(root: Path, text: str) -> None:
    (root / "calls.txt.fails").write_text(text)


def make(root: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
    # make's own Python is this one without its environment: what a user has.
    variables = {"PYTHON": sys.executable, **variables}
    return subprocess.run(
        ["make", *arguments, *(f"{name}={value}" for name, value in variables.items())],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )


# --- the Python that starts it ---


def test_the_first_file_parses_on_old_pythons():
    source = (ROOT / "tools/bootstrap.py").read_text(encoding="utf-8")
    ast.parse(source, feature_version=(3, 6))
    assert "from __future__" not in source, "Python 3.6 does not know annotations there: a traceback, no sentence"


@POSIX
def test_an_old_python_gets_a_sentence(root):
    old = root / "old-python"
    trick = "import runpy, sys; sys.version_info = (3, 8, 18); sys.argv = sys.argv[1:]; "
    old.write_text(
        f'#!/bin/sh\nexec "{sys.executable}" -c \'{trick}runpy.run_path(sys.argv[0], None, "__main__")\' "$@"\n'
    )
    old.chmod(0o755)
    done = make(root, "lab", PYTHON=str(old))
    assert done.returncode != 0
    assert "This course needs Python 3.11 or newer; this is Python 3.8" in done.stderr
    assert "Traceback" not in done.stderr


@POSIX
def test_no_python_at_all_gets_a_sentence(root):
    tools = root / "bin"
    tools.mkdir()
    for name in ("sh", "make"):
        (tools / name).symlink_to(shutil.which(name))
    done = subprocess.run(
        ["make", "test", f"SHELL={tools / 'sh'}"], cwd=root, env={"PATH": str(tools)}, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "There is no Python here: install 3.11 or newer" in done.stderr


def test_make_alone_lists_the_targets(root):
    done = make(root)
    assert done.returncode == 0
    for word in ("lab", "test", "course", "check", "sync", "badges", "TORCH=cpu", "IMAGE=colab"):
        assert word in done.stdout


@pytest.mark.parametrize("missing", ["venv", "ensurepip"])
def test_no_venv_module_gets_a_sentence(root, calls, missing, monkeypatch):
    found = install.importlib.util.find_spec
    monkeypatch.setattr(install.importlib.util, "find_spec", lambda name: None if name == missing else found(name))
    with pytest.raises(install.SetupError, match="sudo apt install python3-venv"):
        install.prepare([LOCAL], None, "", root)
    assert calls() == []


# --- what is installed, and when ---


def test_the_first_run_installs_and_the_second_does_not(root, calls, capsys):
    install.prepare([LOCAL], ("lab",), "", root)
    first = calls()
    assert len(first) == 1
    assert first[0][:3] == ["-m", "pip", "install"]
    assert first[0][-3:] == ["--requirement", "requirements.txt", "jupyterlab>=4.2"]
    told = capsys.readouterr().out
    assert "Installing requirements.txt + lab (pip's output: .build/install-local.log)" in told
    assert "about 6.5 GB of disk, once" in told or sys.platform != "linux"

    install.prepare([LOCAL], ("lab",), "", root)
    assert calls() == first
    assert capsys.readouterr().out == "[local] .venv (the newest versions): ready.\n"


def test_both_images_are_built_and_colabs_is_held_to_its_versions(root, calls):
    install.prepare([LOCAL, COLAB], None, "", root)
    pinned = [call for call in calls() if "--constraint" in call]
    assert len(calls()) == 2
    assert len(pinned) == 1
    assert pinned[0][pinned[0].index("--constraint") + 1] == "tests/colab/constraints.txt"
    assert not any("jupyterlab" in word for word in pinned[0])
    assert images.plan(LOCAL, LOCAL.extras, "", root).action == "none"
    assert images.plan(COLAB, COLAB.extras, "", root).action == "none"


def test_lab_then_test_adds_only_what_tests_need_and_keeps_lab(root, calls):
    install.prepare([LOCAL], ("lab",), "", root)
    install.prepare([LOCAL], None, "", root)
    assert len(calls()) == 2
    assert {"jupyterlab>=4.2", "pytest-xdist>=3.6"} <= set(calls()[1])
    install.prepare([LOCAL], ("lab",), "", root)
    assert len(calls()) == 2


@pytest.mark.parametrize("name", ["requirements.txt", "tests/colab/constraints.txt"])
def test_a_changed_list_is_installed(root, calls, name):
    install.prepare([COLAB], None, "", root)
    path = root / name
    path.write_text(path.read_text() + "\nsix\n")
    assert images.plan(COLAB, COLAB.extras, "", root).action == "update"
    install.prepare([COLAB], None, "", root)
    assert len(calls()) == 2
    assert images.plan(COLAB, COLAB.extras, "", root).action == "none"


def test_an_interrupted_installation_starts_again(root, calls, capsys, monkeypatch):
    def cut_short(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(install, "_pip_commands", cut_short)
        with pytest.raises(KeyboardInterrupt):
            install.prepare([LOCAL], None, "", root)
    leftover = root / ".venv/half-a-package"
    leftover.write_text("")
    install.prepare([LOCAL], None, "", root)
    assert "an earlier installation did not finish, so it starts again" in capsys.readouterr().out
    assert not leftover.exists()
    assert len(calls()) == 1


def test_a_record_that_is_cut_off_counts_as_interrupted(root, calls):
    install.prepare([LOCAL], None, "", root)
    record = root / ".venv/.course.json"
    record.write_text(record.read_text()[:20])
    assert images.plan(LOCAL, LOCAL.extras, "", root).action == "build"


def test_an_environment_made_by_hand_is_kept(root, calls):
    fake(root / ".venv", root / "calls.txt")
    mine = root / ".venv/mine"
    mine.write_text("")
    install.prepare([LOCAL], None, "", root)
    assert mine.exists()
    assert len(calls()) == 1


def test_another_python_builds_anew(root, calls, monkeypatch):
    install.prepare([LOCAL], None, "", root)
    monkeypatch.setattr(images, "python_version", lambda: "3.99")
    plan = images.plan(LOCAL, LOCAL.extras, "", root)
    assert (plan.action, plan.reason) == (
        "build",
        f"made with Python {sys.version_info[0]}.{sys.version_info[1]}, so it is built again for 3.99",
    )


def test_a_python_that_was_removed_builds_anew(root, calls):
    install.prepare([LOCAL], None, "", root)
    (root / ".venv/bin/python").unlink()
    assert images.plan(LOCAL, LOCAL.extras, "", root).action == "build"


def test_cpu_wheels_come_from_pytorchs_index_alone_and_stay(root, calls):
    install.prepare([LOCAL], ("lab",), "cpu", root)
    wheels, rest = calls()
    assert wheels[wheels.index("--index-url") + 1] == "https://download.pytorch.org/whl/cpu"
    assert "--no-deps" in wheels
    assert wheels[-2:] == ["torch", "torchvision"]
    assert "--index-url" not in rest
    assert images.plan(LOCAL, ("lab",), "", root).action == "none", "without TORCH=, what is there stays"
    plan = images.plan(LOCAL, ("lab",), "cuda", root)
    assert (plan.action, plan.reason) == ("build", "PyTorch for cuda instead of cpu, so it is built again")


def test_an_unknown_torch_gets_a_sentence(root):
    with pytest.raises(install.SetupError, match=r"TORCH=gpu is not a choice. It is cpu .* or cuda"):
        install.prepare([LOCAL], None, "gpu", root)


# --- what goes wrong while installing ---


@pytest.mark.parametrize(
    ("log", "sentence"),
    [
        ("Failed to establish a new connection: [Errno 101] Network is unreachable", "index could not be reached"),
        ("[Errno -3] Temporary failure in name resolution'))': /simple/torch/", "Check the network or the proxy"),
        ("HTTPSConnectionPool(host='x', port=443): Read timed out. ReadTimeoutError", "Check the network or the proxy"),
        ("ERROR: Could not install: [Errno 28] No space left on device", "The disk is full"),
        ("ERROR: No matching distribution found for torch<3,>=2.11", "There is no torch<3,>=2.11 for this Python"),
        ("ERROR: ResolutionImpossible", "Its log says why"),
    ],
)
def test_a_failing_pip_gets_a_sentence_and_its_last_lines(root, calls, log, sentence):
    fail(root, "Collecting torch\n" + log + "\n")
    with pytest.raises(install.SetupError) as problem:
        install.prepare([LOCAL], None, "", root)
    text = str(problem.value)
    assert text.startswith("pip could not install into .venv. ")
    assert sentence in text
    assert "The last lines of .build/install-local.log:" in text
    assert log in text


def test_after_a_failure_the_next_run_installs(root, calls):
    fail(root, "offline\n")
    with pytest.raises(install.SetupError):
        install.prepare([LOCAL], None, "", root)
    (root / "calls.txt.fails").unlink()
    install.prepare([LOCAL], None, "", root)
    assert images.plan(LOCAL, LOCAL.extras, "", root).action == "none"


def test_a_failed_update_leaves_what_was_usable(root, calls):
    install.prepare([LOCAL], ("lab",), "", root)
    fail(root, "offline\n")
    with pytest.raises(install.SetupError):
        install.prepare([LOCAL], None, "", root)
    assert images.plan(LOCAL, ("lab",), "", root).action == "none"
    assert images.plan(LOCAL, LOCAL.extras, "", root).action == "update"


def test_the_failure_of_each_image_is_told(root, calls):
    fail(root, "ResolutionImpossible\n")
    with pytest.raises(install.SetupError) as problem:
        install.prepare([LOCAL, COLAB], None, "", root)
    assert ".build/install-local.log" in str(problem.value)
    assert ".build/install-colab.log" in str(problem.value)


@POSIX
@pytest.mark.skipif(os.environ.get("COURSE_IMAGE") == "colab", reason="the same in both images; the local one runs it")
def test_the_real_pip_offline(root):
    """One real environment, and an index where nobody answers."""
    offline = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "1", "PIP_CONFIG_FILE": os.devnull}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    done = subprocess.run(
        [sys.executable, "tools/bootstrap.py", "lab"], cwd=root, env={**kept, **offline}, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "The package index could not be reached. Check the network or the proxy, then run this again." in done.stderr
    assert "Traceback" not in done.stderr
    assert images.plan(LOCAL, ("lab",), "", root).action == "build"


# --- the disk ---


def test_a_full_disk_is_told_before_anything_is_downloaded(root, calls, monkeypatch):
    monkeypatch.setattr(install.shutil, "disk_usage", lambda _: SimpleNamespace(free=1_000_000_000))
    monkeypatch.setattr(install.sys, "platform", "linux")
    with pytest.raises(install.SetupError) as problem:
        install.prepare([LOCAL], None, "", root)
    assert "about 6.5 GB are needed" in str(problem.value)
    assert "1.0 GB are free" in str(problem.value)
    assert "TORCH=cpu" in str(problem.value)
    assert calls() == []
    with pytest.raises(install.SetupError, match=r"about 2\.0 GB are needed"):
        install.prepare([LOCAL], None, "cpu", root)


def test_a_full_disk_stops_nothing_that_is_installed(root, calls, monkeypatch):
    install.prepare([LOCAL], None, "", root)
    monkeypatch.setattr(install.shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    install.prepare([LOCAL], None, "", root)
    assert len(calls()) == 1


def test_an_update_needs_little_disk(root, calls, monkeypatch):
    install.prepare([LOCAL], ("lab",), "", root)
    monkeypatch.setattr(install.shutil, "disk_usage", lambda _: SimpleNamespace(free=600_000_000))
    install.prepare([LOCAL], None, "", root)
    assert len(calls()) == 2


# --- what the commands run ---


def installed(root: Path, image: images.Image, extras: tuple[str, ...]) -> None:
    fake(root / image.folder, root / "calls.txt")
    images.write_record(root / image.folder, images.finished_record(images.plan(image, extras, "", root)))


@POSIX
def test_make_lab_passes_port_and_args_to_jupyterlab(root, monkeypatch):
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    installed(root, LOCAL, images.LEARNERS_EXTRAS)
    done = make(root, "lab", PORT="9123", ARGS="--LabApp.x='a b' --debug")
    assert done.returncode == 0, done.stderr
    call = (root / "calls.txt").read_text().splitlines()[:-1]
    assert call[:2] == ["-m", "jupyterlab"]
    assert {f"--ServerApp.root_dir={root}", "--port=9123", "--LabApp.x=a b", "--debug"} <= set(call)
    assert "--LabApp.default_url=/lab/tree/notebooks/01_enable_t4.ipynb" in call
    assert ("--allow-root" in call) == (os.geteuid() == 0)
    if sys.platform == "linux":
        assert "--no-browser" in call
        assert "at the address that it prints below" in done.stdout
    assert "Installing" not in done.stdout


def test_make_lab_installs_what_the_lessons_ask_for():
    assert set(setup_cell.EXTRAS.values()) <= set(images.LEARNERS_EXTRAS) <= set(LOCAL.extras)


def test_the_first_lesson_exists():
    assert (ROOT / bootstrap.FIRST_LESSON).exists()


def test_jupyterlab_may_open_a_browser_where_there_is_one(monkeypatch):
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr(bootstrap.os, "geteuid", lambda: 1000, raising=False)
    arguments = bootstrap.lab_arguments("", [], ROOT)
    assert not {"--no-browser", "--allow-root"} & set(arguments)
    assert not any(argument.startswith("--port") for argument in arguments)


@POSIX
def test_make_test_runs_everything_in_both_images_and_goes_on_after_a_failure(root):
    installed(root, LOCAL, LOCAL.extras)
    installed(root, COLAB, COLAB.extras)
    fail(root, "")
    done = make(root, "test")
    assert done.returncode != 0
    summary = [line for line in done.stdout.splitlines() if "FAILED" in line]
    assert [line.split(":")[0] for line in summary] == [
        "[local] notebook policy",
        "[local] badges",
        "[local] unit tests",
        "[local] notebooks (nbval), tests that measure",
        "[colab] unit tests",
        "[colab] notebooks (nbval), tests that measure",
        "[local] browser",
    ]
    (root / "calls.txt.fails").unlink()
    assert make(root, "test").returncode == 0


@POSIX
@pytest.mark.parametrize(("image", "other"), [(LOCAL, "[colab]"), (COLAB, "[local]")])
def test_image_picks_one(root, image, other):
    installed(root, image, image.extras)
    done = make(root, "test", IMAGE=image.name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"[{image.name}] unit tests: passed" in done.stdout
    assert other not in done.stdout


@POSIX
def test_an_unknown_image_gets_a_sentence(root):
    done = make(root, "test", IMAGE="kaggle")
    assert done.returncode != 0
    assert "IMAGE=kaggle is not a choice: it is local or colab." in done.stderr


@POSIX
def test_without_make_the_options_do_the_same(root):
    installed(root, COLAB, COLAB.extras)
    command = [sys.executable, "tools/bootstrap.py", "course", "--image", "colab", "--", "--html", "pages"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (root / "calls.txt").read_text().splitlines() == ["-m", "tools.course", "--html", "pages", "---"]


@POSIX
def test_check_shows_only_the_output_of_what_failed(root):
    installed(root, LOCAL, LOCAL.extras)
    done = make(root, "check")
    assert done.returncode == 0, done.stderr
    passed = [line for line in done.stdout.splitlines() if ": passed" in line]
    assert len(passed) == 7
    fail(root, "course_utils/x.py:1: E999 an error\n")
    done = make(root, "check")
    assert done.returncode != 0
    assert done.stdout.count("course_utils/x.py:1: E999 an error") == 7


def test_the_record_is_plain(root, calls):
    install.prepare([LOCAL], ("lab",), "", root)
    record = json.loads((root / ".venv/.course.json").read_text())
    assert record["finished"] is True
    assert set(record["inputs"]) == {"base", "lab"}
