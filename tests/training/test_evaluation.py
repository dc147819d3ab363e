"""Evaluation weights every token equally, for any batch size, mesh and number of sets."""

import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict

from jaxforge.aux_outputs import Max, Mean
from jaxforge.data import sources
from jaxforge.data.corpus.manifest import Manifest, Shard
from jaxforge.data.corpus.tokenizer import ByteTokenizer
from jaxforge.errors import UserError
from jaxforge.model.transformer import build_model
from jaxforge.parallel.mesh import make_mesh
from jaxforge.parallel.sharding import param_shardings
from jaxforge.training import launch
from jaxforge.training.eval_functions import build_eval_functions, register_eval_function
from jaxforge.training.evaluation import Evaluator, SetSums, summary
from tests.conftest import tiny_config
from tests.helpers import devices_here, initial_params
from torch_compat.formats.ocdbt import open_arrays

SEQ, EOS = 32, 256
VOCAB = 264
WINDOWS = {"a": 11, "b": 6}


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Two sets of random documents of bytes, with 11 and 6 windows."""
    root, rng = tmp_path_factory.mktemp("sets"), np.random.default_rng(0)
    for name, n in WINDOWS.items():
        tokens = rng.integers(0, 256, n * (SEQ + 1) + 5)
        tokens[rng.random(tokens.shape) < 0.1] = EOS
        (root / name).mkdir()
        np.save(root / name / "a.npy", tokens.astype(np.uint16))
    return root


def config(shards, *names, batch=4, pack=False, train=None, evaluation=None, **sections):
    sets = [{"name": name, "dataset_path": str(shards / name)} for name in names]
    job = {"datasets": sets if len(sets) > 1 else {"dataset_path": sets[0]["dataset_path"]}}
    return tiny_config(
        model={"vocab_size": VOCAB, "init_std": 0.3},
        train={"batch_size": batch, **(train or {})},
        data={"pack_sequences": pack, "eos_token_id": EOS},
        eval={"enabled": True, **job, **(evaluation or {})},
        **sections,
    )


@functools.cache
def params():
    return build_model(tiny_config(model={"vocab_size": VOCAB, "init_std": 0.3})).init(
        jax.random.key(0)
    )


def evaluated(job, tokenizer=None, steps=None, devices=1):
    mesh = make_mesh(job, jax.devices()[:devices])
    model = build_model(job)
    with jax.set_mesh(mesh):
        placed = jax.device_put(params(), param_shardings(model.abstract, model.axes, mesh))
        evaluator = Evaluator(job, mesh, model, sources.open_eval_data(job), tokenizer)
        return evaluator(placed, steps)


@functools.cache
def reference_logits(path, pack):
    """Return logits in float64, labels, and True for labels that count, of single windows."""
    model = build_model(tiny_config(model={"vocab_size": VOCAB, "init_std": 0.3}))
    windows = np.load(path / "a.npy").astype(np.int64)
    windows = windows[: len(windows) // (SEQ + 1) * (SEQ + 1)].reshape(-1, SEQ + 1)
    inputs, labels = windows[:, :-1], windows[:, 1:]
    docs = np.cumsum(inputs == EOS, axis=1) - (inputs == EOS)
    hidden = jax.jit(model.hidden)(params(), inputs, docs if pack else None)
    logits = np.asarray(jax.jit(model.logits)(params(), hidden), np.float64)
    return logits, labels, inputs != EOS if pack else np.ones_like(labels, bool)


def reference_sums(path, pack):
    """Return the sums over a set in float64."""
    logits, labels, counts = reference_logits(path, pack)
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    nats = -np.take_along_axis(logp, labels[..., None], -1)[..., 0]
    return nats[counts].sum(), counts.sum(), (labels[counts] != EOS).sum()


@pytest.mark.parametrize("pack", [False, True])
def test_sums_match_reference_with_partial_last_batch(shards, pack):
    sums = evaluated(config(shards, "a", pack=pack), ByteTokenizer())[""]
    nats, tokens, n_bytes = reference_sums(shards / "a", pack)
    assert (sums.tokens, sums.n_bytes) == (tokens, n_bytes)
    assert sums.nats == pytest.approx(nats, rel=1e-6)
    assert sums.metrics() == pytest.approx(
        {
            "loss": nats / tokens,
            "perplexity": math.exp(nats / tokens),
            "bits_per_byte": nats / math.log(2) / n_bytes,
        },
        rel=1e-5,
    )


MESHES = [
    ({"dp_shard": 2}, 2, 2),
    ({"dp_shard": 2, "tp": 2}, 4, 3),
    ({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, 8, 1),
    ({"dp_shard": 8}, 8, 1),
]


@pytest.mark.parametrize(("axes", "devices", "batch"), MESHES, ids=str)
def test_sums_do_not_depend_on_mesh_and_batch_size(shards, axes, devices, batch):
    job = config(shards, "a", "b", batch=batch, pack=True, distributed=axes)
    sums = evaluated(job, ByteTokenizer(), devices=devices)
    for name in WINDOWS:
        nats, tokens, n_bytes = reference_sums(shards / name, True)
        assert (sums[name].tokens, sums[name].n_bytes) == (tokens, n_bytes)
        assert sums[name].nats == pytest.approx(nats, rel=1e-5)


def test_every_token_of_all_sets_has_equal_weight(shards):
    sums = evaluated(config(shards, "a", "b"), ByteTokenizer())
    metrics = summary(sums)
    assert set(metrics) == set(config(shards, "a", "b").eval.metric_names())
    nats, tokens, n_bytes = np.sum(
        [reference_sums(shards / name, False) for name in WINDOWS], axis=0
    )
    assert metrics["eval/loss"] == pytest.approx(nats / tokens, rel=1e-5)
    assert metrics["eval/bits_per_byte"] == pytest.approx(nats / math.log(2) / n_bytes, rel=1e-5)
    assert metrics["eval/b/loss"] == pytest.approx(sums["b"].nats / sums["b"].tokens)
    assert metrics["eval/a/loss"] != metrics["eval/b/loss"]


def test_steps_limit_each_set_to_the_same_batches(shards):
    job = config(shards, "a", "b")
    once, again = (evaluated(job, steps=1) for _ in range(2))
    assert once == again
    assert [sums.tokens for sums in once.values()] == [4 * SEQ, 4 * SEQ]
    assert evaluated(job, steps=99)["a"].tokens == 11 * SEQ


def test_chunked_loss_gives_same_sums(shards):
    plain = evaluated(config(shards, "a"))
    train = {"loss_fn": "chunked_cross_entropy", "ce_chunk_size": 20}
    chunked = evaluated(config(shards, "a", train=train))
    assert chunked[""].nats == pytest.approx(plain[""].nats, rel=1e-6)


def test_padding_rows_reach_no_expert(shards):
    """The mean of a term over 11 windows is the same with batches of 4 and of 1."""

    def router_z(batch):
        job = config(shards, "a", batch=batch)
        moe = {"num_experts": 4, "moe_router_z_loss_weight": 0.1}
        job = job.model_copy(update={"model": job.model.model_copy(update=moe)})
        mesh, model = make_mesh(job, jax.devices()[:1]), build_model(job)
        sets = sources.open_eval_data(job)
        with jax.set_mesh(mesh):
            weights = initial_params(model)
            sums = Evaluator(job, mesh, model, sets, None)(weights)
        return summary(sums)["eval/router_z_loss"]

    assert router_z(4) == pytest.approx(router_z(1), rel=1e-5)


def test_bits_per_byte_are_missing_without_bytes(shards):
    assert set(summary(evaluated(config(shards, "a")))) == {"eval/loss", "eval/perplexity"}
    known, unknown = SetSums(2.0, 1, 1), SetSums(3.0, 4, None)
    metrics = summary({"a": known, "b": unknown})
    assert "eval/a/bits_per_byte" in metrics
    assert not {"eval/bits_per_byte", "eval/b/bits_per_byte"} & set(metrics)
    assert metrics["eval/loss"] == 1.0


def test_bits_per_byte_are_missing_for_another_tokenizer(shards, tmp_path, caplog):
    (tmp_path / "a.npy").write_bytes((shards / "a" / "a.npy").read_bytes())
    n = 11 * (SEQ + 1) + 5
    for digest, known in ((ByteTokenizer.fingerprint, True), ("0" * 64, False)):
        shard = (Shard("a.npy", n, EOS),)
        Manifest(1, "uint16", n, 1, EOS, EOS, 257, "other", digest, shard).write(tmp_path)
        sums = evaluated(config(tmp_path.parent, tmp_path.name), ByteTokenizer())[""]
        assert (sums.n_bytes is not None) == known


def test_perplexity_is_bounded_and_empty_set_is_nan():
    assert SetSums(100.0, 1, None).metrics()["perplexity"] == math.exp(20)
    assert all(math.isnan(value) for value in SetSums(0.0, 0, 0).metrics().values())
    assert math.isnan(SetSums(1.0, 1, 0).metrics()["bits_per_byte"])


def test_metric_that_needs_bytes_raises_without_bytes(shards):
    job = config(shards, "a")
    mesh, model = make_mesh(job, jax.devices()[:1]), build_model(job)
    sets = sources.open_eval_data(job)
    Evaluator(job, mesh, model, sets, ByteTokenizer()).direction("eval/bits_per_byte")
    Evaluator(job, mesh, model, sets, None).direction("eval/loss")
    with pytest.raises(UserError, match=r"bytes of tokens are unknown.*eval/loss, eval/perplexity"):
        Evaluator(job, mesh, model, sets, None).direction("eval/bits_per_byte")


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_run_evaluates_average_of_parameters(shards, tmp_path, capsys, dtype):
    job = config(
        shards, "a", "b", train={"ema_decay": 0.5, "ema_dtype": dtype, "max_steps": 3},
        evaluation={"interval": 3},
        checkpoint={"dir": str(tmp_path), "best_metric": "eval/ema_loss"},
    )  # fmt: skip
    with devices_here(1):
        assert launch.fit(job).code == 0
    (metrics,) = (line for line in run_lines(tmp_path) if "eval/loss" in line)
    arrays = open_arrays(tmp_path / "checkpoints" / "step_3" / "state")
    losses = {}
    for section, prefix in (("params", ""), ("ema", "ema_")):
        weights = {
            name.partition(".")[2]: np.asarray(leaf.all(), np.float32)
            for name, leaf in arrays.items()
            if name.startswith(f"{section}.")
        }
        for name in WINDOWS:
            losses[f"eval/{name}/{prefix}loss"] = loss_of(shards / name, weights)
    assert {name: metrics[name] for name in losses} == pytest.approx(losses, rel=1e-5)
    assert metrics["eval/ema_loss"] != metrics["eval/loss"]
    assert metrics["eval/ema_perplexity"] == pytest.approx(math.exp(metrics["eval/ema_loss"]))
    assert f"eval_ema_loss={metrics['eval/ema_loss']:.4f}" in capsys.readouterr().out


def run_lines(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def loss_of(path, weights):
    """Return the mean loss over single windows for parameters by dotted name."""
    model = build_model(tiny_config(model={"vocab_size": VOCAB, "init_std": 0.3}))
    windows = np.load(path / "a.npy").astype(np.int64)
    windows = windows[: len(windows) // (SEQ + 1) * (SEQ + 1)].reshape(-1, SEQ + 1)
    tree = unflatten_dict(weights, sep=".")
    logits = model.logits(tree, model.hidden(tree, windows[:, :-1], None))
    logp = jax.nn.log_softmax(jnp.asarray(logits, jnp.float32))
    return -float(jnp.mean(jnp.take_along_axis(logp, windows[:, 1:, None], -1)))


def test_evaluations_share_one_compiled_program(shards):
    job = config(shards, "a", "b", pack=True)
    mesh, model = make_mesh(job, jax.devices()[:1]), build_model(job)
    with jax.set_mesh(mesh):
        evaluator = Evaluator(job, mesh, model, sources.open_eval_data(job), ByteTokenizer())
        placed = jax.device_put(params(), param_shardings(model.abstract, model.axes, mesh))
        evaluator(placed)
        evaluator(placed, 1)
    assert evaluator._step._cache_size() == 1


@pytest.fixture
def label_logits(own_names):
    """Register a function with a mean and a sum."""

    @register_eval_function("label_logits")
    def label_logits(config, model):
        def function(params, hidden, batch):
            labels = batch["labels"]
            is_valid = labels >= 0
            logits = model.logits(params, hidden)
            chosen = jnp.take_along_axis(logits, jnp.maximum(labels, 0)[..., None], -1)[..., 0]
            total = jnp.sum(jnp.where(is_valid, chosen, 0))
            return {
                "label_logit": Mean(total, jnp.sum(is_valid)),
                "even_labels": jnp.sum(is_valid & (labels % 2 == 0)),
            }

        return function


@pytest.mark.parametrize(
    ("axes", "devices", "batch"), [({}, 1, 4), *MESHES[1:3], ({"pp": 2}, 2, 4)], ids=str
)
@pytest.mark.usefixtures("label_logits")
def test_functions_match_numpy_on_any_mesh(shards, axes, devices, batch):
    functions = {"functions": ["accuracy", "label_logits"]}
    job = config(shards, "a", "b", batch=batch, pack=True, distributed=axes, evaluation=functions)
    metrics = summary(evaluated(job, devices=devices))
    both = [reference_logits(shards / name, True) for name in WINDOWS]
    for name, sets in (("a/", both[:1]), ("b/", both[1:]), ("", both)):
        logits, labels, counts = (np.concatenate(arrays) for arrays in zip(*sets, strict=True))
        chosen = np.take_along_axis(logits, labels[..., None], -1)[..., 0][counts]
        assert metrics[f"eval/{name}accuracy"] == pytest.approx(
            (logits.argmax(-1) == labels)[counts].mean(), rel=1e-6
        )
        assert metrics[f"eval/{name}label_logit"] == pytest.approx(chosen.mean(), rel=1e-4)
        assert metrics[f"eval/{name}even_labels"] == (labels[counts] % 2 == 0).sum()


@pytest.mark.usefixtures("label_logits")
def test_metric_of_function_can_rank_checkpoints(shards):
    job = config(shards, "a", evaluation={"functions": ["label_logits"]})
    mesh, model = make_mesh(job, jax.devices()[:1]), build_model(job)
    evaluator = Evaluator(job, mesh, model, sources.open_eval_data(job), None)
    assert evaluator.direction("eval/label_logit") is None  # needs checkpoint.best_mode
    with pytest.raises(UserError, match=r"no such metric. .*eval/even_labels, eval/label_logit"):
        evaluator.direction("eval/accuracy")


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (
            {"loss": 1.0},
            '"own" returns "loss", which another metric of evaluation is named. Choose',
        ),
        ({"accuracy": 1.0}, '"own" returns "accuracy", which another metric'),
        (Max(1.0), 'returns a maximum as "own". Return a sum or a Mean'),
    ],
)
@pytest.mark.usefixtures("own_names")
def test_invalid_result_of_function_is_refused(result, message):
    register_eval_function("own")(lambda config, model: lambda params, hidden, batch: result)
    register_eval_function("first")(lambda config, model: lambda *batch: {"accuracy": 0.0})
    evaluate = build_eval_functions(("first", "own"), None, None)
    with pytest.raises(UserError, match=message):
        evaluate(None, None, {})
