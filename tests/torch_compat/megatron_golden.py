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
from tests.torch_compat.tensors import random_array
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


HYBRID = """
model:
  _target_: megatron.bridge.models.nemotronh.nemotron_h_provider.NemotronHModelProvider
  activation_func: {_call_: false, _target_: megatron.core.activations.squared_relu}
  add_bias_linear: false
  ffn_hidden_size: 22
  gated_linear_unit: false
  hidden_size: 20
  hybrid_override_pattern: M-M*E
  is_hybrid_model: true
  kv_channels: 6
  mamba_head_dim: 5
  mamba_num_groups: 2
  mamba_num_heads: 6
  mamba_state_dim: 8
  moe_ffn_hidden_size: 12
  moe_latent_size: 8
  moe_router_enable_expert_bias: true
  moe_router_score_function: sigmoid
  moe_router_topk: 2
  moe_shared_expert_intermediate_size: 14
  normalization: RMSNorm
  num_attention_heads: 3
  num_layers: 5
  num_moe_experts: 4
  num_query_groups: 1
  position_embedding_type: none
  seq_length: 64
  share_embeddings_and_output_weights: false
  vocab_size: 29
"""
MIXER = {
    "mixer.A_log": (6,), "mixer.D": (6,), "mixer.dt_bias": (6,), "mixer.norm.weight": (30,),
    "mixer.in_proj.layer_norm_weight": (20,), "mixer.out_proj.weight": (20, 30),
    **{f"mixer.in_proj.weight.{part}": (rows, 20)
       for part, rows in {"z": 30, "x": 30, "B": 16, "C": 16, "dt": 6}.items()},
    **{f"mixer.conv1d.weight.{part}": (n, 1, 4) for part, n in {"x": 30, "B": 16, "C": 16}.items()},
    **{f"mixer.conv1d.bias.{part}": (n,) for part, n in {"x": 30, "B": 16, "C": 16}.items()},
}  # fmt: skip
HYBRID_LAYERS = {
    0: MIXER,
    1: {"mlp.linear_fc1.layer_norm_weight": (20,), "mlp.linear_fc1.weight": (22, 20),
        "mlp.linear_fc2.weight": (20, 22)},
    2: MIXER,
    3: {"self_attention.linear_qkv.layer_norm_weight": (20,),
        "self_attention.linear_qkv.weight": (30, 20),
        "self_attention.linear_proj.weight": (20, 18)},
    4: {"pre_mlp_layernorm.weight": (20,), "mlp.router.weight": (4, 20),
        "mlp.router.expert_bias": (4,), "mlp.experts.experts.linear_fc1.weight": (4, 12, 8),
        "mlp.experts.experts.linear_fc2.weight": (4, 8, 12),
        "mlp.fc1_latent_proj.weight": (8, 20), "mlp.fc2_latent_proj.weight": (20, 8),
        "mlp.shared_experts.linear_fc1.weight": (14, 20),
        "mlp.shared_experts.linear_fc2.weight": (20, 14)},
}  # fmt: skip
"""Keys and shapes of `MambaModel` in Megatron-Core 0.16 with TransformerEngine, whose kernels need
GPUs."""


def write_hybrid(directory):
    """Write a hybrid model of five layers with random weights; return these by key."""
    shapes = {
        f"decoder.layers.{i}.{name}": shape
        for i, layer in HYBRID_LAYERS.items()
        for name, shape in layer.items()
    }
    shapes |= {"embedding.word_embeddings.weight": (29, 20), "output_layer.weight": (29, 20),
               "decoder.final_norm.weight": (20,)}  # fmt: skip
    arrays = {
        key: random_array("float32", shape, i) for i, (key, shape) in enumerate(shapes.items())
    }
    write_torch_dist(arrays, directory, "dense")
    (directory / "run_config.yaml").write_text(HYBRID)
    return arrays


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
