"""How FLOPs, rates and shares are written, and the check that a number can be one of them."""

from __future__ import annotations

import math

from course_utils.views import MISSING, number

_PREFIXES = ("", "k", "M", "G", "T", "P", "E")


def si(value: float | None, unit: str) -> str:
    """`value` with a decimal prefix and three significant digits: si(2.43e10, "FLOP") is "24.3 GFLOP"."""
    if value is None:
        return MISSING
    power = 0
    while abs(value) / 1000**power >= 999.5 and power < len(_PREFIXES) - 1:  # 999.6 would be written 1,000
        power += 1
    scaled = float(f"{value / 1000**power:.3g}")
    digits = 0 if scaled == 0 else min(3, max(0, 2 - math.floor(math.log10(abs(scaled)))))
    if power == 0 and float(value).is_integer():  # a count
        scaled, digits = float(value), 0
    return number(scaled, _PREFIXES[power] + unit, digits)


def percent(share: float | None) -> str:
    """A share of 1 in percent, with three significant digits at most."""
    return MISSING if share is None else f"{share:.0%}" if share >= 1 else f"{share:.1%}"


def positive(name: str, value: float) -> float:
    """`value` as a float, if it is a positive number; ValueError if not."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} must be a positive number, not {value!r:.80}.")
    return float(value)
