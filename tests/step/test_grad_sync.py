"""Reduction of gradients: estimated memory, and the dtype of sums over devices."""

import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from jaxforge.config import rules
from jaxforge.model.transformer import build_model
from jaxforge.parallel import collectives, device_memory
from jaxforge.parallel.mesh import make_mesh
from jaxforge.parallel.sharding import partition_spec
from jaxforge.program import Program
from jaxforge.step.memory import step_memory
from jaxforge.tools.plan.hlo import first_replica_group
from tests.conftest import tiny_config
from tests.helpers import (
    LEARNED,
    collectives_in_loops,
    hlo,
    losses_and_gradients,
    lowered,
    new_setup,
    random_batches,
    setup,
)

COMPUTE = {"reduce_dtype": "compute"}
ROUNDED = {"reduce_dtype": "rounded"}
BF16 = {"mixed_precision": "bf16", "batch_size": 2}
H100 = int(0.75 * 84_942_979_072)  # the fraction that JAX allocates


def mesh_of(config, n_devices):
    shape = rules.mesh_shape(config, n_devices)
    kinds = (AxisType.Auto,) * len(shape)
    return AbstractMesh(tuple(shape.values()), tuple(shape), axis_types=kinds)


def needs(config, n_devices):
    mesh, model = mesh_of(config, n_devices), build_model(config)
    state = Program(config, mesh, model=model).abstract_state()
    return step_memory(config, model, mesh, device_memory.bytes_per_device(state))


# --- The estimate

CASES = {
    "accumulated": ({"grad_accum_steps": 4}, {"dp_shard": 4}),
    "hsdp, products saved": (
        {"activation_checkpointing": "dots_with_no_batch_dims_saveable"},
        {"dp_replicate": 2, "dp_shard": 2},
    ),
    "tp, chunked loss": (
        {"grad_accum_steps": 2, "loss_fn": "chunked_cross_entropy", "ce_chunk_size": 64},
        {"dp_shard": 2, "tp": 2},
    ),
    "1f1b": ({"grad_accum_steps": 4}, {"dp_shard": 2, "pp": 2}),
    "nothing recomputed": ({"activation_checkpointing": "none"}, {"dp_shard": 4}),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("tp, chunked loss", "microbatch"),
        *(
            pytest.param(name, mode, marks=pytest.mark.slow)
            for name, mode in (
                ("1f1b", "update"),
                ("accumulated", "microbatch"),
                ("accumulated", "update"),
                ("1f1b", "microbatch"),
                ("hsdp, products saved", "update"),
                ("nothing recomputed", "microbatch"),
            )
        ),
    ],
)
def test_memory_estimate_is_close_to_compiler(name, mode):
    """Weights and activations have similar sizes; float32, because CPUs compute in float32."""
    of_train, distributed = CASES[name]
    config = tiny_config(
        model={"dim": 256, "n_layers": 16, "n_heads": 4, "n_kv_heads": 4, "vocab_size": 4096,
               "max_seq_len": 256},
        train={"batch_size": 2, "seq_len": 256, "activation_checkpointing": "full",
               "grad_sync": mode, **of_train},
        distributed=distributed,
    )  # fmt: skip
    mesh = make_mesh(config, jax.devices()[:4])
    memory = Program(config, mesh).lower().compile().memory_analysis()
    peak = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    assert 0.7 < needs(config, 4).total / peak < 1.25


# --- Dtype of reductions


def grads(config):
    """Return gradients of a batch on the host."""
    return losses_and_gradients(setup(config), random_batches(config, 1))[1]


MODELS = {
    "biases, learned positions, tied": {**LEARNED, "qkv_bias": True, "tie_embeddings": True},
    "experts": {"num_experts": 4, "moe_top_k": 2, "mlp_bias": True, "moe_router_bias": True},
}
MESHES = {
    "biases, learned positions, tied": {"dp_shard": 2, "pp": 2},
    "experts": {"dp_replicate": 2, "dp_shard": 2, "tp": 2},
}


VARIANTS = [
    {"grad_sync": "microbatch"}, {"grad_sync": "microbatch", **COMPUTE},
    {"grad_sync": "update", **COMPUTE}, {"grad_sync": "microbatch", **ROUNDED},
    {"grad_sync": "update", **ROUNDED},
]  # fmt: skip
COMPARED = {"biases, learned positions, tied": VARIANTS[1:], "experts": VARIANTS[:1]}


@pytest.mark.parametrize(
    "name", [pytest.param("biases, learned positions, tied", marks=pytest.mark.slow), "experts"]
)
def test_grad_sync_modes_give_equal_gradients(name):
    """Gradients differ by the rounding of bfloat16, 2^-8: both modes round different sums."""
    of_train = {**BF16, "grad_accum_steps": 2}

    def gradients_with(**keys):
        sections = {"model": MODELS[name], "train": {**of_train, **keys}}
        return grads(tiny_config(**sections, distributed=MESHES[name]))

    def is_near(job, expected):
        floor = 1e-6  # the gradient of the bias of keys, which does not affect attention
        return np.linalg.norm(job - expected) < 0.015 * np.linalg.norm(expected) + floor

    update = gradients_with(grad_sync="update")
    for keys in COMPARED[name]:
        near = jax.tree.map(is_near, gradients_with(**keys), update)
        assert all(jax.tree.leaves(near)), (keys, near)


def reduced_dtypes(config, directory):
    """Return the dtypes of matrices that devices reduce, after XLA's partitioner.

    Later passes for CPUs convert bfloat16 reductions to float32.
    """
    options = {"xla_dump_to": str(directory), "xla_dump_hlo_pass_re": "spmd.*"}
    lowered(new_setup(config)).compile({**options, "xla_dump_hlo_as_text": True})
    (path,) = directory.glob("*train_step*after_spmd-partitioning*.txt")
    reductions = re.findall(r"= (.+?) (?:all-reduce|reduce-scatter)\((.+)", path.read_text())
    among_devices = [
        result for result, remaining in reductions if len(first_replica_group(remaining, 4)) > 1
    ]
    shapes = [
        shape
        for among_device in among_devices
        for shape in re.findall(r"(\w+)\[([\d,]+)\]", among_device)
    ]
    # Matrices of a layer, embedding and head; other sums are over tokens or of scalars.
    return {dtype for dtype, shape in shapes if set(shape.split(",")) & SIZES and "," in shape}


SIZES = {"64", "16"}  # width of the model, and a device's share of it


@pytest.fixture
def no_cache():
    """Disable the compilation cache: XLA dumps nothing for a cached program."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # JAX checks only once whether a cache exists
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


@pytest.mark.usefixtures("no_cache")
@pytest.mark.parametrize("mode", ["update", pytest.param("microbatch", marks=pytest.mark.slow)])
def test_gradients_are_reduced_in_float32(tmp_path, mode):
    """One layer has experts, the other layer is dense."""

    def dtypes_of(name, model, **keys):
        of_train = {**BF16, "grad_sync": mode, **keys}
        config = tiny_config(model=model, train=of_train, distributed={"dp_shard": 4})
        (tmp_path / name).mkdir()
        return reduced_dtypes(config, tmp_path / name)

    experts = {"num_experts": 4, "feed_forward_pattern": ("dense", "experts")}
    assert dtypes_of("default", experts) == {"f32"}
    assert "bf16" in dtypes_of("compute", {}, **COMPUTE)  # a dense layer suffices


@pytest.mark.usefixtures("no_cache")
def test_compute_reduction_is_float32_without_mixed_precision(tmp_path):
    """`reduce_dtype = "compute"` means float32 without mixed precision."""
    of_train = {"batch_size": 2, "grad_sync": "microbatch", **COMPUTE}
    assert reduced_dtypes(tiny_config(train=of_train, distributed={"dp_shard": 4}), tmp_path) == {
        "f32"
    }


def test_rounded_gradients_are_summed_in_float32_by_their_owners():
    mesh, n = make_mesh(tiny_config(distributed={"dp_shard": 8})), 8
    parts = np.random.default_rng(0).normal(size=(n, 4, 16)).astype(ml_dtypes.bfloat16)
    add = jax.shard_map(
        lambda part: collectives.reduce_gradient(part[0], ("mlp", "embed"), jnp.float32),
        mesh=mesh, in_specs=P("dp_shard"), out_specs=partition_spec(("mlp", "embed")),
    )  # fmt: skip
    expected = functools.reduce(np.add, parts.astype(np.float32))
    np.testing.assert_array_equal(jax.jit(add)(parts), expected)


@pytest.mark.parametrize(
    ("mode", "axes"),
    [
        ("microbatch", {"dp_shard": 4, "tp": 2}),
        ("microbatch", {"dp_shard": 4, "pp": 2}),
        pytest.param("update", {"dp_shard": 4, "tp": 2}, marks=pytest.mark.slow),
        pytest.param("update", {"dp_shard": 4, "pp": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_rounded_gradients_are_sent_in_bf16(mode, axes):
    train = {**BF16, "grad_sync": mode, **ROUNDED}
    text = lowered(setup(tiny_config(train=train, distributed=axes))).as_text()
    sent = re.findall(r"all_to_all.*?\(tensor<([\dx]+)x(\w+)>\)", text)
    assert {dtype for _, dtype in sent} == {"bf16"}


def test_microbatches_add_up_to_shards_in_float32():
    """Gradients of weights are never gathered, neither in a layer nor over layers."""
    of_train = {**BF16, "grad_accum_steps": 4, "activation_checkpointing": "full"}
    config = tiny_config(
        model={"dim": 96, "n_layers": 16, "ffn_hidden_dim": 160},
        train={**of_train, "grad_sync": "microbatch"}, distributed={"dp_shard": 4},
    )  # fmt: skip
    text = hlo(setup(config))
    assert "f32[16,160,24]" in text
    assert not re.search(r"f32\[16,(160,96|96,160)\]", text)


@pytest.mark.parametrize("axes", [{"dp_shard": 8}, {"pp": 2, "dp_shard": 4}], ids=str)
def test_update_program_has_no_open_dimensions(axes):
    """A partly manual program constrains each result to "{?}" (docs/upstream.md)."""
    train = {"batch_size": 1, "grad_accum_steps": 2, "grad_sync": "update"}
    job = setup(tiny_config(train=train, distributed=axes))
    text = lowered(job).as_text()
    assert "sdy.manual_computation" in text
    assert "{?}" not in text


def test_tokens_are_not_gathered_over_groups():
    """Only token ids are, and over `tp` the group's own tokens [1, 40, width]."""
    config = tiny_config(
        train={"batch_size": 1, "seq_len": 40, "grad_accum_steps": 2, "grad_sync": "microbatch"},
        distributed={"dp_shard": 4, "tp": 2},
    )  # fmt: skip
    collectives = collectives_in_loops(hlo(setup(config)))
    gathered = [shape for shape, kind, _ in collectives if kind == "all-gather"]
    assert any("1,40,64]" in shape for shape in gathered)
    assert not [shape for shape in gathered if re.search(r"f32\[(160|4,40),\d+\]", shape)]


def test_remat_policies_save_products_with_gathered_weights():
    """Products reduced in another dtype are saved, too, so that less is recomputed."""

    def temporaries(save):
        config = tiny_config(
            model={"n_layers": 16},
            train={**BF16, "batch_size": 8, "grad_sync": "microbatch",
                   "activation_checkpointing": save},
            distributed={"dp_shard": 4},
        )  # fmt: skip
        text = hlo(setup(config))
        return len(re.findall(r" dot\(|__cpu\$gemm|custom_call_target=\"__\w*dot", text))

    assert temporaries("dots_with_no_batch_dims_saveable") < temporaries("full")
