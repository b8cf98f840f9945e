"""Keep each lesson's .py and .ipynb one lesson.

    python -m tools.notebooks update [NAME …]    .py → .ipynb; cell ids and stored outputs stay
    python -m tools.notebooks check [--fix]      the policy, one line a problem; --fix mends what it can
    python -m tools.notebooks adopt [NAME …]     .ipynb → .py, after an edit in Jupyter or Colab
    python -m tools.notebooks outputs [NAME …]   run, and store the outputs of the cells tagged nbval-check-output

The .py is the source. Nothing here overwrites text that exists only in one of the two files, unless --force says so:
the notebook remembers a digest of its text as last generated, so that an edited .ipynb can be told from an edited .py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jupytext
import nbformat

from tools import percent
from tools.lessons import FOLDER
from tools.notebook_policy import Problem, canonical, digest_of, mended, stores_output, text_of
from tools.pairs import FORMAT, dump, examine_all, from_py, read_cells, stems, strays, write

ROOT = Path(__file__).resolve().parents[1]


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """The command line; returns 0 when all is right, 1 when there are problems."""
    parser = argparse.ArgumentParser(prog="python -m tools.notebooks", description="Keep .py and .ipynb one lesson.")
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="report each breach of the policy in one line")
    check.add_argument("--fix", action="store_true", help="mend what can be mended without losing text")
    for name, text in [("update", ".py → .ipynb"), ("adopt", ".ipynb → .py"), ("outputs", "run and store outputs")]:
        command = commands.add_parser(name, help=text)
        command.add_argument("names", nargs="*", metavar="NAME", help="a lesson such as 01_enable_t4 (default: all)")
        if name != "outputs":
            command.add_argument("--force", action="store_true", help="overwrite the other file's edits")
    options = parser.parse_args(arguments)
    try:
        if options.command == "check":
            problems = fix(root) if options.fix else check_all(root)
        elif options.command == "outputs":
            problems = store_outputs(root, options.names)
        else:
            problems = {"update": update, "adopt": adopt}[options.command](root, options.names, force=options.force)
    except (ValueError, OSError) as error:
        problems = [Problem("tools.notebooks", "", str(error), "correct that first")]
    for problem in problems:
        print(problem, file=sys.stderr)
    if not problems:
        said = "keep the policy" if options.command == "check" else "are up to date"
        print(f"{len(stems(root))} lessons in {FOLDER}/ {said}.")
    return 1 if problems else 0


def check_all(root: Path) -> list[Problem]:
    """Every breach of the policy under `root`/notebooks; reads only."""
    return [problem for pair in examine_all(root) for problem in pair.problems] + strays(root)


def fix(root: Path) -> list[Problem]:
    """Mend all that can be mended without losing text, and return what remains."""
    for pair in examine_all(root):
        write(root, pair)
    return check_all(root)


def update(root: Path, names: Sequence[str] = (), *, force: bool = False) -> list[Problem]:
    """Generate the .ipynb from the .py. Refuses (unless `force`) where the .ipynb was edited."""
    problems = []
    for pair in examine_all(root, names):
        if not pair.py:
            problems += [problem for problem in pair.problems if problem.file == pair.source]
        elif (pair.edited in ("ipynb", "both") or pair.ipynb_fault) and not force:
            problems.append(pair.refusal())
        else:
            write(root, replace(pair, wanted_ipynb=from_py(pair)))
    return problems


def adopt(root: Path, names: Sequence[str] = (), *, force: bool = False) -> list[Problem]:
    """Take the .ipynb's text into the .py. Refuses (unless `force`) where the .py was edited as well."""
    problems = []
    for pair in examine_all(root, names):
        if pair.notebook is None:
            problems += [problem for problem in pair.problems if problem.file == pair.target]
            continue
        if (pair.edited in ("py", "both") or pair.py_fault) and not force:
            problems.append(pair.refusal())
            continue
        if pair.edited or not pair.py:
            cells = mended(pair.notebook.cells, pair.generated)
            plain = canonical(cells, pair.notebook, pair.stem, None)
            text = percent.regenerate(jupytext.writes(plain, fmt=FORMAT), pair.generated)
            if text_of(read_cells(text), pair.generated) != text_of(plain.cells, pair.generated):
                what = "holds text that a percent-format .py cannot hold (such as a line that starts with `# %%`)"
                problems.append(Problem(pair.target, "", what, "change that cell, then adopt again"))
                continue
            pair.wanted_py = text
        write(root, replace(pair, wanted_ipynb=from_py(pair)))
    return problems


def store_outputs(root: Path, names: Sequence[str] = ()) -> list[Problem]:
    """Run each lesson that has cells tagged for it, and store those cells' outputs with their execution counts."""
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    problems = update(root, names)
    for pair in examine_all(root, names):
        # What update refused stays as it is, and is reported already.
        if pair.edited or pair.notebook is None or not any(map(stores_output, pair.notebook.cells)):
            continue
        run = nbformat.from_dict(pair.notebook)
        try:
            NotebookClient(run, timeout=600, resources={"metadata": {"path": str(root / FOLDER)}}).execute()
        except CellExecutionError as error:
            what = f"running it failed: {error.ename}: {error.evalue}"
            problems.append(Problem(pair.target, "", what, "mend the cell and run this again"))
            continue
        wanted = canonical(run.cells, run, pair.stem, digest_of(text_of(run.cells, pair.generated)))
        write(root, replace(pair, wanted_ipynb=dump(wanted)))
    return problems or check_all(root)


if __name__ == "__main__":
    sys.exit(main())
