"""``lmres growth``: what a train step needs as chips and blocks grow."""

import json
from pathlib import Path

from lmres.cli.errors import CommandError
from lmres.cli.options import add_overrides, config_of, is_override
from lmres.cli.plan import train_setting

_EXAMPLE = """lmres growth configs/7b-plain.yaml configs/7b-mhc.yaml --chips 1,16,256,4096 --out growth.json
lmres growth configs/7b-plain.yaml configs/7b-mhc.yaml --chips 256 --blocks 32,64,128,256 --out growth.json
lmres growth --out growth.json --figure growth.svg

Each size is compiled by the machine's own compiler (pip install 'lmres[plan]') and kept in the file at once; a rerun
compiles what is missing, and the last line only shows what is there."""


def add(commands) -> None:
    command = commands.add(
        "growth", run, "compile train steps for ever more chips or blocks: a table and a figure", _EXAMPLE
    )
    command.add_argument("configs", nargs="*", metavar="CONFIG", help="YAML files; none to show what --out has")
    add_overrides(command, "settings that replace those of each file")
    command.add_argument("--out", required=True, metavar="FILE", help="JSON of what was found; it is gone on with")
    command.add_argument("--machine", default="v5p", metavar="NAME", help="as in lmres plan --topology (%(default)s)")
    command.add_argument(
        "--chips", default="1,16,256,4096", metavar="N,...", help="chips, in published shapes (%(default)s)"
    )
    command.add_argument("--blocks", metavar="N,...", help="model.blocks; default: each config's own")
    command.add_argument(
        "--rows", type=int, default=1, metavar="N", help="sequences per device and update, at once (%(default)s)"
    )
    command.add_argument("--compiles", type=int, metavar="N", help="at most so many now; default: all")
    command.add_argument("--figure", metavar="SVG", help="draw peak memory by chips and by blocks")
    command.add_argument("--parts", action="store_true", help="parts of the memory and collectives by kind, too")


def run(args) -> int:
    from lmres.analysis import growth_figure
    from lmres.cli import OK, runtime
    from lmres.cli.output import print_json, write_text
    from lmres.plan.growth import as_text, checked, grow
    from lmres.plan.growth_report import panels, parts, tables
    from lmres.train.progress import Reporter

    out = Path(args.out)
    document = _read(out, checked)
    configs = [word for word in args.configs if not is_override(word)]
    if not configs and document is None:
        raise CommandError(f"--out {out}: no such file, and no CONFIG to compile for it")
    if configs:
        wanted = _wanted(args, configs)
        runtime.start("cpu", None)  # the machine's compiler is asked from a CPU, whatever there is here
        keep = lambda found: write_text(as_text(found), out)  # noqa: E731
        document = grow(wanted, document, keep, compiles=args.compiles, tell=Reporter().line)
    if args.json:
        print_json(document)
    else:
        print("\n\n".join([*tables(document), *([parts(document)] if args.parts else [])]))
    if args.figure:
        write_text(growth_figure(panels(document)) + "\n", Path(args.figure))
    return OK


def _read(path: Path, checked):
    """What a file has, or None where there is none."""
    if not path.exists():
        return None
    try:
        return checked(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise CommandError(f"--out {path}: {error}") from error


def _wanted(args, configs: list[str]):
    """The points that the options ask for."""
    import dataclasses

    from lmres.config import check_config
    from lmres.plan.growth import points

    if args.rows < 1:
        raise CommandError(f"--rows {args.rows} must be at least 1")
    if args.compiles is not None and args.compiles < 0:
        raise CommandError(f"--compiles {args.compiles} must be at least 0")
    overrides = [*(word for word in args.configs if is_override(word)), *args.overrides]
    blocks = () if args.blocks is None else _numbers("--blocks", args.blocks)
    settings = {}
    for path in configs:
        config = config_of(path, overrides)
        for depth in blocks or (config.model.blocks,):
            check_config(dataclasses.replace(config, model=dataclasses.replace(config.model, blocks=depth)))
        name = config.name or Path(path).stem
        if name in settings:
            raise CommandError(f"{path}: two configs are called {name}; give one another name")
        settings[name] = train_setting(config)
    return points(settings, args.machine, _numbers("--chips", args.chips), blocks, args.rows)


def _numbers(option: str, text: str) -> list[int]:
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise CommandError(f"{option} {text}: expected whole numbers above 0 with commas between, as in 1,16,256")
    return list(dict.fromkeys(map(int, words)))
