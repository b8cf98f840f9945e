"""The lessons as a set, and proof that the nbval run of `make test` fails when it should.

The run itself is a step of `make test` of its own (tools/bootstrap.py): notebooks measure, so nothing runs beside them.
"""

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

from tools import bootstrap

ROOT = Path(__file__).resolve().parent.parent


def nbval(folder: Path) -> subprocess.CompletedProcess:
    """The command of `make test`, on another folder."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, *bootstrap.nbval_arguments(str(folder))],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def write(path: Path, *cells) -> None:
    notebook = new_notebook(cells=list(cells))
    notebook.metadata["kernelspec"] = {"name": "no-such-kernel", "display_name": "x", "language": "python"}
    nbformat.write(notebook, path)


def test_there_are_lessons_and_each_is_a_pair():
    notebooks = {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")}
    sources = {path.stem for path in (ROOT / "notebooks").glob("*.py")}
    assert notebooks, "no notebook at all: nothing would be tested"
    assert notebooks == sources


@pytest.mark.usefixtures("one_kernel")
def test_nbval_fails_on_what_is_wrong_and_on_nothing_else(tmp_path):
    """One notebook with all cases, because each run of pytest costs seconds; nbval goes on after a failed cell."""
    other = [new_output("stream", name="stdout", text="another\n")]
    warn = "import warnings; warnings.warn('old')"

    def tagged(source, tag, **more):
        return new_code_cell(source, metadata={"tags": [tag]}, **more)

    right = [
        new_code_cell(f"import sys; assert sys.executable == {sys.executable!r}"),
        new_code_cell("print('one')", outputs=other, execution_count=2),  # stored, but not compared
        tagged("1 / 0", "raises-exception"),
        tagged(warn, "explains-warning"),
        new_code_cell("from tqdm import tqdm\nfor _ in tqdm(range(3)): pass"),
    ]
    wrong = [
        new_code_cell("no_such_name"),
        tagged("print('one')", "nbval-check-output", outputs=other, execution_count=7),
        new_code_cell(warn),
    ]
    write(tmp_path / "01_all.ipynb", *right, *wrong)
    done = nbval(tmp_path)
    assert done.returncode == 1, done.stdout
    assert f"{len(wrong)} failed, {len(right)} passed" in done.stdout, done.stdout
    for number in range(len(right), len(right) + len(wrong)):
        assert f"Cell {number}" in done.stdout
    assert "The cell wrote to stderr" in done.stdout and "UserWarning: old" in done.stdout
