"""Where the names of points go in a drawing: beside their points, apart from each other. Plain geometry, in points."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_MARKER_PT = 16
_GAP_PT = 2  # what is kept free around a label
_HURTS = 10  # how much worse it is to cover words or a point than a line
_DISTANCES_PT = (12, 22, 34, 48, 64, 82, 104, 132, 164, 200, 240)
_ANGLES = (0, 180, *range(-15, -180, -15), *range(15, 180, 15))  # clockwise first: under a roof there is room
_DIRECTIONS = tuple((math.cos(math.radians(angle)), math.sin(math.radians(angle))) for angle in _ANGLES)


class Box(NamedTuple):
    """A rectangle with its sides along the axes."""

    left: float
    bottom: float
    right: float
    top: float


class Place(NamedTuple):
    """The middle of a label, seen from its point; `leader` where it is so far away that a line should lead to it."""

    dx: float
    dy: float
    leader: bool


def place_labels(
    spots: Sequence[tuple[float, float]],
    sizes: Sequence[tuple[float, float]],
    words: Sequence[Box],
    lines: Sequence[Box],
    frame: Box,
) -> list[Place]:
    """A place for each label of (width, height) whose point is at its spot, in this order.

    The nearest place inside `frame` that covers no point, no `words`, no `lines`, and no label or leader that came
    before. Where there is none, the one that covers least; a line is given up first.
    """
    points = [around(x, y, _MARKER_PT, _MARKER_PT) for x, y in spots]
    labels: list[Box] = []
    leaders: list[Box] = []
    places = []
    for (x, y), size in zip(spots, sizes, strict=True):
        width, height = size[0] + 2 * _GAP_PT, size[1] + 2 * _GAP_PT
        own = around(x, y, _MARKER_PT, _MARKER_PT)
        others = [point for point in points if not overlap(point, own)]
        best, least = Place(0.0, 0.0, False), math.inf
        for distance, (across, up) in itertools.product(_DISTANCES_PT, _DIRECTIONS):
            place = Place(across * (distance + width / 2), up * (distance + height / 2), distance > _DISTANCES_PT[0])
            box = around(x + place.dx, y + place.dy, width, height)
            covered = _HURTS * (width * height - overlap(box, frame))
            covered += sum(overlap(box, other) for other in itertools.chain(lines, leaders))
            covered += _HURTS * sum(overlap(box, other) for other in itertools.chain(points, labels, words))
            if place.leader and covered < least:
                # It may cross the roof, but no label and no other point.
                line = along([(x, y), (x + place.dx, y + place.dy)])
                covered += _HURTS * sum(overlap(bit, other) for bit in line for other in [*labels, *words, *others])
            if covered < least:
                best, least = place, covered
            if least <= 0.01:
                break
        places.append(best)
        box = around(x + best.dx, y + best.dy, width, height)
        labels.append(box)
        if best.leader:
            leaders += [bit for bit in along([(x, y), (x + best.dx, y + best.dy)]) if not overlap(bit, box)]
    return places


def along(corners: Iterable[tuple[float, float]]) -> list[Box]:
    """Small boxes along a line through `corners`."""
    boxes = []
    for (x0, y0), (x1, y1) in itertools.pairwise(corners):
        steps = max(1, int(math.hypot(x1 - x0, y1 - y0) / 4))
        boxes += [around(x0 + (x1 - x0) * i / steps, y0 + (y1 - y0) * i / steps, 5, 5) for i in range(steps + 1)]
    return boxes


def around(x: float, y: float, width: float, height: float) -> Box:
    """The box of this size with its middle at (x, y)."""
    return Box(x - width / 2, y - height / 2, x + width / 2, y + height / 2)


def overlap(one: Box, other: Box) -> float:
    """The area that two boxes share."""
    width = min(one.right, other.right) - max(one.left, other.left)
    height = min(one.top, other.top) - max(one.bottom, other.bottom)
    return width * height if width > 0 and height > 0 else 0.0
