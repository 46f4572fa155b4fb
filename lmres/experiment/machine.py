"""What a measurement was made on and with."""

import os
import platform
from importlib import metadata
from typing import Any

import jax

from lmres import __version__


def machine(devices: list[Any]) -> dict[str, str]:
    """What ran it."""
    return {
        "devices": f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})",
        "processes": f"{jax.process_count()}",
        "cpus": f"{os.cpu_count()} ({platform.machine()})",
        "system": platform.platform(),
    }


def versions() -> dict[str, str]:
    """Of the packages that numbers depend on."""
    names = ("jax", "jaxlib", "flax", "optax", "numpy")
    return {
        "lmres": __version__,
        "python": platform.python_version(),
        **{n: metadata.version(n) for n in names},
    }
