"""``lmres plan``: what a run would need on a machine that is not here."""

from lmres.cli.errors import CommandError
from lmres.cli.options import add_overrides, config_of

DOES_NOT_FIT = 4  # exit code

_EXAMPLE = """lmres plan configs/7b-mhc.yaml --topology v5p:8x8x4
lmres plan configs/7b-plain.yaml --topology h200:4x8 --what decode --batch 64 --context 4096
lmres plan configs/7b-plain.yaml --topology v5e:16x16 --search

The step is compiled by the machine's own compiler (pip install 'lmres[plan]'); nothing is executed.
Exit codes: 0 it fits, 4 it does not."""


def add(commands) -> None:
    command = commands.add(
        "plan", run, "compile a run for a TPU pod or GPU hosts that are not here: memory, collectives, time", _EXAMPLE
    )
    command.add_argument("config", metavar="CONFIG", help="a YAML file")
    add_overrides(command)
    command.add_argument(
        "--topology",
        required=True,
        metavar="NAME",
        help="v4, v5e, v5p, v6e or tpu7x with the chips along each axis (v5p:8x8x16), h100 or h200 with hosts x GPUs "
        "per host (h200:2x8)",
    )
    command.add_argument("--slices", type=int, default=1, metavar="N", help="TPU slices of that size (%(default)s)")
    command.add_argument(
        "--what", choices=("train", "decode", "prefill"), default="train", help="what is compiled (%(default)s)"
    )
    command.add_argument(
        "--batch", type=int, metavar="N", help="rows of decode and prefill; default: one for each part of a batch"
    )
    command.add_argument(
        "--context", type=int, metavar="N", help="tokens of decode's cache or prefill's prompts; default: model.context"
    )
    command.add_argument(
        "--search", action="store_true", help="find a mesh, model.remat and train.accumulate that fit and are cheapest"
    )
    command.add_argument("--compiles", type=int, default=3, metavar="N", help="of --search, at most (%(default)s)")
    command.add_argument(
        "--minutes", type=float, default=30.0, metavar="M", help="after which --search compiles no more (%(default)s)"
    )
    command.add_argument("--buffers", type=int, default=12, metavar="N", help="largest buffers to list (%(default)s)")


def run(args) -> int:
    from lmres.cli import OK, runtime
    from lmres.cli.output import print_json
    from lmres.config import check_config
    from lmres.plan.advice import advise
    from lmres.plan.planning import make_plan
    from lmres.plan.report import head, plan_json, search_json, sections, verdict
    from lmres.plan.topology import parse_topology, topology_devices
    from lmres.train.progress import Reporter

    if args.search and args.what != "train":
        raise CommandError(f"--search looks for train steps; leave it out with --what {args.what}")
    if args.compiles < 1 or args.buffers < 0:
        raise CommandError(f"--compiles {args.compiles} must be at least 1, --buffers {args.buffers} at least 0")
    topology = parse_topology(args.topology, args.slices)
    config = config_of(args.config, args.overrides)
    setting = setting_of(config, args, topology.size)
    check_config(
        served(config, topology.size) if args.what != "train" else config, None if args.search else topology.size
    )
    setting.check()
    runtime.start("cpu", None)  # the machine's compiler is asked from a CPU, whatever there is here
    devices, reporter = topology_devices(topology), Reporter()
    if args.search:
        found = searched(setting, topology, devices, args, reporter)
        plan, advice, document = found.best and found.best[1], [], search_json(found)
        show_search(found, args.json)
        if plan is None:
            if args.json:
                print_json(document)
            return DOES_NOT_FIT
    else:
        reporter.line(f"compiling for {topology.size} {topology.machine.kind}; a large model takes minutes")
        plan = make_plan(setting, topology, devices, args.buffers)
        advice = [] if plan.fits or args.what != "train" else advise(plan)
        document = plan_json(plan, advice)
    if args.json:
        print_json(document)
    else:
        print("\n".join(head(plan)))
        print(verdict(plan))
        for section in sections(plan, advice):
            show(section)
        for line in closing(plan, advice):
            print(line)
    return OK if plan.fits else DOES_NOT_FIT


def train_setting(config):
    """The sections of a config that a plan of its train step depends on."""
    from lmres.plan.lowering import Setting

    return Setting(
        config.model, config.residual, config.flow, config.optimizer, config.schedule, config.train, config.mesh
    )


def setting_of(config, args, devices: int):
    """What is planned, of a config and the options."""
    import dataclasses

    from lmres.sharding import mesh_sizes

    batch = args.batch
    if batch is None:
        sizes = {} if args.what == "train" else mesh_sizes(config.mesh, devices)
        batch = sizes.get("data", 1) * sizes.get("fsdp", 1)
    tokens = config.model.context if args.context is None else args.context
    return dataclasses.replace(train_setting(config), what=args.what, batch=batch, tokens=tokens)


def served(config, devices: int):
    """The config with a training batch that any mesh takes, where none is trained."""
    import dataclasses

    train = dataclasses.replace(config.train, batch_size=devices, accumulate=1, eval_batch_size=None)
    return dataclasses.replace(config, train=train)


def searched(setting, topology, devices, args, reporter):
    """``lmres.plan.search`` with progress."""
    from lmres.plan.search import search

    return search(setting, topology, devices, compiles=args.compiles, seconds=60 * args.minutes, tell=reporter.line)


def show_search(found, quiet: bool) -> None:
    from lmres.plan.report import search_section

    if quiet:
        return
    show(search_section(found))
    if found.best is None:
        print("\nnothing that was compiled fits")
    else:
        print("\nthe cheapest that fits: " + " ".join(f"{key}={value}" for key, value in found.best[0].items()) + "\n")


def show(section) -> None:
    """A table with its title."""
    from lmres.cli.output import print_table

    print(f"\n{section.title}")
    if section.rows:
        words = len(section.columns) > 3 or section.columns[0]
        print_table(section.columns, section.rows, left=len(section.columns) if words else 1)
    else:
        print("none")


def closing(plan, advice) -> list[str]:
    """What to know beside the tables."""
    lines = [f"note: {note}" for note in plan.notes]
    if plan.bound is not None and plan.bound.incomplete:
        lines.append(f"note: the bound leaves out what goes between slices: {plan.bound.incomplete}")
    if plan.refused:
        lines.append(f"the compiler's words: {plan.refused}")
    if not plan.fits and not advice and plan.setting.what == "train":
        lines.append("no mesh, model.remat or train.accumulate is estimated to fit: take more devices")
    elif not plan.fits and not advice:
        lines.append("lower --batch or --context, or split the model further with mesh.fsdp and mesh.tensor")
    lines.append(f"figures: {plan.topology.machine.source}")
    return ["", *lines]
