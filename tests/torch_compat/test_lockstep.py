"""Comparison of models layer by layer: planted faults are located, and equal models match."""

import functools
import json

import numpy as np
import pytest

from jaxforge.config.reading.load import make_config
from jaxforge.errors import UserError
from tests.helpers import cli
from torch_compat.checkpoint import checkpoints
from torch_compat.checkpoint.dcp_state import ReadOptions
from torch_compat.lockstep.comparison import first_difference
from torch_compat.names.kempnerforge import KEMPNERFORGE

torch = pytest.importorskip("torch")
import torch.distributed.checkpoint as dcp  # noqa: E402

from tests.torch_compat import llama_torch  # noqa: E402
from tests.torch_compat.llama_torch import MODEL, Llama, adamw, loss_over_all  # noqa: E402
from torch_compat.lockstep import batches, command, jaxforge_model  # noqa: E402
from torch_compat.lockstep.torch_model import TorchSubject  # noqa: E402

PRECISIONS = {"float32": "fp32", "bfloat16": "bf16"}


def config(precision):
    sections = {
        "model": MODEL,
        "train": {"seq_len": 32, "mixed_precision": PRECISIONS[precision]},
        "optimizer": {"lr": llama_torch.LR, "betas": llama_torch.BETAS},
        "distributed": {"dp_shard": 1},
    }
    return make_config(sections)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Return a DCP checkpoint with its config."""
    result = tmp_path_factory.mktemp("lockstep")
    model = llama_torch.random_weights(Llama())
    dcp.save({"model": model.state_dict()}, checkpoint_id=result / "step_1", no_dist=True)
    (result / "run.toml").write_text(config("float32").to_toml())
    return result


@pytest.fixture(scope="module")
def reference(directory):
    """Return precision -> config, values of jaxforge, batch and checkpoint, computed once."""

    @functools.cache
    def of(precision):
        result, its = checkpoints.find(directory), config(precision)
        checkpoint = result.read(its, ReadOptions(weights_only=True))
        batch, _ = batches.batch(its, None, (2, 32))
        return its, jaxforge_model.compute(its, checkpoint, batch), batch, checkpoint

    return of


def report_of(reference, built, precision="float32"):
    its, values, batch, checkpoint = reference(precision)
    command.load_weights(built, checkpoint.params, KEMPNERFORGE, its)
    return command.compare_models(values, built, KEMPNERFORGE, its, batch)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_equal_models_have_no_difference(reference, precision):
    report = report_of(reference, TorchSubject(Llama(), adamw), precision)
    assert report.same, first_difference(report.rows)
    stages = [row.stage for row in report.rows]
    assert [stages.count(s) for s in ("forward", "loss", "updates")] == [15, 1, 26]
    assert stages.count("weights") == stages.count("gradients") == stages.count("second updates")
    assert not report.notes


FORWARD = {
    "norm eps": "layers.0.attention_norm",
    "heads": "layers.0.attention",
    "rope base": "layers.0.attention",
    "attention scale": "layers.0.attention",
    "q transposed": "layers.0.attention",
    "q bias": "layers.0.attention",
    "v bias": "layers.0.attention",
    "second rope base": "layers.1.attention",
    "embedding multiplier": "embed",
    "residual scale": "layers.0.after_attention",
    "gate and up": "layers.0.mlp",
    "final norm": "final_norm",
}


@pytest.mark.parametrize("fault", FORWARD)
def test_model_fault_is_located(reference, fault):
    result = first_difference(report_of(reference, TorchSubject(Llama(fault))).rows)
    assert (result.stage, result.name) == ("forward", FORWARD[fault])
    is_multiple = fault == "embedding multiplier"
    assert (result.note == "PyTorch's is 0.333333 times jaxforge's") == is_multiple


@pytest.mark.parametrize("fault", ["rope base", "heads", "embedding multiplier", "gate and up"])
def test_large_faults_are_detected_in_bfloat16(reference, fault):
    result = first_difference(report_of(reference, TorchSubject(Llama(fault)), "bfloat16").rows)
    assert result.name == FORWARD[fault]


def test_untied_head_is_reported(reference):
    result = first_difference(report_of(reference, TorchSubject(Llama("untied"), adamw)).rows)
    assert (result.stage, result.name) == ("gradients", "token_embedding.embedding.weight")


def test_different_loss_normalization_is_reported(reference):
    result = first_difference(
        report_of(reference, TorchSubject(Llama(), adamw, loss_over_all)).rows
    )
    assert result.stage == "loss"
    assert result.note == "PyTorch's is 0.75 times jaxforge's"


OPTIMIZERS = {
    "weight decay": ({"decay": 0.01}, "updates"),
    "eps": ({"eps": 1e-6}, "updates"),
    "learning rate": ({"lr": 1e-3, "decay": 0.1}, "updates"),
    "betas": ({"betas": (0.9, 0.999)}, "second updates"),
}


@pytest.mark.parametrize("setting", OPTIMIZERS)
def test_different_optimizer_setting_is_reported(reference, setting):
    settings, stage = OPTIMIZERS[setting]
    optimizer = functools.partial(adamw, **settings)
    result = first_difference(report_of(reference, TorchSubject(Llama(), optimizer)).rows)
    assert result.stage == stage


def lockstep(directory, factory, *options):
    return cli([
        "verify", str(directory), f"--torch=tests.torch_compat.llama_torch:{factory}",
        f"--config={directory}/run.toml", "--tokens=32", *options,
    ])  # fmt: skip


def test_command_reports_first_difference(directory, capsys):
    assert lockstep(directory, "build") == 0
    assert "nothing differs" in capsys.readouterr().out
    tokens = np.arange(64).reshape(2, 32)
    np.savez(directory / "batch.npz", input_ids=tokens, labels=np.roll(tokens, -1, 1))
    options = f"--batch={directory}/batch.npz", "--json"
    assert lockstep(directory, "build_with_other_base", *options) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["first"]["name"] == report["first"]["other"] == "layers.0.attention"


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("build_without_bias", "only in the checkpoint: layers.0.attention.q_proj.bias"),
        ("no_such", "has no function no_such"),
        ("build_with_a_fall", "failed: ZeroDivisionError"),
        ("rotated", "requires x, base: it may only require the config"),
    ],
)
def test_invalid_factory_raises(directory, factory, message):
    with pytest.raises(UserError, match=message):
        lockstep(directory, factory)


SHAPE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "max_position_embeddings": 64,
         "initializer_range": 0.1}  # fmt: skip
FAMILIES = {
    "Gemma2": {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 16, "bos_token_id": 1},
    "GPTNeoX": {"bos_token_id": 1, "eos_token_id": 2},
    "Bamba": {
        "num_key_value_heads": 2,
        "attn_layer_indices": [1],
        "mamba_n_heads": 8,
        "mamba_d_state": 8,
        "mamba_chunk_size": 8,
    },
}


@pytest.mark.parametrize(
    "family",
    ["Bamba", *(pytest.param(name, marks=pytest.mark.slow) for name in ("Gemma2", "GPTNeoX"))],
)
def test_transformers_modules_are_located_by_name(tmp_path, monkeypatch, family):
    """The families have post-norms, padding tokens, fused projections and renamed keys."""
    transformers = pytest.importorskip("transformers")
    its = getattr(transformers, f"{family}Config")(**SHAPE, **FAMILIES[family])
    kind = getattr(transformers, f"{family}ForCausalLM")
    kind(its).save_pretrained(tmp_path)
    monkeypatch.setattr(llama_torch, "build_transformers", lambda: kind(its), raising=False)
    spec = "tests.torch_compat.llama_torch:build_transformers"
    job = command.Job(spec, str(tmp_path), overrides=["--train.mixed_precision=fp32"])
    report = command.lockstep(job)
    assert report.same, first_difference(report.rows)
    assert len([row for row in report.rows if row.stage == "forward"]) >= 13
