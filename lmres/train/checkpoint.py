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
from typing import Any, Literal, Self

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

import lmres
from lmres.data.errors import DataError
from lmres.data.files import as_path, is_remote
from lmres.train.digest import digests, named
from lmres.train.fingerprint import (
    CheckpointError,
    CheckpointMismatch,
    as_stored,
    check_architecture,
    first_device,
    on_one_device,
)

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


@contextlib.contextmanager
def _without_closed_loop_noise() -> Iterator[None]:
    """Drops the traceback that each read still under way prints after the first one of them has failed.

    The failure itself is raised and reported; these say only that nobody waits for the others any more, and
    come some time later.
    """
    before = sys.unraisablehook

    def hook(unraisable):
        if not (unraisable.exc_type is RuntimeError and str(unraisable.exc_value) == "Event loop is closed"):
            before(unraisable)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        if sys.unraisablehook is hook:
            sys.unraisablehook = before


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
        # orbax writes to s3:// as if it were a local folder of that name: refused, not tried.
        try:
            path = as_path(folder, "checkpoints", schemes=("gs",))
        except DataError as error:
            raise CheckpointError(str(error)) from error
        self.folder = str(path if is_remote(folder) else path.absolute())
        self._digest, self._report = digest, report
        # The reader never waits for other processes: one alone may find a file damaged, and must be able to
        # say so before the others go on. It changes nothing in the folder.
        alone = jax.process_index()
        self._reader = self._open(
            create=False,
            multiprocessing_options=ocp.options.MultiprocessingOptions(
                primary_host=alone, active_processes={alone}, barrier_sync_key_prefix=f"reader{alone}"
            ),
        )
        self._writer = None
        if mode == "new" and self.steps():
            self._reader.close()
            raise _in_use(self.folder, self.steps())
        if mode != "read":
            self._writer = self._open(
                cleanup_tmp_directories=True,
                preservation_policy=ocp.checkpoint_managers.LatestN(keep),
                save_decision_policy=ocp.checkpoint_managers.FixedIntervalPolicy(1),
            )
        if mode == "overwrite":
            self._delete(self.steps())
        self._exit = contextlib.ExitStack()
        self._exit.enter_context(_without_closed_loop_noise())

    def _open(self, **options: Any) -> ocp.CheckpointManager:
        handlers = {"state": ocp.PyTreeCheckpointHandler(), "meta": ocp.JsonCheckpointHandler()}
        options = ocp.CheckpointManagerOptions(**options)
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
        if self._writer is None:
            raise CheckpointError(f"step {step} was not saved: {self.folder} is open for reading only")
        self.wait()
        sums = digests(state) if self._digest else {}
        arrays = {
            name: {"shape": list(x.shape), "dtype": str(x.dtype)} | ({"digest": sums[name]} if sums else {})
            for name, x in named(state)
        }
        meta = {**meta, "step": step, "lmres": lmres.__version__, "arrays": arrays}
        args = ocp.args.Composite(state=ocp.args.PyTreeSave(state), meta=ocp.args.JsonSave(meta))
        if not self._writer.save(step, args=args):
            raise CheckpointError(
                f"step {step} was not saved: {self.folder} is already at step {max(self.steps())}"
            )

    def wait(self) -> None:
        """Waits for the background save. Raises CheckpointError when it failed."""
        if self._writer is None:
            return
        try:
            self._writer.wait_until_finished()
        except Exception as error:
            text = f"saving in the background to {self.folder} failed: {_reason(error)}"
            raise CheckpointError(text) from error

    def close(self) -> None:
        """Waits for the background save and ends. Raises CheckpointError when the save failed."""
        try:
            self.wait()
        finally:
            self._exit.close()
            self._reader.close()
            if self._writer is not None:
                self._writer.close()

    def discard_after(self, step: int) -> None:
        """Deletes the checkpoints above ``step``, so that training can go on from it: saves only go up."""
        if self._writer is None:
            raise CheckpointError(f"nothing was deleted: {self.folder} is open for reading only")
        self.wait()
        self._delete([newer for newer in self.steps() if newer > step])

    # What is there

    def steps(self) -> list[int]:
        """Steps in the folder, oldest first, unfinished and damaged ones included."""
        self._reader.reload()
        return sorted(self._reader.all_steps())

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
                    state, row["problem"] = self._try(lambda step=step: self._read(step, None))
                    row["problem"] = row["problem"] or _digest_problem(state, arrays)
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
        return self._walk(target, architecture, step, "", delete=self._writer is not None)

    def restore_params(
        self, target: Any = None, *, architecture: dict[str, Any] | None = None, step: int | None = None
    ) -> Restored:
        """The parameters alone (``state["params"]``), to evaluate, generate or fine-tune. Deletes nothing.

        target: tree of ShapeDtypeStructs; another floating type than the stored one is a cast after reading.
          None puts all of them on the first device, as stored.

        Raises as ``restore`` does.
        """

        return self._walk(target, architecture, step, "params/", delete=False)

    def _walk(self, target: Any, architecture: Any, step: int | None, prefix: str, delete: bool) -> Restored:
        """From the newest step to older ones, or ``step`` alone: arrays whose paths start with ``prefix``."""
        self.wait()
        skipped: list[Skipped] = []
        for candidate in reversed(self.steps()) if step is None else [step]:
            meta, reason = self._try(lambda c=candidate: self._complete_meta(c))
            if reason is None:
                if architecture is not None:
                    check_architecture(meta, architecture)
                wanted = on_one_device(meta, prefix) if target is None else target
                tree = as_stored(meta, wanted, prefix, cast=bool(prefix))
                state, reason = self._try(lambda c=candidate, t=tree: self._read(c, t))
            if reason is None:
                reason = _digest_problem(state, meta["arrays"])
            if reason is None:
                for bad in skipped:
                    self._report(f"checkpoint of {bad}; using step {candidate}")
                if delete:
                    self._delete([bad.step for bad in skipped])
                state = state["params"] if prefix else state
                state = jax.tree.map(
                    lambda x, w: x if x.dtype == w.dtype else x.astype(w.dtype), state, wanted
                )
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
        meta = self._reader.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]
        if not isinstance(meta, dict) or "arrays" not in meta or meta.get("step") != step:
            raise ValueError("meta is not what lmres wrote")
        if self._reader.item_metadata(step)["state"] is None:
            raise ValueError("the list of arrays is missing")
        return meta

    def _read(self, step: int, tree: Any) -> Any:
        """The part of the state that ``tree`` of ShapeDtypeStructs names; None: all, on the first device."""
        if tree is None:  # the tree that the state was is not known: orbax makes one of dicts and lists
            stored = self._reader.item_metadata(step)["state"].tree
            how = jax.tree.map(lambda _: ocp.ArrayRestoreArgs(sharding=first_device()), stored)
            args = ocp.args.PyTreeRestore(restore_args=how)
        else:
            how = ocp.checkpoint_utils.construct_restore_args(tree)
            args = ocp.args.PyTreeRestore(tree, restore_args=how, partial_restore=True)
        return self._reader.restore(step, args=ocp.args.Composite(state=args))["state"]

    def _delete(self, steps: list[int]) -> None:
        if jax.process_count() > 1:  # no process may delete what another is still making its list of
            multihost_utils.sync_global_devices("lmres: delete checkpoints")
        for step in steps:
            self._writer.delete(step)
            self._report(f"deleted the checkpoint of step {step} in {self.folder}")


def refuse_used(folder: str | os.PathLike) -> None:
    """Raises FolderInUse if ``folder`` holds checkpoints; changes nothing."""
    with Checkpoints(folder, mode="read") as there:
        if there.steps():
            raise _in_use(there.folder, there.steps())


def _in_use(folder: str, steps: list[int]) -> FolderInUse:
    return FolderInUse(
        f"{folder} holds checkpoints of a run (newest: step {max(steps)}); "
        "go on with it (--resume), replace it (--overwrite), or choose another folder (--folder)"
    )


def _digest_problem(state: Any, arrays: dict[str, dict[str, Any]]) -> str | None:
    """One line when arrays of ``state``, as stored, differ from their digests; None if all is well."""
    found = {name: value for name, value in digests(state).items() if "digest" in arrays[name]}
    bad = [name for name, value in found.items() if value != arrays[name]["digest"]]
    if not bad:
        return None
    more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
    return f"array {bad[0]}{more} differs from its digest: bytes changed since it was saved"


def _reason(error: BaseException) -> str:
    """One line for an error: the innermost cause, which is the one that names a file."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:197] + '...' if len(text) > 200 else text}"
