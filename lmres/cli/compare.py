"""``lmres compare``: connections trained alike, and the report on them."""

from pathlib import Path

from lmres.cli.options import add_device, add_folder, add_overrides

_EXAMPLE = """lmres compare configs/quickstart.yaml
lmres compare configs/quickstart.yaml train.steps=1000 compare.seeds=[0,1,2] --folder runs/longer"""


def add(commands) -> None:
    command = commands.add("compare", run, "train the variants of a comparison and write a report", _EXAMPLE)
    command.add_argument("config", metavar="CONFIG", help="a YAML file with a section `compare`")
    add_overrides(command)
    add_folder(command)
    add_device(command)


def run(args) -> int:
    import jax

    from lmres.cli import DIVERGED, OK, STOPPED, runtime
    from lmres.cli.output import print_json
    from lmres.config import check_config, load_compare
    from lmres.data.files import as_path
    from lmres.experiment.compare import Stopped, compare, reference
    from lmres.experiment.report import print_table
    from lmres.train.progress import Reporter

    settings, runs = load_compare(args.config, args.overrides)
    first = next(iter(runs.values()))
    title = first.name or Path(args.config).stem
    folder = as_path(args.folder or Path("runs") / title, "comparisons", schemes=())
    for config in runs.values():
        check_config(config)
    runtime.start(args.device, first.train.compilation_cache)
    for config in runs.values():
        check_config(config, jax.device_count())
    mode = "resume" if args.resume else "overwrite" if args.overwrite else "new"
    tell = Reporter().line
    try:
        result, report = compare(title, settings, runs, folder, mode=mode, tell=tell)
    except Stopped as stopped:
        tell(f"stopped by {stopped}; go on with the same command and --resume")
        return STOPPED[str(stopped)]
    diverged = [run for run in result.runs if run.notes]
    if args.json:
        print_json({
            "report": report,
            "results": report.with_name("comparison.json"),
            "baseline": result.baseline,
            "data": result.data,
            "runs": [
                {
                    "name": r.name, "connection": r.connection, "seed": r.seed, "valid_bpb": r.final_bpb,
                    "parameters": r.params, "connection_parameters": r.connection_params,
                    "tokens_per_second": r.tokens_per_second, "peak_memory_bytes": r.peak_memory_bytes,
                    "notes": r.notes,
                }
                for r in result.runs
            ],
        })  # fmt: skip
    else:
        print_table(result)
        print(reference(result))
        for one in diverged:
            print(f"{one.name}, seed {one.seed}: {one.notes}")
        print(f"report: {report}")
    return DIVERGED if diverged else OK
