"""bench/: our rows hold what the issue promises, the peers' known failures show, and the harness itself is right."""

import json
import os
import random
import time

import numpy as np
import pytest
import torch

from bench import __main__ as bench_main
from bench import finders, loaders, monitoring, peers
from bench.finder_job import Job, StoppedError, changes, fits, limit_for, state_of
from bench.finders import OURS, Case, Row
from bench.report import Section, Table, as_record, as_text, header, ratio
from course_utils.driver import read_driver

UNTESTED = Case("limit 20", 20)


def run(finder, case=UNTESTED, limit_s=60.0):
    return finders.run_case(case, "it", finder, limit_s)


# Our finder


@pytest.fixture(scope="module")
def our_rows():
    section = finders.measure(quick=True, with_peers=False, progress=False)
    return [record for record in section.records if record["finder"] == OURS]


def test_our_finder_meets_what_the_issue_asks_for(our_rows):
    assert [row["case"] for row in our_rows] == [case.name for case in finders.QUICK]
    answered = [row for row in our_rows if row["best"]]
    assert len(answered) == 4
    for row in answered:
        assert row["error"] is None, row
        assert row["tested"], row
        assert 0.98 * row["best"] <= row["result"] <= row["best"], row
        assert len(row["tried"]) <= 4, row
        assert row["steps"] >= 2 * (len(row["tried"]) - row["ooms"]), row
    ooms = sorted(row["ooms"] for row in answered)
    assert ooms[len(ooms) // 2] == 0
    assert ooms[-1] <= 1


def test_our_finder_leaves_no_trace(our_rows):
    assert {row["case"]: row["changed"] for row in our_rows if row["changed"]} == {}


def test_our_finder_says_that_nothing_fits(our_rows):
    (row,) = [row for row in our_rows if not row["best"]]
    assert row["result"] is None
    assert row["error"].startswith("NothingFits")
    assert row["right"]


def test_a_small_data_set_caps_our_result(our_rows):
    (row,) = [row for row in our_rows if "300 samples" in row["case"]]
    assert row["result"] == 300
    assert max(row["tried"]) == 300


# The peers


def test_the_peers_known_failures_show():
    pytest.importorskip("lightning")
    pytest.importorskip("accelerate")
    found, missing = peers.peers()
    assert missing == ()
    power = run(found["Lightning, power"], Case("limit 700, 300 samples", 700, samples=300))
    assert (power.result, power.tested, power.right) == (512, False, False)
    assert "torch's RNG" in power.changed
    above = run(found["Lightning, power"], Case("limit 100, start at 256", 100, start=256))
    assert (above.result, above.ooms, above.right) == (256, 1, False)
    assert above.ratio == 2.56
    search = run(found["Lightning, binsearch"], Case("limit 100", 100))
    assert (search.result, search.tested, search.right) == (95, False, False)
    assert len(search.tried) > 8
    nothing = run(found["Lightning, binsearch"], Case("nothing fits", 0))
    assert (nothing.result, nothing.tested, nothing.right) == (1, False, False)
    smaller = run(found["accelerate"], Case("limit 20", 20))
    assert (smaller.result, smaller.tested, smaller.right) == (19, True, False)
    assert (len(smaller.tried), smaller.ooms) == (17, 16)
    assert smaller.changed == ("torch's RNG",)
    given_up = run(found["accelerate"], Case("nothing fits", 0))
    assert given_up.right
    assert "reached zero" in given_up.error


def test_missing_peers_are_said_in_a_line(monkeypatch):
    monkeypatch.setattr(peers, "installed", lambda name: None)
    found, missing = peers.peers()
    assert found == {}
    assert [line.split()[0] for line in missing] == ["lightning", "accelerate"]
    monkeypatch.setattr(finders, "QUICK", ())
    section = finders.measure(quick=True, progress=False)
    assert section.notes == missing
    assert "Note: lightning is not installed here" in as_text(section)


# The job that all finders get


@pytest.mark.parametrize("size", [1, 5, 20])
def test_the_limit_is_exact(size):
    limit_bytes = limit_for(size)
    assert [count for count in range(1, 2 * size + 2) if fits(count, limit_bytes)[0]] == list(range(1, size + 1))


def test_nothing_fits_a_limit_for_zero_but_the_model_does():
    assert not fits(1, limit_for(0))[0]
    job = Job(limit_for(0))
    job.memory.track(job.model)
    assert 0 < job.memory.used_bytes < limit_for(0)


def test_a_result_that_never_ran_is_not_tested():
    def cheat(job, start):
        job.begin_trial(10)
        job.train_step(10, job.model, job.optimizer)
        return 20

    row = run(cheat)
    assert (row.result, row.ratio, row.tested, row.right) == (20, 1.0, False, False)
    assert (row.tried, row.steps) == ((10,), 1)


@pytest.mark.parametrize(("size", "right"), [(20, True), (19, False), (21, False)])
def test_a_result_is_right_when_it_ran_and_is_close_to_the_limit(size, right):
    def honest(job, start):  # outside the memory, so that 21 runs too
        job.begin_trial(size)
        return job.train_step(size, job.model, job.optimizer)

    row = run(honest)
    assert (row.tested, row.right, row.ooms) == (True, right, 0)


def test_a_size_that_does_not_fit_is_counted_and_did_not_run():
    def greedy(job, start):
        job.begin_trial(40)
        try:
            with job.memory:
                job.memory.track(job.model)
                job.train_step(40, job.model, job.optimizer)
        except torch.OutOfMemoryError as error:
            assert str(error).startswith("CUDA out of memory. ")  # the words by which the peers know it
        return 40

    row = run(greedy)
    assert (row.ooms, row.tested, row.right, row.steps) == (1, False, False, 0)


def test_a_trial_counts_as_the_largest_batch_that_it_ran():
    job = Job(None)
    job.begin_trial(10)
    assert job.tried == [10]  # asked for; it has not run yet
    for size in (4, 8, 3):
        job.ran(size)
    job.begin_trial(20)
    assert job.tried == [8, 20]


def test_the_summary_counts_and_leaves_out_what_has_no_answer():
    def row(case, result, best, tried, ooms, right, changed=()):
        return Row(case, OURS, result, None, best, right, tried, 2, ooms, 0.5, changed, right)

    rows = [
        row("a", 10, 10, (10,), 0, True),
        row("b", 20, 10, (1, 2, 4, 8, 16), 3, False, ("weights",)),
        row("nothing fits", None, 0, (2, 1), 2, True, ("weights", "torch's RNG")),
    ]
    (cells,) = finders._summary(rows, [OURS]).rows
    assert cells == (
        OURS, "2 of 3", "1.00, 1.50, 2.00 x", "1 of 2", "1 of 2", "3, 5", "1.5, 3", "6", "1.5", "weights, torch's RNG",
    )  # fmt: skip
    details = finders._details(rows).rows
    assert details[1][2:6] == ("2.00 x", "20", "10", "no")
    assert details[2][2] == "n/a"


def test_a_batch_larger_than_the_data_set_counts_as_what_it_was():
    def ask(job, start):
        job.begin_trial(64)
        job.train_step(64, job.model, job.optimizer)
        return 64

    row = run(ask, Case("small", 100, samples=30))
    assert (row.tried, row.tested, row.best) == ((30,), False, 30)


@pytest.mark.parametrize(("limit_s", "why"), [(60.0, "100 trials"), (0.0, "0 s")])
def test_a_finder_that_does_not_end_is_stopped(limit_s, why):
    def forever(job, start):
        while True:
            job.begin_trial(1)

    row = run(forever, limit_s=limit_s)
    assert (row.result, row.right) == (None, False)
    assert row.error == f"does not end: stopped after {why}"
    assert not issubclass(StoppedError, RuntimeError)  # or the peers would take it for a full memory


def test_an_ordinary_error_is_no_answer_to_nothing_fits():
    def crash(job, start):
        raise ValueError("batch_size should be positive")

    assert not run(crash, Case("nothing fits", 0)).right

    def give_up(job, start, smallest=1):
        job.begin_trial(smallest)
        raise RuntimeError("nothing fits")

    assert run(give_up, Case("nothing fits", 0)).right
    assert not run(lambda job, start: give_up(job, start, 2), Case("nothing fits", 0)).right
    assert not run(give_up).right


def _other_words(kind, words, *rest):
    """NumPy's state with the same position, so that nothing but the array tells them apart."""
    return kind, words ^ 1, *rest


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("weights", lambda job: next(job.model.parameters()).data.add_(1e-7)),
        ("buffers", lambda job: next(job.model.buffers()).add_(1e-7)),
        ("optimizer", lambda job: job.optimizer.param_groups[0].update(lr=2e-3)),
        ("gradients", lambda job: setattr(next(job.model.parameters()), "grad", torch.zeros(8, 3, 3, 3))),
        ("train mode", lambda job: job.model[6].eval()),
        ("Python's RNG", lambda job: random.random()),
        ("NumPy's RNG", lambda job: np.random.rand()),
        ("NumPy's RNG", lambda job: np.random.set_state(_other_words(*np.random.get_state()))),
        ("torch's RNG", lambda job: torch.rand(1)),
    ],
)
def test_each_change_of_state_is_noticed_and_named(name, change):
    job = Job(None)
    before = state_of(job.model, job.optimizer)
    assert changes(before, state_of(job.model, job.optimizer)) == ()
    change(job)
    assert changes(before, state_of(job.model, job.optimizer)) == (name,)


def test_a_training_step_changes_all_that_is_compared():
    job = Job(None)
    before = state_of(job.model, job.optimizer)
    job.begin_trial(4)
    job.train_step(4, job.model, job.optimizer)
    changed = changes(before, state_of(job.model, job.optimizer))
    assert {"weights", "buffers", "optimizer", "gradients", "torch's RNG"} <= set(changed)


# Loaders


class Counted(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.zeros(3), index


def task(workers=(0, 1)):
    return loaders.Task("tiny", Counted(), 4, lambda batch: None, workers)


def test_the_grid_holds_every_valid_setting_once():
    settings = loaders.grid((0, 1, 2))
    assert len(settings) == (1 + 2 * 2 * 2) * (2 if torch.cuda.is_available() else 1)
    assert len({str(setting) for setting in settings}) == len(settings)
    for keywords in settings:
        assert task().make_loader(**keywords).num_workers == keywords["num_workers"]


@pytest.mark.parametrize("keywords", [{"num_workers": 0}, {"num_workers": 1, "persistent_workers": True}])
def test_the_clock_of_the_loaders_counts_only_what_was_made_under_it(keywords):
    # One worker makes a sample every 2 ms at best, whatever it had ready before.
    rate = loaders.samples_per_s(task(), keywords, 0.1, whole_epoch=True)
    assert 0 < rate <= 1.1 / 0.002


def test_the_choices_are_compared_with_the_grid(monkeypatch):
    measured = []

    def rate(task, keywords, least_s, *, whole_epoch=False):
        measured.append(keywords["num_workers"])
        return 100.0 * (1 + keywords["num_workers"])

    monkeypatch.setattr(loaders, "samples_per_s", rate)
    monkeypatch.setattr(loaders, "_tune", lambda task, quick: ({"num_workers": 0}, 1.5, 3))
    choices = loaders.compare(task((0, 1)), quick=False, progress=False)
    by_name = {choice.chosen_by.split(" =")[0]: choice for choice in choices}
    assert by_name["exhaustive grid"].keywords["num_workers"] == 1
    assert by_name["exhaustive grid"].settings_measured == len(loaders.grid((0, 1)))
    assert by_name["tune_loader"].rates == (100.0, 100.0, 100.0)
    assert by_name["rule: 0 workers"].keywords == {"num_workers": 0}
    assert by_name["rule: 4 per GPU"].keywords["num_workers"] == 4 * max(1, torch.cuda.device_count())
    (table,) = loaders._tables(choices)
    assert table.rows[0][:2] == ("tune_loader", "0.50 x")
    assert table.rows[1][:3] == ("exhaustive grid", "1.00 x", "1.00 x")
    assert table.rows[2][2] == "n/a"  # a rule takes no time: nothing was measured


def test_the_tuner_is_asked_as_a_user_would():
    keywords, seconds, measured = loaders._tune(task(), quick=True)
    assert keywords["num_workers"] >= 0
    assert measured >= 1
    assert 0 < seconds < 10  # its budget is 4 s


# Monitoring


def test_a_launch_costs_more_than_a_reading_and_the_stand_ins_are_said():
    path = os.environ["PATH"]
    section = monitoring.measure(quick=True, progress=False)
    nvml, smi = section.records
    assert nvml["median_s"] >= monitoring.NVML_S or not section.notes
    assert smi["median_s"] > 5 * nvml["median_s"]
    assert section.tables[0].rows[0][1] == "1.0 x"
    assert float(section.tables[0].rows[1][1].split()[0]) > 5
    assert os.environ["PATH"] == path
    assert read_driver().gpus or sum("stand-in" in note for note in section.notes) == 3


# The report


def test_the_report_names_the_machine_and_writes_the_same_as_json(tmp_path, capsys):
    file = tmp_path / "bench.json"
    assert bench_main.main(["--only", "monitoring", "--quick", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    for name in ("date", "machine", "CPU", "RAM", "GPU", "versions"):
        assert f"{name}: " in printed
    assert torch.__version__.split("+")[0] in printed
    written = json.loads(file.read_text())
    assert written["header"].keys() == header().keys()
    (section,) = written["sections"]
    assert section["name"] == "monitoring"
    for row in section["tables"][0]["rows"]:
        assert all(cell in printed for cell in row)


def test_an_unknown_benchmark_is_named(capsys):
    with pytest.raises(SystemExit):
        bench_main.main(["--only", "finders,speed"])
    assert "'speed'" in capsys.readouterr().err


def test_text_puts_ratios_first():
    section = Section("x", "X", (Table("A table", ("way", "ratio"), (("ours", "1.00 x"),)),), (), ("a note",), 1.0)
    assert as_text(section).splitlines()[:3] == ["== X (1 s)", "", "A table"]
    assert "Note: a note" in as_text(section)
    assert as_record({"date": "d"}, [section])["sections"][0]["notes"] == ("a note",)
    assert ratio(1.0, None) is None
    assert ratio(None, 1.0) is None
    assert ratio(1.0, 0.0) is None
