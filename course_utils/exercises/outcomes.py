"""What this process has seen of the exercises: for each one the best status and how many checks it took.

It lives as long as the kernel; `course_utils.progress` carries it from one notebook to the next.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

Status = Literal["passed", "not yet", "not attempted", "error"]

NAME = re.compile(r"[a-z][a-z0-9_-]{0,23}")  # of an exercise: short enough for the progress code
_MODULE = re.compile(r"(?:.*\.)?lesson(\d\d)")

# From the best to the worst. "not attempted" is no outcome: an exercise without one has not been attempted.
RANKS: tuple[Status, ...] = ("passed", "not yet", "error")


class Outcome(NamedTuple):
    """The best status of an exercise, and the number of attempts: those after the first "passed" do not count."""

    status: Status
    attempts: int


_seen: dict[str, Outcome] = {}


def record(module: str, name: str, status: Status) -> None:
    """Note one check of the exercise `name` whose solution is in `module`; only lessons' exercises are noted."""
    lesson = _MODULE.fullmatch(module)
    if lesson is None or status == "not attempted":
        return
    key = f"{lesson[1]}.{name}"
    before = _seen.get(key)
    if before is None:
        _seen[key] = Outcome(status, 1)
    elif before.status != "passed":
        _seen[key] = Outcome(better(before.status, status), before.attempts + 1)


def outcomes() -> dict[str, Outcome]:
    """A copy of what was recorded: "02.busier" -> (best status, attempts). Not in it: not attempted."""
    return dict(_seen)


def better(one: Status, other: Status) -> Status:
    """The better of two statuses."""
    return min(one, other, key=RANKS.index)
