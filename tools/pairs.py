"""The pair of files that a lesson is: reading it, comparing it, and how both files should be.

Nothing here writes but `write`; what it writes was worked out before.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import jupytext
import nbformat
from nbformat import NotebookNode

from tools import percent
from tools.lessons import FOLDER, STEM, describe
from tools.notebook_policy import FIX, POLICY, Problem, canonical, clip, digest_of, faults, mended, place, text_of
from tools.percent import Generated
from tools.publication import Publication, read_publication
from tools.setup_cell import read_version

FORMAT = {"extension": ".py", "format_name": "percent"}
_BY_HAND = "correct it by hand, or restore it from git"


@dataclass
class Pair:
    """The two files of a lesson as found, and as they should be (None: not known, so not written).

    `py` and `ipynb` hold the text found: None when there is none, or when a fault keeps it from being read. `edited`
    says which text is newer than what was last generated: "", "py", "ipynb" or "both".
    """

    stem: str
    generated: Generated
    py: str | None = None
    ipynb: str | None = None
    py_fault: str = ""
    ipynb_fault: str = ""
    notebook: NotebookNode | None = None
    wanted_py: str | None = None
    wanted_ipynb: str | None = None
    edited: str = ""
    problems: list[Problem] = field(default_factory=list)

    @property
    def source(self) -> str:
        """Path of the .py, relative to the repository."""
        return f"{FOLDER}/{self.stem}.py"

    @property
    def target(self) -> str:
        """Path of the .ipynb, relative to the repository."""
        return self.generated.notebook

    def refusal(self) -> Problem:
        """Why one file may not simply be overwritten by the other."""
        cures = {_edit_cure(self)} if self.edited else {_BY_HAND, _ipynb_cure(self.stem)}
        return next(problem for problem in self.problems if problem.cure in cures)


def stems(root: Path) -> list[str]:
    """The lessons of which at least one file is there."""
    paths = [*(root / FOLDER).glob("*.py"), *(root / FOLDER).glob("*.ipynb")]
    return sorted({path.stem for path in paths if STEM.fullmatch(path.stem)})


def strays(root: Path) -> list[Problem]:
    """Notebooks whose name is no lesson's: nothing pairs, publishes or tests them."""
    paths = sorted((root / FOLDER).glob("*.ipynb"))
    what = "not named like a lesson"
    return [
        Problem(f"{FOLDER}/{path.name}", "", what, "rename it to NN_name.ipynb (small letters), or move it away")
        for path in paths
        if not STEM.fullmatch(path.stem)
    ]


def examine_all(root: Path, names: Sequence[str] = ()) -> list[Pair]:
    """Each lesson named (all, when none is); ValueError for a name that is no lesson."""
    publication, version, there = read_publication(root), read_version(root), stems(root)
    wanted = [Path(name).stem for name in names] or there
    if unknown := sorted(set(wanted) - set(there)):
        raise ValueError(
            f"{', '.join(unknown)}: no such lesson in {FOLDER}/ (there are: {', '.join(there) or 'none'})."
        )
    return [examine(root, stem, publication, version) for stem in wanted]


def examine(root: Path, stem: str, publication: Publication, version: str) -> Pair:
    """Read a lesson's two files and work out what is wrong with them and how they should be; writes nothing."""
    pair = Pair(stem, Generated(f"{FOLDER}/{stem}.ipynb", publication, version))
    pair.py, pair.py_fault = read_text(root / pair.source)
    if pair.py and not re.search("^# %%", pair.py, re.MULTILINE):
        pair.py, pair.py_fault = None, "not in percent format: it has no cell (`# %%`)"
    if pair.py_fault:
        pair.problems.append(Problem(pair.source, "", pair.py_fault, _BY_HAND))
    elif not pair.py:
        what = "missing" if pair.py is None else "empty"
        pair.problems.append(Problem(pair.source, "", what, f"`python -m tools.notebooks adopt {stem}` makes it"))
    else:
        pair.wanted_py = percent.regenerate(pair.py, pair.generated)
        pair.problems += [*_source_problems(pair), *_link_problems(root, pair)]
    pair.ipynb, pair.ipynb_fault = read_text(root / pair.target)
    if pair.ipynb:
        pair.notebook, pair.ipynb_fault = parse(pair.ipynb)
    if pair.notebook is not None:
        try:
            _compare(pair, pair.notebook)
        except ValueError as error:
            pair.notebook, pair.ipynb_fault, pair.wanted_ipynb = None, str(error), None
    if pair.ipynb_fault:
        pair.problems.append(Problem(pair.target, "", pair.ipynb_fault, _ipynb_cure(stem)))
    elif pair.notebook is None and pair.py:
        pair.problems.append(Problem(pair.target, "", "missing" if pair.ipynb is None else "empty"))
        pair.wanted_ipynb = from_py(pair)
    elif pair.notebook is None and pair.ipynb is not None:
        pair.problems.append(Problem(pair.target, "", "empty", _BY_HAND))
    return pair


def read_text(path: Path) -> tuple[str | None, str]:
    """The file's text with Unix line ends and what is wrong with it; (None, "") when there is no such file."""
    try:
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        return None, ""
    except IsADirectoryError:
        return None, "a folder, not a file"
    except UnicodeDecodeError as error:
        return None, f"not UTF-8 text (byte {error.start})"
    except OSError as error:
        return None, f"cannot be read ({error.strerror})"
    return text.replace("\r\n", "\n") if text.strip() else "", ""


def parse(text: str) -> tuple[NotebookNode | None, str]:
    """The notebook in `text`, or what is wrong with it. What this admits, the policy's functions can take apart."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        return None, f"not JSON ({clip(str(error))[:80]})"
    if not isinstance(data, dict) or not isinstance(data.get("cells"), list) or data.get("nbformat") != 4:
        return None, "JSON, but no notebook of format 4"
    data.setdefault("nbformat_minor", 0)
    if not isinstance(data.setdefault("metadata", {}), dict):
        return None, "a notebook whose metadata is no object"
    for number, cell in enumerate(data["cells"], 1):
        if fault := _cell_fault(cell):
            return None, f"a notebook whose cell {number} {fault}"
    try:
        json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return None, "a notebook with half a character (a lone surrogate)"
    return nbformat.v4.reads(json.dumps(data)), ""


def _cell_fault(cell: object) -> str:
    if not isinstance(cell, dict):
        return "is no object"
    if cell.get("cell_type") not in ("code", "markdown", "raw"):
        return "is neither code, Markdown nor raw"
    source = cell.get("source")
    if not isinstance(source, str) and not (isinstance(source, list) and all(isinstance(line, str) for line in source)):
        return "has no source"
    if not isinstance(cell.setdefault("metadata", {}), dict):
        return "has metadata that are no object"
    outputs = cell.get("outputs", [])
    if not isinstance(outputs, list) or not all(map(_is_output, outputs)):
        return "has outputs that are none"
    return ""


def _is_output(output: object) -> bool:
    if not isinstance(output, dict):
        return False
    kind, data = output.get("output_type"), output.get("data")
    if kind in ("display_data", "execute_result"):
        return isinstance(data, dict)
    return kind == "error" or (kind == "stream" and isinstance(output.get("text"), str | list))


@lru_cache(maxsize=64)
def read_cells(text: str) -> tuple[NotebookNode, ...]:
    """The cells of a percent-format source; nobody may change them, for they are shared."""
    header, _ = percent.split(text)
    return tuple(jupytext.reads(text[len(header) :], fmt=FORMAT).cells)


def _source_problems(pair: Pair) -> list[Problem]:
    assert pair.py and pair.wanted_py
    problems, file = [], pair.source
    header, blocks = percent.split(pair.py)
    _, wanted = percent.split(pair.wanted_py)
    if header != percent.HEADER:
        problems.append(Problem(file, "", "its header is not the course's (T4 preset, metadata filter)"))
    if blocks != wanted:
        number = next((n for n, (a, b) in enumerate(zip(blocks, wanted, strict=False), 1) if a != b), len(blocks))
        problems.append(Problem(file, f"cell {number}", "badges or setup cell are not the generated ones"))
    first = read_cells(pair.wanted_py)[0]
    title, found = f"# {pair.stem[:2]} · ", describe(pair.stem, pair.wanted_py)
    if first.cell_type != "markdown" or not first.source.startswith(title):
        cure = f"start it with a Markdown cell whose first line is `{title}Title`"
        problems.append(Problem(file, "cell 1", "no title", cure))
    elif not found.question:
        problems.append(
            Problem(file, "cell 1", "no question", "add the line `> The question that the lesson answers?`")
        )
    return problems


def _link_problems(root: Path, pair: Pair) -> list[Problem]:
    assert pair.wanted_py
    problems = []
    for number, cell in enumerate(read_cells(pair.wanted_py), 1):
        for path in percent.launched(cell.source, pair.generated.publication):
            if path is None:
                what, cure = (
                    "a launch link that names no notebook",
                    "complete it: it must end in notebooks/NN_name.ipynb",
                )
            elif not (root / path).with_suffix(".py").is_file():
                what, cure = f"a launch link to {path}, which is not there", "correct its path"
            else:
                continue
            problems.append(Problem(pair.source, f"cell {number}", what, cure))
    return problems


def _compare(pair: Pair, notebook: NotebookNode) -> None:
    """Fill in `edited`, `wanted_ipynb` and the .ipynb's problems of a lesson whose notebook could be read."""
    generated = pair.generated
    theirs = text_of(notebook.cells, generated)
    own = notebook.metadata.get(POLICY["own_metadata"])
    recorded = own.get("text") if isinstance(own, dict) else None
    if pair.wanted_py is not None:
        ours = text_of(read_cells(pair.wanted_py), generated)
        if ours != theirs:
            pair.edited = {digest_of(theirs): "py", digest_of(ours): "ipynb"}.get(recorded or "", "both")
            pair.problems.append(_difference(pair, notebook, ours, theirs))
    if pair.wanted_py is not None and pair.edited in ("", "py"):
        text = dump(_follow(pair, read_cells(pair.wanted_py)))
    else:
        # Its text stays, and so does its digest: it is still an edited notebook after the rest was mended.
        kept = recorded if isinstance(recorded, str) and re.fullmatch("[0-9a-f]{16}", recorded) else None
        text = dump(canonical(mended(notebook.cells, generated), notebook, pair.stem, kept))
    pair.wanted_ipynb, wanted = text, nbformat.v4.reads(text)
    found = list(faults(notebook, wanted, generated))
    if not found and not pair.edited and pair.ipynb != pair.wanted_ipynb:
        number, cell = next(
            ((n, a) for n, (a, b) in enumerate(zip(notebook.cells, wanted.cells, strict=False), 1) if a != b), (0, None)
        )
        where = place(number, cell) if cell is not None else ""
        found.append(Problem(pair.target, where, "not written the way the tools write it"))
    pair.problems += found


def _difference(
    pair: Pair, notebook: NotebookNode, ours: list[tuple[str, str]], theirs: list[tuple[str, str]]
) -> Problem:
    number = next(
        (n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
    )
    where = f"cell {len(notebook.cells)}"
    if number < len(theirs):
        where = next(
            place(n, cell)
            for n, cell in enumerate(notebook.cells, 1)
            if text_of(notebook.cells[:n], pair.generated)[number:]
        )
    what = {
        "py": "older than the .py, which was edited here",
        "ipynb": "edited: it differs from the .py here",
        "both": "differs from the .py here, and both may have been edited",
    }[pair.edited]
    return Problem(pair.target, where, what, _edit_cure(pair))


def _edit_cure(pair: Pair) -> str:
    command, stem = "python -m tools.notebooks", pair.stem
    return {
        "": FIX,
        "py": f"`{command} update {stem}` takes the .py's text",
        "ipynb": f"`{command} adopt {stem}` takes the edit into the .py, `{command} update --force {stem}` discards it",
        "both": f"merge by hand, then `{command} update --force {stem}` takes the .py (`adopt --force`: the .ipynb)",
    }[pair.edited]


def _ipynb_cure(stem: str) -> str:
    return f"restore it from git, or `python -m tools.notebooks update --force {stem}` makes it anew from the .py"


def _follow(pair: Pair, cells: Sequence[NotebookNode]) -> NotebookNode:
    return canonical(cells, pair.notebook, pair.stem, digest_of(text_of(cells, pair.generated)))


def from_py(pair: Pair) -> str | None:
    """The .ipynb's text as it follows from the .py; None when there is no .py to follow."""
    return dump(_follow(pair, read_cells(pair.wanted_py))) if pair.wanted_py is not None else None


# Writing


def dump(notebook: NotebookNode) -> str:
    """The .ipynb's text; ValueError when it would be no valid notebook."""
    try:
        nbformat.validate(notebook)
    except nbformat.ValidationError as error:
        raise ValueError(f"no valid notebook would result: {clip(str(error.message))}") from None
    return str(nbformat.writes(notebook)).rstrip("\n") + "\n"


def write(root: Path, pair: Pair) -> None:
    """Write both files of `pair` as they should be; a file that is so already is not touched."""
    for suffix, found, wanted in ((".py", pair.py, pair.wanted_py), (".ipynb", pair.ipynb, pair.wanted_ipynb)):
        if wanted is not None and wanted != found:
            replace_file(root / FOLDER / (pair.stem + suffix), wanted)


def replace_file(path: Path, text: str) -> None:
    """Write `text` whole or not at all: an interrupted run leaves the old file."""
    path = path.resolve()
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        temporary.chmod(path.stat().st_mode & 0o777 if path.exists() else 0o644)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
