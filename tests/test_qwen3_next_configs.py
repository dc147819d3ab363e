"""Qwen3-Next's configs load, have the published sizes and fit into the memory of their machines."""

import re
from pathlib import Path

import pytest
from jax.sharding import AbstractMesh, AxisType

from jaxforge.config import rules
from jaxforge.config.reading.load import load_config
from jaxforge.model.transformer import active_parameter_count, build_model, parameter_count
from jaxforge.program import Program
from jaxforge.step.execution import with_execution
from jaxforge.step.memory import step_memory
from tests.test_configs import MEMORY, bytes_per_device

CONFIGS = sorted((Path(__file__).parents[1] / "configs" / "qwen3_next").glob("*.toml"))
PARAMETERS = 79_674_391_296  # of transformers' model with its default config
HEAD_AND_EMBEDDING = 2 * 151_936 * 2048
PAGE = Path(__file__).parents[1] / "docs" / "gated_delta_net.md"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_has_published_size_and_fits(path):
    kind, devices = re.fullmatch(r"qwen3_next_80b_a3b_(?:tpu_)?(gpu|v5p)_(\d+)", path.stem).groups()
    config = load_config(path)
    rules.check(config, int(devices))
    shape = rules.mesh_shape(config, int(devices))
    kinds = (AxisType.Auto,) * len(shape)
    mesh = AbstractMesh(tuple(shape.values()), tuple(shape), axis_types=kinds)
    network = build_model(config, "cpu" if kind == "gpu" else "tpu")
    capacity = int(MEMORY[kind] * (0.75 if kind == "gpu" else 1))
    config, _ = with_execution(config, mesh, model=network, capacity=capacity)
    state = bytes_per_device(Program(config, mesh, model=network).abstract_state())
    needed = step_memory(config, network, mesh, state)
    assert needed.total < capacity
    active = active_parameter_count(network)
    assert parameter_count(network.abstract) == PARAMETERS
    assert (active - HEAD_AND_EMBEDDING) // 1e9 == 3
    row = rf"\| `{path.stem}` \| ([\d.]+)B \| ([\d.]+)B \| ([\d.]+) \|"
    ((size, share, stored),) = re.findall(row, PAGE.read_text())
    assert (float(size), float(share)) == (round(PARAMETERS / 1e9, 1), round(active / 1e9, 2))
    assert float(stored) == pytest.approx(state / 1e9, abs=0.06)


def test_configs_of_both_platforms_exist():
    assert len(CONFIGS) == 2
