"""`jaxforge prove`: small configs, sound meshes, planted faults and wrong plugins."""

import argparse
import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxforge.config import rules
from jaxforge.config.axes import AXES, declared_sizes
from jaxforge.config.reading.load import load_config, load_unresolved
from jaxforge.data.packing import IGNORE
from jaxforge.errors import UserError
from jaxforge.step.losses import register_loss
from jaxforge.tools.prove import MOST_DEVICES, proof, proof_report
from jaxforge.tools.prove.faults import FAULTS
from jaxforge.tools.prove.proof import Comparison, Quantity, Reference
from jaxforge.tools.prove.smaller import device_count, meshes, on_mesh, smaller, transposed
from jaxforge.tools.prove.trajectory import Trainer
from tests.conftest import tiny_config

CONFIGS = sorted((Path(__file__).parents[3] / "configs").rglob("*.toml"))
EVERY_AXIS = {"pp": 2, "dp_replicate": 2, "dp_shard": 2, "cp": 2, "ep": 2, "tp": 2}
EXPERTS = {"num_experts": 8, "moe_router": "sigmoid_topk", "moe_bias_update": "sign"}


def kinds_of(config):
    model = config.model
    return [*zip(model.layer_parts, model.windows, model.ropes, strict=True)]


def abstract(kinds):
    """Kinds of layers without sizes."""
    return [
        (parts, window is not None, rope and (rope[0], rope[1] is not None))
        for parts, window, rope in kinds
    ]


def changes(kinds):
    """Pairs of different kinds of layers that follow each other."""
    return {pair for pair in itertools.pairwise(kinds) if pair[0] != pair[1]}


@pytest.mark.parametrize("path", CONFIGS, ids=[path.stem for path in CONFIGS])
def test_small_config_has_the_structure_and_fits_its_meshes(path):
    config = load_unresolved(path).known
    small = smaller(config)
    before, after = (abstract(kinds_of(each)) for each in (config, small))
    assert {*after} == {*before}
    assert changes(after) == changes(before)
    ratio = config.model.n_heads // config.model.kv_heads
    assert small.model.n_heads // small.model.kv_heads == min(8, ratio)
    for key in ("optimizer.name", "train.objective", "train.loss_fn", "model.tie_embeddings",
                "data.pack_sequences", "train.reduce_dtype"):  # fmt: skip
        assert small.settings[key] == config.settings[key]
    several = {axis for axis in AXES if getattr(config.distributed, axis) not in (0, 1)}
    on = meshes(config, small)
    for mesh in on:
        for each in (mesh, transposed(mesh)):
            n = device_count(each)
            assert 1 <= n <= MOST_DEVICES
            assert rules.broken(each, n) == []
        assert transposed(mesh).distributed != mesh.distributed
    assert {axis for mesh in on for axis in AXES if declared_sizes(mesh)[axis] > 1} == several


def test_each_pair_of_axes_is_on_a_mesh():
    config = tiny_config(
        model={**EXPERTS, "n_kv_heads": 4}, train={"grad_accum_steps": 4}, distributed=EVERY_AXIS
    )
    pairs = set()
    for mesh in meshes(config, smaller(config)):
        axes = [axis for axis in AXES if declared_sizes(mesh)[axis] > 1]
        assert len(axes) == 3
        pairs |= {*itertools.combinations(axes, 2)}
    assert pairs == {*itertools.combinations(AXES, 2)}


def test_stages_of_unequal_length_stay_unequal():
    config = tiny_config(
        model={"n_layers": 7}, train={"grad_accum_steps": 4}, distributed={"pp": 2}
    )
    small = smaller(config)
    assert small.model.n_layers % 2
    assert small.train.grad_accum_steps == 4  # more microbatches than stages


def test_larger_number_of_devices_tells_directions_apart():
    ring = tiny_config(distributed={"cp": 8, "cp_strategy": "ring"}, train={"seq_len": 64})
    (mesh,) = meshes(ring, smaller(ring))
    assert declared_sizes(mesh)["cp"] == 4


PACKED = {
    "model": {"n_layers": 1}, "train": {"grad_accum_steps": 2}, "data": {"pack_sequences": True},
    "distributed": {"dp_shard": 2, "tp": 2},
}  # fmt: skip


@pytest.fixture(scope="module")
def packed():
    config = tiny_config(**PACKED)
    small = smaller(config)
    (mesh,) = meshes(config, small)
    return Reference(small), mesh, Trainer(mesh.with_values({"train.grad_sync": "update"}))


def test_mesh_is_the_same_within_rounding(packed):
    reference, _, trainer = packed
    comparison = Comparison.of("", reference.follow(trainer))
    assert comparison.first_difference is None
    quantities = {each.name: each for each in comparison.quantities}
    assert {*quantities} >= {"loss", "gradient norm", "gradients", "parameters", "optimizer state"}
    # Rounding, which depends on the processor, is well below what is allowed.
    assert all(each.difference < each.allowed / 2 for each in quantities.values())
    assert quantities["gradients"].allowed < 1e-3


@pytest.mark.parametrize(
    "fault", [fault for fault in FAULTS if fault.batch], ids=lambda fault: fault.about
)
def test_fault_of_a_batch_is_found(packed, fault):
    reference, mesh, trainer = packed
    if not fault.applies(mesh):
        pytest.skip("the mesh has no such axis: see the slow test")
    comparison = Comparison.of("", reference.follow(trainer.with_fault(fault)))
    assert comparison.first_difference.name == "loss"


LOCAL = "mean_over_the_tokens_of_a_device"


@pytest.mark.usefixtures("own_names")
def test_plugin_with_a_wrong_reduction_is_found():
    @register_loss(LOCAL)
    def build(config, model):
        def loss(params, hidden, batch, weights):
            log_p = jax.nn.log_softmax(model.logits(params, hidden))
            is_valid = batch["labels"] != IGNORE
            labels = jnp.where(is_valid, batch["labels"], 0)[..., None]
            nll = -jnp.take_along_axis(log_p, labels, axis=-1)[..., 0]
            # Instead of weights.token * sum: the mean over the valid tokens that the device holds.
            return jnp.sum(jnp.where(is_valid, nll, 0.0)) / jnp.sum(is_valid)

        return loss

    config = tiny_config(
        model={"n_layers": 1}, train={"loss_fn": LOCAL}, distributed={"dp_shard": 2}
    )
    small = smaller(config)
    (mesh,) = meshes(config, small)
    trainer = Trainer(mesh.with_values({"train.grad_sync": "update"}))
    comparison = Comparison.of("", Reference(small).follow(trainer))
    assert comparison.first_difference.name == "loss"


@pytest.mark.usefixtures("own_names")
def test_plugin_that_needs_a_further_field_is_named():
    @register_loss("reads_another_field")
    def build(config, model):
        return lambda params, hidden, batch, weights: jnp.sum(batch["importance"])

    values = {"loss_fn": "reads_another_field"}
    small = smaller(tiny_config(train=values, plugins={"modules": ["json"]}))
    with pytest.raises(UserError, match="needs 'importance' of its batches"):
        Reference(small)


def run(monkeypatch, tmp_path, comparisons, faults=(), *, as_json=False):
    path = tmp_path / "config.toml"
    path.write_text("[model]\nn_layers = 4\n[train]\nmixed_precision = 'fp8'\n")
    monkeypatch.setattr(proof_report, "Reference", lambda small: None)
    monkeypatch.setattr(proof_report, "compare", lambda *_: iter(comparisons))
    monkeypatch.setattr(proof_report, "plant", lambda *_: iter(faults))
    arguments = argparse.Namespace(config=str(path), mutate=True, json=as_json)
    return proof_report.run(arguments, [])


SAME = Comparison("tp 2", (Quantity("loss", 1e-7, 2e-5, "update 1"),))
DIFFERENT = Comparison("cp 2", (Quantity("gradients", 0.1, 2e-5, "norm.weight, update 1"),))


def test_verdict_names_the_first_difference(monkeypatch, tmp_path, capsys):
    assert run(monkeypatch, tmp_path, [SAME, DIFFERENT]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "not proven: 8-bit products and moments: the proof computes in float32" in lines
    assert lines[-1].startswith(
        "DIFFERENT on cp 2: the first quantity that differs is gradients (norm.weight, update 1)"
    )


def test_fault_that_is_not_found_fails(monkeypatch, tmp_path, capsys):
    assert run(monkeypatch, tmp_path, [SAME], [DIFFERENT, SAME]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "NOT FOUND: tp 2"
    assert run(monkeypatch, tmp_path, [SAME], [DIFFERENT]) == 0
    assert "1 of 1 planted faults were found" in capsys.readouterr().out


def test_json_is_alone_on_standard_output(monkeypatch, tmp_path, capsys):
    assert run(monkeypatch, tmp_path, [SAME, DIFFERENT], [DIFFERENT], as_json=True) == 1
    document = json.loads(capsys.readouterr().out)
    assert [each["about"] for each in document["comparisons"]] == ["tp 2", "cp 2"]
    assert document["faults"][0]["quantities"][0]["where"] == "norm.weight, update 1"


def test_config_that_does_not_fit_its_mesh_is_refused():
    config = tiny_config(model={"n_layers": 2}, distributed={"cp": 2})
    small = smaller(config)
    with pytest.raises(UserError, match=r"the small config does not fit its mesh: .*seq_len"):
        meshes(config, small.with_values({"train.seq_len": 7}))


VARIANTS = {
    "pipeline": {
        "model": {"n_layers": 5, "mtp_depth": 1, "tie_embeddings": True},
        "train": {"grad_accum_steps": 4}, "distributed": {"pp": 2, "dp_shard": 2},
    },
    "interleaved": {
        "model": {"n_layers": 8}, "train": {"grad_accum_steps": 4},
        "distributed": {"pp": 2, "pp_schedule": "interleaved_1f1b"}, "optimizer": {"name": "soap"},
    },
    "adapters": {
        "lora": {"rank": 8, "dropout": 0.1}, "checkpoint": {"load_path": "x"},
        "data": {"pack_sequences": True}, "distributed": {"dp_shard": 2, "tp": 2},
    },
    "preferences": {
        "train": {"objective": "dpo"}, "checkpoint": {"load_path": "x"},
        "data": {"dataset_path": "x"}, "distributed": {"dp_shard": 2, "cp": 2},
    },
    "distillation": {
        "train": {"objective": "distillation", "ema_decay": 0.99},
        "distillation": {"teacher": "x"}, "optimizer": {"name": "muon"}, "distributed": {"tp": 2},
    },
    "experts": {
        "model": {**EXPERTS, "moe_first_dense_layers": 1}, "train": {"grad_accum_steps": 2},
        "distributed": {"ep": 2, "dp_shard": 2},
        "data": {"datasets": [{"path": "a"}, {"path": "b"}]},
    },
    "ring": {
        "model": {"dim": 48, "n_heads": 6, "n_kv_heads": 2}, "train": {"seq_len": 64},
        "distributed": {"cp": 4, "cp_strategy": "ring"},
        "optimizer": {"name": "schedule_free_adamw"},
        "scheduler": {"name": "none", "warmup_steps": 0},
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_variant_is_proven_and_its_faults_are_found(name):
    config = tiny_config(**VARIANTS[name])
    small = smaller(config)
    reference = Reference(small)
    (mesh,) = meshes(config, small)
    for comparison in proof.compare(reference, mesh):
        assert comparison.first_difference is None, comparison
        assert all(np.isfinite(each.difference) for each in comparison.quantities)
    for comparison in proof.plant(reference, mesh):
        assert comparison.first_difference, comparison.about


def test_each_fault_applies_to_a_variant():
    on = []
    for values in VARIANTS.values():
        config = tiny_config(**values)
        on += meshes(config, smaller(config))
    packed = on_mesh(smaller(tiny_config(**PACKED)), {"tp": 2})
    for fault in FAULTS:
        assert any(fault.applies(mesh) for mesh in [*on, packed]), fault.about


@pytest.mark.slow
@pytest.mark.parametrize("path", CONFIGS, ids=[path.stem for path in CONFIGS])
def test_shipped_config_is_proven(path):
    config = load_config(path) if "fine_tuning" not in path.stem else load_unresolved(path).known
    small = smaller(config)
    reference = Reference(small)
    for mesh in meshes(config, small):
        for comparison in proof.compare(reference, mesh):
            assert comparison.first_difference is None, comparison
