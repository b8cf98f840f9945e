"""The course's scoreboard: one row per lesson, so that you see what each one gained.

board = Scoreboard()
board.add(train().as_row(2, "nvidia_smi"))
board                                       # a table; board.draw() draws it once there are two rows
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from course_utils import views

VERSION = 1  # of `Scoreboard.to_dict`
_MOST_ROWS = 99
_LONGEST_TEXT = 80
_LONGEST_LABEL = 28  # characters in front of a bar
_LONGEST_HEADING = 38


@dataclass(frozen=True)
class Row:
    """One lesson's result; None is what the machine could not tell. An impossible value raises ValueError, by name."""

    lesson: int
    title: str
    samples_per_s: float
    busy_percent: float | None
    data_wait_percent: float | None
    peak_memory_bytes: int | None
    device: str

    def __post_init__(self) -> None:
        if type(self.lesson) is not int or not 1 <= self.lesson <= _MOST_ROWS:
            raise ValueError(f"lesson={self.lesson!r:.100} is no whole number from 1 to {_MOST_ROWS}")
        for name in ("title", "device"):
            value = getattr(self, name)
            if not isinstance(value, str) or not 1 <= len(value) <= _LONGEST_TEXT or not value.isprintable():
                raise ValueError(f"{name}={value!r:.100} is no text of 1 to {_LONGEST_TEXT} printable characters")
        for name, highest in (
            ("samples_per_s", 1e12),
            ("busy_percent", 100),
            ("data_wait_percent", 100),
            ("peak_memory_bytes", 1e18),
        ):
            value = getattr(self, name)
            if value is None and name != "samples_per_s":
                continue
            whole = name == "peak_memory_bytes"
            # NaN is not in the range either, and a whole number too large for a float is compared without trouble.
            if type(value) not in ((int,) if whole else (int, float)) or not 0 <= value <= highest:
                raise ValueError(
                    f"{name}={value!r:.100} is no {'whole ' if whole else ''}number from 0 to {highest:,.0f}"
                )


class Scoreboard:
    """Rows in the order of the lessons, at most one per lesson."""

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self._rows: dict[int, Row] = {}
        for row in rows:
            self.add(row)

    @property
    def rows(self) -> tuple[Row, ...]:
        """The rows in the order of the lessons."""
        return tuple(self._rows[lesson] for lesson in sorted(self._rows))

    def add(self, row: Row) -> None:
        """Add a lesson's row; a row of the same lesson is replaced."""
        if not isinstance(row, Row):
            raise TypeError(
                f"{type(row).__name__} is no Row: write board.add(measurement.as_row(2, 'nvidia_smi')), for example"
            )
        self._rows[row.lesson] = row

    def speedup(self, row: Row) -> float | None:
        """How many times the throughput of the first row on the same device; None for that first row itself."""
        first = next((other for other in self.rows if other.device == row.device), None)
        if first is None or first.lesson == row.lesson or not first.samples_per_s:
            return None
        return row.samples_per_s / first.samples_per_s

    def draw(self) -> None:
        """Draw throughput and busy % of every lesson, a panel for each device; a single row is shown as a table."""
        if len(self._rows) < 2:
            from IPython.display import display

            display(self)  # type: ignore[no-untyped-call,unused-ignore]
            return
        from course_utils import plots

        by_device: dict[str, list[Row]] = {}
        for row in self.rows:
            by_device.setdefault(row.device, []).append(row)
        heights = [0.5 * len(rows) + 1.2 for rows in by_device.values()]
        alt = " ".join(self._told(device, rows) for device, rows in by_device.items())
        figure, axes = plots.figure(f"Scoreboard. {alt}", len(by_device), columns=2, height_in=sum(heights))
        axes[0].get_gridspec().set_height_ratios(heights)
        for (device, rows), left, right in zip(by_device.items(), axes[::2], axes[1::2], strict=True):
            labels = [self._label(row) for row in rows]
            plots.bars(left, labels, [row.samples_per_s for row in rows], "")  # the axis has the unit: room for bars
            plots.bars(right, labels, [row.busy_percent for row in rows], "%")
            with plots.style():
                left.set_title(_plain(device, _LONGEST_HEADING))  # above both panels
                left.set_xlabel("throughput (samples/s)")
                right.set_xlabel("busy (%)")
                right.set_yticklabels([])
                right.set_xlim(0, 115)  # the same for all devices
                right.set_xticks([0, 50, 100])
        figure.alt = f"Scoreboard. {alt}"  # instead of what the bars added: lesson by lesson, with the gain
        plots.show(figure)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON; `from_dict` reads them back."""
        return {"version": VERSION, "rows": [asdict(row) for row in self.rows]}

    @classmethod
    def from_dict(cls, data: Any) -> Scoreboard:
        """The scoreboard that `to_dict` wrote. Raises ValueError, with what is wrong, for anything else."""
        if not isinstance(data, Mapping) or data.get("version") != VERSION or not isinstance(data.get("rows"), list):
            raise ValueError(f"this is no scoreboard of version {VERSION}: it needs a version and a list of rows")
        if len(data["rows"]) > _MOST_ROWS:
            raise ValueError(f"a scoreboard has at most {_MOST_ROWS} rows, this one has {len(data['rows']):,}")
        names = {field.name for field in fields(Row)}
        rows = []
        for number, item in enumerate(data["rows"], 1):
            if not isinstance(item, Mapping) or set(item) != names:
                raise ValueError(f"row {number} of the scoreboard needs exactly these: {', '.join(sorted(names))}")
            rows.append(Row(**item))
        if len({row.lesson for row in rows}) < len(rows):
            raise ValueError("the scoreboard has two rows for the same lesson")
        return cls(rows)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Scoreboard) and self.rows == other.rows

    __hash__ = None  # type: ignore[assignment]

    def _label(self, row: Row) -> str:
        gain = self.speedup(row)
        title = _plain(f"{row.lesson:02d} {row.title}", _LONGEST_LABEL)
        return f"{title}\n{gain:.1f} × the first" if gain else title

    def _told(self, device: str, rows: list[Row]) -> str:
        """What the picture shows of one device, for those who do not see it."""
        sentences = []
        for row in rows:
            gain = self.speedup(row)
            sentences.append(
                f"{row.lesson:02d} {row.title}: {row.samples_per_s:,.1f} samples/s"
                + (f", {gain:.1f} × the first" if gain else "")
                + f", busy {views.number(row.busy_percent, '%')}"
            )
        return f"{device}: {'; '.join(sentences)}."

    def _cells(self) -> list[list[str]]:
        return [
            [
                f"{row.lesson:02d} {row.title}",
                views.number(row.samples_per_s, digits=1),
                views.MISSING if (gain := self.speedup(row)) is None else f"{gain:.1f} ×",
                views.number(row.busy_percent, "%"),
                views.number(row.data_wait_percent, "%"),
                views.mebibytes(row.peak_memory_bytes),
                row.device,
            ]
            for row in self.rows
        ]

    def __repr__(self) -> str:
        return views.text_table(_HEADERS, self._cells()) if self._rows else "Scoreboard: no rows yet"

    def _repr_html_(self) -> str:
        return views.html_table(_HEADERS, self._cells(), "Scoreboard")


_HEADERS = ("lesson", "samples/s", "× first", "busy", "waiting for data", "peak memory", "device")


def _plain(text: str, longest: int) -> str:
    """Text for a picture: cut to `longest` characters, and a $ is a $, not the start of a formula."""
    text = text if len(text) <= longest else text[: longest - 1] + "…"
    return text.replace("$", r"\$")
