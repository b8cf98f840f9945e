"""What the Makefile calls, and what Windows calls without make: `python tools/bootstrap.py lab`.

The steps: find out whether this Python will do, build the images that the command needs (tools/install.py), then run
the command in them. This file alone must still parse on Python 3.6: an old Python gets a sentence, not a traceback.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - this line is for the Pythons that the project does not support
    sys.exit(
        "This course needs Python 3.11 or newer; this is Python %d.%d (%s). " % (*sys.version_info[:2], sys.executable)  # noqa: UP031
        + "Install a newer one (https://www.python.org/downloads/), or name it: make PYTHON=python3.13 lab"
    )

import argparse
import os
import shlex
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools import images, install

FIRST_LESSON = "notebooks/01_enable_t4.ipynb"
CELL_TIMEOUT_S = 180
SOURCES = ("course_utils", "tools", "bench")


@dataclass(frozen=True)
class Step:
    """One thing to run in an image: `arguments` go to the image's Python."""

    image: images.Image
    title: str
    arguments: Sequence[str]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    options, passed_on = _parse(sys.argv[1:] if argv is None else argv)
    chosen = [images.IMAGES[name] for name in _image_names(options.command, options.image)]
    try:
        extras = images.LEARNERS_EXTRAS if options.command == "lab" else None
        install.prepare(chosen, extras, options.torch, images.ROOT)
        if options.command == "lab":
            return _open_lab(chosen[0], options.port, passed_on)
        return _run(options.command, chosen, passed_on)
    except install.SetupError as problem:
        print(problem, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped. Run the same command again to go on.", file=sys.stderr)
        return 130


def lab_arguments(port: str, passed_on: Sequence[str], root: Path = images.ROOT) -> list[str]:
    """What the image's Python is given to open JupyterLab at the first lesson."""
    # As the default address the lesson is also in the address that is printed; as an argument it would not be.
    arguments = ["-m", "jupyterlab", f"--ServerApp.root_dir={root}", f"--LabApp.default_url=/lab/tree/{FIRST_LESSON}"]
    arguments += [f"--port={port}"] if port else []
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        arguments.append("--allow-root")
    if not _has_display():
        arguments.append("--no-browser")
    return [*arguments, *passed_on]


def test_steps(chosen: Sequence[images.Image], passed_on: Sequence[str]) -> list[Step]:
    """Every test: in each image first those that share the cores, then what measures, alone; and the browser once."""
    steps = []
    for image in chosen:
        # Without nbval, whose import takes seconds in every process.
        shared = ["-m", "pytest", "-p", "no:nbval", "-n", "2", "--dist", "worksteal", "--durations=5"]
        chosen_tests = ["-m", "not browser and not alone", "tests"]
        steps.append(Step(image, "unit tests", [*shared, *chosen_tests, *passed_on]))
        alone = [*nbval_arguments("notebooks"), "-m", "alone", *_measuring_files(), *passed_on]
        steps.append(Step(image, "notebooks (nbval), tests that measure", alone))
    if chosen[0].name == "local":
        steps.append(Step(chosen[0], "browser", ["-m", "pytest", "-m", "browser", "tests/browser"]))
    return steps


def nbval_arguments(target: str) -> list[str]:
    """nbval on every notebook of a folder, with this image's kernel."""
    cell_timeout = f"--nbval-cell-timeout={CELL_TIMEOUT_S}"
    nbval = ["--nbval-lax", "--nbval-current-env", cell_timeout, "-p", "tools.nbval_plugin"]
    return ["-m", "pytest", *nbval, "-p", "no:cacheprovider", target]


def _measuring_files() -> list[str]:
    # Only these, since collecting all the others takes ten seconds.
    files = sorted((images.ROOT / "tests").glob("test_*.py"))
    return [f"tests/{file.name}" for file in files if "@pytest.mark.alone" in file.read_text(encoding="utf-8")]


def check_steps(image: images.Image) -> list[Step]:
    """Everything that can be said without running a lesson, the longest first."""
    python_files = [*SOURCES, "tests"]
    # Colab's Python is 3.13 and the oldest supported is 3.11: vermin finds what 3.11 lacks,
    # tests/test_imports.py what 3.13 has removed.
    vermin = [
        "-c",
        "from vermin import main; main()",
        "--target=3.11-",
        "--eval-annotations",
        "--violations",
        "--no-tips",
    ]
    return [
        Step(image, "mypy", ["-m", "mypy"]),
        Step(image, "ruff check", ["-m", "ruff", "check"]),
        # The lessons' sources are linted but not formatted: ruff takes away the `;` that keeps a cell's value unshown.
        Step(image, "ruff format", ["-m", "ruff", "format", "--check", "--diff", *python_files]),
        Step(image, "vermin", [*vermin, *SOURCES]),
        Step(image, "import contracts", ["-c", "from importlinter.cli import lint_imports_command as lint; lint()"]),
        *_policy(image),
    ]


def _policy(image: images.Image) -> list[Step]:
    return [
        Step(image, "notebook policy", ["-m", "tools.notebooks", "check"]),
        Step(image, "badges", ["-m", "tools.publish", "--check"]),
    ]


def _run(command: str, chosen: Sequence[images.Image], passed_on: Sequence[str]) -> int:
    image = chosen[0]
    if command == "setup":
        return 0
    if command == "check":
        return _run_together(check_steps(image))
    if command == "test":
        print()
        return _run_together(_policy(image)) | _run_in_turn(test_steps(chosen, passed_on))
    tool = {
        "sync": ["tools.notebooks", "update"],
        "badges": ["tools.publish"],
        "course": ["tools.course"],
        "bench": ["bench"],
    }[command]
    return _run_in_turn([Step(image, command, ["-m", *tool, *passed_on]) for image in chosen])


def _run_in_turn(steps: Sequence[Step]) -> int:
    """Run all steps, also after one has failed, and say at the end which did."""
    results = []
    for step in steps:
        print(f"\n[{step.image.name}] {step.title}", flush=True)
        started = time.monotonic()
        status = subprocess.run(_command(step), cwd=images.ROOT, env=_environment(step), check=False).returncode
        results.append((step, status, time.monotonic() - started))
    if len(results) > 1:
        print()
        for step, status, seconds in results:
            print(f"[{step.image.name}] {step.title}: {_outcome(status)}, {seconds:.0f} s")
    return int(any(status for _, status, _ in results))


def _run_together(steps: Sequence[Step]) -> int:
    """Run steps that do not disturb each other, two at a time; each one's output is shown only when it failed."""

    def run(step: Step) -> tuple[Step, int, str, float]:
        started = time.monotonic()
        done = subprocess.run(
            _command(step),
            cwd=images.ROOT,
            env=_environment(step),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
        return step, done.returncode, done.stdout, time.monotonic() - started

    failed = False
    with ThreadPoolExecutor(2) as pool:
        for step, status, output, seconds in pool.map(run, steps):
            print(f"[{step.image.name}] {step.title}: {_outcome(status)}, {seconds:.1f} s", flush=True)
            if status:
                failed = True
                print(output, flush=True)
    return int(failed)


def _open_lab(image: images.Image, port: str, passed_on: Sequence[str]) -> int:
    where = "in the browser" if _has_display() else "at the address that it prints below"
    install.say(image, f"JupyterLab opens lesson 01 {where}; Ctrl-C stops it.")
    step = Step(image, "lab", lab_arguments(port, passed_on))
    with subprocess.Popen(_command(step), cwd=images.ROOT, env=_environment(step)) as server:
        while True:
            try:
                return server.wait()
            except KeyboardInterrupt:
                # The terminal gave the server the same signal: it asks back or shuts down by itself.
                continue


def _command(step: Step) -> list[str]:
    return [str(step.image.python(images.ROOT)), *step.arguments]


def _environment(step: Step) -> dict[str, str]:
    # The tests ask which image they run in: some facts hold in Colab's alone. The other variable keeps a notice of
    # Python's debugger, which nobody uses here, out of the output.
    environment = {**os.environ, "COURSE_IMAGE": step.image.name, "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    # The images are installed uncompiled: whoever forbids bytecode would compile PyTorch at every start of a kernel.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    if "-n" in step.arguments:
        environment["OMP_NUM_THREADS"] = "1"  # processes that share the cores would only wait for each other's threads
    return environment


def _outcome(status: int) -> str:
    return "FAILED" if status else "passed"


def _has_display() -> bool:
    # Without one, Python's webbrowser would take over the terminal with a text browser.
    return sys.platform != "linux" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def _image_names(command: str, image: str) -> list[str]:
    if command in ("check", "sync", "badges", "bench"):
        return ["local"]  # the other image has no linters and no peers to measure, and the files come out the same
    if image:
        return [image]
    return ["local", "colab"] if command in ("test", "setup") else ["local"]


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options, and what is passed on to the tool: all after `--`, and the words of ARGS."""
    end = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(
        prog="python tools/bootstrap.py",
        description="Sets up the course's environment once, then runs a command in it.",
        epilog="What follows -- is passed on to the tool. The variables IMAGE, TORCH, PORT and ARGS mean the same.",
    )
    parser.add_argument("command", choices=["lab", "test", "course", "check", "sync", "bench", "badges", "setup"])
    parser.add_argument("--image", choices=["local", "colab"], default=os.environ.get("IMAGE", ""))
    parser.add_argument("--torch", metavar="cpu|cuda", default=os.environ.get("TORCH", ""))
    parser.add_argument("--port", default=os.environ.get("PORT", ""))
    options = parser.parse_args(argv[:end])
    if options.image not in ("", *images.IMAGES):
        parser.error(f"IMAGE={options.image} is not a choice: it is local or colab.")
    return options, [*shlex.split(os.environ.get("ARGS", "")), *argv[end + 1 :]]


if __name__ == "__main__":
    sys.exit(main())
