"""Opening a lesson on Colab replaces nothing: what requirements.txt asks for, Colab's images have already.

The facts are in tests/colab/: the lines of googlecolab/backend-info (pip-freeze.gpu.txt) that the course touches.
"""

import os
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
FACTS = {path.stem: path for path in (ROOT / "tests/colab").glob("*.txt") if path.stem != "constraints"}
NEWEST_IMAGE = "gpu-image-2026-08-19"

# What Colab lacks. Only what runs the tests may be here: a lesson that needed it would have to install it.
ABSENT = {"nbval": "runs the notebooks as tests; Colab has no use for it"}
# On Colab's GPU images only, so on a CPU runtime the setup cell installs it (one small wheel without dependencies).
GPU_IMAGES_ONLY = {"nvidia-ml-py"}
NEVER_REPLACED = {"torch", "torchvision", "numpy"}


def lines(path: Path) -> list[str]:
    text = (line.split(" #")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    return [line for line in text if line and not line.startswith("#")]


def requirements() -> list[Requirement]:
    return [Requirement(line) for line in lines(ROOT / "requirements.txt")]


def facts(image: str) -> dict[str, Version]:
    pairs = (line.split("==") for line in lines(FACTS[image]))
    return {canonicalize_name(name): Version(version) for name, version in pairs}


def lesson_dependencies() -> list[str]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]


def unsatisfied(wanted: list[Requirement], has: dict[str, Version]) -> list[str]:
    """What pip would have to install or replace, a "+cu128" being no difference."""
    return [
        f"{requirement} against {has.get(canonicalize_name(requirement.name))}"
        for requirement in wanted
        if canonicalize_name(requirement.name) not in has
        or not requirement.specifier.contains(has[canonicalize_name(requirement.name)])
    ]


def test_both_snapshots_are_here():
    assert sorted(FACTS) == [NEWEST_IMAGE, "pinned-2026.07"]
    for path in FACTS.values():
        assert "googlecolab/backend-info" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("image", sorted(FACTS))
@pytest.mark.parametrize("requirement", requirements(), ids=lambda requirement: requirement.name)
def test_colab_satisfies_each_requirement_as_it_is(requirement, image):
    if requirement.name in ABSENT:
        assert canonicalize_name(requirement.name) not in facts(image), "Colab has it now: take it out of ABSENT"
    else:
        assert unsatisfied([requirement], facts(image)) == []


def test_the_comparison_sees_what_it_should():
    has = {"numpy": Version("2.1.3"), "torch": Version("2.11.0+cu128")}
    assert unsatisfied([Requirement("torch>=2.11,<3"), Requirement("NumPy>=2.0")], has) == []
    assert unsatisfied([Requirement("numpy>=2.2")], has) == ["numpy>=2.2 against 2.1.3"]
    assert unsatisfied([Requirement("torch==2.12.*")], has) == ["torch==2.12.* against 2.11.0+cu128"]
    assert unsatisfied([Requirement("nbval")], has) == ["nbval against None"]


@pytest.mark.parametrize("image", sorted(FACTS))
def test_what_the_kernel_has_loaded_is_never_replaced(image):
    wanted = [requirement for requirement in requirements() if requirement.name in NEVER_REPLACED]
    assert {requirement.name for requirement in wanted} == NEVER_REPLACED
    assert unsatisfied(wanted, facts(image)) == []


def test_lessons_need_nothing_that_colab_lacks():
    needed = {Requirement(line).name for line in lesson_dependencies()}
    assert needed.isdisjoint(ABSENT)
    assert needed >= GPU_IMAGES_ONLY


def test_the_package_depends_on_the_first_block_of_the_requirements():
    first_block = (ROOT / "requirements.txt").read_text(encoding="utf-8").split("\n\n")[0]
    block = [line for line in first_block.splitlines() if not line.startswith("#")]
    assert block == lesson_dependencies()


def test_each_name_stands_once():
    names = [requirement.name for requirement in requirements()]
    assert len(names) == len(set(names))
    assert not set(names) & {"pynvml", "gputil"}, "they install another module named pynvml, or none that is maintained"


def test_constraints_are_the_newest_image():
    pinned = [Requirement(line) for line in lines(ROOT / "tests/colab/constraints.txt")]
    versions = {requirement.name: str(requirement.specifier) for requirement in pinned}
    assert versions == {name: f"=={version.public}" for name, version in facts(NEWEST_IMAGE).items()}
    held = {canonicalize_name(requirement.name) for requirement in requirements()} - set(ABSENT)
    assert held <= versions.keys(), "a requirement that is not held to Colab's version"


@pytest.mark.skipif(os.environ.get("COURSE_IMAGE") != "colab", reason="about .venv-colab: IMAGE=colab make test")
def test_this_image_has_colabs_versions():
    pinned = [Requirement(line) for line in lines(ROOT / "tests/colab/constraints.txt")]
    applying = [pin for pin in pinned if pin.marker is None or pin.marker.evaluate()]
    installed = {
        canonicalize_name(found.metadata["Name"]): Version(found.version) for found in metadata.distributions()
    }
    compared = [pin for pin in applying if pin.name in installed and pin.name != "setuptools"]
    assert {"torch", "numpy", "ipython", "ipykernel", "ipywidgets", "matplotlib"} <= {pin.name for pin in compared}
    assert unsatisfied(compared, installed) == []
