"""Checks of what callers pass in, each with one sentence that names the argument and what it takes."""

from __future__ import annotations

import operator
from typing import Any


def whole(name: str, value: Any, least: int = 1) -> int:
    """`value` as an int if it is a whole number of at least `least`; NumPy's are, bools are not. ValueError if not."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least:
        raise ValueError(f"{name}={value!r:.80} must be a whole number of at least {least}.")
    return number
