"""Figures: well-formed, deterministic SVG that stands on its own, whatever the names and the numbers are."""

import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from lmres.analysis import Curve, MixingResult, loss_figure, mixing_figure, run_colours

NASTY = 'a$b$ <script>alert("x")</script> & \x01 ü'


def result(count, low=0.0, name="some connection"):
    rng = np.random.default_rng(0)
    labels = tuple(f"attn {i}" for i in range(count))
    mean, none = np.tril(rng.uniform(low, 1, (count, count))), np.zeros((count, count))
    return MixingResult(name, "x", "y", mean, none, none, labels, labels, 0.0, 5)


def curve(name="run", count=50, seed=0, scale=0.01):
    rng, steps = np.random.default_rng(seed), np.arange(1, count + 1)
    valid = np.arange(0, count + 1, 10)
    return Curve(name, steps, steps * scale, rng.uniform(1, 2, count), valid, rng.uniform(1, 2, len(valid)))


def texts(svg):
    return [t.text for t in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


@pytest.mark.parametrize("count", [2, 7, 20, 49, 130])
def test_heat_map_labels_every_cell_up_to_fifty_sublayers(count):
    svg = mixing_figure(result(count))
    shown = texts(svg)
    assert "some connection" in shown and "source" in shown and "reader" in shown
    labelled = sum(text.startswith("attn") for text in shown)
    assert labelled == 2 * count if count <= 60 else 40 < labelled < 2 * count
    assert "1" in shown  # the end of the scale


def test_small_heat_maps_carry_their_numbers_and_only_below_the_diagonal():
    known = result(3)
    known.mean[:] = [[1, 0, 0], [0.25, 0.75, 0], [0.5, -0.25, 0.25]]
    shown = texts(mixing_figure(known))
    assert [t for t in shown if t in ("1", ".25", ".75", ".50", "−.25")][:6] == [
        "1",
        ".25",
        ".75",
        ".50",
        "−.25",
        ".25",
    ]
    assert ".00" not in shown and "0" in shown  # 0 is on the colour bar


def test_negative_weights_bring_the_diverging_scale():
    assert "−1" in texts(mixing_figure(result(5, low=-1.0)))
    assert "−1" not in texts(mixing_figure(result(5)))


def test_raw_weights_are_drawn_on_request():
    known = result(3)
    known.mean[:] = 4 * np.tri(3)
    assert "4" in texts(mixing_figure(known, normalised=False))
    assert ".33" in texts(mixing_figure(known))


@pytest.mark.parametrize(
    "draw", [lambda n: mixing_figure(result(4, name=n)), lambda n: loss_figure([curve(n)], baseline=n)]
)
def test_names_are_escaped_and_the_svg_needs_nothing_from_outside(draw):
    svg = draw(NASTY)
    assert "<script>" not in svg and svg.startswith("<svg ") and "metadata" not in svg
    assert any(text and "a$b$ <script>" in text and "ü" in text for text in texts(svg) if text)
    rest = re.sub(r'"data:image/png;base64,[^"]*"', "", svg)  # the colour bar
    rest = rest.replace("http://www.w3.org/2000/svg", "").replace("http://www.w3.org/1999/xlink", "")
    assert "http" not in rest and "//" not in rest
    assert draw(NASTY) == svg, "the same figure is not the same bytes"


def test_colours_are_consistent_and_the_baseline_is_dark():
    colours = run_colours(["b", "plain", "a", "b"], "plain")
    assert len(set(colours.values())) == 3 and colours["plain"] == "#1f2430"
    assert run_colours(["b", "a"])["b"] == colours["b"]
    curves = [curve("plain"), curve("b", seed=1), curve("a", seed=2)]
    svg = loss_figure(curves, "plain")
    for name, colour in run_colours([c.name for c in curves], "plain").items():
        assert name in texts(svg) and colour.lower() in svg


def test_the_difference_row_needs_a_baseline():
    curves = [curve("plain"), curve("b", seed=1)]
    assert any("less plain" in t for t in texts(loss_figure(curves, "plain")))
    assert not any("less" in t for t in texts(loss_figure(curves)))
    assert not any("less" in t for t in texts(loss_figure(curves, "not there")))


def test_loss_curves_survive_what_runs_can_do():
    nothing = Curve("nothing", [], [], [], [], [])
    diverged = Curve("diverged", [1, 2, 3], [1, 2, 3], [2.0, np.nan, np.inf], [0, 3], [2.0, np.nan])
    single = Curve("single", [1], [0.1], [2.0], [1], [2.0])
    for curves in ([], [nothing], [diverged], [single], [nothing, diverged, single, curve("fine")]):
        for baseline in (None, "fine", "nothing", "diverged"):
            ET.fromstring(loss_figure(curves, baseline))


def test_long_runs_make_no_long_files():
    assert len(loss_figure([curve(count=20000)])) < 400_000
