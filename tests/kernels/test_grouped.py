"""Rows times their group's weights: values, gradients, and that nothing else is multiplied."""

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
from jaxforge.kernels.grouped import GROUPED, ProductRequirements, choose_grouped, grouped_matmul
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
    """Every row with every group, and then the sum over groups of what counts."""
    ends = jnp.cumsum(sizes)
    row = jnp.arange(x.shape[0])[:, None]
    belongs = (row >= ends - sizes) & (row < ends)
    return jnp.einsum(
        "mg,goi,mi->mo", belongs.astype(jnp.float32), w.astype(jnp.float32),
        x.astype(jnp.float32), precision="highest",
    ).astype(x.dtype)  # fmt: skip


def random(rows, groups=4, dtype=jnp.float32, inp=INP, out=OUT):
    """Rows, weights and a gradient of the result."""
    rng = np.random.default_rng(0)
    shapes = (rows, inp), (groups, out, inp), (rows, out)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def value_and_gradients(matmul, x, w, dy, sizes):
    y, gradients = jax.vjp(lambda x, w: matmul(x, w, sizes), x, w)
    return y, *gradients(dy)


blocks = functools.partial(grouped_matmul, backend="blocks")
compiled = jax.jit(functools.partial(value_and_gradients, blocks))
reference = jax.jit(functools.partial(value_and_gradients, one_hot_matmul))


def assert_close(ours, theirs, tolerance):
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        a, b = (np.asarray(array, np.float32) for array in (a, b))
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1, np.abs(b).max()))


@pytest.mark.parametrize(("rows", "sizes"), SIZES.values(), ids=SIZES)
def test_values_and_gradients(rows, sizes):
    x, w, dy = random(rows)
    sizes = np.asarray(sizes, np.int32)
    assert_close(compiled(x, w, dy, sizes), reference(x, w, dy, sizes), 1e-6)


def test_bfloat16():
    """Sums are float32; what is left is rounding the result."""
    x, w, dy = random(100, dtype=jnp.bfloat16)
    sizes = np.array([10, 0, 50, 40], np.int32)
    assert_close(compiled(x, w, dy, sizes), reference(x, w, dy, sizes), 2**-8)
    # Weights may stay in float32: so does their gradient.
    got = compiled(x, w.astype(jnp.float32), dy, sizes)
    assert got[0].dtype == jnp.bfloat16
    assert_close(got[2:], reference(x, w.astype(jnp.float32), dy, sizes)[2:], 1e-6)


def with_rest(x, end, value):
    """Rows from the end on are that."""
    return np.where(np.arange(len(x))[:, None] < end, x, np.asarray(value, x.dtype))


def test_rows_beyond_may_hold_anything():
    x, w, dy = random(100)
    sizes = np.array([10, 0, 50, 20], np.int32)
    expected = compiled(x, w, dy, sizes)
    got = compiled(with_rest(x, 80, np.nan), w, with_rest(dy, 80, np.inf), sizes)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_any_sizes_are_covered_once():
    """Weights of one and rows of one: each row of the result is the width, or zero."""
    rng = np.random.default_rng(0)
    units = [np.ones(shape, np.float32) for shape in ((97, 8), (5, 8, 8), (97, 8))]
    for _ in range(40):
        total = rng.integers(0, 98)
        sizes = rng.multinomial(total, rng.dirichlet(np.full(5, 0.3))).astype(np.int32)
        y, dx, dw = map(np.asarray, compiled(*units, sizes))
        np.testing.assert_array_equal(y[:, 0], 8 * (np.arange(97) < total))
        np.testing.assert_array_equal(dx[:, 0], 8 * (np.arange(97) < total))
        np.testing.assert_array_equal(dw[:, 0, 0], sizes)


def test_inside_scan_and_checkpoint():
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
def test_inside_shard_map(weights):
    """Each of eight devices has rows of its own; what they share gets the sum of gradients."""
    mesh = jax.make_mesh((4, 2), ("data", "other"), axis_types=(AxisType.Auto,) * 2)
    rng = np.random.default_rng(0)
    sizes = rng.multinomial(30, np.full(4, 0.25), size=4).astype(np.int32)
    x, w, dy = random(4 * 40, groups=16 if weights else 4)

    def local(x, w, sizes):
        return grouped_matmul(x, w, sizes[0], "blocks")

    spread = jax.shard_map(
        local, mesh=mesh, in_specs=(P("data"), weights, P("data")), out_specs=P("data")
    )

    def one_by_one(x, w, sizes):
        own = jnp.split(w, 4) if weights else [w] * 4
        parts = zip(jnp.split(x, 4), own, sizes, strict=True)
        return jnp.concatenate([one_hot_matmul(*part) for part in parts])

    got, expected = (
        jax.jit(functools.partial(value_and_gradients, matmul))(x, w, dy, sizes)
        for matmul in (spread, one_by_one)
    )
    assert_close(got, expected, 1e-6)


def test_no_more_is_multiplied_than_is_active():
    """All three products; a dense one would be 16 times as much, and the bound is 1.1.

    Rows that are multiplied are those of each loop's body, times its turns. The compiler counts
    the body of a loop once, and so says that the bodies together have as many rows as all of
    `rungs`. How often each is run is what `_plan` says; that those blocks are the rows, once each,
    is `test_any_sizes_are_covered_once`.
    """
    groups, rows = 16, 4096
    ladder = grouped_blocks.row_block_sizes(rows, groups)
    shapes = (rows, 4 * INP), (groups, 4 * OUT, 4 * INP), (rows, 4 * OUT)
    x, w, dy = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    sizes = jax.ShapeDtypeStruct((groups,), jnp.int32)
    for product, arguments in (
        (grouped_blocks.matmul, (x, w)),
        (grouped_blocks.gradient_of_rows, (dy, w)),
        (grouped_blocks.gradient_of_weights, (x, dy)),
    ):
        program = jax.jit(product).lower(*arguments, sizes).compile()
        assert program.as_text().count(" while(") == len(ladder)
        counted = program.cost_analysis()["flops"] / (2 * INP * OUT * 16)
        assert sum(ladder) <= counted <= 1.1 * sum(ladder)  # masks and the plan are in it
    plan = jax.jit(lambda sizes: grouped_blocks._block_table(sizes, rows, ladder)[1])
    rng = np.random.default_rng(0)
    skewed, usual = (rng.dirichlet([alpha] * groups) for alpha in (1.0, 4.0))
    for shares in (skewed, usual, np.full(groups, 1 / groups)):
        firsts = plan(rng.multinomial(rows, shares).astype(np.int32))
        assert rows <= np.dot(ladder, np.diff(firsts)) <= 1.1 * rows


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("rows", "sizes"), [SIZES["uneven"], (300, [10, 0, 250, 20])])
def test_megablox_in_the_interpreter(monkeypatch, rows, sizes, dtype):
    monkeypatch.setattr(megablox, "_INTERPRET", True)
    x, w, dy = random(rows, dtype=dtype, inp=64, out=136)
    total, sizes = sum(sizes), np.asarray(sizes, np.int32)
    matmul = functools.partial(grouped_matmul, backend="megablox")
    ours = jax.jit(functools.partial(value_and_gradients, matmul))
    result = [
        run(with_rest(x, total, remaining), w, with_rest(dy, total, remaining), sizes)
        for run, remaining in ((ours, np.nan), (reference, 0))
    ]
    got, expected = ((np.asarray(y)[:total], np.asarray(dx)[:total], dw) for y, dx, dw in result)
    assert_close(got, expected, 1e-6 if dtype == jnp.float32 else 2**-8)


def test_tiles_of_megablox_waste_little():
    for size in (64, 128, 512, 1408, 2048, 4096, 11008, 14336):
        result = megablox.tile(size, 1024)
        assert -(-size // result) * result <= 1.1 * size
        assert result == size or result % 128 == 0


def test_rows_laid_apart_for_mosaic():
    """No block of 64 places has rows of two groups, and each row has one place."""
    sizes = np.array([0, 70, 0, 64, 1, 0])
    apart = jax.jit(lambda sizes: grouped_mosaic._block_layout(sizes, 150))
    first, count, row, is_row = map(np.asarray, apart(sizes))
    np.testing.assert_array_equal(count, [0, 2, 0, 1, 1, 0])
    np.testing.assert_array_equal(row[is_row], np.arange(135))
    group = np.repeat(np.arange(6), sizes)
    for g in np.flatnonzero(count):
        offsets = slice(64 * first[g], 64 * (first[g] + count[g]))
        assert set(group[row[offsets][is_row[offsets]]]) == {g}


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="no compiler for TPU")
def test_megablox_compiles_for_tpu():
    """Three kernels and no other product; as many FLOPs as are active."""
    devices = topologies.get_topology_desc("v5e:2x2", platform="tpu").devices
    program = compile_for(devices, "megablox", rows=1000, inp=200, out=330)
    assert program.as_text().count('custom_call_target="tpu_custom_call"') == 3
    assert not re.search(r" (dot|convolution)\(", program.as_text())
    assert program.cost_analysis()["flops"] <= 1.1 * 3 * 2 * 1000 * 200 * 330


def compile_for(devices, backend, rows, inp, out, groups=4):
    """A product and its gradients on each of some devices."""
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
    of_all = jax.shard_map(
        local, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False
    )
    return jax.jit(of_all).lower(x, w, dy, sizes).compile()


@pytest.mark.skipif(not targets.gpu_compiler_is_here(), reason="XLA's compiler for GPUs is missing")
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
def test_auto_takes_what_can_serve(at, name):
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
def test_one_that_cannot_serve_says_why(asked, at, message):
    with pytest.raises(UserError, match=message):
        choose_grouped(asked, at)


def test_every_backend_that_is_named_is_there():
    from jaxforge.config.model import ModelConfig

    names = ModelConfig.model_fields["moe_backend"].annotation.__args__
    assert set(names) == {"auto", *GROUPED}
