"""jax, set up when a command runs and never on import: device, processes, compilation cache."""

import os
import sys
from pathlib import Path

from lmres.cli.errors import CommandError

# What jax calls the platform when it starts; the devices then say "gpu" again.
_PLATFORM = {"cpu": "cpu", "gpu": "cuda", "tpu": "tpu"}


def start(device: str | None = None, cache: str | None = "auto", distributed: bool = False) -> None:
    """Makes jax ready. Call it before anything is put on a device.

    device: "cpu", "gpu" or "tpu"; None for what JAX_PLATFORMS says, else the best there is.
    cache: folder of the compilation cache, "auto" or None; see ``train.compilation_cache``.
    distributed: join the other processes of the run.

    Raises CommandError when the device is not there, or the other processes cannot be found.
    """
    import jax

    before = jax.config.jax_platforms
    if device is not None:
        jax.config.update("jax_platforms", _PLATFORM[device])
    _use_cache(cache)
    if distributed:
        _join()
    try:
        found = jax.devices()[0].platform
    except (RuntimeError, AssertionError) as error:  # the latter where jax lacks the package for the device
        jax.config.update("jax_platforms", before)
        asked = f"--device {device}" if device else f"JAX_PLATFORMS={before}"
        why = str(error).splitlines()[0] if str(error) else f"jax {jax.__version__} was installed without it?"
        raise CommandError(f"{asked}: no such device here ({why})") from error
    if device is not None and found != device:  # jax was in use before this command
        jax.config.update("jax_platforms", before)
        raise CommandError(f"--device {device}: no such device here, found {found}")


def cache_folder(cache: str) -> Path:
    """The folder that ``train.compilation_cache`` means."""
    if cache != "auto":
        return Path(cache).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lmres" / "xla"


def _use_cache(cache: str | None) -> None:
    import jax

    if cache is None or jax.config.jax_compilation_cache_dir:  # JAX_COMPILATION_CACHE_DIR has the last word
        return
    jax.config.update("jax_compilation_cache_dir", str(cache_folder(cache)))
    # jax keeps what took a second or more; small models compile faster, but many times over.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _join() -> None:
    import jax

    if jax.distributed.is_initialized():
        return
    # Gloo, which connects processes on CPUs, prints to stdout, where results go: give it stderr.
    sys.stdout.flush()
    sys.stdout = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding)
    os.dup2(2, 1)
    count, index = (os.environ.get(f"JAX_{name}") for name in ("NUM_PROCESSES", "PROCESS_ID"))
    try:
        jax.distributed.initialize(
            num_processes=None if count is None else int(count),
            process_id=None if index is None else int(index),
        )
    except (ValueError, RuntimeError) as error:
        raise CommandError(
            f"--distributed: {str(error).splitlines()[0]} Outside of a TPU pod, Slurm, MPI and Kubernetes "
            "set JAX_COORDINATOR_ADDRESS (host:port of process 0), JAX_NUM_PROCESSES and JAX_PROCESS_ID"
        ) from error
