"""Adapters in the layouts of families, and damaged or unsupported files of PEFT."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxforge.config.fine_tuning import LoraConfig
from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from torch_compat.checkpoint import adapters, checkpoints
from torch_compat.checkpoint.shapes import parameters
from torch_compat.checkpoint.state import CheckpointState
from torch_compat.families import FAMILIES
from torch_compat.formats import safetensors
from torch_compat.formats.files import Directory
from torch_compat.formats.lazy import from_array

SHAPE = {"dim": 32, "n_layers": 1, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 16}
MODEL = ModelConfig(**SHAPE, ffn_hidden_dim=48)
LAYERS = [f"layers.0.attention.{m}_proj" for m in "qkvo"] + ["layers.0.mlp.down_proj"]
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 3}
FAMILY_MODELS = {
    "llama": MODEL,
    "cohere": MODEL,  # rotates neighbouring channels
    "phi3": MODEL,
    "gpt_neox": ModelConfig(**{**SHAPE, "n_kv_heads": 4}, ffn_hidden_dim=48, gated_mlp=False),
    "gpt2": ModelConfig(**{**SHAPE, "n_kv_heads": 4}, ffn_hidden_dim=48, gated_mlp=False),
}


def random(*shape):
    return from_array(np.random.default_rng(shape).standard_normal(shape, np.float32))


def adapter_of(model=MODEL, layers=LAYERS):
    shapes, result = parameters(model), {}
    for layer in layers:
        out, inp = shapes[f"{layer}.weight"]
        result |= {f"{layer}.lora_a": random(2, inp), f"{layer}.lora_b": random(out, 2)}
    return result


def zero_weights(model):
    return {n: from_array(np.zeros(s, np.float32)) for n, s in parameters(model).items()}


def write(path, tensors, **config):
    (path / adapters.CONFIG).write_text(json.dumps(CONFIG | config))
    for unit in safetensors.units_of_file(path / adapters.WEIGHTS, tensors, 1 << 20):
        unit.write()
    return Directory(str(path))


def update_of(native, dialect, model, scale):
    """Return the exported product of adapters, as weights [out, in] by their keys."""
    zeros = {name: t for name, t in zero_weights(model).items() if name[:-7] in LAYERS}
    merged = adapters.merge(CheckpointState(zeros), native, scale)
    is_transposed = adapters.stores_transposed(dialect, model)
    updates = dialect.to_dialect(merged.params, model).items()
    return {key: weight.all().T if is_transposed else weight.all() for key, weight in updates}


def test_merged_elements_are_equal_in_blocks_of_any_shape():
    tensors = {"x.lora_a": random(16, 96), "x.lora_b": random(80, 16)}
    base = CheckpointState({"x.weight": random(80, 96)})
    merged = adapters.merge(base, tensors, 0.3).params["x.weight"]
    whole = merged.all()
    for rows, columns in ((1, 1), (1, 96), (80, 1), (7, 13)):
        for i in range(0, 80, 16):
            index = slice(i, min(80, i + rows)), slice(i, min(96, i + columns))
            np.testing.assert_array_equal(merged.read(index), whole[index])


@pytest.mark.parametrize("family", FAMILY_MODELS)
def test_product_of_exported_matrices_is_the_exported_update(family):
    dialect, model = FAMILIES[family].dialect, FAMILY_MODELS[family]
    native = adapter_of(model)
    theirs = adapters.peft_tensors(native, dialect, model)
    expected = update_of(native, dialect, model, 0.5)
    for key, weight in expected.items():
        module = f"base_model.model.{key.removesuffix('.weight')}"
        a, b = (theirs[f"{module}.lora_{matrix}.weight"].all() for matrix in "AB")
        np.testing.assert_allclose(weight, 0.5 * b @ a, rtol=1e-5, atol=1e-6)
    assert len(theirs) == 2 * len(expected)


@pytest.mark.parametrize("family", FAMILY_MODELS)
@pytest.mark.parametrize("layers", [LAYERS, LAYERS[::2]], ids=["all", "some"])
def test_import_undoes_export(tmp_path, family, layers):
    dialect, model = FAMILIES[family].dialect, FAMILY_MODELS[family]
    native, lora = (
        adapter_of(model, layers),
        LoraConfig(rank=2, alpha=3, use_rslora=layers != LAYERS),
    )
    tensors = adapters.peft_tensors(native, dialect, model)
    config = adapters.config_json(lora, None, tensors, fan_in_fan_out=True)
    directory = write(tmp_path, tensors, **config)
    back = adapters.read_peft(directory, dialect, model)
    assert back.keys() == native.keys()
    for name, tensor in native.items():
        np.testing.assert_array_equal(back[name].all(), tensor.all(), err_msg=name)
    assert adapters.read_config(directory).scale == lora.scale


@pytest.mark.parametrize("rank", [2, 6])  # 6: the rank that an export has
def test_adapter_of_a_fused_tensor_is_one_of_each_part(tmp_path, rank):
    """Its product is the sum of the parts' products, with a factor of its own."""
    dialect, model = FAMILIES["gpt_neox"].dialect, FAMILY_MODELS["gpt_neox"]
    key = "gpt_neox.layers.0.attention.query_key_value"
    a, b = random(rank, 32), random(96, rank)
    named = {f"base_model.model.{key}.lora_{m}.weight": x for m, x in (("A", a), ("B", b))}
    patterns = {"rank_pattern": {"query_key_value": rank}, "alpha_pattern": {key: 5}}
    back = adapters.read_peft(write(tmp_path, named, **patterns), dialect, model)
    assert {name.rpartition(".")[0] for name in back} == set(LAYERS[:3])
    update = update_of(back, dialect, model, 1.5)[f"{key}.weight"]
    np.testing.assert_allclose(update, 5 / rank * b.all() @ a.all(), rtol=1e-5, atol=1e-5)


def test_adapter_of_another_rank_or_size_is_refused(tmp_path):
    dialect, model = FAMILIES["gpt_neox"].dialect, FAMILY_MODELS["gpt_neox"]
    module = "base_model.model.gpt_neox.layers.0.attention.query_key_value.lora_"

    def read(name, a, b):
        tensors = {f"{module}A.weight": a, f"{module}B.weight": b}
        (tmp_path / name).mkdir()
        adapters.read_peft(write(tmp_path / name, tensors), dialect, model)

    message = r"has matrices \[3, 32\] and \[96, 3\], and not the rank 2"
    with pytest.raises(UserError, match=message):
        read("rank", random(3, 32), random(96, 3))
    with pytest.raises(UserError, match="has 90 outputs, and the tensor of its family 96"):
        read("size", random(2, 32), random(90, 2))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "only LORA is supported"),
        ({"use_dora": True}, "use_dora = True is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save = .'lm_head'. is not supported"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern = .* must have a positive number for each"),
        ({"alpha_pattern": {"[qv]_proj": 4}}, "has the regular expression '.qv._proj', which is"),
        ({"r": 0}, "must be positive"),
        ({"bias": "lora_only"}, "bias = 'lora_only' is not supported"),
        ({"use_rslora": "yes"}, "use_rslora = 'yes' must be true or false"),
        *(({"init_lora_weights": name}, f"init_lora_weights = '{name}' changes the weights of the")
          for name in ("pissa", "pissa_niter_4", "OLoRA", "corda", "loftq", "lora_ga", "later")),
        *(({key: value}, f"{key} = .* is not supported. Only plain LoRA is") for key, value in (
            ("alora_invocation_tokens", [5, 6]), ("use_bdlora", {"nblocks": 2}),
            ("arrow_config", {"top_k": 2}), ("use_qalora", True), ("kasa_config", {"beta": 1}),
            ("monteclora_config", {"mc_training": True}), ("key_of_a_later_version", 1),
        )),
    ],
)  # fmt: skip
def test_unsupported_adapter_is_refused(tmp_path, config, message):
    directory = write(tmp_path, {}, **config)
    with pytest.raises(UserError, match=message):
        adapters.read_config(directory)


def test_keys_without_effect_are_accepted(tmp_path):
    keys = {"init_lora_weights": "eva", "eva_config": {"rho": 2}, "corda_config": {"beta": 1},
            "bias": "none", "use_dora": False, "target_modules": ["q_proj"], "task_type": "X",
            "key_of_a_later_version": None, "another": [], "qalora_group_size": 16}  # fmt: skip
    assert adapters.read_config(write(tmp_path, {}, **keys)).lora.rank == 2


BASES = [
    ("adapter", "holds adapters. Merge them"),
    ("other", "holds adapters. Merge them"),  # whose base is the adapter
    ("run", "holds adapters. Merge them"),
    ("gs://bucket/model", "'gs://bucket/model' is a URL, which is not opened"),
    ("s3:/bucket/model", "is a URL, which is not opened"),
    ("a" * 100_000, "a\\.\\.\\.' is not a checkpoint on this machine. Download"),
    ("a\0b", "is not a checkpoint on this machine"),
]


@pytest.mark.parametrize(("base", "message"), BASES, ids=[base[:9] for base, _ in BASES])
def test_base_of_an_adapter_must_be_a_model_on_this_machine(tmp_path, monkeypatch, base, message):
    monkeypatch.chdir(tmp_path)
    for name, named in (("adapter", base), ("other", "adapter")):
        Path(name).mkdir()
        tensors = {"base_model.model.x.lora_A.weight": random(2, 4)}
        write(tmp_path / name, tensors, base_model_name_or_path=named)
    stored = tmp_path / "run" / "checkpoints" / "step_3"
    (stored / "state").mkdir(parents=True)
    (stored / "config").mkdir()
    (stored / "config" / "metadata").write_text('{"lora": {"rank": 2}}')
    with pytest.raises(UserError, match=message) as caught:
        checkpoints.find("adapter").required_config(None, ())
    assert len(str(caught.value)) < 1000


def test_incomplete_or_unknown_matrices_are_refused(tmp_path):
    dialect = FAMILIES["llama"].dialect
    tensors = adapters.peft_tensors(adapter_of(), dialect, MODEL)
    lost = next(iter(tensors))
    without = {key: tensor for key, tensor in tensors.items() if key != lost}
    with pytest.raises(UserError, match=f"{lost} is missing"):
        adapters.read_peft(write(tmp_path, without), dialect, MODEL)
    more = tensors | {"base_model.model.model.layers.7.mlp.up_proj.lora_A.weight": random(2, 32)}
    with pytest.raises(UserError, match=r"layers.7.* belongs to no linear layer"):
        adapters.read_peft(write(tmp_path, more), dialect, MODEL)


def test_merged_weight_does_not_depend_on_the_block_that_is_read():
    layer = LAYERS[-1]
    native = adapter_of(layers=[layer])
    base = {f"{layer}.weight": random(32, 48)}
    merged = adapters.merge(CheckpointState(base), native, 0.7).params[f"{layer}.weight"]
    whole, elements = merged.all(), np.empty((32, 48), np.float32)
    for row, column in np.ndindex(whole.shape):
        index = (slice(row, row + 1), slice(column, column + 1))
        elements[index] = merged.read(index)
    np.testing.assert_array_equal(whole, elements)


def test_adapter_of_another_shape_is_refused():
    other = ModelConfig(**{**SHAPE, "dim": 64}, ffn_hidden_dim=48)
    zeros = {
        name: from_array(np.zeros(shape, np.float32)) for name, shape in parameters(other).items()
    }
    with pytest.raises(
        UserError, match=r"the adapter is for a weight \[32, 32\], which is \[64, 64\]"
    ):
        adapters.merge(CheckpointState(zeros), adapter_of(), 1.0)
