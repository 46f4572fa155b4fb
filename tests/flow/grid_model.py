"""A small transformer on the grid in float64, twice: as a program for ``lmres.flow``, and in plain loops over cells."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from lmres.flow import parse
from lmres.flow.attention import Cells, attend_cells, own_cells
from lmres.flow.reader import Reader, Tokens
from lmres.flow.store import Store
from lmres.flow.tiles import Tiles, run_tiles

B, H, K, D = 2, 2, 4, 8


def made(geometry):
    """A geometry from its short notation, or itself."""
    return parse(geometry) if isinstance(geometry, str) else geometry


def name(geometry):
    """A test id that tells geometries apart."""
    return made(geometry).name


def norm(x):
    return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def parameters(layers, sources, seed=0):
    """(shared, layers): the logit bias beta [L, M] and the output cell's projections; the layers' matrices."""
    rng = np.random.default_rng(seed)
    make = lambda *shape: jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[-2]))  # noqa: E731
    shared = {"beta": jnp.asarray(rng.normal(size=(layers, sources))), "key": make(D, D), "value": make(D, D)}
    names = ("query", "key", "value", "out", "up", "down")
    return shared, {name: make(layers, D, D) for name in names}


def heads(x):
    return x.reshape(*x.shape[:-1], H, K)


@dataclasses.dataclass(frozen=True)
class Program:
    reader: Reader

    def open(self, shared, e):
        return e

    def keys(self, shared, layer, state, tokens, tile, l):
        return tuple(heads(norm(state) @ layer[name])[None] for name in ("key", "value"))

    def step(self, shared, layer, state, own, gathered, tokens, tile, l):
        query = heads(norm(state) @ layer["query"])
        masks = self.reader.masks(tokens, tile, l)
        beta = shared["beta"][l]
        y = attend_cells(
            query,
            (
                own_cells(*own, masks.own, beta[l]),
                Cells(*gathered.rows, masks.rows, beta[masks.row_layers][:, None]),
                Cells(*gathered.near, masks.near, beta[masks.near_layers]),
            ),
        )
        state = state + y.reshape(state.shape) @ layer["out"]
        return state + jnp.tanh(norm(state) @ layer["up"]) @ layer["down"]

    def close(self, shared, state):
        return state

    def last(self, shared, state, tokens, tile):
        u = norm(state)
        return heads(u @ shared["key"])[None], heads(u @ shared["value"])[None]


def plan(reads, tokens, count, strided=False):
    reader = Reader(reads, tokens, one_tile=count == 1)
    return Tiles(Program(reader), reader, reads.layers, tokens, count, strided)


def one_document(tokens):
    places = jnp.arange(tokens)[None]
    return Tokens(places, places)


def empty_grid(reads, tokens):
    return tuple(jnp.zeros((len(Store(reads).slots), B, tokens, H, K)) for _ in range(2))


def tiled(reads, count, params, e, tokens=None, previous=None, strided=False, grid=None):
    """(outputs, grid) by ``count`` tiles."""
    T = e.shape[1]
    shared, layers = params
    grid = empty_grid(reads, T) if grid is None else grid
    tokens = one_document(T) if tokens is None else tokens
    return run_tiles(plan(reads, T, count, strided), shared, layers, e, grid, previous, tokens)


def swept(reads, sweeps, params, e, groups=1, previous=None):
    """(outputs, grid) after so many sweeps, from zeros unless told."""
    previous = empty_grid(reads, e.shape[1]) if previous is None else previous
    for _ in range(sweeps):
        h, previous = tiled(reads, groups, params, e, previous=previous, strided=True)
    return h, previous


def cell_by_cell(reads, params, e, order=None):
    """Outputs [B, T, D], every cell in two plain loops. order: of the keys within each softmax, None as they come."""
    shared, layers = params
    T, L = e.shape[1], reads.layers
    made, out = {}, []
    for t in range(1, T + 1):
        h = e[:, t - 1]
        for l in range(1, L + 1):
            W = {name: w[l - 1] for name, w in layers.items()}
            u = norm(h)
            made[t, l] = heads(u @ W["key"]), heads(u @ W["value"])
            query = heads(u @ W["query"])
            cells = [
                (s, m) for s in range(1, T + 1) for m in range(1, reads.sources + 1) if bool(reads.allows(t, l, s, m))
            ]
            assert all(cell in made for cell in cells), "a cell is read before it is made"
            a = jnp.zeros_like(h)
            if cells:
                cells = cells if order is None else [cells[i] for i in order(len(cells))]
                keys = jnp.stack([made[cell][0] for cell in cells], 1)
                values = jnp.stack([made[cell][1] for cell in cells], 1)
                beta = jnp.stack([shared["beta"][l - 1, m - 1] for _, m in cells])
                logits = jnp.einsum("bhk,bnhk->bhn", query, keys) / np.sqrt(K) + beta
                a = jnp.einsum("bhn,bnhk->bhk", jax.nn.softmax(logits), values).reshape(h.shape) @ W["out"]
            h = h + a
            h = h + jnp.tanh(norm(h) @ W["up"]) @ W["down"]
        if reads.sources > L:
            u = norm(h)
            made[t, L + 1] = heads(u @ shared["key"]), heads(u @ shared["value"])
        out.append(h)
    return jnp.stack(out, 1)


def kept(reads):
    """The sources that are read by others than their own cell, from 0."""
    return jnp.array([m for _, m in Store(reads).slots])


def dense(params, e, allowed, keep):
    """(outputs, grid), cell by cell over every source, masked by ``allowed`` [T, L, T, M]: one program for all read
    sets of a size, differentiated as it is. The grid is that of the sources ``keep``."""
    shared, layers = params
    (T, L, _, M), batch = allowed.shape, e.shape[0]
    beta = shared["beta"]

    def column(grid, xs):
        x, rows, t = xs

        def cell(carry, xs):
            h, (keys, values) = carry
            W, row, beta_l, l = xs
            u = norm(h)
            keys, values = keys.at[l, :, t].set(heads(u @ W["key"])), values.at[l, :, t].set(heads(u @ W["value"]))
            logits = jnp.einsum("bhk,mbshk->bhsm", heads(u @ W["query"]), keys) / np.sqrt(K) + beta_l
            weights = jnp.where(row, jnp.exp(logits), 0).reshape(batch, H, -1)
            total = weights.sum(-1, keepdims=True)
            weights = (weights / jnp.where(total > 0, total, 1)).reshape(logits.shape)
            h = h + jnp.einsum("bhsm,mbshk->bhk", weights, values).reshape(h.shape) @ W["out"]
            return (h + jnp.tanh(norm(h) @ W["up"]) @ W["down"], (keys, values)), None

        (h, (keys, values)), _ = jax.lax.scan(cell, (x, grid), (layers, rows, beta, jnp.arange(L)))
        if M > L:
            keys = keys.at[L, :, t].set(heads(norm(h) @ shared["key"]))
            values = values.at[L, :, t].set(heads(norm(h) @ shared["value"]))
        return (keys, values), h

    grid = tuple(jnp.zeros((M, batch, T, H, K)) for _ in range(2))
    grid, h = jax.lax.scan(column, grid, (jnp.moveaxis(e, 1, 0), allowed, jnp.arange(T)))
    return jnp.moveaxis(h, 0, 1), tuple(x[keep] for x in grid)
