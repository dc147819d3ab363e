"""Import and export of Hugging Face directories, compared with `transformers`."""

import itertools
import json
import os
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

from jaxforge.checkpoint.manager import Checkpoints
from jaxforge.checkpoint.restore import starting_state
from jaxforge.commands import generate, train
from jaxforge.config.model import ModelConfig, RopeScaling
from jaxforge.data.corpus.tokenizer import END_OF_TEXT
from jaxforge.data.corpus.tokenizer_files import load_tokenizer
from jaxforge.errors import UserError
from jaxforge.inference.evaluation import evaluate
from jaxforge.inference.run import Run
from jaxforge.model.transformer import Model
from jaxforge.runs import run_directory
from jaxforge.training import launch
from jaxforge.training.callbacks.callback import Callback
from tests.helpers import setup
from torch_compat.checkpoint import checkpoints, hf_config, hf_state, restore
from torch_compat.checkpoint.dcp_state import ReadOptions
from torch_compat.checkpoint.restore import open_foreign
from torch_compat.convert import conversion
from torch_compat.convert.source import Request
from torch_compat.formats.files import Directory

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.machine import PATIENCE  # noqa: E402 (needs torch)
from tests.model.transformers_models import SHAPE as SMALL_SHAPE  # noqa: E402 (needs torch)
from tests.model.transformers_models import hugging_face  # noqa: E402
from tests.torch_compat.huggingface import (  # noqa: E402 (needs torch)
    ROOT,
    TEXTS,
    assert_same_bits,
    bpe,
    config_json,
    config_of,
    convert,
    export,
    load,
    open_theirs,
    our_logits,
    params_of,
    random_params,
    save_run,
    tensors_of,
    their_logits,
    tokens_of,
)

SHAPE = {**SMALL_SHAPE, "max_seq_len": 256, "init_std": 0.1}
QK_NORM = {"qk_norm": True, "norm_eps": 1e-6, "qk_norm_eps": 1e-6}
MODELS = {
    "Llama": {},
    "Llama, tied": {"tie_embeddings": True},
    "Llama, stretched": {"rope_scaling": RopeScaling(original_max_seq_len=16), "rope_theta": 500.0},
    "Llama, narrow heads": {"head_dim": 12},
    "Mistral": {"norm_eps": 1e-3},
    "Mistral, 6 heads in 68": {"dim": 68, "n_heads": 6, "head_dim": 16},
    "Qwen2": {"qkv_bias": True},
    "Qwen2, wide heads": {"qkv_bias": True, "head_dim": 32},
    "Qwen3": QK_NORM,
    "Qwen3, wide heads, tied": {**QK_NORM, "head_dim": 32, "tie_embeddings": True},
}


def family(case):
    return case.partition(",")[0]


def model_of(case):
    return ModelConfig(**{**SHAPE, **MODELS[case]})


def export_notes(run, **options):
    return conversion.plan(Request(checkpoints.find(run), run / "never", "hf", **options)).notes


def normal(model):
    """Return a config with explicit values for keys whose default follows from others."""
    wide = model.head_size * model.n_heads != model.dim
    return model.model_copy(update={
        "n_kv_heads": model.kv_heads, "ffn_hidden_dim": model.ffn_dim,
        "head_dim": model.head_size if wide else None,
        "qk_norm_eps": model.qk_norm_eps if model.qk_norm else 1e-5,
    })  # fmt: skip


# Export


@pytest.mark.parametrize("case", MODELS)
def test_export_matches_transformers(tmp_path, case):
    model = model_of(case)
    run = save_run(tmp_path / "run", config_of(model))
    dialect = "hf-mistral" if case == "Mistral" else None
    network = open_theirs(export(run, tmp_path / "hf", dialect=dialect))
    assert type(network).__name__ == f"{family(case)}ForCausalLM"
    tokens = tokens_of(model, 40)
    native = our_logits(model, random_params(model), tokens)
    np.testing.assert_allclose(native, their_logits(network, tokens), rtol=0, atol=1e-5)


def test_export_command_writes_model(tmp_path):
    model = model_of("Qwen2")
    run = save_run(tmp_path / "run", config_of(model))
    command = [sys.executable, "-m", "jaxforge", "convert", run, tmp_path / "hf", "--to", "hf"]
    done = subprocess.run(
        [*command, "--dtype=bfloat16", "--max-shard-size=100KB"],
        cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "hf")
    assert open_theirs(tmp_path / "hf", dtype="auto").dtype == torch.bfloat16
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1


@pytest.mark.parametrize(
    "dialect", ["hf-llama", "hf-qwen2", "hf-qwen3", "hf-qwen3-moe", "kempnerforge"]
)
def test_export_with_missing_parameters_raises(tmp_path, dialect):
    """transformers would initialize missing biases of Qwen2 at random."""
    case = "Qwen3" if dialect == "hf-llama" else "Llama"
    run = save_run(tmp_path / "run", config_of(model_of(case)))
    with pytest.raises(UserError, match=f"exported to hf as hf-.*, not {dialect}"):
        export(run, tmp_path / "hf", dialect=dialect)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"norm_type": "layernorm", "qk_norm": True}, r"hf-stablelm has no model\.qk_norm = True"),
        ({"norm_placement": "sandwich", "o_bias": True}, r"model\.norm_placement = 'sandwich'"),
        ({"num_experts": 4, "moe_router": "sigmoid_topk"}, r"model\.moe_router = 'sigmoid_topk'"),
        ({"qk_norm": True, "qkv_bias": True}, r"hf-qwen2 has no model\.qk_norm = True"),
        ({"qk_norm": True, "norm_eps": 1e-6}, r"hf-qwen3 has no model\.qk_norm_eps = 1e-05"),
    ],
    ids=str,
)
def test_model_without_family_raises(tmp_path, keys, message):
    with pytest.raises(UserError, match=message):
        hf_config.select_family(ModelConfig(**{**SHAPE, **keys}))
    if "num_experts" not in keys:
        run = save_run(tmp_path / "run", config_of(ModelConfig(**{**SHAPE, **keys})))
        with pytest.raises(UserError, match=message):
            export(run, tmp_path / "hf")


# Import


DTYPES = itertools.cycle(("float32", "bfloat16"))  # alternate within each family


@pytest.fixture(scope="module", params=zip(MODELS, DTYPES, strict=False),
                ids=lambda param: f"{param[0]}, {param[1]}")  # fmt: skip
def imported(request, tmp_path_factory):
    """Return a sharded transformers directory, its imported run, and the network."""
    path, (case, dtype) = tmp_path_factory.mktemp("imported"), request.param
    network = hugging_face(family(case), model_of(case)).to(getattr(torch, dtype))
    network.save_pretrained(path / "hf", max_shard_size="60KB")
    assert (path / "hf" / "model.safetensors.index.json").exists()
    assert load(path / "hf", path / "run") == ()
    return case, path, network


def test_import_matches_transformers(imported):
    case, path, _ = imported
    model, params = params_of(path / "run")
    assert model == normal(model_of(case))
    network, tokens = open_theirs(path / "hf"), tokens_of(model, 40)
    native = our_logits(model_of(case), params, tokens)
    np.testing.assert_allclose(native, their_logits(network, tokens), rtol=0, atol=1e-5)


def test_import_and_export_roundtrip_bit_exactly(imported, tmp_path):
    case, path, _ = imported
    dialect = "hf-mistral" if family(case) == "Mistral" else None
    back = export(path / "run", tmp_path / "hf", dialect=dialect)
    assert_same_bits(tensors_of(path / "hf"), tensors_of(back))
    theirs, native = config_json(path / "hf"), config_json(back)
    assert native["dtype"] == theirs["dtype"]
    assert hf_config.model_table(native, "") == hf_config.model_table(theirs, "")


def starting_params(config, directory):
    """Return the starting parameters of a run with this config, and their origin."""
    native = setup(config)
    saved = Checkpoints(directory, config.checkpoint, native.model.axes)
    with jax.set_mesh(native.mesh):
        state, progress = starting_state(native, saved, open_foreign)
    saved.close()
    assert int(state.step) == progress.step == progress.samples == 0
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(state.params))
    return jax.device_get(state.params)


@pytest.mark.parametrize("distributed", [{}, {"dp_shard": 4, "tp": 2}], ids=str)
@pytest.mark.parametrize("imported", [("Qwen2", "bfloat16")], indirect=True)
def test_run_starts_from_imported_weights(imported, tmp_path, distributed):
    """Weights of an imported run and of the directory itself are equal."""
    case, path, network = imported
    config = config_of(model_of(case), distributed={"dp_shard": 1, **distributed})
    shutil.copytree(path / "run", tmp_path / "run")
    of_run = starting_params(config, tmp_path / "run")
    section = config.checkpoint.model_copy(update={"load_path": str(path / "hf")})
    config = config.model_copy(update={"checkpoint": section})
    of_directory = starting_params(config, tmp_path / "new")
    jax.tree.map(np.testing.assert_array_equal, of_run, of_directory)
    table = network.model.embed_tokens.weight.detach().float().numpy()
    np.testing.assert_array_equal(of_run["token_embedding"]["embedding"]["weight"], table)


class Look(Callback):
    def on_step_end(self, context):
        self.step, self.params = context.step, jax.device_get(context.state.params)


@pytest.mark.parametrize("imported", [("Llama", "float32")], indirect=True)
def test_training_continues_from_import(imported, tmp_path):
    """An update with learning rate 0 keeps the weights."""
    _, path, _ = imported
    shutil.copytree(path / "run", tmp_path / "run")
    arguments = ["--config", str(tmp_path / "run" / "config.toml"), "--train.max_steps=1"]
    arguments += [f"--checkpoint.dir={tmp_path / 'run'}", "--optimizer.lr=1e-30"]
    look = Look()
    arguments += ["--train.seq_len=16", "--data.dataset_type=synthetic"]
    launch.fit(train.parse_command_line(arguments), callbacks=[look])
    assert look.step == 1
    jax.tree.map(np.testing.assert_array_equal, look.params, params_of(path / "run")[1])
    assert checkpoints.find(tmp_path / "run").read(None, ReadOptions()).progress.step == 1


@pytest.mark.parametrize("imported", [("Llama", "float32")], indirect=True)
def test_direct_start_keeps_model_documents(imported, tmp_path):
    """Exports of both have equal configs, as after an import."""
    case, path, _ = imported
    config = config_of(model_of(case), distributed={"dp_shard": -1})
    (tmp_path / "run.toml").write_text(config.to_toml())
    arguments = ["--config", str(tmp_path / "run.toml"), "--train.max_steps=1"]
    arguments += [f"--checkpoint.dir={tmp_path / 'run'}", "--train.seq_len=16"]
    arguments += ["--data.dataset_type=synthetic", f"--checkpoint.load_path={path / 'hf'}"]
    launch.fit(train.parse_command_line(arguments))
    names = ("config.json", "generation_config.json")
    for name in names:
        retained = tmp_path / "run" / "huggingface" / name
        assert retained.read_bytes() == (path / "hf" / name).read_bytes()
    for run in (tmp_path / "run", path / "run"):
        export(run, tmp_path / "hf" / run.parent.name)
    a, b = ((run / "config.json").read_text() for run in (tmp_path / "hf").iterdir())
    assert a == b
    restore.copy_documents(str(path / "run"), tmp_path)  # a start from an imported run
    restore.copy_documents(str(tmp_path / "run" / "checkpoints" / "step_1"), tmp_path)
    for name in names:
        assert (tmp_path / "huggingface" / name).read_bytes() == (path / "hf" / name).read_bytes()


# Tokenizers


@pytest.mark.parametrize("case", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_tokenizer_is_exported_with_model(tmp_path, case):
    native = bpe(tmp_path / "tokenizer")
    model = model_of(case).model_copy(update={"vocab_size": 300})
    data = {"tokenizer_path": str(tmp_path / "tokenizer")}
    run = save_run(tmp_path / "run", config_of(model, data=data))
    directory = export(run, tmp_path / "hf", dialect=f"hf-{case.lower()}")
    kind, noted = transformers.AutoTokenizer, export_notes(run)
    if case == "Qwen2":  # AutoTokenizer always uses Qwen2's class
        kind = transformers.PreTrainedTokenizerFast
        assert "PreTrainedTokenizerFast.from_pretrained" in noted[0]
    else:
        assert noted == ()
    theirs = kind.from_pretrained(directory)
    for text in [*TEXTS, f"fox{END_OF_TEXT}dog", "  a  .b ,c 's"]:
        assert theirs(text)["input_ids"] == native.encode(text)
        assert theirs.decode(native.encode(text), skip_special_tokens=True) == native.decode(
            native.encode(text)
        )
    assert theirs.eos_token_id == native.eos_id == config_json(directory)["eos_token_id"] == 0
    settings = transformers.GenerationConfig.from_pretrained(directory)
    settings.validate(strict=True)
    assert settings.eos_token_id == 0
    assert load_tokenizer(directory).fingerprint == native.fingerprint


def test_byte_tokenizer_is_not_exported(tmp_path):
    config = config_of(model_of("Llama").model_copy(update={"vocab_size": 257}),
                       data={"tokenizer_path": "byte"})  # fmt: skip
    directory = export(save_run(tmp_path / "run", config), tmp_path / "hf")
    assert sorted(os.listdir(directory)) == [
        "README.md", "config.json", "generation_config.json", "model.safetensors"
    ]  # fmt: skip
    settings = open_theirs(directory).generation_config
    settings.validate(strict=True)
    assert settings.eos_token_id == 256


@pytest.fixture(scope="module")
def with_tokenizer(tmp_path_factory):
    """Return a directory whose EOS is only in config.json, and its import."""
    path = tmp_path_factory.mktemp("tokenizer")
    bpe(path / "bpe")
    model = model_of("Llama").model_copy(update={"vocab_size": 304})
    network = hugging_face("Llama", model)
    network.config.eos_token_id = 0
    network.save_pretrained(path / "hf")
    transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(path / "bpe" / "tokenizer.json"), bos_token="the"
    ).save_pretrained(path / "hf")
    load(path / "hf", path / "run")
    return path, network


def test_import_keeps_tokenizer(with_tokenizer, tmp_path):
    path, _ = with_tokenizer
    tokenizer, theirs = run_directory.read_tokenizer(path / "run"), load_tokenizer(path / "hf")
    assert (tokenizer.fingerprint, tokenizer.eos_id) == (theirs.fingerprint, 0)
    back = transformers.AutoTokenizer.from_pretrained(export(path / "run", tmp_path / "hf"))
    assert back.bos_token == "the"
    assert config_json(tmp_path / "hf")["eos_token_id"] == 0
    load(path / "hf", tmp_path / "other", "--data.tokenizer_path=byte")
    assert (
        run_directory.read_tokenizer(tmp_path / "other").eos_id == 256
    )  # the run's tokenizer takes precedence


def test_named_chat_templates_survive_every_conversion(with_tokenizer, tmp_path):
    path, _ = with_tokenizer
    source = shutil.copytree(path / "hf", tmp_path / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    tokenizer.save_pretrained(source)
    (source / "additional_chat_templates" / "notes.txt").write_text("not a template")
    reference = checkpoints.find(source)
    stamps = reference.stamps()
    load(source, tmp_path / "run")
    os.mkfifo(tmp_path / "run" / "tokenizer" / "pipe")
    (tmp_path / "run" / "tokenizer" / "loop").symlink_to(".")
    other = Request(checkpoints.find(tmp_path / "run"), tmp_path / "other", "jaxforge")
    convert(other, tmp_path / "other" / "checkpoints" / "step_0")
    for start in ("hf", "run", "other"):
        result = export(tmp_path / start, tmp_path / f"{start}-hf")
        read = transformers.AutoTokenizer.from_pretrained(result)
        assert read.chat_template == tokenizer.chat_template
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("changed")
    assert reference.stamps() != stamps


def test_token_beyond_the_model_is_noted_by_import_and_refused_in_prompts(with_tokenizer, tmp_path):
    source = shutil.copytree(with_tokenizer[0] / "hf", tmp_path / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    vocab_size = config_json(source)["vocab_size"]
    tokenizer.add_tokens([f"<{i}>" for i in range(vocab_size - len(tokenizer) + 1)])
    tokenizer.save_pretrained(source)
    last = tokenizer.decode([vocab_size])
    note = f"has ids up to {vocab_size} ('{last}'), and the model only {vocab_size} tokens"
    assert any(note in text for text in load(source, tmp_path / "run"))
    message = f"the token '{last}' has id {vocab_size}, and the model has only {vocab_size} tokens"
    with pytest.raises(UserError, match=f"^prompt 0: {message}"):
        Run(tmp_path / "run").generate(f"a {last} b", max_tokens=3)
    with pytest.raises(UserError, match=f"^--prompt: {message}"):
        generate.main([str(tmp_path / "run"), "--prompt", last, "--max-tokens=3"])


def test_import_can_be_generated_from_and_evaluated(with_tokenizer, tmp_path, capsysbinary):
    path, network = with_tokenizer
    precise = "--train.mixed_precision=fp32"
    arguments = ["--prompt=the lazy fox", "--max-tokens=6", "--temperature=0", precise]
    assert generate.main([str(path / "run"), *arguments, "--ignore-eos"]) == 0
    tokenizer = load_tokenizer(path / "hf")
    prompt = torch.tensor([tokenizer.encode("the lazy fox")])
    chosen = network.generate(prompt, max_new_tokens=6, do_sample=False, eos_token_id=None,
                              suppress_tokens=list(range(tokenizer.vocab_size, 304)))  # fmt: skip
    said = capsysbinary.readouterr().out.decode()
    assert said.strip() == tokenizer.decode(chosen[0].tolist()).strip()
    tokens = np.random.default_rng(0).integers(1, 300, (8, 17))
    np.save(tmp_path / "a.npy", tokens.astype(np.uint16).reshape(-1))
    _, sums = evaluate(path / "run", [precise, "--train.seq_len=16"], sets=[f"a={tmp_path}"],
                       batch_size=8, devices=jax.devices()[:1])  # fmt: skip
    inputs = torch.from_numpy(tokens)
    with torch.no_grad():
        expected = network(inputs, labels=inputs).loss
    assert sums["a"].metrics()["loss"] == pytest.approx(float(expected), abs=1e-5)


# config.json


def minimal(kind, **keys):
    return {"model_type": kind, "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 128,
            "num_attention_heads": 32, "intermediate_size": 96, "max_position_embeddings": 8192,
            **keys}  # fmt: skip


CONFIGS = [
    {},
    {"num_key_value_heads": 16, "head_dim": 6, "rms_norm_eps": 1e-3, "tie_word_embeddings": True,
     "initializer_range": 0.3},
    {"num_key_value_heads": None, "attention_bias": False},
    {"rope_theta": 500, "rope_scaling": None},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    {"rope_parameters": {"rope_theta": 500.0}, "rope_theta": 7.0},
    {"rope_theta": 500.0, "rope_scaling": {"type": "llama3", "factor": 2.0, "low_freq_factor": 0.5,
                                           "high_freq_factor": 3.0}},
    {"rope_parameters": {"rope_type": "llama3", "rope_theta": 50.0, "factor": 4.0,
                         "low_freq_factor": 1.0, "high_freq_factor": 3.0,
                         "original_max_position_embeddings": 99}, "rope_theta": 7.0},
    {"rope_scaling": {"rope_type": "llama3", "factor": 4, "low_freq_factor": 1,
                      "high_freq_factor": 4, "original_max_position_embeddings": 99},
     "rope_parameters": {"rope_theta": 50.0}},
    {"sliding_window": 100},
    {"sliding_window": None},
    {"use_sliding_window": False, "max_window_layers": 1, "sliding_window": 100},
    {"use_sliding_window": True, "max_window_layers": 2},
    {"use_sliding_window": True, "max_window_layers": 1},
    {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 100,
     "layer_types": ["full_attention", "sliding_attention"]},
]  # fmt: skip


@pytest.mark.parametrize("keys", CONFIGS, ids=str)
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_config_json_matches_transformers(kind, keys):
    """Defaults of each family are tested in the forms of transformers 4 and 5."""
    inputs = minimal(kind, **keys)
    if not kind.startswith("qwen") and {"layer_types", "use_sliding_window"} & keys.keys():
        pytest.skip("a key that the family does not have: see test_families")
    if kind == "llama" and keys.get("sliding_window"):
        pytest.skip("a key that the family does not have: see test_families")
    if kind == "mistral" and keys.get("num_key_value_heads", 8) is None:
        pytest.skip("transformers 5 takes no null here")
    theirs = transformers.AutoConfig.for_model(**json.loads(json.dumps(inputs)))
    native = ModelConfig(**hf_config.model_table(inputs, ""))
    rope = dict(theirs.rope_parameters)
    assert native.kv_heads == theirs.num_key_value_heads
    assert native.head_size == getattr(theirs, "head_dim", 64 // 32)
    assert native.norm_eps == theirs.rms_norm_eps
    assert native.tie_embeddings == theirs.tie_word_embeddings
    assert native.init_std == theirs.initializer_range
    assert native.rope_theta == rope.pop("rope_theta")
    assert (native.rope_scaling is not None) == (rope.pop("rope_type") == "llama3")
    rope.pop("type", None)
    if native.rope_scaling:
        rope["original_max_seq_len"] = rope.pop("original_max_position_embeddings")
        assert {key: getattr(native.rope_scaling, key) for key in rope} == rope
    window = getattr(theirs, "sliding_window", None)
    windowed = {"llama": False, "mistral": True}.get(
        kind, "sliding_attention" in getattr(theirs, "layer_types", [])
    )
    assert native.max_seq_len == 8192
    kinds = ["sliding_attention" if windowed else ""] * 2
    if kind.startswith("qwen"):
        kinds = theirs.layer_types
    expected = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    assert native.windows == expected


@pytest.mark.parametrize("keys", [
    {}, {"head_dim": 32}, {"dim": 68, "n_heads": 6, "head_dim": 16}, {"n_kv_heads": None},
    {"ffn_hidden_dim": None}, {"norm_eps": 1e-3}, {"vocab_size": 77},
    {"max_seq_len": 99}, {"rope_theta": 77.0}, {"tie_embeddings": True}, {"init_std": 0.3},
    {"rope_scaling": RopeScaling(factor=2.0, low_freq_factor=0.5, high_freq_factor=3.0,
                                 original_max_seq_len=33)},
    {"qkv_bias": True}, {**QK_NORM}, {"n_layers": 5},
], ids=str)  # fmt: skip
def test_exported_config_roundtrips(tmp_path, keys):
    """The config is also rewritten by transformers, and reduced to keys of version 4 or 5."""
    model = ModelConfig(**{**SHAPE, **keys})
    family = hf_config.select_family(model)
    written = hf_config.config_json(config_of(model), family, "float32")
    assert ModelConfig(**hf_config.model_table(written, "")) == normal(model)
    (tmp_path / "config.json").write_text(json.dumps(written))
    transformers.AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "theirs")
    rewritten = config_json(tmp_path / "theirs")
    assert "rope_scaling" not in rewritten
    assert ModelConfig(**hf_config.model_table(rewritten, "")) == normal(model)
    for other in (["rope_parameters", "dtype"], ["rope_theta", "rope_scaling", "torch_dtype"]):
        form = {key: value for key, value in written.items() if key not in other}
        assert ModelConfig(**hf_config.model_table(form, "")) == normal(model)


@pytest.mark.parametrize(
    ("kind", "keys", "message"),
    [
        ("gpt", {}, "model_type 'gpt' is not one of llama, mistral"),
        (None, {}, "model_type None"),
        ("mistral", {"mlp_bias": True}, "mlp_bias = True"),
        ("mistral", {"attention_bias": True}, "attention_bias"),
        ("qwen2", {"hidden_act": "tanh"}, "hidden_act = 'tanh'"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ("llama", {"rope_scaling": {"type": "axial", "factor": 2.0}}, "rope_scaling.*'axial'"),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}},
         "rope_scaling does not give low_freq_factor, high_freq_factor"),
        ("qwen3", {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
         "rope_parameters.*same positions"),
        ("llama", {"hidden_size": None}, "does not give hidden_size"),
        ("llama", {"hidden_size": "64"}, "does not give hidden_size"),
    ],
)  # fmt: skip
def test_unknown_tensors_raise(tmp_path, kind, keys, message):
    (tmp_path / "config.json").write_text(json.dumps(minimal(kind, **keys)))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(UserError, match=message) as error:
        load(tmp_path, tmp_path / "run")
    assert str(error.value).startswith(f"{tmp_path}/config.json: ")


@pytest.mark.parametrize("text", ["[1]", "{"])
def test_invalid_config_json_raises(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"config\.json: not"):
        hf_state.read_config(Directory(tmp_path))


WINDOWS = pytest.mark.parametrize(
    ("case", "keys", "windows"),
    [
        ("Mistral", {}, [8, 8]),
        pytest.param("Mistral", {"sliding_window": 100}, [100, 100], marks=pytest.mark.slow),
        pytest.param(
            "Qwen2",
            {"layer_types": ["full_attention", "sliding_attention"]},
            [None, 8],
            marks=pytest.mark.slow,
        ),
        ("Qwen3", {"layer_types": ["sliding_attention", "full_attention"]}, [8, None]),
    ],
)


@WINDOWS
def test_sliding_window_layers_roundtrip(tmp_path, case, keys, windows):
    """Windows are shorter and longer than the sequence, with and without a cache."""
    network = hugging_face(family(case), model_of(case))
    network.save_pretrained(tmp_path / "hf")
    sliding = {"sliding_window": 8, "use_sliding_window": True, "max_position_embeddings": 256}
    config = {**config_json(tmp_path / "hf"), **sliding, **keys}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    load(tmp_path / "hf", tmp_path / "run")
    model, params = params_of(tmp_path / "run")
    assert list(model.windows) == windows
    network, tokens = open_theirs(tmp_path / "hf"), tokens_of(model, 24)
    theirs = their_logits(network, tokens)
    np.testing.assert_allclose(our_logits(model, params, tokens), theirs, rtol=0, atol=1e-5)
    np.testing.assert_allclose(one_by_one(model, params, tokens), theirs, rtol=0, atol=1e-5)
    export(tmp_path / "run", tmp_path / "back")
    exported = their_logits(open_theirs(tmp_path / "back"), tokens)
    np.testing.assert_allclose(exported, theirs, rtol=0, atol=1e-5)


def one_by_one(config, params, tokens):
    model = Model(config)
    cache, logits = model.empty_cache(*tokens.shape), []
    extend = jax.jit(model.extend)
    for i in range(tokens.shape[1]):
        at = np.full((tokens.shape[0], 1), i)
        out, cache = extend(params, tokens[:, i : i + 1], at, cache)
        logits.append(out)
    return np.concatenate(logits, axis=1)


def test_changed_windows_are_noted(tmp_path):
    hugging_face(family("Mistral"), model_of("Mistral")).save_pretrained(tmp_path / "hf")
    (note,) = load(tmp_path / "hf", tmp_path / "run", "--model.sliding_window=8")
    assert "layers that see all tokens and [model] 8: the weights were trained" in note


def test_different_user_config_is_noted(tmp_path, caplog):
    """The changed keys do not affect shapes."""
    hugging_face("Qwen3", model_of("Qwen3")).save_pretrained(tmp_path / "hf")
    notes = load(tmp_path / "hf", tmp_path / "run", "--model.norm_eps=1e-3",
                 "--model.rope_theta=500", "--model.qk_norm_eps=1e-4")  # fmt: skip
    assert list(notes) == [
        f"config.json: model.{key} and the weights were trained with {was}" for key, was in (
            ("norm_eps is 0.001", 1e-06), ("rope_theta is 500.0", 10000.0),
            ("qk_norm_eps is 0.0001", 1e-06),
        )
    ]  # fmt: skip
    config = config_of(model_of("Qwen3").model_copy(update={"rope_theta": 500.0}))
    open_foreign(tmp_path / "hf", config)
    assert "trained with 10000.0" in caplog.text


# dtypes and files


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_cast_matches_torch(tmp_path):
    """Values are rounded to nearest even; overflow is refused (see test_limits)."""
    model = model_of("Llama")
    params = random_params(model)
    odd = [1 + 2**-8, 1 + 3 * 2**-8, 65000.0, -0.0, 1e-40, np.inf, 1e-7]
    params["token_embedding"]["embedding"]["weight"][0, : len(odd)] = odd
    run = save_run(tmp_path / "run", config_of(model), params)
    whole = tensors_of(export(run, tmp_path / "float32"))
    for dtype in ("bfloat16", "float16"):
        cast = tensors_of(export(run, tmp_path / dtype, dtype=dtype))
        assert config_json(tmp_path / dtype)["dtype"] == dtype
        for name, tensor in whole.items():
            theirs = torch.from_numpy(tensor.copy()).to(getattr(torch, dtype)).view(torch.int16)
            np.testing.assert_array_equal(cast[name].view(np.int16), theirs.numpy(), name)
        assert open_theirs(tmp_path / dtype, dtype="auto").dtype == getattr(torch, dtype)


def test_import_casts_weights(tmp_path):
    network = hugging_face("Llama", model_of("Llama"))
    network.save_pretrained(tmp_path / "hf")
    load(tmp_path / "hf", tmp_path / "run", dtype="bfloat16")
    network.to(torch.bfloat16).save_pretrained(tmp_path / "theirs")
    back = export(tmp_path / "run", tmp_path / "back")
    assert_same_bits(tensors_of(tmp_path / "theirs"), tensors_of(back))
    assert config_json(back)["dtype"] == "bfloat16"


def test_mixed_dtypes_are_preserved(tmp_path):
    network = hugging_face("Llama", model_of("Llama")).to(torch.bfloat16)
    for name, module in network.named_modules():
        if name.endswith("norm"):
            module.float()
            torch.nn.init.uniform_(module.weight)
    network.save_pretrained(tmp_path / "hf")
    load(tmp_path / "hf", tmp_path / "run")
    back = export(tmp_path / "run", tmp_path / "back")
    tensors = tensors_of(back)
    assert {t.dtype.name for t in tensors.values()} == {"float32", "bfloat16"}
    assert_same_bits(tensors_of(tmp_path / "hf"), tensors)
    loaded = open_theirs(back, dtype="auto").state_dict()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(loaded[name].float().numpy(), tensor.astype(np.float32))


def test_layers_with_different_dtypes_raise(tmp_path):
    network = hugging_face("Llama", model_of("Llama"))
    network.model.layers[1].self_attn.q_proj.to(torch.bfloat16)
    network.save_pretrained(tmp_path / "hf")
    with pytest.raises(UserError, match=r"q_proj\.weight has several dtypes .* --dtype float32"):
        load(tmp_path / "hf", tmp_path / "run")
    load(tmp_path / "hf", tmp_path / "run", dtype="float32")


def test_large_export_is_split_into_files(tmp_path):
    run = save_run(tmp_path / "run", config_of(model_of("Llama")))
    item = tensors_of(export(run, tmp_path / "one"))
    directory = export(run, tmp_path / "several", largest_file=50_000)
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in directory.glob("*.safetensors"))
    assert len(files) > 3
    assert files == [f"model-{i:05d}-of-{len(files):05d}.safetensors"
                     for i in range(1, len(files) + 1)]  # fmt: skip
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in item.values())
    assert_same_bits(item, tensors_of(directory))
    loaded = open_theirs(directory).state_dict()
    assert all(np.array_equal(loaded[name].numpy(), tensor) for name, tensor in item.items())
