"""``lmres train``: one run, new or resumed."""

from pathlib import Path

from lmres.cli.options import add_device, add_folder, add_overrides

_EXAMPLE = """lmres train configs/small.yaml residual.kind=attnres train.steps=500
lmres train configs/small.yaml --resume
lmres train runs/small --resume train.steps=4000"""


def add(commands) -> None:
    command = commands.add("train", run, "train a model", _EXAMPLE)
    command.add_argument("config", metavar="CONFIG", help="a YAML file, or the folder of a run to go on with")
    add_overrides(command)
    add_folder(command)
    command.add_argument(
        "--weights-from", metavar="RUN", help="start at step 0 with the parameters of this run"
    )
    add_device(command, distributed=True)


def run(args) -> int:
    import jax

    from lmres.cli import OK, STOPPED, runtime
    from lmres.cli.output import print_json
    from lmres.cli.trained import RUN_STORES
    from lmres.config import check_config, describe_structure, load_config, to_dict
    from lmres.data.files import as_path
    from lmres.train.evaluate import in_words
    from lmres.train.progress import Reporter
    from lmres.train.run import train_run
    from lmres.train.session import describe_devices

    given = as_path(args.config, "runs", RUN_STORES)
    config = load_config(given / "config.yaml" if given.is_dir() else given, args.overrides)
    name = config.name or (given.name if given.is_dir() else given.stem)
    folder = Path("runs") / name
    if args.folder or given.is_dir():
        folder = as_path(args.folder, "runs", RUN_STORES) if args.folder else given
    check_config(config)
    source = weights_from(args, folder)
    runtime.start(args.device, config.train.compilation_cache, args.distributed)
    check_config(config, jax.device_count())
    reporter = Reporter(quiet=jax.process_index() != 0, log_every=config.train.log_every)
    mode = "overwrite" if args.overwrite else "new"
    if args.resume:
        mode = resume_mode(folder, config, reporter.line)
    for line in describe_structure(config):
        reporter.line(line)
    session, result = train_run(
        **{**vars(config), "name": name},
        folder=folder, stored_config=to_dict(config), mode=mode, weights_from=source, reporter=reporter,
    )  # fmt: skip
    finished = result.step >= config.train.steps
    if jax.process_index() == 0:
        if args.json:
            fields = ("step", "stopped", "evaluation", "tokens_per_second", "seconds", "train_traces")
            told = {field: getattr(result, field) for field in fields}
            device = describe_devices(session.mesh)
            print_json({"folder": folder, "steps": config.train.steps, "device": device, **told})
        else:
            validation = f": validation {in_words(result.evaluation)}" if result.evaluation else ""
            print(f"{folder}: step {result.step} of {config.train.steps}{validation}")
        if not finished:
            reporter.line(f"stopped by {result.stopped}; go on with: lmres train {folder} --resume")
    return OK if finished else STOPPED[result.stopped]


def weights_from(args, folder: Path) -> Path | None:
    """The run that ``--weights-from`` names. Raises CommandError where it cannot be used."""
    from lmres.cli.errors import CommandError
    from lmres.cli.trained import run_folder

    if args.weights_from is None:
        return None
    if args.resume:
        raise CommandError(
            "--weights-from starts a new run, --resume goes on with one; leave one of them out"
        )
    source = run_folder(args.weights_from)
    if source.resolve() == folder.resolve():
        raise CommandError(f"--weights-from {source} is the folder of the new run too; name another --folder")
    return source


def resume_mode(folder: Path, config, tell) -> str:
    """How to start in the folder: "resume", or "new" while it holds no checkpoint. Tells what changes.

    Raises ConfigError with a line for each change that a resumed run cannot take.
    """
    from lmres.config import ConfigError, from_dict, resumable_changes
    from lmres.train.checkpoint import Checkpoints
    from lmres.train.run import CHECKPOINTS

    with Checkpoints(folder / CHECKPOINTS, mode="read") as checkpoints:
        if not checkpoints.steps():
            tell(f"{folder} holds no checkpoint yet: starting at step 0")
            return "new"
        stored = from_dict(checkpoints.meta()["config"])
    changes = resumable_changes(stored, config)
    if changes.refused:
        raise ConfigError(f"cannot resume {folder} with {change}: {why}" for change, why in changes.refused)
    for change in changes.applied:
        tell(f"changed {change}")
    return "resume"
