"""DeepSeek's configs load, have the published sizes and fit into the memory of their machines."""

import re
from pathlib import Path

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType

from jaxforge.config import rules
from jaxforge.config.axes import with_equal_shards
from jaxforge.config.reading.load import load_config
from jaxforge.model.transformer import active_parameter_count, build_model, parameter_count
from jaxforge.program import Program
from jaxforge.step.execution import with_execution
from jaxforge.step.memory import step_memory
from jaxforge.step.train_step import Controls
from tests.test_configs import MEMORY, bytes_per_device

CONFIGS = sorted((Path(__file__).parents[1] / "configs" / "deepseek").glob("*.toml"))
SIZES = {"v3": (671_026_404_352, 37.6), "v2_lite": (15_706_484_224, 2.66)}
PAGE = Path(__file__).parents[1] / "docs" / "latent_attention.md"


def parts_of(path):
    """Return model, kind of device and number of devices from the name of a config."""
    name = re.fullmatch(r"deepseek_(v3|v2_lite)_(?:tpu_)?(gpu|v5p)_(\d+)", path.stem)
    return name[1], name[2], int(name[3])


def mesh_of(shape):
    kinds = (AxisType.Auto,) * len(shape)
    return AbstractMesh(tuple(shape.values()), tuple(shape), axis_types=kinds)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_has_published_size_and_fits(path):
    model, kind, devices = parts_of(path)
    config = load_config(path)
    rules.check(config, devices)
    shape = rules.mesh_shape(config, devices)
    assert with_equal_shards(config, shape) == shape  # latents divide by the shards
    mesh = mesh_of(shape)
    network = build_model(config, "cpu" if kind == "gpu" else "tpu")
    capacity = int(MEMORY[kind] * (0.75 if kind == "gpu" else 1))
    config, _ = with_execution(config, mesh, model=network, capacity=capacity)
    state = bytes_per_device(Program(config, mesh, model=network).abstract_state())
    needed = step_memory(config, network, mesh, state)
    assert needed.total < capacity
    total, active = SIZES[model]
    assert parameter_count(network.abstract) == total
    assert active_parameter_count(network) / 1e9 == pytest.approx(active, rel=2e-3)
    row = rf"\| `{path.stem}` \| ([\d.]+)B \| ([\d.]+)B \| ([\d.]+) \|"
    ((size, share, stored),) = re.findall(row, PAGE.read_text())
    assert (float(size), float(share)) == (round(total / 1e9, 1), active)
    assert float(stored) == pytest.approx(state / 1e9, abs=0.06)


@pytest.mark.slow
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_lowers_for_its_machine(path):
    """Four layers have both kinds; their gradients are reduced once per update."""
    _, kind, devices = parts_of(path)
    config = load_config(path, ["--model.n_layers=4"])
    mesh = mesh_of(rules.mesh_shape(config, devices))
    network = build_model(config, "cpu" if kind == "gpu" else "tpu")
    config, _ = with_execution(config, mesh, model=network, capacity=int(MEMORY[kind]))
    program = Program(config, mesh, model=network)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = program.step.trace(program.abstract_state(), program.abstract_batch(), Controls())
        text = traced.lower(lowering_platforms=("cuda" if kind == "gpu" else "tpu",)).as_text()
    assert f"num_partitions = {devices}" in text


def test_configs_of_both_sizes_exist():
    assert len(CONFIGS) == 4
