"""Compiler flags: acceptance by XLA, precedence of user flags, and the table in the docs."""

import importlib.util
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import pytest

from jaxforge.config.job import JobConfig
from jaxforge.config.train import TrainConfig
from jaxforge.errors import UserError
from jaxforge.parallel import compilation, xla_flags
from jaxforge.parallel.xla_flags import (
    CONTEXT,
    EXPERTS,
    FLAGS,
    RECURRENT,
    Flag,
    compiler_options,
    traits,
)

DOCS = Path(__file__).parents[2] / "docs" / "xla_flags.md"


class Device(NamedTuple):
    platform: str
    device_kind: str


H100 = Device("gpu", "NVIDIA H100 80GB HBM3")
B200 = Device("gpu", "NVIDIA B200")
V5E, V5P, V6E = (Device("tpu", kind) for kind in ("TPU v5 lite", "TPU v5", "TPU v6 lite"))
TPU7X = Device("tpu", "TPU7x")
CPU = Device("cpu", "cpu")


@pytest.fixture(autouse=True)
def jaxforge_logs(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("jaxforge"), "propagate", True)
    caplog.set_level(logging.INFO, "jaxforge")


@pytest.mark.parametrize("device", [H100, B200], ids=lambda d: d.device_kind)
def test_xla_accepts_gpu_flags(device):
    """Every build of XLA knows the options of all backends, so that a CPU is enough."""
    options = compiler_options(device, {}, env={}, has=(EXPERTS,))
    assert options["optimization_level"] == 19, "EFFORT_O1"
    jax.jit(lambda: 0).lower().compile(compiler_options=options)


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu to compile")
def test_libtpu_accepts_tpu_flags():
    code = """
import jax, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxforge.parallel.xla_flags import compiler_options
for topology in ("v5e:2x2", "v5p:2x2x1", "v6e:2x2"):
    device = topologies.get_topology_desc(topology, platform="tpu").devices[0]
    sharding = NamedSharding(Mesh(np.array([device]), "x"), PartitionSpec())
    x = jax.ShapeDtypeStruct((8, 128), jax.numpy.float32, sharding=sharding)
    options = compiler_options(device, {}, env={})
    print(topology, len(options))
    jax.jit(lambda x: x + x).lower(x).compile(compiler_options=options)
"""
    without_chips = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    env = {**os.environ, **without_chips, "JAX_PLATFORMS": "cpu"}
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    count = {device: len(compiler_options(device, {}, env={})) for device in (V5E, V5P, V6E)}
    assert result.stdout.splitlines() == [
        f"v5e:2x2 {count[V5E]}", f"v5p:2x2x1 {count[V5P]}", f"v6e:2x2 {count[V6E]}",
    ]  # fmt: skip


def test_flags_depend_on_device_kind():
    h100, b200, v5p, v6e = (
        set(compiler_options(device, {}, env={})) for device in (H100, B200, V5P, V6E)
    )
    assert b200 - h100 == {"xla_gpu_enable_command_buffer"}
    assert "xla_enable_async_all_gather" in v5p & v6e
    assert not h100 & v5p
    for device in (V5E, CPU):  # v5e, whose kind starts like v5p's, does so by default
        assert compiler_options(device, {}, env={}) == {}
    # Collectives of TPU7x are asynchronous by default, except all-to-alls.
    exchanging = compiler_options(TPU7X, {}, env={}, has=(EXPERTS,))
    assert exchanging == {"xla_tpu_enable_async_all_to_all": True}


def test_xla_records_cuda_graphs_by_default(tmp_path):
    """A dump of the compiler's options shows the defaults of all platforms."""
    flags = f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text"
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    env.pop("JAX_COMPILATION_CACHE_DIR", None)  # what is read from it is not dumped
    code = "import jax; jax.jit(lambda x: x * 3)(1.0)"
    subprocess.run([sys.executable, "-c", code], env=env, check=True)
    [path] = tmp_path.rglob("compile_options.textproto")
    kinds = set(re.findall(r"xla_gpu_enable_command_buffer: (\w+)", path.read_text()))
    assert kinds >= {"FUSION", "CUBLAS", "CUDNN", "CUSTOM_CALL"}


@pytest.mark.parametrize("trait", [EXPERTS, RECURRENT])
def test_loops_with_loops_in_them_are_not_unrolled_on_gpus(trait):
    name = "xla_gpu_enable_while_loop_unrolling"
    assert name not in compiler_options(H100, {}, env={})
    for device, is_set in ((H100, True), (B200, True), (V5P, False)):
        assert (name in compiler_options(device, {}, env={}, has=(trait,))) == is_set


@pytest.mark.parametrize("mixer", ["mamba2", "gated_delta_net"])
def test_recurrent_layers_are_a_trait(mixer):
    config = JobConfig.model_validate({"model": {"mixer_pattern": [mixer, "attention"]}})
    assert traits(config) == (RECURRENT,)


def test_microbatches_of_unrolled_layers_are_not_pipelined_on_gpus():
    """Level 1 aborts the compiler, or computes parts of microbatches twice (docs/upstream.md)."""
    config = JobConfig.model_validate({"train": {"grad_accum_steps": 2}})
    options = compiler_options(H100, {}, env={}, has=traits(config, unroll=12))
    assert options == {"xla_gpu_enable_latency_hiding_scheduler": True}
    for other, unroll in ((config, 1), (JobConfig(), 12)):
        assert compiler_options(H100, {}, env={}, has=traits(other, unroll)) == {
            "optimization_level": 19
        }


def test_user_flags_take_precedence():
    own = {"optimization_level": "2", "xla_gpu_enable_triton_gemm": "False"}
    assert compiler_options(H100, own, env={}) == {
        "optimization_level": 29,
        "xla_gpu_enable_triton_gemm": False,
    }
    assert compiler_options(H100, {"optimization_level": "default"}, env={}) == {}
    env = {"LIBTPU_INIT_ARGS": "--xla_enable_async_all_gather=false --other"}
    assert "xla_enable_async_all_gather" not in compiler_options(V6E, {}, env)
    env = {"XLA_FLAGS": "--xla_gpu_enable_triton_gemm=true"}
    assert "xla_gpu_enable_triton_gemm" not in compiler_options(H100, own, env)


@pytest.mark.parametrize(
    ("name", "value"),
    [("xla_gpu_nope", "true"), ("xla_gpu_autotune_level", "high"), ("optimization_level", "O1")],
)
def test_rejected_user_flag_raises(name, value):
    config = JobConfig.model_validate({"train": {"xla_flags": {name: value}}})
    with pytest.raises(UserError, match=f"train.xla_flags.{name} = {value}"):
        compilation.accepted_flags(config)


def test_rejected_default_flag_is_ignored(monkeypatch, caplog):
    unknown = Flag("cpu", "xla_nope", "1", "", "")
    known = Flag("cpu", "xla_cpu_enable_fast_math", "false", "", "")
    monkeypatch.setattr(xla_flags, "FLAGS", (unknown, known))
    assert compilation.accepted_flags(JobConfig()) == {"xla_cpu_enable_fast_math": False}
    assert "does not accept xla_nope=1: the flag is ignored" in caplog.text
    assert "XLA flags: xla_cpu_enable_fast_math=False" in caplog.text


def test_compile_step_passes_flags():
    lowered = jax.jit(lambda: 0).lower()
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_nope"):
        compilation.compile_step(lowered, {"xla_nope": True})


def test_cache_directory_precedence(monkeypatch, tmp_path):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    directory = compilation.cache_directory
    assert directory(TrainConfig()) == ""  # a CPU
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert directory(TrainConfig()) == "/cache/jaxforge/xla"
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/jax")
    assert directory(TrainConfig()) == "/jax"
    assert directory(TrainConfig(compilation_cache_dir="/own")) == "/own"
    assert directory(TrainConfig(compilation_cache_dir="")) == ""


def test_uncreatable_cache_directory_raises(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        UserError, match=r"train\.compilation_cache_dir: cannot create .*file/below"
    ):
        compilation.use_cache(TrainConfig(compilation_cache_dir=f"{tmp_path}/file/below"))


def test_docs_show_flag_table():
    lines = DOCS.read_text().splitlines()
    shown = [line for line in lines if line.startswith(("| gpu", "| tpu"))]
    assert shown == [
        f"| {f.platform} | {', '.join(f.devices) or 'all'}"
        f"{', with ' + ' or '.join(f.only_with) if f.only_with else ''} | "
        f"`{f.name}` | `{f.value}` | "
        f"{f.reason} | [source]({f.source}) |"
        for f in FLAGS
    ]


@pytest.mark.parametrize(
    ("values", "has"),
    [
        ({}, ()),
        ({"distributed": {"cp": 2}}, (CONTEXT,)),
        ({"model": {"num_experts": 4}, "distributed": {"cp": 2}}, (EXPERTS, CONTEXT)),
    ],
    ids=str,
)
def test_all_to_all_flag_needs_experts_or_context(values, has):
    config = JobConfig.model_validate(values)
    assert traits(config) == has
    device = Device("tpu", "TPU v5p")
    options = compiler_options(device, {}, env={}, has=traits(config))
    assert ("xla_tpu_enable_async_all_to_all" in options) == bool(has)
