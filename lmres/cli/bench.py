"""``lmres bench``: what each connection and flow costs in time and memory, beside the plain residual."""

from pathlib import Path

from lmres.cli.errors import CommandError
from lmres.cli.options import add_device, add_overrides, config_of, is_override

_EXAMPLE = """lmres bench
lmres bench configs/small.yaml model.width=512 --variants attnres-full,hc-dynamic-4 --output bench.json
lmres bench model.context=64 --variants plain --flow 'block(2)' --flow 'cone(1)'"""
DEFAULTS = ("model.vocab_size=257", "train.batch_size=8")
VARIANTS = ("denseformer-1x1", "attnres-full", "attnres-block4", "hc-dynamic-4", "mhc-4")


def add(commands) -> None:
    command = commands.add(
        "bench", run, "time one train step of each connection against the plain residual", _EXAMPLE
    )
    command.add_argument(
        "config", nargs="?", metavar="CONFIG",
        help="a YAML file for model and batch size; default: 6 blocks of width 256, context 256, batch 8",
    )  # fmt: skip
    add_overrides(command)
    command.add_argument(
        "--variants",
        default=",".join(VARIANTS),
        metavar="A,B",
        help="names that `lmres variants` lists; default: %(default)s",
    )
    command.add_argument(
        "--flow",
        action="append",
        metavar="KIND",
        help="a flow.kind to time the variants with; may be repeated; default: that of CONFIG",
    )
    command.add_argument(
        "--rounds", type=int, default=7, metavar="N", help="timed steps of each (%(default)s)"
    )
    command.add_argument(
        "--output", metavar="FILE.json", default="runs/bench.json", help="where the result goes (%(default)s)"
    )
    add_device(command)


def run(args) -> int:
    import dataclasses

    import jax

    from lmres.cli import OK, runtime
    from lmres.cli.output import print_json, print_table, write_json
    from lmres.config import check_config
    from lmres.experiment.bench import bench
    from lmres.experiment.machine import machine, versions
    from lmres.train.progress import Reporter

    words = [*args.overrides]
    path = args.config
    if path is not None and is_override(path):  # argparse takes the first word for CONFIG
        path, words = None, [path, *words]
    config = config_of(path, words, defaults=() if path else DEFAULTS)
    if config.model.vocab_size is None:
        config = config_of(path, [DEFAULTS[0], *words])
    check_config(config)
    variants, flows = named(args.variants), flows_of(args.flow, config)
    if args.rounds < 1:
        raise CommandError(f"--rounds {args.rounds} must be at least 1")
    runtime.start(args.device, config.train.compilation_cache)
    reporter, told = Reporter(), []

    def tell(what: str, done: float) -> None:
        if what.split()[0] == "compiling" or not told or told[-1].split()[0] != what.split()[0]:
            reporter.line(f"{done:4.0%} {what}")
        told.append(what)

    batch = config.train.batch_size // config.train.accumulate
    rows = bench(variants, config.model, batch, args.rounds, tell, flows)
    found = {
        "machine": machine(jax.devices()[:1]),
        "versions": versions(),
        "model": dataclasses.asdict(config.model),
        "flows": [dataclasses.asdict(flow) for flow in flows],
        "batch_size": batch,
        "rounds": args.rounds,
        "rows": rows,
    }
    write_json(found, Path(args.output))
    reporter.line(f"written to {args.output}")
    if args.json:
        print_json(found)
        return OK
    print_table(
        (
            "variant", "ms per step", "x plain", "tokens/s", "peak MiB", "x plain", "compile s", "parameters",
            "of the connection",
        ),
        [
            (
                r.name, f"{1e3 * r.step_seconds:,.1f}", f"{r.ratio:.2f}", f"{r.tokens_per_second:,.0f}",
                f"{r.peak_bytes / 2**20:,.1f}", f"{r.peak_ratio:.2f}", f"{r.compile_seconds:.1f}",
                f"{r.parameters:,}", f"{r.connection_parameters:,}",
            )
            for r in rows
        ],
    )  # fmt: skip
    return OK


def flows_of(kinds: list[str] | None, config) -> list:
    """The config's flow with each of the kinds. Raises CommandError for one that does not fit the model."""
    import dataclasses

    flows = [config.flow] if kinds is None else [dataclasses.replace(config.flow, kind=kind) for kind in kinds]
    for flow in flows:
        try:
            flow.check(config.model.blocks, config.model.context, config.model.kv, config.model.heads_from)
        except ValueError as error:
            raise CommandError(f"--flow: {error}") from None
    return flows


def named(names: str) -> list:
    """The connections of a list of names. Raises CommandError for one that is not known."""
    from lmres.cli.variants import presets
    from lmres.config.errors import nearest

    known = {c.name: c for c in presets()}
    wanted = [name for name in names.split(",") if name]
    wrong = next((name for name in wanted if name not in known), None)
    if wrong is not None:
        raise CommandError(
            f"--variants: no variant {wrong!r}{nearest(wrong, tuple(known))} (variants: {', '.join(known)})"
        )
    return [known[name] for name in wanted]
