"""Checkpoints: saved in the background, checked when read, and never trusted because they are the newest.

A checkpoint has two items: ``state``, the arrays, and ``meta``, JSON: what the caller says (position in the
data, resolved config, architecture) and, added here, the step, the version of lmres, and each array's shape,
type and digest.

What orbax does not do by itself and this file adds:

- an architecture that differs is refused with the list of differences, before anything is read;
- flipped bytes are found, by digests; a truncated or missing file is reported in one line;
- reading walks from the newest step to older ones, and training on deletes the damaged steps it walked over,
  since orbax would refuse every save up to them without a word;
- a save that orbax declines is an error; a background save that failed is one at the next save or on closing.

Nothing is saved on closing: whether a state is fit to be kept is for the caller to say.
"""

import contextlib
import dataclasses
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import SingleDeviceSharding

import lmres
from lmres.train.digest import digests, named
from lmres.train.fingerprint import CheckpointError, CheckpointMismatch, check_architecture, differences

Mode = Literal["new", "resume", "overwrite", "read"]

_LOG = logging.getLogger(__name__)


class FolderInUse(CheckpointError):
    """A new run was pointed at a folder that holds checkpoints."""


@dataclasses.dataclass(frozen=True)
class Skipped:
    """A step that could not be read, and why, in one line."""

    step: int
    reason: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.reason}"


@dataclasses.dataclass(frozen=True)
class Restored:
    """What was read.

    state: the whole state, or the parameters. skipped: newer steps, newest first.
    """

    step: int
    state: Any
    meta: dict[str, Any]
    skipped: tuple[Skipped, ...] = ()


class Checkpoints:
    """The checkpoints of one run, in one folder; a context manager. Leaving it waits for background saves.

    folder: holds one sub-folder per step, and nothing else.
    keep: number of newest checkpoints kept.
    mode: "new" refuses a folder that holds checkpoints; "resume" goes on in it; "overwrite" deletes them;
      "read" changes nothing, whatever it finds.
    digest: store a digest of every array.
    report: gets one line for every step that is skipped or deleted.

    All processes of a run must make the same calls.

    Raises FolderInUse in mode "new".
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        *,
        keep: int = 2,
        mode: Mode = "new",
        digest: bool = True,
        report: Callable[[str], None] = _LOG.warning,
    ):
        if keep < 1:
            raise ValueError(f"train.keep={keep} must be at least 1")
        text = os.fspath(folder)
        self.folder = text if "://" in text else str(Path(text).absolute())
        self._keep, self._mode, self._digest, self._report = keep, mode, digest, report
        if mode == "new":
            # Looked at without cleaning up, which would hit the unfinished saves of a run that is alive.
            with contextlib.closing(self._open(read_only=True)) as look:
                if look.all_steps():
                    raise FolderInUse(
                        f"{self.folder} holds checkpoints of another run (newest: step "
                        f"{max(look.all_steps())}); resume it, overwrite it, or choose another folder"
                    )
        self._manager = self._open(read_only=mode == "read")
        if mode == "overwrite":
            self._delete(self.steps())

    def _open(self, read_only: bool) -> ocp.CheckpointManager:
        options = ocp.CheckpointManagerOptions(
            preservation_policy=ocp.checkpoint_managers.LatestN(self._keep),
            save_decision_policy=ocp.checkpoint_managers.FixedIntervalPolicy(1),
            cleanup_tmp_directories=not read_only,
            create=not read_only,
            read_only=read_only,
        )
        handlers = {"state": ocp.PyTreeCheckpointHandler(), "meta": ocp.JsonCheckpointHandler()}
        return ocp.CheckpointManager(self.folder, options=options, item_handlers=handlers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def save(self, step: int, state: Any, meta: dict[str, Any]) -> None:
        """Starts saving ``state`` in the background; it may be donated as soon as this returns.

        step: number of updates done; above every step in the folder. state: pytree of arrays. meta: JSON.

        Raises CheckpointError when an earlier background save failed, or this one was declined.
        """
        self.wait()
        sums = digests(state) if self._digest else {}
        arrays = {
            name: {"shape": list(x.shape), "dtype": str(x.dtype)} | ({"digest": sums[name]} if sums else {})
            for name, x in named(state)
        }
        meta = {**meta, "step": step, "lmres": lmres.__version__, "arrays": arrays}
        args = ocp.args.Composite(state=ocp.args.PyTreeSave(state), meta=ocp.args.JsonSave(meta))
        if not self._manager.save(step, args=args):
            why = "open for reading only" if self._mode == "read" else f"already at step {max(self.steps())}"
            raise CheckpointError(f"step {step} was not saved: {self.folder} is {why}")

    def wait(self) -> None:
        """Waits for the background save. Raises CheckpointError when it failed."""
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            text = f"saving in the background to {self.folder} failed: {_reason(error)}"
            raise CheckpointError(text) from error

    def close(self) -> None:
        """Waits for the background save and ends. Raises CheckpointError when the save failed."""
        try:
            self.wait()
        finally:
            self._manager.close()

    def reached_preemption(self, step: int) -> bool:
        """Whether all processes were told, at this step, that the run is to be stopped."""
        return self._manager.reached_preemption(step)

    def discard_after(self, step: int) -> None:
        """Deletes the checkpoints above ``step``, so that training can go on from it: saves only go up."""
        self.wait()
        self._delete([newer for newer in self.steps() if newer > step])

    # What is there

    def steps(self) -> list[int]:
        """Steps in the folder, oldest first, unfinished and damaged ones included."""
        return sorted(self._manager.all_steps(read=True))

    def latest_step(self) -> int | None:
        """The newest complete step: its ``meta`` and list of arrays can be read. None without one."""
        for step in reversed(self.steps()):
            if self._try(lambda step=step: self._complete_meta(step))[1] is None:
                return step
        return None

    def meta(self, step: int | None = None) -> dict[str, Any]:
        """``meta`` of ``step``, else of the newest complete step. Raises CheckpointError without one."""
        step = self.latest_step() if step is None else step
        if step is None:
            raise CheckpointError(f"no complete checkpoint in {self.folder} (steps there: {self.steps()})")
        found, reason = self._try(lambda: self._complete_meta(step))
        if reason is not None:
            raise CheckpointError(f"{self.folder}: step {step}: {reason}")
        return found

    def inspect(self, verify: bool = True) -> list[dict[str, Any]]:
        """One row per step, oldest first; needs one device, and nothing of the mesh it was saved from.

        Rows: {"step", "problem" (None, or one line), "meta", "arrays", "parameters"}. verify: read every
        array onto the first device, one step at a time, and check its digest.
        """
        rows = []
        for step in self.steps():
            meta, problem = self._try(lambda step=step: self._complete_meta(step))
            row = {"step": step, "problem": problem, "meta": meta, "arrays": 0, "parameters": 0}
            if problem is None:
                arrays = meta["arrays"]
                sizes = [math.prod(arrays[name]["shape"]) for name in arrays if name.startswith("params/")]
                row |= {"arrays": len(arrays), "parameters": sum(sizes)}
                if verify:
                    _, row["problem"] = self._try(lambda step=step, meta=meta: self._read_raw(step, meta))
            rows.append(row)
        return rows

    # Reading

    def restore(
        self, target: Any, *, architecture: dict[str, Any] | None = None, step: int | None = None
    ) -> Restored:
        """The newest state that can be read, or that of ``step``.

        target: the state's tree of ShapeDtypeStructs with shardings, of any mesh and number of devices.
        architecture: from ``architecture()``; compared with the stored one first.

        Damaged steps are reported, and, unless the mode is "read", deleted after an older one was read.

        Raises CheckpointMismatch if architecture or arrays differ, CheckpointError if nothing can be read.
        """
        return self._walk(step, architecture, lambda step, meta: self._read(step, meta, target, ""))

    def restore_params(
        self, target: Any = None, *, architecture: dict[str, Any] | None = None, step: int | None = None
    ) -> Restored:
        """The parameters alone (``state["params"]``), to evaluate, generate or fine-tune. Deletes nothing.

        target: tree of ShapeDtypeStructs; another floating type than the stored one is a cast after reading.
          None puts all of them on the first device, as stored.

        Raises as ``restore`` does.
        """

        def read(step, meta):
            wanted = _on_one_device(meta, "params/") if target is None else target
            return self._read(step, meta, wanted, "params/")

        return self._walk(step, architecture, read, delete=False)

    def _walk(self, step, architecture, read, delete=True) -> Restored:
        self.wait()
        skipped: list[Skipped] = []
        with _without_closed_loop_noise():
            for candidate in reversed(self.steps()) if step is None else [step]:
                meta, reason = self._try(lambda c=candidate: self._complete_meta(c))
                if reason is None:
                    if architecture is not None:
                        check_architecture(meta, architecture)
                    state, reason = self._try(lambda c=candidate, m=meta: read(c, m))
                if reason is None:
                    for bad in skipped:
                        self._report(f"checkpoint of {bad}; using step {candidate}")
                    if delete and self._mode != "read":
                        self._delete([bad.step for bad in skipped])
                    return Restored(candidate, state, meta, tuple(skipped))
                skipped.append(Skipped(candidate, reason))
        reasons = "; ".join(map(str, skipped)) or "the folder holds none"
        raise CheckpointError(f"no checkpoint in {self.folder} can be read: {reasons}")

    def _try(self, f: Callable[[], Any]) -> tuple[Any, str | None]:
        """(f(), None), or (None, why the files are damaged), the same on all processes."""
        found, reason = None, None
        try:
            found = f()
        except (CheckpointMismatch, MemoryError, PermissionError, jax.errors.JaxRuntimeError):
            raise  # says nothing about the files: an older step would fare no better, this one may be good
        except Exception as error:  # orbax raises anything, bare Exception included
            reason = _reason(error)
        if jax.process_count() > 1:
            good = multihost_utils.process_allgather(np.asarray(reason is None))
            if reason is None and not good.all():
                found, reason = None, f"process {int(np.argmin(good))} could not read it"
        return found, reason

    def _complete_meta(self, step: int) -> dict[str, Any]:
        meta = self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]
        if not isinstance(meta, dict) or "arrays" not in meta or meta.get("step") != step:
            raise ValueError("meta is not what lmres wrote")
        if self._manager.item_metadata(step)["state"] is None:
            raise ValueError("the list of arrays is missing")
        return meta

    def _read(self, step: int, meta: dict[str, Any], target: Any, prefix: str) -> Any:
        """The part of the state whose paths start with ``prefix``, as ``target``, checked by its digests."""
        stored = {n: a for n, a in meta["arrays"].items() if n.startswith(prefix)}
        wanted = {prefix + name: x for name, x in named(target)}
        cast = {n for n, x in wanted.items() if n in stored and _castable(stored[n]["dtype"], x.dtype)}
        cast = cast if prefix else set()  # a training state is resumed as it was
        found = differences(
            {n: _told(a["shape"], a["dtype"]) for n, a in stored.items()},
            {n: _told(x.shape, stored[n]["dtype"] if n in cast else x.dtype) for n, x in wanted.items()},
        )
        if found:
            raise CheckpointMismatch(f"checkpoint of step {step} holds other arrays", found)

        def as_stored(path, x):
            name = prefix + jax.tree_util.keystr(path, simple=True, separator="/")
            dtype = jnp.dtype(stored[name]["dtype"]) if name in cast else x.dtype
            return jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding or _first_device())

        tree = jax.tree_util.tree_map_with_path(as_stored, target)
        tree = {"params": tree} if prefix else tree
        read = self._manager.restore(
            step,
            args=ocp.args.Composite(
                state=ocp.args.PyTreeRestore(
                    tree,
                    restore_args=ocp.checkpoint_utils.construct_restore_args(tree),
                    partial_restore=bool(prefix),
                )
            ),
        )["state"]
        _check_digests(read, stored)
        read = read["params"] if prefix else read
        return jax.tree.map(lambda x, t: x if x.dtype == t.dtype else x.astype(t.dtype), read, target)

    def _read_raw(self, step: int, meta: dict[str, Any]) -> None:
        """Reads and checks every array, without knowing the tree that the state was."""
        tree = self._manager.item_metadata(step)["state"].tree
        one = ocp.ArrayRestoreArgs(sharding=_first_device())
        restore_args = jax.tree.map(lambda _: one, tree)
        args = ocp.args.Composite(state=ocp.args.PyTreeRestore(restore_args=restore_args))
        with _without_closed_loop_noise():
            _check_digests(self._manager.restore(step, args=args)["state"], meta["arrays"])

    def _delete(self, steps: list[int]) -> None:
        for step in steps:
            self._manager.delete(step)
            self._report(f"deleted the checkpoint of step {step} in {self.folder}")


def _told(shape: Any, dtype: Any) -> str:
    return f"{dtype}{list(shape)}"


def _castable(stored: str, wanted: Any) -> bool:
    return stored != str(wanted) and all(jnp.issubdtype(jnp.dtype(d), jnp.floating) for d in (stored, wanted))


def _first_device() -> SingleDeviceSharding:
    return SingleDeviceSharding(jax.local_devices()[0])


def _on_one_device(meta: dict[str, Any], prefix: str) -> dict[str, Any]:
    """ShapeDtypeStructs on the first device for the stored arrays whose paths start with ``prefix``."""
    tree: dict[str, Any] = {}
    for name, array in meta["arrays"].items():
        if name.startswith(prefix):
            *parents, last = name.removeprefix(prefix).split("/")
            node = tree
            for parent in parents:
                node = node.setdefault(parent, {})
            shape, dtype = tuple(array["shape"]), jnp.dtype(array["dtype"])
            node[last] = jax.ShapeDtypeStruct(shape, dtype, sharding=_first_device())
    return tree


def _check_digests(read: Any, stored: dict[str, dict[str, Any]]) -> None:
    if not any("digest" in array for array in stored.values()):
        return
    found = digests(read)
    bad = [name for name, array in stored.items() if found[name] != array["digest"]]
    if bad:
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        raise ValueError(f"array {bad[0]}{more} differs from its digest: bytes changed since it was saved")


def _reason(error: BaseException) -> str:
    """One line for an error: the innermost cause, which is the one that names a file."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:197] + '...' if len(text) > 200 else text}"


@contextlib.contextmanager
def _without_closed_loop_noise() -> Iterator[None]:
    """Drops the traceback that each read still under way prints after the first one of them has failed.

    The failure itself is raised and reported; these say only that nobody waits for the others any more.
    """
    before = sys.unraisablehook

    def hook(unraisable):
        if not (unraisable.exc_type is RuntimeError and str(unraisable.exc_value) == "Event loop is closed"):
            before(unraisable)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before
