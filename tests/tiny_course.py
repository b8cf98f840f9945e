"""A tiny course in a folder, for the tests of the authoring tools."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path

from tools import notebooks

FIRST = "01_first"
SECOND = "02_second"

PYPROJECT = """\
# A comment that stays.
[project]
name = "course-utils"

[tool.course]  # where it is published
repository = "octo/course"   # the repository
ref = "main"

[tool.other]
repository = "not/this"
ref = 'nor this'
"""

LESSON = """\
# %% [markdown]
# # {number} · {title}
#
# > {question}

# %% tags=["setup"]

# %% [markdown]
# Two lines of prose,
# one with a [link](https://example.org).

# %% tags=["nbval-check-output"]
print("same everywhere")

# %%
# !nvidia-smi
x = 1  # a comment
"""


def make_course(root: Path) -> Path:
    """A course of two lessons with all generated parts in place, published as octo/course at main."""
    shutil.copytree(_template(), root)
    return root


@cache
def _template() -> Path:
    root = Path(tempfile.mkdtemp(prefix="course-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    (root / "notebooks").mkdir()
    (root / "course_utils").mkdir()
    (root / "course_utils/__init__.py").write_text('__version__ = "0.1.0"\n')
    (root / "pyproject.toml").write_text(PYPROJECT)
    for stem, title in ((FIRST, "First steps"), (SECOND, "Second steps")):
        text = LESSON.format(number=stem[:2], title=title, question=f"What is {stem}?")
        (root / f"notebooks/{stem}.py").write_text(text)
    notebooks.fix(root)
    for stem in (FIRST, SECOND):
        store(root, stem)
    return root


def store(root: Path, stem: str) -> None:
    """Put an output where `outputs` would, without starting a kernel."""
    data = load(root, stem)
    cell = next(cell for cell in data["cells"] if "nbval-check-output" in cell["metadata"].get("tags", []))
    cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": ["same everywhere\n"]}]
    cell["execution_count"] = 2
    save(root, data, stem)
    notebooks.fix(root)


def load(root: Path, stem: str = FIRST) -> dict:
    return json.loads((root / f"notebooks/{stem}.ipynb").read_text(encoding="utf-8"))


def save(root: Path, data: object, stem: str = FIRST) -> None:
    (root / f"notebooks/{stem}.ipynb").write_text(
        json.dumps(data, indent=1, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8"
    )


def snapshot(root: Path) -> dict[str, tuple[bytes, int]]:
    """Every file's bytes and modification time."""
    paths = sorted(path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}
