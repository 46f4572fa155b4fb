"""The list of all keys, for help texts and documentation."""

import dataclasses
import json
import re
from typing import NamedTuple

from lmres.config.schema import RunConfig, describe, hints, sections


class Row(NamedTuple):
    """One key of the config, as text. when: the kind it belongs to, such as "residual.kind=mhc", or ""."""

    key: str
    type: str
    default: str
    doc: str
    when: str = ""


def field_table() -> list[Row]:
    """Every key of the config with its type, default and documentation, from the rooms' own docstrings."""
    own = _docs(RunConfig)
    rows = [Row("name", describe(hints(RunConfig)["name"]), "null", own["name"])]
    for name, section in sections().items():
        if section.tagged:
            summaries = [
                f"{kind}: {c.__doc__.strip().splitlines()[0]}" for kind, c in section.classes.items()
            ]
            kinds = "one of " + ", ".join(section.classes)
            rows.append(Row(f"{name}.kind", kinds, section.default.kind, " ".join(summaries)))
        for kind, cls in section.classes.items():
            docs, types_ = _docs(cls), hints(cls)
            when = f"{name}.kind={kind}" if kind else ""
            for field in dataclasses.fields(cls):
                if section.tagged and field.name == "kind":
                    continue
                default = json.dumps(field.default) if not isinstance(field.default, str) else field.default
                rows.append(
                    Row(f"{name}.{field.name}", describe(types_[field.name]), default, docs[field.name], when)
                )
    return rows


def _docs(cls: type) -> dict[str, str]:
    """Documentation by field: text after "key:" or "key, key:", at the start of a line or a sentence.

    Fields that a base class brings are documented there.
    """
    bases = [base for base in cls.__mro__[1:] if dataclasses.is_dataclass(base)]
    docs = _docs(bases[0]) if bases else {}
    for base in bases[1:]:
        docs = _docs(base) | docs
    names = "|".join(field.name for field in dataclasses.fields(cls))
    if not names:
        return docs
    starts = list(
        re.finditer(rf"(?:^[ ]*|[.;][ ])((?:(?:{names}), )*(?:{names})): ", cls.__doc__, re.MULTILINE)
    )
    for start, end in zip(starts, [*(s.start() for s in starts[1:]), None]):
        text = " ".join(cls.__doc__[start.end() : end].split("\n\n")[0].split())
        docs |= dict.fromkeys(start.group(1).split(", "), text)
    # A key may also be explained by one that goes with it, which then names it as ``key``.
    named = {name: key for key, text in docs.items() for name in re.findall(r"``(\w+)``", text)}
    return {name: f"see {key}" for name, key in named.items() if name in hints(cls)} | docs
