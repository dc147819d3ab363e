"""Weights in 8 bits with a scale per block: reading, writing, and damaged files."""

import ml_dtypes
import numpy as np
import pytest

from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from torch_compat.checkpoint import hf_config
from torch_compat.formats import block_scaled
from torch_compat.formats.files import Directory
from torch_compat.formats.lazy import LazyTensor, from_array
from torch_compat.formats.safetensors import open_directory

pytest.importorskip("transformers")

from tests.torch_compat.huggingface import (
    config_json,
    config_of,
    export,
    load,
    params_of,
    random_params,
    save_run,
    tensors_of,
)

SHAPES = [(256, 128), (300, 130), (5, 7), (129, 1)]


def e4m3(rng, shape):
    """Return every finite number of e4m3, in random order."""
    numbers = np.arange(256, dtype=np.uint8)
    numbers = numbers[np.isfinite(numbers.view(ml_dtypes.float8_e4m3fn).astype(np.float32))]
    return rng.choice(numbers, shape).view(ml_dtypes.float8_e4m3fn)


def random_file(shape, seed=0):
    rng = np.random.default_rng(seed)
    blocks = [-(-n // 128) for n in shape]
    scales = rng.uniform(1e-4, 1e-2, blocks).astype(np.float32)
    return {"a.weight": e4m3(rng, shape), "a.weight_scale_inv": scales}


def lazy(arrays):
    return {name: from_array(array, name) for name, array in arrays.items()}


def index_of(*bounds):
    return tuple(slice(*each) for each in bounds)


@pytest.mark.parametrize("shape", SHAPES)
def test_dequantized_weight_is_product_with_scale_of_its_block(shape):
    file = random_file(shape)
    wide = np.kron(file["a.weight_scale_inv"], np.ones((128, 128), np.float32))
    product = file["a.weight"].astype(np.float32) * wide[: shape[0], : shape[1]]
    norm = np.ones(3, np.float32)
    read = block_scaled.dequantize(lazy({**file, "norm": norm}), (128, 128), "here")
    assert read.keys() == {"a.weight", "norm"}
    weight = read["a.weight"]
    assert weight.shape == shape
    assert weight.all().dtype == weight.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(weight.all(), product.astype(ml_dtypes.bfloat16))
    rows, columns = (shape[0] // 3, shape[0]), (shape[1] // 2, shape[1])
    part = product.astype(ml_dtypes.bfloat16)[slice(*rows), slice(*columns)]
    np.testing.assert_array_equal(weight.read(index_of(rows, columns)), part)


def test_scales_in_e8m0_are_powers_of_two(tmp_path):
    """transformers writes them with `scale_fmt = "ue8m0"`; older files call the dtype U8."""
    torch = pytest.importorskip("torch")
    save_file = pytest.importorskip("safetensors.torch").save_file
    file = random_file((300, 130))
    exponents = np.random.default_rng(1).integers(100, 150, (3, 2)).astype(np.uint8)
    scales = torch.from_numpy(exponents).view(torch.float8_e8m0fnu)
    weight = torch.from_numpy(file["a.weight"].view(np.uint8)).view(torch.float8_e4m3fn)
    written = {"a.weight": weight, "a.weight_scale_inv": scales}
    save_file(written, tmp_path / "model.safetensors")
    wide = torch.kron(scales.float(), torch.ones(128, 128))[:300, :130]
    product = (weight.float() * wide).bfloat16().float().numpy()
    read = open_directory(Directory(tmp_path))
    for form in (read, lazy({**file, "a.weight_scale_inv": exponents})):
        weights = block_scaled.dequantize(form, (128, 128), "here")["a.weight"].all()
        np.testing.assert_array_equal(weights.astype(np.float32), product)


@pytest.mark.parametrize(
    "scale",
    [np.float32("nan"), np.float32("inf"), ml_dtypes.bfloat16("-inf"), np.uint8(255)],
    ids=str,
)
def test_scales_that_are_not_finite_are_refused(scale):
    file = random_file((300, 130))
    file["a.weight_scale_inv"] = np.full((3, 2), 1, scale.dtype)
    file["a.weight_scale_inv"][2, 1] = scale
    weight = block_scaled.dequantize(lazy(file), (128, 128), "here")["a.weight"]
    weight.read(index_of((0, 256), (0, 130)))
    with pytest.raises(
        UserError, match=r"here: a\.weight_scale_inv has a scale that is not finite"
    ):
        weight.read(index_of((250, 300), (0, 130)))


def test_part_is_read_without_the_rest():
    file, asked = random_file((300, 260)), []

    def watched(name):
        def read(index):
            asked.append((name, index))
            return file[name][index]

        return LazyTensor(file[name].shape, file[name].dtype, read, name)

    weight = block_scaled.dequantize({name: watched(name) for name in file}, (128, 128), "")
    index = index_of((130, 140), (0, 260))
    weight["a.weight"].read(index)
    assert ("a.weight", index) in asked
    assert ("a.weight_scale_inv", index_of((1, 2), (0, 3))) in asked


@pytest.mark.parametrize("shape", SHAPES)
def test_quantized_weight_has_largest_value_of_each_block_at_448(shape):
    rng = np.random.default_rng(1)
    values = rng.standard_normal(shape).astype(np.float32)
    values[: min(128, shape[0]), : min(128, shape[1])] *= 100
    written = block_scaled.quantize(lazy({"a.weight": values, "b": values}), {"a.weight"})
    assert list(written) == ["a.weight", "a.weight_scale_inv", "b"]
    numbers, scales = written["a.weight"].all(), written["a.weight_scale_inv"].all()
    for i, j in np.ndindex(scales.shape):
        at = np.s_[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128]
        largest = np.abs(values[at]).max()
        assert scales[i, j] == np.float32(largest / 448)
        assert np.abs(numbers[at].astype(np.float32)).max() == 448
        # e4m3 has 3 bits after the point: half a step is 2^-4 of the value, or 2^-10 when small.
        error = np.abs(numbers[at].astype(np.float32) * scales[i, j] - values[at])
        assert (error <= np.maximum(np.abs(values[at]) / 16, scales[i, j] * 2**-10) * 1.001).all()
    rows, columns = (shape[0] // 2, shape[0]), (0, shape[1])
    part = written["a.weight"].read(index_of(rows, columns))
    np.testing.assert_array_equal(part.view(np.uint8), numbers[slice(*rows)].view(np.uint8))


def test_blocks_of_zeros_stay_zero():
    written = block_scaled.quantize(
        lazy({"a.weight": np.zeros((130, 4), np.float32)}), {"a.weight"}
    )
    assert not written["a.weight"].all().astype(np.float32).any()
    assert (written["a.weight_scale_inv"].all() == 1).all()


def test_values_that_are_not_finite_are_refused():
    values = np.array([[1, np.inf]], np.float32)
    written = block_scaled.quantize(lazy({"a.weight": values}), {"a.weight"})
    with pytest.raises(UserError, match=r"a\.weight: values that are not finite"):
        written["a.weight"].all()


def without(key):
    return {name: array for name, array in random_file((300, 130)).items() if name != key}


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (without("a.weight_scale_inv"), "a.weight is in 8 bits, but a.weight_scale_inv does not"),
        (without("a.weight"), "a.weight_scale_inv are scales of no 8-bit weight"),
        ({**random_file((300, 130)), "a.weight": np.ones((300, 130), np.float32)},
         "a.weight_scale_inv are scales of no 8-bit weight"),
        ({**random_file((300, 130)), "a.weight_scale_inv": np.ones((2, 2), np.float32)},
         "a.weight_scale_inv is [2, 2], but a.weight of [300, 130] has [3, 2] blocks of [128, 128"),
        ({**random_file((300, 130)), "a.weight_scale_inv": np.float32(1)},
         "a.weight_scale_inv is [], but a.weight of [300, 130] has [3, 2] blocks"),
        ({"a.weight": e4m3(np.random.default_rng(0), (2, 3, 4)),
          "a.weight_scale_inv": np.ones((1, 1), np.float32)},
         "a.weight of [2, 3, 4] is not a matrix"),
        *(({**random_file((300, 130)), "a.weight_scale_inv": np.ones((3, 2), dtype)},
           f"a.weight_scale_inv is in {np.dtype(dtype).name}. Scales must be in float32, bfloat16")
          for dtype in (np.int32, np.bool_, np.int8, np.float64, ml_dtypes.float8_e4m3fn)),
    ],
)  # fmt: skip
def test_wrong_scales_are_refused(file, message):
    arrays = {name: np.asarray(array) for name, array in file.items()}
    with pytest.raises(UserError) as error:
        block_scaled.dequantize(lazy(arrays), (128, 128), "here")
    assert str(error.value).startswith("here: ")
    assert message in str(error.value)


# Whole checkpoints

MODEL = ModelConfig(
    dim=160, n_layers=1, n_heads=4, n_kv_heads=2, head_dim=40, vocab_size=32, ffn_hidden_dim=200,
    max_seq_len=32,
)  # fmt: skip


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Return the parameters of a run and its export in 8 bits."""
    path, params = tmp_path_factory.mktemp("scaled"), random_params(MODEL)
    run = save_run(path / "run", config_of(MODEL), params)
    return params, export(run, path / "hf", dtype="fp8")


def test_export_has_keys_and_dtypes_of_deepseek(exported):
    _, directory = exported
    assert config_json(directory)["quantization_config"] == {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }  # fmt: skip
    assert config_json(directory)["dtype"] == config_json(directory)["torch_dtype"] == "bfloat16"
    tensors = tensors_of(directory)
    matrices = {key for key in tensors if f"{key}_scale_inv" in tensors}
    assert matrices == {
        *(f"model.layers.0.self_attn.{m}_proj.weight" for m in "qkvo"),
        *(f"model.layers.0.mlp.{m}_proj.weight" for m in ("gate", "up", "down")),
    }
    assert {tensors[key].dtype.name for key in matrices} == {"float8_e4m3fn"}
    unscaled = [key for key in tensors if key not in matrices and not key.endswith("_scale_inv")]
    assert {tensors[key].dtype.name for key in unscaled} == {"bfloat16"}
    assert tensors["model.layers.0.mlp.down_proj.weight_scale_inv"].shape == (2, 2)


def test_import_restores_weights_to_precision_of_e4m3(exported, tmp_path):
    params, directory = exported
    assert load(directory, tmp_path / "run") == ()
    _, read = params_of(tmp_path / "run")
    for name in ("q_proj", "o_proj"):
        was, now = (x["layers"]["attention"][name]["weight"] for x in (params, read))
        error = np.abs(np.asarray(now, np.float32) - was).max()
        assert 0 < error < np.abs(was).max() / 16 * 1.01


def test_format_by_its_name_in_torch_is_read():
    """The files of MiniMax M2 have this table."""
    table = {
        "activation_scheme": "dynamic", "fmt": "float8_e4m3fn", "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
    }  # fmt: skip
    assert hf_config.block_of_scales({"quantization_config": table}, "here") == (128, 128)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "fp8"}, "quantized in another way than in e4m3 with a scale per block"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "in another way"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "in another way"),
        ({"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [128, 128]}, "another way"),
        ({"quant_method": "gptq", "bits": 4}, "in another way"),
    ],
)
def test_other_quantizations_are_refused(quantization, message):
    config = {"model_type": "llama", "quantization_config": quantization}
    with pytest.raises(UserError, match=message):
        hf_config.model_table(config, "here")


def test_8_bits_are_for_hugging_face_only(exported, tmp_path):
    with pytest.raises(UserError, match="--dtype fp8 is possible with --to hf only"):
        load(exported[1], tmp_path / "run", dtype="fp8")
