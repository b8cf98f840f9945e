"""Which batch size to try next: the finder's strategy, apart from running anything.

1. With a prediction, begin at half of the predicted limit, which fits even if the truth is twice the prediction.
2. Correct the prediction by the peak that was read there, as carefully as can be, and go to 99 % of the new limit.
3. Once two peaks are read, the line through them replaces the prediction. Stop at 99 % of its limit.
4. Where readings are missing or do not lie on a line, bracket: grow until it fails, then halve the bracket.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_SURELY = 0.8  # a size that is predicted to need less than this share of the memory is tried at once
_LARGEST = 2**40
_FIRST, _FIRST_UNREAD = 8, 32  # the unread start lies higher, because growing costs sizes
_GROWTH, _LEAP = 4, 8
_OFF_THE_LINE, _STRAIGHT = 0.05, 0.01


@dataclass(frozen=True)
class Tried:
    """A size that was tried: whether it is good enough to return, and its peak if it ran and the peak was read."""

    size: int
    fits: bool
    peak_bytes: float | None = None


@dataclass(frozen=True)
class Search:
    """What bounds a search. `cap` None: only memory bounds it. `predicted(n)`: bytes at batch size n.

    All sizes are multiples of `multiple`; `budget_bytes` is what a peak may reach, None where no limit is known.
    """

    multiple: int = 1
    cap: int | None = None
    tolerance: float = 0.02
    budget_bytes: float | None = None
    predicted: Callable[[int], float] | None = None
    start: int | None = None

    def next_size(self, tried: Sequence[Tried]) -> int | None:
        """The size to try next, or None once the largest that fits is known within `tolerance`, or none fits.

        Where `tolerance` is less than one step of `multiple`, the answer is exact.
        """
        if not tried:
            return self._first()
        lowest = max((one.size for one in tried if one.fits), default=0)
        failed = min((one.size for one in tried if not one.fits), default=None)
        ceiling = (
            self.cap if failed is None else failed - self.multiple
        )  # the largest size that may still fit; 0 if none
        if ceiling is not None and (lowest >= ceiling or (failed and lowest >= (1 - self.tolerance) * ceiling)):
            return None
        wanted = self._by_readings(tried, lowest, failed)
        if wanted is not None and wanted <= lowest:
            return self._second_reading(tried, lowest)
        if wanted is None:
            wanted = self._by_bracket(tried, lowest, failed)
        return max(lowest + self.multiple, min(self._rounded(wanted), ceiling or _LARGEST))

    def _first(self) -> int:
        if self.predicted is not None and self.budget_bytes is not None:
            budget, predicted = self.budget_bytes, self.predicted
            if self.start is not None and predicted(self.start) <= budget:
                return self._rounded(self.start)
            if self.cap is not None and predicted(self.cap) <= _SURELY * budget:
                return self.cap
            # Rounded up: one sample is too little for BatchNorm.
            return self._rounded(math.ceil(self._largest(predicted) / 2))
        return self._rounded(self.start or (_FIRST if self.budget_bytes is not None else _FIRST_UNREAD))

    def _by_readings(self, tried: Sequence[Tried], lowest: int, failed: int | None) -> float | None:
        """The size to aim at; at most `lowest` if that is the answer; None if the readings do not tell."""
        read = sorted((one.size, one.peak_bytes) for one in tried if one.peak_bytes is not None)
        if self.budget_bytes is None or not read or not _on_a_line(read):
            return None
        if len(read) == 1:
            careful, bold = self._corrected(*read[0])
        else:
            careful = bold = self._on_the_line(read)
        if careful is None or (failed is not None and careful >= failed):
            return None  # flat, or contradicted by a failure
        if self._near(careful) <= lowest:
            # A careful estimate may be too careful by one step, which counts where the limit is a handful of samples.
            return lowest + self.multiple if bold is not None and self._near(bold) > lowest else lowest
        if self.predicted is not None or lowest == 0:
            return self._aim(careful)
        return self._without_prediction(careful, [one for one in read if one[0] <= lowest])

    def _second_reading(self, tried: Sequence[Tried], lowest: int) -> int | None:
        """Before one reading alone ends the search, another at half the size, which is sure to fit.

        The first may lie where the peak does not grow with the batch, because the optimizer's step needs the most.
        """
        half = self._rounded(math.ceil(lowest / 2))
        alone = sum(one.peak_bytes is not None for one in tried) == 1
        return half if alone and self.predicted is not None and half < lowest else None

    def _without_prediction(self, limit: float, read: Sequence[tuple[int, float]]) -> float:
        """Where to go from the largest size that fits, if the line may still bend upwards.

        It does where the optimizer's step needs the most at small batches and the activations at large ones. In
        proportion to the peak is safe even then, because a peak never grows faster than in proportion to the batch.
        """
        assert self.budget_bytes is not None
        size, peak = read[-1]
        safe = size * self.budget_bytes / peak
        bends = len(read) > 2 and peak > _extrapolated(read) * (1 + _STRAIGHT)
        if safe >= limit / 2 or (bends and safe >= 1.1 * size):
            enough_seen = len(read) > 2 and size >= limit / 2 and not bends
            return self._aim(limit) if enough_seen else min(safe, self._aim(limit))
        grows = len(read) > 1 and peak > read[-2][1] * (1 + _STRAIGHT)
        return max(safe, min(limit / 2, (_LEAP if grows else _GROWTH) * size))

    def _corrected(self, size: int, peak: float) -> tuple[float | None, float | None]:
        """The limit after one reading, by the most careful way to correct the prediction, and by the boldest.

        What the prediction missed may be a constant (a context), a factor, or memory for each sample.
        """
        predicted, budget = self.predicted, self.budget_bytes
        assert budget is not None
        if predicted is None:
            return (size * budget / peak if peak > 0 else None), _LARGEST
        here, limit = predicted(size), max(1, self._largest(predicted))
        fixed = predicted(limit) - (predicted(limit + 1) - predicted(limit)) * limit
        curves: list[Callable[[int], float]] = [
            lambda n: predicted(n) + peak - here,
            lambda n: predicted(n) * peak / here,
        ]
        if peak > fixed:
            curves.append(lambda n: fixed + (peak - fixed) * n / size)
        limits = [self._largest(curve) for curve in curves]
        return min(limits), max(limits)

    def _on_the_line(self, read: Sequence[tuple[int, float]]) -> float | None:
        """The limit by the line through two readings near it, and not so near each other that noise decides.

        With a prediction, it is the prediction, scaled and shifted to go through both: it may bend between them.
        """
        budget, predicted = self.budget_bytes, self.predicted
        assert budget is not None
        above = [index for index, (_, peak) in enumerate(read) if peak > budget]
        last = max(1, above[0] if above else len(read) - 1)
        size, peak = read[last]
        before = [one for one in read[:last] if one[0] <= 0.95 * size] or read[:last]
        earlier, peak_before = before[-1]
        scale = 1.0
        if predicted is not None and (growth := predicted(size) - predicted(earlier)) > _STRAIGHT * predicted(size):
            scale = (peak - peak_before) / growth
        elif predicted is None and peak > peak_before:
            return size + (budget - peak) * (size - earlier) / (peak - peak_before)
        if predicted is None or scale <= 0:
            return None  # flat
        return self._largest(lambda n: peak + scale * (predicted(n) - predicted(size)))

    def _by_bracket(self, tried: Sequence[Tried], lowest: int, failed: int | None) -> float:
        successes = sum(one.fits for one in tried)
        if failed is None:
            # Near a predicted limit grow by little at first, then faster; from nowhere, fourfold.
            near = self.predicted is not None and self.budget_bytes is not None
            return lowest * (min(_GROWTH, math.pow(1.05, 1 << min(successes - 1, 6))) if near else _GROWTH)
        if lowest == 0:  # down in ever larger steps: a start may be off by orders of magnitude
            return failed / math.pow(4 if self.budget_bytes is not None else 2, len(tried))
        return math.sqrt(lowest * failed) if failed > 2 * lowest else (lowest + failed) / 2

    def _aim(self, limit: float) -> float:
        """The size to go to; half of the tolerance is left for the limit's own error."""
        return self._share(limit, self.tolerance / 2)

    def _near(self, limit: float) -> float:
        """The size to be content with: a little below the aim, because the limit moves with each reading."""
        return self._share(limit, self.tolerance * 0.6)

    def _share(self, limit: float, less: float) -> float:
        steps = math.ceil((1 - less) * limit / self.multiple)
        return float(min(steps, math.floor(limit / self.multiple)) * self.multiple)

    def _largest(self, needed: Callable[[int], float]) -> int:
        """The largest size whose `needed(size)` is within the budget, 0 if none: by doubling, then by halving."""
        budget, step = self.budget_bytes or 0, 1
        while step < _LARGEST and needed(step) <= budget:
            step *= 2
        size = 0
        while step:
            if size + step <= _LARGEST and needed(size + step) <= budget:
                size += step
            step //= 2
        return size

    def _rounded(self, size: float) -> int:
        """Down to a multiple, not below the smallest and not above the cap."""
        return min(max(1, int(size) // self.multiple) * self.multiple, self.cap or _LARGEST)


def _on_a_line(read: Sequence[tuple[int, float]]) -> bool:
    """Whether the largest three readings are on one line, or bend upwards, as a peak of several phases does."""
    if len(read) < 3:
        return True
    return read[-1][1] >= _extrapolated(read) * (1 - _OFF_THE_LINE)


def _extrapolated(read: Sequence[tuple[int, float]]) -> float:
    """The peak of the last of three readings, if it were on the line through the two before it."""
    (n0, p0), (n1, p1), (n2, _) = read[-3:]
    return p1 + (p1 - p0) / (n1 - n0) * (n2 - n1)
