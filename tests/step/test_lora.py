"""Steps that train LoRA adapters, on several meshes and in several precisions."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxforge.config.fine_tuning import LoraConfig, is_adapter
from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from jaxforge.model.transformer import Model
from jaxforge.optim.optimizer import build_optimizer
from tests.conftest import TINY, tiny_config
from tests.helpers import lowered, random_batches, setup

LATENT = {
    "n_kv_heads": None,
    "mixer_pattern": ("latent_attention",),
    "latent_attention": {
        "kv_rank": 16,
        "nope_head_dim": 8,
        "rope_head_dim": 8,
        "value_head_dim": 8,
    },
}
EXPERTS = {"num_experts": 4, "moe_top_k": 2, "moe_shared_experts": 1}


def config(**sections):
    optimizer = {"lr": 0.01, **sections.pop("optimizer", {})}
    lora = {"rank": 4, **sections.pop("lora", {})}
    return tiny_config(lora=lora, optimizer=optimizer, **sections)


def flat(tree):
    return flatten_dict(jax.device_get(tree), sep=".")


def random_adapters(params, std=0.3):
    """Return parameters whose adapters are far from zero."""
    rng = np.random.default_rng(0)
    named = {
        name: std * rng.standard_normal(x.shape, np.float32) if is_adapter(name) else x
        for name, x in flat(params).items()
    }
    return unflatten_dict(named, sep=".")


def merged(params, lora):
    """Return the base parameters with the products of the adapters."""
    named = flat(params)
    for name in [name for name in named if name.endswith("lora_a")]:
        layer = name.removesuffix("lora_a")
        a, b = named.pop(name), named.pop(f"{layer}lora_b")
        named[f"{layer}weight"] = named[f"{layer}weight"] + lora.scale * b @ a
    return unflatten_dict(named, sep=".")


@pytest.mark.parametrize(
    ("model", "use_rslora"),
    [
        ({}, True),
        *(pytest.param(model, False, marks=pytest.mark.slow) for model in (LATENT, EXPERTS)),
    ],
    ids=["attention", "latent", "experts"],
)
def test_adapted_model_equals_the_model_with_merged_weights(model, use_rslora):
    section = ModelConfig(**{**TINY["model"], **model})
    lora = LoraConfig(rank=4, alpha=6.0, use_rslora=use_rslora)
    assert lora.scale == 6 / (2 if use_rslora else 4)
    adapted, plain = Model(section, adapters=lora), Model(section)
    params = random_adapters(adapted.init(jax.random.key(0)))
    whole = merged(params, lora)
    assert jax.tree.structure(whole) == jax.tree.structure(plain.abstract)
    tokens = jnp.arange(32).reshape(2, 16)
    job = adapted.logits(params, adapted.hidden(params, tokens))
    expected = plain.logits(whole, plain.hidden(whole, tokens))
    np.testing.assert_allclose(job, expected, rtol=2e-4, atol=2e-5)
    at, cache = jnp.arange(16)[None].repeat(2, 0), adapted.empty_cache(2, 16)
    _, cache = adapted.extend(params, tokens[:, :-1], at[:, :-1], cache)
    # One token at a time, latent attention uses its matrices in another form.
    last, _ = adapted.extend(params, tokens[:, -1:], at[:, -1:], cache)
    np.testing.assert_allclose(last, job[:, -1:], rtol=2e-4, atol=2e-5)
    base = plain.init(jax.random.key(0))
    without = plain.logits(base, plain.hidden(base, tokens))
    assert np.abs(np.asarray(job) - without).max() > 0.01


def test_new_adapters_change_nothing_and_leave_the_base_as_it_was_drawn():
    section = ModelConfig(**TINY["model"])
    adapted, plain = Model(section, adapters=LoraConfig(rank=4)), Model(section)
    params, base = adapted.init(jax.random.key(3)), plain.init(jax.random.key(3))
    named = flat(params)
    for name, value in flat(base).items():
        np.testing.assert_array_equal(named[name], value, err_msg=name)
    for name in named.keys() - flat(base).keys():
        if name.endswith("lora_b"):
            assert not named[name].any()
        else:  # as PEFT draws A
            bound = named[name].shape[-1] ** -0.5
            assert 0.9 * bound < np.abs(named[name]).max() <= bound
    tokens = jnp.arange(32).reshape(2, 16)
    np.testing.assert_array_equal(adapted.hidden(params, tokens), plain.hidden(base, tokens))


MESHES = [
    {"distributed": {"dp_shard": 2, "tp": 2}},
    *(
        pytest.param(settings, marks=pytest.mark.slow)
        for settings in (
            {"distributed": {"dp_replicate": 2, "dp_shard": 2}},
            {"distributed": {"dp_shard": 2, "tp": 2}, "train": {"grad_sync": "microbatch"}},
            {"distributed": {"pp": 2, "dp_shard": 2}, "train": {"grad_accum_steps": 2}},
            {"distributed": {"dp_shard": 2, "cp": 2}},
            {"train": {"activation_checkpointing": "full"}},
            {"train": {"grad_accum_steps": 2}, "distributed": {"dp_shard": 2}},
        )
    ),
]


@pytest.mark.parametrize("settings", MESHES, ids=str)
def test_mesh_does_not_change_the_updates(settings):
    job = setup(config(**settings))
    batches = random_batches(job.config, 3)
    rows = sum(len(batch) for batch in batches[0]["labels"])
    alone = setup(config(train={"batch_size": rows}))
    whole = [{k: x.reshape(1, rows, -1) for k, x in batch.items()} for batch in batches]
    _, metrics = job.run(job.state(), batches)
    _, expected = alone.run(alone.state(), whole)
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], expected["grad_norm"], rtol=1e-4)


@pytest.mark.slow
def test_experts_are_frozen_on_expert_parallel_devices():
    model = {**EXPERTS, "moe_bias_update": "sign"}
    losses = []
    for mesh in ({"ep": 2, "dp_shard": 1}, {}):
        job = setup(
            config(model=model, distributed=mesh, train={"batch_size": 4 * (2 - len(mesh) // 2)})
        )
        losses.append(job.run(job.state(), random_batches(job.config, 2))[1]["loss"])
    np.testing.assert_allclose(*losses, rtol=1e-5)


@pytest.mark.slow
def test_modules_of_multi_token_prediction_are_frozen():
    job = setup(config(model={"mtp_depth": 1, "n_layers": 1}))
    before = {name: np.array(x) for name, x in flat(job.state().params).items()}
    state, metrics = job.run(job.state(), random_batches(job.config, 2))
    after = flat(state.params)
    assert np.isfinite(metrics["loss"]).all()
    changed = {name for name, value in before.items() if np.any(value != after[name])}
    assert changed
    assert not any(name.startswith("mtp.") for name in changed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"train": {"param_dtype": "bfloat16", "mixed_precision": "bf16"}},
        pytest.param(
            {"train": {"mixed_precision": "fp8", "fp8_scaling": "delayed"},
             "model": {"n_layers": 3}},
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)  # fmt: skip
def test_only_adapters_change_and_have_gradients_and_moments(settings):
    job = setup(config(**settings))
    batches = random_batches(job.config, 2)
    before = {name: np.array(x) for name, x in flat(job.state().params).items()}
    state, metrics = job.run(job.state(), batches)
    after = flat(state.params)
    assert np.isfinite(metrics["loss"]).all()
    for name, value in before.items():
        assert (value.tobytes() == after[name].tobytes()) != is_adapter(name), name
        assert not is_adapter(name) or value.dtype == np.float32
    adapters = {name for name in before if is_adapter(name)}
    grads = jax.eval_shape(
        lambda s, b: job.gradients(s.params, s.model_state, b)[0],
        job.abstract_state(), job.abstract_batch(),
    )  # fmt: skip
    assert set(flatten_dict(grads, sep=".")) == adapters
    moments = {n for leaf in jax.tree.leaves(state.opt_state, is_leaf=lambda x: isinstance(x, dict))
               if isinstance(leaf, dict) for n in flatten_dict(leaf, sep=".")}  # fmt: skip
    assert moments == adapters


def test_gradients_of_frozen_weights_are_not_computed():
    """A product costs 2 n, its gradients 4 n; without those of the weights, 2 n."""
    whole, adapted = (
        lowered(setup(c)).compile() for c in (tiny_config(), config(lora={"rank": 1}))
    )
    flops = [program.cost_analysis()["flops"] for program in (whole, adapted)]
    assert flops[1] < 0.8 * flops[0]
    assert not re.search(r"f32\[2,\d+,64,64\]\S* (dot|add)", adapted.as_text())


def test_layers_without_a_pattern_have_no_adapter():
    lora = LoraConfig(rank=2, targets=(r"attention\.[qv]_proj$",))
    names = flatten_dict(Model(ModelConfig(**TINY["model"]), adapters=lora).abstract, sep=".")
    layers = {n.rpartition(".")[0] for n in names if is_adapter(n)}
    assert layers == {"layers.attention.q_proj", "layers.attention.v_proj"}


def test_freezing_all_adapters_is_refused():
    settings = config(optimizer={"freeze_patterns": ["lora_[ab]"]})
    axes = Model(settings.model, adapters=settings.lora).axes
    with pytest.raises(UserError, match="freezes all adapters: there is nothing to train"):
        build_optimizer(settings, axes)


def test_experts_cannot_be_adapted():
    model = ModelConfig(**{**TINY["model"], **EXPERTS})
    with pytest.raises(UserError, match=r'lora.targets: "experts" matches experts only'):
        Model(model, adapters=LoraConfig(rank=2, targets=("experts",)))
