"""Megatron-Core checkpoints compared with transformers, and files that torch writes or opens."""

import argparse
import shutil

import pytest

from jaxforge.errors import UserError
from tests.helpers import cli
from tests.torch_compat.megatron_golden import (
    GOLDEN,
    RUN_CONFIG,
    assert_close,
    expected,
    imported,
    raw,
)
from tests.torch_compat.runs import assert_same, values
from tests.torch_compat.test_huggingface_models import open_theirs, their_logits
from torch_compat.checkpoint import megatron_files, orbax_store
from torch_compat.formats.files import Directory

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return imported("dense", tmp_path_factory.mktemp("megatron") / "run")


@pytest.mark.parametrize("name", ["dense", "experts"])
def test_export_to_transformers_has_the_logits_of_megatron(name, tmp_path):
    tokens, logits = expected(name)
    assert cli(["convert", str(GOLDEN / name), str(tmp_path / "hf"), "--to=hf"]) == 0
    assert_close(their_logits(open_theirs(tmp_path / "hf"), tokens), logits)


def arguments(name):
    """Return the arguments of a checkpoint whose values are plain."""
    stored = vars(megatron_files.read_common(Directory(GOLDEN / name / "iter_0000002"))["args"])
    plain = {k: v for k, v in stored.items() if isinstance(v, int | float | str | list | None)}
    return argparse.Namespace(**plain)


def fsdp_state(theirs):
    """Return the state dict of `fsdp_dtensor`, following `preprocess_fsdp_dtensor_state_dict`.

    A stand-in: Megatron-FSDP itself needs GPUs.
    """
    renamed = {"self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
               "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight"}  # fmt: skip

    def entries(prefix):
        for key, value in theirs.items():
            if not key.startswith(prefix) or (not prefix and key.startswith("optimizer.")):
                continue
            name, tensor = key.removeprefix(prefix), torch.tensor(value)
            if not name.startswith("decoder.layers."):
                yield f"module.{name}", tensor
                continue
            tail = name.removeprefix("decoder.layers.")
            for i, layer in enumerate(tensor):
                full = f"module.decoder.layers.{i}.{renamed.get(tail, tail)}"
                if full.endswith("mlp.linear_fc1.weight"):
                    yield from zip((f"{full}_w", f"{full}_v"), layer.chunk(2), strict=True)
                else:
                    yield full, layer

    moments = {field: dict(entries(f"optimizer.state.{field}.")) for field in
               ("exp_avg", "exp_avg_sq")}  # fmt: skip
    names = moments["exp_avg"]
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "step": 2}
    return {
        "model": dict(entries("")),
        "optimizer": {
            "state": {n: {field: of[n] for field, of in moments.items()} for n in names},
            "param_to_group_meta": {name: dict(settings) for name in names},
        },
        "args": arguments("dense"),
        "iteration": 2,
        "checkpoint_version": 3.0,
    }  # fmt: skip


def test_fsdp_dtensor_is_read_as_the_same_state(dense, tmp_path):
    path = tmp_path / "checkpoints" / "iter_0000002"
    torch.distributed.checkpoint.save(
        fsdp_state(raw("dense")), checkpoint_id=str(path), no_dist=True
    )
    (path.parent / "latest_checkpointed_iteration.txt").write_text("2")
    assert cli(["convert", "--to=jaxforge", str(path.parent), str(tmp_path / "run")]) == 0
    assert_same(values(tmp_path / "run"), values(dense))
    native, theirs = (orbax_store.open_orbax(run)[0].progress for run in (tmp_path / "run", dense))
    assert (native.step, native.samples) == (theirs.step, theirs.samples)


@pytest.mark.parametrize("is_fsdp", [False, True])
def test_state_of_another_optimizer_raises(is_fsdp, tmp_path):
    """Muon's state must not be mistaken for a missing optimizer state."""
    tensors = {
        key: torch.tensor(value)
        for key, value in raw("dense").items()
        if not key.startswith("optimizer.")
    }
    name = "decoder.layers.mlp.linear_fc2.weight"
    field = "momentum_buffer"
    key = f"module.{name}.{field}" if is_fsdp else f"{field}.{name}"
    tensors[f"optimizer.state.{key}"] = torch.zeros(tensors[name].shape)
    path = tmp_path / "iter_0000002"
    torch.distributed.checkpoint.save(tensors, checkpoint_id=str(path), no_dist=True)
    shutil.copy(GOLDEN / "dense" / "iter_0000002" / "common.pt", path)
    with pytest.raises(UserError, match=r"its optimizer state has momentum_buffer; that of"):
        cli(["convert", "--to=jaxforge", str(path), str(tmp_path / "run")])


@pytest.mark.parametrize("naming", ["grouped", "sequential", "singleton"])
def test_experts_have_the_same_values_however_they_are_named(naming, tmp_path):
    """Names of `handle_experts_in_state_dict`, and of `singleton_local_shards`."""
    before = raw("experts")
    tensors = {}
    for key, value in before.items():
        tail = key.removeprefix("decoder.layers.")
        expert = tail.removeprefix("mlp.experts.experts.").removesuffix(".weight")
        if tail == key:
            tensors[key] = torch.tensor(value)
            continue
        for i, layer in enumerate(torch.tensor(value)):
            prefix = f"decoder.layers.{i}."
            if f"mlp.experts.experts.{expert}.weight" != tail:
                tensors[prefix + tail] = layer
                continue
            for j, of_expert in enumerate(layer):
                name = {
                    "grouped": f"mlp.experts.{expert}.weight{j}",
                    "sequential": f"mlp.experts.local_experts.{j}.{expert}.weight",
                    "singleton": f"mlp.experts.experts.{j}.{expert}.weight",
                }[naming]
                parts = {name: of_expert}
                if expert == "linear_fc1" and naming != "sequential":
                    parts = dict(zip((f"{name}_w", f"{name}_v"), of_expert.chunk(2), strict=True))
                tensors |= {prefix + part: value for part, value in parts.items()}
    path = tmp_path / "iter_0000002"
    torch.distributed.checkpoint.save(tensors, checkpoint_id=str(path), no_dist=True)
    (path / "run_config.yaml").write_text(RUN_CONFIG.replace("vocab_size: 28", "vocab_size: 32"))
    assert cli(["convert", "--to=jaxforge", str(path), str(tmp_path / "run")]) == 0
    assert_same(values(tmp_path / "run"), values(imported("experts", tmp_path / "stacked")))


def test_exported_files_open_in_torch_with_weights_only(dense, tmp_path):
    assert cli(["convert", str(dense), str(tmp_path), "--to=megatron"]) == 0
    with torch.serialization.safe_globals([argparse.Namespace]):  # as Megatron-Core registers it
        common = torch.load(tmp_path / "iter_0000002" / "common.pt")
    matrices, vectors = common["optimizer"]["optimizer"]["param_groups"]
    assert (matrices["step"], matrices["wd_mult"], matrices["weight_decay"]) == (2, 1.0, 0.1)
    assert (vectors["step"], vectors["wd_mult"], vectors["weight_decay"]) == (2, 0.0, 0.0)
    assert common["opt_param_scheduler"]["num_steps"] == common["args"].consumed_train_samples == 4
    state = torch.load(tmp_path / "iter_0000002" / "train_state.pt")
    assert (state["step"].item(), state["consumed_train_samples"].item()) == (2, 4)
