"""The percent-format source of a lesson, as text: its header, its cells, and the parts of it that are generated.

Generated are the header, the badge row in the first cell, launch links to other lessons, and the setup cell. Every
function here is pure, and leaves each character alone that is not generated.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from tools import setup_cell
from tools.lessons import FOLDER
from tools.publication import Badge, Publication

# jupytext would add its own version to this header, and the two images differ in that.
HEADER = """\
# ---
# jupyter:
#   accelerator: GPU
#   colab:
#     gpuType: T4
#     provenance: []
#     toc_visible: true
#   jupytext:
#     cell_metadata_filter: tags,cellView,jupyter,-all
#     notebook_metadata_filter: kernelspec,accelerator,colab,kaggle,-all
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kaggle:
#     accelerator: nvidiaTeslaT4
#     isGpuEnabled: true
#     isInternetEnabled: true
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

"""

_HEADER = re.compile(r"(?:# ---\n(?:#.*\n)*?# ---\n)?\n*")
_MARKER = re.compile(r"^# %%(?=[ \n])", re.MULTILINE)
_SETUP = re.compile(rf'# %%[^\n]*\btags=\[[^\]\n]*"{setup_cell.TAG}"')
_BADGE = r'(?:\[!\[[^\]\n]*\]\([^)\n]*\)\]\([^)\n]*\)|<a href="[^"\n]*"[^>\n]*>[ \t]*<img [^>\n]*>[ \t]*</a>)'
_ROW = re.compile(rf"[ \t]*{_BADGE}(?:[ \t]*{_BADGE})*[ \t]*")
_URL = re.compile(r"https?://[^\s()<>\"']+")
_OWN_PATH = re.compile(rf"({FOLDER}/\d\d_\w+\.ipynb)$")
_LAUNCHERS: dict[str, Callable[[Publication, str], Badge]] = {
    "colab.research.google.com/github/": Publication.colab,
    "kaggle.com/kernels/welcome": Publication.kaggle,
    "mybinder.org/v2/": Publication.binder,
    "nbviewer.org/github/": Publication.nbviewer,
}


@dataclass(frozen=True)
class Generated:
    """What the generated parts of one lesson follow from: its notebook's path, where it is published, the version."""

    notebook: str
    publication: Publication
    version: str

    @property
    def setup(self) -> str:
        """The setup cell's source."""
        return setup_cell.source(self.publication, self.version, setup_cell.extras_of(self.notebook))


def split(text: str) -> tuple[str, list[str]]:
    """The header, and one block for each cell: its marker line and all that follows up to the next marker."""
    header = _HEADER.match(text)
    body = text[header.end() if header else 0 :]
    starts = [match.start() for match in _MARKER.finditer(body)]
    edges = sorted({0, *starts, len(body)})
    return text[: len(text) - len(body)], [body[a:b] for a, b in pairwise(edges)]


def regenerate(text: str, generated: Generated) -> str:
    """`text` with its generated parts as they should be; all else as it is."""
    _, blocks = split(text)
    while len(blocks) > 1 and _is_markdown(blocks[0]) and not holds_text(_markdown(blocks[0])):
        del blocks[0]
    blocks = [
        _with_markdown(block, mend_markdown(_markdown(block), generated, first=number == 0))
        if _is_markdown(block)
        else block
        for number, block in enumerate(blocks)
    ]
    blocks = [block for number, block in enumerate(blocks) if number == 0 or not _is_emptied(block)]
    wanted = f"# %% {setup_cell.OPTIONS}\n{generated.setup}\n"
    place = next((number for number, block in enumerate(blocks) if _SETUP.match(block)), None)
    if place is None:
        blocks[:1] = [blocks[0].rstrip("\n") + "\n\n" if blocks else "", wanted + "\n"]
    elif blocks[place].rstrip("\n") != wanted.rstrip("\n"):
        blocks[place] = wanted + ("\n" if place < len(blocks) - 1 else "")
    return HEADER + "".join(blocks)


def mend_markdown(source: str, generated: Generated, *, first: bool) -> str:
    """A Markdown cell's source with its badges as they should be.

    The first cell has exactly one row, under the title unless it stands elsewhere, with the file's own path; no other
    cell has a row for the file itself; links that launch another lesson lead to where the course is published.
    """
    row = generated.publication.badge_row(generated.notebook)
    lines: list[str] = []
    placed = False
    for line in source.split("\n"):
        if is_row(line) and (first or set(launched(line)) == {generated.notebook}):
            if first and not placed:
                lines.append(row)
                placed = True
            elif lines and not lines[-1]:
                lines.pop()
        else:
            lines.append(_URL.sub(lambda match: _repointed(match[0], generated.publication), line))
    if first and not placed:
        title = next((number for number, line in enumerate(lines) if line.startswith("# ")), -1)
        lines[title + 1 : title + 1] = ["", row]
    return "\n".join(lines)


def is_row(line: str) -> bool:
    """Whether `line` consists of badges, at least one of which launches a notebook."""
    return bool(_ROW.fullmatch(line)) and any(launcher in line for launcher in _LAUNCHERS)


def holds_text(source: str) -> bool:
    """Whether a Markdown cell holds more than badge rows; the cell that Colab puts on top when it saves does not."""
    return any(line.strip() and not is_row(line) for line in source.split("\n"))


def launched(text: str, publication: Publication | None = None) -> list[str | None]:
    """The notebook that each launch link in `text` opens; None for one that opens no lesson of a course like this.

    With `publication`, only links into its repository count.
    """
    urls = [url for url in _URL.findall(text) if any(launcher in url for launcher in _LAUNCHERS)]
    if publication:
        urls = [url for url in urls if f"/{publication.repository}/" in url]
    return [match[1] if (match := _OWN_PATH.search(url)) else None for url in urls]


def _repointed(url: str, publication: Publication) -> str:
    path = _OWN_PATH.search(url)
    launcher = next((launcher for launcher in _LAUNCHERS if launcher in url), None)
    return _LAUNCHERS[launcher](publication, path[1]).url if path and launcher else url


def _is_markdown(block: str) -> bool:
    return block.startswith("# %% [markdown]")


def _markdown(block: str) -> str:
    body = block.rstrip("\n").split("\n")[1:]
    return "\n".join("" if line == "#" else line.removeprefix("# ") for line in body)


def _with_markdown(block: str, source: str) -> str:
    if source == _markdown(block):
        return block
    commented = all(line.startswith("#") for line in block.rstrip("\n").split("\n"))
    marker = block.split("\n", 1)[0]
    lines = [(f"# {line}" if line else "#") if commented else line for line in source.split("\n")] if source else []
    trailing = block[len(block.rstrip("\n")) :]
    return "\n".join([marker, *lines]) + trailing


def _is_emptied(block: str) -> bool:
    return _is_markdown(block) and not _markdown(block).strip()
