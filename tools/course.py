"""Runs every lesson from top to bottom, as a learner would, and prints what came of it in one table.

Each notebook runs with nbclient in a kernel of the running Python. An error in a cell that is not tagged
`raises-exception` ends that lesson; the others still run. What reaches stderr is counted as warnings, except for
progress bars and for cells tagged `explains-warning`. The exit status is 1 after a failed lesson or an unexplained
warning.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError

from course_utils.views import text_table

ROOT = Path(__file__).resolve().parent.parent
EXPLAINED_TAG = "explains-warning"
OUTCOMES = ("passed", "not yet", "not attempted", "error")

_KERNEL = "course-this-python"
_START = "the start of the kernel"
# A tqdm bar: "41%|####  | 41/100 [00:03<00:04, 13.2it/s]", or "41it [00:03, 13.2it/s]" when the length is unknown.
_PROGRESS = re.compile(r"\d+%\||\[(\d+:)?\d+:\d\d[<,]")
_WARNING = re.compile(r"\b\w*Warning: ")
_TERMINAL_CODE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_LONGEST_LINE = 160


@dataclass(frozen=True)
class Warned:
    """What one cell wrote to stderr: how many warnings, and the first of them."""

    cell: int
    count: int
    first_line: str


@dataclass(frozen=True)
class Result:
    """One lesson's run. `failure` is None when it reached its end."""

    lesson: str
    seconds: float
    failure: str | None
    exercises: dict[str, str]
    warnings: tuple[Warned, ...]

    @property
    def good(self) -> bool:
        """True when the lesson ran to its end without an unexplained warning."""
        return self.failure is None and not self.warnings


def main(argv: Sequence[str] | None = None) -> int:
    """Run the lessons; returns the exit status."""
    options = _parse(argv)
    notebooks = [path for path in sorted(options.folder.glob("*.ipynb")) if _wanted(path, options.lessons)]
    if not notebooks:
        print(f"There is no notebook to run in {options.folder}.", file=sys.stderr)
        return 1
    results = []
    for path in notebooks:
        print(f"Running {path.stem} ...", flush=True)
        result, notebook = run_lesson(path, options.timeout)
        results.append(result)
        if options.html:
            write_page(notebook, options.html / f"{path.stem}.html")
    print("\n" + table(results))
    for result in results:
        for line in complaints(result):
            print(line)
    if any(result.warnings for result in results):
        print(f"Mend each warning, or explain it in the lesson and tag its cell {EXPLAINED_TAG}.")
    return int(not all(result.good for result in results))


def run_lesson(path: Path, cell_timeout_s: int) -> tuple[Result, nbformat.NotebookNode]:
    """Execute one notebook; returns what came of it, and the notebook with its outputs. Nothing is saved.

    A kernel that dies before its first cell is started once more: another program may have taken one of its ports.
    """
    result, notebook = _run_once(path, cell_timeout_s)
    if result.failure and result.failure.startswith(_START):
        result, notebook = _run_once(path, cell_timeout_s)
    return result, notebook


def _run_once(path: Path, cell_timeout_s: int) -> tuple[Result, nbformat.NotebookNode]:
    notebook = nbformat.read(path, as_version=4)
    started = time.monotonic()
    failure = None
    last = _START

    def note(cell: nbformat.NotebookNode, cell_index: int) -> None:
        nonlocal last
        last = f"cell {cell_index + 1} ({_clip(cell.source.strip().splitlines()[0])})"

    with _own_kernel(), tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as kernel_log:
        client = NotebookClient(
            notebook,
            timeout=cell_timeout_s,
            kernel_name=_KERNEL,
            resources={"metadata": {"path": str(path.parent)}},
            on_cell_execute=note,
        )
        try:
            # The kernel's own log is no part of a page: it is shown only when the kernel dies.
            client.execute(stderr=kernel_log)
        except CellTimeoutError:
            failure = f"{last} took longer than {cell_timeout_s} s"
        except CellExecutionError as error:
            failure = f"{last} raised {error.ename}: {_clip(error.evalue)}"
        except RuntimeError as error:  # the kernel died, or never answered
            kernel_log.seek(0)
            failure = "\n    ".join([f"{last}: {_clip(str(error))}", *kernel_log.read().splitlines()[-3:]])
    seconds = time.monotonic() - started
    return Result(path.stem, seconds, failure, exercise_outcomes(notebook), warnings_of(notebook)), notebook


def exercise_outcomes(notebook: nbformat.NotebookNode) -> dict[str, str]:
    """Name to outcome, one of `OUTCOMES`: the last check of each exercise counts."""
    outcomes = {}
    for output in _outputs(notebook):
        mark = output.get("metadata", {}).get("course_exercise")
        if isinstance(mark, dict) and mark.get("status") in OUTCOMES:
            outcomes[str(mark.get("name"))] = str(mark["status"])
    return outcomes


def warnings_of(notebook: nbformat.NotebookNode) -> tuple[Warned, ...]:
    """The unexplained warnings, one entry for each cell that has any."""
    found = []
    for number, cell in enumerate(notebook.cells, start=1):
        if cell.cell_type != "code" or EXPLAINED_TAG in cell.metadata.get("tags", []):
            continue
        text = "".join(
            output.text for output in cell.outputs if output.output_type == "stream" and output.name == "stderr"
        )
        if lines := stderr_lines(text):
            named = [line for line in lines if _WARNING.search(line)]
            found.append(Warned(number, len(named) or 1, _clip((named or lines)[0])))
    return tuple(found)


def stderr_lines(text: str) -> list[str]:
    """The lines of a cell's stderr that are no progress bar; a bar redraws itself with carriage returns."""
    lines = (_TERMINAL_CODE.sub("", line).strip() for line in re.split(r"[\r\n]+", text))
    return [line for line in lines if line and not _PROGRESS.search(line)]


def table(results: Sequence[Result]) -> str:
    """Lesson, seconds, exercises by outcome, warnings."""
    rows = []
    for result in results:
        counts = Counter(result.exercises.values())
        exercises = ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts[outcome]) or "none"
        warned = sum(warning.count for warning in result.warnings)
        rows.append(
            [result.lesson, f"{result.seconds:.1f}", exercises, str(warned), "FAILED" if result.failure else "ran"]
        )
    return text_table(["lesson", "seconds", "exercises", "warnings", "result"], rows)


def complaints(result: Result) -> Iterator[str]:
    """One line for each thing that is wrong with a lesson."""
    if result.failure:
        yield f"{result.lesson}: {result.failure}"
    for warning in result.warnings:
        yield f"{result.lesson}: cell {warning.cell}, warnings on stderr: {warning.count}, first: {warning.first_line}"


def write_page(notebook: nbformat.NotebookNode, path: Path) -> None:
    """The executed notebook as one HTML file."""
    from nbconvert import HTMLExporter  # needed for --html alone, and slow to import

    for output in _outputs(notebook):
        if output.output_type == "stream":
            output.text = settled(output.text)
    body, _ = HTMLExporter().from_notebook_node(notebook)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(body, encoding="utf-8")


def settled(text: str) -> str:
    """What a terminal would show in the end: a progress bar that redraws its line with carriage returns, once."""
    return "\n".join(line.rstrip("\r").rsplit("\r", 1)[-1].rstrip() for line in text.split("\n"))


@contextmanager
def _own_kernel() -> Iterator[None]:
    """A kernelspec of the running Python: one named "python3" in the user's folders may be any other."""
    before = os.environ.get("JUPYTER_PATH")
    with tempfile.TemporaryDirectory(prefix="course-kernel-") as folder:
        spec = Path(folder) / "kernels" / _KERNEL / "kernel.json"
        spec.parent.mkdir(parents=True)
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        quiet = {"PYDEVD_DISABLE_FILE_VALIDATION": "1"}  # a notice of the debugger, which nobody uses here
        spec.write_text(json.dumps({"argv": argv, "display_name": "This Python", "language": "python", "env": quiet}))
        os.environ["JUPYTER_PATH"] = folder + (os.pathsep + before if before else "")
        try:
            yield
        finally:
            if before is None:
                del os.environ["JUPYTER_PATH"]
            else:
                os.environ["JUPYTER_PATH"] = before


def _outputs(notebook: nbformat.NotebookNode) -> Iterator[nbformat.NotebookNode]:
    for cell in notebook.cells:
        yield from cell.get("outputs", [])


def _clip(text: str) -> str:
    line = _TERMINAL_CODE.sub("", " ".join(text.split()))
    return line if len(line) <= _LONGEST_LINE else line[: _LONGEST_LINE - 1] + "…"


def _wanted(path: Path, lessons: Sequence[str]) -> bool:
    return not lessons or any(path.stem.startswith(lesson) for lesson in lessons)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.course", description="Runs the lessons from top to bottom.")
    parser.add_argument("lessons", nargs="*", help="the beginnings of their names, such as 01; all when none is given")
    parser.add_argument("--html", type=Path, metavar="DIR", help="also write the executed pages there")
    parser.add_argument("--timeout", type=int, default=180, metavar="S", help="seconds that one cell may take")
    parser.add_argument("--folder", type=Path, default=ROOT / "notebooks", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
