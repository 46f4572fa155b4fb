"""``lmres inspect``: the checkpoints of a run."""

import itertools

from lmres.cli.options import add_device

_EXAMPLE = """lmres inspect runs/small
lmres inspect runs/small --measure"""
_ROWS, _TOKENS = 4, 256  # of the validation text that is measured on


def add(commands) -> None:
    command = commands.add(
        "inspect", run, "list a run's checkpoints, check them, and show its settings", _EXAMPLE
    )
    command.add_argument("run_folder", metavar="RUN", help="folder of a run")
    command.add_argument(
        "--no-verify", action="store_true", help="do not read the arrays to compare their digests"
    )
    command.add_argument(
        "--measure",
        action="store_true",
        help="measure on validation text how the newest checkpoint carries information up: over how many sources "
        "each sub-layer reads, how streams are amplified, how alike they are",
    )
    add_device(command)


def run(args) -> int:
    from lmres.cli import FAILED, OK, runtime
    from lmres.cli.output import print_json, print_table
    from lmres.cli.trained import run_folder
    from lmres.config import RunConfig, diff, flow_facts, from_dict
    from lmres.train.checkpoint import Checkpoints
    from lmres.train.run import CHECKPOINTS

    folder = run_folder(args.run_folder)
    runtime.start(args.device, None)
    with Checkpoints(folder / CHECKPOINTS, mode="read") as checkpoints:
        rows = checkpoints.inspect(verify=not args.no_verify)
    # A save that was cut off leaves a folder that has no step for a name.
    unfinished = sorted(
        p.name for p in (folder / CHECKPOINTS).iterdir() if p.is_dir() and not p.name.isdigit()
    )
    configs = {r["step"]: from_dict(r["meta"]["config"]) for r in rows if r["meta"] and "config" in r["meta"]}
    newest = configs[max(configs)] if configs else RunConfig()
    settings = diff(RunConfig(), newest)
    steps = sorted(configs)
    changes = {later: diff(configs[early], configs[later]) for early, later in itertools.pairwise(steps)}
    good = bool(rows) and not any(row["problem"] for row in rows)
    facts = flow_facts(newest.flow, newest.model.blocks, newest.model.context)
    measures = measured(args.run_folder) if args.measure else None
    if args.json:
        print_json({
            "run": folder,
            "checkpoints": [{k: v for k, v in row.items() if k != "meta"} for row in rows],
            "verified": not args.no_verify,
            "unfinished": unfinished,
            "settings": {change.key: change.new for change in settings},
            "flow": {**vars(facts), "slope": float(facts.slope)},
            "changes": {step: [vars_of(c) for c in found] for step, found in changes.items()},
            **({"measures": measures.to_dict()} if measures else {}),
        })  # fmt: skip
        return OK if good else FAILED
    state = "listed" if args.no_verify else "complete"
    print_table(
        ("step", "state", "arrays", "parameters"),
        [(str(r["step"]), r["problem"] or state, f"{r['arrays']:,}", f"{r['parameters']:,}") for r in rows],
        left=2,
    )
    for name in unfinished:
        print(f"unfinished: {name}")
    for step, found in changes.items():
        for change in found:
            print(f"changed before step {step}: {change}")
    print("\nsettings, default -> this run:")
    for change in settings:
        print(f"  {change}")
    print_flow(facts, newest.model)
    if measures:
        print_measures(measures)
    return OK if good else FAILED


def measured(name: str):
    """``lmres.analysis.model_streams`` of a run's newest checkpoint on the first rows of its validation text."""
    from lmres.analysis import model_streams
    from lmres.cli.errors import CommandError
    from lmres.cli.trained import open_run, restore
    from lmres.train.progress import Reporter
    from lmres.train.run import data_progress
    from lmres.train.session import build_model, open_splits
    from lmres.train.state import abstract_params

    trained, reporter = open_run(name), Reporter(label="inspect")
    config = trained.config
    if not config.flow.is_standard:
        raise CommandError(f"--measure follows ordinary attention; {trained.folder} has flow.kind={config.flow.kind}")
    splits = open_splits(config.task, config.data, config.model, 1, data_progress(reporter))
    model = build_model(config.model, config.residual, config.flow, splits, None)
    params, step = restore(trained, model, abstract_params(model), None, reporter.line)
    batch = next(splits.valid.eval_batches(_ROWS, 1))
    tokens, segments, positions = (batch[k][:, :_TOKENS] for k in ("inputs", "segment_ids", "positions"))
    reporter.line(f"measuring step {step} on {int((segments != 0).sum()):,} tokens of validation text")
    return model_streams(model, params, tokens, segments, positions)


def print_measures(found) -> None:
    """The measures as tables: of the readers, and of the streams by depth."""
    from lmres.cli.output import print_table

    def cells(summary, *at):
        return [f"{getattr(summary, key)[at]:.4g}" for key in ("mean", "smallest", "largest")]

    print(f"\nover {found.tokens:,} tokens; mean, smallest, largest")
    if found.entropy is None:
        print(f"{found.connection} mixes channels: there is no share of a source in a read")
    else:
        print("over how many sources a reader spreads its weights:")
        rows = [(r, *cells(found.entropy.effective, i), str(i + 1)) for i, r in enumerate(found.readers)]
        print_table(("reader", "sources", "", "", "of"), rows)
    if found.gains is None:
        print(f"{found.connection} has no maps between streams")
        return
    print("gain of signals from the embedding to here, of gradients from the readout to here, cosine of streams:")
    alike = lambda i: cells(found.similarity, i + 1) if found.similarity else ["-"] * 3  # noqa: E731
    rows = [
        (unit, *cells(found.gains.forward, 0, i), *cells(found.gains.backward, i, -1), *alike(i))
        for i, unit in enumerate(found.units)
    ]
    print_table(("unit", "signal", "", "", "gradient", "", "", "cosine", "", ""), rows)


def print_flow(facts, model) -> None:
    """What attention reads and how the cells are run, as a table."""
    print(f"\nflow over {model.blocks} layers and {model.context} tokens:")
    rows = [
        ("geometry", facts.geometry),
        ("cell (t, l) reads", facts.reads),
        ("slope", f"{facts.slope} layers per token"),
        ("class", facts.schedule_class),
        ("schedule", facts.schedule),
        ("steps one after the other", f"{facts.steps:,}"),
        ("keys per query", f"{facts.keys_per_query:,.5g}"),
        ("source layers to cache", ", ".join(map(str, facts.cached)) or "none"),
        ("keys and values per token", f"{facts.slots:,}"),
    ]
    for name, value in rows:
        print(f"  {name:<26}{value}")


def vars_of(change) -> dict:
    """A change as a dict."""
    return change._asdict()
