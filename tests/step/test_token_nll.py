"""Cross-entropy of each token, compared with plain autodiff."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxforge.model.transformer import build_model
from jaxforge.step.distillation import top_logits
from jaxforge.step.token_nll import Target, token_nll
from tests.conftest import tiny_config

SHAPE = 2, 12


@pytest.mark.parametrize(
    ("model", "temperature", "chunk"),
    [
        pytest.param({}, 1.0, 0, marks=pytest.mark.slow),
        ({"final_logit_softcap": 1.5}, 2.0, 100),
        pytest.param({"tie_embeddings": False}, 0.5, 64, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_values_and_gradients_equal_autodiff(model, temperature, chunk):
    given = tiny_config(model={"init_std": 0.5, **model}, train={"ce_vocab_chunk": chunk})
    result, rng = build_model(given), np.random.default_rng(0)
    params = result.init(jax.random.key(0))
    hidden = jnp.asarray(rng.normal(size=(*SHAPE, 64)), jnp.float32)
    ids = np.stack([rng.choice(256, 5, replace=False) for _ in range(24)]).reshape(*SHAPE, 5)
    probabilities = rng.dirichlet(np.ones(5), SHAPE).astype(np.float32)
    weights = jnp.asarray(rng.normal(size=SHAPE), jnp.float32)

    def chunked(params, hidden):
        target = Target(jnp.asarray(ids), jnp.asarray(probabilities))
        return token_nll(given.train, result, params, hidden, target, temperature)

    def plain(params, hidden):
        log_p = jax.nn.log_softmax(result.logits(params, hidden) / temperature)
        return -jnp.sum(probabilities * jnp.take_along_axis(log_p, ids, -1), -1)

    np.testing.assert_allclose(chunked(params, hidden), plain(params, hidden), rtol=1e-5)
    mine, reference = (
        jax.grad(lambda *x, f=f: jnp.sum(weights * f(*x) ** 2), (0, 1))(params, hidden)
        for f in (chunked, plain)
    )
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5), mine, reference
    )


def test_top_logits_are_those_of_the_whole_vocabulary(monkeypatch):
    monkeypatch.setattr("jaxforge.step.distillation._LOGITS", 2000)  # several parts
    result = build_model(tiny_config(model={"final_logit_softcap": 1.5}))
    params = result.init(jax.random.key(0))
    hidden = jax.random.normal(jax.random.key(1), (*SHAPE, 64))
    ids, values = top_logits(result, params, hidden, 7)
    expected = jax.lax.top_k(result.logits(params, hidden), 7)
    np.testing.assert_array_equal(ids, expected[1])
    np.testing.assert_allclose(values, expected[0], rtol=1e-6)
