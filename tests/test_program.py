"""One class assembles model, optimizer and update."""

import ast
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxforge as jf
from jaxforge.errors import UserError
from jaxforge.parallel.mesh import make_mesh
from jaxforge.step.train_step import Controls
from tests.conftest import tiny_config
from tests.helpers import random_batches, setup

ROOT = Path(__file__).parents[1]
EVERY_DEVICE = tiny_config(distributed={"dp_shard": -1})
PARTS = {"build_optimizer", "make_gradients", "make_train_step", "choose_execution"}


def calls(path):
    """Yield the name of each function that a file calls."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield getattr(node.func, "id", getattr(node.func, "attr", ""))


def _built_by_program(name):
    return [] if name == "choose_execution" else ["jaxforge/program.py"]


def test_program_alone_assembles_a_run():
    locations = {name: [] for name in PARTS}
    for package in ("jaxforge", "torch_compat", "benchmarks", "examples"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for name in PARTS.intersection(calls(path)):
                locations[name].append(str(path.relative_to(ROOT)))
    # The choice of an execution needs the shapes of the optimizer state. `memory_fit` asks what a
    # config would choose on a device of another size; `inject` spoils gradients.
    execution = "jaxforge/step/execution.py"
    elsewhere = {
        "choose_execution": [execution, "jaxforge/tools/plan/dry_run_memory.py"],
        "build_optimizer": [execution],
        "make_gradients": ["benchmarks/faults/inject.py"],
    }
    assert {name: sorted(paths) for name, paths in locations.items()} == {
        name: sorted([*_built_by_program(name), *elsewhere.get(name, [])]) for name in PARTS
    }


def test_textbook_loop_imports_three_names():
    tree = ast.parse((ROOT / "examples" / "textbook.py").read_text())
    names = [alias for node in ast.walk(tree) if isinstance(node, ast.Import)
             for alias in node.names if alias.name.startswith("jaxforge")]  # fmt: skip
    names += [alias for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
              for alias in node.names if str(node.module).startswith("jaxforge")]  # fmt: skip
    assert len(names) <= 3


def test_construction_builds_no_part(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a part was built")

    for name in ("make_mesh", "build_model", "with_execution", *PARTS - {"choose_execution"}):
        monkeypatch.setattr(f"jaxforge.program.{name}", refuse)
    program = jf.Program(EVERY_DEVICE, collect=["grads"])
    assert program.collect == ("grads",)
    with pytest.raises(AssertionError, match="a part was built"):
        _ = program.optimizer


def test_unknown_metric_is_refused_at_construction():
    with pytest.raises(UserError, match='collect: "gradients": expected one of'):
        jf.Program(tiny_config(), collect=["gradients"])


def test_default_mesh_refuses_a_config_that_does_not_fit():
    n = jax.device_count()
    with pytest.raises(UserError, match="distributed"):
        _ = jf.Program(tiny_config(distributed={"dp_shard": n + 1})).mesh


def test_parts_are_made_once_and_each_program_has_its_own():
    config = tiny_config()
    program, other = setup(config), jf.Program(config, make_mesh(config, jax.devices()[:1]))
    for name in ("mesh", "model", "optimizer", "shardings", "gradients", "step"):
        assert getattr(program, name) is getattr(program, name)
    assert program.step is not other.step


def test_optimizer_is_not_built_for_the_model():
    program = jf.Program(
        tiny_config(train={"activation_checkpointing": "none"}, distributed={"dp_shard": -1})
    )
    assert program.model.abstract
    assert not {"optimizer", "shardings", "step"} & vars(program).keys()


def test_program_without_devices_has_the_shapes_of_the_run():
    """Layers of a pipeline may be stacked with gaps; a checkpoint has none."""
    program = jf.Program.without_devices(tiny_config())
    shapes, state = program.shapes, setup(tiny_config()).abstract_state()
    assert "mesh" not in vars(program)
    assert jax.tree.map(np.shape, shapes) == jax.tree.map(np.shape, state)
    assert [x.dtype for x in jax.tree.leaves(shapes)] == [x.dtype for x in jax.tree.leaves(state)]


def test_initial_state_depends_on_the_seed_and_not_on_the_mesh():
    config = tiny_config(distributed={"dp_shard": 2})
    program = setup(config)
    first, again, other = (
        jax.device_get(program.init(seed).params) for seed in (None, config.train.seed, 7)
    )
    assert jax.tree.all(jax.tree.map(np.array_equal, first, again))
    assert not jax.tree.all(jax.tree.map(np.array_equal, first, other))
    like = program.abstract_state()
    result = program.init()
    assert jax.tree.map(lambda x: (x.shape, x.dtype), result) == jax.tree.map(
        lambda x: (x.shape, x.dtype), like
    )
    assert jax.tree.all(jax.tree.map(lambda x, y: x.sharding == y.sharding, result, like))


def test_lower_is_the_program_of_step():
    ramp = [{"grad_accum_steps": 1}, {"start": 5, "grad_accum_steps": 2}]
    program = setup(tiny_config(train={"grad_accum_steps": 2, "batch_ramp": ramp}))
    with program.context():
        by_step = program.step.lower(
            program.abstract_state(), program.abstract_batch(), Controls(next_lr_scale=1.0)
        )
    sizes = program.lower_sizes()
    assert program.lower().as_text() == by_step.as_text() == sizes[2].as_text()
    assert sizes[1].as_text() != sizes[2].as_text()
    batch = program.put(random_batches(program.config, 1)[0])
    assert program.lower(batch).as_text() == by_step.as_text()
