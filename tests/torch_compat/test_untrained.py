"""Conversion of a registered model's non-trainable state by its own name map."""

import dataclasses
import functools
import json
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxforge.checkpoint.manager import Checkpoints
from jaxforge.checkpoint.restore import Saved, start_from
from jaxforge.config.reading.load import load_config
from jaxforge.errors import UserError
from jaxforge.model.transformer import register_model
from tests.conftest import tiny_config
from tests.helpers import change_stored_config, cli, convert_to_run, setup
from tests.processes.conftest import ROOT, environment
from tests.step import aux_model
from tests.torch_compat.gauged import gone_on, restored
from tests.torch_compat.runs import (
    assert_same,
    saved,
    trained,
    values,
)
from torch_compat.checkpoint import name_maps, stages
from torch_compat.checkpoint.hf_config import select_family
from torch_compat.checkpoint.restore import open_foreign
from torch_compat.checkpoint.shapes import parameters
from torch_compat.checkpoint.state import CheckpointState, abstract_target
from torch_compat.checkpoint.untrained import translate_model
from torch_compat.families import FAMILIES
from torch_compat.families.family import LLAMA, Family, name_map
from torch_compat.formats.dcp_reader import open_dcp
from torch_compat.formats.files import Directory
from torch_compat.formats.lazy import from_array
from torch_compat.formats.safetensors import open_directory
from torch_compat.names.kempnerforge import KEMPNERFORGE, incompatibilities
from torch_compat.names.table import NameMap, Rule
from torch_compat.names.translation import Translation

SECTIONS = {"model": {"model_type": "gauged"}, "train": {"loss_fn": "with_aux"}}


NAMES = {"layers.0.drift": (64,), "layers.1.drift": (64,), "gauge": (3,)}


@pytest.fixture
def run(tmp_path):
    """Return a run at step 2, whose whole state has changed."""
    config = trained(tmp_path / "run", **SECTIONS)
    state = {n: v for n, v in values(tmp_path / "run").items() if n.startswith("model_state.")}
    assert state.keys() == {f"model_state.{name}" for name in NAMES}
    assert all(np.abs(value - 1).max() > 0.01 for value in state.values())
    return tmp_path / "run", config


class GaugedNetwork(aux_model.AuxNetwork):
    """Model with an array outside of layers."""

    def __init__(self, config, declare):
        super().__init__(config, declare)
        self.gauge = declare.untrained((3,), ("norm",), jax.nn.initializers.ones)


class Gauged(aux_model.AuxModel):
    network = GaugedNetwork

    def next_state(self, state, stats, progress):
        return {**super().next_state(state, stats, progress), "gauge": state["gauge"] * 1.1}


OWN = (Rule("layers.{i}.drift", "layers.{i}.router.bias"), Rule("gauge", "gauge.buffer"))
DCP = NameMap("gauged", "a test's model", (*KEMPNERFORGE.rules, *OWN), has_stages=True)
LLAMAS = FAMILIES["llama"]
HF = Family(
    "gauged",
    name_map("hf-gauged", "GaugedForCausalLM", *LLAMA, *OWN),
    LLAMAS.defaults,
    read=lambda c, where: {**LLAMAS.read(c, where), "model_type": "gauged"},
    write=LLAMAS.write,
)


@pytest.fixture(autouse=True)
def registered(own_names):
    aux_model.register()
    register_model("gauged")(Gauged)
    name_maps.register_name_map(DCP)
    name_maps.register_family(HF)
    yield
    del name_maps.NAME_MAPS["gauged"], name_maps.NAME_MAPS["hf-gauged"], FAMILIES["gauged"]


def export(run, destination, *options):
    assert cli(["convert", str(run), str(destination), *options]) == 0
    return destination


def state_of(run):
    return {n: v for n, v in values(run).items() if n.startswith("model_state.")}


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--layout=flat"], ["--stages=2"]], ids=str)
def test_reimported_run_resumes_bit_exactly(run, tmp_path, options):
    run, config = run
    dcp = export(run, tmp_path / "dcp", "--to=dcp", "--dialect=gauged", *options)
    keys = open_dcp(Directory(dcp / "step_2")).tensors.keys()
    native = {key for key in keys if "router.bias" in key or "gauge" in key}
    assert native == {
        "model.layers.0.router.bias", "model.layers.1.router.bias", "model.gauge.buffer",
    }, "and no moments"  # fmt: skip
    again = convert_to_run(dcp, tmp_path / "again", config, "--from-dialect=gauged")
    assert_same(values(again), values(run))
    jax.tree.map(np.testing.assert_array_equal, gone_on(again, config), gone_on(run, config))


def test_run_starts_from_untrained_state(run, tmp_path):
    run, path = run
    dcp = export(run, tmp_path / "dcp", "--to=dcp", "--dialect=gauged")
    native = setup(load_config(path))
    like, expected = native.abstract_state(), restored(native, run)
    with jax.set_mesh(native.mesh):
        result, progress = open_foreign(str(dcp), native.config).restore(like)
        alone = native.config.checkpoint.model_copy(update={"exclude_from_loading": ("optimizer",)})
        job = native.config.model_copy(update={"checkpoint": alone})
        started, _ = start_from(open_foreign(str(dcp), job), native, ("optimizer",))
    assert progress.step == 2
    for state in (result, started):
        jax.tree.map(np.testing.assert_array_equal, state.variables, expected.variables)


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_safetensors_store_untrained_state_in_float32(run, tmp_path, dtype):
    run, config = run
    of_weights = [f"--dtype={dtype}"] if dtype else []
    hf = export(run, tmp_path / "hf", "--to=hf", "--dialect=hf-gauged", *of_weights)
    result = open_directory(Directory(hf))
    assert result["layers.1.router.bias"].dtype == np.float32
    assert result["model.norm.weight"].dtype.name == (dtype or "float32")
    about = json.loads((hf / "config.json").read_text())
    assert (about["model_type"], about["dtype"]) == ("gauged", dtype or "float32")
    again = convert_to_run(hf, tmp_path / "again", config)
    assert_same(state_of(again), state_of(run))
    if dtype is None:
        assert cli(["verify", str(run), str(hf)]) == 0


def test_unnamed_state_raises(run, tmp_path):
    run, _ = run
    with pytest.raises(UserError, match=r"(gauge|drift) has no counterpart in kempner"):
        cli(["convert", str(run), str(tmp_path / "dcp"), "--to=dcp"])
    with pytest.raises(UserError, match=r"can be exported to hf as hf-gauged, not hf-llama"):
        cli(["convert", str(run), str(tmp_path / "hf"), "--to=hf", "--dialect=hf-llama"])
    assert not (tmp_path / "dcp").exists()


@pytest.fixture
def without(tmp_path):
    """Return a DCP of the same weights and optimizer, saved by PyTorch, and the config."""
    trained(tmp_path / "plain")
    config = tmp_path / "config.toml"
    config.write_text(tiny_config(**SECTIONS).to_toml())
    return export(tmp_path / "plain", tmp_path / "dcp", "--to=dcp"), config


def test_resume_without_untrained_state_raises(without, tmp_path):
    dcp, config = without
    message = r"state is missing \(.*drift.*cannot resume without it; --weights-only starts a run"
    with pytest.raises(UserError, match=message):
        cli(["convert", "--to=jaxforge", str(dcp), str(tmp_path / "run"), f"--config={config}"])
    with pytest.raises(UserError, match=message):
        open_foreign(str(dcp), load_config(config))


def test_weights_only_import_uses_initial_state(without, tmp_path, capsys):
    dcp, path = without
    run = convert_to_run(dcp, tmp_path / "run", path, "--weights-only")
    said = "non-trainable state is missing"
    assert said in capsys.readouterr().err
    assert not state_of(run)
    native = setup(load_config(path))
    result = Checkpoints(run, native.config.checkpoint, read_only=True)
    with jax.set_mesh(native.mesh):
        state, _ = start_from(Saved(result, 0), native)
    result.close()
    jax.tree.map(np.testing.assert_array_equal, state.model_state, native.model.initial_state())
    export(run, tmp_path / "again", "--to=dcp", "--weights-only", "--dialect=gauged")
    assert said in capsys.readouterr().err


def test_declaration_has_names_and_shapes():
    config = tiny_config(**SECTIONS)
    target = abstract_target(config)
    assert target.model_state == NAMES
    assert target.params == parameters(config.model)
    assert not any("drift" in name for of_field in target.moments.values() for name in of_field)


def arrays(**changed):
    target = abstract_target(tiny_config(**SECTIONS))
    shapes = {**target.params, **NAMES}
    named = {DCP.key_for(n): from_array(np.ones(s, np.float32)) for n, s in shapes.items()}
    named |= {name: from_array(array) for name, array in changed.items() if array is not None}
    gone = [name for name, array in changed.items() if array is None]
    named = {name: tensor for name, tensor in named.items() if name not in gone}
    by = Translation(DCP, target.config.model, False, "SRC")
    return translate_model(named, target, by, goes_on=False)


@pytest.mark.parametrize(
    ("key", "array", "message"),
    [
        (
            "layers.1.router.bias",
            np.ones(63, np.float32),
            r"layers.1.drift is \[63\], but \[64\]",
        ),
        ("layers.1.router.bias", None, "missing: layers.1.drift"),
        ("layers.2.router.bias", np.ones(64, np.float32), "left over: layers.2.router.bias"),
        ("gauge.buffer", np.ones(3, np.int64), "gauge is int64"),
    ],
)
def test_state_that_differs_from_declaration_raises(key, array, message):
    with pytest.raises(UserError, match=message):
        arrays(**{key: array})


def test_untrained_state_is_float32():
    params, state, notes = arrays(**{"gauge.buffer": np.full(3, 1 / 3)})
    assert state["gauge"].dtype == np.float32
    assert state.keys() == NAMES.keys()
    assert not params.keys() & state.keys()
    assert notes == ["gauge: float64, but non-trainable state is float32 here"]


@pytest.mark.parametrize(
    ("size", "message"),
    [(4, r"gauge is \[3\], but \[4\] in the model"), (None, "left over: gauge")],
)
def test_export_with_state_of_other_model_raises(run, tmp_path, monkeypatch, size, message):
    run, _ = run

    def declare(network, config, declare):
        aux_model.AuxNetwork.__init__(network, config, declare)
        if size:
            network.gauge = declare.untrained((size,), ("norm",), jax.nn.initializers.ones)

    monkeypatch.setattr(GaugedNetwork, "__init__", declare)
    with pytest.raises(UserError, match=message):
        cli(["convert", str(run), str(tmp_path / "dcp"), "--to=dcp", "--dialect=gauged"])


def test_inspect_and_verify_include_untrained_state(run, tmp_path, capsys):
    run, config = run
    capsys.readouterr()
    assert cli(["inspect", str(run), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["untrained"] == 2 * 64 + 3
    assert report["tensors"]["model_state.layers.1.drift"]["shape"] == [64]
    dcp = export(run, tmp_path / "dcp", "--to=dcp", "--dialect=gauged")
    assert cli(["verify", str(run), str(dcp)]) == 0
    native, other = setup(load_config(config)), tmp_path / "other"
    state = restored(native, run)
    changed = {**state.model_state, "gauge": jnp.full(3, 7.0)}
    saved(other, native, dataclasses.replace(state, model_state=changed), 2)
    for options in ([], ["--weights-only"]):
        capsys.readouterr()
        assert cli(["verify", str(other), str(dcp), "--json", *options]) == 1
        result = json.loads(capsys.readouterr().out)["differences"]
        assert [d["name"] for d in result] == ["model_state.gauge"]


def test_stages_have_state_of_their_layers():
    named = {name: from_array(np.ones(shape, np.float32)) for name, shape in NAMES.items()}
    parts = stages.split(CheckpointState({}, model_state=named), 2, 2)
    assert [set(part.model_state) for part in parts.values()] == [
        {"layers.0.drift"}, {"layers.1.drift", "gauge"},
    ]  # fmt: skip


def test_custom_model_matches_no_family():
    """A model with the parameters of Llama may compute something else."""
    register_model("same_parameters")(type("Same", (aux_model.Model,), {}))
    model = tiny_config(model={"model_type": "same_parameters"}).model
    with pytest.raises(UserError, match=r"hf-llama has no model.model_type = 'same_parameters'"):
        select_family(model)
    (note,) = incompatibilities(model)
    assert "KempnerForge has no model.model_type" in note


def test_registering_name_twice_raises():
    with pytest.raises(UserError, match="dialect 'gauged' is registered already"):
        name_maps.register_name_map(DCP)
    with pytest.raises(UserError, match="family 'gauged' is registered already"):
        name_maps.register_family(dataclasses.replace(HF, dialect=DCP))
    with pytest.raises(UserError, match="no dialect 'other'; there are kempnerforge, "):
        name_maps.name_map("other")


PLUGIN = """
    from jaxforge.model.transformer import register_model
    from tests.step import aux_model
    from tests.torch_compat.test_untrained import DCP, Gauged
    from torch_compat.checkpoint.name_maps import register_name_map

    aux_model.register()
    register_model("gauged")(Gauged)
    register_name_map(DCP)
"""


@pytest.mark.processes
def test_plugin_registers_model_and_names(run, tmp_path):
    run, config = run
    (tmp_path / "gauged_plugin.py").write_text(textwrap.dedent(PLUGIN))
    env = environment(1, PYTHONPATH=f"{ROOT}:{tmp_path}")
    compat = functools.partial(
        subprocess.run, cwd=ROOT, env=env, check=True, text=True, capture_output=True
    )
    tool = [sys.executable, "-m", "jaxforge"]
    # Equal to a run that was trained with the plugin.
    change_stored_config(run, "plugins", modules=["gauged_plugin"])
    dcp = tmp_path / "dcp"
    export = [*tool, "convert", str(run), str(dcp), "--to=dcp", "--dialect=gauged"]
    refused = subprocess.run(export, cwd=ROOT, env=env, text=True, capture_output=True, check=False)
    assert refused.returncode == 2
    assert "--trust-plugins" in refused.stderr
    compat([*export, "--trust-plugins"])
    modules = "--plugins.modules=gauged_plugin"
    compat(
        [
            *tool,
            "convert",
            "--to=jaxforge",
            str(dcp),
            str(tmp_path / "again"),
            f"--config={config}",
            modules,
        ]
    )
    compat([*tool, "verify", str(run), str(tmp_path / "again")])
