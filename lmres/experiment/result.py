"""What a comparison found, as plain data: the input of the report, and its file format (JSON).

Losses are lists of numbers; NaN and infinity, which JSON has not, are stored as null and come back as NaN.
"""

import dataclasses
import json
import math
from typing import Any

from lmres.analysis import MixingResult

FORMAT = 1


@dataclasses.dataclass(frozen=True)
class RunResult:
    """One run. Runs of one name are seeds of one thing and are averaged.

    name: what the report calls it. connection: the spec's ``name``, and the flow's ``kind`` after a comma if it is not
      the ordinary one; "plain" is the plain residual with ordinary attention. seed: of the run.
    steps, seconds, train_loss: [N]; the loss in nats per token; seconds spent in training since the first step, without
      compilation and validation, so that runs can be compared at equal time.
    valid_steps, valid_bpb: [V]; bits per byte. The last value is the run's result.
    params, connection_params: number of parameters, of the whole model and of the connection alone.
    tokens_per_second: of training, over all devices. peak_memory_bytes: of one device; None if not known.
    mixing: the depth-mixing matrix of the trained model, or None.
    config: the resolved config, nested dicts.
    notes: anything a reader must know ("diverged at step 400").
    """

    name: str
    connection: str
    seed: int
    steps: list[int]
    seconds: list[float]
    train_loss: list[float]
    valid_steps: list[int]
    valid_bpb: list[float]
    params: int
    connection_params: int
    tokens_per_second: float
    peak_memory_bytes: int | None = None
    mixing: MixingResult | None = None
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    notes: str = ""

    def __post_init__(self):
        for group in (("steps", "seconds", "train_loss"), ("valid_steps", "valid_bpb")):
            lengths = {name: len(getattr(self, name)) for name in group}
            if len(set(lengths.values())) > 1:
                raise ValueError(f"run {self.name!r}, seed {self.seed}: lengths differ: {lengths}")

    @property
    def final_bpb(self) -> float:
        """The last validation, in bits per byte; NaN without one."""
        return self.valid_bpb[-1] if self.valid_bpb else math.nan


@dataclasses.dataclass(frozen=True)
class ComparisonResult:
    """Runs that differ in their connection or flow and, it is hoped, in nothing else.

    baseline: the name of the runs that the others are set beside (``plain_baseline`` finds it); None for none.
    data, machine, versions: what to tell of each, {"label": "text"}.
    date: when it was run, ISO 8601.
    """

    title: str
    runs: list[RunResult]
    baseline: str | None = None
    data: dict[str, Any] = dataclasses.field(default_factory=dict)
    machine: dict[str, Any] = dataclasses.field(default_factory=dict)
    versions: dict[str, Any] = dataclasses.field(default_factory=dict)
    date: str = ""
    notes: str = ""

    def __post_init__(self):
        if self.baseline is not None and self.baseline not in self.names:
            raise ValueError(f"the baseline {self.baseline!r} is not among the runs {self.names}")

    @property
    def names(self) -> list[str]:
        """Names in order of appearance, each once."""
        return list(dict.fromkeys(run.name for run in self.runs))

    def named(self, name: str) -> list[RunResult]:
        """The runs (seeds) of one name."""
        return [run for run in self.runs if run.name == name]

    def to_json(self) -> str:
        """JSON text; ``from_json`` is the inverse."""
        runs = [{**_fields(r), "mixing": None if r.mixing is None else r.mixing.to_dict()} for r in self.runs]
        return json.dumps({"format": FORMAT, **_fields(self), "runs": _finite(runs)}, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> "ComparisonResult":
        """Raises ValueError if the text is of another format or a field is missing or unknown."""
        fields = json.loads(text)
        found = fields.pop("format", None) if isinstance(fields, dict) else None
        if found != FORMAT:
            raise ValueError(f"not a comparison result of format {FORMAT}: its format is {found!r}")
        try:
            return cls(**{**fields, "runs": [_run(run) for run in fields["runs"]]})
        except (KeyError, TypeError) as error:
            raise ValueError(f"a comparison result with missing or unknown fields: {error}") from error


def plain_baseline(runs: list[RunResult]) -> str | None:
    """The name of the first run whose connection is the plain residual, or None."""
    return next((run.name for run in runs if run.connection == "plain"), None)


def _fields(record) -> dict[str, Any]:
    return {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}


def _finite(tree):
    """``tree`` with null for every number that JSON has not."""
    if isinstance(tree, dict):
        return {k: _finite(v) for k, v in tree.items()}
    if isinstance(tree, list | tuple):
        return [_finite(v) for v in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree


def _run(fields: dict[str, Any]) -> RunResult:
    back = {
        name: [math.nan if x is None else x for x in fields[name]]
        for name in ("seconds", "train_loss", "valid_bpb")
    }
    mixing = None if fields["mixing"] is None else MixingResult.from_dict(fields["mixing"])
    speed = math.nan if fields["tokens_per_second"] is None else fields["tokens_per_second"]
    return RunResult(**{**fields, **back, "mixing": mixing, "tokens_per_second": speed})
