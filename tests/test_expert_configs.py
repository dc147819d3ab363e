"""Configs of models with experts have the published sizes and fit into their machines' memory."""

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

ROOT = Path(__file__).parents[1]
DIRECTORIES = ("deepseek", "glm_5", "kimi_linear", "qwen3_next", "nemotron_3")
CONFIGS = sorted(path for name in DIRECTORIES for path in (ROOT / "configs" / name).glob("*.toml"))
MODELS = {  # parameters, billions of active parameters, page
    "deepseek_v3": (671_026_404_352, 37.6, "latent_attention"),
    "deepseek_v32": (671_877_929_216, 38.4, "latent_attention"),
    "glm_5": (743_911_199_232, 41.8, "latent_attention"),
    "deepseek_v2_lite": (15_706_484_224, 2.66, "latent_attention"),
    # Of transformers' models with their default configs; of Kimi Linear with the published layers.
    "kimi_linear_48b_a3b": (49_122_675_072, 3.484, "gated_delta_net"),
    "qwen3_next_80b_a3b": (79_674_391_296, 3.87, "gated_delta_net"),
    # Of transformers' model, 120,668,687,360 and 12.77, and of a module of two layers.
    "nemotron_3_super_120b_a12b": (123_611_012_096, 13.02, "experts"),
}
LAYERS = {"nemotron_3_super_120b_a12b": 9}
"""Number of layers that have all kinds, if not four."""


def parts_of(path):
    """Return model, kind of device and number of devices from the name of a config."""
    name = re.fullmatch(r"(\w+?)_(?:tpu_)?(gpu|v5p)_(\d+)", path.stem)
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
    total, active, page = MODELS[model]
    assert parameter_count(network.abstract) == total
    assert active_parameter_count(network) / 1e9 == pytest.approx(active, rel=2e-3)
    row = rf"\| `{path.stem}` \| ([\d.]+)B \| ([\d.]+)B \| ([\d.]+) \|"
    ((size, share, stored),) = re.findall(row, (ROOT / "docs" / f"{page}.md").read_text())
    assert (float(size), float(share)) == (round(total / 1e9, 1), active)
    assert float(stored) == pytest.approx(state / 1e9, abs=0.06)


@pytest.mark.slow
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_lowers_for_its_machine(path):
    """Few layers have all kinds; their gradients are reduced once per update."""
    model, kind, devices = parts_of(path)
    config = load_config(path, [f"--model.n_layers={LAYERS.get(model, 4)}"])
    mesh = mesh_of(rules.mesh_shape(config, devices))
    network = build_model(config, "cpu" if kind == "gpu" else "tpu")
    config, _ = with_execution(config, mesh, model=network, capacity=int(MEMORY[kind]))
    program = Program(config, mesh, model=network)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = program.step.trace(program.abstract_state(), program.abstract_batch(), Controls())
        text = traced.lower(lowering_platforms=("cuda" if kind == "gpu" else "tpu",)).as_text()
    assert f"num_partitions = {devices}" in text


def test_configs_of_all_models_exist():
    assert {parts_of(path)[0] for path in CONFIGS} == MODELS.keys()
    assert len(CONFIGS) == 2 * len(MODELS)
