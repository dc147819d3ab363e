"""Tests of grouped products: values, gradients, and the number of multiplied rows."""

import functools
import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxforge.errors import UserError
from jaxforge.kernels import grouped_blocks, grouped_mosaic, megablox
from jaxforge.kernels.grouped import (
    GROUPED_BACKENDS,
    ProductRequirements,
    choose_grouped,
    grouped_matmul,
)
from jaxforge.parallel import targets

INP, OUT = 16, 24
SIZES = {
    "even": (100, [25, 25, 25, 25]),
    "uneven": (100, [10, 0, 50, 40]),
    "one has all": (100, [0, 100, 0, 0]),
    "more than one block": (300, [270, 3, 20, 7]),
    "rows beyond": (100, [1, 2, 3, 30]),
    "none": (64, [0, 0, 0, 0]),
    "few rows": (5, [2, 3, 0, 0]),
}


def one_hot_matmul(x, w, sizes):
    """Multiply every row with every group, and mask the products."""
    ends = jnp.cumsum(sizes)
    row = jnp.arange(x.shape[0])[:, None]
    belongs = (row >= ends - sizes) & (row < ends)
    return jnp.einsum(
        "mg,goi,mi->mo", belongs.astype(jnp.float32), w.astype(jnp.float32),
        x.astype(jnp.float32), precision="highest",
    ).astype(x.dtype)  # fmt: skip


def random(rows, groups=4, dtype=jnp.float32, inp=INP, out=OUT):
    """Return rows, weights and a gradient of the result."""
    rng = np.random.default_rng(0)
    shapes = (rows, inp), (groups, out, inp), (rows, out)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def value_and_gradients(matmul, x, w, dy, sizes):
    y, gradients = jax.vjp(lambda x, w: matmul(x, w, sizes), x, w)
    return y, *gradients(dy)


blocks = functools.partial(grouped_matmul, backend="blocks")
compiled = jax.jit(functools.partial(value_and_gradients, blocks))
reference = jax.jit(functools.partial(value_and_gradients, one_hot_matmul))


def assert_close(computed, reference_result, tolerance):
    for a, b in zip(computed, reference_result, strict=True):
        assert a.dtype == b.dtype
        a, b = (np.asarray(array, np.float32) for array in (a, b))
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1, np.abs(b).max()))


@pytest.mark.parametrize(("rows", "sizes"), SIZES.values(), ids=SIZES)
def test_grouped_matmul_matches_reference(rows, sizes):
    x, w, dy = random(rows)
    sizes = np.asarray(sizes, np.int32)
    assert_close(compiled(x, w, dy, sizes), reference(x, w, dy, sizes), 1e-6)


def test_bfloat16_products_are_summed_in_float32():
    """Sums are float32, so that only the result is rounded."""
    x, w, dy = random(100, dtype=jnp.bfloat16)
    sizes = np.array([10, 0, 50, 40], np.int32)
    assert_close(compiled(x, w, dy, sizes), reference(x, w, dy, sizes), 2**-8)
    # The gradient of float32 weights is float32.
    computed = compiled(x, w.astype(jnp.float32), dy, sizes)
    assert computed[0].dtype == jnp.bfloat16
    assert_close(computed[2:], reference(x, w.astype(jnp.float32), dy, sizes)[2:], 1e-6)


def with_fill(x, end, value):
    """Return the rows with a value in all rows from `end` on."""
    return np.where(np.arange(len(x))[:, None] < end, x, np.asarray(value, x.dtype))


def test_rows_beyond_groups_do_not_contribute():
    x, w, dy = random(100)
    sizes = np.array([10, 0, 50, 20], np.int32)
    expected = compiled(x, w, dy, sizes)
    computed = compiled(with_fill(x, 80, np.nan), w, with_fill(dy, 80, np.inf), sizes)
    for a, b in zip(computed, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_every_row_is_multiplied_once():
    """With weights and rows of ones, each row of the result is the width, or zero."""
    rng = np.random.default_rng(0)
    units = [np.ones(shape, np.float32) for shape in ((97, 8), (5, 8, 8), (97, 8))]
    for _ in range(40):
        total = rng.integers(0, 98)
        sizes = rng.multinomial(total, rng.dirichlet(np.full(5, 0.3))).astype(np.int32)
        y, dx, dw = map(np.asarray, compiled(*units, sizes))
        np.testing.assert_array_equal(y[:, 0], 8 * (np.arange(97) < total))
        np.testing.assert_array_equal(dx[:, 0], 8 * (np.arange(97) < total))
        np.testing.assert_array_equal(dw[:, 0, 0], sizes)


def test_grouped_matmul_inside_scan_and_checkpoint():
    x, w, dy = random(60, out=INP)
    layers = np.stack([w, w[::-1], 0.5 * w])
    sizes = np.array([20, 5, 0, 30], np.int32)

    def loss(matmul, x, layers):
        @jax.checkpoint
        def layer(x, w):
            return x + matmul(jnp.tanh(x), w, sizes), None

        return jnp.sum(jax.lax.scan(layer, x, layers)[0] * dy)

    def of(matmul):
        return jax.jit(jax.value_and_grad(functools.partial(loss, matmul), (0, 1)))(x, layers)

    (value, gradients), (expected, expected_gradients) = of(blocks), of(one_hot_matmul)
    assert_close([value, *gradients], [expected, *expected_gradients], 1e-5)


@pytest.mark.parametrize("weights", [P(), P("data")], ids=["whole", "split"])
def test_grouped_matmul_inside_shard_map(weights):
    """Devices have different rows; gradients of shared arrays are summed."""
    mesh = jax.make_mesh((4, 2), ("data", "other"), axis_types=(AxisType.Auto,) * 2)
    rng = np.random.default_rng(0)
    sizes = rng.multinomial(30, np.full(4, 0.25), size=4).astype(np.int32)
    x, w, dy = random(4 * 40, groups=16 if weights else 4)

    def local(x, w, sizes):
        return grouped_matmul(x, w, sizes[0], "blocks")

    spread = jax.shard_map(
        local, mesh=mesh, in_specs=(P("data"), weights, P("data")), out_specs=P("data")
    )

    def device_by_device(x, w, sizes):
        own = jnp.split(w, 4) if weights else [w] * 4
        parts = zip(jnp.split(x, 4), own, sizes, strict=True)
        return jnp.concatenate([one_hot_matmul(*part) for part in parts])

    computed, expected = (
        jax.jit(functools.partial(value_and_gradients, matmul))(x, w, dy, sizes)
        for matmul in (spread, device_by_device)
    )
    assert_close(computed, expected, 1e-6)


def test_multiplied_rows_are_at_most_ten_percent_padding():
    """All three products; a dense product would take 16 times as much, and the bound is 1.1.

    Multiplied rows are the rows of each loop body times its iterations. The compiler counts a loop
    body once, so that its FLOPs are those of one block of each of `row_block_sizes`. The number of
    iterations comes from `_block_table`. `test_every_row_is_multiplied_once` checks that blocks
    cover each row once.
    """
    groups, rows = 16, 4096
    block_sizes = grouped_blocks.row_block_sizes(rows, groups)
    shapes = (rows, 4 * INP), (groups, 4 * OUT, 4 * INP), (rows, 4 * OUT)
    x, w, dy = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    sizes = jax.ShapeDtypeStruct((groups,), jnp.int32)
    for product, arguments in (
        (grouped_blocks.matmul, (x, w)),
        (grouped_blocks.gradient_of_rows, (dy, w)),
        (grouped_blocks.gradient_of_weights, (x, dy)),
    ):
        program = jax.jit(product).lower(*arguments, sizes).compile()
        assert program.as_text().count(" while(") == len(block_sizes)
        counted = program.cost_analysis()["flops"] / (2 * INP * OUT * 16)
        assert (
            sum(block_sizes) <= counted <= 1.1 * sum(block_sizes)
        )  # includes masks and the block table
    plan = jax.jit(lambda sizes: grouped_blocks.block_table(sizes, rows, block_sizes)[1])
    rng = np.random.default_rng(0)
    skewed, usual = (rng.dirichlet([alpha] * groups) for alpha in (1.0, 4.0))
    for shares in (skewed, usual, np.full(groups, 1 / groups)):
        firsts = plan(rng.multinomial(rows, shares).astype(np.int32))
        assert rows <= np.dot(block_sizes, np.diff(firsts)) <= 1.1 * rows


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("rows", "sizes"), [SIZES["uneven"], (300, [10, 0, 250, 20])])
def test_interpreted_megablox_matches_reference(monkeypatch, rows, sizes, dtype):
    monkeypatch.setattr(megablox, "INTERPRET", True)
    x, w, dy = random(rows, dtype=dtype, inp=64, out=136)
    total, sizes = sum(sizes), np.asarray(sizes, np.int32)
    matmul = functools.partial(grouped_matmul, backend="megablox")
    computed = jax.jit(functools.partial(value_and_gradients, matmul))
    result = [
        run(with_fill(x, total, fill), w, with_fill(dy, total, fill), sizes)
        for run, fill in ((computed, np.nan), (reference, 0))
    ]
    computed, expected = (
        (np.asarray(y)[:total], np.asarray(dx)[:total], dw) for y, dx, dw in result
    )
    assert_close(computed, expected, 1e-6 if dtype == jnp.float32 else 2**-8)


def test_megablox_tiles_pad_at_most_ten_percent():
    for size in (64, 128, 512, 1408, 2048, 4096, 11008, 14336):
        result = megablox.tile(size, 1024)
        assert -(-size // result) * result <= 1.1 * size
        assert result == size or result % 128 == 0


def test_mosaic_blocks_hold_one_group_each():
    """No block of 64 positions has rows of two groups, and each row has one position."""
    sizes = np.array([0, 70, 0, 64, 1, 0])
    layout = jax.jit(lambda sizes: grouped_mosaic.block_layout(sizes, 150))
    first, count, row, is_row = map(np.asarray, layout(sizes))
    np.testing.assert_array_equal(count, [0, 2, 0, 1, 1, 0])
    np.testing.assert_array_equal(row[is_row], np.arange(135))
    group = np.repeat(np.arange(6), sizes)
    for g in np.flatnonzero(count):
        offsets = slice(64 * first[g], 64 * (first[g] + count[g]))
        assert set(group[row[offsets][is_row[offsets]]]) == {g}


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="no compiler for TPU")
def test_megablox_compiles_for_tpu():
    """The program has three kernels, no other product, and only active FLOPs."""
    devices = topologies.get_topology_desc("v5e:2x2", platform="tpu").devices
    program = compile_for(devices, "megablox", rows=1000, inp=200, out=330)
    assert program.as_text().count('custom_call_target="tpu_custom_call"') == 3
    assert not re.search(r" (dot|convolution)\(", program.as_text())
    assert program.cost_analysis()["flops"] <= 1.1 * 3 * 2 * 1000 * 200 * 330


def compile_for(devices, backend, rows, inp, out, groups=4):
    """Compile a product and its gradients on each device."""
    mesh = jax.sharding.Mesh(np.asarray(devices), "data")
    split = jax.sharding.NamedSharding(mesh, P("data"))
    x, w, dy = (
        jax.ShapeDtypeStruct((mesh.size * shape[0], *shape[1:]), jnp.bfloat16, sharding=split)
        for shape in ((rows, inp), (groups, out, inp), (rows, out))
    )
    sizes = jax.ShapeDtypeStruct((mesh.size * groups,), jnp.int32, sharding=split)
    local = functools.partial(
        value_and_gradients, functools.partial(grouped_matmul, backend=backend)
    )
    on_all_devices = jax.shard_map(
        local, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False
    )
    return jax.jit(on_all_devices).lower(x, w, dy, sizes).compile()


@pytest.mark.skipif(not targets.has_gpu_compiler(), reason="XLA's compiler for GPUs is missing")
def test_mosaic_compiles_for_h100():
    """Compilation reaches PTX, forward and both gradients, with no product outside of kernels."""
    text = compile_for(targets.gpus("h100"), "mosaic_gpu", rows=1000, inp=192, out=320).as_text()
    assert text.count('custom_call_target="mosaic_gpu') == 3
    assert "__cublas" not in text
    assert "__triton_gemm" not in text
    assert " dot(" not in text


CPU = ProductRequirements("cpu", jnp.float32, (512, 1408))
TPU = ProductRequirements("tpu", jnp.bfloat16, (512, 1408))
GPU = ProductRequirements("gpu", jnp.bfloat16, (512, 1408), "9.0")


@pytest.mark.parametrize(
    ("at", "name"),
    [
        (CPU, "blocks"),
        (TPU, "megablox"),
        (GPU, "mosaic_gpu"),
        (GPU._replace(dtype=jnp.float32), "blocks"),
        (GPU._replace(widths=(512, 1000)), "blocks"),
        (GPU._replace(capability="8.0"), "blocks"),
        (TPU._replace(dtype=jnp.float16), "blocks"),
    ],
)
def test_auto_chooses_supported_grouped_backend(at, name):
    assert choose_grouped("auto", at) == name
    assert choose_grouped("blocks", at) == "blocks"


@pytest.mark.parametrize(
    ("asked", "at", "message"),
    [
        ("megablox", CPU, "needs a TPU, and this run is on cpu"),
        ("megablox", TPU._replace(dtype=jnp.float16), "bf16 or fp32"),
        ("mosaic_gpu", TPU, "needs an NVIDIA GPU, and this run is on tpu"),
        ("mosaic_gpu", GPU._replace(capability="10.0"), "Hopper.*these GPUs have 10.0"),
        ("mosaic_gpu", GPU._replace(dtype=jnp.float32), "bf16 or fp16"),
        ("mosaic_gpu", GPU._replace(widths=(512, 1000)), "multiples of 64.*1000"),
    ],
)
def test_unsupported_grouped_backend_raises(asked, at, message):
    with pytest.raises(UserError, match=message):
        choose_grouped(asked, at)


def test_config_lists_all_grouped_backends():
    from jaxforge.config.model import ModelConfig

    names = ModelConfig.model_fields["moe_backend"].annotation.__args__
    assert set(names) == {"auto", *GROUPED_BACKENDS}
