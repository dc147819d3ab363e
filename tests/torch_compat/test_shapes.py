"""The shapes that are told without JAX are those that the model and the optimizer declare."""

import itertools

import pytest

from tests.conftest import tiny_config
from torch_compat import training_state
from torch_compat.shapes import parameters
from torch_compat.state import abstract_target

MODEL = {"dim": 16, "n_layers": 3, "n_heads": 4, "vocab_size": 500, "ffn_hidden_dim": 24}
OPTIONS = {
    "n_kv_heads": [None, 2],
    "head_dim": [None, 6],
    "qkv_bias": [False, True],
    "qk_norm": [False, True],
    "tie_embeddings": [False, True],
    "norm_type": ["rmsnorm", "layernorm"],
    "activation": ["silu", "gelu"],
    "gated_mlp": [None, True],
    "o_bias": [False, True],
    "mlp_bias": [False, True],
    "norm_placement": ["pre", "sandwich"],
    "position_embedding": ["rotary", "learned"],
}


def test_the_parameters_of_every_model():
    # Each value with each value of another option: a declaration looks at two at most.
    settings = [
        dict(zip(OPTIONS, values, strict=True)) for values in zip(*OPTIONS.values(), strict=True)
    ]
    for a, b in itertools.combinations(OPTIONS, 2):
        settings.append({**settings[0], a: OPTIONS[a][1], b: OPTIONS[b][1]})
    settings += [{"norm_placement": "post"}, {"qk_norm": True, "qk_norm_scope": "projection"}]
    for chosen in settings:
        config = tiny_config(model={**MODEL, **chosen})
        _, state = training_state.declared(config)
        expected = dict(training_state.shapes(state.params))
        assert list(parameters(config.model).items()) == list(expected.items()), chosen


@pytest.mark.parametrize("name", ["adamw", "lion", "muon", "schedule_free_adamw"])
def test_the_state_of_every_optimizer(name):
    scheduler = {"name": "none"} if name.startswith("schedule_free") else {}
    config = tiny_config(model=MODEL, optimizer={"name": name}, scheduler=scheduler)
    moments, scalars = training_state.fields(config)
    assert abstract_target(config).moments == moments
    assert abstract_target(config).scalars == scalars
