"""Decay groups of parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict

from jaxforge.config.model import ModelConfig
from jaxforge.config.optimizer import OPTIMIZERS, OptimizerConfig
from jaxforge.errors import UserError
from jaxforge.model.linear import is_matrix
from jaxforge.model.transformer import Model
from jaxforge.optim.optimizer import build_optimizer, decay_groups
from tests.conftest import TINY, tiny_config
from tests.helpers import EVERY_OPTION, LEARNED
from tests.torch_names import to_torch

VARIANTS = [
    {}, {"tie_embeddings": True}, {"norm_type": "layernorm"}, {"qk_norm": True},
    {"activation": "gelu"}, {"qkv_bias": True}, EVERY_OPTION, LEARNED,
]  # fmt: skip


def decay_by_name(model, weight_decay):
    """Return decay arrays of the parameters' shapes by KempnerForge's names."""
    decay = jax.tree.map(
        lambda d, leaf: np.full(leaf.shape, d),
        decay_groups(model.axes, OptimizerConfig(weight_decay=weight_decay)),
        model.abstract,
    )
    return to_torch(decay)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_decay_matches_kempnerforge(variant):
    """KempnerForge decays parameters of several dimensions without "bias" in the name."""
    named = decay_by_name(Model(ModelConfig(**{**TINY["model"], **variant})), 0.3)
    for name, decay in named.items():
        expected = 0.3 if decay.ndim > 1 and "bias" not in name else 0.0
        assert (decay == expected).all(), name
    assert any("norm" in name for name in named)


def test_decay_patterns_override_dimensions():
    model = Model(ModelConfig(**{**TINY["model"], "qkv_bias": True}))
    requested = OptimizerConfig(
        weight_decay=0.3,
        decay_patterns=(r"norm\.weight$", "q_proj"),
        no_decay_patterns=("embedding|head", "q_proj.bias", "mlp_norm"),
    )
    plain = flatten_dict(decay_groups(model.axes, OptimizerConfig(weight_decay=0.3)), sep=".")
    decay = flatten_dict(decay_groups(model.axes, requested), sep=".")
    assert {name: value for name, value in decay.items() if value != plain[name]} == {
        "layers.attention_norm.weight": 0.3,
        "norm.weight": 0.3,
        "output_head.proj.weight": 0.0,
        "token_embedding.embedding.weight": 0.0,
    }


def test_unmatched_or_invalid_decay_pattern_raises():
    config = tiny_config(optimizer={"no_decay_patterns": ("norm", "embeding")})
    message = r'optimizer.no_decay_patterns: "embeding" matches no parameter. Parameters are lay'
    with pytest.raises(UserError, match=message):
        build_optimizer(config, Model(config.model).axes)
    with pytest.raises(ValueError, match=r'decay_patterns: "\*" is not a regular expression: noth'):
        OptimizerConfig(decay_patterns=("*",))


def test_stacked_layers_do_not_count_as_a_dimension():
    assert not is_matrix(("norm",))
    assert not is_matrix(("layers", "norm"))
    assert is_matrix(("vocab", "embed"))
    assert is_matrix(("layers", "mlp", "embed"))


@pytest.mark.parametrize("name", OPTIMIZERS.names())
def test_zero_gradients_only_shrink_matrices(name):
    config = tiny_config(
        model={"norm_type": "layernorm", "qk_norm": True, "qkv_bias": True},
        optimizer={"name": name, "lr": 0.1, "weight_decay": 0.5},
        scheduler={"name": "none"},
    )
    model = Model(config.model)
    params = jax.tree.map(lambda leaf: jnp.ones(leaf.shape), model.abstract)
    tx = build_optimizer(config, model.axes)

    @jax.jit
    def step(params):
        zero = jax.tree.map(jnp.zeros_like, params)
        updates, state = tx.update(zero, tx.init(params), params)
        if name == "soap":  # its first update changes nothing
            updates, _ = tx.update(zero, state, params)
        return optax.apply_updates(params, updates)

    for parameter, values in to_torch(jax.device_get(step(params))).items():
        expected = 0.95 if values.ndim > 1 else 1.0
        np.testing.assert_allclose(values, expected, rtol=1e-6, err_msg=parameter)
