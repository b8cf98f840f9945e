"""The datasheet table: plausible, sourced, dense; and names that find a card or nothing, never another card."""

from dataclasses import FrozenInstanceError

import pytest

from course_utils.gpu_specs import SPECS, GpuSpec, spec_for

SINCE = {"Pascal": (6, 0), "Volta": (7, 0), "Turing": (7, 5), "Ampere": (8, 0), "Ada": (8, 9), "Hopper": (9, 0)}


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("Tesla T4", "Tesla T4"),
        ("NVIDIA T4", "Tesla T4"),
        ("nvidia  tesla t4 ", "Tesla T4"),
        ("T4", "Tesla T4"),
        ("Tesla P100-PCIE-16GB", "Tesla P100-PCIE-16GB"),
        ("Tesla V100-SXM2-32GB", "Tesla V100-SXM2-32GB"),
        ("A100-SXM4-40GB", "NVIDIA A100-SXM4-40GB"),
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB"),
        ("A100-SXM-80GB", "NVIDIA A100-SXM4-80GB"),
        ("NVIDIA A100 80GB PCIe", "NVIDIA A100 80GB PCIe"),
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3"),
        ("NVIDIA H200", "NVIDIA H200"),
        ("NVIDIA A10", "NVIDIA A10"),
        ("NVIDIA A10G", "NVIDIA A10G"),
        ("GeForce RTX 3090", "NVIDIA GeForce RTX 3090"),
        ("RTX 4090", "NVIDIA GeForce RTX 4090"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "NVIDIA RTX PRO 6000 Blackwell Server Edition"),
    ],
)
def test_a_known_name_finds_its_card(name, found):
    assert spec_for(name).name == found


@pytest.mark.parametrize(
    "name",
    [
        "T400", "T4G", "NVIDIA T1000", "T 4", "Tesla T40", "A100", "H100", "V100", "P100", "L40", "L40S", "L4 24GB",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA H100 NVL", "NVIDIA H200 NVL", "NVIDIA GH200 480GB",
        "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D", "GeForce RTX 3090 Ti", "RTX 2080",
        "NVIDIA A10M", "NVIDIA A1000", "NVIDIA", "Tesla", "nvidia tesla", "", " ", "-", "GPU", "Radeon VII", None,
    ],
)  # fmt: skip
def test_anything_else_is_unknown_and_never_a_guess(name):
    assert spec_for(name) is None


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_every_row_is_plausible_and_sourced(spec):
    assert spec_for(spec.name) is spec
    assert spec.source.startswith("https://")
    assert 10 * 2**30 < spec.memory_bytes < 200 * 2**30
    assert 2e11 < spec.bandwidth_bytes_per_s < 1e13
    assert spec.tdp_watts is None or 50 <= spec.tdp_watts <= 1000
    assert spec.sms is None or 20 < spec.sms < 200
    assert spec.capability >= SINCE.get(spec.architecture, (12, 0))


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_tensor_figures_fit_the_hardware(spec):
    if spec.capability < (7, 0):
        assert spec.fp16_tensor_tflops is None  # no tensor cores
    if spec.capability < (8, 0):
        assert spec.bf16_tensor_tflops is None  # no native bfloat16
    elif spec.bf16_tensor_tflops is not None:
        assert spec.bf16_tensor_tflops == spec.fp16_tensor_tflops
    if spec.fp16_tensor_tflops and spec.sms and spec.fp32_tflops:
        # Dense and float32-accumulating: 512 (consumer), 1,024 or 2,048 (A100), 4,096 (H100) operations a clock and SM,
        # at the clock that the float32 figure implies. A sparse figure would be twice too high.
        lanes = 64 if spec.architecture in {"Volta", "Turing"} or spec.capability == (8, 0) else 128
        clock_hz = spec.fp32_tflops * 1e12 / (2 * lanes * spec.sms)
        per_clock = spec.fp16_tensor_tflops * 1e12 / (spec.sms * clock_hz)
        expected = {(7, 0): 1024, (8, 0): 2048, (9, 0): 4096}.get(spec.capability, 512)
        if spec.name == "Tesla T4":
            expected = 1024
        assert per_clock == pytest.approx(expected, rel=0.08)


def test_the_t4_is_the_one_that_facts_describe():
    spec = spec_for("Tesla T4")
    assert (spec.sms, spec.capability, spec.tdp_watts) == (40, (7, 5), 70)
    assert (spec.fp32_tflops, spec.fp16_tensor_tflops, spec.bf16_tensor_tflops) == (8.1, 65, None)
    assert spec.bandwidth_bytes_per_s == 320e9
    assert spec.memory_bytes == 16 * 2**30


def test_a100_40_and_80_differ_by_name():
    small, large = spec_for("NVIDIA A100-SXM4-40GB"), spec_for("NVIDIA A100-SXM4-80GB")
    assert (small.memory_bytes, large.memory_bytes) == (40 * 2**30, 80 * 2**30)
    assert (small.bandwidth_bytes_per_s, large.bandwidth_bytes_per_s) == (1555e9, 2039e9)


def test_names_are_unique():
    assert len({spec.name for spec in SPECS}) == len(SPECS)


def test_both_views_show_the_figures_and_escape():
    spec = spec_for("Tesla T4")
    for text in (repr(spec), spec._repr_html_()):
        assert "65.0 TFLOPS" in text
        assert "n/a" in text  # bfloat16
        assert spec.source in text
    odd = GpuSpec("<b>", "x", (7, 5), None, 2**30, 1e9, None, None, None, None, "https://x")
    assert "<b>" not in odd._repr_html_()
    with pytest.raises(FrozenInstanceError):
        odd.name = "other"
