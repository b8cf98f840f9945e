"""The two Python environments of the course, and what each of them needs now. Standard library only, changes nothing.

`.venv` holds the newest versions that requirements.txt admits; `.venv-colab` holds Colab's exact ones, listed in
tests/colab/constraints.txt. What was installed into an image is recorded in `.course.json` inside it; `plan` compares
that record with the project's files, so a second run installs nothing, and an installation cut short is noticed.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

UNFINISHED: dict[str, object] = {"finished": False}
_RECORD = ".course.json"


@dataclass(frozen=True)
class Image:
    """One environment: its folder under the repository, what it holds, the extras it needs to run every test."""

    name: str
    folder: str
    holds: str
    extras: tuple[str, ...]
    constraints: str | None = None

    def python(self, root: Path) -> Path:
        """The image's interpreter (it may not exist yet)."""
        return root / self.folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


IMAGES = {
    "local": Image("local", ".venv", "the newest versions", ("lab", "test", "lightning", "dev", "bench")),
    "colab": Image(
        "colab", ".venv-colab", "Colab's exact versions", ("test", "lightning"), "tests/colab/constraints.txt"
    ),
}
# What `make lab` installs: enough to run every lesson, and no test.
LEARNERS_EXTRAS = ("lab", "lightning")


@dataclass(frozen=True)
class Plan:
    """What an image needs now. `action`: "none", "update" (pip alone) or "build" (from an empty folder).

    `torch` is "cuda" (PyPI's own build) or "cpu"; `inputs` has a fingerprint for each list of requirements.
    """

    action: str
    reason: str
    torch: str
    inputs: dict[str, str]

    @property
    def extras(self) -> list[str]:
        """The extras of pyproject.toml that the image is to have."""
        return [name for name in self.inputs if name != "base"]


def plan(image: Image, extras: Sequence[str], torch: str, root: Path = ROOT) -> Plan:
    """What `image` needs to hold requirements.txt and `extras`, and why.

    Extras that it has already stay. `torch` is "cuda", "cpu", or "" for what is there already.
    """
    record = read_record(root / image.folder)
    had = str(record.get("torch", "")) if record else ""
    choice = torch or had or "cuda"
    recorded = record.get("inputs") if record else None
    held = dict(recorded) if isinstance(recorded, dict) else {}
    inputs = _inputs(image, sorted({*extras, *(held.keys() - {"base"})}), root)

    def needs(action: str, reason: str) -> Plan:
        return Plan(action, reason, choice, inputs)

    if not (root / image.folder).exists():
        return needs("build", "to be created")
    if record == UNFINISHED:
        return needs("build", "an earlier installation did not finish, so it starts again")
    if not image.python(root).exists():
        return needs("build", "its Python is gone, so it is built again")
    if record is None:
        return needs("update", "made by hand, so only what is missing is installed into it")
    if record.get("python") != python_version():
        return needs("build", f"made with Python {record.get('python')}, so it is built again for {python_version()}")
    if choice != had:
        return needs("build", f"PyTorch for {choice} instead of {had}, so it is built again")
    if held != inputs:
        return needs("update", "the requirements changed, so it is brought up to date")
    return needs("none", "ready")


def extra(name: str, root: Path = ROOT) -> list[str]:
    """The requirements of one extra of pyproject.toml."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [str(requirement) for requirement in project["optional-dependencies"].get(name, [])]


def python_version() -> str:
    """The running Python as "3.11": a newer patch release needs no new image."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def read_record(folder: Path) -> dict[str, object] | None:
    """An image's record: None when it has none, `UNFINISHED` when it was cut short or cannot be read."""
    try:
        record = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError:
        return UNFINISHED
    return record if isinstance(record, dict) and record.get("finished") is True else UNFINISHED


def write_record(folder: Path, record: dict[str, object] | None) -> None:
    """Replace an image's record at once, so that it is never half written; None takes it away."""
    path = folder / _RECORD
    if record is None:
        path.unlink(missing_ok=True)
        return
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(record, indent=1), encoding="utf-8")
    draft.replace(path)


def finished_record(its_plan: Plan) -> dict[str, object]:
    """The record of an image that holds what `its_plan` asks for."""
    return {"finished": True, "python": python_version(), "torch": its_plan.torch, "inputs": its_plan.inputs}


def _inputs(image: Image, extras: Sequence[str], root: Path) -> dict[str, str]:
    files = ["requirements.txt", *([image.constraints] if image.constraints else [])]
    base = "".join((root / name).read_text(encoding="utf-8") for name in files)
    return {"base": _fingerprint(base), **{name: _fingerprint("\n".join(extra(name, root))) for name in extras}}


def _fingerprint(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
