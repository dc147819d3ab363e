"""Exports with one checkpoint per pipeline stage."""

import functools
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxforge.cli.running import run_main
from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from tests.helpers import cli
from tests.processes.conftest import ROOT, environment
from tests.torch_compat.runs import assert_same, values
from tests.torch_compat.stage_runs import MODEL, write_run
from tests.torch_compat.tensors import of_torch, opened
from torch_compat.checkpoint import orbax_store, stages
from torch_compat.checkpoint.name_maps import NAME_MAPS
from torch_compat.checkpoint.optimizer_state import LAYOUTS
from torch_compat.formats.dcp_reader import METADATA

LAYERS = {2: [(0, 1, 2), (3, 4)], 3: [(0, 1), (2, 3), (4,)]}
IN_A_LAYER = [
    "attention_norm.weight", *(f"attention.{m}_proj.weight" for m in "qkvo"), "mlp_norm.weight",
    *(f"mlp.{m}_proj.weight" for m in ("gate", "up", "down")),
]  # fmt: skip
FIRST, LAST = ["token_embedding.embedding.weight"], ["norm.weight", "output_head.proj.weight"]


@pytest.fixture(scope="module")
def run_of(tmp_path_factory):
    """Return a function from optimizer to a run."""
    return functools.cache(lambda name: write_run(tmp_path_factory.mktemp(name), name))


def export(run, directory, n, *options):
    cli(["convert", str(run), str(directory), "--to=dcp", f"--stages={n}", *options])
    return directory / "step_3"


def names_of(stage, n):
    layers = [f"layers.{i}.{name}" for i in LAYERS[n][stage] for name in IN_A_LAYER]
    return {*layers, *(FIRST if stage == 0 else []), *(LAST if stage == n - 1 else [])}


@pytest.mark.parametrize(
    ("optimizer", "layout", "n"),
    [
        ("adamw", "nested", 1), ("adamw", "flat", 2), ("muon", "nested", 3),
        ("schedule_free_adamw", "flat", 3),
    ],
)  # fmt: skip
def test_stages_round_trip_for_every_optimizer(run_of, tmp_path, optimizer, layout, n):
    run, config = run_of(optimizer), f"--config={run_of(optimizer) / 'config.toml'}"
    export(run, tmp_path / "dcp", n, f"--layout={layout}")
    assert cli(["verify", str(run), str(tmp_path / "dcp"), config]) == 0
    cli(["convert", "--to=jaxforge", str(tmp_path / "dcp"), str(tmp_path / "back"), config])
    assert_same(values(run), values(tmp_path / "back"))
    assert orbax_store.open_orbax(tmp_path / "back")[0].progress.tokens == 768


@pytest.mark.parametrize("n", LAYERS)
@pytest.mark.parametrize("layout", ["nested", "flat"])
def test_stage_holds_only_its_parameters(run_of, tmp_path, n, layout):
    step = export(run_of("adamw"), tmp_path, n, f"--layout={layout}")
    directories = [f"pp{i}" for i in range(n)]
    assert sorted(p.name for p in step.iterdir()) == [
        "metadata.json", *directories, "train_state.pt",
    ]  # fmt: skip
    assert (tmp_path / "latest").readlink() == Path("step_3")
    for i, directory in enumerate(directories):
        result, names = opened(step / directory), names_of(i, n)
        fields = ("step", "exp_avg", "exp_avg_sq")
        states = {f"optimizer.state.{name}.{field}" for name in names for field in fields}
        assert result.tensors.keys() == {f"model.{name}" for name in names} | states
        settings = {key.removeprefix("optimizer.param_groups.") for key in result.objects}
        if layout == "flat":
            assert {key.rpartition(".")[0] for key in settings} == names
            continue
        assert {key.partition(".")[0] for key in settings} == {"0", "1"}
        groups = [result.objects(f"optimizer.param_groups.{g}.params") for g in (0, 1)]
        norms = {name for name in names if "norm" in name}
        assert [set(group) for group in groups] == [names - norms, norms]
        assert [result.objects(f"optimizer.param_groups.{g}.weight_decay") for g in (0, 1)] == [
            0.1, 0.0,
        ]  # fmt: skip


def test_every_tensor_is_in_exactly_one_stage(run_of):
    checkpoint = orbax_store.open_orbax(run_of("muon"))[0]
    parts = stages.split(checkpoint, MODEL["n_layers"], 3).values()
    result = [name for part in parts for name, _ in part.tensors()]
    assert sorted(result) == sorted(name for name, _ in checkpoint.tensors())


def test_weights_only_stages_have_no_train_state(run_of, tmp_path):
    step = export(run_of("adamw"), tmp_path, 2, "--weights-only", "--dtype=bfloat16")
    assert sorted(p.name for p in step.iterdir()) == ["pp0", "pp1"]
    for i in (0, 1):
        result = opened(step / f"pp{i}")
        assert result.tensors.keys() == {f"model.{name}" for name in names_of(i, 2)}
        assert {tensor.dtype.name for tensor in result.tensors.values()} == {"bfloat16"}
        assert not result.objects


def test_inspect_ignores_stages(run_of, tmp_path, capsys):
    reports = []
    for n in (1, 3):
        export(run_of("adamw"), tmp_path / str(n), n, "--max-memory=50kB")
        capsys.readouterr()
        assert cli(["inspect", str(tmp_path / str(n)), "--json"]) == 0
        reports.append(json.loads(capsys.readouterr().out))
        assert reports[-1].pop("path").endswith(f"/{n}/step_3")
    assert reports[0] == reports[1]
    assert reports[1]["place"]["step"] == 3
    assert reports[1]["tensors"]["model.output_head.proj.weight"]["chunks"] > 1  # small blocks


def stage_of_torch(torch, stage, n):
    """Return KempnerForge's model and optimizer on one rank of a pipeline."""
    from tests.torch_compat.torch_job import Transformer

    model = Transformer(MODEL)
    layers = {str(i): model.layers[str(i)] for i in LAYERS[n][stage]}
    model.layers = torch.nn.ModuleDict(layers)
    if stage > 0:
        model.token_embedding = None
    if stage < n - 1:
        model.norm = model.output_head = None
    decayed = [p for p in model.parameters() if p.ndim > 1]
    undecayed = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 7.0}, {"params": undecayed, "weight_decay": 7.0}]
    optimizer = torch.optim.AdamW(groups, lr=7.0)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0)  # gives groups an `initial_lr`
    return model, optimizer


@pytest.mark.filterwarnings("ignore")  # torch's own, of loading in one process
@pytest.mark.parametrize("layout", ["nested", "flat"])
def test_torch_pipeline_rank_loads_its_stage(run_of, tmp_path, layout):
    torch = pytest.importorskip("torch")
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    by = pytest.importorskip("torch.distributed.checkpoint.state_dict")
    step, checkpoint = (
        export(run_of("adamw"), tmp_path, 3, f"--layout={layout}"),
        values(run_of("adamw")),
    )
    options = by.StateDictOptions(flatten_optimizer_state_dict=layout == "flat")
    for stage in range(3):
        model, optimizer = stage_of_torch(torch, stage, 3)
        state = {
            "model": by.get_model_state_dict(model),
            "optimizer": by.get_optimizer_state_dict(model, optimizer, options=options),
        }
        dcp.load(state, checkpoint_id=step / f"pp{stage}", no_dist=True)
        by.set_model_state_dict(model, state["model"])
        by.set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
        for name, parameter in model.named_parameters():
            moments = optimizer.state[parameter]
            np.testing.assert_array_equal(of_torch(parameter), checkpoint[f"params.{name}"])
            for native, theirs in LAYOUTS["adamw"].fields.items():
                np.testing.assert_array_equal(
                    of_torch(moments[theirs]), checkpoint[f"optimizer.{native}.{name}"]
                )
            assert moments["step"] == 3
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
        assert {group["initial_lr"] for group in optimizer.param_groups} == {3e-3}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("optimizer", ["muon", "schedule_free_adamw"])
def test_torch_loads_all_tensors_of_stage(run_of, tmp_path, optimizer):
    torch = pytest.importorskip("torch")
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    step, checkpoint = export(run_of(optimizer), tmp_path, 2), values(run_of(optimizer))
    native = {theirs: f"optimizer.{native}" for native, theirs in LAYOUTS[optimizer].fields.items()}
    loaded = 0
    for stage in (0, 1):
        described = dcp.FileSystemReader(step / f"pp{stage}").read_metadata().state_dict_metadata
        state = {
            key: torch.empty(entry.size, dtype=entry.properties.dtype)
            for key, entry in described.items()
            if hasattr(entry, "size")
        }
        dcp.load(state, checkpoint_id=step / f"pp{stage}", no_dist=True)
        for key, tensor in state.items():
            if key.startswith("model."):
                expected = checkpoint[f"params.{key.removeprefix('model.')}"]
            else:
                name, _, field = key.removeprefix("optimizer.state.").rpartition(".")
                expected = checkpoint[f"{native[field]}.{name}"]
            np.testing.assert_array_equal(of_torch(tensor), expected, err_msg=key)
        loaded += len(state)
    assert loaded == len(checkpoint.keys() - {"updates", "weight_sum"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--stages=6"], r"--stages 6: .* model.n_layers = 5: give a number from 1 to 5"),
        (["--stages=2", "--dialect=torchtitan"], r"torchtitan has no checkpoints per pipeline"),
        (["--stages=2", "--dialect=kempnerforge-packed"], r"packed has no checkpoints per"),
        (["--stages=2", "--to=hf"], r"--stages only applies to --to dcp"),
    ],
)  # fmt: skip
def test_unsupported_stage_options_are_refused(run_of, tmp_path, options, message, capsys):
    arguments = ["convert", str(run_of("adamw")), str(tmp_path / "dcp"), "--to=dcp", *options]
    assert run_main(lambda: cli(arguments)) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: ")
    assert re.search(message, shown), shown
    assert not (tmp_path / "dcp").exists()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tie_embeddings", True, "model.tie_embeddings = true with distributed.pp > 1"),
        ("num_experts", 4, "model.num_experts > 0 with distributed.pp > 1"),
    ],
)
def test_unsupported_models_with_stages_are_refused(key, value, message):
    model = ModelConfig.model_validate({**MODEL, key: value})
    with pytest.raises(UserError, match=f"{message}: leave --stages out"):
        stages.check(2, NAME_MAPS["kempnerforge"], model)
    stages.check(1, NAME_MAPS["kempnerforge"], model)


_KILLED = """
import os, signal, sys
from torch_compat.formats import dcp_writer
from tests.helpers import cli

write = dcp_writer.write_metadata

def write_one_and_die(*args):
    write(*args)
    os.kill(os.getpid(), signal.SIGKILL)

dcp_writer.write_metadata = write_one_and_die
cli(sys.argv[1:])
"""


@pytest.mark.processes
def test_export_killed_between_stages_resumes(run_of, tmp_path):
    arguments = ["convert", str(run_of("adamw")), str(tmp_path), "--to=dcp", "--stages=3"]
    done = subprocess.run(
        [sys.executable, "-c", _KILLED, *arguments],
        cwd=ROOT, env=environment(), stderr=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL
    assert sorted(p.name for p in tmp_path.iterdir()) == [".step_3.lock", ".step_3.partial"]
    partial = tmp_path / ".step_3.partial"
    assert [p.parent.name for p in partial.rglob(METADATA)] == ["pp0"]
    files = sorted(partial.rglob("*.distcp"))
    assert [f"{p.parent.name}/{p.name}" for p in files] == [f"pp{i}/__0_0.distcp" for i in range(3)]
    before = [p.stat().st_mtime_ns for p in files]
    assert cli(arguments) == 0
    paths = sorted((tmp_path / "step_3").rglob("*.distcp"))
    assert [p.stat().st_mtime_ns for p in paths] == before  # not written again
    assert cli(["verify", str(run_of("adamw")), str(tmp_path)]) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_3"]


def test_import_of_replaced_stages_starts_anew(run_of, tmp_path, monkeypatch):
    """A stopped import resumes only with the same source."""
    config = f"--config={run_of('adamw') / 'config.toml'}"
    arguments = ["convert", "--to=jaxforge", str(tmp_path / "dcp"), str(tmp_path / "run"), config]
    step = export(write_run(tmp_path / "other", seed=1), tmp_path / "dcp", 3)
    with monkeypatch.context() as patched:
        patched.setattr(orbax_store.StagedImport, "commit", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            cli(arguments)
    step.rename(tmp_path / "away")
    export(run_of("adamw"), tmp_path / "dcp", 2)
    cli(arguments)
    assert_same(values(run_of("adamw")), values(tmp_path / "run"))
