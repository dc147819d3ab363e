"""All families of transformers: import, logits, cache, training and export match transformers."""

import contextlib
import functools
import json
import math
import re
import shutil
import tomllib

import jax
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict

from jaxforge.config.model import ModelConfig
from jaxforge.config.reading.load import make_config
from jaxforge.data.corpus.tokenizer import END_OF_TEXT
from jaxforge.errors import UserError
from jaxforge.model.decoding import Decoder
from jaxforge.model.sampling import Sampling
from jaxforge.model.transformer import Model, join
from tests.conftest import tiny_config
from tests.helpers import setup
from torch_compat.checkpoint import checkpoints, hf_config
from torch_compat.checkpoint.dcp_state import ReadOptions
from torch_compat.checkpoint.stacking import Stacking
from torch_compat.families import FAMILIES

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.numpy import load_file, save_file  # noqa: E402 (transformers needs it)

from tests.torch_compat.huggingface import (  # noqa: E402 (needs torch)
    ROOT,
    TEXTS,
    assert_same_bits,
    bpe,
    compiled,
    config_json,
    config_of,
    export,
    load,
    open_theirs,
    params_of,
    random_params,
    save_run,
    state_of,
    tensors_of,
    their_logits,
)

LENGTH, LONGEST = 24, 64
SHAPE = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LONGEST,
         "initializer_range": 0.1, "pad_token_id": None, "eos_token_id": 0}  # fmt: skip
MHA = {"num_key_value_heads": 4}
ALL_BIASES = {"attention_bias": True, "mlp_bias": True}
PATTERN = {"num_hidden_layers": 4, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}
GEMMA4 = {**PATTERN, "head_dim": 16, "sliding_window": 8, "hidden_size_per_layer_input": 0}
GPT2 = {"vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": LONGEST,
        "initializer_range": 0.1, "pad_token_id": None, "eos_token_id": 0, "resid_pdrop": 0.0,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip

ERNIE = {"moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 20}
LLAMA4 = {"intermediate_size_mlp": 40, "head_dim": 16, "num_local_experts": 4, "floor_scale": 5,
          "attn_scale": 0.7, "attention_chunk_size": 8}  # fmt: skip


def rope(kind, theta=10000.0, **keys):
    return {"rope_type": kind, "rope_theta": theta, **keys}


YARN = rope("yarn", factor=4.0, original_max_position_embeddings=16)
LLAMA3 = rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=16)  # fmt: skip
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
          "v_head_dim": 6, **MHA}  # fmt: skip
WITH_LATENTS = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "glm4_moe_lite",
                "glm_moe_dsa")  # fmt: skip
# Scores of tokens that no head of the indexer likes are equal: more heads leave none.
INDEXER = {"index_n_heads": 16, "index_head_dim": 12, "index_topk": 6}
FEW_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 20}
DEEPSEEK = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20,
            "n_group": 4, "topk_group": 2, "n_shared_experts": 2,
            "routed_scaling_factor": 2.5}  # fmt: skip
KIMI_LINEAR = {**FEW_EXPERTS, **LATENT, "q_lora_rank": None, "num_local_experts": 8,
               "num_expert_group": 2, "linear_num_heads": 4, "linear_head_dim": 8,
               "num_hidden_layers": 3, "rms_norm_eps": 1e-4,
               "layer_types": ["linear_attention"] * 2 + ["full_attention"]}  # fmt: skip
GRANITE = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.3,
           "logits_scaling": 3.0}  # fmt: skip
GRANITE_EXPERTS = {**GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 12,
         "mamba_chunk_size": 8}  # fmt: skip
FALCON = {
    **MAMBA, "mamba_d_ssm": 64, "key_multiplier": 0.4, "attention_out_multiplier": 0.9,
    "ssm_out_multiplier": 0.6, "ssm_multipliers": [0.7, 0.5, 0.9, 1.4, 0.8],
    "mlp_multipliers": [0.9, 0.6], "embedding_multiplier": 5.0, "lm_head_multiplier": 0.3,
}  # fmt: skip
NEMOTRON = {"mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 12,
            "chunk_size": 8, "head_dim": 16, "n_routed_experts": 4, "moe_intermediate_size": 20,
            "moe_shared_expert_intermediate_size": 28}  # fmt: skip
GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "swiglu_limit": 0.3,
           "sliding_window": 8}  # fmt: skip
DELTA = {"num_hidden_layers": 4, "head_dim": 8, "linear_num_key_heads": 2,
         "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6,
         "layer_types": ["linear_attention"] * 3 + ["full_attention"],
         # The norm of a head's output amplifies the rounding of outputs near 0.
         "rms_norm_eps": 1e-2}  # fmt: skip
HY3 = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "head_dim": 16}
ALPHA = {"alpha": 50.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0,
         "mscale_all_dim": 1.0, "type": "dynamic"}  # fmt: skip
HUNYUAN = {"attention_head_dim": 16, "use_qk_norm": True, "use_cla": False, "cla_share_factor": 2,
           "norm_type": "rms", "rope_theta": 500.0, "head_dim": 16}  # fmt: skip
MINIMAX = {"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 16}
AFMOE = {"num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 3, "route_scale": 2.5,
         "moe_intermediate_size": 20}  # fmt: skip
LONG = [1.0 + 0.5 * i for i in range(4)]
LONGROPE = {"type": "longrope", "short_factor": LONG[::-1], "long_factor": LONG}
CASES = {
    # name: model type, keys in addition to the shape
    "llama": ("llama", {}),
    "llama, biases, gelu": ("llama", {**ALL_BIASES, "hidden_act": "gelu"}),
    "llama, llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama, linear": ("llama", {"rope_parameters": rope("linear", factor=3.0)}),
    "llama, dynamic, longer": (
        "llama", {"rope_parameters": rope("dynamic", factor=3.0), "max_position_embeddings": 16}
    ),
    "llama, yarn": ("llama", {"rope_parameters": YARN}),
    "llama, yarn, every key": ("llama", {"rope_parameters": {
        **YARN, "beta_fast": 4.0, "beta_slow": 0.5, "truncate": False, "mscale": 0.7,
        "mscale_all_dim": 0.3,
    }}),
    "mistral, window 8": ("mistral", {"sliding_window": 8}),
    "mistral, window 40": ("mistral", {"sliding_window": 40}),
    "ministral3": ("ministral3", {"head_dim": 16, "rope_parameters": {
        **YARN, "original_max_position_embeddings": 8, "mscale": 1.0, "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.4}}),
    "ministral3, window 8": ("ministral3", {"head_dim": 8, "sliding_window": 8, "rope_parameters": {
        **rope("default"), "original_max_position_embeddings": 5, "llama_4_scaling_beta": 0.4}}),
    "qwen2": ("qwen2", {"layer_types": ["full_attention", "sliding_attention"],
                        "use_sliding_window": True, "sliding_window": 8}),
    "qwen3": ("qwen3", {"head_dim": 16, "attention_bias": True}),
    "olmo2": ("olmo2", {"attention_bias": True}),
    "olmo3, window 8": ("olmo3", {**PATTERN, "sliding_window": 8, "rope_parameters": {
        "full_attention": YARN, "sliding_attention": rope("default")}}),
    "olmo3, window 40": ("olmo3", {**PATTERN, "sliding_window": 40}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4}),
    "smollm3, window 8": ("smollm3", {
        "num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 0], "sliding_window": 8,
        "use_sliding_window": True, "tie_word_embeddings": False}),
    "gemma": ("gemma", {"head_dim": 16}),
    "gemma2, window 8": ("gemma2", {
        "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 12,
        "attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0}),
    "gemma2, window 40": ("gemma2", {"head_dim": 8, "sliding_window": 40}),
    "gemma3, window 8": ("gemma3_text", {
        "head_dim": 16, "sliding_window": 8, **PATTERN, "rope_parameters": {
            "full_attention": rope("linear", 1e6, factor=8.0),
            "sliding_attention": rope("default", 100.0)}}),
    "gemma3, window 80": ("gemma3_text", {
        "head_dim": 16, "sliding_window": 80, **PATTERN, "rope_parameters": {
            "full_attention": rope("default", 1e6), "sliding_attention": rope("default", 100.0)}}),
    "gemma4": ("gemma4_text", {
        **GEMMA4, "attention_k_eq_v": True, "global_head_dim": 32, "attention_bias": True,
        "num_global_key_value_heads": 1, "final_logit_softcapping": 2.0}),
    "gemma4, experts": ("gemma4_text", {
        **GEMMA4, "global_head_dim": 32, "attention_k_eq_v": True,
        "num_global_key_value_heads": 1, "enable_moe_block": True, "num_experts": 6,
        "top_k_experts": 3, "moe_intermediate_size": 20}),
    "gemma4, shared keys": ("gemma4_text", {
        **GEMMA4, "global_head_dim": 32, "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "hidden_size_per_layer_input": 6,
        "rms_norm_eps": 1e-2}),  # norms amplify the rounding of small values
    "granite": ("granite", {**GRANITE, **ALL_BIASES}),
    "phi3": ("phi3", {}),
    "phi3, window 8": ("phi3", {"sliding_window": 8}),
    "phi3, longrope": ("phi3", {
        "rope_scaling": LONGROPE, "original_max_position_embeddings": 16}),
    "phi3, longrope, short": ("phi3", {
        "rope_scaling": LONGROPE, "original_max_position_embeddings": 32}),
    "phi3, partial": ("phi3", {"partial_rotary_factor": 0.5}),
    "stablelm": ("stablelm", MHA),
    "stablelm, biases": ("stablelm", {"use_qkv_bias": True, "partial_rotary_factor": 0.5}),
    "gpt_neox": ("gpt_neox", {"num_key_value_heads": None}),
    "gpt_neox, in turn": ("gpt_neox", {
        "num_key_value_heads": None, "use_parallel_residual": False, "attention_bias": False,
        "rotary_pct": 1.0}),
    "gpt2": ("gpt2", {}),
    "gpt2, wide": ("gpt2", {"n_inner": 48, "activation_function": "relu",
                            "scale_attn_weights": False}),
    "starcoder2": ("starcoder2", {"sliding_window": 8}),
    "starcoder2, no biases": ("starcoder2", {"use_bias": False, "hidden_act": "relu"}),
    "arcee": ("arcee", {"hidden_act": "relu", **ALL_BIASES}),
    "arcee, gelu": ("arcee", {"hidden_act": "gelu"}),
    "glm": ("glm", {"head_dim": 16}),
    "glm, all channels, no biases": ("glm", {
        "head_dim": 8, "attention_bias": False, "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}}),
    "glm4": ("glm4", {"head_dim": 8}),
    "cohere": ("cohere", {"logit_scale": 2.0}),
    "cohere, biases": ("cohere", {
        "attention_bias": True, "logit_scale": 0.7, "tie_word_embeddings": False, "head_dim": 16}),
    "cohere, q/k norms": ("cohere", {"use_qk_norm": True, "logit_scale": 2.0}),
    "cohere2, window 8": ("cohere2", {
        **PATTERN, "sliding_window": 8, "logit_scale": 2.0, "head_dim": 16}),
    "cohere2, window 80": ("cohere2", {**PATTERN, "sliding_window": 80, "logit_scale": 2.0}),
    "ernie4_5": ("ernie4_5", {"head_dim": 16}),
    "ernie4_5, biases": ("ernie4_5", {"head_dim": 8, "use_bias": True}),
    "nemotron": ("nemotron", {}),
    "nemotron, biases": ("nemotron", {**ALL_BIASES, "hidden_act": "gelu", "head_dim": 16}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral, window 8": ("mixtral", {
        "num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 8, "head_dim": 16}),
    "qwen2_moe": ("qwen2_moe", {
        **FEW_EXPERTS, "num_experts": 6, "shared_expert_intermediate_size": 32}),
    "qwen2_moe, some layers, window 8": ("qwen2_moe", {
        **FEW_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 28, "qkv_bias": False,
        "norm_topk_prob": True, "num_hidden_layers": 6, "decoder_sparse_step": 2,
        "mlp_only_layers": [1], "use_sliding_window": True, "sliding_window": 8,
        "max_window_layers": 3}),
    "qwen3_moe": ("qwen3_moe", {**FEW_EXPERTS, "num_experts": 12, "norm_topk_prob": True}),
    "qwen3_moe, some layers, window 8": ("qwen3_moe", {
        **FEW_EXPERTS, "num_experts": 4, "num_hidden_layers": 4, "decoder_sparse_step": 2,
        "head_dim": 16, "attention_bias": True, "use_sliding_window": True, "sliding_window": 8}),
    "olmoe": ("olmoe", {
        "num_experts": 4, "num_experts_per_tok": 2, "attention_bias": True, "clip_qkv": 0.5}),
    "olmoe, mha": ("olmoe", {
        "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, **MHA}),
    "dots1": ("dots1", {
        **DEEPSEEK, "num_hidden_layers": 3, "first_k_dense_replace": 1, "norm_topk_prob": True}),
    "dots1, window 8": ("dots1", {
        **DEEPSEEK, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "sliding_window": 8,
        "max_window_layers": 1, "attention_bias": True}),
    "glm4_moe": ("glm4_moe", {
        **DEEPSEEK, "num_hidden_layers": 3, "first_k_dense_replace": 2, "use_qk_norm": True,
        "head_dim": 16}),
    "glm4_moe, no norms": ("glm4_moe", {
        **DEEPSEEK, "first_k_dense_replace": 0, "norm_topk_prob": False, "attention_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                            "partial_rotary_factor": 1.0}}),
    "deepseek_v2": ("deepseek_v2", {
        **LATENT, **DEEPSEEK, "q_lora_rank": None, "topk_method": "greedy", "num_hidden_layers": 3,
        "first_k_dense_replace": 1}),
    "deepseek_v2, groups": ("deepseek_v2", {
        **LATENT, **DEEPSEEK, "topk_method": "group_limited_greedy", "attention_bias": True,
        "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.3}}),
    "deepseek_v3": ("deepseek_v3", {
        **LATENT, **DEEPSEEK, "num_hidden_layers": 3, "first_k_dense_replace": 1,
        "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}),
    "deepseek_v3, lite": ("deepseek_v3", {
        **LATENT, **DEEPSEEK, "q_lora_rank": None, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "attention_bias": True, "rms_norm_eps": 1e-5,
        "v_head_dim": 16}),
    "kimi_k2": ("kimi_k2", {
        **LATENT, **DEEPSEEK, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
        "first_k_dense_replace": 1}),
    "kimi_linear": ("kimi_linear", {**KIMI_LINEAR, "mlp_layer_types": ["sparse"] * 3}),
    "minimax_m2": ("minimax_m2", {
        **MINIMAX, "rotary_dim": 8, "qk_norm_type": "per_layer", "use_qk_norm": True,
        "scoring_func": "sigmoid", "use_routing_bias": True, "shared_intermediate_size": 0,
        "attn_type_list": [1, 1], "use_mtp": True, "num_mtp_modules": 3}),  # as published
    "minimax_m2, all channels": ("minimax_m2", {
        **MINIMAX, **MHA, "rope_parameters": YARN, "tie_word_embeddings": True}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {**HUNYUAN, "rope_scaling": ALPHA}),  # as published
    "hunyuan_v1_dense, biases": ("hunyuan_v1_dense", {
        **MHA, "head_dim": 8, "attention_bias": True, "tie_word_embeddings": True,
        "rope_parameters": rope("dynamic", factor=3.0), "max_position_embeddings": 16}),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", {
        **HUNYUAN, "rope_scaling": ALPHA, "num_experts": 6, "moe_topk": [3, 3],
        "num_shared_expert": [1, 1], "moe_intermediate_size": [48, 48], "norm_topk_prob": True,
        "use_mixed_mlp_moe": True, "moe_layer_num_skipped": 0, "routed_scaling_factor": False,
        "n_group": False, "kv_lora_rank": None}),  # as published
    "hunyuan_v1_moe, biases": ("hunyuan_v1_moe", {
        "head_dim": 8, "attention_bias": True, "num_experts": 4, "moe_topk": 2}),
    "hy_v3": ("hy_v3", {
        **HY3, "num_hidden_layers": 3, "num_shared_experts": 2, "first_k_dense_replace": 1,
        "qk_norm": True, "route_norm": True, "moe_router_use_sigmoid": True,
        "moe_router_enable_expert_bias": True, "enable_lm_head_fp32": True}),  # as published
    "hy_v3, some layers, biases": ("hy_v3", {
        **HY3, **MHA, "num_hidden_layers": 4, "attention_bias": True, "rope_parameters": YARN,
        "mlp_layer_types": ["dense", "sparse"] * 2, "tie_word_embeddings": True}),
    "gpt_oss": ("gpt_oss", {**GPT_OSS, "num_hidden_layers": 4, "rope_parameters": {
        **YARN, "truncate": False}}),
    "gpt_oss, full, no biases": ("gpt_oss", {
        **GPT_OSS, "num_local_experts": 5, "num_experts_per_tok": 3, "attention_bias": False,
        "layer_types": ["full_attention"] * 2, "rope_parameters": rope("default"), **MHA}),
    "glm4_moe_lite": ("glm4_moe_lite", {
        **LATENT, **DEEPSEEK, "num_hidden_layers": 3,
        "mlp_layer_types": ["dense", "dense", "sparse"]}),
    "deepseek_v32": ("deepseek_v32", {
        **LATENT, **DEEPSEEK, **INDEXER, "rope_parameters": {**YARN, "mscale": 0.7,
        "mscale_all_dim": 0.7}, "mlp_layer_types": ["dense", "sparse"]}),
    "glm_moe_dsa": ("glm_moe_dsa", {**LATENT, **DEEPSEEK, **INDEXER, "attention_bias": True,
                                    "mlp_layer_types": ["sparse", "sparse"]}),
    "exaone4, window 8": ("exaone4", {**PATTERN, "sliding_window": 8, "rope_parameters": LLAMA3}),
    "exaone4, window 80": ("exaone4", {**PATTERN, "sliding_window": 80, "head_dim": 16}),
    "exaone4, no windows": ("exaone4", {"sliding_window": None,
                                        "layer_types": ["full_attention"] * 2}),
    "afmoe": ("afmoe", {**AFMOE, "head_dim": 16, "sliding_window": 8, "mup_enabled": True}),
    "afmoe, window 80": ("afmoe", {
        **AFMOE, "head_dim": 8, "sliding_window": 80, "num_dense_layers": 0,
        "num_shared_experts": 1}),
    "granitemoe": ("granitemoe", {**GRANITE_EXPERTS, "attention_bias": True}),
    "granitemoeshared": ("granitemoeshared", {**GRANITE_EXPERTS, "shared_intermediate_size": 40}),
    "granitemoehybrid, dense": ("granitemoehybrid", {
        **GRANITE, **MAMBA, "shared_intermediate_size": 40, "num_local_experts": 0,
        "mamba_n_groups": 1, "mamba_d_head": "auto", "mamba_conv_bias": False,
        "mamba_proj_bias": True, "attention_bias": True, "position_embedding_type": "rope",
        "layer_types": ["full_attention", "linear_attention"]}),
    "granitemoehybrid, experts": ("granitemoehybrid", {
        **GRANITE_EXPERTS, **MAMBA, "shared_intermediate_size": 40, "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "time_step_limit": [0.2, 1.5]}),
    "bamba": ("bamba", {**MAMBA, "attn_layer_indices": [1]}),
    "bamba, biases": ("bamba", {
        **MAMBA, **ALL_BIASES, "mamba_proj_bias": True, "attn_layer_indices": [0]}),
    "nemotron_h": ("nemotron_h", {
        **NEMOTRON, "hybrid_override_pattern": "M*-", "time_step_min": 0.01}),
    "nemotron_h, experts, biases": ("nemotron_h", {
        **NEMOTRON, "hybrid_override_pattern": "ME*", "use_bias": True, "use_conv_bias": False,
        "n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5, "moe_latent_size": 24,
        "time_step_min": 1e-6}),  # transformers does not clamp the time steps of single tokens
    "lfm2": ("lfm2", {"num_hidden_layers": 3, "full_attn_idxs": [1]}),
    "lfm2, biases": ("lfm2", {
        "layer_types": ["full_attention", "conv"], "conv_bias": True, "conv_L_cache": 5,
        "block_auto_adjust_ff_dim": False, "tie_word_embeddings": False}),
    "lfm2_moe": ("lfm2_moe", {
        **FEW_EXPERTS, "num_experts": 6, "num_hidden_layers": 3, "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention", "conv"], "routed_scaling_factor": 2.5}),
    "falcon_h1": ("falcon_h1", {
        **FALCON, "attention_in_multiplier": 1.3, "ssm_in_multiplier": 1.25}),
    "falcon_h1, biases, norm": ("falcon_h1", {
        **FALCON, **ALL_BIASES, "mamba_proj_bias": True, "projectors_bias": True,
        "mamba_rms_norm": True, "head_dim": 16, "time_step_limit": [0.2, 1.5]}),
    "falcon_h1, gated norm": ("falcon_h1", {
        **FALCON, "mamba_rms_norm": True, "mamba_norm_before_gate": False}),
    "nemotron_h, no latent": ("nemotron_h", {
        **NEMOTRON, "hybrid_override_pattern": "ME*E", "time_step_min": 0.01}),
    "ernie4_5_moe": ("ernie4_5_moe", {**ERNIE, "num_hidden_layers": 3}),
    "ernie4_5_moe, some layers": ("ernie4_5_moe", {
        **ERNIE, "num_hidden_layers": 4, "moe_layer_interval": 2, "moe_num_shared_experts": 0,
        "head_dim": 16}),
    "llama4_text": ("llama4_text", {**LLAMA4, "num_hidden_layers": 4}),
    "llama4_text, some layers": ("llama4_text", {
        **LLAMA4, "num_hidden_layers": 5, "interleave_moe_layer_step": 2, "num_experts_per_tok": 3,
        "attention_bias": True, "use_qk_norm": False, "no_rope_layers": [1, 0, 1, 1, 0]}),
    "llama4_text, all rotate": ("llama4_text", {
        **LLAMA4, "moe_layers": [1], "no_rope_layers": [1, 1], "attention_chunk_size": 80}),
    "qwen3_5": ("qwen3_5_text", {
        **DELTA, "attention_bias": True, "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"]}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {**DELTA, **FEW_EXPERTS, "num_experts": 4,
                                         "shared_expert_intermediate_size": 28}),
    "qwen3_next": ("qwen3_next", {**DELTA, **FEW_EXPERTS, "num_experts": 4,
                                  "shared_expert_intermediate_size": 28, "head_dim": 16}),
}  # fmt: skip
SHAPES = {"gpt2": GPT2, "gemma4_text": {**SHAPE, "vocab_size_per_layer_input": 300}}


def default_keys(family):
    """Return keys of a small model: the family's defaults, limited in size."""
    sizes = {key: 16 for key, value in family.defaults.items() if type(value) is int and value > 16}
    return {family.name_in_family(key): value for key, value in {**sizes, **SHAPE}.items()}


WITH_DEFAULTS = [name for name in FAMILIES if name not in {kind for kind, _ in CASES.values()}]
"""Families without a case of their own."""
CASES |= {name: (name, default_keys(FAMILIES[name])) for name in WITH_DEFAULTS}


def keys_of(case):
    model_type, keys = CASES[case]
    shape = SHAPES.get(model_type, SHAPE)
    return model_type, {k: v for k, v in {**shape, **keys}.items() if v is not None or "pad" in k}


def network_of(case):
    """Return a network with distinct vectors: swapped norms of 1 would go unnoticed."""
    model_type, keys = keys_of(case)
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **json.loads(json.dumps(keys)))
    network = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if parameter.ndim == 1 or is_bias(name) or "_norm." in name:
                parameter.add_(torch.empty_like(parameter).uniform_(-0.4, 0.4))
            if name.endswith("q_norm.weight") and model_type == "gemma4_text":
                parameter.mul_(0.2)  # its scores have no scale: sharp weights amplify rounding
        for name, buffer in network.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.uniform_(-0.4, 0.4)
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
    return network.eval()


def is_bias(name):
    """Return whether a name is a bias, which is a matrix over experts."""
    return name.endswith("bias")


SLOW = frozenset({
    "glm, all channels, no biases", "cohere, biases", "cohere2, window 80", "ernie4_5, biases",
    "nemotron, biases", "llama4_text, all rotate", "ernie4_5_moe, some layers",
    "deepseek_v2", "deepseek_v3, lite", "kimi_k2", "llama, yarn", "mistral, window 40",
    "olmo3, window 40", "gemma2, window 40", "phi3, window 8", "phi3, partial",
    "stablelm, biases", "gpt_neox, in turn", "gpt2, wide", "starcoder2, no biases", "arcee, gelu",
    "cohere, q/k norms", "mixtral, window 8", "qwen3_moe, some layers, window 8",
    "olmoe, mha", "glm4_moe, no norms", "gpt_oss, full, no biases", "llama4_text, some layers",
    "granitemoehybrid, experts", "bamba, biases", "minimax_m2, all channels",
    "hy_v3, some layers, biases", "hunyuan_v1_dense, biases", "hunyuan_v1_moe, biases",
    "glm4_moe_lite", "exaone4, window 80",
    "exaone4, no windows", "afmoe, window 80", "ministral3, window 8",
    "smollm3, window 8", "dots1, window 8", "nemotron_h, no latent", "lfm2, biases",
    "falcon_h1, biases, norm", "falcon_h1, gated norm", "nemotron_h, experts, biases", "dots1",
    "qwen3_5_moe", "qwen2_moe, some layers, window 8", "olmoe", "granitemoeshared",
    "gemma3, window 80", "phi3, longrope, short", "arcee", "seed_oss", "glm_moe_dsa", "qwen3_moe",
    "llama, linear", "lfm2_moe", "gemma4", "llama, biases, gelu", "olmo2", "gemma", "glm4",
    "starcoder2", "hunyuan_v1_dense", "bamba", "qwen3_5", "ernie4_5", "qwen3", "granitemoe",
    "phi3", "smollm3",
})  # fmt: skip
"""Cases with little that no other case has. `kimi_k2` has the network of `deepseek_v3`."""


def marked(cases, slow=SLOW):
    return [pytest.param(case, marks=pytest.mark.slow) if case in slow else case for case in cases]


@pytest.fixture(scope="module", params=marked(CASES))
def imported(request, tmp_path_factory):
    """Return a transformers directory, its imported run, and both networks."""
    path = tmp_path_factory.mktemp("family")
    network = network_of(request.param)
    network.config.eos_token_id, network.config.bos_token_id = [0, 7, 5], 3
    network.generation_config = transformers.GenerationConfig(
        eos_token_id=[0, 7, 5], bos_token_id=3, do_sample=True, temperature=0.6, top_p=0.9
    )
    network.save_pretrained(path / "hf")
    bpe(path / "bpe")
    tokenizer = str(path / "bpe" / "tokenizer.json")
    transformers.PreTrainedTokenizerFast(
        tokenizer_file=tokenizer, eos_token=END_OF_TEXT
    ).save_pretrained(path / "hf")
    load(path / "hf", path / "run")
    return request.param, path, network, params_of(path / "run")


def tokens_of(length=LENGTH):
    return np.random.default_rng(1).integers(0, 100, (2, length))


def assert_close(native, theirs, what="logits"):
    """The tolerance is 1e-5 of the largest logit."""
    assert np.abs(np.asarray(native) - theirs).max() < 1e-5 * np.abs(theirs).max(), what


def test_logits_match_transformers(imported):
    _, _, network, (model, params) = imported
    theirs = their_logits(network, tokens_of())
    assert_close(compiled(model)(params, tokens_of()), theirs)


@functools.lru_cache(2)  # programs take memory
def extending(model):
    return jax.jit(Model(model).extend)


# Families that differ in what a cache depends on: positions, windows, order in a layer, experts.
CACHED = [
    "llama, dynamic, longer", "mistral, window 8", "phi3, longrope", "gpt2",
    "gpt_oss", "llama4_text", "qwen3_next",
    "deepseek_v3", "kimi_linear", "deepseek_v32", "gemma4, shared keys",
    *(pytest.param(name, marks=pytest.mark.slow) for name in (
        "gemma4", "gemma4, experts",
        "gemma3, window 80", "nemotron_h, experts, biases",
        "afmoe", "exaone4, window 8", "ministral3",
        "qwen2", "olmo3, window 8", "smollm3, window 8", "gemma2, window 8", "granite",
        "phi3, longrope, short", "gpt_neox", "qwen2_moe, some layers, window 8", "dots1, window 8",
        "granitemoehybrid, dense", "bamba", "cohere2, window 8", "deepseek_v2, groups",
        "minimax_m2", "hy_v3", "hunyuan_v1_dense", "hunyuan_v1_moe", "lfm2, biases", "lfm2_moe",
        "falcon_h1", "falcon_h1, gated norm")),
]  # fmt: skip


@pytest.mark.parametrize("imported", CACHED, indirect=True)
def test_cached_logits_match_transformers(imported):
    """A prompt is followed by single tokens."""
    case, _, _, (model, params) = imported
    tokens, first = tokens_of(), 20
    cache, logits = Model(model).empty_cache(2, LENGTH), []
    for at in np.split(np.arange(LENGTH), range(first, LENGTH)):
        where = np.broadcast_to(at, (2, len(at)))
        out, cache = extending(model)(params, tokens[:, at], where, cache)
        logits.append(out)
    network = network_of(case)  # without longer inputs before
    with torch.no_grad():
        out, theirs = network(torch.from_numpy(tokens[:, :first]), use_cache=True), []
        theirs.append(out.logits)
        for i in range(first, LENGTH):
            item = torch.from_numpy(tokens[:, i : i + 1])
            # Bamba's model counts positions from 0 unless it is given them.
            at = {"position_ids": torch.tensor([[i]])} if case == "bamba" else {}
            out = network(item, past_key_values=out.past_key_values, use_cache=True, **at)
            theirs.append(out.logits)
    assert_close(np.concatenate(logits, axis=1), torch.cat(theirs, dim=1).numpy())


GENERATED = 64
RECURRENT = [
    "kimi_linear",
    *(pytest.param(name, marks=pytest.mark.slow)
      for name in ("nemotron_h, experts, biases", "glm_moe_dsa", "gemma4, shared keys",
                   "gemma4, experts", "granitemoehybrid, dense", "bamba",
                   "lfm2", "lfm2_moe", "falcon_h1")),
]  # fmt: skip


@pytest.mark.parametrize("imported", RECURRENT, indirect=True)
def test_greedy_tokens_after_prompts_of_different_lengths(imported):
    """Prompts of different lengths are padded, which recurrent states must ignore."""
    _, _, network, (model, params) = imported
    tokens = tokens_of()
    prompts = [tokens[0, :7].tolist(), tokens[1, :21].tolist()]
    decoder = Decoder(Model(model), params, GENERATED, Sampling(temperature=0.0))
    for prompt, native in zip(prompts, decoder.complete(prompts, range(2)), strict=True):
        theirs, cache, values = [], None, torch.tensor([prompt])
        for _ in range(GENERATED):
            past = 0 if cache is None else cache.get_seq_length()
            at = {"position_ids": past + torch.arange(values.shape[1])[None]}
            with torch.no_grad():
                out = network(values, past_key_values=cache, use_cache=True, **at)
            cache, values = out.past_key_values, out.logits[:, -1:].argmax(-1)
            theirs.append(int(values))
        assert native.tokens == theirs


GREEDY = ["llama4_text", "cohere2, window 8", "glm4", "ernie4_5_moe", "minimax_m2", "hy_v3",
          "hunyuan_v1_dense", "hunyuan_v1_moe", "afmoe", "exaone4, window 8", "glm4_moe_lite",
          "ministral3", "seed_oss"]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("imported", marked(GREEDY, GREEDY[1:]), indirect=True)
def test_greedy_tokens_match_transformers(imported):
    """transformers reads the whole text for each token."""
    case, _, _, (model, params) = imported
    prompt = tokens_of(8)[0].tolist()
    decoder = Decoder(Model(model), params, LONGEST - len(prompt), Sampling(temperature=0.0))
    (native,) = decoder.complete([prompt], range(1))
    network, theirs = network_of(case), list(prompt)
    with torch.no_grad():
        while len(theirs) < LONGEST:
            theirs.append(int(network(torch.tensor([theirs])).logits[0, -1].argmax()))
    assert native.tokens == theirs[len(prompt) :]


def test_export_of_import_is_identical(imported, tmp_path):
    """The export has the imported family, keys and generation settings."""
    _, path, network, (model, _) = imported
    back = export(path / "run", tmp_path / "back")
    expected = {**config_json(path / "hf"), "dtype": "float32", "torch_dtype": "float32"}
    if "num_nextn_predict_layers" in expected:  # not exported
        expected["num_nextn_predict_layers"] = 0
    assert config_json(back) == expected
    generation = "generation_config.json"
    assert json.loads((back / generation).read_text()) == json.loads(
        (path / "hf" / generation).read_text()
    )
    assert_same_bits(tensors_of(path / "hf"), tensors_of(back))
    again = open_theirs(back)
    assert type(again) is type(network)
    assert_close(their_logits(again, tokens_of()), their_logits(network, tokens_of()))
    again.generation_config.validate(strict=True)
    assert again.generation_config.eos_token_id == again.config.eos_token_id == [0, 7, 5]
    native, theirs = (transformers.PreTrainedTokenizerFast.from_pretrained(d)
                    for d in (back, path / "hf"))  # fmt: skip
    assert native(TEXTS[0])["input_ids"] == theirs(TEXTS[0])["input_ids"]
    transformers.AutoConfig.from_pretrained(back).save_pretrained(tmp_path / "rewritten")
    for written in (back, tmp_path / "rewritten"):
        read = ModelConfig(**hf_config.model_table(config_json(written), ""))
        assert hf_config.network_settings(read) == hf_config.network_settings(model)


# Families whose gradients differ; layers of other families are subsets. Gradients of routers are
# tested in tests/model/test_moe.py.
TRAINED = [
    "gpt_oss", "gemma4, shared keys",
    *(pytest.param(name, marks=pytest.mark.slow) for name in (
        "qwen3_5", "kimi_linear", "glm_moe_dsa", "gemma4", "gemma4, experts",
        "gemma3, window 8", "gpt2", "nemotron_h, experts, biases", "cohere", "nemotron",
        "olmo3, window 8", "gemma2, window 8", "granite", "gpt_neox", "qwen2_moe", "dots1",
        "llama4_text", "granitemoeshared", "bamba, biases",
        "granitemoehybrid, dense", "granitemoehybrid, experts", "qwen3_next",
        "deepseek_v2, groups", "deepseek_v3, lite", "minimax_m2", "hy_v3",
        "lfm2, biases", "lfm2_moe", "falcon_h1", "falcon_h1, biases, norm",
        "hunyuan_v1_dense", "hunyuan_v1_moe", "afmoe", "exaone4, window 8", "ministral3")),
    "deepseek_v3",
]  # fmt: skip
WITHOUT_BALANCE = {"moe_aux_loss_weight": 0.0, "moe_bias_update_rate": 0.0}
UPDATES, LR, CLIP = 10, 1e-3, 1.0
EPS = 1e-6  # large enough that rounding does not decide the sign of an update


@pytest.mark.parametrize("imported", TRAINED, indirect=True)
def test_ten_updates_match_torch(imported):
    case, _, _, (model, params) = imported
    table = {**model.model_dump(), **WITHOUT_BALANCE}
    if model.latent_attention.has_indexer:  # transformers does not train it
        table["latent_attention"] |= {"index_loss_weight": 0.0}
    config = tiny_config(
        model=table,
        train={"batch_size": 2, "seq_len": LENGTH, "grad_clip_norm": CLIP},
        optimizer={"lr": LR, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": EPS},
        scheduler={"name": "none"},
    )  # fmt: skip
    rng = np.random.default_rng(2)
    inputs = rng.integers(0, 100, (UPDATES, 2, LENGTH))
    labels = rng.integers(0, 100, (UPDATES, 2, LENGTH))
    native = setup(config)
    batches = [
        {"input_ids": i[None], "labels": x[None]} for i, x in zip(inputs, labels, strict=True)
    ]
    _, metrics = native.run(state_of(native, params), batches)
    expected = torch_updates(network_of(case), inputs, labels)
    np.testing.assert_allclose(metrics["loss"], expected[0], rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], expected[1], rtol=1e-5)


def torch_updates(network, inputs, labels):
    """Return losses and gradient norms of AdamW, which decays matrices."""
    matrices, vectors = (
        [p for name, p in network.named_parameters()
         if (p.squeeze().ndim > 1 and not is_bias(name)) is is_matrix]
        for is_matrix in (True, False)
    )  # fmt: skip
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=EPS)
    losses, norms = [], []
    for tokens, targets in zip(inputs, labels, strict=True):
        logits = network(torch.from_numpy(tokens)).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), torch.from_numpy(targets).flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(network.parameters(), CLIP)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, norms


# Refusals


def minimal(model_type, **keys):
    shape = SHAPES.get(model_type, SHAPE)
    return {"model_type": model_type, **shape, **keys}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (minimal("llama", mlp_act="x"), "no counterpart of mlp_act = 'x' in llama"),
        (minimal("llama", sliding_window=8), "no counterpart of sliding_window = 8 in llama"),
        (minimal("olmo2", layer_types=["full_attention"]), "counterpart of layer_types"),
        (minimal("stablelm", qk_layernorm=True), "counterpart of qk_layernorm = True"),
        (minimal("stablelm", use_parallel_residual=True), "use_parallel_residual = True"),
        (minimal("gemma3_text", use_bidirectional_attention=True), "use_bidirectional_attention"),
        (minimal("gemma2", rms_norm_eps="x"), "rms_norm_eps = 'x' is not possible"),
        (minimal("stablelm", rms_norm_eps=1e-3), "does not read rms_norm_eps in stablelm. Rename"),
        (minimal("starcoder2", norm_epsilon=1e-6, rms_norm_eps=1e-3), "rms_norm_eps = 0.001 contr"),
        (minimal("gpt_neox", rope_theta=500.0), "does not read rope_theta in gpt_neox"),
        (minimal("gemma", hidden_act="relu", hidden_activation="gelu"), "contradict each other"),
        (minimal("gemma3_text", attn_logit_softcapping=3.0), "counterpart of attn_logit_softcapp"),
        (minimal("qwen2", layer_types=["sliding_attention"] * 2), "use_sliding_window is false"),
        (minimal("gpt2", scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx"),
        (minimal("gpt2", layer_norm_epsilon=-1), "layer_norm_epsilon = -1 is not possible"),
        (minimal("llama", hidden_act="quick_gelu"), "'quick_gelu'; supported are silu"),
        (minimal("llama", partial_rotary_factor=0.5), "partial_rotary_factor = 0.5"),
        (minimal("llama", rope_parameters=rope("proportional")), "of type 'proportional'"),
        (minimal("llama", rope_parameters=rope("linear")), "rope_parameters does not give factor"),
        (minimal("llama", rope_parameters=rope("default", mrope_section=[1])), "has mrope_section"),
        (minimal("phi3", rope_scaling={**LONGROPE, "long_factor": [1, "x"]}), "has long_factor"),
        (minimal("gemma3_text", rope_parameters={"sliding_attention": LLAMA3}),
         "a scaling of sliding layers is not supported"),
        (minimal("olmoe", head_dim=16), "head_dim = 16: all heads must add up to"),
        (minimal("qwen3_moe", num_hidden_layers=4, mlp_only_layers=[2]), "mlp_only_layers = .2."),
        (minimal("qwen3_moe", decoder_sparse_step=3), "no layer has experts with decoder_sparse"),
        (minimal("qwen2_moe", sliding_window=0, use_sliding_window=True), "must be at least 1"),
        (minimal("qwen2_moe", shared_expert_intermediate_size=0), "_size = 0 is not possible"),
        (minimal("dots1"), "does not give n_routed_experts, num_experts_per_tok, n_shared"),
        (minimal("dots1", **{**DEEPSEEK, "n_group": 8}), "n_group = 8: a group needs at least two"),
        (minimal("glm4_moe", n_routed_experts=None), "n_routed_experts = None is not possible"),
        (minimal("mixtral", expert_capacity=4), "counterpart of expert_capacity = 4 in mixtral"),
        (minimal("gpt_oss", swiglu_alpha=1.5), "no counterpart of swiglu_alpha = 1.5 in gpt_oss"),
        (minimal("gpt_oss", swiglu_limit=None), "swiglu_limit = None is not possible"),
        (minimal("gpt_oss", layer_types=["chunked_attention"] * 2), "2 layers of chunked_attent"),
        (minimal("gpt_oss", quantization_config={"quant_method": "mxfp4"}),
         r"quantized, in MXFP4: take a copy in bfloat16.*Mxfp4Config\(dequantize=True\)"),
        (minimal("llama4_text", moe_layers=[]), "no counterpart of experts in layers"),
        (minimal("llama4_text", no_rope_layers=[1]), "must have 2 layers, of full_attention and"),
        (minimal("exaone4", sliding_window_pattern="LLLG"), "'LLLG' is not a positive integer"),
        (minimal("glm4_moe_lite", mlp_layer_types=["sparse"]), "mlp_layer_types has 1 layers of"),
        (minimal("glm4_moe_lite", first_k_dense_replace=3), "of first_k_dense_replace = 3 in glm"),
        (minimal("ministral3", rope_parameters=YARN), "llama_4_scaling_beta = None and original"),
        (minimal("cohere2", sliding_window=None), "layers without a window have no positions"),
        (minimal("ernie4_5_moe", moe_layer_start_index=2), "no counterpart of experts in layers"),
        (minimal("deepseek_v2", **LATENT, topk_method="noaux_tc"), "of topk_method = 'noaux_tc'"),
        (minimal("deepseek_v2", **LATENT), "does not give num_experts_per_tok"),
        (minimal("deepseek_v2", num_experts_per_tok=2, topk_method="group_limited_greedy", **MHA),
         "does not give n_group, topk_group"),
        (minimal("deepseek_v3"), "num_key_value_heads = 2 must equal num_attention_heads = 4"),
        (minimal("deepseek_v3", rope_interleave=False), "counterpart of rope_interleave = False"),
        (minimal("deepseek_v3", v_head_dim=None), "v_head_dim = None is not possible"),
        (minimal("minimax_m2", attn_type_list=[1, 0]), "must have full attention"),
        (minimal("hunyuan_v1_moe", moe_topk=[1, 2], num_experts=2), "must have the same number"),
        (minimal("hunyuan_v1_moe", moe_intermediate_size=[48, 24]), "which mean 48. Change one"),
        (minimal("hunyuan_v1_dense", attention_head_dim=16), "_dim = 16 contradicts .* mean 8"),
        (minimal("hunyuan_v1_dense", rope_scaling={"type": "dynamic", "alpha": "x"}), "has alpha"),
        (minimal("hunyuan_v1_dense", rope_scaling={"type": "linear", "alpha": 2.0}), "has alpha,"),
        (minimal("hy_v3", first_k_dense_replace=2), "_replace = 2 contradicts .* which mean 1"),
        (minimal("hy_v3", mlp_layer_types=["sparse"]), "mlp_layer_types has 1 of 2 layers"),
        (minimal("lfm2", layer_types=["conv"]), "layer_types has 1 layers of conv; it must have 2"),
        (minimal("falcon_h1", **FALCON, attention_bias=True, attention_in_multiplier=2.0),
         "of attention_in_multiplier = 2.0 with attention_bias = true"),
        (minimal("falcon_h1", **FALCON, projectors_bias=True), "must equal mamba_proj_bias"),
        (minimal("falcon_h1", ssm_multipliers=[1.0]), "ssm_multipliers = .1.0. is not possible"),
        (minimal("nonsense"), "model_type 'nonsense' is not one of llama, mistral"),
    ],
)  # fmt: skip
def test_unsupported_settings_are_refused_by_name(config, message):
    with pytest.raises(UserError, match=message) as error:
        hf_config.model_table(config, "here")
    assert str(error.value).startswith("here: ")


FEW = {"vocab_size": 300, "hidden_size": 256, "intermediate_size": 48, "num_hidden_layers": 8,
       "num_attention_heads": 32, "max_position_embeddings": 64}  # fmt: skip
FEW_OF_GPT2 = {"vocab_size": 300, "n_embd": 256, "n_layer": 8, "n_head": 32, "n_positions": 64}
OLDER = [
    ("gemma3_text", {"rope_theta": 5e5, "rope_local_base_freq": 123.0, "sliding_window": 16,
                     "sliding_window_pattern": 2}),
    ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window": 16}),
    ("gemma2", {"hidden_act": "gelu_pytorch_tanh", "cache_implementation": "hybrid",
                "sliding_window_size": 4096}),
    ("llama", {"is_llama_config": True, "rope_interleaved": False}),
    ("phi3", {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False}),
    ("olmo3", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16,
                                "original_max_position_embeddings": 16}, "sliding_window": 16}),
    ("gpt_neox", {"rotary_pct": 0.5, "rotary_emb_base": 500}),
    ("stablelm", {"partial_rotary_factor": 0.5, "rope_theta": 500}),
    ("phi3", {"rope_scaling": LONGROPE, "rope_theta": 500.0,
              "original_max_position_embeddings": 16, "partial_rotary_factor": 1.0}),
    ("smollm3", {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 16}),
    ("gpt2", {"n_ctx": 64, "summary_type": "cls_index", "n_inner": None}),
    ("llama", {"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": 2.0, "mscale_all_dim": 1.0,
                                "original_max_position_embeddings": 16}, "pretraining_tp": 2}),
    ("gpt_oss", {"experts_per_token": 4, "initial_context_length": 16, "sliding_window": 16,
                 "rope_theta": 500, "rope_scaling": {"rope_type": "yarn", "factor": 4.0,
                 "original_max_position_embeddings": 16, "truncate": False}}),
    ("hunyuan_v1_dense", {"rope_theta": 500.0, "rope_scaling": ALPHA, "pool_type": "last"}),
    ("hunyuan_v1_moe", {"num_experts": 8, "moe_topk": [2] * 8, "num_shared_expert": [1] * 8}),
    ("hy_v3", {"rope_theta": 500, "first_k_dense_replace": 1, "expert_hidden_dim": 1536}),
    ("minimax_m2", {"rope_theta": 500, "rotary_dim": 64, "attn_type_list": [1] * 8}),
    ("afmoe", {"global_attn_every_n_layers": 2, "num_dense_layers": 2, "route_norm": True,
               "score_func": "sigmoid", "n_group": 1, "topk_group": 1, "num_expert_groups": 1,
               "num_limited_groups": 1, "load_balance_coeff": 5e-5, "use_grouped_mm": True,
               "mup_enabled": True, "sliding_window": 16, "rope_theta": 5e3}),
    ("exaone4", {"sliding_window_pattern": "LLLG", "sliding_window": 16, "rope_theta": 1e6,
                 "layer_types": 2 * PATTERN["layer_types"],
                 "rope_scaling": {**LLAMA3, "factor": 16.0}}),
    ("exaone4", {"sliding_window_pattern": None, "sliding_window": None,
                 "layer_types": ["full_attention"] * 8}),
    ("glm4_moe_lite", {"first_k_dense_replace": 1, "num_nextn_predict_layers": 0,
                       "topk_method": "noaux_tc", "partial_rotary_factor": 1.0,
                       "rope_scaling": None, "rope_theta": 1e6, "head_dim": 64}),
    ("ministral3", {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0,
                    "type": "yarn", "llama_4_scaling_beta": 0.1}, "sliding_window": None}),
    ("lfm2", {"block_ff_dim": 640, "block_ffn_dim_multiplier": 1.5, "block_multiple_of": 16,
              "tie_embedding": False, "full_attn_idxs": [2, 5], "block_dim": 256,
              "block_norm_eps": 1e-5, "block_use_swiglu": True, "conv_dim": 256, "num_heads": 32,
              "use_pos_enc": True, "theta": 1e6}),
    ("seed_oss", {"rope_scaling": {"rope_type": "default"}, "rope_theta": 1e7, "mlp_bias": True}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "keys"), [*((name, {}) for name in FAMILIES), *OLDER], ids=str
)
def test_minimal_and_old_configs_match_transformers(model_type, keys):
    """transformers adds all keys of its current version."""
    values = {**(FEW_OF_GPT2 if model_type == "gpt2" else FEW), **keys}
    if model_type == "dots1":  # it has no defaults of these
        values |= {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1}
    if model_type == "gemma4_text":
        values |= {"vocab_size_per_layer_input": values["vocab_size"]}
    if model_type in WITH_LATENTS:  # other defaults do not fit
        values |= {"num_key_value_heads": 32, "num_experts_per_tok": 6}
    theirs = transformers.AutoConfig.for_model(model_type, **json.loads(json.dumps(values)))
    result = [ModelConfig(**hf_config.model_table(config, "here"))
             for config in ({"model_type": model_type, **values}, theirs.to_dict())]  # fmt: skip
    assert hf_config.network_settings(result[0]) == hf_config.network_settings(result[1])


@pytest.mark.parametrize("kind", ["su", "yarn"])
def test_old_longrope_names_of_phi3_are_read(kind):
    old, new = (
        hf_config.model_table(minimal("phi3", rope_scaling={**LONGROPE, "type": each}), "")
        for each in (kind, "longrope")
    )
    assert old == new


NONSENSE = [None, "x", -1, 0, 10**400, 1e300, True, [], [1, "x"], {}, {"a": []}]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_invalid_values_raise_user_error(model_type):
    """Each key of each family gets values of other types, also in rotary parameters."""
    keys = set(FAMILIES[model_type].defaults) | FAMILIES[model_type].names.keys()
    inner = ("rope_type", "factor", "rope_theta", "short_factor", "mscale", "full_attention")
    tables = [{"rope_type": "yarn", "factor": 2.0, key: value}
              for key in inner for value in NONSENSE]  # fmt: skip
    configs = [{key: value} for key in sorted(keys) for value in NONSENSE]
    configs += [{"rope_parameters": table} for table in tables]
    for config in configs:
        with contextlib.suppress(UserError):
            table = hf_config.model_table(minimal(model_type, **config), "here")
            make_config({"model": table}, source="here")


def test_null_and_false_keys_are_ignored():
    config = minimal("llama", sliding_window=None, rope_interleaved=False, layer_types=None)
    assert hf_config.model_table(config, "") == hf_config.model_table(minimal("llama"), "")


MIXTURE = {"num_experts": 4, "moe_top_k": 2, "moe_expert_dim": 24}
NORMS = {"qk_norm": True}
SHARED = {"moe_shared_experts": 1, "moe_shared_expert_dim": 40, "moe_shared_expert_gate": True}
UNGATED = {"moe_shared_experts": 1, "moe_shared_expert_dim": 40}
AFTER_ROTARY = {"qk_norm": True, "qk_norm_after_rotary": True}
SIGMOID = {"moe_router": "sigmoid_topk", "moe_bias_update": "sign"}
SIGN = {**SIGMOID, "moe_shared_experts": 1}
SINKS = {"attention_sinks": True, "activation": "swiglu_oai", "swiglu_limit": 7.0,
         "mlp_bias": True, "moe_router_bias": True}  # fmt: skip
LAYER_NORM = {"norm_type": "layernorm", "parallel_residual": True, "shared_norm": True}
MODEL_KEYS = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 100,
        "ffn_hidden_dim": 48, "max_seq_len": LONGEST}  # fmt: skip


SELECTED = [
    ({}, "llama"),
    (
        {"norm_type": "layernorm", "activation": "gelu", "norm_eps": 0.03, "n_kv_heads": 4,
         "mlp_bias": True, "parallel_residual": True},
        "gpt_neox",
    ),
    ({"norm_placement": "sandwich"}, "glm4"),
    ({"mixer_pattern": ["mamba2+attention"], "mamba2": {"gated_norm": "none"}}, "falcon_h1"),
    ({**MIXTURE, "moe_norm_topk": False, "qkv_bias": True, **SHARED}, "qwen2_moe"),
    ({**MIXTURE, **NORMS, **SIGN, "n_layers": 3, "moe_first_dense_layers": 2}, "dots1"),
    ({**MIXTURE, **SINKS, "sliding_window": 8, "qkv_bias": True, "o_bias": True}, "gpt_oss"),
]  # fmt: skip
SIMILARLY_SELECTED = [
    (
        {
            **NORMS,
            "norm_placement": "sandwich",
            "value_norm": True,
            "layer_multipliers": True,
            "attention_scale": 1.0,
            "activation": "gelu_tanh",
            "gated_mlp": True,
            "n_layers": 4,
            "embedding_multiplier": MODEL_KEYS["dim"] ** 0.5,
            "layer_embedding_dim": 6,
            "sliding_window": 8,
            "attention_pattern": ["sliding", "full"],
            "n_kv_shared_layers": 2,
            "mixer_pattern": ["attention", "global_attention"],
            "local_rope_theta": 100.0,
            "qk_norm_eps": 1e-5,
            "global_attention": {"head_dim": 32},
        },
        "gemma4_text",
    ),
    ({"norm_type": "layernorm", "norm_eps": 0.03}, "stablelm"),
    ({"norm_type": "layernorm", "activation": "gelu", "norm_eps": 0.03}, "starcoder2"),
    ({"norm_type": "layernorm", "activation": "relu", "tie_embeddings": True}, "starcoder2"),
    ({"activation": "gelu"}, "arcee"),
    ({"activation": "relu"}, "arcee"),
    ({"rope_pattern": [True, False]}, "smollm3"),
    ({"sliding_window": 8, "attention_pattern": ["full", "sliding"]}, "smollm3"),
    ({"qkv_bias": True, "o_bias": True}, "llama"),
    ({"qkv_bias": True, "mlp_bias": True}, "seed_oss"),
    (
        {
            **MIXTURE,
            **NORMS,
            **SIGN,
            "norm_placement": "sandwich",
            "attention_output_gate": True,
            "n_layers": 3,
            "rope_pattern": [True, True, False],
        },
        "afmoe",
    ),
    ({**NORMS, "norm_placement": "post", "rope_pattern": [True, False]}, "exaone4"),
    ({**NORMS, "norm_placement": "post"}, "exaone4"),
    ({**LAYER_NORM, "norm_bias": False, "tie_embeddings": True}, "cohere"),
    ({"norm_type": "layernorm", "norm_unit_offset": True, "activation": "relu2"}, "nemotron"),
    (MIXTURE, "mixtral"),
    ({**MIXTURE, **NORMS}, "qwen3_moe"),
    (
        {**MIXTURE, **NORMS, "n_layers": 4, "feed_forward_pattern": ("dense", "experts")},
        "qwen3_moe",
    ),
    (
        {
            **MIXTURE,
            **NORMS,
            "n_layers": 5,
            "feed_forward_pattern": ("dense", "experts"),
            "moe_first_dense_layers": 2,
        },
        "qwen3_moe",
    ),
    ({**MIXTURE, **NORMS, "qk_norm_scope": "projection"}, "olmoe"),
    ({**MIXTURE, **SIGN, "moe_groups": 2}, "glm4_moe"),
    ({**MIXTURE, **SIGN, "moe_groups": 2, "moe_top_k_groups": 2}, "glm4_moe"),
    ({**MIXTURE, "moe_capacity_factor": 0.0, "moe_packed_experts": True}, "mixtral"),
    ({**MIXTURE, **SINKS}, "gpt_oss"),
    ({**MIXTURE, "logits_scaling": 2.0}, "granitemoe"),
    ({**MIXTURE, **UNGATED}, "granitemoeshared"),
    ({**MIXTURE, **SIGMOID, **NORMS, "qk_norm_scope": "projection"}, "minimax_m2"),
    (AFTER_ROTARY, "hunyuan_v1_dense"),
    (
        {**MIXTURE, **AFTER_ROTARY, "moe_shared_experts": 1, "moe_shared_expert_dim": 24},
        "hunyuan_v1_moe",
    ),
    (
        {
            **MIXTURE,
            **NORMS,
            **SIGN,
            "n_layers": 4,
            "feed_forward_pattern": ("dense", "experts"),
        },
        "hy_v3",
    ),
]


@pytest.mark.parametrize(("keys", "family"), [*SELECTED, *SIMILARLY_SELECTED], ids=str)
def test_export_selects_matching_family(keys, family):
    """KempnerForge's models are included."""
    assert hf_config.select_family(ModelConfig(**{**MODEL_KEYS, **keys})) == family


# Quick tests of all families compare the logits of an import and the file of its export.
@pytest.mark.parametrize(
    ("keys", "family"),
    [
        *SELECTED[-2:],
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (*SELECTED[:-2], *SIMILARLY_SELECTED)
        ),
    ],
    ids=str,
)
def test_exported_model_matches_transformers(tmp_path, keys, family):
    model = ModelConfig(**{**MODEL_KEYS, **keys}, init_std=0.2)
    params = random_params(model)
    run = save_run(tmp_path / "run", config_of(model), params)
    directory = export(run, tmp_path / "hf")
    assert config_json(directory)["model_type"] == family
    theirs = their_logits(open_theirs(directory), tokens_of())
    variables = join(params, jax.jit(Model(model).initial_state)())
    assert_close(compiled(model)(variables, tokens_of()), theirs)


def test_documented_gemma_config_is_exported_as_gemma():
    page = (ROOT / "docs" / "configs.md").read_text()
    (text,) = re.findall(r"```toml\n(\[model\]\ndim.*?)```", page, re.DOTALL)
    assert hf_config.select_family(ModelConfig(**tomllib.loads(text)["model"])) == "gemma2"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"norm_type": "layernorm", "qk_norm": True}, "hf-stablelm has no model.qk_norm = True"),
        ({"norm_placement": "sandwich", "qkv_bias": True, "o_bias": True}, "no family"),
        ({"position_embedding": "learned"}, "no family"),
        ({"sliding_window": 8, "local_rope_theta": 100.0}, "has no rotary positions"),
        (
            {"attention_chunk_size": 8},
            r"has no attention_chunk_size and attention_pattern = \(8, 8",
        ),
        (
            {"rope_scaling": {"rope_type": "dynamic", "original_max_seq_len": 32}},
            "rotary positions",
        ),
        (
            {**MIXTURE, "feed_forward_pattern": ("dense", "experts")},
            "hf-mixtral has no model.ffn_hidden_dim = 48, feed_forward",
        ),
        ({**MIXTURE, "moe_capacity_factor": 1.5}, "has no model.moe_capacity_factor = 1.5"),
        ({**MIXTURE, "moe_router_bias": True}, "has no model.moe_router_bias = True"),
        ({**MIXTURE, **SIGN, "moe_bias_update": "kempnerforge"}, "_bias_update = 'kempnerforge'"),
        ({**MIXTURE, **SIGN, "moe_bias_update": "none"}, "model.moe_bias_update = 'none'"),
        ({**MIXTURE, **SIGN, "moe_shared_expert_dim": 36}, "model.moe_shared_expert_dim = 36"),
        ({**MIXTURE, "moe_routed_scaling": 2.0}, "has no model.moe_routed_scaling = 2.0"),
        ({**MIXTURE, "mlp_bias": True}, "has no model.mlp_bias = True"),
        ({**MIXTURE, **SINKS, "o_bias": True}, "hf-gpt-oss has no model.o_bias = True"),
        ({**MIXTURE, **SINKS, "swiglu_limit": None}, "hf-gpt-oss has no model.swiglu_limit = None"),
        ({**MIXTURE, **SINKS, "attention_sinks": False}, "has no model.attention_sinks = False"),
        ({"attention_sinks": True}, "has no model.attention_sinks = True"),
    ],
    ids=str,
)
def test_export_without_matching_family_raises(keys, message):
    with pytest.raises(UserError, match=message):
        hf_config.select_family(ModelConfig(**MODEL_KEYS, **keys))


def test_expert_losses_do_not_affect_family():
    """Losses and kernels of experts are settings of a run."""
    plain = ModelConfig(**MODEL_KEYS, **MIXTURE)
    other = plain.model_copy(update={
        "moe_aux_loss_weight": 0.5, "moe_router_z_loss_weight": 0.1, "moe_gradient_scale": True,
        "moe_backend": "blocks", "moe_bias_update_rate": 0.1, "ffn_hidden_dim": 56,
    })  # fmt: skip
    assert hf_config.network_settings(plain) == hf_config.network_settings(other)
    width = plain.model_copy(update={"moe_expert_dim": 32})
    assert width.expert_dim == 32
    assert hf_config.network_settings(plain) != hf_config.network_settings(width)


OF_FILES = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 24, "mlp_only_layers": [],
                  "shared_expert_intermediate_size": 40, "decoder_sparse_step": 1},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 24, "norm_topk_prob": True},
    "olmoe": {"num_experts": 4, "intermediate_size": 24, "clip_qkv": None},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 0},
    "glm4_moe": {"n_routed_experts": 4, "n_group": 1, "routed_scaling_factor": 1.0},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24,
                "swiglu_limit": 7.0, "layer_types": ["full_attention"] * 2},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24},
    "granitemoeshared": {"num_local_experts": 4, "shared_intermediate_size": 40},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24,
                   "rotary_dim": 8, "scoring_func": "sigmoid", "use_routing_bias": True,
                   "qk_norm_type": "per_layer"},
    "hy_v3": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
              "first_k_dense_replace": 0, "expert_hidden_dim": 24, "qk_norm": True},
}  # fmt: skip


@pytest.mark.parametrize("name", OF_FILES)
def test_exported_keys_match_published_files(name):
    """vLLM and transformers 4 would use defaults for other keys."""
    more = SIGN if "n_routed_experts" in OF_FILES[name] else SHARED
    more = SINKS if name == "gpt_oss" else more
    model = ModelConfig(**MODEL_KEYS, **MIXTURE, **more)
    written = FAMILIES[name].write(model)
    assert {key: written[key] for key in OF_FILES[name]} == OF_FILES[name]
    of_experts = {"num_experts", "num_local_experts", "n_routed_experts"}
    assert len(of_experts & written.keys()) == 1


def test_router_bias_stays_float32(tmp_path):
    """transformers stores it in float32 for weights of any dtype."""
    network = network_of("dots1").to(torch.bfloat16)
    router = network.model.layers[1].mlp.gate
    router.e_score_correction_bias = router.e_score_correction_bias.float().uniform_(0.1, 0.2)
    network.save_pretrained(tmp_path / "hf")
    load(tmp_path / "hf", tmp_path / "run")
    back = tensors_of(export(tmp_path / "run", tmp_path / "back"))
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert {n for n, a in back.items() if a.dtype == np.float32} == {
        n for n in back if ".mlp.gate." in n
    }
    np.testing.assert_array_equal(back[name], router.e_score_correction_bias.numpy())
    assert config_json(tmp_path / "back")["dtype"] == "bfloat16"
    again = open_theirs(tmp_path / "back", dtype="auto").model.layers[1].mlp.gate
    assert again.e_score_correction_bias.dtype == torch.float32
    assert torch.equal(again.e_score_correction_bias, router.e_score_correction_bias)


# The families other than gpt-oss and Trinity keep their routers.
KEPT_IN_FLOAT32 = ["dots1", "gpt_oss", "afmoe"]
SIMILARLY_KEPT = ["ernie4_5_moe", "glm4_moe", "deepseek_v2", "deepseek_v3", "kimi_k2", "hy_v3",
                  "glm4_moe_lite", "nemotron_h, experts, biases", "kimi_linear",
                  "deepseek_v32", "glm_moe_dsa"]  # fmt: skip


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "case", marked([*KEPT_IN_FLOAT32, *SIMILARLY_KEPT, "gemma4"], [*SIMILARLY_KEPT, "gemma4"])
)
def test_export_keeps_in_float32_what_transformers_keeps(tmp_path, case, dtype):
    network_of(case).save_pretrained(tmp_path / "hf")
    load(tmp_path / "hf", tmp_path / "run")
    native = export(tmp_path / "run", tmp_path / "ours", dtype=dtype)
    assert config_json(native)["dtype"] == dtype
    open_theirs(native, dtype="auto").save_pretrained(tmp_path / "theirs")
    assert_same_bits(tensors_of(native), tensors_of(tmp_path / "theirs"))


def test_constants_of_layers_keep_the_dtype_of_weights(tmp_path):
    network_of("gemma4, shared keys").to(torch.bfloat16).save_pretrained(tmp_path / "hf")
    load(tmp_path / "hf", tmp_path / "run")
    back = export(tmp_path / "run", tmp_path / "back")
    assert_same_bits(tensors_of(tmp_path / "hf"), tensors_of(back))


def test_routers_of_ernie_stay_in_float32_beside_8_bits(tmp_path):
    network_of("ernie4_5_moe").save_pretrained(tmp_path / "hf")
    load(tmp_path / "hf", tmp_path / "run")
    tensors = tensors_of(export(tmp_path / "run", tmp_path / "ours", dtype="fp8"))
    assert tensors["model.layers.1.mlp.gate.weight"].dtype == np.float32
    assert tensors["model.embed_tokens.weight"].dtype.name == "bfloat16"


def test_families_agree_with_transformers_on_what_stays_in_float32():
    """Selection biases are state here, which is in float32 in any case."""
    of_state = {"e_score_correction_bias", "expert_bias", "moe_statics"}
    tested = {CASES[case][0] for case in (*KEPT_IN_FLOAT32, *SIMILARLY_KEPT)}
    for name in FAMILIES.keys() - {"kimi_k2"}:
        kind = transformers.CONFIG_MAPPING[name]
        network = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[kind]
        strict = {*(network._keep_in_fp32_modules_strict or ())} - of_state
        loose = {*(network._keep_in_fp32_modules or ())}
        dtypes = [dtype for dtype, names in (("bfloat16", strict), ("float16", strict | loose))
                if names]  # fmt: skip
        assert sorted(FAMILIES[name].float32) == dtypes, name
        assert not dtypes or name in tested


def test_mxfp4_files_are_refused_with_advice(tmp_path):
    """Published files have blocks and scales instead of `gate_up_proj` and `down_proj`."""
    network_of("gpt_oss").save_pretrained(tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(file)
    for key in [key for key in tensors if key.endswith("_proj")]:
        shape = tensors.pop(key).shape
        tensors[f"{key}_blocks"] = np.zeros((*shape[:2], 1, 16), np.uint8)
        tensors[f"{key}_scales"] = np.zeros((*shape[:2], 1), np.uint8)
    save_file(tensors, file, {"format": "pt"})
    says = r"_blocks, .* and \d+ more are in MXFP4: take a copy in bfloat16, .*dequantize=True"
    with pytest.raises(UserError, match=says):
        load(tmp_path / "hf", tmp_path / "run")


def test_multi_token_prediction_layers_are_left_out(tmp_path):
    """GLM 4.5's files have such layers at the end, which transformers ignores too."""
    network = network_of("glm4_moe")
    network.save_pretrained(tmp_path / "hf")
    config = {**config_json(tmp_path / "hf"), "num_nextn_predict_layers": 1}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    file = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(file)
    further = {key: a for key, a in tensors.items() if key.startswith("model.layers.2.")}
    further = {key.replace("layers.2", "layers.3"): a for key, a in further.items()}
    further["model.layers.3.eh_proj.weight"] = np.ones((32, 64), np.float32)
    save_file({**tensors, **further}, file, {"format": "pt"})
    (note,) = load(tmp_path / "hf", tmp_path / "run")
    assert note.startswith(f"left out: {len(further)} tensors of layers from 3 on")
    back = tensors_of(export(tmp_path / "run", tmp_path / "back"))
    assert_same_bits(tensors, back)
    (tmp_path / "hf" / "config.json").write_text(
        json.dumps({**config, "num_nextn_predict_layers": 0})
    )
    with pytest.raises(UserError, match=r"left over: model\.layers\.3\.eh_proj"):
        load(tmp_path / "hf", tmp_path / "other")


def test_multi_token_prediction_of_ernie_is_left_out_with_a_note(tmp_path):
    network_of("ernie4_5_moe").save_pretrained(tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(file)
    names = ("model.mtp_block.0.mlp.up_proj", "model.mtp_emb_norm.0")
    further = {f"{name}.weight": np.ones((2, 2), np.float32) for name in names}
    save_file({**tensors, **further}, file, {"format": "pt"})
    (note,) = load(tmp_path / "hf", tmp_path / "run")
    assert note.startswith(f"left out: {', '.join(further)}; they predict further tokens")


# Every key of config.json


CHANGED = {
    "hidden_act": "relu", "hidden_activation": "relu", "activation_function": "relu",
    "layer_types": None, "rope_parameters": None, "max_position_embeddings": 16,
    "sliding_window": 5, "num_key_value_heads": 1, "head_dim": 8, "n_inner": 40,
    "mlp_only_layers": [0], "summary_activation": "tanh", "rope_theta": 50.0, "factor": 5.0,
    "attn_logit_softcapping": 3.0, "final_logit_softcapping": 3.0, "clip_qkv": 0.5,
}  # fmt: skip
"""Key -> another valid value."""
NORM_EPS = ("rms_norm_eps", "layer_norm_eps", "norm_epsilon", "layer_norm_epsilon", "norm_eps")
"""Keys of the eps of norms: each family reads only its own."""
REORDERING = ("reorder_and_upcast_attn",)
"""Keys of the order of operations in transformers: how much it rounds depends on the processor."""
FIRST = list({CASES[case][0]: case for case in reversed(CASES)}.values())
"""Case of each family."""
SIMILAR = frozenset(
    {"glm4", "cohere2, window 8", "ernie4_5", "afmoe", "exaone4, window 8", "ministral3",
     "ernie4_5_moe", "llama4_text", "qwen3_next", "qwen3_5_moe", "bamba",
     "minimax_m2", "hunyuan_v1_moe", "hy_v3", "lfm2_moe", "falcon_h1",
     "granitemoehybrid, dense", "gemma", "gemma2, window 8", "qwen3", "olmo2", "smollm3",
     "granite", "starcoder2", "arcee", "glm", "qwen3_moe", "olmoe", "granitemoe",
     "granitemoeshared"}
    | {case for case in FIRST if CASES[case][0] in WITH_LATENTS}
    | {*WITH_DEFAULTS}
)  # fmt: skip
"""Cases of families whose keys other families read as well."""


TOGETHER = 8
"""Number of keys that are changed at once, where each has an effect next to the others."""


def changes_of(config):
    """Yield `(name, table)` with another value of each key, also in nested tables."""
    for key, value in config.items():
        if key in ("model_type", "architectures", "transformers_version", "dtype"):
            continue
        if key == "output_router_logits" and config.get("num_local_experts") == 0:
            continue  # transformers fails
        yield key, {key: another(key, value)}
        for inner, of_inner in value.items() if isinstance(value, dict) else ():
            yield f"{key}.{inner}", {key: {**value, inner: another(inner, of_inner)}}
    for key in NORM_EPS:
        yield key, {key: 0.3}


@pytest.mark.parametrize("case", FIRST)
def test_every_config_that_can_be_imported_can_be_exported(case):
    """Each optional key of the family is changed separately, and added if files may lack it."""
    model_type, keys = keys_of(case)
    config = transformers.AutoConfig.for_model(model_type, **json.loads(json.dumps(keys)))
    config = json.loads(config.to_json_string(use_diff=False))
    family = FAMILIES[config["model_type"]]
    optional = {family.name_in_family(key): value for key, value in family.defaults.items()}
    added = {key: another(key, value) for key, value in optional.items() if key not in config}
    added["head_dim"] = 16
    changes = [{}, *({key: value} for key, value in added.items())]
    changes += [change for _, change in changes_of(config)]
    n_imported = 0
    for change in changes:
        if settings_of({**config, **change}) is None:
            continue  # refused
        n_imported += 1
        model = ModelConfig(**hf_config.model_table({**config, **change}, ""))
        assert not hf_config._lacks(family, model), change
    assert n_imported > 10


def merged(config, changes):
    """Return a config with several changes; None if two of them are of the same key."""
    keys = [key for change in changes for key in change]
    if len(set(keys)) < len(keys):
        return None
    return {**config, **{key: value for change in changes for key, value in change.items()}}


def settings_of(config):
    """Return the settings of our network; None if the config is refused."""
    with contextlib.suppress(UserError, ValueError):
        return hf_config.network_settings(ModelConfig(**hf_config.model_table(config, "")))
    return None


def all_matter(config, changes):
    """Return whether each change has an effect on our network next to the others."""
    whole = merged(config, changes)
    if whole is None or (settings := settings_of(whole)) is None:
        return False
    loose = ([*changes[:i], *changes[i + 1 :]] for i in range(len(changes)))
    return all(settings_of(merged(config, part)) != settings for part in loose)


def groups_of(config, changes):
    """Yield the names of changes in groups: a network takes long to compile, and shows several."""
    waiting = dict(changes)
    while waiting:
        group = []
        for name, change in waiting.items():
            among = [changes[other] for other in group]
            if len(group) < TOGETHER and (not group or all_matter(config, [*among, change])):
                group.append(name)
        waiting = {name: change for name, change in waiting.items() if name not in group}
        yield group


def another(key, value):
    if CHANGED.get(key, value) != value:
        return CHANGED[key]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value * 1.5 or 0.25
    if isinstance(value, list):
        return value[::-1]
    return 3 if value is None else "other"


def without_tags(config):
    """Return a config with infinite numbers in place of the tags that JSON files have for them."""
    infinite = {"__float__": "Infinity"}
    return {
        key: [math.inf if x == infinite else x for x in value] if isinstance(value, list) else value
        for key, value in config.items()
    }


def logits_of_theirs(config, weights):
    """Return the logits of transformers' model; None if the weights do not fit."""
    try:
        result = transformers.AutoConfig.for_model(**without_tags(json.loads(json.dumps(config))))
        network = transformers.AutoModelForCausalLM.from_config(result, attn_implementation="eager")
        network.load_state_dict(weights)
        with torch.no_grad():
            return network.eval()(torch.from_numpy(tokens_of())).logits.numpy()
    except Exception:  # many types: wrong sizes, impossible values
        return None


def imported_with(directory, config):
    """Return config and parameters of an import with this `config.json`; None if refused."""
    (directory / "config.json").write_text(json.dumps(config))
    with contextlib.suppress(UserError, ValueError):
        reference = checkpoints.find(directory)
        native = reference.config(None)
        return native, reference.read(native, ReadOptions()).variables
    return None


def logits_of_jaxforge(directory, config):
    """Return the logits of the import; None if the import is refused."""
    imported = imported_with(directory, config)
    if imported is None:
        return None
    native, entries = imported
    arrays = Stacking(native.model).join(entries)
    params = unflatten_dict({name: x.all() for name, x in arrays.items()}, sep=".")
    return compiled(native.model)(params, tokens_of())


@pytest.mark.parametrize("imported", marked(FIRST, SIMILAR), indirect=True)
def test_config_keys_have_same_effect_as_in_transformers(imported, tmp_path):
    _, path, network, (model, _) = imported
    config, weights = config_json(path / "hf"), network.state_dict()
    shutil.copy(path / "hf" / "model.safetensors", tmp_path)
    before, computed = logits_of_theirs(config, weights), hf_config.network_settings(model)
    effective = {}
    for key, change in changes_of(config):
        copy = {**config, **change}
        if (settings := settings_of(copy)) is None:
            continue
        if settings == computed:
            theirs = logits_of_theirs(copy, weights)
            assert theirs is not None, key
            if key in REORDERING:
                assert_close(theirs, before, key)
            else:
                np.testing.assert_array_equal(theirs, before, key)
        elif imported_with(tmp_path, copy) is not None:
            effective[key] = change
    assert effective.keys() & set(NORM_EPS)
    for group in groups_of(config, effective):
        for part in (group, *([key] for key in group)):
            copy = merged(config, [effective[key] for key in part])
            theirs, native = logits_of_theirs(copy, weights), logits_of_jaxforge(tmp_path, copy)
            is_refused = theirs is None or native is None
            if len(part) > 1 and is_refused:  # values that do not go together: one at a time
                continue
            assert not is_refused, part
            assert_close(native, theirs, part)
            if part is group:
                break


# Names and keys that trainers leave behind


def read_as(path, rename):
    """Return the import of a directory with renamed tensors."""
    renamed = path / "renamed"
    renamed.mkdir(exist_ok=True)
    tensors = load_file(path / "hf" / "model.safetensors")
    save_file({rename(key): t for key, t in tensors.items()}, renamed / "model.safetensors")
    shutil.copy(path / "hf" / "config.json", renamed)
    reference = checkpoints.find(renamed)
    read = reference.read(reference.config(None), ReadOptions()).variables
    return {name: tensor.all() for name, tensor in read.items()}


WRAPPERS = {
    "torch.compile": lambda key: f"_orig_mod.{key}",
    "DDP": lambda key: f"module.{key}",
    "both": lambda key: f"module._orig_mod.{key}",
    "a module of the user": lambda key: f"net.inner._orig_mod.{key}",
    "the base class": lambda key: re.sub(r"^(model|transformer|gpt_neox)\.", "", key),
}


@pytest.mark.parametrize("imported", marked(FIRST), indirect=True)
def test_wrapper_prefixes_are_ignored(imported):
    _, path, *_ = imported
    plain = read_as(path, str)
    for what, rename in WRAPPERS.items():
        result = read_as(path, rename)
        assert result.keys() == plain.keys(), what
        for name, tensor in result.items():
            np.testing.assert_array_equal(tensor, plain[name], what)


@pytest.mark.parametrize("imported", ["llama"], indirect=True)
def test_unused_file_keys_are_listed(imported):
    _, path, *_ = imported
    with pytest.raises(UserError, match=r"(?s)missing: .*left over: model\.blocks\.\d"):
        read_as(path, lambda key: key.replace("layers", "blocks"))
    with pytest.raises(UserError, match=r"model\.norm\.weight and another key are both model"):
        read_as(
            path, lambda key: key.replace("model.layers.1.input_layernorm", "module.model.norm")
        )


@pytest.mark.parametrize("model_type", FAMILIES)
def test_generation_and_trainer_keys_are_ignored(model_type):
    left = {"unsloth_fixed": True, "unsloth_version": "2024.9", "neftune_noise_alpha": 5,
            "pad_to_multiple_of": 8, "max_length": 20, "temperature": 0.6, "top_p": 0.9,
            "do_sample": True, "pruned_heads": {}, "use_bfloat16": True}  # fmt: skip
    sizes = {
        "dots1": DEEPSEEK, "bamba": MAMBA, "granitemoehybrid": MAMBA, "kimi_linear": KIMI_LINEAR
    }.get(model_type, {})  # fmt: skip
    values = minimal(model_type, **(DEEPSEEK | LATENT if model_type in WITH_LATENTS else sizes))
    if model_type == "arcee":
        values["hidden_act"] = "relu"
    assert hf_config.model_table({**values, **left}, "") == hf_config.model_table(values, "")
