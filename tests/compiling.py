"""How programs are compiled in tests, as options of XLA.

Nearly all of them run once or twice, so most of the suite's time would go to making them fast: without optimisation,
each program given to LLVM as one piece, by the older of two generators, they are compiled in a third of that time.
"""

from importlib.metadata import version

QUICK = {"xla_backend_optimization_level": 0, "xla_cpu_parallel_codegen_split_count": 1}
AS_IN_USE = {"xla_backend_optimization_level": 3, "xla_cpu_parallel_codegen_split_count": 32}  # XLA's own choice
if tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11):  # later ones have one generator, and refuse the name
    QUICK["xla_cpu_use_fusion_emitters"] = False
    AS_IN_USE["xla_cpu_use_fusion_emitters"] = True


def flags(options: dict) -> str:
    """Options as ``XLA_FLAGS`` has them."""
    return " ".join(f"--{name}={str(value).lower()}" for name, value in options.items())
