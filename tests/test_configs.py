"""Cluster configs load, satisfy all rules, fit in memory and lower for their hardware."""

import functools
import itertools
import math
import re
from pathlib import Path

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType

from jaxforge.config import rules
from jaxforge.config.reading.load import load_config
from jaxforge.data.sources import open_training_data
from jaxforge.errors import UserError
from jaxforge.model.transformer import build_model, parameter_count
from jaxforge.parallel.hardware import CHIPS
from jaxforge.parallel.mesh import data_parallel_size
from jaxforge.program import Program
from jaxforge.step.execution import with_execution
from jaxforge.step.train_step import Controls
from tests.shipped_configs import CONFIGS

MEMORY = {"gpu": 80e9, "v5e": 16e9, "v5p": 95e9, "v6e": 32e9}  # bytes of one device
TORUS = {  # topology of a slice
    "v5e_16": (4, 4),
    "v5e_256": (16, 16),
    "v5p_64": (4, 4, 4),
    "v5p_128": (4, 4, 8),
    "v5p_512": (8, 8, 8),
    "v6e_64": (8, 8),
    "v6e_128": (8, 16),
    "v6e_256": (16, 16),
}
PARAMETERS = {  # as published with the weights, or counted by transformers
    "1b": 1_235_814_400,
    "7b": 6_738_415_616,
    "8b": 8_030_261_248,
    "13b": 13_015_864_320,
    "70b": 68_976_648_192,
    "nemotron_h_8b": 8_100_852_736,
    "gpt_oss_20b": 20_914_757_184,
    "lfm2_1b": 1_170_340_608,
    "falcon_h1_7b": 7_585_513_568,
    "gemma_4_e4b": 7_463_013_376,
    "gemma_4_26b": 25_233_141_760,
    "gemma_4_31b": 30_697_345_280,
}

SLOW = re.compile(
    "lfm2|13b|v6e|nemotron|gemma_4_26b|gemma_4_31b|llama_7b_gpu|llama_70b_tpu|llama_8b_128k_tpu"
)
"""Configs with little that no other one has."""

pytestmark = pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.slow] * bool(SLOW.search(path.stem)))
        for path in CONFIGS
    ],
    scope="module",
)


class Recipe:
    """A config and the machine in its name: <family>_<size>[_128k]_[tpu_]<kind>_<devices>."""

    def __init__(self, path: Path) -> None:
        self.config = load_config(path)
        self.size, self.kind, devices = re.fullmatch(
            r"(?:llama_)?(\w+b)(?:_128k)?_(gpu|tpu_v\w+)_(\d+)", path.stem
        ).groups()
        self.kind = self.kind.removeprefix("tpu_")
        self.devices = int(devices)
        rules.check(self.config, self.devices)
        shape = rules.mesh_shape(self.config, self.devices)
        kinds = (AxisType.Auto,) * len(shape)
        self.mesh = AbstractMesh(tuple(shape.values()), tuple(shape), axis_types=kinds)
        # cuDNN's attention cannot be traced without cuDNN; splash attention can without a TPU.
        self.model = build_model(self.config, "cpu" if self.kind == "gpu" else "tpu")
        chip = CHIPS["h100" if self.kind == "gpu" else self.kind]
        self.config, self.why = with_execution(
            self.config, self.mesh, model=self.model, capacity=self.capacity, chip=chip
        )
        self.program = Program(self.config, self.mesh, model=self.model)

    @property
    def capacity(self) -> int:
        """Device memory for a run: JAX uses three quarters of a GPU."""
        return int(MEMORY[self.kind] * (0.75 if self.kind == "gpu" else 1))

    @functools.cached_property
    def state(self):
        return self.program.abstract_state()


@functools.lru_cache(1)  # tests of a config are consecutive
def recipe_of(path):
    return Recipe(path)


@pytest.fixture
def recipe(path):
    return recipe_of(path)


def bytes_per_device(tree) -> int:
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def test_config_lowers_for_its_machine(recipe):
    with jax.sharding.use_abstract_mesh(recipe.mesh):
        batch = recipe.program.abstract_batch()
        traced = recipe.program.step.trace(recipe.state, batch, Controls())
        platform = "cuda" if recipe.kind == "gpu" else "tpu"
        text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert f"num_partitions = {recipe.devices}" in text


def test_model_has_published_size(recipe):
    assert parameter_count(recipe.model.abstract) == PARAMETERS[recipe.size]


def test_state_and_gradients_leave_room_for_activations(recipe):
    state = recipe.state
    gradients = bytes_per_device(state.params)  # float32, like the parameters
    assert bytes_per_device(state) + gradients < 0.7 * MEMORY[recipe.kind]


def test_gradients_are_reduced_per_microbatch_over_fast_networks(recipe, path):
    """Few parameters of mixtures are not experts: to gather the others once takes little memory."""
    sync = recipe.config.train.grad_sync
    is_small = path.stem in ("gpt_oss_20b_gpu_64", "gemma_4_26b_tpu_v5p_64")
    assert sync == ("update" if is_small else "microbatch"), recipe.why


def test_page_states_memory_per_device(recipe, path):
    page = (Path(__file__).parents[1] / "docs" / "configs.md").read_text()
    name = path.stem.removeprefix("llama_")
    (reported,) = re.findall(rf"\| `{name}` \| ([\d.]+) \| (\d+) \|", page)
    state = recipe.state
    result = (bytes_per_device(state) + bytes_per_device(state.params)) / 1e9
    dp = data_parallel_size(recipe.mesh)
    assert reported == (f"{result:.1f}", str(recipe.config.train.microbatch_size(dp) // dp))


def test_microbatch_divides_over_devices(recipe):
    train, dp = recipe.config.train, data_parallel_size(recipe.mesh)
    assert train.microbatch_size(dp) % dp == 0
    tokens = 1e11 if train.seq_len == 131_072 else 2e12
    assert train.max_steps * train.global_batch_size * train.seq_len == pytest.approx(
        tokens, rel=0.1
    )


def test_mesh_axes_follow_torus(recipe):
    """Axes are whole sides of the torus; at most one side is shared."""
    axes = [size for size in recipe.mesh.shape.values() if size > 1]
    if recipe.kind == "gpu":
        assert recipe.config.distributed.tp in (1, 8)  # a node of NVLink
        return
    torus = TORUS[f"{recipe.kind}_{recipe.devices}"]
    assert math.prod(torus) == recipe.devices
    assert any(fits(axes, lengths) for lengths in with_one_side_shared(torus))


def with_one_side_shared(torus):
    for i, length in enumerate(torus):
        for parts in itertools.product(range(1, length + 1), repeat=3):
            if math.prod(parts) == length:
                yield (*torus[:i], *parts, *torus[i + 1 :])


def fits(axes, lengths):
    owners = itertools.product(range(len(axes)), repeat=len(lengths))
    return any(
        axes == [math.prod(n for n, o in zip(lengths, owner, strict=True) if o == axis)
                 for axis in range(len(axes))]
        for owner in owners
    )  # fmt: skip


def test_missing_data_is_named(recipe, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="data/tokens"):
        open_training_data(recipe.config)
