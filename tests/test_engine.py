"""What a kernel notes of each check: the best status, the attempts it took, and nothing that is no attempt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from course_utils.exercises import engine, outcomes
from course_utils.exercises.engine import Exercise, NotYet, Outcome


@pytest.fixture(autouse=True)
def _nothing_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcomes, "_seen", {})


def exercise_of(module: str, name: str = "double") -> Exercise:
    """An exercise whose solution lives in `module`."""

    def double(number: int) -> int:
        return 2 * number

    def check(answer: Callable[[int], int]) -> str:
        if answer(2) != 4:
            raise NotYet("Twice 2 is 4.")
        return "Right."

    double.__module__ = module
    return Exercise(name, ("Add it to itself.",), double, check)


def wrong(number: int) -> int:
    return number


def right(number: int) -> int:
    return number + number


def crashes(number: int) -> int:
    raise ZeroDivisionError


def unchanged(number: int) -> Any:
    return ...


DOUBLE = exercise_of("course_utils.exercises.lesson07")


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([wrong], Outcome("not yet", 1)),
        ([crashes], Outcome("error", 1)),
        ([wrong, crashes], Outcome("not yet", 2)),
        ([crashes, wrong], Outcome("not yet", 2)),
        ([wrong, crashes, right], Outcome("passed", 3)),
        ([right, wrong, crashes, right], Outcome("passed", 1)),  # what comes after does not count
        ([unchanged, wrong, ..., unchanged], Outcome("not yet", 1)),
        (["an answer"], Outcome("not yet", 1)),
    ],
)
def test_the_best_status_and_the_attempts_up_to_the_first_pass(answers: list[Any], expected: Outcome) -> None:
    for answer in answers:
        DOUBLE.check(answer)
    assert engine.outcomes() == {"07.double": expected}


def test_what_is_not_attempted_is_not_noted() -> None:
    for answer in (unchanged, ...):
        assert DOUBLE.check(answer).status == "not attempted"
    assert engine.outcomes() == {}


def test_lessons_and_exercises_are_kept_apart_and_others_are_not_noted() -> None:
    exercise_of("lesson03").check(right)
    exercise_of("course_utils.exercises.lesson03", "twice").check(wrong)
    DOUBLE.check(right)
    for module in ("__main__", "course_utils.exercises.lesson123", "mylesson09", "course_utils.lesson09.more"):
        exercise_of(module).check(right)
    assert engine.outcomes() == {
        "03.double": ("passed", 1),
        "03.twice": ("not yet", 1),
        "07.double": ("passed", 1),
    }


def test_outcomes_is_a_copy() -> None:
    engine.outcomes()["07.double"] = Outcome("passed", 1)
    assert engine.outcomes() == {}


def test_a_fault_of_the_course_and_an_interrupt_are_no_attempts() -> None:
    def fault(answer: Any) -> str:
        raise AssertionError("ours")

    def interrupted(number: int) -> int:
        raise KeyboardInterrupt

    with pytest.raises(AssertionError, match="ours"):
        Exercise("double", (), DOUBLE.reference, fault).check(right)
    with pytest.raises(KeyboardInterrupt):
        DOUBLE.check(interrupted)
    assert engine.outcomes() == {}


@pytest.mark.parametrize("name", ["", "Double", "2nd", "a b", "a.b", "é", "a" * 25, "double\n"])
def test_a_name_that_no_progress_code_can_carry_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="use up to 24 of a-z"):
        exercise_of("lesson03", name)
    assert exercise_of("lesson03", "a-b_9" + "c" * 19).name.startswith("a-b_9")
