"""Groups that train apart, against a loop in plain torch; and what devices exchange."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxforge.aux_outputs import AuxOutputs
from jaxforge.config.rules import check
from jaxforge.errors import UserError
from jaxforge.optim.schedule import learning_rate
from jaxforge.parallel import exchange
from jaxforge.parallel.groups import GROUPS, group_view, with_groups
from jaxforge.parallel.mesh import abstract_mesh
from jaxforge.step.losses import build_loss, register_loss
from tests.conftest import tiny_config
from tests.helpers import (
    assert_resumes_bit_exactly,
    lowered,
    new_setup,
    placed,
    random_batches,
    setup,
)
from tests.hlo import all_operations, crossing_collectives, outside_of_conditionals
from tests.step.torch_decoder import adamw, block, named, norm

SMALL = {"dim": 32, "n_layers": 4, "vocab_size": 64}
STREAMING = {"fragments": 2, "overlap": 1}
DECAY = 0.1


def config_of(groups=2, *, interval=4, outer=None, **sections):
    """A small model in groups that train apart."""
    train = {"outer_interval": interval, **sections.pop("train", {})}
    return tiny_config(
        model={**SMALL, **sections.pop("model", {})},
        train={"batch_size": 2, "max_steps": 64, **train},
        outer_optimizer=outer or {},
        optimizer={"lr": 3e-3, "weight_decay": DECAY, "eps": 1e-6},
        distributed={"dp_replicate": groups, **sections.pop("distributed", {})},
        **sections,
    )  # fmt: skip


class TorchGroup:
    """A group of devices as a loop of its own."""

    def __init__(self, weights, config):
        self.weights = {name: x.clone().requires_grad_() for name, x in weights.items()}
        self.optimizer = adamw(self.weights, config.optimizer.lr, DECAY)
        for group in self.optimizer.param_groups:
            group["eps"] = config.optimizer.eps
        warmup, steps = config.scheduler.warmup_steps, config.train.max_steps

        def factor(n):
            if n < warmup:
                return n / warmup
            progress = (n - warmup) / (steps - warmup)
            return 0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * progress))

        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, factor)

    def step(self, tokens, labels):
        p, x = self.weights, self.weights["token_embedding.embedding.weight"][tokens]
        for i in range(SMALL["n_layers"]):
            x = block(p, f"layers.{i}", x, torch.zeros_like(tokens), tokens.shape[-1])
        logits = norm(p, "norm", x) @ p["output_head.proj.weight"].T
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(p.values(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        return loss.item()


def fragment_of(name, fragments):
    if name.startswith("layers."):
        return int(name.split(".")[1]) % fragments
    return 0 if name.startswith("token_embedding") else fragments - 1


def torch_diloco(config, weights, batches):
    """Return the losses of the updates, a row per update, and the global weights at the end."""
    outer, groups = config.outer_optimizer, config.distributed.dp_replicate
    apart = config.train.outer_interval // outer.fragments
    jobs = [TorchGroup(weights, config) for _ in range(groups)]
    whole = {name: x.clone() for name, x in weights.items()}
    nesterov = {
        name: torch.optim.SGD([x], lr=outer.lr, momentum=outer.momentum, nesterov=True)
        for name, x in whole.items()
    }
    losses = []

    def is_due(name, n):
        first = (fragment_of(name, outer.fragments) + 1) * apart
        return n >= first and (n - first) % config.train.outer_interval == 0

    def send(n):
        for name in (name for name in whole if is_due(name, n)):
            changes = [whole[name] - job.weights[name].detach() for job in jobs]
            whole[name].grad = sum(changes) / groups
            nesterov[name].step()

    for n, batch in enumerate(batches, 1):
        if outer.overlap:
            send(n - 1)
        rows = [
            (torch.tensor(tokens).long(), torch.tensor(labels).long())
            for tokens, labels in zip(
                np.split(batch["input_ids"][0], groups), np.split(batch["labels"][0], groups),
                strict=True,
            )
        ]  # fmt: skip
        losses.append([job.step(*row) for job, row in zip(jobs, rows, strict=True)])
        if not outer.overlap:
            send(n)
        for name in (name for name in whole if is_due(name, n - outer.overlap)):
            for job in jobs:
                own, k = job.weights[name], outer.share_kept
                with torch.no_grad():
                    own.copy_(k * own + (1 - k) * whole[name])
    return np.array(losses), whole


@pytest.mark.parametrize(
    ("groups", "outer"),
    [(2, {}), (4, {}), (2, STREAMING), (4, {"fragments": 4, "overlap": 6, "mixing": 0.25})],
)
def test_losses_of_60_updates_are_those_of_torch(groups, outer):
    config = config_of(groups, interval=8, outer=outer)
    program, batches = setup(config), random_batches(config, 60)
    state = program.state()
    weights = named(jax.device_get(state.params), config.model)
    state, metrics = program.run(state, batches)
    losses, whole = torch_diloco(config, weights, batches)
    np.testing.assert_allclose(metrics["loss"], losses, atol=1e-5)
    ours = named(jax.device_get(state.params), config.model)
    for name, weight in whole.items():
        np.testing.assert_allclose(ours[name], weight, atol=2e-4, err_msg=name)


@pytest.mark.parametrize("outer", [{}, STREAMING])
def test_last_update_leaves_the_mean_of_the_groups(outer):
    config = config_of(interval=4, outer=outer, train={"max_steps": 7})
    program, batches = setup(config), random_batches(config, 7)
    state, _ = program.run(program.state(), batches)
    jax.tree.map(
        lambda whole, own: np.testing.assert_allclose(whole, np.mean(own, 0), atol=1e-6),
        *jax.device_get((state.params, state.groups.params)),
    )


MESHES = {
    "fsdp_tp_per_update": ({"dp_shard": 2, "tp": 2}, {"grad_sync": "update"}, {}),
    "fsdp_tp_per_microbatch": (
        {"dp_shard": 2, "tp": 2}, {"grad_sync": "microbatch", "grad_accum_steps": 2}, {}
    ),
    "ring": ({"cp": 2, "dp_shard": 2, "cp_strategy": "ring"}, {"grad_sync": "microbatch"}, {}),
    "ulysses_tp": ({"cp": 2, "tp": 2}, {"grad_sync": "update"}, {}),
    "experts": ({"ep": 2, "dp_shard": 2}, {}, {"num_experts": 4, "moe_top_k": 2}),
    "stages": ({"pp": 2, "tp": 2}, {"grad_accum_steps": 2}, {}),
    "stages_fsdp": ({"pp": 2, "dp_shard": 2}, {"grad_accum_steps": 2, "grad_sync": "update"}, {}),
}  # fmt: skip


REPEATED = ("ulysses_tp", "stages_fsdp")  # their parts are in other meshes


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in REPEATED else ()) for name in MESHES],
)
def test_groups_are_meshes_of_their_own(name):
    """A step on any mesh sends nothing to other groups, and learns as groups of one device do."""
    axes, train, model = MESHES[name]
    ranks = axes.get("dp_shard", 1) * axes.get("ep", 1)
    outer = {"train": {**train, "batch_size": 4 // ranks}, "outer": STREAMING, "model": model}
    config = config_of(interval=2, distributed=axes, **outer)
    alone = config_of(
        interval=2, outer=STREAMING, model=model,
        train={"batch_size": 4, "grad_accum_steps": config.train.grad_accum_steps},
    )  # fmt: skip
    program, batches = setup(config), random_batches(config, 5)
    text = lowered(program).compile().as_text()
    mesh = with_groups(program.mesh, 2)
    assert not crossing_collectives(outside_of_conditionals(text, mesh), mesh, GROUPS)
    assert crossing_collectives(all_operations(text, mesh), mesh, GROUPS)
    losses = program.run(program.state(), batches)[1]["loss"]
    same = setup(alone)
    np.testing.assert_allclose(losses, same.run(same.state(), batches)[1]["loss"], atol=1e-5)


def test_text_of_synchronous_training_crosses():
    """The check above sees the reduction of gradients over the same devices."""
    program = setup(config_of(interval=0, distributed={"dp_shard": 2, "tp": 2}))
    text = lowered(program).compile().as_text()
    mesh = with_groups(program.mesh, 2)
    assert crossing_collectives(outside_of_conditionals(text, mesh), mesh, GROUPS)


def test_every_update_with_sgd_equals_synchronous_training():
    """With plain SGD inside and out, the mean of the groups' steps is the step of the mean."""
    sections = {
        "optimizer": {"name": "optax.sgd", "lr": 0.1, "weight_decay": 0.0},
        "model": SMALL, "scheduler": {"name": "none"},
    }  # fmt: skip
    train = {"batch_size": 2, "grad_clip_norm": 1e9}
    outer = {"name": "optax.sgd", "lr": 1.0}
    apart, together = (
        setup(
            tiny_config(
                train={**train, "outer_interval": interval}, outer_optimizer=outer,
                distributed={"dp_replicate": 2}, **sections,
            )
        )
        for interval in (1, 0)
    )  # fmt: skip
    batches = random_batches(apart.config, 10)
    for batch in batches:  # of equal weight in both groups
        batch["labels"] = np.maximum(batch["labels"], 0)
    (left, ours), (right, theirs) = (p.run(p.state(), batches) for p in (apart, together))
    np.testing.assert_allclose(ours["loss"].mean(1), theirs["loss"], atol=1e-5)
    for a, b in zip(jax.tree.leaves(left.params), jax.tree.leaves(right.params), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_one_group_looks_ahead():
    """The outer step of one group is computed in float64 from the steps of a plain run."""
    config = config_of(1, interval=3)
    plain = setup(config.with_values({"train.outer_interval": 0}))
    program, batches = setup(config), random_batches(config, 9)
    state, metrics = program.run(program.state(), batches)
    reference = plain.state()
    whole = jax.tree.map(lambda x: np.asarray(x, np.float64), reference.params)
    momentum, losses = jax.tree.map(np.zeros_like, whole), []
    for first in range(0, 9, 3):
        reference, logged = plain.run(reference, batches[first : first + 3])
        losses += list(logged["loss"])
        change = jax.tree.map(lambda w, x: w - np.asarray(x, np.float64), whole, reference.params)
        momentum = jax.tree.map(lambda v, g: 0.9 * v + g, momentum, change)
        whole = jax.tree.map(lambda w, v, g: w - 0.7 * (g + 0.9 * v), whole, momentum, change)
        params = jax.tree.map(
            lambda w, x: placed(w.astype(np.float32), x.sharding), whole, reference.params
        )
        reference = dataclasses.replace(reference, params=params)
    np.testing.assert_allclose(metrics["loss"][:, 0], losses, atol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), state.params, whole)


def loss_with_poison(config, model):
    """Build the cross-entropy that is NaN where a label is 63."""
    exact = build_loss(config.with_values({"loss_fn": "cross_entropy"}), model)

    def loss(params, hidden, batch, weights):
        aux = exact(params, hidden, batch, weights)
        poison = jnp.where(jnp.any(batch["labels"] == 63), jnp.nan, 0.0)
        return AuxOutputs({name: x + poison for name, x in aux.loss_terms.items()}, *aux[1:])

    return loss


@pytest.mark.usefixtures("own_names")
def test_group_skips_its_own_bad_update():
    register_loss("poison")(loss_with_poison)
    program = setup(config_of(interval=4, train={"loss_fn": "poison"}))
    batches = random_batches(program.config, 4)
    for i, batch in enumerate(batches):
        batch["labels"] %= 63
        batch["labels"][0, -1, 0] = 63 if i == 1 else 0  # of the last group
    state, metrics = program.run(program.state(), batches)
    np.testing.assert_array_equal(metrics["applied"], [[1, 1], [1, 0], [1, 1], [1, 1]])
    merged = program.read_metrics({"skipped": state.guard.total})
    assert merged["skipped"] == 1
    updates = [x for x in jax.tree.leaves(state.groups.opt_state) if x.dtype == np.int32]
    np.testing.assert_array_equal(updates[0], [4, 3])
    assert np.isfinite(metrics["loss"][2:]).all()


def test_group_that_is_not_finite_takes_over_the_global_weights():
    config = config_of(interval=4)
    program, batches = setup(config), random_batches(config, 6)

    def with_nan(leaf):
        values = np.array(leaf)
        values[1].flat[0] = np.nan
        return placed(values, leaf.sharding)

    state = program.state()
    groups = state.groups._replace(params=jax.tree.map(with_nan, state.groups.params))
    state, metrics = program.run(dataclasses.replace(state, groups=groups), batches)
    assert not metrics["applied"][:4, 1].any()
    assert metrics["applied"][:4, 0].all()
    assert metrics["applied"][4:].all()
    # The first group alone has determined the global weights.
    alone = setup(config_of(1, interval=4))
    first = [{k: x[:, :2] for k, x in batch.items()} for batch in batches]
    expected, _ = alone.run(alone.state(), first)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), state.params, expected.params
    )


@pytest.mark.parametrize("outer", [{}, STREAMING])
def test_resumes_bit_exactly_between_exchanges(tmp_path, outer):
    config = config_of(interval=4, outer=outer, distributed={"dp_shard": 2}, model={"dim": 64})
    program, batches = setup(config), random_batches(config, 12)
    state, _ = program.run(program.state(), batches[:6])
    assert_resumes_bit_exactly(program, state, batches[6:], tmp_path)


@pytest.mark.parametrize(("dtype", "levels"), [("int8", 127), ("int4", 7)])
def test_integers_are_the_nearest(dtype, levels):
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    integers, scales = jax.device_get(exchange.quantize(x, dtype))
    assert integers.shape == (8, exchange.BLOCK)
    assert np.abs(integers).max() == levels
    error = np.abs((integers * scales).reshape(-1)[:1000] - x)
    assert (error <= np.repeat(scales, exchange.BLOCK)[:1000] * 0.5001).all()
    if dtype == "int4":
        packed = exchange._pack(integers)
        assert packed.nbytes == integers.size // 2
        np.testing.assert_array_equal(exchange._unpack(packed), integers)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("bfloat16", 1e-2), ("int8", 2e-2), ("int4", 0.3)]
)
def test_fewer_bits_change_the_exchange_little(dtype, tolerance):
    config = config_of(train={"outer_dtype": dtype}, distributed={"dp_shard": 2})
    exact = config_of(distributed={"dp_shard": 2})
    batches = random_batches(config, 4)
    begin, few, many = (
        jax.device_get(state.params)
        for state in (
            setup(config).state(),
            *(setup(c).run(setup(c).state(), batches)[0] for c in (config, exact)),
        )
    )
    for start, a, b in zip(*map(jax.tree.leaves, (begin, few, many)), strict=True):
        change = np.linalg.norm(b - start)
        assert 0 < np.linalg.norm(a - b) < tolerance * change


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"outer": {"fragments": 3}}, "must be a multiple of outer_optimizer.fragments = 3"),
        ({"outer": {"overlap": 4}}, "outer_optimizer.overlap = 4 must be less than"),
        ({"outer": {"fragments": 4}, "model": {"n_layers": 2}}, "must divide the 2 layers"),
        ({"train": {"verify_interval": 2}}, "train.verify_interval = 2 is not supported"),
        ({"train": {"offload": ["optimizer"]}}, "train.offload"),
        (
            {"train": {"grad_accum_steps": 2}, "distributed": {"pp": 2,
             "pp_schedule": "interleaved_1f1b"}}, "pipeline stages of different"
        ),
    ],
)  # fmt: skip
def test_unsupported_settings_are_refused(sections, message):
    config = config_of(**sections)
    devices = jax.devices()[: 2 * config.distributed.pp]
    with pytest.raises(UserError, match=message):
        check(config, len(devices))


def test_unknown_outer_optimizer_is_refused():
    config = config_of(outer={"name": "optax.nadma"})
    with pytest.raises(UserError, match=r'outer_optimizer.name = "optax.nadma": optax'):
        new_setup(config)


def test_frozen_parameters_are_not_exchanged():
    config = config_of(interval=2, outer=STREAMING)
    config = config.with_values({"optimizer.freeze_patterns": ("token_embedding",)})
    program = setup(config)
    before = jax.device_get(program.state())
    state, metrics = program.run(program.state(), random_batches(config, 4))
    assert metrics["applied"].all()
    for old, new in ((before, state), (before.groups, state.groups)):
        tables = (x.params["token_embedding"]["embedding"]["weight"] for x in (old, new))
        np.testing.assert_array_equal(*tables)
    assert not np.array_equal(before.params["norm"]["weight"], state.params["norm"]["weight"])


def test_outer_moments_are_float32_and_count_the_exchanges_of_a_fragment():
    outer = {"name": "optax.adam", "lr": 1e-3, "options": {"b1": 0.9}, "fragments": 2}
    train = {"param_dtype": "bfloat16", "mixed_precision": "bf16"}
    program = setup(config_of(interval=4, outer=outer, train=train))
    state, _ = program.run(program.state(), random_batches(program.config, 4))
    (moments,) = [link for link in state.opt_state if hasattr(link, "mu")]
    assert {leaf.dtype for leaf in jax.tree.leaves(moments.mu)} == {np.dtype("float32")}
    assert int(moments.count) == 2  # both fragments once
    # Adam's first step has the size of the learning rate: each fragment has taken its first one.
    begun = program.state().params
    change = np.abs(
        np.float32(state.params["norm"]["weight"]) - np.float32(begun["norm"]["weight"])
    )
    assert change.max() <= 8e-3


def test_schedule_of_a_group_is_that_of_the_run():
    """Also if the batch grows: a group has its share of each size."""
    ramp = [{"start": 0, "global_batch_size": 4}, {"start": 3, "global_batch_size": 8}]
    train = {"global_batch_size": 8, "grad_accum_steps": 2, "batch_ramp": ramp}
    config = config_of(train=train, scheduler={"unit": "samples", "warmup_steps": 2})
    group, _ = group_view(config, abstract_mesh(config, 2))
    assert group.train.global_batch_size == 4
    of_run, of_group = learning_rate(config), learning_rate(group)
    rates = [(float(of_run(n)), float(of_group(n))) for n in range(8)]
    assert all(a == b for a, b in rates)
    assert len(set(rates)) == 8
