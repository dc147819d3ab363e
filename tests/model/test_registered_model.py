"""Tests of custom architectures: subclasses with other functions or another network."""

import jax
import numpy as np
import pytest

from jaxforge.model.network import Block, Transformer
from jaxforge.model.transformer import Model, build_model, register_model
from tests.conftest import tiny_config
from tests.helpers import drawn

TOKENS = np.arange(8)[None]


class DoubledBlock(Block):
    """Block that adds its input once more, so that each layer doubles the residual stream."""

    def __call__(self, x_BSD, *args, **kwargs):
        y_BSD, cache = super().__call__(x_BSD, *args, **kwargs)
        return x_BSD + y_BSD, cache


class DoubledNetwork(Transformer):
    def __init__(self, config, declare):
        super().__init__(config, declare)
        self.layers = DoubledBlock(config, declare._replace(layers=config.n_layers))


@pytest.mark.usefixtures("own_names")
def test_build_model_builds_registered_model():
    @register_model("doubled")
    class Doubled(Model):
        network = DoubledNetwork

        def final_norm(self, params, x_BSD):
            return x_BSD  # without the final norm, to compare the output of the layers

    model = build_model(tiny_config(model={"model_type": "doubled"}))
    assert isinstance(model, Doubled)
    result = build_model(tiny_config())
    assert model.axes == result.axes
    params = drawn(tiny_config())
    zeros = jax.tree.map(np.zeros_like, params["layers"])
    params = {**params, "layers": zeros}  # blocks that add nothing
    embedded = jax.jit(result.embed_tokens)(params, TOKENS)
    np.testing.assert_allclose(jax.jit(model.hidden)(params, TOKENS), 4 * embedded, rtol=1e-6)


def test_custom_network_declares_its_parameters():
    class Wider(Model):
        @staticmethod
        def network(config, declare):
            return Transformer(config.model_copy(update={"ffn_hidden_dim": 96}), declare)

    shapes = Wider(tiny_config().model).abstract["layers"]["mlp"]
    assert {leaf.shape for leaf in jax.tree.leaves(shapes)} == {(2, 96, 64), (2, 64, 96)}
