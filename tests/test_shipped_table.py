"""The table of ``configs/README.md``: which shipped config was seen to fit which machine, and with what settings.

The peaks come from the machines' compilers and are not measured again here; what is checked is that the table names
what there is, and that the estimates which ``lmres plan --search`` starts from are near it.
"""

import dataclasses
import functools
import re
from pathlib import Path

import pytest

from lmres.cli.plan import train_setting
from lmres.config import check_config, load_config
from lmres.plan.estimate import estimate, state_shapes
from lmres.plan.machines import GIB, HEADROOM
from lmres.plan.topology import parse_topology

CONFIGS = Path(__file__).parent.parent / "configs"
README = (CONFIGS / "README.md").read_text(encoding="utf-8")
TOPOLOGIES = re.findall(r"`(\w+:[x\d]+)`", re.search(r"^\| config \|.*$", README, re.M)[0])
# Peaks over estimates, which were made to lie rather above.
LOWEST, HIGHEST = 0.5, 1.2


def seen():
    """(config, topology, link of the settings or None, GiB) of each cell."""
    for config, cells in re.findall(r"^\| \[([\w-]+)\]\(\1\.yaml\) \| (.*) \|$", README, re.M):
        for topology, cell in zip(TOPOLOGIES, cells.split(" | "), strict=True):
            figure, link = re.fullmatch(r"\[?([\d.]+)\]?(?:\(on/([\w-]+)\.yaml\))?", cell).groups()
            yield pytest.param(config, topology, link, float(figure), id=f"{config}-{topology}")


SEEN = list(seen())
SETTINGS = dict(re.findall(r"^\| \[([\w-]+)\]\(on/\1\.yaml\) \| `(.*?)` \|", README, re.M))


@functools.cache
def shapes(config):
    return state_shapes(train_setting(load_config(CONFIGS / f"{config}.yaml")))


def test_the_table_is_whole():
    assert len(TOPOLOGIES) == 4 and len(SEEN) == 48
    links = {link for *_, link, _ in (row.values for row in SEEN) if link}
    assert links == set(SETTINGS) == {path.stem for path in (CONFIGS / "on").glob("*.yaml")}


@pytest.mark.parametrize(("config", "topology", "link", "gib"), SEEN)
def test_what_fits(config, topology, link, gib):
    machine = parse_topology(topology)
    base = load_config(CONFIGS / f"{config}.yaml")
    used = base
    if link is not None:
        overrides = SETTINGS[link].split()
        assert {word.split("=")[0].split(".")[0] for word in overrides} <= {"mesh", "model", "train"}
        used = load_config(CONFIGS / "on" / f"{link}.yaml")
        asked = load_config(CONFIGS / f"{config}.yaml", overrides)
        assert used == dataclasses.replace(asked, name=link)
        assert used.train == dataclasses.replace(base.train, accumulate=used.train.accumulate)  # the same batch
        assert used.model == dataclasses.replace(base.model, remat=used.model.remat)
    check_config(used, machine.size)
    assert gib * GIB <= machine.machine.memory * (1 - HEADROOM)
    guess = estimate(train_setting(used), machine, shapes(config)).peak / GIB
    assert LOWEST <= gib / guess <= HIGHEST, f"{gib} GiB, estimated {guess:.1f}"
