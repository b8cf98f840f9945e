"""What an exercise is: a name, hints, a solution as real Python code, and a check of the learner's own function.

A check returns the sentence for "passed", or raises `NotYet` with the sentence that helps. It calls the learner's
function only through `Answer`, so that the learner's mistakes are told apart from ours: theirs are explained, ours
are raised.
"""

from __future__ import annotations

import ast
import dis
import html
import inspect
import re
import textwrap
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from course_utils.exercises.outcomes import NAME, Outcome, Status, outcomes, record

__all__ = ["Answer", "Exercise", "Feedback", "NotYet", "Outcome", "Status", "outcomes"]

# A symbol and a word beside the colour: the outcome is never told by colour alone.
_LOOKS: dict[Status, tuple[str, str]] = {
    "passed": ("✔", "#006b4e"),
    "not yet": ("✘", "#a34700"),
    "not attempted": ("…", "#4d4d4d"),
    "error": ("!", "#9b1c1c"),
}
_LONGEST_MESSAGE = 1500


class NotYet(Exception):
    """The answer is wrong; the message says what to look at next."""


class _NotAttempted(Exception):
    """The learner's function gave back `...` or nothing."""


class _LearnerError(Exception):
    """The learner's function raised; the cause is their exception."""


@dataclass(frozen=True)
class Feedback:
    """What a check found: shown in the notebook, counted by `make course`."""

    exercise: str
    status: Status
    message: str

    def __repr__(self) -> str:
        return f"{_LOOKS[self.status][0]} {self.exercise}: {self.status}. {self.message}"

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, str], dict[str, Any]]:
        symbol, colour = _LOOKS[self.status]
        page = (
            f'<div role="status" style="border-left:6px solid {colour};padding:6px 12px;'
            'color:#1a1a1a;background:#f6f6f6">'
            f'<b style="color:{colour}">{symbol} {html.escape(self.exercise)}: {self.status}.</b> '
            f'<span style="white-space:pre-wrap">{_as_html(self.message)}</span></div>'
        )
        return (
            {"text/plain": repr(self), "text/html": page},
            {"course_exercise": {"name": self.exercise, "status": self.status}},
        )


class Answer:
    """The learner's function as a check sees it: call it, and their exception arrives as theirs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.name = getattr(function, "__name__", "your function")

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """What the learner's function returns. `...` and None count as not attempted."""
        self.bind(*arguments, **keywords)
        try:
            result = self.function(*arguments, **keywords)
        except (
            Exception
        ) as error:  # whatever a learner's code raises is explained to them, and nothing else is caught here
            raise _LearnerError from error
        if result is ...:
            raise _NotAttempted
        if result is None:
            raise NotYet(f"`{self.name}` returned nothing: does each of its branches end in `return`?")
        return result

    def bind(self, *arguments: Any, **keywords: Any) -> None:
        """Raise NotYet if the learner's function does not take these arguments."""
        try:
            inspect.signature(self.function).bind(*arguments, **keywords)
        except TypeError as error:
            raise NotYet(f"`{self.name}` must keep the arguments that its first line had: {error}.") from None


@dataclass(frozen=True)
class Exercise:
    """One exercise. `check_answer` gets the learner's function as an `Answer`; `reference` is the solution.

    The name is lower case, of at most 24 characters: the progress code carries it. Another name raises ValueError.
    """

    name: str
    hints: tuple[str, ...]
    reference: Callable[..., Any]
    check_answer: Callable[[Answer], str]

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise ValueError(f"exercise name {self.name!r:.100}: use up to 24 of a-z, 0-9, _ and -, a letter first")

    def check(self, function: object) -> Feedback:
        """Check the learner's `function`. Returns what was found and raises only what is the course's own fault.

        The outcome also joins `outcomes()`, under the solution's lesson: "02.busier".
        """
        feedback = self._judge(function)
        record(self.reference.__module__, self.name, feedback.status)
        return feedback

    def _judge(self, function: object) -> Feedback:
        expected = self.reference.__name__
        if function is ... or _is_stub(function):
            return self._not_attempted()
        if not callable(function):
            return self._feedback(
                "not yet",
                f"This check takes the function itself: write `check({expected})`, "
                f"without brackets behind the name. It got {_shorten(repr(function), 80)}.",
            )
        try:
            return self._feedback("passed", self.check_answer(Answer(function)))
        except NotYet as error:
            return self._feedback("not yet", str(error))
        except _NotAttempted:
            return self._not_attempted()
        except _LearnerError as error:
            assert error.__cause__ is not None
            return self._feedback("error", _explain(error.__cause__, function))

    def hint(self, number: int = 1) -> None:
        """Print one hint; the first says least."""
        print(self._hint_text(number))

    def solution(self) -> None:
        """Print the solution's source."""
        print(self.solution_source())

    def solution_source(self) -> str:
        """The solution as Python source, ready to stand in the exercise's cell."""
        return _without_annotations(textwrap.dedent(inspect.getsource(self.reference)).rstrip())

    def panel(self) -> None:
        """Buttons for the hints and the solution; below them, the plain calls that do the same."""
        import ipywidgets as widgets
        from IPython.display import display

        shown = widgets.HTML(value="")

        def button(label: str, page: str) -> Any:
            made = widgets.Button(description=label, tooltip=f"{label} for exercise {self.name}")
            made.on_click(lambda _: setattr(shown, "value", page))
            return made

        hints = [f"<p>{_as_html(self._hint_text(number))}</p>" for number in range(1, len(self.hints) + 1)]
        buttons = [button(f"Hint {number}", page) for number, page in enumerate(hints, 1)]
        buttons.append(button("Solution", f"<pre>{html.escape(self.solution_source())}</pre>"))
        display(widgets.VBox([widgets.HBox(buttons), shown]))
        print(f"No buttons? Use .hint(1) to .hint({len(self.hints)}), and .solution(), in a cell of your own.")

    def _hint_text(self, number: int) -> str:
        if number not in range(1, len(self.hints) + 1):
            raise ValueError(f"Exercise {self.name} has hints 1 to {len(self.hints)}, and no hint {number!r}.")
        return f"Hint {number} of {len(self.hints)}: {self.hints[number - 1]}"

    def _feedback(self, status: Status, message: str) -> Feedback:
        return Feedback(self.name, status, _shorten(message, _LONGEST_MESSAGE))

    def _not_attempted(self) -> Feedback:
        return self._feedback(
            "not attempted", f"Replace the `...` in `{self.reference.__name__}` by your code and run this cell again."
        )


def _without_annotations(source: str) -> str:
    """A function's source without the types in its signature: a notebook need not know the names in them."""
    function = ast.parse(source).body[0]
    assert isinstance(function, ast.FunctionDef)
    lines = source.encode().splitlines(keepends=True)  # ast counts columns in bytes

    def place(line: int | None, column: int | None) -> int:
        return sum(map(len, lines[: (line or 1) - 1])) + (column or 0)

    text, cuts = source.encode(), []
    for argument in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs):
        if (kind := argument.annotation) is not None:
            begin = place(argument.lineno, argument.col_offset) + len(argument.arg.encode())
            cuts.append((begin, place(kind.end_lineno, kind.end_col_offset)))
    if (kind := function.returns) is not None:
        begin = text.rindex(b"->", 0, place(kind.lineno, kind.col_offset))
        cuts.append((len(text[:begin].rstrip()), place(kind.end_lineno, kind.end_col_offset)))
    for begin, end in sorted(cuts, reverse=True):
        text = text[:begin] + text[end:]
    return text.decode()


def _is_stub(function: object) -> bool:
    """Whether a function's body is but a docstring and `...` or `pass`, which compiles to `return None`."""
    if not inspect.isfunction(function):
        return False
    work = [step for step in dis.get_instructions(function) if step.opname not in {"RESUME", "NOP", "RETURN_VALUE"}]
    return all(step.opname in {"LOAD_CONST", "RETURN_CONST"} and step.argval is None for step in work)


def _explain(error: BaseException, function: Callable[..., Any]) -> str:
    """The learner's exception, the line of theirs that raised it, and what usually lies behind it."""
    filename = getattr(getattr(function, "__code__", None), "co_filename", None)
    own_lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == filename]
    place = f", in your line {own_lines[-1].lineno}: {own_lines[-1].line}" if own_lines else ""
    return (
        f"Your code raised {type(error).__name__}: {_shorten(str(error), 400)}{place}. {_usual_cause(error)}".rstrip()
    )


def _usual_cause(error: BaseException) -> str:
    text = str(error)
    if isinstance(error, NameError):
        return "A name is not known: is it spelt as above, and has the cell that makes it been run?"
    if "same device" in text or "meta" in text:
        return "Two tensors of one operation live on different devices: print `.device` of each."
    if "CUDA" in text or "NVIDIA" in text:
        return "The code asks for a GPU that is not here: take the device from a tensor or from `pick_device()`."
    if isinstance(error, AttributeError) and "NoneType" in text:
        return "Something is None there: which call returned nothing?"
    return ""


def _as_html(text: str) -> str:
    """Escaped text, with `code` in backquotes set as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))


def _shorten(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"
