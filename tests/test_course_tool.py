"""tools/course.py on small notebooks made here: one for each thing that can happen to a lesson."""

import os
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from tools import course

WARN = "import warnings; warnings.warn('{}')"
BAR = "import sys, tqdm\nfor _ in tqdm.tqdm(range(3), file=sys.stderr): pass"


def cell(source: str, *tags: str):
    return new_code_cell(source, metadata={"tags": list(tags)} if tags else {})


def lesson(folder: Path, name: str, *cells) -> Path:
    notebook = new_notebook(cells=list(cells))
    # A kernel that does not exist: the lesson must run in this Python whatever its metadata says.
    notebook.metadata["kernelspec"] = {"name": "no-such-kernel", "display_name": "x", "language": "python"}
    path = folder / f"{name}.ipynb"
    nbformat.write(notebook, path)
    return path


def check(name: str, status: str) -> str:
    mark = {"course_exercise": {"name": name, "status": status}}
    return f"from IPython.display import display\ndisplay({name!r}, metadata={mark!r})"


def outputs(notebook, index: int) -> str:
    return "".join(output.get("text", "") for output in notebook.cells[index].outputs)


@pytest.mark.usefixtures("one_kernel")
def test_a_good_lesson(tmp_path):
    path = lesson(
        tmp_path,
        "01_good",
        new_markdown_cell("# A lesson"),
        cell("import os, sys; print(sys.executable, os.getcwd())"),
        cell(BAR),
        cell("1 / 0", "raises-exception"),
        cell(WARN.format("told of in the text"), "explains-warning"),
        cell(check("dtype", "not yet")),
        cell(check("dtype", "passed") + "\n" + check("clock", "not attempted")),
    )
    before = path.read_bytes()
    result, notebook = course.run_lesson(path, 60)
    assert result.failure is None
    assert result.warnings == ()
    assert result.good
    assert result.exercises == {"dtype": "passed", "clock": "not attempted"}
    assert outputs(notebook, 1).split() == [sys.executable, str(tmp_path)]
    assert "3/3" in outputs(notebook, 2), "the progress bar did reach stderr"
    assert path.read_bytes() == before
    assert "1 passed, 1 not attempted" in course.table([result])
    assert "JUPYTER_PATH" not in os.environ or "course-kernel-" not in os.environ["JUPYTER_PATH"]


@pytest.mark.usefixtures("one_kernel")
def test_warnings_are_counted_and_told(tmp_path, monkeypatch):
    # With this variable ipykernel believes that it is under test, and does not watch the process's own stderr.
    monkeypatch.delenv("PYTEST_CURRENT_TEST", raising=False)
    path = lesson(
        tmp_path,
        "02_warns",
        cell(WARN.format("first") + "; warnings.warn('second', FutureWarning)"),
        cell(BAR + "\nprint('a plain line', file=sys.stderr)"),
        cell("import os; os.write(2, b'from a library in C\\n');"),
    )
    result, _ = course.run_lesson(path, 60)
    assert [(warned.cell, warned.count) for warned in result.warnings] == [(1, 2), (2, 1), (3, 1)]
    assert "UserWarning: first" in result.warnings[0].first_line
    assert result.warnings[1].first_line == "a plain line"
    assert result.warnings[2].first_line == "from a library in C"
    assert not result.good


@pytest.mark.usefixtures("one_kernel")
def test_one_broken_lesson_does_not_stop_the_others(tmp_path, capsys):
    lesson(tmp_path, "01_broken", cell("answer = 42"), cell("answer + nothing"), cell("print('never')"))
    lesson(tmp_path, "02_slow", cell("import time; time.sleep(60)"))
    lesson(tmp_path, "03_dies", cell("import os; os._exit(1)"))
    lesson(tmp_path, "04_good", cell("print('fine')"))
    status = course.main(["--folder", str(tmp_path), "--timeout", "2", "--html", str(tmp_path / "pages")])
    told = capsys.readouterr().out
    assert status == 1
    assert "01_broken: cell 2 (answer + nothing) raised NameError: name 'nothing' is not defined" in told
    assert "02_slow: cell 1 (import time; time.sleep(60)) took longer than 2 s" in told
    assert "03_dies: cell 1 (import os; os._exit(1)): " in told
    rows = [line.split() for line in told.splitlines() if line[:3] in ("01_", "02_", "03_", "04_")][:4]
    assert [row[-1] for row in rows] == ["FAILED", "FAILED", "FAILED", "ran"]
    assert "NameError" in (tmp_path / "pages/01_broken.html").read_text(encoding="utf-8")
    assert "fine" in (tmp_path / "pages/04_good.html").read_text(encoding="utf-8")


@pytest.mark.usefixtures("one_kernel")
def test_a_good_course_exits_with_0_and_names_choose_lessons(tmp_path, capsys):
    lesson(tmp_path, "01_good", cell("print(1)"))
    lesson(tmp_path, "02_broken", cell("1 / 0"))
    assert course.main(["--folder", str(tmp_path), "01"]) == 0
    assert "02_broken" not in capsys.readouterr().out


def test_no_notebook_is_a_failure(tmp_path, capsys):
    assert course.main(["--folder", str(tmp_path)]) == 1
    assert "There is no notebook to run" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        "\r  0%|          | 0/100 [00:00<?, ?it/s]\r 41%|####1     | 41/100 [00:03<00:04, 13.2it/s]\n",
        "Photos: 100%|██████████| 24/24 [00:01<00:00, 18.1photos/s]",
        "41it [00:03, 13.2it/s]",
        "7 batches [1:02:03, 1.20s/ batches]",
        "\x1b[A\r 50%|█████     | 1/2 [00:00<00:00]\x1b[A\n\n",
    ],
)
def test_a_progress_bar_is_no_warning(text):
    assert course.stderr_lines(text) == []


@pytest.mark.parametrize(
    "text", ["accuracy fell by 50% | see above", "UserWarning: 3 workers [2 is the limit]", "step 5 [00:01] done"]
)
def test_other_lines_are(text):
    assert course.stderr_lines(f" 10%|#    | 1/10 [00:00<00:01, 9.0it/s]\r{text}\n") == [text]


@pytest.mark.parametrize("mark", ["text", None, {"name": "x", "status": "invented"}, {"name": "x"}, []])
def test_a_mark_that_is_none_is_passed_over(mark):
    output = nbformat.from_dict({"output_type": "display_data", "data": {}, "metadata": {"course_exercise": mark}})
    notebook = new_notebook(cells=[new_code_cell("1")])
    notebook.cells[0].outputs = [output]
    assert course.exercise_outcomes(notebook) == {}


def test_a_page_shows_a_progress_bar_once():
    assert course.settled("\r  0%\r 50%\r100%\nnext\n") == "100%\nnext\n"
    assert course.settled("\r 50%\r     \r") == ""
    assert course.settled("plain\ntext") == "plain\ntext"


def test_a_kernel_that_dies_at_its_start_is_started_once_more(tmp_path, monkeypatch):
    attempts = []

    def dies_at_first(path, timeout):
        attempts.append(path)
        failure = "the start of the kernel: Kernel died" if len(attempts) == 1 else None
        return course.Result(path.stem, 1.0, failure, {}, ()), new_notebook()

    monkeypatch.setattr(course, "_run_once", dies_at_first)
    result, _ = course.run_lesson(tmp_path / "01_any.ipynb", 5)
    assert result.failure is None
    assert len(attempts) == 2
