"""Learning rates and freezing by pattern, against parameter groups of torch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxforge.config.optimizer import OptimizerConfig
from jaxforge.config.reading.load import load_config
from jaxforge.errors import UserError
from jaxforge.model.transformer import Model
from jaxforge.optim.chain import global_norm
from jaxforge.optim.optimizer import build_optimizer
from tests.conftest import tiny_config
from tests.helpers import losses_and_gradients, lowered, random_batches, setup

LR_PATTERNS = {"token_embedding": 0.1, r"mlp\.": 2.0, "embedding|down_proj": 5.0}
FROZEN = ["output_head", "attention_norm"]
FACTORS = {
    "token_embedding.embedding.weight": 0.1,
    "layers.mlp.down_proj.weight": 2.0,
    "layers.attention.q_proj.weight": 1.0,
}


def config(**optimizer):
    return tiny_config(
        optimizer={"lr": 0.01, "weight_decay": 0.3, **optimizer}, scheduler={"name": "none"}
    )


def flat(tree):
    return flatten_dict(jax.device_get(tree), sep=".")


def random_like(tree, seed):
    keys = iter(jax.random.split(jax.random.key(seed), 99))
    return jax.tree.map(lambda leaf: jax.random.normal(next(keys), leaf.shape), tree)


@pytest.mark.parametrize(
    "name",
    [
        "adamw",
        "muon",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("lion", "schedule_free_adamw")),
    ],
)
def test_factor_equals_the_rule_at_that_learning_rate(name):
    """A parameter with factor f moves as with lr · f and the same decay, as in a group of torch."""
    axes = Model(config().model).axes
    params = random_like(Model(config().model).abstract, 0)
    with_patterns = moved(config(name=name, lr_patterns=LR_PATTERNS), axes, params)
    for parameter, factor in FACTORS.items():
        alone = moved(config(name=name, lr=0.01 * factor), axes, params)
        np.testing.assert_allclose(
            with_patterns[parameter], alone[parameter], rtol=2e-6, atol=1e-7, err_msg=parameter
        )


def moved(settings, axes, params):
    """Parameters after two updates with gradients small enough not to be clipped."""
    tx = build_optimizer(settings, axes)
    state = tx.init(params)
    for seed in (1, 2):
        grads = jax.tree.map(lambda g: 1e-4 * g, random_like(params, seed))
        updates, state = jax.jit(tx.update)(grads, state, params)
        params = jax.tree.map(jnp.add, params, updates)
    return flat(params)


def test_adamw_with_patterns_equals_parameter_groups_of_torch():
    torch = pytest.importorskip("torch")
    settings = config(lr_patterns=LR_PATTERNS, freeze_patterns=FROZEN)
    model = Model(settings.model)
    params = random_like(model.abstract, 0)
    named = {
        name: torch.nn.Parameter(torch.from_numpy(np.array(value)))
        for name, value in flat(params).items()
    }
    o = settings.optimizer
    groups = []
    for name, parameter in named.items():
        parameter.requires_grad = not any(pattern in name for pattern in FROZEN)
        dimensions = parameter.ndim - name.startswith("layers.")
        decay = 0.3 if dimensions > 1 else 0.0
        lr = 0.01 * o.lr_factor(name)
        groups.append({"params": [parameter], "lr": lr, "weight_decay": decay})
    reference = torch.optim.AdamW(
        [g for g in groups if g["params"][0].requires_grad], betas=o.betas, eps=o.eps
    )
    program = build_optimizer(settings, model.axes)
    state = program.init(params)
    for seed in (1, 2, 3):
        grads = flat(random_like(params, seed))
        trained = {name: p for name, p in named.items() if p.requires_grad}
        for name, parameter in trained.items():
            parameter.grad = torch.from_numpy(np.array(grads[name]))
        torch.nn.utils.clip_grad_norm_(trained.values(), settings.train.grad_clip_norm)
        reference.step()
        for name in named.keys() - trained.keys():  # a step never hands gradients of these on
            grads[name] = np.zeros_like(grads[name])
        updates, state = jax.jit(program.update)(unflatten_dict(grads, sep="."), state, params)
        params = jax.tree.map(jnp.add, params, updates)
    for name, value in flat(params).items():
        np.testing.assert_allclose(value, named[name].detach().numpy(), rtol=3e-6, atol=3e-7)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"train": {"opt_state_dtype": "8bit"}},
        *(
            pytest.param(settings, marks=pytest.mark.slow)
            for settings in (
                {"train": {"param_dtype": "bfloat16", "param_rounding": "stochastic"}},
                {"distributed": {"dp_shard": 4, "tp": 2}},
                {"train": {"param_dtype": "bfloat16", "param_rounding": "kahan"}},
                {"optimizer": {"name": "muon"}},
                {"distributed": {"pp": 2, "dp_shard": 4}},
            )
        ),
    ],
    ids=str,
)
def test_frozen_parameters_are_bit_identical_and_have_no_moments(settings):
    optimizer = {"lr": 0.1, "freeze_patterns": FROZEN, **settings.get("optimizer", {})}
    program = setup(tiny_config(**{**settings, "optimizer": optimizer}))
    params = jax.tree.map(np.array, jax.device_get(program.state().params))
    for leaf in jax.tree.leaves(params):
        leaf[(0,) * leaf.ndim] = -0.0  # which the addition of zero would change
    before = {name: value.copy() for name, value in flat(params).items()}
    state, metrics = program.run(program.state(params), random_batches(program.config, 2))
    after = flat(state.params)
    frozen = {name for name in before if any(pattern in name for pattern in FROZEN)}
    assert len(frozen) == 2
    for name, value in before.items():
        same = value.tobytes() == after[name].tobytes()
        assert same == (name in frozen), name
    names = {path for leaf in jax.tree.leaves(state.opt_state, is_leaf=is_dict) if is_dict(leaf)
             for path in flatten_dict(leaf, sep=".")}  # fmt: skip
    assert names
    assert not {n for n in names if any(pattern in n for pattern in FROZEN)}
    assert np.isfinite(metrics["grad_norm"]).all()


def is_dict(leaf):
    return isinstance(leaf, dict)


def test_gradient_norm_leaves_frozen_parameters_out():
    norms = {}
    for patterns in ([], FROZEN):
        program = setup(tiny_config(optimizer={"freeze_patterns": patterns}))
        batches = random_batches(program.config, 1)
        _, grads = losses_and_gradients(program, batches)
        parts = {n: g[0] for n, g in flat(grads).items() if not any(p in n for p in patterns)}
        norms[len(patterns)] = float(global_norm(parts))
        _, metrics = program.run(program.state(), batches)
        assert metrics["grad_norm"][0] == pytest.approx(norms[len(patterns)], rel=1e-5)
    assert norms[2] < norms[0]


def test_products_of_frozen_gradients_are_not_computed():
    def flops(patterns):
        program = setup(tiny_config(optimizer={"freeze_patterns": patterns}))
        return lowered(program).compile().cost_analysis()["flops"]

    assert flops([r"mlp\."]) < 0.9 * flops([])


@pytest.mark.parametrize("distributed", [{"dp_shard": 2, "tp": 2}, {"pp": 2}], ids=str)
def test_frozen_layers_have_no_gradients_on_any_mesh(distributed):
    """Stages count their layers by parameters, and explicit backward passes check their types."""
    optimizer, losses = {"freeze_patterns": ["^layers"]}, []
    batches = random_batches(tiny_config(distributed=distributed), 1)
    for mesh in ({}, distributed):
        program = setup(tiny_config(distributed=mesh, optimizer=optimizer))
        loss, grads = losses_and_gradients(program, batches)
        assert set(grads) == {"token_embedding", "norm", "output_head"}
        losses.append(loss)
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


def test_freezing_everything_is_refused():
    settings = tiny_config(optimizer={"freeze_patterns": ["."]})
    with pytest.raises(UserError, match="freezes all parameters: there is nothing to train"):
        build_optimizer(settings, Model(settings.model).axes)


@pytest.mark.parametrize("key", ["freeze_patterns", "lr_patterns"])
def test_pattern_without_a_parameter_is_refused(key):
    value = ["embeding"] if key == "freeze_patterns" else {"embeding": 0.5}
    settings = tiny_config(optimizer={key: value})
    with pytest.raises(UserError, match=f'optimizer.{key}: "embeding" matches no parameter'):
        build_optimizer(settings, Model(settings.model).axes)


def test_table_of_patterns_is_read_from_file_and_command_line(tmp_path):
    file = tmp_path / "x.toml"
    file.write_text('[optimizer]\nlr_patterns = {"token_embedding" = 0.1, "head" = 2}\n')
    expected = {"token_embedding": 0.1, "head": 2.0}
    read = load_config(file)
    assert dict(read.optimizer.lr_patterns) == expected
    assert hash(read) == hash(load_config(file))
    again = OptimizerConfig.model_validate(read.optimizer.model_dump(mode="json"))
    assert dict(again.lr_patterns) == expected
    overridden = load_config(None, ['--optimizer.lr_patterns={"head" = 0.5}'])
    assert dict(overridden.optimizer.lr_patterns) == {"head": 0.5}
    file.write_text("[optimizer]\nlr_patterns = {head = -1}\n")
    with pytest.raises(UserError, match=r"x\.toml:2: optimizer\.lr_patterns"):
        load_config(file)
