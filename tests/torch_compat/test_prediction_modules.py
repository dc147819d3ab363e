"""Modules of multi-token prediction in Hugging Face and DCP checkpoints."""

import copy
import json

import jax
import numpy as np
import pytest

from jaxforge.checkpoint.manager import Checkpoints
from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from tests.conftest import tiny_config
from tests.helpers import setup, underway
from torch_compat.checkpoint import checkpoints
from torch_compat.convert.source import Request

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.numpy import load_file, save_file  # noqa: E402 (transformers needs it)

from tests.torch_compat.huggingface import (  # noqa: E402 (needs torch)
    assert_same_bits,
    config_json,
    config_of,
    convert,
    export,
    load,
    params_of,
    save_run,
    state_of,
    tensors_of,
)

SHAPE = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64,
    "pad_token_id": None, "eos_token_id": 0, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 20, "n_group": 2, "topk_group": 1, "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
          "v_head_dim": 6}  # fmt: skip
HY3 = {key: value for key, value in SHAPE.items() if "group" not in key and key[:2] != "n_"}
HY3 |= {"head_dim": 8, "num_experts": 4}
FAMILIES = {"glm4_moe": SHAPE, "hy_v3": HY3,
            **dict.fromkeys(("deepseek_v3", "glm4_moe_lite"), SHAPE | LATENT),
            "deepseek_v32": SHAPE | LATENT | {"index_n_heads": 16, "index_head_dim": 8,
                                              "index_topk": 6}}  # fmt: skip
OUTPUT_NORMS = ("shared_head.norm", "final_layernorm")
"""Names of the norm before the output head; the second one is Hy3's."""
OWN = {"enorm": (32,), "hnorm": (32,), "eh_proj": (32, 64)}


@pytest.fixture(
    scope="module",
    params=[
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("glm4_moe", "glm4_moe_lite", "hy_v3", "deepseek_v32")
        ),
        "deepseek_v3",
    ],
)
def published(request, tmp_path_factory):
    """Return a directory with two layers that predict further tokens, and its tensors."""
    own = {**OWN, OUTPUT_NORMS[request.param == "hy_v3"]: (32,)}
    path = tmp_path_factory.mktemp("further") / "hf"
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(request.param, **FAMILIES[request.param])
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    file, rng = path / "model.safetensors", np.random.default_rng(0)
    tensors = load_file(file)
    for layer in (2, 3):
        last = {key: x for key, x in tensors.items() if key.startswith("model.layers.1.")}
        shapes = {key.replace("layers.1", f"layers.{layer}"): x.shape for key, x in last.items()}
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in own.items()}
        tensors |= {key: rng.standard_normal(s).astype(np.float32) for key, s in shapes.items()}
        tensors |= {
            f"model.layers.{layer}.embed_tokens.weight": tensors["model.embed_tokens.weight"],
            f"model.layers.{layer}.shared_head.head.weight": tensors["lm_head.weight"],
        }
    save_file(tensors, file, {"format": "pt"})
    written = {**config_json(path), "num_nextn_predict_layers": 2}
    (path / "config.json").write_text(json.dumps(written))
    return path, tensors


def test_layers_for_further_tokens_are_read_and_written(published, tmp_path):
    path, tensors = published
    assert load(path, tmp_path / "run", "--model.mtp_depth=2") == ()
    model, params = params_of(tmp_path / "run")
    assert model.mtp_depth == 2
    module, theirs = params["mtp"]["1"], "model.layers.3"
    np.testing.assert_array_equal(
        module["input_proj"]["weight"], tensors[f"{theirs}.eh_proj.weight"]
    )
    keys = [f"{theirs}.{norm}.weight" for norm in OUTPUT_NORMS]
    (norm,) = (tensors[key] for key in keys if key in tensors)
    np.testing.assert_array_equal(module["output_norm"]["weight"], norm)
    experts = [tensors[f"{theirs}.mlp.experts.{j}.up_proj.weight"] for j in range(4)]
    np.testing.assert_array_equal(module["mlp"]["experts"]["up_proj"]["weight"], experts)
    written = export(tmp_path / "run", tmp_path / "back")
    assert_same_bits(tensors, tensors_of(written))
    assert config_json(written)["num_nextn_predict_layers"] == 2
    opened = transformers.AutoModelForCausalLM.from_pretrained(written)  # ignores these layers
    assert opened.config.num_hidden_layers == 2


def test_further_layers_beyond_the_depth_are_left_out(published, tmp_path):
    path, tensors = published
    (note,) = load(path, tmp_path / "run", "--model.mtp_depth=1")
    of_layer = [key for key in tensors if key.startswith("model.layers.3.")]
    assert note.startswith(f"left out: {len(of_layer)} tensors of layers from 3 on")
    written = export(tmp_path / "run", tmp_path / "back")
    assert tensors.keys() - tensors_of(written).keys() == set(of_layer)
    none = tmp_path / "none"
    convert(Request(checkpoints.find(tmp_path / "run"), none, "hf",
                    overrides=["--model.mtp_depth=0"]), none)  # fmt: skip
    assert config_json(none)["num_nextn_predict_layers"] == 0
    assert not any(key.startswith("model.layers.2.") for key in tensors_of(none))


def test_files_without_the_layers_are_refused(published, tmp_path):
    path, tensors = published
    with pytest.raises(UserError, match=r"mtp_depth = 3, but the files have 2 layers .* at most 2"):
        load(path, tmp_path / "run", "--model.mtp_depth=3")
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(config_json(path)))
    key = "model.layers.3.embed_tokens.weight"
    save_file({**tensors, key: tensors[key] + 1}, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=f"{key} differs from model.embed_tokens.weight"):
        load(other, tmp_path / "run", "--model.mtp_depth=2")


def test_8_bit_export_keeps_the_input_projection(published, tmp_path):
    path, _ = published
    load(path, tmp_path / "run", "--model.mtp_depth=1")
    written = tensors_of(export(tmp_path / "run", tmp_path / "fp8", dtype="fp8"))
    module_keys = {key for key in written if key.startswith("model.layers.2.")}
    scaled = {key.removesuffix("_scale_inv") for key in module_keys if key.endswith("_scale_inv")}
    assert "model.layers.2.mlp.experts.0.up_proj.weight" in scaled
    assert not scaled & {
        f"model.layers.2.{name}.weight" for name in (*OWN, *OUTPUT_NORMS, "embed_tokens")
    }


# Nemotron-H: a module is a layer of attention and a layer of experts.

NEMOTRON = {key: value for key, value in SHAPE.items() if key[:5] != "first"} | {
    "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 12, "chunk_size": 8,
    "head_dim": 8, "num_key_value_heads": 2, "moe_shared_expert_intermediate_size": 28,
    "moe_latent_size": 24, "routed_scaling_factor": 2.5, "time_step_min": 0.01,
    "num_nextn_predict_layers": 1,
}  # fmt: skip
UPDATES, LR, WEIGHT = 10, 1e-3, 0.3


class NemotronModule(torch.nn.Module):
    """Module of multi-token prediction whose layers are those of transformers."""

    def __init__(self, config):
        super().__init__()
        from transformers.models.nemotron_h import modeling_nemotron_h as nemotron

        of_module = copy.deepcopy(config)
        of_module.layers_block_type = ["full_attention", "moe"]
        of_module._attn_implementation = "eager"
        self.layers = torch.nn.ModuleList(nemotron.NemotronHBlock(of_module, i) for i in range(2))
        width, eps = config.hidden_size, config.layer_norm_epsilon
        first, last = self.layers
        first.enorm, first.hnorm, last.final_layernorm = (
            nemotron.NemotronHRMSNorm(width, eps=eps) for _ in range(3)
        )
        first.eh_proj = torch.nn.Linear(2 * width, width, bias=False)
        for parameter in self.parameters():
            torch.nn.init.uniform_(parameter, -0.3, 0.3)
        last.mixer.gate.e_score_correction_bias.uniform_(-0.4, 0.4)

    def forward(self, embedding, hidden):
        first, last = self.layers
        x = first.eh_proj(torch.cat([first.enorm(embedding), first.hnorm(hidden)], -1))
        length = x.shape[1]
        mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
        return last.final_layernorm(last(first(x, attention_mask=mask)))

    def tensors(self):
        """Return the tensors as in files, where each expert has its own."""
        for key, x in self.state_dict(prefix="mtp.").items():
            if ".experts." not in key:
                yield key, x.numpy()
                continue
            for j in range(len(x)):
                yield key.replace("experts.", f"experts.{j}.") + ".weight", x[j].numpy()


@pytest.fixture(scope="module")
def nemotron(tmp_path_factory):
    """Return a directory, its network and the network's module."""
    path = tmp_path_factory.mktemp("nemotron") / "hf"
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        "nemotron_h", hybrid_override_pattern="M*E", **NEMOTRON
    )
    network = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    module = NemotronModule(config)
    network.save_pretrained(path)
    tensors = load_file(path / "model.safetensors") | dict(module.tensors())
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path, network, module


def test_modules_of_nemotron_are_read_and_written(nemotron, tmp_path):
    path, _, _ = nemotron
    assert load(path, tmp_path / "run", "--model.mtp_depth=1") == ()
    written = export(tmp_path / "run", tmp_path / "back")
    assert_same_bits(tensors_of(path), tensors_of(written))
    expected = {**config_json(path), "dtype": "float32", "torch_dtype": "float32"}
    assert config_json(written) == expected
    (note,) = load(path, tmp_path / "without")
    assert note.endswith("they predict further tokens; model.mtp_depth takes them in")
    assert params_of(tmp_path / "without")[0].mtp_mixer == "attention"  # for a later depth


@pytest.mark.slow
def test_ten_updates_of_nemotron_with_a_module_match_torch(nemotron, tmp_path):
    path, network, module = nemotron
    load(path, tmp_path / "run", "--model.mtp_depth=1")
    model, params = params_of(tmp_path / "run")
    config = tiny_config(
        model={**model.model_dump(), "moe_aux_loss_weight": 0.0, "moe_bias_update_rate": 0.0},
        train={"batch_size": 2, "seq_len": 24, "mtp_loss_weight": WEIGHT, "grad_clip_norm": 1.0},
        optimizer={"lr": LR, "weight_decay": 0.0, "betas": (0.9, 0.95), "eps": 1e-6},
        scheduler={"name": "none"},
    )  # fmt: skip
    native = setup(config)
    tokens = np.random.default_rng(1).integers(0, 96, (UPDATES, 2, 25))
    batches = [{"input_ids": x[None, :, :-1], "labels": x[None, :, 1:]} for x in tokens]
    _, metrics = native.run(state_of(native, params), batches)
    parameters = [*network.parameters(), *module.parameters()]
    optimizer = torch.optim.AdamW(parameters, LR, (0.9, 0.95), 1e-6, weight_decay=0.0)
    losses, further, norms = [], [], []
    for text in torch.from_numpy(tokens):
        hidden = network.model(text[:, :-1]).last_hidden_state
        # The token after the next one, from the token after this one: the last has no label.
        embedding = network.model.embeddings(text[:, 1:])
        predicted = module(embedding, hidden)[:, :-1]
        loss, of_module = (
            torch.nn.functional.cross_entropy(network.lm_head(x).flatten(0, 1), y.flatten())
            for x, y in ((hidden, text[:, 1:]), (predicted, text[:, 2:]))
        )
        optimizer.zero_grad()
        (loss + WEIGHT * of_module).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, 1.0)))
        optimizer.step()
        losses.append(float(loss.detach()) + WEIGHT * float(of_module.detach()))
        further.append(float(of_module.detach()))
    np.testing.assert_allclose(metrics["loss"], losses, rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], norms, rtol=1e-5)
    np.testing.assert_allclose(metrics["side"]["mtp_loss"][:, 0], further, rtol=1e-5)


DENSE = {"dim": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 96, "ffn_hidden_dim": 48}


@pytest.fixture(scope="module")
def dense_run(tmp_path_factory):
    """Return a run of a dense model with two modules, whose moments are random."""
    config = config_of(ModelConfig(**DENSE, mtp_depth=2, norm_eps=1e-5))
    state = underway(setup(config), 3)
    return save_run(tmp_path_factory.mktemp("dense") / "run", config, state=state)


@pytest.fixture(scope="module")
def dense_dcp(dense_run, tmp_path_factory):
    """Return its export to DCP, and the notes of the export."""
    dcp = tmp_path_factory.mktemp("dense") / "dcp"
    return dcp, convert(Request(checkpoints.find(dense_run), dcp, "dcp"), dcp / "step_3").notes


def test_dcp_keeps_modules_and_moments(dense_run, dense_dcp, tmp_path):
    dcp, notes = dense_dcp
    assert any("KempnerForge has no model.mtp_depth" in note for note in notes)
    again, config = tmp_path / "again", tmp_path / "config.toml"
    config.write_text((dense_run / "config.toml").read_text())
    request = Request(checkpoints.find(dcp), again, "jaxforge", config=config)
    convert(request, again / "checkpoints" / "step_3")
    native = setup(config_of(ModelConfig(**DENSE, mtp_depth=2, norm_eps=1e-5)))
    before, after = (
        Checkpoints(run, native.config.checkpoint, read_only=True).restore(
            native.abstract_state(), 3
        )
        for run in (dense_run, again)
    )
    states = jax.device_get((before[0], after[0]))
    moments = states[1].opt_state
    in_module = [
        leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(moments)
        if "mtp" in jax.tree_util.keystr(path)
    ]
    assert len(in_module) > 4  # several of each module
    assert all(np.any(leaf) for leaf in in_module)
    for first, other in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_array_equal(first, other)


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_another_depth_is_refused_with_the_stored_one(dense_run, dense_dcp, tmp_path, depth):
    config = tmp_path / "config.toml"
    config.write_text((dense_run / "config.toml").read_text())
    request = Request(checkpoints.find(dense_dcp[0]), tmp_path / "run", "jaxforge", config=config,
                      overrides=[f"--model.mtp_depth={depth}"])  # fmt: skip
    message = (
        rf"model\.mtp_depth = {depth}, but the checkpoint has 2 modules of multi-token prediction: "
        r"set model\.mtp_depth = 2$"
    )
    with pytest.raises(UserError, match=message):
        convert(request, tmp_path / "run" / "checkpoints" / "step_3")


def test_other_formats_leave_modules_out(dense_run, tmp_path):
    """Llama's files have no such layers, and Megatron's are not written."""
    request = Request(checkpoints.find(dense_run), tmp_path / "hf", "hf")
    plan = convert(request, tmp_path / "hf")
    assert plan.notes == (
        "left out: 2 modules of multi-token prediction, which only training uses",
    )
    assert config_json(tmp_path / "hf")["model_type"] == "llama"
    assert not any("layers.2" in key for key in tensors_of(tmp_path / "hf"))
    titan = Request(checkpoints.find(dense_run), tmp_path / "dcp", "dcp", dialect="torchtitan")
    with pytest.raises(UserError, match=r"has no modules of multi-token prediction\. Export with"):
        convert(titan, tmp_path / "dcp")
