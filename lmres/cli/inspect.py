"""``lmres inspect``: the checkpoints of a run."""

import itertools

from lmres.cli.options import add_device

_EXAMPLE = "lmres inspect runs/small"


def add(commands) -> None:
    command = commands.add(
        "inspect", run, "list a run's checkpoints, check them, and show its settings", _EXAMPLE
    )
    command.add_argument("run_folder", metavar="RUN", help="folder of a run")
    command.add_argument(
        "--no-verify", action="store_true", help="do not read the arrays to compare their digests"
    )
    add_device(command)


def run(args) -> int:
    from lmres.cli import FAILED, OK, runtime
    from lmres.cli.output import print_json, print_table
    from lmres.cli.trained import run_folder
    from lmres.config import RunConfig, diff, from_dict
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
    if args.json:
        print_json({
            "run": folder,
            "checkpoints": [{k: v for k, v in row.items() if k != "meta"} for row in rows],
            "verified": not args.no_verify,
            "unfinished": unfinished,
            "settings": {change.key: change.new for change in settings},
            "changes": {step: [vars_of(c) for c in found] for step, found in changes.items()},
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
    return OK if good else FAILED


def vars_of(change) -> dict:
    """A change as a dict."""
    return change._asdict()
