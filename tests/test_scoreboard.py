"""The scoreboard: one row a lesson, in order, and nothing read back that it could not have written."""

from __future__ import annotations

import itertools
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
    assert shown[0].alt == (
        "Scoreboard. Tesla T4: 02 nvidia_smi: 60.0 samples/s, busy 31 %; "
        "03 data_loading: 240.0 samples/s, 4.0 × the first, busy 88 %."
    )
    assert _labels(shown[0].axes[0]) == ["02 nvidia_smi", "03 data_loading\n4.0 × the first"]
    assert plots.render(shown[0]).png.startswith(b"\x89PNG")


def _labels(ax: Any) -> list[str]:
    return [label.get_text() for label in ax.get_yticklabels()]


def test_each_device_has_a_panel_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(plots, "show", shown.append)
    Scoreboard([FIRST, OTHER, THIRD]).draw()  # lesson 4 ran elsewhere, and its busy % is missing
    axes = shown[0].axes
    assert [ax.get_title(loc="left") for ax in axes] == ["Tesla T4", "", "CPU", ""]
    assert _labels(axes[0]) == ["02 nvidia_smi", "03 data_loading\n4.0 × the first"]
    assert _labels(axes[2]) == ["04 batch_size"]
    assert [bar.get_width() for bar in axes[2].patches] == [30.0] and not axes[3].patches
    assert shown[0].alt.endswith(" CPU: 04 batch_size: 30.0 samples/s, busy n/a.")
    assert axes[1].get_xlim() == axes[3].get_xlim() == (0, 115)
    with plots.style():
        shown[0].draw_without_rendering()
    assert axes[0].bbox.height > 1.2 * axes[2].bbox.height  # two bars need more room than one


@pytest.mark.filterwarnings("error:constrained_layout")
@pytest.mark.parametrize("devices", [1, 2])
def test_ten_lessons_with_long_titles_fit(monkeypatch: pytest.MonkeyPatch, devices: int) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(plots, "show", shown.append)
    device = "NVIDIA RTX PRO 6000 Blackwell Workstation $ Edition, and what a driver may add to it"[:80]
    title = "costs $\\frac$ of it, or $5 "
    rows = [
        Row(lesson, (title * 3)[:80], 10.0**lesson, 100.0, None, None, device[lesson % devices :])
        for lesson in range(1, 11)
    ]
    Scoreboard(rows).draw()
    figure = shown[0]
    plots.render(figure)  # a formula that cannot be parsed would raise here, and a layout that cannot fit would warn
    with plots.style():
        figure.draw_without_rendering()  # places everything at the figure's own size, for the measuring below
    page = figure.bbox
    for ax in figure.axes:
        texts = [*ax.texts, ax.title, ax._left_title, *ax.get_yticklabels()]
        for text in texts:
            box = text.get_window_extent()
            assert page.x0 - 1 <= box.x0 and box.x1 <= page.x1 + 1, text
        labels = [label.get_window_extent() for label in ax.get_yticklabels() if label.get_text()]
        assert not any(one.overlaps(other) for one, other in itertools.combinations(labels, 2))
    throughput, busy = figure.axes[:2]
    assert max(text.get_window_extent().x1 for text in throughput.texts) <= busy.get_window_extent().x0
