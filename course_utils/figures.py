"""The course's house style: one stylesheet, alt text on every figure, one way to show and to save it.

Figures are made without pyplot: nothing stays open, nothing is shown twice, any backend will do, and the learner's own
rcParams and figures are left alone. Draw on the main thread only, because a style is global while it applies.
Lessons import all of this from course_utils.plots.
"""

from __future__ import annotations

import base64
import html
import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.style
from matplotlib.figure import Figure

STYLESHEET = Path(__file__).with_name("course.mplstyle")

# Okabe and Ito, "Color Universal Design" (jfly.uni-koeln.de/color). BLUE, VERMILLION, GREEN and BLACK have 3:1 contrast
# on white, enough for lines and bars; text is INK. ORANGE is for areas that also have a hatch and an edge.
BLUE, VERMILLION, GREEN, BLACK = "#0072B2", "#D55E00", "#009E73", "#000000"
ORANGE, PALE = "#E69F00", "#FBEBCC"
INK, GREY = "#1A1A1A", "#595959"
HATCHES = ("", "//", "..", "xx")  # beside the four colours, in the same order

_CSS_DPI = 96
_LONGEST_ALT = 1000


class CourseFigure(Figure):
    """A matplotlib Figure that carries its alt text; as the last line of a notebook cell it shows itself with it."""

    _alt: str = ""

    @property
    def alt(self) -> str:
        """What the figure shows, in a sentence, for those who do not see it."""
        return self._alt

    @alt.setter
    def alt(self, text: str) -> None:
        self._alt = _sentence(text)

    def _ipython_display_(self) -> None:
        show(self)


@dataclass(frozen=True)
class Picture:
    """A drawn figure: PNG bytes, alt text, and the size at which it is shown, in CSS pixels.

    It works with IPython's display handles: `handle.update(render(fig))`.
    """

    png: bytes
    alt: str
    width_px: int
    height_px: int

    def __repr__(self) -> str:
        return f"[Figure] {self.alt}"

    def _repr_html_(self) -> str:
        # HTML, not image/png: JupyterLab (read in 4.6.6) drops the alt text of an image output, and no convention is
        # settled yet (jupyter/enhancement-proposals#120).
        data = base64.b64encode(self.png).decode("ascii")
        return (
            f'<img alt="{html.escape(self.alt)}" width="{self.width_px}" height="{self.height_px}" '
            f'style="max-width:100%;height:auto;background:#fff" src="data:image/png;base64,{data}">'
        )


@contextmanager
def style() -> Iterator[None]:
    """The house style while the block lasts: matplotlib's defaults and the stylesheet, whatever the learner has set."""
    with matplotlib.style.context(["default", STYLESHEET]):
        yield


def figure(
    alt: str,
    rows: int = 1,
    columns: int = 1,
    *,
    width_in: float = 8.0,
    height_in: float | None = None,
    title: str = "",
    share_x: bool = False,
) -> tuple[CourseFigure, Any]:
    """A new figure in the house style, and its axes: one Axes, or a tuple of rows × columns of them, row by row.

    `alt` is required: what the figure shows, in a sentence ("The GPU is idle for half of the time."); `fig.alt = …`
    changes it once the numbers are known. Sizes in inches, shown at 96 CSS pixels an inch; the default height is 3.2
    for one row and 2.2 a row for more. Lines drawn later are in the house style; so are titles, legends and text
    that are added inside `with style():`.
    """
    if rows < 1 or columns < 1:
        raise ValueError(f"A figure needs at least one row and one column, not {rows} × {columns}.")
    with style():
        height_in = height_in or (3.2 if rows == 1 else 2.2 * rows)
        fig = CourseFigure(figsize=(width_in, height_in))
        fig.alt = alt
        axes = tuple(fig.subplots(rows, columns, sharex=share_x, squeeze=False).flat)
        if title:
            fig.suptitle(title, x=0.01, ha="left")
    return fig, axes[0] if len(axes) == 1 else axes


def render(fig: Figure, *, sharpness: float = 2.0) -> Picture:
    """Draw the figure, by default twice as sharp as it is shown, so that it stays crisp on a projector.

    A live view can do with `sharpness=1`, which takes about half the time.
    """
    alt = _alt_of(fig)
    buffer = io.BytesIO()
    with style():
        fig.savefig(buffer, format="png", dpi=sharpness * _CSS_DPI, metadata={"Description": alt})
    width_in, height_in = fig.get_size_inches()
    return Picture(buffer.getvalue(), alt, round(width_in * _CSS_DPI), round(height_in * _CSS_DPI))


def show(fig: Figure) -> None:
    """Show the figure with its alt text: a picture in a notebook, the alt text in one line in a terminal."""
    # If IPython was never imported, this is no notebook: then do not import it now.
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is None:
        print(f"[Figure] {_alt_of(fig)}")
        return
    from IPython.display import display

    display(render(fig))  # type: ignore[no-untyped-call,unused-ignore]


def save(fig: Figure, path: str | Path) -> Path:
    """Save as PNG or SVG, by the file's suffix, with the alt text in the file's metadata. Returns the path."""
    alt, path = _alt_of(fig), Path(path)
    kind = path.suffix.lower()
    if kind not in (".png", ".svg"):
        raise ValueError(f"A figure is saved as .png or .svg: give {path.name!r} one of these two endings.")
    # An SVG's title is what browsers and screen readers announce. No date: the same drawing gives the same file.
    metadata = {"Description": alt} if kind == ".png" else {"Title": alt, "Description": alt, "Date": None}
    with style():
        fig.savefig(path, format=kind[1:], metadata=metadata)
    return path


def _sentence(alt: str) -> str:
    text = " ".join(alt.split()) if isinstance(alt, str) else ""
    if " " not in text or text[-1] not in ".!?…":
        raise ValueError(
            f"A figure needs alt text: a sentence that says what it shows, with its full stop. Got {alt!r}."
        )
    return text if len(text) <= _LONGEST_ALT else text[: _LONGEST_ALT - 1] + "…"


def _alt_of(fig: Figure) -> str:
    alt = getattr(fig, "alt", "")
    if not alt:
        raise TypeError("This figure has no alt text: make it with figure(alt) from course_utils.plots.")
    return str(alt)
