"""Small checkpoints written by Megatron-Core, and functions that tests of them share.

`megatron_job.py` wrote `tests/golden/megatron` with Megatron-Core 0.16.1 (`flattened` with 0.14.0)
in one process (`flattened` in two, with tensor parallelism):

    dense      fully_reshardable, biases of q, k and v     flattened  fully_sharded_model_space
    experts    weights only, TransformerEngine's names     buffers    dp_reshardable
    latent     weights only, latent attention, YaRN, groups of experts, a multi-token module
"""

import shutil
from pathlib import Path

import jax
import numpy as np

from jaxforge import inference
from jaxforge.model.transformer import Model
from tests.helpers import cli
from torch_compat.formats import dcp_writer
from torch_compat.formats.dcp_reader import open_dcp
from torch_compat.formats.dcp_writer import Entry
from torch_compat.formats.files import Directory
from torch_compat.formats.lazy import from_array

GOLDEN = Path(__file__).parents[1] / "golden" / "megatron"
RUN_CONFIG = """
checkpoint:
  save: /somewhere
model:
  _target_: megatron.bridge.models.qwen.qwen_provider.Qwen3MoEModelProvider
  activation_func:
    _call_: false
    _target_: torch.nn.functional.silu
  add_bias_linear: false
  ffn_hidden_size: 24
  gated_linear_unit: true
  hidden_size: 16
  init_method:
    _args_: []
    _partial_: true
    _target_: torch.nn.init.normal_
    mean: 0.0
    std: 0.1
  init_method_std: 1e-1
  kv_channels: 8
  layernorm_epsilon: 1.0e-05
  make_vocab_size_divisible_by: 16
  moe_ffn_hidden_size: 12
  moe_layer_freq: 1
  moe_router_topk: 2
  normalization: RMSNorm
  num_attention_heads: 4
  num_layers: 2
  num_moe_experts: 4
  num_query_groups: 2
  position_embedding_type: rope
  qk_layernorm: true
  rotary_base: 10000.0
  seq_length: 64
  share_embeddings_and_output_weights: true
  should_pad_vocab: true
  tensor_model_parallel_size: 2
  vocab_size: 28
  window_size: null
optimizer:
  _target_: megatron.bridge.training.config.OptimizerConfig
  adam_beta1: 0.9
  adam_beta2: 0.95
  lr: 0.0003
train:
  global_batch_size: 8
  train_iters: 50
"""


def imported(name, run, *options):
    assert cli(["convert", "--to=jaxforge", str(GOLDEN / name), str(run), *options]) == 0
    return run


def raw(name):
    return {
        key: tensor.all()
        for key, tensor in open_dcp(Directory(GOLDEN / name / "iter_0000002")).tensors.items()
    }


def write_torch_dist(arrays, directory, name):
    """Write tensors by Megatron-Core's keys, with the arguments of a golden checkpoint."""
    directory.mkdir(parents=True)
    entries = {key: Entry((key,), from_array(array)) for key, array in arrays.items()}
    units = dcp_writer.units(entries, directory, 1 << 20)
    locations = {unit.name: unit.write() for unit in units}
    dcp_writer.write_metadata(entries, locations, directory, 1 << 20)
    shutil.copy(GOLDEN / name / "iter_0000002" / "common.pt", directory)
    return directory


def expected(name):
    stored = np.load(GOLDEN / name / "logits.npz")
    return stored["tokens"][:, :-1], stored["logits"]


def assert_close(native, theirs):
    assert np.abs(native - theirs).max() < 1e-5 * np.abs(theirs).max()


def logits_of(run, tokens):
    """Return the model of a run, and its logits."""
    trained = inference.open_run(run, devices=jax.devices()[:1])
    network = Model(trained.config.model)
    with trained.in_use() as params:
        return trained.config.model, np.asarray(
            jax.jit(lambda p, t: network.logits(p, network.hidden(p, t)))(params, tokens)
        )
