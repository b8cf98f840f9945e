"""nvidia-smi: every field report of cases.md kind 1, and their whole kind, in text and as programs that really run."""

from __future__ import annotations

import os
import shutil
import stat
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_utils import nvidia_smi
from course_utils.nvidia_smi import (
    DEFAULT_FIELDS,
    EXAMPLE_QUERY_CSV,
    EXAMPLE_SUMMARY,
    clean_name,
    parse_query_csv,
    parse_summary,
    query,
    query_summary,
)
from course_utils.nvidia_smi_parse import MAX_GPUS

MEMORY_AND_FAN = (
    "memory.total",
    "memory.free",
    "memory.used",
    "temperature.gpu",
    "fan.speed",
    "utilization.gpu",
    "utilization.memory",
)
FAILED_DRIVER = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. "
    "Make sure that the latest NVIDIA driver is installed and running.\n"
)
MISMATCH = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 535.161\n"


def answering(text, status=0):
    """A runner that records its commands and prints `text`."""
    commands = []

    def run(command, timeout_s):
        commands.append(list(command))
        return status, text

    run.commands = commands
    return run


# SMI-01: placeholders


@pytest.mark.parametrize(
    "placeholder", ["[N/A]", "[Not Supported]", "N/A", "", "[Unknown Error]", "[GPU is lost]", "-"]
)
def test_a_placeholder_is_none_and_the_row_stays(placeholder):
    report = parse_query_csv(f"2004, 2004, 0, 44, {placeholder}, 0, 0", MEMORY_AND_FAN)
    (gpu,) = report.gpus
    assert gpu.fan_percent is None
    assert (gpu.total_bytes, gpu.free_bytes, gpu.used_bytes) == (2004 * 2**20, 2004 * 2**20, 0)
    assert (gpu.temperature_c, gpu.busy_percent, gpu.memory_busy_percent) == (44, 0, 0)
    assert "n/a" in repr(report)
    assert "n/a" in report._repr_html_()


def test_a_broken_sensor_is_reported_and_a_missing_one_is_not():
    assert parse_query_csv("0, [Unknown Error]", ("index", "fan.speed")).problems == (
        "fan.speed of GPU 0: '[Unknown Error]'.",
    )
    assert parse_query_csv("0, [N/A]", ("index", "fan.speed")).problems == ()


# SMI-02: units, with a broken cell


def test_units_are_stripped_and_one_broken_cell_costs_only_itself():
    fields = ["name", "fan.speed", "utilization.gpu", "temperature.gpu", "power.draw", "power.limit"]
    fields += ["power.default_limit", "pstate", "clocks.sm", "clocks.mem", "power.max_limit", "power.min_limit"]
    text = (
        "GeForce GTX 1080 Ti, 53 %, 3 %, 84, 123.00 W, 262.50 W, [Unknown Error], P2, 1746 MHz, 5310 MHz, "
        "300.00 W, 250.00 W"
    )
    (gpu,) = parse_query_csv(text, fields).gpus
    assert (gpu.name, gpu.fan_percent, gpu.busy_percent, gpu.temperature_c) == ("GeForce GTX 1080 Ti", 53, 3, 84)
    assert (gpu.power_w, gpu.power_limit_w, gpu.pstate, gpu.sm_clock_mhz) == (123.0, 262.5, "P2", 1746)
    assert gpu.cells["power.default_limit"] is None
    assert gpu.cells["clocks.mem"] == "5310 MHz"


def test_headers_with_units_are_normalised_and_give_the_columns():
    text = (
        "name, fan.speed [%], utilization.gpu [%], temperature.gpu, power.draw [W], power.limit [W], "
        "enforced.power.limit [W], clocks.current.sm [MHz], clocks.current.memory [MHz], power.max_limit [W]\n"
        "GeForce RTX 2080 Ti, 100, 37, 56, 228.82, 210.00, 56, 1560, 6800, [Unknown Error]\n"
    )
    (gpu,) = parse_query_csv(text).gpus
    assert (gpu.name, gpu.fan_percent, gpu.busy_percent, gpu.power_w) == ("GeForce RTX 2080 Ti", 100, 37, 228.82)
    assert gpu.sm_clock_mhz == 1560
    assert "utilization.gpu" in gpu.cells
    assert gpu.cells["power.max_limit"] is None


@pytest.mark.parametrize(
    ("cell", "expected"), [("15360 MiB", 15360 * 2**20), ("15360", 15360 * 2**20), ("15 GiB", 15 * 2**30)]
)
def test_memory_is_bytes_exactly(cell, expected):  # SMI-17
    report = parse_query_csv(cell, ["memory.total"])
    assert report.gpus[0].total_bytes == expected == 16_106_127_360
    assert isinstance(report.gpus[0].total_bytes, int)
    assert "15,360 MiB" in repr(report)


def test_the_unit_of_the_header_counts_where_the_cell_has_none():
    assert parse_query_csv("memory.used [KiB]\n1024\n").gpus[0].used_bytes == 2**20


@pytest.mark.parametrize(
    ("column", "cell"),
    [
        ("memory.used", "12 parsecs"),
        ("utilization.gpu", "banana"),
        ("power.draw", "-3 W"),
        ("power.draw", "nan"),
        ("clocks.sm", "1e9"),
        ("index", "9" * 40),
    ],
)
def test_a_value_that_cannot_be_understood_is_none_and_is_reported(column, cell):
    report = parse_query_csv(f"Tesla T4, {cell}", ["name", column])
    gpu = report.gpus[0]
    assert {gpu.used_bytes, gpu.busy_percent, gpu.power_w, gpu.sm_clock_mhz, gpu.index} == {None}
    assert column in report.problems[0]


def test_throttle_reasons_are_read_under_both_names():
    for name in ("clocks_throttle_reasons.active", "clocks_event_reasons.active"):
        assert parse_query_csv(f"{name}, index\n0x0000000000000004, 0\n").gpus[0].throttle_bits == 4


def test_a_temperature_may_be_below_zero():
    assert parse_query_csv("-5", ["temperature.gpu"]).gpus[0].temperature_c == -5


# SMI-04, SMI-05, SMI-06 and their kind: sentences instead of rows


@pytest.mark.parametrize(
    ("text", "status", "reason", "hint"),
    [
        ("No devices were found\n", 0, "No devices were found", "Change runtime type"),
        ("No devices were found\n", 6, "No devices were found", "Change runtime type"),
        (FAILED_DRIVER, 9, "driver not loaded", "Change runtime type"),
        (FAILED_DRIVER, 0, "driver not loaded", "Change runtime type"),
        (MISMATCH, 18, "version mismatch", "delete runtime"),
        ("Failed to initialize NVML: Insufficient Permissions\n", 4, "Insufficient permissions", "administrator"),
        ("Failed to initialize NVML: GPU access blocked by the operating system\n", 17, "operating system", "WSL"),
        ("Failed to initialize NVML: Unknown Error\n", 255, "NVML did not start", "Restart"),
        (
            "Unable to determine the device handle for GPU 0000:02:00.0: GPU is lost. Reboot the system.\n",
            15,
            "lost",
            "Restart",
        ),
        (
            "NVIDIA-SMI couldn't find libnvidia-ml.so library in your system. Please make sure, that it is there.\n",
            12,
            "library (NVML)",
            "runtime",
        ),
        ("Segmentation fault (core dumped)\n", 139, "it said: Segmentation fault", None),
        ("", 1, "printed nothing", None),
        ("", 0, "printed nothing", None),
        ("\n \n", 0, "printed nothing", None),
    ],
)
@pytest.mark.parametrize("as_bytes", [False, True])
def test_a_sentence_is_a_reason_and_no_gpu(text, status, reason, hint, as_bytes):
    report = query(run=answering(text.encode() if as_bytes else text, status))
    assert report.gpus == ()
    assert reason in report.reason
    assert (hint is None) == (report.hint is None)
    assert hint is None or hint in report.hint
    assert (f"exit status {status}" in report.reason) == (status != 0)
    assert report.reason in repr(report)


def test_a_sentence_beside_good_rows_is_a_problem_and_hides_no_row():
    text = EXAMPLE_QUERY_CSV + "Unable to determine the device handle for GPU 0000:02:00.0: GPU is lost.\n"
    report = parse_query_csv(text)
    assert len(report.gpus) == 1
    assert report.reason is None
    assert "GPU is lost" in report.problems[0]


def test_a_lost_gpu_in_a_row_keeps_its_row_and_the_others():
    fields = ("index", "name", "utilization.gpu", "memory.used")
    report = parse_query_csv("0, Tesla T4, [GPU is lost], [GPU is lost]\n1, Tesla T4, 87, 900\n", fields)
    assert [gpu.busy_percent for gpu in report.gpus] == [None, 87]
    assert [gpu.index for gpu in report.gpus] == [0, 1]


# Locale, and rows of the wrong width


def test_a_decimal_comma_is_reported_and_shifts_nothing():
    fields = ("index", "power.draw", "temperature.gpu", "utilization.gpu")
    report = parse_query_csv("0, 23,5 W, 61, 37\n1, 24.1 W, 60, 38\n", fields)
    assert [(gpu.index, gpu.power_w, gpu.temperature_c) for gpu in report.gpus] == [(1, 24.1, 60)]
    assert "line 1 has 5 cells where 4 were expected" in report.problems[0]


@pytest.mark.parametrize("line", ["0, Tesla T4", "0, Tesla T4, 1, 2, 3"])
def test_only_bad_rows_leave_no_gpu_and_a_reason(line):
    report = parse_query_csv(line, ("index", "name", "fan.speed"))
    assert report.gpus == ()
    assert "could be read" in report.reason
    assert "expected" in report.problems[0]


def test_many_gpus_and_many_problems_stay_bounded():
    rows = "\n".join(f"{number}, Tesla T4" for number in range(MAX_GPUS + 500))
    report = parse_query_csv(rows + "\n" + "1, 2, 3\n" * 500, ("index", "name"))
    assert len(report.gpus) == MAX_GPUS
    assert report.gpus[-1].index == MAX_GPUS - 1
    assert len(report.problems) == 21
    assert "more" in report.problems[-1]
    assert len(report.raw) <= 20_000


def test_more_than_a_megabyte_is_cut_and_said():
    started = time.monotonic()
    report = parse_query_csv(b"x" * 3_000_000, ("index", "name"))
    assert time.monotonic() - started < 10
    assert report.gpus == ()
    assert len(report.raw) <= 20_000


@pytest.mark.parametrize("ending", ["\n", "\r\n", "\r", "\n\n"])
def test_any_line_ending_and_a_byte_order_mark(ending):
    text = "\ufeff" + ending.join(["index, utilization.gpu [%]", "0, 10 %", "1, 20 %"])
    assert [gpu.busy_percent for gpu in parse_query_csv(text).gpus] == [10, 20]


def test_without_fields_and_header_no_row_is_guessed():
    report = parse_query_csv("0, Tesla T4, 37\n")
    assert report.gpus == ()
    assert report.reason


# SMI-15: names


@pytest.mark.parametrize(
    ("name", "expected"),
    [(b"Tesla T4", "Tesla T4"), ("Tesla T4", "Tesla T4"), (b"\xf8\x01", "��"), (None, None), ("  ", None), (7, None)],
)
def test_a_name_is_text_whatever_the_binding_gives(name, expected):
    assert clean_name(name) == expected


def test_a_name_is_escaped_and_bounded():
    report = parse_query_csv(b"0, <script>alert(1)</script>\xff" + b"A" * 500, ("index", "name"))
    assert "<script>" not in report._repr_html_()
    assert len(report.gpus[0].name) <= 100
    hostile = parse_query_csv("<img src=x onerror=alert(1)>\n")
    assert "<img" not in hostile._repr_html_()


# The program: found or not, right or wrong, quick or hanging


def program(folder, body):
    """A real nvidia-smi on PATH."""
    path = folder / "nvidia-smi"
    path.write_text(f"#!{sys.executable}\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    return path


def test_a_missing_program_is_a_reason(monkeypatch, tmp_path):  # SMI-07
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(nvidia_smi, "WSL_PATH", tmp_path / "nowhere")
    report = query()
    assert report.gpus == ()
    assert "not found" in report.reason
    assert "Change runtime type" in report.hint
    assert "not found" in query_summary().reason


def test_the_program_of_wsl_is_found_off_the_path(monkeypatch, tmp_path):  # SMI-07
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(nvidia_smi, "WSL_PATH", program(tmp_path, f"print({EXAMPLE_QUERY_CSV!r})"))
    assert query().gpus[0].name == "Tesla T4"


def test_the_command_is_single_shot_csv_in_english(monkeypatch, tmp_path):
    seen = tmp_path / "seen"
    body = f"import os, sys; open({str(seen)!r}, 'w').write(repr(sys.argv[1:]) + os.environ['LC_ALL'])"
    program(tmp_path, body + f"; print({EXAMPLE_QUERY_CSV!r})")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    assert query().gpus
    assert seen.read_text() == repr([f"--query-gpu={','.join(DEFAULT_FIELDS)}", "--format=csv"]) + "C"


def test_errors_on_stderr_are_read_too(monkeypatch, tmp_path):
    program(tmp_path, "import sys; sys.stderr.write('No devices were found'); sys.exit(6)")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    report = query()
    assert "No devices were found" in report.reason
    assert "exit status 6" in report.reason


def test_a_hanging_program_and_its_children_do_not_hold_us_up(monkeypatch, tmp_path):  # SMI-13
    pid_file = tmp_path / "pid"
    program(
        tmp_path,
        "import subprocess, time, sys\n"
        f"child = subprocess.Popen(['sleep', '30'])\nopen({str(pid_file)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(30)",
    )
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    started = time.monotonic()
    report = query(timeout_s=1.5)
    assert time.monotonic() - started < 6
    assert report.timed_out
    assert report.gpus == ()
    assert "did not answer within 1.5 s" in report.reason
    child = int(pid_file.read_text())
    deadline = time.monotonic() + 5  # a killed process takes a moment to go
    while _runs(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(child)


def test_a_program_that_closes_its_output_and_stays_is_given_up(monkeypatch, tmp_path):
    program(tmp_path, "import os, time\nos.close(1)\nos.close(2)\ntime.sleep(30)")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    started = time.monotonic()
    assert query(timeout_s=1.0).timed_out
    assert time.monotonic() - started < 6


def test_a_program_that_prints_without_end_is_cut(monkeypatch, tmp_path):
    program(tmp_path, "while True: print('x' * 1000)")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    started = time.monotonic()
    report = query(timeout_s=2.0)
    assert time.monotonic() - started < 8
    assert report.gpus == ()
    assert 0 < len(report.raw) <= 20_000


def test_a_file_that_is_no_program_is_a_reason(monkeypatch, tmp_path):
    path = tmp_path / "nvidia-smi"
    path.write_bytes(b"\x00\x01not a program")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert "could not be started" in query().reason


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (FileNotFoundError("[WinError 2]"), "not found"),
        (PermissionError("denied"), "could not be started"),
        (TimeoutError(), "did not answer"),
        (OSError("odd"), "could not be started: odd"),
    ],
)
def test_no_error_of_starting_it_escapes(error, reason):
    def run(command, timeout_s):
        raise error

    report = query(run=run)
    assert reason in report.reason
    assert report.timed_out == isinstance(error, TimeoutError)
    assert reason in query_summary(run=run).reason


def test_an_unknown_field_is_left_out_and_said():
    def run(command, timeout_s):
        if "clocks_throttle_reasons.active" in command[1]:
            return 2, 'Field "clocks_throttle_reasons.active" is not a valid field to query.\n\n'
        return 0, "index, name\n0, Tesla T4\n"

    report = query(run=run)
    assert report.gpus[0].name == "Tesla T4"
    assert "clocks_throttle_reasons.active" in report.problems[0]


def test_a_query_of_only_unknown_fields_ends():
    def run(command, timeout_s):
        return 2, f'Field "{command[1].removeprefix("--query-gpu=").split(",")[0]}" is not a valid field to query.\n'

    report = query(["foo.bar", "foo.baz"], run=run)
    assert report.gpus == ()
    assert "does not know a field" in report.reason


@pytest.mark.parametrize("fields", [(), ("index; rm -rf /",), ("name", ""), ("--help",)])
def test_what_is_no_field_name_is_refused(fields):
    with pytest.raises(ValueError, match="fields must be names"):
        query(fields, run=answering(""))


# SMI-11: the summary table


def table(used="814MiB", panel=()):
    rows = [
        "+-----------------------------------------------------------------------------+",
        "| NVIDIA-SMI 470.82.01    Driver Version: 470.82.01    CUDA Version: 11.4     |",
        "|   0  NVIDIA A10G         On   | 00000000:00:1E.0 Off |                    0 |",
        f"|  0%   55C    P0   204W / 300W |    {used} / 22945MiB |     78%      Default |",
        "|                               |                      |                  N/A |",
        "| Processes:                                                                  |",
        "|  GPU   GI   CI        PID   Type   Process name                  GPU Memory |",
        *panel,
        "+-----------------------------------------------------------------------------+",
    ]
    return "\n".join(rows)


def test_a_blank_panel_with_memory_in_use_means_hidden_processes():
    summary = parse_summary(table())
    assert summary.processes == ()
    assert summary.processes_visible is False
    (gpu,) = summary.gpus
    assert (gpu.index, gpu.name, gpu.busy_percent) == (0, "NVIDIA A10G", 78)
    assert (gpu.used_bytes, gpu.total_bytes) == (814 * 2**20, 22945 * 2**20)
    assert (gpu.temperature_c, gpu.power_w, gpu.power_limit_w, gpu.pstate) == (55, 204, 300, "P0")
    assert (summary.driver_version, summary.cuda_version) == ("470.82.01", "11.4")
    assert "does not mean that your job is not on the GPU" in repr(summary)


def test_no_running_processes_is_an_answer():
    summary = parse_summary(EXAMPLE_SUMMARY)
    assert summary.processes_visible is True
    assert summary.processes == ()
    assert (summary.gpus[0].name, summary.gpus[0].total_bytes) == ("Tesla T4", 15360 * 2**20)
    assert (summary.gpus[0].busy_percent, summary.gpus[0].power_w) == (0, 9)
    assert (summary.driver_version, summary.cuda_version) == ("535.104.05", "12.2")


def test_listed_processes_are_read():
    panel = [
        "|    0   N/A  N/A      1234      C   python3                         811MiB |",
        "|    0   N/A  N/A       999    C+G   /usr/lib/xorg/Xorg                 N/A |",
        "|    0      4321      C   old driver's row                   17MiB |",
    ]
    summary = parse_summary(table(panel=panel))
    assert [(one.gpu_index, one.pid, one.kind, one.used_bytes) for one in summary.processes] == [
        (0, 1234, "C", 811 * 2**20),
        (0, 999, "C+G", None),
        (0, 4321, "C", 17 * 2**20),
    ]
    assert [one.name for one in summary.processes] == ["python3", "/usr/lib/xorg/Xorg", "old driver's row"]
    assert summary.processes_visible is True


def test_two_gpus_in_the_table():
    lines = EXAMPLE_SUMMARY.splitlines()
    second = [lines[8].replace("|   0  ", "|   1  "), lines[9].replace("0MiB /", "7MiB /")]
    summary = parse_summary("\n".join([*lines[:11], *second, *lines[11:]]))
    assert [(gpu.index, gpu.used_bytes) for gpu in summary.gpus] == [(0, 0), (1, 7 * 2**20)]


@pytest.mark.parametrize("text", ["No devices were found", FAILED_DRIVER, MISMATCH, "", "garbage"])
def test_a_summary_without_gpu_has_a_reason(text):
    summary = parse_summary(text)
    assert summary.gpus == ()
    assert summary.reason
    assert summary.processes_visible is None


def test_query_summary_reads_what_the_program_prints():
    run = answering(EXAMPLE_SUMMARY.encode())
    assert query_summary(run=run).gpus[0].name == "Tesla T4"
    assert run.commands == [["nvidia-smi"]]


def test_the_example_query_reads_completely():
    (gpu,) = parse_query_csv(EXAMPLE_QUERY_CSV).gpus
    assert (gpu.index, gpu.name, gpu.busy_percent, gpu.memory_busy_percent) == (0, "Tesla T4", 37, 14)
    assert (gpu.used_bytes, gpu.power_w, gpu.temperature_c, gpu.sm_clock_mhz) == (1893 * 2**20, 41.27, 61, 1245)
    assert gpu.fan_percent is None
    assert parse_query_csv(EXAMPLE_QUERY_CSV).problems == ()


# Whatever the text: it never raises, and records stay bounded

CELLS = st.sampled_from(
    ["0", "15360 MiB", "[N/A]", "[Unknown Error]", "37 %", "23,5 W", "Tesla T4", "0x4", "9" * 30, "-1", "1.5", "é�", ""]
)
ROWS = st.lists(st.lists(CELLS, min_size=1, max_size=15).map(", ".join), max_size=8).map("\n".join)
HEADED = ROWS.map(lambda rows: ", ".join(DEFAULT_FIELDS) + "\n" + rows)
SPOILT = st.tuples(
    st.sampled_from([EXAMPLE_QUERY_CSV, EXAMPLE_SUMMARY]), st.integers(0, 2000), st.text(max_size=20)
).map(lambda parts: parts[0][: parts[1]] + parts[2] + parts[0][parts[1] :])


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.text(max_size=2000), st.binary(max_size=2000), ROWS, HEADED, SPOILT))
def test_no_text_makes_a_parser_raise(text):
    for report in (parse_query_csv(text), parse_query_csv(text, DEFAULT_FIELDS), query(run=answering(text, 1))):
        assert len(report.gpus) <= MAX_GPUS
        assert len(report.problems) <= 21
        assert report.gpus or report.reason
        assert isinstance(repr(report) + report._repr_html_(), str)
        for gpu in report.gpus:
            assert gpu.busy_percent is None or gpu.busy_percent >= 0
            assert gpu.total_bytes is None or isinstance(gpu.total_bytes, int)
    summary = parse_summary(text)
    assert summary.gpus or summary.reason
    assert isinstance(repr(summary) + summary._repr_html_(), str)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 63), st.integers(0, 100), st.integers(0, 200_000)), min_size=1, max_size=20))
def test_what_is_printed_is_what_is_read(rows):
    text = "\n".join(f"{index}, {busy} %, {used} MiB" for index, busy, used in rows)
    gpus = parse_query_csv(text, ("index", "utilization.gpu", "memory.used")).gpus
    assert [(gpu.index, gpu.busy_percent, gpu.used_bytes) for gpu in gpus] == [
        (index, busy, used * 2**20) for index, busy, used in rows
    ]


def _runs(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False


def test_new_drivers_call_their_versions_otherwise():  # driver 610: sgl-project/sglang#27487
    renamed = EXAMPLE_SUMMARY.replace(
        "Driver Version: 535.104.05   CUDA Version: 12.2    ", "KMD Version: 610.43.02 CUDA UMD Version: 13.3"
    )
    assert renamed != EXAMPLE_SUMMARY
    summary = parse_summary(renamed)
    assert (summary.driver_version, summary.cuda_version) == ("610.43.02", "13.3")
