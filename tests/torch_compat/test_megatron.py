"""Import and export of Megatron-Core checkpoints.

These tests do not need torch; `test_megatron_torch.py` does.
"""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxforge import inference
from jaxforge.config.model import ModelConfig
from jaxforge.config.reading.load import load_config
from jaxforge.errors import UserError
from jaxforge.model.transformer import FURTHER_TOKENS, Model
from jaxforge.step.mtp import with_further_tokens
from tests.helpers import cli, setup
from tests.torch_compat.gauged import restored
from tests.torch_compat.megatron_golden import (
    GOLDEN,
    RUN_CONFIG,
    assert_close,
    expected,
    imported,
    logits_of,
    raw,
    write_hybrid,
)
from tests.torch_compat.runs import assert_same, trained, values
from tests.torch_compat.stage_runs import write_run
from torch_compat.checkpoint import checkpoints, megatron_config, megatron_state, orbax_store
from torch_compat.checkpoint.network_settings import network_settings
from torch_compat.checkpoint.restore import open_foreign
from torch_compat.formats import safetensors, torch_zip
from torch_compat.formats.dcp_reader import open_dcp
from torch_compat.formats.files import Directory
from torch_compat.formats.pickles import Call, Global


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return imported("dense", tmp_path_factory.mktemp("megatron") / "run")


@pytest.fixture
def copied(tmp_path):
    def copy(name):
        return Path(shutil.copytree(GOLDEN / name, tmp_path / name))

    return copy


@pytest.mark.parametrize("name", ["dense", "experts"])
def test_import_has_the_logits_of_megatron(name, tmp_path):
    tokens, logits = expected(name)
    assert_close(logits_of(imported(name, tmp_path / "run"), tokens)[1], logits)


@pytest.fixture(scope="module")
def latent(tmp_path_factory):
    return imported("latent", tmp_path_factory.mktemp("latent") / "run")


def test_latent_attention_and_module_have_the_logits_of_megatron(latent):
    """A model like DeepSeek-V3 of other sizes, with a module that predicts the token after next."""
    tokens, logits = expected("latent")
    trained = inference.open_run(latent, devices=jax.devices()[:1])
    network = Model(trained.config.model)

    @jax.jit
    def both(params):
        hidden, _ = network.forward(params, {"input_ids": tokens})
        batch = with_further_tokens({"input_ids": tokens[None], "labels": tokens[None]},
                                    trained.config.model)  # fmt: skip
        batch = {"input_ids": tokens, FURTHER_TOKENS: batch[FURTHER_TOKENS][0]}
        ((further, _),) = network.predict_further(params, hidden, batch, None)
        return [network.logits(params, x) for x in (hidden, further)]

    with trained.in_use() as params:
        native, further = map(np.asarray, both(params))
    assert_close(native, logits)
    # The module of the last position embeds a token beyond the batch.
    theirs = np.load(GOLDEN / "latent" / "logits.npz")["logits_1"]
    assert_close(further[:, :-1], theirs[:, :-1])


def test_latent_attention_and_module_are_exported_to_hugging_face(latent, tmp_path, capsys):
    """An export without the run in between has the tensors of the source."""
    source = str(GOLDEN / "latent")
    assert cli(["convert", source, str(tmp_path / "hf"), "--to=hf"]) == 0
    assert cli(["verify", source, str(tmp_path / "hf")]) == 0
    assert "tensors: 71 are the same" in capsys.readouterr().out
    about = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (about["model_type"], about["num_nextn_predict_layers"]) == ("deepseek_v3", 1)
    assert cli(["verify", source, str(latent), "--weights-only"]) == 0
    assert cli(["convert", source, str(tmp_path / "none"), "--to=hf", "--model.mtp_depth=0"]) == 0
    assert "left out: decoder.layers.2." in capsys.readouterr().err
    assert cli(["verify", source, str(tmp_path / "none"), "--model.mtp_depth=0"]) == 0
    with pytest.raises(
        UserError, match=r"1 modules of multi-token prediction: set model\.mtp_depth"
    ):
        cli(["convert", source, str(tmp_path / "two"), "--to=hf", "--model.mtp_depth=2"])


def test_hybrid_model_is_converted_to_hugging_face(tmp_path):
    source = tmp_path / "iter_0000002"
    theirs = write_hybrid(source)
    assert cli(["convert", str(source), str(tmp_path / "hf"), "--to=hf"]) == 0
    assert cli(["verify", str(source), str(tmp_path / "hf")]) == 0
    written = safetensors.open_directory(Directory(tmp_path / "hf"))
    for layer in (0, 2):
        prefix, mixer = f"decoder.layers.{layer}.mixer.", f"backbone.layers.{layer}.mixer."
        for name, parts in (("in_proj.weight", ("z", "x", "B", "C", "dt")),
                            ("conv1d.weight", "xBC"), ("conv1d.bias", "xBC")):  # fmt: skip
            fused = np.concatenate([theirs[f"{prefix}{name}.{part}"] for part in parts])
            np.testing.assert_array_equal(written[mixer + name].all(), fused, name)
    gate = written["backbone.layers.4.mixer.gate.e_score_correction_bias"].all()
    np.testing.assert_array_equal(gate, theirs["decoder.layers.4.mlp.router.expert_bias"])
    for name in ("fc1_latent_proj.weight", "fc2_latent_proj.weight"):
        latent = written[f"backbone.layers.4.mixer.{name}"].all()
        np.testing.assert_array_equal(latent, theirs[f"decoder.layers.4.mlp.{name}"])
    about = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (about["model_type"], about["hybrid_override_pattern"]) == ("nemotron_h", "M-M*E")
    assert about["time_step_min"] == 0  # Megatron-Core does not limit time steps


def test_moments_are_assigned_to_their_parameters(dense):
    """Heads are split by reshaping: [groups, queries + key + value, channels, width]."""
    native, theirs = values(dense), raw("dense")
    for field, their_field in (("mu", "exp_avg"), ("nu", "exp_avg_sq")):
        layers = f"optimizer.state.{their_field}.decoder.layers"
        fused = theirs[f"{layers}.self_attention.linear_qkv.weight"].reshape(2, 2, 4, 4, 16)
        gate, up = np.split(theirs[f"{layers}.mlp.linear_fc1.weight"], 2, axis=1)
        for i in range(2):
            named = {
                "attention.q_proj": fused[i, :, :2].reshape(-1, 16),
                "attention.k_proj": fused[i, :, 2].reshape(-1, 16),
                "attention.v_proj": fused[i, :, 3].reshape(-1, 16),
                "mlp.gate_proj": gate[i],
                "mlp.up_proj": up[i],
                "mlp.down_proj": theirs[f"{layers}.mlp.linear_fc2.weight"][i],
            }
            for module, value in named.items():
                name = f"optimizer.{field}.layers.{i}.{module}.weight"
                np.testing.assert_array_equal(native[name], value, name)
                assert np.abs(value).max() > 0
    assert native["updates"] == 2


def test_import_continues_with_the_losses_of_megatron(dense):
    """The batch is Megatron-Core's, and the second loss shows the effect of the first update.

    `checkpoint.load_path` reads the same state as a resume from the imported run.
    """
    stored = np.load(GOLDEN / "dense" / "logits.npz")
    native = setup(
        load_config(
            dense / "config.toml", ["--train.mixed_precision=fp32", "--distributed.dp_shard=1"]
        )
    )
    batch = {"input_ids": stored["tokens"][None, :, :-1], "labels": stored["tokens"][None, :, 1:]}
    batch = {key: value.astype(np.int32) for key, value in batch.items()}
    with jax.set_mesh(native.mesh):
        like = native.abstract_state()
        loaded, _ = open_foreign(str(GOLDEN / "dense"), native.config).restore(like)
    for state in (restored(native, dense), loaded):
        _, metrics = native.run(state, [batch, batch])
        np.testing.assert_allclose(metrics["loss"], stored["losses"][2:], rtol=1e-5)


def test_import_continues_at_the_step_of_the_job(dense):
    checkpoint, config = orbax_store.open_orbax(dense)
    progress = checkpoint.progress
    assert (progress.step, progress.samples, progress.tokens) == (2, 4, 4 * 16)
    assert (config.train.seq_len, config.train.global_batch_size) == (16, 2)
    assert (config.optimizer.lr, config.optimizer.betas) == (1e-2, (0.9, 0.95))


def test_run_config_of_bridge_equals_the_arguments(copied):
    directory = copied("experts") / "iter_0000002"
    before = checkpoints.find(directory).config(None).model
    (directory / "run_config.yaml").write_text(RUN_CONFIG)
    config = checkpoints.find(directory).config(None)
    assert network_settings(config.model) == {**network_settings(before), "model.vocab_size": 28}
    assert (config.optimizer.lr, config.train.global_batch_size) == (3e-4, 8)


def test_rows_that_pad_the_vocabulary_are_removed(copied, tmp_path):
    directory = copied("experts") / "iter_0000002"
    (directory / "run_config.yaml").write_text(RUN_CONFIG)
    assert cli(["convert", "--to=jaxforge", str(directory), str(tmp_path / "run")]) == 0
    tokens, logits = expected("experts")
    model, native = logits_of(tmp_path / "run", tokens)
    assert model.vocab_size == 28
    assert_close(native, logits[..., :28])


def test_flattened_tensors_have_their_original_shape():
    """The model is float32, so that the optimizer's own copy of each weight has the same bits."""
    tensors = raw("flattened")
    copies = [key for key in tensors if key.startswith("optimizer.state.fp32_param.")]
    assert len(copies) == 9
    for key in copies:
        weight = tensors[key.removeprefix("optimizer.state.fp32_param.")]
        np.testing.assert_array_equal(tensors[key], weight, key)
    tensor = open_dcp(Directory(GOLDEN / "flattened" / "iter_0000002")).tensors[
        "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight"
    ]
    index = (slice(0, 1), slice(5, 31), slice(3, 4))  # across both shards of gate and up
    np.testing.assert_array_equal(tensor.read(index), tensor.all()[index])
    assert np.abs(tensor.all()).min(axis=2).max() > 0


def test_flattened_moments_are_imported(tmp_path):
    native, theirs = values(imported("flattened", tmp_path / "run")), raw("flattened")
    key = "optimizer.state.exp_avg_sq.decoder.layers.mlp.linear_fc1.weight"
    np.testing.assert_array_equal(native["optimizer.nu.layers.0.mlp.gate_proj.weight"],
                                  theirs[key][0, :24])  # fmt: skip


def test_tracker_names_the_checkpoint(copied, tmp_path):
    directory = copied("experts")
    shutil.copytree(
        directory / "iter_0000002", directory / "iter_0000010"
    )  # not yet in the tracker
    assert checkpoints.find(directory).directory.name == "iter_0000002"
    tracker = directory / "latest_checkpointed_iteration.txt"
    tracker.write_text("11")
    with pytest.raises(UserError, match="names iter_0000011, which does not exist"):
        checkpoints.find(directory)
    tracker.write_text("latest")
    with pytest.raises(UserError, match="'latest' is not an iteration"):
        checkpoints.find(directory)
    tracker.unlink()
    assert checkpoints.find(directory).directory.name == "iter_0000010"


def test_other_formats_of_megatron_raise(tmp_path):
    legacy = tmp_path / "legacy" / "iter_0000100"
    (legacy / "mp_rank_00").mkdir(parents=True)
    (legacy / "mp_rank_00" / "model_optim_rng.pt").write_bytes(b"")
    (legacy.parent / "latest_checkpointed_iteration.txt").write_text("100")
    zarr = tmp_path / "zarr" / "iter_0000100"
    zarr.mkdir(parents=True)
    (zarr / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    for directory, message in ((legacy.parent, "legacy format"), (zarr, "sharded_backend = zarr")):
        with pytest.raises(UserError, match=f"{message}.*--ckpt-format torch_dist"):
            checkpoints.find(directory)


def test_config_with_other_heads_raises(copied, tmp_path):
    """Four heads of two groups of 4 channels have the rows of two heads of one group of 8."""
    directory = copied("dense") / "iter_0000002"
    (directory / "common.pt").replace(directory / "kept.pt")
    model = {"dim": 16, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "ffn_hidden_dim": 24,
             "vocab_size": 32, "qkv_bias": True}  # fmt: skip
    lines = [f"{key} = {str(value).lower()}" for key, value in model.items()]
    (tmp_path / "other.toml").write_text("\n".join(["[model]", *lines]))
    (directory / "kept.pt").replace(directory / "common.pt")
    command = [
        "convert",
        "--to=jaxforge",
        str(directory),
        str(tmp_path / "run"),
        f"--config={tmp_path}/other.toml",
    ]
    with pytest.raises(UserError, match="n_heads is 2 and the weights were trained with 4"):
        cli([*command, "--train.seq_len=16"])


def test_common_pt_executes_nothing(copied, tmp_path):
    """Classes of the job are data; a call of a function is none."""
    directory = copied("experts") / "iter_0000002"
    harmful = Call(Global("os", "system"), (f"touch {tmp_path}/ran",))
    common = {"args": harmful, "iteration": 2}
    torch_zip.save(common, directory / "common.pt")
    with pytest.raises(UserError, match="give the run's config, --config FILE"):
        cli(["convert", "--to=jaxforge", str(directory), str(tmp_path / "run")])
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["dense", "experts"])
def test_export_has_every_key_of_megatron_with_the_same_bits(name, tmp_path):
    imported(name, tmp_path / "run")
    assert cli(["convert", str(tmp_path / "run"), str(tmp_path / "back"), "--to=megatron"]) == 0
    (tracker,) = (tmp_path / "back").glob("*.txt")
    back = tmp_path / "back" / f"iter_{int(tracker.read_text()):07d}"
    theirs, native = open_dcp(Directory(GOLDEN / name / "iter_0000002")), open_dcp(Directory(back))
    assert_same({key: tensor.all() for key, tensor in native.tensors.items()}, raw(name))
    assert theirs.objects.keys() <= native.objects.keys()
    assert all(native.objects(key) == [None] for key in theirs.objects)
    stored, written = (json.loads((each / "metadata.json").read_bytes()) for each in (
        GOLDEN / name / "iter_0000002", back))  # fmt: skip
    assert written == stored
    before, after = (checkpoints.find(each).config(None) for each in (GOLDEN / name, back))
    assert network_settings(after.model) == network_settings(before.model)
    for file in ("run_config.yaml", "train_state.pt"):
        (back / file).unlink()  # the arguments in common.pt alone say the same
    assert checkpoints.find(back).config(None).model_dump() == after.model_dump()


def test_export_has_the_modules_of_a_run(tmp_path):
    """Modules have no stacked layers, but stacked experts; the weight of their loss is kept."""
    experts = {"num_experts": 4, "moe_top_k": 2, "moe_expert_dim": 20}
    run = write_run(tmp_path / "run", model={**experts, "mtp_depth": 2, "feed_forward_pattern": []})
    assert cli(["convert", str(run), str(tmp_path / "out"), "--to=megatron"]) == 0
    written = tmp_path / "out" / "iter_0000003"
    keys = open_dcp(Directory(written)).tensors
    prefix = "mtp.layers.1."
    assert keys[f"{prefix}eh_proj.weight"].shape == (32, 64)
    assert keys[f"{prefix}transformer_layer.mlp.experts.experts.linear_fc2.weight"].shape == (
        4, 32, 20)  # fmt: skip
    assert f"{prefix}transformer_layer.pre_mlp_layernorm.weight" in keys
    assert not any(key.startswith("decoder.layers.5") for key in keys)
    assert cli(["verify", str(run), str(written)]) == 0
    config = checkpoints.find(written).config(None)
    assert config.train.mtp_loss_weight == load_config(run / "config.toml").train.mtp_loss_weight


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dtype=bfloat16"], "Remove it, or add --weights-only"),
        (["--dialect=hf-llama"], "--to megatron has its own names"),
    ],
)
def test_option_without_effect_for_megatron_raises(options, message, dense, tmp_path):
    with pytest.raises(UserError, match=message):
        cli(["convert", str(dense), str(tmp_path), "--to=megatron", *options])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "lion"}, 'optimizer.name = "lion": its state has no counterpart'),
        ({"lr_patterns": {"token_embedding": 0.1}}, "all parameters with one learning rate"),
    ],
    ids=["optimizer", "learning rates"],
)
def test_optimizer_without_counterpart_is_exported_as_weights_only(settings, message, tmp_path):
    trained(tmp_path / "run", optimizer=settings)
    command = ["convert", str(tmp_path / "run"), str(tmp_path / "out"), "--to=megatron"]
    with pytest.raises(UserError, match=f"{message}.*Convert with --weights-only"):
        cli(command)
    assert cli([*command, "--weights-only", "--dtype=bfloat16"]) == 0
    tensors = open_dcp(Directory(tmp_path / "out" / "iter_0000002")).tensors
    assert {tensor.dtype.name for tensor in tensors.values()} == {"bfloat16"}
    assert not any(key.startswith("optimizer") for key in tensors)


@pytest.mark.parametrize(
    ("dialect", "target", "required"),
    [("megatron", "dcp", "megatron"), ("megatron", "pt", "megatron"), ("mindspeed", "hf", "dcp")],
)
def test_dialect_in_another_format_raises(dialect, target, required, dense, tmp_path):
    command = [
        "convert",
        str(dense),
        f"{tmp_path}/out.pt",
        f"--to={target}",
        f"--dialect={dialect}",
    ]
    with pytest.raises(UserError, match=rf"has its own format\. Use --to {required}"):
        cli(command)


SETTINGS = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 64,
            "normalization": "RMSNorm", "position_embedding_type": "rope",
            "add_bias_linear": False}  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"multi_latent_attention": True}, "no counterpart of qk_layernorm = False"),
        ({"multi_latent_attention": True, "qk_layernorm": True, "rope_type": "x"}, "rope_type"),
        ({"is_hybrid_model": True}, "no counterpart of hybrid_override_pattern = None"),
        ({"hybrid_override_pattern": "M*G-"}, "no counterpart of hybrid_override_pattern"),
        ({"hybrid_override_pattern": "M*-"}, "hybrid_override_pattern has 3 letters"),
        ({"rotary_interleaved": True}, "no counterpart of rotary_interleaved"),
        ({"activation_func": "megatron.core.activations.quick_gelu"}, "activation_func"),
        ({"num_moe_experts": 8, "moe_layer_freq": [1, 0, 0, 1]}, "moe_layer_freq"),
        (
            {
                "num_moe_experts": 8,
                "moe_router_topk": 4,
                "moe_router_num_groups": 4,
                "moe_router_group_topk": 4,
            },
            "moe_router_group_topk",
        ),
        ({"softmax_type": "learnable"}, "softmax_type"),
        ({"_target_": "megatron.bridge.models.gemma.Gemma2ModelProvider"}, "gemma"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_layers": 10**8}, "exceed the limits"),
        ({"vocab_size": None}, "vocab_size or padded_vocab_size is missing"),
        ({"layernorm_epsilon": "1e-5"}, "layernorm_epsilon = '1e-5' is impossible"),
        ({"window_size": [7]}, "window_size"),
    ],
)
def test_unsupported_settings_raise(settings, message):
    with pytest.raises(UserError, match=message):
        megatron_config.model_table({**SETTINGS, **settings}, "run_config.yaml")


MODELS = {
    "llama": {"n_kv_heads": 2, "rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3"}},
    "qwen": {"qkv_bias": True, "tie_embeddings": True, "head_dim": 16, "qk_norm": True},
    "gelu": {"norm_type": "layernorm", "activation": "gelu_tanh", "mlp_bias": True, "o_bias": True,
             "qkv_bias": True, "position_embedding": "learned"},
    "squared relu": {"activation": "relu2", "mtp_depth": 2},
    "exact gelu": {"activation": "gelu", "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "windows": {"sliding_window": 8, "attention_pattern": ["sliding", "sliding", "full"],
                "rope_pattern": [True, False], "partial_rotary_factor": 0.5},
    "softmax": {"num_experts": 8, "moe_norm_topk": False,
                "feed_forward_pattern": ("dense", "experts")},
    "sigmoid": {"num_experts": 8, "moe_router": "sigmoid_topk", "moe_bias_update": "sign",
                "moe_first_dense_layers": 1, "moe_groups": 4, "moe_top_k_groups": 2,
                "moe_top_k": 4, "moe_shared_experts": 1, "moe_shared_expert_dim": 40,
                "moe_routed_scaling": 2.5, "moe_latent_dim": 24},
}  # fmt: skip


@pytest.mark.parametrize("keys", MODELS.values(), ids=list(MODELS))
def test_settings_restore_the_model(keys):
    model = ModelConfig(dim=64, n_layers=4, n_heads=4, vocab_size=64, **keys)
    settings = megatron_config.settings(model)
    again = ModelConfig(**megatron_config.model_table(settings, ""))
    assert network_settings(again) == network_settings(model)
    assert again.mtp_depth == model.mtp_depth


@pytest.mark.parametrize(
    "keys",
    [
        {"norm_placement": "post"},
        {"attention_sinks": True},
        {"final_logit_softcap": 9.0},
        {"mixer_pattern": ["latent_attention"]},
        {"mixer_pattern": ["mamba2"]},
        {"mixer_pattern": ["attention+mamba2"]},
    ],
)
def test_model_without_settings_raises(keys):
    model = ModelConfig(dim=64, n_layers=4, n_heads=4, vocab_size=64, **keys)
    with pytest.raises(UserError, match=f"has no .*{next(iter(keys))}"):
        megatron_config.settings(model)


def test_shared_lists_are_searched_once():
    """Forty lists that each hold the next one twice name 2^40 elements."""
    nested: list = [{"step": 3}]
    for _ in range(40):
        nested = [nested, nested]
    assert megatron_state._dicts(nested) == [{"step": 3}]
