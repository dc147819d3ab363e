"""Names of keys in other frameworks, to suggest the key of jaxforge with the same meaning.

The frameworks are Hugging Face (Trainer, TRL and config.json), accelerate, DeepSpeed, Megatron,
NeMo, torchtitan, nanoGPT and linnaeus. A name with a dot applies in that table only. Letter case
and hyphens do not matter.
"""

from jaxforge.config.reading.kempnerforge import NO_EFFECT, RETIRED, STORED_AS
from jaxforge.config.reading.toml import Path

_TEXT = """
model.dim hidden_size n_embd d_model hidden_dim embed_dim model_dim
model.n_layers num_hidden_layers num_layers n_layer n_block decoder_layers
model.n_heads num_attention_heads n_head num_heads attention_heads
model.n_kv_heads num_key_value_heads num_query_groups n_kv_head num_kv_heads n_head_kv
model.head_dim kv_channels head_size
model.ffn_hidden_dim intermediate_size ffn_hidden_size n_inner ffn_dim d_ff mlp_dim
model.max_seq_len max_position_embeddings n_positions n_ctx max_sequence_length
model.vocab_size padded_vocab_size n_vocab
model.norm_eps rms_norm_eps layer_norm_eps layer_norm_epsilon layernorm_epsilon norm_epsilon
    rms_norm_epsilon
model.norm_type normalization norm_class
model.rope_theta rotary_base rope_base rotary_emb_base
model.partial_rotary_factor rotary_percent rotary_pct
model.tie_embeddings tie_word_embeddings share_embeddings_and_output_weights weight_tying
model.activation hidden_act activation_function activation_func hidden_activation
model.gated_mlp swiglu gated_linear_unit
model.qkv_bias attention_bias add_qkv_bias
model.mlp_bias add_bias_linear
model.qk_norm qk_layernorm use_qk_norm
model.init_std initializer_range init_method_std
model.sliding_window window_size
model.parallel_residual use_parallel_residual parallel_attn
model.final_logit_softcap final_logit_softcapping
model.attn_logit_softcap attn_logit_softcapping
model.position_embedding position_embedding_type
model.num_experts num_local_experts n_routed_experts num_moe_experts moe_num_experts
model.moe_top_k num_experts_per_tok moe_router_topk num_experts_per_token top_k_experts
model.moe_expert_dim moe_intermediate_size moe_ffn_hidden_size moe_inter_dim
model.moe_latent_dim moe_latent_size
model.residual_streams hc_mult hyper_connection_rate
model.sinkhorn_iterations hc_sinkhorn_iters
model.moe_shared_experts n_shared_experts num_shared_experts
model.moe_shared_expert_dim shared_expert_intermediate_size moe_shared_expert_intermediate_size
model.feed_forward_pattern moe_layer_freq decoder_sparse_step
model.moe_first_dense_layers first_k_dense_replace n_dense_layers
model.moe_aux_loss_weight router_aux_loss_coef moe_aux_loss_coeff
model.moe_router_z_loss_weight router_z_loss_coef moe_z_loss_coeff
model.moe_norm_topk norm_topk_prob
model.moe_routed_scaling routed_scaling_factor moe_router_topk_scaling_factor
model.moe_groups n_group moe_router_num_groups
model.moe_top_k_groups topk_group moe_router_group_topk
model.moe_router moe_router_score_function scoring_func score_func
model.moe_bias_update_rate moe_router_bias_update_rate load_balance_coeff
model.moe_capacity_factor moe_expert_capacity_factor
model.mtp_depth num_nextn_predict_layers mtp_num_layers
model.n_kv_shared_layers num_kv_shared_layers
model.layer_embedding_dim hidden_size_per_layer_input per_layer_dim
model.global_attention.head_dim global_head_dim
model.global_attention.n_kv_heads num_global_key_value_heads
model.global_attention.keys_as_values attention_k_eq_v
model.latent_attention.q_rank q_lora_rank
model.latent_attention.kv_rank kv_lora_rank
model.latent_attention.nope_head_dim qk_nope_head_dim qk_head_dim
model.latent_attention.rope_head_dim qk_rope_head_dim qk_pos_emb_head_dim
model.latent_attention.value_head_dim v_head_dim
model.latent_attention.index_heads index_n_heads dsa_indexer_n_heads
model.latent_attention.index_head_dim dsa_indexer_head_dim
model.latent_attention.index_top_k index_topk dsa_indexer_topk
model.latent_attention.index_loss_weight dsa_indexer_loss_coeff
model.sdpa_backend attn_implementation _attn_implementation attention_impl attn_type
lora.rank lora_rank lora_r lora_dim
lora.alpha lora_alpha
lora.dropout lora_dropout
lora.targets target_modules lora_target_modules
train.batch_size per_device_train_batch_size micro_batch_size train_micro_batch_size_per_gpu
    local_batch_size microbatch_size device_batch_size data.batch_size
train.global_batch_size train_batch_size total_batch_size effective_batch_size
train.seq_len seq_length max_seq_length sequence_length block_size max_length context_length
    encoder_seq_length sequence_len max_context_length
train.max_steps train_iters max_iters total_steps num_steps max_train_steps n_steps training.steps
    num_iterations train_steps
train.grad_accum_steps gradient_accumulation_steps accumulate_grad_batches accumulation_steps
    grad_accumulation_steps
train.grad_clip_norm max_grad_norm grad_clip clip_grad gradient_clip_val gradient_clipping
    max_norm grad_clip_value clip_grad_norm
train.param_dtype params_dtype weight_dtype
train.reduce_dtype mixed_precision_reduce grad_reduce_dtype
train.ce_chunk_size loss_chunk_size
train.z_loss_weight z_loss z_loss_coeff z_loss_weighting
train.mtp_loss_weight mtp_loss_scaling_factor
train.batch_ramp batch_size_rampup
train.manual_gc_interval gc_freq
optimizer.name optim optimizer_type
optimizer.lr learning_rate base_lr peak_lr max_lr lr_max
optimizer.eps adam_epsilon adam_eps epsilon
optimizer.weight_decay wd
optimizer.freeze_patterns freeze_layers freeze_modules
optimizer.lr_base_batch reference_bs
scheduler.name lr_scheduler_type lr_decay_style lr_scheduler lr_schedule lr_scheduler.name
    sched.name
scheduler.warmup_steps lr_warmup_iters warmup_iters num_warmup_steps lr_warmup_steps warmup
scheduler.decay_steps lr_decay_iters decay_iters lr_wsd_decay_iters
scheduler.stable_steps num_stable_steps
scheduler.wsd_decay_type decay_type lr_wsd_decay_style
scheduler.min_lr_ratio min_lr_factor min_lr_rate
data.dataset_path data_path train_data_path dataset_dir train_file data_dir train_data
data.datasets blend data_blend train_data_mix
data.hf_dataset_name dataset_name dataset_id
data.hf_dataset_split dataset_split train_split
data.hf_dataset_text_field dataset_text_field text_column text_field
data.tokenizer_path tokenizer_model tokenizer_name tokenizer_name_or_path tokenizer hf_assets_path
    vocab_file
data.num_workers dataloader_num_workers
data.prefetch_factor dataloader_prefetch_factor
data.pack_sequences packing packed_sequence sample_packing reset_attention_mask
eval.interval eval_steps eval_interval val_check_interval validation.freq eval_every
    validation.interval_steps
eval.steps eval_iters limit_val_batches val_steps max_eval_steps validation.steps
eval.batch_size per_device_eval_batch_size val_batch_size
eval.enabled do_eval validation.enable
eval.datasets.dataset_path valid_data_path val_data_path validation_data_path eval_file
early_stop.patience_steps early_stopping_patience patience
early_stop.min_delta early_stopping_threshold
distributed.tp tensor_model_parallel_size tensor_parallel_degree tensor_parallel_size tp_size
    tensor_parallel model_parallel_size
distributed.pp pipeline_model_parallel_size pipeline_parallel_degree pipeline_parallel_size
    pp_size
distributed.pp_schedule pipeline_parallel_schedule
distributed.pp_chunks virtual_pipeline_model_parallel_size
distributed.cp context_parallel_size context_parallel_degree cp_size
distributed.cp_strategy cp_comm_type context_parallel_load_balancer
distributed.ep expert_model_parallel_size expert_parallel_degree expert_parallel_size ep_size
distributed.dp_shard data_parallel_shard_degree dp_size data_parallel_size
distributed.dp_replicate data_parallel_replicate_degree
checkpoint.dir output_dir out_dir save_dir save checkpoint_dir dump_folder checkpoint.folder
    save_folder checkpoint_path ckpt_dir save_path checkpoint.path exp_dir
checkpoint.interval save_steps save_interval save_every save_interval_steps checkpoint_interval
    save_freq checkpoint.interval_steps every_n_train_steps checkpointing_steps ckpt_interval
checkpoint.keep_last_n save_total_limit keep_latest_k most_recent_k max_checkpoints keep_last
    max_to_keep
checkpoint.keep_best_n keep_top_n save_top_k
checkpoint.best_metric metric_for_best_model monitor
checkpoint.load_path initial_load_path pretrained_checkpoint checkpoint.load load
    model_name_or_path resume_from load_dir
checkpoint.export_last export_hf save_hf_weights last_save_in_hf
metrics.log_interval logging_steps log_every_n_steps log_freq log_every logging_interval
profiling.enable enable_profiling use_pytorch_profiler profile
profiling.start_step profile_step_start profile_start
profiling.end_step profile_step_end profile_end
profiling.trace_dir save_traces_folder
"""

_LINES = _TEXT.replace("\n    ", " ").strip().splitlines()  # an indented line continues one
NAMES = {key: names for key, *names in map(str.split, _LINES)}
"""Key of jaxforge -> its names in other frameworks."""

NOTES: dict[str, str] = {
    "bf16 fp16 fp8 tf32 precision dtype torch_dtype mixed_precision_param amp_dtype amp": (
        "train.mixed_precision is the dtype of the computation, train.param_dtype that of "
        "parameters"
    ),
    "gradient_checkpointing recompute_granularity recompute_method recompute_activations "
    "activation_checkpoint activation_checkpoint.mode fsdp_activation_checkpointing": (
        "train.activation_checkpointing selects what is recomputed"
    ),
    "min_lr lr_min final_lr": "scheduler.min_lr_ratio is the final rate divided by optimizer.lr",
    "warmup_ratio warmup_fraction lr_warmup_fraction warmup_epochs lr_warmup_samples": (
        'scheduler.warmup_steps takes a share of the run, epochs and samples, as in "3%"'
    ),
    "decay_ratio decay_fraction decay_duration_fraction stable_duration_fraction": (
        'scheduler.stable_steps and scheduler.decay_steps take a share of the run, as in "20%"'
    ),
    "adam_beta1 adam_beta2 beta1 beta2": "optimizer.betas is a list of both",
    "untie_embeddings_and_output_weights": "model.tie_embeddings is its opposite",
    "dataset": "data.dataset_path names prepared tokens, data.hf_dataset_name a dataset of the Hub",
    "evaluation_strategy eval_strategy": "set eval.enabled and eval.interval",
    "save_strategy": "set checkpoint.interval",
    "load_best_model_at_end greater_is_better": (
        "checkpoint.keep_best_n keeps the best checkpoints by checkpoint.best_metric"
    ),
    "resume_from_checkpoint init_from auto_resume": (
        "a run resumes from checkpoint.dir by itself; checkpoint.load_path starts a new run"
    ),
    "report_to logger use_wandb wandb_log log_to_wandb wandb.enabled wandb.project run_name "
    "wandb_exp_name wandb_name logging_dir save_tb_folder": (
        'metrics.writers lists destinations, as in [{name = "wandb", project = "my_project"}]'
    ),
    "fsdp fsdp_config fsdp_sharding_strategy zero_stage use_distributed_optimizer": (
        "parameters and moments are sharded by default, over distributed.dp_shard"
    ),
    "check_for_nan_in_loss_and_grad rerun_mode": "set train.on_nonfinite",
    "num_layers_per_virtual_pipeline_stage": "set distributed.pp_chunks and pp_schedule",
    "distributed_timeout_minutes ddp_timeout init_timeout_seconds": (
        "set train.hang_timeout and distributed.heartbeat_timeout_sec, in seconds"
    ),
    "num_train_epochs epochs num_epochs n_epochs max_epochs": (
        'train.max_steps takes epochs, as in "3ep"'
    ),
    "train_samples train_tokens num_tokens max_tokens": (
        'train.max_steps takes tokens and samples, as in "1B tok" and "5M samples"'
    ),
    "dropout attention_dropout hidden_dropout attn_dropout resid_pdrop embd_pdrop attn_pdrop": (
        "models have no dropout; adapters have lora.dropout"
    ),
    "devices num_nodes num_processes num_machines nproc_per_node nnodes world_size gpus": (
        "a run uses all devices of its processes, see docs/launching.md"
    ),
    "gradnorm_enabled gradnorm grad_weighting": (
        "GradNorm is not part of jaxforge: a run has one loss, train.loss_fn"
    ),
    "deepspeed zero_optimization": (
        "jaxforge shards parameters and moments itself, by distributed.dp_shard"
    ),
    "sequence_parallel enable_sequence_parallel": "distributed.tp includes sequence parallelism",
    "flavor architectures": "the keys of [model] describe the architecture",
    "torch_compile compile": NO_EFFECT["train", "compile_model"],
    "dataloader_pin_memory": NO_EFFECT["data", "pin_memory"],
    "device no_cuda use_cpu": "JAX selects the platform: set JAX_PLATFORMS in the environment",
}
"""Names without a key of the same meaning, and their replacement."""

_STORED = {
    str(path[-1]): ".".join(part for part in key if isinstance(part, str))
    for path, key in STORED_AS.items()
    if path[0] != "eval"  # these names are also keys of [data]
}
_KEYS = _STORED | {name: key for key, names in NAMES.items() for name in names}
_NOTES = {name: note for names, note in NOTES.items() for name in names.split()}
_NOTES |= {str(path[-1]): answer for path, answer in NO_EFFECT.items()}


def key_of(path: Path) -> str | None:
    """Return the key of jaxforge that has the name and meaning of a foreign key, or None."""
    return next((_KEYS[name] for name in _spellings(path) if name in _KEYS), None)


def note_of(path: Path) -> str | None:
    """Return the note about a retired key, or a foreign key without a counterpart, or None."""
    if retired := RETIRED.get(".".join(map(str, path))):
        return retired[1]
    return next((_NOTES[name] for name in _spellings(path) if name in _NOTES), None)


def advice(path: Path, prefix: str = "") -> str:
    """Return the end of a message about a foreign key, with `prefix` before its name, or ""."""
    if key := key_of(path):
        return f"; did you mean {prefix}{key}?"
    return f": {note}" if (note := note_of(path)) else ""


def _spellings(path: Path) -> tuple[str, str]:
    """Return a key with and without its table, as in the tables above."""
    parts = [str(part).lower().replace("-", "_") for part in path if isinstance(part, str)]
    return ".".join(parts[-2:]), parts[-1] if parts else ""
