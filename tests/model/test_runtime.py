"""Tests of the runtime for each platform."""

import jax.numpy as jnp
import pytest

from jaxforge.config.job import JobConfig
from jaxforge.model.runtime import runtime_for


def runtime(platform, n_layers=4, save="none"):
    config = JobConfig.model_validate(
        {"model": {"n_layers": n_layers}, "train": {"activation_checkpointing": save}}
    )
    return runtime_for(config, jnp.bfloat16, platform)


@pytest.mark.parametrize(
    ("n_layers", "save", "unroll"),
    [(4, "none", 4), (12, "none", 12), (13, "none", 1), (4, "full", 1), (4, "selective", 1)],
)
def test_cpu_unrolls_few_layers_without_remat(n_layers, save, unroll):
    assert runtime("cpu", n_layers, save).unroll == unroll


@pytest.mark.parametrize(
    ("n_layers", "save", "unroll"),
    [(4, "none", 4), (40, "none", 40), (41, "none", 1), (4, "full", 1), (4, "selective", 1)],
)
def test_gpu_unrolls_layers_without_remat(n_layers, save, unroll):
    result = runtime("gpu", n_layers, save)
    assert (result.unroll, result.saves_elementwise, result.loss_tile) == (unroll, False, None)


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_fp8_runs_save_elementwise_results(platform):
    config = JobConfig.model_validate(
        {"model": {"n_layers": 20}, "train": {"mixed_precision": "fp8"}}
    )
    assert runtime_for(config, jnp.bfloat16, platform).saves_elementwise


def test_gpu_loops_over_layers_with_experts():
    config = JobConfig.model_validate({"model": {"num_experts": 4}})
    assert runtime_for(config, jnp.bfloat16, "gpu").unroll == 1


def test_tpu_loops_over_layers_without_loss_tiles():
    assert (runtime("tpu").unroll, runtime("tpu").loss_tile) == (1, None)


def test_attention_kernel_follows_head_width():
    for shape in ({"dim": 640, "n_heads": 4}, {"head_dim": 160}):
        config = JobConfig.model_validate({"model": shape})
        assert runtime_for(config, jnp.bfloat16, "gpu").attention.whole == "triton"
    narrower = JobConfig.model_validate({"model": {"dim": 640, "n_heads": 4, "head_dim": 128}})
    assert runtime_for(narrower, jnp.bfloat16, "gpu").attention.whole == "cudnn"


def test_each_size_of_heads_has_its_kernel():
    config = JobConfig.model_validate({
        "model": {
            "head_dim": 256, "global_attention": {"head_dim": 512},
            "mixer_pattern": ["attention", "global_attention"],
        },
    })  # fmt: skip
    result = runtime_for(config, jnp.bfloat16, "gpu", "9.0")
    assert result.attention_kernels == ("triton", "blockwise")
    assert "; in layers with wide heads blockwise (not cudnn" in result.describe_attention(1)


def test_runtime_follows_platform():
    assert [runtime(platform).attention.whole for platform in ("cpu", "gpu", "tpu")] == [
        "blockwise", "cudnn", "splash",
    ]  # fmt: skip
    assert [runtime(platform).rope_as_matmul for platform in ("cpu", "gpu", "tpu")] == [
        False, False, True,
    ]  # fmt: skip
    assert [runtime(platform).wholly_manual for platform in ("cpu", "gpu", "tpu")] == [
        True, True, False,
    ]  # fmt: skip


def test_sinks_are_not_run_by_cudnn():
    config = JobConfig.model_validate({"model": {"attention_sinks": True}})
    kernels = [
        runtime_for(config, jnp.dtype("bfloat16"), on).attention.whole for on in ("gpu", "tpu")
    ]
    assert kernels == ["triton", "splash"]


def test_packed_documents_prefer_triton_with_reason():
    config = JobConfig.model_validate({"data": {"pack_sequences": True}})
    result = runtime_for(config, jnp.dtype("bfloat16"), "gpu", "9.0")
    assert (result.attention.whole, result.attention.why[:30]) == (
        "triton",
        "not cudnn: it needs an S x S m",
    )
    assert runtime("gpu").attention.why == ""


def test_wide_heads_use_triton_without_local_gpu():
    config = JobConfig.model_validate({"model": {"dim": 1024, "n_heads": 4}})
    assert runtime_for(config, jnp.dtype("bfloat16"), "gpu", "9.0").attention.whole == "triton"


@pytest.mark.parametrize(("chunk", "kernel"), [(512, "cudnn"), (511, "triton")])
def test_cudnn_runs_chunks_longer_than_sequences(chunk, kernel):
    pattern = ("full", "chunked")
    config = JobConfig.model_validate({
        "model": {"attention_chunk_size": chunk, "attention_pattern": pattern},
        "train": {"seq_len": 512},
    })  # fmt: skip
    assert runtime_for(config, jnp.dtype("bfloat16"), "gpu").attention.whole == kernel
