"""The progress code: what it carries, what pasting may do to it, and what no code may do."""

from __future__ import annotations

import json
import random
import re
import string
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from course_utils import progress as progress_module
from course_utils import progress_code
from course_utils.exercises.outcomes import Outcome
from course_utils.progress import MOST_ATTEMPTS, Progress, ProgressError, decode, resume
from course_utils.progress_code import LONGEST_CODE
from course_utils.scoreboard import Row, Scoreboard

FIRST = Row(2, "nvidia_smi", 60.1, 31.0, 68.5, 512 * 2**20, "Tesla T4")
THIRD = Row(3, "data_loading", 240.0, None, None, None, "CPU (2 threads)")
OUTCOMES = {
    "01.dtype": Outcome("passed", 1),
    "02.busier": Outcome("not yet", 7),
    "02.parse": Outcome("error", 2),
}
PROGRESS = Progress(Scoreboard([FIRST, THIRD]), OUTCOMES)
CODE = PROGRESS.code()


def forged(payload: object) -> str:
    """A code with a right checksum around whatever it is given."""
    return progress_code.write(payload if isinstance(payload, str) else json.dumps(payload, separators=(",", ":")))


def refused(code: object) -> ProgressError:
    with pytest.raises(ProgressError) as caught:
        decode(code)
    assert 20 < len(str(caught.value)) < 400 and "\n" not in str(caught.value)
    return caught.value


# --- there and back ---------------------------------------------------------------------------------------------


def test_a_code_is_one_plain_line_and_comes_back() -> None:
    assert re.fullmatch(r"GPUCOURSE1:[A-Za-z0-9_-]+\.", CODE)
    assert decode(CODE) == PROGRESS and decode(CODE).code() == CODE
    assert decode(Progress().code()) == Progress() != PROGRESS


def test_a_code_written_by_the_first_version_of_the_course_is_still_read() -> None:
    """Learners keep their codes: a change that cannot read this one needs another version in front of it."""
    kept = (
        "GPUCOURSE1:eNpNyrEKwjAURuFXKf-kcAnJbavF1RdwqFMI5UqCBmIsTSuI-O4qLi5n-DjWWibke_RRhnKNoI1WhmpDm0611HLDXUf"
        "oQ0lS9Q0c2ZrgZZYh3cTHfAZxoykvKf0F-8OxWnE1X6YgvqzhHD2hjfLzYwzYYTQgaFanpcQwfSBvfzDKVL5DYLzcGzfULdoBukSb."
    )
    assert decode(kept) == PROGRESS


PRINTABLE = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=80).filter(str.isprintable)
PERCENT = st.none() | st.floats(0, 100) | st.integers(0, 100)
ROWS = st.builds(
    Row,
    st.integers(1, 99),
    PRINTABLE,
    st.floats(0, 1e12) | st.integers(0, 10**12),
    PERCENT,
    PERCENT,
    st.none() | st.integers(0, 10**18),
    PRINTABLE,
)
KEYS = st.from_regex(r"0[1-9]\.[a-z][a-z0-9_-]{0,23}|[1-9][0-9]\.[a-z][a-z0-9_-]{0,23}", fullmatch=True)
HELD = st.builds(Outcome, st.sampled_from(["passed", "not yet", "error"]), st.integers(1, 10**6))
PROGRESSES = st.builds(
    Progress,
    st.lists(ROWS, max_size=10).map(Scoreboard),
    st.dictionaries(KEYS, HELD, max_size=12),
)


@settings(max_examples=60, deadline=None)
@given(PROGRESSES)
@example(Progress(Scoreboard([replace(FIRST, samples_per_s=-0.0, busy_percent=99.99, peak_memory_bytes=1)])))
def test_any_progress_comes_back_but_for_the_rounding(progress: Progress) -> None:
    code = progress.code()
    assert len(code) <= LONGEST_CODE
    back = decode(code)
    assert back.code() == code
    assert back.outcomes == {
        key: Outcome(status, min(attempts, MOST_ATTEMPTS)) for key, (status, attempts) in progress.outcomes.items()
    }
    assert len(back.board.rows) == len(progress.board.rows)
    for row, other in zip(progress.board.rows, back.board.rows, strict=True):
        assert row.lesson == other.lesson
        assert other.samples_per_s == pytest.approx(row.samples_per_s, rel=1e-4, abs=1e-320)
        for name in ("busy_percent", "data_wait_percent"):
            assert getattr(other, name) == pytest.approx(getattr(row, name), abs=0.051)
        assert (other.peak_memory_bytes is None) == (row.peak_memory_bytes is None)
        assert 0 <= (other.peak_memory_bytes or 0) - (row.peak_memory_bytes or 0) < 1024
        for name in ("title", "device"):
            mine, theirs = getattr(row, name), getattr(other, name)
            assert theirs == mine or (theirs[-1] == "…" and mine.startswith(theirs[:-1]))


WORDS = """measure before you change the loader because a busy device is what counts and waiting costs throughput on
every step of the epoch while workers decode images and the batch moves over the bus in pinned memory""".split()


def titled(rng: random.Random, letters: Callable[[random.Random], str]) -> Progress:
    """Ten lessons, thirty exercises, titles and devices of 80 characters, nothing round."""
    rows = [
        Row(
            lesson,
            letters(rng)[:80],
            rng.uniform(1e3, 1e5),
            rng.uniform(0, 100),
            rng.uniform(0, 100),
            rng.randrange(2**33, 2**37),
            letters(random.Random(lesson % 2))[:80],
        )
        for lesson in range(1, 11)
    ]
    outcomes = {
        f"{lesson:02}.{''.join(rng.choices(string.ascii_lowercase, k=12))}": Outcome("not yet", rng.randint(1, 999))
        for lesson in range(1, 11)
        for _ in range(3)
    }
    return Progress(Scoreboard(rows), outcomes)


@pytest.mark.parametrize("seed", range(5))
def test_ten_lessons_with_long_titles_fit_uncut(seed: int) -> None:
    progress = titled(random.Random(seed), lambda rng: " ".join(rng.choices(WORDS, k=40)))
    assert all(len(row.title) == len(row.device) == 80 for row in progress.board.rows)
    code = progress.code()
    assert len(code) < 2000
    assert [row.title for row in decode(code).board.rows] == [row.title for row in progress.board.rows]


@pytest.mark.parametrize("names", [12, 24])
@pytest.mark.parametrize("first", [0x4E00, 0x20000], ids=["three bytes", "four bytes"])
def test_text_that_cannot_be_compressed_is_cut_and_everything_else_stays(first: int, names: int) -> None:
    rng = random.Random(1)
    text = titled(rng, lambda rng: "".join(chr(first + rng.randrange(20_000)) for _ in range(80)))
    letters = string.ascii_lowercase + string.digits + "_-"
    progress = Progress(
        text.board,
        {f"{key[:3]}a{''.join(rng.choices(letters, k=names - 1))}": outcome for key, outcome in text.outcomes.items()},
    )
    code = progress.code()
    assert len(code) <= LONGEST_CODE
    back = decode(code)
    assert all(row.title.endswith("…") and 5 <= len(row.title) < 80 for row in back.board.rows)
    assert back.outcomes == progress.outcomes and len(back.board.rows) == 10


def test_more_than_a_code_can_hold_is_told() -> None:
    rng = random.Random(0)
    many = {
        f"{lesson:02}.{''.join(rng.choices(string.ascii_lowercase, k=24))}": Outcome("passed", 1)
        for lesson in range(1, 100)
    }
    with pytest.raises(ProgressError, match="0 lessons and 99 exercises are more than one progress code holds"):
        Progress(outcomes=many).code()


# --- what pasting does to a code --------------------------------------------------------------------------------


def wrapped(code: str, width: int, end: str) -> str:
    return end.join(code[start : start + width] for start in range(0, len(code), width))


@pytest.mark.parametrize(
    "pasted",
    [
        f"  {CODE}\n",
        f'"{CODE}"',
        f"“{CODE}”",
        f"`{CODE}`",
        f'progress = resume("{CODE}")  # mine',
        f"My code is:\n\n{CODE}\n\nProgress code: copy it",
        CODE.rstrip("."),
        CODE.lower().split(":")[0] + ":" + CODE.split(":")[1],
        wrapped(CODE, 20, "\n"),
        wrapped(CODE, 20, "\r\n> "),
        wrapped(CODE, 7, " "),
        wrapped(CODE, 3, "\u200b"),
        wrapped(CODE, 3, "\u00ad"),
        wrapped(CODE, 9, "\u00a0\ufeff\u2060\u2028\t"),
        "".join(chr(ord(letter) + 0xFEE0) for letter in CODE),  # full-width letters
    ],
)
def test_what_pasting_adds_does_not_matter(pasted: str) -> None:
    assert decode(pasted) == PROGRESS


def code_with(part: str) -> str:
    """A code in whose base64 `part` stands, and no hyphen apart from it."""
    for number in range(1, 200_000):
        code = Progress(Scoreboard([replace(FIRST, peak_memory_bytes=1024 * number)])).code()
        if part in code and "-" not in code.replace(part, "", 1):
            return code
    raise AssertionError(f"no code with {part}")


@pytest.mark.parametrize("dash", "‐‑‒–—―−﹘﹣－")
def test_a_typographic_dash_is_a_hyphen(dash: str) -> None:
    code = code_with("-")
    assert decode(code.replace("-", dash)) == decode(code)


@pytest.mark.parametrize("dash", ["–", "—"])
def test_one_long_dash_may_stand_for_two_hyphens(dash: str) -> None:
    code = code_with("--")
    assert decode(code.replace("--", dash)) == decode(code)


# --- what is refused --------------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(CODE) - 1), st.sampled_from(string.printable + "—–é") | st.characters())
def test_any_single_changed_character_is_refused_or_means_the_same(place: int, character: str) -> None:
    changed = CODE[:place] + character + CODE[place + 1 :]
    try:
        progress = decode(changed)
    except ProgressError:
        return
    assert progress == PROGRESS


def test_every_other_letter_in_every_place_of_the_base64_is_refused() -> None:
    start = CODE.index(":") + 1
    alphabet = string.ascii_letters + string.digits + "-_"
    survivors = []
    for place in range(start, len(CODE) - 1):
        for letter in set(alphabet) - {CODE[place]}:
            try:
                decode(CODE[:place] + letter + CODE[place + 1 :])
            except ProgressError as error:
                assert error.kind == "damaged"
            else:
                survivors.append((place, letter))
    assert survivors == []


def test_the_last_letter_has_one_spelling_only() -> None:
    """Base64 of some lengths leaves bits over in its last letter: other bits there are refused as well."""
    lengths = set()
    for number in range(1, 20):
        code = Progress(outcomes={f"01.{'a' * number}": Outcome("passed", 1)}).code()
        lengths.add(len(code.split(":")[1].rstrip(".")) % 4)
        for letter in set(string.ascii_letters + string.digits + "-_") - {code[-2]}:
            assert refused(code[:-2] + letter + ".").kind == "damaged"
    assert lengths == {0, 2, 3}


def test_two_exchanged_neighbours_a_lost_letter_and_a_cut_are_refused() -> None:
    start = CODE.index(":") + 1
    for place in range(start, len(CODE) - 2):
        one, two = CODE[place : place + 2]
        if one != two:
            assert refused(CODE[:place] + two + one + CODE[place + 2 :]).kind == "damaged"
        assert refused(CODE[:place] + CODE[place + 1 :]).kind == "damaged"
        assert refused(CODE[:place]).kind == "damaged"


@pytest.mark.parametrize(
    ("code", "kind", "said"),
    [
        ("", "empty", "starts with GPUCOURSE1:"),
        (" \n\u200b", "empty", "starts with GPUCOURSE1:"),
        ("hello", "foreign", "starts with GPUCOURSE1:"),
        ("GPUCOURSE1", "foreign", "starts with GPUCOURSE1:"),
        (CODE.split(":")[1], "foreign", "starts with GPUCOURSE1:"),
        (None, "foreign", "not NoneType"),
        (..., "foreign", "not ellipsis"),
        (CODE.encode(), "foreign", "not bytes"),
        ("GPUCOURSE0:AAAA.", "foreign", "has version 0"),
        (CODE.replace("1:", "2:", 1), "newer", "made by a newer version of the course"),
        ("GPUCOURSE31:whatever-it-then-is", "newer", "version 31, and this copy reads version 1"),
        (CODE + "\n" + CODE, "several", "There are 2 progress codes here"),
        ("GPUCOURSE1:", "damaged", "copy it again"),
        ("GPUCOURSE1:A", "damaged", "copy it again"),
        ("GPUCOURSE1:AAAAAA.", "damaged", "copy it again"),
        ("GPUCOURSE1:" + "-" * 1999, "damaged", "copy it again"),
        ("GPUCOURSE1:" + "—" * 1999, "damaged", "copy it again"),
        ("GPUCOURSE1:" + "A" * 2001, "oversized", "at most 2,000 characters, not 2,001"),
        ("A" * 10_001, "oversized", "10,001 characters"),
        ("GPUCOURSE" + "9" * 5000 + ":A", "foreign", "no progress code"),
        ("<script>alert(1)</script>", "foreign", "no progress code"),
    ],
)
def test_what_is_no_code_gets_a_sentence(code: Any, kind: str, said: str) -> None:
    error = refused(code)
    assert error.kind == kind
    assert said in str(error)


ROW = [2, "nvidia_smi", 60.1, 31, 68.5, 524288, "Tesla T4"]


def row_with(place: int, value: object) -> list[object]:
    return [*ROW[:place], value, *ROW[place + 1 :]]


def test_a_payload_made_by_hand_is_read_when_it_is_what_the_course_writes() -> None:
    assert decode(forged([[ROW], {"02.parse": "e2"}])) == Progress(
        Scoreboard([FIRST]), {"02.parse": Outcome("error", 2)}
    )


@pytest.mark.parametrize(
    "payload",
    [
        "",
        "not JSON",
        "null",
        "[]",
        "{}",
        "[[],{}] ",
        "[ [],{}]",
        "[[],[]]",
        "[[],{},0]",
        "[" * 15_000,
        '{"a":' * 3_000,
        "[[],{}]" + " " * 30_000,
        "9" * 5_000,
        [None, {}],
        [0, {}],
        ["ab", {}],
        [{}, {}],
        [[{}], {}],
        [[ROW, ROW], {}],
        [[[3, *ROW[1:]], ROW], {}],  # not in order
        [[ROW[:-1]], {}],
        [[[*ROW, 0]], {}],
        [[row_with(0, 0)], {}],
        [[row_with(0, True)], {}],
        [[row_with(0, 100)], {}],
        [[row_with(0, "2")], {}],
        [[row_with(1, "")], {}],
        [[row_with(1, "x" * 81)], {}],
        [[row_with(1, "a\u001b[2Jb")], {}],
        [[row_with(1, "a\u202eb")], {}],
        [[row_with(1, "\ud800")], {}],
        [[row_with(1, ["x"])], {}],
        [[row_with(2, None)], {}],
        [[row_with(2, -1)], {}],
        [[row_with(2, 1e13)], {}],
        [[row_with(2, 60.12345)], {}],  # more digits than the course writes
        [[row_with(2, 60.0)], {}],
        [[row_with(3, 100.1)], {}],
        [[row_with(3, True)], {}],
        [[row_with(5, True)], {}],
        [[row_with(5, 1.5)], {}],
        [[row_with(5, [1])], {}],
        [[row_with(5, "A")], {}],
        [[row_with(5, 10**16)], {}],
        [[row_with(6, 7)], {}],
        '[[[2,"a",NaN,1,1,1,"b"]],{}]',
        '[[[2,"a",1e999,1,1,1,"b"]],{}]',
        '[[[2,"a",-0,1,1,1,"b"]],{}]',
        '[[[2,"\\u0061",1,1,1,1,"b"]],{}]',
        '[[],{"02.parse":"p1","02.parse":"p1"}]',
        [[], {"03.b": "p1", "02.a": "p1"}],
        [[], [["02.parse", "p1"]]],
        [[], "ab"],
        [[], {"02.parse": "x1"}],
        [[], {"02.parse": ""}],
        [[], {"02.parse": "p"}],
        [[], {"02.parse": "p0"}],
        [[], {"02.parse": "p-1"}],
        [[], {"02.parse": "p01"}],
        [[], {"02.parse": "p 1"}],
        [[], {"02.parse": "p1_0"}],
        [[], {"02.parse": "p١"}],
        [[], {"02.parse": "p1000"}],
        [[], {"02.parse": "p" + "9" * 4500}],
        [[], {"02.parse": ["p", 1]}],
        [[], {"02.parse": 1}],
        [[], {"00.parse": "p1"}],
        [[], {"2.parse": "p1"}],
        [[], {"٠٢.parse": "p1"}],
        [[], {"02.Parse": "p1"}],
        [[], {"02.parse\n": "p1"}],
        [[], {"02.": "p1"}],
        [[], {"02.<b>": "p1"}],
        [[], {"=cmd": "p1"}],
        [[], {"02." + "a" * 25: "p1"}],
    ],
    ids=lambda payload: json.dumps(payload)[:40],
)
def test_a_right_checksum_around_what_no_lesson_writes_is_refused(payload: object) -> None:
    assert refused(forged(payload)).kind in ("impossible", "oversized")


@pytest.mark.parametrize(
    "packed",
    [
        b"\x80\x04N.",  # a pickle
        b"no zlib",
        zlib.compress(b"\xff\xfe"),  # no UTF-8
        zlib.compress(b"[[],{}]")[:-1],
        zlib.compress(b"[[],{}]") + b"more",
    ],
)
def test_a_right_checksum_around_other_bytes_is_refused(packed: bytes) -> None:
    packed += zlib.crc32(packed).to_bytes(4, "little")
    assert refused(f"GPUCOURSE1:{progress_code._base64(packed)}.").kind == "impossible"


def test_a_bomb_is_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = forged("[" + " " * 1_000_000 + "]")
    assert len(bomb) < LONGEST_CODE
    parsed: list[str] = []
    monkeypatch.setattr(json, "loads", parsed.append)
    assert refused(bomb).kind == "impossible"
    assert parsed == []


@settings(max_examples=200, deadline=None)
@given(st.text() | st.text(string.ascii_letters + "-_:.").map("GPUCOURSE1:".__add__))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        decode(text)
    except ProgressError as error:
        assert str(error)


@settings(max_examples=60, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["p1", "02.a", *ROW]),
        lambda inner: st.lists(inner, max_size=7) | st.dictionaries(st.text() | KEYS, inner, max_size=3),
    )
)
def test_any_payload_is_what_the_course_writes_or_refused(payload: object) -> None:
    for content in (payload, [payload, {}], [[], payload], [[payload], {}]):
        code = forged(content)
        try:
            assert decode(code).code() == code
        except ProgressError as error:
            assert error.kind in ("impossible", "oversized")


@pytest.mark.alone
def test_three_hundred_codes_are_read_in_time_with_hostile_ones_among_them() -> None:
    good = [titled(random.Random(seed), lambda rng: " ".join(rng.choices(WORDS, k=40))).code() for seed in range(280)]
    hostile = [
        "GPUCOURSE1:" + "—–" * 1000,
        forged("[" * 19_000),
        forged("[" + " " * 1_000_000 + "]"),
        "".join(chr(number) for number in range(0xA000, 0xA000 + 9999)),
        "\u0344\u0316" * 5000,  # what is slow to normalise
        "ﷺ" * 10_000,  # what grows when it is normalised
        "GPUCOURSE1:" * 900,
        forged([[], {"02.parse": "p" + "9" * 4000}]),
        "A" * 10_000_000,
        "GPUCOURSE" * 1000,
    ] * 2
    begun = time.perf_counter()
    read = [decode(code) for code in good]
    for code in hostile:
        refused(code)
    assert time.perf_counter() - begun < 5
    assert len({progress.code() for progress in read}) == 280


# --- going on in another kernel ---------------------------------------------------------------------------------


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> dict[str, Outcome]:
    """What this kernel has seen of the exercises."""
    seen: dict[str, Outcome] = {}
    monkeypatch.setattr(progress_module, "outcomes", lambda: dict(seen))
    return seen


def test_a_new_progress_takes_up_what_this_kernel_does(
    kernel: dict[str, Outcome], capsys: pytest.CaptureFixture[str]
) -> None:
    kernel["02.parse"] = Outcome("not yet", 2)
    progress = resume()
    assert "A new scoreboard" in capsys.readouterr().out
    kernel["02.busier"] = Outcome("passed", 1)
    progress.add(FIRST)
    assert progress.outcomes == {"02.busier": ("passed", 1), "02.parse": ("not yet", 2)}
    assert decode(progress.code()) == progress


def test_a_code_is_gone_on_with(kernel: dict[str, Outcome], capsys: pytest.CaptureFixture[str]) -> None:
    progress = resume(CODE)
    assert capsys.readouterr().out == "Resumed: 2 rows on the scoreboard, 1 exercise passed.\n"
    assert progress == PROGRESS
    kernel["03.fed"] = Outcome("passed", 2)
    assert list(progress.outcomes) == ["01.dtype", "02.busier", "02.parse", "03.fed"]
    assert decode(CODE) == PROGRESS  # reading one does not take up this kernel's


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (None, ("not yet", 2), ("not yet", 9)),
        (None, ("error", 2), ("not yet", 9)),
        (None, ("passed", 3), ("passed", 10)),
        (("not yet", 7), ("not yet", 7), ("not yet", 7)),  # the code is of this kernel: the cell was run again
        (("not yet", 7), ("passed", 9), ("passed", 9)),
        (("not yet", 9), ("not yet", 9), ("not yet", 9)),  # an old code of this kernel
        (("passed", 1), ("passed", 1), ("passed", 7)),  # passed here before the code was pasted
    ],
)
def test_attempts_add_up_over_kernels_and_are_not_counted_twice(
    kernel: dict[str, Outcome], before: Any, after: Any, expected: Any
) -> None:
    if before:
        kernel["02.busier"] = Outcome(*before)
    progress = resume(CODE)  # 02.busier: not yet, 7
    kernel["02.busier"] = Outcome(*after)
    assert progress.outcomes["02.busier"] == expected
    assert progress.outcomes["02.busier"] == expected  # asking changes nothing


def test_a_pass_stays_a_pass(kernel: dict[str, Outcome]) -> None:
    progress = resume(CODE)
    kernel["01.dtype"] = Outcome("error", 4)
    assert progress.outcomes["01.dtype"] == ("passed", 1)


@pytest.mark.parametrize("bad", ["hello", " ", CODE[:-9], CODE.replace("1:", "2:", 1), None, 7, "x" * 20_000])
def test_a_bad_code_is_told_and_changes_nothing(
    kernel: dict[str, Outcome], capsys: pytest.CaptureFixture[str], bad: Any
) -> None:
    kernel["02.parse"] = Outcome("passed", 1)
    progress = resume(bad)
    out = capsys.readouterr().out
    assert out.count("\n") == 1 and out.endswith("Until then you go on with a new scoreboard.\n") and len(out) < 400
    assert progress.board.rows == () and progress.outcomes == {"02.parse": ("passed", 1)}


def test_two_progresses_share_nothing(kernel: dict[str, Outcome]) -> None:
    one, other = resume(CODE), resume(CODE)
    one.add(replace(FIRST, lesson=4))
    assert len(one.board.rows) == 3 and len(other.board.rows) == 2


@pytest.mark.parametrize(
    ("key", "outcome", "said"),
    [
        ("busier", ("passed", 1), "'busier' is no exercise"),
        ("02.busier", ("not attempted", 1), "'not attempted' is none of passed, not yet, error"),
        ("02.busier", ("passed", 0), "0 is no number of attempts"),
        ("02.busier", ("passed", True), "True is no number of attempts"),
    ],
)
def test_impossible_outcomes_are_refused_by_name(key: str, outcome: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Progress(outcomes={key: outcome})


# --- what is shown ----------------------------------------------------------------------------------------------


def test_the_text_shows_board_exercises_and_code() -> None:
    text = repr(PROGRESS)
    board, exercises, code = text.split("\n\n")
    assert board == repr(PROGRESS.board)
    assert exercises.startswith("lesson  passed")
    assert re.search(r"^01 +dtype +–$", exercises, re.MULTILINE)
    assert re.search(r"^02 +– +busier \(7 attempts\), parse \(2 attempts\)$", exercises, re.MULTILINE)
    assert code.splitlines()[1] == CODE
    assert "names nobody" in code
    assert "none attempted yet" in repr(Progress()) and Progress().code() in repr(Progress())
    assert "(1 attempt)" in repr(Progress(outcomes={"02.parse": Outcome("error", 1)}))


def test_the_page_has_the_code_in_one_piece_and_escapes_what_it_shows() -> None:
    page = Progress(Scoreboard([replace(FIRST, title="<b>x</b>")]), OUTCOMES)
    html = page._repr_html_()
    assert "<b>x" not in html and "&lt;b&gt;x" in html and "<script" not in html
    found = re.search(r"<pre[^>]*user-select:all[^>]*>([^<]*)</pre>", html)
    assert found and decode(found[1]) == page and found[1] == page.code()
    assert "<table" not in Progress()._repr_html_() and "no rows yet" in Progress()._repr_html_()


def test_show_displays_it(capsys: pytest.CaptureFixture[str]) -> None:
    PROGRESS.show()
    assert CODE in capsys.readouterr().out
