"""config: one run, composed of the rooms' own configs; YAML, overrides, checks, changes on resume.

``schema`` names the sections, ``reading`` turns YAML and overrides into raw values with places,
``validation`` turns raw values into configs, ``loading`` joins the two, ``checks`` holds between keys,
``changes`` tells what a resumed run may change, ``structure`` says what results, ``flows`` what a flow makes of
a model's size, ``table`` lists all keys. A new section is a field of ``RunConfig``; a new key is a field of its
room's config and an entry of ``changes.RESUME``.

No function outside this room takes the whole config. May import: the rooms' configs, flow, pydantic, yaml. Used by
the command line and by what composes runs (experiment).
"""

from lmres.config.changes import ABSENT, RESUME, Change, Resumable, diff, resumable_changes
from lmres.config.checks import check_config, check_task, residual_depth
from lmres.config.errors import ConfigError
from lmres.config.flows import FlowFacts, flow_facts
from lmres.config.loading import dump_yaml, from_dict, load_compare, load_config, to_dict
from lmres.config.schema import CompareConfig, RunConfig
from lmres.config.structure import describe_structure
from lmres.config.table import Row, field_table

__all__ = [
    "ABSENT",
    "RESUME",
    "Change",
    "CompareConfig",
    "ConfigError",
    "FlowFacts",
    "Resumable",
    "Row",
    "RunConfig",
    "check_config",
    "check_task",
    "describe_structure",
    "diff",
    "dump_yaml",
    "field_table",
    "flow_facts",
    "from_dict",
    "load_compare",
    "load_config",
    "residual_depth",
    "resumable_changes",
    "to_dict",
]
