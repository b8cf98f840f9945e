"""Your progress through the course: the scoreboard and the exercises, carried from notebook to notebook as a code.

progress = resume()                          # in a later lesson: resume("the code that the last one showed")
progress.add(measurement.as_row(3, "data_loading"))
progress.show()                              # the scoreboard, the exercises, and the code for the next lesson

The code holds rows and outcomes, and no name of anybody. `decode` reads one without this kernel's exercises in it.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import astuple, fields

from course_utils import progress_code, views
from course_utils.exercises.outcomes import NAME, RANKS, Outcome, Status, better, outcomes
from course_utils.progress_code import LONGEST_CODE, ProgressError
from course_utils.scoreboard import VERSION, Row, Scoreboard

__all__ = ["Progress", "ProgressError", "decode", "resume"]

MOST_ATTEMPTS = 999  # a code says 999 for more, too
_KEY = re.compile(rf"(?!00)\d\d\.{NAME.pattern}", re.ASCII)
_LETTERS: dict[Status, str] = {"passed": "p", "not yet": "n", "error": "e"}
_STATUSES = {letter: status for status, letter in _LETTERS.items()}
# Titles and devices may have 80 characters each. Where they do not all fit, a code holds so many of each.
_SHORTER = (80, 40, 20, 10, 5)


class Progress:
    """A scoreboard, and for each exercise that was attempted its best status and the number of attempts.

    `follow` is asked for this kernel's outcomes whenever they are needed; without it the progress stands still.
    """

    def __init__(
        self,
        board: Scoreboard | None = None,
        outcomes: Mapping[str, Outcome] | None = None,
        *,
        follow: Callable[[], Mapping[str, Outcome]] | None = None,
    ) -> None:
        self.board = Scoreboard() if board is None else board
        self._held = {key: _checked(key, *outcome) for key, outcome in (outcomes or {}).items()}
        self._follow = follow
        self._before = dict(follow()) if follow else {}

    @property
    def outcomes(self) -> dict[str, Outcome]:
        """What was reached so far: "02.busier" -> (best status, attempts). Not in it: not attempted."""
        merged = dict(self._held)
        for key, now in (self._follow() if self._follow else {}).items():
            merged[key] = _continued(self._held[key], self._before.get(key), now) if key in self._held else now
        return {key: merged[key] for key in sorted(merged)}

    def add(self, row: Row) -> None:
        """Add a lesson's row to the scoreboard; a row of the same lesson is replaced."""
        self.board.add(row)

    def code(self) -> str:
        """The progress as one line of text, below 2,000 characters, for `resume` and `decode`.

        Figures are rounded: samples/s to five digits, percentages to one decimal, memory up to whole KiB. Titles and
        devices are shortened where many long ones would not fit. Raises ProgressError for what no course can hold.
        """
        for longest in _SHORTER:
            code = progress_code.write(_payload(self, longest))
            if len(code) <= LONGEST_CODE:
                return code
        raise ProgressError(
            "oversized",
            f"{len(self.board.rows)} lessons and {len(self.outcomes)} exercises are more than one progress code holds.",
        )

    def show(self) -> None:
        """Show the scoreboard, the exercises and the code; in a notebook a click on the code selects all of it."""
        from IPython.display import display

        display(self)  # type: ignore[no-untyped-call,unused-ignore]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Progress) and (self.board, self.outcomes) == (other.board, other.outcomes)

    __hash__ = None  # type: ignore[assignment]

    def _cells(self) -> list[list[str]]:
        lines: dict[str, tuple[list[str], list[str]]] = {}
        for key, (status, attempts) in self.outcomes.items():
            lesson, _, name = key.partition(".")
            passed, open_ones = lines.setdefault(lesson, ([], []))
            if status == "passed":
                passed.append(name)
            else:
                open_ones.append(f"{name} ({attempts} attempt{'' if attempts == 1 else 's'})")
        return [[lesson, ", ".join(one) or "–", ", ".join(other) or "–"] for lesson, (one, other) in lines.items()]

    def __repr__(self) -> str:
        cells = self._cells()
        exercises = views.text_table(_HEADERS, cells) if cells else _NO_EXERCISES
        return "\n\n".join([repr(self.board), exercises, f"{_CODE_IS_NEXT}\n{self.code()}"])

    def _repr_html_(self) -> str:
        cells = self._cells()
        board = self.board._repr_html_() if self.board.rows else f"<p>{self.board!r}</p>"
        exercises = views.html_table(_HEADERS, cells, "Exercises") if cells else f"<p>{_NO_EXERCISES}</p>"
        # One line, wrapped by the browser alone: it is copied without a line break. No script is needed to select it.
        return (
            f"{board}{exercises}<p>{_CODE_IS_NEXT}</p>"
            '<pre tabindex="0" aria-label="progress code" style="white-space:pre-wrap;word-break:break-all;'
            'user-select:all;-webkit-user-select:all;border:1px solid;padding:6px">'
            f"{html.escape(self.code())}</pre>"
        )


def resume(code: str = "") -> Progress:
    """The progress to go on with: new for "", else the one in `code`. This kernel's exercises join it by themselves.

    A code that cannot be read is told in a sentence; you then have a new progress, and nothing else has changed.
    """
    held = Progress()
    if code == "":
        print('A new scoreboard. Coming from another lesson? Paste its progress code between the quotes of resume("").')
    else:
        try:
            held = decode(code)
        except ProgressError as error:
            print(f"{error} Until then you go on with a new scoreboard.")
        else:
            rows = len(held.board.rows)
            passed = sum(outcome.status == "passed" for outcome in held.outcomes.values())
            print(
                f"Resumed: {rows} row{'' if rows == 1 else 's'} on the scoreboard, "
                f"{passed} exercise{'' if passed == 1 else 's'} passed."
            )
    return Progress(held.board, held.outcomes, follow=outcomes)


def decode(code: object) -> Progress:
    """The progress in a text that holds its code. Raises ProgressError, a ValueError, with a sentence and a `kind`.

    It runs nothing from the code, bounds its size, and accepts only what `Progress.code` writes.
    """
    payload = progress_code.read(code)
    try:
        progress = _from_payload(payload)
    except (ValueError, TypeError, RecursionError) as error:
        raise ProgressError("impossible", f"{progress_code.IMPOSSIBLE} {_sentence(error)}") from None
    # One progress has one payload: no second spelling of a number, no key twice, no other order.
    if _payload(progress, _SHORTER[0]) != payload:
        raise ProgressError("impossible", progress_code.IMPOSSIBLE)
    return progress


def _continued(held: Outcome, before: Outcome | None, now: Outcome) -> Outcome:
    """The outcome of an exercise from a code, taken up in a kernel that had `before` then and has `now`.

    The code may be of this same kernel, run again: then its attempts are in `now` already, and are not added twice.
    """
    if held.status == "passed":
        return held
    since = now.attempts - (before.attempts if before else 0)
    return Outcome(better(held.status, now.status), max(now.attempts, held.attempts + since))


def _checked(key: object, status: object, attempts: object) -> Outcome:
    if not isinstance(key, str) or not _KEY.fullmatch(key):
        raise ValueError(f"{key!r:.100} is no exercise: it needs a lesson and a name, as in '02.busier'")
    if status not in RANKS:
        raise ValueError(f"exercise {key}: {status!r:.100} is none of {', '.join(RANKS)}")
    if type(attempts) is not int or attempts < 1:
        raise ValueError(f"exercise {key}: {attempts!r:.100} is no number of attempts from 1 on")
    return Outcome(status, attempts)


def _payload(progress: Progress, longest_text: int) -> str:
    rows = []
    for row in progress.board.rows:
        *rest, memory_bytes, device = astuple(row)
        lesson, title, samples_per_s, *percents = rest
        rows.append(
            [
                lesson,
                _shortened(title, longest_text),
                _rounded(float(f"{samples_per_s:.5g}")),
                *(None if percent is None else _rounded(round(percent, 1)) for percent in percents),
                None if memory_bytes is None else -(-memory_bytes // 1024),  # up: a little memory is not none
                _shortened(device, longest_text),
            ]
        )
    exercises = {
        key: f"{_LETTERS[status]}{min(attempts, MOST_ATTEMPTS)}"
        for key, (status, attempts) in progress.outcomes.items()
    }
    return json.dumps([rows, exercises], ensure_ascii=False, separators=(",", ":"))


def _from_payload(payload: str) -> Progress:
    """The progress in a payload; ValueError or TypeError with what is wrong. Only a first check: see `decode`."""
    rows, exercises = json.loads(payload)
    names = [field.name for field in fields(Row)]
    items = []
    for row in rows:
        item = dict(zip(names, row, strict=True))
        if type(item["peak_memory_bytes"]) is int:
            item["peak_memory_bytes"] *= 1024
        items.append(item)
    held = {}
    for key, text in dict(exercises).items():
        letter, attempts = text[:1], text[1:]
        held[key] = _checked(key, _STATUSES.get(letter, letter), int(attempts))
    return Progress(Scoreboard.from_dict({"version": VERSION, "rows": items}), held)


def _rounded(value: float) -> int | float:
    """A whole number is written without its ".0"."""
    return int(value) if value == int(value) else value


def _shortened(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"


def _sentence(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return f"{text[:1].upper()}{text[1:200]}."


_HEADERS = ("lesson", "passed", "not yet")
_NO_EXERCISES = "Exercises: none attempted yet"
_CODE_IS_NEXT = 'Progress code: copy it between the quotes of resume("") in the next lesson. It names nobody.'
