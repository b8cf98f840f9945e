"""The allocator's settings: which are asked for, by which variable, and whether it is too late to change them.

    set_allocator("expandable_segments:True")     # in the notebook's first cell
    allocator_settings()

PyTorch reads them once, when its CUDA allocator is first used. Measured without a GPU on torch 2.11 and 2.14: a value
set after `import torch` and before that counts, a later one does not; where both variables are set, the whole of
PYTORCH_CUDA_ALLOC_CONF counts and PYTORCH_ALLOC_CONF is not read.
"""

from __future__ import annotations

import os
import re
from collections.abc import MutableMapping
from dataclasses import dataclass

import torch

from course_utils.views import html_table, text_table

# The first one counts. PyTorch's source calls the second the primary name and the first one old.
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

# Those that the course speaks of (docs.pytorch.org/docs/stable/notes/cuda.html, "Optimizing memory usage").
KNOWN = {
    "expandable_segments": r"True|False",
    "max_split_size_mb": r"\d{2,9}",
    "garbage_collection_threshold": r"0?\.\d+",
    "roundup_power2_divisions": r"\d+|\[.*\]",
    "backend": r"native|cudaMallocAsync",
}
_LEAST_SPLIT_MB = 20  # c10/core/AllocatorConfig.cpp refuses less
TOO_LATE = (
    "Too late: CUDA has started in this process, and its allocator has read its settings. Restart the runtime and set "
    "them in the first cell."
)


@dataclass(frozen=True)
class AllocatorSettings:
    """What the environment asks for. `variable` is the one that counts, None where neither is set.

    `options` are its settings by name; `problems` are sentences; `changeable` says whether CUDA has not started yet.
    """

    variable: str | None
    options: dict[str, str]
    problems: tuple[str, ...]
    changeable: bool

    def __repr__(self) -> str:
        return text_table(("Allocator's settings", ""), self._rows())

    def _repr_html_(self) -> str:
        return html_table(("Allocator's settings", ""), self._rows())

    def _rows(self) -> list[tuple[str, str]]:
        return [
            ("variable", self.variable or "neither is set: PyTorch's defaults"),
            *self.options.items(),
            ("can be changed now", "yes" if self.changeable else "no: CUDA has started. Restart the runtime first."),
            *(("problem", text) for text in self.problems),
        ]


def allocator_settings(environment: MutableMapping[str, str] | None = None) -> AllocatorSettings:
    """Read the two variables (from `os.environ`, or `environment`); starts nothing, raises nothing because of them."""
    environment = os.environ if environment is None else environment
    given = [name for name in VARIABLES if environment.get(name)]
    changeable = not torch.cuda.is_initialized()
    if not given:
        return AllocatorSettings(None, {}, (), changeable)
    options, problems = _parse(environment[given[0]])
    if len(given) == 2:
        problems.append(f"Both {VARIABLES[0]} and {VARIABLES[1]} are set: the second is not read. Keep one.")
    return AllocatorSettings(given[0], options, tuple(problems), changeable)


def set_allocator(settings: str, environment: MutableMapping[str, str] | None = None) -> AllocatorSettings:
    """Ask for `settings`, such as "expandable_segments:True", before CUDA starts; "" asks for the defaults.

    They replace what was asked for before, under either name. RuntimeError if CUDA runs already. ValueError for
    unknown or malformed settings, and for expandable_segments together with max_split_size_mb: the second does not
    apply to such segments, and the two together made PyTorch fail (pytorch/pytorch#119452, #123548).
    """
    if torch.cuda.is_initialized():
        raise RuntimeError(TOO_LATE)
    _, problems = _parse(settings)
    if problems:
        raise ValueError(" ".join(problems))
    environment = os.environ if environment is None else environment
    for name in VARIABLES:
        environment.pop(name, None)
    if settings.strip():
        environment[VARIABLES[0]] = settings.strip()  # torch's own out-of-memory message recommends this name
    return allocator_settings(environment)


def _parse(text: str) -> tuple[dict[str, str], list[str]]:
    """The settings by name, and what is wrong with them."""
    options: dict[str, str] = {}
    problems = []
    for item in re.split(r",(?![^\[]*\])", text) if text.strip() else []:  # not at a comma inside brackets
        name, colon, value = (part.strip() for part in item.partition(":"))
        if not colon or name not in KNOWN:
            problems.append(f"{item.strip()[:60]!r} is no setting: write name:value, with one of {', '.join(KNOWN)}.")
        elif not re.fullmatch(KNOWN[name], value):
            problems.append(f"{name}:{value[:40]} is not a value that {name} takes.")
        else:
            options[name] = value
    if int(options.get("max_split_size_mb", _LEAST_SPLIT_MB)) < _LEAST_SPLIT_MB:
        problems.append(f"max_split_size_mb must be at least {_LEAST_SPLIT_MB}.")
    if options.get("expandable_segments") == "True" and "max_split_size_mb" in options:
        problems.append(
            "Use expandable_segments:True or max_split_size_mb, not both: the second does not apply to the first's "
            "segments, and together they have made PyTorch fail (pytorch/pytorch#119452, #123548)."
        )
    return options, problems
