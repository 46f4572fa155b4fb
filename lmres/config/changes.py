"""What changed between two configs, and which changes a resumed run takes.

Each key is in exactly one row of ``RESUME``: a change is applied and logged, or refused with the reason. None
is ignored, so a setting that could only have an effect at the start of a run is refused.
"""

import dataclasses
import functools
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from lmres.config.loading import to_dict
from lmres.config.schema import RunConfig
from lmres.flow.config import FlowConfig
from lmres.train.fingerprint import HOW_A_FLOW_IS_RUN

ABSENT = "(absent)"  # stands for the value of a key that only the other kind of residual has


class Change(NamedTuple):
    """One key that differs: its value before and after (``ABSENT`` where the key does not exist)."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key}: {_text(self.old)} -> {_text(self.new)}"


class Rule(NamedTuple):
    """Keys (patterns), whether a resumed run takes a change of them, and why."""

    keys: tuple[str, ...]
    applied: bool
    reason: str


@dataclasses.dataclass(frozen=True)
class Resumable:
    """The changes a resumed run takes, and those it refuses, with the reason of each."""

    applied: tuple[Change, ...]
    refused: tuple[tuple[Change, str], ...]


def _keys(section: str, names: str) -> tuple[str, ...]:
    return tuple(f"{section}.{name}" for name in names.split())


def _flow_keys(how_it_is_run: bool) -> tuple[str, ...]:
    names = (field.name for field in dataclasses.fields(FlowConfig))
    return tuple(f"flow.{name}" for name in names if (name in HOW_A_FLOW_IS_RUN) == how_it_is_run)


RESUME: tuple[Rule, ...] = (
    Rule(("name",), True, "a label"),
    Rule(
        _keys(
            "model", "vocab_size width blocks heads kv_heads head_dim heads_from mlp mlp_hidden qk_norm tie_embeddings"
        ),
        False,
        "the checkpoint's parameters have another shape or meaning; start a new run",
    ),
    Rule(
        _keys("model", "logit_softcap rope_base norm_eps"),
        False,
        "the weights were trained for the other function; start a new run from them",
    ),
    Rule(
        ("model.context", "train.batch_size"),
        False,
        "the position in the data is counted in batches of this size; start a new run from the weights",
    ),
    Rule(
        ("model.embedding_std", "model.weight_std", "train.seed"),
        False,
        "it sets the parameters' start and would have no effect now, or break the order of random numbers",
    ),
    Rule(
        _keys("model", "dtype scan remat attention"),
        True,
        "how the same function is computed",
    ),
    Rule(("model.dropout",), True, "regularisation from here on"),
    Rule(
        ("residual.*",),
        False,
        "the connection is part of the architecture; start a new run",
    ),
    Rule(
        _flow_keys(how_it_is_run=False),
        False,
        "what attention reads is part of the architecture; start a new run",
    ),
    Rule(
        _flow_keys(how_it_is_run=True),
        True,
        "how the cells are run from here on; sweeps are near the same function, or exact if there are enough of them",
    ),
    Rule(
        ("task.*",),
        False,
        "the position in the data would point at other sequences; start a new run from the weights",
    ),
    Rule(
        _keys(
            "data",
            "train valid valid_fraction split_seed format text_unit text_key ids_key errors on_bad_record",
        ),
        False,
        "the position in the data would point at other text, and validation text may have been trained on",
    ),
    Rule(_keys("data", "tokenizer eos_token vocab_size"), False, "token ids would mean something else"),
    Rule(
        _keys("data", "packing seed repeat"),
        False,
        "the position in the data would point at other windows",
    ),
    Rule(("data.cache_dir",), True, "where prepared data lies"),
    Rule(("optimizer.kind",), False, "the checkpoint's optimiser state has another shape"),
    Rule(
        _keys("optimizer", "learning_rate muon_learning_rate weight_decay clip"),
        True,
        "the next updates use it",
    ),
    Rule(
        _keys("optimizer", "beta1 beta2 eps muon_momentum"),
        True,
        "the next updates use it, on the averages so far",
    ),
    Rule(("schedule.*", "train.steps"), True, "the learning rate is a function of the update's number"),
    Rule(("train.accumulate",), True, "loss and gradients do not depend on it"),
    Rule(("train.z_loss",), True, "the next updates use it"),
    Rule(
        _keys(
            "train",
            "eval_every eval_batches eval_batch_size save_every keep log_every profile_steps "
            "compilation_cache",
        ),
        True,
        "about watching the run, not about what it computes",
    ),
    Rule(("mesh.*",), True, "a checkpoint does not depend on the mesh"),
    Rule(("log.*",), True, "about watching the run, not about what it computes"),
)


def diff(old: RunConfig, new: RunConfig) -> list[Change]:
    """Every key whose value differs, in the order of the config."""
    before, after = _flat(to_dict(old)), _flat(to_dict(new))
    pairs = [(key, before.get(key, ABSENT), after.get(key, ABSENT)) for key in {**before, **after}]
    return [Change(*pair) for pair in pairs if pair[1] != pair[2]]


def resumable_changes(old: RunConfig, new: RunConfig) -> Resumable:
    """The differences between a checkpoint's config and the one it is resumed with, by ``RESUME``."""
    changes = [(change, rule_of(change.key)) for change in diff(old, new)]
    return Resumable(
        tuple(change for change, rule in changes if rule.applied),
        tuple((change, rule.reason) for change, rule in changes if not rule.applied),
    )


@functools.cache
def rule_of(key: str) -> Rule:
    """The row of ``RESUME`` that a key is in. Raises LookupError unless it is exactly one."""
    rules = [rule for rule in RESUME if any(fnmatchcase(key, pattern) for pattern in rule.keys)]
    if len(rules) != 1:
        raise LookupError(f"{key} must be in one row of lmres.config.changes.RESUME, is in {len(rules)}")
    return rules[0]


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    flat = {}
    for name, value in values.items():
        flat |= {f"{name}.{key}": v for key, v in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def _text(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
