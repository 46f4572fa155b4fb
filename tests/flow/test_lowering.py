"""The index tables gather every cell that is read, once, and few others."""

import time
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid_model import made, name

from lmres.flow import FlowConfig, Reader, Tokens, reads_of
from lmres.flow.geometry import Cone, Deep, Diagonal, Top
from lmres.flow.lowering import lower

T = 8
GEOMETRIES = [
    *("standard", "map(1,1,3)", "map(2,3,3)", "block(2)", "block(3)", "moda", "rectangle(2)", "rectangle(3)"),
    *("diagonal(-1)", "diagonal(-1/2)", "diagonal(1)", "diagonal(1/2)", "cone(0)", "cone(1)", "cone(1/2)", "recurrent"),
    *("top", "deep", "lag(2)", "lag(4)", "chunk(2)", "chunk(3)", "feedback", "pool(2)"),
    Top(output=True),
    Deep(output=True),
    Cone(Fraction(2), output=True),
    Diagonal(Fraction(-1), border="drop"),
    Diagonal(Fraction(1), border="drop"),
    Deep(adopt="mandatory"),
    Top(adopt="optional"),
]


def gathered(lowering, l):
    """How often reader ``l`` (from 0) gathers source layer m at distance d: [T, M], with M generous."""
    near, far = lowering.tables()
    count = np.zeros((T, 9), int)
    for d in range(lowering.near_tokens):
        for m in near[l, d]:
            if m >= 0:
                count[d, m] += 1
    for m in far[l]:
        if m >= 0:
            count[lowering.near_tokens :, m] += 1  # nearer ones are masked
    return count


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=name)
@pytest.mark.parametrize("layers", [1, 3])
def test_every_read_is_gathered_once(geometry, layers):
    if layers == 1 and str(geometry).startswith(("map", "pool")):
        return
    reads = made(geometry).reads(layers)
    allowed = reads_of(reads, T)
    for one_tile in {False, reads.schedule_class(T) == "parallel"}:
        lowering = lower(reads, T, one_tile)
        # A share of the heads that reads all of it is given all of it.
        rows, near = Reader(reads, T, one_tile).needed(reads)
        assert len(rows) == lowering.rows and near == any(m >= 0 for m in np.ravel(lowering.near))
        for l in range(layers):
            count = gathered(lowering, l)
            assert count.max() <= 1
            count = count[:, : reads.sources]
            count[0, l + 1 :] = 0  # no cell above the own one exists yet: masked within rows
            count[0, l] = 1  # masked within rows, and at hand
            if one_tile and lowering.at_hand == "tile":
                count[1:, l] += 1
            assert count.max() <= 1
            for t, s, m in np.argwhere(allowed[:, l]):
                assert count[t - s, m] == 1, (t, l, s, m)


@pytest.mark.parametrize("geometry", ["diagonal(-1/2)", "lag(2)", "rectangle(3)", Deep(output=True)], ids=name)
def test_masks_pass_every_read_once(geometry):
    reads, places = made(geometry).reads(3), jnp.arange(T)[None]
    for count in {T, T // reads.tile(T)}:
        reader, size = Reader(reads, T, count == 1), T // count
        masks = jax.jit(lambda tile, l, reader=reader: reader.masks(Tokens(places, places), tile, l))
        near, _ = reader.lowering.tables()
        passed = np.zeros(reads_of(reads, T).shape, int)
        for u in range(count):
            tile = u * size + np.arange(size)
            for l in range(3):
                own, rows, cells, row_layers, _ = (np.asarray(x) for x in masks(tile, l))
                for i, s, *one in np.argwhere(own[0]):
                    passed[tile[i], l, tile[i if one else s], l] += 1
                for i, w, s in np.argwhere(rows[0]):
                    passed[tile[i], l, s, row_layers[w]] += 1
                for i, d, v in np.argwhere(cells[0]):
                    passed[tile[i], l, tile[i] - d, near[l, d, v]] += 1
        np.testing.assert_array_equal(passed, reads_of(reads, T))


def keys(geometry, tokens, one_tile=True, layers=4):
    lowering = lower(made(geometry).reads(layers), tokens, one_tile)
    return lowering.near_tokens, lowering.rows, lowering.keys(tokens, tokens if one_tile else 1)


@pytest.mark.parametrize("tokens", [16, 64])
def test_few_keys_are_gathered(tokens):
    """Own keys included: no more than a layer's row, or what is read at any distance."""
    assert keys("standard", tokens) == (0, 0, tokens)
    assert keys("standard", tokens, one_tile=False) == (0, 1, tokens + 1)
    for width in (1, 2, 4):
        assert keys(f"block({width})", tokens) == (0, width - 1, width * tokens)
    assert keys("moda", tokens) == (1, 0, tokens + 3)
    assert keys("diagonal(-1/2)", tokens)[2] <= tokens + 8
    near, rows, count = keys("rectangle(4)", tokens)
    assert (near, rows) == (4, 0) and count <= tokens + 4 * 4
    assert keys("diagonal(-1)", tokens)[:2] == (3, 1)
    assert keys("diagonal(-1)", tokens)[2] <= tokens + 4
    assert keys("top", tokens, one_tile=False)[1:] == (1, tokens + 1)
    assert keys("deep", tokens, one_tile=False)[1:] == (4, 4 * tokens + 1)


def test_a_tile_ends_where_a_chunk_does_and_groups_are_not_more_than_tokens():
    for tokens in range(17, 70):
        schedule, tiles, each = FlowConfig("chunk(16)").tiling(4, tokens)
        assert (schedule, each) == ("chunked", 16) and (tiles - 1) * 16 < tokens <= tiles * 16
    assert FlowConfig("top", schedule="swept", groups=100).tiling(4, 8) == ("swept", 8, 1)


@pytest.mark.parametrize("kind", ["cone(1/1000000)", "diagonal(-1/1000000)", "diagonal(1/64)", "cone(1/64)"])
def test_gentle_slopes_are_planned_at_once(kind):
    start, flow = time.process_time(), FlowConfig(kind)
    flow.check(8, 2048)
    _, tiles, each = flow.tiling(8, 2048)
    lower(flow.reads(8), tiles * each, tiles == 1)
    assert flow.store(8).slots and time.process_time() - start < 5
