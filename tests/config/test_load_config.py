"""Merging of defaults, files and settings, coercions, and output as TOML."""

import codecs
from pathlib import Path

import pytest

from jaxforge.config import (
    DistillationConfig,
    DpoConfig,
    EarlyStopConfig,
    JobConfig,
    LoraConfig,
    RopeScaling,
    answers,
    load_config,
    load_unresolved,
)
from jaxforge.config.outer_optimizer import OuterOptimizerConfig
from jaxforge.errors import UserError

FULL = Path(__file__).parent / "data" / "kempnerforge_full.toml"
"""Every key of KempnerForge's sections, written by hand."""


@pytest.fixture
def load(tmp_path):
    """Load TOML text with overrides."""

    def load_text(text: str, *overrides: str) -> JobConfig:
        path = tmp_path / "x.toml"
        path.write_text(text)
        return load_config(path, overrides)

    return load_text


def test_config_without_file_has_defaults():
    assert load_config(None) == JobConfig()


def test_last_setting_wins(load):
    config = load(
        "[train]\nseed = 1\nbatch_size = 2\nseq_len = 3", "--train.seed=7", "--train.seed=8"
    )
    train = config.train
    assert (train.seed, train.batch_size, train.seq_len, train.max_steps) == (8, 2, 3, 100000)


def test_explicit_keys_are_known(load):
    config = load("[train]\nseed = 42", "--train.seq_len=8")
    assert config.train.model_fields_set == {"seed", "seq_len"}
    assert config.is_set("train.seed")
    assert not config.is_set("train.batch_size")
    assert not config.is_set("model.dim")


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("--model.dim=512", 512),
        ("--model.dim=512.0", 512),
        ("--model.dim='512'", 512),
        ("--model.n_kv_heads=None", None),
        ("--optimizer.lr=1e-3", 1e-3),
        ("--optimizer.lr=1", 1.0),
        ("--optimizer.lr='1e-3'", 1e-3),
        ("--optimizer.betas=[0.9,0.99]", (0.9, 0.99)),
        ("--optimizer.betas=(0.9, 0.99)", (0.9, 0.99)),
        ("--train.rerun_bad_steps=true", True),
        ("--train.rerun_bad_steps=False", False),
        ("--train.rerun_bad_steps=false", False),
        ("--train.rerun_bad_steps=yes", True),
        ("--train.rerun_bad_steps=1", True),
        ("--train.rerun_bad_steps=0", False),
        ("--data.pack_sequences", True),
        ("--scheduler.name=none", "none"),
        ("--data.file_pattern=a=b.bin", "a=b.bin"),
        ("--data.dataset_path='quoted'", "quoted"),
        ("--checkpoint.load_path=1e3", "1e3"),
        ("--checkpoint.load_path=None", None),
        ("--checkpoint.dir=007", "007"),
        ("--checkpoint.dir=", ""),
        ("--checkpoint.exclude_from_loading=optimizer", ("optimizer",)),
        ("--checkpoint.exclude_from_loading=['optimizer','progress']", ("optimizer", "progress")),
        ("--optimizer.lr_patterns={'a': 1}", {"a": 1.0}),
        ("--optimizer.lr_patterns.a=1", {"a": 1.0}),
    ],
)
def test_setting_forms_parse(setting, value):
    section, key = setting[2:].partition("=")[0].split(".")[:2]
    actual = getattr(getattr(load_config(None, [setting]), section), key)
    assert actual == value
    assert isinstance(actual, type(value)) or isinstance(value, dict)


def test_nested_settings_extend_table_of_file(load):
    config = load(
        "[model.rope_scaling]\nfactor = 4\nlow_freq_factor = 2", "--model.rope_scaling.factor=8"
    )
    assert config.model.rope_scaling.factor == 8.0
    assert config.model.rope_scaling.low_freq_factor == 2.0


def test_table_setting_changes_only_its_keys(load):
    config = load(
        "[model]\ndim = 64\nn_heads = 2\nrope_scaling = {factor = 4, low_freq_factor = 2}",
        "--model={'dim': 32, 'rope_scaling': {'factor': 3}}",
    )
    scaling = config.model.rope_scaling
    assert (config.model.dim, config.model.n_heads) == (32, 2)
    assert (scaling.factor, scaling.low_freq_factor) == (3, 2)


def test_empty_table_means_defaults():
    assert load_config(None, ["--model.rope_scaling={}"]).model.rope_scaling == RopeScaling()


def test_nested_table_can_be_unset(load):
    assert load("[model.rope_scaling]", "--model.rope_scaling=None").model.rope_scaling is None


def test_lists_of_tables_replace_lists_of_file(load):
    config = load(
        "[[data.datasets]]\npath = 'a'\n[[data.datasets]]\npath = 'b'",
        "--data.datasets=[{'path': 'c', 'weight': 2}]",
    )
    assert [(dataset.path, dataset.weight) for dataset in config.data.datasets] == [("c", 2.0)]


def test_single_table_becomes_list():
    assert load_config(None, ["--data.datasets={'path': 'c'}"]).data.datasets[0].path == "c"


def test_kv_heads_default_to_heads_after_overrides(load):
    assert load("[model]\nn_heads = 4").model.kv_heads == 4
    assert load("[model]\nn_heads = 64").model.kv_heads == 64
    assert load("[model]\nn_heads = 4\nn_kv_heads = 4", "--model.n_heads=8").model.kv_heads == 4
    whole = load("[model]\nn_heads = 8\nn_kv_heads = 4", "--model.n_kv_heads=None")
    assert whole.model.kv_heads == 8


def test_every_key_of_kempnerforge_loads():
    config = load_config(FULL)
    explicit = {(name, key) for name, table in config for key in table.model_fields_set}
    own_keys = {
        *(("model", key) for key in ("rope_scaling", "head_dim", "qkv_bias", "qk_norm_eps")),
        *(
            ("train", key)
            for key in (
                "global_batch_size",
                "param_dtype",
                "opt_state_dtype",
                "param_rounding",
                "fp8_scaling",
                "fp8_amax_history_len",
                "mtp_loss_weight",
                "offload",
                "fp8_exclude",
                "num_layers_at_start_in_bf16",
                "num_layers_at_end_in_bf16",
                "initial_loss_scale",
                "loss_scale_window",
                "loss_norm",
                "ce_vocab_chunk",
                "batch_ramp",
                "grad_sync",
                "reduce_dtype",
                "on_nonfinite",
                "on_spike",
                "spike_threshold",
                "spike_warmup",
                "nan_consecutive_max",
                "max_rollbacks",
                "rerun_bad_steps",
                "verify_interval",
                "iterations_to_skip",
                "exit_interval",
                "exit_duration_in_mins",
                "xla_flags",
                "compilation_cache_dir",
                "executable",
                "check_weight_hash_across_dp_replicas_interval",
                "manual_gc_interval",
                "train_sync_interval",
                "watchdog_setup_sec",
                "watchdog_step_sec",
                "hang_timeout",
            )
        ),
        *(
            ("data", key)
            for key in (
                "dataset_type",
                "token_dtype",
                "verify",
                "on_change",
                "eos_token_id",
                "shuffle",
                "order",
                "torch_ranks",
                "hf_dataset_conversations",
                "overlong",
                "cache_dir",
                "cache_gb",
                "phase_lr_lag",
                "verify",
            )
        ),
        ("plugins", "modules"),
        ("plugins", "callbacks"),
        *(
            ("optimizer", key)
            for key in ("lr_scale_rule", "lr_base_batch", "decay_patterns", "no_decay_patterns")
        ),
        ("optimizer", "skip_idle_experts"),
        *(("scheduler", key) for key in ("warmup_offset", "unit")),
        *(("early_stop", key) for key in EarlyStopConfig.model_fields),
        *(("outer_optimizer", key) for key in OuterOptimizerConfig.model_fields),
        *(("lora", key) for key in LoraConfig.model_fields),
        *(("dpo", key) for key in DpoConfig.model_fields),
        *(("distillation", key) for key in DistillationConfig.model_fields),
        *(("train", key) for key in ("objective", "outer_interval", "outer_dtype")),
        *(
            ("model", key)
            for key in (
                "sliding_window",
                "attention_chunk_size",
                "attention_pattern",
                "local_rope_theta",
                "rope_pattern",
                "o_bias",
                "attention_scale",
                "attn_logit_softcap",
                "attention_sinks",
                "attention_output_gate",
                "swiglu_limit",
                "norm_placement",
                "norm_unit_offset",
                "norm_bias",
                "parallel_residual",
                "shared_norm",
                "clip_qkv",
                "attn_temperature_scale",
                "attn_temperature_floor",
                "attn_temperature_type",
                "qk_l2_norm",
                "qk_norm_type",
                "qk_norm_after_rotary",
                "moe_score_inputs",
                "gated_mlp",
                "mlp_bias",
                "mlp_multipliers",
                "mixer_multipliers",
                "embedding_multiplier",
                "residual_multiplier",
                "logits_scaling",
                "final_logit_softcap",
                "position_embedding",
                "partial_rotary_factor",
                "qk_norm_scope",
                "moe_first_dense_layers",
                "moe_norm_topk",
                "moe_routed_scaling",
                "moe_groups",
                "moe_top_k_groups",
                "moe_router_bias",
                "moe_bias_update",
                "moe_bias_update_rate",
                "moe_shared_expert_dim",
                "moe_shared_expert_gate",
                "moe_expert_dim",
                "moe_latent_dim",
                "hyper_connections",
                "residual_streams",
                "sinkhorn_iterations",
                "layer_embedding_dim",
                "layer_multipliers",
                "n_kv_shared_layers",
                "kv_shared_ffn_dim",
                "value_norm",
                "moe_separate_norms",
                "moe_expert_scales",
                "moe_backend",
                "gated_delta_net",
                "global_attention",
                "kimi_delta_attention",
                "mamba2",
                "mixer_pattern",
                "latent_attention",
                "short_convolution",
                "moe_group_score",
                "mtp_depth",
                "mtp_mixer",
                "feed_forward_pattern",
                "mamba2",
                "mup_base_width",
                "mup_base_head_dim",
            )
        ),
        *(
            ("distributed", key)
            for key in (
                "pp_chunks",
                "heartbeat_timeout_sec",
                "cp_strategy",
                "elastic_processes",
                "elastic_min_processes",
            )
        ),
        *(("train", f"ema_{key}") for key in ("decay", "dtype", "interval", "start")),
        *(("eval", key) for key in ("batch_size", "functions", "start_step")),
        *(("eval", f"sample_{key}") for key in ("interval", "prompts", "tokens", "temperature")),
        *(("eval", f"activations_{key}") for key in ("interval", "points", "layers", "sequences")),
        *(
            ("checkpoint", key)
            for key in (
                "keep_best_n",
                "best_metric",
                "best_mode",
                "export_interval",
                "export_last",
                "export_weights",
                "branch_from",
                "non_persistent_interval",
                "non_persistent_dir",
                "epoch_interval",
                "replica_interval",
                "replica_dir",
            )
        ),
        *(("metrics", key) for key in ("writers", "peak_tflops")),
        *(
            ("metrics", key)
            for key in (
                "log_format",
                "log_progress",
                "collect",
                "max_attention_logit_interval",
                "prometheus_port",
                "prometheus_address",
            )
        ),
        ("eval", "tasks"),
        *(
            ("eval", f"tasks_{key}")
            for key in (
                "path",
                "core",
                "interval",
                "num_fewshot",
                "limit",
                "batch_size",
                "weights",
            )
        ),
        *(("optimizer", key) for key in ("lr_patterns", "freeze_patterns", "options")),
        ("optimizer", "soap"),
        *(("optimizer", key) for key in ("cautious_weight_decay", "qk_clip")),
        *(
            ("metrics", key)
            for key in (
                "straggler_report_interval",
                "stop_if_detected_straggler",
            )
        ),
        ("profiling", "hosts"),
    }
    every = {(name, key) for name, table in config for key in type(table).model_fields}
    assert every - explicit == own_keys
    assert config.data.datasets[0].weight == 3.0
    assert config.checkpoint.dyn_ckpt_window.stop == 512


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["--train.global_batch_size=64", "--train.batch_size=3"],
        ["--model.rope_scaling={}", "--checkpoint.dyn_ckpt_window.stop=9", "--optimizer.lr=1e-7"],
        ["--optimizer.lr_patterns={'a.b': 1, 'ü': 2}", '--data.file_pattern=a"b\\c\n\x7f😀'],
        ["--train.batch_ramp={'global_batch_size':8}", "--train.global_batch_size=8"],
        [
            "--data.datasets=[{'path':'a'},{'hf_name':'b'}]",
            "--data.phases={'dataset_weights':{'a':1}}",
        ],
    ],
)
def test_toml_round_trips(load, overrides):
    config = load_config(None, overrides)
    again = load(config.to_toml())
    assert again == config
    assert again.to_toml() == config.to_toml()


def test_full_file_round_trips(load):
    assert load(load_config(FULL).to_toml()) == load_config(FULL)


def test_resolved_toml_comments_out_unset_keys(load):
    config = load_config(None, ["--train.global_batch_size=64"])
    text = config.to_toml()
    keys = [key for _, table in config for key in type(table).model_fields]
    shown = [line.removeprefix("# ").split(" ")[0] for line in text.splitlines() if " " in line]
    assert shown == keys
    assert answers(load(text)) == []
    assert not load(text).is_set("train.batch_size")


def test_answers_cover_only_keys_set_by_user():
    assert answers(load_config(None)) == []
    config = load_unresolved(None, ["--optimizer.fused", "--data.pin_memory=false"])
    assert config.notes == (
        "optimizer.fused has no effect: XLA fuses the update of all parameters",
        "data.pin_memory has no effect: batches are transferred to the devices before the step "
        "that needs them",
    )


def test_answers_explain_alias_values():
    config = load_unresolved(None, ["--checkpoint.async_mode=async_with_pinned_mem"])
    assert config.known.checkpoint.async_mode == "async"
    assert config.notes == (
        'checkpoint.async_mode = "async_with_pinned_mem" is the same as "async"',
    )


def test_answers_cover_all_torch_only_keys():
    answered_keys = {line.split(" ")[0] for line in load_unresolved(FULL).notes}
    assert {"train.compile_model", "distributed.backend", "data.pin_memory"} <= answered_keys
    assert len(answered_keys) == 9


def test_errors_are_user_errors_without_cause():
    with pytest.raises(UserError) as caught:
        load_config(None, ["--train.seed=x"])
    assert caught.value.__suppress_context__


README_DATASETS = (
    '[{path = "data/web", name = "web", weight = 3}, {path = "data/code", name = "code"}]'
)


def test_settings_accept_toml_syntax():
    in_toml = load_config(None, [f"--data.datasets={README_DATASETS}"])
    as_python = load_config(None, [
        "--data.datasets=[{'path': 'data/web', 'name': 'web', 'weight': 3}, "
        "{'path': 'data/code', 'name': 'code'}]",
    ])  # fmt: skip
    assert in_toml.data.datasets == as_python.data.datasets
    phases = "--data.phases=[{start_step = 3, dataset_weights = {code = 3}}]"
    again = load_config(None, [f"--data.datasets={README_DATASETS}", phases])
    assert again.data.phases[0].dataset_weights == {"code": 3}


@pytest.mark.parametrize("text", ["[a", "{x = 1", "{x = 1}", '[1]\nother = "key"', "[" * 5000])
def test_text_with_brackets_stays_text(text):
    assert load_config(None, [f"--checkpoint.load_path={text}"]).checkpoint.load_path == text


@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8])
def test_byte_order_mark_is_ignored(tmp_path, mark):
    path = tmp_path / "x.toml"
    path.write_bytes(mark + b"[train]\nmax_steps = 7\n")
    assert load_config(path).train.max_steps == 7


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le"])
def test_utf_16_is_named_in_message(tmp_path, encoding):
    path = tmp_path / "x.toml"
    mark = codecs.BOM_UTF16_LE if encoding == "utf-16-le" else b""
    path.write_bytes(mark + "[train]".encode(encoding))
    with pytest.raises(UserError, match="it is UTF-16; save it as UTF-8"):
        load_config(path)
