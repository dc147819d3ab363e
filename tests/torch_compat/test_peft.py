"""LoRA adapters against PEFT and torch: updates, exports, imports and merged weights."""

import json
import shutil
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from jaxforge.checkpoint.manager import Checkpoints
from jaxforge.checkpoint.restore import starting_state
from jaxforge.config.fine_tuning import is_adapter
from jaxforge.errors import UserError
from jaxforge.model.dropout import Dropout, layer_keys
from jaxforge.optim.random_bits import draw_key, random_words
from jaxforge.training import launch
from jaxforge.training.foreign import open_foreign
from tests.helpers import random_batches, setup
from tests.torch_compat import huggingface
from torch_compat.checkpoint import checkpoints, inspection
from torch_compat.checkpoint.dcp_state import ReadOptions
from torch_compat.convert import conversion
from torch_compat.convert.source import Request
from torch_compat.convert.verify import verify

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

pytestmark = pytest.mark.usefixtures("one_device")

LORA = {"rank": 4, "alpha": 8.0}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A directory with a small Llama of transformers, `hf`."""
    path = tmp_path_factory.mktemp("peft")
    config = transformers.LlamaConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128, max_position_embeddings=64, intermediate_size=48, head_dim=8,
        initializer_range=0.1, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(path / "hf")
    return path


def config_of(path, name="run", **sections):
    model = checkpoints.find(path / "hf").required_config(None, ()).model
    checkpoint = {"dir": str(path / name), "load_path": str(path / "hf"), "interval": 10}
    return huggingface.config_of(
        model, lora={**LORA, **sections.pop("lora", {})},
        checkpoint={**checkpoint, **sections.pop("checkpoint", {})},
        optimizer={"lr": 0.01, "weight_decay": 0.1, **sections.pop("optimizer", {})},
        scheduler={"name": "none"},
        train={"mixed_precision": "fp32", "seq_len": 32, "batch_size": 4, "max_steps": 10,
               **sections.pop("train", {})},
        **sections,
    )  # fmt: skip


@pytest.fixture(scope="module")
def trained(base):
    """A run of ten updates, with its exports."""
    launch.fit(config_of(base, lora={"dropout": 0.05}, train={"ema_decay": 0.8}))
    for to in ("hf", "peft"):
        for name, weights in ((f"as_{to}", "raw"), (f"average_as_{to}", "ema")):
            options = ReadOptions(weights=weights)
            request = Request(checkpoints.find(base / "run"), base / name, to, options=options)
            huggingface.convert(request, base / name)
    return base


def theirs(directory, adapter=None):
    network = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return network if adapter is None else peft.PeftModel.from_pretrained(network, adapter)


def tokens():
    return np.random.default_rng(1).integers(0, 128, (2, 24))


def our_logits(run, weights="raw"):
    trained = huggingface.inference.open_run(run, ["--train.mixed_precision=fp32"], weights=weights)
    with trained.in_use() as params:
        return np.asarray(trained.model.logits(params, trained.model.hidden(params, tokens())))


@pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=pytest.mark.slow), 0.25])
def test_updates_equal_those_of_peft(base, dropout):
    """Ten updates of AdamW, of the same adapters on the same batches, with the same masks."""
    config = config_of(base, "none", lora={"dropout": dropout})
    native = setup(config)
    saved = Checkpoints(base / "none", config.checkpoint, read_only=True)
    state, _ = starting_state(native, saved, open_foreign)
    network = theirs(base / "hf")
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    network = peft.get_peft_model(
        network, peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, lora_dropout=dropout)
    )
    named = dict(network.named_parameters())
    with torch.no_grad():
        for name, value in flatten_dict(jax.device_get(state.params), sep=".").items():
            if is_adapter(name):
                for layer in range(2):
                    named[key_of(name, layer)].copy_(torch.from_numpy(np.array(value[layer])))
    trainable = [p for p in network.parameters() if p.requires_grad]
    assert len(trainable) == 2 * 2 * len(targets)
    o = config.optimizer
    optimizer = torch.optim.AdamW(
        trainable, lr=o.lr, betas=o.betas, eps=o.eps, weight_decay=o.weight_decay
    )
    batches = random_batches(config, 10)
    losses = []
    for step, batch in enumerate(batches):
        set_masks(network, config, step)
        inputs, labels = (torch.from_numpy(batch[k][0]) for k in ("input_ids", "labels"))
        loss = torch.nn.functional.cross_entropy(
            network(inputs).logits.flatten(0, 1), labels.flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainable, config.train.grad_clip_norm)
        optimizer.step()
        losses.append(loss.item())
    state, metrics = native.run(state, batches)
    np.testing.assert_allclose(metrics["loss"], losses, rtol=1e-5)
    for name, value in flatten_dict(jax.device_get(state.params), sep=".").items():
        if is_adapter(name):
            for layer in range(2):
                expected = named[key_of(name, layer)].detach().numpy()
                np.testing.assert_allclose(value[layer], expected, atol=1e-5, err_msg=name)


def set_masks(network, config, step):
    """Replace the dropout of PEFT's layers by the masks of a step."""
    shape = (1, config.train.batch_size, config.train.seq_len)
    keys = random_words(draw_key(config.train.seed, "lora.dropout", jnp.int32(step)), shape)[0]
    for name, module in network.named_modules():
        if not isinstance(module, peft.tuners.lora.Linear) or not config.lora.dropout:
            continue
        layer, part, projection = name.split(".")[-3:]
        part = {"self_attn": "attention"}.get(part, part)
        salt = zlib.crc32(f"layers.{part}.{projection}".encode())
        inputs = jnp.ones((*shape[1:], module.in_features))
        dropout = Dropout(config.lora.dropout, salt)
        mask = dropout.drop(inputs, layer_keys(keys, jnp.int32(int(layer))))
        factors = torch.from_numpy(np.array(mask)) / (1 - config.lora.dropout)
        module.lora_dropout["default"] = Masked(factors)


class Masked(torch.nn.Module):
    """Dropout with a given mask."""

    def __init__(self, factors):
        super().__init__()
        self.factors = factors

    def forward(self, x):
        return x * self.factors


def key_of(name, layer):
    _, part, module, matrix = name.split(".")
    part = {"attention": "self_attn"}.get(part, part)
    matrix = {"lora_a": "lora_A", "lora_b": "lora_B"}[matrix]
    return f"base_model.model.model.layers.{layer}.{part}.{module}.{matrix}.default.weight"


def test_peft_loads_the_export_with_equal_logits(trained):
    native = our_logits(trained / "run")
    network = theirs(trained / "hf", trained / "as_peft")
    np.testing.assert_allclose(native, huggingface.their_logits(network, tokens()), atol=1e-5)
    plain = huggingface.their_logits(theirs(trained / "hf"), tokens())
    assert np.abs(plain - native).max() > 0.01
    config = json.loads((trained / "as_peft" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(trained / "hf")
    assert config["lora_dropout"] == 0.05


def test_merged_export_has_equal_logits(trained):
    network = huggingface.open_theirs(trained / "as_hf")
    logits = huggingface.their_logits(network, tokens())
    np.testing.assert_allclose(our_logits(trained / "run"), logits, atol=1e-5)


def test_exports_of_average_have_its_logits(trained):
    native = our_logits(trained / "run", "ema")
    for network in (
        theirs(trained / "hf", trained / "average_as_peft"),
        huggingface.open_theirs(trained / "average_as_hf"),
    ):
        np.testing.assert_allclose(native, huggingface.their_logits(network, tokens()), atol=1e-5)
    assert np.abs(our_logits(trained / "run") - native).max() > 1e-3
    reference = checkpoints.find(trained / "run")
    for weights in ("raw", "ema"):
        options = ReadOptions(weights=weights)
        notes = " ".join(reference.read(reference.required_config(None, ()), options).notes)
        assert ("left out: the average of the adapters" in notes) == (weights == "raw")


def test_import_of_a_peft_adapter_is_the_merged_model(trained):
    notes = huggingface.load(trained / "as_peft", trained / "merged")
    assert any("is merged into" in note for note in notes)
    pair = (checkpoints.find(trained / name) for name in ("merged", "as_hf"))
    result = verify(*pair, None, (), ReadOptions(), 1 << 28)
    assert result.same, result.differences
    native, merged = (our_logits(trained / name) for name in ("run", "merged"))
    np.testing.assert_allclose(merged, native, atol=1e-5)
    report = inspection.inspect(checkpoints.find(trained / "as_peft"))
    assert (report["format"], report["scale"]) == ("peft", 2.0)


def test_exports_say_whether_adapters_are_merged(trained, tmp_path):
    for to, is_merged in (("hf", True), ("peft", False)):
        request = Request(checkpoints.find(trained / "run"), tmp_path / to, to)
        notes = " ".join(conversion.plan(request).notes)
        assert ("are merged into their base model" in notes) == is_merged
        assert "left out: the optimizer state of the adapters" in notes


def test_run_that_is_the_base_of_its_adapters_is_refused(trained):
    reference = checkpoints.find(trained / "run")
    config = reference.required_config(None, [f"--checkpoint.load_path={trained / 'run'}"])
    with pytest.raises(UserError, match=r"its base model .* holds adapters\. Merge them into"):
        reference.read(config, ReadOptions())


def test_training_goes_on_from_a_peft_adapter(trained):
    """The first loss is that of the adapter, so B was not initialized anew."""
    section = {"adapter": str(trained / "as_peft")}
    config = config_of(trained, "further", lora=section)
    saved = Checkpoints(trained / "further", config.checkpoint, read_only=True)
    started, _ = starting_state(setup(config), saved, open_foreign)
    params = huggingface.params_of(trained / "run")[1]
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(started.params), params)


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"rank": 8, "alpha": 16.0}, "does not fit .lora.: layers.attention.k_proj.lora_a is"),
        ({"alpha": 4.0}, "its outputs are multiplied by 2, and by 1 with .lora."),
        ({"targets": ["attention"]}, "layers.mlp.down_proj.lora_a is .* and absent in the config"),
    ],
)
def test_adapter_of_other_settings_is_refused(trained, lora, message):
    config = config_of(trained, "refused", lora={"adapter": str(trained / "as_peft"), **lora})
    saved = Checkpoints(trained / "refused", config.checkpoint, read_only=True)
    with pytest.raises(UserError, match=message):
        starting_state(setup(config), saved, open_foreign)


INITIAL = ["gaussian", "orthogonal", "eva", "mica", "pissa", "pissa_niter_2", "olora"]


@pytest.mark.parametrize("initial", INITIAL)
def test_adapter_with_initial_values_of_peft_has_its_logits_or_is_refused(base, tmp_path, initial):
    """PEFT subtracts some initial values from the base when it loads the adapter."""
    settings = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=["q_proj", "up_proj"], init_lora_weights=initial
    )
    network = peft.get_peft_model(theirs(base / "hf"), settings)
    for name, values in network.named_parameters():
        if "lora_" in name:
            values.data += 0.1
    network.save_pretrained(tmp_path)
    reference = checkpoints.find(tmp_path)
    if initial in INITIAL[4:]:
        with pytest.raises(UserError, match=f"init_lora_weights = '{initial}' changes the weights"):
            reference.required_config(None, ())
        return
    merged = reference.read(reference.required_config(None, ()), ReadOptions()).params
    expected = peft.PeftModel.from_pretrained(theirs(base / "hf"), tmp_path).merge_and_unload()
    for layer, tensor in (("mlp.up_proj", "mlp.up_proj"), ("attention.q_proj", "self_attn.q_proj")):
        weight = expected.get_parameter(f"model.layers.1.{tensor}.weight").detach().numpy()
        np.testing.assert_allclose(merged[f"layers.1.{layer}.weight"].all(), weight, atol=1e-6)


SIZES = {"vocab_size": 128, "initializer_range": 0.1}
GPT2 = {**SIZES, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
OTHERS = {
    **SIZES, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "intermediate_size": 48, "pad_token_id": 0,
}  # fmt: skip
FUSED = {  # config of transformers, and a fused and another module
    "gpt2": (lambda: transformers.GPT2Config(**GPT2), ["c_attn", "c_fc"]),
    "gpt_neox": (
        lambda: transformers.GPTNeoXConfig(**OTHERS), ["query_key_value", "dense_4h_to_h"],
    ),
    "phi3": (lambda: transformers.Phi3Config(**OTHERS), ["gate_up_proj", "o_proj"]),
}  # fmt: skip


@pytest.fixture
def fused(request, tmp_path):
    """A directory with a model of a family of `FUSED`, and the names of two modules."""
    config, modules = FUSED[request.param]
    torch.manual_seed(0)
    network = transformers.AutoModelForCausalLM.from_config(config())
    network.save_pretrained(tmp_path / "hf")
    return tmp_path, modules


FAMILIES = ["gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt_neox", "phi3"))]


@pytest.mark.slow
@pytest.mark.parametrize("fused", FAMILIES, indirect=True)
def test_peft_loads_the_export_of_a_family_with_fused_tensors(fused):
    path, _ = fused
    lora = {"targets": ["q_proj", "v_proj", "mlp"], "use_rslora": True}
    launch.fit(config_of(path, lora=lora, train={"max_steps": 2}, optimizer={"lr": 0.1}))
    request = Request(checkpoints.find(path / "run"), path / "as_peft", "peft")
    huggingface.convert(request, path / "as_peft")
    native = our_logits(path / "run")
    network = theirs(path / "hf", path / "as_peft")
    np.testing.assert_allclose(native, huggingface.their_logits(network, tokens()), atol=1e-5)
    plain = huggingface.their_logits(theirs(path / "hf"), tokens())
    assert np.abs(plain - native).max() > 0.01
    config = config_of(path, "further", lora={**lora, "adapter": str(path / "as_peft")})
    saved = Checkpoints(path / "further", config.checkpoint, read_only=True)
    started, _ = starting_state(setup(config), saved, open_foreign)
    params = huggingface.params_of(path / "run")[1]
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(started.params), params)


@pytest.mark.parametrize("fused", FAMILIES, indirect=True)
def test_adapter_that_peft_wrote_for_a_fused_tensor_is_imported(fused):
    path, modules = fused
    settings = peft.LoraConfig(
        r=3, lora_alpha=5, target_modules=modules, rank_pattern={modules[1]: 2},
        init_lora_weights=False, fan_in_fan_out=modules[0] == "c_attn",
    )  # fmt: skip
    network = peft.get_peft_model(theirs(path / "hf"), settings)
    network.save_pretrained(path / "adapter")
    huggingface.load(path / "adapter", path / "merged")
    expected = huggingface.their_logits(network, tokens())
    np.testing.assert_allclose(our_logits(path / "merged"), expected, rtol=1e-5, atol=1e-5)
    plain = huggingface.their_logits(theirs(path / "hf"), tokens())
    assert np.abs(plain - expected).max() > 0.01


def test_changed_base_is_refused_by_export(trained, tmp_path):
    shutil.copytree(trained / "hf", tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-2] ^= 1  # in the last value
    file.write_bytes(content)
    request = Request(
        checkpoints.find(trained / "run"), tmp_path / "out", "hf",
        overrides=[f"--checkpoint.load_path={tmp_path / 'hf'}"],
    )  # fmt: skip
    with pytest.raises(UserError, match="is not the model that the adapters were trained with"):
        huggingface.convert(request, tmp_path / "out")
