"""Read sets against definitions written anew as sets of cells, against brute force, and against the counted table."""

import dataclasses
import math
from fractions import Fraction

import numpy as np
import pytest
from grid_model import made, name
from hypothesis import given, settings
from hypothesis import strategies as st

from lmres.flow import (
    GEOMETRIES,
    Chunks,
    IllegalReadSet,
    Layer,
    ReadSet,
    Term,
    critical_path,
    exact_prefix,
    keys_per_query,
    parse,
    reads_of,
    sweeps_needed,
)
from lmres.flow.geometry import Cone, Deep, Diagonal, Map, PerHead, Top

# geometry: keys per query, critical path, L + ceil(lambda (T - 1)), lambda, sweeps; counted for T = 9, L = 4.
TABLE = {
    "standard": (5.0, 4, 4, 0, 1),
    "block(2)": (8.75, 4, 4, 0, 1),
    "block(4)": (12.5, 4, 4, 0, 1),
    "moda": (6.5, 4, 4, 0, 1),
    "rectangle(3)": (8.0, 4, 4, 0, 1),
    "diagonal(-1)": (5.0, 4, 4, 0, 1),
    "diagonal(-1/2)": (5.0, 4, 4, 0, 1),
    "cone(0)": (11.0, 4, 4, 0, 1),
    "chunk(9)": (5.0, 4, 4, 0, 1),
    "diagonal(1)": (5.0, 12, 12, 1, 9),
    "diagonal(1/2)": (5.0, 8, 8, Fraction(1, 2), 5),
    "diagonal(2)": (5.0, 20, 20, 2, 9),
    "cone(1)": (16.1, 12, 12, 1, 9),
    "cone(2)": (16.8, 20, 20, 2, 9),
    "recurrent": (5.0, 12, 12, 1, 9),
    "top": (5.0, 28, 28, 3, 9),
    Top(output=True): (5.0, 36, 36, 4, 9),
    "deep": (17.0, 28, 28, 3, 9),
    Deep(output=True): (21.0, 36, 36, 4, 9),
    "lag(2)": (14.3, 16, 16, Fraction(3, 2), 5),
    "lag(3)": (12.0, 10, 12, 1, 3),
    "lag(4)": (10.0, 10, 10, Fraction(3, 4), 3),
    "chunk(3)": (14.0, 10, 28, 3, 3),
}


@pytest.mark.parametrize("geometry", TABLE, ids=name)
def test_counts_of_the_table(geometry):
    T, L = 9, 4
    reads = made(geometry).reads(L)
    keys, critical, wave, slope, sweeps = TABLE[geometry]
    assert keys_per_query(reads, T) == pytest.approx(keys, abs=0.051)
    assert critical_path(reads, T) == critical
    assert reads.slope(T) == slope
    assert L + math.ceil(reads.slope(T) * (T - 1)) == wave
    assert reads.wavefront_steps(T) == L + max(1, math.ceil(slope)) * (T - 1)
    assert sweeps_needed(reads, T) == sweeps


def test_counts_of_cyclic_gauss_seidel():
    assert [sweeps_needed(Deep().reads(4), 9, groups) for groups in (1, 2, 3, 9)] == [9, 5, 3, 1]
    # Where one pass is exact, groups only cost: a token reads what a later group is still to write. Each read is one
    # layer down, and every other one can be such a read: 4 layers, 2 stale reads.
    assert [sweeps_needed(parse("standard").reads(4), 9, groups) for groups in (1, 2, 3, 9)] == [1, 3, 3, 1]


# The definitions, anew: sets of the cells (s, m) that (t, l) reads; c is the chunk of a token.
def c(s, size):
    return (s - 1) // size


def up_to(t):
    return range(1, t + 1)


def toward_zero(x):
    return math.floor(abs(x)) * (1 if x >= 0 else -1)


def slanted(sigma):
    return lambda t, l, L: {(s, min(L, max(1, l + toward_zero(Fraction(sigma) * (t - s))))) for s in up_to(t)}


def dropped(sigma):
    def cells(t, l, L):
        found = {(s, l + toward_zero(Fraction(sigma) * (t - s))) for s in up_to(t)}
        return {(s, m) for s, m in found if 1 <= m <= L}

    return cells


def cone(slope, output=0):
    def cells(t, l, L):
        return {(t, l)} | {
            (s, m) for s in up_to(t - 1) for m in up_to(L + output) if m <= l + Fraction(slope) * (t - s)
        }

    return cells


def row(t, l):
    return {(s, l) for s in up_to(t)}


DEFINED = {
    "standard": lambda t, l, L: row(t, l),
    "map(1,1,3)": lambda t, l, L: {(s, (1, 1, 3)[l - 1]) for s in up_to(t)},
    "map(2,3,1)": lambda t, l, L: {(s, (2, 3, 1)[l - 1]) for s in up_to(t) if s < t or l == 3},
    "block(1)": lambda t, l, L: row(t, l),
    "block(2)": lambda t, l, L: {(s, m) for s in up_to(t) for m in up_to(L) if l - 2 < m <= l},
    "block(5)": lambda t, l, L: {(s, m) for s in up_to(t) for m in up_to(l)},
    "moda": lambda t, l, L: row(t, l) | {(t, m) for m in range(1, l)},
    "rectangle(3)": lambda t, l, L: row(t, l) | {(s, m) for s in up_to(t) for m in range(1, l) if c(s, 3) == c(t, 3)},
    "diagonal(-1)": slanted("-1"),
    "diagonal(-1/2)": slanted("-1/2"),
    "diagonal(1)": slanted("1"),
    "diagonal(2/3)": slanted("2/3"),
    Diagonal(Fraction(-1, 2), border="drop"): dropped("-1/2"),
    Diagonal(Fraction(1), border="drop"): dropped("1"),
    "cone(0)": cone("0"),
    "cone(1/2)": cone("1/2"),
    "cone(1)": cone("1"),
    Cone(Fraction(1), output=True): cone("1", output=1),
    "recurrent": lambda t, l, L: {(t, l)} | {(s, l + 1) for s in up_to(t - 1)},
    "top": lambda t, l, L: {(t, l)} | {(s, L) for s in up_to(t - 1)},
    Top(output=True): lambda t, l, L: {(t, l)} | {(s, L + 1) for s in up_to(t - 1)},
    "deep": lambda t, l, L: {(t, l)} | {(s, m) for s in up_to(t - 1) for m in up_to(L)},
    Deep(output=True): lambda t, l, L: {(t, l)} | {(s, m) for s in up_to(t - 1) for m in up_to(L + 1)},
    "lag(2)": lambda t, l, L: (
        {(s, l) for s in up_to(t) if t - s < 2} | {(s, m) for s in up_to(t) for m in up_to(L) if t - s >= 2}
    ),
    "chunk(3)": lambda t, l, L: (
        {(s, l) for s in up_to(t) if c(s, 3) == c(t, 3)}
        | {(s, m) for s in up_to(t) for m in up_to(L) if c(s, 3) < c(t, 3)}
    ),
    "feedback": lambda t, l, L: {(s, L + 1) for s in up_to(t - 1)},
    "pool(2)": lambda t, l, L: {(s, L) for s in up_to(t - 1)},
}


def cells_of(reads, T):
    """{(t, l): {(s, m)}} of the array of reads."""
    allowed = reads_of(reads, T)
    return {
        (t, l): {(int(s) + 1, int(m) + 1) for s, m in np.argwhere(allowed[t - 1, l - 1])}
        for t in up_to(T)
        for l in up_to(reads.layers)
    }


@pytest.mark.parametrize("geometry", DEFINED, ids=name)
def test_membership(geometry):
    T, L = 8, 3
    found = cells_of(made(geometry).reads(L), T)
    assert found == {(t, l): DEFINED[geometry](t, l, L) for t in up_to(T) for l in up_to(L)}


def test_every_geometry_is_defined_here():
    assert {made(geometry).kind for geometry in DEFINED} == set(GEOMETRIES)


@pytest.mark.parametrize(
    "same",
    [
        ["standard", "block(1)", "diagonal(0)", "chunk(7)", "chunk(9)", "lag(7)", "lag(9)", "map(1,2,3,4)"],
        ["moda", "rectangle(1)"],
        ["block(4)", "rectangle(7)", "block(6)"],
        ["deep", "chunk(1)", "lag(1)", "cone(3)", "cone(5)"],
    ],
)
def test_geometries_that_are_the_same(same):
    first, *others = [reads_of(parse(g).reads(4), 7) for g in same]
    for other in others:
        np.testing.assert_array_equal(first, other)


def test_cone_0_is_a_block_but_for_the_own_column():
    t, _, s, _ = np.ogrid[:7, :4, :7, :4]
    differ = reads_of(parse("block(4)").reads(4), 7) != reads_of(parse("cone(0)").reads(4), 7)
    assert differ.any() and not (differ & (t != s)).any()


def test_deep_with_one_layer_is_standard():
    np.testing.assert_array_equal(reads_of(Deep().reads(1), 7), reads_of(parse("standard").reads(1), 7))


@settings(deadline=None, max_examples=30)
@given(T=st.integers(1, 8), L=st.integers(1, 4), output=st.booleans(), data=st.data())
def test_critical_path_by_formula(T, L, output, data):
    M = L + output
    for geometry in (Top(output=output), Deep(output=output)):
        assert critical_path(geometry.reads(L), T) == L + (M - 1) * (T - 1)
    slope = data.draw(st.integers(0, M - 1))
    assert critical_path(Cone(Fraction(slope), output=output).reads(L), T) == L + slope * (T - 1)


layer_ends = st.builds(
    Layer,
    st.sampled_from(["reader", "bottom", "top"]) | st.tuples(*[st.integers(1, 3)] * 3),
    st.integers(-2, 2),
    st.sampled_from([Fraction(x) for x in ("-2", "-1", "-1/2", "0", "0", "0", "1/3", "1/2", "1", "2")]),
)
term = st.builds(
    Term,
    layer_ends,
    layer_ends,
    st.integers(0, 3),
    st.none() | st.integers(0, 5),
    st.none() | st.builds(Chunks, st.sampled_from(["same", "earlier"]), st.integers(1, 4)),
    st.sampled_from(["clip", "drop"]),
)


@settings(deadline=None, max_examples=400)
@given(terms=st.lists(term, min_size=1, max_size=3), output=st.booleans(), T=st.integers(1, 9))
def test_closed_forms_against_brute_force(terms, output, T):
    L, M = 3, 3 + output
    l, m = np.ogrid[1 : L + 1, 1 : M + 1]
    illegal = any((each.allows(np.array(0), l, m, M, 0, 0) & (m > l)).any() for each in terms)
    if illegal:
        with pytest.raises(IllegalReadSet):
            ReadSet(tuple(terms), L, M)
        return
    reads = ReadSet(tuple(terms), L, M)
    found = [(t + 1, l + 1, s + 1, m + 1) for t, l, s, m in np.argwhere(reads_of(reads, T)).tolist()]
    assert all(s < t or (s == t and m <= l) for t, l, s, m in found)
    past = [cell for cell in found if cell[2] < cell[0]]
    slope = max([Fraction(0), *(Fraction(m - l, t - s) for t, l, s, m in past)])
    assert reads.slope(T) == slope
    assert reads.cached(T) == tuple(sorted({m for *_, m in past}))
    assert critical_path(reads, T) <= L + math.ceil(slope * (T - 1))
    upward = [(t, s) for t, l, s, m in past if m > l]
    fits = [size for size in up_to(T) if not any(c(t, size) == c(s, size) for t, s in upward)]
    tile = reads.tile(T)
    assert tile in fits
    if len(terms) == 1 or not any(each.chunks and each.chunks.which == "earlier" for each in terms):
        assert tile == max(fits)
    steps = {"wavefront": math.ceil(slope), "chunked": Fraction(L, tile)}
    best = min(steps, key=steps.get)
    expected = "parallel" if not upward else best if 2 * steps[best] <= L else "swept"
    assert reads.schedule_class(T) == expected
    assert (sweeps_needed(reads, T) == 1) == (expected == "parallel")


@pytest.mark.parametrize("geometry", DEFINED, ids=name)
def test_closed_forms_of_geometries(geometry):
    T, L = 9, 3
    reads = made(geometry).reads(L)
    cells = cells_of(reads, T)
    past = [(t, l, s, m) for (t, l), read in cells.items() for s, m in read if s < t]
    assert reads.slope(T) == max([0, *(Fraction(m - l, t - s) for t, l, s, m in past)])
    fits = [n for n in up_to(T) if not any(c(t, n) == c(s, n) and m > l for t, l, s, m in past)]
    assert reads.tile(T) == max(fits)
    assert reads.cached(T) == tuple(sorted({m for *_, m in past}))
    for nearest in (1, 2, 4, 7):
        assert reads.pairs(T, nearest) == {(l, m) for t, l, s, m in past if t - s >= nearest}


@pytest.mark.parametrize("sweeps", [1, 2, 3])
def test_tokens_exact_after_each_sweep(sweeps):
    T = 12
    for geometry, each in (("deep", 1), ("top", 1), ("lag(2)", 2), ("lag(3)", 3), ("chunk(4)", 4), ("chunk(3)", 3)):
        assert exact_prefix(parse(geometry).reads(3), T, sweeps) == min(T, sweeps * each)
    for groups in (2, 3, 4):
        assert exact_prefix(Deep().reads(3), T, sweeps, groups) == sweeps * groups
    assert exact_prefix(Deep().reads(3), T, 0) == 0
    assert exact_prefix(parse("moda").reads(3), T, sweeps) == T


@pytest.mark.parametrize(
    ("terms", "layers", "sources", "said"),
    [
        ((Term(high=Layer("reader", 1)),), 3, 3, r"\(t=1, l=1\) would read \(t=1, l=2\), a layer its own token"),
        ((Term(low=Layer("top"), high=Layer("top")),), 3, 4, r"\(t=1, l=1\) would read \(t=1, l=4\)"),
        ((Term(near=-1, far=-1),), 3, 3, r"\(t=2, l=1\) would read \(t=3, l=1\), a token that comes later"),
        ((Term(near=-2),), 3, 3, r"\(t=3, l=1\) would read \(t=5, l=1\), a token that comes later"),
        ((Term(low=Layer((1, 2)), high=Layer((1, 2))),), 3, 3, "2 source layers are given for 3 readers"),
        ((Term(low=Layer((1, 2, 5)), high=Layer((1, 2, 5)), near=1),), 3, 3, r"source layer 5 is not in 1 \.\. 3"),
        ((Term(low=Layer((1, 3, 3)), high=Layer((1, 3, 3))),), 3, 3, r"\(t=1, l=2\) would read \(t=1, l=3\)"),
        ((Term(),), 3, 2, "3 layers need 3 or 4 sources, not 2"),
        ((Term(),), 3, 5, "3 layers need 3 or 4 sources, not 5"),
        ((Term(),), 0, 0, "0 layers need"),
        ((Term(chunks=Chunks("same", 0)),), 3, 3, "chunks of 0 tokens"),
    ],
)
def test_illegal_sets_are_refused(terms, layers, sources, said):
    with pytest.raises(IllegalReadSet, match=said):
        ReadSet(terms, layers, sources)


@pytest.mark.parametrize(
    "text", ["map(1,2)", "map(1,2,4)", "map(0,1,2)", "block(0)", "cone(-1)", "lag(0)", "pool(4)", "pool(0)", "chunk(0)"]
)
def test_specs_that_do_not_fit_are_refused(text):
    with pytest.raises(ValueError):
        parse(text).reads(3)


def test_notation_round_trips():
    for text in [g for g in (*DEFINED, *TABLE) if isinstance(g, str)]:
        geometry = parse(text)
        assert str(geometry) == text and parse(str(geometry)) == geometry
        assert hash(geometry) == hash(parse(text)) and hash(geometry.reads(3 if "," in text else 4)) is not None
        assert geometry.reads(3 if "," in text else 4) == parse(text).reads(3 if "," in text else 4)
    assert parse("standard").name == "standard" and parse("standard + block(2)").name == "standard + block(2)"
    assert parse(" diagonal( -1/2 ) ") == Diagonal(Fraction(-1, 2))
    assert parse("map(1, 1, 3)") == Map((1, 1, 3))


@pytest.mark.parametrize(
    ("geometry", "said"),
    [
        (Top(output=True), "top(output)"),
        (Deep(output=True, adopt="mandatory"), "deep(mandatory,output)"),
        (Diagonal(Fraction(1), border="drop"), "diagonal(1,drop)"),
        (Map((1, 1), adopt="optional"), "map(1,1,optional)"),
        (PerHead((Top(output=True), Deep(output=True))), "top(output) + deep(output)"),
    ],
)
def test_names_tell_apart_what_the_notation_leaves_out(geometry, said):
    assert geometry.name == said
    assert geometry.reads(2).name == said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("bloc(2)", "is no geometry; write one of standard"),
        ("block", "block takes layers_wide"),
        ("block(1,2)", "block takes layers_wide"),
        ("deep(1)", "deep takes nothing"),
        ("block(x)", "'x' is not a whole number"),
        ("block(1/2)", "'1/2' is not a whole number"),
        ("diagonal(1/0)", "'1/0' is not a number"),
        ("map(1,a)", "'a' is not a whole number"),
        ("block(2", "is no geometry"),
    ],
)
def test_notation_errors(text, said):
    with pytest.raises(ValueError, match=said):
        parse(text)


ONE_SOURCE = {"map", "diagonal", "recurrent", "top", "feedback", "pool"}  # the past is read at one layer per token


@pytest.mark.parametrize("geometry", DEFINED, ids=name)
def test_adoption(geometry):
    T, L = 7, 3
    spec = made(geometry)
    by_nature = cells_of(spec.reads(L), T)
    optional = cells_of(dataclasses.replace(spec, adopt="optional").reads(L), T)
    mandatory = cells_of(dataclasses.replace(spec, adopt="mandatory").reads(L), T)
    for (t, l), read in by_nature.items():
        assert optional[t, l] == read | row(t, l)
        own_past = set() if spec.kind in ONE_SOURCE else {(s, l) for s in up_to(t - 1)}
        assert mandatory[t, l] == read - own_past


def test_allows_on_traced_arrays():
    import jax

    for geometry in ("diagonal(-1/2)", "chunk(3)", "map(2,3,3)", "lag(2)"):
        reads = parse(geometry).reads(3)
        index = np.ogrid[1:8, 1:4, 1:8, 1:4]
        found = jax.jit(reads.allows)(*index)
        np.testing.assert_array_equal(found, reads_of(reads, 7))


def test_chunks_are_counted_in_places():
    reads = parse("chunk(3)").reads(2)
    t, l, s, m = np.ogrid[1:10, 1:3, 1:10, 1:3]
    for phase in range(3):
        found = reads.allows(t, l, s, m, t - 1 + phase, s - 1 + phase)
        np.testing.assert_array_equal(found, reads_of(reads, 9 + phase)[phase:, :, phase:])
