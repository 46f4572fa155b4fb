"""The report of a comparison: one HTML file that needs nothing else, and a table for the terminal.

Every number stands beside that of the baseline, the plain residual: validation as a difference, everything else as a
ratio. Spreads are standard deviations over seeds (n - 1).
"""

import dataclasses
import math
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import yaml
from markupsafe import Markup
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lmres.analysis import Curve, MixingResult, loss_figure, mixing_figure, run_colours
from lmres.experiment.result import ComparisonResult, RunResult

NOT_KNOWN = "n/a"
_ABSENT = object()
COLUMNS = (
    "run", "validation, bits per byte", "parameters", "in the connection", "tokens per second", "peak memory",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the result table: the seeds of one name averaged, and set beside the baseline.

    ``*_ratio`` and ``bpb_difference``: this over (less) the baseline; NaN without one.
    ``bpb_spread``: NaN with fewer than two seeds. ``bpb_difference_spread``: of the differences taken seed by seed,
    which leaves out what a seed does to both sides; NaN unless both have the same seeds, two or more.
    ``connection_share``: of the parameters, between 0 and 1.
    """

    name: str
    connection: str
    seeds: int
    bpb: float
    bpb_spread: float
    bpb_difference: float
    bpb_difference_spread: float
    params: float
    params_ratio: float
    connection_params: float
    connection_share: float
    tokens_per_second: float
    tokens_per_second_ratio: float
    peak_memory_bytes: float
    peak_memory_ratio: float
    is_baseline: bool
    is_best: bool
    notes: str

    def cells(self) -> list[tuple[str, str]]:
        """(what was measured, what stands beside it) per entry of ``COLUMNS``."""
        beside = "" if self.seeds == 1 else f"{self.seeds} seeds"
        ratio = lambda x: "" if self.is_baseline else number(x, "×{:.2f}")  # noqa: E731
        share = number(100 * self.connection_share, "{:.2g} %") if self.connection_params else ""
        spread = f" ± {self.bpb_spread:.4f}" if math.isfinite(self.bpb_spread) else ""
        difference = number(self.bpb_difference, "{:+.4f}")
        if math.isfinite(self.bpb_difference_spread):
            difference += f" ± {self.bpb_difference_spread:.4f}"
        return [
            (self.name, beside),
            (number(self.bpb, "{:.4f}") + spread, "" if self.is_baseline else difference),
            (counted(self.params), ratio(self.params_ratio)),
            (counted(self.connection_params), share),
            (number(self.tokens_per_second, "{:,.0f}"), ratio(self.tokens_per_second_ratio)),
            (number(self.peak_memory_bytes / 2**20, "{:,.1f} MiB"), ratio(self.peak_memory_ratio)),
        ]


def table_rows(result: ComparisonResult) -> list[Row]:
    """One row per name, the baseline first and the others in the order of the runs."""
    names = sorted(result.names, key=lambda name: name != result.baseline)
    base = result.named(result.baseline) if result.baseline is not None else []
    finals = {name: _mean(run.final_bpb for run in result.named(name)) for name in names}
    finite = [value for value in finals.values() if math.isfinite(value)]
    best = min(finite) if len(finite) > 1 else None
    return [_row(name, result.named(name), base, finals[name] == best) for name in names]


def write_report(result: ComparisonResult, path: str | os.PathLike) -> Path:
    """Writes the report to ``path`` in one move, so that there is never half a file; returns the path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(render_report(result))
        os.chmod(partial, 0o644)
        os.replace(partial, path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
    return path


def render_report(result: ComparisonResult) -> str:
    """The report as HTML text."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    rows = table_rows(result)
    same, differing = split_configs({name: [r.config for r in result.named(name)] for name in result.names})
    curves = [
        Curve(r.name, r.steps, r.seconds, r.train_loss, r.valid_steps, r.valid_bpb) for r in result.runs
    ]
    return environment.get_template("report.html.j2").render(
        result=result,
        rows=rows,
        columns=COLUMNS,
        finding=finding(rows),
        colours=run_colours(result.names, result.baseline),
        losses=Markup(loss_figure(curves, result.baseline)) if curves else None,
        mixings=_mixings(result),
        same=same,
        differing=differing,
        configs=[(run, as_yaml(run.config)) for run in result.runs],
        facts=[("data", result.data), ("machine", result.machine), ("versions", result.versions)],
    )


def print_table(result: ComparisonResult, console: Console | None = None) -> None:
    """The result table on ``console`` (None: standard output): drawn on a terminal, aligned plain text elsewhere."""
    console = console or Console()
    rows = [
        [f"{main} ({beside})" if beside not in ("", NOT_KNOWN) else main for main, beside in row.cells()]
        for row in table_rows(result)
    ]
    if console.is_terminal:
        table = Table(title=Text(result.title), title_justify="left", header_style="bold")
        for i, column in enumerate(COLUMNS):
            table.add_column(column, justify="right" if i else "left")
        for row in rows:
            table.add_row(*map(Text, row))  # Text: a name is not markup
        console.print(table)
        return
    widths = [max(map(len, column)) for column in zip(COLUMNS, *rows)]
    for row in (COLUMNS, *rows):
        cells = [c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths))]
        console.print("  ".join(cells).rstrip(), markup=False, highlight=False, soft_wrap=True)


def finding(rows: Sequence[Row]) -> str:
    """The comparison in a sentence or two."""
    best = next((row for row in rows if row.is_best), None)
    base = next((row for row in rows if row.is_baseline), None)
    if best is None:
        return ""
    said = f"Lowest validation: {best.name}, {best.bpb:.4f} bits per byte"
    if base is None:
        return said + ". There is no plain residual among the runs to set it beside."
    if best.is_baseline:
        return said + ": no other connection did better than the baseline here."
    said += f", {-best.bpb_difference:.4f} below {base.name}"
    if math.isfinite(best.tokens_per_second_ratio):
        said += f", at {best.tokens_per_second_ratio:.2f} times its tokens per second"
    spread = best.bpb_difference_spread
    if not math.isfinite(spread):
        return said + ". With one seed there is no telling how much of this is chance."
    return said + f". The difference varies by {spread:.4f} from seed to seed ({best.seeds} seeds)."


def split_configs(
    configs: dict[str, Sequence[dict[str, Any]]],
) -> tuple[dict[str, Any], list[tuple[str, list[str]]]]:
    """What all configs have in common, and the rest: {key: value} and [(key, [values per name])], keys dotted."""
    flat = {name: [_flat(config) for config in seeds] for name, seeds in configs.items()}
    every = [config for seeds in flat.values() for config in seeds]
    same, differing = {}, []
    for key in dict.fromkeys(key for config in every for key in config):
        values = [config.get(key, _ABSENT) for config in every]
        if all(value == values[0] for value in values):
            same[key] = values[0]
        else:
            shown = [[_shown(c.get(key, _ABSENT)) for c in seeds] for seeds in flat.values()]
            differing.append((key, [", ".join(dict.fromkeys(values)) for values in shown]))
    return same, differing


def as_yaml(config: dict[str, Any]) -> str:
    """A config as it could stand in a file."""
    try:
        return yaml.safe_dump(config, sort_keys=False, allow_unicode=True, default_flow_style=False)
    except yaml.YAMLError:  # an object that YAML has no form for
        return "\n".join(f"{key}: {_shown(value)}" for key, value in _flat(config).items())


def number(value: float, form: str) -> str:
    """``value`` in ``form`` with a real minus sign, or "n/a"."""
    return form.format(value).replace("-", "−") if math.isfinite(value) else NOT_KNOWN


def counted(value: float) -> str:
    """A number of parameters: exact below ten thousand, else three digits and a unit."""
    if not math.isfinite(value):
        return NOT_KNOWN
    for unit, name in ((1e9, " B"), (1e6, " M"), (1e4, " k")):
        if value >= unit:
            scaled = value / (1e3 if name == " k" else unit)
            return f"{scaled:.{2 if scaled < 10 else 1 if scaled < 100 else 0}f}{name}"
    return f"{value:,.0f}"


def _row(name: str, runs: Sequence[RunResult], base: Sequence[RunResult], is_best: bool) -> Row:
    bpb, spread = _mean(r.final_bpb for r in runs), _spread([r.final_bpb for r in runs])
    mean = lambda of, field: _mean(_number(getattr(r, field)) for r in of)  # noqa: E731
    ratio = lambda field: _ratio(mean(runs, field), mean(base, field))  # noqa: E731
    difference, difference_spread = _difference(runs, base)
    params, own = mean(runs, "params"), mean(runs, "connection_params")
    return Row(
        name=name,
        connection=runs[0].connection,
        seeds=len(runs),
        bpb=bpb,
        bpb_spread=spread,
        bpb_difference=difference,
        bpb_difference_spread=difference_spread,
        params=params,
        params_ratio=ratio("params"),
        connection_params=own,
        connection_share=_ratio(own, params),
        tokens_per_second=mean(runs, "tokens_per_second"),
        tokens_per_second_ratio=ratio("tokens_per_second"),
        peak_memory_bytes=mean(runs, "peak_memory_bytes"),
        peak_memory_ratio=ratio("peak_memory_bytes"),
        is_baseline=bool(base) and base[0].name == name,
        is_best=is_best,
        notes="; ".join(dict.fromkeys(r.notes for r in runs if r.notes)),
    )


def _difference(runs: Sequence[RunResult], base: Sequence[RunResult]) -> tuple[float, float]:
    """Mean difference in the last validation, and its spread over seeds if the seeds are the same on both sides."""
    if not base:
        return math.nan, math.nan
    ours, theirs = ({r.seed: r.final_bpb for r in side} for side in (runs, base))
    paired = len(ours) == len(runs) and len(theirs) == len(base) and ours.keys() == theirs.keys()
    spread = _spread([ours[seed] - theirs[seed] for seed in ours]) if paired else math.nan
    return _mean(r.final_bpb for r in runs) - _mean(r.final_bpb for r in base), spread


def _mixings(result: ComparisonResult) -> list[dict[str, Any]]:
    """One picture per name: of its first run that has one."""
    found = []
    for name in result.names:
        run = next((run for run in result.named(name) if run.mixing is not None), None)
        if run is not None:
            title = name if name == run.mixing.connection else f"{name} ({run.mixing.connection})"
            svg = Markup(mixing_figure(run.mixing, title=title))
            found.append({"run": run, "mixing": run.mixing, "svg": svg, "variation": variation(run.mixing)})
    return found


def variation(mixing: MixingResult) -> str:
    """How much the weights vary from token to token, in a sentence."""
    spread = mixing.share_spread
    l, j = divmod(int(spread.argmax()), spread.shape[1])
    if spread[l, j] < 1e-6:
        return "Shares are the same for every token."
    return (
        f"Shares vary from token to token, most where {mixing.readers[l]} reads {mixing.sources[j]}: "
        f"{number(mixing.normalised[l, j], '{:.3f}')} ± {spread[l, j]:.3f}."
    )


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(tree, dict) and (tree or not prefix):
        return {k: v for key, sub in tree.items() for k, v in _flat(sub, f"{prefix}{key}.").items()}
    return {prefix.removesuffix("."): tree}


def _shown(value: Any) -> str:
    if value is _ABSENT:
        return "–"
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _mean(values) -> float:
    values = list(values)
    return statistics.fmean(values) if values else math.nan


def _spread(values: Sequence[float]) -> float:
    finite = all(math.isfinite(v) for v in values)
    return statistics.stdev(values) if len(values) > 1 and finite else math.nan


def _ratio(value: float, base: float) -> float:
    return value / base if base and math.isfinite(base) else math.nan
