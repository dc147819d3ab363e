"""An architecture of one's own: a subclass with other functions, another network, or both."""

import jax
import numpy as np
import pytest

from jaxforge.model.network import Block, Transformer
from jaxforge.model.transformer import Model, build_model, register_model
from tests.conftest import tiny_config
from tests.helpers import drawn

TOKENS = np.arange(8)[None]


class DoubledBlock(Block):
    """The sum of the block and its input, so that each layer doubles what passes it by."""

    def __call__(self, x_BSD, *args, **kwargs):
        y_BSD, cache = super().__call__(x_BSD, *args, **kwargs)
        return x_BSD + y_BSD, cache


class DoubledNetwork(Transformer):
    def __init__(self, config, declare):
        super().__init__(config, declare)
        self.layers = DoubledBlock(config, declare._replace(layers=config.n_layers))


@pytest.mark.usefixtures("own_names")
def test_registered_model_is_what_build_model_builds():
    @register_model("doubled")
    class Doubled(Model):
        network = DoubledNetwork

        def final_norm(self, params, x_BSD):
            return x_BSD  # without the final norm, to see what the layers made

    model = build_model(tiny_config(model={"model_type": "doubled"}))
    assert isinstance(model, Doubled)
    ours = build_model(tiny_config())
    assert model.axes == ours.axes
    params = drawn(tiny_config())
    silent = jax.tree.map(np.zeros_like, params["layers"])
    params = {**params, "layers": silent}  # blocks that add nothing
    embedded = jax.jit(ours.embed_tokens)(params, TOKENS)
    np.testing.assert_allclose(jax.jit(model.hidden)(params, TOKENS), 4 * embedded, rtol=1e-6)


def test_network_of_its_own_declares_its_own_parameters():
    class Wider(Model):
        @staticmethod
        def network(config, declare):
            return Transformer(config.model_copy(update={"ffn_hidden_dim": 96}), declare)

    shapes = Wider(tiny_config().model).abstract["layers"]["mlp"]
    assert {leaf.shape for leaf in jax.tree.leaves(shapes)} == {(2, 96, 64), (2, 64, 96)}
