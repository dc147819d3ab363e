"""Compilation of meshes for GPUs as target hardware (`make test-gpu-compiler`)."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest

from jaxforge.config import rules
from jaxforge.config.job import JobConfig
from jaxforge.errors import UserError
from jaxforge.model import decoding
from jaxforge.model.sampling import Sampling
from jaxforge.model.transformer import build_model
from jaxforge.parallel import targets, xla_flags
from jaxforge.parallel.mesh import make_mesh
from jaxforge.parallel.sharding import param_shardings
from jaxforge.program import Program
from jaxforge.training.evaluation import make_eval_step

compiles = pytest.mark.skipif(
    not targets.has_gpu_compiler(),
    reason="needs XLA's compiler for GPUs, 4 GB: make test-gpu-compiler",
)

MODEL = {"dim": 512, "n_layers": 4, "n_heads": 8, "n_kv_heads": 4, "vocab_size": 4096,
         "ffn_hidden_dim": 1536, "max_seq_len": 640}  # fmt: skip
TRAIN = {"batch_size": 1, "seq_len": 640, "activation_checkpointing": "full"}
HSDP_TP = {"dp_replicate": 2, "dp_shard": 2, "tp": 2}
PIPELINE = {"pp": 2, "dp_shard": 2, "tp": 2}
WINDOWS = {"sliding_window": 128, "attention_pattern": ["full", "sliding", "sliding"]}
EXPERTS = {"num_experts": 16, "moe_top_k": 4, "moe_expert_dim": 256}
CUDNN = 'custom_call_target="__cudnn$fmha'
MOSAIC = 'custom_call_target="mosaic_gpu'
TRITON = 'custom_call_target="__gpu$xla.gpu.triton"'


def case(distributed, train=None, **sections):
    return {"distributed": distributed, "train": train or {}, **sections}


STEPS = {
    "default": case({"dp_shard": 8}),
    "microbatch": case({"dp_shard": 8}, {"grad_sync": "microbatch"}),
    "accumulated": case({"dp_shard": 8}, {"grad_accum_steps": 4}),
    "hsdp x tp": case(HSDP_TP),
    "hsdp x tp, microbatch": case(HSDP_TP, {"grad_sync": "microbatch"}),
    "packed": case(HSDP_TP, data={"pack_sequences": True}),
    "1f1b": case(PIPELINE, {"grad_accum_steps": 4}),
    "1f1b, microbatch": case(PIPELINE, {"grad_accum_steps": 4, "grad_sync": "microbatch"}),
    "1f1b, packed": case(PIPELINE, {"grad_accum_steps": 4}, data={"pack_sequences": True}),
    "gpipe": case({**PIPELINE, "pp_schedule": "gpipe"}, {"grad_accum_steps": 4}),
    "interleaved": case(
        {**PIPELINE, "pp_schedule": "interleaved_1f1b", "pp_chunks": 2}, {"grad_accum_steps": 4}
    ),
    "windows": case(HSDP_TP, model=WINDOWS),
    "windows, packed": case(HSDP_TP, model=WINDOWS, data={"pack_sequences": True}),
    "1f1b, windows": case(PIPELINE, {"grad_accum_steps": 4}, model={"sliding_window": 128}),
    "nothing recomputed": case({"dp_shard": 8}, {"activation_checkpointing": "none"}),
    "chunked loss": case(HSDP_TP, {"loss_fn": "chunked_cross_entropy"}),
    "muon": case(HSDP_TP, optimizer={"name": "muon"}),
    "lion": case(HSDP_TP, optimizer={"name": "lion"}),
    "schedule-free": case(
        HSDP_TP, optimizer={"name": "schedule_free_adamw"}, scheduler={"name": "none"}
    ),
}

EXPERT_STEPS = {
    "dp_shard": case({"dp_shard": 8}),
    "ep": case({"ep": 8}),
    "ep, microbatch": case({"ep": 8}, {"grad_sync": "microbatch"}),
    "ep x dp_shard": case({"ep": 4, "dp_shard": 2}, {"grad_accum_steps": 2}),
    "ep x dp_shard, microbatch": case({"ep": 4, "dp_shard": 2}, {"grad_sync": "microbatch"}),
    "ep x tp": case({"ep": 4, "tp": 2}),
    "1f1b x ep": case({"pp": 2, "ep": 4}, {"grad_accum_steps": 4}),
}


def config_of(sections) -> JobConfig:
    config = JobConfig.model_validate(
        {
            **sections,
            "model": {**MODEL, **sections.get("model", {})},
            "train": {**TRAIN, **sections["train"]},
        }
    )
    rules.check(config, 8)
    return config


@functools.cache
def h100s():
    return list(targets.gpus("h100"))


@pytest.fixture
def no_cache():
    """Disable the cache: programs for target hardware can be written to it, but not read."""
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", True)


@compiles
@pytest.mark.usefixtures("no_cache")
@pytest.mark.parametrize("name", STEPS)
def test_step_compiles_with_attention_kernel(name):
    """The kernel is cuDNN's, or with packed documents the one without an S x S mask."""
    config = config_of(STEPS[name])
    lowered = Program(config, make_mesh(config, h100s())).lower()
    text = lowered.compile(xla_flags.compiler_options(h100s()[0], {})).as_text()
    packed = config.data.pack_sequences
    assert (CUDNN in text, TRITON in text) == (not packed, packed)
    length = config.train.seq_len
    assert not re.search(rf"\[(\d+,)*{length},{length}\]", text)


@compiles
@pytest.mark.usefixtures("no_cache")
def test_step_of_mamba2_compiles():
    """Chunks are in two blocks, so that a loop is inside of the loop over layers."""
    mamba2 = {"heads": 128, "head_dim": 8, "state_size": 16, "chunk_size": 256}
    model = {"mixer_pattern": ["mamba2"], "mamba2": mamba2}
    config = config_of(case({"dp_shard": 8}, {"grad_sync": "microbatch"}, model=model))
    lowered = Program(config, make_mesh(config, h100s())).lower()
    has = xla_flags.traits(config)
    lowered.compile(xla_flags.compiler_options(h100s()[0], {}, has=has))


@compiles
@pytest.mark.usefixtures("no_cache")
@pytest.mark.parametrize(("reduce_dtype", "expected"), [("float32", "f32"), ("compute", "bf16")])
@pytest.mark.parametrize("mode", ["update", "microbatch"])
def test_gradients_are_reduced_in_configured_dtype(mode, reduce_dtype, expected):
    """The gradient of the head is excluded: the loss returns it in float32 (docs/kernels.md)."""
    train = {"grad_sync": mode, "reduce_dtype": reduce_dtype}
    config = config_of(case({"dp_shard": 8}, train, model={"vocab_size": 8192}))
    lowered = Program(config, make_mesh(config, h100s())).lower()
    text = lowered.compile(xla_flags.compiler_options(h100s()[0], {})).as_text()
    results = re.findall(r"= (.+?) reduce-scatter(?:-start)?\(", text)
    shapes = [shape for result in results for shape in re.findall(r"(\w+)\[([\d,]+)\]", result)]
    of_layers = {dtype for dtype, shape in shapes if "," in shape and "8192" not in shape}
    assert of_layers == {expected}


@compiles
@pytest.mark.usefixtures("no_cache")
@pytest.mark.parametrize(
    ("mode", "precision"), [("update", "bf16"), ("microbatch", "bf16"), ("microbatch", "fp8")]
)
def test_no_weight_is_gathered_in_float32(mode, precision):
    """The check includes the head, and the first and last block, which fp8 leaves in bf16."""
    train = {"grad_sync": mode, "mixed_precision": precision}
    config = config_of(case({"dp_shard": 8}, train, model={"vocab_size": 8192}))
    lowered = Program(config, make_mesh(config, h100s())).lower()
    text = lowered.compile(xla_flags.compiler_options(h100s()[0], {})).as_text()
    results = re.findall(r"= (.+?) all-gather(?:-start)?\(", text)
    gathered = {dtype for result in results for dtype in re.findall(r"(\w+)\[\d+,[\d,]+\]", result)}
    assert "bf16" in gathered
    assert "f32" not in gathered


@compiles
@pytest.mark.usefixtures("no_cache")
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("mode", ["update", "microbatch"])
def test_tp_sums_are_reduce_scattered(mode, rows):
    """All sums but the loss's own gradient are a reduce-scatter of [rows, tokens, dim]."""
    train = {"grad_sync": mode, "batch_size": rows}
    config = config_of(case({"dp_shard": 4, "tp": 2}, train))
    lowered = Program(config, make_mesh(config, h100s())).lower()
    text = lowered.compile(xla_flags.compiler_options(h100s()[0], {})).as_text()
    assert re.search(rf"= \(\(bf16\[{rows},640,512\].* reduce-scatter-start", text)
    for line in re.findall(r"= \(?bf16.* all-reduce(?:-start)?\(.*", text):
        sizes = [int(n) for n in re.match(r"\W*bf16\[([\d,]+)\]", line)[1].split(",")]
        assert "tv,vd->td" in line or math.prod(sizes) < rows * 640 * 512


@compiles
@pytest.mark.usefixtures("no_cache")
def test_offloaded_activations_are_on_host():
    """The offloaded array is [layers, sequences, tokens, dim] in bf16, on one device."""
    config = config_of(case({"dp_shard": 8}, {"offload": ["activations"]}))
    lowered = Program(config, make_mesh(config, h100s())).lower()
    memory = lowered.compile(xla_flags.compiler_options(h100s()[0], {})).memory_analysis()
    assert memory.host_temp_size_in_bytes == 4 * 1 * 640 * 512 * 2


FP8_STEPS = {
    "one": ({}, {}),
    "hsdp x tp": (HSDP_TP, {}),
    "hsdp x tp, microbatch": (HSDP_TP, {"grad_sync": "microbatch"}),
}


def compiled_in_8_bits(distributed, train, **flags):
    """Return the HLO of a step with 8-bit products in all layers."""
    every = {"num_layers_at_start_in_bf16": 0, "num_layers_at_end_in_bf16": 0}
    config = config_of(case(
        {"dp_shard": 8, **distributed}, {"mixed_precision": "fp8", **every, **train}
    ))  # fmt: skip
    devices = list(targets.gpus("h100"))
    lowered = Program(config, make_mesh(config, devices)).lower()
    return lowered.compile({**xla_flags.compiler_options(devices[0], {}), **flags}).as_text()


OF_LINEAR = re.compile(r'op_name="[^"]*/fp8/[^"]*/dot_general"')
LEAST = 4 + 4 + 4  # forward, dx and dW of a layer; XLA makes one of q, k and v, and of gate and up


def kernels_of_linear(text):
    """Return the operand types of each kernel with a product of a linear layer."""
    head = ""
    for line in text.splitlines():
        head = line if line.startswith("%") else head
        if " dot(" in line and OF_LINEAR.search(line):
            yield set(re.findall(r": (\w+)\[\d", head.partition(") -> ")[0]))


@compiles
@pytest.mark.usefixtures("no_cache")
@pytest.mark.parametrize("name", FP8_STEPS)
def test_linear_layers_compile_to_8_bit_kernels(name):
    """All array operands of Triton's kernels are in 8 bits; scales are scalars."""
    kernels = list(kernels_of_linear(compiled_in_8_bits(*FP8_STEPS[name])))
    assert len(kernels) >= LEAST
    assert set().union(*kernels) == {"f8e4m3fn", "f8e5m2"}


@compiles
@pytest.mark.usefixtures("no_cache")
def test_linear_layers_without_triton_use_8_bit_cublas(monkeypatch):
    """XLA needs the CUDA version, which targets do not include otherwise."""
    plain = targets.target_config
    runtime = "runtime_version { major: 13 minor: 0 patch: 0 }"
    monkeypatch.setattr(targets, "target_config", lambda chip: plain(chip) + runtime)
    text = compiled_in_8_bits({}, {}, xla_gpu_enable_triton_gemm=False)
    calls = [line for line in text.splitlines() if "__cublas$lt$matmul" in line]
    of_linear = [line for line in calls if OF_LINEAR.search(line)]
    assert len(of_linear) >= LEAST
    assert all('custom_call_target="__cublas$lt$matmul$f8"' in line for line in of_linear)


@compiles
@pytest.mark.usefixtures("no_cache")
@pytest.mark.parametrize("name", EXPERT_STEPS)
def test_experts_compile_to_hopper_kernels(name):
    """Token rows are exchanged, experts are not, and only these kernels multiply with experts."""
    sections = EXPERT_STEPS[name]
    config = config_of({**sections, "model": EXPERTS})
    lowered = Program(config, make_mesh(config, h100s())).lower()
    options = xla_flags.compiler_options(h100s()[0], {}, has=(xla_flags.EXPERTS,))
    text = lowered.compile(options).as_text()
    assert MOSAIC in text
    assert "ragged-dot" not in text
    assert ("all-to-all" in text) == ("ep" in sections["distributed"])
    assert CUDNN in text


@compiles
@pytest.mark.usefixtures("no_cache")
def test_expert_weights_are_gathered_in_8_bits():
    """Weights are [local experts, out, in], gathered over `dp_shard`."""
    train = {"mixed_precision": "fp8", "fp8_exclude": [], "grad_sync": "microbatch"}
    config = config_of(case({"ep": 4, "dp_shard": 2}, train, model=EXPERTS))
    lowered = Program(config, make_mesh(config, h100s())).lower()
    options = xla_flags.compiler_options(h100s()[0], {}, has=(xla_flags.EXPERTS,))
    text = lowered.compile(options).as_text()
    assert re.search(r"= \(.*f8e4m3fn\[4,256,512\].* all-gather-start\(", text)
    assert MOSAIC in text


@compiles
@pytest.mark.usefixtures("no_cache")
def test_gathered_experts_compile():
    """XLA aborts without a flag of the table (docs/upstream.md)."""
    config = config_of(case({"dp_shard": 8}, {"grad_sync": "microbatch"}, model=EXPERTS))
    lowered = Program(config, make_mesh(config, h100s())).lower()
    options = xla_flags.compiler_options(h100s()[0], {}, has=(xla_flags.EXPERTS,))
    assert MOSAIC in lowered.compile(options).as_text()


@compiles
@pytest.mark.usefixtures("no_cache")
@pytest.mark.parametrize("distributed", [{"dp_shard": 8}, HSDP_TP, {"pp": 4, "tp": 2}], ids=str)
def test_evaluation_and_generation_compile(distributed):
    config = config_of(case(distributed, {"grad_accum_steps": 4}))
    mesh = make_mesh(config, h100s())
    model = build_model(config, "gpu")
    params = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        model.abstract, param_shardings(model.abstract, model.axes, mesh),
    )  # fmt: skip
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype, sharding=x.sharding),
        Program(config, mesh).abstract_batch(),
    )
    n_bytes = jax.ShapeDtypeStruct((config.model.vocab_size,), jnp.int32)
    rows = jax.ShapeDtypeStruct((8,), jnp.int32)
    with jax.set_mesh(mesh):
        evaluated = make_eval_step(model, config.train, mesh).lower(params, batch, n_bytes)
        assert CUDNN in evaluated.compile().as_text()
        start = decoding._start.lower(
            model, Sampling(), 16, params, jax.ShapeDtypeStruct((8, 32), jnp.int32), rows,
            jax.ShapeDtypeStruct((2,), jnp.uint32), rows, jax.ShapeDtypeStruct((8,), bool),
            jax.ShapeDtypeStruct((), jnp.int32),
        )  # fmt: skip
        start.compile()


def test_missing_gpu_compiler_raises(monkeypatch):
    monkeypatch.setattr(targets, "has_gpu_compiler", lambda: False)
    with pytest.raises(UserError, match="plan-gpu"):
        targets.gpus("h100")
