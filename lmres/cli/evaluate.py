"""``lmres eval``: the validation loss of a trained model, and its accuracy on a task."""

import time

from lmres.cli.options import add_device, add_overrides

_EXAMPLE = """lmres eval runs/small
lmres eval runs/small data.valid='other/*.txt' --json"""


def add(commands) -> None:
    command = commands.add("eval", run, "evaluate a trained model on its validation split", _EXAMPLE)
    command.add_argument("run_folder", metavar="RUN", help="folder of a run")
    add_overrides(command, "settings to change, such as data.valid=FILE, model.dtype=float32 or mesh.fsdp=4")
    command.add_argument(
        "--step", type=int, metavar="N", help="checkpoint to take; default: the newest complete one"
    )
    command.add_argument(
        "--batch-size", type=int, metavar="N", help="sequences per batch; does not change the result"
    )
    command.add_argument(
        "--batches", type=int, metavar="N", help="evaluate on the first N batches only; default: all"
    )
    add_device(command)


def run(args) -> int:
    import jax

    from lmres.cli import OK, runtime
    from lmres.cli.errors import CommandError
    from lmres.cli.output import print_json
    from lmres.cli.trained import open_run, restore
    from lmres.config import check_task
    from lmres.sharding import param_shardings
    from lmres.train.evaluate import Evaluator, accuracy_by_position, in_words, measure_of
    from lmres.train.feed import Feed, eval_batch_size
    from lmres.train.progress import Reporter
    from lmres.train.run import data_progress
    from lmres.train.session import build_model, describe_devices, open_splits
    from lmres.train.state import abstract_params
    from lmres.train.step import jit_eval_step

    for option in ("batch_size", "batches"):
        value = getattr(args, option)
        if value is not None and value < 1:
            raise CommandError(f"--{option.replace('_', '-')} {value} must be at least 1")
    trained = open_run(args.run_folder, args.step, args.overrides)
    config = trained.config
    check_task(config)
    runtime.start(args.device, config.train.compilation_cache)
    reporter = Reporter(label="eval", log_every=100)
    mesh = mesh_for(config.mesh, args.overrides, reporter.line)
    # One row is enough of the training split: a short one must not stand in the way.
    splits = open_splits(config.task, config.data, config.model, 1, data_progress(reporter))
    model = build_model(config.model, config.residual, config.flow, splits, mesh)
    like = abstract_params(model)
    like = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        like, param_shardings(like, mesh),
    )  # fmt: skip
    params, step = restore(trained, model, like, args.step, reporter.line)
    asked = args.batch_size or config.train.eval_batch_size
    size = eval_batch_size(asked, config.train.batch_size // config.train.accumulate, mesh)
    feed = Feed(splits.valid, mesh, size)
    count = feed.num_eval_batches(args.batches)
    reporter.line(f"step {step} of {trained.folder} on {describe_devices(mesh)}: {count} batches of {size}")
    watched = _Watched(feed, count, size * config.model.context, reporter)
    evaluator = Evaluator(jit_eval_step(model, mesh, like, measure_of(splits)), watched, splits.valid, args.batches)
    with reporter.start(0, count):
        totals = evaluator.totals(params)
    result = evaluator.summary(totals)
    by_position = accuracy_by_position(totals) if splits.scored else None
    if args.json:
        if by_position is not None:
            result |= {"accuracy": result["valid_accuracy"], "accuracy_by_position": by_position}
        print_json({"run": trained.folder, "step": step, "batches": count, "batch_size": size, **result})
    else:
        print(f"{trained.folder}, step {step}: {in_words(result)} over {result['valid_tokens']:,.0f} tokens")
        if by_position is not None:
            print("accuracy by position:", *(f"{share:.3f}" for share in by_position))
    return OK


class _Watched:
    """A feed that shows how far it is. count: of batches; tokens: places in one of them."""

    def __init__(self, feed, count: int, tokens: int, reporter):
        self._feed, self._count, self._tokens, self._reporter = feed, count, tokens, reporter

    def evaluation(self, max_batches):
        began = None
        for done, batch in enumerate(self._feed.evaluation(max_batches)):
            if began is not None:
                each = (time.perf_counter() - began) / done
                self._reporter.step(done, {}, self._tokens / each, each * (self._count - done))
            yield batch
            began = began or time.perf_counter()  # the first one compiles
        self._reporter.step(self._count, {}, None, 0.0)


def mesh_for(config, overrides, tell):
    """The run's mesh, or, where there are not the devices it asks for, one with copies on all there are."""
    import jax

    from lmres.sharding import MeshConfig, make_mesh

    try:
        return make_mesh(config)
    except ValueError as error:
        if any(word.startswith("mesh.") for word in overrides):
            raise
        tell(f"the run's mesh does not fit here ({error}); using {jax.device_count()} copies")
        return make_mesh(MeshConfig())
