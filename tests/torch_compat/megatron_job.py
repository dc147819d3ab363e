"""Job of Megatron-Core on CPUs, which trains a tiny GPT model and saves or loads a checkpoint.

    python megatron_job.py JOB.json        in one process or several, where megatron.core imports

JOB.json has `load` and `save` (directories or null), `steps` before the save, `more` after it,
and the other keys of `DEFAULTS`. Losses and logits are written to `out`, an .npz. Operations that
need a GPU are replaced: tensors for "cuda" are created on the CPU, and collectives use gloo.
Model, optimizer and `dist_checkpointing` are Megatron-Core's; `args` follows Megatron-LM.
"""

import argparse
import contextlib
import json
import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

DEFAULTS = {
    "model": {}, "vocab": 28, "divisor": 32, "tied": False, "position": "rope", "tp": 1, "pp": 1,
    "ep": 1, "optimizer": None, "bf16": False, "singleton": False, "seed": 0, "steps": 2, "more": 0,
    "lr": 1e-2, "load": None, "save": None, "te_names": False,
}  # fmt: skip
MODEL = {
    "num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "num_query_groups": 2,
    "ffn_hidden_size": 24, "normalization": "RMSNorm", "gated_linear_unit": True,
    "add_bias_linear": False, "init_method_std": 0.1,
}  # fmt: skip
WITHOUT_KERNELS = dict.fromkeys(
    ("bias_dropout_fusion", "bias_activation_fusion", "masked_softmax_fusion", "apply_rope_fusion",
     "gradient_accumulation_fusion"),
    False,
)  # fmt: skip
LENGTH, ROWS = 16, 2
_COPIED = ("moe_", "qk_", "multi_latent", "q_lora", "kv_lora", "v_head_dim", "rope_type", "mscale",
           "rotary_scaling", "original_max", "mtp_")  # fmt: skip


class OnCpu(TorchFunctionMode):
    """Create tensors for a GPU on the CPU, and report them to Megatron-Core as GPU tensors."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        if function is torch.Tensor.cuda:
            return args[0]
        result = function(*args, **kwargs)
        if function is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.")
        return result


def without_gpu():
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: "cpu"
    np.product = np.prod  # versions until 0.15 want NumPy 1


def accept_latent_heads():
    """Let the attention without TransformerEngine have values of another width than queries."""
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    multi_latent_attention.TELinear = type(None)  # which it expects to be a class
    initialize = DotProductAttention.__init__

    def with_channels(self, *args, k_channels=None, v_channels=None, **kwargs):
        initialize(self, *args, **kwargs)
        if v_channels:
            self.hidden_size_per_partition = self.num_attention_heads_per_partition * v_channels

    DotProductAttention.__init__ = with_channels


def build(job):
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.tensor_parallel import random as tensor_random
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = None
    tensor_random.get_cuda_rng_tracker().fork = lambda *_: contextlib.nullcontext()
    sizes = {"tensor_model_parallel_size": job["tp"], "pipeline_model_parallel_size": job["pp"],
             "expert_model_parallel_size": job["ep"]}  # fmt: skip
    parallel_state.initialize_model_parallel(**sizes)
    torch.manual_seed(job["seed"])
    dtype = {"bf16": True, "params_dtype": torch.bfloat16} if job["bf16"] else {}
    keys = {**MODEL, **job["model"]}
    accept_latent_heads()
    is_latent = keys.get("multi_latent_attention", False)
    config = (MLATransformerConfig if is_latent else TransformerConfig)(
        **keys, **sizes, **WITHOUT_KERNELS, **dtype, use_cpu_initialization=True,
        activation_func=F.silu if keys["gated_linear_unit"] else F.gelu, hidden_dropout=0.0,
        attention_dropout=0.0, pipeline_dtype=torch.float32,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, normalization=config.normalization,
        qk_layernorm=config.qk_layernorm, multi_latent_attention=is_latent,
    )  # fmt: skip
    if isinstance(config.moe_layer_freq, list):
        spec = get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization=config.normalization
        )
    if job["te_names"]:  # with TransformerEngine, the norm before experts has a name of its own
        layers = getattr(spec, "layer_specs", [spec])
        freq = config.moe_layer_freq if isinstance(config.moe_layer_freq, list) else [1]
        for layer, has_experts in zip(layers, freq, strict=True):
            if has_experts:
                layer.submodules.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.")
    further = get_gpt_mtp_block_spec(config, spec, False) if config.mtp_num_layers else None
    model = GPTModel(
        config, spec, mtp_block_spec=further, vocab_size=padded(job), max_sequence_length=64,
        position_embedding_type=job["position"], rotary_base=10000,
        share_embeddings_and_output_weights=job["tied"],
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )  # fmt: skip
    with torch.no_grad():  # vectors begin with zeros or ones, in which a mistake would not show
        for name, tensor in sorted((*model.named_parameters(), *model.named_buffers())):
            if tensor.ndim == 1 and tensor.dtype == torch.float32:
                values = np.random.default_rng(len(name)).uniform(-0.4, 0.4, tensor.shape)
                tensor.add_(torch.from_numpy(values).float())
    return config, model.bfloat16() if job["bf16"] else model


def padded(job):
    return -(-job["vocab"] // job["divisor"]) * job["divisor"]


def keeping_step(optimizer_class):
    """Make torch's Adam loadable, which has `step` by parameter and not by group like Apex's."""
    load = optimizer_class._set_main_param_and_optimizer_states
    current = optimizer_class._get_main_param_and_optimizer_states

    def loading(self, parameter, tensors):
        load(self, parameter, {"step": current(self, parameter)["step"], **tensors})

    optimizer_class._set_main_param_and_optimizer_states = loading


def with_optimizer(job, config, model):
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    keeping_step(DistributedOptimizer)
    is_distributed = job["optimizer"] != "plain"
    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=is_distributed, grad_reduce_in_fp32=True
    )
    wrapped = DistributedDataParallel(config, settings, model)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=job["lr"], min_lr=job["lr"], weight_decay=0.1, adam_beta1=0.9,
            adam_beta2=0.95, clip_grad=1.0, use_distributed_optimizer=is_distributed,
            bf16=job["bf16"], params_dtype=config.params_dtype,
        ),
        [wrapped],
    )  # fmt: skip
    schedule = OptimizerParamScheduler(
        optimizer, init_lr=job["lr"], max_lr=job["lr"], min_lr=job["lr"], lr_warmup_steps=0,
        lr_decay_steps=100, lr_decay_style="constant", start_wd=0.1, end_wd=0.1, wd_incr_steps=0,
        wd_incr_style="constant", use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )  # fmt: skip
    return wrapped, optimizer, schedule


def inputs(job):
    tokens = torch.randint(
        0, job["vocab"], (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(1)
    )
    positions = torch.arange(LENGTH)[None].expand(ROWS, -1)
    mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), 1)
    return tokens, (tokens[:, :-1], positions, mask)


def train(job, model, optimizer, schedule, steps):
    tokens, batch = inputs(job)
    losses = []
    for _ in range(steps):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        loss = model(*batch, labels=tokens[:, 1:]).mean()
        loss.backward()
        model.finish_grad_sync()
        optimizer.step()
        schedule.step(ROWS)
        losses.append(loss.item())
    return losses


def arguments(job, config):
    """Return `args` as Megatron-LM stores them, with the model's arguments and a few others."""
    from megatron.core.transformer.enums import AttnBackend

    keys = {**MODEL, **job["model"]}
    return argparse.Namespace(
        **{key: getattr(config, key) for key in keys if key.startswith(_COPIED)},
        num_layers=config.num_layers, hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads, group_query_attention=True,
        num_query_groups=config.num_query_groups, kv_channels=config.kv_channels,
        ffn_hidden_size=config.ffn_hidden_size, num_experts=config.num_moe_experts,
        normalization=config.normalization, norm_epsilon=config.layernorm_epsilon,
        swiglu=config.gated_linear_unit, add_bias_linear=config.add_bias_linear,
        add_qkv_bias=config.add_qkv_bias, bias_gelu_fusion=config.bias_activation_fusion,
        apply_layernorm_1p=False, init_method_std=config.init_method_std,
        untie_embeddings_and_output_weights=not job["tied"],
        position_embedding_type=job["position"],
        rotary_base=10000, rotary_percent=1.0, rotary_interleaved=False, use_rope_scaling=False,
        rope_scaling_factor=8.0, max_position_embeddings=64, seq_length=LENGTH, vocab_size=None,
        padded_vocab_size=padded(job), make_vocab_size_divisible_by=job["divisor"],
        global_batch_size=ROWS, consumed_train_samples=ROWS * job["steps"], lr=job["lr"],
        weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-8, train_iters=100,
        min_lr=job["lr"], lr_decay_style="constant", lr_warmup_iters=0, lr_warmup_fraction=None,
        lr_decay_iters=None,
        params_dtype=config.params_dtype, attention_backend=AttnBackend.auto,
        save="/somewhere/checkpoints", data_path=["0.5", "/somewhere/tokens"],
    )  # fmt: skip


def state_dict(job, config, model, optimizer, schedule, *, is_loading):
    from megatron.core import parallel_state

    metadata = {
        "singleton_local_shards": job["singleton"], "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }  # fmt: skip
    if job["optimizer"] not in (None, "plain"):
        metadata["distrib_optim_sharding_type"] = job["optimizer"]
    of_model = model.sharded_state_dict(metadata=metadata)
    state = {"checkpoint_version": 3.0, "iteration": job["steps"], "model": of_model}
    if not is_loading:
        state["args"] = arguments(job, config)
    if optimizer is not None:
        state["optimizer"] = optimizer.sharded_state_dict(
            {"model": of_model}, is_loading, metadata=metadata
        )
        state["opt_param_scheduler"] = schedule.state_dict()
    return state, {key: value for key, value in metadata.items() if key != "dp_cp_group"}


def main(job):
    from megatron.core import dist_checkpointing
    from megatron.core.safe_globals import register_safe_globals

    register_safe_globals()
    config, bare = build(job)
    parts = (bare, None, None)
    if job["optimizer"]:
        parts = with_optimizer(job, config, bare)
    _, optimizer, schedule = parts
    losses = []
    if job["load"]:
        if optimizer is not None:  # torch's Adam has no state to load into before its first step
            train(job, *parts, 1)
        requested, _ = state_dict(job, config, bare, optimizer, schedule, is_loading=True)
        load(dist_checkpointing.load(requested, job["load"]), bare, optimizer, schedule)
    elif optimizer is not None:
        losses = train(job, *parts, job["steps"])
    if job["save"]:
        Path(job["save"]).mkdir(parents=True, exist_ok=True)
        torch.distributed.barrier()
        state, metadata = state_dict(job, config, bare, optimizer, schedule, is_loading=False)
        dist_checkpointing.save(state, job["save"], content_metadata=metadata)
    is_one_stage = job["pp"] == 1
    logits = logits_of(job, bare) if is_one_stage else []
    bare.train()
    losses += train(job, *parts, job["more"]) if optimizer else []
    if torch.distributed.get_rank() == 0 and is_one_stage:
        further = {f"logits_{depth}": each for depth, each in enumerate(logits[1:], 1)}
        np.savez(job["out"], tokens=inputs(job)[0], logits=logits[0], losses=losses, **further)


@torch.no_grad()
def logits_of(job, bare):
    """Return the logits [rows, length, vocabulary], and those of each multi-token module."""
    tokens, batch = inputs(job)
    bare.eval()  # experts with tensor parallelism are not trained without sequence parallelism
    if not bare.config.mtp_num_layers:
        return [bare(*batch, runtime_gather_output=True).float()]
    collected, compute = [], bare.compute_language_model_loss

    def collect(labels, logits):
        collected.append(logits.transpose(0, 1).float().clone())  # the loss overwrites them
        return compute(labels, logits)

    bare.compute_language_model_loss = collect
    bare(*batch, labels=tokens[:, 1:])
    bare.compute_language_model_loss = compute
    return [collected[-1], *collected[:-1]]


def load(state, model, optimizer, schedule):
    model.load_state_dict(state["model"])
    if optimizer is None:
        return
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["opt_param_scheduler"])
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        for of_parameter in each.optimizer.state.values():  # one `step` would count for all of them
            of_parameter["step"] = of_parameter["step"].clone()


if __name__ == "__main__":
    without_gpu()
    read = {**DEFAULTS, **json.loads(Path(sys.argv[1]).read_text())}
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{Path(sys.argv[1]).resolve()}.store",
        rank=int(os.environ.get("RANK", "0")), world_size=int(os.environ.get("WORLD_SIZE", "1")),
    )  # fmt: skip
    with OnCpu():
        main(read)
    torch.distributed.destroy_process_group()
