"""Language models of multimodal checkpoints: import, and export into the original."""

import json
import shutil

import jax
import numpy as np
import pytest

from jaxforge.cli.running import run_main
from jaxforge.errors import UserError
from jaxforge.training import launch
from tests.torch_compat.huggingface import (
    assert_same_bits,
    bpe,
    config_json,
    config_of,
    convert,
    export,
    load,
    our_logits,
    params_of,
    save_run,
    tensors_of,
    tokens_of,
)
from tests.torch_compat.multimodal_models import FEATURES, TEXT, features, logits, network
from torch_compat.checkpoint import (
    checkpoints,
    hf_config,
    hf_state,
    inspection,
    multimodal,
    originals,
    restore,
)
from torch_compat.checkpoint.dcp_state import ReadOptions
from torch_compat.commands.convert import main
from torch_compat.convert import conversion
from torch_compat.convert.source import Request
from torch_compat.convert.verify import verify
from torch_compat.families import FAMILIES
from torch_compat.formats.files import Directory
from torch_compat.formats.lazy import DTYPES, zeros

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.numpy import load_file, save_file  # noqa: E402 (transformers needs it)

PROCESSOR = b'{"image_processor_type": "Gemma3ImageProcessor",   "size": 28}\n'
SLOW = pytest.mark.slow
WEIGHTS = "model.safetensors"


def reopen(directory, kind):
    """Return the network of an export; every weight must come from its files."""
    model, info = type(network(kind)).from_pretrained(
        directory, output_loading_info=True, dtype=torch.float32
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def assert_close(values, expected):
    assert np.abs(values - expected).max() < 1e-5 * np.abs(expected).max()


def tables(config):
    return {key: value for key, value in config.items() if key != "transformers_version"}


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """Return a directory with Gemma 3 in `hf` and its import in `run`."""
    path = tmp_path_factory.mktemp("gemma3")
    network("gemma3").save_pretrained(path / "hf")
    (path / "hf" / "preprocessor_config.json").write_bytes(PROCESSOR)
    load(path / "hf", path / "run")
    return path


@pytest.fixture
def copied(imported, tmp_path):
    """Return a directory of a test's own with the same contents."""
    shutil.copytree(imported / "hf", tmp_path / "hf")
    shutil.copytree(imported / "run", tmp_path / "run")
    record = tmp_path / "run" / hf_state.IMPORTED / originals.RECORD
    document = json.loads(record.read_text())
    record.write_text(json.dumps({**document, "source": str(tmp_path / "hf")}))
    return tmp_path


def trained(path):
    """A run that began with the import and has other weights now; the weights."""
    model, params = params_of(path / "run")
    params = jax.tree.map(lambda value: (value * 1.5).astype(np.float32), params)
    save_run(path / "trained", config_of(model), params)
    restore.copy_documents(str(path / "run"), path / "trained")
    return model, params


def test_round_trip_keeps_every_bit(imported, tmp_path):
    back = export(imported / "run", tmp_path / "back", largest_file=100_000)
    assert_same_bits(tensors_of(back), tensors_of(imported / "hf"))
    assert tables(config_json(back)) == tables(config_json(imported / "hf"))
    assert (back / "preprocessor_config.json").read_bytes() == PROCESSOR
    index = json.loads((back / "model.safetensors.index.json").read_text())
    sizes = {name: value.nbytes for name, value in tensors_of(back).items()}
    assert index["metadata"]["total_size"] == sum(sizes.values())
    assert len(set(index["weight_map"].values())) > 2
    assert "Gemma3ForConditionalGeneration.from_pretrained" in (back / "README.md").read_text()


def test_export_holds_trained_text_and_features_of_original(copied):
    model, params = trained(copied)
    back = export(copied / "trained", copied / "back")
    again = reopen(back, "gemma3")
    for mine, theirs in zip(features(again), features(network("gemma3")), strict=True):
        assert mine.tobytes() == theirs.tobytes()
    tokens = tokens_of(model)
    expected = logits(again, tokens)
    assert (
        np.abs(our_logits(model, params, tokens) - expected).max() < 1e-5 * np.abs(expected).max()
    )
    before, after = tensors_of(copied / "hf"), tensors_of(back)
    changed = {name for name in before if before[name].tobytes() != after[name].tobytes()}
    assert changed == {name for name in before if name.startswith("language_model.")}


def test_run_that_loads_the_files_records_the_original(imported, tmp_path):
    restore.copy_documents(str(imported / "hf"), tmp_path)
    names = {path.name for path in (tmp_path / hf_state.IMPORTED).iterdir()}
    assert names == {"config.json", "generation_config.json", originals.RECORD}
    for name in names:
        copies = (path / hf_state.IMPORTED / name for path in (tmp_path, imported / "run"))
        assert len({copy.read_bytes() for copy in copies}) == 1


@pytest.mark.parametrize("has_quantized_images", [False, True])
def test_export_of_8_bit_original_is_not_described_as_8_bit(
    imported, tmp_path, has_quantized_images
):
    shutil.copytree(imported / "hf", tmp_path / "hf")
    tensors = load_file(tmp_path / "hf" / WEIGHTS)
    names = [name for name in tensors if name.endswith("mlp.up_proj.weight")]
    names += (
        [name for name in tensors if name.endswith("fc1.weight")] if has_quantized_images else []
    )
    for name in names:
        tensors[name] = tensors[name].astype(DTYPES["float8_e4m3fn"])
        tensors[f"{name}_scale_inv"] = np.ones((1, 1), np.float32)
    save_file(tensors, tmp_path / "hf" / WEIGHTS, {"format": "pt"})
    quantized = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config = {**config_json(imported / "hf"), "quantization_config": quantized}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    load(tmp_path / "hf", tmp_path / "run")
    if has_quantized_images:
        with pytest.raises(
            UserError, match=r"fc1\.weight.* of the original are quantized.*text-only"
        ):
            export(tmp_path / "run", tmp_path / "back")
        return
    back = export(tmp_path / "run", tmp_path / "back")
    assert "quantization_config" not in config_json(back)
    written = tensors_of(back)
    assert written.keys() == tensors_of(imported / "hf").keys()
    assert (written[names[0]] == tensors[names[0]].astype(np.float32)).all()


def test_left_aside_tensors_are_noted(imported, tmp_path):
    plan = conversion.plan(Request(checkpoints.find(imported / "hf"), tmp_path / "run", "jaxforge"))
    (note,) = plan.notes
    assert note.startswith(
        "left aside: 50 tensors outside of the language model: 2 of multi_modal_"
    )
    assert "48 of vision_tower (0.166 MB)" in note
    report = inspection.inspect(checkpoints.find(imported / "hf"))
    assert report["notes"] == [note]
    assert report["parameters"] == sum(
        value.size for name, value in tensors_of(imported / "hf").items()
        if name.startswith("language_model.")
    )  # fmt: skip
    both = checkpoints.find(imported / "hf"), checkpoints.find(imported / "run")
    result = verify(*both, None, (), ReadOptions(), 1 << 20)
    assert result.same
    assert note in result.notes


def test_text_only_export_is_the_class_of_the_text(imported, tmp_path):
    back = export(imported / "run", tmp_path / "back", text_only=True)
    assert config_json(back)["architectures"] == ["Gemma3ForCausalLM"]
    text = {
        name.removeprefix("language_model."): value
        for name, value in tensors_of(imported / "hf").items()
        if name.startswith("language_model.")
    }
    assert_same_bits(tensors_of(back), text)
    assert not (back / "preprocessor_config.json").exists()


@pytest.mark.parametrize("change", ["gone", "values", "names"])
def test_missing_or_changed_original_is_refused(copied, change, capsys):
    file = copied / "hf" / WEIGHTS
    if change == "gone":
        shutil.rmtree(copied / "hf")
    else:
        tensors = load_file(file)
        name = next(name for name in tensors if name.startswith("vision_tower."))
        value = tensors.pop(name)
        tensors["vision_tower.new" if change == "names" else name] = -value
        save_file(tensors, file, {"format": "pt"})
    command = [str(copied / "run"), str(copied / "out" / "back"), "--to", "hf"]
    assert run_main(lambda: main(command)) == 2
    message = capsys.readouterr().err
    assert str(copied / "hf") in message
    assert "original.json, or export the language model alone: --text-only" in " ".join(
        message.split()
    )
    assert not (copied / "out").exists()
    assert run_main(lambda: main([*command, "--text-only"])) == 0


def test_model_that_does_not_fit_is_refused(imported, tmp_path):
    def message(**options):
        with pytest.raises(UserError) as error:
            conversion.plan(
                Request(checkpoints.find(imported / "run"), tmp_path / "back", "hf", **options)
            )
        assert "--text-only" in str(error.value)
        return str(error.value)

    assert "fp8: Gemma3ForConditionalGeneration has tensors for images" in message(dtype="fp8")
    padded = load_resized(imported, tmp_path)
    request = Request(checkpoints.find(padded), tmp_path / "back", "hf")
    with pytest.raises(UserError, match=r"model.vocab_size = 160 and not 128\. To export the lang"):
        conversion.plan(request)


def test_tokenizer_must_have_the_eos_tokens_of_the_original(imported, tmp_path):
    shutil.copytree(imported / "hf", tmp_path / "hf")
    (tmp_path / "hf" / "generation_config.json").unlink()
    config = config_json(imported / "hf")
    config["text_config"]["eos_token_id"] = [0, 7]
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    bpe(tmp_path / "hf")
    load(tmp_path / "hf", tmp_path / "run")
    back = export(tmp_path / "run", tmp_path / "back")
    assert config_json(back)["text_config"]["eos_token_id"] == [0, 7]
    assert (back / "tokenizer.json").exists()
    (tmp_path / "run" / "tokenizer" / "config.json").unlink()
    with pytest.raises(UserError, match=r"its tokenizer lacks the EOS tokens \[7\]"):
        export(tmp_path / "run", tmp_path / "other")


def load_resized(path, target):
    options = ReadOptions(resize_vocab=True)
    request = Request(
        checkpoints.find(path / "hf"), target / "padded", "jaxforge",
        overrides=["--model.vocab_size=160"], options=options,
    )  # fmt: skip
    convert(request, target / "padded" / "checkpoints" / "step_0")
    return target / "padded"


def test_text_only_without_images_is_refused(imported, tmp_path):
    text = export(imported / "run", tmp_path / "text", text_only=True)
    request = Request(checkpoints.find(text), tmp_path / "back", "hf", text_only=True)
    with pytest.raises(UserError, match=r"--text-only: .* is not a model with images or sound"):
        conversion.plan(request)


def test_changed_model_is_written_into_text_config(imported):
    original = hf_state.open_original(Directory(imported / "hf"))
    model = params_of(imported / "run")[0].with_values({"rope_theta": 5e5})
    config = original.config_json(model, "bfloat16")
    assert config["text_config"]["rope_parameters"]["full_attention"]["rope_theta"] == 5e5
    assert config["dtype"] == "bfloat16"
    before = config_json(imported / "hf")
    assert config["vision_config"] == before["vision_config"]
    changed = ("rope_parameters", "dtype")
    for key in before["text_config"].keys() - changed:
        assert config["text_config"][key] == before["text_config"][key]


def test_names_of_both_layouts_are_read(imported, tmp_path):
    """transformers 4.52 to 4.57 saved the names of its modules."""
    tensors = load_file(imported / "hf" / WEIGHTS)
    renamed = {
        name.replace("language_model.model.", "model.language_model.")
        if name.startswith("language_model.")
        else f"model.{name}": value
        for name, value in tensors.items()
    }
    shutil.copytree(imported / "hf", tmp_path / "hf")
    save_file(renamed, tmp_path / "hf" / WEIGHTS, {"format": "pt"})
    (note,) = load(tmp_path / "hf", tmp_path / "run")
    assert "48 of model.vision_tower" in note
    assert_same_bits(tensors_of(tmp_path / "run"), tensors_of(imported / "run"))
    assert_same_bits(tensors_of(export(tmp_path / "run", tmp_path / "back")), renamed)


@pytest.mark.parametrize("has_head", [True, False])
@pytest.mark.parametrize(
    ("model", "head", "image"),
    [
        ("language_model.model.", "language_model.", "vision_tower.layers.0.norm.weight"),
        ("model.language_model.", "", "model.vision_tower.layers.0.norm.weight"),
        ("model.text_model.", "", "model.vision_model.embed_tokens.weight"),
        ("model.", "", "visual.layers.0.input_layernorm.weight"),
        ("model.", "", "model.vision_tower.layers.0.input_layernorm.weight"),
    ],
)
def test_names_of_language_model_are_found(model, head, image, has_head):
    keys = ["model.embed_tokens.weight", "model.layers.0.input_layernorm.weight",
            "model.norm.weight", *(["lm_head.weight"] if has_head else [])]  # fmt: skip
    names = {key: model + key.removeprefix("model.") for key in keys} | (
        {"lm_head.weight": f"{head}lm_head.weight"} if has_head else {}
    )
    contents = {name: zeros((1,), DTYPES["float32"]) for name in (*names.values(), image)}
    config = {"model_type": "llava", "text_config": {"model_type": "llama"}}
    parts = multimodal.split(contents, config, "here")
    assert parts.text.keys() == {*keys}
    assert parts.aside.keys() == {image}
    assert parts.has_head == has_head
    assert parts.nesting.key("lm_head.weight") == f"{head}lm_head.weight"
    assert {key: parts.nesting.key(key) for key in keys} == names


@pytest.mark.parametrize("is_transposed", [False, pytest.param(True, marks=SLOW)])
def test_packed_experts_are_read_and_written(tmp_path, is_transposed):
    """Qwen publishes the experts of a layer in two tensors, in Qwen3-VL with swapped axes."""
    network("qwen3_5_moe").save_pretrained(tmp_path / "hf")
    load(tmp_path / "hf", tmp_path / "run")
    tensors = load_file(tmp_path / "hf" / WEIGHTS)
    for layer in range(2):
        at = f"model.language_model.layers.{layer}.mlp.experts."
        gate, up, down = (
            np.stack([tensors.pop(f"{at}{expert}.{m}_proj.weight") for expert in range(4)])
            for m in ("gate", "up", "down")
        )
        packed = {"gate_up_proj": np.concatenate([gate, up], 1), "down_proj": down}
        for name, value in packed.items():
            axes = (0, 2, 1) if is_transposed else (0, 1, 2)
            tensors[at + name] = np.ascontiguousarray(value.transpose(axes))
    save_file(tensors, tmp_path / "hf" / WEIGHTS, {"format": "pt"})
    load(tmp_path / "hf", tmp_path / "packed")
    assert_same_bits(tensors_of(tmp_path / "packed"), tensors_of(tmp_path / "run"))
    assert_same_bits(tensors_of(export(tmp_path / "packed", tmp_path / "back")), tensors)


PUBLISHED = {
    "gemma3": (
        {"text_config": {"hidden_size": 2560, "intermediate_size": 10240,
                         "model_type": "gemma3_text", "num_hidden_layers": 34,
                         "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                         "sliding_window": 1024}},
        {"n_heads": 8, "n_kv_heads": 4, "vocab_size": 262208, "max_seq_len": 131072,
         "tie_embeddings": True, "rope_theta": 1e6, "local_rope_theta": 1e4},
    ),
    "qwen2_5_vl": (
        {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
         "num_attention_heads": 16, "num_key_value_heads": 2, "vocab_size": 151936,
         "max_position_embeddings": 128000, "rope_theta": 1e6, "hidden_act": "silu",
         "image_token_id": 151655, "vision_start_token_id": 151652, "use_sliding_window": False,
         "sliding_window": 32768, "max_window_layers": 70, "rms_norm_eps": 1e-6,
         "tie_word_embeddings": True, "vision_config": {"depth": 32}, "eos_token_id": 151645,
         "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}},
        {"dim": 2048, "qkv_bias": True, "tie_embeddings": True},
    ),
    "qwen3_vl": (
        {"text_config": {"model_type": "qwen3_vl_text", "hidden_size": 4096, "head_dim": 128,
                         "intermediate_size": 12288, "num_attention_heads": 32,
                         "num_hidden_layers": 36, "num_key_value_heads": 8, "rope_theta": 5e6,
                         "max_position_embeddings": 262144, "vocab_size": 151936,
                         "rope_scaling": {"mrope_interleaved": True, "rope_type": "default",
                                          "mrope_section": [24, 20, 20]}},
         "tie_word_embeddings": False},
        {"qk_norm": True, "rope_theta": 5e6, "tie_embeddings": False},
    ),
    "llava": (
        {"text_config": {"model_type": "llama", "max_position_embeddings": 4096,
                         "rms_norm_eps": 1e-5, "vocab_size": 32064},
         "tie_word_embeddings": False},
        {"dim": 4096, "n_layers": 32, "ffn_hidden_dim": 11008, "vocab_size": 32064},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", PUBLISHED)
def test_published_configs_take_defaults_of_their_class(kind):
    keys, expected = PUBLISHED[kind]
    flat = multimodal.text_config({"model_type": kind, **keys}, lambda: False, "")
    table = hf_config.model_table(flat, "")
    assert {key: table.get(key) for key in expected} == expected


@pytest.mark.parametrize("kind", sorted(multimodal._DEFAULTS))
def test_default_sizes_equal_transformers(kind):
    config = transformers.AutoConfig.for_model(kind)
    family, different = multimodal._ALIASES.get(kind, (kind, {}))
    sizes = dict(zip(multimodal._SIZES, multimodal._DEFAULTS[kind], strict=True))
    assert sizes == {key: getattr(config, key, size) for key, size in sizes.items()}
    theta = (config.rope_parameters or {}).get("rope_theta")
    keys = dict(FAMILIES[family].defaults) if different else {}
    # The first is null without windows, and the files tell the second.
    for key in ("sliding_window", "tie_word_embeddings"):
        keys.pop(key, None)
    for key, value in {**keys, **different}.items():
        usual = theta if key == "rope_theta" else getattr(config, key, value)
        assert usual == value or (value is None and key not in different), key


@pytest.mark.parametrize(
    ("flags", "has_head", "is_tied"),
    [
        ((True, None), False, True),
        ((False, None), True, False),
        ((None, True), True, True),
        ((None, False), True, False),
        ((None, None), False, True),
        ((None, None), True, False),
        ((False, True), True, False),
        ((False, True), False, True),
    ],
)
def test_flags_and_files_tell_whether_head_is_tied(flags, has_head, is_tied):
    text = {"model_type": "llama"} | ({} if flags[1] is None else {"tie_word_embeddings": flags[1]})
    top = {} if flags[0] is None else {"tie_word_embeddings": flags[0]}
    config = {"model_type": "mistral3", "text_config": text, **top}
    assert multimodal.text_config(config, lambda: has_head, "")["tie_word_embeddings"] == is_tied


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"text_config": {"model_type": "mllama_text_model"}}, "'mllama_text_model', which is not"),
        (
            {"text_config": {"model_type": "gemma3n_text"}},
            "'gemma3n_text', which is not one of",
        ),
        ({"text_config": {"model_type": ["llama"]}}, "model_type ['llama'], which is not one of"),
        (
            {"model_type": "paligemma", "text_config": TEXT},
            "attends to a prompt in both",
        ),
    ],
)
def test_language_models_of_no_family_are_refused(config, message):
    with pytest.raises(UserError) as error:
        multimodal.text_config(config, lambda: True, "here")
    assert message in str(error.value)


def test_prompt_of_other_class_is_noted(imported, tmp_path):
    shutil.copytree(imported / "hf", tmp_path / "hf")
    config = {**config_json(imported / "hf"), "model_type": "new_class"}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    _, note = hf_state.open_original(Directory(tmp_path / "hf")).notes()
    assert "is not among the tested classes: compare the logits" in note


# These classes of transformers 5.24 leave the scale of logits out.
UNSCALED = ("aya_vision", "cohere2_vision", "granite_speech")


@SLOW
@pytest.mark.parametrize("kind", [*sorted(originals.TESTED), "mistral3, ministral3"])
def test_every_class_goes_there_and_back(tmp_path, kind):
    original = network(kind)
    original.save_pretrained(tmp_path / "hf")
    notes = load(tmp_path / "hf", tmp_path / "run")
    assert notes[0].startswith("left aside: ")
    model, params = params_of(tmp_path / "run")
    tokens = tokens_of(model)
    scale = model.logits_scaling if kind in UNSCALED else 1.0
    assert (scale != 1.0) == (kind in UNSCALED) == (len(notes) > 1)
    expected = logits(original, tokens)
    assert_close(our_logits(model, params, tokens) * scale, expected)
    back = export(tmp_path / "run", tmp_path / "back")
    assert_same_bits(tensors_of(back), tensors_of(tmp_path / "hf"))
    assert tables(config_json(back)) == tables(config_json(tmp_path / "hf"))
    again = reopen(back, kind)
    state = original.state_dict()
    assert all(value.equal(state[name]) for name, value in again.state_dict().items())
    assert logits(again, tokens).tobytes() == expected.tobytes()
    if kind in FEATURES:
        for mine, theirs in zip(features(again), features(original), strict=True):
            assert mine.tobytes() == theirs.tobytes()


@SLOW
@pytest.mark.usefixtures("one_device")
def test_adapters_are_merged_into_the_original_and_name_no_base(imported, tmp_path):
    """PEFT would look for the names of the language model's own class in the original."""
    model = checkpoints.find(imported / "hf").required_config(None, ()).model
    config = config_of(
        model,
        lora={"rank": 2},
        checkpoint={"dir": str(tmp_path / "run"), "load_path": str(imported / "hf")},
        optimizer={"lr": 0.01},
        train={"mixed_precision": "fp32", "seq_len": 16, "batch_size": 2, "max_steps": 2},
        data={"dataset_type": "synthetic"},
    )
    launch.fit(config)
    before, after = (
        tensors_of(imported / "hf"),
        tensors_of(export(tmp_path / "run", tmp_path / "hf")),
    )
    assert before.keys() == after.keys()
    changed = {name for name in before if before[name].tobytes() != after[name].tobytes()}
    assert changed
    assert all(name.startswith("language_model.model.layers.") for name in changed)
    request = Request(checkpoints.find(tmp_path / "run"), tmp_path / "peft", "peft")
    notes = convert(request, tmp_path / "peft").notes
    assert any("--text-only for one with images or sound" in note for note in notes)
    adapter = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] is None
