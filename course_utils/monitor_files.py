"""Saves a trace as JSON or CSV, by the file's suffix, and reads it back. No pickle: a file from elsewhere runs nothing.

JSON holds one list a metric. CSV has the same facts about the source in its first line, behind "# ", then one row a
sample and device, empty where nothing was read: `pandas.read_csv(path, comment="#")` reads it.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import secrets
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from course_utils.monitor_trace import Sample, Trace
from course_utils.monitor_types import Device, Reading, finite, percent, whole
from course_utils.nvidia_smi_text import clean_name

MAX_FILE_BYTES = 50_000_000
_FORMAT = "course_utils trace"
_VERSION = 1
_METRICS = Reading.__slots__
_CHECKS = {"busy_percent": percent, "memory_busy_percent": percent, "throttle_bits": whole}
_MAX_NOTES = 100


def save(trace: Trace, path: str | Path) -> Path:
    """Write `trace` to `path` (.json or .csv). The file appears whole or not at all. Returns the path."""
    path = _checked(path)
    text = _to_json(trace) if path.suffix.lower() == ".json" else _to_csv(trace)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"There is no folder {str(path.parent)!r}: make it first, or save somewhere else.")
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def load(path: str | Path) -> Trace:
    """Read a trace that `save` wrote. ValueError, in one sentence that names the file, for anything else."""
    path = _checked(path)
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {str(path)!r}.")
    with path.open("rb") as file:
        content = file.read(MAX_FILE_BYTES + 1)
    try:
        if len(content) > MAX_FILE_BYTES:
            raise ValueError(f"it is larger than {MAX_FILE_BYTES // 10**6} MB")
        text = content.decode("utf-8")
        facts, times, columns = _from_json(text) if path.suffix.lower() == ".json" else _from_csv(text)
        return _build(facts, times, columns)
    except (ValueError, TypeError, KeyError, LookupError, AttributeError, RecursionError, csv.Error) as error:
        what = str(error) if type(error) is ValueError else f"its content is malformed ({type(error).__name__})"
        raise ValueError(
            f"{path.name!r} is not a trace that this course saved: {what[:200]}. Save one with Monitor.save(path)."
        ) from None


def _checked(path: str | Path) -> Path:
    path = Path(path)
    if path.suffix.lower() not in (".json", ".csv"):
        raise ValueError(f"A trace is saved as .json or .csv: give {path.name!r} one of these two endings.")
    return path


def _facts(trace: Trace) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "version": _VERSION,
        "source": trace.source,
        "label": trace.label,
        "interval_s": trace.interval_s,
        "failed": trace.failed,
        "timed_out": trace.timed_out,
        "notes": list(trace.notes[:_MAX_NOTES]),
        "devices": [asdict(device) for device in trace.devices],
    }


def _to_json(trace: Trace) -> str:
    columns = [{metric: trace.values(metric, device) for metric in _METRICS} for device in range(len(trace.devices))]
    return json.dumps({**_facts(trace), "time_s": trace.times_s, "readings": columns}, allow_nan=False) + "\n"


def _from_json(text: str) -> tuple[Any, Any, Any]:
    content = json.loads(text)
    if not isinstance(content, dict):
        raise ValueError("it holds no JSON object")
    return content, content.get("time_s"), content.get("readings")


def _to_csv(trace: Trace) -> str:
    buffer = io.StringIO()
    buffer.write(f"# {json.dumps(_facts(trace), allow_nan=False)}\n")
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["time_s", "device", *_METRICS])
    for sample in trace.samples:
        for device, reading in enumerate(sample.readings):
            values = (getattr(reading, metric) for metric in _METRICS)
            writer.writerow([repr(sample.time_s), device, *("" if value is None else repr(value) for value in values)])
    return buffer.getvalue()


def _from_csv(text: str) -> tuple[Any, Any, Any]:
    first, _, rest = text.partition("\n")
    if not first.startswith("# {"):
        raise ValueError("its first line does not describe a trace")
    facts = json.loads(first[2:])
    rows = csv.reader(io.StringIO(rest))
    if next(rows, None) != ["time_s", "device", *_METRICS]:
        raise ValueError("its columns are not those of a trace")
    devices = len(facts["devices"])
    times: list[float] = []
    columns: list[dict[str, list[Any]]] = [{metric: [] for metric in _METRICS} for _ in range(devices)]
    for number, row in enumerate(rows):
        if len(row) != 2 + len(_METRICS) or row[1] != str(number % devices):
            raise ValueError(f"row {number + 1} has the wrong number of cells or the wrong device")
        if number % devices == 0:
            times.append(float(row[0]))
        elif float(row[0]) != times[-1]:
            raise ValueError(f"row {number + 1} has another time than its sample")
        for metric, cell in zip(_METRICS, row[2:], strict=True):
            columns[number % devices][metric].append(json.loads(cell) if cell else None)
    if devices and any(len(column) != len(times) for column in columns[-1].values()):
        raise ValueError("its last sample is incomplete")
    return facts, times, columns


def _build(facts: Any, times: Any, columns: Any) -> Trace:
    if facts.get("format") != _FORMAT:
        raise ValueError("it does not say that it is one")
    if facts.get("version") != _VERSION:
        raise ValueError(f"it has version {str(facts.get('version'))[:20]}, and this course reads version {_VERSION}")
    devices = tuple(_device(entry) for entry in _list(facts["devices"], "devices"))
    times = [_number(value, "time_s") for value in _list(times, "time_s")]
    if any(later < earlier for earlier, later in itertools.pairwise([0.0, *times])):
        raise ValueError("its times run backwards")
    by_device = [_readings(column, len(times)) for column in _list(columns, "readings")]
    if len(by_device) != len(devices) or not devices:
        raise ValueError("it has not one list of readings for each device")
    samples = (Sample(time_s, tuple(together)) for time_s, *together in zip(times, *by_device, strict=True))
    return Trace(
        source=_text(facts["source"], "source"),
        label=_text(facts["label"], "label"),
        devices=devices,
        samples=tuple(samples),
        interval_s=_number(facts["interval_s"], "interval_s"),
        failed=_count(facts["failed"], "failed"),
        timed_out=_count(facts["timed_out"], "timed_out"),
        notes=tuple(_text(note, "notes") for note in _list(facts["notes"], "notes")[:_MAX_NOTES]),
    )


def _device(entry: Any) -> Device:
    if not isinstance(entry, dict) or set(entry) != {one.name for one in fields(Device)}:
        raise ValueError("a device lacks a field, or has one too many")
    uuid, limit = entry["uuid"], entry["power_limit_w"]
    index, torch_index, total_bytes = (
        None if entry[key] is None else _count(entry[key], key) for key in ("index", "torch_index", "total_bytes")
    )
    return Device(
        name=clean_name(_text(entry["name"], "name")) or "unknown",
        index=index,
        torch_index=torch_index,
        uuid=None if uuid is None else _text(uuid, "uuid"),
        total_bytes=total_bytes,
        power_limit_w=None if limit is None else _number(limit, "power_limit_w"),
    )


def _readings(column: Any, length: int) -> list[Reading]:
    if not isinstance(column, dict) or set(column) != set(_METRICS):
        raise ValueError("its readings are not those of a trace")
    checked = [_values(metric, _list(column[metric], metric), length) for metric in _METRICS]
    return [Reading(*values) for values in zip(*checked, strict=True)]


def _values(metric: str, values: Sequence[Any], length: int) -> list[Any]:
    if len(values) != length:
        raise ValueError(f"{metric} has {len(values)} values for {length} samples")
    check = _CHECKS.get(metric, finite)
    checked = [None if value is None else check(value) for value in values]
    if [value is None for value in checked] != [value is None for value in values]:
        raise ValueError(f"{metric} holds a value that is impossible")
    return checked


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{name} is missing or no list")
    return value


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} is no text")
    return value[:300]


def _number(value: Any, name: str) -> float:
    number = finite(value)
    if number is None or number < 0:
        raise ValueError(f"{name} is no number of at least 0")
    return number


def _count(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise ValueError(f"{name} is no whole number of at least 0")
    return value
