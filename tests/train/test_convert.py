"""A trained plain model under every other connection: the same logits, training that goes on, and what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_run
import yaml
from test_run import run, sections
from variants import KINDS, MEMBERS_SOME_SLOW, draw, name, slow_but

from lmres.data import load_splits
from lmres.model import ModelConfig, Transformer
from lmres.ops import rms_norm
from lmres.residual import AttentionResiduals, HyperConnections, Plain
from lmres.sharding import MeshConfig, make_mesh
from lmres.train.checkpoint import Checkpoints
from lmres.train.convert import ConversionError, convert_params, convert_run
from lmres.train.fingerprint import CheckpointMismatch
from lmres.train.metrics import read_metrics
from lmres.train.progress import Reporter

SIZES = ModelConfig(
    vocab_size=32, context=12, width=16, blocks=3, heads=4, kv_heads=2, mlp_hidden=24, norm_eps=1e-12,
    qk_norm=True, tie_embeddings=False,
)  # fmt: skip
UPDATES = 3
text = test_run.text


def drawn_plain():
    """The plain model and parameters far from their start, the norms' gains too."""
    model = Transformer(SIZES, Plain())
    params = draw(model)
    rng = np.random.default_rng(1)

    def one(path, leaf):
        is_gain = jax.tree_util.keystr(path).endswith("['gain']")
        return jnp.asarray(rng.uniform(0.5, 2.0, leaf.shape), jnp.float32) if is_gain else leaf

    return model, jax.tree_util.tree_map_with_path(one, params)


def logits(model, params):
    tokens = np.random.default_rng(2).integers(0, SIZES.vocab_size, (2, SIZES.context), np.int32)
    return np.asarray(jax.jit(model.apply)({"params": params}, tokens))


@pytest.mark.parametrize("connection", MEMBERS_SOME_SLOW, ids=name)
def test_logits_are_kept_or_the_connection_is_refused(connection):
    plain, params = drawn_plain()
    model = Transformer(SIZES, connection)
    if not possible(connection, SIZES):
        with pytest.raises(ConversionError, match="is another function than pre-norm; no parameters make them equal"):
            convert_params(params, model)
        return
    before, after = logits(plain, params), logits(model, convert_params(params, model))
    assert np.abs(before).max() > 0.5
    np.testing.assert_allclose(after, before, atol=1e-4, rtol=0)


def possible(connection, sizes):
    """Whether the connection itself says that it can be the plain residual."""
    depth = sizes.blocks * (2 if connection.unit == "sublayer" else 1)
    connection = connection.fit(sizes.kv, sizes.head_size)
    start = connection.init(jax.random.key(0), depth, sizes.width)
    gains, final_gain = jnp.ones((2 * sizes.blocks, sizes.width)), jnp.ones(sizes.width)
    return connection.as_plain(start, gains, final_gain) is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnNorms(Plain):
    """Plain pre-norm that holds all norms' gains itself."""

    branch_norms = ()
    final_norm = False
    start_tolerance = None

    def init(self, key, depth, width):
        return {"layers": {"own": jnp.zeros((depth, width))}, "shared": {"last": jnp.zeros(width)}}

    def read(self, params_l, state, l, context=None):
        return rms_norm(state, params_l["own"], SIZES.norm_eps), ()

    def close(self, params, state, context=None):
        return rms_norm(state, params["shared"]["last"], SIZES.norm_eps), ()

    def as_plain(self, params, gains, final_gain):
        return {"layers": {"own": gains}, "shared": {"last": final_gain}}


def test_gains_move_into_a_connection_that_holds_the_norms():
    plain, params = drawn_plain()
    model = Transformer(SIZES, OwnNorms())
    new = convert_params(params, model)
    assert "norm" not in new["stack"]["attention"] and "final_norm" not in new
    own = new["stack"]["connection"]["layers"]["own"]
    for l, branch in enumerate(("attention", "mlp") * SIZES.blocks):
        np.testing.assert_array_equal(own[l], params["stack"][branch]["norm"]["gain"][l // 2])
    np.testing.assert_allclose(logits(model, new), logits(plain, params), atol=1e-5, rtol=0)


def test_branches_must_be_the_same():
    _, params = drawn_plain()
    with pytest.raises(ConversionError, match=r"stack/mlp/down: \[3, 24, 16\] in the plain model, \[3, 48, 16\]"):
        convert_params(params, Transformer(dataclasses.replace(SIZES, mlp_hidden=48), HyperConnections()))
    with pytest.raises(ConversionError, match="no place for head/kernel"):
        convert_params(params, Transformer(dataclasses.replace(SIZES, tie_embeddings=True), HyperConnections()))


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    """(folder of a plain run, the losses with which it goes on at step 0 of a new run)."""
    folder = tmp_path_factory.mktemp("runs")
    run(folder / "plain", sections(text, train__steps=12, train__save_every=6))
    _, result = run(folder / "same", sections(text, train__steps=UPDATES), weights_from=folder / "plain")
    return folder / "plain", losses(folder / "same"), result.evaluation["valid_loss"]


def losses(folder):
    return [line["loss"] for line in read_metrics(folder) if "loss" in line]


def convert(text, source, folder, connection, devices=1, step=None, splits=True, tolerance=1e-4, **changes):
    parts = sections(text, residual=connection, train__steps=UPDATES, model__vocab_size=257, **changes)
    stored = {k: dataclasses.asdict(v) if dataclasses.is_dataclass(v) else v for k, v in parts.items()}
    done = convert_run(
        source=source, step=step, folder=folder, stored_config=stored, tolerance=tolerance,
        mesh=make_mesh(MeshConfig(), jax.devices()[:devices]), reporter=Reporter(quiet=True),
        splits=load_splits(parts["data"], parts["model"].context, 1) if splits else None,
        **{k: parts[k] for k in ("model", "residual", "flow", "optimizer", "schedule", "train")},
    )  # fmt: skip
    return done, parts


@pytest.mark.parametrize("connection", slow_but([Plain(), HyperConnections()], KINDS), ids=name)
def test_training_goes_on(text, trained, tmp_path, connection):
    source, expected, valid = trained
    out = tmp_path / "new"
    if not possible(connection, sections(text)["model"]):
        with pytest.raises(ConversionError, match="no parameters make them equal"):
            convert(text, source, out, connection)
        assert not out.exists()
        return
    done, parts = convert(text, source, out, connection)
    assert done.step == 12 and done.difference <= 1e-4 < done.logit and done.batch == "validation text"
    _, result = run(out, parts, mode="resume")
    assert result.step == UPDATES and result.train_traces == 1
    found = losses(out)
    assert len(found) == UPDATES and np.all(np.isfinite(found))
    assert abs(found[0] - expected[0]) < 1e-4, "the first update starts from the plain model, on the same batch"
    assert np.max(np.abs(np.subtract(found, expected))) < 0.2
    assert abs(result.evaluation["valid_loss"] - valid) < 0.2


def test_the_new_folder_is_a_run_at_step_zero(text, trained, tmp_path):
    source, *_ = trained
    done, parts = convert(text, source, tmp_path / "deep" / "new", Plain(), step=6, splits=False, devices=2)
    assert done.step == 6 and done.difference == 0 and done.batch == "drawn tokens"
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["new"], "nothing else is left"
    assert yaml.safe_load((tmp_path / "deep" / "new" / "config.yaml").read_text())["train"]["steps"] == UPDATES
    with (
        Checkpoints(source / "checkpoints", mode="read") as old,
        Checkpoints(tmp_path / "deep" / "new" / "checkpoints", mode="read") as new,
    ):
        meta = new.meta()
        assert new.steps() == [0] and meta["tokenizer"] == old.meta()["tokenizer"]
        assert meta["converted_from"] == {"run": str(source), "step": 6, "difference": 0.0}
        jax.tree.map(np.testing.assert_array_equal, old.restore_params(step=6).state, new.restore_params().state)
    fresh = dataclasses.replace(parts["train"], steps=1)
    assert run(tmp_path / "deep" / "new", parts | {"train": fresh}, mode="resume")[1].step == 1


@pytest.mark.parametrize(
    ("changes", "error", "parts"),
    [
        ({"model__blocks": 3}, CheckpointMismatch, ["model.blocks: 2 -> 3", "the connection alone"]),
        ({"model__norm_eps": 1e-3}, CheckpointMismatch, ["model.norm_eps: 1e-10 -> 0.001"]),
        ({"tolerance": 1e-12}, ConversionError, ["differ by at most", "allowed are 1e-12", "Nothing was written"]),
        ({"connection": Plain(norm="post")}, ConversionError, ["plain-post is another function than pre-norm"]),
        ({"connection": Plain(norm="sandwich")}, ConversionError, ["plain-sandwich is another function"]),
    ],
    ids=lambda x: str(x)[:40],
)
def test_what_is_refused_leaves_nothing(text, trained, tmp_path, changes, error, parts):
    source, *_ = trained
    with pytest.raises(error) as refused:
        convert(text, source, tmp_path / "new", **{"connection": AttentionResiduals(), "splits": False, **changes})
    for part in parts:
        assert part in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_save_leaves_nothing(text, trained, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr(Checkpoints, "save", fail)
    with pytest.raises(OSError, match="no space left"):
        convert(text, trained[0], tmp_path / "new", AttentionResiduals(), splits=False)
    assert list(tmp_path.iterdir()) == []


def test_only_plain_pre_norm_is_converted_and_no_folder_is_replaced(text, trained, tmp_path):
    done, _ = convert(text, trained[0], tmp_path / "new", HyperConnections(), splits=False)
    assert done.connection == "hc-dynamic-4"
    with pytest.raises(ConversionError, match=r"residual.kind=hc; only plain pre-norm runs can be converted"):
        convert(text, tmp_path / "new", tmp_path / "newer", AttentionResiduals(), splits=False)
    with pytest.raises(ConversionError, match="is there already and not empty"):
        convert(text, trained[0], tmp_path / "new", AttentionResiduals(), splits=False)
