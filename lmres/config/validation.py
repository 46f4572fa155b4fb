"""Raw nested values, as read from YAML or JSON, to config objects: pydantic decides, this file words what it
finds.

Types are strict: "3" is not 3 and true is not 1 (an integer does for a number). Every problem is one line:
the place, the key, what was expected, what was found, and the name that was probably meant.
"""

import dataclasses
import functools
import json
import math
import re
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import pydantic

from lmres.config.checks import check_flow
from lmres.config.errors import ConfigError, nearest, shown
from lmres.config.schema import Path, RunConfig, Section, describe, hints, members, sections


@functools.cache
def _adapter(cls: type) -> pydantic.TypeAdapter:
    return pydantic.TypeAdapter(cls)


def validate(
    values: Mapping[str, Any], cls: type = RunConfig, where: Mapping[Path, str] | None = None
) -> Any:
    """``cls`` from nested plain values, as read from YAML or JSON.

    where: for a path such as ("model", "width"), what stands before a message about it; see ``reading.Tree``.
    Raises ConfigError with a line for every problem.
    """
    where, problems = where or {}, []

    def add(path: Path, message: str) -> None:
        place = next((where[path[:n]] for n in range(len(path), 0, -1) if path[:n] in where), "")
        problems.append(f"{place}: {message}" if place else message)

    values = dict(values)
    for name, section in sections(cls).items():  # a tagged section without a kind is of the default's kind
        if section.tagged and isinstance(values.get(name), dict):
            values[name] = {"kind": section.default.kind, **values[name]}
    for path, value in _leaves(values):  # JSON has no word for these, and nan would differ from itself
        if isinstance(value, float) and not math.isfinite(value):
            add(path, f"{'.'.join(path)}: expected a finite number, found {value}")
    try:
        # JSON mode: in Python mode "strict" would want tuples and instances, which no file can hold.
        result = _adapter(cls).validate_json(json.dumps(values), strict=True)
    except pydantic.ValidationError as error:
        seen = set()
        for item in error.errors(include_url=False):
            path = _key_path(cls, item["loc"])
            # The members of a union each report; so do the entries of a list. One line per key is enough.
            if path not in seen:
                add(*_explain(cls, values, path, item))
            seen.add(path)
        raise ConfigError(problems) from None
    if not problems and isinstance(result, RunConfig):
        try:
            check_flow(result)
        except ValueError as error:
            add(_named(str(error)) or ("flow",), str(error))
    if problems:
        raise ConfigError(problems)
    return result


def _leaves(values: Mapping[str, Any], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*path, key))
        else:
            for item in value if isinstance(value, list) else [value]:
                yield (*path, key), item


def _key_path(cls: type, loc: tuple[Any, ...]) -> Path:
    """(section, key) from pydantic's location, which also names the kind and the members of unions."""
    loc = tuple(str(part) for part in loc)
    section = sections(cls).get(loc[0])
    if section is not None and section.tagged and len(loc) > 1:
        loc = (loc[0], *loc[2:])
    return loc[:2] if section is not None else loc[:1]


def _explain(cls: type, values: Mapping[str, Any], path: Path, item: dict[str, Any]) -> tuple[Path, str]:
    """(path to point at, message) for one of pydantic's errors."""
    name, key = path[0], ".".join(path)
    section = sections(cls).get(name)
    if item["type"] == "value_error":  # raised by a room's own __post_init__, which names the key
        message = str(item["ctx"]["error"])
        return _named(message) or path, message
    if item["type"] == "unexpected_keyword_argument":
        return path, _unknown(cls, values, path)
    if section is None:
        return path, f"{key}: expected {describe(hints(cls)[name])}, found {shown(values[name])}"
    if item["type"].startswith("union_tag"):
        kind = values[name]["kind"]
        kinds = tuple(section.classes)
        return (
            (name, "kind"),
            f"{key}.kind: expected one of {', '.join(kinds)}, found {shown(kind)}{nearest(kind, kinds)}",
        )
    if len(path) == 1:
        keys = ", ".join(hints(next(iter(section.classes.values()))))
        hint = f"such as {name}.kind" if section.tagged else f"of {keys}"
        return path, f"{key}: expected a section (a mapping {hint}), found {shown(values[name])}"
    annotation = hints(_class_of(section, values[name]))[path[1]]
    value = values[name][path[1]]
    choices = [c for a in members(annotation) if typing.get_origin(a) is Literal for c in typing.get_args(a)]
    choices = [c for c in choices if isinstance(c, str)]
    hint = nearest(value, choices) if isinstance(value, str) else ""
    return path, f"{key}: expected {describe(annotation)}, found {shown(value)}{hint}"


def _named(message: str) -> Path | None:
    """The key that a message begins with."""
    named = re.match(r"(\w+)\.(\w+)", message)
    return named.groups() if named else None


def _class_of(section: Section, values: Mapping[str, Any]) -> type:
    return section.classes[values["kind"] if section.tagged else ""]


def _unknown(cls: type, values: Mapping[str, Any], path: Path) -> str:
    known = sections(cls)
    if len(path) == 1:
        (name,) = path
        if name == "compare":
            return "compare: this file is a comparison, not a single run; use it with `lmres compare`"
        names = tuple(field.name for field in dataclasses.fields(cls))
        inside = [
            f"{s}.{name}"
            for s, section in known.items()
            for c in section.classes.values()
            if name in hints(c)
        ]
        hint = nearest(name, names) or (f"; did you mean {inside[0]!r}?" if inside else "")
        return f"{name}: unknown section{hint} (sections: {', '.join(names)})"
    name, key = path
    section = known[name]
    keys = tuple(hints(_class_of(section, values[name])))
    message = f"{name}.{key}: unknown key"
    if section.tagged:
        message += f" of {name}.kind={values[name]['kind']}"
        others = [kind for kind, c in section.classes.items() if key in hints(c)]
        if others:
            return f"{message}; it belongs to {name}.kind={' or '.join(others)} (keys: {', '.join(keys)})"
    elsewhere = [
        f"{s}.{key}" for s, other in known.items() for c in other.classes.values() if key in hints(c)
    ]
    hint = nearest(key, keys) or (f"; did you mean {elsewhere[0]!r}?" if elsewhere else "")
    return f"{message}{hint} (keys: {', '.join(keys)})"
