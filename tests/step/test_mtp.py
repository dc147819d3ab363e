"""Multi-token prediction, compared with an implementation in PyTorch."""

import functools

import jax
import numpy as np
import pytest
import torch
from torch.nn import functional

from jaxforge.config.ineffective_settings import ineffective_settings
from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from jaxforge.model import flops
from jaxforge.model.transformer import Model, parameter_count
from jaxforge.step.mtp import FURTHER_LABELS, FURTHER_TOKENS, with_further_tokens, with_mtp_loss
from jaxforge.telemetry.measures import aux_metrics
from jaxforge.tools.starting.sizes import parameters
from tests.conftest import tiny_config
from tests.helpers import random_batches, restore_checkpoint, setup, through_checkpoint
from tests.step.torch_decoder import block, named, norm

DEPTH = 2
MODEL = {
    "dim": 32, "vocab_size": 64, "mtp_depth": DEPTH, "init_std": 0.1, "attention_pattern":
    ["full", "sliding"], "sliding_window": 5, "ffn_hidden_dim": 48,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "moe_top_k": 2, "moe_expert_dim": 16, "moe_router": "sigmoid_topk",
    "moe_bias_update": "sign", "moe_bias_update_rate": 0.05, "moe_first_dense_layers": 1,
    "moe_shared_experts": 1,
}  # fmt: skip
ONE_PART = {  # Nemotron 3 Super: layers of one part, and modules of attention and latent experts
    **EXPERTS, "moe_first_dense_layers": 0, "moe_latent_dim": 24, "mtp_mixer": "attention",
    "mixer_pattern": ["attention", "none"], "feed_forward_pattern": ["none", "experts"],
}  # fmt: skip
LR, WEIGHT, DECAY, CLIP = 1e-2, 0.7, 0.1, 1.0


def job(model=None, train=None, **distributed):
    groups = distributed.get("dp_shard", 1) * distributed.get("ep", 1)
    return tiny_config(
        model={**MODEL, **(model or {})},
        train={"seq_len": 16, "batch_size": 4 // groups, "grad_accum_steps": 2,
               "mtp_loss_weight": WEIGHT, "grad_clip_norm": CLIP, **(train or {})},
        optimizer={"lr": LR, "weight_decay": DECAY}, scheduler={"name": "none", "warmup_steps": 0},
        distributed={"dp_shard": 1, **distributed},
    )  # fmt: skip


def batches_of(config, n):
    """Return batches of packed documents, with ignored labels."""
    rng, batches = np.random.default_rng(1), random_batches(config, n)
    for batch in batches:
        tokens = batch["input_ids"]
        segments = np.cumsum(rng.random(tokens.shape) < 0.15, axis=-1)
        is_last = segments != np.roll(segments, -1, axis=-1)
        is_ignored = is_last | (rng.random(tokens.shape) < 0.2)
        batch["labels"] = np.where(is_ignored, -100, np.roll(tokens, -1, axis=-1))
        batch["segment_ids"] = segments
    return batches


@pytest.fixture(scope="module")
def on_one_device():
    """Return the program, batches, states and metrics of ten updates on one device."""
    program = setup(job(), collect=("grads",))
    batches = batches_of(program.config, 10)
    states, metrics = [program.state()], []
    for batch in batches:
        before = jax.device_get(states[-1])  # the step donates its input
        state, of_step = program.run(states[-1], [batch])
        states[-1] = before
        states.append(state)
        metrics.append(jax.tree.map(lambda x: x[0], of_step))
    states[-1] = jax.device_get(states[-1])
    return program, batches, states, metrics


# The implementation in PyTorch


def mean_loss(logits, labels):
    flat = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return flat / (labels != -100).sum()


def losses(p, tokens, labels, segments):
    """Return the mean loss of the next token, and of each depth."""
    table, head = p["token_embedding.embedding.weight"], p["output_head.proj.weight"]
    x = block(p, "layers.0", table[tokens], segments, 99)
    hidden = norm(p, "norm", block(p, "layers.1", x, segments, 5))
    result, (rows, length) = [mean_loss(hidden @ head.T, labels)], tokens.shape
    for k in range(1, DEPTH + 1):
        name, shifted, own = f"mtp.{k - 1}", torch.zeros_like(tokens), torch.full_like(labels, -100)
        for row in range(rows):
            for t in range(length - k):
                shifted[row, t] = tokens[row, t + k]
                if segments[row, t] == segments[row, t + k]:
                    own[row, t] = labels[row, t + k]
        both = (
            norm(p, f"{name}.embedding_norm", table[shifted]),
            norm(p, f"{name}.hidden_norm", hidden),
        )
        x = torch.cat(both, -1) @ p[f"{name}.input_proj.weight"].T
        hidden = block(p, name, x, segments, 5)
        result.append(mean_loss(norm(p, f"{name}.output_norm", hidden) @ head.T, own))
    return result


def test_ten_updates_equal_torch(on_one_device):
    program, batches, states, metrics = on_one_device
    model = program.config.model
    p = {name: x.requires_grad_() for name, x in named(states[0].params, model).items()}
    decayed = [x for x in p.values() if x.ndim > 1]
    groups = [
        {"params": decayed, "weight_decay": DECAY},
        {"params": [x for x in p.values() if x.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
    for batch, of_step in zip(batches, metrics, strict=True):
        flat = {n: torch.tensor(np.asarray(x)).flatten(0, 1) for n, x in batch.items()}
        next_loss, *further = losses(p, flat["input_ids"], flat["labels"], flat["segment_ids"])
        loss = next_loss + WEIGHT / DEPTH * sum(further)
        optimizer.zero_grad()
        loss.backward()
        for name, grad in named(of_step["grads"], model).items():
            torch.testing.assert_close(grad, p[name].grad, rtol=1e-4, atol=2e-6, msg=name)
        total = torch.nn.utils.clip_grad_norm_(p.values(), CLIP)
        optimizer.step()
        close = functools.partial(np.testing.assert_allclose, rtol=1e-5)
        close(of_step["loss"], loss.item())
        close(of_step["grad_norm"], total.item())
        close(of_step["side"]["mtp_loss"], [x.item() for x in further])
        close(of_step["losses"]["cross_entropy"], next_loss.item())
    for name, x in named(states[-1].params, model).items():
        torch.testing.assert_close(x, p[name].detach(), rtol=1e-4, atol=1e-4, msg=name)


def run(config):
    program = setup(config)
    state, metrics = program.run(program.state(), batches_of(config, 3))
    trees, of = jax.device_get((state.params, state.model_state)), program.model.stack.of
    stacks = config.model.stacks
    return {key: metrics[key] for key in ("loss", "grad_norm", "losses")}, [
        {
            name: jax.tree.map(of(name).unstack, x) if name in stacks else x
            for name, x in tree.items()
        }
        for tree in trees
    ]


def check_same(results, expected):
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, results[0], expected[0])
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=5e-4)  # of a rate of 1e-2
    jax.tree.map(close, results[1], expected[1])


def test_updates_do_not_depend_on_the_mesh(on_one_device):
    """Three updates on data and tensor parallel devices."""
    _, _, states, metrics = on_one_device
    keys = ("loss", "grad_norm", "losses")
    first = jax.tree.map(lambda *x: np.stack(x), *({k: m[k] for k in keys} for m in metrics[:3]))
    check_same(run(job(dp_shard=2, tp=2)), (first, [states[3].params, {}]))


MESHES = [
    ({}, {"dp_shard": 2, "pp": 2}),
    ({}, {"cp": 2, "dp_shard": 2}),
    ({"grad_sync": "microbatch", "activation_checkpointing": "full"}, {"dp_shard": 2, "tp": 2}),
    ({"loss_fn": "chunked_cross_entropy", "ce_vocab_chunk": 16}, {"pp": 2, "tp": 2}),
    ({"loss_norm": "microbatch"}, {"dp_shard": 2, "tp": 2}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("train", "axes"), MESHES, ids=str)
def test_updates_do_not_depend_on_other_meshes(train, axes):
    norm_key = {key: train[key] for key in train if key == "loss_norm"}
    check_same(run(job(train=train, **axes)), run(job(train=norm_key)))


@pytest.mark.slow
@pytest.mark.parametrize("experts", [EXPERTS, ONE_PART], ids=["experts", "layers of one part"])
@pytest.mark.parametrize(
    "axes", [{"dp_shard": 2, "ep": 2}, {"pp": 2, "dp_shard": 2}, {"tp": 2}], ids=str
)
def test_modules_with_experts_do_not_depend_on_the_mesh(axes, experts):
    alone = run(job(experts))
    check_same(run(job(experts, **axes)), alone)
    biases = alone[1][1]["mtp"]["0"]["mlp"]["router"]["expert_bias"]
    assert np.abs(biases).max() > 0.04  # moved by 0.05 per update


def test_run_resumes_bit_exactly(on_one_device, tmp_path):
    program, batches, states, _ = on_one_device
    state, _ = program.run(program.state(), batches[:2])
    state, _ = program.run(through_checkpoint(program, state, tmp_path), batches[2:4])
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), states[4])
    for depth in (0, 1, 3):
        other = setup(job({"mtp_depth": depth}))
        with pytest.raises(
            UserError, match=f"mtp_depth = {depth}, but .* 2 modules of .*depth = 2"
        ):
            restore_checkpoint(other, tmp_path, 2)


def test_further_labels_stay_within_documents():
    batch = {
        "input_ids": np.array([[[1, 2, 3, 4, 5, 6]]]),
        "labels": np.array([[[2, 3, -100, 5, -100, 7]]]),
        "segment_ids": np.array([[[0, 0, 0, 1, 1, 1]]]),
    }
    result = jax.device_get(with_further_tokens(batch, ModelConfig(mtp_depth=2)))
    tokens, labels = (np.moveaxis(result[n][0, 0], -1, 0) for n in (FURTHER_TOKENS, FURTHER_LABELS))
    np.testing.assert_array_equal(tokens[:, :4], [[2, 3, 4, 5], [3, 4, 5, 6]])
    ignored = -100
    np.testing.assert_array_equal(labels[0], [3, ignored, ignored, ignored, 7, ignored])
    np.testing.assert_array_equal(labels[1], [ignored, ignored, ignored, 7, ignored, ignored])
    deep = with_further_tokens(batch, ModelConfig(mtp_depth=8))  # more depths than tokens
    assert (np.asarray(deep[FURTHER_LABELS])[..., 5:] == ignored).all()


def test_loss_of_each_depth_is_logged():
    values = {"losses": {"mtp_loss": 0.5}, "side": {"mtp_loss": np.array([2.0, 3.0])}}
    assert aux_metrics(values) == {
        "terms/mtp_loss": 0.5, "train/mtp_loss": 2.5, "train/mtp_loss/depths.1": 2.0,
        "train/mtp_loss/depths.2": 3.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    "experts", [{}, EXPERTS, ONE_PART], ids=["dense", "experts", "layers of one part"]
)
def test_counts_include_modules(experts):
    """The head counts again in FLOPs, but not among the parameters."""
    with_modules = ModelConfig(**tiny_config(model={**MODEL, **experts}).model.model_dump())
    without = with_modules.model_copy(update={"mtp_depth": 0})
    counts = [parameter_count(Model(config).abstract) for config in (with_modules, without)]
    added = counts[0] - counts[1]
    vectors = 5 * 32  # two norms of the block, three of the module
    assert parameters(with_modules) - parameters(without) == added - DEPTH * vectors
    c, module = with_modules, added // DEPTH - vectors
    if experts:
        # The router, and experts that a token does not use.
        module -= 32 * 4 + 2 * 3 * c.expert_embed_dim * 16
    pairs = 2 * c.n_heads * c.head_size * 5  # the window of the last layer
    before, after = (flops.flops_per_token(config, 16) for config in (without, with_modules))
    assert after - before == 6 * DEPTH * (module + 64 * 32 + pairs)


def test_weight_without_modules_has_no_effect(tmp_path):
    from jaxforge.config.reading.load import load_config

    file = tmp_path / "job.toml"
    file.write_text("[train]\nmtp_loss_weight = 0.1\nmixed_precision = 'fp32'\n")
    (warning,) = [w for w in ineffective_settings(load_config(file), "cpu") if "mtp" in w]
    assert warning.startswith("train.mtp_loss_weight = 0.1 has no effect")


def test_registered_network_without_modules_is_refused():
    class Bare(Model):
        def _declare(self, key=None):
            module = super()._declare(key)
            del module.mtp
            return module

    config = job()
    with pytest.raises(UserError, match=r"model.mtp_depth = 2: the network .* declares no modules"):
        with_mtp_loss(config.train, Bare(config.model), lambda *_: None)
