"""The lessons there are: one per pair notebooks/NN_name.py and notebooks/NN_name.ipynb.

A lesson's first cell is Markdown. It opens with `# 01 · Enable the T4`, and its first line that starts with `> ` is the
question that the lesson answers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

FOLDER = "notebooks"
STEM = re.compile(r"(\d\d)_[a-z0-9_]+")

_HEADING = re.compile(r"# (?:\d+\s*[·.:–-]\s*)?(\S.*)")
_CELL = re.compile(r"# %%(?: |$)")


@dataclass(frozen=True)
class Lesson:
    """One lesson: `number` is two digits, `title` its first heading, `question` what it answers ("" if not stated)."""

    number: str
    stem: str
    title: str
    question: str

    @property
    def notebook(self) -> str:
        """Path of the .ipynb, relative to the repository, with forward slashes."""
        return f"{FOLDER}/{self.stem}.ipynb"


def find_lessons(root: Path) -> list[Lesson]:
    """Every notebooks/NN_name.py under `root` that can be read, in order of its number."""
    return [
        describe(path.stem, text)
        for path in sorted((root / FOLDER).glob("[0-9][0-9]_*.py"))
        if STEM.fullmatch(path.stem) and (text := _read(path)) is not None
    ]


def describe(stem: str, text: str) -> Lesson:
    """The lesson that `text`, the percent-format source of `stem`.py, describes in its first cell."""
    cell = first_cell(text)
    title = next((match[1].strip() for line in cell if (match := _HEADING.fullmatch(line))), "")
    question = next((line[2:].strip() for line in cell if line.startswith("> ")), "")
    return Lesson(stem[:2], stem, title or stem[3:].replace("_", " "), question)


def first_cell(text: str) -> list[str]:
    """The lines of the first cell of a percent-format source, without their leading comment signs."""
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        if _CELL.match(line):
            if inside:
                break
            inside = True
        elif inside:
            lines.append(line.removeprefix("# ") if line != "#" else "")
    return lines


def _read(path: Path) -> str | None:
    # An unreadable source is reported by tools.notebooks; here it is only no lesson.
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
