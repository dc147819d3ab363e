"""Adapters in the layouts of families, and damaged or unsupported files of PEFT."""

import json

import numpy as np
import pytest

from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from torch_compat.checkpoint import adapters
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


def test_merged_elements_are_equal_in_blocks_of_any_shape():
    tensors = {"x.lora_a": random(16, 96), "x.lora_b": random(80, 16)}
    base = CheckpointState({"x.weight": random(80, 96)})
    merged = adapters.merge(base, tensors, 0.3).params["x.weight"]
    whole = merged.all()
    for rows, columns in ((1, 1), (1, 96), (80, 1), (7, 13)):
        for i in range(0, 80, 16):
            index = slice(i, min(80, i + rows)), slice(i, min(96, i + columns))
            np.testing.assert_array_equal(merged.read(index), whole[index])


@pytest.mark.parametrize("family", ["llama", "cohere"])  # cohere rotates neighbouring channels
def test_product_of_exported_matrices_is_the_exported_update(family):
    dialect, ours = FAMILIES[family].dialect, adapter_of()
    theirs = adapters.peft_tensors(ours, dialect, MODEL)
    zeros = {name: t for name, t in zero_weights(MODEL).items() if name[:-7] in LAYERS}
    merged = adapters.merge(CheckpointState(zeros), ours, 0.5)
    expected = dialect.to_dialect(merged.params, MODEL)
    for key, weight in expected.items():
        module = f"base_model.model.{key.removesuffix('.weight')}"
        a, b = (theirs[f"{module}.lora_{matrix}.weight"].all() for matrix in "AB")
        np.testing.assert_allclose(weight.all(), 0.5 * b @ a, rtol=1e-5, atol=1e-6)
    assert len(theirs) == 2 * len(expected) == 2 * len(LAYERS)


@pytest.mark.parametrize("family", ["llama", "cohere"])
def test_import_undoes_export(tmp_path, family):
    dialect, ours = FAMILIES[family].dialect, adapter_of()
    directory = write(tmp_path, adapters.peft_tensors(ours, dialect, MODEL))
    back = adapters.read_peft(directory, dialect, MODEL)
    assert back.keys() == ours.keys()
    for name, tensor in ours.items():
        np.testing.assert_array_equal(back[name].all(), tensor.all(), err_msg=name)
    assert adapters.read_config(directory).scale == 1.5


def test_matrix_that_a_family_stores_with_others_is_refused():
    dialect = FAMILIES["gpt_neox"].dialect
    with pytest.raises(UserError, match=r"_proj: this family stores the matrix as a part of"):
        adapters.peft_tensors(adapter_of(), dialect, MODEL)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "only LORA is supported"),
        ({"use_dora": True}, "use_dora = True is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save = .'lm_head'. is not supported"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
        ({"r": 0}, "must be positive"),
    ],
)
def test_unsupported_adapter_is_refused(tmp_path, config, message):
    directory = write(tmp_path, {}, **config)
    with pytest.raises(UserError, match=message):
        adapters.read_config(directory)


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


def test_adapter_of_another_shape_is_refused():
    other = ModelConfig(**{**SHAPE, "dim": 64}, ffn_hidden_dim=48)
    zeros = {
        name: from_array(np.zeros(shape, np.float32)) for name, shape in parameters(other).items()
    }
    with pytest.raises(
        UserError, match=r"the adapter is for a weight \[32, 32\], which is \[64, 64\]"
    ):
        adapters.merge(CheckpointState(zeros), adapter_of(), 1.0)
