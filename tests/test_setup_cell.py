"""The setup cell in a folder that holds nothing but a notebook, with a local git repository standing in for GitHub.

Each test gets an environment of its own: a bare venv that sees this environment's packages too, but cannot change them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import textwrap
import time
import venv
import zipfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from packaging.requirements import Requirement

from course_utils import setup
from tools import setup_cell
from tools.publication import PLACEHOLDER, Publication

ROOT = Path(__file__).resolve().parents[1]
COURSE = Publication("octo/course", "main")
COLAB = {"COLAB_RELEASE_TAG": "release-colab"}
KAGGLE = {"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}
MET = ("numpy>=1", "packaging>=20", 'tomli; python_version < "3.5"', "lightning>=99; extra == 'lightning'")

# The stand-in's build backend: it needs nothing, so that pip builds the package without an index.
BACKEND = """
import zipfile, pathlib
def build_wheel(folder, config_settings=None, metadata_directory=None):
    here = pathlib.Path.cwd()
    version, requires = here.joinpath("VERSION").read_text().strip(), here.joinpath("REQUIRES").read_text().splitlines()
    info = f"course_utils-{version}.dist-info"
    name = f"course_utils-{version}-py3-none-any.whl"
    with zipfile.ZipFile(pathlib.Path(folder, name), "w") as wheel:
        for path in here.glob("course_utils/*.py"):
            wheel.write(path, f"course_utils/{path.name}")
        lines = ["Metadata-Version: 2.1", "Name: course-utils", f"Version: {version}", "Provides-Extra: lightning"]
        lines += [f"Requires-Dist: {line}" for line in requires]
        wheel.writestr(f"{info}/METADATA", "\\n".join(lines) + "\\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(f"{info}/RECORD", "")
    return name
"""

# Runs cells one after the other in one process; records every command, each error and what is there afterwards.
DRIVER = """
import contextlib, io, json, subprocess, sys
from importlib import metadata
real, commands, results = subprocess.run, [], []
def run(command, **options):
    commands.append(command)
    return real(command, **options)
subprocess.run = run
for cell in json.load(open(sys.argv[1])):
    commands.clear()
    result, out = {"error": None, "cause": False}, io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            exec(compile(cell, "<cell>", "exec"), {"__name__": "__main__"})
    except Exception as error:
        shown = error.__cause__ or (error.__context__ if not error.__suppress_context__ else None)
        result.update(error=f"{type(error).__name__}: {error}", cause=shown is not None)
    module = sys.modules.get("course_utils")
    pinned = {name: metadata.version(name) for name in ("torch", "torchvision", "numpy")}
    result.update(out=out.getvalue(), commands=list(commands), pinned=pinned,
                  version=getattr(module, "__version__", None), file=getattr(module, "__file__", None))
    results.append(result)
json.dump(results, open(sys.argv[2], "w"))
"""


@dataclass
class Machine:
    """A learner's machine: its Python, its one folder, its GitHub and its package index."""

    root: Path

    @property
    def folder(self) -> Path:
        return self.root / "content"

    @property
    def python(self) -> Path:
        return self.root / "venv" / "bin" / "python"

    @property
    def wheels(self) -> Path:
        return self.root / "wheels"

    def environment(self, place: dict[str, str], github: str | None = None) -> dict[str, str]:
        github = github or (self.root / "github").as_uri() + "/"
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.root),
            "LANG": "C.UTF-8",
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_COUNT": "1",
            "GIT_CONFIG_KEY_0": f"url.{github}.insteadOf",
            "GIT_CONFIG_VALUE_0": "https://github.com/",
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.wheels),
            "PIP_NO_CACHE_DIR": "1",
            **place,
        }

    def run(self, *cells: str, place: dict[str, str] = COLAB, github: str | None = None, cwd: Path | None = None):
        (self.root / "driver.py").write_text(DRIVER)
        (self.root / "cells.json").write_text(json.dumps(cells))
        command = [self.python, self.root / "driver.py", self.root / "cells.json", self.root / "results.json"]
        done = subprocess.run(
            command, cwd=cwd or self.folder, env=self.environment(place, github), capture_output=True, timeout=120
        )
        assert done.returncode == 0, done.stderr.decode()
        assert done.stderr == b""
        return json.loads((self.root / "results.json").read_text())

    def publish(self, version: str = "0.1.0", requires: tuple[str, ...] = MET, ref: str = "main") -> None:
        """Commit course_utils as `version` to the stand-in, on the branch `ref`."""
        repository = self.root / "github" / COURSE.repository
        (repository / "course_utils").mkdir(parents=True, exist_ok=True)
        (repository / "course_utils/__init__.py").write_text(f'__version__ = "{version}"\n')
        shutil.copy(ROOT / "course_utils/setup.py", repository / "course_utils")
        (repository / "backend.py").write_text(BACKEND)
        (repository / "VERSION").write_text(version)
        (repository / "REQUIRES").write_text("\n".join(requires))
        (repository / "pyproject.toml").write_text(
            '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        )
        if not (repository / ".git").is_dir():
            self.git(repository, "init", "--quiet", "--initial-branch", ref)
        elif ref not in self.git(repository, "branch", "--format=%(refname:short)").split():
            self.git(repository, "checkout", "--quiet", "-b", ref)
        self.git(repository, "add", "--all")
        self.git(repository, "commit", "--quiet", "--allow-empty", "--message", version)

    def git(self, repository: Path, *arguments: str) -> str:
        identity = ["-c", "user.name=T", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
        environment = {"PATH": os.environ["PATH"], "HOME": str(self.root), "GIT_CONFIG_NOSYSTEM": "1"}
        command = ["git", *identity, "-C", str(repository), *arguments]
        return subprocess.run(command, check=True, env=environment, capture_output=True, text=True).stdout

    def offer(self, name: str, version: str, *requires: str) -> None:
        """Put a wheel into the package index."""
        self.wheels.mkdir(exist_ok=True)
        info = f"{name}-{version}.dist-info"
        with zipfile.ZipFile(self.wheels / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}.py", f"__version__ = {version!r}\n")
            lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
            lines += [f"Requires-Dist: {line}" for line in requires]
            wheel.writestr(f"{info}/METADATA", "\n".join(lines) + "\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture(scope="session")
def packages(tmp_path_factory):
    """This environment's packages without the course itself, as links: nothing in them can be uninstalled from here."""
    folder = tmp_path_factory.mktemp("packages")
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not entry.name.startswith(("course", "__editable__")) and entry.suffix != ".pth":
            (folder / entry.name).symlink_to(entry)
    return folder


@pytest.fixture
def machine(tmp_path, packages):
    machine = Machine(tmp_path)
    venv.create(tmp_path / "venv", symlinks=True)
    site = next((tmp_path / "venv").glob("lib/python*/site-packages"))
    (site / "preinstalled.pth").write_text(f"{packages}\n")
    machine.folder.mkdir()
    (machine.folder / "01_lesson.ipynb").write_text("{}")
    machine.wheels.mkdir()
    machine.publish()
    return machine


def cell(publication: Publication = COURSE, version: str = "0.1.0", extras: str = "") -> str:
    return setup_cell.source(publication, version, extras)


def is_install_of_course(command: list[str]) -> bool:
    return "--no-deps" in command and any(word.startswith("course-utils @ git+https://github.com/") for word in command)


@pytest.mark.parametrize("place", [COLAB, KAGGLE], ids=["colab", "kaggle"])
def test_in_an_empty_folder_it_installs_the_course_and_the_second_run_starts_no_pip(machine, place):
    started = time.perf_counter()
    first, again = machine.run(cell(), cell(), place=place)
    (later,) = machine.run(cell(), place=place)
    print(f"first, second and a new session: {time.perf_counter() - started:.1f} s")

    assert first["error"] is None
    assert [is_install_of_course(command) for command in first["commands"]] == [True]
    assert first["version"] == "0.1.0"
    assert Path(first["file"]).is_relative_to(machine.root / "venv")
    assert first["out"].startswith("course_utils 0.1.0 is ready") and first["out"].count("\n") == 1
    for result in (again, later):
        assert result["error"] is None
        assert result["commands"] == []
        assert result["version"] == "0.1.0"


def test_afterwards_torch_torchvision_and_numpy_are_the_same(machine):
    machine.publish(requires=("addition>=1", "numpy>=1"))
    machine.offer("addition", "1.0", "numpy")
    machine.offer("numpy", "99.0")
    before = {name: metadata.version(name) for name in setup.PINNED}
    (result,) = machine.run(cell())
    assert result["error"] is None
    assert result["pinned"] == before
    assert f"numpy {before['numpy']}" in result["out"]


def test_a_missing_requirement_is_installed_under_constraints_and_only_that_one(machine):
    machine.publish(requires=("addition>=1", "numpy>=1", "packaging>=20"))
    machine.offer("addition", "1.5")
    first, second = machine.run(cell() + "\nimport addition\nassert addition.__version__ == '1.5'", cell())
    assert first["error"] is None
    assert "added addition" in first["out"]
    course, requirements = first["commands"]
    assert is_install_of_course(course)
    assert requirements[-3] == "--constraint"
    assert requirements[-1] == "addition>=1"
    assert second["commands"] == []


@pytest.mark.parametrize("pinned", setup.PINNED)
def test_a_dependency_that_wants_another_torch_or_numpy_is_refused(machine, pinned):
    machine.publish(requires=("hostile>=1",))
    machine.offer("hostile", "1.0", f"{pinned}==99.0")
    machine.offer(pinned, "99.0")
    before = {name: metadata.version(name) for name in setup.PINNED}
    (result,) = machine.run(cell())
    assert result["error"].startswith("RuntimeError: pip could not install hostile>=1")
    assert not result["cause"], "pip's own traceback is shown as well"
    assert "pip said:" in result["error"] and "hostile" in result["error"].partition("pip said:")[2]
    assert result["pinned"] == before


def test_an_optional_dependency_is_installed_where_the_lesson_asks_for_it(machine):
    machine.offer("lightning", "99.1")
    (plain,) = machine.run(cell())
    assert plain["error"] is None and len(plain["commands"]) == 1
    (result,) = machine.run(cell(extras="lightning"))
    assert result["error"] is None
    assert [command[-1].replace("<", "").split(">")[0] for command in result["commands"]] == ["lightning"]
    (unknown,) = machine.run(cell(extras="lightening"))
    assert "no optional dependencies named lightening" in unknown["error"]


def test_a_stale_install_of_another_version_is_replaced_even_when_it_is_loaded(machine):
    machine.publish("0.0.9", ref="old")
    old, new = machine.run(cell(Publication("octo/course", "old"), "0.0.9"), cell())
    assert old["version"] == "0.0.9"
    assert is_install_of_course(new["commands"][0]) and len(new["commands"]) == 1
    assert new["error"] is None
    assert new["version"] == "0.1.0"


def test_the_same_version_from_another_ref_or_repository_is_replaced(machine):
    machine.publish(ref="fork")
    mark, unmarked = "import course_utils as c\nc.old = 1", "import course_utils as c\nassert not hasattr(c, 'old')"
    fork = cell(Publication("octo/course", "fork"))
    on_fork, on_main, again = machine.run(f"{fork}\n{mark}", f"{cell()}\n{unmarked}", cell())
    assert [len(result["commands"]) for result in (on_fork, on_main, again)] == [1, 1, 0]
    assert on_main["error"] is None


def test_a_package_whose_version_is_not_the_notebooks_is_named(machine):
    (result,) = machine.run(cell(version="0.2.0"))
    assert result["error"].startswith("RuntimeError: This notebook needs course_utils 0.2.0, but ")
    assert "holds version 0.1.0" in result["error"]


def test_offline_is_one_clear_error_without_pips_traceback(machine):
    started = time.perf_counter()
    (result,) = machine.run(cell(), github="http://127.0.0.1:9/")
    assert time.perf_counter() - started < 60
    assert result["error"].startswith(
        "RuntimeError: Could not install course_utils from https://github.com/octo/course"
    )
    assert "offline" in result["error"] and "Internet on" in result["error"]
    assert "Failed to connect" in result["error"].partition("pip said:")[2]
    assert "Traceback" not in result["error"] and not result["cause"]
    assert result["version"] is None


def test_a_ref_that_does_not_exist_raises_with_pips_last_lines(machine):
    (result,) = machine.run(cell(Publication("octo/course", "no-such-branch")))
    assert "no-such-branch" in result["error"].partition("pip said:")[2]


@pytest.mark.parametrize("place", [COLAB, {}], ids=["colab", "local"])
def test_a_copy_that_nobody_published_says_so_and_installs_nothing(machine, place):
    (result,) = machine.run(cell(Publication(PLACEHOLDER)), place=place)
    assert result["error"].startswith(f"RuntimeError: {PLACEHOLDER} is not published yet")
    assert "python -m tools.publish" in result["error"]
    assert result["commands"] == []


def test_elsewhere_it_names_the_two_commands_and_installs_nothing(machine):
    (result,) = machine.run(cell(), place={})
    assert "`git clone https://github.com/octo/course`" in result["error"] and "`make lab`" in result["error"]
    assert result["commands"] == []


def test_elsewhere_an_installed_copy_of_this_version_is_used(machine):
    machine.run(cell())
    (result,) = machine.run(cell(), place={})
    assert result["error"] is None and result["version"] == "0.1.0"


@pytest.mark.parametrize("place", [COLAB, {}], ids=["colab", "local"])
@pytest.mark.parametrize("publication", [COURSE, Publication()], ids=["published", "placeholder"])
def test_in_a_clone_the_clone_is_used_without_pip(machine, place, publication):
    clone = clone_of_course(machine)
    results = machine.run(cell(publication), cell(publication), place=place, cwd=clone / "notebooks")
    for result in results:
        assert result["error"] is None
        assert result["file"] == str(clone / "course_utils/__init__.py")
        assert result["commands"] == []


def test_a_clone_wins_over_an_installed_copy(machine):
    machine.run(cell())
    clone = clone_of_course(machine)
    (result,) = machine.run(cell(), cwd=clone)
    assert result["file"] == str(clone / "course_utils/__init__.py")


def test_a_stale_clone_is_named(machine):
    clone = clone_of_course(machine)
    (result,) = machine.run(cell(version="0.2.0"), place={}, cwd=clone)
    assert f"{clone}/course_utils holds version 0.1.0" in result["error"] and "git pull" in result["error"]


def test_in_a_local_clone_a_missing_requirement_is_named_and_not_installed(machine):
    clone = clone_of_course(machine, 'dependencies = ["addition>=1"]')
    machine.offer("addition", "1.0")
    local, colab = machine.run(cell(), place={}, cwd=clone)[0], machine.run(cell(), place=COLAB, cwd=clone)[0]
    assert local["error"] is None and local["commands"] == []
    assert "missing here: addition>=1 (`make lab` installs them)" in local["out"]
    assert [command[-1] for command in colab["commands"]] == ["addition>=1"]


def clone_of_course(machine: Machine, dependencies: str = "dependencies = []") -> Path:
    clone = machine.folder / "clone"
    (clone / "notebooks").mkdir(parents=True)
    shutil.copytree(machine.root / "github" / COURSE.repository / "course_utils", clone / "course_utils")
    (clone / "pyproject.toml").write_text(f'[project]\nname = "course-utils"\n{dependencies}\n')
    return clone


@pytest.mark.usefixtures("one_kernel")
def test_in_a_real_kernel(machine, monkeypatch):
    kernels = machine.root / "jupyter" / "kernels" / "learner"
    kernels.mkdir(parents=True)
    argv = [str(machine.python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": argv, "display_name": "Learner", "language": "python", "env": machine.environment(COLAB)}
    (kernels / "kernel.json").write_text(json.dumps(spec))
    monkeypatch.setenv("JUPYTER_PATH", str(machine.root / "jupyter"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(machine.root / "runtime"))
    sources = [
        cell(),
        "import course_utils\nprint(course_utils.__file__)",
        cell(),
        "sorted(set(dir()) & {'Path', 'os'})",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    resources = {"metadata": {"path": str(machine.folder)}}
    NotebookClient(notebook, kernel_name="learner", timeout=120, resources=resources).execute()
    first, where, again, names = ("".join(o.get("text", "") for o in c.outputs) for c in notebook.cells)
    assert first == again and re.fullmatch(r"course_utils 0\.1\.0 is ready · unchanged: torch .*\n", first)
    assert where.startswith(str(machine.root / "venv"))
    assert names == "" and notebook.cells[3].outputs[0].data["text/plain"] == "[]", "the cell left imports behind"


def test_the_packages_own_build_states_what_pyproject_states(tmp_path):
    """The real package, built by the real backend: its metadata is the setup cell's list of requirements."""
    import tomllib

    if int(metadata.version("setuptools").partition(".")[0]) < 75:
        pytest.skip("this image's setuptools is older than pyproject.toml's build-system asks for")
    shutil.copytree(ROOT / "course_utils", tmp_path / "src/course_utils", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path / "src")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "-w", tmp_path, tmp_path / "src"], check=True, timeout=120, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        text = archive.read(next(name for name in names if name.endswith("METADATA"))).decode()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    stated = {
        str(Requirement(line)) for line in re.findall("^Requires-Dist: (.*)$", text, re.M) if "extra ==" not in line
    }
    assert stated == {str(Requirement(line)) for line in project["dependencies"]}
    assert f"Version: {setup_cell.read_version(ROOT)}\n" in text
    assert "course_utils/setup.py" in names


# The generated source


def test_the_cell_is_short_stable_under_ruff_and_names_its_constants():
    text = cell(Publication("octo/course", "feature/x"), "1.2.3", "lightning")
    assert len(text.splitlines()) <= 52
    assert 'REPOSITORY, REF, VERSION, EXTRAS = "octo/course", "feature/x", "1.2.3", "lightning"' in text
    ruff = Path(sys.executable).parent / "ruff"
    if not ruff.exists():
        pytest.skip("ruff is not in this environment")
    command = [ruff, "format", "--diff", "--line-length", "120", "--stdin-filename", "cell.py", "-"]
    done = subprocess.run(command, input=text + "\n", capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("value", ['"', "\\", "\n", "@REF@", "'; import os #", "é", "\u202e", "\0"])
def test_constants_are_quoted_or_refused(value):
    try:
        text = cell(version=value)
    except ValueError:
        assert not (value.isascii() and value.isprintable())
        return
    namespace = {}
    exec(text.splitlines()[1], namespace)
    assert namespace["VERSION"] == value and namespace["REF"] == "main"


# course_utils.setup, piece by piece


def test_a_loaded_module_that_is_not_the_installed_version_asks_for_one_restart():
    with pytest.raises(RuntimeError, match=r"numpy 2\.0\.2 is loaded, 1\.26\.4 is installed") as caught:
        setup.check_loaded({"numpy": "2.0.2", "pillow": "11.0"}, {"numpy": "1.26.4", "pillow": "11.3"})
    assert str(caught.value).lower().count("restart the session") == 1
    assert "pillow 11.0 is loaded" in str(caught.value)


@pytest.mark.parametrize(
    ("loaded", "installed"), [("2.14.1+cu130", "2.14.1"), ("2.11.0+cu128", "2.11.0+cu128"), ("2.0", None)]
)
def test_a_build_label_or_an_uninstalled_module_is_no_reason_to_restart(loaded, installed):
    assert setup.check_loaded({"torch": loaded}, {"torch": installed}) is None


def test_loaded_versions_import_nothing():
    code = """
    import sys
    from course_utils import setup
    before = set(sys.modules)
    assert setup.loaded_versions() == {}, setup.loaded_versions()
    assert not {"torch", "numpy", "PIL", "packaging"} & set(sys.modules)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, cwd=ROOT)


def test_a_replaced_package_is_reported():
    with pytest.raises(RuntimeError, match=r"replaced what this runtime came with \(torch 2.11.0\+cu128 → 2.14.1\)"):
        setup.check_unchanged({"torch": "2.11.0+cu128", "numpy": None}, {"torch": "2.14.1", "numpy": "2.0"})
    assert setup.check_unchanged({"torch": "1", "numpy": None}, {"torch": "1", "numpy": "2.0"}) is None


def test_an_installation_that_swaps_torch_in_spite_of_the_constraints_is_noticed(monkeypatch):
    versions = iter([{"torch": "2.11.0"}, {"torch": "2.14.1"}])
    monkeypatch.setattr(setup, "installed_versions", lambda names: next(versions))
    monkeypatch.setattr(setup, "requirements", lambda extras: [])
    monkeypatch.setattr(setup, "missing_requirements", lambda wanted: [Requirement("addition")])
    monkeypatch.setattr(setup, "install_requirements", lambda missing, pinned: None)
    with pytest.raises(RuntimeError, match="replaced what this runtime came with"):
        setup.prepare(install=True)


def test_a_pinned_package_out_of_range_is_never_replaced(monkeypatch):
    monkeypatch.setattr(setup.metadata, "version", lambda name: "1.26.4")
    with pytest.raises(RuntimeError, match=r"has numpy 1.26.4, but the course needs numpy<3,>=2.0: choose the newest"):
        setup.missing_requirements([Requirement("numpy>=2.0,<3")])
    assert [r.name for r in setup.missing_requirements([Requirement("tqdm>=2"), Requirement("psutil>=1")])] == ["tqdm"]


def test_a_requirement_that_cannot_be_reached_says_offline(monkeypatch):
    def fail(command, **options):
        raise subprocess.CalledProcessError(
            1, command, stderr="Temporary failure in name resolution\nERROR: none found"
        )

    monkeypatch.setattr(setup.subprocess, "run", fail)
    with pytest.raises(RuntimeError, match=r"seems to be offline, so tqdm could not be installed") as caught:
        setup.install_requirements([Requirement("tqdm")], {})
    assert caught.value.__suppress_context__
    assert str(caught.value).endswith("ERROR: none found")
