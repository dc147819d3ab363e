"""Exports resumed by Megatron-Core itself, and imports of checkpoints that it saves.

`make test-megatron` installs it where these tests find it, without packages that only GPUs need.
Its GPT model, optimizer and `dist_checkpointing` then run on CPUs, with gloo (`megatron_job.py`).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.helpers import cli
from tests.processes.conftest import ROOT
from tests.torch_compat.megatron_golden import GOLDEN, imported
from tests.torch_compat.runs import values
from torch_compat.formats.dcp_reader import open_dcp
from torch_compat.formats.files import Directory

pytestmark = pytest.mark.processes

PACKAGES = ROOT / "build" / "megatron" / "0.16.1"
QKV_BIAS = {"model": {"add_qkv_bias": True}}
DENSE = {**QKV_BIAS, "optimizer": "fully_reshardable", "more": 2}
EXPERTS = {
    "tied": True, "te_names": True, "model": {
        "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 12,
        "qk_layernorm": True, "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "allgather", "kv_channels": 8,
    },
}  # fmt: skip


def run_job(folder, ranks=1, **settings):
    """Run a job of Megatron-Core, and return its losses and logits."""
    if not PACKAGES.is_dir():
        pytest.skip("`make test-megatron` installs it")
    folder.mkdir(exist_ok=True)
    job = folder / "job.json"
    job.write_text(json.dumps({**settings, "out": str(folder / "out.npz")}))
    script = Path(__file__).with_name("megatron_job.py")
    variables = {**os.environ, "PYTHONPATH": str(PACKAGES), "WORLD_SIZE": str(ranks)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", script, job],
            env={**variables, "RANK": str(rank)},
            stderr=subprocess.PIPE, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    errors = [process.communicate()[1] for process in processes]
    assert not any(process.returncode for process in processes), errors[0][-3000:]
    return np.load(folder / "out.npz") if (folder / "out.npz").exists() else None


@pytest.mark.parametrize("tp", [1, 2])
def test_megatron_resumes_an_export_with_the_same_losses(tp, tmp_path):
    """The golden job made two more updates after its save; its losses are stored."""
    imported("dense", tmp_path / "run")
    assert cli(["convert", str(tmp_path / "run"), str(tmp_path / "out"), "--to=megatron"]) == 0
    resumed = run_job(
        tmp_path / "job", tp, **DENSE, load=str(tmp_path / "out" / "iter_0000002"), tp=tp, seed=5
    )
    before = np.load(GOLDEN / "dense" / "logits.npz")
    np.testing.assert_allclose(resumed["losses"], before["losses"][2:], rtol=1e-6)
    np.testing.assert_allclose(resumed["logits"], before["logits"], atol=1e-6)


def test_megatron_loads_experts_of_an_export(tmp_path):
    imported("experts", tmp_path / "run")
    assert cli(["convert", str(tmp_path / "run"), str(tmp_path / "out"), "--to=megatron"]) == 0
    loaded = run_job(
        tmp_path / "job", 2, **EXPERTS, load=str(tmp_path / "out" / "iter_0000000"), ep=2, seed=5
    )
    before = np.load(GOLDEN / "experts" / "logits.npz")
    np.testing.assert_allclose(loaded["logits"], before["logits"], atol=1e-6)


def test_megatron_loads_modules_of_an_export(tmp_path):
    settings = {"model": {**EXPERTS["model"], "mtp_num_layers": 2}, "vocab": 29, "divisor": 1}
    before = run_job(tmp_path / "job", **settings, save=str(tmp_path / "iter_0000002"))
    command = ["convert", str(tmp_path / "iter_0000002"), str(tmp_path / "run"), "--to=jaxforge"]
    assert cli(command) == 0
    assert cli(["convert", str(tmp_path / "run"), str(tmp_path / "out"), "--to=megatron"]) == 0
    path = str(tmp_path / "out" / "iter_0000000")
    loaded = run_job(tmp_path / "again", **settings, te_names=True, load=path, seed=5)
    for name in ("logits", "logits_1", "logits_2"):
        np.testing.assert_allclose(loaded[name], before[name], atol=1e-6)


ODD = {"hidden_size": 24, "num_attention_heads": 6, "num_query_groups": 2, "kv_channels": 10,
       "ffn_hidden_size": 38}  # fmt: skip
GROUPED = {key: EXPERTS["model"][key] for key in EXPERTS["model"] if key.startswith(("moe", "num"))}


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (1, {"model": {**ODD, "ffn_hidden_size": 37}, "vocab": 29, "divisor": 7, "tied": True}),
        (2, {"model": ODD, "vocab": 29, "divisor": 16, "tp": 2}),
        (2, {"model": {"num_query_groups": 1}, "tp": 2}),
        (2, {"model": {"num_layers": 5, "num_layers_in_first_pipeline_stage": 2}, "pp": 2}),
        (2, {"model": {**GROUPED, "moe_shared_expert_intermediate_size": 24}, "ep": 2}),
        (2, {"model": {**GROUPED, "moe_shared_expert_intermediate_size": 24}, "tp": 2}),
    ],
    ids=["sizes", "tensor", "one key head", "unequal stages", "experts", "split experts"],
)
def test_odd_shape_becomes_a_hugging_face_model(ranks, settings, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    source = str(tmp_path / "iter_0000002")
    job = run_job(tmp_path / "job", ranks, **settings, save=source)
    assert cli(["convert", source, str(tmp_path / "hf"), "--to=hf"]) == 0
    assert cli(["verify", source, str(tmp_path / "hf")]) == 0
    network = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    if job is not None:  # logits of several stages are not collected
        logits = network(torch.tensor(job["tokens"][:, :-1])).logits.detach().numpy()
        np.testing.assert_allclose(logits, job["logits"], atol=1e-5)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("dense", {**DENSE, "more": 0, "tp": 2}),
        ("dense", {**QKV_BIAS, "pp": 2}),
        ("experts", {**EXPERTS, "ep": 2}),
    ],
    ids=["tensor", "pipeline", "expert"],
)
def test_checkpoint_is_the_same_of_every_parallel_size(name, settings, tmp_path):
    """Megatron-Core loads a checkpoint and saves it again in two processes."""
    paths = {"load": str(GOLDEN / name / "iter_0000002"), "save": str(tmp_path / "iter_0000002")}
    run_job(tmp_path / "job", 2, **settings, **paths)
    whole = [] if settings.get("optimizer") else ["--weights-only"]
    assert cli(["verify", paths["load"], paths["save"], *whole]) == 0


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [(2, {**QKV_BIAS, "tp": 2, "bf16": True}), (2, QKV_BIAS), (1, EXPERTS)],
    ids=["tensor", "data", "experts"],
)
def test_flat_buffers_hold_the_same_state_as_named_tensors(ranks, settings, tmp_path):
    """One job with two ways to save its optimizer state."""
    paths = []
    for kind in ("fully_reshardable", "dp_reshardable"):
        paths.append(str(tmp_path / kind / "iter_0000002"))
        run_job(tmp_path / f"job_{kind}", ranks, **settings, optimizer=kind, save=paths[-1])
    assert cli(["verify", *paths]) == 0


@pytest.mark.parametrize("optimizer", ["plain", "fully_reshardable"])
def test_import_continues_with_the_float32_weights_of_a_bfloat16_job(optimizer, tmp_path):
    path = tmp_path / "iter_0000002"
    run_job(tmp_path / "job", **QKV_BIAS, optimizer=optimizer, bf16=True, save=str(path))
    command = ["convert", "--to=jaxforge", str(path), str(tmp_path / "run")]
    assert cli(command) == 0
    assert cli(["verify", str(path), str(tmp_path / "run")]) == 0
    tensors = open_dcp(Directory(path)).tensors
    master = "fp32_param" if optimizer == "plain" else "param"
    expected = tensors[f"optimizer.state.{master}.decoder.layers.self_attention.linear_proj.weight"]
    native = values(tmp_path / "run")["params.layers.1.attention.o_proj.weight"]
    np.testing.assert_array_equal(native, expected.part(1).all())
    assert (
        native != tensors["decoder.layers.self_attention.linear_proj.weight"].part(1).all()
    ).any()
