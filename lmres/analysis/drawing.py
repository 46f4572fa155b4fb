"""What all figures have in common: colours, text, calm axes, and the way to an SVG string.

Text stays text (searchable, small); colours can be told apart by colour-blind readers (Okabe and Ito's); every figure
is white and stands on its own. There is no global plotting state: a figure is an object that is drawn and forgotten.
"""

import io
import itertools
import re
from collections.abc import Sequence
from xml.sax.saxutils import quoteattr

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

INK, MUTED, LINE = "#1f2430", "#5d6675", "#d9dde3"
# Okabe and Ito (2008) without black, which is the baseline's, and with the yellow left for last: it is faint on white.
CYCLE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#7A5195", "#8C6D31", "#B3A800")
BASELINE = "#1f2430"
# Text is laid out with matplotlib's own font, the widest of these, and drawn with the first that the reader has.
_MEASURED, _FONTS = "DejaVu Sans", "'Helvetica Neue', Helvetica, Arial, 'DejaVu Sans', sans-serif"
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "lmres",
    "text.parse_math": False,  # a run's name may hold a $
    "font.family": [_MEASURED],
    "font.size": 9.0,
    "text.color": INK,
    "axes.edgecolor": LINE,
    "axes.labelcolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.unicode_minus": True,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
}


def run_colours(names: Sequence[str], baseline: str | None = None) -> dict[str, str]:
    """A colour per name, in order of appearance; near-black is the baseline's. Past nine names colours come again."""
    others = [name for name in dict.fromkeys(names) if name != baseline]
    colours = dict(zip(others, itertools.cycle(CYCLE)))
    return colours | ({baseline: BASELINE} if baseline is not None else {})


def calm(axes: Axes) -> None:
    """Axes with horizontal lines and few ticks."""
    axes.grid(axis="y", color=LINE, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0, labelsize=8, pad=4)
    axes.margins(x=0.01)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.10g}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{round(y, 9):.6g}".replace("-", "−")))


def short(name: str | None) -> str:
    """``name`` as it can be drawn: cut, and without control characters, which are no XML."""
    name = re.sub(r"[\x00-\x1f\x7f]", "", name or "")
    return name if len(name) <= 40 else name[:39] + "…"


def svg(figure: Figure, label: str) -> str:
    """The <svg> element alone, for inlining or a file: no prologue, no metadata, the same bytes every time."""
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(buffer, format="svg", metadata=nothing)
    text = buffer.getvalue()
    text = text[text.index("<svg") :].replace("<svg ", f'<svg role="img" aria-label={quoteattr(label)} ', 1)
    text = text.replace(f"font-family: '{_MEASURED}'", f"font-family: {_FONTS}")
    # Right whatever charset the page around it declares.
    return text.encode("ascii", "xmlcharrefreplace").decode()
