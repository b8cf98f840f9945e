"""Exercises that are judged by measurement: the naive recipe and the learner's, trained in turn in the same run."""

from __future__ import annotations

from collections.abc import Callable, Collection

from course_utils.exercises.engine import Answer, NotYet
from course_utils.views import number
from course_utils.workload import Measurement, Recipe, train

SECONDS = 3.0  # of measured training a run; about 15 utilisation samples
_ATTEMPTS = 2
SAME_JOB = ("image_size", "width", "steps", "samples")  # what no exercise may change: it would be another job
Verdict = Callable[[Measurement, Measurement], str | None]


def judge_recipe(
    answer: Answer, verdict: Verdict, *, question: str, praise: str, fixed: Collection[str] = SAME_JOB
) -> str:
    """Train the naive recipe and the one that `answer` returns; the sentence for "passed", or `NotYet`.

    `verdict(naive, yours)` says what is still missing, or None. A "no" is measured again, since another program may
    have been in the way. `question` helps whoever returns the naive recipe; knobs in `fixed` must stay as they are.
    """
    recipe = answer()
    if not isinstance(recipe, Recipe):
        raise NotYet(f"Return a recipe, such as Recipe(num_workers=1). It returned {recipe!r:.80}.")
    if not recipe.changes():
        raise NotYet(f"This is the naive recipe. {question}")
    other_job = [name for name in fixed if name in recipe.changes()]
    if other_job:
        raise NotYet(
            f"{' and '.join(other_job)} would change the job, not the way it is done: leave it at its default."
        )
    for attempt in range(1, _ATTEMPTS + 1):
        naive = train(Recipe(), seconds=SECONDS, progress=False)
        yours = train(recipe, seconds=SECONDS, progress=False)
        missing = verdict(naive, yours)
        if missing is None:
            return f"{figures(naive, yours)} {praise}"
        if attempt == _ATTEMPTS:
            raise NotYet(f"{figures(naive, yours)} {missing}")
    raise AssertionError("the last attempt returns or raises")


def figures(naive: Measurement, yours: Measurement) -> str:
    """Both measurements in two sentences."""

    def of(run: Measurement) -> str:
        return (
            f"{run.samples_per_s:.0f} samples/s, busy {number(run.busy_percent, '%')}, "
            f"waiting for data {run.data_wait_percent:.0f} %"
        )

    return f"Naive: {of(naive)}. Yours: {of(yours)} ({yours.busy_source})."
