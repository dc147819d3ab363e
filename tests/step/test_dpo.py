"""Direct preference optimization, compared with an implementation in PyTorch."""

import functools

import numpy as np
import pytest
import torch
from torch.nn import functional

from jaxforge.data.packing import IGNORE
from tests.step.frozen_runs import SEQ, FrozenSetup, check_equal, follow_torch, job
from tests.step.torch_decoder import logits

SMOOTHED = {"beta": 0.3, "label_smoothing": 0.1, "rpo_alpha": 0.7}
IPO = {"beta": 0.5, "loss": "ipo", "length_normalized": True}
HINGE = {"beta": 0.2, "loss": "hinge"}


def pairs(seed, accum=2, rows=4):
    """Return a batch of rows with one or two pairs, an answer without labels, and padding."""
    rng = np.random.default_rng(seed)
    shape = accum, rows, SEQ
    tokens = rng.integers(0, 64, shape)
    segments = np.empty(shape, int)
    for i, row in enumerate(segments.reshape(-1, SEQ)):
        documents = 2 if i % 3 == 0 else 4
        ends = np.sort(rng.choice(np.arange(2, SEQ - 1), documents, replace=False))
        row[:] = np.searchsorted(ends, np.arange(SEQ), side="right")
    is_padding = segments == segments.max(axis=-1, keepdims=True)
    is_last = segments != np.roll(segments, -1, axis=-1)
    is_ignored = is_padding | is_last | (rng.random(shape) < 0.3)
    labels = np.where(is_ignored, IGNORE, np.roll(tokens, -1, axis=-1))
    labels[0, 1][segments[0, 1] == 2] = IGNORE  # the second pair of this row does not count
    return {
        "input_ids": tokens, "labels": labels, "segment_ids": segments,
        "is_padding": is_padding.astype(int),
    }  # fmt: skip


def torch_loss(section, p, reference, batch):
    """Return the loss of an update and its metrics, pair by pair."""
    flat = {name: torch.tensor(np.asarray(x)).flatten(0, 1) for name, x in batch.items()}
    tokens, labels, segments = (flat[n] for n in ("input_ids", "labels", "segment_ids"))
    log_p, log_q = (
        torch.log_softmax(logits(each, tokens, segments), -1).gather(
            -1, labels.clamp(min=0)[..., None]
        )[..., 0]
        for each in (p, reference)
    )
    beta, losses, rewards = section.get("beta", 0.1), [], []
    for row in range(len(labels)):
        for first in range(0, int(segments[row].max()), 2):
            masks = [(segments[row] == first + i) & (labels[row] != IGNORE) for i in range(2)]
            if not all(mask.any() for mask in masks):
                continue
            mean = section.get("length_normalized")
            chosen, rejected = (
                (log_p[row] - log_q[row])[mask].sum() / (mask.sum() if mean else 1)
                for mask in masks
            )
            h, s = chosen - rejected, section.get("label_smoothing", 0.0)
            loss = {
                "sigmoid": -(1 - s) * functional.logsigmoid(beta * h)
                - s * functional.logsigmoid(-beta * h),
                "ipo": (h - 1 / (2 * beta)) ** 2,
                "hinge": torch.relu(1 - beta * h),
            }[section.get("loss", "sigmoid")]
            losses.append(loss - section.get("rpo_alpha", 0.0) * log_p[row][masks[0]].mean())
            rewards.append((beta * chosen.item(), beta * rejected.item()))
    chosen, rejected = np.array(rewards).T
    metrics = {
        "dpo/accuracy": (chosen > rejected).mean(), "dpo/margin": (chosen - rejected).mean(),
        "dpo/chosen_reward": chosen.mean(), "dpo/rejected_reward": rejected.mean(),
    }  # fmt: skip
    return torch.stack(losses).mean(), metrics


def check_updates(section, updates):
    result, batches = FrozenSetup(job("dpo", dpo=section)), [pairs(seed) for seed in range(updates)]
    follow_torch(result, batches, functools.partial(torch_loss, section))


def test_ten_updates_equal_torch():
    check_updates({}, 10)


@pytest.mark.parametrize(
    "section",
    [SMOOTHED, *(pytest.param(each, marks=pytest.mark.slow) for each in (IPO, HINGE))],
    ids=str,
)
def test_variants_equal_torch(section):
    check_updates(section, 2)


MESHES = [
    {"axes": {"dp_shard": 2, "tp": 2}},
    *(
        pytest.param(settings, marks=pytest.mark.slow)
        for settings in (
            {"axes": {"dp_replicate": 2, "dp_shard": 2}},
            {"axes": {"dp_shard": 2, "tp": 2}, "train": {"grad_sync": "microbatch"}},
            {"axes": {"cp": 2, "dp_shard": 2}},
            {"axes": {"cp": 2, "cp_strategy": "ring"}},
            {"axes": {"cp": 2}, "train": {"grad_sync": "microbatch"}},
            {"axes": {"pp": 2, "dp_shard": 2}},
            {"axes": {"pp": 2, "tp": 2}, "train": {"ce_vocab_chunk": 8}},
            {"axes": {"pp": 2, "cp": 2}},
        )
    ),
]


@pytest.fixture(scope="module")
def one_device():
    return FrozenSetup(job("dpo", dpo=SMOOTHED)).run([pairs(0), pairs(1)])


@pytest.mark.slow
@pytest.mark.parametrize("settings", MESHES, ids=str)
def test_mesh_does_not_change_the_updates(settings, one_device):
    check_equal(
        FrozenSetup(job("dpo", dpo=SMOOTHED, **settings)).run([pairs(0), pairs(1)]), one_device
    )


EXPERTS = {"num_experts": 4, "moe_top_k": 2, "moe_shared_experts": 1, "moe_bias_update": "sign"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "axes", [{"ep": 2}, {"ep": 2, "dp_shard": 2}, {"pp": 2, "dp_shard": 2}], ids=str
)
def test_reference_with_experts_does_not_depend_on_the_mesh(axes):
    batches = [pairs(0), pairs(1)]
    alone = FrozenSetup(job("dpo", model=EXPERTS)).run(batches)
    check_equal(FrozenSetup(job("dpo", model=EXPERTS, axes=axes)).run(batches), alone)
