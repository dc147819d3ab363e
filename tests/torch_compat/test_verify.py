"""Comparisons of `verify` beyond tensors, and omissions of `--weights-only`."""

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.helpers import cli
from tests.torch_compat.megatron_golden import GOLDEN, raw, write_torch_dist
from tests.torch_compat.stage_runs import write_run
from tests.torch_compat.subjects import write_safetensors
from torch_compat.checkpoint.train_state import TRAIN_STATE
from torch_compat.formats import safetensors, torch_zip
from torch_compat.formats.files import Directory
from torch_compat.formats.lazy import DTYPES


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def dcp(run, tmp_path_factory):
    directory = tmp_path_factory.mktemp("dcp")
    cli(["convert", str(run), str(directory), "--to=dcp"])
    return directory


def verify(capsys, a, b, *options):
    """Return the exit code, differences (name -> note), and notes."""
    capsys.readouterr()
    code = cli(["verify", str(a), str(b), "--json", *options])
    report = json.loads(capsys.readouterr().out)
    return code, {d["name"]: d["note"] for d in report["differences"]}, report["notes"]


def with_place(dcp, directory, change):
    """Return a copy with another `train_state.pt`."""
    shutil.copytree(dcp / "step_3", directory)
    file = Directory(directory).open(TRAIN_STATE)
    state = torch_zip.Archive(file, 0, file.size, "").object()
    change(state)
    state["rng"] = {}
    torch_zip.save(state, directory / TRAIN_STATE)
    return directory


def test_run_and_export_have_equal_facts(run, dcp, capsys):
    for item, other in ((run, dcp), (dcp, run), (dcp, dcp), (run, run)):
        assert verify(capsys, item, other)[:2] == (0, {})
    assert cli(["verify", str(run), str(dcp)]) == 0
    assert "place, schedule and optimizer: 9 are the same" in capsys.readouterr().out


POSITIONS = {
    "place.step": lambda state: state.update(step=4),
    "place.tokens": lambda state: state.update(tokens_seen=1536),
    "schedule.updates": lambda state: state["scheduler"].update(last_epoch=2),
}


@pytest.mark.parametrize("name", POSITIONS)
def test_different_progress_is_reported(run, dcp, tmp_path, capsys, name):
    other = with_place(dcp, tmp_path / "step_3", POSITIONS[name])
    for item in (run, dcp):
        code, result, _ = verify(capsys, item, other)
        assert code == 1
        assert name in result
        assert all(each.startswith(("place.", "schedule.")) for each in result)
    assert verify(capsys, run, other, "--weights-only")[:2] == (0, {})
    assert verify(capsys, dcp, other, "--weights-only")[:2] == (0, {})


@pytest.mark.parametrize(
    ("setting", "names"),
    [
        ("--optimizer.lr=1e-3", {"optimizer.lr", "optimizer.initial_lr"}),
        ("--optimizer.betas=[0.9, 0.99]", {"optimizer.betas"}),
        ("--optimizer.eps=1e-7", {"optimizer.eps"}),
        ("--optimizer.weight_decay=0.2", {"optimizer.weight_decay"}),
        ("--scheduler.warmup_steps=8", {"optimizer.lr"}),  # the only trace of the schedule in a DCP
    ],
)
def test_different_settings_are_reported(run, dcp, tmp_path, capsys, setting, names):
    cli(["convert", str(run), str(tmp_path), "--to=dcp", setting])
    for item in (run, dcp):
        code, result, _ = verify(capsys, item, tmp_path)
        assert (code, result.keys()) == (1, names)
        assert verify(capsys, item, tmp_path, "--weights-only")[:2] == (0, {})


def test_runs_are_compared_by_all_settings(run, dcp, tmp_path, capsys):
    settings = ["--scheduler.decay_steps=9", "--train.max_steps=50", "--model.rope_theta=5e5"]
    config = f"--config={run / 'config.toml'}"
    cli(["convert", "--to=jaxforge", str(dcp), str(tmp_path / "run"), config, *settings])
    code, result, _ = verify(capsys, run, tmp_path / "run")
    assert code == 1
    assert result == {
        "schedule.decay_steps": "None and 9",
        "schedule.max_steps": "20 and 50",
        "model.rope_theta": "10000.0 and 500000.0",
    }


def test_batches_are_compared_for_equal_ranks(run, dcp, tmp_path, capsys):
    cli(["convert", str(run), str(tmp_path), "--to=dcp", "--ranks=3"])
    code, result, notes = verify(capsys, dcp, tmp_path)
    assert (code, result) == (0, {})
    assert any("place.batches of 1 ranks, place.batches of 3 ranks" in note for note in notes)
    assert verify(capsys, run, tmp_path)[:2] == (0, {})


def test_weights_only_comparison_ignores_progress(run, dcp, tmp_path, capsys):
    cli(["convert", str(run), str(tmp_path / "hf"), "--to=hf"])
    config = f"--config={run / 'config.toml'}"
    cli(["convert", "--to=jaxforge", str(dcp), str(tmp_path / "run"), config, "--weights-only"])
    for other in (tmp_path / "hf", tmp_path / "run", dcp):
        assert verify(capsys, run, other, "--weights-only")[:2] == (0, {})
    code, result, notes = verify(capsys, run, tmp_path / "run")
    assert (code, result) == (0, {})
    assert notes == ["only one checkpoint has optimizer state, so that only weights were compared"]
    other = write_run(tmp_path / "other", seed=2)
    result = verify(capsys, run, other, "--weights-only")[1]
    assert {name.partition(".")[0] for name in result} == {"params"}


def test_changed_computation_is_noted(run, tmp_path, capsys):
    cli(["convert", str(run), str(tmp_path / "hf"), "--to=hf", "--model.rope_theta=5e5"])
    assert any("trained with 500000.0" in n for n in verify(capsys, run, tmp_path / "hf")[2])


def damaged(hf, change):
    """Change the tensors of a Hugging Face directory."""
    tensors = {n: t.all() for n, t in safetensors.open_directory(Directory(hf)).items()}
    change(tensors)
    write_safetensors(hf / "model.safetensors", tensors)


def break_export(tensors):
    """Plant one fault of each kind in an export of at least two layers."""
    first, last = "model.layers.0.", "model.layers.1."
    tensors[f"{last}mlp.up_proj.weight"] = 0 * tensors[f"{last}mlp.up_proj.weight"]
    tensors[f"{last}self_attn.q_proj.weight"] = tensors[f"{first}self_attn.q_proj.weight"]
    tensors[f"{last}input_layernorm.weight"] = 0 * tensors["model.norm.weight"] + 1
    tensors[f"{last}mlp.gate_proj.weight"] = tensors[f"{last}mlp.gate_proj.weight"].T
    tensors[f"{first}mlp.extra.weight"] = tensors["model.norm.weight"]
    del tensors[f"{last}mlp.down_proj.weight"]


@pytest.mark.parametrize("kind", ["run", "kempnerforge", "torchtitan", "megatron"])
def test_broken_export_is_reported_by_tensor(kind, run, dcp, tmp_path, capsys):
    source, config = {"run": run, "kempnerforge": dcp}.get(kind, tmp_path / kind), []
    if kind == "torchtitan":
        cli(["convert", str(run), str(source), "--to=dcp", "--dialect=torchtitan"])
    elif kind == "megatron":
        source = GOLDEN / "dense"
    if kind in ("kempnerforge", "torchtitan"):
        config = [f"--config={run / 'config.toml'}"]
    hf = tmp_path / "hf"
    assert cli(["convert", str(source), str(hf), "--to=hf", *config]) == 0
    assert verify(capsys, source, hf, *config)[:2] == (0, {})
    damaged(hf, break_export)
    code, result, notes = verify(capsys, source, hf, *config)
    width = {"megatron": "[24, 16] and [16, 24]"}.get(kind, "[40, 32] and [32, 40]")
    layer = "params.layers.1."
    assert (code, result) == (1, {
        f"{layer}mlp.up_proj.weight": "all zeros in B",
        f"{layer}attention.q_proj.weight": "B equals params.layers.0.attention.q_proj.weight of A",
        f"{layer}attention_norm.weight": "all values are 1 in B",
        f"{layer}mlp.gate_proj.weight": width,
        f"{layer}mlp.down_proj.weight": "only in A",
        "params.model.layers.0.mlp.extra.weight": "only in B",
    })  # fmt: skip
    assert any(note.startswith("B: all values are zero: layers.1.mlp.up_proj") for note in notes)


def test_copied_layer_is_found_after_rounding(run, tmp_path, capsys):
    hf = tmp_path / "hf"
    cli(["convert", str(run), str(hf), "--to=hf", "--dtype=bfloat16"])
    copied = [f"layers.{{}}.mlp.{m}_proj.weight" for m in ("gate", "up", "down")]

    def repeat_layer(tensors):
        for name in copied:
            tensors[f"model.{name.format(3)}"] = tensors[f"model.{name.format(2)}"]

    damaged(hf, repeat_layer)
    result = verify(capsys, run, hf)[1]
    for name in copied:
        note = f"B equals params.{name.format(2)} of B"
        assert result[f"params.{name.format(3)}"] == note


def test_bfloat16_job_equals_its_export(tmp_path, capsys):
    """A resume takes the optimizer's float32 weights, and an export the model's rounded ones."""
    rounded = {
        key: value if key.startswith("optimizer.") else value.astype(DTYPES["bfloat16"])
        for key, value in raw("dense").items()
    }
    source = write_torch_dist(rounded, tmp_path / "iter_0000002", "dense")
    assert cli(["convert", str(source), str(tmp_path / "hf"), "--to=hf"]) == 0
    assert verify(capsys, source, tmp_path / "hf")[:2] == (0, {})


def test_suspicious_source_is_noted_when_converted(run, tmp_path, capsys):
    hf = tmp_path / "hf"
    cli(["convert", str(run), str(hf), "--to=hf"])
    capsys.readouterr()
    assert cli(["convert", str(hf), str(tmp_path / "run"), "--to=jaxforge", "--dry-run"]) == 0
    assert "Check how they" not in capsys.readouterr().err

    def break_source(tensors):
        first, last = "model.layers.0.mlp.down_proj.weight", "model.layers.4.mlp.down_proj.weight"
        tensors[last] = tensors[first]
        tensors["lm_head.weight"] = 0 * tensors["lm_head.weight"]

    damaged(hf, break_source)
    assert cli(["convert", str(hf), str(tmp_path / "run"), "--to=jaxforge", "--dry-run"]) == 0
    shown = capsys.readouterr().err
    assert "all values are zero: output_head.proj.weight. Check how they" in shown
    copy = "layers.4.mlp.down_proj.weight of layers.0.mlp.down_proj.weight"
    assert f"exact copies of other matrices: {copy}. Check how they" in shown


@pytest.mark.slow
def test_page_shows_the_answer_to_a_broken_export(tmp_path, capsys):
    hf, source = tmp_path / "hf", str(GOLDEN / "latent")
    assert cli(["convert", source, str(hf), "--to=hf"]) == 0

    def plant_faults(tensors):
        layer = "model.layers.1."
        tensors[f"{layer}self_attn.o_proj.weight"] = 0 * tensors[f"{layer}self_attn.o_proj.weight"]
        experts = [f"{layer}mlp.experts.{j}.up_proj.weight" for j in (2, 3)]
        tensors[experts[1]] = tensors[experts[0]]
        tensors[f"{layer}mlp.extra.weight"] = tensors["model.norm.weight"]
        del tensors["model.layers.2.eh_proj.weight"]

    capsys.readouterr()
    assert cli(["verify", source, str(hf)]) == 0
    same = capsys.readouterr().out
    damaged(hf, plant_faults)
    assert cli(["verify", source, str(hf)]) == 1
    page = (Path(__file__).parents[2] / "docs" / "torch_compat.md").read_text()
    shown = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert [same.rstrip(), lines] == [shown[0].rstrip(), shown[1].splitlines()]
