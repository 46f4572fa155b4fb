"""``lmres variants``: every residual connection, what it computes and what it costs."""

import dataclasses
import typing

from lmres.cli.errors import CommandError

_EXAMPLE = """lmres variants
lmres variants --depth 24 --width 768 --dtype bfloat16 --json"""
_LEGEND = """\
State, bytes moved and FLOPs: of one token's forward pass, summed over the depth, beyond the branches.
"plain at start": how close the logits are to those of the plain residual with the same weights before
training (at a norm eps of 1e-12)."""
HEADS = 4  # key/value heads, each of a quarter of the width, where a connection's cost depends on them
ITEMSIZE = {"float32": 4, "bfloat16": 2}


def add(commands) -> None:
    command = commands.add("variants", run, "list the residual connections", _EXAMPLE)
    command.add_argument(
        "--depth", type=int, default=12, metavar="L", help="sub-layers, an even number (%(default)s)"
    )
    command.add_argument(
        "--width", type=int, default=256, metavar="D", help="size of a residual stream (%(default)s)"
    )
    command.add_argument(
        "--dtype", choices=tuple(ITEMSIZE), default="float32", help="of the streams (%(default)s)"
    )


def presets() -> list:
    """Every member of ``Residual`` with options that are in use; one not named here with its defaults. Those that must
    know the model's heads are given 4 of a quarter of the width by ``described``."""
    from lmres.residual import (
        MHC,
        AttentionResiduals,
        DeepCrossAttention,
        DeepNorm,
        DeltaAttentionResiduals,
        DenseFormer,
        FracConnections,
        GeneralizedHyperConnections,
        HyperConnections,
        LAuReL,
        LIMe,
        MUDDFormer,
        Plain,
        Residual,
        ReZero,
        ValueResidual,
    )

    known = {
        Plain: [Plain(), Plain(norm="post"), Plain(norm="sandwich")],
        DenseFormer: [DenseFormer(), DenseFormer(dilation=4, period=5)],
        MUDDFormer: [MUDDFormer(), MUDDFormer(norm="prepost")],
        DeepCrossAttention: [DeepCrossAttention(version=v) for v in (1, 2, 3)],
        AttentionResiduals: [AttentionResiduals(), AttentionResiduals(block=4), AttentionResiduals(heads=4)],
        DeltaAttentionResiduals: [DeltaAttentionResiduals(), DeltaAttentionResiduals(block=4)],
        ValueResidual: [ValueResidual(mode=mode) for mode in ("fixed", "learned", "shared")],
        LIMe: [LIMe(), LIMe(start="identity")],
        HyperConnections: [HyperConnections(streams=n, dynamic=d) for d in (False, True) for n in (2, 4)],
        FracConnections: [FracConnections(dynamic=False), FracConnections()],
        GeneralizedHyperConnections: [
            GeneralizedHyperConnections(streams=3),
            GeneralizedHyperConnections(),
        ],
        MHC: [
            MHC(),
            MHC(constraint="permutations"),
            MHC(constraint="kronecker"),
            MHC(constraint="circulant"),
            MHC(constraint="identity"),
            MHC(reads="previous"),
        ],
        ReZero: [ReZero(), ReZero(norm="input")],
        DeepNorm: [DeepNorm(), DeepNorm(norm="input")],
        LAuReL: [
            LAuReL(),
            LAuReL(weights="none", rank=16),
            LAuReL(rank=16, previous=3),
            LAuReL(weights="gemma", rank=16),
        ],
    }
    return [spec for member in typing.get_args(Residual) for spec in known.get(member, [member()])]


def settings(connection) -> str:
    """What to write for a connection: ``residual.kind=...`` and the options that are off their defaults."""
    changed = [
        f"residual.{field.name}={str(value).lower() if isinstance(value, bool) else value}"
        for field in dataclasses.fields(connection)
        if field.name != "kind" and (value := getattr(connection, field.name)) != field.default
    ]
    return " ".join([f"residual.kind={connection.kind}", *changed])


def described(connection, depth: int, width: int, itemsize: int) -> dict:
    """One connection over ``depth`` sub-layers, as data; numbers per token where not said otherwise."""
    from lmres.residual import AppendOnly
    from lmres.testing import CHECKS

    units = depth if connection.unit == "sublayer" else depth // 2
    connection.check(units, width)
    cost = connection.fit(HEADS, max(width // HEADS, 1)).cost(units, width)
    return {
        "name": connection.name,
        "kind": connection.kind,
        "settings": settings(connection),
        "unit": connection.unit,
        "state": "growing" if isinstance(connection, AppendOnly) else "fixed",
        "equation": connection.equation,
        "source": connection.source,
        "parameters": cost.params,
        "state_bytes": round(cost.state * width * itemsize),
        "bytes": round(cost.moved * width * itemsize),
        "flops": cost.flops,
        "start_tolerance": connection.start_tolerance,
        "left_out": connection.left_out,
        "checks": [check for check in CHECKS if connection.has_matrix or check != "matrix"],
    }


def run(args) -> int:
    from lmres.cli import OK
    from lmres.cli.output import print_json, print_table

    if args.depth < 2 or args.depth % 2:
        raise CommandError(f"--depth {args.depth} must be an even number of sub-layers, 2 per block")
    if args.width < 1:
        raise CommandError(f"--width {args.width} must be at least 1")
    rows, refused = [], {}
    for connection in presets():
        try:
            rows.append(described(connection, args.depth, args.width, ITEMSIZE[args.dtype]))
        except ValueError as error:  # not with this depth or width
            refused[connection.name] = str(error)
    if args.json:
        from lmres.testing import CHECKS

        shape = {"depth": args.depth, "width": args.width, "dtype": args.dtype}
        checks = {name: check.description for name, check in CHECKS.items()}
        print_json({**shape, "variants": rows, "refused": refused, "checks": checks})
        return OK
    print_table(
        (
            "variant", "settings", "unit", "state", "parameters", "state bytes", "bytes", "FLOPs",
            "plain at start",
        ),
        [
            (
                r["name"], r["settings"], r["unit"], r["state"], f"{r['parameters']:,}",
                f"{r['state_bytes']:,}", f"{r['bytes']:,}", f"{r['flops']:,.0f}",
                "no" if r["start_tolerance"] is None else f"to {r['start_tolerance']:g}",
            )
            for r in rows
        ],
        left=4,
    )  # fmt: skip
    print()
    for kind in dict.fromkeys(r["kind"] for r in rows):
        first = next(r for r in rows if r["kind"] == kind)
        print(f"{kind}: {first['equation']}    {first['source']}")
    for kind, left_out in {r["kind"]: r["left_out"] for r in rows if r["left_out"]}.items():
        print(f"left out of {kind}: {left_out}")
    for name, reason in refused.items():
        print(f"not listed: {name}, {reason}")
    print(f"\n{args.depth} sub-layers of width {args.width} in {args.dtype}.\n{_LEGEND}")
    return OK
