"""Facts about the machine: the driver through a fake NVML, cgroups in a fake file tree, the place from its signs."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from course_utils import driver, machine, nvidia_smi
from course_utils.driver import read_driver
from course_utils.machine import find_place, ram_bytes, read_torch, shm_bytes, usable_cpus
from course_utils.nvidia_smi_parse import SmiGpu, SmiReport


class NVMLError(Exception):
    def __init__(self, value):
        super().__init__(f"NVML error {value}")
        self.value = value


class FakeNvml:
    """Stands in for nvidia-ml-py. A device is a dict; an exception in place of a value is raised."""

    NVMLError = NVMLError

    def __init__(self, *devices, init_error=None, cuda=13000, version="580.65.06", count=None):
        self.devices, self.init_error, self.cuda, self.version = devices, init_error, cuda, version
        self.count = len(devices) if count is None else count
        self.open = 0

    def nvmlInit(self):
        if self.init_error is not None:
            raise NVMLError(self.init_error)
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlSystemGetDriverVersion(self):
        return _give(self.version)

    def nvmlSystemGetCudaDriverVersion_v2(self):
        return _give(self.cuda)

    def nvmlDeviceGetCount(self):
        return _give(self.count)

    def nvmlDeviceGetHandleByIndex(self, index):
        return _give(self.devices[index])

    def nvmlDeviceGetName(self, device):
        return _give(device.get("name", "Tesla T4"))

    def nvmlDeviceGetUUID(self, device):
        return _give(device.get("uuid", "GPU-1"))

    def nvmlDeviceGetCudaComputeCapability(self, device):
        return _give(device.get("capability", (7, 5)))

    def nvmlDeviceGetMemoryInfo(self, device):
        return SimpleNamespace(total=_give(device.get("memory", 15360 * 2**20)))

    def nvmlDeviceGetMigMode(self, device):
        return _give(device.get("mig_mode", NVMLError(3)))

    def nvmlDeviceGetMaxMigDeviceCount(self, device):
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device, position):
        slices = device.get("slices", [])
        return slices[position] if position < len(slices) else _give(NVMLError(6))


def _give(value):
    if isinstance(value, Exception):
        raise value
    return value


@pytest.fixture
def smi(monkeypatch):
    """What nvidia-smi reports; by default that it is missing."""
    state = SimpleNamespace(report=SmiReport(reason="nvidia-smi was not found."), asked=0)

    def query(*_args, **_kwargs):
        state.asked += 1
        return state.report

    monkeypatch.setattr(nvidia_smi, "query", query)
    return state


def test_two_t4_are_read_and_nvml_is_closed(smi):
    nvml = FakeNvml({"uuid": "GPU-a"}, {"uuid": "GPU-b"})
    found = read_driver(nvml)
    assert [gpu.uuid for gpu in found.gpus] == ["GPU-a", "GPU-b"]
    assert [gpu.index for gpu in found.gpus] == [0, 1]
    first = found.gpus[0]
    assert (first.name, first.capability, first.memory_bytes) == ("Tesla T4", (7, 5), 16106127360)
    assert (found.version, found.cuda, found.reason, found.state) == ("580.65.06", (13, 0), None, "listed")
    assert nvml.open == 0
    assert smi.asked == 0


@pytest.mark.parametrize(
    ("raw", "name"),
    [
        (b"Tesla T4", "Tesla T4"),
        ("Tesla T4", "Tesla T4"),
        (b"\xf8\x01", "\ufffd\ufffd"),
        (UnicodeDecodeError("utf-8", b"\xf8\x01", 0, 1, "invalid start byte"), "\ufffd\ufffd"),
        (NVMLError(999), "unknown GPU"),
    ],
)
def test_a_name_in_bytes_text_or_neither(raw, name):
    assert read_driver(FakeNvml({"name": raw})).gpus[0].name == name


@pytest.mark.parametrize("code", [3, 999])
def test_a_value_that_a_card_lacks_is_none_and_the_rest_stays(code):
    bare = {"capability": NVMLError(code), "memory": NVMLError(code), "uuid": NVMLError(code)}
    found = read_driver(FakeNvml(bare, cuda=NVMLError(code), version="535.104.05"))
    gpu = found.gpus[0]
    assert (gpu.name, gpu.capability, gpu.memory_bytes, gpu.uuid) == ("Tesla T4", None, None, None)
    assert found.cuda == (12, 0)  # from the driver's version


def test_an_old_binding_without_a_function_costs_only_its_value():
    class OldBinding(FakeNvml):
        def __getattribute__(self, name):
            if name in {"nvmlDeviceGetCudaComputeCapability", "nvmlDeviceGetMigMode"}:
                raise AttributeError(name)
            return super().__getattribute__(name)

    gpu = read_driver(OldBinding({})).gpus[0]
    assert (gpu.name, gpu.capability, gpu.mig) == ("Tesla T4", None, None)


def test_one_dead_gpu_does_not_hide_the_others():
    found = read_driver(FakeNvml(NVMLError(15), {"name": "Tesla T4", "uuid": "GPU-b"}))
    assert [(gpu.index, gpu.uuid) for gpu in found.gpus] == [(1, "GPU-b")]


@pytest.mark.parametrize(
    ("nvml", "state", "words"),
    [
        (FakeNvml(init_error=12), "unreachable", "no NVIDIA driver"),
        (FakeNvml(init_error=9), "absent", "not loaded"),
        (FakeNvml(init_error=18), "broken", "different versions"),
        (FakeNvml(init_error=999), "broken", "NVML error 999"),
        (FakeNvml(), "absent", "sees no GPU"),
        (FakeNvml(count=NVMLError(1)), "absent", "sees no GPU"),
        (FakeNvml(NVMLError(15), NVMLError(15)), "broken", "2 GPU(s)"),
    ],
)
def test_each_reason_for_no_gpu(nvml, state, words, smi, tmp_path):
    found = read_driver(nvml, root=tmp_path)
    assert found.gpus == ()
    assert found.state == state
    assert words in found.reason
    assert nvml.open == 0


def test_a_container_with_a_gpu_but_without_nvml_says_so(smi, tmp_path):
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    found = read_driver(FakeNvml(init_error=12), root=tmp_path)
    assert found.reason == driver.NVML_IS_MISSING
    assert found.state == "unreachable"


def test_without_nvml_nvidia_smi_answers(smi, monkeypatch):
    monkeypatch.setattr(driver, "_import_nvml", lambda: None)
    cells = {"compute_cap": "8.9"}
    smi.report = SmiReport(
        gpus=(
            SmiGpu(index=0, name="Tesla T4", uuid="GPU-a", driver_version="535.10", total_bytes=16106127360),
            SmiGpu(index=1, name="NVIDIA L4", driver_version="535.10", cells=cells),
            SmiGpu(index=2, name="Mystery", cells={"compute_cap": "[N/A]"}),
        )
    )
    found = read_driver()
    assert [gpu.capability for gpu in found.gpus] == [(7, 5), (8, 9), None]  # datasheet, nvidia-smi, neither
    assert found.gpus[0].memory_bytes == 16106127360
    assert (found.version, found.cuda, found.state) == ("535.10", (12, 0), "listed")


def test_without_nvml_and_nvidia_smi_there_is_a_reason(smi, monkeypatch):
    monkeypatch.setattr(driver, "_import_nvml", lambda: None)
    found = read_driver()
    assert (found.gpus, found.state) == ((), "unreachable")
    assert "nvidia-ml-py" in found.reason


def test_mig_instances_are_read():
    piece = {"name": "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "uuid": "MIG-1", "memory": 4864 * 2**20}
    on, off = {"mig_mode": (1, 1), "slices": [piece]}, {"mig_mode": (0, 1)}
    empty = {"mig_mode": (1, 1)}
    gpus = read_driver(FakeNvml(on, off, empty)).gpus
    assert gpus[0].mig[0].name.endswith("MIG 1g.5gb")
    assert gpus[0].mig[0].memory_bytes == 4864 * 2**20
    assert gpus[0].mig_uuids == ("MIG-1",)
    assert (gpus[1].mig, gpus[2].mig) == (None, ())


@pytest.mark.parametrize(
    ("version", "cuda"),
    [
        ("580.65", (13, 0)),
        ("579.99", (12, 0)),
        ("525.60.13", (12, 0)),
        ("450.80", (11, 0)),
        ("390.1", None),
        (None, None),
        ("x", None),
    ],
)
def test_the_cuda_version_that_a_driver_runs(version, cuda):
    assert driver.cuda_of_driver(version) == cuda


def _tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


UP_TREE = {
    "proc/self/cgroup": "0::/a/b\n",
    "sys/fs/cgroup/a/b/cpu.max": "max 100000",
    "sys/fs/cgroup/a/cpu.max": "300000 100000",
}


def _version_1(quota: str, controllers: str = "cpu,cpuacct") -> dict[str, str]:
    folder = "sys/fs/cgroup/cpu/x/cpu.cfs_"
    return {
        "proc/self/cgroup": f"4:{controllers}:/x\n",
        f"{folder}quota_us": quota,
        f"{folder}period_us": "100000",
    }


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({}, 8),
        ({"sys/fs/cgroup/cpu.max": "max 100000"}, 8),
        ({"sys/fs/cgroup/cpu.max": "200000 100000"}, 2),
        ({"sys/fs/cgroup/cpu.max": "150000 100000"}, 2),
        ({"sys/fs/cgroup/cpu.max": "20000 100000"}, 1),
        ({"sys/fs/cgroup/cpu.max": "1600000 100000"}, 8),
        ({"sys/fs/cgroup/cpu.max": "nonsense"}, 8),
        ({"sys/fs/cgroup/cpu.max": "100000 0"}, 8),
        ({"sys/fs/cgroup/cpu.max": ""}, 8),
        (UP_TREE, 3),  # a limit further up counts as well
        (_version_1("-1"), 8),  # no limit
        (_version_1("400000"), 4),
        (_version_1("400000", controllers="memory"), 8),  # another controller's group is not ours
        # in a container the path may lead outside, and only the mount's root is there
        ({"proc/self/cgroup": "0::/../../other\n", "sys/fs/cgroup/cpu.max": "100000 100000"}, 1),
        ({"proc/self/cgroup": "garbage\n\n::\n"}, 8),
    ],
)
def test_usable_cpus_respect_affinity_and_quota(files, cpus, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)), raising=False)
    assert usable_cpus(_tree(tmp_path, files)) == cpus


def test_usable_cpus_without_affinity_count_all(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert usable_cpus(tmp_path) == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cpus(tmp_path) == 1


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({"sys/fs/cgroup/memory.max": "1048576\n"}, 2**20),
        ({"proc/self/cgroup": "5:memory:/p/q\n", "sys/fs/cgroup/memory/p/memory.limit_in_bytes": "2097152"}, 2**21),
        ({"sys/fs/cgroup/memory.max": "max"}, None),
        ({"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"}, None),
        ({}, None),
    ],
)
def test_ram_respects_the_cgroup(files, limit, tmp_path):
    import psutil

    assert ram_bytes(_tree(tmp_path, files)) == (limit or psutil.virtual_memory().total)


def test_ram_without_psutil_is_the_limit_or_unknown(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "_import_psutil", lambda: None)
    assert ram_bytes(tmp_path) is None
    assert ram_bytes(_tree(tmp_path, {"sys/fs/cgroup/memory.max": "4096"})) == 4096


def test_shared_memory_is_measured_or_none(tmp_path):
    assert shm_bytes(tmp_path) > 0
    assert shm_bytes(tmp_path / "missing") is None


def _ipython(kernel=True, **user_ns):
    shell = SimpleNamespace(user_ns=user_ns, **({"kernel": object()} if kernel else {}))
    return {"IPython": SimpleNamespace(get_ipython=lambda: shell)}


LAB = "/usr/bin/python /usr/bin/jupyter-lab --port 8888"


@pytest.mark.parametrize(
    ("environment", "modules", "parent", "place"),
    [
        ({}, {}, "bash", "terminal"),
        ({}, {"IPython": SimpleNamespace(get_ipython=lambda: None)}, LAB, "terminal"),
        ({}, _ipython(kernel=False), "bash", "terminal"),
        ({"TERM_PROGRAM": "vscode", "VSCODE_PID": "1"}, {}, "code", "terminal"),
        ({"COLAB_RELEASE_TAG": "release-colab_2026"}, {}, "", "Colab"),
        ({}, {"google.colab": object(), **_ipython()}, LAB, "Colab"),
        ({"KAGGLE_KERNEL_RUN_TYPE": "Interactive", "COLAB_RELEASE_TAG": "x"}, _ipython(), LAB, "Kaggle"),
        ({}, _ipython(), LAB, "JupyterLab"),
        ({}, _ipython(), "python -m jupyterlab", "JupyterLab"),
        ({}, _ipython(), "/opt/bin/jupyterhub-singleuser", "JupyterLab"),
        ({"VSCODE_PID": "1"}, _ipython(), LAB, "JupyterLab"),
        ({"VSCODE_PID": "1"}, _ipython(), "node extensionHost", "VS Code"),
        ({}, _ipython(__vsc_ipynb_file__="/a.ipynb"), LAB, "VS Code"),
        ({"JPY_SESSION_NAME": "/a.ipynb"}, _ipython(), "jupyter-notebook", "Jupyter"),
        ({}, _ipython(), "", "Jupyter"),
    ],
)
def test_the_place_is_told_by_its_signs(environment, modules, parent, place):
    assert find_place(environment, modules, lambda: parent) == place


@pytest.mark.parametrize("pid", ["nonsense", "999999999", "-3", None])
def test_a_parent_that_is_gone_has_no_command(pid, monkeypatch):
    if pid is None:
        monkeypatch.setattr(machine, "_import_psutil", lambda: None)
    else:
        monkeypatch.setenv("JPY_PARENT_PID", pid)
    assert machine._command_of_parent() == ""


def test_torch_is_read_without_asking_cuda(monkeypatch):
    import torch

    def forbidden(*_args):
        raise AssertionError("CUDA was asked")

    for name in ("is_available", "get_arch_list", "device_count", "_lazy_init"):
        monkeypatch.setattr(torch.cuda, name, forbidden)
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", forbidden, raising=False)
    build = read_torch()
    assert build.version == torch.__version__
    assert build.cuda == torch.version.cuda
    assert bool(build.architectures) == (torch.version.cuda is not None)


def test_a_cpu_build_and_a_missing_torch(monkeypatch):
    import torch

    monkeypatch.setattr(torch.version, "cuda", None)
    assert read_torch().architectures == ()
    assert read_torch().cuda is None
    monkeypatch.setitem(sys.modules, "torch", None)  # makes `import torch` raise ImportError
    assert read_torch().version is None


@pytest.mark.usefixtures("one_kernel")
def test_a_real_kernel_is_jupyter():
    """A kernel started by jupyter_client, as nbclient and the browsers' servers do it."""
    ask = "import os, sys; from course_utils import machine as m; "
    ask += "print(m.find_place(os.environ, sys.modules, m._command_of_parent))"
    code = (
        "from jupyter_client.manager import start_new_kernel\n"
        "manager, client = start_new_kernel(kernel_name='python3')\n"
        "found = []\n"
        f"client.execute_interactive({ask!r},\n"
        "    timeout=60, output_hook=lambda m: found.append(m['content'].get('text', '')))\n"
        "client.stop_channels(); manager.shutdown_kernel(now=True)\n"
        "print(''.join(found).strip())"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("VSCODE_", "JPY_"))}
    folder = Path(machine.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip().splitlines()[-1:] == ["Jupyter"], done.stderr
