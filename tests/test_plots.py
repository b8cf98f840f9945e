"""The house style: alt text everywhere, readable, colour-blind-safe, and nobody else's settings touched."""

import base64
import io
import math
import re
import subprocess
import sys
import warnings
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from IPython.core.formatters import DisplayFormatter
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from course_utils import plots
from course_utils.plots import bars, figure, idle_stretches, render, save, show, trace

ALT = "The GPU is idle for half of the time."


def contrast_with_white(colour):
    """WCAG 2.2 contrast ratio (w3.org/TR/WCAG22/#dfn-contrast-ratio)."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return 1.05 / (0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] + 0.05)


def words(fig):
    return [text for text in fig.findobj(Text) if text.get_visible() and text.get_text().strip()]


def pixels(picture):
    return Image.open(io.BytesIO(picture.png))


def sample_figure():
    fig, (upper, lower) = figure(ALT, rows=2, title="Two charts")
    bars(upper, ["NumPy", "CPU", "GPU"], [1234.5, 98.7, None], "ms", [100.0, None, None], log=True, emphasis=["CPU"])
    trace(lower, [0, 1, 2, 3, 4], [0, 5, 90, None, 100], label="GPU 0", title="Utilisation")
    return fig


# Alt text


@pytest.mark.parametrize("alt", ["", "   ", "figure", "no full stop", None, 3, "word."])
def test_alt_text_must_be_a_sentence(alt):
    with pytest.raises(ValueError, match="alt text"):
        figure(alt)


def test_alt_text_can_follow_the_numbers_and_stays_one_bounded_line():
    fig, _ = figure(ALT)
    fig.alt = "Busy for\n 42 %   of the time."
    assert fig.alt == "Busy for 42 % of the time."
    fig.alt = "long " * 1000 + "end."
    assert len(fig.alt) == 1000
    with pytest.raises(ValueError, match="alt text"):
        fig.alt = ""


def test_alt_text_is_escaped_on_the_image():
    fig, _ = figure('A "Tesla T4" <script>alert(1)</script> & more.')
    html = render(fig)._repr_html_()
    assert html.startswith('<img alt="A &quot;Tesla T4&quot; &lt;script&gt;alert(1)&lt;/script&gt; &amp; more."')
    assert "<script" not in html
    assert "max-width:100%" in html


def test_a_figure_from_elsewhere_is_refused_with_the_cure(tmp_path):
    for action in (render, show, lambda fig: save(fig, tmp_path / "x.png")):
        with pytest.raises(TypeError, match=r"make it with figure\(alt\)"):
            action(Figure())


# Showing


def test_outside_ipython_show_prints_the_alt_text_in_one_line():
    code = (
        "import sys; from course_utils.plots import figure, show\n"
        f"fig, ax = figure({ALT!r}); ax.plot([1, 2]); show(fig)\n"
        "assert 'matplotlib.pyplot' not in sys.modules and 'IPython' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"[Figure] {ALT}\n", "")


def test_in_a_notebook_it_is_an_image_with_alt_text_and_in_a_terminal_the_text():
    data, _ = DisplayFormatter().format(render(figure(ALT)[0]))
    assert set(data) == {"text/html", "text/plain"}
    assert data["text/plain"] == f"[Figure] {ALT}"
    encoded = re.search(r'src="data:image/png;base64,([^"]+)"', data["text/html"]).group(1)
    assert base64.b64decode(encoded).startswith(b"\x89PNG")


@pytest.mark.usefixtures("one_kernel")
def test_in_a_real_kernel_a_figure_is_shown_once():
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    start = f"%matplotlib inline\nfrom course_utils.plots import figure, show\nfig, ax = figure({ALT!r})"
    cells = [nbformat.v4.new_code_cell(source) for source in (start, "show(fig)", "fig")]
    book = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(book, timeout=120, kernel_name="python3").execute()
    created, shown, last_line = (cell.outputs for cell in book.cells)
    assert created == []
    for outputs in (shown, last_line):
        assert [output.output_type for output in outputs] == ["display_data"]
        assert set(outputs[0].data) == {"text/html", "text/plain"}
        assert f'alt="{ALT}"' in outputs[0].data["text/html"]


def test_many_figures_leave_none_open():
    import matplotlib.pyplot as plt

    before = plt.get_fignums()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(25):
            render(figure(ALT, height_in=1, width_in=2)[0])
    assert plt.get_fignums() == before


# Saving


def test_png_carries_its_alt_text(tmp_path):
    path = save(figure("Café, 20 µs, 日本.")[0], tmp_path / "a.PNG")
    with Image.open(path) as image:
        assert image.format == "PNG"
        assert image.text["Description"] == "Café, 20 µs, 日本."


def test_svg_carries_its_alt_text_and_is_the_same_file_each_time(tmp_path):
    first = save(sample_figure(), tmp_path / "a.svg").read_bytes()
    assert save(sample_figure(), str(tmp_path / "b.svg")).read_bytes() == first
    assert ElementTree.fromstring(first).find("{http://www.w3.org/2000/svg}title").text == sample_figure().alt


@pytest.mark.parametrize("name", ["a.pdf", "a", "png", "a.png.exe"])
def test_other_endings_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match=r"\.png or \.svg"):
        save(figure(ALT)[0], tmp_path / name)
    assert list(tmp_path.iterdir()) == []


# The style


@pytest.fixture
def dark_learner():
    """A learner who has set everything otherwise."""
    with matplotlib.style.context("dark_background"):
        matplotlib.rcParams.update({"font.size": 5, "lines.linewidth": 0.3, "xtick.direction": "in", "savefig.dpi": 40})
        yield


def test_the_learners_settings_are_neither_changed_nor_used(dark_learner, tmp_path):
    before = matplotlib.rcParams.copy()
    fig = sample_figure()
    picture = render(fig)
    save(fig, tmp_path / "a.svg")
    assert matplotlib.rcParams.copy() == before
    with matplotlib.style.context("default"):
        assert render(sample_figure()).png == picture.png
    image = pixels(picture).convert("RGBA")
    assert image.getpixel((0, 0)) == (255, 255, 255, 255)
    assert image.width == 2 * picture.width_px
    assert min(text.get_fontsize() for text in words(fig)) >= 12


def test_settings_come_back_after_an_error():
    before = matplotlib.rcParams.copy()
    with pytest.raises(RuntimeError), plots.style():
        raise RuntimeError
    assert matplotlib.rcParams.copy() == before


def test_lines_drawn_later_are_wide_and_told_apart_without_colour(dark_learner):
    _, ax = figure(ALT)
    lines = [ax.plot([0, 1])[0] for _ in range(4)]
    assert min(line.get_linewidth() for line in lines) >= 2
    assert len({line.get_linestyle() for line in lines}) == 4
    house = [plots.BLUE, plots.VERMILLION, plots.GREEN, plots.BLACK]
    assert [to_hex(line.get_color()) for line in lines] == [colour.lower() for colour in house]


def test_contrast_on_white():
    with plots.style():
        rc = matplotlib.rcParams
        for colour in rc["axes.prop_cycle"].by_key()["color"]:
            assert contrast_with_white(f"#{colour.lstrip('#')}") >= 3, colour
        for key in ("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color"):
            assert contrast_with_white(rc[key]) >= 4.5, key
        assert contrast_with_white(rc["axes.edgecolor"]) >= 3
    fig = sample_figure()
    assert all(contrast_with_white(text.get_color()) >= 4.5 for text in words(fig))
    assert all(contrast_with_white(bar.get_facecolor()) >= 3 for bar in fig.axes[0].patches)


def test_words_are_readable_at_display_size():
    fig = sample_figure()
    picture = render(fig)
    assert picture.width_px == round(fig.get_size_inches()[0] * 96)  # so a point in the figure is a point on the page
    assert min(text.get_fontsize() for text in words(fig)) >= 12
    assert len(picture.png) < 200_000


def test_a_live_view_can_be_drawn_less_sharp():
    fig, _ = figure(ALT, width_in=4)
    picture = render(fig, sharpness=1)
    assert pixels(picture).width == picture.width_px == 384


# figure


def test_axes_are_one_or_a_flat_tuple():
    assert hasattr(figure(ALT)[1], "plot")
    axes = figure(ALT, rows=2, columns=3)[1]
    assert isinstance(axes, tuple)
    assert len(axes) == 6
    upper, lower = figure(ALT, rows=2, share_x=True)[1]
    upper.set_xlim(3, 7)
    assert lower.get_xlim() == (3, 7)


@pytest.mark.parametrize("size", [{"rows": 0}, {"columns": 0}, {"rows": -1}])
def test_no_empty_grid(size):
    with pytest.raises(ValueError, match="at least one row"):
        figure(ALT, **size)


# bars


def bar_texts(ax):
    return [text.get_text() for text in ax.texts]


def test_each_bar_says_its_value_and_none_is_not_zero():
    _, ax = figure(ALT)
    bars(ax, ["a", "b", "c", "d"], [1234.5, None, 0.0412, 0], "ms")
    assert bar_texts(ax) == ["1,234 ms", "n/a", "0.0412 ms", "0 ms"]
    assert [bar.get_width() for bar in ax.patches] == [1234.5, 0.0412, 0]
    (hollow,) = ax.lines
    assert hollow.get_markerfacecolor() == "white"
    assert list(hollow.get_ydata()) == [1]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["a", "b", "c", "d"]
    assert ax.yaxis_inverted()  # the first bar is on top
    assert ax.get_xlabel() == "ms"


def test_not_a_number_is_missing_too():
    _, ax = figure(ALT)
    bars(ax, ["a", "b"], [math.nan, math.inf], "ms")
    assert bar_texts(ax) == ["n/a", "n/a"]


def test_an_emphasised_bar_differs_in_hatch_not_only_in_colour():
    _, ax = figure(ALT)
    bars(ax, ["a", "b"], [1, 2], "ms", emphasis=["b"])
    assert [bool(bar.get_hatch()) for bar in ax.patches] == [False, True]


@pytest.mark.parametrize("log", [False, True])
def test_errors_are_drawn_inside_the_axis(log):
    fig, ax = figure(ALT)
    bars(ax, ["a", "b"], [10.0, 2.0], "ms", [50.0, None], log=log)
    (whisker,) = ax.collections
    ((low, _), (high, _)) = whisker.get_segments()[0]
    assert high == pytest.approx(60)
    assert low >= 0
    assert low > 0 or not log
    assert ax.get_xscale() == ("log" if log else "linear")
    render(fig)


def test_a_log_axis_is_written_in_plain_numbers():
    fig, ax = figure(ALT)
    bars(ax, ["a", "b"], [0.02, 3000.0], "ms", log=True)
    render(fig)
    assert {"0.1", "1", "1,000"} <= {text.get_text() for text in ax.get_xticklabels()}


@pytest.mark.parametrize(
    ("labels", "values", "errors", "log", "message"),
    [
        (["a"], [1, 2], None, False, "labels and values"),
        (["a"], [1], [1, 2], False, "labels and errors"),
        (["a"], [-1], None, False, "at least 0"),
        (["a"], [0], None, True, "above 0"),
    ],
)
def test_bars_refuse_what_cannot_be_drawn(labels, values, errors, log, message):
    with pytest.raises(ValueError, match=message):
        bars(figure(ALT)[1], labels, values, "ms", errors, log=log)


@pytest.mark.parametrize("values", [[], [None], [0.0], [None, 5]])
@pytest.mark.parametrize("log", [False, True])
def test_few_or_no_values_still_draw_without_a_warning(values, log):
    if log and 0.0 in values:
        values = [1e-9]
    fig, ax = figure(ALT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bars(ax, [str(index) for index in range(len(values))], values, "ms", log=log)
        assert render(fig).png


# trace


def test_idle_stretches_end_half_way_to_the_next_sample():
    assert idle_stretches([0, 1, 2, 3, 4], [0, 9.9, 10, 50, 3]) == [(0, 1.5), (3.5, 4)]


def test_an_unknown_value_is_not_idle():
    assert idle_stretches([0, 1, 2, 3], [0, None, math.nan, 0]) == [(0, 0.5), (2.5, 3)]
    assert idle_stretches([], []) == []


def test_trace_leaves_a_gap_for_none_and_hatches_idle_time():
    _, ax = figure(ALT)
    trace(ax, [0, 1, 2, 3], [0, 0, None, 80], label="GPU 0")
    drawn = np.asarray(ax.lines[0].get_ydata(), float)
    assert np.array_equal(drawn, [0, 0, np.nan, 80], equal_nan=True)
    (idle,) = ax.collections
    assert idle.get_hatch()
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["GPU 0", "idle (below 10 %)"]
    ends = [path.get_extents() for path in idle.get_paths()]
    assert [(box.x0, box.x1) for box in ends] == [(0, 1.5)]
    assert ax.get_ylim()[1] > 100
    assert ax.get_xlim() == (0, 3)


def test_no_legend_where_nothing_needs_one():
    _, ax = figure(ALT)
    trace(ax, [0, 1, 2], [100, 100, 100])
    assert ax.get_legend() is None
    assert not ax.collections
    trace(ax, [0, 1, 2], [0, 0, 0], legend=False)
    assert ax.get_legend() is None


def test_two_gpus_on_one_axes():
    _, ax = figure(ALT)
    trace(ax, [0, 1], [100, 90], label="GPU 0", mark_idle=False)
    trace(ax, [0, 1], [0, 0], label="GPU 1", mark_idle=False)
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["GPU 0", "GPU 1"]
    assert len({line.get_linestyle() for line in ax.lines}) == 2


@pytest.mark.parametrize("values", [[], [50.0], [None], [None, None, None], [0.0], [None, 0.0, None]])
def test_hardly_any_samples_still_draw_without_a_warning(values):
    fig, ax = figure(ALT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trace(ax, list(range(len(values))), values)
        assert render(fig).png
    unread = all(value is None for value in values)
    assert ("no reading" in bar_texts(ax)) is unread


def test_only_the_lowest_row_names_the_time_axis():
    fig, axes = figure(ALT, rows=2)
    for ax in axes:
        trace(ax, [0, 1], [1, 2])
    assert [ax.get_xlabel() for ax in fig.axes] == ["", "time (s)"]


def test_trace_refuses_unequal_or_unsorted_samples():
    with pytest.raises(ValueError, match="seconds and percent_values must be equally long, not 2 and 1"):
        trace(figure(ALT)[1], [0, 1], [1], mark_idle=False)
    with pytest.raises(ValueError, match="backwards"):
        trace(figure(ALT)[1], [1, 0], [1, 2])


def test_bars_put_their_values_into_the_alt_text() -> None:
    fig, ax = plots.figure("Time on each device.")
    plots.bars(ax, ["CPU", "GPU"], [12.0, None], "ms", title="Time")
    assert fig.alt == "Time on each device. Time: CPU 12.0 ms, GPU n/a."
