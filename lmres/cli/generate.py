"""``lmres generate``: text from a trained model."""

import json
import sys
from pathlib import Path

from lmres.cli.errors import CommandError
from lmres.cli.options import add_device

_EXAMPLE = """lmres generate runs/small --prompt 'def main(' --max-tokens 100 --temperature 0.8 --top-p 0.95
lmres generate runs/small --prompts prompts.jsonl --json"""
DEFAULT_TOKENS = 200  # or what is left of the context, when no number is asked for


def add(commands) -> None:
    command = commands.add("generate", run, "continue prompts with a trained model", _EXAMPLE)
    command.add_argument("run_folder", metavar="RUN", help="folder of a run")
    prompts = command.add_mutually_exclusive_group(required=True)
    prompts.add_argument(
        "--prompt", action="append", metavar="TEXT",
        help="a prompt, shown as it grows if it is the only one; may be repeated; ids, '1 2 3', for a run "
        "on ready-made ids",
    )  # fmt: skip
    prompts.add_argument(
        "--prompts", metavar="FILE.jsonl", help="a file with one prompt per line, under --key"
    )
    command.add_argument(
        "--key", default="prompt", help="key of the prompt in the records of --prompts (%(default)s)"
    )
    command.add_argument(
        "--max-tokens", type=int, metavar="N",
        help=f"new tokens per prompt, at most; default: {DEFAULT_TOKENS}, or what is left of the context",
    )  # fmt: skip
    command.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 (the default) is greedy"
    )
    command.add_argument("--top-k", type=int, metavar="K", help="draw among the K most probable tokens")
    command.add_argument(
        "--top-p", type=float, metavar="P", help="draw among the fewest tokens of total probability P"
    )
    command.add_argument("--seed", type=int, default=0, metavar="S", help="of the draws (%(default)s)")
    command.add_argument(
        "--step", type=int, metavar="N", help="checkpoint to take; default: the newest complete one"
    )
    command.add_argument(
        "--ids", action="store_true", help="prompts and output are token ids, whatever the run's data"
    )
    add_device(command)


def run(args) -> int:
    import jax

    from lmres.cli import OK, runtime
    from lmres.cli.output import print_json
    from lmres.cli.trained import open_run, restore
    from lmres.data import get_tokenizer
    from lmres.generate import generate
    from lmres.model import Transformer
    from lmres.tasks import TEXT
    from lmres.train.state import abstract_params

    if args.temperature == 0 and (args.top_k is not None or args.top_p is not None):
        raise CommandError("--top-k and --top-p choose among draws; give a --temperature above 0 with them")
    texts = args.prompt if args.prompts is None else read_prompts(Path(args.prompts), args.key)
    trained = open_run(args.run_folder, args.step)
    config = trained.config
    if config.task.kind != TEXT.kind:
        raise CommandError(
            f"{trained.folder} was trained with task.kind={config.task.kind}: what it predicts is an answer, not the "
            "next token, and ids have no text; `lmres eval` tells how many answers are right"
        )
    tokenizer = None
    if not (args.ids or trained_on_ids(config.data)):
        tokenizer = get_tokenizer(config.data.tokenizer, config.data.eos_token)
        if tokenizer.vocab_size > config.model.vocab_size:
            raise CommandError(
                f"data.tokenizer={config.data.tokenizer} has {tokenizer.vocab_size} ids, the model "
                f"{config.model.vocab_size}: not the tokenizer it was trained with"
            )
    prompts = [encoded(text, tokenizer, number) for number, text in enumerate(texts)]
    runtime.start(args.device, config.train.compilation_cache)
    model = Transformer(config.model, config.residual, flow=config.flow)

    def tell(line: str) -> None:
        print(line, file=sys.stderr)

    # Without shardings in the target all parameters go to the first device.
    params, step = restore(trained, model, abstract_params(model), args.step, tell)
    tell(f"step {step} of {trained.folder} on {jax.local_devices()[0].device_kind}")
    room = config.model.context - max(map(len, prompts))
    count = args.max_tokens if args.max_tokens is not None else max(min(DEFAULT_TOKENS, room), 1)
    stream = None if args.json or len(prompts) > 1 else Stream(prompts[0], tokenizer)
    new = generate(
        model, params, prompts, count,
        temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed,
        eos_id=None if tokenizer is None else tokenizer.eos_id, on_token=stream,
    )  # fmt: skip
    results = [result(prompt, tokens, tokenizer) for prompt, tokens in zip(prompts, new)]
    if args.json:
        print_json({"run": trained.folder, "step": step, "results": results})
    elif stream is not None:
        stream.end()
    else:
        for number, one in enumerate(results):
            between = " " if tokenizer is None else ""
            print(f"--- {number}\n{shown(one['prompt'])}{between}{shown(one['continuation'])}")
    return OK


def read_prompts(path: Path, key: str) -> list:
    """The values under ``key`` of a JSONL file. Raises CommandError naming file, line and keys found."""
    try:
        lines = path.read_bytes().decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise CommandError(f"{path}: not UTF-8 text (byte {error.start})") from None
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise CommandError(f"{path}, line {number}: not valid JSON ({error})") from None
        if not isinstance(record, dict) or key not in record:
            found = ", ".join(record) if isinstance(record, dict) else type(record).__name__
            raise CommandError(f"{path}, line {number}: no key {key!r} (found: {found}); see --key")
        prompts.append(record[key])
    if not prompts:
        raise CommandError(f"{path}: holds no prompt")
    return prompts


def encoded(prompt, tokenizer, number: int) -> list[int]:
    """A prompt's token ids. Raises CommandError if it is not what the run takes, or empty."""
    where = f"prompt {number}"  # counted from 0, as lmres.generate does
    if tokenizer is not None:
        if not isinstance(prompt, str):
            raise CommandError(
                f"{where}: expected text, found {json.dumps(prompt)[:60]}; for token ids give --ids"
            )
        ids = tokenizer.encode(prompt).tolist()
    else:
        try:
            ids = (
                [int(word) for word in prompt.replace(",", " ").split()]
                if isinstance(prompt, str)
                else list(prompt)
            )
            if not all(type(i) is int for i in ids):
                raise TypeError
        except (ValueError, TypeError):
            raise CommandError(
                f"{where}: the run was trained on token ids; expected ids such as '1 2 3', found "
                f"{json.dumps(prompt)[:60]}"
            ) from None
    if not ids:
        raise CommandError(f"{where} is empty; give at least one token")
    return ids


def trained_on_ids(data) -> bool:
    """Whether a run's data were ready-made ids; text if the files are not here any more."""
    from lmres.data import DataError, open_store
    from lmres.data.files import as_path
    from lmres.data.sources import is_store, resolve

    try:
        if isinstance(data.train, str):
            path = as_path(data.train, "prepared stores").expanduser()
            if data.format == "store" or is_store(path):
                return open_store(path).info.tokenizer is None
        return resolve(data, "train")[0].ids
    except DataError:
        return data.format == "ids"


def result(prompt: list[int], tokens: list[int], tokenizer) -> dict:
    """One prompt's continuation, for people and programs."""
    if tokenizer is None:
        return {"prompt": prompt, "continuation": tokens, "tokens": tokens, "ended": False}
    before = tokenizer.decode(prompt)
    return {
        "prompt": before,
        "continuation": tokenizer.decode([*prompt, *tokens])[len(before) :],
        "tokens": tokens,
        "ended": bool(tokens) and tokens[-1] == tokenizer.eos_id,
    }


def shown(text) -> str:
    """Text as it is, ids with spaces between."""
    return text if isinstance(text, str) else " ".join(map(str, text))


class Stream:
    """Writes a prompt and its continuation to stdout as the tokens come; called with (row, token)."""

    def __init__(self, prompt: list[int], tokenizer):
        self._tokenizer, self._ids = tokenizer, list(prompt)
        self._text = ""

    def __call__(self, row: int, token: int) -> None:
        self._ids.append(token)
        self._show(final=False)

    def end(self) -> None:
        """Writes what was held back."""
        self._show(final=True)
        print()

    def _show(self, final: bool) -> None:
        text = shown(self._ids) if self._tokenizer is None else self._tokenizer.decode(self._ids)
        if not final:
            text = text.rstrip("\ufffd")  # the first bytes of a character whose others are still to come
        if text.startswith(self._text):
            print(text[len(self._text) :], end="", flush=True)
            self._text = text
