"""Steps compiled by a plan, and runs that load or refuse them."""

import json
import random
import subprocess
import sys
import zipfile
from types import SimpleNamespace

import jax
import pytest

from jaxforge.commands import plan as plan_main
from jaxforge.errors import UserError
from jaxforge.parallel import compilation
from jaxforge.parallel.mesh import make_mesh
from jaxforge.step.executable import CompiledStep, Executable, write
from jaxforge.tools.plan import plan_report
from jaxforge.tools.plan.topology import Topology
from jaxforge.training import launch
from tests.conftest import tiny_config
from tests.machine import PATIENCE
from tests.processes.conftest import ROOT, environment

RAMP = [{"start": 0, "grad_accum_steps": 1}, {"start": 2, "grad_accum_steps": 2}]
FIVE_SIZES = {
    "max_steps": 5, "grad_accum_steps": 5,
    "batch_ramp": [{"start": i, "grad_accum_steps": i + 1} for i in range(5)],
}  # fmt: skip


def config(directory, **train_keys):
    return tiny_config(
        model={"n_layers": 1},
        distributed={"dp_shard": 4, "tp": 2},
        train={"max_steps": 4, "batch_size": 2, "grad_accum_steps": 2, "batch_ramp": RAMP}
        | train_keys,
        metrics={"collect": ["params_norm"]},
        checkpoint={"dir": str(directory)},
    )


def losses(directory):
    lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return [line["train/loss"] for line in lines if "train/loss" in line]


def arguments(location, **train_keys):
    """Return arguments that plan a config and save its steps."""
    (location / "planned.toml").write_text(config(location / "planned", **train_keys).to_toml())
    return [f"--config={location / 'planned.toml'}", "--topology=cpu:8", "--json",
            f"--save-executable={location / 'step.zip'}"]  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """File of steps, written by the command."""
    location = tmp_path_factory.mktemp("plan")
    args, _ = plan_main.parser().parse(arguments(location))
    assert plan_report.run(args, Topology.parse("cpu:8"), []) == 0
    return location / "step.zip"


@pytest.mark.slow
@pytest.mark.parametrize(("train_keys", "sizes"), [({}, [1, 2]), (FIVE_SIZES, [5])])
def test_saved_executable_is_not_recompiled_and_exact(train_keys, sizes, tmp_path, monkeypatch):
    done = subprocess.run(
        [sys.executable, "-m", "jaxforge.plan", *arguments(tmp_path, **train_keys)],
        cwd=ROOT, env=environment(), text=True, capture_output=True, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    saved = tmp_path / "step.zip"
    with zipfile.ZipFile(saved) as file:
        assert sorted(file.namelist()) == [*(f"{n}.bin" for n in sizes), "about.json"]
    launch.fit(config(tmp_path / "compiled", **train_keys))

    def compile_step(*_):
        raise AssertionError("compiled")

    monkeypatch.setattr(compilation, "compile_step", compile_step)
    with pytest.raises(AssertionError, match="compiled"):
        launch.fit(config(tmp_path / "not", **train_keys))
    # Keys that do not affect the step may change.
    loading = {"executable": str(saved), "manual_gc_interval": 3}
    launch.fit(config(tmp_path / "loaded", **train_keys, **loading))
    assert losses(tmp_path / "loaded") == losses(tmp_path / "compiled")
    assert len(losses(tmp_path / "loaded")) == train_keys.get("max_steps", 4)  # with all sizes


@pytest.mark.slow
def test_executable_of_another_config_is_refused_with_difference(saved, tmp_path):
    other = config(tmp_path / "run", executable=str(saved), grad_clip_norm=0.5)
    with pytest.raises(UserError, match=r"train\.grad_clip_norm was 1\.0 and is 0\.5") as refused:
        launch.fit(other)
    assert "max_steps" not in str(refused.value)
    assert "step.zip" in str(refused.value)
    assert "remove the key" in str(refused.value)


def rewritten(saved, path, **changes):
    """Copy the file with changes to its facts."""
    with zipfile.ZipFile(saved) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            if name == "about.json":
                content = json.dumps(json.loads(content) | changes)
            new.writestr(name, content)
    return path


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"versions": {"jax": "0.1"}}, f"for jax 0.1; this run has jax {jax.__version__}"),
        ({"devices": ["TPU v5p"]}, "TPU v5p"),
        ({"ids": [0, 1]}, "2 devices.*this run has 8 devices"),
        ({"format": 0}, "format 0"),
    ],
)  # fmt: skip
def test_executable_of_another_environment_is_refused_before_writing(
    saved, tmp_path, changes, said
):
    path = rewritten(saved, tmp_path / "other.zip", **changes)
    with pytest.raises(UserError, match=said):
        launch.fit(config(tmp_path / "run", executable=str(path)))
    assert not (tmp_path / "run").exists()


def test_executable_of_another_code_version_is_refused(saved, tmp_path):
    path = rewritten(saved, tmp_path / "other.zip", programs={"1": "", "2": ""})
    with pytest.raises(UserError, match="another version of the code"):
        launch.fit(config(tmp_path / "run", executable=str(path)))


@pytest.mark.parametrize("content", [b"", b"no archive", None])
def test_truncated_executable_is_refused(saved, tmp_path, content):
    path, whole = tmp_path / "torn.zip", saved.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if content is None else content)
    with pytest.raises(UserError, match=r"torn\.zip: not a file of compiled steps, or damaged"):
        launch.fit(config(tmp_path / "run", executable=str(path)))


def test_bit_flip_in_executable_is_detected(tmp_path):
    settings, path = config(tmp_path), tmp_path / "step.zip"
    mesh, lowered = make_mesh(settings), jax.jit(lambda x: 2 * x).lower(1.0)
    compiled = lowered.compile()
    write(path, {1: CompiledStep(lowered, compiled)}, settings, mesh)
    whole, refused = path.read_bytes(), 0
    for bit in random.Random(0).sample(range(8 * len(whole)), 300):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        try:
            steps = Executable(str(path), mesh).load({1: lowered}, settings)
        except UserError as error:
            refused += "damaged" in str(error)
        else:  # the bit was in metadata, such as a date
            assert steps[1].as_text() == compiled.as_text()
    assert refused > 250


def test_missing_executable_is_named(tmp_path):
    path = str(tmp_path / "none.zip")
    with pytest.raises(UserError, match=r"train\.executable = .*none\.zip: No such file"):
        Executable(path, make_mesh(config(tmp_path)))


def test_unwritable_executable_path_raises_user_error(tmp_path):
    location = tmp_path / "none" / "step.zip"
    settings = config(tmp_path)
    step = SimpleNamespace(executables={}, config=settings, mesh=make_mesh(settings))
    args = SimpleNamespace(save_executable=str(location))
    with pytest.raises(UserError, match=r"--save-executable .*: No such file or directory"):
        plan_report._save_executable(args, SimpleNamespace(step=step, fits=True))
