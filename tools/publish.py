"""Say where this copy of the course is published; badges, setup cells and link pages follow.

    python -m tools.publish                        regenerate from [tool.course] in pyproject.toml
    python -m tools.publish OWNER/REPO [--ref REF] state another repository (and ref) there first
    python -m tools.publish --detect               take it from $GITHUB_REPOSITORY, else from the git remote `origin`
    python -m tools.publish … --check              change nothing; say what is out of date, exit 1

A bare call never looks at the environment or at git: what pyproject.toml states stays. The ref stays too, unless --ref
names another. Generated are the badge row and the setup cell of each notebook, README.md's lesson table (between its
two marker comments) and colab_badges.md.
"""

from __future__ import annotations

import argparse
import html
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from tools.lessons import Lesson, find_lessons
from tools.notebook_policy import Problem
from tools.pairs import examine, replace_file
from tools.publication import PLACEHOLDER, Publication, read_publication
from tools.setup_cell import read_version

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- lessons:begin -->", "<!-- lessons:end -->"
PAGE = "colab_badges.md"

_TABLE = re.compile(r"^\[tool\.course\][ \t]*(?:#[^\n]*)?$", re.MULTILINE)
_REMOTE = re.compile(
    r"(?:https://(?:[^/@\s]+@)?github\.com/|(?:ssh://)?git@github\.com[:/])([^/\s]+/[^/\s]+?)(?:\.git)?/?"
)


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """The command line; returns 0 when all is done or up to date, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m tools.publish", description="Regenerate badges and setup cells.")
    parser.add_argument("repository", nargs="?", metavar="OWNER/REPO", help="default: what pyproject.toml states")
    parser.add_argument(
        "--ref", help="branch, tag or commit that the links lead to (default: what pyproject.toml states)"
    )
    parser.add_argument("--detect", action="store_true", help="take $GITHUB_REPOSITORY, else the git remote origin")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if something is out of date")
    options = parser.parse_args(arguments)
    try:
        stated = read_publication(root)
        repository = detect(root) if options.detect and not options.repository else options.repository
        publication = Publication(repository or stated.repository, stated.ref if options.ref is None else options.ref)
        files, problems = generate(root, publication)
        changes = {name: text for name, text in files.items() if text != _read(root / name)}
        if not options.check:
            for name, text in changes.items():
                replace_file(root / name, text)
    except (ValueError, OSError) as error:
        print(f"tools.publish: {error}", file=sys.stderr)
        return 1
    for problem in problems:
        print(problem, file=sys.stderr)
    for name in changes:
        print(
            f"{name}: out of date; `python -m tools.publish` regenerates it"
            if options.check
            else f"{name}: regenerated"
        )
    print(summary(publication, root))
    return 1 if problems or (options.check and changes) else 0


def generate(root: Path, publication: Publication) -> tuple[dict[str, str], list[Problem]]:
    """Every generated file (path → its text) for `publication`, and what keeps a file from being generated."""
    files = {"pyproject.toml": with_publication((root / "pyproject.toml").read_bytes().decode(), publication)}
    version, lessons, problems = read_version(root), find_lessons(root), []
    for lesson in lessons:
        pair = examine(root, lesson.stem, publication, version)
        if pair.wanted_py is not None:
            files[pair.source] = pair.wanted_py
        if pair.edited in ("ipynb", "both") or pair.ipynb_fault:
            # Its text is not ours to overwrite; the generated parts of an edited notebook are mended all the same.
            problems.append(pair.refusal())
        text = pair.wanted_ipynb
        if text is not None:
            files[pair.target] = text
    readme = _read(root / "README.md")
    try:
        if readme is not None:
            files["README.md"] = with_table(readme, lesson_table(lessons, publication))
    except ValueError as error:
        problems.append(Problem("README.md", "", str(error), f"put `{BEGIN}` and `{END}` around its place"))
    files[PAGE] = badge_page(lessons, publication)
    return files, problems


def detect(root: Path) -> str:
    """OWNER/REPO from $GITHUB_REPOSITORY, else from the git remote `origin`; ValueError when neither says it."""
    if repository := os.environ.get("GITHUB_REPOSITORY"):
        return repository
    repository = remote(root)
    if repository is None:
        raise ValueError("neither $GITHUB_REPOSITORY nor a git remote `origin` on github.com is set: name OWNER/REPO.")
    return repository


def remote(root: Path) -> str | None:
    """OWNER/REPO of the git remote `origin`, if that is on github.com."""
    try:
        command = ["git", "-C", str(root), "config", "--get", "remote.origin.url"]
        url = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    match = _REMOTE.fullmatch(url)
    return match[1] if match else None


def with_publication(pyproject: str, publication: Publication) -> str:
    """pyproject.toml's text with the two values of [tool.course] set, and every other character as it was."""
    start = _TABLE.search(pyproject.replace("\r", " "))
    if not start:
        raise ValueError(
            'pyproject.toml: it needs a table [tool.course] with repository = "OWNER/REPO" and ref = "main".'
        )
    end = next((match.start() for match in re.finditer(r"^\[", pyproject[start.end() :], re.MULTILINE)), None)
    table = pyproject[start.end() :][:end]
    rest = "" if end is None else pyproject[start.end() + end :]
    values = {"repository": publication.repository, "ref": publication.ref}
    for key, value in values.items():
        table = re.sub(
            rf"^({key}[ \t]*=[ \t]*)(?:\"[^\"\n]*\"|'[^'\n]*')", rf'\g<1>"{value}"', table, flags=re.MULTILINE
        )
    text = pyproject[: start.end()] + table + rest
    wanted = tomllib.loads(pyproject)
    wanted["tool"]["course"].update(values)
    if tomllib.loads(text) != wanted:
        raise ValueError(
            "pyproject.toml: write repository and ref of [tool.course] as plain strings, each on its line."
        )
    return text


def with_table(readme: str, table: str) -> str:
    """README.md's text with `table` between its two markers; ValueError when they are not there once, in order."""
    if readme.count(BEGIN) != 1 or readme.count(END) != 1 or readme.index(BEGIN) > readme.index(END):
        raise ValueError("no place for the lesson table")
    return f"{readme[: readme.index(BEGIN) + len(BEGIN)]}\n{table}{readme[readme.index(END) :]}"


def lesson_table(lessons: Sequence[Lesson], publication: Publication) -> str:
    """The README's table: number, title with a link, question, badges."""
    rows = ["| # | lesson | the question it answers | open it |", "|---|---|---|---|"]
    for lesson in lessons:
        title = f"[{_escape(lesson.title)}]({lesson.notebook})"
        row = publication.badge_row(lesson.notebook)
        rows.append(f"| {lesson.number} | {title} | {_escape(lesson.question)} | {row} |")
    return "\n".join(rows) + "\n"


def badge_page(lessons: Sequence[Lesson], publication: Publication) -> str:
    """colab_badges.md: every launch link of every lesson, shown, and as Markdown and HTML to copy."""
    lines = [
        "# Launch links",
        "",
        "Generated by `python -m tools.publish`; do not edit. Copy a block into a syllabus, a slide or a course page.",
        "Colab and Kaggle lend a GPU; Binder has CPUs only; nbviewer shows a lesson without running it.",
    ]
    if not publication.is_published:
        lines += [
            "",
            f"**Not published yet:** the links lead nowhere until `{PLACEHOLDER}` is replaced by a repository.",
        ]
    for lesson in lessons:
        badges = publication.badges(lesson.notebook)
        lines += [
            "",
            f"## {lesson.number} · {_escape(lesson.title)}",
            "",
            " ".join(badge.markdown() for badge in badges),
        ]
        lines += ["", "```markdown", *(badge.markdown() for badge in badges), "```"]
        lines += ["", "```html", *(badge.html() for badge in badges), "```"]
    return "\n".join(lines) + "\n"


def summary(publication: Publication, root: Path) -> str:
    """One line: where the links lead now, and what to do when that is nowhere."""
    if publication.is_published:
        return f"Links lead to {publication.repository} at {publication.ref}."
    found = remote(root)
    hint = f"`python -m tools.publish {found}`" if found else "`python -m tools.publish OWNER/REPO`"
    return f"Not published yet ({publication.repository} is a placeholder): {hint} sets the repository."


def _escape(text: str) -> str:
    # Titles and questions come from the notebooks; neither HTML nor a table's bars may come with them.
    return re.sub(r"([|\[\]])", r"\\\1", html.escape(text, quote=False))


def _read(path: Path) -> str | None:
    return path.read_bytes().decode("utf-8") if path.is_file() else None


if __name__ == "__main__":
    sys.exit(main())
