"""Runs the benchmarks one after the other and prints one report: `python -m bench [--only NAMES] [--json FILE]`.

Each benchmark is a function that returns a `report.Section`. A peer that is not installed is a note in its section.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from bench import finders, loaders, memory, monitoring
from bench.report import Section, as_record, as_text, header

BENCHMARKS: dict[str, Callable[..., Section]] = {
    "finders": finders.measure,
    "loaders": loaders.measure,
    "memory": memory.measure,
    "monitoring": monitoring.measure,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for; returns the exit status."""
    asked = _parse(arguments)
    head = header()
    print("\n".join(f"{name}: {value}" for name, value in head.items()))
    sections = []
    for name in asked.only:
        started = time.perf_counter()
        section = BENCHMARKS[name](asked.quick, progress=sys.stderr.isatty())
        section = replace(section, seconds=time.perf_counter() - started)
        sections.append(section)
        print(f"\n{as_text(section)}", flush=True)
    if asked.json is not None:
        asked.json.write_text(json.dumps(as_record(head, sections), indent=1) + "\n", encoding="utf-8")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Our tools and the peers', side by side.")
    parser.add_argument("--only", type=_names, default=list(BENCHMARKS), metavar="NAME,...", help=", ".join(BENCHMARKS))
    parser.add_argument("--quick", action="store_true", help="fewer cases and repeats: a check, not a measurement")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the same, and the records behind it, as JSON")
    return parser.parse_args(arguments)


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in BENCHMARKS:
            raise argparse.ArgumentTypeError(f"there is no benchmark {name!r}: choose from {', '.join(BENCHMARKS)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
