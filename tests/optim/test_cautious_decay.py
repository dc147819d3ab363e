"""Cautious weight decay, compared with its formula."""

import jax.numpy as jnp
import numpy as np

from jaxforge.optim.adamw import scale_by_adam
from tests.optim import problem

BETAS, EPS, DECAY = (0.9, 0.95), 1e-8, 20.0


def test_only_elements_that_move_towards_zero_decay():
    """x - lr (u + decay · 1[u x ≥ 0] x), arXiv:2510.12402; a large decay makes errors visible."""

    def update(p, g, state, k, decay):
        lr = float(problem.rate(k - 1))
        without = problem.adamw_update(p, g, state, k, lr, 0.0, BETAS, EPS)
        rate = DECAY if decay else 0.0
        return without - lr * rate * np.where((p - without) * p >= 0, p, 0.0)

    expected, _ = problem.reference(update, 20)
    decays = problem.tree(lambda shape, axes: DECAY if len(set(axes) - {"layers"}) > 1 else 0.0)
    direction = scale_by_adam(BETAS, EPS, jnp.dtype("float32"))
    tx = problem.rule(direction, decay=decays, is_cautious=True)
    params, _ = problem.run(tx, 20)
    problem.assert_params(params, expected, atol=2e-6)
