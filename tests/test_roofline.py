"""The roofline: what is measured, what follows from it, and a drawing whose labels stay apart."""

import itertools
import random
from types import SimpleNamespace

import pytest
import torch
from matplotlib.text import Text

from course_utils import roofline as module
from course_utils.gpu_specs import spec_for
from course_utils.roofline import MeasuredBandwidth, MeasuredPeak, Roofline, matmul_peak, memory_bandwidth, roofline
from course_utils.roofline_labels import Box, around, overlap, place_labels
from course_utils.timing import Timing

ONE = Timing((0.1,), "cuda:0", "CUDA events")


def measured(datasheet=True):
    """As a T4 might measure: 24 of 65 TFLOP/s, 250 of 320 GB/s."""
    flops, moved = (65e12, 320e9) if datasheet else (None, None)
    peak = MeasuredPeak(24e12, 4096, torch.float16, "cuda:0", ONE, flops)
    return Roofline(peak, MeasuredBandwidth(250e9, 2**29, "cuda:0", ONE, moved))


@pytest.fixture
def clock(monkeypatch):
    """A device that multiplies at a rate of its own for each size; the functions are not called."""
    rates, asked = {}, []

    def time_call(function, *, device, warmup=1, repeats, budget_s):
        size = next(cell.cell_contents for cell in function.__closure__ if isinstance(cell.cell_contents, torch.Tensor))
        asked.append((size.shape[0], warmup + repeats))
        seconds = 2 * size.shape[0] ** 3 / rates.get(size.shape[0], rates["else"])
        return Timing((seconds * 2, *[seconds] * (repeats - 1)) if repeats > 1 else (seconds,), str(device), "fake")

    monkeypatch.setattr(module, "time_call", time_call)
    monkeypatch.setattr(module, "_SIZES", (4, 8, 16, 32))
    return SimpleNamespace(rates=rates, asked=asked)


# --- measuring


def test_the_best_size_is_the_peak(clock):
    clock.rates.update({"else": 1e6, 8: 5e6, 32: 2e6})
    found = matmul_peak("cpu", torch.float64, budget_s=10)
    assert (found.size, found.dtype, found.device) == (8, torch.float64, "cpu")
    assert found.flops_per_s == pytest.approx(5e6)
    assert [size for size, _ in clock.asked] == [4, 8, 16, 32]


def test_a_slow_device_gets_small_products_and_keeps_its_budget(clock):
    clock.rates["else"] = 1e4  # 13 ms for a product of 4, 0.8 s for one of 16
    matmul_peak("cpu", budget_s=1.0)
    assert [size for size, _ in clock.asked] == [4, 8]
    spent = sum(calls * 2 * size**3 / 1e4 for size, calls in clock.asked[1:])
    assert spent <= 1.0


def test_the_smallest_product_is_measured_in_any_case(clock):
    clock.rates["else"] = 1.0
    assert matmul_peak("cpu", budget_s=0.001).size == 4


def test_matrices_that_do_not_fit_into_a_quarter_of_the_memory_are_not_made(clock, monkeypatch):
    clock.rates["else"] = 1e9
    monkeypatch.setattr(module, "_memory_bytes", lambda device: 4 * 3 * 16 * 16 * 4)
    matmul_peak("cpu", budget_s=10)
    assert [size for size, _ in clock.asked] == [4, 8, 16]


def test_a_copy_counts_what_it_reads_and_what_it_writes(monkeypatch):
    def time_call(function, **_):
        function()
        return Timing((0.5, 0.25, 1.0), "cpu", "fake")

    monkeypatch.setattr(module, "time_call", time_call)
    monkeypatch.setattr(module, "_COPY_BYTES", {"cpu": 4096})
    found = memory_bandwidth("cpu")
    assert found.copied_bytes == 4096
    assert found.bytes_per_s == 2 * 4096 / 0.25
    assert found.datasheet_bytes_per_s is None


def test_where_memory_is_short_the_buffers_are_smaller(monkeypatch):
    monkeypatch.setattr(module, "_memory_bytes", lambda device: 2**20)
    assert memory_bandwidth("cpu", budget_s=0.001).copied_bytes == 2**17


def test_a_real_roofline_of_this_cpu(monkeypatch):
    monkeypatch.setattr(module, "_COPY_BYTES", {"cpu": 2**24})
    state = torch.get_rng_state()
    roof = roofline("cpu", budget_s=0.2)
    assert torch.equal(state, torch.get_rng_state())
    assert roof.peak.size in module._SIZES and roof.peak.flops_per_s > 1e6
    assert roof.bandwidth.bytes_per_s > 1e6
    assert roof.peak.datasheet_flops_per_s is None and roof.datasheet_ridge_flops_per_byte is None
    assert "n/a" in repr(roof) and "<table>" in roof._repr_html_()


@pytest.mark.parametrize("dtype", module.DTYPES, ids=str)
def test_each_dtype_is_multiplied(dtype, monkeypatch):
    monkeypatch.setattr(module, "_SIZES", (64,))
    assert matmul_peak("cpu", dtype, budget_s=0.01).dtype is dtype


def test_none_is_the_gpu_where_there_is_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert module._here(None) == torch.device("cpu")
    waited = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(module, "synchronize", waited.append)
    assert module._here(None) == torch.device("cuda") and waited == ["cuda"]


def test_the_datasheets_figures_belong_to_the_dtype(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    spec = module._spec(torch.device("cuda:0"))
    assert spec is spec_for("Tesla T4")
    figures = {dtype: module._datasheet_flops(spec, dtype) for dtype in module.DTYPES}
    assert figures == {torch.float16: 65e12, torch.float32: 8.1e12, torch.bfloat16: None, torch.float64: None}
    assert module._spec(torch.device("cpu")) is None and module._datasheet_flops(None, torch.float16) is None


def test_what_cannot_be_measured_is_named(monkeypatch):
    with pytest.raises(ValueError, match=r"dtype must be one of torch\.float32"):
        matmul_peak("cpu", torch.int8)
    with pytest.raises(ValueError, match="budget_s must be a positive number"):
        roofline("cpu", budget_s=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no usable GPU"):
        memory_bandwidth("cuda")


# --- what follows


def test_the_roof():
    roof = measured()
    assert roof.ridge_flops_per_byte == 96
    assert roof.datasheet_ridge_flops_per_byte == pytest.approx(203.1, abs=0.1)
    assert (roof.attainable(1), roof.attainable(96), roof.attainable(1e4)) == (250e9, 24e12, 24e12)
    assert (roof.limit(95.9), roof.limit(96.1)) == ("memory", "compute")
    assert roof.share(flops=1e12, moved_bytes=1e11, seconds=1.0) == pytest.approx(1e12 / 2.5e12)
    with pytest.raises(ValueError, match="intensity must be a positive number"):
        roof.attainable(0)
    assert "36.9%" in repr(roof.peak) and "78.1%" in repr(roof.bandwidth) and "one call" in repr(roof.peak)


# --- drawing

POINTS = {
    "step, float32": (1e12, 4e10, 0.5),
    "step, AMP": (1e12, 2.2e10, 0.2),
    "step, AMP and channels_last": (1e12, 2.2e10, 0.19),
    "step, compiled": (1e12, 1.2e10, 0.15),
    "element-wise": (1e9, 8e9, 0.05),
    "product": (1e12, 2e9, 0.05),
}


def extents(fig):
    """Boxes of the labels, of the other words, and of the axes, in pixels, once all is laid out."""
    fig.draw_without_rendering()
    ax = fig.axes[0]
    boxes = [Box(*Text.get_window_extent(text).extents) for text in ax.texts]
    frame = Box(*ax.get_window_extent().extents)
    return boxes[2:], [*boxes[:2], Box(*ax.get_legend().get_window_extent().extents)], frame


def cluttered(seed):
    rng = random.Random(seed)
    intensity, rate = 10 ** rng.uniform(-1, 3), 10 ** rng.uniform(9, 13)
    return {
        f"variant {i}, {'x' * rng.randrange(12)}": (
            1e12,
            1e12 / intensity / rng.uniform(1, 3),
            1e12 / rate * rng.uniform(1, 3),
        )
        for i in range(6)
    }


@pytest.mark.parametrize("points", [POINTS, *map(cluttered, range(6))], ids=["lesson", *map(str, range(6))])
def test_no_label_covers_another_nor_a_point_and_all_are_inside(points):
    fig = measured().draw(points)
    labels, words, frame = extents(fig)
    assert len(labels) == len(points)
    assert [pair for pair in itertools.combinations(labels, 2) if overlap(*pair) > 0] == []
    assert [pair for pair in itertools.product(labels, words) if overlap(*pair) > 0] == []
    ax = fig.axes[0]
    markers = [
        around(*ax.transData.transform(line.get_xydata()[0]), 8, 8) for line in ax.lines if line.get_marker() != "None"
    ]
    assert len(markers) == len(points)
    assert [pair for pair in itertools.product(labels, markers) if overlap(*pair) > 0] == []
    for box in labels:
        assert overlap(box, frame) == pytest.approx((box.right - box.left) * (box.top - box.bottom), rel=0.02)


def test_no_meaning_rests_on_colour():
    ax = measured().draw(POINTS).axes[0]
    markers = [line.get_marker() for line in ax.lines if line.get_marker() != "None"]
    assert len(set(markers)) == len(markers) == 6
    assert {line.get_linestyle() for line in ax.lines[:2]} == {"-", "--"}


def test_the_alt_text_says_what_is_drawn():
    fig = measured().draw({"training step": (1e12, 1e11, 1.0)})
    assert fig.alt == (
        "Roofline of cuda:0: 250 GB/s up to the ridge at 96.0 FLOP/byte, 24.0 TFLOP/s from there on. "
        "training step: 1.00 TFLOP/s at 10.0 FLOP/byte, 40.0% of what memory allows."
    )


def test_without_points_and_without_a_datasheet_the_roof_stands_alone():
    fig = measured(datasheet=False).draw()
    labels, _, _ = extents(fig)
    assert labels == [] and len(fig.axes[0].get_legend().get_texts()) == 1
    assert fig.alt.endswith("from there on.")


def test_names_are_cut_and_are_no_mathematics():
    fig = measured().draw({"$x^2$ and\n" + "long " * 20: (1e12, 1e11, 1.0)})
    fig.draw_without_rendering()
    label = fig.axes[0].texts[-1].get_text()
    assert label.startswith(r"\$x^2\$ and long") and "…" in label and label.count("\n") == 1


@pytest.mark.parametrize(
    ("points", "error", "words"),
    [
        ([1, 2, 3], TypeError, "points must be a dict"),
        ({"a": (1, 2)}, ValueError, r"points\['a'\] must be \(flops, moved_bytes, seconds\)"),
        ({"a": (1, 0, 1)}, ValueError, r"points\['a'\], moved_bytes, must be a positive number"),
        ({"a": (1, 1, None)}, ValueError, "seconds, must be a positive number, not None"),
        ({str(i): (1, 1, 1) for i in range(13)}, ValueError, "12 points at most"),
    ],
    ids=["list", "two", "zero", "none", "many"],
)
def test_points_that_cannot_be_drawn(points, error, words):
    with pytest.raises(error, match=words):
        measured().draw(points)


def test_a_label_goes_where_it_covers_least_when_there_is_no_room():
    frame = Box(0, 0, 60, 30)
    first, second = place_labels([(30, 15), (30, 15)], [(50, 20), (50, 20)], [], [], frame)
    assert (first.dx, first.dy) != (0, 0) and first != second
