"""Lesson 07's tables: where memory is, what an act changes, what the allocator is told, what an OOM's message says."""

import gc
import os
import subprocess
import sys
import weakref
from types import SimpleNamespace

import psutil
import pytest
import torch

from course_utils import allocator_settings as settings_module
from course_utils import memory_effects, memory_report, oom_reading
from course_utils.allocator_settings import allocator_settings, set_allocator
from course_utils.memory_effects import Effects, measure
from course_utils.memory_report import MemoryReport
from course_utils.oom import SimulatedMemory
from course_utils.oom_reading import explain_oom
from course_utils.simulated_allocator import SimulatedAllocator

MIB = 2**20
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


class FakeNvml:
    """NVML's processes on one GPU: (pid, bytes or None)."""

    class NVMLError(Exception):
        pass

    def __init__(self, *processes: tuple[int, int | None], fails: str = "") -> None:
        self.processes, self.fails, self.open = processes, fails, 0

    def nvmlInit(self) -> None:
        self._may_fail("nvmlInit")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        assert uuid == "GPU-1234"
        self._may_fail("nvmlDeviceGetHandleByUUID")
        return "handle"

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.processes]

    def _may_fail(self, name: str) -> None:
        if self.fails == name:
            raise self.NVMLError


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A T4 on which this process has allocated 61 MiB; change its fields."""
    fake = SimpleNamespace(allocated=61, reserved=62, peak=80, used=1105, total=15000)
    replacements = {
        "is_initialized": lambda: True,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "memory_allocated": lambda device: fake.allocated * MIB,
        "memory_reserved": lambda device: fake.reserved * MIB,
        "max_memory_allocated": lambda device: fake.peak * MIB,
        "mem_get_info": lambda device: ((fake.total - fake.used) * MIB, fake.total * MIB),
        "get_device_properties": lambda device: SimpleNamespace(uuid="1234"),
    }
    for name, function in replacements.items():
        monkeypatch.setattr(torch.cuda, name, function)
    return fake


# --- the report -------------------------------------------------------------------------------------------------


@NO_GPU
@pytest.mark.parametrize("device", [None, "cpu", "cuda", "cuda:3", 1])
def test_without_cuda_every_device_has_a_report_and_nothing_is_started(device) -> None:
    report = memory_report.memory_report(device)
    assert report.allocated_bytes is None
    assert report.cached_bytes is None
    assert report.rest_bytes is None
    assert report.free_bytes is None
    assert report.reason == "CUDA has not been started in this process"
    assert "No GPU figures: CUDA has not been started" in report.identity
    assert "n/a" in repr(report)
    assert report.process_bytes > 0
    assert not torch.cuda.is_initialized()


def test_a_build_without_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert memory_report.memory_report().reason == "this PyTorch is built without CUDA"


def test_the_table_adds_up(gpu) -> None:
    """The figures of pytorch/pytorch#60150: 1167 MiB with a tensor of 61 MiB, 1105 after it went."""
    gpu.used = 1167
    with_tensor = memory_report.memory_report(nvml=FakeNvml())
    assert (with_tensor.cached_bytes, with_tensor.rest_bytes) == (MIB, 1105 * MIB)
    assert with_tensor.identity == (
        "used 1,167 MiB = allocated 61 MiB + cached 1 MiB + context and other processes 1,105 MiB"
    )
    gpu.allocated = gpu.reserved = 0
    gpu.used = 1105
    emptied = memory_report.memory_report("cuda:0", nvml=FakeNvml())
    assert emptied.rest_bytes == with_tensor.rest_bytes  # the context stays: nvidia-smi never returns to 0
    assert emptied.free_bytes == (15000 - 1105) * MIB
    rows = dict(emptied.rows())
    assert rows["= used on the device (nvidia-smi)"] == "1,105 MiB"
    assert rows["+ CUDA context and other processes"] == "1,105 MiB"
    assert rows["peak allocated"] == "80 MiB"


def test_other_processes_are_told_apart_where_nvml_knows_this_one(gpu) -> None:
    nvml = FakeNvml((1, 300 * MIB), (os.getpid(), 462 * MIB))
    report = memory_report.memory_report(nvml=nvml)
    assert (report.context_bytes, report.others_bytes) == (400 * MIB, (1105 - 462) * MIB)
    assert report.identity.endswith("context 400 MiB + other processes 643 MiB")
    assert dict(report.rows())["+ other processes"] == "643 MiB"
    assert nvml.open == 0


@pytest.mark.parametrize(
    "nvml",
    [
        FakeNvml((1, 300 * MIB)),
        FakeNvml((os.getpid(), None)),
        FakeNvml((os.getpid(), 5), fails="nvmlInit"),
        FakeNvml((os.getpid(), 5), fails="nvmlDeviceGetHandleByUUID"),
        FakeNvml((os.getpid(), 5 * MIB)),
    ],
    ids=["a container's pids", "no memory", "no driver", "MIG", "less than reserved"],
)
def test_where_nvml_cannot_tell_the_rest_stays_one_figure(gpu, nvml) -> None:
    report = memory_report.memory_report(nvml=nvml)
    assert report.context_bytes is None
    assert report.others_bytes is None
    assert report.rest_bytes == (1105 - 62) * MIB
    assert nvml.open == 0


def test_a_gpu_that_does_not_answer_gives_its_reason(gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device):
        raise RuntimeError("CUDA error: device-side assert triggered\nlong story")

    monkeypatch.setattr(torch.cuda, "mem_get_info", broken)
    report = memory_report.memory_report(nvml=FakeNvml())
    assert report.reason == "the device did not answer: CUDA error: device-side assert triggered"
    assert (report.used_bytes, report.rest_bytes, report.allocated_bytes) == (None, None, 61 * MIB)
    assert "note" in dict(report.rows())


def test_figures_of_different_things_are_not_subtracted() -> None:
    assert MemoryReport("cuda:0", reserved_bytes=10, used_bytes=5).rest_bytes is None
    assert MemoryReport("cuda:0", allocated_bytes=10).cached_bytes is None
    assert MemoryReport("cuda:0", used_bytes=7, reserved_bytes=7).rest_bytes == 0


@pytest.mark.parametrize("device", ["gpu", "mps", "meta", 1.5, object()], ids=["gpu", "mps", "meta", "float", "object"])
def test_what_is_no_device_is_told(device) -> None:
    with pytest.raises(ValueError, match=r"write 'cpu', 'cuda' or 'cuda:0'|knows the devices cpu and cuda"):
        memory_report.memory_report(device)


def test_a_gpu_that_is_not_there_is_told(gpu) -> None:
    with pytest.raises(ValueError, match="There is no cuda:1 here: the last GPU is cuda:0"):
        memory_report.memory_report("cuda:1")


def test_living_tensors_are_counted_once_and_forgotten() -> None:
    before = memory_report.memory_report("cpu").tensor_bytes
    tensor = torch.ones(3 * MIB // 4)
    view = tensor[5:]
    assert memory_report.memory_report("cpu").tensor_bytes - before == 3 * MIB
    del tensor
    assert memory_report.memory_report("cpu").tensor_bytes - before == 3 * MIB
    del view
    assert memory_report.memory_report("cpu").tensor_bytes == before


def test_a_system_that_hides_its_processes_gives_none_and_not_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self):
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil.Process, "memory_full_info", denied)
    report = memory_report.memory_report("cpu")
    assert report.private_bytes is None
    assert report.process_bytes > 0
    monkeypatch.setattr(psutil.Process, "memory_info", denied)
    assert memory_report.memory_report("cpu").process_bytes is None


def test_the_report_is_escaped_html() -> None:
    assert "<script>" not in MemoryReport("cpu", reason="<script>")._repr_html_()


# --- what an act changes ------------------------------------------------------------------------------------------


def test_on_a_cpu_the_table_shows_what_frees_and_what_does_not() -> None:
    effects = Effects("cpu")
    with effects.of("make"):
        tensor = torch.ones(64 * MIB // 4)
    view = tensor[:1]
    with effects.of("del tensor"):
        del tensor
    with effects.of("empty_cache()"):
        torch.cuda.empty_cache()
    assert [row.change("tensor_bytes") for row in effects.rows] == [64 * MIB, 0, 0]
    with effects.of("del view"):
        del view
    assert effects["del view"].change("tensor_bytes") == -64 * MIB
    assert effects["make"].change("process_bytes") > 32 * MIB
    assert effects["del view"].change("process_bytes") < -32 * MIB
    assert effects["make"].change("allocated_bytes") is None
    assert "−64 MiB" in repr(effects)
    assert "make: tensors +64 MiB, process (RSS)" in repr(effects["make"])


def test_a_circle_goes_with_gc_collect_and_not_before() -> None:
    class Node:
        pass

    gc.collect()
    gc.disable()
    try:
        node = Node()
        node.itself, node.tensor = node, torch.ones(MIB)
        effects = Effects("cpu")
        with effects.of("del"):
            del node
        with effects.of("gc.collect()"):
            gc.collect()
    finally:
        gc.enable()
    assert [row.change("tensor_bytes") for row in effects.rows] == [0, -4 * MIB]


def test_on_a_gpu_the_columns_are_the_allocators(gpu) -> None:
    def empty() -> None:
        gpu.reserved, gpu.used, gpu.peak = 61, 1104, 61

    effect = measure(empty, "empty_cache()")
    assert repr(effect) == (
        "empty_cache(): allocated 0 MiB, reserved −1 MiB, used on the device −1 MiB, peak allocated −19 MiB"
    )


def test_what_the_act_returns_is_not_kept_and_what_it_raises_passes() -> None:
    assert measure(lambda: torch.ones(MIB), device="cpu").change("tensor_bytes") == 0
    assert measure(gc.collect, device="cpu").act == "collect"
    effects = Effects("cpu")
    with pytest.raises(KeyboardInterrupt), effects.of("long"):
        raise KeyboardInterrupt
    assert effects.rows == []
    assert repr(effects) == "Effects: nothing measured yet"
    assert "What each act changed" in effects._repr_html_()
    with pytest.raises(KeyError, match="'long' was not measured"):
        effects["long"]
    with pytest.raises(TypeError, match=r"a function to call, such as gc\.collect"):
        measure(torch.ones(2))


@pytest.mark.parametrize(
    ("change", "text"), [(None, "n/a"), (0, "0 MiB"), (-400_000, "0 MiB"), (3 * MIB, "+3 MiB"), (-5 * MIB, "−5 MiB")]
)
def test_changes_are_signed(change, text) -> None:
    assert memory_report.signed_mebibytes(change) == text


# --- the allocator's settings -------------------------------------------------------------------------------------


def test_settings_are_read_from_either_variable() -> None:
    assert allocator_settings({}).variable is None
    new = allocator_settings(
        {"PYTORCH_ALLOC_CONF": " expandable_segments : True , roundup_power2_divisions:[256:1,>:4]"}
    )
    assert new.options == {"expandable_segments": "True", "roundup_power2_divisions": "[256:1,>:4]"}
    assert (new.problems, new.changeable) == ((), True)
    both = allocator_settings(
        {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF": "backend:native"}
    )
    assert (both.variable, both.options) == ("PYTORCH_CUDA_ALLOC_CONF", {"backend": "native"})
    assert both.problems == (
        "Both PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF are set: the second is not read. Keep one.",
    )
    assert "expandable_segments" in new._repr_html_()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("expandable_segments:True,max_split_size_mb:128", "not both"),
        ("expandable_segments=True", "write name:value"),
        ("expandable_segments:true", "not a value that expandable_segments takes"),
        ("max_split_size_mb:19", "at least 20"),
        ("max_split_size:128", "is no setting"),
        ("garbage_collection_threshold:2", "not a value"),
        ("expandable_segments:True,,", "is no setting"),
    ],
)
def test_bad_settings_are_refused_and_the_environment_stays(text, message) -> None:
    environment = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    with pytest.raises(ValueError, match=message):
        set_allocator(text, environment)
    assert environment == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert allocator_settings({"PYTORCH_ALLOC_CONF": text}).problems != ()


def test_a_setting_replaces_what_either_variable_asked_for() -> None:
    environment = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64", "PYTORCH_CUDA_ALLOC_CONF": "nonsense", "HOME": "/"}
    assert set_allocator("expandable_segments:True", environment).options == {"expandable_segments": "True"}
    assert environment == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "HOME": "/"}
    assert set_allocator("", environment).variable is None
    assert environment == {"HOME": "/"}


def test_once_cuda_runs_it_is_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    environment: dict[str, str] = {}
    with pytest.raises(RuntimeError, match=r"Too late: CUDA has started in this process.*Restart the runtime"):
        set_allocator("expandable_segments:True", environment)
    assert environment == {}
    assert "no: CUDA has started" in repr(allocator_settings(environment))


@pytest.mark.skipif(not hasattr(torch._C, "_cuda_memorySnapshot"), reason="a build without CUDA has no such allocator")
@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("set_allocator('expandable_segments:True'); look()", "True"),
        (
            "os.environ['PYTORCH_ALLOC_CONF'] = 'expandable_segments:True'\n"  # the second name: not read ...
            "os.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'garbage_collection_threshold:0.5'; look()\n"
            "os.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'expandable_segments:True'; look()",  # ... and now it is too late
            "False False",
        ),
    ],
    ids=["in time", "both names, then too late"],
)
def test_pytorch_reads_the_variables_as_the_module_says(lines, expected) -> None:
    """What this torch does: a fresh process each, since the first look settles it."""
    code = (
        "import os, torch\nfrom course_utils.allocator_settings import set_allocator\n"
        "def look():\n"
        "    print(torch.cuda.memory._snapshot()['allocator_settings']['expandable_segments'])\n" + lines
    )
    clean = {name: value for name, value in os.environ.items() if name not in settings_module.VARIABLES}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=clean, timeout=120)
    assert done.stdout.split() == expected.split(), done.stderr


# --- what an error's message says ---------------------------------------------------------------------------------

# As people posted them, cut after the figures; where no source stands, the figures are made up.
FULL = (  # jhc13/taggui#188 had these 24.85 MiB
    "CUDA out of memory. Tried to allocate 260.00 MiB. GPU 0 has a total capacity of 14.75 GiB of which 165.06 MiB is "
    "free. Process 2701 has 14.58 GiB memory in use. Of the allocated memory 14.42 GiB is allocated by PyTorch, and "
    "24.85 MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
OLD_FULL = (  # ShannonAI/Self_Explaining_Structures_Improve_NLP_Models#6
    "CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 1.96 GiB total capacity; 1.24 GiB already allocated; "
    "2.88 MiB free; 1.25 GiB reserved in total by PyTorch)"
)
IN_PIECES = (  # Tianhao-Qi/Mask2DiT#4
    "CUDA out of memory. Tried to allocate 35.60 GiB. GPU 0 has a total capacity of 79.33 GiB of which 26.16 GiB is "
    "free. Process 76883 has 53.16 GiB memory in use. Of the allocated memory 11.97 GiB is allocated by PyTorch, and "
    "40.69 GiB is reserved by PyTorch but unallocated."
)
WITH_A_TYPO = (  # carolchenyx/MGFN.#35: "capacty", as PyTorch wrote for a while
    "CUDA out of memory. Tried to allocate 1.70 GiB. GPU 0 has a total capacty of 6.00 GiB of which 0 bytes is free. "
    "Of the allocated memory 2.93 GiB is allocated by PyTorch, and 2.30 GiB is reserved by PyTorch but unallocated."
)
SHARED = (  # One-2-3-45/One-2-3-45#25
    "CUDA out of memory. Tried to allocate 1.69 GiB (GPU 0; 14.56 GiB total capacity; 649.97 MiB already allocated; "
    "1.31 GiB free; 1.01 GiB reserved in total by PyTorch)"
)
FREE_ALL_THE_SAME = (  # lllyasviel/Fooocus#1902
    "CUDA out of memory. Tried to allocate 10.00 MiB. GPU 0 has a total capacty of 6.00 GiB of which 1.57 GiB is free. "
    "Of the allocated memory 3.24 GiB is allocated by PyTorch, and 154.45 MiB is reserved by PyTorch but unallocated."
)
TOO_LARGE = (
    "CUDA out of memory. Tried to allocate 130206.04 GiB. GPU 0 has a total capacity of 23.56 GiB of which 16.57 GiB "
    "is free. Including non-PyTorch memory, this process has 6.97 GiB memory in use. Of the allocated memory 5.45 GiB "
    "is allocated by PyTorch, and 1.17 GiB is reserved by PyTorch but unallocated."
)


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (FULL, "this process"),
        (OLD_FULL, "this process"),
        (IN_PIECES, "fragmentation"),
        (WITH_A_TYPO, "fragmentation"),
        (SHARED, "another process"),
        (FREE_ALL_THE_SAME, "unknown"),
        (TOO_LARGE, "too large"),
        ("CUDA error: out of memory", "unknown"),
        ("CUDA out of memory. Tried to allocate more than 1EB memory.", "unknown"),
        ("mat1 and mat2 shapes cannot be multiplied", "not memory"),
        ("CUDA error: device-side assert triggered", "not memory"),
    ],
    ids="full old-full pieces typo shared free too-large bare 1EB shapes assert".split(),
)
def test_the_message_says_which_of_the_causes_it_was(message, cause) -> None:
    reading = explain_oom(RuntimeError(message))
    assert reading.cause == cause
    assert reading.advice in repr(reading)
    assert explain_oom(message) == reading


def test_little_reserved_and_unallocated_rules_fragments_out() -> None:
    """jhc13/taggui#188: 24.85 MiB cannot be the reason, whatever the message recommends."""
    reading = explain_oom(FULL)
    assert reading.unallocated_bytes == round(24.85 * MIB)
    assert reading.asked_bytes == 260 * MIB
    assert "Only 25 MiB are reserved and not allocated: memory in pieces is not the reason." in reading.sentence
    assert "expandable" not in reading.advice


def test_fragments_are_not_said_to_be_all_where_others_hold_much() -> None:
    both = IN_PIECES.replace("11.97 GiB is allocated", "1.97 GiB is allocated")
    assert "Besides, 10,762 MiB are used outside this PyTorch." in explain_oom(both).sentence
    assert "Besides" not in explain_oom(IN_PIECES).sentence


def test_the_old_message_counts_reserved_and_not_unallocated() -> None:
    reading = explain_oom(OLD_FULL)
    assert reading.unallocated_bytes == pytest.approx(0.01 * 2**30, rel=1e-3)
    assert reading.free_bytes == round(2.88 * MIB)


def test_the_simulations_errors_are_read_too() -> None:
    with SimulatedMemory(8 * MIB), pytest.raises(torch.OutOfMemoryError) as told:
        torch.ones(4 * MIB)
    reading = explain_oom(told.value)
    assert (reading.cause, reading.asked_bytes, reading.total_bytes) == ("too large", 16 * MIB, 8 * MIB)
    with SimulatedMemory(8 * MIB), pytest.raises(torch.OutOfMemoryError) as told:
        kept = [torch.ones(MIB) for _ in range(3)]
    assert explain_oom(told.value).cause == "this process"
    allocator = SimulatedAllocator(64 * MIB)
    for address in [allocator.allocate(10 * MIB) for _ in range(6)]:
        allocator.free(address)
    kept = [allocator.allocate(6 * MIB) for _ in range(6)]  # one in each segment
    with pytest.raises(torch.OutOfMemoryError) as told:
        allocator.allocate(20 * MIB)
    assert explain_oom(told.value).cause == "fragmentation"
    assert len(kept) == 6


def test_the_reading_keeps_no_tensor_of_the_failed_step() -> None:
    def step() -> None:
        batch = torch.ones(MIB)
        alive.append(weakref.ref(batch))
        raise torch.OutOfMemoryError(FULL)

    alive: list[weakref.ref] = []
    try:
        step()
    except torch.OutOfMemoryError as error:
        reading = explain_oom(error)
        assert alive[0]() is not None
    assert alive[0]() is None
    assert reading.total_bytes == round(14.75 * 2**30)


def test_a_limit_of_this_process_counts_as_its_total():
    limited = (
        "CUDA out of memory. Tried to allocate 256.00 MiB. GPU 0 has a total capacity of 14.56 GiB of which 13.00 GiB "
        "is free. 1.00 GiB allowed; Of the allocated memory 900.00 MiB is allocated by PyTorch, and 24.00 MiB is "
        "reserved by PyTorch but unallocated."
    )
    reading = explain_oom(limited)
    assert (reading.total_bytes, reading.free_bytes, reading.rest_bytes) == (2**30, 100 * 2**20, 0)
    assert reading.cause == "this process"


def test_only_errors_and_texts_are_explained() -> None:
    with pytest.raises(TypeError, match="explain_oom takes an exception or its text"):
        explain_oom(3)  # type: ignore[arg-type]


# --- the front door -----------------------------------------------------------------------------------------------


def test_the_lesson_finds_everything_under_one_name() -> None:
    from course_utils import cache

    assert all(hasattr(cache, name) for name in cache.__all__)
    assert cache.Effects is memory_effects.Effects
    assert cache.explain_oom is oom_reading.explain_oom
