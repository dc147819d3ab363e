"""Exports for torchtitan, and imports of its checkpoints.

`make test-torchtitan` installs three versions without their GPU dependencies. The tests then use
torchtitan's own checkpoint manager, optimizer and schedule containers. Without it, a test makes the
same torch calls as version 0.2.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from tests.helpers import cli
from tests.processes.conftest import ROOT
from tests.torch_compat.runs import assert_same, trained, values
from torch_compat.checkpoint.name_maps import NAME_MAPS
from torch_compat.formats.dcp_reader import open_dcp
from torch_compat.formats.files import Directory
from torch_compat.formats.lazy import from_array
from torch_compat.names.translation import Translation, translate

torch = pytest.importorskip("torch")

VERSIONS = {"0.1.0": "torchtitan-2025", "0.2.2": "torchtitan-2025", "0.3.0": "torchtitan"}
LR = 3e-3  # tiny_config's


def shapes(dialect, layers=2, dim=64, kv=32, hidden=256, vocab=256):
    """Return the parameter shapes of torchtitan's Llama."""
    qkv, head = {
        "torchtitan": ("attention.qkv_linear", "lm_head"),
        "torchtitan-2025": ("attention", "output"),
    }[dialect]
    layer = {
        f"{qkv}.wq": [dim, dim], f"{qkv}.wk": [kv, dim], f"{qkv}.wv": [kv, dim],
        "attention.wo": [dim, dim], "feed_forward.w1": [hidden, dim],
        "feed_forward.w2": [dim, hidden], "feed_forward.w3": [hidden, dim],
        "attention_norm": [dim], "ffn_norm": [dim],
    }  # fmt: skip
    return {
        "tok_embeddings.weight": [vocab, dim],
        **{f"layers.{i}.{m}.weight": shape for i in range(layers) for m, shape in layer.items()},
        "norm.weight": [dim],
        f"{head}.weight": [vocab, dim],
    }  # fmt: skip


def titan(version, what, folder, tmp_path, *, excluded=("dataloader",)):
    """Run a torchtitan job; return its report, and its parameters and moments."""
    packages = ROOT / "build" / "torchtitan" / version
    if not packages.is_dir():
        pytest.skip("`make test-torchtitan` installs it")
    settings = {"shapes": shapes(VERSIONS[version]), "lr": LR, "excluded": list(excluded),
                "tokens": 3 * 8 * 32, "out": str(tmp_path / "out.pt")}  # fmt: skip
    (tmp_path / "job.json").write_text(json.dumps(settings))
    script = Path(__file__).with_name("titan_job.py")
    command = [sys.executable, "-W", "ignore", script, what, folder, tmp_path / "job.json"]
    path = os.pathsep.join([str(packages), str(ROOT)])
    ended = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout), torch.load(settings["out"])


def export(run, to, dialect):
    assert cli(["convert", str(run), str(to), "--to=dcp", f"--dialect={dialect}"]) == 0
    return to / "step-2"


def stored(checkpoint):
    """Return parameters and moments of an export by the names of the job."""
    tensors = open_dcp(Directory(checkpoint)).tensors
    named = {}
    for key, tensor in tensors.items():
        owner, _, field = key.removeprefix("optimizer.state.").rpartition(".")
        is_state = key.startswith("optimizer.state.")
        named[f"{field}.{owner}" if is_state else key] = tensor.all()
    return named


@pytest.mark.processes
@pytest.mark.parametrize("version", ["0.2.2", "0.3.0"])
def test_torchtitan_resumes_export(tmp_path, version):
    trained(tmp_path / "run")
    checkpoint = export(tmp_path / "run", tmp_path / "dcp", VERSIONS[version])
    report, state = titan(version, "load", tmp_path / "dcp", tmp_path)
    assert report == {
        "step": 2, "ntokens_seen": 512, "updates": 2, "lr": pytest.approx(LR * 2 / 4),
        "next": pytest.approx(LR / 4), "decay": pytest.approx(0.1),
    }  # fmt: skip
    assert_same(
        {name: tensor.detach().numpy() for name, tensor in state.items()}, stored(checkpoint)
    )


@pytest.mark.processes
@pytest.mark.parametrize("version", VERSIONS)
def test_torchtitan_checkpoint_round_trips(tmp_path, version):
    config = trained(tmp_path / "run")
    _, saved = titan(version, "save", tmp_path / "titan", tmp_path)
    arguments = [str(tmp_path / "titan"), str(tmp_path / "imported"), f"--config={config}"]
    assert cli(["convert", "--to=jaxforge", *arguments]) == 0
    cli(["convert", str(tmp_path / "imported"), str(tmp_path / "back"), "--to=dcp",
          f"--dialect={VERSIONS[version]}"])  # fmt: skip
    assert_same(
        {name: tensor.detach().numpy() for name, tensor in saved.items()},
        stored(tmp_path / "back" / "step-3"),
    )


@pytest.mark.parametrize("dialect", ["torchtitan-2025", "torchtitan"])
def test_torch_loads_torchtitan_export(tmp_path, dialect, capsys):
    """No key of the model, an optimizer of one group, a `LambdaLR` or the counters is missing."""
    trained(tmp_path / "run")
    checkpoint = export(tmp_path / "run", tmp_path / "dcp", dialect)
    assert "--checkpoint.exclude_from_loading dataloader" in capsys.readouterr().err
    from torch.distributed.checkpoint import load
    from torch.distributed.checkpoint import state_dict as sd

    model = torch.nn.Module()
    for name, shape in shapes(dialect).items():
        holder = model
        for part in name.split(".")[:-1]:
            if part not in holder._modules:
                holder.add_module(part, torch.nn.Module())
            holder = holder._modules[part]
        holder.register_parameter("weight", torch.nn.Parameter(torch.zeros(shape)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, foreach=False)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))
    flat = sd.StateDictOptions(flatten_optimizer_state_dict=True)
    state = {
        **sd.get_model_state_dict(model),
        "optimizer": sd.get_optimizer_state_dict(model, optimizer, options=flat),
        "lr_scheduler": schedule.state_dict(),
        "train_state": {"step": 0, "ntokens_seen": 0},
    }
    load(state, checkpoint_id=str(checkpoint), no_dist=True)
    if dialect == "torchtitan-2025":  # 0.3 has a code of its own, which takes the first one's
        sd.set_optimizer_state_dict(model, optimizer, state["optimizer"], options=flat)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(LR * 2 / 4)
    schedule.load_state_dict(state["lr_scheduler"])
    assert schedule.last_epoch == 2
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(LR / 4)
    assert state["train_state"] == {"step": 2, "ntokens_seen": 512}
    assert [type(value) for value in state["train_state"].values()] == [int, int]


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_complex_rotary_table_is_ignored(tmp_path, prefix, capsys):
    """torchtitan saved the table, which is computed from the config, until September 2025."""
    from torch.distributed.checkpoint import save

    config = trained(tmp_path / "run")
    checkpoint = export(tmp_path / "run", tmp_path / "dcp", "torchtitan-2025")
    theirs = {key: torch.tensor(t) for key, t in stored(checkpoint).items() if key in
              shapes("torchtitan-2025")}  # fmt: skip
    table = torch.polar(torch.ones(16, 8), torch.rand(16, 8))
    state = {prefix + key: tensor for key, tensor in {**theirs, "freqs_cis": table}.items()}
    save(state, checkpoint_id=str(tmp_path / "old"), no_dist=True)
    arguments = [str(tmp_path / "old"), str(tmp_path / "imported"), f"--config={config}"]
    assert cli(["convert", "--to=jaxforge", *arguments]) == 0
    before, after = values(tmp_path / "run"), values(tmp_path / "imported")
    for name in before:
        if name.startswith("params."):
            np.testing.assert_array_equal(after[name], before[name], err_msg=name)
    assert cli(["inspect", str(tmp_path / "old")]) == 0
    assert "complex64" in capsys.readouterr().out


def test_complex_weight_is_refused():
    config = ModelConfig(dim=8, n_layers=1, n_heads=2, vocab_size=11)
    by = Translation(NAME_MAPS["torchtitan-2025"], config, False, "SRC")
    tensor = from_array(np.ones(8, np.complex64))
    with pytest.raises(UserError, match=r"norm\.weight is complex64"):
        translate({"norm.weight": tensor}, {"norm.weight": (8,)}, by)
