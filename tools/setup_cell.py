"""The setup cell: one form cell, the same in every notebook but for its four constants.

It does what must happen before `course_utils` can be imported; `course_utils.setup` does the rest.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

from tools.publication import Publication

TAG = "setup"
METADATA: MappingProxyType[str, Any] = MappingProxyType(
    {"cellView": "form", "jupyter": {"source_hidden": True}, "tags": [TAG]}
)
OPTIONS = " ".join(f"{key}={json.dumps(value)}" for key, value in METADATA.items())

# Lesson -> the package's optional dependencies that it needs on top (names in [project.optional-dependencies]).
EXTRAS: MappingProxyType[str, str] = MappingProxyType({"06_lightning": "lightning"})

_TEMPLATE = """\
# @title Setup: run this cell first. It makes `course_utils` importable and nothing else.
REPOSITORY, REF, VERSION, EXTRAS = @REPOSITORY@, @REF@, @VERSION@, @EXTRAS@


def _setup():
    import json, os, subprocess, sys  # noqa: E401
    from importlib import invalidate_caches, metadata
    from pathlib import Path

    url, folders = f"https://github.com/{REPOSITORY}", [Path.cwd(), *Path.cwd().parents]
    hosted = "COLAB_RELEASE_TAG" in os.environ or "KAGGLE_KERNEL_RUN_TYPE" in os.environ
    clone = [str(f) for f in folders if (f / "course_utils/__init__.py").is_file() and (f / "notebooks").is_dir()][:1]
    package = next(iter(metadata.distributions(name="course-utils")), None)
    origin = json.loads((package and package.read_text("direct_url.json")) or "{}")
    ours = (origin.get("url"), origin.get("vcs_info", {}).get("requested_revision")) == (url, REF)
    install = not clone and not (package and package.version == VERSION and (ours or not hosted))
    if install and "__" in REPOSITORY:
        raise RuntimeError(f"{REPOSITORY} is not published yet: use `make lab`, or `python -m tools.publish` first.")
    if install and not hosted:
        raise RuntimeError(f"course_utils is not here: run `git clone {url}` and, in its folder, `make lab`.")
    if install:
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-input", "--no-deps", "--force-reinstall"]
        pip += ["--disable-pip-version-check", f"course-utils @ git+{url}@{REF}"]
        env = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
        try:
            subprocess.run(pip, check=True, capture_output=True, text=True, env=env)
        except subprocess.CalledProcessError as error:
            raise RuntimeError(
                f"Could not install course_utils from {url} at {REF}. If this runtime is offline, connect it "
                f"(Kaggle: Settings → Internet on) and run this cell again. pip said:\\n{error.stderr[-900:].strip()}"
            ) from None
    sys.path[:0] = {*clone} - {*sys.path}
    if install or getattr(sys.modules.get("course_utils"), "__version__", VERSION) != VERSION:
        for name in [name for name in sys.modules if name.partition(".")[0] == "course_utils"]:
            del sys.modules[name]  # an older copy, loaded before this cell ran
        invalidate_caches()
    import course_utils

    found = getattr(course_utils, "__version__", "none")
    if found != VERSION:
        raise RuntimeError(
            f"This notebook needs course_utils {VERSION}, but {list(course_utils.__path__)[0]} holds version {found}: "
            "bring both to one version (in a clone: `git pull`; else open the notebook from its badge again)."
        )
    from course_utils.setup import prepare

    print(prepare(EXTRAS, install=hosted))


_setup()"""


def source(publication: Publication, version: str, extras: str = "") -> str:
    """The setup cell's source for a notebook published at `publication` that belongs to course_utils `version`."""
    values = {"REPOSITORY": publication.repository, "REF": publication.ref, "VERSION": version, "EXTRAS": extras}
    for name, value in values.items():
        if not value.isascii() or not value.isprintable():
            raise ValueError(f"{name} = {value!a} cannot stand in the setup cell: printable ASCII only.")
    # A JSON string of printable ASCII is the same Python string, in the double quotes that ruff wants.
    return re.sub("@([A-Z]+)@", lambda match: json.dumps(values[match[1]]), _TEMPLATE)


def extras_of(notebook: str) -> str:
    """The optional dependencies of the lesson whose .ipynb is `notebook`, separated by commas."""
    return EXTRAS.get(PurePosixPath(notebook).stem, "")


def read_version(root: Path) -> str:
    """course_utils' version, read from its source under `root` without importing it."""
    for line in (root / "course_utils" / "__init__.py").read_text(encoding="utf-8").splitlines():
        if line.startswith("__version__ = "):
            return str(tomllib.loads(f"version = {line.partition('= ')[2]}")["version"])
    raise ValueError('course_utils/__init__.py states no `__version__ = "…"` on a line of its own.')
