"""describe_runtime on every machine that a learner may have, simulated from its facts, and on this one."""

import itertools
import json
import os
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from course_utils import runtime
from course_utils.driver import NVML_IS_MISSING, Driver, DriverGpu, MigSlice
from course_utils.machine import Machine, TorchBuild, read_machine
from course_utils.runtime import Gpu, Runtime, amp_dtype, describe_runtime, pick_device
from course_utils.torch_gpus import has_kernels

ROOT = Path(runtime.__file__).parents[1]
CU128 = TorchBuild("2.11.0+cu128", "12.8", None, ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"))
CU130 = TorchBuild("2.14.1+cu130", "13.0", None, CU128.architectures)
CPU_BUILD = TorchBuild("2.11.0+cpu", None, None, ())
NO_DRIVER = Driver(reason="there is no NVIDIA driver", state="unreachable")
CLICK_COLAB = "Runtime → Change runtime type → T4 GPU → Save"
CLICK_KAGGLE = "Settings → Accelerator → GPU T4 x2"


def card(name="Tesla T4", capability=(7, 5), gib=15.0, index=0, mig=None):
    return DriverGpu(index, name, capability, int(gib * 2**30), f"GPU-{index}{index}", mig)


def cards(*given, version="580.82.07", cuda=(13, 0)):
    return Driver(tuple(replace(gpu, index=i, uuid=f"GPU-{i}{i}") for i, gpu in enumerate(given)), version, cuda)


def box(driver=NO_DRIVER, torch_build=CU128, place="Colab", **facts):
    """A Colab-like machine; `environment` and the rest can be given."""
    defaults = {"cpus": 2, "ram_bytes": int(12.7 * 2**30), "shm_bytes": 6 * 2**30}
    return Machine(place=place, torch=torch_build, driver=driver, **(defaults | facts))


P100 = card("Tesla P100-PCIE-16GB", (6, 0), 16)
A100 = card("NVIDIA A100-SXM4-40GB", (8, 0), 40)
H100 = card("NVIDIA H100 80GB HBM3", (9, 0), 79.6)
SLICES = tuple(MigSlice(f"NVIDIA A100-SXM4-40GB MIG {n}g.5gb", f"MIG-{n}{n}{n}", 5 * 2**30) for n in (1, 2))


def test_colab_with_a_t4():
    found = describe_runtime(box(cards(card())))
    assert found.headline == "Colab: Tesla T4 (sm_75, 15.0 GiB). PyTorch 2.11.0+cu128, 2 CPU(s), 12.7 GiB RAM."
    gpu = found.gpu
    assert (gpu.index, gpu.nvml_index, gpu.memory_bytes) == (0, 0, 15 * 2**30)
    assert (gpu.capability, gpu.driver_version, gpu.has_kernels) == ((7, 5), "580.82.07", True)
    assert (gpu.fp16_tensor_cores, gpu.bf16_native, gpu.tf32) == (True, False, False)
    assert (found.reason, found.advice, found.notes) == (None, None, ())


def test_kaggle_with_two_t4():
    found = describe_runtime(box(cards(card(), card()), place="Kaggle", cpus=4, ram_bytes=31 * 2**30))
    assert found.headline.startswith("Kaggle: 2 × Tesla T4 (sm_75, 15.0 GiB).")
    assert [(gpu.index, gpu.nvml_index) for gpu in found.gpus] == [(0, 0), (1, 1)]


def test_kaggle_with_a_p100_that_current_torch_cannot_use():
    found = describe_runtime(box(cards(P100), place="Kaggle"))
    assert found.gpu is None
    assert found.gpus[0].has_kernels is False
    assert "P100" in found.reason
    assert "sm_60" in found.reason
    assert "too old" in found.reason
    assert CLICK_KAGGLE in found.advice
    assert found.headline.startswith("Kaggle: no usable GPU, because the Tesla P100-PCIE-16GB (sm_60) is too old")


def test_a_p100_with_wheels_that_still_carry_its_code():
    build = TorchBuild("2.11.0+cu126", "12.6", None, ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"))
    found = describe_runtime(box(cards(P100), build))
    assert found.gpu.name == "Tesla P100-PCIE-16GB"
    assert (found.gpu.fp16_tensor_cores, found.gpu.bf16_native) == (False, False)


def test_an_old_gpu_at_home_is_told_which_wheels_to_install():
    found = describe_runtime(box(cards(P100), CU130, place="JupyterLab"))
    assert "12.6" in found.advice
    assert CLICK_KAGGLE not in found.advice


def test_a_gpu_that_is_newer_than_this_torch():
    found = describe_runtime(box(cards(card("NVIDIA Next", (15, 0), 64)), place="terminal"))
    assert "too new" in found.reason
    assert "12.6" not in found.advice


def test_a_gpu_in_a_gap_of_the_build_is_neither_old_nor_new():
    build = CU128._replace(architectures=("sm_75", "sm_120"))
    found = describe_runtime(box(cards(H100), build, place="terminal"))
    assert found.gpu is None
    assert "too old" not in found.reason
    assert "too new" not in found.reason


@pytest.mark.parametrize("gpu", [A100, H100])
def test_ampere_and_hopper_do_everything(gpu):
    found = describe_runtime(box(cards(gpu), place="JupyterLab"))
    assert (found.gpu.fp16_tensor_cores, found.gpu.bf16_native, found.gpu.tf32) == (True, True, True)
    assert "emulated" not in repr(found)


def test_a_gtx_16_has_no_tensor_cores_though_its_capability_is_a_t4s():
    found = describe_runtime(box(cards(card("NVIDIA GeForce GTX 1660 Ti", (7, 5), 6)), place="VS Code"))
    assert found.gpu.fp16_tensor_cores is False
    assert Gpu(0, "NVIDIA T1000", (7, 5)).fp16_tensor_cores is False
    assert Gpu(0, "Tesla T4", (7, 5)).fp16_tensor_cores is True
    assert Gpu(0, "GeForce RTX 2080 Ti", (7, 5)).fp16_tensor_cores is True


@pytest.mark.parametrize("build", [CU128, CPU_BUILD])
@pytest.mark.parametrize(
    "driver", [NO_DRIVER, Driver(reason="the NVIDIA driver is not loaded", state="absent")], ids=["none", "not loaded"]
)
@pytest.mark.parametrize(("place", "click"), [("Colab", CLICK_COLAB), ("Kaggle", CLICK_KAGGLE)])
def test_a_hosted_cpu_runtime_says_what_to_click_not_what_to_install(build, driver, place, click):
    found = describe_runtime(box(driver, build, place=place))
    assert found.reason == f"this is a {place} runtime without a GPU"
    assert found.advice.startswith(click)
    assert "nstall" not in found.advice
    assert found.gpus == ()
    assert found.headline.startswith(f"{place}: no usable GPU, because this is a {place} runtime without a GPU.")


def test_a_cpu_wheel_beside_a_gpu():
    found = describe_runtime(box(cards(card()), CPU_BUILD, place="JupyterLab"))
    assert found.gpu is None
    assert "CPU build" in found.reason
    assert "pytorch.org" in found.advice
    assert found.gpus[0].has_kernels is None
    hosted = describe_runtime(box(cards(card()), CPU_BUILD, place="Colab"))
    assert "Disconnect and delete runtime" in hosted.advice


def test_a_cpu_wheel_at_home_without_a_gpu_names_both():
    found = describe_runtime(box(NO_DRIVER, CPU_BUILD, place="terminal"))
    assert "no NVIDIA driver" in found.reason
    assert "CPU build" in found.reason


@pytest.mark.parametrize("setting", ["", "-1", "NoDevFiles", "7", "0,0", "GPU-no-such"])
def test_a_gpu_hidden_by_the_environment(setting):
    found = describe_runtime(box(cards(card(), card()), environment={"CUDA_VISIBLE_DEVICES": setting}))
    assert found.gpus == ()
    assert f"CUDA_VISIBLE_DEVICES={setting!r} hides 2 GPU(s)" in found.reason
    assert "CUDA_VISIBLE_DEVICES" in found.advice


def test_a_long_setting_is_cut():
    found = describe_runtime(box(cards(card()), environment={"CUDA_VISIBLE_DEVICES": "x" * 10_000}))
    assert len(found.headline) < 300


@pytest.mark.parametrize(
    ("setting", "nvml"),
    [
        (None, [0, 1, 2]),
        ("1", [1]),
        ("2,0", [2, 0]),
        ("GPU-22", [2]),
        ("0,-1,1", [0]),
        ("0,7,1", [0]),
        (" 1 , 2 ", [1, 2]),
    ],
)
def test_visible_devices_choose_and_order_the_gpus(setting, nvml):
    environment = {} if setting is None else {"CUDA_VISIBLE_DEVICES": setting}
    found = describe_runtime(box(cards(card(), card(), card()), environment=environment))
    assert [gpu.nvml_index for gpu in found.gpus] == nvml
    assert [gpu.index for gpu in found.gpus] == list(range(len(nvml)))


def test_mixed_gpus_are_listed_with_a_warning_about_their_order():
    mixed = cards(card("NVIDIA GeForce GT 1030", (6, 1), 2), card("NVIDIA GeForce RTX 4090", (8, 9), 24))
    found = describe_runtime(box(mixed, CU130, place="JupyterLab"))
    assert found.gpu.name == "NVIDIA GeForce RTX 4090"
    assert "and 1 other GPU(s)" in found.headline
    assert any("PCI_BUS_ID" in note for note in found.notes)
    assert any("no kernels for cuda:0 (NVIDIA GeForce GT 1030)" in note for note in found.notes)
    ordered = describe_runtime(box(mixed, CU130, environment={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}))
    assert not any("PCI_BUS_ID" in note for note in ordered.notes)


def test_mig_shows_one_slice_and_never_the_whole_card():
    sliced = replace(A100, mig=SLICES)
    found = describe_runtime(box(cards(sliced, sliced), CU130, place="JupyterLab"))
    assert [gpu.name for gpu in found.gpus] == ["NVIDIA A100-SXM4-40GB MIG 1g.5gb"]
    assert (found.gpu.memory_bytes, found.gpu.capability) == (5 * 2**30, (8, 0))
    assert any("MIG" in note for note in found.notes)


@pytest.mark.parametrize(
    ("setting", "name"), [("MIG-222", "2g.5gb"), ("MIG-2", "2g.5gb"), ("MIG-111,MIG-222", "1g.5gb")]
)
def test_mig_by_uuid(setting, name):
    environment = {"CUDA_VISIBLE_DEVICES": setting}
    found = describe_runtime(box(cards(replace(A100, mig=SLICES)), CU130, environment=environment))
    assert [gpu.name.split("MIG ")[1] for gpu in found.gpus] == [name]
    assert any("MIG" in note for note in found.notes)


def test_mig_that_cannot_be_found_is_still_a_device():
    environment = {"CUDA_VISIBLE_DEVICES": "MIG-999"}
    two = cards(replace(A100, mig=SLICES), replace(A100, mig=SLICES[:1]))
    found = describe_runtime(box(two, CU130, environment=environment))
    assert (found.gpu.memory_bytes, found.gpu.has_kernels, found.gpu.nvml_index) == (None, None, None)


def test_mig_switched_on_without_an_instance():
    found = describe_runtime(box(cards(replace(A100, mig=())), CU130, place="JupyterLab"))
    assert found.gpu is None
    assert "no MIG instance exists" in found.reason


def test_wsl_sends_the_driver_to_windows():
    assert "Windows" in describe_runtime(box(place="VS Code", wsl=True)).advice
    assert "Windows" not in describe_runtime(box(place="VS Code")).advice


def test_a_card_that_tells_nothing_counts_as_usable_and_shows_no_zero():
    silent = DriverGpu(0, "unknown GPU", None, None)
    found = describe_runtime(box(Driver((silent,), None, None), place="terminal"))
    assert found.gpu.has_kernels is None
    assert (found.gpu.bf16_native, found.gpu.tf32, found.gpu.fp16_tensor_cores) == (None, None, None)
    assert "n/a" in repr(found)


@pytest.mark.parametrize(
    ("build", "cuda", "usable"),
    [
        (CU128, (12, 2), True),
        (CU128, (12, 8), True),
        (CU128, (13, 0), True),
        (CU128, (11, 8), False),
        (CU130, (13, 0), True),
        (CU130, (12, 8), False),
        (CU130, None, True),
    ],
)
def test_a_driver_runs_its_own_cuda_major_version_and_older(build, cuda, usable):
    found = describe_runtime(box(cards(card(), version="550.54", cuda=cuda), build, place="JupyterLab"))
    assert (found.gpu is not None) == usable
    if not usable:
        assert f"CUDA up to {cuda[0]}.{cuda[1]}" in found.reason
        assert f"built for CUDA {cuda[0]}" in found.advice


@pytest.mark.parametrize(
    ("place", "cure"), [("Colab", "Disconnect and delete"), ("Kaggle", "Stop the session"), ("terminal", "Restart")]
)
def test_a_broken_driver_wants_a_restart(place, cure):
    broken = Driver(reason="the NVIDIA driver and its library have different versions", state="broken")
    found = describe_runtime(box(broken, place=place))
    assert found.reason == broken.reason
    assert found.advice.startswith(cure) or cure in found.advice


def test_a_container_without_nvml_is_told_the_capability():
    found = describe_runtime(box(Driver(reason=NVML_IS_MISSING, state="unreachable"), place="JupyterLab"))
    assert "compute,utility" in found.advice


def test_rocm_and_a_missing_torch():
    rocm = describe_runtime(box(torch_build=TorchBuild("2.11.0+rocm6.4", None, "6.4.1", ()), place="terminal"))
    assert "ROCm 6.4.1" in rocm.reason
    missing = describe_runtime(box(cards(card()), TorchBuild(), place="terminal"))
    assert missing.reason == "PyTorch is not installed"
    assert "PyTorch missing" in missing.headline


def test_little_shared_memory_is_noted():
    assert any("64 MiB in /dev/shm" in note for note in describe_runtime(box(shm_bytes=64 * 2**20)).notes)
    assert describe_runtime(box(shm_bytes=None)).notes == ()


def test_both_views_show_the_same_and_escape():
    evil = describe_runtime(box(cards(card("<img src=x>\x1b")), place="JupyterLab", ram_bytes=None))
    assert "<img" not in evil._repr_html_()
    assert "&lt;img" in evil._repr_html_()
    good = describe_runtime(box(cards(card()), shm_bytes=None))
    for view in (repr(good), good._repr_html_()):
        for text in ("Colab: Tesla T4 (sm_75, 15.0 GiB)", "bfloat16 only emulated, no TF32", "580.82.07", "n/a"):
            assert text in view
    assert repr(good).splitlines()[0] == good.headline
    assert "\n" not in good.headline
    with pytest.raises(FrozenInstanceError):
        good.cpus = 3


@given(
    driver=st.builds(
        Driver,
        st.lists(
            st.builds(
                DriverGpu,
                st.integers(0, 4),
                st.text(max_size=8),
                st.none() | st.tuples(st.integers(0, 20), st.integers(0, 9)),
                st.none() | st.integers(0, 2**40),
                st.none() | st.sampled_from(["GPU-1", "GPU-12"]),
                st.none() | st.just(SLICES) | st.just(()),
            ),
            max_size=4,
        ).map(tuple),
        st.none() | st.text(max_size=5),
        st.none() | st.tuples(st.integers(10, 14), st.integers(0, 9)),
        st.none() | st.text(max_size=5),
        st.sampled_from(["listed", "absent", "unreachable", "broken"]),
    ),
    build=st.sampled_from([CU128, CU130, CPU_BUILD, TorchBuild(), CU128._replace(architectures=("odd", "sm_75"))]),
    place=st.sampled_from(["Colab", "Kaggle", "JupyterLab", "terminal"]),
    environment=st.dictionaries(
        st.sampled_from(["CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"]), st.text(alphabet="0123,-GPUMI ²x", max_size=12)
    ),
)
def test_no_machine_makes_it_raise(driver, build, place, environment):
    found = describe_runtime(box(driver, build, place=place, environment=environment))
    assert (found.gpu is None) == (found.reason is not None) == (found.advice is not None)
    assert found.gpu is None or found.gpu.has_kernels is not False
    assert [gpu.index for gpu in found.gpus] == list(range(len(found.gpus)))
    assert found.headline.startswith(f"{place}: ")
    assert repr(found)
    assert found._repr_html_()


@pytest.mark.parametrize(
    ("capability", "codes", "runs"),
    [
        ((7, 5), ("sm_75",), True),
        ((7, 5), ("sm_70",), True),
        ((7, 0), ("sm_75",), False),
        ((8, 9), ("sm_86",), True),
        ((8, 0), ("sm_86",), False),
        ((9, 0), ("sm_80", "sm_86"), False),
        ((12, 1), ("sm_120",), True),
        ((12, 0), ("sm_100",), False),
        ((6, 0), ("sm_75", "sm_80"), False),
        ((9, 0), ("compute_80",), True),
        ((7, 5), ("compute_80",), False),
        ((9, 0), ("sm_90a",), True),
        ((9, 1), ("sm_90a", "compute_90a"), False),
        ((10, 3), ("sm_100f",), True),
        ((10, 3), ("compute_100f",), True),
        ((12, 0), ("compute_100f",), False),
        ((7, 5), (), None),
        ((7, 5), ("strange",), None),
        (None, ("sm_75",), None),
    ],
)
def test_has_kernels_follows_the_compatibility_rules(capability, codes, runs):
    assert has_kernels(capability, codes) is runs


def test_has_kernels_agrees_with_torch_on_every_desktop_gpu():
    rules = torch.cuda.DEVICE_REQUIREMENT if hasattr(torch.cuda, "DEVICE_REQUIREMENT") else None
    if rules is None:
        pytest.skip("this PyTorch keeps no table of compatible code")
    tegra = {53, 62, 72, 87, 101, 110}  # their code and that of desktop GPUs do not mix
    codes = set(rules) - tegra
    checked = 0
    for code, device in itertools.product(codes, codes):
        expected = device in rules[code]
        assert has_kernels(divmod(device, 10), (f"sm_{code}",)) is expected, (code, device)
        checked += 1
    assert checked > 100


@pytest.mark.parametrize(
    ("capability", "dtype"),
    [
        ((6, 0), torch.float16),
        ((6, 1), torch.float16),
        ((7, 0), torch.float16),
        ((7, 5), torch.float16),
        ((8, 0), torch.bfloat16),
        ((8, 9), torch.bfloat16),
        ((9, 0), torch.bfloat16),
        ((12, 0), torch.bfloat16),
        (None, torch.bfloat16),
    ],
)
def test_amp_dtype(capability, dtype):
    assert amp_dtype(capability) is dtype


@pytest.mark.parametrize("capability", [7.5, "75", 75, (7,), (7, 5, 0), ("7", "5"), (True, 0), [7, 5], "cuda"])
def test_amp_dtype_refuses_what_is_no_capability(capability):
    with pytest.raises(TypeError, match=r"capability is a pair \(major, minor\) such as \(7, 5\)"):
        amp_dtype(capability)


@pytest.mark.parametrize(
    ("driver", "build", "device", "dtype"),
    [
        (cards(card()), CU128, "cuda:0", torch.float16),
        (cards(A100), CU130, "cuda:0", torch.bfloat16),
        (cards(DriverGpu(0, "silent", None, None)), CU130, "cuda:0", torch.float16),
        (cards(P100), CU128, "cpu", torch.bfloat16),
        (cards(card()), CPU_BUILD, "cpu", torch.bfloat16),
        (Driver(reason="x", state="absent"), CU130, "cpu", torch.bfloat16),
    ],
)
def test_this_devices_choices(driver, build, device, dtype, monkeypatch):
    monkeypatch.setattr(runtime, "read_machine", lambda: box(driver, build, place="terminal"))
    monkeypatch.setattr(torch.cuda, "is_available", _forbidden)
    assert pick_device() == torch.device(device)
    assert amp_dtype() is dtype


@pytest.mark.parametrize(
    ("environment", "device"),
    [
        ({}, "cuda:0"),
        ({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, "cuda:1"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-00,GPU-11"}, "cuda:1"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-11"}, "cuda:0"),
    ],
)
def test_with_mixed_gpus_the_device_is_one_that_works(environment, device, monkeypatch):
    mixed = cards(P100, card("NVIDIA GeForce RTX 4090", (8, 9), 24))
    monkeypatch.setattr(runtime, "read_machine", lambda: box(mixed, CU130, environment=environment))
    assert pick_device() == torch.device(device)


@pytest.mark.parametrize("answer", [True, False])
def test_only_where_nobody_can_tell_cuda_is_asked(answer, monkeypatch):
    monkeypatch.setattr(runtime, "read_machine", lambda: box(NO_DRIVER, CU130))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: answer)
    assert pick_device() == torch.device("cuda:0" if answer else "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", _forbidden)
    monkeypatch.setattr(runtime, "read_machine", lambda: box(NO_DRIVER, CPU_BUILD))
    assert pick_device() == torch.device("cpu")


def _forbidden():
    raise AssertionError("CUDA was asked")


def _in_a_new_process(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_the_real_machine():
    found = describe_runtime()
    assert isinstance(found, Runtime)
    assert found.torch_version == torch.__version__
    assert 1 <= found.cpus <= (os.cpu_count() or 1)
    assert found.ram_bytes > 2**28
    assert found.python_version == ".".join(map(str, sys.version_info[:3]))
    assert (found.gpu is None) == (not torch.cuda.is_available())
    assert read_machine() == read_machine()


def test_nothing_starts_cuda_and_a_fork_still_can():
    code = """
import json
from pathlib import Path
import torch

def forbidden(*args):
    raise AssertionError("CUDA was asked")

torch.cuda.is_available = torch.cuda.device_count = torch.cuda.get_arch_list = torch.cuda._lazy_init = forbidden
for name in ("_cuda_getDeviceCount", "_cuda_init"):
    if hasattr(torch._C, name):
        setattr(torch._C, name, forbidden)
from course_utils import runtime

found = runtime.describe_runtime()
repr(found), found._repr_html_(), found.headline, runtime.amp_dtype(), runtime.usable_cpus()
print(json.dumps({
    "initialized": torch.cuda.is_initialized(),
    "bad fork": torch.cuda._is_in_bad_fork(),
    "headline": found.headline,
    "libcuda": Path("/proc/self/maps").exists() and "libcuda.so" in Path("/proc/self/maps").read_text(),
    "has gpu": found.gpu is not None,
}))
"""
    found = json.loads(_in_a_new_process(code))
    assert found["initialized"] is False
    assert found["bad fork"] is False
    assert found["has gpu"] or not found["libcuda"]
    assert found["headline"].startswith("terminal: ")


def test_the_environment_is_read_at_each_call(monkeypatch):
    monkeypatch.setattr("course_utils.machine.read_driver", lambda: cards(card(), card()))
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    for setting, count in [("", 0), ("0", 1), ("1,0", 2)]:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
        assert len(describe_runtime().gpus) == count
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert len(describe_runtime().gpus) == 2
