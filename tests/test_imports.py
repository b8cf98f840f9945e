"""What importing the course costs and touches, and which module may import which."""

import ast
import pkgutil
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest

import course_utils

ROOT = Path(__file__).resolve().parent.parent
MODULES = sorted(found.name for found in pkgutil.walk_packages(course_utils.__path__, "course_utils."))
SOURCES = sorted(
    path for folder in ("course_utils", "tools", "bench", "notebooks") for path in (ROOT / folder).rglob("*.py")
)

# What every lesson may use; any other module belongs to a lesson's contract in pyproject.toml.
SHARED = set(
    """course_utils.arguments course_utils.checkpointing course_utils.cpu_memory course_utils.driver
    course_utils.exercises course_utils.fast_images course_utils.feed course_utils.figures
    course_utils.gpu_specs course_utils.image_cache course_utils.images course_utils.machine
    course_utils.mem_tracker course_utils.memory_model course_utils.memory_step course_utils.memory_view
    course_utils.oom
    course_utils.photo_crops course_utils.photos course_utils.plots course_utils.preserve
    course_utils.progress course_utils.progress_code course_utils.recipe course_utils.resnet
    course_utils.scoreboard course_utils.setup course_utils.simulated_memory course_utils.timing
    course_utils.views course_utils.visible_devices course_utils.watch course_utils.workload""".split()
)

# Gone in Python 3.12 and 3.13, Colab's: https://docs.python.org/3/whatsnew/3.12.html#removed and 3.13.html#removed
REMOVED_BY_3_13 = set(
    """aifc asynchat asyncore audioop cgi cgitb chunk crypt distutils imghdr imp lib2to3 mailcap msilib nis nntplib
    ossaudiodev pipes smtpd sndhdr spwd sunau telnetlib uu xdrlib""".split()
)
HEAVY = ("torchvision", "sklearn", "skimage", "matplotlib", "IPython", "ipywidgets", "pynvml")


def python(code: str) -> str:
    """Run `code` in a fresh Python in the repository; returns what it printed."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def imports(source: str) -> set[str]:
    """The top-level modules that a source imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


def test_the_two_modules_of_every_lesson_import_fast():
    # Processor time, and the best of several: what else runs on the machine is not these modules' cost.
    code = (
        "import torch, time; started = time.process_time(); import course_utils.runtime, course_utils.monitor;"
        "print(time.process_time() - started)"
    )
    seconds = []
    for _ in range(8):
        seconds.append(float(python(code)))
        if seconds[-1] < 0.05:
            return
    pytest.fail(f"importing them adds {min(seconds) * 1000:.0f} ms to `import torch`; the limit is 50 ms")


def test_importing_everything_warns_of_nothing_and_starts_nothing():
    assert len(MODULES) > 5
    code = f"""
import importlib, sys, threading, warnings
import torch
warnings.filterwarnings("error", module="course_utils")  # what a dependency warns of at its own import is not ours
for name in {MODULES!r}:
    importlib.import_module(name)
print(torch.cuda.is_initialized(), "tools" in sys.modules, threading.active_count())
"""
    assert python(code) == "False False 1"


def test_heavy_packages_are_imported_where_they_are_used():
    code = f"import sys, course_utils.runtime, course_utils.monitor; print([n for n in {HEAVY!r} if n in sys.modules])"
    assert python(code) == "[]"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_source_needs_what_python_3_13_has_removed(path):
    source = path.read_text(encoding="utf-8")
    assert imports(source) & REMOVED_BY_3_13 == set()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # an unknown escape sequence is a SyntaxWarning since 3.12
        compile(source, str(path), "exec")


def test_the_search_for_imports_finds_them_everywhere():
    source = "def f():\n    from distutils.util import strtobool\n    import os, imp as old\nfrom .cgi import mine\n"
    assert imports(source) == {"distutils", "os", "imp"}


def test_every_module_is_a_lessons_or_shared():
    """A module that no contract names would be free to import any lesson's."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    lessons = {name for contract in contracts for name in contract.get("protected_modules", [])}
    assert lessons & SHARED == set()
    named = lessons | SHARED
    unnamed = [name for name in MODULES if not any(name == one or name.startswith(one + ".") for one in named)]
    assert unnamed == [], "add each to its lesson's contract in pyproject.toml, or to SHARED"
    assert sorted(named - set(MODULES)) == [], "these are named but do not exist"
