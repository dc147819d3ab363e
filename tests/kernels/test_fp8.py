"""Tests of 8-bit products against NumPy with the same rounding, and of the layers that use them."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxforge.aux_outputs import LossWeights
from jaxforge.config.train import TrainConfig
from jaxforge.errors import UserError
from jaxforge.kernels import fp8
from jaxforge.model.fp8_layers import Recipe, describe_products
from jaxforge.model.linear import Linear
from jaxforge.model.network import Block, Transformer
from jaxforge.model.transformer import Model, build_model, join
from tests.conftest import tiny_config

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
TOKENS, INPUTS, OUTPUTS = 24, 160, 136
SEEN = fp8.Amaxes(
    jnp.float32(1.5), jnp.float32(0.07)
)  # below the actual amax: larger values saturate


def reference(x, dtype, seen=None):
    """Return x after rounding with one scale."""
    largest = float(ml_dtypes.finfo(dtype).max)
    amax = np.abs(x).max() if seen is None else float(seen)
    scale = 2.0 ** np.floor(np.log2(largest / amax))
    return np.clip(x * scale, -largest, largest).astype(dtype).astype(np.float64) / scale


def reference_blocks(x, rows, columns):
    out = np.zeros(x.shape)
    for r in range(0, x.shape[0], rows):
        for c in range(0, x.shape[1], columns):
            part = np.s_[r : r + rows, c : c + columns]
            out[part] = reference(x[part], E4M3)
    return out


def expected(scaling, x, w, d_y):
    if scaling == "block":
        y = reference_blocks(x, 1, 128) @ reference_blocks(w, 128, 128).T
        d_x = reference_blocks(d_y, 1, 128) @ reference_blocks(w, 128, 128)
        return y, d_x, reference_blocks(d_y, 128, 1).T @ reference_blocks(x, 128, 1)
    seen = SEEN if scaling == "delayed" else fp8.Amaxes(None, None)
    x, w, d_y = reference(x, E4M3, seen.x), reference(w, E4M3, seen.weight), reference(d_y, E5M2)
    return x @ w.T, d_y @ w, d_y.T @ x


def numbers():
    """Return x, W and dy in bf16; magnitudes differ so much between blocks that scales matter."""
    rng = np.random.default_rng(0)
    result = []
    for rows, columns, size in (
        (TOKENS, INPUTS, 1.0), (OUTPUTS, INPUTS, 0.02), (TOKENS, OUTPUTS, 1e-6),
    ):  # fmt: skip
        by_row = 4.0 ** rng.integers(-8, 1, (rows, 1))
        by_column = np.where(np.arange(columns) < 128, 1.0, 2.0**-12)
        x = size * rng.standard_normal((rows, columns)) * by_row * by_column
        result.append(x.astype(ml_dtypes.bfloat16))
    return result


def multiply(scaling, is_on=True, regathers=True, w=None):
    """Return the result and the gradients of x, W and bias."""
    x, weight, d_y = numbers()
    weight = np.float32(weight) if w is None else w
    settings = fp8.Fp8("one", scaling, ("mlp", "embed"), jnp.dtype(jnp.float32), regathers)

    @jax.jit
    def run(x, w, b, switch):
        product = functools.partial(
            fp8.product, settings, amaxes=SEEN if scaling == "delayed" else None,
            precision=fp8.LayerPrecision(switch if is_on is None else is_on),
        )  # fmt: skip
        y, back = jax.vjp(product, x, w, b)
        return y, *back(jnp.asarray(d_y))

    return run(x, weight, np.zeros(OUTPUTS, np.float32), True)


@pytest.mark.parametrize("scaling", ["tensor", "delayed", "block"])
@pytest.mark.parametrize("is_on", [True, None], ids=["on", "switched on"])
def test_fp8_products_match_rounded_operands(scaling, is_on):
    references = expected(scaling, *(np.float64(each) for each in numbers()))
    y, d_x, d_w, d_b = multiply(scaling, is_on)
    assert (y.dtype, d_x.dtype, d_w.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    for result, reference_value, bits in zip((y, d_x, d_w), references, (8, 8, 16), strict=True):
        size = np.abs(reference_value)  # magnitudes of rows and columns differ widely
        typical = np.minimum(size.mean(1, keepdims=True), size.mean(0))
        error = np.abs(np.float64(result) - reference_value)
        assert (error <= 2.0**-bits * (size + typical)).all()
    np.testing.assert_allclose(d_b, np.float64(numbers()[2]).sum(0), rtol=1e-5, atol=1e-12)


def test_saved_weight_gives_same_gradients_as_regathered():
    saved, regathered = multiply("tensor", regathers=False), multiply("tensor")
    jax.tree.map(np.testing.assert_array_equal, saved, regathered)


def test_nonfinite_values_survive_rounding():
    """Overflow saturates; NaN and infinity stay non-finite."""
    _, w, _ = numbers()
    for bad in (np.nan, np.inf):
        broken = np.float32(w)
        broken[3, 5] = bad
        assert not np.isfinite(np.float32(multiply("tensor", w=broken)[0])[:, 3]).any()


def test_zero_weights_give_zero_products():
    y, *_ = multiply("tensor", w=np.zeros((OUTPUTS, INPUTS), np.float32))
    np.testing.assert_array_equal(np.float32(y), 0)


def model_of(experts=False, **train):
    keys = {"num_experts": 4, "moe_top_k": 2, "moe_shared_experts": 1, "moe_latent_dim": 32}
    model = {"n_layers": 4, **(keys if experts else {})}
    return build_model(tiny_config(model=model, train={"mixed_precision": "fp8", **train}))


def test_first_and_last_layer_stay_in_bf16_by_default():
    model = model_of()
    assert [kind.in_bf16 for kind in model.plan.layers] == [True, False, False, True]
    assert model.plan.period == (0, 1, 1) or model.plan.period.repeats == 2
    whole = model_of(num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16=0)
    assert whole.plan.is_uniform


ATTENTION = {f"attention.{name}_proj" for name in "qkvo"}
MLP = {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}


@pytest.mark.parametrize(
    ("experts", "exclude", "names"),
    [
        (False, (), ATTENTION | MLP),
        (False, ("attention", "layers.mlp.down"), MLP - {"mlp.down_proj"}),
        (True, ("shared_expert",), ATTENTION | {"mlp.latent_down_proj", "mlp.latent_up_proj"}),
        (True, ("shared_expert", "latent_"), ATTENTION),
    ],
)
def test_fp8_exclude_matches_parts_of_names(experts, exclude, names):
    model = model_of(experts, fp8_exclude=exclude)
    assert set(model.module("layers", model.abstract["layers"]).fp8_names) == names


def test_describe_products_raises_on_old_gpu():
    recipe = Recipe.of(TrainConfig(mixed_precision="fp8"))
    assert "multiplied in 8 bits" in describe_products(recipe, "gpu", "9.0", "NVIDIA H100")
    assert "emulated" in describe_products(recipe, "tpu", None, "TPU v5 lite")
    assert "emulated" in describe_products(recipe, "cpu", None, "cpu")
    blocks = recipe._replace(scaling="block")
    assert "multiplied in bf16" in describe_products(blocks, "gpu", "9.0", "NVIDIA H100")
    with pytest.raises(UserError, match=r"8\.9 or more .* not 8\.0: use \"bf16\""):
        describe_products(recipe, "gpu", "8.0", "NVIDIA A100")


def test_linear_layer_in_8_bits_without_precision_raises():
    """A custom block must pass the precision of its layer."""
    model = model_of()
    block = model.module("layers", model.abstract["layers"])
    with pytest.raises(UserError, match=r"attention\.q_proj multiplies .*fp8_exclude"):
        block.attention.q_proj(jnp.zeros((1, 2, model.config.dim)))


class ExtraBlock(Block):
    def __init__(self, config, declare):
        super().__init__(config, declare)
        embed = (config.dim, "embed")
        self.extra = Linear((config.dim, "heads"), embed, std=0.02, declare=declare)

    def __call__(self, x_BSD, context, cache=None, *, settings):
        precision = self.precision(settings.kind, context)
        x_BSD = x_BSD + self.extra(x_BSD, precision)
        return super().__call__(x_BSD, context, cache, settings=settings, precision=precision)


class ExtraNetwork(Transformer):
    def __init__(self, config, declare):
        super().__init__(config, declare)
        self.layers = ExtraBlock(config, declare._replace(layers=config.n_layers))


def test_custom_block_returns_amax_of_its_layers():
    recipe = Recipe.of(TrainConfig(mixed_precision="fp8", fp8_scaling="delayed"))
    model = type("Extra", (Model,), {"network": ExtraNetwork})(tiny_config().model, recipe=recipe)
    batch, params = {"input_ids": np.zeros((1, 8), int)}, join(model.abstract, model.state.abstract)
    forward = functools.partial(model.forward, loss_weights=LossWeights(jnp.float32(1)))
    _, out = jax.eval_shape(forward, params, batch)
    assert out.aux.statistics["amax"].keys() == ATTENTION | MLP | {"extra"}
