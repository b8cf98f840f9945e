"""What a lesson's .ipynb must look like: the policy, and pure functions that apply it to a notebook in memory.

`canonical` makes a notebook what it should be, `faults` says where one is not; neither reads or writes a file.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import nbformat
from jupytext.combine import map_outputs_to_inputs
from nbformat import NotebookNode

from tools import percent, setup_cell
from tools.percent import Generated
from tools.publication import Publication

POLICY: dict[str, Any] = {
    # Every notebook opens with a T4 on Colab and on Kaggle, and needs no dialog in JupyterLab.
    "metadata": {
        "accelerator": "GPU",
        "colab": {"gpuType": "T4", "provenance": [], "toc_visible": True},
        "kaggle": {"accelerator": "nvidiaTeslaT4", "isGpuEnabled": True, "isInternetEnabled": True},
        "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    },
    # `course` holds a digest of the text as last generated: it tells an edited notebook from an edited .py.
    "own_metadata": "course",
    "cell_metadata": ("cellView", "jupyter", "tags"),
    "stored_output_tag": "nbval-check-output",
    "longest_stored_output": 20_000,
    "nbformat": (4, 5),
}

FIX = "`python -m tools.notebooks check --fix` mends it"
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: the file, the cell ("" for the whole file), what, and the cure. `str` is one line."""

    file: str
    cell: str
    what: str
    cure: str = FIX

    def __str__(self) -> str:
        return ": ".join(clip(part) for part in (self.file, self.cell, f"{self.what}; {self.cure}") if part)


def clip(text: str) -> str:
    """`text` on one line and of bounded length: what comes from a file may hold anything."""
    text = "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)
    return text if len(text) <= 400 else f"{text[:399]}…"


def canonical(cells: Sequence[NotebookNode], found: NotebookNode | None, stem: str, digest: str | None) -> NotebookNode:
    """The notebook that has the text and metadata of `cells`, and the ids and permitted outputs of `found`.

    Cells are matched as `jupytext --update` matches them. A stored output stays only on a tagged cell whose source is
    unchanged. New ids follow from the cell's source, so that two people who update get the same file.
    """
    minor = POLICY["nbformat"][1]
    notebook: NotebookNode = NotebookNode(
        cells=[], metadata=nbformat.from_dict(POLICY["metadata"]), nbformat=4, nbformat_minor=minor
    )
    if digest:
        notebook.metadata[POLICY["own_metadata"]] = NotebookNode(text=digest)
    old_cells = found.cells if found else []
    matches = map_outputs_to_inputs(cells, old_cells) if old_cells else [None] * len(cells)
    taken: set[str] = set()
    for cell, match in zip(cells, matches, strict=True):
        old = None if match is None else old_cells[match]
        metadata = {key: cell.metadata[key] for key in POLICY["cell_metadata"] if key in cell.metadata}
        new = NotebookNode(cell_type=cell.cell_type, id="", metadata=NotebookNode(metadata), source=cell.source)
        new.id = _free_id(old.get("id") if old else None, stem, cell, taken)
        taken.add(new.id)
        if cell.cell_type == "code":
            keeps = old is not None and stores_output(cell) and old.source == cell.source
            new.outputs = [_clean_output(output) for output in old.get("outputs", [])] if old and keeps else []
            new.execution_count = old.get("execution_count") if old and keeps and new.outputs else None
        elif old and old.get("attachments"):
            new.attachments = old.attachments
        notebook.cells.append(new)
    return notebook


def text_of(cells: Sequence[NotebookNode], generated: Generated) -> list[tuple[str, str]]:
    """What people wrote in these cells, as (cell type, source): the generated parts are left out of it.

    Two lists are equal when the cells say the same, wherever the course is published and whatever Colab put on top.
    """
    neutral = Generated(generated.notebook, Publication(), "")
    rest = _without_top(cells)
    text = []
    for number, cell in enumerate(rest):
        if setup_cell.TAG in tags(cell):
            continue
        source = cell.source
        if cell.cell_type == "markdown":
            source = percent.mend_markdown(source, neutral, first=number == 0)
            if number and not source.strip():
                continue
        if number == 0:  # where in the first cell the row stands is no text either
            source = "\n".join(line for line in source.split("\n") if line.strip() and not percent.is_row(line))
        text.append((cell.cell_type, source))
    return text


def digest_of(text: Sequence[tuple[str, str]]) -> str:
    """A short digest of what `text_of` returns."""
    return hashlib.sha256(json.dumps(text).encode()).hexdigest()[:16]


def mended(cells: Sequence[NotebookNode], generated: Generated) -> list[NotebookNode]:
    """Copies of a notebook's own cells with the generated parts as they should be and the text left alone."""
    rest = _without_top(cells)
    result = []
    for number, cell in enumerate(rest):
        source = cell.source
        if cell.cell_type == "markdown":
            source = percent.mend_markdown(source, generated, first=number == 0)
            if number and not source.strip():
                continue
        elif setup_cell.TAG in tags(cell):
            source = generated.setup
        result.append(NotebookNode(cell, source=source))
    if not any(setup_cell.TAG in tags(cell) for cell in result):
        metadata = nbformat.from_dict(dict(setup_cell.METADATA))
        result.insert(1, NotebookNode(cell_type="code", metadata=metadata, source=generated.setup))
    return result


def _without_top(cells: Sequence[NotebookNode]) -> list[NotebookNode]:
    """The cells without those that say nothing above the first Markdown, such as the badge that Colab puts on top."""
    rest = list(cells)
    while [cell.cell_type for cell in rest[:2]] == ["markdown"] * 2 and not percent.holds_text(rest[0].source):
        del rest[0]
    return rest


def faults(found: NotebookNode, wanted: NotebookNode, generated: Generated) -> Iterator[Problem]:
    """Each way in which `found` breaks the policy; `wanted` is what `canonical` made of it."""
    file = generated.notebook
    yield from _notebook_faults(found, file)
    seen: set[str] = set()
    rows = 0
    by_id: dict[object, NotebookNode] = {cell.id: cell for cell in wanted.cells}
    for number, cell in enumerate(found.cells, 1):
        where = place(number, cell)
        twin = by_id.get(cell.get("id")) if cell.get("id") not in seen else None
        yield from (Problem(file, where, what, cure) for what, cure in _cell_faults(cell, seen))
        if cell.cell_type == "markdown":
            for line in filter(percent.is_row, cell.source.split("\n")):
                opens = set(percent.launched(line))
                rows += number == 1 or opens == {file}
                if rows > 1 and (number == 1 or opens == {file}):
                    yield Problem(file, where, "a second badge row; one, in the first cell, is enough")
                elif number == 1 and opens != {file}:
                    yield Problem(file, where, f"a badge that opens {_names(opens)}, not this file")
                elif number == 1 and line != generated.publication.badge_row(file):
                    what = f"leads elsewhere than {generated.publication.repository} at {generated.publication.ref}"
                    yield Problem(file, where, f"a badge row that {what}")
        if setup_cell.TAG in tags(cell) and cell.source != generated.setup:
            yield Problem(file, where, "a setup cell that is not the generated one")
        if (
            twin is not None
            and {k: v for k, v in cell.metadata.items() if k in POLICY["cell_metadata"]} != twin.metadata
        ):
            yield Problem(file, where, "tags or form settings that differ from the .py's")
    if not rows:
        yield Problem(file, "cell 1", "no badge row")
    if not any(setup_cell.TAG in tags(cell) for cell in found.cells):
        yield Problem(file, "", "no setup cell")


def _notebook_faults(found: NotebookNode, file: str) -> Iterator[Problem]:
    if (found.nbformat, found.nbformat_minor) != POLICY["nbformat"]:
        yield Problem(file, "", f"nbformat {found.nbformat}.{found.nbformat_minor}, not 4.5, which has cell ids")
    for key, value in POLICY["metadata"].items():
        has = found.metadata.get(key)
        if has == value:
            continue
        preset = {"accelerator": " (the T4 preset)", "colab": " (the T4 preset)", "kaggle": " (Kaggle's T4)"}.get(
            key, ""
        )
        if isinstance(has, Mapping) and isinstance(value, Mapping) and (extra := sorted(set(has) - set(value))):
            yield Problem(file, "", f"metadata.{key} holds {', '.join(extra)}, which saving left there")
        if not isinstance(has, Mapping) or any(has.get(part) != wanted for part, wanted in value.items()):
            state = "is missing" if has is None else "is not what it should be"
            yield Problem(file, "", f"metadata.{key}{preset} {state}")
    for key in sorted(set(found.metadata) - set(POLICY["metadata"]) - {POLICY["own_metadata"]}):
        why = ", which breaks GitHub's viewer" if key == "widgets" else ", which is no part of a lesson"
        yield Problem(file, "", f"metadata.{key} is stored{why}")


def _cell_faults(cell: NotebookNode, seen: set[str]) -> Iterator[tuple[str, str]]:
    name = cell.get("id")
    if not isinstance(name, str) or not _ID.fullmatch(name):
        yield "no valid cell id", FIX
    elif name in seen:
        yield "the id of an earlier cell", FIX
    else:
        seen.add(name)
    if extra := sorted(set(cell.metadata) - set(POLICY["cell_metadata"])):
        yield f"metadata {', '.join(extra)}, which saving left there", FIX
    if cell.cell_type != "code":
        return
    outputs = cell.get("outputs", [])
    if not stores_output(cell):
        tag = POLICY["stored_output_tag"]
        if outputs:
            yield f"a stored output, but no tag {tag}", FIX
        elif cell.get("execution_count") is not None:
            yield f"an execution count, but no tag {tag}", FIX
        return
    rerun = "`python -m tools.notebooks outputs` runs the lesson and stores it"
    if not outputs:
        yield "tagged for a stored output, but has none", rerun
    elif not isinstance(cell.get("execution_count"), int):
        yield "a stored output without its execution count", rerun
    elif any(output != _clean_output(output) for output in outputs):
        yield "a stored output with transient parts", FIX
    if (size := len(json.dumps(outputs))) > POLICY["longest_stored_output"]:
        yield f"a stored output of {size:,} characters", "print less: 20,000 are the most that a diff can show"


def place(number: int, cell: NotebookNode) -> str:
    """Where a cell is, for people: its number, counted from 1, and its id."""
    name = cell.get("id")
    return f"cell {number} ({clip(name)[:64] if isinstance(name, str) and name else 'no id'})"


def tags(cell: NotebookNode) -> list[str]:
    """A cell's tags; an empty list when there are none, or when they are no list."""
    found = cell.metadata.get("tags", [])
    return [tag for tag in found if isinstance(tag, str)] if isinstance(found, list) else []


def stores_output(cell: NotebookNode) -> bool:
    """Whether the cell's output is stored and compared: it is the same on every device."""
    return cell.cell_type == "code" and POLICY["stored_output_tag"] in tags(cell)


def _free_id(old: object, stem: str, cell: NotebookNode, taken: set[str]) -> str:
    if isinstance(old, str) and _ID.fullmatch(old) and old not in taken:
        return old
    count = 0
    while True:
        text = f"{stem}\n{cell.cell_type}\n{cell.source}\n{count}"
        name = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
        if name not in taken:
            return name
        count += 1


def _clean_output(output: NotebookNode) -> NotebookNode:
    kept = {key: value for key, value in output.items() if key != "transient"}
    if "metadata" in kept:
        kept["metadata"] = NotebookNode()
    return NotebookNode(kept)


def _names(paths: set[str | None]) -> str:
    return ", ".join(sorted(path or "something else" for path in paths))
