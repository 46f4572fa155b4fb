"""What a step needs at ever larger sizes, drawn: panels of lines over doubling sizes."""

import dataclasses
from collections.abc import Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from lmres.analysis.drawing import INK, MUTED, STYLE, calm, run_colours, short, svg

_MARKS = ("o", "s", "^", "D")


@dataclasses.dataclass(frozen=True)
class Growth:
    """One line. name: gives the colour; size: the marker, "" where lines differ in their names alone.

    x, compiled, paper: [N], the size and what the compiler and the formula say there; compiled may be None.
    """

    name: str
    size: str
    x: Sequence[float]
    compiled: Sequence[float | None]
    paper: Sequence[float]


@dataclasses.dataclass(frozen=True)
class Panel:
    """A coordinate system with two logarithmic axes. limit: drawn as a horizontal line."""

    title: str
    label: str
    limit: float
    lines: Sequence[Growth]


def growth_figure(panels: Sequence[Panel], unit: str = "peak, GiB per device", limit: str = "memory") -> str:
    """Panels side by side, as an SVG string; formulas are dotted.

    Args:
      unit: of the vertical axis.
      limit: the name of the horizontal line.

    Raises ValueError without a line.
    """
    lines = [line for panel in panels for line in panel.lines]
    if not lines:
        raise ValueError("there is nothing to draw")
    names, sizes = (list(dict.fromkeys(getattr(line, field) for line in lines)) for field in ("name", "size"))
    colours = run_colours(names, "plain" if "plain" in names else None)
    sizes = [size for size in sizes if size] or sizes
    marks = {size: _MARKS[i % len(_MARKS)] for i, size in enumerate(sizes)}
    width, height = 0.9 + 4.25 * len(panels), 3.6
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), facecolor="white")
        FigureCanvasSVG(figure)
        grid = figure.subplots(
            1, len(panels), squeeze=False,
            gridspec_kw={
                "left": 0.7 / width, "right": 1 - 0.15 / width, "bottom": 0.5 / height, "top": 1 - 0.7 / height,
                "wspace": 0.14,
            },
        )[0]  # fmt: skip
        for axes, panel in zip(grid, panels):
            _draw(axes, panel, colours, marks, limit)
        grid[0].set_ylabel(unit, size=8.5)
        plain = {"color": MUTED, "linewidth": 1.5}
        handles = [(short(name), Line2D([], [], color=colours[name], linewidth=1.8)) for name in names]
        if len(sizes) > 1:
            handles += [
                (short(size), Line2D([], [], color=MUTED, linewidth=0, marker=mark, markersize=4.5))
                for size, mark in marks.items()
            ]
        handles += [("compiled", Line2D([], [], **plain)), ("by formula", Line2D([], [], linestyle=":", **plain))]
        figure.legend(
            [handle for _, handle in handles], [name for name, _ in handles], ncols=len(handles), loc="upper left",
            frameon=False, bbox_to_anchor=(0.6 / width, 1), borderaxespad=0.4, fontsize=9, handlelength=1.6,
            columnspacing=1.4,
        )  # fmt: skip
        return svg(figure, f"{unit}: " + ", ".join(f"{short(panel.title)}" for panel in panels))


def _draw(axes: Axes, panel: Panel, colours: dict[str, str], marks: dict[str, str], limit: str) -> None:
    calm(axes)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.margins(x=0.05)
    for line in panel.lines:
        style = {"color": colours[line.name], "solid_capstyle": "round"}
        axes.plot(line.x, line.paper, linewidth=1.0, linestyle=(0, (1, 1.8)), **style)
        there = [(x, y) for x, y in zip(line.x, line.compiled) if y is not None]
        axes.plot(
            [x for x, _ in there], [y for _, y in there], linewidth=1.5, marker=marks.get(line.size, _MARKS[0]),
            markersize=4, markeredgewidth=0, **style,
        )  # fmt: skip
    axes.axhline(panel.limit, color=INK, linewidth=0.9, linestyle=(0, (5, 2)), zorder=1.5)
    axes.annotate(
        limit, (1, panel.limit), xycoords=axes.get_yaxis_transform(), xytext=(-2, 3), textcoords="offset points",
        ha="right", size=8, color=MUTED,
    )  # fmt: skip
    axes.set_title(short(panel.title), size=9, loc="left", color=MUTED, pad=8)
    axes.set_xlabel(panel.label, size=8.5)
    axes.xaxis.set_major_locator(FixedLocator(sorted({x for line in panel.lines for x in line.x})))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(base=2, numticks=20))
    axes.yaxis.set_minor_locator(NullLocator())
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
