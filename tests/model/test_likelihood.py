"""Tests of likelihoods of continuations against the full forward pass, on any mesh."""

import functools

import jax
import numpy as np
import pytest

from jaxforge.errors import UserError
from jaxforge.model import likelihood
from jaxforge.model.likelihood import Continuation, Scorer
from jaxforge.model.transformer import Model
from jaxforge.parallel.mesh import make_mesh
from jaxforge.parallel.sharding import param_shardings
from tests.conftest import tiny_config
from tests.helpers import drawn, setup, with_random_biases

MAX_LENGTH = 40
RNG = np.random.default_rng(0)


def tokens(n):
    return RNG.integers(0, 64, n).tolist()


SHARED = tokens(9)
CONTINUATIONS = [
    Continuation(tokens(3), tokens(2)),
    *(Continuation(SHARED, [letter]) for letter in (3, 7, 3, *range(20, 30))),
    Continuation(SHARED[:-1], [SHARED[-1], 7]),  # the same tokens; two are scored
    Continuation(tokens(1), tokens(MAX_LENGTH)),  # maximum length
    Continuation(tokens(70), tokens(5)),  # the context is cut at its start
    Continuation(tokens(20), tokens(18)),
]


MODEL = {"dim": 32, "vocab_size": 64, "init_std": 0.3}
RECURRENT = {
    **MODEL, "n_layers": 1, "mixer_pattern": ("mamba2",),
    "mamba2": {"heads": 4, "head_dim": 16, "groups": 2, "state_size": 8},
}  # fmt: skip


@functools.cache
def toy(**distributed):
    return of_config(tiny_config(model=MODEL, train={"seed": 0}, distributed=distributed))


def of_config(config):
    return config, with_random_biases(drawn(config))


@functools.cache
def forward():
    config, params = toy(dp_shard=1)
    model = Model(config.model)
    logits = jax.jit(lambda params, tokens: model.logits(params, model.hidden(params, tokens)))
    return functools.partial(logits, params)


def logits_of(inputs):
    """Return logits in float64, from one program for any number of inputs."""
    padded = np.zeros((1, MAX_LENGTH), np.int32)
    padded[0, : len(inputs)] = inputs
    return np.asarray(forward()(padded), np.float64)[0, : len(inputs)]


@functools.cache
def whole_forward():
    """Return the log-probability of each continuation alone, and whether it is greedy."""
    results = []
    for context, continuation in CONTINUATIONS:
        *inputs, _ = read = [*context, *continuation][-MAX_LENGTH - 1 :]
        ends = read[-len(continuation) :]
        logits = logits_of(inputs)[-len(ends) :]
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        results.append((log_p[np.arange(len(ends)), ends].sum(), (logits.argmax(-1) == ends).all()))
    return results


def check(result):
    for item, (log_p, is_greedy) in zip(result, whole_forward(), strict=True):
        assert item.log_probability == pytest.approx(log_p, rel=1e-5)
        assert item.is_greedy == is_greedy


@pytest.mark.parametrize("rows", [1, 4])
def test_likelihoods_match_full_forward(rows, monkeypatch):
    monkeypatch.setattr(likelihood, "LOGITS", 64 * 32)  # a few positions at a time
    config, params = toy(dp_shard=1)
    check(Scorer(Model(config.model), params, MAX_LENGTH, rows=rows).score(CONTINUATIONS))


@pytest.mark.parametrize("mesh", [{"dp_shard": 8}, {"dp_shard": 2, "tp": 2, "cp": 2}], ids=str)
def test_likelihoods_do_not_depend_on_mesh(mesh):
    check(scored(*toy(**mesh), rows=3))


def scored(config, params, rows, continuations=CONTINUATIONS):
    program = setup(config)
    mesh, model = program.mesh, program.model
    with jax.set_mesh(mesh):
        placed = jax.device_put(params, param_shardings(model.abstract, model.axes, mesh))
        return Scorer(model, placed, MAX_LENGTH, mesh, rows=rows).score(continuations)


def test_likelihoods_do_not_depend_on_order_of_tokens_on_devices():
    """A ring gives each device two parts of a sequence."""
    alone, ring = (
        scored(
            *of_config(tiny_config(model=RECURRENT, distributed={"dp_shard": 1, **mesh})),
            rows=2, continuations=CONTINUATIONS[-2:],
        )
        for mesh in ({}, {"cp": 2, "cp_strategy": "ring"})
    )  # fmt: skip
    np.testing.assert_allclose(ring, alone, rtol=1e-5)


def test_greedy_continuation_is_marked_greedy():
    config, params = toy(dp_shard=1)
    model, context = Model(config.model), tokens(4)

    def best(*more):
        return int(logits_of([*context, *more])[-1].argmax())

    first, wrong = best(), best() ^ 1
    results = [[first], [wrong], [first, best(first)], [wrong, best(wrong)]]
    result = Scorer(model, params, MAX_LENGTH).score(
        [Continuation(context, item) for item in results]
    )
    assert [item.is_greedy for item in result] == [True, False, True, False]
    assert result[0].log_probability > result[1].log_probability


def test_continuations_with_same_prefix_share_row():
    rows = likelihood.input_rows(CONTINUATIONS, MAX_LENGTH)
    read = [row for row in rows if row.inputs == tuple(SHARED)]
    assert [len(row.last) for row in read if not row.scored] == [8, 4]
    assert [row.last for row in read if row.scored] == [[7]]


def test_one_program_per_padded_length_is_compiled():
    config, params = toy(dp_shard=1)
    scorer = Scorer(Model(config.model), params, MAX_LENGTH, rows=4)
    before = likelihood._score._cache_size()
    some = [Continuation(tokens(n), tokens(1 + n % 3)) for n in range(1, 30)]
    scorer.score(some)
    assert likelihood._score._cache_size() - before <= 3  # of 16 and of 32 tokens, short and not


@pytest.mark.parametrize("continuation", [([64], [1]), ([1], [2, 64]), ([1], [64])])
def test_token_beyond_the_vocabulary_is_refused(continuation):
    config, params = toy()
    scorer = Scorer(
        Model(config.model), params, MAX_LENGTH, make_mesh(config, jax.devices()[:1]), 4
    )
    with pytest.raises(UserError, match="token 64, and the model has only 64 tokens"):
        scorer.score([Continuation(*continuation)])
