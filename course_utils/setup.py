"""The second half of a notebook's setup cell: what can only run once `course_utils` is importable.

It installs the requirements that are missing and nothing else. torch, torchvision and numpy stay as the runtime
preinstalled them: another build costs gigabytes, and swapping a package that is already loaded breaks the session.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from importlib import import_module, invalidate_caches, metadata
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.requirements import Requirement

DISTRIBUTION = "course-utils"
PINNED = ("torch", "torchvision", "numpy")

# Distribution -> module, for the compiled packages that a running session cannot swap.
_MODULES = {"torch": "torch", "torchvision": "torchvision", "numpy": "numpy", "pillow": "PIL"}
_OFFLINE = ("resolve host", "name resolution", "unreachable", "failed to connect", "timed out", "establish a new conn")


def prepare(extras: str = "", *, install: bool) -> str:
    """Install what is missing (if `install`), check that nothing preinstalled changed, and say so in one line.

    `extras` names optional dependencies of the package, separated by commas. Raises RuntimeError, in one sentence,
    when pip fails, when a pinned package is out of range or changed, and when the session must be restarted.
    """
    package = import_module(__package__)
    before = installed_versions(PINNED)
    missing = missing_requirements(requirements(extras))
    note = ""
    if missing and install:
        install_requirements(missing, before)
        check_unchanged(before, installed_versions(PINNED))
        note = f" · added {', '.join(sorted(requirement.name for requirement in missing))}"
    elif missing:
        note = f" · missing here: {', '.join(sorted(map(str, missing)))} (`make lab` installs them)"
    check_loaded(loaded_versions(), installed_versions(_MODULES))
    kept = ", ".join(f"{name} {version}" for name, version in before.items() if version)
    return f"course_utils {package.__version__} is ready{note} · unchanged: {kept}"


def requirements(extras: str = "") -> list[Requirement]:
    """What this copy of course_utils requires: by pyproject.toml in a clone, else by the package's own metadata."""
    from packaging.requirements import Requirement

    wanted = ["", *filter(None, (extra.strip() for extra in extras.split(",")))]
    clone = Path(__file__).resolve().parents[1] / "pyproject.toml"
    if clone.is_file():
        project = tomllib.loads(clone.read_text(encoding="utf-8"))["project"]
        known = project.get("optional-dependencies", {})
        lines = [*project["dependencies"], *(line for extra in wanted for line in known.get(extra, []))]
    else:
        known = metadata.metadata(DISTRIBUTION).get_all("Provides-Extra") or ()
        lines = metadata.requires(DISTRIBUTION) or []
    if unknown := [extra for extra in wanted[1:] if extra not in known]:
        raise RuntimeError(f"course_utils has no optional dependencies named {', '.join(unknown)}: correct EXTRAS.")
    found = [Requirement(line) for line in lines]
    return [r for r in found if r.marker is None or any(r.marker.evaluate({"extra": extra}) for extra in wanted)]


def missing_requirements(wanted: Iterable[Requirement]) -> list[Requirement]:
    """Those of `wanted` that are not installed, or only in a version out of range.

    Raises RuntimeError when torch, torchvision or numpy is installed out of range: that is not ours to replace.
    """
    missing = []
    for requirement in wanted:
        version = installed_versions([requirement.name])[requirement.name]
        if version is not None and requirement.specifier.contains(version, prereleases=True):
            continue
        if version is not None and requirement.name in PINNED:
            raise RuntimeError(
                f"This runtime has {requirement.name} {version}, but the course needs {requirement}: "
                "choose the newest runtime version (on Colab: Runtime → Change runtime type)."
            )
        missing.append(requirement)
    return missing


def install_requirements(missing: Iterable[Requirement], pinned: Mapping[str, str | None]) -> None:
    """pip-install `missing` under constraints that hold `pinned` (distribution -> version) where it is.

    Raises RuntimeError with pip's last lines when pip fails.
    """
    names = [str(requirement).partition(";")[0].strip() for requirement in missing]
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder) / "constraints.txt"
        constraints.write_text("".join(f"{name}=={version}\n" for name, version in pinned.items() if version))
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
        try:
            subprocess.run(
                [*command, "--constraint", str(constraints), *names],
                check=True,
                capture_output=True,
                text=True,
                errors="replace",
                env={**os.environ, "GIT_TERMINAL_PROMPT": "0"},
            )
        except subprocess.CalledProcessError as error:
            raise RuntimeError(_explain(names, error.stderr)) from None
    invalidate_caches()


def check_unchanged(before: Mapping[str, str | None], after: Mapping[str, str | None]) -> None:
    """Raise RuntimeError when an installation replaced a package that was there before."""
    changed = [f"{name} {old} → {after.get(name)}" for name, old in before.items() if old and after.get(name) != old]
    if changed:
        raise RuntimeError(
            f"The installation replaced what this runtime came with ({', '.join(changed)}): "
            "get a fresh runtime (on Colab: Runtime → Disconnect and delete runtime) and run this cell again."
        )


def check_loaded(loaded: Mapping[str, str], installed: Mapping[str, str | None]) -> None:
    """Raise RuntimeError, once for all packages, when a loaded module is not the version that is installed now."""
    # torch calls itself 2.11.0+cu128 where its metadata may say 2.11.0: what follows the plus is no other version.
    stale = [
        f"{name} {version} is loaded, {installed[name]} is installed"
        for name, version in loaded.items()
        if installed.get(name) is not None and version.partition("+")[0] != str(installed[name]).partition("+")[0]
    ]
    if stale:
        raise RuntimeError(
            f"{'; '.join(stale)}: restart the session (Runtime → Restart session) and run this cell again."
        )


def installed_versions(names: Iterable[str]) -> dict[str, str | None]:
    """Distribution -> installed version, None where it is not installed. Imports none of them."""
    versions: dict[str, str | None] = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def loaded_versions() -> dict[str, str]:
    """Distribution -> version of the module that this session has already imported."""
    modules = {name: sys.modules.get(module) for name, module in _MODULES.items()}
    versions = {name: getattr(module, "__version__", None) for name, module in modules.items()}
    return {name: str(version) for name, version in versions.items() if version is not None}


def _explain(names: list[str], stderr: str) -> str:
    last = "\n".join(stderr.strip().splitlines()[-5:])
    if any(sign in stderr.lower() for sign in _OFFLINE):
        return (
            f"This runtime seems to be offline, so {', '.join(names)} could not be installed: connect it "
            f"(on Kaggle: Settings → Internet on) and run this cell again. pip said:\n{last}"
        )
    return f"pip could not install {', '.join(names)} beside the preinstalled torch and numpy. pip said:\n{last}"
