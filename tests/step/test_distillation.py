"""Distillation from a teacher, compared with an implementation in PyTorch."""

import functools

import numpy as np
import pytest
import torch
from torch.nn import functional

from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from jaxforge.parallel.device_memory import bytes_per_device
from jaxforge.step.frozen_model import FrozenModel, frozen_bytes, frozen_config
from tests.helpers import setup
from tests.step.frozen_runs import MODEL, FrozenSetup, check_equal, follow_torch, job
from tests.step.torch_decoder import logits

TEACHER = ModelConfig(**{**MODEL, "dim": 32, "n_heads": 4, "n_kv_heads": 2, "n_layers": 2,
                         "ffn_hidden_dim": 64, "max_seq_len": 64})  # fmt: skip
SECTION = {"teacher": "teacher", "top_k": 5, "temperature": 2.0, "weight": 0.7}
WHOLE = {"teacher": "teacher", "top_k": 64, "weight": 1.0}


def documents(seed, accum=2, rows=4, length=32):
    """Return a batch of packed documents, with ignored labels."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 64, (accum, rows, length))
    segments = np.cumsum(rng.random(tokens.shape) < 0.1, axis=-1)
    is_last = segments != np.roll(segments, -1, axis=-1)
    labels = np.where(
        is_last | (rng.random(tokens.shape) < 0.2), -100, np.roll(tokens, -1, axis=-1)
    )
    return {"input_ids": tokens, "labels": labels, "segment_ids": segments}


def torch_loss(section, p, teacher, batch):
    """Return the loss of an update and its metrics."""
    flat = {name: torch.tensor(np.asarray(x)).flatten(0, 1) for name, x in batch.items()}
    tokens, labels, segments = (flat[n] for n in ("input_ids", "labels", "segment_ids"))
    valid, t = labels != -100, section.get("temperature", 1.0)
    ours = logits(p, tokens, segments)[valid]
    values, ids = logits(teacher, tokens, segments)[valid].topk(section["top_k"])
    log_p = torch.log_softmax(ours / t, -1).gather(-1, ids)
    log_q = torch.log_softmax(values / t, -1)
    kl = functional.kl_div(log_p, log_q, reduction="sum", log_target=True) / valid.sum()
    labeled = functional.cross_entropy(ours, labels[valid])
    w = section.get("weight", 0.5)
    metrics = {"cross_entropy": (1 - w) * labeled.item(), "distillation/kl": kl.item()}
    return (1 - w) * labeled + w * t**2 * kl, metrics


def check_updates(section, updates, teacher):
    ours = FrozenSetup(job("distillation", distillation=section), teacher)
    batches = [documents(seed) for seed in range(updates)]
    follow_torch(ours, batches, functools.partial(torch_loss, section))


def test_ten_updates_equal_torch():
    """The teacher has wider feed-forwards than the student."""
    check_updates(SECTION, 10, TEACHER)


def test_divergence_over_the_whole_vocabulary_equals_torch():
    check_updates(WHOLE, 2, None)


MESHES = [
    {"axes": {"dp_shard": 2, "tp": 2}},
    *(
        pytest.param(settings, marks=pytest.mark.slow)
        for settings in (
            {"axes": {"dp_shard": 2, "tp": 2}, "train": {"grad_sync": "microbatch"}},
            {"axes": {"cp": 2, "cp_strategy": "ring"}},
            {"axes": {"cp": 2, "tp": 2}, "train": {"grad_sync": "microbatch"}},
            {"axes": {"pp": 2, "dp_shard": 2}},
            {"axes": {"pp": 2, "tp": 2}, "train": {"ce_vocab_chunk": 8}},
        )
    ),
]


@pytest.fixture(scope="module")
def one_device():
    batches = [documents(0), documents(1)]
    return FrozenSetup(job("distillation", distillation=SECTION), TEACHER).run(batches)


@pytest.mark.parametrize("settings", MESHES, ids=str)
def test_mesh_does_not_change_the_updates(settings, one_device):
    ours = FrozenSetup(job("distillation", distillation=SECTION, **settings), TEACHER)
    check_equal(ours.run([documents(0), documents(1)]), one_device)


@pytest.mark.parametrize("objective", ["distillation", "dpo"])
def test_bytes_of_the_frozen_model_are_those_of_its_arrays(objective):
    """The reference has the shape of the trained model."""
    train = {"mixed_precision": "bf16"}
    config = job(objective, train=train, axes={"dp_shard": 2, "tp": 2}, distillation=SECTION)
    program, teacher = setup(config), TEACHER if objective == "distillation" else None
    frozen = FrozenModel(frozen_config(config, teacher), config, program.mesh, ("cpu", None))
    expected = bytes_per_device(frozen.like)
    assert frozen_bytes(config, program.model, program.mesh, teacher) == expected > 0
    assert frozen_bytes(job("next_token"), program.model, program.mesh, teacher) == 0


def test_teacher_with_another_vocabulary_is_refused():
    other = TEACHER.model_copy(update={"vocab_size": 65})
    with pytest.raises(UserError, match=r"model.vocab_size = 64 differs from the 65 of"):
        FrozenSetup(job("distillation", distillation=SECTION), other)
