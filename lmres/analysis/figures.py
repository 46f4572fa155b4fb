"""Figures as SVG strings: the depth-mixing heat map, and the loss curves of several runs.

Runs have the colours of ``drawing``, weights run from red to blue.
"""

import dataclasses
from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import Colormap, FuncNorm, LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from lmres.analysis.drawing import BASELINE, CYCLE, INK, MUTED, STYLE, calm, run_colours, short, svg
from lmres.analysis.mixing import MixingResult

_DASHES = ("-", (0, (5, 1.6)), (0, (1.5, 1.5)))
_BLUES = ("#f3f4f6", "#c6dbef", "#7fb3d8", "#3182bd", "#08519c", "#08264f")
_REDS = ("#5a0a12", "#a50f15", "#de4b33", "#f69a7c", "#fbd5c6")


@dataclasses.dataclass(frozen=True)
class Curve:
    """One run's losses. Several curves of one name are seeds of one thing: same colour, one entry in the legend.

    steps, seconds: [N], at which ``train_loss`` [N] (nats per token) was measured; seconds of training since the start.
    valid_steps: [V], at which ``valid_bpb`` [V] (bits per byte) was measured.
    """

    name: str
    steps: Sequence[float]
    seconds: Sequence[float]
    train_loss: Sequence[float]
    valid_steps: Sequence[float]
    valid_bpb: Sequence[float]

    def seconds_at(self, steps: np.ndarray) -> np.ndarray:
        """Seconds of training at ``steps``, by interpolation; step 0 is second 0."""
        return np.interp(steps, [0.0, *self.steps], [0.0, *self.seconds])


def mixing_figure(result: MixingResult, normalised: bool = True, title: str | None = None) -> str:
    """The heat map of a depth-mixing matrix, sources on x, readers on y, as an SVG string.

    Small matrices carry their numbers. Colours go with the square root of a weight, so that a share of 1/50 can be seen
    beside one of 1; they run from red over pale grey (zero) to blue if a weight is negative.

    Args:
      normalised: draw each row divided by its sum of absolute values, which is what the branches' norms let
        through; False draws the weights as they are.
      title: None for the connection's name.
    """
    weights = result.normalised if normalised else result.mean
    count = len(weights)
    cell = float(np.clip(6.0 / count, 0.165, 0.42))  # inches
    font = float(np.clip(cell * 72 * 0.62, 6.2, 9.0))
    left, bottom, top, side = 0.32 + 0.056 * font, 0.34 + 0.054 * font, 0.62, cell * count
    # The colour bar stands in the blank triangle where there is room; a narrow matrix still needs room for its title.
    inside = count >= 6
    bar_left, bar_height = (left + side - 0.5, 0.55 * side) if inside else (left + side + 0.22, side)
    width, height = max(left + side + (0.2 if inside else 0.9), 4.3), bottom + side + top
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), facecolor="white")
        FigureCanvasSVG(figure)
        place = lambda x, y, w, h: figure.add_axes((x / width, y / height, w / width, h / height))  # noqa: E731
        axes = place(left, bottom, side, side)
        shown = np.ma.masked_array(weights, np.triu(np.ones_like(weights, bool), 1))
        colours, norm = _weight_colours(shown)
        edge = float(np.clip(cell * 4, 0.4, 1.4))
        mesh = axes.pcolormesh(shown, cmap=colours, norm=norm, edgecolors="white", linewidth=edge)
        _label_cells(axes, result, font)
        if count <= 14:
            _write_weights(axes, weights, colours, norm, min(font, cell * 72 * 0.3))
        bar_height = min(bar_height, 3.0)
        beside = place(bar_left, bottom + side - bar_height, 0.13, bar_height)
        bar = figure.colorbar(mesh, cax=beside, ticks=_ticks(norm, short=bar_height < 2.4))
        bar.outline.set_visible(False)
        bar.ax.tick_params(length=2, labelsize=8, pad=2)
        bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda w, _: f"{w:.3g}".replace("-", "−")))
        what = "share of what the reader gets" if normalised else "weight"
        name = short(result.connection if title is None else title)
        figure.text(0.12 / width, 1 - 0.2 / height, name, size=11, weight="bold", va="center")
        over = ", mean over channels" if result.channelwise else ""
        subtitle = f"{what}, mean over {result.tokens:,} tokens{over}"
        figure.text(0.12 / width, 1 - 0.42 / height, subtitle, size=8.5, color=MUTED, va="center")
        return svg(figure, f"Depth-mixing matrix of {name}: {subtitle}")


def loss_figure(curves: Sequence[Curve], baseline: str | None = None, smoothing: float = 0.04) -> str:
    """Losses by step and by seconds of training, as an SVG string.

    Rows: training loss, smoothed; validation; and, with a baseline, validation less the baseline's mean at the
    same step and at the same second (the second column charges a run for its throughput). The start of training
    is cut off above.

    Args:
      curves: any number; non-finite values are left out.
      baseline: the name of the curves that the others are compared to, or None.
      smoothing: width of the training loss's running mean, as a fraction of the run.
    """
    names = list(dict.fromkeys(c.name for c in curves))
    references = [c for c in curves if c.name == baseline and len(c.valid_steps)]
    compared = bool(references) and len(names) > 1
    rows = 3 if compared else 2
    colours = run_colours(names, baseline)
    # Beyond the colours that can be told apart, dashes tell runs apart.
    others = [n for n in names if n != baseline]
    dashes = {n: _DASHES[(i // len(CYCLE)) % len(_DASHES)] for i, n in enumerate(others)} | {baseline: "-"}
    columns = int(np.clip(8.6 / (0.62 + 0.068 * max((len(short(n)) for n in names), default=1)), 1, max(len(names), 1)))
    legend_height = 0.24 * -(-len(names) // columns) + 0.12
    width, height = 9.4, 2.35 * rows + legend_height + 0.35
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), facecolor="white")
        FigureCanvasSVG(figure)
        grid = figure.subplots(
            rows, 2, sharex="col", sharey="row", squeeze=False,
            gridspec_kw={
                "left": 0.72 / width, "right": 1 - 0.15 / width, "bottom": 0.5 / height,
                "top": 1 - (legend_height + 0.1) / height, "hspace": 0.14, "wspace": 0.09,
            },
        )  # fmt: skip
        labels = (
            "training loss\nnats per token",
            "validation\nbits per byte",
            f"validation less {short(baseline)}\nbits per byte",
        )
        for row, label in zip(grid, labels):
            row[0].set_ylabel(label, size=8.5, linespacing=1.35)
        for axes in grid.flat:
            calm(axes)
        grid[-1, 0].set_xlabel("steps", size=8.5)
        grid[-1, 1].set_xlabel("seconds of training", size=8.5)
        handles, limits = {}, [[] for _ in range(rows)]
        for curve in sorted(curves, key=lambda c: c.name == baseline):  # the baseline on top
            line = {"color": colours[curve.name], "linestyle": dashes[curve.name], "solid_capstyle": "round"}
            marks = {"marker": "o", "markersize": 2.6, "markeredgewidth": 0} if len(curve.valid_steps) <= 40 else {}
            steps, valid_steps = (np.asarray(s, float) for s in (curve.steps, curve.valid_steps))
            train = _smooth(np.asarray(curve.train_loss, float), smoothing)
            kept = _thinned(len(train))
            valid = np.asarray(curve.valid_bpb, float)
            times = (steps, np.asarray(curve.seconds, float)), (valid_steps, curve.seconds_at(valid_steps))
            for column in range(2):
                grid[0, column].plot(times[0][column][kept], train[kept], linewidth=1.1, **line)
                (handles[curve.name],) = grid[1, column].plot(times[1][column], valid, linewidth=1.5, **line, **marks)
                if compared and curve.name != baseline:
                    less = valid - _mean_of(references, times[1][column], column)
                    grid[2, column].plot(times[1][column], less, linewidth=1.5, **line, **marks)
                    limits[2].append((valid_steps, less))
            limits[0].append((steps, train)), limits[1].append((valid_steps, valid))
        for row, series in zip(grid, limits):
            _limit(row[0], series)
        if compared:
            for axes in grid[2]:
                axes.axhline(0, color=BASELINE, linewidth=1.2, zorder=1.5)
        ordered = [baseline] * (baseline in handles) + others
        figure.legend(
            [handles[n] for n in ordered], [short(n) for n in ordered], ncols=columns, loc="upper left", frameon=False,
            bbox_to_anchor=(0.62 / width, 1), borderaxespad=0.4, fontsize=9, handlelength=1.8, columnspacing=1.6,
        )  # fmt: skip
        return svg(
            figure,
            "Training and validation loss by step and by seconds of " + ", ".join(short(n) for n in ordered),
        )


def _weight_colours(weights: np.ma.MaskedArray) -> tuple[Colormap, Normalize]:
    """Positive weights look the same with and without negative ones beside them."""
    most, least = float(np.max(np.abs(weights))), float(np.min(weights))
    most = most or 1.0
    root = lambda w: np.sign(w) * np.sqrt(np.abs(w))  # noqa: E731
    back = lambda w: np.sign(w) * np.square(w)  # noqa: E731
    if least < -1e-3 * most:  # less is rounding, too pale to be seen
        colours = LinearSegmentedColormap.from_list("weights", [*_REDS, *_BLUES], 511)
        return colours, FuncNorm((root, back), -most, most)
    return LinearSegmentedColormap.from_list("shares", _BLUES, 256), FuncNorm((root, back), 0.0, most, clip=True)


def _ticks(norm: Normalize, short: bool) -> list[float]:
    """Round numbers over the square-root scale, and its end."""
    step = 10.0 ** np.floor(np.log10(norm.vmax))
    if norm.vmax / step < 2:
        step /= 10  # 1.0 to 1.9 are better served by tenths
    whole = int(norm.vmax / step + 1e-9)
    positive = [k * step for k in (1, 2, 5, 10, 15) if k <= whole]
    if len(positive) < 4:
        positive = [0.1 * step, *positive]
    if norm.vmin < 0:
        positive = positive[::-1][:: 2 if short else 1][::-1]
        return [*(-w for w in reversed(positive)), 0.0, *positive]
    return [0.0, *positive]


def _label_cells(axes: Axes, result: MixingResult, font: float) -> None:
    count = len(result.mean)
    every = -(-count // 60)  # past 60 sub-layers labels would touch
    at = np.arange(0, count, every)
    axes.set_ylim(count, 0)
    axes.set_xticks(at + 0.5, [result.sources[i] for i in at], rotation=90, size=font, ha="center", va="top")
    axes.set_yticks(at + 0.5, [result.readers[i] for i in at], size=font)
    axes.tick_params(length=0, pad=3)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("source", size=8.5, labelpad=4)
    axes.set_ylabel("reader", size=8.5, labelpad=4)


def _write_weights(axes: Axes, weights: np.ndarray, colours: Colormap, norm: Normalize, font: float) -> None:
    for l, j in zip(*np.tril_indices(len(weights))):
        red, green, blue, _ = colours(norm(weights[l, j]))
        dark = 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.5
        text = f"{weights[l, j]:.2f}".replace("0.", ".", 1) if abs(weights[l, j]) < 0.995 else f"{weights[l, j]:.2g}"
        text = "0" if text in (".00", "-.00") else text.replace("-", "−")
        axes.text(
            j + 0.5, l + 0.5, text, size=font, ha="center", va="center", color="white" if dark else INK
        )  # fmt: skip


def _limit(axes: Axes, series: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    """The y range of the last nine tenths of each run, with a margin; what is above is cut off."""
    late = [y[(x >= 0.1 * np.max(x)) & np.isfinite(y)] for x, y in series if len(x)]
    late = np.concatenate(late) if late else np.array([])
    if not late.size:
        return
    low, high = float(np.min(late)), float(np.max(late))
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    axes.set_ylim(low - margin, high + margin)


def _smooth(values: np.ndarray, fraction: float) -> np.ndarray:
    """Centred running mean over ``fraction`` of the points, one-sided at the ends; NaN where no value is finite."""
    half, count, index = int(len(values) * fraction / 2), len(values), np.arange(len(values))
    first, last = np.maximum(index - half, 0), np.minimum(index + half + 1, count)
    finite = np.isfinite(values)
    sums, counts = (np.concatenate([[0.0], np.cumsum(x)]) for x in (np.where(finite, values, 0.0), finite))
    there = counts[last] - counts[first]
    return np.where(there > 0, (sums[last] - sums[first]) / np.maximum(there, 1), np.nan)


def _thinned(count: int, most: int = 400) -> np.ndarray:
    """Indices of at most ``most`` points, evenly spread: more than a pixel row can show only make the file big."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(int)) if count else np.arange(0)


def _mean_of(curves: Sequence[Curve], at: np.ndarray, column: int) -> np.ndarray:
    """The curves' mean validation at steps (column 0) or seconds (column 1); NaN where one of them was not running."""
    values = []
    for c in curves:
        x = np.asarray(c.valid_steps, float) if column == 0 else c.seconds_at(np.asarray(c.valid_steps, float))
        values.append(np.interp(at, x, np.asarray(c.valid_bpb, float), left=np.nan, right=np.nan))
    return np.mean(values, axis=0)
