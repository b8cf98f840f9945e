"""Reads what `nvidia-smi --query-gpu=… --format=csv` prints, as records; whatever the text, it never raises.

nvidia-smi prints memory in MiB (1 MiB = 1,048,576 bytes), whatever other tools call it; here it is bytes.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal

from course_utils import views
from course_utils.nvidia_smi_text import MAX_TEXT, clean_name, decode, explain, lines_of

MAX_GPUS = 1024
_MAX_PROBLEMS = 20
_MAX_RAW = 20_000
_MIB = 2**20

# Column -> (attribute of SmiGpu, units it may carry with their factors; "" is what `nounits` prints).
_PERCENT = {"": 1, "%": 1}
_BYTES = {"": _MIB, "B": 1, "KiB": 2**10, "MiB": _MIB, "GiB": 2**30}
_WATTS = {"": 1, "W": 1}
_MEGAHERTZ = {"": 1, "MHz": 1}
_CELSIUS = {"": 1, "C": 1}
_NUMBERS: dict[str, tuple[str, dict[str, int]]] = {
    "index": ("index", {"": 1}),
    "utilization.gpu": ("busy_percent", _PERCENT),
    "utilization.memory": ("memory_busy_percent", _PERCENT),
    "fan.speed": ("fan_percent", _PERCENT),
    "memory.used": ("used_bytes", _BYTES),
    "memory.free": ("free_bytes", _BYTES),
    "memory.total": ("total_bytes", _BYTES),
    "power.draw": ("power_w", _WATTS),
    "power.limit": ("power_limit_w", _WATTS),
    "temperature.gpu": ("temperature_c", _CELSIUS),
    "clocks.sm": ("sm_clock_mhz", _MEGAHERTZ),
    "clocks.current.sm": ("sm_clock_mhz", _MEGAHERTZ),
}
_TEXTS = {
    "name": "name",
    "gpu_name": "name",
    "uuid": "uuid",
    "gpu_uuid": "uuid",
    "driver_version": "driver_version",
    "pstate": "pstate",
}
_BITS = {"clocks_throttle_reasons.active": "throttle_bits", "clocks_event_reasons.active": "throttle_bits"}
_COUNTS = {"index", "used_bytes", "free_bytes", "total_bytes"}

_FIELD_NAME = re.compile(r"[a-z][a-z0-9_]{0,60}(?:\.[a-z0-9_]{1,60}){0,5}")
_HEADER_CELL = re.compile(rf"({_FIELD_NAME.pattern})(?: \[([^\]]{{0,20}})\])?")
_QUANTITY = re.compile(r"([+-]?[0-9]{1,15}(?:\.[0-9]{1,9})?) ?([^0-9\s]{0,10})")
_HEXADECIMAL = re.compile(r"0x([0-9A-Fa-f]{1,16})")
_ABSENT = {"", "-", "n/a", "not supported", "none"}
_BROKEN = {"unknown error", "err!", "gpu is lost", "gpu requires reset", "insufficient permissions", "unknown"}


@dataclass(frozen=True)
class SmiGpu:
    """One GPU as nvidia-smi shows it. None is what it did not say. `cells` holds every column as text."""

    index: int | None = None
    uuid: str | None = None
    name: str | None = None
    driver_version: str | None = None
    busy_percent: float | None = None
    memory_busy_percent: float | None = None
    used_bytes: int | None = None
    free_bytes: int | None = None
    total_bytes: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: float | None = None
    fan_percent: float | None = None
    sm_clock_mhz: float | None = None
    pstate: str | None = None
    throttle_bits: int | None = None
    cells: dict[str, str | None] = field(default_factory=dict, repr=False, hash=False)


@dataclass(frozen=True)
class SmiReport:
    """The GPUs of one query; `reason` says why there is none, `hint` what to do, `problems` what was left out.

    `raw` is what was printed, cut to 20,000 characters. `timed_out` is True where nvidia-smi did not answer in time.
    """

    gpus: tuple[SmiGpu, ...] = ()
    reason: str | None = None
    hint: str | None = None
    problems: tuple[str, ...] = ()
    raw: str = field(default="", repr=False)
    timed_out: bool = False

    def __repr__(self) -> str:
        lines = [views.text_table(GPU_HEADERS, gpu_rows(self.gpus))] if self.gpus else []
        return "\n".join([*lines, *self._sentences()])

    def _repr_html_(self) -> str:
        table = views.html_table(GPU_HEADERS, gpu_rows(self.gpus)) if self.gpus else ""
        return table + "".join(f"<p>{html.escape(sentence)}</p>" for sentence in self._sentences())

    def _sentences(self) -> list[str]:
        said = [text for text in (self.reason, self.hint) if text]
        return [*said, *(f"Left out: {problem}" for problem in self.problems)]


GPU_HEADERS = ("GPU", "name", "busy", "memory used", "memory total", "power", "temperature", "SM clock", "fan")


def gpu_rows(gpus: Sequence[SmiGpu]) -> list[list[str]]:
    """One row of text a GPU, under GPU_HEADERS."""
    return [
        [
            views.number(gpu.index),
            gpu.name or views.MISSING,
            views.number(gpu.busy_percent, "%"),
            views.mebibytes(gpu.used_bytes),
            views.mebibytes(gpu.total_bytes),
            views.number(gpu.power_w, "W"),
            views.number(gpu.temperature_c, "°C"),
            views.number(gpu.sm_clock_mhz, "MHz"),
            views.number(gpu.fan_percent, "%"),
        ]
        for gpu in gpus
    ]


def parse_query_csv(text: str | bytes, fields: Sequence[str] | None = None) -> SmiReport:
    """Read the output of `nvidia-smi --query-gpu=FIELDS --format=csv`, with or without `noheader` and `nounits`.

    `fields` names the columns where there is no header line; a header line, where there is one, is believed first.
    A cell such as "[N/A]" or "[Unknown Error]" becomes None and keeps its row. A row with a wrong number of cells is
    left out and reported in `problems`: shifting its values would put watts under degrees.
    """
    whole = decode(text)
    columns = [(name.strip(), "") for name in fields] if fields is not None else None
    expected = columns
    gpus: list[SmiGpu] = []
    problems: list[str] = [] if len(text) <= MAX_TEXT else [f"everything after the first {MAX_TEXT:,} characters."]
    sentences: list[str] = []
    for number, line in enumerate(lines_of(whole), start=1):
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) < 4 and explain(line) is not None:
            sentences.append(line)
        elif (header := _header(cells)) is not None:
            expected = header
        elif expected is None or (len(cells) == 1 and len(expected) > 1):
            sentences.append(line)
        elif len(cells) != len(expected):
            problems.append(
                f"line {number} has {len(cells)} cells where {len(expected)} were expected "
                "(a decimal comma would do that), so it was not read."
            )
        elif len(gpus) >= MAX_GPUS:
            problems.append(f"line {number}: more than {MAX_GPUS} GPUs.")
        else:
            gpus.append(_gpu(expected, cells, problems))
    if gpus:
        problems += [f"nvidia-smi also said: {sentence[:200]}" for sentence in sentences]
        return SmiReport(tuple(gpus), None, None, _bounded(problems), whole[:_MAX_RAW])
    reason, hint = _why_none(sentences, problems, bool(whole.strip()))
    return SmiReport((), reason, hint, _bounded(problems), whole[:_MAX_RAW])


def _why_none(sentences: Sequence[str], problems: Sequence[str], any_text: bool) -> tuple[str, str | None]:
    for sentence in sentences:
        if known := explain(sentence):
            return known
    if sentences:
        return f"nvidia-smi listed no GPU; it said: {sentences[0][:200]}", None
    if problems:
        return "No row of nvidia-smi's answer could be read.", None
    return ("nvidia-smi listed no GPU." if any_text else "nvidia-smi printed nothing."), None


def _header(cells: Sequence[str]) -> list[tuple[str, str]] | None:
    matches = [_HEADER_CELL.fullmatch(cell) for cell in cells]
    found = [(match[1], match[2] or "") for match in matches if match]
    known = any(name in _NUMBERS or name in _TEXTS or "." in name or unit for name, unit in found)
    return found if known and len(found) == len(cells) else None


def _gpu(columns: Sequence[tuple[str, str]], cells: Sequence[str], problems: list[str]) -> SmiGpu:
    texts = {name: _text(cell) for (name, _), cell in zip(columns, cells, strict=True)}
    values: dict[str, object] = {}
    for (column, unit), cell in zip(columns, cells, strict=True):
        complaint = _broken_cell(cell)
        if column in _NUMBERS:
            attribute, units = _NUMBERS[column]
            values[attribute] = value = _quantity(cell, unit, units, whole=attribute in _COUNTS)
            if value is None and complaint is None and not _is_absent(cell):
                complaint = cell
        elif column in _TEXTS:
            values[_TEXTS[column]] = clean_name(texts[column])
        elif column in _BITS:
            bits = _HEXADECIMAL.fullmatch(cell)
            values[_BITS[column]] = int(bits[1], 16) if bits else None
        if complaint is not None:
            problems.append(f"{column} of GPU {texts.get('index') or len(problems)}: {complaint[:60]!r}.")
    return SmiGpu(**values, cells=texts)  # type: ignore[arg-type]


def _quantity(cell: str, header_unit: str, units: dict[str, int], *, whole: bool) -> float | int | None:
    found = _QUANTITY.fullmatch(cell)
    factor = units.get((found[2] or header_unit) if found else "?")
    if found is None or factor is None:
        return None
    value = Decimal(found[1]) * factor
    if value < 0 and units is not _CELSIUS:
        return None
    return int(value) if whole else float(value)


def _inner(cell: str) -> str:
    return cell.removeprefix("[").removesuffix("]").strip().lower()


def _is_absent(cell: str) -> bool:
    return _inner(cell) in _ABSENT


def _broken_cell(cell: str) -> str | None:
    bracketed = cell.startswith("[") and cell.endswith("]")
    return cell if (bracketed or _inner(cell) in _BROKEN) and not _is_absent(cell) else None


def _text(cell: str) -> str | None:
    return None if _is_absent(cell) or _broken_cell(cell) is not None else cell[:300]


def _bounded(problems: Sequence[str]) -> tuple[str, ...]:
    more = len(problems) - _MAX_PROBLEMS
    return (*problems[:_MAX_PROBLEMS], f"and {more} more.") if more > 0 else tuple(problems)
