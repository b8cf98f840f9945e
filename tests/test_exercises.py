"""Every exercise three ways: the stub is not attempted, each typical mistake gets its message, the solution passes."""

import ast
import inspect
import json
import re
import time
from pathlib import Path

import pytest
import torch

from course_utils.exercises import lesson01, lesson02, lesson03, lesson04, lesson05, lesson06, lesson07
from course_utils.exercises import measured as measured_exercises
from course_utils.exercises.engine import Exercise, Feedback, NotYet
from course_utils.workload import Measurement, Recipe

LESSONS = {1: lesson01, 2: lesson02, 3: lesson03, 4: lesson04, 5: lesson05, 6: lesson06, 7: lesson07}
EXERCISES = {
    f"{number:02}-{exercise.name}": exercise
    for number, lesson in LESSONS.items()
    for exercise in vars(lesson).values()
    if isinstance(exercise, Exercise)
}
NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


@pytest.fixture(params=EXERCISES.values(), ids=EXERCISES.keys())
def exercise(request: pytest.FixtureRequest) -> Exercise:
    return request.param


def exercise_cells() -> dict[str, str]:
    """The source of each notebook cell that is tagged exercise:NAME, keyed like EXERCISES."""
    found = {}
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            for tag in cell["metadata"].get("tags", []):
                if tag.startswith("exercise:"):
                    found[f"{path.name[:2]}-{tag.removeprefix('exercise:')}"] = "".join(cell["source"])
    return found


# --- all exercises ----------------------------------------------------------------------------------------------


def test_each_lesson_has_two_or_three_exercises() -> None:
    for number in LESSONS:
        assert 2 <= sum(key.startswith(f"{number:02}-") for key in EXERCISES) <= 3


def test_the_notebooks_hold_exactly_these_exercises() -> None:
    assert set(exercise_cells()) == set(EXERCISES)


def test_the_stub_in_the_notebook_is_not_attempted(exercise: Exercise, request: pytest.FixtureRequest) -> None:
    key = request.node.callspec.id
    namespace: dict[str, object] = {}
    stub, check = exercise_cells()[key].rstrip().rsplit("\n", 1)
    exec(stub, namespace)
    assert "\n    ...\n" in stub  # what the text tells the learner to replace
    name = exercise.reference.__name__
    variable = next(name for name, value in vars(LESSONS[int(key[:2])]).items() if value is exercise)
    assert check == f"lesson{key[:2]}.{variable}.check({name})"
    assert exercise.check(namespace[name]).status == "not attempted"
    assert (
        inspect.signature(namespace[name]).parameters.keys() == inspect.signature(exercise.reference).parameters.keys()
    )
    assert inspect.getdoc(namespace[name]) == inspect.getdoc(exercise.reference)


def imported_by_notebook(lesson: str) -> dict[str, object]:
    """What a notebook's own import lines make known, and nothing else."""
    (path,) = NOTEBOOKS.glob(f"{lesson}_*.py")
    statements = ast.parse(path.read_text(encoding="utf-8")).body
    lines = [ast.unparse(one) for one in statements if isinstance(one, ast.Import | ast.ImportFrom)]
    namespace: dict[str, object] = {}
    exec("\n".join(lines), namespace)
    return namespace


@pytest.mark.alone
def test_the_solution_passes(exercise: Exercise, request: pytest.FixtureRequest) -> None:
    # The source that a learner is shown, where a learner puts it: not the function behind it in its own module.
    namespace = imported_by_notebook(request.node.callspec.id[:2])
    exec(exercise.solution_source(), namespace)
    feedback = exercise.check(namespace[exercise.reference.__name__])
    assert feedback.status == "passed", feedback


def test_ellipsis_is_not_attempted(exercise: Exercise) -> None:
    assert exercise.check(...).status == "not attempted"


def test_calling_the_function_instead_of_passing_it_is_explained(exercise: Exercise) -> None:
    feedback = exercise.check("an answer")
    assert feedback.status == "not yet"
    assert f"check({exercise.reference.__name__})" in feedback.message


def test_hints_go_from_the_first_to_the_last(exercise: Exercise, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(1, len(exercise.hints) + 1):
        exercise.hint(number)
        assert capsys.readouterr().out.startswith(f"Hint {number} of {len(exercise.hints)}: ")
    with pytest.raises(ValueError, match=f"hints 1 to {len(exercise.hints)}"):
        exercise.hint(len(exercise.hints) + 1)


def test_the_solution_is_printed_as_code(exercise: Exercise, capsys: pytest.CaptureFixture[str]) -> None:
    exercise.solution()
    assert capsys.readouterr().out.startswith(f"def {exercise.reference.__name__}(")


# --- the engine -------------------------------------------------------------------------------------------------


def double(number):
    """Return twice the number."""
    return 2 * number


def check_double(answer):
    if answer(2) != 4:
        raise NotYet("Twice 2 is 4.")
    return "Right."


DOUBLE = Exercise("double", ("Add it to itself.",), double, check_double)


def test_a_wrong_answer_gets_the_checks_sentence() -> None:
    assert DOUBLE.check(lambda number: 5) == Feedback("double", "not yet", "Twice 2 is 4.")


def test_a_body_of_pass_is_a_stub_and_a_body_that_returns_nothing_is_told() -> None:
    def stub(number):
        pass

    def forgot(number):
        print(2 * number)

    assert DOUBLE.check(stub).status == "not attempted"
    assert "returned nothing" in DOUBLE.check(forgot).message
    assert DOUBLE.check(lambda number: ...).status == "not attempted"


def test_changed_arguments_are_told() -> None:
    feedback = DOUBLE.check(lambda: 4)
    assert feedback.status == "not yet"
    assert "must keep the arguments" in feedback.message


def test_the_learners_own_error_is_explained_with_its_line() -> None:
    def wrong(number):
        return number * undefined_name  # noqa: F821

    feedback = DOUBLE.check(wrong)
    assert feedback.status == "error"
    assert "NameError" in feedback.message
    assert "return number * undefined_name" in feedback.message
    assert "has the cell that makes it been run" in feedback.message


def test_a_fault_of_the_check_itself_is_raised_and_not_blamed_on_the_learner() -> None:
    broken = Exercise("double", (), double, lambda answer: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        broken.check(double)


def test_an_interrupt_passes_through() -> None:
    def interrupted(number):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        DOUBLE.check(interrupted)


def test_feedback_is_escaped_bounded_and_carries_its_outcome_as_metadata() -> None:
    def hostile(number):
        raise ValueError("<script>alert(1)</script>" * 1000)

    feedback = DOUBLE.check(hostile)
    data, metadata = feedback._repr_mimebundle_()
    assert "<script>" not in data["text/html"]
    assert "&lt;script&gt;" in data["text/html"]
    assert len(feedback.message) <= 1500
    assert metadata == {"course_exercise": {"name": "double", "status": "error"}}
    assert repr(feedback).startswith("! double: error. Your code raised ValueError")


def test_the_panel_shows_hints_and_the_solution_when_clicked(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    import IPython.display

    shown = []
    monkeypatch.setattr(IPython.display, "display", shown.append)
    DOUBLE.panel()
    buttons, output = shown[0].children
    assert [button.description for button in buttons.children] == ["Hint 1", "Solution"]
    buttons.children[0].click()
    assert output.value == "<p>Hint 1 of 1: Add it to itself.</p>"
    buttons.children[1].click()
    assert output.value.startswith("<pre>def double(number):")
    assert ".hint(1)" in capsys.readouterr().out


# --- lesson 01 --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "status", "message"),
    [
        (lambda model, images: model(images), "error", "different devices"),
        (lambda model, images: model.cpu()(images), "error", ""),
        (lambda model, images: model(images.to("meta")), "error", "different devices"),
        (lambda model, images: torch.ones(3, 2), "not yet", "leave it where it was computed"),
        (lambda model, images: model(images.to(model.weight.device)).sum(), "not yet", "shape (3, 2)"),
        (lambda model, images: model.to("meta")(images.to("meta")), "not yet", "moved it"),
    ],
    ids=["as it came", "moves the model", "one device named", "made up", "reduced", "moves both"],
)
def test_device_mistakes(wrong, status, message) -> None:
    feedback = lesson01.device.check(wrong)
    assert feedback.status == status
    assert message in feedback.message


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, .cuda() fails at the meta device instead")
def test_device_named_cuda_without_a_gpu_is_explained() -> None:
    feedback = lesson01.device.check(lambda model, images: model.cuda()(images.cuda()))
    assert feedback.status == "error"
    assert "asks for a GPU that is not here" in feedback.message


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda capability: torch.bfloat16, "emulates it"),
        (lambda capability: torch.float16, "native bfloat16"),
        (lambda capability: torch.float32, "float32 leaves them idle"),
        (lambda capability: "float16", "Return a dtype"),
        (lambda capability: torch.bfloat16 if capability[1] >= 5 else torch.float16, "emulates it"),
        (lambda capability: torch.bfloat16 if capability > (8, 0) else torch.float16, "native bfloat16"),
    ],
    ids=["is_bf16_supported", "always half", "float32", "a string", "minor only", "off by one"],
)
def test_dtype_mistakes(wrong, message) -> None:
    feedback = lesson01.dtype.check(wrong)
    assert feedback.status == "not yet"
    assert message in feedback.message


def unsynchronised(work, synchronize, repeats=10):
    work()
    synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    return (time.perf_counter() - start) / repeats


def cold(work, synchronize, repeats=10):
    synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    synchronize()
    return (time.perf_counter() - start) / repeats


def queue_not_empty(work, synchronize, repeats=10):
    work()
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    synchronize()
    return (time.perf_counter() - start) / repeats


def undivided(work, synchronize, repeats=10):
    return lesson01.seconds_per_call(work, synchronize, repeats) * repeats


@pytest.mark.alone
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (unsynchronised, "before you stop the clock"),
        (cold, "before you start the clock"),
        (queue_not_empty, "before you start the clock"),
        (undivided, "Divide by `repeats`"),
        (lambda work, synchronize, repeats=10: 0.004, "never called"),
        (lambda work, synchronize, repeats=10: 4, "number with decimals"),
        (lambda work, synchronize, repeats=10: lesson01.seconds_per_call(work, synchronize) / 2, "just that number"),
    ],
    ids=["unsynchronised", "cold", "queue not empty", "undivided", "hard-coded", "an integer", "divided twice"],
)
def test_timing_mistakes(wrong, message) -> None:
    feedback = lesson01.timing.check(wrong)
    assert feedback.status == "not yet"
    assert message in feedback.message


@pytest.mark.alone
def test_a_measurement_spoilt_once_is_taken_again() -> None:
    spoilt = iter([1.0, 1.0, 0.0])

    def unlucky(work, synchronize, repeats=10):
        return lesson01.seconds_per_call(work, synchronize, repeats) + next(spoilt)

    assert lesson01.timing.check(unlucky).status == "passed"


# --- lesson 02 --------------------------------------------------------------------------------------------------


def naive_parse(text):
    return [float(line.split(",")[1]) for line in text.splitlines()]


def zero_for_missing(text):
    rows = [line.split(",") for line in text.splitlines()]
    return [0.0 if "[" in row[1] else float(row[1]) for row in rows if len(row) == 3]


def one_placeholder_only(text):
    rows = [line.split(", ") for line in text.splitlines()]
    return [None if row[1] == "[N/A]" else float(row[1]) for row in rows if len(row) == 3]


def integers(text):
    return [None if value is None else int(value) for value in lesson02.utilisation(text)]


@pytest.mark.parametrize(
    ("wrong", "status", "message"),
    [
        (naive_parse, "error", "could not convert string to float"),
        (zero_for_missing, "not yet", "unknown is not 0"),
        (one_placeholder_only, "error", "[Not Supported]"),
        (integers, "not yet", "should give [87.0]"),
        (lambda text: "87", "not yet", "Return a list"),
    ],
)
def test_parse_mistakes(wrong, status, message) -> None:
    feedback = lesson02.parse.check(wrong)
    assert feedback.status == status
    assert message in feedback.message


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"A": "healthy", "B": "starved", "C": "tiny kernels"}, "Look at the power"),
        ({"A": "starved", "B": "healthy", "C": "tiny kernels"}, "near 0 %"),
        ({"A": "busy", "B": "starved", "C": "healthy"}, "'busy' is none of the three"),
        ({"A": "healthy"}, 'keys "A", "B" and "C"'),
        ("starved", 'keys "A", "B" and "C"'),
    ],
)
def test_trace_mistakes(given, message) -> None:
    feedback = lesson02.traces_told_apart.check(lambda: given)
    assert feedback.status == "not yet"
    assert message in feedback.message


def measured(samples_per_s, busy_percent, data_wait_percent=40.0):
    """A measurement with just these figures."""
    return Measurement(
        recipe=Recipe(),
        device="CPU",
        samples=round(samples_per_s * 10),
        steps=10,
        warmup_steps=2,
        seconds=10.0,
        data_wait_s=data_wait_percent / 10,
        busy_percent=busy_percent,
        busy_source="CPU, not a GPU",
        peak_memory_bytes=None,
        memory_source="",
        loss_start=2.0,
        loss_end=1.0,
        ended_by="time",
        torch_version="2",
    )


@pytest.fixture
def runs(monkeypatch):
    """Replace the training by a list of measurements, taken in turn; what was trained is noted."""
    planned, trained = [], []

    def fake_train(recipe, **_):
        trained.append(recipe)
        return planned.pop(0)

    monkeypatch.setattr(measured_exercises, "train", fake_train)
    return planned, trained


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Recipe(), "This is the naive recipe"),
        ({"batch_size": 64}, "Return a recipe"),
        (Recipe(image_size=48), "image_size would change the job"),
        (Recipe(batch_size=64, steps=3, samples=48), "steps and samples would change the job"),
    ],
)
def test_recipes_that_are_no_answer_are_told_without_training(runs, given, message) -> None:
    feedback = lesson02.busier.check(lambda: given)
    assert feedback.status == "not yet"
    assert message in feedback.message
    assert runs[1] == []


@pytest.mark.parametrize(
    ("yours", "message"),
    [
        (measured(90, 99), "Busier, but not faster"),
        (measured(130, 80, 25), "Faster, but no busier"),
        (measured(100, 80), "Neither rose"),
    ],
)
def test_no_gain_is_measured_twice_and_told(runs, yours, message) -> None:
    planned, trained = runs
    planned += [measured(100, 80), yours] * 2
    mine = Recipe(num_workers=1)
    feedback = lesson02.busier.check(lambda: mine)
    assert feedback.status == "not yet"
    assert message in feedback.message
    assert "Naive: 100 samples/s, busy 80 %, waiting for data 40 %." in feedback.message
    assert f"waiting for data {yours.data_wait_percent:.0f} %" in feedback.message.partition("Yours: ")[2]
    assert trained == [Recipe(), mine, Recipe(), mine]


@pytest.mark.parametrize(
    "planned",
    [
        [measured(100, 80), measured(120, 90)],
        [measured(100, 80), measured(90, 80), measured(100, 80), measured(120, 90)],  # spoilt once
        [measured(100, 99), measured(120, 99)],  # it cannot get busier
        [measured(100, None), measured(120, None)],  # it cannot be asked
    ],
)
def test_a_gain_passes(runs, planned) -> None:
    runs[0].extend(planned)
    feedback = lesson02.busier.check(lambda: Recipe(num_workers=1))
    assert feedback.status == "passed"
    assert runs[0] == []


def test_the_made_up_traces_are_what_their_alt_text_says() -> None:
    limits = {}
    for letter, (seconds, busy, power) in lesson02.traces().items():
        assert len(seconds) == len(busy) == len(power)
        limits[letter] = [min(busy), max(busy), min(power), max(power)]
        pattern = rf"{letter}: busy \D*(\d+) (?:to|and) (\d+) %, power \D*(\d+) (?:to|and) (\d+) W"
        words = re.search(pattern, lesson02.TRACES_ALT)
        low, high, least, most = map(float, words.groups())
        assert low <= limits[letter][0] and limits[letter][1] <= high
        assert least <= limits[letter][2] and limits[letter][3] <= most


# --- lesson 03 --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda n, channels, height, width, dtype: n * channels * height * width, "is the number of elements"),
        (lambda n, channels, height, width, dtype: 4 * n * channels * height * width, "not every dtype has 4 bytes"),
        (lambda n, channels, height, width, dtype: n * channels * height * dtype.itemsize, "it should be 786,432"),
        (
            lambda n, channels, height, width, dtype: (
                lesson03.batch_bytes(n, channels, height, width, dtype) / (2**20 if n == 64 else 1)
            ),
            "looks like MiB",
        ),
        (lambda n, channels, height, width, dtype: "786432", "Return a number"),
        (lambda n, channels, height, width, dtype: True, "Return a number"),
    ],
)
def test_bytes_mistakes(wrong, message) -> None:
    feedback = lesson03.bytes_of_a_batch.check(wrong)
    assert feedback.status == "not yet"
    assert message in feedback.message


def everything(samples, info):
    return list(samples)


def even_blocks(samples, info):
    size = len(samples) // info.num_workers
    return list(samples[info.id * size : (info.id + 1) * size])


def lazy_last(samples, info):
    return list(samples) if info.id == 0 else []


def invented(samples, info):
    return [*samples[info.id :: info.num_workers], f"extra of {info.id}"]


@pytest.mark.parametrize(
    ("wrong", "status", "message"),
    [
        (everything, "not yet", "come more than once: 16 in all"),
        (even_blocks, "not yet", "With 9 samples and 2 workers, nobody yields 'sample 8'"),
        (lazy_last, "not yet", "one worker does most of it"),
        (invented, "not yet", "never there"),
        (lambda samples, info: samples[info.id :: info.num_workers], "error", "Something is None there"),
        (lambda samples, info: iter(samples), "not yet", "Return a list"),
        (lambda samples, info: [] if info is None else lesson03.my_share(samples, info), "not yet", "Without workers"),
    ],
)
def test_share_mistakes(wrong, status, message) -> None:
    feedback = lesson03.share.check(wrong)
    assert feedback.status == status
    assert message in feedback.message


def test_a_recipe_that_changes_the_batch_size_is_not_lesson_03s(runs) -> None:
    feedback = lesson03.fed.check(lambda: Recipe(batch_size=64, precision="amp"))
    assert feedback.status == "not yet"
    assert "batch_size and precision would change the job" in feedback.message
    assert runs[1] == []


@pytest.mark.parametrize(
    ("yours", "message"),
    [
        (measured(109, 80, 10), "the work moved, it did not shrink"),
        (measured(130, 80, 30), "It still waits"),
        (measured(90, 80, 40), "It still waits"),
    ],
)
def test_what_is_not_fed_is_told(runs, yours, message) -> None:
    runs[0].extend([measured(100, 80, 40), yours] * 2)
    feedback = lesson03.fed.check(lambda: Recipe(num_workers=1))
    assert feedback.status == "not yet"
    assert message in feedback.message


@pytest.mark.parametrize(
    "planned",
    [
        [measured(100, 80, 40), measured(111, 80, 19)],
        [measured(100, 80, 4), measured(111, 80, 4)],  # there was no wait to halve
        [measured(100, 80, 40), measured(100, 80, 40), measured(100, 80, 40), measured(111, 80, 19)],  # spoilt once
    ],
)
def test_what_is_fed_passes(runs, planned) -> None:
    runs[0].extend(planned)
    assert lesson03.fed.check(lambda: Recipe(num_workers=1)).status == "passed"


def test_the_traps_of_lesson_03_are_real_and_the_cure_cures() -> None:
    from torch.utils.data import DataLoader

    def pairs(**keywords):
        return torch.cat(list(DataLoader(lesson03.Lottery(), batch_size=2, num_workers=2, **keywords))).view(-1, 2)

    stream = sorted(int(value) for value in DataLoader(lesson03.Numbers(), batch_size=None, num_workers=2))
    assert stream == sorted([*range(8), *range(8)])
    copied, mended = pairs(), pairs(worker_init_fn=lesson03.fresh_generator)
    assert copied[0].equal(copied[1]) and copied[2].equal(copied[3])
    assert not mended[0].equal(mended[1])


# --- lesson 04 --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda fixed, each, memory, headroom: (memory * (1 - headroom) - fixed) / each, "a whole number"),
        (lambda fixed, each, memory, headroom: int((memory - fixed) // each), "With a tenth free"),
        (lambda fixed, each, memory, headroom: int((memory * (1 - headroom) - fixed) // each), "no negative batch"),
        (lambda fixed, each, memory, headroom: int(memory * (1 - headroom) // each), "That needs 1,100 bytes"),
        (lambda fixed, each, memory, headroom: 1, "more would fit"),
    ],
)
def test_fits_mistakes(wrong, message) -> None:
    def largest_batch(fixed_bytes, per_sample_bytes, memory_bytes, headroom):
        return wrong(fixed_bytes, per_sample_bytes, memory_bytes, headroom)

    feedback = lesson04.fits.check(largest_batch)
    assert feedback.status == "not yet"
    assert message in feedback.message


def accumulate_with(loss_of, *, zero=True, step_each=False, size=None, result=None):
    """A learner's accumulated step with one thing wrong."""

    def accumulated_step(model, optimizer, images, labels, micro_size):
        if zero:
            optimizer.zero_grad()
        total = 0.0
        for piece, targets in zip(images.split(size or micro_size), labels.split(size or micro_size), strict=True):
            loss = loss_of(model(piece), targets, len(images), micro_size)
            loss.backward()
            total += loss.item()
            if step_each:
                optimizer.step()
        if not step_each:
            optimizer.step()
        return total if result is None else result

    return accumulated_step


def right_loss(output, targets, count, micro_size):
    return torch.nn.functional.cross_entropy(output, targets, reduction="sum") / count


def mean_of_means(output, targets, count, micro_size):
    return torch.nn.functional.cross_entropy(output, targets) / -(-count // micro_size)


def undivided_loss(output, targets, count, micro_size):
    return torch.nn.functional.cross_entropy(output, targets)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (accumulate_with(mean_of_means), "a mean of means gives its samples too much weight"),
        (accumulate_with(undivided_loss), "count with its share"),
        (accumulate_with(right_loss, zero=False), "Are old gradients cleared first"),
        (accumulate_with(right_loss, step_each=True), "optimizer.step() ran 3 times"),
        (accumulate_with(right_loss, size=100), "each piece may hold 4 at most"),
        (accumulate_with(right_loss, result=0.5), "Return the batch's mean loss as a float"),
        (lambda model, optimizer, images, labels, micro_size: 0.0, "the model saw nothing"),
    ],
)
def test_accumulate_mistakes(wrong, message) -> None:
    feedback = lesson04.accumulate.check(wrong)
    assert feedback.status == "not yet"
    assert message in feedback.message


def test_a_right_accumulated_step_passes_and_changes_no_random_state() -> None:
    before = torch.get_rng_state()
    assert lesson04.accumulate.check(accumulate_with(right_loss)).status == "passed"
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("given", [16.0, 0, -8, 5000, True, "16"])
def test_what_is_no_batch_size_is_told(given, monkeypatch) -> None:
    monkeypatch.setattr(lesson04, "make_trial", lambda: lambda batch_size: None)
    feedback = lesson04.knee.check(lambda trial: given)
    assert feedback.status == "not yet"
    assert "a whole number from 1 to 4096" in feedback.message


def saturating(batch_size):
    """Samples per second of a device that is full at 32."""
    return 10.0 * min(batch_size, 32)


@pytest.mark.parametrize(
    ("given", "status", "message"),
    [
        (8, "not yet", "the curve is still rising"),
        (128, "not yet", "32 is as fast"),
        (32, "passed", "32: 320"),
        (1, "not yet", "4 is 4.00 times as fast"),
    ],
)
def test_the_knee_is_judged_by_its_neighbours(given, status, message, monkeypatch) -> None:
    monkeypatch.setattr(
        lesson04,
        "_rates",
        lambda trial, size: {n: saturating(n) for n in sorted({max(1, size // 4), size, 2 * size, 4 * size})},
    )
    feedback = lesson04.knee.check(lambda trial: given)
    assert feedback.status == status, feedback
    assert message in feedback.message


def test_a_measurement_that_was_disturbed_is_made_again(monkeypatch) -> None:
    monkeypatch.setattr(lesson04, "make_trial", lambda: lambda batch_size: None)
    monkeypatch.setattr(lesson04, "_rates", lambda trial, size: {n: saturating(n) for n in (size // 4, size, 2 * size)})
    answers = iter([8, 8, 32])
    assert lesson04.knee.check(lambda trial: next(answers)).status == "passed"
    answers = iter([8, 8, 8, 32])
    assert lesson04.knee.check(lambda trial: next(answers)).status == "not yet"


def test_a_size_that_does_not_fit_is_told(monkeypatch) -> None:
    def trial(batch_size):
        if batch_size > 16:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(lesson04, "make_trial", lambda: trial)
    feedback = lesson04.knee.check(lambda trial: 64)
    assert feedback.status == "not yet"
    assert "64 does not fit into this device's memory" in feedback.message


# --- lesson 05 --------------------------------------------------------------------------------------------------


def amp_with(*, unscale=True, update=True, wait=True, told=None):
    """A learner's mixed-precision step with one thing wrong."""

    def amp_step(model, optimizer, scaler, scheduler, micro_batches, max_norm):
        optimizer.zero_grad()
        for inputs, targets in micro_batches:
            with torch.autocast(inputs.device.type, dtype=torch.float16):
                loss = torch.nn.functional.cross_entropy(model(inputs), targets) / len(micro_batches)
            scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scale = scaler.get_scale()
        scaler.step(optimizer)
        if update:
            scaler.update()
        skipped = scaler.get_scale() < scale
        if not (skipped and wait):
            scheduler.step()
        return told or ("skipped" if skipped else "stepped")

    return amp_step


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (amp_with(unscale=False), "clip before unscale"),
        (amp_with(update=False), "missing update"),
        (amp_with(wait=False), "scheduler"),
        (amp_with(told="stepped"), 'Return "skipped"'),
        (amp_with(told=7), "it returned ['7']"),
        (lambda *arguments: 1 / 0, "ZeroDivisionError"),
    ],
    ids=["no-unscale", "no-update", "scheduler", "always-stepped", "number", "raises"],
)
def test_amp_mistakes(wrong, message) -> None:
    feedback = lesson05.amp.check(wrong)
    assert feedback.status in {"not yet", "error"}
    assert message in feedback.message


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda compile_s, eager_s, compiled_s, steps: compiled_s < eager_s, "A short run"),
        (lambda compile_s, eager_s, compiled_s, steps: steps > compile_s / (eager_s - compiled_s + 1e-9), "slower"),
        (lambda compile_s, eager_s, compiled_s, steps: steps * eager_s, "Return True or False"),
        (lambda compile_s, eager_s, compiled_s, steps: True, "A short run"),
    ],
    ids=["ignores-compiling", "negative-gain", "seconds", "always"],
)
def test_pays_mistakes(wrong, message) -> None:
    feedback = lesson05.pays.check(wrong)
    assert feedback.status == "not yet"
    assert message in feedback.message


def lean_with(*, loss_of=None, accuracy_of=None, train=True):
    """A learner's training step with one thing wrong."""

    def lean_step(model, optimizer, images, labels):
        optimizer.zero_grad()
        logits = model(images)
        loss = torch.nn.functional.cross_entropy(logits, labels)
        accuracy = (logits.argmax(1) == labels).float().mean()
        loss.backward()
        if train:
            optimizer.step()
        return (loss_of or torch.Tensor.detach)(loss), (accuracy_of or torch.Tensor.detach)(accuracy)

    return lean_step


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lean_with(loss_of=torch.Tensor.item), "makes the CPU wait"),
        (lean_with(loss_of=lambda loss: loss), "still holds the graph"),
        (lean_with(accuracy_of=lambda accuracy: accuracy + 1), "The accuracy should be"),
        (lean_with(accuracy_of=lambda accuracy: torch.zeros(3)), "The accuracy should be"),
        (lean_with(train=False), "the weights differ"),
        (lambda model, optimizer, images, labels: 1.0, "Return two things"),
    ],
    ids=["item", "graph", "wrong-accuracy", "several", "no-step", "one"],
)
def test_leaner_mistakes(wrong, message, monkeypatch) -> None:
    monkeypatch.setattr(lesson05, "_rounds", lambda answer: [(1.0, 1.0)])
    feedback = lesson05.leaner.check(wrong)
    assert feedback.status == "not yet"
    assert message in feedback.message


def test_a_lean_step_is_measured_again_before_it_fails(monkeypatch) -> None:
    attempts = iter([[(1.0, 1.0)], [(1.0, 0.9)], [(1.0, 0.9), (1.0, 0.7), (9.0, 7.0)]])
    monkeypatch.setattr(lesson05, "_rounds", lambda answer: next(attempts))
    assert lesson05.leaner.check(lean_with()).status == "passed"
    monkeypatch.setattr(lesson05, "_rounds", lambda answer: [(1.0, 1.0), (9.0, 3.0), (1.0, 1.0)])
    feedback = lesson05.leaner.check(lean_with())
    assert feedback.status == "not yet"
    assert "1.00 times as fast" in feedback.message


@pytest.mark.alone
def test_the_slow_step_itself_is_not_fast_enough() -> None:
    assert lesson05.leaner.check(lesson05.slow_step).status == "not yet"
