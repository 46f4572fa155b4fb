"""YAML files and ``section.key=value`` overrides to nested plain values that remember where they came from.

The YAML is that of the safe loader with the scalars of YAML 1.2, since the rules of 1.1 surprise: ``3e-3`` is
a number here, ``no`` and ``12:30`` are text. A dotted key stands for a nested one. Keys that occur twice are
refused.
"""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path as FilePath
from typing import Any

import yaml

from lmres.config.errors import ConfigError
from lmres.config.schema import Path, sections

_TAG = "tag:yaml.org,2002:"
_INT = re.compile(r"[-+]?[0-9][0-9_]*$|0x[0-9a-fA-F_]+$|0o[0-7_]+$")
_FLOAT = re.compile(
    r"(?:[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)


class _Loader(yaml.SafeLoader):
    """The safe loader, up to the nodes; values are made in ``_Reader``."""

    yaml_implicit_resolvers: dict = {}  # noqa: RUF012 - replaces the table of YAML 1.1


class Dumper(yaml.SafeDumper):
    """Writes what this room reads, with quotes wherever either version of YAML would not see text."""


_Loader.add_implicit_resolver(_TAG + "null", re.compile(r"(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_Loader.add_implicit_resolver(
    _TAG + "bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
for _class in (_Loader, Dumper):
    _class.add_implicit_resolver(_TAG + "int", _INT, list("-+0123456789"))
    _class.add_implicit_resolver(_TAG + "float", _FLOAT, list("-+.0123456789"))
# PyYAML writes U+0085 as it stands, and reads it back as a line break; in double quotes it is escaped.
Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(_TAG + "str", text, style='"' if "\x85" in text else None),
)


@dataclasses.dataclass
class Tree:
    """Nested plain values, and the place of each.

    where: path -> "file:line:column" or "override 'model.width=3'".
    problems: lines about what could not be read; the values hold all the rest.
    """

    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    where: dict[Path, str] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)


def merge(base: Tree, over: Tree, new_kinds: bool = True) -> Tree:
    """``base`` with the values of ``over`` in it.

    new_kinds: when ``over`` gives a tagged section another kind, the options of the old kind are dropped.
    """

    problems = base.problems + over.problems

    def join(old: Any, new: Any, path: Path) -> Any:
        if not isinstance(new, dict):
            return new
        if not isinstance(old, dict):
            if isinstance(old, list):
                problems.append(
                    f"{over.where[path]}: {'.'.join(path)} is a list, which is replaced only as a whole"
                )
            # A malformed section stays, to be reported.
            return old if isinstance(old, list) or (len(path) == 1 and old is not None) else new
        section = sections().get(path[0]) if new_kinds and len(path) == 1 else None
        if section is not None and section.tagged:
            default = section.default.kind
            if "kind" in new and new["kind"] != old.get("kind", default):
                old = {}
        return {**old, **{k: join(old.get(k), v, (*path, k)) for k, v in new.items()}}

    values = {**base.values, **{k: join(base.values.get(k), v, (k,)) for k, v in over.values.items()}}
    # A section stays where the file has it, when only a key of it is overridden.
    moved = {
        path: where
        for path, where in over.where.items()
        if len(path) != 1 or path not in base.where or not isinstance(over.values.get(path[0]), dict)
    }
    return Tree(values, base.where | moved, problems)


class _Reader:
    """Makes plain values from YAML nodes. source: what stands before ":line:column"."""

    def __init__(self, tree: Tree, source: str, lines: bool = True):
        self.tree, self.source, self.lines = tree, source, lines
        self.open: list[yaml.Node] = []

    def at(self, mark: Any) -> str:
        return f"{self.source}:{mark.line + 1}:{mark.column + 1}" if self.lines and mark else self.source

    def problem(self, mark: Any, message: str) -> None:
        self.tree.problems.append(f"{self.at(mark)}: {message}")

    def value(self, node: yaml.Node, path: Path) -> Any:
        if any(node is outer for outer in self.open):
            self.problem(node.start_mark, f"{'.'.join(path)}: an alias (*) stands inside what it repeats")
            return None
        self.open.append(node)
        if isinstance(node, yaml.MappingNode):
            result: Any = self.mapping(node, path)
        elif isinstance(node, yaml.SequenceNode):
            result = [self.value(item, (*path, str(i))) for i, item in enumerate(node.value)]
        else:
            result = self.scalar(node, path)
        self.open.pop()
        self.tree.where[path] = self.at(node.start_mark)
        return result

    def mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != _TAG + "str":
                self.problem(
                    key_node.start_mark, f"keys must be text, found {getattr(key_node, 'value', 'a list')!r}"
                )
                continue
            # Names of variants are free text; all other dots separate.
            key = (key_node.value,) if path == ("compare", "variants") else tuple(key_node.value.split("."))
            inner = result
            for n, part in enumerate(key[:-1], 1):
                inner = inner.setdefault(part, {})
                self.tree.where.setdefault((*path, *key[:n]), self.at(key_node.start_mark))
                if not isinstance(inner, dict):
                    break
            full = (*path, *key)
            if not isinstance(inner, dict) or key[-1] in inner:
                first = self.tree.where.get(full, "above")
                self.problem(key_node.start_mark, f"{'.'.join(full)}: given twice (first at {first})")
                continue
            inner[key[-1]] = self.value(value_node, full)
            if not self.lines or value_node.start_mark.line != key_node.start_mark.line:
                self.tree.where[full] = self.at(key_node.start_mark)
        return result

    def scalar(self, node: yaml.ScalarNode, path: Path) -> Any:
        text, kind = node.value, node.tag.removeprefix(_TAG)
        try:
            if kind == "null":
                return None
            if kind == "bool":
                return {"true": True, "false": False}[text.lower()]
            if kind == "int":
                return int(text, 0) if text[:2] in ("0x", "0o") else int(text)
            if kind == "float":
                return float(re.sub(r"^([-+]?)\.(inf|nan)$", r"\1\2", text.lower()).replace("_", ""))
        except (ValueError, KeyError):
            kind = f"{kind} {text!r}"
        if kind != "str":
            self.problem(node.start_mark, f"{'.'.join(path)}: cannot read YAML tag {kind}")
        return text


def _parse(text: str, source: str, lines: bool = True, path: Path = ()) -> tuple[Any, Tree]:
    """The value of one YAML document and a tree with its places and problems."""
    tree = Tree()
    reader = _Reader(tree, source, lines)
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        reader.problem(error.problem_mark, f"malformed YAML: {error.problem or error.context}")
        return None, tree
    except yaml.reader.ReaderError as error:
        line, column = (
            text.count("\n", 0, error.position),
            error.position - text.rfind("\n", 0, error.position) - 1,
        )
        reader.problem(
            yaml.Mark("", 0, line, column, None, None), f"malformed YAML: character {error.character:#x}"
        )
        return None, tree
    return (None if node is None else reader.value(node, path)), tree


def read_file(path: str | FilePath, outer: tuple[FilePath, ...] = ()) -> Tree:
    """A config file, on top of the files it names under ``include`` (relative to itself).

    Problems are collected in the tree. Raises ConfigError when there is no such file.
    """
    path = FilePath(path) if isinstance(path, str) else path  # or one of etils, on an object store
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError([f"{path}: {error.strerror or error}"]) from None
    except UnicodeDecodeError as error:
        return Tree(problems=[f"{path}: not UTF-8 text (byte {error.start})"])
    values, tree = _parse(text, str(path))
    if tree.problems and values is None:
        return tree
    if not isinstance(values, dict):
        found = "nothing" if values is None else f"a {type(values).__name__}"
        tree.problems.append(
            f"{path}: expected sections such as model and train, found {found}; {{}} is all defaults"
        )
        return tree
    tree.values = {k: {} if v is None and k in sections() else v for k, v in values.items()}
    base, included = Tree(), tree.values.pop("include", [])
    for name in included if isinstance(included, list) else [included]:
        where = tree.where[("include",)]
        stack = (*outer, path.resolve())
        if not isinstance(name, str):
            tree.problems.append(f"{where}: include: expected the name of a file, found {name!r}")
        elif (path.parent / name).resolve() in stack:
            tree.problems.append(
                f"{where}: include: {name} includes itself, through {' -> '.join(p.name for p in stack)}"
            )
        elif not (path.parent / name).is_file():
            tree.problems.append(f"{where}: include: no file {path.parent / name}")
        else:
            base = merge(base, read_file(path.parent / name, stack))
    return merge(base, tree)


def read_overrides(overrides: Sequence[str]) -> Tree:
    """One tree of all ``section.key=value``; the last of several for one key counts."""
    result = Tree()
    for text in overrides:
        key, equals, value = text.partition("=")
        source, path = f"override {text!r}", tuple(key.strip().split("."))
        if not equals or not all(path):
            result.problems.append(f"{source}: expected section.key=value")
            continue
        # Globs and the like: a leading character that YAML keeps for itself is taken as text.
        parsed, tree = (value, Tree()) if value[:1] in tuple("*&!%@`") else _parse(value, source, False, path)
        if tree.problems and parsed is None:
            result.problems += tree.problems
            continue
        values: Any = parsed
        for n in range(len(path), 0, -1):
            tree.where.setdefault(path[:n], source)
            values = {path[n - 1]: values}
        tree.values = values
        result = merge(result, tree, new_kinds=False)
        result.where |= tree.where
    return result
