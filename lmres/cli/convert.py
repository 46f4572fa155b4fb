"""``lmres convert``: a trained plain model under another residual connection."""

from lmres.cli.options import add_device, add_overrides

_EXAMPLE = """lmres convert runs/plain residual.kind=hc residual.streams=2 --out runs/hc
lmres convert runs/plain residual.kind=mhc train.steps=2000 optimizer.learning_rate=1e-3 --out runs/mhc
lmres train runs/mhc --resume"""


def add(commands) -> None:
    command = commands.add(
        "convert",
        run,
        "make a new run of a trained plain pre-norm model with another residual connection, its function kept",
        _EXAMPLE,
    )
    command.add_argument("run_folder", metavar="RUN", help="folder of a run with the plain pre-norm residual")
    add_overrides(
        command,
        "the connection (residual.kind=... and its options) or the flow (flow.kind=...), and settings of the new run "
        "that differ from those of RUN; what parameters depend on (model.*) stays. Training starts at step 0, with a "
        "fresh optimiser, a new schedule and the data from their start",
    )
    command.add_argument("--out", required=True, metavar="FOLDER", help="the new run; must be new or empty")
    command.add_argument(
        "--step", type=int, metavar="N", help="checkpoint to take; default: the newest complete one"
    )
    command.add_argument(
        "--tolerance", type=float, default=1e-4, metavar="X",
        help="largest difference of a logit before and after, in float32 (%(default)s)",
    )  # fmt: skip
    add_device(command)


def run(args) -> int:
    import dataclasses

    from lmres.cli import OK, runtime
    from lmres.cli.errors import CommandError
    from lmres.cli.evaluate import mesh_for
    from lmres.cli.output import print_json
    from lmres.cli.trained import open_run
    from lmres.config import check_config, to_dict
    from lmres.data.files import as_path
    from lmres.train.convert import convert_run
    from lmres.train.progress import Reporter

    if not any(word.startswith(("residual.", "flow.")) for word in args.overrides):
        raise CommandError(
            "name the connection to convert to, such as residual.kind=hc (`lmres variants` lists them), or the flow, "
            "such as flow.kind='cone(1)'"
        )
    if not args.tolerance > 0:
        raise CommandError(f"--tolerance {args.tolerance:g} must be above 0")
    source = open_run(args.run_folder, args.step)
    config = open_run(args.run_folder, args.step, args.overrides).config
    if config.name == source.config.name:
        config = dataclasses.replace(config, name=None)  # the folder's
    check_config(config)
    runtime.start(args.device, config.train.compilation_cache)
    reporter = Reporter(label="convert")
    folder = as_path(args.out, "converted runs", schemes=())
    mesh = mesh_for(config.mesh, args.overrides, reporter.line)
    done = convert_run(
        source=source.folder, step=args.step, model=config.model, residual=config.residual, flow=config.flow,
        optimizer=config.optimizer, schedule=config.schedule, train=config.train, mesh=mesh,
        splits=splits_of(config, args.overrides, reporter), folder=folder,
        stored_config=to_dict(config), tolerance=args.tolerance, reporter=reporter,
    )  # fmt: skip
    if args.json:
        print_json({"folder": folder, "run": source.folder, "tolerance": args.tolerance, **vars(done)})
    else:
        print(
            f"{folder}: {done.connection} with the function of {source.folder}, step {done.step}; logits differ by "
            f"{done.difference:.2g} at most"
        )
    reporter.line(
        f"train on from step 0 of {config.train.steps}, with the data from their start: lmres train {folder} --resume"
    )
    return OK


def splits_of(config, overrides, reporter):
    """The data's splits; None where they are gone, unless they were asked for."""
    from lmres.data import DataError
    from lmres.train.run import data_progress
    from lmres.train.session import open_splits

    try:
        return open_splits(config.task, config.data, config.model, 1, data_progress(reporter))
    except (DataError, OSError, ImportError) as error:
        if any(word.startswith(("data.", "task.")) for word in overrides):
            raise
        reporter.line(f"the run's data cannot be read ({error}): comparing logits on drawn tokens")
        return None
