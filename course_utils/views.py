"""How the course shows its records: plain text for a terminal, an escaped HTML table for a notebook.

Measuring lives elsewhere; nothing here measures, draws or prints. All text is treated as untrusted.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

MISSING = "n/a"
_LONGEST_CELL = 300


def number(value: float | None, unit: str = "", digits: int = 0) -> str:
    """`value` with thousands separated and its unit, or "n/a" for None: a missing value is never shown as 0."""
    if value is None:
        return MISSING
    return f"{value:,.{digits}f}{' ' + unit if unit else ''}"


def mebibytes(used_bytes: float | None) -> str:
    """Bytes as MiB (1 MiB = 1,048,576 bytes), the unit that nvidia-smi prints."""
    return number(None if used_bytes is None else used_bytes / 2**20, "MiB")


def gibibytes(used_bytes: float | None) -> str:
    """Bytes as GiB (1 GiB = 1,073,741,824 bytes), the unit that PyTorch's messages print."""
    return number(None if used_bytes is None else used_bytes / 2**30, "GiB", 1)


def text_table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in monospaced text: headers, a rule, one line a row, columns as wide as their longest cell."""
    lines = [[_clip(cell) for cell in row] for row in [headers, *rows]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
    rendered = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    ]
    return "\n".join([rendered[0], "  ".join("-" * width for width in widths), *rendered[1:]])


def html_table(headers: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "") -> str:
    """The same table in HTML, every cell escaped; the first cell of a row is its row header."""
    head = "".join(f'<th scope="col" style="text-align:left">{_escape(cell)}</th>' for cell in headers)
    body = "".join(
        f'<tr><th scope="row" style="text-align:left">{_escape(row[0])}</th>'
        + "".join(f'<td style="text-align:left">{_escape(cell)}</td>' for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    title = f'<caption style="text-align:left;font-weight:bold">{_escape(caption)}</caption>' if caption else ""
    return f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _clip(cell: str) -> str:
    return cell if len(cell) <= _LONGEST_CELL else cell[: _LONGEST_CELL - 1] + "…"


def _escape(cell: str) -> str:
    return html.escape(_clip(cell))
