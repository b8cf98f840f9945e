"""The monitor on a fake NVML: what it records, what it survives, what it costs, and which GPU it watches."""

from __future__ import annotations

import gc
import itertools
import json
import math
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from fake_nvml import FakeGpu, FakeNvml, NVMLError
from hypothesis import given, settings
from hypothesis import strategies as st

from course_utils import monitor_collector, monitor_view, nvidia_smi
from course_utils.monitor import (
    CpuBackend,
    Device,
    Monitor,
    NvmlBackend,
    Reading,
    Sample,
    SmiBackend,
    Trace,
    open_backend,
)
from course_utils.monitor_trace import statistic
from course_utils.monitor_types import NoGpuError
from course_utils.nvidia_smi_parse import SmiReport, parse_query_csv
from course_utils.visible_devices import GpuIdentity, visible_nvml_indices

ROOT = Path(__file__).parents[1]
T4_ROWS = "index, name, uuid, utilization.gpu [%], memory.used [MiB], memory.total [MiB], temperature.gpu\n"


def backend(*gpus, environment=None, **options):
    return NvmlBackend(FakeNvml(gpus or [FakeGpu()], **options), environment or {})


def wait_for(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not happen"
        time.sleep(0.005)


class Scripted:
    """A backend whose `read` does what the test says."""

    source, label, min_interval_s = "scripted", "GPU", 0.0
    devices = (Device("scripted", 0, 0),)
    notes = ()

    def __init__(self, read):
        self.read = read
        self.closed = False

    def close(self):
        self.closed = True


# What is recorded


def test_a_run_records_every_metric_in_its_unit():
    with Monitor(0.01, backend()) as monitor:
        wait_for(lambda: len(monitor.trace.samples) >= 3)
    summary = monitor.summary()
    assert (summary.source, summary.label, summary.device.name) == ("NVML", "GPU", "Tesla T4")
    assert summary.busy_percent.mean == summary.busy_percent.median == 50
    assert summary.busy_percent.samples == len(monitor.trace.samples) >= 4
    assert summary.memory_busy_percent.max == 20
    assert summary.used_bytes.mean == 444 * 2**20
    assert (summary.power_w.max, summary.temperature_c.max, summary.sm_clock_mhz.max) == (41.27, 61, 1245)
    assert (summary.device.total_bytes, summary.device.power_limit_w) == (15360 * 2**20, 70.0)
    assert summary.throttle_shares == {"power cap (software)": 1.0}
    assert (summary.failed, summary.timed_out, summary.idle_share) == (0, 0, 0.0)
    assert summary.seconds > 0
    assert "Tesla T4, through NVML" in repr(summary)
    assert "444 MiB" in summary._repr_html_()


def test_the_series_arrives_in_order_and_the_first_value_is_not_from_before_the_start():
    with Monitor(0.02, backend(FakeGpu(busy=[10, 20, 30, 40]))) as monitor:
        assert monitor.trace.samples == ()
        wait_for(lambda: len(monitor.trace.samples) >= 4)
    trace = monitor.trace
    assert trace.values()[:4] == [10, 20, 30, 40]
    assert trace.times_s == sorted(trace.times_s)
    assert trace.times_s[0] >= 0.02


def test_even_a_very_short_block_has_a_sample():
    with Monitor(10, backend()) as monitor:
        pass
    assert monitor.summary().busy_percent.samples == 1


def test_nvml_is_initialised_once_and_released_once():
    nvml = FakeNvml([FakeGpu()])
    chosen = open_backend({}, nvml)
    for _ in range(5):
        chosen.read()
    chosen.close()
    assert (nvml.calls["nvmlInit"], nvml.calls["nvmlShutdown"], nvml.users) == (1, 1, 0)


def test_a_backend_that_the_caller_passed_stays_open():
    scripted = Scripted(lambda: [Reading(1.0)])
    with Monitor(0.01, scripted):
        pass
    assert not scripted.closed


def test_memory_leaves_out_what_the_driver_reserves_and_falls_back_to_version_1():
    assert backend(FakeGpu(used_bytes=100)).read()[0].used_bytes == 100
    assert backend(FakeGpu(used_bytes=100, fails={"memory_v2": 13})).read()[0].used_bytes == 100 + 2**28


def test_throttle_reasons_fall_back_to_their_old_name():
    gpu = FakeGpu(throttle_bits=0x40, fails={"throttle": 13})
    assert backend(gpu).read()[0].throttle_bits == 0x40


# What cannot be read


@pytest.mark.parametrize("code", [999, 3])
def test_a_metric_that_fails_is_none_and_the_others_stay(code):  # SMI-08
    chosen = backend(FakeGpu(fails={"utilisation": code}))
    (reading,) = chosen.read()
    assert reading.busy_percent is None
    assert reading.memory_busy_percent is None
    assert reading.used_bytes == 444 * 2**20
    assert reading.power_w == 41.27
    assert chosen.notes == (f"GPU 0, utilisation: {NVMLError(code)}.",)
    chosen.read()
    assert len(chosen.notes) == 1


@pytest.mark.parametrize(
    "metric", ["utilisation", "memory", "power", "temperature", "clock", "name", "uuid", "power_limit"]
)
def test_any_single_metric_may_fail(metric):
    fails = {metric: 999, **({"memory_v2": 999} if metric == "memory" else {})}
    (reading,) = backend(FakeGpu(fails=fails)).read()
    missing = [name for name in Reading.__slots__ if getattr(reading, name) is None]
    expected = {
        "utilisation": ["busy_percent", "memory_busy_percent"],
        "memory": ["used_bytes"],
        "power": ["power_w"],
        "temperature": ["temperature_c"],
        "clock": ["sm_clock_mhz"],
    }
    assert missing == expected.get(metric, [])


def test_averages_skip_what_is_none():  # SMI-08
    assert Trace.from_busy([50, None, 70]).summary().busy_percent.mean == 60
    summary = Trace.from_busy([None, None]).summary()
    assert (summary.busy_percent.mean, summary.busy_percent.median, summary.busy_percent.min) == (None, None, None)
    assert summary.busy_percent.samples == 0
    assert summary.idle_share is None
    assert "n/a" in repr(summary)


@pytest.mark.parametrize("when", ["from the start", "later"])
def test_a_lost_gpu_does_not_hide_the_others(when):
    lost = FakeGpu(uuid="GPU-lost", fails={"all": 15} if when == "from the start" else {})
    chosen = backend(FakeGpu(uuid="GPU-a", busy=30), lost, FakeGpu(uuid="GPU-c", busy=70))
    with Monitor(0.01, chosen) as monitor:
        lost.fails["all"] = 15
        wait_for(lambda: len(monitor.trace.samples) >= 3)
    trace = monitor.trace
    assert [device.index for device in trace.devices] == [0, 1, 2]
    assert trace.summary(0).busy_percent.mean == 30
    assert trace.values(device=1)[-1] is None
    assert trace.summary(2).busy_percent.mean == 70
    assert any("GPU is lost" in note for note in trace.notes)


@pytest.mark.parametrize(
    ("name", "expected"), [(b"Tesla T4", "Tesla T4"), ("Tesla T4", "Tesla T4"), (b"\xf8\x01", "��")]
)
def test_a_name_may_be_bytes_even_undecodable_ones(name, expected):  # SMI-15
    assert backend(FakeGpu(name=name)).devices[0].name == expected


@pytest.mark.parametrize("nonsense", [math.nan, math.inf, -1, 101, 10**400, "50", None, True])
def test_a_value_that_no_sensor_shows_is_none(nonsense):
    assert backend(FakeGpu(busy=nonsense)).read()[0].busy_percent is None
    with Monitor(0.01, Scripted(lambda: [Reading(busy_percent=nonsense)])) as monitor:
        pass
    assert monitor.trace.values() == [None]
    assert monitor.trace.failed == 0


# Choosing a backend


def test_nvml_first():
    assert open_backend({}, FakeNvml([FakeGpu()])).source == "NVML"


@pytest.mark.parametrize("nvml", [FakeNvml(init_error=9), FakeNvml([])])
def test_then_nvidia_smi(monkeypatch, nvml):
    answer = parse_query_csv(T4_ROWS + "0, Tesla T4, GPU-1, 37 %, 814 MiB, 15360 MiB, 61\n")
    monkeypatch.setattr(nvidia_smi, "query", lambda **options: answer)
    chosen = open_backend({}, nvml)
    assert (chosen.source, chosen.label, chosen.min_interval_s) == ("nvidia-smi", "GPU", 0.5)
    assert chosen.read() == [Reading(busy_percent=37, used_bytes=814 * 2**20, temperature_c=61)]
    assert chosen.devices[0] == Device("Tesla T4", 0, 0, "GPU-1", 15360 * 2**20)
    assert nvml.users == 0


def test_then_the_cpu_labelled_as_such(monkeypatch):
    monkeypatch.setattr(nvidia_smi, "find_nvidia_smi", lambda: None)
    chosen = open_backend({}, FakeNvml(init_error=9))
    assert (chosen.source, chosen.label) == ("CPU (psutil)", "CPU, not a GPU")
    assert chosen.notes[0] == "NVML: Driver Not Loaded."
    assert "not found" in chosen.notes[1]


def test_hidden_gpus_are_not_watched_because_torch_does_not_use_them(monkeypatch):
    monkeypatch.setattr(nvidia_smi, "find_nvidia_smi", lambda: None)
    nvml = FakeNvml([FakeGpu()])
    chosen = open_backend({"CUDA_VISIBLE_DEVICES": ""}, nvml)
    assert chosen.label == "CPU, not a GPU"
    assert "CUDA_VISIBLE_DEVICES='' hides every GPU" in chosen.notes[0]
    assert nvml.users == 0


def test_without_the_binding_there_is_a_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(NoGpuError, match="pip install nvidia-ml-py"):
        NvmlBackend(environment={})


def test_the_cpu_backend_sees_work_and_memory():
    chosen = CpuBackend()
    deadline = time.monotonic() + 0.4
    while time.monotonic() < deadline:
        pass
    (reading,) = chosen.read()
    assert 0 < reading.busy_percent <= 100
    assert 0 < reading.used_bytes < chosen.devices[0].total_bytes
    assert reading.power_w is reading.temperature_c is None
    assert "core" in chosen.devices[0].name
    assert chosen.read()[0].busy_percent is None  # too soon for CPU times, which come in ticks


def test_two_cpu_backends_do_not_disturb_each_other():
    first, second = CpuBackend(), CpuBackend()
    time.sleep(0.3)
    assert first.read()[0].busy_percent is not None
    assert second.read()[0].busy_percent is not None


def smi(*reports, environment=None):
    """An SmiBackend whose queries give these reports, the last one again and again."""
    remaining = list(reports)
    return SmiBackend(
        environment=environment or {}, query=lambda **options: remaining.pop(0) if len(remaining) > 1 else remaining[0]
    )


def test_a_gpu_that_nvidia_smi_drops_is_none_and_the_other_stays():
    both = parse_query_csv(T4_ROWS + "0, A, GPU-1, 1, 1, 1, 1\n1, B, GPU-2, 2, 2, 2, 2\n")
    one = parse_query_csv(T4_ROWS + "1, B, GPU-2, 22, 2, 2, 2\n")
    first, second = smi(both, one, environment={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}).read()
    assert (first.busy_percent, second.busy_percent) == (None, 22)


def test_nvidia_smi_that_hangs_is_a_timeout_and_one_that_fails_has_a_reason():
    good = parse_query_csv(T4_ROWS + "0, A, GPU-1, 1, 1, 1, 1\n")
    with pytest.raises(TimeoutError):
        smi(good, SmiReport(reason="did not answer", timed_out=True)).read()
    with pytest.raises(NoGpuError, match="lost"):
        smi(good, SmiReport(reason="A GPU is lost.")).read()
    with pytest.raises(NoGpuError, match="no GPU"):
        smi(SmiReport())


# Which GPU is torch's cuda:0 (SMI-14)

UUIDS = ["GPU-2dee1e25-aaaa", "GPU-2dee1e25-bbbb", "GPU-77777777-cccc"]
THREE = [GpuIdentity(index, uuid, "Tesla T4") for index, uuid in enumerate(UUIDS)]


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (None, (0, 1, 2)),
        ("1", (1,)),
        ("2,0", (2, 0)),
        (" 2 , 0 ", (2, 0)),
        (UUIDS[1], (1,)),
        ("GPU-77", (2,)),
        ("GPU-77,GPU-2dee1e25-a", (2, 0)),
        ("GPU-2dee1e25", ()),  # two begin like that
        ("GPU-77,GPU-nowhere,GPU-2dee1e25-a", (2,)),
        ("GPU-77,0", (2,)),
        ("GPU-77,GPU-7777", ()),  # the same one twice
        ("", ()),
        ("-1", ()),
        ("0,-1,1", (0,)),
        ("0,5,1", (0,)),
        ("3", ()),
        ("0,1,0", ()),
        ("0,GPU-77", (0,)),
        ("1gpu2,2ampere", (1, 2)),
        ("none", ()),
        ("NoDevFiles", ()),
        (",", ()),
        ("+1", (1,)),
        ("²", ()),
        ("9" * 5000, ()),
    ],
)
def test_which_gpus_torch_sees(setting, expected):
    environment = {} if setting is None else {"CUDA_VISIBLE_DEVICES": setting}
    visible = visible_nvml_indices(environment, THREE)
    assert visible.indices == expected
    assert visible.hidden == (setting is not None and expected == ())
    assert visible.warning is None


@pytest.mark.parametrize(
    ("setting", "gpus", "expected"),
    [
        ("MIG-GPU-77777777-cccc/1/0", THREE, (2,)),
        ("MIG-12345678-9abc", THREE, (None,)),
        ("MIG-12345678-9abc,MIG-999", THREE[:1], (0,)),
        ("MIG-1234", [*THREE[:1], GpuIdentity(1, "GPU-x", "A100", ("MIG-12345678-9abc",))], (1,)),
    ],
)
def test_a_mig_instance_belongs_to_a_gpu(setting, gpus, expected):
    visible = visible_nvml_indices({"CUDA_VISIBLE_DEVICES": setting}, gpus)
    assert visible.indices == expected
    assert "MIG" in visible.warning
    assert not visible.hidden


def test_different_models_in_cudas_own_order_are_a_warning():
    mixed = [GpuIdentity(0, "GPU-1", "Tesla T4"), GpuIdentity(1, "GPU-2", "A100")]
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in visible_nvml_indices({}, mixed).warning
    assert "CUDA_DEVICE_ORDER" in visible_nvml_indices({"CUDA_VISIBLE_DEVICES": "1"}, mixed).warning
    assert "CUDA_DEVICE_ORDER" in visible_nvml_indices({"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, mixed).warning
    assert visible_nvml_indices({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, mixed).warning is None
    assert visible_nvml_indices({"CUDA_VISIBLE_DEVICES": "GPU-2"}, mixed).warning is None


@given(st.text(alphabet="0123456789-, GPUMIG/abcdef²", max_size=40))
def test_no_setting_makes_the_mapping_raise_and_torch_agrees(setting):
    visible = visible_nvml_indices({"CUDA_VISIBLE_DEVICES": setting}, THREE)
    assert len(set(visible.indices)) == len(visible.indices) <= 3
    assert set(visible.indices) <= {0, 1, 2, None}


def test_torch_itself_reads_integers_the_same_way(monkeypatch):
    import torch.cuda

    for setting in ["1", "2,0", "", "-1", "0,-1,1", "0,1,0", "1gpu2,2ampere", "none", ",", "0,GPU-77"]:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
        ours = visible_nvml_indices({"CUDA_VISIBLE_DEVICES": setting}, THREE).indices
        assert list(ours) == torch.cuda._parse_visible_devices(), setting
    uuids = ["GPU-77", "GPU-77,GPU-2dee1e25-a", "GPU-2dee1e25", "GPU-77,GPU-nowhere,GPU-2dee1e25-a", "GPU-77,GPU-7777"]
    for setting in uuids:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
        ours = visible_nvml_indices({"CUDA_VISIBLE_DEVICES": setting}, THREE).indices
        torchs = torch.cuda._transform_uuid_to_ordinals(torch.cuda._parse_visible_devices(), UUIDS)
        assert list(ours) == torchs, setting


def test_the_monitor_watches_in_torchs_order():
    gpus = [FakeGpu(uuid=uuid, busy=busy) for uuid, busy in zip(UUIDS, (1, 2, 3), strict=True)]
    chosen = backend(*gpus, environment={"CUDA_VISIBLE_DEVICES": "2,0"})
    assert [(device.torch_index, device.index) for device in chosen.devices] == [(0, 2), (1, 0)]
    assert [reading.busy_percent for reading in chosen.read()] == [3, 1]
    mig = backend(*gpus, environment={"CUDA_VISIBLE_DEVICES": "MIG-12345678"})
    assert [(device.torch_index, device.index) for device in mig.devices] == [(None, 0), (None, 1), (None, 2)]
    assert "MIG" in mig.notes[0]


# What goes wrong while it runs


def test_an_error_in_the_users_code_stops_the_thread_passes_through_and_keeps_the_samples():
    before = threading.active_count()
    with pytest.raises(KeyError, match="mine"), Monitor(0.01, backend()) as monitor:
        wait_for(lambda: len(monitor.trace.samples) >= 2)
        raise KeyError("mine")
    assert threading.active_count() == before
    taken = len(monitor.trace.samples)
    time.sleep(0.05)
    assert len(monitor.trace.samples) == taken >= 2


def test_a_backend_that_raises_is_counted_and_reported():
    answers = iter([[Reading(50.0)], ValueError("broken"), [], [Reading(70.0)]])

    def read():
        answer = next(answers, [Reading(70.0)])
        if isinstance(answer, Exception):
            raise answer
        return answer

    with Monitor(0.01, Scripted(read)) as monitor:
        wait_for(lambda: len(monitor.trace.samples) >= 4)
    trace = monitor.trace
    assert trace.values()[:4] == [50, None, None, 70]
    assert trace.failed == 2
    assert "A sample failed: ValueError: broken" in trace.notes
    assert "2 failed" in repr(monitor.summary())


def test_many_different_failures_stay_bounded():
    numbers = iter(range(10**9))

    def read():
        raise RuntimeError(f"failure {next(numbers)}" + "x" * 10_000)

    with Monitor(0.01, Scripted(read)) as monitor:
        wait_for(lambda: monitor.trace.failed >= 30)
    assert len(monitor.trace.notes) == 20
    assert max(map(len, monitor.trace.notes)) < 300


def test_a_backend_that_times_out_itself_is_counted_and_goes_on():
    answers = iter([TimeoutError(), [Reading(40.0)]])

    def read():
        answer = next(answers, [Reading(40.0)])
        if isinstance(answer, Exception):
            raise answer
        return answer

    with Monitor(0.01, Scripted(read)) as monitor:
        wait_for(lambda: len(monitor.trace.samples) >= 3)
    assert (monitor.trace.timed_out, monitor.trace.failed) == (1, 0)
    assert monitor.summary().busy_percent.mean == 40


def test_stop_returns_although_the_backend_hangs_and_keeps_the_samples():
    release = threading.Event()
    answers = iter([[Reading(30.0)], [Reading(50.0)]])

    def read():
        answer = next(answers, None)
        if answer is None:
            release.wait(30)
            return [Reading(99.0)]
        return answer

    monitor = Monitor(0.02, Scripted(read), timeout_s=0.5).start()
    wait_for(lambda: monitor.trace.timed_out == 1)  # a live view would say so before the end
    started = time.monotonic()
    monitor.stop()
    assert time.monotonic() - started < 0.5 + 0.02 + 0.3
    assert monitor.trace.values() == [30, 50]
    assert monitor.trace.timed_out == 1
    assert "given up" in " ".join(monitor.trace.notes)
    release.set()
    time.sleep(0.05)
    assert monitor.trace.values() == [30, 50]  # what came too late stays out
    monitor.stop()
    assert monitor.trace.timed_out == 1


def test_a_hang_that_begins_at_the_stop_ends_within_the_timeout():
    release = threading.Event()

    def read():
        release.wait(30)
        return [Reading(99.0)]

    monitor = Monitor(60, Scripted(read), timeout_s=0.3).start()
    started = time.monotonic()
    monitor.stop()
    assert 0.2 < time.monotonic() - started < 1.5
    assert (monitor.trace.samples, monitor.trace.timed_out) == ((), 1)
    release.set()


def test_opening_that_hangs_does_not_hold_up_the_users_code(monkeypatch):
    release = threading.Event()
    late = Scripted(lambda: [Reading(99.0)])

    def slow(**options):
        release.wait(30)
        return late

    monkeypatch.setattr("course_utils.monitor.open_backend", slow)
    started = time.monotonic()
    with Monitor(timeout_s=0.2) as monitor:
        pass
    assert time.monotonic() - started < 2
    assert (monitor.source, monitor.trace.timed_out) == ("none", 1)
    assert monitor.summary().busy_percent.mean is None
    release.set()
    wait_for(lambda: late.closed)  # what opened too late is closed, and was never read
    assert monitor.trace.samples == ()


def test_opening_that_fails_is_reported(monkeypatch):
    def broken(**options):
        raise RuntimeError("no such thing")

    monkeypatch.setattr("course_utils.monitor.open_backend", broken)
    with Monitor() as monitor:
        pass
    assert monitor.summary().notes == ("Nothing could be measured: RuntimeError: no such thing",)
    assert (monitor.source, monitor.label) == ("none", "not measured")


def test_a_hanging_nvidia_smi_end_to_end(monkeypatch, tmp_path):  # SMI-13
    program = tmp_path / "nvidia-smi"
    asked = tmp_path / "asked"
    header_and_row = T4_ROWS + "0, Tesla T4, GPU-1, 37 %, 814 MiB, 15360 MiB, 61"
    # It answers once, so that the monitor opens, and then hangs.
    program.write_text(
        f"#!{sys.executable}\nimport os, time\nif os.path.exists({str(asked)!r}): time.sleep(30)\n"
        f"open({str(asked)!r}, 'w').close()\nprint({header_and_row!r})\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(nvidia_smi, "find_nvidia_smi", lambda: str(program))
    monitor = Monitor(0.05, SmiBackend(timeout_s=1, environment={}), timeout_s=1).start()
    wait_for(lambda: monitor.trace.timed_out >= 1)
    started = time.monotonic()
    monitor.stop()
    assert time.monotonic() - started < 1 + 0.5 + 0.5
    assert monitor.trace.values()[0] is None
    assert monitor.trace.failed == 0


def test_a_hanging_backend_does_not_delay_the_end_of_python():
    code = """
import time
from course_utils.monitor import Device, Monitor
class Hangs:
    source, label, min_interval_s, devices, notes = "hangs", "GPU", 0.0, (Device("x"),), ()
    def read(self): time.sleep(30)
    def close(self): pass
monitor = Monitor(0.01, Hangs(), timeout_s=0.2).start()
time.sleep(0.1)
"""
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=25, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert time.monotonic() - started < 20


def test_a_late_sample_is_not_caught_up_in_a_burst():
    delays = iter([0.4])

    def read():
        time.sleep(next(delays, 0))
        return [Reading(50.0)]

    with Monitor(0.05, Scripted(read)) as monitor:
        wait_for(lambda: len(monitor.trace.samples) >= 5)
    gaps = [later - earlier for earlier, later in itertools.pairwise(monitor.trace.times_s[:5])]
    assert gaps[0] > 0.04
    assert sum(gaps) > 0.15  # four intervals, give or take the machine's load; a burst takes next to no time


def test_slow_opening_leaves_no_sample_from_before_the_start(monkeypatch):
    reads = []

    def slow(**options):
        time.sleep(0.3)
        return Scripted(lambda: (reads.append(time.perf_counter()), [Reading(50.0)])[1])

    monkeypatch.setattr("course_utils.monitor.open_backend", slow)
    with Monitor(0.1) as monitor:
        entered = time.perf_counter()
        wait_for(lambda: len(monitor.trace.samples) >= 1)
    assert reads[0] - entered > 0.05
    assert monitor.trace.times_s[0] >= 0.1


# Bounds, costs, several at once, once only


def test_a_long_run_keeps_every_second_sample(monkeypatch):
    monkeypatch.setattr(monitor_collector, "MAX_SAMPLES", 16)
    numbers = itertools.count()
    with Monitor(0.01, Scripted(lambda: [Reading(busy_percent=40.0, used_bytes=next(numbers))])) as monitor:
        wait_for(lambda: monitor.trace.interval_s >= 0.04)
        assert len(monitor.trace.samples) <= 16
    trace = monitor.trace
    assert trace.values("used_bytes")[:3] in ([3, 7, 11], [7, 15, 20])  # thinned twice, or thrice by now
    assert trace.summary().busy_percent.mean == pytest.approx(40)
    assert trace.times_s == sorted(trace.times_s)


def test_ten_samples_a_second_cost_less_than_a_hundredth_of_a_core():
    with Monitor(0.1, backend()) as monitor:
        time.sleep(3)
    # CPU time of the collecting thread, opening included; what else runs on this machine does not count.
    assert monitor.cpu_s / 3 < 0.01
    assert len(monitor.trace.samples) > 10


def test_two_monitors_at_once_and_one_inside_the_other():
    with Monitor(0.01, backend(FakeGpu(busy=20))) as outer, Monitor(0.02, backend(FakeGpu(busy=80))) as inner:
        wait_for(lambda: len(outer.trace.samples) >= 3 and len(inner.trace.samples) >= 3)
    assert outer.summary().busy_percent.mean == 20
    assert inner.summary().busy_percent.mean == 80


def test_a_monitor_records_once():
    monitor = Monitor(0.01, backend())
    assert "not started" in repr(monitor)
    assert monitor._repr_html_() is None
    with monitor, pytest.raises(RuntimeError, match="make a new one"):
        monitor.start()
    with pytest.raises(RuntimeError, match="make a new one"), monitor:
        pass
    assert "Monitor, stopped" in repr(monitor)
    assert "Tesla T4" in monitor._repr_html_()


def test_stopping_what_was_never_started_does_no_harm():
    assert Monitor(0.01, backend()).stop().trace.samples == ()


def test_a_forgotten_monitor_ends_its_thread():
    before = threading.active_count()
    monitor = Monitor(0.01, backend()).start()
    assert threading.active_count() == before + 1
    del monitor
    gc.collect()
    wait_for(lambda: threading.active_count() == before)


@pytest.mark.parametrize("value", [0, -1, 0.001, 61, math.nan, math.inf, "0.2", None, True])
@pytest.mark.parametrize("name", ["interval_s", "timeout_s"])
def test_a_nonsense_time_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"{name} must be a number of seconds between"):
        Monitor(**{name: value})


def test_a_nonsense_backend_is_refused():
    with pytest.raises(TypeError, match="backend must have devices and read"):
        Monitor(backend=object())


# Summaries


def test_the_mean_is_weighted_by_time():
    samples = (Sample(1.0, (Reading(0.0),)), Sample(10.0, (Reading(100.0),)))
    trace = Trace("NVML", "GPU", (Device("x"),), samples)
    summary = trace.summary()
    assert summary.busy_percent.mean == pytest.approx(90)
    assert summary.busy_percent.median == 100
    assert summary.idle_share == pytest.approx(0.1)
    assert trace.idle_gaps() == [(0.0, 1.0)]


def test_idle_means_below_ten_percent():
    summary = Trace.from_busy([0, 9.9, 10, 100, None]).summary()
    assert summary.idle_share == pytest.approx(0.5)


def test_idle_gaps_join_neighbours_and_can_be_filtered():
    trace = Trace.from_busy([0, 0, 90, 5, None, 5, 90], interval_s=1.0)
    assert trace.idle_gaps() == [(0.0, 2.0), (3.0, 4.0), (5.0, 6.0)]
    assert trace.idle_gaps(at_least_s=1.5) == [(0.0, 2.0)]
    assert Trace.from_busy([None, 50]).idle_gaps() == []


def test_an_aliased_series_shows_its_spread():  # SMI-18
    summary = Trace.from_busy([0, 100, 0, 100]).summary()
    assert (summary.busy_percent.mean, summary.busy_percent.median) == (50, 50)
    assert (summary.busy_percent.min, summary.busy_percent.max, summary.idle_share) == (0, 100, 0.5)


def test_throttling_is_a_share_of_time():
    bits = [0x1, 0x4, 0x4 | 0x40, None, 0x0]
    samples = tuple(Sample(n + 1.0, (Reading(50.0, throttle_bits=bit),)) for n, bit in enumerate(bits))
    summary = Trace("NVML", "GPU", (Device("x"),), samples).summary()
    assert summary.throttle_shares == {
        "GPU idle": 0.25,
        "power cap (software)": 0.5,
        "temperature (hardware)": 0.25,
    }
    assert "power cap (software) 50 %" in repr(summary)
    assert "idle" not in repr(summary)


@pytest.mark.parametrize(("device", "metric", "error"), [(1, "busy_percent", IndexError), (0, "speed", ValueError)])
def test_what_a_trace_does_not_hold_is_said(device, metric, error):
    with pytest.raises(error, match=r"no device 1|metric must be one of"):
        Trace.from_busy([1]).values(metric, device)


VALUES = st.one_of(st.none(), st.floats(0, 100), st.integers(0, 100))


@given(st.lists(st.tuples(VALUES, st.floats(0, 1000)), max_size=30))
def test_a_mean_lies_between_the_extremes_and_none_counts_nowhere(pairs):
    values, weights = [value for value, _ in pairs], [weight for _, weight in pairs]
    result = statistic(values, weights)
    known = [value for value in values if value is not None]
    assert result.samples == len(known)
    if not known:
        assert (result.mean, result.median, result.min, result.max) == (None, None, None, None)
        return
    assert (result.min, result.max) == (min(known), max(known))
    assert result.min <= result.mean <= result.max
    assert result.min <= result.median <= result.max
    kept = [(value, weight) for value, weight in pairs if value is not None]
    assert statistic([value for value, _ in kept], [weight for _, weight in kept]) == result


@given(st.lists(st.integers(0, 100), min_size=1, max_size=40))
def test_evenly_sampled_means_and_medians_are_the_plain_ones(values):
    import statistics

    result = Trace.from_busy(values, interval_s=0.5).summary().busy_percent
    assert result.mean == pytest.approx(statistics.mean(values))
    assert result.median == pytest.approx(statistics.median(values))


# Files


def recorded():
    gpus = [FakeGpu(name="Tesla T4", uuid="GPU-1", busy=[1, 99]), FakeGpu(uuid="GPU-2", fails={"utilisation": 999})]
    with Monitor(0.01, backend(*gpus)) as monitor:
        wait_for(lambda: len(monitor.trace.samples) >= 3)
    return monitor


@pytest.mark.parametrize("ending", [".json", ".csv", ".CSV"])
def test_a_trace_survives_saving_and_loading(tmp_path, ending):
    monitor = recorded()
    path = monitor.save(tmp_path / f"trace{ending}")
    assert Trace.load(path) == monitor.trace
    assert Trace.load(str(path)).summary(1) == monitor.summary(1)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]  # no unfinished file is left


def test_the_csv_can_be_read_by_others(tmp_path):
    lines = recorded().save(tmp_path / "trace.csv").read_text().splitlines()
    assert json.loads(lines[0].removeprefix("# "))["source"] == "NVML"
    assert lines[1].startswith("time_s,device,busy_percent,")
    assert lines[3].split(",")[1:4] == ["1", "", ""]


READINGS = st.builds(
    Reading,
    busy_percent=st.one_of(st.none(), st.floats(0, 100)),
    used_bytes=st.one_of(st.none(), st.integers(0, 2**40)),
    temperature_c=st.one_of(st.none(), st.integers(-20, 120)),
    throttle_bits=st.one_of(st.none(), st.integers(0, 2**32)),
)
DEVICES = st.builds(
    Device, name=st.sampled_from(["Tesla T4", 'a, "b"\u2028'.strip()]), index=st.one_of(st.none(), st.integers(0, 9))
)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_trace_survives_both_formats(tmp_path_factory, data):
    devices = tuple(data.draw(st.lists(DEVICES, min_size=1, max_size=3)))
    times = sorted(data.draw(st.lists(st.floats(0, 1e6), max_size=8)))
    samples = tuple(Sample(t, tuple(data.draw(READINGS) for _ in devices)) for t in times)
    trace = Trace("NVML", "GPU", devices, samples, failed=2, timed_out=1, notes=("a\nb,c", "# {"))
    folder = tmp_path_factory.mktemp("traces")
    for ending in ("json", "csv"):
        assert Trace.load(trace.save(folder / f"trace.{ending}")) == trace


def spoilt_json(**changes):
    def spoil(content):
        content.update(changes)

    return spoil


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (spoilt_json(format="other"), "does not say that it is one"),
        (spoilt_json(version=2), "version 2"),
        (spoilt_json(time_s=[1.0]), "values for 1 samples"),
        (spoilt_json(time_s=[3.0, 2.0, 1.0, 0.5]), "backwards"),
        (spoilt_json(time_s="now"), "time_s is missing or no list"),
        (spoilt_json(time_s=[True, 2, 3, 4]), "time_s is no number"),
        (spoilt_json(devices=[]), "for each device"),
        (spoilt_json(devices=[{"name": "x"}]), "device lacks a field"),
        (spoilt_json(devices=7), "devices is missing or no list"),
        (spoilt_json(source=5), "source is no text"),
        (spoilt_json(failed=-1), "failed is no whole number"),
        (spoilt_json(interval_s=math.nan), "interval_s is no number"),
        (spoilt_json(readings=[{}]), "readings are not those of a trace"),
        (lambda content: content["readings"][0].update(busy_percent=[120, 1, 1, 1]), "impossible"),
        (lambda content: content["readings"][0].update(busy_percent=["<b>", 1, 1, 1]), "impossible"),
        (lambda content: content["readings"][0].update(used_bytes=[math.inf, 1, 1, 1]), "impossible"),
        (lambda content: content.pop("notes"), "malformed"),
    ],
)
def test_a_spoilt_json_is_refused_in_one_sentence(tmp_path, spoil, said):
    path = tmp_path / "trace.json"
    Trace.from_busy([1, 2, 3, 4]).save(path)
    content = json.loads(path.read_text())
    spoil(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"'trace\.json' is not a trace that this course saved") as error:
        Trace.load(path)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("ending", ["json", "csv"])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b"# {}\n",
        b"# {\n",
        b"# {}\ntime_s,device\n",
        b"\x80\x04K\x01.",
    ],
)
def test_what_is_no_trace_is_refused(tmp_path, ending, content):
    path = tmp_path / f"trace.{ending}"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is not a trace that this course saved"):
        Trace.load(path)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 3000), st.integers(0, 30), st.binary(max_size=10), st.sampled_from(["json", "csv"]))
def test_no_damage_makes_loading_fail_otherwise_than_in_a_sentence(tmp_path_factory, start, length, inserted, ending):
    path = tmp_path_factory.getbasetemp() / f"damaged.{ending}"
    whole = Trace.from_busy([1, None, 3]).save(path).read_bytes()
    path.write_bytes(whole[:start] + inserted + whole[start + length :])
    try:
        assert Trace.load(path).summary()
    except ValueError as error:
        assert "is not a trace that this course saved" in str(error)


@pytest.mark.parametrize("row", ["1.0,1,,,,,,,", "1.0,0,,,,,,", "x,0,,,,,,,", "1.0,0,[1],,,,,,", "1.0,0,1e999,,,,,,"])
def test_a_spoilt_csv_row_is_refused(tmp_path, row):
    path = tmp_path / "trace.csv"
    lines = Trace.from_busy([5]).save(path).read_text().splitlines()
    path.write_text("\n".join([*lines[:2], row]))
    with pytest.raises(ValueError, match="is not a trace that this course saved"):
        Trace.load(path)


def test_a_large_file_is_not_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("course_utils.monitor_files.MAX_FILE_BYTES", 1000)
    path = tmp_path / "trace.json"
    path.write_text("[" + "1," * 2000)
    with pytest.raises(ValueError, match="larger than"):
        Trace.load(path)


def test_a_wrong_ending_or_place_is_said(tmp_path):
    trace = Trace.from_busy([1])
    for wrong in ("trace.pkl", "trace", "trace.json.gz"):
        with pytest.raises(ValueError, match=r"saved as \.json or \.csv"):
            trace.save(tmp_path / wrong)
        with pytest.raises(ValueError, match=r"saved as \.json or \.csv"):
            Trace.load(tmp_path / wrong)
    with pytest.raises(FileNotFoundError, match="no folder"):
        trace.save(tmp_path / "missing" / "trace.json")
    with pytest.raises(FileNotFoundError, match="no file"):
        Trace.load(tmp_path / "trace.json")


def test_an_interrupted_save_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = Trace.from_busy([1]).save(tmp_path / "trace.json")
    before = path.read_bytes()
    monkeypatch.setattr(Path, "replace", lambda self, target: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        Trace.from_busy([2]).save(path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["trace.json"]


# Drawing: on the main thread, at most five times a second, escaped, with alt text


class Shown:
    """Stands for the notebook's display: what was shown, and when."""

    def __init__(self):
        self.views, self.times = [], []

    def show(self, view):
        self.views.append(view._repr_html_())
        self.times.append(time.perf_counter())

    def end(self):
        self.views.append("end")


@pytest.fixture
def screen(monkeypatch):
    shown = Shown()
    monkeypatch.setattr(monitor_view, "Screen", lambda: shown)
    return shown


def test_the_live_view_is_drawn_at_most_five_times_a_second(screen):
    started = time.perf_counter()
    with Monitor(0.02, backend(), live=True) as monitor:
        for _ in monitor.watch(range(10**9)):
            if time.perf_counter() - started > 1.0:
                break
    *timed, last = screen.times
    gaps = [b - a for a, b in itertools.pairwise(timed)]
    assert 2 <= len(timed) <= 6
    assert min(gaps) >= 0.19
    assert last >= timed[-1]  # once more at the end
    assert screen.views[-1] == "end"
    assert "GPU: busy 50 %" in screen.views[-2]


def test_drawing_takes_at_most_a_fiftieth_of_the_time(screen, monkeypatch):
    slow = Shown()
    slow.show = lambda view: (slow.times.append(time.perf_counter()), time.sleep(0.02))
    monkeypatch.setattr(monitor_view, "Screen", lambda: slow)
    with Monitor(0.02, backend(), live=True) as monitor:
        started = time.perf_counter()
        while time.perf_counter() - started < 0.8:
            monitor.refresh()
    assert len(slow.times) == 2  # at the start, and at the end


def test_a_thread_does_not_draw(screen):
    with Monitor(0.01, backend(), live=True) as monitor:
        drawn = len(screen.times)
        thread = threading.Thread(target=lambda: monitor.refresh(force=True))
        thread.start()
        thread.join()
        assert len(screen.times) == drawn


def test_without_live_nothing_is_drawn_and_watch_hands_the_items_through(screen):
    with Monitor(0.01, backend()) as monitor:
        assert list(monitor.watch("abc")) == ["a", "b", "c"]
        monitor.refresh()
    assert screen.views == []


def test_an_error_of_the_watched_iterable_passes_through(screen):
    def broken():
        yield 1
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"), Monitor(0.01, backend(), live=True) as monitor:
        list(monitor.watch(broken()))


def test_the_live_view_has_alt_text_and_escapes_names():
    trace = replace(Trace.from_busy([0, None, 55, 100] * 40), devices=(Device('<script>"&'),), notes=("<b>",))
    page = monitor_view.LiveView(trace)._repr_html_()
    assert "<script>" not in page
    assert 'role="img" aria-label="Busy percent of &lt;script&gt;&quot;&amp;, last 60 samples: mean 52 %."' in page
    assert page.count("<rect") == 1 + 45
    assert len(page) < 12_000
    assert "GPU: busy 100 %" in repr(monitor_view.LiveView(trace))
    assert "memory" not in repr(monitor_view.LiveView(trace))
    assert "n/a" in repr(monitor_view.LiveView(Trace.from_busy([])))


def test_a_notebook_redraws_one_output_in_place(monkeypatch):
    pytest.importorskip("IPython")
    import IPython
    import IPython.display

    events = []

    class Handle:
        def update(self, view):
            events.append("update")

    def display(view, display_id):
        events.append(("display", display_id))
        return Handle()

    monkeypatch.setattr(IPython, "get_ipython", lambda: type("Shell", (), {"kernel": object()})())
    monkeypatch.setattr(IPython.display, "display", display)
    screen = monitor_view.Screen()
    for _ in range(3):
        screen.show(monitor_view.LiveView(Trace.from_busy([1])))
    screen.end()
    assert events == [("display", True), "update", "update"]


def test_a_log_file_gets_no_live_view(capsys):
    with Monitor(0.01, backend(), live=True):
        pass
    assert capsys.readouterr().out == ""


def test_the_figure_has_rows_for_what_was_read_and_alt_text():
    fig = recorded().trace.draw()
    assert len(fig.axes) == 3
    assert "Busy percent of Tesla T4 (GPU)" in fig.alt
    assert [ax.get_ylabel() for ax in fig.axes] == ["busy (%)", "memory (GiB)", "power (W)"]
    assert "CPU, not a GPU" in Trace.from_busy([1, 2], label="CPU, not a GPU").draw().axes[0].get_title(loc="left") + (
        Trace.from_busy([1, 2], label="CPU, not a GPU").draw().axes[0].get_title()
    )


@pytest.mark.parametrize("values", [[], [50], [None, None], [0, None, 100]])
def test_any_trace_can_be_drawn(values, capsys):
    Trace.from_busy(values).plot()
    assert "Busy percent of example" in capsys.readouterr().out


def test_importing_the_monitor_loads_nothing_heavy():
    code = (
        "import sys, course_utils.monitor, course_utils.nvidia_smi; "
        "heavy = {'torch', 'matplotlib', 'IPython', 'pynvml', 'numpy', 'ipywidgets', 'psutil'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, timeout=60, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


# Which device


def test_work_on_the_cpu_is_watched_on_the_cpu_even_where_a_gpu_is_listed(monkeypatch):
    monkeypatch.setattr("course_utils.monitor.open_backend", lambda **_: pytest.fail("a GPU was looked for"))
    with Monitor(0.01, device="cpu") as monitor:
        time.sleep(0.03)
    assert monitor.source == "CPU (psutil)"


def test_the_watched_device_is_the_one_that_is_summarised():
    class TwoGpus(CpuBackend):
        def __init__(self):
            super().__init__()
            self.devices = (Device("first"), Device("second"))

        def read(self):
            return Reading(10.0), Reading(90.0)

    with Monitor(0.01, TwoGpus(), device="cuda:1") as monitor:
        time.sleep(0.03)
    assert monitor.summary().device.name == "second"
    assert set(monitor.values()) == {90.0}
    assert monitor.summary(0).busy_percent.mean == 10.0
    with Monitor(0.01, CpuBackend(), device="cuda:1") as alone:
        time.sleep(0.03)
    assert alone.summary().label == "CPU, not a GPU"


def test_a_device_that_cannot_be_watched_is_named():
    with pytest.raises(ValueError, match="'mps' cannot be watched"):
        Monitor(device="mps")
