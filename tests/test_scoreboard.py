"""The scoreboard: one row a lesson, in order, and nothing read back that it could not have written."""

from __future__ import annotations

import json
import math
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

from course_utils import plots
from course_utils.scoreboard import Row, Scoreboard

FIRST = Row(2, "nvidia_smi", 60.0, 31.0, 68.5, 512 * 2**20, "Tesla T4")
THIRD = Row(3, "data_loading", 240.0, 88.0, 4.0, 600 * 2**20, "Tesla T4")
OTHER = Row(4, "batch_size", 30.0, None, None, None, "CPU")


def test_rows_are_in_the_order_of_the_lessons_and_replace_each_other() -> None:
    board = Scoreboard([THIRD, FIRST])
    assert board.rows == (FIRST, THIRD)
    better = replace(THIRD, samples_per_s=300.0)
    board.add(better)
    assert board.rows == (FIRST, better)
    with pytest.raises(TypeError, match=r"dict is no Row: write board\.add"):
        board.add({"lesson": 3})  # type: ignore[arg-type]
    with pytest.raises(FrozenInstanceError):
        FIRST.lesson = 5  # type: ignore[misc]


def test_speedup_compares_only_what_ran_on_the_same_device() -> None:
    board = Scoreboard([FIRST, THIRD, OTHER])
    assert [board.speedup(row) for row in board.rows] == [None, 4.0, None]
    assert Scoreboard([replace(FIRST, samples_per_s=0), THIRD]).speedup(THIRD) is None


def test_the_table_says_what_is_missing_and_escapes() -> None:
    board = Scoreboard([FIRST, THIRD, replace(OTHER, title="<b>x</b>")])
    lines = repr(board).splitlines()
    assert lines[0].split("  ")[0] == "lesson" and "n/a" in lines[-1] and "4.0 ×" in lines[3]
    assert "512 MiB" in lines[2] and "68 %" in lines[2]
    page = board._repr_html_()
    assert "&lt;b&gt;x" in page and "<b>x" not in page
    assert "no rows yet" in repr(Scoreboard()) and "<table" in Scoreboard()._repr_html_()


def test_to_dict_is_plain_and_comes_back() -> None:
    board = Scoreboard([FIRST, THIRD, OTHER])
    assert Scoreboard.from_dict(json.loads(json.dumps(board.to_dict()))) == board
    assert Scoreboard.from_dict(Scoreboard().to_dict()) == Scoreboard() != board


def _with(**changes: Any) -> dict[str, Any]:
    row = {**Scoreboard([FIRST]).to_dict()["rows"][0], **changes}
    return {"version": 1, "rows": [{name: value for name, value in row.items() if value is not ...}]}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (None, "no scoreboard"),
        ([], "no scoreboard"),
        ({}, "no scoreboard"),
        ({"version": 2, "rows": []}, "no scoreboard of version 1"),
        ({"version": 1, "rows": {}}, "no scoreboard"),
        ({"version": 1, "rows": [1]}, "row 1 of the scoreboard"),
        ({"version": 1, "rows": [{}] * 100}, "at most 99 rows"),
        ({"version": 1, "rows": _with()["rows"] * 2}, "two rows for the same lesson"),
        (_with(device=...), "row 1 of the scoreboard needs exactly"),
        (_with(extra=1), "row 1 of the scoreboard needs exactly"),
        (_with(lesson=0), "lesson=0"),
        (_with(lesson=True), "lesson=True"),
        (_with(lesson="2"), "lesson='2'"),
        (_with(title=""), "title=''"),
        (_with(title="x" * 81), "title="),
        (_with(title="a\nb"), "title="),
        (_with(title="a\x1b[2Jb"), "title="),
        (_with(device=7), "device=7"),
        (_with(samples_per_s=None), "samples_per_s=None"),
        (_with(samples_per_s=-1), "samples_per_s=-1"),
        (_with(samples_per_s=math.nan), "samples_per_s=nan"),
        (_with(samples_per_s=math.inf), "samples_per_s=inf"),
        (_with(samples_per_s="60"), "samples_per_s='60'"),
        (_with(busy_percent=100.5), "busy_percent=100.5"),
        (_with(busy_percent=True), "busy_percent=True"),
        (_with(data_wait_percent=-0.1), "data_wait_percent=-0.1"),
        (_with(peak_memory_bytes=1.5), "peak_memory_bytes=1.5"),
        (_with(peak_memory_bytes=10**400), "peak_memory_bytes=1"),
    ],
)
def test_what_cannot_be_is_refused_by_name(data: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        Scoreboard.from_dict(data)
    assert len(str(caught.value)) < 300


def test_two_rows_are_drawn_and_one_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(plots, "show", shown.append)
    Scoreboard([FIRST]).draw()
    assert shown == [] and "nvidia_smi" in capsys.readouterr().out
    Scoreboard([FIRST, THIRD]).draw()
    assert shown[0].alt.startswith("Scoreboard: from 60.0 samples/s in lesson 2 to 240.0 samples/s in lesson 3.")
    assert [label.get_text() for label in shown[0].axes[0].get_yticklabels()] == ["02 nvidia_smi", "03 data_loading"]
    assert plots.render(shown[0]).png.startswith(b"\x89PNG")
    Scoreboard([FIRST, OTHER]).draw()  # a missing value, and two devices
    assert [label.get_text() for label in shown[1].axes[0].get_yticklabels()] == [
        "02 nvidia_smi (Tesla T4)",
        "04 batch_size (CPU)",
    ]
