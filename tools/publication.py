"""Where this copy of the course is published, and every link that follows from it.

The repository and the ref come from `[tool.course]` in pyproject.toml. Both end up in code that learners run and in
links that they click, so `Publication` admits only what GitHub itself can hold and no character that needs quoting.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

PLACEHOLDER = "your__account/gpu-utilisation-course"

# GitHub: letters, digits and single hyphens, 39 at most; a managed user also has one underscore before the short code.
# https://docs.github.com/en/enterprise-cloud@latest/admin/managing-iam/iam-configuration-reference/username-considerations-for-external-authentication
_OWNER = re.compile(r"[A-Za-z0-9]+(?:[-_][A-Za-z0-9]+)*")
_REPOSITORY = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9._-]*")
# A subset of what `git check-ref-format` admits: https://git-scm.com/docs/git-check-ref-format
_REF = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._/-]*")


@dataclass(frozen=True)
class Badge:
    """A launch link: `name` for people, `image` its picture, `url` where it leads."""

    name: str
    image: str
    url: str

    def markdown(self) -> str:
        """The badge as Markdown."""
        return f"[![{self.name}]({self.image})]({self.url})"

    def html(self) -> str:
        """The badge as HTML."""
        return f'<a href="{self.url}"><img src="{self.image}" alt="{self.name}"></a>'


@dataclass(frozen=True)
class Publication:
    """A GitHub repository `OWNER/REPO` and a branch, tag or commit; raises ValueError for anything unsafe."""

    repository: str = PLACEHOLDER
    ref: str = "main"

    def __post_init__(self) -> None:
        if fault := _repository_fault(self.repository):
            raise ValueError(f"{_shown(self.repository)} is no repository: {fault}. Write it as OWNER/REPO.")
        if fault := _ref_fault(self.ref):
            raise ValueError(f"{_shown(self.ref)} is no safe ref: {fault}. Name a branch, a tag or a commit.")

    @property
    def is_published(self) -> bool:
        """False for the placeholder, whose owner nobody can register."""
        return self.repository != PLACEHOLDER

    @property
    def url(self) -> str:
        """The repository's page, which git clones from."""
        return f"https://github.com/{self.repository}"

    def colab(self, path: str) -> Badge:
        """Open `path` (a notebook, relative to the repository) in Google Colab."""
        return Badge(
            "Open in Colab",
            "https://colab.research.google.com/assets/colab-badge.svg",
            f"https://colab.research.google.com/github/{self.repository}/blob/{self.ref}/{path}",
        )

    def kaggle(self, path: str) -> Badge:
        """Open `path` in a Kaggle notebook."""
        return Badge(
            "Open in Kaggle",
            "https://kaggle.com/static/images/open-in-kaggle.svg",
            f"https://kaggle.com/kernels/welcome?src={self.url}/blob/{self.ref}/{path}",
        )

    def binder(self, path: str) -> Badge:
        """Run `path` on mybinder.org: CPU only. A slash in the ref would end it there, so it is encoded."""
        return Badge(
            "Launch on Binder (CPU)",
            "https://mybinder.org/badge_logo.svg",
            f"https://mybinder.org/v2/gh/{self.repository}/{quote(self.ref, safe='')}?labpath={path}",
        )

    def nbviewer(self, path: str) -> Badge:
        """Read `path` without running it. nbviewer finds a ref with a slash only when it is encoded (nbviewer#665)."""
        return Badge(
            "View on nbviewer",
            "https://raw.githubusercontent.com/jupyter/design/master/logos/Badges/nbviewer_badge.svg",
            f"https://nbviewer.org/github/{self.repository}/blob/{quote(self.ref, safe='')}/{path}",
        )

    def badges(self, path: str) -> tuple[Badge, ...]:
        """All launch links of one notebook."""
        return self.colab(path), self.kaggle(path), self.binder(path), self.nbviewer(path)

    def badge_row(self, path: str) -> str:
        """The one line of badges in a notebook's first cell and in the README: the two places that lend a GPU."""
        return f"{self.colab(path).markdown()} {self.kaggle(path).markdown()}"


def read_publication(root: Path) -> Publication:
    """The publication that `root`/pyproject.toml states; ValueError when it states none, or an unsafe one."""
    table = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8")).get("tool", {}).get("course", {})
    if not all(isinstance(table.get(key), str) for key in ("repository", "ref")):
        raise ValueError('pyproject.toml: [tool.course] must state repository = "OWNER/REPO" and ref = "main".')
    return Publication(table["repository"], table["ref"])


def _repository_fault(text: str) -> str | None:
    if text == PLACEHOLDER:
        return None
    owner, slash, name = text.partition("/")
    if not slash or not owner or not name:
        return "an owner and a name, with one slash between them, are needed"
    if not _OWNER.fullmatch(owner) or len(owner) > 39:
        return "the owner may hold at most 39 letters and digits with single hyphens between them"
    if not _REPOSITORY.fullmatch(name) or len(name) > 100:
        return "the name may hold at most 100 letters, digits, dots, hyphens and underscores"
    if name == "." or ".." in name or name.lower().endswith((".git", ".lock")):
        return "the name may hold no '..' and may not end in .git or .lock"
    return None


def _ref_fault(text: str) -> str | None:
    if not _REF.fullmatch(text) or len(text) > 200:
        return "only letters, digits and . _ / - may stand in it (200 at most), and it starts with a letter or digit"
    if ".." in text or any(not part or part[0] == "." or part.endswith((".", ".lock")) for part in text.split("/")):
        return "it may hold no '..' and no '//', and no part may start with a dot or end in '.' or '.lock'"
    return None


def _shown(text: str) -> str:
    return ascii(text if len(text) <= 80 else text[:79] + "…")
