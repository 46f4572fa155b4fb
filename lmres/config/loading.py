"""Config files and stored configs to config objects, and back."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lmres.config.errors import ConfigError, nearest, shown
from lmres.config.reading import Dumper, Tree, merge, read_file, read_overrides
from lmres.config.schema import CompareConfig, RunConfig
from lmres.config.validation import validate
from lmres.flow.config import FlowConfig


@dataclasses.dataclass(frozen=True)
class _Comparison:
    """The part of a comparison's file that is not a run."""

    compare: CompareConfig = dataclasses.field(default_factory=CompareConfig)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The run described by a YAML file and overrides ``section.key=value`` (values are YAML).

    Keys that are left out take their defaults. ``include: other.yaml`` takes another file (or a list of them)
    as the base. A new ``residual.kind`` drops the options of the old kind, wherever it stands among the
    overrides.

    Raises ConfigError naming every problem of the file and the overrides. ``check_config`` does the checks
    that need more than one key.
    """
    return _build(merge(read_file(path), read_overrides(overrides)))


def load_compare(
    path: str | Path, overrides: Sequence[str] = ()
) -> tuple[CompareConfig, dict[str, RunConfig]]:
    """The comparison described by a YAML file, and the runs of its variants by name.

    Overrides change what the variants have in common, ``compare.seeds``, or one variant:
    ``compare.variants.mhc.residual.streams=2``. A variant's own settings come last. ``train.seed`` is still
    that of the file: a comparison replaces it by each of the seeds.

    Raises ConfigError naming every problem.
    """
    file, changes = read_file(path), read_overrides(overrides)
    known = _variants(file)
    tree = merge(file, changes)
    for name in [name for name in _variants(changes) if known and name not in known]:
        where = changes.where[("compare", "variants", name)]
        tree.problems.append(
            f"{where}: no variant {name!r}{nearest(name, known)} (variants: {', '.join(known)})"
        )
    section = tree.values.pop("compare", None)
    if not isinstance(section, dict) or not section.get("variants"):
        raise ConfigError(
            [*tree.problems, f"{path}: compare.variants is missing: a mapping from names to settings"]
        )
    variants = section.pop("variants")
    problems, runs = list(tree.problems), {}
    if isinstance(variants, list):
        named = {str(i): settings for i, settings in enumerate(variants)}
    elif isinstance(variants, dict):
        named = variants
    else:
        at = tree.where[("compare", "variants")]
        problems.append(
            f"{at}: compare.variants: expected a mapping from names to settings, found {shown(variants)}"
        )
        named = {}
    where = {p: w for p, w in tree.where.items() if p[:1] != ("compare",)}
    for name, settings in named.items():
        here = f"{tree.where[('compare', 'variants', name)]}: compare.variants.{name}"
        if settings is not None and not isinstance(settings, dict):
            problems.append(f"{here}: expected settings like {{residual.kind: mhc}}, found {shown(settings)}")
            continue
        prefix = ("compare", "variants", name)
        places = {path[3:]: place for path, place in tree.where.items() if path[:3] == prefix and path[3:]}
        over = Tree(settings or {}, places)
        try:
            run = _build(merge(Tree(tree.values, where), over))
        except ConfigError as error:
            problems.extend(error.problems)
            continue
        if isinstance(variants, list):
            name = _variant_name(run)
            if name in runs:
                problems.append(
                    f"{here}: two variants are called {name}; write a mapping from names to settings"
                )
        runs[name] = run
    try:
        section = {**section, "variants": list(runs)}
        compare = validate({"compare": section}, _Comparison, tree.where).compare
        if compare.baseline not in (None, *runs):
            problems.append(
                f"{tree.where[('compare', 'baseline')]}: compare.baseline: no variant {compare.baseline!r}"
                f"{nearest(compare.baseline, tuple(runs))} (variants: {', '.join(runs)})"
            )
        if not compare.seeds or len(set(compare.seeds)) < len(compare.seeds):
            problems.append(f"compare.seeds={list(compare.seeds)} must be different numbers, at least one")
    except ConfigError as error:
        problems.extend(error.problems)
    if problems:
        raise ConfigError(problems)
    return compare, runs


def _variant_name(run: RunConfig) -> str:
    """Of a variant that was given none: its residual, and its flow where that is not the ordinary one."""
    flow = "" if run.flow.kind == FlowConfig.kind else "-" + run.flow.kind.replace("/", ":")  # it names a folder
    return run.residual.name + flow


def _variants(tree: Tree) -> tuple[str, ...]:
    """Names of the variants in a tree that has them as a mapping."""
    section = tree.values.get("compare")
    variants = section.get("variants") if isinstance(section, dict) else None
    return tuple(variants) if isinstance(variants, dict) else ()


def _build(tree: Tree) -> RunConfig:
    try:
        config = validate(tree.values, RunConfig, tree.where)
    except ConfigError as error:
        raise ConfigError([*tree.problems, *error.problems]) from None
    if tree.problems:
        raise ConfigError(tree.problems)
    return config


def to_dict(config: RunConfig) -> dict[str, Any]:
    """Every value of the config as nested values that JSON keeps exactly; ``from_dict`` is the inverse."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def from_dict(values: Mapping[str, Any]) -> RunConfig:
    """The config of ``to_dict``. Keys that an older version did not write take their defaults.

    Raises ConfigError for what this version does not know.
    """
    return validate(values)


def dump_yaml(config: RunConfig) -> str:
    """The whole config, defaults included, as YAML that ``load_config`` reads."""
    return yaml.dump(to_dict(config), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=110)
