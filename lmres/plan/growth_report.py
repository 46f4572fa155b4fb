"""What ``growth`` found: tables in markdown, and the series of a figure."""

from collections.abc import Iterable, Sequence
from typing import Any

from lmres.analysis.growth import Growth, Panel
from lmres.plan.machines import GIB, MACHINES
from lmres.plan.roofline import ROOFS

# Rows of a table: what, of a compiled point, of an estimate.
_ROWS = (
    ("peak, GiB", lambda found: _peak(found), lambda paper: _gib(paper["peak"])),
    ("sent, GB", lambda found: _gb(_sent(found)), lambda paper: _gb(paper["sent"])),
    ("bound, s", lambda found: _bound(found["bound"]), lambda paper: _bound(paper)),
)


def tables(document: dict[str, Any]) -> list[str]:
    """By chips, for the configs as they are; and by blocks, where there are several numbers of them."""
    found = []
    for title, by, points in _sweeps(document):
        sizes = sorted({point[by] for point in points})
        lines = [f"{title}, {document['rows']} x {_texts(points, 'context')} tokens per device:", ""]
        lines += _head(["per device and step", "", *(f"{size:,}" for size in sizes)], left=2)
        for what, compiled, paper in _ROWS:
            for config, line in _by(points, "config").items():
                at = {point[by]: point for point in line}
                cells = [_cell(at.get(size), compiled, paper) for size in sizes]
                lines.append(_row([what, config, *cells]))
                what = ""
        found.append("\n".join(lines))
    return found


def parts(document: dict[str, Any]) -> str:
    """Of every point that was compiled: memory by parts, the three roofs, collectives by kind."""
    columns = ["", "blocks", "chips", "parameters", "optimiser", "activations", "temporaries", "peak", "FLOPs", "moved"]
    lines = ["Parts, memory in GiB:", "", *_head([*columns, *ROOFS, "sent, times"])]
    for point in document["points"]:
        found = point["compiled"]
        if found is None:
            continue
        memory, work, bound = found["memory"], found["work"] or {}, found["bound"] or {}
        held = [memory["held"]["parameters"], memory["held"]["optimiser state"]]
        sizes = [*held, memory["activations"], memory["temporaries"], memory["peak"]]
        flops = work["model_flops"] + work["recomputed_flops"] if work else None
        kinds = ", ".join(f"{row['kind']} {_gb(row['sent'])} GB, {row['count']:,.0f}" for row in found["collectives"])
        lines.append(
            _row([
                point["config"], str(point["blocks"]), f"{point['chips']:,}", *map(_gib, sizes),
                "" if flops is None else f"{flops / 1e12:,.0f} T", _gb(work.get("moved")),
                *(_seconds(bound.get(roof)) for roof in ROOFS), kinds,
            ])
        )  # fmt: skip
    return "\n".join(lines)


def panels(document: dict[str, Any]) -> list[Panel]:
    """The peaks of each sweep of several sizes, in GiB."""
    found = []
    for title, by, points in _sweeps(document):
        lines = [
            Growth(
                line[0]["kind"],
                _billions(line[0]["parameters"]) if by == "chips" else "",
                [point[by] for point in line],
                [point["compiled"] and point["compiled"]["memory"]["peak"] / GIB for point in line],
                [point["paper"]["peak"] / GIB for point in line],
            )
            for line in _by(points, "config").values()
        ]
        if any(len(line.x) > 1 for line in lines):
            found.append(Panel(title, by, MACHINES[document["machine"]].memory / GIB, lines))
    return found


def _sweeps(document: dict[str, Any]) -> Iterable[tuple[str, str, list[dict[str, Any]]]]:
    """(title, the key that grows, points in its order)."""
    points = sorted(document["points"], key=lambda point: (point["chips"], point["blocks"]))
    own = [point for point in points if point["blocks"] == point["own_blocks"]]
    if own:
        yield f"By chips of {document['machine']}", "chips", own
    for chips, some in _by(points, "chips").items():
        swept = [line for line in _by(some, "config").values() if len(line) > 1]
        if swept:
            yield f"By blocks, {chips} {document['machine']}", "blocks", [point for line in swept for point in line]


def _by(points: Sequence[dict[str, Any]], key: str) -> dict[Any, list[dict[str, Any]]]:
    """Points by a value they share, in order of appearance."""
    found: dict[Any, list[dict[str, Any]]] = {}
    for point in points:
        found.setdefault(point[key], []).append(point)
    return found


def _texts(points: Sequence[dict[str, Any]], key: str) -> str:
    return " or ".join(dict.fromkeys(str(point[key]) for point in points))


def _head(columns: Sequence[str], left: int = 1) -> list[str]:
    return [_row(columns), "|" + "---|" * left + "---:|" * (len(columns) - left)]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(point: dict[str, Any] | None, compiled, paper) -> str:
    """``compiled (by formula)``; empty where there is no such point, "…" where it is still to be compiled."""
    if point is None:
        return ""
    return f"{compiled(point['compiled']) if point['compiled'] else '…'} ({paper(point['paper'])})"


def _peak(found: dict[str, Any]) -> str:
    return _gib(found["memory"]["peak"]) + ("" if found["fits"] else " ✗")


def _sent(found: dict[str, Any]) -> float | None:
    return None if found["bound"] is None else sum(row["sent"] for row in found["collectives"])


def _bound(bound: dict[str, Any] | None) -> str:
    return "–" if bound is None else f"{_seconds(bound['seconds'])} {bound['by'][0]}"


def _gib(value: float | None) -> str:
    return "" if value is None else _digits(value / GIB)


def _gb(value: float | None) -> str:
    return "–" if value is None else _digits(value / 1e9)


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _digits(value: float) -> str:
    return f"{value:.1f}" if 0 < value < 99.95 else f"{value:,.0f}"


def _billions(parameters: int) -> str:
    return f"{parameters / 1e9:.0f} B" if parameters >= 1e9 else f"{parameters / 1e6:.3g} M"
