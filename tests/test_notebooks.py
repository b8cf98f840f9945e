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


def test_nbval_uses_this_python_and_compares_only_tagged_outputs(tmp_path):
    stored = [new_output("stream", name="stdout", text="another\n")]
    write(
        tmp_path / "01_good.ipynb",
        new_code_cell(f"import sys; assert sys.executable == {sys.executable!r}"),
        new_code_cell("print('one')", outputs=stored, execution_count=2),
        new_code_cell("1 / 0", metadata={"tags": ["raises-exception"]}),
    )
    done = nbval(tmp_path)
    assert done.returncode == 0, done.stdout
    assert "3 passed" in done.stdout


@pytest.mark.parametrize("tags", [[], ["nbval-check-output"]])
def test_nbval_fails_on_a_wrong_cell(tmp_path, tags):
    stored = [new_output("stream", name="stdout", text="another\n")]
    source = "print('one')" if tags else "nothing"
    wrong = new_code_cell(source, metadata={"tags": tags}, outputs=stored, execution_count=1)
    write(tmp_path / "01_wrong.ipynb", wrong)
    done = nbval(tmp_path)
    assert done.returncode == 1, done.stdout
    assert "1 failed" in done.stdout


def test_nbval_fails_where_there_is_no_notebook(tmp_path):
    done = nbval(tmp_path)
    assert done.returncode == 5, done.stdout
    assert "no tests ran" in done.stdout
