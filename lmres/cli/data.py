"""``lmres data``: token stores, written and looked at."""

from pathlib import Path

from lmres.cli.errors import CommandError
from lmres.cli.options import add_overrides, config_of

_PREPARE = """lmres data prepare 'corpus/*.jsonl' data.tokenizer=tokenizer.json --output data/corpus
lmres train configs/small.yaml data.train=data/corpus data.tokenizer=tokenizer.json"""
_SHOW = "lmres data show data/corpus --verify"


def add(commands) -> None:
    group = commands.group("data", "prepare and look at token stores")
    command = group.add("prepare", prepare, "write the token store of a config or of files", _PREPARE)
    command.add_argument(
        "source", metavar="CONFIG_OR_SOURCE", help="a YAML file; or a file, folder or glob of text, or stdlib"
    )
    add_overrides(command, "settings such as data.text_key=content")
    command.add_argument("--output", required=True, metavar="DIR", help="folder of the store")
    command.add_argument(
        "--overwrite", action="store_true", help="replace a store made from other sources or settings"
    )
    command = group.add("show", show, "say what a token store holds", _SHOW)
    command.add_argument("store", metavar="STORE", help="folder that `lmres data prepare` wrote")
    command.add_argument(
        "--verify", action="store_true", help="read all of it and compare it with its digests"
    )


def prepare(args) -> int:
    from lmres.cli import OK
    from lmres.cli.output import print_json
    from lmres.data import prepare as write
    from lmres.tasks import TEXT
    from lmres.train.progress import Reporter
    from lmres.train.run import data_progress

    is_config = Path(args.source).suffix in (".yaml", ".yml")
    words = [] if is_config else [f"data.train={args.source}"]
    config = config_of(args.source if is_config else None, [*words, *args.overrides])
    if config.task.kind != TEXT.kind:
        raise CommandError(f"task.kind={config.task.kind} makes its sequences as it goes; there is nothing to prepare")
    smallest = config.model.context + 1 if is_config and config.data.repeat != "small" else 2
    info = write(
        config.data, args.output, progress=data_progress(Reporter()), vocab_size=config.model.vocab_size,
        min_tokens=smallest, overwrite=args.overwrite,
    )  # fmt: skip
    if args.json:
        print_json(info)
    else:
        print(*info.lines(), sep="\n")
    return OK


def show(args) -> int:
    from lmres.cli import OK
    from lmres.cli.output import print_json
    from lmres.data import open_store
    from lmres.data.files import as_path

    if not as_path(args.store, "prepared stores").exists():
        raise CommandError(f"{args.store}: no such folder")
    store = open_store(args.store)
    if args.verify:
        for split in store.splits.values():
            split.verify()
    if args.json:
        print_json({**vars(store.info), "verified": args.verify})
    else:
        print(*store.info.lines(), sep="\n")
        print(f"made with tokenizer {store.info.tokenizer or 'none: ready-made ids'}")
        if args.verify:
            print("verified: all tokens are as they were written")
    return OK
