"""Lowering of the step for target hardware, without running anything."""

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType

from jaxforge.config.rules import mesh_shape
from jaxforge.model.transformer import build_model
from jaxforge.program import Program
from jaxforge.step.train_step import Controls
from tests.conftest import tiny_config


@pytest.mark.parametrize("grad_sync", ["update", "microbatch"])
def test_step_lowers_on_abstract_mesh_of_64_devices(grad_sync):
    config = tiny_config(
        model={"dim": 128, "n_heads": 8, "n_kv_heads": 4},
        train={"batch_size": 1, "grad_sync": grad_sync, "grad_accum_steps": 2},
        distributed={"dp_replicate": 2, "dp_shard": -1, "tp": 4},
    )
    assert "num_partitions = 64" in lowered_for_tpus(config, 64)


def lowered_for_tpus(config, devices):
    shape = mesh_shape(config, devices)
    mesh = AbstractMesh(
        tuple(shape.values()), tuple(shape), axis_types=(AxisType.Auto,) * len(shape)
    )
    program = Program(config, mesh, model=build_model(config, "tpu"))
    with jax.sharding.use_abstract_mesh(mesh):
        return program.step.trace(
            program.abstract_state(), program.abstract_batch(), Controls()
        ).lower(lowering_platforms=("tpu",)).as_text()  # fmt: skip


def test_experts_lower_for_tpus_with_one_reduction_per_update():
    """Their kernel must have no automatic mesh axis, not even of one device."""
    experts = {"num_experts": 4, "moe_top_k": 2, "moe_expert_dim": 128}
    config = tiny_config(
        model={"dim": 128, "n_heads": 4, "n_kv_heads": 4, **experts},
        train={"batch_size": 1, "grad_sync": "update", "mixed_precision": "bf16"},
        distributed={"dp_shard": -1, "ep": 4},
    )
    text = lowered_for_tpus(config, 8)
    assert "num_partitions = 8" in text
    assert "tpu_custom_call" in text
